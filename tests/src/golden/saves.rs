//! Samples of what is said about saves.

use muster_protocol::checkpoint::{Outcome, Part, Save, Stage, ToLeader, ToNode, Written};
use muster_protocol::wire::JobMessage;

use super::digest;

pub(super) fn job_messages() -> Vec<JobMessage> {
    let stages = [
        Stage::Write,
        Stage::Hold {
            manifest: digest(7),
            bytes: 70_000,
        },
        Stage::Over(Outcome::Committed),
        Stage::Over(Outcome::Kept),
        Stage::Over(Outcome::Dropped),
    ];
    let parts = [
        Part::Idle,
        Part::Waiting { ranks: vec![2, 3] },
        Part::Writing {
            done: 1 << 20,
            bytes: 1 << 30,
        },
        Part::Prepared {
            files: vec![Written {
                rank: 2,
                bytes: 1 << 30,
                summary: vec![0xa5; 32],
            }],
        },
        Part::Holding {
            manifest: digest(7),
        },
        Part::Failed {
            why: "no space left on device".into(),
        },
        Part::Settled(Outcome::Committed),
    ];
    let save = |stage| {
        JobMessage::Save(ToNode {
            save: Save {
                generation: digest(5),
                attempt: 3,
                step: 400,
            },
            number: 2,
            keep: Some(300),
            stage,
        })
    };
    let answer = |part| {
        JobMessage::SaveAnswer(Box::new(ToLeader {
            generation: digest(5),
            attempt: 3,
            number: 2,
            sealed: vec![300, 400],
            busy: Some(500),
            part,
        }))
    };
    let stages = stages.into_iter().map(save);
    stages.chain(parts.into_iter().map(answer)).collect()
}
