//! The leader's part of the stop barrier.

use std::collections::{BTreeMap, VecDeque};

use super::{Error, Held, ToLeader, ToNode};
use crate::control::Reason;
use crate::ids::{Digest, NodeId};
use crate::time::{Span, Time};

/// How often what is unanswered is sent again.
const RESEND: Span = Span::from_millis(250);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// A node has to leave, or the job to stop: every rank stops at one step. While a barrier is
    /// open the drain joins it; behind a confirm it shares its step.
    Drain {
        /// A step that the ranks can still reach ([`first_step`](super::first_step)). Ignored where
        /// a barrier is open already.
        step: u64,
        /// When the node is gone.
        deadline: Time,
        /// The most time that saving takes: without a confirm this long before the deadline, the barrier
        /// is given up.
        save_time: Span,
        reason: Reason,
    },
    Message {
        from: NodeId,
        message: ToLeader,
    },
    NodeLost {
        node: NodeId,
    },
    /// Ranks of this node wait, or will wait, at a step of this barrier that is not decided there:
    /// another leader's, one of an earlier run of this agent, or one whose decision was lost.
    Gated {
        node: NodeId,
        barrier: u32,
    },
    /// The job stops in another way: what is not decided is void.
    GiveUp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    Send {
        to: NodeId,
        message: ToNode,
    },
    /// The barrier is decided; once for each. Comes before the messages that tell the nodes.
    Decided {
        barrier: u32,
        outcome: Outcome,
    },
    /// A drain came behind the confirm: the ranks stop at this step already.
    Shared {
        barrier: u32,
        step: u64,
    },
    /// An earlier leader has confirmed this step, and not every node knows of it: they are told now.
    Resumed {
        step: u64,
        reason: Reason,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    /// Every rank stops at this step.
    Confirmed { step: u64 },
    /// No rank stops: the newest sealed copy is used.
    Cancelled(GivenUp),
}

/// Why a barrier was given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum GivenUp {
    #[error("not every node answered in time to save before the deadline")]
    Deadline,
    #[error("node {0} was lost")]
    Lost(NodeId),
    #[error("the job stops")]
    Stops,
    #[error("the job's leader was replaced before all had agreed")]
    TakenOver,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Phase {
    Idle,
    /// The state that the nodes hold is not known.
    Asking,
    Open {
        step: u64,
        deadline: Time,
        give_up: Time,
    },
    Decided(Outcome),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Answered {
    installed: Option<u64>,
    settled: bool,
    /// It said what it holds.
    holds: Option<Option<Held>>,
}

/// Content of an [`Event::Drain`].
#[derive(Clone, Copy, Debug)]
struct Drain {
    first: u64,
    until: Time,
    save_time: Span,
    reason: Reason,
}

impl Drain {
    /// When it is too late for an agreement.
    fn give_up(&self) -> Time {
        self.until - self.save_time
    }

    fn stops(&self) -> bool {
        self.reason != Reason::Checkpoint
    }
}

/// The barriers of one generation, one after the other.
#[derive(Clone, Debug)]
pub struct Leader {
    digest: Digest,
    pub(super) barrier: u32,
    pub(super) phase: Phase,
    pub(super) nodes: BTreeMap<NodeId, Answered>,
    pub(super) resend_at: Option<Time>,
    /// The decided barrier was a checkpoint: the ranks go on, and others may follow.
    passing: bool,
    /// Of the newest barrier.
    reason: Reason,
    /// No barrier of another leader, or of another run of this agent, can be under way.
    sure: bool,
    /// A drain that came while that was not so, or while not every node had heard of such a decision.
    waiting: Option<Drain>,
    effects: VecDeque<Effect>,
}

impl Leader {
    /// For the members of a generation. The first barrier's number is above `heard`, the greatest
    /// that this node knows of (0 for none).
    pub fn new(digest: Digest, nodes: impl IntoIterator<Item = NodeId>, heard: u32) -> Leader {
        Leader {
            digest,
            barrier: heard,
            phase: Phase::Idle,
            nodes: nodes
                .into_iter()
                .map(|n| (n, Answered::default()))
                .collect(),
            resend_at: None,
            passing: false,
            reason: Reason::Unknown,
            sure: true,
            waiting: None,
            effects: VecDeque::new(),
        }
    }

    /// The same, where another may have led the generation before, or an earlier run of this agent:
    /// what the nodes hold is asked for first.
    pub fn taking_over(
        digest: Digest,
        nodes: impl IntoIterator<Item = NodeId>,
        heard: u32,
    ) -> Leader {
        Leader {
            sure: false,
            ..Leader::new(digest, nodes, heard)
        }
    }

    /// The step that every rank stops at, once it is confirmed.
    pub fn confirmed(&self) -> Option<u64> {
        match self.phase {
            Phase::Decided(Outcome::Confirmed { step }) => Some(step),
            _ => None,
        }
    }

    pub fn handle(&mut self, event: Event, now: Time) -> Result<(), Error> {
        match event {
            Event::Drain {
                step,
                deadline,
                save_time,
                reason,
            } => {
                let drain = Drain {
                    first: step,
                    until: deadline,
                    save_time,
                    reason,
                };
                self.drain(drain, now);
            }
            Event::Message { from, message } => self.message(from, message, now)?,
            Event::NodeLost { node } => {
                if self.nodes.remove(&node).is_some() && self.is_open() {
                    self.decide(Outcome::Cancelled(GivenUp::Lost(node)), now);
                }
                self.conclude(now);
                self.open_waiting(now);
            }
            Event::Gated { node, barrier } => self.gated(node, barrier, now),
            Event::GiveUp => {
                self.waiting = None;
                if self.is_open() || matches!(self.phase, Phase::Asking) {
                    self.decide(Outcome::Cancelled(GivenUp::Stops), now);
                }
            }
        }
        Ok(())
    }

    pub fn handle_timeout(&mut self, now: Time) {
        // It has no time left to wait for its turn in.
        if let Some(drain) = self.waiting.take_if(|w| now >= w.give_up()) {
            if drain.stops() {
                // It is given up below: whoever waits goes on, to stop in another way.
                self.open(drain, now);
            } else {
                let (barrier, outcome) = (self.barrier, Outcome::Cancelled(GivenUp::Deadline));
                self.effects.push_back(Effect::Decided { barrier, outcome });
            }
        }
        if let Phase::Open { give_up, .. } = self.phase
            && now >= give_up
        {
            return self.decide(Outcome::Cancelled(GivenUp::Deadline), now);
        }
        if self.resend_at.is_some_and(|at| now >= at) {
            self.send(now);
        }
    }

    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        let resend = self.resend_at.map(|at| (at, "stop resend"));
        let give_up = match self.phase {
            Phase::Open { give_up, .. } => Some((give_up, "stop deadline")),
            _ => None,
        };
        let waiting = self.waiting.as_ref();
        let waiting = waiting.map(|w| (w.give_up(), "a stop behind a checkpoint"));
        let all = resend.into_iter().chain(give_up).chain(waiting);
        all.min_by_key(|(at, _)| *at)
    }

    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open { .. })
    }

    /// A drain that waited for a checkpoint's decision to be known everywhere.
    fn open_waiting(&mut self, now: Time) {
        let known = self.passing && self.nodes.values().all(|n| n.settled);
        if let Some(drain) = self.waiting.take_if(|_| known) {
            self.drain(drain, now);
        }
    }

    /// Keeps a drain for later: a stop goes before a checkpoint, and then what has less time.
    fn wait(&mut self, drain: Drain) {
        let order = |d: &Drain| (!d.stops(), d.give_up());
        let both = self.waiting.take().into_iter().chain([drain]);
        self.waiting = both.min_by_key(order);
    }

    fn drain(&mut self, drain: Drain, now: Time) {
        let until = drain.until;
        let too_late = drain.give_up();
        match &mut self.phase {
            Phase::Asking => self.wait(drain),
            _ if !self.sure => {
                self.wait(drain);
                self.ask_above(self.barrier, now);
            }
            // A checkpoint that is not decided makes way: another barrier, and who has installed the
            // one before keeps waiting.
            Phase::Open { .. } if drain.stops() && self.reason == Reason::Checkpoint => {
                self.open(drain, now)
            }
            Phase::Decided(Outcome::Confirmed { .. }) if self.passing => {
                if self.nodes.values().any(|n| !n.settled) {
                    self.wait(drain);
                } else {
                    self.open(drain, now);
                }
            }
            Phase::Open {
                deadline, give_up, ..
            } => {
                *give_up = (*give_up).min(too_late);
                if until < *deadline {
                    *deadline = until;
                    // The nodes have to know of the shorter time.
                    self.install_everywhere(now);
                }
            }
            Phase::Decided(Outcome::Confirmed { step }) => {
                let (barrier, step) = (self.barrier, *step);
                self.effects.push_back(Effect::Shared { barrier, step });
                return;
            }
            Phase::Idle | Phase::Decided(Outcome::Cancelled(_)) => self.open(drain, now),
        }
        // The notice may have come too late already.
        self.handle_timeout(now);
    }

    fn open(&mut self, drain: Drain, now: Time) {
        self.passing = false;
        self.reason = drain.reason;
        self.phase = Phase::Open {
            step: drain.first,
            deadline: drain.until,
            give_up: drain.give_up(),
        };
        self.barrier = self.barrier.saturating_add(1);
        for answered in self.nodes.values_mut() {
            *answered = Answered::default();
        }
        self.install_everywhere(now);
    }

    /// Another leader's barrier may be under way. The nodes are asked what they hold, under a number
    /// that none has heard of: one that answers takes nothing that was said before under a lower one.
    fn ask_above(&mut self, number: u32, now: Time) {
        if let Phase::Open {
            deadline, give_up, ..
        } = self.phase
        {
            self.wait(Drain {
                first: 1,
                until: deadline,
                save_time: deadline.since(give_up),
                reason: self.reason,
            });
        }
        self.sure = false;
        self.phase = Phase::Asking;
        self.barrier = number.saturating_add(1);
        for answered in self.nodes.values_mut() {
            *answered = Answered::default();
        }
        self.send(now);
    }

    /// All have said what they hold: what was confirmed stays so and is told to all, everything else
    /// is void.
    fn conclude(&mut self, now: Time) {
        let known = |n: &Answered| n.holds.is_some();
        if !matches!(self.phase, Phase::Asking) || !self.nodes.values().all(known) {
            return;
        }
        self.sure = true;
        self.phase = Phase::Idle;
        self.resend_at = None;
        let all: Vec<Option<Held>> = self.nodes.values().map(|n| n.holds.flatten()).collect();
        let held = || all.iter().flatten();
        let newest = held().map(|h| h.barrier).max();
        // Nothing is opened behind a confirm before every node knows of it.
        let confirmed = held().find(|h| h.confirmed && Some(h.barrier) == newest);
        let passed = |step: u64| {
            let there = |h: &Held| h.confirmed && h.step == step;
            all.iter().all(|h| h.as_ref().is_some_and(there))
        };
        let stops = |r: Reason| r != Reason::Checkpoint;
        match confirmed.copied() {
            Some(Held { step, reason, .. }) if stops(reason) || !passed(step) => {
                self.reason = reason;
                self.passing = !stops(reason);
                self.phase = Phase::Decided(Outcome::Confirmed { step });
                self.effects.push_back(Effect::Resumed { step, reason });
                // Whoever wants the same has it.
                let same = |d: &mut Drain| stops(reason) || !d.stops();
                if self.waiting.take_if(same).is_some() && stops(reason) {
                    let barrier = self.barrier;
                    self.effects.push_back(Effect::Shared { barrier, step });
                }
                self.send(now);
            }
            _ => match self.waiting.take() {
                Some(drain) => self.drain(drain, now),
                None if held().any(|h| !h.confirmed) => {
                    self.decide(Outcome::Cancelled(GivenUp::TakenOver), now);
                }
                None => {}
            },
        }
    }

    fn gated(&mut self, node: NodeId, number: u32, now: Time) {
        let Some(answered) = self.nodes.get_mut(&node) else {
            return;
        };
        match self.phase {
            Phase::Asking => {}
            Phase::Open { .. } if number <= self.barrier => {}
            Phase::Decided(_) if number <= self.barrier => {
                // It said that it knows, and its launcher never heard of it.
                if std::mem::take(&mut answered.settled) {
                    self.send(now);
                }
            }
            // There is no number above it: no agent says this one.
            _ if number == u32::MAX => {}
            _ => self.ask_above(self.barrier.max(number), now),
        }
    }

    fn message(&mut self, from: NodeId, message: ToLeader, now: Time) -> Result<(), Error> {
        let (digest, number) = match message {
            ToLeader::Installed {
                digest, barrier, ..
            }
            | ToLeader::Settled { digest, barrier }
            | ToLeader::Holds {
                digest, barrier, ..
            }
            | ToLeader::Newer { digest, barrier } => (digest, barrier),
        };
        if digest != self.digest {
            return Err(Error::OtherGeneration {
                ours: self.digest,
                theirs: digest,
            });
        }
        let answered = self.nodes.get_mut(&from).ok_or(Error::NotAMember)?;
        // Another leader's, or of another run of this agent: it settled there under this number, or
        // heard of greater ones.
        let used = match (message, &self.phase) {
            (ToLeader::Settled { .. }, Phase::Open { .. }) => number >= self.barrier,
            (ToLeader::Newer { .. }, Phase::Open { .. } | Phase::Asking) => number > self.barrier,
            // Somebody led for a moment: what is decided here is not taken there any more.
            (ToLeader::Newer { .. }, Phase::Decided(_)) => {
                !answered.settled && number > self.barrier
            }
            _ => false,
        };
        if used && number < u32::MAX {
            self.ask_above(number, now);
            return Ok(());
        }
        if number != self.barrier {
            return Err(Error::NotOpen { barrier: number });
        }
        match (message, &self.phase) {
            (ToLeader::Installed { step, .. }, Phase::Open { .. }) => {
                answered.installed = answered.installed.max(Some(step));
                self.raise_or_confirm(now);
            }
            // It answers an install that was repeated meanwhile.
            (ToLeader::Installed { .. }, _) => {}
            (ToLeader::Settled { .. }, Phase::Decided(_)) => {
                answered.settled = true;
                if self.nodes.values().all(|n| n.settled) {
                    self.resend_at = None;
                }
                self.open_waiting(now);
            }
            (ToLeader::Settled { .. }, _) => return Err(Error::NotOpen { barrier: number }),
            (ToLeader::Holds { held, .. }, Phase::Asking) => {
                answered.holds = Some(held);
                self.conclude(now);
            }
            // It answers a question that was repeated meanwhile.
            (ToLeader::Holds { .. }, _) => {}
            // It answers what came late.
            (ToLeader::Newer { .. }, _) => {}
        }
        Ok(())
    }

    fn raise_or_confirm(&mut self, now: Time) {
        let Phase::Open { step, .. } = &mut self.phase else {
            return;
        };
        let furthest = self.nodes.values().filter_map(|n| n.installed).max();
        let raised = furthest > Some(*step);
        *step = furthest.map_or(*step, |at| at.max(*step));
        let step = *step;
        if self.nodes.values().all(|n| n.installed == Some(step)) {
            self.decide(Outcome::Confirmed { step }, now);
        } else if raised {
            self.send(now);
        }
    }

    fn decide(&mut self, outcome: Outcome, now: Time) {
        let barrier = self.barrier;
        let checkpoint = self.reason == Reason::Checkpoint;
        self.passing = checkpoint && matches!(outcome, Outcome::Confirmed { .. });
        self.phase = Phase::Decided(outcome);
        self.effects.push_back(Effect::Decided { barrier, outcome });
        self.send(now);
    }

    fn install_everywhere(&mut self, now: Time) {
        self.send_to(now, |_, _| true);
    }

    /// Sends what is current to everybody who has not answered it.
    fn send(&mut self, now: Time) {
        self.send_to(now, |answered, phase| match phase {
            Phase::Idle => false,
            Phase::Asking => answered.holds.is_none(),
            Phase::Open { step, .. } => answered.installed != Some(*step),
            Phase::Decided(_) => !answered.settled,
        });
    }

    fn send_to(&mut self, now: Time, wants: impl Fn(&Answered, &Phase) -> bool) {
        let (digest, barrier) = (self.digest, self.barrier);
        let message = match &self.phase {
            Phase::Idle => return,
            Phase::Asking => ToNode::Ask { digest, barrier },
            Phase::Open { step, deadline, .. } => {
                let grace = deadline.since(now).as_millis();
                ToNode::Install {
                    digest,
                    barrier,
                    step: *step,
                    grace_ms: u32::try_from(grace).unwrap_or(u32::MAX),
                    reason: self.reason,
                }
            }
            Phase::Decided(Outcome::Confirmed { step }) => ToNode::Confirm {
                digest,
                barrier,
                step: *step,
                reason: self.reason,
            },
            Phase::Decided(Outcome::Cancelled(_)) => ToNode::Cancel { digest, barrier },
        };
        self.resend_at = None;
        for (to, answered) in &self.nodes {
            if wants(answered, &self.phase) {
                let (to, message) = (*to, message.clone());
                self.effects.push_back(Effect::Send { to, message });
                self.resend_at = Some(now + RESEND);
            }
        }
    }
}
