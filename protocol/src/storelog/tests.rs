//! Cases by hand, those of single entries in `entries`; `model` has the random ones.

mod damage;
mod entries;
mod model;
mod snapshots;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use super::*;
use crate::ids::{LauncherId, StateId};
use crate::record::{Arbiter, Kind, Member, Place};

const STORE: StoreUuid = StoreUuid([7; 16]);

fn key() -> JobKey {
    JobKey {
        cluster: "c".into(),
        owner: "0".into(),
        id: "j".into(),
    }
}

fn member(n: u8) -> Member {
    Member {
        node: NodeId([n; 32]),
        state: StateId([n; 8]),
        launcher: LauncherId([n; 8]),
        slots: 1,
        guard: SocketAddr::from(([127, 0, 0, 1], 1000 + u16::from(n))),
        place: Place::default(),
    }
}

fn birth(members: &[u8], nonce: u64) -> Record {
    Record {
        arbiter: Arbiter::Store(STORE),
        nonce,
        ..Record::first(members.iter().map(|n| member(*n)).collect())
    }
}

fn next(parent: &Record, members: &[u8], nonce: u64) -> Record {
    Record {
        birth: parent.lineage(),
        number: parent.number + 1,
        parent: parent.digest(),
        ..birth(members, nonce)
    }
}

fn commit_ref(generation: Digest, number: u64, manifest: u64) -> CommitRef {
    let mut digest = Digest::ZERO;
    digest.0[..8].copy_from_slice(&manifest.to_be_bytes());
    digest.0[31] = 1;
    CommitRef {
        generation,
        number,
        step: number * 10,
        manifest: digest,
    }
}

fn log(n: u8) -> Log {
    Log::new(key(), STORE, NodeId([n; 32]), u64::from(n))
}

/// Answers everything as a faultless store does; returns what the log said.
fn settle(log: &mut Log, store: &mut BTreeMap<u64, Vec<u8>>, now: Time) -> Vec<Output> {
    let mut said = Vec::new();
    for _ in 0..10_000 {
        while let Some(output) = log.poll_output() {
            said.push(output);
        }
        let Some(effect) = log.poll_effect() else {
            return said;
        };
        log.handle(answer(effect, store), now).unwrap();
    }
    panic!("the log never rests");
}

fn answer(effect: Effect, store: &mut BTreeMap<u64, Vec<u8>>) -> Event {
    match effect {
        Effect::Read { op, slot } => Event::Read {
            op,
            slot,
            outcome: match store.get(&slot) {
                Some(bytes) => ReadOutcome::Found(bytes.clone()),
                None => ReadOutcome::Absent,
            },
        },
        Effect::Create { op, slot, bytes } => Event::Created {
            op,
            slot,
            outcome: match store.contains_key(&slot) {
                true => CreateOutcome::Exists,
                false => {
                    store.insert(slot, bytes);
                    CreateOutcome::Won
                }
            },
        },
    }
}

fn outcome_of(said: &[Output], id: u64) -> Option<Outcome> {
    let mut all = said.iter().filter_map(|o| match o {
        Output::Appended { id: of, outcome } if *of == id => Some(outcome.clone()),
        _ => None,
    });
    let first = all.next();
    assert_eq!(all.next(), None, "append {id} was answered twice");
    first
}

#[test]
fn a_job_is_born_commits_and_goes_on() {
    let mut store = BTreeMap::new();
    let (mut a, mut b) = (log(1), log(2));
    let first = birth(&[1, 2], 1);
    a.claim(1, first.clone(), Time(1));
    let said = settle(&mut a, &mut store, Time(1));
    assert_eq!(outcome_of(&said, 1), Some(Outcome::Won { seq: 1 }));

    b.refresh(Time(2));
    let said = settle(&mut b, &mut store, Time(2));
    assert!(said.contains(&Output::TailConfirmed { asked_at: Time(2) }));
    assert_eq!(
        b.tail().claim.map(|(_, d, s)| (d, s)),
        Some((first.digest(), 1))
    );

    // Any member may commit; the same commit by the other is the same commit.
    let saved = commit_ref(first.digest(), 1, 1);
    b.commit(2, saved, Time(3));
    assert_eq!(
        outcome_of(&settle(&mut b, &mut store, Time(3)), 2),
        Some(Outcome::Won { seq: 2 })
    );
    a.commit(3, saved, Time(3));
    assert_eq!(
        outcome_of(&settle(&mut a, &mut store, Time(3)), 3),
        Some(Outcome::Won { seq: 2 })
    );
    assert_eq!(store.len(), 2);

    // `a` does not know of a newer commit when it claims; the slot that it wins restores it.
    let newer = commit_ref(first.digest(), 2, 2);
    b.commit(4, newer, Time(4));
    settle(&mut b, &mut store, Time(4));
    a.claim(5, next(&first, &[1], 2), Time(5));
    let said = settle(&mut a, &mut store, Time(5));
    assert_eq!(outcome_of(&said, 5), Some(Outcome::Won { seq: 4 }));
    let (second, digest, _) = a.tail().claim.unwrap();
    assert_eq!(second.restore, Some(newer));
    let second = second.clone();

    // The old generation is fenced, and its late commit and claim are told so.
    b.commit(6, commit_ref(first.digest(), 3, 3), Time(6));
    b.claim(7, next(&first, &[2], 3), Time(6));
    let said = settle(&mut b, &mut store, Time(6));
    assert_eq!(outcome_of(&said, 6), Some(Outcome::Overtaken { by: 4 }));
    assert_eq!(outcome_of(&said, 7), Some(Outcome::Overtaken { by: 4 }));
    assert_eq!(store.len(), 4);
    assert!(b.may_delete_data(&commit_ref(first.digest(), 3, 3)));
    assert!(!b.may_delete_data(&newer));

    // An end, and a birth that names it.
    let end = Record {
        kind: Kind::End { cancelled: false },
        ..next(&second, &[], 4)
    };
    assert_eq!(digest, second.digest());
    a.claim(8, end, Time(7));
    settle(&mut a, &mut store, Time(7));
    b.claim(9, birth(&[2], 5), Time(8));
    let said = settle(&mut b, &mut store, Time(8));
    assert_eq!(outcome_of(&said, 9), Some(Outcome::Overtaken { by: 5 }));
    let again = Record {
        parent: b.tail().claim.unwrap().1,
        ..birth(&[2], 5)
    };
    b.claim(10, again, Time(8));
    let said = settle(&mut b, &mut store, Time(8));
    assert_eq!(outcome_of(&said, 10), Some(Outcome::Won { seq: 6 }));
}

/// That has claimed a first generation, and committed so many of its saves.
fn with_commits(count: u64) -> Log {
    let mut a = log(1);
    let first = birth(&[1], 1);
    a.claim(1, first.clone(), Time(1));
    for n in 1..=count {
        a.commit(1 + n, commit_ref(first.digest(), n, n), Time(1));
    }
    a
}

/// By somebody who counts on nothing.
fn retire(seq: u64) -> Body {
    Body::Retire { seq, good: None }
}

#[test]
fn retention_honours_pins_and_keeps_two() {
    let mut store = BTreeMap::new();
    let mut a = with_commits(4);
    a.append(10, Body::Pin { seq: 2 }, Time(1));
    a.append(11, retire(2), Time(1));
    a.append(12, retire(3), Time(1));
    a.append(13, retire(4), Time(1));
    let reason = "é".repeat(MAX_REASON);
    a.append(14, Body::Reject { seq: 5, reason }, Time(1));
    a.append(15, retire(5), Time(1));
    a.append(16, retire(9), Time(1));
    let said = settle(&mut a, &mut store, Time(1));
    let of = |id| outcome_of(&said, id).unwrap();
    assert_eq!(of(11), Outcome::Invalid(Why::Pinned));
    assert_eq!(of(12), Outcome::Won { seq: 7 });
    assert_eq!(of(13), Outcome::Invalid(Why::Needed));
    assert_eq!(of(14), Outcome::Won { seq: 8 });
    assert_eq!(of(15), Outcome::Won { seq: 9 });
    assert_eq!(of(16), Outcome::Invalid(Why::NoCommit(9)));
    let deletable: Vec<u64> = (1..=9).filter(|seq| a.may_delete(*seq)).collect();
    assert_eq!(deletable, [3, 5]);
    assert_eq!(a.tail().commit.unwrap().1, 4);
}

/// One that has not read the log yet does not know how many there are.
#[test]
fn a_commit_has_the_number_after_all_below_it() {
    let mut store = BTreeMap::new();
    let first = birth(&[1, 2], 1);
    let generation = first.digest();
    let (mut a, mut b) = (log(1), log(2));
    a.claim(1, first, Time(1));
    a.commit(2, commit_ref(generation, 1, 1), Time(1));
    a.commit(3, commit_ref(generation, 1, 2), Time(1));
    settle(&mut a, &mut store, Time(1));
    b.commit(4, commit_ref(generation, 1, 2), Time(2));
    b.commit(5, commit_ref(generation, 1, 3), Time(2));
    let said = settle(&mut b, &mut store, Time(2));
    assert_eq!(outcome_of(&said, 4), Some(Outcome::Won { seq: 3 }));
    assert_eq!(outcome_of(&said, 5), Some(Outcome::Won { seq: 4 }));
    let number = |seq| b.committed(seq).map(|commit| commit.number);
    assert_eq!(
        (2..=5).map(number).collect::<Vec<_>>(),
        [Some(1), Some(2), Some(3), None]
    );
}

/// Each knows of two that are good, and of no more: what one counts on the other retires.
#[test]
fn two_who_retire_at_once_leave_two_good_ones() {
    for first in [1, 2] {
        let mut store = BTreeMap::new();
        let mut member = log(1);
        let birth = birth(&[1], 1);
        member.claim(1, birth.clone(), Time(1));
        for n in 1..=5 {
            member.commit(1 + n, commit_ref(birth.digest(), n, n), Time(1));
        }
        settle(&mut member, &mut store, Time(1));
        let mut person = Log::new(key(), STORE, OPERATOR, 9);
        settle(&mut person, &mut store, Time(1));
        // Slots 2 to 6: the newest is known to be good by both, and one more by each.
        let of = |seq, good| Body::Retire { seq, good };
        member.append(10, of(3, Some([2, 6])), Time(2));
        person.append(10, of(2, Some([3, 6])), Time(2));
        let (mut said, mut late) = match first {
            1 => (settle(&mut member, &mut store, Time(2)), person),
            _ => (settle(&mut person, &mut store, Time(2)), member),
        };
        assert_eq!(outcome_of(&said, 10), Some(Outcome::Won { seq: 7 }));
        said = settle(&mut late, &mut store, Time(2));
        let gone = if first == 1 { 3 } else { 2 };
        let void = Outcome::Invalid(Why::NotLeft(gone));
        assert_eq!(outcome_of(&said, 10), Some(void));
        // Nor does one count on what is rejected, on itself, on one twice, or on nothing.
        let left = if gone == 3 { 2 } else { 3 };
        let reason = "cut".to_owned();
        late.append(11, Body::Reject { seq: left, reason }, Time(3));
        late.append(12, of(4, Some([left, 6])), Time(3));
        late.append(13, of(4, Some([4, 6])), Time(3));
        late.append(14, of(4, Some([6, 6])), Time(3));
        late.append(15, of(4, Some([5, 99])), Time(3));
        late.append(16, of(4, Some([5, 6])), Time(3));
        let said = settle(&mut late, &mut store, Time(3));
        let of = |id| outcome_of(&said, id).unwrap();
        for (id, slot) in [(12, left), (13, 4), (14, 6), (15, 99)] {
            assert_eq!(of(id), Outcome::Invalid(Why::NotLeft(slot)), "{id}");
        }
        assert!(matches!(of(16), Outcome::Won { .. }));
    }
}

#[test]
fn a_pin_is_taken_back_by_who_may_say_what_is_kept() {
    let mut store = BTreeMap::new();
    let mut a = log(1);
    let first = birth(&[1], 1);
    a.claim(1, first.clone(), Time(1));
    for n in 1..=3 {
        a.commit(1 + n, commit_ref(first.digest(), n, n), Time(1));
    }
    a.append(10, Body::Unpin { seq: 2 }, Time(1));
    a.append(11, Body::Pin { seq: 2 }, Time(1));
    a.append(12, retire(2), Time(1));
    let said = settle(&mut a, &mut store, Time(1));
    let of = |id| outcome_of(&said, id).unwrap();
    assert_eq!(of(10), Outcome::Invalid(Why::NotPinned));
    assert_eq!(of(12), Outcome::Invalid(Why::Pinned));
    // A stranger's word is none.
    let mut stranger = log(2);
    stranger.append(10, Body::Unpin { seq: 2 }, Time(1));
    let said = settle(&mut stranger, &mut store, Time(1));
    let refused = Outcome::Invalid(Why::NotMember);
    assert_eq!(outcome_of(&said, 10), Some(refused));
    a.append(13, Body::Unpin { seq: 2 }, Time(2));
    a.append(14, retire(2), Time(2));
    let said = settle(&mut a, &mut store, Time(2));
    let of = |id| outcome_of(&said, id).unwrap();
    assert_eq!(of(13), Outcome::Won { seq: 6 });
    assert_eq!(of(14), Outcome::Won { seq: 7 });
}

#[test]
fn a_person_may_say_what_is_kept_and_a_stale_leader_may_not() {
    let mut store = BTreeMap::new();
    let mut stale = log(1);
    let first = birth(&[1, 2], 1);
    stale.claim(1, first.clone(), Time(1));
    for n in 1..=4 {
        stale.commit(1 + n, commit_ref(first.digest(), n, n), Time(1));
    }
    settle(&mut stale, &mut store, Time(1));
    // The others go on without it.
    let mut other = log(2);
    other.claim(1, next(&first, &[2], 2), Time(2));
    settle(&mut other, &mut store, Time(2));
    stale.append(10, retire(2), Time(3));
    let reason = "cut".to_owned();
    stale.append(11, Body::Reject { seq: 5, reason }, Time(3));
    let said = settle(&mut stale, &mut store, Time(3));
    for id in [10, 11] {
        let outcome = outcome_of(&said, id).unwrap();
        assert_eq!(outcome, Outcome::Invalid(Why::NotMember));
    }
    let mut person = Log::new(key(), STORE, OPERATOR, 9);
    person.append(1, retire(2), Time(4));
    person.append(2, retire(4), Time(4));
    person.commit(3, commit_ref(first.digest(), 9, 9), Time(4));
    let said = settle(&mut person, &mut store, Time(4));
    let of = |id| outcome_of(&said, id).unwrap();
    assert_eq!(of(1), Outcome::Won { seq: 7 });
    assert_eq!(of(2), Outcome::Invalid(Why::Needed));
    assert_eq!(of(3), Outcome::Overtaken { by: 6 });
}

#[test]
fn after_an_unknown_put_only_the_same_bytes_follow() {
    let mut a = log(1);
    a.claim(1, birth(&[1], 1), Time(0));
    let mut puts = BTreeSet::new();
    let mut now = Time(0);
    for turn in 0..40 {
        match a.poll_effect() {
            Some(Effect::Read { op, slot }) => {
                // Others may read nothing there all the while; the put lands in the end.
                let outcome = match (slot, turn) {
                    (1, 30..) => ReadOutcome::Found(puts.first().cloned().unwrap()),
                    _ => ReadOutcome::Absent,
                };
                a.handle(Event::Read { op, slot, outcome }, now).unwrap();
            }
            Some(Effect::Create { op, slot, bytes }) => {
                puts.insert(bytes);
                let outcome = CreateOutcome::Unknown;
                a.handle(Event::Created { op, slot, outcome }, now).unwrap();
                let stale = Event::Created { op, slot, outcome };
                assert_eq!(a.handle(stale, now), Err(Error::NotInFlight { op }));
                let (at, _) = a.poll_timeout().unwrap();
                assert!(at.since(now) >= RETRY_FIRST && at.since(now) <= RETRY_MAX);
                now = at;
                a.handle_timeout(now);
            }
            None => break,
        }
    }
    assert_eq!(puts.len(), 1);
    let mut said = Vec::new();
    while let Some(output) = a.poll_output() {
        said.push(output);
    }
    assert_eq!(outcome_of(&said, 1), Some(Outcome::Won { seq: 1 }));
}

#[test]
fn an_entry_that_contradicts_its_record_is_refused() {
    let entry = Entry {
        seq: 1,
        prev: Digest::ZERO,
        writer: NodeId([1; 32]),
        nonce: u64::MAX,
        body: Body::Claim(Box::new(birth(&[1, 2], 1))),
    };
    let bytes = entry.encode().unwrap();
    assert_eq!(Entry::decode(&bytes), Ok(entry.clone()));
    let newer = String::from_utf8(bytes)
        .unwrap()
        .replace("{\"v\":2", "{\"v\":5");
    assert_eq!(Entry::decode(newer.as_bytes()), Err(EntryError::Version(5)));
    let text = entries::of_version_1(&entry);
    assert_eq!(Entry::decode(text.as_bytes()), Ok(entry));
    let lie = text.replace("\"number\":1", "\"number\":2");
    assert_eq!(
        Entry::decode(lie.as_bytes()),
        Err(EntryError::Disagrees("number"))
    );
    let more = text.replace("{\"v\":1", "{\"v\":1,\"x\":0");
    assert!(matches!(
        Entry::decode(more.as_bytes()),
        Err(EntryError::Json(_))
    ));
    let long = vec![b' '; MAX_ENTRY + 1];
    assert_eq!(
        Entry::decode(&long),
        Err(EntryError::TooLong { len: MAX_ENTRY + 1 })
    );
}

/// A disk that is full, or read-only: what is appended waits, and the lease that the reads confirm goes on.
#[test]
fn a_store_that_cannot_be_written_is_read_as_often_as_ever() {
    const EVERY: Span = Span::from_millis(500);
    let (mut a, mut store) = (log(1), BTreeMap::new());
    let first = birth(&[1], 1);
    a.claim(1, first.clone(), Time(0));
    settle(&mut a, &mut store, Time(0));
    let (mut now, mut creates) = (Time(0), 0);
    a.commit(2, commit_ref(first.digest(), 1, 9), now);
    for _ in 0..60 {
        now += EVERY;
        a.handle_timeout(now);
        a.refresh(now);
        let mut confirmed = Time(0);
        loop {
            while let Some(output) = a.poll_output() {
                if let Output::TailConfirmed { asked_at } = output {
                    confirmed = asked_at;
                }
            }
            let event = match a.poll_effect() {
                Some(Effect::Create { op, slot, .. }) => {
                    creates += 1;
                    let outcome = CreateOutcome::Unknown;
                    Event::Created { op, slot, outcome }
                }
                Some(read) => answer(read, &mut store),
                None => break,
            };
            a.handle(event, now).unwrap();
        }
        assert_eq!(confirmed, now);
    }
    // Tried again, and not each time.
    assert!((8..30).contains(&creates), "{creates}");
    // It can be written again.
    now += RETRY_MAX;
    a.handle_timeout(now);
    let said = settle(&mut a, &mut store, now);
    assert_eq!(outcome_of(&said, 2), Some(Outcome::Won { seq: 2 }));
}
