//! Ranks that die, come and regroup at every point of a step, in a small world: each collective
//! may complete here and not there. After every event, states are compared with a replay of the log.

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::rng::Rng;

const LINEAGE: Digest = Digest([7; 32]);
/// Collectives of one step.
const BUCKETS: usize = 3;

/// Parts of a step: the generation and the processes whose samples count. Two that differ
/// are different gradients.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Results {
    generation: u64,
    step: u64,
    entered: Vec<u32>,
}

/// A state is the list of what was committed to it.
type State = Vec<Results>;

#[derive(Clone, Debug)]
struct Process {
    id: usize,
    live: Live,
    alive: bool,
    /// The newest generation it was told of, and its rank there.
    at: Option<(u64, u32)>,
    state: State,
    /// Results by step, whole; and how many collectives of the step under way are done.
    results: BTreeMap<u64, Results>,
    /// (step, with whom, collectives done), while a step is under way.
    step: Option<(u64, Results, usize)>,
    ready: bool,
    wants: Option<Want>,
    frozen: Option<(u64, State)>,
    hands: BTreeMap<u64, BTreeSet<u32>>,
}

#[derive(Clone, Debug)]
enum Want {
    Reports,
    Results { step: u64, from: u32 },
    Restore,
}

#[derive(Default, Clone, Debug)]
struct Generation {
    /// Process by rank.
    members: Vec<usize>,
    reports: BTreeMap<u32, Report>,
    /// The state of each when it said its report.
    states: BTreeMap<u32, State>,
    /// By step and collective: the ranks that contribute, and who said there that it is ready.
    contributions: BTreeMap<(u64, usize), BTreeSet<u32>>,
    ready: BTreeMap<u64, BTreeSet<u32>>,
    /// Newcomers whose copy is under way: rank to (boundary, sources).
    copies: BTreeMap<u32, (u64, Vec<u32>)>,
}

struct World {
    rng: Rng,
    processes: Vec<Process>,
    generations: BTreeMap<u64, Generation>,
    newest: u64,
    regroups: u32,
    copied: u32,
    fetched: u32,
    redone: u32,
    /// Survivors that settled in an older generation than others.
    cut_short: u32,
}

impl World {
    fn new(seed: u64) -> World {
        let mut world = World {
            rng: Rng::new(seed),
            processes: Vec::new(),
            generations: BTreeMap::new(),
            newest: 0,
            regroups: 0,
            copied: 0,
            fetched: 0,
            redone: 0,
            cut_short: 0,
        };
        for _ in 0..2 + world.rng.below(3) {
            world.spawn();
        }
        world.regroup();
        world
    }

    fn spawn(&mut self) {
        self.processes.push(Process {
            id: self.processes.len(),
            live: Live::new(LINEAGE),
            alive: true,
            at: None,
            state: State::new(),
            results: BTreeMap::new(),
            step: None,
            ready: false,
            wants: None,
            frozen: None,
            hands: BTreeMap::new(),
        });
    }

    /// A new generation of all that live, or all but one that was cut off. Nobody is told yet.
    fn regroup(&mut self) {
        let mut members: Vec<usize> = self.alive().collect();
        if members.len() > 2 && self.rng.below(6) == 0 {
            let out = self.rng.below(members.len() as u64) as usize;
            members.remove(out);
        }
        self.newest += 1;
        self.regroups += 1;
        let generation = Generation {
            members,
            ..Generation::default()
        };
        self.generations.insert(self.newest, generation);
    }

    fn alive(&self) -> impl Iterator<Item = usize> + '_ {
        self.processes.iter().filter(|p| p.alive).map(|p| p.id)
    }

    fn handle(&mut self, id: usize, event: Event) {
        let result = self.processes[id].live.handle(event.clone());
        result.unwrap_or_else(|error| panic!("process {id} after {event:?}: {error}"));
        while let Some(effect) = self.processes[id].live.poll_effect() {
            self.carry_out(id, effect);
        }
    }

    fn carry_out(&mut self, id: usize, effect: Effect) {
        let Some((number, rank)) = self.processes[id].at else {
            panic!("an effect in no generation");
        };
        let members = self.generations[&number].members.clone();
        let entered: Vec<u32> = self.processes[id].live.entered().collect();
        let process = &mut self.processes[id];
        match effect {
            Effect::Exchange(report) => {
                process.wants = Some(Want::Reports);
                let generation = self.generations.get_mut(&number).unwrap();
                generation.reports.insert(rank, report);
                generation.states.insert(rank, process.state.clone());
            }
            Effect::Discard => {
                if process.step.take().is_some() {
                    self.redone += 1;
                }
                process.frozen = None;
            }
            Effect::HandResults { step, to } => {
                assert!(
                    process.results.contains_key(&step),
                    "hands out what it has not"
                );
                process.hands.entry(step).or_default().extend(to);
            }
            Effect::Fetch { step, from } => {
                assert_ne!(from, rank);
                process.wants = Some(Want::Results { step, from });
            }
            Effect::Commit { step } => {
                let results = process.results.get(&step).expect("results that are held");
                assert_eq!(process.state.len() as u64, step, "in order, each once");
                process.state.push(results.clone());
            }
            Effect::Release { step } => {
                process
                    .results
                    .remove(&step)
                    .expect("results that were kept");
            }
            Effect::HandState { boundary, .. } => {
                assert_eq!(process.state.len() as u64, boundary);
                process.frozen = Some((boundary, process.state.clone()));
            }
            Effect::CopyState { boundary, from } => {
                process.state.clear();
                process.results.clear();
                let generation = self.generations.get_mut(&number).unwrap();
                generation.copies.insert(rank, (boundary, from));
            }
            Effect::Restore => process.wants = Some(Want::Restore),
            Effect::Keep { step } => assert!(process.results.contains_key(&step)),
            Effect::SayReady => process.ready = true,
            Effect::Begin { step, with_samples } => {
                assert_eq!(with_samples, entered.contains(&rank));
                let entered = entered.iter().map(|r| members[*r as usize] as u32);
                let results = Results {
                    generation: number,
                    step,
                    entered: entered.collect(),
                };
                assert!(!results.entered.is_empty());
                process.step = Some((step, results, 0));
            }
        }
    }

    /// One thing happens, somewhere.
    fn tick(&mut self, kills: &mut u32, joins: &mut u32) {
        let alive: Vec<usize> = self.alive().collect();
        let id = alive[self.rng.below(alive.len() as u64) as usize];
        match self.rng.below(100) {
            0..2 if *kills > 0 && alive.len() > 1 => {
                *kills -= 1;
                self.processes[id].alive = false;
                if self.rng.below(4) > 0 {
                    self.regroup();
                }
            }
            2..4 if *joins > 0 => {
                *joins -= 1;
                self.spawn();
                self.regroup();
            }
            4 => self.regroup_if_somebody_is_gone(),
            5..20 => self.tell(id),
            20..30 => self.copy(id),
            _ => self.advance(id),
        }
    }

    fn regroup_if_somebody_is_gone(&mut self) {
        let members = &self.generations[&self.newest].members;
        let complete = members.iter().all(|id| self.processes[*id].alive);
        if !complete || members.len() < self.alive().count() {
            self.regroup();
        }
    }

    /// A process learns of the newest generation, perhaps before it notices the loss.
    fn tell(&mut self, id: usize) {
        let number = self.newest;
        let members = &self.generations[&number].members;
        let Some(rank) = members.iter().position(|m| *m == id) else {
            return;
        };
        let rank = rank as u32;
        if self.processes[id].at.is_some_and(|(at, _)| at >= number) {
            return;
        }
        let process = &mut self.processes[id];
        process.at = Some((number, rank));
        process.wants = None;
        process.ready = false;
        process.hands.clear();
        self.handle(id, Event::Assigned { number, rank });
    }

    fn copy(&mut self, id: usize) {
        let Some((number, rank)) = self.processes[id].at else {
            return;
        };
        let generation = &self.generations[&number];
        let Some((boundary, from)) = generation.copies.get(&rank).cloned() else {
            return;
        };
        // From any one that lives, is still there, and has frozen that boundary.
        let source = from.iter().find_map(|rank| {
            let source = &self.processes[generation.members[*rank as usize]];
            let here = source.alive && source.at.is_some_and(|(at, _)| at == number);
            let frozen = source.frozen.as_ref().filter(|_| here);
            frozen.filter(|(at, _)| *at == boundary).cloned()
        });
        let Some((_, state)) = source else { return };
        self.copied += 1;
        self.processes[id].state = state;
        let generation = self.generations.get_mut(&number).unwrap();
        generation.copies.remove(&rank);
        self.handle(id, Event::Copied { number });
    }

    fn advance(&mut self, id: usize) {
        let Some((number, rank)) = self.processes[id].at else {
            return;
        };
        let members = self.generations[&number].members.clone();
        // A peer that is dead or gone on to another generation contributes no more; what it has
        // sent may have arrived here or not.
        let all = members.len();
        match self.processes[id].wants.clone() {
            Some(Want::Reports) => {
                let generation = &self.generations[&number];
                if generation.reports.len() == all {
                    let reports: Vec<Report> = generation.reports.values().copied().collect();
                    self.processes[id].wants = None;
                    self.check_left_out(number, &reports);
                    self.handle(id, Event::Reported { number, reports });
                }
                return;
            }
            Some(Want::Results { step, from }) => {
                let holder = &self.processes[members[from as usize]];
                let gives = holder.hands.get(&step).is_some_and(|to| to.contains(&rank));
                if holder.alive && holder.at == Some((number, from)) && gives {
                    // It may go on meanwhile, and still has to hold them.
                    let results = holder.results.get(&step).expect("kept for others").clone();
                    self.fetched += 1;
                    self.processes[id].results.insert(step, results);
                    self.processes[id].wants = None;
                    self.handle(id, Event::Fetched { number });
                }
                return;
            }
            Some(Want::Restore) => {
                self.processes[id].wants = None;
                self.processes[id].state.clear();
                self.processes[id].results.clear();
                self.handle(
                    id,
                    Event::Restored {
                        number,
                        committed: 0,
                    },
                );
                return;
            }
            None => {}
        }
        let Some((step, results, done)) = self.processes[id].step.clone() else {
            return;
        };
        let ready = self.processes[id].ready;
        let generation = self.generations.get_mut(&number).unwrap();
        let contributed = generation.contributions.entry((step, done)).or_default();
        if contributed.insert(rank) {
            if done == 0 && ready {
                generation.ready.entry(step).or_default().insert(rank);
                self.processes[id].ready = false;
            }
            return;
        }
        if contributed.len() < all {
            return;
        }
        let ready = generation.ready.get(&step).cloned().unwrap_or_default();
        self.processes[id].step = Some((step, results.clone(), done + 1));
        if done == 0 {
            let ready = ready.into_iter().collect();
            self.handle(
                id,
                Event::UnderWay {
                    number,
                    step,
                    ready,
                },
            );
        }
        if done + 1 == BUCKETS {
            self.processes[id].results.insert(step, results);
            self.handle(id, Event::Complete { number, step });
        }
    }

    /// A rank that was in every generation since it settled, and whose reports some rank had all of, keeps its state.
    /// One that comes back as a newcomer loses nothing that is not also undone for all: it was left out of a
    /// generation, or the survivors are at least as far.
    fn check_left_out(&mut self, number: u64, reports: &[Report]) {
        let verdict = verdict(LINEAGE, reports).unwrap();
        let Generation {
            members, states, ..
        } = &self.generations[&number];
        let newest = reports.iter().filter_map(|r| r.settled).max();
        for (rank, id) in members.iter().enumerate() {
            let report = &reports[rank];
            let Some(settled) = report.settled else {
                continue;
            };
            let mut since = settled + 1..self.newest;
            let always = since.all(|n| self.generations[&n].members.contains(id));
            if verdict.is_survivor(rank as u32) {
                self.cut_short += u32::from(newest > report.settled);
                continue;
            }
            assert!(
                !always || report.committed <= verdict.next,
                "process {id} loses committed steps: {reports:?}"
            );
            let of_newest = (0..).zip(reports).filter(|(_, r)| r.settled == newest);
            let mine = &states[&(rank as u32)];
            let known = of_newest
                .map(|(rank, _): (u32, _)| &states[&rank])
                .any(|s| s == mine);
            // What nothing was committed to yet says not which of two restarts it comes from.
            assert!(
                !known || report.committed == 0,
                "process {id} is to copy what it has: {reports:?}"
            );
        }
    }

    /// All that hold a state of the same generation agree on every step that both have committed,
    /// and no process keeps more than two steps' results beside what it listens to.
    fn check(&self) {
        let settled: Vec<&Process> = self
            .processes
            .iter()
            .filter(|p| p.alive && p.live.is_settled() && p.live.listening.is_none())
            .collect();
        for a in &settled {
            assert_eq!(a.state.len() as u64, a.live.committed());
            assert!(a.results.len() <= 2, "{:?}", a.results);
            for (at, results) in a.state.iter().enumerate() {
                assert_eq!(results.step, at as u64);
            }
            for b in settled.iter().filter(|b| b.live.number == a.live.number) {
                let both = a.state.len().min(b.state.len());
                assert_eq!(a.state[..both], b.state[..both], "{} and {}", a.id, b.id);
                assert!(a.state.len().abs_diff(b.state.len()) <= 1);
            }
        }
    }
}

fn run(seed: u64) -> World {
    let mut world = World::new(seed);
    let (mut kills, mut joins) = (world.rng.below(4) as u32, world.rng.below(3) as u32);
    for _ in 0..600 {
        world.tick(&mut kills, &mut joins);
        world.check();
    }
    // No more faults: all that live train together, and get on.
    world.regroup_if_somebody_is_gone();
    let (mut none, mut nobody) = (0, 0);
    let steps = |world: &World| -> Vec<u64> {
        world
            .alive()
            .map(|id| world.processes[id].state.len() as u64)
            .collect()
    };
    let before = steps(&world).into_iter().max().unwrap();
    for _ in 0..4000 {
        world.tick(&mut none, &mut nobody);
        world.check();
        if steps(&world).iter().all(|now| *now > before + 3) {
            return world;
        }
    }
    panic!("seed {seed}: nobody gets on: {:?}", steps(&world));
}

#[test]
fn survivors_lose_nothing_and_agree_whatever_happens() {
    let (mut regroups, mut copied, mut fetched, mut redone, mut cut_short) = (0, 0, 0, 0, 0);
    for seed in 0..3000 {
        let world = run(seed);
        regroups += world.regroups;
        copied += world.copied;
        fetched += world.fetched;
        redone += world.redone;
        cut_short += world.cut_short;
    }
    // The seeds meet what the rule is about.
    assert!(
        regroups > 3000 && copied > 1000 && fetched > 50 && redone > 500 && cut_short > 100,
        "{regroups} regroups, {copied} copies, {fetched} fetched, {redone} redone, {cut_short} cut short"
    );
}

/// The generation ends while its reports are exchanged: two ranks have all of them, the third does not.
#[test]
fn a_rank_whose_exchange_was_cut_short_keeps_its_state() {
    let mut ranks = [(); 3].map(|()| Live::new(LINEAGE));
    let tell = |ranks: &mut [Live], event: Event| -> Vec<Vec<Effect>> {
        let each = ranks.iter_mut().map(|live| {
            live.handle(event.clone()).unwrap();
            std::iter::from_fn(|| live.poll_effect()).collect()
        });
        each.collect()
    };
    let assign = |ranks: &mut [Live], number: u64| -> Vec<Report> {
        for (rank, live) in (0..).zip(ranks.iter_mut()) {
            live.handle(Event::Assigned { number, rank }).unwrap();
            while live.poll_effect().is_some() {}
        }
        ranks.iter().map(Live::report).collect()
    };
    let (number, committed) = (1, 0);
    let reports = assign(&mut ranks, number);
    tell(&mut ranks, Event::Reported { number, reports });
    tell(&mut ranks, Event::Restored { number, committed });
    for step in 0..2 {
        let ready = Vec::new();
        tell(
            &mut ranks,
            Event::UnderWay {
                number,
                step,
                ready,
            },
        );
        // Of step 1 the third has not all results when the generation ends.
        let complete = Event::Complete { number, step };
        tell(&mut ranks[..3 - step as usize], complete);
    }
    // It is handed what it lacks, and does not get it.
    let number = 2;
    let reports = assign(&mut ranks, number);
    let [first, second, _] = tell(&mut ranks, Event::Reported { number, reports })
        .try_into()
        .unwrap();
    assert!(
        first.contains(&Effect::HandResults {
            step: 1,
            to: vec![2]
        }),
        "{first:?} {second:?}"
    );
    // Then only two hear all reports.
    for number in 3..5 {
        let reports = assign(&mut ranks, number);
        assert_eq!(
            (reports[0].settled, reports[2].settled),
            (Some(number - 1), Some(1))
        );
        tell(&mut ranks[..2], Event::Reported { number, reports });
    }
    let number = 5;
    let reports = assign(&mut ranks, number);
    let told = tell(&mut ranks, Event::Reported { number, reports });
    assert_eq!(told[2], [Effect::Fetch { step: 1, from: 0 }]);
    tell(&mut ranks[2..], Event::Fetched { number });
    assert!(ranks.iter().all(Live::is_settled));
    assert_eq!(ranks[2].report(), ranks[0].report());
}
