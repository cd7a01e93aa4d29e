//! Old logs: how they are compacted, and where their readers begin.

use super::*;

/// Answers take this long, each by itself.
const LATENCY: Span = Span::from_millis(30);

/// A log to which one member has committed and retired, so that it ends before this slot.
fn old(until: u64, every: u64) -> (Log, BTreeMap<u64, Vec<u8>>) {
    let mut store = BTreeMap::new();
    let compaction = Compaction {
        every,
        ..Compaction::default()
    };
    let mut a = log(1).compacted(compaction);
    let first = birth(&[1, 2], 1);
    a.claim(1, first.clone(), Time(1));
    settle(&mut a, &mut store, Time(1));
    let mut slots = VecDeque::new();
    for n in 1.. {
        if a.tail().next >= until {
            break;
        }
        a.commit(2 * n, commit_ref(first.digest(), n, n), Time(1));
        settle(&mut a, &mut store, Time(1));
        slots.push_back(a.tail().commit.unwrap().1);
        if slots.len() > 3 && a.tail().next < until {
            a.append(2 * n + 1, retire(slots.pop_front().unwrap()), Time(1));
            let said = settle(&mut a, &mut store, Time(1));
            assert!(matches!(
                outcome_of(&said, 2 * n + 1),
                Some(Outcome::Won { .. })
            ));
        }
    }
    (a, store)
}

/// Cost of reading a log.
struct Walk {
    took: Span,
    reads: usize,
    most: usize,
    said: Vec<Output>,
}

/// Reads to the end; answers need [`LATENCY`], and some of them are the test's.
fn walk(
    log: &mut Log,
    store: &mut BTreeMap<u64, Vec<u8>>,
    mut told: impl FnMut(u64, usize) -> Option<ReadOutcome>,
) -> Walk {
    let begin = Time(1);
    let (mut now, mut reads, mut most) = (begin, 0, 0);
    let mut under_way: VecDeque<(Time, Effect)> = VecDeque::new();
    let mut said = Vec::new();
    log.refresh(begin);
    for _ in 0..100_000 {
        under_way.extend(std::iter::from_fn(|| log.poll_effect()).map(|e| (now + LATENCY, e)));
        most = most.max(under_way.len());
        said.extend(std::iter::from_fn(|| log.poll_output()));
        let retry = log.poll_timeout().map(|(at, _)| at);
        let answered = under_way.front().map(|(at, _)| *at);
        match (retry, answered) {
            (Some(at), answered) if answered.is_none_or(|other| at < other) => {
                now = now.max(at);
                log.handle_timeout(now);
            }
            (_, Some(at)) => {
                now = now.max(at);
                let (_, effect) = under_way.pop_front().unwrap();
                let event = match effect {
                    Effect::Read { op, slot } => {
                        reads += 1;
                        let found = answer(Effect::Read { op, slot }, store);
                        match told(slot, reads) {
                            Some(outcome) => Event::Read { op, slot, outcome },
                            None => found,
                        }
                    }
                    effect => answer(effect, store),
                };
                log.handle(event, now).unwrap();
            }
            _ => {
                let took = now.since(begin);
                return Walk {
                    took,
                    reads,
                    most,
                    said,
                };
            }
        }
    }
    panic!("never at rest: {log:?}");
}

fn knows_the_same(a: &Log, b: &Log) {
    assert_eq!(a.view.snapshot(), b.view.snapshot());
    assert_eq!((a.next, a.last), (b.next, b.last));
    assert!(b.tail().complete);
}

fn begun_at(walk: &Walk) -> Option<u64> {
    match walk.said.first() {
        Some(Output::Began { seq, .. }) => Some(*seq),
        _ => None,
    }
}

#[test]
fn a_reader_of_an_old_log_begins_at_its_newest_snapshot() {
    for until in [2, 3, 255, 256, 257, 258, 511, 512, 513, 1_000, 2_000, 9_000] {
        let (a, mut store) = old(until, 256);
        assert_eq!(store.len() as u64 + 1, a.tail().next);
        for (slot, bytes) in &store {
            let entry = Entry::decode(bytes).unwrap();
            let snapshot = matches!(entry.body, Body::Snapshot(_));
            assert_eq!(snapshot, slot.is_multiple_of(256), "{slot}");
        }
        let mut b = log(2);
        let read = walk(&mut b, &mut store, |_, _| None);
        knows_the_same(&a, &b);
        let newest = store.len() as u64 / 256 * 256;
        assert_eq!(begun_at(&read), Some(newest).filter(|at| *at > 0));
        // The lease of workers whose agent was restarted is one and a half seconds at the least.
        assert!(read.took < Span::from_secs(1), "{until}: {:?}", read.took);
        assert!(read.reads < 330 && read.most <= MAX_READS, "{}", read.reads);
        // What it does next is what one does who has read all.
        let (_, digest, _) = b.tail().claim.unwrap();
        b.commit(1, commit_ref(digest, until, until), Time(9));
        let said = settle(&mut b, &mut store, Time(9));
        assert!(matches!(outcome_of(&said, 1), Some(Outcome::Won { .. })));
    }
}

/// Of a build that wrote no snapshots: it is read from its beginning, several slots at a time, and the next slot of a
/// snapshot holds one.
#[test]
fn a_log_without_snapshots_is_read_and_gets_one() {
    let (a, mut store) = old(2_000, u64::MAX);
    let mut b = log(2);
    let read = walk(&mut b, &mut store, |_, _| None);
    assert_eq!(begun_at(&read), None);
    knows_the_same(&a, &b);
    assert!(read.took < Span::from_secs(5), "{:?}", read.took);
    assert_eq!(read.most, MAX_READS);
    let (_, digest, _) = b.tail().claim.unwrap();
    for n in 0..60 {
        b.commit(n, commit_ref(digest, 5_000 + n, 5_000 + n), Time(9));
        let said = settle(&mut b, &mut store, Time(9));
        assert!(matches!(outcome_of(&said, n), Some(Outcome::Won { .. })));
    }
    let mut c = log(1);
    assert_eq!(
        begun_at(&walk(&mut c, &mut store, |_, _| None)),
        Some(2_048)
    );
    knows_the_same(&b, &c);
}

#[test]
fn stale_answers_and_failures_cost_time_only() {
    let (a, mut store) = old(2_000, 256);
    // A listing that is old: slots from there on are not there yet, to the first who asks.
    for stale in [1, 2, 256, 700, 1_024, 1_500, 1_792, 1_793] {
        let mut asked = BTreeSet::new();
        let mut b = log(2);
        let read = walk(&mut b, &mut store, |slot, _| {
            (slot >= stale && asked.insert(slot)).then_some(ReadOutcome::Absent)
        });
        let broken = |o: &Output| matches!(o, Output::Broken { .. });
        assert!(!read.said.iter().any(broken), "{stale}");
        b.refresh(Time(2));
        let mut last = walk(&mut b, &mut store, |_, _| None);
        for _ in 0..2_000 {
            if b.next == a.next {
                break;
            }
            last = walk(&mut b, &mut store, |_, _| None);
        }
        assert!(last.said.len() < 4_000);
        knows_the_same(&a, &b);
    }
    for fails in [2, 3, 5] {
        let mut b = log(2);
        let read = walk(&mut b, &mut store, |_, nth| {
            (nth % fails == 0).then_some(ReadOutcome::Failed)
        });
        knows_the_same(&a, &b);
        assert!(read.took < Span::from_secs(600), "{:?}", read.took);
    }
    // One slot that can never be read holds nobody up who does not need it.
    for never in [256, 512, 1_024, 1_280] {
        let mut b = log(2);
        let read = walk(&mut b, &mut store, |slot, _| {
            (slot == never).then_some(ReadOutcome::Failed)
        });
        knows_the_same(&a, &b);
        assert!(begun_at(&read).is_some_and(|at| at > never), "{never}");
    }
}

#[test]
fn a_snapshot_that_lies_is_damage_to_those_who_know_better() {
    let (a, store) = old(258, 256);
    let lies: [fn(&mut Snapshot); 4] = [
        |s| s.last_number += 1,
        |s| drop(s.commits.pop()),
        |s| s.commits[0].pinned = true,
        |s| s.claims[0].0 += 1,
    ];
    for lie in lies {
        let mut store = store.clone();
        let mut entry = Entry::decode(&store[&256]).unwrap();
        let Body::Snapshot(snapshot) = &mut entry.body else {
            panic!("{entry:?}")
        };
        lie(snapshot);
        store.remove(&257);
        store.insert(256, entry.encode().unwrap());
        let mut b = log(2).compacted(Compaction {
            every: 1 << 60,
            ..Compaction::default()
        });
        b.refresh(Time(1));
        let said = settle(&mut b, &mut store, Time(1));
        let why = Damage::Snapshot { slot: 256 };
        assert_eq!(said.last(), Some(&Output::Broken { why }));
    }
    assert_eq!(a.tail().next, 258);
}

#[test]
fn nobody_begins_at_the_snapshot_of_another_job() {
    let (_, mut store) = old(300, 256);
    let other = JobKey {
        owner: "1".into(),
        ..key()
    };
    let mut b = Log::new(other, STORE, NodeId([1; 32]), 1);
    b.refresh(Time(1));
    let said = settle(&mut b, &mut store, Time(1));
    // Its first entry tells whose it is.
    let Some(Output::Entry {
        seq: 1,
        valid: false,
        ..
    }) = said.first()
    else {
        panic!("{:?}", said.first())
    };
    let mut b = Log::new(key(), StoreUuid([1; 16]), NodeId([1; 32]), 1);
    b.refresh(Time(1));
    let said = settle(&mut b, &mut store, Time(1));
    assert!(matches!(said.first(), Some(Output::Entry { seq: 1, .. })));
}

/// More checkpoints in force than an entry holds: the log goes on without a snapshot.
#[test]
fn a_snapshot_that_does_not_fit_is_left_out() {
    let every = 4_096;
    let (mut a, mut store) = (log(1), BTreeMap::new());
    a = a.compacted(Compaction {
        every,
        ..Compaction::default()
    });
    let first = birth(&[1], 1);
    a.claim(1, first.clone(), Time(1));
    for n in 1..=every + 10 {
        a.commit(n + 1, commit_ref(first.digest(), n, n), Time(1));
        let said = settle(&mut a, &mut store, Time(1));
        assert!(matches!(
            outcome_of(&said, n + 1),
            Some(Outcome::Won { .. })
        ));
    }
    let entry = Entry::decode(&store[&every]).unwrap();
    assert!(matches!(entry.body, Body::Commit(_)));
    let mut b = log(2).compacted(Compaction {
        every,
        ..Compaction::default()
    });
    let read = walk(&mut b, &mut store, |_, _| None);
    assert_eq!(begun_at(&read), None);
    knows_the_same(&a, &b);
}

/// The largest record, and as much besides as a job has that keeps a thousand checkpoints.
#[test]
fn a_snapshot_of_the_largest_job_fits() {
    let of = |n: u16| Member {
        node: NodeId([n as u8; 32]),
        guard: SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, n)),
        ..member(1)
    };
    let record = |members: u16| Record {
        arbiter: Arbiter::Store(STORE),
        ..Record::first((0..members).map(of).collect())
    };
    let standing = |n: u64, retired| Standing {
        seq: u64::from(u32::MAX) + n,
        commit: commit_ref(Digest([9; 32]), 1 << 40, n),
        pinned: true,
        retired,
        rejected: None,
    };
    for (members, kept) in [(1, 1_000), (1_024, 400)] {
        let claim = record(members);
        let mut claims = vec![(1 << 40, Digest([8; 32])); Compaction::default().claims];
        claims.push((1 << 40, claim.digest()));
        let retired = Compaction::default().retired as u64;
        let snapshot = Snapshot {
            claims,
            claim,
            last_number: 1 << 40,
            commits: (0..kept)
                .map(|n| standing(n, None))
                .chain((0..retired).map(|n| standing(n, Some(1 << 40))))
                .collect(),
            rules: None,
        };
        let entry = Entry {
            seq: 1 << 40,
            prev: Digest::ZERO,
            writer: NodeId([1; 32]),
            nonce: 1,
            body: Body::Snapshot(Box::new(snapshot)),
        };
        let bytes = entry.encode().unwrap();
        assert_eq!(Entry::decode(&bytes), Ok(entry), "{}", bytes.len());
    }
}

/// A leader that dies before it has written the snapshot leaves that to the next who appends.
#[test]
fn the_next_who_appends_writes_what_is_due() {
    let (_, mut store) = old(258, 256);
    store.retain(|slot, _| *slot < 256);
    let mut b = log(2);
    b.refresh(Time(1));
    settle(&mut b, &mut store, Time(1));
    assert_eq!(store.len(), 255, "who only reads writes nothing");
    let (_, digest, _) = b.tail().claim.unwrap();
    b.commit(1, commit_ref(digest, 999, 999), Time(2));
    let said = settle(&mut b, &mut store, Time(2));
    assert_eq!(outcome_of(&said, 1), Some(Outcome::Won { seq: 257 }));
    let entry = Entry::decode(&store[&256]).unwrap();
    assert!(matches!(entry.body, Body::Snapshot(_)));
    assert_eq!(entry.writer, NodeId([2; 32]));
}
