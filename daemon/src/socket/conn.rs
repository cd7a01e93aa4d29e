//! One connection: a sender with a bounded queue and a task that drains it, and a receiver.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use muster_protocol::codec::{MAX_FRAME, with_length};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::time::{Instant, timeout_at};

use super::received::{self, Received};
use super::room::Places;
use super::{
    MAX_FDS, MAX_QUEUED_BYTES, MAX_QUEUED_FRAMES, Message, NoRoom, Peer, SocketError,
    WRITE_TIMEOUT, wire,
};

/// How soon descriptors are offered again to a peer that has not taken the connection yet.
const OFFERED_AGAIN: Duration = Duration::from_millis(5);

/// A connection; made by [`connect`], [`pair`] or [`Listener::accept`](super::Listener::accept).
#[derive(Debug)]
pub struct Conn {
    sender: Sender,
    receiver: Receiver,
}

/// The half that sends. Clones share one queue; the connection's sending side ends when the last
/// one is dropped and the queue is empty.
#[derive(Debug, Clone)]
pub struct Sender {
    queue: mpsc::Sender<Queued>,
    /// Counts bytes in the queue.
    room: Arc<Semaphore>,
    stream: Arc<Stream>,
    /// Changes to true when the writer has ended.
    ended: watch::Receiver<bool>,
}

/// The half that receives. [`recv`](Self::recv) may be cancelled at any await without losing
/// anything.
#[derive(Debug)]
pub struct Receiver {
    stream: Arc<Stream>,
    /// The frame that is being received: four bytes of length, then the frame.
    partial: Vec<u8>,
    /// How many bytes of `partial` have arrived.
    filled: usize,
    /// Descriptors that came with it, and its place.
    fds: Received,
    /// By when a frame that has a place must be whole: others wait for it.
    due: Option<Instant>,
    /// More came than could be taken in.
    lost: bool,
    failed: bool,
}

#[derive(Debug)]
struct Stream {
    socket: ManuallyDrop<UnixStream>,
    peer: Peer,
    /// Counts against the listener's limit for as long as either half lives, and what it left unread is not closed.
    permits: Vec<OwnedSemaphorePermit>,
    /// For descriptors of this peer that are neither kept nor closed yet.
    places: Places,
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: nobody uses it after this.
        let socket = unsafe { ManuallyDrop::take(&mut self.socket) };
        received::close(socket, std::mem::take(&mut self.permits));
    }
}

#[derive(Debug)]
struct Queued {
    bytes: Vec<u8>,
    /// Closed by a thread, whoever drops the last of them: they may be somebody else's.
    fds: Arc<Received>,
    _room: OwnedSemaphorePermit,
}

impl Conn {
    /// Must be called within a tokio runtime: the writer is a task.
    pub(super) fn new(
        socket: UnixStream,
        peer: Peer,
        permits: Vec<OwnedSemaphorePermit>,
        places: Places,
    ) -> Conn {
        // An urgent byte comes in its place then: the kernel would leave it out, and close what came with it, while the
        // bytes behind it are read. An error: this kernel has none.
        let _ = rustix::net::sockopt::set_socket_oobinline(&socket, true);
        let stream = Arc::new(Stream {
            socket: ManuallyDrop::new(socket),
            peer,
            permits,
            places,
        });
        let (queue, queued) = mpsc::channel(MAX_QUEUED_FRAMES);
        let (end, ended) = watch::channel(false);
        tokio::spawn(write_all(Arc::clone(&stream), queued, end));
        Conn {
            sender: Sender {
                queue,
                room: Arc::new(Semaphore::new(MAX_QUEUED_BYTES)),
                stream: Arc::clone(&stream),
                ended,
            },
            receiver: Receiver {
                stream,
                partial: vec![0; 4],
                filled: 0,
                fds: Received::default(),
                due: None,
                lost: false,
                failed: false,
            },
        }
    }

    pub fn peer(&self) -> Peer {
        self.sender.peer()
    }

    /// See [`Sender::send`].
    pub fn send(&self, frame: Vec<u8>, fds: Vec<OwnedFd>) -> Result<(), SocketError> {
        self.sender.send(frame, fds)
    }

    /// See [`Receiver::recv`].
    pub async fn recv(&mut self) -> Result<Option<Message>, SocketError> {
        self.receiver.recv().await
    }

    pub fn split(self) -> (Sender, Receiver) {
        (self.sender, self.receiver)
    }
}

impl Sender {
    pub fn peer(&self) -> Peer {
        self.stream.peer
    }

    /// Queues a frame (version byte and body, without its length) and its descriptors. Never
    /// waits; a peer whose queue is full is cut off. Descriptors are closed here once they are
    /// sent, or when this fails.
    pub fn send(&self, frame: Vec<u8>, fds: Vec<OwnedFd>) -> Result<(), SocketError> {
        self.send_shared(frame, Arc::new(fds.into()))
    }

    /// As [`send`](Self::send), of descriptors that others use too.
    pub fn send_shared(&self, frame: Vec<u8>, fds: Arc<Received>) -> Result<(), SocketError> {
        if frame.len() > MAX_FRAME {
            return Err(SocketError::TooLong { len: frame.len() });
        }
        if fds.len() > MAX_FDS {
            return Err(SocketError::TooManyFds);
        }
        let bytes = with_length(&frame);
        let queue_full = |_| {
            self.close();
            SocketError::QueueFull
        };
        let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.room)
            .try_acquire_many_owned(len)
            .map_err(queue_full)?;
        let message = Queued {
            bytes,
            fds,
            _room: room,
        };
        self.queue.try_send(message).map_err(|e| match e {
            mpsc::error::TrySendError::Full(_) => {
                self.close();
                SocketError::QueueFull
            }
            mpsc::error::TrySendError::Closed(_) => SocketError::Closed,
        })
    }

    /// Whether the peer has read all that was sent; a kernel that does not know counts as yes.
    pub fn is_read(&self) -> bool {
        let sent = self.room.available_permits() == MAX_QUEUED_BYTES;
        sent && wire::unread(self.stream.socket.as_fd()).unwrap_or(0) == 0
    }

    /// Closes both directions at once; what is queued is lost, and the peer reads the end.
    pub fn close(&self) {
        let _ = rustix::net::shutdown(&*self.stream.socket, rustix::net::Shutdown::Both);
    }

    /// Closes both directions once what is queued has been sent, or could not be sent in time.
    pub async fn close_when_sent(self) {
        let all = u32::try_from(MAX_QUEUED_BYTES).unwrap_or(u32::MAX);
        // All room is free when nothing is queued; an error is impossible, for nobody closes it.
        let _sent = self.room.acquire_many(all).await;
        self.close();
    }

    /// Waits until everything that was queued has been taken by the peer's socket, then ends the
    /// sending side; for a program that is about to exit. Other clones must be dropped before.
    pub async fn finish(self) {
        let Sender {
            queue, mut ended, ..
        } = self;
        drop(queue);
        // An error means that the writer is gone, which is what is waited for.
        let _ = ended.wait_for(|done| *done).await;
    }
}

impl Receiver {
    pub fn peer(&self) -> Peer {
        self.stream.peer
    }

    /// The next frame and its descriptors, or `None` when the peer closed the connection between
    /// two frames. After an error every call answers [`SocketError::Closed`].
    pub async fn recv(&mut self) -> Result<Option<Message>, SocketError> {
        if self.failed {
            return Err(SocketError::Closed);
        }
        let result = self.next().await;
        if result.is_err() {
            self.failed = true;
            self.fds = Received::default();
            let _ = rustix::net::shutdown(&*self.stream.socket, rustix::net::Shutdown::Both);
        }
        result
    }

    /// Reads never go beyond the frame, so that descriptors that arrive belong to it. They are seen before they are
    /// taken: only where some lie there is a place waited for, and a frame that has one waits no more.
    async fn next(&mut self) -> Result<Option<Message>, SocketError> {
        loop {
            if self.filled == self.partial.len() {
                let (head, frame) = self
                    .partial
                    .split_first_chunk::<4>()
                    .ok_or(SocketError::Truncated)?;
                let len = u32::from_le_bytes(*head) as usize;
                if len > MAX_FRAME {
                    return Err(SocketError::TooLong { len });
                }
                if frame.len() == len {
                    let frame = frame.to_vec();
                    self.partial = vec![0; 4];
                    self.filled = 0;
                    let mut fds = std::mem::take(&mut self.fds);
                    fds.complete();
                    self.due = None;
                    let fds = match std::mem::take(&mut self.lost) {
                        true => Err(NoRoom),
                        false => Ok(fds),
                    };
                    return Ok(Some((frame, fds)));
                }
                self.partial.resize(4 + len, 0);
            }
            let stream = &*self.stream;
            let readable = stream.socket.readable();
            match self.due {
                None => readable.await?,
                Some(due) => timeout_at(due, readable)
                    .await
                    .map_err(|_| SocketError::Unfinished)??,
            }
            let rest = &mut self.partial[self.filled..];
            let seen = stream.socket.try_io(Interest::READABLE, || {
                wire::look(stream.socket.as_fd(), rest)
            });
            let seen = match seen {
                Ok(seen) => seen,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
                // A peer that was killed may reset the connection instead of ending it.
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset && self.filled == 0 => {
                    return Ok(None);
                }
                Err(e) => return Err(e.into()),
            };
            match (seen.bytes, self.filled) {
                (0, 0) => return Ok(None),
                (0, _) => return Err(SocketError::Truncated),
                _ => {}
            }
            if seen.descriptors && !self.fds.has_place() {
                self.fds.occupy(stream.places.take().await);
                self.due = Some(Instant::now() + WRITE_TIMEOUT);
            }
            let got = wire::receive(stream.socket.as_fd(), &mut rest[..seen.bytes])?;
            let begun = self.filled > 0;
            self.filled += got.bytes;
            self.lost |= got.lost;
            if !got.fds.is_empty() {
                self.fds.arriving().extend(got.fds);
                // One place is for one message of the kernel's.
                if begun {
                    return Err(SocketError::LateFds);
                }
                if self.fds.len() > MAX_FDS {
                    return Err(SocketError::TooManyFds);
                }
            }
        }
    }
}

/// Sends what is queued until the queue ends or the peer does not take it.
async fn write_all(
    stream: Arc<Stream>,
    mut queued: mpsc::Receiver<Queued>,
    end: watch::Sender<bool>,
) {
    while let Some(message) = queued.recv().await {
        let written = tokio::time::timeout(WRITE_TIMEOUT, write_one(&stream.socket, message)).await;
        let error = match written {
            Ok(Ok(())) => continue,
            Ok(Err(e)) => SocketError::Io(e),
            Err(_) => SocketError::WriteTimeout,
        };
        tracing::debug!(peer = ?stream.peer, %error, "closing a local connection");
        let _ = rustix::net::shutdown(&*stream.socket, rustix::net::Shutdown::Both);
        break;
    }
    let _ = rustix::net::shutdown(&*stream.socket, rustix::net::Shutdown::Write);
    end.send_replace(true);
}

async fn write_one(socket: &UnixStream, mut message: Queued) -> io::Result<()> {
    let mut sent = 0;
    while sent < message.bytes.len() {
        let once = socket.async_io(Interest::WRITABLE, || {
            wire::send(socket.as_fd(), &message.bytes[sent..], &message.fds)
        });
        match once.await {
            Ok(more) => {
                sent += more;
                // They went with the first byte.
                message.fds = Arc::default();
            }
            // A listener bars descriptors until it has taken the connection. Whoever waits here has a limit.
            Err(e) if barred(&e) && !message.fds.is_empty() => {
                tokio::time::sleep(OFFERED_AGAIN).await;
            }
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

fn barred(error: &io::Error) -> bool {
    error.raw_os_error() == Some(rustix::io::Errno::PERM.raw_os_error())
}

pub(super) fn credentials(socket: &UnixStream) -> io::Result<Peer> {
    let cred = socket.peer_cred()?;
    Ok(Peer {
        pid: cred.pid().unwrap_or(0),
        uid: cred.uid(),
        gid: cred.gid(),
    })
}

/// Connects to an agent's socket.
pub async fn connect(path: &Path) -> Result<Conn, SocketError> {
    let socket = UnixStream::connect(path)
        .await
        .map_err(|source| SocketError::Path {
            doing: "connecting to",
            path: path.to_owned(),
            source,
        })?;
    alone(socket)
}

/// Two ends of one connection inside this process, for an agent that is embedded in a launcher.
pub fn pair() -> Result<(Conn, Conn), SocketError> {
    let (a, b) = UnixStream::pair()?;
    Ok((alone(a)?, alone(b)?))
}

/// A connection that counts for nobody.
fn alone(socket: UnixStream) -> Result<Conn, SocketError> {
    let peer = credentials(&socket)?;
    Ok(Conn::new(socket, peer, Vec::new(), Places::alone()))
}
