//! Stripes as they arrive, each added to those of other nodes, and pieces of parity as they are read.

use std::io;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use muster_checkpoint::sum::{CHUNK, crc};
use muster_protocol::Digest;
use muster_protocol::memory::parity::{Part, Stripe};
use muster_protocol::memory::{Answer, Name};
use muster_runtime::memory::{Link, SOON, time_for};

use super::choice::Choice;
use super::freeing::Freeing;
use super::parities::Of;
use super::serve::lock;
use super::shelf::{Folding, Shelf};

/// How long who brings a stripe waits for memory that is given back before its own is made.
pub(super) const SETTLES: Duration = Duration::from_secs(1);

/// A stripe that another launcher brings.
pub(super) struct Brought {
    pub(super) generation: Digest,
    pub(super) name: Name,
    pub(super) bytes: u64,
    pub(super) local: u16,
    pub(super) stripe: Stripe,
    /// Over how many nodes its launcher wants parity, and what people call that one's node.
    pub(super) over: u8,
    pub(super) who: String,
}

/// Adds it up, chunk by chunk: what was added before it breaks off is not brought again. `tell` names the sender to
/// people when something is wrong with that, and when nothing is any more.
pub(super) fn fold(
    link: &mut Link,
    shelf: &Mutex<Shelf>,
    freeing: &Freeing,
    brought: Brought,
    tell: impl Fn(&str, Option<String>),
) -> io::Result<()> {
    let Brought {
        generation,
        name,
        bytes,
        local,
        stripe,
        over,
        who,
    } = brought;
    let part = Part {
        file: name.file.clone(),
        bytes,
        stripe,
    };
    let answer = lock(shelf).fold(generation, &name, local, over, part);
    let (of, from) = match answer {
        Folding::From(of, from) => (of, from),
        Folding::Have => return link.say(&Answer::Have),
        Folding::NoRoom(room) => return link.say(&Answer::NoRoom { room }),
        Folding::OtherOver(here) => {
            let (here, there) = (Choice::Parity(here), Choice::Parity(over));
            tell(
                &who,
                Some(format!(
                    "{who} was started with --replicas {there}, this node with {here}: they hold no parity of each other; give all nodes the same"
                )),
            );
            let why = format!(
                "that node was started with --replicas {here}, {who} with {there}: give all nodes the same"
            );
            return link.say(&Answer::Refused { why });
        }
        Folding::Refused(why) => return link.say(&Answer::Refused { why: why.into() }),
    };
    freeing.settle(SETTLES);
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
            let file = &name.file;
            tell(
                &who,
                Some(format!(
                    "chunk {chunk} of {file}, which {who} sends for parity, is not as it was sealed when it arrives: it is not taken"
                )),
            );
            link.say(&Answer::Damaged { chunk })?;
            // More of it is on the way: this connection is of no use any more.
            return Err(io::ErrorKind::InvalidData.into());
        }
        add(shelf, of, piece, chunk)?;
    }
    tell(&who, None);
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
