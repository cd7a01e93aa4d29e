//! `muster drain` and `muster job continue`.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use muster_daemon::config::{self, Inputs};
use muster_protocol::Span;
use muster_protocol::local::{Command, Query};
use serde_json::{Value, json};

use super::client::{Client, Unanswered};
use super::output::{Failure, clean, duration_ms, field, flag, list, put, put_json, short};

/// Between two looks at whether an order is carried out.
pub(super) const POLL: Duration = Duration::from_millis(200);
/// Why an order waits is said after so long.
pub(super) const SAY_AFTER: Duration = Duration::from_secs(1);
/// Time on top of a grace before an order counts as not carried out: workers are killed, and the others must notice.
const MARGIN: Duration = Duration::from_secs(15);

/// `muster drain`
#[derive(Debug, clap::Args)]
pub struct DrainArgs {
    /// The node: the beginning of its id, or its host name [default: this node]
    node: Option<String>,
    /// How long jobs get to save and leave [default: the configuration's drain_deadline]
    #[arg(long, value_name = "TIME", value_parser = grace)]
    grace: Option<Span>,
    /// Wait until the node is gone
    #[arg(long)]
    wait: bool,
    #[command(flatten)]
    common: super::Common,
}

/// `muster job`
#[derive(Debug, clap::Args)]
pub struct JobArgs {
    #[command(subcommand)]
    order: JobOrder,
}

#[derive(Debug, clap::Subcommand)]
enum JobOrder {
    /// Go on with a job that has lost the majority of its nodes for good
    Continue(ContinueArgs),
}

/// `muster job continue`
#[derive(Debug, clap::Args)]
struct ContinueArgs {
    /// The job's id
    job: String,
    /// Every node that is lost and is given up: the beginning of its id, or its host name
    #[arg(long, value_name = "NODE,..", value_delimiter = ',')]
    dead: Vec<String>,
    /// Do it: those nodes are dead, and what only they have may be lost
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    common: super::Common,
}

/// `30s`, `500ms`, `2m`, `1h`; a plain number is seconds.
fn grace(text: &str) -> Result<Span, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: f64 = match text.get(digits.len()..) {
        Some("ms") => 1.0,
        Some("" | "s") => 1e3,
        Some("m") => 60e3,
        Some("h") => 3600e3,
        _ => return Err("write a number and ms, s, m or h, such as 30s".into()),
    };
    let number: f64 = digits
        .parse()
        .map_err(|_| "write a number and ms, s, m or h, such as 30s")?;
    let ms = number * unit;
    if !(0.0..=7.0 * 86_400e3).contains(&ms) {
        return Err("must be between 0 and 7 days".into());
    }
    Ok(Span::from_millis(ms.round() as u64))
}

/// Time that a drain leaves unless it says otherwise, as far as this node's configuration can be read.
fn default_grace() -> Span {
    match config::read(&Inputs::from_process(Default::default())) {
        Ok((config, _)) => config.drain_deadline,
        Err(_) => Span::from_secs(120),
    }
}

pub(super) async fn drain(args: &DrainArgs) -> Result<(), Failure> {
    let grace = args.grace.unwrap_or_else(default_grace);
    let client = Client::find(args.common.socket.as_deref(), None).await?;
    let nodes = client.query(Query::Nodes).await?;
    let target = target(&nodes, args.node.as_deref().unwrap_or_default())?;
    let order = Command::Drain {
        node: target.id.clone(),
        grace_ms: u32::try_from(grace.as_millis()).unwrap_or(u32::MAX),
    };
    let began = Instant::now();
    if target.away {
        return Err(Failure::Refused(format!(
            "{} does not answer: its agent is stopped or gone, and would not hear of a drain. Start it, or let it go on, \
             and drain it then; or end `muster run` there with SIGTERM",
            target.name
        )));
    }
    let mut stops = Vec::new();
    if !target.left {
        stops = too_small_without(&client.query(Query::Jobs).await?, &target.id);
        client.command(order).await?;
    }
    let mut waited = target.left.then_some(Duration::ZERO);
    if args.wait && !target.left {
        let limit = grace.to_std() + MARGIN;
        let what = format!("draining {}", target.name);
        let mut drains = false;
        wait(&what, limit, async || {
            is_gone(&client, &target, &mut drains).await
        })
        .await?;
        waited = Some(began.elapsed());
    }
    if args.common.out.json() {
        return put_json(&json!({
            "ok": true, "node": target.id, "grace_ms": grace.as_millis(),
            "gone": waited.is_some(), "waited_ms": waited.map(|w| w.as_millis() as u64),
            "too_small_without": stops,
        }));
    }
    let text = match waited {
        Some(_) if target.left => format!("{} has left already\n", target.name),
        Some(time) => format!("{} is gone, after {}\n", target.name, ms(time)),
        None => format!(
            "{} leaves within {grace}; `muster nodes` shows it, --wait waits for it\n",
            target.name
        ),
    };
    let stops = stops.iter().map(|job| {
        format!(
            "{job} needs every node that it has: unless a spare waits, nothing of it runs until another node joins it\n"
        )
    });
    put((text + &stops.collect::<String>()).as_bytes())
}

/// Jobs that train on this node and have too few others to go on without it.
fn too_small_without(jobs: &Value, node: &str) -> Vec<String> {
    let stops = |job: &&Value| {
        let members = list(job, "members");
        let has = members.iter().any(|m| field(m, "node") == node);
        let min = job.get("min_nodes").and_then(Value::as_u64);
        let left = members.len().saturating_sub(1) as u64;
        field(job, "kind") == "runs" && has && min.is_some_and(|min| left < min)
    };
    let jobs = jobs.as_array().map_or(&[][..], |v| v);
    jobs.iter()
        .filter(stops)
        .map(|job| field(job, "job"))
        .collect()
}

/// The node that an order is about.
#[derive(Debug, PartialEq, Eq)]
struct Target {
    id: String,
    name: String,
    own: bool,
    /// It said that it leaves, and went.
    left: bool,
    /// Its launchers answer, and its agent does not.
    away: bool,
}

/// The node that a name means: this one where there is no name; else the connected node of this host name; else the
/// one whose id begins so; else one that has left. A host may be called `b` or `cafe`, which some id begins with too,
/// and draining the wrong node is worse than refusing: the agent gets the whole id.
fn target(nodes: &Value, name: &str) -> Result<Target, Failure> {
    let rows: Vec<&Value> = nodes
        .as_array()
        .map_or(&[][..], |v| v)
        .iter()
        .filter(|row| is_here(row) || has_gone(row))
        .collect();
    let called = |wanted: &dyn Fn(&Value) -> bool| -> Vec<&Value> {
        rows.iter().copied().filter(|row| wanted(row)).collect()
    };
    let mut found = if name.is_empty() {
        called(&|row| flag(row, "self"))
    } else {
        called(&|row| field(row, "host") == name)
    };
    if found.is_empty() && !name.is_empty() {
        found = called(&|row| field(row, "node").starts_with(name));
    }
    if found.iter().any(|row| is_here(row)) {
        found.retain(|row| is_here(row));
    }
    let full = |row: &Value| {
        let id = field(row, "node");
        format!("{} ({})", clean(&field(row, "host")), short(&id))
    };
    match found.as_slice() {
        [row] => Ok(Target {
            id: field(row, "node"),
            name: full(row),
            own: flag(row, "self"),
            left: has_gone(row),
            away: field(row, "state") == "away",
        }),
        [] => Err(Failure::Refused(format!(
            "no connected node is called {}: `muster nodes` lists them",
            clean(name)
        ))),
        several => {
            let all: Vec<String> = several.iter().take(8).map(|r| full(r)).collect();
            Err(Failure::Refused(format!(
                "{} nodes are called {}: {}; use more of the id",
                several.len(),
                clean(name),
                all.join(", ")
            )))
        }
    }
}

fn is_here(row: &Value) -> bool {
    flag(row, "self") || flag(row, "connected")
}

fn has_gone(row: &Value) -> bool {
    !is_here(row) && field(row, "state") == "left"
}

pub(super) async fn job(args: &JobArgs) -> Result<(), Failure> {
    let JobOrder::Continue(args) = &args.order;
    let client = Client::find(args.common.socket.as_deref(), Some(&args.job)).await?;
    client
        .command(Command::Continue {
            job: args.job.clone(),
            dead: args.dead.clone(),
            confirmed: args.yes,
        })
        .await?;
    if !args.yes {
        return Err(Failure::Refused(risks(args)));
    }
    if args.common.out.json() {
        return put_json(&json!({ "ok": true, "job": args.job, "given_up": args.dead }));
    }
    let text = format!(
        "{} goes on without {}; `muster events {}` shows it\n",
        clean(&args.job),
        clean(&args.dead.join(", ")),
        clean(&args.job)
    );
    put(text.as_bytes())
}

/// Warning that an operator has to read before the job goes on.
fn risks(args: &ContinueArgs) -> String {
    let dead = clean(&args.dead.join(", "));
    format!(
        "continuing {} gives up {dead}. Only you can know that they are dead: one that merely cannot be \
         reached may train on until it is, and write the same files.\n\
         What may be lost: whatever they did that is in no checkpoint which the nodes that are left can \
         read. The job starts again from such a checkpoint, with a fresh count of restarts.\n\
         When they come back they stop their workers and join.\n\
         If that is what you want, add --yes",
        clean(&args.job)
    )
}

/// Whether the target has left, as it said that it would; `drains`: it has said so.
async fn is_gone(client: &Client, target: &Target, drains: &mut bool) -> Result<bool, Failure> {
    match client.query(Query::Nodes).await {
        Ok(nodes) => has_left(&nodes, target, drains),
        Err(Unanswered::Silent(_)) if target.own => Ok(true),
        Err(why) => Err(why.into()),
    }
}

fn has_left(nodes: &Value, target: &Target, drains: &mut bool) -> Result<bool, Failure> {
    let mut rows = nodes.as_array().map_or(&[][..], |v| v).iter();
    let Some(row) = rows.find(|r| field(r, "node") == target.id) else {
        return Ok(true);
    };
    let leaves = flag(row, "leaving");
    if flag(row, "connected") {
        if *drains && !leaves {
            return Err(Failure::Refused(format!(
                "the agent of {} ended before it was drained, and has started again: drain it again",
                target.name
            )));
        }
        *drains |= leaves;
        return Ok(false);
    }
    match field(row, "state").as_str() {
        "left" => Ok(true),
        // Its agent is gone, and its launchers still run.
        "away" if leaves => Ok(false),
        "suspect" => Ok(false),
        _ => Err(Failure::Refused(format!(
            "{} does not answer any more, and has not said that it leaves: it was lost, or its agent is stopped, and it was not \
             drained. `muster nodes` shows it; drain it again when it answers",
            target.name
        ))),
    }
}

pub(super) fn ms(time: Duration) -> String {
    duration_ms(time.as_secs_f64() * 1e3)
}

/// Asks until the answer is yes; on a terminal a line says for how long already.
pub(super) async fn wait<E: Into<Failure>>(
    what: &str,
    limit: Duration,
    mut done: impl AsyncFnMut() -> Result<bool, E>,
) -> Result<(), Failure> {
    let began = Instant::now();
    let terminal = std::io::stderr().is_terminal();
    let result = loop {
        match done().await {
            Ok(true) => break Ok(()),
            Ok(false) if began.elapsed() > limit => {
                break Err(Failure::Refused(format!(
                    "{what} takes longer than {}: `muster events` and the agent's log say what it waits for",
                    ms(limit)
                )));
            }
            Ok(false) => {}
            Err(why) => break Err(why.into()),
        }
        if terminal {
            let _gone = write!(
                io::stderr(),
                "\r\x1b[Kmuster: {what}, {:.0} s",
                began.elapsed().as_secs_f64()
            );
        }
        tokio::time::sleep(POLL).await;
    };
    if terminal {
        let _gone = write!(io::stderr(), "\r\x1b[K");
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_silent_was_not_drained() {
        let target = Target {
            id: "ab".into(),
            name: "b".into(),
            own: false,
            left: false,
            away: false,
        };
        let mut drains = false;
        let mut row = |connected: bool, state: &str, leaving: bool| {
            let row =
                json!({ "node": "ab", "connected": connected, "state": state, "leaving": leaving });
            has_left(&json!([row]), &target, &mut drains).map_err(|_| ())
        };
        // The order is on its way.
        assert_eq!(row(true, "alive", false), Ok(false));
        assert_eq!(row(true, "alive", true), Ok(false));
        assert_eq!(row(false, "left", true), Ok(true));
        assert_eq!(row(false, "suspect", false), Ok(false));
        assert_eq!(row(false, "away", false), Err(()));
        assert_eq!(row(false, "lost", false), Err(()));
        // Its agent died meanwhile; its launcher still runs, until another agent is there, or none for too long.
        assert_eq!(row(false, "away", true), Ok(false));
        assert_eq!(row(true, "alive", false), Err(()));
        let none = has_left(&json!([]), &target, &mut drains);
        assert_eq!(none.map_err(|_| ()), Ok(true));
    }

    #[test]
    fn a_job_that_needs_the_node_is_named() {
        let job = |id: &str, kind: &str, min: u64, nodes: &[&str]| {
            let members: Vec<Value> = nodes.iter().map(|n| json!({ "node": n })).collect();
            json!({ "job": id, "kind": kind, "min_nodes": min, "members": members })
        };
        let jobs = json!([
            job("needs", "runs", 2, &["a", "b"]),
            job("elastic", "runs", 1, &["a", "b"]),
            job("elsewhere", "runs", 2, &["b", "c"]),
            job("short", "waits", 2, &["a"]),
        ]);
        assert_eq!(too_small_without(&jobs, "a"), ["needs"]);
        assert_eq!(too_small_without(&Value::Null, "a"), [""; 0]);
    }

    #[test]
    fn a_name_means_one_node_or_is_refused() {
        let node = |id: &str, host: &str, own: bool, connected: bool| json!({ "node": id.repeat(8), "host": host, "self": own, "connected": connected });
        let nodes = json!([
            node("b0000000", "a", true, true),
            node("c1000000", "b", false, true),
            node("c1111111", "twin", false, true),
            node("d2222222", "twin", false, true),
            node("e3333333", "gone", false, false),
            json!({ "node": "f4444444", "host": "left", "connected": false, "state": "left" }),
            json!({ "node": "f5555555", "host": "b", "connected": false, "state": "left" }),
        ]);
        let id = |name: &str| target(&nodes, name).map(|t| t.id.get(..8).unwrap().to_owned());
        let check = |name: &str, expected: &str| assert_eq!(id(name).unwrap(), expected);
        check("", "b0000000");
        check("a", "b0000000");
        // A host name goes before the beginning of an id, also of the agent's own.
        check("b", "c1000000");
        check("b0", "b0000000");
        check("c11", "c1111111");
        // What has left is no news; another one of its name goes before it.
        let left = |name: &str| target(&nodes, name).unwrap().left;
        assert!(left("left") && left("f4") && !left("b"));
        for (name, text) in [
            ("c1", "2 nodes"),
            ("twin", "2 nodes"),
            ("gone", "no connected"),
            ("9", "no connected"),
        ] {
            assert!(id(name).unwrap_err().to_string().contains(text), "{name}");
        }
    }

    #[test]
    fn times_on_the_command_line() {
        let check = |text: &str, ms: u64| assert_eq!(grace(text), Ok(Span::from_millis(ms)));
        check("30s", 30_000);
        check("30", 30_000);
        check("1.5m", 90_000);
        check("250ms", 250);
        check("1h", 3_600_000);
        check("0", 0);
        for wrong in ["", "s", "-1s", "1d", "8h x", "200h", "nan", "1e99s"] {
            assert!(grace(wrong).is_err(), "{wrong}");
        }
    }
}
