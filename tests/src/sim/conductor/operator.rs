//! A person who gives up the nodes that are dead (`muster job continue`).

use super::{Conductor, Item};
use crate::sim::clock::SEC;
use crate::sim::invariants::Violation;
use crate::sim::setup::Fault;
use crate::sim::step::Step;

impl Conductor {
    /// Says it at each node in turn, as an answer names the one that takes it, and all of it again a second later.
    pub(crate) fn order_continue(&mut self, until: u64) -> Result<(), Violation> {
        for node in 0..self.world.nodes.len() {
            let Some(dead) = self.dead_for(node) else {
                continue;
            };
            let refused = self.world.coverage.refused_events;
            self.step(Step::Continue { node, dead })?;
            if self.world.coverage.refused_events == refused {
                return Ok(());
            }
        }
        if self.now + SEC < until {
            let for_ns = until - self.now - SEC;
            self.after(SEC, Item::Fault(Fault::Continue { for_ns }));
        }
        Ok(())
    }

    /// The nodes of its generation that an agent does not reach, if it misses any and they all are dead: nobody gives
    /// up a node that may still train.
    fn dead_for(&self, node: usize) -> Option<Vec<usize>> {
        let there = &self.world.nodes[node];
        if self.is_paused(node) || there.launcher.is_none() {
            return None;
        }
        let job = there.agent.as_ref()?.job(&self.world.key)?;
        let members = job.head()?.0.members.iter().map(|m| m.node);
        let voters = job.voting()?.voters().map(|v| v.node);
        let named = members.chain(voters).filter_map(|n| self.world.index(n));
        let mut missed: Vec<usize> = named
            .filter(|n| self.world.nodes[*n].agent.is_none() || !self.net.passes(node, *n))
            .collect();
        missed.sort_unstable();
        missed.dedup();
        let dead = |n: &usize| {
            let n = &self.world.nodes[*n];
            n.agent.is_none() && n.launcher.is_none()
        };
        (!missed.is_empty() && missed.iter().all(dead)).then_some(missed)
    }
}
