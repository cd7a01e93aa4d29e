//! Frames that wait to be written to each peer, bounded in bytes.

use std::{
    collections::BTreeMap,
    fmt,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use libp2p::swarm::ConnectionId;
use muster_protocol::{NodeId, codec::MAX_FRAME};
use tokio::sync::{mpsc, watch};

use super::{Gone, SendError};

/// Cost of one waiting frame beyond its own bytes.
const OVERHEAD: usize = 64;

/// Something to write to a peer.
#[derive(Debug)]
pub(super) enum Frame {
    Message(Vec<u8>),
    /// Addresses of other peers, encoded.
    Peers(Vec<u8>),
    /// Nothing follows: the connection is closed once everything before it is written.
    Bye,
}

impl Frame {
    fn cost(&self) -> usize {
        OVERHEAD
            + match self {
                Frame::Message(bytes) | Frame::Peers(bytes) => bytes.len(),
                Frame::Bye => 0,
            }
    }
}

/// The writing end of one connection's queue.
#[derive(Debug, Clone)]
pub(super) struct Queue {
    frames: mpsc::UnboundedSender<Frame>,
    room: Arc<AtomicUsize>,
    end: watch::Sender<Option<Gone>>,
}

/// The reading end.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) frames: mpsc::UnboundedReceiver<Frame>,
    room: Arc<AtomicUsize>,
}

/// A queue of at most `bytes` bytes. Overflow ends the connection through `end`.
pub(super) fn queue(bytes: usize, end: watch::Sender<Option<Gone>>) -> (Queue, Waiting) {
    // The channel itself knows no limit; `room` is what bounds it.
    let (frames, waiting) = mpsc::unbounded_channel();
    let room = Arc::new(AtomicUsize::new(bytes));
    let queue = Queue {
        frames,
        room: room.clone(),
        end,
    };
    (
        queue,
        Waiting {
            frames: waiting,
            room,
        },
    )
}

impl Queue {
    /// Never blocks. A frame that finds no room ends the connection: a control message that is
    /// dropped from the middle would be worse than a connection that is seen to be lost.
    pub(super) fn push(&self, frame: Frame) -> Result<(), SendError> {
        let cost = frame.cost();
        let took = self
            .room
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |room| {
                room.checked_sub(cost)
            });
        if took.is_err() {
            self.end.send_replace(Some(Gone::Overflow));
            return Err(SendError::Overflow);
        }
        self.frames.send(frame).map_err(|_| SendError::NotConnected)
    }
}

impl Waiting {
    /// The frame has been written: its room is free again.
    pub(super) fn written(&self, frame: &Frame) {
        self.room.fetch_add(frame.cost(), Ordering::AcqRel);
    }
}

/// State that the agent's loop and the connections' tasks both see. Each lock is held for one look-up or
/// one change of a small map, never across an await; so sending is one step, with no task between
/// the agent's loop and the connection.
#[derive(Default)]
pub(super) struct Shared {
    queues: Mutex<BTreeMap<NodeId, (ConnectionId, Queue)>>,
    listening: Mutex<Vec<SocketAddr>>,
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Shared({} peers)", lock(&self.queues).len())
    }
}

impl Shared {
    pub(super) fn send(&self, to: NodeId, bytes: Vec<u8>) -> Result<(), SendError> {
        if bytes.len() > MAX_FRAME {
            return Err(SendError::TooLong { len: bytes.len() });
        }
        match lock(&self.queues).get(&to) {
            Some((_, queue)) => queue.push(Frame::Message(bytes)),
            None => Err(SendError::NotConnected),
        }
    }

    pub(super) fn connect(&self, node: NodeId, connection: ConnectionId, queue: Queue) {
        lock(&self.queues).insert(node, (connection, queue));
    }

    /// Does nothing where a newer connection has taken the place.
    pub(super) fn disconnect(&self, node: NodeId, connection: ConnectionId) {
        let mut queues = lock(&self.queues);
        if queues.get(&node).is_some_and(|(c, _)| *c == connection) {
            queues.remove(&node);
        }
    }

    pub(super) fn listening(&self) -> Vec<SocketAddr> {
        lock(&self.listening).clone()
    }

    /// True when it is new.
    pub(super) fn listen(&self, addr: SocketAddr) -> bool {
        let mut listening = lock(&self.listening);
        let new = !listening.contains(&addr);
        if new {
            listening.push(addr);
        }
        new
    }

    pub(super) fn unlisten(&self, addr: SocketAddr) {
        lock(&self.listening).retain(|a| *a != addr);
    }
}

/// A panic while the lock was held cannot have left these maps half changed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_comes_back_only_when_a_frame_is_written() {
        let (end, ended) = watch::channel(None);
        let (queue, mut waiting) = queue(2 * (OVERHEAD + 10), end);
        for _ in 0..100 {
            queue.push(Frame::Message(vec![0; 10])).unwrap();
            queue.push(Frame::Message(vec![0; 10])).unwrap();
            for _ in 0..2 {
                let frame = waiting.frames.try_recv().unwrap();
                waiting.written(&frame);
            }
        }
        assert_eq!(*ended.borrow(), None);
        queue.push(Frame::Message(vec![0; 11])).unwrap();
        let full = queue.push(Frame::Message(vec![0; 10]));
        assert_eq!(full, Err(SendError::Overflow));
        assert_eq!(*ended.borrow(), Some(Gone::Overflow));
    }
}
