//! The sampler.

use std::ptr::{null, null_mut};

use muster_runtime::data::{Batch, Sampler, SamplerConfig, Tail};

use super::{fails, said};
use crate::outcome::Code;
use crate::sampler::{self, Config, Cursor, Dealt};

fn sampler(config: &Config, state: *const u8) -> *mut Cursor {
    let mut cursor = null_mut();
    // SAFETY: as the header says.
    assert_eq!(
        unsafe { sampler::muster_sampler_open(&mut cursor, config, state) },
        0,
        "{}",
        said()
    );
    cursor
}

#[test]
fn the_sampler_deals_the_runtimes_batches_to_any_world() {
    let config = Config {
        samples: 100,
        seed: 7,
        batch: 12,
        epoch: 0,
        per_rank: 0,
        drop_tail: 1,
    };
    let mut ours = Sampler::new(SamplerConfig {
        samples: 100,
        seed: 7,
        batch: Batch::Global(12),
        microbatch: 1,
        tail: Tail::Drop,
    })
    .unwrap();
    let mut state: Option<[u8; 40]> = None;
    for world in [1, 3, 5, 2, 4, 12, 7, 3, 3, 1] {
        let plan = ours.plan(world as usize);
        let expected: Vec<u64> = (0..12).flat_map(|m| plan.indices(m)).collect();
        let mut dealt = Vec::new();
        let mut after = [0; 40];
        for rank in 0..world {
            let cursor = sampler(&config, state.as_ref().map_or(null(), |s| s.as_ptr()));
            let (mut into, mut batch) = ([0; 12], Dealt::default());
            // SAFETY: as the header says, here and below.
            let mut next = |room| unsafe {
                sampler::muster_sampler_next(
                    cursor,
                    rank,
                    world,
                    into.as_mut_ptr(),
                    room,
                    &mut batch,
                )
            };
            fails(next(0), Code::Argument, "do not fit");
            assert_eq!(next(12), 0, "{}", said());
            assert_eq!((batch.epoch, batch.samples), (plan.epoch(), 12));
            assert!(batch.count.abs_diff(12 / world as usize) <= 1, "{batch:?}");
            dealt.extend_from_slice(&into[..batch.count]);
            let (mut epoch, mut position) = (0, 0);
            // SAFETY: as above.
            unsafe {
                let at = after.as_mut_ptr();
                assert_eq!(
                    sampler::muster_sampler_state(cursor, at, &mut epoch, &mut position),
                    0
                );
                fails(
                    sampler::muster_sampler_next(cursor, 5, 5, null_mut(), 0, &mut batch),
                    Code::Argument,
                    "rank 5",
                );
                sampler::muster_sampler_close(cursor);
            }
        }
        assert_eq!(dealt, expected, "all ranks together, in order");
        ours.commit(&plan).unwrap();
        assert_eq!(after, ours.state().encode());
        state = Some(after);
    }
    assert_eq!(ours.state().epoch, 1, "it has gone through an epoch");
    let mut cursor = null_mut();
    let other = Config { seed: 8, ..config };
    // SAFETY: as above.
    unsafe {
        let state = state.unwrap();
        fails(
            sampler::muster_sampler_open(&mut cursor, &other, state.as_ptr()),
            Code::Argument,
            "seed",
        );
        fails(
            sampler::muster_sampler_open(&mut cursor, &config, [0; 40].as_ptr()),
            Code::Argument,
            "no state",
        );
        let none = Config { batch: 0, ..config };
        fails(
            sampler::muster_sampler_open(&mut cursor, &none, null()),
            Code::Argument,
            "zero",
        );
    }
    assert!(cursor.is_null());
    // An epoch by its number.
    let third = sampler(&Config { epoch: 3, ..config }, null());
    let (mut into, mut batch) = ([0; 12], Dealt::default());
    // SAFETY: as above.
    unsafe {
        assert_eq!(
            sampler::muster_sampler_next(third, 0, 1, into.as_mut_ptr(), 12, &mut batch),
            0
        );
        sampler::muster_sampler_close(third);
    }
    assert_eq!(batch.epoch, 3);
}
