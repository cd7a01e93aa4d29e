//! Order in which launchers are asked what they hold. Most of what a worker restores is in this node's memory, or in
//! that of a few others; with hundreds of nodes, all of whose workers restore at once, nobody asks all of them for
//! nothing.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::{Duration, Instant};

use muster_checkpoint::manifest::{DataFile, Manifest};
use muster_protocol::memory::parity::{MAX_LANES, MAX_PARITIES, Parity};
use muster_protocol::memory::{Answer, Ask, Entry, Key, MAX_WHO, Name, Peer, Whom};

use super::{Call, Holder, Known};
use crate::memory::{Link, find};

/// Launchers that are asked at once.
const ASKED: usize = 16;

/// Those that are asked before anything is read: several that hold a file then each give some of it.
const FIRST: usize = 64;

/// How long the others may take, all together.
const LONGEST: Duration = Duration::from_secs(30);

/// A launcher's answer about what it holds.
pub(super) struct Found {
    pub(super) holder: Holder,
    pub(super) list: Vec<Entry>,
    pub(super) parities: Vec<Parity>,
}

/// Launchers that were not asked yet.
#[derive(Debug, Default)]
pub(super) struct Search {
    key: Key,
    /// The files that are looked for.
    named: BTreeMap<Name, DataFile>,
    /// The next one to ask is the last.
    peers: Vec<Peer>,
    took: Duration,
    /// How many will not be asked, until that is told.
    given_up: Option<usize>,
}

impl Search {
    pub(super) fn new(whom: &Whom, manifest: &Manifest) -> Search {
        let files = manifest.files.iter();
        Search {
            key: whom.key,
            named: files
                .filter_map(|file| Some((Name::of_path(&file.path)?, file.clone())))
                .collect(),
            peers: whom.others.iter().rev().copied().collect(),
            took: Duration::ZERO,
            given_up: None,
        }
    }

    /// Asks this node's own launcher, and the first of the others.
    pub(super) fn first(&mut self, own: Call, known: &mut Known) {
        if let Some(found) = ask_one(own, true) {
            known.add(found, &self.named);
        }
        for _ in 0..FIRST / ASKED {
            self.ask_some(known);
        }
    }

    /// Whether nobody is left to ask.
    pub(super) fn is_over(&self) -> bool {
        self.peers.is_empty()
    }

    /// Asks some more. A launcher that does not answer holds nothing.
    pub(super) fn next(&mut self, known: &mut Known) {
        let began = Instant::now();
        self.ask_some(known);
        self.took += began.elapsed();
        if self.took > LONGEST && !self.peers.is_empty() {
            self.given_up = Some(std::mem::take(&mut self.peers).len());
        }
    }

    /// How many are not asked any more because it takes too long; told once.
    pub(super) fn gives_up(&mut self) -> Option<usize> {
        self.given_up.take()
    }

    fn ask_some(&mut self, known: &mut Known) {
        let left = self.peers.len().saturating_sub(ASKED);
        let some = self.peers.split_off(left);
        let key = self.key;
        let found = std::thread::scope(|scope| {
            let ask = |peer: Peer| {
                let thread = std::thread::Builder::new().name("muster-memory".into());
                thread.spawn_scoped(scope, move || {
                    let at = find(peer.guard).ok().flatten()?;
                    let launcher = peer.launcher;
                    ask_one(Call { at, key, launcher }, false)
                })
            };
            let asked: Vec<_> = some.iter().rev().map(|peer| ask(*peer)).collect();
            let answers = asked.into_iter().flatten();
            let answers = answers.filter_map(|thread| thread.join().ok().flatten());
            answers.collect::<Vec<_>>()
        });
        for found in found {
            known.add(found, &self.named);
        }
    }
}

fn ask_one(call: Call, own: bool) -> Option<Found> {
    let mut link = call.connect().ok()?;
    let Ok(Answer::Held { who, pid, list }) = link.ask(&Ask::List) else {
        return None;
    };
    let (parities, whole) = all_parities(&mut link);
    let link = whole.then_some(link);
    let name = match own {
        true => "this node".to_owned(),
        false => {
            let mut name = who;
            name.retain(|c| !c.is_control());
            while name.len() > MAX_WHO - "'s memory".len() {
                name.pop();
            }
            name
        }
    };
    let holder = Holder {
        who: format!("{name}'s memory"),
        name,
        call,
        pid: own.then_some(pid),
        links: Mutex::new(link.into_iter().collect()),
        files: Mutex::default(),
        lost: AtomicBool::new(false),
        bytes: AtomicU64::new(0),
    };
    Some(Found {
        holder,
        list,
        parities,
    })
}

/// All parity that a launcher says that it holds, and whether nothing went wrong.
fn all_parities(link: &mut Link) -> (Vec<Parity>, bool) {
    let mut all: Vec<Parity> = Vec::new();
    while all.len() < MAX_LANES {
        let above = all.iter().map(|parity| parity.number).max().unwrap_or(0);
        let Ok(Answer::Parities { mut list }) = link.ask(&Ask::Parities { above }) else {
            return (all, false);
        };
        let last = list.len() < MAX_PARITIES;
        // Each number once, or it would never end.
        list.retain(|parity| parity.number > above);
        if list.is_empty() && !last {
            return (all, false);
        }
        all.append(&mut list);
        if last {
            break;
        }
    }
    (all, true)
}
