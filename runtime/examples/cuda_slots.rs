//! How tensors on a GPU get into checkpoints on this machine: `cuda_slots [LIBCUDA [MIB [FOLDER]]]`. FOLDER, a new one
//! in the system's folder for temporary files unless named, gets a checkpoint of MIB, which is removed.
//!
//! Saves a tensor of a GPU some times as a worker does, says which way was taken and how fast, makes one save durable,
//! loads it back into the GPU's memory, and compares. Ends with code 1 and a sentence where something is missing or
//! wrong. No launcher is needed: this program is its own.

use std::fs::File;
use std::io::Write as _;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::{Bytes, Id};
use muster_checkpoint::manifest::Origin;
use muster_checkpoint::part::{Note, keep};
use muster_checkpoint::persist::Options;
use muster_checkpoint::shelf;
use muster_checkpoint::slot::{Sealed, Slot, State};
use muster_protocol::Digest;
use muster_protocol::control::fresh_page;
use muster_protocol::control::slots::{Given, word};
use muster_runtime::cuda::{Device, Driver};
use muster_runtime::saving::{
    Dtype, Held, MemoryMut, OnDevice, OnDeviceMut, Peer, Restore, Saver, Slice, Wanted, Way,
};
use muster_runtime::{Session, WorkerEnv};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Saves that are timed.
const SAVES: u64 = 7;
const GENERATION: [u8; 32] = [5; 32];

fn main() -> ExitCode {
    match check() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("cuda_slots: {error}");
            let mut cause = error.source();
            while let Some(error) = cause {
                eprintln!("  because: {error}");
                cause = error.source();
            }
            ExitCode::FAILURE
        }
    }
}

fn check() -> Result<(), Failure> {
    let mut args = std::env::args_os().skip(1);
    let driver = match args.next() {
        Some(path) => Driver::load_from(Path::new(&path))?,
        None => Driver::load()?,
    };
    let mib = args.next().map(|mib| mib.to_string_lossy().parse::<u64>());
    let bytes = mib.unwrap_or(Ok(1024))? << 20;
    let folder = match args.next() {
        Some(folder) => tempfile::tempdir_in(folder)?,
        None => tempfile::tempdir()?,
    };
    let local = std::env::var("LOCAL_RANK").unwrap_or_default();
    let device = Device::open(&driver, local.parse().unwrap_or(0))?;
    println!(
        "{} at {}, a tensor of {} MiB",
        device.name(),
        device.bus(),
        bytes >> 20
    );

    let shape = [bytes];
    let content: Vec<u8> = (0..bytes).map(|at| (at / 5 + at / 4099) as u8).collect();
    let tensor = device.upload(&content)?;
    let mut page = tempfile::tempfile()?;
    page.write_all(&fresh_page())?;
    let mut session = Session::from_fd(page.as_raw_fd())?;
    let env = WorkerEnv {
        rank: 0,
        world: 1,
        local_rank: 0,
        master: None,
        restart: 0,
        generation: 1,
        digest: Digest(GENERATION),
    };
    let held = vec![Held::whole("tensor", Dtype::U8, &shape)];
    let (mut saver, slots) = std::thread::scope(|scope| {
        let launcher = scope.spawn(|| give(&page));
        let saver = Saver::new(&mut session, &env, &[Peer { node: 0, held }])?;
        let slots = launcher
            .join()
            .map_err(|_| "the launcher's thread failed")??;
        Ok::<_, Failure>((saver, slots))
    })?;
    saver.use_driver(driver.clone());

    // SAFETY: the tensor is so long, and outlives all saves; nothing is in the default stream.
    let there = unsafe { OnDevice::new(tensor.address(), bytes, std::ptr::null_mut()) };
    let mut took = Vec::new();
    for step in 1..=SAVES {
        let began = Instant::now();
        let saved = saver.save(step, |_, _| Some(there), Vec::new())?;
        let all = began.elapsed();
        match step {
            1 => println!("the first save: {all:.1?}, with what is made once"),
            _ => took.push(saved.copied),
        }
        match step {
            SAVES => compare(&take(&slots)?, &driver, folder.path(), &device, &content)?,
            _ => take(&slots)?.release(),
        }
    }
    match saver.way() {
        Some(Way::Straight) => {
            println!("straight into the slots: the driver registers their memory")
        }
        Some(Way::Pinned { why }) => println!("through pinned memory: {why}"),
        None => return Err("no tensor was copied from the GPU".into()),
    }
    took.sort_unstable();
    println!(
        "copied and hashed: median {:.1?} ({:.2} GB/s), least {:.1?}",
        took[took.len() / 2],
        bytes as f64
            / took[took.len() / 2]
                .max(Duration::from_nanos(1))
                .as_secs_f64()
            / 1e9,
        took[0]
    );
    Ok(())
}

/// The sealed image, taken as a launcher takes it.
fn take(slots: &[Arc<Slot>]) -> Result<Sealed, Failure> {
    let sealed = slots.iter().find(|slot| slot.state().0 == State::Sealed);
    let sealed = sealed.ok_or("nothing was sealed")?.take()?;
    Ok(sealed.ok_or("somebody else took what was sealed")?)
}

/// Makes it durable, and loads it into the GPU's memory.
fn compare(
    sealed: &Sealed,
    driver: &Arc<Driver>,
    folder: &Path,
    device: &Arc<Device>,
    content: &[u8],
) -> Result<(), Failure> {
    let dir = Dir::open(folder)?;
    let go_on = |_| ControlFlow::Continue(());
    // It compares every chunk with what it hashed to.
    let kept = keep(sealed, &dir, "saved", 0, None, Options::default(), &go_on)?;
    let draft = Note::decode(&sealed.note)?.draft;
    let origin = Origin {
        job: "cuda_slots".to_owned(),
        lineage: Bytes([0; 32]),
        generation: Bytes(GENERATION),
        number: 1,
        attempt: 1,
        step: sealed.step,
        world: 1,
        saved_at: 0,
    };
    let draft = draft.ok_or("rank 0 said nothing of the tensors")?;
    let manifest = draft.assemble(origin, &dir, "saved", &[kept.digest])?;
    let digest: Id = shelf::put(&dir, &manifest)?;
    let mut restore = Restore::open(folder, digest)?;
    restore.use_driver(driver.clone());

    let (shape, into) = ([content.len() as u64], device.alloc(content.len())?);
    // SAFETY: it is so long, and nobody else uses it.
    let there = unsafe { OnDeviceMut::new(into.address(), shape[0], std::ptr::null_mut()) };
    let began = Instant::now();
    restore.load_into(vec![Wanted {
        name: "tensor",
        dtype: Dtype::U8,
        shape: &shape,
        slice: Slice::whole(&shape),
        into: MemoryMut::Device(there),
    }])?;
    println!("read, verified and copied back in {:.1?}", began.elapsed());
    let mut back = vec![0u8; content.len()];
    into.read(&mut back)?;
    match back == content {
        true => println!("it came back bit for bit"),
        false => return Err("what came back is something else".into()),
    }
    Ok(())
}

/// A launcher's side: answers the ask for slots.
fn give(page: &File) -> Result<Vec<Arc<Slot>>, Failure> {
    let load = |at: usize| -> std::io::Result<u64> {
        let mut bytes = [0; 8];
        page.read_exact_at(&mut bytes, at as u64)?;
        Ok(u64::from_le_bytes(bytes))
    };
    let store = |at: usize, value: u64| page.write_all_at(&value.to_le_bytes(), at as u64);
    while load(word::ASK)? == 0 {
        std::thread::yield_now();
    }
    let (image, note) = (load(word::IMAGE)?, load(word::NOTE)?);
    let slots = [
        Slot::create(image, note, 4)?.0,
        Slot::create(image, note, 4)?.0,
    ];
    store(word::PID, std::process::id().into())?;
    for (at, slot) in word::FDS.into_iter().zip(&slots) {
        store(at, u64::try_from(slot.fd().as_raw_fd())?)?;
    }
    store(word::GIVEN, Given::Slots.encode(load(word::ASK)?))?;
    Ok(slots.into())
}
