//! Values into types. An error says what is wrong and what would be right.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use muster_protocol::{JobKey, Span};
use toml::Value;

use super::{Bootstrap, DEFAULT_PORT, LogFormat};

type Parsed<T> = Result<T, String>;

/// Items of one list or map at most.
const MAX_ITEMS: usize = 1024;
/// Bytes of a label's name or value, or of one part of a place, at most.
const MAX_LABEL: usize = 256;

fn string(value: &Value) -> Parsed<&str> {
    value
        .as_str()
        .ok_or_else(|| format!("expected a text in quotes, got {}", value.type_str()))
}

fn strings(value: &Value) -> Parsed<Vec<&str>> {
    let list = value
        .as_array()
        .ok_or_else(|| format!("expected a list of texts, got {}", value.type_str()))?;
    if list.len() > MAX_ITEMS {
        return Err(format!(
            "has {} items, the limit is {MAX_ITEMS}",
            list.len()
        ));
    }
    list.iter().map(string).collect()
}

pub(super) fn text(value: &Value) -> Parsed<String> {
    string(value).map(str::to_owned)
}

pub(super) fn boolean(value: &Value) -> Parsed<bool> {
    value
        .as_bool()
        .ok_or_else(|| format!("expected true or false, got {}", value.type_str()))
}

pub(super) fn cluster(value: &Value) -> Parsed<String> {
    let name = string(value)?;
    if name.is_empty() || name.len() > JobKey::MAX_PART || name.chars().any(char::is_control) {
        return Err(format!(
            "{name:?} is no name: give 1 to {} bytes without control characters",
            JobKey::MAX_PART
        ));
    }
    Ok(name.to_owned())
}

pub(super) fn path(value: &Value) -> Parsed<PathBuf> {
    let path = PathBuf::from(string(value)?);
    if !path.is_absolute() {
        return Err(format!("{path:?} is not an absolute path"));
    }
    Ok(path)
}

/// A secret's file may be given relative to where the agent starts.
pub(super) fn any_path(value: &Value) -> Parsed<PathBuf> {
    match string(value)? {
        "" => Err("is empty: name a file".to_owned()),
        path => Ok(PathBuf::from(path)),
    }
}

/// Bytes, with K, M, G or T as powers of 1024.
pub(super) fn memory(value: &Value) -> Parsed<u64> {
    let text = string(value)?;
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = text.get(digits.len()..).unwrap_or_default();
    let shift = match unit {
        _ if text == "unlimited" => return Ok(u64::MAX),
        "" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        "T" | "TiB" => 40,
        _ => 64,
    };
    let bytes = digits.trim().parse::<u64>().ok();
    let bytes = bytes.and_then(|n| n.checked_mul(1u64.checked_shl(shift)?));
    bytes.ok_or_else(|| format!("{text:?} is no memory: write bytes, such as 64G, or unlimited"))
}

fn address(text: &str) -> Parsed<SocketAddr> {
    if let Ok(address) = text.parse() {
        return Ok(address);
    }
    match text.parse::<IpAddr>() {
        Ok(ip) => Ok(SocketAddr::new(ip, DEFAULT_PORT)),
        Err(_) => Err(format!(
            "{text:?} is no address: write ip:port, such as 0.0.0.0:{DEFAULT_PORT} or [::]:{DEFAULT_PORT}"
        )),
    }
}

pub(super) fn listen(value: &Value) -> Parsed<Vec<SocketAddr>> {
    let all: Vec<SocketAddr> = strings(value)?
        .into_iter()
        .map(address)
        .collect::<Parsed<_>>()?;
    if all.is_empty() {
        return Err("is empty: name at least one address, such as 127.0.0.1:7970".to_owned());
    }
    Ok(all)
}

pub(super) fn http(value: &Value) -> Parsed<Option<SocketAddr>> {
    match string(value)? {
        "off" => Ok(None),
        text => text.parse().map(Some).map_err(|_| {
            format!("{text:?} is no address: write ip:port, such as 127.0.0.1:9477, or off")
        }),
    }
}

pub(super) fn bootstrap(value: &Value) -> Parsed<Vec<Bootstrap>> {
    strings(value)?.into_iter().map(one_bootstrap).collect()
}

fn one_bootstrap(text: &str) -> Parsed<Bootstrap> {
    if let Ok(address) = address(text) {
        return Ok(Bootstrap {
            host: address.ip().to_string(),
            port: address.port(),
        });
    }
    let (host, port) = match text.rsplit_once(':') {
        None => (text, DEFAULT_PORT),
        Some((host, port)) => {
            let port = port.parse().ok().filter(|p| *p != 0);
            (
                host,
                port.ok_or_else(|| {
                    format!("{text:?} is not host:port: its port is no number from 1 to 65535")
                })?,
            )
        }
    };
    // Names as DNS and /etc/hosts allow them; a URL or a path is a mistake worth naming.
    let fine = (1..=253).contains(&host.len())
        && host
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_'));
    if !fine {
        return Err(format!("{text:?} is neither host, host:port nor ip:port"));
    }
    Ok(Bootstrap {
        host: host.to_owned(),
        port,
    })
}

/// A number and a unit: ms, s, m or h.
pub(super) fn span(value: &Value) -> Parsed<Span> {
    let text = string(value).map_err(|_| format!("{value} has no unit: write \"{value}s\""))?;
    let wrong = || format!("{text:?} is no time: write a number and ms, s, m or h, such as \"2s\"");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: f64 = match &text[digits.len()..] {
        "ms" => 1e6,
        "s" => 1e9,
        "m" => 60e9,
        "h" => 3600e9,
        _ => return Err(wrong()),
    };
    let number: f64 = digits.trim().parse().map_err(|_| wrong())?;
    // A year is beyond any use, and well within 64 bits of nanoseconds.
    if !number.is_finite() || number < 0.0 || number * unit > 365.0 * 24.0 * 3600e9 {
        return Err(wrong());
    }
    Ok(Span((number * unit).round() as u64))
}

pub(super) fn suspect_after(value: &Value) -> Parsed<Span> {
    let span = span(value)?;
    if !(Span::from_millis(200)..=Span::from_secs(300)).contains(&span) {
        return Err(format!("{span} is out of range: between 200ms and 5m"));
    }
    Ok(span)
}

pub(super) fn labels(value: &Value) -> Parsed<BTreeMap<String, String>> {
    let table = value
        .as_table()
        .ok_or_else(|| format!("expected a table of texts, got {}", value.type_str()))?;
    if table.len() > MAX_ITEMS {
        return Err(format!(
            "has {} items, the limit is {MAX_ITEMS}",
            table.len()
        ));
    }
    table
        .iter()
        .map(|(name, value)| {
            let value = string(value).map_err(|why| format!("label {name:?}: {why}"))?;
            Ok((label(name)?.to_owned(), label_value(value)?.to_owned()))
        })
        .collect()
}

fn label(text: &str) -> Parsed<&str> {
    if text.is_empty() {
        return Err("an empty name".to_owned());
    }
    label_value(text)
}

fn label_value(text: &str) -> Parsed<&str> {
    if text.len() > MAX_LABEL || text.chars().any(char::is_control) {
        return Err(format!(
            "{:?}... has more than {MAX_LABEL} bytes or a control character",
            text.chars().take(40).collect::<String>()
        ));
    }
    Ok(text)
}

pub(super) fn place(value: &Value) -> Parsed<Vec<String>> {
    strings(value)?
        .into_iter()
        .map(|part| label(part).map(str::to_owned))
        .collect()
}

pub(super) fn log_format(value: &Value) -> Parsed<LogFormat> {
    match string(value)? {
        "auto" => Ok(LogFormat::Auto),
        "text" => Ok(LogFormat::Text),
        "json" => Ok(LogFormat::Json),
        other => Err(format!("{other:?} is none of auto, text, json")),
    }
}
