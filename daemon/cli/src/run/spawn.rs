//! Starting workers, from one thread that lives as long as the launcher.
//!
//! The parent-death signal of prctl(2) is bound to the *thread* that forked: were a worker started
//! from a pool's thread, it would be killed when that thread ends.

use std::ffi::OsString;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Sender};

/// Where a stream of a worker goes.
#[derive(Debug)]
pub enum Out {
    /// The launcher's own.
    Inherit,
    Null,
    To(OwnedFd),
}

impl From<Out> for Stdio {
    fn from(out: Out) -> Stdio {
        match out {
            Out::Inherit => Stdio::inherit(),
            Out::Null => Stdio::null(),
            Out::To(fd) => Stdio::from(fd),
        }
    }
}

/// One worker to start.
#[derive(Debug)]
pub struct Request {
    pub program: OsString,
    pub args: Vec<OsString>,
    /// On top of the launcher's own environment.
    pub env: Vec<(&'static str, OsString)>,
    pub stdout: Out,
    pub stderr: Out,
    /// A descriptor that the worker inherits under its own number.
    pub pass: Option<OwnedFd>,
}

type Reply = (Vec<i32>, Option<io::Error>);

/// The thread that starts workers.
#[derive(Debug)]
pub struct Spawner {
    orders: Sender<(Vec<Request>, Sender<Reply>)>,
}

impl Spawner {
    pub fn start() -> io::Result<Spawner> {
        let (orders, inbox) = mpsc::channel::<(Vec<Request>, Sender<Reply>)>();
        std::thread::Builder::new()
            .name("spawner".into())
            .spawn(move || {
                while let Ok((requests, reply)) = inbox.recv() {
                    let _ = reply.send(spawn_all(requests));
                }
            })?;
        Ok(Spawner { orders })
    }

    /// Starts workers in order, each in a session of its own, and returns when the last program was
    /// executed. On an error the process ids of those that run already come with it. Nobody may
    /// reap children meanwhile.
    pub fn spawn(&self, requests: Vec<Request>) -> Reply {
        let (reply, wait) = mpsc::channel();
        let gone = || io::Error::other("the thread that starts workers is gone");
        if self.orders.send((requests, reply)).is_err() {
            return (Vec::new(), Some(gone()));
        }
        wait.recv().unwrap_or_else(|_| (Vec::new(), Some(gone())))
    }
}

fn spawn_all(requests: Vec<Request>) -> Reply {
    let mut pids = Vec::new();
    for request in requests {
        match spawn_one(request) {
            Ok(pid) => pids.push(pid),
            Err(error) => return (pids, Some(error)),
        }
    }
    (pids, None)
}

fn spawn_one(request: Request) -> io::Result<i32> {
    let launcher = std::process::id() as i32;
    let pass: Option<RawFd> = request.pass.as_ref().map(AsRawFd::as_raw_fd);
    let mut command = Command::new(&request.program);
    command
        .args(&request.args)
        .envs(request.env)
        .stdout(request.stdout)
        .stderr(request.stderr);
    // SAFETY: only async-signal-safe calls between fork and exec, and no allocation.
    unsafe {
        command.pre_exec(move || {
            if libc::setsid() < 0 || libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) < 0 {
                return Err(io::Error::last_os_error());
            }
            // Died before prctl: the signal will not come.
            if libc::getppid() != launcher {
                libc::_exit(125);
            }
            if pass.is_some_and(|fd| libc::fcntl(fd, libc::F_SETFD, 0) < 0) {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    // The handle is dropped, which neither waits nor kills: whoever asked reaps.
    command.spawn().map(|child| child.id() as i32)
}

/// Makes orphans of workers children of this process, so that they can be found and reaped.
pub fn become_subreaper() -> io::Result<()> {
    // SAFETY: prctl with these arguments reads no memory.
    if unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
