//! A worker for tests: plain numbers that are trained, saved by slots, and restored in any world.
//!
//! `saver EVENTS CONTROL MIB EVERY`: notes what `worker.py` notes, in lines of JSON, and with them `restored` and
//! `saved` with their step, and `cached` with the bytes that came from copies on its node's disk. Its state before a
//! step follows from the step alone, so that what it restores can be checked. With SAVER_UNLIKE in its environment the
//! second rank has a tensor more than the others know; SAVER_STEP_MS is how long a step takes. Saves before every
//! EVERY-th step and where it is told to. Exits with the number in CONTROL/exit.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use muster_runtime::saving::{Blob, Dtype, Held, Peer, Restore, Saver, Slice, Want};
use muster_runtime::{Directive, Session, WorkerEnv};
use serde_json::json;

/// The time of a step besides its arithmetic, in milliseconds, unless SAVER_STEP_MS says otherwise.
const STEP_MS: u64 = 20;

struct Worker {
    env: WorkerEnv,
    events: File,
    control: PathBuf,
    weights: Vec<u8>,
    rows: Vec<u8>,
}

/// Rows of the tensor that is cut by ranks; a multiple of all worlds in the tests.
const ROWS: u64 = 2520;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [events, control, mib, every] = &args[..] else {
        bail!("usage: saver EVENTS CONTROL MIB EVERY");
    };
    let (mib, every): (usize, u64) = (mib.parse()?, every.parse()?);
    let step_ms = std::env::var("SAVER_STEP_MS").ok();
    let pause = Duration::from_millis(step_ms.map_or(Ok(STEP_MS), |ms| ms.parse())?);
    let mut session = Session::from_env()?.context("start it with muster run")?;
    let env = WorkerEnv::from_env()?;
    let slice = slice_of(&env);
    let mut worker = Worker {
        events: OpenOptions::new().append(true).create(true).open(events)?,
        control: control.into(),
        weights: vec![0; mib << 20],
        rows: vec![0; usize::try_from(slice.extent[0] * 8)?],
        env,
    };
    worker.note("start", 0)?;
    let mut step = worker.restore(&slice)?;
    let peers: Vec<Peer> = (0..worker.env.world)
        .map(|rank| worker.peer(rank))
        .collect();
    let mut saver = Saver::new(&mut session, &worker.env, &peers)?;
    loop {
        let directive = session.step(step)?;
        worker.state(step, &slice);
        let told = directive != Directive::Continue;
        if told || (step > 0 && step.is_multiple_of(every)) {
            let blob = Blob {
                name: format!("rng/{}", worker.env.rank),
                data: step.to_le_bytes().to_vec(),
            };
            let (weights, rows) = (&worker.weights, &worker.rows);
            let state = |name: &str, _: &Slice| match name {
                "weights" => Some(&weights[..]),
                _ => Some(&rows[..]),
            };
            let mut blobs = vec![blob];
            if worker.env.rank == 0 {
                // The older the better.
                blobs.push(Blob::metrics([("loss", step as f64)]));
            }
            saver.save(step, state, blobs)?;
            worker.note("saved", step)?;
        }
        match directive {
            Directive::Stop { .. } => {
                session.acknowledge(step);
                return Ok(());
            }
            Directive::Checkpoint { .. } => session.saved(step),
            _ => {}
        }
        meet(&worker, step)?;
        std::thread::sleep(pause);
        step += 1;
    }
}

/// The rows that a rank has.
fn slice_of(env: &WorkerEnv) -> Slice {
    let rows = ROWS / u64::from(env.world);
    Slice {
        offset: vec![u64::from(env.rank) * rows],
        extent: vec![rows],
    }
}

/// Waits for all ranks, as a collective does; ends where that is asked for.
fn meet(worker: &Worker, step: u64) -> anyhow::Result<()> {
    let env = &worker.env;
    let digest = env.digest.hex();
    let name = format!("meeting-{}-{}", env.generation, &digest[..16]);
    let place = worker.control.join(name);
    std::fs::create_dir_all(&place)?;
    let mine = place.join(env.rank.to_string());
    let new = mine.with_extension("new");
    std::fs::write(&new, step.to_string())?;
    std::fs::rename(&new, &mine)?;
    // One that does not come: the others end while they wait for it.
    let nobody = worker.control.join("exit").exists().then_some(env.world);
    for other in (0..env.world).chain(nobody) {
        let path = place.join(other.to_string());
        let there = |path: &Path| std::fs::read_to_string(path).ok()?.parse::<u64>().ok();
        while there(&path) < Some(step) {
            if let Ok(code) = std::fs::read_to_string(worker.control.join("exit")) {
                std::process::exit(code.trim().parse()?);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

impl Worker {
    fn note(&mut self, event: &str, step: u64) -> anyhow::Result<()> {
        let var = |name: &str| std::env::var(name).unwrap_or_default();
        let since = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let line = json!({
            "event": event,
            "t": u64::try_from(since.as_nanos())?,
            "pid": std::process::id(),
            "node": var("NODE_NAME"),
            "rank": self.env.rank,
            "local_rank": self.env.local_rank,
            "node_rank": var("GROUP_RANK").parse::<u32>()?,
            "world": self.env.world,
            "restart": self.env.restart,
            "generation": self.env.generation,
            "of": var("MUSTER_GENERATION_DIGEST"),
            "master": format!("{}:{}", var("MASTER_ADDR"), var("MASTER_PORT")),
            "step": step,
        });
        Ok(self.events.write_all(format!("{line}\n").as_bytes())?)
    }

    /// The state before a step.
    fn state(&mut self, step: u64, slice: &Slice) {
        fill(&mut self.weights, 0, step);
        fill(&mut self.rows, slice.offset[0] * 8, step);
    }

    fn peer(&self, rank: u32) -> Peer {
        let env = WorkerEnv {
            rank,
            ..self.env.clone()
        };
        let mut rows = Held::whole("rows", Dtype::F64, &[ROWS]);
        rows.slices = vec![slice_of(&env)];
        let mut held = vec![
            Held::whole("weights", Dtype::U8, &[self.weights.len() as u64]),
            rows,
        ];
        if self.env.rank == 1 && std::env::var_os("SAVER_UNLIKE").is_some() {
            held.push(Held::whole("alone", Dtype::F64, &[1]));
        }
        Peer { node: rank, held }
    }

    /// Loads what the generation begins with, checks it, and returns its step; 0 where there is nothing.
    fn restore(&mut self, slice: &Slice) -> anyhow::Result<u64> {
        let Some(checkpoint) = Restore::from_env()? else {
            return Ok(0);
        };
        let (step, shape) = (checkpoint.step(), [self.weights.len() as u64]);
        let want = |name, dtype, shape, slice, into| Want {
            name,
            dtype,
            shape,
            slice,
            into,
        };
        checkpoint.load(&mut [
            want(
                "weights",
                Dtype::U8,
                &shape,
                Slice::whole(&shape),
                &mut self.weights,
            ),
            want("rows", Dtype::F64, &[ROWS], slice.clone(), &mut self.rows),
        ])?;
        let loaded = (self.weights.clone(), self.rows.clone());
        self.state(step, slice);
        if loaded != (self.weights.clone(), self.rows.clone()) {
            bail!("what was restored is not the state before step {step}");
        }
        if checkpoint.blob("rng/0") != Some(&step.to_le_bytes()[..]) {
            bail!("the blobs are not those of step {step}");
        }
        self.note("cached", checkpoint.from_cache())?;
        self.note("restored", step)?;
        Ok(step)
    }
}

/// Bytes that say where they are, and of which step.
fn fill(bytes: &mut [u8], from: u64, step: u64) {
    let key = step.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for (at, byte) in (from..).zip(bytes) {
        *byte = (at ^ (at >> 8) ^ key ^ (key >> 17)) as u8;
    }
}
