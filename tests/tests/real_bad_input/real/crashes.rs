//! SIGKILL of agents while generations change.

use std::time::Duration;

use crate::support::{Bed, Proc, until};

const NODES: [&str; 3] = ["a", "b", "c"];

/// When the agent is killed, counted from the fault that starts the change.
#[derive(Clone, Copy, Debug)]
enum Moment {
    After(u64),
    /// When an agent's log says this again.
    Says(&'static str),
}

/// What starts the change.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// SIGKILL of a launcher.
    Killed,
    /// SIGTERM of a launcher: it leaves in good order.
    Leaves,
}

struct Cluster {
    bed: Bed,
    agents: Vec<Proc>,
    launchers: Vec<Proc>,
}

impl Cluster {
    fn new() -> Cluster {
        let mut bed = Bed::new();
        let agents = NODES.iter().map(|n| bed.agent(n, &["a", "b"])).collect();
        let launchers = NODES.iter().map(|n| launch(&mut bed, n)).collect();
        Cluster {
            bed,
            agents,
            launchers,
        }
    }

    fn decisions(&self) -> usize {
        let count = |text: &str, log: &str| log.matches(text).count();
        self.agents
            .iter()
            .map(|a| count("\"decided\"", &a.log()))
            .sum()
    }

    /// One change with one crash of an agent in it.
    fn round(&mut self, fault: Fault, node: usize, moment: Moment, victim: usize) {
        let what = format!("{fault:?} {} {moment:?} {}", NODES[node], NODES[victim]);
        eprintln!("{what}");
        let before = self.bed.workers().unwrap_or_default();
        let said = match moment {
            Moment::Says(text) => self.count(text),
            Moment::After(_) => 0,
        };
        match fault {
            Fault::Killed => self.launchers[node].kill(),
            Fault::Leaves => self.launchers[node].signal(libc::SIGTERM),
        }
        match moment {
            Moment::After(ms) => std::thread::sleep(Duration::from_millis(ms)),
            Moment::Says(text) => until(text, || self.count(text) > said),
        }
        self.agents[victim].kill();
        if let Fault::Leaves = fault {
            // Nobody tells a launcher to go whose agent is away; the agent comes back at once.
            self.restart(victim);
            self.launchers[node].code();
        } else {
            self.restart(victim);
        }
        // The old node's launcher comes back while the change may still be under way.
        self.launchers[node] = launch(&mut self.bed, NODES[node]);
        let after = self.bed.until_runs_on(&NODES);
        assert!(
            after[0].generation > before.first().map_or(0, |w| w.generation),
            "{what}"
        );
        for (launcher, node) in self.launchers.iter_mut().zip(NODES) {
            assert!(launcher.is_alive(), "{what}: {node}: {}", launcher.log());
        }
    }

    fn count(&self, text: &str) -> usize {
        self.agents
            .iter()
            .map(|a| a.log().matches(text).count())
            .sum()
    }

    fn restart(&mut self, victim: usize) {
        self.agents[victim] = self.bed.agent(NODES[victim], &["a", "b"]);
    }
}

fn launch(bed: &mut Bed, node: &str) -> Proc {
    bed.launch(
        node,
        &["--nnodes=1:3", "--join-quiet=100ms", "--stop-grace=500ms"],
    )
}

#[test]
fn an_agent_may_die_at_any_step_of_a_change() {
    let mut cluster = Cluster::new();
    cluster.bed.until_runs_on(&NODES);
    assert!(cluster.decisions() >= 3);
    let moments = [
        Moment::After(0),
        Moment::Says("\"decided\""),
        Moment::After(20),
        Moment::Says("\"started\""),
        Moment::After(60),
        Moment::After(5),
        Moment::After(400),
        Moment::After(120),
        Moment::After(10),
        Moment::After(250),
    ];
    for round in 0..20 {
        let fault = if round % 4 == 3 {
            Fault::Leaves
        } else {
            Fault::Killed
        };
        // All pairs of the node that goes and the agent that dies are met.
        let (node, victim) = (round % 3, (round / 3) % 3);
        let moment = moments[round % moments.len()];
        cluster.round(fault, node, moment, victim);
    }
    let _open = cluster.bed.finish();
    for launcher in &mut cluster.launchers {
        assert_eq!(launcher.code(), 0, "{}", launcher.log());
    }
}

#[test]
fn all_agents_may_die_at_once() {
    let mut cluster = Cluster::new();
    let before = cluster.bed.until_runs_on(&NODES);
    for agent in &mut cluster.agents {
        agent.kill();
    }
    for at in 0..3 {
        cluster.restart(at);
    }
    // Launchers that find their agents again go on; nothing else is asked than one whole generation.
    let after = cluster.bed.until_runs_on(&NODES);
    assert!(after[0].generation >= before[0].generation);
    let _open = cluster.bed.finish();
    for launcher in &mut cluster.launchers {
        assert_eq!(launcher.code(), 0, "{}", launcher.log());
    }
}
