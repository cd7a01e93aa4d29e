use proptest::prelude::*;
use rustix::fs::{MemfdFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::io::pwrite;

use super::*;
use crate::hex::Bytes;
use crate::sum::crc;
use crate::testing::{Random, ramp};

const GENERATION: Id = Bytes([7; 32]);

fn image<'a>(bytes: u64, sources: &'a [Source<'a>]) -> Image<'a> {
    Image {
        step: 12,
        generation: GENERATION,
        bytes,
        sources,
        note: b"what belongs to it",
    }
}

fn slot(image: u64) -> Arc<Slot> {
    Slot::create(image, 100, 2).unwrap().0
}

/// Another process' mapping of the same slot.
fn again(slot: &Slot) -> Arc<Slot> {
    Slot::open(slot.fd().try_clone_to_owned().unwrap(), 2).unwrap()
}

#[test]
fn what_is_sealed_is_what_is_taken() {
    let bytes = ramp(&[3 * CHUNK + 777], 1);
    let whole = bytes.len() as u64;
    let (slot, made) = Slot::create(whole, 100, 2).unwrap();
    assert!(made.bytes > whole && slot.capacity().0 >= whole);
    let reader = again(&slot);
    assert!(reader.take().unwrap().is_none());
    let sources = [Source {
        at: 0,
        bytes: &bytes,
    }];
    slot.fill(&image(whole, &sources), 3).unwrap();
    assert_eq!(reader.state(), (State::Sealed, 12));

    let sealed = reader.take().unwrap().unwrap();
    assert_eq!(sealed.image(), bytes);
    assert!(sealed.image().as_ptr().addr().is_multiple_of(PAGE));
    let sums: Vec<u64> = bytes.chunks(CHUNK as usize).map(crc).collect();
    assert_eq!(sealed.sums, sums);
    assert_eq!((sealed.step, sealed.generation), (12, GENERATION));
    assert_eq!(sealed.note, b"what belongs to it");
    // Busy until it is released, and for whom it is says the error.
    let busy = slot.fill(&image(whole, &sources), 1).unwrap_err();
    assert!(
        matches!(
            busy,
            SlotError::Busy {
                state: State::Taken,
                step: 12
            }
        ),
        "{busy}"
    );
    assert!(slot.take().unwrap().is_none());
    drop(sealed);
    assert_eq!(slot.state().0, State::Sealed);
    reader.take().unwrap().unwrap().release();
    assert_eq!(slot.state().0, State::Free);
    slot.fill(&image(0, &[]), 1).unwrap();
    assert_eq!(reader.take().unwrap().unwrap().image(), b"");
}

#[test]
fn what_does_not_fit_is_refused_and_changes_nothing() {
    let slot = slot(10_000);
    let bytes = vec![1; 20_000];
    let refused = |image: &Image<'_>| {
        let error = slot.fill(image, 1).unwrap_err();
        assert_eq!(slot.state(), (State::Free, 0), "{error}");
        error.to_string()
    };
    assert!(refused(&image(20_000, &[])).contains("larger slots"));
    let note = Image {
        note: &bytes,
        ..image(1, &[])
    };
    assert!(refused(&note).contains("20000 bytes of note"));
    let part = |at, len| Source {
        at,
        bytes: &bytes[..len],
    };
    for sources in [
        [part(0, 10), part(9, 1)],
        [part(10, 1), part(0, 1)],
        [part(0, 1), part(9_999, 2)],
        [part(0, 1), part(u64::MAX, 2)],
    ] {
        assert!(refused(&image(10_000, &sources)).contains("not in order"));
    }
    assert!(Slot::create(1 << 57, 0, 1).is_err());
    assert!(Slot::create(0, MAX_NOTE + 1, 1).is_err());
}

#[test]
fn the_dead_leave_nothing_half_done() {
    let slot = slot(100);
    let other = again(&slot);
    other.reclaim();
    assert_eq!(slot.state().0, State::Free);
    // A worker that died while it copied; and one that was only taken for dead.
    let filling = slot.step_on(State::Free, State::Filling).unwrap();
    assert!(other.take().unwrap().is_none());
    other.reclaim();
    assert_eq!(slot.state().0, State::Free);
    slot.fill(&image(1, &[]), 1).unwrap();
    let late = slot
        .region
        .exchange(word::STATE, filling, after(filling, State::Sealed));
    assert!(late.is_err());
    // A writer that died leaves the slot sealed; one that was only taken for dead frees nothing.
    let held = other.take().unwrap().unwrap();
    slot.reclaim();
    assert_eq!(slot.state().0, State::Sealed);
    let next = slot.take().unwrap().unwrap();
    held.release();
    assert_eq!(slot.state().0, State::Taken);
    next.release();
    assert_eq!(slot.state().0, State::Free);
}

#[test]
fn an_heir_finds_what_the_dead_left() {
    let take_up = |slot: &Slot| Slot::inherit(slot.fd().try_clone_to_owned().unwrap()).unwrap();
    let inherit = |slot: &Slot| {
        let (heir, torn) = take_up(slot);
        assert!(!torn);
        heir
    };
    let bytes = ramp(&[CHUNK + 777], 1);
    let sources = [Source {
        at: 0,
        bytes: &bytes,
    }];
    let dead = slot(bytes.len() as u64);
    assert!(inherit(&dead).left().is_none(), "nothing was ever sealed");
    dead.fill(&image(bytes.len() as u64, &sources), 1).unwrap();
    // Its writer died with it in its hands.
    let taken = dead.take().unwrap().unwrap();
    dead.keep(true);
    let heir = inherit(&dead);
    assert_eq!((heir.state(), heir.is_kept()), ((State::Sealed, 12), false));
    assert!(heir.left().is_none(), "it is sealed, and to be taken");
    std::mem::forget(taken);
    heir.take().unwrap().unwrap().release();
    // As after a commit.
    let heir = inherit(&heir);
    let (view, note) = heir.left().unwrap();
    assert_eq!((view.step, view.generation), (12, GENERATION));
    assert_eq!(
        (view.image(), &note[..]),
        (&bytes[..], &b"what belongs to it"[..])
    );
    assert!(view.is_whole());
    // Another copy begins: then nothing of it counts any more, whether that ends or not.
    heir.step_on(State::Free, State::Filling).unwrap();
    assert!(!view.is_whole());
    heir.region.put_sum(0, 1);
    let (heir, torn) = take_up(&heir);
    assert!(torn, "who was filling it may live");
    assert_eq!(heir.state().0, State::Free);
    assert!(heir.left().is_none() && !view.is_whole());
}

#[test]
fn damage_is_found() {
    let bytes = ramp(&[CHUNK + 5], 1);
    let sources = [Source {
        at: 0,
        bytes: &bytes,
    }];
    let whole = bytes.len() as u64;
    let slot = slot(whole);
    let at = slot.region.shape();
    let note = at.len() as u64 - at.note;
    let sums = PAGE as u64 + at.image;
    for (place, byte) in [
        (note, b'W'),
        (sums, 1),
        (word::STEP as u64, 99),
        (word::GENERATION[3] as u64, 99),
        (word::IMAGE as u64 + 7, 255),
        (word::NOTE as u64 + 7, 255),
        (word::IMAGE as u64, 4),
    ] {
        slot.fill(&image(whole, &sources), 1).unwrap();
        pwrite(slot.fd(), &[byte], place).unwrap();
        let error = slot.take().unwrap_err();
        assert!(matches!(error, SlotError::Damaged(_)), "{place}: {error}");
        assert_eq!(slot.state().0, State::Free);
    }
    // What is damaged in the image does not match its sum.
    slot.fill(&image(whole, &sources), 1).unwrap();
    pwrite(slot.fd(), &[0xaa], PAGE as u64 + CHUNK + 1).unwrap();
    let sealed = slot.take().unwrap().unwrap();
    let sums: Vec<u64> = sealed.image().chunks(CHUNK as usize).map(crc).collect();
    assert_eq!(sums[0], sealed.sums[0]);
    assert_ne!(sums[1], sealed.sums[1]);
}

#[test]
fn other_descriptors_are_no_slots() {
    let refused = |fd: OwnedFd| Slot::open(fd, 1).unwrap_err().to_string();
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(refused(file.into()).contains("not sealed"));
    let memfd = |len| {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create("no-slot", flags).unwrap();
        ftruncate(&fd, len).unwrap();
        fd
    };
    assert!(refused(memfd(8192)).contains("not sealed"));
    let sealed = |len, words: &[(usize, u64)]| {
        let fd = memfd(len);
        for (at, value) in words {
            pwrite(&fd, &value.to_le_bytes(), *at as u64).unwrap();
        }
        fcntl_add_seals(
            &fd,
            rustix::fs::SealFlags::SHRINK
                | rustix::fs::SealFlags::GROW
                | rustix::fs::SealFlags::SEAL,
        )
        .unwrap();
        refused(fd)
    };
    assert!(sealed(100, &[]).contains("too short"));
    assert!(sealed(8192, &[]).contains("does not begin"));
    let magic = u64::from_le_bytes(*b"MUSTERSL");
    assert!(sealed(8192, &[(0, magic), (8, 9)]).contains("layout 9"));
    for (image, note) in [
        (4096, 0),
        (1, 0),
        (u64::MAX, 0),
        (0, u64::MAX),
        (1 << 55, 0),
    ] {
        let words = [(0, magic), (8, 1), (16, image), (24, note)];
        assert!(
            sealed(8192, &words).contains("not what it says"),
            "{image} {note}"
        );
    }
}

proptest! {
    // Megabytes each.
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn any_parts_make_the_image(seed: u64, threads in 1usize..4, old: bool) {
        let mut random = Random(seed);
        let bytes = random.below(3 * CHUNK);
        let data = ramp(&[bytes + 1], 1);
        let (mut expected, mut sources, mut at) = (vec![0; bytes as usize], Vec::new(), 0);
        while at < bytes {
            at += random.below(3) * random.below(100_000);
            let len = (random.below(2) * random.below(1_000_000) + random.below(200)).min(bytes.saturating_sub(at));
            if at > bytes {
                break;
            }
            // Not aligned, as tensors of a view are not.
            let from = random.below(bytes - len + 1) as usize;
            let part = &data[from..from + len as usize];
            expected[at as usize..][..part.len()].copy_from_slice(part);
            sources.push(Source { at, bytes: part });
            at += len;
        }
        let slot = slot(bytes.max(1));
        if old {
            let all = vec![0xee; slot.capacity().0 as usize];
            slot.fill(&image(slot.capacity().0, &[Source { at: 0, bytes: &all }]), 1).unwrap();
            slot.take().unwrap().unwrap().release();
        }
        slot.fill(&image(bytes, &sources), threads).unwrap();
        let sealed = slot.take().unwrap().unwrap();
        prop_assert!(sealed.image() == expected);
        let sums: Vec<u64> = expected.chunks(CHUNK as usize).map(crc).collect();
        prop_assert_eq!(&sealed.sums, &sums);
    }
}
