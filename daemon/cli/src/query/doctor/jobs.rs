//! Jobs that do not train though nobody ended them.

use std::collections::BTreeMap;

use serde_json::Value;

use super::super::output::{field, flag, list};
use super::Check;

const NAME: &str = "job";
/// Jobs, and nodes of each, that are named at most.
const NAMED: usize = 8;

/// Jobs without launchers, without some of their nodes, or with too few of them, and how each goes on.
pub(super) fn at_rest(jobs: &Value, nodes: &Value) -> Vec<Check> {
    let states: BTreeMap<String, String> = rows(nodes)
        .iter()
        .map(|node| (field(node, "node"), field(node, "state")))
        .collect();
    let checks = rows(jobs).iter().filter_map(|job| look(job, &states));
    checks.take(NAMED).collect()
}

fn rows(list: &Value) -> &[Value] {
    list.as_array().map_or(&[], |rows| rows)
}

fn look(job: &Value, states: &BTreeMap<String, String>) -> Option<Check> {
    let (id, kind, waiting) = (field(job, "job"), field(job, "kind"), field(job, "waiting"));
    let end = format!("`muster cancel {id}` ends it");
    if kind == "deserted" {
        return Some(Check::warn(
            NAME,
            format!(
                "{id}: all its launchers are gone, and nothing of it runs; it is kept for others"
            ),
            format!(
                "`muster run` with the same --rdzv-id and flags on its nodes goes on with it; {end}"
            ),
        ));
    }
    if !matches!(kind.as_str(), "runs" | "waits" | "forming") {
        return None;
    }
    let members = list(job, "members");
    let is_gone = |member: &&Value| {
        let state = states.get(&field(member, "node")).map(String::as_str);
        matches!(state, Some("lost" | "left"))
    };
    let gone: Vec<String> = members
        .iter()
        .filter(is_gone)
        .map(|member| field(member, "name"))
        .collect();
    let why = match waiting.is_empty() {
        true => String::new(),
        false => format!(": {waiting}"),
    };
    if !gone.is_empty() {
        let named: Vec<&str> = gone.iter().take(NAMED).map(String::as_str).collect();
        return Some(Check::warn(
            NAME,
            format!(
                "{id}: {} of its {} nodes are gone, as this agent sees it ({}){why}",
                gone.len(),
                members.len(),
                named.join(", ")
            ),
            format!(
                "`muster events {id}` says whether the others go on; start the agent and `muster run` there \
                 again, or {end}"
            ),
        ));
    }
    // A spare waits, too, and nothing is wrong with that.
    let stopped = flag(job, "launcher_stopped");
    ((kind != "runs" || stopped) && !why.is_empty()).then(|| {
        Check::warn(
            NAME,
            format!("{id}{why}"),
            format!("do as it says, or {end}"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;
    use serde_json::json;

    /// The jobs that are named of these, seen where `a` is alive and `b` is in this state.
    fn named(b: &str, jobs: Value) -> Vec<String> {
        let nodes = json!([{ "node": "a", "state": "alive" }, { "node": "b", "state": b }]);
        let checks = at_rest(&jobs, &nodes);
        assert!(
            checks
                .iter()
                .all(|c| (c.name, c.verdict) == (NAME, Verdict::Warn))
        );
        let jobs = checks.iter().filter_map(|c| c.detail.split(':').next());
        jobs.map(str::to_owned).collect()
    }

    fn job(id: &str, kind: &str, waiting: &str) -> Value {
        let members = json!([{ "node": "a", "name": "host a" }, { "node": "b", "name": "host b" }]);
        json!({ "job": id, "kind": kind, "waiting": waiting, "members": members })
    }

    #[test]
    fn jobs_that_do_not_go_on_are_named_and_no_others() {
        let jobs = json!([
            job("trains", "runs", ""),
            job("spare", "runs", "this one is a spare"),
            job("ghost", "deserted", "waiting"),
            job("short", "waits", "waiting for one more"),
            { "job": "new", "kind": "forming", "waiting": "waiting for one more" },
            job("over", "cancelled", ""),
            job("failed", "failed with code 3", ""),
        ]);
        assert_eq!(named("alive", jobs), ["ghost", "short", "new"]);
        assert!(at_rest(&Value::Null, &Value::Null).is_empty());
    }

    #[test]
    fn nodes_of_a_job_that_are_gone_are_named() {
        for state in ["lost", "left"] {
            let jobs = json!([job("j", "runs", ""), job("over", "finished", "")]);
            assert_eq!(named(state, jobs), ["j"]);
        }
        for state in ["alive", "suspect", "away"] {
            assert!(named(state, json!([job("j", "runs", "")])).is_empty());
        }
        let nodes = json!([{ "node": "b", "state": "lost" }]);
        let checks = at_rest(&json!([job("j", "runs", "no majority")]), &nodes);
        let detail = &checks[0].detail;
        assert!(
            detail.contains("1 of its 2 nodes") && detail.contains("host b"),
            "{detail}"
        );
        assert!(detail.ends_with("no majority"), "{detail}");
    }
}
