//! An agent whose peers are scripted.

mod births;
mod cancel;
mod disk;
mod ends;
mod greetings;
mod groups;
mod holds;
mod lives;
mod members;
mod replaced;
mod restarts;
mod spares;
mod takeovers;
mod tickets;
mod told;
mod unresponsive;
mod voters;
mod votes;
mod words;

use super::scripted::{Scripted, node};
use crate::ids::{Boot, Digest};
use crate::wire::{Ballot, JobMessage};

pub(super) fn leaders(boot: u64) -> Ballot {
    Ballot {
        round: 0,
        node: node(0),
        boot: Boot(boot),
    }
}

pub(super) fn promise(s: &mut Scripted, from: usize, parent: Digest, ballot: Ballot) {
    let body = JobMessage::Promise {
        parent,
        ballot,
        accepted: None,
        acked: None,
    };
    s.hears(from, body);
}
