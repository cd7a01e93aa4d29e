//! Words that ranks say beside their operations.

use super::*;

fn expected(world: u32, round: u64) -> Vec<u64> {
    (0..world)
        .map(|rank| round * 1000 + u64::from(rank))
        .collect()
}

#[test]
fn all_hear_all_whatever_the_operations() {
    let ones = vec![1.0f32; 70_000];
    for world in 1..=9 {
        on_all_hosts(world, |mut group| {
            for round in 0..8 {
                group.say(expected(world, round)[group.rank() as usize]);
                let mut out = vec![0.0; ones.len()];
                match round {
                    1 => group.barrier().unwrap(),
                    2 => group.broadcast(0, &ones, &mut out).unwrap(),
                    3 => group.all_reduce(Op::Sum, &ones, &mut out).unwrap(),
                    4 => group.all_reduce(Op::Sum, &[1.0f32], &mut [0.0]).unwrap(),
                    5 => {
                        let part = group.part(ones.len(), group.rank());
                        let out = &mut out[part];
                        group.reduce_scatter(Op::Sum, &ones, out).unwrap();
                    }
                    6 => {
                        let mut all = vec![0u8; world as usize];
                        group.all_gather(&[1], &mut all).unwrap();
                    }
                    _ => {}
                }
                assert_eq!(group.words().unwrap(), expected(world, round));
                // What was said is heard once: nobody is asked again.
                assert_eq!(group.words().unwrap(), expected(world, round));
            }
        });
    }
}

/// Where all operate with all, none is added: a rank that does nothing more holds nobody up.
#[test]
fn after_an_operation_of_all_with_all_words_cost_nothing() {
    for sharing in [Sharing::Off, Sharing::Auto] {
        let done = std::sync::Barrier::new(4);
        let heard = on_ranks(
            4,
            |_| sharing,
            |mut group| {
                group.say(u64::from(group.rank()) + 7);
                group.barrier().unwrap();
                let heard = (group.rank() != 2).then(|| group.words().unwrap());
                done.wait();
                heard
            },
        );
        assert_eq!(heard.into_iter().flatten().count(), 3);
    }
}

/// Ranks on several hosts, of which some share one, hear only what the hosts' first ranks tell.
#[test]
fn who_does_not_talk_with_all_knows() {
    for (sharing, flat) in HOSTS.into_iter().zip([true, true, false, false]) {
        on_ranks(4, sharing, |group| assert_eq!(group.is_flat(), flat));
    }
}

#[test]
fn a_lost_rank_is_named_instead_of_its_word() {
    let begun = std::sync::Barrier::new(4);
    let outcomes = on_all_hosts(4, |mut group| {
        group.say(1);
        group.barrier().unwrap();
        begun.wait();
        group.say(2);
        (group.rank() != 2).then(|| group.words())
    });
    for outcome in outcomes.into_iter().flatten().flatten() {
        let error = outcome.unwrap_err();
        assert!(
            matches!(error, GroupError::PeerLost { rank: 2, .. }),
            "{error}"
        );
    }
}

/// A rank may come late to the first operation after it has said something, and not to the next.
#[test]
fn time_is_short_once_all_have_heard_all() {
    let (long, short) = (Duration::from_secs(20), Duration::from_millis(300));
    for hosts in [HOSTS[0], HOSTS[1]] {
        let patient = |config: GroupConfig| GroupConfig {
            sharing: hosts(config.rank),
            op_within: long,
            ..config
        };
        let done = std::sync::Barrier::new(2);
        on_ranks_with(vec![(); 2], patient, |(), mut group| {
            group.say(3);
            group.set_op_within_once_told(short);
            if group.rank() == 1 {
                std::thread::sleep(4 * short);
            }
            group.barrier().unwrap();
            if group.rank() == 0 {
                let error = group.barrier().unwrap_err();
                let silent = LossCause::Silent(short);
                assert!(
                    matches!(error, GroupError::PeerLost { rank: 1, cause } if cause == silent),
                    "{error}"
                );
            }
            done.wait();
        });
    }
}
