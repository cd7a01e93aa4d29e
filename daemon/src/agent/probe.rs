//! Dialling a peer's agent and its launcher's guard, to tell "away" from "lost".

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use muster_protocol::LauncherId;
use muster_protocol::membership::Answer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

/// The guard's answer to each caller: these bytes, a version, and the launcher's id.
pub const GUARD_MAGIC: &[u8; 4] = b"MGRD";
pub const GUARD_VERSION: u8 = 1;

/// How both sides of a connection between agents begin: the protocol negotiation of libp2p, which an agent answers
/// to anybody. <https://github.com/multiformats/multistream-select>
const NEGOTIATION: &[u8] = b"\x13/multistream/1.0.0\n";

/// Whether an agent runs there: for one that is stopped the kernel accepts connections all the same. That it is mute
/// shows within a quarter of `limit` where the way there is short; a lease may not end before.
pub(crate) async fn agent(addr: Option<SocketAddr>, limit: Duration) -> Answer {
    let Some(addr) = addr else {
        return Answer::Silent;
    };
    let began = Instant::now();
    let until = began + limit;
    let mut stream = match timeout_at(until, TcpStream::connect(addr)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return failed(&error),
        Err(_) => return Answer::Silent,
    };
    let connected = Instant::now();
    let answer_by = connected + (limit / 4).max((connected - began) * 4);
    let answer = async {
        stream.write_all(NEGOTIATION).await?;
        stream.read(&mut [0]).await
    };
    match timeout_at(until.min(answer_by), answer).await {
        // Whether it answers or hangs up: a process does that.
        Ok(_) => Answer::Answered,
        Err(_) => Answer::Mute,
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

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(2);

    #[tokio::test]
    async fn a_process_that_does_not_run_is_mute_and_one_that_has_ended_refuses() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let at = listener.local_addr().unwrap();
        let began = Instant::now();
        assert_eq!(agent(Some(at), LIMIT).await, Answer::Mute);
        assert!(began.elapsed() < LIMIT);
        drop(listener);
        assert_eq!(agent(Some(at), LIMIT).await, Answer::Refused);
    }

    #[tokio::test]
    async fn one_that_hangs_up_runs() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = listener.local_addr().unwrap();
        let (found, accepted) = tokio::join!(agent(Some(at), LIMIT), async {
            listener.accept().await.map(drop)
        });
        accepted.unwrap();
        assert_eq!(found, Answer::Answered);
    }
}
