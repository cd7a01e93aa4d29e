//! A launcher whose console takes nothing, and one that is stopped: its workers end all the same.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use muster_protocol::Digest;
use muster_protocol::local::ToAgent;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::fake::{Agent, Launcher, left_of, nothing_left, pid, until};

/// Waits until a pipe takes no more. How many bytes that are depends on how its writers cut them: a piece that does not
/// fit what is left of a page begins another.
fn full(pipe: &OwnedFd) {
    let end = format!("/proc/self/fd/{}", pipe.as_raw_fd());
    let end = File::options().write(true).open(end).unwrap();
    let takes = || {
        let mut asked = [PollFd::new(end.as_fd(), PollFlags::POLLOUT)];
        poll(&mut asked, PollTimeout::ZERO).unwrap() > 0
    };
    until("the pipe is full", || !takes());
}

/// Ends it should the test fail.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        if self.0.kill().is_ok() {
            self.0.wait().unwrap();
        }
    }
}

#[test]
fn a_console_that_takes_nothing_holds_up_no_stop_and_no_end() {
    let mut agent = Agent::new();
    let script = "yes fill >&2 & echo $$ > up; wait";
    let args = ["--", "sh", "-c", script];
    let (mut launcher, pipe) = Launcher::start_blocked(&agent, &args);
    agent.accept();
    let digest = agent.run(1);
    until("the worker is up", || agent.path("up").exists());
    full(&pipe);
    // With a line to say first.
    agent.stop(digest, 500);
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    let digest = agent.run(2);
    agent.stop(digest, 500);
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    agent.end(3, "the job failed");
    assert_eq!(launcher.wait().code(), Some(3));
    nothing_left(agent.me());
    // Whoever reads now finds what was written before.
    drop(launcher);
    let text = std::io::read_to_string(File::from(pipe)).unwrap();
    assert!(text.contains("fill\nfill\n"));
}

#[test]
fn a_single_node_whose_console_takes_nothing_is_stopped_by_a_signal() {
    let dir = tempfile::tempdir().unwrap();
    let (pipe, write) = nix::unistd::pipe().unwrap();
    let script = "echo $$ > up; exec yes fill >&2";
    let child = Command::new(env!("CARGO_BIN_EXE_muster"))
        .args([
            "run",
            "--standalone",
            "--stop-grace",
            "500ms",
            "--no-python",
        ])
        .args(["--", "sh", "-c", script])
        // The agent inside says everything that it does, too.
        .env("MUSTER_LOG", "trace")
        .env("TMPDIR", dir.path())
        .env("XDG_RUNTIME_DIR", dir.path())
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(write.try_clone().unwrap())
        .stderr(write)
        .spawn()
        .unwrap();
    let mut child = Ended(child);
    until("the worker is up", || dir.path().join("up").exists());
    full(&pipe);
    // SAFETY: our own child, not reaped yet.
    unsafe { libc::kill(child.0.id() as i32, libc::SIGTERM) };
    let mut code = None;
    until("the launcher exits", || {
        code = child.0.try_wait().unwrap();
        code.is_some()
    });
    assert_eq!(code.unwrap().code(), Some(143));
    let worker = pid(&dir.path().join("up"));
    // SAFETY: signal 0 only asks.
    until(
        "the worker is gone",
        || unsafe { libc::kill(worker, 0) } != 0,
    );
}

#[test]
fn output_that_a_stuck_console_did_not_take_is_counted_where_stderr_goes() {
    let dir = tempfile::tempdir().unwrap();
    let (pipe, write) = nix::unistd::pipe().unwrap();
    let (err, logs) = (dir.path().join("err"), dir.path().join("logs"));
    const WRITTEN: usize = 3 << 20;
    let script = format!("head -c {WRITTEN} /dev/zero | tr '\\0' x");
    let mut child = Command::new(env!("CARGO_BIN_EXE_muster"))
        .args(["run", "--standalone", "--tee", "3", "--log-dir"])
        .arg(&logs)
        .args(["--no-python", "--", "sh", "-c", &script])
        .env("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "")
        .env("TMPDIR", dir.path())
        .env("XDG_RUNTIME_DIR", dir.path())
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .stdout(write)
        .stderr(File::create(&err).unwrap())
        .spawn()
        .unwrap();
    assert!(child.wait().unwrap().success());
    drop(child);
    let taken = std::io::read_to_string(File::from(pipe)).unwrap();
    let said = std::fs::read_to_string(&err).unwrap();
    let counted = said.lines().find_map(|line| {
        let count = line
            .strip_prefix("muster: ")?
            .split_once(" bytes of output")?;
        count.0.parse::<usize>().ok()
    });
    let counted = counted.unwrap_or_else(|| panic!("nothing is counted: {said}"));
    let shown = taken.matches('x').count();
    assert!(shown < WRITTEN);
    // Lines get a prefix and an end besides.
    assert!(counted + shown >= WRITTEN, "{counted} + {shown}");
    let files = std::fs::read_dir(&logs).unwrap().next().unwrap().unwrap();
    let file = files.path().join("attempt_0/0/stdout.log");
    assert_eq!(std::fs::metadata(file).unwrap().len(), WRITTEN as u64);
}

/// The workers of a launcher: what carries its id, without the sidecar.
fn workers(agent: &Agent) -> Vec<String> {
    let mut left = left_of(agent.me());
    left.retain(|line| !line.contains("__reaper"));
    left
}

/// A launcher with a worker and what that has started.
fn two(agent: &mut Agent, lease_ms: u32) -> (Launcher, Digest) {
    agent.lease_ms = lease_ms;
    let script = "setsid sleep 1000 & echo $$ > up; exec sleep 1000";
    let launcher = Launcher::start(agent, &["--", "sh", "-c", script]);
    agent.accept();
    let digest = agent.run(1);
    until("the worker is up", || {
        agent.path("up").exists() && workers(agent).len() == 2
    });
    (launcher, digest)
}

/// A launcher that was stopped until its workers were ended goes on, on a new link: what it was told meanwhile is old.
fn goes_on(agent: &mut Agent, launcher: &Launcher, digest: Digest) {
    launcher.signal(libc::SIGCONT);
    agent.accept();
    let started = ToAgent::Started { digest, attempt: 1 };
    assert_eq!(
        [agent.fact(), agent.fact()],
        [started, ToAgent::Stopped { digest }]
    );
}

#[test]
fn the_word_of_a_launcher_counts_for_a_part_of_the_lease_only() {
    let mut agent = Agent::new();
    // All of it is longer than anything here waits.
    let (mut launcher, digest) = two(&mut agent, 24_000);
    launcher.signal(libc::SIGSTOP);
    // It was told to stop, and has not read it.
    agent.stop(digest, 0);
    until("its workers are gone", || workers(&agent).is_empty());
    goes_on(&mut agent, &launcher, digest);
    agent.end(0, "");
    assert_eq!(launcher.wait().code(), Some(0));
    nothing_left(agent.me());
}

#[test]
fn a_worker_that_is_killed_while_its_launcher_is_stopped_has_failed() {
    let mut agent = Agent::new();
    let (mut launcher, digest) = two(&mut agent, 1_000);
    let worker = pid(&agent.path("up"));
    launcher.signal(libc::SIGSTOP);
    agent.grants(600_000);
    // SAFETY: a worker of the launcher, which reaps nobody now.
    unsafe { libc::kill(worker, libc::SIGKILL) };
    // So that it was stopped for longer than a lease.
    std::thread::sleep(Duration::from_millis(1_500));
    launcher.signal(libc::SIGCONT);
    agent.accept();
    let started = ToAgent::Started { digest, attempt: 1 };
    assert_eq!(agent.fact(), started);
    let failed = agent.fact();
    assert!(
        matches!(&failed, ToAgent::Exited { digest: of, exit, .. } if *of == digest && exit.signal == Some(9)),
        "{failed:?}"
    );
    agent.end(1, "");
    assert_eq!(launcher.wait().code(), Some(1));
    assert!(!launcher.err().contains("stopped or blocked"));
    nothing_left(agent.me());
}

#[test]
fn the_workers_of_a_launcher_that_is_stopped_end_when_nobody_answers_for_them() {
    let mut agent = Agent::new();
    let (mut launcher, digest) = two(&mut agent, 1_000);
    launcher.signal(libc::SIGSTOP);
    // Zombies do not count: they wait for their parent.
    until("its workers are gone", || workers(&agent).is_empty());
    goes_on(&mut agent, &launcher, digest);
    until("it says why", || {
        launcher.err().contains("stopped or blocked")
    });
    // It goes on as before.
    agent.run(2);
    until("the worker is up", || !workers(&agent).is_empty());
    agent.end(0, "");
    assert_eq!(launcher.wait().code(), Some(0));
    nothing_left(agent.me());
}

#[test]
fn the_workers_of_a_launcher_that_is_stopped_go_on_while_its_agent_answers_for_them() {
    let mut agent = Agent::new();
    let (mut launcher, digest) = two(&mut agent, 3_000);
    launcher.signal(libc::SIGSTOP);
    // Old when it goes on: an agent says again what holds.
    agent.stop(digest, 0);
    let stopped = Instant::now();
    while stopped.elapsed() < Duration::from_secs(6) {
        // As long as a slow machine may take to ask again.
        agent.grants(3_000);
        assert_eq!(workers(&agent).len(), 2);
    }
    launcher.signal(libc::SIGCONT);
    agent.accept();
    // Nothing has happened to them.
    assert_eq!(agent.fact(), ToAgent::Started { digest, attempt: 1 });
    assert_eq!(workers(&agent).len(), 2);
    agent.stop(digest, 300);
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    // They were stopped by this order, and not before; and nothing is said of an agent, which was well.
    assert!(!launcher.err().contains("stopped or blocked"));
    assert!(!launcher.err().contains("the agent is"));
    let digest = agent.run(2);
    until("the worker is up", || workers(&agent).len() == 2);
    launcher.signal(libc::SIGSTOP);
    agent.grants(100);
    agent.grants(0);
    until("its workers are gone", || workers(&agent).is_empty());
    goes_on(&mut agent, &launcher, digest);
    agent.end(0, "");
    assert_eq!(launcher.wait().code(), Some(0));
    nothing_left(agent.me());
}
