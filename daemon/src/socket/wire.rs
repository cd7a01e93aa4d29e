//! Single calls of `sendmsg(2)` and `recvmsg(2)` with descriptors, on a non-blocking socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use super::{MAX_FDS, SocketError};

const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// What one message carries at most (`SCM_MAX_FD` of the kernel). There is room for all of them: the kernel closes what
/// finds none, and whoever receives waits for that.
const CARRIED: usize = rustix::cmsg_space!(ScmRights(253));

/// Sends what fits of `bytes`, with all of `fds` if anything fits at all.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fds: &[OwnedFd]) -> io::Result<usize> {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    Ok(rustix::net::sendmsg(
        socket,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    )?)
}

/// Receives at most `buffer.len()` bytes; adds what descriptors came with them to `fds`. More than
/// [`MAX_FDS`] are an error, and are for the caller to close. The inner error is the connection's end,
/// the outer one may be `WouldBlock`.
pub(super) fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<Result<usize, SocketError>> {
    let mut space = [MaybeUninit::uninit(); CARRIED];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(buffer)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
    )?;
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(new) = part {
            fds.extend(new);
        }
    }
    // Truncated: this process could open no more.
    if message.flags.contains(ReturnFlags::CTRUNC) || fds.len() > MAX_FDS {
        return Ok(Err(SocketError::TooManyFds));
    }
    Ok(Ok(message.bytes))
}
