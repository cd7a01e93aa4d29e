//! Parts of one copy that are still to be got and checked, and the sources that can do it. This does no I/O.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::landing::{Landing, Part, cut};
use super::source::Source;
use super::{Digest, Thing, Want};

/// How long the sources that may still come are waited for, from when the first has the thing, before the only one
/// that is there checks its own parts. Survivors freeze a state of a GiB within some seconds of one another.
const OTHERS: Duration = Duration::from_secs(3);
/// Of so many parts for each connection none is asked for ahead: another one may have it sooner.
const LAST: usize = 3;

/// Why a copy is not whole.
pub(super) enum Missing {
    Differ(SocketAddr, SocketAddr),
    /// For so many bytes.
    NoRoom(u64),
    /// No source gives it. With the last one's words.
    Lost(Option<String>),
}

/// A part that has come and is not checked yet.
pub(super) struct Check<'a> {
    pub(super) part: Part<'a>,
    /// Of what has come.
    pub(super) digest: Digest,
    /// The source that gave it.
    pub(super) by: usize,
    /// The source that holds something else.
    pub(super) against: Option<SocketAddr>,
}

pub(super) enum Job<'a> {
    Get(Part<'a>),
    Check(Check<'a>),
}

impl Job<'_> {
    pub(super) fn ask(&self, source: &mut Source<'_>, thing: Thing) -> std::io::Result<()> {
        let (want, part) = match self {
            Job::Get(part) => (Want::Bytes, part),
            Job::Check(check) => (Want::Digest, &check.part),
        };
        source.ask(thing, want, (part.from, part.len))
    }
}

/// The whole, once a source has told its length.
struct Whole {
    bytes: u64,
    /// The source that told it.
    by: SocketAddr,
    since: Instant,
}

/// One source.
#[derive(Clone)]
struct Standing {
    /// Connections that still answer.
    alive: usize,
    /// It has not joined, and may.
    may_come: bool,
}

pub(super) struct Todo<'a> {
    /// Until the length is known.
    landing: Option<&'a mut dyn Landing>,
    whole: Option<Whole>,
    parts: Vec<Part<'a>>,
    checks: Vec<Check<'a>>,
    /// Number of jobs that some source is busy with, which may come back.
    pub(super) busy: usize,
    sources: Vec<Standing>,
    said: Option<String>,
    failure: Option<Missing>,
}

impl<'a> Todo<'a> {
    pub(super) fn new(sources: usize, landing: &'a mut dyn Landing) -> Todo<'a> {
        let unknown = Standing {
            alive: 0,
            may_come: true,
        };
        Todo {
            landing: Some(landing),
            whole: None,
            parts: Vec::new(),
            checks: Vec::new(),
            busy: 0,
            sources: vec![unknown; sources],
            said: None,
            failure: None,
        }
    }

    /// The length of the whole, once it is known.
    pub(super) fn total(&self) -> Option<u64> {
        self.whole.as_ref().map(|whole| whole.bytes)
    }

    /// A connection with a source that has the thing, of this length, does its share from now on. The first makes
    /// room for it. False if it must not: the copy has failed.
    pub(super) fn join(&mut self, source: usize, at: SocketAddr, bytes: u64) -> bool {
        match &self.whole {
            Some(whole) if whole.bytes != bytes => {
                let one = whole.by;
                self.fail(Missing::Differ(one, at));
                return false;
            }
            Some(_) => {}
            None => {
                let landing = self.landing.take();
                let len = usize::try_from(bytes).ok();
                let places = len.and_then(|len| landing?.places(len));
                let Some(parts) = places.and_then(|places| cut(places, bytes)) else {
                    self.fail(Missing::NoRoom(bytes));
                    return false;
                };
                self.parts = parts;
                self.whole = Some(Whole {
                    bytes,
                    by: at,
                    since: Instant::now(),
                });
            }
        }
        let standing = &mut self.sources[source];
        standing.alive += 1;
        standing.may_come = false;
        self.failure.is_none()
    }

    /// How many connections this source is to have, so that there are `all` together. Sources that may come are
    /// counted.
    pub(super) fn streams(&self, source: usize, all: usize) -> usize {
        let counts = |of: &&Standing| of.may_come || of.alive > 0;
        let before = self.sources[..source].iter().filter(counts).count();
        let sources = self.sources.iter().filter(counts).count().max(1);
        // The first of them have one more, if it does not come out even.
        (all.saturating_sub(before)).div_ceil(sources).max(1)
    }

    /// This source is connected, and has nothing yet.
    pub(super) fn may_come(&mut self, source: usize) {
        self.sources[source].may_come = true;
    }

    /// This source is not waited for.
    pub(super) fn without(&mut self, source: usize) {
        self.sources[source].may_come = false;
    }

    pub(super) fn say(&mut self, said: String) {
        self.said = Some(said);
    }

    /// The next job for this source: checks first, so that a difference ends the copy early. Of the last parts
    /// none ahead: others may have them sooner.
    pub(super) fn next(&mut self, source: usize, asked: usize) -> Option<Job<'a>> {
        let alone = self.is_alone();
        let may_check = |check: &Check<'_>| match check.against {
            None => check.by != source || alone,
            Some(_) => check.by == source,
        };
        let streams: usize = self.sources.iter().map(|of| of.alive).sum();
        let job = match self.checks.iter().position(may_check) {
            Some(at) => Job::Check(self.checks.swap_remove(at)),
            None if asked > 0 && self.parts.len() < LAST * streams => return None,
            None => Job::Get(self.parts.pop()?),
        };
        self.busy += 1;
        Some(job)
    }

    /// Whether one source is left, and none may come any more. While there are parts to get, there is time for it.
    fn is_alone(&self) -> bool {
        let alive = self.sources.iter().filter(|of| of.alive > 0).count();
        let coming = self.sources.iter().any(|of| of.may_come);
        let waits = coming && (!self.parts.is_empty() || self.has_time());
        alive == 1 && !waits
    }

    /// Whether those that may come are still waited for.
    fn has_time(&self) -> bool {
        let since = self.whole.as_ref().map(|whole| whole.since);
        since.is_none_or(|since| since.elapsed() < OTHERS)
    }

    /// Nobody can say any more what a source held that is lost: what is disputed about it comes anew.
    pub(super) fn put(&mut self, check: Check<'a>) {
        if check.against.is_some() && self.sources[check.by].alive == 0 {
            self.parts.push(check.part);
        } else {
            self.checks.push(check);
        }
    }

    pub(super) fn put_back(&mut self, job: Job<'a>) {
        match job {
            Job::Get(part) => self.parts.push(part),
            Job::Check(check) => self.put(check),
        }
    }

    fn is_whole(&self) -> bool {
        let left = self.busy + self.parts.len() + self.checks.len();
        self.whole.is_some() && left == 0
    }

    /// Whether nobody can do any more: it is whole, or failed, or nobody is left who has it, nor will in time.
    pub(super) fn is_over(&self) -> bool {
        let may = |of: &Standing| of.alive > 0 || of.may_come && self.has_time();
        let deserted = self.whole.is_some() && !self.sources.iter().any(may);
        self.failure.is_some() || self.is_whole() || deserted
    }

    /// A connection gives no more.
    pub(super) fn lose(&mut self, source: usize, said: String) {
        self.sources[source].alive -= 1;
        for check in std::mem::take(&mut self.checks) {
            self.put(check);
        }
        self.say(said);
    }

    pub(super) fn fail(&mut self, why: Missing) {
        self.failure.get_or_insert(why);
    }

    /// Outcome of the copy.
    pub(super) fn outcome(self) -> Result<(), Missing> {
        match self.failure {
            Some(failure) => Err(failure),
            // What one source did not give another one did.
            None if self.is_whole() => Ok(()),
            None => Err(Missing::Lost(self.said)),
        }
    }
}
