//! Optimizers against PyTorch's own, over many steps.

use super::optimizer::rules;
use super::*;
use crate::needs_torch::python;

const LEN: usize = 37;
const STEPS: usize = 200;

/// PyTorch's name for a rule.
fn torch_name(rule: &Rule) -> String {
    let truth = |yes: bool| if yes { "True" } else { "False" };
    let adam = |adam: &Adam| {
        let (one, two) = adam.betas;
        format!(
            "betas=({one}, {two}), eps={}, weight_decay={}, amsgrad={}",
            adam.epsilon,
            adam.weight_decay,
            truth(adam.amsgrad)
        )
    };
    match rule {
        Rule::Sgd {
            momentum,
            dampening,
            nesterov,
            weight_decay,
        } => format!(
            "lambda p: SGD([p], momentum={momentum}, dampening={dampening}, nesterov={}, weight_decay={weight_decay}, lr=0)",
            truth(*nesterov)
        ),
        Rule::Adam(a) => format!("lambda p: Adam([p], {}, lr=0)", adam(a)),
        Rule::AdamW(a) => format!("lambda p: AdamW([p], {}, lr=0)", adam(a)),
    }
}

#[test]
fn optimizers_are_those_of_torch() {
    let begin = noise(&[LEN as i64], 4);
    let gradients: Vec<Tensor> = (0..STEPS as u64)
        .map(|step| noise(&[LEN as i64], 100 + step))
        .collect();
    let mut input: Vec<u8> = Vec::new();
    for tensor in std::iter::once(&begin).chain(&gradients) {
        input.extend(values(tensor).iter().flat_map(|value| value.to_le_bytes()));
    }
    let named: Vec<String> = rules().iter().map(torch_name).collect();
    // A rate that changes, as a schedule's does.
    let script = format!(
        "import json, sys, torch
from torch.optim import SGD, Adam, AdamW
all = torch.frombuffer(bytearray(sys.stdin.buffer.read()), dtype=torch.float32).view(-1, {LEN})
said = []
for make in [{}]:
    p = torch.nn.Parameter(all[0].clone())
    optimizer = make(p)
    for step, gradient in enumerate(all[1:]):
        optimizer.param_groups[0]['lr'] = 0.01 / (1 + step / 50)
        p.grad = gradient.clone()
        optimizer.step()
        if step % 20 == 19:
            said += p.tolist()
print(json.dumps(said))",
        named.join(", ")
    );
    let all = python(&script, &input);
    let each = STEPS / 20 * LEN;
    assert_eq!(all.len(), rules().len() * each);
    for (rule, expected) in rules().into_iter().zip(all.chunks(each)) {
        let parameters = begin.copy();
        let mut optimizer = Optimizer::new(rule, LEN, Device::Cpu).unwrap();
        let mut got = Vec::new();
        for (step, gradient) in gradients.iter().enumerate() {
            let rate = 0.01 / (1.0 + step as f64 / 50.0);
            optimizer.step(&parameters, gradient, rate).unwrap();
            if step % 20 == 19 {
                got.extend(values(&parameters));
            }
        }
        let off = |(got, expected): (&f32, &f64)| {
            (f64::from(*got) - expected).abs() / expected.abs().max(0.1)
        };
        let worst = got.iter().zip(expected).map(off).fold(0.0, f64::max);
        // A few roundings a step, in 24 bits.
        assert!(worst < 1e-5, "{rule:?}: {worst}");
    }
}
