//! Samples of what is asked of a launcher's memory, and answered.

use muster_protocol::memory::parity::{Parity, Part, Stripe};
use muster_protocol::memory::{Answer, Ask, Entry, Name};

use super::digest;

names!(memory_ask_name, MEMORY_ASKS, Ask, {
    Ask::List => "list",
    Ask::Read { .. } => "read",
    Ask::Keep { .. } => "keep",
    Ask::Restored { .. } => "restored",
    Ask::Parities { .. } => "parities",
    Ask::Fold { .. } => "fold",
    Ask::Unfold { .. } => "unfold",
});

names!(memory_answer_name, MEMORY_ANSWERS, Answer, {
    Answer::Held { .. } => "held",
    Answer::Bytes => "bytes",
    Answer::Gone => "gone",
    Answer::Go => "go",
    Answer::Have => "have",
    Answer::NoRoom { .. } => "no_room",
    Answer::Refused { .. } => "refused",
    Answer::Kept => "kept",
    Answer::Damaged { .. } => "damaged",
    Answer::Heard => "heard",
    Answer::Parities { .. } => "parities",
    Answer::GoFrom { .. } => "go_from",
    Answer::Folded { .. } => "folded",
});

fn name() -> Name {
    Name {
        step: 400,
        generation: [5; 8],
        file: "n0-1.safetensors".into(),
    }
}

fn stripe(first: u8) -> Stripe {
    Stripe { of: 3, first }
}

pub fn memory_asks() -> Vec<Ask> {
    vec![
        Ask::List,
        Ask::Read {
            name: name(),
            at: 4 << 20,
            len: 4 << 20,
        },
        Ask::Keep {
            generation: digest(5),
            name: name(),
            bytes: 1 << 30,
        },
        Ask::Restored {
            rank: 3,
            step: 400,
            from: vec![("n2's memory".into(), 1 << 30), ("the store".into(), 0)],
            why: Some("n1's memory failed".into()),
        },
        Ask::Parities { above: 8 },
        Ask::Fold {
            generation: digest(5),
            name: name(),
            bytes: 1 << 30,
            local: 1,
            stripe: stripe(2),
            over: 3,
            who: "n0".into(),
        },
        Ask::Unfold {
            number: 9,
            part: 1,
            piece: 300,
            len: 4 << 20,
        },
    ]
}

pub fn memory_answers() -> Vec<Answer> {
    let held = Answer::Held {
        who: "n2".into(),
        pid: 4711,
        list: vec![Entry {
            name: name(),
            bytes: 1 << 30,
            fd: 12,
            base: 4096,
        }],
    };
    let part = |node: u8| Part {
        file: format!("n{node}-1.safetensors"),
        bytes: 1 << 30,
        stripe: stripe(node),
    };
    let parities = Answer::Parities {
        list: vec![Parity {
            number: 9,
            step: 400,
            generation: [5; 8],
            parts: vec![part(0), part(1)],
        }],
    };
    vec![
        held,
        Answer::Bytes,
        Answer::Gone,
        Answer::Go,
        Answer::Have,
        Answer::NoRoom { room: 1 << 20 },
        Answer::Refused {
            why: "that node is in another generation".into(),
        },
        Answer::Kept,
        Answer::Damaged { chunk: 7 },
        Answer::Heard,
        parities,
        Answer::GoFrom { piece: 300 },
        Answer::Folded { parts: 5 },
    ]
}
