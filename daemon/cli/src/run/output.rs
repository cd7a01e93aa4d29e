//! The workers' pipes: one thread reads them all, keeps the tails for the report, writes log files,
//! and passes lines to the [`Console`] with a prefix where one is wanted.

use std::fs::File;
use std::io::{self, Read as _, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use muster_protocol::local::MAX_TAIL;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::console::{Console, Target};

/// A line is passed on unfinished when it is longer than this.
const MAX_LINE: usize = 16 * 1024;

/// The end of a stream.
#[derive(Clone, Debug, Default)]
pub struct Tail(Arc<Mutex<Vec<u8>>>);

impl Tail {
    fn push(&self, bytes: &[u8]) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend_from_slice(bytes);
        if kept.len() > 2 * MAX_TAIL {
            let cut = kept.len() - MAX_TAIL;
            kept.drain(..cut);
        }
    }

    /// The last lines, at most [`MAX_TAIL`] bytes.
    pub fn text(&self) -> String {
        tail_text(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The last whole lines of some output as text, at most [`MAX_TAIL`] bytes.
pub fn tail_text(bytes: &[u8]) -> String {
    let mut cut = bytes.len().saturating_sub(MAX_TAIL);
    if cut > 0 {
        // From the next line on, where there is one.
        let newline = bytes[cut..].iter().position(|&b| b == b'\n');
        cut += newline
            .map(|at| at + 1)
            .filter(|at| cut + at < bytes.len())
            .unwrap_or(0);
    }
    let mut text = String::from_utf8_lossy(&bytes[cut..]).trim_end().to_owned();
    // A replacement character is longer than the byte that it stands for.
    while text.len() > MAX_TAIL {
        text.remove(0);
    }
    text
}

/// Source and destinations of one worker's stream.
#[derive(Debug)]
pub struct Stream {
    /// The pipe's read end.
    pub pipe: OwnedFd,
    /// The worker: for [`Pump::drain`].
    pub pid: i32,
    pub console: Option<Target>,
    /// In front of every line; whole lines are kept together whenever there is one or `lines`.
    pub prefix: Vec<u8>,
    pub lines: bool,
    pub file: Option<LogFile>,
    pub tail: Option<Tail>,
}

/// A file that a worker's output is copied to.
#[derive(Debug)]
pub struct LogFile {
    file: File,
    path: PathBuf,
    /// Bytes that it did not take.
    lost: u64,
}

impl LogFile {
    pub fn new(file: File, path: PathBuf) -> LogFile {
        let lost = 0;
        LogFile { file, path, lost }
    }

    /// A full disk costs the log, not the training; what it costs is counted.
    fn take(&mut self, bytes: &[u8], console: &Console) {
        let mut left = bytes;
        let error = loop {
            if left.is_empty() {
                return;
            }
            match self.file.write(left) {
                Ok(0) => break io::ErrorKind::WriteZero.into(),
                Ok(written) => left = &left[written..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => break error,
            }
        };
        if self.lost == 0 {
            let what = format!(
                "cannot write output to {}: {error}. The job goes on, and output is missing there until the file takes \
                 it again",
                self.path.display()
            );
            console.tell(format!("muster: {what}\n").into_bytes());
        }
        self.lost += left.len() as u64;
    }

    fn close(&self, console: &Console) {
        if self.lost > 0 {
            let (path, lost) = (self.path.display(), self.lost);
            let text = format!("muster: {lost} bytes of output are missing in {path}\n");
            console.tell(text.into_bytes());
        }
    }
}

struct Open {
    stream: Stream,
    line: Vec<u8>,
}

enum Order {
    Add(Stream),
    /// Read what is there now. With `close` the pipes are closed afterwards, whoever may still hold
    /// their other ends.
    Drain {
        pid: Option<i32>,
        close: bool,
        done: Sender<()>,
    },
}

/// The thread that reads the workers' pipes.
#[derive(Debug)]
pub struct Pump {
    orders: Sender<Order>,
    wake: UnixStream,
}

impl Pump {
    pub fn start(console: Console) -> io::Result<Pump> {
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let (orders, inbox) = mpsc::channel();
        let feeder = console.clone();
        let thread = std::thread::Builder::new()
            .name("output".into())
            .spawn(move || {
                let mut open: Vec<Open> = Vec::new();
                loop {
                    wait(&woken, &mut open, &console);
                    loop {
                        match inbox.try_recv() {
                            Ok(Order::Add(stream)) => open.push(Open {
                                stream,
                                line: Vec::new(),
                            }),
                            Ok(Order::Drain { pid, close, done }) => {
                                drain(&mut open, pid, close, &console);
                                let _ = done.send(());
                            }
                            Err(mpsc::TryRecvError::Empty) => break,
                            Err(mpsc::TryRecvError::Disconnected) => {
                                return drain(&mut open, None, true, &console);
                            }
                        }
                    }
                }
            })?;
        feeder.feeds(thread);
        Ok(Pump { orders, wake })
    }

    fn order(&self, order: Order) {
        let _ = self.orders.send(order);
        // A full buffer wakes as well as one more byte.
        let _ = (&self.wake).write(&[1]);
    }

    pub fn add(&self, stream: Stream) {
        self.order(Order::Add(stream));
    }

    /// Takes in everything that a worker (or all) has written until now; waits at most `patience`.
    pub fn drain(&self, pid: Option<i32>, close: bool, patience: Duration) {
        let (done, wait) = mpsc::channel();
        self.order(Order::Drain { pid, close, done });
        let _ = wait.recv_timeout(patience);
    }
}

impl Drop for Pump {
    fn drop(&mut self) {
        // The thread sees that the sender is gone once it wakes.
        let (orders, _) = mpsc::channel();
        self.orders = orders;
        let _ = (&self.wake).write(&[1]);
    }
}

/// Waits for readable pipes or an order, and reads.
fn wait(mut wake: &UnixStream, open: &mut Vec<Open>, console: &Console) {
    let ready: Vec<bool> = {
        let mut fds = vec![PollFd::new(wake.as_fd(), PollFlags::POLLIN)];
        fds.extend(
            open.iter()
                .map(|o| PollFd::new(o.stream.pipe.as_fd(), PollFlags::POLLIN)),
        );
        // An interrupted or failed poll is a spurious wake-up; every read is non-blocking.
        if poll(&mut fds, PollTimeout::NONE).is_err() {
            return;
        }
        fds.iter().map(|fd| fd.any().unwrap_or(true)).collect()
    };
    if ready.first() == Some(&true) {
        let _ = wake.read(&mut [0; 256]);
    }
    let mut at = 0;
    open.retain_mut(|o| {
        at += 1;
        if ready.get(at) == Some(&true) {
            // Once: other pipes and orders get their turn.
            !matches!(read_once(o, console), Read::End)
        } else {
            true
        }
    });
}

fn drain(open: &mut Vec<Open>, pid: Option<i32>, close: bool, console: &Console) {
    open.retain_mut(|o| {
        if pid.is_some_and(|pid| pid != o.stream.pid) {
            return true;
        }
        // A pipe holds 64 KiB unless enlarged (1 MiB at most for a user): more than that in one
        // go is written by someone who still runs.
        for _ in 0..64 {
            match read_once(o, console) {
                Read::Some => {}
                Read::Nothing => break,
                Read::End => return false,
            }
        }
        if close {
            finish(o, console);
        }
        !close
    });
}

enum Read {
    Some,
    Nothing,
    End,
}

fn read_once(o: &mut Open, console: &Console) -> Read {
    let mut buffer = [0; 32 * 1024];
    match nix::unistd::read(o.stream.pipe.as_fd(), &mut buffer) {
        Ok(0) => {
            finish(o, console);
            Read::End
        }
        Ok(n) => {
            take(o, &buffer[..n], console);
            Read::Some
        }
        Err(nix::errno::Errno::EAGAIN | nix::errno::Errno::EINTR) => Read::Nothing,
        Err(_) => {
            finish(o, console);
            Read::End
        }
    }
}

fn take(o: &mut Open, bytes: &[u8], console: &Console) {
    if let Some(tail) = &o.stream.tail {
        tail.push(bytes);
    }
    if let Some(file) = &mut o.stream.file {
        file.take(bytes, console);
    }
    let Some(target) = o.stream.console else {
        return;
    };
    if o.stream.prefix.is_empty() && !o.stream.lines {
        console.write(target, bytes.to_vec());
        return;
    }
    let mut out = Vec::with_capacity(bytes.len() + 64);
    for &byte in bytes {
        // A carriage return ends a line too: progress bars. One before a newline belongs to it.
        if byte != b'\n' && o.line.last() == Some(&b'\r') {
            flush_line(o, &mut out);
        }
        o.line.push(byte);
        if byte == b'\n' || o.line.len() >= MAX_LINE {
            flush_line(o, &mut out);
        }
    }
    // The progress bar's line is shown now, not when its next one comes.
    if o.line.last() == Some(&b'\r') && o.line.len() > 1 {
        flush_line(o, &mut out);
    }
    console.write(target, out);
}

fn flush_line(o: &mut Open, out: &mut Vec<u8>) {
    out.extend_from_slice(&o.stream.prefix);
    out.append(&mut o.line);
}

/// Passes on an unfinished last line, with a newline so that the next output starts its own.
fn finish(o: &mut Open, console: &Console) {
    if let Some(file) = &o.stream.file {
        file.close(console);
    }
    if o.line.is_empty() {
        return;
    }
    let mut out = Vec::new();
    flush_line(o, &mut out);
    out.push(b'\n');
    if let Some(target) = o.stream.console {
        console.write(target, out);
    }
}

/// A pipe for a worker's stream: the read end, non-blocking, and the write end.
pub fn pipe() -> io::Result<(OwnedFd, OwnedFd)> {
    use nix::fcntl::OFlag;
    let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    // Only the read end: a worker must never see EAGAIN on its own output.
    // SAFETY: fcntl on a descriptor that is open and ours.
    if unsafe { libc::fcntl(read.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((read, write))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn check(prefix: &str, lines: bool, pieces: &[&str], expected: &str) {
        let sink = Sink::default();
        let console = Console::start(sink.clone(), io::sink()).unwrap();
        let pump = Pump::start(console.clone()).unwrap();
        let (read, write) = pipe().unwrap();
        let tail = Tail::default();
        pump.add(Stream {
            pipe: read,
            pid: 1,
            console: Some(Target::Stdout),
            prefix: prefix.into(),
            lines,
            file: None,
            tail: Some(tail.clone()),
        });
        let patience = Duration::from_secs(10);
        for piece in pieces {
            nix::unistd::write(&write, piece.as_bytes()).unwrap();
            pump.drain(Some(1), false, patience);
        }
        // The other end stays open, as with an escaped grandchild: nothing is lost all the same.
        pump.drain(None, true, patience);
        console.flush(patience);
        assert_eq!(String::from_utf8_lossy(&sink.0.lock().unwrap()), expected);
        assert_eq!(tail.text(), pieces.concat().trim_end());
        drop(write);
    }

    #[test]
    fn lines_get_their_prefix() {
        check(
            "[rank0]: ",
            true,
            &["a\nb", "c\nd"],
            "[rank0]: a\n[rank0]: bc\n[rank0]: d\n",
        );
        check(
            "[rank0]: ",
            true,
            &["1%\r2%\r", "3%\r\n"],
            "[rank0]: 1%\r[rank0]: 2%\r[rank0]: 3%\r\n",
        );
        check("", true, &["a\nb", "c\n"], "a\nbc\n");
        check("", false, &["a", "b\rc"], "ab\rc");
    }

    #[test]
    fn the_tail_is_whole_lines_and_bounded() {
        let text: String = (0..2000).map(|n| format!("line {n}\n")).collect();
        let tail = tail_text(text.as_bytes());
        assert!(tail.len() <= MAX_TAIL && tail.len() > MAX_TAIL - 20);
        assert!(tail.starts_with("line ") && tail.ends_with("line 1999"));
        assert!(tail_text(&[0xff; 10_000]).len() <= MAX_TAIL);
        assert_eq!(tail_text(b"short\n"), "short");
    }

    #[test]
    fn what_a_file_does_not_take_is_counted() {
        let said = Sink::default();
        let console = Console::start(io::sink(), said.clone()).unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut file = LogFile::new(full, "/dev/full".into());
        for _ in 0..3 {
            file.take(b"12345", &console);
        }
        file.close(&console);
        console.flush(Duration::from_secs(10));
        let text = String::from_utf8_lossy(&said.0.lock().unwrap()).into_owned();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert!(
            lines[1].contains("15 bytes") && lines[1].ends_with("/dev/full"),
            "{text}"
        );
    }
}
