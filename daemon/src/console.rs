//! The console: one thread that writes to stdout and stderr, so that a terminal that does not take
//! its bytes (Ctrl-S, a full pipe, a journal that hangs) holds up no worker for long, and neither the
//! launcher nor the agent ever.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The most bytes of workers' output that wait for the console.
const MAX_WAITING: usize = 1 << 20;

/// The most bytes of the launcher's own lines that wait, besides, and of an agent's log.
const MAX_OWN: usize = 128 << 10;
const MAX_LOG: usize = 1 << 20;

/// Written at once: the console moves when it has taken so much. A pipe takes all of it or nothing (`pipe(7)`).
const CHUNK: usize = 4 << 10;

/// How long a full queue without any progress is waited for before output is dropped.
const PATIENCE: Duration = Duration::from_secs(1);

/// How often a wait looks for what nobody tells: that a thread has ended, or that the console is stuck.
const LOOK: Duration = Duration::from_millis(10);

/// How long a process that ends waits for a console that takes nothing.
const LAST: Duration = Duration::from_secs(2);

/// An error with its causes, but for those that it says itself.
pub fn with_causes(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

/// The console of this process, once there is one.
static STANDARD: OnceLock<Console> = OnceLock::new();

/// Which of this process's own streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Stdout,
    Stderr,
}

/// Source of a text: none takes the room of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Output,
    /// Of the launcher itself.
    Own,
    Log,
}

#[derive(Debug)]
struct Piece {
    target: Target,
    bytes: Vec<u8>,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Dropped {
    bytes: u64,
    lines: u64,
    log: u64,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Piece>,
    waiting: usize,
    own: usize,
    log: usize,
    /// Pieces that the thread took so far: shows progress.
    taken: u64,
    /// While a piece is being written: when the last of its bytes were taken.
    writing: Option<Instant>,
    /// Nobody waits any more: output that comes now is dropped, and what is being written is broken off.
    closed: bool,
    /// Threads that have output for the console until they end.
    feeders: Vec<JoinHandle<()>>,
    dropped: Dropped,
    /// Output that would be lost besides, were the console never to take what is being written.
    unwritten: Dropped,
    /// While the console is stuck nothing waits for it again; it ends with the next progress.
    stuck_at: Option<u64>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, writer: &mut dyn Write, piece: &Piece, dropped: Dropped) -> io::Result<()> {
        let mut left = piece.bytes.as_slice();
        if let Some(text) = dropped.told() {
            self.lock().unwritten = dropped.and(piece.kind, left);
            writer.write_all(&text)?;
        }
        while let Some(chunk) = left.chunks(CHUNK).next() {
            self.lock().unwritten = Dropped::default().and(piece.kind, left);
            writer.write_all(chunk)?;
            left = &left[chunk.len()..];
            let mut state = self.lock();
            state.writing = Some(Instant::now());
            if state.closed && piece.kind == Kind::Output {
                state.dropped = state.dropped.and(piece.kind, left);
                break;
            }
        }
        writer.flush()
    }
}

impl State {
    fn room(&mut self, kind: Kind) -> &mut usize {
        match kind {
            Kind::Output => &mut self.waiting,
            Kind::Own => &mut self.own,
            Kind::Log => &mut self.log,
        }
    }

    /// Nothing is being written.
    fn rest(&mut self) {
        self.writing = None;
        self.unwritten = Dropped::default();
    }

    fn is_written(&self) -> bool {
        self.writing.is_none() && self.queue.is_empty()
    }

    fn is_done(&self) -> bool {
        self.is_written() && self.feeders.iter().all(JoinHandle::is_finished)
    }

    /// Whether the console takes nothing.
    fn is_stuck(&self) -> bool {
        self.writing.is_some_and(|at| at.elapsed() >= PATIENCE)
    }
}

/// A handle to the console's thread; clones share it. The thread ends with the process.
#[derive(Clone, Debug)]
pub struct Console {
    shared: Arc<Shared>,
}

impl Console {
    /// The console of this process's stdout and stderr.
    pub fn standard() -> io::Result<Console> {
        if let Some(console) = STANDARD.get() {
            return Ok(console.clone());
        }
        let console = Console::start(Bare(io::stdout()), Bare(io::stderr()))?;
        Ok(STANDARD.get_or_init(|| console).clone())
    }

    /// Starts the thread.
    pub fn start(
        mut out: impl Write + Send + 'static,
        mut err: impl Write + Send + 'static,
    ) -> io::Result<Console> {
        let shared = Arc::new(Shared::default());
        let thread = shared.clone();
        std::thread::Builder::new()
            .name("console".into())
            .spawn(move || {
                loop {
                    let (piece, dropped) = next(&thread);
                    let writer: &mut dyn Write = match piece.target {
                        Target::Stdout => &mut out,
                        Target::Stderr => &mut err,
                    };
                    // A reader that closed its end wants no more; the workers go on.
                    let _ = thread.write(writer, &piece, dropped);
                    thread.lock().rest();
                    thread.changed.notify_all();
                }
            })?;
        Ok(Console { shared })
    }

    /// Queues bytes. Waits while the queue is full, but at most `PATIENCE` without progress; then
    /// the bytes are dropped, and so are all further ones until the console moves again.
    pub fn write(&self, target: Target, bytes: Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        let mut state = self.shared.lock();
        let mut seen = state.taken;
        let mut since = Instant::now();
        while !state.closed && state.waiting + bytes.len() > MAX_WAITING && state.waiting > 0 {
            if state.stuck_at == Some(state.taken) || since.elapsed() >= PATIENCE {
                state.stuck_at = Some(state.taken);
                state.dropped = state.dropped.and(Kind::Output, &bytes);
                return;
            }
            let (next, _) = self
                .shared
                .changed
                .wait_timeout(state, PATIENCE / 4)
                .unwrap_or_else(PoisonError::into_inner);
            state = next;
            if state.taken != seen {
                seen = state.taken;
                since = Instant::now();
            }
        }
        if state.closed {
            state.dropped = state.dropped.and(Kind::Output, &bytes);
            return;
        }
        state.waiting += bytes.len();
        let kind = Kind::Output;
        state.queue.push_back(Piece {
            target,
            bytes,
            kind,
        });
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Queues lines of the launcher's own for stderr. Never waits: lines for which there is no room
    /// are counted and dropped.
    pub fn tell(&self, lines: Vec<u8>) {
        self.lines(Kind::Own, lines);
    }

    fn lines(&self, kind: Kind, bytes: Vec<u8>) {
        let most = match kind {
            Kind::Log => MAX_LOG,
            _ => MAX_OWN,
        };
        let mut state = self.shared.lock();
        let room = state.room(kind);
        if *room + bytes.len() > most {
            state.dropped = state.dropped.and(kind, &bytes);
            return;
        }
        *room += bytes.len();
        state.queue.push_back(Piece {
            target: Target::Stderr,
            bytes,
            kind,
        });
        drop(state);
        self.shared.changed.notify_all();
    }

    /// A thread that writes here until the process is about to end.
    pub fn feeds(&self, thread: JoinHandle<()>) {
        self.shared.lock().feeders.push(thread);
    }

    /// The end: waits as [`Console::flush`] does, also for those that feed it, then drops what is left, and says how
    /// much that was: behind what was written, or on `err` itself where that takes it though the other stream does
    /// not.
    pub fn close(&self, patience: Duration, mut err: impl Write + AsFd) {
        self.wait(patience, |state| state.is_done() || state.is_stuck());
        self.shared.lock().closed = true;
        self.shared.changed.notify_all();
        // Nothing holds them up from here on.
        self.wait(PATIENCE, |state| {
            state.feeders.iter().all(JoinHandle::is_finished)
        });
        let mut state = self.shared.lock();
        for piece in std::mem::take(&mut state.queue) {
            *state.room(piece.kind) -= piece.bytes.len();
            state.dropped = state.dropped.and(piece.kind, &piece.bytes);
        }
        if state.dropped == Dropped::default() && state.writing.is_none() {
            return;
        }
        // The thread says the count in front of this.
        state.queue.push_back(Piece {
            target: Target::Stderr,
            bytes: Vec::new(),
            kind: Kind::Own,
        });
        drop(state);
        self.shared.changed.notify_all();
        self.flush(PATIENCE);
        let mut state = self.shared.lock();
        let dropped = std::mem::take(&mut state.dropped).with(state.unwritten);
        drop(state);
        if let Some(text) = dropped.told()
            && takes_more(err.as_fd())
        {
            let _ = err.write_all(&text);
        }
    }

    /// Waits until everything is written, at most this long, and not at all while the console is
    /// known to be stuck.
    pub fn flush(&self, patience: Duration) {
        self.wait(patience, |state| state.is_written() || state.is_stuck());
    }

    fn wait(&self, patience: Duration, until: impl Fn(&State) -> bool) {
        let deadline = Instant::now() + patience;
        let mut state = self.shared.lock();
        while !until(&state) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self
                .shared
                .changed
                .wait_timeout(state, left.min(LOOK))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Dropped {
    /// These bytes besides.
    fn and(mut self, kind: Kind, bytes: &[u8]) -> Dropped {
        let lines = || bytes.iter().filter(|&&b| b == b'\n').count() as u64;
        match kind {
            Kind::Output => self.bytes += bytes.len() as u64,
            Kind::Own => self.lines += lines(),
            Kind::Log => self.log += lines(),
        }
        self
    }

    fn with(self, other: Dropped) -> Dropped {
        Dropped {
            bytes: self.bytes + other.bytes,
            lines: self.lines + other.lines,
            log: self.log + other.log,
        }
    }

    fn told(self) -> Option<Vec<u8>> {
        let bytes = (self.bytes > 0).then(|| format!("{} bytes of output", self.bytes));
        let lines = (self.lines > 0).then(|| format!("{} lines of muster's own", self.lines));
        let log = (self.log > 0).then(|| format!("{} lines of the agent's log", self.log));
        let what = [bytes, lines, log]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>();
        let what = what.join(" and ");
        let files = match self.bytes {
            0 => "",
            _ => ". With --tee and --log-dir all output is in files, too",
        };
        (!what.is_empty()).then(|| {
            let text = format!(
                "\nmuster: {what} were dropped: the console did not take them in time{files}\n"
            );
            text.into_bytes()
        })
    }
}

fn next(shared: &Shared) -> (Piece, Dropped) {
    let mut state = shared.lock();
    loop {
        if let Some(piece) = state.queue.pop_front() {
            *state.room(piece.kind) -= piece.bytes.len();
            state.taken += 1;
            state.writing = Some(Instant::now());
            let dropped = std::mem::take(&mut state.dropped);
            drop(state);
            shared.changed.notify_all();
            return (piece, dropped);
        }
        state = shared
            .changed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner);
    }
}

/// A descriptor without the standard library's lock around it: a write that blocks under that lock
/// blocks whatever thread says something next.
struct Bare<T>(T);

impl<T: AsFd> Write for Bare<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match nix::unistd::write(&self.0, bytes) {
                Ok(written) => return Ok(written),
                Err(Errno::EINTR) => {}
                // Another process made it non-blocking, for all that share it.
                Err(Errno::EAGAIN) => wait(self.0.as_fd())?,
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn wait(fd: BorrowedFd<'_>) -> io::Result<()> {
    match poll(
        &mut [PollFd::new(fd, PollFlags::POLLOUT)],
        PollTimeout::NONE,
    ) {
        Ok(_) | Err(Errno::EINTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

impl<T: AsFd> AsFd for Bare<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether a write of a line would not wait.
fn takes_more(fd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::POLLOUT)];
    let ready = poll(&mut fds, PollTimeout::ZERO).is_ok_and(|count| count > 0);
    ready && fds[0].revents().is_some_and(|r| r == PollFlags::POLLOUT)
}

/// An agent's log, as a writer that never blocks.
#[derive(Clone, Debug)]
pub struct Log(pub Console);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lines(Kind::Log, bytes.to_vec());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A message for the user, on stderr. Never fails: that nobody reads it is no reason to stop.
pub fn say(text: &str) {
    let lines: Vec<String> = text.lines().map(|line| format!("muster: {line}")).collect();
    print(&lines.join("\n"));
}

/// Lines for stderr, as they are. Before there is a console nothing runs that waits for this thread.
pub fn print(text: &str) {
    if text.is_empty() {
        return;
    }
    let lines = format!("{text}\n").into_bytes();
    match STANDARD.get() {
        Some(console) => console.tell(lines),
        None => {
            let _ = Bare(io::stderr()).write_all(&lines);
        }
    }
}

/// Waits for what was said last: at the end of a process.
pub fn finish() {
    if let Some(console) = STANDARD.get() {
        console.close(LAST, Bare(io::stderr()));
    }
}

#[cfg(test)]
mod tests;
