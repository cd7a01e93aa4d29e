//! A store for tests, made without a job: checkpoints of a page or two, and a log.

use std::ops::ControlFlow;
use std::path::PathBuf;

use muster_checkpoint::Dtype;
use muster_checkpoint::Slice;
use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::Bytes;
use muster_checkpoint::manifest::{Blob, Manifest, Origin, Placed, Tensor};
use muster_checkpoint::persist::{Options, persist};
use muster_checkpoint::shelf;
use muster_checkpoint::sum::CHUNK;
use muster_protocol::checkpoint::{Save, Standing};
use muster_protocol::record::{Arbiter, Cause, CommitRef, Kind, Member, Place, Record};
use muster_protocol::spec::JobSpec;
use muster_protocol::storelog::{Body, Entry};
use muster_protocol::{Digest, JobKey, LauncherId, NodeId, StateId, StoreUuid};
use muster_store::Location;

use super::Folder;

pub(crate) const UUID: StoreUuid = StoreUuid([8; 16]);
pub(crate) const NODE: NodeId = NodeId([1; 32]);

/// Bytes of a checkpoint's one file.
pub(crate) const FILE: usize = 8192;

/// A store with the folder of one job.
pub(crate) struct Bench {
    root: tempfile::TempDir,
    slots: u64,
    last: Digest,
}

impl Bench {
    pub(crate) fn new() -> Bench {
        let root = tempfile::tempdir().unwrap();
        let mark = format!("{{\"format\":1,\"uuid\":\"{}\"}}", UUID.hex());
        std::fs::write(root.path().join("muster-store"), mark).unwrap();
        std::fs::create_dir_all(root.path().join("job/log")).unwrap();
        Bench {
            root,
            slots: 0,
            last: Digest::ZERO,
        }
    }

    pub(crate) fn root(&self) -> PathBuf {
        self.root.path().to_owned()
    }

    pub(crate) fn location(&self) -> Location {
        Location::Directory(self.root())
    }

    /// The job's folder, as somebody sees it who has not probed the store.
    pub(crate) fn place(&self) -> Folder {
        Folder::at(&self.location(), "job").unwrap()
    }

    pub(crate) fn job(&self) -> PathBuf {
        self.root.path().join("job")
    }

    /// Writes a checkpoint; its commit.
    pub(crate) fn save(&self, generation: Digest, step: u64, loss: Option<f64>) -> CommitRef {
        let job = Dir::open(&self.job()).unwrap();
        let save = Save {
            generation,
            attempt: 1,
            step,
        };
        let folder = save.folder();
        let data = job.make("data").unwrap();
        let data = data.make(folder.strip_prefix("data/").unwrap()).unwrap();
        let bytes: Vec<u8> = (0..FILE).map(|at| (at as u64 ^ step) as u8).collect();
        let options = Options {
            threads: 1,
            direct: false,
            ..Options::default()
        };
        let go_on = |_| ControlFlow::Continue(());
        let name = "n0-0.safetensors";
        let written = persist(&data, name, &bytes, options, &go_on).unwrap();
        let shape = [FILE as u64];
        let manifest = Manifest {
            origin: Origin {
                job: "job".into(),
                lineage: Bytes([1; 32]),
                generation: Bytes(generation.0),
                number: 1,
                attempt: 1,
                step,
                world: 1,
                saved_at: 1_790_000_000,
            },
            chunk: CHUNK,
            files: vec![written.data_file(format!("{folder}/{name}"))],
            tensors: vec![Tensor {
                name: "weights".into(),
                dtype: Dtype::U8,
                shape: shape.to_vec(),
                slices: vec![Placed {
                    slice: Slice::whole(&shape),
                    file: 0,
                    at: 0,
                    bytes: FILE as u64,
                }],
            }],
            blobs: vec![Blob::metrics(loss.map(|loss| ("loss", loss)))],
        };
        let digest = shelf::put(&job, &manifest).unwrap();
        CommitRef {
            generation,
            number: step,
            step,
            manifest: Digest(digest.0),
        }
    }

    /// Flips a bit of a checkpoint's file.
    pub(crate) fn flip(&self, commit: &CommitRef) {
        let path = self.file(commit);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[FILE / 2] ^= 1;
        std::fs::write(&path, bytes).unwrap();
    }

    pub(crate) fn file(&self, commit: &CommitRef) -> PathBuf {
        let save = Save {
            generation: commit.generation,
            attempt: 1,
            step: commit.step,
        };
        self.job().join(save.file(0, 0))
    }

    pub(crate) fn manifest(&self, commit: &CommitRef) -> PathBuf {
        let name = format!("manifest/{}.json", commit.manifest.hex());
        self.job().join(name)
    }

    /// Appends to the log as a member does; the slot.
    pub(crate) fn append(&mut self, body: Body) -> u64 {
        self.slots += 1;
        let entry = Entry {
            seq: self.slots,
            prev: self.last,
            writer: NODE,
            nonce: self.slots,
            body,
        };
        let bytes = entry.encode().unwrap();
        self.last = Entry::digest(&bytes);
        let path = self.job().join(format!("log/{:08}.json", self.slots));
        std::fs::write(path, bytes).unwrap();
        self.slots
    }

    /// The job begins: the digest of its first generation.
    pub(crate) fn begin(&mut self) -> Digest {
        let record = record();
        let digest = record.digest();
        self.append(Body::Claim(Box::new(record)));
        digest
    }

    /// The generation after this one, or the job's end.
    pub(crate) fn next(
        &mut self,
        before: &Record,
        kind: Kind,
        restore: Option<CommitRef>,
    ) -> Record {
        let mut record = before.clone();
        record.birth = before.lineage();
        record.number += 1;
        record.parent = before.digest();
        record.kind = kind;
        record.restore = restore;
        if kind.is_terminal() {
            record.members.clear();
        }
        self.append(Body::Claim(Box::new(record.clone())));
        record
    }
}

/// A job's first generation, of one node.
pub(crate) fn record() -> Record {
    Record {
        key: JobKey {
            cluster: "c".into(),
            owner: "0".into(),
            id: "job".into(),
        },
        birth: Digest::ZERO,
        number: 1,
        parent: Digest::ZERO,
        kind: Kind::Next,
        members: vec![Member {
            node: NODE,
            state: StateId([1; 8]),
            launcher: LauncherId([1; 8]),
            slots: 1,
            guard: ([127, 0, 0, 1], 1000).into(),
            place: Place::default(),
        }],
        witnesses: Vec::new(),
        arbiter: Arbiter::Store(UUID),
        spec: JobSpec::default(),
        restarts_used: 0,
        cause: Cause::Formed,
        restore: None,
        nonce: 0,
    }
}

pub(crate) fn standing(seq: u64, commit: CommitRef) -> Standing {
    Standing {
        seq,
        commit,
        pinned: false,
        retired: false,
        rejected: false,
        in_use: false,
        verified: false,
    }
}
