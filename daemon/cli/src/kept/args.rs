//! Flags about what is kept: of `muster run`, and of `muster checkpoint prune`.

use muster_checkpoint::retention::Best;
use muster_protocol::storelog::{self, MAX_METRIC};

use super::Rules;

/// Defaults of a job's rules: so many of the newest stay, and the best go by this metric.
const LAST: u32 = 3;
const METRIC: &str = "loss";

/// Which checkpoints stay in the store, besides pinned ones and those in use.
#[derive(Clone, Debug, clap::Args)]
pub struct KeepArgs {
    /// How many of the newest checkpoints stay in the store; never fewer than two that are verified
    #[arg(long, alias = "keep_last", env = "PET_KEEP_LAST", default_value = "3", value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    pub keep_last: u32,

    /// Also keep this many of the best
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
    /// The rules that these flags give.
    pub fn rules(&self) -> Rules {
        Rules::from(&storelog::Rules {
            last: self.keep_last,
            best: self.keep_best,
            metric: self.best_by.metric.clone(),
            highest: self.best_by.best == Best::Highest,
        })
    }
}

/// The same of a job that was started already, where they are to differ from what it was started with.
#[derive(Clone, Debug, clap::Args)]
pub struct ElseKeep {
    /// How many of the newest checkpoints stay, never fewer than two that are verified [default: what the job was
    /// started with]
    #[arg(long, alias = "keep_last", value_parser = clap::value_parser!(u32).range(1..), value_name = "N")]
    keep_last: Option<u32>,

    /// Also keep this many of the best [default: what the job was started with]
    #[arg(long, alias = "keep_best", value_name = "N")]
    keep_best: Option<u32>,

    /// The metric by which they are the best, and whether the lowest or the highest is [default: what the job was
    /// started with]
    #[arg(long, alias = "best_by", value_parser = best_by, value_name = "NAME[:min|:max]")]
    best_by: Option<BestBy>,
}

impl ElseKeep {
    /// The rules in the job's log, with those that these flags give in their place; without a log, the
    /// defaults of a new job.
    pub fn over(&self, logged: Option<&storelog::Rules>) -> storelog::Rules {
        let mut rules = logged.cloned().unwrap_or_else(|| storelog::Rules {
            last: LAST,
            best: 0,
            metric: METRIC.into(),
            highest: false,
        });
        rules.last = self.keep_last.unwrap_or(rules.last);
        rules.best = self.keep_best.unwrap_or(rules.best);
        if let Some(by) = &self.best_by {
            rules.metric.clone_from(&by.metric);
            rules.highest = by.best == Best::Highest;
        }
        rules
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
        false if metric.len() > MAX_METRIC => Err(format!(
            "a metric's name has at most {MAX_METRIC} bytes, this one {}",
            metric.len()
        )),
        false => Ok(BestBy {
            metric: metric.to_owned(),
            best,
        }),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[test]
    fn a_metric_is_named_with_its_better_end() {
        let of = |text: &str| best_by(text).map(|b| (b.metric, b.best));
        assert_eq!(of("loss"), Ok(("loss".into(), Best::Lowest)));
        assert_eq!(of("val:acc:max"), Ok(("val:acc".into(), Best::Highest)));
        assert!(of(&"x".repeat(MAX_METRIC)).is_ok() && of(&"x".repeat(MAX_METRIC + 1)).is_err());
        assert!(of("loss:low").is_err());
        assert!(of(":min").is_err());
    }

    #[derive(clap::Parser)]
    struct Run {
        #[command(flatten)]
        keep: KeepArgs,
    }

    #[derive(clap::Parser)]
    struct Prune {
        #[command(flatten)]
        keep: ElseKeep,
    }

    #[test]
    fn flags_say_what_differs_from_what_the_job_was_started_with() {
        let run = |flags: &[&str]| {
            let all = ["run"].iter().chain(flags);
            Run::parse_from(all).keep.rules().logged()
        };
        let prune = |flags: &[&str], logged: Option<&storelog::Rules>| {
            let all = ["prune"].iter().chain(flags);
            Prune::parse_from(all).keep.over(logged)
        };
        // Where nothing is said, both are the same.
        assert_eq!(prune(&[], None), run(&[]));
        let started = run(&["--keep-last=10", "--best-by=acc:max"]);
        assert_eq!((started.last, started.best), (10, 0));
        assert_eq!(prune(&[], Some(&started)), started);
        let wanted = storelog::Rules {
            best: 2,
            ..started.clone()
        };
        assert_eq!(prune(&["--keep-best=2"], Some(&started)), wanted);
        let all = ["--keep-last=1", "--keep-best=2", "--best-by=loss"];
        assert_eq!(prune(&all, Some(&started)), run(&all));
    }
}
