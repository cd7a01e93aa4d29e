//! Every decoder that bytes from outside reach, behind one door: fuzzers and tests push bytes
//! through it and want nothing but an answer.

use muster_protocol::codec::{self, Deframer};
use muster_protocol::control::{Reason, decode_step};
use muster_protocol::job::Durable;
use muster_protocol::local::{Answer, Register, ToAgent, ToLauncher};
use muster_protocol::storelog::Entry;
use muster_protocol::wire::Message;

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

/// Decodes with the decoder of this name; says whether the bytes were a value. Whatever was decoded
/// must encode again, to the same bytes where the encoding is canonical.
pub fn decode(decoder: &str, bytes: &[u8]) -> bool {
    match decoder {
        "message" => match Message::decode(bytes) {
            Ok(message) => message
                .encode()
                .is_ok_and(|b| Message::decode(&b) == Ok(message)),
            Err(_) => false,
        },
        "to_agent" => codec::decode_frame::<ToAgent>(bytes).is_ok(),
        "to_launcher" => codec::decode_frame::<ToLauncher>(bytes).is_ok(),
        "register" => codec::decode_frame::<Register>(bytes).is_ok(),
        "answer" => codec::decode_frame::<Answer>(bytes).is_ok(),
        "entry" => match Entry::decode(bytes) {
            Ok(entry) => entry.encode().is_ok(),
            Err(_) => false,
        },
        "durable" => Durable::decode(bytes).is_ok(),
        "stream" => stream(bytes),
        _ => words(bytes),
    }
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
