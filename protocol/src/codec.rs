//! The one place where values become bytes and bytes become values.
//!
//! Decoding is total: no input panics, and none makes the decoder allocate more than the limit
//! that the caller names. A frame is
//!
//! ```text
//! length  u32 little-endian, of what follows   (streams only)
//! version u8                                   (the sender's wire version)
//! body    bincode 2, little-endian, variable-length integers
//! ```

use bincode::config::{self, Configuration, Limit, LittleEndian, Varint};
use serde::{Serialize, de::DeserializeOwned};

/// The version of every message that this build sends. A reader refuses any other by name.
pub const WIRE_VERSION: u8 = 13;

/// The version of what an agent stores. Frames of wire version 1 were stored before there was one:
/// their first byte is 1.
pub const STORED_VERSION: u8 = 5;

/// The one before, which is still read: an upgrade of the agent keeps its jobs.
const STORED_BEFORE: u8 = 4;

/// The most bytes of one frame, version byte included. Control messages are small; the bound is
/// set by a record with 1,024 members.
pub const MAX_FRAME: usize = 128 * 1024;

/// The most bytes of what an agent stores of one job. Two of the largest records are in it: the
/// generation, and the vote on the next one.
pub const MAX_STORED: usize = 1 << 20;

/// The most memory that the decoder of what is stored may ask for. It counts values as they are in
/// memory, where a number of one byte takes eight: whatever could be stored can be read.
const MAX_DECODED: usize = 8 * MAX_STORED;

/// Why bytes could not become a value, or a value bytes. Nothing has changed in either case.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    #[error("the frame is empty")]
    Empty,
    #[error("the frame has {len} bytes, the limit is {MAX_FRAME}")]
    TooLong { len: usize },
    #[error("what is to be stored has {len} bytes, the limit is {MAX_STORED}")]
    StoredTooLong { len: usize },
    #[error("it was stored in format {theirs}, this build reads format {STORED_VERSION}")]
    StoredVersion { theirs: u8 },
    #[error(
        "the peer speaks wire version {theirs}, this build speaks {WIRE_VERSION}: run the same Muster version on every node"
    )]
    Version { theirs: u8 },
    #[error("{extra} bytes are left over behind the message")]
    Trailing { extra: usize },
    #[error("the bytes are not a message: {0}")]
    Malformed(String),
}

fn configuration<const MOST: usize>() -> Configuration<LittleEndian, Varint, Limit<MOST>> {
    config::standard().with_limit::<MOST>()
}

fn encode_within<const MOST: usize, T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
    bincode::serde::encode_to_vec(value, configuration::<MOST>())
        .map_err(|e| CodecError::Malformed(e.to_string()))
}

fn decode_within<const MOST: usize, T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    let (value, used) = bincode::serde::decode_from_slice(bytes, configuration::<MOST>())
        .map_err(|e| CodecError::Malformed(e.to_string()))?;
    if used != bytes.len() {
        return Err(CodecError::Trailing {
            extra: bytes.len() - used,
        });
    }
    Ok(value)
}

/// The canonical encoding of a value: what digests are taken over.
pub fn encode_body<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
    let bytes = encode_within::<MAX_FRAME, T>(value)?;
    if bytes.len() >= MAX_FRAME {
        return Err(CodecError::TooLong { len: bytes.len() });
    }
    Ok(bytes)
}

/// The inverse of [`encode_body`]; every byte must belong to the value.
pub fn decode_body<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    if bytes.len() >= MAX_FRAME {
        return Err(CodecError::TooLong { len: bytes.len() });
    }
    decode_within::<MAX_FRAME, T>(bytes)
}

/// Encodes a value for the disk: a version of its own, and a wider limit than that of a frame.
pub fn encode_stored<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
    let mut bytes = vec![STORED_VERSION];
    bytes.extend(encode_within::<MAX_STORED, T>(value)?);
    if bytes.len() > MAX_STORED {
        return Err(CodecError::StoredTooLong { len: bytes.len() });
    }
    Ok(bytes)
}

/// The inverse of [`encode_stored`]. `since` stands for the fields that the format before did not have, the last ones
/// of `T`.
pub fn decode_stored<T: DeserializeOwned>(bytes: &[u8], since: &[u8]) -> Result<T, CodecError> {
    match bytes.split_first() {
        _ if bytes.len() > MAX_STORED => Err(CodecError::StoredTooLong { len: bytes.len() }),
        None => Err(CodecError::Empty),
        Some((&STORED_VERSION, body)) => decode_within::<MAX_DECODED, T>(body),
        Some((&STORED_BEFORE, body)) => decode_within::<MAX_DECODED, T>(&[body, since].concat()),
        Some((&theirs, _)) => Err(CodecError::StoredVersion { theirs }),
    }
}

/// A frame without its length: the version byte and the body.
pub fn encode_frame<T: Serialize>(value: &T) -> Result<Vec<u8>, CodecError> {
    let mut frame = vec![WIRE_VERSION];
    frame.extend(encode_body(value)?);
    Ok(frame)
}

/// The inverse of [`encode_frame`].
pub fn decode_frame<T: DeserializeOwned>(frame: &[u8]) -> Result<T, CodecError> {
    match frame.split_first() {
        None => Err(CodecError::Empty),
        Some((&WIRE_VERSION, body)) => decode_body(body),
        Some((&theirs, _)) => Err(CodecError::Version { theirs }),
    }
}

/// Takes a stream of bytes apart into frames. Never holds more than one frame and one read.
#[derive(Debug, Default)]
pub struct Deframer {
    buffer: Vec<u8>,
    start: usize,
}

impl Deframer {
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole frame (version byte and body), or `None` until more bytes arrive. After an
    /// error the stream is out of step and must be closed.
    pub fn next_frame(&mut self) -> Result<Option<&[u8]>, CodecError> {
        let rest = &self.buffer[self.start..];
        let Some((head, tail)) = rest.split_first_chunk::<4>() else {
            return Ok(None);
        };
        let len = u32::from_le_bytes(*head) as usize;
        if len > MAX_FRAME {
            return Err(CodecError::TooLong { len });
        }
        if tail.len() < len {
            return Ok(None);
        }
        let from = self.start + 4;
        self.start = from + len;
        Ok(Some(&self.buffer[from..from + len]))
    }
}

/// Puts the length in front of a frame, for a stream.
pub fn with_length(frame: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(frame.len() + 4);
    // A frame is at most MAX_FRAME bytes, so its length fits.
    out.extend_from_slice(&(frame.len() as u32).to_le_bytes());
    out.extend_from_slice(frame);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_taken_apart_wherever_it_is_cut() {
        let frames: Vec<Vec<u8>> = (0..5u8)
            .map(|n| encode_frame(&vec![n; n as usize * 7]).unwrap_or_default())
            .collect();
        let stream: Vec<u8> = frames.iter().flat_map(|f| with_length(f)).collect();
        for cut in 1..stream.len() {
            let mut deframer = Deframer::default();
            let mut seen = Vec::new();
            for piece in stream.chunks(cut) {
                deframer.push(piece);
                while let Ok(Some(frame)) = deframer.next_frame() {
                    seen.push(frame.to_vec());
                }
            }
            assert_eq!(seen, frames);
        }
    }

    #[test]
    fn a_length_that_lies_is_refused_before_anything_is_allocated() {
        let mut deframer = Deframer::default();
        deframer.push(&u32::MAX.to_le_bytes());
        assert_eq!(
            deframer.next_frame(),
            Err(CodecError::TooLong {
                len: u32::MAX as usize
            })
        );
        // A vector that claims 2^60 elements in ten bytes.
        let lie = [WIRE_VERSION, 253, 0, 0, 0, 0, 0, 0, 0, 16];
        assert!(decode_frame::<Vec<u64>>(&lie).is_err());
    }

    #[test]
    fn another_version_is_refused_by_name() {
        let Err(error) = decode_frame::<u8>(&[250, 1]) else {
            unreachable!("version 250 must be refused")
        };
        assert!(error.to_string().contains("version 250"));
        assert_eq!(decode_frame::<u8>(&[]), Err(CodecError::Empty));
        assert_eq!(
            decode_frame::<u8>(&[WIRE_VERSION, 1, 2]),
            Err(CodecError::Trailing { extra: 1 })
        );
    }
}
