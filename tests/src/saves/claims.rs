//! Records for the log.

use std::net::{Ipv4Addr, SocketAddr};

use muster_protocol::record::{Arbiter, Cause, Kind, Member, Place, Record};
use muster_protocol::spec::JobSpec;
use muster_protocol::{Digest, JobKey, LauncherId, NodeId, StateId, StoreUuid};

pub(super) const STORE: StoreUuid = StoreUuid([7; 16]);

pub(super) fn node_id(index: usize) -> NodeId {
    NodeId([index as u8 + 1; 32])
}

pub(super) fn key() -> JobKey {
    JobKey {
        cluster: "c".into(),
        owner: "0".into(),
        id: "job".into(),
    }
}

/// A generation of these nodes after `parent`, or a birth. The log sets the commit that it restores.
pub(super) fn record(parent: Option<&Record>, members: &[(usize, u16)], nonce: u64) -> Record {
    let member = |(index, slots): &(usize, u16)| Member {
        node: node_id(*index),
        state: StateId([*index as u8 + 1; 8]),
        launcher: LauncherId([*index as u8 + 1; 8]),
        slots: *slots,
        guard: SocketAddr::from((Ipv4Addr::LOCALHOST, 1000 + *index as u16)),
        place: Place::default(),
    };
    Record {
        key: key(),
        birth: parent.map_or(Digest::ZERO, Record::lineage),
        number: parent.map_or(1, |p| p.number + 1),
        parent: parent.map_or(Digest::ZERO, Record::digest),
        kind: Kind::Next,
        members: members.iter().map(member).collect(),
        witnesses: Vec::new(),
        arbiter: Arbiter::Store(STORE),
        spec: JobSpec::default(),
        restarts_used: 0,
        cause: Cause::Formed,
        restore: None,
        nonce,
    }
}
