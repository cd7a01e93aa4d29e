//! The state of a training, the same on every rank: as bytes in one piece, and as tensors with names.

use super::bytes::{Fields, put, put_word};
use super::config::TrainError;
use super::model::{BoxError, Model, OTHER};
use super::parallel::Parallel;
use super::progress::Progress;
use super::tensors::{Load, Named, Reach, Room, STATE};
use crate::data::{Sampler, State};
use crate::gradient::Scaler;
use crate::gradient::compress::Bucket;
use crate::schedule::Rate;

const MAGIC: &[u8] = b"MTRAIN 2";

/// Names in checkpoints of the lasting state beside model and codecs.
pub(super) const PIECES: [&str; 4] = ["progress", "sampler", "schedule", "scaler"];

/// That, decoded.
#[derive(Debug)]
pub(super) struct Lasting {
    progress: Progress,
    sampler: Sampler,
    rate: Rate,
    scaler: Option<Scaler>,
}

impl<M: Model> Parallel<M> {
    /// All that lasts and is the same on every rank, in one piece.
    pub fn encode(&self) -> Vec<u8> {
        self.around(self.model.encode())
    }

    /// The same, for others to rely on.
    ///
    /// # Errors
    /// The model has failed, or gives no state.
    pub(super) fn whole(&mut self) -> Result<Vec<u8>, TrainError> {
        let model = self.encoded_model()?;
        Ok(self.around(model))
    }

    /// The model's part of it.
    ///
    /// # Errors
    /// The model has failed, or gives no state.
    pub(super) fn encoded_model(&mut self) -> Result<Vec<u8>, TrainError> {
        let model = self.model.encode();
        self.asked()?;
        if model.is_empty() && self.model.parameters() > 0 {
            let step = self.progress.steps;
            return Err(TrainError::NoState { step });
        }
        Ok(model)
    }

    /// Whether the model met an error where it could not tell.
    pub(super) fn ask_model(&mut self) {
        let model = self.model.get_mut();
        if let Some(source) = model.and_then(|model| model.fault()) {
            let step = self.progress.steps;
            self.fault.get_or_insert(TrainError::Model { step, source });
        }
    }

    /// The same, where it can be told at once.
    pub(super) fn asked(&mut self) -> Result<(), TrainError> {
        self.ask_model();
        self.fault.take().map_or(Ok(()), Err)
    }

    /// The model's tensors whose bytes are in this reach; none, if it names none, or has some beyond.
    pub(super) fn within(&self, reach: Reach) -> Result<Vec<Named<'_>>, TrainError> {
        let mut named = self.named()?;
        if reach == Reach::Host && named.iter().any(|tensor| tensor.bytes.host().is_none()) {
            named.clear();
        }
        Ok(named)
    }

    /// The model's tensors; none, if it names none.
    fn named(&self) -> Result<Vec<Named<'_>>, TrainError> {
        self.model.wait()?;
        let step = self.progress.steps;
        let tensors = self.model.tensors();
        tensors.map_err(|source| TrainError::Model { step, source })
    }

    /// Result of `with` on all tensors that are the same on every rank: the model's, or its encoding as one, if it
    /// names none within this reach; and the codecs'.
    ///
    /// # Errors
    /// The model has failed, or gives no state. Or what `with` says.
    pub(super) fn with_tensors<T>(
        &mut self,
        reach: Reach,
        with: impl FnOnce(&Self, Vec<Named<'_>>) -> Result<T, TrainError>,
    ) -> Result<T, TrainError> {
        let encoded;
        let mut tensors = self.within(reach)?;
        if tensors.is_empty() {
            drop(tensors);
            encoded = self.encoded_model()?;
            let state = (!encoded.is_empty()).then(|| Named::bytes(STATE, &encoded));
            tensors = state.into_iter().collect();
        }
        tensors.extend(self.shared_tensors());
        with(self, tensors)
    }

    /// The codecs' part of them.
    pub(super) fn shared_tensors(&self) -> impl Iterator<Item = Named<'_>> {
        let shared = (0..)
            .zip(&self.buckets)
            .map(|(n, bucket)| (n, bucket.shared()));
        shared
            .filter(|(_, shared)| !shared.is_empty())
            .map(|(number, shared)| Named::floats(codec(number), &[shared.len() as u64], shared))
    }

    /// Fills all of them.
    ///
    /// # Errors
    /// They are not of this model, and it is of no use now.
    pub(super) fn load_tensors(
        &mut self,
        load: &mut Load<'_>,
        failed: impl Fn(BoxError) -> TrainError,
    ) -> Result<(), TrainError> {
        if let Some(state) = load.encoded().map_err(|error| failed(error.into()))? {
            // Whatever names its tensors have: it came as one.
            if !self.model.decode(&state) {
                return Err(failed(OTHER.into()));
            }
        } else if self.model.parameters() > 0 || !self.named()?.is_empty() {
            self.model.load(load).map_err(&failed)?;
        }
        self.asked()?;
        for (number, bucket) in (0..).zip(&mut self.buckets) {
            let mut shared = bucket.shared().to_vec();
            if !shared.is_empty() {
                let shape = [shared.len() as u64];
                let room = Room::floats(codec(number), &shape, &mut shared);
                load.fill(vec![room]).map_err(|e| failed(e.into()))?;
                bucket.set_shared(&shared);
            }
        }
        Ok(())
    }

    fn around(&self, model: Vec<u8>) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        for piece in self.pieces() {
            put(&mut out, &piece);
        }
        put_word(&mut out, self.buckets.len() as u64);
        for bucket in &self.buckets {
            put(&mut out, &bucket.encode_shared());
        }
        put(&mut out, &model);
        out
    }

    /// The pieces that [`PIECES`] names, in its order.
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

    /// Becomes that, in a world of any size; false, and nothing changed, if it is of another training. Residuals that
    /// this rank had not sent yet are dropped.
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

/// The name of what a bucket's codec keeps on all ranks alike.
fn codec(bucket: usize) -> String {
    format!("codec.{bucket}")
}
