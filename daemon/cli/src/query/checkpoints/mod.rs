//! The checkpoints in a job's store: `muster checkpoints`, and what `muster checkpoint` does besides
//! ordering one. All of it is done here, with the caller's rights: an agent is asked only where the
//! store is, and works on meanwhile.

mod explain;
mod export;
mod list;
mod prune;
mod rollback;
mod verify;

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::builder::{OsStringValueParser, TypedValueParser as _};
use muster_checkpoint::load::LoadError;
use muster_checkpoint::manifest::Manifest;
use muster_checkpoint::verify::Depth;
use muster_protocol::checkpoint::State;
use muster_protocol::local::Query;
use muster_protocol::storelog::Body;
use muster_protocol::{Digest, JobKey};
use muster_store::Location;
use serde_json::{Value, json};

use super::client::{Client, rows_of};
use super::output::{Failure, Style, clean, duration_ms, field, gib, list, put, put_json};
use crate::kept::{Folder, Ledger, LedgerError, Row, Unknown, manifest_of, whole};
use crate::stores;

/// Threads that read and verify.
const THREADS: usize = 4;

/// Actions of `muster checkpoint` besides ordering one.
#[derive(Debug, clap::Subcommand)]
pub(super) enum Sub {
    /// List a job's checkpoints: the same as `muster checkpoints`
    List(ListArgs),
    /// Read checkpoints whole, and say what is damaged
    Verify(verify::Args),
    /// Say which checkpoint would be restored, and why each newer one would not
    Explain(explain::Args),
    /// Write a checkpoint's tensors to one file
    Export(export::Args),
    /// Keep a checkpoint for good
    Pin(PinArgs),
    /// Take a pin back: the job's rules decide again
    Unpin(PinArgs),
    /// Retire and delete checkpoints that are not to be kept
    Prune(prune::Args),
    /// Have the job go on from an earlier checkpoint: reject all newer ones
    Rollback(rollback::Args),
}

/// The job whose checkpoints are meant, and where they are.
#[derive(Debug, clap::Args)]
pub(super) struct Where {
    /// The job's id; UID/ID where several users have a job of that id
    job: String,
    /// The location that `muster run --store` was given [default: that of the job that runs on this node]
    #[arg(
        long,
        value_name = "LOCATION",
        value_parser = OsStringValueParser::new().try_map(stores::parse)
    )]
    store: Option<Location>,
    #[command(flatten)]
    common: super::Common,
}

/// `muster checkpoints`
#[derive(Debug, clap::Args)]
pub struct ListArgs {
    #[command(flatten)]
    of: Where,
    /// Retired ones too, of which nothing is left
    #[arg(long)]
    all: bool,
}

/// `muster checkpoint pin` and `unpin`
#[derive(Debug, clap::Args)]
pub(super) struct PinArgs {
    #[command(flatten)]
    of: Where,
    /// Its step
    step: u64,
}

pub(super) async fn main(sub: &Sub, style: &Style) -> Result<(), Failure> {
    match sub {
        Sub::List(args) => all(args, style).await,
        Sub::Verify(args) => verify::main(args).await,
        Sub::Explain(args) => explain::main(args).await,
        Sub::Export(args) => export::main(args).await,
        Sub::Pin(args) => pin(args).await,
        Sub::Unpin(args) => unpin(args).await,
        Sub::Prune(args) => prune::main(args).await,
        Sub::Rollback(args) => rollback::main(args).await,
    }
}

pub(super) async fn all(args: &ListArgs, style: &Style) -> Result<(), Failure> {
    list::main(args, style).await
}

/// Where a job's checkpoints are.
struct Found {
    root: Location,
    /// The job's id.
    job: String,
    /// Slots whose checkpoints the job's leader knows to be good, if that is the agent here.
    verified: Vec<u64>,
}

impl Where {
    async fn find(&self) -> Result<Found, Failure> {
        let (_, id) = JobKey::parts_of(&self.job);
        let found = |root: Location, verified| Found {
            root,
            job: id.to_owned(),
            verified,
        };
        if let Some(location) = &self.store {
            return Ok(found(location.clone(), Vec::new()));
        }
        let named = "name its store with --store";
        let client = match Client::find(self.common.socket.as_deref(), Some(&self.job)).await {
            Err(Failure::Unreachable(text)) => {
                return Err(Failure::Unreachable(format!(
                    "{text}; for a job that does not run, {named}"
                )));
            }
            other => other?,
        };
        let jobs = client.query(Query::Jobs).await?;
        let rows: Vec<&Value> = rows_of(&jobs, &self.job).collect();
        let with = rows.iter().find(|row| !field(row, "store").is_empty());
        let Some(row) = with else {
            let job = clean(&self.job);
            return Err(Failure::Refused(match rows.is_empty() {
                true => format!("no job {job} is known on this agent: {named}"),
                false => format!(
                    "{job} has no launcher on this node that has a store: ask on one of its nodes, or {named}"
                ),
            }));
        };
        let verified = list(row, "verified").iter().filter_map(Value::as_u64);
        let location = stores::parse(field(row, "store").into())
            .map_err(|error| Failure::Refused(error.to_string()))?;
        Ok(found(location, verified.collect()))
    }

    fn json(&self) -> bool {
        self.common.out.json()
    }

    async fn open(&self, write: bool) -> Result<Opened, Failure> {
        let found = self.find().await?;
        let ledger = Ledger::open(&found.root, &found.job, write)?;
        let (owner, job) = JobKey::parts_of(&self.job);
        if let (Some(owner), Some((last, _))) = (owner, &ledger.latest)
            && last.key.owner != owner
        {
            return Err(Failure::Refused(format!(
                "the job {job} in this store is of user {}, not of {owner}: name it as {}/{job}",
                clean(&last.key.owner),
                clean(&last.key.owner)
            )));
        }
        let place = ledger.place().clone();
        Ok(Opened {
            ledger,
            place,
            verified: found.verified,
        })
    }
}

/// How a checkpoint was found.
#[derive(Debug, PartialEq)]
enum Checked {
    Whole,
    Damaged(String),
    /// That cannot be told.
    Unknown(String),
    /// By this slot of the log, while it was looked at.
    Retired(u64),
}

/// A job's log, and its folder.
struct Opened {
    ledger: Ledger,
    place: Folder,
    verified: Vec<u64>,
}

impl Opened {
    /// The checkpoint of a step.
    fn row(&self, step: u64) -> Result<&Row, Failure> {
        self.ledger.of_step(step).ok_or_else(|| {
            let steps = self.ledger.rows.iter().filter(|row| row.in_force());
            let mut steps: Vec<u64> = steps.map(|row| row.commit.step).collect();
            steps.dedup();
            let known: Vec<String> = steps.iter().rev().take(8).map(u64::to_string).collect();
            Failure::Refused(match known.is_empty() {
                true => "the job has no checkpoints".into(),
                false => format!(
                    "there is no checkpoint of step {step}; there are, the newest first: {}",
                    known.join(", ")
                ),
            })
        })
    }

    /// Whether a checkpoint is what was saved. A job that runs meanwhile retires checkpoints in the log before
    /// it deletes them: so nothing is called damaged before the log was read once more, up to its end.
    fn state_of(&mut self, seq: u64, depth: Depth) -> Result<Checked, Failure> {
        let of = |ledger: &Ledger| ledger.rows.iter().find(|row| row.seq == seq).cloned();
        let Some(row) = of(&self.ledger) else {
            return Ok(Checked::Unknown("the log has no such checkpoint".into()));
        };
        let why = match whole(&self.place, row.commit.manifest, depth, &|| {}) {
            Ok(State::Damaged { why }) => why,
            Ok(State::Unreadable { why }) => return Ok(Checked::Unknown(why)),
            Ok(State::Verified | State::Unchecked) => return Ok(Checked::Whole),
            Err(error) => return Ok(Checked::Unknown(error.to_string())),
        };
        self.ledger.refresh()?;
        Ok(match of(&self.ledger).and_then(|row| row.retired) {
            Some(slot) if row.retired.is_none() => Checked::Retired(slot),
            _ => Checked::Damaged(why),
        })
    }

    /// Its manifest, or how that is damaged.
    fn manifest(&self, digest: Digest) -> Result<Result<Manifest, String>, Failure> {
        let reader = self
            .place
            .open()
            .map_err(|e| Failure::from(Unknown::Store(e)))?;
        Ok(manifest_of(&reader, digest)?)
    }

    /// Its manifest, or a failure that says why there is none.
    fn whole_manifest(&self, row: &Row) -> Result<Manifest, Failure> {
        self.manifest(row.commit.manifest)?.map_err(|why| {
            let step = row.commit.step;
            Failure::Refused(match row.retired {
                Some(slot) => {
                    format!("the checkpoint of step {step} was retired in slot {slot}, and deleted")
                }
                None => format!("the checkpoint of step {step} is damaged: {why}"),
            })
        })
    }
}

impl From<LedgerError> for Failure {
    fn from(error: LedgerError) -> Failure {
        match error {
            LedgerError::NoStore(_) => Failure::Usage(error.to_string()),
            _ => Failure::Refused(error.to_string()),
        }
    }
}

impl From<Unknown> for Failure {
    fn from(error: Unknown) -> Failure {
        Failure::Refused(error.to_string())
    }
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Failure {
        Failure::Refused(crate::kept::words(&error))
    }
}

/// How long ago something was saved, by this machine's clock.
fn age(saved_at: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |now| now.as_secs());
    match now.checked_sub(saved_at) {
        None => "in the future".into(),
        Some(seconds) if seconds < 120 => format!("{seconds} s"),
        Some(seconds) if seconds < 2 * 86_400 => duration_ms(seconds as f64 * 1e3),
        Some(seconds) => format!("{} days", seconds / 86_400),
    }
}

/// A checkpoint as people name it.
fn named(row: &Row) -> String {
    format!("step {} (slot {})", row.commit.step, row.seq)
}

async fn pin(args: &PinArgs) -> Result<(), Failure> {
    let mut opened = args.of.open(true).await?;
    let row = opened.row(args.step)?.clone();
    if let Some(slot) = row.retired {
        return Err(Failure::Refused(format!(
            "{} was retired in slot {slot}: it may be deleted already",
            named(&row)
        )));
    }
    let slot = match row.pinned {
        true => None,
        false => Some(opened.ledger.append(Body::Pin { seq: row.seq })?),
    };
    // A RETIRE may have come first.
    if let Some(retired) = opened.row(args.step)?.retired {
        return Err(Failure::Refused(format!(
            "{} was retired meanwhile, in slot {retired}",
            named(&row)
        )));
    }
    if args.of.json() {
        return put_json(
            &json!({ "ok": true, "step": args.step, "slot": row.seq, "pinned": slot }),
        );
    }
    let text = match slot {
        Some(slot) => format!("{} is pinned, by slot {slot} of the log\n", named(&row)),
        None => format!("{} was pinned already\n", named(&row)),
    };
    put(text.as_bytes())
}

async fn unpin(args: &PinArgs) -> Result<(), Failure> {
    let mut opened = args.of.open(true).await?;
    // Of several commits of a step, the one that is pinned.
    let mut rows = opened.ledger.rows.iter().rev();
    let row = match rows.find(|row| row.pinned && row.commit.step == args.step) {
        Some(row) => row.clone(),
        None => opened.row(args.step)?.clone(),
    };
    let slot = match row.pinned {
        true => Some(opened.ledger.append(Body::Unpin { seq: row.seq })?),
        false => None,
    };
    if args.of.json() {
        return put_json(
            &json!({ "ok": true, "step": args.step, "slot": row.seq, "unpinned": slot }),
        );
    }
    let text = match slot {
        Some(slot) => format!(
            "{} is pinned no more, by slot {slot} of the log\n",
            named(&row)
        ),
        None => format!("{} was not pinned\n", named(&row)),
    };
    put(text.as_bytes())
}

/// A path's folder and its name.
fn split(path: &Path) -> Option<(&Path, &str)> {
    let name = path.file_name()?.to_str()?;
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty());
    Some((parent.unwrap_or(Path::new(".")), name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_ages_for_people() {
        assert_eq!(gib(512), "0.5 KiB");
        assert_eq!(gib(3 << 20), "3.0 MiB");
        assert_eq!(gib(5 << 29), "2.50 GiB");
        assert_eq!(age(u64::MAX), "in the future");
        assert!(age(0).ends_with(" days"));
    }

    #[test]
    fn a_file_s_name_and_its_folder() {
        assert_eq!(split(Path::new("a.pt")), Some((Path::new("."), "a.pt")));
        assert_eq!(split(Path::new("/x/a.pt")), Some((Path::new("/x"), "a.pt")));
        assert_eq!(split(Path::new("/")), None);
    }
}
