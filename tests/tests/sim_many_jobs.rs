//! Agents with hundreds of jobs, one after the other and many at once: a new one can always start, what is over
//! is forgotten and stays over, and while nothing happens next to nothing is said.

use muster_protocol::Span;
use muster_tests::fleet::{Broken, Disk, Fate, Fleet, Node, Traffic, secs};
use muster_tests::sim::clock::MS;

/// How long a job without launchers is kept here; the ten minutes of production are in [`long`].
const KEPT: Span = Span::from_secs(30);
const NODES: usize = 4;
/// The node that sleeps.
const SLEEPER: usize = 3;

/// The most bytes that an agent may keep of all that is over.
const STORED: usize = 256 * 1024;

/// How a run is set up.
#[derive(Clone, Copy, Debug)]
struct Run {
    seed: u64,
    store: bool,
    /// The sleeper's disk when it is back.
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
    judged(&mut fleet, run, 10 * usual)?;
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
    let again = again.into_iter();
    let again =
        again.map(|(id, nodes)| fleet.launch(&id, &nodes, run.store, Fate::Finishes, secs(1)));
    for job in again.collect::<Vec<_>>() {
        // Of a node that was away the last life may have workers.
        fleet.until_trains(job, secs(40))?;
    }
    fleet.pass(secs(10))?;
    match fleet.slow_starts(bound) {
        none if none.is_empty() => {}
        slow => return Err(Broken::SlowStarts(slow)),
    }
    if let Some(job) = fleet.not_ended() {
        return Err(Broken::NotEnded { job });
    }
    fleet.pass(run.kept.0 + secs(20))?;
    forgotten(fleet, run)?;
    match run.store {
        false => quiet(fleet, 0, 0)?,
        // Of jobs that their logs decide nobody writes the end; of those with a member that lost its state the
        // others speak each second.
        true => quiet(fleet, 8_000, 400_000)?,
    }
    for count in 1..=NODES {
        let (id, nodes) = (fleet.random_id(), some_nodes(fleet, Some(count)));
        let job = fleet.launch(&id, &nodes, run.store, Fate::Finishes, secs(1));
        fleet.until_trains(job, bound)?;
    }
    fleet.pass(secs(10))?;
    // One that trains: what is over is no matter of daily talk.
    let id = fleet.random_id();
    let job = fleet.launch(&id, &[0, 1, 2], false, Fate::Stays, 0);
    fleet.until_trains(job, bound)?;
    fleet.pass(secs(10))?;
    match run.store {
        false => quiet(fleet, 2_000, 100_000),
        true => quiet(fleet, 8_000, 400_000),
    }
}

/// Nothing goes on any more. A store's jobs without an end are kept for those that come back, the newest only.
fn forgotten(fleet: &Fleet, run: Run) -> Result<(), Broken> {
    for (node, n) in fleet.nodes.iter().enumerate() {
        for job in n
            .agent
            .iter()
            .flat_map(|a| a.jobs())
            .filter(|j| j.is_live())
        {
            let lineage = job.head().map(|(r, _)| r.lineage());
            let ended = lineage.is_some_and(|l| fleet.judge.has_ended(job.key(), l));
            if ended || !run.store {
                let job = job.key().id.clone();
                return Err(Broken::NotForgotten { node, job });
            }
        }
    }
    Ok(())
}

/// Checks that each agent says and writes no more than this in a minute.
fn quiet(fleet: &mut Fleet, messages: u64, bytes: u64) -> Result<(), Broken> {
    let before: Vec<Traffic> = fleet.nodes.iter().map(|n| n.traffic).collect();
    fleet.pass(secs(60))?;
    for (node, (n, before)) in fleet.nodes.iter().zip(before).enumerate() {
        let said = Traffic {
            messages: n.traffic.messages - before.messages,
            bytes: n.traffic.bytes - before.bytes,
            writes: n.traffic.writes - before.writes,
        };
        let stored = n.stored_bytes();
        if said.messages > messages || said.bytes > bytes || said.writes > 0 || stored > STORED {
            return Err(Broken::Talks { node, said, stored });
        }
    }
    Ok(())
}

fn short(store: bool, disk: Disk) -> Run {
    Run {
        seed: 1,
        store,
        disk,
        kept: KEPT,
        jobs: [20, 200, 20],
    }
}

/// A job whose end everybody has forgotten but the node that sleeps through it all.
fn forgotten_end(nodes: &[usize], fate: Fate) -> Result<(Fleet, usize), Broken> {
    let mut fleet = Fleet::new(NODES, 1, KEPT);
    fleet.pass(secs(2))?;
    let job = fleet.launch("job", nodes, false, Fate::Stays, 0);
    fleet.until_trains(job, secs(1))?;
    fleet.sleep(SLEEPER);
    fleet.end(job, fate);
    fleet.pass(secs(65))?;
    for _ in 0..140 {
        let id = fleet.random_id();
        fleet.launch(&id, &[0], false, Fate::Finishes, 10 * MS);
    }
    fleet.pass(secs(2))?;
    assert_eq!([0, 1].map(|node| goes_on(&fleet, node, job)), [None; 2]);
    Ok((fleet, job))
}

/// Whether a job goes on, as an agent sees it that knows it.
fn goes_on(fleet: &Fleet, node: usize, job: usize) -> Option<bool> {
    let agent = fleet.nodes[node].agent.as_ref()?;
    Some(agent.job(&fleet.jobs[job].key)?.is_live())
}

#[test]
fn an_agent_hears_of_an_end_that_others_have_forgotten() -> Result<(), Broken> {
    for (nodes, fate) in [
        (&[2][..], Fate::Cancelled),
        (&[0, SLEEPER], Fate::Cancelled),
        (&[0, 1, SLEEPER], Fate::Killed),
    ] {
        let (mut fleet, job) = forgotten_end(nodes, fate)?;
        fleet.wake(SLEEPER, Disk::Same);
        fleet.pass(secs(5))?;
        assert_ne!(
            goes_on(&fleet, SLEEPER, job),
            Some(true),
            "{nodes:?} {fate:?}"
        );
    }
    Ok(())
}

#[test]
fn a_witness_that_votes_no_more_hears_that_the_job_is_over() -> Result<(), Broken> {
    for others_forget in [false, true] {
        let mut fleet = Fleet::new(NODES, 1, KEPT);
        fleet.pass(secs(2))?;
        // The first one's blob is the one that does not decode, and another voter is drawn for all.
        let damaged = fleet.launch("a", &[SLEEPER], false, Fate::Stays, 0);
        let launched =
            (0..4).map(|n| fleet.launch(&format!("job{n}"), &[2], false, Fate::Stays, 0));
        let jobs: Vec<usize> = launched.collect();
        for job in jobs.iter().chain([&damaged]) {
            fleet.until_trains(*job, secs(1))?;
        }
        let is_witness = |job: &&usize| goes_on(&fleet, SLEEPER, **job) == Some(true);
        let job = jobs.iter().find(is_witness).copied();
        let job = job.expect("it is a witness of one");
        fleet.sleep(SLEEPER);
        fleet.end(job, Fate::Cancelled);
        fleet.pass(secs(65))?;
        for _ in 0..if others_forget { 140 } else { 0 } {
            let id = fleet.random_id();
            fleet.launch(&id, &[0, 1, 2], false, Fate::Finishes, 10 * MS);
        }
        fleet.pass(secs(2))?;
        assert_eq!(goes_on(&fleet, 2, job).is_none(), others_forget);
        fleet.wake(SLEEPER, Disk::Damaged);
        fleet.pass(secs(5))?;
        assert_ne!(goes_on(&fleet, SLEEPER, job), Some(true), "{others_forget}");
    }
    Ok(())
}

#[test]
fn a_job_whose_end_is_forgotten_is_not_gone_on_with() -> Result<(), Broken> {
    for nodes in [[0, SLEEPER], [1, SLEEPER]] {
        let (mut fleet, job) = forgotten_end(&nodes, Fate::Cancelled)?;
        fleet.end(job, Fate::Killed);
        // One of its launchers waits for the other's agent, which holds what was.
        let again = fleet.launch("job", &nodes, false, Fate::Finishes, secs(1));
        fleet.pass(secs(2))?;
        fleet.wake(SLEEPER, Disk::Same);
        fleet.until_trains(again, secs(40))?;
        fleet.pass(secs(10))?;
    }
    Ok(())
}

#[test]
fn a_killed_job_of_a_node_that_lost_its_state_ends_in_time() -> Result<(), Broken> {
    let mut fleet = Fleet::new(NODES, 1, KEPT);
    fleet.pass(secs(2))?;
    let job = fleet.launch("job", &[0, SLEEPER], false, Fate::Stays, 0);
    fleet.until_trains(job, secs(1))?;
    fleet.sleep(SLEEPER);
    fleet.end(job, Fate::Killed);
    fleet.pass(secs(5))?;
    fleet.wake(SLEEPER, Disk::New);
    // Nobody can be cut off and train: it is not kept for a day.
    fleet.pass(KEPT.0 + secs(5))?;
    for node in 0..NODES {
        assert_ne!(goes_on(&fleet, node, job), Some(true), "{node}");
    }
    Ok(())
}

/// Many jobs are killed, more than are kept; new ones start all the same.
fn killed(store: bool) -> Result<Fleet, Broken> {
    let mut fleet = Fleet::new(NODES, 1, Span::from_secs(600));
    fleet.pass(secs(2))?;
    for n in 0..280 {
        let (id, nodes) = (fleet.random_id(), some_nodes(&mut fleet, None));
        fleet.launch(&id, &nodes, store, Fate::Killed, secs(1));
        if n % 20 == 0 {
            fleet.pass(secs(1))?;
        }
    }
    fleet.pass(secs(15))?;
    for count in 1..=NODES {
        let (id, nodes) = (fleet.random_id(), some_nodes(&mut fleet, Some(count)));
        let job = fleet.launch(&id, &nodes, store, Fate::Finishes, secs(1));
        fleet.until_trains(job, secs(5))?;
    }
    assert!(fleet.judge.most.0 > 128, "{:?}", fleet.judge.most);
    Ok(fleet)
}

#[test]
fn of_jobs_that_were_killed_only_the_newest_are_kept() -> Result<(), Broken> {
    killed(false)?;
    Ok(())
}

#[test]
fn a_job_with_a_store_that_was_given_up_does_not_come_back() -> Result<(), Broken> {
    // An agent takes part in more of them than it keeps, the others of each in fewer.
    let mut fleet = killed(true)?;
    fleet.pass(secs(30))?;
    quiet(&mut fleet, 20_000, 2_000_000)
}

fn holds(store: bool, disk: Disk) {
    let ran = run(short(store, disk));
    assert_eq!(
        ran.map(|f| println!("{:?} {:?}", f.judge.most, f.judge.lives())),
        Ok(())
    );
}

#[test]
fn a_node_sleeps_through_two_hundred_jobs_and_finds_a_blob_that_does_not_decode() {
    holds(false, Disk::Damaged);
}

#[test]
fn a_node_sleeps_through_two_hundred_jobs_with_stores_and_loses_its_state() {
    holds(true, Disk::New);
}

mod long {
    use super::*;

    #[test]
    fn jobs_are_kept_for_as_long_as_in_production() {
        for seed in 1..=3 {
            for store in [false, true] {
                for disk in [Disk::Same, Disk::New, Disk::Damaged] {
                    let long = Run {
                        seed,
                        kept: Span::from_secs(600),
                        jobs: [100, 300, 100],
                        ..short(store, disk)
                    };
                    assert_eq!(run(long).map(|_| ()), Ok(()), "{long:?}");
                }
            }
        }
    }
}

/// Jobs that train on these nodes, all of which but the first are cut off when its launchers are killed.
fn cut_off(fleet: &mut Fleet, count: usize, nodes: &[usize]) -> Result<Vec<usize>, Broken> {
    let mut jobs = Vec::new();
    for _ in 0..count {
        let id = fleet.random_id();
        jobs.push(fleet.launch(&id, nodes, false, Fate::Stays, 0));
    }
    for job in &jobs {
        fleet.until_trains(*job, secs(10))?;
    }
    nodes[1..].iter().for_each(|node| fleet.cut_off(*node));
    jobs.iter().for_each(|job| fleet.kill_on(*job, nodes[0]));
    Ok(jobs)
}

#[test]
fn a_job_with_a_member_that_may_only_be_cut_off_is_kept() -> Result<(), Broken> {
    let mut fleet = Fleet::new(NODES, 1, KEPT);
    fleet.pass(secs(2))?;
    let jobs = cut_off(&mut fleet, 140, &[0, SLEEPER])?;
    fleet.pass(secs(90))?;
    let kept = jobs
        .iter()
        .filter(|job| goes_on(&fleet, 0, **job) == Some(true));
    assert_eq!(kept.count(), 140);
    Ok(())
}

#[test]
fn jobs_that_nobody_is_left_to_end_are_bounded_and_hide_none_that_trains() -> Result<(), Broken> {
    let mut fleet = Fleet::new(NODES, 1, KEPT);
    fleet.pass(secs(2))?;
    cut_off(&mut fleet, 200, &[0, SLEEPER])?;
    fleet.pass(secs(60))?;
    cut_off(&mut fleet, 120, &[0, 1, 2])?;
    fleet.pass(secs(90))?;
    let agent = fleet.nodes[0].agent.as_ref();
    let live = agent.map(|a| a.jobs().filter(|j| j.is_live()).count());
    assert_eq!(live, Some(256));
    let trains = fleet.launch("zzz", &[0], false, Fate::Stays, 0);
    fleet.until_trains(trains, secs(5))?;
    fleet.wake(SLEEPER, Disk::Same);
    fleet.pass(3 * MS)?;
    let sleeper = fleet.nodes[SLEEPER].agent.as_ref();
    let hello = sleeper.and_then(|a| a.peers().get(fleet.nodes[0].id)?.hello.as_ref());
    let told = hello.is_some_and(|h| h.jobs.iter().any(|a| a.key == fleet.jobs[trains].key));
    assert!(told);
    Ok(())
}

#[test]
fn killed_jobs_with_a_store_of_a_node_that_lost_its_state_are_bounded_and_silent()
-> Result<(), Broken> {
    let mut fleet = Fleet::new(NODES, 1, KEPT);
    fleet.pass(secs(2))?;
    let mut jobs = Vec::new();
    for _ in 0..150 {
        let id = fleet.random_id();
        jobs.push(fleet.launch(&id, &[0, SLEEPER], true, Fate::Stays, 0));
    }
    for job in &jobs {
        fleet.until_trains(*job, secs(30))?;
    }
    fleet.sleep(SLEEPER);
    for job in jobs {
        fleet.end(job, Fate::Killed);
    }
    fleet.pass(secs(5))?;
    fleet.wake(SLEEPER, Disk::New);
    fleet.pass(secs(90))?;
    let live = |n: &Node| {
        let agent = n.agent.as_ref();
        agent.map(|a| a.jobs().filter(|j| j.is_live()).count())
    };
    let live: Vec<_> = fleet.nodes.iter().map(live).collect();
    assert!(live.iter().all(|n| n.is_some_and(|n| n <= 128)), "{live:?}");
    quiet(&mut fleet, 20_000, 2_000_000)
}
