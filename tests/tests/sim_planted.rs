//! Each rule that RENDEZVOUS.md names is left out once, and the checker must find what comes of
//! it; the same seeds with the rule are clean. So a checker that sees nothing cannot pass.

#![expect(clippy::panic, reason = "helpers of tests")]

use muster_protocol::agent::Flaws;
use muster_tests::sim::focus::Focus;
use muster_tests::sim::run::{self, Report};
use muster_tests::sim::setup::Setup;

/// A planted bug has to show within this many seeds.
const SEEDS: u64 = 2_000;

fn seed(seed: u64, focus: Focus, flaws: Flaws) -> Report {
    run::run(Setup::generate(seed, focus, flaws), false)
}

/// Finds a seed in which leaving the rule out breaks one of the invariants named.
#[track_caller]
fn found(flaws: Flaws, focus: Focus, expected: &[&str]) {
    for n in 0..SEEDS {
        let Some(violation) = seed(n, focus, flaws).violation else {
            continue;
        };
        if !expected.contains(&violation.name()) {
            continue;
        }
        eprintln!("seed {n}: {violation}");
        let with_the_rule = seed(n, focus, Flaws::default()).violation;
        assert_eq!(with_the_rule, None, "seed {n} fails with the rule, too");
        return;
    }
    panic!("no seed of {SEEDS} finds {flaws:?}");
}

#[test]
fn without_r5_a_lost_state_votes() {
    let flaws = Flaws {
        skip_r5: true,
        ..Flaws::default()
    };
    found(flaws, Focus::Disks, &["I1", "I4"]);
}

#[test]
fn without_r7_a_restarted_leader_proposes_twice() {
    let flaws = Flaws {
        skip_r7: true,
        ..Flaws::default()
    };
    found(flaws, Focus::Leaders, &["I1", "I5"]);
}

#[test]
fn without_r8_a_commit_is_lost() {
    let flaws = Flaws {
        skip_r8: true,
        ..Flaws::default()
    };
    found(flaws, Focus::Commits, &["I6"]);
}

#[test]
fn without_r12_a_late_put_names_deleted_data() {
    let flaws = Flaws {
        skip_r12: true,
        ..Flaws::default()
    };
    found(flaws, Focus::LatePuts, &["I7"]);
}

#[test]
fn without_r13_a_claim_forgets_a_commit() {
    let flaws = Flaws {
        skip_r13: true,
        ..Flaws::default()
    };
    found(flaws, Focus::StoreRaces, &["I3", "I6"]);
}

#[test]
fn without_r16_old_workers_run_on() {
    let flaws = Flaws {
        skip_r16: true,
        ..Flaws::default()
    };
    found(flaws, Focus::Leases, &["I11"]);
}

#[test]
fn without_r20_a_checkpoint_stays_open() {
    let flaws = Flaws {
        skip_r20: true,
        ..Flaws::default()
    };
    found(flaws, Focus::Checkpoints, &["I14", "liveness"]);
}
