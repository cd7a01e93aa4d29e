//! Cost of each change, by phase.

use serde_json::{Value, json};

use super::recording::{Act, Phases, Recording};

/// One change and what it cost. Times are in milliseconds.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) act: Act,
    pub(super) node: String,
    /// The generation that it led to, and its world.
    pub(super) generation: u64,
    pub(super) world: u32,
    /// From the act until the agents knew.
    pub(super) detect: Option<f64>,
    pub(super) phases: Option<Phases>,
    /// From the workers' start, as the leader told it, to the last rank's first step.
    pub(super) first_step: Option<u64>,
    /// From the act to the last rank's first step.
    pub(super) total: u64,
    /// From the last step before to the last rank's first step after.
    pub(super) pause: Option<u64>,
    /// Steps that were complete before and had to be done again.
    pub(super) redone: Option<u64>,
    /// The step at which all ranks stopped by agreement.
    pub(super) stopped_at: Option<u64>,
}

/// The rows of all changes that were recovered from.
pub(super) fn rows(recording: &Recording) -> Vec<Row> {
    let row = |change: &super::recording::Change| {
        let generation = recording.recovered(change)?;
        let since = recording.trains_since(generation)?;
        let before = recording.before(generation.number);
        let old = before.map_or(&[][..], |n| recording.workers_of(n));
        let new = recording.workers_of(generation.number);
        let from = new.first().map(|w| w.from);
        let complete = old.iter().map(|w| w.step).max();
        let first = old.first().and_then(|w| w.stop);
        let first_step = generation.phases.map(|p| since.saturating_sub(p.told_ms));
        Some(Row {
            act: change.act,
            node: change.node.clone(),
            generation: generation.number,
            world: generation.world,
            // The agents count from the last sign of life; the demo knows when it acted.
            detect: generation.phases.map(|p| {
                let known = p.start + p.decide.max(p.stop);
                (p.told_ms.saturating_sub(change.at_ms) as f64 - known).max(0.0)
            }),
            phases: generation.phases,
            first_step,
            total: since.saturating_sub(change.at_ms),
            pause: old
                .iter()
                .map(|w| w.last_ms)
                .max()
                .map(|ms| since.saturating_sub(ms)),
            redone: complete.zip(from).map(|(c, f)| c.saturating_sub(f)),
            stopped_at: first.filter(|s| old.iter().all(|w| w.stop == Some(*s))),
        })
    };
    recording.changes.iter().filter_map(row).collect()
}

const HEAD: [&str; 12] = [
    "what",
    "node",
    "gen",
    "world",
    "detect",
    "decide",
    "stop",
    "start",
    "first step",
    "total",
    "still",
    "steps redone",
];

/// The table for people; times in milliseconds.
pub(super) fn text(rows: &[Row]) -> String {
    let number = |n: Option<u64>| n.map_or_else(|| "-".to_owned(), |n| n.to_string());
    let mut cells: Vec<[String; 12]> = vec![HEAD.map(str::to_owned)];
    for row in rows {
        let phase = |of: fn(&Phases) -> f64| {
            row.phases
                .map_or_else(|| "-".to_owned(), |p| format!("{:.0}", of(&p)))
        };
        cells.push([
            describe(row.act).to_owned(),
            row.node.clone(),
            row.generation.to_string(),
            row.world.to_string(),
            row.detect
                .map_or_else(|| "-".to_owned(), |ms| format!("{ms:.0}")),
            phase(|p| p.decide),
            phase(|p| p.stop),
            phase(|p| p.start),
            number(row.first_step),
            row.total.to_string(),
            number(row.pause),
            number(row.redone),
        ]);
    }
    let mut text = String::new();
    for line in &cells {
        for (column, cell) in line.iter().enumerate() {
            let width = cells
                .iter()
                .filter_map(|l| l.get(column))
                .map(|c| c.chars().count())
                .max()
                .unwrap_or(0);
            if column < 2 {
                text.push_str(&format!("{cell:<width$}  "));
            } else {
                text.push_str(&format!("{cell:>width$}  "));
            }
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

fn describe(act: Act) -> &'static str {
    match act {
        Act::Form => "forms",
        Act::Kill => "SIGKILL of a node",
        Act::KillLeader => "SIGKILL of rank 0's node",
        Act::Join => "a node joins",
        Act::Drain => "SIGTERM to a node",
    }
}

/// The same for programs.
pub(super) fn to_json(rows: &[Row]) -> Value {
    let row = |row: &Row| {
        json!({
            "what": row.act.word(), "node": row.node,
            "generation": row.generation, "world": row.world,
            "detect_ms": row.detect, "decide_ms": row.phases.map(|p| p.decide),
            "stop_ms": row.phases.map(|p| p.stop), "start_ms": row.phases.map(|p| p.start),
            "first_step_ms": row.first_step, "total_ms": row.total, "still_ms": row.pause,
            "steps_redone": row.redone, "stopped_at_step": row.stopped_at,
        })
    };
    Value::Array(rows.iter().map(row).collect())
}
