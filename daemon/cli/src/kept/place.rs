//! A job's folder in its store.

use std::io;

use muster_store::{Location, Options, Store, StoreError, UUID_NAME};

use crate::stores;

/// Where a job's checkpoints are, as far as keeping them needs it.
#[derive(Clone, Debug)]
pub struct Folder {
    store: Store,
    /// The store itself, where nobody has probed it: that nothing is found says something only while it is
    /// there.
    root: Option<Store>,
}

impl Folder {
    /// The folder of a job, in a store that was probed: it believes only then that something is not there.
    pub fn probed(store: Store) -> Folder {
        Folder { store, root: None }
    }

    /// The folder of a job in the store at a location, to read.
    ///
    /// # Errors
    /// The directory is not there, or the environment lacks something.
    pub fn at(location: &Location, job: &str) -> Result<Folder, StoreError> {
        let root = Store::open(location, &Options::of_process())?;
        Ok(Folder {
            store: root.within(&stores::folder(job))?,
            root: Some(root),
        })
    }

    /// Opens it for reading what is there now: nothing is remembered from one to the next, and no file
    /// that was deleted stays open.
    ///
    /// # Errors
    /// The store is not there, or does not answer.
    pub fn open(&self) -> io::Result<Store> {
        if let Some(root) = &self.root {
            root.head(UUID_NAME)?;
        }
        Ok(self.store.afresh())
    }

    /// The names of the folders below `data/`.
    ///
    /// # Errors
    /// They cannot be listed.
    pub fn folders(&self) -> io::Result<Vec<String>> {
        Ok(self.store.folders("data")?)
    }

    /// Deletes `data/<folder>` or `manifest/<file>`. A name that is not there counts as deleted.
    ///
    /// # Errors
    /// Any other name, or some of it is still there.
    pub fn remove(&self, name: &str) -> io::Result<()> {
        let plain = |part: &str| {
            let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            !part.is_empty() && !part.starts_with('.') && part.chars().all(fine)
        };
        match name.split_once('/') {
            Some(("data", folder)) if plain(folder) => Ok(self.store.delete_folder(name)?),
            Some(("manifest", file)) if plain(file) => Ok(self.store.delete(name)?),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_belongs_to_a_checkpoint_is_deleted() {
        let root = tempfile::tempdir().unwrap();
        let job = root.path().join("job");
        let place = Folder::at(&Location::Directory(root.path().to_owned()), "job").unwrap();
        for dir in ["data/5-aa-1", "manifest", "log"] {
            std::fs::create_dir_all(job.join(dir)).unwrap();
        }
        for file in [
            "data/5-aa-1/n0-0.safetensors",
            "manifest/aa.json",
            "log/1.json",
        ] {
            std::fs::write(job.join(file), "x").unwrap();
        }
        assert!(place.open().is_err(), "no store is there");
        std::fs::write(root.path().join(UUID_NAME), "{}").unwrap();
        assert!(place.open().is_ok());
        assert_eq!(place.folders().unwrap(), ["5-aa-1"]);
        for name in [
            "log/1.json",
            "data",
            "data/",
            "data/.",
            "data/..",
            "data/../log",
            "data/5-aa-1/..",
            "/etc/passwd",
            "manifest",
            "manifest/../log/1.json",
            "",
        ] {
            assert!(place.remove(name).is_err(), "{name}");
        }
        assert!(job.join("log/1.json").exists());
        place.remove("manifest/aa.json").unwrap();
        place.remove("data/5-aa-1").unwrap();
        place.remove("data/5-aa-1").unwrap();
        assert!(!job.join("data/5-aa-1").exists() && !job.join("manifest/aa.json").exists());
    }
}
