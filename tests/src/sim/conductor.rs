//! Draws when and whether things happen: delays, losses, faults. Everything that it decides becomes
//! a [`Step`] of the world, in one order.

mod links;
mod operator;
mod pauses;
mod storage;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::sync::Arc;

use muster_protocol::NodeId;
use muster_protocol::agent::ConnId;
use muster_protocol::local::ToAgent;

use super::clock::{MS, SEC, US};
use super::invariants::Violation;
use super::liveness::{self, Settling};
use super::net::Net;
use super::rng::{Fnv, Rng};
use super::setup::{Fault, Setup};
use super::step::{Found, Request, Step};
use super::world::World;

/// A timer that is due this often without time going by is a busy loop.
const MAX_BUSY: u32 = 300;
/// Far above what any case needs.
const MAX_EVENTS: u64 = 3_000_000;
/// A connection over which nothing comes back is given up after this time and up to twice that.
const SILENT_CLOSE: u64 = 7 * SEC;
/// The store's client gives up after this time.
const STORE_LIMIT: u64 = SEC;

/// Items of the queue.
#[derive(Clone, Debug)]
pub(super) enum Item {
    Do(Step),
    /// A pause is over, unless another has begun.
    Awake {
        node: usize,
    },
    Fault(Fault),
    Undo(Fault),
    /// The agent is started again, perhaps on a new disk.
    Revive {
        node: usize,
        new_disk: bool,
    },
    /// The machine has power again.
    Light {
        node: usize,
    },
    /// An armed crash that has not come by now, comes now.
    KillAtLast {
        node: usize,
        agent: u32,
    },
    Relaunch {
        node: usize,
    },
    /// The launcher is killed if it is still this one.
    Overdue {
        node: usize,
        launcher: u32,
    },
    Timer {
        node: usize,
        agent: u32,
    },
    Dial {
        a: usize,
        b: usize,
        epoch: u32,
    },
    /// A cut connection is noticed.
    Silent {
        a: usize,
        b: usize,
        epoch: u32,
    },
    /// The other end of a connection learns that this one is gone.
    Reset {
        node: usize,
        peer: usize,
        epoch: u32,
    },
    Probe {
        node: usize,
        agent: u32,
        peer: NodeId,
        id: u64,
        guard: Option<(u8, u16)>,
    },
    /// An agent looks at the guard of a launcher whose connection closed, and has told this of it.
    LookAtGuard {
        node: usize,
        agent: u32,
        conn: ConnId,
        launcher: u32,
        told: Option<Found>,
    },
    /// A request to a launcher that was stopped.
    Ask(Request),
    Checkpoint,
    Heal,
    Look,
}

#[derive(Debug)]
pub struct Conductor {
    pub world: World,
    pub setup: Arc<Setup>,
    pub(super) rng: Rng,
    pub(super) net: Net,
    pub hash: Fnv,
    /// Every step, when asked for.
    pub log: Option<Vec<(u64, Step)>>,
    /// Some launchers that ended are started again, by chance.
    pub relaunches: bool,
    queue: BTreeMap<(u64, u64), Item>,
    seq: u64,
    pub(super) now: u64,
    timers: Vec<Option<(u32, u64)>>,
    busy: Vec<u32>,
    paused_until: Vec<u64>,
    pub(super) launcher_paused_until: Vec<u64>,
    /// Items that came for an agent while it was paused, in order.
    asleep: Vec<Vec<Item>>,
    /// How long an agent that dies now stays away, and whether it loses its disk.
    pub(super) fate: Vec<(u64, bool)>,
    socket_in: Vec<u64>,
    socket_out: Vec<u64>,
    pub(super) healed: bool,
    settling: Settling,
    done: bool,
    checkpoints: u64,
    /// How long the worker hangs that begins to now.
    pub(super) thaws_after: Option<u64>,
    pub(super) store_slow: u64,
    pub(super) reads_fail: u32,
    pub(super) unknown: (u32, u64),
    pub(super) store_cut: Vec<u32>,
    /// Slots of the log that a node does not see, though they are there.
    pub unseen: BTreeSet<(usize, u64)>,
    /// The launcher that last opened its store, and the one that waits for a store that does not
    /// answer; 0 for none.
    opened: Vec<u32>,
    behind_open: Vec<u32>,
}

impl Conductor {
    pub fn new(setup: Setup) -> Conductor {
        let setup = Arc::new(setup);
        let n = setup.nodes.len();
        let mut this = Conductor {
            world: World::new(setup.clone()),
            rng: Rng::new(setup.seed ^ 0x636f_6e64),
            net: Net::new(n, setup.net),
            hash: Fnv::default(),
            log: None,
            relaunches: true,
            queue: BTreeMap::new(),
            seq: 0,
            now: 0,
            timers: vec![None; n],
            busy: vec![0; n],
            paused_until: vec![0; n],
            launcher_paused_until: vec![0; n],
            asleep: vec![Vec::new(); n],
            fate: vec![(SEC, false); n],
            socket_in: vec![0; n],
            socket_out: vec![0; n],
            healed: false,
            settling: Settling::default(),
            done: false,
            checkpoints: 0,
            thaws_after: None,
            store_slow: 0,
            reads_fail: 0,
            unknown: (0, 0),
            store_cut: vec![0; n],
            unseen: BTreeSet::new(),
            opened: vec![0; n],
            behind_open: vec![0; n],
            setup: setup.clone(),
        };
        for (node, n) in setup.nodes.iter().enumerate() {
            this.at(n.agent_at, Item::Do(Step::AgentStart { node }));
            if let Some(at) = n.launcher_at {
                this.at(at, Item::Do(Step::LauncherStart { node }));
            }
        }
        for (at, fault) in &setup.faults {
            this.at(*at, Item::Fault(fault.clone()));
        }
        if setup.commit_every > 0 {
            this.at(setup.commit_every, Item::Checkpoint);
        }
        this.at(setup.heal_at, Item::Heal);
        this
    }

    pub(super) fn at(&mut self, at: u64, item: Item) {
        self.seq += 1;
        self.queue.insert((at.max(self.now), self.seq), item);
    }

    pub(super) fn after(&mut self, ns: u64, item: Item) {
        self.at(self.now + ns, item);
    }

    /// Runs to the end: until the cluster has come to rest, or a rule is broken.
    pub fn run(&mut self) -> Result<(), Violation> {
        self.run_until(u64::MAX)
    }

    /// Has this happen now.
    pub fn put(&mut self, step: Step) {
        self.after(0, Item::Do(step));
    }

    /// Has this fault befall it now.
    pub fn befall_now(&mut self, fault: Fault) {
        self.after(0, Item::Fault(fault));
    }

    /// Runs until it is later than this; or to the end, as [`run`](Self::run) does.
    pub fn run_until(&mut self, until: u64) -> Result<(), Violation> {
        while !self.done {
            let first = self.queue.first_entry();
            let Some(first) = first.filter(|first| first.key().0 <= until) else {
                if until < u64::MAX {
                    (self.now, self.world.now) = (until, until);
                }
                return Ok(());
            };
            let ((at, _), item) = first.remove_entry();
            self.now = at;
            self.world.now = at;
            self.item(item)?;
            if self.world.coverage.events > MAX_EVENTS {
                let events = self.world.coverage.events;
                return Err(Violation::TooManyEvents { events });
            }
        }
        Ok(())
    }

    /// Carries a step out now.
    pub(super) fn step(&mut self, step: Step) -> Result<(), Violation> {
        if let Some(node) = pauses::for_machine(&step) {
            self.wake_up(node)?;
        }
        if let Step::AgentKill { node } = step
            && !self.world.nodes[node].writes.is_empty()
            && self.rng.chance(500)
        {
            self.step(Step::Torn { node })?;
        }
        self.hash.number(self.now);
        match &step {
            Step::Deliver { to, from, frame } => {
                self.hash.number((to * 64 + from) as u64);
                self.hash.bytes(frame);
            }
            Step::Timer { node, .. } => self.hash.number(*node as u64),
            other => {
                // Writing to the hash cannot fail.
                let _ = write!(self.hash, "{other:?}");
            }
        }
        if let Some(log) = &mut self.log {
            log.push((self.now, step.clone()));
        }
        self.world.apply(self.now, step)?;
        for request in std::mem::take(&mut self.world.requests) {
            self.request(request)?;
        }
        self.set_timers()
    }

    fn set_timers(&mut self) -> Result<(), Violation> {
        for node in 0..self.world.nodes.len() {
            let n = &self.world.nodes[node];
            let due = n.agent.as_ref().and_then(|a| a.poll_timeout());
            let Some((local, why)) = due else {
                self.timers[node] = None;
                continue;
            };
            let wanted = n.clock.global(local);
            let at = wanted.max(self.now + US);
            let token = n.agent_token;
            match self.timers[node] {
                Some((t, planned)) if t == token && planned == at => continue,
                // Already due as soon as can be.
                Some((t, planned)) if t == token && wanted <= self.now && planned <= at => continue,
                _ => {}
            }
            if self.busy[node] > MAX_BUSY {
                return Err(Violation::BusyTimer {
                    node,
                    why: why.to_owned(),
                });
            }
            self.timers[node] = Some((token, at));
            self.at(at, Item::Timer { node, agent: token });
        }
        Ok(())
    }

    pub(super) fn item(&mut self, item: Item) -> Result<(), Violation> {
        match item {
            Item::Do(step) => {
                if let Some(node) = pauses::for_agent(&step)
                    && self.paused_until[node] > self.now
                {
                    if self.asleep[node].is_empty() {
                        let at = self.paused_until[node];
                        self.at(at, Item::Awake { node });
                    }
                    self.asleep[node].push(Item::Do(step));
                    return Ok(());
                }
                if let Some((at, step)) = self.store_answer_late(&step) {
                    self.at(at, Item::Do(step));
                    return Ok(());
                }
                if let Step::LauncherConnect { node, launcher } = step
                    && self.opens_store(node, launcher)
                {
                    return Ok(());
                }
                if let Step::Deliver { to, from, .. } = step
                    && !self.net.conn(from, to).up
                    && !self.rng.chance(100)
                {
                    return Ok(());
                }
                self.step(step)
            }
            Item::Timer { node, agent } => {
                if self.timers[node] != Some((agent, self.now)) {
                    return Ok(());
                }
                if self.paused_until[node] > self.now {
                    let at = self.paused_until[node];
                    self.timers[node] = Some((agent, at));
                    self.at(at, Item::Timer { node, agent });
                    return Ok(());
                }
                self.timers[node] = None;
                self.step(Step::Timer { node, agent })?;
                match self.timers[node] {
                    Some((_, at)) if at <= self.now + 10 * US => self.busy[node] += 1,
                    _ => self.busy[node] = 0,
                }
                Ok(())
            }
            Item::Awake { node } => {
                self.awake(node);
                Ok(())
            }
            Item::Fault(fault) => self.befall(fault),
            Item::Undo(fault) => self.undo(&fault),
            Item::Revive { node, new_disk } => {
                if self.net.dark[node] {
                    return Ok(());
                }
                if new_disk {
                    self.step(Step::NewDisk { node })?;
                }
                self.step(Step::AgentStart { node })
            }
            Item::Light { node } => {
                self.net.dark[node] = false;
                Ok(())
            }
            Item::KillAtLast { node, agent } => {
                if self.world.nodes[node].agent_token == agent {
                    self.step(Step::AgentKill { node })?;
                }
                Ok(())
            }
            Item::Relaunch { node } => match self.net.dark[node] {
                true => Ok(()),
                false => self.step(Step::LauncherStart { node }),
            },
            Item::Overdue { node, launcher } => {
                let l = self.world.nodes[node].launcher.as_ref();
                match l.is_some_and(|l| l.token == launcher) {
                    true => self.step(Step::LauncherKill { node }),
                    false => Ok(()),
                }
            }
            Item::Dial { a, b, epoch } => self.dial(a, b, epoch),
            Item::Silent { a, b, epoch } => self.silent(a, b, epoch),
            Item::Reset { node, peer, epoch } => {
                let conn = *self.net.conn(node, peer);
                if conn.epoch != epoch || conn.up {
                    return Ok(());
                }
                let agent = self.world.nodes[node].agent_token;
                self.item(Item::Do(Step::Disconnect { node, agent, peer }))
            }
            Item::Probe {
                node,
                agent,
                peer,
                id,
                guard,
            } => {
                self.probed(node, agent, peer, id, guard);
                Ok(())
            }
            Item::LookAtGuard {
                node,
                agent,
                conn,
                launcher,
                told,
            } => {
                self.look_at_guard(node, agent, conn, launcher, told);
                Ok(())
            }
            Item::Ask(request) => {
                self.store_asked(request);
                Ok(())
            }
            Item::Checkpoint => self.checkpoint(),
            Item::Heal => self.heal(),
            Item::Look => self.look(),
        }
    }

    pub(super) fn request(&mut self, request: Request) -> Result<(), Violation> {
        match request {
            Request::AgentUp { node } => {
                self.pause(node, 0);
                for peer in 0..self.world.nodes.len() {
                    self.redial(node, peer);
                }
                self.seek_agent(node);
            }
            Request::AgentDown { node } => self.agent_down(node),
            Request::Write { node, agent } => {
                let most = match self.setup.slow_disk {
                    Some((slow, most)) if slow == node && !self.healed => most,
                    _ => self.setup.disk,
                };
                let ns = if most > 0 { self.rng.below(most) } else { 0 };
                self.after(ns, Item::Do(Step::Written { node, agent }));
            }
            Request::Net { from, to, frame } => {
                if self.net.conn(from, to).up {
                    for at in self.net.arrivals(&mut self.rng, from, to, self.now) {
                        let frame = frame.clone();
                        self.at(at, Item::Do(Step::Deliver { to, from, frame }));
                    }
                }
            }
            Request::Probe {
                node,
                agent,
                peer,
                id,
                guard,
            } => {
                let Some(to) = self.world.index(peer) else {
                    return Ok(());
                };
                let there = self.net.latency(&mut self.rng, node, to);
                self.after(
                    there,
                    Item::Probe {
                        node,
                        agent,
                        peer,
                        id,
                        guard,
                    },
                );
            }
            Request::ToLauncher { node, conn, frame } => {
                let at = self.socket(node, true);
                self.at(at, Item::Do(Step::LauncherHears { node, conn, frame }));
            }
            Request::ToAgent {
                node,
                agent,
                conn,
                frame,
            } => {
                let store = self.setup.store && matches!(frame, ToAgent::Register(_));
                let heard = Item::Do(Step::AgentHears {
                    node,
                    agent,
                    conn,
                    store,
                    frame,
                });
                let at = self.socket(node, false);
                self.at(at, heard);
            }
            Request::LauncherWait {
                node,
                launcher,
                due,
                ns,
                exact,
            } => {
                let ns = if exact { ns } else { self.rng.delay(ns) };
                self.after(
                    ns,
                    Item::Do(Step::LauncherDue {
                        node,
                        launcher,
                        due,
                    }),
                );
            }
            Request::AskLease {
                node,
                agent,
                launcher,
            } => {
                // Over a connection of its own.
                let (ns, asked) = (self.rng.delay(200 * US), self.now);
                let step = Step::LeaseAsked {
                    node,
                    agent,
                    launcher,
                    asked,
                };
                self.after(ns, Item::Do(step));
            }
            Request::LauncherUp { node } => self.seek_agent(node),
            Request::Hangs { node, digest } => {
                if let Some(ns) = self.thaws_after {
                    self.after(ns, Item::Do(Step::Thaw { node, digest }));
                }
            }
            Request::LauncherDown {
                node,
                agent,
                conn,
                launcher,
            } => {
                if let Some(conn) = conn {
                    let late = self.rng.below(10 * MS);
                    let gone = Item::LookAtGuard {
                        node,
                        agent,
                        conn,
                        launcher,
                        told: None,
                    };
                    let at = self.socket(node, false) + late;
                    self.socket_in[node] = at;
                    self.at(at, gone);
                }
            }
            Request::LauncherEnded { node } => {
                if self.relaunches && !self.healed && self.rng.chance(400) {
                    let ns = self.rng.between(200 * MS, 6 * SEC);
                    self.after(ns, Item::Relaunch { node });
                }
            }
            other => self.store_asked(other),
        }
        Ok(())
    }

    /// When a frame that is written to the unix socket now is read at the other end.
    fn socket(&mut self, node: usize, to_launcher: bool) -> u64 {
        let last = match to_launcher {
            true => &mut self.socket_out[node],
            false => &mut self.socket_in[node],
        };
        let at = (self.now + self.rng.delay(200 * US)).max(*last + 1);
        *last = at;
        at
    }

    fn seek_agent(&mut self, node: usize) {
        let n = &self.world.nodes[node];
        if let Some(l) = &n.launcher
            && n.agent.is_some()
        {
            let launcher = l.token;
            self.seek(node, launcher);
        }
    }

    pub(super) fn seek(&mut self, node: usize, launcher: u32) {
        let ns = self.rng.between(5 * MS, 250 * MS);
        self.after(ns, Item::Do(Step::LauncherConnect { node, launcher }));
    }

    /// The workers of the running generation have a checkpoint ready, and tell their leader.
    fn checkpoint(&mut self) -> Result<(), Violation> {
        let every = self.setup.commit_every;
        if !self.healed {
            let ns = every / 2 + self.rng.below(every);
            self.after(ns, Item::Checkpoint);
        }
        // Workers that save into slots have their own.
        let stands_in = self.setup.saving.is_none();
        let Some((leader, _)) = self.training().filter(|_| stands_in) else {
            return Ok(());
        };
        let step = self.now / super::launcher::STEP;
        self.checkpoints += 1;
        let mut manifest = [0xc0; 32];
        manifest[24..].copy_from_slice(&self.checkpoints.to_be_bytes());
        let manifest = muster_protocol::Digest(manifest);
        self.item(Item::Do(Step::Checkpoint {
            node: leader,
            step,
            manifest,
        }))
    }

    /// A generation all of whose members train, with its leader's index.
    pub fn training(&self) -> Option<(usize, muster_protocol::Digest)> {
        let trains = |n: &super::world::Node, d| {
            let run = n.launcher.as_ref().and_then(|l| l.training());
            run.is_some_and(|r| r.start.digest == d)
        };
        self.world.nodes.iter().enumerate().find_map(|(i, n)| {
            let digest = n.launcher.as_ref()?.training()?.start.digest;
            let record = self.world.truth.records.get(&digest)?;
            let all = |id| {
                self.world
                    .nodes
                    .iter()
                    .any(|o| o.id == id && trains(o, digest))
            };
            let complete = record.members.iter().all(|m| all(m.node));
            (record.leader() == Some(n.id) && complete).then_some((i, digest))
        })
    }

    fn heal(&mut self) -> Result<(), Violation> {
        self.healed = true;
        self.net.heal();
        self.store_slow = 0;
        self.reads_fail = 0;
        self.unknown = (0, 0);
        self.store_cut.fill(0);
        for node in 0..self.world.nodes.len() {
            self.wake_up(node)?;
            self.pause(node, 0);
            self.store_opens(node);
            if self.world.nodes[node].paused {
                self.step(Step::Pause {
                    node,
                    paused: false,
                })?;
            }
            self.step(Step::LauncherPause {
                node,
                paused: false,
            })?;
            self.step(Step::Unkillable { node, until: 0 })?;
            self.step(Step::StoreStale { node, by: 0 })?;
            if self.world.nodes[node].full {
                self.step(Step::DiskFull { node, full: false })?;
            }
            let ns = self.rng.below(SEC);
            self.after(
                ns,
                Item::Revive {
                    node,
                    new_disk: false,
                },
            );
            for peer in 0..node {
                self.redial(node, peer);
            }
        }
        self.after(SEC, Item::Look);
        Ok(())
    }

    /// Has the cluster come to rest?
    fn look(&mut self) -> Result<(), Violation> {
        let state = liveness::settled(&self.world);
        let over = self.now >= self.setup.heal_at + self.setup.settle;
        match self.settling.judge(self.now, state, over) {
            Ok(true) => self.done = true,
            Ok(false) => self.after(250 * MS, Item::Look),
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }
}
