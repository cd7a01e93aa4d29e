//! One seed from its setup to its verdict.

use std::panic::{AssertUnwindSafe, catch_unwind};

use muster_protocol::agent::Flaws;

use super::conductor::Conductor;
use super::coverage::Coverage;
use super::focus::Focus;
use super::invariants::Violation;
use super::log;
use super::setup::Setup;
use super::step::Step;

/// Result of a run.
#[derive(Debug)]
pub struct Report {
    pub setup: Setup,
    pub violation: Option<Violation>,
    /// Virtual nanoseconds.
    pub ended: u64,
    pub hash: u64,
    pub coverage: Coverage,
    /// Every step, when asked for.
    pub log: Option<Vec<(u64, Step)>>,
}

impl Report {
    pub fn events(&self) -> u64 {
        self.coverage.events
    }
}

/// Runs one seed with all rules and all faults.
pub fn run_seed(seed: u64) -> Report {
    run(
        Setup::generate(seed, Focus::Everything, Flaws::default()),
        false,
    )
}

/// Runs a case. A panic of a core is a violation like any other.
pub fn run(setup: Setup, keep_log: bool) -> Report {
    let mut conductor = Conductor::new(setup.clone());
    if keep_log {
        conductor.log = Some(Vec::new());
    }
    let result = catch_unwind(AssertUnwindSafe(|| conductor.run()));
    let violation = match result {
        Ok(result) => result.err(),
        Err(panic) => Some(Violation::Panic(panic_text(panic.as_ref()))),
    };
    Report {
        setup,
        violation,
        ended: conductor.world.now,
        hash: conductor.hash.0,
        coverage: conductor.world.coverage.clone(),
        log: conductor.log.take(),
    }
}

/// Runs the steps of a log again, without the conductor.
pub fn replay(case: &log::Case, mut each: impl FnMut(u64, &Step)) -> Result<(), Violation> {
    let mut world = super::world::World::new(std::sync::Arc::new(case.setup.clone()));
    for (at, step) in &case.steps {
        each(*at, step);
        let result = catch_unwind(AssertUnwindSafe(|| world.apply(*at, step.clone())));
        match result {
            Ok(result) => result?,
            Err(panic) => return Err(Violation::Panic(panic_text(panic.as_ref()))),
        }
        world.requests.clear();
    }
    Ok(())
}

/// Leaves out faults one after the other, as long as the same rule stays broken.
pub fn shrink(setup: &Setup, violation: &Violation, mut budget: u32) -> Setup {
    let mut best = setup.clone();
    let mut again = true;
    while again && budget > 0 {
        again = false;
        for i in (0..best.faults.len()).rev() {
            if budget == 0 {
                break;
            }
            budget -= 1;
            let mut less = best.clone();
            less.faults.remove(i);
            let report = run(less.clone(), false);
            if report.violation.as_ref().map(Violation::name) == Some(violation.name()) {
                best = less;
                again = true;
            }
        }
    }
    best
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()))
        .unwrap_or_else(|| "without a text".into())
}
