//! Heartbeats, the failure detector, and the leases that ride on them.

use std::collections::{BTreeMap, BTreeSet};

use super::{Agent, Effect, Guards, MAX_SENT, Notice, URGENT, Watches};
use crate::ids::{Digest, JobKey, LauncherId, NodeId};
use crate::job::Job;
use crate::membership::{self, Guard, State};
use crate::time::Time;
use crate::wire::{MAX_JOBS, Message};

impl Agent {
    /// The leases of those that this voter acknowledges.
    pub(super) fn grant(&mut self, from: NodeId, leases: &[Digest], now: Time) -> Vec<Digest> {
        let mut granted = Vec::new();
        // How long the lease will last is in its hello.
        if self.peers.get(from).is_none_or(|p| p.greeted.is_none()) {
            return granted;
        }
        for job in self.jobs.values_mut() {
            let asked = job.lease_asked_of().filter(|d| leases.contains(d));
            granted.extend(asked.filter(|_| job.ask_lease(&self.cfg, from, now)));
        }
        granted
    }

    /// A voter acknowledged these leases, of those that were asked for at `sent`.
    pub(super) fn granted(&mut self, from: NodeId, leases: &[Digest], sent: Time, now: Time) {
        let (mut waiting, mut refused) = (Vec::new(), Vec::new());
        for (key, job) in &mut self.jobs {
            // A heartbeat of before the generation did not ask for its lease.
            let asked = job.lease_wanted_of(from);
            let Some(digest) = asked.filter(|_| job.voting_since() <= sent) else {
                continue;
            };
            let granted = leases.contains(&digest);
            job.lease_answered(from, granted, sent);
            // Nothing else waits for a lease: when it ends shows once it would have ended.
            waiting.extend((granted && job.awaits_lease()).then(|| key.clone()));
            refused.extend((!granted).then(|| key.clone()));
        }
        for key in refused {
            self.with_job(&key, now, |job, ctx| job.lease_refused(ctx, from));
        }
        for key in waiting {
            self.with_job(&key, now, Job::drive);
        }
    }

    fn ping(&mut self, node: NodeId, seq: u64, now: Time) {
        let leases = self
            .jobs
            .values()
            .filter_map(|j| j.lease_wanted_of(node))
            .take(MAX_JOBS)
            .collect();
        let sent = self.sent.entry(node).or_default();
        sent.push_back((seq, now));
        if sent.len() > MAX_SENT {
            sent.pop_front();
        }
        self.send(node, Message::Ping { seq, leases });
    }

    /// A start that waits for its lease does not wait for the next regular heartbeat, nor does a place for the word of the
    /// agent that is to get it, nor a launcher for that of one that does not answer it.
    pub(super) fn ping_urgent(&mut self, now: Time) {
        if now < self.urgent_at {
            return;
        }
        let me = self.cfg.node;
        let urgent = || self.jobs.values().filter(|j| j.lease_urgent());
        let voters = urgent().filter_map(Job::voting);
        let voters = voters.flat_map(|r| r.voters().map(|v| v.node));
        let asked = self.jobs.values().flat_map(|j| j.asks_for_word(now));
        let nodes: BTreeSet<NodeId> = voters.chain(asked).filter(|n| *n != me).collect();
        if urgent().next().is_some() || !nodes.is_empty() {
            self.urgent_at = now + URGENT;
        }
        for node in nodes {
            self.seq += 1;
            // Numbers apart from the failure detector's own.
            let seq = self.seq | 1 << 63;
            self.ping(node, seq, now);
        }
    }

    /// An agent is there that was asked for a word.
    pub(super) fn is_there(&mut self, node: NodeId, now: Time) {
        let jobs = self.jobs.iter();
        let waiting = jobs.filter(|(_, job)| job.asks_for_word(now).any(|n| n == node));
        for key in waiting.map(|(key, _)| key.clone()).collect::<Vec<_>>() {
            self.with_job(&key, now, Job::nudge);
        }
    }

    pub(super) fn detect(&mut self, event: membership::Event, now: Time) {
        // Too many watched peers is the only refusal, and only a watch meets it.
        if self.detector.handle(event, now).is_ok() {
            self.pump_detector(now);
        }
    }

    /// The agent of a launcher is that of this node.
    pub(super) fn is_at(&mut self, launcher: LauncherId, to: NodeId, now: Time) {
        self.detect(membership::Event::Moved { launcher, to }, now);
    }

    pub(super) fn pump_detector(&mut self, now: Time) {
        while let Some(effect) = self.detector.poll_effect() {
            match effect {
                membership::Effect::Ping { node, seq } => self.ping(node, seq, now),
                membership::Effect::Probe { node, id, guard } => {
                    self.effects.push_back(Effect::Probe { node, id, guard });
                }
                membership::Effect::Verdict { node, guard, state } => {
                    self.show(node);
                    let mut concerned = Vec::new();
                    for (key, watches) in &mut self.watching {
                        let watched = watches.guards.get(&node);
                        if watched.is_some_and(|(g, _)| *g == guard) {
                            watches.believe(node, state);
                            concerned.push(key.clone());
                        }
                    }
                    for key in concerned {
                        self.with_job(&key, now, Job::nudge);
                    }
                }
            }
        }
    }

    /// The best that is believed of a node: with any launcher of it that answers, it is there.
    fn best_of(&self, node: NodeId) -> Option<State> {
        let wellness = |state: &State| match state {
            State::Alive => 4,
            State::Suspect { .. } => 3,
            State::Away { .. } => 2,
            State::Lost { confirmed: false } => 1,
            State::Lost { confirmed: true } => 0,
        };
        let states = self.detector.peers_of(node).map(|p| p.state);
        states.max_by_key(wellness)
    }

    /// Has people see what is believed of a node now.
    fn show(&mut self, node: NodeId) {
        let Some(state) = self.best_of(node) else {
            return;
        };
        let peer = self.peers.map.entry(node).or_default();
        let before = peer.state.replace(state);
        // What else is known of a suspect is nothing that people need.
        let suspect = |s: State| matches!(s, State::Suspect { .. });
        if before != Some(state) && !(before.is_some_and(suspect) && suspect(state)) {
            let notice = Notice::Peer { node, state };
            self.effects.push_back(Effect::Notice(notice));
        }
    }

    /// Has the failure detector watch what the jobs want watched now.
    pub(super) fn rewatch(&mut self, now: Time) {
        let mut wanted = BTreeMap::new();
        for key in self.jobs.keys().cloned().collect::<Vec<_>>() {
            self.with_job(&key, now, |job, ctx| {
                wanted.insert(key.clone(), job.watches(ctx));
            });
        }
        wanted.retain(|_, guards| !guards.is_empty());
        let watched = self.watching.iter().map(|(key, w)| (key, &w.guards));
        let others = !wanted.iter().eq(watched);
        if others {
            self.watch(&wanted, now);
        }
        // Its agent may have had another identity before.
        let here = self.jobs.values().filter(|j| j.conn().is_some());
        let here = here.filter_map(Job::launcher);
        for launcher in here.collect::<Vec<_>>() {
            self.is_at(launcher, self.cfg.node, now);
        }
        if others {
            self.go_on_watching(wanted);
        }
    }

    /// The failure detector watches what these jobs want, and nothing else.
    fn watch(&mut self, wanted: &BTreeMap<JobKey, Guards>, now: Time) {
        let before = all_of(self.watching.values().map(|w| &w.guards));
        let all = all_of(wanted.values());
        for key in before.keys().filter(|key| !all.contains_key(*key)) {
            let (node, guard) = *key;
            self.detect(membership::Event::Unwatch { node, guard }, now);
            let state = self.best_of(node);
            if let Some(peer) = self.peers.map.get_mut(&node) {
                peer.state = state;
            }
        }
        for (key, asks) in all {
            if before.get(&key) == Some(&asks) {
                continue;
            }
            let (node, guard) = key;
            self.detect(membership::Event::Watch { node, guard, asks }, now);
            if !before.contains_key(&key) {
                let connected = self.peers.connected(node);
                self.peers.map.entry(node).or_default();
                if connected {
                    self.detect(membership::Event::Connected { node }, now);
                }
            }
        }
    }

    fn go_on_watching(&mut self, wanted: BTreeMap<JobKey, Guards>) {
        let before = std::mem::take(&mut self.watching);
        let watching = wanted.into_iter().map(|(key, guards)| {
            let mut watches = Watches {
                guards,
                ..Watches::default()
            };
            for (node, (guard, _)) in watches.guards.clone() {
                if let Some(before) = before.get(&key) {
                    watches.go_on(node, before);
                }
                let state = self.detector.peer(node, guard).map(|p| p.state);
                watches.believe(node, state.unwrap_or(State::Alive));
            }
            (key, watches)
        });
        self.watching = watching.collect();
    }
}

/// The guards that all jobs want watched, and whether any job asks them for a lease.
fn all_of<'a>(jobs: impl Iterator<Item = &'a Guards>) -> BTreeMap<(NodeId, Guard), bool> {
    let mut all = BTreeMap::new();
    for (node, (guard, asks)) in jobs.flatten() {
        *all.entry((*node, *guard)).or_default() |= asks;
    }
    all
}

impl Watches {
    /// Findings about the same launcher from before still hold.
    fn go_on(&mut self, node: NodeId, before: &Watches) {
        let guard = |w: &Watches| w.guards.get(&node).map(|(guard, _)| *guard);
        if guard(before) == guard(self) {
            let (state, away) = (before.unwell.get(&node), before.away.get(&node));
            self.unwell.extend(state.map(|s| (node, *s)));
            self.away.extend(away.map(|since| (node, *since)));
        }
    }

    fn believe(&mut self, node: NodeId, state: State) {
        match (state, self.unwell.get(&node)) {
            (State::Alive, _) => {
                self.unwell.remove(&node);
            }
            // The detector counts anew after this process was stopped; the others do not.
            (State::Away { .. }, Some(State::Away { .. })) => return,
            _ => {
                self.unwell.insert(node, state);
            }
        }
        match state {
            State::Away { since } => {
                self.away.insert(node, since);
            }
            State::Alive | State::Lost { confirmed: true } => {
                self.away.remove(&node);
            }
            State::Suspect { .. } | State::Lost { confirmed: false } => {}
        }
    }
}
