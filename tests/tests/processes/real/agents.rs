//! Three nodes with an agent each, and launchers that attach to it.

use std::time::Duration;

use nix::sys::signal::Signal;

use crate::harness::{Bed, Group, now_ns};

fn three(flags: &[&str]) -> (Bed, Group) {
    with_agents(3, 3, flags)
}

/// So many agents, and launchers at the first of them.
fn with_agents(agents: usize, launchers: usize, flags: &[&str]) -> (Bed, Group) {
    let mut bed = Bed::new(flags);
    (0..agents).for_each(|node| bed.agent(node));
    (0..launchers).for_each(|node| bed.attach(node));
    let nodes: Vec<usize> = (0..launchers).collect();
    let group = bed.group(&nodes, 0);
    (bed, group)
}

fn others(of: usize) -> Vec<usize> {
    (0..3).filter(|n| *n != of).collect()
}

#[test]
fn an_agent_that_dies_alone_disturbs_nobody() {
    let (mut bed, group) = three(&["--nnodes=2:3"]);
    // Rank 0's: it leads.
    for node in [group.rank0(), group.nodes()[2]] {
        bed.kill_agent(node);
        let witness = others(node)[0];
        bed.until("the others see that the agent is away", |bed| {
            let nodes = bed.query(witness, muster_protocol::local::Query::Nodes);
            let nodes = nodes.unwrap_or_default();
            let mut all = nodes.as_array().into_iter().flatten();
            all.any(|n| n["state"] == "away")
        });
        bed.agent(node);
        bed.until("the launcher is back at its agent", |bed| {
            let job = bed.job(node);
            job["launcher_here"] == true && job["generation"] == group.generation
        });
    }
    for rank in &group.ranks {
        assert!(bed.is_alive(rank.pid), "{rank:?} was restarted");
    }
    let starts = bed.events().into_iter().filter(|e| e.event == "start");
    assert_eq!(starts.count(), 3);
    // The job can still change: a node dies with everything.
    let dies = group.nodes()[1];
    let at = bed.kill(dies);
    bed.group(&others(dies), at);
    bed.order(None, 0);
    for node in others(dies) {
        assert_eq!(bed.ended(node), Some(0), "n{node}");
    }
}

/// The agent of a node ends, and is started again after so long; the launcher is back at it.
fn restart_agent(bed: &mut Bed, node: usize, away: Duration, group: &Group) {
    bed.kill_agent(node);
    std::thread::sleep(away);
    bed.agent(node);
    bed.until("the launcher is back at its agent", |bed| {
        let job = bed.job(node);
        job["launcher_here"] == true && job["generation"] == group.generation
    });
}

fn runs_undisturbed(bed: &Bed, group: &Group) {
    for rank in &group.ranks {
        assert!(bed.is_alive(rank.pid), "{rank:?} was restarted");
    }
    has_not_restarted(bed, group);
}

fn finishes_undisturbed(bed: &mut Bed, group: &Group) {
    bed.order(None, 0);
    for node in group.nodes() {
        assert_eq!(bed.ended(node), Some(0), "n{node}");
    }
    has_not_restarted(bed, group);
}

fn has_not_restarted(bed: &Bed, group: &Group) {
    let starts = bed.events().into_iter().filter(|e| e.event == "start");
    assert_eq!(starts.count(), group.ranks.len());
}

/// An upgrade of the agents, one after the other, while one more node waits for a place.
#[test]
fn agents_that_are_restarted_beside_a_waiting_spare_cost_no_worker() {
    let (mut bed, group) = with_agents(3, 2, &["--nnodes=2:2"]);
    bed.attach(2);
    bed.until("the third node waits", |bed| {
        bed.job(2)["launcher_here"] == true && bed.job(2)["waiting"].is_string()
    });
    for node in 0..3 {
        restart_agent(&mut bed, node, Duration::from_millis(300), &group);
        runs_undisturbed(&bed, &group);
    }
    finishes_undisturbed(&mut bed, &group);
}

/// Nobody else votes: each agent alone is no majority, or just one.
#[test]
fn either_agent_of_two_nodes_may_be_away_for_longer_than_a_lease() {
    let (mut bed, group) = with_agents(2, 2, &["--nnodes=1:2"]);
    let other = 1 - group.rank0();
    for node in [group.rank0(), other] {
        restart_agent(&mut bed, node, Duration::from_secs(4), &group);
        runs_undisturbed(&bed, &group);
    }
    finishes_undisturbed(&mut bed, &group);
}

/// Launchers that were killed left a job on all agents. A node that an operator drains has left all the same.
#[test]
fn a_drained_node_has_left_though_an_old_job_of_it_is_known() {
    let (mut bed, _group) = three(&["--nnodes=2:3"]);
    for node in 0..3 {
        let pid = bed.launcher_pid(node);
        bed.signal(pid, Signal::SIGKILL);
        bed.exit(node);
    }
    let drained = 1;
    bed.drain(drained);
    bed.until("the agent has ended", |bed| {
        bed.query(drained, muster_protocol::local::Query::Status)
            .is_none()
    });
    for node in others(drained) {
        bed.until("the others know that it has left", |bed| {
            let state = bed.peer(node, drained)["state"].clone();
            assert_ne!(state, "lost", "n{node}");
            state == "left"
        });
        let log = std::fs::read_to_string(bed.path(&format!("n{node}.agent.log"))).unwrap();
        let lost = |line: &&str| line.contains(r#""level":"WARN""#) && line.contains(r#""lost""#);
        assert_eq!(log.lines().find(lost), None, "n{node}");
    }
}

/// Of three nodes so many lose agent and state directory; their launchers live.
fn identities_are_lost(lost: usize, flags: &[&str]) {
    let (mut bed, group) = three(flags);
    let lose = &group.nodes()[..lost];
    for node in lose {
        bed.kill_agent(*node);
        bed.lose_state(*node);
    }
    let at = now_ns();
    for node in lose {
        bed.agent(*node);
    }
    let again = bed.group(&[0, 1, 2], at);
    // Far less than `agent_grace`, for which the lost identities would be waited for.
    assert!(again.began() - at < 8_000_000_000, "{again:?}");
    bed.order(None, 0);
    for node in 0..3 {
        assert_eq!(bed.ended(node), Some(0), "n{node}");
    }
    // Nothing of it is in the way of the next life.
    std::fs::remove_file(bed.path("control/exit")).unwrap();
    let at = now_ns();
    for node in 0..3 {
        bed.attach(node);
    }
    bed.group(&[0, 1, 2], at);
}

#[test]
fn agents_that_come_back_without_their_state_do_not_hold_a_job_up() {
    for lost in 1..=3 {
        identities_are_lost(lost, &["--nnodes=2:3"]);
    }
}

#[test]
fn agents_of_a_job_with_a_store_that_come_back_without_their_state_do_not_hold_it_up() {
    for lost in [1, 3] {
        let store = tempfile::tempdir().unwrap();
        let flag = format!("--store={}", store.path().display());
        identities_are_lost(lost, &["--nnodes=2:3", &flag]);
    }
}

#[test]
fn an_agent_that_is_told_to_stop_drains_its_node() {
    let (mut bed, group) = three(&["--nnodes=1:3"]);
    let nodes = group.nodes();
    let at = now_ns();
    bed.signal(bed.agent_pid(nodes[0]), Signal::SIGTERM);
    let two = bed.group(&others(nodes[0]), at);
    assert_eq!(two.nodes(), nodes[1..]);
    assert_eq!(bed.ended(nodes[0]), Some(143));
    assert_eq!(bed.agent_exit(nodes[0]), Some(0));
    // The same by an operator's order.
    bed.drain(nodes[1]);
    let one = bed.group(&[nodes[2]], two.began());
    assert_eq!(one.nodes(), [nodes[2]]);
    assert_eq!(bed.ended(nodes[1]), Some(143));
    assert_eq!(bed.agent_exit(nodes[1]), Some(0));
    bed.order(None, 0);
    assert_eq!(bed.ended(nodes[2]), Some(0));
}

/// Agent and launcher are stopped, each a process of its own: nothing of the node answers, and
/// nothing is closed.
#[test]
fn a_node_whose_agent_and_launcher_are_stopped_is_lost_and_comes_back() {
    let (mut bed, group) = three(&["--nnodes=2:3", "--join-quiet=200ms"]);
    let silent = group.nodes()[2];
    let leader = group.rank0();
    let name = bed.status(silent)["node"].clone();
    let at = now_ns();
    for pid in [bed.agent_pid(silent), bed.launcher_pid(silent)] {
        bed.signal(pid, Signal::SIGSTOP);
    }
    bed.until("the leader misses the node", |bed| {
        let nodes = bed.query(leader, muster_protocol::local::Query::Nodes);
        let nodes = nodes.unwrap_or_default();
        let mut all = nodes.as_array().into_iter().flatten();
        all.any(|n| n["node"] == name && n["state"] == "lost")
    });
    let missed = Duration::from_nanos(now_ns() - at);
    let two = bed.group(&others(silent), at);
    let took = Duration::from_nanos(two.began() - at);
    println!("missed after {missed:?}, the survivors' workers began after {took:?}");
    assert!(
        missed < Duration::from_secs(25),
        "{missed:?}; suspect_after is 2 s"
    );

    let at = now_ns();
    for pid in [bed.agent_pid(silent), bed.launcher_pid(silent)] {
        bed.signal(pid, Signal::SIGCONT);
    }
    // No worker of an older generation runs on any of the three by then.
    let three = bed.group(&[0, 1, 2], at);
    assert_eq!(three.nodes()[2], silent, "it comes back as a newcomer");
    assert!(three.generation > two.generation);
    bed.order(None, 0);
    for node in 0..3 {
        assert_eq!(bed.ended(node), Some(0), "n{node}");
    }
}

#[test]
fn a_node_dies_with_agent_launcher_and_worker() {
    let (mut bed, group) = three(&["--nnodes=2:3"]);
    let zero = group.rank0();
    let at = bed.kill(zero);
    let two = bed.group(&others(zero), at);
    assert_eq!(two.nodes(), group.nodes()[1..]);
    // Each generation is in the history of every member with its cause and the time of its phases,
    // whoever led it: generation 1 was led by the node that is dead now.
    let leader = two.rank0();
    let times = |bed: &Bed, node| -> Vec<(String, String)> {
        let changed = bed.history(node, "changed");
        let whole = changed.iter().filter(|e| {
            e["complete"] == true && e["start_ms"].as_f64() > Some(0.0) && e["total_ms"].is_f64()
        });
        let shown = |e: &serde_json::Value| {
            let ms = ["detect", "decide", "stop", "start", "total"]
                .map(|p| e[format!("{p}_ms")].clone());
            (e["digest"].to_string(), format!("{ms:?}"))
        };
        whole.map(shown).collect()
    };
    for node in others(zero) {
        bed.until("the history has the changes", |bed| {
            times(bed, node).len() == 2
        });
    }
    let [a, b] = others(zero)[..] else {
        panic!("three nodes")
    };
    assert_eq!(
        times(&bed, a),
        times(&bed, b),
        "the leader's times on every node"
    );
    let generations = bed.history(leader, "generation");
    let causes: Vec<&str> = generations
        .iter()
        .filter_map(|e| e["cause"].as_str())
        .collect();
    assert_eq!(causes, ["formed", "nodes_lost"]);
    bed.agent(zero);
    bed.attach(zero);
    let three = bed.group(&[0, 1, 2], two.began());
    assert_eq!(three.nodes()[2], zero);
    bed.order(None, 0);
    for node in 0..3 {
        assert_eq!(bed.ended(node), Some(0), "n{node}");
    }
}

#[test]
fn the_times_of_a_leader_that_dies_too_early_are_those_that_the_others_saw() {
    let mut bed = Bed::new(&["--nnodes=2:4"]);
    for node in 0..4 {
        bed.agent(node);
    }
    for node in 0..4 {
        bed.attach(node);
    }
    let group = bed.group(&[0, 1, 2, 3], 0);
    let [zero, one, two, three] = group.nodes()[..] else {
        panic!("four nodes: {group:?}")
    };
    // One launcher starts nothing any more, so the next generation never runs whole.
    bed.signal(bed.launcher_pid(three), Signal::SIGSTOP);
    bed.kill(zero);
    bed.until("the next generation is decided and begins", |bed| {
        bed.events().iter().any(|e| {
            e.event == "start" && e.generation > group.generation && e.node == format!("n{two}")
        })
    });
    bed.kill(one);
    bed.until("what was seen of it is told", |bed| {
        let changed = bed.history(two, "changed");
        changed.iter().any(|e| {
            e["complete"] == false && e["decide_ms"].as_f64() > Some(0.0) && e["start_ms"] == 0.0
        })
    });
}
