//! Faults in ranks that are threads: every rank gets an error within a bound, its input is as it
//! was, the communicator refuses everything after that, and a new group works.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, Mutex};
use std::time::{Duration, Instant};

use muster_runtime::collective::nccl::{Communicator, Config, NcclError, StuckCall};
use muster_runtime::collective::{Element, Group, GroupConfig, GroupError, LossCause, Op, Sharing};

use super::support::*;

const LEN: usize = 100;
/// Every test of a deadline here gives this much, and takes far less than `BOUND`.
const SHORT: Duration = Duration::from_millis(300);

fn short(config: GroupConfig) -> GroupConfig {
    GroupConfig {
        op_within: SHORT,
        ..config
    }
}

/// All-reduces until an error, which is returned; the input is checked.
fn until_error(nccl: &mut Communicator, group: &mut Group) -> NcclError {
    let values: Vec<f32> = input(nccl.rank(), LEN, |x| x as f32);
    let (from, to) = buffers(nccl.device(), &values, LEN);
    // SAFETY: both outlive the operations: after an error nothing uses them.
    let (input, output) = unsafe { (from.elements(f32::DTYPE), to.elements(f32::DTYPE)) };
    let error = loop {
        let ticket = nccl.all_reduce(Op::Sum, input, output, AFTER);
        if let Err(error) = ticket.and_then(|ticket| nccl.wait(ticket)) {
            break error;
        }
    };
    assert_eq!(read::<f32>(&from, LEN), values, "the input was written");
    let again = nccl.all_reduce(Op::Sum, input, output, AFTER).unwrap_err();
    assert_eq!(again.to_string(), error.to_string());
    // What had completed before stays so, and a call that is refused at once counts for nothing.
    if let Err(all) = nccl.wait_all() {
        assert_eq!(all.to_string(), error.to_string());
    }
    assert_eq!(
        nccl.barrier(AFTER).unwrap_err().to_string(),
        error.to_string()
    );
    nccl.blame(error, group)
}

/// The errors of all ranks in a world with faults, after blaming.
fn errors(world: u32, faults: &str, adjust: impl Fn(GroupConfig) -> GroupConfig) -> Vec<NcclError> {
    let began = Instant::now();
    let errors = on_ranks(world, faults, adjust, |mut rank| {
        let mut nccl = rank.form();
        let error = until_error(&mut nccl, &mut rank.group);
        // The ranks no longer agree on what was done.
        assert!(rank.group.gave_up());
        let again = Communicator::form(&rank.library, 0, &mut rank.group, config());
        assert!(matches!(again, Err(NcclError::Spoiled)), "{again:?}");
        error
    });
    assert!(began.elapsed() < BOUND, "{:?}", began.elapsed());
    for error in &errors {
        println!("{error}");
    }
    // The next generation.
    on_ranks(
        world,
        "",
        |config| config,
        |mut rank| {
            let mut nccl = rank.form();
            nccl.barrier(AFTER).unwrap();
            nccl.wait_all().unwrap();
            nccl.close(&mut rank.group).unwrap();
        },
    );
    errors
}

#[test]
fn an_operation_that_hangs_ends_for_all_when_the_time_is_over() {
    for error in errors(4, "hang:2:3", short) {
        assert!(error.passes(), "{error}");
        assert!(
            matches!(
                error,
                NcclError::TimedOut {
                    what: "an all-reduce",
                    within: SHORT
                } | NcclError::GivenUp { .. }
            ),
            "{error}"
        );
    }
}

#[test]
fn a_late_error_ends_it_for_all() {
    // No deadline is near.
    let errors = errors(4, "late:1:3:6", |config| config);
    let NcclError::Late { what, code, text } = &errors[1] else {
        panic!("{}", errors[1]);
    };
    assert_eq!((*what, *code), ("an all-reduce", 6));
    assert!(text.contains("remote process exited"), "{text}");
    for rank in [0, 2, 3] {
        assert!(
            matches!(errors[rank], NcclError::GivenUp { by: 1 }),
            "{}",
            errors[rank]
        );
    }
}

#[test]
fn a_code_that_nccl_got_later_is_only_a_number() {
    let errors = errors(2, "late:0:1:4711", |config| config);
    assert!(
        matches!(errors[0], NcclError::Late { code: 4711, .. }),
        "{}",
        errors[0]
    );
}

#[test]
fn a_call_that_is_refused_ends_it_for_all() {
    let errors = errors(3, "refuse:0:1:5", |config| config);
    let NcclError::Nccl {
        call,
        code: 5,
        text,
    } = &errors[0]
    else {
        panic!("{}", errors[0]);
    };
    assert_eq!((*call, text.as_str()), ("an all-reduce", "invalid usage"));
    assert!(!errors[0].passes());
    // Which leaves, as no generation mends it: the others miss it when they ask who is to blame.
    for error in &errors[1..] {
        let lost = matches!(
            error,
            NcclError::Group(GroupError::PeerLost { rank: 0, .. })
        );
        assert!(
            lost || matches!(error, NcclError::GivenUp { by: 0 }),
            "{error}"
        );
    }
}

#[test]
fn a_call_that_fails_by_the_fault_of_others_passes() {
    let errors = errors(2, "refuse:0:1:6", |config| config);
    assert!(
        matches!(errors[0], NcclError::Late { code: 6, .. }),
        "{}",
        errors[0]
    );
    assert!(errors.iter().all(NcclError::passes));
}

#[test]
fn a_call_that_does_not_return_is_freed_by_the_abort() {
    let errors = on_ranks(2, "call-stuck:1:2", short, |mut rank| {
        let quick = Config {
            abort_within: Duration::from_secs(4),
            ..config()
        };
        let ordinal = rank.number();
        let formed = Communicator::form(&rank.library, ordinal, &mut rank.group, quick);
        until_error(&mut formed.unwrap(), &mut rank.group)
    });
    for error in errors {
        assert!(error.passes(), "{error}");
    }
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let errors = on_ranks(3, "", short, |mut rank| {
        let mut nccl = rank.form();
        if rank.number() == 1 {
            // Busy with something else, longer than the others wait for it.
            let until = Instant::now() + BOUND;
            while !rank.group.gave_up() && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
            }
            std::thread::sleep(SHORT * 3);
            return None;
        }
        Some(until_error(&mut nccl, &mut rank.group))
    });
    for error in errors.into_iter().flatten() {
        assert!(
            matches!(
                error,
                NcclError::Group(GroupError::PeerLost { rank: 1, .. })
            ),
            "{error}"
        );
    }
}

#[test]
fn a_rank_that_comes_late_is_told_that_it_is_behind() {
    let errors = on_ranks(
        3,
        "",
        |config| GroupConfig {
            op_within: Duration::from_secs(2),
            ..config
        },
        |mut rank| {
            let mut nccl = rank.form();
            if rank.number() == 1 {
                let until = Instant::now() + BOUND;
                while !rank.group.gave_up() && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
            until_error(&mut nccl, &mut rank.group)
        },
    );
    for error in errors {
        assert!(error.passes(), "{error}");
        assert!(
            matches!(
                error,
                NcclError::Behind {
                    rank: 1,
                    theirs: 0,
                    most: 1
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn a_rank_that_leaves_is_named_at_once() {
    // Ranks of one host, and hosts of two ranks: a rank that is not the first of its host is seen there
    // only, and the others are told.
    let hosts: [fn(u32) -> Sharing; 3] = [
        |_| Sharing::Auto,
        |_| Sharing::Off,
        |rank| Sharing::Among(u64::from(rank / 2)),
    ];
    for sharing in hosts {
        for leaves in [0, 3] {
            let adjust = |config: GroupConfig| GroupConfig {
                sharing: sharing(config.rank),
                ..config
            };
            let began = Mutex::new(None);
            let together = Barrier::new(4);
            let errors = on_ranks(4, "", adjust, |mut rank| {
                let mut nccl = rank.form();
                nccl.barrier(AFTER).unwrap();
                nccl.wait_all().unwrap();
                together.wait();
                if rank.number() == leaves {
                    *began.lock().unwrap() = Some(Instant::now());
                    // As a process that is killed: the group ends without a word.
                    drop(rank.group);
                    let error = nccl
                        .barrier(AFTER)
                        .and_then(|_| nccl.wait_all())
                        .unwrap_err();
                    assert!(matches!(error, NcclError::Left), "{error}");
                    return (Duration::ZERO, error);
                }
                let error = until_error(&mut nccl, &mut rank.group);
                let waited = began
                    .lock()
                    .unwrap()
                    .map_or(Duration::ZERO, |b| b.elapsed());
                (waited, error)
            });
            for (rank, (waited, error)) in (0..).zip(errors) {
                if rank == leaves {
                    continue;
                }
                println!("rank {rank}: {error} after {waited:?}");
                let NcclError::Group(GroupError::PeerLost { rank: named, cause }) = error else {
                    panic!("rank {rank}: {error}");
                };
                assert_eq!(named, leaves);
                assert!(
                    matches!(cause, LossCause::Closed | LossCause::Reported),
                    "{cause}"
                );
                assert!(waited < Duration::from_secs(5), "{waited:?}");
            }
        }
    }
}

#[test]
fn the_aborter_of_the_group_ends_it() {
    let launched = AtomicU32::new(0);
    let errors = on_ranks(
        2,
        "hang:0:1",
        |config| config,
        |mut rank| {
            let mut nccl = rank.form();
            let aborter = rank.group.aborter();
            std::thread::scope(|scope| {
                if rank.number() == 0 {
                    scope.spawn(|| {
                        // An end that comes while a rank waits for its first operation ends that one.
                        let until = Instant::now() + BOUND;
                        while launched.load(Ordering::Acquire) < 2 && Instant::now() < until {
                            std::thread::sleep(Duration::from_millis(2));
                        }
                        aborter.abort();
                    });
                }
                let ticket = nccl.barrier(AFTER).unwrap();
                nccl.wait(ticket).unwrap();
                let second = nccl.barrier(AFTER).unwrap();
                launched.fetch_add(1, Ordering::Release);
                nccl.wait(second).unwrap_err()
            })
        },
    );
    assert!(
        matches!(
            errors[0],
            NcclError::Group(GroupError::Aborted { by: None })
        ),
        "{}",
        errors[0]
    );
    assert!(
        matches!(errors[1], NcclError::GivenUp { by: 0 }),
        "{}",
        errors[1]
    );
    let passes: Result<GroupError, _> = errors.into_iter().nth(1).unwrap().into_group();
    assert!(matches!(passes, Ok(GroupError::Aborted { by: Some(0) })));
}

/// Errors of forming on all ranks, or else of the first operation.
fn formed(faults: &str, form_within: Duration) -> Vec<NcclError> {
    on_ranks(
        3,
        faults,
        |config| config,
        |mut rank| {
            let config = Config {
                form_within,
                ..config()
            };
            let ordinal = rank.number();
            let formed = Communicator::form(&rank.library, ordinal, &mut rank.group, config);
            formed.and_then(used).unwrap_err()
        },
    )
}

#[test]
fn a_forming_that_hangs_or_fails_ends_for_all() {
    for error in formed("init-hang:1", SHORT) {
        let timed_out = matches!(error, NcclError::TimedOut { within: SHORT, .. });
        assert!(
            timed_out || matches!(error, NcclError::GivenUp { .. }),
            "{error}"
        );
    }
    let errors = formed("init-fail:1:-:2", BOUND);
    assert!(
        matches!(errors[1], NcclError::Late { code: 2, .. }),
        "{}",
        errors[1]
    );
    for rank in [0, 2] {
        let error = &errors[rank];
        let lost = matches!(
            error,
            NcclError::Group(GroupError::PeerLost { rank: 1, .. })
        );
        assert!(
            lost || matches!(error, NcclError::GivenUp { by: 1 }),
            "{error}"
        );
    }
}

fn used(mut nccl: Communicator) -> Result<(), NcclError> {
    nccl.barrier(AFTER)?;
    nccl.wait_all()
}

/// A hook that notes the call, and a config with it.
fn noting() -> (Config, Arc<Mutex<Vec<StuckCall>>>) {
    let noted = Arc::new(Mutex::new(Vec::new()));
    let own = noted.clone();
    let config = Config {
        form_within: SHORT,
        abort_within: SHORT,
        on_stuck: Arc::new(move |stuck| own.lock().unwrap().push(stuck.clone())),
    };
    (config, noted)
}

#[test]
fn calls_that_never_return_reach_the_hook() {
    for (faults, call) in [
        ("abort-stuck:1;hang:1:0", "ncclCommAbort"),
        ("init-stuck:1", "ncclCommInitRankConfig"),
    ] {
        let errors = on_ranks(2, faults, short, |mut rank| {
            let ordinal = rank.number();
            if ordinal == 0 {
                let formed = Communicator::form(
                    &rank.library,
                    0,
                    &mut rank.group,
                    Config {
                        form_within: SHORT,
                        ..config()
                    },
                );
                return formed.and_then(used).unwrap_err();
            }
            let (config, noted) = noting();
            let formed = Communicator::form(&rank.library, ordinal, &mut rank.group, config);
            let error = formed.and_then(used).unwrap_err();
            let noted = noted.lock().unwrap();
            assert_eq!(noted.len(), 1);
            assert_eq!(noted[0].call, call);
            assert!(noted[0].waited >= SHORT, "{:?}", noted[0]);
            println!("{}", noted[0]);
            error
        });
        assert!(
            matches!(errors[1], NcclError::Stuck { .. }),
            "{}",
            errors[1]
        );
        assert!(!errors[1].passes());
        // The other one is not held up.
        assert!(errors[0].passes(), "{}", errors[0]);
    }
}
