//! The bytes between ranks: the handshake, cards, notices, and the head of a stream. All numbers are
//! little-endian, as the elements themselves are.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use super::error::Refusal;

#[cfg(target_endian = "big")]
compile_error!("elements travel as they are in memory, which must be little-endian");

const MAGIC: [u8; 8] = *b"MUSTERDP";
pub(super) const VERSION: u32 = 4;
pub(super) const HELLO_LEN: usize = 104;
pub(super) const CHALLENGE_LEN: usize = 80;
pub(super) const PROOF_LEN: usize = 32 + CARD_LEN;
pub(super) const VERDICT_LEN: usize = 16;
pub(super) const CARD_LEN: usize = 64;
pub(super) const NOTICE_LEN: usize = 16;
pub(super) const HEAD_LEN: usize = 48;

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

/// `N` bytes from `at`; zeros where there are none.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    for (to, from) in out.iter_mut().zip(bytes.iter().skip(at)) {
        *to = *from;
    }
    out
}

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub(super) enum Purpose {
    /// With rank 0, while the addresses are gathered.
    Rendezvous = 1,
    /// Notices, and the sign of life that an open connection is.
    Control,
    /// Elements.
    Data,
}

impl Purpose {
    fn from_code(code: u32) -> Option<Purpose> {
        [Purpose::Rendezvous, Purpose::Control, Purpose::Data]
            .into_iter()
            .find(|purpose| *purpose as u32 == code)
    }
}

/// The first bytes on a connection, from the rank that opened it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) version: u32,
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) world: u32,
    pub(super) purpose: Purpose,
    /// A number for the generation, from which its digest cannot be computed.
    pub(super) generation: [u8; 32],
    pub(super) nonce: [u8; 32],
}

impl Hello {
    pub(super) fn encode(&self) -> [u8; HELLO_LEN] {
        let mut out = [0; HELLO_LEN];
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&self.version.to_le_bytes());
        out[12..16].copy_from_slice(&self.from.to_le_bytes());
        out[16..20].copy_from_slice(&self.to.to_le_bytes());
        out[20..24].copy_from_slice(&self.world.to_le_bytes());
        out[24..28].copy_from_slice(&(self.purpose as u32).to_le_bytes());
        out[40..72].copy_from_slice(&self.generation);
        out[72..].copy_from_slice(&self.nonce);
        out
    }

    /// `None`: not one of ours, or bits set that this version keeps zero.
    pub(super) fn decode(bytes: &[u8; HELLO_LEN]) -> Option<Hello> {
        if bytes[..8] != MAGIC || bytes[28..40] != [0; 12] {
            return None;
        }
        Some(Hello {
            version: u32_at(bytes, 8),
            from: u32_at(bytes, 12),
            to: u32_at(bytes, 16),
            world: u32_at(bytes, 20),
            purpose: Purpose::from_code(u32_at(bytes, 24))?,
            generation: array(bytes, 40),
            nonce: array(bytes, 72),
        })
    }
}

/// The answer to a hello: a refusal, or the listener's own proof and a question.
pub(super) fn encode_challenge(
    refusal: Option<Refusal>,
    nonce: &[u8; 32],
    proof: &[u8; 32],
) -> [u8; CHALLENGE_LEN] {
    let mut out = [0; CHALLENGE_LEN];
    out[..VERDICT_LEN].copy_from_slice(&encode_verdict(refusal));
    out[16..48].copy_from_slice(nonce);
    out[48..].copy_from_slice(proof);
    out
}

/// A nonce and a proof.
pub(super) type Question = ([u8; 32], [u8; 32]);

/// The listener's nonce and proof. `None`: not one of ours.
pub(super) fn decode_challenge(bytes: &[u8; CHALLENGE_LEN]) -> Option<Result<Question, Refusal>> {
    let verdict = decode_verdict(&array(bytes, 0))?;
    Some(verdict.map(|()| (array(bytes, 16), array(bytes, 48))))
}

pub(super) fn encode_verdict(refusal: Option<Refusal>) -> [u8; VERDICT_LEN] {
    let mut out = [0; VERDICT_LEN];
    out[..8].copy_from_slice(&MAGIC);
    out[8..12].copy_from_slice(&refusal.map_or(0, Refusal::code).to_le_bytes());
    out
}

/// `None`: not one of ours. A code that is unknown here comes from another version.
pub(super) fn decode_verdict(bytes: &[u8; VERDICT_LEN]) -> Option<Result<(), Refusal>> {
    if bytes[..8] != MAGIC {
        return None;
    }
    Some(match u32_at(bytes, 8) {
        0 => Ok(()),
        code => Err(Refusal::from_code(code).unwrap_or(Refusal::Version)),
    })
}

/// A rank's card: where it listens, and what it can share memory with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Card {
    /// `None`: where the asker has reached it.
    pub(super) address: Option<SocketAddr>,
    /// Ranks with the same key share memory.
    pub(super) host: [u8; 32],
}

impl Card {
    pub(super) fn encode(&self) -> [u8; CARD_LEN] {
        let mut out = [0; CARD_LEN];
        if let Some(address) = self.address {
            let ip = match address.ip() {
                IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                IpAddr::V6(ip) => ip,
            };
            out[..16].copy_from_slice(&ip.octets());
            out[16..18].copy_from_slice(&address.port().to_le_bytes());
            out[18] = 1;
        }
        out[32..].copy_from_slice(&self.host);
        out
    }

    pub(super) fn decode(bytes: &[u8; CARD_LEN]) -> Option<Card> {
        let ip = Ipv6Addr::from(array::<16>(bytes, 0)).to_canonical();
        let address = match bytes[18] {
            0 => None,
            1 => Some(SocketAddr::new(ip, u16::from_le_bytes(array(bytes, 16)))),
            _ => return None,
        };
        Some(Card {
            address,
            host: array(bytes, 32),
        })
    }
}

/// Notices that a rank sends to all that it is connected to, when something is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// This rank was lost.
    Lost(u32),
    /// This rank was told to leave.
    Aborted(u32),
    /// The sender does not understand this rank.
    Protocol(u32),
    /// The sender's time for the operation is over, and it waits for this rank. It does not leave yet.
    Waits(u32),
    /// The sender gave up an operation of its device, which will not complete anywhere; the group
    /// goes on.
    GaveUp(u32),
}

impl Notice {
    pub(super) fn encode(self) -> [u8; NOTICE_LEN] {
        let (code, rank) = match self {
            Notice::Lost(rank) => (1u32, rank),
            Notice::Aborted(rank) => (2, rank),
            Notice::Protocol(rank) => (3, rank),
            Notice::Waits(rank) => (4, rank),
            Notice::GaveUp(rank) => (5, rank),
        };
        let mut out = [0; NOTICE_LEN];
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&code.to_le_bytes());
        out[12..].copy_from_slice(&rank.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &[u8; NOTICE_LEN], world: u32) -> Option<Notice> {
        let rank = u32_at(bytes, 12);
        if bytes[..8] != MAGIC || rank >= world {
            return None;
        }
        match u32_at(bytes, 8) {
            1 => Some(Notice::Lost(rank)),
            2 => Some(Notice::Aborted(rank)),
            3 => Some(Notice::Protocol(rank)),
            4 => Some(Notice::Waits(rank)),
            5 => Some(Notice::GaveUp(rank)),
            _ => None,
        }
    }
}

/// The operation that the bytes after it belong to. Ranks in step say the same head but for their word, so a
/// receiver compares it with its own: nothing else in it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    /// Counts a group's operations.
    pub(super) seq: u32,
    pub(super) kind: u8,
    pub(super) dtype: u8,
    pub(super) op: u8,
    pub(super) root: u32,
    /// Bytes of the whole operation.
    pub(super) len: u64,
    /// Which part of an operation that is done in parts.
    pub(super) part: u64,
    /// The rank's word to all beside its bytes; zero: none.
    pub(super) word: u64,
}

/// Bytes of a head in which ranks in step are alike.
const ALIKE: usize = 40;

impl Head {
    pub(super) fn encode(&self) -> [u8; HEAD_LEN] {
        let mut out = [0; HEAD_LEN];
        out[..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&self.seq.to_le_bytes());
        out[12] = self.kind;
        out[13] = self.dtype;
        out[14] = self.op;
        out[16..20].copy_from_slice(&self.root.to_le_bytes());
        out[24..32].copy_from_slice(&self.len.to_le_bytes());
        out[32..ALIKE].copy_from_slice(&self.part.to_le_bytes());
        out[ALIKE..].copy_from_slice(&self.word.to_le_bytes());
        out
    }

    /// The word of another rank's head.
    ///
    /// # Errors
    /// The first difference of that head from this one, which is taken as right.
    pub(super) fn word_of(own: &[u8; HEAD_LEN], got: &[u8; HEAD_LEN]) -> Result<u64, &'static str> {
        if own[..ALIKE] == got[..ALIKE] {
            Ok(u64::from_le_bytes(array(got, ALIKE)))
        } else if got[..8] != MAGIC {
            Err("an unknown frame")
        } else if own[8..24] != got[8..24] {
            Err("a frame of another operation")
        } else {
            Err("a payload of another size")
        }
    }
}

/// Equality that takes as long for a near miss as for a far one.
pub(super) fn same_secret(a: &[u8; 32], b: &[u8; 32]) -> bool {
    a.iter().zip(b).fold(0, |diff, (x, y)| diff | (x ^ y)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_way_there_and_back() {
        let hello = Hello {
            version: VERSION,
            from: 2,
            to: 0,
            world: 3,
            purpose: Purpose::Data,
            generation: [7; 32],
            nonce: [8; 32],
        };
        assert_eq!(Hello::decode(&hello.encode()), Some(hello));
        assert_eq!(Hello::decode(&[0; HELLO_LEN]), None);
        let challenge = encode_challenge(None, &[1; 32], &[2; 32]);
        assert_eq!(decode_challenge(&challenge), Some(Ok(([1; 32], [2; 32]))));
        for refusal in Refusal::ALL {
            let bytes = encode_challenge(Some(refusal), &[0; 32], &[0; 32]);
            assert_eq!(decode_challenge(&bytes), Some(Err(refusal)));
        }
        assert_eq!(decode_verdict(&[1; VERDICT_LEN]), None);
        for address in ["10.1.2.3:4", "[fe80::1]:65535"] {
            let card = Card {
                address: Some(address.parse().unwrap()),
                host: [3; 32],
            };
            assert_eq!(Card::decode(&card.encode()), Some(card));
        }
        assert_eq!(Card::decode(&[9; CARD_LEN]), None);
        for notice in [
            Notice::Lost(2),
            Notice::Aborted(0),
            Notice::Protocol(1),
            Notice::Waits(2),
            Notice::GaveUp(1),
        ] {
            assert_eq!(Notice::decode(&notice.encode(), 3), Some(notice));
        }
        assert_eq!(Notice::decode(&Notice::Lost(3).encode(), 3), None);
        assert!(same_secret(&[1; 32], &[1; 32]) && !same_secret(&[1; 32], &[2; 32]));
    }

    #[test]
    fn a_head_that_differs_is_explained() {
        let head = Head {
            seq: 1,
            kind: 2,
            dtype: 3,
            op: 4,
            root: 5,
            len: 6,
            part: 7,
            word: 8,
        };
        let own = head.encode();
        let other = |head: Head| Head::word_of(&own, &head.encode());
        assert_eq!(other(head), Ok(8));
        let word = u64::MAX;
        assert_eq!(other(Head { word, ..head }), Ok(word), "each has its own");
        assert_eq!(
            other(Head { seq: 2, ..head }),
            Err("a frame of another operation")
        );
        assert_eq!(
            other(Head { len: 2, ..head }),
            Err("a payload of another size")
        );
        assert_eq!(
            Head::word_of(&own, &[0xff; HEAD_LEN]),
            Err("an unknown frame")
        );
    }
}
