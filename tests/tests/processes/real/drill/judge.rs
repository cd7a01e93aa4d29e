//! Invariants of a job's checkpoints, whatever was killed: read from the store and from what the
//! workers noted, by rules of its own that share nothing with the code that is judged but the format.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::Id;
use muster_checkpoint::manifest::Manifest;
use muster_checkpoint::source::Directory;
use muster_checkpoint::verify::{Depth, verify};
use muster_protocol::Digest;
use muster_protocol::record::CommitRef;
use muster_protocol::storelog::{Body, Entry};

use crate::harness::Noted;

/// A valid COMMIT.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Commit {
    pub(crate) seq: u64,
    pub(crate) commit: CommitRef,
    pub(crate) retired: bool,
    pub(crate) rejected: bool,
}

impl Commit {
    /// Whether it may be restored.
    pub(crate) fn counts(&self) -> bool {
        !self.retired && !self.rejected
    }
}

/// A valid CLAIM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) digest: Digest,
    pub(crate) number: u64,
    pub(crate) restore: Option<CommitRef>,
}

/// The job's log, read to its end.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log {
    pub(crate) claims: Vec<Claim>,
    pub(crate) commits: Vec<Commit>,
    /// COMMITs that are not valid: of a generation that was not the latest, or a manifest again.
    pub(crate) refused: Vec<CommitRef>,
}

impl Log {
    /// Reads it, and checks that it is dense and chained, and that every claim restores the newest commit
    /// that counted when it was made.
    pub(crate) fn read(folder: &Path) -> Log {
        let mut log = Log::default();
        let mut before = Digest::ZERO;
        for seq in 1.. {
            let path = folder.join(format!("log/{seq:08}.json"));
            let Ok(bytes) = std::fs::read(&path) else {
                let beyond = folder.join(format!("log/{:08}.json", seq + 1));
                assert!(
                    !beyond.exists() || path.exists(),
                    "{} is missing",
                    path.display()
                );
                break;
            };
            let entry = Entry::decode(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            assert_eq!((entry.seq, entry.prev), (seq, before), "{}", path.display());
            before = Entry::digest(&bytes);
            log.take(seq, entry.body);
        }
        log
    }

    fn take(&mut self, seq: u64, body: Body) {
        match body {
            Body::Claim(record) => {
                assert_eq!(
                    record.restore,
                    self.newest().map(|c| c.commit),
                    "generation {} does not restore the newest commit below slot {seq}: {:?}",
                    record.number,
                    self.commits,
                );
                self.claims.push(Claim {
                    digest: record.digest(),
                    number: record.number,
                    restore: record.restore,
                });
            }
            Body::Commit(commit) => {
                let latest = self
                    .claims
                    .last()
                    .is_some_and(|c| c.digest == commit.generation);
                let again = (self.commits.iter()).any(|c| c.commit.manifest == commit.manifest);
                if !latest || again {
                    return self.refused.push(commit);
                }
                self.commits.push(Commit {
                    seq,
                    commit,
                    retired: false,
                    rejected: false,
                });
            }
            Body::Retire { seq, .. } => self.mark(seq, |c| c.retired = true),
            Body::Reject { seq, .. } => self.mark(seq, |c| c.rejected = true),
            Body::Pin { .. } | Body::Unpin { .. } | Body::Rules(_) | Body::Snapshot(_) => {}
        }
    }

    fn mark(&mut self, seq: u64, change: impl FnOnce(&mut Commit)) {
        let commit = self.commits.iter_mut().find(|c| c.seq == seq);
        change(commit.expect("RETIRE and REJECT are about commits"));
    }

    /// The commit that a claim at the log's end would restore.
    pub(crate) fn newest(&self) -> Option<&Commit> {
        self.commits.iter().rev().find(|c| c.counts())
    }

    /// The newest step that was ever committed; 0 for none.
    pub(crate) fn step(&self) -> u64 {
        self.commits
            .iter()
            .map(|c| c.commit.step)
            .max()
            .unwrap_or(0)
    }
}

/// Judges one job.
#[derive(Debug)]
pub(crate) struct Judge {
    folder: PathBuf,
    /// Manifests whose every byte was found right.
    whole: BTreeSet<Digest>,
    /// Those of which the test itself has destroyed something.
    forgiven: BTreeSet<Digest>,
    /// The files that each manifest that was ever whole names.
    files: BTreeMap<Digest, Vec<String>>,
}

impl Judge {
    /// Of the job in this folder of a store.
    pub(crate) fn new(folder: PathBuf) -> Judge {
        Judge {
            folder,
            whole: BTreeSet::new(),
            forgiven: BTreeSet::new(),
            files: BTreeMap::new(),
        }
    }

    pub(crate) fn log(&self) -> Log {
        Log::read(&self.folder)
    }

    /// Judges everything that can be judged now. Returns the log by then.
    pub(crate) fn check(&mut self, events: &[Noted]) -> Log {
        let log = self.log();
        let claims: BTreeMap<u64, &Claim> = log.claims.iter().map(|c| (c.number, c)).collect();
        assert_eq!(
            claims.len(),
            log.claims.len(),
            "a generation's number came twice"
        );
        for noted in events.iter().filter(|e| e.event == "restored") {
            let claim = claims.get(&noted.generation);
            let claim =
                claim.unwrap_or_else(|| panic!("no claim decided the generation of {noted:?}"));
            let named = claim.restore.map(|c| c.step);
            assert_eq!(
                named,
                Some(noted.step),
                "{noted:?} restored something else than {claim:?}"
            );
        }
        for commit in log.commits.iter().filter(|c| c.counts()) {
            self.is_whole(&commit.commit);
        }
        // Of those that are not damaged two always stay.
        let good = log.commits.iter().filter(|c| !c.rejected).count();
        let stay = log.commits.iter().filter(|c| c.counts()).count();
        assert!(
            stay >= good.min(2),
            "too much was retired: {:?}",
            log.commits
        );
        log
    }

    /// Whether nothing of a checkpoint is there any more. Of one that came and went unseen only the manifest is
    /// looked for, which goes last.
    pub(crate) fn is_deleted(&self, commit: &CommitRef) -> bool {
        let manifest = format!("manifest/{}.json", commit.manifest.hex());
        let files = self.files.get(&commit.manifest).into_iter().flatten();
        let mut names = files.chain(std::iter::once(&manifest));
        !names.any(|name| self.folder.join(name).exists())
    }

    /// As [`check`](Self::check), and reads every byte of what counts again.
    pub(crate) fn check_all(&mut self, events: &[Noted]) -> Log {
        self.whole.clear();
        self.check(events)
    }

    /// Wants nothing of what is committed by now: its data was destroyed.
    pub(crate) fn forgive(&mut self) {
        let commits = self.log().commits;
        self.forgiven
            .extend(commits.iter().map(|c| c.commit.manifest));
    }

    fn is_whole(&mut self, commit: &CommitRef) {
        let known = [&self.whole, &self.forgiven];
        if known.iter().any(|set| set.contains(&commit.manifest)) {
            return;
        }
        match whole(&self.folder, commit) {
            Ok(files) => {
                self.files.insert(commit.manifest, files);
            }
            Err(why) => {
                // It may have been retired since the log was read, and then its data goes.
                let gone = (self.log().commits.iter()).any(|c| c.commit == *commit && !c.counts());
                assert!(gone, "{commit:?} is committed, and not whole: {why}");
            }
        }
        self.whole.insert(commit.manifest);
    }
}

/// That all bytes of a checkpoint are there; in which files.
fn whole(folder: &Path, commit: &CommitRef) -> Result<Vec<String>, String> {
    let path = folder.join(format!("manifest/{}.json", commit.manifest.hex()));
    let bytes = std::fs::read(&path).map_err(|e| format!("{}: {e}", path.display()))?;
    let digest: Id = Manifest::digest(&bytes);
    if digest.0 != commit.manifest.0 {
        return Err(format!("{} is damaged", path.display()));
    }
    let manifest = Manifest::decode(&bytes).map_err(|e| e.to_string())?;
    if manifest.origin.step != commit.step || manifest.origin.generation.0 != commit.generation.0 {
        return Err(format!(
            "its manifest is of something else: {:?}",
            manifest.origin
        ));
    }
    let dir = Dir::open(folder).map_err(|e| e.to_string())?;
    let source = Directory::new(dir, false);
    verify(&manifest, &source, Depth::Everything { threads: 1 }).map_err(|e| e.to_string())?;
    Ok(manifest.files.into_iter().map(|file| file.path).collect())
}
