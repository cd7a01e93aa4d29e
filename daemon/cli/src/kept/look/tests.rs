use muster_checkpoint::retention::Best;
use muster_protocol::record::CommitRef;

use super::*;
use crate::kept::testing::{Bench, standing};

const NEWEST: Digest = Digest([9; 32]);
const OLDER: Digest = Digest([7; 32]);

/// Eight checkpoints of the newest generation, at steps 1 to 8, in slots 11 to 18.
fn eight(bench: &Bench) -> Vec<Standing> {
    let save = |step: u64| standing(10 + step, bench.save(NEWEST, step, Some(step as f64)));
    (1..=8).map(save).collect()
}

fn look_at(bench: &Bench, rules: &Rules, standings: &[Standing]) -> Reviewed {
    review(&bench.place(), rules, NEWEST, standings, &Unread::new()).unwrap()
}

fn names(reviewed: &Reviewed) -> Vec<&str> {
    reviewed
        .left
        .iter()
        .map(|left| left.name.as_str())
        .collect()
}

fn needs(commit: &CommitRef) -> Vec<String> {
    let save = muster_protocol::checkpoint::Save {
        generation: commit.generation,
        attempt: 1,
        step: commit.step,
    };
    vec![save.folder(), name_of(commit.manifest)]
}

#[test]
fn two_are_verified_before_anything_goes_and_nothing_is_deleted_before_it_is_retired() {
    let bench = Bench::new();
    let mut all = eight(&bench);
    let rules = Rules::default();
    // The newest first: it stays the longest.
    for newest in [8, 7] {
        let found = look_at(&bench, &rules, &all);
        let of = &all[newest - 1];
        assert_eq!(found.verify, Some((of.seq, of.commit.manifest)));
        assert_eq!((found.retire.len(), found.left.len()), (0, 0));
        assert_eq!(found.seen[newest - 1].needs, needs(&of.commit));
        all[newest - 1].verified = true;
    }
    let found = look_at(&bench, &rules, &all);
    assert_eq!(found.verify, None);
    assert_eq!(found.retire, [11, 12, 13, 14, 15]);
    assert_eq!(names(&found), Vec::<&str>::new());
    // Once the log has it, all of it may go, and nothing else.
    all[2].retired = true;
    let found = look_at(&bench, &rules, &all);
    assert_eq!(names(&found), needs(&all[2].commit));
    assert_eq!(found.retire, [11, 12, 14, 15]);
    let place = bench.place();
    for left in &found.left {
        place.remove(&left.name).unwrap();
    }
    let found = look_at(&bench, &rules, &all);
    assert!(found.seen[2].gone && found.left.is_empty());
}

#[test]
fn the_best_by_a_metric_stay_besides() {
    let bench = Bench::new();
    let mut all = eight(&bench);
    (all[7].verified, all[6].verified) = (true, true);
    let keep = |best, count, metric: &str| Rules {
        policy: Policy {
            last: 3,
            best: Some((best, count)),
        },
        metric: metric.into(),
    };
    let lowest = look_at(&bench, &keep(Best::Lowest, 2, "loss"), &all);
    assert_eq!(lowest.retire, [13, 14, 15]);
    let unknown = look_at(&bench, &keep(Best::Lowest, 2, "accuracy"), &all);
    assert_eq!(unknown.retire, [11, 12, 13, 14, 15]);
    all[0].pinned = true;
    let none = look_at(&bench, &keep(Best::Highest, 1, "loss"), &all);
    assert_eq!(none.retire, [12, 13, 14, 15]);
}

#[test]
fn what_is_damaged_is_named_and_rejected_before_it_goes() {
    let bench = Bench::new();
    let mut all = eight(&bench);
    (all[4].verified, all[3].verified) = (true, true);
    // By a person: all data, a manifest, and half a file.
    std::fs::remove_dir_all(bench.file(&all[7].commit).parent().unwrap()).unwrap();
    std::fs::write(bench.file(&all[5].commit), "cut").unwrap();
    let found = look_at(&bench, &Rules::default(), &all);
    let why = |at: usize| match &found.seen[at].state {
        State::Damaged { why } => why.clone(),
        other => panic!("{other:?}"),
    };
    assert!(
        why(7).contains("n0-0.safetensors is not there"),
        "{}",
        why(7)
    );
    assert!(
        why(5).contains("has 3 bytes, 8192 were written"),
        "{}",
        why(5)
    );
    // The newest three that can be used, and what is damaged only once that is in the log.
    assert_eq!(found.retire, [11, 12, 13]);
    (all[7].rejected, all[5].rejected) = (true, true);
    let found = look_at(&bench, &Rules::default(), &all);
    assert_eq!(found.retire, [11, 12, 13, 16, 18]);
}

#[test]
fn what_cannot_be_read_keeps_itself_and_holds_nothing_else_up() {
    let bench = Bench::new();
    let mut all = eight(&bench);
    (all[6].verified, all[5].verified) = (true, true);
    let orphan = bench.save(OLDER, 3, None);
    // Of a generation that can commit nothing any more: only that they may be needed keeps these.
    for at in [0, 1, 4] {
        all[at].commit = bench.save(OLDER, 20 + at as u64, None);
    }
    // Something that is no file now, a person's pin whose manifest is gone, and one that is damaged.
    let no_file = bench.manifest(&all[0].commit);
    std::fs::remove_file(&no_file).unwrap();
    std::fs::create_dir(&no_file).unwrap();
    std::fs::remove_file(bench.manifest(&all[1].commit)).unwrap();
    (all[1].pinned, all[1].rejected) = (true, true);
    std::fs::write(bench.manifest(&all[4].commit), "{}").unwrap();
    all[2].retired = true;
    let found = look_at(&bench, &Rules::default(), &all);
    let state = |at: usize| &found.seen[at].state;
    assert!(matches!(state(0), State::Unreadable { .. }), "{found:?}");
    assert!(matches!(state(1), State::Damaged { why } if why.contains("is not there")));
    assert!(matches!(state(4), State::Damaged { why } if why.contains("its digest is")));
    for at in [0, 1, 4] {
        let mut wanted = needs(&all[at].commit);
        let mut known = found.seen[at].needs.clone();
        wanted.sort();
        known.sort();
        assert_eq!(known, wanted);
    }
    // The newest three that can be read stay; the one before them goes, and so does what is nobody's.
    assert_eq!(found.retire, [14]);
    let mut expected = [needs(&orphan), needs(&all[2].commit)].concat();
    expected.sort();
    assert_eq!(names(&found), expected);
    // Once it is rejected and retired, what it may have needed is nobody's.
    (all[4].rejected, all[4].retired) = (true, true);
    let found = look_at(&bench, &Rules::default(), &all);
    expected.extend(needs(&all[4].commit));
    expected.sort();
    assert_eq!(names(&found), expected);
}

/// A checkpoint that was known to be good counts for nothing while it cannot be read.
#[test]
fn two_that_can_be_read_stay_besides_what_cannot() {
    let bench = Bench::new();
    let mut all = eight(&bench);
    (all[7].verified, all[6].verified) = (true, true);
    let manifest = bench.manifest(&all[7].commit);
    std::fs::remove_file(&manifest).unwrap();
    std::fs::create_dir(&manifest).unwrap();
    let found = look_at(&bench, &Rules::default(), &all);
    assert_eq!(found.retire, [0; 0], "one alone is known to be good");
    assert_eq!(found.verify, Some((16, all[5].commit.manifest)));
    all[5].verified = true;
    let found = look_at(&bench, &Rules::default(), &all);
    assert_eq!(found.retire, [11, 12, 13, 14]);
}

/// A disk that fails in the middle of a file shows at no glance.
#[test]
fn what_could_not_be_read_to_its_end_is_passed_over_and_tried_again_last() {
    let bench = Bench::new();
    let mut all = eight(&bench);
    let (rules, mut unread) = (Rules::default(), Unread::new());
    let look = |all: &[Standing], unread: &Unread| {
        review(&bench.place(), &rules, NEWEST, all, unread).unwrap()
    };
    for (seq, next) in [(18, 17), (17, 16)] {
        let of = &all[seq as usize - 11].commit;
        let why = "input/output error".into();
        unread.insert(of.manifest, State::Unreadable { why });
        let found = look(&all, &unread);
        assert_eq!(found.verify.map(|(seq, _)| seq), Some(next));
        assert_eq!(found.retire, [0; 0]);
    }
    (all[5].verified, all[4].verified) = (true, true);
    let found = look(&all, &unread);
    assert!(matches!(found.seen[7].state, State::Unreadable { .. }));
    // The newest three that can be read stay, and what cannot.
    assert_eq!((found.verify, found.retire), (None, vec![11, 12, 13]));
    let all = &all[6..];
    assert_eq!(look(all, &unread).verify.map(|(seq, _)| seq), Some(18));
}

#[test]
fn an_attempt_of_the_newest_generation_may_still_be_committed() {
    let bench = Bench::new();
    let dead = bench.save(OLDER, 5, None);
    bench.save(NEWEST, 6, None);
    std::fs::create_dir(bench.job().join("data/mine")).unwrap();
    let found = look_at(&bench, &Rules::default(), &[]);
    assert_eq!(names(&found), needs(&dead));
    assert!(found.left.iter().all(|left| left.generation == [7; 8]));
}

#[test]
fn a_store_that_is_away_has_damaged_nothing() {
    let bench = Bench::new();
    let all = eight(&bench);
    let away = bench.root().join("away");
    std::fs::rename(bench.root().join("muster-store"), &away).unwrap();
    std::fs::remove_dir_all(bench.job().join("data")).unwrap();
    let place = bench.place();
    let rules = Rules::default();
    assert!(matches!(
        review(&place, &rules, NEWEST, &all, &Unread::new()),
        Err(Unknown::Store(_))
    ));
    let manifest = all[0].commit.manifest;
    assert!(matches!(
        whole(&place, manifest, Depth::Sizes, &|| {}),
        Err(Unknown::Store(_))
    ));
    std::fs::rename(away, bench.root().join("muster-store")).unwrap();
    assert!(review(&place, &rules, NEWEST, &all, &Unread::new()).is_ok());
}

#[test]
fn a_flipped_bit_is_named_by_file_chunk_and_tensor() {
    let bench = Bench::new();
    let commit = bench.save(NEWEST, 4, None);
    let place = bench.place();
    let read = || {
        whole(
            &place,
            commit.manifest,
            Depth::Everything { threads: 1 },
            &|| {},
        )
        .unwrap()
    };
    assert_eq!(read(), State::Verified);
    bench.flip(&commit);
    assert_eq!(
        whole(&place, commit.manifest, Depth::Sizes, &|| {}).unwrap(),
        State::Unchecked
    );
    let State::Damaged { why } = read() else {
        panic!("not found");
    };
    for part in ["n0-0.safetensors", "chunk 0", "`weights`"] {
        assert!(why.contains(part), "{why}");
    }
}

#[test]
fn names_of_folders_say_who_wrote_them() {
    let generation = "0123456789abcdef";
    let of = |name: &str| generation_of(name);
    assert_eq!(
        of(&format!("5-{generation}-1")),
        Some([0x01, 0x23, 0x45, 0x67, 0x89, 0xab, 0xcd, 0xef])
    );
    for name in [
        "",
        "5",
        "5-0123-1",
        "x-0123456789abcdef-1",
        "5-0123456789abcdef-1-2",
        "5-0123456789abcdeg-1",
    ] {
        assert_eq!(of(name), None, "{name}");
    }
}
