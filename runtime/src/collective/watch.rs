//! Checks of every wait of a group besides its own descriptors: the other ranks' control
//! connections, and whether this process was told to leave.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use socket2::{SockRef, TcpKeepalive};

use super::Over;
use super::error::{GroupError, LossCause, would_block};
use super::shm::Region;
use super::vigil::Known;
use super::wire::{NOTICE_LEN, Notice};

/// Bytes that stay unacknowledged this long end the connection: a cut cable, a frozen host.
const UNACKED_FOR: Duration = Duration::from_secs(5);
/// How long a rank whose data connection ended may take to say why, on its control connection.
const LAST_WORDS: Duration = Duration::from_millis(200);

/// Prepares a connected stream: no delay, not blocking, and probed by the kernel while idle.
pub(super) fn prepare(stream: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(2))
        .with_interval(Duration::from_secs(1))
        .with_retries(3);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(UNACKED_FOR))?;
    stream.set_nonblocking(true)
}

/// Ends a group from any thread: every call that is blocked in it, and every later one, returns
/// [`GroupError::Aborted`] at once. Made before the group, so that its formation can be ended too.
#[derive(Clone, Debug)]
pub struct Aborter(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    told: AtomicBool,
    /// Readable once told.
    bell: UnixStream,
    ring: UnixStream,
    region: Mutex<Weak<Region>>,
}

impl Aborter {
    /// # Errors
    /// The process has no descriptors left.
    pub fn new() -> Result<Aborter, GroupError> {
        let (bell, ring) = UnixStream::pair().map_err(GroupError::Socket)?;
        for end in [&bell, &ring] {
            end.set_nonblocking(true).map_err(GroupError::Socket)?;
        }
        Ok(Aborter(Arc::new(Inner {
            told: AtomicBool::new(false),
            bell,
            ring,
            region: Mutex::default(),
        })))
    }

    /// Ends the group. Never blocks; later calls change nothing.
    pub fn abort(&self) {
        if self.0.told.swap(true, Ordering::SeqCst) {
            return;
        }
        // One byte into an empty buffer.
        let rung = (&self.0.ring).write(&[1]);
        debug_assert!(rung.is_ok());
        let region = self.0.region.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(region) = region.upgrade() {
            region.ring();
        }
    }

    pub fn is_aborted(&self) -> bool {
        self.0.told.load(Ordering::SeqCst)
    }

    pub(super) fn bell(&self) -> BorrowedFd<'_> {
        self.0.bell.as_fd()
    }

    /// Makes an abort wake those who wait in this region, too.
    pub(super) fn covers(&self, region: &Arc<Region>) {
        *self.0.region.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(region);
    }
}

/// Waits until one of the descriptors is ready, or `until`. False: the time is over.
pub(super) fn wait_ready(fds: &mut [PollFd<'_>], until: Instant) -> Result<bool, GroupError> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        // Rounded up, so that the last millisecond is not spun away.
        let ms = i32::try_from(left.as_millis())
            .unwrap_or(i32::MAX)
            .saturating_add(i32::from(!left.is_zero()));
        let timeout = PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX);
        match poll(fds, timeout) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(errno) => return Err(GroupError::Socket(errno.into())),
        }
    }
}

pub(super) fn broken(error: &io::Error) -> LossCause {
    match error.kind() {
        io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => LossCause::Closed,
        kind => LossCause::Broken(kind),
    }
}

/// The control connection with one rank.
#[derive(Debug)]
pub(super) struct Control {
    pub(super) rank: u32,
    pub(super) stream: TcpStream,
    notice: [u8; NOTICE_LEN],
    got: usize,
    /// The rank that it waits for, by its own word.
    waits: Option<u32>,
    /// The connection has ended: the rank has left, perhaps with its part of everything done.
    gone: Option<LossCause>,
}

impl Control {
    pub(super) fn new(rank: u32, stream: TcpStream) -> Control {
        Control {
            rank,
            stream,
            notice: [0; NOTICE_LEN],
            got: 0,
            waits: None,
            gone: None,
        }
    }

    /// Reads what is there; the reason to end the group, if it is said.
    fn advance(&mut self, world: u32) -> Option<Over> {
        while self.gone.is_none() {
            match self.stream.read(&mut self.notice[self.got..]) {
                Ok(0) => self.gone = Some(LossCause::Closed),
                Ok(n) => self.got += n,
                Err(error) if would_block(&error) => return None,
                Err(error) => self.gone = Some(broken(&error)),
            }
            if self.got == NOTICE_LEN {
                self.got = 0;
                match Notice::decode(&self.notice, world) {
                    Some(Notice::Waits(rank)) => self.waits = Some(rank),
                    // Of the devices, not of this group.
                    Some(Notice::GaveUp(_)) => {}
                    Some(Notice::Lost(rank)) => {
                        return Some(Over::Lost(rank, LossCause::Reported));
                    }
                    Some(Notice::Aborted(rank)) => return Some(Over::AbortedBy(rank)),
                    Some(Notice::Protocol(rank)) => {
                        let what = "what another rank did not understand";
                        return Some(Over::Protocol(rank, what));
                    }
                    None => return Some(Over::Protocol(self.rank, "an unknown notice")),
                }
            }
        }
        None
    }
}

/// Why an operation did not end well.
#[derive(Debug)]
pub(super) enum Fault {
    Over(Over),
    Local(GroupError),
}

impl Fault {
    /// A reduction refused its buffers: a mistake in a transport.
    pub(super) fn misfit() -> Fault {
        Fault::Local(GroupError::Internal {
            what: "a buffer that does not fit its elements",
        })
    }
}

impl From<GroupError> for Fault {
    fn from(error: GroupError) -> Fault {
        Fault::Local(error)
    }
}

impl From<Over> for Fault {
    fn from(over: Over) -> Fault {
        Fault::Over(over)
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Watch {
    pub(super) rank: u32,
    pub(super) world: u32,
    pub(super) aborter: Aborter,
    pub(super) controls: Vec<Control>,
    /// Time for one operation.
    pub(super) within: Duration,
    /// How long to wait for another rank's word at the end of that time, where a rank may be silent
    /// because it waits itself.
    pub(super) grace: Duration,
    /// State shared with those who watch this group from the side.
    pub(super) known: Arc<Known>,
    /// The newest word of each rank, by rank.
    pub(super) words: Vec<u64>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.known.leave(&self.controls);
    }
}

impl Watch {
    pub(super) fn check_abort(&self) -> Result<(), Fault> {
        if self.aborter.is_aborted() {
            return Err(Over::Aborted.into());
        }
        Ok(())
    }

    /// Takes the word in the head of the rank's operation.
    pub(super) fn hear(&mut self, rank: u32, word: u64) {
        if let Some(last) = self.words.get_mut(rank as usize) {
            *last = word;
        }
    }

    /// Waits for one of `fds`, or a notice. False: the time is over.
    pub(super) fn wait(&mut self, own: &[PollFd<'_>], until: Instant) -> Result<bool, Fault> {
        let mut fds = own.to_vec();
        let own = fds.len();
        fds.push(PollFd::new(self.aborter.bell(), PollFlags::POLLIN));
        let open = |control: &&Control| control.gone.is_none();
        let watched = self.controls.iter().filter(open);
        fds.extend(watched.map(|control| PollFd::new(control.stream.as_fd(), PollFlags::POLLIN)));
        let ready = wait_ready(&mut fds, until)?;
        let spoken: Vec<bool> = fds[own + 1..]
            .iter()
            .map(|fd| fd.revents().is_some_and(|got| !got.is_empty()))
            .collect();
        drop(fds);
        self.check_abort()?;
        let watched = self.controls.iter_mut().filter(|c| c.gone.is_none());
        for (control, spoke) in watched.zip(spoken) {
            if spoke && let Some(over) = control.advance(self.world) {
                return Err(over.into());
            }
        }
        Ok(ready)
    }

    /// Looks at everything without waiting.
    pub(super) fn check(&mut self) -> Result<(), Fault> {
        self.wait(&[], Instant::now()).map(|_| ())
    }

    /// How the rank left, if its control connection has ended.
    pub(super) fn gone(&self, rank: u32) -> Option<LossCause> {
        let mut controls = self.controls.iter();
        controls.find(|control| control.rank == rank)?.gone
    }

    /// A rank's data ended early: its own last word says why, else it is lost.
    pub(super) fn ended(&mut self, rank: u32, cause: LossCause) -> Fault {
        let until = Instant::now() + LAST_WORDS;
        while self.gone(rank).is_none() {
            match self.wait(&[], until) {
                Ok(true) => {}
                Ok(false) => break,
                Err(fault) => return fault,
            }
        }
        Over::Lost(rank, cause).into()
    }

    /// The time for an operation is over, and this rank is behind. Where it may be waiting itself, the
    /// one at the end of the chain is to blame: everybody says whom it waits for, and listens.
    pub(super) fn overdue(&mut self, rank: u32) -> Fault {
        let until = Instant::now() + self.grace;
        let mut blamed = None;
        loop {
            let now = self.last_of_chain(rank);
            if blamed.replace(now) != Some(now) && !self.grace.is_zero() {
                self.say(Notice::Waits(now));
            }
            match self.wait(&[], until) {
                Ok(true) if self.gone(now).is_none() => {}
                Ok(_) => return Over::Lost(now, LossCause::Silent(self.within)).into(),
                Err(fault) => return fault,
            }
        }
    }

    /// The end of the chain of ranks that begins with this one: each waits for the next, by its own word.
    fn last_of_chain(&self, mut rank: u32) -> u32 {
        for _ in 0..self.controls.len() {
            let said = self.controls.iter().find(|control| control.rank == rank);
            match said.and_then(|control| control.waits) {
                Some(next) if next != self.rank => rank = next,
                _ => break,
            }
        }
        rank
    }

    /// Tells the others why this rank leaves; best effort, without waiting: whoever does not get it
    /// sees the connection close.
    pub(super) fn tell(&self, over: Over) {
        let notice = match over {
            Over::Lost(rank, _) => Notice::Lost(rank),
            Over::Protocol(rank, _) => Notice::Protocol(rank),
            Over::Aborted | Over::Broken => Notice::Aborted(self.rank),
            Over::AbortedBy(rank) => Notice::Aborted(rank),
        };
        self.say(notice);
    }

    fn say(&self, notice: Notice) {
        for control in &self.controls {
            // A few times sixteen bytes are all that is ever sent here: never partial.
            drop((&control.stream).write(&notice.encode()));
        }
    }
}
