//! Under real Slurm daemons: `srun muster run` needs no word about where its peers are.

use std::path::PathBuf;
use std::process::Command;

use nix::sys::signal::Signal;

use crate::ground::program;
use crate::harness::{Bed, now_ns, project};

/// A cluster of nodes n1 to n3; gone when dropped.
struct Slurm {
    dir: PathBuf,
}

impl Slurm {
    fn up(dir: PathBuf) -> Slurm {
        let slurm = Slurm { dir };
        let done = slurm.tool("up").arg("3").output().unwrap();
        let errors = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "slurm-cluster up: {errors}");
        slurm
    }

    fn tool(&self, verb: &str) -> Command {
        let mut command = Command::new(project("tests/tools/slurm-cluster"));
        command.arg(verb).arg(&self.dir);
        command
    }
}

impl Drop for Slurm {
    fn drop(&mut self) {
        let _ = self.tool("down").status();
    }
}

/// The parent of a process.
fn parent(pid: i32) -> i32 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|l| l.strip_prefix("PPid:"));
    line.unwrap().trim().parse().unwrap()
}

#[test]
fn the_tasks_of_a_step_find_each_other() {
    let mut bed = Bed::new(&[]);
    let slurm = Slurm::up(bed.path("slurm"));
    let mut argv = vec![
        project("tests/tools/slurm-cluster"),
        "exec".into(),
        slurm.dir.to_str().unwrap().into(),
    ];
    // The hosts' own names are the nodes'.
    let step = ["--", "env", "-u", "NODE_NAME", "srun", "-N3", "-K0"];
    argv.extend(step.map(str::to_owned));
    argv.extend([program("muster"), "run".into(), "--nnodes=2:3".into()]);
    argv.extend(bed.job_command().to_vec());
    bed.start(0, &argv);
    let three = bed.group(&[1, 2, 3], 0);
    let masters = &three.ranks[0].master;
    assert!(masters.starts_with("10.77.0."), "{masters}");

    // One task's launcher dies, with the agent in it: the others go on.
    let dies = three.nodes()[1];
    let at = now_ns();
    bed.signal(parent(three.pid(dies)), Signal::SIGKILL);
    let left: Vec<usize> = (1..4).filter(|n| *n != dies).collect();
    let two = bed.group(&left, at);
    assert_eq!(two.nodes(), [three.nodes()[0], three.nodes()[2]]);
    bed.order(None, 0);
    let status = bed.exit(0);
    assert!(
        bed.said(0).contains("Killed") && !status.success(),
        "srun tells of the task that was killed: {status}"
    );
}
