//! Where there is no driver.

use std::path::Path;
use std::process::{Command, Output};

use muster_runtime::cuda::{CudaError, DRIVER_ENV, Driver, LibraryError};
use muster_runtime::saving::{Memory, OnDevice, SaveError, Slice};

use super::support::*;

#[test]
fn a_driver_that_is_not_there_is_named_with_what_helps() {
    let error = Driver::load_from(Path::new("libcuda-that-is-not-there.so.1")).unwrap_err();
    let said = error.to_string();
    assert!(
        said.contains(DRIVER_ENV) && said.contains("install"),
        "{said}"
    );
    let CudaError::Driver(missing) = error else {
        unreachable!("{error:?}");
    };
    assert!(
        missing
            .to_string()
            .contains("libcuda-that-is-not-there.so.1")
    );
    let error = Driver::load_from(Path::new("libc.so.6")).unwrap_err();
    let CudaError::Driver(LibraryError::NoSymbol { symbol, .. }) = error else {
        unreachable!("{error:?}");
    };
    assert_eq!(symbol, "cuInit");
}

/// Output of this program, started again for one test with another driver; `None`: this is that process.
fn again(test: &str, driver: &Path) -> Option<Output> {
    const AGAIN: &str = "MUSTER_TEST_AGAIN";
    if std::env::var_os(AGAIN).is_some() {
        return None;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env(DRIVER_ENV, driver);
    let output = command.env(AGAIN, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}"
    );
    Some(output)
}

#[test]
fn a_save_without_a_driver_fails_by_name() {
    let (test, driver) = (
        "missing::a_save_without_a_driver_fails_by_name",
        "libcuda-that-is-not-there.so.1",
    );
    if again(test, Path::new(driver)).is_some() {
        return;
    }
    let mut worker = Worker::alone();
    let state = |_: &str, slice: &Slice| {
        // SAFETY: nobody copies from there.
        Some(Memory::Device(unsafe {
            OnDevice::new(4096, slice.extent[0], std::ptr::null_mut())
        }))
    };
    let error = worker.saver.save(1, state, Vec::new()).unwrap_err();
    let SaveError::Device(cause) = error else {
        unreachable!("{error:?}");
    };
    assert!(cause.to_string().contains(DRIVER_ENV), "{cause}");
    assert!(matches!(
        cause.downcast_ref(),
        Some(CudaError::Driver(LibraryError::Missing { .. }))
    ));
}

#[test]
fn the_driver_is_found_by_its_variable_and_the_way_is_said_once() {
    let test = "missing::the_driver_is_found_by_its_variable_and_the_way_is_said_once";
    if let Some(output) = again(test, &standin()) {
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(
            said.matches("straight into the checkpoint slots").count(),
            1,
            "{said}"
        );
        return;
    }
    let mut worker = Worker::alone();
    worker.save(1).unwrap();
    worker.save(2).unwrap();
}

#[test]
fn a_change_of_the_way_is_said_once() {
    let test = "missing::a_change_of_the_way_is_said_once";
    if let Some(output) = again(test, &standin()) {
        let said = String::from_utf8_lossy(&output.stderr);
        let ways: Vec<&str> = (said.lines())
            .filter_map(|line| line.strip_prefix("muster: tensors on GPUs are copied "))
            .collect();
        assert_eq!(ways.len(), 3, "{said}");
        assert!(ways[0].contains("through pinned buffers") && ways[0].contains("not supported"));
        assert!(ways[1].contains("through pinned buffers") && ways[1].contains("out of memory"));
        assert!(ways[2].contains("straight into"), "{said}");
        return;
    }
    let mut worker = Worker::alone();
    for (step, driver) in [
        (1, "register:801"),
        (2, "register:2"),
        (3, "register:2"),
        (4, "register:2"),
        (5, ""),
        (6, ""),
        (7, ""),
    ] {
        script(driver);
        worker.save(step).unwrap();
        worker.taken(step).release();
    }
}

/// The example program, built beside this test.
fn example(driver: &Path) -> Output {
    let tests = std::env::current_exe().unwrap();
    let built = tests.parent().unwrap().parent().unwrap();
    let mut command = Command::new(built.join("examples/cuda_slots"));
    command.arg(driver).arg("24").output().unwrap()
}

#[test]
fn the_example_shows_which_way_is_taken_and_says_what_is_missing() {
    let output = example(&standin());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let said = String::from_utf8(output.stdout).unwrap();
    println!("{said}");
    for words in ["straight into the slots", "GB/s", "bit for bit"] {
        assert!(said.contains(words), "{said}");
    }
    let output = example(Path::new("libcuda-that-is-not-there.so.1"));
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("cannot load libcuda-that-is-not-there.so.1"),
        "{said}"
    );
}
