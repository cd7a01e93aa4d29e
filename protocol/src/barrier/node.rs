//! A node's part of the stop barrier: between the leader and the local launcher.

use std::collections::VecDeque;

use super::{Error, Held, ToLeader, ToNode};
use crate::control::Reason;
use crate::ids::Digest;
use crate::local::ToLauncher;
use crate::time::{Span, Time};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    Leader(ToNode),
    /// The launcher's answer to an install ([`ToAgent::StopInstalled`](crate::local::ToAgent)).
    Installed {
        digest: Digest,
        barrier: u32,
        step: u64,
    },
    /// The launcher came, or came back, and says what it holds.
    Launcher {
        digest: Digest,
        held: Option<Held>,
    },
    /// The launcher has told its workers to save at this step.
    Saves {
        digest: Digest,
        step: u64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    ToLauncher(ToLauncher),
    ToLeader(ToLeader),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Phase {
    /// Asked for, and installed where the launcher has answered.
    Open {
        step: u64,
        installed: Option<u64>,
        deadline: Time,
    },
    Confirmed {
        step: u64,
    },
    /// A checkpoint was confirmed: the ranks go on behind it. `known`: the launcher has heard of it.
    Passed {
        step: u64,
        known: bool,
    },
    Cancelled,
}

/// A [`Phase::Passed`] that another barrier was opened behind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Before {
    barrier: u32,
    step: u64,
    known: bool,
}

/// The barriers of one generation as one of its nodes sees them. A node whose agent was restarted
/// begins with an empty one: its launcher says what it holds.
#[derive(Clone, Debug)]
pub struct Node {
    digest: Digest,
    /// The newest barrier heard of; 0 for none. Messages under a lower one are not taken.
    pub(super) barrier: u32,
    /// The barrier that the phase belongs to.
    pub(super) at: u32,
    pub(super) phase: Phase,
    /// Of the newest install.
    reason: Reason,
    /// The checkpoint that was confirmed before what is open: whoever cancels that leaves this one.
    pub(super) before: Option<Before>,
    /// The greatest number that was cancelled: what is not confirmed under it, or a lower one, is void.
    pub(super) void: u32,
    effects: VecDeque<Effect>,
}

impl Node {
    pub fn new(digest: Digest) -> Node {
        Node {
            digest,
            barrier: 0,
            at: 0,
            phase: Phase::Cancelled,
            reason: Reason::Unknown,
            before: None,
            void: 0,
            effects: VecDeque::new(),
        }
    }

    /// The greatest number of a barrier that this node has heard of; 0 for none.
    pub fn heard(&self) -> u32 {
        self.barrier
    }

    /// Whether ranks wait, or will wait, at a step that is not decided yet.
    pub fn is_open(&self) -> bool {
        matches!(self.phase, Phase::Open { .. })
    }

    /// The barrier whose step that is.
    pub fn open(&self) -> Option<u32> {
        self.is_open().then_some(self.at)
    }

    pub(crate) fn held(&self) -> Option<Held> {
        let (step, confirmed) = match self.phase {
            Phase::Open {
                step, installed, ..
            } => (installed.unwrap_or(step), false),
            Phase::Confirmed { step } | Phase::Passed { step, .. } => (step, true),
            Phase::Cancelled => return None,
        };
        Some(Held {
            barrier: self.at,
            step,
            reason: self.reason,
            confirmed,
        })
    }

    pub fn handle(&mut self, event: Event, now: Time) -> Result<(), Error> {
        let theirs = match &event {
            Event::Leader(
                ToNode::Install { digest, .. }
                | ToNode::Confirm { digest, .. }
                | ToNode::Cancel { digest, .. }
                | ToNode::Ask { digest, .. },
            )
            | Event::Installed { digest, .. }
            | Event::Launcher { digest, .. }
            | Event::Saves { digest, .. } => *digest,
        };
        if theirs != self.digest {
            let ours = self.digest;
            return Err(Error::OtherGeneration { ours, theirs });
        }
        match event {
            Event::Leader(ToNode::Install {
                barrier,
                step,
                grace_ms,
                reason,
                ..
            }) => {
                self.install(barrier, step, grace_ms, reason, now);
                Ok(())
            }
            Event::Leader(ToNode::Confirm {
                barrier,
                step,
                reason,
                ..
            }) => self.confirm(barrier, step, reason),
            Event::Leader(ToNode::Cancel { barrier, .. }) => self.cancel(barrier),
            Event::Leader(ToNode::Ask { barrier, .. }) => {
                self.asked(barrier);
                Ok(())
            }
            Event::Installed { barrier, step, .. } => self.installed(barrier, step),
            Event::Launcher { held, .. } => {
                self.launcher_holds(held, now);
                Ok(())
            }
            Event::Saves { step, .. } => {
                self.saves(step);
                Ok(())
            }
        }
    }

    /// The node waits for messages alone.
    pub fn handle_timeout(&mut self, _now: Time) {}

    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        None
    }

    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    fn install(&mut self, barrier: u32, step: u64, grace_ms: u32, reason: Reason, now: Time) {
        let until = now + Span::from_millis(grace_ms.into());
        let asked = match self.phase {
            // An older install that comes late, or of a leader that does not know how far they are.
            _ if barrier < self.barrier => return self.newer(),
            _ if barrier == self.barrier && !self.is_open() => return self.settled(barrier),
            // The leader opens no barrier behind one that it confirmed.
            Phase::Confirmed { .. } => return,
            Phase::Open {
                step: asked,
                installed,
                deadline,
            } if barrier == self.at && reason == self.reason => {
                // The same again: the launcher is asked once more only where it has not answered,
                // or has to know of a shorter time.
                let nothing_new = step <= asked && until >= deadline;
                let there = installed.filter(|at| *at >= asked);
                if nothing_new && let Some(step) = there {
                    return self.report(barrier, step);
                }
                let step = step.max(asked);
                self.phase = Phase::Open {
                    step,
                    installed,
                    deadline: deadline.min(until),
                };
                step
            }
            // A new one. The one before was cancelled, whether or not the cancel arrived, or its
            // leader is another.
            _ => {
                self.enter(
                    barrier,
                    reason,
                    Phase::Open {
                        step,
                        installed: None,
                        deadline: until,
                    },
                );
                step
            }
        };
        self.launcher(ToLauncher::InstallStop {
            digest: self.digest,
            barrier,
            step: asked,
            grace_ms,
            reason,
        });
    }

    fn installed(&mut self, barrier: u32, now_at: u64) -> Result<(), Error> {
        match &mut self.phase {
            Phase::Open {
                step, installed, ..
            } if barrier == self.at => {
                *installed = (*installed).max(Some(now_at));
                *step = (*step).max(now_at);
                let step = installed.unwrap_or(now_at);
                self.report(barrier, step);
                Ok(())
            }
            _ => Err(Error::NotOpen { barrier }),
        }
    }

    fn confirm(&mut self, barrier: u32, step: u64, reason: Reason) -> Result<(), Error> {
        if barrier < self.barrier {
            self.newer();
            return Err(Error::NotOpen { barrier });
        }
        let phase = match self.phase {
            Phase::Cancelled if barrier == self.at => return Err(Error::NotOpen { barrier }),
            Phase::Open { installed, .. } if installed.is_some_and(|at| at != step) => {
                return Err(Error::NotInstalled { step, installed });
            }
            // The same again, perhaps of another leader.
            Phase::Confirmed { step: at } if at == step => self.phase,
            Phase::Passed { step: at, .. } if at == step => self.phase,
            // Also one that this agent does not remember: the launcher installed it before the
            // agent was restarted, else it would not be confirmed.
            _ => {
                let phase = match reason {
                    Reason::Checkpoint => Phase::Passed { step, known: false },
                    _ => Phase::Confirmed { step },
                };
                self.enter(barrier, reason, phase);
                self.tell_confirm(step);
                phase
            }
        };
        let again = self.at != barrier || self.reason != reason;
        self.enter(barrier, reason, phase);
        match phase {
            Phase::Passed { known: false, .. } if again => self.tell_confirm(step),
            Phase::Passed { known: false, .. } => {}
            _ => self.settled(barrier),
        }
        Ok(())
    }

    fn cancel(&mut self, barrier: u32) -> Result<(), Error> {
        match self.phase {
            // Not taken, and ranks still wait.
            Phase::Open { .. } if barrier < self.barrier => {
                self.newer();
                return Err(Error::NotOpen { barrier });
            }
            Phase::Confirmed { .. } if barrier >= self.barrier => {
                return Err(Error::NotOpen { barrier });
            }
            Phase::Passed { .. } if barrier == self.at => return Err(Error::NotOpen { barrier }),
            // Of a later one than that which was passed: nothing of it is installed here.
            Phase::Confirmed { .. } | Phase::Passed { .. } => {
                self.barrier = self.barrier.max(barrier);
                self.void = self.void.max(barrier);
            }
            Phase::Open { .. } | Phase::Cancelled => {
                let fresh = barrier > self.barrier || (barrier == self.barrier && self.is_open());
                if fresh {
                    self.barrier = barrier;
                    self.void = barrier;
                    // What was confirmed before it stays so, here as at whoever never heard of this one.
                    match self.before.take() {
                        Some(b) => {
                            let (step, known) = (b.step, b.known);
                            let phase = Phase::Passed { step, known };
                            self.enter(b.barrier, Reason::Checkpoint, phase);
                        }
                        None => self.enter(barrier, self.reason, Phase::Cancelled),
                    }
                    self.tell_cancel(barrier);
                }
            }
        }
        self.settled(barrier);
        Ok(())
    }

    fn asked(&mut self, barrier: u32) {
        if barrier < self.barrier {
            return self.newer();
        }
        self.barrier = barrier;
        self.effects.push_back(Effect::ToLeader(ToLeader::Holds {
            digest: self.digest,
            barrier,
            held: self.held(),
        }));
    }

    /// Tells the launcher again what it missed; takes from it what this agent does not remember.
    fn launcher_holds(&mut self, held: Option<Held>, now: Time) {
        let unknown = |h: &Held| match self.phase {
            Phase::Open { .. } if h.confirmed => h.barrier >= self.at,
            // A cancel voids nothing that is confirmed.
            Phase::Cancelled if h.confirmed => true,
            _ => h.barrier > self.at && (h.confirmed || h.barrier > self.void),
        };
        if let Some(h) = held.filter(unknown) {
            let step = h.step;
            let phase = match (h.confirmed, h.reason) {
                (false, _) => Phase::Open {
                    step,
                    installed: Some(step),
                    // Until its leader names a time, whatever that is.
                    deadline: Time(u64::MAX),
                },
                (true, Reason::Checkpoint) => Phase::Passed { step, known: true },
                (true, _) => Phase::Confirmed { step },
            };
            return self.enter(h.barrier, h.reason, phase);
        }
        let barrier = self.at;
        match (self.phase, held) {
            (Phase::Passed { step, .. }, Some(h)) if h.confirmed => {
                if h.step == step {
                    self.saves(step);
                }
            }
            (Phase::Passed { .. }, Some(h)) if h.barrier > barrier => self.tell_cancel(self.void),
            (Phase::Confirmed { step } | Phase::Passed { step, .. }, Some(_)) => {
                self.tell_confirm(step);
            }
            (Phase::Cancelled, Some(h)) if !h.confirmed => self.tell_cancel(barrier),
            (Phase::Open { step, deadline, .. }, held) => {
                let before = held.filter(|h| h.confirmed && h.reason == Reason::Checkpoint);
                self.before = self.before.or(before.map(|h| Before {
                    barrier: h.barrier,
                    step: h.step,
                    known: true,
                }));
                let installed = held.filter(|h| h.barrier == barrier).map(|h| h.step);
                let step = installed.map_or(step, |at| at.max(step));
                self.phase = Phase::Open {
                    step,
                    installed,
                    deadline,
                };
                if installed == Some(step) {
                    return self.report(barrier, step);
                }
                let grace = deadline.since(now).as_millis();
                self.launcher(ToLauncher::InstallStop {
                    digest: self.digest,
                    barrier,
                    step,
                    grace_ms: u32::try_from(grace).unwrap_or(u32::MAX),
                    reason: self.reason,
                });
            }
            _ => {}
        }
    }

    fn saves(&mut self, at: u64) {
        if let Phase::Passed { step, known } = &mut self.phase
            && *step == at
            && !std::mem::replace(known, true)
        {
            self.settled(self.at);
        }
    }

    fn enter(&mut self, barrier: u32, reason: Reason, phase: Phase) {
        if let (Phase::Passed { step, known }, Phase::Open { .. }) = (self.phase, phase) {
            let barrier = self.at;
            self.before = Some(Before {
                barrier,
                step,
                known,
            });
        }
        self.barrier = self.barrier.max(barrier);
        self.at = barrier;
        self.reason = reason;
        self.phase = phase;
    }

    fn tell_confirm(&mut self, step: u64) {
        self.launcher(ToLauncher::ConfirmStop {
            digest: self.digest,
            barrier: self.at,
            step,
            reason: self.reason,
        });
    }

    fn tell_cancel(&mut self, barrier: u32) {
        self.launcher(ToLauncher::CancelStop {
            digest: self.digest,
            barrier,
        });
    }

    fn launcher(&mut self, frame: ToLauncher) {
        self.effects.push_back(Effect::ToLauncher(frame));
    }

    fn report(&mut self, barrier: u32, step: u64) {
        self.effects
            .push_back(Effect::ToLeader(ToLeader::Installed {
                digest: self.digest,
                barrier,
                step,
            }));
    }

    fn settled(&mut self, barrier: u32) {
        self.effects.push_back(Effect::ToLeader(ToLeader::Settled {
            digest: self.digest,
            barrier,
        }));
    }

    fn newer(&mut self) {
        self.effects.push_back(Effect::ToLeader(ToLeader::Newer {
            digest: self.digest,
            barrier: self.barrier,
        }));
    }
}
