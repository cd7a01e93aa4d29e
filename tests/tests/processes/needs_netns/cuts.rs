//! Links that are cut without a sound, between some nodes of a job or around one.
//!
//! In each case one node is left out, the others go on without it, nobody trains twice, and all are
//! together again when the link is whole.

use std::time::Duration;

use super::without;
use crate::harness::{Bed, Group, Hosts, now_ns};

fn three() -> (Bed, Group) {
    let mut bed = Bed::on_hosts(&["--nnodes=2:3", "--join-quiet=200ms"]);
    for node in 1..4 {
        bed.agent(node);
    }
    for node in 1..4 {
        bed.attach(node);
    }
    let group = bed.group(&[1, 2, 3], 0);
    (bed, group)
}

/// Cuts, and returns who is left out: one of `candidates`.
fn cut(bed: &Bed, group: &Group, candidates: &[usize], how: impl FnOnce(&Hosts)) -> usize {
    let at = now_ns();
    how(bed.hosts());
    let mut left_out = None;
    bed.until("two of the three go on", |bed| {
        left_out = candidates
            .iter()
            .copied()
            .find(|n| bed.newest(&without(*n), at).is_some());
        left_out.is_some()
    });
    let left_out = left_out.unwrap();
    let two = bed.group(&without(left_out), at);
    // The one that is left out has no lease, and so no worker.
    bed.runs_alone(&two, &[1, 2, 3]);
    let order = group.nodes();
    let stay: Vec<usize> = order.into_iter().filter(|n| *n != left_out).collect();
    assert_eq!(two.nodes(), stay, "survivors keep their order");
    let took = Duration::from_nanos(two.began() - at);
    let made = two.generation - group.generation;
    println!("n{left_out} is left out after {took:?}");
    assert_eq!(made, 1, "it is not let in and dropped again");
    assert!(took < Duration::from_secs(30), "{took:?}");
    left_out
}

/// Heals; the one that was left out is the newest member, and the job ends well everywhere.
fn heal(mut bed: Bed, left_out: usize) {
    let at = now_ns();
    bed.hosts().heal();
    let three = bed.group(&[1, 2, 3], at);
    assert_eq!(three.nodes()[2], left_out);
    bed.order(None, 0);
    for node in 1..4 {
        assert_eq!(bed.ended(node), Some(0), "n{node}");
    }
}

#[test]
fn two_nodes_that_do_not_reach_each_other() {
    let (bed, group) = three();
    let nodes = group.nodes();
    // Rank 0's node reaches both and stays.
    let pair = [nodes[1], nodes[2]];
    let left_out = cut(&bed, &group, &pair, |h| h.cut_pair(pair[0], pair[1]));
    heal(bed, left_out);
}

#[test]
fn rank_0s_node_and_another_do_not_reach_each_other() {
    let (bed, group) = three();
    let nodes = group.nodes();
    let pair = [nodes[0], nodes[2]];
    let left_out = cut(&bed, &group, &pair, |h| h.cut_pair(pair[0], pair[1]));
    heal(bed, left_out);
}

#[test]
fn a_link_that_is_cut_one_way() {
    let (bed, group) = three();
    let nodes = group.nodes();
    let pair = [nodes[1], nodes[2]];
    let left_out = cut(&bed, &group, &pair, |h| h.cut_one_way(pair[1], pair[0]));
    heal(bed, left_out);
}

#[test]
fn rank_0s_link_is_cut() {
    let (bed, group) = three();
    let zero = group.rank0();
    let left_out = cut(&bed, &group, &[zero], |h| h.cut(zero));
    let said = bed.said(zero);
    assert!(said.contains("the job cannot go on here"), "{said}");
    assert!(!bed.is_alive(group.pid(zero)), "it trains without a lease");
    heal(bed, left_out);
}
