//! A job's checkpoints in the memory of launchers: messages, who may ask, and where a copy goes.
//! Never trusts what comes: who asks has proven the job's [`Key`], every list has a limit, and whoever reads bytes
//! verifies them against a manifest.
//!
//! A launcher listens on a TCP port of its own, which its guard tells behind its answer ([`data_port`]). A connection
//! begins with a proof by both sides ([`proof`]), then goes question by question, each a frame as on the unix socket
//! ([`codec`](crate::codec), with its length). Behind each frame, and behind each run of bytes, is its [`Mark`]:
//!
//! ```text
//! caller    MAGIC, nonce
//! listener  nonce, proof
//! caller    proof
//! caller    Ask::List                 -> Answer::Held
//!           Ask::Read                 -> Answer::Bytes, then the bytes | Gone
//!           Ask::Keep                 -> Answer::Go | Have | NoRoom | Refused
//!             after Go: each chunk of the image, with its CRC-64/NVME behind it (u64 little-endian) -> Answer::Kept | Damaged
//!           Ask::Parities             -> Answer::Parities
//!           Ask::Fold                 -> Answer::GoFrom | Have | NoRoom | Refused
//!             after GoFrom: each chunk of the stripe from there on, as after Go -> Answer::Kept | Damaged
//!           Ask::Unfold               -> Answer::Folded, then the bytes | Gone
//!           Ask::Restored             -> Answer::Heard
//! ```

pub mod parity;
mod peers;
pub mod proof;

use serde::{Deserialize, Serialize};

use self::parity::{MAX_OVER, MAX_PARITIES, MAX_PARTS, MIN_OVER, Parity, Stripe};
pub use self::peers::{MAX_PEERS, Peer, Peers, Whom};
pub use self::proof::{Key, MAGIC, Mark, Marks, Meeting, Nonce, Side};
use crate::ids::Digest;

/// The environment variable by which a launcher tells its workers where to ask.
pub const MEMORY_ENV: &str = "MUSTER_MEMORY";

/// The most sources that a worker names, and bytes of what it calls one.
pub const MAX_FROM: usize = 256;
pub const MAX_SOURCE: usize = 4 * MAX_WHO;

/// Bytes of a file's name, and of a node's.
pub const MAX_FILE: usize = 128;
pub const MAX_WHO: usize = 64;

/// The most images that a launcher names.
pub const MAX_LIST: usize = 512;

/// The most bytes of one answer.
pub const MAX_READ: u32 = 64 << 20;

/// The longest image that is kept for a peer: a bound on what a length from the network may ask for.
pub const MAX_IMAGE: u64 = 1 << 40;

/// Bytes of a chunk, as in a manifest.
pub const CHUNK: u64 = 4 << 20;

/// The port behind a guard's answer (`MGRD`, a version, the launcher's id: 13 bytes), at which its launcher tells
/// what it holds. `None` where there is none, as with a launcher that has no store.
pub fn data_port(answer: &[u8]) -> Option<u16> {
    let rest = answer.strip_prefix(b"MGRD\x01")?;
    let (_launcher, port) = rest.split_first_chunk::<8>()?;
    let (port, _) = port.split_first_chunk::<2>()?;
    Some(u16::from_be_bytes(*port)).filter(|port| *port != 0)
}

/// An image, named as in a manifest but for the attempt: a rank saves a step once in a generation.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Name {
    pub step: u64,
    /// The first bytes of the digest of the generation that saved.
    pub generation: [u8; 8],
    /// In the save's folder.
    pub file: String,
}

impl Name {
    /// `None` for a name that no file of a save has.
    pub fn new(step: u64, generation: &Digest, file: &str) -> Option<Name> {
        let (short, _) = generation.0.split_first_chunk()?;
        let name = Name {
            step,
            generation: *short,
            file: file.to_owned(),
        };
        name.is_plain().then_some(name)
    }

    /// From a manifest's path: `data/<step>-<generation>-<attempt>/<file>`.
    pub fn of_path(path: &str) -> Option<Name> {
        let (folder, file) = path.strip_prefix("data/")?.split_once('/')?;
        let mut parts = folder.split('-');
        let (step, generation) = (parts.next()?, parts.next()?);
        let _attempt: u32 = parts.next()?.parse().ok()?;
        if parts.next().is_some() || generation.len() != 16 {
            return None;
        }
        let generation = Digest::from_hex(&format!("{generation:0<64}"))?;
        Name::new(step.parse().ok()?, &generation, file)
    }

    fn is_plain(&self) -> bool {
        let plain = |c: char| c.is_ascii_graphic() && c != '/';
        (1..=MAX_FILE).contains(&self.file.len()) && self.file.chars().all(plain)
    }
}

/// A question.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// List all that is here.
    List,
    /// These bytes of an image.
    Read { name: Name, at: u64, len: u32 },
    /// Hold this image of mine, of so many bytes, which the generation's ranks sealed.
    Keep {
        generation: Digest,
        name: Name,
        bytes: u64,
    },
    /// From a worker to its own launcher: what it restored, and how much of it came from where.
    Restored {
        rank: u32,
        step: u64,
        from: Vec<(String, u64)>,
        /// Why something did not come from where it was asked for first.
        why: Option<String>,
    },
    /// List the parity here whose number is above this one: as much of it as one answer names, the lowest numbers
    /// first.
    Parities { above: u64 },
    /// Add this stripe of an image of mine, of so many bytes, to those of other nodes: of the ranks of this local
    /// number.
    Fold {
        generation: Digest,
        name: Name,
        bytes: u64,
        local: u16,
        stripe: Stripe,
        /// Over how many nodes the sender wants parity: whoever takes it wants the same.
        over: u8,
        /// Name of the sender's node for people.
        who: String,
    },
    /// The first bytes of a piece of parity, if this part is in it; no bytes: which parts are in it alone.
    Unfold {
        number: u64,
        part: u8,
        piece: u32,
        len: u32,
    },
}

/// An image that is held.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Entry {
    pub name: Name,
    pub bytes: u64,
    /// The memfd in the launcher's process, and where the image begins in it: for workers of the same node.
    pub fd: i32,
    pub base: u64,
}

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    Held {
        /// Name of the node for people.
        who: String,
        pid: u32,
        list: Vec<Entry>,
    },
    /// As many as were asked for follow.
    Bytes,
    /// It is not here, or not any more.
    Gone,
    /// Send it.
    Go,
    /// It is here already.
    Have,
    /// There is no room for it now.
    NoRoom {
        room: u64,
    },
    /// Not from you, or not now; in words.
    Refused {
        why: String,
    },
    Kept,
    /// A chunk did not come as it was sealed.
    Damaged {
        chunk: u64,
    },
    Heard,
    Parities {
        list: Vec<Parity>,
    },
    /// Send it, from this piece on: those before are here.
    GoFrom {
        piece: u32,
    },
    /// Which parts are in the piece, the first one's bit the lowest. As many bytes as were asked for follow.
    Folded {
        parts: u32,
    },
}

/// More than may be said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0} is longer than may be said")]
pub struct TooMuch(&'static str);

impl Ask {
    /// Whether it keeps to the limits.
    ///
    /// # Errors
    /// It does not.
    pub fn check(&self) -> Result<(), TooMuch> {
        let fits = match self {
            Ask::List | Ask::Parities { .. } => true,
            Ask::Read { name, at, len } => name.is_plain() && *len <= MAX_READ && *at <= MAX_IMAGE,
            Ask::Keep { name, bytes, .. } => name.is_plain() && *bytes <= MAX_IMAGE,
            Ask::Fold {
                name,
                bytes,
                stripe,
                over,
                who,
                ..
            } => {
                let possible = name.is_plain() && *bytes <= MAX_IMAGE && stripe.is_possible();
                possible && (MIN_OVER..=MAX_OVER).contains(over) && who.len() <= MAX_WHO
            }
            Ask::Unfold { part, len, .. } => {
                usize::from(*part) < MAX_PARTS && u64::from(*len) <= CHUNK
            }
            Ask::Restored { from, why, .. } => {
                from.len() <= MAX_FROM
                    && from.iter().all(|(who, _)| who.len() <= MAX_SOURCE)
                    && why
                        .as_ref()
                        .is_none_or(|why| why.len() <= crate::local::MAX_REASON)
            }
        };
        fits.then_some(()).ok_or(TooMuch("a question"))
    }
}

impl Answer {
    /// Whether it keeps to the limits.
    ///
    /// # Errors
    /// It does not.
    pub fn check(&self) -> Result<(), TooMuch> {
        let fits = match self {
            Answer::Held { who, list, .. } => {
                let plain = |e: &Entry| e.name.is_plain() && e.bytes <= MAX_IMAGE;
                who.len() <= MAX_WHO && list.len() <= MAX_LIST && list.iter().all(plain)
            }
            Answer::Refused { why } => why.len() <= crate::local::MAX_REASON,
            Answer::Parities { list } => {
                list.len() <= MAX_PARITIES && list.iter().all(Parity::is_possible)
            }
            _ => true,
        };
        fits.then_some(()).ok_or(TooMuch("an answer"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_named_by_its_path() {
        let save = crate::checkpoint::Save {
            generation: Digest([0xab; 32]),
            attempt: 3,
            step: 70,
        };
        let name = Name::of_path(&format!("{}/n0-1.safetensors", save.folder()));
        assert_eq!(name, Name::new(70, &save.generation, "n0-1.safetensors"));
        assert!(name.is_some());
        for other in [
            "manifest/x",
            "data/70-abababababababab/n0",
            "data/70-abababababababab-1-1/n0",
            "data/70-abababababababab-1/a/b",
            "data/70-abababababababab-1/",
            "data/x-abababababababab-1/n0",
            "data/70-ab-1/n0",
            "data/70-äbababababababab-1/n0",
        ] {
            assert_eq!(Name::of_path(other), None, "{other}");
        }
    }

    #[test]
    fn a_guard_tells_the_port_behind_its_answer() {
        let mut answer = b"MGRD\x01launcher".to_vec();
        assert_eq!(data_port(&answer), None);
        answer.extend(4711u16.to_be_bytes());
        assert_eq!(data_port(&answer), Some(4711));
        assert_eq!(data_port(b"MGRD\x01launcher\0\0"), None);
        assert_eq!(data_port(b"MGRD\x02launcher\x01\x01"), None);
    }

    #[test]
    fn what_is_said_is_bounded() {
        let name = |file: &str| Name {
            step: 1,
            generation: [0; 8],
            file: file.into(),
        };
        let read = |name, len| Ask::Read { name, at: 0, len }.check().is_ok();
        assert!(read(name("n0"), MAX_READ));
        assert!(!read(name("n0"), MAX_READ + 1));
        assert!(!read(name("a/b"), 1));
        assert!(!read(name(""), 1));
        let entry = Entry {
            name: name(&"n".repeat(MAX_FILE)),
            bytes: u64::MAX >> 24,
            fd: i32::MAX,
            base: u64::MAX,
        };
        let held = |count: usize| Answer::Held {
            who: "n".repeat(MAX_WHO),
            pid: u32::MAX,
            list: vec![entry.clone(); count],
        };
        assert!(held(MAX_LIST).check().is_ok());
        assert!(crate::codec::encode_frame(&held(MAX_LIST)).is_ok());
        assert!(held(MAX_LIST + 1).check().is_err());
    }

    #[test]
    fn what_is_said_of_parity_is_bounded() {
        use super::parity::Part;
        let stripe = |of, first| Stripe { of, first };
        let fold_of = |bytes, stripe, over, who: usize| {
            let ask = Ask::Fold {
                generation: Digest([1; 32]),
                name: Name::new(1, &Digest([1; 32]), "n0").unwrap(),
                bytes,
                local: 0,
                stripe,
                over,
                who: "n".repeat(who),
            };
            ask.check().is_ok()
        };
        let fold = |bytes, stripe| fold_of(bytes, stripe, 2, MAX_WHO);
        assert!(fold(MAX_IMAGE, stripe(2, 1)));
        assert!(!fold_of(1, stripe(2, 1), 2, MAX_WHO + 1));
        assert!(!fold_of(1, stripe(2, 1), 1, 0) && !fold_of(1, stripe(2, 1), 9, 0));
        assert!(!fold(MAX_IMAGE + 1, stripe(2, 1)));
        for (of, first) in [(0, 0), (2, 2), (MAX_PARTS as u8 + 1, 0)] {
            assert!(!fold(1, stripe(of, first)));
        }
        let unfold = |part, len| {
            let ask = Ask::Unfold {
                number: u64::MAX,
                part,
                piece: u32::MAX,
                len,
            };
            ask.check().is_ok()
        };
        assert!(unfold(MAX_PARTS as u8 - 1, CHUNK as u32));
        assert!(!unfold(MAX_PARTS as u8, 1));
        assert!(!unfold(0, CHUNK as u32 + 1));
        let part = |file: &str| Part {
            file: file.into(),
            bytes: MAX_IMAGE,
            stripe: stripe(MAX_PARTS as u8, MAX_PARTS as u8 - 1),
        };
        let parities = |parities: usize, parts: usize, file: &str| Answer::Parities {
            list: vec![
                Parity {
                    number: u64::MAX,
                    step: u64::MAX,
                    generation: [255; 8],
                    parts: vec![part(file); parts],
                };
                parities
            ],
        };
        let longest = "n".repeat(MAX_FILE);
        let most = parities(MAX_PARITIES, MAX_PARTS, &longest);
        assert!(most.check().is_ok());
        assert!(crate::codec::encode_frame(&most).is_ok());
        assert!(
            parities(MAX_PARITIES + 1, 1, &longest).check().is_err()
                && parities(1, MAX_PARTS + 1, &longest).check().is_err()
                && parities(1, 1, "a/b").check().is_err()
                && parities(1, 1, &format!("{longest}n")).check().is_err()
        );
        let restored = |sources: usize| Ask::Restored {
            rank: u32::MAX,
            step: u64::MAX,
            from: vec![("n".repeat(MAX_SOURCE), u64::MAX); sources],
            why: None,
        };
        assert!(restored(MAX_FROM).check().is_ok());
        assert!(crate::codec::encode_frame(&restored(MAX_FROM)).is_ok());
        assert!(restored(MAX_FROM + 1).check().is_err());
    }
}
