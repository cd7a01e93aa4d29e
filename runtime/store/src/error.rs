//! Errors of a store, and advice for each.

use std::fmt;
use std::io;

/// Kind of trouble.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// No object has this name.
    NotFound,
    /// An object of this name, with other bytes, is there already, and was left as it was.
    Exists,
    /// The bucket or container does not exist.
    NoBucket,
    /// The directory was removed, mounted anew, or is another one than it was.
    Gone,
    /// No credentials, wrong ones, or expired ones (401, some 400 and 403).
    Credentials,
    /// Good credentials without the right to do this (403, EACCES).
    Denied,
    /// The bucket is in another region.
    Region,
    /// This machine's clock is too far from the store's.
    Clock,
    /// The store asks to be asked less often (429, 503).
    Throttled,
    /// The store failed (other 5xx).
    Server,
    /// Nothing connects to it, or connections break.
    Network,
    /// No answer in time.
    Timeout,
    /// Disk, quota or account is full.
    Full,
    /// The file system is read-only.
    ReadOnly,
    /// The file system has no hard links.
    NoLinks,
    /// A second create of one name overwrote the first, or several at once succeeded: this store
    /// cannot decide anything.
    NotCreateOnly,
    /// The store does not know how to do this (405, 501), or does it wrongly.
    Unsupported,
    /// The object is larger than the caller's limit.
    TooLarge,
    /// The object ends before the wanted bytes do.
    Short,
    /// The bytes that arrived do not fit the store's checksum, or are not understood.
    Damaged,
    /// The source of an upload was longer or shorter than said, or could not be read.
    Source,
    /// The caller's progress callback broke it off.
    Cancelled,
    /// The name is not one that an object may have.
    Name,
    /// The location or the environment has a value that cannot be used.
    Setup,
    /// The disk, or anything else.
    Other,
}

impl Kind {
    /// Whether the same may succeed a moment later.
    pub fn passes(self) -> bool {
        matches!(
            self,
            Self::Throttled | Self::Server | Self::Network | Self::Timeout | Self::Damaged
        )
    }
}

/// Store whose words the advice uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    Directory,
    S3,
    Google,
    Azure,
}

/// An operation on a store failed.
///
/// Where [`StoreError::unknown`] is set, a change may have been made, or may still be made later:
/// until the object has been read, only the same bytes may be tried again under its name
/// (RENDEZVOUS rule R12). Else nothing has changed, and nothing will.
#[derive(Debug)]
pub struct StoreError {
    pub kind: Kind,
    /// Whether what was to be written is there is not known.
    pub unknown: bool,
    /// The operation, as in "cannot … it".
    pub doing: &'static str,
    /// The store and the object.
    pub place: String,
    /// Message of the store or the system. At most a few hundred bytes.
    pub said: String,
    /// How often it was tried.
    pub tries: u32,
    pub(crate) flavour: Flavour,
    pub(crate) source: Option<io::Error>,
}

impl StoreError {
    pub(crate) fn new(flavour: Flavour, kind: Kind, doing: &'static str, place: String) -> Self {
        Self {
            kind,
            unknown: false,
            doing,
            place,
            said: String::new(),
            tries: 1,
            flavour,
            source: None,
        }
    }

    pub(crate) fn said(self, said: impl Into<String>) -> Self {
        let said = said.into();
        Self { said, ..self }
    }

    /// Advice for this error.
    pub fn fix(&self) -> &'static str {
        let cloud = self.flavour != Flavour::Directory;
        match self.kind {
            Kind::NotFound => "check the location and the job's name",
            Kind::Exists => "save under a name of its own",
            Kind::NoBucket => match self.flavour {
                Flavour::Azure => "create the container, or correct its name and the account's",
                _ => "create the bucket, or correct its name",
            },
            Kind::Gone => "bring it back as it was, or restart the job",
            Kind::Credentials => match self.flavour {
                Flavour::S3 => {
                    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (with AWS_SESSION_TOKEN where there is one) or AWS_PROFILE, or give the node a role"
                }
                Flavour::Google => {
                    "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or give the node a service account"
                }
                Flavour::Azure => {
                    "set AZURE_STORAGE_KEY, AZURE_STORAGE_SAS_TOKEN or AZURE_STORAGE_CONNECTION_STRING, or give the node a managed identity"
                }
                Flavour::Directory => "let the job's user write there on every node",
            },
            Kind::Denied if cloud => {
                "give these credentials the rights that docs/stores.md lists, for this bucket and prefix"
            }
            Kind::Denied => "let the job's user write there on every node",
            Kind::Region => "set AWS_REGION to the bucket's region",
            Kind::Clock => "set this machine's clock (chrony or systemd-timesyncd)",
            Kind::Throttled => "try again later, or let fewer nodes upload at once",
            Kind::Server => "try again later; if it lasts, ask whoever runs the store",
            Kind::Network => match self.flavour {
                Flavour::S3 => {
                    "check the network, AWS_ENDPOINT_URL, HTTPS_PROXY and NO_PROXY on this node"
                }
                Flavour::Directory => "check the mount on this node",
                _ => "check the network, the endpoint, HTTPS_PROXY and NO_PROXY on this node",
            },
            Kind::Timeout => "check the network to the store and the store's load",
            Kind::Full => "free space or raise the quota there, or keep fewer checkpoints",
            Kind::ReadOnly => "mount it writable on every node",
            Kind::NoLinks => "use another file system",
            Kind::NotCreateOnly if cloud => {
                "use a store that honours `If-None-Match: *` when it writes (Amazon S3, Google Cloud Storage, Azure, SeaweedFS, MinIO, Ceph; docs/stores.md), or upgrade this one"
            }
            Kind::NotCreateOnly => "use another file system",
            Kind::Unsupported => "use another store, or upgrade this one (docs/stores.md)",
            Kind::TooLarge => "it is none of Muster's objects: remove it, or use another prefix",
            Kind::Short | Kind::Damaged if cloud => "load an older checkpoint, or restore this one",
            Kind::Short | Kind::Damaged => "look for the disk's errors in the kernel's log",
            Kind::Source => "save again",
            Kind::Cancelled => "save again when it is wanted",
            Kind::Name => "use letters, digits and - _ .",
            Kind::Setup => "correct it and start again",
            Kind::Other => match cloud {
                true => "ask whoever runs the store",
                false => "look for the disk's errors in the kernel's log",
            },
        }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            Kind::NotFound => "there is no such object",
            Kind::Exists => "another one of this name is there, and was left as it is",
            Kind::NoBucket if self.flavour == Flavour::Azure => "there is no such container",
            Kind::NoBucket => "there is no such bucket",
            Kind::Gone => "the store is not what it was",
            Kind::Credentials => "it takes no such credentials",
            Kind::Denied => "this may not be done",
            Kind::Region => "the bucket is in another region",
            Kind::Clock => "the clocks differ too much",
            Kind::Throttled => "the store is overloaded",
            Kind::Server => "the store failed",
            Kind::Network => "the connection failed",
            Kind::Timeout => "no answer in time",
            Kind::Full => "there is no room",
            Kind::ReadOnly => "the file system is read-only",
            Kind::NoLinks => "the file system has no hard links",
            Kind::NotCreateOnly => {
                "one object can be created twice there, so it can decide nothing"
            }
            Kind::Unsupported => "the store cannot do this",
            Kind::TooLarge => "it is too large",
            Kind::Short => "it ends too early",
            Kind::Damaged => "what arrived is damaged",
            Kind::Source => "what was to be stored is not what it was said to be",
            Kind::Cancelled => "it was broken off",
            Kind::Name => "this cannot be its name",
            Kind::Setup => "it cannot be set up",
            Kind::Other => "it failed",
        };
        write!(f, "cannot {} {}: {what}", self.doing, self.place)?;
        if !self.said.is_empty() {
            write!(f, " ({})", self.said)?;
        }
        if self.tries > 1 {
            write!(f, ", tried {} times", self.tries)?;
        }
        if self.unknown {
            f.write_str("; whether it was written is not known")?;
        }
        write!(f, "; {}", self.fix())
    }
}

impl std::error::Error for StoreError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}

impl From<StoreError> for io::Error {
    /// For [`muster_checkpoint::source::Source`]: only what is surely not there is `NotFound`, and a
    /// disk's own error stays one.
    fn from(error: StoreError) -> Self {
        let eio = rustix::io::Errno::IO.raw_os_error();
        if let Some(source) = &error.source
            && source.raw_os_error() == Some(eio)
        {
            return io::Error::from_raw_os_error(eio);
        }
        let kind = match error.kind {
            Kind::NotFound => io::ErrorKind::NotFound,
            Kind::Short => io::ErrorKind::UnexpectedEof,
            Kind::Exists => io::ErrorKind::AlreadyExists,
            Kind::Credentials | Kind::Denied => io::ErrorKind::PermissionDenied,
            Kind::Timeout => io::ErrorKind::TimedOut,
            Kind::Full => io::ErrorKind::StorageFull,
            Kind::ReadOnly => io::ErrorKind::ReadOnlyFilesystem,
            Kind::Name => io::ErrorKind::InvalidInput,
            Kind::Damaged => io::ErrorKind::InvalidData,
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, error)
    }
}
