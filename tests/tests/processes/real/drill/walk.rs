//! One job that is led from point to point.

use std::time::Instant;

use nix::sys::signal::Signal;

use super::job::{Job, Setup};
use super::points::{On, Point, Victim, When};

/// The fewest that may be kept.
const KEPT: u64 = 2;

/// A job that comes to these points.
fn job_of(points: &[&Point], setup: Setup) -> Job {
    let retires = points.iter().any(|point| point.when == When::Retire);
    let keep = if retires { KEPT } else { setup.keep };
    Job::start(Setup { keep, ..setup })
}

/// Every point of these, in one job of three nodes.
pub(super) fn walk(points: &[Point]) {
    let all: Vec<&Point> = points.iter().collect();
    let mut job = job_of(
        &all,
        Setup {
            nodes: 3,
            ..Setup::default()
        },
    );
    for point in points {
        let nodes: &[On] = match &point.on {
            On::Each => &[On::Leader, On::Other],
            one => std::slice::from_ref(one),
        };
        for on in nodes {
            dies_at(&mut job, point, *on);
        }
    }
    job.end();
}

/// Arms it, unless nobody can come to it here.
fn arm(job: &Job, victim: usize, point: &Point) -> bool {
    let first = point.first();
    if first.is_some() && !job.writes_ahead() {
        let name = point.name;
        eprintln!(
            "skipped: no {name}, for this file system has no files without names, or no O_DIRECT"
        );
        return false;
    }
    job.bed.arm(victim, point.name, &point.order());
    if let Some((name, order)) = first {
        job.bed.arm(victim, name, order);
    }
    true
}

/// Has the victim die at this point, and brings it back.
fn dies_at(job: &mut Job, point: &Point, on: On) {
    let began = Instant::now();
    let what = format!(
        "{on:?} {:?} dies at {} {}",
        point.victim, point.name, point.of
    );
    let (group, before) = job.steady(0, &what);
    let others = job.others(group.rank0());
    let victim = match on {
        On::Leader => group.rank0(),
        On::Other | On::Each => others[0],
    };
    if !arm(job, victim, point) {
        return;
    }
    if point.when == When::Restore {
        job.bed.signal(group.pid(others[1]), Signal::SIGKILL);
    }
    job.bed.until(&what, |bed| bed.taken(victim, point.name));
    let known = job.judge.log();
    assert!(known.step() >= before.step(), "{what}: a commit is gone");
    match point.victim {
        Victim::Worker => {}
        Victim::Launcher => {
            job.bed.exit(victim);
            job.bed.attach(victim);
        }
        Victim::Agent => {
            job.bed.agent_exit(victim);
            job.bed.agent_that_calls(victim, &job.others(victim));
        }
    }
    job.steady(known.step(), &what);
    let log = job.judge.check(&job.bed.events());
    if point.when == When::Retire {
        job.finishes_deletions(&known, &what);
    }
    let restored = log.claims.last().and_then(|c| c.restore);
    eprintln!(
        "{what}: restored {:?}, {:.1} s",
        restored.map(|c| c.step),
        began.elapsed().as_secs_f64()
    );
}

/// All nodes die when one of them has come to a point, and others go on: for each of these points.
pub(super) fn all_die<'a>(points: impl IntoIterator<Item = &'a Point>) {
    let points: Vec<&Point> = points.into_iter().collect();
    let mut job = job_of(
        &points,
        Setup {
            times: points.len() + 1,
            ..Setup::default()
        },
    );
    for point in points {
        let what = format!("all die at {} {}", point.name, point.of);
        let (group, _) = job.steady(0, &what);
        let victim = match point.on {
            On::Leader | On::Each => group.rank0(),
            On::Other => job.others(group.rank0())[0],
        };
        if !arm(&job, victim, point) {
            continue;
        }
        job.bed.until(&what, |bed| bed.taken(victim, point.name));
        job.kill();
        let known = job.judge.check(&job.bed.events());
        job.begin_anew();
        job.steady(known.step(), &what);
        let log = job.judge.check(&job.bed.events());
        let next = log.claims.get(known.claims.len());
        let restored = next.and_then(|claim| claim.restore).map(|c| c.step);
        let newest = known.newest().map(|c| c.commit.step);
        assert_eq!(restored, newest, "{what}");
        if point.when == When::Retire {
            job.finishes_deletions(&known, &what);
        }
    }
    job.end();
}
