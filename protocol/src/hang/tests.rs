use super::*;

const LOOK: Span = Span::from_millis(100);

fn limits(factor: u32, least_ms: u64) -> Limits {
    Limits {
        factor,
        least: Span::from_millis(least_ms),
    }
}

/// A launcher that looks every 100 ms at workers whose steps a test gives.
struct Bench {
    watch: Watch,
    now: Time,
    changes: Vec<(u64, bool)>,
}

impl Bench {
    fn new(limits: Limits) -> Bench {
        Bench {
            watch: Watch::new(limits),
            now: Time(1 << 40),
            changes: Vec::new(),
        }
    }

    /// Looks for so long; `at` says where the workers stand after so many milliseconds of it.
    fn look(&mut self, ms: u64, at: impl Fn(u64) -> Vec<(u32, Point)>) {
        for passed in (0..ms).step_by(100) {
            self.now += LOOK;
            if let Some(change) = self.watch.look(at(passed), self.now) {
                self.changes.push((passed, change));
            }
        }
    }

    fn changes(&mut self) -> Vec<(u64, bool)> {
        std::mem::take(&mut self.changes)
    }
}

fn step(step: u64) -> Point {
    Point { step, operation: 0 }
}

#[test]
fn a_worker_that_stands_still_is_seen_after_the_longer_of_both_limits() {
    // Steps of 200 ms, 20 times that: 4 s.
    for (factor, least, expected) in [(20, 1_000, 4_000), (20, 6_000, 6_000), (10, 0, 2_000)] {
        let mut bench = Bench::new(limits(factor, least));
        bench.look(4_000, |ms| vec![(3, step(ms / 200))]);
        assert_eq!(bench.changes(), []);
        bench.look(10_000, |_| vec![(3, step(19))]);
        let changes = bench.changes();
        let [(at, true)] = changes.as_slice() else {
            panic!("{changes:?}")
        };
        let late = at.abs_diff(expected);
        assert!(late <= 200, "{factor} {least}: {at}");
        // It moves again.
        bench.look(1_000, |ms| vec![(3, step(20 + ms / 200))]);
        assert_eq!(bench.changes(), [(0, false)]);
    }
}

#[test]
fn a_worker_of_short_steps_is_judged_though_few_looks_saw_it_move() {
    let mut bench = Bench::new(limits(20, 1_000));
    bench.look(300, |ms| vec![(0, step(ms / 20))]);
    bench.look(5_000, |_| vec![(0, step(10))]);
    let changes = bench.changes();
    assert!(matches!(changes[..], [(900..=1_200, true)]), "{changes:?}");
}

#[test]
fn off_means_off_and_the_first_steps_are_not_judged() {
    let mut off = Bench::new(limits(0, 0));
    off.look(4_000, |ms| vec![(0, step(ms / 200))]);
    off.look(100_000, |_| vec![(0, step(20))]);
    assert_eq!(off.changes(), []);
    // The first step compiles for ten minutes.
    let mut first = Bench::new(limits(20, 1_000));
    first.look(600_000, |_| vec![(0, step(0))]);
    first.look(800, |ms| vec![(0, step(1 + ms / 200))]);
    first.look(600_000, |_| vec![(0, step(4))]);
    assert_eq!(first.changes(), []);
}

#[test]
fn slow_progress_and_a_long_pause_of_all_are_no_hang() {
    let mut bench = Bench::new(limits(20, 1_000));
    let both = |at: u64| vec![(0, step(at)), (1, step(at))];
    bench.look(10_000, |ms| both(ms / 500));
    // Ten times slower than before, but it moves.
    bench.look(60_000, |ms| both(20 + ms / 5_000));
    assert_eq!(bench.changes(), []);
    // A checkpoint of nine seconds, where steps took half a second: below 20 times that.
    bench.look(30_000, |ms| both(40 + ms / 500));
    bench.look(9_000, |_| both(99));
    bench.look(5_000, |ms| both(100 + ms / 500));
    assert_eq!(bench.changes(), []);
}

#[test]
fn progress_inside_a_step_counts() {
    let mut bench = Bench::new(limits(20, 1_000));
    bench.look(4_000, |ms| vec![(0, step(ms / 200))]);
    bench.look(60_000, |ms| {
        vec![(
            0,
            Point {
                step: 20,
                operation: ms / 1_000,
            },
        )]
    });
    assert_eq!(bench.changes(), []);
}

#[test]
fn time_in_which_nobody_looked_does_not_count() {
    let mut bench = Bench::new(limits(20, 5_000));
    bench.look(4_000, |ms| vec![(0, step(ms / 200))]);
    // The machine sleeps for a day, three times; then the clock goes back.
    for _ in 0..3 {
        bench.now += Span::from_secs(86_400);
        bench.look(100, |_| vec![(0, step(20))]);
    }
    bench.now = Time(1 << 30);
    bench.look(1_000, |_| vec![(0, step(20))]);
    assert_eq!(bench.changes(), []);
    bench.look(10_000, |_| vec![(0, step(20))]);
    assert_eq!(bench.changes().len(), 1, "but a hang is still seen");
}

#[test]
fn who_detaches_or_begins_anew_is_not_judged() {
    let mut bench = Bench::new(limits(20, 1_000));
    bench.look(4_000, |ms| vec![(0, step(ms / 200)), (1, step(ms / 200))]);
    // Rank 1 has ended its loop and detached; rank 0 is a new process at step 0.
    bench.look(60_000, |_| vec![(0, step(0))]);
    assert_eq!(bench.changes(), []);
    assert_eq!(bench.watch.standings().len(), 1);
    // Told to wait: it does not count against them.
    let mut waits = Bench::new(limits(20, 1_000));
    waits.look(4_000, |ms| vec![(0, step(ms / 200))]);
    for _ in 0..100 {
        waits.now += Span::from_secs(1);
        waits.watch.rest(waits.now);
    }
    waits.look(3_000, |_| vec![(0, step(20))]);
    assert_eq!(waits.changes(), []);
}

fn node(n: u8) -> NodeId {
    NodeId([n; 32])
}

const POLL: Doing = Doing {
    state: b'S',
    call: Some(7),
};

/// A node with one rank of the same number.
fn at(n: u8, step: u64, operation: u64, doing: Doing) -> (NodeId, Vec<Standing>) {
    let standing = Standing {
        rank: n.into(),
        point: Point { step, operation },
        idle_ms: 60_000 + u32::from(n),
        stalled: true,
        doing,
    };
    (node(n), vec![standing])
}

#[track_caller]
fn check(all: &[(NodeId, Vec<Standing>)], ranks: &[u32], evidence: Evidence) {
    let hang = judge(all, Vec::new()).unwrap();
    let named: Vec<u32> = hang.ranks.iter().map(|n| n.rank).collect();
    assert_eq!((named.as_slice(), hang.evidence), (ranks, evidence));
}

#[test]
fn who_is_behind_is_named() {
    let stopped = Doing {
        state: b'T',
        call: None,
    };
    let sleeps = Doing {
        state: b'S',
        call: Some(230),
    };
    let three = |odd: (NodeId, Vec<Standing>)| vec![at(0, 8, 5, POLL), odd, at(2, 8, 5, POLL)];
    check(&three(at(1, 7, 9, POLL)), &[1], Evidence::Step);
    check(&three(at(1, 8, 4, POLL)), &[1], Evidence::Operation);
    // It said that it was alive before it hung: that is no operation.
    check(
        &three(at(1, 8, 4 + 9 * ALIVE, POLL)),
        &[1],
        Evidence::Operation,
    );
    check(&three(at(1, 8, 5, stopped)), &[1], Evidence::Stopped);
    check(&three(at(1, 8, 5, sleeps)), &[1], Evidence::Odd);
    check(&three(at(1, 8, 5, POLL)), &[0, 1, 2], Evidence::Nothing);
    // Two are behind, and one of these is stopped.
    let mut four = three(at(1, 7, 0, stopped));
    four.push(at(3, 7, 0, POLL));
    check(&four, &[1], Evidence::Step);
    // Of two nobody is the odd one; a process that is stopped is.
    check(
        &[at(0, 8, 5, POLL), at(1, 8, 5, sleeps)],
        &[0, 1],
        Evidence::Nothing,
    );
    check(
        &[at(0, 8, 5, POLL), at(1, 8, 5, stopped)],
        &[1],
        Evidence::Stopped,
    );
    // What is not known makes nobody odd.
    check(
        &three(at(1, 8, 5, Doing::default())),
        &[0, 1, 2],
        Evidence::Nothing,
    );
    assert_eq!(judge(&[(node(1), Vec::new())], Vec::new()), None);
}

fn goes_on(standing: &mut Standing, idle_ms: u32) {
    standing.stalled = false;
    standing.idle_ms = idle_ms;
}

#[test]
fn who_stands_still_while_others_go_on_is_named() {
    let mut all = vec![
        at(0, 8, 0, POLL),
        at(1, 7, 0, POLL),
        at(2, 9, 0, POLL),
        at(3, 9, 0, POLL),
    ];
    for moving in [0, 2, 3] {
        goes_on(&mut all[moving].1[0], 200);
    }
    check(&all, &[1], Evidence::Alone);
}

#[test]
fn nobody_is_named_while_a_rank_that_is_no_further_is_busy() {
    let busy = |step, operation| {
        let mut all = vec![
            at(0, step, operation, POLL),
            at(1, 8, 1, POLL),
            at(2, 8, 1, POLL),
        ];
        goes_on(&mut all[0].1[0], 0);
        all
    };
    // It saves by order, and its launcher rests; it is a step behind; it says that it is alive.
    for (step, operation) in [(8, 0), (7, 5), (8, 40 * ALIVE)] {
        let all = busy(step, operation);
        assert_eq!(judge(&all, Vec::new()), None, "{step} {operation}");
    }
    // It is busy no more, and has waited less if it joined later.
    for idle_ms in [55_000, 5_000] {
        let mut all = busy(8, 0);
        all[0].1[0].idle_ms = idle_ms;
        all[0].1[0].stalled = true;
        check(&all, &[0], Evidence::Operation);
    }
    // Ranks that are a step ahead wait for nobody behind.
    check(&busy(9, 0), &[1, 2], Evidence::Alone);
}

#[test]
fn nobody_is_named_once_all_go_on_nor_for_whom_a_silent_node_may_be_waited() {
    let mut all = vec![at(0, 8, 1, POLL), at(1, 7, 0, POLL)];
    assert!(judge(&all, Vec::new()).is_some());
    for (_, list) in &mut all {
        // They went on before they were asked, some later than others.
        goes_on(&mut list[0], 0);
    }
    assert_eq!(judge(&all, Vec::new()), None);
    let waits = [at(0, 8, 1, POLL), at(1, 8, 1, POLL)];
    assert!(judge(&waits, Vec::new()).is_some());
    assert_eq!(judge(&waits, vec![node(2)]), None);
}

#[test]
fn the_sentence_names_rank_node_and_reason() {
    let all = [at(0, 8, 5, POLL), at(1, 7, 0, POLL), at(2, 8, 5, POLL)];
    let hang = judge(&all, vec![node(9)]).unwrap();
    let text = hang.text(|n| format!("n{}", n.0[0]));
    assert_eq!(
        text,
        "hung: no progress for 60.0 s at step 7; 2 other ranks wait for rank 1 on n1 (the others are a \
         step ahead); no answer came from n9"
    );
    assert_eq!(hang.ranks_of(node(1)), [1]);
    assert!(hang.ranks_of(node(0)).is_empty());
    let alone = judge(&all[..1], Vec::new()).unwrap();
    let text = alone.text(|_| "n0".into());
    assert_eq!(
        text,
        "hung: no progress for 60.0 s at step 8; rank 0 on n0 stands still"
    );
    let alike = judge(&[at(0, 8, 1, POLL), at(1, 8, 1, POLL)], Vec::new()).unwrap();
    let text = alike.text(|_| "n0".into());
    assert!(
        text.ends_with("singled out: rank 0 on n0, rank 1 on n0"),
        "{text}"
    );
}
