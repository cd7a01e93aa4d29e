//! The leader, with what its nodes say.

use super::*;

fn new(shared: bool) -> Leader {
    let state = LeaderState::default();
    Leader::new(&record(), shared, state, at(0), Flaws::default(), at(0))
}

fn wants(step: u64, cause: Cause) -> LeaderEvent {
    let until = at(60_000);
    LeaderEvent::Save(Wants { step, cause, until })
}

fn answer(
    leader: &mut Leader,
    from: u8,
    (attempt, number): (u32, u32),
    part: Part,
    sealed: &[u64],
) {
    let message = ToLeader {
        generation: record().digest(),
        attempt,
        number,
        sealed: sealed.to_vec(),
        busy: None,
        ended: None,
        part,
    };
    let from = id(from);
    let event = LeaderEvent::Message { from, message };
    leader.handle(event, at(10)).unwrap();
}

fn files(ranks: &[u32]) -> Part {
    let file = |rank: &u32| Written {
        rank: *rank,
        bytes: BYTES,
        summary: vec![*rank as u8],
    };
    Part::Prepared {
        files: ranks.iter().map(file).collect(),
    }
}

fn effects(leader: &mut Leader) -> Vec<LeaderEffect> {
    drain(|| leader.poll_effect())
}

/// The effects in words, without messages to nodes and to people.
fn deeds(effects: &[LeaderEffect]) -> Vec<String> {
    let deed = |e: &LeaderEffect| match e {
        LeaderEffect::Persist(s) => Some(format!("persist {}", s.save.attempt)),
        LeaderEffect::Assemble { files, .. } => Some(format!("assemble {}", files.len())),
        LeaderEffect::Commit { manifest, .. } => Some(format!("commit {manifest}")),
        LeaderEffect::Send { .. } | LeaderEffect::Notice(_) => None,
    };
    effects.iter().filter_map(deed).collect()
}

fn said(effects: &[LeaderEffect]) -> Vec<String> {
    let notice = |e: &LeaderEffect| match e {
        LeaderEffect::Notice(n) => Some(n.to_string()),
        _ => None,
    };
    effects.iter().filter_map(notice).collect()
}

fn last_stage(effects: &[LeaderEffect]) -> Option<Stage> {
    let stage = |e: &LeaderEffect| match e {
        LeaderEffect::Send { message, .. } => Some(message.stage),
        _ => None,
    };
    effects.iter().rev().find_map(stage)
}

#[test]
fn a_save_is_committed_once_all_have_all() {
    let mut leader = new(false);
    leader.handle(wants(100, Cause::Steps), at(0)).unwrap();
    let opened = effects(&mut leader);
    assert_eq!(deeds(&opened), ["persist 1"]);
    assert!(
        matches!(opened[0], LeaderEffect::Persist(_)),
        "before it is said"
    );
    answer(&mut leader, 1, (1, 1), files(&[0, 1]), &[100]);
    assert_eq!(deeds(&effects(&mut leader)), [""; 0]);
    answer(&mut leader, 2, (1, 1), files(&[2]), &[100]);
    assert_eq!(deeds(&effects(&mut leader)), ["assemble 3"]);
    let (save, _) = leader.under_way().unwrap();
    let manifest = Digest([7; 32]);
    let event = LeaderEvent::Assembled {
        save,
        manifest,
        bytes: 10,
    };
    leader.handle(event, at(20)).unwrap();
    let hold = Stage::Hold {
        manifest,
        bytes: 10,
    };
    assert_eq!(last_stage(&effects(&mut leader)), Some(hold));
    answer(&mut leader, 1, (1, 2), Part::Holding { manifest }, &[100]);
    assert_eq!(deeds(&effects(&mut leader)), [""; 0]);
    answer(&mut leader, 2, (1, 2), Part::Holding { manifest }, &[100]);
    let effects_now = effects(&mut leader);
    assert_eq!(deeds(&effects_now), ["persist 1", "commit 07070707"]);
    // Another's commit is not this one's.
    let other = Digest([8; 32]);
    leader
        .handle(LeaderEvent::Committed { manifest: other }, at(30))
        .unwrap();
    assert_eq!(leader.committed(), None);
    leader
        .handle(LeaderEvent::Committed { manifest }, at(30))
        .unwrap();
    assert_eq!(leader.committed(), Some(100));
    let over = Stage::Over(Outcome::Committed);
    assert_eq!(last_stage(&effects(&mut leader)), Some(over));
    let error = leader
        .handle(wants(100, Cause::Ordered), at(40))
        .unwrap_err();
    assert_eq!(
        error,
        Error::NotNewer {
            step: 100,
            newest: 100
        }
    );
}

#[test]
fn laggards_are_named_when_time_is_over() {
    let mut leader = new(true);
    leader.handle(wants(100, Cause::Steps), at(0)).unwrap();
    let ranks = vec![0];
    answer(&mut leader, 1, (1, 1), Part::Waiting { ranks }, &[]);
    let part = Part::Writing {
        done: 400,
        bytes: 1_000,
    };
    answer(&mut leader, 2, (1, 1), part, &[100]);
    let progress = leader.progress().unwrap();
    assert_eq!((progress.sealed, progress.done), (1, 400));
    effects(&mut leader);
    let (due, _) = leader.poll_timeout().unwrap();
    assert!(due <= at(60_000));
    leader.handle_timeout(at(60_000));
    let all = effects(&mut leader);
    assert_eq!(
        said(&all),
        [
            "the save of step 100 (attempt 1) is given up: its time is over: on node 01010101 ranks [0] have \
          not saved for 60.0 s; node 02020202 has 600 bytes left to write"
        ]
    );
    // Not every rank has sealed it: nobody needs those that are.
    assert_eq!(last_stage(&all), Some(Stage::Over(Outcome::Dropped)));
}

#[test]
fn an_urgent_save_takes_the_place_of_one_that_is_not_written() {
    let mut leader = new(true);
    leader.handle(wants(100, Cause::Steps), at(0)).unwrap();
    // It waits: nothing presses.
    leader.handle(wants(110, Cause::Ordered), at(1)).unwrap();
    assert_eq!(leader.under_way().unwrap().0.step, 100);
    let writing = |done| Part::Writing { done, bytes: 10 };
    answer(&mut leader, 1, (1, 1), writing(1), &[100]);
    answer(&mut leader, 2, (1, 1), writing(1), &[100]);
    leader.handle(wants(120, Cause::Preemption), at(2)).unwrap();
    let (save, _) = leader.under_way().unwrap();
    assert_eq!((save.step, save.attempt), (120, 2));
    let all = effects(&mut leader);
    assert!(said(&all)[1].ends_with("step 120 is saved instead, which is urgent"));
    // Every rank holds a copy of step 100, which stays until all hold one of step 120.
    let keep = |all: &[LeaderEffect]| {
        let word = |e: &LeaderEffect| match e {
            LeaderEffect::Send { message, .. } => Some(message.keep),
            _ => None,
        };
        all.iter().rev().find_map(word)
    };
    assert_eq!(keep(&all), Some(Some(100)));
    answer(&mut leader, 1, (2, 1), writing(1), &[100, 120]);
    answer(&mut leader, 2, (2, 1), writing(1), &[100, 120]);
    assert_eq!(keep(&effects(&mut leader)), Some(None));
}

#[test]
fn a_restarted_leader_asks_for_the_very_same_commit() {
    let manifest = Digest([7; 32]);
    let save = Save {
        generation: record().digest(),
        attempt: 4,
        step: 100,
    };
    let state = LeaderState {
        save,
        over: None,
        keep: None,
        manifest: Some(manifest),
        resumed: 0,
    };
    let again = |state| Leader::new(&record(), true, state, at(60_000), Flaws::default(), at(0));
    let mut leader = again(state);
    assert_eq!(
        deeds(&effects(&mut leader)),
        ["persist 4", "commit 07070707"]
    );
    leader.handle_timeout(at(60_000));
    assert!(said(&effects(&mut leader))[0].contains("has not been committed in time"));
    leader
        .handle(LeaderEvent::Committed { manifest }, at(70_000))
        .unwrap();
    assert_eq!(leader.committed(), Some(100));

    // One that was being gathered goes on, and is over where a node heard so.
    let mut open = again(LeaderState {
        manifest: None,
        ..state
    });
    effects(&mut open);
    answer(&mut open, 1, (4, 7), Part::Settled(Outcome::Dropped), &[]);
    let all = effects(&mut open);
    assert!(
        said(&all)[0].ends_with("it was before the agent restarted"),
        "{all:?}"
    );
    // The next one has a number of its own.
    open.handle(wants(110, Cause::Steps), at(10)).unwrap();
    assert_eq!(open.under_way().unwrap().0.attempt, 5);
    // What is said after a restart is newer than all before, for nodes that know only that.
    let over = LeaderState {
        over: Some(Outcome::Committed),
        resumed: 2,
        ..state
    };
    let word = effects(&mut again(over)).into_iter().find_map(|e| match e {
        LeaderEffect::Send { message, .. } => Some(message),
        _ => None,
    });
    let settings = settings(0, 1);
    let mut node = Node::new(record().digest(), settings, NodeState::default());
    let before = ToNode {
        save,
        number: (2 << 16) + 9,
        keep: None,
        stage: Stage::Write,
    };
    for message in [before, word.unwrap()] {
        node.handle(NodeEvent::Leader(message), at(0)).unwrap();
    }
    let said = drain(|| node.poll_effect())
        .into_iter()
        .rev()
        .find_map(|e| match e {
            NodeEffect::Send(message) => Some(message.part),
            _ => None,
        });
    assert_eq!(said, Some(Part::Settled(Outcome::Committed)));
    // Another generation's state is nobody's.
    let foreign = Save {
        generation: Digest([1; 32]),
        ..save
    };
    let mut other = again(LeaderState {
        save: foreign,
        ..state
    });
    assert_eq!(effects(&mut other), []);
}

#[test]
fn an_attempt_that_was_forgotten_is_not_used_again() {
    let mut leader = new(true);
    leader.handle(wants(100, Cause::Steps), at(0)).unwrap();
    effects(&mut leader);
    answer(&mut leader, 2, (6, 1), Part::Settled(Outcome::Kept), &[90]);
    assert_eq!(leader.under_way().unwrap().0.attempt, 7);
    assert_eq!(deeds(&effects(&mut leader)), ["persist 7"]);
}

#[test]
fn files_of_other_ranks_are_no_preparation() {
    let mut leader = new(true);
    leader.handle(wants(100, Cause::Steps), at(0)).unwrap();
    effects(&mut leader);
    answer(&mut leader, 2, (1, 1), files(&[1]), &[100]);
    let text = said(&effects(&mut leader)).concat();
    assert!(
        text.contains("it names files of other ranks than its own"),
        "{text}"
    );
    let message = ToLeader {
        generation: Digest([1; 32]),
        attempt: 1,
        number: 1,
        sealed: Vec::new(),
        busy: None,
        ended: None,
        part: Part::Idle,
    };
    let from = id(2);
    let event = LeaderEvent::Message { from, message };
    let refused = leader.handle(event, at(10));
    assert!(matches!(refused, Err(Error::OtherGeneration { .. })));
}

#[test]
fn a_lost_node_matters_while_its_files_do() {
    for (shared, gone) in [(true, false), (false, true)] {
        let mut leader = new(shared);
        leader.handle(wants(100, Cause::Steps), at(0)).unwrap();
        answer(&mut leader, 2, (1, 1), files(&[2]), &[100]);
        leader
            .handle(LeaderEvent::NodeLost { node: id(2) }, at(20))
            .unwrap();
        assert_eq!(leader.under_way().is_none(), gone, "shared {shared}");
    }
    let mut leader = new(true);
    leader.handle(wants(100, Cause::Steps), at(0)).unwrap();
    leader.handle(LeaderEvent::Ended, at(20)).unwrap();
    assert_eq!(leader.under_way(), None);
    assert_eq!(
        leader.handle(wants(110, Cause::Steps), at(30)),
        Err(Error::Over)
    );
}

#[test]
fn what_a_node_says_has_limits() {
    use crate::wire::{JobMessage, Message};
    let framed = |part, sealed| {
        let message = Message::Job {
            key: record().key,
            body: Box::new(JobMessage::SaveAnswer(Box::new(ToLeader {
                generation: record().digest(),
                attempt: 1,
                number: 1,
                sealed,
                busy: None,
                ended: None,
                part,
            }))),
        };
        Message::decode(&message.encode().unwrap()).map(|_| ())
    };
    assert!(framed(files(&[0, 1]), vec![1, 2]).is_ok());
    let long = Written {
        rank: 0,
        bytes: 1,
        summary: vec![0; MAX_SUMMARY + 1],
    };
    assert!(framed(Part::Prepared { files: vec![long] }, Vec::new()).is_err());
    assert!(framed(Part::Idle, vec![0; MAX_SEALED + 1]).is_err());
    let ranks = vec![0; crate::wire::MAX_RANKS + 1];
    assert!(framed(Part::Waiting { ranks }, Vec::new()).is_err());
    // All files of a node with as many ranks as there may be fit into a frame.
    let most: Vec<u32> = (0..crate::wire::MAX_RANKS as u32).collect();
    let Part::Prepared { mut files } = files(&most) else {
        unreachable!()
    };
    files
        .iter_mut()
        .for_each(|f| f.summary = vec![0xff; MAX_SUMMARY]);
    assert!(framed(Part::Prepared { files }, Vec::new()).is_ok());
}

#[test]
fn a_node_whose_agent_forgot_a_save_is_told_of_it_again() {
    let mut leader = new(true);
    leader.handle(wants(100, Cause::Steps), at(0)).unwrap();
    for node in [1, 2] {
        let part = Part::Writing {
            done: 0,
            bytes: BYTES,
        };
        answer(&mut leader, node, (1, 1), part, &[100]);
    }
    effects(&mut leader);
    let quiet = leader.poll_timeout().unwrap().0;
    assert_eq!(quiet, at(60_000), "all know of it");
    // Its agent was killed, and found a sealed copy in the slots.
    answer(&mut leader, 2, (0, 0), Part::Idle, &[100]);
    let again = leader.poll_timeout().unwrap().0;
    assert!(again < quiet);
    leader.handle_timeout(again);
    let told: Vec<NodeId> = effects(&mut leader)
        .iter()
        .filter_map(|effect| match effect {
            LeaderEffect::Send { to, message } => {
                assert_eq!((message.save.step, message.stage), (100, Stage::Write));
                Some(*to)
            }
            _ => None,
        })
        .collect();
    assert_eq!(told, [id(2)]);
}

/// Rank 3 has ended on the second node, which holds whole copies of these steps; it and one beside it hold these newest
/// ones.
fn has_ended(leader: &mut Leader, sealed: &[u64], newest: Option<u64>, beside: Option<u64>) {
    let message = ToLeader {
        generation: record().digest(),
        attempt: 0,
        number: 0,
        sealed: sealed.to_vec(),
        busy: None,
        ended: Some(Ended {
            rank: 3,
            newest,
            beside,
        }),
        part: Part::Idle,
    };
    let from = id(2);
    let event = LeaderEvent::Message { from, message };
    leader.handle(event, at(10)).unwrap();
}

/// The steps that were given up for rank 3.
fn given_up(leader: &mut Leader) -> Vec<u64> {
    let step = |e: &LeaderEffect| match e {
        LeaderEffect::Notice(LeaderNotice::GivenUp {
            save,
            why: GivenUp::RankEnded { rank: 3 },
        }) => Some(save.step),
        _ => None,
    };
    effects(leader).iter().filter_map(step).collect()
}

#[test]
fn steps_that_an_ended_rank_has_not_sealed_are_given_up() {
    // On another node.
    let mut leader = new(true);
    answer(&mut leader, 1, (0, 0), Part::Idle, &[10, 15]);
    assert_eq!(given_up(&mut leader), [0; 0]);
    has_ended(&mut leader, &[], None, None);
    assert_eq!(given_up(&mut leader), [15]);
    // It holds all that anybody does.
    let mut leader = new(true);
    answer(&mut leader, 1, (0, 0), Part::Idle, &[10]);
    has_ended(&mut leader, &[10], Some(10), Some(10));
    assert_eq!(given_up(&mut leader), [0; 0]);
    assert_eq!(leader.sealed(), Some(10));
    // Another rank of its node may still seal what it has.
    let mut leader = new(true);
    answer(&mut leader, 1, (0, 0), Part::Idle, &[10]);
    has_ended(&mut leader, &[], Some(10), Some(10));
    assert_eq!(given_up(&mut leader), [0; 0]);
    // Beside others on its own node.
    let mut leader = new(true);
    has_ended(&mut leader, &[], None, Some(10));
    assert_eq!(given_up(&mut leader), [10]);
    // What it has sealed is saved first, though somebody holds a newer step.
    let mut leader = new(true);
    has_ended(&mut leader, &[10], Some(10), Some(10));
    answer(&mut leader, 1, (0, 0), Part::Idle, &[10, 15]);
    assert_eq!(given_up(&mut leader), [0; 0]);
    assert_eq!(leader.sealed(), Some(10));
    // Where another rank has gone beyond it without it, it never is whole.
    let mut other = new(true);
    has_ended(&mut other, &[10], Some(10), Some(10));
    answer(&mut other, 1, (0, 0), Part::Idle, &[12]);
    assert_eq!(given_up(&mut other), [12]);
    leader.handle(wants(10, Cause::Steps), at(10)).unwrap();
    leader.handle_timeout(at(60_000));
    assert!(leader.under_way().is_none());
    answer(&mut leader, 1, (1, 2), Part::Idle, &[10, 15]);
    assert_eq!(given_up(&mut leader), [15]);
    // The same again is no news.
    let mut leader = new(true);
    has_ended(&mut leader, &[], None, Some(10));
    assert_eq!(given_up(&mut leader), [10]);
    has_ended(&mut leader, &[], None, Some(10));
    assert_eq!(given_up(&mut leader), [0; 0]);
}

#[test]
fn an_open_save_does_not_wait_for_a_rank_that_has_ended() {
    let mut leader = new(true);
    leader.handle(wants(20, Cause::Preemption), at(0)).unwrap();
    answer(&mut leader, 1, (1, 1), Part::Idle, &[20]);
    has_ended(&mut leader, &[], None, None);
    assert_eq!(given_up(&mut leader), [20]);
    assert!(leader.under_way().is_none());
}
