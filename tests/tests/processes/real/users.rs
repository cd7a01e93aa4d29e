//! The agent belongs to a user of its own, as a service does, and each job to whoever started it:
//! a store that only the job's user can enter is reached by the launchers.

use std::fs::Permissions;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use muster_protocol::checkpoint::Found;
use muster_protocol::local::{Query, SaveNews, ToAgent};
use muster_protocol::spec::JobSpec;
use muster_protocol::{LauncherId, codec};
use muster_tests::usual;

use crate::ground::{program, without_our_environment};
use crate::harness::Bed;

const AGENT: u32 = 65_534;
const USER: u32 = 12_345;
const STRANGER: u32 = 12_346;

fn is_root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED: only root can start processes of other users");
    }
    root
}

fn mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// A directory that only the user can enter.
fn store() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    mode(dir.path(), 0o700);
    chown(dir.path(), Some(USER), Some(USER)).unwrap();
    dir
}

/// Two nodes with a daemon each, and a job on both.
fn bed(store: &Path) -> Bed {
    let dir = format!("--store={}", store.display());
    let mut bed = Bed::of_users(&["--nnodes=1:2", &dir], AGENT, USER);
    for node in [0, 1] {
        bed.agent(node);
        bed.attach(node);
    }
    bed
}

#[test]
fn a_store_of_the_jobs_user_lets_either_node_go_on() {
    if !is_root() {
        return;
    }
    let store = store();
    let mut bed = bed(store.path());
    let both = bed.group(&[0, 1], 0);
    let (zero, one) = (both.rank0(), 1 - both.rank0());
    let at = bed.kill(zero);
    let alone = bed.group(&[one], at);
    for name in ["muster-store", "job/log/00000001.json", "job/beacon"] {
        let path = store.path().join(name);
        bed.until("it is there", |_| path.exists());
        assert_eq!(std::fs::metadata(path).unwrap().uid(), USER, "{name}");
    }
    bed.agent(zero);
    bed.attach(zero);
    let again = bed.group(&[0, 1], alone.began());
    // The agent of the node that will be left crashes: its launcher brings the store again.
    bed.kill_agent(zero);
    bed.agent(zero);
    bed.until("the launcher is back", |bed| {
        bed.job(zero)["launcher_here"] == true
    });
    assert_eq!(
        bed.group(&[0, 1], alone.began()).generation,
        again.generation
    );
    let at = bed.kill(one);
    bed.group(&[zero], at);
    bed.order(None, 0);
    assert_eq!(bed.ended(zero), Some(0));
}

#[test]
fn a_decision_waits_for_a_store_that_cannot_be_written() {
    if !is_root() {
        return;
    }
    let store = store();
    let mut bed = bed(store.path());
    let both = bed.group(&[0, 1], 0);
    let (zero, one) = (both.rank0(), 1 - both.rank0());
    let log = store.path().join("job/log");
    mode(&log, 0o500);
    let at = bed.kill(zero);
    bed.until("its user reads why", |bed| {
        let said = bed.said(one);
        said.contains(&format!("Permission denied (os error 13), as user {USER}"))
            && said.contains("let the job's user write there")
    });
    // The launcher tells its user before it tells the agent.
    bed.until("the job's history has it", |bed| {
        let trouble = bed.history(one, "trouble");
        let mut texts = trouble.iter().map(|e| e["text"].to_string());
        texts.any(|text| text.contains("cannot create") && text.contains("Permission denied"))
    });
    mode(&log, 0o700);
    bed.group(&[one], at);
    bed.until("and that it is over", |bed| {
        bed.said(one).contains("answers again")
    });
    bed.order(None, 0);
    assert_eq!(bed.ended(one), Some(0));
}

#[test]
fn a_store_that_the_user_cannot_write_is_refused_by_the_launcher() {
    if !is_root() {
        return;
    }
    let store = store();
    mode(store.path(), 0o500);
    let dir = format!("--store={}", store.path().display());
    let mut bed = Bed::of_users(&[&dir], AGENT, USER);
    bed.attach(0);
    assert_eq!(bed.ended(0), Some(1));
    let said = bed.said(0);
    assert!(
        said.contains(&format!("as user {USER}"))
            && said.contains("let the job's user write there"),
        "{said}"
    );
}

/// Another user's agent, as node 1 of the bed, that has no secret and calls this address.
fn stranger(bed: &Bed, address: &str) -> Child {
    let home = bed.path("n1");
    std::fs::create_dir(&home).unwrap();
    chown(&home, Some(AGENT), Some(AGENT)).unwrap();
    let mut command = Command::new(program("musterd"));
    without_our_environment(&mut command);
    command
        .args(["--insecure", "--listen=127.0.0.1:0", "--http=off"])
        .args(["--bootstrap", address])
        .arg("--state-dir")
        .arg(home.join("state"))
        .arg("--socket")
        .arg(bed.socket(1))
        .env("HOME", &home)
        .current_dir(&home)
        .uid(AGENT)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// A job whose agent has no secret but what it found or drew itself, and another user who calls it on loopback.
fn strangers_are_refused(start: impl FnOnce(&mut Bed)) {
    if !is_root() {
        return;
    }
    let mut bed = Bed::of_users(&["--nnodes=1"], AGENT, USER);
    bed.env("MUSTER_SECRET_FILE", "");
    start(&mut bed);
    bed.group(&[0], 0);
    let status = bed.query(0, Query::Status).unwrap();
    assert_eq!(status["secret"], true);
    let mut stranger = stranger(&bed, status["listening"][0].as_str().unwrap());
    bed.until("it is refused", |bed| {
        let status = bed.query(1, Query::Status);
        status.is_some_and(|s| s["peers_connected"] == 0 && s["refused"][0]["why"].is_string())
    });
    stranger.kill().unwrap();
    stranger.wait().unwrap();
    bed.order(None, 0);
    assert_eq!(bed.ended(0), Some(0));
}

#[test]
fn another_user_is_no_agent_of_a_job_without_an_endpoint() {
    strangers_are_refused(|bed| bed.run_alone(0));
}

#[test]
fn another_user_is_no_agent_of_a_job_with_an_endpoint_on_loopback() {
    strangers_are_refused(|bed| bed.run(0, 0));
}

#[test]
fn orders_are_in_the_log_with_the_user_who_gave_them() {
    if !is_root() {
        return;
    }
    let mut bed = Bed::of_users(&["--nnodes=1"], AGENT, USER);
    bed.agent(0);
    bed.attach(0);
    bed.group(&[0], 0);
    let order = |user: u32, args: &[&str]| {
        let mut command = Command::new(program("muster"));
        without_our_environment(&mut command);
        command.args(args).arg("--socket").arg(bed.socket(0));
        command.uid(user).stdin(Stdio::null()).stderr(Stdio::null());
        command.status().unwrap().success()
    };
    assert!(!order(USER, &["drain"]));
    assert!(order(USER, &["cancel", "job"]));
    assert_eq!(bed.ended(0), Some(130));
    let log = std::fs::read_to_string(bed.path("n0.agent.log")).unwrap();
    let lines = log.lines().filter_map(|l| serde_json::from_str(l).ok());
    let orders: Vec<(String, u64, bool)> = lines
        .filter_map(|line: serde_json::Value| {
            let fields = line.get("fields").unwrap_or(&line);
            let order = fields["order"].as_str()?.to_owned();
            let refused = fields["why"].is_string();
            Some((order, fields["uid"].as_u64()?, refused))
        })
        .collect();
    let user = u64::from(USER);
    assert_eq!(
        orders,
        [("drain".into(), user, true), ("cancel".into(), user, false)]
    );
}

/// A process of a third user that says this to the agent of node 0, passes on what it hears within 2 s, and stays
/// connected.
const SPEAKER: &str = "import socket, sys, time
s = socket.socket(socket.AF_UNIX)
s.connect(sys.argv[1])
s.sendall(bytes.fromhex(sys.argv[2]))
s.settimeout(0.1)
heard, end = b'', time.monotonic() + 2
while time.monotonic() < end:
    try:
        heard += s.recv(65536)
    except TimeoutError:
        pass
print(heard.hex(), flush=True)
time.sleep(600)";

fn speaks(bed: &Bed, frames: &[ToAgent]) -> (Child, Vec<u8>) {
    let bytes = frames.iter().flat_map(|frame| {
        let frame = codec::encode_frame(frame).unwrap();
        codec::with_length(&frame)
    });
    let hex: String = bytes.map(|b| format!("{b:02x}")).collect();
    let mut child = Command::new("python3")
        .args(["-c", SPEAKER])
        .arg(bed.socket(0))
        .arg(hex)
        .uid(STRANGER)
        .gid(STRANGER)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut heard = String::new();
    let out = child.stdout.take().unwrap();
    BufReader::new(out).read_line(&mut heard).unwrap();
    let digits = heard.trim().as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    (child, digits.map(byte).collect())
}

/// That it holds all memory for checkpoints, in a job that never forms; and that it has more workers than a node may.
#[test]
fn what_another_user_says_takes_nothing_from_a_job() {
    if !is_root() {
        return;
    }
    let store = store();
    let dir = format!("--store={}", store.path().display());
    let mut bed = Bed::of_users(&["--nnodes=1", &dir], AGENT, USER);
    let text = |path: std::path::PathBuf| path.to_str().unwrap().to_owned();
    let (events, control) = (text(bed.path("events")), text(bed.path("control")));
    bed.script(&["--", &program("saver"), &events, &control, "1", "1000000"]);
    mode(&bed.path("control"), 0o777);
    bed.agent(0);
    let spec = JobSpec {
        min_nodes: 2,
        max_nodes: 2,
        ..JobSpec::default()
    };
    let here = [127, 0, 0, 1].into();
    let register = usual::register(LauncherId([7; 8]), "another", spec, here);
    let slots = SaveNews::Slots {
        k: 0,
        capacity: u64::MAX,
        found: [Found::Free; 2],
    };
    let lies = [ToAgent::Register(register.clone()), ToAgent::Save(slots)];
    let (mut holder, _) = speaks(&bed, &lies);
    let mut many = register;
    (many.launcher, many.slots) = (LauncherId([8; 8]), u16::MAX);
    let (mut crowd, heard) = speaks(&bed, &[ToAgent::Register(many)]);
    assert!(
        String::from_utf8_lossy(&heard).contains("1024"),
        "{}",
        String::from_utf8_lossy(&heard)
    );

    bed.attach(0);
    let group = bed.group(&[0], 0);
    bed.until("it trains", |bed| bed.has_met(group.generation, 20));
    let (ok, said) = bed.checkpoint(0, &["--json"]);
    assert!(ok, "{said}");
    for child in [&mut holder, &mut crowd] {
        assert!(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }
    bed.order(None, 0);
    assert_eq!(bed.ended(0), Some(0));
}

/// Waiting does not heal it.
#[test]
fn a_launcher_that_may_not_use_the_agents_socket_ends_and_says_so() {
    if !is_root() {
        return;
    }
    let dir = store();
    let socket = dir.path().join("agent.sock");
    let _listens = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let mut command = Command::new(program("muster"));
    without_our_environment(&mut command);
    command.args(["run", "--socket", socket.to_str().unwrap(), "--", "true"]);
    // The directory is another user's.
    command.uid(AGENT).current_dir("/");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("may not use the agent's socket"), "{said}");
}
