//! `muster events JOB`: a job's generations, and its history line by line.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use muster_protocol::local::Query;
use serde_json::Value;

use super::client::{Client, Unanswered};
use super::output::{
    Cell, Failure, Style, Table, Tone, clean, counted, duration_ms, field, flag, list,
    member_count, put, put_json, short, utc,
};
use crate::run::console::say;

/// Between two questions while following.
const POLL: Duration = Duration::from_millis(300);
/// How long an agent may be away (a crash, an upgrade) while its events are followed.
const AWAY: Duration = Duration::from_secs(60);
/// Answers that are asked for at most for one history; an agent keeps far fewer entries.
const MAX_PAGES: usize = 1_000;
/// Columns of the longest bar of phases.
const BAR: f64 = 32.0;
/// Members named in the table.
const NAMED: usize = 8;

/// `muster events`
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The job's id; UID/ID where several users have a job of that id
    job: String,
    /// Go on printing what happens, until the job is over. With -o json: one event a line
    #[arg(short, long)]
    follow: bool,
    /// Leave out what happened up to this sequence number
    #[arg(long, default_value_t = 0, value_name = "SEQ")]
    after: u64,
    #[command(flatten)]
    common: super::Common,
}

pub(super) async fn main(args: &Args, style: &Style) -> Result<(), Failure> {
    let client = Client::find(args.common.socket.as_deref(), Some(&args.job)).await?;
    if args.follow {
        return follow(&client, args, style).await;
    }
    let events = all_after(&client, &args.job, args.after).await?;
    if args.common.out.json() {
        return put_json(&Value::Array(events));
    }
    put(render(&args.job, &events, args.common.out.wide(), style).as_bytes())
}

/// Everything after a sequence number: one frame holds a part only.
async fn all_after(client: &Client, job: &str, after: u64) -> Result<Vec<Value>, Unanswered> {
    let mut all: Vec<Value> = Vec::new();
    let mut after = after;
    for _ in 0..MAX_PAGES {
        let query = Query::Events {
            job: job.to_owned(),
            after,
        };
        let Value::Array(page) = client.query(query).await? else {
            break;
        };
        let Some(last) = page.last().and_then(seq).filter(|last| *last > after) else {
            break;
        };
        after = last;
        all.extend(page);
    }
    Ok(all)
}

fn seq(event: &Value) -> Option<u64> {
    event.get("seq").and_then(Value::as_u64)
}

async fn follow(client: &Client, args: &Args, style: &Style) -> Result<(), Failure> {
    let mut after = args.after;
    // Once the job is over, what comes right behind its end is printed, too.
    let (mut answered, mut over) = (false, false);
    let mut away: Option<Instant> = None;
    loop {
        match all_after(client, &args.job, after).await {
            Ok(events) => {
                (answered, away) = (true, None);
                for event in &events {
                    after = seq(event).unwrap_or(after);
                    let text = if args.common.out.json() {
                        event.to_string()
                    } else {
                        let time = utc(event["time_ms"].as_u64().unwrap_or(0)).1;
                        let (tone, text) = line(event);
                        format!(
                            "{}  {}",
                            style.paint(Tone::Dim, &time),
                            style.paint(tone, &text)
                        )
                    };
                    put(format!("{text}\n").as_bytes())?;
                }
                if over {
                    return Ok(());
                }
                over = has_ended(&events);
            }
            // It was in the launcher, and went with the job.
            Err(_) if over => return Ok(()),
            // An agent that is upgraded comes back; one that never was there does not.
            Err(Unanswered::Hangs(why) | Unanswered::Silent(why)) if answered => {
                let since = *away.get_or_insert_with(|| {
                    say("the agent is away; waiting for it");
                    Instant::now()
                });
                if since.elapsed() > AWAY {
                    return Err(Failure::Unreachable(why));
                }
            }
            // Right after its restart an agent may not have learnt of the job again.
            Err(Unanswered::Refused(_)) if after > args.after => {}
            Err(why) => return Err(why.into()),
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Whether the newest of these says that the job is over, and no launcher has come since.
fn has_ended(events: &[Value]) -> bool {
    let tells = |e: &&Value| e["event"] == "generation" || e["event"] == "launcher";
    let newest = events.iter().rev().find(tells);
    newest.is_some_and(|e| e["event"] == "generation" && is_over(e))
}

/// Whether a generation is the job's last.
fn is_over(generation: &Value) -> bool {
    let kind = field(generation, "kind");
    kind == "finished" || kind == "cancelled" || kind.starts_with("failed")
}

/// One event as a sentence.
fn line(event: &Value) -> (Tone, String) {
    let text = |key: &str| clean(&field(event, key));
    match text("event").as_str() {
        "generation" => generation_line(event),
        "changed" if is_unfinished(event) => (
            Tone::Warn,
            format!(
                "the leader went before it told that all workers run; known here: {}",
                phases(event)
            ),
        ),
        "changed" => (Tone::Good, format!("workers run: {}", phases(event))),
        "waiting" if text("text").is_empty() => (Tone::Plain, "no longer waits".into()),
        // What would help is said where somebody waits; here it is why.
        "waiting" => (Tone::Warn, first_sentence(&text("text"))),
        "ended" => {
            let (code, text) = (text("code"), text("text"));
            let first = text.lines().next().unwrap_or_default();
            (
                Tone::Plain,
                format!("the launcher here ends with {code}: {first}"),
            )
        }
        "stopping" => (Tone::Plain, format!("stopping: {}", text("why"))),
        "voters" => {
            let names = |of: &str| {
                let names = event[of].as_array().into_iter().flatten();
                let names: Vec<String> = names.filter_map(Value::as_str).map(clean).collect();
                names.join(", ")
            };
            let now = match names("witnesses") {
                none if none.is_empty() => "the members alone vote on what follows".to_owned(),
                witnesses => format!("{witnesses} votes on what follows, as a witness"),
            };
            let line = match names("gone") {
                none if none.is_empty() => now,
                gone => format!("{now}: {gone} does so no more"),
            };
            (Tone::Plain, line)
        }
        "launcher" if text("log_dir").is_empty() => {
            let pid = text("pid");
            (Tone::Plain, format!("the launcher here is process {pid}"))
        }
        "launcher" => {
            let (pid, dir) = (text("pid"), text("log_dir"));
            let line = format!("the launcher here is process {pid}, output is kept in {dir}");
            (Tone::Plain, line)
        }
        "worker_failed" => {
            let how = match event.get("signal").and_then(Value::as_i64) {
                Some(_) if flag(event, "out_of_memory") => {
                    "was ended by the kernel for want of memory".to_owned()
                }
                Some(signal) => format!("was ended by signal {signal}"),
                None => format!("failed with code {}", text("code")),
            };
            let tail = field(event, "tail");
            let last = tail.lines().rev().find(|l| !l.trim().is_empty());
            let last = last.map_or(String::new(), |l| format!(": {}", clean(l)));
            (
                Tone::Bad,
                format!("rank {} on {} {how}{last}", text("rank"), text("node")),
            )
        }
        "committed" => (
            Tone::Good,
            format!(
                "checkpoint {} of step {} is committed",
                text("number"),
                text("step")
            ),
        ),
        "saving" => (Tone::Plain, text("text")),
        "hung" => (Tone::Bad, text("text")),
        "moves" => (Tone::Good, "all ranks make progress again".into()),
        "warning" => (Tone::Warn, text("text")),
        "trouble" => (Tone::Bad, text("text")),
        // A newer agent may know more kinds.
        _ => (Tone::Plain, clean(&event.to_string())),
    }
}

fn first_sentence(text: &str) -> String {
    text.split_once(". ")
        .map_or(text, |(first, _)| first)
        .to_owned()
}

fn generation_line(event: &Value) -> (Tone, String) {
    let number = clean(&field(event, "generation"));
    let kind = clean(&field(event, "kind"));
    let (tone, text) = match kind.as_str() {
        "runs" => {
            let nodes = counted(member_count(event), "node");
            let world = event.get("world").and_then(Value::as_u64).unwrap_or(0);
            let text = format!("{} -> {nodes}, {}", cause(event), counted(world, "rank"));
            (Tone::Head, text)
        }
        "waits" => {
            let nodes = counted(member_count(event), "node");
            (
                Tone::Warn,
                format!("{} -> {nodes}, too few to run", cause(event)),
            )
        }
        "finished" => (Tone::Good, "the job is finished".to_owned()),
        failed if failed.starts_with("failed") => (Tone::Bad, format!("the job {failed}")),
        other => (Tone::Warn, format!("the job is {other}")),
    };
    (tone, format!("generation {number}: {text}"))
}

/// The cause with what it was about: `nodes_lost (gpu-b)`, `worker_failed (rank 3, code 1)`.
fn cause(event: &Value) -> String {
    let word = clean(&field(event, "cause"));
    let about = &event["about"];
    let mut parts: Vec<String> = list(about, "nodes")
        .iter()
        .filter_map(|n| n.as_str().map(clean))
        .collect();
    if let Some(rank) = about.get("rank") {
        parts.push(format!("rank {rank}"));
    }
    if let Some(code) = about.get("code") {
        parts.push(format!("code {code}"));
    }
    if parts.is_empty() {
        word
    } else {
        format!("{word} ({})", parts.join(", "))
    }
}

/// Whether the leader of a generation never said how long its change took.
fn is_unfinished(change: &Value) -> bool {
    change.get("complete").and_then(Value::as_bool) == Some(false)
}

/// A phase in milliseconds; `None` when it did not happen.
fn phase(event: &Value, name: &str) -> Option<f64> {
    let ms = event.get(format!("{name}_ms"))?.as_f64()?;
    (ms > 0.0).then_some(ms)
}

fn phases(event: &Value) -> String {
    let parts: Vec<String> = ["detect", "decide", "stop", "start", "total"]
        .iter()
        .filter_map(|name| Some(format!("{name} {}", duration_ms(phase(event, name)?))))
        .collect();
    parts.join(", ")
}

/// `gpu-a[0-1]`: a member and its ranks.
fn member(member: &Value) -> String {
    let name = clean(&field(member, "name"));
    let first = member.get("first_rank").and_then(Value::as_u64);
    let slots = member.get("slots").and_then(Value::as_u64).unwrap_or(0);
    match (first, slots) {
        (Some(first), 1) => format!("{name}[{first}]"),
        (Some(first), n) if n > 1 => format!("{name}[{first}-{}]", first + n - 1),
        _ => name,
    }
}

fn members(event: &Value, wide: bool) -> String {
    let all = list(event, "members");
    let shown = if wide { all.len() } else { NAMED };
    let mut names: Vec<String> = all.iter().take(shown).map(member).collect();
    let left_out = event.get("members_left_out").and_then(Value::as_u64);
    let rest = all.len().saturating_sub(shown) as u64 + left_out.unwrap_or(0);
    if rest > 0 {
        names.push(format!("and {rest} more"));
    }
    names.join(" ")
}

fn render(job: &str, events: &[Value], wide: bool, style: &Style) -> String {
    let job = clean(job);
    if events.is_empty() {
        return format!(
            "nothing has happened to {job} on this agent yet; `muster jobs` says whether it waits\n"
        );
    }
    let changes: BTreeMap<String, &Value> = events
        .iter()
        .filter(|e| e["event"] == "changed")
        .map(|e| (field(e, "digest"), e))
        .collect();
    let mut out = generations(events, &changes, wide, style);
    if !out.is_empty() {
        out.push('\n');
    }
    out.push_str(&timeline(events, &changes, style));
    out
}

/// One row for each generation, with the time of each phase.
fn generations(
    events: &[Value],
    changes: &BTreeMap<String, &Value>,
    wide: bool,
    style: &Style,
) -> String {
    let mut head = vec![
        "GEN",
        "TIME (UTC)",
        "CAUSE",
        "RANKS",
        "DETECT",
        "DECIDE",
        "STOP",
        "START",
        "TOTAL",
    ];
    if wide {
        head.push("DIGEST");
    }
    head.push("MEMBERS");
    let mut table = Table::new(&head);
    let (mut any, mut untold) = (false, false);
    for event in events.iter().filter(|e| e["event"] == "generation") {
        any = true;
        let digest = field(event, "digest");
        let change = changes.get(&digest).copied();
        let runs = event["kind"] == "runs";
        untold |= runs && change.is_none_or(is_unfinished);
        let ms = |name: &str| {
            let ms = change.and_then(|c| phase(c, name));
            Cell::from(ms.map_or(String::new(), duration_ms))
        };
        let (tone, what) = if runs {
            (Tone::Plain, cause(event))
        } else {
            (generation_line(event).0, clean(&field(event, "kind")))
        };
        let mut cells = vec![
            Cell::new(Tone::Head, field(event, "generation")),
            utc(event["time_ms"].as_u64().unwrap_or(0)).1.into(),
            Cell::new(tone, what),
            if runs {
                field(event, "world")
            } else {
                String::new()
            }
            .into(),
            ms("detect"),
            ms("decide"),
            ms("stop"),
            ms("start"),
            ms("total"),
        ];
        if wide {
            cells.push(short(&digest).into());
        }
        cells.push(members(event, wide).into());
        table.row(cells);
    }
    if !any {
        return String::new();
    }
    let mut out = table.render(style);
    if untold {
        let note = "The leader tells the times once all workers run; what is missing was never told, or \
                    comes yet.";
        out.push_str(&style.paint(Tone::Dim, note));
        out.push('\n');
    }
    out
}

/// One line for each event, from the first one on.
fn timeline(events: &[Value], changes: &BTreeMap<String, &Value>, style: &Style) -> String {
    let time = |e: &Value| e["time_ms"].as_u64().unwrap_or(0);
    let first = events.first().map_or(0, time);
    let longest = changes
        .values()
        .filter_map(|c| phase(c, "total"))
        .fold(0.0, f64::max);
    let (date, clock) = utc(first);
    let mut out = style.paint(Tone::Dim, &format!("{date} {clock} UTC, and seconds since"));
    out.push('\n');
    for event in events {
        let after = time(event).saturating_sub(first) as f64 / 1000.0;
        let (tone, text) = line(event);
        let stamp = format!("{after:>+10.3}");
        out.push_str(&format!(
            "{}  {}\n",
            style.paint(Tone::Dim, &stamp),
            style.paint(tone, &text)
        ));
        if event["event"] == "changed" && longest > 0.0 {
            let bar = bar(event, longest);
            out.push_str(&format!("{:>10}  {}\n", "", style.paint(Tone::Dim, &bar)));
        }
    }
    out
}

/// The phases to scale: detecting, then deciding and stopping at the same time, then starting.
fn bar(change: &Value, longest: f64) -> String {
    let ms = |name| phase(change, name).unwrap_or(0.0);
    let parts = [
        ('.', ms("detect")),
        ('-', ms("decide").max(ms("stop"))),
        ('=', ms("start")),
    ];
    let mut out = String::from("|");
    for (sign, ms) in parts {
        // At most BAR columns, and small enough for any integer.
        let columns = (ms / longest * BAR).round().clamp(0.0, BAR) as usize;
        out.extend(std::iter::repeat_n(sign, columns));
    }
    out.push_str("|  . detect  - decide, stop  = start");
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const PLAIN: Style = Style { colour: false };

    fn history() -> Vec<Value> {
        let member =
            |name: &str, first: u32| json!({ "name": name, "slots": 2, "first_rank": first });
        vec![
            json!({ "seq": 1, "time_ms": 1_700_000_000_000u64, "event": "waiting", "text": "waiting for 1 more of 2 nodes" }),
            json!({ "seq": 2, "time_ms": 1_700_000_001_000u64, "event": "generation", "generation": 1, "kind": "runs",
                    "cause": "formed", "members": [member("a", 0), member("b", 2)], "world": 4, "digest": "11".repeat(32) }),
            json!({ "seq": 3, "time_ms": 1_700_000_001_200u64, "event": "changed", "digest": "11".repeat(32),
                    "detect_ms": 0.0, "decide_ms": 50.0, "stop_ms": 0.0, "start_ms": 150.0, "total_ms": 200.0 }),
            json!({ "seq": 4, "time_ms": 1_700_000_009_000u64, "event": "worker_failed", "node": "b", "rank": 3, "code": 1,
                    "signal": null, "tail": "Traceback\nValueError: boom\n" }),
            json!({ "seq": 5, "time_ms": 1_700_000_009_500u64, "event": "generation", "generation": 2, "kind": "runs",
                    "cause": "nodes_lost", "about": { "nodes": ["b"] }, "members": [member("a", 0)], "world": 2,
                    "digest": "22".repeat(32) }),
            json!({ "seq": 6, "time_ms": 1_700_000_009_600u64, "event": "changed", "digest": "22".repeat(32),
                    "detect_ms": 200.0, "decide_ms": 50.0, "stop_ms": 100.0, "start_ms": 100.0, "total_ms": 400.0 }),
            json!({ "seq": 7, "time_ms": 1_700_000_010_000u64, "event": "generation", "generation": 3, "kind": "waits",
                    "cause": "nodes_left", "about": { "nodes": ["a"] }, "members": [member("b", 0)], "world": 0 }),
            json!({ "seq": 8, "time_ms": 1_700_000_010_000u64, "event": "waiting",
                    "text": "waiting for 1 more of 2 nodes: a left. Start `muster run` there" }),
            json!({ "seq": 9, "time_ms": 1_700_000_019_600u64, "event": "generation", "generation": 4, "kind": "finished",
                    "cause": "finished", "members": [], "world": 0, "digest": "33".repeat(32) }),
        ]
    }

    #[test]
    fn a_history_for_people() {
        assert_eq!(
            render("train", &history(), false, &PLAIN),
            "GEN  TIME (UTC)    CAUSE           RANKS  DETECT  DECIDE  STOP    START   TOTAL   MEMBERS\n\
             1    22:13:21.000  formed          4      -       50 ms   -       150 ms  200 ms  a[0-1] b[2-3]\n\
             2    22:13:29.500  nodes_lost (b)  2      200 ms  50 ms   100 ms  100 ms  400 ms  a[0-1]\n\
             3    22:13:30.000  waits           -      -       -       -       -       -       b[0-1]\n\
             4    22:13:39.600  finished        -      -       -       -       -       -       -\n\
             \n\
             2023-11-14 22:13:20.000 UTC, and seconds since\n    \
                 +0.000  waiting for 1 more of 2 nodes\n    \
                 +1.000  generation 1: formed -> 2 nodes, 4 ranks\n    \
                 +1.200  workers run: decide 50 ms, start 150 ms, total 200 ms\n            \
                         |----============|  . detect  - decide, stop  = start\n    \
                 +9.000  rank 3 on b failed with code 1: ValueError: boom\n    \
                 +9.500  generation 2: nodes_lost (b) -> 1 node, 2 ranks\n    \
                 +9.600  workers run: detect 200 ms, decide 50 ms, stop 100 ms, start 100 ms, total 400 ms\n            \
                         |................--------========|  . detect  - decide, stop  = start\n   \
                +10.000  generation 3: nodes_left (a) -> 1 node, too few to run\n   \
                +10.000  waiting for 1 more of 2 nodes: a left\n   \
                +19.600  generation 4: the job is finished\n"
        );
    }

    #[test]
    fn times_that_were_never_told_are_said_to_be_missing() {
        const NOTE: &str = "was never told";
        let mut events = history();
        assert!(!render("train", &events, false, &PLAIN).contains(NOTE));
        // The leader died while the workers started: what is known is shown.
        events[5]["complete"] = json!(false);
        events[5]["start_ms"] = json!(0.0);
        events[5]["total_ms"] = json!(0.0);
        let text = render("train", &events, false, &PLAIN);
        assert!(text.contains(NOTE));
        assert!(
            text.contains("known here: detect 200 ms, decide 50 ms, stop 100 ms\n"),
            "{text}"
        );
        events.retain(|e| e["event"] != "changed");
        assert!(render("train", &events, false, &PLAIN).contains(NOTE));
    }

    #[test]
    fn only_the_end_of_a_job_ends_following() {
        let over = |kind: &str| is_over(&json!({ "kind": kind }));
        assert!(over("finished") && over("cancelled") && over("failed with code 3"));
        assert!(!over("runs") && !over("dormant"));
    }

    #[test]
    fn no_event_can_break_the_rendering() {
        let odd = [
            json!({}),
            json!({ "event": "generation" }),
            json!({ "event": "changed", "total_ms": 1e300 }),
            json!({ "event": "changed", "total_ms": "x", "start_ms": -3.0 }),
            json!({ "event": "worker_failed", "signal": 9 }),
            json!({ "event": "new\u{1b}[2J" }),
            json!({ "event": "generation", "kind": "runs", "members": [{}, 3], "members_left_out": 7 }),
        ];
        let text = render("x", &odd, true, &PLAIN);
        assert!(
            !text.contains('\u{1b}') && text.contains("and 7 more") && text.contains("signal 9")
        );
    }
}
