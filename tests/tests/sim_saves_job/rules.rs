//! The log says what the job keeps, as its leader's launcher was started.

use muster_protocol::storelog::Rules;

use super::*;

fn keeps(last: u32) -> Rules {
    Rules {
        last,
        best: 0,
        metric: "loss".into(),
        highest: false,
    }
}

impl World {
    fn logged(&self) -> Vec<u32> {
        let all = self.store.iter().flatten();
        let entries = all.map(|(_, bytes)| storelog::Entry::decode(bytes).expect("an entry"));
        let rules = |e: storelog::Entry| match e.body {
            Body::Rules(rules) => Some(rules.last),
            _ => None,
        };
        entries.filter_map(rules).collect()
    }

    fn commits(&mut self, step: u64) {
        self.save(step);
        self.until("committed", |w| {
            w.committed.contains(&step) && w.slots_are_free()
        });
    }
}

#[test]
fn the_leader_s_rules_are_in_the_log_once_there_is_something_to_keep() {
    let mut world = World::training(true);
    for i in 0..2 {
        world.says(i, SaveNews::Keep(KeepNews::Rules(keeps(10))));
    }
    world.pass(Span::from_secs(5));
    assert_eq!(world.logged(), [0; 0]);
    for step in [10, 20, 30] {
        world.commits(step);
    }
    world.until("they are logged", |w| !w.logged().is_empty());
    world.pass(Span::from_secs(5));
    assert_eq!(world.logged(), [10], "once is enough");
    // Started anew with others: these are the job's from the next generation on.
    for i in 0..2 {
        world.says(i, SaveNews::Keep(KeepNews::Rules(keeps(2))));
    }
    world.fails(1, None);
    world.until("all begin anew", |w| {
        w.trains(&[0, 1]) && w.head(0).is_some_and(|(r, _)| r.number == 2)
    });
    (0..2).for_each(|i| world.give_slots(i));
    world.until("they are logged", |w| w.logged() == [10, 2]);
}
