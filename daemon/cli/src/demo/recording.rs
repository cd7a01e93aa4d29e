//! Record of a run, as the agents and the workers told it. Takes in one event at a time and touches
//! nothing: the checks, the table and the timeline are computed from it alone.

use std::collections::{BTreeMap, BTreeSet};

use muster_runtime::demo::{Event, Line, Outcome};
use serde_json::Value;

/// A wait that is shorter is not worth a line.
const LASTING_MS: u64 = 700;

/// A node's time in the demo, in Unix milliseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NodeLife {
    pub(super) name: String,
    /// Its id among agents, in hexadecimal; empty until it is known.
    pub(super) id: String,
    pub(super) up_ms: u64,
    pub(super) down: Option<(u64, Down)>,
}

/// How a node left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Down {
    Killed,
    Drained,
}

/// An act on the job, or its formation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    Form,
    Kill,
    KillLeader,
    Join,
    Drain,
}

impl Act {
    /// A short stable word for JSON and the table.
    pub(super) fn word(self) -> &'static str {
        match self {
            Act::Form => "form",
            Act::Kill => "kill",
            Act::KillLeader => "kill_rank_0",
            Act::Join => "join",
            Act::Drain => "drain",
        }
    }

    /// A planned change stops all ranks at one step, and loses none.
    pub(super) fn is_planned(self) -> bool {
        matches!(self, Act::Join | Act::Drain)
    }
}

/// One act: to whom, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) act: Act,
    pub(super) node: String,
    pub(super) at_ms: u64,
}

/// A node's part in a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Seat {
    pub(super) node: String,
    pub(super) slots: u32,
    pub(super) first_rank: Option<u32>,
}

/// A generation as the agents decided it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Generation {
    pub(super) number: u64,
    pub(super) digest: String,
    pub(super) cause: String,
    /// Whether it trains, unlike the record that ends a job.
    pub(super) runs: bool,
    pub(super) world: u32,
    /// Restarts charged to the job so far; the loss of a node is none.
    pub(super) restarts_used: u32,
    pub(super) seats: Vec<Seat>,
    pub(super) decided_ms: u64,
    pub(super) phases: Option<Phases>,
}

/// The leader's times of a change, in milliseconds, and when it told them (Unix milliseconds).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Phases {
    pub(super) decide: f64,
    pub(super) stop: f64,
    pub(super) start: f64,
    pub(super) told_ms: u64,
}

/// One worker process of a generation.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Worker {
    pub(super) node: String,
    pub(super) rank: u32,
    pub(super) pid: u32,
    pub(super) world: u32,
    pub(super) linked: bool,
    /// The step that it went on from.
    pub(super) from: u64,
    pub(super) start_ms: u64,
    pub(super) first_step_ms: Option<u64>,
    /// Steps that were complete at its last sign, and when that was.
    pub(super) step: u64,
    pub(super) last_ms: u64,
    pub(super) stop: Option<u64>,
    pub(super) done: Option<Outcome>,
}

#[derive(Debug, Default)]
pub(super) struct Recording {
    pub(super) began_ms: u64,
    pub(super) nodes: Vec<NodeLife>,
    pub(super) changes: Vec<Change>,
    /// In the order in which they were heard of.
    pub(super) generations: Vec<Generation>,
    /// Worker processes by generation.
    pub(super) workers: BTreeMap<u64, Vec<Worker>>,
    /// Loss by step, as first told, and when.
    pub(super) losses: BTreeMap<u64, (f32, u64)>,
    /// Reports that no correct run gives.
    pub(super) contradictions: BTreeSet<String>,
    phases: BTreeMap<String, Phases>,
    told: BTreeSet<String>,
    /// The newest wait that an agent told of, and since when.
    waiting: Option<(u64, String)>,
}

impl Recording {
    pub(super) fn new(began_ms: u64) -> Recording {
        Recording {
            began_ms,
            ..Recording::default()
        }
    }

    pub(super) fn name_of(&self, id: &str) -> String {
        match self.nodes.iter().find(|n| n.id == id) {
            Some(node) => node.name.clone(),
            None => id.chars().take(8).collect(),
        }
    }

    /// Agents call a node by its host, which is this one for all, and the begin of its id.
    fn with_names(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for node in self.nodes.iter().filter(|n| n.id.len() >= 8) {
            let Some(short) = node.id.get(..8) else {
                continue;
            };
            if let Some(at) = text.find(&format!(" ({short})")) {
                let from = text
                    .get(..at)
                    .and_then(|t| t.rfind(' '))
                    .map_or(0, |s| s + 1);
                text.replace_range(from..at + short.len() + 3, &node.name);
            }
            text = text.replace(short, &node.name);
        }
        text
    }

    /// Steps that were ever complete.
    pub(super) fn progress(&self) -> u64 {
        self.losses.keys().next_back().copied().unwrap_or(0)
    }

    /// The generation that trains, or that trained last.
    pub(super) fn newest(&self) -> Option<&Generation> {
        self.generations
            .iter()
            .filter(|g| g.runs)
            .max_by_key(|g| g.number)
    }

    pub(super) fn generation(&self, number: u64) -> Option<&Generation> {
        self.generations
            .iter()
            .find(|g| g.runs && g.number == number)
    }

    pub(super) fn workers_of(&self, number: u64) -> &[Worker] {
        self.workers.get(&number).map_or(&[], Vec::as_slice)
    }

    /// When the last rank of a generation had its first step; `None` until all had it.
    pub(super) fn trains_since(&self, generation: &Generation) -> Option<u64> {
        let workers = self.workers_of(generation.number);
        if workers.len() != generation.world as usize {
            return None;
        }
        workers
            .iter()
            .map(|w| w.first_step_ms)
            .collect::<Option<Vec<u64>>>()?
            .into_iter()
            .max()
    }

    /// The first generation that shows the change done and that trains.
    pub(super) fn recovered(&self, change: &Change) -> Option<&Generation> {
        let shows = |g: &&Generation| {
            let sits = g.seats.iter().any(|s| s.node == change.node);
            match change.act {
                Act::Form => true,
                Act::Join => sits,
                Act::Kill | Act::KillLeader | Act::Drain => !sits,
            }
        };
        self.generations
            .iter()
            .filter(|g| g.runs && g.decided_ms >= change.at_ms)
            .filter(shows)
            .filter(|g| self.trains_since(g).is_some())
            .min_by_key(|g| g.number)
    }

    /// The newest generation before this one that trained.
    pub(super) fn before(&self, number: u64) -> Option<u64> {
        let trained = |workers: &Vec<Worker>| workers.iter().any(|w| w.first_step_ms.is_some());
        self.workers
            .range(..number)
            .rev()
            .find(|(_, workers)| trained(workers))
            .map(|(number, _)| *number)
    }

    /// Takes one line of a worker's events in; the result is a line for people.
    pub(super) fn take_line(&mut self, node: &str, line: &Line) -> Option<String> {
        let generation = line.generation;
        if let Event::Start {
            step,
            world,
            linked,
            ..
        } = line.event
        {
            let workers = self.workers.entry(generation).or_default();
            // A generation whose workers could not all be started tries again with new ones.
            workers.retain(|w| w.rank != line.rank || w.first_step_ms.is_some());
            workers.push(Worker {
                node: node.to_owned(),
                rank: line.rank,
                pid: line.pid,
                world,
                linked,
                from: step,
                start_ms: line.time_ms,
                first_step_ms: None,
                step,
                last_ms: line.time_ms,
                stop: None,
                done: None,
            });
            return None;
        }
        let worker = self
            .workers
            .get_mut(&generation)
            .and_then(|all| all.iter_mut().find(|w| w.pid == line.pid));
        let Some(worker) = worker else {
            self.contradictions.insert(format!(
                "rank {} of generation {generation} on {node} told of steps before its start",
                line.rank
            ));
            return None;
        };
        worker.last_ms = line.time_ms;
        match &line.event {
            Event::Start { .. } | Event::Saved { .. } => None,
            Event::FirstStep { step, loss } => {
                worker.first_step_ms = Some(line.time_ms);
                self.stepped(line, node, *step, *loss);
                self.tell_training(generation)
            }
            Event::Step { step, loss } => {
                self.stepped(line, node, *step, *loss);
                None
            }
            Event::Stop { step, .. } => {
                worker.stop = Some(*step);
                self.tell_stop(generation)
            }
            Event::Lost { step, peer } => self.once(format!(
                "rank {peer} of generation {generation} does not answer its peers any more, after step {step}"
            )),
            Event::Done { step, outcome } => {
                worker.done = Some(outcome.clone());
                self.once(format!("the training is complete: {step} steps"))
            }
        }
    }

    /// Every step of a rank follows the one before, and has the same loss whoever does it.
    fn stepped(&mut self, line: &Line, node: &str, step: u64, loss: f32) {
        let worker = self
            .workers
            .get_mut(&line.generation)
            .and_then(|all| all.iter_mut().find(|w| w.pid == line.pid));
        let Some(worker) = worker else { return };
        // The first step is told twice where every step is told.
        let again = worker.step == step && worker.from + 1 == step;
        if worker.step + 1 != step && !again {
            self.contradictions.insert(format!(
                "rank {} on {node} went from step {} to step {step} in generation {}",
                line.rank, worker.step, line.generation
            ));
        }
        worker.step = step;
        let (told, _) = *self.losses.entry(step).or_insert((loss, line.time_ms));
        if told.to_bits() != loss.to_bits() {
            self.contradictions.insert(format!(
                "step {step} had the loss {told} and then, in generation {} at rank {}, {loss}",
                line.generation, line.rank
            ));
        }
    }

    fn tell_training(&mut self, number: u64) -> Option<String> {
        let workers = self.workers_of(number);
        let first = workers.first()?;
        let complete = workers.len() == first.world as usize
            && workers.iter().all(|w| w.first_step_ms.is_some());
        if !complete {
            return None;
        }
        let text = format!(
            "generation {number} trains with {} ranks, from step {}",
            first.world, first.from
        );
        self.once(text)
    }

    fn tell_stop(&mut self, number: u64) -> Option<String> {
        let workers = self.workers_of(number);
        let step = workers.first()?.stop?;
        if workers.iter().any(|w| w.stop != Some(step)) {
            return None;
        }
        let text = format!(
            "all {} ranks saved and stopped at step {step}",
            workers.len()
        );
        self.once(text)
    }

    fn once(&mut self, text: String) -> Option<String> {
        self.told.insert(text.clone()).then_some(text)
    }

    /// Takes one entry of an agent's `events` in, which other agents may have told already; the
    /// result is a line for people.
    pub(super) fn take_event(&mut self, event: &Value) -> Option<String> {
        let text = |name: &str| self.with_names(event[name].as_str().unwrap_or_default());
        match event["event"].as_str()? {
            "generation" => self.take_generation(event),
            // A generation that never ran whole has no times to show.
            "changed" if event["complete"] == false => None,
            "changed" => self.take_phases(event),
            "waiting" => {
                let at = event["time_ms"].as_u64()?;
                let text = text("text");
                if !text.is_empty() && self.decided_since(at).is_none() {
                    self.waiting = Some((at, text));
                }
                None
            }
            "stopping" => {
                let number = self.newest().map_or(0, |g| g.number);
                self.once(format!(
                    "generation {number} stops cleanly: {}",
                    text("why")
                ))
            }
            "worker_failed" => {
                let how = match event["signal"].as_i64() {
                    Some(signal) => format!("by signal {signal}"),
                    None => format!("with code {}", event["code"]),
                };
                let number = self.newest().map_or(0, |g| g.number);
                // The others follow at once: they wait for it in a collective.
                let first = self.once(format!("a worker of generation {number} fails"));
                first.map(|first| format!("{first}: rank {}, {how}", event["rank"]))
            }
            "trouble" => self.once(format!("trouble: {}", text("text"))),
            _ => None,
        }
    }

    fn decided_since(&self, at_ms: u64) -> Option<&Generation> {
        self.generations.iter().find(|g| g.decided_ms >= at_ms)
    }

    /// Text on what the job waits for, once the wait has lasted.
    pub(super) fn waits(&mut self, now_ms: u64) -> Option<String> {
        let (at, text) = self.waiting.take()?;
        if self.decided_since(at).is_some() {
            return None;
        }
        if now_ms.saturating_sub(at) < LASTING_MS {
            self.waiting = Some((at, text));
            return None;
        }
        self.once(format!("waiting: {text}"))
    }

    fn take_generation(&mut self, event: &Value) -> Option<String> {
        let digest = event["digest"].as_str()?.to_owned();
        let at = event["time_ms"].as_u64()?;
        if let Some(known) = self.generations.iter_mut().find(|g| g.digest == digest) {
            known.decided_ms = known.decided_ms.min(at);
            return None;
        }
        let seats = event["members"].as_array()?.iter().map(|m| Seat {
            node: self.name_of(m["node"].as_str().unwrap_or_default()),
            slots: number(&m["slots"]).unwrap_or(0),
            first_rank: number(&m["first_rank"]),
        });
        let generation = Generation {
            number: event["generation"].as_u64()?,
            cause: event["cause"].as_str()?.to_owned(),
            runs: event["kind"].as_str() == Some("runs"),
            world: number(&event["world"])?,
            restarts_used: number(&event["restarts_used"])?,
            seats: seats.collect(),
            decided_ms: at,
            phases: self.phases.get(&digest).copied(),
            digest,
        };
        let line = if generation.runs {
            let nodes: Vec<&str> = generation.seats.iter().map(|s| s.node.as_str()).collect();
            format!(
                "generation {} is decided ({}): ranks 0 to {} on {}",
                generation.number,
                generation.cause.replace('_', " "),
                generation.world.saturating_sub(1),
                nodes.join(", ")
            )
        } else {
            format!("the job is over: {}", generation.cause.replace('_', " "))
        };
        self.generations.push(generation);
        Some(line)
    }

    fn take_phases(&mut self, event: &Value) -> Option<String> {
        let digest = event["digest"].as_str()?.to_owned();
        let ms = |name: &str| event[name].as_f64().unwrap_or(0.0);
        let phases = Phases {
            decide: ms("decide_ms"),
            stop: ms("stop_ms"),
            start: ms("start_ms"),
            told_ms: event["time_ms"].as_u64()?,
        };
        let known = self.generations.iter_mut().find(|g| g.digest == digest);
        let number = known.map(|g| {
            g.phases.get_or_insert(phases);
            g.number
        });
        if self.phases.insert(digest, phases).is_some() {
            return None;
        }
        Some(format!(
            "generation {} has its workers: decide {:.0} ms, stop {:.0} ms, start {:.0} ms",
            number?, phases.decide, phases.stop, phases.start
        ))
    }
}

fn number(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|n| u32::try_from(n).ok())
}
