//! Ranks that are processes, and what they say: this test's own program, started again to run one function.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::Pid;

#[path = "../../src/testing/port.rs"]
pub(crate) mod port;

use self::port::HeldPort;

/// Longer than anything takes that goes well.
const BOUND: Duration = Duration::from_secs(60);

/// A port for ranks that are processes: nobody else is given it before this process ends.
pub(crate) fn free_port() -> u16 {
    Box::leak(Box::new(HeldPort::new())).port()
}

/// A process that says what it does in lines that begin with `@`. Killed when the test ends.
pub(crate) struct Rank {
    pub(crate) child: Child,
    lines: Receiver<String>,
}

impl Rank {
    /// Starts the test of this name, which does nothing without these variables.
    pub(crate) fn start(test: &str, variables: &[(&str, String)]) -> Rank {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (said, lines) = channel();
        std::thread::spawn(move || {
            for line in stdout.lines() {
                let line = line.unwrap_or_else(|error| format!("@unread: {error}"));
                // The harness may have written before it on the same line.
                if let Some(at) = line.find('@')
                    && (said.send(line[at..].to_owned()).is_err() || line.starts_with("@unread"))
                {
                    return;
                }
            }
        });
        Rank { child, lines }
    }

    /// The next line that the rank says.
    pub(crate) fn line(&self) -> String {
        match self.lines.recv_timeout(BOUND) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => panic!("nothing said within {BOUND:?}"),
            Err(RecvTimeoutError::Disconnected) => {
                let pid = Id::Pid(Pid::from_raw(self.child.id().cast_signed()));
                let how = waitid(pid, WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT);
                panic!("ended without a word: {how:?}")
            }
        }
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if self.child.kill().is_ok() {
            self.child.wait().unwrap();
        }
    }
}
