//! Contents of the store beside the log: files and manifests, synced or not.

use std::collections::BTreeMap;

use muster_protocol::Digest;
use muster_protocol::checkpoint::{Item, Save, Written};

/// A rank's state, by what it must not be mistaken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Token {
    pub generation: Digest,
    pub step: u64,
    pub rank: u32,
}

#[derive(Clone, Debug)]
pub(super) struct File {
    pub token: Token,
    /// False: what a power failure left of it.
    pub whole: bool,
    pub synced: bool,
    /// A bit of it is wrong, long after it was written.
    pub rotten: bool,
    /// The node whose page cache holds it.
    pub by: usize,
}

#[derive(Clone, Debug)]
pub(super) struct Manifest {
    pub save: Save,
    pub files: Vec<String>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Disk {
    pub files: BTreeMap<String, File>,
    /// By their digest. They are synced before anything speaks of them.
    pub manifests: BTreeMap<Digest, Manifest>,
    /// The save of each folder.
    folders: BTreeMap<String, Save>,
}

impl Disk {
    /// Puts a file under its name; false where other bytes have the name.
    pub(super) fn put(&mut self, path: &str, save: Save, file: File) -> bool {
        if let Some(there) = self.files.get_mut(path) {
            let same = there.token == file.token && there.whole;
            there.synced |= same && file.synced;
            return same;
        }
        self.folders.insert(save.folder(), save);
        self.files.insert(path.to_owned(), file);
        true
    }

    /// A manifest of these files, whose summaries are their paths.
    pub(super) fn manifest(&mut self, save: Save, files: &[Written]) -> Digest {
        let path = |w: &Written| String::from_utf8_lossy(&w.summary).into_owned();
        let manifest = Manifest {
            save,
            files: files.iter().map(path).collect(),
        };
        let text = format!("{manifest:?}");
        let mut digest = [0; 32];
        let mut hash = crate::sim::rng::Fnv::default();
        for part in digest.chunks_exact_mut(8) {
            hash.bytes(text.as_bytes());
            part.copy_from_slice(&hash.0.to_le_bytes());
        }
        self.manifests.insert(Digest(digest), manifest);
        Digest(digest)
    }

    /// The names that a commit of this manifest needs; none where the manifest is not there.
    pub(super) fn needs(&self, digest: &Digest) -> Option<Vec<String>> {
        let manifest = self.manifests.get(digest)?;
        Some(vec![manifest.save.folder(), manifest_name(digest)])
    }

    /// Why a commit of this manifest cannot be restored by that many ranks; none: it can.
    pub(super) fn damage(&self, digest: &Digest, world: u32) -> Option<String> {
        let Some(manifest) = self.manifests.get(digest) else {
            return Some(format!("manifest {digest} is not there"));
        };
        let Save {
            generation, step, ..
        } = manifest.save;
        if manifest.files.len() != world as usize {
            let n = manifest.files.len();
            return Some(format!("{n} files of {world} ranks"));
        }
        for (rank, path) in (0..).zip(&manifest.files) {
            let wanted = Token {
                generation,
                step,
                rank,
            };
            match self.files.get(path) {
                None => return Some(format!("{path} is not there")),
                Some(f) if !f.synced => return Some(format!("{path} is not synced")),
                Some(f) if !f.whole => return Some(format!("{path} is torn")),
                Some(f) if f.token != wanted => return Some(format!("{path} holds {:?}", f.token)),
                Some(_) => {}
            }
        }
        None
    }

    /// Everything that could be deleted.
    pub(super) fn items(&self) -> Vec<Item> {
        let folders = self.folders.iter().map(|(name, save)| Item {
            name: name.clone(),
            generation: save.generation,
        });
        let manifests = self.manifests.iter().map(|(digest, m)| Item {
            name: manifest_name(digest),
            generation: m.save.generation,
        });
        folders.chain(manifests).collect()
    }

    pub(super) fn delete(&mut self, name: &str) {
        self.folders.remove(name);
        let below = format!("{name}/");
        self.files.retain(|path, _| !path.starts_with(&below));
        self.manifests
            .retain(|digest, _| manifest_name(digest) != name);
    }

    /// A bit of one of its files flips.
    pub(super) fn rot(&mut self, manifest: &Digest) {
        let path = self.manifests.get(manifest).and_then(|m| m.files.first());
        if let Some(file) = path.and_then(|path| self.files.get_mut(path)) {
            file.rotten = true;
        }
    }

    pub(super) fn is_rotten(&self, manifest: &Digest) -> bool {
        let files = self.manifests.get(manifest).map(|m| &m.files);
        let mut files = files.into_iter().flatten();
        files.any(|path| self.files.get(path).is_some_and(|f| f.rotten))
    }

    /// The power of this machine fails: what it had not synced is torn.
    pub(super) fn power_fails(&mut self, machine: usize) {
        for file in self.files.values_mut() {
            if file.by == machine && !file.synced {
                file.whole = false;
            }
        }
    }
}

pub(super) fn manifest_name(digest: &Digest) -> String {
    format!("manifest/{}", digest.hex())
}
