//! Inputs and outputs of an agent's core.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::{Boot, Digest, Home, JobKey, LauncherId, NodeId, StateId};
use crate::local::{ToAgent, ToLauncher};
use crate::membership::Answer;
use crate::record::{CommitRef, Record, Voter};
use crate::storelog;
use crate::time::{Span, Time};
use crate::wire::{Message, Timeouts};

/// One connection on the agent's socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ConnId(pub u64);

/// Identity of this agent, and the times that it keeps.
#[derive(Clone, Debug)]
pub struct Config {
    pub node: NodeId,
    pub state: StateId,
    pub boot: Boot,
    pub cluster: String,
    pub host: String,
    pub version: String,
    /// The agent's process id, for people.
    pub pid: u32,
    /// Where its state directory lies.
    pub home: Home,
    /// Seeds back-off and nonces; must differ between boots.
    pub seed: u64,
    /// A watched peer that says nothing for this long is lost.
    pub suspect_after: Span,
    /// How long an agent may be away while its launcher's guard answers.
    pub agent_grace: Span,
    /// An undecided birth is left after this time.
    pub birth_timeout: Span,
    /// A member that does not start its workers within this time is struck.
    pub start_timeout: Span,
    /// With a store: a minority claims when the log has not grown for this long (R14).
    pub minority_wait: Span,
    /// With a store: a stranger claims when the leader's beacon has not moved for this long (R14).
    pub orphan_after: Span,
    /// All agents are on this host: loopback is the same for each of them.
    pub one_host: bool,
    /// The most bytes of the checkpoint slots of all jobs of this node.
    pub slot_memory: u64,
    /// How long the sealed copies of a job live on that has no launcher here any more.
    pub slot_lease: Span,
    /// Where the node is, for launchers that do not say.
    pub place: crate::record::Place,
    /// Of which the keys of jobs are made, for what their launchers hold in memory.
    pub memory: crate::memory::Key,
    /// It lives in a launcher's process, and ends with it.
    pub embedded: bool,
    /// Where a job's log is compacted; only tests set another than the default.
    pub compaction: storelog::Compaction,
    pub flaws: Flaws,
}

impl Config {
    /// This agent, as somebody who votes.
    pub fn voter(&self) -> Voter {
        Voter {
            node: self.node,
            state: self.state,
        }
    }

    /// How long an acknowledged heartbeat lets a member train: with drift and the time to kill, no
    /// more than `suspect_after` (R16).
    pub fn lease(&self) -> Span {
        Span(self.suspect_after.0 / 4 * 3)
    }

    /// These times, as others are told them.
    pub fn timeouts(&self) -> Timeouts {
        Timeouts {
            suspect_after: self.suspect_after,
            agent_grace: self.agent_grace,
        }
    }
}

/// Rules left out on purpose. Only the simulation sets any, to prove that its checker finds what
/// the rule prevents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flaws {
    pub skip_r5: bool,
    pub skip_r7: bool,
    pub skip_r8: bool,
    pub skip_r12: bool,
    pub skip_r13: bool,
    pub skip_r16: bool,
    /// Of R20: what an earlier leader left open is no concern of the next.
    pub skip_r20: bool,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An authenticated connection stands. `observed` is this node's address as the peer sees it.
    Connected {
        node: NodeId,
        addr: SocketAddr,
        observed: IpAddr,
    },
    Disconnected {
        node: NodeId,
    },
    Message {
        from: NodeId,
        message: Message,
    },
    /// The answer to [`Effect::Probe`]; of this node's own launcher if it is about this node.
    Probed {
        node: NodeId,
        id: u64,
        agent: Answer,
        guard: Answer,
    },
    /// A frame of a launcher. `owner` is who the socket says it is.
    Launcher {
        conn: ConnId,
        owner: String,
        frame: ToAgent,
    },
    /// The launcher's connection closed, and this is what its guard says. Unless it is gone the driver
    /// goes on asking, and says so when that changes. Silence is no death: a launcher that may be
    /// stopped counts as gone only when nothing was heard of it for `agent_grace`.
    LauncherGone {
        conn: ConnId,
        guard: Answer,
    },
    Store {
        key: JobKey,
        event: storelog::Event,
    },
    /// The leader's beacon in the job's store, as read.
    Beacon {
        key: JobKey,
        value: Option<u64>,
    },
    /// The last [`Effect::Persist`] of this job is durable.
    Persisted {
        key: JobKey,
    },
    /// The last [`Effect::Persist`] of this job did not reach the disk.
    PersistFailed {
        key: JobKey,
        /// Why; 0 where the system named no errno.
        errno: i32,
    },
    /// This node goes away: SIGTERM, a cloud's notice, `muster drain`.
    Drain {
        grace_ms: u32,
        reason: String,
    },
    /// All shards of a checkpoint are prepared; commit it.
    Commit {
        key: JobKey,
        step: u64,
        manifest: Digest,
    },
}

/// Something to do, in this order. The effects that rest on a `Persist` follow once the driver has said how it went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Replace this job's durable state, and answer with [`Event::Persisted`] or [`Event::PersistFailed`]. There is
    /// no other one of this job until then.
    Persist {
        key: JobKey,
        bytes: Vec<u8>,
    },
    /// The job is over here: its durable state may go, once what is to be remembered of all such jobs is
    /// durable.
    Forget {
        key: JobKey,
        past: Vec<u8>,
    },
    Send {
        to: NodeId,
        message: Message,
    },
    /// Dial the peer's agent and the guard at once, and report both.
    Probe {
        node: NodeId,
        id: u64,
        guard: Option<(SocketAddr, LauncherId)>,
    },
    ToLauncher {
        conn: ConnId,
        frame: ToLauncher,
    },
    Store {
        key: JobKey,
        effect: storelog::Effect,
    },
    /// Write the leader's beacon, or read it (answered by [`Event::Beacon`]).
    WriteBeacon {
        key: JobKey,
        value: u64,
    },
    ReadBeacon {
        key: JobKey,
    },
    /// For people, events and metrics; nothing depends on it.
    Notice(Notice),
}

/// The errno of a write that has been under way for longer than `suspect_after`: ETIMEDOUT of Linux.
pub const TIMED_OUT: i32 = 110;

/// News for people and dashboards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A peer is alive, suspect, away or lost.
    Peer {
        node: NodeId,
        state: crate::membership::State,
    },
    /// A peer keeps other times than this node.
    OtherTimes {
        node: NodeId,
        theirs: Timeouts,
        mine: Timeouts,
    },
    /// A node's state directory refuses writes, with this errno; `None`: it takes them again. [`TIMED_OUT`]: one
    /// takes too long.
    Unstored {
        node: NodeId,
        errno: Option<i32>,
    },
    /// A record was learnt to be decided.
    Decided {
        key: JobKey,
        digest: Digest,
        record: Arc<Record>,
    },
    /// Others vote on what follows the generation that runs: a decided record of kind `Voters`, and the witnesses that
    /// do not any more.
    Voters {
        key: JobKey,
        record: Arc<Record>,
        gone: Vec<NodeId>,
    },
    /// The times of one change of generation.
    Changed {
        key: JobKey,
        digest: Digest,
        phases: Phases,
        told: Told,
    },
    /// The job waits: text for people.
    Waiting {
        key: JobKey,
        text: String,
    },
    /// A stop is planned: a drain, a join, a cancel.
    Stopping {
        key: JobKey,
        why: String,
    },
    /// A worker failed by itself.
    WorkerFailed {
        key: JobKey,
        node: NodeId,
        exit: crate::local::WorkerExit,
    },
    Committed {
        key: JobKey,
        commit: CommitRef,
    },
    /// Some ranks make no progress: for whom everybody waits, and the same in words.
    Hung {
        key: JobKey,
        hang: Box<crate::hang::Hang>,
        text: String,
    },
    /// All ranks make progress again.
    Moves {
        key: JobKey,
    },
    /// A save begins, is committed or given up; a rank has no free slot; a copy is gone.
    Saving {
        key: JobKey,
        text: String,
    },
    /// Something that may go wrong later, and what would prevent it.
    Warning {
        key: JobKey,
        text: String,
    },
    Trouble {
        key: JobKey,
        text: String,
    },
}

/// Source of the times of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// This node's: it leads the generation.
    Leading,
    /// The leader told them.
    Heard,
    /// The leader never did, so not all workers may ever have run: what this node saw itself.
    Unfinished,
}

/// When each phase of a change of generation ended, on the leader's clock. Zero when the phase did
/// not happen (nothing had to be detected when a job forms).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Phases {
    /// The fault, or the last sign of life of what was lost; for a formation the first ticket.
    pub fault: Time,
    /// It was known.
    pub detected: Time,
    /// The next generation was decided.
    pub decided: Time,
    /// The last old worker was gone.
    pub stopped: Time,
    /// The last new worker was started.
    pub started: Time,
}
