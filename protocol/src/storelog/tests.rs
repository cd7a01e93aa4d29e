//! Logs of several agents against one model store whose puts are lost, answered wrongly, or land
//! late; agents crash and come back with nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use proptest::prelude::*;

use super::*;
use crate::ids::{LauncherId, StateId};
use crate::record::{Arbiter, Cause, Kind, Member, Place};
use crate::spec::JobSpec;

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
        key: key(),
        birth: Digest::ZERO,
        number: 1,
        parent: Digest::ZERO,
        kind: Kind::Next,
        members: members.iter().map(|n| member(*n)).collect(),
        witnesses: Vec::new(),
        arbiter: Arbiter::Store(STORE),
        spec: JobSpec::default(),
        restarts_used: 0,
        cause: Cause::Formed,
        restore: None,
        nonce,
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

#[test]
fn retention_honours_pins_and_keeps_two() {
    let mut store = BTreeMap::new();
    let mut a = log(1);
    let first = birth(&[1], 1);
    a.claim(1, first.clone(), Time(1));
    for n in 1..=4 {
        a.commit(1 + n, commit_ref(first.digest(), n, n), Time(1));
    }
    a.append(10, Body::Pin { seq: 2 }, Time(1));
    a.append(11, Body::Retire { seq: 2 }, Time(1));
    a.append(12, Body::Retire { seq: 3 }, Time(1));
    a.append(13, Body::Retire { seq: 4 }, Time(1));
    let reason = "é".repeat(MAX_REASON);
    a.append(14, Body::Reject { seq: 5, reason }, Time(1));
    a.append(15, Body::Retire { seq: 5 }, Time(1));
    a.append(16, Body::Retire { seq: 9 }, Time(1));
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
    assert_eq!(a.tail().last_number, 4);
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
        let said = settle(&mut b, &mut store, Time(1));
        assert_eq!(store.len(), before, "a damaged log was written to");
        assert_eq!(outcome_of(&said, 1), Some(Outcome::Invalid(Why::Broken)));
        b.refresh(Time(2));
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
    let mut now = Time(5);
    a.commit(9, commit_ref(first.digest(), 3, 3), now);
    for _ in 0..100 {
        if let Some((at, _)) = a.poll_timeout() {
            now = at;
            a.handle_timeout(now);
        }
        match a.poll_effect() {
            Some(Effect::Create { op, slot, .. }) => {
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
    // Whether the commit landed is not known, and will not be.
    assert_eq!(outcome_of(&said, 9), None);
    let why = Damage::Vanished { slot: 4 };
    assert_eq!(said.last(), Some(&Output::Broken { why }));
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
    assert_eq!(Entry::decode(&bytes), Ok(entry));
    let text = String::from_utf8(bytes).unwrap();
    let lie = text.replace("\"number\":1", "\"number\":2");
    assert_eq!(
        Entry::decode(lie.as_bytes()),
        Err(EntryError::Disagrees("number"))
    );
    let newer = text.replace("{\"v\":1", "{\"v\":2");
    assert_eq!(Entry::decode(newer.as_bytes()), Err(EntryError::Version(2)));
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

/// One agent of the model; `boot` counts its crashes.
struct Agent {
    n: u8,
    log: Log,
    boot: u64,
    asked: BTreeMap<u64, Body>,
    seen: u64,
}

/// A run of the model: its faults by kind, or the rule that was broken.
struct Model {
    rng: u64,
    draws: u64,
    now: Time,
    flaws: Flaws,
    store: BTreeMap<u64, Vec<u8>>,
    late: Vec<(u64, Vec<u8>)>,
    agents: Vec<Agent>,
    fresh: u64,
    won: BTreeMap<u64, u64>,
    lost: BTreeSet<u64>,
    deleted: BTreeMap<Digest, CommitRef>,
    committed: Vec<CommitRef>,
    late_landings: usize,
    crashes: usize,
}

type Checked = Result<(), String>;

impl Model {
    fn new(seed: u64, flaws: Flaws) -> Model {
        let mut model = Model {
            rng: seed,
            draws: 0,
            now: Time(0),
            flaws,
            store: BTreeMap::new(),
            late: Vec::new(),
            agents: Vec::new(),
            fresh: 0,
            won: BTreeMap::new(),
            lost: BTreeSet::new(),
            deleted: BTreeMap::new(),
            committed: Vec::new(),
            late_landings: 0,
            crashes: 0,
        };
        for n in 1..=3 {
            let agent = model.boot(n, 0);
            model.agents.push(agent);
        }
        model
    }

    fn boot(&self, n: u8, boot: u64) -> Agent {
        let seed = u64::from(n) << 32 | boot;
        Agent {
            n,
            log: Log::with_flaws(key(), STORE, NodeId([n; 32]), seed, self.flaws),
            boot,
            asked: BTreeMap::new(),
            seen: 0,
        }
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.draws += 1;
        splitmix(self.rng, self.draws) % below
    }

    fn land(&mut self, slot: u64, bytes: Vec<u8>) -> bool {
        match self.store.contains_key(&slot) {
            true => false,
            false => {
                self.store.insert(slot, bytes);
                true
            }
        }
    }

    /// The next operation of agent `i`, with or without a fault.
    fn operate(&mut self, i: usize, faults: bool) -> Checked {
        let Some(effect) = self.agents[i].log.poll_effect() else {
            return Ok(());
        };
        let fault = if faults { self.draw(10) } else { 9 };
        let event = match (effect, fault) {
            (Effect::Read { op, slot }, 0) => Event::Read {
                op,
                slot,
                outcome: ReadOutcome::Failed,
            },
            (Effect::Create { op, slot, bytes }, 0..=4) => {
                match fault {
                    0 => {}
                    1 => {
                        self.land(slot, bytes);
                    }
                    _ => self.late.push((slot, bytes)),
                }
                let outcome = CreateOutcome::Unknown;
                Event::Created { op, slot, outcome }
            }
            (effect, _) => answer(effect, &mut self.store),
        };
        let now = self.now;
        self.agents[i]
            .log
            .handle(event, now)
            .map_err(|e| e.to_string())?;
        self.listen(i)
    }

    fn listen(&mut self, i: usize) -> Checked {
        while let Some(output) = self.agents[i].log.poll_output() {
            match output {
                Output::Entry { seq, .. } => {
                    let agent = &mut self.agents[i];
                    agent.seen += 1;
                    if agent.seen != seq {
                        return Err(format!("entry {seq} came as the {}th", agent.seen));
                    }
                }
                Output::Appended { id, outcome } => {
                    let body = self.agents[i].asked.remove(&id);
                    let Some(body) = body else {
                        return Err(format!("append {id} was answered twice"));
                    };
                    if let Outcome::Won { seq } = outcome {
                        let entry = Entry::decode(&self.store[&seq]).map_err(|e| e.to_string())?;
                        if name_of(&entry.body) != name_of(&body) {
                            return Err(format!("append {id} is said to stand in slot {seq}"));
                        }
                        if let Some(name) = name_of(&body) {
                            self.won.insert(name, seq);
                        }
                    } else if let Some(name) = name_of(&body) {
                        self.lost.insert(name);
                    }
                }
                Output::TailConfirmed { .. } => {}
                Output::Broken { why } => return Err(why.to_string()),
            }
        }
        Ok(())
    }

    fn ask(&mut self, i: usize) {
        let now = self.now;
        let kind = self.draw(8);
        self.fresh += 1;
        let fresh = self.fresh;
        let tail = self.agents[i].log.tail();
        let claim = tail.claim.map(|(r, d, _)| (r.clone(), d));
        let number = tail.last_number + 1;
        let oldest = tail.commit.map_or(2, |(_, seq)| seq);
        let body = match (kind, claim) {
            (0, _) => return self.agents[i].log.refresh(now),
            (1..=2, None) => Body::Claim(Box::new(birth(&[1, 2, 3], fresh))),
            (1..=2, Some((r, d))) if r.kind.is_terminal() => Body::Claim(Box::new(Record {
                parent: d,
                ..birth(&[1, 2, 3], fresh)
            })),
            (1, Some((r, _))) => Body::Claim(Box::new(next(&r, &[1, 2, 3], fresh))),
            (2, Some((r, _))) if fresh.is_multiple_of(5) => Body::Claim(Box::new(Record {
                kind: Kind::Dormant,
                ..next(&r, &[], fresh)
            })),
            (3..=5, Some((_, d))) => {
                let commit = commit_ref(d, number, fresh);
                self.committed.push(commit);
                Body::Commit(commit)
            }
            (6, Some(_)) => Body::Retire {
                seq: self.draw(oldest) + 1,
            },
            (7, Some(_)) if fresh.is_multiple_of(3) => Body::Reject {
                seq: oldest,
                reason: "damaged".into(),
            },
            _ => return,
        };
        let agent = &mut self.agents[i];
        agent.asked.insert(fresh, body.clone());
        match body {
            Body::Claim(record) => agent.log.claim(fresh, *record, now),
            Body::Commit(commit) => agent.log.commit(fresh, commit, now),
            body => agent.log.append(fresh, body, now),
        }
    }

    /// Deletes the data of some commit, if an agent's log allows it.
    fn delete(&mut self, i: usize) {
        if self.committed.is_empty() {
            return;
        }
        let at = self.draw(self.committed.len() as u64) as usize;
        let commit = self.committed[at];
        if self.agents[i].log.may_delete_data(&commit) {
            self.deleted.insert(commit.manifest, commit);
        }
    }

    fn turn(&mut self, faults: bool) -> Checked {
        let i = self.draw(3) as usize;
        self.now += Span::from_millis(20);
        match self.draw(20) {
            0..=9 => self.operate(i, faults)?,
            10..=12 => {
                let now = self.now;
                self.agents[i].log.handle_timeout(now);
            }
            13..=15 if faults => self.ask(i),
            16 if faults && !self.late.is_empty() => {
                let at = self.draw(self.late.len() as u64) as usize;
                let (slot, bytes) = self.late.swap_remove(at);
                self.late_landings += usize::from(self.land(slot, bytes));
            }
            17 if faults && self.draw(4) == 0 => {
                let boot = self.agents[i].boot + 1;
                self.agents[i] = self.boot(self.agents[i].n, boot);
                self.crashes += 1;
            }
            18 => self.delete(i),
            _ => {}
        }
        self.listen(i)
    }

    /// A reader that shares no code with the view: plain scans over what the store holds.
    fn check(&self) -> Checked {
        let mut entries: Vec<Entry> = Vec::new();
        let mut prev = Digest::ZERO;
        for (at, (slot, bytes)) in self.store.iter().enumerate() {
            let entry = Entry::decode(bytes).map_err(|e| e.to_string())?;
            if *slot != at as u64 + 1 || entry.seq != *slot || entry.prev != prev {
                return Err(format!("slot {slot} does not continue the log"));
            }
            prev = Entry::digest(bytes);
            entries.push(entry);
        }
        let mut nonces = BTreeMap::new();
        let mut latest: Option<&Record> = None;
        let mut valid: BTreeMap<u64, CommitRef> = BTreeMap::new();
        let mut gone: BTreeSet<u64> = BTreeSet::new();
        let mut retired: BTreeSet<u64> = BTreeSet::new();
        for entry in &entries {
            if let Some(twice) = nonces.insert((entry.writer, entry.nonce), entry.seq) {
                return Err(format!("one append in slots {twice} and {}", entry.seq));
            }
            match &entry.body {
                Body::Claim(record) => {
                    let follows = match latest {
                        None => record.number == 1,
                        Some(l) => {
                            record.parent == l.digest()
                                && (record.number == 1) == l.kind.is_terminal()
                        }
                    };
                    let newest = valid.iter().rev().find(|(seq, _)| !gone.contains(seq));
                    if !follows || record.restore != newest.map(|(_, c)| *c) {
                        return Err(format!("claim {} was written, invalid", entry.seq));
                    }
                    latest = Some(record);
                }
                Body::Commit(commit) => {
                    if latest.is_none_or(|l| l.digest() != commit.generation) {
                        return Err(format!("commit {} was written, fenced", entry.seq));
                    }
                    valid.insert(entry.seq, *commit);
                }
                Body::Retire { seq } => {
                    retired.insert(*seq);
                    gone.insert(*seq);
                }
                Body::Reject { seq, .. } => {
                    gone.insert(*seq);
                }
                Body::Pin { .. } => {}
            }
            if let Some(name) = name_of(&entry.body)
                && self.lost.contains(&name)
            {
                return Err(format!("slot {} holds what was reported lost", entry.seq));
            }
        }
        for (seq, commit) in &valid {
            if self.deleted.contains_key(&commit.manifest) && !retired.contains(seq) {
                return Err(format!("the data of commit {seq} was deleted"));
            }
        }
        for (name, seq) in &self.won {
            if entries
                .get(*seq as usize - 1)
                .and_then(|e| name_of(&e.body))
                != Some(*name)
            {
                return Err(format!("slot {seq} was won, and holds something else"));
            }
        }
        Ok(())
    }

    /// Runs with faults, then without until every log rests; checks all along.
    fn run(seed: u64, flaws: Flaws) -> Result<Model, String> {
        let mut model = Model::new(seed, flaws);
        for turn in 0..600 {
            model.turn(true)?;
            if turn % 50 == 0 {
                model.check()?;
            }
        }
        while let Some((slot, bytes)) = model.late.pop() {
            model.late_landings += usize::from(model.land(slot, bytes));
        }
        // Once for the appends that are under way, once for everybody to read them.
        for _ in 0..2 {
            let now = model.now;
            for agent in &mut model.agents {
                agent.log.refresh(now);
            }
            for _ in 0..2_000 {
                model.turn(false)?;
            }
        }
        model.check()?;
        for agent in &model.agents {
            let tail = agent.log.tail();
            if !tail.complete || tail.next != model.store.len() as u64 + 1 {
                return Err(format!("agent {} did not reach the tail", agent.n));
            }
            if !agent.asked.is_empty() {
                return Err(format!("agent {} has appends without an answer", agent.n));
            }
        }
        Ok(model)
    }
}

/// Names an append by what is unique in it.
fn name_of(body: &Body) -> Option<u64> {
    match body {
        Body::Claim(record) => Some(record.nonce),
        Body::Commit(commit) => {
            let (head, _) = commit.manifest.0.split_first_chunk::<8>()?;
            Some(u64::from_be_bytes(*head))
        }
        _ => None,
    }
}

#[test]
fn seeds_keep_one_linear_history() {
    let (mut entries, mut late, mut crashes, mut deleted) = (0, 0, 0, 0);
    for seed in 0..400 {
        let model = Model::run(seed, Flaws::default()).unwrap_or_else(|e| panic!("{seed}: {e}"));
        entries += model.store.len();
        late += model.late_landings;
        crashes += model.crashes;
        deleted += model.deleted.len();
    }
    // The faults are really there.
    assert!(entries > 400 * 8, "{entries} entries");
    assert!(
        late > 400 && crashes > 400 && deleted > 400,
        "{late} {crashes} {deleted}"
    );
}

fn found_by(flaws: Flaws) -> (u64, String) {
    (0..2_000)
        .find_map(|seed| Model::run(seed, flaws).err().map(|e| (seed, e)))
        .unwrap_or_else(|| panic!("no seed finds {flaws:?}"))
}

#[test]
fn a_dropped_r12_is_found() {
    let flaws = Flaws {
        skip_r12: true,
        ..Flaws::default()
    };
    let (_, why) = found_by(flaws);
    assert!(
        why.contains("deleted") || why.contains("reported lost"),
        "{why}"
    );
}

#[test]
fn a_dropped_r13_is_found() {
    let flaws = Flaws {
        skip_r13: true,
        ..Flaws::default()
    };
    let (_, why) = found_by(flaws);
    assert!(why.contains("fenced") || why.contains("claim"), "{why}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_seed_keeps_one_linear_history(seed: u64) {
        if let Err(why) = Model::run(seed, Flaws::default()) {
            prop_assert!(false, "{}", why);
        }
    }

    #[test]
    fn no_bytes_break_a_reader(bytes in proptest::collection::vec(any::<u8>(), 0..400), at: usize) {
        let _ = Entry::decode(&bytes);
        // A real entry with one byte changed.
        let body = Body::Claim(Box::new(birth(&[1, 2], 1)));
        let entry = Entry { seq: 1, prev: Digest::ZERO, writer: NodeId([1; 32]), nonce: 1, body };
        let mut changed = entry.encode().unwrap();
        let at = at % changed.len();
        changed[at] ^= bytes.first().copied().unwrap_or(1);
        let _ = Entry::decode(&changed);
    }
}
