use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::mpsc;

use super::*;

/// A free port of this host. Freed at once: the group binds it anew.
fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}

fn config(rank: u32, world: u32, port: u16) -> GroupConfig {
    GroupConfig {
        rank,
        world,
        master: Some(("127.0.0.1".to_owned(), port)),
        token: [9; 32],
        form_within: Duration::from_secs(20),
        op_within: Duration::from_secs(20),
    }
}

/// Runs `body` on every rank of a new group; the results in the order of ranks.
fn on_ranks<T: Send>(world: u32, body: impl Fn(Group) -> T + Sync) -> Vec<T> {
    on_configured(world, |config| config, body)
}

fn on_configured<T: Send>(
    world: u32,
    adjust: impl Fn(GroupConfig) -> GroupConfig,
    body: impl Fn(Group) -> T + Sync,
) -> Vec<T> {
    let port = free_port();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let config = adjust(config(rank, world, port));
                let body = &body;
                scope.spawn(move || body(Group::form(&config).unwrap()))
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn every_rank_gets_the_same_bits_in_rank_order() {
    for world in 1..=4u32 {
        // Terms whose sum depends on the order of addition.
        let term = |rank: u32, i: usize| 0.1f32 * 7f32.powi(rank as i32 * 3) + i as f32 * 1e-3;
        let expected: Vec<f32> = (0..1000)
            .map(|i| (1..world).fold(term(0, i), |sum, rank| sum + term(rank, i)))
            .collect();
        let got = on_ranks(world, |mut group| {
            let mut values: Vec<f32> = (0..1000).map(|i| term(group.rank(), i)).collect();
            group.all_reduce_sum_f32(&mut values).unwrap();
            let mut one = [f64::from(group.rank()) + 0.5];
            group.all_reduce_sum_f64(&mut one).unwrap();
            group.barrier().unwrap();
            let said = group
                .broadcast(world - 1, &[group.rank() as u8; 5])
                .unwrap();
            let all = group
                .all_gather(&vec![group.rank() as u8; group.rank() as usize])
                .unwrap();
            (values, one, said, all)
        });
        for (values, one, said, all) in got {
            assert_eq!(values, expected, "world {world}");
            assert_eq!(
                one[0],
                f64::from(world * (world - 1)) / 2.0 + 0.5 * f64::from(world)
            );
            assert_eq!(said, [world as u8 - 1; 5]);
            let lens: Vec<usize> = all.iter().map(Vec::len).collect();
            assert_eq!(lens, (0..world as usize).collect::<Vec<_>>());
        }
    }
}

#[test]
fn large_payloads_cross_in_both_directions() {
    const LEN: usize = 3 << 20;
    for sum in on_ranks(3, |mut group| {
        let mut values = vec![1.0f32; LEN];
        group.all_reduce_sum_f32(&mut values).unwrap();
        values
    }) {
        assert!(sum.len() == LEN && sum.iter().all(|value| *value == 3.0));
    }
}

#[test]
fn a_dead_peer_is_an_error_for_all_and_input_is_untouched() {
    for dead in 0..3 {
        let (gone, wait_gone) = mpsc::channel::<()>();
        let wait_gone = std::sync::Mutex::new(wait_gone);
        let gone = std::sync::Mutex::new(Some(gone));
        let outcomes = on_ranks(3, |mut group| {
            group.barrier().unwrap();
            let rank = group.rank();
            let began = Instant::now();
            if rank == dead {
                // One rank is in the operation already when this one goes; the other comes later.
                std::thread::sleep(Duration::from_millis(50));
                drop(group);
                drop(gone.lock().unwrap().take());
                return None;
            }
            if rank == (dead + 1) % 3 {
                wait_gone.lock().unwrap().recv().unwrap_err();
            }
            let mut values = [1.5f32, 2.5];
            let error = group.all_reduce_sum_f32(&mut values).unwrap_err();
            assert_eq!(values, [1.5, 2.5], "input changed");
            let again = group.barrier().unwrap_err();
            assert_eq!(again.to_string(), error.to_string(), "the group is over");
            Some((error, began.elapsed()))
        });
        for (error, took) in outcomes.into_iter().flatten() {
            let GroupError::PeerLost { rank, .. } = error else {
                panic!("{error}");
            };
            assert_eq!(rank, dead, "{error}");
            assert!(took < Duration::from_secs(5), "noticed after {took:?}");
        }
    }
}

#[test]
fn a_silent_peer_is_named_after_the_time_for_an_operation() {
    let quick = |config| GroupConfig {
        op_within: Duration::from_millis(300),
        ..config
    };
    let done = std::sync::Barrier::new(3);
    let errors = on_configured(3, quick, |mut group| {
        let outcome = (group.rank() != 2).then(|| group.barrier().unwrap_err());
        done.wait();
        outcome
    });
    for error in errors.into_iter().flatten() {
        assert!(
            matches!(error, GroupError::PeerLost { rank: 2, .. }),
            "{error}"
        );
    }
}

#[test]
fn ranks_out_of_step_are_told_so() {
    let errors = on_ranks(2, |mut group| {
        if group.rank() == 0 {
            group.barrier().unwrap_err()
        } else {
            group.all_reduce_sum_f32(&mut [0.0]).unwrap_err()
        }
    });
    assert!(
        matches!(errors[0], GroupError::Protocol { rank: 1, .. }),
        "{}",
        errors[0]
    );
    let errors = on_ranks(2, |mut group| {
        let mut values = vec![0.0; 1 + group.rank() as usize];
        group.all_reduce_sum_f32(&mut values).unwrap_err()
    });
    assert!(
        matches!(errors[0], GroupError::Protocol { rank: 1, .. }),
        "{}",
        errors[0]
    );
}

#[test]
fn strangers_are_refused_and_do_not_disturb() {
    let port = free_port();
    std::thread::scope(|scope| {
        let zero = scope.spawn(move || Group::form(&config(0, 2, port)));
        let refused = |config: GroupConfig| match Group::form(&config) {
            Err(GroupError::Refused(refusal)) => refusal,
            other => panic!("{other:?}"),
        };
        let base = config(1, 2, port);
        assert_eq!(
            refused(GroupConfig {
                token: [8; 32],
                ..base.clone()
            }),
            Refusal::Token
        );
        assert_eq!(
            refused(GroupConfig {
                world: 3,
                ..base.clone()
            }),
            Refusal::World
        );
        // Noise, a slow one, and many that say nothing.
        let open = || TcpStream::connect(("127.0.0.1", port)).unwrap();
        open().write_all(&[0xa5; 4096]).unwrap();
        let mut half = open();
        half.write_all(b"MUSTER").unwrap();
        let quiet: Vec<_> = (0..100).map(|_| open()).collect();
        let one = scope.spawn(move || Group::form(&base));
        assert!(zero.join().unwrap().is_ok());
        assert!(one.join().unwrap().is_ok());
        drop((half, quiet));
    });
}

#[test]
fn who_is_missing_is_named_on_both_sides() {
    let port = free_port();
    let short = move |rank| GroupConfig {
        form_within: Duration::from_millis(300),
        ..config(rank, 4, port)
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
    let port = free_port();
    std::thread::scope(|scope| {
        let zero = scope.spawn(move || Group::form(&config(0, 3, port)));
        let first = GroupConfig {
            form_within: Duration::from_millis(100),
            ..config(1, 3, port)
        };
        assert!(Group::form(&first).is_err(), "rank 2 is not there");
        let one = scope.spawn(move || Group::form(&config(1, 3, port)));
        let two = scope.spawn(move || Group::form(&config(2, 3, port)));
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
        ..config(0, 2, port)
    };
    let error = Group::form(&short).unwrap_err();
    assert!(matches!(error, GroupError::Bind { .. }), "{error}");
}

#[test]
fn impossible_places_are_refused() {
    assert!(matches!(
        Group::form(&config(2, 2, 1)),
        Err(GroupError::BadPlace { .. })
    ));
    let lonely = GroupConfig {
        master: None,
        ..config(0, 2, 1)
    };
    assert!(matches!(
        Group::form(&lonely),
        Err(GroupError::NoMaster { world: 2 })
    ));
    let mut alone = Group::form(&GroupConfig {
        world: 1,
        master: None,
        ..config(0, 1, 1)
    })
    .unwrap();
    assert!(matches!(
        alone.broadcast(1, &[]),
        Err(GroupError::BadPlace { .. })
    ));
    let much = vec![0; MAX_PAYLOAD + 1];
    assert!(matches!(
        alone.broadcast(0, &much),
        Err(GroupError::TooLarge { .. })
    ));
    assert!(matches!(
        alone.all_gather(&much),
        Err(GroupError::TooLarge { .. })
    ));
}

/// A connection that said a correct hello as rank 1 of 2.
fn impostor(port: u16) -> TcpStream {
    let hello = wire::Hello {
        version: wire::VERSION,
        rank: 1,
        world: 2,
        token: [9; 32],
    };
    let until = Instant::now() + Duration::from_secs(20);
    let mut stream = loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) if stream.local_addr().unwrap() != stream.peer_addr().unwrap() => {
                break stream;
            }
            _ => assert!(Instant::now() < until, "rank 0 does not listen"),
        }
    };
    stream.write_all(&hello.encode()).unwrap();
    let mut answer = [0; wire::ANSWER_LEN];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(wire::decode_answer(&answer), Some(Ok(())));
    stream
}

#[test]
fn wrong_frames_from_a_rank_are_refused_without_allocating_for_them() {
    let header = |kind, seq, len, arg| {
        wire::Header {
            kind,
            seq,
            len,
            arg,
        }
        .encode()
    };
    let good = header(Kind::Gather, 0, 3, 0);
    let cases: [(&[u8], bool); 6] = [
        (&[0xff; 64], false),
        (&header(Kind::Gather, 0, u32::MAX, 0), false),
        (&header(Kind::Gather, 7, 3, 0), false),
        (&header(Kind::Barrier, 0, 0, 0), false),
        (&header(Kind::Abort, 0, 0, 1), false),
        // Cut short: the header promises three bytes.
        (&good, true),
    ];
    for (bytes, cut) in cases {
        let port = free_port();
        std::thread::scope(|scope| {
            let zero = scope.spawn(move || {
                let mut group = Group::form(&config(0, 2, port)).unwrap();
                group.all_gather(b"abc").unwrap_err()
            });
            let mut stream = impostor(port);
            stream.write_all(bytes).unwrap();
            // A frame that is wrong at once may have ended the connection already.
            let ended = stream.shutdown(std::net::Shutdown::Write);
            assert!(ended.is_ok() || !cut, "{ended:?}");
            match zero.join().unwrap() {
                GroupError::PeerLost { rank: 1, .. } if cut => {}
                GroupError::Protocol { rank: 1, .. } if !cut => {}
                other => panic!("{bytes:x?}: {other}"),
            }
        });
    }
}

#[test]
fn a_wrong_rank_zero_is_an_error_too() {
    let answer_of = |bytes: Vec<u8>| {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let short = GroupConfig {
            form_within: Duration::from_millis(300),
            op_within: Duration::from_secs(10),
            ..config(1, 2, port)
        };
        std::thread::scope(|scope| {
            let one = scope
                .spawn(move || Group::form(&short).and_then(|mut group| group.all_gather(b"abc")));
            let mut stream = listener.accept().unwrap().0;
            stream.read_exact(&mut [0; wire::HELLO_LEN]).unwrap();
            stream.write_all(&bytes).unwrap();
            drop(listener);
            let outcome = one.join().unwrap().unwrap_err();
            drop(stream);
            outcome
        })
    };
    let error = answer_of(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec());
    assert!(
        matches!(error, GroupError::MasterUnreachable { .. }),
        "{error}"
    );
    let welcome = |rest: &[u8]| [&wire::encode_answer(None)[..], rest].concat();
    let frame = |len: u32, body: &[u8]| {
        let header = wire::Header {
            kind: Kind::Gather,
            seq: 0,
            len,
            arg: 0,
        };
        welcome(&[&header.encode()[..], body].concat())
    };
    for bytes in [
        welcome(&[0xa5; 16]),
        frame(u32::MAX, &[]),
        frame(5, &[9, 0, 0, 0, 1]),
    ] {
        let error = answer_of(bytes);
        assert!(
            matches!(error, GroupError::Protocol { rank: 0, .. }),
            "{error}"
        );
    }
}
