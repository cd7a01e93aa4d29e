//! Samples of what is said about ranks that stand still, and about checkpoints by order.

use muster_protocol::barrier::Held;
use muster_protocol::control::Reason;
use muster_protocol::hang::{Doing, Evidence, Hang, Named, Point, Standing};
use muster_protocol::wire::{CheckpointStage, CheckpointState, JobMessage, Saved, Unable};

use super::{digest, node};

pub(super) fn job_messages() -> Vec<JobMessage> {
    vec![
        JobMessage::Look {
            digest: digest(5),
            number: 2,
        },
        JobMessage::Standings {
            digest: digest(5),
            number: 2,
            list: vec![standing()],
        },
        JobMessage::Hang {
            digest: digest(5),
            number: 3,
            hang: Some(Box::new(Hang {
                ranks: vec![Named {
                    node: node(2),
                    rank: 3,
                }],
                evidence: Evidence::Operation,
                step: 400,
                idle_ms: 61_000,
                waiting: 7,
                silent: vec![node(3)],
            })),
        },
        JobMessage::Hang {
            digest: digest(5),
            number: 4,
            hang: None,
        },
        JobMessage::CheckpointAsk {
            digest: digest(5),
            ask: 7,
        },
        JobMessage::CancelAsk {
            lineage: digest(5),
            ago_ms: 1_200,
        },
        JobMessage::CancelUnable {
            lineage: digest(5),
            why: Unable::Newer,
        },
        JobMessage::CancelUnable {
            lineage: digest(5),
            why: Unable::Misses {
                nodes: vec![node(2), node(3)],
            },
        },
        checkpoint(CheckpointStage::Agreeing),
        checkpoint(CheckpointStage::Saving { step: 400 }),
        checkpoint(CheckpointStage::Done { step: 400 }),
        checkpoint(CheckpointStage::Failed {
            why: "the job is about to stop".into(),
        }),
        checkpoint(CheckpointStage::Waiting {
            why: "not every worker has attached the runtime: n2".into(),
        }),
    ]
}

pub(super) fn held() -> Held {
    Held {
        barrier: 2,
        step: 400,
        reason: Reason::Checkpoint,
        confirmed: true,
    }
}

pub(super) fn saved() -> Saved {
    Saved {
        step: 400,
        ranks: vec![2, 3],
        all: true,
        failed: Some("rank 4 could not save: there is room for 77 bytes".into()),
    }
}

fn checkpoint(stage: CheckpointStage) -> JobMessage {
    JobMessage::Checkpoint {
        ask: 7,
        state: CheckpointState {
            stage,
            saved: vec![2, 3],
            world: 4,
        },
    }
}

pub(super) fn standing() -> Standing {
    Standing {
        stalled: true,
        rank: 3,
        point: Point {
            step: 400,
            operation: 17,
        },
        idle_ms: 61_000,
        doing: Doing {
            state: b'S',
            call: Some(202),
        },
    }
}
