mod horovod;
mod model;
mod needs_torch;
mod optimizer;
mod ranks;
mod saving;

use std::sync::Mutex;

use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use super::*;
use crate::collective::{Group, GroupConfig, Sharing};
use crate::random::SplitMix;
use crate::testing;
use crate::train::{Gradients, Measured, Micro, Model};

/// Numbers that look random, in a tensor.
fn noise(size: &[i64], seed: u64) -> Tensor {
    let mut random = SplitMix::new(seed);
    let len = size.iter().product::<i64>();
    let values: Vec<f32> = (0..len).map(|_| random.signed_unit()).collect();
    Tensor::from_slice(&values).view(size)
}

fn values(tensor: &Tensor) -> Vec<f32> {
    let mut out = vec![0.0; tensor.numel()];
    tensor.copy_data(&mut out, tensor.numel());
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Three stages, with a convolution, a batch normalization, a frozen layer, and a variable that nothing uses.
fn net(seed: u64) -> Net {
    // The generator is the process's, which is that of all ranks here.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap();
    tch::manual_seed(seed.cast_signed());
    let mut net = Net::new(Device::Cpu);
    net.stage("first", |path| {
        let conv = nn::conv2d(path / "conv", 1, 3, 3, Default::default());
        let norm = nn::batch_norm2d(path / "norm", 3, Default::default());
        move |x, train| conv.forward(x).apply_t(&norm, train).relu()
    });
    net.stage("second", |path| {
        let layer = nn::linear(path / "layer", 108, 17, Default::default());
        let _unused = path.zeros("unused", &[5]);
        move |x, _train| layer.forward(&x.flatten(1, -1)).relu()
    });
    net.stage("third", |path| {
        let layer = nn::linear(path / "layer", 17, 4, Default::default());
        move |x, _train| layer.forward(x)
    });
    net
}

const SAMPLES: i64 = 60;

fn parts(net: Net) -> Parts<()> {
    let input = noise(&[SAMPLES, 1, 8, 8], 5);
    let target = noise(&[SAMPLES], 6)
        .abs()
        .g_mul_scalar(3.99)
        .to_kind(Kind::Int64);
    let copy = |tensor: &Tensor| tensor.shallow_clone();
    Parts {
        net,
        loss: Box::new(|output, target| {
            output.cross_entropy_loss::<Tensor>(target, None, tch::Reduction::Sum, -100, 0.0)
        }),
        train: rows(copy(&input), copy(&target)),
        held_out: rows(input, target),
        score: Some(Score {
            len: 1,
            of: Box::new(|output, target| {
                let right = output.argmax(-1, false).eq_tensor(target);
                vec![right.sum(Kind::Int64).double_value(&[])]
            }),
        }),
    }
}

fn model(seed: u64, overlap: Overlap) -> TorchModel<()> {
    let options = Options {
        // Several buckets.
        buckets: [10, 200],
        overlap,
        ..Options::new(Rule::momentum(0.9))
    };
    TorchModel::new(parts(net(seed)), &options).unwrap()
}

fn micro(indices: std::ops::Range<u64>) -> Micro<()> {
    Micro {
        step: 0,
        epoch: 0,
        number: 0,
        samples: vec![(); indices.clone().count()],
        indices: indices.collect(),
        seed: 3,
        scale: 1.0,
        last: false,
    }
}

/// Backward of some microbatches into memory of one's own: the sums by bucket, and what was measured.
fn backward(model: &mut TorchModel<()>, micros: &[Micro<()>]) -> (Vec<Vec<f32>>, Vec<Measured>) {
    let ranges = model.buckets();
    let mut buffers: Vec<Vec<f32>> = ranges.iter().map(|range| vec![0.0; range.len()]).collect();
    let mut measured = Vec::new();
    for micro in micros {
        let mut into = Gradients::new(&ranges, &mut buffers);
        measured.push(model.backward(micro, &mut into).unwrap());
    }
    (buffers, measured)
}

/// Runs `body` on every rank of a new group that shares memory, each in a thread.
fn on_ranks<T: Send>(world: u32, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    testing::on_ranks(world, |_| Sharing::Auto, body)
}
