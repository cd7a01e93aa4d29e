//! The agent's configuration: flags, then environment (`MUSTER_*`), then file, then defaults.
//!
//! Every key has one name: `state_dir` in the file is `--state-dir` as a flag and
//! `MUSTER_STATE_DIR` in the environment. A key that is not known is an error; so is a value that
//! does not fit. [`Effective`] lists every value with where it came from.

mod home;
mod keys;
mod layers;
mod parse;
mod secret;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use muster_protocol::Span;

pub use keys::Flags;
pub use secret::{MAX_SECRET, MIN_SECRET, Secret};

use layers::Layers;

/// Where the file is when nothing names another one.
pub const DEFAULT_FILE: &str = "/etc/muster/musterd.toml";
/// The port for other agents. Below the ephemeral ports and Kubernetes' node ports, and, unlike
/// 7946, not used by other gossip protocols (Serf, Docker Swarm, MetalLB) that share hosts.
pub const DEFAULT_PORT: u16 = 7970;

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    Flag(&'static str),
    /// The name of the variable.
    Environment(String),
    File(PathBuf),
    /// `$CREDENTIALS_DIRECTORY` (systemd's LoadCredential=).
    Credential,
    /// A suggestion of the surroundings: the name of the variable that was followed.
    Surroundings(&'static str),
    Default,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Flag(flag) => write!(f, "flag {flag}"),
            Source::Environment(name) => write!(f, "environment {name}"),
            Source::File(path) => write!(f, "file {}", path.display()),
            Source::Credential => f.write_str("systemd credential"),
            Source::Surroundings(name) => write!(f, "default under ${name}"),
            Source::Default => f.write_str("default"),
        }
    }
}

/// Why there is no configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{source_name} sets {key:?}, which is no key; the closest is {closest:?}")]
    UnknownKey {
        key: String,
        source_name: String,
        closest: &'static str,
    },
    #[error("{key} from {source_of}: {why}")]
    Value {
        key: &'static str,
        source_of: Source,
        why: String,
    },
    #[error("the configuration file {} cannot be read: {source}; correct --config or MUSTER_CONFIG", .path.display())]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("the configuration file {} is not TOML: {why}", .path.display())]
    Syntax { path: PathBuf, why: String },
    #[error(
        "the agent would listen on {listen}, which other hosts can reach, without a cluster secret: set secret_file (--secret-file, MUSTER_SECRET_FILE) to a file with at least {MIN_SECRET} random bytes, the same on every node; or listen on 127.0.0.1; or, on a network that you trust, set insecure = true"
    )]
    NoSecret { listen: SocketAddr },
    #[error(
        "agents prove a cluster secret to each other, on one host too, and the one of this user cannot be made: {0}; set secret_file (--secret-file, MUSTER_SECRET_FILE) to a file with at least {MIN_SECRET} random bytes, or, where you trust every user of this machine, insecure = true"
    )]
    HomeSecret(String),
    #[error("the cluster secret in {}: {why}", .path.display())]
    Secret { path: PathBuf, why: String },
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Text on a terminal, JSON elsewhere.
    Auto,
    Text,
    Json,
}

/// Configuration of the agent. The secret is read; nothing else has been touched.
#[derive(Debug, Clone)]
pub struct AgentConfig {
    /// Agents of other clusters are cut off.
    pub cluster: String,
    /// `None` only with `insecure`, or before the user's own was made.
    pub secret: Option<Secret>,
    pub insecure: bool,
    /// Where other agents connect, TCP (and QUIC over UDP at the same port).
    pub listen: Vec<SocketAddr>,
    pub quic: bool,
    pub mdns: bool,
    /// `host:port`, `host` or `ip:port`; names are resolved again and again.
    pub bootstrap: Vec<Bootstrap>,
    pub state_dir: PathBuf,
    pub socket: PathBuf,
    /// `None`: no HTTP port.
    pub http: Option<SocketAddr>,
    /// A silent node is lost after this.
    pub suspect_after: Span,
    /// How long workers go on without their agent.
    pub agent_grace: Span,
    /// Time that a SIGTERM without a known deadline leaves until the node is gone.
    pub sigterm_deadline: Span,
    /// Time that `muster drain` leaves unless it says otherwise.
    pub drain_deadline: Span,
    /// The most bytes of the checkpoint slots of all jobs of this node.
    pub checkpoint_memory: u64,
    /// How long those of a dead launcher are held for its job's next one.
    pub checkpoint_lease: Span,
    pub labels: BTreeMap<String, String>,
    /// Where the node is, outermost first: ["zone-a", "rack-7", "switch-3"].
    pub place: Vec<String>,
    pub log_format: LogFormat,
    /// A filter in the syntax of tracing's `EnvFilter`.
    pub log: String,
}

/// An address to call first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bootstrap {
    /// A name, or an address without brackets.
    pub host: String,
    pub port: u16,
}

impl fmt::Display for Bootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

/// Every key with its value and where that came from, for `muster doctor`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Effective {
    pub rows: Vec<Row>,
    /// Problems that should be looked at, but stop nothing.
    pub warnings: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    pub key: &'static str,
    /// As it would stand in the file; never the secret itself.
    pub value: String,
    pub source: Source,
}

impl fmt::Display for Effective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for row in &self.rows {
            writeln!(f, "{} = {}  # {}", row.key, row.value, row.source)?;
        }
        Ok(())
    }
}

/// Sources of the configuration.
#[derive(Debug, Clone, Default)]
pub struct Inputs {
    pub flags: Flags,
    pub environment: BTreeMap<String, String>,
    /// Read when it exists, unless `--config` or `MUSTER_CONFIG` name another file.
    pub default_file: Option<PathBuf>,
    pub root: bool,
}

impl Inputs {
    /// The flags, and this process' own surroundings. Variables that are not UTF-8 are left out.
    pub fn from_process(flags: Flags) -> Inputs {
        let utf8 = |(k, v): (std::ffi::OsString, std::ffi::OsString)| {
            Some((k.into_string().ok()?, v.into_string().ok()?))
        };
        Inputs {
            flags,
            environment: std::env::vars_os().filter_map(utf8).collect(),
            default_file: Some(PathBuf::from(DEFAULT_FILE)),
            root: rustix::process::geteuid().is_root(),
        }
    }
}

/// Puts the layers together, checks every value, and reads the cluster secret. An agent that listens on loopback alone
/// takes that of the user's home directory where nothing names one: every user of the machine can reach loopback.
///
/// # Errors
/// A value or a secret that cannot be used, with its fix.
pub fn load(inputs: &Inputs) -> Result<(AgentConfig, Effective), ConfigError> {
    let (config, effective) = read(inputs)?;
    check_secret(&config)?;
    match config.secret.is_none() && !config.insecure {
        true => load_for_user(inputs),
        false => Ok((config, effective)),
    }
}

/// Like [`load`], of an agent that serves its user alone: wherever it listens, it takes that user's secret where
/// nothing names one.
///
/// # Errors
/// Those of [`load`].
pub fn load_for_user(inputs: &Inputs) -> Result<(AgentConfig, Effective), ConfigError> {
    let (config, effective) = read(inputs)?;
    if config.secret.is_some() || config.insecure {
        return Ok((config, effective));
    }
    let path = home::secret_file(&inputs.environment).map_err(ConfigError::HomeSecret)?;
    let mut inputs = inputs.clone();
    inputs.flags.secret_file = Some(path.display().to_string());
    read(&inputs)
}

/// Whether an agent may listen as it is told to: other hosts only with a secret that is named, or `insecure`.
pub fn check_secret(config: &AgentConfig) -> Result<(), ConfigError> {
    if config.secret.is_none() && !config.insecure {
        let reachable = config.listen.iter().find(|a| !a.ip().is_loopback());
        if let Some(&listen) = reachable {
            return Err(ConfigError::NoSecret { listen });
        }
    }
    Ok(())
}

/// Like [`load`], without its last step, [`check_secret`]: for those who look and start no agent.
pub fn read(inputs: &Inputs) -> Result<(AgentConfig, Effective), ConfigError> {
    let mut layers = Layers::new(inputs)?;
    let config = AgentConfig {
        cluster: layers.get("cluster", parse::cluster)?,
        secret: None,
        insecure: layers.get("insecure", parse::boolean)?,
        listen: layers.get("listen", parse::listen)?,
        quic: layers.get("quic", parse::boolean)?,
        mdns: layers.get("mdns", parse::boolean)?,
        bootstrap: layers.get("bootstrap", parse::bootstrap)?,
        state_dir: layers.get("state_dir", parse::path)?,
        socket: layers.get("socket", parse::path)?,
        http: layers.get("http", parse::http)?,
        suspect_after: layers.get("suspect_after", parse::suspect_after)?,
        agent_grace: layers.get("agent_grace", parse::span)?,
        sigterm_deadline: layers.get("sigterm_deadline", parse::span)?,
        drain_deadline: layers.get("drain_deadline", parse::span)?,
        checkpoint_memory: layers.get("checkpoint_memory", parse::memory)?,
        checkpoint_lease: layers.get("checkpoint_lease", parse::span)?,
        labels: layers.get("labels", parse::labels)?,
        place: layers.get("place", parse::place)?,
        log_format: layers.get("log_format", parse::log_format)?,
        log: layers.get("log", parse::text)?,
    };
    if config.agent_grace < config.suspect_after {
        return Err(layers.refuse(
            "agent_grace",
            format!("must be at least suspect_after ({})", config.suspect_after),
        ));
    }
    let secret = secret::find(&mut layers, inputs)?;
    Ok((AgentConfig { secret, ..config }, layers.into_effective()))
}

/// Where a command looks for an agent's socket, first to last, when neither flag nor
/// `MUSTER_SOCKET` names one: the user's own agent, then the machine's.
pub fn socket_candidates(environment: &BTreeMap<String, String>) -> Vec<PathBuf> {
    let own = environment
        .get("XDG_RUNTIME_DIR")
        .filter(|dir| !dir.is_empty())
        .map(|dir| Path::new(dir).join("muster/musterd.sock"));
    own.into_iter()
        .chain([PathBuf::from(layers::SYSTEM_SOCKET)])
        .collect()
}

#[cfg(test)]
mod tests;
