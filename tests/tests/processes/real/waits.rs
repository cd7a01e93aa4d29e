//! Jobs of which nothing runs, for lack of nodes: what is said of them on each node, and how they end or go on.

use nix::sys::signal::Signal;

use crate::harness::Bed;

/// Agents on the first `n` nodes.
fn agents(n: usize, flags: &[&str]) -> Bed {
    let mut bed = Bed::of(n, flags);
    (0..n).for_each(|node| bed.agent(node));
    bed
}

/// SIGKILL to the node's launcher alone: its agent lives.
fn kill_launcher(bed: &mut Bed, node: usize) {
    bed.signal(bed.launcher_pid(node), Signal::SIGKILL);
    bed.exit(node);
}

#[test]
fn every_node_of_a_job_below_its_minimum_says_so() {
    let mut bed = agents(3, &["--nnodes=3"]);
    (0..3).for_each(|node| bed.attach(node));
    let group = bed.group(&[0, 1, 2], 0);
    let lost = group.nodes()[2];
    kill_launcher(&mut bed, lost);
    // The lost one's agent, too, which no launcher asks any more.
    for node in group.nodes() {
        bed.until("it says that the job waits", |bed| {
            let job = bed.job(node);
            job["kind"] == "waits" && job["nodes"] == 2 && job["world"] == 0
        });
    }
    for node in &group.nodes()[..2] {
        bed.until("its launcher was told", |bed| {
            bed.said(*node).contains("waiting for 1 more of 3 nodes. ")
        });
    }
    let waited = std::time::Duration::from_secs(3);
    std::thread::sleep(waited);
    bed.attach(lost);
    let again = bed.group(&[0, 1, 2], group.began());
    // What the change took, without that.
    bed.until("all know its times", |bed| {
        again.nodes().into_iter().all(|node| {
            let (digest, changed) = (
                bed.job(node)["digest"].clone(),
                bed.history(node, "changed"),
            );
            let newest = changed.iter().find(|e| e["digest"] == digest);
            let total = newest.and_then(|e| e["total_ms"].as_f64());
            total.is_some_and(|ms| ms < waited.as_secs_f64() * 1e3)
        })
    });
    for node in again.nodes() {
        assert_eq!(bed.job(node)["kind"], "runs");
        let told = |e: &&serde_json::Value| e["text"].to_string().contains("1 more of 3 nodes. ");
        let waits = bed.history(node, "waiting");
        let since =
            |e: &&serde_json::Value| e["time_ms"].as_u64() > Some(group.began() / 1_000_000);
        let count = waits.iter().filter(since).filter(told).count();
        assert_eq!(count, 1, "n{node}: {waits:?}");
    }
    bed.order(None, 0);
    for node in 0..3 {
        assert_eq!(bed.ended(node), Some(0));
    }
}

fn store() -> (tempfile::TempDir, String) {
    let store = tempfile::tempdir().unwrap();
    let flag = format!("--store={}", store.path().display());
    (store, flag)
}

#[test]
fn a_job_with_a_store_moves_to_another_node_at_once_where_its_agent_lives() {
    let (_store, flag) = store();
    let mut bed = agents(2, &["--nnodes=1", &flag]);
    bed.attach(0);
    let first = bed.group(&[0], 0);
    kill_launcher(&mut bed, 0);
    bed.until("its agent sees it", |bed| bed.job(0)["kind"] == "deserted");
    let moved = std::time::Instant::now();
    bed.attach(1);
    let next = bed.group(&[1], first.began());
    // Without its agent's word it would wait for 32 s.
    assert!(moved.elapsed() < std::time::Duration::from_secs(10));
    assert_eq!(next.ranks[0].restart, 1, "it is the same job");
    let waits = bed.history(1, "waiting");
    let guessed = |e: &&serde_json::Value| e["text"].to_string().contains("sign of life");
    assert_eq!(waits.iter().filter(guessed).count(), 0, "{waits:?}");
    bed.order(None, 0);
    assert_eq!(bed.ended(1), Some(0));
}

#[test]
fn a_job_with_a_store_is_cancelled_though_all_its_launchers_are_gone() {
    let (_store, flag) = store();
    let mut bed = agents(3, &["--nnodes=2", &flag]);
    [0, 1].into_iter().for_each(|node| bed.attach(node));
    let first = bed.group(&[0, 1], 0);
    [0, 1]
        .into_iter()
        .for_each(|node| kill_launcher(&mut bed, node));
    for node in [0, 1] {
        bed.until("its agent sees it", |bed| {
            bed.job(node)["kind"] == "deserted"
        });
    }
    // An agent that has no part in it says where that can be said.
    let (done, said) = bed.muster(2, &["cancel", "job"]);
    assert!(!done && said.contains("--store"), "{said}");
    let (done, said) = bed.muster(1, &["cancel", "job", "--wait"]);
    assert!(done, "{said}");
    for node in [0, 1] {
        bed.until("it is over", |bed| bed.job(node)["kind"] == "cancelled");
    }
    // What is started then is another life of it.
    [0, 2].into_iter().for_each(|node| bed.attach(node));
    let next = bed.group(&[0, 2], first.began());
    assert_eq!(next.ranks[0].restart, 0);
    // From any node, and that it is over shows there, too.
    let (done, said) = bed.muster(1, &["cancel", "job", "--wait"]);
    assert!(done, "{said}");
    for node in [0, 2] {
        assert_eq!(bed.ended(node), Some(130));
    }
}

#[test]
fn a_job_is_cancelled_though_the_nodes_that_went_on_with_it_are_gone_with_their_agents() {
    let (store, flag) = store();
    let mut bed = agents(2, &["--nnodes=1", &flag]);
    let mut began = 0;
    for node in [1, 0] {
        bed.attach(node);
        began = bed.group(&[node], began).began();
        bed.kill_agent(node);
        kill_launcher(&mut bed, node);
    }
    // It knows of the generation before alone.
    bed.agent(1);
    let place = store.path().to_str().unwrap();
    let (done, said) = bed.muster(1, &["cancel", "job", "--wait", "--store", place]);
    assert!(done, "{said}");
    bed.until("it is over", |bed| bed.job(1)["kind"] == "cancelled");
}

#[test]
fn a_job_that_has_not_formed_is_cancelled_from_any_node() {
    let mut bed = agents(4, &["--nnodes=3"]);
    [0, 1].into_iter().for_each(|node| bed.attach(node));
    for node in [0, 1] {
        bed.until("it waits", |bed| {
            bed.said(node).contains("waiting for 1 more")
        });
        assert_eq!(bed.job(node)["kind"], "forming");
    }
    let mut said = String::new();
    bed.until("an agent that nobody asked knows of it", |bed| {
        let (done, text) = bed.muster(3, &["cancel", "job", "--wait"]);
        said = text;
        done
    });
    for node in [0, 1] {
        assert_eq!(bed.ended(node), Some(130), "{said}");
    }
    let (done, said) = bed.muster(3, &["cancel", "another"]);
    assert!(!done, "{said}");
}

#[test]
fn nodes_whose_ranks_have_finished_say_for_whom_they_wait() {
    let mut bed = agents(3, &["--nnodes=3"]);
    (0..3).for_each(|node| bed.attach(node));
    let group = bed.group(&[0, 1, 2], 0);
    // Its ranks exit, and nobody is there to see it.
    let last = group.nodes()[2];
    bed.signal(bed.launcher_pid(last), Signal::SIGSTOP);
    bed.order(None, 0);
    let whom = format!("ends when those on n{last} (");
    for node in &group.nodes()[..2] {
        bed.until("its console says so", |bed| bed.said(*node).contains(&whom));
        let row = bed.job(*node);
        assert!(
            row["waiting"].as_str().is_some_and(|w| w.contains(&whom)),
            "{row}"
        );
    }
    bed.signal(bed.launcher_pid(last), Signal::SIGCONT);
    for node in 0..3 {
        assert_eq!(bed.ended(node), Some(0));
    }
}

#[test]
fn a_node_that_missed_the_end_of_its_job_starts_it_again_with_the_others() {
    let mut bed = Bed::of(3, &["--nnodes=2:3"]);
    (0..3).for_each(|node| bed.run_among_all(node));
    let first = bed.group(&[0, 1, 2], 0);
    let [one, other, lost] = first.nodes()[..] else {
        panic!("three nodes");
    };
    bed.kill(lost);
    let without = bed.group(&[one, other], first.began());
    bed.signal(bed.launcher_pid(one), Signal::SIGINT);
    for node in [one, other] {
        assert_eq!(bed.ended(node), Some(130));
    }
    (0..3).for_each(|node| bed.run_among_all(node));
    bed.group(&[0, 1, 2], without.began());
    bed.order(None, 0);
    for node in 0..3 {
        assert_eq!(bed.ended(node), Some(0));
        assert_eq!(bed.state_folders(node), 0, "all have heard of this end");
    }
}

/// Of two nodes that were both killed the one with rank 0 is the majority: it goes on alone.
#[test]
fn the_first_of_two_nodes_goes_on_alone_after_both_were_killed() {
    let mut bed = Bed::of(2, &["--nnodes=1:2"]);
    (0..2).for_each(|node| bed.run_among_all(node));
    let both = bed.group(&[0, 1], 0);
    bed.kill_together(&[0, 1]);
    let first = both.rank0();
    bed.run_among_all(first);
    bed.group(&[first], both.began());
    bed.order(None, 0);
    assert_eq!(bed.ended(first), Some(0));
}
