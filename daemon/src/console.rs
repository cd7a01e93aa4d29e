//! The console: one thread that writes to stdout and stderr, so that a terminal that does not take
//! its bytes (Ctrl-S, a full pipe, a journal that hangs) holds up no worker for long, and neither the
//! launcher nor the agent ever.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The most bytes of workers' output that wait for the console.
const MAX_WAITING: usize = 1 << 20;

/// The most bytes of the launcher's own lines that wait, besides, and of an agent's log.
const MAX_OWN: usize = 128 << 10;
const MAX_LOG: usize = 1 << 20;

/// Written at once: the console moves when it has taken so much.
const CHUNK: usize = 4 << 10;

/// How long a full queue without any progress is waited for before output is dropped.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a process that ends waits for a console that takes nothing.
const LAST: Duration = Duration::from_secs(2);

/// The console of this process, once there is one.
static STANDARD: OnceLock<Console> = OnceLock::new();

/// Which of this process's own streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Stdout,
    Stderr,
}

/// Whose words they are: none takes the room of another.
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
    dropped: Dropped,
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
        if let Some(text) = dropped.told() {
            writeln!(writer, "\nmuster: {text}: the console did not take them")?;
        }
        for chunk in piece.bytes.chunks(CHUNK) {
            writer.write_all(chunk)?;
            self.lock().writing = Some(Instant::now());
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
                    thread.lock().writing = None;
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
        while state.waiting + bytes.len() > MAX_WAITING && state.waiting > 0 {
            if state.stuck_at == Some(state.taken) || since.elapsed() >= PATIENCE {
                state.stuck_at = Some(state.taken);
                state.dropped.bytes += bytes.len() as u64;
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
            let count = bytes.iter().filter(|&&b| b == b'\n').count() as u64;
            match kind {
                Kind::Log => state.dropped.log += count,
                _ => state.dropped.lines += count,
            }
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

    /// Waits until everything is written, at most this long, and not at all while the console is
    /// known to be stuck.
    pub fn flush(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut state = self.shared.lock();
        while state.writing.is_some() || !state.queue.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || state.is_stuck() {
                return;
            }
            state = self
                .shared
                .changed
                .wait_timeout(state, left.min(PATIENCE / 4))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

impl Dropped {
    fn told(self) -> Option<String> {
        let bytes = (self.bytes > 0).then(|| format!("{} bytes of output", self.bytes));
        let lines = (self.lines > 0).then(|| format!("{} lines of muster's own", self.lines));
        let log = (self.log > 0).then(|| format!("{} lines of the agent's log", self.log));
        let what = [bytes, lines, log]
            .into_iter()
            .flatten()
            .collect::<Vec<_>>();
        (!what.is_empty()).then(|| format!("{} were dropped", what.join(" and ")))
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
        console.flush(LAST);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    struct Gate(mpsc::Receiver<()>, Arc<Mutex<Vec<u8>>>);

    impl Write for Gate {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.0.recv();
            self.1.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Waits until all is written, also where the console has just been stuck.
    fn drained(console: &Console) {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut state = console.shared.lock();
        while state.writing.is_some() || !state.queue.is_empty() {
            assert!(Instant::now() < deadline, "the console takes nothing");
            state = console
                .shared
                .changed
                .wait_timeout(state, PATIENCE)
                .unwrap()
                .0;
        }
    }

    #[test]
    fn a_stuck_console_costs_output_but_no_time() {
        let (open, gate) = mpsc::channel();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let console = Console::start(Gate(gate, seen.clone()), io::sink()).unwrap();
        let started = Instant::now();
        let piece = 64 * 1024;
        for _ in 0..100 {
            console.write(Target::Stdout, vec![b'x'; piece]);
        }
        // One wait of a second, not eighty.
        assert!(started.elapsed() < Duration::from_secs(10));
        drop(open);
        drained(&console);
        console.write(Target::Stdout, b"end".to_vec());
        drained(&console);
        let seen = seen.lock().unwrap();
        assert!(seen.ends_with(b"end"));
        let text = String::from_utf8_lossy(&seen);
        assert!(
            text.contains("bytes of output were dropped"),
            "{}",
            text.len()
        );
        assert!(seen.len() >= MAX_WAITING && seen.len() < 100 * piece);
    }

    #[test]
    fn lines_of_the_launcher_never_wait_and_are_counted_when_they_are_dropped() {
        let (open, gate) = mpsc::channel();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let console = Console::start(io::sink(), Gate(gate, seen.clone())).unwrap();
        // Workers have filled their part of the queue.
        let full = [vec![b'x'; MAX_WAITING - 1].as_slice(), b"\n"].concat();
        console.write(Target::Stderr, full);
        let line = vec![b'.'; 1023];
        let line = [line.as_slice(), b"\n"].concat();
        let room = MAX_OWN / line.len();
        // And so has the agent: it takes the room of nobody else.
        let mut log = Log(console.clone());
        let entry = [vec![b'-'; 1023].as_slice(), b"\n"].concat();
        let log_room = MAX_LOG / entry.len();
        for _ in 0..log_room + 5 {
            log.write_all(&entry).unwrap();
        }
        for _ in 0..room + 9 {
            console.tell(line.clone());
        }
        drop(open);
        drained(&console);
        let seen = seen.lock().unwrap();
        let text = String::from_utf8_lossy(&seen);
        let begin = |with: &str| text.lines().filter(|l| l.starts_with(with)).count();
        assert_eq!((begin("."), begin("-")), (room, log_room));
        let dropped = "muster: 9 lines of muster's own and 5 lines of the agent's log were dropped";
        assert!(text.contains(dropped));
    }

    #[test]
    fn nobody_waits_at_the_end_for_a_console_that_is_stuck() {
        let (open, gate) = mpsc::channel();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let console = Console::start(io::sink(), Gate(gate, seen.clone())).unwrap();
        console.tell(b"one\n".to_vec());
        console.flush(Duration::from_secs(600));
        assert!(seen.lock().unwrap().is_empty());
        // One that is slow, and moves, is waited for.
        open.send(()).unwrap();
        while seen.lock().unwrap().is_empty() {
            std::thread::sleep(Duration::from_millis(1));
        }
        console.tell(vec![b'.'; 3 * CHUNK]);
        for _ in 0..3 {
            open.send(()).unwrap();
        }
        console.flush(Duration::from_secs(600));
        assert_eq!(seen.lock().unwrap().len(), 4 + 3 * CHUNK);
    }
}
