//! Asks of an agent to the launcher that brought a store, and to nobody else.

use std::collections::BTreeMap;

use muster_protocol::local::{
    Assembly, Part, Register, StoreAnswer, StoreAsk, ToAgent, ToLauncher,
};
use muster_protocol::{LauncherId, StoreUuid};

use crate::agents::{Launcher, World, registration};

/// A store in memory, as a launcher would carry it out.
#[derive(Default)]
struct Store {
    log: BTreeMap<u64, Vec<u8>>,
    arriving: Assembly,
    asked: usize,
}

impl Store {
    fn answers(&mut self, ask: StoreAsk) -> Vec<StoreAnswer> {
        self.asked += 1;
        match ask {
            StoreAsk::Read { slot } => match self.log.get(&slot) {
                Some(bytes) => Part::all(bytes)
                    .into_iter()
                    .map(StoreAnswer::Found)
                    .collect(),
                None => vec![StoreAnswer::Absent],
            },
            StoreAsk::Create { slot, part } => match self.arriving.take(&part).unwrap() {
                None => Vec::new(),
                Some(_) if self.log.contains_key(&slot) => vec![StoreAnswer::Exists],
                Some(bytes) => {
                    self.log.insert(slot, bytes);
                    vec![StoreAnswer::Won]
                }
            },
            StoreAsk::WriteBeacon { .. } => vec![StoreAnswer::BeaconWritten],
            StoreAsk::ReadBeacon => vec![StoreAnswer::Beacon(None)],
        }
    }
}

fn with_store(launcher: u8, store: u8) -> Register {
    let mut register = registration("job", (1, 1));
    register.launcher = LauncherId([launcher; 8]);
    register.store = Some(StoreUuid([store; 16]));
    register
}

/// Serves the store until something else is said.
fn serve(launcher: &mut Launcher, store: &mut Store) -> ToLauncher {
    loop {
        match launcher.recv() {
            ToLauncher::Store { id, ask } => {
                for answer in store.answers(ask) {
                    launcher.send(&ToAgent::Store { id, answer });
                }
            }
            other => return other,
        }
    }
}

/// The id of the next ask.
fn asked(launcher: &mut Launcher) -> u64 {
    loop {
        if let ToLauncher::Store { id, .. } = launcher.recv() {
            return id;
        }
    }
}

#[test]
fn a_launcher_that_is_refused_does_not_take_the_place_of_the_first() {
    let world = World::new();
    let _agent = world.agent("one", &world.socket());
    let mut store = Store::default();
    let mut first = Launcher::say(&world.socket(), with_store(1, 7));
    let start = loop {
        if let ToLauncher::Start(start) = serve(&mut first, &mut store) {
            break start;
        }
    };
    let (digest, attempt) = (start.digest, start.attempt);
    first.send(&ToAgent::Started { digest, attempt });
    assert_eq!(store.log.len(), 1, "the birth was claimed");

    let mut second = Launcher::say(&world.socket(), with_store(2, 8));
    let ToLauncher::Refused { reason } = second.recv() else {
        panic!("one launcher is enough")
    };
    assert!(reason.contains("already has a launcher"), "{reason}");
    // The job goes on with the first one's store, to its end.
    let before = store.asked;
    while store.asked < before + 3 {
        let ToLauncher::Store { id, ask } = first.recv() else {
            continue;
        };
        for answer in store.answers(ask) {
            first.send(&ToAgent::Store { id, answer });
        }
    }
    first.send(&ToAgent::Finished { digest });
    loop {
        match serve(&mut first, &mut store) {
            ToLauncher::Stop { digest, .. } => first.send(&ToAgent::Stopped { digest }),
            ToLauncher::End { code, .. } => break assert_eq!(code, 0),
            _ => {}
        }
    }
    assert_eq!(store.log.len(), 2, "its end was claimed");
}

#[test]
fn a_launcher_that_comes_back_is_asked_again() {
    let world = World::new();
    let _agent = world.agent("one", &world.socket());
    for round in 0..3 {
        let mut launcher = Launcher::say(&world.socket(), with_store(1, 7));
        // What it was asked it never answers.
        assert_eq!(asked(&mut launcher), 1, "round {round}");
    }
    let mut store = Store::default();
    let mut launcher = Launcher::say(&world.socket(), with_store(1, 7));
    while !matches!(serve(&mut launcher, &mut store), ToLauncher::Start(_)) {}
    assert_eq!(store.log.len(), 1);
}
