//! Checkpoints in memory: what is in this node's slots is given to the workers of the job, on every node, and copied
//! to the launcher of one other node, or added to the parity that several hold, so that it outlives this one.
//! Everything that waits is done by threads; training and commits wait for none of it.

mod choice;
mod folding;
mod freeing;
mod parities;
mod places;
mod push;
mod queue;
mod serve;
mod shelf;
mod telling;

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex};

use muster_checkpoint::part::Note;
use muster_checkpoint::slot::{Sealed, View};
use muster_protocol::checkpoint::SlotId;
use muster_protocol::local::Start;
use muster_protocol::memory::parity::Stripe;
use muster_protocol::memory::{MAX_WHO, Name, Peers};
use muster_protocol::{Digest, LauncherId};
use tokio::sync::mpsc::UnboundedSender;

use super::Done;
pub use choice::Choice;
pub use freeing::Freeing;
use push::{How, Job, Pusher, Seal, To};
pub use queue::Standing;
pub use serve::Server;
use serve::lock;
use shelf::Shelf;

/// A sealed image, and its rank's note.
struct News {
    slot: SlotId,
    view: View,
    note: Vec<u8>,
    generation: Digest,
    /// Local ranks of that generation.
    ranks: u16,
    /// The nodes that are to hold it, or a part of it.
    to: Vec<To>,
}

/// How this launcher takes part.
#[derive(Debug)]
pub struct Settings {
    /// The port that peers and workers call.
    pub server: Server,
    /// Which launcher this is, and what people call its node.
    pub launcher: LauncherId,
    pub who: String,
    /// How other nodes hold what is sealed here, and this one what is sealed there.
    pub replicas: Choice,
}

/// Images that this launcher holds in memory, and its threads.
#[derive(Debug)]
pub struct Replicas {
    shelf: Arc<Mutex<Shelf>>,
    freeing: Freeing,
    choice: Choice,
    /// By whom what is sealed is held in this generation.
    peers: Peers,
    generation: Digest,
    ranks: u16,
    news: Option<Sender<News>>,
    done: UnboundedSender<Done>,
    /// The last message to people about how many nodes there are.
    said: Option<String>,
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
            replicas: choice,
        } = settings;
        while who.len() > MAX_WHO {
            who.pop();
        }
        let freeing = Freeing::start()?;
        let shelf = Shelf::new(choice, budget, freeing.clone());
        let shelf = Arc::new(Mutex::new(shelf));
        let held = (shelf.clone(), freeing.clone());
        server.serve(launcher, who.clone(), held, done.clone())?;
        let (news, sealed) = channel::<News>();
        let (jobs, queue) = channel::<Seal>();
        let pusher = Pusher::new(shelf.clone(), done.clone(), who, choice.over());
        let thread = std::thread::Builder::new().name("copies".into());
        thread.spawn(move || pusher.run(&queue))?;
        let here = shelf.clone();
        let thread = std::thread::Builder::new().name("sealed".into());
        thread.spawn(move || {
            for news in sealed {
                if let Some(seal) = shelve(news, &here) {
                    let _over = jobs.send(seal);
                }
            }
        })?;
        Ok(Replicas {
            shelf,
            freeing,
            choice,
            peers: Peers::default(),
            generation: Digest::ZERO,
            ranks: 0,
            news: Some(news),
            done,
            said: None,
            _server: server,
        })
    }

    /// A generation's workers start.
    pub(super) fn begins(&mut self, start: &Start) {
        self.generation = start.digest;
        self.ranks = start.slots;
        self.peers = (*start.peers).clone();
        lock(&self.shelf).begin(start.digest, &start.peers);
        let said = self.fewer();
        if said != self.said {
            if let Some(text) = &said {
                let _over = self.done.send(Done::Said(text.clone()));
            }
            self.said = said;
        }
    }

    /// For people: what it means that there are fewer nodes than parity was asked over.
    fn fewer(&self) -> Option<String> {
        let (over, others) = (self.choice.over(), self.peers.group.len());
        let nodes = others + 1;
        let means = match others {
            _ if others >= usize::from(over) => return None,
            0 => "no other node holds what is sealed here".to_owned(),
            1 => "each holds all that the other one seals".to_owned(),
            _ => format!("it is over {others}"),
        };
        let wants = over + 1;
        Some(format!(
            "parity over {over} nodes wants {wants}, and the job has {nodes} now: {means}"
        ))
    }

    /// The nodes that are to hold what is sealed in a slot, or a part of it.
    fn to(&self, slot: SlotId) -> Vec<To> {
        let copy = |peer| To {
            holder: peer,
            how: How::Copy,
        };
        match self.choice {
            Choice::Nothing => Vec::new(),
            Choice::Copy => self
                .peers
                .others
                .iter()
                .copied()
                .map(copy)
                .take(1)
                .collect(),
            Choice::Parity(_) => {
                let stripe = |first| Stripe {
                    // Few enough: what is impossible is refused.
                    of: self.peers.group.len() as u8,
                    first,
                };
                let how = |first| How::Fold {
                    local: slot.k,
                    stripe: stripe(first),
                };
                let to = |(first, holder)| To {
                    holder,
                    how: how(first),
                };
                (0u8..)
                    .zip(self.peers.group.iter().copied())
                    .map(to)
                    .collect()
            }
        }
    }

    /// A rank has sealed this.
    pub(super) fn sealed(&self, slot: SlotId, sealed: &Sealed) {
        let news = News {
            slot,
            view: sealed.view(),
            note: sealed.note.clone(),
            generation: self.generation,
            ranks: self.ranks,
            to: self.to(slot),
        };
        if let Some(queue) = &self.news {
            let _over = queue.send(news);
        }
    }

    /// This was in a slot that the launcher before left. It is not copied to another node: who holds this node's copies
    /// holds it already, or never will.
    pub(super) fn inherited(&self, slot: SlotId, view: View, note: &[u8]) {
        if let Some(name) = name_of(&view, note) {
            lock(&self.shelf).seal(slot, name, view);
        }
    }

    /// A rank's slots are given up for others.
    pub(super) fn part(&self, k: u16) {
        lock(&self.shelf).part(k);
    }

    /// Where memory goes that makes room for slots: who makes them waits until it is back.
    pub(super) fn freeing(&self) -> Freeing {
        self.freeing.clone()
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

/// Name of an image. A rank that writes nothing has no file.
fn name_of(view: &View, note: &[u8]) -> Option<Name> {
    let file = Note::decode(note).ok()?.file?;
    Name::new(view.step, &Digest(view.generation.0), &file)
}

/// Puts what was sealed where it is found; what is to be brought where of it, if anything of this node is brought
/// anywhere.
fn shelve(news: News, shelf: &Mutex<Shelf>) -> Option<Seal> {
    let News {
        slot,
        view,
        note,
        generation,
        ranks,
        to,
    } = news;
    let (step, bytes) = (view.step, view.bytes());
    let is_present = view.generation.0 == generation.0;
    let name = name_of(&view, &note);
    if let Some(name) = &name {
        lock(shelf).seal(slot, name.clone(), view);
    }
    if !is_present || to.is_empty() {
        return None;
    }
    // An image may be too short for all of its stripes.
    let to = to.into_iter().filter(|to| match to.how {
        How::Copy => true,
        How::Fold { stripe, .. } => stripe.pieces(bytes) > 0,
    });
    let to: Vec<To> = to.collect();
    let all = to.len();
    let job = |(name, to): (&Name, &To)| Job {
        generation,
        name: name.clone(),
        bytes,
        to: *to,
        all,
    };
    let jobs = name
        .iter()
        .flat_map(|name| to.iter().map(move |to| (name, to)));
    Some(Seal {
        generation,
        step,
        rank: slot.k,
        ranks,
        jobs: jobs.map(job).collect(),
    })
}

#[cfg(test)]
mod tests;
