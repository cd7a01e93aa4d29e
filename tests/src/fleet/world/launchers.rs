//! Behaviour of launchers, and how they end.

use std::collections::BTreeSet;

use muster_launcher::Event as Told;
use muster_protocol::agent::Event;
use muster_protocol::membership::Answer;

use super::{Broken, Fate, Fleet, HOP, Item};
use crate::sim::clock::MS;
use crate::sim::launcher::{Due, Out};
use crate::sim::step::Found;

impl Fleet {
    /// Whether the launcher of rank 0 answers another of its job.
    pub(super) fn answers_guard(&self, due: Due) -> Found {
        let Due::Verified { digest, .. } = due else {
            return Found::Refused;
        };
        let first = self.judge.first_launcher(&digest);
        match first.is_some_and(|id| self.launchers.values().any(|l| l.launcher.id == id)) {
            true => Found::Answered,
            false => Found::Refused,
        }
    }

    pub(super) fn fate(&mut self, job: usize) {
        let now = self.now;
        let of = self.launchers.iter().filter(|(_, l)| l.job == job);
        let all: Vec<u32> = of.map(|(k, _)| *k).collect();
        let fate = self.jobs[job].fate;
        for (i, k) in all.into_iter().enumerate() {
            let Some(held) = self.launchers.get_mut(&k) else {
                continue;
            };
            let l = &mut held.launcher;
            let out = match fate {
                Fate::Stays => continue,
                Fate::Killed => {
                    let ns = self.rng.below(20 * MS);
                    self.put(ns, Item::Kill(k));
                    continue;
                }
                Fate::Finishes => match l.training().map(|r| r.start.digest) {
                    Some(digest) => l.finishes(digest, now),
                    None => continue,
                },
                Fate::Fails if i == 0 => l.fail(1, now / MS, now),
                Fate::Cancelled if i == 0 => l.tell(Told::Interrupt, now),
                Fate::Fails | Fate::Cancelled => continue,
                Fate::Leaves => l.tell(Told::Terminate { signal: 15 }, now),
            };
            self.launcher_out(k, out);
        }
    }

    /// The launcher is gone, its workers with it.
    pub(super) fn ends(&mut self, launcher: u32) {
        let Some(held) = self.launchers.remove(&launcher) else {
            return;
        };
        self.left.insert(self.jobs[held.job].key.clone(), self.now);
        if let Some(conn) = held.launcher.last_conn {
            let guard = Answer::Refused;
            self.tell_after(2 * HOP, held.node, Event::LauncherGone { conn, guard });
        }
    }

    pub(super) fn launcher_out(&mut self, launcher: u32, out: Vec<Out>) {
        for out in out {
            let Some(held) = self.launchers.get(&launcher) else {
                return;
            };
            let (node, job, conn) = (held.node, held.job, held.launcher.conn);
            match out {
                Out::Say(frame) => {
                    if let Some(conn) = conn {
                        let owner = self.jobs[job].key.owner.clone();
                        self.tell(node, Event::Launcher { conn, owner, frame });
                    }
                }
                Out::Wait { due, ns, .. } => self.put(ns, Item::Due { launcher, due }),
                Out::Spawned(start) => {
                    self.judge.spawned(&self.jobs[job].key, &start, self.now);
                    self.all_train(job);
                }
                Out::Relink => {
                    if let Some(held) = self.launchers.get_mut(&launcher) {
                        let out = held.launcher.disconnected(self.now);
                        self.launcher_out(launcher, out);
                    }
                    self.put(HOP, Item::Connects { launcher });
                }
                Out::Exit => {
                    self.ends(launcher);
                    return;
                }
                Out::Died(_)
                | Out::Parked(_)
                | Out::StoppedAt { .. }
                | Out::SavesAt { .. }
                | Out::Wrote { .. }
                | Out::Manifest { .. }
                | Out::Review(_)
                | Out::LookAgain(_)
                | Out::Delete(_)
                | Out::AskLease
                | Out::LeaseOver => {}
            }
        }
    }

    /// Whether a job trains on all its nodes for the first time; and that no two generations of it train at once.
    fn all_train(&mut self, job: usize) {
        let key = &self.jobs[job].key;
        let of = self
            .launchers
            .values()
            .filter(|l| &self.jobs[l.job].key == key);
        let train: BTreeSet<_> = of
            .filter_map(|l| l.launcher.training().map(|r| r.start.digest))
            .collect();
        if train.len() > 1 {
            self.judge.breaks(Broken::TwoTrain {
                job: key.id.clone(),
            });
        }
        let of = self.launchers.values().filter(|l| l.job == job);
        let trains = of.filter(|l| l.launcher.training().is_some()).count();
        let job_is = &mut self.jobs[job];
        if trains == job_is.nodes.len() && job_is.trained.is_none() {
            job_is.trained = Some(self.now);
            let life = job_is.life;
            if !matches!(job_is.fate, Fate::Killed | Fate::Stays) {
                self.put(life, Item::Fate(job));
            }
        }
    }
}
