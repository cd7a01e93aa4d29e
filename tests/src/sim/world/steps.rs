//! What happens to launchers and to the store.

use muster_protocol::agent::{ConnId, Event};
use muster_protocol::local::ToAgent;
use muster_protocol::storelog;
use muster_protocol::{Digest, LauncherId};

use super::World;
use crate::sim::clock::MS;
use crate::sim::invariants::Violation;
use crate::sim::launcher::{Launcher, NewLauncher, Out};
use crate::sim::step::{Request, Step, StoreAnswer};
use crate::sim::store::UUID;
use crate::sim::truth::{SavesAt, Spawn, StoppedAt};

impl World {
    pub(super) fn launcher_step(&mut self, step: Step) -> Result<(), Violation> {
        let now = self.now;
        match step {
            Step::LauncherStart { node } => self.launcher_start(node),
            Step::LauncherKill { node } => self.launcher_kill(node),
            Step::LauncherConnect { node, launcher } => self.launcher_connect(node, launcher),
            Step::LauncherHiccup { node } => {
                let n = &mut self.nodes[node];
                n.steady_since = now;
                let agent = n.agent_token;
                if let Some(l) = &mut n.launcher
                    && let Some(conn) = l.conn
                {
                    l.disconnected();
                    self.requests.push(Request::LauncherDown {
                        node,
                        agent,
                        conn: Some(conn),
                    });
                    self.requests.push(Request::LauncherUp { node });
                }
            }
            Step::LauncherHears { node, conn, frame } => {
                let launcher = self.nodes[node].launcher.as_mut();
                if let Some(l) = launcher.filter(|l| l.conn == Some(conn)) {
                    let out = l.receive(frame, now);
                    self.launcher_out(node, out, now);
                }
            }
            Step::LauncherDue {
                node,
                launcher,
                due,
            } => {
                let l = self.nodes[node].launcher.as_mut();
                if let Some(l) = l.filter(|l| l.token == launcher) {
                    let out = l.due(due, now);
                    self.launcher_out(node, out, now);
                }
            }
            Step::AgentHears {
                node,
                agent,
                conn,
                store,
                mut frame,
            } => {
                let registers = matches!(frame, ToAgent::Register(_));
                let n = &mut self.nodes[node];
                if registers && n.agent_token == agent && n.steady_since != u64::MAX {
                    n.steady_since = now;
                }
                if let ToAgent::Register(register) = &mut frame {
                    register.store = store.then_some(UUID);
                }
                let owner = "u".into();
                return self.agent(node, agent, Event::Launcher { conn, owner, frame });
            }
            Step::LauncherGone { node, agent, conn } => {
                let alive = self.nodes[node].launcher.is_some();
                return self.agent(node, agent, Event::LauncherGone { conn, alive });
            }
            Step::WorkerFail { node, code, digest } => {
                let at_ms = (self.nodes[node].clock.local(now).0 / MS) % 1_000_000_000;
                if let Some(l) = &mut self.nodes[node].launcher
                    && (digest.is_none() || l.run.as_ref().map(|r| r.start.digest) == digest)
                    && let Some(frame) = l.fail(code, at_ms)
                {
                    self.launcher_out(node, vec![Out::Say(frame)], now);
                }
            }
            Step::Finish { node, digest } => {
                if let Some(l) = &mut self.nodes[node].launcher {
                    let mut out = Vec::new();
                    l.finish(digest, &mut out);
                    self.launcher_out(node, out, now);
                }
            }
            Step::Stubborn { node } => {
                if let Some(l) = &mut self.nodes[node].launcher {
                    l.stubborn = true;
                }
            }
            Step::StartTrouble { node, times } => {
                if let Some(l) = &mut self.nodes[node].launcher {
                    l.trouble = times;
                }
            }
            Step::Leave { node, grace_ms } => {
                if let Some(l) = &mut self.nodes[node].launcher {
                    let out = l.wish(ToAgent::Leave { grace_ms });
                    self.launcher_out(node, out, now);
                }
            }
            Step::Hang { node, busy } => self.hang(node, busy),
            Step::Thaw { node, digest } => self.thaw(node, digest),
            Step::Cancel { node } => {
                if let Some(l) = &mut self.nodes[node].launcher {
                    let out = l.wish(ToAgent::Cancel);
                    self.launcher_out(node, out, now);
                }
            }
            _ => {}
        }
        Ok(())
    }

    pub(super) fn launcher_start(&mut self, node: usize) {
        if self.nodes[node].launcher.is_some() {
            return;
        }
        self.launchers += 1;
        let mut id = [self.nodes[node].id.0[0]; 8];
        id[4..].copy_from_slice(&self.launchers.to_be_bytes());
        let new = NewLauncher {
            id: LauncherId(id),
            token: self.launchers,
            node: self.nodes[node].id,
            index: node,
            slots: self.setup.nodes[node].slots,
            stop_steps: self.setup.stop_steps,
            stubborn: false,
            trouble: 0,
            save: self.setup.saves.get(node).copied().unwrap_or(0),
            watches: self.setup.watches,
            ends_hung: self.setup.ends_hung,
            agent_grace: World::config(&self.setup).agent_grace.0,
        };
        self.nodes[node].launcher = Some(Launcher::new(&new));
        self.requests.push(Request::LauncherUp { node });
    }

    /// The launcher dies, its workers with it.
    pub(super) fn launcher_kill(&mut self, node: usize) {
        let agent = self.nodes[node].agent_token;
        if let Some(l) = self.nodes[node].launcher.take() {
            self.truth.dirty = true;
            self.requests.push(Request::LauncherDown {
                node,
                agent,
                conn: l.last_conn,
            });
        }
    }

    pub(super) fn launcher_connect(&mut self, node: usize, launcher: u32) {
        let spec = self.setup.spec.clone();
        let store = self.setup.store.then_some(UUID);
        let job = self.key.id.clone();
        let n = &mut self.nodes[node];
        let agent = n.agent_token;
        let Some(l) = n.launcher.as_mut().filter(|l| l.token == launcher) else {
            return;
        };
        if n.agent.is_none() || l.conn.is_some() {
            return;
        }
        self.conns += 1;
        let conn = ConnId(self.conns);
        for frame in l.connected(conn, &job, &spec, store) {
            self.requests.push(Request::ToAgent {
                node,
                agent,
                conn,
                frame,
            });
        }
    }

    pub(super) fn launcher_out(&mut self, node: usize, out: Vec<Out>, now: u64) {
        for out in out {
            let agent = self.nodes[node].agent_token;
            let Some(l) = &self.nodes[node].launcher else {
                return;
            };
            let (launcher, conn) = (l.token, l.conn);
            match out {
                Out::Say(frame) => {
                    if let Some(conn) = conn {
                        self.requests.push(Request::ToAgent {
                            node,
                            agent,
                            conn,
                            frame,
                        });
                    }
                }
                Out::Wait { due, ns, exact } => {
                    self.requests.push(Request::LauncherWait {
                        node,
                        launcher,
                        due,
                        ns,
                        exact,
                    });
                }
                Out::Spawned(start) => {
                    let id = l.id;
                    let restore = self.restores(node, &start.digest);
                    self.coverage.spawns += 1;
                    self.truth.dirty = true;
                    self.joins_hang(node);
                    self.truth.spawns.push(Spawn {
                        node,
                        launcher: id,
                        token: launcher,
                        start,
                        at: now,
                        restore,
                    });
                }
                Out::Died(_) => self.truth.dirty = true,
                Out::StoppedAt {
                    digest,
                    step,
                    installed,
                } => {
                    self.truth.dirty = true;
                    self.coverage.stop_steps += 1;
                    self.truth.stops.push(StoppedAt {
                        node,
                        digest,
                        step,
                        installed,
                    });
                }
                Out::SavesAt {
                    digest,
                    barrier,
                    step,
                    installed,
                } => {
                    self.truth.dirty = true;
                    self.coverage.saves += 1;
                    self.truth.saves.push(SavesAt {
                        node,
                        digest,
                        barrier,
                        step,
                        installed,
                    });
                }
                Out::Exit => {
                    self.launcher_kill(node);
                    self.requests.push(Request::LauncherEnded { node });
                    return;
                }
            }
        }
    }

    pub(super) fn restores(
        &self,
        node: usize,
        digest: &Digest,
    ) -> Option<Option<muster_protocol::record::CommitRef>> {
        let job = self.nodes[node].agent.as_ref()?.job(&self.key)?;
        let (record, head) = job.head()?;
        (head == *digest).then_some(record.restore)
    }

    pub(super) fn store_step(&mut self, step: Step) -> Result<(), Violation> {
        match step {
            Step::StoreRead {
                node,
                agent,
                op,
                slot,
            } => {
                let answer = match self.store.get(slot) {
                    Some(bytes) => StoreAnswer::Found(bytes.to_vec()),
                    None => StoreAnswer::Absent,
                };
                self.requests.push(Request::StoreAnswer {
                    node,
                    agent,
                    op,
                    slot,
                    answer,
                });
            }
            Step::StorePut {
                node,
                agent,
                op,
                slot,
                bytes,
                answer,
            } => {
                let won = self.store.create(slot, &bytes);
                if won {
                    self.truth.logged(&self.store);
                }
                if answer {
                    let answer = if won {
                        StoreAnswer::Won
                    } else {
                        StoreAnswer::Exists
                    };
                    self.requests.push(Request::StoreAnswer {
                        node,
                        agent,
                        op,
                        slot,
                        answer,
                    });
                }
            }
            Step::StoreAnswer {
                node,
                agent,
                op,
                slot,
                answer,
            } => {
                use storelog::{CreateOutcome, ReadOutcome};
                let read = |outcome| storelog::Event::Read { op, slot, outcome };
                let created = |outcome| storelog::Event::Created { op, slot, outcome };
                let event = match answer {
                    StoreAnswer::Found(bytes) => read(ReadOutcome::Found(bytes)),
                    StoreAnswer::Absent => read(ReadOutcome::Absent),
                    StoreAnswer::ReadFailed => read(ReadOutcome::Failed),
                    StoreAnswer::Won => created(CreateOutcome::Won),
                    StoreAnswer::Exists => created(CreateOutcome::Exists),
                    StoreAnswer::Unknown => created(CreateOutcome::Unknown),
                };
                let key = self.key.clone();
                self.agent(node, agent, Event::Store { key, event })?;
                self.clean_up(node);
            }
            Step::BeaconWrite { value } => self.store.beacon = Some(value),
            Step::BeaconRead { node, agent } => {
                let value = self.store.beacon;
                self.requests
                    .push(Request::BeaconAnswer { node, agent, value });
            }
            Step::BeaconAnswer { node, agent, value } => {
                let key = self.key.clone();
                return self.agent(node, agent, Event::Beacon { key, value });
            }
            _ => {}
        }
        Ok(())
    }
}
