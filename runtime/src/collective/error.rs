//! Errors of a group, with the peer that each concerns.

use std::io;
use std::time::Duration;

/// A collective or a formation failed. Inputs are as they were; outputs hold nothing of use.
#[derive(Debug, thiserror::Error)]
pub enum GroupError {
    /// An ordinary outcome in an elastic job: leave this group, and form the next generation's.
    #[error("rank {rank} is lost: {cause}")]
    PeerLost { rank: u32, cause: LossCause },
    #[error(
        "ranks {missing:?} did not join within {waited:?}; look at their logs, or raise the time to form"
    )]
    Incomplete { missing: Vec<u32>, waited: Duration },
    #[error(
        "rank 0 at {master} did not answer within {waited:?} ({last}); is its worker up, and the port open?"
    )]
    MasterUnreachable {
        master: String,
        waited: Duration,
        last: String,
    },
    #[error("rank {by} refused this rank: {refusal}")]
    Refused { by: u32, refusal: Refusal },
    /// The next generation is coming: [`Aborter::abort`](super::Aborter::abort) was called, here or at the
    /// rank in `by`.
    #[error("the group was ended {}; form the next generation's", match by { Some(rank) => format!("by rank {rank}"), None => "in this process".to_owned() })]
    Aborted { by: Option<u32> },
    #[error(
        "this rank cannot share memory with rank {rank} of the same host ({what}); set `Sharing::Off` on all ranks"
    )]
    SharedMemory {
        rank: u32,
        what: String,
        #[source]
        source: Option<io::Error>,
    },
    #[error("{what}: {got} elements, not {expected}")]
    Length {
        what: &'static str,
        got: usize,
        expected: usize,
    },
    #[error("cannot listen at {master}; is the port taken, or the address another host's?")]
    Bind {
        master: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "rank {rank} sent {what}: all ranks must call the same operations in the same order with the same sizes"
    )]
    Protocol { rank: u32, what: &'static str },
    #[error("{bytes} bytes are more than the {limit} that one operation carries; split it")]
    TooLarge { bytes: usize, limit: usize },
    #[error(
        "rank {rank} of {world} is no valid place; ranks are 0 to the world size exclusive, {most} at most"
    )]
    BadPlace { rank: u32, world: u32, most: u32 },
    #[error("a world of {world} needs a master address; set MASTER_ADDR and MASTER_PORT")]
    NoMaster { world: u32 },
    #[error("a mistake in Muster: {what}; please report it")]
    Internal { what: &'static str },
    #[error("the sockets of this group cannot be used")]
    Socket(#[source] io::Error),
}

/// How the loss of a peer was seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossCause {
    /// The connection ended.
    Closed,
    /// The connection broke.
    Broken(io::ErrorKind),
    /// Connected, but silent for as long as an operation may take.
    Silent(Duration),
    /// Another rank said so.
    Reported,
}

impl std::fmt::Display for LossCause {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LossCause::Closed => f.write_str("it closed its connection"),
            LossCause::Broken(kind) => write!(f, "its connection broke ({kind})"),
            LossCause::Silent(for_) => write!(f, "nothing from it for {for_:?}"),
            LossCause::Reported => f.write_str("another rank reports it"),
        }
    }
}

/// Why a rank does not let a connection in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    Version,
    Token,
    World,
    Rank,
}

impl Refusal {
    pub(super) const ALL: [Refusal; 4] = [
        Refusal::Version,
        Refusal::Token,
        Refusal::World,
        Refusal::Rank,
    ];

    /// Never 0, which means accepted.
    pub(super) const fn code(self) -> u32 {
        self as u32 + 1
    }

    pub(super) fn from_code(code: u32) -> Option<Refusal> {
        Self::ALL.into_iter().find(|refusal| refusal.code() == code)
    }
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Refusal::Version => "another version of the data plane; use one release on all nodes",
            Refusal::Token => "another generation's token; this worker is stale and should exit",
            Refusal::World => "another world size; all ranks of a generation must agree on it",
            Refusal::Rank => "its rank is out of range or taken",
        })
    }
}

/// Whether a failed read or write only has to wait.
pub(super) fn would_block(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
