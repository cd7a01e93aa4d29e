//! One rank of the collectives bench: `collectives SYSTEM CASE...`, placed by torchrun's variables.
//!
//! SYSTEM is `shm`, `tcp`, `mixed` (two ranks a host), or `bare`: the same bytes as an all-reduce moves,
//! over plain sockets, without arithmetic. CASE is `operation:bytes:iterations`. Rank 0 prints one line of
//! JSON for each case: the median and the least time of one operation in microseconds.
//!
//! `collectives arithmetic` needs no place: it times the reduction alone, of two inputs that stay in the
//! cache, beside a copy of one of them.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use half::{bf16, f16};
use muster_runtime::WorkerEnv;
use muster_runtime::collective::{Element, Group, GroupConfig, Layout, Op, Sharing};

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let system = args.next().ok_or("which system?")?;
    if system == "arithmetic" {
        reduction::<f32>("f32");
        reduction::<f64>("f64");
        reduction::<f16>("f16");
        reduction::<bf16>("bf16");
        reduction::<i8>("i8");
        reduction::<u64>("u64");
        return Ok(());
    }
    let env = WorkerEnv::from_env()?;
    let sharing = match system.as_str() {
        "shm" => Sharing::Auto,
        "tcp" | "bare" => Sharing::Off,
        "mixed" => Sharing::Among(u64::from(env.rank / 2)),
        other => return Err(format!("no system {other}").into()),
    };
    let mut group = Group::form(&GroupConfig {
        sharing,
        ..GroupConfig::from_env(&env)
    })?;
    let mut bare = match system.as_str() {
        "bare" => Some(Bare::connect(&mut group)?),
        _ => None,
    };
    for case in args {
        let parts: Vec<&str> = case.split(':').collect();
        let [operation, bytes, iterations] = parts[..] else {
            return Err(format!("not operation:bytes:iterations: {case}").into());
        };
        let (bytes, iterations): (usize, usize) = (bytes.parse()?, iterations.parse()?);
        let times = match &mut bare {
            Some(bare) => {
                let mut buffers = Buffers::new(&group, operation, bytes);
                measure(&mut group, iterations, |_| bare.run(&mut buffers))?
            }
            None => {
                let mut buffers = Buffers::new(&group, operation, bytes);
                measure(&mut group, iterations, |group| {
                    run(group, operation, &mut buffers)
                })?
            }
        };
        if env.rank == 0 {
            let (median, least) = (times[times.len() / 2], times[0]);
            println!(
                "{{\"case\": \"{operation}:{bytes}\", \"median\": {:.2}, \"least\": {:.2}}}",
                median.as_secs_f64() * 1e6,
                least.as_secs_f64() * 1e6
            );
        }
    }
    Ok(())
}

/// Times the reduction of two inputs of 64 KiB, its allocation included, and a copy with the same.
fn reduction<T: Element>(name: &str) {
    let input = vec![T::zeroed(); (64 << 10) / size_of::<T>()];
    let layout = Layout::new(vec![vec![0, 1]]);
    let best = |work: &dyn Fn() -> Option<Vec<T>>| {
        let times = (0..2000).map(|_| {
            let began = Instant::now();
            std::hint::black_box(work());
            began.elapsed()
        });
        let least = times.min().unwrap_or_default();
        (64 << 10) as f64 / least.as_secs_f64() / 1e9
    };
    let reduced = best(&|| layout.as_ref()?.reduce(Op::Sum, &[&input, &input]));
    let copied = best(&|| {
        let mut out = vec![T::zeroed(); input.len()];
        out.copy_from_slice(std::hint::black_box(&input));
        Some(out)
    });
    println!(
        "{{\"case\": \"{name}\", \"reduced\": {reduced:.1}, \"copied\": {copied:.1}, \"unit\": \"GB/s\"}}"
    );
}

/// The sorted times of so many operations, after some that do not count.
fn measure(
    group: &mut Group,
    iterations: usize,
    mut operation: impl FnMut(&mut Group) -> Result<(), Box<dyn Error>>,
) -> Result<Vec<Duration>, Box<dyn Error>> {
    for _ in 0..iterations.div_ceil(5) {
        operation(group)?;
    }
    group.barrier()?;
    let mut times = Vec::with_capacity(iterations);
    for _ in 0..iterations {
        let began = Instant::now();
        operation(group)?;
        times.push(began.elapsed());
    }
    times.sort_unstable();
    Ok(times)
}

struct Buffers {
    input: Vec<f32>,
    output: Vec<f32>,
}

impl Buffers {
    fn new(group: &Group, operation: &str, bytes: usize) -> Buffers {
        let world = group.world() as usize;
        let len = (bytes / 4).next_multiple_of(if operation == "all_to_all" { world } else { 1 });
        let output = match operation {
            "all_gather" => len * world,
            "reduce_scatter" => group.part(len, group.rank()).len(),
            _ => len,
        };
        Buffers {
            input: vec![1.0; len],
            output: vec![0.0; output],
        }
    }
}

fn run(group: &mut Group, operation: &str, buffers: &mut Buffers) -> Result<(), Box<dyn Error>> {
    let Buffers { input, output } = buffers;
    match operation {
        "all_reduce" => group.all_reduce(Op::Sum, input, output)?,
        "reduce_scatter" => group.reduce_scatter(Op::Sum, input, output)?,
        "all_gather" => group.all_gather(input, output)?,
        "broadcast" => group.broadcast(0, input, output)?,
        "all_to_all" => group.all_to_all(input, output)?,
        "barrier" => group.barrier()?,
        other => return Err(format!("no operation {other}").into()),
    }
    Ok(())
}

/// A blocking connection with each other rank.
struct Bare {
    peers: Vec<TcpStream>,
}

impl Bare {
    fn connect(group: &mut Group) -> Result<Bare, Box<dyn Error>> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let mut ports = vec![0; group.world() as usize];
        group.all_gather(&[listener.local_addr()?.port()], &mut ports)?;
        let mut peers = Vec::new();
        for port in &ports[..group.rank() as usize] {
            peers.push(TcpStream::connect(("127.0.0.1", *port))?);
        }
        for _ in group.rank() + 1..group.world() {
            peers.push(listener.accept()?.0);
        }
        for peer in &peers {
            peer.set_nodelay(true)?;
        }
        Ok(Bare { peers })
    }

    /// Small: everything to everybody. Large: twice a part to each, as an all-reduce of parts does, with a
    /// thread for each direction of each connection.
    fn run(&mut self, buffers: &mut Buffers) -> Result<(), Box<dyn Error>> {
        let bytes: &[u8] = bytemuck::cast_slice(&buffers.input);
        let into: &mut [u8] = bytemuck::cast_slice_mut(&mut buffers.output);
        if bytes.len() <= 16 << 10 {
            for peer in &mut self.peers {
                peer.write_all(bytes)?;
            }
            for peer in &mut self.peers {
                peer.read_exact(into)?;
            }
            return Ok(());
        }
        let part = bytes.len() / (self.peers.len() + 1);
        std::thread::scope(|scope| {
            for (mut peer, into) in self.peers.iter().zip(into.chunks_mut(part)) {
                let sent = &bytes[..part];
                scope.spawn(move || (0..2).try_for_each(|_| peer.write_all(sent)));
                scope.spawn(move || (0..2).try_for_each(|_| peer.read_exact(into)));
            }
        });
        Ok(())
    }
}
