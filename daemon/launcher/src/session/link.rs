//! The connection to the agent: what goes over it, what is told again on each, and what came too late.

use muster_protocol::local::{Began, SaveAsk, ToAgent, ToLauncher};
use muster_protocol::{Digest, Span, Time};

use super::leaving::INTERRUPTED;
use super::{Effect, REMEMBERED, Session};
use crate::signal::SIGTERM;

/// The time that the agent has to say something on a link that was renewed. Twice what it leaves between two words.
const AWAKE: Span = Span::from_millis(2_000);

/// A lease before the agent has said how long one is: that of the usual settings.
const LEASE: Span = Span::from_millis(1_500);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    Down,
    Up,
    /// This process was stopped, or the machine slept, for longer than a lease: the job may have gone on without
    /// this node since the agent said what lies there. The caller ends it; a new one brings what holds.
    Outdated,
}

/// Whether it counts on an old link as well: an agent hands down checkpoint slots once, and how this launcher's part
/// ends may be the last word of one that is gone.
pub fn is_said_once(frame: &ToLauncher) -> bool {
    matches!(
        frame,
        ToLauncher::End { .. } | ToLauncher::Save(SaveAsk::Inherit { .. })
    )
}

impl Session {
    /// How often the caller says that it runs.
    pub fn pulse(&self) -> Span {
        Span(self.counted_lease().0 / 3)
    }

    fn counted_lease(&self) -> Span {
        match self.lease {
            Span::ZERO => LEASE,
            lease => lease,
        }
    }

    /// This process runs, and did so last at `since`: the caller says so with each [pulse](Self::pulse), before each
    /// event, and before the effects that follow. `true`: it stood still for a whole lease, and the caller has to end
    /// the link.
    #[must_use]
    pub fn runs_again(&mut self, since: Time, now: Time) -> bool {
        let renews = self.link == Link::Up && now >= since + self.counted_lease();
        if renews {
            self.outdate(now);
        }
        renews
    }

    /// The sidecar ended the workers of this generation while this process was stopped, which is no failure of
    /// theirs. `true`: the caller has to end the link.
    #[must_use]
    pub fn lapsed(&mut self, digest: Digest, now: Time) -> bool {
        if !self.runs(digest) {
            return false;
        }
        self.outdate(now);
        let why = "this launcher was stopped or blocked for too long";
        self.stop(digest, SIGTERM, 0, why, now);
        true
    }

    fn outdate(&mut self, now: Time) {
        self.link_down(now);
        self.link = Link::Outdated;
        // Taken back: they begin once the agent says again that they should.
        let spawn = |e: &Effect| matches!(e, Effect::Spawn { .. });
        if let Some(at) = self.effects.iter().position(spawn)
            && let Some(Effect::Spawn { local, .. }) = self.effects.remove(at)
            && let Some(pending) = &mut self.pending
        {
            pending.verified = Some(Ok(local));
        }
        // It may have said that it is there.
        self.alone_by = self.alone_by.map(|by| by.max(now + AWAKE));
    }

    /// How long the workers may go on after the last word of this process; zero before an agent has said so.
    pub fn lease(&self) -> Span {
        self.lease
    }

    /// Whether this process gave up its link itself, and has no other yet.
    pub fn is_outdated(&self) -> bool {
        self.link == Link::Outdated
    }

    /// Whether what the agent says counts.
    pub fn takes(&self, frame: &ToLauncher) -> bool {
        !self.is_outdated() || is_said_once(frame)
    }

    pub(super) fn link_down(&mut self, now: Time) {
        if self.link == Link::Up {
            self.link = Link::Down;
        }
        self.mute_at = None;
        // The agent may have taken it back: it says it again.
        if let Some(pending) = &mut self.pending {
            pending.confirmed = false;
        }
        let by = self.agent_grace.filter(|_| self.alone.is_none());
        self.alone_by = self.alone_by.or(by.map(|grace| now + grace));
        if self.interrupts > 0 {
            self.awaits_return(INTERRUPTED, now);
        }
    }

    pub(super) fn send(&mut self, frame: ToAgent) {
        if self.link == Link::Up {
            self.effects.push_back(Effect::Send(frame));
        }
    }

    /// A fact about the newest generation: sent now, and again on every later link.
    pub(super) fn fact(&mut self, frame: ToAgent) {
        if !self.facts.contains(&frame) {
            let stopped = |f: &ToAgent| matches!(f, ToAgent::Stopped { .. });
            if self.facts.len() >= REMEMBERED
                && let Some(oldest) = self.facts.iter().position(stopped)
            {
                self.facts.remove(oldest);
            }
            self.facts.push(frame.clone());
        }
        self.send(frame);
    }

    /// The last of a generation first: an agent that heard only that its workers were started would miss their lease.
    pub(super) fn facts_again(&mut self) {
        let is_last = |f: &&ToAgent| matches!(f, ToAgent::Finished { .. });
        let (last, before): (Vec<_>, Vec<_>) = self.facts.iter().partition(is_last);
        let all: Vec<ToAgent> = last.into_iter().chain(before).cloned().collect();
        for frame in all {
            self.send(frame);
        }
    }

    pub(super) fn wish(&mut self, frame: ToAgent) {
        self.wishes.push(frame.clone());
        self.send(frame);
    }

    pub(super) fn link_up(&mut self, now: Time) {
        self.link = Link::Up;
        self.mute = false;
        let mut register = self.register.clone();
        let since = *self.since.get_or_insert(now);
        register.waited_ms = u32::try_from(now.since(since).as_millis()).unwrap_or(u32::MAX);
        let current = self.current.as_ref().filter(|c| !c.parked);
        register.running = current.map(|c| c.start.digest);
        let lineage = self.numbers.back().map(|(lineage, _)| *lineage);
        register.began = self
            .newest
            .zip(lineage)
            .map(|((digest, _), lineage)| Box::new(Began { lineage, digest }));
        if let Some(current) = current {
            register.gate = current.held.filter(|_| current.trains());
        }
        self.send(ToAgent::Register(register));
        self.facts_again();
        // Last: with a port workers can be started, and these may have run and ended.
        if let Some(port) = self.port {
            self.send(ToAgent::MasterPort { port });
        }
        for frame in self.wishes.clone() {
            self.send(frame);
        }
    }
}
