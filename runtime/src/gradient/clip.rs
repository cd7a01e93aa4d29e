//! Clipping by the global norm (Pascanu et al.: On the Difficulty of Training Recurrent Neural Networks,
//! 2013, algorithm 1), over reduced gradients: every rank comes to the same factor.

use crate::collective::{Group, GroupError, Op};

/// Sums that run side by side.
const LANES: usize = 8;

/// The Euclidean norm of all parts together, in `f64`: `f32` gradients cannot overflow it.
pub fn norm(parts: &[&[f32]]) -> f64 {
    parts.iter().map(|part| squares(part)).sum::<f64>().sqrt()
}

/// The same, of a gradient whose parts are on all ranks, each on one (after a reduce-scatter).
///
/// # Errors
/// A peer is lost or out of step.
pub fn norm_across(group: &mut Group, own: &[&[f32]]) -> Result<f64, GroupError> {
    let own = own.iter().map(|part| squares(part)).sum::<f64>();
    let mut all = [0.0];
    group.all_reduce(Op::Sum, &[own], &mut all)?;
    Ok(all[0].sqrt())
}

/// Factor for a gradient of this norm, so that its norm is `most` at most. `None` if the norm is
/// not finite: then no factor helps, and the step should be skipped.
///
/// As PyTorch's `clip_grad_norm_`, with its 1e-6 in the denominator.
pub fn factor(norm: f64, most: f64) -> Option<f32> {
    norm.is_finite()
        .then(|| (most / (norm + 1e-6)).min(1.0) as f32)
}

/// The sum of squares, always added in the same order.
fn squares(values: &[f32]) -> f64 {
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = values.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*value) * f64::from(*value);
        }
    }
    for (lane, value) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(*value) * f64::from(*value);
    }
    lanes.iter().sum()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_norm_is_the_norm(
            a in prop::collection::vec(-1e10f32..1e10, 0..100), b in prop::collection::vec(-1.0f32..1.0, 0..100),
            most in 0.01f64..10.0,
        ) {
            let all = || a.iter().chain(&b).map(|v| f64::from(*v));
            let expected = all().map(|v| v * v).sum::<f64>().sqrt();
            let got = norm(&[&a, &b]);
            prop_assert!((got - expected).abs() <= 1e-12 * expected);
            let factor = f64::from(factor(got, most).unwrap());
            prop_assert!(got * factor <= most * (1.0 + 1e-6));
            prop_assert!(factor == 1.0 || got * factor >= most * 0.9 || got < 1e-4);
        }
    }

    #[test]
    fn large_and_odd_gradients() {
        assert_eq!(norm(&[&[3e30, 4e30]]) as f32, 5e30);
        assert_eq!(factor(f64::NAN, 1.0), None);
        assert_eq!(factor(norm(&[&[f32::INFINITY]]), 1.0), None);
        assert_eq!(factor(0.0, 1.0), Some(1.0));
        assert_eq!(norm(&[]), 0.0);
    }
}
