//! Choice of what to do when a node has to go: save anew, finish the copy that is sealed already, or rely on what
//! is committed. A pure function of what is left and of what was measured.

use crate::time::Span;

/// Of the time that a choice is reckoned to take, this much more is asked for: what was measured was
/// not measured under a notice.
const MARGIN_PERCENT: u64 = 25;

/// Measurements of the slowest node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Speeds {
    /// Bytes per second from a rank's state into its slot, all ranks of a node together.
    pub copy: u64,
    /// Bytes per second from slots to durable files.
    pub write: u64,
    /// From the last durable file to the commit.
    pub commit: Span,
}

/// A copy that every rank has sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending {
    pub step: u64,
    /// Bytes that the slowest node has still to write.
    pub left: u64,
}

/// Where the job stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Situation {
    /// Until the node is gone.
    pub left: Span,
    /// Until the ranks stop: what is left of the agreement, and of the step.
    pub stop: Span,
    /// The step that they would save before.
    pub step: u64,
    /// Bytes of the node that has most of them.
    pub bytes: u64,
    /// None where nothing was measured yet.
    pub speeds: Option<Speeds>,
    pub sealed: Option<Pending>,
    /// The newest step that is committed.
    pub committed: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// All ranks save anew.
    Fresh,
    /// The copies of this step are written and committed.
    Sealed { step: u64 },
    /// The newest commit has to do.
    Committed { step: u64 },
    /// There is nothing: training begins anew.
    Nothing,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    pub choice: Choice,
    /// The time that it is reckoned to take, with a margin.
    pub needs: Span,
    /// Steps that are done again.
    pub lost: u64,
    /// A sentence for people.
    pub why: String,
}

/// Chooses what saves most steps and fits into the time that is left. Where nothing was measured, a
/// fresh save is tried if the ranks can stop in time: it takes nothing away from what is there.
pub fn choose(of: &Situation) -> Chosen {
    let fresh = of.speeds.map(|s| {
        let moved = Span(
            took(of.bytes, s.copy)
                .0
                .saturating_add(took(of.bytes, s.write).0),
        );
        with_margin(of.stop + moved + s.commit)
    });
    let left = of.left;
    // Without a measure what is known is that the ranks have to stop.
    if fresh.unwrap_or(of.stop) <= left {
        let why = match fresh {
            Some(needs) => format!(
                "a fresh save, of step {} or later, needs {needs}, and {left} are left",
                of.step
            ),
            None => format!(
                "no save has been measured yet, and {left} are left: a fresh one of step {} is tried",
                of.step
            ),
        };
        return Chosen {
            choice: Choice::Fresh,
            needs: fresh.unwrap_or_default(),
            lost: 0,
            why,
        };
    }
    let short = match fresh {
        Some(needs) => format!("a fresh save needs {needs}, and only {left} are left"),
        None => format!(
            "{left} are left, and the ranks need {} to stop at one step",
            of.stop
        ),
    };
    let newer = |p: &Pending| of.committed.is_none_or(|c| p.step > c);
    let sealed = of.sealed.filter(newer).zip(of.speeds).map(|(p, s)| {
        let needs = with_margin(took(p.left, s.write) + s.commit);
        (p.step, needs)
    });
    let lost = |step: u64| of.step.saturating_sub(step);
    if let Some((step, needs)) = sealed.filter(|(_, needs)| *needs <= left) {
        return Chosen {
            choice: Choice::Sealed { step },
            needs,
            lost: lost(step),
            why: format!(
                "{short}: the copy of step {step}, which all ranks have sealed, needs {needs}; {} are done \
                 again",
                steps(lost(step))
            ),
        };
    }
    let also = match sealed {
        Some((step, needs)) => {
            format!("{short}; so has the sealed copy of step {step}, which needs {needs}")
        }
        None => short,
    };
    match of.committed {
        Some(step) => Chosen {
            choice: Choice::Committed { step },
            needs: Span::ZERO,
            lost: lost(step),
            why: format!(
                "{also}: the checkpoint of step {step} has to do; {} are done again",
                steps(lost(step))
            ),
        },
        None => Chosen {
            choice: Choice::Nothing,
            needs: Span::ZERO,
            lost: of.step,
            why: format!("{also}, and nothing is committed: training begins anew"),
        },
    }
}

fn steps(n: u64) -> String {
    match n {
        1 => "1 step".to_owned(),
        n => format!("{n} steps"),
    }
}

/// How long `bytes` take at so many bytes per second; for ever at none.
fn took(bytes: u64, per_second: u64) -> Span {
    let nanos = u128::from(bytes) * 1_000_000_000;
    let nanos = nanos.checked_div(u128::from(per_second));
    match (bytes, nanos) {
        (0, _) => Span::ZERO,
        (_, Some(nanos)) => Span(u64::try_from(nanos).unwrap_or(u64::MAX)),
        (_, None) => Span(u64::MAX),
    }
}

fn with_margin(span: Span) -> Span {
    Span(span.0.saturating_add(span.0 / 100 * MARGIN_PERCENT))
}
