//! A large object for a cloud: in parts, some at once, each tried again by itself.

use std::io::Read;
use std::ops::ControlFlow;
use std::sync::mpsc;

use bytes::Bytes;
use crc_fast::{CrcAlgorithm, Digest};
use object_store::multipart::PartId;
use object_store::path::Path;
use tokio::task::JoinHandle;

use super::tries::{ANSWER, Task, Tries};
use super::{Cloud, payload};
use crate::error::{Kind, StoreError};
use crate::store::{Checksum, Progress, Uploaded, Verified};

/// The most parts that S3 takes.
const MAX_PARTS: u64 = 10_000;

/// Checksums of all bytes, whichever the store has.
struct Sums {
    crc64: Digest,
    crc32c: Digest,
}

impl Sums {
    fn update(&mut self, bytes: &[u8]) {
        self.crc64.update(bytes);
        self.crc32c.update(bytes);
    }
}

/// Length and checksums of an object that was sent.
#[derive(Clone, Copy)]
struct Sent {
    total: u64,
    crc64: u64,
    crc32c: u64,
}

/// Parts under way. Those that are left when it is dropped are given up.
struct Flying {
    parts: Vec<JoinHandle<()>>,
}

impl Drop for Flying {
    fn drop(&mut self) {
        for part in &self.parts {
            part.abort();
        }
    }
}

type Done = (usize, u64, Result<PartId, StoreError>);

impl Cloud {
    pub(crate) fn upload(
        &self,
        name: &str,
        source: &mut dyn Read,
        total: u64,
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
    ) -> Result<Uploaded, StoreError> {
        let mut sums = Sums {
            crc64: Digest::new(CrcAlgorithm::Crc64Nvme),
            crc32c: Digest::new(CrcAlgorithm::Crc32Iscsi),
        };
        let part = self.inner.part.max(total.div_ceil(MAX_PARTS));
        if total <= part {
            let bytes = self.next(name, source, total, &mut sums)?;
            self.at_end(name, source, total)?;
            let (cloud, owned) = (self.clone(), name.to_owned());
            self.wait(async move { cloud.put_now(&owned, "store", bytes).await })?;
            if progress(Progress { done: total, total }).is_break() {
                // It is stored, and nobody wants it.
                let _ = self.delete(name);
                return Err(self.error(Kind::Cancelled, "store", name));
            }
        } else {
            self.in_parts(name, source, (total, part), progress, &mut sums)?;
        }
        let sent = Sent {
            total,
            crc64: sums.crc64.finalize(),
            crc32c: sums.crc32c.finalize(),
        };
        let (cloud, owned) = (self.clone(), name.to_owned());
        self.wait(async move { cloud.verify(&owned, sent).await })
    }

    fn in_parts(
        &self,
        name: &str,
        source: &mut dyn Read,
        (total, part): (u64, u64),
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
        sums: &mut Sums,
    ) -> Result<(), StoreError> {
        let path = self.path(name);
        let id = {
            let (cloud, owned, path) = (self.clone(), name.to_owned(), path.clone());
            self.wait(async move { cloud.begin(&owned, &path).await })?
        };
        let parts = self.send_parts(name, source, (total, part), progress, sums, &id);
        let parts = match parts.and_then(|parts| self.at_end(name, source, total).map(|()| parts)) {
            Ok(parts) => parts,
            Err(error) => {
                self.give_up(name, &id);
                return Err(error);
            }
        };
        let (cloud, owned, upload) = (self.clone(), name.to_owned(), id.clone());
        let completed =
            self.wait(async move { cloud.complete(&owned, &path, &upload, parts, total).await });
        if let Err(error) = &completed
            && !error.unknown
        {
            self.give_up(name, &id);
        }
        completed
    }

    async fn begin(&self, name: &str, path: &Path) -> Result<String, StoreError> {
        // One that began without our hearing of it has no parts, and costs nothing.
        let task = Task {
            changes: false,
            ..self.task(name, 0)
        };
        let begun = self.tries(task, || self.inner.client.create_multipart(path));
        begun.await.map(|(id, _)| id)
    }

    fn send_parts(
        &self,
        name: &str,
        source: &mut dyn Read,
        (total, part): (u64, u64),
        progress: &mut dyn FnMut(Progress) -> ControlFlow<()>,
        sums: &mut Sums,
        id: &str,
    ) -> Result<Vec<PartId>, StoreError> {
        let count = usize::try_from(total.div_ceil(part)).unwrap_or(usize::MAX);
        let mut ids: Vec<Option<PartId>> = vec![None; count];
        let (report, reports) = mpsc::channel::<Done>();
        let mut flying = Flying { parts: Vec::new() };
        let (mut next, mut at_once, mut read, mut done) = (0, 0, 0, 0);
        while next < count || at_once > 0 {
            if next < count && at_once < self.inner.parts_at_once {
                let bytes = self.next(name, source, part.min(total - read), sums)?;
                read += bytes.len() as u64;
                flying.parts.retain(|part| !part.is_finished());
                flying
                    .parts
                    .push(self.send(name, id, next, bytes, report.clone()));
                next += 1;
                at_once += 1;
                continue;
            }
            let lost = || self.error(Kind::Other, "store", name);
            let (index, bytes, outcome) = reports.recv().map_err(|_| lost())?;
            at_once -= 1;
            let sent = outcome?;
            *ids.get_mut(index).ok_or_else(lost)? = Some(sent);
            done += bytes;
            if progress(Progress { done, total }).is_break() {
                return Err(self.error(Kind::Cancelled, "store", name));
            }
        }
        let all: Option<Vec<PartId>> = ids.into_iter().collect();
        all.ok_or_else(|| self.error(Kind::Other, "store", name))
    }

    fn send(
        &self,
        name: &str,
        id: &str,
        index: usize,
        bytes: Bytes,
        report: mpsc::Sender<Done>,
    ) -> JoinHandle<()> {
        let (cloud, name, id) = (self.clone(), name.to_owned(), id.to_owned());
        self.inner.runtime.spawn(async move {
            let path = cloud.path(&name);
            let length = bytes.len() as u64;
            let task = Task {
                changes: false,
                ..cloud.task(&name, length)
            };
            let put = || {
                cloud
                    .inner
                    .client
                    .put_part(&path, &id, index, payload(&bytes))
            };
            let sent = cloud.tries(task, put).await.map(|(part, _)| part);
            // Nobody listens any more once the upload has failed.
            let _ = report.send((index, length, sent));
        })
    }

    /// Makes the parts an object. An answer that is lost, or says that there is no such upload after
    /// one that was lost, is settled by looking at the object.
    async fn complete(
        &self,
        name: &str,
        path: &Path,
        id: &str,
        parts: Vec<PartId>,
        total: u64,
    ) -> Result<(), StoreError> {
        let task = self.task(name, 0);
        // The store may have to read all parts before it answers.
        let mut tries = Tries::new(self.patience, total / 16);
        let mut open = false;
        loop {
            let id = id.to_owned();
            let complete = self
                .inner
                .client
                .complete_multipart(path, &id, parts.clone());
            let failure = match self.once(&mut tries, task.limit, complete).await {
                Ok(_) => return Ok(()),
                Err(failure) => failure,
            };
            open |= failure.open;
            if open {
                let asked = self.with_patience(tries.question()).head_now(name).await;
                if asked.is_ok_and(|head| head.size == total) {
                    // Whether it is this object, its checksum tells, where there is one.
                    return Ok(());
                }
            }
            if !failure.kind.passes() || !tries.again(failure.pause).await {
                return Err(self.failed(task, &tries, failure, open));
            }
        }
    }

    /// Removes the parts that a failed upload left, as far as the store lets it.
    fn give_up(&self, name: &str, id: &str) {
        let (cloud, owned, id) = (self.clone(), name.to_owned(), id.to_owned());
        let _ = self.wait(async move {
            let path = cloud.path(&owned);
            let task = cloud.task(&owned, 0);
            let abort = || cloud.inner.client.abort_multipart(&path, &id);
            cloud.tries(task, abort).await
        });
    }

    /// That the object which is there is the one that was sent.
    async fn verify(&self, name: &str, sent: Sent) -> Result<Uploaded, StoreError> {
        let head = self.head_now(name).await.map_err(|error| StoreError {
            unknown: true,
            ..error
        })?;
        let fine = match head.checksum {
            _ if head.size != sent.total => None,
            Some(Checksum::Crc64Nvme(there)) => (there == sent.crc64).then_some(Verified::Checksum),
            Some(Checksum::Crc32c(there)) => {
                (u64::from(there) == sent.crc32c).then_some(Verified::Checksum)
            }
            None => Some(Verified::Size),
        };
        match fine {
            Some(verified) => Ok(Uploaded {
                bytes: sent.total,
                crc64: sent.crc64,
                verified,
            }),
            None => {
                let error = self.error(Kind::Damaged, "store", name);
                Err(error.said(format!(
                    "{} bytes with the CRC-64/NVME {:016x} were sent, the store has {} bytes and {:?}",
                    sent.total, sent.crc64, head.size, head.checksum
                )))
            }
        }
    }

    fn task<'n>(&self, name: &'n str, bytes: u64) -> Task<'n> {
        Task {
            doing: "store",
            name,
            bytes,
            limit: ANSWER,
            changes: true,
        }
    }

    /// The next bytes of the source, exactly so many.
    fn next(
        &self,
        name: &str,
        source: &mut dyn Read,
        bytes: u64,
        sums: &mut Sums,
    ) -> Result<Bytes, StoreError> {
        let refused = |said: String| Err(self.error(Kind::Source, "store", name).said(said));
        let mut part = Vec::with_capacity(usize::try_from(bytes).unwrap_or(0));
        match Read::take(&mut *source, bytes).read_to_end(&mut part) {
            Err(error) => refused(error.to_string()),
            Ok(_) if part.len() as u64 != bytes => {
                refused("it ended before the announced bytes did".to_owned())
            }
            Ok(_) => {
                sums.update(&part);
                Ok(part.into())
            }
        }
    }

    fn at_end(&self, name: &str, source: &mut dyn Read, total: u64) -> Result<(), StoreError> {
        let refused = |said: String| Err(self.error(Kind::Source, "store", name).said(said));
        let mut more = [0; 1];
        loop {
            match source.read(&mut more) {
                Ok(0) => return Ok(()),
                Ok(_) => return refused(format!("more than the {total} announced bytes")),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return refused(error.to_string()),
            }
        }
    }
}
