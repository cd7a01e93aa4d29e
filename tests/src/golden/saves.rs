//! Samples of what is said about saves.

use muster_protocol::NodeId;
use muster_protocol::checkpoint::{
    Busy, Copy, Ended, Found, Outcome, Pace, Part, Save, SlotId, Stage, Standing, State, ToLeader,
    ToNode, Written,
};
use muster_protocol::local::{KeepNews, Left, Question, Replicated, Review, SaveAsk, SaveNews};
use muster_protocol::record::CommitRef;
use muster_protocol::spec::Triggers;
use muster_protocol::storelog::Rules;
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
            ended: Some(Ended {
                rank: 3,
                newest: Some(400),
                beside: Some(500),
            }),
            part,
        }))
    };
    let stages = stages.into_iter().map(save);
    let said = [
        JobMessage::Verified { digest: digest(5) },
        JobMessage::SaveSaid {
            digest: digest(5),
            text: "a fresh save fits".into(),
        },
        JobMessage::SaveGivenUp {
            save: Save {
                generation: digest(5),
                attempt: 3,
                step: 400,
            },
            why: "node n2 was lost".into(),
            show: true,
        },
        JobMessage::LookAgain {
            digest: digest(5),
            question: question(),
        },
        JobMessage::LooksAgain {
            digest: digest(5),
            number: 77,
            read: 1 << 30,
        },
        JobMessage::LookedAgain {
            digest: digest(5),
            number: 77,
            state: State::Damaged {
                why: "n0-0.safetensors is not there".into(),
            },
        },
        JobMessage::Unfit {
            digest: digest(5),
            text: "this node is of no use to the job".into(),
        },
        JobMessage::Held {
            digest: digest(5),
            ms: 1_500,
            nodes: vec![(NodeId([7; 32]), 1_500)],
        },
    ];
    let answers = parts.into_iter().map(answer);
    stages.chain(answers).chain(said).collect()
}

fn question() -> Question {
    Question {
        number: 77,
        manifest: digest(7),
        why: "n0-0.safetensors is not there".into(),
        all: true,
    }
}

pub(super) fn pace() -> Pace {
    Pace {
        bytes: 1 << 30,
        copied_us: 60_000,
        stall_us: 61_000,
        written: 1 << 30,
        write_us: 500_000,
    }
}

pub(super) fn rules() -> Rules {
    Rules {
        last: 10,
        best: 2,
        metric: "loss".into(),
        highest: false,
    }
}

pub(super) fn triggers() -> Triggers {
    Triggers {
        steps: 1_000,
        every_ms: 600_000,
        overhead_ppm: 0,
        busy: Busy::Skip,
    }
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
        SaveNews::SlotsGone { k: 1 },
        SaveNews::WorkerGone { k: 1 },
        SaveNews::WorkerEnded {
            generation: digest(5),
            k: 1,
        },
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
        SaveNews::At {
            digest: digest(5),
            step: 401,
            step_us: 20_000,
        },
        SaveNews::Copied {
            k: 1,
            step: 400,
            bytes: 1 << 30,
            copied_us: 60_000,
            waited_us: 1_000,
        },
        SaveNews::Waits { k: 1, step: 500 },
        SaveNews::Loaded { digest: digest(5) },
        SaveNews::Keep(KeepNews::Place {
            store: "/mnt/shared/checkpoints".into(),
        }),
        SaveNews::Keep(KeepNews::Looked {
            round: 2,
            seq: 9,
            needs: vec![save.folder(), format!("manifest/{}.json", manifest.hex())],
            state: State::Unchecked,
            gone: false,
        }),
        SaveNews::Keep(KeepNews::Decided {
            round: 2,
            retire: vec![3],
            left: vec![Left {
                name: save.folder(),
                generation: [5; 8],
            }],
            last: true,
        }),
        SaveNews::Keep(KeepNews::Failed {
            round: 2,
            why: why(),
        }),
        SaveNews::Keep(KeepNews::Checked {
            seq: 9,
            manifest,
            state: State::Damaged { why: why() },
        }),
        SaveNews::Keep(KeepNews::LookedAgain {
            number: 77,
            state: State::Unreadable { why: why() },
        }),
        SaveNews::Keep(KeepNews::LooksAgain {
            number: 77,
            read: 1 << 30,
        }),
        SaveNews::Keep(KeepNews::Rules(rules())),
        SaveNews::Replicas(Replicated {
            behind: 3,
            missed: 70_000,
            whole: Some(400),
        }),
    ]
}

pub(super) fn asks() -> Vec<SaveAsk> {
    let (slot, save) = (SLOT, save());
    vec![
        SaveAsk::Write { slot, save },
        SaveAsk::StopWrite { slot, attempt: 3 },
        SaveAsk::Free { slot },
        SaveAsk::Committed {
            generation: digest(5),
            step: 400,
        },
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
        SaveAsk::Skip { k: 1, step: 500 },
        SaveAsk::Go { digest: digest(5) },
        SaveAsk::Tell {
            text: "rank 3 has no free slot".into(),
        },
        SaveAsk::Review(Review {
            round: 2,
            generation: digest(5),
            commits: vec![Standing {
                seq: 9,
                commit: CommitRef {
                    generation: digest(5),
                    number: 4,
                    step: 400,
                    manifest: digest(7),
                },
                pinned: true,
                retired: false,
                rejected: false,
                in_use: true,
                verified: false,
            }],
            last: true,
        }),
        SaveAsk::LookAgain(question()),
        SaveAsk::Inherit { k: 1 },
    ]
}
