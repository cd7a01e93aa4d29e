//! One piece of work in many parts, by a few threads.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

/// The most threads of one call, whatever its caller asks for.
pub(crate) const MAX_THREADS: usize = 64;

/// `work` for each of `0..count`, in about that order, by this thread and up to `threads - 1`
/// others, each with a state of its own. The results in order, or the error of the earliest part
/// that had one; parts not yet begun by then are left undone.
///
/// A thread that cannot be started is done without.
pub(crate) fn each<S, T: Send, E: Send>(
    threads: usize,
    count: usize,
    state: impl Fn() -> Result<S, E> + Sync,
    work: impl Fn(&mut S, usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E> {
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let run = || {
        let mut done = Vec::new();
        let mut state = match state() {
            Ok(state) => state,
            Err(error) => {
                stop.store(true, Ordering::Relaxed);
                return (done, Some((usize::MAX, error)));
            }
        };
        while !stop.load(Ordering::Relaxed) {
            let at = next.fetch_add(1, Ordering::Relaxed);
            if at >= count {
                break;
            }
            match work(&mut state, at) {
                Ok(result) => done.push((at, result)),
                Err(error) => {
                    stop.store(true, Ordering::Relaxed);
                    return (done, Some((at, error)));
                }
            }
        }
        (done, None)
    };
    let others = threads.clamp(1, MAX_THREADS).min(count).saturating_sub(1);
    let outcomes = thread::scope(|scope| {
        let started: Vec<_> = (0..others)
            .filter_map(|_| {
                thread::Builder::new()
                    .name("checkpoint".to_owned())
                    .spawn_scoped(scope, run)
                    .ok()
            })
            .collect();
        let mut outcomes = vec![run()];
        for thread in started {
            match thread.join() {
                Ok(outcome) => outcomes.push(outcome),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        outcomes
    });
    let mut results = Vec::with_capacity(count);
    let mut failed = Vec::new();
    for (done, error) in outcomes {
        results.extend(done);
        failed.extend(error);
    }
    if let Some((_, error)) = failed.into_iter().min_by_key(|(at, _)| *at) {
        return Err(error);
    }
    results.sort_unstable_by_key(|(at, _)| *at);
    Ok(results.into_iter().map(|(_, result)| result).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_done_once_and_in_order() {
        for threads in [0, 1, 3, 100] {
            let all: Result<Vec<usize>, ()> = each(threads, 50, || Ok(()), |(), at| Ok(at * 2));
            assert_eq!(all, Ok((0..50).map(|at| at * 2).collect()));
            let failed = each(
                threads,
                50,
                || Ok(()),
                |(), at| match at {
                    7 => Err(at),
                    _ => Ok(()),
                },
            );
            assert_eq!(failed, Err(7));
        }
        assert_eq!(each(4, 3, || Err::<(), _>("no"), |(), _| Ok(())), Err("no"));
        assert_eq!(each(4, 0, || Ok::<(), ()>(()), |(), _| Ok(())), Ok(vec![]));
    }
}
