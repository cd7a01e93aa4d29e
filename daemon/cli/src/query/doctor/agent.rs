//! The agent, and whether it and its peers can work together.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use muster_daemon::config::{AgentConfig, check_secret};
use muster_protocol::local::Query;
use serde_json::Value;

use super::super::client::{Client, Unanswered};
use super::super::output::{Failure, duration_ms, field, flag, list, short};
use super::{Check, is_networked, jobs};

/// The checks of the agent, and the state directory of the one that was asked.
pub(super) async fn checks(
    socket: Option<&Path>,
    config: Option<&AgentConfig>,
) -> (Vec<Check>, Option<PathBuf>) {
    match ask(socket, config).await {
        Ok((checks, status)) => {
            let dir = status.get("state_dir").and_then(Value::as_str);
            (checks, dir.map(PathBuf::from))
        }
        Err(checks) => (checks, None),
    }
}

async fn ask(
    socket: Option<&Path>,
    config: Option<&AgentConfig>,
) -> Result<(Vec<Check>, Value), Vec<Check>> {
    let client = match Client::find(socket, None).await {
        Ok(client) => client,
        Err(Failure::Usage(text)) => {
            return Err(vec![Check::warn(
                "agent",
                text,
                "name one with --socket, to have it checked",
            )]);
        }
        Err(error) => return Err(without_agent(socket, &error.to_string(), config)),
    };
    let status = match client.query(Query::Status).await {
        Ok(status) => status,
        // Another one there would be refused, and its settings are not those that this command would read.
        Err(Unanswered::Hangs(why)) => {
            return Err(vec![Check::fail(
                "agent",
                why,
                "let it go on if somebody stopped it (kill -CONT PID), or restart it",
            )]);
        }
        Err(why) => {
            let why = Failure::from(why).to_string();
            return Err(without_agent(socket, &why, config));
        }
    };
    let mut all = vec![
        Check::ok(
            "agent",
            format!(
                "{} on {}, pid {}, answers on {}",
                short(&field(&status, "node")),
                field(&status, "host"),
                field(&status, "pid"),
                client.path.display()
            ),
        ),
        version(&status, env!("CARGO_PKG_VERSION")),
        secret(&status),
        announce(&status),
    ];
    let nodes = match client.query(Query::Nodes).await {
        Ok(nodes) => nodes,
        Err(why) => {
            all.push(Check::fail(
                "peers",
                Failure::from(why).to_string(),
                "look at the agent's log",
            ));
            Value::Null
        }
    };
    if !nodes.is_null() {
        all.extend(peers(&nodes, env!("CARGO_PKG_VERSION")));
    }
    if let Ok(jobs) = client.query(Query::Jobs).await {
        all.extend(jobs::at_rest(&jobs, &nodes));
        all.extend(twins(&jobs));
        all.extend(alone(&jobs));
    }
    all.extend(unresolved(&status));
    all.extend(refusals(&status));
    Ok((all, status))
}

/// Jobs that two groups of nodes which do not see each other could both start.
fn twins(jobs: &Value) -> Vec<Check> {
    let number = |job: &Value, name: &str| job.get(name).and_then(Value::as_u64);
    let may = |job: &&Value| {
        let (needs, most) = (number(job, "birth_nodes"), number(job, "max_nodes"));
        let twice = needs
            .zip(most)
            .is_some_and(|(n, m)| n.saturating_mul(2) <= m);
        twice && field(job, "arbiter") == "members" && field(job, "kind") == "runs"
    };
    let warn = |job: &Value| {
        Check::warn(
            "two groups",
            format!(
                "{}: {} of at most {} nodes may form it, so two groups that cannot reach each other could each start it",
                field(job, "job"),
                field(job, "birth_nodes"),
                field(job, "max_nodes")
            ),
            "name a directory that all nodes share with --store, or list all nodes and add --birth-quorum",
        )
    };
    rows(jobs).iter().filter(may).take(8).map(warn).collect()
}

/// Jobs of two nodes whose one half cannot go on without the other: nobody else votes.
fn alone(jobs: &Value) -> Vec<Check> {
    let is = |job: &&Value| {
        let two = rows(&job["members"]).len() == 2 && rows(&job["witnesses"]).is_empty();
        let may = job["min_nodes"].as_u64() == Some(1) && field(job, "arbiter") == "members";
        two && may && field(job, "kind") == "runs"
    };
    let warn = |job: &Value| {
        let zero = field(&job["members"][0], "name");
        Check::warn(
            "witness",
            format!(
                "{}: no third agent votes in it, so it stops if {zero}, which has rank 0, is lost",
                field(job, "job")
            ),
            "start musterd on a third node: it votes, and runs nothing of the job",
        )
    };
    rows(jobs).iter().filter(is).take(8).map(warn).collect()
}

/// A list in an answer; none where there is none.
fn rows(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], |rows| rows)
}

/// Name of a node for people. Of one that this agent has not heard yet it knows no host.
fn name(node: &Value) -> String {
    match (field(node, "host"), short(&field(node, "node"))) {
        (host, id) if host.is_empty() => id.to_string(),
        (host, id) => format!("{host} ({id})"),
    }
}

/// `muster run` brings its own agent: none is a mistake only where one is named.
fn without_agent(socket: Option<&Path>, why: &str, config: Option<&AgentConfig>) -> Vec<Check> {
    let first = match socket {
        Some(_) => Check::fail("agent", why, "start musterd, or correct --socket"),
        None => Check::warn(
            "agent",
            why,
            "none is needed for `muster run`, which then carries one in itself; for a service: systemctl enable --now musterd",
        ),
    };
    let secret = config.map(|config| match check_secret(config) {
        Err(error) => Check::warn(
            "cluster secret",
            "none, and an agent that listens for other hosts does not start without one",
            error.to_string(),
        ),
        Ok(()) if config.secret.is_some() => Check::ok("cluster secret", "configured"),
        Ok(()) if !is_networked(config) => {
            Check::ok("cluster secret", "none, and the agent stays on loopback")
        }
        Ok(()) => no_secret("insecure: an agent started here lets every host in that reaches it"),
    });
    std::iter::once(first).chain(secret).collect()
}

fn no_secret(detail: &str) -> Check {
    Check::warn(
        "cluster secret",
        detail,
        "head -c 32 /dev/urandom | base64 > FILE, the same FILE on every node, and secret_file = FILE in /etc/muster/musterd.toml",
    )
}

fn version(status: &Value, own: &str) -> Check {
    let agent = field(status, "version");
    if agent == own {
        return Check::ok("version", format!("{own}, as the agent's"));
    }
    Check::warn(
        "version",
        format!("the agent is {agent}, this command is {own}"),
        "install the same version, then restart the agent: training goes on meanwhile",
    )
}

fn listening(status: &Value) -> Vec<SocketAddr> {
    list(status, "listening")
        .iter()
        .filter_map(|a| a.as_str()?.parse().ok())
        .collect()
}

fn secret(status: &Value) -> Check {
    if flag(status, "secret") {
        return Check::ok("cluster secret", "every peer has to prove it");
    }
    if listening(status).iter().all(|a| a.ip().is_loopback()) {
        return Check::ok("cluster secret", "none, and the agent stays on loopback");
    }
    no_secret("none: whoever reaches the agent's port is a member")
}

/// An agent on loopback is right for one node, and a mistake for several.
fn announce(status: &Value) -> Check {
    let all = listening(status);
    let texts: Vec<String> = all.iter().map(SocketAddr::to_string).collect();
    if all.is_empty() {
        return Check::fail(
            "listening",
            "the agent accepts no peers",
            "set listen = [\"0.0.0.0:7970\"] and restart it",
        );
    }
    if all.iter().all(|a| a.ip().is_loopback()) {
        return Check::warn(
            "listening",
            format!("{}: no other host can reach it", texts.join(", ")),
            "right for a single node; for several: a cluster secret, and listen = [\"0.0.0.0:7970\"]",
        );
    }
    Check::ok("listening", texts.join(", "))
}

fn peers(nodes: &Value, own: &str) -> Vec<Check> {
    let others: Vec<&Value> = rows(nodes)
        .iter()
        .filter(|n| !flag(n, "self") && !matches!(&*field(n, "state"), "left" | "replaced"))
        .collect();
    let (here, gone): (Vec<&Value>, Vec<&Value>) =
        others.iter().copied().partition(|n| flag(n, "connected"));
    let mut all = Vec::new();
    all.push(if here.is_empty() && gone.is_empty() {
        Check::ok("peers", "none known: a single node")
    } else if gone.is_empty() {
        Check::ok("peers", format!("{} connected", here.len()))
    } else {
        let names: Vec<String> = gone.iter().take(8).map(|n| name(n)).collect();
        Check::warn(
            "peers",
            format!(
                "{} connected, {} not: {}",
                here.len(),
                gone.len(),
                names.join(", ")
            ),
            "if they should be up: check that musterd runs there, and that its TCP port (7970 unless its `listen` says another) is open in both directions",
        )
    });
    let odd: Vec<String> = here
        .iter()
        .filter(|n| !field(n, "version").is_empty() && field(n, "version") != own)
        .take(8)
        .map(|n| format!("{} has {}", name(n), field(n, "version")))
        .collect();
    if !odd.is_empty() {
        all.push(Check::warn(
            "peers' versions",
            odd.join(", "),
            "finish the upgrade on every node",
        ));
    }
    all.extend(unstored(nodes));
    all.extend(clocks(nodes));
    all
}

/// Wall clocks that differ by more than this are worth a word: times in logs and events are not to be compared then.
const CLOCKS: Duration = Duration::from_secs(10);

/// Nodes with another wall clock, as it was when they connected. Nothing that Muster decides goes by it.
fn clocks(nodes: &Value) -> Option<Check> {
    let nodes = rows(nodes).iter();
    let odd = nodes.filter(|n| flag(n, "connected")).filter_map(|n| {
        let ahead = n.get("clock_ahead_ms").and_then(Value::as_i64)?;
        let by = ahead.unsigned_abs();
        let way = if ahead > 0 { "ahead" } else { "behind" };
        let text = || format!("{} is {} {way}", name(n), duration_ms(by as f64));
        (u128::from(by) > CLOCKS.as_millis()).then(text)
    });
    let odd: Vec<String> = odd.take(8).collect();
    (!odd.is_empty()).then(|| {
        Check::warn(
            "clocks",
            format!("{}, by its wall clock when it connected", odd.join(", ")),
            "have all nodes take the time from one place (chrony, systemd-timesyncd): times in logs and events cannot be compared until then",
        )
    })
}

/// Nodes whose votes are missing wherever something is to be decided.
fn unstored(nodes: &Value) -> Vec<Check> {
    let mut all = Vec::new();
    for node in rows(nodes) {
        let why = field(node, "unstored");
        if why.is_empty() {
            continue;
        }
        let detail = |called: &str| {
            format!(
                "{called} cannot store its votes ({why}): a job without --store that needs its vote can neither form nor \
                 change until its state directory can be written"
            )
        };
        all.push(match flag(node, "self") {
            true => Check::fail(
                "votes",
                detail("this node"),
                "free some space, or make the directory writable for the agent's user",
            ),
            false => Check::warn(
                "votes",
                detail(&name(node)),
                "`muster doctor` there says more",
            ),
        });
    }
    all.truncate(8);
    all
}

/// First peers that are known by name alone, and whose names mean nothing here.
fn unresolved(status: &Value) -> Vec<Check> {
    let names = status.get("unresolved").and_then(Value::as_object);
    let check = |(name, why): (&String, &Value)| {
        let why = why.as_str().unwrap_or_default();
        Check::warn(
            "first peers",
            format!("the name {name} cannot be resolved: {why}"),
            "correct `bootstrap` or --rdzv-endpoint, or the name service of this node",
        )
    };
    names.into_iter().flatten().take(8).map(check).collect()
}

/// Peers that the agent turned away, or that turned it away, since it was started.
fn refusals(status: &Value) -> Vec<Check> {
    let mut all = Vec::new();
    for refusal in list(status, "refused").iter().take(8) {
        all.push(Check::warn(
            "refused",
            format!("{}: {}", field(refusal, "addr"), field(refusal, "why")),
            "see the agent's log; a peer that should be let in needs the same cluster, secret and version",
        ));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;
    use serde_json::json;

    #[test]
    fn what_an_agents_status_says() {
        let verdict = |check: Check| check.verdict;
        let loopback = json!({ "version": "1", "listening": ["127.0.0.1:7970"], "secret": false });
        assert_eq!(verdict(version(&loopback, "1")), Verdict::Ok);
        assert_eq!(verdict(version(&loopback, "2")), Verdict::Warn);
        assert_eq!(verdict(secret(&loopback)), Verdict::Ok);
        assert_eq!(verdict(announce(&loopback)), Verdict::Warn);
        let open = json!({ "listening": ["127.0.0.1:1", "10.0.0.1:7970"], "secret": false,
                           "refused": [{ "addr": "10.0.0.9:1", "why": "the cluster secrets differ" }] });
        assert_eq!(verdict(secret(&open)), Verdict::Warn);
        assert_eq!(verdict(announce(&open)), Verdict::Ok);
        assert!(refusals(&open)[0].detail.contains("secrets differ"));
        let closed = json!({ "listening": ["10.0.0.1:7970"], "secret": true });
        assert_eq!(verdict(secret(&closed)), Verdict::Ok);
        assert_eq!(verdict(announce(&json!({}))), Verdict::Fail);
    }

    #[test]
    fn two_nodes_without_a_third_are_named() {
        let job = |members: usize, witnesses: usize, least: u16, arbiter: &str| {
            let members = vec![json!({ "node": "a", "name": "host a" }); members];
            json!({ "job": "a", "kind": "runs", "members": members, "witnesses": vec!["b"; witnesses],
                "min_nodes": least, "arbiter": arbiter })
        };
        let named = |job: Value| alone(&json!([job])).len();
        assert_eq!(named(job(2, 0, 1, "members")), 1);
        assert_eq!(named(job(2, 1, 1, "members")), 0);
        assert_eq!(named(job(3, 0, 1, "members")), 0);
        // It could not go on with one node, whoever votes.
        assert_eq!(named(job(2, 0, 2, "members")), 0);
        assert_eq!(named(job(2, 0, 1, "store")), 0);
        assert_eq!(named(json!({ "job": "forming", "kind": "forming" })), 0);
    }

    #[test]
    fn jobs_that_could_start_twice_are_named() {
        let job = |needs: u16, most: u16, arbiter: &str| json!({ "job": "digits", "kind": "runs", "arbiter": arbiter, "birth_nodes": needs, "max_nodes": most });
        let jobs = json!([
            job(1, 2, "members"),
            job(2, 3, "members"),
            job(1, 2, "store"),
            { "job": "forming", "kind": "forming" }
        ]);
        let found = twins(&jobs);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].verdict, Verdict::Warn);
        assert!(found[0].detail.contains("digits: 1 of at most 2 nodes"));
        assert!(twins(&json!(null)).is_empty());
    }

    #[test]
    fn what_hinders_votes_and_names_that_mean_nothing_are_named() {
        let nodes = json!([
            { "self": true, "connected": true, "unstored": "No space left on device" },
            { "node": "ab".repeat(32), "host": "b", "connected": true, "unstored": "Read-only file system" },
            { "node": "cd".repeat(32), "host": "c", "connected": true, "unstored": null },
        ]);
        let all = peers(&nodes, "1");
        let votes = all.iter().filter(|c| c.name == "votes");
        let verdicts: Vec<_> = votes.map(|c| c.verdict).collect();
        assert_eq!(verdicts, [Verdict::Fail, Verdict::Warn]);
        let others = json!([
            { "node": "ab".repeat(32), "host": "b", "connected": true, "clock_ahead_ms": 7_200_000 },
            { "node": "cd".repeat(32), "host": "c", "connected": true, "clock_ahead_ms": -900 },
            { "node": "ef".repeat(32), "host": "e", "connected": true, "clock_ahead_ms": null },
        ]);
        let all = peers(&others, "");
        let odd: Vec<_> = all.iter().filter(|c| c.name == "clocks").collect();
        assert_eq!(odd.len(), 1);
        assert!(
            odd[0].detail.contains("b (") && !odd[0].detail.contains("c ("),
            "{}",
            odd[0].detail
        );
        let status = json!({ "unresolved": { "nosuch": "Name or service not known" } });
        assert_eq!(unresolved(&status)[0].verdict, Verdict::Warn);
        assert!(unresolved(&json!({})).is_empty());
    }

    #[test]
    fn peers_that_are_away_or_old_are_named() {
        let peer = |host: &str, connected: bool, version: &str| json!({ "node": "ab".repeat(32), "host": host, "self": false, "connected": connected, "version": version });
        let own = json!({ "self": true, "connected": true });
        let mut replaced = peer("d", false, "1");
        replaced["state"] = json!("replaced");
        assert_eq!(peers(&json!([own, replaced]), "1")[0].verdict, Verdict::Ok);
        let all = peers(
            &json!([
                own,
                peer("a", true, "1"),
                peer("b", false, "1"),
                peer("c", true, "0")
            ]),
            "1",
        );
        assert_eq!(all.len(), 2);
        assert!(all[0].detail.contains("2 connected, 1 not: b (abababab)"));
        assert!(all[1].detail.contains("c (abababab) has 0"));
    }
}
