//! The life of the job that the launcher here takes part in: of that life, and of no other, it is told the end.

use super::{Ctx, Head, Job};
use crate::ids::{Digest, NodeId};
use crate::local::ToLauncher;
use crate::record::{Kind, Record};
use crate::wire::{Advert, JobMessage, MAX_LIST};

impl Job {
    /// The life in which the launcher here is a member, or waits by the leader's word; while neither was said, the one
    /// in which it began workers last. None once it was told to exit.
    pub(super) fn own_life(&self) -> Option<Digest> {
        let local = self.local.as_ref().filter(|l| l.over.is_none())?;
        let began = local.reg.began.as_ref().map(|b| b.lineage);
        local.reg.lineage.or(began)
    }

    pub(super) fn is_of_life(&self, lineage: Digest) -> bool {
        self.own_life() == Some(lineage)
    }

    /// The launcher keeps the word, for an agent that is started anew knows nothing of a life in which one only waits.
    pub(super) fn set_life(&mut self, lineage: Option<Digest>) {
        if let Some(local) = self.local.as_mut().filter(|l| l.reg.lineage != lineage) {
            local.reg.lineage = lineage;
            self.tell_launcher(ToLauncher::Life { lineage });
        }
    }

    /// The launcher takes part in the life of the job that it is a member of.
    pub(super) fn note_life(&mut self, ctx: &Ctx<'_>) {
        if self.is_member(ctx) {
            self.set_life(self.head.as_ref().map(Head::lineage));
        }
    }

    /// Whether this is the end of the launcher's own life. That all others left is none for a launcher that had no part
    /// in what they left.
    pub(super) fn took_part(&self, end: &Record) -> bool {
        let began = self.local.as_ref().and_then(|l| l.reg.began.as_deref());
        let left = || began.is_some_and(|b| b.digest == end.parent);
        self.is_of_life(end.lineage()) && (end.kind != Kind::Dormant || left())
    }

    /// A life of the job is over, by its log or by others. A launcher of that life ends with it also where its agent
    /// knows nothing of it any more; unless a person had the job go on without those who decided that end.
    pub(super) fn hear_of_end(&mut self, ctx: &Ctx<'_>, end: &Record) {
        let lineage = end.lineage();
        let continues = || {
            let given_up = self.durable.has_given_up(lineage, end.number);
            given_up && !self.cancelled.has(lineage)
        };
        if !end.kind.is_terminal() || self.is_member(ctx) || !self.took_part(end) || continues() {
            return;
        }
        match end.kind {
            Kind::Tombstone { .. } => self.follow_merge(ctx, end),
            _ => self.end_launcher(ctx, end),
        }
    }

    /// The ends that this agent has kept.
    pub(super) fn hear_of_known_ends(&mut self, ctx: &Ctx<'_>) {
        let ends = self.head.iter().map(|h| &h.record);
        let ends = ends.chain(&self.durable.ended).cloned();
        for end in ends.collect::<Vec<_>>() {
            self.hear_of_end(ctx, &end);
        }
    }

    /// The life was taken in by another one, and that may be over by now, too.
    pub(super) fn follow_merge(&mut self, ctx: &Ctx<'_>, end: &Record) {
        if let Kind::Tombstone { winner } = end.kind
            && winner < end.lineage()
        {
            self.set_life(Some(winner));
            self.hear_of_known_ends(ctx);
        }
    }

    /// Whether that agent may know how the life of the launcher here ended, of which this one knows nothing: the newest
    /// word of that life, if there is any, is that of an end.
    pub(super) fn may_know_end(&self, ctx: &Ctx<'_>, advert: &Advert) -> bool {
        let Some(life) = self.own_life().filter(|_| self.live().is_none()) else {
            return false;
        };
        let newest = self.told_of(ctx, life).max_by_key(|(_, a)| a.number);
        let goes_on = newest.is_some_and(|(_, a)| a.belongs || a.leader.is_some());
        let known = self.durable.has_ended(life) || self.durable.has_given_up(life, 0);
        !advert.is_gathering() && !goes_on && !known
    }

    /// The launcher here came back to an agent that may have been told of the end of its life before.
    pub(super) fn ask_for_end(&mut self, ctx: &Ctx<'_>) {
        let told = self.adverts(ctx.peers.all);
        let told = told.filter(|(_, a)| self.may_know_end(ctx, a));
        let told: Vec<NodeId> = told.map(|(node, _)| node).take(MAX_LIST).collect();
        // With no end known here they tell all that they know.
        let have = Digest::ZERO;
        for node in told {
            self.send(ctx, node, JobMessage::Ask { have });
        }
    }
}
