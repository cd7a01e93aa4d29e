//! Real agents, and every run that deviates from the usual one in a few places.
//!
//! A world of four or five [`Agent`](muster_protocol::agent::Agent)s forms a job, and something
//! happens to it. There is one usual order of all that follows: what is said arrives one delivery
//! later, and timers fire once nothing is under way. At every step that speaks or writes about what
//! is decided, the search also takes each of the other ways on: a message that is lost, late or
//! repeated, an agent that dies before, in or after the step, a launcher, node or link that goes. It
//! goes depth first through all runs with at most so many deviations ("delay-bounded scheduling",
//! Emmi, Qadeer and Rakamarić, 2011), and leaves a state that it has seen before. A state is told by
//! what each agent went through, in order, and what is under way: orders in which different agents
//! do the same are one.

mod judge;
mod setup;
mod world;

use std::collections::HashMap;

pub use judge::{Broken, Vote};
pub use setup::{Deed, Disks, Scope, Setup};
use world::{Moment, Step, World};

/// Longer than an attempt of a proposer, and the time until the next.
const PAST_A_RETRY_MS: u64 = 1_500;
/// Behind everything that is under way, and the answers to it.
const BEHIND: u64 = 4;

/// The outcome of an exploration.
#[derive(Debug, Default)]
pub struct Explored {
    /// Different states at which there was a choice.
    pub states: usize,
    /// Runs that were followed to the end of the time that is looked at.
    pub runs: usize,
    /// Events that agents were given.
    pub steps: usize,
    /// The newest generation of any run.
    pub newest: u64,
    /// The most rounds of ballots of any run.
    pub rounds: u32,
    pub broken: Option<Found>,
    /// Nothing was cut off by the bound on steps.
    pub complete: bool,
}

/// A rule that was broken, and a way there with the fewest deviations.
#[derive(Debug)]
pub struct Found {
    pub broken: Broken,
    pub way: Vec<String>,
}

#[derive(Clone, Copy, Debug)]
enum Deviation {
    Lost,
    Behind,
    Later,
    Again,
    AgainLater,
    Crash(Moment, Disks, u64),
    WriteFails,
    WriteTakes,
    WriteIsHeardLate,
    AllLater,
    Deed(Deed),
}

/// A deviation that was taken: when, at which step, and what that step was about.
struct Taken {
    now: u64,
    tick: u64,
    about: Option<(usize, usize, &'static str)>,
    deviation: Deviation,
}

struct Search {
    scope: Scope,
    max_steps: usize,
    seen: HashMap<u64, u8>,
    way: Vec<Taken>,
    out: Explored,
}

/// All runs with at most so many deviations, those with fewer first.
///
/// # Errors
/// The job does not form.
pub fn explore(
    setup: &Setup,
    scope: Scope,
    deviations: u8,
    max_steps: usize,
) -> Result<Explored, Broken> {
    let start = World::formed(setup.clone())?;
    let mut all = Explored::default();
    for budget in 0..=deviations {
        let mut search = Search {
            scope,
            max_steps: max_steps.saturating_sub(all.steps),
            seen: HashMap::new(),
            way: Vec::new(),
            out: Explored {
                complete: true,
                ..Explored::default()
            },
        };
        search.run(start.clone(), budget);
        let out = search.out;
        all = Explored {
            states: search.seen.len(),
            steps: all.steps + out.steps,
            newest: all.newest.max(out.newest),
            rounds: all.rounds.max(out.rounds),
            ..out
        };
        if all.broken.is_some() || !all.complete {
            break;
        }
    }
    Ok(all)
}

impl Search {
    /// Follows the usual order from here, with each deviation from it while some are left.
    fn run(&mut self, mut world: World, budget: u8) {
        let mut looked = None;
        while let Some(step) = world.next() {
            if self.out.steps >= self.max_steps {
                self.out.complete = false;
            }
            if self.out.broken.is_some() || !self.out.complete {
                return;
            }
            self.out.steps += 1;
            let print = world.fingerprint();
            let letter = world.letter(step).and_then(|l| l.kind);
            let before = (budget > 0).then(|| world.clone());
            let did = match world.step(step) {
                Ok(did) => did,
                Err(broken) => return self.found(&world, broken),
            };
            if !did.spoke && !did.wrote && letter.is_none() {
                continue;
            }
            let known = self.seen.entry(print).or_default();
            if *known > budget {
                return;
            }
            *known = budget + 1;
            let Some(before) = before else {
                continue;
            };
            // Before the first delivery of a moment is as good as before any other of it.
            let moment = Some(before.moment(step));
            let all = std::mem::replace(&mut looked, moment) != moment && self.scope == Scope::All;
            for deviation in self.deviations(&before, step, all) {
                let mut other = before.clone();
                let about = before.letter(step);
                let about = about.and_then(|l| Some((l.from, before.whose(step)?, l.kind?)));
                self.way.push(Taken {
                    now: before.now,
                    tick: before.tick,
                    about,
                    deviation,
                });
                match deviate(&mut other, step, deviation) {
                    Ok(true) => self.run(other, budget - 1),
                    Ok(false) => {}
                    Err(broken) => self.found(&other, broken),
                }
                self.way.pop();
                if self.out.broken.is_some() || !self.out.complete {
                    return;
                }
            }
        }
        self.out.runs += 1;
        let newest = world.truth.announced.values().map(|r| r.number).max();
        self.out.newest = self.out.newest.max(newest.unwrap_or(0));
        let rounds = world.truth.proposed.keys().map(|(_, b)| b.round).max();
        self.out.rounds = self.out.rounds.max(rounds.unwrap_or(0));
    }

    fn found(&mut self, world: &World, broken: Broken) {
        let first = world.end - world.setup.horizon_ms * 1_000_000;
        let way = self.way.iter().map(|taken| {
            let ms = taken.now.saturating_sub(first) / 1_000_000;
            let about = taken.about.map_or(String::new(), |(from, to, kind)| {
                format!("{kind} from {from} to {to}: ")
            });
            let (tick, deviation) = (taken.tick, taken.deviation);
            format!("{ms} ms, delivery {tick}: {about}{deviation:?}")
        });
        let way = way.collect();
        self.out.broken = Some(Found { broken, way });
    }

    fn deviations(&self, world: &World, step: Step, all: bool) -> Vec<Deviation> {
        let wide = self.scope == Scope::All;
        let mut out = Vec::new();
        if world.letter(step).is_some_and(|l| l.kind.is_some()) {
            out.extend([Deviation::Lost, Deviation::Later, Deviation::AgainLater]);
            if wide {
                out.extend([Deviation::Behind, Deviation::Again]);
            }
        }
        if world.whose(step).is_some() {
            for disks in [Disks::Same, Disks::Left, Disks::New] {
                for moment in [Moment::Before, Moment::Written, Moment::After] {
                    out.push(Deviation::Crash(moment, disks, 0));
                }
            }
            if wide {
                out.extend([
                    Deviation::WriteFails,
                    Deviation::WriteTakes,
                    Deviation::WriteIsHeardLate,
                ]);
                out.push(Deviation::Crash(
                    Moment::Written,
                    Disks::Same,
                    PAST_A_RETRY_MS,
                ));
            }
        }
        if all {
            out.push(Deviation::AllLater);
            let nodes = 0..world.nodes.len();
            for p in nodes.clone() {
                let deeds = [
                    Deed::LauncherDies(p),
                    Deed::LauncherReplaced(p),
                    Deed::NodeDies(p),
                ];
                out.extend(deeds.map(Deviation::Deed));
                let others = nodes.clone().filter(|q| p < *q);
                let cuts = others.map(|q| Deed::Cut(p, q, PAST_A_RETRY_MS));
                out.extend(cuts.map(Deviation::Deed));
            }
        }
        out
    }
}

/// Takes another way than the usual step; false where there is none.
fn deviate(world: &mut World, step: Step, deviation: Deviation) -> Result<bool, Broken> {
    match deviation {
        Deviation::Crash(moment, disks, down) => return world.crash(step, moment, disks, down),
        Deviation::WriteFails => return world.write_fails(step),
        Deviation::WriteTakes => return world.write_takes(step, false),
        Deviation::WriteIsHeardLate => return world.write_takes(step, true),
        Deviation::AllLater => world.all_come_later(PAST_A_RETRY_MS),
        Deviation::Deed(deed) => world.deed(deed)?,
        Deviation::Lost | Deviation::Behind | Deviation::Later => {
            let Some((to, letter)) = world.lose(step) else {
                return Ok(false);
            };
            match deviation {
                Deviation::Behind => world.comes_behind(to, letter, BEHIND),
                Deviation::Later => world.comes_later(to, letter, PAST_A_RETRY_MS),
                _ => {}
            }
        }
        Deviation::Again | Deviation::AgainLater => {
            let again = world.letter(step).cloned().zip(world.whose(step));
            let Some((letter, to)) = again else {
                return Ok(false);
            };
            world.step(step)?;
            match deviation {
                Deviation::Again => world.comes_behind(to, letter, BEHIND),
                _ => world.comes_later(to, letter, PAST_A_RETRY_MS),
            }
        }
    }
    Ok(true)
}
