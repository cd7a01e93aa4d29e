//! How a store is used: what the environment says, and how long is waited.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// The variable that allows plain HTTP with other machines, when it is `true`.
pub(crate) const ALLOW_HTTP: &str = "MUSTER_STORE_ALLOW_HTTP";

/// Environment variables that say how stores are reached. As a value, so that they can come from
/// another process and differ between two stores of one.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Variables(BTreeMap<String, String>);

impl Variables {
    /// Those of this process that concern stores.
    pub fn of_process() -> Self {
        let wanted = |name: &str| {
            ["AWS_", "AZURE_", "GOOGLE_", "IDENTITY_", "MSI_"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
                || ["HOME", "SSL_CERT_FILE", "SSL_CERT_DIR"].contains(&name)
                || ["HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"]
                    .contains(&name.to_ascii_uppercase().as_str())
        };
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.into_string().ok()?))
        };
        std::env::vars_os()
            .filter_map(text)
            .filter(|(name, value)| wanted(name) && !value.is_empty())
            .collect()
    }

    /// One of them; none, where it is empty.
    pub fn get(&self, name: &str) -> Option<&str> {
        let value = self.0.get(name).map(String::as_str);
        value.filter(|value| !value.is_empty())
    }

    /// All whose names begin so.
    #[cfg(feature = "cloud")]
    pub(crate) fn beginning<'a>(
        &'a self,
        prefix: &'a str,
    ) -> impl Iterator<Item = (&'a str, &'a str)> {
        let all = self.0.iter().map(|(k, v)| (k.as_str(), v.as_str()));
        all.filter(move |(name, value)| name.starts_with(prefix) && !value.is_empty())
    }
}

impl<K: Into<String>, V: Into<String>> FromIterator<(K, V)> for Variables {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(iter: I) -> Self {
        let owned = iter.into_iter().map(|(k, v)| (k.into(), v.into()));
        Self(owned.collect())
    }
}

/// Names only: values may be secret.
impl fmt::Debug for Variables {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// How long and how often something is tried before it is an error. No request takes longer, with all
/// its tries, than `total` and the time its bytes take at `slowest`; no create, which may have to look
/// at the store's uuid and to read back, longer than twice that and `once`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Tries of one request, the first among them.
    pub tries: u32,
    /// All tries of one request together, for an object without bytes.
    pub total: Duration,
    /// One try, for an object without bytes.
    pub once: Duration,
    /// Time without a byte in either direction after which a connection is given up.
    pub idle: Duration,
    /// Time to connect.
    pub connect: Duration,
    /// The first pause between two tries. Each further one is twice as long, up to `pause_limit`,
    /// and each is shortened by a random part, at most a half.
    pub pause: Duration,
    pub pause_limit: Duration,
    /// Bytes per second that are waited for.
    pub slowest: u64,
}

impl Default for Patience {
    /// Six tries within a minute.
    fn default() -> Self {
        Self {
            tries: 6,
            total: Duration::from_secs(60),
            once: Duration::from_secs(20),
            idle: Duration::from_secs(15),
            connect: Duration::from_secs(5),
            pause: Duration::from_millis(100),
            pause_limit: Duration::from_secs(5),
            slowest: 256 << 10,
        }
    }
}

impl Patience {
    /// For records of a log, for which somebody waits: a create of a few KiB takes at most 10 s.
    pub fn brief() -> Self {
        Self {
            tries: 5,
            total: Duration::from_secs(4),
            once: Duration::from_secs(2),
            idle: Duration::from_secs(2),
            connect: Duration::from_secs(1),
            ..Self::default()
        }
    }

    #[cfg(feature = "cloud")]
    fn transfer(&self, bytes: u64) -> Duration {
        Duration::from_secs(bytes / self.slowest.max(1))
    }

    #[cfg(feature = "cloud")]
    pub(crate) fn once_for(&self, bytes: u64) -> Duration {
        self.once.saturating_add(self.transfer(bytes))
    }

    #[cfg(feature = "cloud")]
    pub(crate) fn total_for(&self, bytes: u64) -> Duration {
        self.total.saturating_add(self.transfer(bytes))
    }
}

/// How a store is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    pub variables: Variables,
    pub patience: Patience,
    /// Take an `http://` endpoint that is not on this machine. Anybody on the network between can then read and change
    /// what is stored, though not the keys.
    pub allow_http: bool,
    /// Bytes of a part of a large object: at least 5 MiB, more where an object would otherwise have
    /// more than 10,000 parts.
    pub part: u64,
    /// Parts under way at once. An upload needs memory for one more than that.
    pub parts_at_once: usize,
}

impl Options {
    /// With these variables, and otherwise as is usual: parts of 16 MiB, four at once.
    pub fn new(variables: Variables) -> Self {
        Self {
            variables,
            patience: Patience::default(),
            allow_http: false,
            part: 16 << 20,
            parts_at_once: 4,
        }
    }

    /// With this process's environment.
    pub fn of_process() -> Self {
        let allow = std::env::var_os(ALLOW_HTTP);
        Self {
            allow_http: allow.is_some_and(|value| value == "true"),
            ..Self::new(Variables::of_process())
        }
    }
}
