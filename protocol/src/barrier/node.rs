//! A node's part of the stop barrier: between the leader and the local launcher.

use std::collections::VecDeque;

use super::{Error, ToLeader, ToNode};
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
    Confirmed,
    /// A checkpoint was confirmed: the ranks go on behind it.
    Passed,
    Cancelled,
}

/// The barriers of one generation as one of its nodes sees them. A node whose agent was restarted
/// begins with an empty one: its launcher holds the installed step.
#[derive(Clone, Debug)]
pub struct Node {
    digest: Digest,
    /// The newest barrier heard of; 0 for none.
    pub(super) barrier: u32,
    pub(super) phase: Phase,
    /// Of the newest install.
    reason: Reason,
    effects: VecDeque<Effect>,
}

impl Node {
    pub fn new(digest: Digest) -> Node {
        Node {
            digest,
            barrier: 0,
            phase: Phase::Cancelled,
            reason: Reason::Unknown,
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

    pub fn handle(&mut self, event: Event, now: Time) -> Result<(), Error> {
        let theirs = match &event {
            Event::Leader(
                ToNode::Install { digest, .. }
                | ToNode::Confirm { digest, .. }
                | ToNode::Cancel { digest, .. },
            )
            | Event::Installed { digest, .. } => *digest,
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
            Event::Installed { barrier, step, .. } => self.installed(barrier, step),
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
            Phase::Confirmed => return,
            Phase::Open {
                step: asked,
                installed,
                deadline,
            } if barrier == self.barrier && reason == self.reason => {
                // The same again: the launcher is asked once more only where it has not answered,
                // or has to know of a shorter time.
                let nothing_new = step <= asked && until >= deadline;
                if nothing_new && let Some(step) = installed {
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
                self.barrier = barrier;
                self.reason = reason;
                self.phase = Phase::Open {
                    step,
                    installed: None,
                    deadline: until,
                };
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
            } if barrier == self.barrier => {
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
            return Err(Error::NotOpen { barrier });
        }
        match self.phase {
            Phase::Confirmed | Phase::Passed if barrier == self.barrier => {}
            Phase::Cancelled if barrier == self.barrier => return Err(Error::NotOpen { barrier }),
            Phase::Open { installed, .. }
                if barrier == self.barrier && installed.is_some_and(|at| at != step) =>
            {
                return Err(Error::NotInstalled { step, installed });
            }
            // Also one that this agent does not remember: the launcher installed it before the
            // agent was restarted, else it would not be confirmed.
            _ => {
                self.barrier = barrier;
                self.reason = reason;
                self.phase = match reason {
                    Reason::Checkpoint => Phase::Passed,
                    _ => Phase::Confirmed,
                };
                self.launcher(ToLauncher::ConfirmStop {
                    digest: self.digest,
                    barrier,
                    step,
                    reason,
                });
            }
        }
        self.settled(barrier);
        Ok(())
    }

    fn cancel(&mut self, barrier: u32) -> Result<(), Error> {
        let stays = match self.phase {
            Phase::Confirmed => barrier >= self.barrier,
            Phase::Passed => barrier == self.barrier,
            Phase::Open { .. } | Phase::Cancelled => false,
        };
        if stays {
            return Err(Error::NotOpen { barrier });
        }
        let fresh = barrier > self.barrier || (barrier == self.barrier && self.is_open());
        if fresh {
            self.barrier = barrier;
            self.phase = Phase::Cancelled;
            self.launcher(ToLauncher::CancelStop {
                digest: self.digest,
                barrier,
            });
        }
        self.settled(barrier);
        Ok(())
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
