//! I14: all ranks of a generation stop at one confirmed step, or none does. By every interleaving
//! of small cases, with messages in any order, lost, repeated, nodes lost, agents restarted.

mod checkpoint;
mod takeover;

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::*;
use crate::ids::NodeId;
use crate::local::ToLauncher;
use crate::time::Time;

const GENERATION: Digest = Digest([9; 32]);

fn node(n: usize) -> NodeId {
    NodeId([n as u8 + 1; 32])
}

fn secs(n: u64) -> Time {
    Time::ZERO + Span::from_secs(n)
}

fn drain(step: u64, deadline: Time) -> LeaderEvent {
    LeaderEvent::Drain {
        step,
        deadline,
        save_time: Span::from_secs(1),
        reason: Reason::Preemption,
    }
}

/// A launcher with its ranks' steps: they wait at an installed step.
#[derive(Clone, Debug)]
struct Host {
    core: Node,
    ranks: Vec<u64>,
    page: Option<(u32, u64)>,
    confirmed: Option<u64>,
    done: u32,
    lost: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Packet {
    Down(usize, ToNode),
    Up(usize, ToLeader),
    /// The launcher's answer.
    Installed(usize, u32, u64),
}

/// Faults that may still occur.
#[derive(Clone, Copy, Debug, Hash)]
struct Budget {
    drops: u8,
    repeats: u8,
    resends: u8,
    losses: u8,
    restarts: u8,
    /// Further drains while the barrier is open, and after it was cancelled.
    joins: u8,
    again: u8,
}

const NONE: Budget = Budget {
    drops: 0,
    repeats: 0,
    resends: 0,
    losses: 0,
    restarts: 0,
    joins: 0,
    again: 0,
};

#[derive(Clone, Debug)]
struct Model {
    leader: Leader,
    hosts: Vec<Host>,
    packets: Vec<Packet>,
    budget: Budget,
    now: Time,
    /// No rank runs further: keeps the model finite.
    cap: u64,
    /// Planted: ranks do not wait at an installed step.
    runs_past: bool,
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Deliver(usize),
    Drop(usize),
    Repeat(usize),
    Step(usize, usize),
    Resend,
    Deadline,
    Join,
    Again,
    Lose(usize),
    Restart(usize),
}

impl Model {
    fn new(ranks: &[usize], cap: u64, budget: Budget) -> Model {
        let mut model = Model {
            leader: Leader::new(GENERATION, (0..ranks.len()).map(node), 0),
            hosts: ranks
                .iter()
                .map(|ranks| Host {
                    core: Node::new(GENERATION),
                    ranks: vec![0; *ranks],
                    page: None,
                    confirmed: None,
                    done: 0,
                    lost: false,
                })
                .collect(),
            packets: Vec::new(),
            budget,
            now: secs(1),
            cap,
            runs_past: false,
        };
        model.leader.handle(drain(1, secs(60)), model.now).unwrap();
        model.flush();
        model
    }

    fn actions(&self) -> Vec<Action> {
        let mut all = Vec::new();
        for at in 0..self.packets.len() {
            // Equal packets need only one turn.
            if at > 0 && self.packets[at] == self.packets[at - 1] {
                continue;
            }
            all.push(Action::Deliver(at));
            if self.budget.drops > 0 {
                all.push(Action::Drop(at));
            }
            if self.budget.repeats > 0 {
                all.push(Action::Repeat(at));
            }
        }
        for (h, host) in self.hosts.iter().enumerate().filter(|(_, h)| !h.lost) {
            for (r, step) in host.ranks.iter().enumerate() {
                let limit = match host.page {
                    Some((_, at)) if !self.runs_past => at.min(self.cap),
                    _ => self.cap,
                };
                if *step < limit {
                    all.push(Action::Step(h, r));
                }
            }
            // The nodes of that case are alike: to lose the first is to lose any.
            if self.budget.losses > 0 && h == 0 {
                all.push(Action::Lose(h));
            }
            if self.budget.restarts > 0 {
                all.push(Action::Restart(h));
            }
        }
        let timer = self.leader.poll_timeout();
        if self.budget.resends > 0 && timer.is_some_and(|(_, why)| why == "stop resend") {
            all.push(Action::Resend);
        }
        if self.leader.poll_timeout().is_some() && self.leader.confirmed().is_none() {
            all.push(Action::Deadline);
        }
        let open = self.leader.resend_at.is_some() && self.leader.confirmed().is_none();
        if self.budget.joins > 0 && open && !self.cancelled() {
            all.push(Action::Join);
        }
        if self.budget.again > 0 && self.cancelled() {
            all.push(Action::Again);
        }
        all
    }

    fn apply(&mut self, action: Action) {
        match action {
            Action::Deliver(at) => {
                let packet = self.packets.remove(at);
                self.deliver(packet);
            }
            Action::Drop(at) => {
                self.budget.drops -= 1;
                self.packets.remove(at);
            }
            Action::Repeat(at) => {
                self.budget.repeats -= 1;
                let packet = self.packets[at].clone();
                self.deliver(packet);
            }
            Action::Step(h, r) => self.hosts[h].ranks[r] += 1,
            Action::Resend => {
                self.budget.resends -= 1;
                let (at, _) = self.leader.poll_timeout().unwrap();
                self.now = self.now.max(at);
                self.leader.handle_timeout(self.now);
            }
            Action::Deadline => self.leader.handle_timeout(secs(59)),
            Action::Join => {
                self.budget.joins -= 1;
                self.leader.handle(drain(1, secs(30)), self.now).unwrap();
            }
            Action::Again => {
                self.budget.again -= 1;
                self.leader.handle(drain(1, secs(60)), self.now).unwrap();
            }
            Action::Lose(h) => {
                self.budget.losses -= 1;
                self.hosts[h].lost = true;
                let to = |p: &Packet| match p {
                    Packet::Down(at, _) | Packet::Installed(at, ..) => *at == h,
                    Packet::Up(..) => false,
                };
                self.packets.retain(|p| !to(p));
                let node = node(h);
                let lost = LeaderEvent::NodeLost { node };
                self.leader.handle(lost, self.now).unwrap();
            }
            Action::Restart(h) => {
                self.budget.restarts -= 1;
                self.hosts[h].core = Node::new(GENERATION);
                let gone = |p: &Packet| matches!(p, Packet::Installed(at, ..) if *at == h);
                self.packets.retain(|p| !gone(p));
            }
        }
        self.flush();
        self.packets.sort();
    }

    /// Refused messages are part of the game: they change nothing.
    fn deliver(&mut self, packet: Packet) {
        match packet {
            Packet::Down(to, _) if self.hosts[to].lost => {}
            Packet::Down(to, message) => {
                let _ = self.hosts[to]
                    .core
                    .handle(NodeEvent::Leader(message), self.now);
            }
            Packet::Up(from, message) => {
                let from = node(from);
                let _ = self
                    .leader
                    .handle(LeaderEvent::Message { from, message }, self.now);
            }
            Packet::Installed(to, barrier, step) => {
                let installed = NodeEvent::Installed {
                    digest: GENERATION,
                    barrier,
                    step,
                };
                let _ = self.hosts[to].core.handle(installed, self.now);
            }
        }
    }

    fn flush(&mut self) {
        while let Some(effect) = self.leader.poll_effect() {
            if let LeaderEffect::Send { to, message } = effect {
                let to = usize::from(to.0[0]) - 1;
                self.packets.push(Packet::Down(to, message));
            }
        }
        for h in 0..self.hosts.len() {
            while let Some(effect) = self.hosts[h].core.poll_effect() {
                match effect {
                    NodeEffect::ToLeader(message) => self.packets.push(Packet::Up(h, message)),
                    NodeEffect::ToLauncher(frame) => {
                        if let Some((barrier, step)) = self.hosts[h].launcher(frame) {
                            self.packets.push(Packet::Installed(h, barrier, step));
                        }
                    }
                }
            }
        }
    }

    fn check(&self) {
        let live = || self.hosts.iter().filter(|h| !h.lost);
        let steps: BTreeSet<u64> = self.hosts.iter().filter_map(|h| h.confirmed).collect();
        assert!(steps.len() <= 1, "two confirmed steps: {self:#?}");
        let confirmed = self.leader.confirmed();
        if let Some(step) = steps.first() {
            assert_eq!(confirmed, Some(*step), "confirmed by nobody: {self:#?}");
        }
        if let Some(step) = confirmed {
            for rank in live().flat_map(|h| &h.ranks) {
                assert!(
                    *rank <= step,
                    "a rank ran past the confirmed step: {self:#?}"
                );
            }
        }
    }

    /// Nothing is under way and nobody is owed an answer.
    fn check_end(&self) -> bool {
        if self.leader.poll_timeout().is_some() {
            return false;
        }
        for host in self.hosts.iter().filter(|h| !h.lost) {
            match self.leader.confirmed() {
                Some(step) => {
                    assert_eq!(host.confirmed, Some(step), "not told: {self:#?}");
                    assert!(
                        host.ranks.iter().all(|r| *r == step.min(self.cap)),
                        "{self:#?}"
                    );
                }
                None => assert_eq!(host.page, None, "still waits: {self:#?}"),
            }
        }
        true
    }

    fn cancelled(&self) -> bool {
        matches!(
            self.leader.phase,
            leader::Phase::Decided(Outcome::Cancelled(_))
        )
    }

    /// Names the state; no effect waits between two actions.
    fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        let leader = &self.leader;
        (
            leader.barrier,
            &leader.phase,
            &leader.nodes,
            leader.resend_at,
        )
            .hash(&mut hasher);
        for h in &self.hosts {
            (h.core.barrier, h.core.at, h.core.phase, &h.ranks).hash(&mut hasher);
            (h.core.before, h.core.void).hash(&mut hasher);
            (h.page, h.confirmed, h.done, h.lost).hash(&mut hasher);
        }
        (&self.packets, self.budget, self.now).hash(&mut hasher);
        hasher.finish()
    }

    /// Every state that can be reached; returns how many, and how many ends stopped and went on.
    fn explore(self) -> (usize, usize, usize) {
        let mut seen = BTreeSet::new();
        let mut todo = vec![self];
        let (mut stopped, mut went_on) = (0, 0);
        while let Some(model) = todo.pop() {
            if !seen.insert(model.key()) {
                continue;
            }
            assert!(seen.len() < 2_000_000, "the case is not small");
            model.check();
            let actions = model.actions();
            if actions.is_empty() && model.check_end() {
                match model.leader.confirmed() {
                    Some(_) => stopped += 1,
                    None => went_on += 1,
                }
            }
            for action in actions {
                let mut next = model.clone();
                next.apply(action);
                todo.push(next);
            }
        }
        (seen.len(), stopped, went_on)
    }
}

impl Host {
    /// Acts as the real launcher does, with its workers' pages, in one step.
    fn launcher(&mut self, frame: ToLauncher) -> Option<(u32, u64)> {
        match frame {
            ToLauncher::InstallStop { barrier, step, .. } => {
                let newest = self.page.map_or(0, |(b, _)| b).max(self.done);
                if barrier < newest || barrier == self.done || self.confirmed.is_some() {
                    return None;
                }
                let mut step = self.ranks.iter().copied().fold(step, u64::max);
                if let Some((same, at)) = self.page
                    && same == barrier
                {
                    step = step.max(at);
                }
                self.page = Some((barrier, step));
                self.page
            }
            ToLauncher::ConfirmStop { barrier, step, .. } => {
                assert_eq!(
                    self.page,
                    Some((barrier, step)),
                    "confirmed what is not installed"
                );
                self.confirmed = Some(step);
                None
            }
            ToLauncher::CancelStop { barrier, .. } => {
                assert_eq!(self.confirmed, None, "cancelled behind the confirm");
                self.done = self.done.max(barrier);
                if self.page.is_some_and(|(b, _)| b <= barrier) {
                    self.page = None;
                }
                None
            }
            other => panic!("not a barrier's frame: {other:?}"),
        }
    }
}

fn explore(ranks: &[usize], cap: u64, budget: Budget) {
    let (states, stopped, went_on) = Model::new(ranks, cap, budget).explore();
    assert!(
        states > 500 && stopped > 0 && went_on > 0,
        "{states} {stopped} {went_on}"
    );
}

#[test]
fn two_nodes_of_three_ranks_in_any_order() {
    explore(&[2, 1], 2, NONE);
}

#[test]
fn a_drain_that_joins_in_any_order() {
    let faults = Budget { joins: 1, ..NONE };
    explore(&[1, 1], 1, faults);
}

#[test]
fn a_drain_after_a_cancel_in_any_order() {
    let faults = Budget { again: 1, ..NONE };
    explore(&[1, 1], 1, faults);
}

#[test]
fn three_nodes_and_a_loss() {
    let faults = Budget { losses: 1, ..NONE };
    explore(&[1, 1, 1], 1, faults);
}

#[test]
fn a_lost_message_is_sent_again() {
    let faults = Budget {
        drops: 1,
        resends: 1,
        ..NONE
    };
    explore(&[1, 1], 1, faults);
}

#[test]
fn a_repeated_message_changes_nothing() {
    let faults = Budget { repeats: 1, ..NONE };
    explore(&[1, 1], 2, faults);
}

#[test]
fn an_agent_that_restarts() {
    let faults = Budget {
        restarts: 1,
        resends: 1,
        ..NONE
    };
    explore(&[1, 1], 1, faults);
}

#[test]
#[should_panic(expected = "ran past the confirmed step")]
fn the_checker_finds_ranks_that_do_not_wait() {
    let mut model = Model::new(&[1, 1], 3, NONE);
    model.runs_past = true;
    model.explore();
}

#[test]
fn a_drain_joins_then_shares() {
    let mut leader = Leader::new(GENERATION, [node(0)], 0);
    let now = secs(1);
    leader.handle(drain(5, secs(60)), now).unwrap();
    leader.handle(drain(9, secs(30)), now).unwrap();
    let mut graces = Vec::new();
    while let Some(effect) = leader.poll_effect() {
        match effect {
            LeaderEffect::Send {
                message: ToNode::Install { step, grace_ms, .. },
                ..
            } => graces.push((step, grace_ms)),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(graces, [(5, 59_000), (5, 29_000)]);
    let message = ToLeader::Installed {
        digest: GENERATION,
        barrier: 1,
        step: 5,
    };
    let from = node(0);
    leader
        .handle(LeaderEvent::Message { from, message }, now)
        .unwrap();
    let outcome = Outcome::Confirmed { step: 5 };
    let decided = LeaderEffect::Decided {
        barrier: 1,
        outcome,
    };
    assert_eq!(leader.poll_effect(), Some(decided));
    while leader.poll_effect().is_some() {}
    leader.handle(drain(20, secs(20)), now).unwrap();
    let shared = LeaderEffect::Shared {
        barrier: 1,
        step: 5,
    };
    assert_eq!(leader.poll_effect(), Some(shared));
    assert_eq!(leader.poll_effect(), None);
    // A stranger, another generation, another barrier.
    let from = node(7);
    let stranger = leader.handle(LeaderEvent::Message { from, message }, now);
    assert_eq!(stranger, Err(Error::NotAMember));
    for (digest, barrier) in [(Digest([1; 32]), 1), (GENERATION, 2)] {
        let message = ToLeader::Settled { digest, barrier };
        let from = node(0);
        assert!(
            leader
                .handle(LeaderEvent::Message { from, message }, now)
                .is_err()
        );
    }
}

#[test]
fn a_deadline_that_cannot_be_met_gives_up() {
    let mut leader = Leader::new(GENERATION, [node(0), node(1)], 0);
    leader.handle(drain(5, secs(4)), secs(1)).unwrap();
    // The resends end; the time is over one second, the save time, before the deadline.
    let mut last = secs(1);
    while let Some((at, _)) = leader.poll_timeout().filter(|(at, _)| *at <= secs(3)) {
        last = at;
        leader.handle_timeout(at);
        let outcome = Outcome::Cancelled(GivenUp::Deadline);
        let decided = LeaderEffect::Decided {
            barrier: 1,
            outcome,
        };
        if std::iter::from_fn(|| leader.poll_effect()).any(|e| e == decided) {
            break;
        }
    }
    assert_eq!(last, secs(3));
    // A notice without enough time is given up at once, under a new number.
    leader.handle(drain(9, secs(4)), secs(4)).unwrap();
    let cancelled = std::iter::from_fn(|| leader.poll_effect())
        .any(|e| matches!(e, LeaderEffect::Decided { barrier: 2, .. }));
    assert!(cancelled);
}

#[test]
fn the_first_step_lies_behind_what_runs_meanwhile() {
    let ms = Span::from_millis;
    assert_eq!(first_step([], Span::ZERO, ms(1)), 2);
    assert_eq!(first_step([7, 9], ms(100), ms(10)), 11);
    assert_eq!(first_step([7, 9], ms(1), ms(10)), 20);
    assert_eq!(first_step([9], Span(1), ms(1_000)), 1_010);
    assert_eq!(first_step([u64::MAX], ms(1), ms(1)), u64::MAX);
}
