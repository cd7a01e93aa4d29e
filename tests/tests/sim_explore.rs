//! The consensus core, exhaustively.

use muster_tests::explore::{Broken, Explored, Limits, Model, Rules, explore};

const LIMITS: Limits = Limits {
    voters: 3,
    generations: 2,
    rounds: 1,
    crashes: 1,
    losses: 0,
    commits: 1,
};

fn check(limits: Limits, rules: Rules) -> Explored {
    let explored = explore(&Model::new(limits, rules), 3_000_000);
    eprintln!(
        "{limits:?} {rules:?}: {} states, depth {}, decided {:?}, adopted {}, complete {}",
        explored.states, explored.deepest, explored.decided, explored.adopted, explored.complete
    );
    explored
}

#[track_caller]
fn clean(limits: Limits) {
    let explored = check(limits, Rules::ALL);
    assert_eq!(explored.broken, None);
    assert!(explored.complete, "the space is larger than the bound");
    assert!(explored.decided[0] > 0 && explored.states > 1_000);
}

#[test]
fn one_generation_with_crash_and_commit() {
    clean(Limits {
        generations: 1,
        ..LIMITS
    });
}

#[test]
fn two_generations_with_a_round() {
    clean(Limits {
        crashes: 0,
        commits: 0,
        ..LIMITS
    });
}

#[test]
fn two_generations_with_a_crash_and_a_commit() {
    clean(Limits {
        rounds: 0,
        ..LIMITS
    });
}

mod long {
    /// Hours of one core.
    #[test]
    fn two_generations_with_everything() {
        super::clean(super::LIMITS);
    }
}

#[test]
fn without_r7_a_restarted_leader_breaks_ballot_zero() {
    let rules = Rules {
        r7: false,
        ..Rules::ALL
    };
    let broken = check(LIMITS, rules).broken.map(|(b, _)| b);
    let found = matches!(
        broken,
        Some(Broken::TwoAtOneBallot { .. } | Broken::TwoValues { .. })
    );
    assert!(found, "{broken:?}");
}

#[test]
fn without_r8_an_acknowledged_commit_is_lost() {
    let rules = Rules {
        r8: false,
        ..Rules::ALL
    };
    let broken = check(LIMITS, rules).broken.map(|(b, _)| b);
    assert!(
        matches!(broken, Some(Broken::LostCommit { .. })),
        "{broken:?}"
    );
}

#[test]
fn without_r5_a_lost_disk_votes_twice() {
    let limits = Limits {
        generations: 1,
        rounds: 2,
        crashes: 0,
        losses: 1,
        ..LIMITS
    };
    let rules = Rules {
        r5: false,
        ..Rules::ALL
    };
    assert!(check(limits, rules).broken.is_some());
}
