//! Ranks that call different things, and connections that say what they should not.

use std::io::Write;
use std::net::TcpStream;

use super::super::handshake::{Place, Porch, call};
use super::super::wire::{Card, NOTICE_LEN, Notice, Purpose};
use super::*;

#[test]
fn ranks_out_of_step_are_told_so() {
    let outcomes = on_all_hosts(2, |mut group| {
        if group.rank() == 0 {
            group.barrier().unwrap_err()
        } else {
            group
                .all_reduce(Op::Sum, &[1.0f32], &mut [0.0])
                .unwrap_err()
        }
    });
    for error in outcomes.into_iter().flatten() {
        assert!(matches!(error, GroupError::Protocol { .. }), "{error}");
    }
    for len in [1, 100_000] {
        let outcomes = on_all_hosts(2, |mut group| {
            let input = vec![0u8; len + group.rank() as usize];
            let mut output = input.clone();
            group.all_reduce(Op::Min, &input, &mut output).unwrap_err()
        });
        for error in outcomes.into_iter().flatten() {
            assert!(matches!(error, GroupError::Protocol { .. }), "{error}");
        }
    }
}

#[test]
fn wrong_lengths_are_refused_and_the_group_goes_on() {
    on_all_hosts(2, |mut group| {
        let length = |outcome: Result<(), GroupError>| {
            assert!(
                matches!(outcome, Err(GroupError::Length { .. })),
                "{outcome:?}"
            );
        };
        length(group.all_reduce(Op::Sum, &[1u8; 3], &mut [0; 2]));
        length(group.reduce_scatter(Op::Sum, &[1u8; 3], &mut [0; 3]));
        length(group.all_gather(&[1u8; 3], &mut [0; 5]));
        length(group.all_gather_uneven(&[1u8; 3], &[3], &mut [0; 3]));
        length(group.all_gather_uneven(&[1u8; 3], &[3, usize::MAX], &mut [0; 3]));
        length(group.all_to_all(&[1u8; 3], &mut [0; 3]));
        let nobody = group.broadcast(2, &[1u8], &mut [0]);
        assert!(matches!(nobody, Err(GroupError::BadPlace { .. })));
        let much = group.broadcast_bytes(group.rank(), &vec![0; MAX_PAYLOAD + 1]);
        assert!(matches!(much, Err(GroupError::TooLarge { .. })));
        group.barrier().unwrap();
    });
}

/// The listeners of two ranks on hosts of their own, and how rank 0 connects.
fn two() -> ([TcpListener; 2], Topology) {
    let listeners = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    let seat = |rank: usize| Seat {
        rank: rank as u32,
        address: listeners[rank].local_addr().unwrap(),
    };
    let topology = Topology {
        rank: 0,
        hosts: vec![vec![seat(0)], vec![seat(1)]],
        token: [9; 32],
        digest: [7; 32],
        form_within: LONG,
        op_within: LONG,
    };
    (listeners, topology)
}

/// Card of rank 1 of them at a handshake.
fn card(_: &TcpStream) -> std::io::Result<Card> {
    Ok(Card {
        address: None,
        host: [0; 32],
    })
}

/// Rank 1 of two, with the handshake done by hand: its control and data connections.
fn impostor(listener: &TcpListener, zero: std::net::SocketAddr) -> [TcpStream; 2] {
    let aborter = Aborter::new().unwrap();
    let place = Place::new(1, 2, &[9; 32], &[7; 32]);
    let until = Instant::now() + LONG;
    drop(Porch::new(listener, &place).unwrap());
    [Purpose::Control, Purpose::Data].map(|purpose| {
        let called = call(&place, 0, zero, purpose, card, &aborter, until);
        let stream = called.unwrap().unwrap();
        stream.set_nonblocking(false).unwrap();
        stream
    })
}

#[test]
fn wrong_bytes_from_a_rank_are_its_fault_and_nothing_panics() {
    type Say = fn(&mut [TcpStream; 2]);
    let cases: [(Say, bool); 7] = [
        (|[_, data]| data.write_all(&[0xff; 4096]).unwrap(), false),
        (
            |[_, data]| {
                data.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n and more, as long as a head")
                    .unwrap()
            },
            false,
        ),
        // What was under way in the generation before: the same operation, counted on.
        (
            |[_, data]| {
                let before = Head {
                    seq: 41,
                    kind: 0,
                    dtype: 0,
                    op: 0,
                    root: 0,
                    len: 400_000,
                    part: 0,
                    word: 0,
                };
                data.write_all(&before.encode()).unwrap();
                data.write_all(&[0; 4096]).unwrap();
            },
            false,
        ),
        (
            |[control, _]| control.write_all(&[0xff; NOTICE_LEN]).unwrap(),
            false,
        ),
        (
            |[control, _]| control.write_all(&[0xff; 4096]).unwrap(),
            false,
        ),
        // Cut short.
        (
            |[_, data]| {
                data.write_all(b"MUSTERDP").unwrap();
                data.shutdown(std::net::Shutdown::Both).unwrap();
            },
            true,
        ),
        (
            |[control, _]| control.write_all(&Notice::Lost(1).encode()).unwrap(),
            true,
        ),
    ];
    for (say, is_lost) in cases {
        let (listeners, topology) = two();
        let (zero, listener) = (listeners[0].local_addr().unwrap(), &listeners[0]);
        std::thread::scope(|scope| {
            let group = scope.spawn(move || {
                let aborter = Aborter::new().unwrap();
                let mut group = Group::connect(&topology, listener, &aborter).unwrap();
                let input = vec![1.0f32; 100_000];
                let mut output = input.clone();
                group.all_reduce(Op::Sum, &input, &mut output).unwrap_err()
            });
            let mut streams = impostor(&listeners[1], zero);
            say(&mut streams);
            match group.join().unwrap() {
                GroupError::PeerLost { rank: 1, .. } if is_lost => {}
                GroupError::Protocol { rank: 1, .. } if !is_lost => {}
                other => panic!("{other}"),
            }
        });
    }
}

#[test]
fn a_peer_of_the_previous_generation_is_not_let_in() {
    let (listeners, topology) = two();
    let (zero, listener) = (listeners[0].local_addr().unwrap(), &listeners[0]);
    std::thread::scope(|scope| {
        let group = scope.spawn(move || {
            let aborter = Aborter::new().unwrap();
            let mut group = Group::connect(&topology, listener, &aborter).unwrap();
            group.barrier().unwrap_err()
        });
        let (aborter, until) = (Aborter::new().unwrap(), Instant::now() + LONG);
        let before = Place::new(1, 2, &[9; 32], &[6; 32]);
        for purpose in [Purpose::Control, Purpose::Data] {
            let called = call(&before, 0, zero, purpose, card, &aborter, until);
            assert!(!matches!(called, Ok(Ok(_))), "{called:?}");
        }
        // This generation's comes in all the same.
        drop(impostor(&listeners[1], zero));
        let error = group.join().unwrap();
        assert!(
            matches!(error, GroupError::PeerLost { rank: 1, .. }),
            "{error}"
        );
    });
}
