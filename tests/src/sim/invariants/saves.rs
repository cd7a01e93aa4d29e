//! Checkpoints that launchers wrote: all that the log commits, and all that workers load, is in the store.

use muster_protocol::Digest;

use crate::sim::world::World;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotWholeError {
    #[error(
        "{manifest} of step {step} is committed in slot {slot}, and not all of it is in the store"
    )]
    Committed {
        manifest: Digest,
        step: u64,
        slot: u64,
    },
    #[error("workers on node {node} load {manifest}, and not all of it is in the store")]
    Loaded { manifest: Digest, node: usize },
}

/// A checkpoint in force is whole, and so is one that workers begin with.
pub fn checkpoints_are_whole(world: &World) -> Result<(), NotWholeError> {
    if world.setup.saving.is_none() {
        return Ok(());
    }
    let whole = |manifest: &Digest| world.store.is_whole(manifest) == Some(true);
    for (slot, (commit, gone)) in &world.truth.log.commits {
        if !gone && !whole(&commit.manifest) {
            return Err(NotWholeError::Committed {
                manifest: commit.manifest,
                step: commit.step,
                slot: *slot,
            });
        }
    }
    for spawn in world.truth.fresh_spawns() {
        if let Some(manifest) = spawn.start.restore.filter(|m| !whole(m)) {
            let node = spawn.node;
            return Err(NotWholeError::Loaded { manifest, node });
        }
    }
    Ok(())
}
