//! Errors of a communicator between devices.

use std::time::Duration;

use super::super::GroupError;
use super::super::element::DType;
use crate::cuda::{CudaError, LibraryError};

/// A version of NCCL as it says it, for example 22809 for 2.28.9.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(pub u32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Up to 2.8 the major number counted thousands.
        let major = if self.0 < 10_000 { 1_000 } else { 10_000 };
        let (rest, patch) = (self.0 % major / 100, self.0 % 100);
        write!(f, "{}.{rest}.{patch}", self.0 / major)
    }
}

/// An operation between devices, or the way to it, failed. Inputs are as they were; outputs hold nothing
/// of use.
#[derive(Debug, thiserror::Error)]
pub enum NcclError {
    /// Of the control plane: a rank that is lost is named here.
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// Of the driver, or of a device.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[error(
        "NCCL {found} is too old; {least} is the first that can be aborted from another thread"
    )]
    TooOld { found: Version, least: Version },
    #[error(
        "rank {rank} has NCCL {theirs} and rank 0 has {zeros}; install one version on all nodes"
    )]
    Versions {
        rank: u32,
        theirs: Version,
        zeros: Version,
    },
    #[error(
        "ranks {ranks:?} are on one device ({device}), and NCCL needs one for each rank; choose devices by LOCAL_RANK, or start fewer workers on the node"
    )]
    SharedDevice { ranks: Vec<u32>, device: String },
    #[error("rank {rank} cannot use its device; its own error says why")]
    NotReady { rank: u32 },
    #[error("what rank {rank} said of its device is nonsense; are all workers of one release?")]
    Nonsense { rank: u32 },
    #[error("{call}: {text} (NCCL error {code})")]
    Nccl {
        call: &'static str,
        code: u32,
        text: String,
    },
    /// Of an operation that had begun.
    #[error("{what} failed on the way: {text} (NCCL error {code})")]
    Late {
        what: &'static str,
        code: u32,
        text: String,
    },
    #[error("{what} took longer than {within:?}, and no rank is known to be lost")]
    TimedOut {
        what: &'static str,
        within: Duration,
    },
    #[error("rank {by} gave up an operation of the devices")]
    GivenUp { by: u32 },
    /// Found by [`Communicator::blame`](super::Communicator::blame).
    #[error(
        "rank {rank} called {theirs} operations between devices, and others {most}: it is slower than an operation may take, or does not call the same ones"
    )]
    Behind { rank: u32, theirs: u64, most: u64 },
    #[error("the group was dropped while its communicator was in use")]
    Left,
    #[error(
        "an operation of the devices was given up in this group; form the next generation's group"
    )]
    Spoiled,
    #[error("{call} has not returned for {waited:?}; this process should end")]
    Stuck {
        call: &'static str,
        waited: Duration,
    },
    #[error("{what}: {got} elements, not {expected}")]
    Length {
        what: &'static str,
        got: usize,
        expected: usize,
    },
    #[error("{what} are {got:?}, not {expected:?}")]
    Types {
        what: &'static str,
        got: DType,
        expected: DType,
    },
    #[error("NCCL has no {0:?}; use a wider type")]
    Unsupported(DType),
    #[error(
        "input and output overlap; operations are out of place, so that an input outlives an abort"
    )]
    Overlap,
    #[error("there is no rank {rank} in a world of {world}")]
    NoRank { rank: u32, world: u32 },
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
}

impl NcclError {
    /// Whether the next generation mends it: a rank is lost or leaves, or an operation did not complete.
    /// All others need a person, or another process.
    pub fn passes(&self) -> bool {
        match self {
            NcclError::Group(error) => matches!(
                error,
                GroupError::PeerLost { .. }
                    | GroupError::Aborted { .. }
                    | GroupError::Incomplete { .. }
            ),
            // The rank itself gets another error, and leaves.
            NcclError::NotReady { .. }
            | NcclError::TimedOut { .. }
            | NcclError::Late { .. }
            | NcclError::GivenUp { .. }
            | NcclError::Behind { .. }
            | NcclError::Left
            | NcclError::Spoiled => true,
            _ => false,
        }
    }

    /// As an error of the group, for those who know only these: the ranks leave the generation and form
    /// the next.
    ///
    /// # Errors
    /// Errors that another generation does not mend, unchanged.
    pub fn into_group(self) -> Result<GroupError, NcclError> {
        match self {
            NcclError::Group(error) => Ok(error),
            NcclError::GivenUp { by } => Ok(GroupError::Aborted { by: Some(by) }),
            error if error.passes() => Ok(GroupError::Aborted { by: None }),
            error => Err(error),
        }
    }
}
