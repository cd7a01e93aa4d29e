//! Names of things: nodes, state directories, launchers, records, jobs, stores.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! bytes_id {
    ($(#[$doc:meta])* $name:ident, $len:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default)]
        pub struct $name(pub [u8; $len]);

        impl $name {
            pub const ZERO: $name = $name([0; $len]);

            pub fn is_zero(&self) -> bool {
                *self == Self::ZERO
            }

            /// The whole id in lower-case hexadecimal.
            pub fn hex(&self) -> String {
                self.0.iter().map(|b| format!("{b:02x}")).collect()
            }

            /// The inverse of [`hex`](Self::hex); `None` for anything else.
            pub fn from_hex(text: &str) -> Option<$name> {
                let text = text.as_bytes();
                if text.len() != 2 * $len {
                    return None;
                }
                let nibble = |c: u8| char::from(c).to_digit(16).and_then(|d| u8::try_from(d).ok());
                let mut out = [0; $len];
                for (byte, pair) in out.iter_mut().zip(text.chunks_exact(2)) {
                    *byte = nibble(pair[0])? << 4 | nibble(pair[1])?;
                }
                Some($name(out))
            }
        }

        /// The first eight hexadecimal digits: enough for people, never for decisions.
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                for b in self.0.iter().take(4) {
                    write!(f, "{b:02x}")?;
                }
                Ok(())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }
    };
}

bytes_id!(
    /// An agent's identity: its Ed25519 public key.
    NodeId,
    32
);
bytes_id!(
    /// Drawn when a state directory is created: an agent that comes back with its key but an empty
    /// disk is another voter.
    StateId,
    8
);
bytes_id!(
    /// Where an agent's state directory lies on its host. One agent at a time has it: another identity there has no
    /// state of the one before.
    Home,
    8
);
bytes_id!(
    /// One start of one launcher.
    LauncherId,
    8
);
bytes_id!(
    /// BLAKE3 of a record's canonical encoding. It names the record; numbers are for people.
    Digest,
    32
);
bytes_id!(
    /// An object inside a store, so that two local directories of the same path are not taken for
    /// one shared directory.
    StoreUuid,
    16
);

impl Home {
    /// That of a directory with this path.
    pub fn of(path: &[u8]) -> Home {
        let hash = blake3::hash(path);
        Home(std::array::from_fn(|at| hash.as_bytes()[at]))
    }
}

/// Counts the starts of an agent over one state directory.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Boot(pub u64);

/// Name of a job for people: unique within a cluster and an owner.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct JobKey {
    pub cluster: String,
    pub owner: String,
    pub id: String,
}

impl JobKey {
    /// Bytes at most for each of the three parts.
    pub const MAX_PART: usize = 64;

    /// The owner and the id that a name of a job says: `1000/train`, or the id alone. `muster run` makes no id with a
    /// slash.
    pub fn parts_of(name: &str) -> (Option<&str>, &str) {
        match name.split_once('/') {
            Some((owner, id)) => (Some(owner), id),
            None => (None, name),
        }
    }

    pub fn is_valid(&self) -> bool {
        let ok = |s: &str| {
            !s.is_empty() && s.len() <= Self::MAX_PART && s.chars().all(|c| !c.is_control())
        };
        ok(&self.cluster) && ok(&self.owner) && ok(&self.id)
    }

    /// How near a node is to this job, so that the jobs of a cluster spread over its nodes: the distance of Maymounkov
    /// and Mazières, "Kademlia", 2002, between the node's id and the key's BLAKE3.
    pub(crate) fn distance(&self) -> impl Fn(NodeId) -> [u8; 32] + use<> {
        let mut hasher = blake3::Hasher::new();
        for part in [&self.cluster, &self.owner, &self.id] {
            hasher.update(part.as_bytes()).update(&[0]);
        }
        let place = *hasher.finalize().as_bytes();
        move |node| std::array::from_fn(|at| node.0[at] ^ place[at])
    }
}

impl fmt::Display for JobKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_goes_both_ways() {
        let id = NodeId([0xa7; 32]);
        assert_eq!(NodeId::from_hex(&id.hex()), Some(id));
        assert_eq!(NodeId::from_hex("a7"), None);
        assert_eq!(NodeId::from_hex(&"zz".repeat(32)), None);
        assert_eq!(id.to_string(), "a7a7a7a7");
    }
}
