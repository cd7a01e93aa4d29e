//! Chunks that come out of parity, and chunks that do not.

use muster_checkpoint::parity::fold;
use muster_protocol::memory::parity::{MAX_PARITIES, Parity, Part, Stripe};

use super::*;

/// Ways in which a launcher that holds parity answers.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Adds {
    Well,
    /// One bit is not as it was.
    Flips,
    /// It has no such piece any more.
    Gone,
    /// It says of more parts that they are in it than it has told.
    More,
    /// It says that a part is in a piece that its image does not reach.
    Beyond,
    Hangs,
    /// The other part is not in it yet.
    One,
    /// It names a part of no file that there is, which is in no piece.
    Names,
    /// That part is in it, too.
    Foreign,
    /// There is more of it than one answer names, and this is the last one.
    Last,
}

/// A launcher that holds nothing but the sum of these, of which the first one is longest.
fn adds(who: &'static str, files: &Files, step: u64, does: Adds) -> u16 {
    let part = |(name, bytes): (&Name, &Vec<u8>)| Part {
        file: name.file.clone(),
        bytes: bytes.len() as u64,
        stripe: Stripe { of: 1, first: 0 },
    };
    let mut parts: Vec<Part> = files.iter().map(part).collect();
    if does == Adds::Beyond {
        parts.get_mut(1).unwrap().stripe = Stripe { of: 2, first: 1 };
    }
    if matches!(does, Adds::Names | Adds::Foreign) {
        parts.insert(
            0,
            Part {
                file: "n9-0.safetensors".into(),
                bytes: 77,
                stripe: Stripe { of: 1, first: 0 },
            },
        );
    }
    let last = Parity {
        number: 4,
        step,
        generation: [5; 8],
        parts,
    };
    let mut told = vec![last];
    if does == Adds::Last {
        // Of another checkpoint.
        let before = |number| Parity {
            number,
            step: step + 1,
            ..told[0].clone()
        };
        let mut all: Vec<Parity> = (5..100).map(before).collect();
        told[0].number = 100;
        all.append(&mut told);
        told = all;
    }
    let most = match does {
        Adds::One => 1,
        _ => files.len(),
    };
    let mut sum = vec![0; files.values().map(Vec::len).max().unwrap()];
    for bytes in files.values().take(most) {
        fold(&mut sum, bytes);
    }
    let parts = match does {
        Adds::More => 7,
        Adds::One => 1,
        Adds::Names => 6,
        Adds::Foreign => 7,
        _ => 3,
    };
    serve(move |link, ask| match ask {
        Ask::List => {
            let (who, pid, list) = (who.to_owned(), 1, Vec::new());
            link.say(&Answer::Held { who, pid, list }).unwrap();
        }
        Ask::Parities { above } => {
            let list = told.iter().filter(|parity| parity.number > above);
            let list = list.take(MAX_PARITIES).cloned().collect();
            link.say(&Answer::Parities { list }).unwrap();
        }
        Ask::Unfold {
            number,
            piece: 0,
            len,
            ..
        } if number == told.last().unwrap().number => {
            let mut sum = sum[..len as usize].to_vec();
            match does {
                Adds::Gone => return link.say(&Answer::Gone).unwrap(),
                Adds::Hangs => return thread::sleep(SOON * 2),
                Adds::Flips => sum[len as usize / 3] ^= 32,
                _ => {}
            }
            link.say(&Answer::Folded { parts }).unwrap();
            let until = std::time::Instant::now() + SOON * 30;
            link.write(&sum, until).unwrap();
        }
        other => panic!("{other:?}"),
    })
}

/// A checkpoint of two files: all, the first one, and the second one. Nobody has the first one.
fn two(place: &Path) -> (Id, Files, u64, Files) {
    let (digest, files) = checkpoint(place);
    let mut second = files.clone();
    let (_, first) = second.pop_first().unwrap();
    assert_eq!(second.len(), 1);
    (digest, files, first.len() as u64, second)
}

#[test]
fn what_nobody_has_comes_out_of_parity() {
    let place = tempfile::tempdir().unwrap();
    let (digest, files, first, second) = two(place.path());
    std::fs::remove_dir_all(place.path().join("data")).unwrap();
    let total: u64 = second.values().map(|file| file.len() as u64).sum();
    let other = launcher("n1", second, Does::Well);
    let without = restore(place.path(), digest, NOBODY, &[other]);
    assert!(without.is_err(), "{without:?}");
    let peers = [other, adds("n2", &files, 40, Adds::Well)];
    let origins = restore(place.path(), digest, NOBODY, &peers).unwrap();
    assert_eq!(from(&origins, "n2's parity with n1's memory"), first);
    assert_eq!(
        from(&origins, "n1's memory"),
        total,
        "what helped is not counted twice"
    );
    assert_eq!(from(&origins, "the store"), 0);
    assert_eq!((origins.from.len(), origins.why), (3, None));
}

#[test]
fn what_does_not_come_out_comes_from_the_store() {
    let place = tempfile::tempdir().unwrap();
    let (digest, files, first, second) = two(place.path());
    let whole = launcher("n1", second.clone(), Does::Well);
    for (does, other, words) in [
        (
            Adds::Flips,
            whole,
            "does not come out of n2's parity at byte 0",
        ),
        (Adds::Gone, whole, "is not in n2's parity at byte 0"),
        (Adds::More, whole, "n2's parity is not what it was"),
        (Adds::Beyond, whole, "n2's parity is not what it was"),
        (
            Adds::Foreign,
            whole,
            "is n9-0.safetensors, which is not of this checkpoint",
        ),
        (Adds::Hangs, whole, "n2's parity failed"),
        // The other part is not where it was, or not what it was.
        (Adds::Well, NOBODY, "which is in no memory"),
        (
            Adds::Well,
            launcher("n3", second.clone(), Does::Flips),
            "what n3's memory holds of data/40-0505050505050505-1/n0-1.safetensors is damaged",
        ),
        (
            Adds::Well,
            launcher("n3", second.clone(), Does::Lies),
            "no more",
        ),
    ] {
        let peers = [other, adds("n2", &files, 40, does)];
        let origins = restore(place.path(), digest, NOBODY, &peers).unwrap();
        let left = from(&origins, "the store");
        assert!(left >= first, "{does:?}: {origins:?}");
        let parity = origins.from.iter().any(|(who, _)| who.contains("parity"));
        let why = origins.why.clone().unwrap_or_default();
        assert!(!parity && why.contains(words), "{does:?}: {origins:?}");
        // Other parity comes before the store, where what it needs is there.
        if other == whole {
            let peers = [peers[0], peers[1], adds("n4", &files, 40, Adds::Well)];
            let origins = restore(place.path(), digest, NOBODY, &peers).unwrap();
            let parity = from(&origins, "n4's parity with n1's memory");
            assert_eq!(parity, first, "{does:?}: {origins:?}");
            assert_eq!(from(&origins, "the store"), 0, "{does:?}: {origins:?}");
        }
    }
}

#[test]
fn a_sum_of_one_needs_nobody_else() {
    let place = tempfile::tempdir().unwrap();
    let (digest, files, first, second) = two(place.path());
    let total: u64 = second.values().map(|file| file.len() as u64).sum();
    let peers = [adds("n2", &files, 40, Adds::One)];
    let origins = restore(place.path(), digest, NOBODY, &peers).unwrap();
    assert_eq!(from(&origins, "n2's parity"), first);
    // Of the other one it has nothing.
    assert_eq!(from(&origins, "the store"), total);
}

#[test]
fn a_part_of_nothing_spoils_no_other() {
    let place = tempfile::tempdir().unwrap();
    let (digest, files, first, second) = two(place.path());
    let other = launcher("n1", second, Does::Well);
    let peers = [other, adds("n2", &files, 40, Adds::Names)];
    let origins = restore(place.path(), digest, NOBODY, &peers).unwrap();
    assert_eq!(from(&origins, "n2's parity with n1's memory"), first);
    assert_eq!((from(&origins, "the store"), origins.why), (0, None));
}

#[test]
fn all_parity_is_asked_for_however_much_there_is() {
    let place = tempfile::tempdir().unwrap();
    let (digest, files, first, second) = two(place.path());
    let other = launcher("n1", second, Does::Well);
    let peers = [other, adds("n2", &files, 40, Adds::Last)];
    let origins = restore(place.path(), digest, NOBODY, &peers).unwrap();
    assert_eq!(from(&origins, "n2's parity with n1's memory"), first);
    assert_eq!((from(&origins, "the store"), origins.why), (0, None));
}

#[test]
fn parity_and_what_it_needs_are_found_among_many() {
    let place = tempfile::tempdir().unwrap();
    let (digest, files, first, second) = two(place.path());
    std::fs::remove_dir_all(place.path().join("data")).unwrap();
    let asked = Arc::default();
    let mut peers = vec![counts(&asked); 200];
    // The sum is near, what has to be taken from it is far.
    peers[3] = adds("n2", &files, 40, Adds::Well);
    peers[199] = launcher("n1", second, Does::Well);
    let origins = restore(place.path(), digest, NOBODY, &peers).unwrap();
    assert_eq!(from(&origins, "n2's parity with n1's memory"), first);
    assert_eq!((from(&origins, "the store"), origins.why), (0, None));
    assert_eq!(asked.load(Ordering::Relaxed), 198);
}

#[test]
fn parity_of_another_step_is_none() {
    let place = tempfile::tempdir().unwrap();
    let (digest, files, first, second) = two(place.path());
    let other = launcher("n1", second, Does::Well);
    let peers = [other, adds("n2", &files, 41, Adds::Well)];
    let origins = restore(place.path(), digest, NOBODY, &peers).unwrap();
    assert_eq!(from(&origins, "the store"), first);
    assert_eq!(origins.why, None, "it is not even asked for");
}

#[test]
fn damage_of_a_helper_is_found_before_it_is_taken_away() {
    let place = tempfile::tempdir().unwrap();
    let (digest, files, first, second) = two(place.path());
    let bad = launcher("n1", second.clone(), Does::Flips);
    let good = launcher("n3", second, Does::Well);
    let peers = [bad, good, adds("n2", &files, 40, Adds::Well)];
    let origins = restore(place.path(), digest, NOBODY, &peers).unwrap();
    assert_eq!(from(&origins, "n2's parity with n3's memory"), first);
    assert_eq!(
        (from(&origins, "n1's memory"), from(&origins, "the store")),
        (0, 0)
    );
}
