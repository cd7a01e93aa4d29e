//! How far the workers are: who hangs, and the metrics that they report.

use std::path::PathBuf;
use std::time::Duration;

use muster_launcher::{Event, Session, patience};
use muster_protocol::control::report::{MAX_RANKS, RankMetrics};
use muster_protocol::hang::{Limits, Standing, Watch};
use muster_protocol::local::ToAgent;
use muster_protocol::{Digest, Span};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{Driver, now, say};
use crate::run::stacks::{self, Target};

/// Between two reports of metrics.
const REPORT_EVERY: Duration = Duration::from_secs(2);

/// Action on a worker for which everybody waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OnHang {
    /// Say so, and keep the stacks
    #[default]
    Report,
    /// End the worker as well, as one that failed
    Restart,
}

/// When a worker counts as hung, and what is done then.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hangs {
    pub limits: Limits,
    pub then: OnHang,
}

/// How long a worker that is to be ended is left for its stacks to be written: the kernel may hold
/// whoever reads them.
const STACKS: Duration = Duration::from_secs(60);

/// The stacks of one worker were written.
#[derive(Debug)]
pub(super) struct Dumped {
    /// Of the verdict for which that was done.
    number: u64,
    target: Target,
    result: Result<PathBuf, String>,
}

/// The leader's last verdict on who hangs, as far as something is still to be done about it.
#[derive(Debug, Default)]
struct Verdict {
    /// Counts what it said.
    number: u64,
    why: String,
    /// Of which generation.
    digest: Option<Digest>,
    /// Workers that are to be ended, each when its stacks are written.
    ends: Vec<Target>,
    /// Or then.
    by: Option<Instant>,
}

impl Verdict {
    /// These hang, and are to be ended.
    fn hung(&mut self, digest: Digest, ends: Vec<Target>, why: String, now: Instant) {
        *self = Verdict {
            number: self.number + 1,
            why,
            digest: Some(digest),
            by: Some(now + STACKS),
            ends,
        };
    }

    /// Nobody hangs any more, or nobody of those.
    fn over(&mut self) {
        *self = Verdict {
            number: self.number + 1,
            ..Verdict::default()
        };
    }

    /// The stacks of this rank are written: whom to end now.
    fn written(&mut self, number: u64, rank: u32) -> Option<Target> {
        let at = self.ends.iter().position(|t| t.rank == rank)?;
        (number == self.number).then(|| self.ends.swap_remove(at))
    }

    /// Workers to end now: their stacks did not get written in time.
    fn overdue(&mut self, now: Instant) -> Vec<Target> {
        match self.by {
            Some(by) if now >= by => std::mem::take(&mut self.ends),
            _ => Vec::new(),
        }
    }
}

#[derive(Debug)]
pub(super) struct Progress {
    hangs: Hangs,
    watch: Watch,
    verdict: Verdict,
    dumps: (mpsc::Sender<Dumped>, mpsc::Receiver<Dumped>),
    /// The metrics that the agent knows, and their generation.
    reported: Option<(Digest, Vec<RankMetrics>)>,
    report_at: Instant,
    /// People know that nothing watches the workers, or need not.
    unwatched_said: bool,
}

impl Progress {
    pub(super) fn new(hangs: Hangs) -> Progress {
        Progress {
            watch: Watch::new(hangs.limits),
            hangs,
            verdict: Verdict::default(),
            dumps: mpsc::channel(16),
            reported: None,
            report_at: Instant::now(),
            unwatched_said: hangs.limits.factor == 0,
        }
    }

    /// A generation starts: nobody is judged by the steps of another.
    pub(super) fn begin(&mut self) {
        self.watch = Watch::new(self.hangs.limits);
        self.verdict.over();
    }

    /// How long the ranks' steps usually take; zero while nobody knows.
    pub(super) fn usual_step(&self) -> Span {
        self.watch.usual_step().unwrap_or_default()
    }

    /// All ranks move again: whoever was to be ended is left alone.
    pub(super) fn moves(&mut self) {
        self.verdict.over();
    }

    /// Another connection, perhaps to another run of the agent: it knows nothing.
    pub(super) fn link_up(&mut self) {
        self.reported = None;
    }

    /// Waits for stacks to be written.
    pub(super) async fn dumped(&mut self) -> Option<Dumped> {
        self.dumps.1.recv().await
    }
}

impl Driver {
    /// Looks at how far the workers are.
    pub(super) fn watch_progress(&mut self, session: &mut Session) {
        if session.expects_progress(now()) && !self.telling.holds() {
            let points = self.workers.points();
            if let Some(stalled) = self.progress.watch.look(points, now()) {
                session.handle(Event::Stalled(stalled), now());
            }
        } else {
            self.progress.watch.rest(now());
        }
        session.set_patience(match self.workers.have_live() {
            true => patience(self.progress.watch.usual_step()),
            false => Span::ZERO,
        });
        for target in self.progress.verdict.overdue(Instant::now()) {
            let rank = target.rank;
            say(&format!("the stacks of rank {rank} do not get written"));
            self.end_hung(&target, session);
        }
        self.report_metrics(session);
        self.say_unwatched(session);
    }

    /// A job without the runtime that stands still looks like one that trains. So people know once, by the time that a
    /// hang would have been found.
    fn say_unwatched(&mut self, session: &Session) {
        let least = Duration::from_nanos(self.progress.hangs.limits.least.0);
        let early = session.trains().is_none() || self.telling.run_for() < least;
        if self.progress.unwatched_said || early {
            return;
        }
        let begun = self.workers.begun();
        self.progress.unwatched_said = true;
        if begun.silent > 0 && begun.loading + begun.loaded == 0 {
            say(
                "nothing watches this node's workers for hangs, for none has attached the runtime yet: with `import muster` \
                 in the script (docs/python.md) one that stands still is found and named. --hang-factor 0 turns the \
                 watch off, and this line",
            );
        }
    }

    fn report_metrics(&mut self, session: &Session) {
        let at = Instant::now();
        if at < self.progress.report_at || self.link.is_none() {
            return;
        }
        self.progress.report_at = at + REPORT_EVERY;
        let trains = session.trains();
        let ranks = trains.map_or(Vec::new(), |_| self.workers.metrics());
        let Some(digest) = trains.or(self.progress.reported.as_ref().map(|(d, _)| *d)) else {
            return;
        };
        let known = self.progress.reported.as_ref();
        let nothing = ranks.is_empty() && known.is_none_or(|(_, r)| r.is_empty());
        if nothing || known.is_some_and(|(d, r)| (*d, r) == (digest, &ranks)) {
            return;
        }
        let empty: &[RankMetrics] = &[];
        let chunks = ranks.chunks(MAX_RANKS);
        let none = ranks.is_empty().then_some(empty);
        for (i, part) in chunks.chain(none).enumerate() {
            self.send(ToAgent::Metrics {
                digest,
                first: i == 0,
                ranks: part.to_vec(),
            });
        }
        self.progress.reported = Some((digest, ranks));
    }

    /// Tells the agent where the local ranks stand.
    pub(super) fn tell_standings(&mut self, digest: Digest, number: u32) {
        let mut list: Vec<Standing> = self.progress.watch.standings();
        for standing in &mut list {
            if let Some(pid) = self.workers.pid_of(standing.rank) {
                standing.doing = stacks::doing(pid);
            }
        }
        self.send(ToAgent::Standings {
            digest,
            number,
            list,
        });
    }

    /// The leader says for whom everybody waits: keeps the stacks of all workers here, and, of those
    /// that were named, with debuggers. Off the loop: that takes its time, and may never end where
    /// the kernel holds a worker. So each has a thread, for which nobody waits.
    pub(super) fn hung(&mut self, digest: Digest, ranks: &[u32], why: String) {
        let targets = self.workers.targets(ranks);
        let ends = targets.iter().filter(|t| t.named).cloned();
        let ends = match self.progress.hangs.then {
            OnHang::Restart => ends.collect(),
            OnHang::Report => Vec::new(),
        };
        let verdict = &mut self.progress.verdict;
        verdict.hung(digest, ends, why.clone(), Instant::now());
        let number = verdict.number;
        for target in targets {
            let (done, why) = (self.progress.dumps.0.clone(), why.clone());
            let write = move || {
                let result = stacks::dump(&target, &why).map_err(|e| e.to_string());
                let _over = done.blocking_send(Dumped {
                    number,
                    target,
                    result,
                });
            };
            let thread = std::thread::Builder::new().name("stacks".into());
            if let Err(error) = thread.spawn(write) {
                say(&format!("the stacks of a rank cannot be kept: {error}"));
            }
        }
    }

    pub(super) fn dumped(&mut self, done: Dumped, session: &Session) {
        let target = done.target;
        let rank = target.rank;
        if target.named {
            match done.result {
                Ok(path) => say(&format!("stacks of rank {rank}: {}", path.display())),
                Err(why) => say(&format!("the stacks of rank {rank} cannot be kept: {why}")),
            }
        }
        if let Some(target) = self.progress.verdict.written(done.number, rank) {
            self.end_hung(&target, session);
        }
    }

    fn end_hung(&mut self, target: &Target, session: &Session) {
        let verdict = &self.progress.verdict;
        let same = verdict.digest.is_some() && verdict.digest == session.trains();
        if same && self.workers.end_hung(target, &verdict.why) {
            say(&format!("ended rank {}, which hangs", target.rank));
        }
    }
}

/// The limits of the flags.
pub fn limits(factor: u32, least: Duration) -> Limits {
    Limits {
        factor,
        least: Span::from(least),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(rank: u32) -> Target {
        Target {
            rank,
            pid: 77,
            point: None,
            dir: PathBuf::new(),
            named: true,
        }
    }

    #[test]
    fn a_verdict_is_carried_out_once_and_not_when_another_word_came() {
        let now = Instant::now();
        let hung = |verdict: &mut Verdict| {
            let ends = vec![target(1), target(2)];
            verdict.hung(Digest([1; 32]), ends, "hung".into(), now);
            verdict.number
        };
        let ranks = |targets: Vec<Target>| -> Vec<u32> { targets.iter().map(|t| t.rank).collect() };
        let mut verdict = Verdict::default();
        let first = hung(&mut verdict);
        assert_eq!(verdict.written(first, 2).map(|t| t.rank), Some(2));
        assert!(verdict.written(first, 2).is_none() && verdict.written(first, 7).is_none());
        // The stacks of the other are stuck.
        let late = now + STACKS;
        let early = late - Duration::from_millis(1);
        assert!(verdict.overdue(early).is_empty());
        assert_eq!(ranks(verdict.overdue(late)), [1]);
        assert!(verdict.overdue(late).is_empty() && verdict.written(first, 1).is_none());
        // All move again, and hang again: the stacks of the first time end nobody.
        let second = hung(&mut verdict);
        verdict.over();
        assert!(verdict.written(second, 1).is_none() && verdict.overdue(late).is_empty());
        let third = hung(&mut verdict);
        assert!(verdict.written(second, 1).is_none());
        assert!(verdict.written(third, 1).is_some());
    }
}
