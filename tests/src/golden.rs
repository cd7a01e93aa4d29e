//! One sample of every message and frame. Their bytes are kept under `golden`, so that a later version is measured
//! against what this one speaks.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

use muster_protocol::agent::Phases;
use muster_protocol::barrier::{ToLeader, ToNode};
use muster_protocol::local::{
    Answer, Command, Damaged, KeepNews, Query, SaveAsk, SaveNews, StoreAnswer, StoreAsk, ToAgent,
    ToLauncher, WorkerExit,
};
use muster_protocol::record::{Arbiter, Cause, CommitRef, Kind, Member, Place, Record, Voter};
use muster_protocol::spec::JobSpec;
use muster_protocol::storelog::{Body, Entry, Snapshot, Standing};
use muster_protocol::wire::{
    Action, Advert, Ballot, Grant, Hello, JobMessage, Leave, Message, Order, Status, Ticket,
    Timeouts, Unable, Wait,
};
use muster_protocol::{
    Boot, Digest, Home, JobKey, LauncherId, NodeId, Span, StateId, StoreUuid, Time,
};

/// Defines the name of every variant: a new variant does not compile until it has one, and a name
/// without a sample fails the test.
macro_rules! names {
    ($function:ident, $all:ident, $type:ty, { $($pattern:pat $(if $guard:expr)? => $name:literal),+ $(,)? }) => {
        pub const $all: &[&str] = &[$($name),+];

        pub fn $function(value: &$type) -> &'static str {
            match value { $($pattern $(if $guard)? => $name),+ }
        }
    };
}

mod jobs;
mod local;
mod memory;
mod saves;
mod stored;
mod watch;

pub use jobs::job_messages;
pub use local::{answers, to_agent, to_launcher};
pub use memory::{
    MEMORY_ANSWERS, MEMORY_ASKS, memory_answer_name, memory_answers, memory_ask_name, memory_asks,
};
pub use stored::{durables, forgotten};
use watch::{held, saved, standing};

names!(message_name, MESSAGES, Message, {
    Message::Hello(_) => "hello",
    Message::Ping { .. } => "ping",
    Message::Pong { .. } => "pong",
    Message::Leaving { .. } => "leaving",
    Message::DrainAsk { .. } => "drain_ask",
    Message::Job { .. } => "job",
    Message::HelloAsk => "hello_ask",
});

names!(job_name, JOB_MESSAGES, JobMessage, {
    JobMessage::Ticket(_) => "job.ticket",
    JobMessage::TicketAck { wait: Wait::Forming { .. }, .. } => "job.ticket_ack.forming",
    JobMessage::TicketAck { wait: Wait::Batching { .. }, .. } => "job.ticket_ack.batching",
    JobMessage::TicketAck { wait: Wait::Spare { .. }, .. } => "job.ticket_ack.spare",
    JobMessage::TicketAck { wait: Wait::NoQuorum { .. }, .. } => "job.ticket_ack.no_quorum",
    JobMessage::TicketAck { wait: Wait::Unstored { .. }, .. } => "job.ticket_ack.unstored",
    JobMessage::TicketAck { wait: Wait::Parked { .. }, .. } => "job.ticket_ack.parked",
    JobMessage::TicketAck { wait: Wait::Elsewhere { .. }, .. } => "job.ticket_ack.elsewhere",
    JobMessage::TicketAck { wait: Wait::Changing, .. } => "job.ticket_ack.changing",
    JobMessage::TicketAck { wait: Wait::Orphan { .. }, .. } => "job.ticket_ack.orphan",
    JobMessage::TicketAck { wait: Wait::Held { .. }, .. } => "job.ticket_ack.held",
    JobMessage::TicketAck { wait: Wait::Finishing { .. }, .. } => "job.ticket_ack.finishing",
    JobMessage::TicketAck { wait: Wait::OtherSpec, .. } => "job.ticket_ack.other_spec",
    JobMessage::TicketRefused { .. } => "job.ticket_refused",
    JobMessage::Withdraw => "job.withdraw",
    JobMessage::Birth { .. } => "job.birth",
    JobMessage::BirthAccepted { .. } => "job.birth_accepted",
    JobMessage::BirthRefused { .. } => "job.birth_refused",
    JobMessage::BirthAbandoned { .. } => "job.birth_abandoned",
    JobMessage::ClaimBirth { .. } => "job.claim_birth",
    JobMessage::Prepare { .. } => "job.prepare",
    JobMessage::Promise { .. } => "job.promise",
    JobMessage::Accept { .. } => "job.accept",
    JobMessage::Accepted { .. } => "job.accepted",
    JobMessage::Rejected { .. } => "job.rejected",
    JobMessage::Decided { .. } => "job.decided",
    JobMessage::Follows { .. } => "job.follows",
    JobMessage::Ask { .. } => "job.ask",
    JobMessage::Status(_) => "job.status",
    JobMessage::Order(order) if matches!(order.action, Action::Run { .. }) => "job.order.run",
    JobMessage::Order(order) if matches!(order.action, Action::Preempt { .. }) => "job.order.preempt",
    JobMessage::Order(_) => "job.order.end",
    JobMessage::Stop(ToNode::Install { .. }) => "job.stop.install",
    JobMessage::Stop(ToNode::Confirm { .. }) => "job.stop.confirm",
    JobMessage::Stop(ToNode::Cancel { .. }) => "job.stop.cancel",
    JobMessage::Stop(ToNode::Ask { .. }) => "job.stop.ask",
    JobMessage::StopAnswer(ToLeader::Holds { .. }) => "job.stop_answer.holds",
    JobMessage::StopAnswer(ToLeader::Installed { .. }) => "job.stop_answer.installed",
    JobMessage::StopAnswer(ToLeader::Settled { .. }) => "job.stop_answer.settled",
    JobMessage::StopAnswer(ToLeader::Newer { .. }) => "job.stop_answer.newer",
    JobMessage::Commit { .. } => "job.commit",
    JobMessage::Committed { .. } => "job.committed",
    JobMessage::MergeAsk { .. } => "job.merge_ask",
    JobMessage::MergeGranted { .. } => "job.merge_granted",
    JobMessage::Forfeited { .. } => "job.forfeited",
    JobMessage::Changed { .. } => "job.changed",
    JobMessage::Failure { .. } => "job.failure",
    JobMessage::Continue { .. } => "job.continue",
    JobMessage::Superseded { .. } => "job.superseded",
    JobMessage::Look { .. } => "job.look",
    JobMessage::Standings { .. } => "job.standings",
    JobMessage::Hang { hang: Some(_), .. } => "job.hang.some",
    JobMessage::Hang { hang: None, .. } => "job.hang.none",
    JobMessage::CheckpointAsk { .. } => "job.checkpoint_ask",
    JobMessage::CancelAsk { .. } => "job.cancel_ask",
    JobMessage::CancelUnable { why: Unable::Newer, .. } => "job.cancel_unable.newer",
    JobMessage::CancelUnable { why: Unable::Misses { .. }, .. } => "job.cancel_unable.misses",
    JobMessage::Checkpoint { .. } => "job.checkpoint",
    JobMessage::Save(_) => "job.save",
    JobMessage::SaveAnswer(_) => "job.save_answer",
    JobMessage::Verified { .. } => "job.verified",
    JobMessage::SaveSaid { .. } => "job.save_said",
    JobMessage::LookAgain { .. } => "job.look_again",
    JobMessage::LookedAgain { .. } => "job.looked_again",
    JobMessage::LooksAgain { .. } => "job.looks_again",
    JobMessage::Unfit { .. } => "job.unfit",
    JobMessage::Held { .. } => "job.held",
    JobMessage::StatusHeard { .. } => "job.status_heard",
    JobMessage::SaveGivenUp { .. } => "job.save_given_up",
    JobMessage::Voters { .. } => "job.voters",
});

names!(to_agent_name, TO_AGENT, ToAgent, {
    ToAgent::Register(_) => "register",
    ToAgent::MasterPort { .. } => "master_port",
    ToAgent::Started { .. } => "started",
    ToAgent::StartFailed { .. } => "start_failed",
    ToAgent::Exited { .. } => "exited",
    ToAgent::Finished { .. } => "finished",
    ToAgent::Stopped { .. } => "stopped",
    ToAgent::StopInstalled { .. } => "stop_installed",
    ToAgent::TakesStopSteps { .. } => "takes_stop_steps",
    ToAgent::Leave { .. } => "leave",
    ToAgent::Cancel => "cancel",
    ToAgent::Query(Query::Lease { .. }) => "query.lease",
    ToAgent::Query(Query::Status) => "query.status",
    ToAgent::Query(Query::Nodes) => "query.nodes",
    ToAgent::Query(Query::Jobs) => "query.jobs",
    ToAgent::Query(Query::Events { .. }) => "query.events",
    ToAgent::Command(Command::Drain { .. }) => "command.drain",
    ToAgent::Command(Command::Cancel { .. }) => "command.cancel",
    ToAgent::Command(Command::Continue { .. }) => "command.continue",
    ToAgent::Store { answer: StoreAnswer::Found(_), .. } => "store.found",
    ToAgent::Store { answer: StoreAnswer::Absent, .. } => "store.absent",
    ToAgent::Store { answer: StoreAnswer::Won, .. } => "store.won",
    ToAgent::Store { answer: StoreAnswer::Exists, .. } => "store.exists",
    ToAgent::Store { answer: StoreAnswer::Beacon(_), .. } => "store.beacon",
    ToAgent::Store { answer: StoreAnswer::BeaconWritten, .. } => "store.beacon_written",
    ToAgent::Store { answer: StoreAnswer::Failed { .. }, .. } => "store.failed",
    ToAgent::Stalled { .. } => "stalled",
    ToAgent::Standings { .. } => "standings",
    ToAgent::Metrics { .. } => "metrics",
    ToAgent::Saved { .. } => "saved",
    ToAgent::Save(SaveNews::Slots { .. }) => "save.slots",
    ToAgent::Save(SaveNews::Filling { .. }) => "save.filling",
    ToAgent::Save(SaveNews::Sealed { .. }) => "save.sealed",
    ToAgent::Save(SaveNews::SlotsGone { .. }) => "save.slots_gone",
    ToAgent::Save(SaveNews::WorkerGone { .. }) => "save.worker_gone",
    ToAgent::Save(SaveNews::WorkerEnded { .. }) => "save.worker_ended",
    ToAgent::Save(SaveNews::Progress { .. }) => "save.progress",
    ToAgent::Save(SaveNews::Written { .. }) => "save.written",
    ToAgent::Save(SaveNews::WriteFailed { .. }) => "save.write_failed",
    ToAgent::Save(SaveNews::WriteStopped { .. }) => "save.write_stopped",
    ToAgent::Save(SaveNews::Held { .. }) => "save.held",
    ToAgent::Save(SaveNews::HoldFailed { .. }) => "save.hold_failed",
    ToAgent::Save(SaveNews::Assembled { .. }) => "save.assembled",
    ToAgent::Save(SaveNews::AssembleFailed { .. }) => "save.assemble_failed",
    ToAgent::Save(SaveNews::At { .. }) => "save.at",
    ToAgent::Save(SaveNews::Copied { .. }) => "save.copied",
    ToAgent::Save(SaveNews::Waits { .. }) => "save.waits",
    ToAgent::Save(SaveNews::Loaded { .. }) => "save.loaded",
    ToAgent::Save(SaveNews::Keep(KeepNews::Place { .. })) => "save.keep.place",
    ToAgent::Save(SaveNews::Keep(KeepNews::Looked { .. })) => "save.keep.looked",
    ToAgent::Save(SaveNews::Keep(KeepNews::Decided { .. })) => "save.keep.decided",
    ToAgent::Save(SaveNews::Keep(KeepNews::Failed { .. })) => "save.keep.failed",
    ToAgent::Save(SaveNews::Keep(KeepNews::Checked { .. })) => "save.keep.checked",
    ToAgent::Save(SaveNews::Keep(KeepNews::LookedAgain { .. })) => "save.keep.looked_again",
    ToAgent::Save(SaveNews::Keep(KeepNews::LooksAgain { .. })) => "save.keep.looks_again",
    ToAgent::Save(SaveNews::Keep(KeepNews::Rules(_))) => "save.keep.rules",
    ToAgent::Save(SaveNews::Replicas(_)) => "save.replicas",
    ToAgent::Alive => "alive",
    ToAgent::Command(Command::Checkpoint { .. }) => "command.checkpoint",
    ToAgent::Command(Command::Ended { .. }) => "command.ended",
});

names!(to_launcher_name, TO_LAUNCHER, ToLauncher, {
    ToLauncher::Welcome { .. } => "welcome",
    ToLauncher::Refused { .. } => "refused",
    ToLauncher::Waiting { .. } => "waiting",
    ToLauncher::Life { .. } => "life",
    ToLauncher::Start(_) => "start",
    ToLauncher::Stop { .. } => "stop",
    ToLauncher::Preempt { .. } => "preempt",
    ToLauncher::InstallStop { .. } => "install_stop",
    ToLauncher::ConfirmStop { .. } => "confirm_stop",
    ToLauncher::CancelStop { .. } => "cancel_stop",
    ToLauncher::End { .. } => "end",
    ToLauncher::Store { ask: StoreAsk::Read { .. }, .. } => "store.read",
    ToLauncher::Store { ask: StoreAsk::Create { .. }, .. } => "store.create",
    ToLauncher::Store { ask: StoreAsk::WriteBeacon { .. }, .. } => "store.write_beacon",
    ToLauncher::Store { ask: StoreAsk::ReadBeacon, .. } => "store.read_beacon",
    ToLauncher::Failed { .. } => "failed",
    ToLauncher::Look { .. } => "look",
    ToLauncher::Hung { .. } => "hung",
    ToLauncher::Save(SaveAsk::Write { .. }) => "save.write",
    ToLauncher::Save(SaveAsk::StopWrite { .. }) => "save.stop_write",
    ToLauncher::Save(SaveAsk::Free { .. }) => "save.free",
    ToLauncher::Save(SaveAsk::Refuse { .. }) => "save.refuse",
    ToLauncher::Save(SaveAsk::Hold { .. }) => "save.hold",
    ToLauncher::Save(SaveAsk::Delete { .. }) => "save.delete",
    ToLauncher::Save(SaveAsk::Assemble { .. }) => "save.assemble",
    ToLauncher::Save(SaveAsk::Skip { .. }) => "save.skip",
    ToLauncher::Save(SaveAsk::Go { .. }) => "save.go",
    ToLauncher::Save(SaveAsk::Tell { .. }) => "save.tell",
    ToLauncher::Save(SaveAsk::Committed { .. }) => "save.committed",
    ToLauncher::Save(SaveAsk::Review(_)) => "save.review",
    ToLauncher::Save(SaveAsk::LookAgain(_)) => "save.look_again",
    ToLauncher::Save(SaveAsk::Inherit { .. }) => "save.inherit",
});

names!(answer_name, ANSWERS, Answer, {
    Answer::Json(_) => "json",
    Answer::Error(_) => "error",
    Answer::Part(_) => "part",
});

names!(entry_name, ENTRIES, Body, {
    Body::Claim(_) => "claim",
    Body::Commit(_) => "commit",
    Body::Retire { .. } => "retire",
    Body::Reject { .. } => "reject",
    Body::Pin { .. } => "pin",
    Body::Unpin { .. } => "unpin",
    Body::Rules(_) => "rules",
    Body::Snapshot(_) => "snapshot",
});

pub fn key() -> JobKey {
    JobKey {
        cluster: "gold".into(),
        owner: "1000".into(),
        id: "digits".into(),
    }
}

fn digest(n: u8) -> Digest {
    Digest([n; 32])
}

fn node(n: u8) -> NodeId {
    NodeId([n; 32])
}

fn member(n: u8) -> Member {
    Member {
        node: node(n),
        state: StateId([n; 8]),
        launcher: LauncherId([n + 100; 8]),
        slots: 2,
        guard: SocketAddr::from(([10, 0, 0, n], 7001)),
        place: Place {
            zone: [1, 2],
            switch: [3, n],
        },
    }
}

fn ballot() -> Ballot {
    Ballot {
        round: 3,
        node: node(2),
        boot: Boot(9),
    }
}

fn commit() -> CommitRef {
    CommitRef {
        generation: digest(5),
        number: 7,
        step: 1_200,
        manifest: digest(6),
    }
}

pub fn record(kind: Kind, cause: Cause, arbiter: Arbiter) -> Record {
    let trains = !kind.is_terminal();
    Record {
        key: key(),
        birth: digest(4),
        number: 3,
        parent: digest(5),
        kind,
        members: if trains {
            vec![member(1), member(2)]
        } else {
            Vec::new()
        },
        witnesses: if trains {
            vec![Voter {
                node: node(3),
                state: StateId([3; 8]),
            }]
        } else {
            Vec::new()
        },
        arbiter,
        spec: JobSpec {
            min_nodes: 1,
            max_nodes: 4,
            max_restarts: 3,
            triggers: saves::triggers(),
            ..JobSpec::default()
        },
        restarts_used: 1,
        cause,
        restore: Some(commit()),
        nonce: 42,
    }
}

/// A record of every kind and cause, and of both arbiters.
pub fn records() -> Vec<Arc<Record>> {
    let list = || vec![node(1), node(2)];
    let causes = [
        Cause::Formed,
        Cause::NodesLost { nodes: list() },
        Cause::NodesLeft { nodes: list() },
        Cause::NodesJoined { nodes: list() },
        Cause::LinksLost { nodes: list() },
        Cause::StartFailed { nodes: list() },
        Cause::WorkerFailed {
            node: node(1),
            rank: 3,
            code: 139,
        },
        Cause::Merged { other: digest(9) },
        Cause::Finished,
        Cause::Cancelled,
        Cause::Continued { nodes: list() },
        Cause::WorkerHung {
            node: node(1),
            rank: 3,
            code: 137,
        },
        Cause::Damaged {
            node: node(1),
            rank: 3,
            step: 400,
        },
    ];
    let kinds = [
        Kind::End { cancelled: false },
        Kind::End { cancelled: true },
        Kind::Failed { code: 139 },
        Kind::Dormant,
        Kind::Tombstone { winner: digest(9) },
    ];
    let store = Arbiter::Store(StoreUuid([8; 16]));
    let trains = causes
        .into_iter()
        .map(|cause| record(Kind::Next, cause, Arbiter::Members));
    let ends = kinds
        .into_iter()
        .map(|kind| record(kind, Cause::Finished, store));
    let misread = Cause::Misread {
        nodes: list(),
        step: 400,
    };
    let resumed = Cause::Resumed { nodes: list() };
    let leases = Cause::LeasesLost { nodes: list() };
    // Behind the others, which keep their numbers.
    let later = [misread, resumed, leases].map(|cause| record(Kind::Next, cause, store));
    let all = trains.chain(ends).chain(later).map(Arc::new);
    all.chain([other_voters()]).collect()
}

/// A generation that goes on with another witness.
fn other_voters() -> Arc<Record> {
    let kind = Kind::Voters {
        generation: digest(5),
        change: 2,
    };
    Arc::new(record(kind, Cause::Formed, Arbiter::Members))
}

fn advert() -> Advert {
    Advert {
        deserted: false,
        left_behind: false,
        started: true,
        unresponsive: true,
        key: key(),
        lineage: digest(4),
        digest: digest(5),
        number: 2,
        leader: Some(node(1)),
        belongs: true,
    }
}

fn exit() -> WorkerExit {
    WorkerExit {
        rank: 3,
        local_rank: 1,
        pid: 4711,
        code: 139,
        signal: Some(11),
        hung: true,
        out_of_memory: Some(true),
        damaged: Some(Damaged {
            manifest: digest(7),
            why: "n0-0.safetensors is not there".into(),
            here: false,
        }),
        at_ms: 1_700_000_000_123,
        tail: "Segmentation fault\n".into(),
    }
}

pub fn messages() -> Vec<Message> {
    let reason = String::from("maintenance");
    let mut all = vec![
        Message::Hello(Hello {
            host: "node1".into(),
            version: "0.1.0".into(),
            state: StateId([1; 8]),
            home: Home([6; 8]),
            boot: Boot(9),
            timeouts: Timeouts {
                suspect_after: Span::from_secs(2),
                agent_grace: Span::from_secs(30),
            },
            unstored: Some(28),
            embedded: true,
            jobs: vec![advert()],
        }),
        Message::Ping {
            seq: 300,
            leases: vec![digest(5)],
        },
        Message::Pong {
            seq: 300,
            granted: vec![digest(5)],
        },
        Message::Leaving {
            grace_ms: 30_000,
            reason: reason.clone(),
        },
        Message::DrainAsk {
            grace_ms: 30_000,
            reason,
        },
        Message::HelloAsk,
    ];
    all.extend(job_messages().into_iter().map(|body| Message::Job {
        key: key(),
        body: Box::new(body),
    }));
    all
}

pub fn entries() -> Vec<Entry> {
    let store = Arbiter::Store(StoreUuid([8; 16]));
    let bodies = [
        Body::Claim(Box::new(record(Kind::Next, Cause::Formed, store))),
        Body::Commit(commit()),
        Body::Retire { seq: 2, good: None },
        Body::Reject {
            seq: 2,
            reason: "checksum of shard 3".into(),
        },
        Body::Pin { seq: 2 },
        Body::Unpin { seq: 2 },
        Body::Rules(saves::rules()),
        Body::Retire {
            seq: 2,
            good: Some([3, 4]),
        },
        Body::Snapshot(Box::new(snapshot(store))),
    ];
    let bodies = bodies.into_iter().enumerate();
    bodies
        .map(|(i, body)| Entry {
            seq: i as u64 + 1,
            prev: if i == 0 {
                Digest::ZERO
            } else {
                digest(i as u8)
            },
            writer: node(1),
            nonce: 77,
            body,
        })
        .collect()
}

fn snapshot(store: Arbiter) -> Snapshot {
    let claim = record(Kind::Next, Cause::Formed, store);
    let standing = |seq| Standing {
        seq,
        commit: commit(),
        pinned: false,
        retired: None,
        rejected: None,
    };
    Snapshot {
        claims: vec![(1, digest(4)), (3, claim.digest())],
        claim,
        last_number: 9,
        commits: vec![
            Standing {
                retired: Some(6),
                ..standing(2)
            },
            Standing {
                rejected: Some("checksum of shard 3".into()),
                ..standing(4)
            },
            Standing {
                pinned: true,
                ..standing(5)
            },
        ],
        rules: Some(saves::rules()),
    }
}

/// The lines of a golden file: a name and the bytes in hexadecimal.
pub fn parse(text: &str) -> BTreeMap<String, Vec<u8>> {
    text.lines()
        .filter(|l| !l.starts_with('#'))
        .filter_map(|l| l.split_once(' '))
        .filter_map(|(name, hex)| Some((name.to_owned(), crate::sim::log::unhex(hex)?)))
        .collect()
}
