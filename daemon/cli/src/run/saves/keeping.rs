//! Keeping checkpoints, on the launcher's side: two threads look at the store for the agent, and delete
//! what it names. One looks at what is there and deletes, quickly; the other reads whole checkpoints,
//! behind everything else that the machine has to do. A third reads what somebody found damaged.

mod looking;

use std::collections::BTreeSet;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use muster_checkpoint::verify::Depth;
use muster_protocol::Digest;
use muster_protocol::checkpoint::{Standing, State};
use muster_protocol::local::{KeepNews, MAX_NAME, MAX_NEEDS, MAX_PATH, Question, Review, short};
use tokio::sync::mpsc;

use self::looking::Again;
use super::Done;
use super::way::Way;
use crate::kept::{Folder, Reviewed, Rules, Unknown, Unread, review, whole, words};

/// The most checkpoints of one question; a log is not that long.
const MAX_COMMITS: usize = 1 << 20;

/// By how much the thread that reads checkpoints makes way for others: all there is. On Linux a thread
/// has a priority of its own (setpriority(2)).
const NICE: i32 = 19;

/// A task for a thread.
enum Task {
    Review {
        link: u64,
        round: u32,
        newest: Digest,
        commits: Vec<Standing>,
        unread: Unread,
    },
    Delete(String),
}

/// Result of a thread's task.
#[derive(Debug)]
pub struct Word(Said);

#[derive(Debug)]
enum Said {
    Reviewed {
        link: u64,
        news: Vec<KeepNews>,
        verify: Option<(u64, Digest)>,
    },
    Verified {
        seq: u64,
        manifest: Digest,
        state: State,
    },
    /// None: nobody wanted to know any more.
    LookedAgain {
        look: u64,
        state: Option<State>,
    },
    NotDeleted(String),
}

/// The launcher's part in keeping committed checkpoints.
#[derive(Debug)]
pub(super) struct Keeping {
    place: Option<Arc<Folder>>,
    /// The store's location, for commands.
    location: String,
    rules: Rules,
    /// Counts the links: what was asked on an earlier one is answered to nobody.
    link: u64,
    /// A question, as it arrives.
    arriving: Option<Review>,
    looker: Option<Sender<Task>>,
    reading: Option<Digest>,
    again: Again,
    verified: BTreeSet<Digest>,
    unread: Unread,
    done: mpsc::UnboundedSender<Done>,
    /// Makes reads that verify wait for writes.
    way: Way,
}

impl Keeping {
    pub(super) fn new(
        place: Option<Folder>,
        location: String,
        rules: Rules,
        done: mpsc::UnboundedSender<Done>,
        way: Way,
    ) -> Keeping {
        Keeping {
            place: place.map(Arc::new),
            location,
            rules,
            link: 0,
            arriving: None,
            looker: None,
            reading: None,
            again: Again::default(),
            verified: BTreeSet::new(),
            unread: Unread::new(),
            done,
            way,
        }
    }

    /// News for the agent on a new link.
    pub(super) fn link_up(&mut self) -> Vec<KeepNews> {
        self.link += 1;
        self.arriving = None;
        if self.place.is_none() {
            return Vec::new();
        }
        let store = self.location.clone();
        let fits = !store.is_empty() && store.len() <= MAX_PATH;
        let place = fits.then_some(KeepNews::Place { store });
        let rules = KeepNews::Rules(self.rules.logged());
        place.into_iter().chain([rules]).collect()
    }

    /// The agent asks; an answer at once where nothing can be done.
    pub(super) fn ask(&mut self, review: Review) -> Option<KeepNews> {
        let whole = match self.arriving.take() {
            Some(mut so_far) if so_far.round == review.round => {
                so_far.commits.extend(review.commits);
                so_far.last = review.last;
                so_far
            }
            _ => review,
        };
        let round = whole.round;
        let failed = |why: &str| {
            let why = why.to_owned();
            Some(KeepNews::Failed { round, why })
        };
        if whole.commits.len() > MAX_COMMITS {
            return failed("the log has too many checkpoints");
        }
        if !whole.last {
            self.arriving = Some(whole);
            return None;
        }
        let mut commits = whole.commits;
        for of in &mut commits {
            let manifest = of.commit.manifest;
            if of.verified {
                // Somebody else has read it, or all ranks have loaded it.
                self.unread.remove(&manifest);
            }
            of.verified |= self.verified.contains(&manifest);
        }
        let task = Task::Review {
            link: self.link,
            round,
            newest: whole.generation,
            commits,
            unread: self.unread.clone(),
        };
        match self.add(task) {
            true => None,
            false => failed("this launcher has no store, or cannot start a thread"),
        }
    }

    /// Deletes something, after what was asked before.
    pub(super) fn delete(&mut self, name: String) {
        // Nobody waits for it: what stays is named again.
        self.add(Task::Delete(name));
    }

    fn add(&mut self, task: Task) -> bool {
        let Some(place) = &self.place else {
            return false;
        };
        if self.looker.is_none() {
            let (place, rules, done) = (Arc::clone(place), self.rules.clone(), self.done.clone());
            let (tasks, queue) = channel();
            let thread = std::thread::Builder::new().name("keeping".into());
            let spawned = thread.spawn(move || look(&queue, &place, &rules, &done));
            self.looker = spawned.ok().map(|_| tasks);
        }
        self.looker.as_ref().is_some_and(|l| l.send(task).is_ok())
    }

    /// A thread is through: what the agent is told, and people.
    pub(super) fn finished(&mut self, word: Word) -> (Vec<KeepNews>, Option<String>) {
        match word.0 {
            Said::Reviewed { link, news, verify } => {
                if let Some((seq, manifest)) = verify {
                    self.read(seq, manifest);
                }
                match link == self.link {
                    true => (news, None),
                    false => (Vec::new(), None),
                }
            }
            Said::Verified {
                seq,
                manifest,
                state,
            } => {
                self.reading = None;
                self.remember(manifest, &state);
                let news = KeepNews::Checked {
                    seq,
                    manifest,
                    state,
                };
                (vec![news], None)
            }
            Said::LookedAgain { look, state } => {
                let Some((question, state)) = self.again.ended(look).zip(state) else {
                    return (Vec::new(), None);
                };
                self.remember(question.manifest, &state);
                let number = question.number;
                (vec![KeepNews::LookedAgain { number, state }], None)
            }
            Said::NotDeleted(text) => (Vec::new(), Some(text)),
        }
    }

    /// How a checkpoint was found when it was read: what is known is not read again, and again.
    fn remember(&mut self, manifest: Digest, state: &State) {
        match state {
            State::Verified => {
                self.unread.remove(&manifest);
                self.verified.insert(manifest);
            }
            State::Unreadable { .. } | State::Damaged { .. } => {
                self.verified.remove(&manifest);
                self.unread.insert(manifest, state.clone());
            }
            State::Unchecked => {}
        }
    }

    /// Looks again at a checkpoint that somebody found damaged, or could not read, as fast as it can: its job may
    /// wait for it. How far it is, or an answer at once where nothing can be done.
    pub(super) fn look_again(&mut self, question: Question) -> KeepNews {
        let number = question.number;
        let started = match &self.place {
            Some(place) => self.again.asked(question, place, &self.done),
            None => Err("this launcher has no store".to_owned()),
        };
        match started {
            Ok(read) => KeepNews::LooksAgain { number, read },
            Err(why) => {
                let state = State::Unreadable { why };
                KeepNews::LookedAgain { number, state }
            }
        }
    }

    /// Reads a whole checkpoint, one at a time.
    fn read(&mut self, seq: u64, manifest: Digest) {
        let Some(place) = self.place.clone().filter(|_| self.reading.is_none()) else {
            return;
        };
        let (done, way) = (self.done.clone(), self.way.clone());
        let read = move || {
            if let Err(error) = rustix::process::setpriority_process(None, NICE) {
                tracing::debug!(%error, "checkpoints are verified at the usual priority");
            }
            let said = Said::Verified {
                seq,
                manifest,
                state: read_whole(&place, manifest, &way),
            };
            // Nobody listens once the launcher ends.
            let _over = done.send(Done::Kept(Word(said)));
        };
        let thread = std::thread::Builder::new().name("verify".into());
        if thread.spawn(read).is_ok() {
            self.reading = Some(manifest);
        }
    }
}

/// How a checkpoint is found when all of it is read.
fn read_whole(place: &Folder, manifest: Digest, way: &Way) -> State {
    let depth = Depth::Everything { threads: 1 };
    let found = whole(place, manifest, depth, &|| way.give());
    found.unwrap_or_else(|error| {
        let why = short(words(&error));
        State::Unreadable { why }
    })
}

fn look(queue: &Receiver<Task>, place: &Folder, rules: &Rules, done: &mpsc::UnboundedSender<Done>) {
    // A manifest names the data: it stays while some of that does.
    let mut left = false;
    for task in queue {
        let said = match task {
            Task::Review {
                link,
                round,
                newest,
                commits,
                unread,
            } => {
                left = false;
                let found = review(place, rules, newest, &commits, &unread);
                let (news, verify) = answer(round, found);
                Said::Reviewed { link, news, verify }
            }
            Task::Delete(name) if left && name.starts_with("manifest/") => continue,
            Task::Delete(name) => match remove(place, &name) {
                Ok(()) => continue,
                Err(error) => {
                    left = true;
                    Said::NotDeleted(format!(
                        "{name} of the job's store is not deleted, and will be tried again: {error}"
                    ))
                }
            },
        };
        if done.send(Done::Kept(Word(said))).is_err() {
            return;
        }
    }
}

fn remove(place: &Folder, name: &str) -> io::Result<()> {
    muster_fault::point_on("keeping.delete", || name.to_owned());
    place.remove(name)?;
    muster_fault::point_on("keeping.deleted", || name.to_owned());
    Ok(())
}

fn answer(round: u32, found: Result<Reviewed, Unknown>) -> (Vec<KeepNews>, Option<(u64, Digest)>) {
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            let why = short(error.to_string());
            return (vec![KeepNews::Failed { round, why }], None);
        }
    };
    let mut news: Vec<KeepNews> = (found.seen.into_iter())
        .map(|seen| KeepNews::Looked {
            round,
            seq: seen.seq,
            // Of more it names none itself; the agent knows of these.
            needs: (seen.needs.into_iter().filter(|name| name.len() <= MAX_NAME))
                .take(MAX_NEEDS)
                .collect(),
            state: seen.state,
            gone: seen.gone,
        })
        .collect();
    news.extend(KeepNews::decided(round, &found.retire, &found.left));
    (news, found.verify)
}

#[cfg(test)]
mod tests;
