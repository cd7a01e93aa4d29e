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

/// Something is lost between two of the three, given by the place of their ranks.
fn check(places: [usize; 2], how: fn(&Hosts, usize, usize)) {
    let (bed, group) = three();
    let pair = places.map(|place| group.nodes()[place]);
    let left_out = cut(&bed, &group, &pair, |h| how(h, pair[0], pair[1]));
    heal(bed, left_out);
}

/// Rank 0's node reaches both.
#[test]
fn two_nodes_that_do_not_reach_each_other() {
    check([1, 2], Hosts::cut_pair);
}

#[test]
fn rank_0s_node_and_another_do_not_reach_each_other() {
    check([0, 2], Hosts::cut_pair);
}

#[test]
fn a_link_that_is_cut_one_way() {
    check([2, 1], Hosts::cut_one_way);
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
