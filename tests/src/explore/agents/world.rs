//! Real agents with their disks, launchers that do what they are told at once, and the letters
//! between them. Nothing here is drawn: the same steps give the same world.

mod drive;
mod launchers;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;

use muster_protocol::agent::{Agent, ConnId, Event};
use muster_protocol::job::Durable;
use muster_protocol::record::Record;
use muster_protocol::wire::{JobMessage, Message};
use muster_protocol::{Digest, JobKey, LauncherId, NodeId, StateId};

use super::judge::{Broken, Judge};
use super::setup::{Deed, Disks, Setup};
use crate::sim::truth::Truth;

const MS: u64 = 1_000_000;
const START: u64 = 1_000_000 * MS;
/// How long workers of two generations may run at once: a message is under way, and a timer comes first.
const OVERLAP_MS: u64 = 50;
/// More of these in one moment mean that messages or timers feed on each other.
const MAX_STEPS: u32 = 20_000;

#[derive(Clone)]
pub(super) struct Launcher {
    id: LauncherId,
    conn: ConnId,
    running: Option<Digest>,
    port: u16,
}

#[derive(Clone)]
pub(super) struct Node {
    id: NodeId,
    state: StateId,
    boot: u64,
    disks: u8,
    disk: BTreeMap<JobKey, Vec<u8>>,
    past: Vec<u8>,
    agent: Option<Agent>,
    launcher: Option<Launcher>,
    wake: Option<u64>,
    /// A number for all that ever happened here, in order: it stands for the agent's state.
    history: u64,
}

/// A message under way.
#[derive(Clone)]
pub(super) struct Letter {
    pub(super) from: usize,
    pub(super) kind: Option<&'static str>,
    message: Rc<Message>,
    /// After how many deliveries, one behind the other, it comes.
    due: u64,
    print: u64,
}

#[derive(Clone)]
enum Later {
    Comes(usize, Letter),
    Starts(usize),
    Heals(usize, usize),
    Deed(Deed),
    Written(Write),
}

/// A write that is under way.
#[derive(Clone)]
struct Write {
    node: usize,
    boot: u64,
    key: JobKey,
    /// None: it is durable.
    bytes: Option<Vec<u8>>,
}

/// The next thing that happens unless something else is chosen.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Timer(usize),
    Deliver { to: usize, at: usize },
    Later,
}

/// When in a step an agent is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moment {
    Before,
    /// The first write is durable, and nothing that follows was said.
    Written,
    After,
}

/// The fate of the next write of a step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fuse {
    /// It is durable, and the agent dies.
    Dies,
    /// The disk refuses it.
    Refused,
    /// It takes longer than a proposer waits.
    Slow,
    /// It is durable at once, and the agent hears of it as late as that.
    HeardLate,
}

/// Whether a step said or wrote something about what is decided.
#[derive(Clone, Copy, Default)]
pub(super) struct Did {
    pub(super) spoke: bool,
    pub(super) wrote: bool,
}

#[derive(Clone)]
pub(super) struct World {
    pub(super) setup: Rc<Setup>,
    pub(super) now: u64,
    pub(super) tick: u64,
    pub(super) end: u64,
    pub(super) nodes: Vec<Rc<Node>>,
    inbox: Vec<Vec<Letter>>,
    later: Vec<(u64, Later)>,
    cut: Vec<(usize, usize)>,
    pub(super) truth: Rc<Truth>,
    judge: Rc<Judge>,
    /// The nodes by their places in the first generation: members by rank, then the others.
    pub(super) places: Vec<usize>,
    did: Did,
    fuse: Option<Fuse>,
    /// Since when workers of two generations run, and two of their nodes.
    overlap: Option<(u64, (usize, usize))>,
    conns: u64,
    launchers: u32,
    steps: u32,
}

pub(super) fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(23) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn address(node: usize, port: u16) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, node as u8 + 1], port))
}

/// The name of a message that is about what is decided.
fn kind_of(message: &Message) -> Option<&'static str> {
    let Message::Job { body, .. } = message else {
        return None;
    };
    Some(match **body {
        JobMessage::Birth { .. } => "Birth",
        JobMessage::BirthAccepted { .. } => "BirthAccepted",
        JobMessage::Prepare { .. } => "Prepare",
        JobMessage::Promise { .. } => "Promise",
        JobMessage::Accept { .. } => "Accept",
        JobMessage::Accepted { .. } => "Accepted",
        JobMessage::Rejected { .. } => "Rejected",
        JobMessage::Decided { .. } => "Decided",
        JobMessage::Ask { .. } => "Ask",
        JobMessage::Follows { .. } => "Follows",
        JobMessage::Commit { .. } => "Commit",
        JobMessage::Committed { .. } => "Committed",
        JobMessage::Forfeited { .. } => "Forfeited",
        JobMessage::Superseded { .. } => "Superseded",
        JobMessage::Voters { .. } => "Voters",
        _ => return None,
    })
}

impl World {
    /// The job has formed, and its first generation trains.
    pub(super) fn formed(setup: Setup) -> Result<World, Broken> {
        let n = setup.nodes;
        let nodes = (0..n).map(|i| {
            let mut id = [7; 32];
            id[0] = i as u8 + 1;
            Rc::new(Node {
                id: NodeId(id),
                state: StateId([i as u8 + 1, 0, 0, 0, 0, 0, 0, 1]),
                boot: 0,
                disks: 1,
                disk: BTreeMap::new(),
                past: Vec::new(),
                agent: None,
                launcher: None,
                wake: None,
                history: i as u64 + 1,
            })
        });
        let mut w = World {
            now: START,
            tick: 0,
            end: START + 30_000 * MS,
            nodes: nodes.collect(),
            inbox: vec![Vec::new(); n],
            later: Vec::new(),
            cut: Vec::new(),
            truth: Rc::new(Truth::default()),
            judge: Rc::new(Judge::default()),
            places: (0..n).collect(),
            did: Did::default(),
            fuse: None,
            overlap: None,
            conns: 0,
            launchers: 0,
            steps: 0,
            setup: Rc::new(setup),
        };
        for i in 0..n {
            w.start(i)?;
        }
        for i in 0..w.setup.launchers {
            w.launcher_comes(i)?;
        }
        let mut quiet = None;
        while let Some(step) = w.next() {
            w.step(step)?;
            let running = w.nodes.iter().filter(|n| {
                let launcher = n.launcher.as_ref();
                launcher.is_some_and(|l| l.running.is_some())
            });
            if running.count() == w.setup.launchers {
                let until = *quiet.get_or_insert(w.now + 1_500 * MS);
                if w.now >= until {
                    break;
                }
            }
        }
        let first = w.truth.announced.values().next().cloned();
        let Some(first) = first.filter(|_| quiet.is_some()) else {
            return Err(Broken::DoesNotForm);
        };
        w.places = w.places_in(&first);
        w.end = w.now + w.setup.horizon_ms * MS;
        for (ms, deed) in w.setup.script.clone() {
            w.later.push((w.now + ms * MS, Later::Deed(deed)));
        }
        w.later.sort_by_key(|(at, _)| *at);
        Ok(w)
    }

    fn places_in(&self, record: &Record) -> Vec<usize> {
        let node = |id: NodeId| self.nodes.iter().position(|n| n.id == id);
        let members = record.members.iter().map(|m| m.node);
        let members = members.chain(record.witnesses.iter().map(|w| w.node));
        let mut places: Vec<usize> = members.filter_map(node).collect();
        let others = (0..self.nodes.len()).filter(|i| !places.contains(i));
        places.extend(others.collect::<Vec<_>>());
        places
    }

    // ---- what happens next ----

    /// Due timers first, then letters, then what time brings; nothing at the end.
    pub(super) fn next(&self) -> Option<Step> {
        let due = |n: &Rc<Node>| n.wake.is_some_and(|at| at <= self.now);
        if let Some(node) = self.nodes.iter().position(due) {
            return Some(Step::Timer(node));
        }
        let letters = self.inbox.iter().enumerate().flat_map(|(to, letters)| {
            let letters = letters.iter().enumerate();
            letters.map(move |(at, l)| ((l.due, to, at), Step::Deliver { to, at }))
        });
        if let Some((_, step)) = letters.min_by_key(|(order, _)| *order) {
            return Some(step);
        }
        let timer = self.nodes.iter().enumerate();
        let timer = timer.filter_map(|(i, n)| Some((n.wake?, i))).min();
        let later = self.later.first().map(|(at, _)| *at);
        match (timer, later) {
            (_, Some(at)) if timer.is_none_or(|(t, _)| at <= t) => {
                (at <= self.end).then_some(Step::Later)
            }
            (Some((at, node)), _) => (at <= self.end).then_some(Step::Timer(node)),
            (None, _) => None,
        }
    }

    pub(super) fn letter(&self, step: Step) -> Option<&Letter> {
        match step {
            Step::Deliver { to, at } => self.inbox.get(to)?.get(at),
            _ => None,
        }
    }

    /// The moment of a step: all that is delivered at one is said to be there at once.
    pub(super) fn moment(&self, step: Step) -> (u64, u64) {
        let due = self.letter(step).map_or(self.tick, |l| l.due);
        (self.now, self.tick.max(due))
    }

    /// The node whose agent a step is about.
    pub(super) fn whose(&self, step: Step) -> Option<usize> {
        match step {
            Step::Timer(node) | Step::Deliver { to: node, .. } => Some(node),
            Step::Later => None,
        }
    }

    pub(super) fn step(&mut self, step: Step) -> Result<Did, Broken> {
        self.did = Did::default();
        self.steps += 1;
        if self.steps > MAX_STEPS {
            return Err(Broken::RunsWild);
        }
        match step {
            Step::Timer(node) => {
                let at = self.nodes[node].wake.unwrap_or(self.now);
                self.now = self.now.max(at);
                self.timer(node)?;
            }
            Step::Deliver { to, at } => {
                let letter = self.inbox[to].remove(at);
                self.tick = self.tick.max(letter.due);
                self.deliver(to, &letter)?;
            }
            Step::Later => {
                let (at, later) = self.later.remove(0);
                self.now = self.now.max(at);
                match later {
                    Later::Comes(to, letter) => self.deliver(to, &letter)?,
                    Later::Starts(node) => self.start(node)?,
                    Later::Heals(a, b) => {
                        self.cut.retain(|c| *c != (a, b));
                        self.join(a, b)?;
                    }
                    Later::Deed(deed) => self.deed(deed)?,
                    Later::Written(write) => self.written(write)?,
                }
                self.did.spoke = true;
            }
        }
        Ok(self.did)
    }

    /// A number for the state, equal where nothing that is to come can tell two states apart.
    pub(super) fn fingerprint(&self) -> u64 {
        let mut out = self.now;
        for (node, letters) in self.nodes.iter().zip(&self.inbox) {
            out = mix(out, node.history);
            for l in letters {
                out = mix(out, mix(l.print, l.due - self.tick.min(l.due)));
            }
        }
        for (at, later) in &self.later {
            let print = match later {
                Later::Comes(to, letter) => mix(letter.print, *to as u64),
                Later::Starts(node) => mix(1, *node as u64),
                Later::Heals(a, b) => mix(2, (a * 16 + b) as u64),
                Later::Deed(_) => 3,
                Later::Written(write) => mix(4, write.node as u64),
            };
            out = mix(out, mix(*at, print));
        }
        let out = mix(out, self.overlap.map_or(0, |(since, _)| since));
        self.cut
            .iter()
            .fold(out, |out, (a, b)| mix(out, (a * 16 + b) as u64))
    }

    // ---- deviations ----

    /// Takes the letter of this step away.
    pub(super) fn lose(&mut self, step: Step) -> Option<(usize, Letter)> {
        match step {
            Step::Deliver { to, at } => Some((to, self.inbox[to].remove(at))),
            _ => None,
        }
    }

    pub(super) fn comes_behind(&mut self, to: usize, letter: Letter, deliveries: u64) {
        let due = self.tick.max(letter.due) + deliveries;
        self.inbox[to].push(Letter { due, ..letter });
    }

    pub(super) fn comes_later(&mut self, to: usize, letter: Letter, ms: u64) {
        self.plan(ms, Later::Comes(to, letter));
    }

    /// The letters under way take so long that timers fire first.
    pub(super) fn all_come_later(&mut self, ms: u64) {
        for to in 0..self.inbox.len() {
            for letter in std::mem::take(&mut self.inbox[to]) {
                self.comes_later(to, letter, ms);
            }
        }
    }

    fn plan(&mut self, ms: u64, later: Later) {
        self.later.push((self.now + ms * MS, later));
        self.later.sort_by_key(|(at, _)| *at);
    }

    /// The step, with its agent killed at that moment and started again; false where nothing was
    /// written that the moment could follow.
    pub(super) fn crash(
        &mut self,
        step: Step,
        moment: Moment,
        disks: Disks,
        down_ms: u64,
    ) -> Result<bool, Broken> {
        let Some(node) = self.whose(step) else {
            return Ok(false);
        };
        match moment {
            Moment::Before => {}
            Moment::Written => {
                if !self.step_with(step, Fuse::Dies)? {
                    return Ok(false);
                }
            }
            Moment::After => {
                self.step(step)?;
            }
        }
        self.restart(node, disks, down_ms)?;
        Ok(true)
    }

    /// The step, whose first write fails; false where there is none.
    pub(super) fn write_fails(&mut self, step: Step) -> Result<bool, Broken> {
        self.step_with(step, Fuse::Refused)
    }

    /// The step, whose first write takes its time, or is heard of late though it is `durable`; false where there is
    /// none.
    pub(super) fn write_takes(&mut self, step: Step, durable: bool) -> Result<bool, Broken> {
        match durable {
            true => self.step_with(step, Fuse::HeardLate),
            false => self.step_with(step, Fuse::Slow),
        }
    }

    fn step_with(&mut self, step: Step, fuse: Fuse) -> Result<bool, Broken> {
        self.fuse = Some(fuse);
        self.step(step)?;
        Ok(self.fuse.take().is_none())
    }

    fn restart(&mut self, node: usize, disks: Disks, down_ms: u64) -> Result<(), Broken> {
        self.kill(node)?;
        let n = Rc::make_mut(&mut self.nodes[node]);
        n.history = mix(n.history, disks as u64 + 21);
        let truth = Rc::make_mut(&mut self.truth);
        match disks {
            Disks::Same => {}
            Disks::New => {
                n.disks += 1;
                n.state.0[7] = n.disks;
                (n.boot, n.disk, n.past) = (0, BTreeMap::new(), Vec::new());
                truth.disks.remove(&n.id);
            }
            Disks::Left => {
                for bytes in n.disk.values_mut() {
                    let mut durable = Durable::decode(bytes).map_err(Broken::codec)?;
                    durable.leave();
                    *bytes = durable.encode().map_err(Broken::codec)?;
                    truth.persisted((n.id, n.state), durable);
                }
            }
        }
        match down_ms {
            0 => self.start(node),
            _ => {
                self.plan(down_ms, Later::Starts(node));
                Ok(())
            }
        }
    }

    pub(super) fn deed(&mut self, deed: Deed) -> Result<(), Broken> {
        let node = |w: &World, place: usize| w.places.get(place).copied().unwrap_or(0);
        match deed {
            Deed::LauncherDies(p) => self.launcher_dies(node(self, p)),
            Deed::LauncherComes(p) => self.launcher_comes(node(self, p)),
            Deed::LauncherReplaced(p) => {
                self.launcher_dies(node(self, p))?;
                self.launcher_comes(node(self, p))
            }
            Deed::NodeDies(p) => {
                let node = node(self, p);
                Rc::make_mut(&mut self.nodes[node]).launcher = None;
                self.kill(node)
            }
            Deed::Restart(p, disks) => self.restart(node(self, p), disks, 0),
            Deed::Cut(p, q, ms) => {
                let (a, b) = (node(self, p), node(self, q));
                if self.linked(a, b) {
                    self.cut.push((a, b));
                    self.part(a, b)?;
                    self.part(b, a)?;
                    self.plan(ms, Later::Heals(a, b));
                }
                Ok(())
            }
            Deed::Commit(p) => {
                let key = self.key();
                let (step, manifest) = (7, Digest([9; 32]));
                let event = Event::Commit {
                    key,
                    step,
                    manifest,
                };
                self.event(node(self, p), event, 5)
            }
        }
    }
}
