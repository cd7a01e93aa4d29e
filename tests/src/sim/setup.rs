//! Setup of a run, and the faults that befall it: all of it drawn from one seed, all of it
//! plain data, so that a case can be kept and cut down.

mod extras;
mod fault;
mod quiet;

use muster_protocol::agent::Flaws;
use muster_protocol::spec::JobSpec;
use serde::{Deserialize, Serialize};

use super::clock::{Clock, MS, SEC};
use super::focus::{self, Focus};
use super::launcher::Saving;
use super::rng::Rng;

pub use fault::{Fault, Torn};

/// When all faults have stopped and the cluster begins to heal (nanoseconds): in most runs, and in those
/// whose faults outlast every time that agents keep.
pub const HEAL_AT: u64 = 40 * SEC;
pub const HEAL_LATE: u64 = 90 * SEC;

/// One node as the run begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeSetup {
    /// First byte of the node's id: ids are not in the order of the nodes.
    pub tag: u8,
    pub clock: Clock,
    pub slots: u16,
    /// When the agent is started, and when a launcher is (never: a witness, or an idle node).
    pub agent_at: u64,
    pub launcher_at: Option<u64>,
}

/// How the network behaves when no fault is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetSetup {
    /// One way, nanoseconds.
    pub delay: u64,
    /// Of 1,000 messages.
    pub loss: u32,
    pub duplication: u32,
    /// Messages held back, so that others overtake them.
    pub reordering: u32,
}

/// The times that agents keep, the same on all nodes (nanoseconds).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Times {
    pub suspect_after: u64,
    pub agent_grace: u64,
    pub birth_timeout: u64,
    pub start_timeout: u64,
    pub minority_wait: u64,
    pub orphan_after: u64,
    #[serde(default = "usual_slot_lease")]
    pub slot_lease: u64,
}

fn usual_slot_lease() -> u64 {
    Times::USUAL.slot_lease
}

impl Times {
    /// Defaults of `musterd`.
    pub const USUAL: Times = Times {
        suspect_after: 2 * SEC,
        agent_grace: 30 * SEC,
        birth_timeout: 4 * SEC,
        start_timeout: 30 * SEC,
        minority_wait: 6 * SEC,
        orphan_after: 32 * SEC,
        slot_lease: 600 * SEC,
    };
}

/// A whole case.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setup {
    pub seed: u64,
    pub nodes: Vec<NodeSetup>,
    pub net: NetSetup,
    pub spec: JobSpec,
    /// From when on launchers are started with another specification, in the order of time (nanoseconds).
    #[serde(default)]
    pub later_specs: Vec<(u64, JobSpec)>,
    /// The job's arbiter is a store that all nodes share.
    pub store: bool,
    /// How often the leader's workers have a checkpoint ready (nanoseconds; 0 for never).
    pub commit_every: u64,
    /// The workers link the runtime and take stop steps.
    pub stop_steps: bool,
    /// How long the ranks of each node save for a checkpoint that somebody orders (nanoseconds).
    pub saves: Vec<u64>,
    /// The launchers look for workers that stand still.
    pub watches: bool,
    /// They end one that is named (`--on-hang restart`).
    pub ends_hung: bool,
    /// The workers stay in their processes while generations change.
    pub live: bool,
    pub times: Times,
    pub flaws: Flaws,
    /// A node whose agent keeps another `suspect_after` than the others (nanoseconds).
    #[serde(default)]
    pub other_suspect: Option<(usize, u64)>,
    /// Where a path is cut, another host of the same address answers, and refuses: two networks use the same
    /// private addresses.
    #[serde(default)]
    pub namesakes: bool,
    /// How long a disk takes for a write at most (nanoseconds).
    #[serde(default)]
    pub disk: u64,
    /// A node whose disk takes up to so long (nanoseconds).
    #[serde(default)]
    pub slow_disk: Option<(usize, u64)>,
    /// The agents say that they end with their launchers.
    #[serde(default)]
    pub embedded: bool,
    /// How workers save into their slots, if they do.
    #[serde(default)]
    pub saving: Option<Saving>,
    /// In the order of their times.
    pub faults: Vec<(u64, Fault)>,
    /// The faults end here and everything is healed.
    pub heal_at: u64,
    /// The virtual time that the cluster has from then on to come to rest.
    pub settle: u64,
}

impl Setup {
    /// A case with everything that may befall it.
    pub fn generate(seed: u64, focus: Focus, flaws: Flaws) -> Setup {
        let mut setup = Setup::plain(seed, focus, flaws);
        extras::add(&mut setup, focus);
        extras::set_apart(&mut setup);
        extras::give_up(&mut setup, focus);
        extras::ends(&mut setup, focus);
        extras::slots(&mut setup, focus);
        extras::stale_reads(&mut setup, focus);
        setup.faults.sort_by_key(|(at, _)| *at);
        setup
    }

    /// Whether messages or probes may fail to arrive that both ends were there for.
    pub fn links_fail(&self) -> bool {
        let cut = |(_, fault): &(u64, Fault)| {
            matches!(
                fault,
                Fault::CutOneWay { .. }
                    | Fault::CutBoth { .. }
                    | Fault::Partition { .. }
                    | Fault::Flap { .. }
                    | Fault::Storm { .. }
                    | Fault::SlowLink { .. }
                    | Fault::StoreCut { .. }
                    | Fault::Suspend { .. }
            )
        };
        self.net.loss > 0 || self.faults.iter().any(cut)
    }

    /// The same without checkpoints by order and without hangs, which are drawn apart.
    pub fn plain(seed: u64, focus: Focus, flaws: Flaws) -> Setup {
        let mut rng = Rng::new(seed ^ 0x6d75_7374_6572_0000 ^ ((focus as u64) << 56));
        let store = match focus {
            Focus::LatePuts | Focus::StoreRaces => true,
            Focus::Disks | Focus::Leaders | Focus::Commits => false,
            Focus::Everything | Focus::Leases | Focus::Checkpoints | Focus::Hangs => {
                rng.chance(400)
            }
        };
        let count = focus::node_count(&mut rng, focus);
        let nodes = nodes(&mut rng, count);
        let launchers = nodes.iter().filter(|n| n.launcher_at.is_some()).count() as u16;
        let spec = spec(&mut rng, launchers);
        let commits = match focus {
            Focus::Commits | Focus::StoreRaces | Focus::LatePuts => 1000,
            _ => 600,
        };
        let commit_every = match rng.chance(commits) {
            true => rng.between(150 * MS, 4 * SEC),
            false => 0,
        };
        let mut setup = Setup {
            seed,
            net: NetSetup {
                delay: *rng.pick(&[100_000, MS, MS, 5 * MS, 30 * MS]).unwrap_or(&MS),
                loss: *rng.pick(&[0, 0, 0, 5, 20]).unwrap_or(&0),
                duplication: *rng.pick(&[0, 0, 10, 50]).unwrap_or(&0),
                reordering: *rng.pick(&[0, 0, 10, 50]).unwrap_or(&0),
            },
            nodes,
            spec,
            store,
            commit_every,
            stop_steps: rng.chance(300),
            saves: vec![40 * MS; count],
            watches: false,
            ends_hung: false,
            live: false,
            times: Times::USUAL,
            flaws,
            other_suspect: None,
            namesakes: false,
            disk: 0,
            slow_disk: None,
            embedded: false,
            saving: None,
            later_specs: Vec::new(),
            faults: Vec::new(),
            heal_at: HEAL_AT,
            // A node whose workers do not start is left out for up to 5 min.
            settle: 420 * SEC,
        };
        setup.draw_faults(&mut rng, focus);
        setup.faults.sort_by_key(|(at, _)| *at);
        setup
    }

    fn draw_faults(&mut self, rng: &mut Rng, focus: Focus) {
        let n = self.nodes.len();
        let focused = focus::kinds(focus);
        let mut kinds: Vec<&'static str> = Vec::new();
        if focus == Focus::Everything {
            for kind in Fault::KINDS {
                let often = match kind {
                    "cancel" => 110,
                    "finish" => 150,
                    "store trouble" | "store late put" if !self.store => 0,
                    "store trouble" | "store late put" => 450,
                    _ => 190,
                };
                if rng.chance(often) {
                    kinds.extend(std::iter::repeat_n(kind, 1 + rng.index(2)));
                }
            }
        } else {
            for _ in 0..rng.between(4, 14) {
                kinds.extend(rng.pick(focused).copied());
            }
        }
        for kind in kinds {
            let early = matches!(kind, "finish" | "cancel");
            let from = if early { 15 * SEC } else { 200 * MS };
            // Faults like company: half of them fall close to another one.
            let near = self
                .faults
                .get(rng.index(self.faults.len().max(1)))
                .map(|f| f.0);
            let at = match near {
                Some(near) if !early && rng.chance(500) => near + rng.below(1_500 * MS),
                _ => from + rng.below(self.heal_at - from - 2 * SEC),
            };
            let fault = self.draw(rng, kind, n);
            self.faults.push((at.min(self.heal_at - SEC), fault));
        }
    }

    fn draw(&self, rng: &mut Rng, kind: &str, n: usize) -> Fault {
        let node = rng.index(n);
        let other = (node + 1 + rng.index(n.saturating_sub(1).max(1))) % n;
        // Around the failure detector's times, or much longer.
        let short = rng.between(50 * MS, 4 * SEC);
        let long = rng.between(SEC, 20 * SEC);
        let for_ns = if rng.chance(600) { short } else { long };
        match kind {
            "cut one way" => Fault::CutOneWay {
                from: node,
                to: other,
                for_ns,
            },
            "cut both" => Fault::CutBoth {
                a: node,
                b: other,
                for_ns,
            },
            "partition" => Fault::Partition {
                side: 1 + rng.below((1u64 << n).saturating_sub(2).max(1)) as u32,
                for_ns,
            },
            "flap" => Fault::Flap {
                a: node,
                b: other,
                period: rng.between(100 * MS, 2 * SEC),
                times: 2 + rng.below(10) as u32,
            },
            "storm" => Fault::Storm {
                net: NetSetup {
                    delay: rng.between(MS, 200 * MS),
                    loss: rng.below(400) as u32,
                    duplication: rng.below(300) as u32,
                    reordering: rng.below(300) as u32,
                },
                for_ns,
            },
            "slow link" => Fault::SlowLink {
                from: node,
                to: other,
                by: rng.between(50 * MS, 1_500 * MS),
                for_ns,
            },
            "agent crash" | "torn write" => Fault::AgentCrash {
                node,
                effects: rng.below(30) as u32,
                torn: match (kind, rng.chance(500)) {
                    ("agent crash", _) => Torn::Between,
                    (_, true) => Torn::Old,
                    (_, false) => Torn::New,
                },
                down: for_ns,
                new_disk: false,
            },
            "new disk" => match rng.chance(500) {
                true => Fault::AgentCrash {
                    node,
                    effects: rng.below(30) as u32,
                    torn: Torn::Between,
                    down: for_ns,
                    new_disk: true,
                },
                false => Fault::NodeCrash {
                    node,
                    down: for_ns,
                    new_disk: true,
                    relaunch: rng.chance(800),
                },
            },
            "node crash" => Fault::NodeCrash {
                node,
                down: for_ns,
                new_disk: false,
                relaunch: rng.chance(800),
            },
            "launcher crash" => Fault::LauncherCrash {
                node,
                relaunch_after: rng.chance(800).then_some(for_ns),
            },
            "launcher hiccup" => Fault::LauncherHiccup { node },
            "agent pause" => Fault::AgentPause { node, for_ns },
            "disk full" => Fault::DiskFull { node, for_ns },
            "worker fail" => Fault::WorkerFail {
                node,
                code: 1 + rng.below(100) as i32,
                cascade: rng.chance(600),
            },
            "stubborn" => Fault::Stubborn { node },
            "finish" => Fault::Finish,
            "start trouble" => Fault::StartTrouble {
                node,
                times: 1 + rng.below(3) as u32,
            },
            "late join" => Fault::LateJoin { node },
            "drain" => Fault::Drain {
                node,
                grace_ms: rng.between(500, 20_000) as u32,
                back_after: for_ns,
            },
            "leave" => Fault::Leave {
                node,
                grace_ms: rng.between(500, 20_000) as u32,
                relaunch_after: rng.chance(700).then_some(for_ns),
            },
            "cancel" => Fault::Cancel { node },
            "store late put" => Fault::StoreUnknown {
                permille: rng.between(100, 900) as u32,
                late: rng.between(MS, 5 * SEC),
                for_ns,
            },
            _ => match rng.below(3) {
                0 => Fault::StoreSlow {
                    by: rng.between(10 * MS, 3 * SEC),
                    for_ns,
                },
                1 => Fault::StoreReadsFail {
                    permille: rng.between(100, 1000) as u32,
                    for_ns,
                },
                _ => Fault::StoreCut { node, for_ns },
            },
        }
    }
}

fn nodes(rng: &mut Rng, count: usize) -> Vec<NodeSetup> {
    let mut tags: Vec<u8> = (1..=count as u8).map(|i| i * 16).collect();
    rng.shuffle(&mut tags);
    let at_once = rng.chance(500);
    let mut nodes = Vec::new();
    for (i, tag) in tags.into_iter().enumerate() {
        // At least one node has a launcher.
        let idle = i > 0 && rng.chance(120);
        let spread = if at_once { 300 * MS } else { 4 * SEC };
        let agent_at = rng.below(spread);
        let launcher_at = agent_at + rng.below(spread);
        nodes.push(NodeSetup {
            tag,
            clock: Clock {
                offset: rng.between(SEC, 1_000_000 * SEC),
                ppm: rng.between(0, 400) as i32 - 200,
            },
            slots: 1 + rng.below(3) as u16,
            agent_at,
            launcher_at: (!idle).then_some(launcher_at),
        });
    }
    nodes
}

fn spec(rng: &mut Rng, launchers: u16) -> JobSpec {
    let max = match rng.chance(200) {
        // Fewer than come: spares.
        true => launchers.saturating_sub(1).max(1),
        false => launchers + rng.below(2) as u16,
    };
    let min = match rng.chance(150) {
        true => max,
        false => 1 + rng.below(u64::from(max.div_ceil(2))) as u16,
    };
    JobSpec {
        min_nodes: min,
        max_nodes: max,
        max_restarts: *rng.pick(&[0, 1, 3, 100]).unwrap_or(&3),
        stop_grace_ms: *rng.pick(&[1_000, 5_000]).unwrap_or(&1_000),
        ..JobSpec::default()
    }
}
