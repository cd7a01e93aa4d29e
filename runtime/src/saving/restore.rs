//! The checkpoint that a generation begins with.

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use muster_checkpoint::Slice;
use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::Id;
use muster_checkpoint::load::{Damage as Harm, LoadError, Loaded, Team, Want, Wanted, load};
use muster_checkpoint::manifest::{Manifest, ManifestError};
use muster_checkpoint::nearby::Nearby;
use muster_checkpoint::newest::Shelf;
use muster_checkpoint::source::Directory;
use muster_protocol::Digest;
use muster_protocol::control::FD_ENV;
use muster_protocol::control::saving::{Damage, word};
use muster_protocol::control::slots::{CACHE_ENV, RESTORE_ENV, STORE_ENV, STORE_ID_ENV};
use muster_protocol::memory::{MEMORY_ENV, Whom};
use muster_store::{Kind, Location, LocationError, Options, Store, StoreError, UUID_NAME, Uuid};

use super::devices::Devices;
use super::memory::MemoryMut;
use super::tiers::{Origins, Tiers};
use crate::live;
use crate::page::Page;
use crate::session::Session;

/// Threads that read and verify.
const THREADS: usize = 4;
/// From a bucket: each read waits for an answer.
const BUCKET_THREADS: usize = 16;

/// Bytes of what names a store, at most.
const MAX_NAME: u64 = 4096;

/// A committed checkpoint, open for reading.
#[derive(Debug)]
pub struct Restore {
    digest: Id,
    manifest: Manifest,
    source: Tiers<Nearby<Directory, Store>>,
    team: Team,
    devices: Devices,
    /// It is the job's own store: what is not there is gone.
    own: bool,
    /// Where damage is told.
    page: Option<Arc<Page>>,
    /// Slices that loads wanted when they found damage. Held by the load that is under way.
    spoiled: Mutex<Vec<(String, Slice)>>,
}

/// Why a checkpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    #[error(
        "{RESTORE_ENV} is {value:?}, which is not the digest of a manifest; unset it, or start the worker with `muster run`"
    )]
    Digest { value: String },
    #[error("{RESTORE_ENV} is set and {STORE_ENV} is not; start the worker with `muster run`")]
    NoStore,
    #[error("{STORE_ENV} names no store: start the worker with a `muster run` of its own release")]
    Location(#[from] LocationError),
    #[error(
        "the checkpoints are in {0}, and this worker cannot read buckets: build it with the feature `buckets` of muster-runtime"
    )]
    Buckets(Location),
    #[error(
        "{STORE_ID_ENV} is {value:?}, which is no store's uuid; start the worker with `muster run`"
    )]
    StoreId { value: String },
    #[error(
        "what this worker finds at {place} is not the job's store: mount the store there for workers as it is for `muster run`"
    )]
    OtherStore {
        place: Location,
        #[source]
        source: Box<StoreError>,
    },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("cannot read the manifest {digest}")]
    Manifest {
        digest: Id,
        #[source]
        source: io::Error,
    },
    #[error("the manifest {digest} is damaged: its digest is {found}")]
    Damaged { digest: Id, found: Id },
    #[error("the manifest {digest} cannot be used")]
    Unusable {
        digest: Id,
        #[source]
        source: Box<ManifestError>,
    },
}

impl Restore {
    /// The checkpoint that this worker's generation begins with; `None` when there is nothing, or the worker was not
    /// started by Muster. All ranks of a generation are told the same.
    ///
    /// Damage that is found, here or by [`load`](Self::load), is told to the launcher: end with that error
    /// then, and the checkpoint is rejected, and the next generation begins with the one before.
    ///
    /// # Errors
    /// It is there, and cannot be used.
    pub fn from_env() -> Result<Option<Restore>, RestoreError> {
        Self::told(launcher_page(), |name| std::env::var_os(name))
    }

    /// With where damage is told.
    pub(super) fn told(
        page: Option<Arc<Page>>,
        get: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<Restore>, RestoreError> {
        let opened = Self::from_lookup(&get);
        match opened {
            Ok(restore) => Ok(restore.map(|restore| Restore { page, ..restore })),
            Err(error) => {
                let own = get(STORE_ID_ENV).is_some();
                if let Some(page) = &page {
                    let wanted = get(RESTORE_ENV).and_then(|id| Id::parse(id.to_str()?));
                    match (error.damaged(own), wanted.filter(|_| error.is_here())) {
                        (Some(digest), _) => tell(page, digest, error.to_string(), false),
                        (None, Some(digest)) => tell(page, digest, error.to_string(), true),
                        (None, None) => {}
                    }
                }
                Err(error)
            }
        }
    }

    /// The checkpoint that the newest generation of this worker begins with. A process that stays while generations
    /// change asks anew in each of them: its environment is that of the first.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn of(session: &Session) -> Result<Option<Restore>, RestoreError> {
        Self::of_page(session.page(), |name| std::env::var_os(name))
    }

    pub(crate) fn of_page(
        page: Arc<Page>,
        get: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<Restore>, RestoreError> {
        match live::restore_of(&page) {
            None => Self::told(Some(page), get),
            Some(restore) => Self::told(Some(page), |name| match name {
                RESTORE_ENV => restore.map(|digest| digest.hex().into()),
                other => get(other),
            }),
        }
    }

    fn from_lookup(
        get: impl Fn(&str) -> Option<OsString>,
    ) -> Result<Option<Restore>, RestoreError> {
        let folder = get(STORE_ENV);
        if let Some(folder) = &folder {
            // Told at the first start, and not when everything hangs on it.
            readable(location(folder)?)?;
        }
        let Some(value) = get(RESTORE_ENV) else {
            return Ok(None);
        };
        let value = value.to_string_lossy().into_owned();
        let Some(digest) = Id::parse(&value) else {
            return Err(RestoreError::Digest { value });
        };
        let folder = folder.ok_or(RestoreError::NoStore)?;
        let uuid = get(STORE_ID_ENV).map(|value| {
            let value = value.to_string_lossy().into_owned();
            Uuid::parse(&value).ok_or(RestoreError::StoreId { value })
        });
        let uuid = uuid.transpose()?;
        let cache = get(CACHE_ENV).map(PathBuf::from);
        // Without it nobody is asked for what is in memory.
        let whom = get(MEMORY_ENV).and_then(|text| Whom::decode(text.to_str()?));
        let rank = get("RANK").and_then(|text| text.to_str()?.parse().ok());
        let whom = whom.as_ref().map(|whom| (whom, rank.unwrap_or_default()));
        let mut opened = Self::open_from(&folder, uuid, cache, digest, whom)?;
        let here = get("LOCAL_WORLD_SIZE").and_then(|text| text.to_str()?.parse().ok());
        opened.team.ranks = here.unwrap_or(1);
        Ok(Some(opened))
    }

    /// Opens the checkpoint of this manifest in a job's folder: a path, or a bucket's location
    /// (`s3://…`), for which the environment has the credentials.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn open(folder: impl AsRef<OsStr>, digest: Id) -> Result<Restore, RestoreError> {
        Self::open_from(folder.as_ref(), None, None, digest, None)
    }

    /// Opens it, and asks these launchers for what they hold of it in memory; `rank` is who tells this
    /// worker's launcher what came from where.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn open_with(
        folder: impl AsRef<OsStr>,
        digest: Id,
        whom: &Whom,
        rank: u32,
    ) -> Result<Restore, RestoreError> {
        Self::open_from(folder.as_ref(), None, None, digest, Some((whom, rank)))
    }

    fn open_from(
        folder: &OsStr,
        uuid: Option<Uuid>,
        cache: Option<PathBuf>,
        digest: Id,
        whom: Option<(&Whom, u32)>,
    ) -> Result<Restore, RestoreError> {
        let location = readable(location(folder)?)?;
        let plain = || Ok(Store::open(&location, &Options::of_process())?);
        let (store, doubt) = match uuid.map(|uuid| own_store(&location, uuid)) {
            None => (plain()?, None),
            Some(Ok(store)) => (store, None),
            // Who may read the job's folder and nothing beside it: what is there is as good as anywhere.
            Some(Err(why)) if is_unnamed(&location) => match plain() {
                Ok(store) => (store, Some(why)),
                Err::<_, RestoreError>(_) => return Err(why),
            },
            Some(Err(why)) => return Err(why),
        };
        let own = uuid.is_some() && doubt.is_none();
        let bytes = match (store.manifest(digest), doubt) {
            (Ok(bytes), _) => bytes,
            (Err(error), Some(why)) if error.kind() == io::ErrorKind::NotFound => return Err(why),
            (Err(source), _) => return Err(RestoreError::Manifest { digest, source }),
        };
        let found = Manifest::digest(&bytes);
        if found != digest {
            return Err(RestoreError::Damaged { digest, found });
        }
        let manifest = (Manifest::decode(&bytes)).map_err(|error| RestoreError::Unusable {
            digest,
            source: Box::new(error),
        })?;
        // One that cannot be opened holds nothing.
        let near = cache.and_then(|path| Dir::open(&path).ok());
        let near = near.map(|dir| Directory::new(dir, true));
        muster_fault::point("worker.opened");
        Ok(Restore {
            digest,
            source: Tiers::new(Nearby::new(near, store, &manifest), &manifest, whom),
            manifest,
            team: Team::alone(match location.is_cloud() {
                true => BUCKET_THREADS,
                false => THREADS,
            }),
            devices: Devices::default(),
            own,
            page: None,
            spoiled: Mutex::default(),
        })
    }

    /// The digest of its manifest, which names it.
    pub fn digest(&self) -> Id {
        self.digest
    }

    /// The step that its state has not begun yet.
    pub fn step(&self) -> u64 {
        self.manifest.origin.step
    }

    /// Ranks that saved it.
    pub fn world(&self) -> u32 {
        self.manifest.origin.world
    }

    /// Everything about it.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Bytes that were loaded so far from copies on this node's own disk (`--checkpoint-cache` of `muster
    /// run`).
    pub fn from_cache(&self) -> u64 {
        self.source.below().from_near()
    }

    /// State that is no tensor.
    pub fn blob(&self, name: &str) -> Option<&[u8]> {
        self.manifest.blob(name)
    }

    /// Where what was loaded so far came from.
    pub fn origins(&self) -> Origins {
        self.source.origins()
    }

    /// Uses this driver for tensors on GPUs, instead of the one that is found.
    #[cfg(feature = "cuda")]
    pub fn use_driver(&mut self, driver: Arc<crate::cuda::Driver>) {
        self.devices.use_driver(driver);
    }

    /// Fills these slices, in any slicing, reading no more than they need and verifying all of that. Bytes that
    /// launchers hold in memory come from there, the rest from the store. Loads of several threads wait for each other:
    /// each reads by many threads itself.
    ///
    /// # Errors
    /// They do not fit what was saved, or it is damaged: [`LoadError::damage`] tells which.
    pub fn load(&self, wants: &mut [Want<'_>]) -> Result<Loaded, LoadError> {
        let wanted = wants
            .iter()
            .map(|want| (want.name.to_owned(), want.slice.clone()));
        self.loading(wanted.collect(), || {
            load(&self.manifest, &self.source, wants, self.team)
        })
    }

    /// The same, into memory of this process and of GPUs. Bytes for a GPU are verified before, and are there when this
    /// returns, for whatever stream.
    ///
    /// # Errors
    /// As [`load`](Self::load); or a driver or device fails ([`LoadError::Far`]), and what the memory holds then is of
    /// no use.
    pub fn load_into(&self, wants: Vec<Wanted<'_, MemoryMut<'_>>>) -> Result<Loaded, LoadError> {
        let wanted = wants
            .iter()
            .map(|want| (want.name.to_owned(), want.slice.clone()));
        self.loading(wanted.collect(), || {
            (self.devices).load(&self.manifest, &self.source, wants, self.team)
        })
    }

    /// Loads these slices, and tells the launcher of damage.
    fn loading(
        &self,
        wanted: Vec<(String, Slice)>,
        load: impl FnOnce() -> Result<Loaded, LoadError>,
    ) -> Result<Loaded, LoadError> {
        // Which copy a chunk came from is known of one reader only.
        let mut spoiled = self.spoiled.lock().unwrap_or_else(PoisonError::into_inner);
        let before = self.source.origins();
        let loaded = load();
        if let Some(page) = &self.page {
            match &loaded {
                Ok(_) => {
                    spoiled.retain(|slice| !wanted.contains(slice));
                    if spoiled.is_empty() {
                        // What was said of a try before is not so.
                        page.store(word::DAMAGE, 0);
                    }
                }
                Err(error) => {
                    if let Some(damage) = error.damage() {
                        spoiled.extend(wanted);
                        let here = !self.believes(damage);
                        tell(page, self.digest, damage.to_string(), here);
                    }
                }
            }
        }
        self.source.tell(&before);
        muster_fault::point("worker.loaded");
        loaded
    }

    /// Whether this is damage for every node: a disk that cannot be read now may be read again, and another
    /// node's can be.
    fn believes(&self, damage: &Harm) -> bool {
        damage.is_certain() && (self.own || !matches!(damage, Harm::Gone { .. }))
    }
}

/// Whether this worker was built for it.
fn readable(location: Location) -> Result<Location, RestoreError> {
    match location.is_cloud() && !cfg!(feature = "buckets") {
        true => Err(RestoreError::Buckets(location)),
        false => Ok(location),
    }
}

/// The job's folder in its store. The path may lead to something else here than for the launcher, such as
/// the empty directory below a mount that is missing: nothing is believed to be gone then.
fn own_store(folder: &Location, uuid: Uuid) -> Result<Store, RestoreError> {
    let (place, folder) = folder.split().ok_or(LocationError::Empty)?;
    let opened = Store::open(&place, &Options::of_process());
    let opened = opened.and_then(|store| store.expect(uuid).map(|()| store));
    let other = |place, source| {
        let source = Box::new(source);
        RestoreError::OtherStore { place, source }
    };
    let store = opened.map_err(|source| match source.kind {
        Kind::Gone => other(place, source),
        // There is no such directory.
        Kind::Setup if !place.is_cloud() => other(place, source),
        _ => RestoreError::Store(source),
    })?;
    Ok(store.within(&folder)?)
}

/// Whether nothing says here which store it is, as far as this worker may look.
fn is_unnamed(folder: &Location) -> bool {
    let Some((place, _)) = folder.split() else {
        return false;
    };
    let named = Store::open(&place, &Options::of_process());
    let named = named.and_then(|store| store.get(UUID_NAME, MAX_NAME));
    named.is_err_and(|error| matches!(error.kind, Kind::NotFound | Kind::Denied))
}

fn location(folder: &OsStr) -> Result<Location, LocationError> {
    match folder.to_str() {
        // A path is taken as it is, whatever it contains.
        Some(text) if !text.starts_with('/') => text.parse(),
        _ => Ok(Location::Directory(PathBuf::from(folder))),
    }
}

impl RestoreError {
    /// Whether it is this node that cannot read it: another one may.
    fn is_here(&self) -> bool {
        match self {
            RestoreError::OtherStore { .. } => true,
            RestoreError::Manifest { source, .. } => is_disk(source),
            _ => false,
        }
    }

    /// The checkpoint that is damaged, if that is what is wrong: its manifest is gone, or is not what it was. A
    /// checkpoint that another version wrote is not damaged, nor is one that a store does not show now, or one that is
    /// not in a store that may be another one than the job's own.
    fn damaged(&self, own: bool) -> Option<Id> {
        match self {
            RestoreError::Damaged { digest, .. } => Some(*digest),
            RestoreError::Manifest { digest, source }
                if own && source.kind() == io::ErrorKind::NotFound =>
            {
                Some(*digest)
            }
            _ => None,
        }
    }
}

/// An input/output error (EIO).
fn is_disk(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
}

/// The control page of the launcher that started this process.
fn launcher_page() -> Option<Arc<Page>> {
    let fd = std::env::var(FD_ENV).ok()?.trim().parse().ok()?;
    Page::from_fd(fd).ok().map(Arc::new)
}

/// Tells the launcher what is damaged, or what this node alone cannot read. It looks when this process has ended.
fn tell(page: &Page, digest: Id, why: String, here: bool) {
    let damage = Damage {
        manifest: Digest(digest.0),
        why,
        here,
    };
    let (words, length) = damage.encode();
    for (at, value) in word::damage().zip(words) {
        page.store(at, value);
    }
    page.store(word::DAMAGE, length);
}
