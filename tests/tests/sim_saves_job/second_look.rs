//! No good checkpoint is lost by one node's bad view: what one finds damaged, another reads before it is
//! rejected.

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
        let (record, _) = self.head(i).expect("a generation");
        let manifest = record.restore.expect("a checkpoint").manifest;
        let why = String::from("n0-0.safetensors is not there");
        self.fails(i, Some(Damaged { manifest, why }));
    }

    fn leader(&self) -> usize {
        let (record, _) = self.head(0).expect("a generation");
        let leads = |i: &usize| record.leader() == Some(node(*i));
        (0..2).find(leads).expect("one")
    }

    /// What people of a node have read about this step.
    fn read(&self, i: usize, text: &str) -> bool {
        self.nodes[i].told.iter().any(|told| told.contains(text))
    }

    /// Lets a node's launcher, which was told to end, do so.
    fn launcher_ends(&mut self, i: usize) {
        self.nodes[i].running = None;
        let conn = ConnId(self.nodes[i].boot);
        self.put(i, Event::LauncherGone { conn, alive: false });
    }
}

#[test]
fn a_node_with_a_bad_view_is_left_out_and_the_checkpoint_stays() {
    let mut world = World::restoring();
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
    let (code, report) = world.nodes[bad].ended.clone().expect("it was told to end");
    assert_eq!(code, 1);
    for part in ["step 20", "n0-0.safetensors is not there", "whole"] {
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
}

#[test]
fn a_job_that_a_user_ends_waits_for_no_second_look() {
    let mut world = World::restoring();
    let leads = world.leader();
    world.nodes[leads].reads_on = true;
    world.complains(1 - leads);
    world.until("it is looked at", |w| {
        !w.nodes[leads].looked_again.is_empty()
    });
    world.hears(leads, ToAgent::Cancel);
    world.until("the job is over", |w| {
        let end = |i: usize| w.head(i).map(|(r, _)| r.kind);
        (0..2).all(|i| {
            matches!(
                end(i),
                Some(muster_protocol::record::Kind::End { cancelled: true })
            )
        })
    });
    assert_eq!(world.rejects_in_log(), 0);
}

#[test]
fn a_node_alone_looks_once_more_by_itself() {
    let mut world = World::restoring();
    let leads = world.leader();
    world.stop_agent(1 - leads);
    world.nodes[1 - leads].running = None;
    world.until("it is alone", |w| w.restores(&[leads], 20));
    // Its rank misread it: read again, it is whole.
    world.complains(leads);
    let before = world.head(leads).expect("a generation").1;
    world.until("it tries again", |w| {
        w.restores(&[leads], 20) && w.head(leads).map(|(_, digest)| digest) != Some(before)
    });
    assert_eq!(world.nodes[leads].looked_again, [20]);
    assert_eq!(world.rejects_in_log(), 0);
    // A rank that loads it ends the row.
    let digest = world.head(leads).expect("a generation").1;
    world.says(leads, SaveNews::Loaded { digest });
    world.until("it may begin", |w| w.nodes[leads].go == Some(digest));
    for _ in 0..2 {
        assert_eq!(world.nodes[leads].ended, None);
        let before = world.head(leads).expect("a generation").1;
        world.complains(leads);
        world.until("it tries again", |w| {
            w.restores(&[leads], 20) && w.head(leads).map(|(_, digest)| digest) != Some(before)
        });
    }
    assert_eq!(world.nodes[leads].ended, None);
    world.complains(leads);
    world.until("it gives up", |w| w.nodes[leads].ended.is_some());
    // And what is damaged is rejected, though nobody else can look.
    let mut world = World::restoring();
    let leads = world.leader();
    world.stop_agent(1 - leads);
    world.nodes[1 - leads].running = None;
    world.until("it is alone", |w| w.restores(&[leads], 20));
    world.damage(leads, 20);
    world.complains(leads);
    world.until("the one before is restored", |w| w.restores(&[leads], 10));
    assert_eq!(world.taken_back().1, [20]);
}
