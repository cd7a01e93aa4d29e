//! `muster checkpoint JOB`: all ranks save at one step, and go on. Where the job has a store and its ranks
//! save by slots, the checkpoint is waited for until it is committed.

use std::time::{Duration, Instant};

use muster_protocol::local::{Command, Query};
use serde_json::{Value, json};

use super::checkpoints::{self, Sub};
use super::client::{Client, Unanswered, rows_of};
use super::orders::SAY_AFTER;
use super::output::{
    Failure, Style, clean, counted, duration_ms, field, flag, list, put, put_json,
};
use crate::run::console::say;

/// Between two looks at how far it is.
const POLL: Duration = Duration::from_millis(100);

/// `muster checkpoint`
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Args {
    #[command(subcommand)]
    sub: Option<Besides>,
    /// The job's id; UID/ID where several users have a job of that id. A job that is called like one of
    /// the commands: `muster checkpoint save JOB`
    job: Option<String>,
    #[command(flatten)]
    order: Order,
}

#[derive(Debug, clap::Subcommand)]
enum Besides {
    /// Have all ranks of a job save at one step: the same as `muster checkpoint JOB`
    Save(SaveArgs),
    #[command(flatten)]
    Kept(Sub),
}

/// `muster checkpoint save`
#[derive(Debug, clap::Args)]
struct SaveArgs {
    /// The job's id; UID/ID where several users have a job of that id
    job: String,
    #[command(flatten)]
    order: Order,
}

#[derive(Debug, clap::Args)]
struct Order {
    /// Do not wait until the ranks have saved
    #[arg(long)]
    no_wait: bool,
    /// Wait until the ranks have saved, and not until that is committed in the job's store
    #[arg(long, conflicts_with = "no_wait")]
    sealed: bool,
    /// The longest to wait; what is under way goes on
    #[arg(long, default_value = "12m", value_parser = crate::run::args::duration, value_name = "TIME")]
    timeout: Duration,
    #[command(flatten)]
    common: super::Common,
}

pub(super) async fn main(args: &Args, style: &Style) -> Result<(), Failure> {
    match (&args.sub, &args.job) {
        (Some(Besides::Save(save)), _) => order(&save.job, &save.order).await,
        (Some(Besides::Kept(sub)), _) => checkpoints::main(sub, style).await,
        (None, Some(job)) => order(job, &args.order).await,
        (None, None) => Err(Failure::Usage(
            "which job? `muster checkpoint JOB` has its ranks save; `muster checkpoint --help` lists what else there is".into(),
        )),
    }
}

async fn order(job: &str, args: &Order) -> Result<(), Failure> {
    let client = Client::find_for(args.common.socket.as_deref(), job).await?;
    let began = Instant::now();
    client
        .command(Command::Checkpoint { job: job.into() })
        .await?;
    if args.no_wait {
        return match args.common.out.json() {
            true => put_json(&json!({ "ok": true, "job": job })),
            false => put(format!("{} is asked for a checkpoint\n", clean(job)).as_bytes()),
        };
    }
    let (mut first, mut said) = (None, String::new());
    loop {
        let (state, generation) = state(&client, job).await?;
        let first = first.get_or_insert_with(|| generation.clone());
        let stage = field(&state, "stage");
        let saved = stage == "done";
        // Saved is in memory; where there is a store, it is over when it is in the log.
        let commits = flag(&state, "commits") && !args.sealed;
        let over = !commits || !state["committed"].is_null();
        let given_up = commits && !over && !state["given_up"].is_null();
        if (saved && (over || given_up)) || stage == "failed" {
            return told(job, args, &state, saved && !given_up, began.elapsed());
        }
        // Whatever an ended generation has committed stands in the log before the next one does.
        if saved && *first != generation {
            return Err(Failure::Refused(format!(
                "all ranks have saved step {}, but the generation ended before it was committed",
                field(&state, "step")
            )));
        }
        // It may never begin: a script without the runtime saves nothing. Most often it has only begun.
        let why = match stage.as_str() {
            "waiting" => clean(&field(&state, "why")),
            _ => String::new(),
        };
        if began.elapsed() > SAY_AFTER && why != said && !why.is_empty() {
            say(&format!("waiting: {why}"));
            said.clone_from(&why);
        }
        if began.elapsed() > args.timeout {
            let how_far = match saved {
                true => format!(
                    "all ranks have saved step {}, but it is not committed: `muster events` says what it waits for",
                    field(&state, "step")
                ),
                false if stage == "waiting" => why,
                false => who(&state),
            };
            let seconds = args.timeout.as_secs();
            return Err(Failure::Refused(format!(
                "no answer within {seconds} s: {how_far}"
            )));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// How far the checkpoint is that was last asked for on this agent, and the job's generation.
async fn state(client: &Client, job: &str) -> Result<(Value, String), Unanswered> {
    let jobs = client.query(Query::Jobs).await?;
    let mut rows = rows_of(&jobs, job).filter(|row| !row["checkpoint"].is_null());
    let row = rows.next().cloned().unwrap_or_default();
    Ok((row["checkpoint"].clone(), field(&row, "digest")))
}

fn told(job: &str, args: &Order, state: &Value, done: bool, took: Duration) -> Result<(), Failure> {
    let given_up = if done {
        &Value::Null
    } else {
        &state["given_up"]
    };
    if args.common.out.json() {
        let why = if given_up.is_null() {
            &state["why"]
        } else {
            given_up
        };
        put_json(&json!({
            "ok": done, "job": job, "step": state["step"], "saved": state["saved"],
            "world": state["world"], "why": why, "waited_ms": took.as_millis() as u64,
            "committed": state["committed"],
        }))?;
        return match done {
            true => Ok(()),
            false => Err(Failure::Refused(String::new())),
        };
    }
    if !given_up.is_null() {
        return Err(Failure::Refused(format!(
            "all ranks have saved step {}, and the save is given up: {}",
            field(state, "step"),
            clean(&field(state, "given_up"))
        )));
    }
    if !done {
        let why = clean(&field(state, "why"));
        return Err(Failure::Refused(format!("{why}; {}", who(state))));
    }
    let mut text = format!(
        "{}: {} saved at step {}, after {}\n",
        clean(job),
        counted(list(state, "saved").len() as u64, "rank"),
        field(state, "step"),
        duration_ms(took.as_secs_f64() * 1e3)
    );
    let committed = &state["committed"];
    if !committed.is_null() {
        text.push_str(&format!(
            "committed in slot {} of the log: manifest {}\n",
            field(committed, "slot"),
            field(committed, "manifest")
        ));
    }
    put(text.as_bytes())
}

/// Which ranks have saved, and how many are missing.
fn who(state: &Value) -> String {
    let saved: Vec<u64> = list(state, "saved")
        .iter()
        .filter_map(Value::as_u64)
        .collect();
    let world = state.get("world").and_then(Value::as_u64).unwrap_or(0);
    if saved.is_empty() {
        return "no rank has saved".into();
    }
    let missing: Vec<String> = (0..world)
        .filter(|rank| !saved.contains(rank))
        .take(16)
        .map(|rank| rank.to_string())
        .collect();
    let ranks: Vec<String> = saved.iter().take(16).map(u64::to_string).collect();
    format!(
        "{} of {world} saved ({}), the first without: {}",
        saved.len(),
        ranks.join(", "),
        missing.join(", ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_who_has_saved_and_who_has_not() {
        assert_eq!(who(&Value::Null), "no rank has saved");
        let some = json!({ "saved": [0, 2], "world": 4 });
        assert_eq!(who(&some), "2 of 4 saved (0, 2), the first without: 1, 3");
    }
}
