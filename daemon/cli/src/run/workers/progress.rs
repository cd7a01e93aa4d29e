//! How far the workers are: their steps, what they report, and what they have saved.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use muster_checkpoint::slot::Slot;
use muster_protocol::control::report::RankMetrics;
use muster_protocol::control::slots::{Given, SLOTS};
use muster_protocol::hang::Point;

use super::{Worker, Workers};
use crate::run::saves::{Ask, Ranks};
use crate::run::session::Event;
use crate::run::stacks::Target as Stacks;

impl Workers {
    /// How far the workers are that have attached the runtime.
    pub fn points(&self) -> Vec<(u32, Point)> {
        let running = self.workers.iter().filter(|w| !w.ended);
        running
            .filter_map(|w| Some((w.rank, w.page.point()?)))
            .collect()
    }

    /// What the running workers report of their training, by rank.
    pub fn metrics(&mut self) -> Vec<RankMetrics> {
        let running = self.workers.iter_mut().filter(|w| !w.ended);
        running
            .filter_map(|w| {
                w.metrics = w.page.metrics().or(w.metrics);
                let (rank, words) = (w.rank, w.metrics?);
                Some(RankMetrics { rank, words })
            })
            .collect()
    }

    /// The process of a rank that runs here.
    pub fn pid_of(&self, rank: u32) -> Option<i32> {
        let mut running = self.workers.iter().filter(|w| !w.ended);
        running.find(|w| w.rank == rank).map(|w| w.pid)
    }

    /// The running workers, for whoever keeps their stacks. `named` are ranks.
    pub fn targets(&self, named: &[u32]) -> Vec<Stacks> {
        let running = self.workers.iter().filter(|w| !w.ended);
        running
            .map(|w| Stacks {
                rank: w.rank,
                pid: w.pid,
                point: w.page.point(),
                dir: w.dir.clone(),
                named: named.contains(&w.rank),
            })
            .collect()
    }

    /// Ends a worker that hangs: it counts as one that failed by itself. One that is gone, works as
    /// another rank by now, or has moved, is left alone. Returns whether it was ended.
    pub fn end_hung(&mut self, target: &Stacks, why: &str) -> bool {
        let is_it = |w: &&mut Worker| !w.ended && target.is_still(w.pid, w.rank, w.page.point());
        let Some(worker) = self.workers.iter_mut().find(is_it) else {
            return false;
        };
        worker.hung = Some(why.to_owned());
        worker.signal(libc::SIGKILL);
        true
    }

    /// How far the running workers are with a checkpoint at this step.
    pub fn saved(&self, step: u64) -> Event {
        let running = self.workers.iter().filter(|w| !w.ended);
        let (saved, others): (Vec<&Worker>, Vec<&Worker>) =
            running.partition(|w| w.page.has_saved(step));
        // An attached one says so itself, when it has saved or goes on: how far it is tells nothing, for
        // it may have resumed there and be saving right now.
        let silent = |w: &&Worker| !w.page.is_linked();
        Event::Saved {
            ranks: saved.iter().map(|w| w.rank).collect(),
            all: others.is_empty(),
            passed: others.iter().all(silent),
        }
    }
}

impl Ranks for Workers {
    fn asks(&self) -> Vec<(u16, Ask)> {
        let running = self.workers.iter().filter(|w| !w.ended);
        running
            .filter_map(|w| Some((w.local_rank, w.page.slot_ask()?)))
            .collect()
    }

    fn give(&self, k: u16, ask: u64, given: Given, slots: Option<&[Arc<Slot>; SLOTS]>, room: u64) {
        let fds = slots.map_or([-1; SLOTS], |slots| {
            slots.each_ref().map(|slot| slot.fd().as_raw_fd())
        });
        let mut running = self.workers.iter().filter(|w| !w.ended);
        if let Some(worker) = running.find(|w| w.local_rank == k) {
            worker.page.give_slots(ask, given, fds, room);
        }
    }

    fn runs(&self, k: u16) -> bool {
        (self.workers.iter()).any(|w| w.local_rank == k && !w.ended)
    }
}
