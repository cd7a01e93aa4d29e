//! Schedules, loss scaling and top-k, against PyTorch's own.

use std::io::Write;
use std::process::{Command, Stdio};

use crate::collective::{Group, GroupConfig};
use crate::gradient::compress::{Bucket, Codec, Reduced};
use crate::gradient::{Scaler, ScalerConfig};
use crate::random::SplitMix;
use crate::schedule::{At, Base, Scaling, Schedule, Span, WarmUp, WarmUpFrom};

/// What a script prints, as a list of numbers in JSON.
fn python(script: &str, input: &[u8]) -> Vec<f64> {
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
