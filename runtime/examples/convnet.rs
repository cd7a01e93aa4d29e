//! A convolutional net on the handwritten digits that ship with Muster, on as many nodes as there are.
//!
//! `muster run --nnodes 1:3 -- target/release/examples/convnet`. Kill a node: the others go on where they are.
//! `--width` says how many channels the first convolution has; `--help` lists the other flags.

mod training;

use std::error::Error;
use std::process::ExitCode;

use muster_runtime::data::Tail;
use muster_runtime::demo::{Digits, Sample};
use muster_runtime::torch::{Net, Parts, Rule, Score, TorchModel, rows};
use tch::nn::{self, Module};
use tch::{Kind, Tensor};
use training::{Args, Defaults};

const DEFAULTS: Defaults = Defaults {
    steps: 300,
    batch: 64,
    rate: 0.02,
    eval_every: 100,
    more: &[("width", 16)],
};

fn main() -> ExitCode {
    training::finish(run())
}

fn run() -> Result<(), Box<dyn Error>> {
    let Some(args) = Args::parse(&DEFAULTS)? else {
        return Ok(());
    };
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
    let model = TorchModel::new(parts, &args.options(Rule::momentum(0.9)))?;
    let config = args.config(train, Tail::Keep, 0.0);
    training::train(model, config, held_out, &args)?;
    Ok(())
}

/// Images of 8 x 8 points; ten scores.
fn net(args: &Args) -> Net {
    let mut net = Net::new(args.device);
    let width = args.get("width").max(1);
    for (name, from, to, halve) in [
        ("a", 1, width, false),
        ("b", width, 2 * width, true),
        ("c", 2 * width, 4 * width, true),
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
        let layer = nn::linear(path, 4 * width * 4, 10, Default::default());
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
