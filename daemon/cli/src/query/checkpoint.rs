//! `muster checkpoint JOB`: all ranks save at one step, and go on.

use std::time::{Duration, Instant};

use muster_protocol::local::{Command, Query};
use serde_json::{Value, json};

use super::client::{Client, Unanswered, rows_of};
use super::output::{Failure, clean, counted, duration_ms, field, list, put, put_json};

/// Between two looks at how far it is.
const POLL: Duration = Duration::from_millis(100);

/// `muster checkpoint`
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The job's id; UID/ID where several users have a job of that id
    job: String,
    /// Do not wait until the ranks have saved
    #[arg(long)]
    no_wait: bool,
    /// The longest to wait; what is under way goes on
    #[arg(long, default_value = "11m", value_parser = crate::run::args::duration, value_name = "TIME")]
    timeout: Duration,
    #[command(flatten)]
    common: super::Common,
}

pub(super) async fn main(args: &Args) -> Result<(), Failure> {
    let client = Client::find(args.common.socket.as_deref(), Some(&args.job)).await?;
    let began = Instant::now();
    let job = args.job.clone();
    client.command(Command::Checkpoint { job }).await?;
    if args.no_wait {
        return match args.common.out.json() {
            true => put_json(&json!({ "ok": true, "job": args.job })),
            false => put(format!("{} is asked for a checkpoint\n", clean(&args.job)).as_bytes()),
        };
    }
    loop {
        let state = state(&client, &args.job).await?;
        let stage = field(&state, "stage");
        if stage == "done" || stage == "failed" {
            return told(args, &state, stage == "done", began.elapsed());
        }
        if began.elapsed() > args.timeout {
            return Err(Failure::Refused(format!(
                "no answer within {} s: {}",
                args.timeout.as_secs(),
                who(&state)
            )));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// How far the checkpoint is that was last asked for on this agent.
async fn state(client: &Client, job: &str) -> Result<Value, Unanswered> {
    let jobs = client.query(Query::Jobs).await?;
    let state = rows_of(&jobs, job).map(|row| row["checkpoint"].clone());
    Ok(state.into_iter().find(|s| !s.is_null()).unwrap_or_default())
}

fn told(args: &Args, state: &Value, done: bool, took: Duration) -> Result<(), Failure> {
    if args.common.out.json() {
        put_json(&json!({
            "ok": done, "job": args.job, "step": state["step"], "saved": state["saved"],
            "world": state["world"], "why": state["why"], "waited_ms": took.as_millis() as u64,
        }))?;
        return match done {
            true => Ok(()),
            false => Err(Failure::Refused(String::new())),
        };
    }
    if !done {
        let why = clean(&field(state, "why"));
        return Err(Failure::Refused(format!("{why}; {}", who(state))));
    }
    let text = format!(
        "{}: {} saved at step {}, after {}\n",
        clean(&args.job),
        counted(list(state, "saved").len() as u64, "rank"),
        field(state, "step"),
        duration_ms(took.as_secs_f64() * 1e3)
    );
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
