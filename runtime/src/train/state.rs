//! The state of a training as bytes: the same on every rank.

use super::bytes::{Fields, put, put_word};
use super::config::TrainError;
use super::model::Model;
use super::parallel::Parallel;
use super::progress::Progress;
use crate::data::{Sampler, State};
use crate::gradient::Scaler;
use crate::gradient::compress::Bucket;
use crate::live::Frozen;
use crate::schedule::Rate;

const MAGIC: &[u8] = b"MTRAIN 2";

/// What lasts beside model and codecs, and its names in checkpoints.
pub(super) const PIECES: [&str; 4] = ["progress", "sampler", "schedule", "scaler"];

/// That, decoded.
#[derive(Debug)]
pub(super) struct Lasting {
    progress: Progress,
    sampler: Sampler,
    rate: Rate,
    scaler: Option<Scaler>,
}

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
        let model = self.encoded_model()?;
        Ok(self.around(model))
    }

    /// The model's part of it.
    ///
    /// # Errors
    /// The model has failed, or gives no state.
    pub(super) fn encoded_model(&mut self) -> Result<Vec<u8>, TrainError> {
        let model = self.model.encode();
        self.ask_model();
        if let Some(error) = self.fault.take() {
            return Err(error);
        }
        if model.is_empty() && self.model.parameters() > 0 {
            let step = self.progress.steps;
            return Err(TrainError::NoState { step });
        }
        Ok(model)
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
        for piece in self.pieces() {
            put(&mut out, &piece);
        }
        put_word(&mut out, self.buckets.len() as u64);
        for bucket in &self.buckets {
            put(&mut out, &bucket.encode_shared());
        }
        put_word(&mut out, model.len() as u64);
        Whole { before: out, model }
    }

    /// What [`PIECES`] names, in its order.
    pub(super) fn pieces(&self) -> [Vec<u8>; PIECES.len()] {
        let scaler = self.scaler.as_ref().map(Scaler::encode);
        [
            self.progress.encode(),
            self.sampler.state().encode().to_vec(),
            self.rate.encode().to_vec(),
            scaler.map_or_else(Vec::new, |bytes| bytes.to_vec()),
        ]
    }

    /// The inverse, for this training; the name of the first that is not of it.
    pub(super) fn lasting(&self, pieces: &[&[u8]]) -> Result<Lasting, &'static str> {
        let [progress, sampled, rated, scaled] = *pieces else {
            return Err(PIECES[0]);
        };
        let progress = Progress::decode(progress).ok_or(PIECES[0])?;
        let mut sampler = self.sampler.clone();
        let state = State::decode(sampled).ok_or(PIECES[1])?;
        sampler.restore(state).map_err(|_| PIECES[1])?;
        let mut rate = self.rate.clone();
        rate.decode(rated).then_some(()).ok_or(PIECES[2])?;
        let mut scaler = self.scaler.clone();
        let fits = match &mut scaler {
            Some(scaler) => scaler.decode(scaled),
            None => scaled.is_empty(),
        };
        fits.then_some(()).ok_or(PIECES[3])?;
        Ok(Lasting {
            progress,
            sampler,
            rate,
            scaler,
        })
    }

    /// Becomes that; what is only this rank's is forgotten by the caller.
    pub(super) fn become_lasting(&mut self, lasting: Lasting) {
        self.best_model = None;
        self.latest = None;
        self.sums.forget();
        self.progress = lasting.progress;
        self.sampler = lasting.sampler;
        self.rate = lasting.rate;
        self.scaler = lasting.scaler;
    }

    /// Becomes that, in a world of any size; false, and nothing changed, if it is of another training. What
    /// this rank had not sent yet is dropped.
    pub fn decode(&mut self, bytes: &[u8]) -> bool {
        self.decoded(bytes).is_some()
    }

    fn decoded(&mut self, bytes: &[u8]) -> Option<()> {
        let mut fields = Fields(bytes.strip_prefix(MAGIC)?);
        let mut pieces = Vec::with_capacity(PIECES.len());
        for _ in PIECES {
            pieces.push(fields.bytes()?);
        }
        let lasting = self.lasting(&pieces).ok()?;
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
        self.become_lasting(lasting);
        Some(())
    }
}
