//! Memory that a copy is written into as it comes.

use std::any::Any;
use std::io::{self, IoSliceMut, Read};
use std::net::TcpStream;

use twox_hash::XxHash3_128;

use super::{CHUNK, Digest, digest_of};

/// Bytes of one part of a copy.
pub(super) const PART: u64 = 4 << 20;
/// Places that are filled by one read.
const AT_ONCE: usize = 64;

/// Memory that a copy is written into, straight from the sockets: that of the model itself, so that nothing is
/// allocated and nothing copied again ([`Training::landing`](crate::live::Training::landing)).
pub trait Landing: Any + Send {
    /// Places for `total` bytes, in their order and together exactly as long; `None`, if this cannot hold a thing
    /// of that length. Called on a thread of the copy's own, and again for each attempt.
    fn places(&mut self, total: usize) -> Option<Vec<&mut [u8]>>;
}

/// Memory of one piece, allocated once the length is known.
impl Landing for Vec<u8> {
    fn places(&mut self, total: usize) -> Option<Vec<&mut [u8]>> {
        if self.len() != total {
            // That there is too little is an error here and not the end of the process. The pages come as they
            // are written.
            Vec::<u8>::new().try_reserve_exact(total).ok()?;
            *self = vec![0; total];
        }
        Some(vec![self])
    }
}

/// A part's place in the whole, and where it is to be written.
pub(super) struct Part<'a> {
    pub(super) from: u64,
    pub(super) len: u64,
    /// None is longer than [`CHUNK`], and none empty.
    to: Vec<&'a mut [u8]>,
}

/// Parts of these places, which together are so long; `None`, if they are not.
pub(super) fn cut(places: Vec<&mut [u8]>, total: u64) -> Option<Vec<Part<'_>>> {
    let (mut parts, mut from, mut len, mut to) = (Vec::new(), 0, 0, Vec::new());
    for mut place in places {
        while !place.is_empty() {
            let now = place.len().min(CHUNK).min((PART - len) as usize);
            let (chunk, rest) = place.split_at_mut(now);
            to.push(chunk);
            place = rest;
            len += now as u64;
            if len == PART {
                let to = std::mem::take(&mut to);
                parts.push(Part { from, len, to });
                (from, len) = (from + len, 0);
            }
        }
    }
    if len > 0 {
        parts.push(Part { from, len, to });
    }
    (from + len == total).then_some(parts)
}

impl Part<'_> {
    /// Writes what comes to where it is to stay; its digest. Each chunk is hashed while it is in the cache.
    pub(super) fn receive(&mut self, stream: &mut TcpStream) -> io::Result<Digest> {
        let (mut hashed, mut left) = (XxHash3_128::new(), &mut self.to[..]);
        while !left.is_empty() {
            let mut bytes = 0;
            let mut fits = |place: &&mut [u8]| {
                bytes += place.len();
                bytes <= CHUNK
            };
            // At least one: none is longer than a chunk.
            let count = left
                .iter()
                .take(AT_ONCE)
                .take_while(|place| fits(place))
                .count();
            let (now, rest) = left.split_at_mut(count);
            fill(stream, now)?;
            now.iter().for_each(|place| hashed.write(place));
            left = rest;
        }
        Ok(digest_of(&hashed))
    }
}

fn fill(stream: &mut TcpStream, places: &mut [&mut [u8]]) -> io::Result<()> {
    if let [place] = places {
        return stream.read_exact(place);
    }
    let mut slices: Vec<IoSliceMut<'_>> = places.iter_mut().map(|p| IoSliceMut::new(p)).collect();
    let mut left = &mut slices[..];
    while !left.is_empty() {
        match stream.read_vectored(left) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(got) => IoSliceMut::advance_slices(&mut left, got),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_places_in_order() {
        let lens = [0, 1, CHUNK - 1, 3, PART as usize + 5, 2, 2 * CHUNK];
        let mut memory: Vec<Vec<u8>> = lens.iter().map(|len| vec![0; *len]).collect();
        let total = lens.iter().sum::<usize>() as u64;
        for wrong in [0, total - 1, total + 1] {
            let places = memory.iter_mut().map(Vec::as_mut_slice).collect();
            assert!(cut(places, wrong).is_none());
        }
        let places = memory.iter_mut().map(Vec::as_mut_slice).collect();
        let (mut at, mut number) = (0, 0u64);
        for part in cut(places, total).unwrap() {
            assert_eq!(part.from, at);
            assert_eq!(part.len, PART.min(total - at), "only the last is shorter");
            assert!(
                part.to
                    .iter()
                    .all(|place| (1..=CHUNK).contains(&place.len()))
            );
            for byte in part.to.into_iter().flatten() {
                *byte = (number % 251) as u8;
                number += 1;
            }
            at += part.len;
        }
        assert_eq!(at, total);
        let all = memory.concat();
        assert!((0..total).all(|i| all[i as usize] == (i % 251) as u8));
    }
}
