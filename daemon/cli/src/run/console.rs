//! The console: one thread that writes to stdout and stderr, so that a terminal that does not take
//! its bytes (Ctrl-S, a full pipe) never holds up a worker for long.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The most bytes that wait for the console.
const MAX_WAITING: usize = 1 << 20;

/// How long a full queue without any progress is waited for before output is dropped.
const PATIENCE: Duration = Duration::from_secs(1);

/// Which of the launcher's own streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Stdout,
    Stderr,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<(Target, Vec<u8>)>,
    waiting: usize,
    /// Pieces that the thread took so far: shows progress.
    taken: u64,
    writing: bool,
    dropped: u64,
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
}

/// A handle to the console's thread; clones share it. The thread ends with the process.
#[derive(Clone, Debug)]
pub struct Console {
    shared: Arc<Shared>,
}

impl Console {
    /// Starts the thread; the two writers are the launcher's stdout and stderr outside of tests.
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
                    let (target, bytes, dropped) = next(&thread);
                    let writer: &mut dyn Write = match target {
                        Target::Stdout => &mut out,
                        Target::Stderr => &mut err,
                    };
                    // A reader that closed its end wants no more; the workers go on.
                    if dropped > 0 {
                        let _ = writeln!(writer, "\nmuster: {dropped} bytes of output were dropped: the console did not take them");
                    }
                    let _ = writer.write_all(&bytes).and_then(|()| writer.flush());
                    let mut state = thread.lock();
                    state.writing = false;
                    drop(state);
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
                state.dropped += bytes.len() as u64;
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
        state.queue.push_back((target, bytes));
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Waits until everything is written, at most this long.
    pub fn flush(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let mut state = self.shared.lock();
        while state.writing || !state.queue.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

fn next(shared: &Shared) -> (Target, Vec<u8>, u64) {
    let mut state = shared.lock();
    loop {
        if let Some((target, bytes)) = state.queue.pop_front() {
            state.waiting -= bytes.len();
            state.taken += 1;
            state.writing = true;
            let dropped = std::mem::take(&mut state.dropped);
            drop(state);
            shared.changed.notify_all();
            return (target, bytes, dropped);
        }
        state = shared
            .changed
            .wait(state)
            .unwrap_or_else(PoisonError::into_inner);
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
        console.flush(Duration::from_secs(10));
        console.write(Target::Stdout, b"end".to_vec());
        console.flush(Duration::from_secs(10));
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
}
