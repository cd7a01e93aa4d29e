//! The two-node job: one dies. It goes on with a shared directory, with a witness, or where rank 0
//! survives; else it waits and says what would help.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::harness::{Bed, now_ns};

const FLAGS: [&str; 1] = ["--nnodes=1:2"];

/// Two nodes that train together, and the node of rank 0 first.
fn two(bed: &mut Bed, first: usize) -> (usize, usize) {
    for node in [0, 1] {
        bed.run(node, first);
    }
    let group = bed.group(&[0, 1], 0);
    (group.rank0(), 1 - group.rank0())
}

#[test]
fn a_shared_directory_lets_either_node_go_on() {
    let store = tempfile::tempdir().unwrap();
    let dir = format!("--store={}", store.path().display());
    let mut bed = Bed::new(&[FLAGS[0], &dir]);
    let (zero, one) = two(&mut bed, 0);
    // Rank 0's node dies, comes back as the newcomer, and sees the other die.
    let at = bed.kill(zero);
    let alone = bed.group(&[one], at);
    assert_eq!(alone.ranks[0].restart, 1);
    bed.run(zero, 0);
    let again = bed.group(&[0, 1], alone.began());
    assert_eq!(again.rank0(), one, "rank 0 stays with the one that stayed");
    let at = bed.kill(one);
    bed.group(&[zero], at);
    bed.order(None, 0);
    assert_eq!(bed.ended(zero), Some(0));
}

#[test]
fn a_witness_lets_the_other_go_on_when_rank_0_dies() {
    let mut bed = Bed::new(&FLAGS);
    bed.agent(2);
    let (zero, one) = two(&mut bed, 2);
    let at = bed.kill(zero);
    bed.group(&[one], at);
    bed.run(zero, 2);
    bed.group(&[0, 1], at);
    bed.order(None, 0);
    assert_eq!((bed.ended(zero), bed.ended(one)), (Some(0), Some(0)));
}

#[test]
fn rank_0_goes_on_alone() {
    let mut bed = Bed::new(&FLAGS);
    let (zero, one) = two(&mut bed, 0);
    let at = bed.kill(one);
    bed.group(&[zero], at);
    bed.order(None, 0);
    assert_eq!(bed.ended(zero), Some(0));
    // The node that died may come back without having heard of the end, and is told it then.
    assert_eq!((bed.state_folders(zero), bed.state_folders(one)), (1, 1));
}

/// Rank 0's node dies, nobody else can decide: the other stops its worker and says what would help.
fn stranded(bed: &mut Bed) -> (usize, usize) {
    let (zero, one) = two(bed, 0);
    let worker = bed.group(&[0, 1], 0).pid(one);
    bed.kill(zero);
    bed.until("the other says what would help", |bed| {
        let said = bed.said(one);
        said.contains("the job cannot go on") && said.contains("--store")
    });
    bed.until("its worker ends", |bed| !bed.is_alive(worker));
    let waiting = bed.job(one)["waiting"].to_string();
    assert!(waiting.contains("cannot go on"), "{waiting}");
    (zero, one)
}

#[test]
fn the_other_waits_and_can_be_cancelled() {
    let mut bed = Bed::new(&FLAGS);
    let (_, one) = stranded(&mut bed);
    bed.signal(bed.launcher_pid(one), Signal::SIGINT);
    assert_eq!(bed.ended(one), Some(130));
}

#[test]
fn the_other_leaves_at_once_when_it_is_told_to() {
    let mut bed = Bed::new(&FLAGS);
    let (_, one) = stranded(&mut bed);
    let told = Instant::now();
    bed.signal(bed.launcher_pid(one), Signal::SIGTERM);
    assert_eq!(bed.ended(one), Some(143));
    // Not after the 30 s of --stop-grace: nothing runs here that could still save.
    assert!(
        told.elapsed() < Duration::from_secs(15),
        "{:?}",
        told.elapsed()
    );
    let said = bed.said(one);
    assert!(
        said.contains("left the job, and nothing runs here any more"),
        "{said}"
    );
}

#[test]
fn the_other_goes_on_when_rank_0_comes_back() {
    let mut bed = Bed::new(&FLAGS);
    let (zero, one) = stranded(&mut bed);
    let before = bed.events().len();
    bed.run(zero, 0);
    let last = bed.events()[before - 1].t;
    bed.group(&[0, 1], last);
    bed.order(None, 0);
    assert_eq!((bed.ended(zero), bed.ended(one)), (Some(0), Some(0)));
}

#[test]
fn the_other_goes_on_by_an_operators_word_and_rank_0_joins_when_it_comes_back() {
    let mut bed = Bed::new(&FLAGS);
    let (zero, one) = stranded(&mut bed);
    assert!(
        bed.said(one).contains("muster job continue job"),
        "{}",
        bed.said(one)
    );
    let dead = format!("n{zero}");
    // Not by mistake: what may be lost is said first, and every node that is given up is named.
    let (done, said) = bed.go_on(one, &["--dead", dead.as_str()]);
    assert!(
        !done && said.contains("What may be lost") && said.contains("--yes"),
        "{said}"
    );
    let (done, said) = bed.go_on(one, &["--yes"]);
    assert!(
        !done && said.contains("--dead") && said.contains(&dead),
        "{said}"
    );
    let at = now_ns();
    let (done, said) = bed.go_on(one, &["--yes", "--dead", dead.as_str()]);
    assert!(done, "{said}");
    bed.until("the other trains alone", |bed| {
        let mut starts = bed.events().into_iter();
        let last = starts.rfind(|e| e.event == "start" && e.t > at);
        last.is_some_and(|e| e.node == format!("n{one}") && e.world == 1)
    });
    let causes = bed.history(one, "generation");
    assert_eq!(causes.last().unwrap()["cause"], "continued", "{causes:?}");
    // Rank 0's node, whose vote alone was the majority of what was given up, comes back.
    let at = now_ns();
    bed.run(zero, 0);
    bed.until("both train", |bed| {
        let new = bed
            .events()
            .into_iter()
            .filter(|e| e.event == "start" && e.t > at);
        let pair: Vec<_> = new
            .filter(|e| e.world == 2 && bed.is_alive(e.pid))
            .collect();
        pair.len() == 2 && pair[0].master == pair[1].master
    });
    let (a, b) = (bed.job(zero), bed.job(one));
    assert_eq!(a["digest"], b["digest"]);
    assert_eq!(b["cause"], "nodes_joined");
    bed.order(None, 0);
    assert_eq!((bed.ended(zero), bed.ended(one)), (Some(0), Some(0)));
}
