//! A rank's knowledge of a save besides its image, and how the ranks' parts become one manifest.
//!
//! A rank leaves a [`Note`] in its slot: where its image belongs, and its blobs. Rank 0's has the
//! [`Draft`] too, which is the manifest but for the files' checksums; every rank could make it, from the plan that all
//! have. The writer of a rank's file leaves a [`Part`] beside it, durable. When all parts are there, the draft and they
//! make the manifest, whatever has become of the ranks meanwhile.

use std::io;
use std::ops::ControlFlow;

use serde::{Deserialize, Serialize};

use crate::hex::Id;
use crate::inventory::{self, Difference, Inventory};
use crate::manifest::{Blob, DataFile, Manifest, ManifestError, Origin, Tensor};
use crate::persist::{self, Ahead, Fault, Options, PersistError, Progress};
use crate::place::Place;
use crate::pool;
use crate::slot::{MAX_NOTE, Sealed};
use crate::sum::CHUNK;

/// The newest version of notes and parts. They are written in the oldest one that can say what they do: 1 has no
/// inventory.
const VERSION: u32 = 2;

/// The note that a rank leaves in its slot beside its image.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Note {
    /// The name of its file, in the save's directory; none if it writes nothing.
    pub file: Option<String>,
    /// The data of its save that is no tensor. Names are unique over all ranks.
    pub blobs: Vec<Blob>,
    /// Rank 0's alone.
    pub draft: Option<Draft>,
    /// The inventory that the rank planned its save from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inventory: Option<Inventory>,
}

/// A manifest but for where it is and what its files hash to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Draft {
    /// When rank 0 sealed its copy, in seconds since 1970: the manifest is the same whenever it is made.
    pub saved_at: u64,
    /// Names and lengths, ascending by name.
    pub files: Vec<(String, u64)>,
    /// As in the manifest; their files are indices into these.
    pub tensors: Vec<Tensor>,
    /// Of which of these there are samples in the ranks' inventories, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sampled: Vec<u64>,
}

/// One rank's durable part of a save.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Its file, which is durable; none if the rank writes nothing.
    pub file: Option<DataFile>,
    pub blobs: Vec<Blob>,
    /// As in the rank's note.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inventory: Option<Inventory>,
}

/// Why a note or a part cannot be used, or parts make no manifest.
#[derive(Debug, thiserror::Error)]
pub enum PartError {
    #[error("{0} bytes of notes, the limit is {MAX_NOTE}: keep large state in tensors")]
    TooLong(u64),
    #[error(
        "not a note of this version ({VERSION}): {0}; use a runtime and a `muster` of one release"
    )]
    Note(#[source] serde_json::Error),
    #[error("cannot read the part of rank {rank}, {path}")]
    Read {
        rank: u32,
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("cannot make the directory {path} durable: check the right to write there")]
    Directory {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error("the part of rank {rank}, {path}, is not what was said of it: it is damaged")]
    Damaged { rank: u32, path: String },
    #[error(transparent)]
    Persist(#[from] PersistError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// Nothing is damaged, and training may go on; no save can be committed until it is mended.
    #[error("{0}")]
    Differ(Box<Difference>),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope<B> {
    version: u32,
    body: B,
}

fn encode<B: Serialize>(body: &B, version: u32) -> Result<Vec<u8>, PartError> {
    let bytes = serde_json::to_vec(&Envelope { version, body }).map_err(PartError::Note)?;
    match bytes.len() as u64 > MAX_NOTE {
        true => Err(PartError::TooLong(bytes.len() as u64)),
        false => Ok(bytes),
    }
}

fn decode<'a, B: Deserialize<'a>>(bytes: &'a [u8]) -> Result<B, PartError> {
    if bytes.len() as u64 > MAX_NOTE {
        return Err(PartError::TooLong(bytes.len() as u64));
    }
    let Envelope { version, body } = serde_json::from_slice(bytes).map_err(PartError::Note)?;
    match version {
        1..=VERSION => Ok(body),
        other => Err(PartError::Note(serde::de::Error::custom(format!(
            "its version is {other}"
        )))),
    }
}

fn version_of(inventory: Option<&Inventory>) -> u32 {
    match inventory {
        Some(_) => VERSION,
        None => 1,
    }
}

impl Note {
    /// As bytes.
    ///
    /// # Errors
    /// It is too long.
    pub fn encode(&self) -> Result<Vec<u8>, PartError> {
        encode(self, version_of(self.inventory.as_ref()))
    }

    /// From bytes.
    ///
    /// # Errors
    /// They are no note of this version.
    pub fn decode(bytes: &[u8]) -> Result<Note, PartError> {
        decode(bytes)
    }
}

/// The durable result of a slot.
#[derive(Clone, Debug)]
pub struct Kept {
    /// Of the part, by which it is asked for.
    pub digest: Id,
    /// Bytes written.
    pub bytes: u64,
    /// How; none if the rank writes nothing.
    pub path: Option<persist::Path>,
}

/// Makes what a rank sealed durable: its file, then its part, in a save's directory, `data/<name>` below
/// `place`. `ahead` is what was written of the file while the slot was filled. A file that an earlier attempt has left
/// whole is used as it is.
///
/// # Errors
/// The note is none, the image is damaged, or the disk fails. The slot is still sealed then.
pub fn keep(
    sealed: &Sealed,
    place: &impl Place,
    name: &str,
    rank: u32,
    ahead: Option<Ahead>,
    options: Options,
    progress: &(dyn Fn(Progress) -> ControlFlow<()> + Sync),
) -> Result<Kept, PartError> {
    let note = Note::decode(&sealed.note)?;
    let dir = (place.make(DATA).and_then(|dir| dir.make(name))).map_err(|source| {
        PartError::Directory {
            path: shown(place, &format!("{DATA}/{name}")),
            source,
        }
    })?;
    let mut part = Part {
        file: None,
        blobs: note.blobs,
        inventory: note.inventory,
    };
    let mut path = None;
    if let Some(file) = &note.file {
        let written = dir.keep(file, sealed, ahead, options, progress)?;
        path = Some(written.path);
        part.file = Some(written.data_file(format!("{DATA}/{name}/{file}")));
    }
    muster_fault::point("part.put");
    Ok(Kept {
        digest: part.put(&dir, rank)?,
        bytes: part.file.as_ref().map_or(0, |file| file.bytes),
        path,
    })
}

/// The directory of all saves' data, below a job's.
const DATA: &str = "data";

/// Parts that are read at once: in a bucket each takes a round trip.
const READERS: usize = 8;

/// The file of a rank's part.
fn name_of(rank: u32) -> String {
    format!("rank-{rank}.json")
}

impl Part {
    /// As bytes.
    ///
    /// # Errors
    /// It is too long.
    pub fn encode(&self) -> Result<Vec<u8>, PartError> {
        encode(self, version_of(self.inventory.as_ref()))
    }

    /// From bytes.
    ///
    /// # Errors
    /// They are no part of this version.
    pub fn decode(bytes: &[u8]) -> Result<Part, PartError> {
        decode(bytes)
    }

    /// Makes it durable beside the rank's file; the digest of its bytes. One that is there already is
    /// left if it is the same.
    ///
    /// # Errors
    /// It cannot be written, or another one is there.
    pub fn put(&self, dir: &impl Place, rank: u32) -> Result<Id, PartError> {
        let bytes = self.encode()?;
        match dir.put(&name_of(rank), &bytes) {
            Ok(()) => Ok(Manifest::digest(&bytes)),
            Err(error) if matches!(error.fault, Fault::Exists) => {
                let path = shown(dir, &name_of(rank));
                Err(PartError::Damaged { rank, path })
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The part of a rank, of which this digest was said.
    ///
    /// # Errors
    /// It is not there, or another one.
    pub fn get(dir: &impl Place, rank: u32, digest: Id) -> Result<Part, PartError> {
        let path = || shown(dir, &name_of(rank));
        let bytes = dir.get(&name_of(rank), MAX_NOTE);
        let bytes = bytes.map_err(|source| PartError::Read {
            rank,
            path: path(),
            source,
        })?;
        match Manifest::digest(&bytes) == digest {
            true => Part::decode(&bytes),
            false => Err(PartError::Damaged { rank, path: path() }),
        }
    }
}

/// Something in a place, for people.
fn shown(place: &impl Place, name: &str) -> String {
    place.path(name).display().to_string()
}

impl Draft {
    /// The manifest of a save whose directory, below `place`, is `data/<name>`, from the parts that all
    /// ranks left there: of each its digest, by rank.
    ///
    /// # Errors
    /// A part is not there or damaged, the ranks do not hold the same, or the parts do not make the manifest that was
    /// drafted.
    pub fn assemble(
        self,
        origin: Origin,
        place: &impl Place,
        name: &str,
        digests: &[Id],
    ) -> Result<Manifest, PartError> {
        let dir = (place.enter(DATA).and_then(|dir| dir.enter(name))).map_err(|source| {
            PartError::Directory {
                path: shown(place, &format!("{DATA}/{name}")),
                source,
            }
        })?;
        let get = |(): &mut (), at: usize| {
            let rank = u32::try_from(at).unwrap_or(u32::MAX);
            Part::get(&dir, rank, digests[at])
        };
        let parts = pool::each(READERS, digests.len(), || Ok(()), get)?;
        let sampled = |at: &u64| {
            let tensor = usize::try_from(*at)
                .ok()
                .and_then(|at| self.tensors.get(at));
            tensor.map_or("", |tensor| &tensor.name)
        };
        let names: Vec<&str> = self.sampled.iter().map(sampled).collect();
        let inventories: Vec<_> = parts.iter().map(|part| part.inventory.as_ref()).collect();
        inventory::compare(&inventories, &names).map_err(PartError::Differ)?;
        Ok(self.manifest(origin, &format!("{DATA}/{name}"), parts)?)
    }

    /// The manifest of a save to this directory, from the parts of all ranks, in any order.
    ///
    /// # Errors
    /// A file is missing, too many, or not of its planned length.
    pub fn manifest(
        self,
        origin: Origin,
        directory: &str,
        parts: Vec<Part>,
    ) -> Result<Manifest, ManifestError> {
        let (mut files, mut blobs) = (Vec::new(), Vec::new());
        for part in parts {
            files.extend(part.file);
            blobs.extend(part.blobs);
        }
        files.sort_unstable_by(|a, b| a.path.cmp(&b.path));
        blobs.sort_by(|a, b| a.name.cmp(&b.name));
        let planned =
            (self.files.iter()).map(|(name, bytes)| (format!("{directory}/{name}"), *bytes));
        let mut written = files.iter();
        for (path, bytes) in planned {
            if written
                .next()
                .is_none_or(|file| (&file.path, file.bytes) != (&path, bytes))
            {
                return Err(ManifestError::Unplanned(path));
            }
        }
        if let Some(file) = written.next() {
            return Err(ManifestError::Unplanned(file.path.clone()));
        }
        let manifest = Manifest {
            origin,
            chunk: CHUNK,
            files,
            tensors: self.tensors,
            blobs,
        };
        manifest.check()?;
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests;
