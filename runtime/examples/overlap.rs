//! Time saved by reducing gradients while backward goes on: `muster run --standalone --nproc-per-node 2 --
//! target/release/examples/overlap --steps 20`.
//!
//! Trains a perceptron of `--layers` layers, `--width` wide, three times over: without overlap, by hooks and in
//! stages. Rank 0 prints the median step of each, the part of it that waited for other ranks, and whether all three
//! ended with the same bits. `--sharing tcp` keeps ranks of one host from sharing memory (`memory`); `--format json`
//! says it for programs (`text`).

use std::error::Error;
use std::process::ExitCode;
use std::time::Duration;

use muster_runtime::WorkerEnv;
use muster_runtime::collective::{Group, GroupConfig, Sharing};
use muster_runtime::data::{Batch, SamplerConfig, Tail};
use muster_runtime::live::{Share, Training};
use muster_runtime::schedule::{Base, Scaling, Schedule, Span};
use muster_runtime::torch::{Net, Options, Overlap, Parts, Rule, TorchModel, rows};
use muster_runtime::train::{BUCKET_SIZES, Config, Feed, News, Parallel, Times};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let (mut steps, mut layers, mut width, mut batch) = (20u64, 8i64, 1024i64, 64u64);
    let (mut sharing, mut json) = (Sharing::Auto, false);
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let value = args.next().ok_or(format!("{flag} wants a value"))?;
        match flag.as_str() {
            "--steps" => steps = value.parse()?,
            "--layers" => layers = value.parse()?,
            "--width" => width = value.parse()?,
            "--batch" => batch = value.parse()?,
            "--sharing" if value == "tcp" => sharing = Sharing::Off,
            "--sharing" if value == "memory" => sharing = Sharing::Auto,
            "--format" if value == "json" => json = true,
            "--format" if value == "text" => json = false,
            _ => return Err(format!("unknown: {flag} {value}").into()),
        }
    }
    let env = WorkerEnv::from_env()?;
    let mut group = Group::form(&GroupConfig {
        sharing,
        ..GroupConfig::from_env(&env)
    })?;
    let ranks = u64::from(group.world());
    let share = Share {
        entered: (0..group.world()).collect(),
        rank: group.rank(),
        world: group.world(),
    };
    let mut states = Vec::new();
    for overlap in [Overlap::None, Overlap::Hooks, Overlap::Staged] {
        let samples = batch * ranks;
        let sampler = SamplerConfig {
            samples,
            seed: 1,
            batch: Batch::Global(samples),
            microbatch: batch,
            tail: Tail::Keep,
        };
        let schedule = Schedule {
            rate: 0.01,
            base: Base::Constant,
            scaling: Scaling::None,
            warm_up: None,
        };
        let config = Config::new(sampler, Span::Steps(steps), schedule);
        let model = model(layers, width, samples, overlap)?;
        let parameters = model.flat().numel();
        let mut training = Parallel::new(model, Feed::direct(|_| Ok(())), config)?;
        training.restore(&mut group)?;
        for step in 0..steps {
            let results = training.results(step, &share, &mut group)?;
            training.commit(step, &results);
            training.recycle(results);
        }
        let mut times: Vec<Times> = Vec::new();
        for news in training.take_news() {
            if let News::Step(report) = news {
                times.extend(report.times);
            }
        }
        if env.rank == 0 {
            let median = |of: fn(&Times) -> Duration| {
                let mut all: Vec<Duration> = times.iter().skip(2).map(of).collect();
                all.sort_unstable();
                let middle = all.get(all.len() / 2).copied().unwrap_or_default();
                middle.as_secs_f64() * 1e3
            };
            let parts = [
                ("step", median(|t| t.total)),
                ("computing", median(|t| t.computing)),
                ("communicating", median(|t| t.communicating)),
                ("waiting", median(|t| t.exposed)),
                ("updating", median(|t| t.updating)),
            ];
            if json {
                let parts = parts.map(|(part, ms)| format!("\"{part}\": {ms:.3}"));
                println!("{{\"overlap\": \"{overlap:?}\", {}}}", parts.join(", "));
            } else {
                let parts = parts.map(|(part, ms)| format!("{part} {ms:.1}"));
                println!(
                    "{overlap:?}, in ms: {} ({:.1} MB of gradients, {ranks} ranks)",
                    parts.join(", "),
                    parameters as f64 * 4e-6,
                );
            }
        }
        states.push(blake3::hash(&training.encode_state()));
    }
    if env.rank == 0 {
        let same = states.iter().all(|state| *state == states[0]);
        match (json, same) {
            (true, _) => println!("{{\"same\": {same}}}"),
            (false, true) => println!("all three ended with the same bits"),
            (false, false) => println!("the results DIFFER"),
        }
    }
    Ok(())
}

fn model(
    layers: i64,
    width: i64,
    samples: u64,
    overlap: Overlap,
) -> Result<TorchModel<()>, Box<dyn Error>> {
    tch::manual_seed(1);
    let mut net = Net::new(Device::Cpu);
    for layer in 0..layers {
        net.stage(&format!("layer{layer}"), |path| {
            let layer = nn::linear(path, width, width, Default::default());
            move |x, _train| layer.forward(x).relu()
        });
    }
    let data = || Tensor::randn([samples as i64, width], (Kind::Float, Device::Cpu));
    let parts = Parts {
        net,
        loss: Box::new(|output, target| {
            output.mse_loss(target, tch::Reduction::Mean)
                * output.size().first().copied().unwrap_or(1)
        }),
        train: rows(data(), data()),
        held_out: rows(data(), data()),
        score: None,
    };
    let options = Options {
        // One bucket a layer, or nearly so.
        buckets: [BUCKET_SIZES[0], BUCKET_SIZES[0]],
        overlap,
        ..Options::new(Rule::momentum(0.9))
    };
    Ok(TorchModel::new(parts, &options)?)
}
