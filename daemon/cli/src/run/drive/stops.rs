//! Stop steps: who takes them, and what is written into the workers' control pages.

use muster_launcher::{Event, Session};
use muster_protocol::Span;
use muster_protocol::control::Reason;

use super::{Driver, Outcome, now, say};
use crate::run::control::ControlPage;
use crate::run::workers::unix_ms;

impl Driver {
    /// Says first whether all workers take stop steps: a rank has attached before it loads what it begins with, and
    /// none takes its first step before all have. So the leader knows by then, and a stop in that step goes by a step,
    /// too.
    pub(super) fn look_at_pages(&mut self, session: &mut Session) -> Option<Outcome> {
        self.look_who_takes_stop_steps(session);
        let over = self.carry_out(session);
        self.look_at_slots();
        over
    }

    /// A stop goes by a step that all agree on only where the leader knows that all workers take one.
    pub(super) fn look_who_takes_stop_steps(&mut self, session: &mut Session) {
        let linked = session.has_workers() && self.linked();
        if linked != self.was_linked {
            self.was_linked = linked;
            session.handle(Event::TakesStopSteps(linked), now());
        }
    }

    /// Whether there are workers and all of them have a runtime attached.
    fn linked(&mut self) -> bool {
        let mut any = false;
        let all = self.workers.pages().all(|page| {
            any = true;
            page.is_linked()
        });
        any && all
    }

    /// Gates every worker and returns the step at which all of them can stop; `None` when one has
    /// no runtime attached, for it would not obey.
    pub(super) fn install_stop(&mut self, step: u64, grace: Span, reason: Reason) -> Option<u64> {
        if !self.linked() {
            return None;
        }
        let deadline_ms = match grace {
            Span::ZERO => 0,
            grace => unix_ms().saturating_add(grace.as_millis()),
        };
        self.workers
            .pages()
            .map(|page| page.install(step, deadline_ms, reason))
            .max()
    }

    pub(super) fn confirm_stop(&mut self, step: u64) {
        let what = format!("step {step} is confirmed as the stop");
        self.confirm(&what, |page| page.confirm(step));
    }

    pub(super) fn confirm_checkpoint(&mut self, step: u64) {
        let what = format!("a checkpoint at step {step} is confirmed");
        self.confirm(&what, |page| page.confirm_checkpoint(step));
    }

    /// To each worker, whatever becomes of another.
    fn confirm(&mut self, what: &str, confirm: impl Fn(&mut ControlPage) -> bool) {
        let waited: Vec<bool> = self.workers.pages().map(confirm).collect();
        if waited.contains(&false) {
            say(&format!("{what}, but not every worker waits for it"));
        }
    }
}
