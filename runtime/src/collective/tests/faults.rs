//! Ranks that die, fall silent, or are told to leave.

use super::*;

fn lost(error: &GroupError) -> Option<u32> {
    match error {
        GroupError::PeerLost { rank, .. } => Some(*rank),
        _ => None,
    }
}

#[test]
fn a_dead_peer_is_an_error_for_all_and_inputs_are_untouched() {
    for len in [2, 200_000] {
        for dead in 0..4 {
            let outcomes = on_all_hosts(4, |mut group| {
                group.barrier().unwrap();
                let rank = group.rank();
                if rank == dead {
                    // Others are in the operation already when this one goes.
                    std::thread::sleep(Duration::from_millis(20));
                    drop(group);
                    return None;
                }
                let input: Vec<f32> = (0..len).map(|i| i as f32).collect();
                let mut output = vec![0.0; input.len()];
                let began = Instant::now();
                let error = group.all_reduce(Op::Sum, &input, &mut output).unwrap_err();
                let took = began.elapsed();
                assert!(input.iter().enumerate().all(|(i, x)| *x == i as f32));
                let again = group.barrier().unwrap_err();
                assert_eq!(again.to_string(), error.to_string(), "the group is over");
                Some((error, took))
            });
            for (error, took) in outcomes.into_iter().flatten().flatten() {
                assert_eq!(lost(&error), Some(dead), "{error}");
                assert!(took < Duration::from_secs(5), "noticed after {took:?}");
            }
        }
    }
}

#[test]
fn a_silent_peer_is_named_after_the_time_for_an_operation() {
    for len in [1, 300_000] {
        for hosts in HOSTS {
            let quick = |config: GroupConfig| GroupConfig {
                sharing: hosts(config.rank),
                op_within: Duration::from_millis(300),
                ..config
            };
            let done = std::sync::Barrier::new(4);
            let errors = on_ranks_with(vec![(); 4], quick, |(), mut group| {
                let input = vec![1.0f32; len];
                let mut output = input.clone();
                let outcome = (group.rank() != 2)
                    .then(|| group.all_reduce(Op::Sum, &input, &mut output).unwrap_err());
                done.wait();
                outcome
            });
            for error in errors.into_iter().flatten() {
                assert_eq!(lost(&error), Some(2), "{error}");
            }
        }
    }
}

#[test]
fn a_peer_that_stops_reading_is_named() {
    // More than any socket buffer holds. In a broadcast the others only take, so nothing but that is missed.
    const LEN: usize = 48 << 20;
    for hosts in HOSTS {
        for world in [2, 3] {
            let quick = |config: GroupConfig| GroupConfig {
                sharing: hosts(config.rank),
                op_within: Duration::from_millis(700),
                ..config
            };
            let done = std::sync::Barrier::new(world);
            let errors = on_ranks_with(vec![(); world], quick, |(), mut group| {
                let input = vec![3u8; if group.rank() == 0 { LEN } else { 0 }];
                let mut output = vec![0; LEN];
                let outcome = (group.rank() != 1)
                    .then(|| group.broadcast(0, &input, &mut output).unwrap_err());
                done.wait();
                outcome
            });
            let errors: Vec<GroupError> = errors.into_iter().flatten().collect();
            assert_eq!(errors.len(), world - 1);
            for error in errors {
                assert_eq!(lost(&error), Some(1), "{error}");
            }
        }
    }
}

#[test]
fn a_rank_that_leaves_after_the_last_operation_disturbs_nobody() {
    for _ in 0..20 {
        on_all_hosts(4, |mut group| {
            let mut out = vec![0.0f32; 5000];
            group.all_reduce(Op::Max, &[1.0; 5000], &mut out).unwrap();
            group.barrier().unwrap();
        });
    }
}

#[test]
fn an_abort_wakes_whoever_is_blocked_and_the_others_learn_of_it() {
    for hosts in HOSTS {
        let done = std::sync::Barrier::new(4);
        let outcomes = on_ranks(4, hosts, |mut group| {
            // Rank 3 does not come, so everybody waits; rank 1 is then told to leave.
            let outcome = (group.rank() != 3).then(|| {
                let aborter = group.aborter();
                let told = (group.rank() == 1).then(|| {
                    std::thread::spawn(move || {
                        std::thread::sleep(Duration::from_millis(100));
                        let at = Instant::now();
                        aborter.abort();
                        at
                    })
                });
                let error = group.barrier().unwrap_err();
                let took = told.map(|told| told.join().unwrap().elapsed());
                (error, took)
            });
            done.wait();
            outcome
        });
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            match (rank, outcome) {
                (1, Some((GroupError::Aborted { by: None }, Some(took)))) => {
                    assert!(took < Duration::from_millis(500), "{took:?}");
                }
                (0 | 2, Some((GroupError::Aborted { by: Some(1) }, None))) | (3, None) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn the_next_group_forms_while_the_old_one_is_torn_down() {
    on_all_hosts(3, |old| {
        // Ranks are at different points of leaving the old one.
        let rank = old.rank();
        let aborter = old.aborter();
        if rank == 0 {
            aborter.abort();
        }
        (old, rank)
    });
    let held = [HeldPort::new(), HeldPort::new()];
    let ports = held.each_ref().map(HeldPort::port);
    std::thread::scope(|scope| {
        for rank in 0..3 {
            scope.spawn(move || {
                let first = group_config(rank, 3, ports[0]);
                let mut old = Group::form(&first).unwrap();
                let aborter = old.aborter();
                let waiting = std::thread::spawn(move || {
                    let mut out = [0u8];
                    // Rank 2 never calls it.
                    (rank != 2).then(|| old.all_reduce(Op::Sum, &[1], &mut out).unwrap_err())
                });
                aborter.abort();
                let next = GroupConfig {
                    digest: [8; 32],
                    ..group_config(rank, 3, ports[1])
                };
                let mut new = Group::form(&next).unwrap();
                new.barrier().unwrap();
                let old = waiting.join().unwrap();
                assert!(
                    matches!(old, None | Some(GroupError::Aborted { .. })),
                    "{old:?}"
                );
            });
        }
    });
}
