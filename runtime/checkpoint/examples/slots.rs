//! How long a save stalls its rank: a copy into a slot beside a plain copy of the same bytes.
//!
//! `cargo run --release -p muster-checkpoint --example slots -- [MIB]`

use std::time::Instant;

use muster_checkpoint::Pages;
use muster_checkpoint::hex::Bytes;
use muster_checkpoint::slot::{Image, Slot, Source};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Turns of each.
const TURNS: usize = 9;

fn main() -> Result<()> {
    let mib: usize = std::env::args()
        .nth(1)
        .map_or(Ok(1024), |mib| mib.parse())?;
    let bytes = mib << 20;
    let mut state = Pages::new(bytes)?;
    let mut copy = Pages::new(bytes)?;
    let mut word = 1u64;
    for place in state.chunks_exact_mut(8) {
        // xorshift64 (Marsaglia 2003).
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        place.copy_from_slice(&word.to_le_bytes());
    }
    copy.fill(1);
    for threads in [1, 2] {
        let (made, took) = Slot::create(bytes as u64, 4096, threads)?;
        println!(
            "{threads} threads: made in {:.3} s",
            took.took.as_secs_f64()
        );
        // As a worker maps it: another mapping, whose page table is empty.
        let began = Instant::now();
        let slot = Slot::open(made.fd().try_clone_to_owned()?, threads)?;
        println!(
            "{threads} threads: opened in {:.3} s",
            began.elapsed().as_secs_f64()
        );
        let sources = [Source {
            at: 0,
            bytes: &state,
        }];
        let (mut plain, mut fill) = (Vec::new(), Vec::new());
        for step in 0..TURNS as u64 {
            let began = Instant::now();
            let half = bytes.div_ceil(threads);
            std::thread::scope(|scope| {
                for (from, to) in state.chunks(half).zip(copy.chunks_mut(half)) {
                    scope.spawn(move || to.copy_from_slice(from));
                }
            });
            plain.push(began.elapsed().as_secs_f64());
            let image = Image {
                step,
                generation: Bytes([0; 32]),
                bytes: bytes as u64,
                sources: &sources,
                note: b"",
            };
            fill.push(slot.fill(&image, threads)?.as_secs_f64());
            slot.take()?.ok_or("it was sealed")?.release();
        }
        let first = fill[0];
        let median = |of: &mut Vec<f64>| {
            of.sort_by(f64::total_cmp);
            of[of.len() / 2]
        };
        let (plain, fill) = (median(&mut plain), median(&mut fill));
        println!(
            "{threads} threads: a plain warm copy {plain:.3} s; the first save {first:.3} s ({:.2}), a later one {fill:.3} s ({:.2})",
            first / plain,
            fill / plain
        );
    }
    Ok(())
}
