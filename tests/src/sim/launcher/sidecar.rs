//! A launcher that is stopped, and its sidecar, which holds the lease of its workers meanwhile.

use super::{ANSWERS, Due, Launcher, News, Out, Phase};
use crate::sim::clock::{MS, SEC};
use muster_launcher::Event;

/// How often the sidecar asks the agent.
const ASK: u64 = 200 * MS;

/// An answer that takes longer is not waited for.
pub const ANSWER: u64 = SEC;

impl Launcher {
    /// SIGSTOP and SIGCONT. Its workers have sessions of their own, and run on for as long as the launcher's
    /// last word covers them, or the agent's to the sidecar.
    pub fn pause(&mut self, yes: bool, now: u64) -> Vec<Out> {
        let mut out = Vec::new();
        if yes && self.paused.is_none() {
            self.paused = Some(now);
            self.orders.clear();
            self.covered = now + self.habits.word;
            out.push(Out::Wait {
                due: Due::Sidecar(now),
                ns: self.habits.word / 3,
                exact: true,
            });
        } else if !yes && let Some(since) = self.paused.take() {
            (self.heard, self.went_on) = (now, now);
            for by in self.orders.values_mut() {
                *by = now + ANSWERS;
            }
            let at = self.clock.local(now);
            let outdated = self.session.runs_again(self.clock.local(since), at);
            if outdated {
                out.push(Out::Relink);
            }
            // Of one that was starting them just then they are there first.
            if self.making.is_none() {
                self.lapse(now, &mut out);
            }
            if !out.is_empty() {
                // The new link comes behind what lies there.
                self.inbox
                    .retain(|n| !matches!(n, News::Event(Event::LinkUp)));
            }
            for (due, found) in std::mem::take(&mut self.late) {
                out.extend(self.due(due, found, now));
            }
            self.go_on(now, &mut out);
        }
        out
    }

    /// The sidecar has ended the workers, which is no failure of theirs.
    pub(super) fn lapse(&mut self, now: u64, out: &mut Vec<Out>) {
        let over = self.lease_over.take();
        if over.is_some_and(|digest| self.session.lapsed(digest, self.clock.local(now))) {
            out.push(Out::Relink);
        }
    }

    /// The machine stands still: so does the sidecar.
    pub fn suspend(&mut self, now: u64) {
        self.paused = Some(now);
        self.orders.clear();
    }

    /// It goes on, with a clock that stood still.
    pub fn wake(&mut self, since: u64, now: u64) -> Vec<Out> {
        self.clock.stood_still(since, now);
        self.paused = self.paused.map(|_| now);
        self.pause(false, now)
    }

    /// The sidecar looks whether the workers may go on: it asks, and kills once nobody's word covers them.
    pub(super) fn sidecar(&mut self, since: u64, now: u64, out: &mut Vec<Out>) {
        let run = self.run.as_ref().filter(|r| r.phase != Phase::Dead);
        let start = self.making.as_ref().or(run.map(|r| &r.start));
        let Some(digest) = start.map(|s| s.digest) else {
            return;
        };
        if self.paused != Some(since) {
            return;
        }
        if now >= self.covered {
            self.lease_over = Some(digest);
            out.push(Out::LeaseOver);
            if self.making.is_none() {
                self.kill(now, out);
            }
            return;
        }
        out.push(Out::AskLease);
        out.push(Out::Wait {
            due: Due::Sidecar(since),
            ns: ASK.min(self.covered - now),
            exact: true,
        });
    }

    /// The agent's answer to the sidecar.
    pub fn lease_granted(&mut self, until: u64) {
        self.covered = self.covered.max(until);
    }
}
