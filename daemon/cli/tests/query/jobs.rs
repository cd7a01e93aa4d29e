//! A job's rows, history, output and end.

use std::fs;
use std::process::Stdio;

use serde_json::Value;

use crate::agents::{Launcher, World, stderr, stdout, until};

fn row(world: &World, job: &str) -> Option<Value> {
    let jobs = world.json(&["jobs"]);
    jobs.as_array()?.iter().find(|r| r["job"] == job).cloned()
}

#[test]
fn a_job_that_waits_says_for_whom_and_can_be_cancelled() {
    let world = World::new();
    let _agent = world.agent("a", &world.socket());
    let mut launcher = Launcher::register(&world.socket(), "pair", (2, 2), None);
    let waiting = until("the job waits", || {
        let row = row(&world, "pair")?;
        let text = row["waiting"].as_str()?.to_owned();
        (!text.is_empty()).then_some(text)
    });
    assert!(waiting.contains("1 more of 2 nodes"), "{waiting}");
    let text = stdout(&world.muster(&["jobs"]));
    assert!(
        text.contains("forming, waits") && text.contains(&waiting),
        "{text}"
    );
    let warned = || {
        let doctor = world.json(&["doctor"]);
        let mut checks = doctor["checks"].as_array().unwrap().iter();
        checks.any(|c| c["check"] == "job" && c["status"] == "warn")
    };
    assert!(warned());
    let unknown = world.muster(&["cancel", "other"]);
    assert_eq!(unknown.status.code(), Some(1));
    let cancelled = world.muster(&["cancel", "pair"]);
    assert!(cancelled.status.success(), "{cancelled:?}");
    launcher.end();
    assert!(!warned());
    assert!(row(&world, "pair").is_none_or(|r| r["waiting"] == ""));
}

#[test]
fn a_jobs_history_and_end() {
    let world = World::new();
    let agent = world.agent("a", &world.socket());
    let mut launcher = Launcher::register(&world.socket(), "solo", (1, 1), None);
    launcher.run();
    let events = until("the workers run", || {
        let events = world.json(&["events", "solo"]);
        let all = events.as_array()?.clone();
        all.iter().any(|e| e["event"] == "changed").then_some(all)
    });
    let generation = events.iter().find(|e| e["event"] == "generation").unwrap();
    assert_eq!(generation["cause"], "formed");
    assert_eq!(generation["members"][0]["node"], agent.id.as_str());
    let name = generation["members"][0]["name"].as_str().unwrap();
    assert!(name.starts_with("a ("), "{name}");
    let changed = events.iter().find(|e| e["event"] == "changed").unwrap();
    assert_eq!(changed["digest"], generation["digest"]);
    assert!(changed["total_ms"].as_f64() > Some(0.0));
    let last = events.last().unwrap()["seq"].to_string();
    assert_eq!(
        world.json(&["events", "solo", "--after", &last]),
        Value::Array(Vec::new())
    );

    let job = row(&world, "solo").unwrap();
    assert_eq!((&job["kind"], &job["world"]), (&"runs".into(), &2.into()));
    assert_eq!(job["here"]["slots"], 2);
    let text = stdout(&world.muster(&["events", "solo"]));
    assert!(
        text.starts_with("GEN") && text.contains("workers run: "),
        "{text}"
    );

    let follower = world
        .command(&["events", "solo", "--follow", "-o", "json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    assert!(world.muster(&["cancel", "solo"]).status.success());
    launcher.end();
    // It ends by itself, because the job is over.
    let output = follower.wait_with_output().unwrap();
    assert!(output.status.success());
    let lines: Vec<Value> = stdout(&output)
        .lines()
        .map(|l| serde_json::from_str(l).unwrap())
        .collect();
    assert_eq!(lines[0], events[0]);
    let over = |event: &Value| event["kind"] == "cancelled";
    assert!(lines.iter().any(over), "{lines:?}");
    let unknown = world.muster(&["events", "other"]);
    assert_eq!(unknown.status.code(), Some(1));
    assert!(stderr(&unknown).contains("muster jobs"));
}

#[test]
fn of_several_agents_the_one_that_knows_the_job_is_asked() {
    let world = World::new();
    let embedded = world.dir.path().join("muster/run-4711.sock");
    let _a = world.agent("a", &world.socket());
    let b = world.agent("b", &embedded);
    let mut launcher = Launcher::register(&embedded, "solo", (1, 1), None);
    launcher.run();
    let generation = until("the job formed", || {
        let output = world.muster(&["events", "solo", "-o", "json"]);
        let events: Value = serde_json::from_slice(&output.stdout).ok()?;
        let all = events.as_array()?;
        all.iter().find(|e| e["event"] == "generation").cloned()
    });
    assert_eq!(generation["members"][0]["node"], b.id.as_str());
}

#[test]
fn the_output_of_workers() {
    let world = World::new();
    let _agent = world.agent("a", &world.socket());
    let logs = world.dir.path().join("logs/solo_0909090909090909");
    let write = |attempt: &str, rank: &str, name: &str, text: &str| {
        let dir = logs.join(attempt).join(rank);
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(name), text).unwrap();
    };
    let mut launcher = Launcher::register(&world.socket(), "solo", (1, 1), Some(&logs));
    launcher.run();
    until("the job runs", || {
        (row(&world, "solo")?["kind"] == "runs").then_some(())
    });
    let early = world.muster(&["logs", "solo"]);
    assert_eq!(early.status.code(), Some(1));
    assert!(stderr(&early).contains("nothing"), "{early:?}");

    fs::create_dir_all(logs.join("attempt_0/0")).unwrap();
    let unredirected = world.muster(&["logs", "solo"]);
    assert!(
        stderr(&unredirected).contains("--tee 3"),
        "{unredirected:?}"
    );

    write("attempt_0", "0", "stdout.log", "old\n");
    write("attempt_1", "0", "stdout.log", "one\ntwo\n");
    write("attempt_1", "1", "stderr.log", "oops\n");
    let all = stdout(&world.muster(&["logs", "solo"]));
    assert_eq!(
        all,
        "==> local rank 0 stdout <==\none\ntwo\n==> local rank 1 stderr <==\noops\n"
    );
    let check = |args: &[&str], expected: &str| {
        let output = world.muster(&[&["logs", "solo"], args].concat());
        assert_eq!(stdout(&output), expected, "{args:?}: {output:?}");
    };
    check(&["--rank", "1"], "oops\n");
    check(&["--local-rank", "0", "--tail", "1"], "two\n");
    check(&["--attempt", "0"], "old\n");
    check(&["--stream", "stderr"], "oops\n");
    let far = world.muster(&["logs", "solo", "--rank", "7"]);
    assert!(stderr(&far).contains("of 2 ranks"), "{far:?}");
    let files = world.json(&["logs", "solo"]);
    assert_eq!(files[0]["attempt"], "1");
    assert_eq!(files[1]["bytes"], 5);

    // Following goes over to the next attempt, and ends with the job.
    let mut follower = world
        .command(&["logs", "solo", "--rank", "0", "--follow"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = follower.stdout.take().unwrap();
    let mut seen = [0; 8];
    std::io::Read::read_exact(&mut out, &mut seen).unwrap();
    assert_eq!(&seen, b"one\ntwo\n");
    write("attempt_2", "0", "stdout.log", "three\nfo");
    let mut next = [0; 6];
    std::io::Read::read_exact(&mut out, &mut next).unwrap();
    assert_eq!(&next, b"three\n");
    assert!(world.muster(&["cancel", "solo"]).status.success());
    launcher.end();
    drop(launcher);
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut out, &mut rest).unwrap();
    assert_eq!(rest, "fo");
    assert!(follower.wait().unwrap().success());

    // When no agent knows the job any more, its folder is enough.
    let base = world.dir.path().join("logs");
    let output = world.muster(&[
        "logs",
        "solo",
        "--attempt",
        "1",
        "--local-rank",
        "1",
        "--log-dir",
        base.to_str().unwrap(),
    ]);
    assert_eq!(stdout(&output), "oops\n");
}

#[test]
fn a_job_without_files_says_how_to_get_some() {
    let world = World::new();
    let _agent = world.agent("a", &world.socket());
    let mut launcher = Launcher::register(&world.socket(), "solo", (1, 1), None);
    launcher.run();
    until("the job runs", || {
        (row(&world, "solo")?["kind"] == "runs").then_some(())
    });
    let output = world.muster(&["logs", "solo"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("--log-dir DIR --tee 3"),
        "{output:?}"
    );
}
