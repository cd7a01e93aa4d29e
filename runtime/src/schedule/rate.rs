//! A schedule that remembers the batch, so that a larger one is reached gradually.

use super::{At, Schedule, Span, between};

/// A learning rate that is re-applied when the world, and with it the global batch, changes.
///
/// For a larger batch the factor rises linearly from where it is, over a span of its own: an abrupt rise
/// disturbs the training as a missing warm-up does (Goyal et al. 2017, section 2.2; Lin et al.: Dynamic
/// Mini-batch SGD for Elastic Distributed Training, 2019). For a smaller one it falls at once.
///
/// It is part of what all ranks agree on: change it at commit, and give newcomers a copy
/// ([`encode`](Self::encode)).
#[derive(Clone, Debug, PartialEq)]
pub struct Rate {
    schedule: Schedule,
    batch: u64,
    ramp: Span,
    rising: Option<Rise>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Rise {
    since: At,
    /// The factor of scaling then.
    from: f64,
}

const MAGIC: [u8; 8] = *b"MRATE  1";
const ENCODED: usize = 48;

impl Rate {
    /// `ramp`: how long the rise to a larger batch's rate takes.
    pub fn new(schedule: Schedule, batch: u64, ramp: Span) -> Rate {
        Rate {
            schedule,
            batch,
            ramp,
            rising: None,
        }
    }

    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Samples of a step over all ranks.
    pub fn batch(&self) -> u64 {
        self.batch
    }

    /// The rate now.
    pub fn at(&self, at: At) -> f64 {
        let schedule = &self.schedule;
        schedule.rate * schedule.base.factor(at) * schedule.warmed(at, self.scaled(at))
    }

    /// From `at` on, steps have so many samples. Does nothing if they do already. An epoch's last, smaller
    /// batch is not worth a call.
    pub fn set_batch(&mut self, batch: u64, at: At) {
        if batch == self.batch {
            return;
        }
        let from = self.scaled(at);
        self.rising =
            (self.schedule.scaling.factor(batch) > from).then_some(Rise { since: at, from });
        self.batch = batch;
    }

    /// The factor of scaling.
    fn scaled(&self, at: At) -> f64 {
        let full = self.schedule.scaling.factor(self.batch);
        match self.rising {
            Some(rise) => between(rise.from, full, self.ramp.part(rise.since, at)),
            None => full,
        }
    }

    /// The part that changes, for checkpoints and newcomers; the schedule itself is configuration.
    pub fn encode(&self) -> [u8; ENCODED] {
        let rise = self.rising.unwrap_or(Rise {
            since: At::default(),
            from: 0.0,
        });
        let words = [
            MAGIC,
            self.batch.to_le_bytes(),
            u64::from(self.rising.is_some()).to_le_bytes(),
            rise.since.step.to_le_bytes(),
            rise.since.epoch.to_le_bytes(),
            rise.from.to_le_bytes(),
        ];
        let mut out = [0; ENCODED];
        out.copy_from_slice(words.as_flattened());
        out
    }

    /// Becomes what was encoded, under its own schedule; false, and nothing changed, if it is none.
    pub fn decode(&mut self, bytes: &[u8]) -> bool {
        let (words, []) = bytes.as_chunks() else {
            return false;
        };
        let [MAGIC, batch, rising, step, epoch, from] = *words else {
            return false;
        };
        let (epoch, from) = (f64::from_le_bytes(epoch), f64::from_le_bytes(from));
        let rise = Rise {
            since: At {
                step: u64::from_le_bytes(step),
                epoch,
            },
            from,
        };
        let rising = u64::from_le_bytes(rising);
        if rising > 1 || !epoch.is_finite() || !from.is_finite() {
            return false;
        }
        self.batch = u64::from_le_bytes(batch);
        self.rising = (rising == 1).then_some(rise);
        true
    }
}
