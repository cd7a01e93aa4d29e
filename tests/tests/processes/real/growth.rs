//! How a job forms and grows: how soon, and by how many generations.

use std::time::Duration;

use crate::harness::{Bed, Group, now_ns, started};

/// From `since` to the start of the group's last worker, to a hundredth of a second.
fn took(group: &Group, since: u64) -> Duration {
    let starts = group.ranks.iter().map(|r| started(r.pid).unwrap());
    Duration::from_nanos(starts.max().unwrap().saturating_sub(since))
}

fn finish(mut bed: Bed, nodes: usize) {
    bed.order(None, 0);
    for node in 0..nodes {
        assert_eq!(bed.ended(node), Some(0), "n{node}");
    }
}

#[test]
fn at_the_maximum_a_job_forms_at_once() {
    let mut bed = Bed::new(&["--nnodes=1:3"]);
    for node in 0..3 {
        bed.agent(node);
    }
    bed.attach(0);
    bed.attach(1);
    bed.until("two are there", |bed| bed.job(2) != serde_json::Value::Null);
    let last = now_ns();
    bed.attach(2);
    let group = bed.group(&[0, 1, 2], last);
    let took = took(&group, last);
    println!("formation: {took:?} from the last launcher's start to the workers' start");
    assert!(took < Duration::from_secs(3), "{took:?}; usual: 0.3 s");
    finish(bed, 3);
}

/// Every join starts an agent as well, inside its launcher.
#[test]
fn a_burst_of_joins_makes_one_generation_or_two() {
    const ALL: usize = 16;
    let mut bed = Bed::of(ALL, &["--nnodes=2:20"]);
    // So many nodes are more than two cores have time for: what is lost by that says nothing of joins.
    bed.env("MUSTER_SUSPECT_AFTER", "10s");
    bed.run(0, 0);
    bed.run(1, 0);
    let before = bed.group(&[0, 1], 0);
    let first = now_ns();
    for node in 2..ALL {
        bed.run(node, 0);
    }
    let spawned = Duration::from_nanos(now_ns() - first);
    let all: Vec<usize> = (0..ALL).collect();
    let after = bed.group(&all, first);
    let took = took(&after, first);
    let made = after.generation - before.generation;
    println!(
        "{} joins within {spawned:?}: {made} generations; {took:?} until all run",
        ALL - 2
    );
    assert!((1..=2).contains(&made), "{made} generations");
    finish(bed, ALL);
}
