//! Leaders that are replaced, and agents and launchers that miss what was said, in random order: where
//! some ranks were told to save at a step, no other goes on past it, and in the end nobody waits.

use std::collections::BTreeSet;

use super::*;
use crate::rng::Rng;

/// A launcher whose ranks are at one step.
#[derive(Clone, Debug, Default)]
struct Side {
    /// They have begun every step below, and wait before it where it is gated.
    step: u64,
    held: Option<Held>,
    /// The last that was confirmed.
    passed: Option<Held>,
    gated: bool,
    /// They were told to save, and have not yet.
    saves: bool,
    saved: BTreeSet<u64>,
}

impl Side {
    fn hear(&mut self, frame: ToLauncher) -> Option<NodeEvent> {
        let digest = GENERATION;
        match frame {
            ToLauncher::InstallStop {
                barrier,
                step,
                reason,
                ..
            } if !self.saves => {
                let waits = self.gated && self.held.is_some_and(|h| h.step == self.step);
                let step = step.max(if waits { self.step } else { self.step + 1 });
                self.gated = true;
                self.held = Some(Held {
                    barrier,
                    step,
                    reason,
                    confirmed: false,
                });
                Some(NodeEvent::Installed {
                    digest,
                    barrier,
                    step,
                })
            }
            ToLauncher::ConfirmStop {
                barrier,
                step,
                reason,
                ..
            } if self.gated => {
                assert_eq!(self.held.map(|h| h.step), Some(step), "what is installed");
                self.gated = false;
                self.saves = true;
                self.held = Some(Held {
                    barrier,
                    step,
                    reason,
                    confirmed: true,
                });
                self.passed = self.held;
                Some(NodeEvent::Saves { digest, step })
            }
            // It says again what it saves, or has saved, for.
            ToLauncher::ConfirmStop { step, .. } => {
                let passed = self.passed.filter(|h| h.step == step);
                passed.map(|_| NodeEvent::Saves { digest, step })
            }
            ToLauncher::CancelStop { .. } if !self.saves => {
                self.gated = false;
                self.held = self.passed;
                None
            }
            _ => None,
        }
    }

    /// A step, or a save.
    fn work(&mut self) {
        let at = self
            .held
            .filter(|_| self.gated || self.saves)
            .map(|h| h.step);
        if at.is_none_or(|at| self.step < at) {
            self.step += 1;
        } else if self.saves {
            self.saved.insert(self.step);
            self.saves = false;
            self.step += 1;
        }
    }
}

struct World {
    leader: Leader,
    nodes: Vec<(Node, Side)>,
    down: Vec<(usize, ToNode)>,
    up: Vec<(usize, ToLeader)>,
    now: Time,
    rng: Rng,
    resumed: u32,
}

impl World {
    fn lead_anew(&mut self) {
        let heard = self.nodes[0].0.heard();
        let nodes = (0..self.nodes.len()).map(node);
        self.leader = Leader::taking_over(GENERATION, nodes, heard);
    }

    /// One event at a node; `loses` what it would tell its launcher.
    fn at(&mut self, n: usize, event: NodeEvent, loses: bool) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            let (core, side) = &mut self.nodes[n];
            let _refused = core.handle(event, self.now);
            while let Some(effect) = core.poll_effect() {
                match effect {
                    NodeEffect::ToLeader(answer) => self.up.push((n, answer)),
                    NodeEffect::ToLauncher(_) if loses => {}
                    NodeEffect::ToLauncher(frame) => events.extend(side.hear(frame)),
                }
            }
        }
        if loses {
            self.registers(n);
        }
    }

    fn registers(&mut self, n: usize) {
        let held = self.nodes[n].1.held;
        let digest = GENERATION;
        let held = held.filter(|h| h.confirmed || self.nodes[n].1.gated);
        self.at(n, NodeEvent::Launcher { digest, held }, false);
    }

    fn pump(&mut self) {
        while let Some(effect) = self.leader.poll_effect() {
            match effect {
                LeaderEffect::Send { to, message } => {
                    let to = usize::from(to.0[0]) - 1;
                    self.down.push((to, message));
                }
                LeaderEffect::Resumed { .. } => self.resumed += 1,
                _ => {}
            }
        }
    }

    fn statuses(&mut self) {
        for n in 0..self.nodes.len() {
            if let Some(barrier) = self.nodes[n].0.open() {
                let node = node(n);
                let gated = LeaderEvent::Gated { node, barrier };
                self.leader.handle(gated, self.now).unwrap();
            }
        }
    }

    fn deliver_some(&mut self) {
        if !self.down.is_empty() && self.rng.below(2) == 0 {
            let at = self.rng.below(self.down.len() as u64) as usize;
            let (to, message) = self.down.swap_remove(at);
            let loses = self.rng.below(20) == 0;
            self.at(to, NodeEvent::Leader(message), loses);
        } else if !self.up.is_empty() {
            let at = self.rng.below(self.up.len() as u64) as usize;
            let (from, message) = self.up.swap_remove(at);
            let from = node(from);
            let answer = LeaderEvent::Message { from, message };
            let _refused = self.leader.handle(answer, self.now);
        }
    }

    fn check(&self) {
        let told: BTreeSet<u64> = self
            .nodes
            .iter()
            .flat_map(|(_, s)| {
                let saves = s.held.filter(|_| s.saves).map(|h| h.step);
                s.saved.iter().copied().chain(saves)
            })
            .collect();
        for (n, (_, side)) in self.nodes.iter().enumerate() {
            for step in told.iter().filter(|step| **step < side.step) {
                assert!(side.saved.contains(step), "node {n} went on past {step}");
            }
        }
    }

    /// A member misses the leader, asks what the others hold, and finds the leader back.
    fn deputy_asks(&mut self) {
        let heard = self.nodes.last().map_or(0, |(core, _)| core.heard());
        let nodes = (0..self.nodes.len()).map(node);
        let mut deputy = Leader::taking_over(GENERATION, nodes, heard);
        deputy.handle(drain(1, secs(60)), self.now).unwrap();
        while let Some(effect) = deputy.poll_effect() {
            if let LeaderEffect::Send { to, message } = effect
                && self.rng.below(2) == 0
            {
                self.down.push((usize::from(to.0[0]) - 1, message));
            }
        }
    }

    fn disturb(&mut self) {
        let n = self.rng.below(self.nodes.len() as u64) as usize;
        match self.rng.below(200) {
            0 => {
                // Another leader; what the one before has said may still come.
                self.lead_anew();
                self.down.retain(|_| self.rng.below(4) > 0);
            }
            1 => {
                // An agent of a member; what comes for it is lost with its connections.
                self.nodes[n].0 = Node::new(GENERATION);
                self.down.retain(|(to, _)| *to != n);
                self.registers(n);
            }
            2 => {
                let drain = LeaderEvent::Drain {
                    step: 1,
                    deadline: self.now + Span::from_secs(60),
                    save_time: Span::from_secs(30),
                    reason: Reason::Checkpoint,
                };
                self.leader.handle(drain, self.now).unwrap();
            }
            3 => {
                self.down.retain(|_| self.rng.below(3) > 0);
                self.up.retain(|_| self.rng.below(3) > 0);
            }
            4 => self.deputy_asks(),
            _ => {}
        }
    }
}

#[test]
fn nobody_goes_on_past_a_confirmed_checkpoint_whoever_leads() {
    let (mut resumed, mut saved) = (0, 0);
    for seed in 0..3_000 {
        let mut rng = Rng::new(seed);
        let nodes = 1 + rng.below(3) as usize;
        let mut world = World {
            leader: Leader::new(GENERATION, (0..nodes).map(node), 0),
            nodes: (0..nodes)
                .map(|_| (Node::new(GENERATION), Side::default()))
                .collect(),
            down: Vec::new(),
            up: Vec::new(),
            now: secs(1),
            rng,
            resumed: 0,
        };
        for round in 0..1_600 {
            let calm = round > 900;
            if !calm {
                world.disturb();
            } else if round == 901 {
                world.statuses();
            }
            world.pump();
            world.deliver_some();
            let n = world.rng.below(nodes as u64) as usize;
            if world.rng.below(3) == 0 {
                world.nodes[n].1.work();
            }
            if world.rng.below(10) == 0 {
                world.now += Span::from_millis(300);
                world.leader.handle_timeout(world.now);
                world.statuses();
            }
            world.check();
        }
        let waits = world
            .nodes
            .iter()
            .any(|(core, side)| side.gated || core.is_open());
        assert!(
            !waits,
            "seed {seed}: {:#?} {:#?}",
            world.leader, world.nodes
        );
        assert_eq!(
            world.leader.resend_at, None,
            "seed {seed}: somebody never answers: {:#?} {:#?}",
            world.leader, world.nodes
        );
        resumed += world.resumed;
        saved += world
            .nodes
            .iter()
            .map(|(_, s)| s.saved.len())
            .sum::<usize>();
    }
    assert!(resumed > 100 && saved > 1_000, "{resumed} {saved}");
}

/// Two nodes to which everything comes, in order.
struct Pair(World);

impl Pair {
    /// Both have saved for a checkpoint, and know that it is over.
    fn saved() -> Pair {
        let mut pair = Pair(World {
            leader: Leader::new(GENERATION, [node(0), node(1)], 0),
            nodes: vec![(Node::new(GENERATION), Side::default()); 2],
            down: Vec::new(),
            up: Vec::new(),
            now: secs(1),
            rng: Rng::new(1),
            resumed: 0,
        });
        pair.asks(Reason::Checkpoint);
        pair.run(None);
        for _ in 0..5 {
            pair.0.nodes.iter_mut().for_each(|(_, side)| side.work());
        }
        assert!(pair.0.nodes.iter().all(|(_, side)| side.saved.len() == 1));
        pair
    }

    fn asks(&mut self, reason: Reason) {
        let drain = LeaderEvent::Drain {
            step: 1,
            deadline: self.0.now + Span::from_secs(60),
            save_time: Span::from_secs(30),
            reason,
        };
        self.0.leader.handle(drain, self.0.now).unwrap();
    }

    /// Delivers everything but what comes for this node.
    fn run(&mut self, deaf: Option<usize>) {
        let world = &mut self.0;
        loop {
            world.pump();
            if let Some((to, message)) = world.down.pop() {
                if deaf != Some(to) {
                    world.at(to, NodeEvent::Leader(message), false);
                }
            } else if let Some((from, message)) = world.up.pop() {
                let from = node(from);
                let answer = LeaderEvent::Message { from, message };
                let _refused = world.leader.handle(answer, world.now);
            } else {
                break;
            }
        }
    }
}

/// A barrier behind a checkpoint comes to one node only, and is cancelled: that node still holds the
/// checkpoint, as the other does, and whoever leads next can have a stop agreed on.
#[test]
fn what_is_cancelled_leaves_the_checkpoint_before_it() {
    for by_deadline in [true, false] {
        for restarts in [false, true] {
            let mut pair = Pair::saved();
            let saved = pair.0.nodes[0].1.held;
            pair.asks(Reason::Checkpoint);
            pair.run(Some(1));
            assert!(pair.0.nodes[0].0.is_open() && !pair.0.nodes[1].0.is_open());
            if restarts {
                // It learns of the open one alone: that is the newest.
                pair.0.nodes[0].0 = Node::new(GENERATION);
                pair.0.registers(0);
            }
            if by_deadline {
                pair.0.now += Span::from_secs(31);
                pair.0.leader.handle_timeout(pair.0.now);
            } else {
                pair.0.lead_anew();
                pair.0.statuses();
            }
            pair.run(None);
            assert_eq!(pair.0.nodes[0].1.held, saved);
            pair.0.lead_anew();
            pair.asks(Reason::Drain);
            pair.run(None);
            let case = format!("by the deadline: {by_deadline}, restarts: {restarts}");
            assert_eq!(pair.0.resumed, u32::from(restarts), "{case}");
            assert_eq!(pair.0.leader.resend_at, None, "{case}");
            for (core, _) in &pair.0.nodes {
                let stops = matches!(core.phase, super::node::Phase::Confirmed { .. });
                assert!(stops, "{case}: {core:?}");
            }
        }
    }
}

/// A deputy asked one node while the leader stood still: what the leader decides then under its number is
/// not taken there, and comes again under another.
#[test]
fn what_a_leader_decides_behind_a_deputys_question_comes_to_all() {
    for confirms in [true, false] {
        let mut pair = Pair::saved();
        pair.asks(Reason::Checkpoint);
        pair.run(Some(0));
        let (digest, barrier) = (GENERATION, pair.0.leader.barrier + 1);
        let ask = NodeEvent::Leader(ToNode::Ask { digest, barrier });
        pair.0.at(1, ask, false);
        // The other answers once it is asked again, or too late.
        pair.0.now += Span::from_millis(if confirms { 300 } else { 31_000 });
        pair.0.leader.handle_timeout(pair.0.now);
        pair.run(None);
        for (core, side) in &pair.0.nodes {
            assert!(!core.is_open() && !side.gated, "{confirms}: {core:?}");
            assert_eq!(side.saves, confirms, "{core:?}");
        }
        assert_eq!(pair.0.leader.resend_at, None, "{confirms}");
    }
}

/// The cancel is lost on its way to the launcher: it is told again when that comes back.
#[test]
fn a_launcher_that_missed_a_cancel_is_told_again() {
    let mut pair = Pair::saved();
    let saved = pair.0.nodes[0].1.held;
    pair.asks(Reason::Checkpoint);
    pair.run(Some(1));
    let barrier = pair.0.leader.barrier;
    let digest = GENERATION;
    let cancel = NodeEvent::Leader(ToNode::Cancel { digest, barrier });
    pair.0.at(0, cancel, true);
    let (core, side) = &pair.0.nodes[0];
    assert!(!core.is_open() && !side.gated);
    assert_eq!(side.held, saved);
    // An agent that heard of the cancel first, and then of the launcher, forgets no checkpoint.
    pair.0.nodes[0].0 = Node::new(GENERATION);
    let cancel = NodeEvent::Leader(ToNode::Cancel { digest, barrier });
    pair.0.at(0, cancel, false);
    pair.0.registers(0);
    let passed = matches!(
        pair.0.nodes[0].0.phase,
        super::node::Phase::Passed { known: true, .. }
    );
    assert!(passed, "{:?}", pair.0.nodes[0].0);
}
