//! Answers to the command line, as JSON.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

use muster_protocol::job::{CancelStage, CheckpointAsked, Job};
use muster_protocol::local::{Answer, Query, Replicated};
use muster_protocol::membership::State;
use muster_protocol::peers::Peer;
use muster_protocol::record::Arbiter;
use muster_protocol::wire::{CheckpointStage, Timeouts};
use muster_protocol::{JobKey, NodeId, Span, Time};
use serde_json::{Value, json};

use super::effects::refused_write;
use super::{Node, clients, history};
use crate::clock;
use crate::net::Refusal;

/// Bytes of JSON in one frame at most.
const ROOM: usize = muster_protocol::codec::MAX_FRAME / 2;

/// Jobs that a status names.
const LISTED: usize = 256;
/// Refusals that `muster doctor` can show.
const REFUSALS: usize = 16;

/// Facts that the agent keeps for people only.
#[derive(Debug)]
pub(super) struct Facts {
    /// Whether peers have to prove a secret.
    pub(super) secret: bool,
    /// The operator's labels of this node.
    labels: BTreeMap<String, String>,
    since: Time,
    /// The newest last; one for each address and reason.
    refused: VecDeque<(SocketAddr, Refusal, u64)>,
    /// First peers whose names cannot be resolved just now, and why.
    pub(super) unresolved: BTreeMap<String, String>,
    /// By how many milliseconds the wall clocks of others were ahead when they connected last.
    pub(super) clocks: BTreeMap<NodeId, i64>,
}

impl Facts {
    pub(super) fn new(secret: bool, labels: BTreeMap<String, String>) -> Facts {
        Facts {
            secret,
            labels,
            since: clock::now(),
            refused: VecDeque::new(),
            unresolved: BTreeMap::new(),
            clocks: BTreeMap::new(),
        }
    }

    /// An agent answers at this address, or at last got through the handshake: why it did not before is
    /// no news any more.
    pub(super) fn reached(&mut self, addr: SocketAddr, greeted: bool) {
        let over = |why: &Refusal| greeted || matches!(why, Refusal::Unreachable(_));
        self.refused.retain(|(a, why, _)| *a != addr || !over(why));
    }

    /// Why nobody answered at this address, if that is still so.
    pub(super) fn unreachable(&self, addr: SocketAddr) -> Option<&Refusal> {
        let silent = |why: &Refusal| matches!(why, Refusal::Unreachable(_));
        let mut all = self.refused.iter().map(|(a, why, _)| (*a, why));
        all.find_map(|(a, why)| (a == addr && silent(why)).then_some(why))
    }

    pub(super) fn refused(&mut self, addr: SocketAddr, why: Refusal) {
        // The port of a peer that calls changes with every call.
        self.refused
            .retain(|(a, w, _)| (a.ip(), w) != (addr.ip(), &why));
        self.refused.push_back((addr, why, clock::unix_ms()));
        if self.refused.len() > REFUSALS {
            self.refused.pop_front();
        }
    }
}

/// The job that is called by its id, or by its owner's uid and its id (`1000/train`) where several
/// users have one of that id. One's own goes before those of others.
fn named<'a>(
    jobs: impl Iterator<Item = &'a JobKey>,
    text: &str,
    asker: &str,
) -> Result<&'a JobKey, String> {
    let (owner, id) = JobKey::parts_of(text);
    let is_meant = |key: &&JobKey| key.id == id && owner.is_none_or(|o| key.owner == o);
    let found: BTreeSet<&JobKey> = jobs.filter(is_meant).collect();
    if let Some(own) = found.iter().find(|key| key.owner == asker) {
        return Ok(own);
    }
    let mut each = found.iter();
    match (each.next(), each.next()) {
        (Some(key), None) => Ok(key),
        (None, _) => Err(format!(
            "no job {text} of yours is known on this agent: `muster jobs` lists them"
        )),
        (Some(_), Some(_)) => {
            let names: Vec<String> = found
                .iter()
                .take(16)
                .map(|key| format!("{}/{}", key.owner, key.id))
                .collect();
            Err(format!(
                "several users have a job {id}: name one as {}",
                names.join(" or ")
            ))
        }
    }
}

/// A list in as many frames as it needs: every frame but the last is a part.
fn frames(rows: Vec<Value>) -> Vec<Answer> {
    let mut out = Vec::new();
    let mut part = String::from("[");
    for row in rows {
        let text = row.to_string();
        if part.len() > 1 && part.len() + text.len() + 2 > ROOM {
            part.push(']');
            out.push(Answer::Part(std::mem::replace(&mut part, "[".into())));
        }
        if part.len() > 1 {
            part.push(',');
        }
        part.push_str(&text);
    }
    part.push(']');
    out.push(Answer::Json(part));
    out
}

impl Node {
    pub(super) fn names(&self) -> history::Names<'_> {
        let config = self.core.config();
        history::Names {
            peers: self.core.peers(),
            me: config.node,
            host: &config.host,
        }
    }

    /// The frames of the answer, in order. A user's jobs are that user's alone; root and the agent's
    /// own user see all.
    pub(super) fn answer(&self, query: &Query, asker: u32) -> Vec<Answer> {
        let all = asker == 0 || asker == rustix::process::getuid().as_raw();
        let asker = asker.to_string();
        let may = |key: &JobKey| all || key.owner == asker;
        match query {
            Query::Status => vec![Answer::Json(self.status(may).to_string())],
            Query::Nodes => frames(self.nodes()),
            Query::Lease { launcher } => {
                let left = self.core.lease_of(*launcher, clock::now()).as_millis();
                vec![Answer::Json(json!({ "lease_ms": left }).to_string())]
            }
            Query::Jobs => frames(self.jobs(may)),
            Query::Events { job, after } => {
                let known = self.core.jobs().map(|j| j.key());
                let known = known.chain(self.history.jobs()).filter(|key| may(key));
                let key = match named(known, job, &asker) {
                    Ok(key) => key,
                    Err(why) => return vec![Answer::Error(why)],
                };
                let events = self.history.after(key, *after);
                // The oldest that fit into one frame; the rest is asked for with `after`.
                let mut kept = Vec::new();
                let mut room = ROOM;
                for event in events {
                    let size = event.to_string().len() + 2;
                    if size > room {
                        break;
                    }
                    room -= size;
                    kept.push(event);
                }
                vec![Answer::Json(Value::Array(kept).to_string())]
            }
        }
    }

    fn status(&self, may: impl Fn(&JobKey) -> bool) -> Value {
        let config = self.core.config();
        let here: Vec<&str> = self
            .core
            .jobs()
            .filter(|j| (j.is_live() || j.launcher().is_some()) && may(j.key()))
            .take(LISTED)
            .map(|j| j.key().id.as_str())
            .collect();
        let hung: Vec<Value> = self
            .core
            .jobs()
            .filter(|j| !j.hung().is_empty() && may(j.key()))
            .take(LISTED)
            .map(|j| json!({ "job": j.key().id, "text": j.hung() }))
            .collect();
        let behind: Vec<Value> = self
            .core
            .jobs()
            .filter(|j| may(j.key()))
            .filter_map(|j| Some((j, j.replicated().filter(|r| r.behind > 0)?)))
            .take(LISTED)
            .map(|(j, r)| json!({ "job": j.key().id, "text": behind_text(r) }))
            .collect();
        let at_rest: Vec<Value> = self
            .core
            .jobs()
            .filter(|j| may(j.key()))
            .filter_map(|j| {
                let deserted = self.is_deserted(j);
                // A spare waits, and the job runs.
                let waits = j.waits_with().is_some() || j.is_launcher_stopped();
                let rests = deserted || waits || !j.is_live();
                let text = match deserted {
                    true => "no launcher of it is left; `muster run` goes on with it, `muster cancel` ends it",
                    false => j.waiting(),
                };
                (rests && !text.is_empty()).then(|| json!({ "job": j.key().id, "text": text }))
            })
            .take(LISTED)
            .collect();
        let refused: Vec<Value> = self
            .facts
            .refused
            .iter()
            .map(|(addr, why, at)| json!({ "addr": addr, "why": why.to_string(), "time_ms": at }))
            .collect();
        json!({
            "node": config.node.hex(), "host": config.host, "version": config.version,
            "cluster": config.cluster, "pid": config.pid, "boot": config.boot.0,
            "listening": self.listening, "draining": self.core.is_draining(),
            "state_dir": self.state_dir, "unstored": self.core.unstored().map(refused_write),
            "peers_connected": self.core.peers().connected_nodes().count(),
            "jobs": here.len(), "job_ids": here, "hung": hung, "at_rest": at_rest, "replicas_behind": behind,
            "secret": self.facts.secret, "labels": self.facts.labels,
            "uptime_ms": clock::now().since(self.facts.since).as_millis(),
            "orphan_after_ms": self.orphan_after().as_millis(),
            "refused": refused, "unresolved": self.facts.unresolved,
        })
    }

    /// For how long a job's store has to stand still before nothing of the job runs, by the longest times that
    /// any agent keeps of which this one has heard.
    fn orphan_after(&self) -> Span {
        let Timeouts {
            suspect_after,
            agent_grace,
        } = self.core.peers().timeouts();
        let theirs = Span(suspect_after.0.saturating_add(agent_grace.0));
        theirs.max(self.core.config().orphan_after)
    }

    fn nodes(&self) -> Vec<Value> {
        let config = self.core.config();
        let me = json!({
            "node": config.node.hex(), "host": config.host, "self": true, "connected": true,
            "version": config.version, "state": "alive",
            "leaving": self.core.is_draining(),
            "unstored": self.core.unstored().map(refused_write),
        });
        let now = clock::now();
        let others = self.core.peers().map.iter().map(|(node, p)| {
            json!({
                "node": node.hex(), "self": false, "connected": p.connected, "addr": p.addr,
                "host": p.hello.as_ref().map(|h| h.host.clone()),
                "version": p.hello.as_ref().map(|h| h.version.clone()),
                "unstored": p.hello.as_ref().and_then(|h| h.unstored).map(refused_write),
                "state": match self.core.peers().has_successor(*node) {
                    true => "replaced",
                    false => peer_word(p),
                },
                "clock_ahead_ms": self.facts.clocks.get(node),
                "seen_ms_ago": (p.seen != Time::default()).then(|| now.since(p.seen).as_millis()),
                "leaving": p.leaving.is_some(),
                "leaves_because": p.leaving.as_ref().map(|(leave, _)| leave.reason.clone()),
                "leaves_within_ms": p.leaving.as_ref().map(|(_, until)| until.since(now).as_millis()),
            })
        });
        std::iter::once(me).chain(others).collect()
    }

    fn jobs(&self, may: impl Fn(&JobKey) -> bool) -> Vec<Value> {
        let elsewhere = self.core.gathering_elsewhere();
        let jobs = self.core.jobs().filter(|j| j.is_listed());
        let all = jobs.chain(&elsewhere).filter(|j| may(j.key()));
        all.map(|job| self.job(job)).collect()
    }

    /// No launcher of the job is left: neither here, nor anywhere as far as is known.
    fn is_deserted(&self, job: &Job) -> bool {
        job.launcher().is_none() && job.is_deserted(self.core.peers())
    }

    fn job(&self, job: &Job) -> Value {
        let key = job.key();
        let waiting = job.waiting();
        // A launcher that waits for the next life of a job has nothing of the one that is over.
        // Nor has an agent that only hears of others, where these begin it, or train.
        let peers = self.core.peers();
        let begins = !job.is_live() && (!waiting.is_empty() || job.has_next(peers));
        // What came after it may go on where no agent is there.
        let ran = !begins && !job.ran_elsewhere(peers, clock::now()).is_empty();
        let mut row = match job.head().filter(|_| !begins && !ran) {
            Some((record, digest)) => {
                let mut row = history::record_json(record, self.names());
                row["digest"] = json!(digest.hex());
                row["leader"] = json!(record.leader().map(|n: NodeId| n.hex()));
                row["here"] = json!(
                    record
                        .ranks_of(self.core.config().node)
                        .map(|(first, slots)| json!({ "first_rank": first, "slots": slots }))
                );
                let voting = job.voting().unwrap_or(record);
                let witnesses = voting.witnesses.iter().map(|w| w.node.hex());
                row["witnesses"] = json!(witnesses.collect::<Vec<_>>());
                row["max_restarts"] = json!(record.spec.max_restarts);
                row["min_nodes"] = json!(record.spec.min_nodes);
                row["max_nodes"] = json!(record.spec.max_nodes);
                row["birth_nodes"] = json!(record.spec.birth_nodes());
                row["arbiter"] = json!(match record.arbiter {
                    Arbiter::Members => "members",
                    Arbiter::Store(_) => "store",
                });
                row
            }
            // A person has ended it from here.
            None if job.cancelling() == Some(CancelStage::Over) && !begins && !ran => {
                json!({ "kind": "cancelled" })
            }
            None if job.launcher().is_none() && !job.gathers() && !begins => {
                json!({ "kind": "elsewhere" })
            }
            None => match job.runs_elsewhere(self.core.peers()) {
                Some(said) => json!({
                    "kind": "runs", "generation": said.number, "digest": said.digest.hex(),
                    "leader": said.leader.map(|n| n.hex()),
                }),
                None => json!({ "kind": "forming" }),
            },
        };
        if let Some(there) = job.waits_with().filter(|_| job.is_live()) {
            row["kind"] = json!("waits");
            row["nodes"] = json!(there);
            row["world"] = json!(0);
        }
        row["launcher_stopped"] = json!(job.is_launcher_stopped());
        if job.is_launcher_stopped() && job.is_live() && !job.trains_here() {
            row["kind"] = json!("waits");
        }
        let deserted = self.is_deserted(job);
        if deserted {
            row["kind"] = json!("deserted");
        }
        row["job"] = json!(key.id);
        row["owner"] = json!(key.owner);
        row["launcher_here"] = json!(job.launcher().is_some());
        let ago = |at: Option<u64>| at.map(|at| clock::unix_ms().saturating_sub(at));
        let (formed, ended) = match begins {
            true => (None, None),
            false => self.history.life(key),
        };
        row["age_ms"] = json!(ago(formed));
        row["ended_ms_ago"] = json!(ago(ended).filter(|_| !job.is_live()));
        // A job that is over has its output there still.
        row["log_dir"] = json!(job.log_dir().or(self.history.log_dir(key)));
        row["last_here"] = self.history.ran(key).map_or(Value::Null, |ran| {
            let me = self.core.config().node.hex();
            let members = ran["members"].as_array().into_iter().flatten();
            let here = members.into_iter().find(|m| m["node"] == json!(me));
            json!(here)
        });
        // What hinders whoever waits is known to the agent, not to the job.
        let waits = !(waiting.is_empty() || deserted);
        let by_votes = job.store_place().is_none();
        let hinders = clients::hindrances(&self.refused, &self.core, by_votes);
        let waiting: Vec<&str> = std::iter::once(waiting)
            .chain(hinders.iter().map(String::as_str))
            .filter(|_| waits)
            .collect();
        let waiting = waiting.iter().map(|text| text.trim_end_matches('.'));
        row["waiting"] = json!(waiting.collect::<Vec<_>>().join(". "));
        row["hung"] = json!(job.hung());
        row["starting"] = json!(job.starts());
        row["stopping"] = json!(job.stops());
        row["checkpoint"] = json!(job.checkpoint().map(|asked| checkpoint_json(job, asked)));
        row["save"] = json!(job.saves().and_then(|saves| saves.progress()).map(|at| {
            json!({
                "step": at.save.step, "nodes": at.nodes, "sealed": at.sealed, "written": at.prepared,
                "bytes_written": at.done, "bytes": at.bytes,
            })
        }));
        row["cancel"] = json!(job.cancelling().map(cancel_json));
        row["left_running"] = json!(job.left_running(clock::now()).map(|(nodes, left)| {
            let names = nodes.iter().map(|n| self.names().of(*n));
            json!({ "nodes": names.collect::<Vec<_>>(), "ms": left.as_millis() })
        }));
        row["store"] = json!(job.store_place());
        row["verified"] = json!(job.verified());
        row["replicas"] = json!(job.replicated().map(|replicated| {
            json!({
                "behind": replicated.behind, "missed": replicated.missed, "step": replicated.whole,
            })
        }));
        row
    }
}

/// For people: what other nodes do not hold of this node's saves.
fn behind_text(replicated: Replicated) -> String {
    let Replicated { behind, whole, .. } = replicated;
    let saves = match behind {
        1 => "save".to_owned(),
        more => format!("{more} saves"),
    };
    let newest = match whole {
        Some(step) => format!("the newest that they do is of step {step}"),
        None => "they do of none".to_owned(),
    };
    format!(
        "of this node's newest {saves} other nodes do not hold in memory all that they are to (--replicas), {newest}: its launcher says why"
    )
}

/// How the newest `muster cancel` on this node stands.
fn cancel_json(stage: CancelStage) -> Value {
    match stage {
        CancelStage::Asked { sure } => json!({ "stage": "asked", "sure": sure }),
        CancelStage::Over => json!({ "stage": "over" }),
        CancelStage::InStore { generation, known } => {
            json!({ "stage": "in_store", "generation": generation.hex(), "known": known })
        }
        CancelStage::Failed { why } => json!({ "stage": "failed", "why": why }),
    }
}

/// A checkpoint that somebody on this node asked for.
fn checkpoint_json(job: &Job, asked: &CheckpointAsked) -> Value {
    let state = &asked.state;
    let (stage, step, why) = match &state.stage {
        CheckpointStage::Agreeing => ("agreeing", None, None),
        CheckpointStage::Saving { step } => ("saving", Some(step), None),
        CheckpointStage::Done { step } => ("done", Some(step), None),
        CheckpointStage::Failed { why } => ("failed", None, Some(why)),
        CheckpointStage::Waiting { why } => ("waiting", None, Some(why)),
    };
    let committed = step.and_then(|step| job.committed(*step));
    json!({
        "ask": format!("{:016x}", asked.ask), "stage": stage, "step": step, "why": why,
        "given_up": step.and_then(|step| job.given_up(*step)),
        "saved": state.saved, "world": state.world, "commits": job.commits_saves(),
        "committed": committed.map(|(slot, commit)| {
            json!({ "slot": slot, "number": commit.number, "step": commit.step, "manifest": commit.manifest.hex() })
        }),
    })
}

/// The failure detector watches the nodes of common jobs alone; of others the connection tells.
fn peer_word(peer: &Peer) -> &'static str {
    let unwatched = match peer.connected {
        true => State::Alive,
        false => State::Lost { confirmed: false },
    };
    match peer.state.unwrap_or(unwatched) {
        // It said goodbye, and went: that is no outage, whatever the failure detector makes of it.
        state if state.is_lost() && peer.leaving.is_some() => "left",
        state => state_word(state),
    }
}

fn state_word(state: State) -> &'static str {
    match state {
        State::Alive => "alive",
        State::Suspect { .. } => "suspect",
        State::Away { .. } => "away",
        State::Lost { .. } => "lost",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_comes_in_parts_that_each_fit() {
        let rows: Vec<Value> = (0..1024)
            .map(|n| json!({ "n": n, "text": "x".repeat(200) }))
            .collect();
        let all = frames(rows.clone());
        assert!(all.len() > 2);
        let mut joined = Vec::new();
        for (at, answer) in all.iter().enumerate() {
            assert!(muster_protocol::codec::encode_frame(answer).is_ok());
            let text = match answer {
                Answer::Part(text) if at + 1 < all.len() => text,
                Answer::Json(text) if at + 1 == all.len() => text,
                other => panic!("{at}: {other:?}"),
            };
            joined.extend(serde_json::from_str::<Vec<Value>>(text).unwrap());
        }
        assert_eq!(joined, rows);
        assert_eq!(frames(Vec::new()), [Answer::Json("[]".into())]);
    }

    #[test]
    fn what_other_nodes_do_not_hold_is_said() {
        let text = |behind, whole| {
            behind_text(Replicated {
                behind,
                missed: 9,
                whole,
            })
        };
        let one = text(1, None);
        assert!(one.contains("newest save other nodes do not hold") && one.contains("of none"));
        let more = text(7, Some(400));
        assert!(more.contains("newest 7 saves") && more.contains("of step 400"));
    }

    #[test]
    fn a_name_that_several_users_gave_is_no_job() {
        let key = |owner: &str, id: &str| JobKey {
            cluster: "c".into(),
            owner: owner.into(),
            id: id.into(),
        };
        let all = [
            key("0", "train"),
            key("1000", "train"),
            key("1000", "train"),
            key("1000", "eval"),
        ];
        assert_eq!(named(all.iter(), "eval", "7"), Ok(&all[3]));
        assert_eq!(named(all.iter(), "1000/train", "0"), Ok(&all[1]));
        assert_eq!(named(all[1..].iter(), "train", "7"), Ok(&all[1]));
        let why = named(all.iter(), "train", "7").unwrap_err();
        assert!(why.contains("0/train or 1000/train"), "{why}");
        assert_eq!(named(all.iter(), "train", "1000"), Ok(&all[1]));
        for none in ["other", "2/train", "/train", "1000/"] {
            assert!(named(all.iter(), none, "0").unwrap_err().contains(none));
        }
    }

    #[test]
    fn refusals_are_kept_once_for_each_host_and_reason() {
        let mut facts = Facts::new(false, BTreeMap::new());
        for port in 1..100 {
            facts.refused(([10, 0, 0, 1], port).into(), Refusal::WrongSecret);
        }
        assert_eq!(facts.refused.len(), 1);
        for host in 1..100 {
            facts.refused(([10, 0, 0, host], 1).into(), Refusal::WrongSecret);
        }
        assert_eq!(facts.refused.len(), REFUSALS);
    }

    #[test]
    fn a_peer_that_answers_by_now_is_no_news() {
        let mut facts = Facts::new(false, BTreeMap::new());
        let addr = |host: u8| SocketAddr::from(([10, 0, 0, host], 7970));
        let nobody = Refusal::Unreachable(std::io::ErrorKind::ConnectionRefused);
        facts.refused(addr(1), nobody.clone());
        facts.refused(addr(1), Refusal::WrongSecret);
        facts.refused(addr(2), nobody.clone());
        let left = |facts: &Facts| -> Vec<(SocketAddr, Refusal)> {
            let all = facts.refused.iter();
            all.map(|(addr, why, _)| (*addr, why.clone())).collect()
        };
        // It answers, and has still another secret.
        facts.reached(addr(1), false);
        let others = [(addr(1), Refusal::WrongSecret), (addr(2), nobody)];
        assert_eq!(left(&facts), others);
        facts.reached(addr(1), true);
        assert_eq!(left(&facts), others[1..]);
    }

    #[test]
    fn a_nodes_state_has_one_word_whether_or_not_it_shares_a_job() {
        let leave = muster_protocol::wire::Leave {
            grace_ms: 0,
            reason: String::new(),
        };
        let word = |connected, state, leaves: bool| {
            peer_word(&Peer {
                connected,
                state,
                leaving: leaves.then(|| (leave.clone(), Time::default())),
                ..Peer::default()
            })
        };
        let lost = State::Lost { confirmed: true };
        assert_eq!(
            word(true, None, false),
            word(true, Some(State::Alive), false)
        );
        assert_eq!(word(false, None, false), word(false, Some(lost), false));
        assert_eq!(
            (word(true, None, false), word(false, None, false)),
            ("alive", "lost")
        );
        assert_eq!(
            (word(false, None, true), word(false, Some(lost), true)),
            ("left", "left")
        );
        assert_eq!(
            (
                word(true, None, true),
                word(true, Some(State::Suspect { guarded: false }), true)
            ),
            ("alive", "suspect")
        );
    }
}
