//! A bucket's state between steps, and the result of a step's reduction.

use super::super::bytes::{put, take};
const OWN: &[u8] = b"MOWN   1";
const SHARED: &[u8] = b"MSHARED1";
const REDUCED: &[u8] = b"MREDUCE1";

/// One rank's part of a bucket's state: what it has not sent yet. Empty for codecs that keep nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Own {
    pub(super) residual: Vec<f32>,
    /// Of the momentum correction.
    pub(super) velocity: Vec<f32>,
}

impl Own {
    pub(super) fn zero(residual: usize, velocity: usize) -> Own {
        Own {
            residual: vec![0.0; residual],
            velocity: vec![0.0; velocity],
        }
    }

    pub fn residual(&self) -> &[f32] {
        &self.residual
    }

    /// All that is kept, list by list.
    pub(crate) fn lists(&self) -> [&[f32]; 2] {
        [&self.residual, &self.velocity]
    }

    /// Whether the codec keeps nothing back.
    pub fn is_empty(&self) -> bool {
        self.residual.is_empty() && self.velocity.is_empty()
    }

    /// The same, to be changed.
    pub(crate) fn lists_mut(&mut self) -> [&mut Vec<f32>; 2] {
        [&mut self.residual, &mut self.velocity]
    }

    /// Its size, to report when it is dropped with a rank that is lost.
    pub fn norm(&self) -> f64 {
        super::super::clip::norm(&[&self.residual])
    }

    pub fn clear(&mut self) {
        self.residual.fill(0.0);
        self.velocity.fill(0.0);
    }

    pub(super) fn fits(&self, other: &Own) -> bool {
        self.residual.len() == other.residual.len() && self.velocity.len() == other.velocity.len()
    }

    /// Adds what a rank that leaves has not sent; false, and nothing changed, if it is of another codec or
    /// size.
    pub fn absorb(&mut self, leaving: &Own) -> bool {
        if !self.fits(leaving) {
            return false;
        }
        let pairs = [
            (&mut self.residual, &leaving.residual),
            (&mut self.velocity, &leaving.velocity),
        ];
        for (to, from) in pairs {
            for (to, from) in to.iter_mut().zip(from) {
                *to += from;
            }
        }
        true
    }

    /// For this rank's part of a checkpoint.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = OWN.to_vec();
        put(&mut out, &self.residual);
        put(&mut out, &self.velocity);
        out
    }

    /// The inverse of [`encode`](Self::encode); `None` for anything else.
    pub fn decode(bytes: &[u8]) -> Option<Own> {
        let mut rest = bytes.strip_prefix(OWN)?;
        let own = Own {
            residual: take(&mut rest)?,
            velocity: take(&mut rest)?,
        };
        rest.is_empty().then_some(own)
    }
}

/// The parts of a world of another size: their sum stays what it was, but for rounding. `None` if they are
/// not all of one size, or there are none.
pub fn reshard(parts: &[Own], world: usize) -> Option<Vec<Own>> {
    let first = parts.first()?;
    let mut out = vec![Own::zero(first.residual.len(), first.velocity.len()); world.max(1)];
    for (i, part) in parts.iter().enumerate() {
        if !out[i % world.max(1)].absorb(part) {
            return None;
        }
    }
    Some(out)
}

/// Result of a step's reduction: the same bits on every rank, and all that a commit needs from others.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Reduced {
    /// The sum of all ranks' gradients, as the codec has it.
    pub sum: Vec<f32>,
    /// The next shared part of the state.
    pub(super) shared: Vec<f32>,
}

impl Reduced {
    /// For a survivor that lacks it.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = REDUCED.to_vec();
        put(&mut out, &self.sum);
        put(&mut out, &self.shared);
        out
    }

    /// The inverse of [`encode`](Self::encode); `None` for anything else.
    pub fn decode(bytes: &[u8]) -> Option<Reduced> {
        let mut rest = bytes.strip_prefix(REDUCED)?;
        let reduced = Reduced {
            sum: take(&mut rest)?,
            shared: take(&mut rest)?,
        };
        rest.is_empty().then_some(reduced)
    }
}

pub(super) fn encode_shared(shared: &[f32]) -> Vec<u8> {
    let mut out = SHARED.to_vec();
    put(&mut out, shared);
    out
}

pub(super) fn decode_shared(bytes: &[u8]) -> Option<Vec<f32>> {
    let mut rest = bytes.strip_prefix(SHARED)?;
    let shared = take(&mut rest)?;
    rest.is_empty().then_some(shared)
}
