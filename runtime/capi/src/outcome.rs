//! Outcomes of entries: a number, and a text for each thread.

use std::cell::RefCell;
use std::error::Error;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// `muster_code` of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Code {
    Ok = 0,
    Nothing = 1,
    Argument = -1,
    Environment = -2,
    Step = -3,
    Undecided = -4,
    NoStore = -5,
    Busy = -6,
    Save = -7,
    Plan = -8,
    Restore = -9,
    Mismatch = -10,
    Damaged = -11,
    Panic = -12,
}

/// Why a call failed.
#[derive(Debug)]
pub struct Failure {
    pub code: Code,
    pub text: String,
}

impl Failure {
    pub fn argument(text: impl Into<String>) -> Failure {
        let text = text.into();
        Failure {
            code: Code::Argument,
            text,
        }
    }

    /// An error, with all its causes.
    pub fn of(code: Code, error: &dyn Error) -> Failure {
        let mut text = error.to_string();
        let mut cause = error.source();
        while let Some(error) = cause {
            let more = error.to_string();
            // Some errors show their cause themselves.
            if !text.contains(&more) {
                text.push_str(": ");
                text.push_str(&more);
            }
            cause = error.source();
        }
        Failure { code, text }
    }
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs an entry's body: nothing unwinds out of it, and the text of a failure is kept for this thread.
pub fn entry(body: impl FnOnce() -> Result<Code, Failure>) -> i32 {
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(code)) => return code as i32,
        Ok(Err(failure)) => failure,
        Err(_) => Failure {
            code: Code::Panic,
            text: "a mistake inside libmuster, which said where on stderr: please report it"
                .to_owned(),
        },
    };
    let text = failure.text.replace('\0', "\u{fffd}");
    LAST.with_borrow_mut(|last| *last = CString::new(text).unwrap_or_default());
    failure.code as i32
}

/// Why this thread's last failed call failed.
#[unsafe(no_mangle)]
pub extern "C" fn muster_error() -> *const c_char {
    LAST.with_borrow(|last| last.as_ptr())
}
