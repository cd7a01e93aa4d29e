//! A newcomer's copy of the state, which comes while it listens.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Instant;

use muster_protocol::live::Event;

use super::Worker;
use crate::live::hand::{FetchError, Thing, fetch};
use crate::live::outcome::{LiveError, Outcome};
use crate::live::training::Training;

/// A copy that is under way.
pub(super) struct Copying {
    came: Receiver<Result<Vec<u8>, FetchError>>,
    since: Instant,
    /// Nobody waits for it any more.
    over: Arc<AtomicBool>,
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
    }
}

impl<T: Training> Worker<'_, T> {
    /// Takes in a copy that is complete.
    pub(super) fn copied(&mut self) -> Result<Option<Outcome>, LiveError> {
        let Some(copying) = &self.copying else {
            return Ok(None);
        };
        let (came, since) = (copying.came.try_recv(), copying.since);
        let bytes = match came {
            Err(TryRecvError::Empty) => return Ok(None),
            Ok(Ok(bytes)) => bytes,
            // Every source is lost: the next generation finds another way.
            Ok(Err(error)) => return Ok(Some(self.ended(error.to_string(), None))),
            Err(TryRecvError::Disconnected) => {
                return Ok(Some(self.ended("the copy was cut short".into(), None)));
            }
        };
        self.copying = None;
        if !self.training.adopt_state(bytes) {
            return Err(LiveError::Useless { what: "state" });
        }
        self.unharmed()?;
        let number = self.number();
        self.live.handle(Event::Copied { number })?;
        self.carry_out()?;
        Ok(Some(Outcome::CaughtUp {
            committed: self.live.committed(),
            took: since.elapsed(),
        }))
    }

    /// Starts a copy of the frozen state on a thread of its own.
    pub(super) fn copy(&self, boundary: u64, from: &[u32]) -> Result<Copying, LiveError> {
        let (told, came) = channel();
        let copying = Copying {
            came,
            since: Instant::now(),
            over: Arc::default(),
        };
        if let Some(formed) = &self.formed {
            let sources: Vec<SocketAddr> = from
                .iter()
                .filter_map(|rank| formed.peers.get(*rank as usize).copied())
                .collect();
            let (token, over, within) = (formed.token, copying.over.clone(), self.patience.copy);
            std::thread::Builder::new()
                .name("muster-copy".into())
                .spawn(move || {
                    let state = fetch(Thing::State(boundary), &sources, token, within, &over);
                    // Nobody waits for it any more when the generation is over.
                    let _gone = told.send(state);
                })?;
        }
        Ok(copying)
    }

    /// Waits for no copy of a state any more.
    pub(in crate::live) fn forget_copy(&mut self) {
        self.copying = None;
        self.say_ready = false;
    }
}
