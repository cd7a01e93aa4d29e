//! Common parts of the examples that train: their flags, how they train, and what they say.

use std::cell::Cell;
use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use muster_runtime::Session;
use muster_runtime::data::{Batch, SamplerConfig, Tail};
use muster_runtime::gradient::compress::Codec;
use muster_runtime::schedule::{Base, Scaling, Schedule, Span, WarmUp, WarmUpFrom};
use muster_runtime::torch::{self, Overlap, Rule, TorchModel};
use muster_runtime::train::{
    Boundary, BoxError, Codecs, Config, Ending, Evaluation, Feed, Files, HeldOut, Hooks, Model,
    Options, Parallel, Place, Report, Trainer,
};
use tch::Device;

const HELP: &str = "
  --steps N, --batch N   how long; samples of a step over all ranks
  --rate R               the learning rate at its highest
  --seed N               of initial values and of the order of samples
  --codec NAME           how gradients travel: none, fp16, bf16, int8, topk:DENSITY
  --overlap WAY          when they are reduced: hooks, staged, none
  --save-every N         how often the state is saved, for the day when every rank dies: to the job's store (muster run --store),
                         or without one to --checkpoints
  --checkpoints DIR      a directory for a job without a store
  --eval-every N, --report-every N, --pause-ms N
  --cpu                  not on a GPU
";

/// Flags of every example.
#[derive(Clone, Debug)]
pub(crate) struct Args {
    pub(crate) seed: u64,
    pub(crate) device: Device,
    steps: u64,
    /// Samples of a step, over all ranks.
    batch: u64,
    rate: f64,
    codec: Codec,
    overlap: Overlap,
    save_every: u64,
    /// Where one rank saves the state, in a job without a store.
    checkpoints: Option<PathBuf>,
    eval_every: u64,
    report_every: u64,
    /// After each step.
    pause: Duration,
    /// Other flags, by name.
    more: Vec<(&'static str, i64)>,
}

/// Settings of an example where its flags say nothing else.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Defaults {
    pub(crate) steps: u64,
    pub(crate) batch: u64,
    pub(crate) rate: f64,
    pub(crate) eval_every: u64,
    /// The example's own flags.
    pub(crate) more: &'static [(&'static str, i64)],
}

impl Args {
    /// `None`: help was asked for, and given.
    pub(crate) fn parse(defaults: &Defaults) -> Result<Option<Args>, Box<dyn Error>> {
        let mut args = Args {
            seed: 1,
            device: Device::cuda_if_available(),
            steps: defaults.steps,
            batch: defaults.batch,
            rate: defaults.rate,
            codec: Codec::None,
            overlap: Overlap::Hooks,
            save_every: 100,
            checkpoints: None,
            eval_every: defaults.eval_every,
            report_every: 20,
            pause: Duration::ZERO,
            more: defaults.more.to_vec(),
        };
        let mut words = std::env::args().skip(1);
        while let Some(flag) = words.next() {
            let mut value = || words.next().ok_or(format!("{flag} wants a value"));
            match flag.as_str() {
                "--steps" => args.steps = value()?.parse()?,
                "--seed" => args.seed = value()?.parse()?,
                "--batch" => args.batch = value()?.parse()?,
                "--rate" => args.rate = value()?.parse()?,
                "--codec" => args.codec = codec(&value()?)?,
                "--save-every" => args.save_every = value()?.parse()?,
                "--checkpoints" => args.checkpoints = Some(value()?.into()),
                "--eval-every" => args.eval_every = value()?.parse()?,
                "--report-every" => args.report_every = value()?.parse()?,
                "--pause-ms" => args.pause = Duration::from_millis(value()?.parse()?),
                "--cpu" => args.device = Device::Cpu,
                "--overlap" => {
                    args.overlap = match value()?.as_str() {
                        "hooks" => Overlap::Hooks,
                        "staged" => Overlap::Staged,
                        "none" => Overlap::None,
                        other => return Err(format!("no overlap {other:?}").into()),
                    }
                }
                "--help" | "-h" => {
                    print!("Flags:{HELP}");
                    for (name, value) in &args.more {
                        println!("  --{name} N ({value})");
                    }
                    return Ok(None);
                }
                other => {
                    let name = other.strip_prefix("--");
                    let own = args.more.iter_mut().find(|(own, _)| Some(*own) == name);
                    let own =
                        own.ok_or_else(|| format!("unknown flag {other}; --help lists all"))?;
                    own.1 = value()?.parse()?;
                }
            }
        }
        // Several ranks on one host each have a GPU of their own.
        if let Device::Cuda(_) = args.device {
            let local = muster_runtime::WorkerEnv::from_env()?.local_rank as usize;
            let count = usize::try_from(tch::Cuda::device_count())
                .unwrap_or(1)
                .max(1);
            args.device = Device::Cuda(local % count);
        }
        Ok(Some(args))
    }

    /// The value of one of the example's own flags.
    pub(crate) fn get(&self, name: &str) -> i64 {
        let found = self.more.iter().find(|(known, _)| *known == name);
        found.map_or(0, |(_, value)| *value)
    }

    /// The rate rises for 20 steps, and falls as a cosine to `floor` of it.
    pub(crate) fn config(&self, samples: u64, tail: Tail, floor: f64) -> Config {
        let sampler = SamplerConfig {
            samples,
            seed: self.seed,
            batch: Batch::Global(self.batch),
            // Small enough that several ranks have some.
            microbatch: (self.batch / 8).max(1),
            tail,
        };
        let schedule = Schedule {
            rate: self.rate,
            base: Base::Cosine {
                period: Span::Steps(self.steps.max(1)),
                floor,
                growth: None,
            },
            scaling: Scaling::None,
            warm_up: Some(WarmUp {
                over: Span::Steps(20),
                from: WarmUpFrom::Part(0.1),
            }),
        };
        Config {
            codecs: Codecs::All(self.codec.clone()),
            ..Config::new(sampler, Span::Steps(self.steps), schedule)
        }
    }

    pub(crate) fn options(&self, rule: Rule) -> torch::Options {
        torch::Options {
            overlap: self.overlap,
            ..torch::Options::new(rule)
        }
    }
}

fn codec(name: &str) -> Result<Codec, Box<dyn Error>> {
    let density = name.strip_prefix("topk:").map(str::parse);
    Ok(match (name, density) {
        ("none", _) => Codec::None,
        ("fp16", _) => Codec::Fp16,
        ("bf16", _) => Codec::Bf16,
        ("int8", _) => Codec::Int8 {
            block: 256,
            feedback: true,
        },
        (_, Some(density)) => Codec::TopK {
            density: density?,
            momentum: None,
        },
        _ => return Err(format!("no codec {name:?}").into()),
    })
}

/// Trains to the end, on as many ranks as there are, with data that the model has in memory: so many held-out samples,
/// too. The model is given to rank 0 alone, and to nobody if it was stopped before, to be started again.
pub(crate) fn train(
    model: TorchModel<()>,
    config: Config,
    held_out: u64,
    args: &Args,
) -> Result<Option<TorchModel<()>>, Box<dyn Error>> {
    let in_memory = || Feed::direct(|_| Ok(()));
    let every = Span::Steps(args.eval_every.max(1));
    let mut training = Parallel::new(model, in_memory(), config)?.evaluated_by(HeldOut::new(
        in_memory(),
        held_out,
        64,
        every,
    ));
    if let Some(directory) = &args.checkpoints {
        training = training.restored_from(Files(directory.clone()));
    }
    let mut session = Session::from_env()?;
    let rank = Rc::new(Cell::new(None));
    let says = Says {
        rank: rank.clone(),
        every: args.report_every.max(1),
        pause: args.pause,
    };
    let options = Options {
        save_every: Some(args.save_every),
        ..Options::default()
    };
    let trainer = Trainer::new(training).hooks(says).options(options);
    let (ending, training) = trainer.run(session.as_mut())?;
    if ending == Ending::Stopped {
        return Ok(None);
    }
    let steps = training.steps();
    let model = training.into_model();
    let digest = blake3::hash(&model.encode());
    println!("done after {steps} steps, state {}", &digest.to_hex()[..16]);
    Ok((rank.get() == Some(0)).then_some(model))
}

/// Runs an example's main; an error is said with its causes.
pub(crate) fn finish(outcome: Result<(), Box<dyn Error>>) -> ExitCode {
    let Err(error) = outcome else {
        return ExitCode::SUCCESS;
    };
    let mut said = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        said.push_str(&format!(": {error}"));
        cause = error.source();
    }
    eprintln!("{said}");
    ExitCode::FAILURE
}

/// Says how the training goes.
struct Says {
    /// In the newest generation.
    rank: Rc<Cell<Option<u32>>>,
    every: u64,
    pause: Duration,
}

impl Hooks<TorchModel<()>> for Says {
    fn on_regroup(&mut self, _: &TorchModel<()>, place: &Place) -> Result<(), BoxError> {
        let Place {
            generation,
            rank,
            world,
            steps,
            survived,
            ..
        } = place;
        let how = match (survived, steps) {
            (_, 0) => "begins",
            (true, _) => "goes on",
            (false, _) => "joins",
        };
        println!("generation {generation}: rank {rank} of {world} {how} at step {steps}");
        self.rank.set(Some(*rank));
        Ok(())
    }

    fn on_step(&mut self, _: &TorchModel<()>, report: &Report) -> Result<(), BoxError> {
        if self.rank.get() == Some(0) && report.step.is_multiple_of(self.every) {
            let Report {
                step,
                training_loss,
                ranks,
                ..
            } = report;
            let speed = report.throughput().unwrap_or(f64::NAN);
            println!("step {step}: loss {training_loss:.4}, {ranks} ranks, {speed:.0} samples/s");
        }
        std::thread::sleep(self.pause);
        Ok(())
    }

    fn on_evaluate(
        &mut self,
        model: &TorchModel<()>,
        evaluation: &Evaluation,
    ) -> Result<(), BoxError> {
        if self.rank.get() == Some(0) {
            let measured = &evaluation.measured;
            let mut said = format!("held out: loss {:.4}", measured.mean_loss());
            for right in model.scores(measured) {
                let part = 100.0 * right / measured.samples as f64;
                said.push_str(&format!(", {part:.2} % right"));
            }
            println!("{said} (step {})", evaluation.step);
        }
        Ok(())
    }

    fn on_boundary(&mut self, _: &TorchModel<()>, boundary: &Boundary) -> Result<(), BoxError> {
        println!("all ranks stop: {}", boundary.reason);
        Ok(())
    }
}
