//! Checkpoints on the socket: what a launcher says of its workers' slots, and what its agent asks for.
//!
//! The launcher makes the slots, sees by their state words what the workers do with them, and writes what
//! they sealed, with its user's rights: the agent names slots and attempts, and never a path.
//! Messages about slots are sent again on each new link.

use serde::{Deserialize, Serialize};

use super::keeping::{KeepNews, Question, Review};
use super::{MAX_REASON, TooMuch};
use crate::checkpoint::{Copy, Found, MAX_SUMMARY, Save, SlotId, Written};
use crate::ids::Digest;

/// The most ranks whose parts make one manifest.
pub const MAX_PARTS: usize = crate::wire::MAX_RANKS;

/// From the launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveNews {
    /// The slots of a local rank, and what is in them. With the frame come the descriptors of both, which the agent
    /// keeps for the launcher's heir; an agent inside its launcher gets none.
    Slots {
        k: u16,
        /// Bytes of each.
        capacity: u64,
        found: [Found; 2],
    },
    /// The slots of a local rank are no more, and other ones are being made: the agent lets go of their memory. Said
    /// again on each link until there are others.
    SlotsGone {
        k: u16,
    },
    /// A worker copies into it.
    Filling {
        slot: SlotId,
        step: u64,
    },
    Sealed {
        slot: SlotId,
        copy: Copy,
    },
    /// The worker is gone: what it was copying is torn.
    WorkerGone {
        k: u16,
    },
    /// The worker of this generation has ended with 0 by itself: it seals nothing any more. Said again on each link.
    WorkerEnded {
        generation: Digest,
        k: u16,
    },
    Progress {
        slot: SlotId,
        attempt: u32,
        done: u64,
    },
    /// The file, and the part that says what it must hash to, are durable.
    Written {
        slot: SlotId,
        attempt: u32,
        bytes: u64,
        /// The digest of the part.
        summary: Vec<u8>,
    },
    WriteFailed {
        slot: SlotId,
        attempt: u32,
        why: String,
    },
    /// Nothing reads the slot any more.
    WriteStopped {
        slot: SlotId,
        attempt: u32,
    },
    /// This manifest is durable on this node, too.
    Held {
        manifest: Digest,
    },
    HoldFailed {
        manifest: Digest,
        why: String,
    },
    /// The manifest is durable.
    Assembled {
        save: Save,
        manifest: Digest,
        bytes: u32,
    },
    AssembleFailed {
        save: Save,
        why: String,
    },
    /// How far the furthest rank here is, and how long its steps usually take, in microseconds; 0: not
    /// known.
    At {
        digest: Digest,
        step: u64,
        step_us: u64,
    },
    /// The times for which one save held a rank up: the copy, and before it the wait for a slot.
    Copied {
        k: u16,
        step: u64,
        bytes: u64,
        copied_us: u64,
        waited_us: u64,
    },
    /// Both slots of a rank are occupied, and it waits for one with the state before this step.
    Waits {
        k: u16,
        step: u64,
    },
    /// All ranks here stand before their first step, having loaded what this generation begins with.
    Loaded {
        digest: Digest,
    },
    /// About checkpoints that are committed.
    Keep(KeepNews),
    /// How what is sealed here gets into the memory of other nodes, whenever that changes.
    Replicas(Replicated),
}

/// Saves of a node, as far as other nodes are to hold them in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replicated {
    /// Newest ones in a row of which they do not hold all that they are to.
    pub behind: u64,
    /// All such ones since the launcher started.
    pub missed: u64,
    /// The newest step of which they hold all, in this generation.
    pub whole: Option<u64>,
}

/// From the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum SaveAsk {
    /// Make what is sealed in this slot durable, for this attempt.
    Write { slot: SlotId, save: Save },
    /// Give that up, and say when nothing reads the slot any more.
    StopWrite { slot: SlotId, attempt: u32 },
    /// The slot may be filled again.
    Free { slot: SlotId },
    /// The slots of this rank are more than the node takes.
    Refuse { k: u16 },
    /// Make a copy of this manifest durable on this node, where nodes have no store in common.
    Hold { manifest: Digest, bytes: u32 },
    /// A folder of data, or a manifest, that the log has retired or fenced.
    Delete { name: String },
    /// Make the manifest of all ranks' parts durable; these are some of them, in rank order. More
    /// follow unless `last`.
    Assemble {
        save: Save,
        parts: Vec<Written>,
        last: bool,
    },
    /// The rank leaves the save of this step out: both of its slots are occupied.
    Skip { k: u16, step: u64 },
    /// All ranks of the generation have loaded what it begins with: they may begin (R15).
    Go { digest: Digest },
    /// A line for people.
    Tell { text: String },
    /// This step of a generation is committed: it stays in memory until a newer one is.
    Committed { generation: Digest, step: u64 },
    /// Look at what is committed, and decide what is kept.
    Review(Review),
    /// Look again at a checkpoint.
    LookAgain(Question),
    /// The two slots of this local rank, which come with this frame, are of the job's launcher that was here before and
    /// is dead: what is in them is this one's.
    Inherit { k: u16 },
}

/// Parts in one frame.
const PARTS: usize = 256;

impl SaveNews {
    pub(super) fn check(&self) -> Result<(), TooMuch> {
        let (what, len, limit) = match self {
            SaveNews::Written { summary, .. } => ("a summary", summary.len(), MAX_SUMMARY),
            SaveNews::WriteFailed { why, .. }
            | SaveNews::HoldFailed { why, .. }
            | SaveNews::AssembleFailed { why, .. } => ("the reason", why.len(), MAX_REASON),
            SaveNews::Keep(news) => return news.check(),
            _ => return Ok(()),
        };
        match len > limit {
            true => Err(TooMuch { what, len, limit }),
            false => Ok(()),
        }
    }
}

impl SaveAsk {
    /// The asks for a manifest, in as many frames as that takes.
    pub fn assemble(save: Save, parts: &[Written]) -> Vec<SaveAsk> {
        let count = parts.len().div_ceil(PARTS).max(1);
        let part = |at: usize| {
            let some = parts.iter().skip(at * PARTS).take(PARTS);
            SaveAsk::Assemble {
                save,
                parts: some.cloned().collect(),
                last: at + 1 == count,
            }
        };
        (0..count).map(part).collect()
    }
}

/// A reason, cut to what may be said.
pub fn short(mut why: String) -> String {
    while why.len() > MAX_REASON {
        why.pop();
    }
    why
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;
    use crate::local::{ToAgent, ToLauncher};

    #[test]
    fn any_number_of_parts_fits_into_frames() {
        let save = Save {
            generation: Digest([7; 32]),
            attempt: 3,
            step: 9,
        };
        for count in [0, 1, PARTS, PARTS + 1, MAX_PARTS] {
            let parts: Vec<Written> = (0..count as u32)
                .map(|rank| Written {
                    rank,
                    bytes: u64::MAX,
                    summary: vec![1; MAX_SUMMARY],
                })
                .collect();
            let mut seen = Vec::new();
            let frames = SaveAsk::assemble(save, &parts);
            let last = frames.len() - 1;
            for (at, ask) in frames.into_iter().enumerate() {
                let frame = codec::encode_body(&ToLauncher::Save(ask.clone())).unwrap();
                assert!(frame.len() < codec::MAX_FRAME / 2);
                let SaveAsk::Assemble { parts, last: l, .. } = ask else {
                    panic!("{ask:?}");
                };
                assert_eq!(l, at == last);
                seen.extend(parts);
            }
            assert_eq!(seen, parts);
        }
    }

    #[test]
    fn what_a_launcher_says_of_its_slots_is_bounded() {
        let slot = SlotId { k: 0, side: 1 };
        let failed = |why: String| {
            ToAgent::Save(SaveNews::WriteFailed {
                slot,
                attempt: 1,
                why,
            })
        };
        assert!(failed("x".repeat(MAX_REASON + 1)).check().is_err());
        assert!(failed(short("ü".repeat(MAX_REASON))).check().is_ok());
        let written = ToAgent::Save(SaveNews::Written {
            slot,
            attempt: 1,
            bytes: 1,
            summary: vec![0; MAX_SUMMARY + 1],
        });
        assert!(written.check().is_err());
    }
}
