//! What comes behind a checkpoint.

use super::*;

/// A leader and its nodes, whose ranks stand at some step and wait where they are told to.
struct Line {
    leader: Leader,
    nodes: Vec<(Node, u64)>,
    /// What the nodes tell their launchers to confirm: barrier and step.
    confirmed: Vec<(usize, u32, u64)>,
    now: Time,
}

impl Line {
    fn new() -> Line {
        Line {
            leader: Leader::new(GENERATION, [node(0), node(1)]),
            nodes: vec![(Node::new(GENERATION), 7), (Node::new(GENERATION), 9)],
            confirmed: Vec::new(),
            now: secs(1),
        }
    }

    fn asks(&mut self, reason: Reason) {
        let drain = LeaderEvent::Drain {
            step: 1,
            deadline: secs(60),
            save_time: Span::ZERO,
            reason,
        };
        self.leader.handle(drain, self.now).unwrap();
    }

    /// Delivers everything, in order, but what `keeps` holds back.
    fn run(&mut self, keeps: impl Fn(usize, &ToNode) -> bool) {
        while let Some(effect) = self.leader.poll_effect() {
            let LeaderEffect::Send { to, message } = effect else {
                continue;
            };
            let at = (0..2).find(|n| node(*n) == to).unwrap();
            if keeps(at, &message) {
                continue;
            }
            let (core, stands) = &mut self.nodes[at];
            core.handle(NodeEvent::Leader(message), self.now).unwrap();
            let mut answers = Vec::new();
            while let Some(effect) = core.poll_effect() {
                match effect {
                    NodeEffect::ToLeader(answer) => answers.push(answer),
                    NodeEffect::ToLauncher(ToLauncher::InstallStop { barrier, step, .. }) => {
                        let step = step.max(*stands + 1);
                        let digest = GENERATION;
                        let event = NodeEvent::Installed {
                            digest,
                            barrier,
                            step,
                        };
                        core.handle(event, self.now).unwrap();
                    }
                    NodeEffect::ToLauncher(ToLauncher::ConfirmStop { barrier, step, .. }) => {
                        self.confirmed.push((at, barrier, step));
                        *stands = step;
                    }
                    NodeEffect::ToLauncher(_) => {}
                }
            }
            for message in answers {
                let from = node(at);
                let event = LeaderEvent::Message { from, message };
                self.leader.handle(event, self.now).unwrap();
            }
        }
    }
}

#[test]
fn behind_a_checkpoint_come_others_and_then_a_stop() {
    let mut line = Line::new();
    for (barrier, step) in [(1, 10), (2, 11)] {
        line.asks(Reason::Checkpoint);
        line.run(|_, _| false);
        let confirmed = std::mem::take(&mut line.confirmed);
        assert_eq!(confirmed, [(0, barrier, step), (1, barrier, step)]);
    }
    line.asks(Reason::Drain);
    line.run(|_, _| false);
    assert_eq!(line.confirmed, [(0, 3, 12), (1, 3, 12)]);
    // Behind that one there is nothing more.
    line.asks(Reason::Checkpoint);
    assert!(matches!(
        line.leader.poll_effect(),
        Some(LeaderEffect::Shared {
            barrier: 3,
            step: 12
        })
    ));
}

/// Whoever raises the step has answered for it already: nobody else is there to be asked.
#[test]
fn one_node_alone_agrees_with_itself() {
    let mut line = Line::new();
    line.leader = Leader::new(GENERATION, [node(0)]);
    line.asks(Reason::Drain);
    line.run(|_, _| false);
    assert_eq!(line.confirmed, [(0, 1, 8)]);
}

#[test]
fn a_stop_waits_until_every_node_knows_of_the_checkpoint_before() {
    let mut line = Line::new();
    line.asks(Reason::Checkpoint);
    // Node 1 does not hear the confirm.
    line.run(|at, message| at == 1 && matches!(message, ToNode::Confirm { .. }));
    assert_eq!(line.confirmed, [(0, 1, 10)]);
    line.asks(Reason::Drain);
    assert_eq!(line.leader.poll_effect(), None, "not yet");
    // It is said again.
    line.now += RESEND_TIME;
    line.leader.handle_timeout(line.now);
    line.run(|_, _| false);
    assert_eq!(
        line.confirmed,
        [(0, 1, 10), (1, 1, 10), (0, 2, 11), (1, 2, 11)]
    );
}

#[test]
fn a_checkpoint_that_is_not_decided_makes_way_for_a_stop() {
    let mut line = Line::new();
    line.asks(Reason::Checkpoint);
    line.run(|at, _| at == 1);
    line.asks(Reason::Drain);
    line.run(|_, _| false);
    assert_eq!(line.confirmed, [(0, 2, 10), (1, 2, 10)]);
    // A node that is lost holds no stop up either.
    let mut line = Line::new();
    line.asks(Reason::Checkpoint);
    line.run(|at, message| at == 1 && matches!(message, ToNode::Confirm { .. }));
    line.asks(Reason::Drain);
    let node = node(1);
    line.leader
        .handle(LeaderEvent::NodeLost { node }, line.now)
        .unwrap();
    line.run(|_, _| false);
    assert_eq!(line.confirmed, [(0, 1, 10), (0, 2, 11)]);
}

/// More than the time after which the leader says again what was not answered.
const RESEND_TIME: Span = Span::from_millis(300);
