//! Ranks that are processes: one that is killed, and one whose abort never returns.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use muster_runtime::collective::nccl::{Communicator, Config, NcclError};
use muster_runtime::collective::{Element, Group, GroupConfig, GroupError, Op, Sharing};

use super::common::{Rank, free_port};
use super::support::{
    AFTER, BOUND, buffers, config, group_config, input, library, read, script, standin,
};

const WORKER_ENV: &str = "MUSTER_TEST_NCCL";
const LEN: usize = 50_000;

/// Not a test of its own: what the other tests start as a rank, by the plan `RANK WORLD PORT NEXT HOW`. When a
/// rank is lost, the others form the next generation at the port `NEXT`, and do one operation in it.
#[test]
fn rank_process() {
    let Ok(plan) = std::env::var(WORKER_ENV) else {
        return;
    };
    let words: Vec<&str> = plan.split(' ').collect();
    let [rank, world, port, next, how] = words[..] else {
        panic!("{plan}");
    };
    let (rank, world): (u32, u32) = (rank.parse().unwrap(), world.parse().unwrap());
    let sharing = if how == "tcp" {
        Sharing::Off
    } else {
        Sharing::Auto
    };
    let at = |port: &str, rank, world| GroupConfig {
        sharing,
        ..group_config(rank, world, port.parse().unwrap())
    };
    let library = library();
    let config = Config {
        abort_within: Duration::from_millis(500),
        ..config()
    };
    let mut group = Group::form(&at(port, rank, world)).unwrap();
    if how == "late" {
        group.set_op_within(Duration::from_millis(500));
    }
    let mut nccl = Communicator::form(&library, rank, &mut group, config.clone()).unwrap();
    let values: Vec<f32> = input(rank, LEN, |x| x as f32);
    let (from, to) = buffers(nccl.device(), &values, LEN);
    // SAFETY: both live as long as the process.
    let (own, all) = unsafe { (from.elements(f32::DTYPE), to.elements(f32::DTYPE)) };
    let mut done = 0u64;
    let error = loop {
        let ticket = nccl.all_reduce(Op::Sum, own, all, AFTER);
        match ticket.and_then(|ticket| nccl.wait(ticket)) {
            Ok(()) => done += 1,
            Err(error) => break error,
        }
        if done == 20 {
            println!("@going");
        }
    };
    let error = nccl.blame(error, &mut group);
    let untouched = read::<f32>(&from, LEN) == values;
    let NcclError::Group(GroupError::PeerLost { rank: lost, .. }) = error else {
        panic!("{error}");
    };
    println!("@lost {lost} {untouched}");
    drop((nccl, group));
    // As the launcher would say it: the survivors keep their order.
    let survivor = rank - u32::from(rank > lost);
    let mut group = Group::form(&at(next, survivor, world - 1)).unwrap();
    // The stand-in's faults were those of the first generation.
    script("none");
    let mut nccl = Communicator::form(&library, rank, &mut group, config).unwrap();
    let ticket = nccl.all_reduce(Op::Sum, own, all, AFTER).unwrap();
    nccl.wait(ticket).unwrap();
    let expected: f32 = (0..world)
        .filter(|rank| *rank != lost)
        .map(|rank| input(rank, LEN, |x| x as f32)[LEN - 1])
        .sum();
    let right = read::<f32>(&to, LEN)[LEN - 1] == expected;
    nccl.close(&mut group).unwrap();
    println!("@again {right}");
}

fn ends(rank: &mut Rank) -> ExitStatus {
    let until = Instant::now() + BOUND;
    loop {
        if let Some(status) = rank.child.try_wait().unwrap() {
            return status;
        }
        assert!(Instant::now() < until, "still there after {BOUND:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn start(world: u32, how: &str, faults: &str) -> Vec<Rank> {
    // Compiled before they all want it.
    standin();
    let (port, next) = (free_port(), free_port());
    let variables = |rank: u32| {
        [
            (WORKER_ENV, format!("{rank} {world} {port} {next} {how}")),
            ("MUSTER_STANDIN_NCCL", faults.to_owned()),
        ]
    };
    (0..world)
        .map(|rank| Rank::start("processes::rank_process", &variables(rank)))
        .collect()
}

mod real {
    use muster_runtime::collective::nccl::STUCK_EXIT;

    use super::*;

    #[test]
    fn a_rank_killed_in_the_middle_is_named_and_the_others_go_on() {
        for how in ["shm", "tcp"] {
            for dead in [0, 2] {
                let mut ranks = start(4, how, "");
                for rank in &ranks {
                    assert_eq!(rank.line(), "@going");
                }
                ranks[dead].child.kill().unwrap();
                let began = Instant::now();
                let mut last = Duration::ZERO;
                for (rank, process) in ranks.iter().enumerate().filter(|(r, _)| *r != dead) {
                    assert_eq!(process.line(), format!("@lost {dead} true"), "rank {rank}");
                    last = began.elapsed();
                }
                println!("{how}: all know that rank {dead} was killed after {last:?}");
                for process in ranks.iter().enumerate().filter(|(r, _)| *r != dead) {
                    assert_eq!(process.1.line(), "@again true");
                }
                println!("{how}: all went on after {:?}", began.elapsed());
                assert_eq!(ends(&mut ranks[dead]).signal(), Some(9));
            }
        }
    }

    #[test]
    fn an_abort_that_never_returns_ends_its_process_and_no_other() {
        let mut ranks = start(3, "late", "hang:1:30;abort-stuck:1");
        for rank in &ranks {
            assert_eq!(rank.line(), "@going");
        }
        assert_eq!(ends(&mut ranks[1]).code(), Some(STUCK_EXIT));
        for rank in [0, 2] {
            assert_eq!(ranks[rank].line(), "@lost 1 true");
            assert_eq!(ranks[rank].line(), "@again true");
            assert!(ends(&mut ranks[rank]).success());
        }
    }
}
