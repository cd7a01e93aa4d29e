use super::*;

const NOW: Digest = Digest([5; 32]);
const IMAGE: u64 = 1 << 20;

fn name(step: u64, file: &str) -> Name {
    Name::new(step, &NOW, file).unwrap()
}

fn shelf(rooms: u64) -> Shelf {
    let memory = Room::create(IMAGE).unwrap().memory();
    let mut shelf = Shelf::new(true, rooms * memory);
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
