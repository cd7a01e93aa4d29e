//! A worker's environment, and where its output goes.

use std::collections::BTreeMap;
use std::fs;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use muster_protocol::local::{Assembly, Part, StoreAnswer, StoreAsk, ToAgent, ToLauncher};

use crate::fake::{Agent, Launcher, nothing_left, read, until};

const DUMP: &str = "import os, json, sys
rank = os.environ['RANK']
page = os.fstat(int(os.environ['MUSTER_CONTROL_FD'])).st_size
with open(f'env{rank}.tmp', 'w') as f:
    json.dump({'env': dict(os.environ), 'argv': sys.argv, 'page': page, 'sid': os.getsid(0) == os.getpid(),
        'unbuffered': sys.stdout.write_through}, f)
os.rename(f'env{rank}.tmp', f'env{rank}')
";

#[test]
fn a_worker_gets_torchruns_environment() {
    let mut agent = Agent::new();
    fs::write(agent.path("train.py"), DUMP).unwrap();
    let mut launcher = Launcher::start_with(
        &agent,
        &[
            "--rdzv_id=job7",
            "--max_restarts",
            "4",
            "train.py",
            "--lr",
            "${local_rank}",
        ],
        &[
            ("PET_NPROC_PER_NODE", "2"),
            ("PET_ROLE", "trainer"),
            ("NCCL_SOCKET_IFNAME", "mine"),
        ],
    );
    agent.accept();
    let register = agent.register.clone().unwrap();
    assert_eq!((register.slots, register.job.as_str()), (2, "job7"));
    assert_eq!(register.spec.max_restarts, 4);
    assert!(register.running.is_none() && register.guard_port > 0 && agent.port > 0);
    let (digest, port) = (agent.run(1), agent.port);
    assert_eq!(agent.fact(), ToAgent::Finished { digest });
    for rank in 0..2 {
        let dump: serde_json::Value =
            serde_json::from_str(&read(&agent.path(&format!("env{rank}")))).unwrap();
        assert_eq!(
            dump["argv"],
            serde_json::json!(["train.py", "--lr", rank.to_string()])
        );
        assert_eq!((&dump["page"], &dump["sid"]), (&4096.into(), &true.into()));
        assert_eq!(dump["unbuffered"], true);
        let env: BTreeMap<String, String> = serde_json::from_value(dump["env"].clone()).unwrap();
        let rank = rank.to_string();
        for (name, value) in [
            ("RANK", rank.as_str()),
            ("LOCAL_RANK", &rank),
            ("ROLE_RANK", &rank),
            ("GROUP_RANK", "0"),
            ("ROLE_NAME", "trainer"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("WORLD_SIZE", "2"),
            ("GROUP_WORLD_SIZE", "1"),
            ("ROLE_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &port.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_MAX_RESTARTS", "4"),
            ("TORCHELASTIC_RUN_ID", "job7"),
            ("TORCHELASTIC_USE_AGENT_STORE", "False"),
            ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            ("OMP_NUM_THREADS", "1"),
            ("GLOO_SOCKET_IFNAME", "lo"),
            ("NCCL_SOCKET_IFNAME", "mine"),
            ("MUSTER_GENERATION", "1"),
            ("MUSTER_LAUNCHER", &register.launcher.hex()),
            ("MUSTER_GENERATION_DIGEST", &digest.hex()),
        ] {
            assert_eq!(env.get(name).map(String::as_str), Some(value), "{name}");
        }
        let error_file = &env["TORCHELASTIC_ERROR_FILE"];
        assert!(
            error_file.ends_with(&format!("/attempt_0/{rank}/error.json")),
            "{error_file}"
        );
        assert!(
            env.contains_key("PATH"),
            "the launcher's environment is inherited"
        );
    }
    agent.end(0, "all ranks finished");
    assert_eq!(launcher.wait().code(), Some(0));
    assert!(launcher.err().contains("all ranks finished"));
    nothing_left(agent.me());
}

#[test]
fn tee_redirect_and_filter() {
    let mut agent = Agent::new();
    let script = "echo out$RANK; echo err$RANK >&2; printf end$RANK";
    let mut launcher = Launcher::start(
        &agent,
        &[
            "--nproc-per-node=3",
            "--log-dir",
            "logs",
            "-t",
            "0:3,1:1",
            "-r",
            "2:3",
            "--local-ranks-filter",
            "0,2",
            "--",
            "sh",
            "-c",
            script,
        ],
    );
    agent.accept();
    let digest = agent.run(1);
    assert_eq!(agent.fact(), ToAgent::Finished { digest });
    agent.end(0, "");
    assert!(launcher.wait().success());
    assert_eq!(launcher.out(), "[rank0]: out0\n[rank0]: end0\n");
    assert_eq!(launcher.workers_err(), "[rank0]: err0\n");
    let run = fs::read_dir(agent.path("logs"))
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let log = |rank: u32, name: &str| read(&run.join(format!("attempt_0/{rank}/{name}.log")));
    assert_eq!(log(0, "stdout"), "out0\nend0");
    assert_eq!(log(0, "stderr"), "err0\n");
    assert_eq!(log(1, "stdout"), "out1\nend1");
    assert_eq!(log(1, "stderr"), "");
    assert_eq!(log(2, "stdout"), "out2\nend2");
    assert_eq!(log(2, "stderr"), "err2\n");
}

#[test]
fn one_worker_writes_to_the_console_as_it_is() {
    let mut agent = Agent::new();
    let mut launcher = Launcher::start(
        &agent,
        &["--", "sh", "-c", "printf 'a\\rb'; printf 'c\\rd' >&2"],
    );
    agent.accept();
    let digest = agent.run(1);
    assert_eq!(agent.fact(), ToAgent::Finished { digest });
    agent.end(0, "");
    assert!(launcher.wait().success());
    assert_eq!(
        (launcher.out(), launcher.workers_err()),
        ("a\rb".into(), "c\rd".into())
    );
}

#[test]
fn much_output_arrives_whole_and_in_order() {
    let mut agent = Agent::new();
    let script = "import sys\nfor i in range(40000): print('line', i)\nsys.exit(0)";
    let mut launcher = Launcher::start(&agent, &["-t", "1", "--", "python3", "-c", script]);
    agent.accept();
    let digest = agent.run(1);
    assert_eq!(agent.fact(), ToAgent::Finished { digest });
    agent.end(0, "");
    assert!(launcher.wait().success());
    let expected: String = (0..40_000)
        .map(|i| format!("[rank0]: line {i}\n"))
        .collect();
    assert!(
        launcher.out() == expected,
        "{} of {} bytes",
        launcher.out().len(),
        expected.len()
    );
}

#[test]
fn what_cannot_be_run_is_reported() {
    let mut agent = Agent::new();
    let mut misspelt = Launcher::start(&agent, &["--", "./no-such-program"]);
    assert_eq!(misspelt.wait().code(), Some(2));
    assert!(misspelt.err().contains("PATH"), "{}", misspelt.err());
    // It may still go away later.
    let program = agent.path("no-such-program");
    fs::copy("/bin/true", &program).unwrap();
    let _launcher = Launcher::start(&agent, &["--", "./no-such-program"]);
    agent.accept();
    fs::remove_file(&program).unwrap();
    let start = agent.start(1);
    agent.send(ToLauncher::Start(start));
    let ToAgent::StartFailed { reason, .. } = agent.fact() else {
        panic!("it cannot start")
    };
    assert!(
        reason.contains("./no-such-program") && reason.contains("PATH"),
        "{reason}"
    );
}

#[test]
fn a_script_that_is_not_there_ends_before_an_agent_is_asked() {
    let agent = Agent::new();
    let mut launcher = Launcher::start(&agent, &["no-such.py"]);
    assert_eq!(launcher.wait().code(), Some(2));
    assert!(launcher.err().contains("no-such.py"), "{}", launcher.err());
}

#[test]
fn bad_flags_end_before_an_agent_is_asked() {
    let agent = Agent::new();
    let mut launcher = Launcher::start(&agent, &["--nnodes", "4:2", "x.py"]);
    assert_eq!(launcher.wait().code(), Some(2));
    assert!(
        launcher.err().contains("--nnodes 4:2"),
        "{}",
        launcher.err()
    );
}

/// Prints the figure; the bound is loose, for a loaded machine.
#[test]
fn start_is_quick() {
    for slots in [1, 8] {
        let mut agent = Agent::new();
        let nproc = slots.to_string();
        let _launcher =
            Launcher::start(&agent, &["--nproc-per-node", &nproc, "--", "sleep", "100"]);
        agent.accept();
        let mut times = Vec::new();
        for number in 1..=9 {
            let start = agent.start(number);
            let digest = start.digest;
            let began = Instant::now();
            agent.send(ToLauncher::Start(start));
            assert_eq!(agent.fact(), ToAgent::Started { digest, attempt: 1 });
            times.push(began.elapsed());
            agent.stop(digest, 1000);
            assert_eq!(agent.fact(), ToAgent::Stopped { digest });
        }
        times.sort();
        eprintln!(
            "{slots} workers: START to STARTED: median {:?}, worst {:?}",
            times[4], times[8]
        );
        assert!(times[4] < Duration::from_millis(500));
    }
}

#[test]
fn the_same_start_twice_starts_once() {
    let mut agent = Agent::new();
    let _launcher = Launcher::start(&agent, &["--", "sh", "-c", "echo x >> started; sleep 100"]);
    agent.accept();
    let digest = agent.run(1);
    let again = agent.start(1);
    agent.send(ToLauncher::Start(again));
    assert_eq!(agent.fact(), ToAgent::Started { digest, attempt: 1 });
    until("the worker wrote", || read(&agent.path("started")) == "x\n");
    agent.stop(digest, 500);
    assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    assert_eq!(read(&agent.path("started")), "x\n");
}

#[test]
fn on_a_terminal_every_line_names_its_rank() {
    let mut agent = Agent::new();
    let script = "[ -t 0 ] && echo out$RANK; echo err$RANK >&2";
    let mut launcher =
        Launcher::start_on_terminal(&agent, &["--nproc-per-node=2", "--", "sh", "-c", script]);
    agent.accept();
    let digest = agent.run(1);
    assert_eq!(agent.fact(), ToAgent::Finished { digest });
    agent.end(0, "");
    assert!(launcher.wait().success());
    let out = launcher.out();
    let mut lines: Vec<&str> = out.lines().map(str::trim_end).collect();
    lines.retain(|line| !line.starts_with("muster: "));
    lines.sort_unstable();
    let expected = [
        "[rank0]: err0",
        "[rank0]: out0",
        "[rank1]: err1",
        "[rank1]: out1",
    ];
    assert_eq!(lines, expected);
}

#[test]
fn the_launcher_carries_out_what_the_agent_asks_of_the_store() {
    let mut agent = Agent::new();
    fs::create_dir(agent.path("store")).unwrap();
    let flags = ["--store=store", "--rdzv-id=digits", "x.py"];
    let mut launcher = Launcher::start(&agent, &flags);
    agent.accept();
    let uuid = agent.register.as_ref().unwrap().store.unwrap();
    let object = read(&agent.path("store/muster-store"));
    assert!(object.contains(&uuid.hex()), "{object}");

    let entry = vec![b'x'; 200_000];
    assert_eq!(
        agent.store(1, StoreAsk::Read { slot: 1 }),
        StoreAnswer::Absent
    );
    let parts = Part::all(&entry);
    let (last, first) = parts.split_last().unwrap();
    for (id, end, byte) in [
        (2, StoreAnswer::Won, b'x'),
        (3, StoreAnswer::Exists, b'y'),
        // Its own bytes: a try whose answer was lost looks like this.
        (4, StoreAnswer::Won, b'x'),
    ] {
        for part in first.iter().cloned() {
            let ask = StoreAsk::Create { slot: 1, part };
            agent.send(ToLauncher::Store { id, ask });
        }
        let mut part = last.clone();
        part.bytes.fill(byte);
        assert_eq!(agent.store(id, StoreAsk::Create { slot: 1, part }), end);
    }
    let file = agent.path("store/digits/log/00000001.json");
    assert_eq!(fs::read(file).unwrap(), entry);
    let beacon = agent.store(5, StoreAsk::WriteBeacon { value: 7 });
    assert_eq!(beacon, StoreAnswer::BeaconWritten);

    // An agent that comes back finds the same store.
    agent.hang_up();
    agent.accept();
    assert_eq!(agent.register.as_ref().unwrap().store, Some(uuid));
    let beacon = agent.store(1, StoreAsk::ReadBeacon);
    assert_eq!(beacon, StoreAnswer::Beacon(Some(7)));
    let mut whole = Assembly::default();
    let mut answer = agent.store(2, StoreAsk::Read { slot: 1 });
    let found = loop {
        let StoreAnswer::Found(part) = answer else {
            panic!("{answer:?}")
        };
        if let Some(found) = whole.take(&part).unwrap() {
            break found;
        }
        answer = agent.stored(2);
    };
    assert_eq!(found, entry);

    // Its user reads what is wrong, once.
    fs::remove_dir_all(agent.path("store")).unwrap();
    for id in 3..6 {
        let answer = agent.store(id, StoreAsk::Read { slot: 1 });
        assert!(matches!(answer, StoreAnswer::Failed { .. }), "{answer:?}");
    }
    agent.end(0, "");
    assert!(launcher.wait().success());
    let said = launcher.err();
    let place = format!("the store {}: ", agent.path("store").display());
    assert_eq!(said.matches(&place).count(), 1, "{said}");
    assert!(said.contains("restart the job"), "{said}");
}

#[test]
fn a_log_dir_that_cannot_be_used_is_named() {
    let agent = Agent::new();
    let mut launcher = Launcher::start(&agent, &["--log-dir=/proc/x", "x.py"]);
    assert_eq!(launcher.wait().code(), Some(1));
    let said = launcher.err();
    assert!(said.contains("--log-dir /proc/x: no folder"), "{said}");
}

#[test]
fn a_store_that_cannot_be_used_ends_the_launcher_and_names_the_fix() {
    let agent = Agent::new();
    // Nothing can be created there, not even by root.
    let mut launcher = Launcher::start(&agent, &["--store=/proc", "x.py"]);
    assert_eq!(launcher.wait().code(), Some(1));
    let said = launcher.err();
    assert!(said.contains("--store /proc cannot be used"), "{said}");
}

#[test]
fn a_reader_that_goes_away_does_not_end_the_training() {
    let mut agent = Agent::new();
    let script = "until [ -e go ]; do sleep 0.01; done; i=0; while [ $i -lt 2000 ]; do echo $i; echo $i >&2; i=$((i+1)); done; echo done > done";
    let mut launcher = Launcher::start_unread(&agent, &["-t", "3", "--", "sh", "-c", script]);
    agent.accept();
    let digest = agent.run(1);
    fs::write(agent.path("go"), "").unwrap();
    assert_eq!(agent.fact(), ToAgent::Finished { digest });
    assert_eq!(read(&agent.path("done")), "done\n");
    agent.end(0, "a report that nobody reads");
    assert_eq!(launcher.wait().code(), Some(0));
}

/// Prints the figure; the bound is loose, for a loaded machine.
#[test]
fn an_exit_is_seen_at_once() {
    let mut agent = Agent::new();
    let script = "import os, time; f = open('at', 'w'); f.write(str(time.time_ns())); f.flush(); os.kill(os.getpid(), 9)";
    let _launcher = Launcher::start(&agent, &["--", "python3", "-c", script]);
    agent.accept();
    let mut times = Vec::new();
    for number in 1..=9 {
        let digest = agent.run(number);
        assert!(matches!(agent.fact(), ToAgent::Exited { .. }));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let at = Duration::from_nanos(read(&agent.path("at")).parse().unwrap());
        times.push(now.saturating_sub(at));
        assert_eq!(agent.fact(), ToAgent::Stopped { digest });
    }
    times.sort();
    eprintln!(
        "SIGKILL to EXITED: median {:?}, worst {:?}",
        times[4], times[8]
    );
    assert!(times[4] < Duration::from_millis(200));
}
