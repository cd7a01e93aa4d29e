//! Invariants among all jobs, at every moment.

use std::collections::BTreeMap;

use muster_protocol::agent::Error;
use muster_protocol::local::Start;
use muster_protocol::record::Record;
use muster_protocol::wire::MAX_JOBS;
use muster_protocol::{Digest, JobKey, LauncherId, Span};

use super::world::{Node, Traffic, secs};

/// Jobs that are over, and kept for nodes that may have missed it.
const MAX_ENDED: usize = MAX_JOBS / 2;

/// A rule that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Broken {
    /// I1: two records of one lineage and number, or two that follow one end.
    DecidedTwice {
        job: String,
        number: u64,
    },
    /// I12: a record behind an end.
    Revived {
        job: String,
        number: u64,
    },
    /// Workers were started of what is not decided, or of a life that is long over.
    StartedDead {
        job: String,
    },
    /// I11.
    TwoTrain {
        job: String,
    },
    DoesNotStart {
        job: String,
        nodes: Vec<usize>,
        after: Span,
    },
    /// An agent remembers more jobs that nobody takes part in than it is to: all, and those that are over.
    TooMany {
        node: usize,
        all: usize,
        ended: usize,
    },
    /// A job goes on, as an agent sees it, that nobody takes part in any more.
    NotForgotten {
        node: usize,
        job: String,
    },
    /// A launcher was never told that its job is over.
    NotEnded {
        job: String,
    },
    /// While nothing happens.
    Talks {
        node: usize,
        said: Traffic,
        stored: usize,
    },
    SlowStarts(Vec<(String, Vec<usize>, Span)>),
    StateLost {
        node: usize,
    },
    /// A message was refused.
    Refused {
        node: usize,
        error: Error,
    },
    Unsendable {
        node: usize,
    },
    RunsWild,
}

/// History so far.
#[derive(Debug, Default)]
pub struct Judge {
    pub broken: Option<Broken>,
    records: BTreeMap<Digest, Record>,
    /// By key, lineage and number.
    decided: BTreeMap<(JobKey, Digest, u64), Digest>,
    /// The births after each end.
    births: BTreeMap<(JobKey, Digest), Digest>,
    /// The end of each lineage, and when it was first heard of.
    ends: BTreeMap<(JobKey, Digest), (u64, u64)>,
    /// The most jobs that an agent remembered though nobody took part in them, and of these that were over.
    pub most: (usize, usize),
}

impl Judge {
    pub(super) fn breaks(&mut self, broken: Broken) {
        self.broken.get_or_insert(broken);
    }

    pub(super) fn refused(&mut self, node: usize, error: Error) {
        // The other errors are answers to a launcher.
        if error == Error::TooManyJobs {
            self.breaks(Broken::Refused { node, error });
        }
    }

    pub(super) fn first_launcher(&self, digest: &Digest) -> Option<LauncherId> {
        self.records
            .get(digest)?
            .members
            .first()
            .map(|m| m.launcher)
    }

    pub(super) fn decided(&mut self, key: &JobKey, record: &Record, now: u64) {
        let (digest, lineage, number) = (record.digest(), record.lineage(), record.number);
        let job = key.id.clone();
        let at = (key.clone(), lineage, number);
        let birth = number == 1 && !record.parent.is_zero();
        let after = (key.clone(), record.parent);
        let twins = birth && *self.births.entry(after).or_insert(digest) != digest;
        if twins || *self.decided.entry(at).or_insert(digest) != digest {
            self.breaks(Broken::DecidedTwice { job, number });
            return;
        }
        if self.records.insert(digest, record.clone()).is_some() {
            return;
        }
        let life = (key.clone(), lineage);
        let after = self.ends.get(&life).is_some_and(|(end, _)| number > *end);
        let before = self.decided.range((key.clone(), lineage, number + 1)..);
        let before = before
            .take_while(|((k, l, _), _)| (k, l) == (key, &lineage))
            .next();
        let ends = record.kind.is_terminal();
        if after || ends && before.is_some() {
            self.breaks(Broken::Revived { job, number });
        } else if ends {
            self.ends.insert(life, (number, now));
        }
    }

    pub(super) fn spawned(&mut self, key: &JobKey, start: &Start, now: u64) {
        let record = self.records.get(&start.digest);
        let end = record.and_then(|r| self.ends.get(&(key.clone(), r.lineage())));
        // That the order to start was on its way when the job ended is no harm.
        let over = end.is_some_and(|(_, at)| now > at + secs(1));
        if record.is_none() || over {
            let job = key.id.clone();
            self.breaks(Broken::StartedDead { job });
        }
    }

    /// `taken_part_in`: whether any launcher of a job is there, or was a moment ago.
    pub(super) fn look(&mut self, at: usize, node: &Node, taken_part_in: impl Fn(&JobKey) -> bool) {
        let Some(agent) = &node.agent else { return };
        let (mut all, mut ended) = (0, 0);
        for job in agent.jobs().filter(|j| !taken_part_in(j.key())) {
            all += 1;
            ended += usize::from(!job.is_live());
        }
        self.most = (self.most.0.max(all), self.most.1.max(ended));
        if all > MAX_JOBS || ended > MAX_ENDED {
            let node = at;
            self.breaks(Broken::TooMany { node, all, ended });
        }
    }

    /// How many lives of jobs ended, and how many did not.
    pub fn lives(&self) -> (usize, usize) {
        let births = self
            .decided
            .keys()
            .filter(|(_, _, number)| *number == 1)
            .count();
        (self.ends.len(), births - self.ends.len())
    }

    /// Whether this life of a job is known to have ended.
    pub fn has_ended(&self, key: &JobKey, lineage: Digest) -> bool {
        self.ends.contains_key(&(key.clone(), lineage))
    }
}
