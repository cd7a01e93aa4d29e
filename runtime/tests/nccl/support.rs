//! The stand-ins, compiled once, and ranks that are threads.

use std::ffi::{CString, c_char, c_int};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use libloading::os::unix::{Library as Handle, Symbol};
use muster_runtime::collective::nccl::{Communicator, Config, Device, Library, Memory, RawStream};
use muster_runtime::collective::{Element, Group, GroupConfig, Sharing};

use super::common::port::HeldPort;

/// Longer than anything takes that goes well.
pub(crate) const BOUND: Duration = Duration::from_secs(30);
pub(crate) const AFTER: RawStream = RawStream::DEFAULT;

/// The stand-ins for both libraries, in one file.
pub(crate) fn standin() -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/standin-nccl");
    let names = ["standin.h", "cuda.c", "nccl.c"];
    let mut hasher = blake3::Hasher::new();
    for name in names {
        hasher.update(&std::fs::read(folder.join(name)).unwrap());
    }
    let digest = hasher.finalize().to_hex();
    let to = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let library = to.join(format!("libstandin-{}.so", &digest[..16]));
    if !library.exists() {
        // Other tests may do the same at the same time: whoever is first puts it into place.
        let own = tempfile::NamedTempFile::new_in(&to).unwrap();
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-O1", "-pthread", "-o"])
            .arg(own.path())
            .args(names[1..].iter().map(|name| folder.join(name)))
            .status()
            .unwrap();
        assert!(status.success(), "cc cannot compile the stand-ins");
        own.persist(&library).unwrap();
    }
    library
}

pub(crate) fn library() -> Arc<Library> {
    let standin = standin();
    Library::load_from(&standin, &standin).unwrap()
}

/// A function of the stand-ins that Muster does not know.
pub(crate) fn own<T>(name: &str) -> Symbol<T> {
    // SAFETY: the stand-ins do nothing when they are loaded; the callers know the types.
    unsafe {
        let handle = Handle::new(standin()).unwrap();
        let symbol = handle.get(name.as_bytes()).unwrap();
        // Loaded for good, as by `library`.
        std::mem::forget(handle);
        symbol
    }
}

/// The faults of the communicators that rank 0 makes on this thread.
pub(crate) fn script(text: &str) {
    let set: Symbol<unsafe extern "C" fn(*const c_char)> = own("standin_script");
    let text = CString::new(text).unwrap();
    // SAFETY: it copies the text.
    unsafe { set(text.as_ptr()) };
}

/// How many contexts, streams, events, pieces of memory and communicators there are.
pub(crate) fn live() -> [c_int; 5] {
    let count: Symbol<unsafe extern "C" fn(c_int) -> c_int> = own("standin_live");
    // SAFETY: these are the kinds that there are.
    [0, 1, 2, 3, 4].map(|kind| unsafe { count(kind) })
}

pub(crate) fn config() -> Config {
    Config {
        form_within: BOUND,
        abort_within: BOUND,
        ..Config::default()
    }
}

pub(crate) fn group_config(rank: u32, world: u32, port: u16) -> GroupConfig {
    GroupConfig {
        rank,
        world,
        master: Some(("127.0.0.1".to_owned(), port)),
        token: [9; 32],
        digest: [7; 32],
        sharing: Sharing::Auto,
        form_within: BOUND,
        op_within: BOUND,
    }
}

/// One rank of a test.
pub(crate) struct Rank {
    pub(crate) group: Group,
    pub(crate) library: Arc<Library>,
}

impl Rank {
    pub(crate) fn number(&self) -> u32 {
        self.group.rank()
    }

    /// With the device of the rank's own number.
    pub(crate) fn form(&mut self) -> Communicator {
        let ordinal = self.number();
        Communicator::form(&self.library, ordinal, &mut self.group, config()).unwrap()
    }
}

/// Runs `body` on each rank of a group; the results in the order of ranks.
pub(crate) fn on_ranks<T: Send>(
    world: u32,
    faults: &str,
    adjust: impl Fn(GroupConfig) -> GroupConfig,
    body: impl Fn(Rank) -> T + Sync,
) -> Vec<T> {
    let (held, library) = (HeldPort::new(), library());
    let port = held.port();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world)
            .map(|rank| {
                let config = adjust(group_config(rank, world, port));
                let (body, library) = (&body, library.clone());
                scope.spawn(move || {
                    script(faults);
                    let group = Group::form(&config).unwrap();
                    body(Rank { group, library })
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A rank's input to a case: numbers without NaN, whose sums do not come out even.
pub(crate) fn input<T: Element>(rank: u32, len: usize, of: fn(f64) -> T) -> Vec<T> {
    (0..len)
        .map(|i| of(((i * 7 + rank as usize * 13) % 29) as f64 * 0.37 + f64::from(rank)))
        .collect()
}

/// Memory with values, and as much for a result.
pub(crate) fn buffers<T: Element>(
    device: &Arc<Device>,
    values: &[T],
    out: usize,
) -> (Memory, Memory) {
    let to = vec![T::zeroed(); out];
    (device.upload(values).unwrap(), device.upload(&to).unwrap())
}

pub(crate) fn read<T: Element>(memory: &Memory, len: usize) -> Vec<T> {
    let mut values = vec![T::zeroed(); len];
    memory.read(&mut values).unwrap();
    values
}
