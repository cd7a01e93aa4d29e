//! Collectives of bytes whose number only the sender knows, for small things beside the tensors.

use super::error::GroupError;
use super::{Group, MAX_PAYLOAD};

impl Group {
    /// Broadcasts the bytes that `root` gives to every rank. Only `root`'s `payload` matters.
    ///
    /// # Errors
    /// A peer is lost or out of step, or the payload is longer than [`MAX_PAYLOAD`].
    pub fn broadcast_bytes(&mut self, root: u32, payload: &[u8]) -> Result<Vec<u8>, GroupError> {
        let own = if root == self.rank { payload } else { &[] };
        fits(own.len(), MAX_PAYLOAD)?;
        let mut len = [0u64];
        self.broadcast(root, &[own.len() as u64], &mut len)?;
        let mut out = vec![0; self.said(root, len[0], MAX_PAYLOAD)?];
        self.broadcast(root, own, &mut out)?;
        Ok(out)
    }

    /// Every rank's bytes, in the order of ranks, on every rank. All together are at most
    /// [`MAX_PAYLOAD`].
    ///
    /// # Errors
    /// A peer is lost or out of step, or the bytes are too many.
    pub fn all_gather_bytes(&mut self, payload: &[u8]) -> Result<Vec<Vec<u8>>, GroupError> {
        let most = MAX_PAYLOAD / self.world as usize;
        fits(payload.len(), most)?;
        let mut lens = vec![0u64; self.world as usize];
        self.all_gather(&[payload.len() as u64], &mut lens)?;
        let mut counts = Vec::with_capacity(lens.len());
        for (rank, len) in (0..).zip(lens) {
            counts.push(self.said(rank, len, most)?);
        }
        let mut all = vec![0; counts.iter().sum()];
        self.all_gather_uneven(payload, &counts, &mut all)?;
        let mut rest = &all[..];
        let mut parts = Vec::with_capacity(counts.len());
        for count in counts {
            let (part, after) = rest.split_at(count);
            parts.push(part.to_vec());
            rest = after;
        }
        Ok(parts)
    }

    /// A length that a rank has sent, if it may be.
    fn said(&mut self, rank: u32, len: u64, most: usize) -> Result<usize, GroupError> {
        match usize::try_from(len) {
            Ok(len) if len <= most => Ok(len),
            _ => Err(self.end(super::Over::Protocol(rank, "a length over the limit"))),
        }
    }
}

fn fits(bytes: usize, limit: usize) -> Result<(), GroupError> {
    if bytes > limit {
        return Err(GroupError::TooLarge { bytes, limit });
    }
    Ok(())
}
