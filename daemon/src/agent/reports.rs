//! What launchers report of their workers' training, as series of `/metrics`: a series lives as long
//! as its rank runs here.

use std::collections::BTreeSet;

use muster_protocol::control::report::{Metrics as Training, RankMetrics};
use muster_protocol::{Digest, Span, Time};

use crate::metrics::Metrics;

/// Between two reports of one launcher that are taken: it sends one every two seconds.
const EVERY: Span = Span::from_millis(500);

/// Where a report belongs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Series<'a> {
    pub(super) metrics: &'a Metrics,
    pub(super) job: &'a str,
    pub(super) node: &'a str,
}

/// What a launcher has reported.
#[derive(Debug, Default)]
pub(super) struct Reported {
    digest: Option<Digest>,
    taken: Option<Time>,
    /// Whether the report is taken whose parts come now.
    open: bool,
    /// The labels of the series that there are: job, rank, node.
    series: BTreeSet<[String; 3]>,
    /// Those of them that the report which is being taken has not named so far.
    stale: BTreeSet<[String; 3]>,
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
            self.forget(at.metrics);
            self.digest = Some(digest);
        }
        if first {
            // What the report before did not name is gone.
            self.drop_stale(at.metrics);
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
            let labels = [at.job.to_owned(), rank.rank.to_string(), at.node.to_owned()];
            let training = Training::decode(&rank.words);
            at.metrics.training(&labels, &training);
            self.stale.remove(&labels);
            self.series.insert(labels);
        }
        if !any {
            self.drop_stale(at.metrics);
        }
    }

    fn drop_stale(&mut self, metrics: &Metrics) {
        for labels in std::mem::take(&mut self.stale) {
            metrics.forget_training(&labels);
            self.series.remove(&labels);
        }
    }

    /// The launcher is gone, or its workers are.
    pub(super) fn forget(&mut self, metrics: &Metrics) {
        self.stale.clear();
        for labels in std::mem::take(&mut self.series) {
            metrics.forget_training(&labels);
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
        now: Time,
    }

    impl Bench {
        fn take(&mut self, digest: u8, first: bool, all: &[u32]) {
            let series = Series {
                metrics: &self.metrics,
                job: "j",
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
        bench.reported.forget(&bench.metrics);
        assert!(bench.shown().is_empty());
    }
}
