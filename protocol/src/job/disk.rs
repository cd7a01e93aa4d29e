//! The job's state on the disk, and what may be said only once it is there (R5, R6).

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Ctx, Durable, Job, REPEAT};
use crate::agent::{Effect, Notice};
use crate::checkpoint::Part;
use crate::record::Record;
use crate::time::Time;
use crate::wire::{JobMessage, Message};

/// The most votes that wait for a disk.
const MOST_VOTES: usize = 256;

/// Writes of the job's state. One is under way at a time; what changes meanwhile is in the next.
#[derive(Clone, Debug, Default)]
pub(super) struct Writes {
    /// How many were asked for, and how many of these are done.
    asked: u64,
    done: u64,
    /// Since when one is under way.
    since: Option<Time>,
    /// Records that the newest one holds.
    records: Records,
    /// This agent's own votes, each with the number of the write that it rests on: it counts once that is done.
    own_votes: VecDeque<(u64, JobMessage)>,
}

impl Writes {
    /// Queues this agent's own vote behind the writes that it rests on.
    pub(super) fn vote(&mut self, vote: JobMessage) {
        self.own_votes.push_back((self.asked, vote));
        let surplus = self.own_votes.len().saturating_sub(MOST_VOTES);
        self.own_votes.drain(..surplus);
    }

    /// Takes the own votes whose writes are done: they count by now.
    pub(super) fn backed(&mut self) -> impl Iterator<Item = JobMessage> {
        let done = self.done;
        let backed = self.own_votes.partition_point(|(write, _)| *write <= done);
        self.own_votes.drain(..backed).map(|(_, vote)| vote)
    }
}

/// The head, the change of its voters, and the birth that is bound to: votes are on what follows them.
type Records = [Option<Arc<Record>>; 3];

fn records(durable: &Durable) -> Records {
    let Durable {
        head,
        voters,
        bound,
        ..
    } = durable;
    [head.clone(), voters.clone(), bound.clone()]
}

fn are_same(some: &Records, others: &Records) -> bool {
    let mut pairs = some.iter().zip(others);
    pairs.all(|pair| match pair {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        (one, other) => one.is_none() && other.is_none(),
    })
}

impl Job {
    /// Makes the durable state durable before any vote that is queued after it.
    pub(super) fn persist(&mut self, ctx: &mut Ctx<'_>) {
        let bytes = match self.durable.encode() {
            Ok(bytes) => bytes,
            Err(error) => {
                // The limits on what is in it make this impossible; if it happens, this agent abstains.
                self.notice(Notice::Trouble {
                    key: self.key.clone(),
                    text: format!("the job's state cannot be stored: {error}"),
                });
                self.abstains_until = Some(ctx.now + REPEAT);
                return;
            }
        };
        let records = records(&self.durable);
        let queued = self
            .effects
            .iter_mut()
            .rev()
            .find_map(|effect| match effect {
                Effect::Persist { bytes, .. } => Some(bytes),
                _ => None,
            });
        if let Some(queued) = queued.filter(|_| are_same(&records, &self.writes.records)) {
            // All that waits for that write may as well wait for this one.
            *queued = bytes;
            return;
        }
        self.writes.asked += 1;
        self.writes.records = records;
        self.effects.push_back(Effect::Persist {
            key: self.key.clone(),
            bytes,
        });
    }

    /// As `persist`, for what a vote rests on: whether it is on its way to the disk, so that the vote
    /// may be queued behind it.
    pub(super) fn is_stored(&mut self, ctx: &mut Ctx<'_>) -> bool {
        self.persist(ctx);
        !self.abstains()
    }

    /// The next effect that may be carried out. While a write is under way only those are that do not rest on it:
    /// a disk that takes its time keeps nobody from hearing that workers have to end, or have ended.
    pub(crate) fn poll_effect(&mut self, now: Time) -> Option<Effect> {
        if self.writes.since.is_some() {
            let next = self.effects.iter().position(|e| !rests_on_disk(e))?;
            return self.effects.remove(next);
        }
        let effect = self.effects.pop_front();
        if matches!(effect, Some(Effect::Persist { .. })) {
            self.writes.since = Some(now);
        }
        effect
    }

    /// Whether nothing is left to carry out, nor under way.
    pub(crate) fn is_carried_out(&self) -> bool {
        self.effects.is_empty() && self.writes.since.is_none()
    }

    /// Since when a write has been under way.
    pub(crate) fn writes_since(&self) -> Option<Time> {
        self.writes.since
    }

    /// The write that was under way is durable.
    pub(crate) fn persisted(&mut self, now: Time) {
        if self.writes.since.take().is_none() {
            return;
        }
        self.writes.done += 1;
        // The others hear first what rests on it.
        if !self.writes.own_votes.is_empty() {
            self.wake_at(now, "own vote");
        }
    }

    /// The disk refused a write: the votes that it was to back are not given. This voter abstains
    /// and tries again now and then. Messages that need no durable state are sent all the same.
    pub(crate) fn persist_failed(&mut self, ctx: &mut Ctx<'_>) {
        self.writes.since = None;
        self.writes.done = self.writes.asked;
        self.abstains_until = Some(ctx.now + REPEAT);
        self.effects.retain(|effect| match effect {
            Effect::Persist { .. } => false,
            Effect::Send {
                message: Message::Job { body, .. },
                ..
            } => !is_vote(body),
            _ => true,
        });
        self.writes.own_votes.clear();
        self.drop_unstored();
        self.drive(ctx);
    }

    /// Queues a vote for another agent. One that waits for the disk is not queued again, and of very many the oldest
    /// is dropped: the others ask again.
    pub(super) fn queue_vote(&mut self, vote: Effect) {
        if self.writes.since.is_some() {
            if self.effects.contains(&vote) {
                return;
            }
            let waits = |e: &Effect| rests_on_disk(e) && !matches!(e, Effect::Persist { .. });
            let mut waiting = (0..self.effects.len()).filter(|at| waits(&self.effects[*at]));
            let oldest = waiting.next();
            if let Some(oldest) = oldest.filter(|_| waiting.count() + 1 >= MOST_VOTES) {
                self.effects.remove(oldest);
            }
        }
        self.effects.push_back(vote);
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

/// Whether this has to wait for a write that is under way: a vote, or the word that a save is under way or written here.
/// Of a write that is refused only the votes are dropped: a save that is undone costs time. A start is none of these.
fn rests_on_disk(effect: &Effect) -> bool {
    let body = match effect {
        Effect::Persist { .. } => return true,
        Effect::Send {
            message: Message::Job { body, .. },
            ..
        } => &**body,
        _ => return false,
    };
    match body {
        JobMessage::Save(_) => true,
        JobMessage::SaveAnswer(answer) => matches!(
            answer.part,
            Part::Prepared { .. } | Part::Holding { .. } | Part::Settled(_)
        ),
        body => is_vote(body),
    }
}

/// Whether a message rests on the durable state: a vote or its end, or a leader's word that it must not forget. A
/// proposal of a later round rests on what a majority promised.
pub(super) fn is_vote(body: &JobMessage) -> bool {
    match body {
        JobMessage::Accept { ballot, .. } => ballot.round == 0,
        JobMessage::Promise { .. }
        | JobMessage::Accepted { .. }
        | JobMessage::Commit { .. }
        | JobMessage::Committed { .. }
        | JobMessage::Forfeited { .. }
        | JobMessage::BirthAccepted { .. } => true,
        _ => false,
    }
}
