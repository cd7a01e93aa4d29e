//! Steps, stops and reports; panics and nulls.

use std::ffi::CStr;
use std::ptr::{NonNull, null, null_mut};
use std::thread;

use muster_protocol::control::{Reason, Stop, decode_step, encode_step, report, saving, word};

use super::{Page, fails, said};
use crate::job::{Asked, Trains};
use crate::outcome::{Code, entry};
use crate::{ABI, job, muster_abi, restore, sampler};

#[test]
fn steps_stops_and_reports_go_through_the_page() {
    let page = Page::new();
    let job = page.job(0, 1);
    let step = |step| {
        let mut asked = Asked {
            action: 9,
            reason: 9,
            deadline: 9,
        };
        // SAFETY: as the header says, here and below.
        assert_eq!(
            unsafe { job::muster_step(&job, step, &mut asked) },
            0,
            "{}",
            said()
        );
        asked
    };
    assert_eq!(step(4), Asked::default());
    assert_eq!(decode_step(page.load(word::PROGRESS)), Some(4));
    page.store(word::CHECKPOINT, encode_step(Some(6)));
    page.store(word::STOP, Stop::Confirmed(6).encode());
    assert_eq!(step(5), Asked::default());
    assert_eq!(step(6).action, 1);
    // SAFETY: as above.
    assert_eq!(unsafe { job::muster_done(&job, 6, 1) }, 0);
    assert_eq!(decode_step(page.load(word::SAVED)), Some(6));
    page.store(word::STOP, Stop::Cancelled.encode());
    // Another one, which comes to nothing.
    page.store(word::CHECKPOINT, encode_step(Some(7)));
    page.store(word::STOP, Stop::Confirmed(7).encode());
    assert_eq!(step(7).action, 1);
    let why = c"no room".as_ptr();
    // SAFETY: as above.
    assert_eq!(unsafe { job::muster_failed(&job, 7, why) }, 0);
    assert_eq!(decode_step(page.load(word::SAVED)), Some(7));
    let words: Vec<u64> = saving::word::failure().map(|at| page.load(at)).collect();
    let length = page.load(saving::word::FAILED);
    let failure = saving::Failure::decode(&words.try_into().unwrap(), length);
    assert_eq!(
        failure.map(|f| (f.step, f.why)),
        Some((7, "no room".into()))
    );
    page.store(word::STOP, Stop::Cancelled.encode());
    page.store(word::CHECKPOINT, 0);
    page.store(word::DEADLINE, 1_234_567);
    page.store(word::REASON, Reason::Drain.encode());
    page.store(word::STOP, Stop::Confirmed(8).encode());
    assert_eq!(step(7), Asked::default());
    assert_eq!(
        step(8),
        Asked {
            action: 2,
            reason: 2,
            deadline: 1_234_567
        }
    );
    // SAFETY: as above.
    unsafe {
        assert_eq!(job::muster_done(&job, 8, 2), 0);
        fails(job::muster_done(&job, 8, 3), Code::Argument, "no action");
    }
    assert_eq!(decode_step(page.load(word::ACK)), Some(8));
    // SAFETY: as above.
    fails(
        unsafe { job::muster_step(&job, 7, &mut Asked::default()) },
        Code::Step,
        "in order",
    );

    let trains = Trains {
        steps: 9,
        training_loss: 0.5,
        samples_per_second: f64::NAN,
        learning_rate: f64::NAN,
        loss_scale: f64::NAN,
        data_seconds: f64::NAN,
        compute_seconds: f64::NAN,
        communication_seconds: f64::NAN,
        gradient_sync_seconds: 2.0,
    };
    // SAFETY: as above.
    assert_eq!(
        unsafe {
            (
                job::muster_report(&job, &trains),
                job::muster_report(&job, null()),
            )
        },
        (0, 0)
    );
    let values: Vec<u64> = report::word::values().map(|at| page.load(at)).collect();
    assert_eq!(
        (values[0], values[1], values[2], values[9]),
        (9, 1, 0.5f64.to_bits(), 2.0f64.to_bits())
    );
    assert_eq!(page.load(report::word::OPERATION), report::ALIVE);
    drop(job);
    assert_eq!(page.load(word::LINKED), 0);
}

#[test]
fn a_panic_is_a_code_and_nothing_is_an_argument() {
    let code = entry(|| panic!("on purpose"));
    fails(code, Code::Panic, "report it");
    // SAFETY: nulls are allowed everywhere.
    unsafe {
        fails(
            job::muster_open(ABI, null_mut(), null_mut()),
            Code::Argument,
            "job is NULL",
        );
        // A program of before passed an address first; nothing behind it is looked at.
        let (job, place) = (NonNull::dangling().as_ptr(), NonNull::dangling().as_ptr());
        fails(
            job::muster_open(0x5566_7788, job, place),
            Code::Environment,
            &format!("this one has {ABI}"),
        );
        fails(
            job::muster_step(null(), 0, null_mut()),
            Code::Argument,
            "job is NULL",
        );
        fails(
            restore::muster_restore_open(null_mut(), null_mut()),
            Code::Argument,
            "NULL",
        );
        fails(
            restore::muster_restore_load(null(), null(), null(), 0),
            Code::Argument,
            "NULL",
        );
        fails(
            sampler::muster_sampler_open(null_mut(), null(), null()),
            Code::Argument,
            "NULL",
        );
        job::muster_close(null_mut());
        restore::muster_restore_close(null_mut());
        sampler::muster_sampler_close(null_mut());
        let mut release = null();
        assert_eq!(muster_abi(&mut release), ABI);
        assert_eq!(
            CStr::from_ptr(release).to_str().unwrap(),
            env!("CARGO_PKG_VERSION")
        );
        assert_eq!(muster_abi(null_mut()), ABI);
    }
    // Another thread has not failed.
    assert_eq!(thread::spawn(said).join().unwrap(), "");
}
