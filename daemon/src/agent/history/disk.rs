//! The events on this node's disk, so that an agent that was started anew still tells of them. They are for people
//! only: what cannot be written or read is left out. A thread writes, for a disk that hangs must not hold the agent up.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use muster_protocol::JobKey;
use serde::{Deserialize, Serialize};
use serde_json::Value;

const NEWEST: &str = "events";
const OLDER: &str = "events.1";

/// The most bytes of each of the two files.
const MAX_BYTES: u64 = 4 << 20;

/// The most lines that wait for the disk. Further ones are not written.
const MAX_WAITING: usize = 1_024;

/// How long the agent's end waits for the last lines.
const LAST_WAIT: Duration = Duration::from_millis(500);

/// One event, as a line of the file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Kept {
    pub(super) key: JobKey,
    pub(super) event: Value,
}

#[derive(Debug)]
pub(super) struct Disk {
    lines: Option<SyncSender<String>>,
    written: Receiver<()>,
}

impl Disk {
    /// Reads what earlier runs of the agent wrote here, the oldest first, and goes on behind it.
    pub(super) fn open(dir: &Path) -> (Disk, Vec<Kept>) {
        let mut kept = Vec::new();
        for name in [OLDER, NEWEST] {
            let mut bytes = Vec::new();
            // A file that is longer was not written by an agent.
            let file = File::open(dir.join(name)).map(|file| file.take(2 * MAX_BYTES));
            let _shorter = file.and_then(|mut file| file.read_to_end(&mut bytes));
            let lines = bytes.split(|byte| *byte == b'\n');
            kept.extend(lines.filter_map(|line| serde_json::from_slice(line).ok()));
        }
        let (lines, from) = sync_channel(MAX_WAITING);
        let (done, written) = sync_channel(1);
        let dir = dir.to_owned();
        std::thread::spawn(move || {
            write_all(&dir, &from);
            let _nobody_waits = done.send(());
        });
        let lines = Some(lines);
        (Disk { lines, written }, kept)
    }

    pub(super) fn add(&self, key: &JobKey, event: &Value) {
        let (key, event) = (key.clone(), event.clone());
        if let (Some(lines), Ok(line)) = (&self.lines, serde_json::to_string(&Kept { key, event }))
        {
            let _full = lines.try_send(line + "\n");
        }
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        self.lines = None;
        let _late = self.written.recv_timeout(LAST_WAIT);
    }
}

fn write_all(dir: &Path, lines: &Receiver<String>) {
    let (newest, before) = (dir.join(NEWEST), dir.join(OLDER));
    let mut file = begin(&newest, false);
    for line in lines {
        let len = file
            .as_ref()
            .and_then(|f| f.metadata().ok())
            .map(|m| m.len());
        if len.is_some_and(|len| len + line.len() as u64 > MAX_BYTES) {
            let _stays = std::fs::rename(&newest, &before);
            file = begin(&newest, true);
        }
        let whole = file.as_mut().map(|file| file.write_all(line.as_bytes()));
        // The line may be torn: the next one begins another.
        if let (Some(Err(_)), Some(file)) = (whole, &mut file) {
            let _full = file.write_all(b"\n");
        }
    }
}

fn begin(path: &PathBuf, anew: bool) -> Option<File> {
    let mut how = OpenOptions::new();
    how.create(true).mode(0o600);
    match anew {
        true => how.write(true).truncate(true),
        false => how.append(true),
    };
    how.open(path).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key() -> JobKey {
        JobKey {
            cluster: "c".into(),
            owner: "0".into(),
            id: "j".into(),
        }
    }

    fn numbers(kept: &[Kept]) -> Vec<u64> {
        let numbers = kept.iter().map(|k| k.event["n"].as_u64().unwrap());
        numbers.collect()
    }

    #[test]
    fn what_was_written_is_read_again_but_for_what_is_torn() {
        let tmp = tempfile::tempdir().unwrap();
        for n in 0..3 {
            let (disk, kept) = Disk::open(tmp.path());
            assert_eq!(numbers(&kept), (0..n).collect::<Vec<u64>>());
            disk.add(&key(), &json!({ "n": n }));
        }
        let path = tmp.path().join(NEWEST);
        let mut text = std::fs::read_to_string(&path).unwrap();
        text.insert_str(0, "{\"key\":3}\n\u{0}\n");
        text.truncate(text.len() - 3);
        std::fs::write(&path, text).unwrap();
        assert_eq!(numbers(&Disk::open(tmp.path()).1), [0, 1]);
    }

    #[test]
    fn the_files_are_bounded_and_the_newest_events_stay() {
        let tmp = tempfile::tempdir().unwrap();
        let long = "x".repeat(64 << 10);
        let count = 3 * MAX_BYTES / (64 << 10);
        for n in 0..count {
            // One at a time, so that none is left out.
            let (disk, _) = Disk::open(tmp.path());
            disk.add(&key(), &json!({ "n": n, "text": long }));
        }
        let (_, kept) = Disk::open(tmp.path());
        let kept = numbers(&kept);
        assert_eq!(kept.last(), Some(&(count - 1)));
        assert!(
            kept.len() as u64 >= MAX_BYTES / (70 << 10),
            "{}",
            kept.len()
        );
        for name in [NEWEST, OLDER] {
            let len = std::fs::metadata(tmp.path().join(name)).unwrap().len();
            assert!(len <= MAX_BYTES, "{name}: {len}");
        }
    }

    #[test]
    fn a_directory_that_cannot_be_written_costs_the_events_alone() {
        let (disk, kept) = Disk::open(Path::new("/proc/self/fdinfo"));
        disk.add(&key(), &json!({}));
        assert!(kept.is_empty());
    }
}
