//! Samples of what is said about saves.

use muster_protocol::checkpoint::{
    Copy, Found, Outcome, Part, Save, SlotId, Stage, ToLeader, ToNode, Written,
};
use muster_protocol::local::{SaveAsk, SaveNews};
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

fn save() -> Save {
    Save {
        generation: digest(5),
        attempt: 3,
        step: 400,
    }
}

const SLOT: SlotId = SlotId { k: 1, side: 0 };

pub(super) fn news() -> Vec<SaveNews> {
    let (slot, attempt) = (SLOT, 3);
    let (save, manifest) = (save(), digest(7));
    let why = || String::from("no space left on device");
    let copy = Copy {
        generation: digest(5),
        step: 400,
        bytes: 1 << 30,
        digest: digest(8),
    };
    vec![
        SaveNews::Slots {
            k: 1,
            capacity: 1 << 30,
            found: [Found::Sealed(copy), Found::Filling { step: 500 }],
        },
        SaveNews::Filling { slot, step: 400 },
        SaveNews::Sealed { slot, copy },
        SaveNews::WorkerGone { k: 1 },
        SaveNews::Progress {
            slot,
            attempt,
            done: 1 << 20,
        },
        SaveNews::Written {
            slot,
            attempt,
            bytes: 1 << 30,
            summary: vec![0xa5; 32],
        },
        SaveNews::WriteFailed {
            slot,
            attempt,
            why: why(),
        },
        SaveNews::WriteStopped { slot, attempt },
        SaveNews::Held { manifest },
        SaveNews::HoldFailed {
            manifest,
            why: why(),
        },
        SaveNews::Assembled {
            save,
            manifest,
            bytes: 70_000,
        },
        SaveNews::AssembleFailed { save, why: why() },
    ]
}

pub(super) fn asks() -> Vec<SaveAsk> {
    let (slot, save) = (SLOT, save());
    vec![
        SaveAsk::Write { slot, save },
        SaveAsk::StopWrite { slot, attempt: 3 },
        SaveAsk::Free { slot },
        SaveAsk::Refuse { k: 1 },
        SaveAsk::Hold {
            manifest: digest(7),
            bytes: 70_000,
        },
        SaveAsk::Delete {
            name: save.folder(),
        },
        SaveAsk::Assemble {
            save,
            parts: vec![Written {
                rank: 0,
                bytes: 1 << 30,
                summary: vec![0xa5; 32],
            }],
            last: true,
        },
    ]
}
