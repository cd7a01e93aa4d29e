//! A connection to one rank that has what is lacked.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};

use super::landing::Part;
use super::{Digest, MAGIC, REQUEST_LEN, SILENCE, TOKEN_LEN, Thing, Want};

/// The most bytes of a thing that is handed over: a bound on what a length from the network may ask for.
const MAX_LEN: u64 = 1 << 40;

/// A connection to one source.
pub(super) struct Source {
    pub(super) at: SocketAddr,
    pub(super) stream: TcpStream,
    token: [u8; TOKEN_LEN],
}

/// What a source that answered well does not have, or not any more, or does not send as it said.
pub(super) fn not_right() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

impl Source {
    pub(super) fn connect(at: SocketAddr, token: [u8; TOKEN_LEN]) -> io::Result<Source> {
        let stream = TcpStream::connect_timeout(&at, SILENCE)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(SILENCE))?;
        stream.set_write_timeout(Some(SILENCE))?;
        Ok(Source { at, stream, token })
    }

    /// Another connection with the same source.
    pub(super) fn again(&self) -> io::Result<Source> {
        Source::connect(self.at, self.token)
    }

    /// Asks; what was asked for is answered in order.
    pub(super) fn ask(
        &mut self,
        thing: Thing,
        want: Want,
        (from, len): (u64, u64),
    ) -> io::Result<()> {
        let (kind, number) = thing.words();
        let mut request = Vec::with_capacity(REQUEST_LEN);
        request.extend_from_slice(&MAGIC);
        request.extend_from_slice(&self.token);
        for word in [kind, number, want as u64, from, len] {
            request.extend_from_slice(&word.to_le_bytes());
        }
        self.stream.write_all(&request)
    }

    /// The whole's length, or `None` when it is not there (yet); what was asked for follows.
    pub(super) fn length(&mut self) -> io::Result<Option<u64>> {
        let mut length = [0; 8];
        self.stream.read_exact(&mut length)?;
        match u64::from_le_bytes(length).checked_sub(1) {
            Some(total) if total > MAX_LEN => Err(not_right()),
            total => Ok(total),
        }
    }

    pub(super) fn read_digest(&mut self) -> io::Result<Digest> {
        let mut digest = Digest::default();
        self.stream.read_exact(&mut digest)?;
        Ok(digest)
    }

    /// The part that was asked for, unchecked; the digest of what came.
    pub(super) fn get(&mut self, total: u64, part: &mut Part<'_>) -> io::Result<Digest> {
        if self.length()? != Some(total) {
            return Err(not_right());
        }
        part.receive(&mut self.stream)
    }

    /// The digest, that was asked for, of this source's own part.
    pub(super) fn digest(&mut self, total: u64) -> io::Result<Digest> {
        if self.length()? != Some(total) {
            return Err(not_right());
        }
        self.read_digest()
    }
}
