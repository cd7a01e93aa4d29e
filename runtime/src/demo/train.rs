//! Data-parallel training whose result does not depend on the number of ranks.
//!
//! A step's batch is [`BATCH`] samples, cut into [`MICRO_BATCHES`] of the same size. Ranks take
//! contiguous runs of them, gather every micro-batch's gradient sum, and add these in the order of
//! micro-batches: the same additions in the same order, and so the same bits, in every world.

use serde::{Deserialize, Serialize};

use super::data::{Digits, Sample};
use super::model::{PARAMETERS, backward, correct, initial};
use crate::collective::{Group, GroupError};
use crate::data::{self, Batch, Plan, Sampler, SamplerConfig, SamplerError, Tail};
use crate::live::Share;

/// Samples a step, over all ranks.
pub const BATCH: usize = 128;
/// Parts of a batch; a world may be larger, then some ranks have nothing to do.
pub const MICRO_BATCHES: usize = 8;

const LEARNING_RATE: f32 = 0.05;
const MOMENTUM: f32 = 0.9;

/// Bytes of one micro-batch's result: its gradient sum, then its loss sum, as `f32`.
const RESULT_LEN: usize = (PARAMETERS + 1) * size_of::<f32>();

/// Everything that training changes.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    /// Steps that are complete, and so the number of the next one.
    pub step: u64,
    pub seed: u64,
    parameters: Box<[f32; PARAMETERS]>,
    velocity: Box<[f32; PARAMETERS]>,
}

/// Result by which a finished training is judged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Outcome {
    /// Held-out images that are classified correctly.
    pub correct: usize,
    /// Held-out images in all.
    pub held_out: usize,
    /// BLAKE3 of the parameters, in hexadecimal.
    pub hash: String,
}

impl Outcome {
    /// The part of the held-out images that is classified correctly, from 0 to 1.
    pub fn accuracy(&self) -> f64 {
        self.correct as f64 / self.held_out.max(1) as f64
    }
}

#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error(transparent)]
    Sampler(#[from] SamplerError),
    #[error(
        "rank {rank} sent {bytes} bytes for its part of step {step}, not {expected}; are all workers of one release?"
    )]
    WrongPart {
        rank: u32,
        step: u64,
        bytes: usize,
        expected: usize,
    },
    #[error("the loss of step {step} is not finite; lower the learning rate")]
    Diverged { step: u64 },
}

impl State {
    pub fn new(seed: u64) -> State {
        State {
            step: 0,
            seed,
            parameters: Box::new(initial(seed)),
            velocity: Box::new([0.0; PARAMETERS]),
        }
    }

    /// For a checkpoint's payload.
    pub fn encode(&self) -> Vec<u8> {
        let numbers = self.parameters.iter().chain(self.velocity.iter());
        let mut out = Vec::with_capacity(16 + 8 * PARAMETERS);
        out.extend_from_slice(&self.step.to_le_bytes());
        out.extend_from_slice(&self.seed.to_le_bytes());
        out.extend(numbers.flat_map(|value| value.to_le_bytes()));
        out
    }

    /// The inverse of [`encode`](Self::encode); `None` for anything else.
    pub fn decode(bytes: &[u8]) -> Option<State> {
        let (step, rest) = bytes.split_first_chunk()?;
        let (seed, rest) = rest.split_first_chunk()?;
        if rest.len() != 2 * PARAMETERS * size_of::<f32>() {
            return None;
        }
        let (parameters, velocity) = rest.split_at(rest.len() / 2);
        let mut state = State {
            step: u64::from_le_bytes(*step),
            seed: u64::from_le_bytes(*seed),
            parameters: Box::new([0.0; PARAMETERS]),
            velocity: Box::new([0.0; PARAMETERS]),
        };
        read_floats(parameters, state.parameters.as_mut_slice());
        read_floats(velocity, state.velocity.as_mut_slice());
        Some(state)
    }

    pub fn outcome(&self, digits: &Digits) -> Outcome {
        let mut hasher = blake3::Hasher::new();
        for value in self.parameters.iter() {
            hasher.update(&value.to_le_bytes());
        }
        Outcome {
            correct: correct(&self.parameters, &digits.held_out),
            held_out: digits.held_out.len(),
            hash: hasher.finalize().to_hex().to_string(),
        }
    }
}

fn read_floats(bytes: &[u8], to: &mut [f32]) {
    for (to, from) in to.iter_mut().zip(bytes.as_chunks().0) {
        *to = f32::from_le_bytes(*from);
    }
}

/// A step's results: sums over its whole batch.
#[derive(Clone, Debug, PartialEq)]
pub struct Sums {
    gradient: Box<[f32; PARAMETERS]>,
    loss: f32,
}

impl Sums {
    pub fn mean_loss(&self) -> f32 {
        self.loss / BATCH as f32
    }

    pub fn encode(&self) -> Vec<u8> {
        let numbers = self.gradient.iter().chain(std::iter::once(&self.loss));
        numbers.flat_map(|value| value.to_le_bytes()).collect()
    }

    /// The inverse of [`encode`](Self::encode); `None` for anything else.
    pub fn decode(bytes: &[u8]) -> Option<Sums> {
        let (gradient, loss) = bytes.split_at_checked(RESULT_LEN - size_of::<f32>())?;
        let loss = f32::from_le_bytes(loss.try_into().ok()?);
        let mut sums = Sums {
            gradient: Box::new([0.0; PARAMETERS]),
            loss,
        };
        read_floats(gradient, sums.gradient.as_mut_slice());
        Some(sums)
    }
}

/// One rank's training.
#[derive(Debug)]
pub struct Trainer<'a> {
    digits: &'a Digits,
    sampler: Sampler,
    pub state: State,
}

impl<'a> Trainer<'a> {
    /// # Errors
    /// There is nothing to train on.
    pub fn new(digits: &'a Digits, state: State) -> Result<Trainer<'a>, StepError> {
        let config = SamplerConfig {
            samples: digits.train.len() as u64,
            seed: state.seed,
            batch: Batch::Global(BATCH as u64),
            microbatch: (BATCH / MICRO_BATCHES) as u64,
            tail: Tail::Drop,
        };
        Ok(Trainer {
            digits,
            sampler: Sampler::new(config)?,
            state,
        })
    }

    /// Does the next step with all ranks of the group; the mean loss over its batch.
    ///
    /// # Errors
    /// A peer is lost or disagrees; the state is that before the step.
    pub fn step(&mut self, group: &mut Group) -> Result<f32, StepError> {
        let share = Share {
            entered: (0..group.world()).collect(),
            rank: group.rank(),
            world: group.world(),
        };
        let sums = self.sums(self.state.step, &share, group)?;
        self.commit(&sums);
        Ok(sums.mean_loss())
    }

    /// The sums of a step, on every rank; nothing changes. A rank without a part needs no state.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn sums(&mut self, step: u64, share: &Share, group: &mut Group) -> Result<Sums, StepError> {
        let batch = self.batch(step)?;
        let own = self.results(&batch, share);
        let all = group.all_gather_bytes(&own)?;

        let mut gradient = Box::new([0.0; PARAMETERS]);
        let mut loss = 0.0;
        for (rank, results) in (0..).zip(&all) {
            let expected = share.part_of(rank, MICRO_BATCHES).len() * RESULT_LEN;
            if results.len() != expected {
                return Err(StepError::WrongPart {
                    rank,
                    step,
                    bytes: results.len(),
                    expected,
                });
            }
            for result in results.chunks_exact(RESULT_LEN) {
                let (values, _) = result.as_chunks();
                for (total, value) in gradient.iter_mut().zip(values) {
                    *total += f32::from_le_bytes(*value);
                }
                loss += values
                    .last()
                    .map_or(0.0, |value| f32::from_le_bytes(*value));
            }
        }
        if !loss.is_finite() {
            return Err(StepError::Diverged { step });
        }
        Ok(Sums { gradient, loss })
    }

    /// The samples that a step trains on: chosen by the seed and the step alone, so that the state needs no cursor.
    fn batch(&mut self, step: u64) -> Result<Plan, SamplerError> {
        let SamplerConfig { seed, samples, .. } = *self.sampler.config();
        let whole = samples / BATCH as u64;
        self.sampler.restore(data::State {
            seed,
            samples,
            epoch: step / whole.max(1),
            position: step % whole.max(1) * BATCH as u64,
        })?;
        Ok(self.sampler.plan(1))
    }

    /// The results of this rank's micro-batches, one after the other.
    fn results(&self, batch: &Plan, share: &Share) -> Vec<u8> {
        let range = batch.part(share);
        let mut out = Vec::with_capacity(range.len() * RESULT_LEN);
        for micro_batch in range {
            let indices = batch.indices(micro_batch);
            let samples: Vec<&Sample> = indices
                .map(|index| &self.digits.train[index as usize])
                .collect();
            let mut gradient = [0.0; PARAMETERS];
            let loss = backward(&self.state.parameters, &samples, &mut gradient);
            let numbers = gradient.iter().chain(std::iter::once(&loss));
            out.extend(numbers.flat_map(|value| value.to_le_bytes()));
        }
        out
    }

    /// Stochastic gradient descent with momentum; the only place where the state changes.
    pub fn commit(&mut self, sums: &Sums) {
        let state = &mut self.state;
        let moving = state.parameters.iter_mut().zip(state.velocity.iter_mut());
        for ((parameter, velocity), sum) in moving.zip(sums.gradient.iter()) {
            *velocity = MOMENTUM * *velocity + sum / BATCH as f32;
            *parameter -= LEARNING_RATE * *velocity;
        }
        state.step += 1;
    }
}
