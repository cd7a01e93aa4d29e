//! Results of a step's collectives: all that its commit needs, the same on every rank.

use super::bytes::{Fields, put, put_float, put_measured, put_word};
use super::lane::Seen;
use super::model::Measured;
use crate::collective::{Group, GroupError, Op};
use crate::gradient::compress::Reduced;

const MAGIC: &[u8] = b"MRESULT1";

/// The results of a step of [`Parallel`](super::Parallel).
#[derive(Clone, Debug, PartialEq)]
pub struct Results {
    /// Ranks whose samples count.
    pub(super) ranks: u32,
    pub(super) buckets: Vec<Reduced>,
    pub(super) seen: Seen,
    pub(super) totals: Totals,
}

/// Sums over all ranks, beside the gradients.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Totals {
    /// Samples by the sampler's count, whatever the model counts.
    pub(super) placed: u64,
    pub(super) measured: Measured,
    /// Held-out samples; 0, if the step began without an evaluation.
    pub(super) held_out: u64,
    pub(super) evaluated: Measured,
}

impl Totals {
    /// Adds all ranks' sums up. Each has as many extras.
    pub(super) fn reduce(&self, group: &mut Group, extras: usize) -> Result<Totals, GroupError> {
        let mut own = Vec::with_capacity(2 * (3 + extras));
        for (placed, measured) in [
            (self.placed, &self.measured),
            (self.held_out, &self.evaluated),
        ] {
            // Counts are exact: they stay far below 2^53.
            own.extend([placed as f64, measured.loss, measured.samples as f64]);
            let given = measured.extra.iter().copied();
            own.extend(given.chain(std::iter::repeat(0.0)).take(extras));
        }
        let mut all = vec![0.0; own.len()];
        group.all_reduce(Op::Sum, &own, &mut all)?;
        let (trained, evaluated) = all.split_at(3 + extras);
        let measured = |sums: &[f64]| Measured {
            loss: sums[1],
            samples: sums[2] as u64,
            extra: sums[3..].to_vec(),
        };
        Ok(Totals {
            placed: trained[0] as u64,
            measured: measured(trained),
            held_out: evaluated[0] as u64,
            evaluated: measured(evaluated),
        })
    }
}

impl Results {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        put_word(&mut out, u64::from(self.ranks));
        put_word(&mut out, u64::from(self.seen.finite));
        put_float(&mut out, self.seen.squares);
        let totals = &self.totals;
        put_word(&mut out, totals.placed);
        put_measured(&mut out, &totals.measured);
        put_word(&mut out, totals.held_out);
        put_measured(&mut out, &totals.evaluated);
        put_word(&mut out, self.buckets.len() as u64);
        for reduced in &self.buckets {
            put(&mut out, &reduced.encode());
        }
        out
    }

    /// The inverse of [`encode`](Self::encode), for buckets of these lengths; `None` for anything else.
    pub(super) fn decode(bytes: &[u8], lengths: impl Iterator<Item = usize>) -> Option<Results> {
        let mut fields = Fields(bytes.strip_prefix(MAGIC)?);
        let ranks = u32::try_from(fields.word()?).ok()?;
        let finite = match fields.word()? {
            0 => false,
            1 => true,
            _ => return None,
        };
        let squares = fields.float()?;
        let totals = Totals {
            placed: fields.word()?,
            measured: fields.measured()?,
            held_out: fields.word()?,
            evaluated: fields.measured()?,
        };
        let count = fields.count()?;
        let buckets: Vec<Reduced> = (0..count)
            .map(|_| fields.reduced())
            .collect::<Option<_>>()?;
        fields.end()?;
        let same = buckets.iter().map(|reduced| reduced.sum.len()).eq(lengths);
        same.then_some(Results {
            ranks,
            buckets,
            seen: Seen { finite, squares },
            totals,
        })
    }
}
