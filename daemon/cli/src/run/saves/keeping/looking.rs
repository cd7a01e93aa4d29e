//! The one second look that a launcher takes at a time, by a thread of its own. It goes on for as long as somebody
//! asks.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use muster_protocol::local::Question;
use tokio::sync::mpsc;

use super::{Done, Said, Word};
use crate::kept::Folder;
use crate::kept::again::{Asker, look_again};

/// Threads that read for it.
const THREADS: usize = 4;

/// After so long without a question nobody waits for the answer. An agent that waits asks every few seconds.
const UNASKED: Duration = Duration::from_secs(60);

/// Between two looks, in a pause, whether somebody still does.
const MOMENT: Duration = Duration::from_millis(100);

/// The look under way.
#[derive(Debug)]
pub(super) struct Again {
    /// Counts the looks.
    number: u64,
    under_way: Option<(Question, Arc<Wanted>)>,
    pub(super) unasked: Duration,
}

impl Default for Again {
    fn default() -> Again {
        Again {
            number: 0,
            under_way: None,
            unasked: UNASKED,
        }
    }
}

/// Whether a look is wanted still, and how far it is.
#[derive(Debug)]
struct Wanted {
    read: AtomicU64,
    stop: AtomicBool,
    asked: Mutex<Instant>,
    unasked: Duration,
}

impl Wanted {
    fn go_on(&self) -> ControlFlow<()> {
        let asked = *self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        match self.stop.load(Ordering::Relaxed) || asked.elapsed() >= self.unasked {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}

impl Asker for Wanted {
    fn goes_on(&self, done: u64) -> ControlFlow<()> {
        self.read.fetch_add(done, Ordering::Relaxed);
        self.go_on()
    }

    fn pause(&self, time: Duration) -> ControlFlow<()> {
        let from = Instant::now();
        while self.go_on().is_continue() {
            let Some(left) = time.checked_sub(from.elapsed()) else {
                return ControlFlow::Continue(());
            };
            std::thread::sleep(left.min(MOMENT));
        }
        ControlFlow::Break(())
    }
}

impl Again {
    /// Somebody asks, perhaps again: how far the look is. One that is under way serves whoever asks for no more
    /// than it looks at; else it ends, and another begins.
    pub(super) fn asked(
        &mut self,
        question: Question,
        place: &Arc<Folder>,
        done: &mpsc::UnboundedSender<Done>,
    ) -> Result<u64, String> {
        let serves = |of: &Question| of.manifest == question.manifest && (of.all || !question.all);
        if let Some((of, wanted)) = self.under_way.as_mut().filter(|(of, _)| serves(of)) {
            of.number = question.number;
            *(wanted.asked.lock()).unwrap_or_else(PoisonError::into_inner) = Instant::now();
            return Ok(wanted.read.load(Ordering::Relaxed));
        }
        self.stop();
        self.number += 1;
        let look = self.number;
        let wanted = Arc::new(Wanted {
            read: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            asked: Mutex::new(Instant::now()),
            unasked: self.unasked,
        });
        let (place, done) = (Arc::clone(place), done.clone());
        let (of, watch) = (question.clone(), Arc::clone(&wanted));
        let thread = std::thread::Builder::new().name("second-look".into());
        let started = thread.spawn(move || {
            let state = look_again(&place, &of, THREADS, &*watch);
            // Nobody listens once the launcher ends.
            let _over = done.send(Done::Kept(Word(Said::LookedAgain { look, state })));
        });
        match started {
            Ok(_) => {
                self.under_way = Some((question, wanted));
                Ok(0)
            }
            Err(error) => Err(format!("no thread to read it: {error}")),
        }
    }

    /// A look has ended: what was asked, if it was not given up before.
    pub(super) fn ended(&mut self, look: u64) -> Option<Question> {
        let of = self.under_way.take_if(|_| look == self.number);
        of.map(|(question, _)| question)
    }

    fn stop(&mut self) {
        if let Some((_, wanted)) = self.under_way.take() {
            wanted.stop.store(true, Ordering::Relaxed);
        }
    }
}

impl Drop for Again {
    fn drop(&mut self) {
        self.stop();
    }
}
