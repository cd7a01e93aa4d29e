//! Jobs' stores: blocking file operations, each on a thread of its own, answered as events.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use muster_protocol::JobKey;
use muster_protocol::storelog::{CreateOutcome, Effect, Event, ReadOutcome};

use crate::metrics::Metrics;
use crate::storedir::{Create, Read, StoreDir, StoreError};

/// Opens the directory that a launcher passed, and probes that it keeps create-only promises.
pub(super) async fn open(fd: OwnedFd) -> Result<Arc<StoreDir>, StoreError> {
    let opened = tokio::task::spawn_blocking(move || StoreDir::open(fd)).await;
    match opened {
        Ok(result) => result.map(Arc::new),
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
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
