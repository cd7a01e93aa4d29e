//! SIGKILL of agents while generations change.

use std::time::{Duration, Instant};

use crate::support::{Bed, Proc, query, until};
use muster_protocol::local::Query;

const NODES: [&str; 3] = ["a", "b", "c"];

/// When the agent is killed, counted from the fault that starts the change.
#[derive(Clone, Copy, Debug)]
enum Moment {
    After(u64),
    /// When an agent's log says this again.
    Says(&'static str),
}

/// Event that starts the change.
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

    /// One change with one crash of an agent in it, which comes back after `away`.
    fn round(&mut self, fault: Fault, node: usize, moment: Moment, victim: usize, away: Duration) {
        let what = format!(
            "{fault:?} {} {moment:?} {} {away:?}",
            NODES[node], NODES[victim]
        );
        eprintln!("{what}");
        let before = self.bed.until_runs_on(&NODES);
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
        let back_first = away.is_zero() || matches!(fault, Fault::Leaves);
        if !back_first {
            // The next launcher comes while the agent is away.
            self.launchers[node] = launch(&mut self.bed, NODES[node]);
        }
        std::thread::sleep(away);
        self.agents[victim] = self.bed.agent(NODES[victim], &["a", "b"]);
        if let Fault::Leaves = fault {
            self.launchers[node].code();
        }
        if back_first {
            self.launchers[node] = launch(&mut self.bed, NODES[node]);
        }
        until("a newer generation runs", || {
            let now = self.bed.workers().unwrap_or_default();
            now.iter().any(|w| w.generation > before[0].generation)
        });
        let after = self.bed.until_runs_on(&NODES);
        assert!(before.iter().all(|w| !after.contains(w)), "{what}");
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
}

fn launch(bed: &mut Bed, node: &str) -> Proc {
    bed.launch(
        node,
        &["--nnodes=1:3", "--join-quiet=100ms", "--stop-grace=500ms"],
    )
}

#[test]
fn an_agent_may_die_at_ten_moments_of_a_change() {
    let mut cluster = Cluster::new();
    cluster.bed.until_runs_on(&NODES);
    assert!(cluster.count("\"decided\"") >= 3, "the logs can be read");
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
        let away = Duration::from_millis([0, 100, 700][round % 7 % 3]);
        cluster.round(fault, node, moment, victim, away);
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
    for (agent, node) in cluster.agents.iter_mut().zip(NODES) {
        *agent = cluster.bed.agent(node, &["a", "b"]);
    }
    // The launchers register again, each as the member that it was, and nothing else happens.
    let registered = |cluster: &Cluster, node: &str| {
        let jobs = query(&cluster.bed.socket(node), Query::Jobs);
        jobs.is_some_and(|jobs| jobs[0]["launcher_here"] == true)
    };
    for node in NODES {
        until("the launcher is back at its agent", || {
            registered(&cluster, node)
        });
    }
    let end = Instant::now() + Duration::from_secs(3);
    while Instant::now() < end {
        assert_eq!(
            cluster.bed.until_runs_on(&NODES),
            before,
            "the same workers run"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
    let _open = cluster.bed.finish();
    for launcher in &mut cluster.launchers {
        assert_eq!(launcher.code(), 0, "{}", launcher.log());
    }
}
