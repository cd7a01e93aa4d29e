//! An agent takes back what it told others of a job once it is so no more.

use std::sync::Arc;

use super::super::scripted::{Scripted, config, key, next, node, record};
use crate::ids::NodeId;
use crate::record::{Cause, Kind, Record};
use crate::wire::{Advert, JobMessage};

/// The last word to this peer on the job.
fn said(s: &Scripted, to: NodeId) -> Option<&Advert> {
    let mut said = s.hellos.iter().rev().filter(|(of, _)| *of == to);
    let (_, hello) = said.next()?;
    hello.jobs.iter().find(|a| a.key == key("j"))
}

/// Its leader tells all of the end. A peer that came while the job ran took this member's word, too, and nobody else mends
/// it.
#[test]
fn those_that_were_told_of_a_generation_hear_of_its_end() {
    let mut s = Scripted::new(config(1, 3), Vec::new());
    [0, 4].into_iter().for_each(|k| s.peer(k));
    let first = record(2, 2);
    let end = Record {
        kind: Kind::End { cancelled: false },
        members: Vec::new(),
        cause: Cause::Finished,
        ..next(&first, 7)
    };
    s.launcher(1, 2, None);
    let record = Arc::new(first);
    s.hears(0, JobMessage::Decided { record });
    assert_eq!(said(&s, node(3)), None);
    s.peer(3);
    assert!(said(&s, node(3)).is_some_and(|a| a.belongs && a.number == 2));
    s.hellos.clear();
    let record = Arc::new(end);
    s.hears(0, JobMessage::Decided { record });
    assert!(said(&s, node(3)).is_some_and(|a| !a.belongs && a.number == 3));
    // A hello to each of all for each member would be too many.
    assert!(
        s.hellos.iter().all(|(to, _)| *to == node(3)),
        "{:?}",
        s.hellos
    );
}
