//! The leader's part of the stop barrier.

use std::collections::{BTreeMap, VecDeque};

use super::{Error, ToLeader, ToNode};
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
        /// What saving takes at most: without a confirm this long before the deadline, the barrier
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
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Phase {
    Idle,
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
}

/// What a [`Event::Drain`] asks for.
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
    /// A drain that came while not every node had heard of such a decision.
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
            waiting: None,
            effects: VecDeque::new(),
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
                self.open_waiting(now);
            }
            Event::GiveUp => {
                self.waiting = None;
                if self.is_open() {
                    self.decide(Outcome::Cancelled(GivenUp::Stops), now);
                }
            }
        }
        Ok(())
    }

    pub fn handle_timeout(&mut self, now: Time) {
        // It has no time left to wait for its turn in: it is opened, and given up below.
        if let Some(drain) = self.waiting.take_if(|w| now >= w.give_up()) {
            self.open(drain, now);
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

    fn drain(&mut self, drain: Drain, now: Time) {
        let Drain { until, reason, .. } = drain;
        let too_late = drain.give_up();
        let stops = reason != Reason::Checkpoint;
        match &mut self.phase {
            // A checkpoint that is not decided makes way: another barrier, and who has installed the
            // one before keeps waiting.
            Phase::Open { .. } if stops && self.reason == Reason::Checkpoint => {
                self.open(drain, now)
            }
            Phase::Decided(Outcome::Confirmed { .. }) if self.passing => {
                if self.nodes.values().any(|n| !n.settled) {
                    self.waiting = Some(drain);
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
        self.install_above(self.barrier, now);
    }

    /// What is open is asked for anew, under a number that no node has heard of.
    fn install_above(&mut self, number: u32, now: Time) {
        self.barrier = number.saturating_add(1);
        for answered in self.nodes.values_mut() {
            *answered = Answered::default();
        }
        self.install_everywhere(now);
    }

    fn message(&mut self, from: NodeId, message: ToLeader, now: Time) -> Result<(), Error> {
        let (digest, number) = match message {
            ToLeader::Installed {
                digest, barrier, ..
            }
            | ToLeader::Settled { digest, barrier }
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
        let used = match message {
            ToLeader::Installed { .. } => false,
            ToLeader::Settled { .. } => number >= self.barrier,
            ToLeader::Newer { .. } => number > self.barrier,
        };
        if used && number < u32::MAX && matches!(self.phase, Phase::Open { .. }) {
            self.install_above(number, now);
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
            // It answers an older install that came late.
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
        self.send_to(now, |answered, step| match step {
            Some(step) => answered.installed != Some(step),
            None => !answered.settled,
        });
    }

    fn send_to(&mut self, now: Time, wants: impl Fn(&Answered, Option<u64>) -> bool) {
        let (digest, barrier) = (self.digest, self.barrier);
        let (step, message) = match &self.phase {
            Phase::Idle => return,
            Phase::Open { step, deadline, .. } => {
                let grace = deadline.since(now).as_millis();
                let install = ToNode::Install {
                    digest,
                    barrier,
                    step: *step,
                    grace_ms: u32::try_from(grace).unwrap_or(u32::MAX),
                    reason: self.reason,
                };
                (Some(*step), install)
            }
            Phase::Decided(Outcome::Confirmed { step }) => {
                let step = *step;
                let confirm = ToNode::Confirm {
                    digest,
                    barrier,
                    step,
                    reason: self.reason,
                };
                (None, confirm)
            }
            Phase::Decided(Outcome::Cancelled(_)) => (None, ToNode::Cancel { digest, barrier }),
        };
        self.resend_at = None;
        for (to, answered) in &self.nodes {
            if wants(answered, step) {
                let (to, message) = (*to, message.clone());
                self.effects.push_back(Effect::Send { to, message });
                self.resend_at = Some(now + RESEND);
            }
        }
    }
}
