use crate::record::Cause;
use crate::spec::JobSpec;
use crate::time::{Span, Time};
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Charge {
    Free,
    Job { used: u32 },
    Failed,
}
pub fn charge(spec: &JobSpec, used: u32, cause: Option<&Cause>) -> Charge {
    match cause {
        Some(Cause::WorkerFailed { .. }) if used >= spec.max_restarts => Charge::Failed,
        Some(Cause::WorkerFailed { .. }) => Charge::Job { used: used + 1 },
        _ => Charge::Free,
    }
}
#[derive(Clone, Copy, Debug, Default)]
pub struct Strikes {
    n: u32,
    until: Time,
}
impl Strikes {
    pub fn strike(&mut self, now: Time) {
        self.n += 1;
        self.until = now + Span::from_millis(500 << self.n.min(9));
    }
    pub fn readmit_at(&self) -> Time {
        self.until
    }
}
#[derive(Clone, Copy, Debug, Default)]
pub struct CrashLoop {
    n: u32,
}
impl CrashLoop {
    pub fn next_pause(&mut self, _now: Time, lived: Span) -> Span {
        if lived > Span::from_secs(10) {
            self.n = 0;
        }
        let p = if self.n == 0 {
            Span::ZERO
        } else {
            Span::from_millis((125 << self.n.min(7)).min(10_000))
        };
        self.n += 1;
        p
    }
}
