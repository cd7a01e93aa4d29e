use super::*;
use crate::run::saves::replicas::freeing::Kept;
use muster_protocol::memory::parity::{MAX_LANES, Stripe};

const NOW: Digest = Digest([5; 32]);
const IMAGE: u64 = 1 << 20;

fn name(step: u64, file: &str) -> Name {
    Name::new(step, &NOW, file).unwrap()
}

fn shelf(rooms: u64) -> Shelf {
    let memory = Room::create(IMAGE).unwrap().memory();
    let (freeing, _kept) = Freeing::by_hand();
    let mut shelf = Shelf::new(Choice::Copy, rooms * memory, freeing);
    shelf.begin(NOW, &Peers::default());
    shelf
}

/// Takes a copy in, if there is room for it.
fn keeps(shelf: &mut Shelf, step: u64, file: &str) -> bool {
    let name = name(step, file);
    match shelf.admit(NOW, &name, IMAGE) {
        Admission::Go(room) => {
            shelf.keep(&name, room.seal(IMAGE));
            true
        }
        Admission::NoRoom(_) => false,
        other => panic!("{other:?}"),
    }
}

fn steps(shelf: &Shelf) -> Vec<u64> {
    shelf.list().iter().map(|entry| entry.name.step).collect()
}

#[test]
fn of_each_rank_the_newest_is_held_and_what_is_committed() {
    let mut shelf = shelf(10);
    for step in [1, 2, 3] {
        assert!(keeps(&mut shelf, step, "a"));
    }
    assert!(keeps(&mut shelf, 3, "b"));
    assert_eq!(steps(&shelf), [3, 3]);
    shelf.commit(NOW, 3);
    assert!(keeps(&mut shelf, 4, "a") && keeps(&mut shelf, 5, "a"));
    assert_eq!(steps(&shelf), [3, 3, 5]);
    assert!(matches!(
        shelf.admit(NOW, &name(2, "a"), IMAGE),
        Admission::Refused(_)
    ));
    assert!(matches!(
        shelf.admit(NOW, &name(5, "a"), IMAGE),
        Admission::Have
    ));
    // Memory is used again.
    let used = shelf.used();
    shelf.commit(NOW, 5);
    assert!(keeps(&mut shelf, 6, "a") && keeps(&mut shelf, 6, "b"));
    assert_eq!((steps(&shelf), shelf.used()), (vec![5, 6, 6], used));
}

#[test]
fn the_budget_is_kept_and_slots_come_first() {
    let mut shelf = shelf(2);
    assert!(keeps(&mut shelf, 1, "a"));
    shelf.commit(NOW, 1);
    assert!(keeps(&mut shelf, 2, "a"));
    // The one before makes way, but not what is committed.
    assert!(keeps(&mut shelf, 3, "a"));
    assert_eq!(steps(&shelf), [1, 3]);
    assert!(!keeps(&mut shelf, 3, "b"));
    let budget = shelf.budget;
    assert!(shelf.used() <= budget);
    shelf.set_slots(budget / 2);
    assert_eq!(steps(&shelf), [1], "what is committed goes last");
    shelf.set_slots(budget);
    assert!(steps(&shelf).is_empty());
    assert!(!keeps(&mut shelf, 4, "a"));
    shelf.set_slots(0);
    assert!(keeps(&mut shelf, 4, "a"));
}

#[test]
fn a_copy_that_does_not_arrive_gives_its_room_back() {
    let mut shelf = shelf(1);
    let one = name(1, "a");
    let Admission::Go(room) = shelf.admit(NOW, &one, IMAGE) else {
        panic!("there is room");
    };
    assert!(matches!(shelf.admit(NOW, &one, IMAGE), Admission::Have));
    assert!(!keeps(&mut shelf, 1, "b"));
    shelf.give_up(&one, room);
    assert!(keeps(&mut shelf, 1, "b"));
    // One that arrives when nobody restores it any more is none.
    shelf.set_slots(u64::MAX / 2);
    shelf.set_slots(0);
    let Admission::Go(room) = shelf.admit(NOW, &one, IMAGE) else {
        panic!("there is room");
    };
    shelf.begin(Digest([6; 32]), &Peers::default());
    shelf.keep(&one, room.seal(IMAGE));
    assert!(steps(&shelf).is_empty());
    assert!(shelf.used() <= shelf.budget);
    let other = shelf.admit(NOW, &name(2, "a"), IMAGE);
    assert!(matches!(other, Admission::Refused(_)), "{other:?}");
}

#[test]
fn a_length_from_the_network_takes_no_memory_that_is_not_there() {
    let mut shelf = shelf(3);
    for bytes in [u64::MAX, 1 << 56, 1 << 40] {
        let answer = shelf.admit(NOW, &name(1, "a"), bytes);
        assert!(
            matches!(answer, Admission::NoRoom(_) | Admission::Refused(_)),
            "{answer:?}"
        );
    }
    assert!(keeps(&mut shelf, 1, "a"));
}

/// Takes a stripe in, all of it, if there is room for it.
fn folds(shelf: &mut Shelf, step: u64, node: u8) -> bool {
    folds_of(shelf, step, node, 0)
}

/// Of the ranks of this number.
fn folds_of(shelf: &mut Shelf, step: u64, node: u8, local: u16) -> bool {
    let file = format!("n{node}-0.safetensors");
    let stripe = Stripe { of: 1, first: 0 };
    let part = Part {
        file: file.clone(),
        bytes: IMAGE,
        stripe,
    };
    match shelf.fold(NOW, &name(step, &file), local, 2, part) {
        Folding::From(of, 0) => {
            shelf.folded(of, 1);
            true
        }
        Folding::Have => true,
        Folding::NoRoom(_) => false,
        other => panic!("{other:?}"),
    }
}

fn lanes(shelf: &Shelf) -> Vec<(u64, usize)> {
    let lane = |parity: Parity| (parity.step, parity.parts.len());
    shelf.parities(0).into_iter().map(lane).collect()
}

fn of_parity(budget: u64) -> Shelf {
    of_parity_kept(budget).0
}

/// With what it lets go.
fn of_parity_kept(budget: u64) -> (Shelf, Kept) {
    let (freeing, kept) = Freeing::by_hand();
    let mut shelf = Shelf::new(Choice::Parity(2), budget, freeing);
    shelf.begin(NOW, &Peers::default());
    (shelf, kept)
}

#[test]
fn of_parity_the_newest_is_held_and_what_is_committed() {
    let mut shelf = of_parity(u64::MAX);
    assert!(folds(&mut shelf, 1, 1) && folds(&mut shelf, 1, 2));
    assert_eq!((lanes(&shelf), shelf.used()), (vec![(1, 2)], IMAGE));
    // The one before stays until both are in the new one.
    assert!(folds(&mut shelf, 2, 1));
    assert_eq!(lanes(&shelf), [(1, 2), (2, 1)]);
    assert!(folds(&mut shelf, 2, 2));
    assert_eq!(lanes(&shelf), [(2, 2)]);
    shelf.commit(NOW, 2);
    for step in [3, 4] {
        assert!(folds(&mut shelf, step, 1) && folds(&mut shelf, step, 2));
    }
    assert_eq!(lanes(&shelf), [(2, 2), (4, 2)]);
    shelf.commit(NOW, 4);
    assert_eq!(lanes(&shelf), [(4, 2)]);
    let late = |shelf: &mut Shelf, step, generation| {
        let name = Name::new(step, &NOW, "n3-0.safetensors").unwrap();
        let part = Part {
            file: name.file.clone(),
            bytes: IMAGE,
            stripe: Stripe { of: 1, first: 0 },
        };
        shelf.fold(generation, &name, 0, 2, part)
    };
    for (step, generation) in [(3, NOW), (5, Digest([6; 32]))] {
        let answer = late(&mut shelf, step, generation);
        assert!(matches!(answer, Folding::Refused(_)), "{answer:?}");
    }
    // What comes late is of use as long as what it belongs to is.
    assert!(matches!(late(&mut shelf, 4, NOW), Folding::From(_, 0)));
    // The next generation restores what is committed alone.
    assert!(folds(&mut shelf, 6, 1));
    shelf.begin(Digest([6; 32]), &Peers::default());
    assert_eq!(lanes(&shelf), [(4, 3)]);
}

#[test]
fn the_budget_is_kept_for_parity_and_slots_come_first() {
    let mut shelf = of_parity(2 * IMAGE);
    assert!(folds(&mut shelf, 1, 1) && folds(&mut shelf, 1, 2));
    shelf.commit(NOW, 1);
    assert!(folds(&mut shelf, 2, 1) && folds(&mut shelf, 2, 2));
    // The one before makes way at once, but not what is committed.
    assert!(folds(&mut shelf, 3, 1));
    assert_eq!(lanes(&shelf), [(1, 2), (3, 1)]);
    shelf.set_slots(IMAGE);
    assert_eq!(lanes(&shelf), [(1, 2)], "what is committed goes last");
    assert!(!folds(&mut shelf, 3, 1));
    shelf.set_slots(2 * IMAGE);
    assert!(lanes(&shelf).is_empty() && !folds(&mut shelf, 3, 1));
    shelf.set_slots(0);
    assert!(folds(&mut shelf, 3, 1));
    let used = shelf.used();
    assert!(used <= shelf.budget, "{used}");
}

#[test]
fn who_holds_one_kind_takes_no_other() {
    let mut shelf = of_parity(u64::MAX);
    let answer = shelf.admit(NOW, &name(1, "a"), IMAGE);
    assert!(matches!(answer, Admission::Refused(_)), "{answer:?}");
    let mut shelf = self::shelf(9);
    let part = Part {
        file: "a".into(),
        bytes: IMAGE,
        stripe: Stripe { of: 1, first: 0 },
    };
    let answer = shelf.fold(NOW, &name(1, "a"), 0, 2, part);
    assert!(matches!(answer, Folding::Refused(_)), "{answer:?}");
}

#[test]
fn who_wants_parity_over_others_is_told_over_how_many_it_is_here() {
    let mut shelf = of_parity(u64::MAX);
    let part = Part {
        file: "a".into(),
        bytes: IMAGE,
        stripe: Stripe { of: 3, first: 0 },
    };
    let answer = shelf.fold(NOW, &name(1, "a"), 0, 3, part);
    assert!(matches!(answer, Folding::OtherOver(2)), "{answer:?}");
    assert_eq!((lanes(&shelf), shelf.used()), (vec![], 0));
}

#[test]
fn when_there_are_as_many_lanes_as_may_be_older_ones_make_way() {
    let mut shelf = of_parity(u64::MAX);
    let half = MAX_LANES as u16 / 2;
    assert!((0..half).all(|local| folds_of(&mut shelf, 1, 1, local)));
    shelf.commit(NOW, 1);
    assert!((0..half).all(|local| folds_of(&mut shelf, 2, 1, local)));
    // More than one answer names, but the numbers go on.
    let mut all: Vec<u64> = Vec::new();
    loop {
        let some = shelf.parities(all.last().copied().unwrap_or(0));
        if some.is_empty() {
            break;
        }
        all.extend(some.iter().map(|parity| parity.number));
    }
    assert_eq!(all, (1..=MAX_LANES as u64).collect::<Vec<_>>());
    // Of another rank than any before; what is committed stays.
    assert!(folds_of(&mut shelf, 3, 1, half));
    let steps = |shelf: &Shelf| {
        let mut steps = [0; 4];
        for lane in shelf.parities.lanes() {
            steps[lane.step as usize] += 1;
        }
        steps
    };
    let half = usize::from(half);
    assert_eq!(steps(&shelf), [0, half, half - 1, 1]);
    // Nothing newer makes way for what is older, and nothing that is committed.
    let part = Part {
        file: "n1-0.safetensors".into(),
        bytes: IMAGE,
        stripe: Stripe { of: 1, first: 0 },
    };
    let answer = shelf.fold(NOW, &name(2, &part.file), half as u16 + 1, 2, part);
    assert!(matches!(answer, Folding::Refused(_)), "{answer:?}");
    assert_eq!(steps(&shelf), [0, half, half - 1, 1]);
}

#[test]
fn no_memory_is_given_back_by_who_has_the_lock() {
    let (mut shelf, kept) = of_parity_kept(2 * IMAGE);
    let piece_of = |shelf: &mut Shelf, step| {
        assert!(folds(shelf, step, 1));
        let number = shelf.parities(0).last().unwrap().number;
        Arc::downgrade(&shelf.piece(number, 0).unwrap())
    };
    // What is committed makes the one before it of no use.
    let first = piece_of(&mut shelf, 1);
    let second = piece_of(&mut shelf, 2);
    assert_eq!(
        (first.strong_count(), kept.free(), first.strong_count()),
        (1, 1, 0)
    );
    shelf.commit(NOW, 2);
    let third = piece_of(&mut shelf, 3);
    // Slots need all of it, and then a generation begins.
    shelf.set_slots(IMAGE);
    assert_eq!(
        (third.strong_count(), kept.free(), third.strong_count()),
        (1, 1, 0)
    );
    shelf.set_slots(0);
    let fourth = piece_of(&mut shelf, 4);
    shelf.begin(Digest([6; 32]), &Peers::default());
    assert_eq!(
        (fourth.strong_count(), kept.free(), fourth.strong_count()),
        (1, 1, 0)
    );
    assert_eq!((second.strong_count(), shelf.used()), (1, IMAGE));
    // Copies, and the rooms that they were in.
    let memory = Room::create(IMAGE).unwrap().memory();
    let (freeing, kept) = Freeing::by_hand();
    let mut shelf = Shelf::new(Choice::Copy, 2 * memory, freeing);
    shelf.begin(NOW, &Peers::default());
    assert!(keeps(&mut shelf, 1, "a") && keeps(&mut shelf, 1, "b"));
    let read = match shelf.find(&name(1, "a")) {
        Some(Image::Held(read)) => Arc::downgrade(&read),
        other => panic!("{other:?}"),
    };
    shelf.set_slots(memory);
    assert_eq!(
        (read.strong_count(), kept.free(), read.strong_count()),
        (1, 1, 0)
    );
    shelf.commit(NOW, 2);
    assert_eq!(kept.free(), 0, "its room waits for the next one");
    shelf.set_slots(2 * memory);
    assert_eq!((kept.free(), shelf.used()), (1, 2 * memory));
}
