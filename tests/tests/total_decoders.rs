//! No bytes make a decoder panic. The fuzz targets under `tests/fuzz` go on where this stops; this
//! runs on a stable toolchain.

use muster_tests::decoders::{DECODERS, corpus, decode};
use muster_tests::sim::rng::Rng;
use proptest::prelude::*;

fn all(bytes: &[u8]) {
    for decoder in DECODERS.iter().chain(&["words"]) {
        decode(decoder, bytes);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..600)) {
        all(&bytes);
    }

    #[test]
    fn random_bytes_of_this_version(mut bytes in proptest::collection::vec(any::<u8>(), 1..600)) {
        bytes[0] = muster_protocol::codec::WIRE_VERSION;
        all(&bytes);
    }

    #[test]
    fn frames_cut_short(at in any::<prop::sample::Index>(), cut in any::<prop::sample::Index>()) {
        let corpus = corpus();
        let frame = at.get(&corpus);
        all(&frame[..cut.index(frame.len())]);
    }

    #[test]
    fn frames_with_flipped_bits(
        at in any::<prop::sample::Index>(),
        flips in proptest::collection::vec((any::<prop::sample::Index>(), 0u8..8), 1..8),
    ) {
        let corpus = corpus();
        let mut frame = at.get(&corpus).clone();
        for (byte, bit) in flips {
            let byte = byte.index(frame.len());
            frame[byte] ^= 1 << bit;
        }
        all(&frame);
    }
}

#[test]
fn every_valid_frame_is_decoded_by_its_own_decoder() {
    for frame in corpus() {
        let taken = [
            "message",
            "to_agent",
            "to_launcher",
            "entry",
            "durable",
            "memory_ask",
            "memory_answer",
            "manifest",
            "header",
            "note",
            "part",
        ];
        assert!(taken.iter().any(|d| decode(d, &frame)), "{frame:?}");
    }
}

/// A length that lies must not be believed: the limit is on what is allocated, too.
#[test]
fn lengths_that_lie() {
    for decoder in DECODERS {
        for fill in [0xfd, 0xfc, 0xfb, 0xff] {
            let mut bytes = vec![fill; 64];
            for version in [0, 1, 2, 0xff] {
                bytes[0] = version;
                decode(decoder, &bytes);
            }
        }
    }
    let mut huge = vec![0u8; 300_000];
    huge[0] = 1;
    all(&huge);
}

/// Damage upon damage, from a valid frame.
fn walk(rng: &mut Rng, corpus: &[Vec<u8>]) {
    let mut frame = rng.pick(corpus).cloned().unwrap_or_default();
    for _ in 0..rng.between(1, 6) {
        if frame.is_empty() {
            break;
        }
        let at = rng.index(frame.len());
        match rng.below(4) {
            0 => frame[at] = rng.next_u64() as u8,
            1 => frame.truncate(at),
            2 => frame.insert(at, rng.next_u64() as u8),
            _ => {
                let other = rng.pick(corpus).cloned().unwrap_or_default();
                let from = rng.index(other.len());
                frame.extend_from_slice(&other[from..]);
            }
        }
    }
    all(&frame);
}

/// A short run of what the fuzzers do.
#[test]
fn a_walk_from_valid_frames() {
    let (mut rng, corpus) = (Rng::new(7), corpus());
    for _ in 0..20_000 {
        walk(&mut rng, &corpus);
    }
}

mod long {
    use super::*;
    use std::time::{Duration, Instant, SystemTime};

    /// From a seed that is new in each run, and named: for `MUSTER_TEST_FUZZ_SECONDS`, or a minute.
    #[test]
    fn a_long_walk_from_valid_frames() {
        let seconds = std::env::var("MUSTER_TEST_FUZZ_SECONDS");
        let seconds = seconds.map_or(60, |s| {
            s.parse().expect("MUSTER_TEST_FUZZ_SECONDS is a number")
        });
        let end = Instant::now() + Duration::from_secs(seconds);
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let seed = now.map_or(0, |d| d.as_nanos() as u64);
        println!("seed {seed}");
        let (mut rng, corpus) = (Rng::new(seed), corpus());
        while Instant::now() < end {
            walk(&mut rng, &corpus);
        }
    }
}
