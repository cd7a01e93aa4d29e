//! Slots that are given up while another node takes nothing of what is in them.

use std::sync::{Weak, mpsc};

use muster_checkpoint::plan::{Held, Plan, Rank};
use muster_checkpoint::slot::Slot;
use muster_protocol::Time;
use muster_runtime::memory::time_for;
use muster_runtime::saving::Dtype;

use super::*;
use crate::run::saves::tests::{fill_of, given_for};

/// Bytes that a rank saves: more than a connection holds when nobody reads.
const IMAGE: u64 = 24_000_000;

/// Room of its slots, at first and then.
const ROOM: u64 = 25_000_000;
const MORE: u64 = 40_000_000;

#[tokio::test]
async fn who_takes_nothing_keeps_no_memory_of_slots_that_are_given_up() {
    let (begins, begun) = mpsc::channel::<()>();
    let (over, ends) = mpsc::channel::<()>();
    let deaf = peer(move |mut link| {
        lets_begin(&mut link);
        // The beginning of the first chunk, and no more.
        let _without_its_mark = link.read(&mut [0; 1_000], Instant::now() + LONG);
        begins.send(()).unwrap();
        let _ended = ends.recv();
    });
    // Not for the old slots beside the new ones.
    let mut a = Launcher::new("na", Choice::Copy, 2 * MORE + ROOM / 2);
    a.begins(GENERATION, vec![deaf], None);
    let (slots, _) = given_for(&mut a.saves, &a.two, 0, ROOM).await;
    let held = [Held::whole("w", Dtype::U8, &[IMAGE])];
    let rank = Rank {
        node: 0,
        held: &held,
    };
    let (plan, state) = (Plan::new(&[rank]).unwrap(), vec![5; IMAGE as usize]);
    for (side, step) in [(0, 7), (1, 8)] {
        let slot = SlotId { k: 0, side };
        fill_of(&plan, &state, &slots[usize::from(side)], 0, step);
        a.saves.look(&a.two, Time::ZERO);
        if side == 0 {
            begun.recv_timeout(LONG).unwrap();
        }
        // It is written, while the one is being sent and the other waits.
        let save = save(step);
        assert!(a.saves.ask(SaveAsk::Write { slot, save }).is_empty());
        let is_written = |news: &SaveNews| matches!(news, SaveNews::Written { .. });
        while !done(&mut a.saves, &a.two)
            .await
            .agent
            .iter()
            .any(is_written)
        {}
        a.saves.ask(SaveAsk::Free { slot });
    }
    // The rank wants larger ones.
    let memory: Vec<Weak<Slot>> = {
        let slots = &a.saves.ranks[&0].slots;
        slots.iter().map(Arc::downgrade).collect()
    };
    let began = Instant::now();
    a.two.ask(0, 2, MORE);
    let told = a.saves.look(&a.two, Time::ZERO);
    assert!(matches!(&told.agent[..], [SaveNews::SlotsGone { k: 0 }]));
    while memory.iter().any(|slot| slot.upgrade().is_some()) {
        // Long before the other node has had its time for the chunk.
        assert!(began.elapsed() < time_for(4 << 20) / 2);
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(over);
}
