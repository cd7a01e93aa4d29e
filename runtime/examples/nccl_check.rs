//! Check of NCCL on this machine: `nccl_check [LIBNCCL [LIBCUDA [MIB]]]`, alone with one GPU, or as a worker
//! of `muster run` with one GPU for each. MIB is the size of the large all-reduce.
//!
//! Every operation with fp16, bf16 and the other types against the group's own on host memory, the time
//! of a small and a large all-reduce, the time of an abort, and forming again after it. Ends with code
//! 1 and a sentence where something is missing or wrong.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use muster_runtime::WorkerEnv;
use muster_runtime::collective::nccl::{Communicator, Config, Library, RawStream};
use muster_runtime::collective::{Element, Group, GroupConfig, Op};

type Failure = Box<dyn std::error::Error>;

/// Elements of each rank's part.
const LEN: usize = 1000;

fn main() -> ExitCode {
    match check() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nccl_check: {error}");
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
    let nccl = args.next().unwrap_or_else(|| "libnccl.so.2".into());
    let cuda = args.next().unwrap_or_else(|| "libcuda.so.1".into());
    let mib = args.next().map(|mib| mib.to_string_lossy().parse());
    let large = mib.unwrap_or(Ok(64))? << 20;
    let library = Library::load_from(Path::new(&nccl), Path::new(&cuda))?;
    let (config, ordinal) = if std::env::var_os("RANK").is_some() {
        let env = WorkerEnv::from_env()?;
        let local = std::env::var("LOCAL_RANK").unwrap_or_default();
        (GroupConfig::from_env(&env), local.parse().unwrap_or(0))
    } else {
        let alone = GroupConfig {
            op_within: Duration::from_secs(60),
            ..GroupConfig::alone()
        };
        (alone, 0)
    };
    let mut group = Group::form(&config)?;
    let began = Instant::now();
    let mut nccl = Communicator::form(&library, ordinal, &mut group, Config::default())?;
    println!(
        "rank {} of {}: NCCL {} on {} at {}, formed in {:.1?}",
        nccl.rank(),
        nccl.world(),
        library.version(),
        nccl.device().name(),
        nccl.device().bus(),
        began.elapsed()
    );

    operations::<f16>(&mut nccl, &mut group, |x| f16::from_f32(x as f32))?;
    operations::<bf16>(&mut nccl, &mut group, |x| bf16::from_f32(x as f32))?;
    operations::<f32>(&mut nccl, &mut group, |x| x as f32)?;
    operations::<f64>(&mut nccl, &mut group, f64::from)?;
    operations::<i32>(&mut nccl, &mut group, |x| x)?;
    operations::<i64>(&mut nccl, &mut group, i64::from)?;
    operations::<u8>(&mut nccl, &mut group, |x| x as u8)?;

    time(&mut nccl, large)?;
    abort(&library, ordinal, nccl, &mut group, large)
}

/// All operations with one type. The numbers are small and whole, so that every order of summation gives
/// the same.
fn operations<T: Element + PartialEq + std::fmt::Debug>(
    nccl: &mut Communicator,
    group: &mut Group,
    of: impl Fn(i32) -> T,
) -> Result<(), Failure> {
    let (rank, world) = (nccl.rank() as usize, nccl.world() as usize);
    let whole = LEN * world;
    let input: Vec<T> = (0..whole).map(|i| of(((i + rank) % 7) as i32)).collect();
    let device = nccl.device().clone();
    let (from, to) = (
        device.upload(&input)?,
        device.alloc(size_of_val(&input[..]))?,
    );
    let parts = device.alloc(LEN * size_of::<T>())?;
    // SAFETY: all three outlive the operations, which are waited for below.
    let (input_there, output_there, part_there) = unsafe {
        (
            from.elements(T::DTYPE),
            to.elements(T::DTYPE),
            parts.elements(T::DTYPE),
        )
    };
    let after = RawStream::DEFAULT;
    let mut got = vec![of(0); whole];
    let mut expected = got.clone();
    let differs = |what: &str| format!("{what} of {:?} is wrong", T::DTYPE);

    for op in [Op::Sum, Op::Min, Op::Max] {
        let ticket = nccl.all_reduce(op, input_there, output_there, after)?;
        nccl.wait(ticket)?;
        to.read(&mut got)?;
        group.all_reduce(op, &input, &mut expected)?;
        if got != expected {
            return Err(differs("an all-reduce").into());
        }
        let ticket = nccl.reduce_scatter(op, input_there, part_there, after)?;
        nccl.wait(ticket)?;
        parts.read(&mut got[..LEN])?;
        group.reduce_scatter(op, &input, &mut expected[..LEN])?;
        if got[..LEN] != expected[..LEN] {
            return Err(differs("a reduce-scatter").into());
        }
    }
    let ticket = nccl.all_gather(part_there, output_there, after)?;
    nccl.wait(ticket)?;
    let mut part = vec![of(0); LEN];
    parts.read(&mut part)?;
    to.read(&mut got)?;
    group.all_gather(&part, &mut expected)?;
    if got != expected {
        return Err(differs("an all-gather").into());
    }
    let ticket = nccl.all_to_all(input_there, output_there, after)?;
    nccl.wait(ticket)?;
    to.read(&mut got)?;
    group.all_to_all(&input, &mut expected)?;
    if got != expected {
        return Err(differs("an all-to-all").into());
    }
    let root = nccl.world() - 1;
    let ticket = nccl.broadcast(root, input_there, output_there, after)?;
    nccl.wait(ticket)?;
    to.read(&mut got)?;
    group.broadcast(root, &input, &mut expected)?;
    if got != expected {
        return Err(differs("a broadcast").into());
    }
    let mut input_after = vec![of(0); whole];
    from.read(&mut input_after)?;
    if input_after != input {
        return Err(differs("an input that was to be left alone").into());
    }
    println!("rank {rank}: all operations of {:?} are right", T::DTYPE);
    Ok(())
}

fn time(nccl: &mut Communicator, large: usize) -> Result<(), Failure> {
    let device = nccl.device().clone();
    for (bytes, times) in [(4, 200), (large, 20)] {
        let (from, to) = (device.upload(&vec![0f32; bytes / 4])?, device.alloc(bytes)?);
        // SAFETY: both outlive the operations, which are waited for below.
        let (from_there, to_there) =
            unsafe { (from.elements(f32::DTYPE), to.elements(f32::DTYPE)) };
        let mut took = Vec::new();
        for _ in 0..times {
            let began = Instant::now();
            let ticket = nccl.all_reduce(Op::Sum, from_there, to_there, RawStream::DEFAULT)?;
            nccl.wait(ticket)?;
            took.push(began.elapsed());
        }
        took.sort_unstable();
        println!(
            "rank {}: an all-reduce of {bytes} bytes, until the host knows: median {:.1?}, least {:.1?}",
            nccl.rank(),
            took[times / 2],
            took[0]
        );
    }
    Ok(())
}

/// Ends the communicator in an orderly way, forms another, aborts that while something is in its stream,
/// and says how long it takes.
fn abort(
    library: &Arc<Library>,
    ordinal: u32,
    mut nccl: Communicator,
    group: &mut Group,
    large: usize,
) -> Result<(), Failure> {
    let rank = nccl.rank();
    let ticket = nccl.barrier(RawStream::DEFAULT)?;
    nccl.wait(ticket)?;
    let began = Instant::now();
    nccl.close(group)?;
    println!("rank {rank}: closed in {:.1?}", began.elapsed());
    let began = Instant::now();
    let mut nccl = Communicator::form(library, ordinal, group, Config::default())?;
    println!("rank {rank}: formed again in {:.1?}", began.elapsed());
    let device = nccl.device().clone();
    let (from, to) = (device.upload(&vec![0f32; large / 4])?, device.alloc(large)?);
    for _ in 0..16 {
        // SAFETY: both are dropped after the communicator.
        let (from, to) = unsafe { (from.elements(f32::DTYPE), to.elements(f32::DTYPE)) };
        nccl.all_reduce(Op::Sum, from, to, RawStream::DEFAULT)?;
    }
    // Whoever aborts first ends it for all, so everybody has to be that far.
    group.barrier()?;
    let began = Instant::now();
    drop(nccl);
    println!(
        "rank {rank}: aborted with operations in the stream in {:.1?}",
        began.elapsed()
    );
    Ok(())
}
