//! The shared store: a row of objects that can be created once, and a beacon. The state here is the truth; when and
//! whether anybody is told is the conductor's to decide.

use std::collections::BTreeMap;

use muster_protocol::StoreUuid;

pub const UUID: StoreUuid = StoreUuid([0x5a; 16]);

#[derive(Clone, Debug, Default)]
pub struct Store {
    slots: BTreeMap<u64, Vec<u8>>,
    pub beacon: Option<u64>,
}

impl Store {
    /// Create-only: false when something is there, whatever it is.
    pub fn create(&mut self, slot: u64, bytes: &[u8]) -> bool {
        if self.slots.contains_key(&slot) {
            return false;
        }
        self.slots.insert(slot, bytes.to_vec());
        true
    }

    pub fn get(&self, slot: u64) -> Option<&[u8]> {
        self.slots.get(&slot).map(Vec::as_slice)
    }

    /// The first slot that is empty.
    pub fn next(&self) -> u64 {
        (1..)
            .find(|s| !self.slots.contains_key(s))
            .unwrap_or(u64::MAX)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.slots.iter().map(|(s, b)| (*s, b.as_slice()))
    }
}
