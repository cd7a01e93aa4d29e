//! Content that a launcher left in its slots, as its heir takes it up.

use std::sync::Arc;

use muster_checkpoint::slot::{Slot, State};
use muster_protocol::Time;
use muster_protocol::checkpoint::Found;
use muster_protocol::control::slots::SLOTS;

use super::*;

/// A launcher that had saved step 7, which was committed, and sealed step 8; the worker was filling nothing. It died
/// of a SIGKILL: what it held of its slots it never let go.
async fn dead() -> ([Arc<Slot>; SLOTS], Vec<std::os::fd::OwnedFd>) {
    let mut launcher = Launcher::new("na", Choice::Nothing, u64::MAX);
    launcher.begins(GENERATION, vec![], None);
    let slots = given(&mut launcher.saves, &launcher.two, 0).await;
    fill(&slots[0], 0, 7);
    launcher.saves.look(&launcher.two, Time::ZERO);
    launcher.committed(GENERATION, 7);
    let slot = SlotId { k: 0, side: 0 };
    // The thread that holds it in memory lets go of nothing.
    launcher.comes_to_hold(&[7]);
    launcher.saves.ask(SaveAsk::Free { slot });
    fill(&slots[1], 0, 8);
    launcher.saves.look(&launcher.two, Time::ZERO);
    let left = launcher.saves.descriptors(0);
    assert_eq!(left.len(), SLOTS);
    std::mem::forget(launcher);
    (slots, left)
}

fn clones(left: &[std::os::fd::OwnedFd]) -> Vec<std::os::fd::OwnedFd> {
    left.iter().map(|fd| fd.try_clone().unwrap()).collect()
}

#[tokio::test]
async fn an_heir_holds_what_was_committed_and_what_was_sealed() {
    let (slots, left) = dead().await;
    assert_eq!(slots[1].state(), (State::Taken, 8));
    let mut heir = Launcher::new("na", Choice::Nothing, u64::MAX);
    let told = heir.saves.inherit(0, left, 2);
    assert!(
        told.people[0].ends_with("steps 7 and 8 are in them"),
        "{told:?}"
    );
    let [
        SaveNews::Slots {
            k: 0,
            capacity,
            found: [Found::Free, Found::Sealed(copy)],
        },
    ] = &told.agent[..]
    else {
        panic!("{told:?}");
    };
    assert_eq!((copy.step, copy.generation), (8, GENERATION));
    assert!(*capacity >= BYTES);
    // It serves them from when its first generation begins: what that restores is filled last.
    heir.begins(LATER, vec![], Some((GENERATION, 7)));
    assert_eq!(heir.holds(), [7, 8]);
    assert!(slots[0].is_kept() && !slots[1].is_kept());
    let whole = read(&heir, name(7), 1_000_000).unwrap();
    // The agent has it freed, as it can be committed no more; the worker gets the very slots, and fills that one.
    heir.saves.ask(SaveAsk::Free {
        slot: SlotId { k: 0, side: 1 },
    });
    heir.two.ask(0, 1, BYTES);
    heir.saves.look(&heir.two, Time::ZERO);
    let (_, again, _) = heir.two.answer(0).unwrap();
    fill(&again.unwrap()[1], 0, 9);
    assert_eq!(slots[1].state(), (State::Sealed, 9));
    heir.saves.look(&heir.two, Time::ZERO);
    heir.comes_to_hold(&[7, 9]);
    assert!(read(&heir, name(7), 1_000_000).unwrap() == whole);
}

#[tokio::test]
async fn what_was_being_filled_is_void() {
    let (slots, left) = dead().await;
    let mut state = [0; 8];
    let memory = std::fs::File::from(left[0].try_clone().unwrap());
    memory.read_exact_at(&mut state, 128).unwrap();
    // One change further, to filling: its worker had overwritten the first chunk, and its sum.
    let filling = ((u64::from_le_bytes(state) >> 2) + 1) << 2 | 1;
    memory.write_all_at(&filling.to_le_bytes(), 128).unwrap();
    let sums = 4096 + slots[0].capacity().0;
    memory.write_all_at(&[1; 8], sums).unwrap();
    assert_eq!(slots[0].state(), (State::Filling, 7));
    let mut heir = Launcher::new("na", Choice::Nothing, u64::MAX);
    let told = heir.saves.inherit(0, left, 2);
    assert!(told.people[0].ends_with("step 8 is in them"), "{told:?}");
    heir.begins(LATER, vec![], None);
    assert_eq!(heir.holds(), [8]);
    assert_eq!(slots[0].state().0, State::Free);
    // Who was filling it may not be dead for certain: the worker gets another one in its place, and the other slot.
    heir.saves.ask(SaveAsk::Free {
        slot: SlotId { k: 0, side: 1 },
    });
    heir.two.ask(0, 1, BYTES / 2);
    let told = heir.saves.look(&heir.two, Time::ZERO);
    assert_eq!(told.agent, [SaveNews::SlotsGone { k: 0 }]);
    let told = done(&mut heir.saves, &heir.two).await;
    assert!(matches!(
        told.agent[..],
        [SaveNews::Slots {
            k: 0,
            found: [Found::Free, Found::Free],
            ..
        }]
    ));
    let (_, given, _) = heir.two.answer(0).unwrap();
    let given = given.unwrap();
    assert_eq!(given[0].capacity(), slots[0].capacity());
    fill(&given[0], 0, 9);
    fill(&given[1], 0, 10);
    assert_eq!(slots[0].state().0, State::Free);
    assert_eq!(slots[1].state(), (State::Sealed, 10));
    // From then on they are its own.
    heir.saves.look(&heir.two, Time::ZERO);
    heir.two.ask(0, 2, BYTES);
    let told = heir.saves.look(&heir.two, Time::ZERO);
    assert_eq!(told.agent, []);
    assert!(heir.two.answer(0).is_some());
}

#[tokio::test]
async fn what_is_of_no_use_is_not_taken_up() {
    let (_slots, left) = dead().await;
    let nothing = |told: &Told| told.agent.is_empty();
    // Fewer ranks than before.
    let mut heir = Launcher::new("na", Choice::Nothing, u64::MAX);
    assert!(nothing(&heir.saves.inherit(0, clones(&left), 0)));
    let told = heir.saves.inherit(0, clones(&left[..1]), 2);
    assert!(
        nothing(&told) && told.people[0].contains("not two"),
        "{told:?}"
    );
    let others = vec![
        tempfile::tempfile().unwrap().into(),
        clones(&left).remove(0),
    ];
    let told = heir.saves.inherit(0, others, 2);
    assert!(
        nothing(&told) && told.people[0].contains("is no checkpoint slot"),
        "{told:?}"
    );
    // It has slots of its own.
    assert!(!nothing(&heir.saves.inherit(0, clones(&left), 2)));
    assert!(nothing(&heir.saves.inherit(0, clones(&left), 2)));
    // No room.
    let mut small = Launcher::new("na", Choice::Nothing, BYTES);
    let told = small.saves.inherit(0, clones(&left), 2);
    assert!(
        nothing(&told) && told.people[0].contains("--checkpoint-memory, now 9.5 MiB"),
        "{told:?}"
    );
    // No store, no use.
    let mut without = Saves::new(None, u64::MAX, Rules::default());
    assert!(nothing(&without.inherit(0, left, 2)));
}
