//! Speed of a machine's memory and disk, and of writing and reading checkpoints on it.
//!
//! `cargo run --release -p muster-checkpoint --example persist -- DIR [MIB]`

use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Instant;

use memmap2::MmapMut;
use muster_checkpoint::dir::Dir;
use muster_checkpoint::hex::Bytes;
use muster_checkpoint::manifest::{Manifest, Origin};
use muster_checkpoint::persist::{Options, persist};
use muster_checkpoint::plan::{Held, Plan, Rank};
use muster_checkpoint::source::Directory;
use muster_checkpoint::sum::{CHUNK, ChunkSum, crc};
use muster_checkpoint::verify::{Depth, verify};
use muster_checkpoint::{Dtype, PAGE, Slice};
use rustix::fs::{
    FallocateFlags, MemfdFlags, Mode, OFlags, fallocate, fdatasync, memfd_create, open,
};
use rustix::io::pwrite;
use rustix::time::{ClockId, clock_gettime};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let place = args.next().ok_or("usage: persist DIR [MIB]")?;
    let mib: usize = args.next().map_or(Ok(1024), |mib| mib.parse())?;
    let bytes = mib << 20;
    let mut image = slot(bytes)?;
    let mut state = 1u64;
    for word in image.chunks_exact_mut(8) {
        // Random, so that no disk compresses it (xorshift64, Marsaglia 2003).
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
    plans()?;
    let mut copy = slot(bytes)?;
    measure("memcpy into a fresh memfd", bytes, || {
        copy.copy_from_slice(&image);
        Ok(())
    })?;
    measure("memcpy into a warm memfd", bytes, || {
        copy.copy_from_slice(&image);
        Ok(())
    })?;
    measure("CRC-64/NVME", bytes, || {
        image
            .chunks(CHUNK as usize)
            .for_each(|chunk| drop(std::hint::black_box(crc(chunk)).to_string()));
        Ok(())
    })?;
    measure("BLAKE3", bytes, || {
        std::hint::black_box(blake3::hash(&image));
        Ok(())
    })?;
    measure("both hashes of a chunk", bytes, || {
        for chunk in image.chunks(CHUNK as usize) {
            std::hint::black_box(ChunkSum::of(chunk));
        }
        Ok(())
    })?;
    drop(copy);

    let dir = Dir::open(Path::new(&place))?;
    let path = |name: &str| Path::new(&place).join(name);
    measure(
        "probe: O_DIRECT, 16 threads, 1 MiB each, no hash",
        bytes,
        || probe(&path("probe"), &image),
    )?;
    std::fs::remove_file(path("probe"))?;
    let go_on = |_| ControlFlow::Continue(());
    let ways = [
        (1, false, false),
        (1, true, false),
        (2, true, false),
        (4, true, false),
        (1, true, true),
        (2, true, true),
        (4, true, true),
    ];
    for (threads, direct, ring) in ways {
        let how = match (direct, ring) {
            (false, _) => "buffered",
            (true, false) => "O_DIRECT",
            (true, true) => "io_uring",
        };
        let mut outcome = None;
        measure(&format!("persist, {how}, {threads} threads"), bytes, || {
            outcome = Some(persist(
                &dir,
                "file",
                &image,
                Options {
                    threads,
                    direct,
                    ring,
                },
                &go_on,
            )?);
            Ok(())
        })?;
        let Some(written) = outcome else { continue };
        if threads == 4 && !ring {
            let manifest = Manifest {
                origin: Origin {
                    job: String::new(),
                    lineage: Bytes([0; 32]),
                    generation: Bytes([0; 32]),
                    number: 0,
                    attempt: 0,
                    step: 0,
                    world: 1,
                    saved_at: 0,
                },
                chunk: CHUNK,
                files: vec![written.data_file("file".to_owned())],
                tensors: Vec::new(),
                blobs: Vec::new(),
            };
            for threads in [1, 4] {
                let source = Directory::new(dir.clone(), true);
                measure(
                    &format!("read and verify, O_DIRECT, {threads} threads"),
                    bytes,
                    || Ok(verify(&manifest, &source, Depth::Everything { threads })?),
                )?;
            }
        }
        println!("{:48}   {:?}", "", written.path);
        std::fs::remove_file(path("file"))?;
    }
    Ok(())
}

/// Runs it and prints its speed and its processor time.
fn measure(what: &str, bytes: usize, run: impl FnOnce() -> Result<()>) -> Result<()> {
    let cpu = || {
        let now = clock_gettime(ClockId::ProcessCPUTime);
        now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
    };
    let (began, cpu_began) = (Instant::now(), cpu());
    run()?;
    let seconds = began.elapsed().as_secs_f64();
    let speed = bytes as f64 / 1e9 / seconds;
    println!(
        "{what:48} {speed:6.2} GB/s {seconds:7.3} s {:7.3} CPU s",
        cpu() - cpu_began
    );
    Ok(())
}

/// Memory as a worker's slots are.
fn slot(bytes: usize) -> Result<MmapMut> {
    let file = std::fs::File::from(memfd_create("slot", MemfdFlags::CLOEXEC)?);
    file.set_len(bytes as u64)?;
    // SAFETY: nobody else has the descriptor, so nobody else changes the memory.
    Ok(unsafe { MmapMut::map_mut(&file) }?)
}

/// How long it takes to find out who writes what.
fn plans() -> Result<()> {
    let tensor = |number: u64, slice: Slice| Held {
        name: format!("model.layers.{number}.weight"),
        dtype: Dtype::BF16,
        shape: vec![8192, 4096],
        slices: vec![slice],
    };
    let model: Vec<Held> = (0..2000)
        .map(|number| tensor(number, Slice::whole(&[8192, 4096])))
        .collect();
    let replicated: Vec<Rank<'_>> = (0..1024)
        .map(|rank| Rank {
            node: rank / 8,
            held: &model,
        })
        .collect();
    let began = Instant::now();
    Plan::new(&replicated)?;
    println!(
        "plan: 1024 ranks, 2000 replicated tensors {:>9.3} s",
        began.elapsed().as_secs_f64()
    );

    let rows = 8192 / 256;
    let shards: Vec<Vec<Held>> = (0..256)
        .map(|rank| {
            let slice = Slice {
                offset: vec![rank * rows, 0],
                extent: vec![rows, 4096],
            };
            (0..2000)
                .map(|number| tensor(number, slice.clone()))
                .collect()
        })
        .collect();
    let sharded: Vec<Rank<'_>> = (0..)
        .zip(&shards)
        .map(|(rank, held)| Rank {
            node: rank / 8,
            held,
        })
        .collect();
    let began = Instant::now();
    Plan::new(&sharded)?;
    println!(
        "plan: 256 ranks, 2000 tensors in 256 slices each {:>2.3} s",
        began.elapsed().as_secs_f64()
    );
    Ok(())
}

/// The disk alone.
fn probe(path: &Path, image: &[u8]) -> Result<()> {
    const BLOCK: usize = 1 << 20;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC | OFlags::DIRECT;
    let file: OwnedFd = open(path, flags, Mode::from_raw_mode(0o600))?;
    fallocate(&file, FallocateFlags::empty(), 0, image.len() as u64)?;
    let blocks = image.len() / BLOCK;
    assert!(image.len().is_multiple_of(PAGE));
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..16)
            .map(|thread| {
                let file = &file;
                scope.spawn(move || {
                    for block in (thread..blocks).step_by(16) {
                        let at = block * BLOCK;
                        if pwrite(file, &image[at..at + BLOCK], at as u64)? != BLOCK {
                            return Err(rustix::io::Errno::IO);
                        }
                    }
                    Ok(())
                })
            })
            .collect();
        for thread in threads {
            thread.join().map_err(|_| "a thread panicked")??;
        }
        fdatasync(&file)?;
        Ok(())
    })
}
