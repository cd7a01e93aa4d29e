//! Copies between real sockets of one process.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use super::fetch::*;
use super::landing::*;
use super::serve::*;
use super::source::*;
use super::*;

const TOKEN: [u8; 32] = [9; 32];
const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
const SOON: Duration = Duration::from_secs(20);

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 31 % 251) as u8).collect()
}

fn get(thing: Thing, from: &[&Hand], within: Duration) -> Result<Vec<u8>, FetchError> {
    let sources: Vec<SocketAddr> = from.iter().map(|h| h.address()).collect();
    get_at(thing, &sources, within)
}

fn get_at(thing: Thing, from: &[SocketAddr], within: Duration) -> Result<Vec<u8>, FetchError> {
    let (never, mut bytes) = (AtomicBool::new(false), Vec::new());
    fetch(thing, from, TOKEN, within, &never, &mut bytes)?;
    Ok(bytes)
}

fn digest(bytes: &[u8]) -> Digest {
    XxHash3_128::oneshot(bytes).to_be_bytes()
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
            get_at(Thing::Results(3), &sources, SOON)
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
    let (all, mut bytes) = ([hands[0].address()], Vec::new());
    let none = fetch(Thing::State(1), &all, TOKEN, SOON, &cancelled, &mut bytes);
    assert!(matches!(none, Err(FetchError::Cancelled)));
}

#[test]
fn strangers_and_nonsense_get_no_answer() {
    let hand = Hand::open(HERE, TOKEN).unwrap();
    hand.offer(Thing::State(1), bytes(5));
    let (never, until) = (AtomicBool::new(false), Instant::now() + SOON);
    let wanted = Wanted::new(&never, until);
    let mut wrong = Source::connect(hand.address(), [8; 32], &wanted).unwrap();
    let asked = wrong.ask(Thing::State(1), Want::Length, (0, 5));
    assert!(asked.and_then(|()| wrong.length()).is_err());
    let mut noise = TcpStream::connect(hand.address()).unwrap();
    noise.write_all(&[0xff; REQUEST_LEN]).unwrap();
    assert_eq!(noise.read(&mut [0; 8]).unwrap_or(0), 0);
    // Any part of what is there may be asked for, and nothing beyond it.
    let mut right = Source::connect(hand.address(), TOKEN, &wanted).unwrap();
    let ask = |right: &mut Source<'_>, want, part| {
        right.ask(Thing::State(1), want, part).unwrap();
        right.length().unwrap()
    };
    assert_eq!(ask(&mut right, Want::Bytes, (3, u64::MAX)), Some(5));
    let mut rest = [0; 2];
    right.read_exact(&mut rest).unwrap();
    assert_eq!(rest, bytes(5)[3..]);
    assert_eq!(ask(&mut right, Want::Digest, (3, u64::MAX)), Some(5));
    assert_eq!(right.read_digest().unwrap(), digest(&rest));
    assert_eq!(ask(&mut right, Want::Digest, (9, 1)), Some(5));
    assert_eq!(right.read_digest().unwrap(), digest(&[]));
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

/// Faults of a source.
#[derive(Clone, Copy, Debug)]
enum Fault {
    /// It is gone after so many bytes of parts.
    Gone(usize),
    /// Its bytes from this one on are damaged on their way.
    Damaged(usize),
    /// The same; and it is gone when it is asked for the digest of a part.
    DamagedAndGone(usize),
}

/// A source with a fault, until the test ends.
fn failing_source(len: usize, fault: Fault) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let sent = Arc::new(AtomicUsize::new(0));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let sent = sent.clone();
            std::thread::spawn(move || fail(stream.unwrap(), &bytes(len), fault, &sent));
        }
    });
    at
}

/// One connection with it. `sent`: bytes of parts, over all connections.
fn fail(mut stream: TcpStream, all: &[u8], fault: Fault, sent: &AtomicUsize) {
    let mut request = [0; REQUEST_LEN];
    while stream.read_exact(&mut request).is_ok() {
        let (_, want, from, len) = parse(&request, &TOKEN).unwrap();
        let len_and_one = (all.len() as u64 + 1).to_le_bytes();
        let mut part = match want {
            Want::Length => Vec::new(),
            _ => all[from as usize..][..len as usize].to_vec(),
        };
        match (want, fault) {
            (Want::Length, _) => {}
            (Want::Digest, Fault::DamagedAndGone(_)) => return,
            (Want::Digest, _) => part = digest(&part).to_vec(),
            (Want::Bytes, Fault::Gone(after)) => {
                let before = sent.fetch_add(part.len(), Ordering::AcqRel);
                part.truncate(after.saturating_sub(before));
            }
            (Want::Bytes, Fault::Damaged(byte) | Fault::DamagedAndGone(byte)) => {
                let byte = byte.checked_sub(from as usize);
                if let Some(byte) = byte.and_then(|byte| part.get_mut(byte)) {
                    *byte ^= 4;
                }
            }
        }
        let gone = want == Want::Bytes && part.len() < len as usize;
        let written = stream
            .write_all(&len_and_one)
            .and_then(|()| stream.write_all(&part));
        if gone || written.is_err() {
            return;
        }
    }
}

#[test]
fn a_source_that_dies_or_sends_damaged_bytes_is_taken_over_from() {
    let len = 6 * PART as usize + 11;
    let whole = Hand::open(HERE, TOKEN).unwrap();
    whole.offer(Thing::State(1), bytes(len));
    let part = PART as usize;
    for fault in [
        Fault::Gone(0),
        Fault::Gone(1),
        Fault::Gone(part),
        Fault::Gone(part + 100),
        Fault::Damaged(0),
        Fault::Damaged(part + 3),
        Fault::Damaged(len - 1),
        Fault::DamagedAndGone(len - 1),
    ] {
        let sources = [failing_source(len, fault), whole.address()];
        let got = get_at(Thing::State(1), &sources, SOON).unwrap();
        assert!(got == bytes(len), "{fault:?}");
    }
}

#[test]
fn what_the_only_source_sends_is_checked_too() {
    let len = 2 * PART as usize + 5;
    for byte in [0, len - 1] {
        let at = failing_source(len, Fault::Damaged(byte));
        let got = get_at(Thing::State(1), &[at], Duration::from_millis(50));
        assert!(
            matches!(got, Err(FetchError::NotThere { .. })),
            "byte {byte}"
        );
    }
}

#[test]
fn a_source_that_comes_late_is_compared_all_the_same() {
    let len = 2 * PART as usize + 5;
    for differs in [false, true] {
        let hands = [(); 2].map(|()| Hand::open(HERE, TOKEN).unwrap());
        hands[0].offer(Thing::State(1), bytes(len));
        let got = std::thread::scope(|scope| {
            let asked = scope.spawn(|| get(Thing::State(1), &[&hands[0], &hands[1]], SOON));
            // All parts are here long since.
            std::thread::sleep(Duration::from_millis(200));
            assert!(!asked.is_finished(), "one source is not enough");
            let mut own = bytes(len);
            own[len / 2] ^= u8::from(differs);
            hands[1].offer(Thing::State(1), own);
            asked.join().unwrap()
        });
        match got {
            Ok(copy) => assert!(!differs && copy == bytes(len)),
            Err(FetchError::Differ { .. }) => assert!(differs),
            Err(other) => panic!("{other}"),
        }
    }
}

#[test]
fn a_source_that_never_comes_is_not_waited_for_in_the_end() {
    let len = PART as usize + 5;
    let hands = [(); 2].map(|()| Hand::open(HERE, TOKEN).unwrap());
    hands[0].offer(Thing::State(1), bytes(len));
    // One says that it has nothing yet, one nothing at all.
    let others = [hands[1].address(), mute_source(0, false)];
    std::thread::scope(|scope| {
        for other in others {
            for sources in [[other, hands[0].address()], [hands[0].address(), other]] {
                scope.spawn(move || {
                    assert!(get_at(Thing::State(1), &sources, SOON).unwrap() == bytes(len));
                });
            }
        }
    });
}

#[test]
fn a_late_source_takes_over_from_one_that_is_lost() {
    let len = 6 * PART as usize + 11;
    let late = Hand::open(HERE, TOKEN).unwrap();
    let sources = [failing_source(len, Fault::Gone(100)), late.address()];
    let got = std::thread::scope(|scope| {
        let asked = scope.spawn(|| get_at(Thing::State(1), &sources, SOON));
        std::thread::sleep(Duration::from_millis(100));
        late.offer(Thing::State(1), bytes(len));
        asked.join().unwrap()
    });
    assert!(got.unwrap() == bytes(len));
}

#[test]
fn every_connection_proves_itself_at_once() {
    let len = PART as usize + 5;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let proven = Arc::new(AtomicUsize::new(0));
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, proven) = (stream.unwrap(), proven.clone());
            std::thread::spawn(move || {
                let (mut request, mut first) = ([0; REQUEST_LEN], true);
                while stream.read_exact(&mut request).is_ok() {
                    proven.fetch_add(usize::from(first), Ordering::AcqRel);
                    first = false;
                    let (_, want, from, len_of) = parse(&request, &TOKEN).unwrap();
                    let part = &bytes(len)[from as usize..][..len_of as usize];
                    let until = Instant::now() + SOON;
                    // There are fewer parts than connections: one has nothing to do.
                    while want != Want::Length && proven.load(Ordering::Acquire) < 3 {
                        assert!(Instant::now() < until, "one connection is silent");
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    let said = match want {
                        Want::Length => Vec::new(),
                        Want::Bytes => part.to_vec(),
                        Want::Digest => digest(part).to_vec(),
                    };
                    let len_and_one = (len as u64 + 1).to_le_bytes();
                    let _gone = stream.write_all(&[&len_and_one[..], &said].concat());
                }
            });
        }
    });
    // Before any of them would be taken for lost, and what it was asked for be asked of the silent one.
    let got = get_at(Thing::State(1), &[at], SILENCE / 2).unwrap();
    assert!(got == bytes(len));
}

/// Places of these lengths, which hold something else.
struct Pieced(Vec<Vec<u8>>);

impl Landing for Pieced {
    fn places(&mut self, total: usize) -> Option<Vec<&mut [u8]>> {
        let all = self.0.iter().map(Vec::len).sum::<usize>();
        (all == total).then(|| self.0.iter_mut().map(Vec::as_mut_slice).collect())
    }
}

#[test]
fn a_copy_comes_straight_to_its_place() {
    // Of models with a few large tensors, and with thousands of small ones among them.
    let small = (0..3000).map(|i| i % 5);
    let lens: Vec<usize> = small
        .chain([PART as usize + 1, 0, 7, 3 * CHUNK, 1])
        .collect();
    let total = lens.iter().sum();
    let hands = [(); 2].map(|()| Hand::open(HERE, TOKEN).unwrap());
    hands
        .iter()
        .for_each(|h| h.offer(Thing::State(1), bytes(total)));
    let at = failing_source(total, Fault::Damaged(20));
    let (first, never) = (hands[0].address(), AtomicBool::new(false));
    let mut landing = Pieced(lens.iter().map(|len| vec![0xee; *len]).collect());
    let before: Vec<_> = landing.0.iter().map(|place| place.as_ptr()).collect();
    for sources in [
        vec![first, hands[1].address()],
        vec![first],
        vec![at, first],
    ] {
        landing.0.iter_mut().for_each(|place| place.fill(0xee));
        let thing = Thing::State(1);
        fetch(thing, &sources, TOKEN, SOON, &never, &mut landing).unwrap();
        assert!(landing.0.concat() == bytes(total));
    }
    let after: Vec<_> = landing.0.iter().map(|place| place.as_ptr()).collect();
    assert_eq!(before, after, "nothing is allocated");
}

#[test]
fn a_thing_of_another_length_has_no_room() {
    let hand = Hand::open(HERE, TOKEN).unwrap();
    hand.offer(Thing::State(1), bytes(10));
    let mut landing = Pieced(vec![vec![0xee; 9]]);
    let (thing, from) = (Thing::State(1), [hand.address()]);
    let never = AtomicBool::new(false);
    let got = fetch(thing, &from, TOKEN, SOON, &never, &mut landing);
    assert!(matches!(got, Err(FetchError::NoRoom { bytes: 10, .. })));
    assert_eq!(landing.0, [[0xee; 9]], "nothing has come");
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

/// A source that takes connections, and says so much of a long part; then a byte now and then, or nothing.
fn mute_source(says: usize, trickles: bool) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            std::thread::spawn(move || {
                let (mut stream, mut request) = (stream.unwrap(), [0; REQUEST_LEN]);
                let len_and_one = (PART / 2 + 1).to_le_bytes();
                let mut left = says;
                while left > 0 && stream.read_exact(&mut request).is_ok() {
                    let said = left.min(8);
                    left -= said;
                    let _gone = stream.write_all(&len_and_one[..said]);
                }
                while trickles && stream.write_all(&[0]).is_ok() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                // Until the other side closes it.
                let _gone = stream.read_to_end(&mut Vec::new());
            });
        }
    });
    at
}

#[test]
fn a_fetch_ends_when_it_is_not_wanted_any_more() {
    // Nothing; half a length; then a length and no part; and a part that would take hours.
    for (says, trickles) in [(0, false), (5, false), (8, false), (16, true)] {
        let at = [mute_source(says, trickles)];
        let cancelled = AtomicBool::new(false);
        let (got, took) = std::thread::scope(|scope| {
            let (at, over) = (&at, &cancelled);
            let fetched = scope.spawn(move || {
                let mut bytes = Vec::new();
                fetch(Thing::Results(3), at, TOKEN, 9 * SOON, over, &mut bytes)
            });
            std::thread::sleep(Duration::from_millis(100));
            assert!(!fetched.is_finished());
            let since = Instant::now();
            cancelled.store(true, Ordering::Release);
            (fetched.join().unwrap(), since.elapsed())
        });
        assert!(matches!(got, Err(FetchError::Cancelled)), "{says}");
        // Two slices are 40 ms, a silence 10 s.
        assert!(took < SILENCE / 2, "{says}: {took:?}");
        let since = Instant::now();
        let got = get_at(Thing::Results(3), &at, Duration::from_millis(100));
        assert!(matches!(got, Err(FetchError::NotThere { .. })), "{says}");
        let took = since.elapsed();
        assert!(took < SILENCE / 2, "{says}: {took:?}");
    }
}

#[test]
fn a_connection_that_nobody_takes_ends_too() {
    // The queue of a listener that takes nobody: who comes when it is full gets no answer.
    let kind = socket2::Type::STREAM;
    let listener = socket2::Socket::new(socket2::Domain::IPV4, kind, None).unwrap();
    listener
        .bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into())
        .unwrap();
    listener.listen(0).unwrap();
    let at = listener.local_addr().unwrap().as_socket().unwrap();
    let _queued: Vec<TcpStream> = (0..8)
        .map_while(|_| TcpStream::connect_timeout(&at, Duration::from_millis(200)).ok())
        .collect();
    let since = Instant::now();
    let got = get_at(Thing::Results(3), &[at], Duration::from_millis(200));
    assert!(matches!(got, Err(FetchError::NotThere { .. })));
    assert!(since.elapsed() < SILENCE / 2, "{:?}", since.elapsed());
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
    let never = AtomicBool::new(false);
    let wanted = Wanted::new(&never, Instant::now() + SOON);
    let mut idle = Source::connect(hand.address(), TOKEN, &wanted).unwrap();
    idle.ask(Thing::State(1), Want::Length, (0, 0)).unwrap();
    assert_eq!(idle.length().unwrap(), Some(0));
    drop(hand);
    let until = Instant::now() + SOON / 4;
    while Arc::strong_count(&held) > 1 {
        assert!(Instant::now() < until, "it is still held");
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(idle);
}
