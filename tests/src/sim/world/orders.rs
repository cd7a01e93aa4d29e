//! Commands of a person at a node's agent.

use muster_protocol::Time;
use muster_protocol::agent::{ConnId, Event};
use muster_protocol::local::{Command, ToAgent};
use muster_protocol::wire::{JobMessage, Message};

use super::World;
use crate::sim::clock::MS;
use crate::sim::invariants::Violation;

impl World {
    pub(super) fn order(&mut self, node: usize, command: Command) -> Result<(), Violation> {
        let agent = self.nodes[node].agent_token;
        let frame = ToAgent::Command(command);
        let (conn, owner) = (ConnId(0), self.key.owner.clone());
        self.agent(node, agent, Event::Launcher { conn, owner, frame })
    }

    pub(super) fn order_cancel(
        &mut self,
        node: usize,
        given: u64,
        there: Time,
    ) -> Result<(), Violation> {
        if self.nodes[node].agent.is_none() {
            return Ok(());
        }
        let job = self.key.id.clone();
        let refused = self.coverage.refused_events;
        self.order(node, Command::Cancel { job, given: there })?;
        if self.coverage.refused_events == refused {
            self.nodes[node].cancel_ordered = Some(self.now);
            self.cancels_all(given);
        }
        Ok(())
    }

    /// An order counts from when it was given, by the word that comes of it: the time that this took on the way is not
    /// known where it arrives.
    pub(super) fn hears_cancel(&mut self, message: &Message) {
        if let Message::Job { body, .. } = message
            && let JobMessage::CancelAsk { ago_ms, .. } = **body
        {
            self.cancels_all(self.now.saturating_sub(u64::from(ago_ms) * MS));
        }
    }

    fn cancels_all(&mut self, given: u64) {
        for (node, n) in self.nodes.iter_mut().enumerate() {
            let mut started = self.started.iter().rev();
            let since = started.find(|(on, _)| *on == node).map_or(0, |(_, at)| *at);
            if let Some(launcher) = n.launcher.as_mut().filter(|_| since <= given) {
                launcher.cancelled = true;
            }
        }
    }
}
