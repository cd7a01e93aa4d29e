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
        let peers = self.peers.map.values().filter(|p| p.connected);
        let adverts = peers.filter_map(|p| p.hello.as_ref()).flat_map(|h| &h.jobs);
        adverts.filter(|a| a.deserted).map(|a| a.digest).collect()
    }

    fn is_deserted(&self, job: &Job, told: &BTreeSet<Digest>) -> bool {
        let said = || job.head().is_some_and(|(_, d)| told.contains(&d));
        job.is_unattended() && (job.says_deserted(self.cfg.node) || !job.is_led_here() && said())
    }

    /// Of jobs whose launchers all are gone only the newest are kept. The oldest ends, where that can be decided
    /// here; one that its log decides is forgotten here. Those that others lead these end, unless there are very many.
    pub(super) fn end_oldest_deserted(&mut self, now: Time) {
        let alive = self.jobs.values().filter(|j| j.is_live());
        if alive.count() <= MAX_DESERTED {
            return;
        }
        let told = self.told_deserted();
        let deserted = self.jobs.iter();
        let deserted =
            deserted.filter(|(_, j)| self.is_deserted(j, &told) && !j.is_given_up_here());
        let mut deserted: Vec<(bool, Time, JobKey)> = deserted
            .map(|(key, j)| {
                (
                    !j.says_deserted(self.cfg.node),
                    j.installed_at(),
                    key.clone(),
                )
            })
            .collect();
        deserted.sort();
        let here = deserted.iter().filter(|(others, ..)| !others).count();
        let surplus = deserted.len().saturating_sub(MAX_DESERTED).min(here);
        let surplus = surplus.max(deserted.len().saturating_sub(MAX_JOBS));
        for (_, _, key) in deserted.into_iter().take(surplus) {
            self.with_job(&key, now, |job, ctx| {
                job.give_up_deserted(ctx);
                job.drive(ctx);
            });
        }
    }
}
