//! How a launcher's part in a job ends: by the agent's word, by a signal, or alone.

use muster_protocol::local::ToAgent;
use muster_protocol::{Span, Time};

use super::{Effect, Link, Session};
use crate::report;
use crate::signal::{self, SIGINT, SIGTERM};

/// The exit code after Ctrl-C.
pub(super) const INTERRUPTED: i32 = 128 + SIGINT;

/// An agent that goes after Ctrl-C has so long to come back.
const AGENT_RETURN: Span = Span::from_secs(5);

/// Without workers, an agent is waited for this long: an upgrade takes minutes, and whoever started the launcher
/// (Slurm, Kubernetes) sees only by its end that the node does nothing.
const NO_AGENT: Span = Span::from_secs(15 * 60);

impl Session {
    /// The job is over for this launcher.
    pub(super) fn end(&mut self, code: i32, report: String, now: Time) {
        if self.ending.is_some() {
            return;
        }
        let report = report::whole(&report, code, self.elsewhere.as_ref(), &self.failures);
        self.pending = None;
        (self.leave_by, self.return_by) = (None, None);
        self.ending = Some((code, report.clone()));
        if self.current.is_some() {
            let grace = self.register.spec.loss_grace();
            self.begin_stop(SIGTERM, grace, now);
        } else {
            self.exit_now(code, report);
        }
    }

    /// No agent to ask: stop what runs here with the agreed signal and exit.
    pub(super) fn end_alone(&mut self, code: i32, now: Time) {
        self.pending = None;
        (self.leave_by, self.return_by) = (None, None);
        if self.current.is_none() {
            self.ending = Some((code, String::new()));
            return self.exit_now(code, String::new());
        }
        let report = match code {
            _ if self.register.spec.max_nodes == 1 => "this node ended without its agent".to_owned(),
            INTERRUPTED => format!("this node ended without its agent: {}", self.ends_there()),
            _ => "this node left the job without its agent: the others miss it soon, and go on if enough are left".to_owned(),
        };
        self.ending = Some((code, report));
        let spec = &self.register.spec;
        let (signal, grace) = (spec.signal_to_stop(code == INTERRUPTED), spec.stop_grace());
        self.begin_stop(signal, grace, now);
    }

    /// Advice about the other nodes, which nobody could tell of Ctrl-C.
    fn ends_there(&self) -> String {
        let id = &self.register.job;
        format!(
            "whether the others of the job stop is not known here; `muster cancel {id}` on one of them ends it there"
        )
    }

    pub(super) fn interrupt(&mut self, now: Time) {
        self.interrupts += 1;
        if self.interrupts > 1 {
            self.effects.push_back(Effect::Abort { code: INTERRUPTED });
        } else if self.ending.is_none() {
            self.say("stopping; Ctrl-C again kills");
            let hears = self.link != Link::Down;
            if hears {
                self.wish(ToAgent::Cancel);
                self.awaits_word(INTERRUPTED, now);
            }
            if !hears || self.mute {
                self.end_alone(INTERRUPTED, now);
            }
        }
    }

    /// The agent that was told that this launcher ends is gone: one that is started again is told again.
    pub(super) fn awaits_return(&mut self, code: i32, now: Time) {
        if self.ending.is_none() {
            self.return_by.get_or_insert((now + AGENT_RETURN, code));
        }
    }

    /// An agent of which nothing was heard on this link may be stopped.
    fn awaits_word(&mut self, code: i32, now: Time) {
        if self.mute_at.is_none() {
            self.awaits_return(code, now);
        }
    }

    /// The agent that was told of Ctrl-C, or that this launcher is to leave, is stopped: nobody waits for it. It reads
    /// what it was told when it goes on.
    pub(super) fn leave_mute(&mut self, now: Time) {
        if self.ending.is_some() {
            return;
        }
        if let Some((_, code)) = self.leave_by {
            self.end_alone(code, now);
        } else if self.interrupts > 0 {
            self.end_alone(INTERRUPTED, now);
        }
    }

    /// Until when an agent is waited for once the workers were ended for want of one.
    pub(super) fn no_agent_by(&self) -> Option<Time> {
        let waits = self.ending.is_none() && self.current.is_none();
        self.alone.filter(|_| waits).map(|since| since + NO_AGENT)
    }

    /// The agent did not say in time how this launcher's part ends.
    pub(super) fn leave_in_time(&mut self, now: Time) {
        if self.no_agent_by().is_some_and(|at| now >= at) {
            let minutes = NO_AGENT.as_millis() / 60_000;
            let report = match self.has_finished() {
                true => format!(
                    "its workers have finished, and no agent has been here for {minutes} min to say how the job ended"
                ),
                false => format!(
                    "no agent has answered on this node for {minutes} min: the others of the job go on without it if \
                     they are enough. Start musterd, then the same command again"
                ),
            };
            return self.end(1, report, now);
        }
        if let Some((_, code)) = self.return_by.take_if(|(at, _)| now >= *at) {
            // With workers to end, its last word says more.
            let hint = match self.current {
                Some(_) => "this node ends alone".to_owned(),
                None => self.ends_there(),
            };
            self.say(format!("the agent does not answer: {hint}"));
            return self.end_alone(code, now);
        }
        if let Some((_, code)) = self.leave_by.take_if(|(at, _)| now >= *at) {
            self.say("the agent did not take this node out in time: stopping its workers");
            self.end(code, String::new(), now);
        }
    }

    pub(super) fn terminate(&mut self, signal: i32, now: Time) {
        if self.ending.is_some() || self.leave_by.is_some() {
            return;
        }
        let code = 128 + signal;
        let grace = self.register.spec.stop_grace();
        self.say(format!(
            "received {}: leaving the job within {grace}",
            signal::name(signal)
        ));
        let hears = self.link != Link::Down;
        if hears {
            self.leave_by = Some((now + grace, code));
            let grace_ms = self.register.spec.stop_grace_ms;
            self.wish(ToAgent::Leave { grace_ms });
            self.awaits_word(code, now);
        }
        if !hears || self.mute {
            self.end_alone(code, now);
        }
    }
}
