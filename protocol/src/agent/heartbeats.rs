//! Heartbeats, the failure detector, and the leases that ride on them.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use super::{Agent, Effect, MAX_SENT, Notice, URGENT, Watches};
use crate::ids::{Digest, JobKey, NodeId};
use crate::job::Job;
use crate::membership;
use crate::peers::Peer;
use crate::time::Time;
use crate::wire::{MAX_JOBS, Message};

impl Agent {
    pub(super) fn grant(&mut self, from: NodeId, leases: &[Digest], now: Time) -> Vec<Digest> {
        let mut granted = Vec::new();
        // How long the lease will last is in its hello.
        if self.peers.get(from).is_none_or(|p| !p.greeted) {
            return granted;
        }
        for digest in leases {
            for key in self.keys_of(*digest) {
                self.with_job(&key, now, |job, ctx| {
                    if job.ask_lease(ctx, from, *digest) {
                        granted.push(*digest);
                    }
                });
            }
        }
        granted
    }

    pub(super) fn keys_of(&self, digest: Digest) -> Vec<JobKey> {
        self.jobs
            .iter()
            .filter(|(_, j)| j.head().is_some_and(|(_, d)| d == digest))
            .map(|(k, _)| k.clone())
            .collect()
    }

    fn ping(&mut self, node: NodeId, seq: u64, now: Time) {
        let leases = self
            .jobs
            .values()
            .filter(|j| {
                j.head()
                    .is_some_and(|(r, _)| r.voters().any(|v| v.node == node))
            })
            .filter_map(Job::lease_wanted)
            .take(MAX_JOBS)
            .collect();
        let sent = self.sent.entry(node).or_default();
        sent.push_back((seq, now));
        if sent.len() > MAX_SENT {
            sent.pop_front();
        }
        self.send(node, Message::Ping { seq, leases });
    }

    /// A start that waits for its lease does not wait for the next regular heartbeat.
    pub(super) fn ping_urgent(&mut self, now: Time) {
        if now < self.urgent_at {
            return;
        }
        let me = self.cfg.node;
        let nodes: BTreeSet<NodeId> = self
            .jobs
            .values()
            .filter(|j| j.lease_urgent())
            .filter_map(|j| j.head().map(|(r, _)| r))
            .flat_map(|r| r.voters().map(|v| v.node).collect::<Vec<_>>())
            .filter(|n| *n != me)
            .collect();
        self.urgent_at = now + URGENT;
        for node in nodes {
            self.seq += 1;
            // Numbers apart from the failure detector's own.
            let seq = self.seq | 1 << 63;
            self.ping(node, seq, now);
        }
    }

    pub(super) fn detect(&mut self, event: membership::Event, now: Time) {
        // Too many watched peers is the only refusal, and only a watch meets it.
        if self.detector.handle(event, now).is_ok() {
            self.pump_detector(now);
        }
    }

    pub(super) fn pump_detector(&mut self, now: Time) {
        while let Some(effect) = self.detector.poll_effect() {
            match effect {
                membership::Effect::Ping { node, seq } => self.ping(node, seq, now),
                membership::Effect::Probe { node, id, .. } => {
                    let guard = self.watching.get(&node).copied().flatten();
                    self.effects.push_back(Effect::Probe { node, id, guard });
                }
                membership::Effect::Verdict { node, state } => {
                    self.peers.map.entry(node).or_default().judged(state);
                    self.effects
                        .push_back(Effect::Notice(Notice::Peer { node, state }));
                    self.drive_all(now);
                }
            }
        }
    }

    pub(super) fn rewatch(&mut self, now: Time) {
        let mut wanted = Watches::new();
        for key in self.jobs.keys().cloned().collect::<Vec<_>>() {
            self.with_job(&key, now, |job, ctx| wanted.extend(job.watches(ctx)));
        }
        let gone: Vec<NodeId> = self
            .watching
            .keys()
            .filter(|n| !wanted.contains_key(n))
            .copied()
            .collect();
        for node in gone {
            self.detect(membership::Event::Unwatch { node }, now);
            if let Some(peer) = self.peers.map.get_mut(&node) {
                peer.state = None;
            }
        }
        let before = std::mem::replace(&mut self.watching, wanted.clone());
        for (node, guard) in wanted {
            if before.get(&node) == Some(&guard) {
                continue;
            }
            // A witness has no guard: an address that nobody answers at stands for it.
            let none = SocketAddr::from(([0, 0, 0, 0], 0));
            let guard = guard.map_or(none, |(addr, _)| addr);
            let connected = self.peers.connected(node);
            let peer: &mut Peer = self.peers.map.entry(node).or_default();
            peer.state = None;
            peer.away_since = None;
            self.detect(membership::Event::Watch { node, guard }, now);
            if connected {
                self.detect(membership::Event::Connected { node }, now);
            }
        }
    }
}
