//! One sample of every message about a job.

use super::*;

fn waits() -> Vec<Wait> {
    vec![
        Wait::Forming {
            have: 1,
            min: 2,
            max: 4,
            who: vec![node(1)],
        },
        Wait::Batching { have: 2, max: 4 },
        Wait::Spare { max: 4 },
        Wait::NoQuorum {
            missing: vec![node(2)],
        },
        Wait::Unstored {
            nodes: vec![node(2)],
        },
        Wait::Parked { ms: 1_500 },
        Wait::Elsewhere { advert: advert() },
        Wait::Changing,
        Wait::Orphan { ms: 31_500 },
        Wait::Finishing {
            nodes: vec![node(2)],
        },
        Wait::Held {
            have: 3,
            ms: 28_250,
        },
        Wait::OtherSpec,
    ]
}

fn order(action: Action) -> JobMessage {
    JobMessage::Order(Box::new(Order {
        digest: digest(5),
        boot: Boot(9),
        seq: 17,
        action,
    }))
}

pub fn job_messages() -> Vec<JobMessage> {
    let (parent, lineage) = (digest(5), digest(4));
    let record = || Arc::new(record(Kind::Next, Cause::Formed, Arbiter::Members));
    let mut all = vec![
        JobMessage::Ticket(Box::new(Ticket {
            member: member(2),
            spec: JobSpec::default(),
            knows: digest(5),
            store: Some(StoreUuid([8; 16])),
            host: "node2".into(),
            command: "python train.py".into(),
            held_ms: 1_500,
            waited_ms: 2_500,
            unreachable: vec![node(3)],
        })),
        JobMessage::Voters {
            generation: record(),
            record: super::other_voters(),
        },
        JobMessage::TicketRefused {
            launcher: LauncherId([102; 8]),
            why: "other flags".into(),
        },
        JobMessage::Withdraw,
        JobMessage::Birth { record: record() },
        JobMessage::BirthAccepted { lineage },
        JobMessage::BirthRefused {
            lineage,
            bound: digest(9),
        },
        JobMessage::BirthAbandoned { lineage },
        JobMessage::ClaimBirth { record: record() },
        JobMessage::Prepare {
            parent,
            ballot: ballot(),
        },
        JobMessage::Promise {
            parent,
            ballot: ballot(),
            accepted: Some((Ballot::default(), record())),
            acked: Some(commit()),
        },
        JobMessage::Accept {
            parent,
            ballot: ballot(),
            record: record(),
        },
        JobMessage::Accepted {
            parent,
            ballot: ballot(),
            grants: vec![Grant {
                node: node(3),
                left_ms: 250,
            }],
        },
        JobMessage::Rejected {
            parent,
            promised: ballot(),
        },
        JobMessage::Ask { have: digest(5) },
        JobMessage::Status(Box::new(Status {
            digest: digest(5),
            boot: Boot(9),
            seq: 17,
            started: Some(1),
            start_failed: Some((1, "no such file".into())),
            stopped: true,
            finished: false,
            exit: Some(exit()),
            gone: false,
            leave: Some(Leave {
                grace_ms: 30_000,
                reason: "spot notice".into(),
            }),
            cancel: false,
            unreachable: vec![node(3)],
            takes_stop_steps: true,
            storeless: true,
            lease_lost: false,
            knows_times: true,
            stalled: true,
            heard_hang: 2,
            saved: Some(saved()),
            gate: Some(2),
            loaded: true,
            verified: true,
            pace: saves::pace(),
            unresponsive: true,
        })),
        order(Action::Run {
            attempt: 1,
            master_port: 29_500,
            restart_count: 2,
            why: "node3 was lost".into(),
        }),
        order(Action::Preempt {
            signal: 15,
            grace_ms: 30_000,
            why: "node3 leaves".into(),
        }),
        order(Action::End {
            grace_ms: 200,
            why: "node3 was lost".into(),
        }),
        JobMessage::Stop(ToNode::Install {
            digest: digest(5),
            barrier: 2,
            step: 400,
            grace_ms: 29_000,
            reason: muster_protocol::control::Reason::Drain,
        }),
        JobMessage::Stop(ToNode::Confirm {
            digest: digest(5),
            barrier: 2,
            step: 400,
            reason: muster_protocol::control::Reason::Drain,
        }),
        JobMessage::Stop(ToNode::Cancel {
            digest: digest(5),
            barrier: 2,
        }),
        JobMessage::Stop(ToNode::Ask {
            digest: digest(5),
            barrier: 3,
        }),
        JobMessage::StopAnswer(ToLeader::Holds {
            digest: digest(5),
            barrier: 3,
            held: Some(held()),
        }),
        JobMessage::StopAnswer(ToLeader::Holds {
            digest: digest(5),
            barrier: 3,
            held: None,
        }),
        JobMessage::StopAnswer(ToLeader::Installed {
            digest: digest(5),
            barrier: 2,
            step: 400,
        }),
        JobMessage::StopAnswer(ToLeader::Settled {
            digest: digest(5),
            barrier: 2,
        }),
        JobMessage::StopAnswer(ToLeader::Newer {
            digest: digest(5),
            barrier: 3,
        }),
        JobMessage::Commit {
            commit: commit(),
            vote: parent,
        },
        JobMessage::Committed { commit: commit() },
        JobMessage::MergeAsk {
            loser: digest(9),
            stuck: true,
        },
        JobMessage::MergeGranted {
            loser: digest(9),
            winner: digest(4),
        },
        JobMessage::Forfeited { parent: digest(6) },
        JobMessage::StatusHeard {
            digest: digest(5),
            boot: Boot(9),
            seq: 300,
        },
        JobMessage::Changed {
            digest: digest(5),
            phases: Phases {
                fault: Time(1_000_000),
                detected: Time(2_000_000),
                decided: Time(3_000_000),
                stopped: Time(4_000_000),
                started: Time(5_000_000),
            },
        },
        JobMessage::Continue {
            parent,
            without: vec![node(3)],
        },
        JobMessage::Superseded { lineage, up_to: 3 },
        JobMessage::Failure {
            digest: digest(5),
            node: node(2),
            exit: Box::new(exit()),
        },
    ];
    all.extend(watch::job_messages());
    all.extend(saves::job_messages());
    let end = records().into_iter().rfind(|r| r.kind.is_terminal());
    all.extend(end.map(|record| JobMessage::Follows {
        have: digest(9),
        record,
    }));
    all.extend(waits().into_iter().map(|wait| JobMessage::TicketAck {
        launcher: LauncherId([102; 8]),
        lineage: Digest([0x17; 32]),
        wait,
    }));
    // A change of voters has a message of its own.
    let generations = records().into_iter();
    let generations = generations.filter(|r| r.change_of_voters() == 0);
    all.extend(generations.map(|record| JobMessage::Decided { record }));
    all
}
