//! The arithmetic of parity: bytes are added up by exclusive or, so each of them is the sum without the others.

/// Adds these bytes to the first ones of the others, as many as both have. The compiler makes it as wide as vectors
/// are; memory is slower than that.
pub fn fold(into: &mut [u8], bytes: &[u8]) {
    for (sum, byte) in into.iter_mut().zip(bytes) {
        *sum ^= byte;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::ramp;

    #[test]
    fn what_is_added_twice_is_gone() {
        for (long, short) in [(0, 0), (1, 0), (4_097, 4_096), (100_003, 99_999)] {
            let a = ramp(&[long], 1);
            let b: Vec<u8> = ramp(&[short], 1).iter().map(|byte| byte ^ 0x5a).collect();
            let both = short as usize;
            let mut sum = a.clone();
            fold(&mut sum, &b);
            assert!(sum[..both].iter().all(|byte| *byte == 0x5a));
            assert_eq!(sum[both..], a[both..]);
            fold(&mut sum, &b);
            assert_eq!(sum, a);
            // What is longer than the sum is not in it.
            let mut few = b.clone();
            fold(&mut few, &a);
            fold(&mut few, &b);
            assert_eq!(few, a[..both]);
        }
    }
}
