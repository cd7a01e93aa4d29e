//! Descriptors that came from somebody else. Whoever closes a file's last one waits for as long as the file wants: a file
//! system in user space that does not answer, a connection that lingers, a terminal that drains, the pages of much memory.
//! So they are closed by threads, never by who reads the socket; and of a user who has many that are not closed yet nothing
//! more is read.

use std::ops::Deref;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::ioctl_fionread;
use tokio::net::UnixStream;
use tokio::sync::OwnedSemaphorePermit;

/// Descriptors that arrived with a frame. Those that nobody keeps are closed by a thread.
#[derive(Debug, Default)]
pub struct Received {
    fds: Vec<OwnedFd>,
    /// Counts among those of their sender until they are closed or kept.
    place: Option<OwnedSemaphorePermit>,
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

    /// Takes the place, where there is anything to take it for.
    pub(super) fn occupy(&mut self, place: Option<OwnedSemaphorePermit>) {
        if !self.fds.is_empty() && self.place.is_none() {
            self.place = place;
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
            let (fds, place) = (std::mem::take(&mut self.fds), self.place.take());
            by_thread(move || {
                drop(fds);
                drop(place);
            });
        }
    }
}

/// Without a thread what it was to close stays open: a descriptor less is better than an agent that stands still.
fn by_thread(close: impl FnOnce() + Send + 'static) {
    let close = Arc::new(Mutex::new(Some(close)));
    let for_thread = Arc::clone(&close);
    let run = move || {
        let close = for_thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        close.map(|close| close())
    };
    let thread = std::thread::Builder::new().name("close".into());
    if let Err(error) = thread.spawn(run) {
        tracing::error!(%error, "no thread to close a descriptor, which stays open");
        std::mem::forget(close);
    }
}

/// What was sent on a socket and not read goes with its last descriptor, and with it the descriptors that lie there. Where
/// there is something, a thread has the last one: it closes that once the answer is dropped, which is to be done when the
/// socket is closed here. The connection's places are taken until then, so that no user has more of these threads than
/// connections.
pub(super) fn last_elsewhere(
    socket: impl AsFd,
    places: Vec<OwnedSemaphorePermit>,
) -> Option<Sender<()>> {
    // Nothing comes any more.
    let _ = rustix::net::shutdown(&socket, rustix::net::Shutdown::Both);
    if ioctl_fionread(&socket).is_ok_and(|unread| unread == 0) {
        return None;
    }
    let last = socket.as_fd().try_clone_to_owned().ok()?;
    let (open, closed) = channel();
    by_thread(move || {
        // An error: it is dropped.
        let _closed = closed.recv();
        drop(last);
        drop(places);
    });
    Some(open)
}

/// Closes a connection that is not taken.
pub(super) fn close(stream: UnixStream) {
    let open = last_elsewhere(&stream, Vec::new());
    drop(stream);
    drop(open);
}

#[cfg(test)]
mod tests;
