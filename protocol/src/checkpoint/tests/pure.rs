//! Retention's order, the choice before a deadline, and the interval.

use super::*;
use crate::record::CommitRef;
use crate::storelog::Body;

fn generation(n: u8) -> Digest {
    Digest([n; 32])
}

fn commit(n: u8) -> CommitRef {
    CommitRef {
        generation: generation(1),
        number: n.into(),
        step: 10 * u64::from(n),
        manifest: Digest([0x10 + n; 32]),
    }
}

fn folder(seq: u64) -> String {
    format!("data/{seq}")
}

/// Commits in slots 2 to 5 of generation 1, all verified, each with a folder.
fn keeper() -> Keeper {
    let mut keeper = Keeper::new(Flaws::default());
    keeper.handle(KeeperEvent::Claimed {
        generation: generation(1),
        restore: None,
    });
    for seq in 2..=5 {
        let commit = commit(seq as u8);
        keeper.handle(KeeperEvent::Committed { seq, commit });
        let names = vec![folder(seq)];
        keeper.handle(KeeperEvent::Needs { seq, names });
        let state = State::Verified;
        keeper.handle(KeeperEvent::Checked { seq, state });
    }
    keeper
}

fn decide(keeper: &mut Keeper, retire: &[u64], delete: &[(String, u8)]) -> Vec<KeeperEffect> {
    let item = |(name, of): &(String, u8)| Item {
        name: name.clone(),
        generation: generation(*of),
    };
    keeper.handle(KeeperEvent::Decided(Decision {
        retire: retire.to_vec(),
        delete: delete.iter().map(item).collect(),
    }));
    drain(|| keeper.poll_effect())
}

fn why(effects: &[KeeperEffect]) -> Vec<Refused> {
    let refused = |e: &KeeperEffect| match e {
        KeeperEffect::Refused { why, .. } => Some(*why),
        _ => None,
    };
    effects.iter().filter_map(refused).collect()
}

#[test]
fn data_goes_behind_its_retire() {
    let mut keeper = keeper();
    let old = [(folder(2), 1)];
    let both = decide(&mut keeper, &[2], &old);
    assert_eq!(
        both[0],
        KeeperEffect::Append(Body::Retire {
            seq: 2,
            good: Some([4, 5])
        })
    );
    assert_eq!(why(&both), [Refused::Needed], "it is not in the log yet");
    keeper.handle(KeeperEvent::Retired { seq: 2 });
    let name = folder(2);
    assert_eq!(
        decide(&mut keeper, &[], &old),
        [KeeperEffect::Delete { name }]
    );
}

#[test]
fn two_verified_ones_always_stay() {
    let mut keeper = keeper();
    let all = decide(&mut keeper, &[2, 3, 4, 5], &[]);
    assert_eq!(why(&all), [Refused::Floor, Refused::Floor]);
    // One that is not in the log in the end counts again.
    keeper.handle(KeeperEvent::NotAppended { seq: 2 });
    assert_eq!(keeper.verified().collect::<Vec<_>>(), [2, 4, 5]);
    // A damaged one is rejected by its own, once, and may go whatever is left.
    for _ in 0..2 {
        let state = State::Damaged {
            why: "chunk 3 of n0-0".into(),
        };
        keeper.handle(KeeperEvent::Checked { seq: 5, state });
    }
    let rejects = drain(|| keeper.poll_effect());
    let reason = "chunk 3 of n0-0".to_owned();
    assert_eq!(
        rejects,
        [KeeperEffect::Append(Body::Reject { seq: 5, reason })]
    );
    keeper.handle(KeeperEvent::Rejected { seq: 5 });
    assert_eq!(why(&decide(&mut keeper, &[4], &[])), [Refused::Floor]);
    assert_eq!(why(&decide(&mut keeper, &[5], &[])), []);
}

#[test]
fn what_cannot_be_read_stays_until_it_is_rejected_and_is_none_of_the_two() {
    let mut keeper = keeper();
    let why = String::from("no such device");
    let state = State::Unreadable { why };
    keeper.handle(KeeperEvent::Checked { seq: 2, state });
    assert_eq!(keeper.verified().collect::<Vec<_>>(), [3, 4, 5]);
    assert_eq!(
        why_of(&mut keeper, &[2, 3, 4]),
        [Refused::Unread, Refused::Floor]
    );
    keeper.handle(KeeperEvent::Rejected { seq: 2 });
    assert_eq!(why_of(&mut keeper, &[2]), []);
}

fn why_of(keeper: &mut Keeper, retire: &[u64]) -> Vec<Refused> {
    why(&decide(keeper, retire, &[]))
}

#[test]
fn what_is_pinned_or_being_restored_stays() {
    let mut keeper = keeper();
    keeper.handle(KeeperEvent::Pinned { seq: 2 });
    keeper.handle(KeeperEvent::Claimed {
        generation: generation(2),
        restore: Some(commit(3)),
    });
    let all = decide(&mut keeper, &[2, 3, 9], &[]);
    assert_eq!(
        why(&all),
        [Refused::Pinned, Refused::InUse, Refused::Unknown]
    );
    keeper.handle(KeeperEvent::Loaded {
        generation: generation(2),
    });
    assert_eq!(why(&decide(&mut keeper, &[3], &[])), []);
}

#[test]
fn what_was_left_behind_goes_once_it_is_fenced() {
    let mut keeper = keeper();
    let orphan = [("data/orphan".to_owned(), 1)];
    assert_eq!(
        why(&decide(&mut keeper, &[], &orphan)),
        [Refused::NotFenced]
    );
    keeper.handle(KeeperEvent::Claimed {
        generation: generation(2),
        restore: None,
    });
    assert_eq!(why(&decide(&mut keeper, &[], &orphan)), []);
    // Of a generation that nobody has heard of nothing is known.
    let strange = [("data/strange".to_owned(), 9)];
    assert_eq!(
        why(&decide(&mut keeper, &[], &strange)),
        [Refused::NotFenced]
    );
    // A commit whose manifest was not read may need anything.
    let commit = commit(6);
    keeper.handle(KeeperEvent::Committed { seq: 7, commit });
    assert_eq!(why(&decide(&mut keeper, &[], &orphan)), [Refused::Unread]);
}

fn situation(left_ms: u64) -> Situation {
    Situation {
        left: Span::from_millis(left_ms),
        stop: Span::from_millis(500),
        step: 120,
        bytes: 1 << 30,
        speeds: Some(Speeds {
            copy: 10 << 30,
            write: 1 << 30,
            commit: Span::from_millis(100),
        }),
        sealed: Some(Pending {
            step: 110,
            left: 1 << 28,
        }),
        committed: Some(100),
    }
}

#[test]
fn the_choice_fits_into_the_time() {
    // 0.5 to stop, 0.1 to copy, 1 to write, 0.1 to commit, and a quarter more: 2.125 s.
    let cases = [
        (30_000, Choice::Fresh, 0),
        (2_125, Choice::Fresh, 0),
        (2_124, Choice::Sealed { step: 110 }, 10),
        // 0.25 to write, 0.1 to commit, and a quarter more: 437.5 ms.
        (438, Choice::Sealed { step: 110 }, 10),
        (437, Choice::Committed { step: 100 }, 20),
        (0, Choice::Committed { step: 100 }, 20),
    ];
    for (left, choice, lost) in cases {
        let chosen = choose(&situation(left));
        assert_eq!((chosen.choice, chosen.lost), (choice, lost), "{left} ms");
        assert!(chosen.needs <= Span::from_millis(left));
    }
    assert_eq!(
        choose(&situation(1_000)).why,
        "a fresh save needs 2125 ms, and only 1000 ms are left: the copy of step 110, which all ranks have \
         sealed, needs 437 ms; 10 steps are done again"
    );
}

#[test]
fn the_choice_needs_something_newer_than_the_last_commit() {
    let old = Situation {
        committed: Some(110),
        ..situation(1_000)
    };
    assert_eq!(choose(&old).choice, Choice::Committed { step: 110 });
    let nothing = Situation {
        committed: None,
        sealed: None,
        ..situation(1_000)
    };
    let chosen = choose(&nothing);
    assert_eq!((chosen.choice, chosen.lost), (Choice::Nothing, 120));
    // Nothing is known of this store: trying costs nothing that is there.
    let first = Situation {
        speeds: None,
        ..situation(1_000)
    };
    assert_eq!(choose(&first).choice, Choice::Fresh);
    let stands = Situation {
        speeds: situation(0).speeds.map(|s| Speeds { write: 0, ..s }),
        ..situation(30_000)
    };
    assert_eq!(choose(&stands).choice, Choice::Committed { step: 100 });
}

fn bounds() -> Bounds {
    Bounds {
        overhead: 0.01,
        least: Span::from_secs(10),
        most: Span::from_secs(3_600),
    }
}

fn every(stall_ms: u64, durable_s: u64, mtbf_s: Option<u64>) -> f64 {
    let measured = Measured {
        stall: Span::from_millis(stall_ms),
        durable: Span::from_secs(durable_s),
        mtbf: mtbf_s.map(Span::from_secs),
    };
    interval(measured, bounds()).every.as_secs_f64()
}

#[test]
fn the_interval_is_daly_s_within_the_bounds() {
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-6 * b;
    // Without failures: as often as the overhead allows. C / (T + C) = 0.01.
    assert!(near(every(500, 1, None), 49.5));
    // C = 5 s, M = 1 day: sqrt(2 C M) = 929.516, times 1 + 0.0053791/3 + 0.0000289/9, less C.
    let daly = every(5_000, 1, Some(86_400));
    assert!((daly - 926.19).abs() < 0.05, "{daly}");
    // Failures often: the overhead wanted bounds it.
    assert!(near(every(5_000, 1, Some(600)), 495.0));
    // No sooner than the save before is durable, and within the bounds.
    assert!(near(every(500, 120, None), 120.0));
    assert!(near(every(1, 1, None), 10.0));
    assert!(near(every(100_000, 1, None), 3_600.0));
    // Nothing to save, and failures faster than a save: no more than the formula's own end.
    assert!(near(every(0, 0, Some(1)), 10.0));
    assert!(near(every(60_000, 1, Some(1)), 3_600.0));
    let measured = Measured {
        stall: Span::from_millis(500),
        durable: Span::from_secs(1),
        mtbf: None,
    };
    let chosen = interval(measured, bounds());
    assert!((chosen.overhead - 0.01).abs() < 1e-9);
    assert_eq!(
        chosen.why,
        "a checkpoint every 49.5 s, each of which holds training up for 500 ms: stalls take 1.00 % of the \
         time then, as wanted"
    );
}

#[test]
fn failures_that_were_seen_outweigh_what_is_reckoned_with() {
    let year = Span::from_secs(365 * 86_400);
    let of = |failures: u64, days: u64| {
        let observed = Span::from_secs(days * 86_400);
        mean_time_between_failures(failures, observed, 365, year).as_secs_f64() / 86_400.0
    };
    assert!((of(0, 0) - 1.0).abs() < 1e-9);
    assert!((of(9, 9) - 1.0).abs() < 1e-9);
    assert!((of(99, 9) - 0.1).abs() < 1e-9);
    assert_eq!(
        mean_time_between_failures(5, Span::ZERO, 0, Span::ZERO),
        Span(1)
    );
}

#[test]
fn a_rhythm_is_by_steps_or_by_time() {
    let rhythm = Rhythm {
        steps: 100,
        every: Span::from_secs(60),
    };
    let due = |step, ms| rhythm.due(step, (200, at(1_000)), at(ms));
    assert_eq!(due(299, 2_000), None);
    assert_eq!(due(300, 2_000), Some(Cause::Steps));
    assert_eq!(due(201, 61_000), Some(Cause::Seconds));
    assert_eq!(due(200, 99_000), None, "nothing was done since");
    assert_eq!(
        Rhythm::default().due(1_000, (0, at(0)), at(9_000_000)),
        None
    );
}
