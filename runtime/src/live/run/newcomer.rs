//! A newcomer's copy of the state, which comes while it listens.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::Instant;

use muster_protocol::live::Event;

use super::Worker;
use crate::live::hand::{FetchError, Landing, Thing, fetch};
use crate::live::outcome::{LiveError, Outcome};
use crate::live::training::Training;

/// A copy that is to come.
pub(super) struct Copying {
    boundary: u64,
    sources: Vec<SocketAddr>,
    token: [u8; 32],
    since: Instant,
    /// Nobody waits for it any more.
    over: Arc<AtomicBool>,
    /// `None`: there is no place for it yet.
    came: Option<Receiver<Came>>,
}

/// Where it is, if it is whole.
type Came = Result<Box<dyn Landing>, FetchError>;

impl Drop for Copying {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
    }
}

impl<T: Training> Worker<'_, T> {
    /// The copy to make from these ranks. `None`: there is no generation.
    pub(super) fn copying_from(&self, boundary: u64, from: &[u32]) -> Option<Copying> {
        let formed = self.formed.as_ref()?;
        let address = |rank: &u32| formed.peers.get(*rank as usize).copied();
        Some(Copying {
            boundary,
            sources: from.iter().filter_map(address).collect(),
            token: formed.token,
            since: Instant::now(),
            over: Arc::default(),
            came: None,
        })
    }

    /// Starts the copy on a thread of its own, once there is a place for it.
    pub(super) fn begin_copy(&mut self) -> Result<(), LiveError> {
        let Some(copying) = self.copying.as_mut().filter(|c| c.came.is_none()) else {
            return Ok(());
        };
        let landing = self.training.landing();
        if let Some(error) = self.training.fault() {
            return Err(LiveError::Training(error));
        }
        let Some(mut landing) = landing else {
            return Ok(());
        };
        let (told, came) = channel();
        copying.came = Some(came);
        let (thing, sources) = (Thing::State(copying.boundary), copying.sources.clone());
        let (token, over) = (copying.token, copying.over.clone());
        let within = self.patience.copy;
        std::thread::Builder::new()
            .name("muster-copy".into())
            .spawn(move || {
                let whole = fetch(thing, &sources, token, within, &over, &mut *landing);
                // Nobody waits for it any more when the generation is over.
                let _gone = told.send(whole.map(|()| landing));
            })?;
        Ok(())
    }

    /// Takes in a copy that is complete.
    pub(super) fn copied(&mut self) -> Result<Option<Outcome>, LiveError> {
        self.begin_copy()?;
        let Some(copying) = &self.copying else {
            return Ok(None);
        };
        let Some(came) = &copying.came else {
            return Ok(None);
        };
        let (came, since) = (came.try_recv(), copying.since);
        let landing = match came {
            Err(TryRecvError::Empty) => return Ok(None),
            Ok(Ok(landing)) => landing,
            // No other generation makes room, or makes survivors alike.
            Ok(Err(error)) if error.is_final() => return Err(error.into()),
            // Every source is lost: the next generation finds another way.
            Ok(Err(error)) => return Ok(Some(self.ended(error.to_string(), None))),
            Err(TryRecvError::Disconnected) => {
                return Ok(Some(self.ended("the copy was cut short".into(), None)));
            }
        };
        self.copying = None;
        if !self.training.adopt_state(landing) {
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

    /// Waits for no copy of a state any more.
    pub(in crate::live) fn forget_copy(&mut self) {
        self.copying = None;
        self.say_ready = false;
    }
}
