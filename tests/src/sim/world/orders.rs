//! Commands of a person at a node's agent.

use muster_protocol::agent::{ConnId, Event};
use muster_protocol::local::{Command, ToAgent};
use muster_protocol::wire::{JobMessage, Message};

use super::World;
use crate::sim::invariants::Violation;

impl World {
    pub(super) fn order(&mut self, node: usize, command: Command) -> Result<(), Violation> {
        let agent = self.nodes[node].agent_token;
        let frame = ToAgent::Command(command);
        let (conn, owner) = (ConnId(0), self.key.owner.clone());
        self.agent(node, agent, Event::Launcher { conn, owner, frame })
    }

    pub(super) fn order_cancel(&mut self, node: usize) -> Result<(), Violation> {
        if self.nodes[node].agent.is_none() {
            return Ok(());
        }
        let job = self.key.id.clone();
        let refused = self.coverage.refused_events;
        self.order(node, Command::Cancel { job })?;
        if self.coverage.refused_events == refused {
            self.nodes[node].cancel_ordered = Some(self.now);
            self.cancels_all();
        }
        Ok(())
    }

    /// An order is for those that take part in the life when it arrives, or wait for one to begin.
    pub(super) fn hears_cancel(&mut self, node: usize, message: &Message) {
        let Message::Job { body, .. } = message else {
            return;
        };
        let JobMessage::CancelAsk { lineage } = **body else {
            return;
        };
        if lineage.is_zero() {
            self.cancels_all();
        } else if let Some(launcher) = &mut self.nodes[node].launcher {
            let life = self.truth.lives.get(&launcher.id).copied().flatten();
            launcher.cancelled |= life == Some(lineage);
        }
    }

    fn cancels_all(&mut self) {
        let there = self.nodes.iter_mut().filter_map(|n| n.launcher.as_mut());
        there.for_each(|l| l.cancelled = true);
    }
}
