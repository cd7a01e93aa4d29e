//! `muster checkpoint prune JOB`: retires what is not to be kept, in the log, then deletes it. The
//! job's leader does the same by itself while the job runs, by the same rules.

use muster_checkpoint::verify::Depth;
use muster_protocol::checkpoint::{Decision, Item, KeeperEffect, KeeperEvent, State};
use muster_protocol::local::Left;
use muster_protocol::storelog::{self, Body};
use serde_json::json;

use super::super::output::{Failure, clean, counted, put, put_json};
use super::{Checked, Opened, THREADS, Where, named};
use crate::kept::args::ElseKeep;
use crate::kept::{Reviewed, Row, Rules, Unread, review};

/// `muster checkpoint prune`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    of: Where,
    #[command(flatten)]
    keep: ElseKeep,
    /// Only say what would go
    #[arg(long)]
    dry_run: bool,
}

/// Looks again after each retirement, and after each checkpoint that was verified.
const ROUNDS: usize = 1000;

/// Summary of what was done, or would be.
#[derive(Debug, Default)]
struct Done {
    /// Slots and steps.
    retired: Vec<(u64, u64)>,
    deleted: Vec<String>,
    /// Actions that were to be done and were not.
    refused: Vec<String>,
    /// Checkpoints that stay because they cannot be read, or are damaged and nobody has rejected them.
    stays: Vec<String>,
}

pub(super) async fn main(args: &Args) -> Result<(), Failure> {
    let mut opened = args.of.open(!args.dry_run).await?;
    let logged = args.keep.over(opened.ledger.rules.as_ref());
    let rules = Rules::from(&logged);
    let mut done = Done::default();
    let found = settled(&mut opened, &rules)?;
    if args.dry_run {
        plan(&opened, &found, &mut done);
    } else {
        prune(&mut opened, &rules, &found, &mut done)?;
    }
    done.stays = stays(&mut opened, &found)?;
    told(args, &opened, &logged, &done)
}

/// Texts on the checkpoints that could not be read. Nothing is said of those that the job has retired meanwhile.
fn stays(opened: &mut Opened, found: &Reviewed) -> Result<Vec<String>, Failure> {
    opened.ledger.refresh()?;
    let unread = |row: &&Row| row.retired.is_none();
    let rows = opened.ledger.rows.iter().filter(unread);
    let said = rows.filter_map(|row| {
        let seen = found.seen.iter().find(|seen| seen.seq == row.seq)?;
        let why = seen.state.why()?;
        Some(format!("{} stays: {}", named(row), clean(why)))
    });
    Ok(said.collect())
}

/// Looks until nothing more has to be verified.
fn settled(opened: &mut Opened, rules: &Rules) -> Result<Reviewed, Failure> {
    let mut unread = Unread::new();
    for _ in 0..ROUNDS {
        let standings = opened.ledger.standings();
        let newest = opened.ledger.newest();
        let found = review(&opened.place, rules, newest, &standings, &unread)?;
        for seen in &found.seen {
            let keeper = &mut opened.ledger.keeper;
            let (seq, names) = (seen.seq, seen.needs.clone());
            keeper.handle(KeeperEvent::Needs { seq, names });
        }
        let next = found.verify.filter(|(_, of)| !unread.contains_key(of));
        let Some((seq, manifest)) = next else {
            return Ok(found);
        };
        let depth = Depth::Everything { threads: THREADS };
        match opened.state_of(seq, depth)? {
            Checked::Damaged(why) => {
                let step = standings.iter().find(|s| s.seq == seq);
                let step = step.map_or(0, |s| s.commit.step);
                return Err(Failure::Refused(format!(
                    "the checkpoint of step {step} is damaged, and nothing is deleted meanwhile: {why}; `muster checkpoint verify --reject` takes it out"
                )));
            }
            Checked::Unknown(why) => drop(unread.insert(manifest, State::Unreadable { why })),
            // By the job itself, which the next look takes into account.
            Checked::Retired(_) => {}
            Checked::Whole => {
                let (keeper, state) = (&mut opened.ledger.keeper, State::Verified);
                keeper.handle(KeeperEvent::Checked { seq, state });
            }
        }
    }
    Err(Failure::Refused(format!(
        "after {ROUNDS} looks the store still changes: try again when less is saved"
    )))
}

/// Notes what would go.
fn plan(opened: &Opened, found: &Reviewed, done: &mut Done) {
    let steps = opened.ledger.standings();
    let of = |seq: u64| steps.iter().find(|s| s.seq == seq);
    for seq in &found.retire {
        done.retired.extend(of(*seq).map(|s| (*seq, s.commit.step)));
        let seen = found.seen.iter().find(|seen| seen.seq == *seq);
        done.deleted
            .extend(seen.into_iter().flat_map(|seen| seen.needs.clone()));
    }
    let left = found.left.iter().filter(|left| {
        let item = item(opened, left);
        opened.ledger.keeper.may_delete(&item).is_ok()
    });
    done.deleted.extend(left.map(|left| left.name.clone()));
}

fn item(opened: &Opened, left: &Left) -> Item {
    let keeper = &opened.ledger.keeper;
    Item {
        name: left.name.clone(),
        generation: keeper.generation_of(left.generation).unwrap_or_default(),
    }
}

/// Retires, one after the other, each read back before the next; then deletes what the log allows.
fn prune(
    opened: &mut Opened,
    rules: &Rules,
    found: &Reviewed,
    done: &mut Done,
) -> Result<(), Failure> {
    let decision = Decision {
        retire: found.retire.clone(),
        delete: Vec::new(),
    };
    opened.ledger.keeper.handle(KeeperEvent::Decided(decision));
    carry_out(opened, done)?;
    // What only retired ones need, and what dead attempts left.
    opened.ledger.refresh()?;
    let found = settled(opened, rules)?;
    let items = found.left.iter().map(|left| item(opened, left));
    let keeper = &opened.ledger.keeper;
    let delete = items
        .filter(|item| keeper.may_delete(item).is_ok())
        .collect();
    let decision = Decision {
        retire: Vec::new(),
        delete,
    };
    opened.ledger.keeper.handle(KeeperEvent::Decided(decision));
    carry_out(opened, done)
}

fn carry_out(opened: &mut Opened, done: &mut Done) -> Result<(), Failure> {
    while let Some(effect) = opened.ledger.keeper.poll_effect() {
        match effect {
            KeeperEffect::Append(entry @ Body::Retire { seq, .. }) => {
                let row = opened.ledger.rows.iter().find(|row| row.seq == seq);
                let step = row.map_or(0, |row| row.commit.step);
                opened.ledger.append(entry)?;
                done.retired.push((seq, step));
            }
            // Nothing is rejected here.
            KeeperEffect::Append(_) => {}
            KeeperEffect::Delete { name } => {
                opened.place.remove(&name).map_err(|error| {
                    Failure::Refused(format!(
                        "{name} cannot be deleted: {error}; check the right to write in the store, and prune again"
                    ))
                })?;
                done.deleted.push(name);
            }
            KeeperEffect::Refused { what, why } => done.refused.push(format!("{what}: {why}")),
        }
    }
    Ok(())
}

fn told(args: &Args, opened: &Opened, rules: &storelog::Rules, done: &Done) -> Result<(), Failure> {
    let kept = opened.ledger.rows.iter().filter(|row| row.in_force());
    let goes = |seq: u64| done.retired.iter().any(|(retired, _)| *retired == seq);
    let kept: Vec<u64> = (kept.filter(|row| !goes(row.seq)).map(|row| row.commit.step)).collect();
    let which = match rules.highest {
        true => "max",
        false => "min",
    };
    let by = format!("{}:{which}", rules.metric);
    if args.of.json() {
        let retired = done.retired.iter();
        let retired: Vec<_> = retired
            .map(|(slot, step)| json!({ "slot": slot, "step": step }))
            .collect();
        return put_json(&json!({
            "ok": true, "dry_run": args.dry_run, "retired": retired, "deleted": done.deleted,
            "refused": done.refused, "stays": done.stays, "kept": kept,
            "keep_last": rules.last, "keep_best": rules.best, "best_by": by,
        }));
    }
    let (would, deleted) = match args.dry_run {
        true => ("would be ", "would be deleted"),
        false => ("", "deleted"),
    };
    let mut text = String::new();
    for (slot, step) in &done.retired {
        text.push_str(&format!("step {step} (slot {slot}) {would}retired\n"));
    }
    for name in &done.deleted {
        text.push_str(&format!("{name} {deleted}\n"));
    }
    for refused in &done.refused {
        text.push_str(&format!("not done: {refused}\n"));
    }
    for stays in &done.stays {
        text.push_str(&format!("{stays}\n"));
    }
    if done.retired.is_empty() && done.deleted.is_empty() {
        text.push_str("nothing to prune\n");
    }
    let steps: Vec<String> = kept.iter().rev().map(u64::to_string).collect();
    let many = counted(kept.len() as u64, "checkpoint");
    text.push_str(&format!("{many} kept: steps {}\n", steps.join(", ")));
    let of = match opened.ledger.rules.as_ref() {
        Some(logged) if logged == rules => " (as the job was started)",
        Some(_) => "",
        None => " (its log does not say how the job was started)",
    };
    let (last, best) = (rules.last, rules.best);
    text.push_str(&format!(
        "by --keep-last {last} --keep-best {best} --best-by {by}{of}\n"
    ));
    put(text.as_bytes())
}
