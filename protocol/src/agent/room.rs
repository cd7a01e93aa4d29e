//! Room in the table of jobs: what nobody takes part in any more never keeps a new job out.

use std::collections::BTreeSet;

use super::{Agent, MAX_DESERTED};
use crate::ids::{Digest, JobKey};
use crate::job::Job;
use crate::time::Time;
use crate::wire::MAX_JOBS;

impl Agent {
    /// Whether as many jobs are known as may be, that somebody takes part in.
    pub(super) fn is_full(&self) -> bool {
        if self.jobs.len() < MAX_JOBS {
            return false;
        }
        let told = self.told_deserted();
        let jobs = self.jobs.values();
        jobs.filter(|j| !j.is_idle() && !self.is_deserted(j, &told))
            .count()
            >= MAX_JOBS
    }

    /// Generations without a launcher, by the word of those that lead them.
    fn told_deserted(&self) -> BTreeSet<Digest> {
        let adverts = self.peers.adverts().map(|(_, advert)| advert);
        adverts.filter(|a| a.deserted).map(|a| a.digest).collect()
    }

    fn is_deserted(&self, job: &Job, told: &BTreeSet<Digest>) -> bool {
        let said = || job.head().is_some_and(|(_, d)| told.contains(&d));
        job.is_unattended()
            && (job.says_deserted(self.cfg.node, &self.peers) || !job.is_led_here() && said())
    }

    /// Of jobs whose launchers all are gone only the newest are kept. The oldest ends, where that can be decided
    /// here; one that its log decides is forgotten here. Those that others lead these end; those with members that
    /// may only be cut off are kept, for they may train. Where there are very many, all of them count, those too
    /// whose end nobody is left to decide.
    pub(super) fn end_oldest_deserted(&mut self, now: Time) {
        let alive = self.jobs.values().filter(|j| j.is_live());
        if alive.count() <= MAX_DESERTED {
            return;
        }
        let told = self.told_deserted();
        let jobs = self.jobs.iter();
        let deserted = jobs.filter(|(_, j)| self.is_deserted(j, &told));
        let mut deserted: Vec<(Rank, Time, JobKey)> = deserted
            .map(|(key, j)| (self.rank(j), j.installed_at(), key.clone()))
            .collect();
        deserted.sort();
        let of = |rank: Rank| deserted.iter().filter(move |(r, ..)| *r == rank);
        let waiting = deserted.len() - of(Rank::GivenUp).count();
        let surplus = of(Rank::Ends).take(waiting.saturating_sub(MAX_DESERTED));
        let most = deserted.len().saturating_sub(MAX_JOBS);
        let surplus = surplus.chain(deserted.iter().take(most));
        let surplus: BTreeSet<JobKey> = surplus.map(|(.., key)| key.clone()).collect();
        for key in surplus {
            self.with_job(&key, now, |job, ctx| {
                job.give_up_deserted(ctx);
                job.drive(ctx);
            });
        }
    }

    fn rank(&self, job: &Job) -> Rank {
        if job.is_given_up_here() {
            Rank::GivenUp
        } else if !job.says_deserted(self.cfg.node, &self.peers) {
            Rank::LedElsewhere
        } else if job.may_be_cut_off() {
            Rank::CutOff
        } else {
            Rank::Ends
        }
    }
}

/// Which deserted jobs are given up first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// Its end is to be decided here, and is not yet.
    GivenUp,
    Ends,
    LedElsewhere,
    /// Some member may only be cut off, and train.
    CutOff,
}
