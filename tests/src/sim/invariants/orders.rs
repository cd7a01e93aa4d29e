//! An order of a person is answered, whatever has failed: it is carried out, or is said to have failed, and why.

use muster_protocol::job::CancelStage;

use crate::sim::clock::{MS, SEC};
use crate::sim::world::World;

/// Longest time for which it is not known whether an order to end the job is carried out.
const CANCEL: u64 = 45 * SEC;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "node {node}'s agent was asked to end the job {for_ms} ms ago, and has not said how that went"
)]
pub struct CancelError {
    pub node: usize,
    pub for_ms: u64,
}

pub fn cancels_are_answered(world: &mut World) -> Result<(), CancelError> {
    for (node, n) in world.nodes.iter_mut().enumerate() {
        let Some(ordered) = n.cancel_ordered else {
            continue;
        };
        let job = n.agent.as_ref().and_then(|a| a.job(&world.key));
        let open = CancelStage::Asked { sure: false };
        if job.and_then(|j| j.cancelling()) != Some(open) {
            n.cancel_ordered = None;
            continue;
        }
        let since = ordered.max(n.woke);
        if world.now > since + CANCEL && !n.paused && n.suspended.is_none() {
            let for_ms = (world.now - since) / MS;
            return Err(CancelError { node, for_ms });
        }
    }
    Ok(())
}
