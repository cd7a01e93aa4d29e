//! How workers and launchers end, and that nothing stays behind.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use muster_protocol::control::Reason;
use muster_protocol::local::{ToAgent, ToLauncher, WorkerExit};
use muster_protocol::{Digest, LauncherId};

use crate::fake::{Agent, Launcher, left_of, nothing_left, read, until, zombies_of};

fn failing(script: &str) -> (WorkerExit, Agent, Launcher) {
    let mut agent = Agent::new();
    let launcher = Launcher::start(&agent, &["--", "sh", "-c", script]);
    agent.accept();
    let digest = agent.run(1);
    let ToAgent::Exited { digest: of, exit } = agent.fact() else {
        panic!("an exit")
    };
    assert_eq!(of, digest);
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    (exit, agent, launcher)
}

#[test]
fn exit_codes_signals_and_last_words() {
    let (exit, mut agent, mut launcher) = failing("echo first >&2; echo boom >&2; exit 3");
    assert_eq!((exit.code, exit.signal, exit.rank), (3, None, 0));
    assert_eq!(exit.tail, "first\nboom");
    agent.end(3, "the job failed");
    assert_eq!(launcher.wait().code(), Some(3));
    let err = launcher.err();
    assert!(
        err.contains("the job failed\nfirst failure on this node: rank 0"),
        "{err}"
    );
    assert!(
        err.contains("exit code 3\n    first\n    boom")
            && err.contains("has no log files; --log-dir"),
        "{err}"
    );

    let (exit, ..) = failing("kill -SEGV $$");
    assert_eq!((exit.code, exit.signal), (139, Some(11)));
    let (exit, ..) = failing("kill -KILL $$");
    assert_eq!((exit.code, exit.signal), (137, Some(9)));
    let (exit, ..) = failing(
        r#"echo '{"message":{"message":"ValueError: x","extraInfo":{"py_callstack":"stack","timestamp":"1000"}}}' > $TORCHELASTIC_ERROR_FILE; echo noise >&2; exit 1"#,
    );
    assert_eq!(
        (exit.tail.as_str(), exit.at_ms),
        ("stack\nValueError: x", 1_000_999)
    );
}

#[test]
fn a_worker_that_ignores_sigterm_is_killed() {
    let mut agent = Agent::new();
    let script = "trap '' TERM; echo up > up; while :; do sleep 1; done";
    let _launcher = Launcher::start(&agent, &["--", "sh", "-c", script]);
    agent.accept();
    let digest = agent.run(1);
    until("the worker is up", || agent.path("up").exists());
    let began = Instant::now();
    agent.stop(digest, 300);
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    assert!(began.elapsed() >= Duration::from_millis(300));
    assert_eq!(
        left_of(agent.me()).len(),
        1,
        "only the sidecar: {:?}",
        left_of(agent.me())
    );
}

#[test]
fn a_worker_behind_a_shell_gets_its_grace() {
    let mut agent = Agent::new();
    // The shell dies of SIGTERM at once; its child takes a while to save.
    let inner = "trap 'sleep 0.3; echo saved > saved; exit 0' TERM; echo up > up; while :; do sleep 0.01; done";
    let _launcher = Launcher::start(
        &agent,
        &["--", "sh", "-c", &format!("sh -c \"{inner}\"; true")],
    );
    agent.accept();
    let digest = agent.run(1);
    until("the worker is up", || agent.path("up").exists());
    agent.stop(digest, 15_000);
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    assert_eq!(read(&agent.path("saved")), "saved\n");
}

/// A child in a session of its own, one that was forked twice, and one that cleared its environment.
const ESCAPES: &str = "
import os, subprocess, time
subprocess.Popen(['sleep', '1000'], start_new_session=True)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp('sleep', ['sleep', '1001'])
    os._exit(0)
subprocess.Popen(['sleep', '1002'], start_new_session=True, env=ENV)
open('up' + os.environ['RANK'], 'w').close()
time.sleep(TIME)
";

#[test]
fn children_that_outlive_a_worker_are_ended_and_reaped() {
    for time in ["0", "1000"] {
        let mut agent = Agent::new();
        let script = ESCAPES.replace("ENV", "{}").replace("TIME", time);
        let launcher = Launcher::start(&agent, &["--", "python3", "-c", &script]);
        agent.accept();
        let digest = agent.run(1);
        until("the worker is up", || agent.path("up0").exists());
        if time == "1000" {
            until(
                "the sidecar, the worker and two children carry the id",
                || left_of(agent.me()).len() >= 4,
            );
            agent.stop(digest, 500);
            assert_eq!(agent.fact(), ToAgent::Stopped { digest });
        } else {
            assert_eq!(agent.fact(), ToAgent::Finished { digest });
        }
        assert_eq!(left_of(agent.me()).len(), 1, "{:?}", left_of(agent.me()));
        assert!(zombies_of(launcher.pid()).is_empty());
        let sleeping = |seconds: &str| {
            std::fs::read_dir("/proc").unwrap().flatten().any(|e| {
                let cmdline = read(&e.path().join("cmdline"));
                let cwd = std::fs::read_link(e.path().join("cwd")).unwrap_or_default();
                cmdline == format!("sleep\0{seconds}\0") && cwd == agent.dir.path()
            })
        };
        assert!(!sleeping("1000") && !sleeping("1001") && !sleeping("1002"));
    }
}

#[test]
fn a_killed_launcher_leaves_nothing() {
    let mut agent = Agent::new();
    let script = ESCAPES.replace("ENV", "None").replace("TIME", "1000");
    let mut launcher = Launcher::start(
        &agent,
        &["--nproc-per-node=2", "--", "python3", "-c", &script],
    );
    agent.accept();
    agent.run(1);
    // Not by counting alone: the interpreter may be found by a chain of shell scripts.
    until("both workers have their children", || {
        agent.path("up0").exists() && agent.path("up1").exists()
    });
    // A grandchild that forks twice may be between two processes still.
    until("all of them are up", || left_of(agent.me()).len() >= 9);
    launcher.signal(libc::SIGKILL);
    launcher.wait();
    nothing_left(agent.me());
}

#[test]
fn a_killed_sidecar_is_replaced() {
    let mut agent = Agent::new();
    let script = "setsid sleep 1000 & sleep 1000";
    let mut launcher = Launcher::start(&agent, &["--", "sh", "-c", script]);
    agent.accept();
    agent.run(1);
    until("the escaped child is up", || left_of(agent.me()).len() >= 4);
    let sidecar = || {
        let all = left_of(agent.me());
        let line = all.iter().find(|l| l.contains("__reaper"))?;
        line.strip_prefix("/proc/")?
            .split(' ')
            .next()?
            .parse::<i32>()
            .ok()
    };
    let first = sidecar().unwrap();
    // SAFETY: the sidecar of the launcher that this test started.
    unsafe { libc::kill(first, libc::SIGKILL) };
    until("there is another", || {
        sidecar().is_some_and(|pid| pid != first)
    });
    launcher.signal(libc::SIGKILL);
    launcher.wait();
    nothing_left(agent.me());
}

#[test]
fn a_stop_overtakes_a_start_that_waits_for_its_master() {
    let mut agent = Agent::new();
    let _launcher = Launcher::start(&agent, &["--", "sh", "-c", "echo x > ran; sleep 100"]);
    agent.accept();
    // Takes connections and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut start = agent.start(1);
    start.master_launcher = LauncherId([9; 8]);
    start.master_guard = silent.local_addr().unwrap();
    let digest = start.digest;
    agent.send(ToLauncher::Start(start.clone()));
    agent.stop(digest, 1000);
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    // It comes again, late: it stays stopped.
    agent.send(ToLauncher::Start(start));
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    // Nor does a later attempt begin it again.
    let mut later = agent.start(1);
    later.attempt = 2;
    agent.send(ToLauncher::Start(later));
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    assert!(!agent.path("ran").exists());
}

#[test]
fn a_master_that_is_another_launcher_is_refused() {
    let mut agent = Agent::new();
    let _launcher = Launcher::start(&agent, &["--", "sleep", "100"]);
    agent.accept();
    let mut start = agent.start(1);
    start.master_launcher = LauncherId([9; 8]);
    agent.send(ToLauncher::Start(start));
    let ToAgent::StartFailed { reason, .. } = agent.fact() else {
        panic!("it must not start")
    };
    assert!(reason.contains("expected 09090909"), "{reason}");
}

#[test]
fn the_next_generation_waits_for_the_last_to_end() {
    let mut agent = Agent::new();
    let script = "echo start$MUSTER_GENERATION >> log; trap 'sleep 0.3; echo end$MUSTER_GENERATION >> log; exit 0' TERM; while :; do sleep 0.01; done";
    let _launcher = Launcher::start(&agent, &["--", "sh", "-c", script]);
    agent.accept();
    let one = agent.run(1);
    until("the first runs", || read(&agent.path("log")) == "start1\n");
    agent.stop(one, 15_000);
    let next = agent.start(2);
    let two = next.digest;
    agent.send(ToLauncher::Start(next));
    // The stop of the first is told when its workers are gone, before the second has started.
    assert_eq!(agent.fact(), ToAgent::Stopped { digest: one });
    assert_eq!(
        agent.fact(),
        ToAgent::Started {
            digest: two,
            attempt: 1
        }
    );
    until("the second runs", || {
        read(&agent.path("log")) == "start1\nend1\nstart2\n"
    });
    // An older generation's frames do not touch it.
    agent.stop(one, 0);
    assert_eq!(agent.fact(), ToAgent::Stopped { digest: one });
    let digest = Digest([77; 32]);
    agent.stop(digest, 0);
    let stale = agent.start(1);
    agent.send(ToLauncher::Start(stale));
    assert_eq!(agent.fact(), ToAgent::Stopped { digest: one });
    agent.stop(two, 15_000);
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    assert_eq!(agent.fact(), ToAgent::Stopped { digest: two });
    assert_eq!(read(&agent.path("log")), "start1\nend1\nstart2\nend2\n");
}

#[test]
fn every_worker_gets_the_agreed_signal() {
    let mut agent = Agent::new();
    let script = "trap 'echo saved > saved$RANK; exit 9' USR1; echo up > up$RANK; while :; do sleep 0.01; done";
    let _launcher = Launcher::start(&agent, &["--nproc-per-node=2", "--", "sh", "-c", script]);
    agent.accept();
    let digest = agent.run(1);
    until("both are up", || {
        agent.path("up0").exists() && agent.path("up1").exists()
    });
    agent.send(ToLauncher::Preempt {
        digest,
        signal: libc::SIGUSR1,
        grace_ms: 15_000,
        why: "drain".into(),
    });
    // Whatever their exit code: it is part of the stop.
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    assert!(agent.path("saved0").exists() && agent.path("saved1").exists());
}

#[test]
fn workers_go_on_while_the_agent_is_away() {
    let mut agent = Agent::new();
    let script = "until [ -e go ]; do sleep 0.01; done; echo done > done; exit 4";
    let _launcher = Launcher::start(&agent, &["--", "sh", "-c", script]);
    agent.accept();
    let digest = agent.run(1);
    let me = agent.me();
    agent.hang_up();
    agent.accept();
    assert_eq!(
        (agent.me(), agent.register.as_ref().unwrap().running),
        (me, Some(digest))
    );
    assert_eq!(agent.fact(), ToAgent::Started { digest, attempt: 1 });
    // It ends while nobody listens: told when the agent is back.
    agent.hang_up();
    std::fs::write(agent.path("go"), "").unwrap();
    until("the worker is done", || agent.path("done").exists());
    agent.accept();
    let mut facts = vec![agent.fact(), agent.fact(), agent.fact()];
    facts.dedup();
    assert!(
        matches!(&facts[1], ToAgent::Exited { exit, .. } if exit.code == 4),
        "{facts:?}"
    );
    assert_eq!(facts[2], ToAgent::Stopped { digest });
}

#[test]
fn control_c_asks_once_and_kills_twice() {
    let mut agent = Agent::new();
    let script = "trap '' TERM INT; echo up > up; while :; do sleep 1; done";
    let mut launcher = Launcher::start(&agent, &["--", "sh", "-c", script]);
    agent.accept();
    agent.run(1);
    until("the worker is up", || agent.path("up").exists());
    launcher.signal(libc::SIGINT);
    assert_eq!(agent.fact(), ToAgent::Cancel);
    until("it says so", || {
        launcher
            .err()
            .contains("muster: stopping; Ctrl-C again kills")
    });
    launcher.signal(libc::SIGINT);
    assert_eq!(launcher.wait().code(), Some(130));
    assert_eq!(left_of(agent.me()), Vec::<String>::new());
}

#[test]
fn sigterm_makes_the_node_leave() {
    let mut agent = Agent::new();
    let mut launcher = Launcher::start(&agent, &["--stop-grace", "7s", "--", "sleep", "100"]);
    agent.accept();
    let digest = agent.run(1);
    launcher.signal(libc::SIGTERM);
    assert_eq!(agent.fact(), ToAgent::Leave { grace_ms: 7_000 });
    agent.send(ToLauncher::Preempt {
        digest,
        signal: 15,
        grace_ms: 7_000,
        why: "node leaves".into(),
    });
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    agent.end(0, "this node left the job");
    assert_eq!(launcher.wait().code(), Some(0));
    nothing_left(agent.me());
}

#[test]
fn under_nohup_it_outlives_its_terminal() {
    let mut agent = Agent::new();
    let before = ["nohup", env!("CARGO_BIN_EXE_muster")];
    let launcher = Launcher::spawn(&agent, &before, &["--", "sleep", "100"], &[]);
    agent.accept();
    agent.run(1);
    launcher.signal(libc::SIGHUP);
    launcher.signal(libc::SIGTERM);
    assert!(matches!(agent.fact(), ToAgent::Leave { .. }));
    until("it says which signal it heard", || {
        launcher.err().contains("received SIGTERM: leaving the job")
    });
}

#[test]
fn without_an_agent_it_can_be_cancelled() {
    let agent = Agent::new();
    let path = agent.path("nowhere");
    let mut launcher = Launcher::start(&agent, &["--socket", path.to_str().unwrap(), "x.py"]);
    until("it says what it waits for", || {
        launcher.err().contains("no agent answers")
    });
    launcher.signal(libc::SIGINT);
    assert_eq!(launcher.wait().code(), Some(130));
}

#[test]
fn waiting_is_said_once_per_change_and_a_refusal_ends_it() {
    let mut agent = Agent::new();
    let mut launcher = Launcher::start(&agent, &["x.py"]);
    agent.accept();
    for text in ["1 of 2 nodes", "1 of 2 nodes", "2 of 3 nodes"] {
        agent.send(ToLauncher::Waiting { text: text.into() });
    }
    agent.send(ToLauncher::Refused {
        reason: "the job runs here already".into(),
    });
    assert_eq!(launcher.wait().code(), Some(1));
    let err = launcher.err();
    assert_eq!(err.matches("muster: 1 of 2 nodes").count(), 1, "{err}");
    assert_eq!(err.matches("muster: 2 of 3 nodes").count(), 1, "{err}");
    assert!(err.contains("the job runs here already"), "{err}");
}

/// A script without the runtime, through two generations; and with the watch turned off.
#[test]
fn that_nothing_watches_for_hangs_is_said_once() {
    for (factor, times) in [("--hang-factor=20", 1), ("--hang-factor=0", 0)] {
        let mut agent = Agent::new();
        let flags = ["--hang-min=200ms", factor, "--", "sleep", "1.5"];
        let mut launcher = Launcher::start(&agent, &flags);
        agent.accept();
        let digest = agent.run(1);
        assert_eq!(agent.fact(), ToAgent::Finished { digest });
        agent.run(2);
        agent.fact();
        agent.end(0, "all ranks finished");
        launcher.wait();
        let err = launcher.err();
        assert_eq!(err.matches("for hangs").count(), times, "{err}");
    }
}

/// A worker that obeys its control page (the layout is that of muster_protocol::control).
const OBEYS: &str = "
import mmap, os, struct, time
page = mmap.mmap(int(os.environ['MUSTER_CONTROL_FD']), 4096)
load = lambda at: struct.unpack_from('<Q', page, at)[0]
def store(at, value): struct.pack_into('<Q', page, at, value)
assert page[:8] == b'MUSTERCP' and load(8) == 1
store(272, 1)
step, slow = 0, 0.01 if os.environ['RANK'] == '0' else 0.002
while True:
    store(256, step + 1)
    stop = load(128)
    if stop & 3 == 1 and step >= stop >> 2:
        time.sleep(0.001)
        continue
    if stop & 3 == 2 and step >= stop >> 2:
        open('stopped' + os.environ['RANK'], 'w').write(str(step))
        store(264, step + 1)
        raise SystemExit(0)
    time.sleep(slow)
    step += 1
";

#[test]
fn workers_stop_at_the_step_that_was_agreed() {
    let mut agent = Agent::new();
    let _launcher = Launcher::start(
        &agent,
        &["--nproc-per-node=2", "--", "python3", "-c", OBEYS],
    );
    agent.accept();
    let digest = agent.run(1);
    assert_eq!(agent.fact(), ToAgent::TakesStopSteps { digest, yes: true });
    agent.send(ToLauncher::InstallStop {
        digest,
        barrier: 1,
        step: 3,
        grace_ms: 60_000,
        reason: Reason::Drain,
    });
    let ToAgent::StopInstalled {
        step, barrier: 1, ..
    } = agent.fact()
    else {
        panic!("the step")
    };
    assert!(step >= 3);
    // Given up once; then for good, one step later than this node asks for.
    agent.send(ToLauncher::CancelStop { digest, barrier: 1 });
    agent.send(ToLauncher::InstallStop {
        digest,
        barrier: 2,
        step: step + 20,
        grace_ms: 0,
        reason: Reason::Drain,
    });
    let ToAgent::StopInstalled {
        step, barrier: 2, ..
    } = agent.fact()
    else {
        panic!("the step")
    };
    agent.send(ToLauncher::ConfirmStop {
        digest,
        barrier: 2,
        step: step + 1,
        reason: Reason::Drain,
    });
    // Exit code 0 everywhere, but the work is not done.
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    for rank in 0..2 {
        assert_eq!(
            read(&agent.path(&format!("stopped{rank}"))),
            (step + 1).to_string()
        );
    }
}

/// In its first step already: the leader chooses between a step and the signal by what it knows when it hears of it.
#[test]
fn a_launcher_that_is_to_leave_says_first_that_its_workers_take_stop_steps() {
    let mut agent = Agent::new();
    let leaves = "store(272, 1)\nimport signal\nos.kill(os.getppid(), signal.SIGTERM)";
    let worker = OBEYS.replace("store(272, 1)", leaves);
    let _launcher = Launcher::start(&agent, &["--", "python3", "-c", &worker]);
    agent.accept();
    let digest = agent.run(1);
    assert_eq!(agent.fact(), ToAgent::TakesStopSteps { digest, yes: true });
    assert!(matches!(agent.fact(), ToAgent::Leave { .. }));
}

#[test]
fn what_ran_before_the_launcher_is_left_alone() {
    let mut agent = Agent::new();
    let script = "sleep 1003 & echo $! > bystander; exec \"$@\"";
    let before = ["sh", "-c", script, "sh", env!("CARGO_BIN_EXE_muster")];
    let args = ["--", "sh", "-c", "setsid sleep 1004 & sleep 1004"];
    let mut launcher = Launcher::spawn(&agent, &before, &args, &[]);
    agent.accept();
    let digest = agent.run(1);
    agent.stop(digest, 100);
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    agent.end(0, "");
    assert!(launcher.wait().success());
    nothing_left(agent.me());
    let pid = crate::fake::pid(&agent.path("bystander"));
    // SAFETY: a process that this test started; its pid is not reused while it runs.
    assert_eq!(
        unsafe { libc::kill(pid, libc::SIGKILL) },
        0,
        "it still runs"
    );
}
