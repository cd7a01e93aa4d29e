//! I14, for stops and for checkpoints by order, and what is asked of a verdict about a hang.

use std::collections::BTreeMap;

use muster_protocol::Digest;
use muster_protocol::record::Cause;

use crate::sim::clock::SEC;
use crate::sim::truth::Truth;
use crate::sim::world::World;

/// Longest wait of a real worker at a checkpoint's step before it fails.
const GIVES_UP: u64 = 60 * SEC;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StopStepError {
    #[error("in {digest} ranks were told to stop at step {a}, others at {b}")]
    Two { digest: Digest, a: u64, b: u64 },
    #[error(
        "node {node} was told to stop at step {step} of {digest}, but had {installed:?} installed"
    )]
    NotInstalled {
        node: usize,
        digest: Digest,
        step: u64,
        installed: Option<(u32, u64)>,
    },
}

/// I14: all ranks stop at one confirmed step, or none.
pub fn i14_one_stop_step(truth: &Truth) -> Result<(), StopStepError> {
    let mut steps: BTreeMap<Digest, u64> = BTreeMap::new();
    for stop in &truth.stops {
        let (digest, step) = (stop.digest, stop.step);
        let a = *steps.entry(digest).or_insert(step);
        if a != step {
            return Err(StopStepError::Two { digest, a, b: step });
        }
        if stop.installed.map(|(_, s)| s) != Some(step) {
            let (node, installed) = (stop.node, stop.installed);
            return Err(StopStepError::NotInstalled {
                node,
                digest,
                step,
                installed,
            });
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SaveError {
    #[error("under barrier {barrier} of {digest} ranks save at step {a}, others at {b}")]
    Two {
        digest: Digest,
        barrier: u32,
        a: u64,
        b: u64,
    },
    #[error(
        "node {node} was told to save at step {step} of {digest}, but had {installed:?} installed"
    )]
    NotInstalled {
        node: usize,
        digest: Digest,
        step: u64,
        installed: Option<(u32, u64)>,
    },
    #[error(
        "node {node} went on with step {step} of {digest}, at which others saved, without saving"
    )]
    PassedBy {
        node: usize,
        digest: Digest,
        step: u64,
    },
    #[error("node {node} of {digest} waits at a step that nobody decides, for longer than it may")]
    NeverDecided { node: usize, digest: Digest },
}

/// I14: all ranks of a generation that save for one barrier save at one step.
pub fn i14_one_save_step(truth: &Truth) -> Result<(), SaveError> {
    let mut steps: BTreeMap<(Digest, u32), u64> = BTreeMap::new();
    for save in &truth.saves {
        let (digest, barrier, step) = (save.digest, save.barrier, save.step);
        let a = *steps.entry((digest, barrier)).or_insert(step);
        if a != step {
            return Err(SaveError::Two {
                digest,
                barrier,
                a,
                b: step,
            });
        }
        if save.installed.map(|(_, s)| s) != Some(step) {
            return Err(SaveError::NotInstalled {
                node: save.node,
                digest,
                step,
                installed: save.installed,
            });
        }
    }
    Ok(())
}

/// I14: where some ranks were told to save at a step, nobody of the generation begins it without having
/// saved, as long as the generation goes on. And nobody waits for a decision until it fails.
pub fn i14_saved_before_going_on(world: &World) -> Result<(), SaveError> {
    let now = world.now;
    for (node, n) in world.nodes.iter().enumerate() {
        let run = n.launcher.as_ref().and_then(|l| l.run.as_ref());
        let Some(run) = run.filter(|r| r.goes_on()) else {
            continue;
        };
        let digest = run.start.digest;
        if run
            .waits_since()
            .is_some_and(|since| now >= since + GIVES_UP)
        {
            return Err(SaveError::NeverDecided { node, digest });
        }
        if world.truth.ending.contains(&digest) {
            continue;
        }
        let saves = world.truth.saves.iter().filter(|s| s.digest == digest);
        for step in saves.map(|s| s.step) {
            if run.steps.has_begun(step, now) && !run.steps.saved.contains(&step) {
                return Err(SaveError::PassedBy { node, digest, step });
            }
        }
    }
    Ok(())
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HangError {
    #[error("rank {rank} of node {node} is named ({evidence}) in {digest}, and never hung")]
    Blamed {
        node: usize,
        digest: Digest,
        rank: u32,
        evidence: &'static str,
    },
    #[error("{digest} follows a hang, and nobody is to be ended for one")]
    Ended { digest: Digest },
}

/// By `--on-hang report` no generation ends by a hang.
pub fn no_hang_ends_what_moves(world: &World) -> Result<(), HangError> {
    for (digest, record) in world.truth.fresh_announced() {
        if matches!(record.cause, Cause::WorkerHung { .. }) && !world.setup.ends_hung {
            return Err(HangError::Ended { digest: *digest });
        }
    }
    Ok(())
}
