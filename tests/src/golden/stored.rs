//! Samples of what an agent stores.

use std::sync::Arc;

use muster_protocol::checkpoint::{LeaderState, NodeState, Outcome, Save, Written};
use muster_protocol::job::{Continues, Durable, Saved};
use muster_protocol::paxos::Acceptor;
use muster_protocol::record::{Arbiter, Cause, Kind};
use muster_protocol::wire::Timeouts;
use muster_protocol::{Boot, Digest, LauncherId, Span, Time};

use super::{ballot, commit, digest, key, node, record};

/// A job's state with something in every part, and one with nothing in any.
pub fn durables() -> Vec<Durable> {
    let trains = |cause| Arc::new(record(Kind::Next, cause, Arbiter::Members));
    let save = Save {
        generation: digest(5),
        attempt: 3,
        step: 400,
    };
    let whole = Durable {
        key: key(),
        head: Some(trains(Cause::Formed)),
        ended: vec![Arc::new(record(
            Kind::Failed { code: 139 },
            Cause::Finished,
            Arbiter::Members,
        ))],
        forfeited: vec![(digest(10), 2)],
        learned: Boot(9),
        bound: Some(trains(Cause::Merged { other: digest(9) })),
        acceptor: Acceptor {
            promised: ballot(),
            accepted: Some((
                ballot(),
                trains(Cause::NodesLost {
                    nodes: vec![node(2)],
                }),
            )),
            acked: Some(commit()),
        },
        sent: Some(commit()),
        superseded: vec![(digest(11), u64::MAX)],
        continues: Some(Continues {
            parent: digest(5),
            without: vec![node(3)],
            launcher: Some(LauncherId([101; 8])),
        }),
        saves: Saved {
            node: NodeState {
                prepared: Some((
                    save,
                    vec![Written {
                        rank: 2,
                        bytes: 1 << 30,
                        summary: vec![0xa5; 32],
                    }],
                )),
            },
            leader: LeaderState {
                save,
                over: Some(Outcome::Committed),
                keep: Some(300),
                manifest: Some(digest(7)),
                resumed: 2,
            },
        },
        past: vec![(digest(12), 4)],
        held_ms: 2_000,
        adopted: Some(Time(1_700_000_000)),
        timeouts: Timeouts {
            suspect_after: Span::from_secs(2),
            agent_grace: Span::from_secs(30),
        },
        held_from: Some(Time(1_600_000_000)),
        voters: Some(super::other_voters()),
        held_for: vec![(node(3), 1_500)],
    };
    vec![whole, Durable::new(key())]
}

/// Lineages of forgotten jobs.
pub fn forgotten() -> Vec<(Digest, u64, bool)> {
    vec![(digest(12), 4, true), (digest(13), 300, false)]
}
