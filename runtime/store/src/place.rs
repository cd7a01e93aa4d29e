//! Saves are written straight to a store: from the slot that a rank sealed, with nothing between.

use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::PathBuf;

use muster_checkpoint::persist::{self, Ahead, Begun, Fault, Options, PersistError, Written};
use muster_checkpoint::place::{Place, compare};
use muster_checkpoint::slot::{Following, Sealed};
use muster_checkpoint::sum::{CHUNK, ChunkSum};

use crate::error::{Kind, StoreError};
use crate::store::{Created, Progress, Store};

/// A job's folder ([`Store::within`]). In a directory files are written as
/// [`muster_checkpoint::persist`] writes them, around the page cache where that is possible.
impl Place for Store {
    /// In a directory, for a file anywhere below it.
    fn begin_ahead(&self, following: Following, options: Options) -> Option<Begun> {
        let folder = self.as_directory("data").ok()??;
        folder.begin_ahead(following, options)
    }

    fn make(&self, folder: &str) -> io::Result<Self> {
        self.enter(folder)
    }

    fn enter(&self, folder: &str) -> io::Result<Self> {
        Ok(self.within(folder)?)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.shown(name).into()
    }

    fn keep(
        &self,
        name: &str,
        sealed: &Sealed,
        ahead: Option<Ahead>,
        options: Options,
        progress: &(dyn Fn(persist::Progress) -> ControlFlow<()> + Sync),
    ) -> Result<Written, PersistError> {
        let total = sealed.image().len() as u64;
        let failed = |error| self.fault(name, total, error);
        if let Some(dir) = self.as_directory(name).map_err(failed)? {
            return dir.keep(last(name), sealed, ahead, options, progress);
        }
        // Uploads are not create-only. The name is this save's alone, so what is there was left by
        // an earlier run of this node's launcher or agent.
        match self.head(name) {
            Ok(_) => {
                return compare(self, name, sealed, options.threads).ok_or_else(|| PersistError {
                    path: self.path(name),
                    bytes: total,
                    fault: Fault::Exists,
                    published: false,
                });
            }
            Err(error) if error.kind == Kind::NotFound => {}
            Err(error) => return Err(failed(error)),
        }
        let mut chunks = Chunks::new(sealed);
        let mut report = |Progress { done, total }| progress(persist::Progress { done, total });
        match self.upload(name, &mut chunks, total, &mut report) {
            Ok(_) => Ok(Written {
                bytes: total,
                chunks: chunks.sums,
                path: persist::Path::Uploaded,
            }),
            Err(error) => {
                let error = failed(error);
                Err(match chunks.damaged {
                    Some(at) => PersistError {
                        fault: Fault::Damaged { at },
                        ..error
                    },
                    None => error,
                })
            }
        }
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), PersistError> {
        let total = bytes.len() as u64;
        let failed = |error| self.fault(name, total, error);
        if let Some(dir) = self.as_directory(name).map_err(failed)? {
            return dir.put(last(name), bytes);
        }
        match self.create(name, bytes).map_err(failed)? {
            Created::Created => Ok(()),
            Created::Exists => Err(PersistError {
                path: self.path(name),
                bytes: total,
                fault: Fault::Exists,
                published: false,
            }),
        }
    }

    fn get(&self, name: &str, limit: u64) -> io::Result<Vec<u8>> {
        Store::get(self, name, limit).map_err(|error| match error.kind {
            Kind::TooLarge => io::Error::new(io::ErrorKind::InvalidData, error),
            _ => error.into(),
        })
    }
}

fn last(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or(name)
}

impl Store {
    fn fault(&self, name: &str, bytes: u64, error: StoreError) -> PersistError {
        PersistError {
            path: self.path(name),
            bytes,
            fault: match error.kind {
                Kind::Cancelled => Fault::Cancelled,
                Kind::Exists => Fault::Exists,
                _ => Fault::Store(error.into()),
            },
            published: false,
        }
    }
}

/// A sealed image, one chunk after the other. Each is copied before it is compared with its seal:
/// what is sent is what was sealed, whatever its worker may still write there.
struct Chunks<'s> {
    sealed: &'s Sealed,
    /// Of the chunks so far.
    sums: Vec<ChunkSum>,
    chunk: Vec<u8>,
    /// How much of the chunk was handed out.
    given: usize,
    /// The byte at which a chunk begins that is not what was sealed.
    damaged: Option<u64>,
}

impl<'s> Chunks<'s> {
    fn new(sealed: &'s Sealed) -> Self {
        Self {
            sealed,
            sums: Vec::with_capacity(sealed.sums.len()),
            chunk: Vec::new(),
            given: 0,
            damaged: None,
        }
    }

    /// Takes the next chunk; `false` at the end.
    fn advance(&mut self) -> io::Result<bool> {
        let image = self.sealed.image();
        let begin = self.sums.len() * CHUNK as usize;
        let Some(rest) = image.get(begin..).filter(|rest| !rest.is_empty()) else {
            return Ok(false);
        };
        let chunk = rest.get(..CHUNK as usize).unwrap_or(rest);
        self.chunk.clear();
        self.chunk.extend_from_slice(chunk);
        self.given = 0;
        let sum = ChunkSum::of(&self.chunk);
        if self.sealed.sums.get(self.sums.len()) != Some(&sum.crc) {
            self.damaged = Some(begin as u64);
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.sums.push(sum);
        Ok(true)
    }
}

impl Read for Chunks<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if self.given == self.chunk.len() && !self.advance()? {
            return Ok(0);
        }
        let mut rest = self.chunk.get(self.given..).unwrap_or_default();
        let count = rest.read(into)?;
        self.given += count;
        Ok(count)
    }
}
