//! True state, as nobody in the simulation can see it: every disk, every vote, the whole
//! log, every worker. The invariants are judged against this, never against what an agent believes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use muster_protocol::job::Durable;
use muster_protocol::local::Start;
use muster_protocol::record::{Arbiter, CommitRef, Kind, Record};
use muster_protocol::storelog::{Body, Entry};
use muster_protocol::wire::{Action, Ballot, JobMessage};
use muster_protocol::{Digest, LauncherId, NodeId, StateId};

/// One agent with one state directory.
pub type Holder = (NodeId, StateId);

/// Workers that came into being.
#[derive(Clone, Debug)]
pub struct Spawn {
    pub node: usize,
    pub launcher: LauncherId,
    pub token: u32,
    pub start: Start,
    pub at: u64,
    /// The commit that the agent's head restores, if its head is this generation.
    pub restore: Option<Option<CommitRef>>,
}

/// A rank's stop under a barrier.
#[derive(Clone, Debug)]
pub struct StoppedAt {
    pub node: usize,
    pub digest: Digest,
    pub step: u64,
    pub installed: Option<(u32, u64)>,
}

/// Ranks that save for a checkpoint under a barrier.
#[derive(Clone, Debug)]
pub struct SavesAt {
    pub node: usize,
    pub digest: Digest,
    pub barrier: u32,
    pub step: u64,
    pub installed: Option<(u32, u64)>,
}

/// An answer that only a voter may give.
#[derive(Clone, Debug)]
pub struct VoteSaid {
    pub by: Holder,
    pub parent: Digest,
}

/// A launcher was told that the job is over for it.
#[derive(Clone, Debug)]
pub struct ToldEnd {
    pub at: u64,
    pub node: usize,
    pub launcher: LauncherId,
    /// The life that it took part or waited in, by its agent's word.
    pub life: Option<Digest>,
    pub code: i32,
    pub report: String,
    /// It, or its node, was to leave.
    pub leaves: bool,
    /// Somebody has cancelled the job since it was started.
    pub cancelled: bool,
}

/// Contents of the log, folded by rules written down here a second time.
#[derive(Clone, Debug, Default)]
pub struct LogTruth {
    pub next: u64,
    pub last: Digest,
    /// Valid claims in order, with their slots; validity leaves the restored commit aside, which is
    /// I6's to judge.
    pub claims: Vec<(u64, Arc<Record>, Digest)>,
    /// Valid commits by slot, and whether they were retired or rejected since.
    pub commits: BTreeMap<u64, (CommitRef, bool)>,
    /// For each claim, what it should restore.
    pub due: BTreeMap<Digest, Option<CommitRef>>,
    pub gap: Option<u64>,
    pub broken: Option<u64>,
}

/// Additions since the invariants were last judged.
#[derive(Clone, Debug, Default)]
pub struct Fresh {
    pub said: Vec<VoteSaid>,
    pub proposed: BTreeSet<(Digest, Ballot)>,
    /// Generations, and changes of their voters, about whose successor or commits something was said.
    pub parents: BTreeSet<Digest>,
    pub announced: Vec<Digest>,
    /// Changes of voters.
    pub voters: Vec<Digest>,
    /// How many of each have been judged.
    pub spawns: usize,
    pub claims: usize,
    pub committed: usize,
    pub told: usize,
}

#[derive(Clone, Debug, Default)]
pub struct Truth {
    pub now: u64,
    pub records: BTreeMap<Digest, Arc<Record>>,
    /// Every record that a state directory has held as its head.
    pub heads: BTreeMap<Holder, BTreeSet<Digest>>,
    /// Present contents of each node's disk.
    pub disks: BTreeMap<NodeId, (StateId, Durable)>,
    /// All votes ever accepted, by parent, ballot and value.
    pub votes: BTreeMap<Digest, BTreeMap<Ballot, BTreeMap<Digest, BTreeSet<Holder>>>>,
    /// Values that each ballot proposed, ever.
    pub proposed: BTreeMap<(Digest, Ballot), BTreeSet<Digest>>,
    /// Holders that bound themselves to a birth, ever.
    pub bound: BTreeMap<Digest, BTreeSet<Holder>>,
    /// The holders that acknowledged each commit, ever, by the vote that they had then: a generation, or a change of
    /// its voters.
    pub acks: BTreeMap<Digest, BTreeMap<u64, (CommitRef, BTreeSet<Holder>)>>,
    /// Commits that a leader announced as done.
    pub committed: Vec<CommitRef>,
    /// Records that some agent announced as decided.
    pub announced: BTreeMap<Digest, Arc<Record>>,
    /// Changes of voters that some agent announced as decided.
    pub voters: BTreeSet<Digest>,
    /// Values that a majority accepted at one ballot, by parent.
    pub chosen: BTreeMap<Digest, BTreeSet<Digest>>,
    pub spawns: Vec<Spawn>,
    pub stops: Vec<StoppedAt>,
    pub saves: Vec<SavesAt>,
    /// The newest step that some rank of each generation has sealed.
    pub sealed: BTreeMap<Digest, u64>,
    /// The life of the job that each launcher was told last.
    pub lives: BTreeMap<LauncherId, Option<Digest>>,
    /// When each launcher first registered, and when each end of the job was first announced, or stood in the log.
    pub registered: BTreeMap<LauncherId, u64>,
    pub ended: BTreeMap<Digest, u64>,
    pub told: Vec<ToldEnd>,
    /// Generations whose members were ordered to stop in another way than by a step.
    pub ending: BTreeSet<Digest>,
    pub log: LogTruth,
    /// Commits that some agent tried to write to the log.
    pub asked: Vec<CommitRef>,
    /// Manifests whose data was deleted, because the agent that wrote it said that it may be.
    pub deleted: BTreeSet<Digest>,
    /// The announced records that follow a record, by lineage and parent.
    pub children: BTreeMap<(Digest, Digest), BTreeSet<Digest>>,
    /// Whether anything changed since the invariants were last judged.
    pub dirty: bool,
    pub fresh: Fresh,
}

impl Truth {
    pub fn learn(&mut self, record: &Arc<Record>) -> Digest {
        let digest = record.digest();
        self.records.entry(digest).or_insert_with(|| record.clone());
        digest
    }

    /// A write of a job's state reached a disk.
    pub fn persisted(&mut self, by: Holder, durable: Durable) {
        self.dirty = true;
        if let Some(bound) = &durable.bound {
            let digest = self.learn(bound);
            self.bound.entry(digest).or_default().insert(by);
        }
        if let Some(head) = &durable.head {
            let generation = self.learn(head);
            self.heads.entry(by).or_default().insert(generation);
            // The vote on what follows is named by whoever decides that.
            let parent = match &durable.voters {
                Some(change) => self.learn(change),
                None => generation,
            };
            self.heads.entry(by).or_default().insert(parent);
            if let Some((ballot, value)) = &durable.acceptor.accepted {
                let value = self.learn(value);
                self.propose(parent, *ballot, value);
                self.vote(by, parent, *ballot, value);
            }
            if let Some(commit) = durable.acceptor.acked {
                let of = self.acks.entry(parent).or_default();
                let entry = of.entry(commit.number).or_insert((commit, BTreeSet::new()));
                entry.1.insert(by);
                self.fresh.parents.insert(parent);
            }
        }
        self.disks.insert(by.0, (by.1, durable));
    }

    fn propose(&mut self, parent: Digest, ballot: Ballot, value: Digest) {
        if self
            .proposed
            .entry((parent, ballot))
            .or_default()
            .insert(value)
        {
            self.fresh.proposed.insert((parent, ballot));
        }
    }

    /// An agent said that this record is decided.
    pub fn announce(&mut self, record: &Arc<Record>) {
        let digest = self.learn(record);
        if self.announced.insert(digest, record.clone()).is_none() {
            self.dirty = true;
            self.fresh.announced.push(digest);
            if record.kind.is_terminal() {
                self.ended.entry(digest).or_insert(self.now);
            }
            if record.number > 1 {
                let key = (record.lineage(), record.parent);
                self.children.entry(key).or_default().insert(digest);
            }
        }
    }

    /// A leader said that this commit is done.
    pub fn commit_announced(&mut self, commit: CommitRef) {
        self.dirty = true;
        self.committed.push(commit);
    }

    pub fn fresh_announced(&self) -> impl Iterator<Item = (&Digest, &Arc<Record>)> {
        let fresh = self.fresh.announced.iter();
        fresh.filter_map(|d| Some((d, self.announced.get(d)?)))
    }

    pub fn fresh_spawns(&self) -> impl Iterator<Item = &Spawn> {
        self.spawns.iter().skip(self.fresh.spawns)
    }

    pub fn fresh_told(&self) -> impl Iterator<Item = &ToldEnd> {
        self.told.iter().skip(self.fresh.told)
    }

    /// Everything so far has been judged.
    pub fn judged(&mut self) {
        self.fresh = Fresh {
            spawns: self.spawns.len(),
            claims: self.log.claims.len(),
            committed: self.committed.len(),
            told: self.told.len(),
            ..Fresh::default()
        };
    }

    fn vote(&mut self, by: Holder, parent: Digest, ballot: Ballot, value: Digest) {
        let holders = self
            .votes
            .entry(parent)
            .or_default()
            .entry(ballot)
            .or_default()
            .entry(value)
            .or_default();
        if !holders.insert(by) {
            return;
        }
        let holders = holders.clone();
        let Some(record) = self.records.get(&parent) else {
            return;
        };
        if record.arbiter == Arbiter::Members && majority(record, &holders) {
            self.chosen.entry(parent).or_default().insert(value);
            self.fresh.parents.insert(parent);
        }
    }

    /// A generation's own record, and the decided changes of its voters: whoever may decide what follows it.
    fn configurations(&self, generation: Digest) -> Vec<Digest> {
        let mut all = vec![generation];
        while let Some(last) = all.last()
            && let Some(chosen) = self.chosen.get(last)
            && let Some(change) = chosen.iter().find(|value| self.changes_voters(value))
        {
            all.push(*change);
        }
        all
    }

    fn changes_voters(&self, digest: &Digest) -> bool {
        let record = self.records.get(digest);
        record.is_some_and(|r| r.change_of_voters() > 0)
    }

    /// An agent said that this change of voters is decided.
    pub fn announce_voters(&mut self, record: &Arc<Record>) {
        let digest = self.learn(record);
        if self.voters.insert(digest) {
            self.dirty = true;
            self.fresh.voters.push(digest);
        }
    }

    /// A message left an agent.
    pub fn sent(&mut self, by: Holder, message: &JobMessage) {
        match message {
            JobMessage::Accept {
                parent,
                ballot,
                record,
            } => {
                let value = self.learn(record);
                self.propose(*parent, *ballot, value);
                self.dirty = true;
            }
            JobMessage::Accepted { parent, ballot, .. } => {
                self.fresh.said.push(VoteSaid {
                    by,
                    parent: *parent,
                });
                let of = self.proposed.get(&(*parent, *ballot));
                if let Some(value) = of.filter(|v| v.len() == 1).and_then(|v| v.first().copied()) {
                    self.vote(by, *parent, *ballot, value);
                }
                self.dirty = true;
            }
            JobMessage::Promise { parent, .. } => {
                self.fresh.said.push(VoteSaid {
                    by,
                    parent: *parent,
                });
                self.dirty = true;
            }
            JobMessage::Committed { commit } => {
                let disk = self.disks.get(&by.0).map(|(_, durable)| durable);
                let change = disk.and_then(|d| d.voters.clone());
                let change = change.filter(|r| r.generation() == commit.generation);
                let parent = change.map_or(commit.generation, |r| r.digest());
                let of = self.acks.entry(parent).or_default();
                let entry = of
                    .entry(commit.number)
                    .or_insert((*commit, BTreeSet::new()));
                entry.1.insert(by);
                self.fresh.parents.insert(parent);
                self.dirty = true;
            }
            JobMessage::Order(order) if !matches!(order.action, Action::Run { .. }) => {
                self.ending.insert(order.digest);
            }
            JobMessage::Birth { record }
            | JobMessage::Voters { record, .. }
            | JobMessage::Decided { record }
            | JobMessage::Follows { record, .. } => {
                self.learn(record);
            }
            _ => {}
        }
    }

    /// An object came to be in the store's log.
    pub fn logged(&mut self, store: &super::store::Store) {
        self.dirty = true;
        if self.log.next == 0 {
            self.log.next = 1;
        }
        while let Some(bytes) = store.get(self.log.next) {
            let slot = self.log.next;
            match Entry::decode(bytes) {
                Ok(entry) if entry.seq == slot && entry.prev == self.log.last => {
                    self.fold(entry, slot);
                }
                Ok(_) | Err(_) => {
                    self.log.broken.get_or_insert(slot);
                }
            }
            self.log.last = Entry::digest(bytes);
            self.log.next += 1;
        }
        if store.iter().any(|(slot, _)| slot > self.log.next) {
            self.log.gap.get_or_insert(self.log.next);
        }
    }

    /// The newest commit that may be restored.
    pub fn restorable(&self) -> Option<CommitRef> {
        let mut all = self.log.commits.values().rev();
        all.find(|(_, gone)| !gone).map(|(c, _)| *c)
    }

    pub fn latest_claim(&self) -> Option<&(u64, Arc<Record>, Digest)> {
        self.log.claims.last()
    }

    fn fold(&mut self, entry: Entry, slot: u64) {
        let latest = self.latest_claim().cloned();
        let member = latest.as_ref().is_some_and(|(_, r, _)| r.has(entry.writer));
        match entry.body {
            Body::Claim(record) => {
                let follows = match &latest {
                    None => record.number == 1,
                    Some((_, last, digest)) if last.kind.is_terminal() => {
                        record.number == 1 && record.parent == *digest
                    }
                    Some((_, last, _)) => record.follows(last),
                };
                if follows && record.arbiter == Arbiter::Store(super::store::UUID) {
                    let record = Arc::new(*record);
                    let digest = self.learn(&record);
                    let due = self.restorable();
                    self.log.due.insert(digest, due);
                    if record.kind.is_terminal() {
                        self.ended.entry(digest).or_insert(self.now);
                    }
                    self.log.claims.push((slot, record, digest));
                }
            }
            Body::Commit(commit) => {
                let again = self.log.commits.values().any(|(c, _)| *c == commit);
                let fits = latest.is_some_and(|(_, _, d)| d == commit.generation);
                if fits && member && !again {
                    self.log.commits.insert(slot, (commit, false));
                }
            }
            Body::Retire { seq, .. } | Body::Reject { seq, .. } => {
                if member && let Some(commit) = self.log.commits.get_mut(&seq) {
                    commit.1 = true;
                }
            }
            Body::Pin { .. } | Body::Unpin { .. } | Body::Rules(_) => {}
            Body::Snapshot(snapshot) => {
                let said = snapshot.commits.iter().filter(|c| c.in_force());
                let force = self.log.commits.iter().filter(|(_, (_, gone))| !gone);
                let same = said
                    .map(|c| (c.seq, c.commit))
                    .eq(force.map(|(slot, (commit, _))| (*slot, *commit)));
                let digest = latest.map(|(_, _, digest)| digest);
                if !same || digest != Some(snapshot.claim.digest()) {
                    self.log.broken.get_or_insert(slot);
                }
            }
        }
    }

    /// Whether this record was decided by whoever may decide it.
    pub fn is_decided(&self, digest: &Digest) -> bool {
        let Some(record) = self.records.get(digest) else {
            return false;
        };
        match record.arbiter {
            Arbiter::Store(_) => self.log.claims.iter().any(|(_, _, d)| d == digest),
            Arbiter::Members if record.number == 1 && record.change_of_voters() == 0 => {
                let bound = self.bound.get(digest);
                record
                    .members
                    .iter()
                    .all(|m| bound.is_some_and(|b| b.contains(&(m.node, m.state))))
            }
            Arbiter::Members if record.change_of_voters() > 0 => {
                let chosen = self.chosen.get(&record.parent);
                chosen.is_some_and(|values| values.contains(digest))
            }
            Arbiter::Members => {
                let votes = self.configurations(record.parent).into_iter();
                let mut chosen = votes.filter_map(|vote| self.chosen.get(&vote));
                chosen.any(|values| values.contains(digest))
            }
        }
    }

    /// The commits that a majority of those who decide what follows `parent` acknowledged, newest last: a generation
    /// without a store, or a change of its voters.
    pub fn acknowledged(&self, parent: &Digest) -> Vec<CommitRef> {
        let Some(record) = self.records.get(parent) else {
            return Vec::new();
        };
        let acks = self.acks.get(parent).into_iter().flatten();
        acks.filter(|(_, (_, by))| majority(record, by))
            .map(|(_, (c, _))| *c)
            .collect()
    }

    /// Whether those who voted in the commit's generation, now or then, acknowledged it.
    pub fn is_acknowledged(&self, commit: &CommitRef) -> bool {
        let votes = self.configurations(commit.generation);
        votes
            .iter()
            .any(|vote| self.acknowledged(vote).contains(commit))
    }

    /// Records that the job can go on from: in each lineage the newest record that any disk or the log
    /// holds, where that is a generation that trains.
    pub fn tips(&self) -> Vec<(Digest, Arc<Record>)> {
        let mut newest: BTreeMap<Digest, (Digest, Arc<Record>)> = BTreeMap::new();
        let held = self.disks.values().filter_map(|(_, d)| d.head.clone());
        let claimed = self.latest_claim().map(|(_, r, _)| r.clone());
        for record in held.chain(claimed) {
            let known = newest.get(&record.lineage());
            if known.is_none_or(|(_, k)| k.number < record.number) {
                newest.insert(record.lineage(), (record.digest(), record));
            }
        }
        newest
            .into_values()
            .filter(|(_, r)| r.kind == Kind::Next)
            .collect()
    }
}

/// A majority of a record's voters, with the very state directories that the record names.
pub fn majority(record: &Record, holders: &BTreeSet<Holder>) -> bool {
    record.is_majority(|node| {
        let voter = record.voters().find(|v| v.node == node);
        voter.is_some_and(|v| holders.contains(&(v.node, v.state)))
    })
}
