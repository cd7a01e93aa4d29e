//! Choice of what is saved when a node has to go, by the time that it has: a fresh save, the last copy that every
//! rank has sealed, or the last commit. People of every node are told which, and why.

use std::collections::BTreeSet;

use super::plan::Assessment;
use super::{Ctx, Job};
use crate::checkpoint::{Choice, Chosen, Lags, Leader, Pace, Pending, Situation, choose};
use crate::ids::NodeId;
use crate::record::Record;
use crate::time::Span;

/// How long the ranks take to agree on a step.
const AGREE: Span = Span::from_millis(200);

impl Job {
    /// Chooses; none where no rank saves by slots, for then nobody here knows what a save is.
    pub(super) fn choose_save(
        &self,
        ctx: &Ctx<'_>,
        record: &Record,
        a: &Assessment,
        left: Span,
    ) -> Option<Chosen> {
        let leader = self.saves.leader.as_ref()?;
        let paces = self.paces(record);
        if self.saves.slots.is_empty() && paces.iter().all(|(_, p)| *p == Pace::default()) {
            return None;
        }
        // Whoever stays has time.
        let leaving: BTreeSet<NodeId> = a.leaving.iter().map(|(node, _)| *node).collect();
        let of_leaving = || paces.iter().filter(|(node, _)| leaving.contains(node));
        let all = paces.iter().map(|(_, pace)| *pace);
        let writers = of_leaving().map(|(_, pace)| *pace);
        let bytes = of_leaving().map(|(_, pace)| pace.bytes).max();
        let bytes = bytes.unwrap_or_default();
        let (step, usual) = self.saves.meter.at.unwrap_or_default();
        let of = Situation {
            left,
            stop: AGREE + usual,
            step: step.saturating_add(1),
            bytes,
            speeds: Pace::slowest(all, writers, self.saves.triggers.commit()),
            sealed: pending(ctx, leader, &leaving, bytes),
            committed: (leader.committed()).or(record.restore.map(|commit| commit.step)),
        };
        Some(choose(&of))
    }

    /// The generation stops by a choice that needs no save: the next one is decided without waiting for
    /// any.
    pub(super) fn gives_saves_up(&self) -> bool {
        let planned = self.lead.as_ref().and_then(|l| l.planned.as_ref());
        let choice = planned.and_then(|p| p.choice);
        matches!(choice, Some(Choice::Committed { .. } | Choice::Nothing))
    }

    /// Text on what is left when a fresh save cannot be agreed on.
    pub(super) fn without_fresh_save(&self, record: &Record) -> String {
        let leader = self.saves.leader.as_ref();
        let committed = leader.and_then(Leader::committed);
        let committed = committed.or(record.restore.map(|commit| commit.step));
        let sealed = leader.and_then(Leader::sealed);
        match (sealed.filter(|step| Some(*step) > committed), committed) {
            (Some(step), _) => format!("the sealed copy of step {step} has to do"),
            (None, Some(step)) => format!("the checkpoint of step {step} has to do"),
            (None, None) => "nothing is committed: training begins anew".to_owned(),
        }
    }
}

/// The newest copy that every rank has sealed and nobody has committed, with what the nodes that go have
/// still to write of it.
fn pending(
    ctx: &Ctx<'_>,
    leader: &Leader,
    leaving: &BTreeSet<NodeId>,
    bytes: u64,
) -> Option<Pending> {
    let step = leader
        .sealed()
        .filter(|step| Some(*step) > leader.committed())?;
    let begun = leader
        .under_way()
        .is_some_and(|(save, _)| save.step == step);
    let left = match begun {
        true => {
            let late = leader.laggards(ctx.now).into_iter();
            let mine = late.filter(|l| leaving.contains(&l.node));
            let left = mine.map(|l| match l.what {
                Lags::Writing { left } => left,
                Lags::Manifest => 0,
                Lags::Silent | Lags::NotSealed { .. } => bytes,
            });
            left.max().unwrap_or(0)
        }
        false => bytes,
    };
    Some(Pending { step, left })
}
