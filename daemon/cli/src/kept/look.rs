//! Looks at what the store holds of the checkpoints in the log, and decides what should go by the policy.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::io;
use std::ops::ControlFlow;

use muster_checkpoint::hex::{Bytes, Id};
use muster_checkpoint::load::{Damage, LoadError};
use muster_checkpoint::manifest::{Manifest, ManifestError};
use muster_checkpoint::newest::Shelf;
use muster_checkpoint::retention::{self, Best, Commit, Item, Policy, View};
use muster_checkpoint::verify::{Depth, verify, verify_watched};
use muster_protocol::Digest;
use muster_protocol::checkpoint::{Standing, State};
use muster_protocol::local::{Left, MAX_NAME, MAX_NEEDS, short};
use muster_protocol::record::CommitRef;
use muster_protocol::storelog;

use super::Folder;

/// The user's rules on what is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Rules {
    pub policy: Policy,
    /// The metric by which the best is the best.
    pub metric: String,
}

impl Default for Rules {
    /// The newest three.
    fn default() -> Rules {
        Rules {
            policy: Policy::default(),
            metric: String::new(),
        }
    }
}

impl Rules {
    /// As the job's log has them.
    pub fn logged(&self) -> storelog::Rules {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let (best, of) = self.policy.best.unwrap_or((Best::Lowest, 0));
        storelog::Rules {
            last: count(self.policy.last),
            best: count(of),
            metric: self.metric.clone(),
            highest: best == Best::Highest,
        }
    }
}

impl From<&storelog::Rules> for Rules {
    fn from(rules: &storelog::Rules) -> Rules {
        let count = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
        let best = match rules.highest {
            true => Best::Highest,
            false => Best::Lowest,
        };
        Rules {
            policy: Policy {
                last: count(rules.last),
                best: Some((best, count(rules.best))),
            },
            metric: rules.metric.clone(),
        }
    }
}

/// Why nothing can be said of a checkpoint, or of all of them: nothing is decided then.
#[derive(Debug, thiserror::Error)]
pub enum Unknown {
    #[error("the store cannot be read: {0}; check that it is mounted and answers")]
    Store(#[source] io::Error),
    #[error("its manifest cannot be used: {0}")]
    Manifest(#[source] ManifestError),
    #[error("{}", words(.0))]
    Data(#[source] LoadError),
    #[error("{0} names files in more places than Muster writes to: move it away")]
    Places(String),
}

/// A checkpoint of the log, as it lies in the store.
#[derive(Clone, Debug, PartialEq)]
pub struct Seen {
    pub seq: u64,
    /// Names in the store; without its manifest, those of all folders that its step and generation may have
    /// written.
    pub needs: Vec<String>,
    pub state: State,
    /// It is retired, and nothing of it is there.
    pub gone: bool,
    pub metric: Option<f64>,
}

/// Findings of a look, and what should be done about them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reviewed {
    pub seen: Vec<Seen>,
    /// Slots to retire.
    pub retire: Vec<u64>,
    /// Things in the store that no checkpoint in force needs.
    pub left: Vec<Left>,
    /// The checkpoint whose bytes should be read next: its slot and its manifest.
    pub verify: Option<(u64, Digest)>,
}

/// An error with what caused it.
pub fn words(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

fn name_of(manifest: Digest) -> String {
    format!("manifest/{}.json", manifest.hex())
}

/// A manifest by its digest; the damage, if it is not there as it was written.
///
/// # Errors
/// Whether it is damaged is not known, or this build cannot read its format.
pub fn manifest_of(
    shelf: &impl Shelf,
    manifest: Digest,
) -> Result<Result<Manifest, String>, Unknown> {
    let id: Id = Bytes(manifest.0);
    let bytes = match shelf.manifest(id) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Err("its manifest is not there".into()));
        }
        Err(error) => return Err(Unknown::Store(error)),
    };
    let found = Manifest::digest(&bytes);
    if found != id {
        return Ok(Err(format!(
            "its manifest {} is damaged: its digest is {found}",
            name_of(manifest)
        )));
    }
    Manifest::decode(&bytes).map(Ok).map_err(Unknown::Manifest)
}

/// Whether a checkpoint is what was saved: by the lengths of its files, or by all bytes. `each` is called after each
/// file that was looked at, and each chunk that was read.
///
/// # Errors
/// That is not known.
pub fn whole(
    place: &Folder,
    manifest: Digest,
    depth: Depth,
    each: &(dyn Fn() + Sync),
) -> Result<State, Unknown> {
    let shelf = place.open().map_err(Unknown::Store)?;
    let go_on = |_| {
        each();
        ControlFlow::Continue(())
    };
    let state = match manifest_of(&shelf, manifest)? {
        Ok(manifest) => found(
            verify_watched(&manifest, &shelf, depth, None, &go_on),
            depth,
        )?,
        Err(why) => State::Damaged { why },
    };
    // A store that went away meanwhile has damaged nothing.
    place.open().map_err(Unknown::Store)?;
    Ok(state)
}

/// State of a checkpoint by the lengths of its files.
fn sized(shelf: &impl Shelf, manifest: &Manifest) -> Result<State, Unknown> {
    found(verify(manifest, shelf, Depth::Sizes), Depth::Sizes)
}

/// State of a checkpoint by the result of a look.
pub(super) fn found(looked: Result<(), LoadError>, depth: Depth) -> Result<State, Unknown> {
    match looked {
        Ok(()) if depth == Depth::Sizes => Ok(State::Unchecked),
        Ok(()) => Ok(State::Verified),
        // A disk that cannot be read now may be read again.
        Err(error @ LoadError::Damage(Damage::Disk { .. })) => Err(Unknown::Data(error)),
        Err(LoadError::Damage(damage)) => Ok(State::Damaged {
            why: short(damage.to_string()),
        }),
        Err(error) => Err(Unknown::Data(error)),
    }
}

/// Looks at a checkpoint of the log. An error that keeps it from being read concerns no other.
fn look(
    shelf: &impl Shelf,
    of: &Standing,
    listed: bool,
    rules: &Rules,
    stored: &[String],
    unread: &Unread,
) -> Seen {
    let name = name_of(of.commit.manifest);
    let mut seen = Seen {
        seq: of.seq,
        needs: vec![name],
        state: match of.verified {
            true => State::Verified,
            false => State::Unchecked,
        },
        gone: of.retired && !listed,
        metric: None,
    };
    if seen.gone {
        return seen;
    }
    let unreadable = |error: Unknown| State::Unreadable {
        why: short(words(&error)),
    };
    let found = match manifest_of(shelf, of.commit.manifest) {
        Ok(found) => found.map_err(|why| State::Damaged { why }),
        Err(error) => Err(unreadable(error)),
    };
    let manifest = match found {
        Ok(manifest) => manifest,
        Err(state) => {
            seen.state = state;
            // Once it is retired, only its generation's fence says whose the folders are.
            if !of.retired {
                let folders = stored.iter().filter(|folder| may_be_of(folder, &of.commit));
                seen.needs
                    .extend(folders.map(|folder| format!("data/{folder}")));
            }
            return seen;
        }
    };
    let folder = |path: &str| Some(path.rsplit_once('/')?.0.to_owned());
    let folders: BTreeSet<String> = (manifest.files.iter())
        .filter_map(|f| folder(&f.path))
        .collect();
    seen.needs.extend(folders);
    // Every rank of a save that writes nothing leaves a part there all the same.
    seen.needs.extend(folder_of(&manifest));
    seen.needs.sort();
    seen.needs.dedup();
    if seen.needs.len() > MAX_NEEDS || seen.needs.iter().any(|name| name.len() > MAX_NAME) {
        seen.state = unreadable(Unknown::Places(name_of(of.commit.manifest)));
        return seen;
    }
    seen.metric = manifest.metric(&rules.metric);
    if !of.retired {
        match sized(shelf, &manifest) {
            Ok(damaged @ State::Damaged { .. }) => seen.state = damaged,
            Ok(_) => {
                let known = unread.get(&of.commit.manifest).cloned();
                // What one reading took for damaged may have been found whole since.
                let stale = |state: &State| of.verified && matches!(state, State::Damaged { .. });
                seen.state = known.filter(|state| !stale(state)).unwrap_or(seen.state);
            }
            Err(error) => seen.state = unreadable(error),
        }
    }
    seen
}

/// Whether a folder of data may belong to a commit: its name says so as far as the log does.
fn may_be_of(folder: &str, commit: &CommitRef) -> bool {
    let step = folder.split('-').next().and_then(|step| step.parse().ok());
    step == Some(commit.step) && generation_of(folder) == Some(first_of(commit.generation))
}

/// Where a save's files are, as its attempt names it.
fn folder_of(manifest: &Manifest) -> Option<String> {
    let origin = &manifest.origin;
    let generation = origin.generation.to_string();
    let first = generation.get(..16)?;
    Some(format!("data/{}-{first}-{}", origin.step, origin.attempt))
}

/// The first bytes of the generation that wrote a folder of data; none for what is not Muster's.
fn generation_of(folder: &str) -> Option<[u8; 8]> {
    let mut parts = folder.split('-');
    let (step, generation, attempt) = (parts.next()?, parts.next()?, parts.next()?);
    let _numbers: (u64, u32) = (step.parse().ok()?, attempt.parse().ok()?);
    match parts.next() {
        None => Bytes::<8>::parse(generation).map(|bytes| bytes.0),
        Some(_) => None,
    }
}

fn first_of(digest: Digest) -> [u8; 8] {
    let mut first = [0; 8];
    first.copy_from_slice(&digest.0[..8]);
    first
}

/// Checkpoints that were read and not found whole, by manifest: damaged, or not readable to their end. A glance does
/// not show it.
pub type Unread = BTreeMap<Digest, State>;

/// Looks at all of them, and decides. `newest` is the generation that may still commit.
///
/// # Errors
/// The store is not there, or cannot be listed: nothing is decided then.
pub fn review(
    place: &Folder,
    rules: &Rules,
    newest: Digest,
    standings: &[Standing],
    unread: &Unread,
) -> Result<Reviewed, Unknown> {
    let shelf = place.open().map_err(Unknown::Store)?;
    let listed = Shelf::list(&shelf).map_err(Unknown::Store)?;
    let listed: BTreeSet<Id> = listed.into_iter().collect();
    let folders = place.folders().map_err(Unknown::Store)?;
    let mut seen = Vec::with_capacity(standings.len());
    for of in standings {
        let there = listed.contains(&Bytes(of.commit.manifest.0));
        seen.push(look(&shelf, of, there, rules, &folders, unread));
    }
    // What is in the store, and who wrote it.
    let known: BTreeMap<Digest, Digest> = (standings.iter())
        .map(|of| (of.commit.manifest, of.commit.generation))
        .collect();
    let mut writers: BTreeMap<String, [u8; 8]> = BTreeMap::new();
    for folder in &folders {
        if let Some(first) = generation_of(folder) {
            writers.insert(format!("data/{folder}"), first);
        }
    }
    for id in listed {
        let manifest = Digest(id.0);
        let writer = match known.get(&manifest) {
            Some(generation) => Some(first_of(*generation)),
            // What cannot be read belongs to nobody, and stays.
            None => match manifest_of(&shelf, manifest) {
                Ok(Ok(manifest)) => Some(first_of(Digest(manifest.origin.generation.0))),
                Ok(Err(_)) | Err(_) => None,
            },
        };
        writers.extend(writer.map(|writer| (name_of(manifest), writer)));
    }
    // A store that went away meanwhile has damaged nothing.
    place.open().map_err(Unknown::Store)?;
    Ok(decide(rules, newest, standings, seen, &writers, unread))
}

fn decide(
    rules: &Rules,
    newest: Digest,
    standings: &[Standing],
    seen: Vec<Seen>,
    writers: &BTreeMap<String, [u8; 8]>,
    unread: &Unread,
) -> Reviewed {
    let commit = |(of, seen): (&Standing, &Seen)| Commit {
        seq: of.seq,
        needs: seen.needs.clone(),
        state: match &seen.state {
            _ if of.rejected => retention::State::Rejected,
            // What cannot be read is none of those that are counted on.
            State::Damaged { .. } | State::Unreadable { .. } => retention::State::Rejected,
            State::Verified => retention::State::Verified,
            State::Unchecked => retention::State::Unchecked,
        },
        metric: seen.metric,
        pinned: of.pinned,
        retired: of.retired,
        in_use: of.in_use,
    };
    let commits: Vec<Commit> = standings.iter().zip(&seen).map(commit).collect();
    // The newest generation may still commit what it has written; others are for the log to judge.
    let items: Vec<Item> = (writers.iter())
        .map(|(name, writer)| Item {
            name: name.clone(),
            number: u64::from(*writer == first_of(newest)),
        })
        .collect();
    let view = View {
        commits: &commits,
        items: &items,
        claimed: 1,
        unresolved: &[],
    };
    let decision = retention::review(rules.policy, view);
    // What is damaged or cannot be read is rejected first, in the log, or stays.
    let rejected = |seq: &u64| {
        let mut both = standings.iter().zip(&seen);
        both.any(|(of, seen)| of.seq == *seq && (of.rejected || seen.state.why().is_none()))
    };
    // What one look took for damaged stays, for people, while there are not two that are known to be good.
    let good = |c: &&Commit| c.state == retention::State::Verified && !c.retired;
    let enough = commits.iter().filter(good).count() >= 2;
    let doubted = |seq: &u64| {
        let mut of = commits.iter().filter(|c| c.seq == *seq);
        !enough && of.any(|c| c.state == retention::State::Rejected)
    };
    Reviewed {
        retire: (decision.retire.into_iter())
            .filter(|seq| rejected(seq) && !doubted(seq))
            .collect(),
        left: (decision.delete.into_iter())
            .filter_map(|name| {
                let generation = *writers.get(&name)?;
                Some(Left { name, generation })
            })
            .collect(),
        verify: next_to_verify(rules, standings, &seen, unread),
        seen,
    }
}

/// Two of those that are kept are to be known as good: the newest first, for they stay the longest. One that
/// could not be read is tried again where nothing else is left.
fn next_to_verify(
    rules: &Rules,
    standings: &[Standing],
    seen: &[Seen],
    unread: &Unread,
) -> Option<(u64, Digest)> {
    let both = standings.iter().zip(seen).rev();
    let usable =
        both.filter(|(of, seen)| !of.retired && !of.rejected && seen.state.why().is_none());
    let newest: Vec<_> = usable.take(rules.policy.last.max(2)).collect();
    let (good, other): (Vec<_>, Vec<_>) = (newest.into_iter()).partition(|(of, _)| of.verified);
    let again = || {
        let mut newest = standings.iter().zip(seen).rev();
        newest.find(|(of, _)| {
            let known = unread.get(&of.commit.manifest);
            let untold = matches!(known, Some(State::Unreadable { .. }));
            !of.retired && !of.rejected && untold
        })
    };
    let next = other.first().copied().or_else(again)?;
    (good.len() < 2).then_some((next.0.seq, next.0.commit.manifest))
}

#[cfg(test)]
mod tests;
