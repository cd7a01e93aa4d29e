//! Events that a worker tells the demo's front end: one JSON object per line, appended to a file per rank.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::train::Outcome;

/// One line. `step` always counts complete steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// The group is formed and the state restored; `restored_from` is null for a fresh start.
    Start {
        step: u64,
        world: u32,
        restart: u64,
        restored_from: Option<u64>,
        linked: bool,
    },
    /// The first step of this process is complete: training goes on.
    FirstStep { step: u64, loss: f32 },
    /// Every so many steps.
    Step { step: u64, loss: f32 },
    /// A checkpoint is on disk (rank 0).
    Saved { step: u64 },
    /// Stopped as agreed, saved, and about to acknowledge.
    Stop { step: u64, reason: String },
    /// A peer is lost; `step` steps were complete here.
    Lost { step: u64, peer: u32 },
    /// The training is complete.
    Done {
        step: u64,
        #[serde(flatten)]
        outcome: Outcome,
    },
}

/// An event with who says it, and when.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Milliseconds since the Unix epoch.
    pub time_ms: u64,
    pub generation: u64,
    pub rank: u32,
    pub pid: u32,
    #[serde(flatten)]
    pub event: Event,
}

/// A rank's file of events.
#[derive(Debug)]
pub struct EventLog {
    file: File,
    generation: u64,
    rank: u32,
}

impl EventLog {
    /// The name of a rank's file. Processes of several generations append to it in turn.
    pub fn file_name(rank: u32) -> String {
        format!("rank-{rank}.jsonl")
    }

    /// Opens the file of `rank` in `dir`, which is created if need be.
    ///
    /// # Errors
    /// The directory cannot be written.
    pub fn open(dir: &Path, generation: u64, rank: u32) -> io::Result<EventLog> {
        fs::create_dir_all(dir)?;
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(dir.join(Self::file_name(rank)))?;
        Ok(EventLog {
            file,
            generation,
            rank,
        })
    }

    /// Appends one line, by one write.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&mut self, event: Event) -> io::Result<()> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let line = Line {
            time_ms: since.map_or(0, |since| since.as_millis() as u64),
            generation: self.generation,
            rank: self.rank,
            pid: std::process::id(),
            event,
        };
        let mut text = serde_json::to_vec(&line)?;
        text.push(b'\n');
        self.file.write_all(&text)
    }
}
