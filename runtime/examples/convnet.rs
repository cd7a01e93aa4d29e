//! A convolutional net on the handwritten digits that ship with Muster, on as many nodes as there are.
//!
//! `muster run --nnodes 1:3 -- target/debug/examples/convnet --steps 300`. Kill a node: the others go on where they
//! are. Other flags: `--batch`, `--seed`, `--overlap hooks|staged|none`, `--checkpoints DIR`, `--report-every`,
//! `--pause-ms`, `--cpu`.

mod training;

use std::error::Error;
use std::process::ExitCode;

use muster_runtime::data::{Batch, SamplerConfig, Tail};
use muster_runtime::demo::{Digits, Sample};
use muster_runtime::schedule::{Base, Scaling, Schedule, Span, WarmUp, WarmUpFrom};
use muster_runtime::torch::{Net, Options, Parts, Rule, Score, TorchModel, rows};
use muster_runtime::train::{Config, Feed, HeldOut, Parallel};
use tch::nn::{self, Module};
use tch::{Kind, Tensor};
use training::Args;

fn main() -> ExitCode {
    training::finish(run())
}

fn run() -> Result<(), Box<dyn Error>> {
    let args = Args::parse(300, 64, &[("eval-every", 100)])?;
    let digits = Digits::load()?;
    let (train, held_out) = (digits.train.len() as u64, digits.held_out.len() as u64);
    tch::manual_seed(args.seed.cast_signed());
    let parts = Parts {
        net: net(&args),
        loss: Box::new(|scores, digit| {
            scores.cross_entropy_loss::<Tensor>(digit, None, tch::Reduction::Sum, -100, 0.0)
        }),
        train: rows(images(&digits.train), labels(&digits.train)),
        held_out: rows(images(&digits.held_out), labels(&digits.held_out)),
        score: Some(Score {
            len: 1,
            of: Box::new(|scores, digit| {
                let right = scores.argmax(-1, false).eq_tensor(digit);
                vec![right.sum(Kind::Int64).double_value(&[])]
            }),
        }),
    };
    let options = Options {
        overlap: args.overlap,
        ..Options::new(Rule::momentum(0.9))
    };
    let model = TorchModel::new(parts, &options)?;
    let sampler = SamplerConfig {
        samples: train,
        seed: args.seed,
        batch: Batch::Global(args.batch),
        // Small enough that several ranks have some.
        microbatch: (args.batch / 8).max(1),
        tail: Tail::Keep,
    };
    let schedule = Schedule {
        rate: 0.05,
        base: Base::Cosine {
            period: Span::Steps(args.steps.max(1)),
            floor: 0.02,
            growth: None,
        },
        scaling: Scaling::None,
        warm_up: Some(WarmUp {
            over: Span::Steps(20),
            from: WarmUpFrom::Part(0.1),
        }),
    };
    let config = Config::new(sampler, Span::Steps(args.steps), schedule);
    let in_memory = || Feed::direct(|_| Ok(()));
    let every = Span::Steps(args.get("eval-every").unsigned_abs().max(1));
    let training = Parallel::new(model, in_memory(), config)?.evaluated_by(HeldOut::new(
        in_memory(),
        held_out,
        64,
        every,
    ));
    training::train(training, &args)?;
    Ok(())
}

/// Images of 8 x 8 points; ten scores.
fn net(args: &Args) -> Net {
    let mut net = Net::new(args.device);
    for (name, from, to, halve) in [
        ("a", 1, 16, false),
        ("b", 16, 32, true),
        ("c", 32, 64, true),
    ] {
        net.stage(name, |path| {
            let config = nn::ConvConfig {
                padding: 1,
                bias: false,
                ..Default::default()
            };
            let conv = nn::conv2d(path / "conv", from, to, 3, config);
            let norm = nn::batch_norm2d(path / "norm", to, Default::default());
            move |x, train| {
                let x = conv.forward(x).apply_t(&norm, train).relu();
                if halve { x.max_pool2d_default(2) } else { x }
            }
        });
    }
    net.stage("scores", |path| {
        let layer = nn::linear(path, 64 * 4, 10, Default::default());
        move |x, train| layer.forward(&x.flatten(1, -1).dropout(0.2, train))
    });
    net
}

fn images(samples: &[Sample]) -> Tensor {
    let pixels: Vec<f32> = samples.iter().flat_map(|sample| sample.pixels).collect();
    Tensor::from_slice(&pixels).view([-1, 1, 8, 8])
}

fn labels(samples: &[Sample]) -> Tensor {
    let digits: Vec<i64> = samples.iter().map(|sample| sample.digit.into()).collect();
    Tensor::from_slice(&digits)
}
