//! Copies of what is sealed here, or stripes for parity, brought to the launchers of other nodes by a thread of its
//! own. It holds no slot: a slot that is filled anew while it is copied is no copy any more, and nobody waits for one.
//! Nor does it hold the memory of one that was given up, whatever it waits for: it looks for the image on the shelf,
//! chunk by chunk.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use muster_checkpoint::sum::CHUNK;
use muster_launcher::slots::shown;
use muster_protocol::memory::parity::Stripe;
use muster_protocol::memory::{Answer, Ask, Name, Peer};
use muster_protocol::{Digest, LauncherId};
use muster_runtime::memory::{Link, SOON, find, time_for};
use tokio::sync::mpsc::UnboundedSender;

use super::queue::{Item, Left, Queue, Standing};
use super::serve::lock;
use super::shelf::Shelf;
use super::telling::{Kind, Telling};
use crate::run::saves::Done;

/// Between two looks at the queue.
const IDLE: Duration = Duration::from_secs(1);

/// Between two looks, while a node takes nothing of a chunk, at whether it is still wanted.
const LOOKS: Duration = Duration::from_millis(100);

/// Between two words about saves that come too fast.
const BEHIND_AGAIN: Duration = Duration::from_secs(60);

/// A local rank has sealed its part of a save.
#[derive(Debug)]
pub(super) struct Seal {
    pub(super) generation: Digest,
    pub(super) step: u64,
    pub(super) rank: u16,
    /// How many local ranks there are.
    pub(super) ranks: u16,
    /// Parts of it to be brought: none, of a rank that writes nothing.
    pub(super) jobs: Vec<Job>,
}

/// An image, or a part of one, to be brought to another node.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) generation: Digest,
    pub(super) name: Name,
    /// Length of the image.
    pub(super) bytes: u64,
    pub(super) to: To,
    /// How many jobs of this image there are.
    pub(super) all: usize,
}

/// A holder of an image, and how much it is to hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct To {
    pub(super) holder: Peer,
    pub(super) how: How,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum How {
    /// All of it.
    Copy,
    /// This stripe, added to those of the ranks of the same local number on other nodes.
    Fold { local: u16, stripe: Stripe },
}

/// Result of an attempt to bring a copy.
enum Outcome {
    Held {
        who: String,
    },
    /// Another is in its slot, or its memory is needed.
    Overwritten,
    /// Its generation is over.
    Over,
    /// Not now.
    Later(Kind, String),
}

/// Copies what comes, until nobody sends any more.
pub(super) struct Pusher {
    shelf: Arc<Mutex<Shelf>>,
    done: UnboundedSender<Done>,
    /// Name of this node for people.
    who: String,
    /// Over how many nodes it wants parity.
    over: u8,
    queue: Queue<Job>,
    telling: Telling,
    generation: Digest,
    /// The nodes that hold their stripes of the images of the newest step.
    folded: BTreeMap<Name, BTreeMap<LauncherId, String>>,
    /// The last news for the agent, and the last that people heard of saves that come too fast.
    standing: Standing,
    slow: Option<(u64, Instant)>,
}

impl Pusher {
    pub(super) fn new(
        shelf: Arc<Mutex<Shelf>>,
        done: UnboundedSender<Done>,
        who: String,
        over: u8,
    ) -> Pusher {
        Pusher {
            shelf,
            done,
            who,
            over,
            queue: Queue::new(),
            telling: Telling::default(),
            generation: Digest::ZERO,
            folded: BTreeMap::new(),
            standing: Standing::default(),
            slow: None,
        }
    }

    pub(super) fn run(mut self, sealed: &Receiver<Seal>) {
        loop {
            let now = Instant::now();
            let next = self.queue.next_at();
            let wait = next.map_or(IDLE, |at| at.saturating_duration_since(now));
            match sealed.recv_timeout(wait) {
                Ok(seal) => {
                    self.add(seal, now);
                    continue;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.renew();
            if let Some((item, tries)) = self.queue.take(Instant::now()) {
                self.try_one(item, tries);
            }
            self.stands(Instant::now());
        }
    }

    /// Begins the generation that has begun: what waits is of no use, and what was told was of another.
    fn renew(&mut self) {
        let generation = lock(&self.shelf).generation();
        if generation != self.generation {
            self.generation = generation;
            self.telling.begin();
            self.queue.begin(generation);
            self.slow = None;
        }
    }

    fn add(&mut self, seal: Seal, now: Instant) {
        self.renew();
        if seal.generation != self.generation {
            return;
        }
        for job in seal.jobs {
            let item = Item {
                generation: job.generation,
                step: job.name.step,
                file: job.name.file.clone(),
                all: job.all,
                shared: matches!(job.to.how, How::Fold { .. }),
                job,
            };
            self.queue.add(item, now);
        }
        let (step, rank) = (seal.step, seal.rank);
        self.queue.sealed(seal.generation, step, rank, seal.ranks);
    }

    fn try_one(&mut self, item: Item<Job>, tries: u32) {
        match self.push(&item.job) {
            Outcome::Held { who } => {
                self.held(&item.job, who);
                self.queue.leave(&item, Left::Held);
            }
            Outcome::Over => self.queue.leave(&item, Left::Over),
            Outcome::Overwritten => {
                // Where it waited for a node that takes nothing, that one was too slow.
                let why = match tries {
                    0 => Left::Slow,
                    _ => Left::Failed,
                };
                self.queue.leave(&item, why);
            }
            Outcome::Later(kind, why) => {
                self.fails(&item.job, kind, &why);
                self.queue.again(item, tries, Instant::now());
            }
        }
    }

    fn fails(&mut self, job: &Job, kind: Kind, why: &str) {
        let (node, file) = (job.to.holder.launcher, &job.name.file);
        if !self.telling.fails(node, file, kind, Instant::now()) {
            return;
        }
        self.say(match job.to.how {
            How::Copy => format!("what is sealed here is not copied to another node: {why}"),
            How::Fold { .. } => format!("parity is without a stripe of what is sealed here: {why}"),
        });
    }

    /// A node holds what it is to.
    fn held(&mut self, job: &Job, who: String) {
        self.telling.holds(job.to.holder.launcher, &job.name.file);
        let text = match job.to.how {
            How::Copy => format!("copies of what is sealed here are in the memory of {who}"),
            How::Fold { .. } => {
                self.folded.retain(|name, _| name.step == job.name.step);
                let all = self.folded.entry(job.name.clone()).or_default();
                all.insert(job.to.holder.launcher, who);
                if all.len() < job.all {
                    return;
                }
                let names: Vec<&str> = all.values().map(String::as_str).collect();
                let names = names.join(", ");
                format!("what is sealed here is in the parity that these hold: {names}")
            }
        };
        if self.telling.is_well(&text) {
            self.say(text);
        }
    }

    /// Tells how the saves get on, if that is news.
    fn stands(&mut self, now: Instant) {
        let standing = self.queue.standing();
        if standing != self.standing {
            self.standing = standing;
            let _over = self.done.send(Done::Stands(standing));
        }
        let what = match self.over {
            0 => "copies on other nodes are",
            _ => "parity is",
        };
        match self.slow {
            Some(_) if standing.behind == 0 && self.queue.is_at_ease() => {
                if let Some(step) = standing.whole {
                    self.slow = None;
                    self.say(format!("{what} complete again: step {step}"));
                }
            }
            Some((told, at)) if told == standing.slow || now < at + BEHIND_AGAIN => {}
            None if standing.slow == 0 || standing.behind == 0 => {}
            _ => {
                self.slow = Some((standing.slow, now));
                let whole = match standing.whole {
                    Some(step) => format!("the newest that is complete is of step {step}"),
                    None => "none is complete".to_owned(),
                };
                let (behind, slow) = (standing.behind, standing.slow);
                self.say(format!(
                    "{what} behind: saves come faster than they are sent to other nodes; of the newest {behind}, and of {slow} so far, not all is there, {whole}. Save less often, or see to a faster network"
                ));
            }
        }
    }

    fn say(&self, text: String) {
        let _over = self.done.send(Done::Said(text));
    }

    /// Why nobody wants it any more, if nobody does.
    fn unwanted(&self, job: &Job) -> Option<Outcome> {
        let shelf = lock(&self.shelf);
        if shelf.generation() != job.generation {
            return Some(Outcome::Over);
        }
        (!shelf.has_own(&job.name)).then_some(Outcome::Overwritten)
    }

    fn push(&self, job: &Job) -> Outcome {
        if let Some(outcome) = self.unwanted(job) {
            return outcome;
        }
        let (who, mut link) = match self.connect(&job.to.holder) {
            Ok(holder) => holder,
            Err((kind, why)) => return Outcome::Later(kind, why),
        };
        match self.bring(&who, &mut link, job) {
            Ok(outcome) => outcome,
            // A slot that is filled again does not verify there.
            Err(error) => self.unwanted(job).unwrap_or_else(|| {
                Outcome::Later(Kind::Broken(error.kind()), format!("{who}: {error}"))
            }),
        }
    }

    /// Name of the node for people, and a connection.
    fn connect(&self, holder: &Peer) -> Result<(String, Link), (Kind, String)> {
        let guard = holder.guard;
        let words = |error: io::Error| {
            let text = format!("the launcher at {guard}: {error}");
            (Kind::Away(error.kind()), text)
        };
        let Some(at) = find(guard).map_err(words)? else {
            let text = format!(
                "the launcher at {guard} holds nothing: start it with --store, by the same Muster"
            );
            return Err((Kind::HoldsNothing, text));
        };
        let key = lock(&self.shelf).key().unwrap_or_default();
        let mut link = Link::connect(at, &key, holder.launcher).map_err(words)?;
        match link.ask(&Ask::List).map_err(words)? {
            Answer::Held { mut who, .. } => {
                who.retain(|c| !c.is_control());
                Ok((who, link))
            }
            _ => Err(words(io::ErrorKind::InvalidData.into())),
        }
    }

    fn bring(&self, who: &str, link: &mut Link, job: &Job) -> io::Result<Outcome> {
        let held = || Outcome::Held {
            who: who.to_owned(),
        };
        let (generation, name, bytes) = (job.generation, job.name.clone(), job.bytes);
        let ask = match job.to.how {
            How::Copy => Ask::Keep {
                generation,
                name,
                bytes,
            },
            How::Fold { local, stripe } => Ask::Fold {
                generation,
                name,
                bytes,
                local,
                stripe,
                over: self.over,
                who: self.who.clone(),
            },
        };
        let answer = link.ask(&ask)?;
        match (job.to.how, answer) {
            (How::Copy, Answer::Go) => {
                let chunks = 0..bytes.div_ceil(CHUNK);
                self.send(link, job, chunks)?;
            }
            (How::Fold { stripe, .. }, Answer::GoFrom { piece }) => {
                let pieces = piece..stripe.pieces(bytes);
                self.send(link, job, pieces.map(|piece| stripe.chunk(piece)))?;
            }
            (_, Answer::Have | Answer::Kept) => return Ok(held()),
            (_, Answer::NoRoom { room }) => {
                let why = format!(
                    "{who} has room for {}, {} are needed: raise --checkpoint-memory there",
                    shown(room),
                    shown(job.to.how.bytes(bytes))
                );
                return Ok(Outcome::Later(Kind::NoRoom, why));
            }
            (_, Answer::Refused { why }) => {
                let text = format!("{who}: {why}");
                return Ok(Outcome::Later(Kind::Refused(why), text));
            }
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        match link.hear(SOON)? {
            Answer::Kept => Ok(held()),
            Answer::Damaged { chunk } => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("chunk {chunk} does not arrive as it was sealed"),
            )),
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Sends these chunks, each with its sum behind it.
    fn send(
        &self,
        link: &mut Link,
        job: &Job,
        chunks: impl Iterator<Item = u64>,
    ) -> io::Result<()> {
        for chunk in chunks {
            if self.unwanted(job).is_some() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let own = lock(&self.shelf).own(&job.name);
            let view = own.ok_or(io::ErrorKind::Interrupted)?;
            let bytes = view.image().chunks(CHUNK as usize).nth(chunk as usize);
            let sum = view.sums.get(chunk as usize);
            let (Some(bytes), Some(sum)) = (bytes, sum) else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            let until = Instant::now() + time_for(bytes.len() as u64);
            let wanted = || self.unwanted(job).is_none();
            let sum = sum.to_le_bytes();
            link.write_while(bytes, until, LOOKS, wanted)?;
            drop(view);
            link.write(&sum, until)?;
        }
        Ok(())
    }
}

impl How {
    /// How much of an image of so many bytes it is.
    fn bytes(self, image: u64) -> u64 {
        match self {
            How::Copy => image,
            How::Fold { stripe, .. } => {
                let range = |piece| stripe.range(piece, image);
                let ranges = (0..stripe.pieces(image)).map(range);
                ranges.map(|range| range.end - range.start).sum()
            }
        }
    }
}

#[cfg(test)]
mod tests;
