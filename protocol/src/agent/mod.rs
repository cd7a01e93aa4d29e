//! The core of an agent: peers, the failure detector, and one [`Job`] for each job that concerns
//! this node. The daemon and the simulation drive this type and nothing else.

mod api;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

pub use api::{Config, ConnId, Effect, Event, Flaws, Notice, Phases};

use crate::ids::{Digest, JobKey, LauncherId, NodeId};
use crate::job::{Ctx, Durable, Job};
use crate::local::{Command, Register, ToAgent, ToLauncher};
use crate::membership::{self, Membership};
use crate::peers::{Peer, Peers};
use crate::record::Place;
use crate::rng::Rng;
use crate::time::{Span, Time};
use crate::wire::{Advert, Hello, JobMessage, Leave, MAX_JOBS, Message};

/// Between heartbeats that a start waits for.
const URGENT: Span = Span::from_millis(20);
/// Jobs whose end is remembered.
const MAX_ENDED: usize = MAX_JOBS / 2;
/// Heartbeats under way that are remembered, per peer.
const MAX_SENT: usize = 32;

/// Why an event was refused. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{MAX_JOBS} jobs are known on this agent, the limit; end some first")]
    TooManyJobs,
    #[error("a frame from a connection that has not registered a launcher")]
    NotRegistered,
    #[error("{0}")]
    Refused(String),
    #[error("stored state of job {0} cannot be read: {1}")]
    Stored(String, crate::codec::CodecError),
}

type Watches = BTreeMap<NodeId, Option<(SocketAddr, LauncherId)>>;

/// The core of one agent.
#[derive(Debug)]
pub struct Agent {
    cfg: Config,
    rng: Rng,
    peers: Peers,
    detector: Membership,
    jobs: BTreeMap<JobKey, Job>,
    conns: BTreeMap<ConnId, JobKey>,
    effects: VecDeque<Effect>,
    watching: Watches,
    /// The heads for which `watching` and the last greeting hold.
    heads: BTreeMap<JobKey, Digest>,
    sent: BTreeMap<NodeId, VecDeque<(u64, Time)>>,
    seq: u64,
    urgent_at: Time,
    draining: Option<(Leave, Time)>,
}

impl Agent {
    /// `restored` is what [`Effect::Persist`] last made durable, for each job.
    pub fn new(cfg: Config, restored: Vec<(JobKey, Vec<u8>)>, now: Time) -> Result<Agent, Error> {
        let mut jobs = BTreeMap::new();
        for (key, bytes) in restored {
            let durable = Durable::decode(&bytes).map_err(|e| Error::Stored(key.to_string(), e))?;
            jobs.insert(key, Job::restore(durable));
        }
        let detector = Membership::new(membership::Config {
            suspect_after: cfg.suspect_after,
            agent_grace: cfg.agent_grace,
            ping_every: Span(cfg.suspect_after.0 / 8),
            ..membership::Config::default()
        });
        let mut agent = Agent {
            rng: Rng::new(cfg.seed),
            peers: Peers {
                me: Some((cfg.node, cfg.host.clone())),
                ..Peers::default()
            },
            cfg,
            detector,
            jobs,
            conns: BTreeMap::new(),
            effects: VecDeque::new(),
            watching: Watches::new(),
            heads: BTreeMap::new(),
            // Ping numbers of different boots must not be taken for each other.
            seq: 0,
            sent: BTreeMap::new(),
            urgent_at: Time::ZERO,
            draining: None,
        };
        agent.seq = agent.rng.next_u64() >> 16;
        agent.settle(now);
        Ok(agent)
    }

    // ---- what can be seen ----

    pub fn config(&self) -> &Config {
        &self.cfg
    }

    pub fn job(&self, key: &JobKey) -> Option<&Job> {
        self.jobs.get(key)
    }

    pub fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.values()
    }

    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// The smoothed round trip to a watched peer.
    pub fn rtt(&self, node: NodeId) -> Option<Span> {
        self.detector.peer(&node).and_then(|p| p.rtt)
    }

    pub fn is_draining(&self) -> bool {
        self.draining.is_some()
    }

    /// Whether any launcher is connected.
    pub fn has_launchers(&self) -> bool {
        !self.conns.is_empty()
    }

    // ---- the verbs of every core ----

    pub fn poll_effect(&mut self) -> Option<Effect> {
        if let Some(effect) = self.effects.pop_front() {
            return Some(effect);
        }
        self.jobs.values_mut().find_map(Job::poll_effect)
    }

    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        let urgent = self
            .jobs
            .values()
            .any(Job::lease_urgent)
            .then_some((self.urgent_at, "ask for a lease"));
        self.jobs
            .values()
            .filter_map(Job::poll_timeout)
            .chain(self.detector.poll_timeout())
            .chain(urgent)
            .min_by_key(|(at, _)| *at)
    }

    pub fn handle_timeout(&mut self, now: Time) {
        self.detector.handle_timeout(now);
        self.pump_detector(now);
        let due: Vec<JobKey> = self
            .jobs
            .iter()
            .filter(|(_, j)| j.poll_timeout().is_some_and(|(at, _)| at <= now))
            .map(|(k, _)| k.clone())
            .collect();
        for key in due {
            self.with_job(&key, now, Job::drive);
        }
        self.settle(now);
    }

    pub fn handle(&mut self, event: Event, now: Time) -> Result<(), Error> {
        let result = self.apply(event, now);
        self.settle(now);
        result
    }

    fn apply(&mut self, event: Event, now: Time) -> Result<(), Error> {
        match event {
            Event::Connected {
                node,
                addr,
                observed,
            } => {
                let peer = self.peers.map.entry(node).or_default();
                peer.connected = true;
                peer.addr = Some(addr);
                peer.observed = Some(observed);
                peer.seen = now;
                peer.leaving = None;
                self.detect(membership::Event::Connected { node }, now);
                let hello = self.hello();
                self.send(node, hello);
                if let Some((leave, until)) = self.draining.clone() {
                    let message = leaving(&leave, until, now);
                    self.send(node, message);
                }
                self.drive_all(now);
            }
            Event::Disconnected { node } => {
                if let Some(peer) = self.peers.map.get_mut(&node) {
                    peer.connected = false;
                    peer.seen = now;
                }
                self.sent.remove(&node);
                self.peers.prune();
                self.detect(membership::Event::Disconnected { node }, now);
                self.drive_all(now);
            }
            Event::Message { from, message } => {
                if let Some(peer) = self.peers.map.get_mut(&from) {
                    peer.seen = now;
                }
                self.detect(membership::Event::Heard { node: from }, now);
                self.on_message(from, message, now)?;
            }
            Event::Probed {
                node,
                id,
                agent,
                guard,
            } => {
                let event = membership::Event::Probed {
                    node,
                    id,
                    agent,
                    guard,
                };
                self.detect(event, now);
            }
            Event::Launcher {
                conn,
                owner,
                store,
                frame,
            } => self.on_frame(conn, owner, store, frame, now)?,
            Event::LauncherGone { conn, alive } => {
                let key = self.conns.get(&conn).cloned();
                if !alive {
                    self.conns.remove(&conn);
                }
                if let Some(key) = key {
                    self.with_job(&key, now, |job, ctx| {
                        job.launcher_gone(ctx, conn, alive);
                        job.drive(ctx);
                    });
                }
            }
            Event::Store { key, event } => {
                self.with_job(&key, now, |job, ctx| job.on_store_event(ctx, event));
            }
            Event::Beacon { key, value } => self.with_job(&key, now, |job, ctx| {
                job.on_beacon(ctx, value);
                job.drive(ctx);
            }),
            Event::PersistFailed { key } => self.with_job(&key, now, Job::persist_failed),
            Event::Drain { grace_ms, reason } => self.drain(Leave { grace_ms, reason }, now),
            Event::Commit {
                key,
                step,
                manifest,
            } => self.with_job(&key, now, |job, ctx| {
                job.commit(ctx, step, manifest);
                job.drive(ctx);
            }),
        }
        Ok(())
    }

    fn on_message(&mut self, from: NodeId, message: Message, now: Time) -> Result<(), Error> {
        match message {
            Message::Hello(hello) => {
                let adverts = hello.jobs.clone();
                self.peers.map.entry(from).or_default().hello = Some(hello);
                for advert in adverts {
                    self.on_advert(from, &advert, now);
                }
                self.drive_all(now);
            }
            Message::Ping { seq, leases } => {
                let granted = self.grant(from, &leases, now);
                self.send(from, Message::Pong { seq, granted });
            }
            Message::Pong { seq, granted } => {
                self.detect(membership::Event::Pong { node: from, seq }, now);
                let sent = self.sent.get(&from).and_then(|s| {
                    let found = s.iter().find(|(n, _)| *n == seq);
                    found.map(|(_, at)| *at)
                });
                if let Some(sent) = sent {
                    for digest in granted {
                        for key in self.keys_of(digest) {
                            self.with_job(&key, now, |job, ctx| {
                                job.lease_granted(from, digest, sent);
                                job.drive(ctx);
                            });
                        }
                    }
                }
            }
            Message::Leaving { grace_ms, reason } => {
                let until = now + Span::from_millis(grace_ms.into());
                if let Some(peer) = self.peers.map.get_mut(&from) {
                    peer.leaving = Some((Leave { grace_ms, reason }, until));
                }
                let deadline = until;
                self.detect(
                    membership::Event::Leaving {
                        node: from,
                        deadline,
                    },
                    now,
                );
                self.drive_all(now);
            }
            Message::DrainAsk { grace_ms, reason } => {
                self.drain(Leave { grace_ms, reason }, now);
            }
            Message::Job { key, body } => self.on_job_message(from, key, *body, now)?,
        }
        Ok(())
    }

    fn on_job_message(
        &mut self,
        from: NodeId,
        key: JobKey,
        body: JobMessage,
        now: Time,
    ) -> Result<(), Error> {
        if key.cluster != self.cfg.cluster {
            return Err(Error::Refused(format!(
                "a message of cluster {} in cluster {}",
                key.cluster, self.cfg.cluster
            )));
        }
        if !self.jobs.contains_key(&key) {
            if self.jobs.len() >= MAX_JOBS {
                return Err(Error::TooManyJobs);
            }
            self.jobs.insert(key.clone(), Job::new(key.clone()));
        }
        self.with_job(&key, now, |job, ctx| {
            job.on_message(ctx, from, body);
            job.drive(ctx);
        });
        Ok(())
    }

    fn on_advert(&mut self, from: NodeId, advert: &Advert, now: Time) {
        if self.jobs.contains_key(&advert.key) {
            self.with_job(&advert.key.clone(), now, |job, ctx| {
                job.on_advert(ctx, from, advert);
            });
        }
    }

    fn on_frame(
        &mut self,
        conn: ConnId,
        owner: String,
        store: Option<crate::ids::StoreUuid>,
        frame: ToAgent,
        now: Time,
    ) -> Result<(), Error> {
        match frame {
            ToAgent::Register(reg) => self.register(conn, owner, store, reg, now),
            ToAgent::Command(command) => self.command(&owner, command, now),
            frame => {
                let key = self.conns.get(&conn).ok_or(Error::NotRegistered)?.clone();
                self.with_job(&key, now, |job, ctx| {
                    job.on_launcher_frame(ctx, frame);
                    job.drive(ctx);
                });
                Ok(())
            }
        }
    }

    fn register(
        &mut self,
        conn: ConnId,
        owner: String,
        store: Option<crate::ids::StoreUuid>,
        mut reg: Register,
        now: Time,
    ) -> Result<(), Error> {
        if reg.place == Place::default() {
            reg.place = self.cfg.place;
        }
        let key = JobKey {
            cluster: self.cfg.cluster.clone(),
            owner,
            id: reg.job.clone(),
        };
        let refuse = |agent: &mut Agent, reason: String| {
            let frame = ToLauncher::Refused {
                reason: reason.clone(),
            };
            agent.effects.push_back(Effect::ToLauncher { conn, frame });
            Err(Error::Refused(reason))
        };
        if !key.is_valid() {
            let reason = "--rdzv-id must have 1 to 64 characters, none of them a control character";
            return refuse(self, reason.into());
        }
        if let Err(error) = reg.spec.check() {
            return refuse(self, error.to_string());
        }
        if reg.slots == 0 || reg.addrs.is_empty() {
            return refuse(self, "a launcher needs a worker and an address".into());
        }
        if self.draining.is_some() && reg.running.is_none() {
            return refuse(
                self,
                "this node is being drained: start the job elsewhere".into(),
            );
        }
        if !self.jobs.contains_key(&key) {
            if self.jobs.len() >= MAX_JOBS {
                return refuse(self, Error::TooManyJobs.to_string());
            }
            self.jobs.insert(key.clone(), Job::new(key.clone()));
        }
        let mut result = Ok(());
        self.with_job(&key, now, |job, ctx| {
            result = job.register(ctx, conn, reg, store);
        });
        if let Err(reason) = result {
            return refuse(self, reason);
        }
        self.conns.insert(conn, key.clone());
        let frame = ToLauncher::Welcome {
            node: self.cfg.node,
            agent_pid: self.cfg.pid,
            agent_grace_ms: u32::try_from(self.cfg.agent_grace.as_millis()).unwrap_or(u32::MAX),
        };
        self.effects.push_back(Effect::ToLauncher { conn, frame });
        self.with_job(&key, now, Job::drive);
        Ok(())
    }

    fn command(&mut self, owner: &str, command: Command, now: Time) -> Result<(), Error> {
        match command {
            Command::Drain { node, grace_ms } => {
                let reason = "an operator drains it".to_owned();
                let mine = node.is_empty() || self.is_named(&node);
                if mine && !self.names_a_peer(&node) {
                    self.drain(Leave { grace_ms, reason }, now);
                    return Ok(());
                }
                let found: Vec<NodeId> = self
                    .peers
                    .map
                    .iter()
                    .filter(|(id, p)| p.connected && is_called(id, p, &node))
                    .map(|(id, _)| *id)
                    .collect();
                match found.as_slice() {
                    [one] if !mine => {
                        self.send(*one, Message::DrainAsk { grace_ms, reason });
                        Ok(())
                    }
                    [] => Err(Error::Refused(format!(
                        "no connected node is called {node}: `muster nodes` lists them"
                    ))),
                    _ => Err(Error::Refused(format!(
                        "{} nodes are called {node}: use more of the id",
                        found.len() + usize::from(mine)
                    ))),
                }
            }
            Command::Cancel { job } => {
                let key = self
                    .jobs
                    .keys()
                    .find(|k| k.id == job && (k.owner == owner || owner == "0"))
                    .cloned();
                let Some(key) = key else {
                    return Err(Error::Refused(format!(
                        "no job {job} of yours is known here: `muster jobs` lists them"
                    )));
                };
                if self.jobs.get(&key).is_none_or(|j| j.launcher().is_none()) {
                    return Err(Error::Refused(format!(
                        "job {job} has no launcher on this node: cancel it on a node where it runs"
                    )));
                }
                self.with_job(&key, now, |job, ctx| {
                    job.cancel(ctx);
                    job.drive(ctx);
                });
                Ok(())
            }
        }
    }

    fn names_a_peer(&self, name: &str) -> bool {
        let mut peers = self.peers.map.iter();
        !name.is_empty() && peers.any(|(id, p)| p.connected && is_called(id, p, name))
    }

    fn is_named(&self, name: &str) -> bool {
        self.cfg.node.hex().starts_with(name) || self.cfg.host == name
    }

    /// This node goes: everybody is told, and its part of every job ends in good order.
    fn drain(&mut self, leave: Leave, now: Time) {
        let until = now + Span::from_millis(leave.grace_ms.into());
        self.draining = Some((leave.clone(), until));
        let message = leaving(&leave, until, now);
        for node in self.peers.connected_nodes().collect::<Vec<_>>() {
            self.send(node, message.clone());
        }
        for key in self.jobs.keys().cloned().collect::<Vec<_>>() {
            let leave = leave.clone();
            self.with_job(&key, now, |job, ctx| {
                job.leave(ctx, leave);
                job.drive(ctx);
            });
        }
    }

    // ---- leases and heartbeats ----

    fn grant(&mut self, from: NodeId, leases: &[Digest], now: Time) -> Vec<Digest> {
        let mut granted = Vec::new();
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

    fn keys_of(&self, digest: Digest) -> Vec<JobKey> {
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
    fn ping_urgent(&mut self, now: Time) {
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

    fn detect(&mut self, event: membership::Event, now: Time) {
        // Too many watched peers is the only refusal, and only a watch meets it.
        if self.detector.handle(event, now).is_ok() {
            self.pump_detector(now);
        }
    }

    fn pump_detector(&mut self, now: Time) {
        while let Some(effect) = self.detector.poll_effect() {
            match effect {
                membership::Effect::Ping { node, seq } => self.ping(node, seq, now),
                membership::Effect::Probe { node, id, .. } => {
                    let guard = self.watching.get(&node).copied().flatten();
                    self.effects.push_back(Effect::Probe { node, id, guard });
                }
                membership::Effect::Verdict { node, state } => {
                    self.peers.map.entry(node).or_default().state = Some(state);
                    self.effects
                        .push_back(Effect::Notice(Notice::Peer { node, state }));
                    self.drive_all(now);
                }
            }
        }
    }

    // ---- between the jobs and the rest ----

    fn with_job(&mut self, key: &JobKey, now: Time, act: impl FnOnce(&mut Job, &mut Ctx<'_>)) {
        if let Some(job) = self.jobs.get_mut(key) {
            let mut ctx = Ctx {
                cfg: &self.cfg,
                peers: &self.peers,
                rng: &mut self.rng,
                now,
            };
            act(job, &mut ctx);
        }
    }

    fn drive_all(&mut self, now: Time) {
        for key in self.jobs.keys().cloned().collect::<Vec<_>>() {
            self.with_job(&key, now, Job::drive);
        }
    }

    fn send(&mut self, to: NodeId, message: Message) {
        if self.peers.connected(to) {
            self.effects.push_back(Effect::Send { to, message });
        }
    }

    fn hello(&self) -> Message {
        Message::Hello(Hello {
            host: self.cfg.host.clone(),
            version: self.cfg.version.clone(),
            state: self.cfg.state,
            boot: self.cfg.boot,
            jobs: self
                .jobs
                .values()
                .filter_map(|j| j.advert(&self.cfg))
                .take(MAX_JOBS)
                .collect(),
        })
    }

    /// Follows up what changed: whom to watch, whom to greet anew, what to forget.
    fn settle(&mut self, now: Time) {
        let mut changed = false;
        let mut greet = false;
        let me = self.cfg.node;
        let mut forget = Vec::new();
        for (key, job) in &self.jobs {
            let digest = job.head().map_or(Digest::ZERO, |(_, d)| d);
            if self.heads.get(key) != Some(&digest) {
                changed = true;
                // Only the leader greets anew, so that a change costs each agent one message.
                greet |= job.head().is_some_and(|(r, _)| r.leader() == Some(me));
                self.heads.insert(key.clone(), digest);
            }
            if job.is_idle() && job.poll_timeout().is_none() {
                forget.push(key.clone());
            }
        }
        if changed {
            self.rewatch(now);
        }
        if greet {
            let hello = self.hello();
            for node in self.peers.connected_nodes().collect::<Vec<_>>() {
                self.send(node, hello.clone());
            }
        }
        for key in forget {
            self.forget(&key);
        }
        self.forget_oldest();
        self.ping_urgent(now);
    }

    /// A job that nobody here takes part in needs no memory, unless its end must be remembered.
    fn forget(&mut self, key: &JobKey) {
        let nothing = self.jobs.get(key).is_some_and(|j| j.head().is_none());
        if nothing
            && self
                .jobs
                .get_mut(key)
                .is_some_and(|j| j.poll_effect_is_empty())
        {
            self.jobs.remove(key);
            self.heads.remove(key);
        }
    }

    /// The ends of jobs are remembered for nodes that missed them; of many only the newest.
    fn forget_oldest(&mut self) {
        let ended = |j: &Job| j.is_idle() && j.poll_effect_is_empty();
        if self.jobs.values().filter(|j| ended(j)).count() <= MAX_ENDED {
            return;
        }
        let oldest = self.jobs.iter().filter(|(_, j)| ended(j));
        let oldest = oldest.min_by_key(|(_, j)| j.installed_at());
        if let Some(key) = oldest.map(|(k, _)| k.clone()) {
            self.jobs.remove(&key);
            self.heads.remove(&key);
            self.effects.push_back(Effect::Forget { key });
        }
    }

    fn rewatch(&mut self, now: Time) {
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
            self.detect(membership::Event::Watch { node, guard }, now);
            if connected {
                self.detect(membership::Event::Connected { node }, now);
            }
        }
    }
}

/// Whether a peer's id begins like this, or its host has this name.
fn is_called(id: &NodeId, peer: &Peer, name: &str) -> bool {
    let host = peer.hello.as_ref().map(|h| h.host.as_str());
    id.hex().starts_with(name) || host == Some(name)
}

fn leaving(leave: &Leave, until: Time, now: Time) -> Message {
    let left = until.since(now).as_millis();
    Message::Leaving {
        grace_ms: u32::try_from(left).unwrap_or(u32::MAX),
        reason: leave.reason.clone(),
    }
}
