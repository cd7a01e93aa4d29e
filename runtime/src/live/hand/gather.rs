//! The parts of one copy, from several sources at once, until each is checked.
//!
//! Each source is asked on a thread of its own until it has the thing; the first that does tells its length, which
//! makes room for it, and the others join when they have it.
//!
//! A part that has come is compared, by its digest, with what another source holds. Where both agree, both are
//! right. Where they do not, who gave the part is asked for its own digest: if that is the one of what came, the
//! two hold different states, and no copy is made; if it is not, the part was damaged on its way, comes anew, and
//! that connection gives no more. The last source that is left is asked about its own parts, which finds damage alone;
//! but not before those that may still come have had some seconds to do so.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, Scope};
use std::time::Duration;

use super::fetch::AGAIN;
use super::landing::PART;
use super::source::{Source, Wanted, not_right};
use super::todo::{Check, Job, Missing, Todo};
use super::{Landing, TOKEN_LEN, Thing, Want, lock};

/// How long a source with nothing to do waits, at most, before it looks whether the copy is still wanted.
const LOOK: Duration = Duration::from_millis(20);
/// So many parts and checks are asked for before the first of them is taken in.
const AHEAD: usize = 3;
/// Connections of a copy, where there are fewer sources: one is hashed on while another is read from.
const STREAMS: usize = 3;

/// Sources that do not have it yet, each with its connection.
type Asked<'a> = VecDeque<(usize, Option<Source<'a>>)>;

/// All sources' work on one copy.
pub(super) struct Gather<'a> {
    thing: Thing,
    sources: &'a [SocketAddr],
    token: [u8; TOKEN_LEN],
    wanted: &'a Wanted<'a>,
    todo: Mutex<Todo<'a>>,
    changed: Condvar,
}

impl<'a> Gather<'a> {
    pub(super) fn new(
        thing: Thing,
        sources: &'a [SocketAddr],
        token: [u8; TOKEN_LEN],
        wanted: &'a Wanted<'a>,
        landing: &'a mut dyn Landing,
    ) -> Gather<'a> {
        Gather {
            thing,
            sources,
            token,
            wanted,
            todo: Mutex::new(Todo::new(sources.len(), landing)),
            changed: Condvar::new(),
        }
    }

    /// Gets all parts, from whoever gives them, and has each one checked.
    pub(super) fn run(self) -> Result<(), Missing> {
        if let Some(last) = self.sources.len().checked_sub(1) {
            std::thread::scope(|scope| {
                // So one is asked even where no thread is to be had, and then those without one by turns.
                let mut own = VecDeque::from([(last, None)]);
                for number in 0..last {
                    let gather = &self;
                    let asked = VecDeque::from([(number, None)]);
                    let started = Builder::new()
                        .name("muster-source".into())
                        .spawn_scoped(scope, move || gather.attend(scope, asked));
                    if started.is_err() {
                        own.push_back((number, None));
                    }
                }
                self.attend(scope, own);
            });
        }
        let todo = self.todo.into_inner();
        todo.unwrap_or_else(PoisonError::into_inner).outcome()
    }

    /// Asks these sources until one has the thing, then has it do its share.
    fn attend<'s>(&'s self, scope: &'s Scope<'s, '_>, asked: Asked<'a>) {
        let Some((number, source, bytes)) = self.ready(asked) else {
            return;
        };
        let mut todo = lock(&self.todo);
        if !todo.join(number, source.at, bytes) {
            self.wanted.end();
            drop(todo);
            self.changed.notify_all();
            return;
        }
        let streams = if bytes > PART {
            todo.streams(number, STREAMS)
        } else {
            1
        };
        drop(todo);
        // There is a first one now, or somebody who can check.
        self.changed.notify_all();
        for _ in 1..streams {
            // With no more of them it takes longer.
            let _fewer = Builder::new()
                .name("muster-stream".into())
                .spawn_scoped(scope, move || self.again(number, bytes));
        }
        self.work(number, source, bytes);
    }

    /// Another connection with a source, which has the thing.
    fn again(&self, number: usize, bytes: u64) {
        let at = self.sources[number];
        let connected = Source::connect(at, self.token, self.wanted).and_then(|mut source| {
            // Asked at once: who proves nothing is sent away.
            source.ask(self.thing, Want::Length, (0, 0))?;
            Ok((source.length()? == Some(bytes)).then_some(source))
        });
        if let Ok(Some(source)) = connected {
            if !lock(&self.todo).join(number, at, bytes) {
                return;
            }
            self.work(number, source, bytes);
        }
    }

    /// Asks them by turns until one has the thing. `None`: all are lost, or nobody waits for it any more.
    fn ready(&self, mut asked: Asked<'a>) -> Option<(usize, Source<'a>, u64)> {
        while let Some((number, kept)) = asked.pop_front() {
            let at = self.sources[number];
            let connected = kept.map_or_else(|| Source::connect(at, self.token, self.wanted), Ok);
            let answer = connected.and_then(|mut source| {
                source.ask(self.thing, Want::Length, (0, 0))?;
                let bytes = source.length()?;
                Ok((source, bytes))
            });
            // What ends with the copy tells nothing.
            if answer.is_err() && self.wanted.is_over() {
                break;
            }
            let mut todo = lock(&self.todo);
            match answer {
                Ok((source, Some(bytes))) => {
                    // The others would need a thread of their own.
                    asked.iter().for_each(|other| todo.without(other.0));
                    return Some((number, source, bytes));
                }
                Ok((source, None)) => {
                    todo.say(format!("{at} does not have it yet"));
                    todo.may_come(number);
                    asked.push_back((number, Some(source)));
                }
                Err(error) => {
                    todo.say(format!("{at}: {error}"));
                    todo.without(number);
                    // Where others have it, it is not waited for.
                    if todo.total().is_none() {
                        asked.push_back((number, None));
                    }
                }
            }
            if todo.is_over() {
                self.wanted.end();
            }
            drop(todo);
            std::thread::sleep(AGAIN);
        }
        None
    }

    /// One connection's share: parts and checks while there are any. Some are asked for ahead, so that the source
    /// sends, or hashes, while what came before is taken in.
    fn work(&self, number: usize, mut source: Source<'_>, total: u64) {
        let mut asked = VecDeque::new();
        let mut todo = lock(&self.todo);
        while !self.wanted.is_over() {
            if todo.is_over() {
                self.wanted.end();
                break;
            }
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
                        todo.lose(number, format!("{}: {error}", source.at));
                        break;
                    }
                }
            }
            let Some(job) = asked.pop_front() else {
                todo = self.wait(todo);
                continue;
            };
            drop(todo);
            let done = answer(number, &mut source, job, total);
            todo = lock(&self.todo);
            todo.busy -= 1;
            match done {
                Done::Checked => {}
                Done::Check(check) => todo.put(check),
                Done::Differ(one, other) => todo.fail(Missing::Differ(one, other)),
                Done::Lost(job, error) => {
                    todo.put_back(job);
                    todo.lose(number, format!("{}: {error}", source.at));
                    break;
                }
            }
            self.changed.notify_all();
        }
        // Others do what is not done.
        todo.busy -= asked.len();
        asked.into_iter().for_each(|job| todo.put_back(job));
        if todo.is_over() {
            self.wanted.end();
        }
        self.changed.notify_all();
    }

    fn wait<'g>(&self, todo: MutexGuard<'g, Todo<'a>>) -> MutexGuard<'g, Todo<'a>> {
        let waited = self.changed.wait_timeout(todo, LOOK);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// Outcome of a job.
enum Done<'a> {
    Checked,
    Check(Check<'a>),
    Differ(SocketAddr, SocketAddr),
    /// The source is of no use any more.
    Lost(Job<'a>, io::Error),
}

/// Takes in the answer to what was asked.
fn answer<'a>(number: usize, source: &mut Source<'_>, job: Job<'a>, total: u64) -> Done<'a> {
    let mut check = match job {
        Job::Check(check) => check,
        Job::Get(mut part) => {
            return match source.get(total, &mut part) {
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
    let theirs = match source.digest(total) {
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
