//! First messages between two agents: who they are, that both know the cluster's secret,
//! and whether this connection is the one they keep.
//!
//! ```text
//! dialler                          listener
//!   Hello ---------------------------->      both at once
//!         <---------------------------- Hello
//!   Proof ---------------------------->      checked before the listener proves anything
//!         <---------------------------- Proof
//!   Accept or Refuse, from whichever end has the lower node id
//! ```
//!
//! A proof is HMAC-SHA256 (RFC 2104) under the secret over the prover's role and a digest of both
//! identities and both whole hellos, each with a fresh nonce. The identities are the ones that
//! Noise has verified, so a proof is of no use on any other connection, and the role keeps one
//! from being sent back to its author. Someone who only listens sees nothing; someone who is
//! dialled can try guesses against the dialler's proof at leisure, so a secret needs real entropy.
//!
//! One end alone decides which of several connections is kept: were both to decide, two that are
//! dialled at the same time could each be given up for the other.

use std::net::IpAddr;

use futures::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use hmac::{Hmac, Mac};
use muster_protocol::{NodeId, codec};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::Refusal;
use crate::clock;

/// Bytes of a handshake frame at most; a hello takes about 200.
const MAX_HELLO: usize = 1024;
/// Bytes of a cluster's name at most.
pub(super) const MAX_CLUSTER: usize = 64;
/// How many lost connections a hello names.
pub(super) const MAX_LOST: usize = 4;

const MAGIC: &[u8; 6] = b"muster";
const KIND_HELLO: u8 = 1;
const KIND_PROOF: u8 = 2;
const KIND_ACCEPT: u8 = 3;
const KIND_REFUSE: u8 = 4;

/// Names one connection on both of its ends, across restarts.
pub(super) type Tag = u64;

/// The part of a hello that only the same wire version can read.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) cluster: String,
    /// Whether the sender has a cluster secret at all.
    pub(super) secured: bool,
    pub(super) nonce: [u8; 32],
    /// Drawn at each start: a new one means that older connections are dead.
    pub(super) instance: u64,
    /// Connections between the two that the sender no longer has, newest last.
    pub(super) lost: Vec<Tag>,
    /// The port the sender accepts connections on; 0 for none.
    pub(super) port: u16,
    /// The receiver's address as the sender sees it.
    pub(super) observed: IpAddr,
    /// The sender's wall clock: milliseconds since 1970.
    pub(super) clock_ms: u64,
}

/// One end's input to a handshake.
pub(super) struct Local<'a> {
    pub(super) node: NodeId,
    pub(super) version: u8,
    pub(super) secret: &'a [u8],
    pub(super) hello: Hello,
    pub(super) dialler: bool,
}

/// Facts that the ends have proven to each other.
#[derive(Debug)]
pub(super) struct Proven {
    pub(super) hello: Hello,
    pub(super) tag: Tag,
    /// By how many milliseconds the other end's wall clock is ahead of this one's, up to what the way takes.
    pub(super) clock_ahead_ms: i64,
}

/// Why the other end's connection was not kept. The codes are part of the wire format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Code {
    WrongSecret = 1,
    Duplicate = 2,
    Full = 3,
}

/// How a handshake failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// The other end is not welcome, or says that we are not.
    Refused(Refusal),
    /// The two have another connection, which is kept.
    Duplicate,
    /// The connection broke.
    Broken,
}

impl From<std::io::Error> for Failure {
    fn from(_: std::io::Error) -> Failure {
        Failure::Broken
    }
}

impl From<Refusal> for Failure {
    fn from(why: Refusal) -> Failure {
        Failure::Refused(why)
    }
}

/// Exchanges hellos and proofs. Sends the other end the reason before it fails, as far as the
/// other end cannot see it by itself.
pub(super) async fn prove<S>(
    stream: &mut S,
    local: &Local<'_>,
    remote: NodeId,
) -> Result<Proven, Failure>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let ours = encode_hello(local)?;
    send(stream, &ours).await?;
    let theirs = receive(stream).await?;
    let now = clock::unix_ms();
    let hello = decode_hello(&theirs, local.version)?;
    if hello.cluster != local.hello.cluster {
        return Err(Refusal::OtherCluster {
            theirs: hello.cluster,
        }
        .into());
    }
    match (local.hello.secured, hello.secured) {
        (true, false) => return Err(Refusal::NoSecret.into()),
        (false, true) => return Err(Refusal::SecretWanted.into()),
        _ => {}
    }
    let transcript = match local.dialler {
        true => transcript(local.node, remote, &ours, &theirs),
        false => transcript(remote, local.node, &theirs, &ours),
    };
    if local.dialler {
        send_proof(stream, local, &transcript).await?;
        check_proof(stream, local, &transcript).await?;
    } else {
        check_proof(stream, local, &transcript).await?;
        send_proof(stream, local, &transcript).await?;
    }
    let tag = transcript
        .iter()
        .take(8)
        .fold(0, |n, b| n << 8 | Tag::from(*b));
    let clock_ahead_ms = hello
        .clock_ms
        .cast_signed()
        .saturating_sub(now.cast_signed());
    Ok(Proven {
        hello,
        tag,
        clock_ahead_ms,
    })
}

/// The deciding end keeps the connection.
pub(super) async fn accept<S: AsyncWrite + Unpin>(stream: &mut S) -> Result<(), Failure> {
    Ok(send(stream, &[KIND_ACCEPT]).await?)
}

/// Tells the other end why it is cut off.
pub(super) async fn refuse<S: AsyncWrite + Unpin>(
    stream: &mut S,
    code: Code,
) -> Result<(), Failure> {
    Ok(send(stream, &[KIND_REFUSE, code as u8]).await?)
}

/// The other end decides: waits for its word.
pub(super) async fn await_verdict<S: AsyncRead + Unpin>(stream: &mut S) -> Result<(), Failure> {
    match receive(stream).await?.as_slice() {
        [KIND_ACCEPT] => Ok(()),
        other => Err(refused_by(other)),
    }
}

/// Which end decides between several connections of the same two.
pub(super) fn decides(us: NodeId, them: NodeId) -> bool {
    us < them
}

fn refused_by(frame: &[u8]) -> Failure {
    match frame {
        [KIND_REFUSE, code] if *code == Code::WrongSecret as u8 => Refusal::WrongSecret.into(),
        [KIND_REFUSE, code] if *code == Code::Duplicate as u8 => Failure::Duplicate,
        [KIND_REFUSE, code] if *code == Code::Full as u8 => Refusal::Full.into(),
        _ => Refusal::Malformed.into(),
    }
}

fn encode_hello(local: &Local<'_>) -> Result<Vec<u8>, Refusal> {
    let mut frame = vec![KIND_HELLO];
    frame.extend_from_slice(MAGIC);
    frame.push(local.version);
    frame.extend(codec::encode_body(&local.hello).map_err(|_| Refusal::Malformed)?);
    Ok(frame)
}

fn decode_hello(frame: &[u8], version: u8) -> Result<Hello, Refusal> {
    let Some((&[KIND_HELLO, ref magic @ .., theirs], body)) = frame.split_first_chunk::<8>() else {
        return Err(Refusal::NotMuster);
    };
    if magic != MAGIC {
        return Err(Refusal::NotMuster);
    }
    if theirs != version {
        return Err(Refusal::OtherVersion { theirs });
    }
    let hello: Hello = codec::decode_body(body).map_err(|_| Refusal::Malformed)?;
    if hello.cluster.len() > MAX_CLUSTER || hello.lost.len() > MAX_LOST {
        return Err(Refusal::Malformed);
    }
    Ok(hello)
}

fn transcript(dialler: NodeId, listener: NodeId, first: &[u8], second: &[u8]) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(b"muster control handshake 1");
    hash.update(dialler.0);
    hash.update(listener.0);
    for hello in [first, second] {
        hash.update((hello.len() as u64).to_le_bytes());
        hash.update(hello);
    }
    hash.finalize().into()
}

fn mac(secret: &[u8], dialler: bool, transcript: &[u8]) -> Result<Hmac<Sha256>, Refusal> {
    // HMAC takes keys of any length.
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).map_err(|_| Refusal::Malformed)?;
    mac.update(match dialler {
        true => b"muster dialler 1".as_slice(),
        false => b"muster listener 1",
    });
    mac.update(transcript);
    Ok(mac)
}

async fn send_proof<S: AsyncWrite + Unpin>(
    stream: &mut S,
    local: &Local<'_>,
    transcript: &[u8],
) -> Result<(), Failure> {
    let mut frame = vec![KIND_PROOF];
    frame.extend(
        mac(local.secret, local.dialler, transcript)?
            .finalize()
            .into_bytes(),
    );
    Ok(send(stream, &frame).await?)
}

async fn check_proof<S: AsyncRead + AsyncWrite + Unpin>(
    stream: &mut S,
    local: &Local<'_>,
    transcript: &[u8],
) -> Result<(), Failure> {
    let frame = receive(stream).await?;
    let Some((&KIND_PROOF, proof)) = frame.split_first() else {
        return Err(refused_by(&frame));
    };
    // `verify_slice` compares in constant time.
    if mac(local.secret, !local.dialler, transcript)?
        .verify_slice(proof)
        .is_err()
    {
        refuse(stream, Code::WrongSecret).await?;
        return Err(Refusal::WrongSecret.into());
    }
    Ok(())
}

async fn send<S: AsyncWrite + Unpin>(stream: &mut S, body: &[u8]) -> std::io::Result<()> {
    let mut frame = Vec::with_capacity(body.len() + 2);
    // Every body here is far below 64 KiB.
    frame.extend_from_slice(&(body.len() as u16).to_le_bytes());
    frame.extend_from_slice(body);
    stream.write_all(&frame).await?;
    stream.flush().await
}

async fn receive<S: AsyncRead + Unpin>(stream: &mut S) -> Result<Vec<u8>, Failure> {
    let mut len = [0; 2];
    stream.read_exact(&mut len).await?;
    let len = usize::from(u16::from_le_bytes(len));
    if len > MAX_HELLO {
        return Err(Refusal::Malformed.into());
    }
    let mut body = vec![0; len];
    stream.read_exact(&mut body).await?;
    Ok(body)
}
