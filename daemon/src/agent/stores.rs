//! Jobs' stores: blocking file operations, each on a thread of its own, answered as events.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use muster_protocol::storelog::{CreateOutcome, Effect, Event, ReadOutcome};
use muster_protocol::{JobKey, StoreUuid};

use crate::metrics::Metrics;
use crate::storedir::{Create, Read, StoreDir};

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
            // It could when the store was opened; an operation that is not answered is retried.
            if let Some(_rights) = Rights::of(self.uid, self.gid) {
                act(&self.dir);
            }
        });
    }
}

/// Opens the directory that a launcher passed, and probes that it keeps create-only promises.
pub(super) async fn open(fd: OwnedFd, uid: u32, gid: u32) -> Result<Store, String> {
    let opened = tokio::task::spawn_blocking(move || {
        let Some(_rights) = Rights::of(uid, gid) else {
            return Err(format!(
                "this agent cannot act for uid {uid}: run it as root with CAP_SETUID, or let \
                 `muster run` use an agent of its own (--instance 1 and --rdzv-endpoint)"
            ));
        };
        StoreDir::open(fd).map_err(|e| e.to_string())
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
    /// `None` when this agent cannot act for the user: it must not work with its own rights then,
    /// for whoever passes a descriptor may not be allowed to write there.
    fn of(uid: u32, gid: u32) -> Option<Rights> {
        let own = rustix::process::geteuid();
        if own.as_raw() == uid {
            return Some(Rights(None));
        }
        // Safety: these calls change this thread's file-system credentials and nothing else. They
        // report no error: what they return the second time tells whether they were obeyed.
        let (before, obeyed) = unsafe {
            let before = (libc::setfsgid(gid), libc::setfsuid(uid));
            (before, libc::setfsuid(u32::MAX).cast_unsigned() == uid)
        };
        let rights = Rights(Some(before));
        obeyed.then_some(rights)
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
