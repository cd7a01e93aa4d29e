//! Meaning of the flags: a [`Plan`] that can be carried out, or an error that names the flag and the
//! fix. Everything about the machine that the plan depends on comes in as a [`Host`].

mod values;

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use muster_protocol::checkpoint::Busy;
use muster_protocol::record::{MAX_SLOTS, Place};
use muster_protocol::spec::{JobSpec, SpecError, Triggers};
use muster_store::Location;
use nix::sys::signal::Signal;

use super::args::{OnBusy, RunArgs};
use super::drive::{Hangs, limits};
use super::saves::CheckpointIo;
use super::saves::replicas::Choice;
use crate::kept::Rules;
use values::{bytes, filter, handled, millis, nodes, place, share, signal, slots, streams};

/// Facts about the machine that the plan needs.
#[derive(Clone, Debug)]
pub struct Host {
    pub cpus: usize,
    pub gpus: usize,
    /// Bytes of memory that are free, of the machine or of this cgroup.
    pub memory: u64,
    /// `$PYTHON_EXEC`, else `python3`.
    pub python: OsString,
    /// Makes the name of an unnamed job of one node unique.
    pub random: u32,
}

/// Which streams of a worker: bit 0 stdout, bit 1 stderr (torchrun's `Std`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Streams {
    pub out: bool,
    pub err: bool,
}

/// `3`, or `0:1,1:3`: streams by local rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StreamMap {
    All(Streams),
    Ranks(Vec<(u16, Streams)>),
}

impl StreamMap {
    pub fn of(&self, local_rank: u16) -> Streams {
        match self {
            StreamMap::All(streams) => *streams,
            StreamMap::Ranks(map) => map
                .iter()
                .find(|(rank, _)| *rank == local_rank)
                .map_or_else(Streams::default, |(_, streams)| *streams),
        }
    }
}

/// Where the workers' output goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Logs {
    /// As given; without it a temporary directory that is removed when the job succeeds.
    pub dir: Option<PathBuf>,
    pub redirects: StreamMap,
    pub tee: StreamMap,
    /// Local ranks to show on the console; all when empty.
    pub show: BTreeSet<u16>,
}

/// Signals that the launcher takes instead of dying of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Handled {
    /// SIGINT: stop the job.
    pub interrupt: bool,
    /// These make the node leave.
    pub leave: Vec<Signal>,
}

/// A checked command line.
#[derive(Clone, Debug)]
pub struct Plan {
    pub job: String,
    pub spec: JobSpec,
    pub slots: u16,
    pub program: OsString,
    pub args: Vec<OsString>,
    /// The file that Python is to run.
    pub script: Option<PathBuf>,
    pub role: String,
    pub logs: Logs,
    pub handled: Handled,
    /// The same as they were named, for the workers.
    pub signals: String,
    /// Each worker sees one GPU, as device 0.
    pub virtual_local_rank: bool,
    pub hangs: Hangs,
    /// First peers to call.
    pub endpoints: Vec<String>,
    /// One node on loopback: no other agent is called.
    pub standalone: bool,
    /// Guard port and addresses on loopback only: with --standalone, and to be set for an embedded
    /// agent that calls nobody.
    pub loopback: bool,
    pub socket: Option<PathBuf>,
    pub store: Option<Location>,
    /// The most bytes of all checkpoint slots.
    pub checkpoint_memory: u64,
    /// A directory for copies of what this node saves.
    pub checkpoint_cache: Option<PathBuf>,
    pub checkpoint_io: CheckpointIo,
    /// How other nodes hold this node's checkpoints in memory.
    pub replicas: Choice,
    /// Which checkpoints are kept in the store.
    pub keep: Rules,
    pub state_dir: Option<PathBuf>,
    pub instance: u16,
    pub place: Place,
    pub local_addr: Option<IpAddr>,
    /// Notes on where torchrun would have acted otherwise; printed once.
    pub notes: Vec<String>,
}

/// A command line that cannot be carried out. Nothing was started.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PlanError {
    #[error(
        "no script given: write `muster run [FLAGS] train.py ARGS` or `muster run [FLAGS] -- PROGRAM ARGS`"
    )]
    NoCommand,
    #[error(
        "unknown flag `{0}`; put the script's own flags after the script name (see `muster run --help`)"
    )]
    UnknownFlag(String),
    #[error("--nnodes {0}: write a number of nodes, or MIN:MAX such as 2:8")]
    Nnodes(String),
    #[error("--checkpoint-memory {0}: write bytes, or a number with K, M, G or T, such as 64G")]
    Bytes(String),
    #[error("--checkpoint-overhead {0}: write a percentage of the time, such as 1%")]
    Share(String),
    #[error(
        "--checkpoint-overhead: what a checkpoint takes is known only of one that goes to a store; name it with --store, or set the time with --checkpoint-every"
    )]
    OverheadWithoutStore,
    #[error(transparent)]
    Spec(#[from] SpecError),
    #[error("--nproc-per-node {0}: write a number from 1 to {MAX_SLOTS}, `auto`, `cpu` or `gpu`")]
    Nproc(String),
    #[error(
        "--nproc-per-node gpu: no GPU is visible here (/dev/nvidia*, NVIDIA_VISIBLE_DEVICES, CUDA_VISIBLE_DEVICES); give a number, or `cpu`"
    )]
    NoGpu,
    #[error(
        "{flag} {text}: write 0 (none), 1 (stdout), 2 (stderr) or 3 (both), or LOCAL_RANK:STREAMS pairs such as 0:1,1:3"
    )]
    Streams { flag: &'static str, text: String },
    #[error("--local-ranks-filter {0}: write local ranks separated by commas, such as 0,1,2")]
    Filter(String),
    #[error("{flag} {text}: not a signal; write a name such as SIGTERM or a number from 1 to 64")]
    Signal { flag: &'static str, text: String },
    #[error("{flag} {text}: this signal cannot be caught; name another")]
    Uncatchable { flag: &'static str, text: String },
    #[error("--module and --no-python exclude each other: leave one out")]
    ModuleWithoutPython,
    #[error("--rdzv-id {0:?}: a job's name has 1 to 64 bytes without control characters or `/`")]
    Job(String),
    #[error("--standalone is for one node, --nnodes asks for {0}: leave one out")]
    Standalone(u16),
    #[error("--local-addr {0}: write an address or a host name of this machine")]
    LocalAddr(String),
    #[error("--rdzv-endpoint {0}: write HOST or HOST:PORT, several separated by commas")]
    Endpoint(String),
    #[error(
        "--birth-quorum: a majority of no endpoints; list every node of the job with --rdzv-endpoint"
    )]
    NoEndpoints,
    #[error("--label {0}: write zone=NAME or switch=NAME")]
    Label(String),
    #[error("--shutdown-timeout {0}: write a number of seconds from 0 to 86400")]
    Shutdown(String),
    #[error("--store {path}: {reason}; make the directory, or name another", path = .path.display())]
    Store { path: PathBuf, reason: String },
}

impl Plan {
    /// Checks the flags. `explicit` is whether the command stood behind a `--`
    /// ([`RunArgs::is_explicit`]).
    pub fn new(args: RunArgs, explicit: bool, host: &Host) -> Result<Plan, PlanError> {
        let (min_nodes, max_nodes) = nodes(&args.nnodes)?;
        let stop_grace = match (args.stop_grace, args.shutdown_timeout) {
            (Some(grace), _) => grace,
            (None, Some(s)) if (0.0..=86_400.0).contains(&s) => Duration::from_secs_f64(s),
            (None, Some(s)) => return Err(PlanError::Shutdown(s.to_string())),
            (None, None) => Duration::from_millis(JobSpec::default().stop_grace_ms.into()),
        };
        let preempt = signal("--preempt-signal", &args.preempt_signal)?;
        let spec = JobSpec {
            min_nodes,
            max_nodes,
            max_restarts: args.max_restarts,
            form_quiet_ms: millis(args.form_quiet),
            join_quiet_ms: millis(args.join_quiet),
            join_max_ms: millis(args.join_max),
            loss_grace_ms: millis(args.loss_grace),
            stop_grace_ms: millis(stop_grace),
            preempt_signal: preempt as i32,
            birth_quorum: birth_quorum(&args, max_nodes)?,
            triggers: triggers(&args)?,
        };
        spec.check()?;
        if args.standalone && max_nodes > 1 {
            return Err(PlanError::Standalone(max_nodes));
        }
        if let Some(Location::Directory(path)) = &args.store {
            check_store(path)?;
        }
        let notes = notes(&args, max_nodes);
        let (program, rest, script) = command(&args, explicit, &host.python)?;
        let job = job_name(&args, max_nodes, host)?;
        let endpoints = endpoints(&args, max_nodes)?;
        Ok(Plan {
            job,
            spec,
            slots: slots(&args.nproc_per_node, host)?,
            program,
            args: rest,
            script,
            logs: Logs {
                redirects: streams("--redirects", &args.redirects)?,
                tee: streams("--tee", &args.tee)?,
                show: filter(args.local_ranks_filter.as_deref())?,
                dir: args.log_dir,
            },
            handled: handled(&args.signals_to_handle)?,
            signals: args.signals_to_handle,
            virtual_local_rank: args.virtual_local_rank,
            hangs: Hangs {
                limits: limits(args.hang_factor, args.hang_min),
                then: args.on_hang,
            },
            endpoints,
            standalone: args.standalone,
            loopback: args.standalone,
            socket: args.socket,
            store: args.store,
            checkpoint_memory: match args.checkpoint_memory {
                Some(text) => bytes(&text).ok_or(PlanError::Bytes(text))?,
                // The other half is for the training.
                None => host.memory / 2,
            },
            checkpoint_cache: args.checkpoint_cache,
            checkpoint_io: args.checkpoint_io,
            replicas: args.replicas,
            keep: args.keep.rules(),
            state_dir: args.state_dir,
            instance: args.instance,
            place: place(&args.label, args.place.as_deref())?,
            local_addr: match args.local_addr {
                Some(text) => Some(resolve(&text).ok_or(PlanError::LocalAddr(text))?),
                None => None,
            },
            role: args.role,
            notes,
        })
    }

    /// The command for people, at most 256 bytes.
    pub fn command_line(&self) -> String {
        let mut text = self.program.to_string_lossy().into_owned();
        for arg in &self.args {
            text.push(' ');
            text.push_str(&arg.to_string_lossy());
        }
        while text.len() > 256 {
            text.pop();
        }
        text
    }
}

/// When the job saves by itself.
fn triggers(args: &RunArgs) -> Result<Triggers, PlanError> {
    let overhead_ppm = match &args.checkpoint_overhead {
        None => 0,
        Some(_) if args.store.is_none() => return Err(PlanError::OverheadWithoutStore),
        Some(text) => share(text).ok_or_else(|| PlanError::Share(text.clone()))?,
    };
    let every_ms = match args.checkpoint_every {
        None => 0,
        Some(time) => millis(time).max(1),
    };
    Ok(Triggers {
        steps: args.checkpoint_every_steps.unwrap_or(0),
        every_ms,
        overhead_ppm,
        busy: match args.checkpoint_busy {
            OnBusy::Wait => Busy::Wait,
            OnBusy::Skip => Busy::Skip,
        },
    })
}

/// The program, its arguments, and the file among them that Python is to run. torchrun's rule, with one addition:
/// behind an explicit `--` the first word is a program unless it is a Python file.
fn command(
    args: &RunArgs,
    explicit: bool,
    python: &OsStr,
) -> Result<(OsString, Vec<OsString>, Option<PathBuf>), PlanError> {
    let (first, rest) = args.command.split_first().ok_or(PlanError::NoCommand)?;
    // Whatever the parser does not know is taken for the beginning of the command.
    if !explicit && first.as_encoded_bytes().starts_with(b"-") {
        return Err(PlanError::UnknownFlag(first.to_string_lossy().into_owned()));
    }
    if args.module && args.no_python {
        return Err(PlanError::ModuleWithoutPython);
    }
    let is_python_file = Path::new(first).extension().is_some_and(|e| e == "py");
    let bare = args.no_python && !args.run_path;
    if bare || (explicit && !is_python_file && !args.module) {
        return Ok((first.clone(), rest.to_vec(), None));
    }
    let mut words = vec![OsString::from("-u")];
    if args.module {
        words.push("-m".into());
    }
    words.push(first.clone());
    words.extend_from_slice(rest);
    let script = (!args.module).then(|| PathBuf::from(first));
    Ok((python.to_owned(), words, script))
}

/// The job's name. Nodes of one job must get the same without asking, and so must the next start of one with a store:
/// an unnamed one is called after its script. An unnamed job of one node without a store gets a name of its own.
fn job_name(args: &RunArgs, max_nodes: u16, host: &Host) -> Result<String, PlanError> {
    let stem = || {
        let script = args
            .command
            .iter()
            .find(|w| Path::new(w).extension().is_some_and(|e| e == "py"))
            .or(args.command.first());
        let stem = script.and_then(|w| Path::new(w).file_stem());
        let name: String = stem
            .map_or_else(String::new, |s| s.to_string_lossy().into_owned())
            .chars()
            .filter(|c| c.is_ascii_alphanumeric() || "-_.".contains(*c))
            .take(40)
            .collect();
        if name.is_empty() {
            "job".to_owned()
        } else {
            name
        }
    };
    let name = match &args.rdzv_id {
        Some(id) if !args.standalone || args.store.is_some() => id.clone(),
        // What it saves is found under its name by the next start.
        _ if max_nodes == 1 && args.store.is_none() => format!("{}-{:08x}", stem(), host.random),
        _ => stem(),
    };
    let fits = (1..=muster_protocol::JobKey::MAX_PART).contains(&name.len());
    if !fits || name.chars().any(|c| c.is_control() || c == '/') || name == "." || name == ".." {
        return Err(PlanError::Job(name));
    }
    Ok(name)
}

/// A majority of the endpoints listed, if asked for.
fn birth_quorum(args: &RunArgs, max_nodes: u16) -> Result<u16, PlanError> {
    if !args.birth_quorum {
        return Ok(0);
    }
    let listed: BTreeSet<String> = endpoints(args, max_nodes)?.into_iter().collect();
    match u16::try_from(listed.len()).unwrap_or(u16::MAX) {
        0 => Err(PlanError::NoEndpoints),
        count => Ok(count / 2 + 1),
    }
}

fn endpoints(args: &RunArgs, max_nodes: u16) -> Result<Vec<String>, PlanError> {
    if args.standalone {
        return Ok(Vec::new());
    }
    let text = match (&args.rdzv_endpoint, &args.master_addr) {
        (Some(text), _) => text,
        (None, Some(addr)) if max_nodes > 1 => addr,
        _ => return Ok(Vec::new()),
    };
    text.split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .map(|part| {
            let bad = part.len() > 300
                || part
                    .chars()
                    .any(|c| c.is_whitespace() || c.is_control() || c == '/')
                || part.starts_with(':');
            if bad {
                Err(PlanError::Endpoint(text.clone()))
            } else {
                Ok(part.to_owned())
            }
        })
        .collect()
}

fn check_store(path: &Path) -> Result<(), PlanError> {
    let reason = match std::fs::metadata(path) {
        Ok(meta) if meta.is_dir() => return Ok(()),
        Ok(_) => "not a directory".to_owned(),
        Err(error) => error.to_string(),
    };
    Err(PlanError::Store {
        path: path.to_owned(),
        reason,
    })
}

/// An address as such, or the first one of a host name (torchrun takes both).
fn resolve(text: &str) -> Option<IpAddr> {
    let named = || Some((text, 0).to_socket_addrs().ok()?.next()?.ip());
    text.parse().ok().or_else(named)
}

/// Notes on what torchrun would have done with these flags, and what happens instead.
fn notes(args: &RunArgs, max_nodes: u16) -> Vec<String> {
    let mut notes = Vec::new();
    if args.node_rank.is_some_and(|r| r > 0) || args.master_port.is_some() {
        notes.push(
            "--node-rank and --master-port are not needed: ranks and the master's port are agreed by the nodes"
                .to_owned(),
        );
    }
    let is_peer = max_nodes > 1 && args.rdzv_endpoint.is_none() && !args.standalone;
    if let Some(addr) = args.master_addr.as_deref().filter(|_| is_peer) {
        notes.push(format!(
            "--master-addr {addr} is called as a first peer; it is not a master, and may go away later"
        ));
    }
    let without_effect = [
        (
            "--duplicate-stdout-filters",
            &args.duplicate_stdout_filters,
            "grep the files of --log-dir",
        ),
        (
            "--duplicate-stderr-filters",
            &args.duplicate_stderr_filters,
            "grep the files of --log-dir",
        ),
        (
            "--event-log-handler",
            &args.event_log_handler,
            "see `muster events`",
        ),
        (
            "--logs-specs",
            &args.logs_specs,
            "logs are those of --log-dir, --redirects and --tee",
        ),
        (
            "--numa-binding",
            &args.numa_binding,
            "bind workers with numactl in the command",
        ),
    ];
    for (flag, _, instead) in without_effect
        .iter()
        .filter(|(_, given, _)| is_meant(given))
    {
        notes.push(format!("{flag} has no effect here: {instead}"));
    }
    notes
}

/// Whether a flag of torchrun asks for something else than torchrun's default.
fn is_meant(given: &Option<String>) -> bool {
    given
        .as_deref()
        .is_some_and(|text| !matches!(text, "" | "null" | "default"))
}

/// GPUs that a worker here would see. `devices` are the names in `/dev`.
pub fn count_gpus(
    cuda_visible: Option<&str>,
    nvidia_visible: Option<&str>,
    devices: impl Iterator<Item = String>,
) -> usize {
    let present = devices
        .filter(|name| {
            name.strip_prefix("nvidia")
                .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
        })
        .count();
    let listed = |text: &str| {
        // CUDA stops at the first invalid entry; -1 is the usual one.
        text.split(',')
            .take_while(|e| !e.trim().is_empty() && e.trim() != "-1")
            .count()
    };
    match (cuda_visible, nvidia_visible) {
        (Some(list), _) => listed(list).min(present),
        (None, Some("all")) | (None, None) => present,
        (None, Some("none" | "void" | "")) => 0,
        (None, Some(list)) => listed(list).min(present),
    }
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
