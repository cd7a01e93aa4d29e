//! Samples of what an agent, its launchers and the command line say to each other.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use muster_protocol::control::report::{Metrics, RankMetrics};
use muster_protocol::local::{
    Answer, Began, Command, Part, Query, Register, Start, StoreAnswer, StoreAsk, ToAgent,
    ToLauncher,
};
use muster_protocol::memory::{Key, Peer, Peers};
use muster_protocol::record::{Arbiter, Cause, Kind, Place};
use muster_protocol::spec::JobSpec;
use muster_protocol::{LauncherId, StoreUuid, Time};

use super::{digest, exit, held, node, saved, standing};

pub fn to_agent() -> Vec<ToAgent> {
    let digest = digest(5);
    vec![
        ToAgent::Register(Register {
            launcher: LauncherId([101; 8]),
            job: "digits".into(),
            spec: JobSpec::default(),
            slots: 2,
            guard_port: 7001,
            addrs: vec![
                IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)),
                IpAddr::from([0xfd; 16]),
            ],
            place: Place::default(),
            running: Some(digest),
            waited_ms: 2_500,
            began: Some(Box::new(Began {
                lineage: digest,
                digest,
            })),
            lineage: Some(digest),
            gate: Some(held()),
            store: Some(StoreUuid([8; 16])),
            parity: 3,
            pid: 4711,
            command: "python train.py".into(),
            log_dir: Some("/tmp/logs".into()),
        }),
        ToAgent::MasterPort { port: 29_500 },
        ToAgent::Started { digest, attempt: 1 },
        ToAgent::StartFailed {
            digest,
            attempt: 1,
            reason: "no such file".into(),
        },
        ToAgent::Exited {
            digest,
            exit: exit(),
        },
        ToAgent::Finished { digest },
        ToAgent::Stopped { digest },
        ToAgent::StopInstalled {
            digest,
            barrier: 2,
            step: 400,
        },
        ToAgent::TakesStopSteps { digest, yes: true },
        ToAgent::Leave { grace_ms: 30_000 },
        ToAgent::Cancel,
        ToAgent::Query(Query::Lease {
            launcher: LauncherId([3; 8]),
        }),
        ToAgent::Query(Query::Status),
        ToAgent::Query(Query::Nodes),
        ToAgent::Query(Query::Jobs),
        ToAgent::Query(Query::Events {
            job: "digits".into(),
            after: 12,
        }),
        ToAgent::Command(Command::Drain {
            node: "node2".into(),
            grace_ms: 30_000,
        }),
        ToAgent::Command(Command::Cancel {
            job: "digits".into(),
            given: Time(1_700_000_000),
        }),
        ToAgent::Command(Command::Continue {
            job: "digits".into(),
            dead: vec!["node3".into()],
            confirmed: true,
        }),
        to_store(StoreAnswer::Found(part())),
        to_store(StoreAnswer::Absent),
        to_store(StoreAnswer::Won),
        to_store(StoreAnswer::Exists),
        to_store(StoreAnswer::Beacon(Some(7))),
        to_store(StoreAnswer::BeaconWritten),
        to_store(StoreAnswer::failed("no space left".into())),
        ToAgent::Command(Command::Checkpoint {
            job: "digits".into(),
        }),
        ToAgent::Saved {
            digest,
            saved: saved(),
        },
        ToAgent::Stalled { digest, yes: true },
        ToAgent::Standings {
            digest,
            number: 2,
            list: vec![standing()],
        },
        ToAgent::Metrics {
            digest,
            first: true,
            ranks: vec![RankMetrics {
                rank: 3,
                words: Metrics {
                    steps: 400,
                    world: 4,
                    training_loss: 0.25,
                    ..Metrics::default()
                }
                .encode(),
            }],
        },
        ToAgent::Command(Command::Ended {
            job: "digits".into(),
            record: Box::new(super::record(
                Kind::End { cancelled: true },
                Cause::Cancelled,
                Arbiter::Store(StoreUuid([4; 16])),
            )),
        }),
        ToAgent::Alive,
    ]
    .into_iter()
    .chain(super::saves::news().into_iter().map(ToAgent::Save))
    .collect()
}

fn to_store(answer: StoreAnswer) -> ToAgent {
    ToAgent::Store { id: 9, answer }
}

fn part() -> Part {
    Part {
        bytes: b"{}".to_vec(),
        last: true,
    }
}

pub fn to_launcher() -> Vec<ToLauncher> {
    let digest = digest(5);
    let why = || String::from("node3 was lost");
    vec![
        ToLauncher::Welcome {
            node: node(1),
            agent_pid: 99,
            agent_grace_ms: 10_000,
            lease_ms: 1_500,
        },
        ToLauncher::Refused {
            reason: "other flags".into(),
        },
        ToLauncher::Waiting {
            text: "waiting for 1 more of 2 nodes".into(),
        },
        ToLauncher::Life {
            lineage: Some(digest),
        },
        ToLauncher::Start(Start {
            digest,
            lineage: digest,
            attempt: 1,
            number: 3,
            node_rank: 1,
            nodes: 2,
            first_rank: 2,
            slots: 2,
            world: 4,
            master: SocketAddr::from(([10, 0, 0, 1], 29_500)),
            master_guard: SocketAddr::from(([10, 0, 0, 1], 7001)),
            master_launcher: LauncherId([101; 8]),
            restart_count: 2,
            restore: Some(digest),
            peers: Box::new(Peers {
                key: Key::of_cluster(Some(b"secret")),
                others: vec![Peer {
                    launcher: LauncherId([6; 8]),
                    guard: SocketAddr::from(([10, 0, 0, 1], 7001)),
                }],
                group: vec![Peer {
                    launcher: LauncherId([7; 8]),
                    guard: SocketAddr::from(([10, 0, 0, 2], 7002)),
                }],
                committed: Some((digest, 400)),
            }),
            why: why(),
        }),
        ToLauncher::Stop {
            digest,
            grace_ms: 200,
            why: why(),
        },
        ToLauncher::Preempt {
            digest,
            signal: 15,
            grace_ms: 30_000,
            why: why(),
        },
        ToLauncher::InstallStop {
            digest,
            barrier: 2,
            step: 400,
            grace_ms: 29_000,
            reason: muster_protocol::control::Reason::Drain,
        },
        ToLauncher::ConfirmStop {
            digest,
            barrier: 2,
            step: 400,
            reason: muster_protocol::control::Reason::Drain,
        },
        ToLauncher::CancelStop { digest, barrier: 2 },
        ToLauncher::End {
            code: 139,
            report: "rank 3 on node2 failed with signal 11".into(),
        },
        asks(StoreAsk::Read { slot: 3 }),
        asks(StoreAsk::Create {
            slot: 3,
            part: part(),
        }),
        asks(StoreAsk::WriteBeacon { value: 7 }),
        asks(StoreAsk::ReadBeacon),
        ToLauncher::Failed {
            node: "node2".into(),
            exit: exit(),
        },
        ToLauncher::Look { digest, number: 2 },
        ToLauncher::Hung {
            digest,
            text: "hung: no progress for 61.0 s".into(),
            ranks: vec![3],
        },
    ]
    .into_iter()
    .chain(super::saves::asks().into_iter().map(ToLauncher::Save))
    .collect()
}

fn asks(ask: StoreAsk) -> ToLauncher {
    ToLauncher::Store { id: 9, ask }
}

pub fn answers() -> Vec<Answer> {
    vec![
        Answer::Json("{\"jobs\":[]}".into()),
        Answer::Error("no such job".into()),
        Answer::Part("[1,2]".into()),
    ]
}
