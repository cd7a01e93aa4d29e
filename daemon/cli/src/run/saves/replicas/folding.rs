//! Stripes as they arrive, each added to those of other nodes, and pieces of parity as they are read.

use std::io;
use std::sync::Mutex;
use std::time::Instant;

use muster_checkpoint::sum::{CHUNK, crc};
use muster_protocol::Digest;
use muster_protocol::memory::parity::{Part, Stripe};
use muster_protocol::memory::{Answer, Name};
use muster_runtime::memory::{Link, SOON, time_for};

use super::parities::Of;
use super::serve::lock;
use super::shelf::{Folding, Shelf};

/// A stripe that another launcher brings.
pub(super) struct Brought {
    pub(super) generation: Digest,
    pub(super) name: Name,
    pub(super) bytes: u64,
    pub(super) local: u16,
    pub(super) stripe: Stripe,
}

/// Adds it up, chunk by chunk: what was added before it breaks off is not brought again.
pub(super) fn fold(link: &mut Link, shelf: &Mutex<Shelf>, brought: Brought) -> io::Result<()> {
    let Brought {
        generation,
        name,
        bytes,
        local,
        stripe,
    } = brought;
    let part = Part {
        file: name.file.clone(),
        bytes,
        stripe,
    };
    let answer = lock(shelf).fold(generation, &name, local, part);
    let (of, from) = match answer {
        Folding::From(of, from) => (of, from),
        Folding::Have => return link.say(&Answer::Have),
        Folding::NoRoom(room) => return link.say(&Answer::NoRoom { room }),
        Folding::Refused(why) => return link.say(&Answer::Refused { why: why.into() }),
    };
    link.say(&Answer::GoFrom { piece: from })?;
    let mut buffer = vec![0; CHUNK as usize];
    for piece in from..stripe.pieces(bytes) {
        let range = stripe.range(piece, bytes);
        let length = range.end - range.start;
        let chunk = buffer.get_mut(..length as usize);
        let chunk = chunk.ok_or(io::ErrorKind::InvalidData)?;
        link.read(chunk, Instant::now() + time_for(length))?;
        let mut sum = [0; 8];
        link.read(&mut sum, Instant::now() + SOON)?;
        if crc(chunk) != u64::from_le_bytes(sum) {
            let chunk = stripe.chunk(piece);
            link.say(&Answer::Damaged { chunk })?;
            // More of it is on the way: this connection is of no use any more.
            return Err(io::ErrorKind::InvalidData.into());
        }
        add(shelf, of, piece, chunk)?;
    }
    link.say(&Answer::Kept)
}

/// Adds a chunk that is as it was sealed, unless its parity was given up meanwhile.
fn add(shelf: &Mutex<Shelf>, of: Of, piece: u32, chunk: &[u8]) -> io::Result<()> {
    let held = lock(shelf).piece(of.number, piece);
    let held = held.ok_or(io::ErrorKind::NotFound)?;
    let added = lock(&held).add(of.part, chunk);
    added.map_err(|_| io::Error::from(io::ErrorKind::ResourceBusy))?;
    lock(shelf).folded(of, piece + 1);
    Ok(())
}

/// Gives the first bytes of a piece, and says what is in it.
pub(super) fn unfold(
    link: &mut Link,
    shelf: &Mutex<Shelf>,
    of: Of,
    piece: u32,
    len: u32,
) -> io::Result<()> {
    let held = lock(shelf).piece(of.number, piece);
    let with = held.and_then(|held| lock(&held).with(of.part));
    let Some((bytes, parts)) = with else {
        return link.say(&Answer::Gone);
    };
    let bytes = bytes
        .get(..len as usize)
        .ok_or(io::ErrorKind::InvalidData)?;
    link.say(&Answer::Folded { parts })?;
    link.write(bytes, Instant::now() + time_for(len.into()))
}
