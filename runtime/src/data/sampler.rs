//! The cursor over shuffled epochs, and one step's batch.

use std::ops::Range;

use super::permutation::Permutation;
use crate::live::Share;
use crate::random::seed_of;

/// Samples of one step, over all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Batch {
    /// So many, whatever the world: a step is the same step in every world.
    Global(u64),
    /// So many for each rank that counts. The cursor moves by what was committed, so a step's number alone
    /// does not say which samples it has; the learning rate should follow
    /// ([`schedule`](crate::schedule)).
    PerRank(u64),
}

impl Batch {
    /// Samples of a step to which `ranks` ranks contribute.
    pub fn over(self, ranks: usize) -> u64 {
        match self {
            Batch::Global(n) => n,
            Batch::PerRank(n) => n.saturating_mul(ranks.max(1) as u64),
        }
    }
}

/// Treatment of an epoch's last samples, when they are fewer than a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tail {
    /// They are a smaller batch.
    Keep,
    /// They are left out of this epoch; the next one has them at other places.
    Drop,
}

/// Samples, batches and order of a [`Sampler`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SamplerConfig {
    /// Samples of the data set; their indices are 0..samples.
    pub samples: u64,
    pub seed: u64,
    /// A batch has at most as many as the data set.
    pub batch: Batch,
    /// Samples of a microbatch, the unit that is dealt to ranks; a batch's last one may be smaller.
    pub microbatch: u64,
    pub tail: Tail,
}

/// Where a [`Sampler`] is. With the data set's size and the seed this is all that a checkpoint needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    pub seed: u64,
    pub samples: u64,
    pub epoch: u64,
    /// Samples of this epoch that are committed.
    pub position: u64,
}

const MAGIC: [u8; 8] = *b"MSAMPLE1";
const STATE_LEN: usize = 40;

impl State {
    pub fn encode(&self) -> [u8; STATE_LEN] {
        let mut out = [0; STATE_LEN];
        let words = [self.seed, self.samples, self.epoch, self.position].map(u64::to_le_bytes);
        let (magic, rest) = out.split_at_mut(MAGIC.len());
        magic.copy_from_slice(&MAGIC);
        rest.copy_from_slice(words.as_flattened());
        out
    }

    /// The inverse of [`encode`](Self::encode); `None` for anything else.
    pub fn decode(bytes: &[u8]) -> Option<State> {
        let (words, rest) = bytes.strip_prefix(&MAGIC)?.as_chunks();
        let [seed, samples, epoch, position] = *words else {
            return None;
        };
        let state = State {
            seed: u64::from_le_bytes(seed),
            samples: u64::from_le_bytes(samples),
            epoch: u64::from_le_bytes(epoch),
            position: u64::from_le_bytes(position),
        };
        (rest.is_empty() && state.position < state.samples).then_some(state)
    }
}

/// A sampler cannot do that. Its state is as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SamplerError {
    #[error("{what} is zero; it must be one at least")]
    Zero { what: &'static str },
    #[error(
        "the state is of {theirs} samples shuffled with seed {their_seed}, not of {ours} with seed {our_seed}; resume with the data set and seed that it was saved with"
    )]
    Other {
        theirs: u64,
        their_seed: u64,
        ours: u64,
        our_seed: u64,
    },
    #[error("position {position} is not within an epoch of {samples} samples")]
    Outside { position: u64, samples: u64 },
    #[error(
        "the batch begins at sample {theirs} of epoch {their_epoch}, the cursor is at {ours} of epoch {our_epoch}; commit each batch once, in order"
    )]
    OutOfOrder {
        theirs: u64,
        their_epoch: u64,
        ours: u64,
        our_epoch: u64,
    },
}

/// A cursor over the endless sequence of shuffled epochs. Every rank holds the same.
///
/// [`plan`](Self::plan) says what the next step trains on and changes nothing; [`commit`](Self::commit)
/// moves on. So a step that is done again, in another world too, takes the same samples, and in an epoch
/// no sample comes twice or never (but for [`Tail::Drop`]).
#[derive(Clone, Debug)]
pub struct Sampler {
    config: SamplerConfig,
    epoch: u64,
    position: u64,
    /// The order of `epoch`.
    order: Permutation,
}

impl Sampler {
    /// At the beginning.
    ///
    /// # Errors
    /// A size is zero.
    pub fn new(config: SamplerConfig) -> Result<Sampler, SamplerError> {
        let (Batch::Global(batch) | Batch::PerRank(batch)) = config.batch;
        for (size, what) in [
            (config.samples, "the number of samples"),
            (batch, "the batch"),
            (config.microbatch, "the microbatch"),
        ] {
            if size == 0 {
                return Err(SamplerError::Zero { what });
            }
        }
        Ok(Sampler {
            config,
            epoch: 0,
            position: 0,
            order: order(&config, 0),
        })
    }

    /// Where a saved one was, in a world of any size, with any sizes of batches.
    ///
    /// # Errors
    /// A size is zero, or the state is another data set's.
    pub fn resume(config: SamplerConfig, state: State) -> Result<Sampler, SamplerError> {
        let mut sampler = Sampler::new(config)?;
        sampler.restore(state)?;
        Ok(sampler)
    }

    /// Goes to where a saved one was.
    ///
    /// # Errors
    /// The state is another data set's.
    pub fn restore(&mut self, state: State) -> Result<(), SamplerError> {
        let SamplerConfig { samples, seed, .. } = self.config;
        if (state.samples, state.seed) != (samples, seed) {
            return Err(SamplerError::Other {
                theirs: state.samples,
                their_seed: state.seed,
                ours: samples,
                our_seed: seed,
            });
        }
        if state.position >= samples {
            return Err(SamplerError::Outside {
                position: state.position,
                samples,
            });
        }
        self.go_to(state.epoch, state.position);
        Ok(())
    }

    pub fn config(&self) -> &SamplerConfig {
        &self.config
    }

    pub fn state(&self) -> State {
        State {
            seed: self.config.seed,
            samples: self.config.samples,
            epoch: self.epoch,
            position: self.position,
        }
    }

    /// Epochs that are committed, with the part of the one under way.
    pub fn epochs(&self) -> f64 {
        self.epoch as f64 + self.position as f64 / self.config.samples as f64
    }

    /// The next step's batch, if `ranks` ranks contribute.
    pub fn plan(&self, ranks: usize) -> Plan {
        let SamplerConfig { samples, tail, .. } = self.config;
        let batch = self.config.batch.over(ranks).min(samples);
        let left = samples - self.position;
        let (epoch, first, len) = match tail {
            Tail::Drop if left < batch => (self.epoch + 1, 0, batch),
            Tail::Keep | Tail::Drop => (self.epoch, self.position, batch.min(left)),
        };
        Plan {
            epoch,
            first,
            len,
            microbatch: self.config.microbatch,
            seed: self.config.seed,
            order: if epoch == self.epoch {
                self.order.clone()
            } else {
                order(&self.config, epoch)
            },
        }
    }

    /// Moves past a batch whose results are committed.
    ///
    /// # Errors
    /// It is not the one that comes next.
    pub fn commit(&mut self, plan: &Plan) -> Result<(), SamplerError> {
        let next = (plan.epoch, plan.first) == (self.epoch, self.position);
        let skipped = self.config.tail == Tail::Drop
            && (plan.epoch, plan.first) == (self.epoch + 1, 0)
            && self.position > 0;
        let inside = plan.len <= self.config.samples - plan.first.min(self.config.samples);
        if !inside || !(next || skipped) {
            return Err(SamplerError::OutOfOrder {
                theirs: plan.first,
                their_epoch: plan.epoch,
                ours: self.position,
                our_epoch: self.epoch,
            });
        }
        match plan.first + plan.len {
            end if end == self.config.samples => self.go_to(plan.epoch + 1, 0),
            end => self.go_to(plan.epoch, end),
        }
        Ok(())
    }

    fn go_to(&mut self, epoch: u64, position: u64) {
        if epoch != self.epoch {
            self.order = order(&self.config, epoch);
        }
        (self.epoch, self.position) = (epoch, position);
    }
}

fn order(config: &SamplerConfig, epoch: u64) -> Permutation {
    Permutation::new(config.samples, seed_of(&[config.seed, epoch]))
}

/// One step's batch: a pure function of the seed, the epoch, the position and the batch's size.
///
/// Microbatches are counted from the batch's beginning, so with [`Batch::PerRank`] the batch of a smaller
/// world is the beginning of that of a larger one.
#[derive(Clone, Debug)]
pub struct Plan {
    epoch: u64,
    first: u64,
    len: u64,
    microbatch: u64,
    seed: u64,
    order: Permutation,
}

impl Plan {
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The places of the batch in the epoch's order.
    pub fn positions(&self) -> Range<u64> {
        self.first..self.first + self.len
    }

    /// Samples of the batch, over all ranks.
    pub fn samples(&self) -> u64 {
        self.len
    }

    /// Microbatches of the batch, over all ranks.
    pub fn microbatches(&self) -> usize {
        self.len.div_ceil(self.microbatch) as usize
    }

    /// This rank's microbatches.
    pub fn part(&self, share: &Share) -> Range<usize> {
        share.part(self.microbatches())
    }

    /// The places of some microbatches in the epoch's order; empty beyond the last.
    pub fn positions_of(&self, microbatches: Range<usize>) -> Range<u64> {
        let cut = |i: usize| self.first + self.len.min(self.microbatch.saturating_mul(i as u64));
        cut(microbatches.start)..cut(microbatches.end.max(microbatches.start))
    }

    /// The indices of a microbatch's samples, in order.
    pub fn indices(&self, microbatch: usize) -> impl Iterator<Item = u64> + '_ {
        self.positions_of(microbatch..microbatch + 1)
            .map(|place| self.order.at(place))
    }

    /// Seeds what a microbatch draws (augmentation, dropout), so that doing it again draws the same.
    pub fn seed_of(&self, microbatch: usize) -> u64 {
        let place = self.positions_of(microbatch..microbatch).start;
        seed_of(&[self.seed, self.epoch, place, u64::MAX])
    }
}

#[cfg(test)]
mod tests;
