//! The events of each job, for `muster events`: the newest entries of this agent's view, also of its earlier runs.

mod disk;

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

use muster_protocol::agent::{Notice, Phases, Told};
use muster_protocol::peers::Peers;
use muster_protocol::record::{Cause, Kind, Record};
use muster_protocol::{JobKey, LauncherId, NodeId};
use serde_json::{Value, json};

use self::disk::{Disk, Kept};
use crate::clock;

/// Jobs whose past is kept.
const KEPT_JOBS: usize = 256;
/// Entries kept for each job.
const KEPT: usize = 1_000;
/// Members spelt out in one entry, so that it fits into half a frame.
const SPELT: usize = 256;

/// Names of nodes for people, this one's included.
#[derive(Clone, Copy, Debug)]
pub(super) struct Names<'a> {
    pub(super) peers: &'a Peers,
    pub(super) me: NodeId,
    pub(super) host: &'a str,
}

impl Names<'_> {
    pub(super) fn of(&self, node: NodeId) -> String {
        if node == self.me {
            format!("{} ({node})", self.host)
        } else {
            self.peers.name(node)
        }
    }
}

#[derive(Debug)]
pub(super) struct History {
    jobs: BTreeMap<JobKey, VecDeque<Value>>,
    /// The number of the newest entry.
    newest: u64,
    disk: Disk,
}

impl History {
    /// With what earlier runs of the agent wrote into its state directory.
    pub(super) fn open(dir: &Path) -> History {
        let (disk, kept) = Disk::open(dir);
        let mut history = History {
            jobs: BTreeMap::new(),
            newest: 0,
            disk,
        };
        for Kept { key, event } in kept {
            if let Some(seq) = event["seq"].as_u64().filter(|seq| *seq > history.newest) {
                history.newest = seq;
                history.push(&key, event);
            }
        }
        history
    }

    pub(super) fn add(&mut self, key: &JobKey, what: &str, mut fields: Value) {
        let time_ms = clock::unix_ms();
        // Numbers follow the clock, so that they go on where the state was lost.
        self.newest = self
            .newest
            .saturating_add(1)
            .max(time_ms.saturating_mul(1_000));
        fields["seq"] = json!(self.newest);
        fields["time_ms"] = json!(time_ms);
        fields["event"] = json!(what);
        fields["job"] = json!(key.id);
        self.disk.add(key, &fields);
        self.push(key, fields);
    }

    fn push(&mut self, key: &JobKey, event: Value) {
        let list = self.jobs.entry(key.clone()).or_default();
        list.push_back(event);
        if list.len() > KEPT {
            list.pop_front();
        }
        if self.jobs.len() > KEPT_JOBS
            && let Some(key) = self.oldest_of_most()
        {
            self.jobs.remove(&key);
        }
    }

    /// A launcher of the job came, or is there again.
    pub(super) fn add_launcher(
        &mut self,
        key: &JobKey,
        id: LauncherId,
        pid: i32,
        log_dir: Option<&str>,
    ) {
        let fields = json!({ "launcher": id.hex(), "pid": pid, "log_dir": log_dir });
        let newest = self.newest_of(key, |e| e["event"] == "launcher");
        if newest.is_none_or(|e| e["launcher"] != fields["launcher"]) {
            self.add(key, "launcher", fields);
        }
    }

    /// Where the newest launcher of the job here had its workers' output written.
    pub(super) fn log_dir(&self, key: &JobKey) -> Option<&str> {
        let newest = self.newest_of(key, |e| e["event"] == "launcher")?;
        newest["log_dir"].as_str()
    }

    /// The newest generation of the job that ran.
    pub(super) fn ran(&self, key: &JobKey) -> Option<&Value> {
        self.newest_of(key, |e| e["event"] == "generation" && e["kind"] == "runs")
    }

    /// When the job's newest life formed, or this agent heard of it first, and when it ended, if it has. Unix,
    /// milliseconds.
    pub(super) fn life(&self, key: &JobKey) -> (Option<u64>, Option<u64>) {
        let generations = self.jobs.get(key).into_iter().flatten().rev();
        let mut generations = generations.filter(|e| e["event"] == "generation");
        let is_over = |e: &Value| e["kind"] != "runs" && e["kind"] != "waits";
        let time = |e: &Value| e["time_ms"].as_u64();
        let Some(newest) = generations.next() else {
            return (None, None);
        };
        let mut first = newest;
        for before in generations.take_while(|e| !is_over(e)) {
            if first["generation"] == 1 {
                break;
            }
            first = before;
        }
        (time(first), time(newest).filter(|_| is_over(newest)))
    }

    fn newest_of(&self, key: &JobKey, is_it: impl Fn(&Value) -> bool) -> Option<&Value> {
        self.jobs.get(key)?.iter().rev().find(|e| is_it(e))
    }

    /// The job that is forgotten first: of the user with the most jobs the one without news for the
    /// longest time, so that nobody can have the past of others' jobs forgotten.
    fn oldest_of_most(&self) -> Option<JobKey> {
        let mut users: BTreeMap<&str, usize> = BTreeMap::new();
        for key in self.jobs.keys() {
            *users.entry(&key.owner).or_default() += 1;
        }
        let (most, _) = users.into_iter().max_by_key(|(_, count)| *count)?;
        let newest = |list: &VecDeque<Value>| list.back().and_then(|v| v["seq"].as_u64());
        let jobs = self.jobs.iter().filter(|(key, _)| key.owner == most);
        let oldest = jobs.min_by_key(|(_, list)| newest(list));
        oldest.map(|(key, _)| key.clone())
    }

    /// A job's entries after a sequence number, oldest first.
    pub(super) fn after(&self, key: &JobKey, seq: u64) -> Vec<Value> {
        let all = self.jobs.get(key).into_iter().flatten();
        let new = all.filter(|v| v["seq"].as_u64() > Some(seq));
        new.cloned().collect()
    }

    /// The jobs of which anything is kept.
    pub(super) fn jobs(&self) -> impl Iterator<Item = &JobKey> {
        self.jobs.keys()
    }

    /// Takes a notice in where it is about a job.
    pub(super) fn take(&mut self, notice: &Notice, names: Names<'_>) {
        match notice {
            Notice::Decided {
                key,
                digest,
                record,
            } => {
                let mut fields = record_json(record, names);
                fields["digest"] = json!(digest.hex());
                self.add(key, "generation", fields);
            }
            Notice::Changed {
                key,
                digest,
                phases,
                told,
            } => {
                let mut fields = phases_json(phases);
                fields["complete"] = json!(*told != Told::Unfinished);
                fields["digest"] = json!(digest.hex());
                self.add(key, "changed", fields);
            }
            Notice::Waiting { key, text } => self.add(key, "waiting", json!({ "text": text })),
            Notice::Stopping { key, why } => self.add(key, "stopping", json!({ "why": why })),
            Notice::WorkerFailed { key, node, exit } => self.add(
                key,
                "worker_failed",
                json!({
                    "node": names.of(*node), "rank": exit.rank, "local_rank": exit.local_rank,
                    "code": exit.code, "signal": exit.signal,
                    "out_of_memory": exit.out_of_memory, "tail": exit.tail,
                }),
            ),
            Notice::Committed { key, commit } => self.add(
                key,
                "committed",
                json!({ "step": commit.step, "number": commit.number }),
            ),
            Notice::Hung { key, hang, text } => {
                let ranks: Vec<Value> = hang
                    .ranks
                    .iter()
                    .map(|n| json!({ "rank": n.rank, "node": names.of(n.node) }))
                    .collect();
                self.add(
                    key,
                    "hung",
                    json!({
                        "ranks": ranks, "evidence": hang.evidence.word(), "step": hang.step,
                        "idle_ms": hang.idle_ms, "waiting": hang.waiting, "text": text,
                    }),
                );
            }
            Notice::Moves { key } => self.add(key, "moves", json!({})),
            Notice::Saving { key, text } => self.add(key, "saving", json!({ "text": text })),
            Notice::Warning { key, text } => self.add(key, "warning", json!({ "text": text })),
            Notice::Trouble { key, text } => self.add(key, "trouble", json!({ "text": text })),
            Notice::Voters { key, record, gone } => {
                let witnesses = record.witnesses.iter().map(|w| names.of(w.node));
                let witnesses: Vec<_> = witnesses.collect();
                let gone: Vec<_> = gone.iter().map(|n| names.of(*n)).collect();
                let event = json!({ "witnesses": witnesses, "gone": gone });
                self.add(key, "voters", event);
            }
            Notice::Peer { .. } | Notice::OtherTimes { .. } | Notice::Unstored { .. } => {}
        }
    }
}

/// A generation, for people and programs.
pub(super) fn record_json(record: &Record, names: Names<'_>) -> Value {
    let members: Vec<Value> = record
        .members
        .iter()
        .take(SPELT)
        .map(|m| {
            let ranks = record.ranks_of(m.node);
            json!({
                "node": m.node.hex(), "name": names.of(m.node), "slots": m.slots,
                "first_rank": ranks.map(|(first, _)| first),
            })
        })
        .collect();
    let kind = match record.kind {
        // Below the job's minimum: nothing runs until others come.
        Kind::Next if record.is_short() => "waits".to_owned(),
        Kind::Next | Kind::Voters { .. } => "runs".to_owned(),
        Kind::End { cancelled: false } => "finished".into(),
        Kind::End { cancelled: true } => "cancelled".into(),
        Kind::Failed { code } => format!("failed with code {code}"),
        Kind::Dormant => "dormant".into(),
        Kind::Tombstone { .. } => "merged into another group".into(),
    };
    json!({
        "generation": record.number, "kind": kind, "cause": record.cause.word(),
        "about": about(&record.cause, names), "members": members, "nodes": record.members.len(),
        "members_left_out": record.members.len().saturating_sub(SPELT),
        "world": if record.is_short() { 0 } else { record.world() }, "restarts_used": record.restarts_used,
    })
}

/// The subject of a cause, as JSON.
fn about(cause: &Cause, names: Names<'_>) -> Value {
    match cause {
        Cause::NodesLost { nodes }
        | Cause::NodesLeft { nodes }
        | Cause::NodesJoined { nodes }
        | Cause::LinksLost { nodes }
        | Cause::Resumed { nodes }
        | Cause::LeasesLost { nodes }
        | Cause::StartFailed { nodes }
        | Cause::Continued { nodes } => {
            let all: Vec<String> = nodes.iter().take(SPELT).map(|n| names.of(*n)).collect();
            json!({ "nodes": all })
        }
        Cause::WorkerFailed { node, rank, code } | Cause::WorkerHung { node, rank, code } => {
            json!({ "nodes": [names.of(*node)], "rank": rank, "code": code })
        }
        Cause::Damaged { node, rank, step } => {
            json!({ "nodes": [names.of(*node)], "rank": rank, "step": step })
        }
        Cause::Misread { nodes, step } => {
            let all: Vec<String> = nodes.iter().take(SPELT).map(|n| names.of(*n)).collect();
            json!({ "nodes": all, "step": step })
        }
        Cause::Merged { other } => json!({ "other": other.hex() }),
        Cause::Formed | Cause::Finished | Cause::Cancelled => json!({}),
    }
}

/// The phases of a change in milliseconds, each from the end of the one before it that happened.
/// Stopping and deciding overlap: both count from the detection.
pub(super) fn phases_json(p: &Phases) -> Value {
    let ms = |from: muster_protocol::Time, to: muster_protocol::Time| {
        if to.0 == 0 || from.0 == 0 {
            0.0
        } else {
            to.since(from).as_secs_f64() * 1000.0
        }
    };
    let ready = p.decided.max(p.stopped);
    json!({
        "detect_ms": ms(p.fault, p.detected),
        "decide_ms": ms(p.detected, p.decided),
        "stop_ms": ms(p.detected, p.stopped),
        "start_ms": ms(ready, p.started),
        "total_ms": ms(p.fault, p.started),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_with_many_jobs_has_only_the_own_ones_forgotten() {
        let key = |owner: &str, id: usize| JobKey {
            cluster: "c".into(),
            owner: owner.into(),
            id: id.to_string(),
        };
        let tmp = tempfile::tempdir().unwrap();
        let mut history = History::open(tmp.path());
        history.add(&key("1000", 0), "waiting", json!({}));
        for id in 0..2 * KEPT_JOBS {
            history.add(&key("1001", id), "waiting", json!({}));
        }
        assert_eq!(history.jobs().count(), KEPT_JOBS);
        assert_eq!(history.after(&key("1000", 0), 0).len(), 1);
        assert!(history.after(&key("1001", 0), 0).is_empty());
        assert_eq!(history.after(&key("1001", 2 * KEPT_JOBS - 1), 0).len(), 1);
    }

    #[test]
    fn an_agent_that_is_started_anew_tells_of_what_was_and_counts_on() {
        let tmp = tempfile::tempdir().unwrap();
        let key = JobKey {
            cluster: "c".into(),
            owner: "1000".into(),
            id: "j".into(),
        };
        let mut history = History::open(tmp.path());
        history.add(&key, "generation", json!({ "kind": "runs" }));
        for _ in 0..2 {
            history.add_launcher(&key, LauncherId([7; 8]), 70, Some("/logs"));
        }
        history.add(&key, "generation", json!({ "kind": "finished" }));
        let before = history.after(&key, 0);
        assert_eq!(before.len(), 3);
        drop(history);
        let mut history = History::open(tmp.path());
        assert_eq!(history.after(&key, 0), before);
        assert_eq!(history.log_dir(&key), Some("/logs"));
        assert_eq!(history.ran(&key), before.first());
        let newest = before.last().unwrap()["seq"].as_u64().unwrap();
        assert!(history.after(&key, newest).is_empty());
        history.add(&key, "waiting", json!({}));
        assert_eq!(history.after(&key, newest).len(), 1);
    }
}
