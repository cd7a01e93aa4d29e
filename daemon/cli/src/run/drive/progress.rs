//! How far the workers are: who hangs, and the metrics that they report.

use std::path::PathBuf;
use std::time::Duration;

use muster_protocol::control::report::{MAX_RANKS, RankMetrics};
use muster_protocol::hang::{Limits, Standing, Watch};
use muster_protocol::local::ToAgent;
use muster_protocol::{Digest, Span};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{Driver, now, say};
use crate::run::session::{Event, Session};
use crate::run::stacks::{self, Target};

/// Between two reports of metrics.
const REPORT_EVERY: Duration = Duration::from_secs(2);

/// What is done about a worker for which everybody waits.
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

/// Stacks that were written.
#[derive(Debug)]
pub(super) struct Dumped {
    why: String,
    targets: Vec<(Target, Result<PathBuf, String>)>,
}

#[derive(Debug)]
pub(super) struct Progress {
    hangs: Hangs,
    watch: Watch,
    dumps: (mpsc::Sender<Dumped>, mpsc::Receiver<Dumped>),
    /// What the agent knows of the metrics, and of which generation.
    reported: Option<(Digest, Vec<RankMetrics>)>,
    report_at: Instant,
}

impl Progress {
    pub(super) fn new(hangs: Hangs) -> Progress {
        Progress {
            watch: Watch::new(hangs.limits),
            hangs,
            dumps: mpsc::channel(16),
            reported: None,
            report_at: Instant::now(),
        }
    }

    /// A generation starts: nobody is judged by the steps of another.
    pub(super) fn begin(&mut self) {
        self.watch = Watch::new(self.hangs.limits);
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
        if session.expects_progress() {
            let points = self.workers.points();
            if let Some(stalled) = self.progress.watch.look(points, now()) {
                session.handle(Event::Stalled(stalled), now());
            }
        } else {
            self.progress.watch.rest(now());
        }
        self.report_metrics(session);
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
    /// that were named, with debuggers. Off the loop: that takes its time.
    pub(super) fn hung(&mut self, ranks: &[u32], why: String) {
        let targets = self.workers.targets(ranks);
        let done = self.progress.dumps.0.clone();
        tokio::task::spawn_blocking(move || {
            let each = |target: Target| {
                let result = stacks::dump(&target, &why).map_err(|e| e.to_string());
                (target, result)
            };
            let targets = targets.into_iter().map(each).collect();
            let _over = done.blocking_send(Dumped { why, targets });
        });
    }

    pub(super) fn dumped(&mut self, done: Dumped) {
        let named = done.targets.into_iter().filter(|(target, _)| target.named);
        for (target, result) in named {
            let rank = target.rank;
            match result {
                Ok(path) => say(&format!("stacks of rank {rank}: {}", path.display())),
                Err(why) => say(&format!("the stacks of rank {rank} cannot be kept: {why}")),
            }
            if self.progress.hangs.then == OnHang::Restart {
                say(&format!("ending rank {rank}, which hangs"));
                self.workers.end_hung(&target, &done.why);
            }
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
