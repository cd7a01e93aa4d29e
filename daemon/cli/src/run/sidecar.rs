//! The sidecar `muster __reaper`: ends the workers of a launcher that cannot do it any more.
//!
//! It holds the read end of a pipe whose write end only the launcher has. When that ends, the
//! launcher is gone, however it went: the sidecar kills every process that carries the launcher's id
//! and exits. The workers themselves die by their parent-death signal; this is for their children.
//!
//! Through the pipe the launcher says again and again that it moves. When it is stopped, or blocked
//! in the kernel, the sidecar asks the agent in its place for how long the workers may go on. When
//! neither says so any longer, it tells the launcher by its stdout, and kills them: others may train
//! in their place by then.

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::Thread;
use std::time::{Duration, Instant};

use muster_protocol::LauncherId;
use muster_protocol::codec::{self, Deframer};
use muster_protocol::local::{Answer, Query, ToAgent};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::time::{ClockId, clock_gettime};
use serde_json::Value;

use super::procs;

/// The hidden subcommand.
pub const WORD: &str = "__reaper";

/// The longest that it tries to kill what a dead launcher left: what is stuck in the kernel outlives
/// any patience.
const PATIENCE: Duration = Duration::from_secs(30);

/// How often it looks for workers to kill, and once there are none.
const KILL_AGAIN: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));

/// How often it looks for an answer of the agent.
const LOOK: Duration = Duration::from_millis(20);

/// How often the agent is asked, and how long it may take to answer.
const ASK: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(1));

/// When it wakes so late, it was stopped itself, and the launcher and the agent with it, perhaps:
/// they have so long to say something.
const LATE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(250));

/// A moment by `CLOCK_MONOTONIC`, in nanoseconds. It stands still while the machine sleeps, and the
/// workers with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Moment(u64);

impl Moment {
    fn now() -> Moment {
        let Ok(spec) = clock_gettime(ClockId::CLOCK_MONOTONIC) else {
            return Moment(0);
        };
        let seconds = u64::try_from(spec.tv_sec()).unwrap_or(0);
        let nanos = u64::try_from(spec.tv_nsec()).unwrap_or(0);
        Moment(seconds.saturating_mul(1_000_000_000).saturating_add(nanos))
    }

    fn after(self, time: Duration) -> Moment {
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Moment(self.0.saturating_add(nanos))
    }

    fn since(self, other: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(other.0))
    }
}

/// A word of the launcher's: it moves, and this is how long a lease of its workers is. Zero: it has
/// no workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Beat {
    at: Moment,
    lease: Duration,
}

impl Beat {
    const LEN: usize = 16;

    fn encode(self) -> [u8; Beat::LEN] {
        let lease = u64::try_from(self.lease.as_nanos()).unwrap_or(u64::MAX);
        let mut out = [0; Beat::LEN];
        out[..8].copy_from_slice(&self.at.0.to_le_bytes());
        out[8..].copy_from_slice(&lease.to_le_bytes());
        out
    }

    fn decode(bytes: [u8; Beat::LEN]) -> Beat {
        let (mut at, mut lease) = ([0; 8], [0; 8]);
        at.copy_from_slice(&bytes[..8]);
        lease.copy_from_slice(&bytes[8..]);
        Beat {
            at: Moment(u64::from_le_bytes(at)),
            lease: Duration::from_nanos(u64::from_le_bytes(lease)),
        }
    }

    /// When the agent is asked in the launcher's place.
    fn quiet(self) -> Moment {
        self.at.after(self.lease / 6)
    }

    /// For how long the launcher's word counts without the agent's. The lease may be over at that
    /// moment, and the agent's order unread. Others start no sooner than this after its end: a lease
    /// is three quarters of `suspect_after`, and this is the last.
    fn until(self) -> Moment {
        self.at.after(self.lease / 3)
    }
}

/// Knowledge of the workers' right to go on.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    beat: Option<Beat>,
    /// Until when the agent lets them go on.
    granted: Moment,
    /// Until when somebody may say something after all of them were stopped.
    hold: Moment,
    /// Whether this word of the launcher's was held up for already.
    held: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// Until the launcher says something, at most for so long.
    Wait(Option<Duration>),
    Ask,
    Kill,
}

impl Known {
    fn heard(&mut self, beat: Beat) {
        self.beat = Some(beat);
        self.held = false;
    }

    /// It is awake later than it wanted to be.
    fn late(&mut self, now: Moment, by: Duration) {
        if by > LATE.0 && !self.held {
            self.held = true;
            self.hold = now.after(LATE.1);
        }
    }

    fn next(&self, now: Moment) -> Next {
        let Some(beat) = self.beat.filter(|b| !b.lease.is_zero()) else {
            return Next::Wait(None);
        };
        if now < beat.quiet() {
            Next::Wait(Some(beat.quiet().since(now)))
        } else if now < beat.until().max(self.granted).max(self.hold) {
            Next::Ask
        } else {
            Next::Kill
        }
    }
}

/// Runs the sidecar if the command line asks for it: `muster __reaper ID SOCKET PID...`, by the
/// launcher's id, its agent's socket, and children of the launcher's that are none of its workers.
pub fn main_if_asked(mut argv: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    if argv.nth(1)? != WORD {
        return None;
    }
    let id = argv.next()?.into_string().ok()?;
    let socket = argv.next()?.into();
    let spared = argv.filter_map(|pid| pid.to_str()?.parse().ok()).collect();
    Some(run(&id, socket, spared))
}

fn run(id: &str, socket: PathBuf, mut spared: Vec<i32>) -> ExitCode {
    spared.push(nix::unistd::getpid().as_raw());
    let launcher = nix::unistd::getppid().as_raw();
    let asker = LauncherId::from_hex(id).and_then(|id| Asker::start(id, socket).ok());
    let mut known = Known::default();
    // When it wants to be awake again, unless it hears something.
    let mut due = None;
    // The word after which it killed.
    let mut told = None;
    loop {
        let now = Moment::now();
        if let Some(due) = due.take() {
            known.late(now, now.since(due));
        }
        known.granted = asker.as_ref().map_or(known.granted, Asker::granted);
        let next = known.next(now);
        let wait = match next {
            Next::Wait(wait) => wait,
            Next::Ask => {
                asker.iter().for_each(Asker::ask);
                Some(LOOK)
            }
            Next::Kill => Some(Duration::ZERO),
        };
        // Before anything is killed: what was found may have been started after a word that waits.
        let left = (next == Next::Kill).then(|| all(id, launcher, &spared));
        let over = known.beat.filter(|b| told != Some(b.at));
        due = wait.map(|wait| now.after(wait)).filter(|_| left.is_none());
        match (hear(wait), left) {
            (Heard::Beat(word), _) => known.heard(word),
            (Heard::Nothing, None) => {}
            (Heard::Nothing, Some(left)) => {
                let pause = match left.is_empty() {
                    true => KILL_AGAIN.1,
                    false => KILL_AGAIN.0,
                };
                // Also where there is none yet: the launcher may have been stopped just before it starts them.
                if let Some(beat) = over {
                    told = Some(beat.at);
                    tell(beat.at);
                }
                left.into_iter().for_each(procs::kill);
                match hear(Some(pause)) {
                    Heard::Beat(word) => known.heard(word),
                    Heard::Nothing => {}
                    Heard::End => break,
                }
            }
            (Heard::End, _) => break,
        }
    }
    let started = Instant::now();
    // Two clean scans in a row: one alone can miss a child that is forked while it runs.
    let mut clean = 0;
    while clean < 2 && started.elapsed() < PATIENCE {
        let left = procs::carriers(id);
        clean = if left.is_empty() { clean + 1 } else { 0 };
        left.into_iter().for_each(procs::kill);
        std::thread::sleep(Duration::from_millis(2));
    }
    ExitCode::SUCCESS
}

/// Tells the launcher, should it go on, that what it had started by its last word is killed now. Once
/// for a word: the pipe never fills.
fn tell(last: Moment) {
    let _ = nix::unistd::write(io::stdout(), &last.0.to_le_bytes());
}

/// Processes that a launcher that still is there has started.
fn all(id: &str, launcher: i32, spared: &[i32]) -> Vec<i32> {
    let mut left = procs::carriers(id);
    left.extend(procs::descendants_of(launcher, spared));
    left
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Heard {
    Beat(Beat),
    Nothing,
    End,
}

/// The newest word of the launcher's within the time.
fn hear(within: Option<Duration>) -> Heard {
    let mut heard = Heard::Nothing;
    let mut wait = match within {
        Some(Duration::ZERO) => PollTimeout::ZERO,
        // Rounded up: nothing is over before its time.
        Some(time) => {
            PollTimeout::try_from(time.as_millis().saturating_add(1)).unwrap_or(PollTimeout::MAX)
        }
        None => PollTimeout::NONE,
    };
    let pipe = io::stdin();
    loop {
        match poll(&mut [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)], wait) {
            Ok(0) | Err(Errno::EINTR) => return heard,
            Ok(_) => {}
            Err(_) => return Heard::End,
        }
        // Words are written whole, and one is read at a time.
        let mut word = [0; Beat::LEN];
        match nix::unistd::read(&pipe, &mut word) {
            Ok(Beat::LEN) => heard = Heard::Beat(Beat::decode(word)),
            Err(Errno::EINTR) => {}
            Ok(_) | Err(_) => return Heard::End,
        }
        wait = PollTimeout::ZERO;
    }
}

/// A thread that asks the agent when it is told to: an agent that does not answer holds up nobody.
struct Asker {
    thread: Thread,
    granted: Arc<AtomicU64>,
}

impl Asker {
    fn start(launcher: LauncherId, socket: PathBuf) -> io::Result<Asker> {
        let granted = Arc::new(AtomicU64::new(0));
        let shared = granted.clone();
        let thread = std::thread::Builder::new()
            .name("asker".into())
            .spawn(move || {
                loop {
                    std::thread::park();
                    let asked = Moment::now();
                    if let Some(left) = ask(&socket, launcher) {
                        shared.fetch_max(asked.after(left).0, Ordering::SeqCst);
                    }
                    std::thread::sleep(ASK.0);
                }
            })?;
        let thread = thread.thread().clone();
        Ok(Asker { thread, granted })
    }

    fn ask(&self) {
        self.thread.unpark();
    }

    /// Until when the workers may go on by the agent's word.
    fn granted(&self) -> Moment {
        Moment(self.granted.load(Ordering::SeqCst))
    }
}

/// For how long the workers of a launcher may go on without it.
fn ask(socket: &Path, launcher: LauncherId) -> Option<Duration> {
    let mut stream = UnixStream::connect(socket).ok()?;
    stream.set_read_timeout(Some(ASK.1)).ok()?;
    stream.set_write_timeout(Some(ASK.1)).ok()?;
    let query = ToAgent::Query(Query::Lease { launcher });
    let frame = codec::encode_frame(&query).ok()?;
    stream.write_all(&codec::with_length(&frame)).ok()?;
    let mut deframer = Deframer::default();
    let mut buffer = [0; 4096];
    loop {
        if let Some(frame) = deframer.next_frame().ok()? {
            let Answer::Json(text) = codec::decode_frame(frame).ok()? else {
                return None;
            };
            let answer: Value = serde_json::from_str(&text).ok()?;
            return answer["lease_ms"].as_u64().map(Duration::from_millis);
        }
        let got = stream.read(&mut buffer).ok().filter(|n| *n > 0)?;
        deframer.push(buffer.get(..got)?);
    }
}

/// The launcher's end of a pipe: the sidecar's stays as it is.
fn waits_for_nobody(fd: RawFd) {
    // SAFETY: fcntl on a descriptor that is open and ours.
    unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
}

/// A running sidecar.
#[derive(Debug)]
pub struct Sidecar {
    child: Child,
    pipe: Option<ChildStdin>,
    told: Option<ChildStdout>,
    /// When the workers of now were started, and whether they were killed.
    began: Moment,
    killed: bool,
}

impl Sidecar {
    /// Starts one from the program at `muster`; `spared` are children that are no workers.
    pub fn start(muster: &Path, id: &str, socket: &Path, spared: &[i32]) -> io::Result<Sidecar> {
        let mut command = Command::new(muster);
        command
            .args([WORD, id])
            .arg(socket)
            .args(spared.iter().map(i32::to_string))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .current_dir("/");
        // SAFETY: setsid and signal are async-signal-safe. A session of its own, and deaf to what a
        // terminal or a supervisor sends to all: it must outlive the launcher.
        unsafe {
            command.pre_exec(|| {
                libc::setsid();
                for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT] {
                    libc::signal(signal, libc::SIG_IGN);
                }
                Ok(())
            });
        }
        let mut child = command.spawn()?;
        let (pipe, told) = (child.stdin.take(), child.stdout.take());
        pipe.iter()
            .for_each(|pipe| waits_for_nobody(pipe.as_raw_fd()));
        told.iter()
            .for_each(|told| waits_for_nobody(told.as_raw_fd()));
        Ok(Sidecar {
            child,
            pipe,
            told,
            began: Moment::default(),
            killed: false,
        })
    }

    /// Before workers are started: it takes them for none of those before.
    pub fn begin(&mut self, lease: Duration) {
        self.began = Moment::now();
        self.killed = false;
        self.beat(lease);
    }

    /// The launcher moves, and so long is a lease of its workers. A pipe that is full belongs to a
    /// sidecar that is stopped: it hears the next word.
    pub fn beat(&mut self, lease: Duration) {
        let at = Moment::now();
        if let Some(pipe) = &mut self.pipe {
            let _ = pipe.write(&Beat { at, lease }.encode());
        }
    }

    /// Whether it has killed the workers of now.
    pub fn has_killed(&mut self) -> bool {
        let mut word = [0; 8];
        while let Some(told) = &mut self.told
            && let Ok(8) = told.read(&mut word)
        {
            self.killed |= Moment(u64::from_le_bytes(word)) >= self.began;
        }
        self.killed
    }

    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Tells it that the launcher is done, and waits for it.
    pub fn end(mut self) {
        drop(self.pipe.take());
        let _ = self.child.wait();
    }
}

/// This program, also when its file was replaced meanwhile (an upgrade).
pub fn this_program() -> PathBuf {
    std::env::current_exe()
        .ok()
        .filter(|p| p.exists())
        .unwrap_or_else(|| PathBuf::from("/proc/self/exe"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_millis(1_500);

    fn at(ms: u64) -> Moment {
        Moment::default().after(Duration::from_millis(ms))
    }

    fn beaten(ms: u64) -> Known {
        let mut known = Known::default();
        known.heard(Beat {
            at: at(ms),
            lease: LEASE,
        });
        known
    }

    #[test]
    fn the_launchers_word_counts_for_no_longer_than_others_wait_after_a_lease() {
        // Cut off at 0, stopped at 1,400: the lease is over at 1,500, and others start at 2,000.
        let mut known = beaten(1_400);
        assert_eq!(
            known.next(at(1_649)),
            Next::Wait(Some(Duration::from_millis(1)))
        );
        assert_eq!(known.next(at(1_650)), Next::Ask);
        assert_eq!(known.next(at(1_899)), Next::Ask);
        assert_eq!(known.next(at(1_900)), Next::Kill);
        // Then the agent's alone.
        known.granted = at(2_500);
        assert_eq!(known.next(at(2_499)), Next::Ask);
        assert_eq!(known.next(at(2_500)), Next::Kill);
        known.heard(Beat {
            at: at(2_600),
            lease: Duration::ZERO,
        });
        assert_eq!(known.next(at(9_000)), Next::Wait(None));
    }

    #[test]
    fn after_a_pause_of_the_whole_machine_others_may_speak_first() {
        let mut known = beaten(1_000);
        known.late(at(1_300), LATE.0);
        assert_eq!(known.next(at(1_500)), Next::Kill);
        known.late(at(1_600), Duration::from_millis(350));
        assert_eq!(known.next(at(1_849)), Next::Ask);
        assert_eq!(known.next(at(1_850)), Next::Kill);
        // Once for a word: one that is late again and again kills in the end.
        known.late(at(1_900), Duration::from_secs(9));
        assert_eq!(known.next(at(1_900)), Next::Kill);
    }
}
