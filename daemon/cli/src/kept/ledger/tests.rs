use muster_protocol::record::Kind;

use super::*;
use crate::kept::testing::{Bench, record};

/// A job with checkpoints of these steps.
fn job(bench: &mut Bench, steps: impl IntoIterator<Item = u64>) {
    let generation = bench.begin();
    for step in steps {
        let commit = bench.save(generation, step, None);
        bench.append(Body::Commit(commit));
    }
}

fn retire(seq: u64) -> Body {
    Body::Retire { seq, good: None }
}

fn steps(ledger: &Ledger) -> Vec<u64> {
    let live = ledger.rows.iter().filter(|row| row.in_force());
    live.map(|row| row.commit.step).collect()
}

#[test]
fn a_log_is_read_to_its_end_and_a_person_s_words_are_in_it() {
    let mut bench = Bench::new();
    job(&mut bench, [10, 20, 30, 40]);
    let mut ledger = Ledger::open(&bench.location(), "job", true).unwrap();
    assert_eq!(steps(&ledger), [10, 20, 30, 40]);
    assert_eq!(ledger.append(Body::Pin { seq: 2 }).unwrap(), 6);
    assert_eq!(ledger.append(retire(3)).unwrap(), 7);
    let reason = "cut".to_owned();
    assert_eq!(ledger.append(Body::Reject { seq: 5, reason }).unwrap(), 8);
    // Whoever reads it next sees the same.
    let again = Ledger::open(&bench.location(), "job", false).unwrap();
    for of in [&ledger, &again] {
        assert_eq!(steps(of), [10, 30]);
        assert!(of.rows[0].pinned);
        assert_eq!(
            (of.rows[1].retired, of.rows[3].rejected.as_deref()),
            (Some(7), Some("cut"))
        );
        assert_eq!(of.restorable().unwrap().commit.step, 30);
        assert_eq!(of.of_step(40).unwrap().seq, 5);
        assert_eq!(of.of_step(50), None);
    }
}

#[test]
fn the_rules_of_the_log_hold_for_people_too() {
    let mut bench = Bench::new();
    job(&mut bench, [10, 20, 30]);
    let mut ledger = Ledger::open(&bench.location(), "job", true).unwrap();
    ledger.append(Body::Pin { seq: 2 }).unwrap();
    for seq in [2, 3, 4, 9] {
        let refused = ledger.append(retire(seq));
        assert!(
            matches!(refused, Err(LedgerError::Refused(_))),
            "{seq}: {refused:?}"
        );
    }
    assert_eq!(steps(&ledger), [10, 20, 30]);
    // Not pinned any more, it is one of three.
    ledger.append(Body::Unpin { seq: 2 }).unwrap();
    assert!(!ledger.rows[0].pinned);
    ledger.append(retire(2)).unwrap();
    assert_eq!(steps(&ledger), [20, 30]);
}

#[test]
fn the_newest_rules_of_the_log_are_those_of_the_job() {
    let mut bench = Bench::new();
    job(&mut bench, [10, 20]);
    let mut ledger = Ledger::open(&bench.location(), "job", true).unwrap();
    assert_eq!(ledger.rules, None, "a log of before there were any");
    let rules = |last| Rules {
        last,
        best: 1,
        metric: "loss".into(),
        highest: true,
    };
    for last in [5, 10] {
        ledger.append(Body::Rules(rules(last))).unwrap();
    }
    let again = Ledger::open(&bench.location(), "job", false).unwrap();
    assert_eq!(again.rules, Some(rules(10)));
}

#[test]
fn an_old_log_is_read_from_its_newest_snapshot() {
    let mut bench = Bench::new();
    job(&mut bench, [10, 20, 30, 40]);
    let mut ledger = Ledger::open(&bench.location(), "job", true).unwrap();
    ledger.append(retire(2)).unwrap();
    let reason = "cut".to_owned();
    ledger.append(Body::Reject { seq: 5, reason }).unwrap();
    for _ in 0..126 {
        ledger.append(Body::Pin { seq: 4 }).unwrap();
        ledger.append(Body::Unpin { seq: 4 }).unwrap();
    }
    ledger.append(Body::Pin { seq: 3 }).unwrap();
    let entry = |slot: u64| bench.job().join(stores::entry(slot));
    let text = std::fs::read_to_string(entry(256)).unwrap();
    assert!(text.contains("\"snapshot\""), "{text}");
    // What is below is not looked at, but for the first, which names the job.
    for slot in 2..256 {
        std::fs::remove_file(entry(slot)).unwrap();
    }
    let again = Ledger::open(&bench.location(), "job", false).unwrap();
    assert_eq!(again.rows, ledger.rows);
    assert_eq!(again.latest, ledger.latest);
    assert_eq!(again.standings(), ledger.standings());
    assert_eq!(steps(&again), [20, 30]);
    assert!(again.rows[1].pinned && again.rows[0].retired.is_some());
    assert_eq!(again.rows[3].rejected.as_deref(), Some("cut"));
}

#[test]
fn two_that_write_at_once_get_slots_of_their_own() {
    let mut bench = Bench::new();
    job(&mut bench, [10, 20]);
    let mut one = Ledger::open(&bench.location(), "job", true).unwrap();
    let mut two = Ledger::open(&bench.location(), "job", true).unwrap();
    assert_eq!(one.append(Body::Pin { seq: 2 }).unwrap(), 4);
    assert_eq!(two.append(Body::Pin { seq: 3 }).unwrap(), 5);
    one.refresh().unwrap();
    assert!(one.rows.iter().all(|row| row.pinned));
}

#[test]
fn a_job_that_has_ended_is_still_kept_in_order() {
    let mut bench = Bench::new();
    job(&mut bench, [10, 20, 30]);
    let last = Ledger::open(&bench.location(), "job", false).unwrap();
    let restore = last.restorable().map(|row| row.commit);
    bench.next(&record(), Kind::End { cancelled: false }, restore);
    let mut ledger = Ledger::open(&bench.location(), "job", true).unwrap();
    assert_eq!(ledger.append(retire(2)).unwrap(), 6);
    assert!(ledger.standings().iter().all(|s| !s.in_use));
}

#[test]
fn what_is_no_job_s_log_is_named() {
    let mut bench = Bench::new();
    let open = |bench: &Bench, job: &str| Ledger::open(&bench.location(), job, false).unwrap_err();
    assert!(matches!(open(&bench, "job"), LedgerError::NoJob { .. }));
    job(&mut bench, [10]);
    assert!(matches!(open(&bench, "other"), LedgerError::NoJob { .. }));
    let nowhere = Location::Directory(bench.job());
    let error = Ledger::open(&nowhere, "job", false).unwrap_err();
    assert!(matches!(error, LedgerError::NoStore(_)));
    // An entry that says something else than the chain.
    std::fs::write(bench.job().join("log/00000003.json"), "{}").unwrap();
    assert!(matches!(open(&bench, "job"), LedgerError::Broken(_)));
}
