//! Real agents, with every few deviations from the usual run.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::time::Instant;

use muster_protocol::agent::Flaws;
use muster_tests::explore::agents::{Deed, Disks, Explored, Scope, Setup, explore};

fn see(setup: &Setup, scope: Scope, deviations: u8) -> Explored {
    let begun = Instant::now();
    let explored = explore(setup, scope, deviations, usize::MAX).unwrap();
    eprintln!(
        "{}, {scope:?}, {deviations} deviations: {} states, {} runs, {} steps, newest generation {}, \
         rounds {}, {:.1} s",
        setup.name,
        explored.states,
        explored.runs,
        explored.steps,
        explored.newest,
        explored.rounds,
        begun.elapsed().as_secs_f64(),
    );
    if let Some(found) = &explored.broken {
        eprintln!("{}\n{}", found.broken, found.way.join("\n"));
    }
    explored
}

/// One deviation of any kind, or as many as `MUSTER_EXPLORE_DEVIATIONS` says.
#[track_caller]
fn clean(setup: &Setup) {
    let deviations = std::env::var("MUSTER_EXPLORE_DEVIATIONS");
    let deviations = deviations.map_or(1, |n| n.parse().unwrap());
    let explored = see(setup, Scope::All, deviations);
    assert!(explored.broken.is_none());
    assert!(explored.newest > 1 && explored.states > 1_000);
}

fn launcher_dies() -> Setup {
    Setup::new("four members, one launcher dies", 4, 4).with(&[(0, Deed::LauncherDies(3))])
}

fn leader_dies() -> Setup {
    Setup::new("four members, the leader's node dies", 4, 4).with(&[(0, Deed::NodeDies(0))])
}

fn witness() -> Setup {
    Setup::new("two members, a witness, two others", 5, 2).with(&[(0, Deed::LauncherDies(1))])
}

fn voters_change() -> Setup {
    let setup = Setup {
        suspect_ms: 2_000,
        horizon_ms: 6_000,
        ..Setup::new(
            "two members lose their witness, commit, and lose rank 0",
            4,
            2,
        )
    };
    setup.with(&[
        (0, Deed::NodeDies(2)),
        // Right behind the change, before a lease tells that somebody has not heard of it.
        (30, Deed::Commit(0)),
        (2_500, Deed::NodeDies(0)),
    ])
}

fn witness_is_back() -> Setup {
    let setup = Setup {
        suspect_ms: 2_000,
        horizon_ms: 7_000,
        ..Setup::new("two members are without their witness for a while", 4, 2)
    };
    setup.with(&[
        (0, Deed::Cut(0, 2, 3_000)),
        (0, Deed::Cut(1, 2, 3_000)),
        (4_000, Deed::Commit(0)),
        (4_500, Deed::LauncherDies(1)),
    ])
}

fn two_die() -> Setup {
    Setup::new("five members, two die", 5, 5)
        .with(&[(0, Deed::NodeDies(1)), (0, Deed::LauncherDies(4))])
}

fn one_joins() -> Setup {
    let setup = Setup {
        max: 5,
        ..Setup::new("four members, one joins", 5, 4)
    };
    setup.with(&[(0, Deed::LauncherComes(4))])
}

fn commit() -> Setup {
    Setup::new("a commit, and then the leader's launcher dies", 4, 4)
        .with(&[(0, Deed::Commit(0)), (0, Deed::LauncherDies(0))])
}

fn leader_without_a_vote() -> Setup {
    Setup::new("a leader that gave up its vote, and a launcher dies", 4, 4).with(&[
        (0, Deed::Restart(0, Disks::Left)),
        (1_000, Deed::LauncherDies(3)),
    ])
}

/// Both halves are two of four voters, and only the one with rank 0 may decide.
fn tie() -> Setup {
    let setup = Setup {
        suspect_ms: 2_000,
        horizon_ms: 7_000,
        ..Setup::new("four members, cut in halves for a while", 4, 4)
    };
    let cuts = [(0, 2), (0, 3), (1, 2), (1, 3)];
    setup.with(&cuts.map(|(p, q)| (0, Deed::Cut(p, q, 5_000))))
}

/// A member is cut off, and its lease and the others' wait for it go by other times: the member's own are longer, or
/// theirs. Which node is which place is the job's to choose, so each keeps them once.
fn two_times(other: u64, node: usize) -> Setup {
    let setup = Setup {
        suspect_ms: 2_000,
        other_suspect: Some((node, other)),
        horizon_ms: 9_000,
        ..Setup::new("three members, one is cut off and keeps other times", 3, 3)
    };
    setup.with(&[(0, Deed::Cut(2, 0, 6_000)), (0, Deed::Cut(2, 1, 6_000))])
}

#[test]
fn a_launcher_dies() {
    clean(&launcher_dies());
}

#[test]
fn members_keep_other_times() {
    for node in 0..3 {
        clean(&two_times(4_000, node));
        clean(&two_times(1_000, node));
    }
}

#[test]
fn the_leader_dies() {
    clean(&leader_dies());
}

#[test]
fn a_witness_votes() {
    clean(&witness());
}

#[test]
fn the_voters_change_before_a_commit() {
    clean(&voters_change());
}

#[test]
fn a_witness_comes_back() {
    clean(&witness_is_back());
}

#[test]
fn two_of_five_die() {
    clean(&two_die());
}

#[test]
fn a_fifth_joins() {
    clean(&one_joins());
}

#[test]
fn a_commit_before_a_change() {
    clean(&commit());
}

#[test]
fn a_leader_has_no_vote() {
    clean(&leader_without_a_vote());
}

#[test]
fn two_halves_at_a_tie() {
    clean(&tie());
}

/// Minutes of one core each.
mod long {
    use super::*;

    #[track_caller]
    fn two(setup: &Setup) {
        assert!(see(setup, Scope::Votes, 2).broken.is_none());
    }

    #[test]
    fn a_launcher_dies() {
        two(&launcher_dies());
    }

    #[test]
    fn members_keep_other_times() {
        (0..3).for_each(|node| two(&two_times(4_000, node)));
    }

    #[test]
    fn the_leader_dies() {
        two(&leader_dies());
    }

    #[test]
    fn a_witness_votes() {
        two(&witness());
    }

    #[test]
    fn the_voters_change_before_a_commit() {
        two(&voters_change());
    }

    #[test]
    fn a_witness_comes_back() {
        two(&witness_is_back());
    }

    #[test]
    fn two_of_five_die() {
        two(&two_die());
    }

    #[test]
    fn a_fifth_joins() {
        two(&one_joins());
    }

    #[test]
    fn a_commit_before_a_change() {
        two(&commit());
    }

    #[test]
    fn a_leader_has_no_vote() {
        two(&leader_without_a_vote());
    }

    #[test]
    fn two_halves_at_a_tie() {
        two(&tie());
    }
}

// ---- rules left out are found ----

#[track_caller]
fn finds(setup: Setup, flaws: Flaws) -> String {
    let found = see(&Setup { flaws, ..setup }, Scope::Votes, 1).broken;
    found.map(|f| f.broken.to_string()).unwrap()
}

#[test]
fn without_r5_an_agent_with_another_disk_votes() {
    let flaws = Flaws {
        skip_r5: true,
        ..Flaws::default()
    };
    let found = finds(launcher_dies(), flaws);
    assert!(found.starts_with("I4"), "{found}");
}

#[test]
fn without_r7_a_leader_proposes_twice_at_ballot_zero() {
    let flaws = Flaws {
        skip_r7: true,
        ..Flaws::default()
    };
    let found = finds(launcher_dies(), flaws);
    assert!(found.starts_with("I5"), "{found}");
}

#[test]
fn without_r16_nobody_waits_for_a_lease() {
    let flaws = Flaws {
        skip_r16: true,
        ..Flaws::default()
    };
    // One of them is the one that is cut off.
    let see = |node| {
        see(
            &Setup {
                flaws,
                ..two_times(4_000, node)
            },
            Scope::Votes,
            0,
        )
        .broken
    };
    let found: Vec<String> = (0..3)
        .filter_map(see)
        .map(|f| f.broken.to_string())
        .collect();
    assert!(
        !found.is_empty() && found.iter().all(|f| f.starts_with("I11")),
        "{found:?}"
    );
}

#[test]
fn without_r8_an_acknowledged_commit_is_lost() {
    let flaws = Flaws {
        skip_r8: true,
        ..Flaws::default()
    };
    let found = finds(commit(), flaws);
    assert!(found.starts_with("I6"), "{found}");
}
