//! The rule of the control page, explored exhaustively: every interleaving of the atomic steps of
//! two workers and their launchers, with planted mistakes that the explorer must find.

use std::collections::BTreeSet;

use super::*;

#[test]
fn words_survive_the_way_there_and_back() {
    for step in [0, 1, 7, 1 << 40, MAX_STEP] {
        for stop in [Stop::Installed(step), Stop::Confirmed(step)] {
            assert_eq!(Stop::decode(stop.encode()), stop);
        }
        assert_eq!(decode_step(encode_step(Some(step))), Some(step));
    }
    for stop in [Stop::None, Stop::Cancelled] {
        assert_eq!(Stop::decode(stop.encode()), stop);
    }
    assert_eq!(Stop::decode(0), Stop::None, "a fresh page asks for nothing");
    assert_eq!(decode_step(0), None, "a fresh page shows no step");
    assert_eq!(
        Stop::decode(Stop::Confirmed(u64::MAX).encode()),
        Stop::Confirmed(MAX_STEP)
    );
    for reason in Reason::ALL {
        assert_eq!(Reason::decode(reason.encode()), reason);
    }
    assert_eq!(Reason::decode(999), Reason::Unknown);
}

#[test]
fn words_are_aligned_apart_and_on_their_own_lines() {
    let all: BTreeSet<usize> = word::ALL.into_iter().collect();
    assert_eq!(all.len(), word::ALL.len());
    assert!(all.iter().all(|at| at % 8 == 0 && at + 8 <= PAGE_LEN));
    let lines = |words: &[usize]| words.iter().map(|at| at / 128).collect::<BTreeSet<_>>();
    let launcher = lines(&[word::STOP, word::DEADLINE, word::REASON]);
    let worker = lines(&[word::PROGRESS, word::ACK, word::LINKED, word::PID]);
    assert!(launcher.is_disjoint(&worker));
}

/// A worker may run another release than its launcher: these bytes are layout 1, for ever.
#[test]
fn layout_one_is_frozen() {
    assert_eq!(LAYOUT, 1);
    let page = fresh_page();
    assert_eq!(&page[..16], b"MUSTERCP\x01\0\0\0\0\0\0\0");
    assert!(page[16..].iter().all(|byte| *byte == 0));
    assert_eq!(
        word::ALL,
        [0, 8, 128, 136, 144, 152, 256, 264, 272, 280, 312]
    );
    assert_eq!(Stop::Installed(5).encode(), 21);
    assert_eq!(Stop::Confirmed(5).encode(), 22);
    assert_eq!(Stop::Cancelled.encode(), 3);
    assert_eq!(encode_step(Some(5)), 6);
    assert_eq!(Reason::ALL.map(Reason::encode), [0, 1, 2, 3, 4, 5, 6]);
}

#[test]
fn decisions_at_the_edge() {
    let cases = [
        (Stop::None, 5, Decision::Go),
        (Stop::Cancelled, 5, Decision::Go),
        (Stop::Installed(5), 4, Decision::Go),
        (Stop::Installed(5), 5, Decision::Wait),
        (Stop::Installed(5), 6, Decision::Wait),
        (Stop::Confirmed(5), 4, Decision::Go),
        (Stop::Confirmed(5), 5, Decision::StopHere),
        (Stop::Confirmed(5), 6, Decision::StopHere),
    ];
    for (stop, next, decision) in cases {
        assert_eq!(
            worker_decision(stop, next),
            decision,
            "{stop:?} before {next}"
        );
    }
    assert_eq!(launcher_install(None, 3), 3);
    assert_eq!(launcher_install(Some(2), 3), 3);
    assert_eq!(launcher_install(Some(3), 3), 4);
    let mut gate = Gate::default();
    assert!(!gate.may_confirm(9), "not gated");
    assert_eq!(gate.install(Some(3), 3), 4);
    assert_eq!(gate.install(Some(4), 4), 4, "a raise converges");
    assert!(!gate.may_confirm(3));
    assert!(gate.may_confirm(4) && gate.may_confirm(9));
    gate.cancel();
    assert!(!gate.may_confirm(9));
}

const RANKS: usize = 2;
/// Steps that a worker does before it ends by itself.
const STEPS: u64 = 4;

/// How the leader ends one request to stop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ending {
    Confirm,
    RaiseThenConfirm,
    Cancel,
}

/// A mistake, to show that the explorer would find it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mistake {
    None,
    WorkerLoadsFirst,
    LauncherLoadsFirst,
    NeverRaised,
    ConfirmedUnasked,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Worker {
    /// About to do the first of the two accesses.
    First,
    /// About to do the second; the value loaded first, if the order is wrong.
    Second(Option<u64>),
    Waiting,
    /// In the step; leaves it once every rank is in it or past it.
    In,
    Stopped,
    Finished,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Launcher {
    First,
    Second(Option<Option<u64>>),
    Reported(u64),
    RaiseFirst,
    RaiseSecond,
    RaiseReported(u64),
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Rank {
    worker: Worker,
    next: u64,
    progress: u64,
    stop: u64,
    launcher: Launcher,
    round: usize,
    bound: Option<u64>,
}

type State = [Rank; RANKS];

struct Model {
    start: u64,
    rounds: Vec<(u64, Ending)>,
    mistake: Mistake,
}

impl Model {
    fn initial(&self) -> State {
        [Rank {
            worker: Worker::First,
            next: self.start,
            progress: 0,
            stop: 0,
            launcher: Launcher::First,
            round: 0,
            bound: None,
        }; RANKS]
    }

    fn decide(&self, rank: &mut Rank, stop: u64) {
        rank.worker = match worker_decision(Stop::decode(stop), rank.next) {
            Decision::Go => Worker::In,
            Decision::Wait => Worker::Waiting,
            Decision::StopHere => Worker::Stopped,
        };
    }

    /// The state after the worker's next atomic step; `None` when it has none.
    fn worker_step(&self, state: &State, i: usize) -> Option<State> {
        let mut to = *state;
        let rank = &mut to[i];
        let wrong = self.mistake == Mistake::WorkerLoadsFirst;
        match rank.worker {
            Worker::First if rank.next == self.start + STEPS => rank.worker = Worker::Finished,
            Worker::First if wrong => rank.worker = Worker::Second(Some(rank.stop)),
            Worker::First => {
                rank.progress = encode_step(Some(rank.next));
                rank.worker = Worker::Second(None);
            }
            Worker::Second(seen) => {
                let stop = seen.unwrap_or(rank.stop);
                if seen.is_some() {
                    rank.progress = encode_step(Some(rank.next));
                }
                self.decide(rank, stop);
            }
            Worker::Waiting => {
                let stop = rank.stop;
                self.decide(rank, stop);
                if rank.worker == Worker::Waiting {
                    return None;
                }
            }
            Worker::In => {
                let step = rank.next;
                let all_in = state
                    .iter()
                    .all(|r| r.next > step || (r.next == step && r.worker == Worker::In));
                if !all_in {
                    return None;
                }
                rank.next += 1;
                rank.worker = Worker::First;
            }
            Worker::Stopped | Worker::Finished => return None,
        }
        Some(to)
    }

    /// The leader's choice of S in this round, once every rank has reported.
    fn chosen(&self, state: &State, round: usize) -> Option<u64> {
        let reported = state.iter().map(|rank| match rank.launcher {
            _ if rank.round != round => None,
            Launcher::Reported(at) => Some(at),
            Launcher::RaiseFirst
            | Launcher::RaiseSecond
            | Launcher::RaiseReported(_)
            | Launcher::Done => rank.bound,
            Launcher::First | Launcher::Second(_) => None,
        });
        reported.collect::<Option<Vec<_>>>()?.into_iter().max()
    }

    fn launcher_step(&self, state: &State, i: usize) -> Option<State> {
        let mut to = *state;
        let rank = &mut to[i];
        let (proposed, ending) = self.rounds[rank.round];
        match rank.launcher {
            Launcher::First if self.mistake == Mistake::ConfirmedUnasked => {
                rank.stop = Stop::Confirmed(proposed).encode();
                rank.bound = Some(proposed);
                rank.launcher = Launcher::Done;
            }
            Launcher::First if self.mistake == Mistake::LauncherLoadsFirst => {
                rank.launcher = Launcher::Second(Some(decode_step(rank.progress)));
            }
            Launcher::First => {
                rank.stop = Stop::Installed(proposed).encode();
                rank.launcher = Launcher::Second(None);
            }
            Launcher::Second(loaded) => {
                if loaded.is_some() {
                    rank.stop = Stop::Installed(proposed).encode();
                }
                let progress = loaded.unwrap_or(decode_step(rank.progress));
                let mut gate = Gate { bound: rank.bound };
                let report = match self.mistake {
                    Mistake::NeverRaised => proposed,
                    _ => gate.install(progress, proposed),
                };
                rank.bound = Some(report);
                rank.launcher = Launcher::Reported(report);
            }
            Launcher::Reported(_) if ending == Ending::Cancel => {
                rank.stop = Stop::Cancelled.encode();
                rank.bound = None;
                rank.round += 1;
                rank.launcher = Launcher::First;
            }
            Launcher::Reported(_) => {
                let at = self.chosen(state, rank.round)?;
                if ending == Ending::RaiseThenConfirm {
                    rank.launcher = Launcher::RaiseFirst;
                } else {
                    self.confirm(rank, at);
                }
            }
            Launcher::RaiseFirst => {
                let at = self.chosen(state, rank.round)?;
                rank.stop = Stop::Installed(at).encode();
                rank.launcher = Launcher::RaiseSecond;
            }
            Launcher::RaiseSecond => {
                let at = self.chosen(state, rank.round)?;
                let mut gate = Gate { bound: rank.bound };
                let report = gate.install(decode_step(rank.progress), at);
                assert_eq!(report, at, "a raise converges in one round");
                rank.bound = Some(report);
                rank.launcher = Launcher::RaiseReported(report);
            }
            Launcher::RaiseReported(at) => {
                let all = state
                    .iter()
                    .all(|r| matches!(r.launcher, Launcher::RaiseReported(_) | Launcher::Done));
                if !all {
                    return None;
                }
                self.confirm(rank, at);
            }
            Launcher::Done => return None,
        }
        Some(to)
    }

    fn confirm(&self, rank: &mut Rank, at: u64) {
        assert!(Gate { bound: rank.bound }.may_confirm(at) || self.mistake != Mistake::None);
        rank.stop = Stop::Confirmed(at).encode();
        rank.bound = Some(at);
        rank.launcher = Launcher::Done;
    }

    /// Explores every interleaving: the number of states, or the first violation.
    fn explore(&self) -> Result<usize, String> {
        let mut seen = BTreeSet::from([self.initial()]);
        let mut todo = vec![self.initial()];
        while let Some(state) = todo.pop() {
            self.check(&state)?;
            let mut stuck = true;
            for i in 0..RANKS {
                for to in [self.worker_step(&state, i), self.launcher_step(&state, i)] {
                    let Some(to) = to else { continue };
                    stuck = false;
                    if seen.insert(to) {
                        todo.push(to);
                    }
                }
            }
            if stuck {
                self.check_end(&state)?;
            }
        }
        Ok(seen.len())
    }

    /// No rank is in, or past, a step at or above a confirmed S.
    fn check(&self, state: &State) -> Result<(), String> {
        for rank in state {
            for other in state {
                let Stop::Confirmed(at) = Stop::decode(other.stop) else {
                    continue;
                };
                let at = at.max(self.start);
                let unbegun = rank.next + u64::from(rank.worker == Worker::In);
                if unbegun > at {
                    return Err(format!("passed {at}: {state:?}"));
                }
            }
        }
        Ok(())
    }

    /// Nobody is left waiting: all stopped at one step, or all finished.
    fn check_end(&self, state: &State) -> Result<(), String> {
        let first = &state[0];
        let ended = matches!(first.worker, Worker::Stopped | Worker::Finished);
        let same = state
            .iter()
            .all(|rank| (rank.worker, rank.next) == (first.worker, first.next));
        if ended && same {
            Ok(())
        } else {
            Err(format!("left waiting or apart: {state:?}"))
        }
    }
}

fn check(start: u64, rounds: &[(u64, Ending)], mistake: Mistake) -> Result<usize, String> {
    Model {
        start,
        rounds: rounds.to_vec(),
        mistake,
    }
    .explore()
}

#[test]
fn every_interleaving_stops_all_ranks_at_one_step() {
    let mut states = 0;
    for start in [0, 2] {
        for proposed in 0..=start + STEPS + 1 {
            for ending in [Ending::Confirm, Ending::RaiseThenConfirm] {
                states += check(start, &[(proposed, ending)], Mistake::None).unwrap();
                for earlier in 0..=start + 2 {
                    let rounds = [(earlier, Ending::Cancel), (proposed, ending)];
                    states += check(start, &rounds, Mistake::None).unwrap();
                }
            }
        }
    }
    assert!(states > 10_000, "the model is trivial: {states} states");
}

#[test]
fn each_mistake_is_found() {
    for mistake in [
        Mistake::WorkerLoadsFirst,
        Mistake::LauncherLoadsFirst,
        Mistake::NeverRaised,
        Mistake::ConfirmedUnasked,
    ] {
        let found = (0..STEPS).any(|at| check(0, &[(at, Ending::Confirm)], mistake).is_err());
        assert!(found, "{mistake:?} went unnoticed");
    }
}
