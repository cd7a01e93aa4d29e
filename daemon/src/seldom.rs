//! Log lines that somebody else can cause as often as he likes: one every ten seconds at most, with
//! the number of those that were left out.

use std::time::{Duration, Instant};

const EVERY: Duration = Duration::from_secs(10);

/// When the last line was written, and how many were not since.
#[derive(Debug, Default)]
pub(crate) struct Seldom {
    last: Option<Instant>,
    left_out: u64,
}

impl Seldom {
    /// How many were left out since the last line, if it is time for another one.
    pub(crate) fn due(&mut self) -> Option<u64> {
        self.due_at(Instant::now())
    }

    fn due_at(&mut self, now: Instant) -> Option<u64> {
        if self.last.is_some_and(|last| now - last < EVERY) {
            self.left_out += 1;
            return None;
        }
        self.last = Some(now);
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_in_ten_seconds_that_counts_the_others() {
        let (mut seldom, now) = (Seldom::default(), Instant::now());
        assert_eq!(seldom.due_at(now), Some(0));
        assert_eq!(seldom.due_at(now + EVERY / 2), None);
        assert_eq!(seldom.due_at(now + EVERY / 2), None);
        assert_eq!(seldom.due_at(now + EVERY), Some(2));
        assert_eq!(seldom.due_at(now + EVERY * 2), Some(0));
    }
}
