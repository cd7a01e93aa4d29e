//! Admission to a group, and the ranks that are named when it does not come together.

use std::io::Write;
use std::net::TcpStream;

use super::*;

#[test]
fn strangers_are_refused_and_do_not_disturb() {
    let held = HeldPort::new();
    let port = held.port();
    std::thread::scope(|scope| {
        let zero = scope.spawn(move || Group::form(&group_config(0, 2, port)));
        let refused = |config: GroupConfig| match Group::form(&config) {
            Err(GroupError::Refused { by: 0, refusal }) => refusal,
            other => panic!("{other:?}"),
        };
        let base = group_config(1, 2, port);
        let stale = GroupConfig {
            digest: [8; 32],
            ..base.clone()
        };
        assert_eq!(refused(stale), Refusal::Token);
        let ignorant = GroupConfig {
            token: [8; 32],
            ..base.clone()
        };
        assert_eq!(refused(ignorant), Refusal::Token);
        let elsewhere = GroupConfig {
            world: 3,
            ..base.clone()
        };
        assert_eq!(refused(elsewhere), Refusal::World);
        // Noise, a slow one, and many that say nothing.
        let open = || TcpStream::connect(("127.0.0.1", port)).unwrap();
        open().write_all(&[0xa5; 4096]).unwrap();
        let mut half = open();
        half.write_all(b"MUSTER").unwrap();
        let quiet: Vec<_> = (0..100).map(|_| open()).collect();
        let one = scope.spawn(move || Group::form(&base));
        let (zero, one) = (zero.join().unwrap(), one.join().unwrap());
        assert!(zero.is_ok() && one.is_ok(), "{zero:?} {one:?}");
        drop((half, quiet));
    });
}

#[test]
fn noise_at_the_listener_of_any_rank_does_not_disturb() {
    // Addresses that the caller knows: the noise comes before the ranks do.
    let listeners: Vec<TcpListener> = (0..3)
        .map(|_| TcpListener::bind("127.0.0.1:0").unwrap())
        .collect();
    let seats: Vec<Seat> = (0..)
        .zip(&listeners)
        .map(|(rank, listener)| Seat {
            rank,
            address: listener.local_addr().unwrap(),
        })
        .collect();
    let noise: Vec<TcpStream> = seats
        .iter()
        .flat_map(|seat| {
            (0u8..20).map(|n| {
                let mut stream = TcpStream::connect(seat.address).unwrap();
                stream.write_all(&vec![n; usize::from(n) * 50]).unwrap();
                stream
            })
        })
        .collect();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = listeners
            .iter()
            .zip(&seats)
            .map(|(listener, seat)| {
                let topology = Topology {
                    rank: seat.rank,
                    hosts: vec![vec![seats[0], seats[1]], vec![seats[2]]],
                    token: [1; 32],
                    digest: [2; 32],
                    form_within: LONG,
                    op_within: LONG,
                };
                scope.spawn(move || {
                    let aborter = Aborter::new().unwrap();
                    let mut group = Group::connect(&topology, listener, &aborter).unwrap();
                    assert_eq!(group.layout().hosts(), [vec![0, 1], vec![2]]);
                    let mut out = [0];
                    group.all_reduce(Op::Sum, &[1], &mut out).unwrap();
                    out[0]
                })
            })
            .collect();
        for rank in ranks {
            assert_eq!(rank.join().unwrap(), 3);
        }
    });
    drop(noise);
}

#[test]
fn who_is_missing_is_named_on_both_sides() {
    let held = HeldPort::new();
    let port = held.port();
    let short = move |rank| GroupConfig {
        form_within: Duration::from_millis(300),
        ..group_config(rank, 4, port)
    };
    std::thread::scope(|scope| {
        let zero = scope.spawn(move || Group::form(&short(0)).unwrap_err());
        let two = scope.spawn(move || Group::form(&short(2)).unwrap_err());
        let GroupError::Incomplete { missing, .. } = zero.join().unwrap() else {
            panic!("rank 0 formed");
        };
        assert!(missing == [1, 3] || missing == [1, 2, 3], "{missing:?}");
        let error = two.join().unwrap();
        assert!(
            matches!(error, GroupError::MasterUnreachable { .. }),
            "{error}"
        );
    });
}

#[test]
fn a_rank_that_dies_while_the_group_forms_may_come_again() {
    let held = HeldPort::new();
    let port = held.port();
    std::thread::scope(|scope| {
        let zero = scope.spawn(move || Group::form(&group_config(0, 3, port)));
        let first = GroupConfig {
            form_within: Duration::from_millis(100),
            ..group_config(1, 3, port)
        };
        assert!(Group::form(&first).is_err(), "rank 2 is not there");
        let one = scope.spawn(move || Group::form(&group_config(1, 3, port)));
        let two = scope.spawn(move || Group::form(&group_config(2, 3, port)));
        assert!(zero.join().unwrap().is_ok() && one.join().unwrap().is_ok());
        assert!(two.join().unwrap().is_ok());
    });
}

#[test]
fn a_taken_port_is_said() {
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = holder.local_addr().unwrap().port();
    let short = GroupConfig {
        form_within: Duration::from_millis(100),
        ..group_config(0, 2, port)
    };
    let error = Group::form(&short).unwrap_err();
    assert!(matches!(error, GroupError::Bind { .. }), "{error}");
}

#[test]
fn a_formation_can_be_aborted() {
    for rank in [0, 1] {
        let aborter = Aborter::new().unwrap();
        let held = HeldPort::new();
        let port = held.port();
        std::thread::scope(|scope| {
            let forming = {
                let aborter = aborter.clone();
                scope.spawn(move || Group::form_abortable(&group_config(rank, 2, port), &aborter))
            };
            std::thread::sleep(Duration::from_millis(50));
            let began = Instant::now();
            aborter.abort();
            let error = forming.join().unwrap().unwrap_err();
            assert!(matches!(error, GroupError::Aborted { by: None }), "{error}");
            assert!(began.elapsed() < Duration::from_secs(2));
        });
    }
}

#[test]
fn impossible_places_are_refused() {
    assert!(matches!(
        Group::form(&group_config(2, 2, 1)),
        Err(GroupError::BadPlace { .. })
    ));
    let lonely = GroupConfig {
        master: None,
        ..group_config(0, 2, 1)
    };
    assert!(matches!(
        Group::form(&lonely),
        Err(GroupError::NoMaster { world: 2 })
    ));
}

#[test]
fn nothing_is_left_behind_by_many_groups() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let maps = || {
        let text = std::fs::read_to_string("/proc/self/maps").unwrap();
        text.matches("muster-collective").count()
    };
    let once = || {
        on_all_hosts(3, |mut group| {
            group.barrier().unwrap();
            let began = Instant::now();
            drop(group);
            began.elapsed()
        })
    };
    once();
    let before = (open(), threads(), maps());
    let mut dropped: Vec<Duration> = (0..10).flat_map(|_| once()).flatten().collect();
    dropped.sort_unstable();
    let median = dropped[dropped.len() / 2];
    assert!(median < Duration::from_millis(100), "{median:?} to drop");
    let after = (open(), threads(), maps());
    // Other tests of this process come and go meanwhile, if they are run in one.
    if std::env::var_os("NEXTEST").is_some() {
        assert_eq!(after, before);
    }
}

#[test]
fn something_else_at_the_master_address_is_said() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let short = GroupConfig {
        form_within: Duration::from_millis(300),
        ..group_config(1, 2, port)
    };
    std::thread::scope(|scope| {
        let one = scope.spawn(move || Group::form(&short).unwrap_err());
        let mut stream = listener.accept().unwrap().0;
        stream.write_all(&[b'H'; 200]).unwrap();
        drop(listener);
        let error = one.join().unwrap();
        let GroupError::MasterUnreachable { last, .. } = &error else {
            panic!("{error}");
        };
        assert!(!last.is_empty());
        drop(stream);
    });
}
