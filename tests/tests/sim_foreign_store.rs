//! Two users, one store, one job id: whoever comes second is told to take another name.

#![expect(clippy::expect_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::{IpAddr, Ipv4Addr};

use muster_protocol::agent::{Agent, ConnId, Effect, Event};
use muster_protocol::local::{Register, ToAgent, ToLauncher};
use muster_protocol::record::Place;
use muster_protocol::spec::JobSpec;
use muster_protocol::storelog::{self, CreateOutcome, ReadOutcome};
use muster_protocol::{LauncherId, Span, StoreUuid, Time};
use muster_tests::usual;

/// Steps of an agent at most until its launcher is told what is waited for.
const STEPS: usize = 10_000;

fn answer(effect: storelog::Effect, store: &mut BTreeMap<u64, Vec<u8>>) -> storelog::Event {
    match effect {
        storelog::Effect::Read { op, slot } => storelog::Event::Read {
            op,
            slot,
            outcome: match store.get(&slot) {
                Some(bytes) => ReadOutcome::Found(bytes.clone()),
                None => ReadOutcome::Absent,
            },
        },
        storelog::Effect::Create { op, slot, bytes } => storelog::Event::Created {
            op,
            slot,
            outcome: match store.entry(slot) {
                Entry::Occupied(_) => CreateOutcome::Exists,
                Entry::Vacant(place) => {
                    place.insert(bytes);
                    CreateOutcome::Won
                }
            },
        },
    }
}

/// Starts a job of one node for this owner, on a node of its own; what decides it for its launcher:
/// a start, or a refusal.
fn run(owner: u8, store: &mut BTreeMap<u64, Vec<u8>>) -> ToLauncher {
    let mut now = Time::ZERO + Span::from_secs(1);
    let config = usual::config(owner.into());
    let here = IpAddr::V4(Ipv4Addr::LOCALHOST);
    let register = Register {
        launcher: LauncherId([owner; 8]),
        job: "job".into(),
        spec: JobSpec::default(),
        slots: 1,
        guard_port: 7,
        addrs: vec![here],
        place: Place::default(),
        running: None,
        waited_ms: 0,
        began: None,
        lineage: None,
        gate: None,
        store: Some(StoreUuid([5; 16])),
        parity: 0,
        pid: 1,
        command: String::new(),
        log_dir: None,
    };
    let mut agent = Agent::new(config, Vec::new(), now).expect("nothing stored");
    let frame = |frame| Event::Launcher {
        conn: ConnId(1),
        owner: owner.to_string(),
        frame,
    };
    let mut events = vec![
        frame(ToAgent::MasterPort { port: 9 }),
        frame(ToAgent::Register(register)),
    ];
    for _ in 0..STEPS {
        match events.pop() {
            Some(event) => agent.handle(event, now).expect("taken"),
            None => {
                let due = agent.poll_timeout().map_or(now, |(at, _)| at);
                now = now.max(due);
                agent.handle_timeout(now);
            }
        }
        while let Some(effect) = agent.poll_effect() {
            match effect {
                Effect::Persist { key, .. } => events.insert(0, Event::Persisted { key }),
                Effect::Store { key, effect } => {
                    let event = answer(effect, store);
                    events.insert(0, Event::Store { key, event });
                }
                Effect::ToLauncher { frame, .. } => match frame {
                    ToLauncher::Start(_) | ToLauncher::Refused { .. } => return frame,
                    _ => {}
                },
                _ => {}
            }
        }
    }
    unreachable!("owner {owner} is neither started nor refused");
}

#[test]
fn a_log_of_another_owner_refuses_the_job_naming_another_id() {
    let mut store = BTreeMap::new();
    let first = run(3, &mut store);
    assert!(matches!(first, ToLauncher::Start(_)), "{first:?}");
    let log = store.clone();
    let ToLauncher::Refused { reason } = run(4, &mut store) else {
        panic!("it starts beside the other's log")
    };
    for part in ["job called job", "user 3", "--rdzv-id"] {
        assert!(reason.contains(part), "{reason}");
    }
    assert_eq!(store, log, "nothing was written into it");
}
