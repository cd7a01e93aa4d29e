//! Dialling a peer's agent and its launcher's guard, to tell "away" from "lost".

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use muster_protocol::LauncherId;
use muster_protocol::membership::Answer;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

/// What a guard says to whoever connects: these bytes, a version, and the launcher's id.
pub const GUARD_MAGIC: &[u8; 4] = b"MGRD";
pub const GUARD_VERSION: u8 = 1;

/// Whether anybody accepts connections there: also of an agent that is stopped.
pub(super) async fn agent(addr: Option<SocketAddr>, limit: Duration) -> Answer {
    let Some(addr) = addr else {
        return Answer::Silent;
    };
    match timeout(limit, TcpStream::connect(addr)).await {
        Ok(Ok(_)) => Answer::Answered,
        Ok(Err(error)) => failed(&error),
        Err(_) => Answer::Silent,
    }
}

/// Whether this launcher's guard answers there. A missing guard (a witness has none) counts as
/// refused.
pub(super) async fn guard(at: Option<(SocketAddr, LauncherId)>, limit: Duration) -> Answer {
    let Some((addr, launcher)) = at else {
        return Answer::Refused;
    };
    let until = Instant::now() + limit;
    let stream = match timeout_at(until, TcpStream::connect(addr)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return failed(&error),
        Err(_) => return Answer::Silent,
    };
    match timeout_at(until, greeting(stream)).await {
        Ok(Ok(found)) if found == Some(launcher) => Answer::Answered,
        Ok(Ok(_)) => Answer::Other,
        Ok(Err(error)) => failed(&error),
        // The kernel accepted for a process that does not run.
        Err(_) => Answer::Mute,
    }
}

async fn greeting(mut stream: TcpStream) -> std::io::Result<Option<LauncherId>> {
    let mut bytes = [0u8; 13];
    match stream.read_exact(&mut bytes).await {
        Ok(_) => {}
        // Somebody is there who is no guard.
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => return Ok(None),
        Err(e) => return Err(e),
    }
    let (magic, rest) = bytes.split_at(4);
    let (version, id) = rest.split_at(1);
    let mut launcher = LauncherId::ZERO;
    launcher.0.copy_from_slice(id);
    let known = magic == GUARD_MAGIC && version == [GUARD_VERSION];
    Ok(known.then_some(launcher))
}

fn failed(error: &std::io::Error) -> Answer {
    match error.kind() {
        // The kernel of a living host says so at once.
        ErrorKind::ConnectionRefused | ErrorKind::ConnectionReset => Answer::Refused,
        _ => Answer::Silent,
    }
}
