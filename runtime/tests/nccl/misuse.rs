//! Misuse that is refused, and its error messages.

use std::path::Path;

use muster_runtime::collective::nccl::{
    Communicator, CudaError, Library, LibraryError, NcclError, Version,
};
use muster_runtime::collective::{DType, Op};

use super::support::*;

#[test]
fn libraries_that_cannot_be_used_are_named() {
    let standin = standin();
    let nowhere = Path::new("libnccl-that-is-not-there.so.2");
    let error = Library::load_from(nowhere, &standin).unwrap_err();
    assert!(
        matches!(error, NcclError::Library(LibraryError::Missing { .. })),
        "{error}"
    );
    let said = error.to_string();
    assert!(said.contains("libnccl-that-is-not-there.so.2") && said.contains("LD_LIBRARY_PATH"));
    let error =
        Library::load_from(&standin, Path::new("libcuda-that-is-not-there.so")).unwrap_err();
    let NcclError::Cuda(CudaError::Driver(missing)) = error else {
        panic!("{error}");
    };
    let said = missing.to_string();
    assert!(said.contains("libcuda-that-is-not-there.so"), "{said}");
    let error = Library::load_from(Path::new("libc.so.6"), &standin).unwrap_err();
    let NcclError::Library(LibraryError::NoSymbol { symbol, .. }) = error else {
        panic!("{error}");
    };
    assert_eq!(symbol, "ncclGetVersion");
    script("version:-:-:21803");
    let error = Library::load_from(&standin, &standin).unwrap_err();
    script("");
    assert!(
        matches!(
            error,
            NcclError::TooOld {
                found: Version(21_803),
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(library().version(), Version(22_809));
}

#[test]
fn two_ranks_on_one_device_are_refused_on_all_ranks() {
    let errors = on_ranks(
        3,
        "",
        |config| config,
        |mut rank| {
            // Ranks 0 and 2.
            let ordinal = rank.number() % 2;
            Communicator::form(&rank.library, ordinal, &mut rank.group, config()).unwrap_err()
        },
    );
    for error in errors {
        assert!(!error.passes());
        let NcclError::SharedDevice { ranks, device } = error else {
            panic!("{error}");
        };
        assert_eq!((ranks, device.as_str()), (vec![0, 2], "0000:00:00.0"));
    }
}

#[test]
fn a_rank_without_a_device_is_known_to_all() {
    let errors = on_ranks(
        2,
        "",
        |config| config,
        |mut rank| {
            let ordinal = rank.number() * 99;
            Communicator::form(&rank.library, ordinal, &mut rank.group, config()).unwrap_err()
        },
    );
    // It leaves, and the others go on without it.
    assert!(errors[0].passes() && !errors[1].passes());
    assert!(
        matches!(errors[0], NcclError::NotReady { rank: 1 }),
        "{}",
        errors[0]
    );
    assert!(
        matches!(
            errors[1],
            NcclError::Cuda(CudaError::NoDevice {
                ordinal: 99,
                count: 8
            })
        ),
        "{}",
        errors[1]
    );
}

#[test]
fn buffers_that_do_not_fit_are_refused_and_change_nothing() {
    on_ranks(
        2,
        "",
        |config| config,
        |mut rank| {
            let mut nccl = rank.form();
            let (from, to) = buffers(nccl.device(), &[1f32; 6], 6);
            // SAFETY: both outlive the operations, which are waited for here.
            let (input, output) = unsafe { (from.elements(DType::F32), to.elements(DType::F32)) };
            // SAFETY: as above.
            let (other, small) = unsafe { (to.elements(DType::I32), to.elements(DType::I16)) };
            // SAFETY: as above.
            let same = unsafe { from.elements(DType::I16) };
            let sum = Op::Sum;
            let error = nccl.all_reduce(sum, input, other, AFTER).unwrap_err();
            assert!(matches!(error, NcclError::Types { .. }), "{error}");
            let error = nccl.all_gather(input, output, AFTER).unwrap_err();
            assert!(
                matches!(
                    error,
                    NcclError::Length {
                        got: 6,
                        expected: 12,
                        ..
                    }
                ),
                "{error}"
            );
            let error = nccl.reduce_scatter(sum, input, output, AFTER).unwrap_err();
            assert!(
                matches!(error, NcclError::Length { expected: 3, .. }),
                "{error}"
            );
            let error = nccl.all_reduce(sum, input, input, AFTER).unwrap_err();
            assert!(matches!(error, NcclError::Overlap), "{error}");
            let error = nccl.broadcast(2, input, output, AFTER).unwrap_err();
            assert!(
                matches!(error, NcclError::NoRank { rank: 2, world: 2 }),
                "{error}"
            );
            let error = nccl.all_reduce(sum, same, small, AFTER).unwrap_err();
            assert!(
                matches!(error, NcclError::Unsupported(DType::I16)),
                "{error}"
            );
            // What NCCL need not understand is only moved.
            nccl.broadcast(0, same, small, AFTER).unwrap();
            nccl.all_reduce(sum, input, output, AFTER).unwrap();
            nccl.wait_all().unwrap();
            assert_eq!(read::<f32>(&to, 6), [2.0; 6]);
            nccl.close(&mut rank.group).unwrap();
        },
    );
}

/// The example program, built beside this test.
fn check(nccl: &str) -> std::process::Output {
    let tests = std::env::current_exe().unwrap();
    let built = tests.parent().unwrap().parent().unwrap();
    std::process::Command::new(built.join("examples/nccl_check"))
        .args([nccl.as_ref(), standin().as_os_str(), "2".as_ref()])
        .env_remove("RANK")
        .output()
        .unwrap()
}

#[test]
fn the_example_checks_what_is_there_and_says_what_is_missing() {
    let output = check(standin().to_str().unwrap());
    let said = String::from_utf8(output.stdout).unwrap();
    println!("{said}");
    assert!(output.status.success());
    for dtype in ["F16", "Bf16", "F32", "F64", "I32", "I64", "U8"] {
        assert!(said.contains(&format!("all operations of {dtype} are right")));
    }
    assert!(said.contains("aborted with operations in the stream"));
    let output = check("libnccl-that-is-not-there.so.2");
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("cannot load libnccl-that-is-not-there.so.2"),
        "{said}"
    );
}
