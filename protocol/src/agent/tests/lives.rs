//! The life of a job that a launcher takes part in, and the end that it is told.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::super::scripted::{
    Scripted, config, holds, key, next, node, record, registers, witness,
};
use super::members::trains;
use super::told::ticket;
use crate::ids::{Digest, NodeId};
use crate::local::{Began, Register, ToAgent, ToLauncher};
use crate::record::{Cause, Kind, Record};
use crate::time::{Span, Time};
use crate::wire::{Advert, JobMessage};

/// Its agent was away when the job was given up, and hears of that before its launcher is back.
#[test]
fn a_launcher_that_comes_back_to_a_life_that_was_given_up_by_a_persons_order_ends() {
    let r = record(2, 2);
    let (lineage, digest) = (r.lineage(), r.digest());
    let mut s = Scripted::new(config(0, 2), vec![holds(&r, 1)]);
    s.peer(1);
    s.hears(1, JobMessage::CancelAsk { lineage, ago_ms: 0 });
    let up_to = u64::MAX;
    s.hears(1, JobMessage::Superseded { lineage, up_to });
    let began = Some(Box::new(Began { lineage, digest }));
    s.says(ToAgent::Register(Register {
        began,
        ..registers(0, r.spec.clone())
    }));
    s.says(ToAgent::MasterPort { port: 9 });
    s.pass(Span::from_secs(1));
    let ends = |(_, f): &(Time, ToLauncher)| matches!(f, ToLauncher::End { code: 130, .. });
    assert!(s.told.iter().any(ends), "{:?}", s.told);
}

/// Its agent was away when the job was stopped, and hears of the end and of the next life at once.
#[test]
fn a_launcher_whose_life_ended_while_its_agent_was_away_ends_though_the_next_has_begun() {
    let r = record(2, 2);
    let end = Record {
        kind: Kind::End { cancelled: true },
        members: Vec::new(),
        ..next(&r, 1)
    };
    // This node is a witness there.
    let born = Record {
        parent: end.digest(),
        witnesses: vec![witness(1)],
        ..record(1, 1)
    };
    let mut s = Scripted::new(config(1, 2), vec![holds(&r, 1)]);
    s.peer(0);
    for record in [end, born].map(Arc::new) {
        s.hears(0, JobMessage::Decided { record });
    }
    s.says(ToAgent::Register(Register {
        began: Some(Box::new(Began {
            lineage: r.lineage(),
            digest: r.digest(),
        })),
        ..registers(1, r.spec.clone())
    }));
    s.says(ToAgent::MasterPort { port: 9 });
    s.pass(Span::from_secs(1));
    let ends = |(_, f): &(Time, ToLauncher)| matches!(f, ToLauncher::End { code: 130, .. });
    assert!(s.told.iter().any(ends), "{:?}", s.told);
}

fn ended(before: &Record, kind: Kind) -> Record {
    Record {
        kind,
        members: Vec::new(),
        ..next(before, 1)
    }
}

fn told_end(s: &Scripted) -> Option<i32> {
    s.told.iter().find_map(|(_, f)| match f {
        ToLauncher::End { code, .. } => Some(*code),
        _ => None,
    })
}

/// A launcher of this life comes back to an agent that knows nothing of it.
fn comes_back(s: &mut Scripted, lineage: Digest) {
    s.says(ToAgent::Register(Register {
        lineage: Some(lineage),
        ..registers(1, record(2, 1).spec)
    }));
    s.says(ToAgent::MasterPort { port: 9 });
}

fn advert(lineage: Digest, number: u64, belongs: bool) -> Advert {
    Advert {
        lineage,
        number,
        leader: belongs.then(|| node(0)),
        belongs,
        digest: Digest([number as u8; 32]),
        ..Advert::gathering(key("j"))
    }
}

/// A member that does not lead says nothing when its part is over: its word on the life is older than that of the end.
#[test]
fn an_agent_asks_how_the_life_of_its_launcher_ended() {
    let lineage = Digest([7; 32]);
    for ended in [false, true] {
        let mut s = Scripted::new(config(1, 2), Vec::new());
        for peer in [0, 2] {
            s.peer(peer);
            s.says_hello(peer, vec![advert(lineage, 3, true)]);
        }
        if ended {
            s.says_hello(0, vec![advert(lineage, 4, false)]);
        }
        s.sent.clear();
        comes_back(&mut s, lineage);
        let asks = |(_, b): &&(NodeId, JobMessage)| matches!(b, JobMessage::Ask { .. });
        let asked = s.sent.iter().filter(asks).map(|(to, _)| *to);
        let all = BTreeSet::from([node(0), node(2)]);
        let expected = if ended { all } else { BTreeSet::new() };
        assert_eq!(asked.collect::<BTreeSet<_>>(), expected);
    }
}

/// The life that took its own in is over as well.
#[test]
fn a_launcher_whose_group_was_taken_in_ends_with_the_others() {
    let (winner, loser) = (record(2, 2), record(2, 1));
    for knows_winner in [false, true] {
        let mut s = Scripted::new(config(1, 2), Vec::new());
        s.peer(0);
        comes_back(&mut s, loser.lineage());
        let winner = Record {
            // The lower birth takes the other in.
            birth: Digest([1; 32]),
            ..winner.clone()
        };
        let taken_in = Record {
            cause: Cause::Merged {
                other: winner.lineage(),
            },
            ..ended(
                &loser,
                Kind::Tombstone {
                    winner: winner.lineage(),
                },
            )
        };
        let end = ended(&winner, Kind::End { cancelled: false });
        let mut hears = [taken_in, end];
        if knows_winner {
            hears.reverse();
        }
        for record in hears.map(Arc::new) {
            s.hears(0, JobMessage::Decided { record });
        }
        s.pass(Span::from_secs(1));
        assert_eq!(told_end(&s), Some(0), "{knows_winner}");
    }
}

/// Another launcher waits for a place: its end is not that of a life of which it never was.
#[test]
fn a_launcher_is_not_told_the_end_of_another_life() {
    let mut s = Scripted::new(config(1, 2), Vec::new());
    s.peer(0);
    comes_back(&mut s, Digest([7; 32]));
    let record = Arc::new(ended(&record(2, 1), Kind::End { cancelled: true }));
    s.hears(0, JobMessage::Decided { record });
    s.pass(Span::from_secs(1));
    assert_eq!(told_end(&s), None);
}

/// The answer to its next ticket, a second later, may come too late.
#[test]
fn a_launcher_that_comes_hears_soon_in_which_life_it_waits() {
    let (mut s, digest) = trains(0, 3, &[]);
    s.peer(3);
    s.status(1, digest, 2, |_| {});
    s.sent.clear();
    let spec = record(3, 2).spec;
    s.hears(3, ticket(3, &spec, None));
    s.pass(Span::from_millis(600));
    let lives = s.sent.iter().filter_map(|(to, body)| match body {
        JobMessage::TicketAck { lineage, .. } if *to == node(3) => Some(*lineage),
        _ => None,
    });
    let lineage = record(3, 2).lineage();
    assert_eq!(lives.collect::<Vec<_>>(), [Digest::ZERO, lineage]);
}
