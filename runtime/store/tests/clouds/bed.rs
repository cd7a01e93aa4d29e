//! Common parts of the tests.

use std::ops::ControlFlow;
use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use muster_store::{Created, Entry, Options, Patience, Progress, Store, Variables};

use crate::fake::{BUCKET, Fake, Faults};
use crate::proxy::{Proxy, Server};

/// A store in memory behind a proxy.
pub(crate) struct Bed {
    pub(crate) store: Store,
    pub(crate) fake: Arc<Fake>,
    pub(crate) proxy: Proxy,
}

impl Bed {
    pub(crate) fn new() -> Self {
        Self::with(Faults::default())
    }

    pub(crate) fn with(faults: Faults) -> Self {
        let fake = Arc::new(Fake::new(faults));
        let proxy = Proxy::start(Server::Fake(Arc::clone(&fake)));
        let store = s3(&format!("s3://{BUCKET}/team"), proxy.port, hasty());
        Self { store, fake, proxy }
    }

    /// Bytes that are stored under a name.
    pub(crate) fn there(&self, name: &str) -> Option<Vec<u8>> {
        let state = self.fake.state.lock().unwrap();
        state.objects.get(&format!("team/{name}")).cloned()
    }

    pub(crate) fn place(&self, name: &str, bytes: &[u8]) {
        let mut state = self.fake.state.lock().unwrap();
        state.objects.insert(format!("team/{name}"), bytes.to_vec());
    }
}

/// For faults that are meant: tries again at once, and gives up soon. No operation takes longer than
/// `BOUND` with it, even on a busy machine.
pub(crate) fn hasty() -> Patience {
    Patience {
        tries: 4,
        total: Duration::from_secs(10),
        once: Duration::from_secs(4),
        idle: Duration::from_millis(1500),
        connect: Duration::from_secs(2),
        pause: Duration::from_millis(5),
        pause_limit: Duration::from_millis(50),
        slowest: 64 << 20,
    }
}

pub(crate) const BOUND: Duration = Duration::from_secs(90);

pub(crate) fn options(port: u16, patience: Patience) -> Options {
    let endpoint = format!("http://127.0.0.1:{port}");
    let variables: Variables = [
        ("AWS_ACCESS_KEY_ID", "test"),
        ("AWS_SECRET_ACCESS_KEY", "testsecret"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", &endpoint),
    ]
    .into_iter()
    .collect();
    Options {
        patience,
        part: 5 << 20,
        parts_at_once: 3,
        ..Options::new(variables)
    }
}

pub(crate) fn s3(location: &str, port: u16, patience: Patience) -> Store {
    Store::open(&location.parse().unwrap(), &options(port, patience)).unwrap()
}

/// Runs this, and asserts that it returns within the bound.
pub(crate) fn bounded<T>(run: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let outcome = run();
    let took = began.elapsed();
    assert!(took < BOUND, "{took:?}");
    outcome
}

/// Each case on a thread of its own: most of the time they wait.
pub(crate) fn at_once<T: Send>(cases: impl IntoIterator<Item = T>, run: impl Fn(T) + Sync) {
    std::thread::scope(|scope| {
        for case in cases {
            let run = &run;
            scope.spawn(move || run(case));
        }
    });
}

pub(crate) fn go_on(_: Progress) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

pub(crate) fn all(store: &Store, folder: &str) -> Vec<Entry> {
    let mut found = Vec::new();
    let mut each = |entry| {
        found.push(entry);
        ControlFlow::Continue(())
    };
    store.list(folder, &mut each).unwrap();
    found
}

/// No two bytes near each other alike.
pub(crate) fn bytes(count: usize) -> Vec<u8> {
    (0..count)
        .map(|at| ((at % 251) ^ (at / 251 % 256)) as u8)
        .collect()
}

/// A hundred creators of one name, each with its own bytes: one wins, and its bytes are there.
pub(crate) fn race(store: &Store, rounds: usize) {
    for round in 0..rounds {
        let name = format!("race/{round}-{}", std::process::id());
        let barrier = Barrier::new(100);
        let won: Vec<String> = std::thread::scope(|scope| {
            let racer = |number: usize| {
                let (name, barrier, store) = (&name, &barrier, store.clone());
                scope.spawn(move || {
                    let bytes = format!("creator {number}");
                    barrier.wait();
                    let created = store.create(name, bytes.as_bytes()).unwrap();
                    (created == Created::Created).then_some(bytes)
                })
            };
            let racers: Vec<_> = (0..100).map(racer).collect();
            racers
                .into_iter()
                .filter_map(|racer| racer.join().unwrap())
                .collect()
        });
        assert_eq!(won.len(), 1, "{won:?}");
        assert_eq!(store.get(&name, 99).unwrap(), won[0].as_bytes());
    }
}
