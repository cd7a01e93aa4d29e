//! Asks of an agent to a launcher for the job's store, and the answers.
//!
//! The launcher opened the directory, with its user's rights, and knows its own job's folder there:
//! the agent names slots, and never a path. An object may be longer than a frame, so it travels in
//! [`Part`]s. The agent has at most one operation on the log and one on the beacon under way; each
//! ask is answered once, or not at all when the link ends.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{MAX_REASON, TooMuch};
use crate::storelog::{Effect, MAX_ENTRY};

/// The most bytes of an object in one frame.
pub const MAX_PART: usize = 64 * 1024;

/// The reason for a failure where the store hangs, whoever notices it first.
pub const STORE_HANGS: &str =
    "the store does not answer in time; check its mount, or the network to it, on this node";

/// From the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreAsk {
    /// Read this slot of the job's log.
    Read {
        slot: u64,
    },
    /// Create this slot of the log if nothing is there; once the last part has come.
    Create {
        slot: u64,
        part: Part,
    },
    /// Overwrite the leader's beacon (R14).
    WriteBeacon {
        value: u64,
    },
    ReadBeacon,
}

/// From the launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreAnswer {
    /// The content of the slot; it is durable.
    Found(Part),
    /// Nothing is in the slot now.
    Absent,
    /// The object is there, durably, with these very bytes.
    Won,
    /// Something else was in the slot already.
    Exists,
    /// `None` where there is none, or only a torn one.
    Beacon(Option<u64>),
    BeaconWritten,
    /// Nothing is known; a create may have happened, or may happen yet (R12). The reason is for
    /// people, at most [`MAX_REASON`] bytes.
    Failed {
        reason: String,
    },
}

impl StoreAsk {
    pub fn op(&self) -> StoreOp {
        match self {
            StoreAsk::Read { .. } | StoreAsk::ReadBeacon => StoreOp::Read,
            StoreAsk::Create { .. } => StoreOp::Create,
            StoreAsk::WriteBeacon { .. } => StoreOp::WriteBeacon,
        }
    }
}

impl StoreAnswer {
    /// A failure, its reason cut to what may be sent.
    pub fn failed(mut reason: String) -> StoreAnswer {
        while reason.len() > MAX_REASON {
            reason.pop();
        }
        StoreAnswer::Failed { reason }
    }

    pub(super) fn check(&self) -> Result<(), TooMuch> {
        let (what, len, limit) = match self {
            StoreAnswer::Found(part) => ("a part of an object", part.bytes.len(), MAX_PART),
            StoreAnswer::Failed { reason } => ("the reason", reason.len(), MAX_REASON),
            _ => return Ok(()),
        };
        if len <= limit {
            return Ok(());
        }
        Err(TooMuch { what, len, limit })
    }
}

/// A kind of operation on a store. Each may fail for a reason of its own while the others go well.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StoreOp {
    Read,
    Create,
    WriteBeacon,
}

impl From<&Effect> for StoreOp {
    fn from(effect: &Effect) -> StoreOp {
        match effect {
            Effect::Read { .. } => StoreOp::Read,
            Effect::Create { .. } => StoreOp::Create,
        }
    }
}

/// The troubles of a store, by the kind of operation that fails. The same text is told once.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Troubles(BTreeMap<StoreOp, String>);

/// News of an operation that ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum News {
    /// The store fails, in a way that was not told yet.
    Fails,
    /// Everything that failed goes well again.
    Well,
}

impl Troubles {
    /// Notes how an operation ended: why it failed, if it did.
    pub fn note(&mut self, op: StoreOp, failed: Option<&str>) -> Option<News> {
        let Some(text) = failed else {
            let had = self.0.remove(&op).is_some();
            return (had && self.0.is_empty()).then_some(News::Well);
        };
        let known = self.0.values().any(|t| t == text);
        self.0.insert(op, text.to_owned());
        (!known).then_some(News::Fails)
    }
}

/// A piece of an object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    pub bytes: Vec<u8>,
    /// The object is complete with this one.
    pub last: bool,
}

impl Part {
    /// An object in as many parts as it needs, one at least.
    pub fn all(bytes: &[u8]) -> Vec<Part> {
        let count = bytes.len().div_ceil(MAX_PART).max(1);
        (0..count)
            .map(|k| {
                let from = k * MAX_PART;
                let until = bytes.len().min(from + MAX_PART);
                Part {
                    bytes: bytes.get(from..until).unwrap_or_default().to_vec(),
                    last: k + 1 == count,
                }
            })
            .collect()
    }
}

/// An object whose parts are arriving; never more than [`MAX_ENTRY`] bytes of it are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Assembly(Vec<u8>);

impl Assembly {
    /// Takes the next part; the whole object with the last one.
    pub fn take(&mut self, part: &Part) -> Result<Option<Vec<u8>>, TooMuch> {
        let len = self.0.len() + part.bytes.len();
        if len > MAX_ENTRY {
            self.0 = Vec::new();
            return Err(TooMuch {
                what: "an object of the store",
                len,
                limit: MAX_ENTRY,
            });
        }
        self.0.extend_from_slice(&part.bytes);
        Ok(part.last.then(|| std::mem::take(&mut self.0)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_of_any_length_arrives_as_it_was() {
        for len in [0, 1, MAX_PART, MAX_PART + 1, 3 * MAX_PART, MAX_ENTRY] {
            let object: Vec<u8> = (0..len).map(|n| n as u8).collect();
            let parts = Part::all(&object);
            assert!(parts.iter().all(|p| p.bytes.len() <= MAX_PART));
            let mut assembly = Assembly::default();
            let mut whole = None;
            for part in &parts {
                assert_eq!(whole, None);
                whole = assembly.take(part).unwrap();
            }
            assert_eq!(whole, Some(object));
            assert_eq!(assembly, Assembly::default());
        }
    }

    #[test]
    fn an_object_that_does_not_end_is_refused_at_the_limit() {
        let part = Part {
            bytes: vec![0; MAX_PART],
            last: false,
        };
        let mut assembly = Assembly::default();
        for _ in 0..MAX_ENTRY / MAX_PART {
            assert_eq!(assembly.take(&part), Ok(None));
        }
        assert!(assembly.take(&part).is_err());
        assert_eq!(assembly, Assembly::default());
    }

    #[test]
    fn trouble_is_news_once() {
        let (mut all, read, write) = (Troubles::default(), StoreOp::Read, StoreOp::Create);
        assert_eq!(all.note(read, None), None);
        assert_eq!(all.note(write, Some("full")), Some(News::Fails));
        // Reads go well meanwhile, again and again.
        for _ in 0..3 {
            assert_eq!(all.note(read, None), None);
            assert_eq!(all.note(write, Some("full")), None);
        }
        // Two objects cannot be written, in turns.
        let beacon = |all: &mut Troubles| all.note(StoreOp::WriteBeacon, Some("no beacon"));
        assert_eq!(beacon(&mut all), Some(News::Fails));
        assert_eq!(all.note(write, Some("full")), None);
        assert_eq!(beacon(&mut all), None);
        assert_eq!(all.note(StoreOp::WriteBeacon, None), None);
        assert_eq!(all.note(read, Some("full")), None);
        assert_eq!(all.note(read, Some("gone")), Some(News::Fails));
        assert_eq!(all.note(write, None), None);
        assert_eq!(all.note(read, None), Some(News::Well));
        assert_eq!(all.note(read, None), None);
        assert_eq!(all.note(write, Some("full")), Some(News::Fails));
    }

    #[test]
    fn what_a_launcher_says_of_its_store_is_bounded() {
        let long = StoreAnswer::failed("ä".repeat(MAX_REASON));
        assert_eq!(long.check(), Ok(()));
        let part = Part {
            bytes: vec![0; MAX_PART + 1],
            last: true,
        };
        assert!(StoreAnswer::Found(part).check().is_err());
    }
}
