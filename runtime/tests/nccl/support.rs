//! Ranks that are threads.

use std::ffi::{CString, c_char, c_int};
use std::sync::Arc;
use std::time::Duration;

use libloading::os::unix::Symbol;
use muster_runtime::collective::nccl::{Communicator, Config, Device, Library, Memory, RawStream};
use muster_runtime::collective::{Element, Group, GroupConfig, Sharing};

use super::common::port::HeldPort;
pub(crate) use super::standin::{own, standin};

/// Longer than anything takes that goes well.
pub(crate) const BOUND: Duration = Duration::from_secs(30);
pub(crate) const AFTER: RawStream = RawStream::DEFAULT;

pub(crate) fn library() -> Arc<Library> {
    let standin = standin();
    Library::load_from(&standin, &standin).unwrap()
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
