//! Common base of all test beds: bounded waits, the programs, free ports, questions to agents, the
//! processes of this machine. Each test binary that starts real processes takes it in as a module.

pub(crate) mod clock;
pub(crate) mod disk;
pub(crate) mod sources;

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use muster_protocol::codec::{self, Deframer};
use muster_protocol::local::{Answer, Query, ToAgent};
use serde_json::Value;

/// The bound of every wait that has no other. The usual time is well under a tenth of it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(45);
/// Between two looks.
pub(crate) const LOOK: Duration = Duration::from_millis(10);
/// The longest that an agent may take for an answer.
const ANSWER: Duration = Duration::from_secs(10);

/// Polls until there is something, and returns it.
pub(crate) fn eventually<T>(limit: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        std::thread::sleep(LOOK);
    }
}

/// A program of the workspace, beside the tests.
pub(crate) fn program(name: &str) -> String {
    let test = std::env::current_exe().unwrap();
    let path: PathBuf = test.parent().unwrap().parent().unwrap().join(name);
    assert!(
        path.is_file(),
        "{} is missing: run tests/run, or first cargo build --workspace --lib --bins",
        path.display()
    );
    path.to_str().unwrap().to_owned()
}

/// Takes from a command what this process was given for itself.
pub(crate) fn without_our_environment(command: &mut Command) {
    const OURS: [&str; 7] = [
        "MUSTER_", "PET_", "SLURM_", "NEXTEST", "CARGO", "GLOO_", "NCCL_",
    ];
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if OURS.iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(&name);
        }
    }
}

/// A port that nobody has, below those that the kernel gives to outgoing connections: an agent that
/// is away for a moment finds it free again. Tests that run at once under nextest take them out of
/// different ranges.
pub(crate) fn free_port() -> u16 {
    const SLOTS: u16 = 12;
    const OF_EACH: u16 = 1_000;
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let spread = u16::try_from(std::process::id() % u32::from(OF_EACH)).unwrap();
    let slot = std::env::var("NEXTEST_TEST_GLOBAL_SLOT").ok();
    let slot: u16 = slot.and_then(|slot| slot.parse().ok()).unwrap_or(0);
    let first = 20_000 + slot % SLOTS * OF_EACH;
    (0..OF_EACH)
        .map(|_| first + (spread + NEXT.fetch_add(1, Ordering::Relaxed) * 7) % OF_EACH)
        .find(|port| TcpListener::bind((Ipv4Addr::LOCALHOST, *port)).is_ok())
        .expect("a free port")
}

/// Asks an agent, as the command line does: its answer, or why it refuses; `None` when it does not
/// answer.
pub(crate) fn ask(socket: &Path, query: Query) -> Option<Result<Value, String>> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(ANSWER)).ok()?;
    let frame = codec::encode_frame(&ToAgent::Query(query)).unwrap();
    stream.write_all(&codec::with_length(&frame)).ok()?;
    let mut deframer = Deframer::default();
    let mut buffer = [0; 4096];
    let mut rows = Vec::new();
    loop {
        while let Some(frame) = deframer.next_frame().unwrap() {
            let text = match codec::decode_frame(frame).unwrap() {
                Answer::Json(text) => text,
                // A long list comes in parts.
                Answer::Part(text) => {
                    rows.extend(serde_json::from_str::<Vec<Value>>(&text).unwrap());
                    continue;
                }
                Answer::Error(text) => return Some(Err(text)),
            };
            return Some(Ok(match serde_json::from_str(&text).unwrap() {
                Value::Array(last) => {
                    rows.extend(last);
                    Value::Array(rows)
                }
                other => other,
            }));
        }
        let got = stream.read(&mut buffer).ok().filter(|n| *n > 0)?;
        deframer.push(&buffer[..got]);
    }
}

/// All processes of this machine.
pub(crate) fn pids() -> impl Iterator<Item = i32> {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    all.filter_map(|e| e.file_name().to_str()?.parse().ok())
}
