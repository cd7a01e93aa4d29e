//! Ranks of a PyTorch script that do not hold the same.

use crate::harness::{Bed, project};
use crate::needs_torch::python::bed;
use crate::real::unlike::{UNSAVED, ordered, shown};

/// A job of two ranks on one node that differ in this way, which runs until it ends.
fn job(store: &tempfile::TempDir, what: &str, steps: u64, every: u64) -> Bed {
    let mut bed = bed("1", store.path().to_str().unwrap());
    let script = project("tests/tests/processes/harness/unlike.py");
    let (steps, every) = (steps.to_string(), every.to_string());
    bed.script(&["--nproc-per-node=2", &script, what, &steps, &every]);
    bed
}

fn checkpoints(store: &tempfile::TempDir) -> usize {
    let manifests = std::fs::read_dir(store.path().join("job/manifest"));
    manifests.into_iter().flatten().count()
}

/// Nothing is committed, each console says why, once and at the end, and the exit code is not that of success.
#[track_caller]
fn is_refused(what: &str, says: &str) {
    let store = tempfile::tempdir().unwrap();
    let mut bed = job(&store, what, 40, 10);
    bed.run(0, 0);
    assert_eq!(bed.ended(0), Some(UNSAVED), "{}", bed.said(0));
    let said = bed.said(0);
    assert_eq!(shown(&said, says), 2, "{said}");
    assert_eq!(checkpoints(&store), 0);
}

#[test]
fn a_rank_with_a_layer_more_is_refused() {
    is_refused("layer", "first at `model.2.bias`");
}

#[test]
fn optimizers_with_state_for_other_parameters_are_refused() {
    is_refused("branch", "first at `optimizer.state.0.exp_avg`");
}

#[test]
fn values_that_are_a_ranks_own_are_refused() {
    is_refused("experts", "first at `state.expert`");
}

/// Each saves behind its own last step, and what they saved is no state of the job.
#[test]
fn ranks_that_end_at_other_steps_do_not_end_well() {
    let store = tempfile::tempdir().unwrap();
    let mut bed = job(&store, "ends", 25, 10);
    bed.run(0, 0);
    assert_eq!(bed.ended(0), Some(UNSAVED), "{}", bed.said(0));
    assert_eq!(shown(&bed.said(0), "rank 0 has ended with 0"), 2);
}

/// The others do not wait for a free slot without end: what they have sealed since is let go.
#[test]
fn a_rank_that_ends_in_mid_training_holds_up_no_other() {
    let store = tempfile::tempdir().unwrap();
    let mut bed = job(&store, "leaves", 30, 5);
    bed.run(0, 0);
    assert_eq!(bed.ended(0), Some(UNSAVED), "{}", bed.said(0));
    // It says so itself, the first save that is given up does, and the end.
    let said = bed.said(0);
    assert_eq!(shown(&said, "rank 1 has ended with 0"), 3, "{said}");
    assert_eq!(checkpoints(&store), 1);
}

#[test]
fn who_orders_such_a_checkpoint_learns_why_there_is_none() {
    let store = tempfile::tempdir().unwrap();
    let mut bed = job(&store, "experts", 1_000_000, 1_000_000);
    bed.run(0, 0);
    bed.until("it trains", |bed| {
        bed.said(0).matches("begins at 0").count() == 2
    });
    let (ok, said) = bed.checkpoint(0, &["-o", "json"]);
    let (saved, step, why) = ordered(&said);
    assert!(!ok && !saved && step.is_some() && why.is_some(), "{said}");
}

/// Goes on twice, and each rank gets its own back.
#[track_caller]
fn is_saved(what: &str, begins: impl Fn(u32) -> String) {
    let store = tempfile::tempdir().unwrap();
    for (node, steps) in [(0, 20), (1, 30)] {
        let mut bed = job(&store, what, steps, 10);
        bed.run(node, node);
        assert_eq!(bed.ended(node), Some(0), "{}", bed.said(node));
        let begun = |rank| bed.said(node).contains(&begins(rank));
        assert_eq!(begun(0) && begun(1), node == 1, "{}", bed.said(node));
    }
}

#[test]
fn values_that_are_a_ranks_own_are_saved_as_shards() {
    is_saved("parts", |rank| {
        format!("rank {rank} begins at 20 with {}.0", 20 + rank)
    });
}

#[test]
fn buffers_and_random_numbers_may_differ() {
    is_saved("buffers", |rank| format!("rank {rank} begins at 20 with "));
}
