//! The state of a training as bytes: the same on every rank.

use super::bytes::{Fields, put, put_word};
use super::config::TrainError;
use super::model::Model;
use super::parallel::Parallel;
use super::progress::Progress;
use crate::data::State;
use crate::gradient::Scaler;
use crate::gradient::compress::Bucket;
use crate::live::Frozen;

const MAGIC: &[u8] = b"MTRAIN 2";

/// A state; the model's part of it is not copied again.
#[derive(Debug, Default)]
pub(super) struct Whole {
    before: Vec<u8>,
    model: Vec<u8>,
}

impl Whole {
    pub(super) fn concat(&self) -> Vec<u8> {
        [&self.before[..], &self.model[..]].concat()
    }
}

impl Frozen for Whole {
    fn total(&self) -> usize {
        self.before.len() + self.model.len()
    }

    fn piece(&self, byte: usize) -> &[u8] {
        match byte.checked_sub(self.before.len()) {
            None => &self.before[byte..],
            Some(byte) => self.model.piece(byte),
        }
    }
}

impl<M: Model> Parallel<M> {
    /// All that lasts and is the same on every rank, for newcomers and checkpoints.
    pub fn encode(&self) -> Vec<u8> {
        self.around(self.model.encode()).concat()
    }

    /// The same, for others to rely on.
    ///
    /// # Errors
    /// The model has failed, or gives no state.
    pub(super) fn whole(&mut self) -> Result<Whole, TrainError> {
        let model = self.model.encode();
        self.ask_model();
        if let Some(error) = self.fault.take() {
            return Err(error);
        }
        if model.is_empty() && self.model.parameters() > 0 {
            let step = self.progress.steps;
            return Err(TrainError::NoState { step });
        }
        Ok(self.around(model))
    }

    /// Whether the model met an error where it could not tell.
    pub(super) fn ask_model(&mut self) {
        if let Some(source) = self.model.fault() {
            let step = self.progress.steps;
            self.fault.get_or_insert(TrainError::Model { step, source });
        }
    }

    fn around(&self, model: Vec<u8>) -> Whole {
        let mut out = MAGIC.to_vec();
        put(&mut out, &self.progress.encode());
        put(&mut out, &self.sampler.state().encode());
        put(&mut out, &self.rate.encode());
        let scaler = self.scaler.as_ref().map(Scaler::encode);
        put(&mut out, scaler.as_ref().map_or(&[], |bytes| bytes));
        put_word(&mut out, self.buckets.len() as u64);
        for bucket in &self.buckets {
            put(&mut out, &bucket.encode_shared());
        }
        put_word(&mut out, model.len() as u64);
        Whole { before: out, model }
    }

    /// Becomes that, in a world of any size; false, and nothing changed, if it is of another training. What
    /// this rank had not sent yet is dropped.
    pub fn decode(&mut self, bytes: &[u8]) -> bool {
        self.decoded(bytes).is_some()
    }

    fn decoded(&mut self, bytes: &[u8]) -> Option<()> {
        let mut fields = Fields(bytes.strip_prefix(MAGIC)?);
        let progress = Progress::decode(fields.bytes()?)?;
        let mut sampler = self.sampler.clone();
        sampler.restore(State::decode(fields.bytes()?)?).ok()?;
        let mut rate = self.rate.clone();
        rate.decode(fields.bytes()?).then_some(())?;
        let scaler = match (fields.bytes()?, self.scaler.clone()) {
            (bytes, Some(mut scaler)) => {
                scaler.decode(bytes).then_some(())?;
                Some(scaler)
            }
            ([], None) => None,
            _ => return None,
        };
        (fields.count()? == self.buckets.len()).then_some(())?;
        let mut shared = Vec::with_capacity(self.buckets.len());
        for _ in &self.buckets {
            shared.push(fields.bytes()?);
        }
        let model = fields.bytes()?;
        fields.end()?;

        // What may still refuse is undone.
        let before: Vec<Vec<u8>> = self.buckets.iter().map(Bucket::encode_shared).collect();
        let fits = self
            .buckets
            .iter_mut()
            .zip(&shared)
            .all(|(bucket, shared)| bucket.decode_shared(shared));
        if !fits || !self.model.decode(model) {
            for (bucket, before) in self.buckets.iter_mut().zip(&before) {
                bucket.decode_shared(before);
            }
            return None;
        }
        self.forget_own();
        self.best_model = None;
        self.sums.forget();
        (self.progress, self.sampler, self.rate, self.scaler) = (progress, sampler, rate, scaler);
        Some(())
    }
}
