//! A store in the cloud, by object_store: S3, Google Cloud Storage, Azure.
//!
//! object_store signs, and knows the three protocols. Trying again is done here, not there: a
//! create whose answer was lost must not simply be sent again.

mod build;
mod judge;
mod transport;
mod tries;
mod upload;
mod wire;

use std::io;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, mpsc};

use bytes::Bytes;
use crc_fast::{CrcAlgorithm, Digest};
use futures::StreamExt as _;
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions, PutPayload,
};
use tokio::runtime::Runtime;

use self::tries::{ANSWER, Task, Tries};
use self::wire::Seen;
use crate::error::{Flavour, Kind, StoreError};
use crate::location::Location;
use crate::name::{is_name, join};
use crate::options::{Options, Patience};
use crate::store::{Checksum, Created, Entry, Head};

/// Bytes that a request's body is handed out in, so that progress is seen.
const PIECE: usize = 256 << 10;
/// The most bytes of a page of a listing: a thousand names of a thousand bytes, escaped.
const PAGE: u64 = 8 << 20;
/// Pages of one listing.
const MAX_PAGES: usize = 100_000;

/// Traits that a client of object_store must have.
trait Client: ObjectStore + MultipartStore + PaginatedListStore {}
impl<T: ObjectStore + MultipartStore + PaginatedListStore> Client for T {}

/// A bucket or container, and a folder in it. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Cloud {
    inner: Arc<Inner>,
    prefix: String,
    shown: String,
    patience: Patience,
}

struct Inner {
    flavour: Flavour,
    client: Arc<dyn Client>,
    /// Asks for checksums along with objects.
    reader: Arc<dyn Client>,
    runtime: &'static Runtime,
    part: u64,
    parts_at_once: usize,
    server: Mutex<Option<String>>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.flavour)
    }
}

/// Two threads for all stores of this process, from the first one on.
fn runtime() -> io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    if let Some(runtime) = RUNTIME.get() {
        return Ok(runtime);
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(8)
        .thread_name("muster-store")
        .enable_all()
        .build()?;
    Ok(RUNTIME.get_or_init(|| runtime))
}

impl Cloud {
    pub(crate) fn new(location: &Location, options: &Options) -> Result<Self, StoreError> {
        let (flavour, prefix) = match location {
            Location::S3 { prefix, .. } => (Flavour::S3, prefix),
            Location::Google { prefix, .. } => (Flavour::Google, prefix),
            Location::Azure { prefix, .. } => (Flavour::Azure, prefix),
            Location::Directory(path) => {
                let place = path.display().to_string();
                let error = StoreError::new(Flavour::Directory, Kind::Setup, "open", place);
                return Err(error.said("a directory is no cloud"));
            }
        };
        let shown = location.to_string();
        let refused =
            |kind, said: String| StoreError::new(flavour, kind, "open", shown.clone()).said(said);
        let (client, reader) =
            build::clients(location, options).map_err(|(kind, said)| refused(kind, said))?;
        let runtime = runtime().map_err(|error| refused(Kind::Setup, error.to_string()))?;
        Ok(Self {
            inner: Arc::new(Inner {
                flavour,
                client,
                reader,
                runtime,
                part: options.part.max(build::SMALLEST_PART),
                parts_at_once: options.parts_at_once.max(1),
                server: Mutex::default(),
            }),
            prefix: prefix.clone(),
            shown,
            patience: options.patience,
        })
    }

    pub(crate) fn within(&self, folder: &str) -> Self {
        Self {
            prefix: join(&self.prefix, folder),
            shown: join(&self.shown, folder),
            ..self.clone()
        }
    }

    pub(crate) fn with_patience(&self, patience: Patience) -> Self {
        Self {
            patience,
            ..self.clone()
        }
    }

    pub(crate) fn shown(&self, name: &str) -> String {
        join(&self.shown, name)
    }

    pub(crate) fn flavour(&self) -> Flavour {
        self.inner.flavour
    }

    pub(crate) fn server(&self) -> Option<String> {
        let server = self.inner.server.lock();
        server.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note_server(&self, name: String) {
        let server = self.inner.server.lock();
        *server.unwrap_or_else(PoisonError::into_inner) = Some(name);
    }

    fn patience(&self) -> Patience {
        self.patience
    }

    fn path(&self, name: &str) -> Path {
        // All characters of a prefix and a name stay as they are.
        Path::from(join(&self.prefix, name))
    }

    /// Runs it on the store's threads, and waits. From any thread, also one of another runtime.
    fn wait<T: Send + 'static>(
        &self,
        run: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (done, outcome) = mpsc::sync_channel(1);
        self.inner.runtime.spawn(async move {
            // Nobody waits for it any more only if this thread ended.
            let _ = done.send(run.await);
        });
        outcome.recv().unwrap_or_else(|_| {
            let error = self.error(Kind::Other, "use", "");
            Err(StoreError {
                unknown: true,
                ..error.said("the operation ended without an outcome")
            })
        })
    }

    pub(crate) fn create(&self, name: &str, bytes: &[u8]) -> Result<Created, StoreError> {
        let (cloud, name, bytes) = (self.clone(), name.to_owned(), Bytes::copy_from_slice(bytes));
        self.wait(async move { cloud.create_now(&name, bytes).await })
    }

    async fn create_now(&self, name: &str, bytes: Bytes) -> Result<Created, StoreError> {
        let task = Task {
            doing: "create",
            name,
            bytes: bytes.len() as u64,
            limit: ANSWER,
            changes: true,
        };
        let path = self.path(name);
        let mut tries = Tries::new(self.patience, task.bytes);
        let mut open = false;
        loop {
            let options = PutOptions::from(PutMode::Create);
            let put = self.inner.client.put_opts(&path, payload(&bytes), options);
            let failure = match self.once(&mut tries, task.limit, put).await {
                Ok(_) => return Ok(Created::Created),
                Err(failure) => failure,
            };
            // 409 and 412: somebody's object is there, or just coming.
            let taken = failure.kind == Kind::Exists;
            open |= failure.open || taken;
            let mut failure = failure;
            if open {
                // What is there tells: our bytes, also those of a try whose answer was lost, or
                // another's. Where nothing is there, the same bytes are tried again.
                let reader = self.with_patience(tries.question());
                match reader.get_now(name, task.bytes).await {
                    Ok(there) if there == bytes => return Ok(Created::Created),
                    Ok(_) => return Ok(Created::Exists),
                    Err(error) if error.kind == Kind::TooLarge => return Ok(Created::Exists),
                    Err(error) if taken && error.kind != Kind::NotFound => {
                        failure.kind = error.kind;
                        failure.said = format!("reading it back: {}", error.said);
                    }
                    Err(_) => {}
                }
            }
            let again = failure.kind.passes() || failure.kind == Kind::Exists;
            if !again || !tries.again(failure.pause).await {
                if failure.kind == Kind::Exists {
                    // It said again and again that there is one, and that there is none.
                    failure.kind = Kind::Server;
                }
                return Err(self.failed(task, &tries, failure, open));
            }
        }
    }

    pub(crate) fn put(&self, name: &str, bytes: &[u8]) -> Result<(), StoreError> {
        let (cloud, name, bytes) = (self.clone(), name.to_owned(), Bytes::copy_from_slice(bytes));
        self.wait(async move { cloud.put_now(&name, "write", bytes).await })
    }

    async fn put_now(
        &self,
        name: &str,
        doing: &'static str,
        bytes: Bytes,
    ) -> Result<(), StoreError> {
        let task = Task {
            doing,
            name,
            bytes: bytes.len() as u64,
            limit: ANSWER,
            changes: true,
        };
        let path = self.path(name);
        let put = || {
            self.inner
                .client
                .put_opts(&path, payload(&bytes), PutOptions::default())
        };
        self.tries(task, put).await.map(|_| ())
    }

    pub(crate) fn get(&self, name: &str, limit: u64) -> Result<Vec<u8>, StoreError> {
        let (cloud, name) = (self.clone(), name.to_owned());
        self.wait(async move { cloud.get_now(&name, limit).await })
    }

    async fn get_now(&self, name: &str, limit: u64) -> Result<Vec<u8>, StoreError> {
        let task = Task {
            doing: "read",
            name,
            bytes: limit,
            limit,
            changes: false,
        };
        let path = self.path(name);
        let mut tries = Tries::new(self.patience, limit);
        loop {
            let got = self
                .once(&mut tries, limit, self.read(&path, None, limit))
                .await;
            let failure = match got {
                Ok((bytes, seen)) => match checked(bytes, &seen) {
                    Ok(bytes) => return Ok(bytes),
                    Err(failure) => failure,
                },
                Err(failure) => failure,
            };
            if !failure.kind.passes() || !tries.again(failure.pause).await {
                return Err(self.failed(task, &tries, failure, false));
            }
        }
    }

    /// The bytes of an object, or of a range of it; at most one more than `limit`.
    async fn read(
        &self,
        path: &Path,
        range: Option<std::ops::Range<u64>>,
        limit: u64,
    ) -> object_store::Result<Vec<u8>> {
        let options = GetOptions {
            range: range.map(GetRange::Bounded),
            ..GetOptions::default()
        };
        let got = self.inner.reader.get_opts(path, options).await?;
        let announced = got.range.end - got.range.start;
        let mut bytes = Vec::with_capacity(usize::try_from(announced.min(limit)).unwrap_or(0));
        let mut stream = got.into_stream();
        while let Some(piece) = stream.next().await {
            bytes.extend_from_slice(&piece?);
        }
        Ok(bytes)
    }

    pub(crate) fn get_range(&self, name: &str, at: u64, into: &mut [u8]) -> Result<(), StoreError> {
        if into.is_empty() {
            return Ok(());
        }
        let (cloud, owned, bytes) = (self.clone(), name.to_owned(), into.len() as u64);
        let got = self.wait(async move {
            let task = Task {
                doing: "read",
                name: &owned,
                bytes,
                limit: bytes,
                changes: false,
            };
            let path = cloud.path(&owned);
            let range = at..at.saturating_add(bytes);
            let read = || cloud.read(&path, Some(range.clone()), bytes);
            match cloud.tries(task, read).await {
                Ok((got, _)) => Ok(got),
                Err(error) if error.kind == Kind::TooLarge => {
                    let error = cloud.error(Kind::Unsupported, "read", &owned);
                    Err(error.said("the store ignores which range is asked for"))
                }
                Err(error) => Err(error),
            }
        })?;
        match got.len() == into.len() {
            true => {
                into.copy_from_slice(&got);
                Ok(())
            }
            false => Err(self.error(Kind::Short, "read", name)),
        }
    }

    pub(crate) fn head(&self, name: &str) -> Result<Head, StoreError> {
        let (cloud, name) = (self.clone(), name.to_owned());
        self.wait(async move { cloud.head_now(&name).await })
    }

    async fn head_now(&self, name: &str) -> Result<Head, StoreError> {
        let task = Task {
            doing: "look at",
            name,
            bytes: 0,
            limit: ANSWER,
            changes: false,
        };
        let path = self.path(name);
        let asked = self.tries(task, || self.inner.reader.head(&path)).await;
        match asked {
            Ok((meta, seen)) => {
                let answer = seen.answer.unwrap_or_default();
                let crc64 = answer.crc64.map(Checksum::Crc64Nvme);
                Ok(Head {
                    size: meta.size,
                    checksum: crc64.or(answer.crc32c.map(Checksum::Crc32c)),
                })
            }
            // An answer to HEAD has no body that says what was not found.
            Err(error) if error.kind == Kind::NotFound => {
                match self.page(name, &path, None, false).await {
                    Err(listed) if listed.kind == Kind::NoBucket => Err(listed),
                    _ => Err(error),
                }
            }
            Err(error) => Err(error),
        }
    }

    pub(crate) fn delete(&self, name: &str) -> Result<(), StoreError> {
        let (cloud, name) = (self.clone(), name.to_owned());
        self.wait(async move {
            let task = Task {
                doing: "delete",
                name: &name,
                bytes: 0,
                limit: ANSWER,
                changes: true,
            };
            let path = cloud.path(&name);
            match cloud.tries(task, || cloud.inner.client.delete(&path)).await {
                Err(error) if error.kind == Kind::NotFound => Ok(()),
                other => other.map(|_| ()),
            }
        })
    }

    pub(crate) fn list(
        &self,
        folder: &str,
        each: &mut dyn FnMut(Entry) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        let mut last = None;
        self.pages(folder, false, &mut |page| {
            for meta in page.objects {
                let Some(name) = self.own_name(meta.location.as_ref()) else {
                    continue;
                };
                if last.as_ref().is_some_and(|last| *last >= name) {
                    let error = self.error(Kind::Unsupported, "list", folder);
                    return Err(error.said("its objects are not listed in order"));
                }
                last = Some(name.clone());
                let size = meta.size;
                if each(Entry { name, size }).is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
            Ok(ControlFlow::Continue(()))
        })
    }

    pub(crate) fn folders(&self, folder: &str) -> Result<Vec<String>, StoreError> {
        let mut found = Vec::new();
        self.pages(folder, true, &mut |page| {
            let names = page.common_prefixes.iter();
            found.extend(names.filter_map(|path| {
                let name = self.own_name(path.as_ref())?;
                Some(name.rsplit('/').next().unwrap_or(&name).to_owned())
            }));
            Ok(ControlFlow::Continue(()))
        })?;
        found.sort_unstable();
        found.dedup();
        Ok(found)
    }

    /// The name from this folder on, if Muster can have given it.
    fn own_name(&self, path: &str) -> Option<String> {
        let name = match self.prefix.as_str() {
            "" => path,
            prefix => path.strip_prefix(prefix)?.strip_prefix('/')?,
        };
        is_name(name).then(|| name.to_owned())
    }

    fn pages(
        &self,
        folder: &str,
        folders: bool,
        each: &mut dyn FnMut(object_store::ListResult) -> Result<ControlFlow<()>, StoreError>,
    ) -> Result<(), StoreError> {
        let path = self.path(folder);
        let mut token = None;
        for _ in 0..MAX_PAGES {
            let (cloud, owned, path) = (self.clone(), folder.to_owned(), path.clone());
            let (page, next) =
                self.wait(async move { cloud.page(&owned, &path, token, folders).await })?;
            if each(page)?.is_break() || next.is_none() {
                return Ok(());
            }
            token = next;
        }
        let error = self.error(Kind::Unsupported, "list", folder);
        Err(error.said("the listing does not end"))
    }

    async fn page(
        &self,
        folder: &str,
        path: &Path,
        token: Option<String>,
        folders: bool,
    ) -> Result<(object_store::ListResult, Option<String>), StoreError> {
        let task = Task {
            doing: "list",
            name: folder,
            bytes: 0,
            limit: PAGE,
            changes: false,
        };
        let prefix = match path.as_ref() {
            "" => None,
            path => Some(format!("{path}/")),
        };
        let list = || {
            let options = PaginatedListOptions {
                delimiter: folders.then(|| "/".into()),
                max_keys: Some(1000),
                page_token: token.clone(),
                ..PaginatedListOptions::default()
            };
            self.inner.client.list_paginated(prefix.as_deref(), options)
        };
        let (listed, _) = self.tries(task, list).await?;
        Ok((listed.result, listed.page_token))
    }
}

/// In pieces, without copying.
fn payload(bytes: &Bytes) -> PutPayload {
    let pieces = bytes.len().div_ceil(PIECE);
    (0..pieces)
        .map(|piece| {
            let begin = piece * PIECE;
            bytes.slice(begin..bytes.len().min(begin + PIECE))
        })
        .collect()
}

/// Whether the bytes are what the store's checksum of the whole object says.
fn checked(bytes: Vec<u8>, seen: &Seen) -> Result<Vec<u8>, judge::Failure> {
    let answer = seen.answer.as_ref();
    let sums = [
        (CrcAlgorithm::Crc64Nvme, answer.and_then(|a| a.crc64)),
        (
            CrcAlgorithm::Crc32Iscsi,
            answer.and_then(|a| a.crc32c.map(u64::from)),
        ),
    ];
    for (algorithm, said) in sums {
        let Some(said) = said else { continue };
        let mut crc = Digest::new(algorithm);
        crc.update(&bytes);
        let found = crc.finalize();
        if found != said {
            return Err(judge::Failure {
                kind: Kind::Damaged,
                said: format!("its checksum is {found:016x}, the store's is {said:016x}"),
                open: false,
                pause: None,
            });
        }
    }
    Ok(bytes)
}
