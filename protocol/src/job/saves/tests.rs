//! A launcher that is not there just when it is asked for something is asked again.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use super::super::alone::Alone;
use crate::agent::Event;
use crate::checkpoint::{Copy, Found, Leader, Save, SlotId};
use crate::ids::{Digest, NodeId};
use crate::local::{SaveAsk, SaveNews, ToAgent, ToLauncher};
use crate::time::Span;

const SLOT: SlotId = SlotId { k: 0, side: 0 };
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const BYTES: u64 = 1 << 20;

fn news(alone: &mut Alone, news: SaveNews) {
    alone.says(ToAgent::Save(news));
}

fn slots(alone: &mut Alone, found: [Found; 2]) {
    let slots = SaveNews::Slots {
        k: 0,
        capacity: BYTES,
        found,
    };
    news(alone, slots);
}

/// A job of one rank, which has sealed this copy.
fn sealed() -> (Alone, Copy) {
    let mut alone = Alone::new();
    let (generation, _) = alone.trains();
    let copy = Copy {
        generation,
        step: 5,
        bytes: BYTES,
        digest: Digest([1; 32]),
    };
    slots(&mut alone, [Found::Free, Found::Free]);
    news(
        &mut alone,
        SaveNews::Filling {
            slot: SLOT,
            step: 5,
        },
    );
    news(&mut alone, SaveNews::Sealed { slot: SLOT, copy });
    alone.pass(Span::from_millis(10));
    (alone, copy)
}

/// The saves of which the launcher was asked to write a slot, and to make the manifest.
fn asked(alone: &mut Alone) -> (Option<Save>, Option<Save>) {
    let told = std::mem::take(&mut alone.told);
    let write = |f: &ToLauncher| match f {
        ToLauncher::Save(SaveAsk::Write { save, .. }) => Some(*save),
        _ => None,
    };
    let assemble = |f: &ToLauncher| match f {
        ToLauncher::Save(SaveAsk::Assemble { save, .. }) => Some(*save),
        _ => None,
    };
    let last = told.iter().rev();
    (
        last.clone().find_map(write),
        last.clone().find_map(assemble),
    )
}

fn written(alone: &mut Alone, save: Save) {
    let written = SaveNews::Written {
        slot: SLOT,
        attempt: save.attempt,
        bytes: BYTES,
        summary: vec![1; 32],
    };
    news(alone, written);
    alone.pass(Span::from_millis(10));
}

/// The launcher's connection is made anew.
fn link_again(alone: &mut Alone, copy: Copy) {
    alone.conn += 1;
    alone.comes_back(copy.generation);
    slots(alone, [Found::Sealed(copy), Found::Free]);
    alone.pass(Span::from_millis(10));
}

/// The agent comes back, and hears of all files, before its launcher has found it.
#[test]
fn a_launcher_that_comes_later_makes_the_manifest() {
    let (mut alone, copy) = sealed();
    let (Some(save), None) = asked(&mut alone) else {
        panic!("nothing is written");
    };
    written(&mut alone, save);
    assert_eq!(asked(&mut alone), (None, Some(save)));
    alone.boot += 1;
    alone.agent = Alone::agent(alone.boot, alone.stored.clone(), alone.now);
    alone.carry_out();
    // A peer gives it something to do meanwhile.
    let event = Event::Connected {
        node: NodeId([9; 32]),
        addr: SocketAddr::new(HERE, 7970),
        observed: HERE,
    };
    alone.agent.handle(event, alone.now).unwrap();
    alone.carry_out();
    alone.pass(Span::from_secs(2));
    alone.told.clear();
    link_again(&mut alone, copy);
    assert_eq!(asked(&mut alone), (None, Some(save)));
}

#[test]
fn what_a_broken_link_has_swallowed_is_asked_again() {
    let (mut alone, copy) = sealed();
    let (Some(save), None) = asked(&mut alone) else {
        panic!("nothing is written");
    };
    // That it has written, or the order to.
    link_again(&mut alone, copy);
    assert_eq!(asked(&mut alone), (Some(save), None));
    written(&mut alone, save);
    assert_eq!(asked(&mut alone), (None, Some(save)));
    // That it has made the manifest, or the order to.
    link_again(&mut alone, copy);
    assert_eq!(asked(&mut alone), (None, Some(save)));
}

/// Nothing came through of what a rank did meanwhile.
#[test]
fn what_was_sealed_while_the_link_was_broken_is_known() {
    let (mut alone, copy) = sealed();
    alone.conn += 1;
    alone.comes_back(copy.generation);
    let newer = Copy { step: 6, ..copy };
    slots(&mut alone, [Found::Sealed(copy), Found::Sealed(newer)]);
    alone.pass(Span::from_millis(10));
    let job = alone.agent.jobs().next().unwrap();
    assert_eq!(job.saves().and_then(Leader::sealed), Some(6));
}
