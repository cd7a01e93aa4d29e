//! Steps of launchers and of the store.

use muster_launcher::Event as Told;
use muster_protocol::agent::{ConnId, Event};
use muster_protocol::local::{KeepNews, SaveNews, ToAgent, ToLauncher};
use muster_protocol::membership::Answer;
use muster_protocol::storelog;
use muster_protocol::{Digest, LauncherId, Span};

use super::World;
use crate::sim::clock::MS;
use crate::sim::invariants::Violation;
use crate::sim::launcher::{ANSWER, Due, Habits, Launcher, NewLauncher, Out, SlotDue};
use crate::sim::step::{Found, Request, Step, StoreAnswer};
use crate::sim::store::UUID;
use crate::sim::truth::{SavesAt, Spawn, StoppedAt, ToldEnd};

impl World {
    pub(super) fn launcher_step(&mut self, step: Step) -> Result<(), Violation> {
        let now = self.now;
        match step {
            Step::LauncherStart { node } => self.launcher_start(node),
            Step::LauncherKill { node } => self.launcher_kill(node),
            Step::LauncherConnect { node, launcher } => self.launcher_connect(node, launcher),
            Step::LauncherHiccup { node } => self.launcher_relinks(node),
            Step::LauncherHears { node, conn, frame } => {
                let launcher = self.nodes[node].launcher.as_mut();
                if let Some(l) = launcher.filter(|l| l.conn == Some(conn)) {
                    if let ToLauncher::Life { lineage } = frame {
                        self.truth.lives.insert(l.id, lineage);
                    }
                    if let ToLauncher::End { code, report } = &frame {
                        self.truth.dirty = true;
                        self.truth.told.push(ToldEnd {
                            at: now,
                            node,
                            launcher: l.id,
                            life: self.truth.lives.get(&l.id).copied().flatten(),
                            code: *code,
                            report: report.clone(),
                            leaves: l.leaves,
                            cancelled: l.cancelled,
                        });
                    }
                    let taken = matches!(frame, ToLauncher::Welcome { .. });
                    let mut out = l.receive(frame, now);
                    if taken {
                        let left = std::mem::take(&mut self.nodes[node].left_slots);
                        self.coverage.inherited += u64::from(!left.is_empty());
                        let l = self.nodes[node].launcher.as_mut();
                        out.extend(l.into_iter().flat_map(|l| l.inherit(left.clone())));
                    }
                    self.launcher_out(node, out, now);
                }
            }
            Step::LauncherDue {
                node,
                launcher,
                due,
            } => {
                let found = self.answers_guard(due, node);
                if due == Due::Slot(SlotDue::Look) {
                    let reached = self.reached(node);
                    let l = self.nodes[node].launcher.as_mut();
                    l.into_iter().for_each(|l| l.reached(reached));
                }
                let l = self.nodes[node].launcher.as_mut();
                if let Some(l) = l.filter(|l| l.token == launcher) {
                    let out = l.due(due, found, now);
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
                if matches!(frame, ToAgent::Cancel) {
                    let there = self.nodes.iter_mut().filter_map(|n| n.launcher.as_mut());
                    there.for_each(|l| l.cancelled = true);
                }
                let n = &mut self.nodes[node];
                if registers && n.agent_token == agent && n.steady_since != u64::MAX {
                    n.steady_since = now;
                }
                if let ToAgent::Register(register) = &mut frame {
                    let first = self.truth.registered.entry(register.launcher);
                    first.or_insert(now);
                    register.store = store.then_some(UUID);
                }
                let owner = "u".into();
                return self.agent(node, agent, Event::Launcher { conn, owner, frame });
            }
            Step::LauncherGone {
                node,
                agent,
                conn,
                launcher,
            } => {
                // As the agent's driver: of one that accepts and says nothing it tells that it is silent.
                let guard = match self.guard(node, |l| l.token == launcher) {
                    Found::Answered => Answer::Answered,
                    Found::Refused | Found::Other => Answer::Refused,
                    Found::Mute | Found::Silent => Answer::Silent,
                };
                return self.agent(node, agent, Event::LauncherGone { conn, guard });
            }
            Step::WorkerFail { node, code, digest } => {
                let at_ms = (self.nodes[node].clock.local(now).0 / MS) % 1_000_000_000;
                if let Some(l) = &mut self.nodes[node].launcher
                    && (digest.is_none() || l.run.as_ref().map(|r| r.start.digest) == digest)
                {
                    let out = match digest {
                        None => l.fail(code, at_ms, now),
                        Some(_) => l.lose_peers(at_ms, now),
                    };
                    self.launcher_out(node, out, now);
                }
            }
            Step::Finish { node, digest } => {
                if let Some(l) = &mut self.nodes[node].launcher {
                    let out = l.finishes(digest, now);
                    self.launcher_out(node, out, now);
                }
            }
            Step::Stubborn { node } => {
                if let Some(l) = &mut self.nodes[node].launcher {
                    l.habits.stubborn = true;
                }
            }
            Step::StartTrouble { node, times } => {
                if let Some(l) = &mut self.nodes[node].launcher {
                    l.habits.trouble = times;
                }
            }
            Step::Leave { node } => {
                if let Some(l) = &mut self.nodes[node].launcher {
                    l.leaves = true;
                }
                self.launcher_told(node, Told::Terminate { signal: 15 });
            }
            Step::Hang { node, busy } => self.hang(node, busy),
            Step::Thaw { node, digest } => self.thaw(node, digest),
            Step::Cancel { node } => self.launcher_told(node, Told::Interrupt),
            Step::LauncherPause { node, paused } => {
                if let Some(l) = &mut self.nodes[node].launcher {
                    let out = l.pause(paused, now);
                    let seeks = !paused && l.conn.is_none();
                    self.launcher_out(node, out, now);
                    if seeks {
                        self.requests.push(Request::LauncherUp { node });
                    }
                }
            }
            Step::LeaseAsked {
                node,
                agent,
                launcher,
                asked,
            } => self.lease_asked(node, agent, launcher, asked),
            Step::SlowReap { node, ns } => {
                if let Some(l) = &mut self.nodes[node].launcher {
                    l.habits.reaped_after = ns;
                }
            }
            Step::Unkillable { node, until } => {
                if let Some(l) = &mut self.nodes[node].launcher {
                    let out = l.unkillable(until, now);
                    self.launcher_out(node, out, now);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// The agent answers a sidecar, unless that waits no more.
    fn lease_asked(&mut self, node: usize, agent: u32, launcher: u32, asked: u64) {
        let now = self.now;
        let n = &mut self.nodes[node];
        let l = n.launcher.as_mut().filter(|l| l.token == launcher);
        if let (Some(there), Some(l)) = (&n.agent, l)
            && n.agent_token == agent
            && now <= asked + ANSWER
        {
            self.coverage.lease_answers += 1;
            let left = there.lease_of(l.id, n.clock.local(now)).as_millis();
            let until = n.clock.local(asked) + Span::from_millis(left);
            l.lease_granted(n.clock.global(until));
        }
    }

    /// Result of a connection to the guard of this launcher.
    pub fn guard(&self, node: usize, is: impl Fn(&Launcher) -> bool) -> Found {
        match self.nodes[node].launcher.as_ref().filter(|l| is(l)) {
            None => Found::Refused,
            Some(l) if l.paused.is_some() => Found::Mute,
            Some(l) if !l.vouches() => Found::Refused,
            Some(_) => Found::Answered,
        }
    }

    fn launcher_told(&mut self, node: usize, event: Told) {
        let now = self.now;
        if let Some(l) = &mut self.nodes[node].launcher {
            let out = l.tell(event, now);
            self.launcher_out(node, out, now);
        }
    }

    /// The step that all ranks of the generation have reached of which this node has workers.
    fn reached(&self, node: usize) -> u64 {
        let runs = |n: &super::Node| {
            let run = n.launcher.as_ref().and_then(|l| l.run.as_ref());
            let run = run.filter(|r| r.alive_steps());
            Some((
                n.launcher.as_ref()?.id,
                run?.start.digest,
                run?.steps.at(self.now),
            ))
        };
        let Some((_, digest, _)) = runs(&self.nodes[node]) else {
            return 0;
        };
        let record = self.truth.records.get(&digest);
        let at = |id: LauncherId| {
            let mut all = self.nodes.iter().filter_map(runs);
            let found = all.find(|(of, runs, _)| (*of, *runs) == (id, digest));
            found.map_or(0, |(_, _, step)| step)
        };
        let members = record.into_iter().flat_map(|r| &r.members);
        members.map(|m| at(m.launcher)).min().unwrap_or(0)
    }

    /// How the launcher of rank 0 answers this one, where it asks.
    fn answers_guard(&self, due: Due, node: usize) -> Found {
        let Due::Verified { digest, .. } = due else {
            return Found::Refused;
        };
        let first = (self.truth.records.get(&digest)).and_then(|r| r.members.first());
        let Some(first) = first.filter(|_| self.nodes[node].launcher.is_some()) else {
            return Found::Refused;
        };
        let of = |n: &super::Node| n.launcher.as_ref().is_some_and(|l| l.id == first.launcher);
        let there = self.nodes.iter().position(of);
        there.map_or(Found::Refused, |n| self.guard(n, |_| true))
    }

    pub(super) fn launcher_start(&mut self, node: usize) {
        if self.nodes[node].launcher.is_some() {
            return;
        }
        self.launchers += 1;
        self.started.push((node, self.now));
        let mut id = [self.nodes[node].id.0[0]; 8];
        id[4..].copy_from_slice(&self.launchers.to_be_bytes());
        let setup = &self.setup;
        let new = NewLauncher {
            id: LauncherId(id),
            token: self.launchers,
            index: node,
            clock: self.nodes[node].clock,
            job: self.key.id.clone(),
            spec: setup.spec_at(self.now).clone(),
            store: setup.store.then_some(UUID),
            slots: setup.nodes[node].slots,
            habits: Habits {
                live: setup.live,
                stop_steps: setup.stop_steps,
                save: setup.saves.get(node).copied().unwrap_or(0),
                watches: setup.watches,
                ends_hung: setup.ends_hung,
                word: self.suspect_after(node).0 / 4,
                saving: setup.saving.filter(|_| setup.store),
                ..Habits::default()
            },
        };
        self.nodes[node].launcher = Some(Launcher::new(new, self.now));
        self.requests.push(Request::LauncherUp { node });
    }

    /// The launcher dies, its workers with it.
    pub(super) fn launcher_kill(&mut self, node: usize) {
        let agent = self.nodes[node].agent_token;
        if let Some(l) = self.nodes[node].launcher.take() {
            self.truth.dirty = true;
            let n = &mut self.nodes[node];
            if n.agent.is_some() && !self.setup.embedded {
                // The agent has descriptors of them.
                n.left_slots.extend(l.slots_left());
            }
            self.requests.push(Request::LauncherDown {
                node,
                agent,
                conn: l.last_conn,
                launcher: l.token,
            });
        }
    }

    pub(super) fn launcher_connect(&mut self, node: usize, launcher: u32) {
        let now = self.now;
        let n = &mut self.nodes[node];
        let Some(l) = n.launcher.as_mut().filter(|l| l.token == launcher) else {
            return;
        };
        if n.agent.is_none() || l.conn.is_some() || l.paused.is_some() {
            return;
        }
        self.conns += 1;
        let out = l.connected(ConnId(self.conns), now);
        self.launcher_out(node, out, now);
    }

    /// Its connection breaks, and it dials again.
    fn launcher_relinks(&mut self, node: usize) {
        let now = self.now;
        let n = &mut self.nodes[node];
        n.steady_since = now;
        let agent = n.agent_token;
        if let Some(l) = &mut n.launcher
            && let Some(conn) = l.conn
        {
            let launcher = l.token;
            let out = l.disconnected(now);
            self.launcher_out(node, out, now);
            self.requests.push(Request::LauncherDown {
                node,
                agent,
                conn: Some(conn),
                launcher,
            });
            self.requests.push(Request::LauncherUp { node });
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
                    if let ToAgent::Save(SaveNews::Sealed { copy, .. }) = &frame {
                        self.coverage.sealed += 1;
                        let newest = self.truth.sealed.entry(copy.generation).or_default();
                        *newest = copy.step.max(*newest);
                    }
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
                Out::Parked(_) => {
                    self.truth.dirty = true;
                    self.coverage.parks += 1;
                }
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
                Out::Wrote { save, rank } => {
                    self.coverage.files += 1;
                    let again = !self.store.wrote(&save, rank);
                    self.coverage.rewritten += u64::from(again);
                }
                Out::Manifest { save, world } => {
                    self.coverage.manifests += 1;
                    self.truth.dirty = true;
                    self.store.made(&save, world);
                }
                Out::Review(review) => {
                    let words = self.store.review(&review).into_iter();
                    let words = words.map(|word| Out::Say(ToAgent::Save(SaveNews::Keep(word))));
                    self.launcher_out(node, words.collect(), now);
                }
                Out::LookAgain(question) => {
                    let state = self.store.state_of(&question.manifest);
                    let number = question.number;
                    let word = SaveNews::Keep(KeepNews::LookedAgain { number, state });
                    self.launcher_out(node, vec![Out::Say(ToAgent::Save(word))], now);
                }
                Out::Delete(name) => {
                    self.truth.dirty = true;
                    self.coverage.deletes += 1;
                    self.store.delete(&name);
                }
                Out::AskLease => self.requests.push(Request::AskLease {
                    node,
                    agent,
                    launcher,
                }),
                Out::LeaseOver => self.coverage.sidecar_kills += 1,
                Out::Relink => self.launcher_relinks(node),
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
                let seen = self.now.saturating_sub(self.nodes[node].store_stale);
                let answer = match self.store.get_as_of(slot, seen) {
                    Some(bytes) => StoreAnswer::Found(bytes.to_vec()),
                    None => {
                        let there = self.store.get(slot).is_some();
                        self.coverage.stale_reads += u64::from(there);
                        StoreAnswer::Absent
                    }
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
                let won = self.store.create(slot, &bytes, self.now);
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
