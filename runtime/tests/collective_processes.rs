//! Collectives between real processes: the same bits everywhere, and ranks that are killed or stopped in
//! the middle of an operation.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test's helpers fail the test"
)]

mod common;

use std::time::{Duration, Instant};

use common::{Rank, free_port};
use muster_runtime::WorkerEnv;
use muster_runtime::collective::{Group, GroupConfig, GroupError, LossCause, Op, Sharing};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const WORKER_ENV: &str = "MUSTER_TEST_COLLECTIVE";
/// Elements of 64 MiB.
const LEN: usize = 16 << 20;

/// Not a test of its own: what the other tests start as a rank. It says what it does in lines that begin
/// with `@`.
#[test]
fn rank_process() {
    let Some(plan) = std::env::var_os(WORKER_ENV) else {
        return;
    };
    let plan = plan.into_string().unwrap();
    let (hosts, within) = plan.split_once(' ').unwrap();
    let env = WorkerEnv::from_env().unwrap();
    let sharing = match hosts {
        "tcp" => Sharing::Off,
        "shm" => Sharing::Auto,
        _ => Sharing::Among(u64::from(env.rank / 2)),
    };
    let mut group = Group::form(&GroupConfig {
        sharing,
        op_within: Duration::from_millis(within.parse().unwrap()),
        ..GroupConfig::from_env(&env)
    })
    .unwrap();
    let input: Vec<f32> = (0..LEN)
        .map(|i| (i % 1000) as f32 * 0.1 + env.rank as f32 / 3.0)
        .collect();
    let hash = |values: &[f32]| blake3::hash(bytemuck::cast_slice(values)).to_hex();
    let (before, mut output) = (hash(&input), vec![0.0; LEN]);
    loop {
        match group.all_reduce(Op::Mean, &input, &mut output) {
            Ok(()) => println!("@done {}", hash(&output)),
            Err(GroupError::PeerLost { rank, cause }) => {
                let silent = matches!(cause, LossCause::Silent(_) | LossCause::Reported);
                println!("@lost {rank} {silent} {}", before == hash(&input));
                std::process::exit(0);
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// The next line that is not about an operation that went well.
fn end(rank: &Rank) -> String {
    loop {
        let line = rank.line();
        if !line.starts_with("@done") {
            return line;
        }
    }
}

fn signal(rank: &Rank, signal: Signal) {
    kill(Pid::from_raw(rank.child.id().cast_signed()), signal).unwrap();
}

fn start(plan: &str, world: u32) -> Vec<Rank> {
    let port = free_port();
    let variables = |rank: u32| {
        [
            (WORKER_ENV, plan.to_owned()),
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", world.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", port.to_string()),
            ("MUSTER_GENERATION_DIGEST", "ab".repeat(32)),
        ]
    };
    (0..world)
        .map(|rank| Rank::start("rank_process", &variables(rank)))
        .collect()
}

mod real {
    use super::*;

    const WAYS: [&str; 3] = ["tcp", "shm", "mixed"];

    #[test]
    fn a_rank_killed_in_the_middle_is_named_by_all_others() {
        for way in WAYS {
            // The first rank of a host, and another one.
            for dead in [0, 3] {
                let ranks = start(&format!("{way} 30000"), 4);
                let first: Vec<String> = ranks.iter().map(Rank::line).collect();
                assert!(first.iter().all(|line| *line == first[0]), "{first:?}");
                assert!(first[0].starts_with("@done"), "{first:?}");
                // All are in operations of tens of milliseconds, one after the other.
                signal(&ranks[dead], Signal::SIGKILL);
                let began = Instant::now();
                for (rank, process) in ranks.iter().enumerate().filter(|(rank, _)| *rank != dead) {
                    let end = end(process);
                    let expected = format!("@lost {dead} ");
                    assert!(
                        end.starts_with(&expected) && end.ends_with("true"),
                        "{way}: rank {rank} says {end}, not {expected}"
                    );
                }
                println!(
                    "{way}: rank {dead} named by all after {:?}",
                    began.elapsed()
                );
                assert!(began.elapsed() < Duration::from_secs(10), "{way}");
            }
        }
    }

    #[test]
    fn a_rank_that_stops_is_named_when_the_time_is_over() {
        for way in WAYS {
            for dead in [0, 3] {
                let ranks = start(&format!("{way} 1500"), 4);
                let first: Vec<String> = ranks.iter().map(Rank::line).collect();
                assert!(first.iter().all(|line| *line == first[0]), "{first:?}");
                signal(&ranks[dead], Signal::SIGSTOP);
                for (rank, process) in ranks.iter().enumerate().filter(|(rank, _)| *rank != dead) {
                    let (end, expected) = (end(process), format!("@lost {dead} true true"));
                    assert_eq!(end, expected, "{way}: rank {rank}");
                }
            }
        }
    }
}
