//! Optimizers against themselves; against PyTorch's: `needs_torch`.

use super::*;

const LEN: i64 = 70_001;

pub(super) fn rules() -> Vec<Rule> {
    let adam = Adam {
        betas: (0.8, 0.99),
        epsilon: 1e-7,
        weight_decay: 0.1,
        amsgrad: true,
    };
    vec![
        Rule::sgd(),
        Rule::momentum(0.9),
        Rule::Sgd {
            momentum: 0.8,
            dampening: 0.3,
            nesterov: false,
            weight_decay: 0.01,
        },
        Rule::Sgd {
            momentum: 0.95,
            dampening: 0.0,
            nesterov: true,
            weight_decay: 0.001,
        },
        Rule::adam(),
        Rule::Adam(adam),
        Rule::adam_w(),
        Rule::AdamW(adam),
    ]
}

fn start() -> (Tensor, impl Fn(u64) -> Tensor) {
    (noise(&[LEN], 1), |step| noise(&[LEN], 10 + step))
}

#[test]
fn parts_of_a_gradient_are_as_good_as_the_whole() {
    for rule in rules() {
        let (parameters, gradient) = start();
        let cut = parameters.copy();
        let mut whole = Optimizer::new(rule, LEN as usize, Device::Cpu).unwrap();
        let mut parted = Optimizer::new(rule, LEN as usize, Device::Cpu).unwrap();
        for step in 0..4 {
            let gradient = gradient(step);
            whole.step(&parameters, &gradient, 0.01).unwrap();
            // Last part first, as buckets are.
            let parts = [(33_333, LEN - 33_333), (0, 33_333)];
            let parts = parts.map(|(at, len)| (at as usize, gradient.narrow(0, at, len)));
            parted.step_parts(&cut, &parts, 0.01).unwrap();
        }
        assert_eq!(bits(&values(&parameters)), bits(&values(&cut)), "{rule:?}");
        for (a, b) in whole.moments().iter().zip(parted.moments()) {
            assert_eq!(bits(&values(a)), bits(&values(b)), "{rule:?}");
        }
    }
}

#[test]
fn the_arithmetic_is_that_of_single_operations() {
    // Each rounded by itself: the bits must not depend on the processor or the threads.
    let (parameters, gradient) = start();
    let mut expected = values(&parameters);
    let (mut m, mut v) = (vec![0f32; LEN as usize], vec![0f32; LEN as usize]);
    let mut optimizer = Optimizer::new(Rule::adam_w(), LEN as usize, Device::Cpu).unwrap();
    let rate = 0.003;
    for step in 0..5 {
        let g = gradient(step);
        optimizer.step(&parameters, &g, rate).unwrap();
        let n = step as i32 + 1;
        let (one, two) = (1.0 - 0.9f64.powi(n), (1.0 - 0.999f64.powi(n)).sqrt());
        for (i, g) in values(&g).into_iter().enumerate() {
            m[i] = m[i] * 0.9 + g * (1.0 - 0.9f64) as f32;
            v[i] = v[i] * 0.999 + (g * g) * (1.0 - 0.999f64) as f32;
            let change = m[i] / (v[i].sqrt() / two as f32 + 1e-8) * (rate / one) as f32;
            expected[i] = expected[i] * (1.0 - rate * 0.01) as f32 - change;
        }
    }
    assert_eq!(bits(&values(&parameters)), bits(&expected));
}

#[test]
fn the_operations_of_a_device_come_to_the_same() {
    for rule in rules() {
        let (parameters, gradient) = start();
        let other = parameters.copy();
        let mut optimizer = Optimizer::new(rule, LEN as usize, Device::Cpu).unwrap();
        let mut by_operations = Optimizer::new(rule, LEN as usize, Device::Cpu).unwrap();
        for step in 0..20 {
            let gradient = gradient(step);
            optimizer.step(&parameters, &gradient, 0.01).unwrap();
            by_operations.step_parts(&other, &[], 0.01).unwrap();
            by_operations
                .step_part(&other, 0, &gradient, 0.01, false)
                .unwrap();
        }
        let worst = (&parameters - &other).abs().max().double_value(&[]);
        assert!(worst < 1e-5, "{rule:?}: {worst}");
    }
}

#[test]
fn states_go_over_and_come_back() {
    for rule in rules() {
        let (parameters, gradient) = start();
        let mut optimizer = Optimizer::new(rule, LEN as usize, Device::Cpu).unwrap();
        for step in 0..3 {
            optimizer.step(&parameters, &gradient(step), 0.02).unwrap();
        }
        let mut bytes = Vec::new();
        optimizer.encode(&mut bytes).unwrap();
        let copy = parameters.copy();
        let mut other = Optimizer::new(rule, LEN as usize, Device::Cpu).unwrap();
        let mut rest = bytes.as_slice();
        let state = other.decode(&mut rest).unwrap();
        assert!(rest.is_empty());
        assert_eq!(state.steps, 3);
        other.restore(&state).unwrap();
        optimizer.step(&parameters, &gradient(9), 0.02).unwrap();
        other.step(&copy, &gradient(9), 0.02).unwrap();
        assert_eq!(bits(&values(&parameters)), bits(&values(&copy)), "{rule:?}");

        for cut in [0, 7, 8, 9, 17, 18, bytes.len().saturating_sub(1)] {
            let short = &mut &bytes[..cut.min(bytes.len() - 1)];
            assert!(other.decode(short).is_none(), "{rule:?}, {cut} bytes");
        }
        let short = Optimizer::new(rule, 10, Device::Cpu).unwrap();
        let taken = short.decode(&mut bytes.as_slice());
        // Without moments there is nothing whose length could differ.
        assert!(taken.is_none() || rule.moments() == 0, "{rule:?}");
    }
}

#[test]
fn a_gradient_that_shares_memory_with_what_it_moves_is_no_trap() {
    for rule in rules() {
        let (parameters, apart) = (noise(&[64], 3), noise(&[64], 3));
        let mut optimizer = Optimizer::new(rule, 64, Device::Cpu).unwrap();
        let mut other = Optimizer::new(rule, 64, Device::Cpu).unwrap();
        optimizer.step(&parameters, &parameters, 0.1).unwrap();
        other.step(&apart, &apart.copy(), 0.1).unwrap();
        let off = (&parameters - &apart).abs().max().double_value(&[]);
        // AdamW moves the parameters before it looks at the gradient.
        assert!(off < 1e-3, "{rule:?}: {off}");
    }
}

#[test]
fn tensors_that_do_not_fit_are_refused() {
    let mut optimizer = Optimizer::new(Rule::sgd(), 8, Device::Cpu).unwrap();
    let parameters = noise(&[8], 1);
    let before = values(&parameters);
    for gradient in [
        noise(&[7], 1).repeat([2]),
        noise(&[8], 1).to_kind(Kind::Double),
    ] {
        let refused = optimizer.step(&parameters, &gradient, 0.1);
        assert!(
            matches!(refused, Err(TorchError::Shape { .. })),
            "{refused:?}"
        );
    }
    let late = [(4, noise(&[5], 1))];
    assert!(optimizer.step_parts(&parameters, &late, 0.1).is_err());
    assert_eq!((values(&parameters), optimizer.steps()), (before, 0));
}
