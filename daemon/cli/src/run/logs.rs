//! Where a worker's output and error file go, and what is read back from them for the report.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use muster_protocol::LauncherId;
use muster_protocol::local::MAX_TAIL;
use serde_json::Value;

use super::output::tail_text;

/// The most of an error file that is read, in bytes.
const MAX_ERROR_FILE: u64 = 1 << 20;

/// The folder of one run. As with torchrun, several runs and nodes can be given the same `--log-dir`:
/// each makes a folder of its own in it, named after the job and the launcher.
#[derive(Debug)]
pub struct LogRoot {
    dir: PathBuf,
    temporary: bool,
}

impl LogRoot {
    pub fn create(base: Option<&Path>, job: &str, launcher: LauncherId) -> io::Result<LogRoot> {
        let temporary = base.is_none();
        let base = base.map_or_else(std::env::temp_dir, Path::to_owned);
        let prefix = if temporary { "muster_" } else { "" };
        let dir = base.join(format!("{prefix}{job}_{launcher}"));
        let mut builder = fs::DirBuilder::new();
        if temporary {
            // Nobody else's business, and nobody else's to have made beforehand.
            builder.mode(0o700);
        } else {
            fs::create_dir_all(&base)?;
        }
        builder.create(&dir)?;
        // Workers may change their working directory: the path in their environment is absolute.
        let dir = dir.canonicalize()?;
        Ok(LogRoot { dir, temporary })
    }

    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// `attempt_<n>`, n being the restart count; a generation that was started again at the same
    /// count (a join, a second START) gets the suffix `.1`, `.2` and so on.
    pub fn attempt(&self, restart_count: u32) -> io::Result<PathBuf> {
        let mut last = io::Error::from(io::ErrorKind::AlreadyExists);
        for again in 0..100_000u32 {
            let name = match again {
                0 => format!("attempt_{restart_count}"),
                n => format!("attempt_{restart_count}.{n}"),
            };
            let dir = self.dir.join(name);
            match fs::create_dir(&dir) {
                Ok(()) => return Ok(dir),
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => last = e,
                Err(e) => return Err(e),
            }
        }
        Err(last)
    }

    /// Removes a temporary folder after a success, or when no worker left a file in it. One that the
    /// user named is kept.
    pub fn clean(&self, success: bool) {
        if self.temporary && (success || !has_files(&self.dir)) {
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

/// Whether any file lies under a folder, three levels deep at most: run, attempt, local rank.
pub fn has_files(dir: &Path) -> bool {
    fn look(dir: &Path, depth: u32) -> bool {
        let Ok(entries) = fs::read_dir(dir) else {
            return false;
        };
        entries.flatten().any(|entry| {
            let path = entry.path();
            !path.is_dir() || (depth > 0 && look(&path, depth - 1))
        })
    }
    look(dir, 2)
}

/// Opens a log for appending, so that a worker and its children never overwrite each other.
pub fn open_log(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

/// The last lines of a log file.
pub fn file_tail(path: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let len = file.metadata()?.len();
        file.seek(SeekFrom::Start(len.saturating_sub(2 * MAX_TAIL as u64)))?;
        let mut bytes = Vec::new();
        file.take(2 * MAX_TAIL as u64).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    read().map_or_else(|_| String::new(), |bytes| tail_text(&bytes))
}

/// A worker's report of its own end (torch/distributed/elastic/multiprocessing/errors/
/// error_handler.py).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerError {
    pub text: String,
    /// When, in Unix seconds; a fraction is not written by PyTorch.
    pub seconds: Option<u64>,
}

/// Reads an error file; `None` when there is none or it holds no message.
pub fn read_error_file(path: &Path) -> Option<WorkerError> {
    let mut bytes = Vec::new();
    let file = File::open(path).ok()?;
    file.take(MAX_ERROR_FILE).read_to_end(&mut bytes).ok()?;
    let root: Value = serde_json::from_slice(&bytes).ok()?;
    let message = root.get("message")?;
    if let Some(text) = message.as_str() {
        return Some(WorkerError {
            text: tail_text(text.as_bytes()),
            seconds: None,
        });
    }
    let field = |name: &str| message.pointer(name).and_then(Value::as_str);
    let text = field("/message").unwrap_or_default();
    let stack = field("/extraInfo/py_callstack").unwrap_or_default();
    // The call stack usually ends with the message.
    let whole = match (stack.is_empty(), stack.contains(text)) {
        (true, _) => text.to_owned(),
        (false, true) => stack.to_owned(),
        (false, false) => format!("{stack}\n{text}"),
    };
    let stamp = message.pointer("/extraInfo/timestamp");
    let seconds = stamp.and_then(|v| match v {
        Value::String(s) => s.trim().parse().ok(),
        other => other.as_u64(),
    });
    if whole.trim().is_empty() && seconds.is_none() {
        return None;
    }
    Some(WorkerError {
        text: tail_text(whole.as_bytes()),
        seconds,
    })
}

/// When a worker failed, in Unix milliseconds. Its error file knows the second only: within that
/// second the moment at which it was reaped is the better estimate, or the first failure would look
/// later than one that follows from it.
pub fn failed_at(error: Option<&WorkerError>, reaped_ms: u64) -> u64 {
    match error.and_then(|e| e.seconds) {
        Some(s) => reaped_ms.min(s.saturating_mul(1000).saturating_add(999)),
        None => reaped_ms,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_file_of_pytorch() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("error.json");
        let check = |content: &str| {
            fs::write(&path, content).unwrap();
            read_error_file(&path)
        };
        let full = check(
            r#"{"message":{"message":"ValueError: boom","extraInfo":{"py_callstack":"Traceback\nValueError: boom\n","timestamp":"17"}}}"#,
        );
        assert_eq!(
            full,
            Some(WorkerError {
                text: "Traceback\nValueError: boom".into(),
                seconds: Some(17)
            })
        );
        assert_eq!(check(r#"{"message":"x"}"#).unwrap().text, "x");
        for broken in ["", "{", "[]", "{}", r#"{"message":3}"#, r#"{"message":{}}"#] {
            assert_eq!(check(broken), None, "{broken}");
        }
        assert_eq!(failed_at(full.as_ref(), 17_400), 17_400);
        assert_eq!(failed_at(full.as_ref(), 19_000), 17_999);
        assert_eq!(failed_at(None, 19_000), 19_000);
    }

    #[test]
    fn attempts_never_share_a_folder() {
        let base = tempfile::tempdir().unwrap();
        let root = LogRoot::create(Some(base.path()), "j", LauncherId([1; 8])).unwrap();
        let names: Vec<_> = [0, 0, 1]
            .map(|n| root.attempt(n).unwrap().file_name().unwrap().to_owned())
            .to_vec();
        assert_eq!(names, ["attempt_0", "attempt_0.1", "attempt_1"]);
        root.clean(true);
        assert!(root.path().exists());
    }
}
