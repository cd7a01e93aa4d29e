//! Launchers and agents of one job, in one: ranks as threads, each with its control page.

use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use muster_protocol::Digest;
use muster_protocol::control::fresh_page;
use muster_protocol::control::live::{Assignment, CAN_REASSIGN, Term, word};

use super::super::seat::tests::assign;
use super::super::*;
use crate::page::Page;
use crate::session::Session;
use crate::testing::{HeldPort, LONG, eventually};

/// Messages of a rank to the test.
#[derive(Debug)]
enum Said {
    Committed,
    Regrouped {
        survived: bool,
    },
    CaughtUp,
    /// It has lost the others, or was told.
    Ended,
}

pub(super) struct Rank<T> {
    page: Page,
    _file: File,
    said: Receiver<(Said, u64)>,
    pub(super) orders: Sender<()>,
    pub(super) thread: JoinHandle<T>,
    term: Term,
    /// The newest step that it has committed.
    pub(super) committed: u64,
    /// It waits for a copy.
    copying: bool,
}

impl<T: Training + Send + 'static> Rank<T> {
    fn start(assignment: &Assignment, training: T) -> Rank<T> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&fresh_page()).unwrap();
        let page = Page::from_file(&file).unwrap();
        page.store(word::FEATURES, CAN_REASSIGN);
        assign(&page, assignment);
        let (tell, said) = channel();
        let (orders, stop) = channel();
        let fd = file.as_raw_fd();
        let (ready, started) = channel();
        let thread = std::thread::spawn(move || {
            let mut session = Session::from_fd(fd).unwrap();
            let patience = Patience {
                form: Duration::from_secs(20),
                assignment: Duration::from_millis(20),
                ..Patience::default()
            };
            let Ok(mut worker) = Worker::join(&mut session, training, patience) else {
                panic!("no seat");
            };
            ready.send(()).unwrap();
            while stop.try_recv() != Err(std::sync::mpsc::TryRecvError::Disconnected) {
                let said = match worker.advance().unwrap() {
                    Outcome::Stepped { .. } => Said::Committed,
                    Outcome::Regrouped { survived, .. } => Said::Regrouped { survived },
                    Outcome::CaughtUp { .. } => Said::CaughtUp,
                    Outcome::Ended { .. } => Said::Ended,
                    Outcome::Boundary { .. }
                    | Outcome::Checkpoint { .. }
                    | Outcome::Waiting
                    | Outcome::Quarantined { .. } => {
                        continue;
                    }
                };
                let _gone = tell.send((said, worker.committed()));
            }
            worker.training
        });
        started.recv_timeout(LONG).unwrap();
        Rank {
            page,
            _file: file,
            said,
            orders,
            thread,
            term: assignment.term,
            committed: 0,
            copying: false,
        }
    }

    /// Takes in what it said. Whether it is still there.
    pub(super) fn listen(&mut self) -> bool {
        while let Ok((said, committed)) = self.said.try_recv() {
            match said {
                Said::Regrouped { survived: true } => {
                    // Of a copy that never got whole nothing is committed.
                    let undone = committed < self.committed && !self.copying;
                    assert!(!undone, "a committed step is undone");
                    self.copying = false;
                }
                Said::Regrouped { survived: false } => self.copying = true,
                Said::CaughtUp => self.copying = false,
                Said::Committed | Said::Ended => {}
            }
            self.committed = committed;
        }
        !self.thread.is_finished()
    }

    /// Parks it, as a launcher does.
    pub(super) fn end(&self) {
        self.page.store(word::ENDED, self.term.0);
        self.page.wake(word::ENDED);
        eventually("parked", || Term(self.page.load(word::PARKED)) >= self.term);
    }
}

/// Launchers and agents of one job, in one.
pub(super) struct Job<T> {
    pub(super) ranks: Vec<Rank<T>>,
    number: u64,
    /// Of the newest generation.
    _master: HeldPort,
    newcomer: Box<dyn Fn() -> T>,
}

impl<T: Training + Send + 'static> Job<T> {
    fn assignment(number: u64, rank: usize, world: usize, master: SocketAddr) -> Assignment {
        Assignment {
            term: Term::of(number, 0),
            rank: rank as u32,
            world: world as u32,
            local_rank: 0,
            local_world: 1,
            node_rank: rank as u32,
            nodes: world as u32,
            restarts: 0,
            master,
            digest: Digest([number as u8; 32]),
            lineage: Digest([1; 32]),
        }
    }

    /// The first generation, of these; `newcomer` makes those that come later.
    pub(super) fn of(first: Vec<T>, newcomer: impl Fn() -> T + 'static) -> Job<T> {
        let (world, master) = (first.len(), HeldPort::new());
        let place = |rank| Job::<T>::assignment(1, rank, world, master.address);
        let ranks = first.into_iter().enumerate();
        Job {
            ranks: ranks.map(|(i, it)| Rank::start(&place(i), it)).collect(),
            number: 1,
            _master: master,
            newcomer: Box::new(newcomer),
        }
    }

    /// The next generation: all that live keep their order, `join` others come after them.
    pub(super) fn regroup(&mut self, join: usize) {
        let newcomers = (0..join).map(|_| (self.newcomer)()).collect();
        self.regroup_with(newcomers);
    }

    /// The same with these newcomers.
    pub(super) fn regroup_with(&mut self, newcomers: Vec<T>) {
        let (living, dead): (Vec<Rank<T>>, Vec<Rank<T>>) =
            self.ranks.drain(..).partition(|r| !r.thread.is_finished());
        for rank in dead {
            assert!(rank.thread.join().is_err(), "only a kill ends a rank");
        }
        self.ranks = living;
        self.ranks.iter().for_each(Rank::end);
        self.number += 1;
        let (stay, port) = (self.ranks.len(), HeldPort::new());
        let master = port.address;
        self._master = port;
        let world = stay + newcomers.len();
        for (i, rank) in self.ranks.iter_mut().enumerate() {
            let assignment = Job::<T>::assignment(self.number, i, world, master);
            rank.term = assignment.term;
            assign(&rank.page, &assignment);
        }
        for (i, newcomer) in (stay..).zip(newcomers) {
            let assignment = Job::<T>::assignment(self.number, i, world, master);
            self.ranks.push(Rank::start(&assignment, newcomer));
        }
    }

    /// Until `count` ranks are dead.
    pub(super) fn until_dead(&mut self, count: usize) {
        eventually("a rank is dead", || {
            let dead = self.ranks.iter_mut().filter(|r| r.thread.is_finished());
            dead.count() >= count
        });
    }

    /// Until every rank has committed this many steps.
    pub(super) fn until(&mut self, steps: u64) {
        eventually("all get on", || {
            self.ranks
                .iter_mut()
                .all(|r| r.listen() && r.committed >= steps)
        });
    }

    pub(super) fn newest(&mut self) -> u64 {
        self.ranks.iter_mut().for_each(|r| {
            r.listen();
        });
        self.ranks.iter().map(|r| r.committed).max().unwrap()
    }
}
