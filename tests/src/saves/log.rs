//! An agent's log: what its driver does for it, and what the agent makes of it.

use std::sync::Arc;

use muster_protocol::checkpoint::{Decision, KeeperEvent, LeaderEvent, NodeEvent, State};
use muster_protocol::record::Record;
use muster_protocol::storelog::{self, Body, Outcome, Output, Snapshot, Why};

use super::agent::Cores;
use super::truth::Violation;
use super::world::{Ev, World};

impl World {
    pub(super) fn log_effect(&mut self, agent: usize, effect: storelog::Effect) {
        let boot = self.agents[agent].boot;
        let ms = self.rng.delay(20);
        match effect {
            storelog::Effect::Read { op, slot } => self.after(ms, Ev::Read(agent, boot, op, slot)),
            storelog::Effect::Create { op, slot, bytes } => {
                let create = |lands, answers| Ev::Create {
                    agent,
                    boot,
                    op,
                    slot,
                    bytes: bytes.clone(),
                    lands,
                    answers,
                };
                if self.fault(100) {
                    // The answer says nothing; the put lands late, or never.
                    self.after(ms, create(false, true));
                    if self.rng.chance(700) {
                        let late = ms + self.rng.between(0, 5_000);
                        self.after(late, create(true, false));
                    }
                } else {
                    self.after(ms, create(true, true));
                }
            }
        }
    }

    pub(super) fn output(&mut self, a: usize, output: Output) -> Result<(), Violation> {
        match output {
            Output::Entry {
                seq, entry, valid, ..
            } if valid => match entry.body {
                Body::Claim(record) => self.claimed(a, *record)?,
                Body::Commit(commit) => {
                    let needs = self.disk.needs(&commit.manifest);
                    if let Some(cores) = &mut self.agents[a].cores {
                        cores.keeper.handle(KeeperEvent::Committed { seq, commit });
                        if let Some(names) = needs {
                            cores.keeper.handle(KeeperEvent::Needs { seq, names });
                            let state = State::Verified;
                            cores.keeper.handle(KeeperEvent::Checked { seq, state });
                        }
                    }
                }
                Body::Retire { seq, .. } => self.tell_keeper(a, KeeperEvent::Retired { seq }),
                Body::Reject { seq, .. } => {
                    self.counts.rejected += 1;
                    self.tell_keeper(a, KeeperEvent::Rejected { seq });
                }
                Body::Pin { seq } => self.tell_keeper(a, KeeperEvent::Pinned { seq }),
                Body::Rules(_) => {}
                Body::Unpin { seq } => self.tell_keeper(a, KeeperEvent::Unpinned { seq }),
                Body::Snapshot(snapshot) => {
                    if let Some(cores) = &mut self.agents[a].cores {
                        cores.keeper.forget(&snapshot);
                    }
                }
            },
            Output::Began { snapshot, .. } => self.began(a, *snapshot)?,
            Output::Appended { id, outcome } => self.appended(a, id, &outcome)?,
            Output::Broken { why } => {
                return Err(Violation {
                    name: "log",
                    text: why.to_string(),
                });
            }
            Output::Entry { .. } | Output::TailConfirmed { .. } | Output::Mended => {}
        }
        Ok(())
    }

    /// An agent that was restarted reads on from a snapshot.
    fn began(&mut self, a: usize, snapshot: Snapshot) -> Result<(), Violation> {
        if let Some(cores) = &mut self.agents[a].cores {
            cores.keeper.begin(&snapshot);
            for known in snapshot.commits.iter().filter(|c| c.in_force()) {
                let seq = known.seq;
                if let Some(names) = self.disk.needs(&known.commit.manifest) {
                    cores.keeper.handle(KeeperEvent::Needs { seq, names });
                    let state = State::Verified;
                    cores.keeper.handle(KeeperEvent::Checked { seq, state });
                }
            }
        }
        self.head_claimed(a, snapshot.claim)
    }

    fn tell_keeper(&mut self, a: usize, event: KeeperEvent) {
        if let Some(cores) = &mut self.agents[a].cores {
            cores.keeper.handle(event);
        }
    }

    fn appended(&mut self, a: usize, id: u64, outcome: &Outcome) -> Result<(), Violation> {
        let Some(cores) = &mut self.agents[a].cores else {
            return Ok(());
        };
        if cores.claiming == Some(id) {
            cores.claiming = None;
        } else if let Some(manifest) = cores.commits.remove(&id) {
            let event = match outcome {
                Outcome::Won { .. } => LeaderEvent::Committed { manifest },
                Outcome::Overtaken { .. } | Outcome::Invalid(_) => {
                    self.counts.refused_commits += 1;
                    let why = format!("{outcome:?}");
                    LeaderEvent::NotCommitted { manifest, why }
                }
            };
            self.tell_leader(a, event)?;
        } else if let Some(seq) = cores.appends.remove(&id) {
            match outcome {
                Outcome::Won { .. } => self.counts.retired += 1,
                Outcome::Invalid(Why::Again(_)) => {}
                _ => cores.keeper.handle(KeeperEvent::NotAppended { seq }),
            }
        }
        Ok(())
    }

    fn claimed(&mut self, a: usize, record: Record) -> Result<(), Violation> {
        let generation = record.digest();
        let restore = record.restore;
        self.tell_keeper(
            a,
            KeeperEvent::Claimed {
                generation,
                restore,
            },
        );
        self.head_claimed(a, record)
    }

    fn head_claimed(&mut self, a: usize, record: Record) -> Result<(), Violation> {
        let (now, flaws) = (self.now, self.plant.cores);
        let agent = &mut self.agents[a];
        if agent
            .head
            .as_ref()
            .is_some_and(|h| h.number >= record.number)
        {
            return Ok(());
        }
        if let Some(cores) = &mut agent.cores {
            for node in &mut cores.nodes {
                for k in 0..agent.ranks {
                    let _gone = node.handle(NodeEvent::WorkerGone { k }, now);
                }
                let _ended = node.handle(NodeEvent::Ended, now);
            }
            if let Some(leader) = &mut cores.leader {
                let _ended = leader.handle(LeaderEvent::Ended, now);
            }
            // What the old leader still had to say is said.
            cores.collect();
        }
        agent.install(&Arc::new(record), flaws, now);
        let boot = agent.boot;
        let ms = self.rng.between(0, 2_000);
        self.after(ms, Ev::Release(a, boot));
        Ok(())
    }

    /// Somebody decides what to retire and what to delete, boldly: the keeper has to know better.
    pub(super) fn review(&mut self, a: usize) -> Result<(), Violation> {
        let leads = |c: &Cores| c.leader.is_some();
        if !self.agents[a].cores.as_ref().is_some_and(leads) {
            return Ok(());
        }
        let all: Vec<u64> = self.truth.commits.keys().copied().collect();
        let retire = match self.rng.chance(500) {
            true => all.iter().rev().skip(2).copied().collect(),
            false => self.rng.pick(&all).copied().into_iter().collect(),
        };
        let delete = self.disk.items();
        let force = self.truth.commits.iter().filter(|(_, c)| c.in_force());
        let rotten = force.filter(|(_, c)| self.disk.is_rotten(&c.commit.manifest));
        let rotten: Vec<u64> = rotten.map(|(seq, _)| *seq).collect();
        for seq in rotten {
            let why = "a checksum".to_owned();
            let state = State::Damaged { why };
            self.tell_keeper(a, KeeperEvent::Checked { seq, state });
        }
        let generation = self.agents[a].head.as_ref().map(|h| h.digest());
        if let Some(generation) = generation {
            self.tell_keeper(a, KeeperEvent::Loaded { generation });
        }
        self.tell_keeper(a, KeeperEvent::Decided(Decision { retire, delete }));
        self.drain(a)
    }
}
