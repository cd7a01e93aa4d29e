//! Two leaders at once, and a store that answers too late.

use nix::sys::signal::Signal;

use super::super::drill::{Job, Setup};

fn three(env: Vec<(&'static str, String)>) -> Job {
    Job::start(Setup {
        nodes: 3,
        env,
        ..Setup::default()
    })
}

/// The leader's agent stands still when it is about to ask for a commit, for so long that the others go
/// on without it; then it goes on where it was.
#[test]
fn a_leader_that_was_overtaken_commits_nothing() {
    let mut job = three(vec![("MUSTER_AGENT_GRACE", "3s".into())]);
    let (group, before) = job.steady(0, "the start");
    let leader = group.rank0();
    job.bed
        .arm(leader, "agent.effect", "stop in=musterd of=\"commit\"");
    job.bed
        .until("it stands still", |bed| bed.taken(leader, "agent.effect"));
    let mut others = job.others(leader);
    others.sort_unstable();
    let next = job.bed.group(&others, group.began());
    job.bed.until("the others commit", |_| {
        let log = job.judge.log();
        let newest = log.commits.last().map(|c| c.commit.number);
        newest > before.commits.last().map(|c| c.commit.number)
            && log.claims.last().map(|c| c.number) == Some(next.generation)
    });
    job.bed.signal(job.bed.agent_pid(leader), Signal::SIGCONT);
    let (_, log) = job.steady(before.step(), "the old leader is back");
    assert!(log.refused.is_empty(), "{:?}", log.refused);
    job.judge.check_all(&job.bed.events());
    job.end();
}

/// The record of a commit is in the log, and the answer takes longer than the agent waits: it finds its
/// own record there. A generation that begins meanwhile restores it.
#[test]
fn a_store_that_wrote_and_answers_too_late_has_committed_once() {
    late("log.linked");
}

/// The same where the record comes into the log only after the agent has given the answer up.
#[test]
fn a_store_that_writes_too_late_has_committed_once() {
    late("log.create");
}

fn late(point: &str) {
    let job = three(Vec::new());
    let (group, before) = job.steady(0, "the start");
    let leader = group.rank0();
    // The agent waits for 10 s.
    let order = "sleep=12000 in=muster of=\"commit\"";
    job.bed.arm(leader, point, order);
    job.bed
        .until("the store hangs", |bed| bed.taken(leader, point));
    // The decision on what follows has to wait for it.
    let other = job.others(leader)[0];
    job.bed.signal(group.pid(other), Signal::SIGKILL);
    let (_, log) = job.steady(before.step(), "the store answered too late");
    assert!(
        log.refused.is_empty(),
        "it committed twice: {:?}",
        log.refused
    );
    let mut job = job;
    job.judge.check_all(&job.bed.events());
    job.end();
}
