//! Faults that befall a run, and orders of people.

use serde::{Deserialize, Serialize};

use super::NetSetup;

/// Something that goes wrong, or that people do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Fault {
    /// Nothing gets from one node to the other; no connection says so.
    CutOneWay {
        from: usize,
        to: usize,
        for_ns: u64,
    },
    CutBoth {
        a: usize,
        b: usize,
        for_ns: u64,
    },
    /// The nodes whose bit is set cannot reach the others, nor these them.
    Partition {
        side: u32,
        for_ns: u64,
    },
    /// The link is up and down in turns.
    Flap {
        a: usize,
        b: usize,
        period: u64,
        times: u32,
    },
    /// The network gets worse for a while.
    Storm {
        net: NetSetup,
        for_ns: u64,
    },
    /// Messages of one pair take this much longer.
    SlowLink {
        from: usize,
        to: usize,
        by: u64,
        for_ns: u64,
    },
    /// kill -9 after so many further effects; back after `down`.
    AgentCrash {
        node: usize,
        effects: u32,
        torn: Torn,
        down: u64,
        new_disk: bool,
    },
    /// Power loss: agent, launcher and workers, without a word to anybody.
    NodeCrash {
        node: usize,
        down: u64,
        new_disk: bool,
        relaunch: bool,
    },
    /// An agent that lives in its launcher ends with it, for good.
    NodeStop {
        node: usize,
    },
    /// And starts with the next one, perhaps without what it knew.
    NodeStart {
        node: usize,
        new_disk: bool,
    },
    LauncherCrash {
        node: usize,
        relaunch_after: Option<u64>,
    },
    /// The connection between launcher and agent breaks, both live.
    LauncherHiccup {
        node: usize,
    },
    /// SIGSTOP of the agent.
    AgentPause {
        node: usize,
        for_ns: u64,
    },
    /// The machine is suspended, as a virtual one that is moved: its clock stands still too.
    Suspend {
        node: usize,
        for_ns: u64,
    },
    DiskFull {
        node: usize,
        for_ns: u64,
    },
    WorkerFail {
        node: usize,
        code: i32,
        cascade: bool,
    },
    /// The workers of this node ignore SIGTERM from now on.
    Stubborn {
        node: usize,
    },
    /// Every worker exits 0.
    Finish,
    StartTrouble {
        node: usize,
        times: u32,
    },
    LateJoin {
        node: usize,
    },
    Drain {
        node: usize,
        grace_ms: u32,
        back_after: u64,
    },
    Leave {
        node: usize,
        grace_ms: u32,
        relaunch_after: Option<u64>,
    },
    Cancel {
        node: usize,
    },
    /// SIGSTOP of the launcher.
    LauncherPause {
        node: usize,
        for_ns: u64,
    },
    /// The launcher of this node hears so much later which workers ended.
    SlowReap {
        node: usize,
        by: u64,
    },
    /// No signal ends the workers of this node: a device or a file system hangs.
    Unkillable {
        node: usize,
        for_ns: u64,
    },
    StoreSlow {
        by: u64,
        for_ns: u64,
    },
    StoreReadsFail {
        permille: u32,
        for_ns: u64,
    },
    /// This node reads the store as it was so long ago: it finds nothing that was created since.
    StoreStale {
        node: usize,
        by: u64,
        for_ns: u64,
    },
    /// Creates are answered with Unknown; some land, at once or late, and some never do.
    StoreUnknown {
        permille: u32,
        late: u64,
        for_ns: u64,
    },
    StoreCut {
        node: usize,
        for_ns: u64,
    },
    /// Somebody orders a checkpoint at this node's agent.
    OrderCheckpoint {
        node: usize,
    },
    /// Somebody orders at this node's agent that the job ends (`muster cancel`).
    OrderCancel {
        node: usize,
    },
    /// A worker of this node stands still; for ever where no time is given.
    Hang {
        node: usize,
        for_ns: Option<u64>,
    },
    /// A worker of this node is busy with something long, and says so.
    Busy {
        node: usize,
        for_ns: u64,
    },
    /// A person who sees which nodes are dead gives these up (`muster job continue`), or tries to for so long.
    Continue {
        for_ns: u64,
    },
}

/// Effect of a crash on the write that it interrupts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Torn {
    /// The crash falls between two effects.
    Between,
    /// The crash falls into the next write; the old state stays.
    Old,
    /// The crash falls into the next write; the new state is there, nobody was told.
    New,
}

impl Fault {
    /// Ways in which a job ends, each with the code that its launchers exit with: it finishes, a worker of the first node
    /// fails, and the user of that node stops it.
    pub fn ends() -> [(Fault, i32); 3] {
        let failed = Fault::WorkerFail {
            node: 0,
            code: 3,
            cascade: true,
        };
        [
            (Fault::Finish, 0),
            (failed, 3),
            (Fault::Cancel { node: 0 }, 130),
        ]
    }

    pub const KINDS: [&'static str; 24] = [
        "cut one way",
        "cut both",
        "partition",
        "flap",
        "storm",
        "slow link",
        "agent crash",
        "torn write",
        "new disk",
        "node crash",
        "launcher crash",
        "launcher hiccup",
        "agent pause",
        "disk full",
        "worker fail",
        "stubborn",
        "finish",
        "start trouble",
        "late join",
        "drain",
        "leave",
        "cancel",
        "store trouble",
        "store late put",
    ];

    /// Those that are drawn apart.
    pub const EXTRA_KINDS: [&'static str; 10] = [
        "suspend",
        "checkpoint order",
        "cancel order",
        "hang",
        "busy",
        "launcher pause",
        "slow reap",
        "unkillable",
        "continue",
        "store stale",
    ];

    /// For how long it lasts, or what was there is away.
    pub(super) fn lasts(&mut self) -> Option<&mut u64> {
        match self {
            Fault::CutOneWay { for_ns, .. }
            | Fault::CutBoth { for_ns, .. }
            | Fault::Partition { for_ns, .. }
            | Fault::AgentPause { for_ns, .. }
            | Fault::LauncherPause { for_ns, .. }
            | Fault::Suspend { for_ns, .. }
            | Fault::Unkillable { for_ns, .. }
            | Fault::StoreStale { for_ns, .. }
            | Fault::StoreCut { for_ns, .. } => Some(for_ns),
            Fault::AgentCrash { down, .. } | Fault::NodeCrash { down, .. } => Some(down),
            _ => None,
        }
    }

    /// The kinds of fault that this one counts as.
    pub fn kinds(&self) -> Vec<&'static str> {
        match self {
            Fault::CutOneWay { .. } => vec!["cut one way"],
            Fault::CutBoth { .. } => vec!["cut both"],
            Fault::Partition { .. } => vec!["partition"],
            Fault::Flap { .. } => vec!["flap"],
            Fault::Storm { .. } => vec!["storm"],
            Fault::SlowLink { .. } => vec!["slow link"],
            Fault::AgentCrash { torn, new_disk, .. } => {
                let mut kinds = vec!["agent crash"];
                if *torn != Torn::Between {
                    kinds.push("torn write");
                }
                if *new_disk {
                    kinds.push("new disk");
                }
                kinds
            }
            Fault::NodeCrash { new_disk, .. } => match new_disk {
                true => vec!["node crash", "new disk"],
                false => vec!["node crash"],
            },
            Fault::LauncherCrash { .. } => vec!["launcher crash"],
            Fault::LauncherHiccup { .. } => vec!["launcher hiccup"],
            Fault::AgentPause { .. } => vec!["agent pause"],
            Fault::Suspend { .. } => vec!["suspend"],
            Fault::DiskFull { .. } => vec!["disk full"],
            Fault::WorkerFail { .. } => vec!["worker fail"],
            Fault::Stubborn { .. } => vec!["stubborn"],
            Fault::Finish => vec!["finish"],
            Fault::StartTrouble { .. } => vec!["start trouble"],
            Fault::LateJoin { .. } => vec!["late join"],
            // Parts of scenes, never drawn.
            Fault::NodeStop { .. } | Fault::NodeStart { .. } => Vec::new(),
            Fault::Drain { .. } => vec!["drain"],
            Fault::Leave { .. } => vec!["leave"],
            Fault::Cancel { .. } => vec!["cancel"],
            Fault::StoreSlow { .. } | Fault::StoreReadsFail { .. } | Fault::StoreCut { .. } => {
                vec!["store trouble"]
            }
            Fault::StoreStale { .. } => vec!["store stale"],
            Fault::StoreUnknown { .. } => vec!["store late put"],
            Fault::OrderCheckpoint { .. } => vec!["checkpoint order"],
            Fault::OrderCancel { .. } => vec!["cancel order"],
            Fault::LauncherPause { .. } => vec!["launcher pause"],
            Fault::SlowReap { .. } => vec!["slow reap"],
            Fault::Unkillable { .. } => vec!["unkillable"],
            Fault::Hang { .. } => vec!["hang"],
            Fault::Busy { .. } => vec!["busy"],
            Fault::Continue { .. } => vec!["continue"],
        }
    }
}
