//! Launchers that gather at this agent: their tickets, what each is told, and which of them can never get a place.

use std::collections::BTreeMap;

use super::plan::Assessment;
use super::spares::{Spares, Told};
use super::store::differs;
use super::{Ctx, Job, REPEAT, TICKET_LIFE};
use crate::ids::{Digest, LauncherId, NodeId};
use crate::record::{Member, Record};
use crate::time::{Span, Time};
use crate::wire::{JobMessage, MAX_LIST, Ticket, Wait};

/// A ticket that is held at this agent.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) ticket: Ticket,
    pub(super) first: Time,
    pub(super) renewed: Time,
    /// Since when its launcher has waited, here or elsewhere.
    pub(super) waits_since: Time,
    pub(super) told: Told,
}

/// Places are about to be given away, to launchers whose agents are there.
#[derive(Clone, Debug)]
struct Asked {
    since: Time,
    until: Time,
    /// Those that are still to say it.
    silent: Vec<NodeId>,
}

/// The tickets that came here.
#[derive(Clone, Debug, Default)]
pub(super) struct Gathering {
    pub(super) tickets: BTreeMap<NodeId, Held>,
    /// Those of launchers that wait for a place in the generation that runs.
    pub(super) spares: Spares,
    /// They have waited for a while, so that others should know of them.
    pub(super) waits: bool,
    /// When the newest node came, or workers of the life before were waited for no more.
    pub(super) last_new: Time,
    asked: Option<Asked>,
}

impl Gathering {
    pub(super) fn withdraw(&mut self, node: NodeId) {
        self.tickets.remove(&node);
        self.spares.withdraw(node);
    }

    /// No more is said of its life to the launcher of this node. Returns how it stood.
    pub(super) fn tell(&mut self, node: NodeId) -> Option<Told> {
        let held = self.tickets.get_mut(&node)?;
        Some(std::mem::replace(&mut held.told, Told::Done))
    }

    /// A life has ended. Those that asked for a place in it `here` go with it, but for those that know its `end`: they
    /// ask for the next one. An agent that only hears of its end may have had it `claimed`; so do those that have
    /// asked since.
    pub(super) fn ends(&mut self, here: bool, end: Digest, claimed: Option<Time>) {
        let since = |h: &Held| !here && claimed.is_none_or(|at| h.renewed > at);
        self.tickets
            .retain(|_, h| since(h) || h.ticket.knows == end);
    }

    /// The node from which a launcher asks to be let in: it runs nothing.
    pub(super) fn node_of(&self, launcher: LauncherId) -> Option<NodeId> {
        let mut tickets = self.tickets.iter();
        let (node, _) = tickets.find(|(_, h)| h.ticket.member.launcher == launcher)?;
        Some(*node)
    }

    /// Whether a member of a generation asks to be let in again, so that it runs nothing: its launcher, or another one
    /// of its node, whose agent waits for the one before.
    pub(super) fn is_asked_for(&self, member: &Member) -> bool {
        let here = self.tickets.get(&member.node);
        let next = here.is_some_and(|h| h.ticket.member.state == member.state);
        next || self.node_of(member.launcher).is_some()
    }

    /// The launcher that has waited longest. It decides on the flags, not the one that came here first: all of them
    /// come anew where another agent takes over.
    fn oldest(&self) -> Option<&Held> {
        let node = |h: &Held| h.ticket.member.node;
        let tickets = self.tickets.values();
        tickets.min_by_key(|h| (h.waits_since, node(h)))
    }

    /// When the first ticket that is still held came.
    pub(super) fn first(&self) -> Option<Time> {
        self.tickets.values().map(|h| h.first).min()
    }
}

impl Job {
    /// Whether launchers gather here, or a birth of theirs is under way.
    pub(super) fn is_gathering(&self) -> bool {
        !self.gathering.tickets.is_empty() || self.births.under_way.is_some()
    }

    pub(super) fn on_ticket(&mut self, ctx: &mut Ctx<'_>, from: NodeId, ticket: Ticket) {
        if ticket.member.node != from {
            return self.keep_passed_on(ctx, from, ticket);
        }
        if from != ctx.me() && !ticket.knows.is_zero() {
            // It may still hold a generation that is long over.
            self.on_ask(ctx, from, ticket.knows);
        }
        let launcher = ticket.member.launcher;
        self.tell_superseded(ctx, from);
        if let Some(head) = self.live().filter(|_| !self.is_leaderless(ctx)) {
            if head.record.member(from) == Some(&ticket.member) {
                // It has not heard that it is a member, and perhaps leads.
                let record = head.record.clone();
                self.send(ctx, from, JobMessage::Decided { record });
                return;
            }
            let lead = self.acting_leader(ctx, &head.record);
            if lead != Some(ctx.me()) {
                if let Some(mut advert) = self.advert(ctx.cfg, ctx.peers) {
                    advert.leader = lead;
                    let wait = Wait::Elsewhere { advert };
                    self.acknowledge(ctx, from, launcher, Digest::ZERO, wait);
                }
                return;
            }
        }
        if self.is_leaderless(ctx)
            && let Some(door) = self.meeting_place(ctx)
            && door != ctx.me()
            && door != from
            && let Some(mut advert) = self.advert(ctx.cfg, ctx.peers)
        {
            // Those who know that nobody leads meet elsewhere; this one took me for the leader.
            advert.leader = Some(door);
            let wait = Wait::Elsewhere { advert };
            return self.acknowledge(ctx, from, launcher, Digest::ZERO, wait);
        }
        self.drop_void_tickets(ctx);
        let known = self.gathering.tickets.get(&from);
        let again = known.filter(|h| h.ticket.member.launcher == ticket.member.launcher);
        let (first, new) = (again.map_or(ctx.now, |h| h.first), again.is_none());
        let came = ctx.now - Span::from_millis(ticket.waited_ms.into());
        let held = Held {
            waits_since: again.map_or(came, |h| h.waits_since),
            told: again.map_or(Told::Done, |h| h.told),
            ticket,
            first,
            renewed: ctx.now,
        };
        if self.is_cancelled_before(ctx, &held) {
            return;
        }
        if let Some(why) = self.refusal(ctx, &held) {
            return self.refuse(ctx, from, launcher, why);
        }
        if new {
            self.gathering.last_new = ctx.now;
        }
        self.pass_on(ctx, &held.ticket);
        self.gathering.tickets.insert(from, held);
        let is_oldest = |h: &Held| h.ticket.member.launcher == launcher;
        if new && !self.is_proposing(ctx) && self.gathering.oldest().is_some_and(is_oldest) {
            self.refuse_unlike(ctx);
        }
        self.answer_ticket(ctx, from, new);
    }

    fn refuse(&mut self, ctx: &Ctx<'_>, node: NodeId, launcher: LauncherId, why: String) {
        self.gathering.tickets.remove(&node);
        self.send(ctx, node, JobMessage::TicketRefused { launcher, why });
    }

    /// Whether a first generation of launchers that wait here may be decided: none of them can be refused any more.
    fn is_proposing(&self, ctx: &Ctx<'_>) -> bool {
        let asked = self.births.claim_asked;
        self.births.under_way.is_some() || asked.is_some_and(|at| ctx.now < at + REPEAT)
    }

    /// The launcher that has waited longest came last: those that came here before it have to agree with it. Whether
    /// some did not.
    pub(super) fn refuse_unlike(&mut self, ctx: &Ctx<'_>) -> bool {
        let tickets = self.gathering.tickets.iter();
        let refused = tickets.filter_map(|(node, held)| {
            let why = self.refusal(ctx, held)?;
            Some((*node, held.ticket.member.launcher, why))
        });
        let refused: Vec<_> = refused.collect();
        let some = !refused.is_empty();
        for (node, launcher, why) in refused {
            self.refuse(ctx, node, launcher, why);
        }
        some
    }

    pub(super) fn acknowledge(
        &mut self,
        ctx: &Ctx<'_>,
        to: NodeId,
        launcher: LauncherId,
        lineage: Digest,
        wait: Wait,
    ) {
        let body = JobMessage::TicketAck {
            launcher,
            lineage,
            wait,
        };
        self.send(ctx, to, body);
    }

    /// Why a ticket can never lead to membership.
    fn refusal(&self, ctx: &Ctx<'_>, held: &Held) -> Option<String> {
        let (ticket, first) = (&held.ticket, held.first);
        let member = &ticket.member;
        if let Some(why) = self.is_unfit(member.node, member.launcher) {
            return Some(why.to_owned());
        }
        let head = self.live().map(|h| &h.record);
        let led = head.filter(|_| !self.is_leaderless(ctx));
        // What follows the dead may have another specification, unless others come with theirs: their generation
        // ends then. Its launchers may all be dead though their statuses, a moment old, do not say so.
        let may_follow = |record: &Record| {
            self.may_differ(ctx, record)
                || !self.is_taken_part_in(ctx, record)
                || ctx.now < first + REPEAT.times(2)
        };
        if led.is_some_and(|record| may_follow(record)) {
            return None;
        }
        let shared = head.and_then(|record| record.store());
        if shared.is_some() && ticket.store != shared {
            return Some(
                "the job's members share a store that this node does not see: mount the same \
                 directory here and name it with --store"
                    .into(),
            );
        }
        let (spec, store, where_) = match led {
            Some(record) => (&record.spec, shared, "the running job"),
            None => {
                let oldest = self.gathering.oldest()?;
                let is_older = oldest.waits_since <= held.waits_since || self.is_proposing(ctx);
                if oldest.ticket.member.node == ticket.member.node || !is_older {
                    return None;
                }
                let oldest = &oldest.ticket;
                (&oldest.spec, oldest.store, oldest.host.as_str())
            }
        };
        let mut differences = ticket.spec.differences(spec);
        differences.extend(super::store::difference(ticket.store, store).map(str::to_owned));
        if differences.is_empty() {
            return None;
        }
        Some(format!(
            "this launcher and {where_} disagree: {}. Start every node of a job with the same flags, \
             or choose another --rdzv-id",
            differences.join("; ")
        ))
    }

    /// The wait that the holder of a ticket is told of.
    pub(super) fn wait_for(&self, ctx: &Ctx<'_>, from: NodeId) -> Wait {
        let have = u16::try_from(self.gathering.tickets.len()).unwrap_or(u16::MAX);
        match self.live() {
            Some(head) => self.wait_of_running(ctx, head, from),
            None => {
                let spec = self.gathering.tickets.get(&from).map(|h| &h.ticket.spec);
                let (min, max) = spec.map_or((0, 0), |s| (s.birth_nodes(), s.max_nodes));
                if have < min {
                    let who = self
                        .gathering
                        .tickets
                        .keys()
                        .take(MAX_LIST)
                        .copied()
                        .collect();
                    Wait::Forming {
                        have,
                        min,
                        max,
                        who,
                    }
                } else if self.eligible(ctx).count() < usize::from(min) {
                    let nodes = self.gathering.tickets.keys().copied();
                    let nodes = nodes.filter(|n| self.is_unstored(ctx, *n));
                    Wait::Unstored {
                        nodes: nodes.take(MAX_LIST).collect(),
                    }
                } else if let Some(left) = self.orphaned_in(ctx).filter(|at| *at > Span::ZERO) {
                    let ms = left.as_millis();
                    Wait::Orphan { ms }
                } else if let Some(at) = self.others_train_until(ctx) {
                    let ms = at.since(ctx.now).as_millis();
                    Wait::Held { have, ms }
                } else {
                    Wait::Batching { have, max }
                }
            }
        }
    }

    /// The nodes whose agents are to say at once that they are there.
    pub(crate) fn asks_for_word(&self, now: Time) -> impl Iterator<Item = NodeId> {
        let asked = self.gathering.asked.as_ref();
        let asked = asked.filter(|a| now < a.until);
        let newcomers = asked.into_iter().flat_map(|a| &a.silent).copied();
        newcomers.chain(self.applicant.unanswered.asked())
    }

    /// Whether an agent is asked for a word that does not answer a launcher here.
    pub(crate) fn awaits_answer(&self) -> bool {
        self.applicant.unanswered.asked().next().is_some()
    }

    /// Whether the agent of this ticket was there when places were to be given away, if they are.
    pub(super) fn was_there(&self, ctx: &Ctx<'_>, held: &Held) -> bool {
        let asked = self.gathering.asked.as_ref();
        asked.is_none_or(|a| ctx.was_there(held.ticket.member.node, a.since))
    }

    /// Places were given away, or there are none.
    pub(super) fn asks_no_more(&mut self) {
        self.gathering.asked = None;
    }

    /// Whether some of these are still to say that they are there before up to `room` of them get a place: an agent that
    /// was stopped or cut off since its launcher asked would hold up all others. Those that say nothing get none.
    pub(super) fn awaits_newcomers(
        &mut self,
        ctx: &Ctx<'_>,
        nodes: Vec<NodeId>,
        room: usize,
    ) -> bool {
        let asked = self.gathering.asked.as_ref().map(|a| a.since);
        let since = asked.unwrap_or(ctx.now).max(self.gathering.last_new);
        let until = since + Span(ctx.cfg.suspect_after.0 / 4);
        let (heard, mut silent): (Vec<_>, Vec<_>) =
            nodes.into_iter().partition(|n| ctx.was_there(*n, since));
        let waits = ctx.now < until && heard.len() < room && !silent.is_empty();
        if waits {
            let again = ctx.now + Span(ctx.cfg.suspect_after.0 / 64);
            self.wake_at(until.min(again), "agents of launchers that get a place");
        } else {
            silent.clear();
        }
        self.gathering.asked = Some(Asked {
            since,
            until,
            silent,
        });
        waits
    }

    /// Tickets that may become memberships now, oldest first: of agents that were there when the places were to be given
    /// away, if they are.
    pub(super) fn joiners(&self, ctx: &Ctx<'_>, record: &Record, room: usize) -> Vec<Member> {
        let held = self.candidates(ctx, record).into_iter();
        let held = held.filter(|h| self.was_there(ctx, h));
        held.take(room).map(|h| h.ticket.member.clone()).collect()
    }

    /// Tickets whose launchers may get a place, oldest first: not of nodes that miss a link to a member that is there, for
    /// they would be dropped again at once.
    pub(super) fn candidates(&self, ctx: &Ctx<'_>, record: &Record) -> Vec<&Held> {
        let there = |n: &NodeId| {
            let member = record.member(*n);
            member.is_some_and(|m| ctx.reachable(*n) && !self.is_lost(ctx, m))
        };
        let mut held: Vec<_> = self
            .gathering
            .tickets
            .values()
            .filter(|h| ctx.reachable(h.ticket.member.node))
            .filter(|h| self.parked_ms(ctx, h.ticket.member.node).is_none())
            .filter(|h| record.member(h.ticket.member.node) != Some(&h.ticket.member))
            .filter(|h| !differs(&h.ticket, record))
            .filter(|h| !h.ticket.unreachable.iter().any(there))
            .collect();
        held.sort_by_key(|h| (h.first, h.ticket.member.node));
        held
    }

    /// Whether launchers that are to get a place are waited for: they have to be there still.
    pub(super) fn awaits_word_of_newcomers(
        &mut self,
        ctx: &Ctx<'_>,
        record: &Record,
        a: &Assessment,
    ) -> bool {
        let stays = |n: NodeId| a.survivors.iter().any(|m| m.node == n);
        let nodes = self.candidates(ctx, record).into_iter();
        let nodes = nodes.map(|h| h.ticket.member.node).filter(|n| !stays(*n));
        let (nodes, room) = (nodes.collect::<Vec<_>>(), a.room(record));
        !nodes.is_empty() && self.awaits_newcomers(ctx, nodes, room)
    }

    pub(super) fn drop_void_tickets(&mut self, ctx: &Ctx<'_>) {
        self.gathering
            .tickets
            .retain(|node, h| ctx.now.since(h.renewed) < TICKET_LIFE && ctx.reachable(*node));
    }

    /// Those who can take part in a birth: without a store each has to store its vote for it.
    pub(super) fn eligible<'a>(&'a self, ctx: &'a Ctx<'_>) -> impl Iterator<Item = &'a Held> {
        let votes =
            |h: &&Held| h.ticket.store.is_some() || !self.is_unstored(ctx, h.ticket.member.node);
        self.gathering.tickets.values().filter(votes)
    }
}
