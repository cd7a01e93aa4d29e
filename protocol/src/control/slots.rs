//! The part of the control page by which a worker gets checkpoint slots from its launcher.
//!
//! | word | writer | meaning |
//! |---|---|---|
//! | [`IMAGE`](word::IMAGE) | worker | bytes of the longest image that it will save. Before ASK |
//! | [`NOTE`](word::NOTE) | worker | bytes of the longest note beside it. Before ASK |
//! | [`ASK`](word::ASK) | worker | counts what it asks for; 0: nothing yet |
//! | [`PID`](word::PID), [`FDS`](word::FDS) | launcher | where the slots are: the launcher's process, and the descriptors in it. Before GIVEN |
//! | [`ROOM`](word::ROOM) | launcher | when refused for its size: the bytes that there is room for. Before GIVEN |
//! | [`GIVEN`](word::GIVEN) | launcher | [`Given`], packed: the answer to the ask of that count |
//!
//! The launcher makes the slots, because memory is charged to whoever touches it first, and they are to
//! outlive the worker. The worker opens them through `/proc/<pid>/fd/<fd>`. It asks again when its
//! share grows; slots that are large enough are given again as they are, with whatever the worker before
//! has sealed in them.

/// The environment variable that holds the job's folder in its store: a path, or a bucket's location.
pub const STORE_ENV: &str = "MUSTER_CHECKPOINT_DIR";

/// The environment variable that holds the store's uuid, in hexadecimal: what that folder lies in.
pub const STORE_ID_ENV: &str = "MUSTER_STORE_ID";

/// The environment variable that holds the path of a folder with copies of what this node saved.
pub const CACHE_ENV: &str = "MUSTER_CHECKPOINT_CACHE";

/// The environment variable that holds the digest of the manifest that the generation begins with.
pub const RESTORE_ENV: &str = "MUSTER_RESTORE";

/// Words of the page, in bytes.
pub mod word {
    pub const IMAGE: usize = 1536;
    pub const NOTE: usize = 1544;
    pub const ASK: usize = 1552;

    pub const PID: usize = 1664;
    pub const FDS: [usize; 2] = [1672, 1680];
    pub const ROOM: usize = 1688;
    pub const GIVEN: usize = 1696;

    /// Every word of this module.
    pub fn all() -> impl Iterator<Item = usize> {
        [IMAGE, NOTE, ASK, PID, ROOM, GIVEN].into_iter().chain(FDS)
    }
}

/// Slots of a rank: one is filled while the other is being made durable.
pub const SLOTS: usize = 2;

/// Answer to an ask for slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Given {
    /// Nothing was asked yet, or what is said here is of another version.
    Nothing,
    /// They are there.
    Slots,
    /// The job has no store: nobody would make a checkpoint durable.
    NoStore,
    /// They are more than the job may use on this node.
    Budget,
    /// The kernel has no memory for them.
    Memory,
    /// They are being made, or wait for memory that others have: another answer to this ask will follow.
    Coming,
}

impl Given {
    const ALL: [Given; 5] = [
        Given::Slots,
        Given::NoStore,
        Given::Budget,
        Given::Memory,
        Given::Coming,
    ];

    /// Whether the ask is still to be answered.
    pub const fn is_open(self) -> bool {
        matches!(self, Given::Nothing | Given::Coming)
    }

    /// With the count of the ask.
    pub const fn encode(self, ask: u64) -> u64 {
        ask << 8 | self as u64
    }

    /// The answer to the ask of this count, total.
    pub fn decode(word: u64, ask: u64) -> Given {
        let known = Self::ALL
            .into_iter()
            .find(|given| given.encode(ask) == word);
        known.unwrap_or(Given::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::{PAGE_LEN, live, report, saving, word as older};
    use super::*;

    #[test]
    fn words_are_aligned_and_apart() {
        let words: Vec<usize> = (word::all().chain(older::ALL))
            .chain(live::word::all())
            .chain(report::word::all())
            .chain(saving::word::all())
            .collect();
        let all: BTreeSet<usize> = words.iter().copied().collect();
        assert_eq!(all.len(), words.len());
        assert!(all.iter().all(|at| at % 8 == 0 && at + 8 <= PAGE_LEN));
    }

    #[test]
    fn an_answer_is_to_one_ask() {
        for given in Given::ALL {
            assert_eq!(Given::decode(given.encode(3), 3), given);
            assert_eq!(Given::decode(given.encode(3), 4), Given::Nothing);
        }
        let open: Vec<Given> = Given::ALL.into_iter().filter(|g| g.is_open()).collect();
        assert_eq!(open, [Given::Coming]);
        assert_eq!(Given::decode(0, 0), Given::Nothing);
        assert_eq!(Given::decode(u64::MAX, 1), Given::Nothing);
    }
}
