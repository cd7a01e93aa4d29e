//! Tensors on GPUs, over the stand-in for the driver that the runtime's tests have. A variable that is set before a
//! process begins says what it loads, so each test starts this program again.

use std::ffi::c_int;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::thread;

use libloading::os::unix::{Library, Symbol};
use muster_checkpoint::slot::{Slot, State};
use muster_protocol::control::slots::Given;
use muster_runtime::cuda::{DRIVER_ENV, Device, Driver, Memory as Allocated};
use muster_runtime::saving::Restore;

use super::{Page, content, durable, fails, host, said};
use crate::job::Job;
use crate::outcome::Code;
use crate::raw::{CUDA, Memory, Tensor};
use crate::restore::Checkpoint;
use crate::{restore, saves};

/// More than a chunk, and no page's end.
const BYTES: u64 = (5 << 20) + 3;
const AGAIN: &str = "MUSTER_TEST_AGAIN";

/// Whether this is the process that a test is run in; else that is started, with this driver.
fn runs(test: &str, driver: &Path) -> bool {
    if std::env::var_os(AGAIN).is_some() {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let command = command.args(["--exact", test, "--nocapture"]);
    let output = command.env(DRIVER_ENV, driver).env(AGAIN, "1").output();
    let output = output.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{errors}"
    );
    false
}

/// The stand-in, compiled into this folder.
fn standin(to: &Path) -> PathBuf {
    let from = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/standin-nccl");
    let library = to.join("libcuda.so.1");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-O1", "-pthread", "-o"])
        .arg(&library);
    cc.args(["cuda.c", "memory.c"].map(|name| from.join(name)));
    assert!(cc.status().unwrap().success(), "cc cannot compile it");
    library
}

/// As `runs`, with the stand-in.
fn runs_on_standin(test: &str) -> bool {
    let place = tempfile::tempdir().unwrap();
    std::env::var_os(AGAIN).is_some() || runs(test, &standin(place.path()))
}

fn on_device(memory: &Allocated) -> Memory {
    Memory {
        at: std::ptr::without_provenance_mut(memory.address() as usize),
        kind: CUDA,
        reserved: 0,
        stream: null_mut(),
    }
}

fn tensor(name: &'static std::ffi::CStr, shape: &[u64; 1]) -> Tensor {
    Tensor {
        name: name.as_ptr(),
        dtype: c"U8".as_ptr(),
        dims: 1,
        rank: u32::MAX,
        shape: shape.as_ptr(),
        offset: null(),
        extent: null(),
    }
}

/// A job of one rank that has declared these.
fn declared(tensors: &[Tensor]) -> (Job, Vec<Arc<Slot>>) {
    let page = Page::new();
    let job = page.job(0, 1);
    let mut writes = vec![0; tensors.len()];
    let slots = thread::scope(|scope| {
        let launcher = scope.spawn(|| page.give(Given::Slots));
        let (at, count) = (tensors.as_ptr(), tensors.len());
        // SAFETY: as the header says.
        let code = unsafe { saves::muster_declare(&job, at, count, writes.as_mut_ptr()) };
        assert_eq!(code, 0, "{}", said());
        launcher.join().unwrap()
    });
    (job, slots)
}

#[test]
fn tensors_of_a_gpu_are_saved_and_loaded() {
    if !runs_on_standin("tests::cuda::tensors_of_a_gpu_are_saved_and_loaded") {
        return;
    }
    let place = tempfile::tempdir().unwrap();
    let device = Device::open(&Driver::load().unwrap(), 1).unwrap();
    let shape = [BYTES];
    let (there, here) = (content(BYTES as usize, 1), content(BYTES as usize, 2));
    let memory = device.upload(&there).unwrap();
    let tensors = [tensor(c"on.device", &shape), tensor(c"on.host", &shape)];
    let (job, slots) = declared(&tensors);
    let data = [on_device(&memory), host(here.as_ptr().cast_mut())];
    // SAFETY: as the header says, here and below.
    let code = unsafe { saves::muster_save(&job, 4, data.as_ptr(), 2, null(), 0, 9.0, null_mut()) };
    assert_eq!(code, 0, "{}", said());

    let sealed = slots[0].take().unwrap().unwrap();
    let digest = durable(place.path(), 4, &[sealed]);
    let checkpoint = Checkpoint::new(Restore::open(place.path(), digest).unwrap()).unwrap();
    // Each to the other side.
    let (into, mut back) = (
        device.alloc(BYTES as usize).unwrap(),
        vec![0; BYTES as usize],
    );
    let swapped = [tensors[1], tensors[0]];
    let places = [on_device(&into), host(back.as_mut_ptr())];
    let load = |places: &[Memory; 2]| {
        let (tensors, places) = (swapped.as_ptr(), places.as_ptr());
        // SAFETY: as above.
        unsafe { restore::muster_restore_load(&checkpoint, tensors, places, 2) }
    };
    assert_eq!(load(&places), 0, "{}", said());
    let mut read = vec![0u8; BYTES as usize];
    into.read(&mut read).unwrap();
    assert!(read == here && back == there);
    // Not twice to one place, and not nowhere.
    fails(load(&[places[0]; 2]), Code::Argument, "share memory");
    let nowhere = Memory {
        at: null_mut(),
        ..places[0]
    };
    fails(load(&[nowhere, places[1]]), Code::Argument, "is NULL");
    // The host's memory is none of a GPU.
    let wrong = Memory {
        kind: CUDA,
        ..places[1]
    };
    fails(
        load(&[places[0], wrong]),
        Code::Restore,
        "no memory of a GPU",
    );
}

#[test]
fn slots_are_registered_before_the_first_save_if_that_is_asked_for() {
    let test = "tests::cuda::slots_are_registered_before_the_first_save_if_that_is_asked_for";
    if !runs_on_standin(test) {
        return;
    }
    let library = std::env::var_os(DRIVER_ENV).unwrap();
    // SAFETY: the stand-in does nothing when it is loaded, and has this function, which counts the registrations.
    let registered = || unsafe {
        let library = Library::new(&library).unwrap();
        let live: Symbol<unsafe extern "C" fn(c_int) -> c_int> =
            library.get(b"standin_live").unwrap();
        live(5)
    };
    let device = Device::open(&Driver::load().unwrap(), 0).unwrap();
    let memory = device.upload(&content(BYTES as usize, 1)).unwrap();
    let shape = [BYTES];
    let (job, slots) = declared(&[tensor(c"on.device", &shape)]);
    let data = on_device(&memory);
    // SAFETY: as the header says, here and below.
    fails(
        unsafe { saves::muster_prepare(&job, &data, 0) },
        Code::Argument,
        "1 were declared",
    );
    assert_eq!(registered(), 0);
    let code = unsafe { saves::muster_prepare(&job, &data, 1) };
    assert_eq!(code, 0, "{}", said());
    // By a thread, which needs nobody.
    while registered() < 2 {
        thread::yield_now();
    }
    let code = unsafe { saves::muster_save(&job, 4, &data, 1, null(), 0, 9.0, null_mut()) };
    assert_eq!((code, registered()), (0, 2), "{}", said());
    assert_eq!(slots[0].state().0, State::Sealed);
}

#[test]
fn without_a_driver_a_save_says_what_helps() {
    let test = "tests::cuda::without_a_driver_a_save_says_what_helps";
    if !runs(test, Path::new("libcuda-that-is-not-there.so.1")) {
        return;
    }
    let shape = [BYTES];
    let tensors = [tensor(c"t", &shape)];
    let (job, slots) = declared(&tensors);
    let data = Memory {
        at: std::ptr::without_provenance_mut(4096),
        kind: CUDA,
        reserved: 0,
        stream: null_mut(),
    };
    // SAFETY: as the header says; nobody copies from there.
    let code = unsafe { saves::muster_save(&job, 4, &data, 1, null(), 0, 9.0, null_mut()) };
    fails(code, Code::Save, "libcuda-that-is-not-there.so.1");
    assert!(said().contains(DRIVER_ENV), "{}", said());
    assert_eq!(slots[0].state().0, State::Free);
}
