//! Leader and nodes with each other, and each by itself where only its own word counts.

mod floor;
mod leader;
mod node;
mod pure;

use super::*;
use crate::ids::{JobKey, LauncherId, NodeId, StateId};
use crate::record::{Arbiter, Kind, Member, Place, Record};
use crate::spec::JobSpec;
use crate::time::{Span, Time};

const BYTES: u64 = 1_000;

fn at(ms: u64) -> Time {
    Time::ZERO + Span::from_millis(ms)
}

fn id(n: u8) -> NodeId {
    NodeId([n; 32])
}

/// Nodes 1 and 2, of two ranks and of one.
fn record() -> Record {
    let member = |(n, slots): (u8, u16)| Member {
        node: id(n),
        state: StateId([n; 8]),
        launcher: LauncherId([n; 8]),
        slots,
        guard: std::net::SocketAddr::from(([127, 0, 0, 1], 1)),
        place: Place::default(),
    };
    Record {
        key: JobKey {
            cluster: "c".into(),
            owner: "0".into(),
            id: "j".into(),
        },
        birth: Digest::ZERO,
        number: 1,
        parent: Digest::ZERO,
        kind: Kind::Next,
        members: [(1, 2), (2, 1)].map(member).into(),
        witnesses: Vec::new(),
        arbiter: Arbiter::Members,
        spec: JobSpec::default(),
        restarts_used: 0,
        cause: crate::record::Cause::Formed,
        restore: None,
        nonce: 0,
    }
}

fn settings(first: u32, ranks: u16) -> Settings {
    Settings {
        index: 0,
        first,
        ranks,
        busy: Busy::Wait,
        budget: 10 * BYTES,
        lease: Span::from_secs(10),
        flaws: Flaws::default(),
    }
}

fn slot(k: u16, side: u8) -> SlotId {
    SlotId { k, side }
}

fn copy(step: u64) -> Copy {
    Copy {
        generation: record().digest(),
        step,
        bytes: BYTES,
        digest: Digest([9; 32]),
    }
}

/// Takes all effects.
fn drain<T>(mut poll: impl FnMut() -> Option<T>) -> Vec<T> {
    std::iter::from_fn(&mut poll).collect()
}
