//! Leaks of generations that are over: none.

use std::time::Duration;

use super::super::*;
use super::bed::Job;
use crate::collective::{Group, Op};
use crate::testing::eventually;

/// A training of which nothing grows.
struct Still {
    state: Vec<f32>,
    /// A newcomer that dies in the middle of its second step.
    dies: bool,
    steps: u32,
}

const LEN: usize = 100_000;

impl Still {
    fn new(dies: bool) -> Still {
        Still {
            state: vec![0.0; LEN],
            dies,
            steps: 0,
        }
    }
}

impl Training for Still {
    type Results = Vec<f32>;

    fn results(&mut self, _: u64, share: &Share, group: &mut Group) -> Result<Vec<f32>, Fault> {
        self.steps += 1;
        if self.dies && self.steps > 2 {
            std::panic::resume_unwind(Box::new("killed"));
        }
        // So that steps do not eat the time of changes.
        std::thread::sleep(Duration::from_micros(200));
        let own = [f32::from(u8::from(share.entered.contains(&share.rank)))];
        let mut sum = vec![0.0];
        group.all_reduce(Op::Sum, &own, &mut sum)?;
        Ok(sum)
    }

    fn commit(&mut self, step: u64, results: &Vec<f32>) {
        self.state[step as usize % LEN] += results[0];
    }

    fn encode_results(&self, results: &Vec<f32>) -> Vec<u8> {
        bytemuck::cast_slice(results).to_vec()
    }

    fn decode_results(&self, bytes: &[u8]) -> Option<Vec<f32>> {
        Some(super::floats(bytes))
    }

    fn encode_state(&self) -> Vec<u8> {
        bytemuck::cast_slice(&self.state).to_vec()
    }

    fn decode_state(&mut self, bytes: &[u8]) -> bool {
        self.state = super::floats(bytes);
        true
    }

    fn restore(&mut self, group: &mut Group) -> Result<u64, Fault> {
        group.barrier()?;
        Ok(0)
    }
}

/// Resources of this process: descriptors, threads, and KiB of memory of its own.
#[derive(Clone, Copy, Debug)]
struct Holds {
    descriptors: usize,
    threads: usize,
    memory: usize,
}

impl Holds {
    fn now() -> Holds {
        let count = |folder: &str| std::fs::read_dir(folder).unwrap().count();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("RssAnon:"));
        let memory = line.unwrap().split_whitespace().nth(1).unwrap();
        Holds {
            descriptors: count("/proc/self/fd"),
            threads: count("/proc/self/task"),
            memory: memory.parse().unwrap(),
        }
    }

    fn is_no_more_than(self, before: Holds) -> bool {
        // Threads that are just ending; what the allocator keeps for the next one.
        self.descriptors <= before.descriptors
            && self.threads <= before.threads
            && self.memory <= before.memory + (16 << 10)
    }
}

/// A newcomer comes, copies and dies; the two others regroup again: two changes a round.
fn round(job: &mut Job<Still>) {
    job.regroup_with(vec![Still::new(true)]);
    job.until_dead(1);
    job.regroup(0);
    let then = job.newest() + 2;
    job.until(then);
}

fn changes_leave_nothing(rounds: usize) {
    let mut job = Job::of(vec![Still::new(false), Still::new(false)], || {
        Still::new(false)
    });
    job.until(3);
    // What is made once is made.
    (0..10).for_each(|_| round(&mut job));
    let before = Holds::now();
    (0..rounds).for_each(|_| round(&mut job));
    let after = Holds::now();
    println!("before {before:?}, after {} changes {after:?}", 2 * rounds);
    eventually("nothing is left", || Holds::now().is_no_more_than(before));
    let ends = job.ranks.into_iter().map(|rank| {
        rank.end();
        drop(rank.orders);
        rank.thread.join().expect("lives").state
    });
    let ends: Vec<Vec<f32>> = ends.collect();
    assert!(ends[0][..100] == ends[1][..100], "one history");
}

#[test]
fn a_thousand_changes_leave_nothing_behind() {
    changes_leave_nothing(500);
}
