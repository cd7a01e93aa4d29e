//! News from the leader to the members for people alone: the times of the change that made a
//! generation, and the failure from which the others follow. Nothing is decided by it.

use super::{Ctx, Job, REPEAT};
use crate::agent::{Notice, Phases, Told};
use crate::ids::{Digest, NodeId};
use crate::local::{ToLauncher, WorkerExit, plain_tail};
use crate::record::Kind;
use crate::time::Time;
use crate::wire::{JobMessage, Status};

/// News that this node has to tell.
#[derive(Clone, Debug, Default)]
pub(super) struct News {
    /// The times of the change that made a generation that this node leads.
    told: Option<(Digest, Phases)>,
    /// The times that this node saw itself of the change that made the head: told only when the leader that
    /// times the whole of it never does.
    own: Phases,
    /// The generation whose times were said here. They are not said again when a launcher or the leader is replaced.
    known: Digest,
    /// The root cause of a generation's end, and its node.
    failure: Option<(Digest, NodeId, WorkerExit)>,
}

impl Job {
    /// All members run: the leader tells them how long that took.
    pub(super) fn tell_times(&mut self, ctx: &mut Ctx<'_>) {
        self.phases.started = ctx.now;
        let mut phases = std::mem::take(&mut self.phases);
        if self
            .before
            .as_ref()
            .is_some_and(|before| before.record.is_short())
        {
            // Nothing ran before it: the wait for more nodes is no part of the change.
            phases = Phases {
                fault: phases.decided,
                detected: phases.decided,
                stopped: Time::ZERO,
                ..phases
            };
        }
        let Some(head) = self.live() else { return };
        let (digest, record) = (head.digest, head.record.clone());
        self.news.told = Some((digest, phases));
        self.times_known(digest, phases, Told::Leading);
        for m in record.members.iter().filter(|m| m.node != ctx.me()) {
            self.send(ctx, m.node, JobMessage::Changed { digest, phases });
        }
    }

    /// A wait for nodes is no part of the change that follows it: that begins when they have come.
    pub(super) fn waits_for_nodes(&mut self, waits: bool, now: Time) {
        let Some(lead) = &mut self.lead else { return };
        if waits {
            lead.waited.get_or_insert(now);
        } else if lead
            .waited
            .take()
            .is_some_and(|since| now >= since + REPEAT.times(2))
        {
            self.phases = Phases {
                fault: now,
                detected: now,
                ..Phases::default()
            };
        }
    }

    /// A member's status shows that it did not hear the times.
    pub(super) fn repeat_times(&mut self, ctx: &Ctx<'_>, to: NodeId, status: &Status) {
        if let Some((digest, phases)) = self.news.told
            && self.owes_times(status)
            && to != ctx.me()
        {
            self.send(ctx, to, JobMessage::Changed { digest, phases });
        }
    }

    pub(super) fn owes_times(&self, status: &Status) -> bool {
        let told = self.news.told.map(|(digest, _)| digest);
        told == Some(status.digest) && !status.knows_times
    }

    pub(super) fn on_changed(
        &mut self,
        ctx: &Ctx<'_>,
        from: NodeId,
        digest: Digest,
        phases: Phases,
    ) {
        let led = self
            .live()
            .is_some_and(|h| h.digest == digest && h.record.leader() == Some(from));
        let knows = self.member.as_ref().map(|m| m.status.knows_times);
        if led && from != ctx.me() && knows == Some(false) {
            self.times_known(digest, phases, Told::Heard);
        }
    }

    fn times_known(&mut self, digest: Digest, phases: Phases, told: Told) {
        if let Some(mine) = &mut self.member {
            mine.status.knows_times = true;
        }
        if std::mem::replace(&mut self.news.known, digest) != digest {
            self.notice(Notice::Changed {
                key: self.key.clone(),
                digest,
                phases,
                told,
            });
        }
    }

    /// A start was ordered: what this node saw of the change is kept until the leader tells all.
    pub(super) fn keep_own_times(&mut self) {
        self.news.own = std::mem::take(&mut self.phases);
    }

    /// The workers of the generation before are gone, as far as this node knows.
    pub(super) fn old_workers_gone(&mut self, now: Time) {
        for phases in [&mut self.phases, &mut self.news.own] {
            if phases.detected > Time::ZERO {
                phases.stopped = now;
            }
        }
    }

    /// The head is replaced: if nobody ever told its times (the leader died before all workers ran),
    /// what this node saw of them is said.
    pub(super) fn tell_unfinished(&mut self, before: Digest) {
        let own = std::mem::take(&mut self.news.own);
        let unknown = self.member.as_ref().is_some_and(|m| !m.status.knows_times);
        let seen = if own.detected > Time::ZERO {
            own
        } else {
            Phases {
                started: Time::ZERO,
                ..self.phases
            }
        };
        if unknown && seen.detected > Time::ZERO && seen.decided > seen.detected {
            self.notice(Notice::Changed {
                key: self.key.clone(),
                digest: before,
                phases: seen,
                told: Told::Unfinished,
            });
        }
    }

    /// The leader knows the failure from which the others follow: every node's user reads of it in
    /// the log of the own launcher.
    pub(super) fn tell_failure(&mut self, ctx: &mut Ctx<'_>, node: NodeId, exit: &WorkerExit) {
        let Some(head) = self.live() else { return };
        let (digest, record) = (head.digest, head.record.clone());
        let known = self.news.failure.as_ref();
        if known.is_some_and(|(d, n, e)| (*d, *n, e.rank) == (digest, node, exit.rank)) {
            return;
        }
        self.failure_known(ctx, digest, node, exit.clone());
        for m in record.members.iter().filter(|m| m.node != ctx.me()) {
            let exit = Box::new(exit.clone());
            self.send(ctx, m.node, JobMessage::Failure { digest, node, exit });
        }
    }

    /// A node that asks for the record that ended the job is told why, too.
    pub(super) fn repeat_failure(&mut self, ctx: &Ctx<'_>, to: NodeId) {
        let failed = self
            .head
            .as_ref()
            .filter(|h| matches!(h.record.kind, Kind::Failed { .. }));
        if let (Some(head), Some((digest, node, exit))) = (failed, self.news.failure.clone())
            && head.record.parent == digest
        {
            let exit = Box::new(exit);
            self.send(ctx, to, JobMessage::Failure { digest, node, exit });
        }
    }

    pub(super) fn on_failure(
        &mut self,
        ctx: &Ctx<'_>,
        from: NodeId,
        digest: Digest,
        (node, exit): (NodeId, WorkerExit),
    ) {
        let fits = self
            .live()
            .is_some_and(|h| h.digest == digest && h.record.has(from) && h.record.has(node));
        let again = self
            .news
            .failure
            .as_ref()
            .is_some_and(|(d, n, e)| (*d, *n, e.rank) == (digest, node, exit.rank));
        if fits && !again {
            self.failure_known(ctx, digest, node, exit);
        }
    }

    fn failure_known(&mut self, ctx: &Ctx<'_>, digest: Digest, node: NodeId, exit: WorkerExit) {
        let mut exit = exit;
        exit.tail = plain_tail(&exit.tail);
        self.news.failure = Some((digest, node, exit.clone()));
        self.tell_launcher(ToLauncher::Failed {
            node: ctx.name(node),
            exit: exit.clone(),
        });
        // The failing node noticed its own failure itself.
        if node != ctx.me() {
            self.notice(Notice::WorkerFailed {
                key: self.key.clone(),
                node,
                exit,
            });
        }
    }
}
