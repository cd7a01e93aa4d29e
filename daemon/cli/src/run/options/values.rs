//! Meaning of the text behind a flag.

use std::collections::BTreeSet;
use std::time::Duration;

use muster_protocol::record::{Place, short_hash};
use nix::sys::signal::Signal;

use super::{Handled, Host, MAX_SLOTS, PlanError, StreamMap, Streams};

/// `1%`, or `1`: a hundredth, in millionths. The specification refuses values that are too small or too great.
pub(super) fn share(text: &str) -> Option<u32> {
    let number = text.trim().trim_end_matches('%').trim();
    let percent = number.parse::<f64>().ok()?;
    // Beyond the greatest share that there is; below the least that can be told it is none.
    let ppm = (percent * 1e4).round();
    (1.0..=1e6).contains(&ppm).then_some(ppm as u32)
}

pub(super) fn millis(time: Duration) -> u32 {
    u32::try_from(time.as_millis()).unwrap_or(u32::MAX)
}

pub(super) fn nodes(text: &str) -> Result<(u16, u16), PlanError> {
    let fault = || PlanError::Nnodes(text.to_owned());
    let number = |part: &str| part.trim().parse::<u16>().map_err(|_| fault());
    match text.split_once(':') {
        None => number(text).map(|n| (n, n)),
        Some((min, max)) => Ok((number(min)?, number(max)?)),
    }
}

pub(super) fn slots(text: &str, host: &Host) -> Result<u16, PlanError> {
    let count = match text {
        "cpu" => host.cpus,
        "gpu" if host.gpus == 0 => return Err(PlanError::NoGpu),
        "gpu" => host.gpus,
        "auto" if host.gpus > 0 => host.gpus,
        "auto" => host.cpus,
        number => number
            .parse()
            .map_err(|_| PlanError::Nproc(text.to_owned()))?,
    };
    u16::try_from(count)
        .ok()
        .filter(|n| (1..=MAX_SLOTS).contains(n))
        .ok_or_else(|| PlanError::Nproc(text.to_owned()))
}

pub(super) fn streams(flag: &'static str, text: &str) -> Result<StreamMap, PlanError> {
    let fault = || PlanError::Streams {
        flag,
        text: text.to_owned(),
    };
    let one = |digit: &str| match digit.trim() {
        "0" => Ok(Streams::default()),
        "1" => Ok(Streams {
            out: true,
            err: false,
        }),
        "2" => Ok(Streams {
            out: false,
            err: true,
        }),
        "3" => Ok(Streams {
            out: true,
            err: true,
        }),
        _ => Err(fault()),
    };
    if !text.contains(':') {
        return one(text).map(StreamMap::All);
    }
    text.split(',')
        .map(|pair| {
            let (rank, digit) = pair.split_once(':').ok_or_else(fault)?;
            Ok((rank.trim().parse().map_err(|_| fault())?, one(digit)?))
        })
        .collect::<Result<Vec<_>, _>>()
        .map(StreamMap::Ranks)
}

pub(super) fn filter(text: Option<&str>) -> Result<BTreeSet<u16>, PlanError> {
    match text {
        None | Some("") => Ok(BTreeSet::new()),
        Some(text) => text
            .split(',')
            .map(|rank| {
                rank.trim()
                    .parse()
                    .map_err(|_| PlanError::Filter(text.to_owned()))
            })
            .collect(),
    }
}

pub(super) fn signal(flag: &'static str, text: &str) -> Result<Signal, PlanError> {
    let name = text.trim().to_ascii_uppercase();
    let found = match name.parse::<i32>() {
        Ok(number) => Signal::try_from(number).ok(),
        Err(_) if name.starts_with("SIG") => name.parse().ok(),
        Err(_) => format!("SIG{name}").parse().ok(),
    };
    found.ok_or_else(|| PlanError::Signal {
        flag,
        text: text.to_owned(),
    })
}

pub(super) fn handled(text: &str) -> Result<Handled, PlanError> {
    const FLAG: &str = "--signals-to-handle";
    let mut out = Handled {
        interrupt: false,
        leave: Vec::new(),
    };
    for part in text.split(',').filter(|p| !p.trim().is_empty()) {
        match signal(FLAG, part)? {
            Signal::SIGINT => out.interrupt = true,
            Signal::SIGKILL | Signal::SIGSTOP | Signal::SIGCHLD => {
                return Err(PlanError::Uncatchable {
                    flag: FLAG,
                    text: part.to_owned(),
                });
            }
            // A fault of the launcher itself: handling it would loop.
            Signal::SIGSEGV | Signal::SIGFPE | Signal::SIGILL | Signal::SIGBUS => {
                return Err(PlanError::Uncatchable {
                    flag: FLAG,
                    text: part.to_owned(),
                });
            }
            other if !out.leave.contains(&other) => out.leave.push(other),
            _ => {}
        }
    }
    Ok(out)
}

pub(super) fn place(labels: &[String], short: Option<&str>) -> Result<Place, PlanError> {
    let mut place = Place::default();
    if let Some(short) = short {
        let (zone, switch) = short.split_once('/').unwrap_or((short, ""));
        place.zone = short_hash(zone);
        place.switch = short_hash(switch);
    }
    for label in labels {
        match label.split_once('=') {
            Some(("zone", name)) => place.zone = short_hash(name),
            Some(("switch", name)) => place.switch = short_hash(name),
            _ => return Err(PlanError::Label(label.clone())),
        }
    }
    Ok(place)
}

/// `64G`, `1.5TiB`, `4096`: powers of 1024.
pub(super) fn bytes(text: &str) -> Option<u64> {
    let text = text
        .trim()
        .trim_end_matches(['B', 'b'])
        .trim_end_matches(['i', 'I']);
    let (number, factor) = match text.char_indices().next_back()? {
        (at, unit) if unit.is_ascii_alphabetic() => {
            let power = "KMGT".find(unit.to_ascii_uppercase())? + 1;
            (&text[..at], 1024f64.powi(i32::try_from(power).ok()?))
        }
        _ => (text, 1.0),
    };
    let value = number.trim().parse::<f64>().ok()? * factor;
    // Beyond any machine's memory, and below what a u64 holds.
    (0.0..=1e18).contains(&value).then_some(value as u64)
}
