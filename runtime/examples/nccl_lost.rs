//! Ranks of NCCL that are processes, of which one is killed: `nccl_lost [LIBNCCL [LIBCUDA [RANKS [kill|stop
//! [RANK]]]]]`.
//!
//! The others are to name it, abort, form the next group without it, and be right there. Times are from the signal on.
//! Each rank takes the GPU of its own number, as far as there are. Where there are fewer, ranks share them: each seems
//! to NCCL to be on a host of its own (`NCCL_HOSTID`), and all traffic goes through sockets. Muster refuses that,
//! unless LIBCUDA gives the device another id in each process. Ends with code 1 where something is missing or wrong.

use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use muster_runtime::collective::nccl::{Communicator, Config, Library, NcclError, RawStream};
use muster_runtime::collective::{Element, Group, GroupConfig, GroupError, Op, Sharing};

type Failure = Box<dyn std::error::Error>;

const PLAN: &str = "NCCL_LOST_PLAN";
const LEN: usize = 50_000;
const BOUND: Duration = Duration::from_secs(60);
/// Time that an operation may take, and so how soon a rank that stands still is noticed.
const OP_WITHIN: Duration = Duration::from_secs(3);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match std::env::var(PLAN) {
        Ok(plan) => rank(&args, &plan),
        Err(_) => lose(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nccl_lost: {error}");
            ExitCode::FAILURE
        }
    }
}

fn values(rank: u32) -> Vec<f32> {
    (0..LEN).map(|i| ((i + rank as usize) % 7) as f32).collect()
}

/// One rank: operations until one fails, then the next group without the lost one.
fn rank(args: &[String], plan: &str) -> Result<(), Failure> {
    let words: Vec<u32> = plan.split(' ').map(str::parse).collect::<Result<_, _>>()?;
    let [rank, world, port, next, gpus] = words[..] else {
        return Err("no plan".into());
    };
    let at = |port: u32, rank, world| -> Result<GroupConfig, Failure> {
        Ok(GroupConfig {
            rank,
            world,
            master: Some(("127.0.0.1".to_owned(), u16::try_from(port)?)),
            token: [9; 32],
            digest: [7; 32],
            sharing: Sharing::Auto,
            form_within: BOUND,
            op_within: BOUND,
        })
    };
    let (nccl, cuda) = (Path::new(&args[0]), Path::new(&args[1]));
    let library = Library::load_from(nccl, cuda)?;
    let mut group = Group::form(&at(port, rank, world)?)?;
    let mut nccl = Communicator::form(&library, rank % gpus, &mut group, Config::default())?;
    group.set_op_within(OP_WITHIN);
    let values = values(rank);
    let (from, to) = (
        nccl.device().upload(&values)?,
        nccl.device().alloc(4 * LEN)?,
    );
    // SAFETY: both live as long as the process.
    let (own, all) = unsafe { (from.elements(f32::DTYPE), to.elements(f32::DTYPE)) };
    let mut done = 0u64;
    let error = loop {
        let ticket = nccl.all_reduce(Op::Sum, own, all, RawStream::DEFAULT);
        match ticket.and_then(|ticket| nccl.wait(ticket)) {
            Ok(()) => done += 1,
            Err(error) => break error,
        }
        if done == 20 {
            println!("going");
        }
    };
    let error = nccl.blame(error, &mut group);
    let mut read = vec![0f32; LEN];
    from.read(&mut read)?;
    let untouched = if read == values {
        "inputs as they were"
    } else {
        "INPUTS CHANGED"
    };
    println!("{error}; {untouched}");
    let NcclError::Group(GroupError::PeerLost { rank: lost, .. }) = error else {
        return Ok(());
    };
    drop((nccl, group));
    // As the launcher would say it: the survivors keep their order.
    let survivor = rank - u32::from(rank > lost);
    let mut group = Group::form(&at(next, survivor, world - 1)?)?;
    let mut nccl = Communicator::form(&library, rank % gpus, &mut group, Config::default())?;
    let ticket = nccl.all_reduce(Op::Sum, own, all, RawStream::DEFAULT)?;
    nccl.wait(ticket)?;
    to.read(&mut read)?;
    let others = (0..world).filter(|rank| *rank != lost);
    let sums = others
        .map(self::values)
        .reduce(|a, b| a.iter().zip(b).map(|(a, b)| a + b).collect());
    println!(
        "{}",
        if Some(&read) == sums.as_ref() {
            "again"
        } else {
            "WRONG"
        }
    );
    nccl.close(&mut group)?;
    Ok(())
}

struct Rank(Child, Receiver<(Instant, String)>);

impl Rank {
    fn line(&self) -> Result<(Instant, String), Failure> {
        Ok(self.1.recv_timeout(BOUND)?)
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn lose(args: &[String]) -> Result<(), Failure> {
    let arg = |at: usize, otherwise: &str| {
        args.get(at)
            .cloned()
            .unwrap_or_else(|| otherwise.to_owned())
    };
    let (nccl, cuda) = (arg(0, "libnccl.so.2"), arg(1, "libcuda.so.1"));
    let (world, how): (u32, String) = (arg(2, "4").parse()?, arg(3, "kill"));
    let names = std::fs::read_dir("/dev")?
        .flatten()
        .map(|entry| entry.file_name());
    let gpus = names.filter(|name| {
        let number = name.to_str().and_then(|name| name.strip_prefix("nvidia"));
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    });
    let gpus = u32::try_from(gpus.count())?.max(1);
    let ports = [
        TcpListener::bind("127.0.0.1:0")?,
        TcpListener::bind("127.0.0.1:0")?,
    ];
    let [port, next] = [ports[0].local_addr()?.port(), ports[1].local_addr()?.port()];
    drop(ports);
    let mut ranks = Vec::new();
    let began = Instant::now();
    for rank in 0..world {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([&nccl, &cuda]).stdout(Stdio::piped());
        command.env(PLAN, format!("{rank} {world} {port} {next} {gpus}"));
        if gpus < world {
            command.env("NCCL_HOSTID", format!("host-{rank}"));
        }
        let mut child = command.spawn()?;
        let out = BufReader::new(child.stdout.take().ok_or("no output")?);
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                let _ = send.send((Instant::now(), line));
            }
        });
        ranks.push(Rank(child, lines));
    }
    for rank in &ranks {
        rank.line()?;
    }
    println!(
        "{world} ranks of {gpus} GPUs: 20 operations after {:.1?}",
        began.elapsed()
    );
    let lost: usize = arg(4, "2").parse::<usize>()?.min(ranks.len() - 1);
    let signal = if how == "stop" {
        libc::SIGSTOP
    } else {
        libc::SIGKILL
    };
    // SAFETY: it is a child that was not waited for.
    unsafe { libc::kill(ranks[lost].0.id().cast_signed(), signal) };
    let began = Instant::now();
    println!("rank {lost} gets signal {signal}");
    let named = format!("rank {lost} is lost");
    for expected in [&[&named[..], "inputs as they were"][..], &["again"]] {
        for (number, rank) in ranks.iter().enumerate() {
            if number == lost {
                continue;
            }
            let (at, line) = rank.line()?;
            let after = (at - began).as_secs_f64();
            println!("rank {number} after {after:.3} s: {line}");
            if !expected.iter().all(|part| line.contains(part)) {
                return Err(format!("rank {number} was to say {expected:?}").into());
            }
        }
    }
    Ok(())
}
