//! The chain of decided records as this agent comes to know it: what others hold and ask for, and the
//! one place where a generation changes.

use std::sync::Arc;

use super::{Ctx, Head, Job};
use crate::agent::{Notice, Phases};
use crate::budget::Flapping;
use crate::ids::{Digest, NodeId};
use crate::record::{Cause, Kind, Record};
use crate::time::{Span, Time};
use crate::wire::{Advert, JobMessage};

impl Job {
    /// Somebody asks for the newest record, or shows that it holds an old one.
    pub(super) fn on_ask(&mut self, ctx: &mut Ctx<'_>, from: NodeId, have: Digest) {
        if let Some(head) = &self.head
            && head.digest == have
        {
            let ended = head.record.kind.is_terminal();
            self.tell_voters(ctx, from);
            if ended {
                self.repeat_held(ctx, from);
            }
        } else if let Some(head) = &self.head {
            let head = head.record.clone();
            self.repeat_failure(ctx, from);
            if head.kind.is_terminal() && self.durable.ended.iter().any(|e| e.digest() == have) {
                let record = head;
                self.send(ctx, from, JobMessage::Follows { have, record });
                return self.repeat_held(ctx, from);
            }
            // The ends before it are known to all that have its parent.
            let next = head.parent == have;
            let ends = self.durable.ended.iter().filter(|_| !next).cloned();
            for record in ends.chain([head]).collect::<Vec<_>>() {
                self.send(ctx, from, JobMessage::Decided { record });
            }
            self.tell_voters(ctx, from);
            // It did not see who was dropped, and would wait for whoever may have been.
            self.repeat_held(ctx, from);
        }
    }

    /// Somebody proposes a birth after another end of the job than the one known here: the two must know
    /// the same end first, and whoever has seen both ends knows which is the later.
    pub(super) fn compare_ends(&mut self, ctx: &mut Ctx<'_>, from: NodeId, theirs: Digest) {
        let Some(head) = &self.head else {
            let have = Digest::ZERO;
            return self.send(ctx, from, JobMessage::Ask { have });
        };
        let record = head.record.clone();
        let body = match self.durable.ended.iter().any(|e| e.digest() == theirs) {
            true => JobMessage::Follows {
                have: theirs,
                record,
            },
            false => JobMessage::Decided { record },
        };
        self.send(ctx, from, body);
        self.repeat_held(ctx, from);
    }

    /// The job was born and ended again since the end known here, all without this node. The ends
    /// themselves do not tell which is the later one: who had both as its head does.
    pub(super) fn on_follows(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        have: Digest,
        record: Arc<Record>,
    ) {
        let ended = |e: &Arc<Record>| e.lineage() == record.lineage();
        if self.live().is_none() && self.durable.ended.iter().any(ended) {
            // Here the two ends are known the other way round. All have to agree, not more.
            if self.head_digest() == have && have < record.digest() {
                self.take_up_end(ctx, from, record);
            }
            return;
        }
        let behind = self.head.as_ref().is_some_and(|h| {
            h.digest == have
                && h.record.kind.is_terminal()
                && h.record.lineage() != record.lineage()
        });
        if behind && record.kind.is_terminal() && !self.durable.ended.iter().any(ended) {
            self.take_up_end(ctx, from, record);
            return;
        }
        self.on_decided(ctx, from, record);
    }

    /// Another end of the job counts as the last one. A birth that is proposed here would be refused by all that
    /// know it, and is withdrawn. One that is bound to the birth of another hears of that end again: an answer
    /// now would be answered by the same word, without end.
    fn take_up_end(&mut self, ctx: &mut Ctx<'_>, from: NodeId, record: Arc<Record>) {
        self.withdraw_birth(ctx);
        match self.durable.bound.is_none() {
            true => {
                self.install(ctx, record);
                self.repeat_held(ctx, from);
            }
            // All that know that end would refuse the next one as well.
            false => self.pause_births(ctx),
        }
    }

    /// A record that somebody knows to be decided.
    pub(super) fn on_decided(&mut self, ctx: &mut Ctx<'_>, from: NodeId, record: Arc<Record>) {
        let votes = record.is_voter(ctx.voter());
        self.learn(ctx, from, record, votes);
    }

    /// A record that somebody knows to be decided. `votes`: this agent is to vote on what follows it.
    pub(super) fn learn(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        record: Arc<Record>,
        votes: bool,
    ) {
        let Some(head) = &self.head else {
            return self.consider_stranger(ctx, from, record, votes);
        };
        if head.record.lineage() == record.lineage() {
            if record.number > head.record.number {
                self.install(ctx, record);
            } else if self.is_gap_before_end(&record) {
                // Others may wait for workers of a generation of which this node heard nothing.
                self.before = Some(Head::new(record));
                self.wake_at(ctx.now, "a part in what is over");
            } else if record.number < head.record.number {
                let record = head.record.clone();
                self.send(ctx, from, JobMessage::Decided { record });
            } else {
                self.say_status_again(from);
            }
            return;
        }
        self.consider_stranger(ctx, from, record, votes);
    }

    /// Whether this is the generation before the end that is known here, and was missed.
    fn is_gap_before_end(&self, record: &Record) -> bool {
        let end = self.head.as_ref().filter(|h| h.record.kind.is_terminal());
        let parent = end.map(|h| h.record.parent);
        let known = self.before.as_ref().map(|b| b.digest);
        known != parent && parent == Some(record.digest())
    }

    /// A decided record of a lineage that is not ours.
    fn consider_stranger(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        record: Arc<Record>,
        votes: bool,
    ) {
        self.hear_of_end(ctx, &record);
        let lineage = record.lineage();
        let left = ctx.past.voted(&lineage).is_some_and(|n| record.number < n);
        // An end is no vote: births name it, and all must know the same one.
        let over = match record.kind.is_terminal() {
            true => self.durable.has_given_up(lineage, record.number),
            false => self.is_superseded(ctx, from, lineage, record.number) || left,
        };
        if over || self.durable.left_later(&record) {
            if votes && !record.kind.is_terminal() {
                // Nobody is to count on its vote, nor to take it for the one that decides.
                let parent = record.digest();
                self.send(ctx, from, JobMessage::Forfeited { parent });
            }
            return;
        }
        let ended = self.durable.ended.iter().find(|e| e.lineage() == lineage);
        if let Some(ended) = ended.cloned() {
            // That lineage is over, and what was voted in it is forgotten here.
            if ended.digest() != record.digest() {
                self.send(ctx, from, JobMessage::Decided { record: ended });
            } else if self.head.is_none() {
                // This node left what came after that end: for others it is the newest again.
                if self.durable.bound.is_none() {
                    let digest = record.digest();
                    self.durable.ended.retain(|e| e.digest() != digest);
                    self.install(ctx, record);
                }
            } else if self.live().is_none() {
                self.compare_ends(ctx, from, record.digest());
            } else if let Some(head) = self.live().filter(|h| h.record.has(from)) {
                // A member of what came after that end has not heard of it: without a launcher it does not
                // read the job's log.
                let record = head.record.clone();
                self.send(ctx, from, JobMessage::Decided { record });
            }
            return;
        }
        let concerns_me = record.has(ctx.me()) || votes;
        let launcher = self.launcher();
        let names_me = |m: &&crate::record::Member| {
            m.node == ctx.cfg.node && m.state == ctx.cfg.state && Some(m.launcher) == launcher
        };
        if self.live().is_some()
            && !self.is_member(ctx)
            && record.kind == Kind::Next
            && record.members.iter().any(|m| names_me(&m))
        {
            // It asked to be let in there, and is; here it is a witness at most. One lineage per
            // node (I2): the vote here is given up for good.
            self.durable.leave();
            self.head = None;
            return self.install(ctx, record);
        }
        if self.live().is_some() {
            if record.kind.is_terminal() {
                self.merge.forget(lineage);
            }
            let advert = Advert {
                key: self.key.clone(),
                lineage: record.lineage(),
                digest: record.digest(),
                number: record.number,
                leader: record.leader(),
                belongs: record.kind == Kind::Next,
                deserted: false,
                left_behind: false,
                started: false,
                unresponsive: false,
            };
            self.on_advert(ctx, from, &advert);
            return;
        }
        if record.kind.is_terminal() && self.head.is_none() {
            // Our own birth must name this end as its parent, or nobody who knows it accepts it.
            self.withdraw_birth(ctx);
            let bound = self.durable.bound.as_ref().map(|b| b.digest());
            if bound.is_some_and(|bound| bound != lineage) {
                // Bound to another's birth, this agent does not take the end up: the next one would not name it either.
                self.pause_births(ctx);
            }
        }
        let (digest, head) = (record.digest(), self.head_digest());
        if record.kind.is_terminal() && !head.is_zero() && head != digest {
            // Two ends of the job, and nobody here has seen both. Which counts as the later one does not
            // matter, as long as all agree.
            if head < digest {
                self.take_up_end(ctx, from, record);
            } else {
                self.compare_ends(ctx, from, digest);
            }
            return;
        }
        let bound = self.durable.bound.as_ref().map(|b| b.digest());
        let mine = bound == Some(record.lineage());
        let newer = self.head_digest() == record.parent && record.number == 1;
        if record.kind == Kind::Next
            && !mine
            && !newer
            && self.head.is_some()
            && !record.members.iter().any(|m| names_me(&m))
            && self.reads_log_of(ctx, &record)
        {
            // Whether it is later than the end known here, or long over, the log tells soon. One that names the
            // launcher here gets no lease before the log has told.
            return;
        }
        if mine || (bound.is_none() && concerns_me && (record.kind == Kind::Next || newer)) {
            self.install(ctx, record);
        } else if bound.is_none() && self.head.is_none() && record.kind.is_terminal() {
            // Births name the terminal record before them.
            self.install(ctx, record);
        }
    }

    /// Makes a decided record the head. The one place where a generation changes.
    pub(super) fn install(&mut self, ctx: &mut Ctx<'_>, record: Arc<Record>) {
        let digest = record.digest();
        if digest == self.head_digest() {
            return;
        }
        if self
            .births
            .proposes()
            .is_some_and(|birth| birth != record.lineage())
        {
            // Those that are bound to it are free at once.
            self.withdraw_birth(ctx);
        }
        if let Some((before, short)) = self.head.as_ref().map(|h| (h.digest, h.record.is_short())) {
            // One that was to run nothing has no start that could be told.
            if !short {
                self.tell_unfinished(before);
            }
            self.hung.clear();
            self.checkpoint_ends();
        }
        let before = self.head.take();
        self.before = before.clone();
        self.note_absent(ctx, &record);
        self.note_dropped(ctx, &record);
        self.carry_rest(ctx, &record);
        self.durable.install(record.clone(), ctx.cfg.boot);
        self.forfeit_past(ctx, &record, before.as_ref());
        self.hold(ctx);
        self.durable.timeouts = ctx.timeouts_of(&record);
        self.persist(ctx);
        if let Cause::NodesLost { nodes } = &record.cause
            && let Some(seen) = super::lead::last_heard(ctx, nodes)
        {
            // The order to end may not have come, or not from one that leads as far as this node knew.
            self.change_begins(seen, seen);
        }
        self.phases.decided = ctx.now;
        self.head = Some(Head::new(record.clone()));
        self.proposal = None;
        self.seen_round = 0;
        self.committing = None;
        // Everybody counts, for anybody may come to lead. The pause before the start is no part of a generation's life.
        let lived = ctx.now.since(self.installed_at.max(self.pause));
        let failed = matches!(
            record.cause,
            Cause::WorkerFailed { .. } | Cause::WorkerHung { .. }
        );
        if record.number == 1 || record.kind.is_terminal() {
            // Another life, or none: its script may be another.
            self.crashes = crate::budget::CrashLoop::default();
            self.pause = Time::ZERO;
        } else if failed {
            self.pause = ctx.now + self.crashes.pause_after(lived);
        }
        self.installed_at = ctx.now;
        if let Cause::LinksLost { nodes } | Cause::LeasesLost { nodes } = &record.cause {
            // Everybody counts, for anybody may come to lead.
            for node in nodes.iter().filter(|n| !record.has(**n)) {
                self.strikes.entry(*node).or_default().strike(ctx.now);
            }
        }
        if let Cause::NodesLost { nodes } = &record.cause {
            self.count_losses(ctx, &record, nodes);
        }
        if let Cause::Misread { nodes, .. } = &record.cause {
            self.count_misreads(ctx, nodes);
        }
        self.lead = None;
        self.storeless.clear();
        self.births.is_over();
        self.asks_no_more();
        self.forget_passed_on(before.as_ref(), &record);
        self.tell_those_without_place(ctx, &record);
        // Whoever is in has no ticket any more, whatever becomes of it later.
        self.gathering
            .tickets
            .retain(|n, h| record.member(*n) != Some(&h.ticket.member));
        self.send_waiting_on(ctx, &record);
        if record.kind.is_terminal() && self.decides == Some(record.nonce) {
            self.tell_end_held(ctx);
        }
        self.say_stopped_at_end(ctx);
        self.voter.on_install(&record);
        self.notice(Notice::Decided {
            key: self.key.clone(),
            digest,
            record: record.clone(),
        });
        if record.number == 1 && record.has(ctx.me()) {
            self.warn_of_twins(&record);
        }
        let known = before.as_ref().map(|h| h.record.lineage());
        self.enter(ctx, before.map(|h| h.digest));
        if failed && ctx.now < self.pause && self.is_member(ctx) {
            self.explain_crashes(ctx, &record);
        }
        if known != Some(record.lineage()) {
            self.ask_other_groups(ctx);
        }
        if record.kind.is_terminal() {
            let claimed = self.births.claim_asked;
            self.gathering
                .ends(known == Some(record.lineage()), digest, claimed);
        }
    }

    /// A member that is dropped, or lost when the job ends, may come back without having heard of the end. An agent that
    /// knew nothing of that life need not be there for it.
    fn note_absent(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let known = self.before.as_ref().map(Head::lineage);
        if record.kind.is_terminal() && known != Some(record.lineage()) {
            return;
        }
        let before = self.before.as_ref().filter(|b| b.digest == record.parent);
        let stays = |node| match record.kind {
            Kind::Next => record.has(node),
            _ => ctx.reachable(node),
        };
        let all = before.is_some_and(|b| b.record.members.iter().all(|m| stays(m.node)));
        self.absent = record.number > 1 && (self.absent || !all);
    }

    /// Nodes that come back only to be lost again are kept out for longer and longer; people are told.
    fn count_losses(&mut self, ctx: &Ctx<'_>, record: &Record, nodes: &[NodeId]) {
        let members = self.before.as_ref().map_or(0, |b| b.record.members.len());
        for Flapping {
            node,
            times,
            within,
        } in self.losses.lost(nodes, members, ctx.now)
        {
            let until = self.strikes.entry(node).or_default().strike(ctx.now);
            if record.leader() == Some(ctx.me()) {
                let (name, pause) = (ctx.name(node), until.since(ctx.now));
                self.notice(Notice::Warning {
                    key: self.key.clone(),
                    text: format!(
                        "{name} was lost {times} times within {}, more often than the others, and is \
                         not let in again for {}: look for what ends Muster or its workers there \
                         (the kernel's log tells of a lack of memory)",
                        minutes(within),
                        minutes(pause),
                    ),
                });
            }
        }
    }

    /// A generation that is learnt anew, of a lineage in which this agent may have voted before it forgot it:
    /// the vote is given up.
    fn forfeit_past(&mut self, ctx: &Ctx<'_>, record: &Record, before: Option<&Head>) {
        let lineage = record.lineage();
        if before.is_some_and(|h| h.lineage() == lineage) {
            return;
        }
        let newest = ctx.past.voted(&lineage).filter(|n| record.number <= *n);
        // Its launcher is here and asked to be let in, so there was no vote before.
        let member = record.member(ctx.me());
        let new = member.is_some_and(|m| Some(m.launcher) == self.launcher());
        let doubtful = (ctx.past.is_lossy() && record.number > 1 && !new).then_some(record.number);
        if let Some(number) = newest.or(doubtful) {
            self.durable.forfeit(lineage, number);
        }
    }

    /// A change of generation begins, as this node sees it.
    pub(super) fn change_begins(&mut self, now: Time, fault: Time) {
        if self.phases.detected == Time::ZERO {
            self.phases = Phases {
                fault,
                detected: now,
                ..Phases::default()
            };
        }
    }
}

/// A time for people, whose seconds matter only while it is short.
fn minutes(span: Span) -> String {
    let seconds = span.as_millis().div_ceil(1_000);
    match seconds {
        0..=119 => format!("{seconds} s"),
        _ => format!("{} min", seconds / 60),
    }
}
