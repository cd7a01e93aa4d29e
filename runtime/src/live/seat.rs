//! A live worker's seat: it stays in its process while the generations around it change.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muster_protocol::Digest;
use muster_protocol::control::live::{
    ASSIGNMENT_WORDS, Assignment, CAN_REASSIGN, RESTORE_WORDS, TELLS_RESTORE, Term, decode_restore,
    word,
};

use crate::page::Page;
use crate::session::Session;

/// How long the watcher sleeps when nothing wakes it. The launcher wakes it; this bounds what a lost
/// wake-up costs.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);

/// How long an assignment that is being written is waited for before it counts as not there.
const WRITE_TIME: Duration = Duration::from_millis(20);

/// A worker's place in one generation after another.
#[derive(Debug)]
pub struct Seat {
    page: Arc<Page>,
    term: Term,
}

impl Seat {
    /// Whether the launcher has a seat for this process.
    pub fn is_offered(session: &Session) -> bool {
        let page = session.page();
        page.load(word::FEATURES) & CAN_REASSIGN != 0 && read(&page).is_some()
    }

    /// Takes the seat that the launcher has for this process: from now on the launcher parks it
    /// at the end of a generation, where it would end another. `None`: this launcher cannot, and
    /// the worker is restarted with each generation.
    pub fn take(session: &Session) -> Option<(Seat, Assignment)> {
        let page = session.page();
        if page.load(word::FEATURES) & CAN_REASSIGN == 0 {
            return None;
        }
        let first = read(&page)?;
        page.store(word::LIVE, 1);
        let term = first.term;
        Some((Seat { page, term }, first))
    }

    /// The term that this worker is in, or was in last.
    pub fn term(&self) -> Term {
        self.term
    }

    /// Whether the launcher has ended this worker's term.
    pub fn has_ended(&self) -> bool {
        Term(self.page.load(word::ENDED)) >= self.term
    }

    /// Leaves this worker's term for good: nothing of it may be sent or begun any more.
    pub fn park(&self) {
        self.page.store(word::PARKED, self.term.0);
        self.page.wake(word::PARKED);
    }

    /// Waits for the next assignment. `None` when none came for so long; then this may be called
    /// again: a job that lacks nodes waits for them without end.
    pub fn next(&mut self, patience: Duration) -> Option<Assignment> {
        self.park();
        let until = Instant::now() + patience;
        loop {
            let seen = self.page.load(word::SEQUENCE);
            if let Some(next) = read(&self.page).filter(|a| a.term > self.term) {
                self.term = next.term;
                return Some(next);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            self.page
                .wait_while(word::SEQUENCE, seen, left.min(LONGEST_SLEEP));
        }
    }

    /// Calls `ended` once, from another thread, when the launcher ends this worker's term. It is
    /// how a worker that waits in a collective learns that nobody will come.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn watch(&self, ended: impl FnOnce() + Send + 'static) -> std::io::Result<Watch> {
        let stop = Arc::new(AtomicBool::new(false));
        let (page, term, stopped) = (self.page.clone(), self.term, stop.clone());
        let thread = std::thread::Builder::new()
            .name("muster-watch".into())
            .spawn(move || {
                while !stopped.load(Ordering::Acquire) {
                    let now = page.load(word::ENDED);
                    if Term(now) >= term {
                        ended();
                        return;
                    }
                    page.wait_while(word::ENDED, now, LONGEST_SLEEP);
                }
            })?;
        Ok(Watch {
            page: self.page.clone(),
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.page.store(word::LIVE, 0);
    }
}

/// A thread that watches for the end of a term, until this is dropped.
#[derive(Debug)]
pub struct Watch {
    page: Arc<Page>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.page.wake(word::ENDED);
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

/// The assignment on the page, whole; `None` while there is none.
pub(crate) fn read(page: &Page) -> Option<Assignment> {
    let words: [u64; ASSIGNMENT_WORDS] = whole(page, word::assignment)?;
    Assignment::decode(&words)
}

/// The manifest that the generation of that assignment restores. `None`: the launcher does not say;
/// `Some(None)`: nothing.
pub(crate) fn restore_of(page: &Page) -> Option<Option<Digest>> {
    if page.load(word::FEATURES) & TELLS_RESTORE == 0 {
        return None;
    }
    let words: [u64; RESTORE_WORDS] = whole(page, word::restore)?;
    Some(decode_restore(&words))
}

/// Words that the launcher writes under its sequence, of one writing.
fn whole<const N: usize, I: Iterator<Item = usize>>(
    page: &Page,
    places: impl Fn() -> I,
) -> Option<[u64; N]> {
    let until = Instant::now() + WRITE_TIME;
    loop {
        let before = page.load(word::SEQUENCE);
        let mut words = [0; N];
        for (to, at) in words.iter_mut().zip(places()) {
            *to = page.load(at);
        }
        if before.is_multiple_of(2) && page.load(word::SEQUENCE) == before {
            return Some(words);
        }
        if Instant::now() >= until {
            return None;
        }
        std::thread::yield_now();
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::net::SocketAddr;
    use std::os::fd::AsRawFd;
    use std::sync::mpsc;

    use muster_protocol::Digest;
    use muster_protocol::control::fresh_page;

    use super::*;

    const LONG: Duration = Duration::from_secs(10);

    fn assignment(number: u64, rank: u32) -> Assignment {
        Assignment {
            term: Term::of(number, 0),
            rank,
            world: 4,
            local_rank: 0,
            local_world: 1,
            node_rank: rank,
            nodes: 4,
            restarts: 0,
            master: SocketAddr::from(([127, 0, 0, 1], 29500)),
            digest: Digest([number as u8; 32]),
            lineage: Digest([1; 32]),
        }
    }

    /// Assigns a place, as a launcher does.
    pub(crate) fn assign(page: &Page, assignment: &Assignment) {
        let sequence = page.load(word::SEQUENCE);
        page.store(word::SEQUENCE, sequence + 1);
        for (at, value) in word::assignment().zip(assignment.encode()) {
            page.store(at, value);
        }
        page.store(word::SEQUENCE, sequence + 2);
        page.wake(word::SEQUENCE);
    }

    fn seated() -> (Page, Session, Seat) {
        let mut file: File = tempfile::tempfile().unwrap();
        file.write_all(&fresh_page()).unwrap();
        let launcher = Page::from_file(&file).unwrap();
        let session = Session::from_fd(file.as_raw_fd()).unwrap();
        assert!(Seat::take(&session).is_none(), "no launcher that can");
        launcher.store(word::FEATURES, CAN_REASSIGN);
        assert!(Seat::take(&session).is_none(), "nothing is assigned");
        assign(&launcher, &assignment(1, 2));
        let (seat, first) = Seat::take(&session).unwrap();
        assert_eq!(first, assignment(1, 2));
        assert_eq!(launcher.load(word::LIVE), 1);
        (launcher, session, seat)
    }

    #[test]
    fn a_worker_lives_through_a_change() {
        let (launcher, _session, mut seat) = seated();
        assert!(!seat.has_ended());
        launcher.store(word::ENDED, Term::of(1, 0).0);
        assert!(seat.has_ended());
        assert_eq!(seat.next(Duration::from_millis(5)), None);
        assert_eq!(launcher.load(word::PARKED), Term::of(1, 0).0);
        let waiting = std::thread::spawn(move || (seat.next(LONG), seat));
        assign(&launcher, &assignment(2, 0));
        let (next, seat) = waiting.join().unwrap();
        assert_eq!(next, Some(assignment(2, 0)));
        assert!(!seat.has_ended() && seat.term() == Term::of(2, 0));
        drop(seat);
        assert_eq!(launcher.load(word::LIVE), 0);
    }

    #[test]
    fn the_end_of_a_term_wakes_the_watcher() {
        let (launcher, _session, seat) = seated();
        let (told, ended) = mpsc::channel();
        let watch = seat.watch(move || told.send(()).unwrap()).unwrap();
        assert!(ended.recv_timeout(Duration::from_millis(20)).is_err());
        launcher.store(word::ENDED, Term::of(1, 0).0);
        launcher.wake(word::ENDED);
        ended.recv_timeout(LONG).unwrap();
        drop(watch);
        // One that is dropped first says nothing.
        let (told, ended) = mpsc::channel();
        launcher.store(word::ENDED, 0);
        drop(seat.watch(move || told.send(()).unwrap()).unwrap());
        launcher.store(word::ENDED, Term::of(1, 0).0);
        assert!(ended.recv_timeout(LONG).is_err());
    }

    #[test]
    fn a_half_written_assignment_is_never_seen() {
        let (launcher, _session, mut seat) = seated();
        let (told, seen) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            for _ in 0..200 {
                if let Some(next) = seat.next(LONG) {
                    told.send(next).unwrap();
                }
                if seat.term() == Term::of(400, 0) {
                    return;
                }
            }
        });
        for number in 2..=400 {
            assign(&launcher, &assignment(number, number as u32 % 4));
        }
        reader.join().unwrap();
        for next in seen {
            let number = next.term.number();
            assert_eq!(next, assignment(number, number as u32 % 4));
        }
    }
}
