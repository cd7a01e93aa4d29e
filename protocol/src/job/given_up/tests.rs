use super::super::alone::Alone;
use super::*;
use crate::checkpoint::{Copy, Found, SlotId};
use crate::local::{SaveNews, ToAgent, ToLauncher};
use crate::time::Span;

/// A job of one rank, which saves into its two slots in turns.
struct Saving {
    alone: Alone,
    digest: Digest,
    attempt: u32,
}

impl Saving {
    fn new() -> Saving {
        Saving::of(1)
    }

    /// The first rank of so many.
    fn of(ranks: u16) -> Saving {
        let mut alone = Alone::new();
        alone.slots = ranks;
        let (digest, _) = alone.trains();
        let mut saving = Saving {
            alone,
            digest,
            attempt: 0,
        };
        saving.news(SaveNews::Slots {
            k: 0,
            capacity: 4096,
            found: [Found::Free; 2],
        });
        saving
    }

    fn news(&mut self, news: SaveNews) {
        self.alone.says(ToAgent::Save(news));
    }

    /// Seals a step, which opens a save.
    fn seals(&mut self, step: u64) -> SlotId {
        self.attempt += 1;
        let side = u8::from(self.attempt.is_multiple_of(2));
        let slot = SlotId { k: 0, side };
        let copy = Copy {
            generation: self.digest,
            step,
            bytes: 4096,
            digest: Digest([1; 32]),
        };
        self.news(SaveNews::Filling { slot, step });
        self.news(SaveNews::Sealed { slot, copy });
        slot
    }

    /// A save that its node cannot write.
    fn fails(&mut self, step: u64, why: &str) {
        let slot = self.seals(step);
        self.news(SaveNews::WriteFailed {
            slot,
            attempt: self.attempt,
            why: why.to_owned(),
        });
        self.alone.pass(Span::from_millis(10));
    }

    fn commits(&mut self, step: u64) {
        let slot = self.seals(step);
        let save = Save {
            generation: self.digest,
            attempt: self.attempt,
            step,
        };
        self.alone.commits(slot, save, 4096);
    }

    /// Lines about that on the console since this was asked last; a node that cannot write says so, too.
    fn shown(&mut self) -> usize {
        self.says("is given up")
    }

    /// Lines with these words on the console since this was asked last.
    fn says(&mut self, what: &str) -> usize {
        let told = std::mem::take(&mut self.alone.told);
        let tells = |f: &&ToLauncher| match f {
            ToLauncher::Save(SaveAsk::Tell { text }) => text.contains(what),
            _ => false,
        };
        told.iter().filter(tells).count()
    }

    fn why(&self, step: u64) -> Option<String> {
        let job = self.alone.agent.jobs().next().unwrap();
        job.given_up(step).map(str::to_owned)
    }

    /// Every rank has finished: the code that the launcher is to exit with.
    fn finishes(&mut self) -> i32 {
        let digest = self.digest;
        self.alone.says(ToAgent::Finished { digest });
        self.alone.pass(Span::from_secs(90));
        let end = |f: &ToLauncher| match f {
            ToLauncher::End { code, .. } => Some(*code),
            _ => None,
        };
        self.alone.told.iter().find_map(end).unwrap()
    }
}

#[test]
fn the_first_of_a_generation_is_on_the_console_and_another_reason() {
    let mut job = Saving::new();
    job.shown();
    job.fails(10, "no space left on device, at byte 4096");
    assert_eq!(job.shown(), 1);
    assert!(job.why(10).is_some());
    job.fails(20, "no space left on device, at byte 8192");
    assert_eq!((job.shown(), job.why(10)), (0, None), "the newest is known");
    assert!(job.why(20).is_some());
    job.fails(30, "the store is away");
    assert_eq!(job.shown(), 1);
    // Each of them is told to people who ask.
    let said = job
        .alone
        .said
        .iter()
        .filter(|text| text.contains("is given up"));
    assert_eq!(said.count(), 3, "{:?}", job.alone.said);
}

#[test]
fn a_job_that_finishes_without_its_last_save_says_so() {
    let mut job = Saving::new();
    job.commits(10);
    job.fails(20, "the store is away");
    assert_eq!(job.finishes(), UNSAVED);
}

#[test]
fn a_job_that_finishes_with_it_does_not() {
    let mut job = Saving::new();
    job.fails(10, "the store is away");
    job.commits(20);
    assert_eq!(job.finishes(), 0);
    // Nor one that saves nothing.
    assert_eq!(Saving::new().finishes(), 0);
}

#[test]
fn a_job_whose_ranks_saved_other_steps_last_says_so() {
    let mut job = Saving::of(2);
    job.seals(10);
    job.alone.pass(Span::from_secs(1));
    assert_eq!(job.finishes(), UNSAVED);
}

/// An agent that was started anew hears that its ranks have finished before it hears what they have sealed.
#[test]
fn the_end_waits_for_what_is_not_said_yet() {
    for said in [true, false] {
        let mut job = Saving::of(2);
        let slot = job.seals(10);
        let generation = job.digest;
        job.news(SaveNews::WorkerEnded { generation, k: 0 });
        job.alone.says(ToAgent::Finished { digest: generation });
        job.alone.pass(Span::from_secs(1));
        let copy = Copy {
            generation,
            step: 10,
            bytes: 4096,
            digest: Digest([1; 32]),
        };
        if said {
            job.news(SaveNews::Slots {
                k: 1,
                capacity: 4096,
                found: [Found::Sealed(copy), Found::Free],
            });
        }
        job.alone.pass(Span::from_millis(10));
        let saves = job.alone.agent.jobs().next().unwrap().saves().unwrap();
        assert_eq!(
            saves.under_way().map(|(save, _)| save.step),
            said.then_some(10),
            "{slot}"
        );
        let ends = |f: &ToLauncher| matches!(f, ToLauncher::End { .. });
        assert!(!job.alone.told.iter().any(ends), "{said}");
        job.alone.pass(Span::from_secs(3));
        assert_eq!(job.alone.told.iter().any(ends), !said);
    }
}

#[test]
fn a_disk_that_is_full_is_said_once() {
    let mut saving = Saving::new();
    saving.fails(10, "no room: 4 KiB are left");
    assert_eq!(saving.says("could not be written"), 1);
    saving.fails(20, "no room: 3 KiB are left");
    saving.fails(30, "no room: 2 KiB are left");
    assert_eq!(saving.says("could not be written"), 0);
    saving.fails(40, "the file system is read-only");
    assert_eq!(saving.says("could not be written"), 1);
}
