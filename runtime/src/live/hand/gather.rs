//! The parts of one copy, from several sources at once, until each is checked.
//!
//! A part that has come is compared, by its digest, with what another source holds. Where both agree, both are
//! right. Where they do not, who gave the part is asked for its own digest: if that is the one of what came, the
//! two hold different states, and no copy is made; if it is not, the part was damaged on its way, comes anew, and
//! that connection gives no more. The last source that is left is asked about its own parts, which finds damage alone.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::landing::Part;
use super::source::{Source, not_right};
use super::{Digest, Thing, Want, lock};

/// How long a source with nothing to do waits, at most, before it looks whether the copy is still wanted.
const LOOK: Duration = Duration::from_millis(20);

/// So many parts and checks are asked for before the first of them is taken in.
const AHEAD: usize = 3;

/// Why a copy is not whole.
pub(super) enum Missing {
    Differ(SocketAddr, SocketAddr),
    Io(io::Error),
}

/// A part that has come and is not checked yet.
struct Check<'a> {
    part: Part<'a>,
    /// Of what has come.
    digest: Digest,
    /// The source that gave it.
    by: usize,
    /// The source that holds something else.
    against: Option<SocketAddr>,
}

enum Job<'a> {
    Get(Part<'a>),
    Check(Check<'a>),
}

impl Job<'_> {
    fn ask(&self, source: &mut Source, thing: Thing) -> io::Result<()> {
        let (want, part) = match self {
            Job::Get(part) => (Want::Bytes, part),
            Job::Check(check) => (Want::Digest, &check.part),
        };
        source.ask(thing, want, (part.from, part.len))
    }
}

struct Todo<'a> {
    parts: Vec<Part<'a>>,
    checks: Vec<Check<'a>>,
    /// What some source is busy with, which may come back.
    busy: usize,
    /// Connections of each source that still answer.
    alive: Vec<usize>,
    failure: Option<Missing>,
}

impl<'a> Todo<'a> {
    /// What this source is asked for next: checks first, so that a difference ends the copy early. Of the last parts
    /// none ahead: others may have them sooner.
    fn next(&mut self, source: usize, asked: usize) -> Option<Job<'a>> {
        let alone = self.alive.iter().filter(|alive| **alive > 0).count() == 1;
        let may_check = |check: &Check<'_>| match check.against {
            None => check.by != source || alone,
            Some(_) => check.by == source,
        };
        let job = match self.checks.iter().position(may_check) {
            Some(at) => Job::Check(self.checks.swap_remove(at)),
            None if asked > 0 && self.parts.len() < AHEAD * self.alive.len() => return None,
            None => Job::Get(self.parts.pop()?),
        };
        self.busy += 1;
        Some(job)
    }

    /// Nobody can say any more what a source held that is lost: what is disputed about it comes anew.
    fn put(&mut self, check: Check<'a>) {
        if check.against.is_some() && self.alive[check.by] == 0 {
            self.parts.push(check.part);
        } else {
            self.checks.push(check);
        }
    }

    fn put_back(&mut self, job: Job<'a>) {
        match job {
            Job::Get(part) => self.parts.push(part),
            Job::Check(check) => self.put(check),
        }
    }

    fn is_over(&self) -> bool {
        let differ = matches!(self.failure, Some(Missing::Differ(..)));
        differ || self.busy == 0 && self.parts.is_empty() && self.checks.is_empty()
    }

    fn lose(&mut self, source: usize, error: io::Error) {
        self.alive[source] -= 1;
        for check in std::mem::take(&mut self.checks) {
            self.put(check);
        }
        self.failure.get_or_insert(Missing::Io(error));
    }
}

/// All sources' work on one copy.
pub(super) struct Gather<'a> {
    thing: Thing,
    total: u64,
    todo: Mutex<Todo<'a>>,
    changed: Condvar,
}

impl<'a> Gather<'a> {
    pub(super) fn new(thing: Thing, total: u64, parts: Vec<Part<'a>>) -> Gather<'a> {
        let todo = Todo {
            parts,
            checks: Vec::new(),
            busy: 0,
            alive: Vec::new(),
            failure: None,
        };
        Gather {
            thing,
            total,
            todo: Mutex::new(todo),
            changed: Condvar::new(),
        }
    }

    /// Gets all parts, from whoever gives them, and has each one checked. Several connections may lead to one source.
    pub(super) fn run(self, streams: Vec<Source>, cancelled: &AtomicBool) -> Result<(), Missing> {
        let first = |of: &Source| streams.iter().position(|other| other.at == of.at);
        let numbers: Vec<usize> = streams.iter().filter_map(first).collect();
        let mut alive = vec![0; streams.len()];
        numbers.iter().for_each(|number| alive[*number] += 1);
        lock(&self.todo).alive = alive;
        std::thread::scope(|scope| {
            for (number, source) in numbers.into_iter().zip(streams) {
                let gather = &self;
                scope.spawn(move || gather.work(number, source, cancelled));
            }
        });
        let todo = self.todo.into_inner();
        let todo = todo.unwrap_or_else(PoisonError::into_inner);
        match todo.failure {
            Some(Missing::Differ(one, other)) => Err(Missing::Differ(one, other)),
            // What one source did not give another one did.
            _ if todo.parts.is_empty() && todo.checks.is_empty() => Ok(()),
            failure => Err(failure.unwrap_or(Missing::Io(io::ErrorKind::Interrupted.into()))),
        }
    }

    /// One connection's share: parts and checks while there are any. Some are asked for ahead, so that the source
    /// sends, or hashes, while what came before is taken in.
    fn work(&self, number: usize, mut source: Source, cancelled: &AtomicBool) {
        let mut asked = VecDeque::new();
        let mut todo = lock(&self.todo);
        while !cancelled.load(Ordering::Acquire) && !todo.is_over() {
            if asked.len() < AHEAD
                && let Some(job) = todo.next(number, asked.len())
            {
                drop(todo);
                let sent = job.ask(&mut source, self.thing);
                asked.push_back(job);
                todo = lock(&self.todo);
                match sent {
                    Ok(()) => continue,
                    Err(error) => {
                        todo.lose(number, error);
                        break;
                    }
                }
            }
            let Some(job) = asked.pop_front() else {
                todo = self.wait(todo);
                continue;
            };
            drop(todo);
            let done = self.answer(number, &mut source, job);
            todo = lock(&self.todo);
            todo.busy -= 1;
            match done {
                Done::Checked => {}
                Done::Check(check) => todo.put(check),
                Done::Differ(one, other) => todo.failure = Some(Missing::Differ(one, other)),
                Done::Lost(job, error) => {
                    todo.put_back(job);
                    todo.lose(number, error);
                    break;
                }
            }
            self.changed.notify_all();
        }
        // Others do what is not done.
        todo.busy -= asked.len();
        asked.into_iter().for_each(|job| todo.put_back(job));
        self.changed.notify_all();
    }

    fn wait<'g>(&self, todo: MutexGuard<'g, Todo<'a>>) -> MutexGuard<'g, Todo<'a>> {
        let waited = self.changed.wait_timeout(todo, LOOK);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Takes in the answer to what was asked.
    fn answer(&self, number: usize, source: &mut Source, job: Job<'a>) -> Done<'a> {
        let mut check = match job {
            Job::Check(check) => check,
            Job::Get(mut part) => {
                return match source.get(self.total, &mut part) {
                    Ok(digest) => Done::Check(Check {
                        part,
                        digest,
                        by: number,
                        against: None,
                    }),
                    Err(error) => Done::Lost(Job::Get(part), error),
                };
            }
        };
        let theirs = match source.digest(self.total) {
            Ok(theirs) => theirs,
            Err(error) => return Done::Lost(Job::Check(check), error),
        };
        match check.against {
            None if theirs == check.digest => Done::Checked,
            Some(other) if theirs == check.digest => Done::Differ(source.at, other),
            None if check.by != number => {
                check.against = Some(source.at);
                Done::Check(check)
            }
            // It does not hold what it gave.
            _ => Done::Lost(Job::Get(check.part), not_right()),
        }
    }
}

/// What has become of a job.
enum Done<'a> {
    Checked,
    Check(Check<'a>),
    Differ(SocketAddr, SocketAddr),
    /// The source is of no use any more.
    Lost(Job<'a>, io::Error),
}
