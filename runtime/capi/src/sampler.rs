//! The elastic sampler: a cursor over shuffled epochs.

use std::sync::Mutex;

use muster_runtime::data::{Batch, Sampler, SamplerConfig, State, Tail};
use muster_runtime::live::Share;

use crate::outcome::{Code, Failure, entry};
use crate::raw::{list, list_mut, lock, one, out};

/// Bytes of a state: `MUSTER_SAMPLER_STATE` of the header.
pub const STATE: usize = 40;

/// `muster_sampler` of the header.
#[derive(Debug)]
pub struct Cursor(Mutex<Sampler>);

/// `muster_sampler_config` of the header.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Config {
    pub samples: u64,
    pub seed: u64,
    pub batch: u64,
    pub epoch: u64,
    pub per_rank: u32,
    pub drop_tail: u32,
}

/// `muster_batch` of the header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Dealt {
    pub epoch: u64,
    pub samples: u64,
    pub count: usize,
}

/// A cursor, at the beginning or where a state was.
///
/// # Safety
/// `sampler` is null or valid for a write; `config` is null or a configuration; `state` is null or [`STATE`] bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_sampler_open(
    sampler: *mut *mut Cursor,
    config: *const Config,
    state: *const u8,
) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise, here and below.
        let (at, config) = unsafe { (out(sampler, "sampler")?, one(config, "config")?) };
        *at = std::ptr::null_mut();
        let begin = State {
            seed: config.seed,
            samples: config.samples,
            epoch: config.epoch,
            position: 0,
        };
        let config = SamplerConfig {
            samples: config.samples,
            seed: config.seed,
            batch: match config.per_rank {
                0 => Batch::Global(config.batch),
                _ => Batch::PerRank(config.batch),
            },
            // Dealt to ranks one by one: parts differ by one sample at most.
            microbatch: 1,
            tail: match config.drop_tail {
                0 => Tail::Keep,
                _ => Tail::Drop,
            },
        };
        let wrong = |error| Failure::of(Code::Argument, &error);
        let state = match state.is_null() {
            true => begin,
            false => {
                // SAFETY: as above.
                let bytes = unsafe { list(state, STATE, "state")? };
                State::decode(bytes)
                    .ok_or_else(|| Failure::argument("these bytes are no state of a sampler"))?
            }
        };
        let sampler = Sampler::resume(config, state).map_err(wrong)?;
        *at = Box::into_raw(Box::new(Cursor(Mutex::new(sampler))));
        Ok(Code::Ok)
    })
}

/// This rank's part of the next batch.
///
/// # Safety
/// `sampler` is null or from [`muster_sampler_open`]; `into` is null or valid for writes of `room` indices; `batch` is
/// null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_sampler_next(
    sampler: *const Cursor,
    rank: u32,
    world: u32,
    into: *mut u64,
    room: usize,
    batch: *mut Dealt,
) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise.
        let (cursor, into, dealt) = unsafe {
            (
                one(sampler, "sampler")?,
                list_mut(into, room, "into")?,
                out(batch, "batch")?,
            )
        };
        if rank >= world {
            return Err(Failure::argument(format!("rank {rank} of {world} ranks")));
        }
        let mut sampler = lock(&cursor.0);
        let plan = sampler.plan(world as usize);
        let share = Share {
            entered: (0..world).collect(),
            rank,
            world,
        };
        let part = plan.part(&share);
        if part.len() > into.len() {
            let (count, room) = (part.len(), into.len());
            let text = format!("{count} indices do not fit into {room} places");
            return Err(Failure::argument(text));
        }
        let indices = part.clone().flat_map(|microbatch| plan.indices(microbatch));
        for (place, index) in into.iter_mut().zip(indices) {
            *place = index;
        }
        sampler
            .commit(&plan)
            .map_err(|e| Failure::of(Code::Argument, &e))?;
        *dealt = Dealt {
            epoch: plan.epoch(),
            samples: plan.samples(),
            count: part.len(),
        };
        Ok(Code::Ok)
    })
}

/// Where a cursor is.
///
/// # Safety
/// `sampler` is null or from [`muster_sampler_open`]; `state` is null or valid for writes of [`STATE`] bytes; `epoch`
/// and `position` are null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_sampler_state(
    sampler: *const Cursor,
    state: *mut u8,
    epoch: *mut u64,
    position: *mut u64,
) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise.
        let (cursor, bytes, epoch, position) = unsafe {
            (
                one(sampler, "sampler")?,
                list_mut(state, STATE, "state")?,
                out(epoch, "epoch")?,
                out(position, "position")?,
            )
        };
        let state = lock(&cursor.0).state();
        bytes.copy_from_slice(&state.encode());
        (*epoch, *position) = (state.epoch, state.position);
        Ok(Code::Ok)
    })
}

/// Closes a cursor.
///
/// # Safety
/// `sampler` is null, or from [`muster_sampler_open`], and not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_sampler_close(sampler: *mut Cursor) {
    entry(|| {
        if !sampler.is_null() {
            // SAFETY: the caller's promise: it is from `Box::into_raw`, and this is its last use.
            drop(unsafe { Box::from_raw(sampler) });
        }
        Ok(Code::Ok)
    });
}
