//! Agents with hundreds of jobs, one after the other and many at once: a new one can always start, what is over
//! is forgotten and stays over, and while nothing happens next to nothing is said.

use muster_protocol::Span;
use muster_tests::fleet::{Broken, Disk, Fate, Fleet, Traffic, secs};
use muster_tests::sim::clock::MS;

/// How long a job without launchers is kept here; the ten minutes of production are in [`long`].
const KEPT: Span = Span::from_secs(30);
const NODES: usize = 4;
/// The node that sleeps.
const SLEEPER: usize = 3;

/// How a run is set up.
#[derive(Clone, Copy, Debug)]
struct Run {
    seed: u64,
    store: bool,
    /// What the sleeper finds when it is back.
    disk: Disk,
    kept: Span,
    /// Jobs before it sleeps, while it does, and afterwards.
    jobs: [usize; 3],
}

/// How long the start of a job takes on agents that know no other.
fn usual_start(store: bool, nodes: usize) -> Result<u64, Broken> {
    let mut fleet = Fleet::new(NODES, 1, KEPT);
    fleet.pass(secs(2))?;
    let all: Vec<usize> = (0..nodes).collect();
    let job = fleet.launch("first", &all, store, Fate::Stays, 0);
    fleet.until_trains(job, secs(60))
}

/// Some of the nodes whose agents are up, or all of one count.
fn some_nodes(fleet: &mut Fleet, count: Option<usize>) -> Vec<usize> {
    let up = |i: &usize| fleet.nodes[*i].agent.is_some();
    let mut nodes: Vec<usize> = (0..fleet.nodes.len()).filter(up).collect();
    fleet.rng.shuffle(&mut nodes);
    let some = 1 + fleet.rng.index(nodes.len().min(3));
    nodes.truncate(count.unwrap_or(some));
    nodes
}

/// Jobs that begin one after the other, some of them many at once; half are killed, the others end.
fn many_jobs(fleet: &mut Fleet, count: usize, store: bool) -> Result<(), Broken> {
    const ENDS: [Fate; 4] = [Fate::Finishes, Fate::Fails, Fate::Cancelled, Fate::Leaves];
    for n in 0..count {
        let fate = match fleet.rng.chance(500) {
            true => Fate::Killed,
            false => ENDS[fleet.rng.index(ENDS.len())],
        };
        let (id, nodes) = (fleet.random_id(), some_nodes(fleet, None));
        let life = fleet.rng.between(10 * MS, secs(3));
        fleet.launch(&id, &nodes, store, fate, life);
        if n % 40 >= 20 {
            let pause = fleet.rng.between(100 * MS, 300 * MS);
            fleet.pass(pause)?;
        }
    }
    fleet.pass(secs(4))
}

/// Jobs that are still there when the sleeper goes, with some part in each.
fn long_jobs(fleet: &mut Fleet, store: bool) -> Vec<usize> {
    let mut jobs = Vec::new();
    for n in 0..24 {
        let id = fleet.random_id();
        let mut nodes = match n % 4 {
            0 => vec![SLEEPER],
            1 => vec![0, SLEEPER],
            2 => vec![0, 1, SLEEPER],
            // It is a witness there.
            _ => vec![n / 4 % 3],
        };
        fleet.rng.shuffle(&mut nodes);
        jobs.push(fleet.launch(&id, &nodes, store, Fate::Stays, 0));
    }
    jobs
}

fn run(run: Run) -> Result<Fleet, Broken> {
    let usual = usual_start(run.store, 1)?.max(usual_start(run.store, 3)?);
    let mut fleet = Fleet::new(NODES, run.seed, run.kept);
    let fleet_is = &mut fleet;
    judged(fleet_is, run, 10 * usual)?;
    Ok(fleet)
}

fn judged(fleet: &mut Fleet, run: Run, bound: u64) -> Result<(), Broken> {
    fleet.pass(secs(2))?;
    let long = long_jobs(fleet, run.store);
    many_jobs(fleet, run.jobs[0], run.store)?;
    fleet.sleep(SLEEPER);
    fleet.pass(secs(1))?;
    for (n, job) in long.iter().enumerate() {
        let ends = [Fate::Killed, Fate::Cancelled, Fate::Finishes, Fate::Leaves];
        match n / 4 {
            // Those go on meanwhile.
            5 => {}
            k => fleet.end(*job, ends[k % 4]),
        }
    }
    many_jobs(fleet, run.jobs[1], run.store)?;
    fleet.wake(SLEEPER, run.disk);
    fleet.pass(secs(4))?;
    many_jobs(fleet, run.jobs[2], run.store)?;
    // Ids that were used before, by jobs that most agents have forgotten.
    let again: Vec<(String, Vec<usize>)> = (0..fleet.jobs.len())
        .filter(|n| n % 9 == 0 || long.contains(n) && n % 2 == 0)
        .map(|n| (fleet.jobs[n].key.id.clone(), fleet.jobs[n].nodes.clone()))
        .collect();
    for job in &long {
        fleet.end(*job, Fate::Killed);
    }
    fleet.pass(secs(1))?;
    for (id, nodes) in again {
        let job = fleet.launch(&id, &nodes, run.store, Fate::Finishes, secs(1));
        fleet.until_trains(job, secs(40))?;
    }
    fleet.pass(secs(40))?;
    match fleet.slow_starts(bound) {
        none if none.is_empty() => {}
        slow => return Err(Broken::SlowStarts(slow)),
    }
    if let Some(job) = fleet.not_ended() {
        return Err(Broken::NotEnded { job });
    }
    fleet.pass(run.kept.0 + secs(20))?;
    forgotten(fleet, run)?;
    quiet(fleet, run)?;
    for count in 1..=NODES {
        let (id, nodes) = (fleet.random_id(), some_nodes(fleet, Some(count)));
        let job = fleet.launch(&id, &nodes, run.store, Fate::Finishes, secs(1));
        fleet.until_trains(job, bound)?;
    }
    Ok(())
}

/// Nothing goes on any more. A store's jobs without an end are kept for those that come back, the newest only.
fn forgotten(fleet: &Fleet, run: Run) -> Result<(), Broken> {
    for (node, n) in fleet.nodes.iter().enumerate() {
        for job in n.agent.iter().flat_map(|a| a.jobs()).filter(|j| j.is_live()) {
            let lineage = job.head().map(|(r, _)| r.lineage());
            let ended = lineage.is_some_and(|l| fleet.judge.has_ended(job.key(), l));
            if ended || !run.store {
                println!("{:?}", fleet.jobs.iter().filter(|j| &j.key == job.key()).collect::<Vec<_>>());
                let job = job.key().id.clone();
                return Err(Broken::NotForgotten { node, job });
            }
        }
    }
    Ok(())
}

fn quiet(fleet: &mut Fleet, run: Run) -> Result<(), Broken> {
    let before: Vec<Traffic> = fleet.nodes.iter().map(|n| n.traffic).collect();
    fleet.pass(secs(60))?;
    for (node, (n, before)) in fleet.nodes.iter().zip(before).enumerate() {
        let messages = n.traffic.messages - before.messages;
        let writes = n.traffic.writes - before.writes;
        let live = n.agent.iter().flat_map(|a| a.jobs()).filter(|j| j.is_live());
        println!("{run:?} {node}: {messages} {writes}, {} live, {} stored", live.count(), n.stored_bytes());
    }
    Ok(())
}

fn short(store: bool, disk: Disk) -> Run {
    Run {
        seed: 1,
        store,
        disk,
        kept: KEPT,
        jobs: [40, 200, 40],
    }
}

/// Others have forgotten how a job ended when the agent is back that slept through it.
fn forgotten_end(nodes: &[usize], fate: Fate) -> Result<(), Broken> {
    let mut fleet = Fleet::new(NODES, 1, KEPT);
    fleet.pass(secs(2))?;
    let job = fleet.launch("job", nodes, false, Fate::Stays, 0);
    fleet.until_trains(job, secs(1))?;
    fleet.sleep(SLEEPER);
    fleet.end(job, fate);
    fleet.pass(secs(60))?;
    for _ in 0..140 {
        let id = fleet.random_id();
        fleet.launch(&id, &[0], false, Fate::Finishes, 10 * MS);
        fleet.pass(100 * MS)?;
    }
    let key = fleet.jobs[job].key.clone();
    let known = |fleet: &Fleet, node: usize| {
        let agent = fleet.nodes[node].agent.as_ref();
        agent.and_then(|a| a.job(&key)).map(|j| j.is_live())
    };
    assert_eq!([0, 1].map(|node| known(&fleet, node)), [None; 2]);
    fleet.wake(SLEEPER, Disk::Same);
    fleet.pass(secs(10))?;
    match known(&fleet, SLEEPER) {
        Some(true) => Err(Broken::NotForgotten { node: SLEEPER, job: "job".into() }),
        _ => fleet.not_ended().map_or(Ok(()), |job| Err(Broken::NotEnded { job })),
    }
}

#[test]
fn an_agent_hears_of_an_end_that_others_have_forgotten() {
    for nodes in [&[0][..], &[1, 2], &[0, SLEEPER], &[SLEEPER, 0, 1]] {
        for fate in [Fate::Cancelled, Fate::Killed] {
            println!("{nodes:?} {fate:?} {:?}", forgotten_end(nodes, fate));
        }
    }
}

fn holds(store: bool, disk: Disk) {
    let ran = run(short(store, disk)).map(|f| (f.judge.most, f.judge.lives()));
    println!("{store} {disk:?} {ran:?}");
    assert!(ran.is_ok(), "{ran:?}");
}

#[test]
fn a_node_sleeps_through_two_hundred_jobs() {
    holds(false, Disk::Same);
}

#[test]
fn a_node_comes_back_without_its_state() {
    holds(false, Disk::New);
}

#[test]
fn a_node_comes_back_with_a_blob_that_does_not_decode() {
    holds(false, Disk::Damaged);
}

#[test]
fn a_node_sleeps_through_two_hundred_jobs_with_stores() {
    holds(true, Disk::Same);
}

#[test]
fn a_node_comes_back_without_its_state_to_jobs_with_stores() {
    holds(true, Disk::New);
}
