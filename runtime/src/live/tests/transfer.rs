//! Losses while a newcomer's copy is under way.

use super::*;

fn newcomer(few: bool, kill: Option<Point>) -> Model {
    Model::new(kill.map(|point| (0, point))).with_few(few)
}

#[test]
fn a_source_dies_and_another_one_hands_over() {
    for point in [Point::Handing, Point::AfterHanding] {
        for (victim, few) in (0..3).flat_map(|victim| BOTH.map(|few| (victim, few))) {
            let mut job = Job::start(3, few, &BTreeMap::from([(victim, (0, point))]));
            job.until(3);
            job.regroup(1);
            job.until_dead(1);
            job.regroup(0);
            assert_eq!(job.ranks.len(), 3, "two sources and the newcomer");
            job.finish(&format!("source {victim} dies at {point:?}"));
        }
    }
}

#[test]
fn a_newcomer_dies_while_it_copies_and_nobody_notices() {
    for few in BOTH {
        let mut job = Job::start(2, few, &BTreeMap::new());
        job.until(3);
        for _ in 0..3 {
            job.regroup_with(vec![newcomer(few, Some(Point::Copied))]);
            job.until_dead(1);
            job.regroup(0);
            let then = job.newest() + 3;
            job.until(then);
        }
        // The next one comes in.
        job.regroup(1);
        job.finish("newcomers die");
    }
}

#[test]
fn the_only_source_and_the_newcomer_change_places() {
    // The source dies when the copy is here: the newcomer alone has the state.
    let mut job = Job::start(1, true, &BTreeMap::new());
    job.until(4);
    job.regroup(1);
    let then = job.newest() + 10;
    job.until(then);
    let source = job.ranks.remove(0);
    source.end();
    drop(source.orders);
    let left = source.thread.join().expect("leaves");
    job.regroup(0);
    let then = then + 10;
    job.until(then);
    job.regroup(1);
    assert!(left.log.len() as u64 >= 4);
    job.finish("the source is gone");
}
