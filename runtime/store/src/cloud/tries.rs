//! Tries of one request: how often, how long, and what is known when they are over.

use std::time::Duration;

use tokio::time::Instant;

use super::Cloud;
use super::judge::{Failure, judge};
use super::wire::{Seen, Trace};
use crate::error::{Kind, StoreError};
use crate::options::Patience;

/// The most bytes of an answer that is neither an object nor a listing.
pub(super) const ANSWER: u64 = 1 << 20;

/// An operation to try, for its bounds and its errors.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task<'t> {
    pub(super) doing: &'static str,
    pub(super) name: &'t str,
    /// Bytes that go to or come from the store.
    pub(super) bytes: u64,
    /// The most bytes of an answer's body.
    pub(super) limit: u64,
    /// Whether a failed try may have changed something.
    pub(super) changes: bool,
}

/// The pauses of one request, and the end of its tries.
#[derive(Debug)]
pub(super) struct Tries {
    patience: Patience,
    deadline: Instant,
    once: Duration,
    pub(super) done: u32,
    pause: Duration,
}

impl Tries {
    pub(super) fn new(patience: Patience, bytes: u64) -> Self {
        Self {
            patience,
            deadline: Instant::now() + patience.total_for(bytes),
            once: patience.once_for(bytes),
            done: 0,
            pause: patience.pause,
        }
    }

    /// For a question on whose answer the next step depends: what time is left, and that of one try
    /// when it is over.
    pub(super) fn question(&self) -> Patience {
        let left = self.deadline.saturating_duration_since(Instant::now());
        Patience {
            tries: 2,
            total: left.max(self.patience.once),
            ..self.patience
        }
    }

    /// How long the next try may take.
    fn next(&mut self) -> Duration {
        self.done += 1;
        let left = self.deadline.saturating_duration_since(Instant::now());
        self.once.min(left)
    }

    /// Waits before another try; `false`, at once, where there is none.
    pub(super) async fn again(&mut self, asked: Option<Duration>) -> bool {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if self.done >= self.patience.tries || left.is_zero() {
            return false;
        }
        let pause = self.pause.mul_f64(rand::random_range(0.5..=1.0));
        let pause = pause.max(asked.unwrap_or_default());
        self.pause = (self.pause * 2).min(self.patience.pause_limit);
        if pause >= left {
            return false;
        }
        tokio::time::sleep(pause).await;
        true
    }
}

impl Cloud {
    /// One try, with what was seen.
    pub(super) async fn once<T>(
        &self,
        tries: &mut Tries,
        limit: u64,
        run: impl Future<Output = object_store::Result<T>>,
    ) -> Result<(T, Seen), Failure> {
        let trace = Trace::new(limit);
        let outcome = tokio::time::timeout(tries.next(), trace.of(run)).await;
        let seen = trace.seen();
        if let Some(server) = seen
            .answer
            .as_ref()
            .and_then(|answer| answer.server.clone())
        {
            self.note_server(server);
        }
        match outcome {
            Ok(Ok(value)) => Ok((value, seen)),
            Ok(Err(error)) => Err(judge(self.flavour(), &seen, Some(&error))),
            Err(_) => Err(judge(self.flavour(), &seen, None)),
        }
    }

    /// As many tries as patience allows, of something that may be repeated.
    pub(super) async fn tries<T, F>(
        &self,
        task: Task<'_>,
        mut run: impl FnMut() -> F,
    ) -> Result<(T, Seen), StoreError>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let mut tries = Tries::new(self.patience(), task.bytes);
        let mut open = false;
        loop {
            let failure = match self.once(&mut tries, task.limit, run()).await {
                Ok(done) => return Ok(done),
                Err(failure) => failure,
            };
            open |= failure.open;
            if !failure.kind.passes() || !tries.again(failure.pause).await {
                return Err(self.failed(task, &tries, failure, open));
            }
        }
    }

    pub(super) fn failed(
        &self,
        task: Task<'_>,
        tries: &Tries,
        failure: Failure,
        open: bool,
    ) -> StoreError {
        StoreError {
            unknown: open && task.changes,
            tries: tries.done,
            ..self.error(failure.kind, task.doing, task.name)
        }
        .said(failure.said)
    }

    pub(super) fn error(&self, kind: Kind, doing: &'static str, name: &str) -> StoreError {
        StoreError::new(self.flavour(), kind, doing, self.shown(name))
    }
}
