//! The state of the links: who cannot reach whom, and how bad the network is just now.

use super::rng::Rng;
use super::setup::NetSetup;

/// A connection between two agents, as both ends believe it to be.
#[derive(Clone, Copy, Debug, Default)]
pub struct Conn {
    pub up: bool,
    /// Counts its changes, so that what was planned for an earlier state is dropped.
    pub epoch: u32,
}

#[derive(Debug)]
pub struct Net {
    n: usize,
    cuts: Vec<u32>,
    slow: Vec<u64>,
    last: Vec<u64>,
    conns: Vec<Conn>,
    base: NetSetup,
    pub storm: Option<NetSetup>,
    /// Machines without power: they do not even refuse.
    pub dark: Vec<bool>,
}

impl Net {
    pub fn new(n: usize, base: NetSetup) -> Net {
        Net {
            n,
            cuts: vec![0; n * n],
            slow: vec![0; n * n],
            last: vec![0; n * n],
            conns: vec![Conn::default(); n * n],
            base,
            storm: None,
            dark: vec![false; n],
        }
    }

    fn at(&self, from: usize, to: usize) -> usize {
        from * self.n + to
    }

    pub fn cut(&mut self, from: usize, to: usize) {
        let at = self.at(from, to);
        self.cuts[at] += 1;
    }

    pub fn mend(&mut self, from: usize, to: usize) {
        let at = self.at(from, to);
        self.cuts[at] = self.cuts[at].saturating_sub(1);
    }

    pub fn slow(&mut self, from: usize, to: usize, by: u64) {
        let at = self.at(from, to);
        self.slow[at] = by;
    }

    /// All links are well from now on.
    pub fn heal(&mut self) {
        self.cuts.fill(0);
        self.slow.fill(0);
        self.storm = None;
        self.dark.fill(false);
        self.base.loss = 0;
        self.base.duplication = 0;
        self.base.reordering = 0;
    }

    /// Whether anything gets from one node to the other.
    pub fn passes(&self, from: usize, to: usize) -> bool {
        from == to || (self.cuts[self.at(from, to)] == 0 && !self.dark[from] && !self.dark[to])
    }

    pub fn two_way(&self, a: usize, b: usize) -> bool {
        self.passes(a, b) && self.passes(b, a)
    }

    pub fn conn(&mut self, a: usize, b: usize) -> &mut Conn {
        let at = self.at(a.min(b), a.max(b));
        &mut self.conns[at]
    }

    /// When a message that is sent now arrives, each of its copies; empty when it is lost.
    pub fn arrivals(&mut self, rng: &mut Rng, from: usize, to: usize, now: u64) -> Vec<u64> {
        let net = self.storm.unwrap_or(self.base);
        let at = self.at(from, to);
        if !self.passes(from, to) || rng.chance(net.loss) {
            return Vec::new();
        }
        let mut arrives = now + rng.delay(net.delay) + self.slow[at];
        if rng.chance(net.reordering) {
            arrives += rng.below(net.delay.saturating_mul(20).max(1));
        } else {
            // A stream keeps its order.
            arrives = arrives.max(self.last[at] + 1);
            self.last[at] = arrives;
        }
        let mut all = vec![arrives];
        if rng.chance(net.duplication) {
            all.push(arrives + rng.below(net.delay.saturating_mul(50).max(1)));
        }
        all
    }

    /// One way, without losses: for probes and resets.
    pub fn latency(&self, rng: &mut Rng, from: usize, to: usize) -> u64 {
        rng.delay(self.storm.unwrap_or(self.base).delay) + self.slow[self.at(from, to)]
    }
}
