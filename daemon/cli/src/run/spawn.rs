//! Starting workers, from threads that live as long as the launcher.
//!
//! The parent-death signal of prctl(2) is bound to the *thread* that forked: were a worker started
//! from a pool's thread, it would be killed when that thread ends. There are a few threads, because
//! one waits for each program to be executed before it starts the next.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, Sender};

use muster_protocol::local;

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

/// At most so many workers are started at the same time.
const THREADS: usize = 4;

type Order = (usize, Request, Sender<(usize, io::Result<i32>)>);

/// The threads that start workers.
#[derive(Debug)]
pub struct Spawner {
    threads: Vec<Sender<Order>>,
}

impl Spawner {
    pub fn start() -> io::Result<Spawner> {
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (0..cpus.min(THREADS))
            .map(|_| {
                let (orders, inbox) = mpsc::channel::<Order>();
                std::thread::Builder::new()
                    .name("spawner".into())
                    .spawn(move || {
                        while let Ok((at, request, reply)) = inbox.recv() {
                            let _ = reply.send((at, spawn_one(request)));
                        }
                    })?;
                Ok(orders)
            })
            .collect::<io::Result<_>>()?;
        Ok(Spawner { threads })
    }

    /// Starts workers, each in a session of its own, and returns when the last program was executed:
    /// their process ids in order, or why one does not run. Nobody may reap children meanwhile.
    pub fn spawn(&self, requests: Vec<Request>) -> Vec<io::Result<i32>> {
        let mut results: Vec<io::Result<i32>> = requests
            .iter()
            .map(|_| Err(io::Error::other("a thread that starts workers is gone")))
            .collect();
        let (reply, replies) = mpsc::channel();
        let threads = self.threads.iter().cycle();
        for ((at, request), thread) in requests.into_iter().enumerate().zip(threads) {
            let _ = thread.send((at, request, reply.clone()));
        }
        drop(reply);
        for (at, result) in replies {
            if let Some(slot) = results.get_mut(at) {
                *slot = result;
            }
        }
        results
    }
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

/// Why a program cannot be run, for people. A fault of the program, which will be the same at the
/// next try, is said as [`local::cannot_run`] does.
pub fn why_not_run(program: &OsStr, error: &io::Error) -> String {
    let here = find(program, std::env::var_os("PATH").as_deref()).is_ok();
    let program = program.to_string_lossy();
    match (error.kind(), error.raw_os_error()) {
        (io::ErrorKind::NotFound, _) if here => local::cannot_run(
            &program,
            Some("its interpreter is not there"),
            "check its first line (#!)",
        ),
        (io::ErrorKind::NotFound, _) => local::cannot_run(
            &program,
            None,
            "check the spelling and PATH (for Python: PYTHON_EXEC)",
        ),
        (io::ErrorKind::PermissionDenied, _) => {
            local::cannot_run(&program, Some(&error.to_string()), "is it executable?")
        }
        (_, Some(libc::ENOEXEC)) => local::cannot_run(
            &program,
            Some(&error.to_string()),
            "a script needs a first line like #!/bin/sh, and a binary this machine's architecture",
        ),
        (_, Some(libc::E2BIG | libc::ELOOP | libc::ENOTDIR | libc::EISDIR | libc::ELIBBAD)) => {
            local::cannot_run(&program, Some(&error.to_string()), "correct the command")
        }
        _ => format!("cannot start `{program}`: {error}"),
    }
}

/// Whether a program is there, found as execvp(3) finds it. A name that is misspelt can be said at
/// once; a start that fails later is tried again, for it may be the node's fault.
pub fn find(program: &OsStr, path: Option<&OsStr>) -> io::Result<()> {
    let executable = |file: &Path| {
        if file.is_dir() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        nix::unistd::access(file, nix::unistd::AccessFlags::X_OK).map_err(io::Error::from)
    };
    if program.as_encoded_bytes().contains(&b'/') {
        return executable(Path::new(program));
    }
    let mut refused = io::Error::from(io::ErrorKind::NotFound);
    let path = path.unwrap_or_else(|| OsStr::new("/bin:/usr/bin"));
    for dir in std::env::split_paths(path) {
        match executable(&dir.join(program)) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => refused = error,
            Err(_) => {}
        }
    }
    Err(refused)
}

/// Makes orphans of workers children of this process, so that they can be found and reaped.
pub fn become_subreaper() -> io::Result<()> {
    // SAFETY: prctl with these arguments reads no memory.
    if unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn what_lies_with_the_program_is_told_from_what_may_pass() {
        let dir = tempfile::tempdir().unwrap();
        let why = |name: &str, text: &str| {
            let program = dir.path().join(name);
            std::fs::write(&program, text).unwrap();
            std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
            let error = Command::new(&program).spawn().unwrap_err();
            why_not_run(program.as_os_str(), &error)
        };
        let interpreter = why("a", "#!/no/such/shell\n");
        assert!(interpreter.contains("first line"), "{interpreter}");
        let format = why("b", "no program\n");
        assert!(format.contains("Exec format error"), "{format}");
        for reason in [&interpreter, &format] {
            assert_eq!(local::cannot_run_code(reason), Some(126), "{reason}");
        }
        let of = |errno| {
            let error = io::Error::from_raw_os_error(errno);
            local::cannot_run_code(&why_not_run(OsStr::new("/no/such/tool"), &error))
        };
        assert_eq!(of(libc::ENOENT), Some(127));
        assert_eq!(of(libc::EACCES), Some(126));
        for passing in [libc::EAGAIN, libc::ENOMEM, libc::EMFILE, libc::ETXTBSY] {
            assert_eq!(of(passing), None);
        }
    }

    #[test]
    fn a_program_is_found_as_it_will_be_run() {
        let dir = tempfile::tempdir().unwrap();
        let (bin, plain) = (dir.path().join("bin"), dir.path().join("plain"));
        for (at, mode) in [(&bin, 0o755), (&plain, 0o644)] {
            std::fs::create_dir(at).unwrap();
            let file = at.join("tool");
            std::fs::write(&file, "#!/bin/sh\n").unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let kind = |program: &Path, path: &[&Path]| {
            let path = std::env::join_paths(path).unwrap();
            find(program.as_os_str(), Some(&path)).map_err(|e| e.kind())
        };
        let tool = Path::new("tool");
        assert_eq!(kind(tool, &[&plain, &bin]), Ok(()));
        assert_eq!(kind(&bin.join("tool"), &[]), Ok(()));
        let denied = Err(io::ErrorKind::PermissionDenied);
        assert_eq!(kind(tool, &[&plain]), denied);
        assert_eq!(kind(&plain.join("tool"), &[]), denied);
        assert_eq!(kind(&bin, &[]), denied, "a directory");
        let missing = Err(io::ErrorKind::NotFound);
        assert_eq!(kind(Path::new("other"), &[&bin]), missing);
        assert_eq!(kind(&bin.join("other"), &[&bin]), missing);
        assert_eq!(find(OsStr::new("sh"), None).map_err(|e| e.kind()), Ok(()));
    }
}
