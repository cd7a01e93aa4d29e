//! Logs of several agents against one model store whose puts are lost, answered wrongly, or land
//! late; agents crash and come back with nothing.

use proptest::prelude::*;

use super::*;

/// One agent of the model; `boot` counts its crashes.
struct Agent {
    n: u8,
    log: Log,
    /// Operations under way: any of them is answered next.
    under_way: Vec<Effect>,
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
    begun: usize,
}

type Checked = Result<(), String>;

/// Snapshots that are close together, and forget soon.
const CLOSE: Compaction = Compaction {
    every: 4,
    claims: 2,
    retired: 1,
};

/// Whether an agent has read the commit of a slot, and found it whole.
fn knows(agent: u8, seq: u64) -> bool {
    splitmix(u64::from(agent), seq).is_multiple_of(2)
}

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
            begun: 0,
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
            log: Log::with_flaws(key(), STORE, NodeId([n; 32]), seed, self.flaws).compacted(CLOSE),
            under_way: Vec::new(),
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
        let agent = &mut self.agents[i];
        agent
            .under_way
            .extend(std::iter::from_fn(|| agent.log.poll_effect()));
        let count = agent.under_way.len();
        if count == 0 {
            return Ok(());
        }
        if count > MAX_READS {
            return Err(format!("{count} operations are under way"));
        }
        let at = self.draw(count as u64) as usize;
        let effect = self.agents[i].under_way.swap_remove(at);
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
                Output::Began { seq, snapshot } => {
                    let agent = &mut self.agents[i];
                    if agent.seen != 0 {
                        return Err(format!("begun at {seq}, behind {}", agent.seen));
                    }
                    agent.seen = seq;
                    self.begun += usize::from(!snapshot.claims.is_empty());
                }
                Output::TailConfirmed { .. } => {}
                Output::Mended => return Err("mended, and never broken".into()),
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
                let commit = commit_ref(d, 1, fresh);
                self.committed.push(commit);
                Body::Commit(commit)
            }
            (6, Some(_)) => Body::Retire {
                seq: self.draw(oldest) + 1,
                good: self.known_good(i),
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

    /// Two of those that this agent knows to be good. It has not heard what others retire meanwhile.
    fn known_good(&mut self, i: usize) -> Option<[u64; 2]> {
        let n = self.agents[i].n;
        let entries = self.store.values().map(|bytes| Entry::decode(bytes));
        let commits = entries.filter_map(|e| e.ok().filter(|e| matches!(e.body, Body::Commit(_))));
        let known: Vec<u64> = commits
            .map(|e| e.seq)
            .filter(|seq| knows(n, *seq))
            .collect();
        let at = |draw: u64| known.get(draw as usize).copied();
        let count = known.len() as u64;
        let (one, other) = (self.draw(count.max(1)), self.draw(count.max(1)));
        Some([at(one)?, at(other)?])
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
                Body::Retire { seq, good } => {
                    retired.insert(*seq);
                    gone.insert(*seq);
                    let left = |at: &u64| valid.contains_key(at) && !gone.contains(at);
                    let good: BTreeSet<u64> = good.iter().flatten().copied().collect();
                    let two = good.len() == 2 && good.iter().all(left);
                    if !(two || good.is_empty()) {
                        return Err(format!("retire {} leaves no two good ones", entry.seq));
                    }
                }
                Body::Reject { seq, .. } => {
                    gone.insert(*seq);
                }
                Body::Pin { .. } | Body::Unpin { .. } | Body::Rules(_) => {}
                Body::Snapshot(said) => {
                    let force = said.commits.iter().filter(|c| c.in_force());
                    let force: Vec<_> = force.map(|c| (c.seq, c.commit)).collect();
                    let here = valid.iter().filter(|(seq, _)| !gone.contains(seq));
                    let here: Vec<_> = here.map(|(seq, c)| (*seq, *c)).collect();
                    if force != here || Some(&said.claim) != latest || entry.seq % CLOSE.every != 0
                    {
                        return Err(format!("the snapshot in slot {} is wrong", entry.seq));
                    }
                }
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
    let (mut entries, mut late, mut crashes, mut deleted, mut begun) = (0, 0, 0, 0, 0);
    for seed in 0..150 {
        let model = Model::run(seed, Flaws::default()).unwrap_or_else(|e| panic!("{seed}: {e}"));
        entries += model.store.len();
        late += model.late_landings;
        crashes += model.crashes;
        deleted += model.deleted.len();
        begun += model.begun;
    }
    // The faults are really there.
    assert!(entries > 150 * 8, "{entries} entries");
    assert!(
        late > 150 && crashes > 150 && deleted > 150 && begun > 150,
        "{late} {crashes} {deleted} {begun}"
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
