//! A launcher that the generation counts on and that is not here: whether it is dead, or only
//! silent. Its workers run as long as its lease does, so nobody takes its place before.

use std::collections::BTreeSet;

use super::member::Mine;
use super::{Ctx, Job};
use crate::agent::{ConnId, Effect, Notice};
use crate::ids::{LauncherId, NodeId};
use crate::membership::Answer;
use crate::record::{Member, Record};
use crate::time::{Span, Time};
use crate::wire::JobMessage;

/// So many members, in rank order, may hold what was said to the leader: each leads where those before it are lost.
const NEXT_LEADERS: usize = 4;

#[cfg(test)]
mod tests;

/// The place of a launcher that is missing.
#[derive(Clone, Debug)]
pub(super) struct Vacant {
    launcher: LauncherId,
    since: Time,
    /// The question at its guard that is under way.
    asked: Option<u64>,
    ask_at: Time,
    /// Since when its guard accepts questions and answers none.
    mute_since: Option<Time>,
    /// Nobody listens at its guard any more.
    refused: bool,
}

impl Vacant {
    fn new(launcher: LauncherId, now: Time) -> Vacant {
        Vacant {
            launcher,
            since: now,
            asked: None,
            ask_at: now,
            mute_since: None,
            refused: false,
        }
    }
}

impl Job {
    /// The launcher's connection closed, and this is what its guard says.
    pub(crate) fn launcher_gone(&mut self, ctx: &mut Ctx<'_>, conn: ConnId, guard: Answer) {
        let Some(local) = self.local.as_mut().filter(|l| l.was == conn) else {
            return;
        };
        local.conn = None;
        match guard {
            Answer::Answered => local.silent_since = None,
            // It may be stopped, and its workers run until its lease is over, which nothing renews now.
            Answer::Mute | Answer::Silent => {
                local.silent_since.get_or_insert(ctx.now);
            }
            Answer::Refused | Answer::Other => self.launcher_died(ctx),
        }
    }

    /// A launcher that nothing is heard of has no lease any more.
    pub(super) fn drive_silent(&mut self, ctx: &mut Ctx<'_>) {
        let silent = self.local.as_ref().and_then(|l| l.silent_since);
        let Some(dead) = silent.map(|since| since + ctx.cfg.agent_grace) else {
            return;
        };
        match ctx.now < dead {
            true => self.wake_at(dead, "a launcher that says nothing"),
            false => self.launcher_died(ctx),
        }
    }

    pub(super) fn launcher_died(&mut self, ctx: &mut Ctx<'_>) {
        let Some(local) = self.local.take() else {
            return;
        };
        self.slots_orphaned(ctx.now);
        self.applicant.told.clear();
        // Those that hold its ticket, or to which it was passed on: they would let in one that is dead.
        let said = self.member.as_ref().and_then(|m| m.said);
        let asked = said.map(|(to, _)| to).into_iter().chain(self.door_asked());
        let members = self.live().into_iter().flat_map(|h| &h.record.members);
        let members = members.map(|m| m.node).take(NEXT_LEADERS);
        let told: BTreeSet<NodeId> = asked.chain(members).filter(|n| *n != ctx.me()).collect();
        for to in told {
            self.send(ctx, to, JobMessage::Withdraw);
        }
        let me = ctx.me();
        let was_member = self
            .live()
            .and_then(|h| h.record.member(me))
            .is_some_and(|m| m.launcher == local.reg.launcher);
        if was_member && let Some(mine) = &mut self.member {
            mine.status.gone = true;
            mine.status.stopped = true;
            mine.changed = true;
        }
        self.gathering.withdraw(me);
        self.died = Some(local.reg.launcher);
    }

    /// This node's place in the head, if another launcher than the one that is here holds it.
    fn place_of_another<'a>(&self, ctx: &Ctx<'_>, record: &'a Record) -> Option<&'a Member> {
        let mine = record
            .member(ctx.me())
            .filter(|m| m.state == ctx.cfg.state)?;
        let given_up = self.member.as_ref().is_some_and(|m| m.status.gone);
        (self.launcher() != Some(mine.launcher) && !given_up).then_some(mine)
    }

    /// Whether the head counts on this launcher, which is not here and not known to be dead.
    pub(super) fn is_missed(&self, ctx: &Ctx<'_>, launcher: LauncherId) -> bool {
        let head = self.live();
        let place = head.and_then(|h| self.place_of_another(ctx, &h.record));
        let refused = self.vacant.as_ref().is_some_and(|v| v.refused);
        place.is_some_and(|m| m.launcher == launcher) && !refused
    }

    /// Whether the launcher here has to wait for one that may still have workers.
    pub(super) fn waits_for_place(&self, ctx: &Ctx<'_>) -> bool {
        let head = self.live();
        let place = head.and_then(|h| self.place_of_another(ctx, &h.record));
        place.is_some_and(|m| self.is_missed(ctx, m.launcher))
    }

    /// The generation counts on a launcher here, and there is none: it died while this agent was
    /// away, or before the generation was decided, or it is stopped. When nothing was heard of it for
    /// `agent_grace`, its lease is over: then it counts as dead. Its guard is asked at once.
    pub(super) fn drive_vacant(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let Some(place) = self.place_of_another(ctx, record) else {
            // Of one that has no part any more [`Self::drive_ended`] asks.
            self.vacant.take_if(|_| record.has(ctx.me()));
            return;
        };
        let launcher = place.launcher;
        let vacant = match self.vacant.take() {
            Some(vacant) if vacant.launcher == launcher => vacant,
            _ => Vacant::new(launcher, ctx.now),
        };
        let vacant = self.vacant.insert(vacant);
        let dead = vacant.since + ctx.cfg.agent_grace;
        // One that is stopped has no lease but what this agent answers its sidecar, which is none.
        let mute = vacant
            .mute_since
            .map(|since| since + ctx.cfg.suspect_after.times(2));
        let dead = mute.map_or(dead, |at| at.min(dead));
        if !vacant.refused && ctx.now < dead {
            self.ask_for(ctx, place);
            return self.wake_at(dead, "a launcher that should come back");
        }
        let text = format!(
            "this node's launcher of generation {} is gone",
            record.number
        );
        let mut gone = Mine::new(self.head_digest(), ctx.cfg.boot);
        gone.status.gone = true;
        gone.status.stopped = true;
        self.member = Some(gone);
        self.wake_at(ctx.now, "a place is free");
        self.notice(Notice::Trouble {
            key: self.key.clone(),
            text,
        });
    }

    /// The generation of this node is over, was given up, or goes on without this node: once its launcher is gone those
    /// are told that may wait for its workers before they start theirs. If this agent was away, the launcher may have
    /// gone by itself, so its guard is asked.
    pub(super) fn drive_ended(&mut self, ctx: &mut Ctx<'_>) {
        let part = self.live().is_some_and(|h| h.has(ctx.me()));
        let before = self.before.clone().filter(|_| !part);
        let Some(before) = before else { return };
        let place = before.record.member(ctx.me());
        let Some(place) = place.filter(|m| m.state == ctx.cfg.state) else {
            return;
        };
        if self.died == Some(place.launcher) && self.said_over != before.digest {
            self.said_over = before.digest;
            self.dropped_has_stopped(ctx, ctx.me(), before.digest, true);
            match self.live().is_some() {
                true => self.old_stopped(ctx, before.digest),
                false => self.say_ended_here(ctx, ctx.peers.connected_nodes()),
            }
        }
        if [self.launcher(), self.died].contains(&Some(place.launcher)) {
            self.vacant = None;
            return;
        }
        let launcher = place.launcher;
        let known = self.vacant.take().filter(|v| v.launcher == launcher);
        let vacant = self
            .vacant
            .insert(known.unwrap_or(Vacant::new(launcher, ctx.now)));
        if vacant.refused {
            self.died = Some(launcher);
            self.drive_ended(ctx);
        } else if ctx.now < vacant.since + ctx.cfg.agent_grace {
            // Nobody waits for longer.
            self.ask_for(ctx, place);
        }
    }

    /// Asks at the guard of the launcher that holds this place.
    fn ask_for(&mut self, ctx: &mut Ctx<'_>, place: &Member) {
        let Some(vacant) = &mut self.vacant else {
            return;
        };
        if vacant.asked.is_none() && ctx.now >= vacant.ask_at {
            let id = ctx.rng.next_u64();
            vacant.asked = Some(id);
            vacant.ask_at = ctx.now + Span(ctx.cfg.suspect_after.0 / 8);
            self.effects.push_back(Effect::Probe {
                node: ctx.me(),
                id,
                guard: Some((place.guard, place.launcher)),
            });
        } else if vacant.asked.is_none() {
            let at = vacant.ask_at;
            self.wake_at(at, "ask at a guard again");
        }
    }

    /// Whether this question is this job's.
    pub(crate) fn looks_for_launcher(&self, id: u64) -> bool {
        self.vacant.as_ref().is_some_and(|v| v.asked == Some(id))
    }

    /// Takes in the guard's answer.
    pub(crate) fn launcher_looked_for(&mut self, ctx: &mut Ctx<'_>, guard: Answer) {
        let Some(vacant) = &mut self.vacant else {
            return;
        };
        vacant.asked = None;
        vacant.refused = guard.is_gone();
        vacant.mute_since = match guard {
            Answer::Mute => vacant.mute_since.or(Some(ctx.now)),
            _ => None,
        };
        if vacant.refused || self.local.is_none() || !self.waits_for_place(ctx) {
            return;
        }
        let what = match guard {
            Answer::Answered => "answers, and may come back to this agent",
            _ => "says nothing: it is stopped, or hangs",
        };
        self.tell_waiting(ctx.now, format!(
            "job {} has another launcher on this node, which {what}; waiting until its workers are \
             known to have ended",
            self.key.id
        ));
    }
}
