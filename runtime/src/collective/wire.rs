//! The bytes between ranks: a hello, its answer, and frames. All numbers are little-endian.

use super::error::Refusal;

const MAGIC: [u8; 8] = *b"MUSTERDP";
pub(super) const VERSION: u32 = 1;
pub(super) const HELLO_LEN: usize = 56;
pub(super) const ANSWER_LEN: usize = 16;
pub(super) const HEADER_LEN: usize = 16;

/// Bytes that one frame carries at most.
pub const MAX_PAYLOAD: usize = 64 << 20;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut four = [0; 4];
    for (to, from) in four.iter_mut().zip(bytes.iter().skip(at)) {
        *to = *from;
    }
    u32::from_le_bytes(four)
}

/// The first bytes on a connection, from the joining rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) version: u32,
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) token: [u8; 32],
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_LEN] {
        let mut out = [0; HELLO_LEN];
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&self.version.to_le_bytes());
        out[12..16].copy_from_slice(&self.rank.to_le_bytes());
        out[16..20].copy_from_slice(&self.world.to_le_bytes());
        out[24..].copy_from_slice(&self.token);
        out
    }

    /// `None`: not one of ours, or bits set that this version keeps zero.
    pub(super) fn decode(bytes: &[u8; HELLO_LEN]) -> Option<Hello> {
        if bytes[..8] != MAGIC || u32_at(bytes, 20) != 0 {
            return None;
        }
        let mut token = [0; 32];
        token.copy_from_slice(&bytes[24..]);
        Some(Hello {
            version: u32_at(bytes, 8),
            rank: u32_at(bytes, 12),
            world: u32_at(bytes, 16),
            token,
        })
    }
}

pub(super) fn encode_answer(refusal: Option<Refusal>) -> [u8; ANSWER_LEN] {
    let mut out = [0; ANSWER_LEN];
    out[..8].copy_from_slice(&MAGIC);
    out[8..12].copy_from_slice(&refusal.map_or(0, Refusal::code).to_le_bytes());
    out
}

/// `None`: not one of ours. A code that is unknown here comes from another version.
pub(super) fn decode_answer(bytes: &[u8; ANSWER_LEN]) -> Option<Result<(), Refusal>> {
    if bytes[..8] != MAGIC {
        return None;
    }
    Some(match u32_at(bytes, 8) {
        0 => Ok(()),
        code => Err(Refusal::from_code(code).unwrap_or(Refusal::Version)),
    })
}

/// What a frame belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    SumF32,
    SumF64,
    Broadcast,
    Barrier,
    Gather,
    /// From rank 0 alone: the group is over, because of the rank in `arg`.
    Abort,
}

impl Kind {
    const ALL: [Kind; 6] = [
        Kind::SumF32,
        Kind::SumF64,
        Kind::Broadcast,
        Kind::Barrier,
        Kind::Gather,
        Kind::Abort,
    ];
}

/// Before each payload. `seq` counts a group's operations, so that ranks that lost step are told
/// apart from ranks that are in step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) seq: u32,
    pub(super) len: u32,
    pub(super) arg: u32,
}

impl Header {
    pub(super) fn encode(&self) -> [u8; HEADER_LEN] {
        let mut out = [0; HEADER_LEN];
        out[..4].copy_from_slice(&(self.kind as u32).to_le_bytes());
        out[4..8].copy_from_slice(&self.seq.to_le_bytes());
        out[8..12].copy_from_slice(&self.len.to_le_bytes());
        out[12..].copy_from_slice(&self.arg.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8; HEADER_LEN]) -> Option<Header> {
        let kind = Kind::ALL
            .into_iter()
            .find(|kind| *kind as u32 == u32_at(bytes, 0))?;
        Some(Header {
            kind,
            seq: u32_at(bytes, 4),
            len: u32_at(bytes, 8),
            arg: u32_at(bytes, 12),
        })
    }
}

/// Equality that takes as long for a near miss as for a far one.
pub(super) fn same_token(a: &[u8; 32], b: &[u8; 32]) -> bool {
    a.iter().zip(b).fold(0, |diff, (x, y)| diff | (x ^ y)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_way_there_and_back() {
        let hello = Hello {
            version: 1,
            rank: 2,
            world: 3,
            token: [7; 32],
        };
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        assert_eq!(Hello::decode(&[0; HELLO_LEN]), None);
        for kind in Kind::ALL {
            let header = Header {
                kind,
                seq: 9,
                len: 10,
                arg: 11,
            };
            assert_eq!(Header::decode(&header.encode()), Some(header));
        }
        assert_eq!(Header::decode(&[0xff; HEADER_LEN]), None);
        assert_eq!(decode_answer(&encode_answer(None)), Some(Ok(())));
        for refusal in [
            Refusal::Version,
            Refusal::Token,
            Refusal::World,
            Refusal::Rank,
        ] {
            assert_eq!(
                decode_answer(&encode_answer(Some(refusal))),
                Some(Err(refusal))
            );
        }
        assert_eq!(decode_answer(&[1; ANSWER_LEN]), None);
        assert!(same_token(&[1; 32], &[1; 32]) && !same_token(&[1; 32], &[2; 32]));
    }
}
