//! Flags about what is kept: of `muster run`, and of `muster checkpoint prune`.

use muster_checkpoint::retention::{Best, Policy};

use super::Rules;

/// Which checkpoints stay in the store, besides pinned ones and those in use.
#[derive(Clone, Debug, clap::Args)]
pub struct KeepArgs {
    /// How many of the newest checkpoints stay in the store; never fewer than two that are verified
    #[arg(long, alias = "keep_last", env = "PET_KEEP_LAST", default_value = "3", value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    pub keep_last: u32,

    /// How many of the best checkpoints stay besides
    #[arg(
        long,
        alias = "keep_best",
        env = "PET_KEEP_BEST",
        default_value = "0",
        value_name = "N"
    )]
    pub keep_best: u32,

    /// The metric by which they are the best, and whether the lowest or the highest is
    #[arg(long, alias = "best_by", env = "PET_BEST_BY", default_value = "loss:min", value_parser = best_by, value_name = "NAME[:min|:max]")]
    pub best_by: BestBy,
}

/// A metric, and which of its values is the best.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BestBy {
    pub metric: String,
    pub best: Best,
}

impl KeepArgs {
    /// What they mean.
    pub fn rules(&self) -> Rules {
        let count = |n: u32| usize::try_from(n).unwrap_or(usize::MAX);
        let best = count(self.keep_best);
        Rules {
            policy: Policy {
                last: count(self.keep_last),
                best: (best > 0).then_some((self.best_by.best, best)),
            },
            metric: self.best_by.metric.clone(),
        }
    }
}

fn best_by(text: &str) -> Result<BestBy, String> {
    let (metric, best) = match text.rsplit_once(':') {
        Some((metric, "min")) => (metric, Best::Lowest),
        Some((metric, "max")) => (metric, Best::Highest),
        Some((_, other)) => return Err(format!("`{other}` is neither min nor max")),
        None => (text, Best::Lowest),
    };
    match metric.is_empty() {
        true => Err("no metric is named, as in `loss:min`".into()),
        false => Ok(BestBy {
            metric: metric.to_owned(),
            best,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_named_with_its_better_end() {
        let of = |text: &str| best_by(text).map(|b| (b.metric, b.best));
        assert_eq!(of("loss"), Ok(("loss".into(), Best::Lowest)));
        assert_eq!(of("val:acc:max"), Ok(("val:acc".into(), Best::Highest)));
        assert!(of("loss:low").is_err());
        assert!(of(":min").is_err());
    }
}
