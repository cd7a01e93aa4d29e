//! A large object for a directory.

use std::io::{Read, Write as _};
use std::ops::ControlFlow;
use std::os::fd::AsFd;

use crc_fast::{CrcAlgorithm, Digest};
use rustix::fs::{self as unix, FallocateFlags};
use rustix::io::Errno;

use super::{Folder, Temporary, open_file};
use crate::error::{Flavour, Kind, StoreError};
use crate::store::{Progress, Uploaded, Verified};

/// Bytes read and written at a time.
const PIECE: usize = 1 << 20;

impl Folder {
    /// Stores all of `source`, which has `total` bytes. The object has its name only when it is
    /// durable. One of this name that holds the same is taken for it; another is left.
    pub(crate) fn upload(
        &self,
        name: &str,
        source: &mut dyn Read,
        total: u64,
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Uploaded, StoreError> {
        let failed = |error| self.error("store", name, error);
        let refused = |kind, said: String| {
            StoreError::new(Flavour::Directory, kind, "store", self.shown(name)).said(said)
        };
        let (dir, last) = self.make_parents(name).map_err(failed)?;
        let mut file = Temporary::new(dir.as_fd()).map_err(failed)?;
        self.tidy(dir.as_fd(), &file);
        // A full disk is found before anything is written.
        if total > 0 {
            match unix::fallocate(&*file, FallocateFlags::empty(), 0, total) {
                Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {}
                Err(errno) => return Err(failed(errno.into())),
            }
        }
        let mut crc = Digest::new(CrcAlgorithm::Crc64Nvme);
        let mut buffer = vec![0; PIECE];
        let mut done = 0;
        loop {
            let count = match source.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => count.min(buffer.len()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(refused(Kind::Source, error.to_string())),
            };
            done += count as u64;
            if done > total {
                break;
            }
            let piece = buffer.get(..count).unwrap_or_default();
            crc.update(piece);
            file.write_all(piece).map_err(failed)?;
            if progress(Progress { done, total }).is_break() {
                return Err(refused(Kind::Cancelled, String::new()));
            }
        }
        if done != total {
            let how = if done < total { "only" } else { "at least" };
            let said = format!("{how} {done} bytes, {total} were announced");
            return Err(refused(Kind::Source, said));
        }
        file.sync_all().map_err(failed)?;
        let crc64 = crc.finalize();
        let uploaded = Uploaded {
            bytes: total,
            crc64,
            verified: Verified::Durable,
        };
        match self.publish(&dir, file, last) {
            Ok(true) => Ok(uploaded),
            Ok(false) => match same(&dir, last, total, crc64).map_err(failed)? {
                // A try of ours whose answer was lost.
                true => self.settle(&dir, name).map_err(failed).map(|()| uploaded),
                false => Err(refused(Kind::Exists, String::new())),
            },
            Err((unknown, error)) => Err(StoreError {
                unknown,
                ..failed(error)
            }),
        }
    }
}

fn same(dir: &impl AsFd, name: &str, total: u64, crc64: u64) -> std::io::Result<bool> {
    let mut file = open_file(dir.as_fd(), name)?;
    if file.metadata()?.len() != total {
        return Ok(false);
    }
    let mut crc = Digest::new(CrcAlgorithm::Crc64Nvme);
    let mut buffer = vec![0; PIECE];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(crc.finalize() == crc64),
            count => crc.update(buffer.get(..count).unwrap_or_default()),
        }
    }
}
