//! A softmax regression on the digits, trained by three ranks through every codec.

use super::*;
use crate::collective::Op;
use crate::data::{Batch, Sampler, SamplerConfig, Tail};
use crate::demo::{Digits, Sample};
use crate::gradient::{Accumulator, Scaler, ScalerConfig, Verdict};
use crate::live::Share;
use crate::schedule::{At, Base, Scaling, Schedule, Span, WarmUp, WarmUpFrom};

const INPUTS: usize = 64;
const CLASSES: usize = 10;
/// Weights, input by class, then biases.
const LEN: usize = (INPUTS + 1) * CLASSES;
const EPOCHS: u64 = 12;

fn scores(parameters: &[f32], sample: &Sample) -> [f32; CLASSES] {
    let mut scores = [0.0; CLASSES];
    let inputs = sample.pixels.iter().chain(&[1.0]);
    for (pixel, row) in inputs.zip(parameters.chunks_exact(CLASSES)) {
        for (score, weight) in scores.iter_mut().zip(row) {
            *score += pixel * weight;
        }
    }
    scores
}

/// Adds the gradient of the cross-entropy, and returns the loss.
fn backward(parameters: &[f32], sample: &Sample, gradient: &mut [f32]) -> f32 {
    let scores = scores(parameters, sample);
    let highest = scores.iter().copied().fold(f32::MIN, f32::max);
    let mut delta = scores.map(|score| (score - highest).exp());
    let total: f32 = delta.iter().sum();
    let label = usize::from(sample.digit);
    let loss = total.ln() + highest - scores[label];
    delta.iter_mut().for_each(|value| *value /= total);
    delta[label] -= 1.0;
    let inputs = sample.pixels.iter().chain(&[1.0]);
    for (pixel, row) in inputs.zip(gradient.chunks_exact_mut(CLASSES)) {
        for (to, delta) in row.iter_mut().zip(delta) {
            *to += pixel * delta;
        }
    }
    loss
}

fn mean_loss(parameters: &[f32], samples: &[Sample]) -> f32 {
    let mut unused = vec![0.0; LEN];
    let all = samples
        .iter()
        .map(|sample| backward(parameters, sample, &mut unused));
    all.sum::<f32>() / samples.len() as f32
}

fn correct(parameters: &[f32], samples: &[Sample]) -> usize {
    let right = |sample: &&Sample| {
        let scores = scores(parameters, sample);
        let own = scores[usize::from(sample.digit)];
        scores.iter().all(|score| *score <= own)
    };
    samples.iter().filter(right).count()
}

/// One rank's training, with all the parts of this module together; the parameters.
fn train(mut group: Group, codec: &Codec, digits: &Digits, momentum: f32) -> Vec<f32> {
    let config = SamplerConfig {
        samples: digits.train.len() as u64,
        seed: 1,
        batch: Batch::Global(96),
        microbatch: 8,
        tail: Tail::Keep,
    };
    let mut sampler = Sampler::new(config).unwrap();
    let schedule = Schedule {
        rate: 0.3,
        base: Base::Cosine {
            period: Span::Epochs(EPOCHS as f64),
            floor: 0.05,
            growth: None,
        },
        scaling: Scaling::None,
        warm_up: Some(WarmUp {
            over: Span::Steps(10),
            from: WarmUpFrom::Part(0.1),
        }),
    };
    let share = Share {
        entered: (0..group.world()).collect(),
        rank: group.rank(),
        world: group.world(),
    };
    let mut scaler = Scaler::new(ScalerConfig {
        initial: 1024.0,
        ..ScalerConfig::default()
    });
    let mut bucket = bucket(codec, LEN);
    let (mut parameters, mut velocity) = (vec![0.0; LEN], vec![0.0; LEN]);
    let (mut sum, mut own) = (Accumulator::new(LEN), vec![0.0; LEN]);
    let mut reduced = Reduced::default();
    let mut step = 0;
    while sampler.state().epoch < EPOCHS {
        let plan = sampler.plan(share.entered.len());
        let mine = plan.part(&share);
        sum.begin(step, plan.epoch(), plan.positions_of(mine.clone()));
        for i in mine {
            let mut gradient = vec![0.0; LEN];
            for index in plan.indices(i) {
                backward(&parameters, &digits.train[index as usize], &mut gradient);
            }
            gradient
                .iter_mut()
                .for_each(|value| *value *= scaler.scale());
            sum.add(plan.positions_of(i..i + 1), &gradient).unwrap();
        }
        scaler.unscale(sum.sum(), &mut own);
        bucket.reduce(&mut group, &own, &mut reduced).unwrap();
        let mut samples = [0];
        group
            .all_reduce(Op::Sum, &[sum.samples()], &mut samples)
            .unwrap();
        assert_eq!(samples[0], plan.samples());

        let verdict = Scaler::judge(&[&reduced.sum]);
        assert_eq!(verdict, Verdict::Apply);
        scaler.commit(verdict);
        bucket.commit(&reduced);
        let rate = schedule.at(
            At {
                step,
                epoch: sampler.epochs(),
            },
            plan.samples(),
        ) as f32;
        for ((parameter, velocity), sum) in
            parameters.iter_mut().zip(&mut velocity).zip(&reduced.sum)
        {
            *velocity = momentum * *velocity + sum / samples[0] as f32;
            *parameter -= rate * *velocity;
        }
        sampler.commit(&plan).unwrap();
        step += 1;
    }
    parameters
}

#[test]
fn every_codec_learns_the_digits_as_well_as_none() {
    let digits = Digits::load().unwrap();
    let result = |codec: &Codec, momentum: f32| {
        let ranks = on_ranks(3, HOSTS[0], |group| train(group, codec, &digits, momentum));
        assert!(
            ranks.iter().all(|rank| bits(rank) == bits(&ranks[0])),
            "{codec:?}"
        );
        let loss = mean_loss(&ranks[0], &digits.train);
        (loss, correct(&ranks[0], &digits.held_out))
    };
    let (best, most) = result(&Codec::None, 0.9);
    assert!(best < 0.16 && most > 330, "{best} {most}");
    let int8 = |feedback| Codec::Int8 {
        block: 32,
        feedback,
    };
    let topk = |density, momentum| Codec::TopK { density, momentum };
    let shapes = vec![shape(INPUTS, CLASSES), shape(CLASSES, 1)];
    for (codec, momentum, bound) in [
        (Codec::Fp16, 0.9, 0.002),
        (Codec::Bf16, 0.9, 0.002),
        (int8(false), 0.9, 0.005),
        (int8(true), 0.9, 0.005),
        (topk(0.05, None), 0.9, 0.03),
        // Masking cuts the momentum of what is sent, so it is slower in so few steps.
        (topk(0.05, Some(0.9)), 0.0, 0.18),
        (Codec::PowerSgd { rank: 2, shapes }, 0.9, 0.03),
    ] {
        let (loss, right) = result(&codec, momentum);
        println!("{codec:?}: loss {loss} ({best}), {right} of 359 ({most})");
        assert!(loss < best + bound, "{codec:?}: {loss} is far from {best}");
        assert!(right + 6 >= most, "{codec:?}: {right} of 359, not {most}");
    }
}
