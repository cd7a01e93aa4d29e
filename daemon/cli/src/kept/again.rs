//! A second look at a checkpoint. It begins with what somebody found damaged, waits a while for a store that is away,
//! and ends early where nobody wants to know any more.

use std::io;
use std::ops::ControlFlow;
use std::time::Duration;

use muster_checkpoint::hex::Id;
use muster_checkpoint::load::LoadError;
use muster_checkpoint::newest::Shelf;
use muster_checkpoint::source::{Readers, Source};
use muster_checkpoint::verify::{Depth, Spot, verify_watched};
use muster_protocol::checkpoint::State;
use muster_protocol::local::{Question, short};

use super::look::found;
use super::{Folder, Unknown, manifest_of, words};

/// How long a store that does not answer is tried again, in all, and the first pause, which doubles.
const PATIENCE: Duration = Duration::from_secs(60);
const PAUSE: Duration = Duration::from_secs(1);

/// The party that asks for the look.
pub trait Asker: Sync {
    /// Takes in that the look is further; whether it goes on.
    fn goes_on(&self, done: u64) -> ControlFlow<()>;

    /// Waits; whether it goes on.
    fn pause(&self, time: Duration) -> ControlFlow<()>;
}

/// Looks at what was asked for. None: nobody wants to know.
pub fn look_again(
    place: &Folder,
    question: &Question,
    threads: usize,
    asker: &impl Asker,
) -> Option<State> {
    let depth = match question.all {
        true => Depth::Everything { threads },
        false => Depth::Sizes,
    };
    // What says that it is a store may be away with it.
    let open = || {
        place.open().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => io::Error::other(error),
            _ => error,
        })
    };
    let looked = patiently(asker, open)
        .map_err(Unknown::Store)
        .and_then(|shelf| look(&shelf, question, depth, asker))
        .and_then(|state| match state {
            // A store that went away meanwhile has damaged nothing.
            Some(State::Damaged { .. }) => patiently(asker, open)
                .map_err(Unknown::Store)
                .map(|_| state),
            state => Ok(state),
        });
    let state = looked.unwrap_or_else(|error| {
        let why = short(words(&error));
        Some(State::Unreadable { why })
    });
    state.filter(|_| asker.goes_on(0).is_continue())
}

fn look(
    shelf: &impl Shelf,
    question: &Question,
    depth: Depth,
    asker: &impl Asker,
) -> Result<Option<State>, Unknown> {
    let shelf = Patient { shelf, asker };
    let manifest = match manifest_of(&shelf, question.manifest)? {
        Ok(manifest) => manifest,
        Err(why) => return Ok(Some(State::Damaged { why })),
    };
    let first = Spot::named(&manifest, &question.why);
    let go_on = |done| asker.goes_on(done);
    match verify_watched(&manifest, &shelf, depth, first, &go_on) {
        Err(LoadError::Stopped) => Ok(None),
        looked => found(looked, depth).map(Some),
    }
}

/// A shelf that is tried again while it does not answer.
struct Patient<'a, S, A> {
    shelf: &'a S,
    asker: &'a A,
}

impl<S: Shelf, A: Asker> Source for Patient<'_, S, A> {
    fn size(&self, path: &str) -> io::Result<u64> {
        patiently(self.asker, || self.shelf.size(path))
    }

    fn read(&self, path: &str, at: u64, into: &mut [u8], readers: Readers) -> io::Result<()> {
        patiently(self.asker, || self.shelf.read(path, at, into, readers))
    }

    fn refuse(&self, path: &str, at: u64) -> bool {
        self.shelf.refuse(path, at)
    }
}

impl<S: Shelf, A: Asker> Shelf for Patient<'_, S, A> {
    fn list(&self) -> io::Result<Vec<Id>> {
        patiently(self.asker, || self.shelf.list())
    }

    fn manifest(&self, digest: Id) -> io::Result<Vec<u8>> {
        patiently(self.asker, || self.shelf.manifest(digest))
    }
}

fn patiently<T>(asker: &impl Asker, mut once: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let (mut pause, mut left) = (PAUSE, PATIENCE);
    loop {
        let error = match once() {
            Err(error) if may_pass(&error) && !left.is_zero() => error,
            settled => return settled,
        };
        let time = pause.min(left);
        if asker.pause(time).is_break() {
            return Err(error);
        }
        (pause, left) = (2 * pause, left - time);
    }
}

/// Whether the same may succeed later: not where there is an answer.
fn may_pass(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        io::ErrorKind::NotFound
            | io::ErrorKind::UnexpectedEof
            | io::ErrorKind::PermissionDenied
            | io::ErrorKind::InvalidData
            | io::ErrorKind::InvalidInput
            | io::ErrorKind::OutOfMemory
    )
}

#[cfg(test)]
mod tests;
