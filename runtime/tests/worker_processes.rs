//! Demo workers as real processes under a stand-in launcher: stopped, killed, resumed.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test's helpers fail the test"
)]

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use memmap2::MmapRaw;
use muster_protocol::control::{FD_ENV, Gate, Reason, Stop, decode_step, fresh_page, word};
use muster_runtime::demo::{self, Event, EventLog, Line, Outcome, WorkerArgs};
use nix::sys::memfd::{MFdFlags, memfd_create};

#[path = "../src/testing/port.rs"]
mod port;

use self::port::HeldPort;

const ARGS_ENV: &str = "MUSTER_TEST_WORKER_ARGS";
const BOUND: Duration = Duration::from_secs(60);

/// Not a test of its own: what the other tests start as a worker process.
#[test]
fn worker_process() {
    if let Some(args) = std::env::var_os(ARGS_ENV) {
        let args = args.into_string().unwrap();
        let args = WorkerArgs::parse(args.split('\n').map(OsString::from)).unwrap();
        std::process::exit(i32::from(demo::worker(&args)));
    }
}

/// A worker with its control page, killed when the test ends early.
struct Worker {
    child: Child,
    page: MmapRaw,
    gate: Gate,
}

impl Worker {
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(word::ALL.contains(&at));
        // SAFETY: one of the page's words: aligned, inside the mapping, and only used as atomics.
        unsafe { AtomicU64::from_ptr(self.page.as_mut_ptr().add(at).cast()) }
    }

    fn load(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::SeqCst)
    }

    fn store(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::SeqCst);
    }

    fn wait(&mut self) -> Option<i32> {
        poll_until("a worker's end", || self.child.try_wait().unwrap()).code()
    }

    fn stderr(&mut self) -> String {
        std::io::read_to_string(self.child.stderr.take().unwrap()).unwrap()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.child.kill().is_ok() {
            self.child.wait().unwrap();
        }
    }
}

fn poll_until<T>(what: &str, mut get: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + BOUND;
    loop {
        if let Some(got) = get() {
            return got;
        }
        assert!(
            Instant::now() < until,
            "{what} did not come within {BOUND:?}"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn start(args: &WorkerArgs, generation: u64, world: u32) -> Vec<Worker> {
    let port = Box::leak(Box::new(HeldPort::new())).port();
    let args: Vec<String> = args
        .to_args()
        .into_iter()
        .map(|arg| arg.into_string().unwrap())
        .collect();
    (0..world)
        .map(|rank| {
            // Without close-on-exec: inherited.
            let mut file = File::from(memfd_create(c"control", MFdFlags::empty()).unwrap());
            file.write_all(&fresh_page()).unwrap();
            let child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "worker_process", "--nocapture"])
                .env(ARGS_ENV, args.join("\n"))
                .env(FD_ENV, file.as_raw_fd().to_string())
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", world.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", port.to_string())
                .env("TORCHELASTIC_RESTART_COUNT", "0")
                .env("MUSTER_GENERATION", generation.to_string())
                .env("MUSTER_GENERATION_DIGEST", format!("{generation:064x}"))
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let page = MmapRaw::map_raw(&file).unwrap();
            Worker {
                child,
                page,
                gate: Gate::default(),
            }
        })
        .collect()
}

fn wait_for_step(workers: &[Worker], step: u64) {
    poll_until("the step", || {
        let progress = |worker: &Worker| decode_step(worker.load(word::PROGRESS));
        workers
            .iter()
            .all(|worker| progress(worker) >= Some(step))
            .then_some(())
    });
}

fn lines(dir: &Path, rank: u32) -> Vec<Line> {
    let text = std::fs::read_to_string(dir.join(EventLog::file_name(rank))).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Trains to the end with a world of this size; what the last process said.
fn finish(args: &WorkerArgs, generation: u64, world: u32) -> (Option<u64>, Outcome) {
    let quick = WorkerArgs {
        pause: Duration::ZERO,
        ..args.clone()
    };
    for mut worker in start(&quick, generation, world) {
        let code = worker.wait();
        assert_eq!(code, Some(0), "{}", worker.stderr());
    }
    let lines = lines(&args.events, 0);
    let restored = lines.iter().rev().find_map(|line| match &line.event {
        Event::Start { restored_from, .. } => Some(*restored_from),
        _ => None,
    });
    match &lines.last().unwrap().event {
        Event::Done { outcome, .. } => (restored.unwrap(), outcome.clone()),
        other => panic!("{other:?}"),
    }
}

fn args(dir: &Path) -> WorkerArgs {
    WorkerArgs {
        steps: 150,
        // A run that is to be disturbed lasts long enough for that on a busy machine.
        pause: Duration::from_millis(10),
        save_every: 20,
        ..WorkerArgs::new(dir.join("checkpoints"), dir.join("events"))
    }
}

#[test]
fn all_ranks_stop_at_the_agreed_step_and_nothing_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let args = args(dir.path());
    let mut workers = start(&args, 1, 3);
    wait_for_step(&workers, 25);
    assert!(workers.iter().all(|worker| worker.load(word::LINKED) == 1));
    assert!(
        workers
            .iter()
            .all(|worker| worker.load(word::PID) == u64::from(worker.child.id()))
    );
    let grace = SystemTime::now() + Duration::from_secs(30);
    let deadline = grace.duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
    // Proposed for what is long past, and one rank after the other.
    let mut stop = 0;
    for worker in &mut workers {
        worker.store(word::DEADLINE, deadline);
        worker.store(word::REASON, Reason::Drain.encode());
        worker.store(word::STOP, Stop::Installed(20).encode());
        let progress = decode_step(worker.load(word::PROGRESS));
        stop = stop.max(worker.gate.install(progress, 20));
    }
    for worker in &workers {
        assert!(worker.gate.may_confirm(stop));
        worker.store(word::STOP, Stop::Confirmed(stop).encode());
    }
    for worker in &mut workers {
        let code = worker.wait();
        assert_eq!(code, Some(0), "{}", worker.stderr());
        assert_eq!(decode_step(worker.load(word::ACK)), Some(stop));
    }
    let said = lines(&args.events, 2);
    assert!(
        matches!(&said.last().unwrap().event, Event::Stop { step, reason } if *step == stop && reason == "drain"),
        "{said:?}"
    );
    let (restored, outcome) = finish(&args, 2, 2);
    assert_eq!(restored, Some(stop), "exactly where it stopped");
    assert_eq!(outcome, demo::undisturbed(args.seed, args.steps).unwrap());
}

#[test]
fn a_killed_rank_ends_the_others_and_the_rest_resumes() {
    for victim in [0, 2] {
        let dir = tempfile::tempdir().unwrap();
        let args = args(dir.path());
        let mut workers = start(&args, 1, 3);
        wait_for_step(&workers, 45);
        workers[victim].child.kill().unwrap();
        let killed = Instant::now();
        for (rank, worker) in workers.iter_mut().enumerate() {
            let code = worker.wait();
            let stderr = worker.stderr();
            if rank == victim {
                assert_eq!(code, None);
            } else {
                assert_eq!(code, Some(1), "{stderr}");
                assert!(
                    stderr.contains(&format!("rank {victim} is lost")),
                    "{stderr}"
                );
            }
        }
        assert!(
            killed.elapsed() < Duration::from_secs(15),
            "{:?}",
            killed.elapsed()
        );
        let (restored, outcome) = finish(&args, 2, 2);
        assert!(restored >= Some(40), "{restored:?}");
        assert_eq!(outcome, demo::undisturbed(args.seed, args.steps).unwrap());
    }
}

#[test]
fn a_stop_that_nobody_decides_saves_and_fails() {
    let dir = tempfile::tempdir().unwrap();
    let args = args(dir.path());
    let mut workers = start(&args, 1, 2);
    wait_for_step(&workers, 25);
    let deadline = SystemTime::now() + Duration::from_millis(300);
    let deadline = deadline.duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
    for worker in &workers {
        worker.store(word::DEADLINE, deadline);
        worker.store(word::STOP, Stop::Installed(0).encode());
    }
    for worker in &mut workers {
        assert_eq!(worker.wait(), Some(1));
        assert_eq!(
            decode_step(worker.load(word::ACK)),
            None,
            "nothing was agreed"
        );
    }
    let (restored, outcome) = finish(&args, 2, 1);
    assert!(restored >= Some(20), "{restored:?}");
    assert_eq!(outcome, demo::undisturbed(args.seed, args.steps).unwrap());
}

#[test]
fn a_wrong_environment_is_code_two() {
    let dir = tempfile::tempdir().unwrap();
    let run = |name: &str, value: &str| {
        let args: Vec<String> = args(dir.path())
            .to_args()
            .into_iter()
            .map(|arg| arg.into_string().unwrap())
            .collect();
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "worker_process", "--nocapture"])
            .env(ARGS_ENV, args.join("\n"))
            .env(name, value)
            .output()
            .unwrap();
        (
            output.status.code(),
            String::from_utf8(output.stderr).unwrap(),
        )
    };
    for (name, value) in [
        ("RANK", "x"),
        (FD_ENV, "x"),
        (FD_ENV, "999999"),
        (FD_ENV, "0"),
    ] {
        let (code, stderr) = run(name, value);
        assert_eq!(code, Some(2), "{name}={value}: {stderr}");
        assert!(stderr.contains(name), "{stderr}");
    }
}
