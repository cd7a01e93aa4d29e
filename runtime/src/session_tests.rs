use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU64, Ordering};

use muster_protocol::control::{Gate, PAGE_LEN, decode_step, fresh_page};

use super::*;

/// A page as a launcher lays it out.
fn new_page() -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&fresh_page()).unwrap();
    file
}

fn unix_ms(from_now: Duration) -> u64 {
    let at = SystemTime::now() + from_now;
    u64::try_from(at.duration_since(UNIX_EPOCH).unwrap().as_millis()).unwrap()
}

#[test]
fn only_one_session_attaches_and_drop_detaches() {
    let file = new_page();
    let launcher = Page::from_file(&file).unwrap();
    let session = Session::from_fd(file.as_raw_fd()).unwrap();
    assert_eq!(launcher.load(word::LINKED), 1);
    assert_eq!(launcher.load(word::PID), u64::from(std::process::id()));
    let second = Session::from_fd(file.as_raw_fd());
    assert!(
        matches!(second, Err(SessionError::AlreadyAttached { .. })),
        "{second:?}"
    );
    drop(session);
    assert_eq!(launcher.load(word::LINKED), 0);
    Session::from_fd(file.as_raw_fd()).unwrap();
}

#[test]
fn what_is_no_control_page_is_refused() {
    let bad = |file: &File| Session::from_fd(file.as_raw_fd()).unwrap_err();
    let empty = tempfile::tempfile().unwrap();
    assert!(matches!(
        bad(&empty),
        SessionError::NotAControlPage { len: 0 }
    ));
    empty.set_len(PAGE_LEN as u64).unwrap();
    assert!(matches!(bad(&empty), SessionError::NotAControlPage { .. }));
    let file = new_page();
    Page::from_file(&file)
        .unwrap()
        .store(word::LAYOUT, LAYOUT + 1);
    assert!(matches!(bad(&file), SessionError::Layout { layout } if layout == LAYOUT + 1));
    let pipe = std::io::pipe().unwrap().0;
    let error = Session::from_fd(pipe.as_raw_fd()).unwrap_err();
    assert!(
        matches!(error, SessionError::NotAControlPage { .. }),
        "{error}"
    );
    for closed in [-1, 1_000_000] {
        assert!(matches!(
            Session::from_fd(closed),
            Err(SessionError::Descriptor { .. })
        ));
    }
}

#[test]
fn a_confirmed_step_stops_and_is_acknowledged() {
    let file = new_page();
    let launcher = Page::from_file(&file).unwrap();
    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
    assert_eq!(session.step(4).unwrap(), Directive::Continue);
    assert_eq!(decode_step(launcher.load(word::PROGRESS)), Some(4));
    let deadline = unix_ms(Duration::from_secs(30));
    launcher.store(word::DEADLINE, deadline);
    launcher.store(word::REASON, Reason::Drain.encode());
    launcher.store(word::STOP, Stop::Confirmed(6).encode());
    assert_eq!(session.step(5).unwrap(), Directive::Continue);
    assert_eq!(
        session.step(6).unwrap(),
        Directive::Stop {
            deadline: UNIX_EPOCH.checked_add(Duration::from_millis(deadline)),
            reason: Reason::Drain
        }
    );
    session.acknowledge(6);
    assert_eq!(decode_step(launcher.load(word::ACK)), Some(6));
    let back = session.step(3);
    assert!(
        matches!(back, Err(SessionError::StepBackwards { step: 3, last: 6 })),
        "{back:?}"
    );
}

#[test]
fn an_undecided_stop_ends_at_the_deadline() {
    let file = new_page();
    let launcher = Page::from_file(&file).unwrap();
    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
    launcher.store(word::DEADLINE, unix_ms(Duration::from_millis(50)));
    launcher.store(word::STOP, Stop::Installed(0).encode());
    let began = Instant::now();
    let outcome = session.step(0);
    assert!(
        matches!(outcome, Err(SessionError::Undecided { step: 0 })),
        "{outcome:?}"
    );
    assert!(began.elapsed() >= Duration::from_millis(30));
}

#[test]
fn a_cancelled_or_raised_stop_lets_the_worker_go_on() {
    for next in [Stop::Cancelled, Stop::Installed(8), Stop::Confirmed(8)] {
        let file = new_page();
        let launcher = Page::from_file(&file).unwrap();
        launcher.store(word::STOP, Stop::Installed(7).encode());
        let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
        let worker = std::thread::spawn(move || session.step(7).unwrap());
        while decode_step(launcher.load(word::PROGRESS)) != Some(7) {
            std::thread::yield_now();
        }
        launcher.store(word::STOP, next.encode());
        assert_eq!(worker.join().unwrap(), Directive::Continue, "{next:?}");
    }
}

/// Real threads on real memory: two workers in lock step, and a launcher that installs at an
/// arbitrary moment. Both stop at one step, which neither has begun.
#[test]
fn threads_agree_on_the_step() {
    for round in 0..200u64 {
        let files = [new_page(), new_page()];
        let done = [const { AtomicU64::new(0) }; 2];
        std::thread::scope(|scope| {
            let workers: Vec<_> = files
                .iter()
                .enumerate()
                .map(|(me, file)| {
                    let done = &done;
                    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
                    scope.spawn(move || {
                        for step in 0.. {
                            if session.step(step).unwrap() != Directive::Continue {
                                session.acknowledge(step);
                                return step;
                            }
                            done[me].store(step + 1, Ordering::SeqCst);
                            // A collective: nobody leaves the step before everybody is in it.
                            while done[1 - me].load(Ordering::SeqCst) < step + 1 {
                                std::thread::yield_now();
                            }
                        }
                        unreachable!("the loop has no end")
                    })
                })
                .collect();
            let pages: Vec<_> = files
                .iter()
                .map(|file| Page::from_file(file).unwrap())
                .collect();
            while done[0].load(Ordering::SeqCst) < round % 17 {
                std::thread::yield_now();
            }
            let proposed = done[0].load(Ordering::SeqCst) + round % 3;
            let stop = pages
                .iter()
                .map(|page| {
                    page.store(word::STOP, Stop::Installed(proposed).encode());
                    Gate::default().install(decode_step(page.load(word::PROGRESS)), proposed)
                })
                .max()
                .unwrap();
            for page in &pages {
                page.store(word::STOP, Stop::Confirmed(stop).encode());
            }
            for worker in workers {
                assert_eq!(worker.join().unwrap(), stop);
            }
            assert!(
                done.iter()
                    .all(|steps| steps.load(Ordering::SeqCst) == stop)
            );
        });
    }
}

/// One worker that does nothing but step, so that the launcher's two accesses often fall between
/// its two: with these in the wrong order, this fails within a few rounds.
#[test]
fn a_worker_at_full_speed_never_passes_what_was_reported_for_it() {
    // Rounds are cheap alone and dear on a busy machine, where fewer must do.
    let enough = Instant::now() + Duration::from_secs(3);
    for round in 0..1_500u64 {
        if round > 100 && Instant::now() > enough {
            break;
        }
        let file = new_page();
        let launcher = Page::from_file(&file).unwrap();
        let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
        let worker = std::thread::spawn(move || {
            (0..)
                .find(|step| session.step(*step).unwrap() != Directive::Continue)
                .unwrap()
        });
        let progress = || decode_step(launcher.load(word::PROGRESS));
        while progress() < Some(100 + round % 7) {
            std::hint::spin_loop();
        }
        launcher.store(word::STOP, Stop::Installed(0).encode());
        let bound = Gate::default().install(progress(), 0);
        launcher.store(word::STOP, Stop::Confirmed(bound).encode());
        assert_eq!(worker.join().unwrap(), bound, "round {round}");
    }
}

/// Stores a launcher's order of a checkpoint at a step.
fn confirm_checkpoint(launcher: &Page, step: u64) {
    launcher.store(word::CHECKPOINT, encode_step(Some(step)));
    launcher.store(word::STOP, Stop::Confirmed(step).encode());
}

#[test]
fn a_checkpoint_is_asked_for_once_and_the_worker_goes_on() {
    let file = new_page();
    let launcher = Page::from_file(&file).unwrap();
    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
    confirm_checkpoint(&launcher, 2);
    let mut asked = Vec::new();
    for step in 0..5 {
        if let Directive::Checkpoint { step } = session.step(step).unwrap() {
            asked.push(step);
            session.saved(step);
            assert_eq!(decode_step(launcher.load(word::SAVED)), Some(2));
            // The step is announced again, or begun at once.
            assert_eq!(session.step(step).unwrap(), Directive::Continue);
        }
    }
    assert_eq!(asked, [2]);
    assert_eq!(launcher.load(word::ACK), 0, "that is for stops");
    // Another one, at a later step; one that restored a later step takes it where it stands.
    launcher.store(word::STOP, Stop::Cancelled.encode());
    confirm_checkpoint(&launcher, 5);
    assert_eq!(session.step(6).unwrap(), Directive::Checkpoint { step: 6 });
    // It may have failed: that is told before that it is over.
    let failure = || {
        let words: Vec<u64> = saving::word::failure()
            .map(|at| launcher.load(at))
            .collect();
        let length = launcher.load(saving::word::FAILED);
        saving::Failure::decode(&words.try_into().unwrap(), length)
    };
    assert_eq!(failure(), None);
    session.failed_to_save(6, "no room");
    assert_eq!(decode_step(launcher.load(word::SAVED)), Some(6));
    assert_eq!(
        failure().map(|f| (f.step, f.why)),
        Some((6, "no room".into()))
    );
    // Then a stop, without the launcher's having cleared the checkpoint's word long before.
    launcher.store(word::STOP, Stop::Cancelled.encode());
    launcher.store(word::CHECKPOINT, 0);
    assert_eq!(session.step(7).unwrap(), Directive::Continue);
    launcher.store(word::STOP, Stop::Confirmed(8).encode());
    let stop = session.step(8).unwrap();
    assert!(matches!(stop, Directive::Stop { .. }), "{stop:?}");
}

#[test]
fn a_worker_that_goes_on_has_saved() {
    let file = new_page();
    let launcher = Page::from_file(&file).unwrap();
    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
    let saved = || decode_step(launcher.load(word::SAVED));
    // It resumes far behind the step that was agreed on, and takes its time to save.
    confirm_checkpoint(&launcher, 1);
    let asked = session.step(100).unwrap();
    assert_eq!(asked, Directive::Checkpoint { step: 100 });
    assert_eq!(saved(), None);
    // The same step announced again, while the launcher's word stands.
    assert_eq!(session.step(100).unwrap(), Directive::Continue);
    assert_eq!(saved(), Some(100));
    // A later step, after the launcher has taken its word back.
    launcher.store(word::STOP, Stop::Cancelled.encode());
    confirm_checkpoint(&launcher, 102);
    assert_eq!(session.step(101).unwrap(), Directive::Continue);
    let asked = session.step(102).unwrap();
    assert_eq!(asked, Directive::Checkpoint { step: 102 });
    assert_eq!(saved(), Some(100));
    launcher.store(word::STOP, Stop::Cancelled.encode());
    assert_eq!(session.step(103).unwrap(), Directive::Continue);
    assert_eq!(saved(), Some(102));
    // Nothing is said for a stop.
    launcher.store(word::CHECKPOINT, 0);
    launcher.store(word::STOP, Stop::Confirmed(104).encode());
    let stop = session.step(104).unwrap();
    assert!(matches!(stop, Directive::Stop { .. }), "{stop:?}");
    assert_eq!(saved(), Some(102));
}

/// The launcher goes on to a stop while the worker looks: it never takes the checkpoint for that.
#[test]
fn a_checkpoint_is_never_taken_for_a_stop() {
    for round in 0..300u64 {
        let file = new_page();
        let launcher = Page::from_file(&file).unwrap();
        let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
        confirm_checkpoint(&launcher, 0);
        let worker = std::thread::spawn(move || {
            (0..)
                .find(|step| matches!(session.step(*step).unwrap(), Directive::Stop { .. }))
                .unwrap()
        });
        while decode_step(launcher.load(word::PROGRESS)) < Some(round % 50) {
            std::hint::spin_loop();
        }
        launcher.store(word::STOP, Stop::Cancelled.encode());
        launcher.store(word::CHECKPOINT, 0);
        launcher.store(word::STOP, Stop::Installed(0).encode());
        let bound = Gate::default().install(decode_step(launcher.load(word::PROGRESS)), 0);
        launcher.store(word::STOP, Stop::Confirmed(bound).encode());
        assert_eq!(worker.join().unwrap(), bound, "round {round}");
    }
}

/// A reader beside a writer at full speed never takes half of one report with half of another.
#[test]
fn a_report_is_never_torn() {
    const REPORTS: u64 = 200_000;
    let file = new_page();
    let launcher = Page::from_file(&file).unwrap();
    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
    let metrics = |n: u64| {
        let x = n as f64;
        Metrics {
            steps: n,
            world: n as u32,
            training_loss: x,
            samples_per_second: x,
            learning_rate: x,
            loss_scale: x,
            data_seconds: x,
            compute_seconds: x,
            communication_seconds: x,
            gradient_sync_seconds: x,
        }
    };
    let writer = std::thread::spawn(move || {
        for n in 1..=REPORTS {
            session.report(&metrics(n));
        }
        session
    });
    let mut seen = 0;
    while seen < REPORTS {
        let before = launcher.load(report::word::SEQUENCE);
        let mut words = [0; report::METRICS_WORDS];
        for (to, at) in words.iter_mut().zip(report::word::values()) {
            *to = launcher.load(at);
        }
        let whole = before.is_multiple_of(2)
            && before > 0
            && launcher.load(report::word::SEQUENCE) == before;
        if whole {
            let read = Metrics::decode(&words);
            assert_eq!(read, metrics(read.steps));
            assert!(read.steps >= seen);
            seen = read.steps;
        }
    }
    let session = writer.join().unwrap();
    assert_eq!(launcher.load(report::word::SEQUENCE), 2 * REPORTS);
    drop(session);
}

#[test]
fn waiting_for_others_is_odd() {
    let file = new_page();
    let launcher = Page::from_file(&file).unwrap();
    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
    let operation = || launcher.load(report::word::OPERATION);
    let waits = session.waits();
    let inside = waits.enter();
    assert_eq!(operation(), 1);
    drop(inside);
    assert_eq!(operation(), 2);
    session.alive();
    assert_eq!(operation(), 2 + report::ALIVE);
}

#[test]
fn every_step_counts_its_own_operations() {
    let file = new_page();
    let launcher = Page::from_file(&file).unwrap();
    let operation = || launcher.load(report::word::OPERATION);
    let mut old = Session::from_fd(file.as_raw_fd()).unwrap();
    old.step(3).unwrap();
    drop(old.waits().enter());
    drop(old.waits().enter());
    assert_eq!(operation(), 4);
    // The same step again, as behind a checkpoint: it goes on.
    old.step(3).unwrap();
    assert_eq!(operation(), 4);
    old.step(4).unwrap();
    assert_eq!(operation(), 0);
    // A session behind another on the same page, as a newcomer's: no count is left over.
    old.alive();
    drop(old);
    let mut new = Session::from_fd(file.as_raw_fd()).unwrap();
    new.step(0).unwrap();
    assert_eq!(operation(), 0);
}

#[test]
fn a_step_without_news_costs_well_below_a_microsecond() {
    const STEPS: u64 = 200_000;
    let file = new_page();
    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
    // The best of several runs: other processes share the machine.
    let best = (0..5)
        .map(|run| {
            let began = Instant::now();
            for step in run * STEPS..(run + 1) * STEPS {
                assert_eq!(session.step(step).unwrap(), Directive::Continue);
            }
            began.elapsed().as_nanos() / u128::from(STEPS)
        })
        .min()
        .unwrap();
    println!("{best} ns a step");
    assert!(best < 1_000, "{best} ns a step");
}

#[test]
fn the_first_step_waits_for_all_ranks_and_no_later_one_does() {
    let file = new_page();
    let launcher = Page::from_file(&file).unwrap();
    launcher.store(saving::word::HOLD, 1);
    let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let directive = session.step(40).unwrap();
            // Nobody was released before.
            assert_eq!(launcher.load(saving::word::HOLD), 0);
            directive
        });
        // It stands there, as its launcher sees.
        while decode_step(launcher.load(word::PROGRESS)) != Some(40) {
            std::thread::yield_now();
        }
        launcher.store(saving::word::HOLD, 0);
        launcher.wake(saving::word::HOLD);
        assert_eq!(first.join().unwrap(), Directive::Continue);
    });
    launcher.store(saving::word::HOLD, 1);
    assert_eq!(session.step(41).unwrap(), Directive::Continue);
}
