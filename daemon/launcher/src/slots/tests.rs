use muster_protocol::checkpoint::Copy;

use super::*;

const GENERATION: Digest = Digest([9; 32]);
const SLOT: SlotId = SlotId { k: 1, side: 0 };

/// Its second rank is the one that saves.
fn start() -> Start {
    Start {
        digest: GENERATION,
        ..crate::session::tests::start(1, 1)
    }
}

fn ask(number: u64) -> Ask {
    Ask {
        number,
        image: 1_000,
        note: 10,
    }
}

fn copy(step: u64) -> Copy {
    Copy {
        generation: GENERATION,
        step,
        bytes: 1_000,
        digest: Digest([1; 32]),
    }
}

fn save(step: u64) -> Save {
    Save {
        generation: GENERATION,
        attempt: 3,
        step,
    }
}

/// Rank 1 has slots, and step 7 is sealed in the first.
fn sealed() -> SlotTable {
    let mut table = SlotTable::new(true, 10_000);
    table.begins(&start());
    table.asked(1, ask(1));
    table.made(1, 1, Ok((1_000, 10)));
    table.looked(1, [Look::Sealed(copy(7)), Look::Free]);
    table
}

fn written(told: &[Effect]) -> bool {
    matches!(
        told,
        [Effect::Tell(SaveNews::Written {
            slot: SLOT,
            attempt: 3,
            bytes: 5,
            ..
        })]
    )
}

#[test]
fn a_file_that_is_durable_is_not_written_again() {
    let mut table = sealed();
    let write = |step| SaveAsk::Write {
        slot: SLOT,
        save: save(step),
    };
    let began = table.ask(write(7));
    assert!(matches!(began[..], [Effect::Write { rank: 1, .. }]));
    assert_eq!(table.ask(write(7)), [], "the answer follows");
    assert!(table.wrote(SLOT, save(7), Ok((5, vec![2]))).is_some());
    // The agent was restarted before it heard that.
    assert!(written(&table.ask(write(7))));
    // Other content of that slot is another file.
    table.ask(SaveAsk::Free { slot: SLOT });
    table.looked(1, [Look::Sealed(copy(8)), Look::Free]);
    assert!(matches!(table.ask(write(8))[..], [Effect::Write { .. }]));
}

#[test]
fn a_write_that_failed_begins_anew() {
    let mut table = sealed();
    let write = SaveAsk::Write {
        slot: SLOT,
        save: save(7),
    };
    table.ask(write.clone());
    let failed = Err(Failure::Failed("the disk".to_owned()));
    let news = table.wrote(SLOT, save(7), failed);
    assert!(matches!(
        news,
        Some(SaveNews::WriteFailed { attempt: 3, .. })
    ));
    assert!(matches!(table.ask(write)[..], [Effect::Write { .. }]));
}

#[test]
fn slots_with_something_in_them_are_kept_until_it_is_written() {
    let mut table = sealed();
    let larger = Ask {
        image: 2_000,
        ..ask(2)
    };
    let coming = |effects: &[Effect]| {
        matches!(
            effects,
            [
                Effect::Give {
                    given: Given::Coming,
                    ..
                },
                ..
            ]
        )
    };
    let held = table.asked(1, larger);
    assert!(coming(&held) && held.len() == 1, "{held:?}");
    table.ask(SaveAsk::Free { slot: SLOT });
    let made = table.asked(1, larger);
    let told = Effect::Tell(SaveNews::SlotsGone { k: 1 });
    assert!(coming(&made) && made.contains(&told), "{made:?}");
    assert!(matches!(
        made.last(),
        Some(Effect::Make {
            k: 1,
            keep: [false, false],
            ..
        })
    ));
    assert_eq!(table.link_up(), [SaveNews::SlotsGone { k: 1 }]);
    // No memory counts twice.
    assert_eq!(table.bytes(), 2 * 2_010);
    let too_much = Ask {
        image: 5_000,
        ..ask(3)
    };
    let refused = table.asked(0, too_much);
    assert!(matches!(
        refused[..],
        [
            Effect::Say(_),
            Effect::Give {
                given: Given::Budget,
                room: 2_990,
                ..
            }
        ]
    ));
}

#[test]
fn a_manifest_is_made_of_each_rank_once() {
    let part = |rank| Written {
        rank,
        bytes: 5,
        summary: vec![2],
    };
    let assemble = |ranks: &[u32], last| SaveAsk::Assemble {
        save: save(7),
        parts: ranks.iter().copied().map(part).collect(),
        last,
    };
    for (ranks, right) in [
        (&[0, 1][..], true),
        (&[1, 0], false),
        (&[0], false),
        (&[0, 0, 1], false),
    ] {
        let mut table = sealed();
        let made = table.ask(assemble(ranks, true));
        let is = matches!(&made[..], [Effect::Assemble { sealed, .. }] if sealed[..] == [SLOT]);
        assert_eq!(is, right, "{ranks:?}: {made:?}");
    }
    // In two frames, of which a new link forgets the first.
    let mut table = sealed();
    assert_eq!(table.ask(assemble(&[0], false)), []);
    assert!(matches!(
        table.ask(assemble(&[1], true))[..],
        [Effect::Assemble { .. }]
    ));
    table.ask(assemble(&[0], false));
    table.link_up();
    assert!(matches!(
        table.ask(assemble(&[1], true))[..],
        [Effect::Tell(SaveNews::AssembleFailed { .. })]
    ));
}

#[test]
fn what_a_dead_worker_was_filling_is_told_once() {
    let mut table = sealed();
    table.looked(1, [Look::Same, Look::Filling { step: 8 }]);
    let torn = table.looked(1, [Look::Same, Look::Torn]);
    let slot = SlotId { k: 1, side: 1 };
    let gone = Effect::Tell(SaveNews::WorkerGone { k: 1 });
    assert_eq!(torn, [Effect::Forget { slot }, gone]);
    assert_eq!(table.looked(1, [Look::Same, Look::Free]), []);
    assert_eq!(table.found(SLOT), Found::Sealed(copy(7)));
}

#[test]
fn without_a_store_nobody_saves() {
    let mut table = SlotTable::new(false, 10_000);
    table.begins(&start());
    let given = table.asked(1, ask(1));
    assert!(matches!(
        given[..],
        [Effect::Give {
            given: Given::NoStore,
            ..
        }]
    ));
    assert_eq!(table.worker_ended(1), None);
    assert!(!table.takes_left(1, 2));
}

#[test]
fn slots_that_are_being_made_leave_no_room_for_those_of_the_launcher_before() {
    let mut table = SlotTable::new(true, 5_000);
    table.begins(&start());
    assert_eq!(table.no_room_for(1, 5_000), None);
    table.asked(0, ask(1));
    assert!(table.no_room_for(1, 5_000).is_some());
    assert_eq!(table.no_room_for(1, 2_980), None);
    // None of them could be had.
    table.made(0, 1, Err("no memory".to_owned()));
    assert_eq!(table.no_room_for(1, 5_000), None);
}

/// An ask that comes late is of a generation that is over.
#[test]
fn a_copy_of_another_generation_is_not_written() {
    let mut table = sealed();
    let other = Digest([8; 32]);
    table.begins(&Start {
        digest: other,
        ..start()
    });
    table.ask(SaveAsk::Free { slot: SLOT });
    let copy = Copy {
        generation: other,
        ..copy(7)
    };
    table.looked(1, [Look::Sealed(copy), Look::Free]);
    let late = table.ask(SaveAsk::Write {
        slot: SLOT,
        save: save(7),
    });
    assert!(matches!(
        late[..],
        [Effect::Tell(SaveNews::WriteFailed { attempt: 3, .. })]
    ));
}
