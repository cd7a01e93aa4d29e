//! Agents that are stopped for a while: what comes for them meanwhile waits.

use super::{Conductor, Item};
use crate::sim::invariants::Violation;
use crate::sim::step::Step;

impl Conductor {
    pub(crate) fn pause(&mut self, node: usize, until: u64) {
        self.paused_until[node] = match until {
            0 => 0,
            until => until.max(self.paused_until[node]),
        };
        self.awake(node);
    }

    /// Hands over what came during a pause, if it is over: in the order in which it came, and before
    /// anything newer, however the pause ended. A network driver never reports the end of an old
    /// connection after the beginning of the next one.
    pub(super) fn awake(&mut self, node: usize) {
        if self.asleep[node].is_empty() {
            return;
        }
        let until = self.paused_until[node];
        if until > self.now {
            return self.at(until, Item::Awake { node });
        }
        for item in std::mem::take(&mut self.asleep[node]) {
            self.at(self.now, item);
        }
    }

    /// A machine that is suspended goes on.
    pub(crate) fn wake_up(&mut self, node: usize) -> Result<(), Violation> {
        if self.world.nodes[node].suspended.is_none() {
            return Ok(());
        }
        self.paused_until[node] = 0;
        self.launcher_paused_until[node] = 0;
        self.step(Step::Wake { node })?;
        self.awake(node);
        Ok(())
    }

    pub(crate) fn is_paused(&self, node: usize) -> bool {
        self.paused_until[node] > self.now
    }
}

/// The node whose machine has to run for this step.
pub(super) fn for_machine(step: &Step) -> Option<usize> {
    match step {
        Step::AgentStart { node }
        | Step::AgentKill { node }
        | Step::NewDisk { node }
        | Step::Pause { node, .. }
        | Step::LauncherStart { node }
        | Step::LauncherKill { node }
        | Step::LauncherPause { node, .. }
        | Step::LauncherHiccup { node } => Some(*node),
        _ => None,
    }
}

/// The node whose agent has to be awake for this step.
pub(super) fn for_agent(step: &Step) -> Option<usize> {
    match step {
        Step::Connect { node, .. }
        | Step::Disconnect { node, .. }
        | Step::Deliver { to: node, .. }
        | Step::Timer { node, .. }
        | Step::Probed { node, .. }
        | Step::Drain { node, .. }
        | Step::OrderCheckpoint { node }
        | Step::OrderCancel { node, .. }
        | Step::Checkpoint { node, .. }
        | Step::LauncherConnect { node, .. }
        | Step::AgentHears { node, .. }
        | Step::LauncherGone { node, .. }
        | Step::LeaseAsked { node, .. }
        | Step::StoreAnswer { node, .. }
        | Step::BeaconAnswer { node, .. }
        | Step::Written { node, .. } => Some(*node),
        _ => None,
    }
}
