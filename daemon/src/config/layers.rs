//! The layers over each other, and what each key came to.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use toml::Value;

use super::keys::{self, KEYS, Kind};
use super::{ConfigError, Effective, Inputs, Row, Source};

pub(super) const SYSTEM_SOCKET: &str = "/run/muster/musterd.sock";
const SYSTEM_STATE: &str = "/var/lib/muster";
const PREFIX: &str = "MUSTER_";
/// Keys that programs that link the runtime read, and that may be set for a whole machine.
const OF_PROGRAMS: [&str; 2] = ["library", "cuda_library"];
/// Two names as far apart as this, or less, are a typing error.
const TYPO: usize = 2;
/// The most bytes of a configuration file.
const MAX_FILE: u64 = 1 << 20;

pub(super) struct Layers {
    values: BTreeMap<&'static str, (Value, Source)>,
    warnings: Vec<String>,
}

impl Layers {
    pub(super) fn new(inputs: &Inputs) -> Result<Layers, ConfigError> {
        let mut layers = Layers {
            values: BTreeMap::new(),
            warnings: Vec::new(),
        };
        layers.add_defaults(inputs)?;
        layers.add_file(inputs)?;
        layers.add_environment(inputs)?;
        for key in KEYS {
            let texts = inputs.flags.given(key.name);
            if !texts.is_empty() {
                layers.add_text(key, &texts, Source::Flag(key.flag))?;
            }
        }
        Ok(layers)
    }

    fn add_defaults(&mut self, inputs: &Inputs) -> Result<(), ConfigError> {
        for key in KEYS {
            if let Some(text) = key.default {
                self.add_text(key, &[text.to_owned()], Source::Default)?;
            }
        }
        let (state, from) = state_dir(inputs);
        self.put("state_dir", state, from);
        let (socket, from) = socket(inputs);
        self.put("socket", socket, from);
        Ok(())
    }

    fn add_file(&mut self, inputs: &Inputs) -> Result<(), ConfigError> {
        let named = inputs
            .flags
            .config
            .clone()
            .or_else(|| set(inputs, "MUSTER_CONFIG").map(PathBuf::from));
        let (path, must_exist) = match (named, &inputs.default_file) {
            (Some(path), _) => (path, true),
            (None, Some(path)) => (path.clone(), false),
            (None, None) => return Ok(()),
        };
        let text = match read(&path) {
            Ok(text) => text,
            Err(e) if !must_exist && e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            Err(source) => return Err(ConfigError::Read { path, source }),
        };
        let table: toml::Table =
            text.parse()
                .map_err(|e: toml::de::Error| ConfigError::Syntax {
                    path: path.clone(),
                    why: e.to_string(),
                })?;
        for (name, value) in table {
            let key = keys::find(&name).ok_or_else(|| ConfigError::UnknownKey {
                closest: closest(&name),
                key: name,
                source_name: path.display().to_string(),
            })?;
            self.values
                .insert(key.name, (value, Source::File(path.clone())));
        }
        Ok(())
    }

    fn add_environment(&mut self, inputs: &Inputs) -> Result<(), ConfigError> {
        for (variable, text) in &inputs.environment {
            let Some(name) = variable.strip_prefix(PREFIX) else {
                continue;
            };
            let name = name.to_ascii_lowercase();
            if name == "config" || OF_PROGRAMS.contains(&name.as_str()) || is_service_link(&name) {
                continue;
            }
            if let Some(key) = keys::find(&name) {
                // An empty variable is an unset one, except where emptiness is a value.
                if text.is_empty() && matches!(key.kind, Kind::Text | Kind::Boolean) {
                    continue;
                }
                let source = Source::Environment(variable.clone());
                self.add_text(key, std::slice::from_ref(text), source)?;
                continue;
            }
            let closest = closest(&name);
            if distance(&name, closest) <= TYPO {
                return Err(ConfigError::UnknownKey {
                    key: variable.clone(),
                    source_name: "the environment".to_owned(),
                    closest,
                });
            }
            // Launchers, workers and others have variables of their own.
            self.warnings.push(format!(
                "{variable} in the environment is no key of the agent"
            ));
        }
        Ok(())
    }

    fn add_text(
        &mut self,
        key: &'static keys::Key,
        texts: &[String],
        source: Source,
    ) -> Result<(), ConfigError> {
        let value = keys::value_of(key.kind, texts).map_err(|why| ConfigError::Value {
            key: key.name,
            source_of: source.clone(),
            why,
        })?;
        self.values.insert(key.name, (value, source));
        Ok(())
    }

    pub(super) fn put(&mut self, key: &'static str, path: PathBuf, source: Source) {
        let value = Value::String(path.to_string_lossy().into_owned());
        self.values.insert(key, (value, source));
    }

    /// A key's value, if any layer has one.
    pub(super) fn optional<T>(
        &self,
        key: &'static str,
        parse: fn(&Value) -> Result<T, String>,
    ) -> Result<Option<T>, ConfigError> {
        match self.values.get(key) {
            None => Ok(None),
            Some((value, _)) => parse(value).map(Some).map_err(|why| self.refuse(key, why)),
        }
    }

    pub(super) fn get<T>(
        &self,
        key: &'static str,
        parse: fn(&Value) -> Result<T, String>,
    ) -> Result<T, ConfigError> {
        self.optional(key, parse)?
            .ok_or_else(|| self.refuse(key, "has no value".to_owned()))
    }

    pub(super) fn refuse(&self, key: &'static str, why: String) -> ConfigError {
        let source = self.values.get(key).map(|(_, s)| s.clone());
        ConfigError::Value {
            key,
            source_of: source.unwrap_or(Source::Default),
            why,
        }
    }

    pub(super) fn warn(&mut self, warning: String) {
        self.warnings.push(warning);
    }

    pub(super) fn into_effective(mut self) -> Effective {
        let rows = KEYS.iter().map(|key| {
            let (value, source) = match self.values.remove(key.name) {
                Some((value, source)) => (value.to_string(), source),
                None => ("\"\"".to_owned(), Source::Default),
            };
            Row {
                key: key.name,
                value,
                source,
            }
        });
        Effective {
            rows: rows.collect(),
            warnings: self.warnings,
        }
    }
}

fn read(path: &Path) -> std::io::Result<String> {
    use std::io::Read;
    let mut text = String::new();
    std::fs::File::open(path)?
        .take(MAX_FILE)
        .read_to_string(&mut text)?;
    Ok(text)
}

fn set<'a>(inputs: &'a Inputs, name: &str) -> Option<&'a str> {
    let value = inputs.environment.get(name)?;
    (!value.is_empty()).then_some(value)
}

/// The first of the directories in one of systemd's variables (systemd.exec(5)).
fn first<'a>(inputs: &'a Inputs, name: &str) -> Option<&'a Path> {
    set(inputs, name)?.split(':').next().map(Path::new)
}

fn state_dir(inputs: &Inputs) -> (PathBuf, Source) {
    if let Some(dir) = first(inputs, "STATE_DIRECTORY") {
        return (dir.to_owned(), Source::Surroundings("STATE_DIRECTORY"));
    }
    if !inputs.root {
        if let Some(dir) = set(inputs, "XDG_STATE_HOME") {
            return (
                Path::new(dir).join("muster"),
                Source::Surroundings("XDG_STATE_HOME"),
            );
        }
        if let Some(home) = set(inputs, "HOME") {
            return (
                Path::new(home).join(".local/state/muster"),
                Source::Surroundings("HOME"),
            );
        }
    }
    (PathBuf::from(SYSTEM_STATE), Source::Default)
}

fn socket(inputs: &Inputs) -> (PathBuf, Source) {
    if let Some(dir) = first(inputs, "RUNTIME_DIRECTORY") {
        return (
            dir.join("musterd.sock"),
            Source::Surroundings("RUNTIME_DIRECTORY"),
        );
    }
    match set(inputs, "XDG_RUNTIME_DIR") {
        Some(dir) if !inputs.root => (
            Path::new(dir).join("muster/musterd.sock"),
            Source::Surroundings("XDG_RUNTIME_DIR"),
        ),
        _ => (PathBuf::from(SYSTEM_SOCKET), Source::Default),
    }
}

/// Kubernetes puts `<SERVICE>_SERVICE_HOST`, `<SERVICE>_PORT`, ... of every Service into every
/// container; a Service whose name begins with "muster" must not stop the agent.
fn is_service_link(name: &str) -> bool {
    name == "port"
        || name.ends_with("_port")
        || ["service_host", "service_port", "port_"]
            .iter()
            .any(|part| name.starts_with(part) || name.contains(&format!("_{part}")))
}

/// The known key with the least edits away.
pub(super) fn closest(name: &str) -> &'static str {
    let nearest = KEYS.iter().min_by_key(|key| distance(name, key.name));
    nearest.map_or("cluster", |key| key.name)
}

/// Levenshtein's distance; a text of more than 64 characters counts as its first 64.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().take(64).collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().take(64).enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row.last().copied().unwrap_or(0)
}
