//! When the store answers, and what becomes of puts that nobody hears of.

use super::{Conductor, Item, STORE_LIMIT};
use crate::sim::clock::{MS, SEC};
use crate::sim::step::{Request, Step, StoreAnswer};

/// How long an agent waits for what it asked its launcher to do in the store.
const AGENT_WAITS: u64 = 10 * SEC;

impl Conductor {
    pub(super) fn store_delay(&mut self) -> u64 {
        self.rng.delay(3 * MS) + self.store_slow / 2 + self.rng.below(self.store_slow / 2 + 1)
    }

    /// Whether a launcher that looks for its agent still waits for its store. As the real one, it opens
    /// the store before it registers for the first time, and never again: when it reconnects, the
    /// store may hang without holding it up.
    pub(super) fn opens_store(&mut self, node: usize, launcher: u32) -> bool {
        if !self.setup.store || self.opened[node] == launcher {
            return false;
        }
        if self.store_cut[node] == 0 {
            self.opened[node] = launcher;
            return false;
        }
        self.behind_open[node] = launcher;
        true
    }

    /// The store answers again.
    pub(crate) fn store_opens(&mut self, node: usize) {
        let launcher = std::mem::take(&mut self.behind_open[node]);
        if launcher > 0 {
            self.seek(node, launcher);
        }
    }

    /// Until when the launcher through which this node reaches its store is stopped.
    fn store_stopped(&self, node: usize) -> Option<u64> {
        let launcher = self.world.nodes[node].launcher.as_ref();
        let until = self.launcher_paused_until[node].min(self.setup.heal_at);
        launcher
            .filter(|l| l.paused.is_some())
            .map(|_| until.max(self.now + MS))
    }

    /// An answer of the store is under way: it waits for a launcher that is stopped, as long as the agent
    /// waits for that. The answer that the agent takes then.
    pub(super) fn store_answer_late(&mut self, step: &Step) -> Option<(u64, Step)> {
        let Step::StoreAnswer {
            node,
            agent,
            op,
            slot,
            answer,
        } = step
        else {
            return None;
        };
        let failed = match answer {
            StoreAnswer::Found(_) | StoreAnswer::Absent => StoreAnswer::ReadFailed,
            StoreAnswer::Won | StoreAnswer::Exists => StoreAnswer::Unknown,
            StoreAnswer::ReadFailed | StoreAnswer::Unknown => return None,
        };
        let until = self.store_stopped(*node)?;
        let given_up = self.now + AGENT_WAITS;
        match until < given_up {
            true => Some((until, step.clone())),
            false => {
                let (node, agent, op, slot, answer) = (*node, *agent, *op, *slot, failed);
                let step = Step::StoreAnswer {
                    node,
                    agent,
                    op,
                    slot,
                    answer,
                };
                Some((given_up, step))
            }
        }
    }

    /// Handles an agent's request to the store: its launcher does it.
    pub(super) fn store_asked(&mut self, request: Request) {
        let (node, failed, put) = match &request {
            Request::StoreRead {
                node,
                agent,
                op,
                slot,
            } => {
                let failed = Step::StoreAnswer {
                    node: *node,
                    agent: *agent,
                    op: *op,
                    slot: *slot,
                    answer: StoreAnswer::ReadFailed,
                };
                (*node, failed, None)
            }
            Request::StoreCreate {
                node,
                agent,
                op,
                slot,
                bytes,
            } => {
                let (node, agent, op, slot) = (*node, *agent, *op, *slot);
                let failed = Step::StoreAnswer {
                    node,
                    agent,
                    op,
                    slot,
                    answer: StoreAnswer::Unknown,
                };
                let put = Step::StorePut {
                    node,
                    agent,
                    op,
                    slot,
                    bytes: bytes.clone(),
                    answer: false,
                };
                (node, failed, Some(put))
            }
            _ => return self.store_request(request),
        };
        if let Some(until) = self.store_stopped(node) {
            if until < self.now + AGENT_WAITS {
                return self.at(until, Item::Ask(request));
            }
            self.after(AGENT_WAITS, Item::Do(failed));
            // It does what it was asked for, once it goes on.
            if let Some(put) = put {
                self.at(until, Item::Do(put));
            }
            return;
        }
        let launcher = self.world.nodes[node].launcher.as_ref();
        match launcher.is_some_and(|l| l.conn.is_some()) {
            true => self.store_request(request),
            false => {
                let ns = self.rng.delay(MS);
                self.after(ns, Item::Do(failed));
            }
        }
    }

    fn store_request(&mut self, request: Request) {
        match request {
            Request::StoreRead {
                node,
                agent,
                op,
                slot,
            } => {
                let cut = self.store_cut[node] > 0;
                let unseen = !cut && self.unseen.contains(&(node, slot));
                if cut || unseen || self.rng.chance(self.reads_fail) {
                    let answer = match unseen {
                        true => StoreAnswer::Absent,
                        false => StoreAnswer::ReadFailed,
                    };
                    let ns = if cut { STORE_LIMIT } else { self.store_delay() };
                    self.after(
                        ns,
                        Item::Do(Step::StoreAnswer {
                            node,
                            agent,
                            op,
                            slot,
                            answer,
                        }),
                    );
                } else {
                    let ns = self.store_delay();
                    self.after(
                        ns,
                        Item::Do(Step::StoreRead {
                            node,
                            agent,
                            op,
                            slot,
                        }),
                    );
                }
            }
            Request::StoreCreate {
                node,
                agent,
                op,
                slot,
                bytes,
            } => {
                let cut = self.store_cut[node] > 0;
                if !cut && !self.rng.chance(self.unknown.0) {
                    let ns = self.store_delay();
                    let step = Step::StorePut {
                        node,
                        agent,
                        op,
                        slot,
                        bytes,
                        answer: true,
                    };
                    return self.after(ns, Item::Do(step));
                }
                let answer = StoreAnswer::Unknown;
                let ns = if cut { STORE_LIMIT } else { self.store_delay() };
                self.after(
                    ns,
                    Item::Do(Step::StoreAnswer {
                        node,
                        agent,
                        op,
                        slot,
                        answer,
                    }),
                );
                // Cut off, it may still have left before; else it lands soon, late, or never.
                let lands = match self.rng.below(4) {
                    0 => return,
                    _ if cut && !self.rng.chance(200) => return,
                    1 => self.store_delay(),
                    _ => ns + self.rng.below(self.unknown.1.max(100 * MS)),
                };
                let step = Step::StorePut {
                    node,
                    agent,
                    op,
                    slot,
                    bytes,
                    answer: false,
                };
                self.after(lands, Item::Do(step));
            }
            Request::StoreAnswer {
                node,
                agent,
                op,
                slot,
                answer,
            } => {
                let ns = self.store_delay();
                self.after(
                    ns,
                    Item::Do(Step::StoreAnswer {
                        node,
                        agent,
                        op,
                        slot,
                        answer,
                    }),
                );
            }
            Request::BeaconWrite { node, value } if self.store_cut[node] == 0 => {
                let ns = self.store_delay();
                self.after(ns, Item::Do(Step::BeaconWrite { value }));
            }
            Request::BeaconRead { node, agent } => {
                if self.store_cut[node] == 0 {
                    let ns = self.store_delay();
                    self.after(ns, Item::Do(Step::BeaconRead { node, agent }));
                } else {
                    let step = Step::BeaconAnswer {
                        node,
                        agent,
                        value: None,
                    };
                    self.after(STORE_LIMIT, Item::Do(step));
                }
            }
            Request::BeaconAnswer { node, agent, value } => {
                let ns = self.store_delay();
                self.after(ns, Item::Do(Step::BeaconAnswer { node, agent, value }));
            }
            _ => {}
        }
    }
}
