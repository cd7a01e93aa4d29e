//! Training in a generation that ends with the first loss: the workers are started again.

use super::{Aside, Ending, RunError};
use crate::collective::{Group, GroupConfig};
use crate::env::WorkerEnv;
use crate::live::{Comparison, Fault, LiveError, Share, Training, compare};
use crate::session::{Directive, Session};
use crate::train::hooks::{Boundary, Hooks, Place};
use crate::train::model::Model;
use crate::train::parallel::Parallel;
use crate::train::restore::hand_out;

/// In one generation: until the end, a stop that was agreed, or a loss.
pub(in crate::train) fn in_place<M: Model, H: Hooks<M>>(
    mut training: Parallel<M>,
    mut aside: Aside<H>,
    mut session: Option<&mut Session>,
    env: &WorkerEnv,
) -> Result<(Ending, Parallel<M>), RunError> {
    let mut group = Group::form(&GroupConfig::from_env(env))?;
    group.set_op_within(aside.options.patience.operation);
    if let Some(session) = &session {
        group.mark_waits(session.waits());
    }
    let mut step = training.restore(&mut group)?;
    if let Some(saves) = &mut training.saves {
        saves.begin(&mut group)?;
    }
    let place = Place {
        rank: env.rank,
        world: env.world,
        local_rank: env.local_rank,
        generation: env.generation,
        digest: env.digest,
        steps: training.steps(),
        survived: false,
        took: None,
    };
    let told = aside.hooks.on_regroup(training.model(), &place);
    told.map_err(RunError::Hook)?;
    let share = Share {
        entered: (0..env.world).collect(),
        rank: env.rank,
        world: env.world,
    };
    training.prepare_saves(&share)?;
    while !training.is_complete(env.world as usize) {
        if let Some(session) = session.as_mut() {
            match session.step(step)? {
                Directive::Continue => {}
                Directive::Checkpoint { step } => {
                    save_together(&mut training, &mut aside, &mut group, &share, step)?;
                    session.saved(step);
                }
                Directive::Stop { deadline, reason } => {
                    save_together(&mut training, &mut aside, &mut group, &share, step)?;
                    let boundary = Boundary { reason, deadline };
                    let told = aside.hooks.on_boundary(training.model(), &boundary);
                    told.map_err(RunError::Hook)?;
                    session.acknowledge(step);
                    return Ok((Ending::Stopped, training));
                }
            }
        }
        let every = aside.options.compare_every.filter(|every| *every > 0);
        if every.is_some_and(|every| step.is_multiple_of(every)) {
            compare_states(&mut training, &mut aside, &mut group, step)?;
        }
        let results = training.results(step, &share, &mut group)?;
        training.commit(step, &results);
        if let Some(error) = training.fault() {
            return Err(Fault::Training(error).into());
        }
        training.recycle(results);
        step += 1;
        aside.news(&mut training)?;
        if let Some(session) = session.as_mut() {
            session.report(&aside.metrics);
        }
        if aside.is_due(step) && !training.saves_with_evaluation(step, &share) {
            save_together(&mut training, &mut aside, &mut group, &share, step)?;
        }
    }
    save_together(&mut training, &mut aside, &mut group, &share, step)?;
    Ok((Ending::Complete, training))
}

/// All ranks save what most of them hold, each its part; or rank 0 alone, and all go on when it has.
fn save_together<M: Model, H: Hooks<M>>(
    training: &mut Parallel<M>,
    aside: &mut Aside<H>,
    group: &mut Group,
    share: &Share,
    step: u64,
) -> Result<(), RunError> {
    if aside.options.compare_every.is_some_and(|every| every > 0) {
        compare_states(training, aside, group, step)?;
    }
    if training.saves.is_some() {
        training.save_part(step, share)?;
        return aside.news(training);
    }
    if group.rank() == 0 {
        aside.save(training)?;
    }
    Ok(group.barrier()?)
}

/// A rank whose state deviates gets the state of the others. Once before each step.
fn compare_states<M: Model, H: Hooks<M>>(
    training: &mut Parallel<M>,
    aside: &mut Aside<H>,
    group: &mut Group,
    step: u64,
) -> Result<(), RunError> {
    if aside.compared.replace(step) == Some(step) {
        return Ok(());
    }
    match compare(group, Some(training.digest_state()))? {
        Comparison::Same => Ok(()),
        Comparison::Undecided { groups } => Err(LiveError::StatesDiffer { step, groups }.into()),
        Comparison::Deviating { ranks, right } => {
            let root = right.first().copied().unwrap_or(0);
            let own = if group.rank() == root {
                training.whole()?
            } else {
                Vec::new()
            };
            let state = hand_out(group, root, own)?;
            if ranks.contains(&group.rank()) && !training.decode(&state) {
                return Err(LiveError::Useless { what: "state" }.into());
            }
            aside.hooks.on_quarantine(&ranks).map_err(RunError::Hook)
        }
    }
}
