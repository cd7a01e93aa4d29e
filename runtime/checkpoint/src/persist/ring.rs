//! A chunk's writes through io_uring: all at once, while the caller does something else.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::{IoUring, opcode, types};

use crate::sum::CHUNK;

/// Bytes of a request.
const BLOCK: usize = 1 << 20;

/// Requests of a chunk. Four threads, as by default, make a depth of 16.
const REQUESTS: usize = CHUNK as usize / BLOCK;

/// One thread's queue.
pub(super) struct Ring(IoUring);

/// A block of the bytes that were to be written, and what the kernel said: bytes written, or an error's
/// number, negated.
pub(super) type Answer = (usize, i32);

impl Ring {
    /// # Errors
    /// The kernel has none, or does not give one to this process.
    pub(super) fn new() -> io::Result<Ring> {
        IoUring::new(REQUESTS as u32).map(Ring)
    }

    /// Writes at most a chunk to `at`, and runs `meanwhile` while the kernel does. Returns the answer for each block,
    /// by where it begins in `bytes`.
    ///
    /// # Errors
    /// The ring is of no use any more. Which of the blocks were written is not known.
    pub(super) fn write<T>(
        &mut self,
        file: BorrowedFd<'_>,
        bytes: &[u8],
        at: u64,
        meanwhile: impl FnOnce() -> T,
    ) -> io::Result<(Vec<Answer>, T)> {
        let fd = types::Fd(file.as_raw_fd());
        let mut flight = Flight {
            ring: self,
            answers: Vec::with_capacity(REQUESTS),
            left: 0,
        };
        for (block, part) in bytes.chunks(BLOCK).enumerate() {
            let begin = block * BLOCK;
            // A block has 1 MiB.
            let write = opcode::Write::new(fd, part.as_ptr(), part.len() as u32)
                .offset(at + begin as u64)
                .build()
                .user_data(begin as u64);
            // SAFETY: `bytes` and the file are borrowed until this function returns, and `Flight`, even when it is
            // dropped in a panic, waits until the kernel is done with both.
            if unsafe { flight.ring.0.submission().push(&write) }.is_err() {
                return Err(io::Error::other("more requests than the ring was made for"));
            }
            flight.left += 1;
        }
        flight.ring.0.submit()?;
        let done = meanwhile();
        flight.wait()?;
        Ok((std::mem::take(&mut flight.answers), done))
    }
}

/// Requests whose answers have not come.
struct Flight<'r> {
    ring: &'r mut Ring,
    answers: Vec<Answer>,
    left: usize,
}

impl Flight<'_> {
    fn wait(&mut self) -> io::Result<()> {
        while self.left > 0 {
            match self.ring.0.submit_and_wait(self.left) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    self.left = 0;
                    return Err(error);
                }
            }
            for answer in self.ring.0.completion() {
                self.left = self.left.saturating_sub(1);
                let begin = usize::try_from(answer.user_data()).unwrap_or(usize::MAX);
                self.answers.push((begin, answer.result()));
            }
        }
        Ok(())
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        // An error is of no more use here.
        let _over = self.wait();
    }
}

/// The rest of a block that the kernel wrote so much of.
pub(super) fn rest(bytes: &[u8], begin: usize, written: usize) -> (usize, &[u8]) {
    let end = bytes.len().min(begin + BLOCK);
    let from = begin.saturating_add(written).min(end);
    (from, &bytes[from..end])
}
