//! Answers of a node's agent, and the commands that ask it.

use std::process::{Child, Command, Stdio};

use muster_protocol::local::Query;
use serde_json::Value;

use super::Bed;
use crate::ground::{ask, program};

impl Bed {
    /// Answer of the node's agent; `None` when none answers.
    pub(crate) fn query(&self, node: usize, query: Query) -> Option<Value> {
        let answer = ask(&self.socket(node), query)?;
        Some(answer.unwrap_or_else(|text| panic!("n{node} refuses: {text}")))
    }

    /// `muster drain`.
    pub(crate) fn drain(&self, node: usize) {
        let done = Command::new(program("muster"))
            .args(["drain", "--grace=20s", "--socket"])
            .arg(self.socket(node))
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "muster drain: {errors}");
    }

    /// `muster checkpoint`: whether all ranks saved, and what it said.
    pub(crate) fn checkpoint(&self, node: usize, more: &[&str]) -> (bool, String) {
        Self::checkpointed(self.begin_checkpoint(node, more))
    }

    /// A command that asks the node's agent: whether it went well, and what it said.
    pub(crate) fn muster(&self, node: usize, args: &[&str]) -> (bool, String) {
        let command = Command::new(program("muster"))
            .args(args)
            .arg("--socket")
            .arg(self.socket(node))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        Self::checkpointed(command.unwrap())
    }

    /// `muster checkpoint`, which goes on by itself.
    pub(crate) fn begin_checkpoint(&self, node: usize, more: &[&str]) -> Child {
        Command::new(program("muster"))
            .args(["checkpoint", "job", "--socket"])
            .arg(self.socket(node))
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    }

    /// Result of that command.
    pub(crate) fn checkpointed(command: Child) -> (bool, String) {
        let done = command.wait_with_output().unwrap();
        let said = [done.stdout, done.stderr].concat();
        (
            done.status.success(),
            String::from_utf8_lossy(&said).into_owned(),
        )
    }

    /// `muster job continue`: whether it was done, and what it said.
    pub(crate) fn go_on(&self, node: usize, more: &[&str]) -> (bool, String) {
        let done = Command::new(program("muster"))
            .args(["job", "continue", "job", "--socket"])
            .arg(self.socket(node))
            .args(more)
            .output()
            .unwrap();
        let said = [done.stdout, done.stderr].concat();
        (
            done.status.success(),
            String::from_utf8_lossy(&said).into_owned(),
        )
    }

    /// The job as the node's agent sees it; null when there is none.
    pub(crate) fn job(&self, node: usize) -> Value {
        let jobs = self.query(node, Query::Jobs).unwrap_or_default();
        jobs[0].clone()
    }

    pub(crate) fn status(&self, node: usize) -> Value {
        self.query(node, Query::Status).unwrap_or_default()
    }

    /// The node's agent's view of the agent on another host.
    pub(crate) fn peer(&self, node: usize, host: usize) -> Value {
        let nodes = self.query(node, Query::Nodes).unwrap_or_default();
        let name = format!("n{host}");
        let mut all = nodes.as_array().into_iter().flatten();
        let found = all.rfind(|n| n["host"] == name.as_str());
        found.cloned().unwrap_or_default()
    }

    /// The entries of one kind in the node's history of the job.
    pub(crate) fn history(&self, node: usize, kind: &str) -> Vec<Value> {
        let query = Query::Events {
            job: "job".into(),
            after: 0,
        };
        let all = self.query(node, query).unwrap_or_default();
        let all = all.as_array().cloned().unwrap_or_default();
        all.into_iter().filter(|e| e["event"] == kind).collect()
    }
}
