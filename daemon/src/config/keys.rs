//! The list of keys, and the same keys as flags.

use std::path::PathBuf;

use toml::Value;

/// Form of a value; texts of flags and environment are turned into it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Boolean,
    /// In the environment separated by commas; as a flag also repeated.
    List,
    /// Like a list of `name=value`.
    Map,
}

pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) flag: &'static str,
    pub(super) kind: Kind,
    /// As it would stand in the environment; `None` where it depends on the surroundings.
    pub(super) default: Option<&'static str>,
}

const fn key(
    name: &'static str,
    flag: &'static str,
    kind: Kind,
    default: Option<&'static str>,
) -> Key {
    Key {
        name,
        flag,
        kind,
        default,
    }
}

/// Every key, in the order in which people read them.
pub(super) const KEYS: &[Key] = &[
    key("cluster", "--cluster", Kind::Text, Some("default")),
    key("secret_file", "--secret-file", Kind::Text, None),
    key("insecure", "--insecure", Kind::Boolean, Some("false")),
    // The port is DEFAULT_PORT; a test holds the two together.
    key("listen", "--listen", Kind::List, Some("0.0.0.0:7970")),
    key("quic", "--quic", Kind::Boolean, Some("false")),
    key("mdns", "--mdns", Kind::Boolean, Some("true")),
    key("bootstrap", "--bootstrap", Kind::List, Some("")),
    key("state_dir", "--state-dir", Kind::Text, None),
    key("socket", "--socket", Kind::Text, None),
    key("http", "--http", Kind::Text, Some("127.0.0.1:9477")),
    key("suspect_after", "--suspect-after", Kind::Text, Some("2s")),
    key("agent_grace", "--agent-grace", Kind::Text, Some("30s")),
    key(
        "sigterm_deadline",
        "--sigterm-deadline",
        Kind::Text,
        Some("30s"),
    ),
    key(
        "drain_deadline",
        "--drain-deadline",
        Kind::Text,
        Some("120s"),
    ),
    key(
        "checkpoint_memory",
        "--checkpoint-memory",
        Kind::Text,
        Some("unlimited"),
    ),
    key(
        "checkpoint_lease",
        "--checkpoint-lease",
        Kind::Text,
        Some("10m"),
    ),
    key("labels", "--labels", Kind::Map, Some("")),
    key("place", "--place", Kind::List, Some("")),
    key("log_format", "--log-format", Kind::Text, Some("auto")),
    key("log", "--log", Kind::Text, Some("info")),
];

pub(super) fn find(name: &str) -> Option<&'static Key> {
    KEYS.iter().find(|k| k.name == name)
}

/// The agent's flags. Each one stands for the key of the same name, and for the variable
/// `MUSTER_<NAME>`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Flags {
    /// Configuration file [default: /etc/muster/musterd.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Name of the cluster; agents of others are cut off [default: default]
    #[arg(long, value_name = "NAME")]
    pub cluster: Option<String>,
    /// File with the cluster secret, the same on every node [default: systemd's credential
    /// "cluster-secret"]
    #[arg(long, value_name = "FILE")]
    pub secret_file: Option<String>,
    /// Listen for other hosts without a secret
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub insecure: Option<String>,
    /// Addresses for other agents, ip:port [default: 0.0.0.0:7970]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Vec<String>,
    /// Also speak QUIC, over UDP at the same ports [default: false]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub quic: Option<String>,
    /// Find agents on the local network by multicast [default: true]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, default_missing_value = "true")]
    pub mdns: Option<String>,
    /// Agents to call first: host, host:port or ip:port; a name may stand for many
    #[arg(long, value_name = "HOST")]
    pub bootstrap: Vec<String>,
    /// Directory for what must survive a restart; on a local disk [default: /var/lib/muster]
    #[arg(long, value_name = "DIR")]
    pub state_dir: Option<String>,
    /// The agent's unix socket [default: /run/muster/musterd.sock]
    #[arg(long, value_name = "PATH")]
    pub socket: Option<String>,
    /// Address of /metrics, /healthz and /readyz, or "off" [default: 127.0.0.1:9477]
    #[arg(long, value_name = "ADDRESS")]
    pub http: Option<String>,
    /// A silent node is lost after this [default: 2s]
    #[arg(long, value_name = "TIME")]
    pub suspect_after: Option<String>,
    /// How long workers go on without their agent [default: 30s]
    #[arg(long, value_name = "TIME")]
    pub agent_grace: Option<String>,
    /// Time that a SIGTERM leaves until the node is gone [default: 30s]
    #[arg(long, value_name = "TIME")]
    pub sigterm_deadline: Option<String>,
    /// Time that a drain leaves unless it says otherwise [default: 120s]
    #[arg(long, value_name = "TIME")]
    pub drain_deadline: Option<String>,
    /// Memory for checkpoint slots of all jobs of this node, such as 64G, or "unlimited" [default: unlimited]
    #[arg(long, value_name = "BYTES")]
    pub checkpoint_memory: Option<String>,
    /// How long the checkpoint slots of a dead launcher are held for its job's next one; 0s: not at all [default: 10m]
    #[arg(long, value_name = "TIME")]
    pub checkpoint_lease: Option<String>,
    /// Labels of this node, name=value
    #[arg(long, value_name = "NAME=VALUE")]
    pub labels: Vec<String>,
    /// Where this node is, outermost first, separated by commas: zone-a,rack-7,switch-3
    #[arg(long, value_name = "PLACES")]
    pub place: Vec<String>,
    /// auto (text on a terminal, else JSON), text or json [default: auto]
    #[arg(long, value_name = "FORMAT")]
    pub log_format: Option<String>,
    /// Filter for the log: a level, or target=level,... [default: info]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
}

impl Flags {
    /// The texts that were given for a key; none when it was not given.
    pub(super) fn given(&self, name: &str) -> Vec<String> {
        let one = |value: &Option<String>| value.iter().cloned().collect();
        match name {
            "cluster" => one(&self.cluster),
            "secret_file" => one(&self.secret_file),
            "insecure" => one(&self.insecure),
            "listen" => self.listen.clone(),
            "quic" => one(&self.quic),
            "mdns" => one(&self.mdns),
            "bootstrap" => self.bootstrap.clone(),
            "state_dir" => one(&self.state_dir),
            "socket" => one(&self.socket),
            "http" => one(&self.http),
            "suspect_after" => one(&self.suspect_after),
            "agent_grace" => one(&self.agent_grace),
            "sigterm_deadline" => one(&self.sigterm_deadline),
            "drain_deadline" => one(&self.drain_deadline),
            "checkpoint_memory" => one(&self.checkpoint_memory),
            "checkpoint_lease" => one(&self.checkpoint_lease),
            "labels" => self.labels.clone(),
            "place" => self.place.clone(),
            "log_format" => one(&self.log_format),
            "log" => one(&self.log),
            _ => Vec::new(),
        }
    }
}

/// Texts as the value that they would be in the file.
pub(super) fn value_of(kind: Kind, texts: &[String]) -> Result<Value, String> {
    let items = || {
        texts
            .iter()
            .flat_map(|t| t.split(','))
            .map(str::trim)
            .filter(|t| !t.is_empty())
    };
    let last = texts.last().map(String::as_str).unwrap_or_default();
    Ok(match kind {
        Kind::Text => Value::String(last.to_owned()),
        Kind::Boolean => match last.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Value::Boolean(true),
            "false" | "0" | "no" | "off" => Value::Boolean(false),
            _ => return Err(format!("{last:?} is neither true nor false")),
        },
        Kind::List => Value::Array(items().map(|t| Value::String(t.to_owned())).collect()),
        Kind::Map => {
            let mut table = toml::Table::new();
            for item in items() {
                let (name, value) = item
                    .split_once('=')
                    .ok_or_else(|| format!("{item:?} is not name=value"))?;
                table.insert(
                    name.trim().to_owned(),
                    Value::String(value.trim().to_owned()),
                );
            }
            Value::Table(table)
        }
    })
}
