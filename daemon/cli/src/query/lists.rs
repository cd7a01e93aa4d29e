//! `muster status`, `nodes` and `jobs`.

use std::collections::BTreeSet;
use std::time::Duration;

use muster_protocol::local::Query;
use serde_json::Value;

use super::Common;
use super::client::Client;
use super::orders::ms;
use super::output::{
    Cell, Failure, Style, Table, Tone, age, clean, duration_ms, field, flag, gib, list,
    member_count, pairs, put, put_json, short,
};

pub(super) async fn status(common: &Common, style: &Style) -> Result<(), Failure> {
    let client = Client::find(common.socket.as_deref(), None).await?;
    let mut status = client.query(Query::Status).await?;
    status["socket"] = client.path.to_string_lossy().into();
    if common.out.json() {
        return put_json(&status);
    }
    put(render_status(&status, env!("CARGO_PKG_VERSION"), style).as_bytes())
}

pub(super) async fn nodes(common: &Common, style: &Style) -> Result<(), Failure> {
    let client = Client::find(common.socket.as_deref(), None).await?;
    let nodes = client.query(Query::Nodes).await?;
    if common.out.json() {
        return put_json(&nodes);
    }
    put(render_nodes(&nodes, common.out.wide(), style).as_bytes())
}

pub(super) async fn jobs(common: &Common, style: &Style) -> Result<(), Failure> {
    let client = Client::find(common.socket.as_deref(), None).await?;
    let jobs = client.query(Query::Jobs).await?;
    if common.out.json() {
        return put_json(&jobs);
    }
    put(render_jobs(&jobs, common.out.wide(), style).as_bytes())
}

fn render_status(status: &Value, own_version: &str, style: &Style) -> String {
    let get = |key: &str| clean(&field(status, key));
    let mut version = get("version");
    if version != own_version {
        let note = format!("this command is {own_version}: install the same version");
        version = format!("{version}  {}", style.paint(Tone::Warn, &note));
    }
    let state = if flag(status, "draining") {
        style.paint(Tone::Warn, "draining: it leaves")
    } else {
        style.paint(Tone::Good, "in service")
    };
    let listening: Vec<String> = list(status, "listening")
        .iter()
        .filter_map(|a| a.as_str().map(clean))
        .collect();
    let mut rows = vec![
        ("node", format!("{} ({})", get("host"), short(&get("node")))),
        ("state", state),
        ("cluster", get("cluster")),
        ("version", version),
        (
            "process",
            format!("pid {}, start {}", get("pid"), get("boot")),
        ),
        ("socket", get("socket")),
        ("listening", listening.join(", ")),
        ("peers", format!("{} connected", get("peers_connected"))),
        ("jobs", get("jobs")),
        ("state directory", get("state_dir")),
    ];
    if let Some(ms) = status.get("uptime_ms").and_then(Value::as_f64) {
        rows.insert(5, ("up for", duration_ms(ms)));
    }
    if status.get("secret").is_some() {
        let secret = if flag(status, "secret") {
            "every peer has to prove it"
        } else {
            "none"
        };
        rows.insert(3, ("secret", secret.to_owned()));
    }
    let unstored = get("unstored");
    if !unstored.is_empty()
        && let Some((_, dir)) = rows.last_mut()
    {
        *dir = style.paint(Tone::Bad, &format!("{dir}: refuses writes: {unstored}"));
    }
    let mut text = pairs(&rows, style);
    for hung in list(status, "hung") {
        let job = clean(&field(hung, "job"));
        let why = style.paint(Tone::Bad, &clean(&field(hung, "text")));
        text.push_str(&format!("\n{job}: {why}\n"));
    }
    for key in ["at_rest", "replicas_behind"] {
        for row in list(status, key) {
            let job = clean(&field(row, "job"));
            let why = style.paint(Tone::Warn, &clean(&field(row, "text")));
            text.push_str(&format!("\n{job}: {why}\n"));
        }
    }
    text
}

fn render_nodes(nodes: &Value, wide: bool, style: &Style) -> String {
    let mut head = vec!["NODE", "HOST", "STATE", "VERSION", "ADDRESS"];
    if wide {
        head.push("SEEN");
    }
    let mut table = Table::new(&head);
    for row in nodes.as_array().map_or(&[][..], |v| v) {
        let id = field(row, "node");
        let own = flag(row, "self");
        let mut state = field(row, "state");
        let tone = match state.as_str() {
            "alive" => Tone::Good,
            "lost" => Tone::Bad,
            "left" | "replaced" => Tone::Dim,
            _ => Tone::Warn,
        };
        let mut tone = tone;
        if flag(row, "leaving") && state != "left" {
            state.push_str(", leaving");
            if let Some(ms) = row.get("leaves_within_ms").and_then(Value::as_f64) {
                state.push_str(&format!(" within {}", duration_ms(ms)));
            }
            tone = Tone::Warn;
        }
        if !field(row, "unstored").is_empty() {
            state.push_str(", cannot store");
            tone = Tone::Bad;
        }
        let mut cells = vec![
            Cell::from(if wide { id.as_str() } else { short(&id) }),
            field(row, "host").into(),
            Cell::new(tone, state),
            field(row, "version").into(),
            if own {
                "this node".into()
            } else {
                field(row, "addr").into()
            },
        ];
        if wide {
            let seen = row.get("seen_ms_ago").and_then(Value::as_f64);
            cells.push(
                seen.map_or(String::new(), |ms| format!("{} ago", duration_ms(ms)))
                    .into(),
            );
        }
        table.row(cells);
    }
    table.render(style)
}

fn render_jobs(jobs: &Value, wide: bool, style: &Style) -> String {
    let rows = jobs.as_array().map_or(&[][..], |v| v);
    if rows.is_empty() {
        return "no jobs: start one with `muster run`\n".into();
    }
    // It fits into 80 columns. Whose a job is matters where others may be meant.
    let owners: BTreeSet<String> = rows.iter().map(|row| field(row, "owner")).collect();
    let of_several = owners.len() > 1;
    let mut head = vec!["JOB", "STATE", "AGE", "GEN", "NODES", "RANKS", "RESTARTS"];
    if of_several || wide {
        head.push("UID");
    }
    if wide {
        head.extend(["CAUSE", "HERE", "LEADER", "DIGEST", "LOGS"]);
    }
    let mut table = Table::new(&head);
    let mut notes = String::new();
    for row in rows {
        let waiting = field(row, "waiting");
        let hung = field(row, "hung");
        let kind = field(row, "kind");
        let live = matches!(kind.as_str(), "runs" | "waits");
        let (state, tone) = if !hung.is_empty() {
            (format!("{kind}, hangs"), Tone::Bad)
        } else if flag(row, "launcher_stopped") {
            (format!("{kind}, launcher stopped"), Tone::Warn)
        } else if !waiting.is_empty() && kind != "waits" {
            (format!("{kind}, waits"), Tone::Warn)
        } else if flag(row, "stopping") {
            (format!("{kind}, stopping"), Tone::Warn)
        } else if flag(row, "starting") && kind == "runs" {
            (format!("{kind}, starting"), Tone::Warn)
        } else {
            let tone = match kind.as_str() {
                "runs" => Tone::Good,
                "finished" | "cancelled" => Tone::Dim,
                k if k.starts_with("failed") => Tone::Bad,
                _ => Tone::Warn,
            };
            let ended = row.get("ended_ms_ago").and_then(Value::as_u64);
            let ended = ended.map_or(String::new(), |ms| format!(" {} ago", age(ms)));
            (format!("{kind}{ended}"), tone)
        };
        let formed = row.get("age_ms").and_then(Value::as_u64);
        let members = member_count(row);
        let of = match (field(row, "min_nodes"), field(row, "max_nodes")) {
            (min, _) if min.is_empty() => String::new(),
            (min, max) if min == max => format!(" of {max}"),
            (min, max) => format!(" of {min}:{max}"),
        };
        let mut cells = vec![
            Cell::new(Tone::Head, field(row, "job")),
            Cell::new(tone, state),
            formed.map_or(String::new(), age).into(),
            field(row, "generation").into(),
            match kind.as_str() {
                "runs" | "waits" => format!("{members}{of}"),
                // No launcher of it is left anywhere.
                "deserted" => format!("0{of}"),
                _ => String::new(),
            }
            .into(),
            if live {
                field(row, "world")
            } else {
                String::new()
            }
            .into(),
            field(row, "restarts_used").into(),
        ];
        if of_several || wide {
            cells.push(field(row, "owner").into());
        }
        if wide {
            let here = match flag(row, "launcher_here") {
                true => "yes",
                false => "no",
            };
            cells.push(field(row, "cause").into());
            cells.push(here.into());
            cells.push(short(&field(row, "leader")).into());
            cells.push(short(&field(row, "digest")).into());
            cells.push(field(row, "log_dir").into());
        }
        table.row(cells);
        let left = left_text(&row["left_running"]);
        for text in [&hung, &waiting, &saving(&row["save"]), &left] {
            if text.is_empty() {
                continue;
            }
            let job = clean(&field(row, "job"));
            notes.push_str(&format!(
                "\n{}: {}\n",
                style.paint(Tone::Head, &job),
                clean(text)
            ));
        }
    }
    table.render(style) + &notes
}

/// Where workers of a job that is over may still run, for people; empty where none do.
pub(super) fn left_text(left: &Value) -> String {
    let Some(most) = left["ms"].as_u64().map(Duration::from_millis) else {
        return String::new();
    };
    let nodes = left["nodes"].as_array().into_iter().flatten();
    let names: Vec<&str> = nodes.filter_map(Value::as_str).take(8).collect();
    let on = match &names[..] {
        [] => "nodes whose agents are not there".to_owned(),
        [name] => format!("{name}, whose agent is not there"),
        names => format!("{}, whose agents are not there", names.join(", ")),
    };
    format!(
        "workers of it may run for {} yet on {}: they end by themselves, and a new start waits for that",
        ms(most),
        clean(&on)
    )
}

/// How far the save under way is; empty where there is none.
fn saving(save: &Value) -> String {
    let number = |name: &str| save.get(name).and_then(Value::as_u64).unwrap_or(0);
    if !save.is_object() {
        return String::new();
    }
    let (nodes, sealed, written) = (number("nodes"), number("sealed"), number("written"));
    let how = match (sealed < nodes, written < nodes) {
        (true, _) => format!("{sealed} of {nodes} nodes have copied their state"),
        (_, true) => format!(
            "{} of {} written, {written} of {nodes} nodes are done",
            gib(number("bytes_written")),
            gib(number("bytes"))
        ),
        _ => "all is written; the commit follows".to_owned(),
    };
    format!("saves step {}: {how}", number("step"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const PLAIN: Style = Style { colour: false };

    #[test]
    fn a_status_for_people() {
        let status = json!({
            "node": "ab".repeat(32), "host": "gpu-a", "version": "0.0.9", "cluster": "c1", "pid": 7, "boot": 3,
            "listening": ["127.0.0.1:7970"], "draining": false, "state_dir": "/s", "peers_connected": 2,
            "jobs": 1, "socket": "/s/sock",
        });
        assert_eq!(
            render_status(&status, "0.1.0", &PLAIN),
            "node             gpu-a (abababab)\n\
             state            in service\n\
             cluster          c1\n\
             version          0.0.9  this command is 0.1.0: install the same version\n\
             process          pid 7, start 3\n\
             socket           /s/sock\n\
             listening        127.0.0.1:7970\n\
             peers            2 connected\n\
             jobs             1\n\
             state directory  /s\n"
        );
        let mut behind = status.clone();
        behind["replicas_behind"] = json!([{ "job": "train", "text": "of 3 saves not all" }]);
        let behind = render_status(&behind, "0.1.0", &PLAIN);
        assert!(
            behind.ends_with("\ntrain: of 3 saves not all\n"),
            "{behind}"
        );
    }

    #[test]
    fn nodes_for_people() {
        let nodes = json!([
            { "node": "ab".repeat(32), "host": "gpu-a", "self": true, "state": "alive", "version": "0.1.0", "leaving": true },
            { "node": "cd".repeat(32), "host": null, "self": false, "connected": false, "state": "lost",
              "version": null, "leaving": false, "addr": "10.0.0.2:7970", "seen_ms_ago": 2500 },
            { "node": "ef".repeat(32), "host": "gpu-c", "self": false, "connected": false, "state": "left",
              "version": "0.1.0", "leaving": true, "leaves_within_ms": 7, "addr": "10.0.0.3:7970" },
        ]);
        assert_eq!(
            render_nodes(&nodes, false, &PLAIN),
            "NODE      HOST   STATE           VERSION  ADDRESS\n\
             abababab  gpu-a  alive, leaving  0.1.0    this node\n\
             cdcdcdcd  -      lost            -        10.0.0.2:7970\n\
             efefefef  gpu-c  left            0.1.0    10.0.0.3:7970\n"
        );
        let wide = render_nodes(&nodes, true, &PLAIN);
        assert!(wide.contains(&"cd".repeat(32)) && wide.contains("2.50 s ago"));
    }

    #[test]
    fn jobs_for_people() {
        let jobs = json!([
            { "job": "train", "kind": "runs", "generation": 2, "members": [{}, {}], "world": 4, "restarts_used": 0,
              "cause": "nodes_lost", "launcher_here": true, "min_nodes": 2, "max_nodes": 3, "waiting": "",
              "age_ms": 10_800_000 },
            { "job": "ends", "kind": "runs", "generation": 1, "members": [{}], "world": 1, "restarts_used": 0,
              "cause": "formed", "launcher_here": true, "min_nodes": 1, "max_nodes": 1, "stopping": true },
            { "job": "new", "kind": "runs", "generation": 1, "members": [{}], "world": 1, "restarts_used": 0,
              "cause": "formed", "launcher_here": true, "min_nodes": 1, "max_nodes": 1, "starting": true },
            { "job": "over", "kind": "finished", "generation": 3, "members": [], "world": 0, "restarts_used": 0,
              "cause": "finished", "age_ms": 300_000, "ended_ms_ago": 120_000 },
            { "job": "saves", "kind": "runs", "generation": 1, "members": [{}], "world": 1, "restarts_used": 0,
              "min_nodes": 1, "max_nodes": 1, "save": { "step": 40, "nodes": 3, "sealed": 3, "written": 1,
              "bytes_written": 3_221_225_472_u64, "bytes": 6_442_450_944_u64 } },
            { "job": "next", "kind": "forming", "launcher_here": true, "waiting": "waiting for 1 more of 2 nodes" },
        ]);
        assert_eq!(
            render_jobs(&jobs, false, &PLAIN),
            "JOB    STATE            AGE   GEN  NODES     RANKS  RESTARTS\n\
             train  runs             3h0m  2    2 of 2:3  4      0\n\
             ends   runs, stopping   -     1    1 of 1    1      0\n\
             new    runs, starting   -     1    1 of 1    1      0\n\
             over   finished 2m ago  5m    3    -         -      0\n\
             saves  runs             -     1    1 of 1    1      0\n\
             next   forming, waits   -     -    -         -      -\n\
             \n\
             saves: saves step 40: 3.00 GiB of 6.00 GiB written, 1 of 3 nodes are done\n\
             \n\
             next: waiting for 1 more of 2 nodes\n"
        );
        let mut rows = jobs.as_array().unwrap().clone();
        rows[0]["owner"] = json!("1000");
        let wide = render_jobs(&json!(rows), false, &PLAIN);
        assert!(
            wide.lines().all(|l| l.len() <= 80) && wide.contains("UID"),
            "{wide}"
        );
        assert!(render_jobs(&json!([]), false, &PLAIN).contains("muster run"));
        let mut rows = jobs.as_array().unwrap().clone();
        rows[3]["left_running"] = json!({ "nodes": ["n3"], "ms": 28_000 });
        let shown = render_jobs(&json!(rows), false, &PLAIN);
        let note = shown.lines().find(|line| line.starts_with("over: "));
        assert!(
            note.is_some_and(|n| n.contains("n3") && n.contains("28")),
            "{shown}"
        );
    }
}
