//! Where saves are made durable: a directory, or a store that another crate reaches.

use std::fs::File;
use std::io::{self, Read as _};
use std::ops::ControlFlow;
use std::path::PathBuf;

use crate::dir::Dir;
use crate::persist::{
    self, Ahead, Begun, Fault, Options, PersistError, Progress, Written, persist, persist_sealed,
};
use crate::slot::{Following, Sealed};
use crate::source::{Directory, Readers, Source};
use crate::sum::{CHUNK, ChunkSum};
use crate::{Pages, pool};

/// A folder in which a save's files become durable. Nothing in it is ever overwritten.
pub trait Place: Sized + Sync {
    /// The folder of this name in it, which is made if need be, and then durable where folders are
    /// anything at all.
    ///
    /// # Errors
    /// A name of more than one component, or the file system.
    fn make(&self, folder: &str) -> io::Result<Self>;

    /// The folder of this name in it.
    ///
    /// # Errors
    /// As [`Place::make`]; it is not there, where folders are anything.
    fn enter(&self, folder: &str) -> io::Result<Self>;

    /// Something in it, for people.
    fn path(&self, name: &str) -> PathBuf;

    /// Begins a file for what is being copied into a slot; none where that cannot be, or would not help.
    fn begin_ahead(&self, following: Following, options: Options) -> Option<Begun>;

    /// Makes what was sealed the file of this name, durably: there is no such file until it is whole.
    /// One that is there already and holds the same is used as it is. `ahead` is what was written of it before it was
    /// sealed, in this place or one above it.
    ///
    /// `progress` is called by any thread; when it breaks, the write is given up.
    ///
    /// # Errors
    /// [`Fault::Exists`] where another file has the name, [`Fault::Damaged`] where the image is not
    /// what was sealed, and whatever keeps a place from being written.
    fn keep(
        &self,
        name: &str,
        sealed: &Sealed,
        ahead: Option<Ahead>,
        options: Options,
        progress: &(dyn Fn(Progress) -> ControlFlow<()> + Sync),
    ) -> Result<Written, PersistError>;

    /// Makes a small file of these bytes, durably. One that is there already and holds the same is
    /// used as it is.
    ///
    /// # Errors
    /// As [`Place::keep`].
    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), PersistError>;

    /// The whole of a small file.
    ///
    /// # Errors
    /// `NotFound`; `InvalidData` where it is longer than `limit` bytes; what keeps it from being read.
    fn get(&self, name: &str, limit: u64) -> io::Result<Vec<u8>>;
}

impl Place for Dir {
    fn begin_ahead(&self, following: Following, options: Options) -> Option<Begun> {
        Dir::begin_ahead(self, following, options)
    }

    fn make(&self, folder: &str) -> io::Result<Self> {
        Dir::make(self, folder)
    }

    fn enter(&self, folder: &str) -> io::Result<Self> {
        Dir::enter(self, folder)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.shown(name)
    }

    fn keep(
        &self,
        name: &str,
        sealed: &Sealed,
        ahead: Option<Ahead>,
        options: Options,
        progress: &(dyn Fn(Progress) -> ControlFlow<()> + Sync),
    ) -> Result<Written, PersistError> {
        let image = sealed.image();
        let ahead = ahead.and_then(|ahead| ahead.publish(self, name, sealed));
        let kept = ahead
            .unwrap_or_else(|| persist_sealed(self, name, image, &sealed.sums, options, progress));
        match kept {
            Err(error) if matches!(error.fault, Fault::Exists) => {
                let source = Directory::new(self.clone(), options.direct);
                let found = compare(&source, name, sealed, options.threads).ok_or(error)?;
                self.settle(name, found.bytes)?;
                Ok(found)
            }
            other => other,
        }
    }

    fn put(&self, name: &str, bytes: &[u8]) -> Result<(), PersistError> {
        match persist(self, name, bytes, Options::SMALL, &|_| {
            ControlFlow::Continue(())
        }) {
            Ok(_) => Ok(()),
            Err(error) if matches!(error.fault, Fault::Exists) => {
                match Place::get(self, name, bytes.len() as u64) {
                    Ok(there) if there == bytes => self.settle(name, bytes.len() as u64),
                    _ => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    fn get(&self, name: &str, limit: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let file = File::from(self.open_file(name)?);
        file.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
        match bytes.len() as u64 > limit {
            true => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("it is longer than {limit} bytes"),
            )),
            false => Ok(bytes),
        }
    }
}

impl Dir {
    /// Makes a name durable whose maker may have died before it was.
    fn settle(&self, name: &str, bytes: u64) -> Result<(), PersistError> {
        self.sync().map_err(|source| PersistError {
            path: self.shown(name),
            bytes,
            fault: Fault::Io {
                what: "sync the directory of",
                source,
            },
            published: true,
        })
    }
}

/// A file that is there already, if it is what was sealed: it is read, by so many threads.
pub fn compare(
    source: &impl Source,
    name: &str,
    sealed: &Sealed,
    threads: usize,
) -> Option<Written> {
    let bytes = sealed.image().len() as u64;
    if source.size(name).ok()? != bytes {
        return None;
    }
    let chunks = pool::each(
        threads,
        sealed.sums.len(),
        || Pages::new(CHUNK as usize),
        |buffer, at| {
            let begin = at as u64 * CHUNK;
            let chunk = &mut buffer[..(bytes - begin).min(CHUNK) as usize];
            source.read(name, begin, chunk, Readers::One)?;
            let sum = ChunkSum::of(chunk);
            match sum.crc == sealed.sums[at] {
                true => Ok(sum),
                false => Err(io::ErrorKind::InvalidData.into()),
            }
        },
    );
    Some(Written {
        bytes,
        chunks: chunks.ok()?,
        path: persist::Path::Found,
    })
}
