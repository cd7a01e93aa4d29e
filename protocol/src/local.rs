//! Frames on the unix socket: launcher with agent, and command line with agent.
//!
//! The launcher is the client. Its first frame is [`ToAgent::Register`]; a command line's only frame
//! is [`ToAgent::Query`] or [`ToAgent::Command`].

mod keeping;
mod saves;
mod store;

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use crate::barrier::Held;
use crate::control::Reason;
use crate::control::report::{MAX_RANKS, RankMetrics};
use crate::hang::{MAX_STANDINGS, Standing};
use crate::ids::{Digest, LauncherId, NodeId, StoreUuid};
use crate::memory::Peers;
use crate::record::{Place, Record};
use crate::spec::JobSpec;
use crate::time::Time;
use crate::wire::Saved;

pub use keeping::{KeepNews, Left, MAX_KEPT, MAX_NAME, MAX_NEEDS, Question, Review};
pub use saves::{MAX_PARTS, Replicated, SaveAsk, SaveNews, short};
pub use store::{
    Assembly, MAX_PART, News, Part, STORE_HANGS, StoreAnswer, StoreAsk, StoreOp, Troubles,
};

/// The most bytes of a worker's last output that travel in a report.
pub const MAX_TAIL: usize = 4096;

/// The most lines of it.
pub const MAX_TAIL_LINES: usize = 20;

/// The end of a worker's output as it may be shown anywhere: the last lines, without control
/// bytes or terminal sequences, within [`MAX_TAIL`] and [`MAX_TAIL_LINES`].
pub fn plain_tail(text: &str) -> String {
    let lines: Vec<&str> = text.trim_end().lines().collect();
    let first = lines.len().saturating_sub(MAX_TAIL_LINES);
    let mut kept: Vec<String> = Vec::new();
    let mut room = MAX_TAIL;
    for line in lines.into_iter().skip(first).rev() {
        let mut line = plain_line(line);
        if line.len() + 1 > room && !kept.is_empty() {
            break;
        }
        // A single line that is too long keeps its end.
        let mut from = line.len().saturating_sub(room.saturating_sub(1));
        while !line.is_char_boundary(from) {
            from += 1;
        }
        let line = line.split_off(from);
        room = room.saturating_sub(line.len() + 1);
        kept.push(line);
    }
    kept.reverse();
    kept.join("\n")
}

/// A line without control characters; an escape sequence goes as a whole.
fn plain_line(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut chars = line.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\t' => out.push(c),
            '\u{1b}' if chars.peek() == Some(&'[') => {
                chars.next();
                for c in chars.by_ref() {
                    if ('@'..='~').contains(&c) {
                        break;
                    }
                }
            }
            c if c.is_control() => {}
            c => out.push(c),
        }
    }
    out
}

/// The most candidate addresses of a launcher.
pub const MAX_ADDRS: usize = 8;

/// From a launcher or a command line to its agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToAgent {
    Register(Register),
    /// A port that this launcher holds for the next generation's master (used when rank 0 is here).
    MasterPort {
        port: u16,
    },
    /// The workers of this generation run.
    Started {
        digest: Digest,
        attempt: u32,
    },
    /// They could not be started; nothing runs.
    StartFailed {
        digest: Digest,
        attempt: u32,
        reason: String,
    },
    /// A worker ended by itself, not because it was told to.
    Exited {
        digest: Digest,
        exit: WorkerExit,
    },
    /// Every local worker of this generation exited with code 0.
    Finished {
        digest: Digest,
    },
    /// No worker of this or any earlier generation runs here any more.
    Stopped {
        digest: Digest,
    },
    /// Answer to [`ToLauncher::InstallStop`]: every local worker will stop at this step or, where it
    /// was already past the step asked for, at the later one named here.
    StopInstalled {
        digest: Digest,
        barrier: u32,
        step: u64,
    },
    /// Every local worker of this generation has linked the runtime and takes stop steps.
    TakesStopSteps {
        digest: Digest,
        yes: bool,
    },
    /// The launcher was told to leave (SIGTERM): its node's part of the job goes within this time.
    Leave {
        grace_ms: u32,
    },
    /// The user stops the job (Ctrl-C once).
    Cancel,
    Query(Query),
    Command(Command),
    /// Answer to [`ToLauncher::Store`] of this id.
    Store {
        id: u64,
        answer: StoreAnswer,
    },
    /// A local worker of this generation makes no progress, or all do again.
    Stalled {
        digest: Digest,
        yes: bool,
    },
    /// Answer to [`ToLauncher::Look`] of this number.
    Standings {
        digest: Digest,
        number: u32,
        list: Vec<Standing>,
    },
    /// How the workers of this generation train, those that say so; at most once in two seconds, and
    /// empty once none does. More than [`MAX_RANKS`] come in several frames: `first` is set in the
    /// first of them.
    Metrics {
        digest: Digest,
        first: bool,
        ranks: Vec<RankMetrics>,
    },
    /// Local ranks of this generation that have saved for a checkpoint.
    Saved {
        digest: Digest,
        saved: Saved,
    },
    /// About checkpoint slots.
    Save(SaveNews),
    /// Answer to [`ToLauncher::Welcome`]: this launcher hears what it is told.
    Alive,
}

/// Bytes of a command line, and of a reason, that a launcher may send.
pub const MAX_COMMAND: usize = 256;
pub const MAX_REASON: usize = 1024;
/// Bytes of a path and of a name.
pub const MAX_PATH: usize = 4096;

/// How a reason begins that lies with the program itself: no node's fault, and no passing one.
const CANNOT_RUN: &str = "cannot run `";
/// The next part of such a reason when there is no such program.
const NOT_FOUND: &str = "`: not found";

/// The reason of a [`ToAgent::StartFailed`] whose program can never be executed as it is: it is not
/// there (`why` is none), or the kernel refuses it. `fix` says what to look at.
pub fn cannot_run(program: &str, why: Option<&str>, fix: &str) -> String {
    match why {
        None => format!("{CANNOT_RUN}{program}{NOT_FOUND}; {fix}"),
        Some(why) => format!("{CANNOT_RUN}{program}`: {why}; {fix}"),
    }
}

/// The exit code of a job that ends for this reason, as a shell's: 127 for a program that was not
/// found, 126 for one that cannot be executed. `None` for a reason that may pass.
pub fn cannot_run_code(reason: &str) -> Option<i32> {
    let rest = reason.strip_prefix(CANNOT_RUN)?;
    Some(if rest.contains(NOT_FOUND) { 127 } else { 126 })
}

/// Why a frame of a client cannot be used. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what} has {len} entries or bytes, the limit is {limit}")]
pub struct TooMuch {
    pub what: &'static str,
    pub len: usize,
    pub limit: usize,
}

impl ToAgent {
    /// Whether what the client says fits into what agents say to each other.
    pub fn check(&self) -> Result<(), TooMuch> {
        let fits = |what, len, limit| {
            if len <= limit {
                Ok(())
            } else {
                Err(TooMuch { what, len, limit })
            }
        };
        match self {
            ToAgent::Register(reg) => {
                fits("the command", reg.command.len(), MAX_COMMAND)?;
                fits("the addresses", reg.addrs.len(), MAX_ADDRS)?;
                fits("--rdzv-id", reg.job.len(), crate::ids::JobKey::MAX_PART)?;
                let log_dir = reg.log_dir.as_ref().map_or(0, String::len);
                fits("--log-dir", log_dir, MAX_PATH)
            }
            ToAgent::StartFailed { reason, .. } => fits("the reason", reason.len(), MAX_REASON),
            ToAgent::Exited { exit, .. } => {
                let damaged = exit.damaged.as_ref().map_or(0, |d| d.why.len());
                fits("the reason", damaged, MAX_REASON)?;
                fits("the output", exit.tail.len(), MAX_TAIL)
            }
            ToAgent::Query(Query::Events { job, .. })
            | ToAgent::Command(Command::Cancel { job, .. } | Command::Ended { job, .. }) => {
                fits("the job", job.len(), MAX_PATH)
            }
            ToAgent::Command(Command::Continue { job, dead, .. }) => {
                fits("the job", job.len(), MAX_PATH)?;
                fits("the dead nodes", dead.len(), crate::wire::MAX_LIST)?;
                let longest = dead.iter().map(String::len).max();
                fits("a node's name", longest.unwrap_or(0), MAX_PATH)
            }
            ToAgent::Command(Command::Drain { node, .. }) => fits("the node", node.len(), MAX_PATH),
            ToAgent::Store { answer, .. } => answer.check(),
            ToAgent::Save(news) => news.check(),
            ToAgent::Saved { saved, .. } => {
                let failed = saved.failed.as_ref().map_or(0, String::len);
                fits("the reason", failed, MAX_REASON)?;
                fits("the ranks", saved.ranks.len(), crate::wire::MAX_RANKS)
            }
            ToAgent::Command(Command::Checkpoint { job }) => fits("the job", job.len(), MAX_PATH),
            ToAgent::Standings { list, .. } => fits("the ranks", list.len(), MAX_STANDINGS),
            ToAgent::Metrics { ranks, .. } => fits("the ranks", ranks.len(), MAX_RANKS),
            _ => Ok(()),
        }
    }
}

/// A launcher's first frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Register {
    pub launcher: LauncherId,
    pub job: String,
    pub spec: JobSpec,
    /// Workers on this node.
    pub slots: u16,
    /// The guard port, and the addresses of the launcher's own network namespace, best first.
    pub guard_port: u16,
    pub addrs: Vec<IpAddr>,
    pub place: Place,
    /// The generation whose workers run here, when the launcher comes back to an agent.
    pub running: Option<Digest>,
    /// Milliseconds since it had an agent first.
    pub waited_ms: u32,
    /// The newest generation that it was told to start. It has heard no end of the life that this is of.
    pub began: Option<Box<Began>>,
    /// The life of the job that it takes part in, by [`ToLauncher::Life`].
    pub lineage: Option<Digest>,
    /// The stop step that it holds, and its workers with it: of the generation that runs, or of the newest where
    /// that has finished.
    pub gate: Option<Held>,
    /// The store that the launcher opened for the job: it carries out what [`ToLauncher::Store`]
    /// asks.
    pub store: Option<StoreUuid>,
    /// Nodes that it wants parity of checkpoints over; 0: none.
    pub parity: u8,
    pub pid: u32,
    /// The command, for people; at most 256 bytes.
    pub command: String,
    /// Where the workers' output goes, for `muster logs`; the agent never opens it.
    pub log_dir: Option<String>,
}

/// A generation that a launcher was told to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Began {
    pub lineage: Digest,
    pub digest: Digest,
}

/// How a worker ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerExit {
    pub rank: u32,
    pub local_rank: u16,
    pub pid: u32,
    /// The exit code, or 128 plus the signal.
    pub code: i32,
    pub signal: Option<i32>,
    /// Its launcher ended it, as one that hangs.
    pub hung: bool,
    /// Of one that SIGKILL ended: whether the kernel has killed for want of memory around it meanwhile, by its own
    /// count; `None` where it does not say.
    pub out_of_memory: Option<bool>,
    /// It found the checkpoint damaged that it was to begin with.
    pub damaged: Option<Damaged>,
    /// Unix milliseconds on the worker's node: from its error file, else when it was reaped.
    pub at_ms: u64,
    /// From its error file, or the last lines of its stderr; at most [`MAX_TAIL`] bytes.
    pub tail: String,
}

/// A checkpoint that cannot be loaded as it was saved.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Damaged {
    pub manifest: Digest,
    /// The fault, in at most [`MAX_REASON`] bytes.
    pub why: String,
    /// It is this node that cannot read it, by the worker's own word: its disk fails, or it has another store.
    pub here: bool,
}

/// From the agent to a launcher.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToLauncher {
    /// The launcher was taken in. Said again every second or more often: an agent that is stopped keeps its
    /// connections, and shows by its silence alone that it is away.
    Welcome {
        node: NodeId,
        agent_pid: u32,
        /// How long workers may go on without an agent, counted from its last word: after that the
        /// others count the node as lost.
        agent_grace_ms: u32,
        /// How long workers may go on without their launcher, unless the agent answers for them
        /// ([`Query::Lease`]).
        lease_ms: u32,
    },
    /// It was not, and will not be: the launcher says why and exits.
    Refused {
        reason: String,
    },
    /// The job waits: for whom, why, and what would help.
    Waiting {
        text: String,
    },
    Start(Start),
    /// End the workers of this and every earlier generation: SIGTERM, then SIGKILL after the grace.
    Stop {
        digest: Digest,
        grace_ms: u32,
        why: String,
    },
    /// Send every local worker this signal now, and SIGKILL to what is left after the grace.
    /// Exits until then are part of the stop, whatever their code.
    Preempt {
        digest: Digest,
        signal: i32,
        grace_ms: u32,
        why: String,
    },
    /// Stop step (R20): write it to every local worker's control page and answer.
    InstallStop {
        digest: Digest,
        barrier: u32,
        step: u64,
        grace_ms: u32,
        reason: Reason,
    },
    /// All ranks of all nodes have installed this step: stop there.
    ConfirmStop {
        digest: Digest,
        barrier: u32,
        step: u64,
        reason: Reason,
    },
    CancelStop {
        digest: Digest,
        barrier: u32,
    },
    /// The job is over for this launcher. It ends what still runs, prints the report, and exits
    /// with the code.
    End {
        code: i32,
        report: String,
    },
    /// Something to do in the job's store. The id is one of this link; an answer names it again.
    Store {
        id: u64,
        ask: StoreAsk,
    },
    /// For people: the failure of this generation from which the others follow, and what people
    /// call its node.
    Failed {
        node: String,
        exit: WorkerExit,
    },
    /// Some rank of the job makes no progress: say where the local ones stand.
    Look {
        digest: Digest,
        number: u32,
    },
    /// For whom everybody waits, in words, and which of them are local; no text: all move again.
    Hung {
        digest: Digest,
        text: String,
        ranks: Vec<u32>,
    },
    /// About checkpoint slots.
    Save(SaveAsk),
    /// The launcher takes part in this life of the job, as a member or as one that waits, and ends with it. It tells an
    /// agent that is started anew.
    Life {
        lineage: Option<Digest>,
    },
}

/// Start this generation's workers, as soon as the ones before are gone. Idempotent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    pub digest: Digest,
    /// The job's birth record: a state of another lineage is no state of this job.
    pub lineage: Digest,
    pub attempt: u32,
    pub number: u64,
    /// Position of this node, and number of nodes.
    pub node_rank: u32,
    pub nodes: u32,
    /// First global rank of this node.
    pub first_rank: u32,
    pub slots: u16,
    pub world: u32,
    pub master: SocketAddr,
    /// Rank 0's launcher's guard: the launcher dials it from its own network namespace first.
    pub master_guard: SocketAddr,
    pub master_launcher: LauncherId,
    /// Generations that this job restarted for (TORCHELASTIC_RESTART_COUNT).
    pub restart_count: u32,
    /// The manifest of the checkpoint that this generation begins with.
    pub restore: Option<Digest>,
    /// The other holders of the job's checkpoints in memory.
    pub peers: Box<Peers>,
    pub why: String,
}

/// A question of the command line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Query {
    Status,
    Nodes,
    Jobs,
    Events {
        job: String,
        after: u64,
    },
    /// For how long the workers of a launcher that does not move may go on: `{"lease_ms": N}`.
    Lease {
        launcher: LauncherId,
    },
}

/// An order of the command line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Command {
    /// Drain a node (by id prefix or host name; empty for this one).
    Drain { node: String, grace_ms: u32 },
    /// Stop a job. `given`: when a person said so, by this machine's `CLOCK_BOOTTIME`. Launchers that were started later
    /// are not meant.
    Cancel { job: String, given: Time },
    /// Go on with a job without the nodes that are lost (by id prefix or host name). Unless it is `confirmed`, the
    /// answer says whether that could be done, and nothing changes.
    Continue {
        job: String,
        dead: Vec<String>,
        confirmed: bool,
    },
    /// Have all ranks of a job save at one step, and go on.
    Checkpoint { job: String },
    /// A person has ended a job in its log, which no launcher of it is left to write.
    Ended { job: String, record: Box<Record> },
}

/// The answer to a query or command: JSON, so that it is what `-o json` prints.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    Json(String),
    Error(String),
    /// A part of a list that does not fit into one frame: a JSON array. More parts follow, and the
    /// last one is a [`Json`](Self::Json).
    Part(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_can_be_shown_anywhere() {
        assert_eq!(plain_tail(""), "");
        assert_eq!(plain_tail("one\r\ntwo\n\n"), "one\ntwo");
        assert_eq!(
            plain_tail("\u{1b}[31mred\u{1b}[0m\u{7}\tx\u{9b}2J\0"),
            "red\tx2J"
        );
        assert_eq!(plain_tail("cut \u{1b}[12"), "cut ");
        let many: String = (0..100).map(|n| format!("line {n}\n")).collect();
        let tail = plain_tail(&many);
        assert_eq!(tail.lines().count(), MAX_TAIL_LINES);
        assert!(tail.starts_with("line 80") && tail.ends_with("line 99"));
        let wide = format!("first\n{}", "ä".repeat(MAX_TAIL));
        let tail = plain_tail(&wide);
        assert!(tail.len() < MAX_TAIL && tail.len() > MAX_TAIL - 4);
        let lines: String = (0..20).map(|_| "x".repeat(1_000) + "\n").collect();
        assert_eq!(plain_tail(&lines).lines().count(), 4);
        assert_eq!(plain_tail(&plain_tail(&lines)), plain_tail(&lines));
    }
}
