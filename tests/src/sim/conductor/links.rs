//! Connections between agents, and probes: when they come, break, and are found out.

use muster_protocol::NodeId;
use muster_protocol::agent::ConnId;

use super::{Conductor, Item, SILENT_CLOSE};
use crate::sim::clock::{MS, SEC};
use crate::sim::invariants::Violation;
use crate::sim::net::Conn;
use crate::sim::step::{Found, Step};

/// How often an agent looks at the guard of a launcher that it has lost.
const LOOK: u64 = 100 * MS;

impl Conductor {
    pub(crate) fn redial(&mut self, a: usize, b: usize) {
        if a == b || self.net.conn(a, b).up {
            return;
        }
        let epoch = self.net.conn(a, b).epoch;
        let ns = self.rng.delay(60 * MS);
        self.after(ns, Item::Dial { a, b, epoch });
    }

    pub(super) fn dial(&mut self, a: usize, b: usize, epoch: u32) -> Result<(), Violation> {
        let conn = *self.net.conn(a, b);
        let ready = |c: &Conductor, i: usize| {
            c.world.nodes[i].agent.is_some() && c.paused_until[i] <= c.now
        };
        if conn.up || conn.epoch != epoch {
            return Ok(());
        }
        if !ready(self, a) || !ready(self, b) || !self.net.two_way(a, b) {
            // An agent that comes up dials by itself; a link that heals is found by trying.
            if self.world.nodes[a].agent.is_some() && self.world.nodes[b].agent.is_some() {
                let ns = self.rng.between(100 * MS, SEC);
                self.after(ns, Item::Dial { a, b, epoch });
            }
            return Ok(());
        }
        *self.net.conn(a, b) = Conn {
            up: true,
            epoch: epoch + 1,
        };
        for (node, peer) in [(a, b), (b, a)] {
            let agent = self.world.nodes[node].agent_token;
            let ns = self.net.latency(&mut self.rng, peer, node);
            self.after(ns, Item::Do(Step::Connect { node, agent, peer }));
        }
        Ok(())
    }

    pub(super) fn agent_down(&mut self, node: usize) {
        for peer in 0..self.world.nodes.len() {
            if peer == node {
                continue;
            }
            let conn = self.net.conn(node, peer);
            if !conn.up {
                continue;
            }
            conn.up = false;
            conn.epoch += 1;
            let epoch = conn.epoch;
            // The kernel says it at once, if it is there and gets through.
            let ns = match self.net.passes(node, peer) {
                true => self.net.latency(&mut self.rng, node, peer),
                false => SILENT_CLOSE + self.rng.below(SILENT_CLOSE),
            };
            self.after(
                ns,
                Item::Reset {
                    node: peer,
                    peer: node,
                    epoch,
                },
            );
        }
        let (down, new_disk) = std::mem::replace(&mut self.fate[node], (SEC, false));
        if down != u64::MAX {
            let down = if self.healed { SEC } else { down };
            self.after(down, Item::Revive { node, new_disk });
        }
    }

    /// A link was cut: unless it heals, both ends find out some time.
    pub(crate) fn watch_cut(&mut self, a: usize, b: usize) {
        let conn = *self.net.conn(a, b);
        if conn.up {
            let ns = SILENT_CLOSE + self.rng.below(SILENT_CLOSE);
            self.after(
                ns,
                Item::Silent {
                    a,
                    b,
                    epoch: conn.epoch,
                },
            );
        }
    }

    pub(super) fn silent(&mut self, a: usize, b: usize, epoch: u32) -> Result<(), Violation> {
        let whole = self.net.two_way(a, b);
        let conn = self.net.conn(a, b);
        if !conn.up || conn.epoch != epoch || whole {
            return Ok(());
        }
        conn.up = false;
        conn.epoch += 1;
        let epoch = conn.epoch;
        for (node, peer) in [(a, b), (b, a)] {
            let ns = self.rng.below(SEC);
            self.after(ns, Item::Reset { node, peer, epoch });
        }
        self.redial(a, b);
        Ok(())
    }

    /// As the agent's driver: it looks until the launcher is gone or back, and tells what has changed.
    pub(super) fn look_at_guard(
        &mut self,
        node: usize,
        agent: u32,
        conn: ConnId,
        launcher: u32,
        told: Option<Found>,
    ) {
        let n = &self.world.nodes[node];
        let back = n.launcher.as_ref().filter(|l| l.token == launcher);
        let back = back.is_some_and(|l| l.conn.is_some_and(|c| c != conn));
        if n.agent_token != agent || n.agent.is_none() || back {
            return;
        }
        let item = |told| Item::LookAtGuard {
            node,
            agent,
            conn,
            launcher,
            told,
        };
        if self.is_paused(node) {
            return self.at(self.paused_until[node], item(told));
        }
        let found = self.world.guard(node, |l| l.token == launcher);
        let takes = match found {
            Found::Mute => 5 * LOOK,
            _ => 0,
        };
        if told != Some(found) {
            self.after(
                takes,
                Item::Do(Step::LauncherGone {
                    node,
                    agent,
                    conn,
                    launcher,
                }),
            );
        }
        if found != Found::Refused {
            self.after(takes + LOOK, item(Some(found)));
        }
    }

    pub(super) fn probed(
        &mut self,
        node: usize,
        agent: u32,
        peer: NodeId,
        id: u64,
        guard: Option<(u8, u16)>,
    ) {
        let Some(to) = self.world.index(peer) else {
            return;
        };
        let runs = |at: usize| self.world.nodes[at].suspended.is_none();
        let namesakes = self.setup.namesakes;
        let reached = self.net.two_way(node, to) && runs(to);
        let agent_found = match &self.world.nodes[to].agent {
            _ if !reached && namesakes => Found::Refused,
            _ if !reached => Found::Silent,
            None => Found::Refused,
            // Of one that is stopped the kernel accepts connections all the same.
            Some(_) if self.world.nodes[to].paused => Found::Mute,
            Some(_) => Found::Answered,
        };
        let guard_found = match guard {
            // A missing guard, as a witness's, counts as refused.
            None => Found::Refused,
            Some((host, port)) => {
                let host = usize::from(host).saturating_sub(1);
                let there = host < self.world.nodes.len() && runs(host);
                match there && self.net.two_way(node, host) {
                    true => self.world.guard(host, |l| l.guard_port() == port),
                    false if namesakes => Found::Refused,
                    false => Found::Silent,
                }
            }
        };
        let limit = self.world.suspect_after(node).0 / 4;
        let back = match (agent_found, guard_found) {
            (Found::Silent, _) | (_, Found::Silent | Found::Mute) => limit,
            (Found::Mute, _) => limit / 4,
            _ => self.net.latency(&mut self.rng, to, node).min(limit),
        };
        let step = Step::Probed {
            node,
            agent,
            peer,
            id,
            agent_found,
            guard_found,
        };
        self.after(back, Item::Do(step));
    }
}
