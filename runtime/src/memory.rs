//! Connections to launchers, for what they hold in memory: `muster_protocol::memory` over TCP, blocking, each
//! operation with an end.
//!
//! Never hands out a byte whose mark it has not seen: what comes from here was sent by the other side of the proof, in
//! this order. It is not encrypted.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use muster_protocol::memory::{self, Answer, Ask, Key, MAGIC, Mark, Marks, Meeting, Nonce, Side};
use muster_protocol::{LauncherId, codec};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How long a connection, a proof or a short answer may take.
pub const SOON: Duration = Duration::from_secs(2);

/// How long so many bytes may take: a slower peer is of no use.
pub fn time_for(bytes: u64) -> Duration {
    const SLOWEST: u64 = 1 << 20;
    SOON + Duration::from_secs(bytes.div_ceil(SLOWEST))
}

/// A connection on which both sides have proven that they know the job's key, and the caller reached whom it meant.
#[derive(Debug)]
pub struct Link {
    wire: Wire,
    /// Of what is sent, and of what comes.
    sends: Marks,
    hears: Marks,
}

/// Bytes as they come and go.
#[derive(Debug)]
struct Wire {
    stream: TcpStream,
}

fn nonce() -> io::Result<Nonce> {
    let mut nonce = Nonce::default();
    std::fs::File::open("/dev/urandom")?.read_exact(&mut nonce)?;
    Ok(nonce)
}

fn unproven() -> io::Error {
    io::Error::new(
        ErrorKind::PermissionDenied,
        "it does not know the job's key, or is another launcher than the one that was there",
    )
}

fn unmarked() -> io::Error {
    io::Error::new(
        ErrorKind::InvalidData,
        "what arrives is not what was sent: it was changed on the way",
    )
}

fn not_right(error: impl std::fmt::Display) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error.to_string())
}

/// Where the launcher of this guard tells what it holds; `None` where it holds nothing, ever. The answer is believed
/// for no more than where to ask.
///
/// # Errors
/// Nothing answers there in time.
pub fn find(guard: SocketAddr) -> io::Result<Option<SocketAddr>> {
    let until = Instant::now() + SOON;
    let mut wire = Wire {
        stream: TcpStream::connect_timeout(&guard, SOON)?,
    };
    let mut answer = [0; 15];
    let mut have = 0;
    while have < answer.len() {
        match wire.read_some(&mut answer[have..], until)? {
            0 => break,
            more => have += more,
        }
    }
    let port = answer.get(..have).and_then(memory::data_port);
    Ok(port.map(|port| SocketAddr::new(guard.ip(), port)))
}

impl Link {
    /// Calls a launcher: this one, whoever listens there.
    ///
    /// # Errors
    /// It does not answer in time, does not know the key, or is another one.
    pub fn connect(at: SocketAddr, key: &Key, launcher: LauncherId) -> io::Result<Link> {
        let until = Instant::now() + SOON;
        let stream = TcpStream::connect_timeout(&at, SOON)?;
        stream.set_nodelay(true)?;
        let mut wire = Wire { stream };
        let caller = nonce()?;
        wire.write(&[&MAGIC[..], &caller].concat(), until)?;
        let (mut listener, mut proof) = (Nonce::default(), Mark::default());
        wire.read(&mut listener, until)?;
        wire.read(&mut proof, until)?;
        let meeting = Meeting {
            caller,
            listener,
            launcher,
        };
        if !key.is_proven(Side::Listener, &meeting, proof) {
            return Err(unproven());
        }
        wire.write(&key.proof(Side::Caller, &meeting), until)?;
        Ok(Link {
            wire,
            sends: key.marks(Side::Caller, &meeting),
            hears: key.marks(Side::Listener, &meeting),
        })
    }

    /// Takes a caller's proof, as this launcher. A stranger learns no more than that this side may know a key.
    ///
    /// # Errors
    /// It does not prove it in time.
    pub fn accept(stream: TcpStream, key: &Key, launcher: LauncherId) -> io::Result<Link> {
        let until = Instant::now() + SOON;
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        let mut wire = Wire { stream };
        let (mut magic, mut caller, mut proof) = (MAGIC, Nonce::default(), Mark::default());
        wire.read(&mut magic, until)?;
        if magic != MAGIC {
            return Err(unproven());
        }
        wire.read(&mut caller, until)?;
        let listener = nonce()?;
        let meeting = Meeting {
            caller,
            listener,
            launcher,
        };
        let answer = [listener, key.proof(Side::Listener, &meeting)].concat();
        wire.write(&answer, until)?;
        wire.read(&mut proof, until)?;
        if !key.is_proven(Side::Caller, &meeting, proof) {
            return Err(unproven());
        }
        Ok(Link {
            wire,
            sends: key.marks(Side::Listener, &meeting),
            hears: key.marks(Side::Caller, &meeting),
        })
    }

    /// Asks, and waits for the answer.
    ///
    /// # Errors
    /// There is none in time, or one that is none.
    pub fn ask(&mut self, ask: &Ask) -> io::Result<Answer> {
        self.say(ask)?;
        let answer: Answer = self.hear(SOON)?;
        answer.check().map_err(not_right)?;
        Ok(answer)
    }

    /// Says something.
    ///
    /// # Errors
    /// It is too long, or nobody takes it in time.
    pub fn say(&mut self, what: &impl Serialize) -> io::Result<()> {
        let frame = codec::encode_frame(what).map_err(not_right)?;
        let mut frame = codec::with_length(&frame);
        let mark = self.sends.of(&[&frame]);
        frame.extend(mark);
        self.wire.write(&frame, Instant::now() + SOON)
    }

    /// Hears something within this time.
    ///
    /// # Errors
    /// Nothing comes, or nothing that can be understood.
    pub fn hear<T: DeserializeOwned>(&mut self, within: Duration) -> io::Result<T> {
        let mut length = [0; 4];
        self.wire.read(&mut length, Instant::now() + within)?;
        let bytes = u32::from_le_bytes(length) as usize;
        if bytes > codec::MAX_FRAME {
            return Err(not_right(codec::CodecError::TooLong { len: bytes }));
        }
        let until = Instant::now() + SOON;
        let mut frame = vec![0; bytes];
        self.wire.read(&mut frame, until)?;
        self.marked(&[&length, &frame], until)?;
        codec::decode_frame(&frame).map_err(not_right)
    }

    /// Sends bytes, all of which the other side reads at once.
    ///
    /// # Errors
    /// They are not taken until then.
    pub fn write(&mut self, bytes: &[u8], until: Instant) -> io::Result<()> {
        self.write_while(bytes, until, Duration::MAX, || true)
    }

    /// [`write`](Self::write), which looks so often at whether that is wanted still while the other side takes nothing.
    ///
    /// # Errors
    /// As for `write`; `Interrupted` if it is not wanted any more.
    pub fn write_while(
        &mut self,
        bytes: &[u8],
        until: Instant,
        looks: Duration,
        wanted: impl Fn() -> bool,
    ) -> io::Result<()> {
        self.wire.write_while(bytes, until, looks, &wanted)?;
        // While they are on their way.
        let mark = self.sends.of(&[bytes]);
        self.wire.write_while(&mark, until, looks, wanted)
    }

    /// Fills all of this with what the other side has written at once. It is of no use after an error.
    ///
    /// # Errors
    /// It does not come until then, or not as it was sent.
    pub fn read(&mut self, into: &mut [u8], until: Instant) -> io::Result<()> {
        self.wire.read(into, until)?;
        self.marked(&[into], until)
    }

    /// That what came has its mark behind it.
    fn marked(&mut self, piece: &[&[u8]], until: Instant) -> io::Result<()> {
        let mut mark = Mark::default();
        self.wire.read(&mut mark, until)?;
        match self.hears.is_next(piece, mark) {
            true => Ok(()),
            false => Err(unmarked()),
        }
    }
}

impl Wire {
    fn write(&mut self, bytes: &[u8], until: Instant) -> io::Result<()> {
        self.write_while(bytes, until, Duration::MAX, || true)
    }

    fn write_while(
        &mut self,
        mut bytes: &[u8],
        until: Instant,
        looks: Duration,
        wanted: impl Fn() -> bool,
    ) -> io::Result<()> {
        while !bytes.is_empty() {
            if !wanted() {
                return Err(ErrorKind::Interrupted.into());
            }
            let longest = left(until)?.min(looks);
            self.stream.set_write_timeout(Some(longest))?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                Err(error) if is_no_end(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn read(&mut self, into: &mut [u8], until: Instant) -> io::Result<()> {
        let mut have = 0;
        while have < into.len() {
            match self.read_some(&mut into[have..], until)? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                more => have += more,
            }
        }
        Ok(())
    }

    fn read_some(&mut self, into: &mut [u8], until: Instant) -> io::Result<usize> {
        loop {
            self.stream.set_read_timeout(Some(left(until)?))?;
            match self.stream.read(into) {
                Err(error) if is_no_end(&error) => {}
                other => return other,
            }
        }
    }
}

/// Whether there is more time: a timeout ends in `left`.
fn is_no_end(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::Interrupted | ErrorKind::WouldBlock | ErrorKind::TimedOut
    )
}

fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    match left.is_zero() {
        true => Err(ErrorKind::TimedOut.into()),
        false => Ok(left),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};
    use std::thread;

    use muster_protocol::Digest;

    use super::*;

    fn key(of: u8) -> Key {
        Key::of_cluster(Some(b"a secret")).of_job(Digest([of; 32]))
    }

    fn listen() -> (TcpListener, SocketAddr) {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let at = listener.local_addr().unwrap();
        (listener, at)
    }

    const THIS: LauncherId = LauncherId([1; 8]);
    const OTHER: LauncherId = LauncherId([2; 8]);

    #[test]
    fn both_sides_prove_the_key() {
        let (listener, at) = listen();
        let serve = thread::spawn(move || {
            let accept = || Link::accept(listener.accept().unwrap().0, &key(1), THIS);
            let mut link = accept().unwrap();
            assert_eq!(link.hear::<Ask>(SOON).unwrap(), Ask::List);
            link.say(&Answer::Gone).unwrap();
            accept().unwrap_err().kind()
        });
        let mut link = Link::connect(at, &key(1), THIS).unwrap();
        assert_eq!(link.ask(&Ask::List).unwrap(), Answer::Gone);
        let error = Link::connect(at, &key(2), THIS).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        // Who proves nothing is cut off.
        assert_eq!(serve.join().unwrap(), ErrorKind::UnexpectedEof);
    }

    /// Passes on what both sides say, changed by this on its way back; that of the listener is counted in bytes.
    fn relay(to: SocketAddr, changes: impl Fn(usize, u8) -> u8 + Send + 'static) -> SocketAddr {
        let (listener, at) = listen();
        thread::spawn(move || {
            let mut caller = listener.accept().unwrap().0;
            let mut server = TcpStream::connect(to).unwrap();
            let (mut out, mut on) = (caller.try_clone().unwrap(), server.try_clone().unwrap());
            thread::spawn(move || std::io::copy(&mut caller, &mut on));
            let mut byte = [0];
            for at in 0.. {
                match server.read(&mut byte) {
                    Ok(1) if out.write_all(&[changes(at, byte[0])]).is_ok() => {}
                    _ => return,
                }
            }
        });
        at
    }

    #[test]
    fn who_took_the_place_of_one_launcher_cannot_pass_on_another_ones_proof() {
        let (listener, live) = listen();
        let serve = thread::spawn(move || {
            Link::accept(listener.accept().unwrap().0, &key(1), THIS).map(drop)
        });
        let relay = relay(live, |_, byte| byte);
        let error = Link::connect(relay, &key(1), OTHER).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        // Nor does it get the caller's proof, so it cannot ask for itself.
        assert!(serve.join().unwrap().is_err());
    }

    #[test]
    fn what_is_changed_on_the_way_is_not_believed() {
        const PROOF: usize = 64;
        let answer = codec::with_length(&codec::encode_frame(&Answer::Bytes).unwrap());
        let frame = answer.len() + size_of::<Mark>();
        // A bit of the frame, of its mark, of the bytes, of theirs; the last one is behind it all.
        for at in [4, frame - 1, frame + 500, frame + 1_000, frame + 10_000] {
            let (listener, live) = listen();
            let serve = thread::spawn(move || {
                let mut link = Link::accept(listener.accept().unwrap().0, &key(1), THIS).unwrap();
                let _asked: Ask = link.hear(SOON).unwrap();
                link.say(&Answer::Bytes).unwrap();
                let _sent = link.write(&[7; 1_000], Instant::now() + SOON);
            });
            let relay = relay(live, move |n, byte| byte ^ u8::from(n == PROOF + at));
            let mut link = Link::connect(relay, &key(1), THIS).unwrap();
            let mut bytes = [0; 1_000];
            let got = link.ask(&Ask::List);
            let got = got.and_then(|_| link.read(&mut bytes, Instant::now() + SOON));
            match at > frame + 1_000 + size_of::<Mark>() {
                true => assert_eq!((got.is_ok(), bytes), (true, [7; 1_000])),
                false => assert_eq!(got.unwrap_err().kind(), ErrorKind::InvalidData, "{at}"),
            }
            serve.join().unwrap();
        }
    }

    #[test]
    fn a_caller_that_drips_is_cut_off() {
        let (listener, at) = listen();
        let drip = thread::spawn(move || {
            let mut stream = TcpStream::connect(at).unwrap();
            stream.write_all(&MAGIC).unwrap();
            // A byte now and then keeps no place.
            while stream.write_all(&[0]).is_ok() {
                thread::sleep(SOON / 20);
            }
        });
        let stream = listener.accept().unwrap().0;
        let began = Instant::now();
        let error = Link::accept(stream, &key(1), THIS).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert!(began.elapsed() < SOON * 10);
        drip.join().unwrap();
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let (listener, at) = listen();
        let garbage = [&[255u8; 4][..], &[3, 0, 0, 0, 9, 9, 9], &[1, 0, 0, 0, 1]];
        let serve = thread::spawn(move || {
            for bytes in garbage {
                let mut link = Link::accept(listener.accept().unwrap().0, &key(1), THIS).unwrap();
                let until = Instant::now() + SOON;
                let _asked: Ask = link.hear(SOON).unwrap();
                // With its mark: it is from who knows the key.
                link.write(bytes, until).unwrap();
            }
        });
        for _ in garbage {
            let mut link = Link::connect(at, &key(1), THIS).unwrap();
            let error = link.ask(&Ask::List).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
            assert_ne!(error.to_string(), unmarked().to_string());
        }
        serve.join().unwrap();
    }

    #[test]
    fn a_guard_that_holds_nothing_is_none_to_ask() {
        let (listener, at) = listen();
        let serve = thread::spawn(move || {
            for answer in [&b"MGRD\x01launcher"[..], b"MGRD\x01launcher\x00\x07"] {
                let (mut caller, _) = listener.accept().unwrap();
                caller.write_all(answer).unwrap();
            }
        });
        assert_eq!(find(at).unwrap(), None);
        assert_eq!(find(at).unwrap(), Some(SocketAddr::new(at.ip(), 7)));
        serve.join().unwrap();
        assert!(find(at).is_err(), "nobody listens any more");
    }
}
