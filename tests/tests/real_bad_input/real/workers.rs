//! Workers that do not do as they are told.

use std::time::Duration;

use crate::stalling::{Stalled, stallable};
use crate::support::{Bed, Proc, cmdline, events, processes, until};

/// Ignores SIGTERM, and leaves children in sessions of their own that ignore it as well.
const STUBBORN: &str = r#"
trap '' TERM
setsid sh -c 'trap "" TERM; exec sleep 86321' &
(setsid sh -c 'trap "" TERM; exec sleep 86321' &)
f="$BED/w/$$"
echo "$RANK $WORLD_SIZE $NODE $MUSTER_GENERATION_DIGEST $MUSTER_GENERATION" >"$f.new"
mv "$f.new" "$f"
: <"$BED/end"
"#;

/// The children of stubborn workers of this bed.
fn children(bed: &Bed) -> Vec<u32> {
    let mark = format!("BED={}\0", bed.dir.path().display());
    processes()
        .filter(|pid| cmdline(*pid) == "sleep\u{0}86321\u{0}")
        .filter(|pid| {
            let environ = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            String::from_utf8_lossy(&environ).contains(&mark)
        })
        .collect()
}

#[test]
fn stubborn_workers_and_their_children_end_with_their_generation() {
    let mut bed = Bed::new();
    bed.script("worker.sh", STUBBORN);
    let _agents = [
        bed.agent("a", &[]),
        bed.agent("b", &["a"]),
        bed.agent("c", &["a"]),
    ];
    let flags = ["--nnodes=1:3", "--loss-grace=100ms", "--stop-grace=500ms"];
    let mut a = bed.launch("a", &flags);
    let mut b = bed.launch("b", &flags);
    let mut c = bed.launch("c", &flags);
    let first = bed.until_runs_on(&["a", "b", "c"]);
    until("each has two children", || children(&bed).len() == 6);
    let old = children(&bed);

    // A node is lost: the others' workers end although they ignore it; so do the lost one's.
    b.kill();
    let second = bed.until_runs_on(&["a", "c"]);
    until("the next ones have their children", || {
        children(&bed).len() == 4
    });
    assert!(children(&bed).iter().all(|pid| !old.contains(pid)));
    for worker in &first {
        assert!(cmdline(worker.pid).is_empty() || second.contains(worker));
    }

    // Ctrl-C ends the rest within the grace.
    a.signal(libc::SIGINT);
    assert_eq!((a.code(), c.code()), (130, 130), "{}\n{}", a.log(), c.log());
    until("nothing is left", || {
        bed.worker_pids().is_empty() && children(&bed).is_empty()
    });
}

#[test]
fn children_that_outlive_their_workers_are_gone_at_a_good_end() {
    let mut bed = Bed::new();
    let script = STUBBORN.replace(r#": <"$BED/end""#, "exit 0");
    bed.script("worker.sh", &script);
    let mut alone = bed.run(
        "a",
        &["--standalone"],
        &["sh", bed.path("worker.sh").to_str().unwrap()],
    );
    assert_eq!(alone.code(), 0, "{}", alone.log());
    assert_eq!(children(&bed), Vec::<u32>::new());
}

#[test]
fn a_crash_loop_slows_down_and_ends_with_the_root_causes_code() {
    let mut bed = Bed::new();
    // Rank 1 fails, rank 0 would go on for ever.
    bed.script(
        "worker.sh",
        r#"
echo "$TORCHELASTIC_RESTART_COUNT $(date +%s%3N)" >>"$BED/starts-$RANK"
[ "$RANK" = 0 ] && exec sleep 1000
echo "$NODE" >"$BED/culprit"
echo "the last words of rank $RANK" >&2
exit 7
"#,
    );
    let _agents = [bed.agent("a", &[]), bed.agent("b", &["a"])];
    let flags = ["--nnodes=2", "--max-restarts=4", "--tee=2"];
    let mut launchers = [bed.launch("a", &flags), bed.launch("b", &flags)];
    for (launcher, node) in launchers.iter_mut().zip(["a", "b"]) {
        assert_eq!(launcher.code(), 7, "{}", launcher.log());
        let said = launcher.log();
        let culprit = std::fs::read_to_string(bed.path("culprit")).unwrap();
        let blames = format!("rank 1 on {} (", culprit.trim());
        assert!(
            said.contains(&blames) && said.contains("restarts are used up"),
            "{said}"
        );
        assert!(!said.contains("restart 5"), "{said}");
        if node == culprit.trim() {
            assert!(said.contains("    the last words of rank 1"), "{said}");
        }
    }
    let text = std::fs::read_to_string(bed.path("starts-1")).unwrap();
    let starts: Vec<(u32, u64)> = text
        .lines()
        .map(|l| {
            let (count, ms) = l.split_once(' ').unwrap();
            (count.parse().unwrap(), ms.parse().unwrap())
        })
        .collect();
    let counts: Vec<u32> = starts.iter().map(|s| s.0).collect();
    assert_eq!(counts, [0, 1, 2, 3, 4], "one start and four restarts");
    let gaps: Vec<Duration> = starts
        .windows(2)
        .map(|w| Duration::from_millis(w[1].1 - w[0].1))
        .collect();
    // Pauses of 0, 250, 500 and 1,000 ms: only the lower bounds are certain on a busy machine.
    for (gap, least) in gaps.iter().zip([0, 240, 490, 990]) {
        assert!(*gap >= Duration::from_millis(least), "{gaps:?}");
    }
    let kinds: Vec<String> = events(&bed.socket("a"))
        .iter()
        .filter(|e| e["event"] == "generation")
        .map(|e| e["kind"].as_str().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(
        kinds.last().map(String::as_str),
        Some("failed with code 7"),
        "{kinds:?}"
    );
    assert!(bed.worker_pids().is_empty());
}

/// Opens a file on a disk that stalls, once it is told to: the kernel ends nobody that waits for that.
const WAITS_FOR_A_DISK: &str = r#"
f="$BED/w/$$"
echo "$RANK $WORLD_SIZE $NODE $MUSTER_GENERATION_DIGEST $MUSTER_GENERATION" >"$f.new"
mv "$f.new" "$f"
until [ -e "$BED/over" ]; do
    [ -e "$BED/blocks-$NODE" ] && : >"$BED/disk/file"
    sleep 0.05
done
"#;

/// Whether the kernel lets no signal end this process now.
fn is_unkillable(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim_start());
    state.is_some_and(|state| state.starts_with('D'))
}

/// Told to leave, or not: the others go on without a node whose worker nothing ends, and it is gone once it can be.
fn a_worker_that_nothing_ends(told: bool) {
    let mut bed = Bed::new();
    let disk = bed.path("disk");
    if !stallable(std::slice::from_ref(&disk)) {
        return;
    }
    bed.script("worker.sh", WAITS_FOR_A_DISK);
    let names = ["a", "b", "c"];
    let _agents = [
        bed.agent("a", &[]),
        bed.agent("b", &["a"]),
        bed.agent("c", &["a"]),
    ];
    let graces = ["--stop-grace=500ms", "--loss-grace=100ms"];
    let flags = ["--nnodes=1:3", "--max-restarts=3", graces[0], graces[1]];
    let mut launchers: Vec<Proc> = names.iter().map(|n| bed.launch(n, &flags)).collect();
    let first = bed.until_runs_on(&names);
    let blocked = first.iter().find(|w| w.node == "c").unwrap().pid;
    let stalled = Stalled::new(&disk);
    std::fs::write(bed.path("blocks-c"), "").unwrap();
    until("nothing ends it", || is_unkillable(blocked));
    match told {
        true => launchers[2].signal(libc::SIGTERM),
        // The generation has to change for another reason.
        false => {
            let other = first.iter().find(|w| w.node == "b").unwrap().pid;
            let pid = nix::unistd::Pid::from_raw(other.try_into().unwrap());
            nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
        }
    }
    until("the others go on without it", || {
        let all = bed.workers().unwrap_or_default();
        let newer = |node| {
            let of = |w: &&crate::support::Worker| w.node == node && w.world == 2;
            all.iter()
                .find(of)
                .is_some_and(|w| w.generation > first[0].generation)
        };
        newer("a") && newer("b")
    });
    assert!(is_unkillable(blocked), "it was in nobody's way");
    std::fs::remove_file(bed.path("blocks-c")).unwrap();
    drop(stalled);
    until("it is gone", || !bed.worker_pids().contains(&blocked));
    // One that was left out joins again.
    let code = if told { 143 } else { 0 };
    if !told {
        bed.until_runs_on(&names);
    } else {
        assert_eq!(launchers[2].code(), code, "{}", launchers[2].log());
    }
    std::fs::write(bed.path("over"), "").unwrap();
    for (launcher, code) in launchers.iter_mut().zip([0, 0, code]) {
        assert_eq!(launcher.code(), code, "{}", launcher.log());
    }
}

#[test]
fn a_node_that_leaves_with_a_worker_that_nothing_ends_holds_nobody_up() {
    a_worker_that_nothing_ends(true);
}

#[test]
fn a_restart_waits_for_no_worker_that_nothing_ends() {
    a_worker_that_nothing_ends(false);
}

/// The folder for logs is on a disk that stalls: neither what runs there nor what is to be started there holds up the
/// others, and the node is back once its disk answers.
#[test]
fn a_folder_for_logs_that_hangs_holds_nobody_up() {
    let mut bed = Bed::new();
    let disk = bed.path("disk");
    if !stallable(std::slice::from_ref(&disk)) {
        return;
    }
    let names = ["a", "b", "c"];
    let _agents = [
        bed.agent("a", &[]),
        bed.agent("b", &["a"]),
        bed.agent("c", &["a"]),
    ];
    let logs = format!("--log-dir={}/logs", disk.display());
    let graces = ["--stop-grace=500ms", "--loss-grace=100ms", "--redirects=3"];
    let flags = ["--nnodes=1:3", graces[0], graces[1], graces[2]];
    let launch = |bed: &mut Bed, node: &str| match node {
        "c" => bed.launch(node, &[&flags[..], &[&logs]].concat()),
        _ => bed.launch(node, &flags),
    };
    let mut launchers: Vec<Proc> = names.iter().map(|n| launch(&mut bed, n)).collect();
    let first = bed.until_runs_on(&names);
    let stalled = Stalled::new(&disk);
    launchers.remove(1).kill();
    let old = first.iter().find(|w| w.node == "c").unwrap().pid;
    until("nothing of the generation before runs", || {
        !bed.worker_pids().contains(&old)
    });
    until("another goes on without it", || {
        let all = bed.workers().unwrap_or_default();
        all.iter().any(|w| w.node == "a" && w.world == 1)
    });
    drop(stalled);
    bed.until_runs_on(&["a", "c"]);
    let _open = bed.finish();
    for launcher in &mut launchers {
        assert_eq!(launcher.code(), 0, "{}", launcher.log());
    }
}
