//! Cost of a step when nothing happens: nanoseconds for each call of `Session::step`, of
//! `Session::report`, and of entering and leaving a wait, the best of several runs.
//!
//!     cargo run --release -p muster-runtime --example step

use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::time::Instant;

use muster_protocol::control::fresh_page;
use muster_runtime::{Directive, Metrics, Session};
use nix::sys::memfd::{MFdFlags, memfd_create};

const CALLS: u64 = 1_000_000;
const RUNS: u64 = 7;

fn best(name: &str, mut run: impl FnMut(u64)) {
    let mut best = f64::INFINITY;
    for round in 0..RUNS {
        let began = Instant::now();
        run(round * CALLS);
        best = best.min(began.elapsed().as_secs_f64() * 1e9 / CALLS as f64);
    }
    println!("{name:<8} {best:6.1} ns a call");
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut file = File::from(memfd_create(c"control", MFdFlags::empty())?);
    file.write_all(&fresh_page())?;
    let mut session = Session::from_fd(file.as_raw_fd())?;
    let mut stopped = 0u64;
    best("step", |first| {
        for step in first..first + CALLS {
            stopped += u64::from(!matches!(session.step(step), Ok(Directive::Continue)));
        }
    });
    let mut metrics = Metrics::default();
    best("report", |first| {
        for step in first..first + CALLS {
            metrics.steps = step;
            session.report(&metrics);
        }
    });
    let waits = session.waits();
    best("wait", |_| {
        for _ in 0..CALLS {
            drop(waits.enter());
        }
    });
    if stopped > 0 {
        return Err(format!("{stopped} steps were not begun").into());
    }
    Ok(())
}
