//! The reduction of a step's buckets, while backward goes on.

use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::config::TrainError;
use super::model::{BoxError, Gradients, Measured, Micro, Model};
use super::sums::Sums;
use crate::collective::{Group, GroupError, Layout};
use crate::gradient::compress::{Bucket, Reduced};
use crate::gradient::{Scaler, Verdict, clip};

/// Reducer of all buckets of a step, one after the other.
#[derive(Debug)]
pub(super) struct Lane<'a> {
    pub(super) group: &'a mut Group,
    pub(super) buckets: &'a mut [Bucket],
    pub(super) reduced: &'a mut [Reduced],
    /// The sums are of a scaled loss.
    pub(super) scaler: Option<&'a Scaler>,
    pub(super) with_norm: bool,
    pub(super) scratch: &'a mut Vec<f32>,
    /// Buckets that are reduced.
    pub(super) done: &'a AtomicUsize,
    /// Whether buckets are reduced while backward goes on.
    pub(super) beside: bool,
    pub(super) seen: Seen,
}

/// Properties of the reduced gradients, seen on the way: the same on every rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Seen {
    pub(super) finite: bool,
    /// The sum of squares of the reduced sums, if the norm is wanted.
    pub(super) squares: f64,
}

impl Default for Seen {
    fn default() -> Seen {
        Seen {
            finite: true,
            squares: 0.0,
        }
    }
}

impl Lane<'_> {
    /// Reduces the bucket that comes next. `None`: this rank has no state yet, and listens.
    pub(super) fn reduce(&mut self, bucket: usize, sums: Option<&[f32]>) -> Result<(), GroupError> {
        let (Some(codec), Some(to)) = (self.buckets.get_mut(bucket), self.reduced.get_mut(bucket))
        else {
            return Err(GroupError::Internal {
                what: "a bucket that is not there",
            });
        };
        match (sums, self.scaler) {
            (None, _) => codec.listen(self.group, to)?,
            (Some(sums), None) => codec.reduce(self.group, sums, to)?,
            (Some(sums), Some(scaler)) => {
                self.scratch.resize(sums.len(), 0.0);
                scaler.unscale(sums, self.scratch);
                codec.reduce(self.group, self.scratch, to)?;
            }
        }
        self.seen.finite &= Scaler::judge(&[&to.sum]) == Verdict::Apply;
        if self.with_norm {
            self.seen.squares += clip::norm(&[&to.sum]).powi(2);
        }
        self.done.fetch_add(1, Ordering::Release);
        Ok(())
    }
}

/// Whether it gains time to reduce beside backward. Ranks that share memory reduce with their cores: unless there are
/// two for each, the second thread costs more than it saves (docs/benchmarks.md).
pub(super) fn pays(layout: &Layout, cores: Cores) -> bool {
    let of_a_rank = match cores.own < cores.host {
        // It is bound to some of them, as each rank is.
        true => cores.own,
        false => cores.own / layout.world().max(1),
    };
    layout.hosts().len() > 1 || of_a_rank >= 2
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Cores {
    /// That this process may use.
    own: usize,
    host: usize,
}

/// Asked once, as the answer is read from files.
pub(super) fn cores() -> Cores {
    static CORES: OnceLock<Cores> = OnceLock::new();
    *CORES.get_or_init(|| {
        let own = std::thread::available_parallelism().map_or(1, usize::from);
        // SAFETY: sysconf(3) reads and writes no memory of this program.
        let host = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
        let host = usize::try_from(host).unwrap_or(own);
        Cores { own, host }
    })
}

/// How long what took on this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Times {
    pub(super) computing: Duration,
    /// In collectives of gradients.
    pub(super) communicating: Duration,
    /// Of that, with nothing to compute meanwhile.
    pub(super) exposed: Duration,
}

/// Computes the gradients of these microbatches on top of the sums, and reduces each bucket as soon as it is
/// complete; where that is not to be done beside backward, all of them behind it. The sums are complete afterwards,
/// whatever became of the reduction.
pub(super) fn step<M: Model>(
    model: &mut M,
    ranges: &[Range<usize>],
    micros: &[(Range<u64>, Micro<M::Sample>)],
    sums: &mut Sums,
    mut lane: Lane<'_>,
) -> Result<(Result<Seen, GroupError>, Times), TrainError> {
    let failed = |step| move |source| TrainError::Model { step, source };
    let mut times = Times::default();
    let began = Instant::now();
    let beside = lane.beside && lane.group.world() > 1;
    let Some(((last_places, last), first)) = micros.split_last().filter(|_| beside) else {
        // Nothing to compute, nobody to talk to meanwhile, or no overlap wanted.
        for (places, micro) in micros {
            let mut into = Gradients::new(ranges, &mut sums.buffers);
            let measured = model.backward(micro, &mut into);
            let measured = measured.map_err(failed(micro.step))?;
            sums.added(places, &measured);
        }
        times.computing = began.elapsed();
        let outcome = all(&mut lane, Some(&sums.buffers));
        times.communicating = began.elapsed() - times.computing;
        times.exposed = times.communicating;
        return Ok((outcome, times));
    };
    for (places, micro) in first {
        let mut into = Gradients::new(ranges, &mut sums.buffers);
        let measured = model.backward(micro, &mut into);
        let measured = measured.map_err(failed(micro.step))?;
        sums.added(places, &measured);
    }
    let (ready, came) = channel();
    let done = lane.done;
    let (computed, back) = std::thread::scope(|scope| {
        let lane = std::thread::Builder::new()
            .name("muster-reduce".into())
            .spawn_scoped(scope, move || serve(lane, &came))
            .map_err(TrainError::Thread)?;
        let computed = last_backward(model, last, ranges, &mut sums.buffers, &ready, done);
        drop(ready);
        times.computing = began.elapsed();
        let back = lane.join();
        times.exposed = began.elapsed() - times.computing;
        Ok::<_, TrainError>((computed, back))
    })?;
    let back = match back {
        Ok(back) => back,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    for (bucket, buffer) in back.buffers {
        if let Some(to) = sums.buffers.get_mut(bucket) {
            *to = buffer;
        }
    }
    times.communicating = back.busy;
    let measured = computed.map_err(failed(last.step))?;
    sums.added(last_places, &measured);
    Ok((back.outcome, times))
}

/// Reduces all buckets in order. `None`: this rank listens.
pub(super) fn all(lane: &mut Lane<'_>, sums: Option<&[Vec<f32>]>) -> Result<Seen, GroupError> {
    for bucket in 0..lane.buckets.len() {
        let sums = sums.and_then(|sums| sums.get(bucket));
        lane.reduce(bucket, sums.map(Vec::as_slice))?;
    }
    Ok(lane.seen)
}

type Ready = (usize, Vec<f32>);

/// The microbatch after which the sums are complete. Buckets that it has not called ready are so at its end.
fn last_backward<M: Model>(
    model: &mut M,
    micro: &Micro<M::Sample>,
    ranges: &[Range<usize>],
    buffers: &mut [Vec<f32>],
    ready: &Sender<Ready>,
    done: &AtomicUsize,
) -> Result<Measured, BoxError> {
    // The other end is there until this one is gone.
    let send = |bucket, buffer| drop(ready.send((bucket, buffer)));
    let mut sink = send;
    let measured = model.backward(
        micro,
        &mut Gradients::last(ranges, buffers, &mut sink, done),
    )?;
    let mut sink = send;
    let mut into = Gradients::last(ranges, buffers, &mut sink, done);
    (0..ranges.len()).for_each(|bucket| into.ready(bucket));
    Ok(measured)
}

/// Result of the thread that communicates.
struct Back {
    buffers: Vec<Ready>,
    outcome: Result<Seen, GroupError>,
    busy: Duration,
}

/// Reduces what comes, in the order of buckets: the same on every rank, in whichever order they are ready.
fn serve(mut lane: Lane<'_>, came: &Receiver<Ready>) -> Back {
    let mut back = Back {
        buffers: Vec::new(),
        outcome: Ok(lane.seen),
        busy: Duration::ZERO,
    };
    let mut next = 0;
    while let Ok(ready) = came.recv() {
        back.buffers.push(ready);
        while back.outcome.is_ok()
            && let Some((_, sums)) = back.buffers.iter().find(|(bucket, _)| *bucket == next)
        {
            let began = Instant::now();
            back.outcome = lane.reduce(next, Some(sums)).map(|()| lane.seen);
            back.busy += began.elapsed();
            next += 1;
        }
    }
    back
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_memory_each_rank_needs_two_cores() {
        let layout = |hosts: &[&[u32]]| {
            let hosts = hosts.iter().map(|ranks| ranks.to_vec());
            Layout::new(hosts.collect()).unwrap()
        };
        let one = layout(&[&[0, 1]]);
        let cores = |own, host| Cores { own, host };
        let free = [2, 3, 4].map(|n| pays(&one, cores(n, n)));
        assert_eq!(free, [false, false, true]);
        let bound = [1, 2].map(|n| pays(&one, cores(n, 4)));
        assert_eq!(bound, [false, true]);
        assert!(pays(&layout(&[&[0], &[1]]), cores(1, 1)));
    }
}
