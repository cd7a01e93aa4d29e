//! Launchers that wait for a place in a generation that trains: they hear in which life of the job they wait, and the
//! member that leads where the leader is lost knows of them as well.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::gathering::Held;
use super::store::differs;
use super::{Ctx, Head, Job, REPEAT, TICKET_LIFE};
use crate::ids::{Digest, NodeId};
use crate::record::Record;
use crate::time::{Span, Time};
use crate::wire::{Advert, JobMessage, Ticket, Wait};

/// Of their tickets, which this agent holds as it does those of others that gather.
#[derive(Clone, Debug, Default)]
pub(super) struct Spares {
    /// When a majority may have said that this life goes on.
    look_at: Time,
    /// Tickets that the leader holds, by its word: for a member that has to go on without it.
    passed_on: BTreeMap<NodeId, PassedOn>,
}

/// How a launcher was told of the life in which it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Told {
    /// All that there is to say, or that could be said in time.
    Done,
    /// It has not been told in which life it waits. It `joins` the life that runs where that could be joined at some
    /// time since it came.
    NotYet { joins: bool },
    /// It came when this life had begun to end: it waits for the next one.
    AtEnd(Digest),
}

/// Whether a launcher that comes now may wait in the life that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joining {
    Life(Digest),
    /// This one has begun to end.
    Ends(Digest),
    /// Another node leads it, or nobody is known to live in it.
    Unclear,
}

impl Told {
    fn not_yet(self) -> bool {
        matches!(self, Told::NotYet { .. })
    }
}

impl Joining {
    fn life(self) -> Option<Digest> {
        match self {
            Joining::Life(lineage) => Some(lineage),
            Joining::Ends(_) | Joining::Unclear => None,
        }
    }
}

/// A ticket that the leader of the generation passed on.
#[derive(Clone, Debug)]
struct PassedOn {
    ticket: Ticket,
    by: NodeId,
    at: Time,
}

impl Spares {
    pub(super) fn withdraw(&mut self, node: NodeId) {
        self.passed_on.remove(&node);
    }

    /// Those that decide have said anew what they know.
    pub(super) fn look_now(&mut self, now: Time) {
        self.look_at = self.look_at.min(now);
    }
}

impl Job {
    /// When the newest of the launchers that have not been told in which life they wait came.
    pub(super) fn untold_since(&self) -> Option<Time> {
        let untold = self.gathering.tickets.values().filter(|h| h.told.not_yet());
        untold.map(|h| h.first).max()
    }

    fn has_untold(&self) -> bool {
        self.untold_since().is_some()
    }

    /// Nodes whose launchers have not been told in which life they wait.
    fn untold(&self) -> Vec<NodeId> {
        let tickets = self.gathering.tickets.iter();
        let untold = tickets.filter(|(_, h)| h.told.not_yet());
        untold.map(|(node, _)| *node).collect()
    }

    /// So it stands with all that have not been told.
    fn set_untold(&mut self, told: Told) {
        for held in self.gathering.tickets.values_mut() {
            if held.told.not_yet() {
                held.told = told;
            }
        }
    }

    /// Answers a ticket that came here, of a launcher that is `new` or known.
    pub(super) fn answer_ticket(&mut self, ctx: &Ctx<'_>, node: NodeId, new: bool) {
        let held = self.gathering.tickets.get(&node);
        let fits = held.filter(|h| self.live().is_some_and(|l| !differs(&h.ticket, &l.record)));
        let known = fits.is_some_and(|h| self.waits_in_life(h));
        let asks = fits.is_some() && new;
        let joining = match asks || fits.is_some() && known {
            true => self.joining(ctx),
            false => Joining::Unclear,
        };
        let life = joining.life();
        let told = match joining {
            Joining::Ends(lineage) => Told::AtEnd(lineage),
            Joining::Life(_) if known => Told::Done,
            _ => Told::NotYet {
                joins: life.is_some(),
            },
        };
        let first = asks && told.not_yet() && !self.has_untold();
        if let Some(held) = self.gathering.tickets.get_mut(&node).filter(|_| asks) {
            held.told = told;
        }
        if first {
            self.look_soon(ctx);
        }
        self.answer(ctx, node, life.filter(|_| known));
    }

    fn answer(&mut self, ctx: &Ctx<'_>, node: NodeId, life: Option<Digest>) {
        let (lineage, wait) = (life.unwrap_or(Digest::ZERO), self.wait_for(ctx, node));
        if let Some(held) = self.gathering.tickets.get(&node) {
            let launcher = held.ticket.member.launcher;
            self.acknowledge(ctx, node, launcher, lineage, wait);
        }
    }

    /// Voters acknowledge the next heartbeat by then. Launchers ask again as well, but later.
    fn look_soon(&mut self, ctx: &Ctx<'_>) {
        self.gathering.spares.look_at = ctx.now + Span(ctx.cfg.suspect_after.0 / 8);
        self.look_for_life();
    }

    fn look_for_life(&mut self) {
        let at = self.gathering.spares.look_at;
        self.wake_at(at, "voters that do not say whether this life goes on");
    }

    /// Launchers that came just now hear in which life they wait as soon as a majority has said that it goes on.
    pub(super) fn tell_lives(&mut self, ctx: &Ctx<'_>) {
        if !self.has_untold() {
            return;
        }
        let waits = ctx.now < self.gathering.spares.look_at;
        let mut all = self.gathering.tickets.values();
        if waits && all.all(|h| h.told != Told::NotYet { joins: false }) {
            return self.look_for_life();
        }
        let life = self.joining(ctx).life();
        if life.is_some() {
            self.set_untold(Told::NotYet { joins: true });
        }
        if waits {
            return self.look_for_life();
        }
        for node in self.untold() {
            let held = self.gathering.tickets.get(&node);
            let tells = life.is_some() && held.is_some_and(|h| self.waits_in_life(h));
            let since = held.map_or(self.installed_at, |h| h.first.max(self.installed_at));
            if tells {
                self.answer(ctx, node, life);
            }
            if tells || ctx.now >= since + REPEAT {
                self.gathering.tell(node);
            }
        }
        if self.has_untold() {
            self.look_soon(ctx);
        }
    }

    /// The end that this node made, and that is decided now, follows what ran when those came that have not been told
    /// yet: the voters had decided nothing else before.
    pub(super) fn tell_life_at_end(&mut self, ctx: &Ctx<'_>) {
        let life = self.live().map(Head::lineage);
        for node in self.untold() {
            if self.gathering.tell(node) == Some(Told::NotYet { joins: true }) {
                self.answer(ctx, node, life);
            }
        }
    }

    /// A life has begun that was proposed here to some of those that gathered. The others, for whom it had no place, wait
    /// in it.
    pub(super) fn tell_those_without_place(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let max = record.spec.max_nodes;
        let made = self.births.made(record);
        let Some(made) = made.filter(|_| record.members.len() == usize::from(max)) else {
            return;
        };
        // One that came later may have come when that life was over. Nothing ends without the leader before others have
        // lost it, for longer than a heartbeat.
        let until = match record.leader() == Some(ctx.me()) {
            true => made + Span(ctx.cfg.suspect_after.0 / 2),
            false => made,
        };
        let waits = |(n, h): (&NodeId, &Held)| {
            let fits = h.first <= until && !record.has(*n) && !differs(&h.ticket, record);
            fits.then_some((*n, h.ticket.member.launcher))
        };
        let waiting = self.gathering.tickets.iter().filter_map(waits);
        for (node, launcher) in waiting.collect::<Vec<_>>() {
            let wait = Wait::Spare { max };
            self.acknowledge(ctx, node, launcher, record.lineage(), wait);
        }
    }

    /// A generation follows that has no place for those whose tickets are here. Where another node leads it, they have
    /// to ask there.
    pub(super) fn send_waiting_on(&mut self, ctx: &Ctx<'_>, record: &Arc<Record>) {
        if record.kind.is_terminal() {
            return self.set_untold(Told::Done);
        }
        if record.number == 1 {
            self.set_untold(Told::NotYet { joins: false });
        }
        self.drop_void_tickets(ctx);
        let leader = self.acting_leader(ctx, record);
        if leader == Some(ctx.me()) {
            // They came before this was known here.
            let lineage = self.live().map(Head::lineage);
            for held in self.gathering.tickets.values_mut() {
                let ends = lineage.is_some_and(|lineage| held.told == Told::AtEnd(lineage));
                if !held.told.not_yet() && !ends && !differs(&held.ticket, record) {
                    held.told = Told::NotYet { joins: false };
                }
            }
            if self.has_untold() {
                self.look_soon(ctx);
            }
            return;
        }
        let advert = self.advert(ctx.cfg, ctx.peers);
        let Some(advert) = advert.map(|advert| Advert { leader, ..advert }) else {
            return;
        };
        let waiting = self.gathering.tickets.values();
        let waiting = waiting.filter(|h| !differs(&h.ticket, record));
        let waiting = waiting.map(|h| {
            let (member, knows) = (&h.ticket.member, h.ticket.knows);
            (member.node, member.launcher, knows)
        });
        for (node, launcher, knows) in waiting.collect::<Vec<_>>() {
            if record.number > 1 && knows == record.parent {
                let record = record.clone();
                self.send(ctx, node, JobMessage::Decided { record });
            } else {
                let advert = advert.clone();
                let wait = Wait::Elsewhere { advert };
                self.acknowledge(ctx, node, launcher, Digest::ZERO, wait);
            }
        }
    }

    /// The member that leads where this node is lost takes the waiting nodes into the very generation that follows.
    pub(super) fn pass_on(&mut self, ctx: &Ctx<'_>, ticket: &Ticket) {
        let members = self.live().into_iter().flat_map(|h| &h.record.members);
        let asks = ticket.member.node;
        let mut others = members
            .map(|m| m.node)
            .filter(|n| *n != ctx.me() && *n != asks);
        let next = others
            .find(|n| ctx.reachable(*n) && !ctx.peers.away(*n) && !self.storeless.contains_key(n));
        if let Some(next) = next {
            self.send(ctx, next, JobMessage::Ticket(Box::new(ticket.clone())));
        }
    }

    /// The leader passed a ticket on.
    pub(super) fn keep_passed_on(&mut self, ctx: &Ctx<'_>, by: NodeId, ticket: Ticket) {
        let (node, at) = (ticket.member.node, ctx.now);
        let leads = self.live().map(|h| self.acting_leader(ctx, &h.record));
        let passed_on = &mut self.gathering.spares.passed_on;
        passed_on.retain(|node, p| ctx.now.since(p.at) < TICKET_LIFE && ctx.reachable(*node));
        if leads == Some(Some(by)) && by != ctx.me() && ctx.reachable(node) {
            passed_on.insert(node, PassedOn { ticket, by, at });
        }
    }

    /// Another generation follows here: it may be of another life, or have a place for some of those that waited.
    pub(super) fn forget_passed_on(&mut self, before: Option<&Head>, record: &Record) {
        let goes_on = before.is_some_and(|b| b.lineage() == record.lineage());
        let passed_on = &mut self.gathering.spares.passed_on;
        passed_on.retain(|node, _| goes_on && !record.kind.is_terminal() && !record.has(*node));
    }

    /// This node leads from now on: those that asked the leader before it until that was heard no more ask here.
    pub(super) fn take_passed_on(&mut self, ctx: &mut Ctx<'_>) {
        let passed_on = std::mem::take(&mut self.gathering.spares.passed_on);
        for (node, PassedOn { ticket, by, at }) in passed_on {
            let heard = ctx.peers.get(by).map(|p| p.seen);
            if ctx.reachable(node) && heard.is_some_and(|heard| heard < at + REPEAT.times(2)) {
                self.on_ticket(ctx, node, ticket);
            }
        }
    }
}
