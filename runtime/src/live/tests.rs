//! Proof by replay: ranks are killed at every point of a step, and what the survivors hold at the
//! end is, bit for bit, what one process gets that replays the log of who worked on which step.

mod bed;
mod landing;
mod leaks;
mod quality;
mod trained;
mod transfer;

use std::cell::Cell;
use std::collections::BTreeMap;

use super::*;
use crate::collective::{Group, Op};
use bed::{Job, Rank};

const BUCKETS: usize = 3;
const WIDTH: usize = 5;
const SAMPLES: usize = 12;

/// Where a rank is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Point {
    BeforeStep,
    /// Its part of this bucket is never sent.
    BeforeBucket(usize),
    AfterBucket(usize),
    BeforeCommit,
    InsideCommit,
    /// Whatever the step: where the state is to be handed to a newcomer, and in the step after.
    Handing,
    AfterHanding,
    /// Whatever the step: where the copy of the state is complete.
    Copied,
}

/// The ranks that worked on a step.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    step: u64,
    entered: Vec<u32>,
}

#[derive(Clone, Debug)]
struct Results {
    entry: Entry,
    sums: Vec<f32>,
}

#[derive(Debug)]
struct Model {
    parameters: Vec<f32>,
    log: Vec<Entry>,
    kill: Option<(u64, Point)>,
    handed: Cell<bool>,
    /// Its results are known to be few: all hear from each other inside the step, and not before it.
    few: bool,
}

/// One sample's gradient: rounding makes the sum depend on who adds what to what.
fn gradient(parameters: &[f32], step: u64, sample: usize, bucket: usize) -> Vec<f32> {
    let at = bucket * WIDTH;
    let mix = (step as f32 + 1.37) * (sample as f32 + 0.71);
    parameters[at..at + WIDTH]
        .iter()
        .map(|p| (p * 0.31 + mix.sin()) / 7.0)
        .collect()
}

/// A rank's part of a bucket.
fn part(parameters: &[f32], step: u64, share: &Share, rank: u32, bucket: usize) -> Vec<f32> {
    let mut sum = vec![0.0; WIDTH];
    for sample in share.part_of(rank, SAMPLES) {
        for (sum, g) in sum
            .iter_mut()
            .zip(gradient(parameters, step, sample, bucket))
        {
            *sum += g;
        }
    }
    sum
}

fn apply(parameters: &mut [f32], sums: &[f32]) {
    for (p, sum) in parameters.iter_mut().zip(sums) {
        *p -= 0.05 * sum / SAMPLES as f32;
    }
}

fn initial() -> Vec<f32> {
    (0..BUCKETS * WIDTH).map(|i| (i as f32).cos()).collect()
}

/// One process that does what the log says. All ranks share memory here, so sums go by rank.
fn replay(log: &[Entry]) -> Vec<f32> {
    let mut parameters = initial();
    for entry in log {
        let share = Share {
            entered: entry.entered.clone(),
            rank: 0,
            world: 0,
        };
        let mut sums = Vec::new();
        for bucket in 0..BUCKETS {
            let mut sum = vec![0.0; WIDTH];
            for (i, rank) in entry.entered.iter().enumerate() {
                let own = part(&parameters, entry.step, &share, *rank, bucket);
                for (sum, own) in sum.iter_mut().zip(own) {
                    *sum = if i == 0 { own } else { *sum + own };
                }
            }
            sums.extend(sum);
        }
        apply(&mut parameters, &sums);
    }
    parameters
}

impl Model {
    fn new(kill: Option<(u64, Point)>) -> Model {
        Model {
            parameters: Vec::new(),
            log: Vec::new(),
            kill,
            handed: Cell::new(false),
            few: false,
        }
    }

    fn with_few(self, few: bool) -> Model {
        Model { few, ..self }
    }

    /// Ends this rank like SIGKILL: nothing it would still say is said.
    fn die_at(&self, step: u64, point: Point) {
        if self.kill == Some((step, point)) {
            std::panic::resume_unwind(Box::new("killed"));
        }
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes
        .as_chunks()
        .0
        .iter()
        .map(|b| f32::from_le_bytes(*b))
        .collect()
}

impl Training for Model {
    type Results = Results;

    fn results(&mut self, step: u64, share: &Share, group: &mut Group) -> Result<Results, Fault> {
        self.die_at(step, Point::BeforeStep);
        let mut sums = vec![0.0; BUCKETS * WIDTH];
        for bucket in 0..BUCKETS {
            self.die_at(step, Point::BeforeBucket(bucket));
            if bucket == 1 && self.handed.get() {
                self.die_at(0, Point::AfterHanding);
            }
            // A listener has no state yet, and adds nothing.
            let own = match share.part(SAMPLES).is_empty() {
                true => vec![0.0; WIDTH],
                false => part(&self.parameters, step, share, share.rank, bucket),
            };
            let out = &mut sums[bucket * WIDTH..(bucket + 1) * WIDTH];
            group.all_reduce(Op::Sum, &own, out)?;
            self.die_at(step, Point::AfterBucket(bucket));
        }
        self.die_at(step, Point::BeforeCommit);
        let entered = share.entered.clone();
        let entry = Entry { step, entered };
        Ok(Results { entry, sums })
    }

    fn commit(&mut self, step: u64, results: &Results) {
        assert_eq!(step, results.entry.step);
        assert_eq!(step, self.log.len() as u64, "in order, each once");
        let half = results.sums.len() / 2;
        apply(&mut self.parameters[..half], &results.sums[..half]);
        self.die_at(step, Point::InsideCommit);
        apply(&mut self.parameters[half..], &results.sums[half..]);
        self.log.push(results.entry.clone());
    }

    fn results_len(&self) -> Option<usize> {
        self.few.then_some(size_of::<[f32; BUCKETS * WIDTH]>())
    }

    fn encode_results(&self, results: &Results) -> Vec<u8> {
        let mut out = encode_log(std::slice::from_ref(&results.entry));
        out.extend(results.sums.iter().flat_map(|x| x.to_le_bytes()));
        out
    }

    fn decode_results(&self, bytes: &[u8]) -> Option<Results> {
        let (log, rest) = decode_log(bytes)?;
        Some(Results {
            entry: log.into_iter().next()?,
            sums: floats(rest),
        })
    }

    fn encode_state(&self) -> Vec<u8> {
        self.die_at(0, Point::Handing);
        self.handed.set(true);
        let mut out = encode_log(&self.log);
        out.extend(self.parameters.iter().flat_map(|x| x.to_le_bytes()));
        out
    }

    fn decode_state(&mut self, bytes: &[u8]) -> bool {
        self.die_at(0, Point::Copied);
        let Some((log, rest)) = decode_log(bytes) else {
            return false;
        };
        (self.log, self.parameters) = (log, floats(rest));
        true
    }

    fn restore(&mut self, group: &mut Group) -> Result<u64, Fault> {
        group.barrier()?;
        (self.log, self.parameters) = (Vec::new(), initial());
        Ok(0)
    }
}

fn encode_log(log: &[Entry]) -> Vec<u8> {
    let list: Vec<(u64, &Vec<u32>)> = log.iter().map(|e| (e.step, &e.entered)).collect();
    let body = serde_json::to_vec(&list).unwrap();
    let mut out = (body.len() as u64).to_le_bytes().to_vec();
    out.extend(body);
    out
}

fn decode_log(bytes: &[u8]) -> Option<(Vec<Entry>, &[u8])> {
    let (len, rest) = bytes.split_first_chunk()?;
    let (body, rest) = rest.split_at_checked(u64::from_le_bytes(*len) as usize)?;
    let list: Vec<(u64, Vec<u32>)> = serde_json::from_slice(body).ok()?;
    let log = list
        .into_iter()
        .map(|(step, entered)| Entry { step, entered });
    Some((log.collect(), rest))
}

impl Job<Model> {
    /// The first generation. `kills`: which rank is killed where; `few`: whether results are known to be few.
    fn start(world: usize, few: bool, kills: &BTreeMap<usize, (u64, Point)>) -> Job<Model> {
        let model = move |kill| Model::new(kill).with_few(few);
        let first = (0..world).map(|rank| model(kills.get(&rank).copied()));
        Job::of(first.collect(), move || model(None))
    }

    /// Stops all at a boundary they share, and compares each with a replay of its log.
    fn finish(mut self, case: &str) {
        let then = self.newest() + 5;
        self.until(then);
        self.ranks.iter().for_each(Rank::end);
        let mut ends = Vec::new();
        for rank in self.ranks {
            drop(rank.orders);
            let model = rank.thread.join().expect("lives");
            ends.push((model.parameters, model.log));
        }
        let shortest = ends.iter().map(|(_, log)| log.len()).min().unwrap();
        for (parameters, log) in &ends {
            assert_eq!(
                log[..shortest],
                ends[0].1[..shortest],
                "{case}: one history"
            );
            let replayed = replay(log);
            let bits = |p: &[f32]| p.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(parameters), bits(&replayed), "{case}: {log:?}");
        }
        let steps: Vec<u64> = ends[0].1.iter().map(|e| e.step).collect();
        assert!(steps.iter().copied().eq(0..steps.len() as u64), "{case}");
    }
}

/// With results of any length, and with few.
const BOTH: [bool; 2] = [false, true];

#[test]
fn survivors_go_on_bit_identical_wherever_a_rank_is_killed() {
    let mut points = vec![Point::BeforeStep, Point::BeforeCommit, Point::InsideCommit];
    points.extend((0..BUCKETS).flat_map(|b| [Point::BeforeBucket(b), Point::AfterBucket(b)]));
    for point in points {
        for (victim, few) in (0..3).flat_map(|victim| BOTH.map(|few| (victim, few))) {
            let case = format!("rank {victim} killed at {point:?}, few results: {few}");
            let mut job = Job::start(3, few, &BTreeMap::from([(victim, (4, point))]));
            job.until_dead(1);
            job.regroup(0);
            job.until(8);
            // Another comes, while the two go on.
            job.regroup(1);
            job.finish(&case);
        }
    }
}

#[test]
fn two_at_once_and_one_more_in_the_next_step() {
    let kills = BTreeMap::from([
        (1, (3, Point::AfterBucket(0))),
        (2, (3, Point::AfterBucket(1))),
        (0, (4, Point::BeforeBucket(2))),
    ]);
    for few in BOTH {
        let mut job = Job::start(5, few, &kills);
        job.until_dead(1);
        job.regroup(0);
        // Ranks that were to be killed in step 3 or 4 meet it again when it is redone.
        while job.ranks.len() > 2 {
            job.until_dead(1);
            job.regroup(0);
        }
        job.until(8);
        job.finish("three of five are killed");
    }
}

#[test]
fn a_newcomer_comes_while_another_is_copying() {
    for few in BOTH {
        let mut job = Job::start(2, few, &BTreeMap::new());
        job.until(3);
        for _ in 0..4 {
            job.regroup(1);
        }
        job.finish("four join at once");
    }
}

#[test]
fn who_is_alone_goes_on_and_hands_its_state_to_who_comes() {
    for few in BOTH {
        let killed = BTreeMap::from([(0, (2, Point::InsideCommit))]);
        let mut job = Job::start(2, few, &killed);
        job.until_dead(1);
        job.regroup(0);
        job.until(6);
        job.regroup(2);
        job.finish("one is left, two come");
    }
}
