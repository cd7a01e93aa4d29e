//! No good checkpoint is lost by one node's bad view: what one finds damaged, another reads before it is
//! rejected.

use muster_protocol::membership::Answer;

use super::*;

impl World {
    /// Two checkpoints are committed, and all begin anew with the newer one, that of step 20.
    fn restoring() -> World {
        let mut world = World::training(true);
        for step in [10, 20] {
            world.save(step);
            world.until("committed", |w| {
                w.committed.contains(&step) && w.slots_are_free()
            });
        }
        world.fails(1, None);
        world.until("it restores the newest", |w| w.restores(&[0, 1], 20));
        world
    }

    fn restores(&self, nodes: &[usize], step: u64) -> bool {
        let restored = self.head(nodes[0]).and_then(|(r, _)| r.restore);
        self.trains(nodes) && restored.map(|c| c.step) == Some(step)
    }

    /// The rank of a node cannot load what its generation began with.
    fn complains(&mut self, i: usize) {
        self.complains_of(i, false);
    }

    /// `here`: it says that it is its node.
    fn complains_of(&mut self, i: usize, here: bool) {
        let (record, _) = self.head(i).expect("a generation");
        let damaged = Damaged {
            manifest: record.restore.expect("a checkpoint").manifest,
            why: String::from("n0-0.safetensors is not there"),
            here,
        };
        self.fails(i, Some(damaged));
    }

    fn leader(&self) -> usize {
        let (record, _) = self.head(0).expect("a generation");
        let leads = |i: &usize| record.leader() == Some(node(*i));
        (0..2).find(leads).expect("one")
    }

    /// The launcher of a node has read the checkpoint of this step, and found it damaged.
    fn reads_damage(&mut self, i: usize, step: u64) {
        let all = self.store.iter().flatten();
        let mut entries = all.map(|(_, bytes)| storelog::Entry::decode(bytes).expect("an entry"));
        let seq = entries.find(|e| matches!(e.body, Body::Commit(commit) if commit.step == step));
        let why = String::from("a chunk is not what it was");
        let news = KeepNews::Checked {
            seq: seq.expect("a commit").seq,
            manifest: Digest([step as u8; 32]),
            state: State::Damaged { why },
        };
        self.says(i, SaveNews::Keep(news));
    }

    /// Whether people of a node have read this text.
    fn read(&self, i: usize, text: &str) -> bool {
        self.nodes[i].told.iter().any(|told| told.contains(text))
    }

    /// Lets a node's launcher, which was told to end, do so.
    fn launcher_ends(&mut self, i: usize) {
        self.nodes[i].running = None;
        let conn = ConnId(self.nodes[i].boot);
        self.put(
            i,
            Event::LauncherGone {
                conn,
                guard: Answer::Refused,
            },
        );
    }
}

#[test]
fn a_node_with_a_bad_view_is_left_out_and_the_checkpoint_stays() {
    left_out(false);
}

/// It hears when it asks to be let in again.
#[test]
fn a_launcher_that_has_not_heard_that_it_is_to_end_is_not_let_in() {
    left_out(true);
}

fn left_out(deaf: bool) {
    let mut world = World::restoring();
    world.deaf = deaf;
    let leads = world.leader();
    let bad = 1 - leads;
    let used = world.head(0).expect("a generation").0.restarts_used;
    world.complains(bad);
    world.until("the other goes on with it", |w| w.restores(&[leads], 20));
    let (record, _) = world.head(leads).expect("a generation");
    assert_eq!(
        record.cause,
        Cause::Misread {
            nodes: vec![node(bad)],
            step: 20
        }
    );
    assert_eq!(record.restarts_used, used, "no fault of the script");
    assert_eq!(world.rejects_in_log(), 0);
    assert_eq!(world.nodes[leads].looked_again, [20]);
    assert!(world.nodes[bad].looked_again.is_empty());
    for i in 0..2 {
        assert!(world.read(i, "the checkpoint of step 20 stays"), "node {i}");
        assert!(world.read(i, "n0-0.safetensors is not there"), "node {i}");
    }
    // It is let in again, and each time it is out for longer; then its launcher ends, and says why.
    for _ in 1..3 {
        assert_eq!(world.nodes[bad].ended, None);
        world.until("it is let in again", |w| w.restores(&[0, 1], 20));
        world.complains(bad);
        world.until("the other goes on", |w| w.restores(&[leads], 20));
    }
    world.until("it is told to end", |w| w.nodes[bad].ended.is_some());
    let (code, report) = world.nodes[bad].ended.clone().expect("it was told");
    assert_eq!(code, 1);
    for part in [
        "ends the row",
        "step 20",
        "n0-0.safetensors is not there",
        "whole",
    ] {
        assert!(report.contains(part), "{report}");
    }
    world.launcher_ends(bad);
    world.pass(Span::from_secs(30));
    assert!(world.restores(&[leads], 20));
    assert_eq!(world.rejects_in_log(), 0);
}

#[test]
fn the_leader_s_own_complaint_is_judged_by_another_node() {
    let mut world = World::restoring();
    let leads = world.leader();
    // Its launcher is no better than its rank, and is not asked.
    world.damage(leads, 20);
    world.complains(leads);
    world.until("the other goes on with it", |w| {
        w.restores(&[1 - leads], 20)
    });
    assert_eq!(world.nodes[1 - leads].looked_again, [20]);
    assert!(world.nodes[leads].looked_again.is_empty());
    assert_eq!(world.rejects_in_log(), 0);
}

#[test]
fn what_the_leader_s_launcher_alone_finds_damaged_is_not_rejected() {
    let mut world = World::training(true);
    let leads = world.leader();
    world.damage(leads, 10);
    for step in [10, 20, 30] {
        world.save(step);
        world.until("committed", |w| {
            w.committed.contains(&step) && w.slots_are_free()
        });
    }
    world.until("it is said", |w| {
        (0..2).all(|i| w.read(i, "the checkpoint of step 10 stays"))
    });
    world.pass(Span::from_secs(10));
    assert_eq!(world.rejects_in_log(), 0);
    // Once is enough, however often the launcher sees the same.
    assert_eq!(world.nodes[1 - leads].looked_again, [10]);
    // What the other finds damaged, too, is.
    world.damage(1 - leads, 20);
    world.damage(leads, 20);
    world.save(40);
    world.until("it is rejected", |w| w.taken_back().1 == [20]);
}

#[test]
fn where_nobody_can_tell_it_stays_and_the_rank_has_failed() {
    let mut world = World::restoring();
    let leads = world.leader();
    let used = world.head(0).expect("a generation").0.restarts_used;
    let max = world.head(0).expect("a generation").0.spec.max_restarts;
    assert_eq!(used, max, "none is left");
    let why = String::from("the store is away");
    world.nodes[leads]
        .view
        .insert(20, State::Unreadable { why });
    world.complains(1 - leads);
    world.until("the job has failed", |w| {
        let end = |i: usize| w.head(i).map(|(r, _)| r.kind);
        (0..2).all(|i| end(i) == Some(muster_protocol::record::Kind::Failed { code: 1 }))
    });
    assert_eq!(world.rejects_in_log(), 0);
    assert!(world.read(1 - leads, "nobody else can tell"));
    // Each node's reason.
    assert!(world.read(1 - leads, ": the store is away"));
}

#[test]
fn a_look_may_take_as_long_as_it_gets_on() {
    let mut world = World::restoring();
    let leads = world.leader();
    // The world takes dozens of steps in each second.
    let until = world.now + Span::from_secs(2_000);
    world.nodes[leads].reads = Some((until, true));
    world.complains(1 - leads);
    world.until("the other goes on with it", |w| w.restores(&[leads], 20));
    assert!(world.now >= until);
    assert!(world.read(1 - leads, "the checkpoint of step 20 stays"));
    assert_eq!(world.nodes[leads].looked_again, [20]);
    let question = &world.nodes[leads].questions[0];
    assert_eq!(
        (&*question.why, question.all),
        ("n0-0.safetensors is not there", true)
    );
}

#[test]
fn a_look_that_stands_still_is_given_up() {
    let mut world = World::restoring();
    let leads = world.leader();
    let never = world.now + Span::from_secs(1_000_000);
    world.nodes[leads].reads = Some((never, false));
    let from = world.now;
    world.complains(1 - leads);
    world.until("it is given up", |w| {
        w.read(1 - leads, "read nothing more for ten minutes")
    });
    assert!(world.now.since(from) < Span::from_secs(700));
}

#[test]
fn who_leaves_waits_for_no_second_look() {
    let mut world = World::restoring();
    let leads = world.leader();
    let never = world.now + Span::from_secs(1_000_000);
    world.nodes[leads].reads = Some((never, true));
    world.complains(1 - leads);
    world.until("it is looked at", |w| {
        !w.nodes[leads].looked_again.is_empty()
    });
    let from = world.now;
    world.hears(leads, ToAgent::Leave { grace_ms: 60_000 });
    world.until("it may go", |w| w.nodes[leads].ended.is_some());
    assert!(world.now.since(from) < Span::from_secs(5));
    // The other one tries it again, and asks again.
    world.until("the other goes on", |w| w.restores(&[1 - leads], 20));
    let (record, _) = world.head(1 - leads).expect("a generation");
    assert!(
        matches!(record.cause, Cause::NodesLeft { .. }),
        "{record:?}"
    );
    assert_eq!(world.rejects_in_log(), 0);
    world.damage(1 - leads, 20);
    world.complains(1 - leads);
    world.until("the one before is restored", |w| {
        w.restores(&[1 - leads], 10)
    });
    assert_eq!(world.taken_back().1, [20]);
}

#[test]
fn a_node_that_says_itself_that_it_cannot_read_is_left_out() {
    let mut world = World::restoring();
    let leads = world.leader();
    let used = world.head(0).expect("a generation").0.restarts_used;
    for time in 1..=3 {
        world.until("both restore it", |w| w.restores(&[0, 1], 20));
        world.complains_of(1 - leads, true);
        world.until("the other goes on with it", |w| w.restores(&[leads], 20));
        let (record, _) = world.head(leads).expect("a generation");
        let nodes = vec![node(1 - leads)];
        assert_eq!(record.cause, Cause::Misread { nodes, step: 20 });
        assert_eq!(record.restarts_used, used, "no fault of the script");
        // Nothing is doubted, so nothing is read but what was named.
        let asked = &world.nodes[leads].questions;
        assert_eq!(asked.len(), time);
        assert!(asked.iter().all(|question| !question.all));
    }
    assert!(world.read(leads, "can read what rank"));
    let (code, report) = world.nodes[1 - leads].ended.clone().expect("it ends");
    assert!(code == 1 && report.contains("that others can"), "{report}");
    assert_eq!(world.rejects_in_log(), 0);
    // Who is to read it for that one may find damage: then it is the first who does.
    let mut world = World::restoring();
    let leads = world.leader();
    world.damage(leads, 20);
    world.complains_of(1 - leads, true);
    world.until("the one before is restored", |w| w.restores(&[0, 1], 10));
    let asked = world.nodes.iter().flat_map(|n| &n.questions);
    let all: Vec<bool> = asked.map(|question| question.all).collect();
    assert_eq!(all, [false, true]);
    assert_eq!(world.taken_back().1, [20]);
    // Where others cannot read it either, the rank has failed like any other.
    let mut world = World::restoring();
    let leads = world.leader();
    let why = String::from("an input/output error");
    let state = State::Unreadable { why };
    world.nodes[leads].view.insert(20, state);
    world.complains_of(1 - leads, true);
    world.until("the job has failed", |w| {
        let end = |i: usize| w.head(i).map(|(r, _)| r.kind);
        (0..2).all(|i| end(i) == Some(muster_protocol::record::Kind::Failed { code: 1 }))
    });
    assert!(world.read(1 - leads, ": an input/output error"));
}

#[test]
fn where_nobody_could_tell_it_is_tried_again_after_a_while() {
    let mut world = World::training(true);
    let leads = world.leader();
    let other = 1 - leads;
    world.damage(leads, 20);
    let why = String::from("the store is away");
    world.nodes[other]
        .view
        .insert(20, State::Unreadable { why });
    for step in [10, 20] {
        world.save(step);
        world.until("committed", |w| {
            w.committed.contains(&step) && w.slots_are_free()
        });
    }
    world.until("nobody can tell", |w| w.read(leads, "nobody else can tell"));
    for _ in 0..3 {
        world.reads_damage(leads, 20);
        world.pass(Span::from_secs(1_100));
    }
    assert_eq!(world.nodes[other].looked_again, [20]);
    world.pass(Span::from_secs(500));
    world.nodes[other].view.clear();
    world.reads_damage(leads, 20);
    world.until("it stays", |w| {
        w.read(leads, "the checkpoint of step 20 stays")
    });
    assert_eq!(world.nodes[other].looked_again, [20, 20]);
}
