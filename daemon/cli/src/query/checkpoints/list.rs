//! `muster checkpoints JOB`: what the log says of each checkpoint, and what lies in the store.

use muster_checkpoint::verify::Depth;
use serde_json::{Value, json};

use super::super::output::{Cell, Failure, Style, Table, Tone, counted, put, put_json};
use super::{Checked, ListArgs, Opened, age, gib};
use crate::kept::Row;

/// A checkpoint, as it is shown.
struct Line {
    row: Row,
    bytes: Option<u64>,
    saved_at: Option<u64>,
    world: Option<u32>,
    verified: bool,
    /// How it is damaged, as far as a glance tells.
    damaged: Option<String>,
    /// Why its state cannot be told.
    unknown: Option<String>,
    gone: bool,
}

pub(super) async fn main(args: &ListArgs, style: &Style) -> Result<(), Failure> {
    let mut opened = args.of.open(false).await?;
    let rows = opened.ledger.rows.clone();
    let mut lines: Vec<Line> = (rows.iter().rev())
        .map(|row| line(&mut opened, row))
        .collect::<Result<_, _>>()?;
    let all = lines.len();
    if !args.all {
        lines.retain(|line| !line.gone);
    }
    if args.of.json() {
        return put_json(&Value::Array(lines.iter().map(to_json).collect()));
    }
    let hidden = all - lines.len();
    let mut text = match lines.is_empty() {
        true => "no checkpoints\n".to_owned(),
        false => table(&lines, args.of.common.out.wide()).render(style),
    };
    if hidden > 0 {
        let many = counted(hidden as u64, "retired checkpoint");
        text.push_str(&format!("{many} deleted; --all lists them\n"));
    }
    put(text.as_bytes())
}

fn line(opened: &mut Opened, row: &Row) -> Result<Line, Failure> {
    let mut line = Line {
        row: row.clone(),
        bytes: None,
        saved_at: None,
        world: None,
        verified: opened.verified.contains(&row.seq),
        damaged: None,
        unknown: None,
        gone: false,
    };
    match opened.manifest(row.commit.manifest) {
        Ok(Ok(manifest)) => {
            line.bytes = Some(manifest.bytes());
            line.saved_at = Some(manifest.origin.saved_at);
            line.world = Some(manifest.origin.world);
        }
        // Of one in force it is looked for once more.
        Ok(Err(_)) => line.gone = row.retired.is_some(),
        Err(Failure::Refused(why)) => line.unknown = Some(why),
        Err(other) => return Err(other),
    }
    if row.retired.is_none() && line.unknown.is_none() {
        match opened.state_of(row.seq, Depth::Sizes)? {
            Checked::Damaged(why) => line.damaged = Some(why),
            Checked::Whole => {}
            Checked::Unknown(why) => line.unknown = Some(why),
            Checked::Retired(slot) => {
                line.row.retired = Some(slot);
                line.gone = line.bytes.is_none();
            }
        }
    }
    Ok(line)
}

/// The checkpoint's state in a word or two, and the reason.
fn state(line: &Line) -> (String, Tone, String) {
    let row = &line.row;
    let why = |text: &Option<String>| text.clone().unwrap_or_default();
    let (word, tone, reason) = if let Some(slot) = row.retired {
        let left = match line.gone {
            true => "",
            false => "; its data goes next",
        };
        ("retired", Tone::Dim, format!("by slot {slot}{left}"))
    } else if row.rejected.is_some() {
        ("rejected", Tone::Bad, why(&row.rejected))
    } else if line.damaged.is_some() {
        ("damaged", Tone::Bad, why(&line.damaged))
    } else if line.unknown.is_some() {
        ("unknown", Tone::Warn, why(&line.unknown))
    } else if line.verified {
        ("verified", Tone::Good, String::new())
    } else {
        ("complete", Tone::Plain, String::new())
    };
    let pinned = if row.pinned { ", pinned" } else { "" };
    (format!("{word}{pinned}"), tone, reason)
}

fn table(lines: &[Line], wide: bool) -> Table {
    let mut head = vec!["STEP", "SLOT", "SIZE", "AGE", "RANKS", "STATE"];
    if wide {
        head.extend(["GENERATION", "MANIFEST"]);
    }
    // The longest last.
    head.push("WHY");
    let mut table = Table::new(&head);
    for line in lines {
        let (word, tone, why) = state(line);
        let mut cells = vec![
            Cell::new(Tone::Head, line.row.commit.step.to_string()),
            line.row.seq.to_string().into(),
            line.bytes.map(gib).unwrap_or_default().into(),
            line.saved_at.map(age).unwrap_or_default().into(),
            line.world.map(|w| w.to_string()).unwrap_or_default().into(),
            Cell::new(tone, word),
        ];
        if wide {
            cells.push(line.row.commit.generation.hex().into());
            cells.push(line.row.commit.manifest.hex().into());
        }
        cells.push(why.into());
        table.row(cells);
    }
    table
}

fn to_json(line: &Line) -> Value {
    let row = &line.row;
    json!({
        "step": row.commit.step, "slot": row.seq, "number": row.commit.number,
        "generation": row.commit.generation.hex(), "manifest": row.commit.manifest.hex(),
        "bytes": line.bytes, "time_ms": line.saved_at.map(|s| s.saturating_mul(1000)),
        "world": line.world, "state": state(line).0,
        "verified": line.verified, "pinned": row.pinned, "retired": row.retired,
        "rejected": row.rejected, "damaged": line.damaged, "unknown": line.unknown, "gone": line.gone,
    })
}

#[cfg(test)]
mod tests {
    use muster_protocol::Digest;
    use muster_protocol::record::CommitRef;

    use super::*;

    #[test]
    fn the_worst_that_is_known_is_said_first() {
        let mut line = Line {
            row: Row {
                seq: 7,
                commit: CommitRef {
                    generation: Digest([1; 32]),
                    number: 1,
                    step: 40,
                    manifest: Digest([2; 32]),
                },
                pinned: true,
                retired: None,
                rejected: None,
            },
            bytes: Some(1),
            saved_at: Some(1),
            world: Some(2),
            verified: false,
            damaged: None,
            unknown: None,
            gone: false,
        };
        let word = |line: &Line| state(line).0;
        assert_eq!(word(&line), "complete, pinned");
        line.verified = true;
        assert_eq!(word(&line), "verified, pinned");
        line.damaged = Some("cut".into());
        assert_eq!(state(&line).2, "cut");
        line.row.pinned = false;
        line.row.rejected = Some("flipped".into());
        assert_eq!(
            (word(&line), state(&line).2),
            ("rejected".into(), "flipped".into())
        );
        line.row.retired = Some(9);
        assert_eq!(word(&line), "retired");
        assert_eq!(to_json(&line)["retired"], 9);
    }
}
