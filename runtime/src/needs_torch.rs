//! Schedules, loss scaling, top-k and optimizers, against PyTorch's own.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::collective::{Group, GroupConfig};
use crate::gradient::compress::{Bucket, Codec, Reduced};
use crate::gradient::{Scaler, ScalerConfig};
use crate::random::SplitMix;
use crate::schedule::{At, Base, Scaling, Schedule, Span, WarmUp, WarmUpFrom};
use crate::train::optim::{Adam, Sgd};

/// Output of a script, as a list of numbers in JSON.
pub(crate) fn python(script: &str, input: &[u8]) -> Vec<f64> {
    let python = std::env::var("MUSTER_TEST_PYTHON")
        .expect("MUSTER_TEST_PYTHON names a Python with PyTorch");
    let mut child = Command::new(python)
        .args(["-c", script])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input).unwrap();
    drop(stdin);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    serde_json::from_slice(&output.stdout).unwrap()
}

/// The rates of 100 steps by a scheduler of `torch.optim.lr_scheduler`; an epoch is a step.
fn check_schedule(scheduler: &str, base: Base, warm_up: Option<WarmUp>) {
    let script = format!(
        "import json, torch
from torch.optim.lr_scheduler import *
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
scheduler = {scheduler}
rates = []
for _ in range(100):
    rates.append(optimizer.param_groups[0]['lr'])
    optimizer.step()
    scheduler.step()
print(json.dumps(rates))"
    );
    let schedule = Schedule {
        rate: 0.1,
        base,
        scaling: Scaling::None,
        warm_up,
    };
    for (step, expected) in (0..).zip(python(&script, b"")) {
        let epoch = step as f64;
        let got = schedule.at(At { step, epoch }, 256);
        assert!(
            (got - expected).abs() < 1e-12,
            "{scheduler}, step {step}: {got}, not {expected}"
        );
    }
}

#[test]
fn schedules_are_those_of_torch() {
    let (epochs, steps) = (Span::Epochs, Span::Steps);
    check_schedule(
        "MultiStepLR(optimizer, [30, 60, 80], gamma=0.1)",
        Base::Step {
            at: vec![epochs(30.0), steps(60), epochs(80.0)],
            factor: 0.1,
        },
        None,
    );
    check_schedule(
        "CosineAnnealingWarmRestarts(optimizer, T_0=100, eta_min=0.02)",
        Base::Cosine {
            period: epochs(100.0),
            floor: 0.2,
            growth: None,
        },
        None,
    );
    check_schedule(
        "CosineAnnealingWarmRestarts(optimizer, T_0=10, T_mult=2, eta_min=0.001)",
        Base::Cosine {
            period: steps(10),
            floor: 0.01,
            growth: Some(2.0),
        },
        None,
    );
    check_schedule(
        "LinearLR(optimizer, start_factor=0.2, total_iters=12)",
        Base::Constant,
        Some(WarmUp {
            over: steps(12),
            from: WarmUpFrom::Part(0.2),
        }),
    );
}

#[test]
fn loss_scaling_is_that_of_torch() {
    let pattern = "ggsggggggsssgggsgggggggggg";
    let script = format!(
        "import json, torch
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter], lr=0.1)
scaler = torch.amp.GradScaler('cpu', init_scale=1024.0, growth_interval=3)
scales = []
for step in '{pattern}':
    optimizer.zero_grad()
    scaler.scale((parameter * (1.0 if step == 'g' else float('inf'))).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scales.append(scaler.get_scale())
print(json.dumps(scales))"
    );
    let mut scaler = Scaler::new(ScalerConfig {
        initial: 1024.0,
        interval: 3,
        ..ScalerConfig::default()
    });
    let scales: Vec<f64> = pattern
        .chars()
        .map(|step| {
            let gradient = if step == 'g' { 1.0 } else { f32::INFINITY };
            scaler.commit(Scaler::judge(&[&[gradient]]));
            f64::from(scaler.scale())
        })
        .collect();
    assert_eq!(scales, python(&script, b""));
}

#[test]
fn top_k_chooses_what_torch_chooses() {
    const LEN: usize = 200_000;
    let mut random = SplitMix::new(8);
    // Distinct, so that no choice is among equal ones.
    let mut values: Vec<f32> = (0..LEN).map(|i| (i as f32 + 1.0) / LEN as f32).collect();
    for i in (1..LEN).rev() {
        values.swap(i, random.below(i as u64 + 1) as usize);
    }
    values
        .iter_mut()
        .step_by(3)
        .for_each(|value| *value = -*value);
    (values[77], values[999]) = (f32::NAN, f32::NEG_INFINITY);
    let script = "import json, sys, torch
values = torch.frombuffer(bytearray(sys.stdin.buffer.read()), dtype=torch.float32)
print(json.dumps(sorted(torch.topk(values.abs(), len(values) // 100).indices.tolist())))";
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let expected = python(script, &bytes);

    let mut group = Group::form(&GroupConfig::alone()).unwrap();
    let codec = Codec::TopK {
        density: 0.01,
        momentum: None,
    };
    let mut bucket = Bucket::new(codec, LEN, 0).unwrap();
    let mut reduced = Reduced::default();
    bucket.reduce(&mut group, &values, &mut reduced).unwrap();
    let sent = (0..LEN).filter(|i| reduced.sum[*i] != 0.0);
    assert_eq!(sent.map(|i| i as f64).collect::<Vec<_>>(), expected);
}

/// One step of an optimizer: parameters, gradient, rate.
type Step = Box<dyn FnMut(&mut [f32], &[f32], f64)>;

/// Nine steps of 500 parameters, at a rate that changes, with gradients of all sizes.
fn check_optimizers(optimizers: Vec<(&str, Step)>) {
    const LEN: usize = 500;
    const STEPS: usize = 9;
    let theirs: Vec<String> = optimizers
        .iter()
        .map(|(optimizer, _)| format!("lambda p: torch.optim.{optimizer}"))
        .collect();
    let script = format!(
        "import json, sys, torch
numbers = torch.frombuffer(bytearray(sys.stdin.buffer.read()), dtype=torch.float32).reshape({STEPS} + 1, {LEN})
seen = []
for make in [{}]:
    parameter = torch.nn.Parameter(numbers[0].clone())
    optimizer = make([parameter])
    for i in range({STEPS}):
        optimizer.param_groups[0]['lr'] = 0.01 * (1 + i % 3)
        parameter.grad = numbers[i + 1].clone()
        optimizer.step()
        seen += parameter.tolist()
print(json.dumps(seen))",
        theirs.join(", ")
    );
    let mut random = SplitMix::new(4);
    let mut numbers = vec![0.0f32; (STEPS + 1) * LEN];
    numbers.fill_with(|| random.signed_unit());
    let gradients = numbers.iter_mut().skip(LEN);
    gradients.step_by(7).for_each(|value| *value *= 1000.0);
    let gradients = numbers.iter_mut().skip(LEN);
    gradients.step_by(11).for_each(|value| *value *= 1e-6);
    let expected = python(&script, bytemuck::cast_slice(&numbers));
    assert_eq!(expected.len(), optimizers.len() * STEPS * LEN);
    for ((optimizer, mut step), expected) in
        optimizers.into_iter().zip(expected.chunks(STEPS * LEN))
    {
        let (initial, gradients) = numbers.split_at(LEN);
        let mut parameters = initial.to_vec();
        let steps = gradients.chunks(LEN).zip(expected.chunks(LEN));
        for (i, (gradient, expected)) in steps.enumerate() {
            step(&mut parameters, gradient, 0.01 * (1 + i % 3) as f64);
            for (at, (got, expected)) in parameters.iter().zip(expected).enumerate() {
                assert!(
                    (f64::from(*got) - expected).abs() < 2e-6 * (1.0 + expected.abs()),
                    "{optimizer}, step {i}, parameter {at}: {got}, not {expected}"
                );
            }
        }
    }
}

#[test]
fn optimizers_are_those_of_torch() {
    let sgd = || Sgd::new(500);
    let adam = || Adam::new(500);
    let decoupled = || Adam::decoupled(500);
    fn descends(mut sgd: Sgd) -> Step {
        Box::new(move |p, g, rate| sgd.step(p, g, rate))
    }
    fn adapts(mut adam: Adam) -> Step {
        Box::new(move |p, g, rate| adam.step(p, g, rate))
    }
    check_optimizers(vec![
        ("SGD(p)", descends(sgd())),
        ("SGD(p, maximize=True)", descends(sgd().maximize())),
        (
            "SGD(p, weight_decay=0.1)",
            descends(sgd().weight_decay(0.1)),
        ),
        ("SGD(p, momentum=0.9)", descends(sgd().momentum(0.9))),
        (
            "SGD(p, momentum=0.8, dampening=0.3, weight_decay=0.05)",
            descends(sgd().momentum(0.8).dampening(0.3).weight_decay(0.05)),
        ),
        (
            "SGD(p, momentum=0.9, nesterov=True, weight_decay=0.05, maximize=True)",
            descends(sgd().momentum(0.9).nesterov().weight_decay(0.05).maximize()),
        ),
        ("Adam(p)", adapts(adam())),
        (
            "Adam(p, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1, maximize=True)",
            adapts(
                adam()
                    .betas(0.8, 0.95)
                    .epsilon(1e-3)
                    .weight_decay(0.1)
                    .maximize(),
            ),
        ),
        (
            "Adam(p, betas=(0.4, 0.9), amsgrad=True)",
            adapts(adam().betas(0.4, 0.9).amsgrad()),
        ),
        ("AdamW(p)", adapts(decoupled())),
        (
            "AdamW(p, weight_decay=0.2, amsgrad=True, maximize=True)",
            adapts(decoupled().weight_decay(0.2).amsgrad().maximize()),
        ),
    ]);
}
