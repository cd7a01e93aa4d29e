//! (1 + cos(pi x)) / 2 with the same bits everywhere.

use std::f64::consts::FRAC_PI_2;

/// (1 + cos(pi x)) / 2 for x from 0 to 1, within 1e-15; clamped outside.
pub(super) fn half_cosine(x: f64) -> f64 {
    let x = x.clamp(0.0, 1.0);
    // It is the square of cos(pi x / 2), which is the sine of the rest.
    if x < 0.5 {
        let sine = sine(x * FRAC_PI_2);
        1.0 - sine * sine
    } else {
        let sine = sine((1.0 - x) * FRAC_PI_2);
        sine * sine
    }
}

/// The sine of 0 to pi/4, by its Taylor series: the next term is below 1e-20.
fn sine(y: f64) -> f64 {
    let square = y * y;
    let (mut term, mut sum) = (y, y);
    for i in 1..9 {
        let i = f64::from(2 * i);
        term *= -square / (i * (i + 1.0));
        sum += term;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_the_cosine() {
        for i in 0..=100_000 {
            let x = f64::from(i) / 100_000.0;
            let expected = (1.0 + (std::f64::consts::PI * x).cos()) / 2.0;
            assert!((half_cosine(x) - expected).abs() < 1e-15, "{x}");
        }
        assert_eq!(half_cosine(0.0), 1.0);
        assert_eq!(half_cosine(1.0), 0.0);
        assert_eq!(half_cosine(7.0), 0.0);
    }
}
