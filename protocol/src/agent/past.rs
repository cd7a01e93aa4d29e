//! Lineages of which this agent has forgotten all but the name. It may have voted there, under the state id
//! that it still has: so it never votes there again, whoever comes back with a generation of theirs.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::{Agent, Effect, MAX_ENDED};
use crate::codec::{self, CodecError};
use crate::ids::{Digest, JobKey};
use crate::job::{Durable, Job};

/// The most lineages that are remembered.
const MAX_PAST: usize = 8_192;

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Lineage {
    lineage: Digest,
    /// The newest generation that this agent knew there.
    number: u64,
    /// It ended, or was given up: nothing follows there. Else only this agent's vote is given up.
    over: bool,
}

/// All of them, the newest last.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Past {
    list: VecDeque<Lineage>,
    /// There were more. Until the agent starts with a new state id, it takes no vote for its first that it
    /// cannot prove to be.
    lossy: bool,
    #[serde(skip)]
    index: BTreeMap<Digest, (u64, bool)>,
}

impl Past {
    /// # Errors
    /// The bytes are no such list. None at all are an empty one.
    pub fn decode(bytes: &[u8]) -> Result<Past, CodecError> {
        if bytes.is_empty() {
            return Ok(Past::default());
        }
        let mut past: Past = codec::decode_stored(bytes, &[])?;
        let entries = past.list.iter();
        past.index = entries.map(|l| (l.lineage, (l.number, l.over))).collect();
        Ok(past)
    }

    /// # Errors
    /// Never, by the limit on the list.
    pub fn encode(&self) -> Result<Vec<u8>, CodecError> {
        codec::encode_stored(self)
    }

    /// Whether more was forgotten than is remembered here: a new state id is due.
    pub fn is_lossy(&self) -> bool {
        self.lossy
    }

    /// Takes in what a job's durable state says, which is deleted next.
    pub(super) fn take(&mut self, durable: &Durable) {
        for (lineage, number, over) in durable.lineages() {
            self.add(lineage, number, over);
        }
    }

    /// Remembers a lineage up to this generation.
    pub fn add(&mut self, lineage: Digest, number: u64, over: bool) {
        if let Some((known, was_over)) = self.index.get(&lineage).copied() {
            self.list.retain(|l| l.lineage != lineage);
            return self.push(lineage, number.max(known), over || was_over);
        }
        self.push(lineage, number, over);
        if self.list.len() > MAX_PAST
            && let Some(oldest) = self.list.pop_front()
        {
            self.index.remove(&oldest.lineage);
            self.lossy = true;
        }
    }

    fn push(&mut self, lineage: Digest, number: u64, over: bool) {
        self.index.insert(lineage, (number, over));
        self.list.push_back(Lineage {
            lineage,
            number,
            over,
        });
    }

    /// Up to which generation a lineage is over that ended here, if a holder of this number is to leave it.
    pub(crate) fn over(&self, lineage: &Digest, number: u64) -> Option<u64> {
        let (up_to, over) = self.index.get(lineage).copied()?;
        (over && number <= up_to).then_some(up_to)
    }

    /// Up to which generation the vote in a lineage is given up.
    pub(crate) fn voted(&self, lineage: &Digest) -> Option<u64> {
        self.index.get(lineage).map(|(number, _)| *number)
    }
}

impl Agent {
    /// A job that nobody here takes part in needs no memory, unless its end must be remembered.
    pub(super) fn forget(&mut self, key: &JobKey) {
        let nothing = self.jobs.get(key).is_some_and(Job::is_blank);
        if nothing && self.jobs.get_mut(key).is_some_and(|j| j.is_carried_out()) {
            self.remove_job(key);
        }
    }

    pub(super) fn add_job(&mut self, key: &JobKey) {
        let job = Job::new(key.clone(), self.used_round);
        self.jobs.insert(key.clone(), job);
    }

    pub(super) fn remove_job(&mut self, key: &JobKey) -> Option<Job> {
        self.heads.remove(key);
        self.told_to_belong.remove(key);
        self.conns.retain(|_, k| k != key);
        let job = self.jobs.remove(key)?;
        self.used_round = self.used_round.max(job.used_round());
        Some(job)
    }

    /// The ends of jobs are remembered for nodes that missed them; of many only the newest. Of the others it
    /// is remembered that there may have been a vote.
    pub(super) fn forget_oldest(&mut self) {
        let ended = self.jobs.iter().filter(|(_, j)| j.is_idle());
        let mut ended: Vec<_> = ended.map(|(key, j)| (j.installed_at(), key)).collect();
        let surplus = ended.len().saturating_sub(MAX_ENDED);
        if surplus == 0 {
            return;
        }
        ended.sort();
        let spoken = |key: &JobKey| self.jobs.get(key).is_some_and(Job::is_carried_out);
        let oldest = ended.into_iter().map(|(_, key)| key);
        let oldest = oldest.filter(|key| spoken(key)).take(surplus).cloned();
        for key in oldest.collect::<Vec<_>>() {
            if let Some(job) = self.remove_job(&key) {
                self.past.take(job.durable());
                // The limit on the list is that of what can be stored; else the job's own state stays.
                if let Ok(past) = self.past.encode() {
                    self.effects.push_back(Effect::Forget { key, past });
                }
            }
        }
    }
}
