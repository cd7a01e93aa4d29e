//! A live training whose sums are NCCL's: `nccl_live LIBNCCL STEPS [MILLISECONDS]`, a worker of `muster run`.
//!
//! Its steps add whole numbers, so every order of summation gives the same bits. At the end it does all steps again by
//! itself, and compares.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use muster_runtime::Session;
use muster_runtime::collective::nccl::{Communicator, Config, Library, NcclError, RawStream};
use muster_runtime::collective::{Element, Group, Op};
use muster_runtime::live::{Fault, Outcome, Patience, Share, Training, Worker};

type Failure = Box<dyn std::error::Error>;

const WIDTH: usize = 20_000;
const SAMPLES: usize = 12;
const BUCKETS: usize = 2;

struct Gpu {
    library: Arc<Library>,
    device: u32,
    communicator: Option<Communicator>,
    parameters: Vec<f32>,
    steps: u64,
    pause: Duration,
    last: Instant,
}

fn initial() -> Vec<f32> {
    (0..BUCKETS * WIDTH).map(|i| (i % 97) as f32).collect()
}

fn part(parameters: &[f32], step: u64, samples: std::ops::Range<usize>, bucket: usize) -> Vec<f32> {
    let at = bucket * WIDTH;
    let of = |p: &f32| -> f32 {
        let all = samples
            .clone()
            .map(|sample| (step as usize * 31 + sample * 7) as f32 % 13.0 + *p % 11.0);
        all.sum()
    };
    parameters[at..at + WIDTH].iter().map(of).collect()
}

fn apply(parameters: &mut [f32], sums: &[f32]) {
    for (p, sum) in parameters.iter_mut().zip(sums) {
        *p = (*p + sum) % 8191.0;
    }
}

fn say(text: &str) {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    println!(
        "{:.3} pid {}: {text}",
        since.as_secs_f64() % 1000.0,
        std::process::id()
    );
}

impl Gpu {
    fn reduce(
        &mut self,
        step: u64,
        share: &Share,
        group: &mut Group,
    ) -> Result<Vec<f32>, NcclError> {
        if !self.communicator.as_ref().is_some_and(|c| c.is_of(group)) {
            let began = Instant::now();
            self.communicator = None;
            let aborted = began.elapsed();
            let formed = Communicator::form(&self.library, self.device, group, Config::default())?;
            self.communicator = Some(formed);
            let world = share.world;
            say(&format!(
                "step {step}: the one before is gone after {aborted:.2?}, a communicator of {world} after {:.2?}",
                began.elapsed()
            ));
        }
        let Some(nccl) = &mut self.communicator else {
            return Ok(Vec::new());
        };
        let mut memories = Vec::new();
        for bucket in 0..BUCKETS {
            let own = match self.steps > step && share.is_entered() {
                true => part(&self.parameters, step, share.part(SAMPLES), bucket),
                false => vec![0.0; WIDTH],
            };
            memories.push((nccl.device().upload(&own)?, nccl.device().alloc(4 * WIDTH)?));
        }
        let mut reduced = Ok(());
        for (from, to) in &memories {
            // SAFETY: they outlive the operations, which are waited for here.
            let (from, to) = unsafe { (from.elements(f32::DTYPE), to.elements(f32::DTYPE)) };
            reduced = reduced.and_then(|()| {
                nccl.all_reduce(Op::Sum, from, to, RawStream::DEFAULT)
                    .map(drop)
            });
        }
        let done = reduced.and_then(|()| nccl.wait_all());
        done.map_err(|error| {
            let error = nccl.blame(error, group);
            say(&format!("step {step}: {error}"));
            error
        })?;
        let mut sums = Vec::new();
        for (_, to) in &memories {
            let mut read = vec![0f32; WIDTH];
            to.read(&mut read)?;
            sums.extend(read);
        }
        Ok(sums)
    }
}

impl Training for Gpu {
    type Results = Vec<f32>;

    fn results(&mut self, step: u64, share: &Share, group: &mut Group) -> Result<Vec<f32>, Fault> {
        std::thread::sleep(self.pause);
        self.reduce(step, share, group)
            .map_err(|error| match error.into_group() {
                Ok(passes) => Fault::Group(passes),
                Err(error) => Fault::Training(Box::new(error)),
            })
    }

    fn commit(&mut self, step: u64, sums: &Vec<f32>) {
        if step < self.steps {
            apply(&mut self.parameters, sums);
        }
        let gap = self.last.elapsed();
        self.last = Instant::now();
        if gap > Duration::from_millis(400) + self.pause || step.is_multiple_of(50) {
            say(&format!(
                "step {step} committed, {:.2} s behind the one before",
                gap.as_secs_f64()
            ));
        }
    }

    fn encode_results(&self, sums: &Vec<f32>) -> Vec<u8> {
        bytemuck::cast_slice(sums).to_vec()
    }

    fn decode_results(&self, bytes: &[u8]) -> Option<Vec<f32>> {
        bytemuck::try_cast_slice::<u8, f32>(bytes)
            .ok()
            .map(<[f32]>::to_vec)
    }

    fn encode_state(&self) -> Vec<u8> {
        bytemuck::cast_slice(&self.parameters).to_vec()
    }

    fn decode_state(&mut self, bytes: &[u8]) -> bool {
        let values = bytes
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        self.parameters = values.collect();
        self.parameters.len() == BUCKETS * WIDTH
    }

    fn restore(&mut self, group: &mut Group) -> Result<u64, Fault> {
        group.barrier()?;
        self.parameters = initial();
        Ok(0)
    }
}

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let steps: u64 = args.get(1).ok_or("STEPS is needed")?.parse()?;
    let pause = args.get(2).map_or(Ok(0), |text| text.parse())?;
    let local = std::env::var("LOCAL_RANK").unwrap_or_default();
    let device = local.parse().unwrap_or(0);
    say("starts");
    let cuda = std::env::var("MUSTER_CUDA_LIBRARY").unwrap_or_else(|_| "libcuda.so.1".to_owned());
    let library = Library::load_from(Path::new(&args[0]), Path::new(&cuda))?;
    let training = Gpu {
        library,
        device,
        communicator: None,
        parameters: Vec::new(),
        steps,
        pause: Duration::from_millis(pause),
        last: Instant::now(),
    };
    let mut session = Session::from_env()?.ok_or("start me with `muster run`")?;
    let worker = Worker::join(&mut session, training, Patience::default());
    let mut worker = worker.map_err(|_| "this launcher restarts workers")?;
    let mut instead = None;
    loop {
        let outcome = match instead.take() {
            Some(outcome) => outcome,
            None => worker.advance()?,
        };
        if let Outcome::Ended { why, .. } = &outcome {
            say(&format!("ended: {why}"));
        }
        let share = worker.share();
        let all = worker.group().is_some() && share.entered.len() == share.world as usize;
        if all && worker.committed() >= steps {
            instead = worker.finish()?;
            if instead.is_none() {
                break;
            }
        }
    }
    let mut again = initial();
    for step in 0..steps {
        let sums: Vec<f32> = (0..BUCKETS)
            .flat_map(|bucket| part(&again, step, 0..SAMPLES, bucket))
            .collect();
        apply(&mut again, &sums);
    }
    let same = again == worker.training.parameters;
    say(if same {
        "all steps, each once, bit for bit"
    } else {
        "WRONG: a step is missing, or came twice"
    });
    if same {
        Ok(())
    } else {
        Err("the parameters are not what the steps make".into())
    }
}
