//! An agent and a launcher as the tests of a few cores configure them.

use std::net::IpAddr;

use muster_protocol::agent::{Config, Flaws};
use muster_protocol::local::Register;
use muster_protocol::record::Place;
use muster_protocol::spec::JobSpec;
use muster_protocol::storelog::Compaction;
use muster_protocol::{Boot, Home, LauncherId, NodeId, Span, StateId};

/// Node `i` of 255 at most (beyond, set `node` and `state`), in its first boot, with the times that agents keep by
/// default.
pub fn config(i: usize) -> Config {
    let tag = (i as u8).wrapping_add(1);
    Config {
        node: NodeId([tag; 32]),
        state: StateId([tag; 8]),
        boot: Boot(1),
        cluster: "c".into(),
        host: format!("h{i}"),
        version: "1".into(),
        pid: 1,
        home: Home::ZERO,
        seed: i as u64,
        suspect_after: Span::from_secs(2),
        agent_grace: Span::from_secs(10),
        birth_timeout: Span::from_secs(4),
        start_timeout: Span::from_secs(10),
        minority_wait: Span::from_secs(6),
        orphan_after: Span::from_secs(12),
        one_host: false,
        slot_memory: u64::MAX,
        slot_lease: Span::from_secs(600),
        embedded: false,
        place: Place::default(),
        memory: muster_protocol::memory::Key::default(),
        compaction: Compaction::default(),
        flaws: Flaws::default(),
    }
}

/// A launcher that is reached at `addr`, with one worker and without a store, and runs nothing yet.
pub fn register(launcher: LauncherId, job: &str, spec: JobSpec, addr: IpAddr) -> Register {
    Register {
        launcher,
        job: job.into(),
        spec,
        slots: 1,
        guard_port: 7,
        addrs: vec![addr],
        place: Place::default(),
        running: None,
        waited_ms: 0,
        began: None,
        lineage: None,
        gate: None,
        store: None,
        parity: 0,
        pid: 1,
        command: String::new(),
        log_dir: None,
    }
}
