//! Machines that lose power, and come back under their old addresses without anything that they had.

use std::time::Duration;

use super::without;
use crate::harness::{Bed, now_ns};

/// The last one goes on with two that said nothing for long, and of which nothing is left. Their agents are inside
/// their launchers, or daemons.
fn check(embedded: bool) {
    let mut bed = Bed::on_hosts(&["--nnodes=2:3"]);
    let start = |bed: &mut Bed, node: usize| match embedded {
        true => bed.run(node, 1),
        false => {
            bed.agent(node);
            bed.attach(node);
        }
    };
    for node in 1..4 {
        start(&mut bed, node);
    }
    bed.group(&[1, 2, 3], 0);
    for node in without(1) {
        // Nothing answers for it, and nothing of it says goodbye.
        bed.hosts().cut(node);
        bed.kill(node);
        bed.lose_state(node);
    }
    bed.until("nobody can decide", |bed| {
        bed.said(1).contains("the job cannot go on")
    });
    std::thread::sleep(Duration::from_secs(6));
    let at = now_ns();
    bed.hosts().heal();
    for node in without(1) {
        start(&mut bed, node);
    }
    bed.group(&[1, 2, 3], at);
    bed.order(None, 0);
    for node in 1..4 {
        assert_eq!(bed.ended(node), Some(0), "n{node}");
    }
}

#[test]
fn agents_inside_launchers_take_the_place_of_those_before_them() {
    check(true);
}

#[test]
fn daemons_take_the_place_of_those_before_them() {
    check(false);
}
