//! Tells the agent of the workers' saves beside their slots: how far the ranks are, what a save held
//! them up for, who waits for a slot, and when all have loaded what they begin with.

use std::collections::BTreeMap;
use std::time::Duration;

use muster_launcher::Session;
use muster_protocol::Digest;
use muster_protocol::local::{SaveAsk, SaveNews, Start, ToAgent};
use tokio::time::Instant;

use super::{Driver, say};

/// Between two words about how far the ranks are, where nobody counts their steps.
const SELDOM: Duration = Duration::from_secs(1);

/// How long the first step waits for workers that have attached no runtime: they may never.
const SILENT: Duration = Duration::from_secs(60);

/// State of what was told.
#[derive(Debug, Default)]
pub(super) struct Telling {
    digest: Digest,
    /// Of each local rank: its saves, and the newest for which it waited for a slot.
    saves: BTreeMap<u16, (u64, Option<u64>)>,
    step: Option<u64>,
    step_at: Option<Instant>,
    /// The first step waits until all ranks of the job have loaded what they begin with.
    holds: bool,
    /// Since when the workers run, and whether all stand before it.
    since: Option<Instant>,
    loaded: bool,
}

impl Telling {
    /// A generation's workers start.
    pub(super) fn begin(&mut self, start: &Start) {
        *self = Telling {
            digest: start.digest,
            holds: start.restore.is_some(),
            since: Some(Instant::now()),
            ..Telling::default()
        };
    }

    /// Whether ranks may wait before their first step.
    pub(super) fn holds(&self) -> bool {
        self.holds
    }

    /// How long the workers run; zero where none was started.
    pub(super) fn run_for(&self) -> Duration {
        self.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn is_due(&self, step: u64, counted: bool) -> bool {
        let wait = if counted { Duration::ZERO } else { SELDOM };
        let waited = self.step_at.is_none_or(|at| at.elapsed() >= wait);
        self.step != Some(step) && waited
    }
}

impl Driver {
    /// How far the furthest rank is.
    pub(super) fn tell_step(&mut self, session: &Session) {
        let Some(digest) = session.trains() else {
            return;
        };
        let furthest = self.workers.points().iter().map(|(_, p)| p.step).max();
        let counted = session.counts_steps();
        let Some(step) = furthest.filter(|step| self.telling.is_due(*step, counted)) else {
            return;
        };
        self.telling.step = Some(step);
        self.telling.step_at = Some(Instant::now());
        let usual = self.progress.usual_step();
        self.send(ToAgent::Save(SaveNews::At {
            digest,
            step,
            step_us: usual.0 / 1_000,
        }));
    }

    /// Tells the agent what saves took and who waits, and once all have loaded what they begin with.
    pub(super) fn tell_saves(&mut self) {
        let mut news = Vec::new();
        for (k, copied, waits) in self.workers.copies() {
            let known = self.telling.saves.entry(k).or_default();
            if let Some(c) = copied.filter(|c| c.saves != known.0) {
                known.0 = c.saves;
                news.push(SaveNews::Copied {
                    k,
                    step: c.step,
                    bytes: c.bytes,
                    copied_us: c.copied_us,
                    waited_us: c.waited_us,
                });
            }
            if let Some(step) = waits.filter(|step| known.1 != Some(*step)) {
                known.1 = Some(step);
                news.push(SaveNews::Waits { k, step });
            }
        }
        if self.telling.holds && !self.telling.loaded && self.have_loaded() {
            self.telling.loaded = true;
            let digest = self.telling.digest;
            news.push(SaveNews::Loaded { digest });
        }
        for news in news {
            self.send(ToAgent::Save(news));
        }
    }

    fn have_loaded(&self) -> bool {
        let begun = self.workers.begun();
        let long = self.telling.run_for() >= SILENT;
        let silent = begun.silent == 0 || long;
        begun.loading == 0 && silent && begun.loaded + begun.silent > 0
    }

    /// Another connection, perhaps to another run of the agent: it knows nothing.
    pub(super) fn telling_again(&mut self) {
        self.telling.step = None;
        let digest = self.telling.digest;
        if self.telling.loaded {
            self.send(ToAgent::Save(SaveNews::Loaded { digest }));
        }
    }

    /// Carries out what the agent asks of workers.
    pub(super) fn told_of_saves(&mut self, ask: &SaveAsk) {
        match ask {
            SaveAsk::Skip { k, step } => self.workers.skip_save(*k, *step),
            SaveAsk::Refuse { k } => self.workers.refuse_slots(*k),
            SaveAsk::Go { digest } if *digest == self.telling.digest => {
                self.telling.holds = false;
                self.workers.release();
            }
            SaveAsk::Tell { text } => say(text),
            _ => {}
        }
    }
}
