//! Conditions that every run of the demo must meet, whatever was done to it.

use std::collections::BTreeSet;

use muster_runtime::demo::Outcome;

use super::recording::{Act, Generation, Recording, Worker};
use super::table::Row;

/// The faults found; empty when all is well. `save_every` is the distance of checkpoints in steps.
pub(super) fn check(
    recording: &Recording,
    rows: &[Row],
    undisturbed: &Outcome,
    steps: u64,
    save_every: u64,
) -> Vec<String> {
    let mut faults: Vec<String> = recording.contradictions.iter().cloned().collect();
    let mut numbers = BTreeSet::new();
    for generation in recording.generations.iter().filter(|g| g.runs) {
        if !numbers.insert(generation.number) {
            faults.push(format!(
                "two generations with the number {} were decided",
                generation.number
            ));
        }
        seats(generation, &mut faults);
        free(generation, &mut faults);
        members(recording, generation, &mut faults);
    }
    for (number, workers) in &recording.workers {
        match recording.generation(*number) {
            Some(generation) => ranks(generation, workers, &mut faults),
            None => faults.push(format!(
                "workers of generation {number} ran, but no agent knows of it"
            )),
        }
    }
    for row in rows {
        changed(row, save_every, &mut faults);
    }
    ended(recording, undisturbed, steps, &mut faults);
    faults
}

/// The decided ranks are 0 to the world's size, on distinct nodes.
fn seats(generation: &Generation, faults: &mut Vec<String>) {
    let number = generation.number;
    let mut next = 0;
    let mut nodes = BTreeSet::new();
    for seat in &generation.seats {
        if seat.first_rank != Some(next) {
            faults.push(format!(
                "generation {number} gives {} the rank {:?}, which should be {next}",
                seat.node, seat.first_rank
            ));
        }
        if !nodes.insert(&seat.node) {
            faults.push(format!("generation {number} has {} twice", seat.node));
        }
        next += seat.slots;
    }
    if next != generation.world {
        faults.push(format!(
            "generation {number} has {next} seats in a world of {}",
            generation.world
        ));
    }
}

/// Faults of nodes are free: only a script's own failure uses the job's restarts up, and none fails
/// here.
fn free(generation: &Generation, faults: &mut Vec<String>) {
    if generation.restarts_used != 0 {
        faults.push(format!(
            "generation {} ({}) counts {} restarts as used, and no worker failed by itself",
            generation.number, generation.cause, generation.restarts_used
        ));
    }
}

/// A generation has the nodes that are up and not asked to leave when it is decided: none that is
/// well is left out.
fn members(recording: &Recording, generation: &Generation, faults: &mut Vec<String>) {
    let mut expected = BTreeSet::new();
    let before = recording
        .changes
        .iter()
        .filter(|c| c.at_ms <= generation.decided_ms);
    for change in before {
        for node in change.node.split(' ') {
            match change.act {
                Act::Form | Act::Join => expected.insert(node),
                Act::Kill | Act::KillLeader | Act::Drain => expected.remove(node),
            };
        }
    }
    let found: BTreeSet<&str> = generation.seats.iter().map(|s| s.node.as_str()).collect();
    if found != expected {
        faults.push(format!(
            "generation {} ({}) is on {found:?}, and should be on {expected:?}",
            generation.number, generation.cause
        ));
    }
}

/// The ranks that ran are those that were decided.
fn ranks(generation: &Generation, workers: &[Worker], faults: &mut Vec<String>) {
    let number = generation.number;
    let mut seen = BTreeSet::new();
    for worker in workers {
        let (rank, node) = (worker.rank, &worker.node);
        let seat = generation.seats.iter().find(|s| {
            s.first_rank
                .is_some_and(|f| (f..f + s.slots).contains(&rank))
        });
        match seat {
            Some(seat) if seat.node == *node => {}
            Some(seat) => faults.push(format!(
                "rank {rank} of generation {number} ran on {node} and not on {}",
                seat.node
            )),
            None => faults.push(format!(
                "rank {rank} of generation {number} ran on {node}, but there is no such rank"
            )),
        }
        if worker.world != generation.world {
            faults.push(format!(
                "rank {rank} of generation {number} was told a world of {}, which is {}",
                worker.world, generation.world
            ));
        }
        if !seen.insert(rank) {
            faults.push(format!("rank {rank} of generation {number} ran twice"));
        }
        if !worker.linked {
            faults.push(format!(
                "rank {rank} of generation {number} did not link the runtime"
            ));
        }
        if workers.iter().any(|w| w.from != worker.from) {
            faults.push(format!(
                "rank {rank} of generation {number} went on from step {}, others did not",
                worker.from
            ));
        }
    }
    let trained = workers.iter().any(|w| w.first_step_ms.is_some());
    if trained && seen.len() != generation.world as usize {
        faults.push(format!(
            "generation {number} trained with the ranks {seen:?} only, of {}",
            generation.world
        ));
    }
}

/// No step is lost on a planned change, and no more than one checkpoint's worth on another.
fn changed(row: &Row, save_every: u64, faults: &mut Vec<String>) {
    let (act, node) = (row.act.word(), &row.node);
    let Some(redone) = row.redone else { return };
    if row.act.is_planned() {
        if redone != 0 {
            faults.push(format!("{redone} steps were lost on the {act} of {node}"));
        }
        if row.stopped_at.is_none() {
            faults.push(format!(
                "the ranks did not agree on a step to stop at for the {act} of {node}"
            ));
        }
    } else if redone > save_every {
        faults.push(format!(
            "{redone} steps were redone after the {act} of {node}, with a checkpoint every {save_every}"
        ));
    }
}

/// All ranks of the last generation end with what an undisturbed training ends with.
fn ended(recording: &Recording, undisturbed: &Outcome, steps: u64, faults: &mut Vec<String>) {
    let last = recording.workers.iter().next_back();
    let workers = last.map_or(&[][..], |(_, workers)| workers.as_slice());
    let done: Vec<&Outcome> = workers.iter().filter_map(|w| w.done.as_ref()).collect();
    if done.is_empty() || done.len() != workers.len() {
        faults.push(format!(
            "{} of {} ranks completed the training",
            done.len(),
            workers.len()
        ));
    }
    for (worker, outcome) in workers.iter().zip(&done) {
        if worker.step != steps {
            faults.push(format!(
                "rank {} ended after {} steps of {steps}",
                worker.rank, worker.step
            ));
        }
        if outcome.hash != undisturbed.hash {
            faults.push(format!(
                "rank {} ended with the parameters {}, an undisturbed training ends with {}",
                worker.rank, outcome.hash, undisturbed.hash
            ));
        }
        if outcome.correct < undisturbed.correct {
            faults.push(format!(
                "rank {} classifies {} held-out images correctly, an undisturbed training {}",
                worker.rank, outcome.correct, undisturbed.correct
            ));
        }
    }
    let missing = (1..=steps).filter(|s| !recording.losses.contains_key(s));
    if let Some(step) = missing.into_iter().next() {
        faults.push(format!("step {step} was never done"));
    }
}
