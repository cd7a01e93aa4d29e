use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

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

/// Bytes that are brought, or not.
struct Cargo<'a> {
    spans: Vec<Span>,
    bytes: Vec<&'a [u8]>,
    /// A chunk that never comes.
    fails_at: Option<u64>,
    /// Result at the end.
    end: fn() -> Ended,
    begun: AtomicUsize,
    ended: AtomicUsize,
}

impl<'a> Cargo<'a> {
    fn new(parts: &[(u64, &'a [u8])], fails_at: Option<u64>) -> Cargo<'a> {
        let span = |(at, bytes): &(u64, &[u8])| Span {
            at: *at,
            bytes: bytes.len() as u64,
        };
        Cargo {
            spans: parts.iter().map(span).collect(),
            bytes: parts.iter().map(|(_, bytes)| *bytes).collect(),
            fails_at,
            end: || Ended::Well,
            begun: AtomicUsize::new(0),
            ended: AtomicUsize::new(0),
        }
    }

    fn calls(&self) -> (usize, usize) {
        (self.begun.load(Relaxed), self.ended.load(Relaxed))
    }
}

impl Far for Cargo<'_> {
    fn spans(&self) -> &[Span] {
        &self.spans
    }

    fn begin(&self) -> Result<(), FarError> {
        self.begun.fetch_add(1, Relaxed);
        Ok(())
    }

    fn bring(&self, image: *mut [u8], begin: u64, end: u64) -> Result<(), FarError> {
        assert_eq!(self.calls(), (1, 0));
        if self.fails_at == Some(begin) {
            return Err("the device is gone".into());
        }
        for (span, bytes) in self.spans.iter().zip(&self.bytes) {
            let (from, to) = (span.at.max(begin), (span.at + span.bytes).min(end));
            if from < to {
                let part = &bytes[(from - span.at) as usize..(to - span.at) as usize];
                // SAFETY: spans are in the image, and these bytes are this call's.
                unsafe {
                    let there = image.cast::<u8>().add(from as usize);
                    there.copy_from_nonoverlapping(part.as_ptr(), part.len());
                }
            }
        }
        Ok(())
    }

    fn end(&self) -> Ended {
        self.ended.fetch_add(1, Relaxed);
        (self.end)()
    }
}

#[test]
fn what_was_not_brought_is_not_sealed() {
    let bytes = ramp(&[3 * CHUNK], 1);
    let slot = slot(3 * CHUNK);
    let header = [Source {
        at: 0,
        bytes: &bytes[..100],
    }];
    let whole = image(3 * CHUNK, &header);
    let parts = [(4096, &bytes[4096..])];
    for (fails_at, threads) in [(0, 1), (CHUNK, 3), (2 * CHUNK, 3)] {
        let cargo = Cargo::new(&parts, Some(fails_at));
        let error = slot.fill_with(&whole, &cargo, threads).unwrap_err();
        let SlotError::Far(why) = error else {
            panic!("{error}");
        };
        assert_eq!(why.to_string(), "the device is gone");
        assert_eq!((slot.state().0, cargo.calls()), (State::Free, (1, 1)));
    }
    // All seemed well until the end.
    let cargo = Cargo {
        end: || Ended::Badly("a copy failed".into()),
        ..Cargo::new(&parts, None)
    };
    let error = slot.fill_with(&whole, &cargo, 2).unwrap_err();
    assert!(matches!(error, SlotError::Far(_)), "{error}");
    assert_eq!((slot.state().0, cargo.calls()), (State::Free, (1, 1)));
    let cargo = Cargo::new(&parts, None);
    slot.fill_with(&whole, &cargo, 2).unwrap();
    assert_eq!(cargo.calls(), (1, 1));
    let sealed = slot.take().unwrap().unwrap();
    assert_eq!(sealed.image()[..100], bytes[..100]);
    assert!(sealed.image()[100..4096].iter().all(|byte| *byte == 0));
    assert!(sealed.image()[4096..] == bytes[4096..]);
    // Nothing is begun in a slot that is somebody else's, or with parts on top of each other.
    let cargo = Cargo::new(&parts, None);
    let busy = slot.fill_with(&whole, &cargo, 1).unwrap_err();
    assert!(matches!(busy, SlotError::Busy { .. }), "{busy}");
    sealed.release();
    for wrong in [
        [(99, &bytes[..10]), (4096, &bytes[..10])],
        [(200, &bytes[..10]), (209, &bytes[..10])],
        [(200, &bytes[..10]), (3 * CHUNK - 9, &bytes[..10])],
    ] {
        let cargo = Cargo::new(&wrong, None);
        let error = slot.fill_with(&whole, &cargo, 1).unwrap_err();
        assert!(matches!(error, SlotError::Sources(_)), "{error}");
        assert_eq!((slot.state().0, cargo.calls()), (State::Free, (0, 0)));
    }
}

#[test]
fn what_is_tied_to_a_slot_goes_before_its_memory() {
    /// Looks at the memory when it is dropped.
    struct Tied(usize, Arc<AtomicUsize>);
    impl Drop for Tied {
        fn drop(&mut self) {
            let at: *const u8 = std::ptr::with_exposed_provenance(self.0);
            // SAFETY: it is mapped, or this test ends here.
            self.1.store(unsafe { at.read_volatile() }.into(), Relaxed);
        }
    }
    let seen = Arc::new(AtomicUsize::new(0));
    let slot = slot(100);
    let make = |memory: *mut [u8]| {
        assert!(memory.len() >= 100 && memory.cast::<u8>().addr().is_multiple_of(PAGE));
        Ok::<_, &str>(Tied(memory.cast::<u8>().expose_provenance(), seen.clone()))
    };
    // What is refused is asked for again.
    assert_eq!(
        slot.tie(|_| Err::<Tied, _>("not now")).err(),
        Some("not now")
    );
    assert!(slot.tied::<Tied>().is_none());
    let first = slot.tie(make).unwrap().unwrap().0;
    // Once.
    assert_eq!(slot.tie(make).unwrap().unwrap().0, first);
    assert!(slot.tie(|_| Ok::<_, ()>(7u8)).unwrap().is_none());
    assert_eq!(slot.tied::<Tied>().unwrap().0, first);
    let sources = [Source {
        at: 0,
        bytes: &[42],
    }];
    slot.fill(&image(1, &sources), 1).unwrap();
    drop(slot);
    assert_eq!(seen.load(Relaxed), 42);
}

#[test]
fn what_may_still_be_written_to_is_nobody_elses_and_stays_mapped() {
    let bytes = ramp(&[2 * CHUNK], 1);
    let parts = [(4096, &bytes[4096..])];
    let whole = image(2 * CHUNK, &[]);
    // An error on the way, and none before the end.
    for fails_at in [Some(CHUNK), None] {
        let slot = slot(2 * CHUNK);
        let (launcher, dropped) = (again(&slot), Arc::new(()));
        let tied = slot.tie(|_| Ok::<_, ()>(dropped.clone()));
        assert!(tied.unwrap().is_some());
        let cargo = Cargo {
            end: || Ended::Unknown("the driver does not say".into()),
            ..Cargo::new(&parts, fails_at)
        };
        let error = slot.fill_with(&whole, &cargo, 2).unwrap_err();
        let SlotError::Abandoned(why) = error else {
            panic!("{error}");
        };
        let cause = match fails_at {
            Some(_) => "the device is gone",
            None => "the driver does not say",
        };
        assert_eq!((why.to_string().as_str(), cargo.calls()), (cause, (1, 1)));
        assert_eq!(launcher.state().0, State::Filling);
        assert!(launcher.take().unwrap().is_none());
        // Not even where somebody has taken this process for dead.
        launcher.reclaim();
        assert_eq!(launcher.state().0, State::Free);
        let again = slot.fill(&whole, 1).unwrap_err();
        assert!(matches!(again, SlotError::Abandoned(_)), "{again}");
        // Of this process it is for good: another's mapping may come and go.
        let at = slot.region.image_memory().cast::<u8>().expose_provenance();
        drop(slot);
        assert_eq!(Arc::strong_count(&dropped), 2);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let page = format!("{:x}-", at - PAGE);
        assert!(maps.lines().any(|line| line.starts_with(&page)), "{maps}");
        // Who comes after this process may have it.
        launcher.fill(&whole, 1).unwrap();
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
        let mut brought: Vec<(u64, &[u8])> = Vec::new();
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
            match random.below(2) {
                0 => sources.push(Source { at, bytes: part }),
                _ => brought.push((at, part)),
            }
            at += len;
        }
        let slot = slot(bytes.max(1));
        if old {
            let all = vec![0xee; slot.capacity().0 as usize];
            slot.fill(&image(slot.capacity().0, &[Source { at: 0, bytes: &all }]), 1).unwrap();
            slot.take().unwrap().unwrap().release();
        }
        slot.fill_with(&image(bytes, &sources), &Cargo::new(&brought, None), threads).unwrap();
        let sealed = slot.take().unwrap().unwrap();
        prop_assert!(sealed.image() == expected);
        let sums: Vec<u64> = expected.chunks(CHUNK as usize).map(crc).collect();
        prop_assert_eq!(&sealed.sums, &sums);
    }
}
