//! An unmodified PyTorch script on hosts of its own.

use nix::sys::signal::Signal;

use super::without;
use crate::harness::{Bed, Follow, Trained, now_ns, project, python};

/// An unmodified PyTorch script on three agents: each change of the nodes in turn, by a bed and
/// its hosts; after each the script resumes with the ranks that are left.
#[test]
fn a_ddp_script_outlives_every_change_of_its_nodes() {
    let mut bed = Bed::on_hosts(&["--nnodes=2:3"]);
    let follow = start(&mut bed);
    let three = follow.group(&[1, 2, 3], 0);
    follow.step(30);

    let after = kill(&mut bed, &follow, &three);
    let three = join(&mut bed, &follow, &after);
    let three = cut(&mut bed, &follow, &three);

    // A drained node leaves at a step that all ranks agree on, and none is lost.
    let leaves = three.nodes()[1];
    let at = now_ns();
    bed.drain(leaves);
    let two = follow.group(&without(leaves), at);
    assert!(two.resumed > 0);
    assert_eq!(bed.ended(leaves), Some(143));
    follow.check(&three);

    let left = without(leaves);
    bed.signal(bed.launcher_pid(left[0]), Signal::SIGINT);
    for node in left {
        assert_eq!(bed.ended(node), Some(130), "n{node}");
    }
}

fn start(bed: &mut Bed) -> Follow {
    let (events, dir) = (bed.path("ddp"), bed.path("checkpoints"));
    bed.script(&[
        "--",
        &python(),
        &project("examples/ddp.py"),
        "--steps=1000000",
        "--step-seconds=0.02",
        "--save-every=10",
        "--checkpoint-dir",
        dir.to_str().unwrap(),
        "--events",
        events.to_str().unwrap(),
    ]);
    bed.env("OMP_NUM_THREADS", "1");
    for node in 1..4 {
        bed.agent(node);
    }
    for node in 1..4 {
        bed.attach(node);
    }
    Follow { file: events }
}

/// Rank 0's node dies: another one hosts the store of the process group. Its node.
fn kill(bed: &mut Bed, follow: &Follow, three: &Trained) -> usize {
    let dies = three.nodes()[0];
    let at = bed.kill(dies);
    let two = follow.group(&without(dies), at);
    assert_eq!(
        two.nodes(),
        three.nodes()[1..],
        "survivors keep their order"
    );
    assert!(two.resumed > 0, "from the script's checkpoint");
    dies
}

fn join(bed: &mut Bed, follow: &Follow, joins: &usize) -> Trained {
    let at = now_ns();
    bed.agent(*joins);
    bed.attach(*joins);
    let three = follow.group(&[1, 2, 3], at);
    assert_eq!(three.nodes()[2], *joins);
    three
}

/// A link is cut without a sound. The others go on; by then the lease has ended the workers of
/// the node that cannot know.
fn cut(bed: &mut Bed, follow: &Follow, three: &Trained) -> Trained {
    let silent = three.nodes()[2];
    let at = now_ns();
    bed.hosts().cut(silent);
    follow.group(&without(silent), at);
    assert!(
        !bed.is_alive(three.pid(silent)),
        "it trains without a lease"
    );
    let said = bed.said(silent);
    assert!(said.contains("the job cannot go on here"), "{said}");
    let at = now_ns();
    bed.hosts().heal();
    follow.group(&[1, 2, 3], at)
}
