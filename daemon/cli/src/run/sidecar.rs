//! The sidecar `muster __reaper`: ends what a killed launcher leaves behind.
//!
//! It holds the read end of a pipe whose write end only the launcher has. When that ends, the
//! launcher is gone, however it went; the sidecar kills every process that carries the launcher's id
//! and exits. The workers themselves die by their parent-death signal; this is for their children.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use super::procs;

/// The hidden subcommand.
pub const WORD: &str = "__reaper";

/// The longest that it tries to kill: what is stuck in the kernel outlives any patience.
const PATIENCE: Duration = Duration::from_secs(30);

/// Runs the sidecar if the command line asks for it: `muster __reaper <launcher id>`.
pub fn main_if_asked(mut argv: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    if argv.nth(1)? != WORD {
        return None;
    }
    let id = argv.next()?.into_string().ok()?;
    Some(run(&id))
}

fn run(id: &str) -> ExitCode {
    let mut byte = [0; 16];
    let mut pipe = io::stdin().lock();
    loop {
        match pipe.read(&mut byte) {
            Ok(0) => break,
            Ok(_) => {}
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    let started = Instant::now();
    // Two clean scans in a row: one alone can miss a child that is forked while it runs.
    let mut clean = 0;
    while clean < 2 && started.elapsed() < PATIENCE {
        let left = procs::carriers(id);
        clean = if left.is_empty() { clean + 1 } else { 0 };
        left.into_iter().for_each(procs::kill);
        std::thread::sleep(Duration::from_millis(2));
    }
    ExitCode::SUCCESS
}

/// A running sidecar.
#[derive(Debug)]
pub struct Sidecar {
    child: Child,
    pipe: Option<ChildStdin>,
}

impl Sidecar {
    /// Starts one from the program at `muster`.
    pub fn start(muster: &Path, id: &str) -> io::Result<Sidecar> {
        let mut command = Command::new(muster);
        command
            .args([WORD, id])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .current_dir("/");
        // SAFETY: setsid and signal are async-signal-safe. A session of its own, and deaf to what a
        // terminal or a supervisor sends to all: it must outlive the launcher.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
                    libc::signal(signal, libc::SIG_IGN);
                }
                Ok(())
            });
        }
        let mut child = command.spawn()?;
        let pipe = child.stdin.take();
        Ok(Sidecar { child, pipe })
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Tells it that the launcher is done, and waits for it.
    pub fn end(mut self) {
        drop(self.pipe.take());
        let _ = self.child.wait();
    }
}

/// This program, also when its file was replaced meanwhile (an upgrade).
pub fn this_program() -> PathBuf {
    std::env::current_exe()
        .ok()
        .filter(|p| p.exists())
        .unwrap_or_else(|| PathBuf::from("/proc/self/exe"))
}
