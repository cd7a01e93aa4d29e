//! Every decoder that bytes from outside reach, behind one door: fuzzers and tests push bytes
//! through it and want nothing but an answer.

use std::fmt::Debug;

use muster_protocol::codec::{self, Deframer};
use muster_protocol::control::{Reason, decode_step};
use muster_protocol::job::Durable;
use muster_protocol::local::{Answer, Register, ToAgent, ToLauncher};
use muster_protocol::storelog::Entry;
use muster_protocol::wire::Message;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The names of the decoders, as [`decode`] takes them.
pub const DECODERS: [&str; 8] = [
    "message",
    "to_agent",
    "to_launcher",
    "register",
    "answer",
    "entry",
    "durable",
    "stream",
];

/// Decodes with the decoder of this name; says whether the bytes were a value.
///
/// # Panics
/// What was decoded does not encode again, or not to the same value.
pub fn decode(decoder: &str, bytes: &[u8]) -> bool {
    match decoder {
        "message" => again(Message::decode(bytes), Message::encode, Message::decode),
        "to_agent" => frame::<ToAgent>(bytes),
        "to_launcher" => frame::<ToLauncher>(bytes),
        "register" => frame::<Register>(bytes),
        "answer" => frame::<Answer>(bytes),
        "entry" => again(Entry::decode(bytes), Entry::encode, Entry::decode),
        "durable" => frame::<Durable>(bytes),
        "stream" => stream(bytes),
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
    all.extend(entries.iter().filter_map(|m| m.encode().ok()));
    all
}
