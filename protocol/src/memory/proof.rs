//! Proof of the right to ask a launcher, and that nothing of what is said is changed on the way.
//!
//! Both sides prove the job's [`Key`] over a [`Meeting`]: who was meant to be called, and a number that each drew. So
//! a proof is of no use in another connection, of no use as the other side's, and of no use for another launcher:
//! whoever sits at the address of one that is gone cannot pass for it by asking one that lives. The listener proves
//! first, so that nobody gets a proof out of a caller. The address is no part of it: behind a NAT the two sides see
//! different ones.
//!
//! From the same come the keys of the [`Marks`]: who stands between the two can read what they say, and can end it, but
//! cannot change, repeat, leave out or add anything.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{Digest, LauncherId};

/// The first bytes of a connection.
pub const MAGIC: [u8; 8] = *b"MUSTERM2";

/// Drawn by each side for one connection.
pub type Nonce = [u8; 32];

/// Behind everything that is sent ([`Marks`]), and a proof.
pub type Mark = [u8; 32];

/// A secret that only a job's launchers and workers know: the agents of its cluster make it of the cluster's secret.
/// Never shown.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Key([u8; 32]);

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// The side that proves or sends something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Caller,
    Listener,
}

/// One connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meeting {
    pub caller: Nonce,
    pub listener: Nonce,
    /// The launcher that the caller means to call, and that the listener is.
    pub launcher: LauncherId,
}

impl Key {
    /// A cluster's, from its secret. Without a secret agents are on loopback, or told to trust the network.
    pub fn of_cluster(secret: Option<&[u8]>) -> Key {
        match secret {
            Some(secret) => Key(blake3::derive_key("muster 2026 memory: cluster", secret)),
            None => Key::default(),
        }
    }

    /// A job's, of its cluster's.
    pub fn of_job(self, lineage: Digest) -> Key {
        let mut hash = blake3::Hasher::new_keyed(&self.0);
        hash.update(b"job");
        hash.update(&lineage.0);
        Key(*hash.finalize().as_bytes())
    }

    fn of_meeting(&self, what: &[u8; 6], side: Side, meeting: &Meeting) -> [u8; 32] {
        let mut hash = blake3::Hasher::new_keyed(&self.0);
        hash.update(&MAGIC);
        hash.update(what);
        hash.update(match side {
            Side::Caller => b"caller",
            Side::Listener => b"listen",
        });
        hash.update(&meeting.caller);
        hash.update(&meeting.listener);
        hash.update(&meeting.launcher.0);
        *hash.finalize().as_bytes()
    }

    /// A mark that shows to the other side that this one knows the key, and which launcher it means.
    pub fn proof(&self, side: Side, meeting: &Meeting) -> Mark {
        self.of_meeting(b"proof ", side, meeting)
    }

    /// Whether the other side has shown it. Takes as long whatever it sent.
    pub fn is_proven(&self, side: Side, meeting: &Meeting, proof: Mark) -> bool {
        is_same(self.proof(side, meeting), proof)
    }

    /// Those of what this side sends.
    pub fn marks(&self, side: Side, meeting: &Meeting) -> Marks {
        Marks {
            key: self.of_meeting(b"stream", side, meeting),
            next: 0,
        }
    }

    pub(super) fn hex(&self) -> String {
        Digest(self.0).hex()
    }

    pub(super) fn from_hex(text: &str) -> Option<Key> {
        Digest::from_hex(text).map(|digest| Key(digest.0))
    }
}

/// Marks what one side sends, one piece after the other.
#[derive(Clone)]
pub struct Marks {
    key: [u8; 32],
    next: u64,
}

impl fmt::Debug for Marks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Marks({}..)", self.next)
    }
}

impl Marks {
    /// The mark of the next piece, which is these bytes one behind the other.
    pub fn of(&mut self, piece: &[&[u8]]) -> Mark {
        let mut hash = blake3::Hasher::new_keyed(&self.key);
        hash.update(&self.next.to_le_bytes());
        self.next += 1;
        for bytes in piece {
            hash.update(bytes);
        }
        *hash.finalize().as_bytes()
    }

    /// Whether this piece with this mark is the next one. Takes as long whatever it is.
    pub fn is_next(&mut self, piece: &[&[u8]], mark: Mark) -> bool {
        is_same(self.of(piece), mark)
    }
}

/// [`blake3::Hash`] compares in constant time.
fn is_same(a: Mark, b: Mark) -> bool {
    blake3::Hash::from_bytes(a) == blake3::Hash::from_bytes(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEETING: Meeting = Meeting {
        caller: [3; 32],
        listener: [4; 32],
        launcher: LauncherId([5; 8]),
    };

    fn key() -> Key {
        Key::of_cluster(Some(b"secret")).of_job(Digest([1; 32]))
    }

    #[test]
    fn a_key_is_proven_by_each_side_to_one_launcher_for_one_connection() {
        let proof = key().proof(Side::Caller, &MEETING);
        assert!(key().is_proven(Side::Caller, &MEETING, proof));
        assert!(!key().is_proven(Side::Listener, &MEETING, proof));
        let job = Key::of_cluster(Some(b"secret")).of_job(Digest([2; 32]));
        let cluster = Key::of_cluster(Some(b"other")).of_job(Digest([1; 32]));
        for other in [job, cluster] {
            assert!(!other.is_proven(Side::Caller, &MEETING, proof));
        }
        let (caller, listener) = (MEETING.listener, MEETING.caller);
        for other in [
            Meeting { caller, ..MEETING },
            Meeting {
                listener,
                ..MEETING
            },
            Meeting {
                caller,
                listener,
                ..MEETING
            },
            Meeting {
                launcher: LauncherId([6; 8]),
                ..MEETING
            },
        ] {
            assert!(!key().is_proven(Side::Caller, &other, proof), "{other:?}");
        }
        assert_eq!(format!("{:?}", key()), "Key(..)");
    }

    #[test]
    fn a_piece_that_is_changed_moved_or_turned_back_has_no_mark() {
        let (mut sends, mut hears) = (
            key().marks(Side::Caller, &MEETING),
            key().marks(Side::Caller, &MEETING),
        );
        let marks = [b"one", b"two"].map(|piece| sends.of(&[piece]));
        // Left out, and repeated.
        assert!(!hears.clone().is_next(&[b"two"], marks[1]));
        assert!(hears.is_next(&[b"o", b"ne"], marks[0]));
        assert!(!hears.clone().is_next(&[b"one"], marks[0]));
        assert!(!hears.clone().is_next(&[b"twp"], marks[1]));
        assert!(hears.is_next(&[b"two"], marks[1]));
        // Said back to who said it, and in another connection.
        let back = key().marks(Side::Listener, &MEETING).of(&[b"one"]);
        assert_ne!(back, marks[0]);
        let launcher = LauncherId([6; 8]);
        let other = key()
            .marks(
                Side::Caller,
                &Meeting {
                    launcher,
                    ..MEETING
                },
            )
            .of(&[b"one"]);
        assert_ne!(other, marks[0]);
        assert_ne!(key().proof(Side::Caller, &MEETING), sends.key);
    }
}
