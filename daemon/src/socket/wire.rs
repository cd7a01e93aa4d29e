//! Single calls of `sendmsg(2)` and `recvmsg(2)` with descriptors, on a non-blocking socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::libc;
use nix::sys::socket::SetSockOpt;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use super::MAX_FDS;

const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// The most descriptors that one message carries (`SCM_MAX_FD` of the kernel). There is room for all of them: the
/// kernel closes those that find none, and the receiver waits for that.
pub(super) const CARRIED: usize = 253;
const CARRIED_SPACE: usize = rustix::cmsg_space!(ScmRights(CARRIED));

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

/// How much of what was sent the peer has not read, as the kernel counts it.
pub(super) fn unread(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: writes one int.
    let asked = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    match asked {
        0 => Ok(usize::try_from(bytes).unwrap_or(0)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Data that lies there to be received.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen {
    /// Of those that come next. None at the end.
    pub(super) bytes: usize,
    /// Whether descriptors come with them, or later: the kernel looks on until it finds some.
    pub(super) descriptors: bool,
}

/// Sees what comes next, at most `buffer.len()` bytes, and takes nothing. A descriptor that the kernel closes meanwhile
/// is never the last of a file, for the socket has it still.
pub(super) fn look(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Seen> {
    let message = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(buffer)],
        &mut RecvAncillaryBuffer::default(),
        RecvFlags::PEEK | RecvFlags::DONTWAIT,
    )?;
    Ok(Seen {
        bytes: message.bytes,
        // They had no room.
        descriptors: message.flags.contains(ReturnFlags::CTRUNC),
    })
}

/// Content of one message.
#[derive(Debug)]
pub(super) struct Got {
    pub(super) bytes: usize,
    pub(super) fds: Vec<OwnedFd>,
    /// There were more descriptors, and this process could open no more of them. The kernel has closed those.
    pub(super) lost: bool,
}

/// Receives at most `buffer.len()` bytes, and all descriptors that come with them.
pub(super) fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<Got> {
    let mut space = [MaybeUninit::uninit(); CARRIED_SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let message = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(buffer)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
    )?;
    let mut fds = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(new) = part {
            fds.extend(new);
        }
    }
    Ok(Got {
        bytes: message.bytes,
        fds,
        lost: message.flags.contains(ReturnFlags::CTRUNC),
    })
}

/// Whether descriptors may be sent to a socket; a listener's connections begin as it is. Linux 6.16 has it, for this
/// very purpose: there was no other way not to get any.
#[derive(Debug, Clone, Copy)]
struct PassRights;

/// `<asm-generic/socket.h>`, which the machines that Muster is built for share.
const SO_PASSRIGHTS: libc::c_int = 83;

nix::setsockopt_impl!(
    PassRights,
    libc::SOL_SOCKET,
    SO_PASSRIGHTS,
    bool,
    nix::sys::socket::sockopt::SetBool
);

/// Refuses descriptors (`EPERM`) that are sent to this socket, or to a connection of this listener, or allows them
/// again. An error: this kernel cannot.
pub(super) fn bar_descriptors(socket: impl AsFd, bar: bool) -> io::Result<()> {
    Ok(PassRights.set(&socket, &!bar)?)
}
