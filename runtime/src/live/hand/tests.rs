//! Copies between real sockets of one process.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread::JoinHandle;
use std::time::Instant;

use super::fetch::*;
use super::serve::*;
use super::*;

const TOKEN: [u8; 32] = [9; 32];
const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
const SOON: Duration = Duration::from_secs(20);

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 % 251) as u8).collect()
}

fn get(thing: Thing, from: &[&Hand], within: Duration) -> Result<Vec<u8>, FetchError> {
    let sources: Vec<SocketAddr> = from.iter().map(|h| h.address()).collect();
    fetch(thing, &sources, TOKEN, within, &AtomicBool::new(false))
}

#[test]
fn several_sources_give_one_copy() {
    for len in [0, 1, (PART as usize) - 1, 3 * PART as usize + 7] {
        let hands = [
            Hand::open(HERE, TOKEN).unwrap(),
            Hand::open(HERE, TOKEN).unwrap(),
        ];
        hands
            .iter()
            .for_each(|h| h.offer(Thing::State(5), bytes(len)));
        assert_eq!(
            get(Thing::State(5), &[&hands[0], &hands[1]], SOON).unwrap(),
            bytes(len)
        );
    }
}

#[test]
fn one_that_is_gone_or_late_is_made_up_for() {
    let (gone, here) = (
        Hand::open(HERE, TOKEN).unwrap(),
        Hand::open(HERE, TOKEN).unwrap(),
    );
    let address = gone.address();
    drop(gone);
    let late = std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            let sources = [address, here.address()];
            fetch(
                Thing::Results(3),
                &sources,
                TOKEN,
                SOON,
                &AtomicBool::new(false),
            )
        });
        here.offer(Thing::Results(3), bytes(10));
        asked.join().unwrap()
    });
    assert_eq!(late.unwrap(), bytes(10));
}

#[test]
fn what_differs_is_named_and_what_is_not_there_too() {
    let hands = [
        Hand::open(HERE, TOKEN).unwrap(),
        Hand::open(HERE, TOKEN).unwrap(),
    ];
    hands[0].offer(Thing::State(1), bytes(5));
    hands[1].offer(Thing::State(1), bytes(6));
    let both = [&hands[0], &hands[1]];
    assert!(matches!(
        get(Thing::State(1), &both, SOON),
        Err(FetchError::Differ { .. })
    ));
    let short = Duration::from_millis(20);
    let missing = get(Thing::State(2), &both, short).unwrap_err();
    assert!(
        missing.to_string().contains("does not have it yet"),
        "{missing}"
    );
    hands.iter().for_each(Hand::withdraw_all);
    assert!(matches!(
        get(Thing::State(1), &both, short),
        Err(FetchError::NotThere { .. })
    ));
    let cancelled = AtomicBool::new(true);
    let all = [hands[0].address()];
    let none = fetch(Thing::State(1), &all, TOKEN, SOON, &cancelled);
    assert!(matches!(none, Err(FetchError::Cancelled)));
}

#[test]
fn strangers_and_nonsense_get_no_answer() {
    let hand = Hand::open(HERE, TOKEN).unwrap();
    hand.offer(Thing::State(1), bytes(5));
    let mut wrong = Source::connect(hand.address(), [8; 32]).unwrap();
    assert!(wrong.ask(Thing::State(1), Want::Length, 0, 5).is_err());
    let mut noise = TcpStream::connect(hand.address()).unwrap();
    noise.write_all(&[0xff; REQUEST_LEN]).unwrap();
    assert_eq!(noise.read(&mut [0; 8]).unwrap_or(0), 0);
    // Any part of what is there may be asked for, and nothing beyond it.
    let mut right = Source::connect(hand.address(), TOKEN).unwrap();
    let mut ask = |want, from, len| right.ask(Thing::State(1), want, from, len).unwrap();
    assert_eq!(ask(Want::Bytes, 3, u64::MAX), Some(5));
    let mut rest = [0; 2];
    right.stream.read_exact(&mut rest).unwrap();
    assert_eq!(rest, bytes(5)[3..]);
    assert_eq!(right.digest().unwrap(), *blake3::hash(&rest).as_bytes());
    assert_eq!(
        right.ask(Thing::State(1), Want::Digest, 9, 1).unwrap(),
        Some(5)
    );
    assert_eq!(right.digest().unwrap(), *blake3::hash(&[]).as_bytes());
}

#[test]
fn a_state_that_differs_in_one_byte_is_never_copied() {
    let len = 5 * PART as usize + 3;
    for at in [0, len / 2, len - 1] {
        let hands = [(); 3].map(|()| Hand::open(HERE, TOKEN).unwrap());
        for (i, hand) in hands.iter().enumerate() {
            let mut own = bytes(len);
            own[at] ^= u8::from(i == 1);
            hand.offer(Thing::State(1), own);
        }
        // Who gives the part, and who is asked about it, is chance; two of three in it agree.
        let sources: Vec<&Hand> = hands[..2].iter().collect();
        let got = get(Thing::State(1), &sources, SOON);
        assert!(matches!(got, Err(FetchError::Differ { .. })), "byte {at}");
        let all: Vec<&Hand> = hands.iter().collect();
        match get(Thing::State(1), &all, SOON) {
            Err(FetchError::Differ { .. }) => {}
            Ok(copy) => assert!(copy == bytes(len), "byte {at}"),
            Err(other) => panic!("{other}"),
        }
    }
}

/// A source that answers rightly until so many bytes of parts are sent, and is gone then.
fn failing_source(len: usize, after: usize, spoil: bool) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let served = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let (all, mut sent) = (bytes(len), 0);
        let mut request = [0; REQUEST_LEN];
        while stream.read_exact(&mut request).is_ok() {
            let (_, want, from, part) = parse(&request, &TOKEN).unwrap();
            stream.write_all(&(len as u64 + 1).to_le_bytes()).unwrap();
            if want == Want::Length {
                continue;
            }
            let part = &all[from as usize..(from + part) as usize];
            let mut digest = *blake3::hash(part).as_bytes();
            if want == Want::Bytes {
                let now = part.len().min(after - sent);
                stream.write_all(&part[..now]).unwrap();
                sent += now;
                if now < part.len() {
                    return;
                }
                digest[0] ^= u8::from(spoil);
            }
            if stream.write_all(&digest).is_err() {
                return;
            }
        }
    });
    (at, served)
}

#[test]
fn a_source_that_dies_or_sends_damaged_bytes_is_taken_over_from() {
    let len = 6 * PART as usize + 11;
    let whole = Hand::open(HERE, TOKEN).unwrap();
    whole.offer(Thing::State(1), bytes(len));
    for (after, spoil) in [
        (0, false),
        (1, false),
        (PART as usize, false),
        (PART as usize + 100, false),
        (len, true),
    ] {
        let (at, served) = failing_source(len, after, spoil);
        let sources = [at, whole.address()];
        let never = AtomicBool::new(false);
        let got = fetch(Thing::State(1), &sources, TOKEN, SOON, &never).unwrap();
        assert!(got == bytes(len), "gone after {after} bytes");
        served.join().unwrap();
    }
}

/// Bytes in pieces of one length.
struct Pieces(Vec<Vec<u8>>, usize);

impl Frozen for Pieces {
    fn total(&self) -> usize {
        self.0.iter().map(Vec::len).sum()
    }

    fn piece(&self, byte: usize) -> &[u8] {
        let piece = self.0.get(byte / self.1);
        piece.map_or(&[], |piece| &piece[byte % self.1..])
    }
}

#[test]
fn what_lies_in_pieces_is_copied_as_one() {
    let len = PART as usize + 12_345;
    let hands = [(); 2].map(|()| Hand::open(HERE, TOKEN).unwrap());
    let pieces = bytes(len).chunks(777).map(<[u8]>::to_vec).collect();
    hands[0].offer(Thing::State(1), Pieces(pieces, 777));
    hands[1].offer(Thing::State(1), bytes(len));
    let got = get(Thing::State(1), &[&hands[0], &hands[1]], SOON).unwrap();
    assert!(got == bytes(len));
}

#[test]
fn strangers_that_say_nothing_keep_nobody_out() {
    let hand = Hand::open(HERE, TOKEN).unwrap();
    hand.offer(Thing::State(1), bytes(5));
    let strangers: Vec<TcpStream> = (0..MAX_SERVED + 8)
        .map(|_| TcpStream::connect(hand.address()).unwrap())
        .collect();
    // Before any of them is sent away.
    let got = get(Thing::State(1), &[&hand], PROOF).unwrap();
    assert_eq!(got, bytes(5));
    for mut stranger in strangers {
        stranger.set_read_timeout(Some(SOON)).unwrap();
        assert_eq!(stranger.read(&mut [0]).unwrap(), 0, "its time is over");
    }
}

#[test]
fn an_idle_connection_keeps_no_state() {
    struct Held(Arc<()>);
    impl Frozen for Held {
        fn total(&self) -> usize {
            0
        }
        fn piece(&self, _: usize) -> &[u8] {
            let _held = &self.0;
            &[]
        }
    }
    let held = Arc::new(());
    let hand = Hand::open(HERE, TOKEN).unwrap();
    hand.offer(Thing::State(1), Held(held.clone()));
    let mut idle = Source::connect(hand.address(), TOKEN).unwrap();
    let length = idle.ask(Thing::State(1), Want::Length, 0, 0).unwrap();
    assert_eq!(length, Some(0));
    drop(hand);
    let until = Instant::now() + SOON / 4;
    while Arc::strong_count(&held) > 1 {
        assert!(Instant::now() < until, "it is still held");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(idle);
}
