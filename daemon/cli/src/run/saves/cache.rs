//! Copies of what this node saves, on a disk of its own: workers that are started again here, or others
//! with the same disk, read from there what they would fetch from the store.
//!
//! A copy is no checkpoint: nothing is committed for its sake, and one that fails, or is wrong, costs
//! nothing but the way to the store.

use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use muster_checkpoint::dir::Dir;
use muster_checkpoint::part::Note;
use muster_checkpoint::persist::{Fault, Options};
use muster_checkpoint::place::Place as _;
use muster_checkpoint::slot::Sealed;

use crate::kept::words;
use crate::run::console::say;

/// Saves whose copies stay when another begins: the newest may still be uncommitted.
const KEPT: usize = 2;

/// The folder of a job's copies.
#[derive(Clone, Debug)]
pub struct Cache {
    path: PathBuf,
    /// Saves that this launcher has copied, in this order.
    made: Arc<Mutex<Vec<String>>>,
    /// Whether it was said that it does not work.
    failed: Arc<AtomicBool>,
}

impl Cache {
    /// A job's folder in this directory; both are made if need be.
    ///
    /// # Errors
    /// They cannot be.
    pub fn open(directory: &Path, job: &str) -> io::Result<Cache> {
        let path = std::path::absolute(directory)?.join(crate::stores::folder(job));
        std::fs::create_dir_all(&path)?;
        Ok(Cache {
            path,
            made: Arc::default(),
            failed: Arc::default(),
        })
    }

    /// For workers.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Copies what a rank sealed to the folder of its save, and removes what is too old. Says once that
    /// this fails.
    pub(super) fn copy(&self, sealed: &Sealed, save: &str, options: Options, stop: &AtomicBool) {
        match self.try_copy(sealed, save, options, stop) {
            Ok(()) => self.failed.store(false, Ordering::Relaxed),
            Err(why) => {
                if !self.failed.swap(true, Ordering::Relaxed) {
                    let path = self.path.display();
                    say(&format!(
                        "--checkpoint-cache: no copy in {path}, workers will read from the store: {why}"
                    ));
                }
            }
        }
    }

    fn try_copy(
        &self,
        sealed: &Sealed,
        save: &str,
        options: Options,
        stop: &AtomicBool,
    ) -> Result<(), String> {
        let note = Note::decode(&sealed.note).map_err(|error| words(&error))?;
        let Some(file) = note.file else {
            return Ok(());
        };
        let failed = |error: io::Error| error.to_string();
        let data = Dir::open(&self.path).and_then(|job| job.make("data"));
        let data = data.map_err(failed)?;
        self.prune(&data, save).map_err(failed)?;
        let folder = data.make(save).map_err(failed)?;
        let go_on = |_| match stop.load(Ordering::Relaxed) {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        };
        match folder.keep(&file, sealed, None, options, &go_on) {
            Ok(_) => Ok(()),
            // It is not wanted any more.
            Err(error) if matches!(error.fault, Fault::Cancelled) => Ok(()),
            Err(error) => Err(words(&error)),
        }
    }

    /// Removes all but the newest saves besides this one. Saves that an earlier launcher left are older than
    /// all that this one made; a later save may have a lower step, after a way back.
    fn prune(&self, data: &Dir, save: &str) -> io::Result<()> {
        let mut made = self.made.lock().unwrap_or_else(PoisonError::into_inner);
        if made.iter().all(|known| known != save) {
            made.push(save.to_owned());
        }
        let step = |name: &str| name.split('-').next()?.parse::<u64>().ok();
        let mut others = Vec::new();
        for name in data.names()?.into_iter().filter(|name| name != save) {
            let path = self.path.join("data").join(&name);
            // Another launcher of this node may remove it just now.
            if std::fs::symlink_metadata(&path).is_ok_and(|meta| meta.is_dir()) {
                let age = made.iter().position(|known| *known == name);
                others.push((age, step(&name), name));
            }
        }
        others.sort_unstable();
        let old = others.len().saturating_sub(KEPT);
        for (_, _, name) in others.drain(..old) {
            match std::fs::remove_dir_all(self.path.join("data").join(&name)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            }
            made.retain(|known| *known != name);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use muster_checkpoint::hex::Bytes;
    use muster_checkpoint::slot::{Image, Slot, Source};

    use super::*;

    fn sealed() -> Sealed {
        let note = Note {
            file: Some("n0-0.safetensors".into()),
            ..Note::default()
        };
        let note = note.encode().unwrap();
        let (slot, _) = Slot::create(8192, note.len() as u64, 1).unwrap();
        let image = Image {
            step: 1,
            generation: Bytes([1; 32]),
            bytes: 8192,
            sources: &[Source {
                at: 0,
                bytes: &[7; 8192],
            }],
            note: &note,
        };
        slot.fill(&image, 1).unwrap();
        slot.take().unwrap().unwrap()
    }

    fn names(path: &Path) -> Vec<String> {
        Dir::open(path).unwrap().names().unwrap()
    }

    #[test]
    fn the_newest_copies_stay_and_one_that_fails_is_no_error() {
        let disk = tempfile::tempdir().unwrap();
        let cache = Cache::open(&disk.path().join("a/b"), "job").unwrap();
        let (sealed, stop) = (sealed(), AtomicBool::new(false));
        let data = cache.path().join("data");
        // Of an earlier launcher: older than all that this one makes, whatever their steps.
        for save in ["97-f-1", "99-f-2"] {
            std::fs::create_dir_all(data.join(save)).unwrap();
        }
        // Not the highest steps: after a way back the newest ones are lower.
        for save in ["90-g-1", "95-g-2", "50-h-1"] {
            cache.copy(&sealed, save, Options::default(), &stop);
            if save == "90-g-1" {
                assert_eq!(names(&data), ["90-g-1", "97-f-1", "99-f-2"]);
            }
        }
        assert_eq!(names(&data), ["50-h-1", "90-g-1", "95-g-2"]);
        cache.copy(&sealed, "55-h-2", Options::default(), &stop);
        cache.copy(&sealed, "55-h-2", Options::default(), &stop);
        assert_eq!(names(&data), ["50-h-1", "55-h-2", "95-g-2"]);
        let file = std::fs::read(data.join("55-h-2/n0-0.safetensors")).unwrap();
        assert!(file == [7; 8192]);
        assert!(!cache.failed.load(Ordering::Relaxed));

        std::fs::remove_dir_all(disk.path().join("a")).unwrap();
        cache.copy(&sealed, "60-h-3", Options::default(), &stop);
        assert!(cache.failed.load(Ordering::Relaxed));
        let file = disk.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(Cache::open(&file, "job").is_err());
    }
}
