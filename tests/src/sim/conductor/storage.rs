//! When the store answers, and what becomes of puts that nobody hears of.

use super::{Conductor, Item, STORE_LIMIT};
use crate::sim::clock::MS;
use crate::sim::step::{Request, Step, StoreAnswer};

impl Conductor {
    pub(super) fn store_delay(&mut self) -> u64 {
        self.rng.delay(3 * MS) + self.store_slow / 2 + self.rng.below(self.store_slow / 2 + 1)
    }

    /// Hands over what a launcher says. As in the agent's driver, a registration that comes with a
    /// store waits until that is open, and what the launcher says next waits behind it: the agent's
    /// core never meets a launcher with a store that has not answered yet.
    pub(super) fn send_to_agent(&mut self, node: usize, opens: bool, late: u64, item: Item) {
        let waits = opens && self.store_cut[node] > 0;
        if waits || !self.behind_open[node].is_empty() {
            return self.behind_open[node].push(item);
        }
        let at = self.socket(node, false) + late;
        self.socket_in[node] = at;
        self.at(at, item);
    }

    /// The store answers again.
    pub(crate) fn store_opens(&mut self, node: usize) {
        for item in std::mem::take(&mut self.behind_open[node]) {
            let at = self.socket(node, false);
            self.at(at, item);
        }
    }

    pub(super) fn store_request(&mut self, request: Request) {
        match request {
            Request::StoreRead {
                node,
                agent,
                op,
                slot,
            } => {
                let cut = self.store_cut[node] > 0;
                if cut || self.rng.chance(self.reads_fail) {
                    let answer = StoreAnswer::ReadFailed;
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
