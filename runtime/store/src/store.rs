//! The one interface to all stores.

use std::io::Read;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use muster_checkpoint::dir::Dir;
use muster_checkpoint::source::Readers;

use crate::directory::Folder;
use crate::error::{Flavour, Kind, StoreError};
use crate::location::Location;
use crate::name::{is_name, join};
use crate::options::{Options, Patience};
use crate::probe::{UUID_NAME, Uuid};

/// How a create ended that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Created {
    /// The object is there, durably, with these bytes. Whether this call or another one with the
    /// same bytes made it cannot be told: who must know puts something of its own into them.
    Created,
    /// The name is taken by other bytes.
    Exists,
}

/// A checksum that a store keeps of a whole object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// CRC-64/NVME, as S3 has it.
    Crc64Nvme(u64),
    /// CRC-32C, as Google Cloud Storage has it.
    Crc32c(u32),
}

/// A store's description of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Length in bytes.
    pub size: u64,
    /// Where the store keeps one of the whole object.
    pub checksum: Option<Checksum>,
}

/// An object in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name, from the store's folder on.
    pub name: String,
    /// Length in bytes.
    pub size: u64,
}

/// How far an upload is, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub done: u64,
    pub total: u64,
}

/// How it is known that an uploaded object is whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verified {
    /// It was written and synced; the file system reported no error.
    Durable,
    /// The store's checksum of the whole object is that of the bytes sent.
    Checksum,
    /// The store gives no checksum of the whole: only its length was compared.
    Size,
}

/// An object that was uploaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uploaded {
    pub bytes: u64,
    /// CRC-64/NVME of all bytes.
    pub crc64: u64,
    pub verified: Verified,
}

#[derive(Clone, Debug)]
enum Backend {
    Folder(Folder),
    #[cfg(feature = "cloud")]
    Cloud(crate::cloud::Cloud),
}

/// A store, or a folder of one. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Store {
    backend: Backend,
    /// The folder that the location names, in which the uuid is.
    root: Backend,
    /// Known once the store was probed. From then on, that something is not there is believed only
    /// while the uuid is: a directory that was removed says nothing.
    uuid: Arc<OnceLock<Uuid>>,
}

impl Store {
    /// The store at a location. Opens a directory; of a cloud only what can be told without asking
    /// it is checked.
    ///
    /// # Errors
    /// The directory cannot be opened; the environment lacks something or contradicts itself.
    pub fn open(location: &Location, options: &Options) -> Result<Self, StoreError> {
        let backend = match location {
            Location::Directory(path) => Backend::Folder(Folder::open(path)?),
            #[cfg(feature = "cloud")]
            cloud => Backend::Cloud(crate::cloud::Cloud::new(cloud, options)?),
            #[cfg(not(feature = "cloud"))]
            cloud => {
                let _ = options;
                let place = cloud.to_string();
                let error = StoreError::new(Flavour::Directory, Kind::Setup, "open", place);
                return Err(error.said("this Muster was built without the feature `cloud`"));
            }
        };
        Ok(Self::of(backend))
    }

    /// The store in a directory that someone opened and passed. `shown` is only repeated in errors.
    pub fn in_directory(fd: OwnedFd, shown: &Path) -> Self {
        Self::of(Backend::Folder(Folder::from_fd(fd, shown)))
    }

    fn of(backend: Backend) -> Self {
        Self {
            root: backend.clone(),
            backend,
            uuid: Arc::default(),
        }
    }

    /// The folder of this name in the store, which need not exist: a job's. Names are then from
    /// there on.
    ///
    /// # Errors
    /// The name cannot be a folder's.
    pub fn within(&self, folder: &str) -> Result<Self, StoreError> {
        if !is_name(folder) {
            return Err(self.bad_name("enter", folder));
        }
        let backend = match &self.backend {
            Backend::Folder(of) => Backend::Folder(of.within(folder)),
            #[cfg(feature = "cloud")]
            Backend::Cloud(of) => Backend::Cloud(of.within(folder)),
        };
        Ok(Self {
            backend,
            ..self.clone()
        })
    }

    /// The same folder, with no file open: a reader keeps some, and what is deleted meanwhile would go on
    /// taking its space.
    pub fn afresh(&self) -> Self {
        let backend = match &self.backend {
            Backend::Folder(folder) => Backend::Folder(folder.afresh()),
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => Backend::Cloud(cloud.clone()),
        };
        Self {
            backend,
            ..self.clone()
        }
    }

    /// The same store, with other patience. Directories have none: they block.
    pub fn with_patience(&self, patience: Patience) -> Self {
        let with = |backend: &Backend| match backend {
            Backend::Folder(folder) => Backend::Folder(folder.clone()),
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => Backend::Cloud(cloud.with_patience(patience)),
        };
        #[cfg(not(feature = "cloud"))]
        let _ = patience;
        Self {
            backend: with(&self.backend),
            root: with(&self.root),
            uuid: Arc::clone(&self.uuid),
        }
    }

    /// Creates the object, if nothing has its name. Never overwrites. An outcome that the store leaves open (no answer,
    /// 5xx, 409) is settled by reading the object back and trying again.
    ///
    /// # Errors
    /// With [`StoreError::unknown`] the object may be there, or may still come to be; else nothing
    /// was created and nothing will be.
    pub fn create(&self, name: &str, bytes: &[u8]) -> Result<Created, StoreError> {
        self.check("create", name)?;
        self.still_there("create")?;
        self.create_unchecked(name, bytes)
    }

    pub(crate) fn create_unchecked(&self, name: &str, bytes: &[u8]) -> Result<Created, StoreError> {
        match &self.backend {
            Backend::Folder(folder) => folder.create(name, bytes),
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => cloud.create(name, bytes),
        }
    }

    /// Writes the object in place of whatever has its name: for signs of life, never for decisions. In
    /// a directory a power loss may take it, and what it replaced.
    ///
    /// # Errors
    /// Where it is `unknown`, the old object or the new one may be there.
    pub fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        self.check("write", name)?;
        let put = match &self.backend {
            Backend::Folder(folder) => folder.put(name, bytes),
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => cloud.put(name, bytes),
        };
        self.believed("write", put)
    }

    /// The whole object, of at most `limit` bytes. It is durable, and is what the store's checksum
    /// says where it has one.
    ///
    /// # Errors
    /// `NotFound`: nothing is there now; a create under way may still land.
    pub fn get(&self, name: &str, limit: u64) -> Result<Vec<u8>, StoreError> {
        self.check("read", name)?;
        let got = self.get_unchecked(name, limit);
        self.believed("read", got)
    }

    pub(crate) fn get_unchecked(&self, name: &str, limit: u64) -> Result<Vec<u8>, StoreError> {
        match &self.backend {
            Backend::Folder(folder) => folder.get(name, limit),
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => cloud.get(name, limit),
        }
    }

    /// Fills `into` from byte `at` of the object. The caller verifies the bytes.
    ///
    /// # Errors
    /// `Short` where the object ends before; else as [`Store::get`].
    pub fn get_range(&self, name: &str, at: u64, into: &mut [u8]) -> Result<(), StoreError> {
        self.read_range(name, at, into, Readers::One)
    }

    pub(crate) fn read_range(
        &self,
        name: &str,
        at: u64,
        into: &mut [u8],
        readers: Readers,
    ) -> Result<(), StoreError> {
        self.check("read", name)?;
        let got = match &self.backend {
            Backend::Folder(folder) => folder.get_range(name, at, into, readers),
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => cloud.get_range(name, at, into),
        };
        self.believed("read", got)
    }

    /// The object's length, and its checksum where the store keeps one.
    ///
    /// # Errors
    /// As [`Store::get`].
    pub fn head(&self, name: &str) -> Result<Head, StoreError> {
        self.check("look at", name)?;
        let got = match &self.backend {
            Backend::Folder(folder) => folder.head(name),
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => cloud.head(name),
        };
        self.believed("look at", got)
    }

    /// Hands each object in the folder and below it to `each`, by ascending name (bytes compared),
    /// until it breaks. The empty text is the whole store. Objects that Muster cannot have made are
    /// left out. A folder that does not exist is empty.
    ///
    /// # Errors
    /// The listing cannot be had, or not in order. `each` may have seen a part of it.
    pub fn list(
        &self,
        folder: &str,
        each: &mut dyn FnMut(Entry) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        self.check_folder("list", folder)?;
        self.still_there("list")?;
        match &self.backend {
            Backend::Folder(of) => of.list(folder, each),
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => cloud.list(folder, each),
        }
    }

    /// Names of the folders directly in this one, ascending.
    ///
    /// # Errors
    /// As [`Store::list`].
    pub fn folders(&self, folder: &str) -> Result<Vec<String>, StoreError> {
        self.check_folder("list", folder)?;
        self.still_there("list")?;
        match &self.backend {
            Backend::Folder(of) => of.folders(folder),
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => cloud.folders(folder),
        }
    }

    /// Removes the object. That it is not there is no error.
    ///
    /// # Errors
    /// Where it is `unknown`, it may be gone.
    pub fn delete(&self, name: &str) -> Result<(), StoreError> {
        self.check("delete", name)?;
        match &self.backend {
            Backend::Folder(folder) => folder.delete(name),
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => cloud.delete(name),
        }
    }

    /// Removes everything in the folder of this name, and it. A missing folder is no error. Objects
    /// that are added meanwhile may be left.
    ///
    /// # Errors
    /// A part of it may be gone; doing it again removes the rest.
    pub fn delete_folder(&self, folder: &str) -> Result<(), StoreError> {
        self.check("delete", folder)?;
        match &self.backend {
            Backend::Folder(of) => of.delete_folder(folder),
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => {
                let mut names = Vec::new();
                cloud.list(folder, &mut |entry| {
                    names.push(entry.name);
                    ControlFlow::Continue(())
                })?;
                names.iter().try_for_each(|name| cloud.delete(name))
            }
        }
    }

    /// The directory in which the object of this name would be, made if need be; none in a cloud.
    pub(crate) fn as_directory(&self, name: &str) -> Result<Option<Dir>, StoreError> {
        self.check("store", name)?;
        match &self.backend {
            Backend::Folder(folder) => folder.directory_of(name).map(Some),
            #[cfg(feature = "cloud")]
            Backend::Cloud(_) => Ok(None),
        }
    }

    /// Stores a large object: all of `source`, which has `total` bytes. It is visible only when it is
    /// whole, and was then compared with what was sent ([`Verified`]).
    ///
    /// In the cloud the upload is in parts, each with its checksum where the store takes one, each
    /// tried again by itself; in memory are at most `parts_at_once + 1` of them. It is **not**
    /// create-only there: give it a name that nobody else uses. In a directory another object of
    /// that name is left, and is an error.
    ///
    /// `progress` is called on this thread whenever bytes are safe there; when it breaks, the upload
    /// is given up. A failed upload leaves nothing that could be read; what its parts may leave in a
    /// bucket is removed, where the store answers, or by a lifecycle rule (docs/stores.md).
    ///
    /// # Errors
    /// Where it is `unknown`, the whole object may be there.
    pub fn upload(
        &self,
        name: &str,
        source: &mut dyn Read,
        total: u64,
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Uploaded, StoreError> {
        self.check("store", name)?;
        match &self.backend {
            Backend::Folder(folder) => folder.upload(name, source, total, progress),
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => cloud.upload(name, source, total, progress),
        }
    }

    /// Names the store itself, whatever leads to it; known once it was probed.
    pub fn uuid(&self) -> Option<Uuid> {
        self.uuid.get().copied()
    }

    /// The store or folder, or an object in it, for people.
    pub fn shown(&self, name: &str) -> String {
        match &self.backend {
            Backend::Folder(folder) => folder.shown(name),
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => cloud.shown(name),
        }
    }

    /// Which kind of store it is.
    pub fn flavour(&self) -> Flavour {
        match &self.backend {
            Backend::Folder(_) => Flavour::Directory,
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => cloud.flavour(),
        }
    }

    /// The server's name for itself, where it said one.
    pub(crate) fn server(&self) -> Option<String> {
        match &self.backend {
            Backend::Folder(_) => None,
            #[cfg(feature = "cloud")]
            Backend::Cloud(cloud) => cloud.server(),
        }
    }

    pub(crate) fn error(&self, kind: Kind, doing: &'static str, name: &str) -> StoreError {
        StoreError::new(self.flavour(), kind, doing, self.shown(name))
    }

    /// Gives this object or folder these rights, whatever this process's umask, where there are any and it is this
    /// user's.
    pub(crate) fn set_mode(&self, name: &str, mode: u32) {
        match &self.backend {
            Backend::Folder(directory) => directory.set_mode(name, mode),
            #[cfg(feature = "cloud")]
            Backend::Cloud(_) => {}
        }
    }

    /// The folder in which the uuid is.
    pub(crate) fn root(&self) -> Self {
        Self {
            backend: self.root.clone(),
            ..self.clone()
        }
    }

    pub(crate) fn set_uuid(&self, uuid: Uuid) -> Uuid {
        *self.uuid.get_or_init(|| uuid)
    }

    /// That nothing is found where the uuid is gone, or is another one, says nothing.
    fn believed<T>(
        &self,
        doing: &'static str,
        got: Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        if let Err(error) = &got
            && error.kind == Kind::NotFound
        {
            self.still_there(doing)?;
        }
        got
    }

    pub(crate) fn still_there(&self, doing: &'static str) -> Result<(), StoreError> {
        let Some(known) = self.uuid() else {
            return Ok(());
        };
        let gone = |said: &str| Err(self.error(Kind::Gone, doing, "").said(said));
        match self.root().read_uuid() {
            Ok(found) if found == known => Ok(()),
            Ok(found) => gone(&format!("its uuid is {found}, not {known}")),
            Err(error) if error.kind == Kind::NotFound => {
                gone(&format!("{UUID_NAME} is not there, which holds its uuid"))
            }
            Err(error) => Err(error),
        }
    }

    fn check(&self, doing: &'static str, name: &str) -> Result<(), StoreError> {
        match is_name(name) {
            true => Ok(()),
            false => Err(self.bad_name(doing, name)),
        }
    }

    fn check_folder(&self, doing: &'static str, folder: &str) -> Result<(), StoreError> {
        match folder.is_empty() {
            true => Ok(()),
            false => self.check(doing, folder),
        }
    }

    fn bad_name(&self, doing: &'static str, name: &str) -> StoreError {
        let said: String = name.chars().take(80).flat_map(char::escape_debug).collect();
        let place = join(&self.shown(""), "");
        StoreError::new(self.flavour(), Kind::Name, doing, place).said(said)
    }
}
