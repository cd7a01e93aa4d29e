//! `muster doctor`: looks at this node as a job would, and says how to mend what is wrong.
//!
//! Each check looks and changes nothing, except that `--store` writes and removes a small file in
//! the store. Checks that may hang (a resolver, a network file system) have a limit.

mod agent;
mod clock;
mod gpu;
mod jobs;
mod limits;
mod network;
mod storage;

use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser as _};
use muster_daemon::config::{self, AgentConfig, Inputs};
use muster_store::Location;
use serde_json::{Value, json};

use crate::stores;

use super::output::{Failure, Style, Tone, clean, put, put_json};

/// For one check that may hang.
const PATIENCE: Duration = Duration::from_secs(10);

/// `muster doctor`
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Also check a directory or bucket that jobs are to use as their store
    #[arg(
        long,
        value_name = "LOCATION",
        value_parser = OsStringValueParser::new().try_map(stores::parse)
    )]
    store: Option<Location>,
    #[command(flatten)]
    common: super::Common,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Verdict {
    Ok,
    Warn,
    Fail,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Verdict::Ok => "ok",
            Verdict::Warn => "warn",
            Verdict::Fail => "fail",
        }
    }

    fn tone(self) -> Tone {
        match self {
            Verdict::Ok => Tone::Good,
            Verdict::Warn => Tone::Warn,
            Verdict::Fail => Tone::Bad,
        }
    }
}

/// Result of one look.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Check {
    name: &'static str,
    verdict: Verdict,
    detail: String,
    fix: Option<String>,
}

impl Check {
    fn ok(name: &'static str, detail: impl Into<String>) -> Check {
        Check {
            name,
            verdict: Verdict::Ok,
            detail: detail.into(),
            fix: None,
        }
    }

    fn warn(name: &'static str, detail: impl Into<String>, fix: impl Into<String>) -> Check {
        Check {
            name,
            verdict: Verdict::Warn,
            detail: detail.into(),
            fix: Some(fix.into()),
        }
    }

    fn fail(name: &'static str, detail: impl Into<String>, fix: impl Into<String>) -> Check {
        Check {
            verdict: Verdict::Fail,
            ..Check::warn(name, detail, fix)
        }
    }
}

pub(super) async fn main(args: &Args, style: &Style) -> Result<(), Failure> {
    let loaded = config::read(&Inputs::from_process(Default::default()));
    let (config, mut checks) = match loaded {
        Ok((config, effective)) => (Some(config), configuration(&effective.warnings)),
        Err(error) => (
            None,
            vec![Check::fail(
                "configuration",
                error.to_string(),
                "correct it; `muster config` shows where each value comes from",
            )],
        ),
    };
    let (agent, state_dir) = agent::checks(args.common.socket.as_deref(), config.as_ref()).await;
    checks.extend(agent);
    checks.extend(clock::checks());
    checks.extend(limits::checks());
    checks.extend(within("host name", network::host_name).await);
    checks.push(network::interfaces());
    // An agent that answers has its own, whatever is configured here.
    let state_dir = state_dir.or_else(|| config.map(|c| c.state_dir));
    if let Some(dir) = &state_dir {
        checks.push(storage::state_dir(dir));
    }
    checks.push(gpu::check());
    if let Some(location) = args.store.clone() {
        checks.extend(within("store", move || vec![storage::store(&location)]).await);
    }
    let failed = checks.iter().any(|c| c.verdict == Verdict::Fail);
    if args.common.out.json() {
        put_json(&to_json(&checks))?;
    } else {
        put(render(&checks, style).as_bytes())?;
    }
    if failed {
        // The list has said what, and how to mend it.
        return Err(Failure::Refused(String::new()));
    }
    Ok(())
}

fn configuration(warnings: &[String]) -> Vec<Check> {
    if warnings.is_empty() {
        return vec![Check::ok("configuration", "can be read")];
    }
    warnings
        .iter()
        .map(|w| {
            Check::warn(
                "configuration",
                w,
                "correct it, or ignore it if it is meant",
            )
        })
        .collect()
}

/// Runs a check on a thread of its own, and gives it up when it hangs.
async fn within(
    name: &'static str,
    look: impl FnOnce() -> Vec<Check> + Send + 'static,
) -> Vec<Check> {
    let looking = tokio::task::spawn_blocking(look);
    match tokio::time::timeout(PATIENCE, looking).await {
        Ok(Ok(checks)) => checks,
        Ok(Err(error)) => vec![Check::fail(
            name,
            format!("the check itself failed: {error}"),
            "report it, with what `muster doctor -o json` prints",
        )],
        Err(_) => vec![Check::fail(
            name,
            format!("no answer within {} s", PATIENCE.as_secs()),
            "whatever it asks hangs: check the name servers in /etc/resolv.conf, or the server of a network file system",
        )],
    }
}

fn count(checks: &[Check], verdict: Verdict) -> usize {
    checks.iter().filter(|c| c.verdict == verdict).count()
}

fn to_json(checks: &[Check]) -> Value {
    let rows: Vec<Value> = checks
        .iter()
        .map(|c| {
            json!({ "check": c.name, "status": c.verdict.word(), "detail": c.detail, "fix": c.fix })
        })
        .collect();
    json!({
        "checks": rows, "ok": count(checks, Verdict::Ok), "warn": count(checks, Verdict::Warn),
        "fail": count(checks, Verdict::Fail),
    })
}

fn render(checks: &[Check], style: &Style) -> String {
    let width = checks.iter().map(|c| c.name.len()).max().unwrap_or(0);
    let mut out = String::new();
    for check in checks {
        let word = format!("{:<4}", check.verdict.word());
        out.push_str(&format!(
            "{}  {:<width$}  {}\n",
            style.paint(check.verdict.tone(), &word),
            check.name,
            clean(&check.detail)
        ));
        if let Some(fix) = &check.fix {
            out.push_str(&format!("      {:<width$}  -> {}\n", "", clean(fix)));
        }
    }
    let warnings = count(checks, Verdict::Warn);
    out.push_str(&format!(
        "{} ok, {warnings} warning{}, {} failed\n",
        count(checks, Verdict::Ok),
        if warnings == 1 { "" } else { "s" },
        count(checks, Verdict::Fail)
    ));
    out
}

/// Whether agents of other hosts are to reach this one.
fn is_networked(config: &AgentConfig) -> bool {
    config.listen.iter().any(|a| !a.ip().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_check_says_what_and_how_to_mend_it() {
        let checks = [
            Check::ok("clock", "fine"),
            Check::warn("limits", "few files", "ulimit -n 65536"),
            Check::fail("state", "read-only", "mount it writable"),
        ];
        assert_eq!(
            render(&checks, &Style { colour: false }),
            "ok    clock   fine\n\
             warn  limits  few files\n              -> ulimit -n 65536\n\
             fail  state   read-only\n              -> mount it writable\n\
             1 ok, 1 warning, 1 failed\n"
        );
        let json = to_json(&checks);
        assert_eq!(json["checks"][2]["status"], "fail");
        assert_eq!(json["checks"][0]["fix"], Value::Null);
        assert_eq!(
            (&json["ok"], &json["warn"], &json["fail"]),
            (&json!(1), &json!(1), &json!(1))
        );
    }

    #[tokio::test]
    async fn a_check_that_panics_is_a_failed_check() {
        let checks = within("x", || panic!("meant")).await;
        assert_eq!(checks[0].verdict, Verdict::Fail);
    }
}
