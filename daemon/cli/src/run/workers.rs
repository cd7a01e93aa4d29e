//! The workers of this node: started, watched, signalled, and ended with everything that descends
//! from them. One task owns all of it and alone reaps, so that a process id that is signalled is
//! never another process's.

mod oom;
mod progress;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{self, IsTerminal};
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use muster_launcher::Left;
use muster_protocol::control::live::{Assignment, Term};
use muster_protocol::control::report::METRICS_WORDS;
use muster_protocol::local::{Damaged, Start, WorkerExit};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::console::{Console, Target};
use super::control::ControlPage;
use super::environment::{self, Job};
use super::logs::{self, LogRoot};
use super::options::Logs;
use super::output::{LogFile, Pump, Stream, Tail, pipe};
use super::procs;
use super::sidecar::Sidecar;
use super::spawn::{self, Out, Request, Spawner, become_subreaper};
use oom::OomKills;

/// How long a worker's last output is waited for when it is reaped.
const DRAIN: Duration = Duration::from_millis(200);

/// Settings that stay the same for all generations of one launcher.
#[derive(Debug)]
pub struct Setup {
    pub job: Job,
    pub program: OsString,
    pub args: Vec<OsString>,
    pub logs: Logs,
    pub slots: u16,
    /// This program, for the sidecar.
    pub muster: PathBuf,
    /// Where the agent answers the sidecar.
    pub socket: PathBuf,
    /// Whether others may start the job anew while this launcher is stopped: then its workers go on
    /// without it only for as long as its agent says.
    pub leased: bool,
    /// Whether the launcher's stdout and stderr are terminals.
    pub terminals: (bool, bool),
}

impl Setup {
    /// Asks whether the launcher's own streams are terminals.
    pub fn terminals_here() -> (bool, bool) {
        (io::stdout().is_terminal(), io::stderr().is_terminal())
    }
}

#[derive(Debug)]
struct Worker {
    local_rank: u16,
    rank: u32,
    pid: i32,
    ended: bool,
    /// The start that it works for, or worked for last.
    term: Term,
    /// Its process group was seen empty after it was reaped: the number may be another's now.
    group_gone: bool,
    dir: PathBuf,
    tail: Option<Tail>,
    page: ControlPage,
    /// Why it was ended, where it hung.
    hung: Option<String>,
    /// The newest metrics that could be read whole.
    metrics: Option<[u64; METRICS_WORDS]>,
}

impl Worker {
    fn assign(&mut self, start: &Start) {
        self.rank = start.first_rank + u32::from(self.local_rank);
        self.term = Term::of(start.number, start.attempt);
        let assignment = Assignment {
            term: self.term,
            rank: self.rank,
            world: start.world,
            local_rank: self.local_rank.into(),
            local_world: start.slots.into(),
            node_rank: start.node_rank,
            nodes: start.nodes,
            restarts: start.restart_count,
            master: start.master,
            digest: start.digest,
            lineage: start.lineage,
        };
        self.page.assign(&assignment, start.restore);
    }

    fn is_parked(&self) -> bool {
        !self.ended && self.page.has_parked(self.term)
    }

    /// A signal to its process group.
    fn signal(&self, signal: i32) {
        // SAFETY: kill() has no memory effects. The group exists or existed under this number: its
        // leader is not reaped, or members were seen since.
        unsafe { libc::kill(-self.pid, signal) };
    }
}

/// The supervisor.
#[derive(Debug)]
pub struct Workers {
    setup: Setup,
    spawner: Spawner,
    pump: Pump,
    /// Children that this process had before: a script that starts something and then execs the
    /// launcher. They are none of its business.
    bystanders: Vec<i32>,
    sidecar: Option<Sidecar>,
    sidecar_restarts: u32,
    root: LogRoot,
    workers: Vec<Worker>,
    oom_kills: OomKills,
}

impl Workers {
    /// Starts the threads and the sidecar, and makes the folder for logs. No worker yet.
    pub fn open(setup: Setup, console: Console) -> anyhow::Result<Workers> {
        let bystanders = procs::descendants(&[]);
        become_subreaper()?;
        let id = setup.job.launcher.hex();
        let sidecar = Sidecar::start(&setup.muster, &id, &setup.socket, &bystanders)?;
        Ok(Workers {
            spawner: Spawner::start()?,
            pump: Pump::start(console)?,
            bystanders,
            sidecar: Some(sidecar),
            sidecar_restarts: 0,
            root: LogRoot::create(setup.logs.dir.as_deref(), &setup.job.id, setup.job.launcher)
                .with_context(|| match &setup.logs.dir {
                    Some(dir) => {
                        format!("--log-dir {}: no folder can be made there", dir.display())
                    }
                    None => format!(
                        "no folder for logs can be made in {}; name a place with --log-dir",
                        std::env::temp_dir().display()
                    ),
                })?,
            workers: Vec::new(),
            oom_kills: OomKills::of_this_process(),
            setup,
        })
    }

    /// How many there are on this node.
    pub fn count(&self) -> u16 {
        self.setup.slots
    }

    pub fn root(&self) -> &LogRoot {
        &self.root
    }

    /// Starts a generation's workers: parked ones get their new place, for all others a process is
    /// started. On an error nothing of it is left running, except for what [`left`](Self::left)
    /// still reports. Those before must be gone or parked.
    pub fn spawn(&mut self, start: &Start, interface: Option<&str>) -> Result<(), String> {
        self.workers.retain(Worker::is_parked);
        let stay: Vec<u16> = self.workers.iter().map(|w| w.local_rank).collect();
        let root = self.root.path().display().to_string();
        let attempt = self
            .root
            .attempt(start.restart_count)
            .map_err(|e| format!("cannot make a folder in {root}: {e}; see --log-dir"))?;
        let mut requests = Vec::new();
        let mut streams = Vec::new();
        let mut workers = Vec::new();
        for local_rank in (0..start.slots).filter(|local| !stay.contains(local)) {
            let (request, pipes, worker) = self
                .prepare(
                    start,
                    local_rank,
                    attempt.join(local_rank.to_string()),
                    interface,
                )
                .map_err(|e| format!("cannot prepare local rank {local_rank}: {e}"))?;
            requests.push(request);
            streams.push(pipes);
            workers.push(worker);
        }
        let mut error = None;
        if stay.is_empty() {
            self.oom_kills.forget();
        }
        let results = self.spawner.spawn(requests);
        for ((mut worker, pipes), result) in workers.into_iter().zip(streams).zip(results) {
            match result {
                Ok(pid) => {
                    worker.pid = pid;
                    self.workers.push(worker);
                    for mut stream in pipes {
                        stream.pid = pid;
                        self.pump.add(stream);
                    }
                }
                Err(failed) => error = Some(failed),
            }
        }
        let Some(error) = error else {
            // Last, so that none of them begins when others cannot.
            let stayed = self
                .workers
                .iter_mut()
                .filter(|w| stay.contains(&w.local_rank));
            stayed.for_each(|worker| worker.assign(start));
            return Ok(());
        };
        self.kill_all();
        Err(spawn::why_not_run(&self.setup.program, &error))
    }

    fn prepare(
        &self,
        start: &Start,
        local_rank: u16,
        dir: PathBuf,
        interface: Option<&str>,
    ) -> io::Result<(Request, Vec<Stream>, Worker)> {
        std::fs::create_dir(&dir)?;
        let rank = start.first_rank + u32::from(local_rank);
        let mut env = environment::variables(
            &self.setup.job,
            start,
            local_rank,
            &dir.join("error.json"),
            interface,
            &|name| std::env::var_os(name).is_some(),
        );
        if self.setup.job.virtual_local_rank {
            let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
            let device = environment::device(local_rank, visible.as_deref());
            let device = device.map_err(io::Error::other)?;
            env.push(("CUDA_VISIBLE_DEVICES", device.into()));
        }
        let (page, page_fd) = ControlPage::create()?;
        env.push((
            super::control::FD_ENV,
            page_fd.as_raw_fd().to_string().into(),
        ));
        let mut pipes = Vec::new();
        let stdout = self.route(local_rank, rank, Target::Stdout, &dir, None, &mut pipes)?;
        let tail = Tail::default();
        let stderr = self.route(
            local_rank,
            rank,
            Target::Stderr,
            &dir,
            Some(&tail),
            &mut pipes,
        )?;
        let piped = pipes.iter().any(|s| s.tail.is_some());
        let args = self.setup.args.iter();
        let request = Request {
            program: self.setup.program.clone(),
            args: args
                .map(|a| environment::substitute(a, local_rank))
                .collect(),
            env,
            stdout,
            stderr,
            pass: Some(page_fd),
        };
        let mut worker = Worker {
            local_rank,
            rank,
            term: Term::default(),
            pid: 0,
            ended: false,
            group_gone: false,
            dir,
            tail: piped.then_some(tail),
            page,
            hung: None,
            metrics: None,
        };
        worker.assign(start);
        worker.page.hold(start.restore.is_some());
        Ok((request, pipes, worker))
    }

    /// torchrun's rules for one stream: redirected to its file, or both file and console (tee), or
    /// the launcher's own stream. The latter goes through a pipe where a prefix is wanted or the
    /// tail is kept; else the worker writes directly.
    fn route(
        &self,
        local_rank: u16,
        rank: u32,
        target: Target,
        dir: &std::path::Path,
        tail: Option<&Tail>,
        pipes: &mut Vec<Stream>,
    ) -> io::Result<Out> {
        let logs = &self.setup.logs;
        let pick = |s: super::options::Streams| match target {
            Target::Stdout => s.out,
            Target::Stderr => s.err,
        };
        let file = dir.join(match target {
            Target::Stdout => "stdout.log",
            Target::Stderr => "stderr.log",
        });
        let shown = logs.show.is_empty() || logs.show.contains(&local_rank);
        let tee = pick(logs.tee.of(local_rank));
        if pick(logs.redirects.of(local_rank)) && !tee {
            return Ok(Out::To(logs::open_log(&file)?.into()));
        }
        let terminal = match target {
            Target::Stdout => self.setup.terminals.0,
            Target::Stderr => self.setup.terminals.1,
        };
        let several = self.setup.slots > 1;
        let prefixed = tee || (terminal && several);
        if !tee && tail.is_none() && (!shown || !prefixed) {
            return Ok(if shown { Out::Inherit } else { Out::Null });
        }
        let (read, write) = pipe()?;
        pipes.push(Stream {
            pipe: read,
            pid: 0,
            console: shown.then_some(target),
            prefix: if prefixed {
                prefix(&self.setup.job.role, rank, local_rank)
            } else {
                Vec::new()
            },
            lines: several,
            file: if tee {
                Some(LogFile::new(logs::open_log(&file)?, file))
            } else {
                None
            },
            tail: tail.cloned(),
        });
        Ok(Out::To(write))
    }

    /// Ends the workers' part in their generation: a live worker is told to park, any other gets the
    /// signal.
    pub fn end_term(&self, signal: i32) {
        let (live, others): (Vec<&Worker>, Vec<&Worker>) = self
            .workers
            .iter()
            .filter(|w| !w.group_gone)
            .partition(|w| !w.ended && w.page.is_live());
        live.iter().for_each(|worker| worker.page.end(worker.term));
        others.iter().for_each(|worker| worker.signal(signal));
    }

    /// SIGKILL to the process groups of all that have not parked; to everything, where none has.
    pub fn kill_unparked(&self) {
        if !self.workers.iter().any(Worker::is_parked) {
            return self.kill_all();
        }
        let unparked = self
            .workers
            .iter()
            .filter(|w| !w.group_gone && !w.is_parked());
        unparked.for_each(|worker| worker.signal(libc::SIGKILL));
    }

    /// The workers that were told to end and run, or have left processes that do.
    pub fn unended(&self) -> Vec<String> {
        let running = (self.workers.iter()).filter(|w| !w.group_gone && !w.is_parked());
        let words = running.map(|w| match w.ended {
            false => format!("rank {} (pid {})", w.rank, w.pid),
            true => format!("what rank {} has started", w.rank),
        });
        words.collect()
    }

    /// Whether any worker stays through a change of its generation.
    pub fn have_live(&self) -> bool {
        self.workers.iter().any(|w| !w.ended && w.page.is_live())
    }

    /// Whether there are workers and all that run have parked.
    pub fn have_parked(&self) -> bool {
        let mut running = self.workers.iter().filter(|w| !w.ended).peekable();
        running.peek().is_some() && running.all(Worker::is_parked)
    }

    /// Sends a signal to every worker's process group.
    pub fn signal(&self, signal: i32) {
        let there = self.workers.iter().filter(|w| !w.group_gone);
        there.for_each(|worker| worker.signal(signal));
    }

    /// SIGKILL to every process group and to every process that descends from a worker.
    pub fn kill_all(&self) {
        self.signal(libc::SIGKILL);
        procs::all_of(&self.setup.job.launcher.hex(), &self.spared())
            .into_iter()
            .for_each(procs::kill);
    }

    fn spared(&self) -> Vec<i32> {
        let sidecar = self.sidecar.iter().map(Sidecar::pid);
        sidecar.chain(self.bystanders.iter().copied()).collect()
    }

    /// Reaps every child that ended and returns the workers among them, each with whether it ended
    /// at a stop step. The others are orphans of workers, or the sidecar, which is started again.
    pub fn reap(&mut self) -> Vec<(WorkerExit, bool)> {
        let mut exits = Vec::new();
        loop {
            let (pid, code, signal) = match waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, code)) => (pid.as_raw(), code, None),
                Ok(WaitStatus::Signaled(pid, signal, _)) => {
                    (pid.as_raw(), 128 + signal as i32, Some(signal as i32))
                }
                Err(nix::errno::Errno::EINTR) => continue,
                // StillAlive, and ECHILD: no child at all.
                _ => break,
            };
            if let Some(at) = self.workers.iter().position(|w| w.pid == pid && !w.ended) {
                self.workers[at].ended = true;
                let acknowledged = self.workers[at].page.acknowledged().is_some();
                exits.push((self.describe(at, code, signal), acknowledged));
            } else if self.sidecar.as_ref().is_some_and(|s| s.pid() == pid) {
                self.sidecar = self.new_sidecar();
            } else {
                self.bystanders.retain(|bystander| *bystander != pid);
            }
        }
        exits
    }

    /// Somebody killed it. A few times it is replaced; without it only the children of workers can
    /// outlive a SIGKILL of the launcher.
    fn new_sidecar(&mut self) -> Option<Sidecar> {
        self.sidecar_restarts += 1;
        if self.sidecar_restarts > 10 {
            return None;
        }
        let id = self.setup.job.launcher.hex();
        let (muster, socket) = (&self.setup.muster, &self.setup.socket);
        Sidecar::start(muster, &id, socket, &self.bystanders).ok()
    }

    fn leased(&mut self) -> Option<&mut Sidecar> {
        self.sidecar.as_mut().filter(|_| self.setup.leased)
    }

    /// Says that this process moves, and how long a lease of its workers is; zero: there are none.
    pub fn beat(&mut self, lease: Duration) {
        self.oom_kills.pass();
        if let Some(sidecar) = self.leased() {
            sidecar.beat(lease);
        }
    }

    /// Says that workers are about to be started.
    pub fn begin(&mut self, lease: Duration) {
        if let Some(sidecar) = self.leased() {
            sidecar.begin(lease);
        }
    }

    /// Whether the sidecar has killed those that were started last, because this process was stopped
    /// or blocked.
    pub fn were_killed(&mut self) -> bool {
        self.leased().is_some_and(Sidecar::has_killed)
    }

    fn describe(&mut self, at: usize, code: i32, signal: Option<i32>) -> WorkerExit {
        let reaped_ms = unix_ms();
        let worker = &mut self.workers[at];
        let mut exit = WorkerExit {
            rank: worker.rank,
            local_rank: worker.local_rank,
            pid: worker.pid as u32,
            code,
            signal,
            hung: worker.hung.is_some() && signal == Some(libc::SIGKILL),
            out_of_memory: None,
            damaged: None,
            at_ms: reaped_ms,
            tail: String::new(),
        };
        if code == 0 {
            return exit;
        }
        if signal == Some(libc::SIGKILL) && !exit.hung {
            exit.out_of_memory = self.oom_kills.look();
        }
        exit.damaged = (worker.page.damage()).map(|damage| Damaged {
            manifest: damage.manifest,
            why: damage.why,
            here: damage.here,
        });
        let error = logs::read_error_file(&worker.dir.join("error.json"));
        exit.at_ms = logs::failed_at(error.as_ref(), reaped_ms);
        exit.tail = match (error.filter(|e| !e.text.is_empty()), &worker.tail) {
            (Some(error), _) => error.text,
            (None, Some(tail)) => {
                self.pump.drain(Some(worker.pid), false, DRAIN);
                tail.text()
            }
            (None, None) => logs::file_tail(&worker.dir.join("stderr.log")),
        };
        if let Some(why) = &worker.hung {
            exit.tail = format!("{}\n{why}", exit.tail).trim_start().to_owned();
        }
        exit
    }

    /// The processes that still run. Cheap while workers run; looks through /proc once they are gone.
    pub fn left(&mut self) -> Left {
        let parked = self.have_parked();
        if !parked && self.workers.iter().any(|w| !w.ended) {
            return Left::Workers;
        }
        for worker in self.workers.iter_mut().filter(|w| w.ended && !w.group_gone) {
            // SAFETY: signal 0 only asks.
            worker.group_gone = unsafe { libc::kill(-worker.pid, 0) } < 0
                && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
        }
        if self.workers.iter().any(|w| w.ended && !w.group_gone) {
            return Left::Groups;
        }
        if parked {
            // What else descends from them belongs to them.
            return Left::Parked;
        }
        let id = self.setup.job.launcher.hex();
        if procs::all_of(&id, &self.spared()).is_empty() {
            Left::Nothing
        } else {
            Left::Escaped
        }
    }

    /// The processes that still run, for the message about one that cannot be killed.
    pub fn survivors(&self) -> BTreeSet<i32> {
        procs::all_of(&self.setup.job.launcher.hex(), &self.spared())
            .into_iter()
            .collect()
    }

    /// Takes in the last output of workers that are gone and closes their pipes.
    pub fn close_output(&mut self) {
        self.pump.drain(None, true, DRAIN);
    }

    /// The control pages of the workers that run, by local rank.
    pub fn pages(&mut self) -> impl Iterator<Item = &mut ControlPage> {
        self.workers
            .iter_mut()
            .filter(|w| !w.ended)
            .map(|w| &mut w.page)
    }

    /// The step in which the worker of this local rank ended, where it was attached until then.
    pub fn ended_at(&self, local_rank: u16) -> Option<u64> {
        let mut ended = self.workers.iter().filter(|w| w.ended);
        let page = &ended.find(|w| w.local_rank == local_rank)?.page;
        page.point().map(|point| point.step)
    }

    /// Where a local rank's files of this generation are.
    pub fn dir_of(&self, local_rank: u16) -> Option<PathBuf> {
        let worker = self.workers.iter().find(|w| w.local_rank == local_rank)?;
        Some(worker.dir.clone())
    }

    /// Ends the sidecar. Nothing may run any more.
    pub fn close(&mut self, success: bool) {
        self.close_output();
        if let Some(sidecar) = self.sidecar.take() {
            sidecar.end();
        }
        self.root.clean(success);
    }
}

/// `[rank0]: `, or what torchrun's TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE says.
fn prefix(role: &str, rank: u32, local_rank: u16) -> Vec<u8> {
    match std::env::var("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") {
        Ok(template) => template
            .replace("${role_name}", role)
            .replace("${local_rank}", &local_rank.to_string())
            .replace("${rank}", &rank.to_string())
            .into_bytes(),
        Err(_) => format!("[rank{rank}]: ").into_bytes(),
    }
}

/// Now, in milliseconds since the Unix epoch.
pub fn unix_ms() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}
