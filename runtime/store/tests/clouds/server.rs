//! Real servers, as processes that end with the test.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub(crate) struct Running {
    child: Child,
    /// Its files, and its log.
    pub(crate) place: tempfile::TempDir,
    /// What it leaves elsewhere.
    pub(crate) litter: Vec<PathBuf>,
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        for path in &self.litter {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl Running {
    /// Starts a program whose path a variable names.
    pub(crate) fn start(variable: &str, command: impl FnOnce(&Path, &mut Command)) -> Self {
        let program = std::env::var_os(variable)
            .unwrap_or_else(|| panic!("{variable} is not set: tests/run installs it and sets it"));
        let place = tempfile::tempdir().unwrap();
        let log = std::fs::File::create(place.path().join("log")).unwrap();
        let mut program = Command::new(PathBuf::from(program));
        command(place.path(), &mut program);
        let child = program
            .current_dir(place.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        Self {
            child,
            place,
            litter: Vec::new(),
        }
    }

    /// Waits until it is of use, at most two minutes.
    pub(crate) fn until<T>(&mut self, mut ready: impl FnMut() -> Result<T, String>) -> T {
        let began = Instant::now();
        loop {
            let why = match ready() {
                Ok(value) => return value,
                Err(why) => why,
            };
            let ended = self.child.try_wait().unwrap();
            if ended.is_some() || began.elapsed() > Duration::from_secs(120) {
                let log = std::fs::read_to_string(self.place.path().join("log"));
                panic!(
                    "not ready: {why}; ended: {ended:?}; {}",
                    log.unwrap_or_default()
                );
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// Ports that were free a moment ago.
pub(crate) fn ports<const N: usize>() -> [u16; N] {
    let held: Vec<_> = (0..N)
        .map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    std::array::from_fn(|at| held[at].local_addr().unwrap().port())
}
