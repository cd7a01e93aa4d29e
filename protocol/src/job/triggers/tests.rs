use super::super::alone::{Alone, SLOT_MEMORY};
use super::*;
use crate::checkpoint::{Copy, Found, SlotId};
use crate::local::{SaveAsk, ToAgent, ToLauncher};
use crate::spec::{self, JobSpec};
use crate::wire::Saved;

/// A job of one rank that saves by itself.
struct Trains {
    alone: Alone,
    digest: Digest,
    usual: Span,
}

fn trains(triggers: spec::Triggers) -> Trains {
    let mut alone = Alone::with(JobSpec {
        triggers,
        ..JobSpec::default()
    });
    let (digest, _) = alone.trains();
    Trains {
        alone,
        digest,
        usual: Span::from_secs(1),
    }
}

impl Trains {
    /// The rank has come to this step.
    fn at(&mut self, step: u64) {
        self.news(SaveNews::At {
            digest: self.digest,
            step,
            step_us: self.usual.0 / 1_000,
        });
    }

    fn news(&mut self, news: SaveNews) {
        self.alone.says(ToAgent::Save(news));
    }

    /// The steps that a checkpoint was asked for at since this was asked last.
    fn asked(&mut self) -> Vec<(u32, u64, Reason)> {
        let told = std::mem::take(&mut self.alone.told).into_iter();
        let install = |frame| match frame {
            ToLauncher::InstallStop {
                barrier,
                step,
                reason,
                ..
            } => Some((barrier, step, reason)),
            _ => None,
        };
        let mut all: Vec<_> = told.filter_map(install).collect();
        all.dedup();
        all
    }

    /// The rank can stop at the step that was asked for, or at this one, and saves there; which step was
    /// asked for.
    fn saves(&mut self, at: u64) -> u64 {
        let asked = self.asked();
        let [(barrier, wanted, Reason::Checkpoint)] = asked[..] else {
            panic!("{asked:?}");
        };
        let step = wanted.max(at);
        let digest = self.digest;
        self.alone.says(ToAgent::StopInstalled {
            digest,
            barrier,
            step,
        });
        let confirmed =
            |f: &ToLauncher| matches!(f, ToLauncher::ConfirmStop { step: at, .. } if *at == step);
        assert!(self.alone.told.iter().any(confirmed));
        let saved = Saved {
            step,
            ranks: vec![0],
            all: true,
            failed: None,
        };
        self.alone.says(ToAgent::Saved { digest, saved });
        wanted
    }

    /// Slots of the rank, and what it copied into one.
    fn seals(&mut self, slot: SlotId, step: u64) {
        self.news(SaveNews::Copied {
            k: 0,
            step,
            bytes: 1 << 30,
            copied_us: 100_000,
            waited_us: 0,
        });
        let copy = Copy {
            generation: self.digest,
            step,
            bytes: 1 << 30,
            digest: Digest([1; 32]),
        };
        self.news(SaveNews::Filling { slot, step });
        self.news(SaveNews::Sealed { slot, copy });
    }

    fn slots(&mut self) {
        self.news(SaveNews::Slots {
            k: 0,
            capacity: 1 << 30,
            found: [Found::Free; 2],
        });
    }

    /// The copy in this slot becomes durable, in so much time, and is committed.
    fn commits(&mut self, slot: SlotId, attempt: u32, step: u64, took: Span) {
        self.alone.pass(took);
        let generation = self.digest;
        let save = crate::checkpoint::Save {
            generation,
            attempt,
            step,
        };
        self.alone.commits(slot, save, 1 << 30);
    }

    fn said(&mut self) -> Vec<String> {
        std::mem::take(&mut self.alone.said)
    }

    /// Texts that the launcher was told to say.
    fn shown(&self) -> Vec<&str> {
        let tell = |f: &'_ ToLauncher| matches!(f, ToLauncher::Save(SaveAsk::Tell { .. }));
        let told = self.alone.told.iter().filter(|f| tell(f));
        told.filter_map(|f| match f {
            ToLauncher::Save(SaveAsk::Tell { text }) => Some(text.as_str()),
            _ => None,
        })
        .collect()
    }
}

const FIRST_SLOT: SlotId = SlotId { k: 0, side: 0 };
const OTHER_SLOT: SlotId = SlotId { k: 0, side: 1 };

fn by_steps(steps: u64) -> spec::Triggers {
    spec::Triggers {
        steps,
        ..spec::Triggers::default()
    }
}

#[test]
fn ranks_are_told_before_they_reach_the_step_and_each_time_anew() {
    let mut job = trains(by_steps(10));
    for step in [0, 3, 8] {
        job.at(step);
        assert_eq!(job.asked(), [], "at {step}");
    }
    // A step takes a second: one ahead is enough.
    job.at(9);
    assert_eq!(job.saves(0), 10);
    for step in [10, 18] {
        job.at(step);
        assert_eq!(job.asked(), [], "at {step}");
    }
    // Fast steps: all that fit into half a second are one ahead.
    job.usual = Span::from_millis(100);
    job.at(16);
    assert_eq!(job.saves(0), 20);
}

#[test]
fn time_passes_from_the_newest_save_whoever_asked_for_it() {
    let mut job = trains(spec::Triggers {
        every_ms: 60_000,
        ..spec::Triggers::default()
    });
    job.at(5);
    job.alone.pass(Span::from_secs(59));
    assert_eq!(job.asked(), []);
    job.at(60);
    job.alone.pass(Span::from_secs(2));
    // The nodes raise it to what their ranks can still stop at.
    assert_eq!(job.saves(62), 1);
    // By order in between: the time begins anew.
    job.alone.pass(Span::from_secs(40));
    job.at(100);
    job.alone.told.clear();
    let _agreeing = job.alone.asks();
    assert_eq!(job.saves(101), 1);
    job.at(150);
    job.alone.pass(Span::from_secs(50));
    assert_eq!(job.asked(), []);
    job.at(151);
    job.alone.pass(Span::from_secs(11));
    assert_eq!(job.asked().len(), 1);
}

#[test]
fn what_cannot_be_agreed_on_is_said_once_and_tried_again() {
    let mut job = trains(by_steps(10));
    let digest = job.digest;
    job.alone
        .says(ToAgent::TakesStopSteps { digest, yes: false });
    job.at(9);
    job.alone.pass(Span::from_secs(1));
    job.at(12);
    let said = job.said();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("not every worker has attached the runtime"));
    assert_eq!(job.asked(), []);
    job.alone
        .says(ToAgent::TakesStopSteps { digest, yes: true });
    job.at(13);
    job.alone.pass(AGAIN);
    assert_eq!(job.asked().len(), 1);
}

#[test]
fn both_slots_occupied_put_a_save_off_or_have_it_left_out_by_name() {
    for busy in [Busy::Wait, Busy::Skip] {
        let mut job = trains(spec::Triggers {
            busy,
            ..by_steps(10)
        });
        job.slots();
        job.seals(FIRST_SLOT, 1);
        job.seals(OTHER_SLOT, 2);
        job.alone.pass(Span::from_millis(10));
        let _opened = job.said();
        job.at(11);
        assert_eq!(job.asked(), []);
        let said = job.said();
        let [text] = &said[..] else {
            panic!("{said:?}");
        };
        let what = match busy {
            Busy::Wait => "a checkpoint is due and waits: both slots are occupied on",
            Busy::Skip => "the checkpoint that is due is left out: both slots are occupied on",
        };
        assert!(
            text.contains(what) && text.contains("(steps 1 and 2)"),
            "{text}"
        );
        assert!(text.contains("1073741824 bytes left to write"), "{text}");
        job.at(12);
        assert_eq!(job.said(), Vec::<String>::new(), "once");
        job.commits(FIRST_SLOT, 1, 1, Span::from_millis(500));
        let asked = job.asked().len();
        assert_eq!(asked, usize::from(busy == Busy::Wait));
    }
}

#[test]
fn a_rank_that_waits_for_a_slot_is_named_with_what_occupies_it() {
    let mut job = trains(spec::Triggers {
        busy: Busy::Skip,
        ..spec::Triggers::default()
    });
    job.slots();
    job.seals(FIRST_SLOT, 1);
    job.seals(OTHER_SLOT, 2);
    job.alone.told.clear();
    job.news(SaveNews::Waits { k: 0, step: 3 });
    let skip = ToLauncher::Save(SaveAsk::Skip { k: 0, step: 3 });
    assert!(job.alone.told.contains(&skip));
    let shown = job.shown();
    assert!(
        shown.iter().any(|t| t
            .contains("rank 0 has no free slot for step 3 and leaves this save out")
            && t.contains("step 2 waits to be written")),
        "{shown:?}"
    );
    // By order it is not left out.
    let digest = job.digest;
    let _agreeing = job.alone.asks();
    let asked = job.asked();
    let (barrier, step) = (asked[0].0, 4);
    job.alone.says(ToAgent::StopInstalled {
        digest,
        barrier,
        step,
    });
    job.alone.told.clear();
    job.news(SaveNews::Waits { k: 0, step });
    assert!(
        !job.alone
            .told
            .iter()
            .any(|f| matches!(f, ToLauncher::Save(SaveAsk::Skip { .. })))
    );
    assert!(job.shown()[0].contains("this save is not left out"));
}

#[test]
fn the_interval_follows_from_what_a_save_took_and_is_said() {
    let mut job = trains(spec::Triggers {
        overhead_ppm: 10_000,
        ..spec::Triggers::default()
    });
    job.slots();
    job.at(1);
    job.alone.pass(FIRST);
    job.at(6);
    assert_eq!(job.saves(7), 1);
    job.seals(FIRST_SLOT, 7);
    job.alone.pass(Span::from_millis(10));
    job.commits(FIRST_SLOT, 1, 7, Span::from_secs(1));
    job.alone.pass(Span::from_secs(2));
    let said = job.said();
    let chosen: Vec<&String> = said
        .iter()
        .filter(|t| t.contains("a checkpoint every"))
        .collect();
    // A stall of 100 ms: of one hundredth it is every 9.9 s, but with hardly a failure that is too often.
    assert_eq!(chosen.len(), 1, "{said:?}");
    assert!(chosen[0].contains("holds training up for 100 ms") && chosen[0].contains("Daly"));
    assert!(!job.shown().is_empty());
}

/// The choice when the node goes within this time, and whether the ranks are told to save.
fn goes(measured: bool, grace_ms: u32) -> (Vec<String>, bool, bool) {
    let mut job = trains(spec::Triggers::default());
    job.slots();
    job.usual = Span::from_millis(100);
    if measured {
        job.seals(FIRST_SLOT, 10);
        job.alone.pass(Span::from_millis(10));
        job.commits(FIRST_SLOT, 1, 10, Span::from_secs(2));
    }
    job.at(20);
    let _before = (job.said(), job.asked());
    job.alone.says(ToAgent::Leave { grace_ms });
    job.alone.pass(Span::from_millis(1));
    let told = &job.alone.told;
    let saves = told
        .iter()
        .any(|f| matches!(f, ToLauncher::InstallStop { .. }));
    let ends = told.iter().any(|f| matches!(f, ToLauncher::Preempt { .. }));
    (job.said(), saves, ends)
}

#[test]
fn a_notice_is_answered_by_what_fits_into_its_time() {
    // 0.1 s to copy, 2 to write, 0.3 to stop, and a quarter more.
    let (said, saves, ends) = goes(true, 30_000);
    assert!(
        saves && !ends && said[0].contains("a fresh save, of step 21 or later, needs"),
        "{said:?}"
    );
    let (said, saves, ends) = goes(true, 2_000);
    assert!(!saves && ends, "{said:?}");
    assert!(
        said[0].contains(
            "only 1500 ms are left: the checkpoint of step 10 has to do; 11 steps are done again"
        ),
        "{said:?}"
    );
    // Nothing is known: it is tried, if there is any time.
    let (said, saves, _) = goes(false, 2_000);
    assert!(
        saves && said[0].contains("no save has been measured yet"),
        "{said:?}"
    );
    let (said, saves, ends) = goes(false, 0);
    assert!(
        !saves && ends && said[0].contains("training begins anew"),
        "{said:?}"
    );
}

#[test]
fn a_job_without_slots_is_told_to_save_as_ever() {
    let mut job = trains(spec::Triggers::default());
    job.at(20);
    job.alone.says(ToAgent::Leave { grace_ms: 300 });
    assert_eq!(job.asked().len(), 1);
    assert_eq!(job.said(), Vec::<String>::new());
}

#[test]
fn slots_beyond_the_node_s_memory_are_refused_by_name() {
    let mut job = trains(spec::Triggers::default());
    let slots = |capacity| SaveNews::Slots {
        k: 0,
        capacity,
        found: [Found::Free; 2],
    };
    job.news(slots(SLOT_MEMORY / 2 + 1));
    let refuse = ToLauncher::Save(SaveAsk::Refuse { k: 0 });
    assert!(job.alone.told.contains(&refuse));
    let shown = job.shown();
    let text = "the slots of rank 0 need 4294967298 bytes, 4294967296 are left of the budget";
    assert!(shown.iter().any(|t| t.contains(text)), "{shown:?}");
    job.alone.told.clear();
    job.news(slots(SLOT_MEMORY / 2));
    assert!(!job.alone.told.contains(&refuse));
}
