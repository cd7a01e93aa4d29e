//! The arguments of a demo worker: one place that both writes and reads them.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

/// Arguments of a demo worker's command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerArgs {
    /// `--checkpoints DIR`: shared by all ranks.
    pub checkpoints: PathBuf,
    /// `--events DIR`: where each rank appends to its file.
    pub events: PathBuf,
    /// `--steps N`: the length of the training (2000).
    pub steps: u64,
    /// `--seed N`: initial weights and order of samples (1).
    pub seed: u64,
    /// `--pause-ms N`: a rest after each step, so that a demo lasts (0).
    pub pause: Duration,
    /// `--save-every N`: steps between checkpoints (50).
    pub save_every: u64,
    /// `--report-every N`: steps between events with the loss (10).
    pub report_every: u64,
    /// `--live`: stay in this process while the generations change.
    pub live: bool,
}

/// The command line is wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArgsError {
    #[error(
        "unknown argument {0:?}; known are --checkpoints, --events, --steps, --seed, --pause-ms, --save-every, --report-every, --live"
    )]
    Unknown(OsString),
    #[error("{0} needs a value after it")]
    NoValue(&'static str),
    #[error("{0} needs a whole number{1}")]
    NotANumber(&'static str, &'static str),
    #[error("{0} DIR is missing")]
    Missing(&'static str),
}

const CHECKPOINTS: &str = "--checkpoints";
const EVENTS: &str = "--events";
const STEPS: &str = "--steps";
const SEED: &str = "--seed";
const PAUSE: &str = "--pause-ms";
const SAVE_EVERY: &str = "--save-every";
const REPORT_EVERY: &str = "--report-every";
const LIVE: &str = "--live";

impl WorkerArgs {
    /// The defaults, with these directories.
    pub fn new(checkpoints: impl Into<PathBuf>, events: impl Into<PathBuf>) -> WorkerArgs {
        WorkerArgs {
            checkpoints: checkpoints.into(),
            events: events.into(),
            steps: 2000,
            seed: 1,
            pause: Duration::ZERO,
            save_every: 50,
            report_every: 10,
            live: false,
        }
    }

    /// Reads what follows the program's (or subcommand's) name.
    ///
    /// # Errors
    /// An argument is unknown, malformed or missing.
    pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<WorkerArgs, ArgsError> {
        let mut parsed = WorkerArgs::new("", "");
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            let mut value = |name| args.next().ok_or(ArgsError::NoValue(name));
            match arg.to_str() {
                Some(CHECKPOINTS) => parsed.checkpoints = value(CHECKPOINTS)?.into(),
                Some(EVENTS) => parsed.events = value(EVENTS)?.into(),
                Some(STEPS) => parsed.steps = number(STEPS, value(STEPS)?, 0)?,
                Some(SEED) => parsed.seed = number(SEED, value(SEED)?, 0)?,
                Some(PAUSE) => {
                    parsed.pause = Duration::from_millis(number(PAUSE, value(PAUSE)?, 0)?);
                }
                Some(SAVE_EVERY) => {
                    parsed.save_every = number(SAVE_EVERY, value(SAVE_EVERY)?, 1)?;
                }
                Some(REPORT_EVERY) => {
                    parsed.report_every = number(REPORT_EVERY, value(REPORT_EVERY)?, 1)?;
                }
                Some(LIVE) => parsed.live = true,
                _ => return Err(ArgsError::Unknown(arg)),
            }
        }
        for (name, dir) in [(CHECKPOINTS, &parsed.checkpoints), (EVENTS, &parsed.events)] {
            if dir.as_os_str().is_empty() {
                return Err(ArgsError::Missing(name));
            }
        }
        Ok(parsed)
    }

    /// The inverse of [`parse`](Self::parse), for whoever starts the worker.
    pub fn to_args(&self) -> Vec<OsString> {
        let numbers = [
            (STEPS, self.steps),
            (SEED, self.seed),
            (PAUSE, self.pause.as_millis() as u64),
            (SAVE_EVERY, self.save_every),
            (REPORT_EVERY, self.report_every),
        ];
        let mut args: Vec<OsString> = vec![
            CHECKPOINTS.into(),
            self.checkpoints.clone().into(),
            EVENTS.into(),
            self.events.clone().into(),
        ];
        for (name, number) in numbers {
            args.push(name.into());
            args.push(number.to_string().into());
        }
        if self.live {
            args.push(LIVE.into());
        }
        args
    }
}

fn number(name: &'static str, value: OsString, least: u64) -> Result<u64, ArgsError> {
    let hint = if least == 0 { "" } else { " above 0" };
    value
        .to_str()
        .and_then(|text| text.parse().ok())
        .filter(|number| *number >= least)
        .ok_or(ArgsError::NotANumber(name, hint))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<WorkerArgs, ArgsError> {
        WorkerArgs::parse(args.iter().map(OsString::from))
    }

    #[test]
    fn arguments_go_both_ways() {
        let args = WorkerArgs {
            steps: 7,
            seed: 8,
            pause: Duration::from_millis(9),
            save_every: 10,
            report_every: 11,
            live: true,
            ..WorkerArgs::new("/a b", "c")
        };
        assert_eq!(WorkerArgs::parse(args.to_args()), Ok(args));
        let short = parse(&["--events", "e", "--checkpoints", "c"]);
        assert_eq!(short, Ok(WorkerArgs::new("c", "e")));
    }

    #[test]
    fn mistakes_are_named() {
        assert_eq!(parse(&["--step"]), Err(ArgsError::Unknown("--step".into())));
        assert_eq!(parse(&["--steps"]), Err(ArgsError::NoValue("--steps")));
        assert!(matches!(
            parse(&["--steps", "-3"]),
            Err(ArgsError::NotANumber("--steps", _))
        ));
        assert!(matches!(
            parse(&["--save-every", "0"]),
            Err(ArgsError::NotANumber(..))
        ));
        assert_eq!(
            parse(&["--checkpoints", "c"]),
            Err(ArgsError::Missing("--events"))
        );
    }
}
