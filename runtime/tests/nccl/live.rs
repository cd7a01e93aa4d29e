//! A live training whose collectives go through NCCL: a rank dies between the buckets of a step, and the
//! survivors stay in their process, form the next communicator, and end with the bits that one process
//! gets from the log.

use std::fs::File;
use std::io::Write;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use muster_protocol::Digest;
use muster_protocol::control::fresh_page;
use muster_protocol::control::live::{Assignment, CAN_REASSIGN, Term, word};
use muster_runtime::Session;
use muster_runtime::collective::nccl::{Communicator, Library, NcclError};
use muster_runtime::collective::{Element, Group, Op};
use muster_runtime::live::{Fault, Patience, Share, Training, Worker};

use super::common::port::HeldPort;
use super::support::*;

const BUCKETS: usize = 2;
const WIDTH: usize = 50;
const SAMPLES: usize = 12;
const KILLED_AT: u64 = 5;
const STEPS: u64 = 12;

/// A step, and how many ranks worked on it.
type Entry = (u64, u32);

struct Gpu {
    library: Arc<Library>,
    device: u32,
    communicator: Option<Communicator>,
    /// Communicators that were formed.
    formed: u32,
    parameters: Vec<f32>,
    log: Vec<Entry>,
    dies: bool,
}

/// A rank's part of a bucket. Rounding makes the sum depend on who adds what to what.
fn part(parameters: &[f32], step: u64, samples: std::ops::Range<usize>, bucket: usize) -> Vec<f32> {
    let at = bucket * WIDTH;
    let mut sum = vec![0.0; WIDTH];
    for sample in samples {
        let mix = (step as f32 + 1.37) * (sample as f32 + 0.71);
        for (sum, p) in sum.iter_mut().zip(&parameters[at..at + WIDTH]) {
            *sum += (p * 0.31 + mix.sin()) / 7.0;
        }
    }
    sum
}

fn initial() -> Vec<f32> {
    (0..BUCKETS * WIDTH).map(|i| (i as f32).cos()).collect()
}

fn apply(parameters: &mut [f32], sums: &[f32]) {
    for (p, sum) in parameters.iter_mut().zip(sums) {
        *p -= 0.05 * sum / SAMPLES as f32;
    }
}

fn share(rank: u32, world: u32) -> Share {
    Share {
        entered: (0..world).collect(),
        rank,
        world,
    }
}

/// One process that does what the log says.
fn replay(log: &[Entry]) -> Vec<f32> {
    let mut parameters = initial();
    for (step, world) in log {
        let mut sums = Vec::new();
        for bucket in 0..BUCKETS {
            let parts = (0..*world).map(|rank| {
                let samples = share(rank, *world).part(SAMPLES);
                part(&parameters, *step, samples, bucket)
            });
            let add = |a: Vec<f32>, b: Vec<f32>| a.iter().zip(&b).map(|(a, b)| a + b).collect();
            sums.extend(parts.reduce(add).unwrap());
        }
        apply(&mut parameters, &sums);
    }
    parameters
}

impl Gpu {
    fn reduce(
        &mut self,
        step: u64,
        share: &Share,
        group: &mut Group,
    ) -> Result<Vec<f32>, NcclError> {
        if !self.communicator.as_ref().is_some_and(|c| c.is_of(group)) {
            self.communicator = None;
            let formed = Communicator::form(&self.library, self.device, group, config())?;
            self.communicator = Some(formed);
            self.formed += 1;
        }
        let nccl = self.communicator.as_mut().unwrap();
        let mut memories = Vec::new();
        for bucket in 0..BUCKETS {
            if bucket == 1 && self.dies && step == KILLED_AT {
                std::panic::resume_unwind(Box::new("killed"));
            }
            let own = part(&self.parameters, step, share.part(SAMPLES), bucket);
            memories.push(buffers(nccl.device(), &own, WIDTH));
        }
        let mut reduced = Ok(());
        for (from, to) in &memories {
            // SAFETY: they outlive the operations, which are waited for here.
            let (from, to) = unsafe { (from.elements(f32::DTYPE), to.elements(f32::DTYPE)) };
            reduced = reduced.and_then(|()| nccl.all_reduce(Op::Sum, from, to, AFTER).map(drop));
        }
        let done = reduced.and_then(|()| nccl.wait_all());
        done.map_err(|error| nccl.blame(error, group))?;
        Ok(memories
            .iter()
            .flat_map(|(_, to)| read::<f32>(to, WIDTH))
            .collect())
    }
}

impl Training for Gpu {
    type Results = (u32, Vec<f32>);

    fn results(
        &mut self,
        step: u64,
        share: &Share,
        group: &mut Group,
    ) -> Result<Self::Results, Fault> {
        match self.reduce(step, share, group) {
            Ok(sums) => Ok((share.world, sums)),
            Err(error) => Err(match error.into_group() {
                Ok(passes) => Fault::Group(passes),
                Err(error) => Fault::Training(Box::new(error)),
            }),
        }
    }

    fn commit(&mut self, step: u64, (world, sums): &Self::Results) {
        assert_eq!(step, self.log.len() as u64, "in order, each once");
        apply(&mut self.parameters, sums);
        self.log.push((step, *world));
    }

    fn encode_results(&self, (world, sums): &Self::Results) -> Vec<u8> {
        let mut out = world.to_le_bytes().to_vec();
        out.extend_from_slice(bytemuck::cast_slice(sums));
        out
    }

    fn decode_results(&self, bytes: &[u8]) -> Option<Self::Results> {
        let (world, sums) = bytes.split_first_chunk()?;
        let sums = sums
            .as_chunks()
            .0
            .iter()
            .map(|four| f32::from_le_bytes(*four));
        Some((u32::from_le_bytes(*world), sums.collect()))
    }

    fn encode_state(&self) -> Vec<u8> {
        Vec::new()
    }

    /// Nobody joins here.
    fn decode_state(&mut self, _bytes: &[u8]) -> bool {
        false
    }

    fn restore(&mut self, group: &mut Group) -> Result<u64, Fault> {
        group.barrier()?;
        (self.log, self.parameters) = (Vec::new(), initial());
        Ok(0)
    }
}

/// The page that a launcher shares with its worker.
struct Page(File);

impl Page {
    fn new() -> Page {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&fresh_page()).unwrap();
        let page = Page(file);
        page.store(word::FEATURES, CAN_REASSIGN);
        page
    }

    fn store(&self, at: usize, value: u64) {
        self.0
            .write_all_at(&value.to_le_bytes(), at as u64)
            .unwrap();
    }

    fn load(&self, at: usize) -> u64 {
        let mut bytes = [0; 8];
        self.0.read_exact_at(&mut bytes, at as u64).unwrap();
        u64::from_le_bytes(bytes)
    }

    fn assign(&self, number: u64, rank: u32, world: u32, port: u16) {
        let assignment = Assignment {
            term: Term::of(number, 0),
            rank,
            world,
            local_rank: 0,
            local_world: 1,
            node_rank: rank,
            nodes: world,
            restarts: 0,
            master: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            digest: Digest([number as u8; 32]),
            lineage: Digest([1; 32]),
        };
        let sequence = self.load(word::SEQUENCE);
        self.store(word::SEQUENCE, sequence + 1);
        for (at, value) in word::assignment().zip(assignment.encode()) {
            self.store(at, value);
        }
        self.store(word::SEQUENCE, sequence + 2);
    }
}

fn eventually(what: &str, holds: impl Fn() -> bool) {
    let until = Instant::now() + BOUND;
    while !holds() {
        assert!(Instant::now() < until, "not within {BOUND:?}: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn survivors_of_a_live_training_go_on_with_another_communicator() {
    let pages: Vec<Page> = (0..3).map(|_| Page::new()).collect();
    let (first, next) = (HeldPort::new(), HeldPort::new());
    for (rank, page) in (0..).zip(&pages) {
        page.assign(1, rank, 3, first.port());
    }
    let (library, over) = (library(), AtomicBool::new(false));
    let committed: Vec<AtomicU64> = (0..3).map(|_| AtomicU64::new(0)).collect();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..3)
            .map(|rank: u32| {
                let fd = pages[rank as usize].0.as_raw_fd();
                let (library, over) = (library.clone(), &over);
                let committed = &committed[rank as usize];
                scope.spawn(move || {
                    let mut session = Session::from_fd(fd).unwrap();
                    let training = Gpu {
                        library,
                        device: rank,
                        communicator: None,
                        formed: 0,
                        parameters: Vec::new(),
                        log: Vec::new(),
                        dies: rank == 1,
                    };
                    let patience = Patience {
                        form: BOUND,
                        assignment: Duration::from_millis(20),
                        ..Patience::default()
                    };
                    let worker = Worker::join(&mut session, training, patience);
                    let mut worker = worker.map_err(|_| "no live launcher").unwrap();
                    while !over.load(Ordering::Acquire) {
                        worker.advance().unwrap();
                        committed.store(worker.committed(), Ordering::Release);
                    }
                    let Gpu {
                        parameters,
                        log,
                        formed,
                        ..
                    } = &worker.training;
                    (parameters.clone(), log.clone(), *formed)
                })
            })
            .collect();
        eventually("the rank is dead", || ranks[1].is_finished());
        // The others leave by themselves, and park.
        for rank in [0, 2] {
            let parked = || Term(pages[rank].load(word::PARKED)) >= Term::of(1, 0);
            eventually("parked", parked);
            pages[rank].assign(2, rank as u32 / 2, 2, next.port());
        }
        eventually("both get on", || {
            [0, 2]
                .iter()
                .all(|rank| committed[*rank].load(Ordering::Acquire) >= STEPS)
        });
        over.store(true, Ordering::Release);
        for (rank, process) in ranks.into_iter().enumerate() {
            let end = process.join();
            if rank == 1 {
                assert!(end.is_err(), "it was to die");
                continue;
            }
            let (parameters, log, formed) = end.unwrap();
            assert_eq!(formed, 2, "one communicator for each generation");
            assert_eq!(
                log[KILLED_AT as usize],
                (KILLED_AT, 2),
                "redone by the survivors"
            );
            assert_eq!(log[KILLED_AT as usize - 1], (KILLED_AT - 1, 3));
            let expected = replay(&log);
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&parameters), bits(&expected), "rank {rank}");
        }
    });
}
