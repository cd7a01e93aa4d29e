//! The generation that runs by the job's log, seen by a node that is no member: whether anybody is left of it, and
//! otherwise how long until this node may take it over (R14).

use super::{Ctx, Head, Job};
use crate::agent::Effect;
use crate::ids::Digest;
use crate::membership::Guard;
use crate::record::{Arbiter, Member, Record};
use crate::time::{Span, Time};

/// The acting leader's beacon: an object in the store that changes while a leader lives.
#[derive(Clone, Debug, Default)]
pub(super) struct Beacon {
    /// When it was last written, or read, here.
    at: Option<Time>,
    /// The value that was written last, without its random part.
    said: u64,
    seen: Option<Seen>,
}

/// The beacon's value as last read.
#[derive(Clone, Copy, Debug)]
struct Seen {
    value: u64,
    /// Since when it has not changed, and how many further reads have said so.
    since: Time,
    again: u32,
}

/// How often a beacon is read without a change, and for how many of its periods, before a generation all of whose
/// launchers are dead is taken over. A read that is not answered says nothing.
const STILL: u32 = 2;

/// Set in a beacon's value once workers of the generation in its upper half have started.
const STARTED: u64 = 1 << 32;

impl Beacon {
    /// The part of a value that names its generation. Below that it is random, so that it differs from the one before.
    fn value(of: Digest, started: bool) -> u64 {
        let [a, b, c, d, ..] = of.0;
        let started = if started { STARTED } else { 0 };
        let of = u64::from(u32::from_be_bytes([a, b, c, d])) << 32;
        of & !STARTED | started
    }

    /// Whether workers of this generation have started, as its leader said. A beacon that an older version wrote says
    /// anything: it names another generation.
    fn has_started(&self, of: Digest) -> bool {
        let said = self.seen.map(|s| s.value & !(STARTED - 1));
        said == Some(Self::value(of, true))
    }

    /// How often it is written, and read.
    fn every(ctx: &Ctx<'_>) -> Span {
        Span(ctx.cfg.suspect_after.0 / 4)
    }
}

/// A generation that was taken over from here.
#[derive(Clone, Copy, Debug)]
pub(super) struct TookOver {
    pub(super) from: Digest,
    pub(super) at: Time,
    /// Nobody trained for it any more, so a start waits for nobody.
    pub(super) died: bool,
}

impl Job {
    /// Whether a stranger may go on with what the store says is running: this node is no member, and nothing of
    /// it is left, or neither the leader's beacon nor the log has moved for `orphan_after` (R14).
    pub(super) fn is_orphaned(&self, ctx: &Ctx<'_>) -> bool {
        !self.is_member(ctx) && self.orphaned_in(ctx) == Some(Span::ZERO)
    }

    /// How long the beacon and the log still have to stand still for what the log says is running: not at all where
    /// all of its agents are there, and say that nothing of it is left; unknown while the beacon was not read.
    pub(super) fn orphaned_in(&self, ctx: &Ctx<'_>) -> Option<Span> {
        let (last, digest) = self.log_runs()?;
        let died = self.has_died(ctx, last, digest);
        if died && last.members.iter().all(|m| ctx.reachable(m.node)) {
            return Some(Span::ZERO);
        }
        let store = self.store.as_ref()?;
        let seen = store.beacon.seen?;
        let since = seen.since.max(store.log.tail().last_changed);
        // In another network another host may refuse in a member's place: so the leader may not write either.
        let wait = match died && seen.again >= STILL {
            true => Beacon::every(ctx).times(STILL.into()),
            false => ctx.cfg.orphan_after,
        };
        Some((since + wait).since(ctx.now))
    }

    /// Whether nobody trains any more for this generation, nor for those before: each of its launchers is known to
    /// be dead, and with it its workers, or its agents say so; and it has started, for which it had waited for everybody
    /// else.
    fn has_died(&self, ctx: &Ctx<'_>, record: &Record, digest: Digest) -> bool {
        let saved = self
            .log_commit()
            .is_some_and(|(c, _)| c.generation == digest);
        let dead = |m: &Member| {
            // The verdict may be on an earlier launcher of that node.
            let watched = ctx.peers.guards.get(&m.node).map(|(guard, _)| *guard);
            watched == Some(Some((m.guard, m.launcher))) && ctx.peers.lost(m.node) == Some(true)
        };
        let beacon = self.store.as_ref().map(|s| &s.beacon);
        let started = saved
            || beacon.is_some_and(|b| b.has_started(digest))
            || self.was_started(ctx.peers.all, digest)
            || record.parent.is_zero();
        let are_dead = || Self::is_found(ctx, record) && record.members.iter().all(dead);
        started && (self.was_left_behind(ctx.peers.all, digest, &record.members) || are_dead())
    }

    /// Whether the addresses of its launchers lead to their hosts from here. A job of one node is on loopback.
    fn is_found(ctx: &Ctx<'_>, record: &Record) -> bool {
        let mut members = record.members.iter();
        ctx.cfg.one_host || !members.any(|m| m.guard.ip().is_loopback())
    }

    /// The note on what runs by the log, for when it is taken over now.
    pub(super) fn taking_over(&self, ctx: &Ctx<'_>) -> Option<TookOver> {
        let (last, from) = self.log_runs()?;
        Some(TookOver {
            from,
            at: ctx.now,
            died: self.has_died(ctx, last, from),
        })
    }

    /// The launchers of what the log says is running, for a node that waits to go on with it.
    pub(super) fn watch_log(&self, ctx: &Ctx<'_>) -> impl Iterator<Item = (crate::NodeId, Guard)> {
        let waits = self.local.as_ref().is_some_and(|l| l.conn.is_some());
        let runs = self.log_runs().filter(|_| waits && !self.is_member(ctx));
        let few = runs.filter(|(last, _)| {
            last.members.len() <= crate::wire::MAX_LIST && Self::is_found(ctx, last)
        });
        let members = few.into_iter().flat_map(|(last, _)| &last.members);
        members.map(|m| (m.node, Some((m.guard, m.launcher))))
    }

    /// Whether tickets for what the store says is running are gathered here, though this node is no
    /// member and may not even have the store: nobody leads it that this node could name. Whether a
    /// stranger may go on with it is for the one to say who is to claim it, and reads the store.
    pub(super) fn is_leaderless(&self, ctx: &Ctx<'_>) -> bool {
        let by_store = |h: &&Head| matches!(h.record.arbiter, Arbiter::Store(_));
        let Some(head) = self.live().filter(by_store) else {
            return false;
        };
        let lead = self.acting_leader(ctx, &head.record);
        !self.is_member(ctx) && lead.is_none_or(|n| !ctx.reachable(n))
    }

    /// Whether workers of the head have started somewhere, as far as its leader here knows.
    fn has_started(&self) -> bool {
        let statuses = self.lead.iter().flat_map(|l| l.statuses.values());
        statuses.into_iter().any(|s| s.started.is_some())
    }

    pub(super) fn drive_beacon(&mut self, ctx: &mut Ctx<'_>) {
        let member = self.is_member(ctx);
        let waits = !member && self.log_runs().is_some();
        let head = self.live().filter(|_| member);
        let leads = head.is_some_and(|h| self.acting_leader(ctx, &h.record) == Some(ctx.me()));
        let (digest, started) = (self.head_digest(), self.has_started());
        let Some(store) = self.store.as_mut().filter(|_| leads || waits) else {
            return;
        };
        let beacon = &mut store.beacon;
        let every = Beacon::every(ctx);
        let said = if leads {
            Beacon::value(digest, started)
        } else {
            0
        };
        let due = beacon.at.filter(|_| beacon.said == said);
        if let Some(due) = due.map(|at| at + every).filter(|due| ctx.now < *due) {
            return self.wake_at(due, "the beacon");
        }
        (beacon.at, beacon.said) = (Some(ctx.now), said);
        let key = self.key.clone();
        self.effects.push_back(match leads {
            true => Effect::WriteBeacon {
                key,
                value: said | ctx.rng.next_u64() & (STARTED - 1),
            },
            false => Effect::ReadBeacon { key },
        });
        self.wake_at(ctx.now + every, "the beacon");
    }

    pub(crate) fn on_beacon(&mut self, ctx: &mut Ctx<'_>, value: Option<u64>) {
        let Some(store) = &mut self.store else { return };
        // No beacon at all counts as one that does not move.
        let value = value.unwrap_or(0);
        match &mut store.beacon.seen {
            Some(seen) if seen.value == value => seen.again = seen.again.saturating_add(1),
            seen => {
                let (since, again) = (ctx.now, 0);
                *seen = Some(Seen {
                    value,
                    since,
                    again,
                });
            }
        }
    }
}
