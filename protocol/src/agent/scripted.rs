//! For tests: one agent, time that the test moves, and peers whose words the test writes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;

use super::{Agent, Config, ConnId, Effect, Event, Flaws, Notice, Stored};
use crate::ids::{Boot, Digest, Home, JobKey, LauncherId, NodeId, StateId, StoreUuid};
use crate::job::Durable;
use crate::local::{Register, ToAgent, ToLauncher, WorkerExit};
use crate::membership::Answer;
use crate::record::{Arbiter, Cause, Kind, Member, Place, Record, Voter};
use crate::spec::JobSpec;
use crate::storelog::{self, CreateOutcome, ReadOutcome};
use crate::time::{Span, Time};
use crate::wire::{Advert, Ballot, Hello, JobMessage, Message, Status, Timeouts};

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
pub(super) const START: Time = Time(1_000_000_000_000);

pub(super) fn node(i: usize) -> NodeId {
    let mut id = [7u8; 32];
    id[..8].copy_from_slice(&(i as u64 + 1).to_be_bytes());
    NodeId(id)
}

fn state(i: usize) -> StateId {
    StateId((i as u64 + 1).to_be_bytes())
}

fn home(i: usize) -> Home {
    Home::of(&[i as u8])
}

/// The greeting of agent `i`.
fn said(i: usize) -> Hello {
    Hello {
        host: format!("h{i}"),
        version: "1".into(),
        state: state(i),
        home: home(i),
        boot: Boot(1),
        timeouts: timeouts(2, 30),
        unstored: None,
        embedded: false,
        jobs: Vec::new(),
    }
}

/// A statement of a peer that belongs to this first generation of `j`, which node 0 leads.
pub(super) fn belongs_to(first: Digest) -> Advert {
    Advert {
        key: key("j"),
        lineage: first,
        digest: first,
        number: 1,
        leader: Some(node(0)),
        belongs: true,
        deserted: false,
        left_behind: false,
        started: false,
        unresponsive: false,
    }
}

pub(super) fn key(id: &str) -> JobKey {
    JobKey {
        cluster: "c".into(),
        owner: "0".into(),
        id: id.into(),
    }
}

pub(super) fn timeouts(suspect: u64, grace: u64) -> Timeouts {
    Timeouts {
        suspect_after: Span::from_secs(suspect),
        agent_grace: Span::from_secs(grace),
    }
}

/// With the times that agents keep in production.
pub(super) fn config(i: usize, boot: u64) -> Config {
    Config {
        compaction: crate::storelog::Compaction::default(),
        node: node(i),
        state: state(i),
        boot: Boot(boot),
        cluster: "c".into(),
        host: format!("h{i}"),
        version: "1".into(),
        pid: 1,
        home: home(i),
        seed: i as u64 + 77 * boot,
        suspect_after: Span::from_secs(2),
        agent_grace: Span::from_secs(30),
        birth_timeout: Span::from_secs(4),
        start_timeout: Span::from_secs(30),
        minority_wait: Span::from_secs(6),
        orphan_after: Span::from_secs(32),
        one_host: false,
        slot_memory: u64::MAX,
        slot_lease: Span::from_secs(600),
        embedded: false,
        place: Place::default(),
        memory: crate::memory::Key::default(),
        flaws: Flaws::default(),
    }
}

pub(super) fn member(i: usize) -> Member {
    let ip = Ipv6Addr::new(0x2001, 0xdb8, 0xffff, 0xffff, 0xffff, 0xffff, 1, i as u16);
    Member {
        node: node(i),
        state: state(i),
        launcher: LauncherId((i as u64 + 1).to_be_bytes()),
        slots: 8,
        guard: SocketAddr::new(ip.into(), 40_000),
        place: Place::default(),
    }
}

/// A generation of the first `n` nodes.
pub(super) fn record(n: usize, number: u64) -> Record {
    let later = |digest: Digest| if number == 1 { Digest::ZERO } else { digest };
    Record {
        birth: later(Digest([9; 32])),
        number,
        parent: later(Digest([8; 32])),
        spec: JobSpec {
            min_nodes: 1,
            max_nodes: n as u16,
            ..JobSpec::default()
        },
        ..Record::first((0..n).map(member).collect())
    }
}

/// The first frame of the launcher of node `i`.
pub(super) fn registers(i: usize, spec: JobSpec) -> Register {
    Register {
        launcher: member(i).launcher,
        job: "j".into(),
        spec,
        slots: 8,
        guard_port: 40_000,
        addrs: vec![HERE],
        place: Place::default(),
        running: None,
        waited_ms: 0,
        began: None,
        lineage: None,
        gate: None,
        store: None,
        parity: 0,
        pid: 1,
        command: String::new(),
        log_dir: None,
    }
}

/// A record that may follow it.
pub(super) fn next(before: &Record, nonce: u64) -> Record {
    Record {
        birth: before.lineage(),
        number: before.number + 1,
        parent: before.digest(),
        nonce,
        cause: Cause::NodesLost {
            nodes: vec![node(2)],
        },
        ..before.clone()
    }
}

pub(super) fn ended(id: &str) -> Durable {
    let end = Record {
        key: key(id),
        kind: Kind::End { cancelled: false },
        members: Vec::new(),
        cause: Cause::Finished,
        ..record(1, 2)
    };
    holds(&end, 1)
}

/// Durable state of an agent that learnt this record in this boot.
pub(super) fn holds(record: &Record, learned: u64) -> Durable {
    Durable {
        head: Some(Arc::new(record.clone())),
        learned: Boot(learned),
        ..Durable::new(record.key.clone())
    }
}

pub(super) struct Scripted {
    pub(super) agent: Agent,
    pub(super) now: Time,
    pub(super) sent: Vec<(NodeId, JobMessage)>,
    pub(super) told: Vec<(Time, ToLauncher)>,
    pub(super) notices: Vec<Notice>,
    pub(super) hellos: Vec<(NodeId, Hello)>,
    /// Those that were asked to say hello.
    pub(super) asked: Vec<NodeId>,
    pub(super) stored: BTreeMap<JobKey, Vec<u8>>,
    pub(super) past: Vec<u8>,
    pub(super) persists: usize,
    /// Writes that are under way, where the disk takes time.
    writing: Option<Vec<(JobKey, Vec<u8>)>>,
    /// Peers whose agents acknowledge leases.
    pub(super) grants: BTreeSet<NodeId>,
    /// Peers whose agents answer, and refuse them.
    pub(super) refuses: BTreeSet<NodeId>,
    /// Results of probes of a node.
    pub(super) probes: BTreeMap<NodeId, (Answer, Answer)>,
    /// The launcher here is stopped: it answers its agent nothing.
    pub(super) mute: bool,
    /// The job's log, by slots, where the launcher here has a store; the leader's beacon in it never moves.
    pub(super) log: Option<BTreeMap<u64, Vec<u8>>>,
    /// Its answers, as long as they are under way.
    pub(super) slow: Option<Vec<Event>>,
    back: Vec<Event>,
}

impl Scripted {
    pub(super) fn new(config: Config, stored: Vec<Durable>) -> Scripted {
        let jobs = stored
            .into_iter()
            .map(|d| (d.key.clone(), d.encode().unwrap()));
        Scripted::restored(config, jobs.collect(), Vec::new(), START)
    }

    pub(super) fn restored(
        config: Config,
        stored: BTreeMap<JobKey, Vec<u8>>,
        past: Vec<u8>,
        now: Time,
    ) -> Scripted {
        let from = Stored {
            jobs: stored.clone().into_iter().collect(),
            past: past.clone(),
        };
        let mut scripted = Scripted {
            agent: Agent::new(config, from, now).unwrap(),
            now,
            sent: Vec::new(),
            asked: Vec::new(),
            told: Vec::new(),
            notices: Vec::new(),
            hellos: Vec::new(),
            stored,
            past,
            persists: 0,
            writing: None,
            grants: BTreeSet::new(),
            refuses: BTreeSet::new(),
            probes: BTreeMap::new(),
            mute: false,
            log: None,
            slow: None,
            back: Vec::new(),
        };
        scripted.carry_out();
        scripted
    }

    /// The agent is killed, and started again after a while.
    pub(super) fn restart(self, down: Span) -> Scripted {
        let mut config = self.agent.config().clone();
        config.boot.0 += 1;
        config.seed += 1;
        Scripted::restored(config, self.stored, self.past, self.now + down)
    }

    pub(super) fn on(&mut self, event: Event) {
        self.agent.handle(event, self.now).unwrap();
        self.carry_out();
    }

    pub(super) fn carry_out(&mut self) {
        loop {
            while let Some(effect) = self.agent.poll_effect() {
                self.effect(effect);
            }
            let Some(event) = self.back.pop() else { return };
            self.agent.handle(event, self.now).unwrap();
        }
    }

    fn wrote(&mut self, key: JobKey, bytes: Vec<u8>) {
        self.stored.insert(key.clone(), bytes);
        self.agent
            .handle(Event::Persisted { key }, self.now)
            .unwrap();
    }

    /// From now on a write is under way until the disk is said to be done.
    pub(super) fn disk_takes_time(&mut self) {
        self.writing.get_or_insert_default();
    }

    /// The disk takes none of the writes that are under way.
    pub(super) fn disk_refuses(&mut self, errno: i32) {
        for (key, _) in self.writing.replace(Vec::new()).into_iter().flatten() {
            let failed = Event::PersistFailed { key, errno };
            self.agent.handle(failed, self.now).unwrap();
        }
        self.carry_out();
    }

    /// The writes that are under way are durable.
    pub(super) fn disk_is_done(&mut self) {
        for (key, bytes) in self.writing.replace(Vec::new()).into_iter().flatten() {
            self.wrote(key, bytes);
        }
        self.carry_out();
    }

    fn effect(&mut self, effect: Effect) {
        match effect {
            Effect::Persist { key, bytes } => {
                self.persists += 1;
                match &mut self.writing {
                    Some(writing) => writing.push((key, bytes)),
                    None => self.wrote(key, bytes),
                }
            }
            Effect::Forget { key, past } => {
                self.past = past;
                self.stored.remove(&key);
            }
            Effect::Send { to, message } => match message {
                Message::Ping { seq, leases } if self.grants.contains(&to) => {
                    let refuses = self.refuses.contains(&to);
                    let granted = if refuses { Vec::new() } else { leases };
                    let message = Message::Pong { seq, granted };
                    self.back.push(Event::Message { from: to, message });
                }
                Message::Job { body, .. } => self.sent.push((to, *body)),
                Message::Hello(hello) => self.hellos.push((to, hello)),
                Message::HelloAsk => self.asked.push(to),
                _ => {}
            },
            Effect::Probe { node, id, .. } => {
                if let Some((agent, guard)) = self.probes.get(&node).copied() {
                    self.back.push(Event::Probed {
                        node,
                        id,
                        agent,
                        guard,
                    });
                }
            }
            Effect::ToLauncher { conn, frame } => {
                if matches!(frame, ToLauncher::Welcome { .. }) && !self.mute {
                    let (owner, frame) = ("0".into(), ToAgent::Alive);
                    self.back.push(Event::Launcher { conn, owner, frame });
                }
                self.told.push((self.now, frame));
            }
            Effect::Notice(notice) => self.notices.push(notice),
            Effect::Store { key, effect } => {
                if let Some(log) = &mut self.log {
                    let event = answer(log, effect);
                    let answers = self.slow.as_mut().unwrap_or(&mut self.back);
                    answers.push(Event::Store { key, event });
                }
            }
            Effect::ReadBeacon { key } if self.log.is_some() => {
                let value = Some(1);
                self.back.push(Event::Beacon { key, value });
            }
            _ => {}
        }
    }

    pub(super) fn pass(&mut self, span: Span) {
        let until = self.now + span;
        for _ in 0..1_000_000 {
            match self.agent.poll_timeout().filter(|(at, _)| *at <= until) {
                Some((at, _)) => self.now = self.now.max(at),
                None => {
                    self.now = until;
                    return;
                }
            }
            self.agent.handle_timeout(self.now);
            self.carry_out();
        }
        panic!("the agent is never at rest");
    }

    /// Delivers a message about the job from node `from`.
    pub(super) fn hears(&mut self, from: usize, body: JobMessage) {
        self.hears_of("j", from, body);
    }

    pub(super) fn hears_of(&mut self, job: &str, from: usize, body: JobMessage) {
        let message = Message::Job {
            key: key(job),
            body: Box::new(body),
        };
        let from = node(from);
        self.on(Event::Message { from, message });
    }

    pub(super) fn peer(&mut self, i: usize) {
        self.peer_with(i, timeouts(2, 30));
    }

    pub(super) fn peer_with(&mut self, i: usize, timeouts: Timeouts) {
        self.on(Event::Connected {
            node: node(i),
            addr: SocketAddr::new(HERE, 7970),
            observed: HERE,
        });
        self.hello(i, timeouts, None, Vec::new());
        self.grants.insert(node(i));
    }

    /// Agent `i` comes with the state directory's place of another one, at a port of its own.
    pub(super) fn peer_in_place_of(&mut self, i: usize, of: usize) {
        let port = 30_000 + i as u16;
        self.on(Event::Connected {
            node: node(i),
            addr: SocketAddr::new(HERE, port),
            observed: HERE,
        });
        let message = Message::Hello(Hello {
            host: format!("h{of}"),
            home: home(of),
            ..said(i)
        });
        let from = node(i);
        self.on(Event::Message { from, message });
        self.grants.insert(node(i));
    }

    /// A connected peer says what it knows of jobs.
    pub(super) fn says_hello(&mut self, i: usize, jobs: Vec<Advert>) {
        self.hello(i, timeouts(2, 30), None, jobs);
    }

    /// A connected peer says that its state directory refuses writes.
    pub(super) fn says_unstored(&mut self, i: usize, errno: i32) {
        self.hello(i, timeouts(2, 30), Some(errno), Vec::new());
    }

    /// A hello of a run of this peer's agent with another state directory.
    pub(super) fn says_hello_of(&mut self, i: usize, state: StateId, jobs: Vec<Advert>) {
        let message = Message::Hello(Hello {
            state,
            jobs,
            ..said(i)
        });
        let from = node(i);
        self.on(Event::Message { from, message });
    }

    fn hello(&mut self, i: usize, timeouts: Timeouts, unstored: Option<i32>, jobs: Vec<Advert>) {
        let message = Message::Hello(Hello {
            timeouts,
            unstored,
            jobs,
            ..said(i)
        });
        let from = node(i);
        self.on(Event::Message { from, message });
    }

    /// The launcher that `member(i)` names.
    pub(super) fn launcher(&mut self, i: usize, most: u16, running: Option<Digest>) {
        self.launcher_of(i, (1, most), running);
    }

    pub(super) fn launcher_of(
        &mut self,
        i: usize,
        (min_nodes, max_nodes): (u16, u16),
        running: Option<Digest>,
    ) {
        let spec = JobSpec {
            min_nodes,
            max_nodes,
            ..JobSpec::default()
        };
        self.says(ToAgent::Register(Register {
            running,
            ..registers(i, spec)
        }));
        self.says(ToAgent::MasterPort { port: 9 });
    }

    pub(super) fn says(&mut self, frame: ToAgent) {
        self.on(Event::Launcher {
            conn: ConnId(1),
            owner: "0".into(),
            frame,
        });
    }

    pub(super) fn status(
        &mut self,
        from: usize,
        digest: Digest,
        seq: u64,
        change: impl FnOnce(&mut Status),
    ) {
        let mut status = Status {
            digest,
            boot: Boot(1),
            seq,
            started: Some(1),
            ..Status::default()
        };
        change(&mut status);
        self.hears(from, JobMessage::Status(Box::new(status)));
    }

    pub(super) fn prepares(&self) -> Vec<Ballot> {
        let ballot = |(_, body): &(NodeId, JobMessage)| match body {
            JobMessage::Prepare { ballot, .. } => Some(*ballot),
            _ => None,
        };
        self.sent.iter().filter_map(ballot).collect()
    }

    pub(super) fn accepts(&self) -> Vec<(Ballot, Digest)> {
        let value = |(_, body): &(NodeId, JobMessage)| match body {
            JobMessage::Accept { ballot, record, .. } => Some((*ballot, record.digest())),
            _ => None,
        };
        self.sent.iter().filter_map(value).collect()
    }

    pub(super) fn votes(&self) -> usize {
        let vote = |(_, body): &&(NodeId, JobMessage)| {
            matches!(
                body,
                JobMessage::Promise { .. }
                    | JobMessage::Accept { .. }
                    | JobMessage::Accepted { .. }
                    | JobMessage::Committed { .. }
                    | JobMessage::BirthAccepted { .. }
            )
        };
        self.sent.iter().filter(vote).count()
    }

    /// When the launcher was first told to start this generation.
    pub(super) fn started(&self, of: Digest) -> Option<Time> {
        let start = |(at, frame): &(Time, ToLauncher)| match frame {
            ToLauncher::Start(start) if start.digest == of => Some(*at),
            _ => None,
        };
        self.told.iter().find_map(start)
    }

    pub(super) fn decided(&self) -> Vec<Digest> {
        let decided = |n: &Notice| match n {
            Notice::Decided { digest, .. } => Some(*digest),
            _ => None,
        };
        self.notices.iter().filter_map(decided).collect()
    }
}

pub(super) fn witness(i: usize) -> Voter {
    Voter {
        node: node(i),
        state: state(i),
    }
}

/// The answer of a store that holds this log.
fn answer(log: &mut BTreeMap<u64, Vec<u8>>, effect: storelog::Effect) -> storelog::Event {
    match effect {
        storelog::Effect::Read { op, slot } => {
            let found = log.get(&slot).cloned();
            let outcome = found.map_or(ReadOutcome::Absent, ReadOutcome::Found);
            storelog::Event::Read { op, slot, outcome }
        }
        storelog::Effect::Create { op, slot, bytes } => {
            let outcome = match log.contains_key(&slot) {
                true => CreateOutcome::Exists,
                false => CreateOutcome::Won,
            };
            log.entry(slot).or_insert(bytes);
            storelog::Event::Created { op, slot, outcome }
        }
    }
}

pub(super) const STORE: StoreUuid = StoreUuid([5; 16]);

pub(super) fn by_store(record: Record) -> Record {
    Record {
        arbiter: Arbiter::Store(STORE),
        ..record
    }
}

/// A worker that failed by itself.
pub(super) fn worker_exit(rank: u32) -> WorkerExit {
    WorkerExit {
        rank,
        local_rank: 0,
        pid: 7,
        code: 1,
        signal: None,
        hung: false,
        out_of_memory: None,
        damaged: None,
        at_ms: 5,
        tail: String::new(),
    }
}
