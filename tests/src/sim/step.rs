//! One concrete thing that happens in the world. A run is a list of these and nothing else: the
//! conductor draws them, a log keeps them, and a replay carries them out again without drawing.

use muster_protocol::agent::ConnId;
use muster_protocol::local::{ToAgent, ToLauncher};
use muster_protocol::{Digest, NodeId, Time};
use serde::{Deserialize, Serialize};

use super::launcher::Due;
use super::setup::Torn;

/// Result of a probe, as membership names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Found {
    Answered,
    /// The kernel accepts for a process that is stopped, and nothing comes.
    Mute,
    Refused,
    Silent,
    Other,
}

/// Answer of the store to the one who asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreAnswer {
    Found(Vec<u8>),
    Absent,
    ReadFailed,
    Won,
    Exists,
    Unknown,
}

/// `agent` names one boot of one agent, `launcher` one start of one launcher: what was meant for an
/// earlier one is lost.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Step {
    AgentStart {
        node: usize,
    },
    AgentKill {
        node: usize,
    },
    /// The agent dies after so many further effects.
    Arm {
        node: usize,
        effects: u32,
        torn: Torn,
    },
    NewDisk {
        node: usize,
    },
    /// The node reads the store as it was so long ago (nanoseconds).
    StoreStale {
        node: usize,
        by: u64,
    },
    DiskFull {
        node: usize,
        full: bool,
    },
    /// SIGSTOP and SIGCONT.
    Pause {
        node: usize,
        paused: bool,
    },
    /// The machine stands still with all that runs on it, and with its clock.
    Suspend {
        node: usize,
    },
    Wake {
        node: usize,
    },
    Connect {
        node: usize,
        agent: u32,
        peer: usize,
    },
    Disconnect {
        node: usize,
        agent: u32,
        peer: usize,
    },
    Deliver {
        to: usize,
        from: usize,
        frame: Vec<u8>,
    },
    Timer {
        node: usize,
        agent: u32,
    },
    Probed {
        node: usize,
        agent: u32,
        peer: NodeId,
        id: u64,
        agent_found: Found,
        guard_found: Found,
    },
    Drain {
        node: usize,
        grace_ms: u32,
    },
    /// The leader's workers have a checkpoint ready.
    Checkpoint {
        node: usize,
        step: u64,
        manifest: Digest,
    },
    LauncherStart {
        node: usize,
    },
    LauncherKill {
        node: usize,
    },
    /// The launcher connects to its agent and registers.
    LauncherConnect {
        node: usize,
        launcher: u32,
    },
    /// The connection breaks, both live.
    LauncherHiccup {
        node: usize,
    },
    LauncherHears {
        node: usize,
        conn: ConnId,
        frame: ToLauncher,
    },
    LauncherDue {
        node: usize,
        launcher: u32,
        due: Due,
    },
    AgentHears {
        node: usize,
        agent: u32,
        conn: ConnId,
        store: bool,
        frame: ToAgent,
    },
    /// The connection of this launcher closed, and its agent looks at its guard.
    LauncherGone {
        node: usize,
        agent: u32,
        conn: ConnId,
        launcher: u32,
    },
    WorkerFail {
        node: usize,
        code: i32,
        digest: Option<Digest>,
    },
    Finish {
        node: usize,
        digest: Digest,
    },
    Stubborn {
        node: usize,
    },
    StartTrouble {
        node: usize,
        times: u32,
    },
    Leave {
        node: usize,
    },
    /// SIGSTOP and SIGCONT of the launcher.
    LauncherPause {
        node: usize,
        paused: bool,
    },
    /// The sidecar of a launcher that is stopped asks for how long the workers may go on.
    LeaseAsked {
        node: usize,
        agent: u32,
        launcher: u32,
        asked: u64,
    },
    /// From now on the launcher hears so much later which workers ended.
    SlowReap {
        node: usize,
        ns: u64,
    },
    /// No signal ends the workers here before this time.
    Unkillable {
        node: usize,
        until: u64,
    },
    Cancel {
        node: usize,
    },
    /// Somebody orders a checkpoint.
    OrderCheckpoint {
        node: usize,
    },
    /// Somebody orders at this node's agent that the job ends.
    OrderCancel {
        node: usize,
        /// When, and by that node's clock.
        given: u64,
        there: Time,
    },
    /// Somebody has the job go on without these nodes.
    Continue {
        node: usize,
        dead: Vec<usize>,
    },
    /// A worker stands still from the next step on, or is busy with it.
    Hang {
        node: usize,
        busy: bool,
    },
    /// It goes on.
    Thaw {
        node: usize,
        digest: Digest,
    },
    /// The store carries a read out, and will answer.
    StoreRead {
        node: usize,
        agent: u32,
        op: u64,
        slot: u64,
    },
    /// A put lands; `answer` when its writer will hear of it.
    StorePut {
        node: usize,
        agent: u32,
        op: u64,
        slot: u64,
        bytes: Vec<u8>,
        answer: bool,
    },
    StoreAnswer {
        node: usize,
        agent: u32,
        op: u64,
        slot: u64,
        answer: StoreAnswer,
    },
    BeaconWrite {
        value: u64,
    },
    BeaconRead {
        node: usize,
        agent: u32,
    },
    BeaconAnswer {
        node: usize,
        agent: u32,
        value: Option<u64>,
    },
    /// The agent's oldest write is durable, and it dies before it hears that.
    Torn {
        node: usize,
    },
    /// The write of this agent that has been under way for the longest time is done.
    Written {
        node: usize,
        agent: u32,
    },
}

/// Requests of the world to its conductor.
#[derive(Clone, Debug)]
pub enum Request {
    AgentUp {
        node: usize,
    },
    AgentDown {
        node: usize,
    },
    Net {
        from: usize,
        to: usize,
        frame: Vec<u8>,
    },
    /// The agent writes.
    Write {
        node: usize,
        agent: u32,
    },
    Probe {
        node: usize,
        agent: u32,
        peer: NodeId,
        id: u64,
        guard: Option<(u8, u16)>,
    },
    ToLauncher {
        node: usize,
        conn: ConnId,
        frame: ToLauncher,
    },
    ToAgent {
        node: usize,
        agent: u32,
        conn: ConnId,
        frame: ToAgent,
    },
    LauncherWait {
        node: usize,
        launcher: u32,
        due: Due,
        ns: u64,
        exact: bool,
    },
    /// A sidecar asks the agent for its launcher's lease.
    AskLease {
        node: usize,
        agent: u32,
        launcher: u32,
    },
    /// The launcher is there and looks for an agent.
    LauncherUp {
        node: usize,
    },
    /// It is not any more; its agent will notice.
    LauncherDown {
        node: usize,
        agent: u32,
        conn: Option<ConnId>,
        launcher: u32,
    },
    /// A worker of this generation hangs since now.
    Hangs {
        node: usize,
        digest: Digest,
    },
    /// A launcher was told that the job is over, or that it is not wanted.
    LauncherEnded {
        node: usize,
    },
    StoreRead {
        node: usize,
        agent: u32,
        op: u64,
        slot: u64,
    },
    StoreCreate {
        node: usize,
        agent: u32,
        op: u64,
        slot: u64,
        bytes: Vec<u8>,
    },
    StoreAnswer {
        node: usize,
        agent: u32,
        op: u64,
        slot: u64,
        answer: StoreAnswer,
    },
    BeaconWrite {
        node: usize,
        value: u64,
    },
    BeaconRead {
        node: usize,
        agent: u32,
    },
    BeaconAnswer {
        node: usize,
        agent: u32,
        value: Option<u64>,
    },
}
