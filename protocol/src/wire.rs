//! Messages between agents.
//!
//! Control messages are level-triggered wherever that is possible: a member tells its leader its
//! whole [`Status`], a leader tells a member the whole [`Order`], and both say it again until the
//! other side shows that it knows. A lost, repeated or reordered message then changes nothing.
//! Every message about a generation carries that generation's digest.

mod check;

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::agent::Phases;
use crate::barrier;
use crate::checkpoint;
use crate::codec::{self, CodecError};
use crate::hang::{Hang, Standing};
use crate::ids::{Boot, Digest, Home, JobKey, NodeId, StateId, StoreUuid};
use crate::local::{Question, WorkerExit};
use crate::record::{CommitRef, Member, Record, RecordError};
use crate::spec::JobSpec;
use crate::time::Span;

/// The most jobs that one greeting or heartbeat speaks of.
pub const MAX_JOBS: usize = 256;
/// The most nodes that one message lists beside a record's members.
pub const MAX_LIST: usize = 64;
/// The most ranks of one node.
pub const MAX_RANKS: usize = 1024;
/// The most ranks that a checkpoint's state names.
pub const MAX_SAVED: usize = 8 * MAX_RANKS;
/// The most bytes of a text for people.
pub const MAX_TEXT: usize = 4096;

/// A Paxos ballot (R6). Round 0 belongs to the leader alone and needs no promises (R7).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, Default,
)]
pub struct Ballot {
    pub round: u32,
    pub node: NodeId,
    pub boot: Boot,
}

/// From one agent to another, after both proved the cluster secret.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    Hello(Hello),
    /// A heartbeat; asks the receiver, as a voter, to acknowledge the lease of these generations.
    Ping {
        seq: u64,
        leases: Vec<Digest>,
    },
    /// Its answer, with the generations whose lease the voter acknowledges (R16).
    Pong {
        seq: u64,
        granted: Vec<Digest>,
    },
    /// This node goes away within the time named.
    Leaving {
        grace_ms: u32,
        reason: String,
    },
    /// Drain yourself: an operator on another node asks.
    DrainAsk {
        grace_ms: u32,
        reason: String,
    },
    Job {
        key: JobKey,
        body: Box<JobMessage>,
    },
    /// Say hello again: yours did not come over this connection.
    HelloAsk,
}

/// The first message on every connection, said again when something in it changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub host: String,
    pub version: String,
    pub state: StateId,
    pub home: Home,
    pub boot: Boot,
    pub timeouts: Timeouts,
    /// The errno with which its state directory refuses writes, 0 where the system named none: it casts no votes.
    pub unstored: Option<i32>,
    /// It ends with the launcher in whose process it lives.
    pub embedded: bool,
    pub jobs: Vec<Advert>,
}

/// Times that an agent keeps, and on which others must count: for as long its node may train that
/// nobody hears of any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Timeouts {
    /// Its workers may run for so long after a voter has acknowledged their lease (R16).
    pub suspect_after: Span,
    /// They may run for so long without an agent (R18).
    pub agent_grace: Span,
}

impl Timeouts {
    /// The longer ones of two nodes.
    pub fn max(self, other: Timeouts) -> Timeouts {
        Timeouts {
            suspect_after: self.suspect_after.max(other.suspect_after),
            agent_grace: self.agent_grace.max(other.agent_grace),
        }
    }
}

/// An agent's knowledge of a job's newest generation. A hint, never a proof.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Advert {
    pub key: JobKey,
    pub lineage: Digest,
    pub digest: Digest,
    pub number: u64,
    /// None of an end, and where no member can lead: none has a way to the store that decides.
    pub leader: Option<NodeId>,
    /// Whether the sender belongs to the generation (as member or voter).
    pub belongs: bool,
    /// No launcher of it is left, as the sender sees it: it leads it, or nobody can.
    pub deserted: bool,
    /// The sender is a member, and takes all its launchers for dead: its own, and those of others by their agents'
    /// words, or as its failure detector found them.
    pub left_behind: bool,
    /// And its workers had been started, as far as the sender knows: then nothing runs of a generation before it.
    pub started: bool,
    /// The sender's launcher does not answer its agent: it is stopped or blocked, and takes part in no change.
    pub unresponsive: bool,
}

impl Advert {
    /// Of a job that has not formed: launchers that wait for others ask at the sender.
    pub fn gathering(key: JobKey) -> Advert {
        Advert {
            key,
            lineage: Digest::ZERO,
            digest: Digest::ZERO,
            number: 0,
            leader: None,
            belongs: false,
            deserted: false,
            left_behind: false,
            started: false,
            unresponsive: false,
        }
    }

    pub fn is_gathering(&self) -> bool {
        self.digest.is_zero()
    }
}

/// About one job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobMessage {
    /// A launcher wants to become a member (R4). Said again every second until it is one.
    Ticket(Box<Ticket>),
    /// `lineage`: the life of the job that this launcher's ticket waits in, and whose end it will be told;
    /// zero while none runs, or the one that runs is ending.
    TicketAck {
        launcher: crate::ids::LauncherId,
        lineage: Digest,
        wait: Wait,
    },
    TicketRefused {
        launcher: crate::ids::LauncherId,
        why: String,
    },
    /// The launcher is gone or no longer wants to join.
    Withdraw,
    /// Bind yourself to this birth (R2).
    Birth {
        record: Arc<Record>,
    },
    BirthAccepted {
        lineage: Digest,
    },
    BirthRefused {
        lineage: Digest,
        bound: Digest,
    },
    /// The proposer will never decide this birth.
    BirthAbandoned {
        lineage: Digest,
    },
    /// Claim this birth in the store's log (arbiter Store); sent to its first member.
    ClaimBirth {
        record: Arc<Record>,
    },
    Prepare {
        parent: Digest,
        ballot: Ballot,
    },
    Promise {
        parent: Digest,
        ballot: Ballot,
        accepted: Option<(Ballot, Arc<Record>)>,
        acked: Option<CommitRef>,
    },
    Accept {
        parent: Digest,
        ballot: Ballot,
        record: Arc<Record>,
    },
    Accepted {
        parent: Digest,
        ballot: Ballot,
        grants: Vec<Grant>,
    },
    Rejected {
        parent: Digest,
        promised: Ballot,
    },
    /// This record is decided.
    Decided {
        record: Arc<Record>,
    },
    /// Tell me the newest record: I have this one.
    Ask {
        have: Digest,
    },
    Status(Box<Status>),
    Order(Box<Order>),
    /// The stop barrier (R20), leader to member and back.
    Stop(barrier::ToNode),
    StopAnswer(barrier::ToLeader),
    Commit {
        commit: CommitRef,
        /// The vote that is to acknowledge it: the generation, or the newest change of its voters.
        vote: Digest,
    },
    Committed {
        commit: CommitRef,
    },
    /// Another lineage of this job wants to be taken in (R10).
    MergeAsk {
        loser: Digest,
        /// It can decide nothing without voters that live in the group that is asked.
        stuck: bool,
    },
    MergeGranted {
        loser: Digest,
        winner: Digest,
    },
    /// This record ended the job after the one that you have did: so says one who had that before.
    Follows {
        have: Digest,
        record: Arc<Record>,
    },
    /// For people: how long the change took that made this generation. Said by its leader once all
    /// workers run, and again while a member's status does not show that it knows.
    Changed {
        digest: Digest,
        phases: Phases,
    },
    /// An operator has the job go on without these nodes, from this generation (R9, R10).
    Continue {
        parent: Digest,
        without: Vec<NodeId>,
    },
    /// The job goes on without the nodes that still hold this lineage, by an operator's word or because
    /// nothing can follow there: whoever is no further than the generation of this number leaves it,
    /// and joins.
    Superseded {
        lineage: Digest,
        up_to: u64,
    },
    /// For people: the failure on this node from which the others of the generation follow.
    Failure {
        digest: Digest,
        node: NodeId,
        exit: Box<WorkerExit>,
    },
    /// A voter that was asked says that it gave up its vote on what follows this record, for good.
    Forfeited {
        parent: Digest,
    },
    /// Some rank makes no progress: the leader asks where a member's ranks stand.
    Look {
        digest: Digest,
        number: u32,
    },
    /// The answer to a [`Look`](Self::Look) of this number.
    Standings {
        digest: Digest,
        number: u32,
        list: Vec<Standing>,
    },
    /// For whom everybody waits; none: all move again. Said by the leader, and again while a member's
    /// status names another number.
    Hang {
        digest: Digest,
        number: u32,
        hang: Option<Box<Hang>>,
    },
    /// Somebody on the sender's node wants a checkpoint; the number is that of the question. Said to
    /// the leader, again and again until it is over.
    CheckpointAsk {
        digest: Digest,
        ask: u64,
    },
    /// How far a checkpoint is, to who asked for it.
    Checkpoint {
        ask: u64,
        state: CheckpointState,
    },
    /// The leader's message to a member about the newest save.
    Save(checkpoint::ToNode),
    /// How far the member is with it.
    SaveAnswer(Box<checkpoint::ToLeader>),
    /// All ranks have loaded what the generation begins with: they may begin their first step (R15). Said
    /// by the leader, and again while a member's status does not show that it knows.
    Verified {
        digest: Digest,
    },
    /// For people: what the leader has chosen about checkpoints, and why.
    SaveSaid {
        digest: Digest,
        text: String,
    },
    /// A person ends this life of the job, on any node: said to its leader, again and again. Zero: a life that has
    /// not begun, to an agent at which launchers wait for it, and by that to theirs. `ago_ms`: since it was ordered. It is no
    /// order to launchers that were started later.
    CancelAsk {
        lineage: Digest,
        ago_ms: u32,
    },
    /// Somebody found a checkpoint damaged, or cannot read it: the leader has it read by the receiver's launcher. Said
    /// again until there is an answer.
    LookAgain {
        digest: Digest,
        question: Question,
    },
    /// The sender's launcher reads on: how far it is. It answers a [`LookAgain`](Self::LookAgain) of this number.
    LooksAgain {
        digest: Digest,
        number: u64,
        read: u64,
    },
    /// The answer to a [`LookAgain`](Self::LookAgain) of this number.
    LookedAgain {
        digest: Digest,
        number: u64,
        state: checkpoint::State,
    },
    /// The receiver's node cannot read checkpoints that others find whole: its launcher is to end, and says
    /// this.
    Unfit {
        digest: Digest,
        text: String,
    },
    /// From whoever had this generation decided to its leader, which may not know the one before: a start
    /// waits this long for those who may still be training: these nodes, at most [`MAX_LIST`], each for its own
    /// time; none where they are not known.
    Held {
        digest: Digest,
        ms: u32,
        nodes: Vec<(NodeId, u32)>,
    },
    /// The leader has the member's status of this number, and nothing to tell in return: it need not be
    /// said again soon. Zero: it has none of this generation.
    StatusHeard {
        digest: Digest,
        boot: Boot,
        seq: u64,
    },
    /// For people: the leader gave this save up, and why. `show`: also on consoles.
    SaveGivenUp {
        save: checkpoint::Save,
        why: String,
        show: bool,
    },
    /// Others vote by now on what follows this generation: a decided record of [`Kind::Voters`](crate::record::Kind).
    Voters {
        generation: Arc<Record>,
        record: Arc<Record>,
    },
    /// Why a life of the job does not end by an order, to the one that passed a [`CancelAsk`](Self::CancelAsk) on.
    CancelUnable {
        lineage: Digest,
        why: Unable,
    },
}

/// Why a life does not end by an order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unable {
    /// It began after the order was given.
    Newer,
    /// Nobody whom the sender sees can end it: the agents on these nodes do not answer it, at least one and at most
    /// [`MAX_LIST`].
    Misses { nodes: Vec<NodeId> },
}

/// How far a checkpoint is that somebody asked for.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointState {
    pub stage: CheckpointStage,
    /// Ranks that have saved, in order.
    pub saved: Vec<u32>,
    /// All ranks.
    pub world: u32,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckpointStage {
    /// The ranks agree on the step.
    #[default]
    Agreeing,
    /// They save before this step.
    Saving { step: u64 },
    /// All have.
    Done { step: u64 },
    /// It came to nothing, or not all did.
    Failed { why: String },
    /// The ranks cannot agree yet: for what they are waited for.
    Waiting { why: String },
}

impl CheckpointStage {
    pub fn is_over(&self) -> bool {
        matches!(
            self,
            CheckpointStage::Done { .. } | CheckpointStage::Failed { .. }
        )
    }
}

/// Ranks of one node that have saved for a checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Saved {
    /// The step before which they saved.
    pub step: u64,
    pub ranks: Vec<u32>,
    /// All that run on the node have, or have said that they cannot.
    pub all: bool,
    /// A rank that was to save and did not, and why, in words.
    pub failed: Option<String>,
}

/// How long the workers of a member that a proposal drops may still run, as far as a voter knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    pub node: NodeId,
    pub left_ms: u32,
}

/// A launcher's wish to become a member, spoken by its agent (R4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    pub member: Member,
    pub spec: JobSpec,
    /// The newest record that the agent holds for this job, or zero.
    pub knows: Digest,
    /// The store's uuid as this node reads it.
    pub store: Option<StoreUuid>,
    pub host: String,
    pub command: String,
    /// Participants that this node cannot reach.
    pub unreachable: Vec<NodeId>,
    /// For so long, in milliseconds, somebody of the life before may still be training.
    pub held_ms: u32,
    /// For so long, in milliseconds, the launcher has waited.
    pub waited_ms: u32,
}

/// Why a ticket has not become a membership yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Wait {
    /// Too few nodes have come.
    Forming {
        have: u16,
        min: u16,
        max: u16,
        who: Vec<NodeId>,
    },
    /// Enough nodes: waiting a moment for further ones.
    Batching { have: u16, max: u16 },
    /// The job has all nodes that it wants; this one steps in at the next loss.
    Spare { max: u16 },
    /// The voters of the last generation that cannot be reached; a majority is missing.
    NoQuorum { missing: Vec<NodeId> },
    /// Voters whose state directories refuse writes; without their votes a majority is missing.
    Unstored { nodes: Vec<NodeId> },
    /// The node failed too often; it is let in again after this time.
    Parked { ms: u64 },
    /// The newest generation is led by another node: ask there.
    Elsewhere { advert: Advert },
    /// The job is between generations.
    Changing,
    /// The store says that a generation runs, and nobody of it can be reached. It counts as lost after this time
    /// without a sign of life.
    Orphan { ms: u64 },
    /// Enough nodes. Workers of the life before may still run, for this time at most, on a node that was away or cut
    /// off when it ended.
    Held { have: u16, ms: u64 },
    /// All ranks have finished but those on these nodes: the job ends with them.
    Finishing { nodes: Vec<NodeId> },
    /// The launcher has another specification than the running job. It is refused soon, unless no launcher of that
    /// job lives.
    OtherSpec,
}

/// State of a member's own part in a generation, by its agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    pub digest: Digest,
    pub boot: Boot,
    pub seq: u64,
    /// The newest attempt whose workers run or ran.
    pub started: Option<u32>,
    pub start_failed: Option<(u32, String)>,
    /// No worker of this generation runs, or ever will.
    pub stopped: bool,
    /// Every worker exited 0 by itself.
    pub finished: bool,
    /// The first worker that failed by itself.
    pub exit: Option<WorkerExit>,
    /// The launcher is dead; its workers died with it.
    pub gone: bool,
    pub leave: Option<Leave>,
    pub cancel: bool,
    pub unreachable: Vec<NodeId>,
    pub takes_stop_steps: bool,
    /// The member's lease ran out and its workers were killed.
    pub lease_lost: bool,
    /// The store decides, and this member has no way to it: its launcher has brought none, or it lost its lease and
    /// does not read the store. It cannot lead, nor start.
    pub storeless: bool,
    /// It heard how long the change took that made this generation.
    pub knows_times: bool,
    /// A rank of this member makes no progress.
    pub stalled: bool,
    /// The number of the newest [`JobMessage::Hang`] that it heard.
    pub heard_hang: u32,
    /// The newest checkpoint that ranks of this member save or saved for.
    pub saved: Option<Saved>,
    /// The barrier at whose step ranks of this member wait, or will wait, for it is not decided here.
    pub gate: Option<u32>,
    /// All ranks of this member stand before their first step: they have loaded what they begin with.
    pub loaded: bool,
    /// It heard that all ranks of all members do (R15).
    pub verified: bool,
    /// Cost of saving on this member.
    pub pace: checkpoint::Pace,
    /// The member's launcher has not answered its agent for a while: it is stopped or blocked, and starts and ends
    /// nothing until it answers again.
    pub unresponsive: bool,
}

impl Status {
    /// Whether the member just trains, and has nothing to tell.
    pub fn is_settled(&self) -> bool {
        self.started.is_some()
            && self.start_failed.is_none()
            && self.exit.is_none()
            && self.leave.is_none()
            && self.gate.is_none()
            && self.unreachable.is_empty()
            && !(self.stopped || self.finished || self.gone || self.cancel)
            && !(self.lease_lost || self.storeless || self.stalled || self.unresponsive)
    }
}

/// A node goes, by a notice that leaves this much time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leave {
    pub grace_ms: u32,
    pub reason: String,
}

/// A leader's order to a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Order {
    pub digest: Digest,
    pub boot: Boot,
    pub seq: u64,
    pub action: Action,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// Start the workers (START of R17).
    Run {
        attempt: u32,
        master_port: u16,
        restart_count: u32,
        why: String,
    },
    /// Tell every rank to save and leave, now (the agreed signal).
    Preempt {
        signal: i32,
        grace_ms: u32,
        why: String,
    },
    /// The generation is over: end its workers (END_GEN of R18).
    End { grace_ms: u32, why: String },
}

/// Why a message cannot be used. The sender is cut off; nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error("a record in the message is invalid: {0}")]
    Record(#[from] RecordError),
    #[error("{what} has {len} entries, the limit is {limit}")]
    TooMany {
        what: &'static str,
        len: usize,
        limit: usize,
    },
    #[error("the job's key is invalid")]
    Key,
}

impl Message {
    pub fn encode(&self) -> Result<Vec<u8>, CodecError> {
        codec::encode_frame(self)
    }

    /// Total: any bytes give a valid message or an error.
    pub fn decode(frame: &[u8]) -> Result<Message, WireError> {
        let message: Message = codec::decode_frame(frame)?;
        message.check()?;
        Ok(message)
    }
}
