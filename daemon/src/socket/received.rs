//! Descriptors that came from somebody else. A thread that closes a file's last one waits for as long as the file
//! wants: a file system in user space that does not answer, a connection that lingers, a terminal that drains, the
//! pages of much memory. So they are closed by threads, never by the one that reads the socket or writes to it; and
//! of a connection, or a user, that has many that are not closed yet no more are taken in
//! ([`Room`](super::room::Room)).

use std::collections::VecDeque;
use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use rustix::io::ioctl_fionread;
use rustix::net::{Shutdown, shutdown};
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;

use super::room::Place;
use super::wire;

/// Unread bytes that are looked through for descriptors, before a thread is started for them.
const LOOKED_THROUGH: u64 = 64 << 10;

/// Descriptors that arrived with a frame. Those that nobody keeps are closed by a thread.
#[derive(Debug, Default)]
pub struct Received {
    fds: Vec<OwnedFd>,
    /// Counts among those of their sender until they are closed or kept.
    place: Option<Place>,
}

impl Received {
    /// They are of use here: from now on they are the receiver's own.
    pub fn keep(mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.fds)
    }

    /// They stay as they are, but are their sender's no more.
    pub fn settle(&mut self) {
        self.place = None;
    }

    pub(super) fn arriving(&mut self) -> &mut Vec<OwnedFd> {
        &mut self.fds
    }

    pub(super) fn has_place(&self) -> bool {
        self.place.is_some()
    }

    pub(super) fn occupy(&mut self, place: Place) {
        self.place = Some(place);
    }

    /// No more arrive: what these need not of their place is given back.
    pub(super) fn complete(&mut self) {
        match &mut self.place {
            Some(place) if !self.fds.is_empty() => place.shrink(self.fds.len()),
            _ => self.place = None,
        }
    }
}

impl From<Vec<OwnedFd>> for Received {
    fn from(fds: Vec<OwnedFd>) -> Received {
        Received { fds, place: None }
    }
}

impl Deref for Received {
    type Target = [OwnedFd];

    fn deref(&self) -> &[OwnedFd] {
        &self.fds
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        if !self.fds.is_empty() {
            self.complete();
            let (fds, place) = (std::mem::take(&mut self.fds), self.place.take());
            by_thread(move || {
                drop(fds);
                drop(place);
            });
        }
    }
}

type Close = Box<dyn FnOnce() + Send>;

/// Descriptors to be closed, by whichever thread comes to them.
static TO_CLOSE: Mutex<VecDeque<Close>> = Mutex::new(VecDeque::new());

/// Whether there is one. Without a thread what it was to close stays open until there is one again: descriptors less
/// are better than an agent that stands still.
pub(super) fn by_thread(close: impl FnOnce() + Send + 'static) -> bool {
    let queue = || TO_CLOSE.lock().unwrap_or_else(PoisonError::into_inner);
    queue().push_back(Box::new(close));
    let run = move || {
        // One at a time: each may take as long as it wants, and others come to the rest.
        while let Some(close) = { queue().pop_front() } {
            close();
        }
    };
    let thread = std::thread::Builder::new().name("close".into());
    match thread.spawn(run) {
        Ok(_) => true,
        Err(error) => {
            tracing::error!(%error, "no thread to close a descriptor, which stays open until there is one");
            false
        }
    }
}

/// Data that was sent on a socket and not read.
#[derive(Debug)]
pub(super) enum Left {
    /// The socket is closed.
    Nothing,
    /// It goes with this, and with it the descriptors that lie there.
    Something(OwnedFd),
}

/// Ends a connection, and closes it if nobody can have to wait for that.
pub(super) fn left_in(stream: UnixStream) -> Left {
    // Nothing comes any more.
    let _ = shutdown(&stream, Shutdown::Both);
    if holds_no_descriptors(&stream) {
        return Left::Nothing;
    }
    match stream.into_std() {
        Ok(stream) => Left::Something(stream.into()),
        Err(_) => Left::Nothing,
    }
}

fn holds_no_descriptors(socket: impl AsFd) -> bool {
    match ioctl_fionread(&socket) {
        Ok(0) => true,
        Ok(unread) if unread <= LOOKED_THROUGH => {
            let mut bytes = vec![0; usize::try_from(unread).unwrap_or(0)];
            let seen = wire::look(socket.as_fd(), &mut bytes);
            seen.is_ok_and(|seen| seen.bytes == bytes.len() && !seen.descriptors)
        }
        _ => false,
    }
}

/// Closes a connection, whose places are taken until then: no user has more threads for this than connections.
pub(super) fn close(stream: UnixStream, places: Vec<OwnedSemaphorePermit>) {
    if let Left::Something(fd) = left_in(stream) {
        by_thread(move || {
            drop(fd);
            drop(places);
        });
    }
}

#[cfg(test)]
mod tests;
