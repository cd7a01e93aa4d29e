//! The files of one run: folders of attempts and local ranks, and what is written to them.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use super::super::output::Failure;

/// Attempts that are looked at; a job that restarted more often shows its last ones.
const MAX_ATTEMPTS: usize = 100_000;
/// Bytes that are read in one go.
const CHUNK: usize = 64 * 1024;
/// A line that grows beyond this is printed in parts.
const MAX_LINE: usize = 1 << 20;

/// One of a worker's two streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Source {
    Stdout,
    Stderr,
}

impl Source {
    pub(super) fn word(self) -> &'static str {
        match self {
            Source::Stdout => "stdout",
            Source::Stderr => "stderr",
        }
    }
}

/// A start of the workers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Attempt {
    /// `2`, or `2.1`.
    pub(super) name: String,
    pub(super) dir: PathBuf,
}

/// One file of one worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct LogFile {
    pub(super) local_rank: u64,
    pub(super) stream: Source,
    pub(super) path: PathBuf,
}

/// The run's own folder: the one that is named, or the newest of this job in it.
pub(super) fn run_folder(dir: &Path, job: &str) -> Option<PathBuf> {
    if attempts(dir).is_ok_and(|all| !all.is_empty()) {
        return Some(dir.to_owned());
    }
    let mut runs: Vec<(std::time::SystemTime, PathBuf)> = fs::read_dir(dir)
        .ok()?
        .flatten()
        .filter(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            name.strip_prefix(job)
                .is_some_and(|rest| rest.is_empty() || is_launcher(rest))
        })
        .filter_map(|entry| Some((entry.metadata().ok()?.modified().ok()?, entry.path())))
        .collect();
    runs.sort();
    runs.pop().map(|(_, path)| path)
}

/// `_` and a launcher's short id: a job `a` must not find the runs of a job `a_b`.
fn is_launcher(rest: &str) -> bool {
    rest.strip_prefix('_')
        .is_some_and(|id| id.len() >= 8 && id.chars().all(|c| c.is_ascii_hexdigit()))
}

/// The attempts in a run's folder, oldest first.
pub(super) fn attempts(root: &Path) -> io::Result<Vec<Attempt>> {
    let mut all: Vec<((u64, u64), Attempt)> = fs::read_dir(root)?
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let name = name.strip_prefix("attempt_")?.to_owned();
            let (count, again) = name.split_once('.').unwrap_or((&name, "0"));
            let order = (count.parse().ok()?, again.parse().ok()?);
            let dir = entry.path();
            Some((order, Attempt { name, dir }))
        })
        .take(MAX_ATTEMPTS)
        .collect();
    all.sort_by_key(|(order, _)| *order);
    Ok(all.into_iter().map(|(_, attempt)| attempt).collect())
}

impl Attempt {
    /// The files that there are, by local rank, stdout first.
    pub(super) fn files(&self) -> Vec<LogFile> {
        let mut ranks: Vec<u64> = fs::read_dir(&self.dir)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect();
        ranks.sort_unstable();
        let mut all = Vec::new();
        for local_rank in ranks {
            for stream in [Source::Stdout, Source::Stderr] {
                let path = self
                    .dir
                    .join(local_rank.to_string())
                    .join(format!("{}.log", stream.word()));
                if path.is_file() {
                    all.push(LogFile {
                        local_rank,
                        stream,
                        path,
                    });
                }
            }
        }
        all
    }
}

impl LogFile {
    pub(super) fn title(&self) -> String {
        format!("local rank {} {}", self.local_rank, self.stream.word())
    }

    /// Bytes now; 0 when it cannot be looked at.
    pub(super) fn len(&self) -> u64 {
        fs::metadata(&self.path).map_or(0, |m| m.len())
    }

    fn failed(&self, error: &io::Error) -> Failure {
        Failure::Refused(format!(
            "cannot read {}: {error}; run as the user who started the job",
            self.path.display()
        ))
    }

    /// Prints the file as it is, or its last lines.
    pub(super) fn print(
        &self,
        tail: Option<usize>,
        out: &mut dyn FnMut(&[u8]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let mut file = File::open(&self.path).map_err(|e| self.failed(&e))?;
        if let Some(lines) = tail {
            let from = tail_start(&mut file, lines).map_err(|e| self.failed(&e))?;
            file.seek(SeekFrom::Start(from))
                .map_err(|e| self.failed(&e))?;
        }
        let mut buffer = vec![0; CHUNK];
        loop {
            let n = file.read(&mut buffer).map_err(|e| self.failed(&e))?;
            match buffer.get(..n) {
                Some(bytes) if n > 0 => out(bytes)?,
                _ => return Ok(()),
            }
        }
    }
}

/// Where the last so many lines begin. Reads backwards, so that a log of gigabytes costs nothing.
fn tail_start(file: &mut File, lines: usize) -> io::Result<u64> {
    let end = file.metadata()?.len();
    let mut left = lines;
    let mut at = end;
    let mut buffer = vec![0; CHUNK];
    while at > 0 {
        let size = (CHUNK as u64).min(at);
        at -= size;
        file.seek(SeekFrom::Start(at))?;
        let piece = &mut buffer[..size as usize];
        file.read_exact(piece)?;
        for (i, byte) in piece.iter().enumerate().rev() {
            let position = at + i as u64;
            // A line break at the very end ends the last line and begins none.
            if *byte == b'\n' && position + 1 != end {
                if left <= 1 {
                    return Ok(if lines == 0 { end } else { position + 1 });
                }
                left -= 1;
            }
        }
    }
    Ok(if lines == 0 { end } else { 0 })
}

/// Follows one file; only whole lines are printed while several files share the output.
#[derive(Debug)]
pub(super) struct Tailer {
    pub(super) file: LogFile,
    tail: Option<usize>,
    open: Option<File>,
    line: Vec<u8>,
}

impl Tailer {
    pub(super) fn new(file: LogFile, tail: Option<usize>) -> Tailer {
        Tailer {
            file,
            tail,
            open: None,
            line: Vec::new(),
        }
    }

    /// Prints what was written since the last call; with `last` also a line without an end.
    pub(super) fn pump(
        &mut self,
        prefixed: bool,
        last: bool,
        out: &mut dyn FnMut(&[u8]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        if self.open.is_none() {
            let mut file = File::open(&self.file.path).map_err(|e| self.file.failed(&e))?;
            if let Some(lines) = self.tail {
                let from = tail_start(&mut file, lines).map_err(|e| self.file.failed(&e))?;
                file.seek(SeekFrom::Start(from))
                    .map_err(|e| self.file.failed(&e))?;
            }
            self.open = Some(file);
        }
        let Some(file) = &mut self.open else {
            return Ok(());
        };
        let mut buffer = vec![0; CHUNK];
        loop {
            let n = file.read(&mut buffer).map_err(|e| self.file.failed(&e))?;
            let piece = buffer.get(..n).unwrap_or_default();
            self.line.extend_from_slice(piece);
            let whole = self.line.iter().rposition(|b| *b == b'\n').map(|i| i + 1);
            let upto = match whole {
                Some(upto) => upto,
                None if self.line.len() > MAX_LINE || (last && n == 0) || !prefixed => {
                    self.line.len()
                }
                None => 0,
            };
            let rest = self.line.split_off(upto);
            let ready = std::mem::replace(&mut self.line, rest);
            if !ready.is_empty() {
                out(&dressed(&self.file, ready, prefixed))?;
            }
            if n == 0 {
                return Ok(());
            }
        }
    }
}

/// With `[local rank]` before each line, and `!` for stderr.
fn dressed(file: &LogFile, ready: Vec<u8>, prefixed: bool) -> Vec<u8> {
    if !prefixed {
        return ready;
    }
    let sign = match file.stream {
        Source::Stdout => ' ',
        Source::Stderr => '!',
    };
    let prefix = format!("[{}]{sign}", file.local_rank);
    let mut out = Vec::with_capacity(ready.len() + 64);
    for line in ready.split_inclusive(|b| *b == b'\n') {
        out.extend_from_slice(prefix.as_bytes());
        out.extend_from_slice(line);
    }
    if out.last() != Some(&b'\n') {
        out.push(b'\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn run() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for name in [
            "attempt_0",
            "attempt_10",
            "attempt_2",
            "attempt_2.1",
            "other",
        ] {
            fs::create_dir_all(dir.path().join("j_0a1b2c3d").join(name).join("0")).unwrap();
        }
        fs::create_dir_all(dir.path().join("j_b_0a1b2c3d").join("attempt_0")).unwrap();
        dir
    }

    fn names(attempts: &[Attempt]) -> Vec<&str> {
        attempts.iter().map(|a| a.name.as_str()).collect()
    }

    #[test]
    fn a_run_is_found_by_its_own_or_its_parents_name() {
        let dir = run();
        let own = dir.path().join("j_0a1b2c3d");
        assert_eq!(run_folder(&own, "j"), Some(own.clone()));
        assert_eq!(run_folder(dir.path(), "j"), Some(own.clone()));
        assert_eq!(run_folder(dir.path(), "k"), None);
        assert_eq!(names(&attempts(&own).unwrap()), ["0", "2", "2.1", "10"]);
    }

    fn collect(tailer: &mut Tailer, prefixed: bool, last: bool) -> String {
        let mut all = Vec::new();
        tailer
            .pump(prefixed, last, &mut |bytes| {
                all.extend_from_slice(bytes);
                Ok(())
            })
            .unwrap();
        String::from_utf8(all).unwrap()
    }

    fn file(dir: &Path, content: &str) -> LogFile {
        let path = dir.join("stderr.log");
        fs::write(&path, content).unwrap();
        LogFile {
            local_rank: 3,
            stream: Source::Stderr,
            path,
        }
    }

    #[test]
    fn following_prints_whole_lines() {
        let dir = tempfile::tempdir().unwrap();
        let log = file(dir.path(), "one\ntw");
        let mut append = fs::OpenOptions::new().append(true).open(&log.path).unwrap();
        let mut tailer = Tailer::new(log, None);
        assert_eq!(collect(&mut tailer, true, false), "[3]!one\n");
        append.write_all(b"o\nthr").unwrap();
        assert_eq!(collect(&mut tailer, true, false), "[3]!two\n");
        assert_eq!(collect(&mut tailer, true, false), "");
        assert_eq!(collect(&mut tailer, true, true), "[3]!thr\n");
    }

    #[test]
    fn one_file_alone_is_passed_on_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let mut tailer = Tailer::new(file(dir.path(), "a\nprogress 10%"), Some(1));
        assert_eq!(collect(&mut tailer, false, false), "progress 10%");
    }

    #[test]
    fn the_last_lines() {
        let dir = tempfile::tempdir().unwrap();
        let check = |content: &str, lines: usize, expected: &str| {
            let mut all = Vec::new();
            let mut out = |bytes: &[u8]| {
                all.extend_from_slice(bytes);
                Ok(())
            };
            file(dir.path(), content)
                .print(Some(lines), &mut out)
                .unwrap();
            assert_eq!(String::from_utf8(all).unwrap(), expected);
        };
        check("a\nb\nc\n", 2, "b\nc\n");
        check("a\nb\nc", 2, "b\nc");
        check("a\nb\n", 9, "a\nb\n");
        check("a\nb\n", 0, "");
        check("", 3, "");
        check("\n\n\n", 1, "\n");
        let long = "x".repeat(3 * CHUNK);
        check(
            &format!("first\n{long}\nlast\n"),
            2,
            &format!("{long}\nlast\n"),
        );
    }
}
