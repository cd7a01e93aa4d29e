//! A job's log, read and appended to without an agent: with the caller's rights, by the rules that all
//! of the log's readers and writers share ([`muster_protocol::storelog`]).
//!
//! A person's entries carry [`OPERATOR`] as their writer: pins, rejections, retirements. They are
//! created in the log's next slot like any other, so that a job which runs meanwhile finds them there,
//! and none of the two ever overwrites the other.

use std::collections::BTreeSet;
use std::iter;
use std::thread::{self, sleep};
use std::time::Instant;

use muster_protocol::checkpoint::{Keeper, KeeperEvent, Standing};
use muster_protocol::record::{self, Arbiter, Cause, CommitRef, Record};
use muster_protocol::storelog::{
    Body, CreateOutcome, Damage, Effect, Entry, Event, Log, OPERATOR, Outcome, Output, ReadOutcome,
    Rules, Snapshot,
};
use muster_protocol::{Digest, Time};
use muster_store::{Created, Kind, Location, Options, Store, StoreError, UUID_NAME};
use rand::TryRngCore;
use rand::rngs::OsRng;

use super::Folder;
use crate::stores;

/// How often an operation on the log is tried again before the command gives up.
const TRIES: usize = 20;

/// Why a job's log cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    #[error("there is no store in {0}: give what the job was started with as --store")]
    NoStore(String),
    #[error("the store has no job `{job}`: its log {log} is not there; check the job's id")]
    NoJob { job: String, log: String },
    /// The store's own words name what helps.
    #[error("{0}")]
    Store(#[source] StoreError),
    #[error("the job's log is damaged: {0}")]
    Broken(Damage),
    #[error("the log's first entry is not a job's beginning: it belongs to something else")]
    Foreign,
    #[error(
        "the store does not say what became of an entry: look at the job's checkpoints before it is tried again"
    )]
    Unsettled,
    #[error("the log does not take it: {0}")]
    Refused(String),
    #[error("no random numbers from the kernel: {0}")]
    Random(String),
}

/// A COMMIT of the log, and what was said of it since.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    pub seq: u64,
    pub commit: CommitRef,
    pub pinned: bool,
    /// The slot of its RETIRE.
    pub retired: Option<u64>,
    /// Why it was rejected.
    pub rejected: Option<String>,
}

impl Row {
    /// Whether the log would have it restored.
    pub fn in_force(&self) -> bool {
        self.retired.is_none() && self.rejected.is_none()
    }
}

/// A job's log as it was read.
#[derive(Debug)]
pub struct Ledger {
    log: Log,
    store: Store,
    place: Folder,
    began: Instant,
    appends: u64,
    /// The oldest first.
    pub rows: Vec<Row>,
    /// The newest generation, or the job's end.
    pub latest: Option<(Record, Digest)>,
    /// The rules that the job was started with; none of a log without checkpoints, or of an earlier release.
    pub rules: Option<Rules>,
    pub keeper: Keeper,
}

impl Ledger {
    /// Reads the log of a job in a store. To append, `write`: the store is probed then.
    ///
    /// # Errors
    /// There is none, or it cannot be read to its end.
    pub fn open(location: &Location, job: &str, write: bool) -> Result<Ledger, LedgerError> {
        let failed = |error: StoreError| match error.kind {
            Kind::NotFound | Kind::NoBucket => LedgerError::NoStore(location.to_string()),
            _ => LedgerError::Store(error),
        };
        let root = Store::open(location, &Options::of_process()).map_err(failed)?;
        root.head(UUID_NAME).map_err(failed)?;
        if write {
            root.probe().map_err(failed)?;
        }
        let store = root.within(&stores::folder(job)).map_err(failed)?;
        let Some(first) = slot(&store, 1).map_err(LedgerError::Store)? else {
            let (job, log) = (job.to_owned(), store.shown("log"));
            return Err(LedgerError::NoJob { job, log });
        };
        let first = Entry::decode(&first).map_err(|error| {
            let slot = 1;
            LedgerError::Broken(Damage::Entry { slot, error })
        })?;
        let Body::Claim(birth) = first.body else {
            return Err(LedgerError::Foreign);
        };
        let Arbiter::Store(uuid) = birth.arbiter else {
            return Err(LedgerError::Foreign);
        };
        // Entries are known again by it.
        let seed = random()?;
        let mut ledger = Ledger {
            place: Folder::at(location, job).map_err(LedgerError::Store)?,
            log: Log::new(birth.key.clone(), uuid, OPERATOR, seed),
            store,
            began: Instant::now(),
            appends: 0,
            rows: Vec::new(),
            latest: None,
            rules: None,
            keeper: Keeper::default(),
        };
        ledger.refresh()?;
        Ok(ledger)
    }

    /// The job's folder in the store.
    pub fn place(&self) -> &Folder {
        &self.place
    }

    /// Signs that change in the store while anything of the job runs: the log's next slot, and its leader's beacon
    /// (R14).
    ///
    /// # Errors
    /// The store does not say.
    pub fn signs_of_life(&mut self) -> Result<(u64, Option<u64>), LedgerError> {
        self.refresh()?;
        let beacon = stores::beacon(&self.store).map_err(LedgerError::Store)?;
        Ok((self.log.tail().next, beacon))
    }

    /// Whether the job is over, as its log says.
    pub fn is_over(&self) -> bool {
        let latest = self.latest.as_ref();
        latest.is_some_and(|(record, _)| record.kind.is_terminal())
    }

    /// The newest generation that may still commit what it has written.
    pub fn newest(&self) -> Digest {
        self.latest
            .as_ref()
            .map_or(Digest::ZERO, |(_, digest)| *digest)
    }

    /// The log's statements on each checkpoint.
    pub fn standings(&self) -> Vec<Standing> {
        self.keeper.standings().collect()
    }

    /// The checkpoint that the next generation would restore, as far as the log goes.
    pub fn restorable(&self) -> Option<&Row> {
        self.rows.iter().rev().find(|row| row.in_force())
    }

    /// The newest commit in force of a step; if there is none, the newest of any.
    pub fn of_step(&self, step: u64) -> Option<&Row> {
        let of = || {
            self.rows
                .iter()
                .rev()
                .filter(move |row| row.commit.step == step)
        };
        of().find(|row| row.in_force()).or_else(|| of().next())
    }

    /// Reads what has come since.
    ///
    /// # Errors
    /// The log cannot be read to its end.
    pub fn refresh(&mut self) -> Result<(), LedgerError> {
        let now = self.now();
        self.log.refresh(now);
        self.drive(None).map(drop)
    }

    /// Appends an entry, and reads it back: its slot.
    ///
    /// # Errors
    /// It would not be valid, or what became of it is not known.
    pub fn append(&mut self, body: Body) -> Result<u64, LedgerError> {
        self.appends += 1;
        let (id, now) = (self.appends, self.now());
        self.log.append(id, body, now);
        match self.drive(Some(id))? {
            Some(Outcome::Won { seq }) => Ok(seq),
            Some(Outcome::Invalid(why)) => Err(LedgerError::Refused(why.to_string())),
            Some(Outcome::Overtaken { by }) => Err(LedgerError::Refused(format!(
                "a newer generation was decided in slot {by}"
            ))),
            None => Err(LedgerError::Unsettled),
        }
    }

    /// Ends the job by a person's word; one that is over already stays as it ended.
    ///
    /// # Errors
    /// Others decide what follows just now, or what became of it is not known.
    pub fn end(&mut self) -> Result<Record, LedgerError> {
        let Some((last, parent)) = self.latest.clone() else {
            return Err(LedgerError::Foreign);
        };
        if last.kind.is_terminal() {
            return Ok(last);
        }
        let record = Record {
            birth: last.lineage(),
            number: last.number + 1,
            parent,
            kind: record::Kind::End { cancelled: true },
            members: Vec::new(),
            witnesses: Vec::new(),
            cause: Cause::Cancelled,
            restore: self.restorable().map(|row| row.commit),
            nonce: random()?,
            ..last
        };
        self.append(Body::Claim(Box::new(record.clone())))?;
        Ok(record)
    }

    fn now(&self) -> Time {
        // Not zero: that stands for never.
        Time(1 + u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX - 1))
    }

    /// Carries out what the log wants, until it was read to its end, or this append is through.
    fn drive(&mut self, wanted: Option<u64>) -> Result<Option<Outcome>, LedgerError> {
        let mut failures = 0;
        loop {
            while let Some(output) = self.log.poll_output() {
                match output {
                    Output::Entry { entry, valid, .. } if valid => self.take(entry),
                    Output::Appended { id, outcome } if wanted == Some(id) => {
                        return Ok(Some(outcome));
                    }
                    Output::Began { snapshot, .. } => self.begin(*snapshot),
                    Output::Entry { .. }
                    | Output::TailConfirmed { .. }
                    | Output::Mended
                    | Output::Appended { .. } => {}
                    Output::Broken { why } => return Err(LedgerError::Broken(why)),
                }
            }
            let effects: Vec<Effect> = iter::from_fn(|| self.log.poll_effect()).collect();
            if !effects.is_empty() {
                for (event, failed) in self.carry_out_all(effects) {
                    failures += usize::from(failed.is_some());
                    if let Some(error) = failed
                        && failures > TRIES
                    {
                        return Err(LedgerError::Store(error));
                    }
                    let now = self.now();
                    // Each effect is answered once, at once.
                    let _answered = self.log.handle(event, now);
                }
            } else if let Some((at, _)) = self.log.poll_timeout() {
                sleep(at.since(self.now()).to_std());
                let now = self.now();
                self.log.handle_timeout(now);
            } else {
                return Ok(None);
            }
        }
    }

    /// Reads of an old log come several at a time.
    fn carry_out_all(&self, effects: Vec<Effect>) -> Vec<(Event, Option<StoreError>)> {
        let mut others = effects.into_iter();
        let first = others.next();
        thread::scope(|scope| {
            let threads: Vec<_> = others
                .map(|effect| {
                    let failed = effect.unknown();
                    let run = move || self.carry_out(effect);
                    (thread::Builder::new().spawn_scoped(scope, run), failed)
                })
                .collect();
            let here = first.map(|effect| self.carry_out(effect));
            let there = threads.into_iter().map(|(thread, failed)| {
                let ended = thread.ok().and_then(|thread| thread.join().ok());
                ended.unwrap_or((failed, None))
            });
            here.into_iter().chain(there).collect()
        })
    }

    fn carry_out(&self, effect: Effect) -> (Event, Option<StoreError>) {
        match effect {
            Effect::Read { op, slot: at } => {
                let (outcome, failed) = match slot(&self.store, at) {
                    Ok(Some(bytes)) => (ReadOutcome::Found(bytes), None),
                    Ok(None) => (ReadOutcome::Absent, None),
                    Err(error) => (ReadOutcome::Failed, Some(error)),
                };
                let slot = at;
                (Event::Read { op, slot, outcome }, failed)
            }
            Effect::Create { op, slot, bytes } => {
                let created = self.store.create(&stores::entry(slot), &bytes);
                let (outcome, failed) = match created {
                    Ok(Created::Created) => (CreateOutcome::Won, None),
                    Ok(Created::Exists) => (CreateOutcome::Exists, None),
                    // Also where nothing was written: the log's rule for an unknown outcome is safe for
                    // it too.
                    Err(error) => (CreateOutcome::Unknown, Some(error)),
                };
                (Event::Created { op, slot, outcome }, failed)
            }
        }
    }

    /// Takes in a snapshot in place of the slots below it.
    fn begin(&mut self, snapshot: Snapshot) {
        self.keeper.begin(&snapshot);
        let generation = snapshot.claim.digest();
        // Nobody restores anything where a job has ended.
        if snapshot.claim.kind.is_terminal() {
            self.keeper.handle(KeeperEvent::Loaded { generation });
        }
        let rows = snapshot.commits.into_iter().map(|c| Row {
            seq: c.seq,
            commit: c.commit,
            pinned: c.pinned,
            retired: c.retired,
            rejected: c.rejected,
        });
        self.rows = rows.collect();
        self.latest = Some((snapshot.claim, generation));
        self.rules = snapshot.rules;
    }

    /// A valid entry.
    fn take(&mut self, entry: Entry) {
        let seq = entry.seq;
        let keeper = &mut self.keeper;
        match entry.body {
            Body::Claim(record) => {
                let generation = record.digest();
                // Nobody restores anything where a job has ended.
                let restore = record.restore.filter(|_| !record.kind.is_terminal());
                keeper.handle(KeeperEvent::Claimed {
                    generation,
                    restore,
                });
                self.latest = Some((*record, generation));
            }
            Body::Commit(commit) => {
                let generation = commit.generation;
                keeper.handle(KeeperEvent::Committed { seq, commit });
                keeper.handle(KeeperEvent::Loaded { generation });
                self.rows.push(Row {
                    seq,
                    commit,
                    pinned: false,
                    retired: None,
                    rejected: None,
                });
            }
            Body::Retire { seq: of, .. } => {
                keeper.handle(KeeperEvent::Retired { seq: of });
                self.mark(of, |row| row.retired = Some(seq));
            }
            Body::Reject { seq: of, reason } => {
                keeper.handle(KeeperEvent::Rejected { seq: of });
                self.mark(of, |row| row.rejected = Some(reason));
            }
            Body::Pin { seq: of } => {
                keeper.handle(KeeperEvent::Pinned { seq: of });
                self.mark(of, |row| row.pinned = true);
            }
            Body::Rules(rules) => self.rules = Some(rules),
            Body::Snapshot(snapshot) => {
                self.keeper.forget(&snapshot);
                let kept: BTreeSet<u64> = snapshot.commits.iter().map(|c| c.seq).collect();
                self.rows.retain(|row| kept.contains(&row.seq));
            }
            Body::Unpin { seq: of } => {
                keeper.handle(KeeperEvent::Unpinned { seq: of });
                self.mark(of, |row| row.pinned = false);
            }
        }
    }

    fn mark(&mut self, seq: u64, change: impl FnOnce(&mut Row)) {
        if let Some(row) = self.rows.iter_mut().find(|row| row.seq == seq) {
            change(row);
        }
    }
}

fn random() -> Result<u64, LedgerError> {
    OsRng
        .try_next_u64()
        .map_err(|e| LedgerError::Random(e.to_string()))
}

/// A slot of a job's log.
fn slot(store: &Store, slot: u64) -> Result<Option<Vec<u8>>, StoreError> {
    match store.get(&stores::entry(slot), stores::MAX_ENTRY) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(error) if error.kind == Kind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests;
