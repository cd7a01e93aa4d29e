//! `muster checkpoint verify JOB [STEP]`: reads checkpoints whole.

use std::time::Instant;

use muster_checkpoint::verify::Depth;
use muster_protocol::storelog::Body;
use serde_json::{Value, json};

use super::super::output::{Failure, clean, counted, duration_ms, put, put_json};
use super::{Checked, THREADS, Where, named};
use crate::kept::Row;

/// `muster checkpoint verify`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    of: Where,
    /// Only the checkpoint of this step
    step: Option<u64>,
    /// Reject what is damaged in the job's log, so that nothing restores it
    #[arg(long)]
    reject: bool,
}

pub(super) async fn main(args: &Args) -> Result<(), Failure> {
    let mut opened = args.of.open(args.reject).await?;
    let rows: Vec<Row> = match args.step {
        Some(step) => vec![opened.row(step)?.clone()],
        None => {
            let live = opened.ledger.rows.iter().rev();
            live.filter(|row| row.retired.is_none()).cloned().collect()
        }
    };
    let quiet = args.of.json();
    let (mut told, mut bad, mut unknown) = (Vec::new(), 0, 0);
    for row in &rows {
        let began = Instant::now();
        let depth = Depth::Everything { threads: THREADS };
        let found = opened.state_of(row.seq, depth)?;
        let ms = began.elapsed().as_secs_f64() * 1e3;
        let (word, why) = match found {
            Checked::Damaged(why) => {
                bad += 1;
                ("damaged", why)
            }
            Checked::Whole => ("verified", String::new()),
            Checked::Unknown(why) => {
                unknown += 1;
                ("unknown", why)
            }
            Checked::Retired(slot) => ("retired", format!("by slot {slot} of the log, meanwhile")),
        };
        let rejects =
            args.reject && word == "damaged" && row.rejected.is_none() && row.retired.is_none();
        let rejected = match rejects {
            true => {
                let (seq, reason) = (row.seq, why.clone());
                Some(opened.ledger.append(Body::Reject { seq, reason })?)
            }
            false => None,
        };
        let was = row.rejected.as_deref().map(clean);
        told.push(json!({
            "rejected": was, "step": row.commit.step, "slot": row.seq, "state": word, "why": why, "took_ms": ms as u64,
            "rejected_by": rejected,
        }));
        if quiet {
            continue;
        }
        let mut text = format!("{}: {word}", named(row));
        match why.is_empty() {
            true => text.push_str(&format!(", read in {}", duration_ms(ms))),
            false => text.push_str(&format!(": {}", clean(&why))),
        }
        if let Some(why) = was {
            text.push_str(&format!(
                "; it is rejected, and no start restores it: {why}"
            ));
        }
        if let Some(slot) = rejected {
            text.push_str(&format!("; rejected by slot {slot} of the log"));
        }
        put(format!("{text}\n").as_bytes())?;
    }
    if quiet {
        put_json(&Value::Array(told))?;
    } else if rows.is_empty() {
        put(b"no checkpoints\n")?;
    }
    let text = match (bad, unknown, quiet) {
        (0, 0, _) => return Ok(()),
        (_, _, true) => String::new(),
        (0, some, _) => format!("{} could not be verified", counted(some, "checkpoint")),
        (some, ..) if args.reject => format!("{} damaged", counted(some, "checkpoint")),
        (some, ..) => format!(
            "{} damaged: with --reject nothing restores what is",
            counted(some, "checkpoint")
        ),
    };
    Err(Failure::Refused(text))
}
