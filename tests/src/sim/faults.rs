//! Effect of each fault, and how it ends.

use super::clock::{MS, SEC};
use super::conductor::{Conductor, Item};
use super::invariants::Violation;
use super::setup::Fault;
use super::step::Step;

impl Conductor {
    pub(super) fn befall(&mut self, fault: Fault) -> Result<(), Violation> {
        if self.healed {
            return Ok(());
        }
        let n = self.world.nodes.len();
        match fault.clone() {
            Fault::CutOneWay { from, to, for_ns } => {
                if from != to {
                    self.cut(from, to);
                    self.after(for_ns, Item::Undo(fault));
                }
            }
            Fault::CutBoth { a, b, for_ns } => {
                if a != b {
                    self.cut(a, b);
                    self.cut(b, a);
                    self.after(for_ns, Item::Undo(fault));
                }
            }
            Fault::Partition { side, for_ns } => {
                for (a, b) in across(side, n) {
                    self.cut(a, b);
                }
                self.after(for_ns, Item::Undo(fault));
            }
            Fault::Flap {
                a,
                b,
                period,
                times,
            } => {
                for i in 0..u64::from(times) {
                    let for_ns = period / 2;
                    self.after(i * period, Item::Fault(Fault::CutBoth { a, b, for_ns }));
                }
            }
            Fault::Storm { net, for_ns } => {
                self.net.storm = Some(net);
                self.after(for_ns, Item::Undo(fault));
            }
            Fault::SlowLink {
                from,
                to,
                by,
                for_ns,
            } => {
                self.net.slow(from, to, by);
                self.after(for_ns, Item::Undo(fault));
            }
            Fault::AgentCrash {
                node,
                effects,
                torn,
                down,
                new_disk,
            } => {
                if self.world.nodes[node].agent.is_some() {
                    self.fate[node] = (down, new_disk);
                    let agent = self.world.nodes[node].agent_token;
                    self.after(3 * SEC, Item::KillAtLast { node, agent });
                    return self.step(Step::Arm {
                        node,
                        effects,
                        torn,
                    });
                }
            }
            Fault::NodeCrash {
                node,
                down,
                new_disk,
                relaunch,
            } => {
                self.net.dark[node] = true;
                self.fate[node] = (down + MS, new_disk);
                let was_up = self.world.nodes[node].agent.is_some();
                self.step(Step::AgentKill { node })?;
                self.step(Step::LauncherKill { node })?;
                self.after(down, Item::Light { node });
                if !was_up {
                    self.fate[node] = (SEC, false);
                    self.after(down + MS, Item::Revive { node, new_disk });
                }
                if relaunch {
                    let ns = down + self.rng.below(2 * SEC) + 2 * MS;
                    self.after(ns, Item::Relaunch { node });
                }
            }
            Fault::NodeStop { node } => {
                self.fate[node] = (u64::MAX, false);
                self.step(Step::LauncherKill { node })?;
                return self.step(Step::AgentKill { node });
            }
            Fault::NodeStart { node, new_disk } => {
                return self.item(Item::Revive { node, new_disk });
            }
            Fault::LauncherCrash {
                node,
                relaunch_after,
            } => {
                self.step(Step::LauncherKill { node })?;
                if let Some(ns) = relaunch_after {
                    self.after(ns, Item::Relaunch { node });
                }
            }
            Fault::LauncherHiccup { node } => return self.step(Step::LauncherHiccup { node }),
            Fault::AgentPause { node, for_ns } => {
                self.pause(node, self.now + for_ns);
                self.after(for_ns, Item::Undo(fault));
                return self.step(Step::Pause { node, paused: true });
            }
            Fault::DiskFull { node, for_ns } => {
                self.after(for_ns, Item::Undo(fault));
                return self.step(Step::DiskFull { node, full: true });
            }
            Fault::WorkerFail {
                node,
                code,
                cascade,
            } => {
                let run = self.world.nodes[node].launcher.as_ref();
                let digest = run.and_then(|l| l.training()).map(|r| r.start.digest);
                if cascade && digest.is_some() {
                    // The others of its collective fail a moment later.
                    for other in (0..n).filter(|o| *o != node) {
                        let ns = self.rng.between(5 * MS, 500 * MS);
                        let step = Step::WorkerFail {
                            node: other,
                            code: 1,
                            digest,
                        };
                        self.after(ns, Item::Do(step));
                    }
                }
                return self.step(Step::WorkerFail {
                    node,
                    code,
                    digest: None,
                });
            }
            Fault::Stubborn { node } => return self.step(Step::Stubborn { node }),
            Fault::Finish => {
                // The last step is everybody's: only a generation that is whole gets there.
                let Some(digest) = self.training().map(|(_, digest)| digest) else {
                    return Ok(());
                };
                for node in 0..n {
                    let ns = self.rng.below(300 * MS);
                    self.after(ns, Item::Do(Step::Finish { node, digest }));
                }
            }
            Fault::StartTrouble { node, times } => {
                return self.step(Step::StartTrouble { node, times });
            }
            Fault::LateJoin { node } => return self.item_relaunch(node),
            Fault::Drain {
                node,
                grace_ms,
                back_after,
            } => {
                let grace = u64::from(grace_ms) * MS;
                let agent = self.world.nodes[node].agent_token;
                if self.world.nodes[node].agent.is_some() {
                    self.after(0, Item::Do(Step::Drain { node, grace_ms }));
                    self.fate[node] = (back_after, false);
                    self.after(grace + 100 * MS, Item::KillAtLast { node, agent });
                    if let Some(l) = &self.world.nodes[node].launcher {
                        let launcher = l.token;
                        self.after(grace + 50 * MS, Item::Overdue { node, launcher });
                        self.after(grace + back_after + SEC, Item::Relaunch { node });
                    }
                }
            }
            Fault::Leave {
                node,
                grace_ms,
                relaunch_after,
            } => {
                if let Some(l) = &self.world.nodes[node].launcher {
                    let launcher = l.token;
                    let grace = u64::from(grace_ms) * MS;
                    self.after(grace + 50 * MS, Item::Overdue { node, launcher });
                    if let Some(ns) = relaunch_after {
                        self.after(grace + ns + 60 * MS, Item::Relaunch { node });
                    }
                    return self.step(Step::Leave { node });
                }
            }
            Fault::Suspend { node, for_ns } => {
                if self.world.nodes[node].agent.is_some() {
                    let until = self.now + for_ns;
                    self.pause(node, until);
                    let launcher = &mut self.launcher_paused_until[node];
                    *launcher = until.max(*launcher);
                    self.after(for_ns, Item::Undo(fault));
                    return self.step(Step::Suspend { node });
                }
            }
            Fault::LauncherPause { node, for_ns } => {
                self.launcher_paused_until[node] =
                    self.launcher_paused_until[node].max(self.now + for_ns);
                self.after(for_ns, Item::Undo(fault));
                return self.step(Step::LauncherPause { node, paused: true });
            }
            Fault::SlowReap { node, by } => return self.step(Step::SlowReap { node, ns: by }),
            Fault::Unkillable { node, for_ns } => {
                let until = self.now + for_ns;
                return self.step(Step::Unkillable { node, until });
            }
            Fault::Cancel { node } => return self.step(Step::Cancel { node }),
            Fault::OrderCheckpoint { node } => {
                return self.item(Item::Do(Step::OrderCheckpoint { node }));
            }
            Fault::OrderCancel { node } => {
                let given = self.now;
                let there = self.world.nodes[node].clock.local(given);
                return self.item(Item::Do(Step::OrderCancel { node, given, there }));
            }
            Fault::Hang { node, for_ns } => {
                self.thaws_after = for_ns;
                return self.step(Step::Hang { node, busy: false });
            }
            Fault::Continue { for_ns } => return self.order_continue(self.now + for_ns),
            Fault::Busy { node, for_ns } => {
                self.thaws_after = Some(for_ns);
                return self.step(Step::Hang { node, busy: true });
            }
            Fault::StoreSlow { by, for_ns } => {
                self.store_slow = by;
                self.after(for_ns, Item::Undo(fault));
            }
            Fault::StoreReadsFail { permille, for_ns } => {
                self.reads_fail = permille;
                self.after(for_ns, Item::Undo(fault));
            }
            Fault::StoreUnknown {
                permille,
                late,
                for_ns,
            } => {
                self.unknown = (permille, late);
                self.after(for_ns, Item::Undo(fault));
            }
            Fault::StoreStale { node, by, for_ns } => {
                self.after(for_ns, Item::Undo(fault));
                return self.step(Step::StoreStale { node, by });
            }
            Fault::StoreCut { node, for_ns } => {
                self.store_cut[node] += 1;
                self.after(for_ns, Item::Undo(fault));
            }
        }
        Ok(())
    }

    /// The fault is over. Agents find by trying that a path heals, and are not told.
    pub(super) fn undo(&mut self, fault: &Fault) -> Result<(), Violation> {
        if self.healed {
            return Ok(());
        }
        match *fault {
            Fault::CutOneWay { from, to, .. } => self.net.mend(from, to),
            Fault::CutBoth { a, b, .. } => {
                self.net.mend(a, b);
                self.net.mend(b, a);
            }
            Fault::Partition { side, .. } => {
                for (a, b) in across(side, self.world.nodes.len()) {
                    self.net.mend(a, b);
                }
            }
            Fault::Storm { .. } => self.net.storm = None,
            Fault::SlowLink { from, to, .. } => self.net.slow(from, to, 0),
            // Of two pauses that overlap the longer one counts: it is until then that what came in
            // between waits.
            Fault::AgentPause { node, .. }
                if self.world.nodes[node].paused && !self.is_paused(node) =>
            {
                self.pause(node, 0);
                return self.step(Step::Pause {
                    node,
                    paused: false,
                });
            }
            Fault::Suspend { node, .. } => return self.wake_up(node),
            Fault::LauncherPause { node, .. } if self.launcher_paused_until[node] <= self.now => {
                return self.step(Step::LauncherPause {
                    node,
                    paused: false,
                });
            }
            Fault::DiskFull { node, .. } => {
                return self.step(Step::DiskFull { node, full: false });
            }
            Fault::StoreSlow { .. } => self.store_slow = 0,
            Fault::StoreReadsFail { .. } => self.reads_fail = 0,
            Fault::StoreUnknown { .. } => self.unknown = (0, 0),
            Fault::StoreStale { node, .. } => {
                return self.step(Step::StoreStale { node, by: 0 });
            }
            Fault::StoreCut { node, .. } => {
                self.store_cut[node] = self.store_cut[node].saturating_sub(1);
                if self.store_cut[node] == 0 {
                    self.store_opens(node);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn item_relaunch(&mut self, node: usize) -> Result<(), Violation> {
        match self.net.dark[node] {
            true => Ok(()),
            false => self.step(Step::LauncherStart { node }),
        }
    }

    fn cut(&mut self, from: usize, to: usize) {
        self.net.cut(from, to);
        self.watch_cut(from, to);
    }
}

/// The ordered pairs that a partition separates.
fn across(side: u32, n: usize) -> Vec<(usize, usize)> {
    let here = |i: usize| side >> i & 1 == 1;
    let pairs = (0..n).flat_map(|a| (0..n).map(move |b| (a, b)));
    pairs.filter(|(a, b)| here(*a) != here(*b)).collect()
}
