//! Writing what workers sealed, and the manifest: by one thread, one file after the other, each by several.

use std::io;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};

use muster_checkpoint::hex::{Bytes, Id};
use muster_checkpoint::manifest::Origin;
use muster_checkpoint::part::{self, Kept, Note, PartError};
use muster_checkpoint::persist::{Fault, Options, Progress};
use muster_checkpoint::shelf;
use muster_checkpoint::slot::Sealed;
use muster_launcher::slots::{Failure, Generation};
use muster_protocol::Digest;
use muster_protocol::checkpoint::{Save, SlotId, Written};
use muster_store::Store;
use tokio::sync::mpsc;

use super::ahead::Ahead;
use super::way::Taken;
use super::{Cache, Done, Place};
use crate::kept::words;

/// Where a job's data lies, below its folder.
const DATA: &str = "data/";

/// A file to be written.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) slot: SlotId,
    pub(super) save: Save,
    pub(super) rank: u32,
    pub(super) sealed: Arc<Sealed>,
    /// The part that was begun before it was sealed.
    pub(super) ahead: Option<Ahead>,
    pub(super) place: Store,
    pub(super) cache: Option<Cache>,
    pub(super) options: Options,
    pub(super) stop: Arc<AtomicBool>,
    pub(super) done: Arc<AtomicU64>,
    pub(super) way: Taken,
}

/// The thread that writes.
#[derive(Debug)]
pub(super) struct Writer(Sender<Task>);

impl Writer {
    pub(super) fn start(done: mpsc::UnboundedSender<Done>) -> io::Result<Writer> {
        let (tasks, queue) = channel::<Task>();
        let thread = std::thread::Builder::new().name("saves".into());
        thread.spawn(move || {
            for mut task in queue {
                muster_fault::point("launcher.write");
                let ahead = task.ahead.take();
                let result = write(&task, ahead);
                muster_fault::point("launcher.written");
                let Task { slot, save, .. } = task;
                // The slot may be freed as soon as this is heard: nothing of it is held any more.
                drop((task.sealed, task.way));
                if done.send(Done::Wrote(slot, save, result)).is_err() {
                    break;
                }
            }
        })?;
        Ok(Writer(tasks))
    }

    /// Whether it will be written.
    pub(super) fn add(&self, task: Task) -> bool {
        self.0.send(task).is_ok()
    }
}

fn write(task: &Task, ahead: Option<Ahead>) -> Result<Kept, Failure> {
    if task.stop.load(Ordering::Relaxed) {
        return Err(Failure::Stopped);
    }
    let progress = |progress: Progress| {
        task.done.store(progress.done, Ordering::Relaxed);
        match task.stop.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    };
    let folder = task.save.folder();
    let name = folder.strip_prefix(DATA).unwrap_or(&folder);
    std::thread::scope(|scope| {
        // Beside each other: the copy is not to keep the save waiting. Where there is no thread for it,
        // there is no copy.
        if let Some(cache) = &task.cache {
            let copy = || cache.copy(&task.sealed, name, task.options, &task.stop);
            let thread = std::thread::Builder::new().name("cache".into());
            let _spawned = thread.spawn_scoped(scope, copy);
        }
        let ahead = ahead.and_then(Ahead::wait);
        if task.stop.load(Ordering::Relaxed) {
            return Err(Failure::Stopped);
        }
        let kept = part::keep(
            &task.sealed,
            &task.place,
            name,
            task.rank,
            ahead,
            task.options,
            &progress,
        );
        kept.map_err(|error| match &error {
            PartError::Persist(persist) if matches!(persist.fault, Fault::Cancelled) => {
                Failure::Stopped
            }
            _ => Failure::Failed(words(&error)),
        })
    })
}

/// Makes the manifest of a save, by a thread. `sealed` are the copies of it that are here: rank 0's has
/// the draft.
pub(super) fn assemble(
    generation: Generation,
    place: Option<Place>,
    save: Save,
    parts: &[Written],
    sealed: Vec<Arc<Sealed>>,
    done: mpsc::UnboundedSender<Done>,
) -> Result<(), String> {
    let id = |part: &Written| {
        let digest = <[u8; 32]>::try_from(&part.summary[..]).map(Bytes);
        digest.map_err(|_| {
            let (rank, bytes) = (part.rank, part.summary.len());
            format!("the digest of rank {rank}'s part has {bytes} bytes, not 32")
        })
    };
    let digests: Vec<Id> = parts.iter().map(id).collect::<Result<_, _>>()?;
    let place = place.ok_or("this launcher has no store")?;
    let make = move || -> Result<(Digest, u32), String> {
        let notes = sealed.iter().map(|s| Note::decode(&s.note));
        let drafts = notes.filter_map(|note| note.ok()?.draft);
        let Some(draft) = drafts.into_iter().next() else {
            return Err("rank 0's copy, with the draft of the manifest, is gone".into());
        };
        muster_fault::point("launcher.assemble");
        let folder = save.folder();
        let name = folder.strip_prefix(DATA).unwrap_or(&folder);
        let origin = Origin {
            job: place.job,
            lineage: Bytes(generation.lineage.0),
            generation: Bytes(generation.digest.0),
            number: generation.number,
            attempt: save.attempt,
            step: save.step,
            world: generation.world,
            saved_at: draft.saved_at,
        };
        let manifest =
            (draft.assemble(origin, &place.store, name, &digests)).map_err(|e| words(&e))?;
        let bytes = manifest.encode().map_err(|e| words(&e))?;
        let digest = shelf::put_encoded(&place.store, &bytes).map_err(|e| words(&e))?;
        muster_fault::point("launcher.assembled");
        Ok((
            Digest(digest.0),
            u32::try_from(bytes.len()).unwrap_or(u32::MAX),
        ))
    };
    let thread = std::thread::Builder::new().name("manifest".into());
    let spawned = thread.spawn(move || {
        let _over = done.send(Done::Assembled(save, make()));
    });
    spawned
        .map(drop)
        .map_err(|error| format!("no thread to make the manifest: {error}"))
}
