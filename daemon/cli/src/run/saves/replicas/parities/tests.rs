use muster_protocol::memory::parity::Stripe;

use super::*;
use crate::run::saves::replicas::serve::lock;

const MIB: u64 = 1 << 20;

fn lane(step: u64, local: u16) -> Lane {
    Lane {
        step,
        generation: [5; 8],
        local,
    }
}

fn part(node: u8, bytes: u64) -> Part {
    Part {
        file: format!("n{node}-0.safetensors"),
        bytes,
        stripe: Stripe {
            of: 2,
            first: node % 2,
        },
    }
}

/// All of a stripe, each chunk full of one byte.
fn bring(parities: &mut Parities, lane: Lane, part: &Part, byte: u8, room: u64) -> Of {
    let Entry::From(of, from) = parities.enter(lane, part.clone(), room) else {
        panic!("it is let in");
    };
    for piece in from..part.stripe.pieces(part.bytes) {
        let range = part.stripe.range(piece, part.bytes);
        let chunk = vec![byte; (range.end - range.start) as usize];
        let held = parities.piece(of.number, piece).unwrap();
        lock(&held).add(of.part, &chunk).unwrap();
        parities.advance(of, piece + 1);
    }
    of
}

#[test]
fn stripes_of_all_lengths_are_added_up_once() {
    let mut parities = Parities::default();
    let (a, b) = (part(0, 13 * MIB), part(1, 5 * MIB));
    // Its first stripe has two chunks of four, its second one a chunk of one.
    let of_a = bring(&mut parities, lane(7, 0), &a, 3, 8 * MIB);
    assert_eq!(parities.memory(), 8 * MIB);
    let of_b = bring(&mut parities, lane(7, 0), &b, 5, 0);
    assert_eq!((of_a.part, of_b.part, of_a.number), (0, 1, of_b.number));
    assert_eq!(parities.memory(), 8 * MIB, "no more than the longest");
    let read = |piece, part| {
        let held = parities.piece(of_a.number, piece).unwrap();
        lock(&held).with(part)
    };
    let (bytes, parts) = read(0, 0).unwrap();
    assert_eq!(parts, 3);
    let (both, one) = bytes.split_at(MIB as usize);
    assert!(both.iter().all(|byte| *byte == 6) && one.iter().all(|byte| *byte == 3));
    assert_eq!(read(1, 0).unwrap().1, 1);
    assert!(read(1, 1).is_none(), "the second one ends before");
    assert!(parities.piece(of_a.number, 2).is_none() && parities.piece(99, 0).is_none());
    // A chunk that comes again is not added again.
    let held = parities.piece(of_a.number, 0).unwrap();
    drop(bytes);
    lock(&held).add(0, &[9; 8]).unwrap();
    assert_eq!(lock(&held).with(0).unwrap().0[0], 6);
    assert!(matches!(
        parities.enter(lane(7, 0), a.clone(), 0),
        Entry::Have
    ));
    let mut other = a;
    other.stripe.first = 1;
    other.bytes = 30 * MIB;
    assert!(matches!(
        parities.enter(lane(7, 0), other, u64::MAX),
        Entry::Refused(_)
    ));
}

#[test]
fn who_breaks_off_goes_on_where_it_was_and_a_reader_is_not_disturbed() {
    let mut parities = Parities::default();
    let a = part(0, 20 * MIB);
    let Entry::From(of, 0) = parities.enter(lane(7, 0), a.clone(), u64::MAX) else {
        panic!("there is room");
    };
    let first = parities.piece(of.number, 0).unwrap();
    lock(&first).add(of.part, &[1; 8]).unwrap();
    assert_eq!(parities.advance(of, 1), None);
    let reading = lock(&first).with(of.part).unwrap();
    assert_eq!(lock(&first).add(1, &[2; 8]), Err(Busy));
    assert!(lock(&first).with(1).is_none());
    assert_eq!(reading.0[0], 1);
    drop(reading);
    lock(&first).add(1, &[2; 8]).unwrap();
    let again = parities.enter(lane(7, 0), a, 0);
    assert!(
        matches!(again, Entry::From(same, 1) if same == of),
        "{again:?}"
    );
    assert_eq!(parities.advance(of, 3), Some(lane(7, 0)));
}

#[test]
fn an_older_one_is_replaced_when_all_of_it_is_there_anew() {
    let mut parities = Parities::default();
    for node in [0, 1] {
        bring(&mut parities, lane(7, 0), &part(node, MIB * 8), 1, u64::MAX);
    }
    bring(&mut parities, lane(7, 1), &part(0, MIB), 1, u64::MAX);
    bring(&mut parities, lane(8, 0), &part(0, MIB * 8), 1, u64::MAX);
    assert!(parities.older(lane(8, 0)).is_empty());
    bring(&mut parities, lane(8, 0), &part(1, MIB * 8), 1, u64::MAX);
    assert_eq!(parities.older(lane(8, 0)), [lane(7, 0)]);
    assert_eq!(parities.retain(|lane| lane.step == 8).len(), 2);
    assert_eq!(parities.lanes().collect::<Vec<_>>(), [lane(8, 0)]);
    assert!(parities.older(lane(9, 0)).is_empty());
}

#[test]
fn there_are_bounds_on_all_of_it() {
    let mut parities = Parities::default();
    let most = part(0, 1 << 40);
    let answer = parities.enter(lane(1, 0), most, 1 << 30);
    assert!(matches!(answer, Entry::NoRoom), "{answer:?}");
    assert_eq!(parities.memory(), 0);
    for node in 0..MAX_PARTS as u8 {
        bring(&mut parities, lane(1, 0), &part(node, 9), 1, u64::MAX);
    }
    let answer = parities.enter(lane(1, 0), part(MAX_PARTS as u8, 9), u64::MAX);
    assert!(matches!(answer, Entry::Refused(_)), "{answer:?}");
    for local in 1..MAX_LANES as u16 {
        bring(&mut parities, lane(1, local), &part(0, 9), 1, u64::MAX);
    }
    let answer = parities.enter(lane(2, 0), part(0, 9), u64::MAX);
    assert!(matches!(answer, Entry::Full), "{answer:?}");
    for above in [0, 1, MAX_LANES as u64 - 3, u64::MAX] {
        let list = parities.list(above);
        let left = (MAX_LANES as u64).saturating_sub(above) as usize;
        assert_eq!(list.len(), left.min(MAX_PARITIES));
        let told = muster_protocol::memory::Answer::Parities { list };
        assert!(told.check().is_ok());
    }
}
