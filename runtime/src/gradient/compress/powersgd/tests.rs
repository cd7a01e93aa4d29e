use proptest::prelude::*;

use super::*;

fn column(columns: &[f32], len: usize, k: usize) -> &[f32] {
    &columns[k * len..(k + 1) * len]
}

proptest! {
    #[test]
    fn columns_become_orthonormal_and_span_the_same(
        len in 4usize..60, count in 1usize..5, seed: u64, scale in -30i32..30,
    ) {
        let mut random = SplitMix::new(seed);
        let mut columns = vec![0.0; len * count];
        columns.fill_with(|| random.signed_unit() * 10f32.powi(scale / 2));
        let before = columns.clone();
        orthonormalize(&mut columns, len, None);
        for a in 0..count {
            for b in 0..count {
                let product = dot_wide(column(&columns, len, a), column(&columns, len, b));
                let expected = f64::from(u8::from(a == b));
                prop_assert!((product - expected).abs() < 1e-5, "{} {}: {}", a, b, product);
            }
            // What a column was is a combination of the first ones.
            let mut rest = column(&before, len, a).to_vec();
            let was = dot_wide(&rest, &rest).sqrt();
            for b in 0..=a {
                let along = dot_wide(&rest, column(&columns, len, b)) as f32;
                add_scaled(&mut rest, -along, column(&columns, len, b));
            }
            prop_assert!(dot_wide(&rest, &rest).sqrt() <= 1e-5 * was);
        }
    }

    #[test]
    fn the_product_is_the_product(a in prop::collection::vec(-9f32..9.0, 0..80)) {
        let b: Vec<f32> = a.iter().rev().copied().collect();
        prop_assert!((f64::from(dot(&a, &b)) - dot_wide(&a, &b)).abs() < 1e-2);
    }
}

#[test]
fn what_holds_nothing_becomes_zero_or_new() {
    // The second column is the first, the third is zero.
    let columns = [[3.0, 0.0, 4.0], [6.0, 0.0, 8.0], [0.0; 3]];
    let mut plain = columns.as_flattened().to_vec();
    orthonormalize(&mut plain, 3, None);
    assert_eq!(plain, [0.6, 0.0, 0.8, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    let draw = |k: usize, to: &mut [f32]| {
        to.fill(0.0);
        to[k] = 1.0;
    };
    let mut fresh = columns.as_flattened().to_vec();
    fresh[8] = f32::NAN;
    orthonormalize(&mut fresh, 3, Some(&draw));
    assert_eq!(fresh[3..6], [0.0, 1.0, 0.0]);
    assert!(fresh.iter().all(|value| value.is_finite()));
}

#[test]
fn what_is_not_finite_is_not_hidden() {
    for odd in [f32::NAN, f32::INFINITY] {
        let mut columns = vec![1.0, odd, 2.0];
        orthonormalize(&mut columns, 3, None);
        assert!(columns[1].is_nan());
    }
}

#[test]
fn small_matrices_travel_as_they_are() {
    let shape = |rows, columns| Shape { rows, columns };
    let shapes = [shape(10, 1), shape(20, 10), shape(3, 3), shape(4, 100)];
    let power = PowerSgd::new(2, &shapes, 0);
    assert_eq!(power.plain, [0..10, 210..219]);
    let at: Vec<_> = power.matrices.iter().map(|m| m.at.clone()).collect();
    assert_eq!(at, [10..210, 219..619]);
    assert_eq!(power.initial().len(), 2 * (10 + 100));
}
