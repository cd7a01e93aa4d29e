//! How far the workers are: their steps, what they report, and what they have saved.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use muster_checkpoint::slot::Slot;
use muster_launcher::Event;
use muster_launcher::slots::Ask;
use muster_protocol::control::report::RankMetrics;
use muster_protocol::control::saving::Copied;
use muster_protocol::control::slots::{Given, SLOTS};
use muster_protocol::hang::Point;
use muster_protocol::local::short;

use super::{Worker, Workers};
use crate::run::control::ControlPage;
use crate::run::saves::Ranks;
use crate::run::stacks::Target as Stacks;

impl Workers {
    /// How far the workers are that have attached the runtime.
    pub fn points(&self) -> Vec<(u32, Point)> {
        let running = self.workers.iter().filter(|w| !w.ended);
        running
            .filter_map(|w| Some((w.rank, w.page.point()?)))
            .collect()
    }

    /// Reports of the running workers on their training, by rank.
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
        let (mut ranks, mut failed) = (Vec::new(), None);
        for worker in saved {
            match worker.page.failed_to_save(step) {
                None => ranks.push(worker.rank),
                Some(why) => {
                    let rank = worker.rank;
                    failed.get_or_insert(short(format!("rank {rank} could not save: {why}")));
                }
            }
        }
        Event::Saved {
            ranks,
            all: others.is_empty(),
            passed: others.iter().all(silent),
            failed,
        }
    }
}

/// How far the workers are with what they begin with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Begun {
    /// Stand before their first step, or have ended.
    pub loaded: usize,
    /// Have attached the runtime, and still load.
    pub loading: usize,
    /// Have attached none: they say nothing, and wait for nobody.
    pub silent: usize,
}

impl Workers {
    pub fn begun(&self) -> Begun {
        let mut begun = Begun::default();
        for worker in &self.workers {
            match (
                worker.ended || worker.page.has_loaded(),
                worker.page.is_linked(),
            ) {
                (true, _) => begun.loaded += 1,
                (false, true) => begun.loading += 1,
                (false, false) => begun.silent += 1,
            }
        }
        begun
    }

    /// The first step may begin.
    pub fn release(&self) {
        self.workers.iter().for_each(|w| w.page.hold(false));
    }

    /// Cost of the newest save of each running worker, and the save for which it waits for a slot.
    pub fn copies(&self) -> impl Iterator<Item = (u16, Option<Copied>, Option<u64>)> + '_ {
        let running = self.workers.iter().filter(|w| !w.ended);
        running.map(|w| (w.local_rank, w.page.copied(), w.page.waits_for_slot()))
    }

    fn page_of(&self, k: u16) -> Option<&ControlPage> {
        let mut running = self.workers.iter().filter(|w| !w.ended);
        running.find(|w| w.local_rank == k).map(|w| &w.page)
    }

    /// The rank leaves the save of this step out.
    pub fn skip_save(&self, k: u16, step: u64) {
        if let Some(page) = self.page_of(k) {
            page.skip_save(step);
        }
    }

    /// The node has no room for the slots of this rank.
    pub fn refuse_slots(&self, k: u16) {
        if let Some(page) = self.page_of(k) {
            page.refuse_slots();
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
