//! Finding an agent and asking it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use muster_daemon::config::{Inputs, socket_candidates};
use muster_daemon::socket::{self, SocketError};
use muster_protocol::JobKey;
use muster_protocol::codec;
use muster_protocol::local::{Answer, Command, Query, ToAgent};
use serde_json::Value;
use tokio::task::JoinSet;

use super::output::{Failure, field, flag, list, short};
use crate::sockets;

/// How long an agent may take to answer. It answers from memory: one that takes longer hangs.
const ANSWER: Duration = Duration::from_secs(5);
/// Rows of one list at most; a job and a cluster have at most 1,024 nodes.
const MAX_ROWS: usize = 100_000;

/// One agent. Every question is a connection of its own.
#[derive(Debug, Clone)]
pub(super) struct Client {
    pub(super) path: PathBuf,
}

impl Client {
    /// The agent that is named, or the only one that answers. Where several do and the command is
    /// about a job, the one that knows the job.
    pub(super) async fn find(named: Option<&Path>, job: Option<&str>) -> Result<Client, Failure> {
        Client::find_among(named, job, false).await
    }

    /// The same for an order about the whole job, which any agent that knows it takes.
    pub(super) async fn find_for(named: Option<&Path>, job: &str) -> Result<Client, Failure> {
        Client::find_among(named, Some(job), true).await
    }

    async fn find_among(
        named: Option<&Path>,
        job: Option<&str>,
        any: bool,
    ) -> Result<Client, Failure> {
        if let Some(path) = named {
            let path = path.to_owned();
            return Ok(Client { path });
        }
        let (mut agents, why_none) = answering().await;
        if agents.len() > 1
            && let Some(job) = job
        {
            let (mut knowing, mut rows) = (Vec::new(), Vec::new());
            for (client, status) in &agents {
                let jobs = client.query(Query::Jobs).await.unwrap_or_default();
                let of_it: Vec<Value> = rows_of(&jobs, job).cloned().collect();
                if !of_it.is_empty() {
                    knowing.push((client.clone(), status.clone()));
                    rows.push(of_it);
                }
            }
            if let Some(at) = one_of(&rows).filter(|_| any) {
                knowing = vec![knowing.swap_remove(at)];
            }
            if !knowing.is_empty() {
                agents = knowing;
            }
        }
        match agents.len() {
            0 => Err(Failure::Unreachable(why_none.unwrap_or_else(nobody))),
            1 => agents
                .pop()
                .map(|(client, _)| client)
                .ok_or_else(|| Failure::Unreachable(nobody())),
            _ => Err(Failure::Usage(several(&agents))),
        }
    }

    pub(super) async fn query(&self, query: Query) -> Result<Value, Unanswered> {
        self.ask(&ToAgent::Query(query)).await
    }

    pub(super) async fn command(&self, command: Command) -> Result<Value, Unanswered> {
        self.ask(&ToAgent::Command(command)).await
    }

    async fn ask(&self, frame: &ToAgent) -> Result<Value, Unanswered> {
        let frame = codec::encode_frame(frame).map_err(|e| Unanswered::Refused(e.to_string()))?;
        match tokio::time::timeout(ANSWER, self.exchange(frame)).await {
            Ok(result) => result,
            Err(_) => Err(Unanswered::Hangs(format!(
                "the agent at {} does not answer within {} s: it is stopped, or hangs; look at its log, or restart it (training goes on meanwhile)",
                self.path.display(),
                ANSWER.as_secs()
            ))),
        }
    }

    async fn exchange(&self, frame: Vec<u8>) -> Result<Value, Unanswered> {
        let mut conn = socket::connect(&self.path)
            .await
            .map_err(|e| self.unreachable(&e))?;
        conn.send(frame, Vec::new())
            .map_err(|e| self.unreachable(&e))?;
        let mut rows = Vec::new();
        loop {
            let received = conn.recv().await.map_err(|e| self.unreachable(&e))?;
            let Some((bytes, _)) = received else {
                return Err(Unanswered::Silent(format!(
                    "the agent at {} closed the connection without an answer: it ended just now, or has too many clients; try again",
                    self.path.display()
                )));
            };
            let answer = codec::decode_frame(&bytes).map_err(|e| {
                Unanswered::Refused(format!(
                    "the answer from {} cannot be read: {e}",
                    self.path.display()
                ))
            })?;
            let (text, last) = match answer {
                Answer::Json(text) => (text, true),
                Answer::Part(text) => (text, false),
                Answer::Error(text) => return Err(Unanswered::Refused(text)),
            };
            let value = serde_json::from_str(&text).map_err(|e| {
                Unanswered::Refused(format!(
                    "the agent's answer is not JSON: {e}; run the same Muster version as the agent"
                ))
            })?;
            match value {
                Value::Array(mut part) if !(last && rows.is_empty()) => rows.append(&mut part),
                whole => return Ok(whole),
            }
            if last {
                return Ok(Value::Array(rows));
            }
            if rows.len() > MAX_ROWS {
                return Err(Unanswered::Refused(format!(
                    "the agent's list has more than {MAX_ROWS} entries"
                )));
            }
        }
    }

    fn unreachable(&self, error: &SocketError) -> Unanswered {
        let path = self.path.display();
        match error {
            SocketError::Path { source, .. } => match source.kind() {
                io::ErrorKind::PermissionDenied => Unanswered::Denied(format!(
                    "this user may not use the agent's socket {path}: ask its owner, or use sudo"
                )),
                io::ErrorKind::NotFound => Unanswered::Silent(format!(
                    "no agent listens on {path}: there is no such socket; start musterd, or correct --socket or MUSTER_SOCKET"
                )),
                io::ErrorKind::ConnectionRefused => Unanswered::Silent(format!(
                    "no agent listens on {path} any more: start musterd again"
                )),
                _ => Unanswered::Silent(format!("the agent at {path} cannot be asked: {error}")),
            },
            other => Unanswered::Silent(format!("the agent at {path} cannot be asked: {other}")),
        }
    }
}

/// Asks one agent from code that is not asynchronous, with this bound on all of it; `None` when it
/// does not answer, or refuses.
pub(crate) fn ask_now(socket: &Path, query: Query, within: Duration) -> Option<Value> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .ok()?;
    let client = Client {
        path: socket.to_owned(),
    };
    let asked = async { tokio::time::timeout(within, client.query(query)).await };
    runtime.block_on(asked).ok()?.ok()
}

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Unanswered {
    /// The agent says no, and why.
    Refused(String),
    /// This user may not ask.
    Denied(String),
    /// Something listens, and does not answer.
    Hangs(String),
    /// Nobody listens, or not as an agent.
    Silent(String),
}

impl From<Unanswered> for Failure {
    fn from(why: Unanswered) -> Failure {
        match why {
            Unanswered::Refused(text) => Failure::Refused(text),
            Unanswered::Denied(text) | Unanswered::Hangs(text) | Unanswered::Silent(text) => {
                Failure::Unreachable(text)
            }
        }
    }
}

/// The rows of a list of jobs that have this id, or this `OWNER/ID`.
pub(super) fn rows_of<'a>(jobs: &'a Value, job: &'a str) -> impl Iterator<Item = &'a Value> {
    let rows = jobs.as_array().map_or(&[][..], |v| v);
    let (owner, id) = JobKey::parts_of(job);
    rows.iter().filter(move |row| {
        field(row, "job") == id && owner.is_none_or(|owner| field(row, "owner") == owner)
    })
}

/// Of agents, by their rows of one job: one that may be told what is to become of it, where all have the same
/// generation of the same job, best one with a launcher of it.
fn one_of(rows: &[Vec<Value>]) -> Option<usize> {
    let single = |rows: &[Value]| match rows {
        [row] => Some(field(row, "digest")).filter(|digest| !digest.is_empty()),
        _ => None,
    };
    let first = single(rows.first()?)?;
    let same = rows
        .iter()
        .all(|rows| single(rows).as_ref() == Some(&first));
    let here = |rows: &Vec<Value>| rows.iter().any(|row| flag(row, "launcher_here"));
    same.then(|| rows.iter().position(here).unwrap_or(0))
}

/// The agents of this node that answer, with their status, in the order of their sockets; and where
/// none does, why one that is there does not. All are asked at once: those that hang cost one wait.
async fn answering() -> (Vec<(Client, Value)>, Option<String>) {
    let mut asked = JoinSet::new();
    for (at, path) in existing().into_iter().enumerate() {
        let client = Client { path };
        asked.spawn(async move { (at, client.query(Query::Status).await, client) });
    }
    let (mut agents, mut why_none) = (Vec::new(), None);
    while let Some(answer) = asked.join_next().await {
        match answer {
            Ok((at, Ok(status), client)) => agents.push((at, client, status)),
            Ok((_, Err(Unanswered::Denied(text)), _)) => why_none = Some(text),
            Ok((_, Err(Unanswered::Hangs(text)), _)) => {
                why_none.get_or_insert(text);
            }
            Ok((_, Err(Unanswered::Refused(_) | Unanswered::Silent(_)), _)) | Err(_) => {}
        }
    }
    agents.sort_by_key(|(at, ..)| *at);
    let agents = agents
        .into_iter()
        .map(|(_, client, status)| (client, status));
    (agents.collect(), why_none)
}

fn existing() -> Vec<PathBuf> {
    let environment = Inputs::from_process(Default::default()).environment;
    sockets::existing(&environment, &sockets::embedded_dir())
}

fn nobody() -> String {
    let environment = Inputs::from_process(Default::default()).environment;
    let mut looked: Vec<String> = socket_candidates(&environment)
        .iter()
        .map(|p| p.display().to_string())
        .collect();
    looked.push(format!("{}/run-*.sock", sockets::embedded_dir().display()));
    format!(
        "no agent answers on this node (looked at {}): start musterd or a job with `muster run`, or name the agent's socket with --socket or MUSTER_SOCKET; `muster doctor` checks this node",
        looked.join(", ")
    )
}

fn several(agents: &[(Client, Value)]) -> String {
    let mut text = format!(
        "{} agents answer on this node; choose one with --socket (or MUSTER_SOCKET):",
        agents.len()
    );
    for (client, status) in agents {
        let jobs: Vec<String> = list(status, "job_ids")
            .iter()
            .filter_map(|v| v.as_str().map(str::to_owned))
            .collect();
        let jobs = match jobs.len() {
            0 => format!("jobs: {}", field(status, "jobs")),
            _ => format!("jobs: {}", jobs.join(", ")),
        };
        text.push_str(&format!(
            "\n  --socket {}   node {}, pid {}, {jobs}",
            client.path.display(),
            short(&field(status, "node")),
            field(status, "pid"),
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn any_agent_takes_an_order_about_a_job_that_all_know_alike() {
        let row = |digest: &str, here: bool| json!({ "digest": digest, "launcher_here": here });
        let one = |row: Value| vec![row];
        let alike = [one(row("a", false)), one(row("a", true))];
        assert_eq!(one_of(&alike), Some(1));
        assert_eq!(one_of(&alike[..1]), Some(0));
        // Two jobs of one name: of two owners, clusters, or lives.
        assert_eq!(one_of(&[one(row("a", true)), one(row("b", true))]), None);
        assert_eq!(one_of(&[vec![row("a", true), row("a", true)]]), None);
        // One that has not formed may be another one of the same name.
        assert_eq!(one_of(&[one(json!({})), one(json!({}))]), None);
        assert_eq!(one_of(&[]), None);
    }
}
