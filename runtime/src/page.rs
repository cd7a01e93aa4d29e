//! The mapped control page: the only unsafe memory access of the session.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};
use muster_protocol::control::report::{self, METRICS_WORDS, Metrics};
use muster_protocol::control::{self, LAYOUT, MAGIC, PAGE_LEN, word};

use crate::session::SessionError;

/// One control page, shared with the launcher. All access is atomic, and sequentially consistent
/// but for that to the metrics.
#[derive(Debug)]
pub(crate) struct Page {
    map: MmapRaw,
}

impl Page {
    /// Maps the page behind an inherited descriptor. The descriptor stays open in this process and
    /// is closed on exec, so that children of the worker cannot write its words.
    pub(crate) fn from_fd(fd: RawFd) -> Result<Page, SessionError> {
        if fd < 0 {
            return Err(SessionError::Descriptor {
                fd,
                source: io::Error::from_raw_os_error(libc::EBADF),
            });
        }
        // SAFETY: fcntl with these commands reads no memory of ours; a bad number is an error.
        let own = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 3) };
        if own < 0 {
            let source = io::Error::last_os_error();
            return Err(SessionError::Descriptor { fd, source });
        }
        // SAFETY: as above; the descriptor was just found to be open.
        unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        // SAFETY: `own` was just created by fcntl and nothing else owns it.
        let file = unsafe { File::from_raw_fd(own) };
        Self::from_file(&file).map_err(|error| match error {
            SessionError::Descriptor { source, .. } => SessionError::Descriptor { fd, source },
            other => other,
        })
    }

    pub(crate) fn from_file(file: &File) -> Result<Page, SessionError> {
        let wrong = |source| SessionError::Descriptor {
            fd: file.as_raw_fd(),
            source,
        };
        let len = file.metadata().map_err(wrong)?.len();
        if len != PAGE_LEN as u64 {
            return Err(SessionError::NotAControlPage { len });
        }
        let map = MmapOptions::new()
            .len(PAGE_LEN)
            .map_raw(file)
            .map_err(wrong)?;
        let page = Page { map };
        if page.load(word::MAGIC) != MAGIC {
            return Err(SessionError::NotAControlPage { len });
        }
        let layout = page.load(word::LAYOUT);
        if layout != LAYOUT {
            return Err(SessionError::Layout { layout });
        }
        Ok(page)
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(control::is_word(at));
        // SAFETY: `at` is a word of the page, so it is aligned to 8 bytes and inside PAGE_LEN
        // bytes of a mapping that lives as long as `self`. Both processes only use atomics on it.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(at).cast()) }
    }

    pub(crate) fn load(&self, at: usize) -> u64 {
        u64::from_le(self.word(at).load(Ordering::SeqCst))
    }

    pub(crate) fn store(&self, at: usize, value: u64) {
        self.word(at).store(value.to_le(), Ordering::SeqCst);
    }

    /// Adds to a word that only this process writes.
    pub(crate) fn add(&self, at: usize, value: u64) {
        let word = self.word(at);
        let sum = u64::from_le(word.load(Ordering::Relaxed)).wrapping_add(value);
        word.store(sum.to_le(), Ordering::Release);
    }

    /// Writes the metrics under their seqlock. Only one thread may do so at a time.
    pub(crate) fn report(&self, metrics: &Metrics) {
        let sequence = self.word(report::word::SEQUENCE);
        // Odd already where a writer died in the middle.
        let odd = u64::from_le(sequence.load(Ordering::Relaxed)) | 1;
        sequence.store(odd.to_le(), Ordering::Relaxed);
        fence(Ordering::Release);
        let words: [u64; METRICS_WORDS] = metrics.encode();
        for (at, value) in report::word::values().zip(words) {
            self.word(at).store(value.to_le(), Ordering::Relaxed);
        }
        sequence.store(odd.wrapping_add(1).to_le(), Ordering::Release);
    }

    /// Stores `value` if the word is zero; otherwise the word as it stands.
    pub(crate) fn claim(&self, at: usize, value: u64) -> Result<(), u64> {
        self.word(at)
            .compare_exchange(0, value.to_le(), Ordering::SeqCst, Ordering::SeqCst)
            .map(|_| ())
            .map_err(u64::from_le)
    }

    /// Sleeps while the word has this value, until [`wake`](Self::wake) in any process, or for this
    /// long. May return early. Only the word's low half is compared: see there for what that costs.
    pub(crate) fn wait_while(&self, at: usize, value: u64, longest: Duration) {
        let limit = libc::timespec {
            tv_sec: longest.as_secs().min(3600) as libc::time_t,
            tv_nsec: libc::c_long::from(longest.subsec_nanos().cast_signed()),
        };
        // SAFETY: the low half of a word is an aligned u32 inside the mapping (words are little-
        // endian, and so are the targets), which FUTEX_WAIT only reads; `limit` outlives the call.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.word(at).as_ptr(),
                libc::FUTEX_WAIT,
                value as u32,
                &raw const limit,
            );
        }
    }

    /// Wakes all that wait for a change of this word, in every process that maps the page.
    pub(crate) fn wake(&self, at: usize) {
        // SAFETY: FUTEX_WAKE reads no memory; the address is inside the mapping.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.word(at).as_ptr(),
                libc::FUTEX_WAKE,
                i32::MAX,
            );
        }
    }
}
