use super::super::alone::Alone;
use super::ATTACH;
use crate::barrier::Held;
use crate::control::Reason;
use crate::local::{Command, ToAgent, ToLauncher};
use crate::time::Span;
use crate::wire::{CheckpointStage, Saved};

/// Of a checkpoint that never ends: more than the leader waits for it.
const LONG: Span = Span::from_secs(700);

/// Some rank never saved, and a new leader cannot know whether it still does: it waits for that one
/// time, and not whenever somebody asks.
#[test]
fn a_checkpoint_that_nobody_ends_holds_up_one_other_at_most() {
    let mut alone = Alone::new();
    let (digest, attempt) = alone.trains();
    let facts = [
        ToAgent::Started { digest, attempt },
        ToAgent::TakesStopSteps { digest, yes: true },
    ];
    alone.pass(Span::from_secs(1));
    // Another run of the agent, which finds a checkpoint that is under way.
    alone.boot += 1;
    alone.agent = Alone::agent(alone.boot, alone.stored.clone(), alone.now);
    let held = Held {
        barrier: 1,
        step: 5,
        reason: Reason::Checkpoint,
        confirmed: true,
    };
    alone.registers(Some((digest, held)));
    facts.into_iter().for_each(|fact| alone.says(fact));
    let saved = Saved {
        step: 5,
        ranks: Vec::new(),
        all: false,
        failed: None,
    };
    alone.says(ToAgent::Saved { digest, saved });
    alone.pass(Span::from_secs(5));
    alone.told.clear();
    assert_eq!(alone.asks(), CheckpointStage::Saving { step: 5 });
    alone.pass(LONG);
    assert!(matches!(alone.stage(), CheckpointStage::Failed { .. }));
    let installs = |alone: &Alone| {
        let install = |f: &&ToLauncher| matches!(f, ToLauncher::InstallStop { .. });
        alone.told.iter().filter(install).count()
    };
    assert_eq!(installs(&alone), 0);
    // The next one is agreed on anew.
    assert_eq!(alone.asks(), CheckpointStage::Agreeing);
    assert!(installs(&alone) > 0, "{:?}", alone.told);
}

/// The launcher says which step it would stop before.
fn installs_stop(alone: &mut Alone, digest: crate::Digest, step: u64) {
    let install = |f: &ToLauncher| match f {
        ToLauncher::InstallStop { barrier, .. } => Some(*barrier),
        _ => None,
    };
    let barrier = alone.told.iter().find_map(install).unwrap();
    alone.says(ToAgent::StopInstalled {
        digest,
        barrier,
        step,
    });
}

#[test]
fn who_ordered_a_checkpoint_learns_that_a_rank_could_not_save() {
    let mut alone = Alone::new();
    let (digest, attempt) = alone.trains();
    alone.says(ToAgent::Started { digest, attempt });
    alone.says(ToAgent::TakesStopSteps { digest, yes: true });
    alone.pass(Span::from_secs(1));
    assert_eq!(alone.asks(), CheckpointStage::Agreeing);
    installs_stop(&mut alone, digest, 5);
    alone.pass(Span::from_secs(1));
    assert_eq!(alone.stage(), CheckpointStage::Saving { step: 5 });
    let why = "rank 0 could not save: raise --checkpoint-memory".to_owned();
    let saved = Saved {
        step: 5,
        ranks: Vec::new(),
        all: true,
        failed: Some(why.clone()),
    };
    alone.says(ToAgent::Saved { digest, saved });
    alone.pass(Span::from_secs(5));
    assert_eq!(alone.stage(), CheckpointStage::Failed { why });
    // The next one is agreed on anew.
    assert_eq!(alone.asks(), CheckpointStage::Agreeing);
}

const AWAY: &str = "not every worker has attached the runtime: ";

fn waits(stage: &CheckpointStage) -> bool {
    matches!(stage, CheckpointStage::Waiting { why } if why.starts_with(AWAY))
}

fn fails(stage: &CheckpointStage) -> bool {
    matches!(stage, CheckpointStage::Failed { why } if why.starts_with(AWAY))
}

/// Right after a start, workers still load what brings the runtime.
#[test]
fn a_checkpoint_waits_for_workers_that_have_just_been_started() {
    let mut alone = Alone::new();
    let (digest, _) = alone.trains();
    alone.says(ToAgent::TakesStopSteps { digest, yes: false });
    let stage = alone.asks();
    assert!(waits(&stage), "{stage:?}");
    alone.says(ToAgent::TakesStopSteps { digest, yes: true });
    alone.pass(Span::from_secs(1));
    assert_eq!(alone.stage(), CheckpointStage::Agreeing);
    installs_stop(&mut alone, digest, 5);
    // It has as long from then on as any other.
    alone.pass(ATTACH);
    assert_eq!(alone.stage(), CheckpointStage::Saving { step: 5 });
}

#[test]
fn workers_without_the_runtime_are_waited_for_once_and_then_named_at_once() {
    let mut alone = Alone::new();
    let (digest, _) = alone.trains();
    alone.says(ToAgent::TakesStopSteps { digest, yes: false });
    let stage = alone.asks();
    assert!(waits(&stage), "{stage:?}");
    alone.pass(Span::from_secs(45));
    let stage = alone.stage();
    assert!(waits(&stage), "{stage:?}");
    alone.pass(Span::from_secs(15));
    let stage = alone.stage();
    assert!(fails(&stage), "{stage:?}");
    // They had their time.
    alone.says(ToAgent::Command(Command::Checkpoint { job: "job".into() }));
    alone.pass(Span::from_millis(1));
    let stage = alone.stage();
    assert!(fails(&stage), "{stage:?}");
}

/// While a checkpoint waits for workers to attach, no rank stands still for its sake.
#[test]
fn a_rank_that_stands_still_is_asked_about_while_a_checkpoint_waits_to_begin() {
    let mut alone = Alone::new();
    let (digest, _) = alone.trains();
    alone.says(ToAgent::TakesStopSteps { digest, yes: false });
    let stage = alone.asks();
    assert!(waits(&stage), "{stage:?}");
    let looks = |alone: &Alone| {
        let look = |f: &ToLauncher| matches!(f, ToLauncher::Look { .. });
        alone.told.iter().any(look)
    };
    alone.says(ToAgent::Stalled { digest, yes: true });
    alone.pass(Span::from_secs(1));
    assert!(waits(&alone.stage()) && looks(&alone), "{:?}", alone.told);
    // Once its step is to be agreed on, ranks may wait for it.
    alone.says(ToAgent::TakesStopSteps { digest, yes: true });
    alone.pass(Span::from_secs(1));
    assert_eq!(alone.stage(), CheckpointStage::Agreeing);
    alone.told.clear();
    alone.pass(Span::from_secs(5));
    assert!(!looks(&alone), "{:?}", alone.told);
}
