//! The beginning of a generation that restores a checkpoint (R15): no rank begins its first step before all
//! have loaded what they begin with, and one that finds it damaged has it rejected in the log, so that
//! the next generation begins with the one before.

use super::{Ctx, Job};
use crate::checkpoint::KeeperEvent;
use crate::ids::{Digest, NodeId};
use crate::local::{SaveAsk, WorkerExit};
use crate::record::{Arbiter, CommitRef, Member, Record};
use crate::time::Span;
use crate::wire::{JobMessage, Status};

/// Between two words that the first step may begin, to who does not show that it knows.
const AGAIN: Span = Span::from_millis(250);

impl Job {
    /// The checkpoint that a worker found damaged, if it is the one that its generation began with, and a
    /// log is there that it can be rejected in. Else the worker failed like any other.
    pub(super) fn damaged(&self, record: &Record, exit: &WorkerExit) -> Option<CommitRef> {
        let damaged = exit.damaged.as_ref()?;
        let logged = matches!(record.arbiter, Arbiter::Store(_));
        record
            .restore
            .filter(|commit| logged && commit.manifest == damaged.manifest)
    }

    /// Has it rejected, if a second look finds the same. True while that is not in the log, or not known: a
    /// decision would restore it again.
    pub(super) fn awaits_reject(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &Record,
        exit: &WorkerExit,
    ) -> bool {
        let Some(commit) = self.damaged(record, exit) else {
            return false;
        };
        let newest = self.log_commit();
        let Some((_, seq)) = newest.filter(|(newest, _)| *newest == commit) else {
            return false;
        };
        self.awaits_verdict(ctx, record, commit, seq)
    }

    /// Whether a second look has told of the checkpoint that a worker found damaged.
    pub(super) fn is_judged(&self, record: &Record, exit: &WorkerExit) -> bool {
        let commit = self.damaged(record, exit);
        commit.is_some_and(|commit| self.verdict(&commit).is_some())
    }

    // ---- the first step ----

    /// All ranks here stand before their first step.
    pub(super) fn ranks_loaded(&mut self, digest: Digest) {
        let here = digest == self.head_digest();
        self.update(here, |s| s.loaded = true);
        if self
            .member
            .as_ref()
            .is_some_and(|m| here && m.status.verified)
        {
            // A launcher that comes back may not have heard it.
            self.ask_launcher(SaveAsk::Go { digest });
        }
    }

    /// A member's status shows whether it knows that all may begin.
    pub(super) fn tell_verified(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let again = self.saves.verified_said + AGAIN;
        let Some(lead) = self.lead.as_ref().filter(|_| record.restore.is_some()) else {
            return;
        };
        let is = |m: &Member, of: &dyn Fn(&Status) -> bool| lead.status(m.node).is_some_and(of);
        if !record.members.iter().all(|m| is(m, &|s| s.loaded)) {
            return;
        }
        let digest = self.head_digest();
        let missing = |m: &&Member| is(m, &|s| !s.verified);
        let nodes: Vec<NodeId> = (record.members.iter().filter(missing))
            .map(|m| m.node)
            .collect();
        if nodes.is_empty() {
            return;
        }
        if ctx.now < again {
            return self.wake_at(again, "members whose first step waits");
        }
        self.saves.verified_said = ctx.now;
        for node in nodes {
            self.send(ctx, node, JobMessage::Verified { digest });
        }
    }

    pub(super) fn on_verified(&mut self, ctx: &Ctx<'_>, from: NodeId, digest: Digest) {
        let led = self
            .live()
            .filter(|h| h.digest == digest && self.acting_leader(ctx, &h.record) == Some(from));
        let record = led.map(|h| h.record.clone());
        let known = self.member.as_ref().is_none_or(|m| m.status.verified);
        let Some(record) = record.filter(|_| !known) else {
            return;
        };
        self.members_read(&record);
        self.update(true, |s| s.verified = true);
        let generation = digest;
        self.saves.keeper.handle(KeeperEvent::Loaded { generation });
        self.ask_launcher(SaveAsk::Go { digest });
    }
}
