//! Hangs: a rank that makes no progress for many times its usual step, and for whom everybody waits.
//! Two pure parts: [`Watch`], a launcher's eye on its own workers, and [`judge`], with which the
//! leader finds out who is to blame. Neither reads a clock.
//!
//! A launcher looks at its workers' pages a few times a second. When one of them stands still for
//! longer than [`Limits`] allow, it says so to its agent, the leader asks every node where its ranks
//! stand, and names those that the others wait for. In a synchronous job all ranks stand still
//! together, so standing still says nothing about who is at fault; being behind does.
//!
//! Only workers that have attached the runtime are judged, after their first few steps.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::control::report::ALIVE;
use crate::ids::NodeId;
use crate::time::{Span, Time};

/// The most ranks of one node that a report names.
pub const MAX_STANDINGS: usize = 64;

/// A worker is judged once its usual step is known from so many.
const FIRST_STEPS: usize = 5;

/// Steps that the usual one is the median of.
const REMEMBERED: usize = 31;

/// The most time that one look counts. If more has passed the launcher stood still itself (a suspended
/// machine, a stopped process), and so did its workers perhaps.
const LONGEST_LOOK: Span = Span::from_millis(1_000);

/// Ranks that are named in one verdict.
const MAX_NAMED: usize = 64;

/// When a worker that does not move counts as hung.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// So many times the median step without progress; 0: never.
    pub factor: u32,
    /// And at least this long.
    pub least: Span,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            factor: 20,
            least: Span::from_secs(60),
        }
    }
}

/// How far a worker is: the step that it is about to begin or has begun, and within it the
/// operations that it has entered and left ([`crate::control::report::word::OPERATION`]).
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Point {
    pub step: u64,
    pub operation: u64,
}

impl Point {
    /// A key that compares lower for a rank that others wait for: signs of life are no operations.
    fn order(self) -> (u64, u64) {
        (self.step, self.operation % ALIVE)
    }
}

/// Activity of a worker's main thread, by the kernel's word.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Doing {
    /// The letter of proc_pid_stat(5): `R`, `S`, `D`, `T` and so on; 0 where it is not known.
    pub state: u8,
    /// The number of the system call that it waits in, if it is in one and that may be seen.
    pub call: Option<u32>,
}

impl Doing {
    /// It was stopped by a signal or by a debugger.
    fn is_stopped(self) -> bool {
        matches!(self.state, b'T' | b't')
    }
}

/// Where one rank stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Standing {
    pub rank: u32,
    pub point: Point,
    /// For how long it has not moved.
    pub idle_ms: u32,
    /// That is longer than its launcher allows.
    pub stalled: bool,
    pub doing: Doing,
}

/// One worker, as it was seen so far.
#[derive(Clone, Debug)]
struct Seen {
    point: Point,
    /// Looked at for so long since it moved.
    idle: Span,
    /// Since its step changed.
    in_step: Span,
    /// The last steps' times.
    steps: VecDeque<Span>,
}

impl Seen {
    fn new(point: Point) -> Seen {
        Seen {
            point,
            idle: Span::ZERO,
            in_step: Span::ZERO,
            steps: VecDeque::new(),
        }
    }

    fn look(&mut self, point: Point, passed: Span) {
        if point.step < self.point.step {
            // Another process, or another generation.
            *self = Seen::new(point);
            return;
        }
        self.idle = self.idle + passed;
        self.in_step = self.in_step + passed;
        if point.step > self.point.step {
            // Each of the steps that one look finds counts: a worker whose steps are short is judged as soon.
            let count = point.step - self.point.step;
            let each = Span(self.in_step.0 / count);
            let count = usize::try_from(count).unwrap_or(REMEMBERED);
            self.steps
                .extend(std::iter::repeat_n(each, count.min(REMEMBERED)));
            let over = self.steps.len().saturating_sub(REMEMBERED);
            self.steps.drain(..over);
            self.in_step = Span::ZERO;
        }
        if point != self.point {
            self.idle = Span::ZERO;
            self.point = point;
        }
    }

    fn median(&self) -> Option<Span> {
        if self.steps.len() < FIRST_STEPS {
            return None;
        }
        let mut sorted: Vec<Span> = self.steps.iter().copied().collect();
        sorted.sort_unstable();
        sorted.get(sorted.len() / 2).copied()
    }

    fn is_stalled(&self, limits: Limits) -> bool {
        let limit = |median: Span| median.times(limits.factor.into()).max(limits.least);
        self.median().is_some_and(|m| self.idle >= limit(m))
    }
}

/// A launcher's eye on the workers of one generation.
#[derive(Clone, Debug)]
pub struct Watch {
    limits: Limits,
    looked: Option<Time>,
    ranks: BTreeMap<u32, Seen>,
    stalled: bool,
}

impl Watch {
    pub fn new(limits: Limits) -> Watch {
        Watch {
            limits,
            looked: None,
            ranks: BTreeMap::new(),
            stalled: false,
        }
    }

    /// Takes in where every worker stands that has attached the runtime and announced a step. Says
    /// when one of them begins to count as stalled, and when none does any more.
    pub fn look(
        &mut self,
        workers: impl IntoIterator<Item = (u32, Point)>,
        now: Time,
    ) -> Option<bool> {
        let passed = self.looked.map_or(Span::ZERO, |at| now.since(at));
        let passed = passed.min(LONGEST_LOOK);
        self.looked = Some(now);
        let mut there = BTreeMap::new();
        for (rank, point) in workers {
            let mut seen = self.ranks.remove(&rank).unwrap_or_else(|| Seen::new(point));
            seen.look(point, passed);
            there.insert(rank, seen);
        }
        // Who is gone or has detached is not judged any more.
        self.ranks = there;
        let limits = self.limits;
        let stalled = limits.factor > 0 && self.ranks.values().any(|s| s.is_stalled(limits));
        (std::mem::replace(&mut self.stalled, stalled) != stalled).then_some(stalled)
    }

    /// Nothing is expected to move: the workers were told to wait.
    pub fn rest(&mut self, now: Time) {
        self.looked = Some(now);
        for seen in self.ranks.values_mut() {
            seen.idle = Span::ZERO;
            seen.in_step = Span::ZERO;
        }
    }

    /// The usual step of the slowest rank, once that is known of all.
    pub fn usual_step(&self) -> Option<Span> {
        let all: Option<Vec<Span>> = self.ranks.values().map(Seen::median).collect();
        all?.into_iter().max()
    }

    /// Where the ranks stand, those behind first.
    pub fn standings(&self) -> Vec<Standing> {
        let mut all: Vec<Standing> = self
            .ranks
            .iter()
            .map(|(rank, seen)| Standing {
                rank: *rank,
                point: seen.point,
                idle_ms: u32::try_from(seen.idle.as_millis()).unwrap_or(u32::MAX),
                stalled: self.limits.factor > 0 && seen.is_stalled(self.limits),
                doing: Doing::default(),
            })
            .collect();
        all.sort_by_key(|s| (s.point.order(), s.rank));
        all.truncate(MAX_STANDINGS);
        all
    }
}

/// Basis of a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Evidence {
    /// The others are at a later step.
    Step,
    /// The others have entered an operation of the same step that this one has not.
    Operation,
    /// Its process is stopped.
    Stopped,
    /// All others wait in one and the same way, and this one does not.
    Odd,
    /// The others move, and wait for nobody.
    Alone,
    /// None: all stand at the same point in the same way.
    Nothing,
}

impl Evidence {
    /// A short stable word for JSON.
    pub fn word(self) -> &'static str {
        match self {
            Evidence::Step => "step",
            Evidence::Operation => "operation",
            Evidence::Stopped => "stopped",
            Evidence::Odd => "odd",
            Evidence::Alone => "alone",
            Evidence::Nothing => "nothing",
        }
    }

    /// Why those that are named are; none where all stand still alike.
    fn because(self) -> Option<&'static str> {
        Some(match self {
            Evidence::Step => "the others are a step ahead",
            Evidence::Operation => "the others wait in an operation that it has not entered",
            Evidence::Stopped => "its process is stopped",
            Evidence::Odd => "all others wait in one way, and it does not",
            Evidence::Alone => "the others move",
            Evidence::Nothing => return None,
        })
    }
}

/// A rank and its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Named {
    pub node: NodeId,
    pub rank: u32,
}

/// For whom everybody waits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hang {
    /// Never empty, lowest rank first; with [`Evidence::Nothing`] all who stand still.
    pub ranks: Vec<Named>,
    pub evidence: Evidence,
    pub step: u64,
    /// For how long the first of them has not moved.
    pub idle_ms: u32,
    /// Other ranks that stand still.
    pub waiting: u32,
    /// Nodes that did not say where their ranks stand.
    pub silent: Vec<NodeId>,
}

impl Hang {
    /// Whether the same ranks are named for the same reason at the same step.
    pub fn is_same(&self, other: &Hang) -> bool {
        let what = |h: &Hang| (h.evidence, h.step);
        what(self) == what(other) && self.ranks == other.ranks
    }

    /// The named ranks of one node.
    pub fn ranks_of(&self, node: NodeId) -> Vec<u32> {
        let here = self.ranks.iter().filter(|n| n.node == node);
        here.map(|n| n.rank).collect()
    }

    /// A sentence for people. `name` is what they call a node.
    pub fn text(&self, name: impl Fn(NodeId) -> String) -> String {
        let mut who: Vec<String> = self
            .ranks
            .iter()
            .take(4)
            .map(|n| format!("rank {} on {}", n.rank, name(n.node)))
            .collect();
        if self.ranks.len() > 4 {
            who.push(format!("{} more", self.ranks.len() - 4));
        }
        let idle = Span::from_millis(self.idle_ms.into());
        let who = who.join(", ");
        let named = match (self.evidence.because(), self.ranks.len()) {
            (None, 1) => format!("{who} stands still"),
            (None, _) => {
                format!("all ranks stand at the same point, so nobody can be singled out: {who}")
            }
            (Some(because), _) => {
                let waiters = match self.waiting {
                    0 => "nobody waits".to_owned(),
                    1 => "1 other rank waits".to_owned(),
                    n => format!("{n} other ranks wait"),
                };
                format!("{waiters} for {who} ({because})")
            }
        };
        let mut text = format!(
            "hung: no progress for {idle} at step {}; {named}",
            self.step
        );
        if !self.silent.is_empty() {
            let silent: Vec<String> = self.silent.iter().take(4).map(|n| name(*n)).collect();
            text.push_str(&format!("; no answer came from {}", silent.join(", ")));
        }
        text
    }
}

/// Finds those for whom the others wait, from where the ranks of all nodes stand. `None` where no
/// rank stands still any more, and where a rank that moves, or that is not expected to, is no further
/// than those that stand still: they may wait for it, as while one rank saves or evaluates for all. Nor
/// are all named who stand at one point while a node is silent: the rank that they wait for may be there.
///
/// The nodes answer at different moments, and who went on between two of them may seem to leave the
/// others behind. So a verdict stands only if it comes twice, from answers to two questions one after
/// the other.
///
/// Ranks that are a step ahead and move while others stand still are no candidates: the job does not
/// run in lock step then, and who stands still is at fault itself. Among the candidates those are kept that are
/// behind: by step, then by operation; of these those that are stopped; and else the one that differs
/// from all others.
pub fn judge(all: &[(NodeId, Vec<Standing>)], silent: Vec<NodeId>) -> Option<Hang> {
    let every = || {
        all.iter()
            .flat_map(|(node, list)| list.iter().map(|s| (*node, *s)))
    };
    if !every().any(|(_, s)| s.stalled) {
        return None;
    }
    let longest = every().map(|(_, s)| s.idle_ms).max()?;
    // One that joined later has waited less, and waits all the same.
    let still = |s: &Standing| s.stalled || s.idle_ms >= longest / 2;
    let mut group: Vec<(NodeId, Standing)> = every().filter(|(_, s)| still(s)).collect();
    let lowest = group.iter().map(|(_, s)| s.point.step).min()?;
    let busy = |s: &Standing| !still(s) && s.point.step <= lowest;
    // By step only: it may enter operations that the others have no part in.
    if every().any(|(_, s)| busy(&s)) {
        return None;
    }
    let still = group.len();
    let moving = every().count() - still;
    let mut evidence = None;
    let mut keep =
        |group: &mut Vec<(NodeId, Standing)>, why: Evidence, test: &dyn Fn(&Standing) -> bool| {
            let kept = group.iter().filter(|(_, s)| test(s)).count();
            if kept > 0 && kept < group.len() {
                group.retain(|(_, s)| test(s));
                evidence.get_or_insert(why);
            }
        };
    keep(&mut group, Evidence::Step, &|s| s.point.step == lowest);
    let behind = group.iter().map(|(_, s)| s.point.order()).min()?;
    keep(&mut group, Evidence::Operation, &|s| {
        s.point.order() == behind
    });
    keep(&mut group, Evidence::Stopped, &|s| s.doing.is_stopped());
    if let Some(odd) = odd_one(&group) {
        keep(&mut group, Evidence::Odd, &|s| s.rank == odd);
    }
    group.sort_by_key(|(_, s)| s.rank);
    let first = group.first()?.1;
    let named = group.len();
    let evidence = evidence.unwrap_or(match moving {
        0 => Evidence::Nothing,
        _ => Evidence::Alone,
    });
    if evidence == Evidence::Nothing && !silent.is_empty() {
        return None;
    }
    Some(Hang {
        ranks: group
            .iter()
            .take(MAX_NAMED)
            .map(|(node, s)| Named {
                node: *node,
                rank: s.rank,
            })
            .collect(),
        evidence,
        step: first.point.step,
        idle_ms: first.idle_ms,
        waiting: u32::try_from(still - named).unwrap_or(u32::MAX),
        silent,
    })
}

/// The one rank of at least three whose main thread does something else than all others, which all
/// do the same.
fn odd_one(group: &[(NodeId, Standing)]) -> Option<u32> {
    if group.len() < 3 || group.iter().any(|(_, s)| s.doing.state == 0) {
        return None;
    }
    let mut kinds: BTreeMap<Doing, Vec<u32>> = BTreeMap::new();
    for (_, standing) in group {
        kinds.entry(standing.doing).or_default().push(standing.rank);
    }
    let mut kinds: Vec<Vec<u32>> = kinds.into_values().collect();
    kinds.sort_by_key(Vec::len);
    match kinds.as_slice() {
        [odd, _] if odd.len() == 1 => odd.first().copied(),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
