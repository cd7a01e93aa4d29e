use super::*;
use crate::kept::testing::{Bench, FILE, standing};

const NEWEST: Digest = Digest([9; 32]);

struct Lab {
    keeping: Keeping,
    words: mpsc::UnboundedReceiver<Done>,
}

impl Lab {
    fn new(bench: &Bench) -> Lab {
        let (done, words) = mpsc::unbounded_channel();
        let place = Some(bench.place());
        let location = bench.location().to_string();
        let mut keeping = Keeping::new(
            place,
            location.clone(),
            Rules::default(),
            done,
            Way::default(),
        );
        let store = location;
        let rules = KeepNews::Rules(Rules::default().logged());
        assert_eq!(keeping.link_up(), [KeepNews::Place { store }, rules]);
        Lab { keeping, words }
    }

    fn ask(&mut self, round: u32, commits: &[Standing]) {
        for review in Review::all(round, NEWEST, commits) {
            assert_eq!(self.keeping.ask(review), None);
        }
    }

    /// The next result of a thread.
    fn hear(&mut self) -> (Vec<KeepNews>, Option<String>) {
        match self.words.blocking_recv() {
            Some(Done::Kept(word)) => self.keeping.finished(word),
            other => panic!("{other:?}"),
        }
    }
}

fn retire(news: &[KeepNews], round: u32) -> Vec<u64> {
    match news.last() {
        Some(KeepNews::Decided {
            round: of,
            retire,
            last: true,
            ..
        }) if *of == round => retire.clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn it_looks_reads_two_whole_and_deletes_what_it_is_told_to() {
    let bench = Bench::new();
    let mut all: Vec<Standing> = (1..=8)
        .map(|step| standing(10 + step, bench.save(NEWEST, step, None)))
        .collect();
    let mut lab = Lab::new(&bench);
    for (round, slot) in [(1, 18), (2, 17)] {
        lab.ask(round, &all);
        let (news, people) = lab.hear();
        assert_eq!((news.len(), people), (9, None));
        assert_eq!(retire(&news, round), [0; 0]);
        // The agent forgets it when it is restarted; the launcher does not.
        let (news, _) = lab.hear();
        let state = State::Verified;
        let manifest = all[slot as usize - 11].commit.manifest;
        let seq = slot;
        assert_eq!(
            news,
            [KeepNews::Checked {
                seq,
                manifest,
                state
            }]
        );
    }
    lab.ask(3, &all);
    assert_eq!(retire(&lab.hear().0, 3), [11, 12, 13, 14, 15]);

    // In the order in which it is asked.
    let gone = bench.file(&all[0].commit);
    let name = format!(
        "data/{}",
        gone.parent().unwrap().file_name().unwrap().display()
    );
    lab.keeping.delete(name);
    let manifest = format!("manifest/{}.json", all[0].commit.manifest.hex());
    lab.keeping.delete(manifest);
    all[0].retired = true;
    lab.ask(4, &all);
    let (news, _) = lab.hear();
    assert!(
        matches!(
            news[0],
            KeepNews::Looked {
                seq: 11,
                gone: true,
                ..
            }
        ),
        "{news:?}"
    );
    assert!(!gone.exists() && bench.file(&all[1].commit).exists());

    // A manifest stays while its data does.
    lab.keeping.delete("data/..".into());
    let manifest = format!("manifest/{}.json", all[1].commit.manifest.hex());
    lab.keeping.delete(manifest);
    assert!(
        lab.hear()
            .1
            .unwrap()
            .contains("data/.. of the job's store is not deleted")
    );
    all[1].retired = true;
    lab.ask(5, &all);
    assert!(matches!(
        lab.hear().0[1],
        KeepNews::Looked {
            seq: 12,
            gone: false,
            ..
        }
    ));
}

fn question(number: u64, manifest: Digest) -> Question {
    Question {
        number,
        manifest,
        why: "n0-0.safetensors is not there".into(),
        all: true,
    }
}

#[test]
fn a_second_look_reads_all_bytes_of_what_lies_there_now() {
    let bench = Bench::new();
    let commit = bench.save(NEWEST, 4, None);
    let mut lab = Lab::new(&bench);
    let mut look = |number| {
        // One question is one reading, however often it is asked: each time it is said how far it is.
        for _ in 0..2 {
            let news = lab.keeping.look_again(question(number, commit.manifest));
            let KeepNews::LooksAgain { number: of, read } = news else {
                panic!("{news:?}");
            };
            assert!(of == number && read <= 1 + FILE as u64, "{news:?}");
        }
        let (mut news, people) = lab.hear();
        assert!(people.is_none() && lab.words.try_recv().is_err());
        match news.remove(0) {
            KeepNews::LookedAgain { number: of, state } if of == number => state,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(look(1), State::Verified);
    bench.flip(&commit);
    let state = look(2);
    assert!(
        matches!(&state, State::Damaged { why } if why.contains("n0-0.safetensors")),
        "{state:?}"
    );
}

#[test]
fn a_second_look_ends_when_nobody_asks_for_it() {
    let bench = Bench::new();
    let commit = bench.save(NEWEST, 4, None);
    // It waits for the store for as long as somebody asks.
    let mark = bench.root().join("muster-store");
    std::fs::remove_file(&mark).unwrap();
    let mut lab = Lab::new(&bench);
    lab.keeping.again.unasked = std::time::Duration::ZERO;
    lab.keeping.look_again(question(1, commit.manifest));
    assert_eq!(lab.hear(), (Vec::new(), None));
    // Another question takes the place of one that is not answered.
    lab.keeping.again.unasked = std::time::Duration::from_secs(3_600);
    lab.keeping.look_again(question(2, commit.manifest));
    let other = bench.save(NEWEST, 5, None);
    lab.keeping.look_again(question(3, other.manifest));
    assert_eq!(lab.hear(), (Vec::new(), None));
    // One about the same joins it, and gets its answer.
    lab.keeping.look_again(question(4, other.manifest));
    std::fs::write(&mark, "{}").unwrap();
    let (news, _) = lab.hear();
    let (number, state) = (4, State::Verified);
    assert_eq!(news, [KeepNews::LookedAgain { number, state }]);
}

#[test]
fn what_was_found_damaged_is_not_read_again_and_again() {
    let bench = Bench::new();
    let mut all: Vec<Standing> = (1..=3)
        .map(|step| standing(10 + step, bench.save(NEWEST, step, None)))
        .collect();
    bench.flip(&all[2].commit);
    let mut lab = Lab::new(&bench);
    let mut read = Vec::new();
    for round in 1..=3 {
        lab.ask(round, &all);
        let (news, _) = lab.hear();
        let seen = |news: &KeepNews| match news {
            KeepNews::Looked { seq: 13, state, .. } => Some(state.clone()),
            _ => None,
        };
        let seen = news.iter().find_map(seen).unwrap();
        assert_eq!(matches!(seen, State::Damaged { .. }), round > 1, "{seen:?}");
        match &lab.hear().0[..] {
            [KeepNews::Checked { seq, .. }] => read.push(*seq),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(read, [13, 12, 11]);
    lab.ask(4, &all);
    lab.hear();
    assert!(lab.words.try_recv().is_err(), "all is known");
    // Another node has read it, and it is whole.
    all[2].verified = true;
    lab.ask(5, &all);
    let (news, _) = lab.hear();
    let whole = |news: &KeepNews| {
        matches!(
            news,
            KeepNews::Looked {
                seq: 13,
                state: State::Verified,
                ..
            }
        )
    };
    assert!(news.iter().any(whole), "{news:?}");
}

#[test]
fn an_answer_goes_to_nobody_but_who_asked() {
    let bench = Bench::new();
    let all = [standing(11, bench.save(NEWEST, 1, None))];
    let mut lab = Lab::new(&bench);
    lab.ask(1, &all);
    lab.keeping.link_up();
    assert_eq!(lab.hear(), (Vec::new(), None));
    // What was read is true for the next one, too.
    assert!(matches!(
        lab.hear().0[..],
        [KeepNews::Checked { seq: 11, .. }]
    ));
    // A question of which a part was lost is none.
    let many: Vec<Standing> = (0..300).map(|seq| standing(seq, all[0].commit)).collect();
    let mut frames = Review::all(2, NEWEST, &many).into_iter();
    assert_eq!(lab.keeping.ask(frames.next().unwrap()), None);
    lab.keeping.link_up();
    lab.ask(1, &all);
    assert_eq!(lab.hear().0.len(), 2);
    // Without a store nothing can be said.
    let mut nowhere = Keeping::new(
        None,
        String::new(),
        Rules::default(),
        lab.keeping.done.clone(),
        Way::default(),
    );
    assert_eq!(nowhere.link_up(), []);
    let unasked = nowhere.look_again(question(5, all[0].commit.manifest));
    assert!(matches!(
        unasked,
        KeepNews::LookedAgain {
            number: 5,
            state: State::Unreadable { .. }
        }
    ));
    let asked = nowhere.ask(Review::all(7, NEWEST, &all).remove(0));
    assert!(matches!(asked, Some(KeepNews::Failed { round: 7, .. })));
}
