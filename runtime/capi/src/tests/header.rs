//! The header.

use std::process::Command;

use crate::ABI;
use crate::job::{Asked, Place, Trains};
use crate::outcome::Code;
use crate::raw::{self, Memory, Tensor};
use crate::restore::Origin as RestoreOrigin;
use crate::sampler::{self, Config, Dealt};
use crate::saves::{RawBlob, Sealed};

/// The numbers of `muster.h`, by a C compiler: structs are laid out as here, and codes are the same.
#[test]
fn the_header_says_the_same() {
    macro_rules! layout {
        ($($c:ident = $rust:ident { $($field:ident),* })*) => {
            vec![$((
                concat!("sizeof(", stringify!($c), ")"), size_of::<$rust>()
            ), $((
                concat!("offsetof(", stringify!($c), ", ", stringify!($field), ")"),
                std::mem::offset_of!($rust, $field)
            )),*),*]
        };
    }
    let mut numbers: Vec<(&str, i64)> = layout! {
        muster_place = Place { rank, world, local_rank, local_world, generation, restart }
        muster_directive = Asked { action, reason, deadline }
        muster_metrics = Trains { steps, training_loss, samples_per_second, learning_rate, loss_scale, data_seconds, compute_seconds, communication_seconds, gradient_sync_seconds }
        muster_tensor = Tensor { name, dtype, dims, rank, shape, offset, extent }
        muster_memory = Memory { at, kind, reserved, stream }
        muster_blob = RawBlob { name, data, bytes }
        muster_saved = Sealed { bytes, copied, waited }
        muster_origin = RestoreOrigin { step, world, reserved, tensors }
        muster_sampler_config = Config { samples, seed, batch, epoch, per_rank, drop_tail }
        muster_batch = Dealt { epoch, samples, count }
    }
    .into_iter()
    .map(|(what, number)| (what, number as i64))
    .collect();
    numbers.extend([
        ("MUSTER_ABI", i64::from(ABI)),
        ("MUSTER_ALL_RANKS", u32::MAX.into()),
        ("MUSTER_SAMPLER_STATE", sampler::STATE as i64),
        ("MUSTER_HOST", raw::HOST.into()),
        ("MUSTER_CUDA", raw::CUDA.into()),
        ("MUSTER_CHECKPOINT", 1),
        ("MUSTER_STOP", 2),
    ]);
    let codes = [
        ("MUSTER_OK", Code::Ok),
        ("MUSTER_NOTHING", Code::Nothing),
        ("MUSTER_ARGUMENT", Code::Argument),
        ("MUSTER_ENVIRONMENT", Code::Environment),
        ("MUSTER_STEP", Code::Step),
        ("MUSTER_UNDECIDED", Code::Undecided),
        ("MUSTER_NO_STORE", Code::NoStore),
        ("MUSTER_BUSY", Code::Busy),
        ("MUSTER_SAVE", Code::Save),
        ("MUSTER_PLAN", Code::Plan),
        ("MUSTER_RESTORE", Code::Restore),
        ("MUSTER_MISMATCH", Code::Mismatch),
        ("MUSTER_DAMAGED", Code::Damaged),
        ("MUSTER_PANIC", Code::Panic),
    ];
    numbers.extend(codes.map(|(name, code)| (name, i64::from(code as i32))));
    let place = tempfile::tempdir().unwrap();
    let (source, program) = (place.path().join("numbers.c"), place.path().join("numbers"));
    let prints: String = numbers
        .iter()
        .map(|(what, _)| format!("printf(\"%lld\\n\", (long long)({what}));\n"))
        .collect();
    let text = format!(
        "#include <stdio.h>\n#include \"muster.h\"\nint main(void) {{\n{prints}return 0;\n}}\n"
    );
    std::fs::write(&source, text).unwrap();
    let include = concat!("-I", env!("CARGO_MANIFEST_DIR"), "/include");
    let built = Command::new("cc")
        .args([
            "-std=c99",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-pedantic",
            include,
            "-o",
        ])
        .args([&program, &source])
        .output()
        .unwrap();
    assert!(
        built.status.success(),
        "{}",
        String::from_utf8_lossy(&built.stderr)
    );
    let printed = Command::new(&program).output().unwrap().stdout;
    let printed = String::from_utf8(printed).unwrap();
    let found: Vec<(&str, i64)> = numbers
        .iter()
        .map(|(what, _)| *what)
        .zip(printed.lines().map(|line| line.parse().unwrap()))
        .collect();
    assert_eq!(found, numbers);
}
