//! One job that was founded twice, by groups that could not see each other (R10).

use crate::support::{Bed, JOB, events, until};
use muster_protocol::local::Query;

/// Starts these groups apart, joins them by an agent that knows one of each, and requires one
/// generation of all launchers.
fn meet(groups: &[&[&str]]) {
    let mut bed = Bed::new();
    let mut agents = Vec::new();
    let mut launchers = Vec::new();
    let nodes: Vec<&str> = groups.concat();
    let flags = format!("--nnodes=1:{}", nodes.len());
    for group in groups {
        let first = group[0];
        for node in *group {
            let others: &[&str] = if *node == first { &[] } else { &[first] };
            agents.push(bed.agent(node, others));
        }
        for node in *group {
            let socket = bed.socket(node);
            until("the group is connected", || {
                let nodes = crate::support::query(&socket, Query::Nodes);
                nodes.is_some_and(|n| n.as_array().is_some_and(|n| n.len() == group.len()))
            });
        }
        for node in *group {
            launchers.push(bed.launch(node, &[&flags, "--join-quiet=100ms", "--stop-grace=1s"]));
        }
        until("the group trains", || {
            let workers = bed.workers().unwrap_or_default();
            let mine: Vec<_> = workers
                .iter()
                .filter(|w| group.contains(&w.node.as_str()))
                .collect();
            mine.len() == group.len() && mine.iter().all(|w| w.world as usize == group.len())
        });
    }
    let apart = bed.workers().unwrap();
    let lineages: std::collections::BTreeSet<&str> =
        apart.iter().map(|w| w.digest.as_str()).collect();
    assert_eq!(lineages.len(), groups.len(), "{apart:?}");

    let firsts: Vec<&str> = groups.iter().map(|g| g[0]).collect();
    agents.push(bed.agent("between", &firsts));
    let together = bed.until_runs_on(&nodes);
    assert!(
        together
            .iter()
            .all(|w| !lineages.contains(w.digest.as_str()))
    );
    let merged = nodes.iter().any(|node| {
        events(&bed.socket(node))
            .iter()
            .any(|e| e["cause"] == "merged")
    });
    assert!(merged, "no agent saw a merge");
    for launcher in &mut launchers {
        assert!(launcher.is_alive(), "{}", launcher.log());
    }
    let _open = bed.finish();
    for launcher in &mut launchers {
        assert_eq!(launcher.code(), 0, "{JOB}: {}", launcher.log());
    }
}

#[test]
fn two_single_founders_become_one_job() {
    meet(&[&["a"], &["b"]]);
}

#[test]
fn two_groups_become_one_job() {
    meet(&[&["a", "b"], &["c", "d"]]);
}

#[test]
fn three_founders_become_one_job() {
    meet(&[&["a"], &["b"], &["c"]]);
}
