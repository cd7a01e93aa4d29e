//! Loops compiled for more than the least of machines.

/// A function whose body is compiled three times: for every machine, and with the vector instructions of AVX2
/// (x86-64 from about 2013 on) and of AVX-512, which are taken where the processor has them. All give the same
/// bits: the compiler never changes the order of floating-point arithmetic, nor merges a product with a sum.
macro_rules! widest {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $out:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name($($arg: $type),*) $(-> $out)? {
            #[inline(always)]
            fn any($($arg: $type),*) $(-> $out)? $body

            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,bmi1,bmi2")]
                fn avx2($($arg: $type),*) $(-> $out)? {
                    any($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,bmi1,bmi2")]
                fn avx512($($arg: $type),*) $(-> $out)? {
                    any($($arg),*)
                }
                match $crate::wide::widest_there() {
                    // SAFETY: the processor has what the function was compiled for.
                    $crate::wide::Width::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::wide::Width::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::wide::Width::Any => {}
                }
            }
            any($($arg),*)
        }
    };
}

pub(crate) use widest;

/// Vector width of a processor.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    Any,
    Avx2,
    Avx512,
}

/// The largest vector width of this processor: looked up once a process, then a few loads and tests.
#[cfg(target_arch = "x86_64")]
pub(crate) fn widest_there() -> Width {
    let bits = is_x86_feature_detected!("bmi1") && is_x86_feature_detected!("bmi2");
    if bits
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
    {
        Width::Avx512
    } else if bits && is_x86_feature_detected!("avx2") {
        Width::Avx2
    } else {
        Width::Any
    }
}
