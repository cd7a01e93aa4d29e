//! Logs in which something is missing or wrong, for good or for a while.

use super::*;

/// Answers everything until the log rests, or counts as damaged; and when that is.
fn run(log: &mut Log, store: &mut BTreeMap<u64, Vec<u8>>, mut now: Time) -> (Vec<Output>, Time) {
    let mut said = Vec::new();
    for _ in 0..100 {
        said.extend(settle(log, store, now));
        match log.poll_timeout() {
            Some((at, "store retry")) => {
                now = at;
                log.handle_timeout(now);
            }
            _ => return (said, now),
        }
    }
    panic!("the log never rests");
}

/// Waits until a damaged log is looked at again.
fn look_again(log: &mut Log, store: &mut BTreeMap<u64, Vec<u8>>) -> (Vec<Output>, Time) {
    let (at, why) = log.poll_timeout().unwrap();
    assert_eq!(why, "look at a damaged log again");
    log.handle_timeout(at);
    run(log, store, at)
}

#[test]
fn damage_stops_the_log() {
    let mut store = BTreeMap::new();
    let mut a = log(1);
    let first = birth(&[1], 1);
    a.claim(1, first.clone(), Time(1));
    a.commit(2, commit_ref(first.digest(), 1, 1), Time(1));
    a.commit(3, commit_ref(first.digest(), 2, 2), Time(1));
    settle(&mut a, &mut store, Time(1));

    let broken = |store: &BTreeMap<u64, Vec<u8>>| {
        let mut store = store.clone();
        let mut b = log(2);
        b.refresh(Time(1));
        b.claim(1, birth(&[2], 2), Time(1));
        let before = store.len();
        let (said, now) = run(&mut b, &mut store, Time(1));
        assert_eq!(store.len(), before, "a damaged log was written to");
        assert_eq!(outcome_of(&said, 1), Some(Outcome::Invalid(Why::Broken)));
        b.refresh(now);
        assert_eq!(b.poll_effect(), None);
        assert!(!b.may_delete(2));
        said.into_iter()
            .find_map(|o| match o {
                Output::Broken { why } => Some(why),
                _ => None,
            })
            .unwrap()
    };
    let mut gap = store.clone();
    gap.remove(&2);
    assert_eq!(broken(&gap), Damage::Gap { slot: 2 });
    let mut moved = store.clone();
    moved.insert(2, store[&3].clone());
    assert_eq!(broken(&moved), Damage::Slot { slot: 2, holds: 3 });
    let mut other = Entry::decode(&store[&2]).unwrap();
    other.nonce += 1;
    let mut mixed = store.clone();
    mixed.insert(2, other.encode().unwrap());
    assert_eq!(broken(&mixed), Damage::Chain { slot: 3 });
    let mut torn = store.clone();
    torn.insert(3, store[&3][..40].to_vec());
    assert!(matches!(broken(&torn), Damage::Entry { slot: 3, .. }));

    // An object that the store says exists but never shows.
    let (mut now, mut tried) = (Time(5), None);
    a.commit(9, commit_ref(first.digest(), 3, 3), now);
    for _ in 0..100 {
        if let Some((at, "store retry")) = a.poll_timeout() {
            now = at;
            a.handle_timeout(now);
        }
        match a.poll_effect() {
            Some(Effect::Create { op, slot, bytes }) => {
                tried = Some(bytes);
                let outcome = CreateOutcome::Exists;
                a.handle(Event::Created { op, slot, outcome }, now).unwrap();
            }
            Some(Effect::Read { op, slot }) => {
                let outcome = ReadOutcome::Absent;
                a.handle(Event::Read { op, slot, outcome }, now).unwrap();
            }
            None => break,
        }
    }
    let mut said = Vec::new();
    while let Some(output) = a.poll_output() {
        said.push(output);
    }
    // Whether the commit landed is not known.
    assert_eq!(outcome_of(&said, 9), None);
    let why = Damage::Vanished { slot: 4 };
    assert_eq!(said.last(), Some(&Output::Broken { why }));

    // The store shows it in the end, and it is the commit.
    store.extend(tried.map(|bytes| (4, bytes)));
    let (said, _) = look_again(&mut a, &mut store);
    assert_eq!(said.first(), Some(&Output::Mended));
    assert_eq!(outcome_of(&said, 9), Some(Outcome::Won { seq: 4 }));
}

/// A cached listing says for a while that an object is not there.
#[test]
fn what_is_missing_for_a_while_is_no_damage() {
    let mut store = BTreeMap::new();
    let mut a = with_commits(4);
    settle(&mut a, &mut store, Time(1));
    for times in [1, MAX_VANISHED - 1] {
        let (mut b, mut now) = (log(2), Time(1));
        b.refresh(now);
        let (mut said, mut missed) = (Vec::new(), 0);
        for _ in 0..100 {
            b.refresh(now);
            while let Some(effect) = b.poll_effect() {
                let event = match effect {
                    Effect::Read { op, slot: 3 } if missed <= times => {
                        missed += 1;
                        let outcome = ReadOutcome::Absent;
                        Event::Read {
                            op,
                            slot: 3,
                            outcome,
                        }
                    }
                    effect => answer(effect, &mut store),
                };
                b.handle(event, now).unwrap();
            }
            said.extend(std::iter::from_fn(|| b.poll_output()));
            if let Some((at, _)) = b.poll_timeout() {
                now = at;
                b.handle_timeout(now);
            }
        }
        let broken = |o: &Output| matches!(o, Output::Broken { .. });
        assert!(!said.iter().any(broken), "{times}: {said:?}");
        assert!(missed > times && b.tail().complete && b.tail().next == 6);
    }
}

#[test]
fn an_object_that_is_restored_mends_the_log() {
    let mut whole = BTreeMap::new();
    let mut a = with_commits(4);
    settle(&mut a, &mut whole, Time(1));
    let torn = |bytes: &Vec<u8>| bytes[..40].to_vec();
    for slot in [1, 2, 3, 4] {
        for damaged in [None, whole.get(&slot).map(torn)] {
            let mut store = whole.clone();
            match &damaged {
                Some(bytes) => drop(store.insert(slot, bytes.clone())),
                None => drop(store.remove(&slot)),
            }
            let mut b = log(2);
            b.refresh(Time(1));
            let (said, _) = run(&mut b, &mut store, Time(1));
            let why = match said.last() {
                Some(Output::Broken { why }) => why.clone(),
                other => panic!("{slot}: {other:?}"),
            };
            assert!(b.tail().next == slot && !b.tail().complete);
            // The same is not said again, and nothing is written.
            for _ in 0..3 {
                let (said, _) = look_again(&mut b, &mut store);
                assert_eq!(said, [], "{why}");
                b.commit(7, commit_ref(Digest([1; 32]), 1, 1), Time(2));
                let refused = b.poll_output();
                let outcome = Outcome::Invalid(Why::Broken);
                assert_eq!(refused, Some(Output::Appended { id: 7, outcome }));
            }
            assert_eq!(store.len(), if damaged.is_some() { 5 } else { 4 });
            store.clone_from(&whole);
            let (said, now) = look_again(&mut b, &mut store);
            assert_eq!(said.first(), Some(&Output::Mended));
            assert!(matches!(said.last(), Some(Output::TailConfirmed { .. })));
            assert_eq!((b.tail().next, b.tail().complete), (6, true));
            assert_eq!(b.poll_timeout(), None);
            b.commit(8, commit_ref(a.tail().claim.unwrap().1, 5, 5), now);
            let (said, _) = run(&mut b, &mut store, now);
            // It is no member.
            let refused = Outcome::Invalid(Why::NotMember);
            assert_eq!(outcome_of(&said, 8), Some(refused));
        }
    }
}
