//! The part of the control page by which a worker lives through a change of its generation.
//!
//! | word | writer | meaning |
//! |---|---|---|
//! | [`FEATURES`](word::FEATURES) | launcher | bits of what this launcher can do: [`CAN_REASSIGN`], [`TELLS_RESTORE`] |
//! | [`ENDED`](word::ENDED) | launcher | the newest [`Term`] that is over |
//! | [`SEQUENCE`](word::SEQUENCE) | launcher | odd while the assignment is written, even otherwise |
//! | [`ASSIGNMENT`](word::ASSIGNMENT) | launcher | [`Assignment`], packed |
//! | [`RESTORE`](word::RESTORE) | launcher | the manifest that the assigned generation restores, or zeros; under SEQUENCE, if the launcher [`TELLS_RESTORE`] |
//! | [`LIVE`](word::LIVE) | worker | 1: it parks at the end of a generation and waits for the next |
//! | [`PARKED`](word::PARKED) | worker | the newest term that it has left for good |
//!
//! # The rule
//!
//! 1. The launcher writes the first assignment before it starts the worker, and each later one
//!    only after the worker has parked from all before. It writes under SEQUENCE (a seqlock), so a
//!    reader sees a whole assignment or tries again.
//! 2. When a term is over the launcher stores ENDED. The worker then gives up what it waits for,
//!    begins no step and sends nothing of that term any more, and stores PARKED. It parks by itself
//!    after a collective failed, too: to store PARKED is always allowed, and final for that term.
//! 3. A worker that does not park in time is ended like one that is not live.
//!
//! A worker that shows no LIVE is never reassigned.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use crate::ids::Digest;

/// In [`word::FEATURES`]: this launcher reassigns live workers.
pub const CAN_REASSIGN: u64 = 1;

/// In [`word::FEATURES`]: this launcher says with each place what its generation restores. A process that
/// stays cannot learn it from the environment that it was started with.
pub const TELLS_RESTORE: u64 = 2;

/// Words of the page, in bytes, beside those of [`super::word`].
pub mod word {
    use super::{ASSIGNMENT_WORDS, RESTORE_WORDS};

    pub const FEATURES: usize = 16;
    pub const LIVE: usize = 288;
    pub const PARKED: usize = 296;
    pub const ENDED: usize = 384;
    pub const SEQUENCE: usize = 512;
    pub const ASSIGNMENT: usize = 520;
    pub const RESTORE: usize = ASSIGNMENT + 8 * ASSIGNMENT_WORDS;

    /// Every word of this module.
    pub fn all() -> impl Iterator<Item = usize> {
        let single = [FEATURES, LIVE, PARKED, ENDED, SEQUENCE];
        single.into_iter().chain(assignment()).chain(restore())
    }

    /// The words of the assignment, in the order of [`super::Assignment::encode`].
    pub fn assignment() -> impl Iterator<Item = usize> {
        (0..ASSIGNMENT_WORDS).map(|i| ASSIGNMENT + 8 * i)
    }

    /// The words of the manifest's digest, in the order of [`super::encode_restore`].
    pub fn restore() -> impl Iterator<Item = usize> {
        (0..RESTORE_WORDS).map(|i| RESTORE + 8 * i)
    }
}

/// Words of a packed assignment.
pub const ASSIGNMENT_WORDS: usize = 18;

/// Words of a manifest's digest.
pub const RESTORE_WORDS: usize = 4;

/// The manifest that a generation restores, packed; zeros: nothing.
pub fn encode_restore(manifest: Option<Digest>) -> [u64; RESTORE_WORDS] {
    let digest = manifest.unwrap_or(Digest::ZERO);
    let mut words = [0; RESTORE_WORDS];
    for (word, bytes) in words.iter_mut().zip(digest.0.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

/// The inverse of [`encode_restore`], total.
pub fn decode_restore(words: &[u64; RESTORE_WORDS]) -> Option<Digest> {
    let mut digest = Digest::ZERO;
    for (bytes, word) in digest.0.as_chunks_mut().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    (digest != Digest::ZERO).then_some(digest)
}

/// One start of one generation: its number, then the attempt. Grows with every start that a
/// launcher takes up within a lineage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Term(pub u64);

impl Term {
    const ATTEMPT_BITS: u32 = 20;

    /// Numbers and attempts beyond 2^44 and 2^20 count as the highest ones.
    pub fn of(number: u64, attempt: u32) -> Term {
        let most = (1 << Self::ATTEMPT_BITS) - 1;
        let number = number.min(u64::MAX >> Self::ATTEMPT_BITS);
        Term(number << Self::ATTEMPT_BITS | u64::from(attempt).min(most))
    }

    /// The generation's number.
    pub fn number(self) -> u64 {
        self.0 >> Self::ATTEMPT_BITS
    }
}

/// A worker's place in a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Assignment {
    pub term: Term,
    pub rank: u32,
    pub world: u32,
    pub local_rank: u32,
    pub local_world: u32,
    pub node_rank: u32,
    pub nodes: u32,
    /// Restarts of the job that were charged (TORCHELASTIC_RESTART_COUNT).
    pub restarts: u32,
    /// Where rank 0 listens for the others.
    pub master: SocketAddr,
    /// The generation's record.
    pub digest: Digest,
    /// The birth record of the job: a state of another lineage is no state of this one.
    pub lineage: Digest,
}

impl Assignment {
    pub fn encode(&self) -> [u64; ASSIGNMENT_WORDS] {
        let mut words = [0; ASSIGNMENT_WORDS];
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        let ip = match self.master.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        let bits = ip.to_bits();
        words[0] = self.term.0;
        words[1] = pair(self.rank, self.world);
        words[2] = pair(self.local_rank, self.local_world);
        words[3] = pair(self.node_rank, self.nodes);
        words[4] = pair(self.restarts, self.master.port().into());
        words[5] = (bits >> 64) as u64;
        words[6] = bits as u64;
        for (to, digest) in [(7, &self.digest), (11, &self.lineage)] {
            for (word, bytes) in words.iter_mut().skip(to).zip(digest.0.as_chunks().0) {
                *word = u64::from_le_bytes(*bytes);
            }
        }
        let check = Self::check(&words);
        if let Some(last) = words.last_mut() {
            *last = check;
        }
        words
    }

    /// The inverse of [`encode`](Self::encode). `None` for anything else, such as a page to which no
    /// assignment was written yet.
    pub fn decode(words: &[u64; ASSIGNMENT_WORDS]) -> Option<Assignment> {
        let halves = |at: usize| ((words[at] >> 32) as u32, words[at] as u32);
        let digest = |from: usize| {
            let mut digest = Digest::ZERO;
            for (bytes, word) in digest.0.as_chunks_mut().0.iter_mut().zip(&words[from..]) {
                *bytes = word.to_le_bytes();
            }
            digest
        };
        let (rank, world) = halves(1);
        let (local_rank, local_world) = halves(2);
        let (node_rank, nodes) = halves(3);
        let (restarts, port) = halves(4);
        let ip = Ipv6Addr::from_bits(u128::from(words[5]) << 64 | u128::from(words[6]));
        let sane = rank < world && local_rank < local_world && node_rank < nodes;
        if !sane || Self::check(words) != words[ASSIGNMENT_WORDS - 1] {
            return None;
        }
        Some(Assignment {
            term: Term(words[0]),
            rank,
            world,
            local_rank,
            local_world,
            node_rank,
            nodes,
            restarts,
            master: SocketAddr::new(ip.to_canonical(), u16::try_from(port).ok()?),
            digest: digest(7),
            lineage: digest(11),
        })
    }

    /// All other words, folded: catches a page that something else wrote to.
    fn check(words: &[u64; ASSIGNMENT_WORDS]) -> u64 {
        let others = words.iter().take(ASSIGNMENT_WORDS - 1);
        others.fold(0x6d75_7374_6572, |sum: u64, word| {
            sum.rotate_left(9).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ word
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::super::{PAGE_LEN, word as older};
    use super::*;

    fn example() -> Assignment {
        Assignment {
            term: Term::of(5, 2),
            rank: 3,
            world: 8,
            local_rank: 1,
            local_world: 2,
            node_rank: 1,
            nodes: 4,
            restarts: 7,
            master: SocketAddr::from(([10, 0, 0, 1], 29500)),
            digest: Digest([0xab; 32]),
            lineage: Digest(std::array::from_fn(|i| i as u8)),
        }
    }

    #[test]
    fn words_are_aligned_and_apart() {
        let all: BTreeSet<usize> = word::all().chain(older::ALL).collect();
        assert_eq!(all.len(), word::all().count() + older::ALL.len());
        assert!(all.iter().all(|at| at % 8 == 0 && at + 8 <= PAGE_LEN));
        // The worker's words and the launcher's lie on different lines.
        let lines = |words: &[usize]| words.iter().map(|at| at / 128).collect::<BTreeSet<_>>();
        let launcher = lines(&[word::ENDED, word::SEQUENCE, word::FEATURES]);
        assert!(launcher.is_disjoint(&lines(&[word::LIVE, word::PARKED, older::PROGRESS])));
    }

    #[test]
    fn what_is_restored_is_a_manifest_or_nothing() {
        assert_eq!(encode_restore(None), [0; RESTORE_WORDS]);
        assert_eq!(decode_restore(&[0; RESTORE_WORDS]), None);
        let manifest = Digest(std::array::from_fn(|i| i as u8));
        let words = encode_restore(Some(manifest));
        assert_eq!(words[1], 0x0f0e_0d0c_0b0a_0908);
        assert_eq!(decode_restore(&words), Some(manifest));
    }

    #[test]
    fn terms_grow_with_number_and_attempt() {
        let terms = [
            Term::of(1, 0),
            Term::of(1, 1),
            Term::of(2, 0),
            Term::of(2, 9),
        ];
        assert!(terms.is_sorted() && terms[3].number() == 2);
        assert!(Term::of(1, u32::MAX) < Term::of(2, 0));
        assert!(Term::of(u64::MAX, 1) >= Term::of(1 << 43, 0));
    }

    /// A worker may run another release than its launcher: these words stay as they are.
    #[test]
    fn the_encoding_is_frozen() {
        let words = example().encode();
        assert_eq!(words[0], 5 << 20 | 2);
        assert_eq!(words[1], 3 << 32 | 8);
        assert_eq!(words[4], 7 << 32 | 29500);
        assert_eq!(words[6], 0xffff_0a00_0001);
        assert_eq!(words[7], 0xabab_abab_abab_abab);
        assert_eq!(words[11], 0x0706_0504_0302_0100);
        assert_eq!(Assignment::decode(&words), Some(example()));
        assert_eq!(Assignment::decode(&[0; ASSIGNMENT_WORDS]), None);
        let v6 = Assignment {
            master: "[2001:db8::7]:80".parse().unwrap(),
            ..example()
        };
        assert_eq!(Assignment::decode(&v6.encode()), Some(v6));
    }

    proptest! {
        #[test]
        fn any_words_decode_to_themselves_or_nothing(words: [u64; ASSIGNMENT_WORDS]) {
            if let Some(assignment) = Assignment::decode(&words) {
                prop_assert_eq!(assignment.encode(), words);
            }
        }

        #[test]
        fn a_changed_word_is_noticed(at in 0..ASSIGNMENT_WORDS, bit in 0u32..64) {
            let mut words = example().encode();
            words[at] ^= 1 << bit;
            prop_assert_eq!(Assignment::decode(&words), None);
        }
    }
}
