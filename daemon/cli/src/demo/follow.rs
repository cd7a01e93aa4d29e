//! Follows what the workers append to their files and what the agents answer, as it comes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use muster_protocol::local::Query;
use muster_runtime::demo::Line;

use super::cluster::ANSWER;
use super::recording::Recording;
use crate::query::client::ask_now;

/// The most that is read of one file at once; the rest comes the next time.
const CHUNK: u64 = 1 << 20;

/// A file that grows by whole lines, read from where the last read ended.
#[derive(Debug, Default)]
struct Tail {
    at: u64,
    /// The begin of a line whose end is not written yet.
    rest: Vec<u8>,
}

impl Tail {
    /// The lines that were completed since the last read.
    fn read(&mut self, path: &Path) -> io::Result<Vec<Vec<u8>>> {
        let mut file = File::open(path)?;
        file.seek(SeekFrom::Start(self.at))?;
        let read = file.take(CHUNK).read_to_end(&mut self.rest)?;
        self.at += read as u64;
        let Some(end) = self.rest.iter().rposition(|&b| b == b'\n') else {
            return Ok(Vec::new());
        };
        let rest = self.rest.split_off(end + 1);
        let whole = std::mem::replace(&mut self.rest, rest);
        let lines = whole.split(|&b| b == b'\n').filter(|l| !l.is_empty());
        Ok(lines.map(<[u8]>::to_vec).collect())
    }
}

/// Where each source was read up to.
#[derive(Debug, Default)]
pub(super) struct Follower {
    files: BTreeMap<PathBuf, Tail>,
    /// The number of the last entry of each agent's events.
    seen: BTreeMap<String, u64>,
}

impl Follower {
    /// Takes in what the workers of a node wrote since the last time; lines for people.
    ///
    /// # Errors
    /// A file that is there cannot be read.
    pub(super) fn workers(
        &mut self,
        node: &str,
        folder: &Path,
        recording: &mut Recording,
    ) -> io::Result<Vec<String>> {
        let mut news = Vec::new();
        let entries = match std::fs::read_dir(folder) {
            Ok(entries) => entries,
            // The first worker makes it.
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(news),
            Err(e) => return Err(e),
        };
        let mut lines = Vec::new();
        for entry in entries {
            let path = entry?.path();
            for line in self.files.entry(path.clone()).or_default().read(&path)? {
                match serde_json::from_slice::<Line>(&line) {
                    Ok(line) => lines.push(line),
                    Err(error) => {
                        let text = String::from_utf8_lossy(&line);
                        recording.contradictions.insert(format!(
                            "{node} wrote an event that cannot be read ({error}): {text}"
                        ));
                    }
                }
            }
        }
        lines.sort_by_key(|l| l.time_ms);
        for line in &lines {
            news.extend(recording.take_line(node, line));
        }
        Ok(news)
    }

    /// Takes in what an agent has to tell since the last time; lines for people. An agent that
    /// does not answer has nothing to tell.
    pub(super) fn agent(
        &mut self,
        node: &str,
        socket: &Path,
        job: &str,
        recording: &mut Recording,
    ) -> Vec<String> {
        let seen = self.seen.entry(node.to_owned()).or_default();
        let query = Query::Events {
            job: job.to_owned(),
            after: *seen,
        };
        let mut news = Vec::new();
        if let Some(answer) = ask_now(socket, query, ANSWER) {
            for event in answer.as_array().into_iter().flatten() {
                *seen = (*seen).max(event["seq"].as_u64().unwrap_or(0));
                news.extend(recording.take_event(event));
            }
        }
        news
    }
}

/// The last lines of a file, for the report of a failure.
pub(super) fn last_lines(path: &Path, count: usize) -> String {
    const NEAR: u64 = 16 * 1024;
    let text = File::open(path).and_then(|mut file| {
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(NEAR)))?;
        let mut bytes = Vec::new();
        file.take(NEAR).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    });
    let text = text.unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let from = lines.len().saturating_sub(count);
    lines.get(from..).unwrap_or_default().join("\n")
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_line_is_taken_once_and_only_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rank-0.jsonl");
        let mut file = File::create(&path).unwrap();
        let mut follower = Follower::default();
        let mut recording = Recording::default();
        let start = r#"{"time_ms":5,"generation":1,"rank":0,"pid":9,"event":"start","step":0,"world":1,"restart":0,"restored_from":null,"linked":true}"#;
        let first = r#"{"time_ms":7,"generation":1,"rank":0,"pid":9,"event":"first_step","step":1,"loss":2.25}"#;
        let (half, other) = first.split_at(40);
        write!(file, "{start}\n{half}").unwrap();
        let news = follower.workers("n1", dir.path(), &mut recording).unwrap();
        assert!(news.is_empty(), "{news:?}");
        writeln!(file, "{other}").unwrap();
        for expected in [1, 0] {
            let news = follower.workers("n1", dir.path(), &mut recording).unwrap();
            assert_eq!(news.len(), expected, "{news:?}");
        }
        assert_eq!(recording.workers_of(1).len(), 1);
        assert_eq!(recording.progress(), 1);
        writeln!(file, "nonsense").unwrap();
        follower.workers("n1", dir.path(), &mut recording).unwrap();
        assert_eq!(recording.contradictions.len(), 1);
    }

    #[test]
    fn the_last_lines_of_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        assert_eq!(last_lines(&path, 3), "");
        std::fs::write(&path, "1\n2\n3\n4\n").unwrap();
        assert_eq!(last_lines(&path, 3), "2\n3\n4");
    }
}
