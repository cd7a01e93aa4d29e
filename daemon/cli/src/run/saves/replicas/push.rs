//! Copies of what is sealed here, or stripes for parity, brought to the launchers of other nodes by a thread of its own.
//! It holds no slot: a slot that is filled anew while it is copied is no copy any more, and nobody waits for one.

use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use muster_checkpoint::slot::View;
use muster_checkpoint::sum::CHUNK;
use muster_protocol::memory::parity::{MAX_PARTS, Stripe};
use muster_protocol::memory::{Answer, Ask, Name, Peer};
use muster_protocol::{Digest, LauncherId};
use muster_runtime::memory::{Link, SOON, find, time_for};
use tokio::sync::mpsc::UnboundedSender;

use super::serve::lock;
use super::shelf::Shelf;
use crate::run::saves::Done;
use crate::run::saves::making::shown;

/// After a failure, and how often it is tried again.
const AGAIN: Duration = Duration::from_secs(1);
const TRIES: u32 = 60;

/// An image, or a part of one, to be brought to another node.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) generation: Digest,
    pub(super) name: Name,
    pub(super) view: View,
    pub(super) to: To,
    /// How many jobs of this image there are.
    pub(super) all: usize,
}

/// Who is to hold how much of an image.
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

#[derive(Debug)]
struct Pending {
    job: Job,
    tries: u32,
    at: Instant,
}

/// What became of a copy.
enum Outcome {
    Held {
        who: String,
    },
    /// Nobody wants it any more.
    Overtaken,
    /// Not now.
    Later(String),
}

/// Copies what comes, until nobody sends any more.
pub(super) struct Pusher {
    pub(super) shelf: Arc<Mutex<Shelf>>,
    pub(super) done: UnboundedSender<Done>,
    /// What people were told last, of each launcher that does not hold what it is to, and of those that do.
    failing: BTreeMap<LauncherId, String>,
    well: Option<String>,
    /// Who holds its stripe of the images of the newest step.
    folded: BTreeMap<Name, BTreeMap<LauncherId, String>>,
}

impl Pusher {
    pub(super) fn new(shelf: Arc<Mutex<Shelf>>, done: UnboundedSender<Done>) -> Pusher {
        Pusher {
            shelf,
            done,
            failing: BTreeMap::new(),
            well: None,
            folded: BTreeMap::new(),
        }
    }

    pub(super) fn run(mut self, jobs: &Receiver<Job>) {
        let mut pending: Vec<Pending> = Vec::new();
        loop {
            let now = Instant::now();
            let next = pending.iter().map(|p| p.at).min();
            let wait = next.map_or(AGAIN, |at| at.saturating_duration_since(now));
            match jobs.recv_timeout(wait) {
                Ok(job) => {
                    // Of a rank the newest alone.
                    pending.retain(|p| p.job.name.file != job.name.file || p.job.name == job.name);
                    pending.push(Pending {
                        job,
                        tries: 0,
                        at: now,
                    });
                    continue;
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let due = (pending.iter()).position(|p| p.at <= Instant::now());
            let Some(mut this) = due.map(|at| pending.remove(at)) else {
                continue;
            };
            match self.push(&this.job) {
                Outcome::Held { who } => self.held(&this.job, who),
                Outcome::Overtaken => {}
                Outcome::Later(why) => {
                    self.fails(&this.job.to, why);
                    this.tries += 1;
                    this.at = Instant::now() + AGAIN;
                    if this.tries < TRIES {
                        pending.push(this);
                    }
                }
            }
        }
    }

    fn fails(&mut self, to: &To, why: String) {
        self.well = None;
        if self.failing.get(&to.holder.launcher) == Some(&why) {
            return;
        }
        let text = match to.how {
            How::Copy => format!("what is sealed here is not copied to another node: {why}"),
            How::Fold { .. } => format!("parity is without a stripe of what is sealed here: {why}"),
        };
        let _over = self.done.send(Done::Said(text));
        // Those of generations that are over are of no use.
        if self.failing.len() > MAX_PARTS {
            self.failing.clear();
        }
        self.failing.insert(to.holder.launcher, why);
    }

    /// A node holds what it is to.
    fn held(&mut self, job: &Job, who: String) {
        self.failing.remove(&job.to.holder.launcher);
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
        if self.well.as_ref() != Some(&text) {
            let _over = self.done.send(Done::Said(text.clone()));
            self.well = Some(text);
        }
    }

    fn is_wanted(&self, job: &Job) -> bool {
        job.view.is_whole() && lock(&self.shelf).generation() == job.generation
    }

    fn push(&self, job: &Job) -> Outcome {
        if !self.is_wanted(job) {
            return Outcome::Overtaken;
        }
        let (who, mut link) = match self.connect(&job.to.holder) {
            Ok(holder) => holder,
            Err(why) => return Outcome::Later(why),
        };
        match self.bring(&who, &mut link, job) {
            Ok(outcome) => outcome,
            // A slot that is filled again does not verify there.
            Err(_) if !self.is_wanted(job) => Outcome::Overtaken,
            Err(error) => Outcome::Later(format!("{who}: {error}")),
        }
    }

    /// What people call the node, and a connection.
    fn connect(&self, holder: &Peer) -> Result<(String, Link), String> {
        let guard = holder.guard;
        let words = |error: io::Error| format!("the launcher at {guard}: {error}");
        let Some(at) = find(guard).map_err(words)? else {
            return Err(format!(
                "the launcher at {guard} holds nothing: start it with --store, by the same Muster"
            ));
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
        let bytes = job.view.bytes();
        let (generation, name) = (job.generation, job.name.clone());
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
                return Ok(Outcome::Later(format!(
                    "{who} has room for {}, {} are needed: raise --checkpoint-memory there",
                    shown(room),
                    shown(job.to.how.bytes(bytes))
                )));
            }
            (_, Answer::Refused { why }) => return Ok(Outcome::Later(format!("{who}: {why}"))),
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
        let mut image = job.view.image().chunks(CHUNK as usize);
        let mut passed = 0;
        for chunk in chunks {
            if !self.is_wanted(job) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let bytes = image.nth((chunk - passed) as usize);
            passed = chunk + 1;
            let sum = job.view.sums.get(chunk as usize);
            let (Some(bytes), Some(sum)) = (bytes, sum) else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            let until = Instant::now() + time_for(bytes.len() as u64);
            link.write(bytes, until)?;
            link.write(&sum.to_le_bytes(), until)?;
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
