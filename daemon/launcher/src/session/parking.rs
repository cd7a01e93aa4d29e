//! Live workers: they leave a generation without leaving their process, and wait for the next.

use muster_protocol::local::{ToAgent, WorkerExit};
use muster_protocol::{Span, Time};

use super::{ALONE, Current, GAVE_UP, LEFTOVER_GRACE, MUTE, Session};
use crate::signal::SIGTERM;

/// Of its usual step, so many times a live worker may compute on before it parks.
const STEPS: u32 = 4;

/// And this long at least, and at most: less than the others wait for a node that does not start.
const LEAST: Span = Span::from_secs(5);
const MOST: Span = Span::from_secs(20);

/// How long live workers are waited for that have to leave their generation. One that waits for others
/// leaves at once; one that computes comes to look only after its forward and backward, and would lose
/// the job's state if it were ended.
pub fn patience(usual_step: Option<Span>) -> Span {
    let steps = usual_step.map_or(MOST, |step| step.times(STEPS.into()));
    steps.clamp(LEAST, MOST)
}

impl Session {
    /// How long workers that compute are waited for; zero where none is live.
    pub fn set_patience(&mut self, patience: Span) {
        self.patience = patience;
    }

    /// All that runs has parked: the generation is over here.
    pub(super) fn parked(&mut self, now: Time) {
        let Some(current) = &mut self.current else {
            return;
        };
        if current.stopping.take().is_none() {
            return;
        }
        current.parked = true;
        current.alone_since = None;
        let (digest, attempt) = (current.start.digest, current.start.attempt);
        let unstarted = current.unstarted.take();
        self.answer_stops(unstarted.is_none().then_some(digest));
        if let Some(reason) = unstarted {
            self.fact(ToAgent::StartFailed {
                digest,
                attempt,
                reason,
            });
        }
        if self.ends_processes() {
            // Said while they parked: nobody needs them any more.
            let grace = self.register.spec.loss_grace();
            self.begin_stop(SIGTERM, grace, now);
        } else {
            self.try_spawn();
        }
    }

    /// They parked by themselves.
    pub(super) fn parked_alone(&mut self, acknowledged: bool, at_ms: u64, now: Time) {
        let Some(current) = self.current.as_mut().filter(|c| c.trains()) else {
            return;
        };
        if acknowledged {
            current.acknowledged = true;
            self.begin_stop(SIGTERM, LEFTOVER_GRACE, now);
        } else {
            current.alone_since.get_or_insert((now, at_ms));
        }
    }

    /// Ends the workers where no agent was heard for too long. A stop that is under way may wait for a step to end:
    /// then nobody waits for these any more.
    pub(super) fn stop_alone(&mut self, now: Time) {
        let over = self.alone_by.take_if(|at| now >= *at).is_some();
        self.alone = self.alone.or(over.then_some(now));
        let grace = self.register.spec.loss_grace();
        let current = self.current.as_mut().filter(|c| over && !c.parked);
        if let Some(stopping) = current.and_then(|c| c.stopping.as_mut()) {
            stopping.kill_at = stopping.kill_at.min(now + grace);
        }
        if self.alone.is_some() && self.current.as_ref().is_some_and(Current::trains) {
            self.say("the agent is away for too long: stopping the workers");
            self.begin_stop(SIGTERM, grace, now);
        }
    }

    /// The agent said that it is there.
    pub(super) fn heard(&mut self, now: Time) {
        self.mute_at = Some(now + MUTE);
        if std::mem::take(&mut self.mute) {
            self.say("the agent answers again");
        }
    }

    /// Says that a connected agent says nothing.
    pub(super) fn say_mute(&mut self, now: Time) {
        if self.mute_at.take_if(|at| now >= *at).is_none() {
            return;
        }
        self.mute = true;
        let trains = self.current.as_ref().is_some_and(Current::trains);
        let leaves = self.interrupts > 0 || self.leave_by.is_some();
        let by = self.alone_by.filter(|_| trains && !leaves);
        let rest = by.map(|by| format!("; the workers go on, for {} at most", by.since(now)));
        let rest = rest.unwrap_or_default();
        let seconds = MUTE.as_millis() / 1_000;
        self.say(format!(
            "the agent has said nothing for {seconds} s: it is stopped or blocked{rest}"
        ));
        self.leave_mute(now);
    }

    /// Whether this launcher answers for its node at its guard. Once no agent was heard for too long and its workers
    /// were ended for that, it does not: the others go on without this node at once, and it takes a new place when an
    /// agent is there again. Workers that have finished have done their part, which the agent tells when it is back.
    pub fn vouches(&self) -> bool {
        let runs = self.current.as_ref().is_some_and(|c| !c.parked);
        self.alone.is_none() || runs || self.has_finished()
    }

    /// Nobody told this launcher to stop, so no node and no worker is known to be lost; yet its
    /// workers lost each other. Said as a failure of theirs, it ends the generation for all.
    pub(super) fn gave_up(&mut self, now: Time) {
        let Some(current) = self.current.as_mut().filter(|c| c.trains()) else {
            return;
        };
        let since = current.alone_since.take_if(|(at, _)| now >= *at + ALONE);
        let Some((_, at_ms)) = since else {
            return;
        };
        let digest = current.start.digest;
        let exit = WorkerExit {
            rank: current.start.first_rank,
            local_rank: 0,
            pid: 0,
            code: GAVE_UP,
            signal: None,
            damaged: None,
            hung: false,
            out_of_memory: None,
            at_ms,
            tail: "the workers of this node lost a peer, though no node and no process was lost: look for what cuts connections between workers (a firewall, a proxy, a full conntrack table)".to_owned(),
        };
        current.failed.push(exit.clone());
        self.failures.push(exit.clone());
        self.fact(ToAgent::Exited { digest, exit });
    }
}
