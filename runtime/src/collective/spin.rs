//! How long a rank spins before it sleeps: only as long as that pays.

use std::time::{Duration, Instant};

/// Waits after which spinning is tried again, once it was given up.
const TRY_AGAIN: u32 = 64;
/// Below this it is given up: about what a sleep and a wake-up cost.
const LEAST: Duration = Duration::from_micros(5);

/// Spinning hides the wake-up when the others run at the same time, and takes a core from them when they
/// do not. Which of both holds shows at each wait: each one in vain halves the time for the next.
#[derive(Debug)]
pub(super) struct Spin {
    most: Duration,
    now: Duration,
    skipped: u32,
}

impl Spin {
    pub(super) fn new(most: Duration) -> Spin {
        Spin {
            most,
            now: most,
            skipped: 0,
        }
    }

    /// The time for the wait that begins now.
    pub(super) fn budget(&mut self) -> Duration {
        if self.now.is_zero() && !self.most.is_zero() {
            self.skipped += 1;
            if self.skipped >= TRY_AGAIN {
                self.skipped = 0;
                return self.most;
            }
        }
        self.now
    }

    /// How it went: whether what was waited for came while spinning.
    pub(super) fn learn(&mut self, in_time: bool) {
        self.now = match (in_time, self.now / 2) {
            (true, _) => self.most,
            (false, half) if half < LEAST => Duration::ZERO,
            (false, half) => half,
        };
    }

    /// Tries for a while, if it pays. True: it has come.
    pub(super) fn until(&mut self, mut came: impl FnMut() -> bool) -> bool {
        if came() {
            return true;
        }
        let budget = self.budget();
        if budget.is_zero() {
            return false;
        }
        let began = Instant::now();
        while began.elapsed() < budget {
            for _ in 0..32 {
                std::hint::spin_loop();
                if came() {
                    self.learn(true);
                    return true;
                }
            }
        }
        self.learn(false);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_given_up_in_vain_and_tried_again() {
        let most = Duration::from_micros(20);
        let mut spin = Spin::new(most);
        for _ in 0..3 {
            assert!(!spin.budget().is_zero());
            spin.learn(false);
        }
        let tried = (0..TRY_AGAIN).filter(|_| !spin.budget().is_zero()).count();
        assert_eq!(tried, 1);
        spin.learn(true);
        assert_eq!(spin.budget(), most);
        assert!(spin.until(|| true));
        let mut never = Spin::new(Duration::ZERO);
        assert!((0..2 * TRY_AGAIN).all(|_| never.budget().is_zero()));
    }
}
