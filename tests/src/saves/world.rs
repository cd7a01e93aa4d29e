//! The world: time, the network, the store, faults, and what is planned when.

use std::collections::BTreeMap;

use muster_protocol::checkpoint::{
    Cause, Flaws, LeaderEvent, NodeEvent, Save, SlotId, ToLeader, ToNode, Wants, Written,
};
use muster_protocol::{Digest, Span, Time, storelog};

use super::agent::Agent;
use super::claims::{node_id, record};
use super::disk::{Disk, Token};
use super::truth::{Truth, Violation};
use crate::sim::rng::Rng;
use crate::sim::store::Store;

/// How long faults go on, and how long all may take afterwards until a save is committed.
const FAULTS: Span = Span::from_secs(30);
const QUIET: Span = Span::from_secs(120);

/// How long a drill goes on before all have to come to rest.
const DRILL: Span = Span::from_secs(10);

/// Parts that are left out on purpose.
#[derive(Clone, Copy, Debug, Default)]
pub struct Plant {
    pub cores: Flaws,
    pub log: storelog::Flaws,
    /// Writers say that a file is durable before it is synced.
    pub skip_sync: bool,
}

/// Instead of faults at random: one crash, before the effect of this number.
#[derive(Clone, Copy, Debug)]
pub struct Drill {
    pub at: u64,
    /// The whole machine loses its power.
    pub power: bool,
}

/// How often what happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub events: u64,
    pub claims: u64,
    pub opened: u64,
    pub committed: u64,
    pub given_up: u64,
    pub refused_commits: u64,
    pub retired: u64,
    pub deleted: u64,
    pub crashes: u64,
    pub links: u64,
    pub power: u64,
    pub busy: u64,
    pub restarts_prepared: u64,
    pub rejected: u64,
    pub effects: u64,
}

#[derive(Debug)]
pub struct Report {
    pub violation: Option<Violation>,
    pub counts: Counts,
    /// Of everything that happened: two runs of one seed have the same.
    pub fingerprint: u64,
    /// The newest happenings, for who looks into a violation.
    pub log: Vec<String>,
}

#[derive(Clone, Debug)]
pub(super) enum Ev {
    Tick(usize, u64),
    ToNode(usize, ToNode),
    ToLeader(usize, usize, ToLeader),
    Read(usize, u64, u64, u64),
    Create {
        agent: usize,
        boot: u64,
        op: u64,
        slot: u64,
        bytes: Vec<u8>,
        /// It reaches the store; an answer comes back.
        lands: bool,
        answers: bool,
    },
    Refresh(usize, u64),
    WriteEnd {
        agent: usize,
        boot: u64,
        launcher: u64,
        slot: SlotId,
        save: Save,
        path: String,
        token: Option<Token>,
    },
    Synced(String),
    Assembled(usize, u64, Save, Vec<Written>),
    Wants {
        agent: usize,
        launcher: u64,
        generation: Digest,
        k: u16,
        step: u64,
        tries: u32,
    },
    Filled {
        agent: usize,
        launcher: u64,
        slot: SlotId,
        token: Token,
        dies: bool,
    },
    Release(usize, u64),
    Review(usize, u64),
    Save,
    Claim,
    Chaos,
    Up(usize),
}

#[derive(Debug)]
pub(super) struct World {
    pub now: Time,
    pub rng: Rng,
    pub agents: Vec<Agent>,
    pub store: Store,
    pub disk: Disk,
    pub truth: Truth,
    pub plant: Plant,
    pub drill: Option<Drill>,
    pub counts: Counts,
    pub quiet: bool,
    /// In the quiet phase: the save that has to be committed.
    pub goal: Option<(Digest, u64)>,
    queue: BTreeMap<(Time, u64), Ev>,
    seq: u64,
    step: u64,
    nonce: u64,
    fingerprint: crate::sim::rng::Fnv,
    log: Vec<String>,
}

/// Runs one seed to its end, or to the first violation.
pub fn run(seed: u64, plant: Plant) -> Report {
    run_with(seed, plant, None)
}

/// As [`run`]; with a drill nothing else goes wrong.
pub fn run_with(seed: u64, plant: Plant, drill: Option<Drill>) -> Report {
    let mut world = World::new(seed, plant, drill);
    let violation = world.go().err();
    let mut log = std::mem::take(&mut world.log);
    let surplus = log.len().saturating_sub(150);
    log.drain(..surplus);
    Report {
        violation,
        counts: world.counts,
        fingerprint: world.fingerprint.0,
        log,
    }
}

impl World {
    fn new(seed: u64, plant: Plant, drill: Option<Drill>) -> World {
        let mut rng = Rng::new(seed);
        let nodes = rng.between(2, 4) as usize;
        let agents = (0..nodes)
            .map(|i| Agent::new(i, rng.between(1, 2) as u16))
            .collect();
        let mut world = World {
            now: Time::ZERO + Span::from_secs(1),
            rng,
            agents,
            store: Store::default(),
            disk: Disk::default(),
            truth: Truth::default(),
            plant,
            drill,
            counts: Counts::default(),
            quiet: false,
            goal: None,
            queue: BTreeMap::new(),
            seq: 0,
            step: 0,
            nonce: 0,
            fingerprint: crate::sim::rng::Fnv::default(),
            log: Vec::new(),
        };
        for a in 0..nodes {
            world.start(a);
        }
        for (ev, ms) in [(Ev::Claim, 100), (Ev::Save, 800), (Ev::Chaos, 2_000)] {
            world.after(ms, ev);
        }
        world
    }

    pub(super) fn after(&mut self, ms: u64, ev: Ev) {
        self.seq += 1;
        let at = self.now + Span::from_millis(ms);
        self.queue.insert((at, self.seq), ev);
    }

    pub(super) fn at(&mut self, at: Time, ev: Ev) {
        self.seq += 1;
        self.queue.insert((at.max(self.now), self.seq), ev);
    }

    pub(super) fn note(&mut self, text: String) {
        self.fingerprint.bytes(text.as_bytes());
        // What is said again and again says nothing new.
        if self
            .log
            .iter()
            .rev()
            .take(16)
            .any(|line| line.ends_with(&text))
        {
            return;
        }
        self.log
            .push(format!("{:9.3} {text}", self.now.0 as f64 / 1e9));
    }

    fn go(&mut self) -> Result<(), Violation> {
        let faults = self.now + self.drill.map_or(FAULTS, |_| DRILL);
        let end = faults + QUIET;
        while let Some(((at, _), ev)) = self.queue.pop_first() {
            self.now = at;
            self.counts.events += 1;
            if !self.quiet && self.now >= faults {
                self.quiet = true;
                for a in 0..self.agents.len() {
                    self.up(a);
                }
            }
            self.handle(ev)?;
            self.truth.check(&self.disk)?;
            if self.goal.is_some_and(|goal| self.reached(goal)) {
                return self.slots_are_free();
            }
            if self.now >= end {
                return Err(Violation {
                    name: "live",
                    text: format!("no save is committed {QUIET} after the last fault"),
                });
            }
        }
        Ok(())
    }

    /// The save of the quiet phase is committed, and every node knows.
    fn reached(&self, (generation, step): (Digest, u64)) -> bool {
        let told = |(save, _): &(Save, Digest)| (save.generation, save.step) == (generation, step);
        self.truth.told.iter().any(told)
            && self.agents.iter().all(|a| {
                a.memory
                    .values()
                    .all(|m| m.token.is_none_or(|t| t.step > step))
            })
    }

    fn slots_are_free(&self) -> Result<(), Violation> {
        let held = |a: &Agent| a.memory.values().any(|m| m.readers > 0);
        match self.agents.iter().any(held) {
            true => Err(Violation {
                name: "live",
                text: "a slot is still read after its save was committed".into(),
            }),
            false => Ok(()),
        }
    }

    fn handle(&mut self, ev: Ev) -> Result<(), Violation> {
        match ev {
            Ev::Tick(a, boot) => {
                if self.agents[a].boot == boot {
                    self.agents[a].tick = None;
                    self.tick(a);
                    self.drain(a)?;
                }
            }
            Ev::ToNode(a, message) => {
                self.tell_nodes(a, message.save.generation, NodeEvent::Leader(message))?;
            }
            Ev::ToLeader(a, from, message) => {
                let from = node_id(from);
                self.tell_leader(a, LeaderEvent::Message { from, message })?;
            }
            Ev::Read(a, boot, op, slot) => {
                let fails = self.fault(50);
                let outcome = match self.store.get(slot) {
                    _ if fails => storelog::ReadOutcome::Failed,
                    Some(bytes) => storelog::ReadOutcome::Found(bytes.to_vec()),
                    None => storelog::ReadOutcome::Absent,
                };
                let event = storelog::Event::Read { op, slot, outcome };
                self.tell_log(a, boot, event)?;
            }
            Ev::Create {
                agent,
                boot,
                op,
                slot,
                bytes,
                lands,
                answers,
            } => {
                let mut outcome = storelog::CreateOutcome::Unknown;
                if lands {
                    outcome = match self.store.create(slot, &bytes, 0) {
                        true => storelog::CreateOutcome::Won,
                        false => storelog::CreateOutcome::Exists,
                    };
                    self.truth.read(&self.store, &self.disk)?;
                    self.counts.claims = self.truth.claims;
                }
                if answers {
                    let event = storelog::Event::Created { op, slot, outcome };
                    self.tell_log(agent, boot, event)?;
                }
            }
            Ev::Refresh(a, boot) => {
                if self.agents[a].boot == boot {
                    let now = self.now;
                    if let Some(cores) = &mut self.agents[a].cores {
                        cores.log.refresh(now);
                    }
                    let ms = self.rng.between(50, 500);
                    self.after(ms, Ev::Refresh(a, boot));
                    self.drain(a)?;
                }
            }
            Ev::WriteEnd { .. } => self.write_ends(ev)?,
            Ev::Synced(path) => {
                if let Some(file) = self.disk.files.get_mut(&path) {
                    file.synced |= file.whole;
                }
            }
            Ev::Assembled(a, boot, save, files) => {
                // The file may be there though nobody is left to hear of it.
                if self.agents[a].boot == boot || self.rng.chance(300) {
                    let event = match self.fault(30) {
                        true => LeaderEvent::AssembleFailed {
                            save,
                            why: "the disk is full".into(),
                        },
                        false => LeaderEvent::Assembled {
                            save,
                            manifest: self.disk.manifest(save, &files),
                            bytes: 100,
                        },
                    };
                    if self.agents[a].boot == boot {
                        match self.fault(30) {
                            true => self.link_again(a)?,
                            false => self.tell_leader(a, event)?,
                        }
                    }
                }
            }
            Ev::Wants { .. } => self.rank_wants(ev)?,
            Ev::Filled { .. } => self.filled(ev)?,
            Ev::Release(a, boot) => {
                if self.agents[a].boot == boot {
                    self.release(a)?;
                }
            }
            Ev::Review(a, boot) => {
                if self.agents[a].boot == boot {
                    self.review(a)?;
                    let ms = self.rng.between(300, 2_000);
                    self.after(ms, Ev::Review(a, boot));
                }
            }
            Ev::Save => self.plan_save()?,
            Ev::Claim => self.plan_claim()?,
            Ev::Chaos => self.chaos(),
            Ev::Up(a) => self.up(a),
        }
        Ok(())
    }

    /// True in `permille` of 1,000 cases while there are faults.
    pub(super) fn fault(&mut self, permille: u32) -> bool {
        let hit = self.rng.chance(permille);
        hit && !self.quiet && self.drill.is_none()
    }

    pub(super) fn start(&mut self, a: usize) {
        let (flaws, log, now) = (self.plant.cores, self.plant.log, self.now);
        let agent = &mut self.agents[a];
        if agent.node_state.prepared.is_some() && agent.boot > 0 {
            self.counts.restarts_prepared += 1;
        }
        agent.start(flaws, log, now);
        let boot = agent.boot;
        self.note(format!("agent {a} starts"));
        self.after(1, Ev::Tick(a, boot));
        self.after(2, Ev::Refresh(a, boot));
        self.after(700, Ev::Review(a, boot));
    }

    fn up(&mut self, a: usize) {
        if !self.agents[a].launcher_up {
            self.agents[a].start_launcher();
        }
        if self.agents[a].cores.is_none() {
            self.start(a);
        }
    }

    /// The agent's process is gone.
    pub(super) fn crash(&mut self, a: usize) {
        self.counts.crashes += 1;
        self.note(format!("agent {a} crashes"));
        self.agents[a].cores = None;
        let ms = self.rng.between(100, 3_000);
        self.after(ms, Ev::Up(a));
    }

    fn chaos(&mut self) {
        if self.quiet {
            return;
        }
        let ms = self.rng.between(200, 4_000);
        self.after(ms, Ev::Chaos);
        let a = self.rng.index(self.agents.len());
        if self.agents[a].cores.is_some() && self.drill.is_none() {
            let power = self.rng.chance(400);
            self.fails(a, power);
        }
        if self.drill.is_none() && self.rng.chance(50) {
            self.rot();
        }
    }

    /// The agent crashes, or its whole machine.
    pub(super) fn fails(&mut self, a: usize, power: bool) {
        self.crash(a);
        if power {
            self.counts.power += 1;
            self.note(format!("machine {a} loses its power"));
            self.agents[a].launcher_up = false;
            self.agents[a].launcher += 1;
            self.agents[a].memory.clear();
            self.disk.power_fails(a);
        }
    }

    /// The disk loses a bit of a checkpoint in force, while two others are good.
    fn rot(&mut self) {
        let force = self.truth.commits.values().filter(|c| c.in_force());
        let manifests: Vec<Digest> = force.map(|c| c.commit.manifest).collect();
        let rotten = |m: &Digest| self.disk.is_rotten(m);
        if manifests.len() > 2 && !manifests.iter().any(rotten) {
            let manifest = manifests[self.rng.index(manifests.len())];
            self.note(format!("{manifest} rots"));
            self.disk.rot(&manifest);
        }
    }

    /// The leaders, stale ones too, have their ranks save.
    fn plan_save(&mut self) -> Result<(), Violation> {
        let ms = self.rng.between(200, 2_500);
        self.after(ms, Ev::Save);
        for a in 0..self.agents.len() {
            let Some(head) = self.agents[a].head.clone() else {
                continue;
            };
            let cores = self.agents[a].cores.as_ref();
            let Some(leader) = cores.and_then(|c| c.leader.as_ref()) else {
                continue;
            };
            let whole = head.members.len() == self.agents.len();
            let done = self
                .goal
                .is_some_and(|(_, step)| leader.committed() >= Some(step));
            if self.quiet && (!whole || done || leader.under_way().is_some()) {
                continue;
            }
            let now = self.now;
            self.step += self.rng.between(1, 10);
            let step = self.step;
            let cause = match self.rng.below(4) {
                0 => Cause::Preemption,
                1 => Cause::Ordered,
                _ => Cause::Steps,
            };
            let until = match self.quiet {
                true => now + Span::from_secs(60),
                false => now + Span::from_millis(self.rng.between(200, 6_000)),
            };
            let generation = head.digest();
            let latest = self.truth.latest.as_ref().map(|(_, digest)| *digest);
            if self.quiet {
                if latest != Some(generation) {
                    continue;
                }
                self.goal = Some((generation, step));
            }
            let wants = Wants { step, cause, until };
            self.tell_leader(a, LeaderEvent::Save(wants))?;
            for m in &head.members {
                let Some(agent) = self.agents.iter().position(|x| x.id == m.node) else {
                    continue;
                };
                let launcher = self.agents[agent].launcher;
                for k in 0..m.slots {
                    let ms = self.rng.delay(30);
                    let ev = Ev::Wants {
                        agent,
                        launcher,
                        generation,
                        k,
                        step,
                        tries: 0,
                    };
                    self.after(ms, ev);
                }
            }
        }
        Ok(())
    }

    /// Somebody claims a generation, whether or not the newest one is well.
    fn plan_claim(&mut self) -> Result<(), Violation> {
        let ms = match self.quiet {
            true => 3_000,
            false => self.rng.between(500, 8_000),
        };
        self.after(ms, Ev::Claim);
        let whole = |w: &World| {
            let latest = w.truth.latest.as_ref();
            latest.is_some_and(|(r, _)| r.members.len() == w.agents.len())
        };
        if self.quiet && whole(self) {
            // The last generation is decided: it has to hear of its launchers once more.
            return Ok(());
        }
        let a = self.rng.index(self.agents.len());
        let mut members: Vec<(usize, u16)> = (self.agents.iter())
            .filter(|x| x.launcher_up)
            .map(|x| (x.index, x.ranks))
            .collect();
        self.rng.shuffle(&mut members);
        if !self.quiet && members.len() > 1 && self.rng.chance(500) {
            members.pop();
        }
        self.nonce += 1;
        let (nonce, now) = (self.nonce, self.now);
        let Some(cores) = self.agents[a].cores.as_mut() else {
            return Ok(());
        };
        let tail = cores.log.tail();
        if members.is_empty() || cores.claiming.is_some() || !tail.complete {
            return Ok(());
        }
        let parent = tail.claim.map(|(r, _, _)| r.clone());
        let next = record(parent.as_ref(), &members, nonce);
        cores.ids += 1;
        cores.claiming = Some(cores.ids);
        cores.log.claim(cores.ids, next, now);
        self.drain(a)
    }
}
