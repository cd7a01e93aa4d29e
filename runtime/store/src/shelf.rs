//! Checkpoints are loaded, verified and found straight from a store.

use std::io;
use std::ops::ControlFlow;

use muster_checkpoint::hex::Id;
use muster_checkpoint::manifest::MAX_MANIFEST;
use muster_checkpoint::newest::Shelf;
use muster_checkpoint::source::{Readers, Source};

use crate::error::Kind;
use crate::store::Store;

const MANIFESTS: &str = "manifest";
const SUFFIX: &str = ".json";

/// A job's folder ([`Store::within`]): names in a manifest are from there on.
impl Source for Store {
    fn size(&self, path: &str) -> io::Result<u64> {
        Ok(self.head(path)?.size)
    }

    fn read(&self, path: &str, at: u64, into: &mut [u8], readers: Readers) -> io::Result<()> {
        Ok(self.read_range(path, at, into, readers)?)
    }
}

impl Shelf for Store {
    fn list(&self) -> io::Result<Vec<Id>> {
        let mut found = Vec::new();
        Store::list(self, MANIFESTS, &mut |entry| {
            let id = (entry.name.strip_prefix(MANIFESTS))
                .and_then(|name| name.strip_prefix('/'))
                .and_then(|name| name.strip_suffix(SUFFIX))
                .and_then(Id::parse);
            found.extend(id);
            ControlFlow::Continue(())
        })?;
        Ok(found)
    }

    fn manifest(&self, digest: Id) -> io::Result<Vec<u8>> {
        let name = format!("{MANIFESTS}/{digest}{SUFFIX}");
        match self.get(&name, MAX_MANIFEST as u64) {
            // Too large is damaged: no bytes have no manifest's digest either, so it is passed over.
            Err(error) if error.kind == Kind::TooLarge => Ok(Vec::new()),
            Err(error) => Err(error.into()),
            Ok(bytes) => Ok(bytes),
        }
    }
}
