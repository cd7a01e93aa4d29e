//! Connections to launchers, for what they hold in memory: `muster_protocol::memory` over TCP, blocking, each
//! operation with an end.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use muster_protocol::codec;
use muster_protocol::memory::{self, Answer, Ask, Key, MAGIC, Nonce, Side};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How long a connection, a proof or a short answer may take.
pub const SOON: Duration = Duration::from_secs(2);

/// How long so many bytes may take: a slower peer is of no use.
pub fn time_for(bytes: u64) -> Duration {
    const SLOWEST: u64 = 1 << 20;
    SOON + Duration::from_secs(bytes.div_ceil(SLOWEST))
}

/// A connection on which both sides have proven that they know the job's key.
#[derive(Debug)]
pub struct Link {
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
        "it does not know the job's key",
    )
}

fn not_right(error: impl std::fmt::Display) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, error.to_string())
}

/// Where the launcher of this guard tells what it holds; `None` where it holds nothing, ever.
///
/// # Errors
/// Nothing answers there in time.
pub fn find(guard: SocketAddr) -> io::Result<Option<SocketAddr>> {
    let until = Instant::now() + SOON;
    let mut link = Link {
        stream: TcpStream::connect_timeout(&guard, SOON)?,
    };
    let mut answer = [0; 15];
    let mut have = 0;
    while have < answer.len() {
        match link.read_some(&mut answer[have..], until)? {
            0 => break,
            more => have += more,
        }
    }
    let port = answer.get(..have).and_then(memory::data_port);
    Ok(port.map(|port| SocketAddr::new(guard.ip(), port)))
}

impl Link {
    /// Calls a launcher.
    ///
    /// # Errors
    /// It does not answer in time, or does not know the key.
    pub fn connect(at: SocketAddr, key: &Key) -> io::Result<Link> {
        let until = Instant::now() + SOON;
        let stream = TcpStream::connect_timeout(&at, SOON)?;
        stream.set_nodelay(true)?;
        let mut link = Link { stream };
        let ours = nonce()?;
        link.write(&[&MAGIC[..], &ours].concat(), until)?;
        let (mut theirs, mut proof) = (Nonce::default(), [0; 32]);
        link.read(&mut theirs, until)?;
        link.read(&mut proof, until)?;
        if !key.is_proven(Side::Listener, &ours, &theirs, proof) {
            return Err(unproven());
        }
        link.write(&key.proof(Side::Caller, &ours, &theirs), until)?;
        Ok(link)
    }

    /// Takes a caller's proof. A stranger learns no more than that this side may know a key.
    ///
    /// # Errors
    /// It does not prove it in time.
    pub fn accept(stream: TcpStream, key: impl FnOnce() -> Key) -> io::Result<Link> {
        let until = Instant::now() + SOON;
        stream.set_nonblocking(false)?;
        stream.set_nodelay(true)?;
        let mut link = Link { stream };
        let (mut magic, mut theirs, mut proof) = (MAGIC, Nonce::default(), [0; 32]);
        link.read(&mut magic, until)?;
        if magic != MAGIC {
            return Err(unproven());
        }
        link.read(&mut theirs, until)?;
        let (ours, key) = (nonce()?, key());
        let answer = [ours, key.proof(Side::Listener, &theirs, &ours)].concat();
        link.write(&answer, until)?;
        link.read(&mut proof, until)?;
        match key.is_proven(Side::Caller, &theirs, &ours, proof) {
            true => Ok(link),
            false => Err(unproven()),
        }
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
        self.write(&codec::with_length(&frame), Instant::now() + SOON)
    }

    /// Hears something within this time.
    ///
    /// # Errors
    /// Nothing comes, or nothing that can be understood.
    pub fn hear<T: DeserializeOwned>(&mut self, within: Duration) -> io::Result<T> {
        let mut length = [0; 4];
        self.read(&mut length, Instant::now() + within)?;
        let length = u32::from_le_bytes(length) as usize;
        if length > codec::MAX_FRAME {
            return Err(not_right(codec::CodecError::TooLong { len: length }));
        }
        let mut frame = vec![0; length];
        self.read(&mut frame, Instant::now() + SOON)?;
        codec::decode_frame(&frame).map_err(not_right)
    }

    /// Sends bytes as they are.
    ///
    /// # Errors
    /// They are not taken until then.
    pub fn write(&mut self, mut bytes: &[u8], until: Instant) -> io::Result<()> {
        while !bytes.is_empty() {
            self.stream.set_write_timeout(Some(left(until)?))?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(sent) => bytes = bytes.get(sent..).unwrap_or_default(),
                Err(error) if is_no_end(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Fills all of this.
    ///
    /// # Errors
    /// It does not come until then.
    pub fn read(&mut self, into: &mut [u8], until: Instant) -> io::Result<()> {
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

    #[test]
    fn both_sides_prove_the_key() {
        let (listener, at) = listen();
        let serve = thread::spawn(move || {
            let accept = || Link::accept(listener.accept().unwrap().0, || key(1));
            let mut link = accept().unwrap();
            assert_eq!(link.hear::<Ask>(SOON).unwrap(), Ask::List);
            link.say(&Answer::Gone).unwrap();
            accept().unwrap_err().kind()
        });
        let mut link = Link::connect(at, &key(1)).unwrap();
        assert_eq!(link.ask(&Ask::List).unwrap(), Answer::Gone);
        let error = Link::connect(at, &key(2)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        // Who proves nothing is cut off.
        assert_eq!(serve.join().unwrap(), ErrorKind::UnexpectedEof);
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let (listener, at) = listen();
        let garbage = [&[255u8; 4][..], &[3, 0, 0, 0, 9, 9, 9], &[1, 0, 0, 0, 1]];
        let serve = thread::spawn(move || {
            for bytes in garbage {
                let mut link = Link::accept(listener.accept().unwrap().0, || key(1)).unwrap();
                let until = Instant::now() + SOON;
                let _asked: Ask = link.hear(SOON).unwrap();
                link.write(bytes, until).unwrap();
            }
        });
        for _ in garbage {
            let mut link = Link::connect(at, &key(1)).unwrap();
            let error = link.ask(&Ask::List).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
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
