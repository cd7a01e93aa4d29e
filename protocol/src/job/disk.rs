//! The job's state on the disk, and what may be said only once it is there (R5, R6).

use super::{Ctx, Job, REPEAT};
use crate::agent::{Effect, Notice};
use crate::wire::{JobMessage, Message};

impl Job {
    /// Makes the durable state durable before anything that is queued after it.
    pub(super) fn persist(&mut self, ctx: &mut Ctx<'_>) {
        match self.durable.encode() {
            Ok(bytes) => self.effects.push_back(Effect::Persist {
                key: self.key.clone(),
                bytes,
            }),
            Err(error) => {
                // The limits on what is in it make this impossible; if it happens, this agent abstains.
                self.notice(Notice::Trouble {
                    key: self.key.clone(),
                    text: format!("the job's state cannot be stored: {error}"),
                });
                self.abstains_until = Some(ctx.now + REPEAT);
            }
        }
    }

    /// As `persist`, for what a vote rests on: whether it is on its way to the disk, so that the vote
    /// may be queued behind it.
    pub(super) fn is_stored(&mut self, ctx: &mut Ctx<'_>) -> bool {
        self.persist(ctx);
        !self.abstains()
    }

    /// The disk refused a write: the votes that it was to back are not given. This voter abstains
    /// and tries again now and then. Messages that need no durable state are sent all the same.
    pub(crate) fn persist_failed(&mut self, ctx: &mut Ctx<'_>) {
        self.abstains_until = Some(ctx.now + REPEAT);
        self.effects.retain(|effect| match effect {
            Effect::Persist { .. } => false,
            Effect::Send {
                message: Message::Job { body, .. },
                ..
            } => !is_vote(body),
            _ => true,
        });
        self.own_votes.clear();
        self.drop_unstored();
        self.drive(ctx);
    }

    /// Lets this agent's own votes count, unless the driver has yet to write what they say.
    pub(super) fn count_own_votes(&mut self, ctx: &Ctx<'_>) {
        if self.own_votes.is_empty() {
            return;
        }
        let writing = |e: &Effect| matches!(e, Effect::Persist { .. });
        if self.effects.iter().any(writing) {
            self.wake_at(ctx.now, "own vote on its way to the disk");
        } else {
            self.loopback.append(&mut self.own_votes);
        }
    }

    pub(super) fn retry_persist(&mut self, ctx: &mut Ctx<'_>) {
        if let Some(at) = self.abstains_until {
            if ctx.now < at {
                self.wake_at(at, "write the job's state again");
            } else {
                self.abstains_until = None;
                self.persist(ctx);
            }
        }
    }

    pub(crate) fn abstains(&self) -> bool {
        self.abstains_until.is_some()
    }
}

/// Whether a message rests on the durable state: a vote, or a leader's word that it must not forget. A
/// proposal of a later round rests on what a majority promised.
pub(super) fn is_vote(body: &JobMessage) -> bool {
    match body {
        JobMessage::Accept { ballot, .. } => ballot.round == 0,
        JobMessage::Promise { .. }
        | JobMessage::Accepted { .. }
        | JobMessage::Commit { .. }
        | JobMessage::Committed { .. }
        | JobMessage::BirthAccepted { .. } => true,
        _ => false,
    }
}
