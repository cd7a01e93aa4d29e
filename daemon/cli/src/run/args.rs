//! The flags of `muster run`: torchrun's, with dash and underscore and a `PET_` variable each, and
//! Muster's own. Their meaning is decided in [`options`](super::options).

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::{FalseyValueParser, OsStringValueParser, TypedValueParser as _};
use muster_store::Location;

use super::drive::OnHang;
use super::saves::CheckpointIo;
use super::saves::replicas::Choice;
use crate::kept::args::KeepArgs;
use crate::stores;

/// The arguments on the command line and in `PET_` variables, unchecked.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Every flag is also taken with underscores, and from PET_<FLAG> in the \
environment. `muster run train.py` starts Python; `muster run -- PROGRAM ARGS` starts the program, \
unless its name ends in .py."
)]
pub struct RunArgs {
    /// Nodes to train with: N, or MIN:MAX for an elastic job
    #[arg(
        long,
        env = "PET_NNODES",
        default_value = "1",
        value_name = "N|MIN:MAX"
    )]
    pub nnodes: String,

    /// Workers on this node: a number, `auto`, `cpu` or `gpu`
    #[arg(
        long,
        alias = "nproc_per_node",
        env = "PET_NPROC_PER_NODE",
        default_value = "1",
        value_name = "N|auto|cpu|gpu"
    )]
    pub nproc_per_node: String,

    /// The job's name, the same on all of its nodes
    #[arg(long, alias = "rdzv_id", env = "PET_RDZV_ID", value_name = "NAME")]
    pub rdzv_id: Option<String>,

    /// First peers to call, HOST or HOST:PORT, separated by commas; none of them is a master
    #[arg(
        long,
        alias = "rdzv_endpoint",
        env = "PET_RDZV_ENDPOINT",
        value_name = "HOST[:PORT],.."
    )]
    pub rdzv_endpoint: Option<String>,

    /// Accepted for torchrun; the agents are the rendezvous
    #[arg(
        long,
        alias = "rdzv_backend",
        env = "PET_RDZV_BACKEND",
        value_name = "NAME"
    )]
    pub rdzv_backend: Option<String>,

    /// Accepted for torchrun; see --form-quiet and --join-quiet
    #[arg(
        long,
        alias = "rdzv_conf",
        env = "PET_RDZV_CONF",
        value_name = "K=V,.."
    )]
    pub rdzv_conf: Option<String>,

    /// One node, on loopback, with a name of its own
    #[arg(long, env = "PET_STANDALONE", value_parser = FalseyValueParser::new())]
    pub standalone: bool,

    /// Restarts after a script's own failure before the job fails
    #[arg(
        long,
        alias = "max_restarts",
        env = "PET_MAX_RESTARTS",
        default_value = "0",
        value_name = "N"
    )]
    pub max_restarts: u32,

    /// Accepted for torchrun; an exit is seen at once
    #[arg(
        long,
        alias = "monitor_interval",
        env = "PET_MONITOR_INTERVAL",
        value_name = "SECONDS"
    )]
    pub monitor_interval: Option<f64>,

    /// ROLE_NAME for the workers
    #[arg(long, env = "PET_ROLE", default_value = "default", value_name = "NAME")]
    pub role: String,

    /// Run the script as a Python module, as `python -m` does
    #[arg(short, long, env = "PET_MODULE", value_parser = FalseyValueParser::new())]
    pub module: bool,

    /// Run the script itself, without Python
    #[arg(long, alias = "no_python", env = "PET_NO_PYTHON", value_parser = FalseyValueParser::new())]
    pub no_python: bool,

    /// Accepted for torchrun: the script is started by Python as usual
    #[arg(long, alias = "run_path", env = "PET_RUN_PATH", value_parser = FalseyValueParser::new())]
    pub run_path: bool,

    /// Directory for logs and error files: a folder for the run is made in it
    #[arg(long, alias = "log_dir", env = "PET_LOG_DIR", value_name = "DIR")]
    pub log_dir: Option<PathBuf>,

    /// Streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both; or RANK:STREAMS,..
    #[arg(
        short,
        long,
        env = "PET_REDIRECTS",
        default_value = "0",
        value_name = "STREAMS"
    )]
    pub redirects: String,

    /// Streams that go to files and to the console (see --redirects)
    #[arg(
        short,
        long,
        env = "PET_TEE",
        default_value = "0",
        value_name = "STREAMS"
    )]
    pub tee: String,

    /// Show only these local ranks on the console, e.g. 0,1
    #[arg(
        long,
        alias = "local_ranks_filter",
        env = "PET_LOCAL_RANKS_FILTER",
        value_name = "RANKS"
    )]
    pub local_ranks_filter: Option<String>,

    /// Accepted for torchrun; workers are always started afresh
    #[arg(
        long,
        alias = "start_method",
        env = "PET_START_METHOD",
        value_name = "NAME"
    )]
    pub start_method: Option<String>,

    /// Accepted for torchrun; ranks follow from the rendezvous
    #[arg(long, alias = "node_rank", env = "PET_NODE_RANK", value_name = "N")]
    pub node_rank: Option<u32>,

    /// With --nnodes above 1 a first peer to call; the workers' own master is chosen anew each time
    #[arg(
        long,
        alias = "master_addr",
        env = "PET_MASTER_ADDR",
        value_name = "HOST"
    )]
    pub master_addr: Option<String>,

    /// Accepted for torchrun; a free port is reserved for each generation
    #[arg(
        long,
        alias = "master_port",
        env = "PET_MASTER_PORT",
        value_name = "PORT"
    )]
    pub master_port: Option<u16>,

    /// The address of this node to tell peers first
    #[arg(
        long,
        alias = "local_addr",
        env = "PET_LOCAL_ADDR",
        value_name = "ADDRESS"
    )]
    pub local_addr: Option<String>,

    /// On these signals this node leaves the job; on SIGINT the whole job stops
    #[arg(
        long,
        alias = "signals_to_handle",
        env = "PET_SIGNALS_TO_HANDLE",
        default_value = "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        value_name = "SIGNALS"
    )]
    pub signals_to_handle: String,

    /// torchrun's name for --stop-grace, in seconds
    #[arg(
        long,
        alias = "shutdown_timeout",
        env = "PET_SHUTDOWN_TIMEOUT",
        value_name = "SECONDS"
    )]
    pub shutdown_timeout: Option<f64>,

    /// Accepted for torchrun; see `muster events`
    #[arg(
        long,
        alias = "event_log_handler",
        env = "PET_EVENT_LOG_HANDLER",
        value_name = "NAME"
    )]
    pub event_log_handler: Option<String>,

    /// Accepted for torchrun; logs are those of --log-dir
    #[arg(
        long,
        alias = "logs_specs",
        env = "PET_LOGS_SPECS",
        value_name = "NAME"
    )]
    pub logs_specs: Option<String>,

    /// Each worker sees one GPU, as device 0: LOCAL_RANK is 0, and CUDA_VISIBLE_DEVICES names that GPU
    #[arg(
        long,
        alias = "virtual_local_rank",
        env = "PET_VIRTUAL_LOCAL_RANK",
        value_parser = FalseyValueParser::new()
    )]
    pub virtual_local_rank: bool,

    /// Accepted for compatibility with torchrun; ignored
    #[arg(
        long,
        alias = "duplicate_stdout_filters",
        env = "PET_DUPLICATE_STDOUT_FILTERS",
        value_name = "TEXTS"
    )]
    pub duplicate_stdout_filters: Option<String>,

    /// Accepted for compatibility with torchrun; ignored
    #[arg(
        long,
        alias = "duplicate_stderr_filters",
        env = "PET_DUPLICATE_STDERR_FILTERS",
        value_name = "TEXTS"
    )]
    pub duplicate_stderr_filters: Option<String>,

    /// Accepted for torchrun; bind workers with numactl in the command where it matters
    #[arg(
        long,
        alias = "numa_binding",
        env = "PET_NUMA_BINDING",
        value_name = "NAME"
    )]
    pub numa_binding: Option<String>,

    /// The agent's socket
    #[arg(long, env = "MUSTER_SOCKET", value_name = "PATH")]
    pub socket: Option<PathBuf>,

    /// The signal that tells every rank to save and leave
    #[arg(
        long,
        alias = "preempt_signal",
        env = "PET_PREEMPT_SIGNAL",
        default_value = "SIGTERM",
        value_name = "SIGNAL"
    )]
    pub preempt_signal: String,

    /// From SIGTERM to SIGKILL when a node or worker was lost
    #[arg(long, alias = "loss_grace", env = "PET_LOSS_GRACE", default_value = "200ms", value_parser = duration, value_name = "TIME")]
    pub loss_grace: Duration,

    /// From the agreed signal to SIGKILL when a stop is planned [default: 30s]
    #[arg(long, alias = "stop_grace", env = "PET_STOP_GRACE", value_parser = duration, value_name = "TIME")]
    pub stop_grace: Option<Duration>,

    /// Quiet time before a job forms below its maximum
    #[arg(long, alias = "form_quiet", env = "PET_FORM_QUIET", default_value = "300ms", value_parser = duration, value_name = "TIME")]
    pub form_quiet: Duration,

    /// Quiet time before joins to a running job are taken in
    #[arg(long, alias = "join_quiet", env = "PET_JOIN_QUIET", default_value = "1s", value_parser = duration, value_name = "TIME")]
    pub join_quiet: Duration,

    /// The longest that a first join waits for quiet
    #[arg(long, alias = "join_max", env = "PET_JOIN_MAX", default_value = "5s", value_parser = duration, value_name = "TIME")]
    pub join_max: Duration,

    /// Form the job only with a majority of the nodes that --rdzv-endpoint lists (list them all), so
    /// that two groups which cannot reach each other do not both start it
    #[arg(
        long,
        alias = "birth_quorum",
        env = "PET_BIRTH_QUORUM",
        value_parser = FalseyValueParser::new()
    )]
    pub birth_quorum: bool,

    /// Treat a worker that has attached the runtime as hung after N times its usual step time without
    /// progress (0: never)
    #[arg(
        long,
        alias = "hang_factor",
        env = "PET_HANG_FACTOR",
        default_value = "20",
        value_name = "N"
    )]
    pub hang_factor: u32,

    /// Never treat a worker as hung sooner than this
    #[arg(long, alias = "hang_min", env = "PET_HANG_MIN", default_value = "60s", value_parser = duration, value_name = "TIME")]
    pub hang_min: Duration,

    /// Action on a worker of this node that hangs and that everybody waits for
    #[arg(
        long,
        alias = "on_hang",
        env = "PET_ON_HANG",
        value_enum,
        default_value = "report"
    )]
    pub on_hang: OnHang,

    /// Where the job's log and checkpoints lie: a directory that its nodes share, or s3://, gs://, az://BUCKET/PREFIX
    #[arg(
        long,
        env = "PET_STORE",
        value_name = "LOCATION",
        value_parser = OsStringValueParser::new().try_map(stores::parse)
    )]
    pub store: Option<Location>,

    /// Memory of this node for checkpoint slots, two for each rank, such as 64G [default: half of what is free]
    #[arg(long, env = "PET_CHECKPOINT_MEMORY", value_name = "BYTES")]
    pub checkpoint_memory: Option<String>,

    /// Directory of this node's own disk for copies of what it saves, from which workers that start here again restore
    #[arg(
        long,
        env = "PET_CHECKPOINT_CACHE",
        value_name = "DIR",
        requires = "store"
    )]
    pub checkpoint_cache: Option<PathBuf>,

    /// How checkpoints reach a disk of this node
    #[arg(long, env = "PET_CHECKPOINT_IO", value_enum, default_value = "threads")]
    pub checkpoint_io: CheckpointIo,

    /// Have all ranks save after every N steps (scripts that attach the runtime)
    #[arg(
        long,
        alias = "checkpoint_every_steps",
        env = "PET_CHECKPOINT_EVERY_STEPS",
        value_name = "N"
    )]
    pub checkpoint_every_steps: Option<u64>,

    /// Have all ranks save after so much time, such as 10m
    #[arg(long, alias = "checkpoint_every", env = "PET_CHECKPOINT_EVERY", value_parser = duration, value_name = "TIME")]
    pub checkpoint_every: Option<Duration>,

    /// Checkpoint as often as possible while slowing training by at most this percentage, such as 1%
    #[arg(
        long,
        alias = "checkpoint_overhead",
        env = "PET_CHECKPOINT_OVERHEAD",
        value_name = "PERCENT"
    )]
    pub checkpoint_overhead: Option<String>,

    /// Action on a save for which both slots of a rank are still being written
    #[arg(
        long,
        alias = "checkpoint_busy",
        env = "PET_CHECKPOINT_BUSY",
        value_enum,
        default_value = "wait"
    )]
    pub checkpoint_busy: OnBusy,

    /// Replicas that other nodes hold in memory of this node's newest checkpoints, and this one of theirs: 0
    /// (nothing), 1 (a whole copy on one other) or parity:K (shared by K+1 nodes, which each give 1/K of a copy's
    /// memory; K from 2 to 8)
    #[arg(
        long,
        env = "PET_REPLICAS",
        default_value = "0",
        value_name = "0|1|parity:K",
        value_parser = Choice::parse
    )]
    pub replicas: Choice,

    #[command(flatten)]
    pub keep: KeepArgs,

    /// A further launcher of the same job on this node: its number, from 1
    #[arg(long, env = "PET_INSTANCE", default_value = "0", value_name = "K")]
    pub instance: u16,

    /// Where this node sits: zone=NAME or switch=NAME
    #[arg(long, value_name = "K=V", value_delimiter = ',')]
    pub label: Vec<String>,

    /// Where this node sits, in short: ZONE or ZONE/SWITCH
    #[arg(long, env = "PET_PLACE", value_name = "ZONE[/SWITCH]")]
    pub place: Option<String>,

    /// State directory of an embedded agent
    #[arg(long, alias = "state_dir", env = "PET_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,

    /// The script and its arguments
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "SCRIPT ARGS"
    )]
    pub command: Vec<OsString>,
}

/// Behaviour of a rank that has no free slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OnBusy {
    /// It waits for one; saves by step or time are put off instead
    #[default]
    Wait,
    /// The save is left out, unless somebody ordered it or the job stops
    Skip,
}

impl RunArgs {
    /// Whether the command came right behind a `--` of its own, given the whole command line.
    /// A `--` that stands among the script's arguments belongs to the script.
    pub fn is_explicit(&self, argv: &[OsString]) -> bool {
        argv.iter()
            .position(|a| a == "--")
            .is_some_and(|at| argv.len() - at - 1 == self.command.len())
    }
}

/// `200ms`, `1.5s`, `2m`, or a number of seconds; at most a day.
pub fn duration(text: &str) -> Result<Duration, String> {
    let fault = || format!("`{text}` is not a time: write 200ms, 1.5s, 2m or a number of seconds");
    let (number, unit) = match text.find(|c: char| c.is_ascii_alphabetic()) {
        Some(at) => text.split_at(at),
        None => (text, "s"),
    };
    let scale = match unit.trim() {
        "ms" => 0.001,
        "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        _ => return Err(fault()),
    };
    let seconds = number.trim().parse::<f64>().map_err(|_| fault())? * scale;
    if !(0.0..=86_400.0).contains(&seconds) {
        return Err(format!("`{text}` is not between 0 and a day"));
    }
    Ok(Duration::from_secs_f64(seconds))
}
