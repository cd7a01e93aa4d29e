//! Answers to the command line, as JSON.

use muster_protocol::NodeId;
use muster_protocol::job::Job;
use muster_protocol::local::{Answer, Query};
use muster_protocol::membership::State;
use serde_json::{Value, json};

use super::{Node, history};

impl Node {
    pub(super) fn answer(&self, query: &Query) -> Answer {
        let value = match query {
            Query::Status => self.status(),
            Query::Nodes => self.nodes(),
            Query::Jobs => self.jobs(),
            Query::Events { job, after } => {
                let events = self.history.after(job, *after);
                let known = self.core.jobs().any(|j| j.key().id == *job);
                if events.is_empty() && !known {
                    return Answer::Error(format!(
                        "no job {job} is known on this agent: `muster jobs` lists them"
                    ));
                }
                // The newest that fit into one frame; the rest is asked for with `after`.
                let mut kept = Vec::new();
                let mut room = muster_protocol::codec::MAX_FRAME / 2;
                for event in events {
                    let size = event.to_string().len() + 2;
                    if size > room {
                        break;
                    }
                    room -= size;
                    kept.push(event);
                }
                Value::Array(kept)
            }
        };
        Answer::Json(value.to_string())
    }

    fn status(&self) -> Value {
        let config = self.core.config();
        json!({
            "node": config.node.hex(), "host": config.host, "version": config.version,
            "cluster": config.cluster, "pid": config.pid, "boot": config.boot.0,
            "listening": self.listening, "draining": self.core.is_draining(),
            "state_dir": self.state.path(),
            "peers_connected": self.core.peers().connected_nodes().count(),
            "jobs": self.core.jobs().filter(|j| j.is_live() || j.launcher().is_some()).count(),
        })
    }

    fn nodes(&self) -> Value {
        let config = self.core.config();
        let me = json!({
            "node": config.node.hex(), "host": config.host, "self": true, "connected": true,
            "version": config.version, "state": "alive",
            "leaving": self.core.is_draining(),
        });
        let others = self.core.peers().map.iter().map(|(node, p)| {
            json!({
                "node": node.hex(), "self": false, "connected": p.connected, "addr": p.addr,
                "host": p.hello.as_ref().map(|h| h.host.clone()),
                "version": p.hello.as_ref().map(|h| h.version.clone()),
                "state": p.state.map_or(if p.connected { "connected" } else { "unknown" }, state_word),
                "leaving": p.leaving.is_some(),
            })
        });
        Value::Array(std::iter::once(me).chain(others).collect())
    }

    fn jobs(&self) -> Value {
        let rows = self.core.jobs().map(|job| self.job(job));
        Value::Array(rows.collect())
    }

    fn job(&self, job: &Job) -> Value {
        let key = job.key();
        let mut row = match job.head() {
            Some((record, digest)) => {
                let mut row = history::record_json(record, self.core.peers());
                row["digest"] = json!(digest.hex());
                row["leader"] = json!(record.leader().map(|n: NodeId| n.hex()));
                row["min_nodes"] = json!(record.spec.min_nodes);
                row["max_nodes"] = json!(record.spec.max_nodes);
                row
            }
            None => json!({ "kind": "forming" }),
        };
        row["job"] = json!(key.id);
        row["owner"] = json!(key.owner);
        row["launcher_here"] = json!(job.launcher().is_some());
        row["log_dir"] = json!(job.log_dir());
        row["waiting"] = json!(job.waiting());
        row
    }
}

fn state_word(state: State) -> &'static str {
    match state {
        State::Alive => "alive",
        State::Suspect => "suspect",
        State::Away { .. } => "away",
        State::Lost { .. } => "lost",
    }
}
