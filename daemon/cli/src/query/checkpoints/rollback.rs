//! `muster checkpoint rollback JOB STEP`: the job goes on from an earlier checkpoint, as after a loss that ran away.

use muster_checkpoint::verify::Depth;
use muster_protocol::storelog::Body;
use serde_json::json;

use super::super::output::{Failure, clean, put, put_json};
use super::{Where, explain, named};
use crate::kept::Row;

/// `muster checkpoint rollback`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    of: Where,
    /// The step that the job's next start restores
    step: u64,
    /// Only say what would be rejected
    #[arg(long)]
    dry_run: bool,
}

pub(super) async fn main(args: &Args) -> Result<(), Failure> {
    let mut opened = args.of.open(!args.dry_run).await?;
    let to = opened.row(args.step)?.clone();
    if let Some(why) = explain::why_not(&mut opened, &to, Depth::Sizes)? {
        return Err(Failure::Refused(format!(
            "{} cannot be restored: {}",
            named(&to),
            clean(&why)
        )));
    }
    let newer = |row: &&Row| row.seq > to.seq && row.in_force();
    let newer: Vec<Row> = opened.ledger.rows.iter().filter(newer).cloned().collect();
    if let Some(pinned) = newer.iter().find(|row| row.pinned) {
        return Err(Failure::Refused(format!(
            "{} is newer and pinned: nothing was changed; `muster checkpoint unpin {} {}` first",
            named(pinned),
            clean(&args.of.job),
            pinned.commit.step
        )));
    }
    // The newest last: cut off before that, it changes nothing of what is restored.
    if !args.dry_run {
        for row in &newer {
            let reason = format!("rolled back to step {}", args.step);
            let seq = row.seq;
            opened.ledger.append(Body::Reject { seq, reason })?;
        }
    }
    let latest = opened.ledger.latest.as_ref();
    let open = latest.filter(|(record, _)| !record.kind.is_terminal());
    let steps: Vec<u64> = newer.iter().map(|row| row.commit.step).collect();
    if args.of.json() {
        return put_json(&json!({
            "ok": true, "step": args.step, "slot": to.seq, "rejected": steps, "dry_run": args.dry_run,
            "ended": open.is_none(),
        }));
    }
    let rejects = if args.dry_run {
        "would be rejected"
    } else {
        "rejected"
    };
    let mut text = String::new();
    for row in &newer {
        text.push_str(&format!("{}: {rejects}\n", named(row)));
    }
    let would = if args.dry_run {
        "would restore"
    } else {
        "restores"
    };
    text.push_str(&format!("the next start {would} {}\n", named(&to)));
    if !newer.is_empty() {
        text.push_str("what is rejected is deleted while the job runs, and cannot be taken back\n");
    }
    if let Some((record, _)) = open {
        text.push_str(&format!(
            "the log does not say that the job has ended (generation {}): where it still runs it goes on from what it has, so end it \
             (`muster cancel {}`) and start it again\n",
            record.number,
            clean(&args.of.job)
        ));
    }
    put(text.as_bytes())
}
