//! Loops compiled for more than the least of machines.

/// A function whose body is compiled twice: for every machine, and with the vector instructions of AVX2 (x86-64
/// from about 2013 on), which is taken where the processor has them. Both give the same bits: the compiler
/// never changes the order of floating-point arithmetic, nor merges a product with a sum.
macro_rules! widest {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name($($arg: $type),*) $(-> $out)? {
            #[inline(always)]
            fn any($($arg: $type),*) $(-> $out)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
                fn avx2($($arg: $type),*) $(-> $out)? {
                    any($($arg),*)
                }
                if $crate::wide::has_avx2() {
                    // SAFETY: the processor has what the function was compiled for.
                    return unsafe { avx2($($arg),*) };
                }
            }
            any($($arg),*)
        }
    };
}

pub(crate) use widest;

#[cfg(target_arch = "x86_64")]
pub(crate) fn has_avx2() -> bool {
    // Looked up once a process; then a load and a test.
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2")
        && is_x86_feature_detected!("lzcnt")
        && is_x86_feature_detected!("popcnt")
}
