//! Every decoder that bytes from outside reach, behind one door: fuzzers and tests push bytes
//! through it and want nothing but an answer.

use std::fmt::Debug;

use muster_checkpoint::hex::Bytes;
use muster_checkpoint::inventory::Inventory;
use muster_checkpoint::manifest::Manifest;
use muster_checkpoint::part::{Draft, Note, Part};
use muster_checkpoint::shard::Header;
use muster_protocol::agent::Past;
use muster_protocol::codec::{self, Deframer};
use muster_protocol::control::{Reason, decode_step};
use muster_protocol::job::Durable;
use muster_protocol::local::{Answer, Register, ToAgent, ToLauncher};
use muster_protocol::memory;
use muster_protocol::storelog::Entry;
use muster_protocol::wire::Message;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The names of the decoders, as [`decode`] takes them.
pub const DECODERS: [&str; 16] = [
    "message",
    "to_agent",
    "to_launcher",
    "register",
    "answer",
    "entry",
    "durable",
    "past",
    "stream",
    "memory_ask",
    "memory_answer",
    "memory_text",
    "manifest",
    "header",
    "note",
    "part",
];

/// Decodes with the decoder of this name; says whether the bytes were a value.
///
/// # Panics
/// The decoded value does not encode again, or not to the same value.
pub fn decode(decoder: &str, bytes: &[u8]) -> bool {
    match decoder {
        "message" => again(Message::decode(bytes), Message::encode, Message::decode),
        "to_agent" => frame::<ToAgent>(bytes),
        "to_launcher" => frame::<ToLauncher>(bytes),
        "register" => frame::<Register>(bytes),
        "answer" => frame::<Answer>(bytes),
        "entry" => again(Entry::decode(bytes), Entry::encode, Entry::decode),
        "durable" => again(Durable::decode(bytes), Durable::encode, Durable::decode),
        "past" => again(Past::decode(bytes), Past::encode, Past::decode),
        "stream" => stream(bytes),
        "memory_ask" => frame::<memory::Ask>(bytes),
        "memory_answer" => frame::<memory::Answer>(bytes),
        "memory_text" => memory_text(bytes),
        "manifest" => again(Manifest::decode(bytes), Manifest::encode, Manifest::decode),
        "header" => header(bytes),
        "note" => again(Note::decode(bytes), Note::encode, Note::decode),
        "part" => again(Part::decode(bytes), Part::encode, Part::decode),
        _ => words(bytes),
    }
}

fn frame<T: Serialize + DeserializeOwned + Debug + PartialEq>(bytes: &[u8]) -> bool {
    let decode = |b: &[u8]| codec::decode_frame::<T>(b);
    again(decode(bytes), |v| codec::encode_frame(v), decode)
}

/// Whether there is a value; if so, it must encode, and come back the same.
fn again<T: Debug + PartialEq, D: Debug, E: Debug>(
    decoded: Result<T, D>,
    encode: impl Fn(&T) -> Result<Vec<u8>, E>,
    decode: impl Fn(&[u8]) -> Result<T, D>,
) -> bool {
    let Ok(value) = decoded else { return false };
    let back = encode(&value).map(|bytes| decode(&bytes));
    assert!(
        matches!(&back, Ok(Ok(same)) if *same == value),
        "{value:?} comes back as {back:?}"
    );
    true
}

/// Takes a stream apart, in pieces whose length the first byte says.
fn stream(bytes: &[u8]) -> bool {
    let (piece, rest) = bytes.split_first().unwrap_or((&1, &[]));
    let mut deframer = Deframer::default();
    for piece in rest.chunks(usize::from(*piece).max(1)) {
        deframer.push(piece);
        loop {
            match deframer.next_frame() {
                Ok(Some(frame)) => {
                    decode("message", frame);
                }
                Ok(None) => break,
                Err(_) => return false,
            }
        }
    }
    true
}

/// Decodes the texts about memory in a worker's environment and in a manifest.
fn memory_text(bytes: &[u8]) -> bool {
    let _port = memory::data_port(bytes);
    let text = String::from_utf8_lossy(bytes);
    let _name = memory::Name::of_path(&text);
    let whom = memory::Whom::decode(&text);
    let again = whom.as_ref().map(memory::Whom::encode);
    let again = again.and_then(|text| memory::Whom::decode(&text));
    assert_eq!(whom, again, "{text}");
    whom.is_some()
}

/// The head of a data file, which is taken for the whole file: what it says lies within it.
fn header(bytes: &[u8]) -> bool {
    let file = bytes.len() as u64;
    let Some((first, rest)) = bytes.split_first_chunk() else {
        return false;
    };
    let Ok(json) = Header::json_bytes(*first, file) else {
        return false;
    };
    // Not beyond the file, or it would have been refused.
    let (json, data) = rest.split_at(json as usize);
    let Ok(header) = Header::decode(json, data.len() as u64) else {
        return false;
    };
    for tensor in &header.tensors {
        let end = tensor.at.checked_add(tensor.bytes);
        assert!(end <= Some(file), "{tensor:?} of {file} bytes");
    }
    true
}

/// The words of a control page, which a worker may have overwritten.
fn words(bytes: &[u8]) -> bool {
    for word in bytes.chunks_exact(8) {
        let word = word.try_into().map_or(0, u64::from_le_bytes);
        let _step = decode_step(word);
        let _reason = Reason::decode(word);
    }
    true
}

/// Valid frames, to be damaged.
pub fn corpus() -> Vec<Vec<u8>> {
    let messages = crate::golden::messages();
    let to_agent = crate::golden::to_agent();
    let to_launcher = crate::golden::to_launcher();
    let entries = crate::golden::entries();
    let mut all: Vec<Vec<u8>> = messages.iter().filter_map(|m| m.encode().ok()).collect();
    all.extend(to_agent.iter().filter_map(|m| codec::encode_frame(m).ok()));
    all.extend(
        to_launcher
            .iter()
            .filter_map(|m| codec::encode_frame(m).ok()),
    );
    let asks = crate::golden::memory_asks();
    let answers = crate::golden::memory_answers();
    all.extend(asks.iter().filter_map(|m| codec::encode_frame(m).ok()));
    all.extend(answers.iter().filter_map(|m| codec::encode_frame(m).ok()));
    all.extend(entries.iter().filter_map(|m| m.encode().ok()));
    let stored = crate::golden::durables();
    all.extend(stored.iter().filter_map(|d| d.encode().ok()));
    all.extend(checkpoint());
    all
}

/// Samples from a store or a slot: a data file with its header, a manifest, and the note and the part
/// that it could have been made of.
fn checkpoint() -> Vec<Vec<u8>> {
    const FILE: &[u8] = include_bytes!(
        "../../runtime/checkpoint/tests/golden/v1/checkpoint/data/400-1-0/n0-0.safetensors"
    );
    const MANIFEST: &[u8] =
        include_bytes!("../../runtime/checkpoint/tests/golden/v1/manifest.json");
    let mut all = vec![FILE.to_vec(), MANIFEST.to_vec()];
    if let Ok(manifest) = Manifest::decode(MANIFEST) {
        let files = manifest.files.iter().map(|f| (f.path.clone(), f.bytes));
        let inventory = Inventory {
            samples: vec![Some(Bytes([3; 8])), None],
            ..Inventory::default()
        };
        let note = Note {
            file: Some("n0-0.safetensors".into()),
            blobs: manifest.blobs.clone(),
            draft: Some(Draft {
                saved_at: manifest.origin.saved_at,
                files: files.collect(),
                tensors: manifest.tensors.clone(),
                sampled: vec![0],
            }),
            inventory: Some(inventory.clone()),
        };
        let part = Part {
            file: manifest.files.first().cloned(),
            blobs: manifest.blobs.clone(),
            inventory: Some(inventory),
        };
        all.extend(note.encode().ok());
        all.extend(part.encode().ok());
    }
    all
}
