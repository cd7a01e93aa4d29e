//! Watching a group from another thread, while its own thread computes or waits for a device.
//!
//! A vigil takes nothing from the group: it looks at what has come on the control connections and leaves
//! it there, so that the group's next operation reads it too.

use std::io::{self, Write};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags};

use super::error::{GroupError, LossCause, would_block};
use super::watch::{Aborter, Control, broken, wait_ready};
use super::wire::{NOTICE_LEN, Notice};
use super::{Group, Over};

/// Notices that are looked at on one connection; a rank sends fewer in a group's life.
const NOTICES: usize = 16;

/// The other side has ended the connection, whatever lies unread before that.
const HUNG_UP: PollFlags = PollFlags::from_bits_retain(libc::POLLRDHUP);

/// State that a group and its vigils share.
#[derive(Debug)]
pub(super) struct Known {
    /// The group was dropped.
    left: AtomicBool,
    /// An operation on devices was given up in this group.
    gave_up: AtomicBool,
    /// Nanoseconds that one operation may take.
    within: AtomicU64,
    over: Mutex<Option<Over>>,
}

impl Known {
    pub(super) fn new(within: Duration) -> Arc<Known> {
        let known = Known {
            left: AtomicBool::new(false),
            gave_up: AtomicBool::new(false),
            within: AtomicU64::new(0),
            over: Mutex::default(),
        };
        known.set_within(within);
        Arc::new(known)
    }

    pub(super) fn set_within(&self, within: Duration) {
        let nanos = u64::try_from(within.as_nanos()).unwrap_or(u64::MAX);
        self.within.store(nanos, Ordering::Relaxed);
    }

    pub(super) fn set_over(&self, over: Over) {
        *self.over.lock().unwrap_or_else(PoisonError::into_inner) = Some(over);
    }

    /// Whether the group was dropped in this process.
    pub(super) fn has_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }

    /// The group is dropped: its connections end now, whoever still looks at them.
    pub(super) fn leave(self: &Arc<Self>, controls: &[Control]) {
        self.left.store(true, Ordering::Release);
        if Arc::strong_count(self) == 1 {
            return;
        }
        for control in controls {
            // Fails if the other side has ended it already.
            drop(control.stream.shutdown(std::net::Shutdown::Both));
        }
    }
}

/// Events that a vigil sees: after each of them the group is over, or its devices are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// A rank is lost, by the word of another.
    Lost(u32),
    /// This rank told the group to end, or the rank in `by` did.
    Aborted { by: Option<u32> },
    /// A rank gave up an operation of the devices. The group itself goes on.
    GaveUp(u32),
    /// The group was dropped in this process.
    Left,
    /// The rank's notice cannot be understood.
    Nonsense(u32),
    /// An operation of the group itself failed; its next call says how.
    Failed,
}

/// A control connection, seen from the side.
#[derive(Debug)]
struct Line {
    rank: u32,
    stream: TcpStream,
    /// Something unread lies there that ends nothing: new bytes cannot be waited for.
    unread: bool,
    gone: Option<(Instant, LossCause)>,
}

/// Looks at a [`Group`] from any thread. Made by [`Group::vigil`].
#[derive(Debug)]
pub struct Vigil {
    world: u32,
    aborter: Aborter,
    lines: Vec<Line>,
    known: Arc<Known>,
}

impl Group {
    /// A look at this group for another thread. It sees the ranks of this host, and the first ranks of
    /// hosts each other; what one of them sees reaches the others by [`Vigil::tell_lost`].
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn vigil(&self) -> Result<Vigil, GroupError> {
        let lines = self.watch.controls.iter().map(|control| {
            Ok(Line {
                rank: control.rank,
                stream: control.stream.try_clone()?,
                unread: false,
                gone: None,
            })
        });
        Ok(Vigil {
            world: self.world,
            aborter: self.aborter(),
            lines: lines
                .collect::<io::Result<_>>()
                .map_err(GroupError::Socket)?,
            known: self.watch.known.clone(),
        })
    }

    /// An operation of the devices was given up in this group: its ranks no longer agree on what was
    /// done, and another generation should be formed.
    pub fn gave_up(&self) -> bool {
        self.watch.known.gave_up.load(Ordering::Acquire)
    }
}

impl Vigil {
    /// How long one operation may take, by the group's newest word.
    pub fn op_within(&self) -> Duration {
        Duration::from_nanos(self.known.within.load(Ordering::Relaxed))
    }

    /// The first rank whose connection has ended, since when, and how. It may have done its part of
    /// everything before it left.
    pub fn gone(&self) -> Option<(u32, Instant, LossCause)> {
        let gone = self.lines.iter().filter_map(|line| {
            let (since, cause) = line.gone?;
            Some((line.rank, since, cause))
        });
        gone.min_by_key(|(_, since, _)| *since)
    }

    /// Tells the others that a rank is lost, with which the operations of the devices are given up too.
    pub fn tell_lost(&self, rank: u32) {
        self.known.gave_up.store(true, Ordering::Release);
        self.say(Notice::Lost(rank));
    }

    /// Tells the others that a rank, this one or one that said so, gave up an operation of the devices,
    /// and notes it in the group.
    pub fn tell_gave_up(&self, rank: u32) {
        self.known.gave_up.store(true, Ordering::Release);
        self.say(Notice::GaveUp(rank));
    }

    fn say(&self, notice: Notice) {
        for line in &self.lines {
            // Whole or not at all: sixteen bytes into a buffer that is as good as empty.
            drop((&line.stream).write(&notice.encode()));
        }
    }

    /// Looks until `until`, until `also` is told, or until there is something to be known.
    ///
    /// # Errors
    /// The system refuses to wait.
    pub fn look(
        &mut self,
        also: Option<&Aborter>,
        until: Instant,
    ) -> Result<Option<Seen>, GroupError> {
        let bells = [Some(&self.aborter), also].into_iter().flatten();
        let mut fds: Vec<PollFd<'_>> = bells
            .map(|bell| PollFd::new(bell.bell(), PollFlags::POLLIN))
            .collect();
        let open = self.lines.iter().filter(|line| line.gone.is_none());
        fds.extend(open.map(|line| {
            let flags = if line.unread {
                HUNG_UP
            } else {
                HUNG_UP | PollFlags::POLLIN
            };
            PollFd::new(line.stream.as_fd(), flags)
        }));
        wait_ready(&mut fds, until)?;
        drop(fds);
        if self.known.has_left() {
            return Ok(Some(Seen::Left));
        }
        if self.aborter.is_aborted() {
            return Ok(Some(Seen::Aborted { by: None }));
        }
        let over = *self
            .known
            .over
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(over) = over {
            return Ok(Some(match over {
                Over::Lost(rank, _) => Seen::Lost(rank),
                Over::AbortedBy(rank) => Seen::Aborted { by: Some(rank) },
                Over::Aborted => Seen::Aborted { by: None },
                Over::Protocol(..) | Over::Broken => Seen::Failed,
            }));
        }
        let world = self.world;
        let seen = self.lines.iter_mut().find_map(|line| line.peek(world));
        // A group that is dropped ends its own connections.
        if self.known.has_left() {
            return Ok(Some(Seen::Left));
        }
        if let Some(Seen::GaveUp(_)) = seen {
            self.known.gave_up.store(true, Ordering::Release);
        }
        Ok(seen)
    }
}

impl Line {
    /// Looks at the unread bytes of the connection, and at whether it has ended.
    fn peek(&mut self, world: u32) -> Option<Seen> {
        let mut bytes = [0; NOTICES * NOTICE_LEN];
        let got = match self.stream.peek(&mut bytes) {
            Ok(0) => {
                self.end(LossCause::Closed);
                return None;
            }
            Ok(got) => got,
            Err(error) if would_block(&error) => {
                self.unread = false;
                return None;
            }
            Err(error) => {
                self.end(broken(&error));
                return None;
            }
        };
        self.unread = true;
        let (notices, _) = bytes[..got].as_chunks::<NOTICE_LEN>();
        let mut gave_up = None;
        for notice in notices {
            match Notice::decode(notice, world) {
                Some(Notice::Lost(rank)) => return Some(Seen::Lost(rank)),
                Some(Notice::Aborted(rank)) => return Some(Seen::Aborted { by: Some(rank) }),
                Some(Notice::Protocol(rank)) => return Some(Seen::Nonsense(rank)),
                Some(Notice::GaveUp(rank)) => gave_up = Some(Seen::GaveUp(rank)),
                Some(Notice::Waits(_)) => {}
                None => return Some(Seen::Nonsense(self.rank)),
            }
        }
        if gave_up.is_none() && self.has_hung_up() {
            self.end(LossCause::Closed);
        }
        gave_up
    }

    /// Whether an end lies behind the unread bytes.
    fn has_hung_up(&self) -> bool {
        let mut fds = [PollFd::new(self.stream.as_fd(), HUNG_UP)];
        wait_ready(&mut fds, Instant::now()).is_ok_and(|ready| ready)
    }

    fn end(&mut self, cause: LossCause) {
        self.gone.get_or_insert((Instant::now(), cause));
    }
}
