//! The agents, launchers and stores, and what happens to them.

mod effects;
mod launchers;

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use muster_protocol::agent::{Agent, Config, ConnId, Event, Restored, Stored};
use muster_protocol::job::Durable;
use muster_protocol::local::ToLauncher;
use muster_protocol::spec::JobSpec;
use muster_protocol::{Boot, JobKey, LauncherId, NodeId, Span, StateId, Time};

use super::judge::{Broken, Judge};
use crate::sim::clock::{Clock, MS, SEC, US};
use crate::sim::launcher::{Due, Habits, Launcher, NewLauncher};
use crate::sim::rng::Rng;
use crate::sim::store::{Store, UUID};
use crate::usual;

/// Time of a message, a frame on the socket, an answer of the store.
const HOP: u64 = MS;
/// For so long after the last launcher of a job ended its agents may not know.
const MOMENT: u64 = 10 * SEC;
/// Events at most in one call, far above what any case needs.
const STEPS: u64 = 30_000_000;
/// All clocks are this one: nothing here depends on their differences.
const CLOCK: Clock = Clock {
    offset: SEC,
    ppm: 0,
};

pub fn secs(n: u64) -> u64 {
    n * SEC
}

/// How the launchers of a job end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    /// SIGKILL for all, at any time: while they gather, start or train.
    Killed,
    Finishes,
    Fails,
    Cancelled,
    Leaves,
    /// It goes on until the test ends it.
    Stays,
}

/// State of a node's disk when its agent starts again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disk {
    Same,
    /// A new state directory.
    New,
    /// One job's blob does not decode.
    Damaged,
}

#[derive(Clone, Debug)]
pub struct Job {
    pub key: JobKey,
    pub nodes: Vec<usize>,
    pub fate: Fate,
    store: Option<Store>,
    pub launched: u64,
    /// When all its nodes trained for the first time.
    pub trained: Option<u64>,
    life: u64,
    /// Its id was used before.
    pub again: bool,
}

#[derive(Debug)]
struct Held {
    job: usize,
    node: usize,
    launcher: Launcher,
}

/// Messages and writes of an agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    pub messages: u64,
    pub bytes: u64,
    pub writes: u64,
}

#[derive(Debug)]
pub struct Node {
    pub id: NodeId,
    pub state: StateId,
    pub agent: Option<Agent>,
    /// It is cut off: nothing there answers a probe.
    dark: bool,
    pub traffic: Traffic,
    boot: u64,
    disks: u8,
    stored: BTreeMap<JobKey, Vec<u8>>,
    past: Vec<u8>,
    /// Of this start of the agent.
    token: u64,
    timer: Option<u64>,
}

impl Node {
    /// How much lies on its disk.
    pub fn stored_bytes(&self) -> usize {
        self.stored.values().map(Vec::len).sum::<usize>() + self.past.len()
    }
}

#[derive(Debug)]
enum Item {
    Agent {
        node: usize,
        token: u64,
        event: Event,
    },
    Timer {
        node: usize,
        token: u64,
    },
    Connects {
        launcher: u32,
    },
    Hears {
        launcher: u32,
        conn: ConnId,
        frame: ToLauncher,
    },
    Due {
        launcher: u32,
        due: Due,
    },
    /// The job's fate, unless it came to it already.
    Fate(usize),
    /// SIGKILL for one launcher.
    Kill(u32),
    Look,
}

#[derive(Debug)]
pub struct Fleet {
    /// Nanoseconds.
    pub now: u64,
    pub nodes: Vec<Node>,
    pub jobs: Vec<Job>,
    pub judge: Judge,
    pub rng: Rng,
    /// For how long a job without launchers is kept.
    pub slot_lease: Span,
    launchers: BTreeMap<u32, Held>,
    tokens: u32,
    conns: u64,
    /// The launcher behind each connection, and its node.
    of: BTreeMap<ConnId, (u32, usize)>,
    queue: BTreeMap<(u64, u64), Item>,
    seq: u64,
    /// When the last launcher of a job went.
    left: BTreeMap<JobKey, u64>,
}

fn address(node: usize) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, node as u8 + 1))
}

impl Fleet {
    pub fn new(nodes: usize, seed: u64, slot_lease: Span) -> Fleet {
        let node = |i: usize| Node {
            id: usual::config(i).node,
            state: usual::config(i).state,
            agent: None,
            dark: false,
            traffic: Traffic::default(),
            boot: 0,
            disks: 1,
            stored: BTreeMap::new(),
            past: Vec::new(),
            token: 0,
            timer: None,
        };
        let mut fleet = Fleet {
            now: 0,
            nodes: (0..nodes).map(node).collect(),
            jobs: Vec::new(),
            judge: Judge::default(),
            rng: Rng::new(seed),
            slot_lease,
            launchers: BTreeMap::new(),
            tokens: 0,
            conns: 0,
            of: BTreeMap::new(),
            queue: BTreeMap::new(),
            seq: 0,
            left: BTreeMap::new(),
        };
        (0..nodes).for_each(|i| fleet.wake(i, Disk::Same));
        fleet.put(SEC, Item::Look);
        fleet
    }

    // ---- what a test does ----

    /// The agent of a node starts; its launchers find it.
    pub fn wake(&mut self, i: usize, disk: Disk) {
        let n = &mut self.nodes[i];
        assert!(n.agent.is_none());
        n.dark = false;
        if disk == Disk::New {
            n.stored.clear();
            n.past.clear();
            n.renew();
        }
        let mut blobs: Vec<(String, Vec<u8>)> = n
            .stored
            .iter()
            .map(|(k, b)| (k.id.clone(), b.clone()))
            .collect();
        if disk == Disk::Damaged {
            let lives = |b: &(String, Vec<u8>)| {
                let head = Durable::decode(&b.1).ok().and_then(|d| d.head);
                head.is_some_and(|h| !h.kind.is_terminal())
            };
            let at = blobs.iter().position(lives).unwrap_or(0);
            blobs[at].1[0] ^= 0x55;
        }
        // As the agent's driver.
        let read = Restored::read(blobs, n.past.clone());
        let n = &mut self.nodes[i];
        let another = read.votes_lost.is_some();
        if another {
            n.stored
                .retain(|k, _| read.stored.jobs.iter().any(|(key, _)| key == k));
            n.past.clone_from(&read.stored.past);
            n.renew();
        }
        if another != (disk == Disk::Damaged) {
            self.judge.breaks(Broken::StateLost { node: i });
        }
        n.boot += 1;
        n.token += 1;
        let config = Config {
            state: n.state,
            boot: Boot(n.boot),
            seed: i as u64 + 100 * n.token,
            agent_grace: Span::from_secs(30),
            start_timeout: Span::from_secs(30),
            orphan_after: Span::from_secs(32),
            slot_lease: self.slot_lease,
            ..usual::config(i)
        };
        n.agent = Some(start(config, read.stored, CLOCK.local(self.now)));
        let token = n.token;
        for j in (0..self.nodes.len()).filter(|j| *j != i) {
            if self.nodes[j].agent.is_some() {
                for (of, with) in [(i, j), (j, i)] {
                    let (node, addr, observed) = (
                        self.nodes[with].id,
                        SocketAddr::new(address(with), 7000),
                        address(of),
                    );
                    self.tell(
                        of,
                        Event::Connected {
                            node,
                            addr,
                            observed,
                        },
                    );
                }
            }
        }
        let here = self.launchers.iter().filter(|(_, l)| l.node == i);
        for launcher in here.map(|(k, _)| *k).collect::<Vec<_>>() {
            self.put(5 * HOP, Item::Connects { launcher });
        }
        self.timer(i, token);
    }

    /// As [`Fleet::sleep`], and nobody can see what became of its launchers.
    pub fn cut_off(&mut self, i: usize) {
        self.nodes[i].dark = true;
        self.sleep(i);
    }

    /// The agent of a node is killed; its launchers go on.
    pub fn sleep(&mut self, i: usize) {
        let id = self.nodes[i].id;
        self.nodes[i].agent = None;
        self.nodes[i].timer = None;
        for j in (0..self.nodes.len()).filter(|j| *j != i) {
            self.tell(j, Event::Disconnected { node: id });
        }
        let here = self.launchers.iter().filter(|(_, l)| l.node == i);
        for k in here.map(|(k, _)| *k).collect::<Vec<_>>() {
            let now = self.now;
            if let Some(l) = self.launchers.get_mut(&k).map(|l| &mut l.launcher) {
                let out = l.disconnected(now);
                self.launcher_out(k, out);
            }
        }
    }

    /// An id as `muster run` draws it.
    pub fn random_id(&mut self) -> String {
        format!("train-{:08x}", self.rng.next_u64() as u32)
    }

    /// Launchers of a job start on these nodes, all of which it wants; it lives for so long once it trains, or,
    /// if they are killed, from now on.
    pub fn launch(
        &mut self,
        id: &str,
        nodes: &[usize],
        store: bool,
        fate: Fate,
        life: u64,
    ) -> usize {
        let key = JobKey {
            cluster: "c".into(),
            owner: "u".into(),
            id: id.into(),
        };
        let job = self.jobs.len();
        let before = self.jobs.iter().rfind(|j| j.key == key);
        let (before_is, kept) = (before.is_some(), before.and_then(|j| j.store.clone()));
        self.jobs.push(Job {
            key,
            nodes: nodes.to_vec(),
            fate,
            store: store.then(|| kept.unwrap_or_default()),
            launched: self.now,
            trained: None,
            life,
            again: before_is,
        });
        let count = u16::try_from(nodes.len()).unwrap_or(u16::MAX);
        for node in nodes {
            self.tokens += 1;
            let token = self.tokens;
            let new = NewLauncher {
                id: LauncherId(u64::from(token).to_be_bytes()),
                token,
                index: *node,
                clock: CLOCK,
                job: id.into(),
                spec: JobSpec {
                    min_nodes: count,
                    max_nodes: count,
                    ..JobSpec::default()
                },
                store: store.then_some(UUID),
                slots: 1,
                habits: Habits {
                    word: SEC / 2,
                    ..Habits::default()
                },
            };
            let launcher = Launcher::new(new, self.now);
            let node = *node;
            self.launchers.insert(
                token,
                Held {
                    job,
                    node,
                    launcher,
                },
            );
            self.put(HOP, Item::Connects { launcher: token });
        }
        if fate == Fate::Killed {
            self.put(life, Item::Fate(job));
        }
        job
    }

    /// Ends a job's launchers like this, now.
    pub fn end(&mut self, job: usize, fate: Fate) {
        self.jobs[job].fate = fate;
        self.fate(job);
    }

    /// Kills the launcher of a job on one node.
    pub fn kill_on(&mut self, job: usize, node: usize) {
        let here = |l: &Held| (l.job, l.node) == (job, node);
        let here = self.launchers.iter().filter(|(_, l)| here(l));
        for launcher in here.map(|(k, _)| *k).collect::<Vec<_>>() {
            self.put(0, Item::Kill(launcher));
        }
    }

    pub fn pass(&mut self, ns: u64) -> Result<(), Broken> {
        let until = self.now + ns;
        for _ in 0..STEPS {
            let first = self.queue.first_entry().filter(|e| e.key().0 <= until);
            let Some(first) = first else {
                self.now = until;
                return Ok(());
            };
            let ((at, _), item) = first.remove_entry();
            self.now = at;
            self.item(item);
            if let Some(broken) = self.judge.broken.take() {
                return Err(broken);
            }
        }
        Err(Broken::RunsWild)
    }

    /// Waits until a job trains on all its nodes, for so long at most.
    pub fn until_trains(&mut self, job: usize, limit: u64) -> Result<u64, Broken> {
        let until = self.now + limit;
        while self.jobs[job].trained.is_none() && self.now < until {
            self.pass(10 * MS)?;
        }
        let job = &self.jobs[job];
        match job.trained {
            Some(at) => Ok(at - job.launched),
            None => Err(Broken::DoesNotStart {
                job: job.key.id.clone(),
                nodes: job.nodes.clone(),
                after: Span(limit),
            }),
        }
    }

    // ---- what can be seen ----

    /// Launchers of a job that are there.
    fn launchers_of(&self, job: usize) -> usize {
        self.launchers.values().filter(|l| l.job == job).count()
    }

    /// A launcher that is still there, of a job that ended.
    pub fn not_ended(&self) -> Option<String> {
        let mut jobs = self.launchers.values().map(|l| &self.jobs[l.job]);
        let ended = jobs.find(|j| j.fate != Fate::Stays);
        ended.map(|j| j.key.id.clone())
    }

    /// Starts that took longer than this, or that are still waited for since before that.
    pub fn slow_starts(&self, limit: u64) -> Vec<(String, Vec<usize>, Span)> {
        let jobs = self.jobs.iter().enumerate();
        let waits = |(at, job): (usize, &Job)| {
            let took = match job.trained {
                Some(at) => at - job.launched,
                None if self.launchers_of(at) == job.nodes.len() => self.now - job.launched,
                None => 0,
            };
            (took > limit && !job.again)
                .then(|| (job.key.id.clone(), job.nodes.clone(), Span(took)))
        };
        jobs.filter_map(waits).collect()
    }

    // ---- how it goes on ----

    fn put(&mut self, ns: u64, item: Item) {
        self.seq += 1;
        self.queue.insert((self.now + ns, self.seq), item);
    }

    fn tell(&mut self, node: usize, event: Event) {
        self.tell_after(HOP, node, event);
    }

    fn tell_after(&mut self, ns: u64, node: usize, event: Event) {
        let n = &self.nodes[node];
        if n.agent.is_some() {
            let token = n.token;
            self.put(ns, Item::Agent { node, token, event });
        }
    }

    fn item(&mut self, item: Item) {
        let now = self.now;
        match item {
            Item::Agent { node, token, event } => {
                let n = &mut self.nodes[node];
                let Some(agent) = n.agent.as_mut().filter(|_| n.token == token) else {
                    return;
                };
                if let Err(error) = agent.handle(event, CLOCK.local(now)) {
                    self.judge.refused(node, error);
                }
                self.carry_out(node);
            }
            Item::Timer { node, token } => {
                let n = &mut self.nodes[node];
                if n.token != token || n.timer != Some(now) {
                    return;
                }
                n.timer = None;
                if let Some(agent) = &mut n.agent {
                    agent.handle_timeout(CLOCK.local(now));
                    self.carry_out(node);
                }
            }
            Item::Connects { launcher } => {
                let Some(held) = self.launchers.get_mut(&launcher) else {
                    return;
                };
                if self.nodes[held.node].agent.is_none() || held.launcher.conn.is_some() {
                    return;
                }
                self.conns += 1;
                let conn = ConnId(self.conns);
                self.of.insert(conn, (launcher, held.node));
                let out = held.launcher.connected(conn, now);
                self.launcher_out(launcher, out);
            }
            Item::Hears {
                launcher,
                conn,
                frame,
            } => {
                let held = self.launchers.get_mut(&launcher).map(|h| &mut h.launcher);
                if let Some(l) = held.filter(|l| l.conn == Some(conn)) {
                    let out = l.receive(frame, now);
                    self.launcher_out(launcher, out);
                }
            }
            Item::Due { launcher, due } => {
                let found = self.answers_guard(due);
                if let Some(held) = self.launchers.get_mut(&launcher) {
                    let out = held.launcher.due(due, found, now);
                    self.launcher_out(launcher, out);
                }
            }
            Item::Fate(job) => self.fate(job),
            Item::Kill(launcher) => self.ends(launcher),
            Item::Look => {
                self.look();
                self.put(SEC, Item::Look);
            }
        }
    }

    fn look(&mut self) {
        let with: BTreeSet<&JobKey> = self
            .launchers
            .values()
            .map(|l| &self.jobs[l.job].key)
            .collect();
        let recent = self.now.saturating_sub(MOMENT);
        let left = |key: &JobKey| self.left.get(key).is_some_and(|at| *at > recent);
        for (at, node) in self.nodes.iter().enumerate() {
            let there = |key: &JobKey| with.contains(key) || left(key);
            self.judge.look(at, node, there);
        }
    }

    fn timer(&mut self, node: usize, token: u64) {
        let n = &self.nodes[node];
        let due = n.agent.as_ref().and_then(Agent::poll_timeout);
        let at = due.map(|(at, _)| CLOCK.global(at).max(self.now + US));
        if at.is_none_or(|at| n.timer == Some(at)) {
            return;
        }
        self.nodes[node].timer = at;
        let ns = at.unwrap_or(self.now) - self.now;
        self.put(ns, Item::Timer { node, token });
    }
}

impl Node {
    /// As a state directory that draws another state id.
    fn renew(&mut self) {
        self.disks += 1;
        self.state.0[7] ^= self.disks;
        self.boot = 0;
    }
}

#[expect(clippy::expect_used, reason = "what an agent stored it can read")]
fn start(config: Config, stored: Stored, now: Time) -> Agent {
    Agent::new(config, stored, now).expect("what was stored")
}
