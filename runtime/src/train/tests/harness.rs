//! Launchers and agents of one job, in one: ranks in threads, each with its control page.

use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muster_checkpoint::hex::Id;
use muster_protocol::Digest;
use muster_protocol::control::live::{
    Assignment, CAN_REASSIGN, TELLS_RESTORE, Term, encode_restore, word,
};
use muster_protocol::control::{Reason, Stop, fresh_page, word as older};

use super::super::saves::Saves;
use super::super::*;
use super::model::Net;
use crate::live::{Patience, assign};
use crate::page::Page;
use crate::session::Session;
use crate::testing::{HeldPort, Keeper, LONG, eventually};

/// Events that a rank heard.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Heard {
    Step(u64, u32),
    Regrouped(bool),
    Boundary(Reason),
    Quarantined(Vec<u32>),
    Evaluated(u64),
    Ended(String),
}

/// Goes on only as far as the test wants, but never holds up the end of a generation.
struct Tell {
    heard: Arc<Mutex<Vec<Heard>>>,
    steps: Arc<AtomicU64>,
    limit: Arc<AtomicU64>,
    page: Arc<Page>,
}

impl Tell {
    fn hear(&self, heard: Heard) {
        self.heard.lock().unwrap().push(heard);
    }
}

impl Hooks<Net> for Tell {
    fn on_step(&mut self, _: &Net, report: &Report) -> Result<(), BoxError> {
        self.hear(Heard::Step(report.step, report.ranks));
        self.steps.store(report.step, Ordering::Release);
        let term = self.page.load(word::SEQUENCE);
        while report.step >= self.limit.load(Ordering::Acquire)
            && self.page.load(word::SEQUENCE) == term
            && self.page.load(older::STOP) == 0
            && self.page.load(word::ENDED) <= self.page.load(word::PARKED)
        {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn on_evaluate(&mut self, _: &Net, evaluation: &Evaluation) -> Result<(), BoxError> {
        self.hear(Heard::Evaluated(evaluation.step));
        Ok(())
    }

    fn on_regroup(&mut self, _: &Net, place: &Place) -> Result<(), BoxError> {
        self.hear(Heard::Regrouped(place.survived));
        Ok(())
    }

    fn on_boundary(&mut self, _: &Net, boundary: &Boundary) -> Result<(), BoxError> {
        self.hear(Heard::Boundary(boundary.reason));
        Ok(())
    }

    fn on_ended(&mut self, why: &str, _: Option<u32>) -> Result<(), BoxError> {
        self.hear(Heard::Ended(why.to_owned()));
        Ok(())
    }

    fn on_quarantine(&mut self, ranks: &[u32]) -> Result<(), BoxError> {
        self.hear(Heard::Quarantined(ranks.to_vec()));
        Ok(())
    }
}

pub(super) type Ended = Result<(Ending, Parallel<Net>), RunError>;

pub(super) struct Rank {
    page: Arc<Page>,
    _file: File,
    pub(super) heard: Arc<Mutex<Vec<Heard>>>,
    steps: Arc<AtomicU64>,
    thread: JoinHandle<Ended>,
    term: Term,
}

/// A job whose launcher keeps workers alive.
pub(super) struct Job {
    pub(super) ranks: Vec<Rank>,
    number: u64,
    /// Of the newest generation.
    _master: Option<HeldPort>,
    limit: Arc<AtomicU64>,
    options: Options,
    /// The job has a store, and begins with this.
    keeper: Option<(Arc<Keeper>, Option<Id>)>,
}

fn assignment(number: u64, rank: usize, world: usize, master: SocketAddr) -> Assignment {
    Assignment {
        term: Term::of(number, 0),
        rank: rank as u32,
        world: world as u32,
        local_rank: rank as u32,
        local_world: world as u32,
        node_rank: 0,
        nodes: 1,
        restarts: 0,
        master,
        digest: Digest([number as u8; 32]),
        lineage: Digest([1; 32]),
    }
}

impl Rank {
    fn start(
        assignment: &Assignment,
        mut training: Parallel<Net>,
        limit: &Arc<AtomicU64>,
        mut options: Options,
        keeper: Option<&(Arc<Keeper>, Option<Id>)>,
    ) -> Rank {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&fresh_page()).unwrap();
        let page = Arc::new(Page::from_file(&file).unwrap());
        page.store(word::FEATURES, CAN_REASSIGN | TELLS_RESTORE);
        if let Some((keeper, restore)) = keeper {
            let digest = restore.map(|id| Digest(id.0));
            for (at, value) in word::restore().zip(encode_restore(digest)) {
                page.store(at, value);
            }
            let store = keeper.place().as_os_str().to_owned();
            training.saves = Some(Saves::new(page.clone(), store, None));
            keeper.watch(page.clone());
        }
        assign(&page, assignment);
        let fd = file.as_raw_fd();
        let (ready, started): (Sender<()>, Receiver<()>) = channel();
        let heard = Arc::<Mutex<Vec<Heard>>>::default();
        let steps = Arc::<AtomicU64>::default();
        let tell = Tell {
            heard: heard.clone(),
            steps: steps.clone(),
            limit: limit.clone(),
            page: page.clone(),
        };
        options.patience = Patience {
            form: Duration::from_secs(20),
            assignment: Duration::from_millis(20),
            ..options.patience
        };
        let thread = std::thread::spawn(move || {
            let mut session = Session::from_fd(fd).unwrap();
            ready.send(()).unwrap();
            let trainer = Trainer::new(training).hooks(tell).options(options);
            trainer.run(Some(&mut session))
        });
        started.recv_timeout(LONG).unwrap();
        Rank {
            page,
            _file: file,
            heard,
            steps,
            thread,
            term: assignment.term,
        }
    }

    /// Parks it, as a launcher does.
    fn end(&self) {
        self.page.store(word::ENDED, self.term.0);
        self.page.wake(word::ENDED);
        eventually("parked", || {
            Term(self.page.load(word::PARKED)) >= self.term || self.thread.is_finished()
        });
    }
}

impl Job {
    pub(super) fn start(options: Options, trainings: Vec<Parallel<Net>>) -> Job {
        Job::begin(options, None, trainings)
    }

    /// With a store: it begins with this checkpoint, and trains to the end as soon as it may.
    pub(super) fn kept(
        options: Options,
        keeper: &Arc<Keeper>,
        restore: Option<Id>,
        trainings: Vec<Parallel<Net>>,
    ) -> Job {
        Job::begin(options, Some((keeper.clone(), restore)), trainings)
    }

    fn begin(
        options: Options,
        keeper: Option<(Arc<Keeper>, Option<Id>)>,
        trainings: Vec<Parallel<Net>>,
    ) -> Job {
        let mut job = Job {
            ranks: Vec::new(),
            number: 0,
            _master: None,
            limit: Arc::new(AtomicU64::new(0)),
            options,
            keeper,
        };
        job.regroup(trainings);
        job
    }

    /// Lets the ranks go on until so many steps are over.
    pub(super) fn allow(&self, steps: u64) {
        self.limit.store(steps, Ordering::Release);
    }

    /// The next generation: all that live keep their order, these come after them.
    pub(super) fn regroup(&mut self, newcomers: Vec<Parallel<Net>>) {
        self.bury();
        self.ranks.iter().for_each(Rank::end);
        self.assign(newcomers, false);
    }

    /// The same, but these come first.
    pub(super) fn regroup_behind(&mut self, newcomers: Vec<Parallel<Net>>) {
        self.bury();
        self.ranks.iter().for_each(Rank::end);
        self.assign(newcomers, true);
    }

    /// Takes the dead out.
    fn bury(&mut self) {
        let (dead, living): (Vec<Rank>, Vec<Rank>) =
            self.ranks.drain(..).partition(|r| r.thread.is_finished());
        for rank in dead {
            assert!(rank.thread.join().is_err(), "only a kill ends a rank");
        }
        self.ranks = living;
    }

    fn assign(&mut self, newcomers: Vec<Parallel<Net>>, first: bool) {
        self.number += 1;
        let (world, port) = (self.ranks.len() + newcomers.len(), HeldPort::new());
        let master = port.address;
        self._master = Some(port);
        let (stay, come) = match first {
            true => (newcomers.len(), 0),
            false => (0, self.ranks.len()),
        };
        for (i, rank) in (stay..).zip(&mut self.ranks) {
            let assignment = assignment(self.number, i, world, master);
            rank.term = assignment.term;
            rank.page.store(older::STOP, 0);
            assign(&rank.page, &assignment);
        }
        for (i, training) in (come..).zip(newcomers) {
            let assignment = assignment(self.number, i, world, master);
            let rank = Rank::start(
                &assignment,
                training,
                &self.limit,
                self.options,
                self.keeper.as_ref(),
            );
            self.ranks.insert(i, rank);
        }
    }

    /// All stop before the same step; then this one leaves for good.
    pub(super) fn leave(&mut self, who: usize, newcomers: Vec<Parallel<Net>>) {
        // Higher than any step that was begun.
        let step = self.steps() + 2;
        for rank in &self.ranks {
            rank.page.store(older::REASON, Reason::Drain.encode());
            rank.page.store(older::STOP, Stop::Confirmed(step).encode());
        }
        self.allow(u64::MAX);
        eventually("all have stopped", || {
            self.ranks
                .iter()
                .all(|rank| rank.heard().contains(&Heard::Boundary(Reason::Drain)))
        });
        self.allow(0);
        self.ranks.iter().for_each(Rank::end);
        // Its thread stays where it is, parked, until the test ends.
        self.ranks.remove(who);
        self.assign(newcomers, false);
    }

    fn steps(&self) -> u64 {
        let steps = self
            .ranks
            .iter()
            .map(|rank| rank.steps.load(Ordering::Acquire));
        steps.max().unwrap_or(0)
    }

    pub(super) fn until_dead(&self) {
        eventually("a rank is dead", || {
            self.ranks.iter().any(|rank| rank.thread.is_finished())
        });
    }

    /// Until all ranks have committed this many steps. A newcomer may need some more to catch up: they come
    /// slowly.
    pub(super) fn until_steps(&self, steps: u64) {
        const SLOWLY: Duration = Duration::from_millis(20);
        self.allow(steps);
        let mut reached = Instant::now();
        let mut limit = steps;
        eventually("all get on", || {
            let each = self.ranks.iter();
            let done: Vec<u64> = each
                .map(|rank| rank.steps.load(Ordering::Acquire))
                .collect();
            if done.iter().all(|done| *done < limit) {
                reached = Instant::now();
            } else if reached.elapsed() > SLOWLY {
                limit += 1;
                self.allow(limit);
            }
            done.iter().all(|done| *done >= steps)
        });
    }

    /// How each rank ended, and what it heard.
    pub(super) fn finish(self) -> Vec<(Ended, Vec<Heard>)> {
        self.allow(u64::MAX);
        eventually("all end", || {
            self.ranks.iter().all(|rank| rank.thread.is_finished())
        });
        let ends = self.ranks.into_iter().map(|rank| {
            let heard = rank.heard();
            (rank.thread.join().expect("lives"), heard)
        });
        ends.collect()
    }
}

impl Rank {
    /// How it has ended.
    pub(super) fn end_of(self) -> Ended {
        self.thread.join().expect("lives")
    }

    pub(super) fn heard(&self) -> Vec<Heard> {
        self.heard.lock().unwrap().clone()
    }
}
