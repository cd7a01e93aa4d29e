//! Launchers' reports of their workers' training, as series of `/metrics`: a series lives as long
//! as its rank runs here.

use std::collections::BTreeSet;

use muster_protocol::control::report::{Metrics as Training, RankMetrics};
use muster_protocol::record::MAX_SLOTS;
use muster_protocol::{Digest, Span, Time};

use crate::metrics::Metrics;

/// Between two reports of one launcher that are taken: it sends one every two seconds.
const EVERY: Span = Span::from_millis(500);

/// The most ranks of one user whose series an agent shows: as many as a node has workers.
pub(super) const MAX_PER_USER: usize = MAX_SLOTS as usize;

/// The labels of a series: job, owner, rank, node.
pub(super) type Labels = [String; 4];

/// Where a report belongs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Series<'a> {
    pub(super) metrics: &'a Metrics,
    /// Series that another launcher of the same job reports as well: they stay when this one's go.
    pub(super) held: &'a BTreeSet<Labels>,
    /// How many ranks it may show, beside what its user's other launchers do.
    pub(super) room: usize,
    pub(super) job: &'a str,
    /// The user id of the job's owner.
    pub(super) owner: &'a str,
    pub(super) node: &'a str,
}

/// Reports of one launcher.
#[derive(Debug, Default)]
pub(super) struct Reported {
    digest: Option<Digest>,
    taken: Option<Time>,
    /// Whether the report is taken whose parts come now.
    open: bool,
    /// The series that there are.
    series: BTreeSet<Labels>,
    /// Those of them that the report which is being taken has not named so far.
    stale: BTreeSet<Labels>,
}

impl Reported {
    /// Takes one frame of a report in; what comes too often is left out.
    pub(super) fn take<'a>(
        &mut self,
        at: &Series<'_>,
        digest: Digest,
        first: bool,
        ranks: impl Iterator<Item = &'a RankMetrics>,
        now: Time,
    ) {
        if self.digest != Some(digest) {
            self.forget(at.metrics, at.held);
            self.digest = Some(digest);
        }
        if first {
            // What the report before did not name is gone.
            self.drop_stale(at.metrics, at.held);
            self.open = self.taken.is_none_or(|t| now.since(t) >= EVERY);
            if self.open {
                self.taken = Some(now);
                self.stale.clone_from(&self.series);
            }
        }
        if !self.open {
            return;
        }
        let mut any = false;
        for rank in ranks {
            any = true;
            let labels = [at.job, at.owner, &rank.rank.to_string(), at.node].map(str::to_owned);
            if self.series.len() >= at.room && !self.series.contains(&labels) {
                continue;
            }
            let training = Training::decode(&rank.words);
            at.metrics.training(&labels, &training);
            self.stale.remove(&labels);
            self.series.insert(labels);
        }
        if !any {
            self.drop_stale(at.metrics, at.held);
        }
    }

    /// The series that it has reported.
    pub(super) fn series(&self) -> impl Iterator<Item = &Labels> {
        self.series.iter()
    }

    fn drop_stale(&mut self, metrics: &Metrics, held: &BTreeSet<Labels>) {
        for labels in std::mem::take(&mut self.stale) {
            if !held.contains(&labels) {
                metrics.forget_training(&labels);
            }
            self.series.remove(&labels);
        }
    }

    /// The launcher is gone, or its workers are. Series that others hold stay.
    pub(super) fn forget(&mut self, metrics: &Metrics, held: &BTreeSet<Labels>) {
        for labels in self.series.difference(held) {
            metrics.forget_training(labels);
        }
        *self = Reported::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(all: &[u32]) -> Vec<RankMetrics> {
        let words = Training {
            steps: 7,
            training_loss: 0.5,
            ..Training::default()
        }
        .encode();
        all.iter()
            .map(|rank| RankMetrics { rank: *rank, words })
            .collect()
    }

    struct Bench {
        metrics: Metrics,
        reported: Reported,
        room: usize,
        now: Time,
    }

    impl Bench {
        fn take(&mut self, digest: u8, first: bool, all: &[u32]) {
            let series = Series {
                metrics: &self.metrics,
                held: &BTreeSet::new(),
                room: self.room,
                job: "j",
                owner: "1000",
                node: "n",
            };
            let (digest, ranks) = (Digest([digest; 32]), ranks(all));
            self.reported
                .take(&series, digest, first, ranks.iter(), self.now);
        }

        fn shown(&self) -> Vec<u32> {
            let text = String::from_utf8(self.metrics.render().unwrap()).unwrap();
            let lines = text
                .lines()
                .filter(|l| l.starts_with("muster_training_loss{"));
            let rank = |l: &str| {
                let (_, rest) = l.split_once("rank=\"")?;
                rest.split_once('"')?.0.parse().ok()
            };
            let mut shown: Vec<u32> = lines.map(|l| rank(l).unwrap()).collect();
            shown.sort_unstable();
            shown
        }
    }

    #[test]
    fn series_live_as_long_as_their_ranks() {
        let mut bench = Bench {
            metrics: Metrics::new("1", "a").unwrap(),
            reported: Reported::default(),
            room: MAX_PER_USER,
            now: Time(1 << 40),
        };
        bench.take(1, true, &[0, 1]);
        bench.take(1, false, &[2]);
        assert_eq!(bench.shown(), [0, 1, 2]);
        // Too soon: left out, and nothing is lost by it.
        bench.now += Span::from_millis(100);
        bench.take(1, true, &[9]);
        assert_eq!(bench.shown(), [0, 1, 2]);
        // Rank 1 has ended: it goes when the report is complete, at the latest with the next.
        bench.now += Span::from_secs(2);
        bench.take(1, true, &[0, 2]);
        bench.now += Span::from_secs(2);
        bench.take(1, true, &[0, 2]);
        assert_eq!(bench.shown(), [0, 2]);
        bench.now += Span::from_secs(2);
        bench.take(1, true, &[]);
        assert!(bench.shown().is_empty());
        // Another generation, other ranks.
        bench.now += Span::from_secs(2);
        bench.take(1, true, &[0]);
        bench.now += Span::from_millis(1);
        bench.take(2, true, &[5]);
        assert_eq!(bench.shown(), [5]);
        bench.reported.forget(&bench.metrics, &BTreeSet::new());
        assert!(bench.shown().is_empty());
        // Beyond what its user may show the rest is left out, however it is told.
        bench.room = 2;
        bench.now += Span::from_secs(2);
        bench.take(1, true, &[0, 1, 2]);
        bench.take(1, false, &[3, 1]);
        assert_eq!(bench.shown(), [0, 1]);
    }

    #[test]
    fn nobody_takes_away_what_another_reports() {
        let metrics = Metrics::new("1", "a").unwrap();
        let take = |reported: &mut Reported, owner: &str, held: &BTreeSet<Labels>, at: u64| {
            let series = Series {
                metrics: &metrics,
                held,
                room: MAX_PER_USER,
                job: "j",
                owner,
                node: "n",
            };
            let ranks = ranks(&[0]);
            reported.take(&series, Digest([1; 32]), true, ranks.iter(), Time(at));
        };
        let owners = || {
            let text = String::from_utf8(metrics.render().unwrap()).unwrap();
            let lines = text
                .lines()
                .filter(|l| l.starts_with("muster_training_loss{"));
            let owner = |l: &str| Some(l.split_once("owner=\"")?.1.split_once('"')?.0.to_owned());
            lines.map(|l| owner(l).unwrap()).collect::<Vec<String>>()
        };
        let nobody = BTreeSet::new();
        let [mut first, mut second, mut other] = [(); 3].map(|()| Reported::default());
        take(&mut first, "1000", &nobody, 1 << 40);
        take(&mut other, "1001", &nobody, 1 << 40);
        assert_eq!(
            owners(),
            ["1000", "1001"],
            "two users with one name for a job"
        );
        // Another launcher of the same job takes over before the agent sees the first one go.
        let held: BTreeSet<Labels> = first.series().cloned().collect();
        take(&mut second, "1000", &held, 2 << 40);
        let held = second.series().cloned().collect();
        first.forget(&metrics, &held);
        assert_eq!(owners(), ["1000", "1001"]);
        second.forget(&metrics, &nobody);
        assert_eq!(owners(), ["1001"]);
    }
}
