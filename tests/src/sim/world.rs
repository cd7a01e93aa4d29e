//! The world: agents with their disks, launchers with their workers, one store. It carries out one
//! [`Step`] after the other and draws nothing, so that the same steps give the same world.

mod hangs;
mod orders;
mod steps;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use muster_protocol::agent::{self, Agent, Effect, Event, Stored};
use muster_protocol::job::Durable;
use muster_protocol::local::Command;
use muster_protocol::membership::Answer;
use muster_protocol::storelog;
use muster_protocol::wire::Message;
use muster_protocol::{Boot, JobKey, NodeId, Span, StateId};

use super::clock::Clock;
use super::coverage::Coverage;
use super::invariants::{self, Violation};
use super::launcher::{Launcher, LeftSlots};
use super::setup::{Setup, Torn};
use super::step::{Found, Request, Step};
use super::store::Store;
use super::truth::Truth;

/// More effects than this from one event count as running wild.
const MAX_EFFECTS: usize = 100_000;

/// Logs here are short: snapshots are close together, and forget soon.
pub const COMPACTION: storelog::Compaction = storelog::Compaction {
    every: 8,
    claims: 4,
    retired: 1,
};

/// State of one node.
#[derive(Debug)]
pub struct Node {
    pub id: NodeId,
    pub clock: Clock,
    pub disk: Disk,
    pub agent: Option<Agent>,
    /// Counts every start of this node's agent, over all of its disks.
    pub agent_token: u32,
    pub paused: bool,
    /// Since when the agent has been up, running, and connected to its launcher.
    pub steady_since: u64,
    /// When the agent last crashed or was stopped.
    pub left: Option<u64>,
    pub launcher: Option<Launcher>,
    /// Since when the machine is suspended.
    pub suspended: Option<u64>,
    /// When it was last woken.
    pub woke: u64,
    pub full: bool,
    /// Writes of the agent that are under way, the oldest first.
    pub writes: VecDeque<(JobKey, Vec<u8>)>,
    /// It reads the store as that was so long ago.
    pub store_stale: u64,
    /// Slots of launchers that died, of which the agent has descriptors.
    pub left_slots: LeftSlots,
    /// When somebody last ordered at this agent that the job ends.
    pub cancel_ordered: Option<u64>,
    armed: Option<(u32, Torn)>,
}

/// State that survives a crash.
#[derive(Clone, Debug)]
pub struct Disk {
    pub state: StateId,
    pub boot: u64,
    pub jobs: BTreeMap<JobKey, Vec<u8>>,
    pub past: Vec<u8>,
    /// How many disks this node has had.
    pub count: u8,
}

impl Disk {
    fn new(id: NodeId, count: u8) -> Disk {
        let mut state = [id.0[0]; 8];
        state[7] = count;
        Disk {
            state: StateId(state),
            boot: 0,
            jobs: BTreeMap::new(),
            past: Vec::new(),
            count,
        }
    }
}

#[derive(Debug)]
pub struct World {
    pub now: u64,
    pub setup: Arc<Setup>,
    pub key: JobKey,
    pub nodes: Vec<Node>,
    pub store: Store,
    /// Where agents that are started from now on compact the log.
    pub compaction: storelog::Compaction,
    pub truth: Truth,
    pub coverage: Coverage,
    pub requests: Vec<Request>,
    pub(super) overlaps: Vec<invariants::Overlap>,
    /// The launchers that were started, in order: where and when.
    pub started: Vec<(usize, u64)>,
    conns: u64,
    launchers: u32,
}

impl World {
    pub fn new(setup: Arc<Setup>) -> World {
        let nodes = setup.nodes.iter().enumerate().map(|(i, n)| {
            let mut id = [i as u8 + 1; 32];
            id[0] = n.tag;
            let id = NodeId(id);
            Node {
                id,
                clock: n.clock,
                disk: Disk::new(id, 1),
                agent: None,
                agent_token: 0,
                paused: false,
                suspended: None,
                woke: 0,
                steady_since: u64::MAX,
                left: None,
                launcher: None,
                full: false,
                writes: VecDeque::new(),
                store_stale: 0,
                left_slots: LeftSlots::new(),
                cancel_ordered: None,
                armed: None,
            }
        });
        World {
            now: 0,
            key: JobKey {
                cluster: "c".into(),
                owner: "u".into(),
                id: "j".into(),
            },
            nodes: nodes.collect(),
            store: Store::default(),
            compaction: COMPACTION,
            truth: Truth::default(),
            coverage: Coverage::default(),
            requests: Vec::new(),
            overlaps: Vec::new(),
            started: Vec::new(),
            conns: 0,
            launchers: 0,
            setup,
        }
    }

    pub fn index(&self, id: NodeId) -> Option<usize> {
        self.nodes.iter().position(|n| n.id == id)
    }

    /// `suspect_after` of this node's agent.
    pub fn suspect_after(&self, node: usize) -> Span {
        let other = self.setup.other_suspect.filter(|(n, _)| *n == node);
        other.map_or(World::config(&self.setup).suspect_after, |(_, ns)| Span(ns))
    }

    /// The times that agents keep, the same on all nodes but one perhaps.
    pub fn config(setup: &Setup) -> agent::Config {
        let times = &setup.times;
        agent::Config {
            node: NodeId::ZERO,
            state: StateId::ZERO,
            boot: Boot(0),
            cluster: "c".into(),
            host: String::new(),
            version: "sim".into(),
            pid: 1,
            home: muster_protocol::Home::ZERO,
            seed: 0,
            suspect_after: Span(times.suspect_after),
            agent_grace: Span(times.agent_grace),
            birth_timeout: Span(times.birth_timeout),
            start_timeout: Span(times.start_timeout),
            minority_wait: Span(times.minority_wait),
            orphan_after: Span(times.orphan_after),
            one_host: false,
            slot_memory: u64::MAX,
            slot_lease: Span(times.slot_lease),
            embedded: setup.embedded,
            place: muster_protocol::record::Place::default(),
            memory: muster_protocol::memory::Key::default(),
            compaction: COMPACTION,
            flaws: setup.flaws,
        }
    }

    /// Carries a step out, and judges the world after it.
    pub fn apply(&mut self, at: u64, step: Step) -> Result<(), Violation> {
        (self.now, self.truth.now) = (at, at);
        self.coverage.events += 1;
        self.carry_out(step)?;
        invariants::after_event(self)
    }

    fn carry_out(&mut self, step: Step) -> Result<(), Violation> {
        match step {
            Step::AgentStart { node } => self.agent_start(node),
            Step::AgentKill { node } => {
                self.agent_kill(node);
                Ok(())
            }
            Step::Arm {
                node,
                effects,
                torn,
            } => {
                self.nodes[node].armed = Some((effects, torn));
                Ok(())
            }
            Step::NewDisk { node } => {
                let n = &mut self.nodes[node];
                if n.agent.is_none() {
                    n.disk = Disk::new(n.id, n.disk.count + 1);
                    self.truth.disks.remove(&n.id);
                }
                Ok(())
            }
            Step::DiskFull { node, full } => {
                self.nodes[node].full = full;
                Ok(())
            }
            Step::Pause { node, paused } => {
                let n = &mut self.nodes[node];
                n.paused = paused;
                n.steady_since = self.now;
                if paused {
                    n.left = Some(self.now);
                } else if let Some(at) = &mut n.cancel_ordered {
                    *at = self.now;
                }
                Ok(())
            }
            Step::Suspend { node } => {
                let n = &mut self.nodes[node];
                n.suspended.get_or_insert(self.now);
                n.paused = true;
                if let Some(l) = &mut n.launcher {
                    l.suspend(self.now);
                }
                Ok(())
            }
            Step::Wake { node } => {
                self.wake(node);
                Ok(())
            }
            Step::Connect { node, agent, peer } => {
                let (addr, observed) = (address(peer, 7000), address(node, 0).ip());
                let peer = self.nodes[peer].id;
                let event = Event::Connected {
                    node: peer,
                    addr,
                    observed,
                };
                self.agent(node, agent, event)
            }
            Step::Disconnect { node, agent, peer } => {
                let peer = self.nodes[peer].id;
                self.agent(node, agent, Event::Disconnected { node: peer })
            }
            Step::Deliver { to, from, frame } => {
                let from = self.nodes[from].id;
                let message = Message::decode(&frame).map_err(Violation::own_frame)?;
                self.coverage.messages += 1;
                self.hears_cancel(&message);
                let agent = self.nodes[to].agent_token;
                self.agent(to, agent, Event::Message { from, message })
            }
            Step::Timer { node, agent } => self.timer(node, agent),
            Step::Probed {
                node,
                agent,
                peer,
                id,
                agent_found,
                guard_found,
            } => {
                let event = Event::Probed {
                    node: peer,
                    id,
                    agent: answer(agent_found),
                    guard: answer(guard_found),
                };
                self.agent(node, agent, event)
            }
            Step::Drain { node, grace_ms } => {
                if let Some(l) = &mut self.nodes[node].launcher {
                    l.leaves = true;
                }
                let agent = self.nodes[node].agent_token;
                let reason = "drained".into();
                self.agent(node, agent, Event::Drain { grace_ms, reason })
            }
            Step::OrderCheckpoint { node } => {
                let job = self.key.id.clone();
                self.order(node, Command::Checkpoint { job })
            }
            Step::OrderCancel { node, given, there } => self.order_cancel(node, given, there),
            Step::Continue { node, dead } => {
                let job = self.key.id.clone();
                let dead = dead.iter().map(|n| host(*n)).collect();
                let confirmed = true;
                self.order(
                    node,
                    Command::Continue {
                        job,
                        dead,
                        confirmed,
                    },
                )
            }
            Step::Checkpoint {
                node,
                step,
                manifest,
            } => {
                let agent = self.nodes[node].agent_token;
                let key = self.key.clone();
                self.agent(
                    node,
                    agent,
                    Event::Commit {
                        key,
                        step,
                        manifest,
                    },
                )
            }
            Step::StoreStale { node, by } => {
                self.nodes[node].store_stale = by;
                Ok(())
            }
            Step::StoreRead { .. }
            | Step::StorePut { .. }
            | Step::StoreAnswer { .. }
            | Step::BeaconWrite { .. }
            | Step::BeaconRead { .. }
            | Step::BeaconAnswer { .. } => self.store_step(step),
            Step::Written { node, agent } => self.written(node, agent),
            Step::Torn { node } => match self.nodes[node].writes.pop_front() {
                Some((key, bytes)) if !self.nodes[node].full => self.store(node, key, bytes),
                _ => Ok(()),
            },
            other => self.launcher_step(other),
        }
    }

    fn agent_start(&mut self, node: usize) -> Result<(), Violation> {
        let now = self.now;
        let suspect_after = self.suspect_after(node);
        let n = &mut self.nodes[node];
        if n.agent.is_some() {
            return Ok(());
        }
        n.agent_token += 1;
        n.disk.boot += 1;
        n.paused = false;
        n.armed = None;
        n.steady_since = now;
        let usual = World::config(&self.setup);
        let config = agent::Config {
            suspect_after,
            orphan_after: usual
                .orphan_after
                .max(Span(usual.agent_grace.0 + suspect_after.0)),
            node: n.id,
            state: n.disk.state,
            boot: Boot(n.disk.boot),
            host: host(node),
            seed: self.setup.seed ^ ((node as u64) << 40) ^ (u64::from(n.agent_token) << 48),
            compaction: self.compaction,
            ..usual
        };
        let jobs = n.disk.jobs.iter().map(|(k, b)| (k.clone(), b.clone()));
        let stored = Stored {
            jobs: jobs.collect(),
            past: n.disk.past.clone(),
        };
        let agent = Agent::new(config, stored, n.clock.local(now));
        n.agent = Some(agent.map_err(Violation::cannot_start)?);
        self.requests.push(Request::AgentUp { node });
        self.effects(node)
    }

    fn wake(&mut self, node: usize) {
        let now = self.now;
        let n = &mut self.nodes[node];
        let Some(since) = n.suspended.take() else {
            return;
        };
        n.clock.stood_still(since, now);
        n.left = n.left.map(|left| left + (now - since));
        n.paused = false;
        (n.woke, n.steady_since) = (now, now);
        if let Some(l) = &mut n.launcher {
            let out = l.wake(since, now);
            self.launcher_out(node, out, now);
        }
    }

    fn agent_kill(&mut self, node: usize) {
        let now = self.now;
        let n = &mut self.nodes[node];
        if n.agent.take().is_none() {
            return;
        }
        n.armed = None;
        n.writes.clear();
        n.left_slots.clear();
        n.paused = false;
        n.steady_since = u64::MAX;
        n.left = Some(now);
        n.cancel_ordered = None;
        self.requests.push(Request::AgentDown { node });
        if let Some(launcher) = &mut n.launcher
            && launcher.conn.is_some()
        {
            let out = launcher.disconnected(now);
            self.launcher_out(node, out, now);
        }
    }

    fn timer(&mut self, node: usize, token: u32) -> Result<(), Violation> {
        let n = &mut self.nodes[node];
        if n.agent_token != token {
            return Ok(());
        }
        let now = n.clock.local(self.now);
        if let Some(agent) = &mut n.agent {
            agent.handle_timeout(now);
        }
        self.effects(node)
    }

    /// Gives an event to one boot of an agent; an earlier boot's are lost.
    pub(super) fn agent(&mut self, node: usize, token: u32, event: Event) -> Result<(), Violation> {
        let n = &mut self.nodes[node];
        if n.agent_token != token {
            return Ok(());
        }
        let now = n.clock.local(self.now);
        let Some(agent) = &mut n.agent else {
            return Ok(());
        };
        if agent.handle(event, now).is_err() {
            self.coverage.refused_events += 1;
        }
        self.effects(node)
    }

    /// Carries out what the agent wants, until it is through or the crash that it is armed with.
    fn effects(&mut self, node: usize) -> Result<(), Violation> {
        for _ in 0..MAX_EFFECTS {
            let n = &mut self.nodes[node];
            let Some(effect) = n.agent.as_mut().and_then(Agent::poll_effect) else {
                return Ok(());
            };
            match &mut n.armed {
                Some((0, torn)) => {
                    if *torn == Torn::Between {
                        self.agent_kill(node);
                        return Ok(());
                    }
                    if let Effect::Persist { key, bytes } = effect {
                        if *torn == Torn::New {
                            self.store(node, key, bytes)?;
                        }
                        self.agent_kill(node);
                        return Ok(());
                    }
                }
                Some((left, _)) => *left -= 1,
                None => {}
            }
            self.effect(node, effect)?;
        }
        Err(Violation::RunsWild { node })
    }

    fn effect(&mut self, node: usize, effect: Effect) -> Result<(), Violation> {
        let agent = self.nodes[node].agent_token;
        let by = (self.nodes[node].id, self.nodes[node].disk.state);
        match effect {
            Effect::Persist { key, bytes } => {
                self.nodes[node].writes.push_back((key, bytes));
                self.requests.push(Request::Write { node, agent });
            }
            Effect::Forget { key, past } => {
                self.nodes[node].disk.past = past;
                self.nodes[node].disk.jobs.remove(&key);
                self.truth.disks.remove(&by.0);
                self.truth.dirty = true;
            }
            Effect::Send { to, message } => {
                let frame = message.encode().map_err(Violation::unsendable)?;
                if let Message::Job { body, .. } = &message {
                    self.truth.sent(by, body);
                }
                self.coverage.sent(&message);
                if let Some(to) = self.index(to) {
                    self.requests.push(Request::Net {
                        from: node,
                        to,
                        frame,
                    });
                }
            }
            Effect::Probe {
                node: peer,
                id,
                guard,
            } => {
                let guard = guard.map(|(addr, _)| match addr.ip() {
                    std::net::IpAddr::V4(ip) => (ip.octets()[3], addr.port()),
                    std::net::IpAddr::V6(_) => (0, addr.port()),
                });
                self.requests.push(Request::Probe {
                    node,
                    agent,
                    peer,
                    id,
                    guard,
                });
            }
            Effect::ToLauncher { conn, frame } => {
                self.coverage.to_launcher(&frame);
                self.requests
                    .push(Request::ToLauncher { node, conn, frame });
            }
            Effect::Store { effect, .. } => {
                if let storelog::Effect::Create { bytes, .. } = &effect {
                    self.commit_asked(bytes);
                }
                self.requests.push(match effect {
                    storelog::Effect::Read { op, slot } => Request::StoreRead {
                        node,
                        agent,
                        op,
                        slot,
                    },
                    storelog::Effect::Create { op, slot, bytes } => Request::StoreCreate {
                        node,
                        agent,
                        op,
                        slot,
                        bytes,
                    },
                });
            }
            Effect::WriteBeacon { value, .. } => {
                self.requests.push(Request::BeaconWrite { node, value });
            }
            Effect::ReadBeacon { .. } => self.requests.push(Request::BeaconRead { node, agent }),
            Effect::Notice(notice) => {
                self.coverage.notice(&notice);
                match notice {
                    agent::Notice::Decided { record, .. } => self.truth.announce(&record),
                    agent::Notice::Voters { record, .. } => self.truth.announce_voters(&record),
                    agent::Notice::Committed { commit, .. } => self.truth.commit_announced(commit),
                    agent::Notice::Hung { hang, .. } => self.judged(node, &hang)?,
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// The checkpoint engine of this node has data for this commit.
    fn commit_asked(&mut self, bytes: &[u8]) {
        if let Ok(entry) = storelog::Entry::decode(bytes)
            && let storelog::Body::Commit(commit) = entry.body
            && !self.truth.asked.contains(&commit)
        {
            self.truth.asked.push(commit);
        }
    }

    /// The checkpoint engine deletes whatever the agent lets it delete, as early as it can.
    fn clean_up(&mut self, node: usize) {
        let agent = self.nodes[node].agent.as_ref();
        let Some(job) = agent.and_then(|a| a.job(&self.key)) else {
            return;
        };
        let deleted = &mut self.truth.deleted;
        for commit in &self.truth.asked {
            if !deleted.contains(&commit.manifest) && job.may_delete_data(commit) {
                deleted.insert(commit.manifest);
                self.truth.dirty = true;
            }
        }
    }

    /// A write of this boot of the agent is done: it is durable, or the disk is full.
    fn written(&mut self, node: usize, token: u32) -> Result<(), Violation> {
        let n = &mut self.nodes[node];
        if n.agent_token != token || n.agent.is_none() {
            return Ok(());
        }
        let Some((key, bytes)) = n.writes.pop_front() else {
            return Ok(());
        };
        let event = match n.full {
            true => {
                self.coverage.failed_writes += 1;
                Event::PersistFailed { key, errno: 28 }
            }
            false => {
                self.store(node, key.clone(), bytes)?;
                Event::Persisted { key }
            }
        };
        self.agent(node, token, event)
    }

    fn store(&mut self, node: usize, key: JobKey, bytes: Vec<u8>) -> Result<(), Violation> {
        let n = &mut self.nodes[node];
        let durable = Durable::decode(&bytes).map_err(Violation::own_state)?;
        n.disk.jobs.insert(key, bytes);
        let by = (n.id, n.disk.state);
        self.truth.persisted(by, durable);
        Ok(())
    }
}

fn host(index: usize) -> String {
    format!("n{index}")
}

fn address(index: usize, port: u16) -> std::net::SocketAddr {
    std::net::SocketAddr::from(([10, 0, 0, index as u8 + 1], port))
}

fn answer(found: Found) -> Answer {
    match found {
        Found::Answered => Answer::Answered,
        Found::Mute => Answer::Mute,
        Found::Refused => Answer::Refused,
        Found::Silent => Answer::Silent,
        Found::Other => Answer::Other,
    }
}
