//! Notes of the ranks of `examples/ddp.py`, by `tests/torch/follow.py`.

use std::path::PathBuf;
use std::process::Command;

use serde::Deserialize;
use serde_json::Value;

use super::project;

/// The interpreter that has PyTorch.
pub(crate) fn python() -> String {
    std::env::var("MUSTER_TEST_PYTHON").expect("MUSTER_TEST_PYTHON names a Python with PyTorch")
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Rank {
    pub(crate) node: String,
    pub(crate) pid: i32,
}

/// Ranks that have trained a step together.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Trained {
    pub(crate) group: u64,
    pub(crate) resumed: u64,
    pub(crate) members: Vec<Rank>,
}

impl Trained {
    /// The nodes, in the order of their ranks.
    pub(crate) fn nodes(&self) -> Vec<usize> {
        let nodes = self.members.iter();
        nodes.map(|m| super::events::index(&m.node)).collect()
    }

    pub(crate) fn pid(&self, node: usize) -> i32 {
        let at = self.nodes().iter().position(|n| *n == node).unwrap();
        self.members[at].pid
    }
}

pub(crate) struct Follow {
    pub(crate) file: PathBuf,
}

impl Follow {
    fn run(&self, args: &[&str]) -> Value {
        let done = Command::new(python())
            .arg(project("tests/torch/follow.py"))
            .arg(&self.file)
            .args(args)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "{args:?}: {errors}");
        serde_json::from_slice(&done.stdout).unwrap()
    }

    /// Waits until exactly these nodes, in processes that began after `after`, have trained a step.
    pub(crate) fn group(&self, nodes: &[usize], after: u64) -> Trained {
        let names: Vec<String> = nodes.iter().map(|n| format!("n{n}")).collect();
        let (world, after) = (nodes.len().to_string(), after.to_string());
        let found = self.run(&[
            "wait-group",
            "--world",
            &world,
            "--nodes",
            &names.join(","),
            "--after",
            &after,
            "--timeout",
            "90",
        ]);
        serde_json::from_value(found).unwrap()
    }

    /// Waits until some checkpoint is written beyond the step.
    pub(crate) fn step(&self, step: u64) {
        let step = step.to_string();
        self.run(&["wait-step", "--step", &step, "--timeout", "90"]);
    }

    /// Every promise over the whole run; the ranks that followed the group went on at the very
    /// step where it stopped.
    pub(crate) fn check(&self, drained: &Trained) {
        self.run(&["check", "--drained-from", &drained.group.to_string()]);
    }
}
