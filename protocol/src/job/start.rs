//! The start of a generation's workers: when its leader orders it, for whom it waits (R16), and members that do not
//! start (R17).

use std::collections::{BTreeMap, BTreeSet};

use super::{Ctx, Job};
use crate::ids::NodeId;
use crate::record::{Member, Record};
use crate::time::Time;
use crate::wire::Action;

/// The start of the generation that this agent leads.
#[derive(Clone, Debug, Default)]
pub(super) struct Starting {
    /// The attempt that the members were ordered to start; zero before that.
    pub(super) attempt: u32,
    /// When they were, or rank 0's launcher was found to have no port yet.
    pub(super) run_at: Option<Time>,
    /// Members that did not start in time, or said that they cannot.
    pub(super) struck: BTreeSet<NodeId>,
    /// All were told for what the start waits.
    wait_told: bool,
    /// Members that were suspected or away while the start waited, and when each was found to be well again.
    unwell: BTreeMap<NodeId, Option<Time>>,
    /// All run, and the times of the change were told.
    changed_told: bool,
}

impl Job {
    pub(super) fn drive_start(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let me = ctx.me();
        let digest = self.head_digest();
        // A launcher that waits for another's place has no part in this one.
        if record.is_short() || self.waits_for_place(ctx) {
            return;
        }
        let Some(lead) = &mut self.lead else { return };
        if record.leader() != Some(me) || lead.ending.is_some() || lead.planned.is_some() {
            return;
        }
        if ctx.now < self.pause {
            return self.wake_at(self.pause, "the pause in a crash loop");
        }
        if lead.start.attempt == 0 {
            // A generation that an earlier run of this agent has started goes on.
            let running = lead.statuses.values().filter_map(|s| s.started).max();
            let local = self.local.as_mut().filter(|l| l.conn.is_some());
            let Some(local) = local else { return };
            let mine = self.member.as_ref().map(|m| &m.status);
            // Its own part of it may be done.
            let began = local.running == Some(digest) || mine.is_some_and(|s| s.finished);
            if let (true, Some(attempt)) = (began, running) {
                lead.start.attempt = attempt;
                lead.start.changed_told = true;
                // Whoever had no order to start when that run ended gets none any more, for nobody
                // knows its port: it is missed in time, and the next generation starts with it.
                lead.start.run_at = Some(ctx.now);
                return;
            }
            // Rank 0 has ended here: a start would name another port for the same attempt.
            if mine.is_some_and(|s| s.stopped || s.finished || s.exit.is_some()) {
                return;
            }
            if local.master_port == 0 {
                lead.start.run_at.get_or_insert(ctx.now);
                return;
            }
            // The launcher names another one once this one is used; a start that never got that
            // far leaves it free.
            let port = local.master_port;
            let silent = self.silent_members(ctx, record);
            let until = silent.iter().map(|(_, until)| *until);
            if let Some(until) = until.chain(self.held_until(ctx)).max() {
                self.tell_start_waits(ctx, record, &silent, until);
                return self.wake_at(until, "workers of the generation before");
            }
            let Some(lead) = &mut self.lead else { return };
            // Another boot, another attempt: the port of an order that an earlier run of this agent
            // gave is not known any more.
            let boots = ctx.cfg.boot.0.saturating_sub(self.durable.learned.0);
            // One whose disk refused the generation has learnt it anew since, and the launcher here has had its order.
            let boots = boots.max(u64::from(began));
            let attempt = u32::try_from(boots).unwrap_or(u32::MAX - 1) + 1;
            lead.start.attempt = attempt;
            lead.start.run_at = Some(ctx.now);
            let why = self.why(ctx, record);
            let restart_count = u32::try_from(record.number - 1).unwrap_or(u32::MAX);
            for m in &record.members {
                let action = Action::Run {
                    attempt,
                    master_port: port,
                    restart_count,
                    why: why.clone(),
                };
                self.order(ctx, m.node, action);
            }
        }
        self.watch_start(ctx, record);
    }

    /// Strikes members that do not start in time, and tells when all have.
    pub(super) fn watch_start(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let Some(lead) = &mut self.lead else { return };
        let attempt = lead.start.attempt;
        let late = |at: Time| ctx.now >= at + ctx.cfg.start_timeout;
        let started = |n: NodeId| {
            let status = lead.status(n);
            status.is_some_and(|s| s.started >= Some(attempt))
        };
        let failed = |n: NodeId| lead.status(n).is_some_and(|s| s.start_failed.is_some());
        let overdue = lead.start.run_at.is_some_and(late);
        // The others look for rank 0's launcher: one that has said nothing yet may be why they fail.
        let zero = record.leader();
        let early = zero.is_some_and(|n| !started(n) && !failed(n)) && !overdue;
        let (mut struck, mut waiting) = (Vec::new(), false);
        for m in &record.members {
            let started = started(m.node);
            if (failed(m.node) && !early) || (!started && overdue) {
                struck.push(m.node);
            }
            waiting |= !started;
        }
        struck.retain(|n| !lead.start.struck.contains(n));
        lead.start.struck.extend(struck.iter().copied());
        let open = |at: &Time| waiting && ctx.now < *at + ctx.cfg.start_timeout;
        if let Some(at) = lead.start.run_at.filter(open) {
            self.wake_at(at + ctx.cfg.start_timeout, "members that do not start");
        }
        for node in struck {
            self.strike(ctx, node);
        }
        let Some(lead) = &mut self.lead else { return };
        if !waiting && !lead.start.changed_told && attempt > 0 {
            lead.start.changed_told = true;
            self.tell_times(ctx);
        }
    }

    /// Members that stay, and have not said yet that they know of this generation, each with the time until which a
    /// start waits for it: it may run the one before for as long as its agent is stopped or away, and until it has been
    /// told.
    pub(super) fn silent_members(&mut self, ctx: &Ctx<'_>, record: &Record) -> Vec<(NodeId, Time)> {
        let times = self.timeouts(ctx);
        let before = self.before.as_ref().filter(|b| b.digest == record.parent);
        let lead = self.lead.as_mut().filter(|_| record.number > 1);
        let Some(lead) = lead.filter(|_| !ctx.cfg.flaws.skip_r16) else {
            return Vec::new();
        };
        let ran = |m: &&Member| {
            let was = before.map(|b| b.record.member(m.node).map(|was| was.launcher));
            was.is_none_or(|was| was == Some(m.launcher))
        };
        let mut out = Vec::new();
        for m in record.members.iter().filter(ran) {
            let node = m.node;
            if node == ctx.me() || lead.status(node).is_some() || ctx.peers.lost(node).is_some() {
                continue;
            }
            let away = ctx.peers.away_since(node);
            let unwell = ctx.peers.unwell(node).map(|_| ctx.now);
            let until = match away.or(unwell) {
                Some(since) => {
                    lead.start.unwell.insert(node, None);
                    since + times.agent_grace
                }
                None => {
                    let well = lead.start.unwell.get_mut(&node);
                    let since = well.map(|at| *at.get_or_insert(ctx.now));
                    since.unwrap_or(lead.began) + times.suspect_after
                }
            };
            if ctx.now < until {
                out.push((node, until));
            }
        }
        out
    }

    /// People hear why nothing runs, where that takes longer than a lease.
    pub(super) fn tell_start_waits(
        &mut self,
        ctx: &Ctx<'_>,
        record: &Record,
        silent: &[(NodeId, Time)],
        until: Time,
    ) {
        let Some(lead) = self.lead.as_mut().filter(|l| !l.start.wait_told) else {
            return;
        };
        let due = lead.began + ctx.cfg.suspect_after;
        if ctx.now < due {
            return self.wake_at(due, "a start that waits");
        }
        lead.start.wait_told = true;
        let (told, _) = self.words.left(ctx.now);
        let known = self.waited_for(ctx).map(|(node, _)| node).chain(told);
        let nodes: BTreeSet<NodeId> = known.chain(silent.iter().map(|(n, _)| *n)).collect();
        let nodes = Vec::from_iter(nodes);
        let whose = match nodes.is_empty() {
            true => "workers of the generation before may still run on a node that is".to_owned(),
            false => format!(
                "workers of the generation before may still run on {}, whose agent is",
                ctx.names(&nodes)
            ),
        };
        let text = format!(
            "the start waits: {whose} stopped, away or cut off. It begins when they have ended, in about {} s",
            until.since(ctx.now).as_millis().div_ceil(1000)
        );
        self.tell_all(ctx, record, text);
    }

    /// Until when the members that have not tried to start are waited for, because one has failed so
    /// often that their answers tell whether its program runs at all.
    pub(super) fn tries_due(&self, ctx: &Ctx<'_>, record: &Record, run_at: Time) -> Option<Time> {
        let members = || record.members.iter().map(|m| m.node);
        let hopeless = |n| self.failed_starts.get(&n).is_some_and(|f| f.hopeless());
        let tried = |n| {
            let status = self.status_of(n);
            status.is_some_and(|s| s.start_failed.is_some() || s.started.is_some() || s.gone)
        };
        let due = run_at + ctx.cfg.suspect_after;
        (ctx.now < due && members().any(hopeless) && !members().all(tried)).then_some(due)
    }

    /// The code that the job ends with when its program runs nowhere: each member, and whoever asks
    /// to be let in, has failed to start it for one reason, and one of them several times in a row.
    pub(super) fn hopeless(&self, record: &Record) -> Option<i32> {
        let members = record.members.iter().map(|m| m.node);
        let nodes = members.chain(self.gathering.tickets.keys().copied());
        let mut starts = nodes.map(|n| self.failed_starts.get(&n));
        let first = starts.next()??;
        let code = crate::local::cannot_run_code(first.reason())?;
        let mut hopeless = first.hopeless();
        for other in starts {
            hopeless |= other?.hopeless();
            if other?.reason() != first.reason() {
                return None;
            }
        }
        hopeless.then_some(code)
    }

    pub(super) fn strike(&mut self, ctx: &Ctx<'_>, node: NodeId) {
        self.strikes.entry(node).or_default().strike(ctx.now);
    }
}
