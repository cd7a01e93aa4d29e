//! Checkpoints in memory: what is in this node's slots is given to the workers of the job, on every node, and copied
//! to the launcher of one other node, so that it outlives this one. Everything that waits is done by threads; training
//! and commits wait for none of it.

mod places;
mod push;
mod serve;
mod shelf;

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use muster_checkpoint::part::Note;
use muster_checkpoint::slot::{Sealed, View};
use muster_protocol::checkpoint::SlotId;
use muster_protocol::local::Start;
use muster_protocol::memory::{MAX_WHO, Name, Peer};
use muster_protocol::{Digest, LauncherId};
use tokio::sync::mpsc::UnboundedSender;

use super::Done;
use push::{Job, Pusher};
pub use serve::Server;
use serve::lock;
use shelf::Shelf;

/// What was sealed, and its rank's note.
struct News {
    slot: SlotId,
    view: View,
    note: Vec<u8>,
    generation: Digest,
    /// Who holds copies.
    holder: Option<Peer>,
}

/// How this launcher takes part.
#[derive(Debug)]
pub struct Settings {
    /// The port that peers and workers call.
    pub server: Server,
    /// Which launcher this is, and what people call its node.
    pub launcher: LauncherId,
    pub who: String,
    /// Copies of what is sealed here that other nodes hold: 0 or 1. With 1 this one holds those of another.
    pub copies: u8,
}

/// What this launcher holds in memory, and its threads.
#[derive(Debug)]
pub struct Replicas {
    shelf: Arc<Mutex<Shelf>>,
    copies: u8,
    holder: Option<Peer>,
    generation: Digest,
    news: Option<Sender<News>>,
    /// Closes its port when it is dropped.
    _server: Server,
}

impl Replicas {
    /// Serves from now on, whoever proves the job's key.
    ///
    /// # Errors
    /// No thread is left.
    pub fn start(
        settings: Settings,
        budget: u64,
        done: UnboundedSender<Done>,
    ) -> std::io::Result<Replicas> {
        let Settings {
            mut server,
            launcher,
            mut who,
            copies,
        } = settings;
        while who.len() > MAX_WHO {
            who.pop();
        }
        let shelf = Arc::new(Mutex::new(Shelf::new(copies > 0, budget)));
        server.serve(launcher, who, shelf.clone(), done.clone())?;
        let (news, sealed) = channel::<News>();
        let (jobs, queue) = channel::<Job>();
        let pusher = Pusher::new(shelf.clone(), done);
        let thread = std::thread::Builder::new().name("copies".into());
        thread.spawn(move || pusher.run(&queue))?;
        let here = shelf.clone();
        let thread = std::thread::Builder::new().name("sealed".into());
        thread.spawn(move || {
            for news in sealed {
                if let Some(job) = shelve(news, &here) {
                    let _over = jobs.send(job);
                }
            }
        })?;
        Ok(Replicas {
            shelf,
            copies,
            holder: None,
            generation: Digest::ZERO,
            news: Some(news),
            _server: server,
        })
    }

    /// A generation's workers start.
    pub(super) fn begins(&mut self, start: &Start) {
        self.generation = start.digest;
        self.holder = start.peers.others.first().copied();
        lock(&self.shelf).begin(start.digest, &start.peers);
    }

    /// A rank has sealed this.
    pub(super) fn sealed(&self, slot: SlotId, sealed: &Sealed) {
        let news = News {
            slot,
            view: sealed.view(),
            note: sealed.note.clone(),
            generation: self.generation,
            holder: self.holder.filter(|_| self.copies > 0),
        };
        if let Some(queue) = &self.news {
            let _over = queue.send(news);
        }
    }

    /// A rank's slots are given up for others.
    pub(super) fn part(&self, k: u16) {
        lock(&self.shelf).part(k);
    }

    /// So many bytes are taken by slots, or soon will be.
    pub(super) fn set_slots(&self, bytes: u64) {
        lock(&self.shelf).set_slots(bytes);
    }

    /// A save is committed.
    pub(super) fn committed(&self, generation: Digest, step: u64) {
        lock(&self.shelf).commit(generation, step);
    }
}

/// Puts what was sealed where it is found; what is to be copied of it.
fn shelve(news: News, shelf: &Mutex<Shelf>) -> Option<Job> {
    let News {
        slot,
        view,
        note,
        generation,
        holder,
    } = news;
    // A rank that writes nothing has no file.
    let file = Note::decode(&note).ok()?.file?;
    let name = Name::new(view.step, &Digest(view.generation.0), &file)?;
    lock(shelf).seal(slot, name.clone(), view.clone());
    let holder = holder.filter(|_| view.generation.0 == generation.0)?;
    Some(Job {
        generation,
        name,
        view,
        holder,
    })
}

#[cfg(test)]
mod tests;
