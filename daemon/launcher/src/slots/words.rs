//! Words between the slot table and its driver.

use muster_protocol::Digest;
use muster_protocol::checkpoint::{Copy, Save, SlotId, Written};
use muster_protocol::control::slots::{Given, SLOTS};
use muster_protocol::local::SaveNews;

/// A worker's ask for slots, in bytes of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Counts its asks.
    pub number: u64,
    pub image: u64,
    pub note: u64,
}

impl Ask {
    /// Bytes of one slot, about.
    pub fn bytes(self) -> u64 {
        self.image.saturating_add(self.note)
    }

    /// Whether slots of this capacity are large enough.
    pub(super) fn fits(self, (image, note): Capacity) -> bool {
        self.image <= image && self.note <= note
    }
}

/// Bytes of one slot: of the image and of the note.
pub type Capacity = (u64, u64);

/// The state of a slot when it is looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Look {
    /// Nothing can be read of it just now.
    Same,
    Free,
    Filling {
        step: u64,
    },
    Sealed(Copy),
    /// Its worker died while it filled it: the driver made it free.
    Torn,
    /// Its content cannot be read, and why: the driver made it free.
    Broken(String),
}

/// A generation, as far as a manifest tells of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generation {
    pub digest: Digest,
    pub lineage: Digest,
    pub number: u64,
    pub world: u32,
    pub(super) first_rank: u32,
}

/// Something to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    Tell(SaveNews),
    /// A line for people.
    Say(String),
    /// The answer to an ask; with [`Given::Slots`] go the slots.
    Give {
        k: u16,
        ask: u64,
        given: Given,
        /// Bytes that one slot may have.
        room: u64,
    },
    /// Make the slots of a rank; those to `keep` stay, others that it had are let go. The answer is
    /// [`SlotTable::made`](super::SlotTable::made).
    Make {
        k: u16,
        ask: Ask,
        keep: [bool; SLOTS],
    },
    /// Let the slots of a rank go.
    Drop {
        k: u16,
    },
    /// Write what is sealed in a slot. The answer is [`SlotTable::wrote`](super::SlotTable::wrote).
    Write {
        slot: SlotId,
        save: Save,
        rank: u32,
    },
    StopWrite {
        slot: SlotId,
    },
    /// A sealed slot is free.
    Release {
        slot: SlotId,
    },
    /// Nothing that is held of this slot is of use: the file that was begun of it, and a copy.
    Forget {
        slot: SlotId,
    },
    /// Make the manifest of a save. These slots hold copies of it. The answer is
    /// [`SlotTable::assembled`](super::SlotTable::assembled).
    Assemble {
        of: Generation,
        save: Save,
        parts: Vec<Written>,
        sealed: Vec<SlotId>,
    },
}

/// Why a file was not written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It was given up, as was asked for.
    Stopped,
    Failed(String),
}

/// Bytes, for people.
pub fn shown(bytes: u64) -> String {
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in ["KiB", "MiB", "GiB", "TiB"] {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    match unit {
        "B" => format!("{bytes} B"),
        _ => format!("{value:.1} {unit}"),
    }
}
