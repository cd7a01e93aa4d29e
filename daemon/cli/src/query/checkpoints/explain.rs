//! `muster checkpoint explain JOB`: which checkpoint would be restored, and why no newer one.

use muster_checkpoint::verify::Depth;
use serde_json::{Value, json};

use super::super::output::{Failure, clean, put, put_json};
use super::{Checked, Opened, THREADS, Where, age, gib, named};
use crate::kept::Row;

/// `muster checkpoint explain`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    of: Where,
    /// Read every byte, not only whether the files are there with their lengths
    #[arg(long)]
    full: bool,
}

pub(super) async fn main(args: &Args) -> Result<(), Failure> {
    let mut opened = args.of.open(false).await?;
    let depth = match args.full {
        true => Depth::Everything { threads: THREADS },
        false => Depth::Sizes,
    };
    let mut passed: Vec<(Row, String)> = Vec::new();
    let mut chosen = None;
    for row in opened.ledger.rows.clone().into_iter().rev() {
        match why_not(&mut opened, &row, depth)? {
            Some(why) => passed.push((row, why)),
            None => {
                chosen = Some(row);
                break;
            }
        }
    }
    let chosen = chosen.as_ref();
    // What the log alone would choose: damage that nobody has rejected yet is found when it is loaded.
    let by_log = opened.ledger.restorable();
    let began = opened
        .ledger
        .latest
        .as_ref()
        .map(|(record, _)| (record.number, record.restore));
    if args.of.json() {
        let row = |row: &Row| json!({ "step": row.commit.step, "slot": row.seq, "manifest": row.commit.manifest.hex() });
        let not: Vec<Value> = (passed.iter())
            .map(|(of, why)| json!({ "step": of.commit.step, "slot": of.seq, "why": why }))
            .collect();
        return put_json(&json!({
            "chosen": chosen.map(row), "by_log": by_log.map(row), "passed_over": not,
            "generation": began.map(|(number, _)| number),
            "restored_step": began.and_then(|(_, restore)| restore).map(|commit| commit.step),
        }));
    }
    let mut text = match chosen {
        Some(row) => {
            let manifest = opened.whole_manifest(row)?;
            format!(
                "restored next: {}, {}, saved {} ago by {} ranks\n",
                named(row),
                gib(manifest.bytes()),
                age(manifest.origin.saved_at),
                manifest.origin.world
            )
        }
        None if passed.is_empty() => "restored next: nothing; the job has no checkpoints\n".into(),
        None => "restored next: nothing; none of the job's checkpoints can be used\n".into(),
    };
    for (row, why) in &passed {
        text.push_str(&format!("  not {}: {}\n", named(row), clean(why)));
    }
    if let Some(row) = by_log.filter(|row| chosen.is_none_or(|c| c.seq != row.seq)) {
        text.push_str(&format!(
            "the log does not know yet that {} is damaged: `muster checkpoint verify {} --reject` tells it\n",
            named(row),
            clean(&args.of.job)
        ));
    }
    if let Some((number, restore)) = began {
        let from = restore.map_or("nothing".into(), |commit| format!("step {}", commit.step));
        text.push_str(&format!("generation {number} began with {from}\n"));
    }
    put(text.as_bytes())
}

/// Why it would not be restored; none if it would.
pub(super) fn why_not(
    opened: &mut Opened,
    row: &Row,
    depth: Depth,
) -> Result<Option<String>, Failure> {
    // What is rejected is retired, too: the reason says more.
    if let Some(reason) = &row.rejected {
        return Ok(Some(format!("rejected in the log: {reason}")));
    }
    if let Some(slot) = row.retired {
        return Ok(Some(format!("retired by slot {slot} of the log")));
    }
    match opened.state_of(row.seq, depth)? {
        Checked::Damaged(why) => Ok(Some(format!("damaged: {why}"))),
        Checked::Retired(slot) => Ok(Some(format!("retired by slot {slot} of the log"))),
        Checked::Unknown(why) => Err(Failure::Refused(why)),
        Checked::Whole => Ok(None),
    }
}
