//! The model as the trainer sees it.

use super::*;
use crate::train::{Update, buckets_of};

#[test]
fn gradients_are_those_of_autograd() {
    let plain = net(1);
    let parts = parts(net(1));
    let batch = (parts.train)(&micro(0..7)).unwrap();
    let loss = (parts.loss)(&plain.forward(&batch.input, true), &batch.target);
    loss.backward();
    let mut model = TorchModel::new(parts, &Options::new(Rule::sgd())).unwrap();
    let (sums, measured) = backward(&mut model, &[micro(0..7)]);
    assert_eq!(measured[0].loss, loss.double_value(&[]));
    assert_eq!(measured[0].samples, 7);
    // One bucket, with the variables in the order in which they were made.
    let mut at = 0;
    for variable in plain.variables().trainable_variables() {
        let len = variable.numel();
        let gradient = variable.grad();
        let expected = if gradient.defined() {
            values(&gradient)
        } else {
            vec![0.0; len]
        };
        assert_eq!(bits(&sums[0][at..at + len]), bits(&expected));
        at += len.next_multiple_of(16);
    }
    assert_eq!(at, model.parameters());
}

#[test]
fn all_ways_through_backward_have_the_same_bits() {
    let micros = [micro(0..6), micro(6..13), micro(13..14)];
    let mut results = Vec::new();
    for overlap in [Overlap::None, Overlap::Hooks, Overlap::Staged] {
        let mut model = model(2, overlap);
        let (sums, measured) = backward(&mut model, &micros);
        let sums: Vec<Vec<u32>> = sums.iter().map(|sum| bits(sum)).collect();
        results.push((sums, measured));
    }
    assert_eq!(results[0], results[1]);
    assert_eq!(results[0], results[2]);
}

#[test]
fn a_scaled_loss_scales_the_gradient_alone() {
    let mut model = model(3, Overlap::Hooks);
    let (plain, measured) = backward(&mut model, &[micro(0..4)]);
    let scaled = Micro {
        scale: 1024.0,
        ..micro(0..4)
    };
    let (large, again) = backward(&mut model, &[scaled]);
    assert_eq!(measured, again);
    for (plain, large) in plain.iter().flatten().zip(large.iter().flatten()) {
        assert_eq!(plain * 1024.0, *large);
    }
}

#[test]
fn buckets_follow_the_variables_backwards() {
    let model = model(4, Overlap::Staged);
    let ranges = model.buckets();
    assert!(ranges.len() > 2, "{ranges:?}");
    assert_eq!(ranges[0].end, model.parameters());
    let shapes = (0..ranges.len()).map(|bucket| model.shapes(bucket));
    for (shapes, range) in shapes.zip(&ranges) {
        let len: usize = shapes.iter().map(|s| s.rows * s.columns).sum();
        assert_eq!(len, range.len());
    }
    // The last layer's matrix, its bias, and what fills it up.
    assert_eq!(buckets_of(&[80, 16], [10, 200]), [80..96, 0..80]);
    let all: Vec<_> = (0..ranges.len()).flat_map(|b| model.shapes(b)).collect();
    assert!(all.iter().any(|s| (s.rows, s.columns) == (4, 17)));
}

#[test]
fn a_microbatch_changes_nothing_that_lasts() {
    let mut model = model(5, Overlap::Hooks);
    let before = model.encode();
    let (first, measured) = backward(&mut model, &[micro(0..9), micro(9..12)]);
    assert_eq!(model.encode(), before);
    let (again, remeasured) = backward(&mut model, &[micro(0..9), micro(9..12)]);
    assert_eq!((first, &measured), (again, &remeasured));
    let moved = measured[0].extra.iter().filter(|moved| **moved != 0.0);
    // Mean and variance of three channels; then the score's place.
    assert_eq!((moved.count(), measured[0].extra.len()), (6, 7));
    let evaluated = model.evaluate(&micro(20..50)).unwrap();
    assert_eq!(model.encode(), before);
    assert_eq!(evaluated.samples, 30);
    let [right] = *model.scores(&evaluated) else {
        panic!("one score")
    };
    assert!((0.0..=30.0).contains(&right) && right.fract() == 0.0);
}

/// Commits the sums of a step, as a trainer does.
pub(super) fn commit(model: &mut TorchModel<()>, sums: &mut [Vec<f32>], measured: &[Measured]) {
    let mut total = Measured::default();
    measured.iter().for_each(|measured| total.add(measured));
    for value in sums.iter_mut().flatten() {
        *value /= total.samples as f32;
    }
    model.update(&Update {
        step: 0,
        rate: 0.1,
        gradient: sums,
        measured: &total,
    });
}

#[test]
fn running_statistics_move_once_a_step_as_in_torch() {
    let plain = net(6);
    let parts = parts(net(6));
    let batch = (parts.train)(&micro(0..20)).unwrap();
    let _ = plain.forward(&batch.input, true);
    let mut model = TorchModel::new(parts, &Options::new(Rule::sgd())).unwrap();
    let (mut sums, measured) = backward(&mut model, &[micro(0..20)]);
    commit(&mut model, &mut sums, &measured);
    let (plain, ours) = (
        plain.variables().variables(),
        model.net().variables().variables(),
    );
    for name in ["first.norm.running_mean", "first.norm.running_var"] {
        let (expected, got) = (values(&plain[name]), values(&ours[name]));
        for (got, expected) in got.iter().zip(expected) {
            assert!(
                (got - expected).abs() < 1e-6,
                "{name}: {got}, not {expected}"
            );
        }
    }
}

#[test]
fn training_lowers_the_loss_and_states_go_over() {
    let mut model = model(7, Overlap::Hooks);
    let mut losses = Vec::new();
    for _ in 0..30 {
        let (mut sums, measured) = backward(&mut model, &[micro(0..30), micro(30..60)]);
        losses.push(measured.iter().map(|m| m.loss).sum::<f64>());
        commit(&mut model, &mut sums, &measured);
    }
    assert!(losses[29] < losses[0] * 0.7, "{losses:?}");
    assert_eq!(model.optimizer().steps(), 30);

    let state = model.encode();
    let mut other = super::model(70, Overlap::Staged);
    assert_ne!(other.encode(), state);
    assert!(other.decode(&state));
    assert_eq!(other.encode(), state);
    // It goes on alike, and its variables are still views of the same.
    for model in [&mut model, &mut other] {
        let (mut sums, measured) = backward(model, &[micro(0..60)]);
        commit(model, &mut sums, &measured);
    }
    assert!(model.encode() == other.encode() && model.encode() != state);
    for cut in [0, 8, 24, state.len() / 2, state.len() - 1] {
        assert!(!other.decode(&state[..cut]));
    }
    assert!(!other.decode(&[&state[..], &[0]].concat()));
    let mut smaller = TorchModel::new(parts(net(1)), &Options::new(Rule::sgd())).unwrap();
    assert!(!smaller.decode(&state), "another rule");
}

#[test]
fn frozen_variables_stay_and_are_handed_over() {
    let mut frozen = net(8);
    let name = "first.conv.weight";
    let mut weight = frozen.variables_mut().variables().remove(name).unwrap();
    weight = weight.set_requires_grad(false);
    let before = values(&weight);
    let mut model = TorchModel::new(parts(frozen), &Options::new(Rule::adam_w())).unwrap();
    assert!(model.parameters() < super::model(8, Overlap::None).parameters());
    let (mut sums, measured) = backward(&mut model, &[micro(0..8)]);
    commit(&mut model, &mut sums, &measured);
    assert_eq!(values(&weight), before);
    let mut other = net(80);
    let other_weight = other.variables_mut().variables().remove(name).unwrap();
    let other_weight = other_weight.set_requires_grad(false);
    let mut other = TorchModel::new(parts(other), &Options::new(Rule::adam_w())).unwrap();
    assert_ne!(values(&other_weight), before);
    assert!(other.decode(&model.encode()));
    assert_eq!(values(&other_weight), before);
}

#[test]
fn what_is_drawn_follows_the_seed() {
    let mut net = Net::new(Device::Cpu);
    net.stage("one", |path| {
        let layer = nn::linear(path, 64, 4, Default::default());
        move |x, train| layer.forward(&x.flatten(1, -1).dropout(0.5, train))
    });
    let mut model = TorchModel::new(parts(net), &Options::new(Rule::sgd())).unwrap();
    let (a, _) = backward(&mut model, &[micro(0..5)]);
    let (b, _) = backward(&mut model, &[micro(0..5)]);
    let seed = 4;
    let (c, _) = backward(
        &mut model,
        &[Micro {
            seed,
            ..micro(0..5)
        }],
    );
    assert!(a == b && a != c);
}

#[test]
fn memory_that_moves_is_followed_and_left_at_the_end() {
    let mut model = model(9, Overlap::Hooks);
    let variables = model.net().variables().trainable_variables();
    let (first, _) = backward(&mut model, &[micro(0..5)]);
    // In other memory, the first of which is gone.
    let kept: Vec<Vec<f32>> = first.clone();
    drop(first);
    let (second, _) = backward(&mut model, &[micro(0..5)]);
    assert_eq!(kept, second);
    for variable in variables {
        assert_eq!(variable.grad().numel(), 0, "it shows memory of others");
    }
}

#[test]
fn what_cannot_be_trained_is_refused() {
    let empty = parts(Net::new(Device::Cpu));
    let options = Options::new(Rule::sgd());
    assert!(matches!(
        TorchModel::new(empty, &options),
        Err(TorchError::NoStage)
    ));
    let mut double = net(1);
    double.variables_mut().double();
    let refused = TorchModel::new(parts(double), &options);
    assert!(
        matches!(&refused, Err(TorchError::Kind { kind: Kind::Double, name }) if !name.is_empty()),
        "{refused:?}"
    );
    let several = Parts {
        loss: Box::new(|output, _| output.sum_dim_intlist(0, false, Kind::Float)),
        ..parts(net(1))
    };
    let mut model = TorchModel::new(several, &options).unwrap();
    let ranges = model.buckets();
    let mut buffers: Vec<Vec<f32>> = ranges.iter().map(|range| vec![0.0; range.len()]).collect();
    let before = model.encode();
    let refused = model.backward(&micro(0..3), &mut Gradients::new(&ranges, &mut buffers));
    let said = refused.unwrap_err().to_string();
    assert!(said.contains("the loss has 4 elements"), "{said}");
    assert_eq!(model.encode(), before);
    let mut short = vec![vec![0.0; 3]];
    let refused = model.backward(&micro(0..3), &mut Gradients::new(&ranges, &mut short));
    assert!(refused.is_err());
}
