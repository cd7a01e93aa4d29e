//! A person ends the job, on any node (`muster cancel`). The order is for the lives of the job that are known
//! when it is given, and is said to whoever can decide their end until they are known to be over, or until
//! what stands in the way is known.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::durable::EVERY_NUMBER;
use super::gathering::Held;
use super::obstacle::Obstacle;
use super::{Ctx, Head, Job, REPEAT};
use crate::agent::Effect;
use crate::ids::{Digest, LauncherId, NodeId};
use crate::record::{Arbiter, Member, Record};
use crate::time::{Span, Time};
use crate::wire::{Advert, JobMessage, MAX_LIST, Message, Unable};

/// An order that nobody takes up is dropped after this time: longer than who gave it waits.
const LIMIT: Span = Span::from_secs(320);
/// How an order ended can be read for so long, and those that wait for a life to begin are told of one.
const KEPT: Span = Span::from_secs(30);
/// Most lives of which an agent keeps that a person ended them.
const KEPT_LIVES: usize = 16;

/// How a person's order to end the job stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CancelStage {
    /// Those who can decide it are asked to; `sure`: only the launcher here takes part in it, as far as is known, or
    /// sees to it as a member.
    Asked { sure: bool },
    /// All that was known of the job when the order was given is over.
    Over,
    /// No launcher is left that could write this generation's end to the store that decides it; `known`: all are
    /// known to be gone, and their workers with them.
    InStore { generation: Digest, known: bool },
    /// The reason, and a way out.
    Failed { why: String },
}

/// A person's order.
#[derive(Clone, Debug)]
pub(super) struct Cancelling {
    stage: CancelStage,
    /// Those that are not over yet.
    lives: BTreeMap<Digest, Life>,
    /// All that were known when the order was given.
    known: BTreeSet<Digest>,
    /// Where launchers wait for a life to begin.
    doors: BTreeSet<NodeId>,
    /// The launcher that was here.
    launcher: Option<LauncherId>,
    /// It was given by Ctrl-C there, not by a command.
    by_launcher: bool,
    given: Time,
    said: Time,
    /// Since when nobody is there to ask.
    stuck: Option<Time>,
    until: Time,
}

/// Lives that a person ended, as far as is known here, and when; zero: one that had not begun.
#[derive(Clone, Debug, Default)]
pub(super) struct Cancelled(BTreeMap<Digest, Given>);

/// An order to end a life. It is for launchers that were started before.
#[derive(Clone, Copy, Debug)]
struct Given {
    at: Time,
    heard: Time,
}

impl Cancelled {
    fn note(&mut self, lineage: Digest, at: Time, now: Time) {
        let given = self.0.entry(lineage).or_insert(Given { at, heard: now });
        *given = Given {
            at: at.max(given.at),
            heard: now,
        };
        if self.0.len() > KEPT_LIVES {
            let oldest = self.0.iter().min_by_key(|(_, given)| given.heard);
            if let Some(lineage) = oldest.map(|(lineage, _)| *lineage) {
                self.0.remove(&lineage);
            }
        }
    }

    pub(super) fn has(&self, lineage: Digest) -> bool {
        self.0.contains_key(&lineage)
    }
}

/// A life of the job that is to end.
#[derive(Clone, Debug, Default)]
pub(super) struct Life {
    /// The nodes that said last to take part in it.
    pub(super) tellers: BTreeSet<NodeId>,
    pub(super) heard: bool,
    /// Those that said that they cannot have it ended, when, and whom they miss.
    pub(super) unable: BTreeMap<NodeId, (Time, Vec<NodeId>)>,
}

impl Job {
    /// How the newest order of a person on this node stands; none when there is none, or it is long over.
    pub fn cancelling(&self) -> Option<CancelStage> {
        self.cancelling.as_ref().map(|o| o.stage.clone())
    }

    /// Whether a person ends the job, by an order on this node or at the launcher here.
    pub(super) fn user_ends_it(&self) -> bool {
        let ordered = self.cancelling.as_ref();
        let ordered = ordered.is_some_and(|o| matches!(o.stage, CancelStage::Asked { .. }));
        ordered || self.local.as_ref().is_some_and(|l| l.cancel)
    }

    /// A person ends the job, by an order that was given at that time: this agent may have been stopped since.
    ///
    /// # Errors
    /// There is nothing to end. Nothing has changed.
    pub(crate) fn cancel_by_order(&mut self, ctx: &mut Ctx<'_>, given: Time) -> Result<(), String> {
        let given = given.min(ctx.now).max(ctx.now - LIMIT);
        let doors = self
            .adverts(ctx.peers.all)
            .filter(|(_, a)| a.is_gathering());
        let mut lives = self.lives_known(ctx);
        if let Some(head) = self.live().filter(|_| self.is_newer(ctx, given)) {
            lives.remove(&head.lineage());
        }
        // The one that the launcher here asks may not say yet that others wait there.
        let asked = self.door_asked();
        let asked = asked.filter(|door| *door != ctx.me() && lives.is_empty());
        let doors: BTreeSet<NodeId> = doors.map(|(node, _)| node).chain(asked).collect();
        let launcher = self.launcher_meant(given);
        if lives.is_empty() && doors.is_empty() && launcher.is_none() && !self.is_gathering() {
            let id = &self.key.id;
            let gone = self.ran_elsewhere(ctx.peers.all, ctx.now);
            return Err(match &self.head {
                _ if !gone.is_empty() => self.do_not_answer(ctx, &gone),
                Some(_) if self.live().is_some() => {
                    format!("job {id} was started again after this order was given")
                }
                Some(end) => format!("job {id} is over: {}", self.why(ctx, &end.record)),
                None => format!("job {id} does not run, as far as this agent knows"),
            });
        }
        self.order_end(ctx, lives, false, given);
        if self.live().is_none() {
            self.cancelled.note(Digest::ZERO, given, ctx.now);
            self.end_gathering(ctx);
        } else if launcher.is_some() {
            self.cancel(ctx);
        }
        if let Some(order) = &mut self.cancelling {
            order.doors = doors;
        }
        Ok(())
    }

    /// The lives of the job that somebody takes part in, as far as is known here.
    fn lives_known(&self, ctx: &Ctx<'_>) -> BTreeSet<Digest> {
        let told = self.adverts(ctx.peers.all).filter(|(_, a)| a.belongs);
        let told = told.map(|(_, a)| a.lineage);
        let lives = told.chain(self.own_life());
        let lives = lives.filter(|l| !self.is_life_over(ctx, *l));
        lives.chain(self.live().map(Head::lineage)).collect()
    }

    fn is_life_over(&self, ctx: &Ctx<'_>, lineage: Digest) -> bool {
        if self.head_taken_part_in(ctx, lineage).is_some() {
            return false;
        }
        let newest = self.told_of(ctx, lineage).max_by_key(|(_, a)| a.number);
        let ended = newest.is_some_and(|(_, a)| a.leader.is_none() && !a.belongs);
        let number = newest.map_or(1, |(_, a)| a.number);
        let given_up = self.durable.superseded(lineage, number).is_some();
        let past = ctx.past.over(&lineage, number).is_some();
        ended || given_up || past || self.durable.has_ended(lineage)
    }

    /// The words of connected agents on a life of the job.
    pub(super) fn told_of<'a>(
        &'a self,
        ctx: &'a Ctx<'_>,
        lineage: Digest,
    ) -> impl Iterator<Item = (NodeId, &'a Advert)> {
        let told = self.adverts(ctx.peers.all);
        told.filter(move |(_, a)| !a.is_gathering() && a.lineage == lineage)
    }

    /// Follows a person's order.
    pub(super) fn drive_cancelling(&mut self, ctx: &mut Ctx<'_>) {
        let Some(mut order) = self.cancelling.take() else {
            return;
        };
        if ctx.now < order.until {
            // A launcher that was on its way back, to an agent that may know nothing of its life.
            if order.known.iter().any(|l| self.is_of_life(*l)) && !self.is_member(ctx) {
                self.cancel_what_came_before(ctx, order.given);
            }
            if let CancelStage::Asked { .. } = order.stage {
                self.follow(ctx, &mut order);
            }
            let asks = matches!(order.stage, CancelStage::Asked { .. });
            if order.by_launcher && !asks {
                // Nobody waits to hear how it ended, or what stands in its way.
                return;
            }
            self.wake_at(order.until, "an order to end the job");
            self.cancelling = Some(order);
        }
    }

    fn follow(&mut self, ctx: &mut Ctx<'_>, order: &mut Cancelling) {
        // It is not known of launchers that nothing is heard of whether they go.
        let unheard = |n: NodeId| !ctx.peers.connected(n) || self.is_silent(ctx, n);
        let due = order.given + ctx.cfg.suspect_after.times(3);
        let gathers = |node: &NodeId| {
            let mut told = self.adverts(ctx.peers.all);
            // Those that wait there yet came after the order.
            let waits = ctx.now < due && told.any(|(n, a)| n == *node && a.is_gathering());
            unheard(*node) || waits
        };
        let before = order.doors.len();
        // Each is told at least once: one that the launcher here asks may not say yet that others wait there.
        if order.said > Time::ZERO {
            order.doors.retain(gathers);
        }
        if order.doors.len() < before {
            // They went, or the life that they waited for has begun.
            let begun = self
                .adverts(ctx.peers.all)
                .filter(|(_, a)| a.belongs && a.number == 1);
            let begun = begun
                .map(|(_, a)| a.lineage)
                .filter(|l| order.known.insert(*l));
            order.lives.extend(begun.map(|l| (l, Life::default())));
        }
        order.launcher = order.launcher.filter(|l| self.launcher() == Some(*l));
        for (lineage, life) in &mut order.lives {
            self.hear_of(ctx, *lineage, life);
        }
        order
            .lives
            .retain(|lineage, life| !self.is_done(ctx, *lineage, life));
        let obstacles = order.lives.iter();
        let gone = order.doors.iter().copied();
        let gone: Vec<NodeId> = gone.filter(|n| unheard(*n)).collect();
        let door = (!gone.is_empty()).then(|| self.unreached(ctx, &gone));
        let obstacle = obstacles
            .filter_map(|(l, life)| self.obstacle(ctx, *l, life))
            .next()
            .or(door);
        let stage = match obstacle {
            None if order.lives.is_empty()
                && order.doors.is_empty()
                && order.launcher.is_none() =>
            {
                Some(CancelStage::Over)
            }
            None => {
                order.stuck = None;
                None
            }
            Some(Obstacle::InStore {
                generation,
                known: true,
            }) => Some(CancelStage::InStore {
                generation,
                known: true,
            }),
            Some(obstacle) => {
                // An agent that was just started may soon hear of the others.
                let since = *order.stuck.get_or_insert(ctx.now);
                let due = since + ctx.cfg.suspect_after.times(3);
                self.wake_at(due, "an order that nobody takes");
                (ctx.now >= due).then_some(match obstacle {
                    Obstacle::InStore { generation, known } => {
                        CancelStage::InStore { generation, known }
                    }
                    Obstacle::Silent(why) => CancelStage::Failed { why },
                })
            }
        };
        if let Some(stage) = stage {
            order.stage = stage;
            order.until = ctx.now + KEPT;
            return;
        }
        let seen_to =
            |l: &Digest| self.is_member(ctx) && self.live().is_some_and(|h| h.lineage() == *l);
        let sure =
            order.stuck.is_none() && order.doors.is_empty() && order.lives.keys().all(seen_to);
        order.stage = CancelStage::Asked { sure };
        if ctx.now >= order.said + REPEAT {
            order.said = ctx.now;
            let ago = ctx.now.since(order.given);
            for (lineage, life) in &order.lives {
                self.say_cancel(ctx, *lineage, life, ago);
            }
            for node in &order.doors {
                self.send_cancel(ctx, *node, Digest::ZERO, ago);
            }
            self.ask_hellos(ctx, order.doors.iter().copied());
        }
        self.wake_at(order.said + REPEAT, "say an order to end the job again");
    }

    /// The nodes that take part in a life, by what was said since the last look. Nobody counts as gone because the
    /// link to it is.
    fn hear_of(&self, ctx: &Ctx<'_>, lineage: Digest, life: &mut Life) {
        let told = self.told_of(ctx, lineage).filter(|(_, a)| a.belongs);
        let told: BTreeSet<NodeId> = told.map(|(node, _)| node).collect();
        life.heard |= !told.is_empty();
        life.tellers.retain(|n| !ctx.peers.connected(*n));
        life.tellers.extend(told);
    }

    fn is_done(&self, ctx: &Ctx<'_>, lineage: Digest, life: &Life) -> bool {
        let here = self.head_taken_part_in(ctx, lineage).is_some();
        let left = life.heard && life.tellers.is_empty();
        !here && (left || self.is_life_over(ctx, lineage))
    }

    /// The generation of a life that this node takes part in, or watches for a launcher that waits here. An agent that
    /// only knows of one hears nothing of its members but what all say.
    pub(super) fn head_taken_part_in(&self, ctx: &Ctx<'_>, lineage: Digest) -> Option<&Head> {
        let waits = self.local.as_ref().is_some_and(|l| l.conn.is_some());
        let live = self.live().filter(|h| h.lineage() == lineage);
        live.filter(|_| waits || self.has_part(ctx))
    }

    /// Says to whoever may decide it that a life is to end.
    fn say_cancel(&mut self, ctx: &mut Ctx<'_>, lineage: Digest, life: &Life, ago: Span) {
        self.on_cancel_ask(ctx, ctx.me(), lineage, ago);
        // A launcher whose agent has lost its state has a part in it, too.
        for node in ctx.peers.connected_nodes().collect::<Vec<_>>() {
            self.send_cancel(ctx, node, lineage, ago);
        }
        // A member says nothing by itself when its part is over.
        self.ask_hellos(ctx, life.tellers.iter().copied());
    }

    /// Says that a person ordered that long ago that a life ends.
    fn send_cancel(&mut self, ctx: &Ctx<'_>, to: NodeId, lineage: Digest, ago: Span) {
        let ago_ms = u32::try_from(ago.as_millis()).unwrap_or(u32::MAX);
        self.send(ctx, to, JobMessage::CancelAsk { lineage, ago_ms });
    }

    /// An agent that would have a life ended does not.
    pub(super) fn on_cancel_unable(
        &mut self,
        ctx: &Ctx<'_>,
        from: NodeId,
        lineage: Digest,
        why: Unable,
    ) {
        let Some(order) = &mut self.cancelling else {
            return;
        };
        match why {
            Unable::Newer => {
                order.lives.remove(&lineage);
            }
            Unable::Misses { nodes } => {
                if let Some(life) = order.lives.get_mut(&lineage) {
                    life.unable.insert(from, (ctx.now, nodes));
                }
            }
        }
    }

    /// Whether what runs here began after that time: its first generation, or one in which none of the launchers before
    /// it goes on, has the launcher here, which was started later. A generation that followed since is not known to be
    /// newer.
    fn is_newer(&self, ctx: &Ctx<'_>, given: Time) -> bool {
        let Some(record) = self.live().map(|h| &h.record) else {
            return false;
        };
        let before = self.before.as_ref().filter(|b| b.digest == record.parent);
        let stays = |m: &Member| {
            let now = record.member(m.node);
            now.is_some_and(|now| now.launcher == m.launcher)
        };
        let anew = before.is_some_and(|b| !b.record.members.iter().any(stays));
        let began = record.number == 1 || anew;
        began && self.is_member(ctx) && self.launcher_meant(given).is_none()
    }

    fn ask_hellos(&mut self, ctx: &Ctx<'_>, nodes: impl Iterator<Item = NodeId>) {
        for to in nodes.take(MAX_LIST).filter(|n| ctx.peers.connected(*n)) {
            let message = Message::HelloAsk;
            self.effects.push_back(Effect::Send { to, message });
        }
    }

    /// A person has ended the job in its log, where nobody is left who could; or read there how it ended.
    ///
    /// # Errors
    /// It is no end of what this agent knows. Nothing has changed.
    pub(crate) fn ended_in_log(&mut self, ctx: &mut Ctx<'_>, end: Record) -> Result<(), String> {
        let by_store = matches!(end.arbiter, Arbiter::Store(_));
        let lineage = end.lineage();
        let here = self.live().filter(|h| {
            let newer = end.number > h.record.number;
            h.lineage() == lineage && h.record.arbiter == end.arbiter && newer
        });
        let told = self
            .told_of(ctx, lineage)
            .filter(|(_, a)| a.number < end.number);
        let members = here.into_iter().flat_map(|h| &h.record.members);
        let members = members.map(|m| m.node);
        let others: BTreeSet<NodeId> = members.chain(told.map(|(node, _)| node)).collect();
        let here = here.is_some();
        let is_end = by_store && end.kind.is_terminal() && end.check().is_ok();
        if !is_end || !here && others.is_empty() {
            return Err(format!(
                "that is no end of job {} as this agent knows it",
                self.key.id
            ));
        }
        let record = Arc::new(end);
        for node in others.into_iter().filter(|n| *n != ctx.me()) {
            let record = record.clone();
            self.send(ctx, node, JobMessage::Decided { record });
        }
        if here || self.head.is_none() {
            self.install(ctx, record);
        }
        Ok(())
    }

    /// Whether nobody can decide how the job goes on or ends, and nobody here takes part in it.
    pub(super) fn is_hopeless(&self, ctx: &Ctx<'_>) -> bool {
        let stranded = self.is_stranded(ctx);
        let part = self.is_member(ctx) || self.waits_for_place(ctx);
        !part && stranded && !self.others_may_decide(ctx)
    }

    /// Whether a majority without this node may live: it may go on with the job where this node does not see it.
    pub(super) fn others_may_decide(&self, ctx: &Ctx<'_>) -> bool {
        let lives = |n| n != ctx.me() && ctx.peers.lost(n) != Some(true);
        self.voting().is_some_and(|r| r.is_majority(lives))
    }

    /// A person ends the job before it has formed: the launcher here, and those that ask here to be let in, go, unless
    /// they were started after that.
    fn end_gathering(&mut self, ctx: &mut Ctx<'_>) {
        let Some(order) = self.cancelled.0.get(&Digest::ZERO).copied() else {
            return;
        };
        self.cancel_what_came_before(ctx, order.at);
        let tickets = self.gathering.tickets.iter();
        let meant = tickets.filter(|(_, held)| held.waits_since <= order.at);
        let meant: Vec<NodeId> = meant.map(|(node, _)| *node).collect();
        let tickets = &mut self.gathering.tickets;
        tickets.retain(|_, held| held.waits_since > order.at);
        if !meant.is_empty() {
            self.withdraw_birth(ctx);
        }
        for node in meant.into_iter().filter(|n| *n != ctx.me()) {
            self.repeat_cancel(ctx, node, Digest::ZERO);
        }
    }

    /// Whether a launcher that asks to be let in is to go, as a person ended the job before it began; it is told.
    pub(super) fn is_cancelled_before(&mut self, ctx: &Ctx<'_>, held: &Held) -> bool {
        let order = self.cancelled.0.get(&Digest::ZERO).copied();
        let order = order.filter(|o| held.waits_since <= o.at && ctx.now < o.heard + KEPT);
        let goes = order.is_some() && self.live().is_none();
        if goes {
            self.repeat_cancel(ctx, held.ticket.member.node, Digest::ZERO);
        }
        goes
    }

    /// Ctrl-C at the launcher here ends the life in which it takes part, or took part until it was dropped: an order,
    /// for this launcher may be gone before the others have heard of it.
    pub(super) fn cancel_by_launcher(&mut self, ctx: &mut Ctx<'_>) {
        let began = self.local.as_ref().and_then(|l| l.reg.began.as_ref());
        let began = began.map(|b| b.lineage).filter(|l| self.is_of_life(*l));
        let part = match self.live().map(Head::lineage) {
            Some(live) => (self.is_member(ctx) || began == Some(live)).then_some(live),
            None => began.filter(|l| !self.is_life_over(ctx, *l)),
        };
        if let Some(lineage) = part {
            let order = self.cancelling.as_mut();
            match order.filter(|o| matches!(o.stage, CancelStage::Asked { .. })) {
                Some(order) => {
                    order.lives.entry(lineage).or_default();
                    order.known.insert(lineage);
                }
                None => self.order_end(ctx, BTreeSet::from([lineage]), true, ctx.now),
            }
        }
        self.cancel(ctx);
    }

    /// The launcher that was told of Ctrl-C has ended its own part alone, and said so; or another one is started here,
    /// which is the newer wish.
    pub(super) fn forget_ctrl_c(&mut self, launcher: Option<LauncherId>) {
        self.cancelling.take_if(|order| {
            order.by_launcher && (launcher.is_none() || order.launcher != launcher)
        });
    }

    /// The launcher here goes, if it has a part in a life that a person ended, and its agent knows nothing of that any
    /// more.
    pub(super) fn end_with_cancelled(&mut self, ctx: &mut Ctx<'_>) {
        let life = self.own_life().filter(|_| !self.is_member(ctx));
        if let Some(order) = life.and_then(|l| self.cancelled.0.get(&l)).copied() {
            self.cancel_what_came_before(ctx, order.at);
        }
    }

    /// Whether a person ended this life before the launcher here was started: it is of the next one, though its place is
    /// kept by members that have not heard of that. An order of which nothing is heard any more ends nothing.
    pub(super) fn came_after_order(&self, ctx: &Ctx<'_>, lineage: Digest) -> bool {
        let order = self.cancelled.0.get(&lineage);
        let order = order.filter(|order| ctx.now < order.heard + KEPT);
        let here = self.local.as_ref().map(|l| l.waits_since);
        here.zip(order)
            .is_some_and(|(since, order)| since > order.at)
    }

    /// Tells a peer of the order to end this life, if there was one: its launcher joins no other.
    pub(super) fn repeat_cancel(&mut self, ctx: &Ctx<'_>, to: NodeId, lineage: Digest) {
        if let Some(order) = self.cancelled.0.get(&lineage).copied() {
            self.send_cancel(ctx, to, lineage, ctx.now.since(order.at));
        }
    }

    /// An order is not for a launcher that was started after it: that is the newer wish.
    fn cancel_what_came_before(&mut self, ctx: &mut Ctx<'_>, order: Time) {
        if self.launcher_meant(order).is_some() {
            self.cancel(ctx);
        }
    }

    /// The launcher here, if it was started before an order that was given at that time.
    fn launcher_meant(&self, given: Time) -> Option<LauncherId> {
        let here = self.local.as_ref().filter(|l| l.over.is_none());
        here.filter(|l| l.waits_since <= given)
            .map(|l| l.reg.launcher)
    }

    fn order_end(
        &mut self,
        ctx: &Ctx<'_>,
        lives: BTreeSet<Digest>,
        by_launcher: bool,
        given: Time,
    ) {
        self.cancelling = Some(Cancelling {
            stage: CancelStage::Asked { sure: false },
            lives: lives.iter().map(|l| (*l, Life::default())).collect(),
            known: lives,
            launcher: self.launcher_meant(given),
            by_launcher,
            given,
            said: Time::ZERO,
            stuck: None,
            until: ctx.now + LIMIT,
            doors: BTreeSet::new(),
        });
    }

    /// A person ends this life of the job. Its leader decides that; where nobody can, this node gives it up. A
    /// launcher that had a part in it, of which its agent knows nothing any more, goes at once.
    pub(super) fn on_cancel_ask(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        lineage: Digest,
        ago: Span,
    ) {
        // Its launcher may be on its way back to this agent.
        let (stopped, woke) = ctx.quiet;
        // While this agent stood still the order waited here. What waited is read at once.
        let waited = from != ctx.me() && ctx.now.since(woke) < Span(ctx.cfg.suspect_after.0 / 64);
        let given = (ctx.now - ago).min(if waited { stopped } else { ctx.now });
        let ago = ctx.now.since(given);
        self.cancelled.note(lineage, given, ctx.now);
        if lineage.is_zero() {
            if self.live().is_none() {
                self.end_gathering(ctx);
            }
            return;
        }
        let after = self.is_of_life(lineage) && self.came_after_order(ctx, lineage);
        if after && !self.is_member(ctx) {
            self.set_life(None);
        }
        let live = self.live().filter(|h| h.lineage() == lineage);
        let Some((record, digest)) = live.map(|h| (h.record.clone(), h.digest)) else {
            self.end_with_cancelled(ctx);
            if from != ctx.me() && !self.durable.has_ended(lineage) {
                // The one that asks may know a generation that names this node, which has not heard of it.
                let have = self.head_digest();
                self.send(ctx, from, JobMessage::Ask { have });
            }
            return;
        };
        if self.is_newer(ctx, given) {
            let why = Unable::Newer;
            return self.send(ctx, from, JobMessage::CancelUnable { lineage, why });
        }
        if self.is_member(ctx) {
            // The next leader, too, reads of it in the status.
            self.cancel(ctx);
        }
        if self.is_hopeless(ctx) {
            // It waits to go on with what is given up.
            self.cancel_what_came_before(ctx, given);
            self.durable.supersede(lineage, EVERY_NUMBER);
            return self.leave_group(ctx, digest, "the user stopped the job");
        }
        self.say_missed(ctx, from, &record);
        let leader = self.acting_leader(ctx, &record);
        match (&mut self.lead, leader) {
            (Some(lead), _) => {
                lead.cancelled = true;
                self.wake_at(ctx.now, "a person ends the job");
            }
            (None, Some(leader)) if leader != ctx.me() && leader != from => {
                // Nodes that disagree on the leader would pass it around without end.
                let passed = self.cancel_passed.filter(|(l, _)| *l == lineage);
                if passed.is_none_or(|(_, at)| ctx.now >= at + REPEAT) {
                    self.cancel_passed = Some((lineage, ctx.now));
                    self.send_cancel(ctx, leader, lineage, ago);
                }
            }
            (None, _) => {}
        }
    }
}
