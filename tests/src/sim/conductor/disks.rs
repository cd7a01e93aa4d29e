//! Disks that take their time: the agent stands still until they are done.

use super::{Conductor, Item};
use crate::sim::invariants::Violation;
use crate::sim::setup::Fault;
use crate::sim::step::{Request, Step};

impl Conductor {
    /// How long this node's disk takes for a write.
    pub(super) fn disk_takes(&mut self, node: usize) -> u64 {
        match self.setup.slow_disk {
            Some((slow, most)) if slow == node && !self.healed => self.rng.below(most),
            _ => 0,
        }
    }

    /// Puts off an agent's request behind a write until that is over.
    pub(super) fn behind_disk(&mut self, disk: u64, request: Request) -> Result<(), Violation> {
        let node = match &request {
            _ if disk == 0 => return self.request(request),
            Request::Net { from, .. } => *from,
            Request::Probe { node, .. }
            | Request::ToLauncher { node, .. }
            | Request::StoreRead { node, .. }
            | Request::StoreCreate { node, .. }
            | Request::BeaconWrite { node, .. }
            | Request::BeaconRead { node, .. } => *node,
            _ => return self.request(request),
        };
        let agent = self.world.nodes[node].agent_token;
        let item = Item::Behind {
            node,
            agent,
            request,
        };
        self.after(disk, item);
        Ok(())
    }

    /// Handles all that waits for a disk now, before anything newer.
    pub(super) fn disks_are_done(&mut self) -> Result<(), Violation> {
        let waits = |(at, item): (&(u64, u64), &Item)| match item {
            Item::Behind { .. } => Some(*at),
            _ => None,
        };
        let all: Vec<_> = self.queue.iter().filter_map(waits).collect();
        for at in all {
            if let Some(item) = self.queue.remove(&at) {
                self.item(item)?;
            }
        }
        Ok(())
    }

    /// The agent waits for its disk.
    pub(super) fn stands_still(&mut self, node: usize, ns: u64) -> Result<(), Violation> {
        let until = self.now + ns;
        if ns == 0 || self.world.nodes[node].agent.is_none() || self.paused_until[node] >= until {
            return Ok(());
        }
        self.pause(node, until);
        self.after(ns, Item::Undo(Fault::AgentPause { node, for_ns: ns }));
        match self.world.nodes[node].paused {
            true => Ok(()),
            false => self.step(Step::Pause { node, paused: true }),
        }
    }
}
