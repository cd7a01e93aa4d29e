use proptest::prelude::*;

use super::*;

fn schedule(base: Base, warm_up: Option<WarmUp>) -> Schedule {
    Schedule {
        rate: 0.1,
        base,
        scaling: Scaling::default(),
        warm_up,
    }
}

fn epoch(epoch: f64) -> At {
    At {
        step: (epoch * 100.0) as u64,
        epoch,
    }
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-12 * b.abs().max(1e-3)
}

#[test]
fn scaling_is_linear_to_8192_and_the_square_root_beyond() {
    let scaling = Scaling::default();
    for (batch, factor) in [(64, 0.25), (256, 1.0), (1024, 4.0), (8192, 32.0)] {
        assert_eq!(scaling.factor(batch), factor);
    }
    assert_eq!(scaling.factor(4 * 8192), 64.0);
    assert!(close(
        scaling.factor(8193) / 32.0,
        (8193.0f64 / 8192.0).sqrt()
    ));
    assert_eq!(Scaling::SquareRoot { reference: 256 }.factor(1024), 2.0);
    assert_eq!(Scaling::None.factor(1 << 40), 1.0);
    assert_eq!(Scaling::SquareRoot { reference: 0 }.factor(4), 2.0);
}

/// 8,192 samples: 0.1 rises to 3.2 over 5 epochs, divided by 10 at 30, 60 and 80 (the paper's section 5.1,
/// whose rate is 0.1 for 256).
#[test]
fn the_papers_schedule() {
    let steps = [30.0, 60.0, 80.0].map(Span::Epochs).to_vec();
    let base = Base::Step {
        at: steps,
        factor: 0.1,
    };
    let schedule = schedule(base, Some(WarmUp::goyal()));
    for (at, rate) in [
        (0.0, 0.1),
        (2.5, 1.65),
        (5.0, 3.2),
        (29.99, 3.2),
        (30.0, 0.32),
        (60.0, 0.032),
        (89.0, 0.0032),
    ] {
        let got = schedule.at(epoch(at), 8192);
        assert!(close(got, rate), "{at}: {got} is not {rate}");
    }
    // Below the reference there is nothing to warm up to.
    assert!(close(schedule.at(epoch(0.0), 128), 0.05));
}

#[test]
fn warm_up_over_steps_from_a_part() {
    let warm_up = WarmUp {
        over: Span::Steps(10),
        from: WarmUpFrom::Part(0.1),
    };
    let schedule = schedule(Base::Constant, Some(warm_up));
    let at = |step| schedule.at(At { step, epoch: 0.0 }, 256);
    assert!(close(at(0), 0.01) && close(at(5), 0.055));
    assert_eq!((at(10), at(1000)), (0.1, 0.1));
    let none = WarmUp {
        over: Span::Steps(0),
        ..warm_up
    };
    assert_eq!(
        self::schedule(Base::Constant, Some(none)).at(At::default(), 256),
        0.1
    );
}

#[test]
fn cosines_end_at_the_floor_or_start_again() {
    let cosine = |growth| Base::Cosine {
        period: Span::Epochs(10.0),
        floor: 0.2,
        growth,
    };
    let at = |growth, x| cosine(growth).factor(epoch(x));
    assert_eq!(
        (at(None, 0.0), at(None, 10.0), at(None, 99.0)),
        (1.0, 0.2, 0.2)
    );
    assert!(close(at(None, 5.0), 0.6));
    assert!(close(at(Some(1.0), 25.0), 0.6) && at(Some(1.0), 30.0) == 1.0);
    // 10, 20, 40 epochs.
    assert_eq!((at(Some(2.0), 10.0), at(Some(2.0), 30.0)), (1.0, 1.0));
    assert!(close(at(Some(2.0), 20.0), 0.6) && close(at(Some(2.0), 50.0), 0.6));
    // Sizes that make no sense still give a rate.
    for len in [0.0, -1.0, f64::NAN] {
        let odd = Base::Cosine {
            period: Span::Epochs(len),
            floor: 0.2,
            growth: Some(2.0),
        };
        assert_eq!(odd.factor(epoch(3.0)), 0.2);
    }
    assert!(at(Some(2.0), 1e300).is_finite());
}

#[test]
fn a_larger_batch_is_reached_gradually_and_a_smaller_one_at_once() {
    let schedule = schedule(Base::Constant, None);
    let mut rate = Rate::new(schedule.clone(), 256, Span::Epochs(2.0));
    rate.set_batch(1024, epoch(10.0));
    let got = [10.0, 11.0, 12.0, 50.0].map(|at| rate.at(epoch(at)));
    assert!(
        got.iter()
            .zip([0.1, 0.25, 0.4, 0.4])
            .all(|(a, b)| close(*a, b)),
        "{got:?}"
    );
    // Down again in the middle of the rise, then up from there.
    rate.set_batch(512, epoch(11.0));
    assert!(close(rate.at(epoch(11.0)), 0.2));
    rate.set_batch(1024, epoch(11.0));
    assert!(close(rate.at(epoch(12.0)), 0.3));
    let copy = rate.clone();
    rate.set_batch(1024, epoch(11.5));
    assert_eq!(rate, copy, "the same batch is no change");
    let mut newcomer = Rate::new(schedule, 1, Span::Epochs(2.0));
    assert!(newcomer.decode(&rate.encode()));
    assert_eq!(newcomer, rate);
}

proptest! {
    #[test]
    fn without_a_change_a_rate_is_its_schedule(batch in 1u64..100_000, at in 0.0f64..100.0) {
        let base = Base::Cosine { period: Span::Epochs(90.0), floor: 0.01, growth: None };
        let schedule = schedule(base, Some(WarmUp::goyal()));
        let rate = Rate::new(schedule.clone(), batch, Span::Steps(10));
        prop_assert_eq!(rate.at(epoch(at)), schedule.at(epoch(at), batch));
    }

    #[test]
    fn a_rise_is_steady_and_stays_between(
        a in 1u64..100_000, b in 1u64..100_000, since in 0.0f64..50.0,
    ) {
        let schedule = schedule(Base::Constant, Some(WarmUp::goyal()));
        let mut rate = Rate::new(schedule, a, Span::Epochs(3.0));
        rate.set_batch(b, epoch(since));
        let mut last = 0.0;
        for i in 0..40 {
            let now = rate.at(epoch(since + 0.1 * f64::from(i)));
            prop_assert!(now >= last);
            last = now;
        }
        let full = rate.schedule().at(epoch(since + 10.0), b);
        prop_assert_eq!(rate.at(epoch(since + 10.0)), full);
    }

    #[test]
    fn damaged_rates_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..64), cut in 0usize..48) {
        let mut rate = Rate::new(schedule(Base::Constant, None), 7, Span::Steps(1));
        let before = rate.clone();
        if !rate.decode(&bytes) {
            prop_assert_eq!(&rate, &before);
        }
        prop_assert!(!rate.decode(&before.encode()[..cut]));
    }
}
