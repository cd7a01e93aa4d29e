//! Barriers that come behind a checkpoint.

use super::*;

/// A leader and its nodes, whose ranks stand at some step and wait where they are told to.
struct Line {
    leader: Leader,
    nodes: Vec<(Node, u64)>,
    /// Confirms that the nodes tell their launchers: barrier and step.
    confirmed: Vec<(usize, u32, u64)>,
    now: Time,
}

impl Line {
    fn new() -> Line {
        Line {
            leader: Leader::new(GENERATION, [node(0), node(1)], 0),
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
                        let digest = GENERATION;
                        let event = NodeEvent::Saves { digest, step };
                        core.handle(event, self.now).unwrap();
                    }
                    NodeEffect::ToLauncher(_) => {}
                }
            }
            for message in answers {
                let from = node(at);
                let event = LeaderEvent::Message { from, message };
                // What is refused came late, and changes nothing.
                let _refused = self.leader.handle(event, self.now);
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

/// The node that raises the step has answered for it already: nobody else is there to be asked.
#[test]
fn one_node_alone_agrees_with_itself() {
    let mut line = Line::new();
    line.leader = Leader::new(GENERATION, [node(0)], 0);
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

/// Another leader, or the same one after a restart, that has heard of no barrier.
fn begin_anew(line: &mut Line) {
    line.leader = Leader::new(GENERATION, [node(0), node(1)], 0);
    line.confirmed.clear();
}

#[test]
fn a_leader_that_begins_anew_counts_on() {
    for (first, second, reason) in [
        (2, 2, Reason::Checkpoint),
        (3, 1, Reason::Drain),
        (0, 3, Reason::Drain),
        (1, 0, Reason::Checkpoint),
    ] {
        let mut line = Line::new();
        for _ in 0..first.max(second) {
            line.asks(Reason::Checkpoint);
            line.run(|_, _| false);
        }
        let heard = [first, second];
        for (at, heard) in heard.iter().enumerate().filter(|(_, n)| **n == 0) {
            // Its agent was restarted, too.
            assert_eq!(*heard, 0);
            let (core, step) = &mut line.nodes[at];
            *core = Node::new(GENERATION);
            let held = Held {
                barrier: first.max(second).try_into().unwrap(),
                step: *step,
                reason: Reason::Checkpoint,
                confirmed: true,
            };
            let launcher = NodeEvent::Launcher {
                digest: GENERATION,
                held: Some(held),
            };
            core.handle(launcher, line.now).unwrap();
        }
        begin_anew(&mut line);
        line.asks(reason);
        line.run(|_, _| false);
        let numbers: Vec<u32> = line
            .confirmed
            .iter()
            .map(|(_, number, _)| *number)
            .collect();
        let newest = u32::try_from(first.max(second)).unwrap();
        let [a, b] = numbers[..] else {
            panic!("{heard:?}: {numbers:?}")
        };
        assert!(a == b && a > newest, "{heard:?}: {numbers:?}");
    }
    // Its own node knows already: nobody has to be asked twice.
    let mut line = Line::new();
    line.asks(Reason::Checkpoint);
    line.run(|_, _| false);
    let heard = line.nodes[0].0.heard();
    line.leader = Leader::new(GENERATION, [node(0), node(1)], heard);
    line.asks(Reason::Checkpoint);
    assert_eq!((heard, line.leader.barrier), (1, 2));
}

/// A barrier that an earlier leader has left open is no checkpoint when it comes as a stop.
#[test]
fn an_open_checkpoint_of_another_leader_becomes_a_stop() {
    let mut line = Line::new();
    line.asks(Reason::Checkpoint);
    // Nobody hears of its end.
    line.run(|at, message| at == 1 && matches!(message, ToNode::Install { .. }));
    assert!(line.nodes[0].0.is_open() && line.leader.confirmed().is_none());
    begin_anew(&mut line);
    line.asks(Reason::Drain);
    line.run(|_, _| false);
    assert_eq!(line.confirmed, [(0, 1, 10), (1, 1, 10)]);
    for (core, _) in &line.nodes {
        assert_eq!(core.phase, super::node::Phase::Confirmed { step: 10 });
    }
}

#[test]
fn a_late_install_raises_no_number() {
    let mut line = Line::new();
    line.asks(Reason::Checkpoint);
    line.run(|at, _| at == 1);
    let install = |barrier| ToNode::Install {
        digest: GENERATION,
        barrier,
        step: 1,
        grace_ms: 1_000,
        reason: Reason::Checkpoint,
    };
    line.asks(Reason::Drain);
    line.run(|at, _| at == 1);
    let (core, _) = &mut line.nodes[0];
    core.handle(NodeEvent::Leader(install(1)), line.now)
        .unwrap();
    let Some(NodeEffect::ToLeader(message)) = core.poll_effect() else {
        panic!("an install that is not taken is answered");
    };
    let digest = GENERATION;
    assert_eq!(message, ToLeader::Newer { digest, barrier: 2 });
    let from = node(0);
    let late = LeaderEvent::Message { from, message };
    line.leader.handle(late, line.now).unwrap();
    assert_eq!(
        (line.leader.barrier, line.leader.poll_effect()),
        (2, None),
        "it is at that number"
    );
}

#[test]
fn a_node_that_begins_anew_goes_on_behind_a_checkpoint() {
    let mut core = Node::new(GENERATION);
    let confirm = ToNode::Confirm {
        digest: GENERATION,
        barrier: 4,
        step: 9,
        reason: Reason::Checkpoint,
    };
    assert_eq!(confirm.stop_reason(), None);
    core.handle(NodeEvent::Leader(confirm), secs(1)).unwrap();
    let passed = |known| super::node::Phase::Passed { step: 9, known };
    assert_eq!(core.phase, passed(false));
    let told = std::iter::from_fn(|| core.poll_effect()).any(|effect| {
        matches!(
            effect,
            NodeEffect::ToLauncher(ToLauncher::ConfirmStop {
                reason: Reason::Checkpoint,
                ..
            })
        )
    });
    assert!(told);
    // It is known once the launcher has it.
    let saves = NodeEvent::Saves {
        digest: GENERATION,
        step: 9,
    };
    core.handle(saves, secs(1)).unwrap();
    assert_eq!(core.phase, passed(true));
    assert!(matches!(
        core.poll_effect(),
        Some(NodeEffect::ToLeader(ToLeader::Settled { barrier: 4, .. }))
    ));
    let install = ToNode::Install {
        digest: GENERATION,
        barrier: 5,
        step: 1,
        grace_ms: 1_000,
        reason: Reason::Drain,
    };
    assert!(install.stop_reason().is_some());
    core.handle(NodeEvent::Leader(install), secs(2)).unwrap();
    assert!(core.is_open() && core.heard() == 5);
}

#[test]
fn a_stop_that_waits_behind_a_checkpoint_is_given_up_in_time() {
    let mut line = Line::new();
    line.asks(Reason::Checkpoint);
    line.run(|at, message| at == 1 && matches!(message, ToNode::Confirm { .. }));
    line.leader.handle(drain(1, secs(10)), line.now).unwrap();
    assert_eq!(line.leader.poll_effect(), None, "it waits");
    let mut given_up = false;
    while let Some((at, _)) = line.leader.poll_timeout().filter(|(at, _)| *at <= secs(9)) {
        line.now = at;
        line.leader.handle_timeout(at);
        let outcome = Outcome::Cancelled(GivenUp::Deadline);
        let decided = LeaderEffect::Decided {
            barrier: 2,
            outcome,
        };
        given_up |= std::iter::from_fn(|| line.leader.poll_effect()).any(|e| e == decided);
        if given_up {
            break;
        }
    }
    assert!(given_up && line.now == secs(9), "{:?}", line.now);
}

#[test]
fn a_stop_by_other_means_cancels_what_is_open() {
    let mut line = Line::new();
    line.asks(Reason::Checkpoint);
    line.run(|at, _| at == 1);
    line.leader.handle(LeaderEvent::GiveUp, line.now).unwrap();
    let outcome = Outcome::Cancelled(GivenUp::Stops);
    let decided = LeaderEffect::Decided {
        barrier: 1,
        outcome,
    };
    assert_eq!(line.leader.poll_effect(), Some(decided));
    line.run(|_, _| false);
    assert!(line.nodes.iter().all(|(core, _)| !core.is_open()));
    // What is confirmed stays so.
    line.asks(Reason::Checkpoint);
    line.run(|_, _| false);
    line.leader.handle(LeaderEvent::GiveUp, line.now).unwrap();
    assert_eq!(line.leader.poll_effect(), None);
    assert_eq!(line.confirmed, [(0, 2, 10), (1, 2, 10)]);
}

/// No number is above the greatest: a member that says it is not believed, in whatever it says it.
#[test]
fn the_greatest_number_is_nobodys() {
    let gated = LeaderEvent::Gated {
        node: node(0),
        barrier: u32::MAX,
    };
    let newer = LeaderEvent::Message {
        from: node(0),
        message: ToLeader::Newer {
            digest: GENERATION,
            barrier: u32::MAX,
        },
    };
    for said in [gated, newer] {
        let mut line = Line::new();
        line.asks(Reason::Checkpoint);
        let _refused = line.leader.handle(said.clone(), line.now);
        assert_eq!(line.leader.barrier, 1, "{said:?}");
        line.run(|_, _| false);
        let _refused = line.leader.handle(said.clone(), line.now);
        line.asks(Reason::Drain);
        line.run(|_, _| false);
        let all = [(0, 1, 10), (1, 1, 10), (0, 2, 11), (1, 2, 11)];
        assert_eq!(line.confirmed, all, "{said:?}");
    }
}
