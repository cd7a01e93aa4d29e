//! Copies of what is sealed here, brought to the launcher of another node by a thread of its own. It holds no slot: a
//! slot that is filled anew while it is copied is no copy any more, and nobody waits for one.

use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use muster_checkpoint::slot::View;
use muster_checkpoint::sum::CHUNK;
use muster_protocol::Digest;
use muster_protocol::memory::{Answer, Ask, Name, Peer};
use muster_runtime::memory::{Link, SOON, find, time_for};
use tokio::sync::mpsc::UnboundedSender;

use super::serve::lock;
use super::shelf::Shelf;
use crate::run::saves::Done;
use crate::run::saves::making::shown;

/// After a failure, and how often it is tried again.
const AGAIN: Duration = Duration::from_secs(1);
const TRIES: u32 = 60;

/// An image to be brought to another node.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) generation: Digest,
    pub(super) name: Name,
    pub(super) view: View,
    /// Who is to hold it.
    pub(super) holder: Peer,
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
    /// What people were told last.
    said: Option<String>,
}

impl Pusher {
    pub(super) fn new(shelf: Arc<Mutex<Shelf>>, done: UnboundedSender<Done>) -> Pusher {
        Pusher {
            shelf,
            done,
            said: None,
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
                    pending.retain(|p| p.job.name.file != job.name.file);
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
                Outcome::Held { who } => self.recovered(&who),
                Outcome::Overtaken => {}
                Outcome::Later(why) => {
                    self.say(why);
                    this.tries += 1;
                    this.at = Instant::now() + AGAIN;
                    if this.tries < TRIES {
                        pending.push(this);
                    }
                }
            }
        }
    }

    fn say(&mut self, why: String) {
        if self.said.as_ref() != Some(&why) {
            let text = format!("what is sealed here is not copied to another node: {why}");
            let _over = self.done.send(Done::Said(text));
            self.said = Some(why);
        }
    }

    fn recovered(&mut self, who: &str) {
        let text = format!("copies of what is sealed here are in the memory of {who}");
        if self.said.as_ref() != Some(&text) {
            let _over = self.done.send(Done::Said(text.clone()));
            self.said = Some(text);
        }
    }

    fn is_wanted(&self, job: &Job) -> bool {
        job.view.is_whole() && lock(&self.shelf).generation() == job.generation
    }

    fn push(&self, job: &Job) -> Outcome {
        if !self.is_wanted(job) {
            return Outcome::Overtaken;
        }
        let (who, mut link) = match self.connect(&job.holder) {
            Ok(holder) => holder,
            Err(why) => return Outcome::Later(why),
        };
        match self.copy(&who, &mut link, job) {
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

    fn copy(&self, who: &str, link: &mut Link, job: &Job) -> io::Result<Outcome> {
        let held = || Outcome::Held {
            who: who.to_owned(),
        };
        let view = &job.view;
        let ask = Ask::Keep {
            generation: job.generation,
            name: job.name.clone(),
            bytes: view.bytes(),
        };
        match link.ask(&ask)? {
            Answer::Go => {}
            Answer::Have | Answer::Kept => return Ok(held()),
            Answer::NoRoom { room } => {
                return Ok(Outcome::Later(format!(
                    "{who} has room for {}, {} are needed: raise --checkpoint-memory there",
                    shown(room),
                    shown(view.bytes())
                )));
            }
            Answer::Refused { why } => return Ok(Outcome::Later(format!("{who}: {why}"))),
            _ => return Err(io::ErrorKind::InvalidData.into()),
        }
        for (chunk, sum) in view.image().chunks(CHUNK as usize).zip(view.sums.iter()) {
            if !self.is_wanted(job) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let until = Instant::now() + time_for(chunk.len() as u64);
            link.write(chunk, until)?;
            link.write(&sum.to_le_bytes(), until)?;
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
}
