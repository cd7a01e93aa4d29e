//! Every state that a few voters can come to in two generations, with messages lost, repeated and
//! out of order, crashes, and commits: the protocol's own acceptor and proposer, exhaustively.
//!
//! Messages lie in a set from which nothing is ever taken: one that is never delivered is lost, one
//! that is delivered twice is repeated, and any order is possible. A crash between two effects is
//! the same as a lost request or a lost answer, because what is durable is written before it is
//! spoken of. So one delivery is one step, and nothing is left out.

pub mod agents;
mod model;

use std::collections::HashSet;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash};

pub use model::{Broken, Limits, Model, Rules, State};

/// Result of an exploration.
#[derive(Debug)]
pub struct Explored {
    pub states: usize,
    pub deepest: usize,
    /// States in which a value was decided after the first generation, and after the second.
    pub decided: [usize; 2],
    /// Proposals that had to adopt a value.
    pub adopted: usize,
    pub broken: Option<(Broken, Vec<String>)>,
    /// The whole space was seen: nothing was cut off by `max_states`.
    pub complete: bool,
}

/// Depth first, each state once. The visited set keeps 64-bit fingerprints: with ten million
/// states the chance that one hides another is below 3 in a million.
pub fn explore(model: &Model, max_states: usize) -> Explored {
    let hasher = BuildHasherDefault::<DefaultHasher>::new();
    let mut seen: HashSet<u64> = HashSet::new();
    let start = model.start();
    seen.insert(hasher.hash_one(Fingerprint(&start)));
    let mut out = Explored {
        states: 1,
        deepest: 0,
        decided: [0; 2],
        adopted: 0,
        broken: None,
        complete: true,
    };
    // The path to each open state, as the moves taken and the moves left to take.
    let mut stack = vec![(start.clone(), model.moves(&start), 0usize)];
    while let Some((state, moves, next)) = stack.last_mut() {
        let Some(chosen) = moves.get(*next).cloned() else {
            stack.pop();
            continue;
        };
        *next += 1;
        let Some(after) = model.take(state, &chosen) else {
            continue;
        };
        if !seen.insert(hasher.hash_one(Fingerprint(&after))) {
            continue;
        }
        out.states += 1;
        match model.check(&after) {
            Ok(decided) => {
                for (count, yes) in out.decided.iter_mut().zip(decided) {
                    *count += usize::from(yes);
                }
            }
            Err(broken) => {
                let path = stack
                    .iter()
                    .filter_map(|(_, m, n)| Some(format!("{:?}", m.get(n.checked_sub(1)?)?)));
                out.broken = Some((broken, path.collect()));
                return out;
            }
        }
        out.adopted += usize::from(after.adopted);
        if out.states >= max_states {
            out.complete = false;
            return out;
        }
        let moves = model.moves(&after);
        stack.push((after, moves, 0));
        out.deepest = out.deepest.max(stack.len());
    }
    out
}

struct Fingerprint<'a>(&'a State);

impl Hash for Fingerprint<'_> {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.0.hash(state);
    }
}
