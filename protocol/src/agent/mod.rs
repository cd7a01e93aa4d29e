//! The core of an agent: peers, the failure detector, and one [`Job`] for each job that concerns
//! this node. The daemon and the simulation drive this type and nothing else.

mod api;
mod heartbeats;
mod launchers;

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

pub use api::{Config, ConnId, Effect, Event, Flaws, Notice, Phases, Told};

use crate::ids::{Digest, JobKey, LauncherId, NodeId, StateId};
use crate::job::{Ctx, Durable, Job};
use crate::membership::{self, Membership};
use crate::peers::{Peer, Peers};
use crate::rng::Rng;
use crate::time::{Span, Time};
use crate::wire::{Advert, Hello, JobMessage, Leave, MAX_JOBS, Message};

/// Between heartbeats that a start waits for.
const URGENT: Span = Span::from_millis(20);
/// How long a peer's hello may take before it is asked for again.
const HELLO_WAIT: Span = Span::from_millis(250);
/// Between the hellos of an agent that leads a generation: each may be lost, and no other message
/// tells two groups of a job of each other.
const GREET_EVERY: Span = Span::from_secs(10);
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
    /// When to look again for connected peers that have not said hello.
    greet_at: Option<Time>,
    /// When all are greeted again, while a generation is led from here.
    greet_again: Option<Time>,
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
            greet_at: None,
            greet_again: None,
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
        let greet = self.greet_at.map(|at| (at, "a peer without a hello"));
        self.jobs
            .values()
            .filter_map(Job::poll_timeout)
            .chain(self.detector.poll_timeout())
            .chain(urgent)
            .chain(greet)
            .chain(self.greet_again.map(|at| (at, "greet again")))
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
        self.ask_hellos(now);
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
                peer.greeted = false;
                peer.hello_due = now + HELLO_WAIT;
                self.greet_at.get_or_insert(now + HELLO_WAIT);
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
                if !matches!(message, Message::Hello(_)) {
                    self.ask_hello(from, now);
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
            Event::Launcher { conn, owner, frame } => self.on_frame(conn, owner, frame, now)?,
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
                let _asked = job.commit(ctx, step, manifest);
                job.drive(ctx);
            }),
        }
        Ok(())
    }

    fn on_message(&mut self, from: NodeId, message: Message, now: Time) -> Result<(), Error> {
        match message {
            Message::Hello(hello) => {
                let adverts = hello.jobs.clone();
                let peer = self.peers.map.entry(from).or_default();
                peer.hello = Some(hello);
                peer.greeted = true;
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
            Message::HelloAsk => {
                let hello = self.hello();
                self.send(from, hello);
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
        if let JobMessage::Ticket(ticket) = &body {
            self.doubt_hello(from, ticket.member.state, now);
        }
        self.with_job(&key, now, |job, ctx| {
            job.on_message(ctx, from, body);
            job.drive(ctx);
        });
        Ok(())
    }

    /// A peer asks to be let in with another state directory than it said hello with: a hello of an
    /// earlier run came late, and would have the node counted as lost as soon as it is a member.
    fn doubt_hello(&mut self, node: NodeId, state: StateId, now: Time) {
        let said = self.peers.get(node).and_then(Peer::state_dir);
        if said.is_some_and(|s| s != state)
            && let Some(peer) = self.peers.map.get_mut(&node)
        {
            peer.greeted = false;
            self.ask_hello(node, now);
        }
    }

    fn on_advert(&mut self, from: NodeId, advert: &Advert, now: Time) {
        if self.jobs.contains_key(&advert.key) {
            self.with_job(&advert.key.clone(), now, |job, ctx| {
                job.on_advert(ctx, from, advert);
            });
        }
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

    /// Peers that are connected and have not said hello are asked to, those too that say nothing: each
    /// may belong to a group of a job that only this one can bring together with its own.
    fn ask_hellos(&mut self, now: Time) {
        if self.greet_at.is_none_or(|at| now < at) {
            return;
        }
        let silent = self.peers.map.iter();
        let silent = silent.filter(|(_, p)| p.connected && !p.greeted);
        let silent: Vec<NodeId> = silent.map(|(n, _)| *n).collect();
        self.greet_at = (!silent.is_empty()).then_some(now + HELLO_WAIT);
        for node in silent {
            self.ask_hello(node, now);
        }
    }

    /// A peer that talks without having said hello over this connection is asked to: what it said
    /// over an earlier one may be about another state directory.
    fn ask_hello(&mut self, node: NodeId, now: Time) {
        let Some(peer) = self.peers.map.get_mut(&node) else {
            return;
        };
        if peer.connected && !peer.greeted && now >= peer.hello_due {
            peer.hello_due = now + HELLO_WAIT;
            self.send(node, Message::HelloAsk);
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
        greet |= self.greet_again.is_some_and(|at| at <= now);
        if changed {
            self.rewatch(now);
        }
        if greet {
            let hello = self.hello();
            for node in self.peers.connected_nodes().collect::<Vec<_>>() {
                self.send(node, hello.clone());
            }
            self.greet_again = None;
        }
        if self.jobs.values().any(Job::is_led_here) {
            self.greet_again.get_or_insert(now + GREET_EVERY);
        } else {
            self.greet_again = None;
        }
        for key in forget {
            self.forget(&key);
        }
        self.forget_oldest();
        self.ping_urgent(now);
    }

    /// A job that nobody here takes part in needs no memory, unless its end must be remembered.
    fn forget(&mut self, key: &JobKey) {
        let nothing = self.jobs.get(key).is_some_and(Job::is_blank);
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
}

fn leaving(leave: &Leave, until: Time, now: Time) -> Message {
    let left = until.since(now).as_millis();
    Message::Leaving {
        grace_ms: u32::try_from(left).unwrap_or(u32::MAX),
        reason: leave.reason.clone(),
    }
}
