use std::collections::BTreeSet;

use super::*;

const GENERATION: Digest = Digest([7; 32]);

/// A stripe: of which image, and for which node.
type Stripe = (u64, &'static str, usize);

fn item(step: u64, file: &'static str, stripe: usize, all: usize) -> Item<Stripe> {
    Item {
        job: (step, file, stripe),
        generation: GENERATION,
        step,
        file: file.into(),
        all,
        shared: true,
    }
}

/// The files of local ranks.
const FILES: [&str; 2] = ["n0-0", "n0-1"];

/// One of so many local ranks seals a save, to be brought in so many stripes.
fn seal(queue: &mut Queue<Stripe>, step: u64, rank: (u16, u16), all: usize, now: Instant) {
    let (rank, ranks) = rank;
    for stripe in 0..all {
        queue.add(item(step, FILES[usize::from(rank)], stripe, all), now);
    }
    queue.sealed(GENERATION, step, rank, ranks);
}

/// The only rank here seals a save.
fn add(queue: &mut Queue<Stripe>, step: u64, all: usize, now: Instant) {
    seal(queue, step, (0, 1), all, now);
}

/// Takes the next one, which has to be this.
fn takes(queue: &mut Queue<Stripe>, now: Instant, is: Stripe) -> Item<Stripe> {
    let (item, _) = queue.take(now).unwrap();
    assert_eq!(item.job, is);
    item
}

/// A step that is sent at any level.
fn chosen(from: u64) -> u64 {
    let is = |step: &u64| is_chosen(*step, MAX_LEVEL);
    (from..from + 10_000).find(is).unwrap()
}

/// Saves come once in so many milliseconds, to be sent in as many stripes; a slot is filled again two saves later.
const EVERY: u64 = 1_000;
const STRIPES: usize = 5;

/// A node that takes so long for a stripe: the steps all of which it has sent, and how it stands.
fn sends(stripe_ms: u64, saves: u64) -> (BTreeSet<u64>, Standing) {
    let begin = Instant::now();
    let mut queue = Queue::new();
    let mut whole = BTreeSet::new();
    let mut under_way: Option<(u64, Item<Stripe>)> = None;
    let overwritten = |step: u64, ms: u64| ms >= (step / 50 + 2) * EVERY;
    for ms in 0..saves * EVERY {
        let now = begin + Duration::from_millis(ms);
        if ms % EVERY == 0 {
            // Two ranks, a moment apart.
            let step = ms / EVERY * 50;
            seal(&mut queue, step, (0, 2), STRIPES, now);
        }
        if ms % EVERY == 3 {
            seal(&mut queue, ms / EVERY * 50, (1, 2), STRIPES, now);
        }
        match under_way.take() {
            Some((until, item)) if ms < until => under_way = Some((until, item)),
            Some((_, item)) if overwritten(item.step, ms) => queue.leave(&item, Left::Slow),
            Some((_, item)) => queue.leave(&item, Left::Held),
            None => {}
        }
        while under_way.is_none()
            && let Some((item, _)) = queue.take(now)
        {
            match overwritten(item.step, ms) {
                true => queue.leave(&item, Left::Slow),
                false => under_way = Some((ms + stripe_ms, item)),
            }
        }
        whole.extend(queue.standing().whole);
    }
    (whole, queue.standing())
}

#[test]
fn who_is_fast_enough_sends_all() {
    let (whole, standing) = sends(90, 40);
    assert!(whole.len() >= 39, "{whole:?}");
    assert_eq!((standing.behind, standing.missed), (0, 0));
}

#[test]
fn who_is_behind_finishes_some_and_the_same_as_others() {
    // From a little too slow to almost two saves' time: ten stripes each.
    let times = [90, 110, 130, 150, 170, 190];
    let all = times.map(|ms| sends(ms, 1_000));
    for (ms, (whole, standing)) in times.iter().zip(&all) {
        assert!(whole.len() >= 50, "{ms}: {}", whole.len());
        assert!(*ms < 100 || standing.slow > 100, "{ms}: {standing:?}");
        assert_eq!(standing.missed, standing.slow, "{ms}: {standing:?}");
    }
    // A group is as good as the saves that all of it has sent.
    let mut common = all[0].0.clone();
    for (whole, _) in &all {
        common = common.intersection(whole).copied().collect();
    }
    assert!(common.len() >= 20, "{}", common.len());
}

#[test]
fn what_cannot_be_done_in_time_is_counted() {
    let (whole, standing) = sends(300, 100);
    assert!(whole.is_empty(), "{whole:?}");
    assert!(standing.behind >= 95, "{standing:?}");
    assert_eq!((standing.whole, standing.missed), (None, standing.behind));
}

#[test]
fn a_save_that_was_begun_is_finished_and_the_next_is_the_newest() {
    let mut queue = Queue::new();
    let now = Instant::now();
    let (a, b) = (chosen(1), chosen(5_000));
    let c = chosen(b + 1);
    seal(&mut queue, a, (0, 2), 2, now);
    seal(&mut queue, a, (1, 2), 1, now);
    let first = takes(&mut queue, now, (a, "n0-0", 0));
    for step in [b, c] {
        seal(&mut queue, step, (0, 2), 2, now);
        // It writes nothing of these.
        seal(&mut queue, step, (1, 2), 0, now);
    }
    assert_eq!((queue.standing().missed, queue.standing().slow), (1, 1));
    queue.leave(&first, Left::Held);
    for stripe in [(a, "n0-0", 1), (a, "n0-1", 0)] {
        let item = takes(&mut queue, now, stripe);
        assert_eq!(queue.standing().whole, None);
        queue.leave(&item, Left::Held);
    }
    assert_eq!(
        (queue.standing().whole, queue.standing().behind),
        (Some(a), 1)
    );
    for stripe in [(c, "n0-0", 0), (c, "n0-0", 1)] {
        let item = takes(&mut queue, now, stripe);
        queue.leave(&item, Left::Held);
    }
    assert_eq!(
        (queue.standing().whole, queue.standing().behind),
        (Some(c), 0)
    );
    assert!(queue.take(now).is_none() && queue.next_at().is_none());
}

#[test]
fn a_node_that_takes_nothing_holds_up_no_other() {
    let mut queue = Queue::new();
    let now = Instant::now();
    let later = |seconds| now + Duration::from_secs(seconds);
    add(&mut queue, 10, 2, now);
    let (failing, tries) = queue.take(now).unwrap();
    queue.again(failing, tries, now);
    let item = takes(&mut queue, now, (10, "n0-0", 1));
    queue.leave(&item, Left::Held);
    assert!(queue.take(now).is_none() && queue.next_at() == Some(later(1)));
    // All of it was tried: the next save takes its place, and it is counted.
    add(&mut queue, 20, 2, now);
    let standing = queue.standing();
    assert_eq!((standing.behind, standing.slow), (1, 0), "{standing:?}");
    for stripe in 0..2 {
        let item = takes(&mut queue, now, (20, "n0-0", stripe));
        queue.leave(&item, Left::Held);
    }
    assert_eq!(queue.standing().behind, 0);
    // It is not tried for ever.
    add(&mut queue, 30, 1, now);
    let mut tried = 0;
    while let Some((item, tries)) = queue.take(later(100 + 2 * tried)) {
        queue.again(item, tries, later(100 + 2 * tried));
        tried += 1;
        assert!(tried <= u64::from(TRIES));
    }
    assert_eq!((tried, queue.standing().behind), (u64::from(TRIES), 1));
}

#[test]
fn another_generation_begins_anew() {
    let mut queue = Queue::new();
    let now = Instant::now();
    add(&mut queue, 10, 2, now);
    let old = takes(&mut queue, now, (10, "n0-0", 0));
    let mut new = item(10, "n0-0", 0, 1);
    new.generation = Digest([8; 32]);
    queue.add(new, now);
    queue.sealed(Digest([8; 32]), 10, 0, 1);
    queue.leave(&old, Left::Slow);
    let new = takes(&mut queue, now, (10, "n0-0", 0));
    queue.leave(&new, Left::Held);
    assert!(queue.take(now).is_none());
    assert_eq!(
        (queue.standing().whole, queue.standing().missed),
        (Some(10), 0)
    );
    // What is over is no save that was missed.
    let mut over = item(20, "n0-0", 0, 1);
    over.generation = Digest([8; 32]);
    queue.add(over.clone(), now);
    let _taken = queue.take(now);
    queue.leave(&over, Left::Over);
    assert_eq!((queue.standing().behind, queue.standing().missed), (0, 0));
}

/// Ranks seal one after the other: what is held of the first is not yet the save, for no moment.
#[test]
fn a_save_is_whole_once_every_rank_has_sealed_it() {
    let (mut queue, now) = (Queue::new(), Instant::now());
    let sends = |queue: &mut Queue<Stripe>, step, rank: u16, why| {
        seal(queue, step, (rank, 2), 1, now);
        let item = takes(queue, now, (step, FILES[usize::from(rank)], 0));
        queue.leave(&item, why);
        let standing = queue.standing();
        (standing.whole, standing.behind)
    };
    for (count, step) in (1..).zip([10, 20, 30]) {
        assert_eq!(sends(&mut queue, step, 0, Left::Held), (None, count - 1));
        assert_eq!(sends(&mut queue, step, 1, Left::Failed), (None, count));
    }
    // Whichever rank it is.
    for (count, step) in (4..).zip([40, 50]) {
        assert_eq!(sends(&mut queue, step, 1, Left::Failed), (None, count));
        assert_eq!(sends(&mut queue, step, 0, Left::Held), (None, count));
    }
    assert_eq!(sends(&mut queue, 60, 1, Left::Held), (None, 5));
    assert_eq!(sends(&mut queue, 60, 0, Left::Held), (Some(60), 0));
    // A rank that has nothing to bring counts like any other, first or last.
    seal(&mut queue, 70, (1, 2), 0, now);
    assert_eq!(queue.standing().whole, Some(60));
    assert_eq!(sends(&mut queue, 70, 0, Left::Held), (Some(70), 0));
    assert_eq!(sends(&mut queue, 80, 0, Left::Held), (Some(70), 0));
    seal(&mut queue, 80, (1, 2), 0, now);
    assert_eq!(queue.standing().whole, Some(80));
    assert!(queue.saves.is_empty(), "{:?}", queue.saves);
}
