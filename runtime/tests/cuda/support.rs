//! A worker with two devices, and its launcher.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use libloading::os::unix::Symbol;
use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::Bytes;
use muster_checkpoint::manifest::Origin;
use muster_checkpoint::part::{Note, keep};
use muster_checkpoint::persist::Options;
use muster_checkpoint::shelf;
use muster_checkpoint::slot::{Sealed, Slot};
use muster_protocol::Digest;
use muster_protocol::control::fresh_page;
use muster_protocol::control::slots::{Given, word};
use muster_runtime::cuda::{Device, Driver, Memory as Allocated, RawStream};
use muster_runtime::saving::{
    Blob, Dtype, Held, Memory, MemoryMut, OnDevice, Peer, Restore, SaveError, Saved, Saver, Slice,
    Want, Wanted,
};
use muster_runtime::{Session, WorkerEnv};

pub(crate) use super::standin::{own, standin};

/// Tensors in the host's memory, on the first device, and on the second: of a few bytes, and of more than a chunk that
/// does not end with a page.
pub(crate) const TENSORS: [(&str, Place, u64); 6] = [
    ("bias", Place::Device(0), 10),
    ("embedding", Place::Device(1), (5 << 20) + 77),
    ("head", Place::Host, 3 << 20),
    ("scale", Place::Device(1), 1),
    ("weight", Place::Device(0), (13 << 20) + 1000),
    ("zero", Place::Device(0), 0),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Host,
    Device(usize),
}

/// Sets the stand-in's behaviour from now on.
pub(crate) fn script(text: &str) {
    let set: Symbol<unsafe extern "C" fn(*const c_char)> = own("standin_cuda");
    let text = CString::new(text).unwrap();
    // SAFETY: it reads the text, and does not keep it.
    unsafe { set(text.as_ptr()) };
}

/// How many contexts, streams, events, pieces of memory, registrations and pinned buffers there are.
pub(crate) fn live() -> [c_int; 6] {
    let count: Symbol<unsafe extern "C" fn(c_int) -> c_int> = own("standin_live");
    // SAFETY: these are the kinds that there are.
    [0, 1, 2, 3, 5, 6].map(|kind| unsafe { count(kind) })
}

/// A kernel that sets a device's memory.
pub(crate) fn set(stream: RawStream, memory: &Allocated, byte: u8) {
    let set: Symbol<unsafe extern "C" fn(*mut c_void, u64, c_int, usize)> = own("standin_set");
    // SAFETY: it is that device's, and so long; whoever calls this keeps it until the stream is past it.
    unsafe {
        set(
            stream.as_ptr(),
            memory.address(),
            byte.into(),
            memory.bytes(),
        )
    };
}

pub(crate) fn driver() -> Arc<Driver> {
    Driver::load_from(&standin()).unwrap()
}

/// The bytes of a tensor before a step: no two places look alike.
pub(crate) fn content(name: &str, bytes: u64, step: u64) -> Vec<u8> {
    let salt = name.len() as u64 * 31 + step * 7;
    (0..bytes)
        .map(|at| (at / 5 + at / 4099 + salt) as u8)
        .collect()
}

fn held(name: &str, bytes: u64) -> Held {
    Held::whole(name, Dtype::U8, &[bytes])
}

/// A worker, alone in its job, whose launcher is the test.
pub(crate) struct Worker {
    page: File,
    pub(crate) driver: Arc<Driver>,
    pub(crate) devices: [Arc<Device>; 2],
    pub(crate) saver: Saver,
    pub(crate) slots: Vec<Arc<Slot>>,
    pub(crate) memory: BTreeMap<&'static str, Tensor>,
}

/// A tensor's memory.
pub(crate) enum Tensor {
    Host(Vec<u8>),
    Device(Allocated),
}

impl Worker {
    /// One on a driver whose copies are late, with what it has saved as step 1.
    pub(crate) fn saved(place: &Path) -> (Worker, Restore) {
        script("lazy");
        let mut worker = Worker::new();
        worker.train(1);
        worker.save(1).unwrap();
        let restore = worker.commit(place, 1);
        (worker, restore)
    }

    /// With the stand-in.
    pub(crate) fn new() -> Worker {
        let mut worker = Worker::alone();
        worker.saver.use_driver(worker.driver.clone());
        worker
    }

    /// With the driver that its variable names.
    pub(crate) fn alone() -> Worker {
        let driver = driver();
        let mut page = tempfile::tempfile().unwrap();
        page.write_all(&fresh_page()).unwrap();
        let mut session = Session::from_fd(page.as_raw_fd()).unwrap();
        let env = WorkerEnv {
            rank: 0,
            world: 1,
            local_rank: 0,
            master: None,
            restart: 0,
            generation: 3,
            digest: Digest([5; 32]),
        };
        let held = TENSORS.map(|(name, _, bytes)| held(name, bytes)).into();
        let peers = [Peer { node: 0, held }];
        let (mut saver, slots) = thread::scope(|scope| {
            let launcher = scope.spawn(|| give(&page));
            let saver = Saver::new(&mut session, &env, &peers).unwrap();
            (saver, launcher.join().unwrap())
        });
        saver.threads(3);
        let devices = [0, 1].map(|ordinal| Device::open(&driver, ordinal).unwrap());
        let memory = TENSORS.map(|(name, place, bytes)| {
            let memory = match place {
                Place::Host => Tensor::Host(vec![0; bytes as usize]),
                Place::Device(at) => Tensor::Device(devices[at].alloc(bytes as usize).unwrap()),
            };
            (name, memory)
        });
        Worker {
            page,
            driver,
            devices,
            saver,
            slots,
            memory: memory.into(),
        }
    }

    /// Every tensor is what it is before this step.
    pub(crate) fn train(&mut self, step: u64) {
        for (name, _, bytes) in TENSORS {
            let content = content(name, bytes, step);
            match self.memory.get_mut(name).unwrap() {
                Tensor::Host(memory) => memory.copy_from_slice(&content),
                Tensor::Device(memory) => memory.write(&content).unwrap(),
            }
        }
    }

    pub(crate) fn on_device(&self, name: &str) -> &Allocated {
        match &self.memory[name] {
            Tensor::Device(memory) => memory,
            Tensor::Host(_) => unreachable!("{name} is the host's"),
        }
    }

    /// Saves what is in the memory, after what is in `stream` of the first device and in the others' default one.
    pub(crate) fn save_after(
        &mut self,
        step: u64,
        stream: RawStream,
    ) -> Result<Saved, Box<SaveError>> {
        let state = of_memory(&self.memory, stream);
        let blob = Blob {
            name: "rng/0".to_owned(),
            data: vec![7; 3],
        };
        (self.saver.save(step, state, vec![blob])).map_err(Box::new)
    }

    /// Has what the first save would do first done by a thread.
    pub(crate) fn prepare(&mut self) {
        let state = of_memory(&self.memory, RawStream::DEFAULT);
        self.saver.prepare(state);
    }

    pub(crate) fn save(&mut self, step: u64) -> Result<Saved, Box<SaveError>> {
        self.save_after(step, RawStream::DEFAULT)
    }

    /// The save of this step, as the launcher takes it.
    pub(crate) fn taken(&self, step: u64) -> Sealed {
        let slot = self.slots.iter().find(|slot| slot.state().1 == step);
        slot.unwrap().take().unwrap().unwrap()
    }

    /// Makes it durable, and opens it.
    pub(crate) fn commit(&self, place: &Path, step: u64) -> Restore {
        let sealed = self.taken(step);
        let dir = Dir::open(place).unwrap();
        let go_on = |_| std::ops::ControlFlow::Continue(());
        let folder = format!("s{step}");
        // It compares every chunk with its sum.
        let kept = keep(&sealed, &dir, &folder, 0, None, Options::default(), &go_on).unwrap();
        let draft = Note::decode(&sealed.note).unwrap().draft;
        sealed.release();
        let origin = Origin {
            job: "test".to_owned(),
            lineage: Bytes([0; 32]),
            generation: Bytes([5; 32]),
            number: 3,
            attempt: 1,
            step,
            world: 1,
            saved_at: 0,
        };
        let manifest = draft
            .unwrap()
            .assemble(origin, &dir, &folder, &[kept.digest]);
        let digest = shelf::put(&dir, &manifest.unwrap()).unwrap();
        let mut restore = Restore::open(place, digest).unwrap();
        restore.use_driver(self.driver.clone());
        restore
    }

    /// Answers the next ask for slots while `body` runs.
    pub(crate) fn with_launcher<T>(&mut self, body: impl FnOnce(&mut Worker) -> T) -> T {
        let page = self.page.try_clone().unwrap();
        thread::scope(|scope| {
            let launcher = scope.spawn(move || give(&page));
            let result = body(self);
            self.slots = launcher.join().unwrap();
            result
        })
    }
}

/// Finds tensors of the memory, where they are; those of the first device are worked with in `stream`.
fn of_memory<'a>(
    memory: &'a BTreeMap<&'static str, Tensor>,
    stream: RawStream,
) -> impl Fn(&str, &Slice) -> Option<Memory<'a>> {
    let place = |name: &str| TENSORS.iter().find(|(known, ..)| *known == name).unwrap().1;
    move |name: &str, _: &Slice| {
        Some(match &memory[name] {
            Tensor::Host(bytes) => Memory::Host(bytes),
            Tensor::Device(there) => {
                let stream = match place(name) {
                    Place::Device(0) => stream,
                    _ => RawStream::DEFAULT,
                };
                // SAFETY: the memory is so long, and outlives the save.
                Memory::Device(unsafe {
                    OnDevice::new(there.address(), there.bytes() as u64, stream.as_ptr())
                })
            }
        })
    }
}

/// All tensors of a checkpoint, in the host's memory.
pub(crate) fn load(restore: &Restore) -> BTreeMap<&'static str, Vec<u8>> {
    let mut memory = TENSORS.map(|(name, _, bytes)| (name, [bytes], vec![0; bytes as usize]));
    let mut wants: Vec<Want<'_>> = (memory.iter_mut())
        .map(|(name, shape, into)| Want {
            name,
            dtype: Dtype::U8,
            shape: &*shape,
            slice: Slice::whole(&*shape),
            into: &mut *into,
        })
        .collect();
    restore.load(&mut wants).unwrap();
    drop(wants);
    memory.map(|(name, _, bytes)| (name, bytes)).into()
}

/// A want of a whole tensor of bytes.
pub(crate) fn want<'a>(
    name: &'a str,
    shape: &'a [u64; 1],
    into: MemoryMut<'a>,
) -> Wanted<'a, MemoryMut<'a>> {
    Wanted {
        name,
        dtype: Dtype::U8,
        shape,
        slice: Slice::whole(shape),
        into,
    }
}

/// A launcher's side: answers one ask for slots.
fn give(page: &File) -> Vec<Arc<Slot>> {
    let load = |at: usize| {
        let mut bytes = [0; 8];
        page.read_exact_at(&mut bytes, at as u64).unwrap();
        u64::from_le_bytes(bytes)
    };
    let store = |at: usize, value: u64| {
        page.write_all_at(&value.to_le_bytes(), at as u64).unwrap();
    };
    while load(word::ASK) == 0
        || Given::decode(load(word::GIVEN), load(word::ASK)) != Given::Nothing
    {
        thread::yield_now();
    }
    let (image, note) = (load(word::IMAGE), load(word::NOTE));
    let slots: Vec<_> = (0..2)
        .map(|_| Slot::create(image, note, 1).unwrap().0)
        .collect();
    store(word::PID, std::process::id().into());
    for (at, slot) in word::FDS.into_iter().zip(&slots) {
        store(at, u64::try_from(slot.fd().as_raw_fd()).unwrap());
    }
    store(word::GIVEN, Given::Slots.encode(load(word::ASK)));
    slots
}
