//! Whether a store keeps its promises, and what it is called.

use std::fmt;
use std::ops::ControlFlow;
use std::thread;
use std::time::{Duration, Instant};

use muster_checkpoint::hex;
use serde::{Deserialize, Serialize};

use crate::error::{Kind, StoreError};
use crate::store::{Checksum, Created, Store};

/// The object that holds a store's uuid: `{"format":1,"uuid":"<32 hex>"}`, created once.
pub const UUID_NAME: &str = "muster-store";

/// The folder of a probe's objects, which are deleted again.
pub const PROBE_FOLDER: &str = "muster-probe";
/// Creators that race for one name.
const RACERS: usize = 8;
/// The most bytes of a uuid's object.
const UUID_LIMIT: u64 = 4096;

/// Names a store, whatever path or URL leads to it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// From 32 hexadecimal digits; `None` of anything else, and of zeros.
    pub fn parse(text: &str) -> Option<Uuid> {
        let bytes: [u8; 16] = hex::decode(text)?.try_into().ok()?;
        (bytes != [0; 16]).then_some(Uuid(bytes))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0))
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Result of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Probed {
    pub uuid: Uuid,
    /// The time that one create took.
    pub latency: Duration,
    /// Whether the store keeps a checksum of whole objects that uploads are compared with.
    pub checksums: bool,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct UuidFile {
    format: u32,
    uuid: String,
}

impl Store {
    /// Tries in the store's root what Muster will do there, and reads or gives its uuid: creates an
    /// object, sees a second create refused and eight at once decided, reads, lists, deletes. About
    /// twenty requests. From then on the store is believed only while its uuid is there.
    ///
    /// # Errors
    /// `NotCreateOnly`: the store cannot decide between two groups of nodes, and must not be used.
    /// Else what keeps it from being used, or tried.
    pub fn probe(&self) -> Result<Probed, StoreError> {
        let root = self.root();
        let id = hex::encode(&rand::random::<[u8; 16]>());
        let (alone, raced) = (
            format!("{PROBE_FOLDER}/{id}-a"),
            format!("{PROBE_FOLDER}/{id}-b"),
        );
        let judged = root.judge(&alone, &raced);
        // The store's next job may be another user's. As in `/tmp`, each deletes its own only.
        root.set_mode(PROBE_FOLDER, 0o1777);
        // Leftovers are harmless, and their names are never used again.
        let cleaned = root.delete(&alone).and(root.delete(&raced));
        let (latency, checksums) = judged?;
        cleaned?;
        match root.get_unchecked(&alone, 64) {
            Err(error) if error.kind == Kind::NotFound => {}
            Err(error) => return Err(error),
            Ok(_) => {
                let error = root.error(Kind::Unsupported, "delete", &alone);
                return Err(error.said("it is still there afterwards"));
            }
        }
        let uuid = root.make_uuid()?;
        self.is_named(uuid)?;
        Ok(Probed {
            uuid,
            latency,
            checksums,
        })
    }

    /// Whether this is the store of this uuid, which somebody else has probed: one request. From then on
    /// it is believed only while that uuid is there, as after a probe.
    ///
    /// # Errors
    /// `Gone`: it is another store, or none, such as the directory below a mount that is missing. Else
    /// that cannot be told now.
    pub fn expect(&self, uuid: Uuid) -> Result<(), StoreError> {
        self.is_named(uuid)?;
        self.still_there("use")
    }

    /// From now on, and not otherwise before.
    fn is_named(&self, uuid: Uuid) -> Result<(), StoreError> {
        let known = self.set_uuid(uuid);
        if known != uuid {
            let error = self.error(Kind::Gone, "use", "");
            return Err(error.said(format!("its uuid was {known}, and is to be {uuid}")));
        }
        Ok(())
    }

    /// One create's time, and whether there are checksums.
    fn judge(&self, alone: &str, raced: &str) -> Result<(Duration, bool), StoreError> {
        let (first, second) = (nonce("first"), nonce("second"));
        let began = Instant::now();
        if self.create_unchecked(alone, &first)? == Created::Exists {
            // The name was drawn at random a moment ago.
            let error = self.error(Kind::Unsupported, "create", alone);
            return Err(error.said("it says that a new name is taken"));
        }
        let latency = began.elapsed();
        if self.create_unchecked(alone, &second)? == Created::Created {
            return Err(self.not_create_only(alone, "a second create overwrote the first"));
        }
        if self.get_unchecked(alone, 256)? != first {
            return Err(self.not_create_only(alone, "it changed though the create was refused"));
        }
        self.race(raced)?;

        let mut middle = [0; 5];
        self.get_range(alone, 1, &mut middle)?;
        let head = self.head(alone)?;
        if first.get(1..6) != Some(&middle[..]) || head.size != first.len() as u64 {
            let error = self.error(Kind::Unsupported, "read", alone);
            return Err(error.said("a part of it, or its length, is not what was written"));
        }
        let mut seen = Vec::new();
        self.list(PROBE_FOLDER, &mut |entry| {
            if [alone, raced].contains(&entry.name.as_str()) {
                seen.push(entry.name);
            }
            match seen.len() {
                2 => ControlFlow::Break(()),
                _ => ControlFlow::Continue(()),
            }
        })?;
        if seen != [alone, raced] {
            let error = self.error(Kind::Unsupported, "list", PROBE_FOLDER);
            return Err(error.said("what was just created is missing there, or out of order"));
        }
        let checksums = matches!(
            head.checksum,
            Some(Checksum::Crc64Nvme(_) | Checksum::Crc32c(_))
        );
        Ok((latency, checksums))
    }

    /// Some stores refuse a second create, and let several at once succeed.
    fn race(&self, name: &str) -> Result<(), StoreError> {
        let outcomes: Vec<(Vec<u8>, Result<Created, StoreError>)> = thread::scope(|scope| {
            let racer = |_| {
                let bytes = nonce("race");
                scope.spawn(move || {
                    let created = self.create_unchecked(name, &bytes);
                    (bytes, created)
                })
            };
            let racers: Vec<_> = (0..RACERS).map(racer).collect();
            // A racer that panicked would be a mistake here, and is no winner.
            racers.into_iter().filter_map(|r| r.join().ok()).collect()
        });
        let there = self.get_unchecked(name, 256)?;
        let mut winners = 0;
        for (bytes, outcome) in outcomes {
            let won = outcome? == Created::Created;
            winners += usize::from(won);
            if won != (bytes == there) {
                return Err(self.not_create_only(name, "a create that succeeded was overwritten"));
            }
        }
        match winners {
            1 => Ok(()),
            _ => Err(self.not_create_only(
                name,
                &format!("{winners} of {RACERS} creates at once succeeded"),
            )),
        }
    }

    fn not_create_only(&self, name: &str, said: &str) -> StoreError {
        let said = match self.server() {
            Some(server) => format!("{said}; the server calls itself {server}"),
            None => said.to_owned(),
        };
        self.error(Kind::NotCreateOnly, "use", name).said(said)
    }

    fn make_uuid(&self) -> Result<Uuid, StoreError> {
        match self.read_uuid() {
            Err(error) if error.kind == Kind::NotFound => {}
            other => return other,
        }
        let fresh = UuidFile {
            format: 1,
            uuid: Uuid(rand::random()).to_string(),
        };
        let mut bytes = serde_json::to_vec(&fresh).map_err(|error| {
            self.error(Kind::Other, "create", UUID_NAME)
                .said(error.to_string())
        })?;
        bytes.push(b'\n');
        self.create_unchecked(UUID_NAME, &bytes)?;
        self.set_mode(UUID_NAME, 0o644);
        // Read back in every case: what others will read is what counts.
        self.read_uuid()
    }

    /// In the root.
    pub(crate) fn read_uuid(&self) -> Result<Uuid, StoreError> {
        let bytes = self.get_unchecked(UUID_NAME, UUID_LIMIT)?;
        let bad = |said: &str| {
            let error = self.error(Kind::Gone, "read", UUID_NAME);
            error.said(format!("{said}: restore it, or use another place"))
        };
        let file: UuidFile = serde_json::from_slice(&bytes).map_err(|e| bad(&e.to_string()))?;
        match Uuid::parse(&file.uuid) {
            Some(uuid) if file.format == 1 => Ok(uuid),
            _ => Err(bad("it holds no uuid of format 1")),
        }
    }
}

fn nonce(what: &str) -> Vec<u8> {
    format!("{what} {}\n", hex::encode(&rand::random::<[u8; 16]>())).into_bytes()
}
