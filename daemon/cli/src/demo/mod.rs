//! `muster demo`: real agents, launchers and workers on this machine's loopback train a small
//! network while nodes are killed, drained and added, and the result is compared, bit for bit, with
//! the same training undisturbed.

mod check;
mod cluster;
mod follow;
mod recording;
mod script;
mod show;
mod table;
mod timeline;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use muster_runtime::demo::{Outcome, WorkerArgs, undisturbed, worker as run_worker};
use serde_json::json;

use crate::run::console::{print, with_causes};
use crate::run::workers::unix_ms;
use cluster::Cluster;
use recording::Recording;
use script::{Stage, Trouble};
use show::Screen;
use table::Row;

/// The rests after the steps make up this much time, however many steps there are.
const RESTS: Duration = Duration::from_secs(12);
/// Checkpoints in one training.
const CHECKPOINTS: u64 = 40;

/// The flags of `muster demo`.
#[derive(Clone, Debug, clap::Args)]
pub struct DemoArgs {
    /// Nodes to begin with
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(4..=16), value_name = "N")]
    nodes: u16,

    /// Steps to train for
    #[arg(long, default_value_t = 2000, value_parser = clap::value_parser!(u64).range(200..=1_000_000), value_name = "N")]
    steps: u64,

    /// Initial weights and order of samples
    #[arg(long, default_value_t = 1, value_name = "N")]
    seed: u64,

    /// Train on live membership: workers stay in their processes while nodes come and go
    #[arg(long)]
    live: bool,

    /// Leave the folder with logs, events and checkpoints, and say where it is
    #[arg(long)]
    keep: bool,

    /// Show the result only
    #[arg(long)]
    quiet: bool,

    /// How to print the result; with json, what happens meanwhile goes to stderr
    #[arg(short, long, value_enum, default_value_t = Output::Text, value_name = "FORMAT")]
    output: Output,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    Text,
    Json,
}

/// The arguments of a demo worker, which [`WorkerArgs`] reads.
#[derive(Clone, Debug, clap::Args)]
pub struct DemoWorkerArgs {
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "ARGS"
    )]
    args: Vec<OsString>,
}

/// `muster demo-worker`: what the demo's launchers run.
pub fn worker(args: DemoWorkerArgs) -> ExitCode {
    match WorkerArgs::parse(args.args) {
        Ok(args) => ExitCode::from(run_worker(&args)),
        Err(error) => {
            print(&format!("muster demo-worker: {error}"));
            ExitCode::from(2)
        }
    }
}

/// `muster demo`. 0: all is as it must be; 1: it is not, and stderr says what; 130: interrupted.
pub fn main(args: &DemoArgs) -> ExitCode {
    match run(args) {
        Ok(faults) if faults.is_empty() => ExitCode::SUCCESS,
        Ok(faults) => {
            for fault in faults {
                print(&format!("muster demo: FAILED: {fault}"));
            }
            ExitCode::FAILURE
        }
        Err(error) => {
            let why = with_causes(&error);
            print(&format!("muster demo: {why}"));
            if args.output == Output::Json {
                let result = json!({ "ok": false, "failures": [why] });
                put(&format!("{result}\n"));
            }
            match error.downcast_ref::<Trouble>() {
                Some(Trouble::Interrupted) => ExitCode::from(130),
                _ => ExitCode::FAILURE,
            }
        }
    }
}

/// Runs it all; what is wrong with the result.
fn run(args: &DemoArgs) -> anyhow::Result<Vec<String>> {
    let interrupted = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // The second one, or one when nothing runs any more, ends this process at once; what it
        // started dies with it.
        signal_hook::flag::register_conditional_shutdown(signal, 130, interrupted.clone())
            .context("cannot listen for signals")?;
        signal_hook::flag::register(signal, interrupted.clone())
            .context("cannot listen for signals")?;
    }
    let began = Instant::now();
    let save_every = (args.steps / CHECKPOINTS).max(1);
    let mut cluster = Cluster::new(args.nodes, |checkpoints| WorkerArgs {
        steps: args.steps,
        seed: args.seed,
        pause: RESTS / u32::try_from(args.steps).unwrap_or(u32::MAX),
        save_every,
        // Every step is told, so that the checks see each one.
        report_every: 1,
        live: args.live,
        // Each node has its own folder of events, which the cluster names.
        ..WorkerArgs::new(checkpoints, "")
    })
    .context("cannot make a folder for the demo: check TMPDIR")?;
    if args.keep {
        cluster.keep();
    }
    let root = cluster.root().to_owned();
    let screen = Screen::new(args.quiet, args.output == Output::Json);
    let mut stage = Stage::new(
        cluster,
        screen,
        (args.steps, save_every),
        interrupted.clone(),
    );
    let played = stage.play(args.nodes);
    let until_ms = unix_ms();
    stage.screen.end();
    if let Err(trouble) = played {
        if !matches!(trouble, Trouble::Interrupted) {
            for node in &stage.cluster.nodes {
                print(node.logs().trim_end());
            }
            print(timeline::text(&stage.recording, until_ms).trim_end());
        }
        told_where(args, &root);
        return Err(trouble.into());
    }
    let left = stage.cluster.end();
    let recording = std::mem::take(&mut stage.recording);
    drop(stage);
    interrupted.store(true, Ordering::Relaxed);

    let expected = undisturbed(args.seed, args.steps)?;
    let rows = table::rows(&recording);
    let mut faults = check::check(&recording, &rows, &expected, args.steps, save_every);
    if !left.is_empty() {
        faults.push(format!(
            "these processes outlived their launchers and had to be killed: {left:?}"
        ));
    }
    let result = Finished {
        rows,
        expected,
        faults,
        seconds: began.elapsed().as_secs_f64(),
        until_ms,
        kept: args.keep.then_some(root.clone()),
    };
    match args.output {
        Output::Text => put(&result.text(&recording)),
        Output::Json => put(&format!("{}\n", result.to_json(args, &recording))),
    }
    if args.output == Output::Text {
        told_where(args, &root);
    }
    Ok(result.faults)
}

/// The result, on stdout. That nobody reads it changes nothing about it.
fn put(text: &str) {
    let mut out = io::stdout().lock();
    let _gone = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

fn told_where(args: &DemoArgs, root: &std::path::Path) {
    if args.keep {
        print(&format!("logs, events and checkpoints: {}", root.display()));
    }
}

/// Result of a complete run.
#[derive(Debug)]
struct Finished {
    rows: Vec<Row>,
    /// Outcome of an undisturbed training.
    expected: Outcome,
    faults: Vec<String>,
    seconds: f64,
    until_ms: u64,
    kept: Option<PathBuf>,
}

/// Outcome of the last generation.
fn reached(recording: &Recording) -> Option<&Outcome> {
    let (_, workers) = recording.workers.iter().next_back()?;
    workers.iter().find_map(|w| w.done.as_ref())
}

impl Finished {
    fn text(&self, recording: &Recording) -> String {
        let mut text = format!(
            "\n{}\n{}",
            timeline::text(recording, self.until_ms),
            table::text(&self.rows)
        );
        text.push_str(
            "milliseconds. detect: from the signal (or the start of muster run) until the agents \
             know; decide and stop\noverlap; total: from the signal to the last rank's first step; \
             still: from the last step before to that\n\n",
        );
        if let Some(reached) = reached(recording) {
            text.push_str(&format!(
                "held-out images: {} of {} correct ({:.1} %), undisturbed {} ({:.1} %)\n\
                 parameters: {}, undisturbed {}\n",
                reached.correct,
                reached.held_out,
                100.0 * reached.accuracy(),
                self.expected.correct,
                100.0 * self.expected.accuracy(),
                short(&reached.hash),
                short(&self.expected.hash),
            ));
        }
        let lost: u64 = planned(&self.rows).filter_map(|r| r.redone).sum();
        let verdict = if self.faults.is_empty() {
            "all as it must be"
        } else {
            "NOT as it must be"
        };
        text.push_str(&format!(
            "steps lost on SIGTERM and join: {lost}; {:.1} s in all; {verdict}\n",
            self.seconds
        ));
        text
    }

    fn to_json(&self, args: &DemoArgs, recording: &Recording) -> serde_json::Value {
        let outcome = |o: &Outcome| {
            json!({
                "correct": o.correct, "held_out": o.held_out, "accuracy": o.accuracy(), "hash": o.hash,
            })
        };
        let generations = recording.generations.iter().filter(|g| g.runs).map(|g| {
            let nodes: Vec<&str> = g.seats.iter().map(|s| s.node.as_str()).collect();
            json!({
                "generation": g.number, "cause": g.cause, "world": g.world, "nodes": nodes,
                "restarts_used": g.restarts_used,
                "from_step": recording.workers_of(g.number).first().map(|w| w.from),
            })
        });
        let lost: u64 = planned(&self.rows).filter_map(|r| r.redone).sum();
        json!({
            "ok": self.faults.is_empty(), "failures": self.faults,
            "nodes": args.nodes, "steps": args.steps, "seed": args.seed, "seconds": self.seconds,
            "changes": table::to_json(&self.rows),
            "steps_lost_on_planned": lost,
            "generations": generations.collect::<Vec<_>>(),
            "reached": reached(recording).map(outcome), "undisturbed": outcome(&self.expected),
            "kept": self.kept,
        })
    }
}

fn planned(rows: &[Row]) -> impl Iterator<Item = &Row> {
    rows.iter().filter(|r| r.act.is_planned())
}

fn short(hash: &str) -> &str {
    hash.get(..16).unwrap_or(hash)
}

#[cfg(test)]
mod tests;
