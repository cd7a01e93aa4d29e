//! The nodes that the failure detector watches for a job.

use std::collections::BTreeMap;

use super::{Ctx, Job};
use crate::ids::{Digest, NodeId};
use crate::membership::Guard;
use crate::record::Arbiter;

impl Job {
    /// The nodes that this job wants the failure detector to watch, with guards, and whether they are asked for a
    /// lease. Up to 64 members everybody watches everybody; beyond that the first few watch all, and all
    /// watch the voters.
    pub(crate) fn watches(&self, ctx: &Ctx<'_>) -> BTreeMap<NodeId, (Guard, bool)> {
        let mut out = BTreeMap::new();
        let me = ctx.me();
        // A stranger that is to go on with it waits no longer than they live.
        out.extend(
            self.watch_log(ctx)
                .map(|(node, guard)| (node, (guard, false))),
        );
        let Some(head) = self.live() else {
            // The next life waits for these.
            self.watch_dropped(&mut out);
            out.remove(&me);
            return out;
        };
        let record = &head.record;
        let few = record.members.len() <= crate::wire::MAX_LIST;
        // To a launcher that waits here it tells which members it could not train with.
        let waits = few && self.local.as_ref().is_some_and(|l| l.conn.is_some());
        if !record.has(me) && !head.voting().is_voter(ctx.voter()) && !waits {
            out.remove(&me);
            return out;
        }
        let by_members = record.arbiter == Arbiter::Members && record.has(me);
        let all = few || record.members.iter().take(4).any(|m| m.node == me);
        for (i, m) in record.members.iter().enumerate() {
            let votes = i < crate::record::MAX_VOTERS;
            if all || votes {
                let guard = Some((m.guard, m.launcher));
                out.insert(m.node, (guard, votes && by_members));
            }
        }
        for w in &head.voting().witnesses {
            out.insert(w.node, (None, by_members));
        }
        self.watch_dropped(&mut out);
        out.remove(&me);
        out
    }

    /// Of those that were dropped, and of the voters on which these may count, it has to be seen whether they are
    /// dead, or their agents away.
    fn watch_dropped(&self, out: &mut BTreeMap<NodeId, (Guard, bool)>) {
        for (node, dropped) in &self.dropped {
            let of = &dropped.of.record;
            let by_members = of.arbiter == Arbiter::Members;
            let voters = of.members.iter().take(crate::record::MAX_VOTERS);
            let voters = voters.filter(|_| by_members);
            for m in voters.chain(of.member(*node)) {
                let guard = Some((m.guard, m.launcher));
                let watched = out.entry(m.node).or_insert((guard, false));
                // One that is a witness now has a launcher as well; of one that was dropped the old one counts.
                if watched.0.is_none() || m.node == *node {
                    watched.0 = guard;
                }
            }
        }
    }

    /// Beside the head, what [`Job::watches`] follows from: whether a start waits for nodes that are no
    /// members, whether there is a launcher here, what its log says is running, and who votes.
    pub(crate) fn watches_for(&self) -> (bool, bool, Digest, Digest) {
        let launcher = self.local.as_ref().is_some_and(|l| l.conn.is_some());
        let runs = self.log_runs().map_or(Digest::ZERO, |(_, digest)| digest);
        (
            !self.dropped.is_empty(),
            launcher,
            runs,
            self.configuration(),
        )
    }
}
