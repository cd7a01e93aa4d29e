//! Jobs' stores: blocking file operations, each on a thread of its own, answered as events.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use muster_protocol::storelog::{CreateOutcome, Effect, Event, ReadOutcome};
use muster_protocol::{JobKey, StoreUuid};

use crate::metrics::Metrics;
use crate::storedir::{Create, Read, StoreDir, StoreError};

/// A job's store, and whose rights apply in it: a descriptor carries none for creating files.
#[derive(Clone, Debug)]
pub(super) struct Store {
    dir: Arc<StoreDir>,
    uid: u32,
    gid: u32,
}

impl Store {
    pub(super) fn uuid(&self) -> StoreUuid {
        self.dir.uuid()
    }

    /// Runs a blocking operation on a thread of its own, with the rights of the store's user.
    pub(super) fn run(self, act: impl FnOnce(&StoreDir) + Send + 'static) {
        tokio::task::spawn_blocking(move || {
            let _rights = Rights::of(self.uid, self.gid);
            act(&self.dir);
        });
    }
}

/// Opens the directory that a launcher passed, and probes that it keeps create-only promises.
pub(super) async fn open(fd: OwnedFd, uid: u32, gid: u32) -> Result<Store, StoreError> {
    let opened = tokio::task::spawn_blocking(move || {
        let _rights = Rights::of(uid, gid);
        StoreDir::open(fd)
    })
    .await;
    match opened {
        Ok(result) => result.map(|dir| Store {
            dir: Arc::new(dir),
            uid,
            gid,
        }),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// The file-system rights of another user, for this thread, until dropped. Only root can take them
/// on; any other agent works with its own.
struct Rights(Option<(i32, i32)>);

impl Rights {
    fn of(uid: u32, gid: u32) -> Rights {
        if !rustix::process::geteuid().is_root() || uid == 0 {
            return Rights(None);
        }
        // Safety: both calls only change this thread's credentials and cannot fail harmfully: what
        // they refuse is refused again, with an error, by the file operation.
        Rights(Some(unsafe { (libc::setfsgid(gid), libc::setfsuid(uid)) }))
    }
}

impl Drop for Rights {
    fn drop(&mut self) {
        if let Some((gid, uid)) = self.0 {
            // Safety: as above; this goes back to the agent's own.
            unsafe {
                libc::setfsuid(uid.cast_unsigned());
                libc::setfsgid(gid.cast_unsigned());
            }
        }
    }
}

/// The folder of a job in its store: its id where that is a plain file name, else a digest of it.
pub(super) fn folder(key: &JobKey) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let id = &key.id;
    if id.chars().all(plain) && !id.starts_with('.') {
        id.clone()
    } else {
        let hash = blake3::hash(id.as_bytes()).to_hex();
        format!("job-{}", hash.get(..32).unwrap_or_default())
    }
}

/// Carries out one operation of the log.
pub(super) fn carry_out(
    store: &StoreDir,
    folder: &str,
    effect: Effect,
    metrics: &Metrics,
) -> Event {
    match effect {
        Effect::Read { op, slot } => {
            let (outcome, word) = match store.read(folder, slot) {
                Read::Found(bytes) => (ReadOutcome::Found(bytes), "found"),
                Read::NotFound => (ReadOutcome::Absent, "absent"),
                Read::Failed(error) => {
                    tracing::warn!(slot, %error, "the store cannot be read");
                    (ReadOutcome::Failed, "failed")
                }
            };
            metrics.store_op("read", word);
            Event::Read { op, slot, outcome }
        }
        Effect::Create { op, slot, bytes } => {
            let (outcome, word) = match store.create(folder, slot, &bytes) {
                Create::Won => (CreateOutcome::Won, "won"),
                Create::AlreadyExists => (CreateOutcome::Exists, "exists"),
                // Nothing was written, but the log's rule for an unknown outcome is safe for it too.
                Create::Failed(error) | Create::Unknown(error) => {
                    tracing::warn!(slot, %error, "the store cannot be written");
                    (CreateOutcome::Unknown, "unknown")
                }
            };
            metrics.store_op("create", word);
            Event::Created { op, slot, outcome }
        }
    }
}
