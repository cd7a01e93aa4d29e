//! Agents with hundreds of jobs, one after the other and many at once: a new one can always start, what is over
//! is forgotten and stays over, and while nothing happens next to nothing is said.

use muster_protocol::Span;
use muster_protocol::agent::Agent;
use muster_tests::fleet::{Broken, Disk, Fate, Fleet, secs};

const MS: u64 = 1_000_000;

/// How long a job without launchers is kept here; production's ten minutes are in [`long`].
const KEPT: Span = Span::from_secs(60);

/// How long the start of a job takes on agents that know no other.
fn usual_start(nodes: usize) -> Result<u64, Broken> {
    let mut fleet = Fleet::new(4, 1, KEPT);
    fleet.pass(secs(2))?;
    let all: Vec<usize> = (0..nodes).collect();
    let job = fleet.launch("first", &all, false, Fate::Stays, 0);
    fleet.until_trains(job, secs(60))
}

/// Some of the nodes whose agents are up.
fn some_nodes(fleet: &mut Fleet) -> Vec<usize> {
    let up = |i: &usize| fleet.nodes[*i].agent.is_some();
    let mut nodes: Vec<usize> = (0..fleet.nodes.len()).filter(up).collect();
    fleet.rng.shuffle(&mut nodes);
    let count = 1 + fleet.rng.index(nodes.len().min(3));
    nodes.truncate(count);
    nodes
}

/// Jobs that begin one after the other, some of them many at once; half are killed, the others end.
fn many_jobs(fleet: &mut Fleet, count: usize, store: bool, every: u64) -> Result<(), Broken> {
    const ENDS: [Fate; 4] = [Fate::Finishes, Fate::Fails, Fate::Cancelled, Fate::Leaves];
    for n in 0..count {
        let fate = match fleet.rng.chance(500) {
            true => Fate::Killed,
            false => ENDS[fleet.rng.index(ENDS.len())],
        };
        let (id, nodes) = (fleet.random_id(), some_nodes(fleet));
        let life = fleet.rng.between(10 * MS, secs(3));
        fleet.launch(&id, &nodes, store, fate, life);
        // Twenty at once, then one after the other.
        if n % 40 >= 20 {
            let pause = fleet.rng.between(every / 2, every * 3 / 2);
            fleet.pass(pause)?;
        }
    }
    Ok(())
}

fn run(store: bool, seed: u64) -> Result<(), Broken> {
    let mut fleet = Fleet::new(4, seed, KEPT);
    fleet.pass(secs(2))?;
    many_jobs(&mut fleet, 320, store, 200 * MS)?;
    fleet.pass(secs(5))?;
    println!("{:?} {:?} {:?}", fleet.judge.most, fleet.judge.lives(), fleet.slow_starts(secs(3)));
    for i in 0..4 {
        println!("{i}: {:?} {} live {}", fleet.nodes[i].traffic, fleet.nodes[i].agent.as_ref().map_or(0, |a| a.jobs().count()),
            fleet.nodes[i].agent.as_ref().map_or(0, |a| a.jobs().filter(|j| j.is_live()).count()));
    }
    fleet.pass(secs(100))?;
    println!("{:?} {:?} launchers {}", fleet.judge.most, fleet.judge.lives(), fleet.has_launchers());
    for i in 0..4 {
        println!("{i}: {:?} {} live {}", fleet.nodes[i].traffic, fleet.nodes[i].agent.as_ref().map_or(0, |a| a.jobs().count()),
            fleet.nodes[i].agent.as_ref().map_or(0, |a| a.jobs().filter(|j| j.is_live()).count()));
    }
    Ok(())
}

#[test]
fn three_hundred_jobs() {
    println!("{:?} {:?}", usual_start(1), usual_start(3));
    assert_eq!(run(false, 1), Ok(()));
}

#[test]
fn three_hundred_jobs_with_stores() {
    assert_eq!(run(true, 1), Ok(()));
}
