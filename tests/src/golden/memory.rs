//! Samples of what is asked of a launcher's memory, and answered.

use muster_protocol::memory::{Answer, Ask, Entry, Name};

use super::digest;

names!(memory_ask_name, MEMORY_ASKS, Ask, {
    Ask::List => "list",
    Ask::Read { .. } => "read",
    Ask::Keep { .. } => "keep",
    Ask::Restored { .. } => "restored",
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
});

fn name() -> Name {
    Name {
        step: 400,
        generation: [5; 8],
        file: "n0-1.safetensors".into(),
    }
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
    ]
}
