//! Agents that have no room: no file that they can open, or no place for another client. Launchers say what is wrong
//! and what helps, and go on once there is room.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;

use nix::sys::signal::Signal;
use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use super::heirs::{end, save, slots};
use super::saves::Saves;
use crate::harness::{Bed, now_ns};

/// Connections that one look at a full agent adds.
const MORE: usize = 32;

/// How many files a process may have open from now on.
fn limit(pid: i32, files: Option<u64>) {
    let files = Rlimit {
        current: files,
        // Whoever is not root can only lower it.
        maximum: getrlimit(Resource::Nofile).maximum,
    };
    prlimit(Pid::from_raw(pid), Resource::Nofile, files).unwrap();
}

/// Lets the node's agent open so many files more. It opens and closes others meanwhile, so that is seen to be so.
fn leave_files(bed: &Bed, node: usize, more: usize) {
    let pid = bed.agent_pid(node);
    bed.until("so many files", |_| {
        let open = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let number =
            |e: std::io::Result<std::fs::DirEntry>| e.ok()?.file_name().to_str()?.parse().ok();
        let open: BTreeSet<u64> = open.filter_map(number).collect();
        let free = |files: u64| (0..files).filter(|fd| !open.contains(fd)).count();
        let most = (0..).take_while(|files| free(*files) <= more).last();
        if prlimit_of(pid) == most {
            return true;
        }
        limit(pid, most);
        false
    });
}

/// How many files a process may have open.
fn prlimit_of(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix("Max open files"))?;
    line.split_whitespace().next()?.parse().ok()
}

/// The launcher waits for an agent that has no room and says so, and its job runs once there is room.
#[track_caller]
fn waits_for_room<T>(
    mut bed: Bed,
    told: &[&str],
    no_room: impl FnOnce(&Bed) -> T,
    room: impl FnOnce(&Bed, T),
) {
    bed.agent_that_calls(0, &[]);
    let held = no_room(&bed);
    bed.attach(0);
    bed.until("the launcher says what is wrong", |bed| {
        let said = bed.said(0);
        told.iter().all(|told| said.contains(told))
    });
    room(&bed, held);
    bed.group(&[0], 0);
    let said = bed.said(0);
    assert_eq!(said.matches("no agent answers").count(), 1, "{said}");
    bed.order(None, 0);
    assert_eq!(bed.ended(0), Some(0));
}

#[test]
fn a_launcher_whose_agent_can_open_no_file_waits_until_it_can() {
    let bed = Bed::of(1, &["--nnodes=1"]);
    let told = ["no agent answers", "LimitNOFILE", "ulimit -n"];
    let full = |bed: &Bed| {
        let before = prlimit_of(bed.agent_pid(0));
        leave_files(bed, 0, 0);
        before
    };
    waits_for_room(bed, &told, full, |bed, before| {
        limit(bed.agent_pid(0), before)
    });
}

#[test]
fn a_launcher_whose_agent_has_no_place_waits_until_one_is_left() {
    let bed = Bed::of(1, &["--nnodes=1"]);
    let told = [
        "no agent answers",
        "it has as many as it takes",
        "end launchers and commands",
    ];
    let full = |bed: &Bed| {
        let mut clients = Vec::new();
        bed.until("the agent takes no more", |bed| {
            for _client in 0..MORE {
                let client = UnixStream::connect(bed.socket(0)).unwrap();
                client.set_nonblocking(true).unwrap();
                clients.push(client);
            }
            let closed = |client: &mut UnixStream| match client.read(&mut [0]) {
                Ok(read) => read == 0,
                Err(error) => error.kind() != ErrorKind::WouldBlock,
            };
            clients.iter_mut().any(closed)
        });
        clients
    };
    waits_for_room(bed, &told, full, |_, clients| drop(clients));
}

/// One file is enough for what it writes, and too few for the two slots of a rank.
#[test]
fn an_agent_that_has_no_room_for_slots_says_so_and_is_asked_again() {
    let mut saves = Saves::with(&["--max-restarts=1"], "2", 3, 1_000_000);
    // Before its worker asks for slots.
    saves.bed.arm(1, "launcher.spawned", "stop");
    for node in [0, 1] {
        saves.bed.agent(node);
        saves.bed.attach(node);
    }
    (saves.bed).until("the workers start", |bed| bed.taken(1, "launcher.spawned"));
    let pid = saves.bed.agent_pid(1);
    let before = prlimit_of(pid);
    leave_files(&saves.bed, 1, 1);
    (saves.bed).signal(saves.bed.launcher_pid(1), Signal::SIGCONT);
    let first = saves.bed.group(&[0, 1], 0);
    let why = "does not keep the checkpoint slots of local rank 0 for a launcher that comes after this one";
    let fix = "raise its limit (systemd: LimitNOFILE, a shell: ulimit -n)";
    saves
        .bed
        .until("its launcher says so, and what helps", |bed| {
            let said = bed.said(1);
            said.contains(why) && said.contains(fix)
        });
    assert!(slots(&saves.bed, 1).is_empty());
    // The job goes on.
    saves.trains(&first);
    let step = save(&saves);
    limit(pid, before);
    let at = now_ns();
    saves.bed.signal(first.pid(0), Signal::SIGKILL);
    let next = saves.bed.group(&[0, 1], at);
    assert_eq!(saves.restored(&next), step);
    (saves.bed).until("the agent keeps them", |bed| slots(bed, 1).len() == 2);
    end(&mut saves);
}
