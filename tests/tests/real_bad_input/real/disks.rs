//! State directories, and logs, that cannot be written while a job runs.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use muster_protocol::local::Query;

use crate::ground::{ask, disk, program, without_our_environment};
use crate::stalling::{Stalled, stallable};
use crate::support::{Bed, Proc, events, until};

/// Three nodes, of which `b` has the disk. Node c dies while b cannot write: b abstains, and
/// without it there is no majority; as soon as b can write again, the job goes on.
fn abstains_and_recovers(
    mut bed: Bed,
    mut start_b: impl FnMut(&mut Bed) -> Proc,
    fill: impl Fn(),
    heal: impl Fn(),
) {
    let _a = bed.agent("a", &[]);
    let mut b = start_b(&mut bed);
    let mut c = bed.agent("c", &["a"]);
    let flags = ["--nnodes=1:3", "--stop-grace=1s"];
    let mut launchers: Vec<Proc> = ["a", "b"].iter().map(|n| bed.launch(n, &flags)).collect();
    let mut lost = bed.launch("c", &flags);
    let first = bed.until_runs_on(&["a", "b", "c"]);
    fill();
    lost.kill();
    c.kill();
    b.until_says("abstains");
    until("the trouble is in the job's history", || {
        events(&bed.socket("b"))
            .iter()
            .any(|e| e["event"] == "trouble")
    });
    // The old workers are stopped, and no new ones start: that would take b's vote.
    until("the generation ended", || bed.worker_pids().is_empty());
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        assert!(bed.worker_pids().is_empty(), "started without b's vote");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(b.is_alive());
    // People on both nodes see that nothing runs, and why.
    for launcher in &mut launchers {
        launcher.until_says("refuses writes");
        assert!(launcher.is_alive(), "{}", launcher.log());
    }
    for node in ["a", "b"] {
        until(
            "the agents say that the job waits, and for which node",
            || {
                let jobs = ask(&bed.socket(node), Query::Jobs).and_then(Result::ok);
                let waits = jobs.is_some_and(|jobs| jobs[0]["kind"] == "waits");
                waits && is_unstored(&bed, node, "b")
            },
        );
    }
    heal();
    let second = bed.until_runs_on(&["a", "b"]);
    assert_eq!(second[0].generation, first[0].generation + 1);
    let _open = bed.finish();
    for launcher in &mut launchers {
        assert_eq!(launcher.code(), 0, "{}", launcher.log());
    }
}

fn mode(dir: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(mode)).unwrap();
}

#[test]
fn a_voter_whose_state_directory_is_not_writable_abstains_and_recovers() {
    let bed = Bed::new();
    let state = bed.path("b/state");
    let start = |bed: &mut Bed| {
        // Root may write everywhere, unless this right is taken away.
        bed.without_root = true;
        let b = bed.agent("b", &["a"]);
        bed.without_root = false;
        b
    };
    let folders = || {
        let inner = std::fs::read_dir(&state)
            .unwrap()
            .flatten()
            .map(|e| e.path());
        inner
            .filter(|p| p.is_dir())
            .chain([state.clone()])
            .collect::<Vec<_>>()
    };
    let fill = || folders().iter().for_each(|dir| mode(dir, 0o500));
    let heal = || folders().iter().for_each(|dir| mode(dir, 0o700));
    abstains_and_recovers(bed, start, fill, heal);
}

#[test]
fn a_full_disk_holds_up_a_new_job_until_there_is_room_and_no_old_one() {
    let mut bed = Bed::new();
    let state = bed.path("b/state");
    if !disk::small(&state, 256) {
        return;
    }
    let _agents = [bed.agent("a", &[]), bed.agent("c", &["a"])];
    let mut b = bed.agent("b", &["a"]);
    disk::fill(&state, 0);
    let flags = ["--nnodes=2:3", "--form-quiet=1m", "--stop-grace=1s"];
    let mut launchers: Vec<Proc> = ["a", "b", "c"]
        .iter()
        .map(|n| bed.launch(n, &flags))
        .collect();
    b.until_says("abstains");
    until("the trouble is in the job's history", || {
        let list = events(&bed.socket("b"));
        list.iter()
            .any(|e| e["event"] == "trouble" && e["text"].to_string().contains("free some space"))
    });
    assert!(
        bed.worker_pids().is_empty(),
        "nothing starts before all are bound"
    );
    // So it is on the console that its user looks at, wherever that is.
    for launcher in &mut launchers {
        launcher.until_says("No space left on device");
    }
    disk::free(&state);
    let first = bed.until_runs_on(&["a", "b", "c"]);

    // What a job needs on the disk it keeps: a disk that fills up later does not hold it up.
    disk::fill(&state, 0);
    launchers.pop().unwrap().kill();
    let second = bed.until_runs_on(&["a", "b"]);
    assert_eq!(second[0].generation, first[0].generation + 1);
    let _open = bed.finish();
    for launcher in &mut launchers {
        assert_eq!(launcher.code(), 0, "{}", launcher.log());
    }
}

/// Whether an agent says that this node's disk refuses its writes, or does not answer.
fn is_unstored(bed: &Bed, asked: &str, node: &str) -> bool {
    let nodes = ask(&bed.socket(asked), Query::Nodes).and_then(Result::ok);
    let nodes = nodes.unwrap_or_default();
    let mut nodes = nodes.as_array().into_iter().flatten();
    nodes.any(|n| n["host"] == node && n["unstored"].is_string())
}

/// A file system that stalls blocks each write to it, for as long as it likes.
#[test]
fn a_disk_that_stalls_costs_no_healthy_node() {
    let mut bed = Bed::new();
    let names = ["a", "b", "c"];
    let disk = |bed: &Bed, node: &str| bed.path(node).join("disk");
    if !stallable(&names.map(|n| disk(&bed, n))) {
        return;
    }
    let mut start = |node: &str, first: &[&str]| {
        let state = format!("--state-dir={}/state", disk(&bed, node).display());
        bed.agent_and(node, first, &[&state])
    };
    let _agents = [start("a", &[]), start("b", &["a"]), start("c", &["a"])];
    let flags = ["--nnodes=1:3", "--stop-grace=1s"];
    let launch = |bed: &mut Bed, n: &str| (n.to_owned(), bed.launch(n, &flags));
    let mut launchers: BTreeMap<String, Proc> = names.iter().map(|n| launch(&mut bed, n)).collect();
    let first = bed.until_runs_on(&names);
    let [leader, held, gone] = [0, 1, 2].map(|rank: usize| first[rank].node.clone());

    // A member whose disk stalls is in nobody's way: the others have a majority.
    let stalled = Stalled::new(&disk(&bed, &held));
    launchers.remove(&gone).unwrap().kill();
    let second = bed.until_runs_on(&[&leader, &held]);
    assert_eq!(second[0].generation, first[0].generation + 1);
    until("the others hear that its disk does not answer", || {
        is_unstored(&bed, &leader, &held)
    });
    assert_eq!(bed.until_runs_on(&[&leader, &held]), second);
    drop(stalled);
    until("it answers again", || !is_unstored(&bed, &leader, &held));

    // Nor is the one that leads: the vote of the third agent counts, though its launcher was away.
    let stalled = Stalled::new(&disk(&bed, &leader));
    launchers.extend([launch(&mut bed, &gone)]);
    let third = bed.until_runs_on(&names);
    assert_eq!(third[0].generation, second[0].generation + 1);
    until("the others hear that its disk does not answer", || {
        is_unstored(&bed, &held, &leader)
    });
    drop(stalled);
    until("it answers again", || !is_unstored(&bed, &held, &leader));
    assert_eq!(bed.until_runs_on(&names), third);
    let _open = bed.finish();
    for launcher in launchers.values_mut() {
        assert_eq!(launcher.code(), 0, "{}", launcher.log());
    }
}

/// The kernel does not let it go on before that, and nobody else would say why nothing answers.
#[test]
fn an_agent_that_starts_on_a_disk_that_stalls_says_for_what_it_waits() {
    let mut bed = Bed::new();
    let disk = bed.path("a").join("disk");
    if !stallable(std::slice::from_ref(&disk)) {
        return;
    }
    let state = format!("--state-dir={}/state", disk.display());
    let mut first = bed.agent_and("a", &[], &[&state]);
    let mut launcher = bed.launch("a", &[]);
    bed.until_runs_on(&["a"]);
    first.kill();
    let stalled = Stalled::new(&disk);
    let mut agent = bed.try_agent("a", &[], &[&state]);
    agent.until_says("does not answer");
    assert!(agent.is_alive());
    // It takes connections before it serves: to its launcher it is away.
    assert!(!launcher.log().contains("is back"), "{}", launcher.log());
    drop(stalled);
    agent.until_says("serving");
    launcher.until_says("is back");
    let _open = bed.finish();
    assert_eq!(launcher.code(), 0, "{}", launcher.log());
}

/// Every write to its stderr fails, as on a full disk or after its reader went away.
fn unheard(mut command: Command, bed: &Bed) -> std::process::Child {
    without_our_environment(&mut command);
    let full = std::fs::File::options().write(true).open("/dev/full");
    command
        .env("HOME", bed.path("home"))
        .env("XDG_RUNTIME_DIR", bed.path("home"))
        .env("MUSTER_LOG", "debug")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(full.unwrap())
        .spawn()
        .unwrap()
}

#[test]
fn an_agent_whose_log_cannot_be_written_goes_on() {
    let mut bed = Bed::new();
    std::fs::create_dir(bed.path("a")).unwrap();
    let mut command = Command::new(program("muster"));
    command.arg("agent").args(bed.agent_flags("a", &[]));
    let mut agent = unheard(command, &bed);
    until("it serves", || {
        assert_eq!(agent.try_wait().unwrap(), None, "it ended");
        matches!(ask(&bed.socket("a"), Query::Status), Some(Ok(_)))
    });
    let mut launcher = bed.launch("a", &[]);
    bed.until_runs_on(&["a"]);
    let _open = bed.finish();
    assert_eq!(launcher.code(), 0);
    assert_eq!(agent.try_wait().unwrap(), None, "it ended");
    agent.kill().unwrap();
    agent.wait().unwrap();
}

#[test]
fn a_launcher_whose_agents_log_cannot_be_written_ends_with_its_job() {
    let bed = Bed::new();
    let mut command = Command::new(program("muster"));
    command.args(["run", "--standalone", "--", "true"]);
    let mut launcher = unheard(command, &bed);
    let mut ended = None;
    until("it ends", || {
        ended = launcher.try_wait().unwrap();
        ended.is_some()
    });
    assert_eq!(ended.and_then(|status| status.code()), Some(0));
}
