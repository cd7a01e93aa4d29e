//! Saving and committing under faults: no seed breaks an invariant, and each mistake that was planted is
//! found.

#![expect(clippy::panic, reason = "helpers of tests")]

use muster_protocol::checkpoint::Flaws;
use muster_protocol::storelog;
use muster_tests::saves::{Counts, Drill, Plant, Report, run, run_with};

/// A tenth of the seeds of the simulation of whole agents, whose number `MUSTER_SIM_SEEDS` sets.
fn seeds() -> u64 {
    let set = std::env::var("MUSTER_SIM_SEEDS").ok();
    let whole: Option<u64> = set.and_then(|n| n.parse().ok());
    (whole.unwrap_or(4_000) / 10).max(1)
}

#[track_caller]
fn show(seed: u64, report: &Report) {
    for line in &report.log {
        eprintln!("{line}");
    }
    panic!("seed {seed}: {:?}", report.violation);
}

fn add(sum: &mut Counts, of: &Counts) {
    sum.events += of.events;
    sum.claims += of.claims;
    sum.opened += of.opened;
    sum.committed += of.committed;
    sum.given_up += of.given_up;
    sum.refused_commits += of.refused_commits;
    sum.retired += of.retired;
    sum.deleted += of.deleted;
    sum.crashes += of.crashes;
    sum.links += of.links;
    sum.power += of.power;
    sum.busy += of.busy;
    sum.restarts_prepared += of.restarts_prepared;
    sum.rejected += of.rejected;
    sum.effects += of.effects;
}

#[test]
fn no_fault_breaks_an_invariant() {
    let mut sum = Counts::default();
    for seed in 0..seeds() {
        let report = run(seed, Plant::default());
        if report.violation.is_some() {
            show(seed, &report);
        }
        add(&mut sum, &report.counts);
    }
    eprintln!("{sum:?}");
    // What the invariants are about has happened, and often.
    let all = [
        sum.claims,
        sum.committed,
        sum.given_up,
        sum.refused_commits,
        sum.retired,
        sum.deleted,
        sum.crashes,
        sum.links,
        sum.power,
        sum.busy,
        sum.restarts_prepared,
        sum.rejected,
    ];
    assert!(all.iter().all(|n| *n > seeds() / 10), "{sum:?}");
}

/// One crash before each effect of a run in which nothing else goes wrong: of save, commit, retire and
/// delete there is no point that is left out.
#[test]
fn a_crash_at_any_point_loses_nothing() {
    let drill = |seed, at, power| run_with(seed, Plant::default(), Some(Drill { at, power }));
    let whole = |seed: &u64| {
        let all = drill(*seed, 0, false).counts;
        all.committed > 3 && all.retired > 0 && all.deleted > 0 && all.claims > 2
    };
    let seed = (0..100).find(whole).expect("a run with all of it");
    let all = drill(seed, 0, false).counts;
    for at in 1..=all.effects {
        for power in [false, true] {
            let report = drill(seed, at, power);
            if report.violation.is_some() {
                show(at, &report);
            }
        }
    }
    eprintln!("seed {seed}: {all:?}");
}

#[test]
fn a_seed_runs_the_same_twice() {
    for seed in 0..5 {
        let [a, b] = [0, 1].map(|_| run(seed, Plant::default()));
        assert_eq!((a.fingerprint, a.counts), (b.fingerprint, b.counts));
    }
}

/// Finds a seed in which the mistake breaks one of the invariants named; without it the seed is clean.
#[track_caller]
fn found(plant: Plant, expected: &[&str]) {
    for seed in 0..2_000 {
        let Some(violation) = run(seed, plant).violation else {
            continue;
        };
        assert!(
            expected.contains(&violation.name),
            "seed {seed}: {violation:?}"
        );
        eprintln!("seed {seed}: {violation:?}");
        let clean = run(seed, Plant::default());
        assert_eq!(clean.violation, None, "seed {seed} fails without it, too");
        return;
    }
    panic!("no seed finds {plant:?}");
}

#[test]
fn a_file_that_was_not_synced_is_found() {
    let plant = Plant {
        skip_sync: true,
        ..Plant::default()
    };
    found(plant, &["I6", "I7"]);
}

fn cores(cores: Flaws) -> Plant {
    Plant {
        cores,
        ..Plant::default()
    }
}

#[test]
fn a_commit_without_one_rank_is_found() {
    let flaws = Flaws {
        skip_last_rank: true,
        ..Flaws::default()
    };
    found(cores(flaws), &["I6"]);
}

#[test]
fn a_deletion_before_its_retire_is_found() {
    let flaws = Flaws {
        skip_retire: true,
        ..Flaws::default()
    };
    found(cores(flaws), &["I7"]);
}

#[test]
fn a_deletion_of_what_may_still_be_committed_is_found() {
    let flaws = Flaws {
        skip_fence: true,
        ..Flaws::default()
    };
    found(cores(flaws), &["I7"]);
}

#[test]
fn a_copy_that_is_overwritten_too_early_is_found() {
    let flaws = Flaws {
        skip_decision: true,
        ..Flaws::default()
    };
    found(cores(flaws), &["slot"]);
}

#[test]
fn a_commit_after_a_newer_claim_is_found() {
    let plant = Plant {
        log: storelog::Flaws {
            skip_r13: true,
            ..storelog::Flaws::default()
        },
        ..Plant::default()
    };
    found(plant, &["stale", "I6"]);
}
