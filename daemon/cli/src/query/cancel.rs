//! `muster cancel`: the agent is told once, and follows its order until that life of the job is over. Where a
//! job's store decides and no launcher is left to write there, this command does.

use std::path::Path;
use std::time::{Duration, Instant};

use clap::builder::{OsStringValueParser, TypedValueParser as _};
use muster_daemon::clock;
use muster_protocol::local::{Command, Query};
use muster_protocol::record::Record;
use muster_protocol::{JobKey, Time};
use muster_store::Location;
use serde_json::{Value, json};

use super::client::{Client, Unanswered, rows_of};
use super::lists::left_text;
use super::orders::{POLL, SAY_AFTER, ms, wait};
use super::output::{Failure, clean, field, flag, put, put_json};
use crate::kept::Ledger;
use crate::run::console::say;
use crate::{sockets, stores};

/// A cancelled job's workers get its own grace, which this command does not know.
const LIMIT: Duration = Duration::from_secs(300);
/// By then an agent has heard of others, if it hears of any.
const YOUNG_MS: u64 = 5_000;
/// After this time a person hears that the order holds, though nothing here says what it waits for.
const SLOW: Duration = Duration::from_secs(5);
/// Between two looks at a store that may stand still.
const LOOK: Duration = Duration::from_secs(1);

/// `muster cancel`
#[derive(Debug, clap::Args)]
pub struct CancelArgs {
    /// The job's id
    job: String,
    /// Wait until the job is over
    #[arg(long)]
    wait: bool,
    /// The job's store, where no launcher of it is left: its end is written there
    /// [default: as the last launcher on this node named it]
    #[arg(
        long,
        value_name = "LOCATION",
        value_parser = OsStringValueParser::new().try_map(stores::parse)
    )]
    store: Option<Location>,
    #[command(flatten)]
    common: super::Common,
}

pub(super) async fn main(args: &CancelArgs) -> Result<(), Failure> {
    let began = Instant::now();
    let client = Client::find_for(args.common.socket.as_deref(), &args.job).await?;
    let over = end(args, &client).await?;
    let waited = over.then(|| began.elapsed());
    // An agent that lives in a launcher has gone by now.
    let jobs = match over {
        true => client.query(Query::Jobs).await.unwrap_or_default(),
        false => Value::Null,
    };
    let left = left_running(&jobs, &args.job);
    if args.common.out.json() {
        return put_json(&json!({
            "ok": true, "job": args.job, "over": waited.is_some(),
            "waited_ms": waited.map(|w| w.as_millis() as u64), "left_running": left,
        }));
    }
    let job = clean(&args.job);
    let text = match waited {
        Some(time) => {
            let mut left = left_text(left);
            if !left.is_empty() {
                left.push('\n');
            }
            format!("{job} is over, after {}\n{left}", ms(time))
        }
        None => {
            format!("{job} stops; `muster events {job} --follow` shows how, --wait waits for it\n")
        }
    };
    put(text.as_bytes())
}

/// Where workers of the job may still run though it is over, as the agent says: null where none do.
fn left_running<'a>(jobs: &'a Value, job: &'a str) -> &'a Value {
    let mut left = rows_of(jobs, job).map(|row| &row["left_running"]);
    left.find(|left| left.is_object()).unwrap_or(&Value::Null)
}

/// How the agent's order stands.
#[derive(Debug, PartialEq, Eq)]
enum Stage {
    Asked { sure: bool },
    Over,
    InStore(Left),
    Failed(String),
}

/// A generation without a launcher that could write its end to the store.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    generation: String,
    /// Nothing of it runs. Else its workers may, and only the store can tell.
    known: bool,
    /// The store, where the agent knows it.
    store: String,
}

/// Ends the job: whether it is over, and not only sure to be.
async fn end(args: &CancelArgs, client: &Client) -> Result<bool, Failure> {
    // The agent may be stopped, and answer much later.
    let given = clock::now();
    let status = client.query(Query::Status).await?;
    let embedded = is_embedded(client, &status);
    let jobs = client.query(Query::Jobs).await?;
    let known = rows_of(&jobs, &args.job).next().is_some();
    match order(args, client, known, given).await {
        Ok(_) => {}
        Err(Unanswered::Refused(why)) => {
            // It may have ended a moment ago, or long since: that is as it was to be.
            let jobs = client.query(Query::Jobs).await?;
            if args.store.is_none() && is_over(&jobs, &args.job) {
                return Ok(true);
            }
            // Its agents may be gone, while its store is there: also those of a later life than this one knows.
            return match (&args.store, known) {
                (Some(location), _) => end_silent(args, client, location).await.map(|()| true),
                (None, false) => Err(Failure::Refused(format!(
                    "{why}. Where all its nodes are gone, a job with a store is ended there: `muster cancel {} --wait \
                     --store LOCATION`",
                    clean(&args.job)
                ))),
                (None, true) => Err(Failure::Refused(why)),
            };
        }
        Err(why) => return Err(why.into()),
    }
    match follow(args, client, embedded).await? {
        Stage::Over => Ok(true),
        Stage::Asked { .. } => Ok(false),
        Stage::InStore(left) => end_in_store(args, client, &left).await.map(|()| true),
        // Those that know the job do not answer, while its store is there.
        Stage::Failed(why) => match &args.store {
            Some(location) => end_silent(args, client, location).await.map(|()| true),
            None => Err(Failure::Refused(why)),
        },
    }
}

/// Whether the one job of this name that the agent knows has ended.
fn is_over(jobs: &Value, job: &str) -> bool {
    let kinds: Vec<String> = rows_of(jobs, job).map(|row| field(row, "kind")).collect();
    let ended = |kind: &str| {
        matches!(kind, "finished" | "cancelled" | "dormant") || kind.starts_with("failed")
    };
    matches!(&kinds[..], [kind] if ended(kind))
}

/// Gives the agent the order. One that was just started may not have heard of the job yet.
async fn order(
    args: &CancelArgs,
    client: &Client,
    known: bool,
    given: Time,
) -> Result<Value, Unanswered> {
    loop {
        let job = args.job.clone();
        let answer = client.command(Command::Cancel { job, given }).await;
        if known || !matches!(answer, Err(Unanswered::Refused(_))) {
            return answer;
        }
        let status = client.query(Query::Status).await?;
        let young = status["uptime_ms"].as_u64().is_some_and(|ms| ms < YOUNG_MS);
        if !young {
            return answer;
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Whether the agent is a part of a launcher: its socket has the launcher's process id in its name.
fn is_embedded(client: &Client, status: &Value) -> bool {
    let pid = status["pid"].as_u64().and_then(|pid| pid.try_into().ok());
    let own = pid.map(|pid| sockets::embedded_socket(Path::new(""), pid));
    own.is_some_and(|own| client.path.file_name() == own.file_name())
}

/// Follows the agent's order, until the job is over or what is in the way is known; without `--wait` until it
/// is sure to end.
async fn follow(args: &CancelArgs, client: &Client, embedded: bool) -> Result<Stage, Failure> {
    let what = format!("stopping {}", clean(&args.job));
    let mut stage = Stage::Asked { sure: false };
    let (began, mut said) = (Instant::now(), false);
    wait(&what, LIMIT, async || {
        stage = match client.query(Query::Jobs).await {
            Ok(jobs) => {
                let stage = stage_of(&jobs, &args.job).ok_or_else(|| {
                    Unanswered::Refused(format!(
                        "the agent has lost the order, as it was started anew: say `muster cancel {}` again",
                        clean(&args.job)
                    ))
                })?;
                let open = matches!(stage, Stage::Asked { .. });
                if let Some(text) = waits(&jobs, &args.job, began).filter(|_| open && !said) {
                    say(&text);
                    said = true;
                }
                stage
            }
            // An embedded agent ends with its job, and takes its socket along.
            Err(Unanswered::Hangs(why) | Unanswered::Silent(why)) => {
                tokio::time::sleep(POLL).await;
                if embedded && !client.path.exists() {
                    stage = Stage::Over;
                    return Ok(true);
                }
                return Err(Unanswered::Silent(format!(
                    "{why}. Whether {0} ends is not known: say `muster cancel {0}` again",
                    clean(&args.job)
                )));
            }
            Err(why) => return Err(why),
        };
        Ok(match stage {
            Stage::Asked { sure } => sure && !args.wait,
            _ => true,
        })
    })
    .await?;
    Ok(stage)
}

/// Words on an order that is under way, for a person who has waited since `began`: none at first.
fn waits(jobs: &Value, job: &str, began: Instant) -> Option<String> {
    let waiting = rows_of(jobs, job).map(|row| field(row, "waiting"));
    let mut waiting = waiting.filter(|_| began.elapsed() > SAY_AFTER);
    let why = waiting.find(|why| !why.is_empty());
    let why = why.map(|why| format!("the order holds, and waits: {}", clean(&why)));
    why.or_else(|| {
        (began.elapsed() > SLOW).then(|| {
            "the order holds, and it is not known yet whether the job is over. Its workers may take their --stop-grace to \
             end; `muster jobs` on one of its nodes says what it waits for"
                .to_owned()
        })
    })
}

fn stage_of(jobs: &Value, job: &str) -> Option<Stage> {
    let row = rows_of(jobs, job).find(|row| row["cancel"].is_object())?;
    let order = &row["cancel"];
    match field(order, "stage").as_str() {
        "asked" => Some(Stage::Asked {
            sure: flag(order, "sure"),
        }),
        "over" => Some(Stage::Over),
        "in_store" => Some(Stage::InStore(Left {
            generation: field(order, "generation"),
            known: flag(order, "known"),
            store: field(row, "store"),
        })),
        "failed" => Some(Stage::Failed(field(order, "why"))),
        _ => None,
    }
}

/// Ends a job of which no launcher is left, in its store.
async fn end_in_store(args: &CancelArgs, client: &Client, left: &Left) -> Result<(), Failure> {
    let location = match &args.store {
        Some(location) => location.clone(),
        None if left.store.is_empty() => {
            let job = clean(&args.job);
            let wait = match left.known {
                true => "",
                false => "--wait ",
            };
            return Err(Failure::Refused(format!(
                "no launcher of {job} is seen that could write its end to its store: `muster cancel {job} {wait}--store \
                 LOCATION` does that, on this node or any other that reaches the store"
            )));
        }
        None => stores::parse((&*left.store).into())
            .map_err(|error| Failure::Refused(error.to_string()))?,
    };
    if !left.known {
        return end_silent(args, client, &location).await;
    }
    let mut ledger = Ledger::open(&location, id_of(args), true)?;
    if !ledger.is_over() && left.generation != ledger.newest().hex() {
        // It went on with nodes that this one does not see, and these may have died since.
        return end_silent(args, client, &location).await;
    }
    let record = ledger.end()?;
    client.command(ended(args, record)).await?;
    Ok(())
}

/// The same where nobody can say whether its launchers are dead or only cut off: the store tells, by R14, once
/// nothing has been written there for long enough.
async fn end_silent(
    args: &CancelArgs,
    client: &Client,
    location: &Location,
) -> Result<(), Failure> {
    let mut ledger = Ledger::open(location, id_of(args), true)?;
    let status = client.query(Query::Status).await?;
    let limit = Duration::from_millis(
        status["orphan_after_ms"]
            .as_u64()
            .unwrap_or(LIMIT.as_millis() as u64),
    );
    let job = clean(&args.job);
    if !ledger.is_over() && !args.wait {
        return Err(Failure::Refused(format!(
            "{job} runs, as its store says, on {}, and no agent that this one sees can say whether it still does: \
             `muster cancel {job} --wait --store {location}` looks at the store for {}, and ends the job if nothing is \
             written there",
            members(&ledger, client).await?,
            ms(limit)
        )));
    }
    let mut seen = None;
    let mut since = Instant::now();
    let mut looked = None::<Instant>;
    let generation = ledger.newest();
    let what = format!("waiting for a sign of life of {job} in its store");
    wait(&what, 2 * limit, async || {
        if ledger.is_over() {
            return Ok(true);
        }
        if looked.is_none_or(|at| at.elapsed() >= LOOK) {
            looked = Some(Instant::now());
            let now = Some(ledger.signs_of_life()?);
            if seen != now {
                if seen.is_some() && !ledger.is_over() {
                    return Err(Failure::Refused(format!(
                        "{job} runs: its store was written to just now, on behalf of {}. Say `muster cancel {job}` on \
                         one of these nodes",
                        members(&ledger, client).await?
                    )));
                }
                (seen, since) = (now, Instant::now());
            }
        }
        Ok(since.elapsed() >= limit)
    })
    .await?;
    // The last look may be a while ago.
    let moved = !ledger.is_over() && Some(ledger.signs_of_life()?) != seen;
    if !ledger.is_over() && (moved || ledger.newest() != generation) {
        return Err(Failure::Refused(format!(
            "{job} goes on by now, as its store says"
        )));
    }
    let record = ledger.end()?;
    // Those that know the job may all be gone: they read of its end in the store.
    match client.command(ended(args, record)).await {
        Ok(_) | Err(Unanswered::Refused(_)) => Ok(()),
        Err(why) => Err(why.into()),
    }
}

fn ended(args: &CancelArgs, record: Record) -> Command {
    Command::Ended {
        job: args.job.clone(),
        record: Box::new(record),
    }
}

/// The nodes of the newest generation, by their host names where the agent has heard these.
async fn members(ledger: &Ledger, client: &Client) -> Result<String, Failure> {
    let nodes = client.query(Query::Nodes).await?;
    let rows = nodes.as_array().map_or(&[][..], |v| v);
    let members = ledger.latest.iter().flat_map(|(r, _)| &r.members);
    let names = members.take(8).map(|member| {
        let id = member.node.hex();
        let row = rows.iter().find(|row| field(row, "node") == id);
        let host = row.map(|row| clean(&field(row, "host")));
        host.filter(|h| !h.is_empty())
            .unwrap_or(member.node.to_string())
    });
    Ok(names.collect::<Vec<_>>().join(", "))
}

fn id_of(args: &CancelArgs) -> &str {
    JobKey::parts_of(&args.job).1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_still_runs_is_said_with_its_bound() {
        let row = |left: Value| json!([{ "job": "j", "owner": "u", "left_running": left }]);
        let none = row(Value::Null);
        assert_eq!(left_text(left_running(&none, "j")), "");
        let two = row(json!({ "nodes": ["n2", "n3"], "ms": 28_000 }));
        let text = left_text(left_running(&two, "j"));
        assert!(text.contains("n2, n3") && text.contains("28"), "{text}");
        assert_eq!(left_text(left_running(&two, "another")), "");
        let told = row(json!({ "nodes": [], "ms": 1_000 }));
        assert!(!left_text(left_running(&told, "j")).is_empty());
    }

    #[test]
    fn only_the_one_job_of_a_name_counts_as_over() {
        let row = |kind: &str| json!({ "job": "a", "owner": "0", "kind": kind });
        let other = json!({ "job": "b", "owner": "0", "kind": "finished" });
        for (rows, over) in [
            (vec![row("cancelled"), other.clone()], true),
            (vec![row("failed with code 3")], true),
            (vec![row("merged into another group")], false),
            (vec![row("runs")], false),
            (vec![row("finished"), row("runs")], false),
            (vec![other], false),
        ] {
            assert_eq!(is_over(&json!(rows), "a"), over, "{rows:?}");
        }
    }

    #[test]
    fn an_agent_that_may_end_with_its_job_is_known_by_its_socket() {
        let embedded = |path: &str, status: Value| {
            let path = path.into();
            is_embedded(&Client { path }, &status)
        };
        assert!(embedded("/tmp/muster-0/run-7.sock", json!({ "pid": 7 })));
        assert!(!embedded("/tmp/muster-0/run-7.sock", json!({ "pid": 8 })));
        assert!(!embedded("/run/muster/agent.sock", json!({ "pid": 7 })));
        assert!(!embedded("/tmp/muster-0/run-7.sock", json!({})));
    }

    #[test]
    fn how_an_order_stands_is_read_from_the_row_that_has_one() {
        let jobs = json!([
            { "job": "j", "owner": "1", "kind": "runs", "cancel": null },
            { "job": "other", "cancel": { "stage": "over" } },
            { "job": "j", "owner": "0", "store": "/s",
              "cancel": { "stage": "in_store", "generation": "ab", "known": true } },
        ]);
        let left = Left {
            generation: "ab".into(),
            known: true,
            store: "/s".into(),
        };
        assert_eq!(stage_of(&jobs, "j"), Some(Stage::InStore(left)));
        assert_eq!(stage_of(&jobs, "other"), Some(Stage::Over));
        assert_eq!(stage_of(&jobs, "1/j"), None);
    }
}
