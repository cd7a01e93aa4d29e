//! Fields of bytes, one after the other.

use crate::gradient::compress::Reduced;

use super::model::Measured;

pub(super) fn put_word(out: &mut Vec<u8>, word: u64) {
    out.extend_from_slice(&word.to_le_bytes());
}

pub(super) fn put_float(out: &mut Vec<u8>, value: f64) {
    put_word(out, value.to_bits());
}

/// The number of bytes, then the bytes.
pub(super) fn put(out: &mut Vec<u8>, bytes: &[u8]) {
    put_word(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

pub(super) fn put_measured(out: &mut Vec<u8>, measured: &Measured) {
    put_float(out, measured.loss);
    put_word(out, measured.samples);
    put_word(out, measured.extra.len() as u64);
    for value in &measured.extra {
        put_float(out, *value);
    }
}

/// Takes fields off the front of bytes; `None` where there are too few.
#[derive(Debug)]
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn word(&mut self) -> Option<u64> {
        let (word, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_le_bytes(*word))
    }

    pub(super) fn float(&mut self) -> Option<f64> {
        self.word().map(f64::from_bits)
    }

    pub(super) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.word()?).ok()?;
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }

    /// A number of things that take at least a byte each.
    pub(super) fn count(&mut self) -> Option<usize> {
        let count = usize::try_from(self.word()?).ok()?;
        (count <= self.0.len()).then_some(count)
    }

    pub(super) fn measured(&mut self) -> Option<Measured> {
        let (loss, samples) = (self.float()?, self.word()?);
        let count = self.count()?;
        let extra = (0..count).map(|_| self.float()).collect::<Option<_>>()?;
        Some(Measured {
            loss,
            samples,
            extra,
        })
    }

    pub(super) fn reduced(&mut self) -> Option<Reduced> {
        Reduced::decode(self.bytes()?)
    }

    /// Nothing is left.
    pub(super) fn end(self) -> Option<()> {
        self.0.is_empty().then_some(())
    }
}
