use proptest::prelude::*;

use super::*;

fn commit(seq: u64, state: State) -> Commit {
    Commit {
        seq,
        needs: vec![format!("data-{seq}"), format!("manifest-{seq}")],
        state,
        metric: None,
        pinned: false,
        retired: false,
        in_use: false,
    }
}

fn items(commits: &[Commit]) -> Vec<Item> {
    let items = commits.iter().flat_map(|commit| &commit.needs);
    items
        .map(|name| Item {
            name: name.clone(),
            number: 1,
        })
        .collect()
}

fn check(policy: Policy, commits: &[Commit]) -> Decision {
    let items = items(commits);
    review(
        policy,
        View {
            commits,
            items: &items,
            claimed: 1,
            unresolved: &[],
        },
    )
}

#[test]
fn the_last_the_best_and_the_pinned_stay() {
    let mut commits: Vec<Commit> = (1..=8).map(|seq| commit(seq, State::Verified)).collect();
    let three = Policy::default();
    assert_eq!(check(three, &commits).retire, [1, 2, 3, 4, 5]);
    commits[1].pinned = true;
    commits[2].metric = Some(0.5);
    commits[3].metric = Some(f64::NAN);
    commits[0].metric = Some(0.7);
    let best = |best, count| Policy {
        best: Some((best, count)),
        ..three
    };
    assert_eq!(check(best(Best::Lowest, 1), &commits).retire, [1, 4, 5]);
    assert_eq!(check(best(Best::Highest, 1), &commits).retire, [3, 4, 5]);
    assert_eq!(check(best(Best::Highest, 2), &commits).retire, [4, 5]);
    assert_eq!(check(best(Best::Lowest, 0), &commits).retire, [1, 3, 4, 5]);
    let first = check(three, &commits);
    assert_eq!(
        first.delete,
        Vec::<String>::new(),
        "nothing before its RETIRE is in the log"
    );
    for commit in &mut commits {
        commit.retired = first.retire.contains(&commit.seq);
    }
    commits[3].in_use = true;
    let second = check(three, &commits);
    assert!(second.retire.is_empty());
    let expected = [
        "data-1",
        "data-3",
        "data-5",
        "manifest-1",
        "manifest-3",
        "manifest-5",
    ];
    assert_eq!(second.delete, expected, "not what somebody is restoring");
}

#[test]
fn two_that_are_known_to_be_good_stay() {
    use State::{Rejected, Unchecked, Verified};
    let of = |states: &[State]| -> Vec<Commit> {
        (1..)
            .zip(states)
            .map(|(seq, state)| commit(seq, *state))
            .collect()
    };
    let one = Policy {
        last: 1,
        best: None,
    };
    assert_eq!(check(one, &of(&[Verified, Verified, Verified])).retire, [1]);
    assert_eq!(
        check(one, &of(&[Verified, Verified, Unchecked, Unchecked])).retire,
        [3]
    );
    // One that nobody has checked may be the better one.
    assert_eq!(
        check(one, &of(&[Verified, Unchecked, Unchecked])).retire,
        [0u64; 0]
    );
    assert_eq!(
        check(one, &of(&[Rejected, Verified, Rejected])).retire,
        [1, 3]
    );
    assert_eq!(check(one, &[]), Decision::default());
}

#[test]
fn orphans_go_only_when_they_can_never_be_committed() {
    let item = |name: &str, number| Item {
        name: name.to_owned(),
        number,
    };
    let items = [
        item("old", 1),
        item("current", 2),
        item("unknown", 1),
        item("data-1", 1),
    ];
    let commits = [commit(1, State::Verified)];
    let view = View {
        commits: &commits,
        items: &items,
        claimed: 2,
        unresolved: &["unknown".to_owned()],
    };
    assert_eq!(review(Policy::default(), view).delete, ["old"]);
    // Before the next generation's CLAIM has been read, its attempts may still be committed.
    assert!(
        review(Policy::default(), View { claimed: 1, ..view })
            .delete
            .is_empty()
    );
}

fn any_commit() -> impl Strategy<Value = Commit> {
    let state = prop_oneof![
        Just(State::Verified),
        Just(State::Unchecked),
        Just(State::Rejected)
    ];
    let flags = (
        any::<bool>(),
        prop::bool::weighted(0.2),
        prop::bool::weighted(0.3),
        prop::bool::weighted(0.2),
    );
    (state, flags, -2i8..3, 0u8..30).prop_map(
        |(state, (measured, pinned, retired, in_use), metric, data)| Commit {
            // Two commits may name the same data.
            needs: vec![format!("data-{data}")],
            metric: measured.then_some(f64::from(metric)),
            pinned,
            retired,
            in_use,
            ..commit(0, state)
        },
    )
}

proptest! {
    #[test]
    fn nothing_that_is_needed_goes(
        mut commits in proptest::collection::vec(any_commit(), 0..12),
        last in 0usize..5,
        best in prop_oneof![Just(None), Just(Some(Best::Lowest)), Just(Some(Best::Highest))],
        orphans in proptest::collection::vec((20u8..50, 0u64..4), 0..6),
        claimed in 0u64..4,
        unresolved in proptest::collection::vec(0u8..50, 0..4),
    ) {
        for (seq, commit) in (1..).zip(&mut commits) {
            commit.seq = seq;
        }
        let policy = Policy { last, best: best.map(|best| (best, 1)) };
        let mut items = items(&commits);
        items.extend(orphans.iter().map(|(name, number)| Item { name: format!("data-{name}"), number: *number }));
        let unresolved: Vec<String> = unresolved.iter().map(|name| format!("data-{name}")).collect();
        let view = View { commits: &commits, items: &items, claimed, unresolved: &unresolved };
        let decision = review(policy, view);

        let retired = |commit: &Commit| commit.retired || decision.retire.contains(&commit.seq);
        let left: Vec<&Commit> = commits.iter().filter(|commit| !retired(commit)).collect();
        let verified = |commits: &[&Commit]| commits.iter().filter(|c| c.state == State::Verified).count();
        let before: Vec<&Commit> = commits.iter().filter(|commit| !commit.retired).collect();
        prop_assert!(verified(&left) >= verified(&before).min(2));
        let usable: Vec<&&Commit> = before.iter().filter(|c| c.state != State::Rejected).collect();
        for commit in usable.iter().rev().take(last) {
            prop_assert!(!decision.retire.contains(&commit.seq), "of the last {}", last);
        }
        for commit in &before {
            prop_assert!(!((commit.pinned || commit.in_use) && decision.retire.contains(&commit.seq)));
        }
        for seq in &decision.retire {
            let commit = &commits[*seq as usize - 1];
            let better = |a: Option<f64>, b: Option<f64>| match (a, b, best) {
                (Some(a), Some(b), Some(Best::Lowest)) => a < b,
                (Some(a), Some(b), Some(Best::Highest)) => a > b,
                _ => false,
            };
            if best.is_some() && commit.metric.is_some() && commit.state != State::Rejected {
                let as_good = left.iter().any(|kept| kept.state != State::Rejected && kept.metric.is_some() && !better(commit.metric, kept.metric));
                prop_assert!(as_good, "the best went");
            }
        }
        // I7, and what is deleted had its RETIRE before, or is a fenced attempt's.
        for name in &decision.delete {
            prop_assert!(!unresolved.contains(name));
            let users: Vec<&Commit> = commits.iter().filter(|c| c.needs.contains(name)).collect();
            prop_assert!(users.iter().all(|commit| commit.retired && !commit.in_use));
            let fenced = items.iter().filter(|item| item.name == *name).any(|item| item.number < claimed);
            prop_assert!(!users.is_empty() || fenced);
        }
        // Done once, there is nothing more to retire.
        let retire = decision.retire.clone();
        for commit in &mut commits {
            commit.retired |= retire.contains(&commit.seq);
        }
        let again = review(policy, View { commits: &commits, items: &items, claimed, unresolved: &unresolved });
        prop_assert!(again.retire.is_empty());
    }
}
