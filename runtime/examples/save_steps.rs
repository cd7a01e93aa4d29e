//! One rank of the bench `checkpoint`: a state of a given size that is saved, restored, and stopped, without a model.
//!
//! - `save_steps save --log FILE --go FIFO --bytes N`, started by `muster run --store DIR`: at a line `change` that
//!   comes through the fifo of its rank (FIFO.RANK) it times a plain copy and changes the state, at any other it
//!   saves.
//! - `save_steps train --log FILE --bytes N --step-ms MS`, started likewise: steps until it is told to stop, and saves
//!   where it stops. N is what all ranks have together, for the world changes.
//! - `save_steps load --log FILE --go FIFO --bytes N --dir DIR --rank R --world W`, alone: loads this rank's rows of
//!   the checkpoint whose manifest each line names.
//! - `save_steps probe --file FILE --bytes N`: so many bytes to disk with O_DIRECT, 16 requests at a time, no hash,
//!   and back.
//!
//! FILE gets one line of JSON for each event, from each process its own (FILE.RANK). The state is so many bytes a
//! rank: rows of 64 tensors, of which each rank holds its part, random enough that no disk makes it smaller.

use std::collections::HashMap;
use std::error::Error;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use muster_checkpoint::hex::Id;
use muster_runtime::saving::{Dtype, Held, Peer, Restore, Saver, Slice, Want};
use muster_runtime::{Directive, Session, WorkerEnv};

type Failure = Box<dyn Error>;

const TENSORS: u64 = 64;
/// Rows of each tensor, for worlds of 1, 2, 3, 4 and 6.
const ROWS: u64 = 12;

struct Options(HashMap<String, String>);

impl Options {
    fn text(&self, name: &str) -> Result<&str, Failure> {
        let value = self.0.get(name);
        Ok(value.ok_or_else(|| format!("--{name} is needed"))?)
    }

    fn number(&self, name: &str) -> Result<u64, Failure> {
        Ok(self.text(name)?.parse()?)
    }
}

fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let mode = args.next().unwrap_or_default();
    let mut options = Options(HashMap::new());
    while let Some(name) = args.next() {
        let value = args.next().ok_or("every option has a value")?;
        let name = name.trim_start_matches("--").to_owned();
        options.0.insert(name, value);
    }
    match mode.as_str() {
        "save" => save(&options),
        "train" => train(&options),
        "load" => load(&options),
        "probe" => probe(&options),
        _ => Err("the first argument is save, train, load or probe".into()),
    }
}

/// Notes for the bench to read.
struct Log(File);

impl Log {
    fn of(options: &Options, rank: u32) -> Result<Log, Failure> {
        let path = format!("{}.{rank}", options.text("log")?);
        Ok(Log(File::options().append(true).create(true).open(path)?))
    }

    fn note(&mut self, event: &str, step: u64, more: &[(&str, f64)]) -> Result<(), Failure> {
        let t = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
        let more: String = more
            .iter()
            .map(|(k, v)| format!(", \"{k}\": {v}"))
            .collect();
        let line = format!("{{\"event\": \"{event}\", \"t\": {t}, \"step\": {step}{more}}}\n");
        Ok(self.0.write_all(line.as_bytes())?)
    }
}

/// This rank's rows of all tensors, one tensor after the other.
struct State {
    world: u64,
    columns: u64,
    words: Vec<u64>,
}

impl State {
    /// Of about so many bytes a rank.
    fn new(bytes: u64, rank: u64, world: u64) -> State {
        let columns = (bytes * world / (TENSORS * ROWS * 4)).max(1024) / 1024 * 1024;
        let words = TENSORS * (ROWS / world) * columns / 2;
        // xorshift64 (Marsaglia 2003)
        let mut word = rank + 1;
        let words = (0..words).map(|_| {
            word ^= word << 13;
            word ^= word >> 7;
            word ^= word << 17;
            word
        });
        State {
            world,
            columns,
            words: words.collect(),
        }
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.words)
    }

    /// As a step does.
    fn change(&mut self, step: u64) {
        for word in &mut self.words {
            *word = word.wrapping_add(step | 1);
        }
    }

    fn shape(&self) -> [u64; 2] {
        [ROWS, self.columns]
    }

    fn slice(&self, rank: u64) -> Slice {
        let rows = ROWS / self.world;
        Slice {
            offset: vec![rank * rows, 0],
            extent: vec![rows, self.columns],
        }
    }

    fn peer(&self, rank: u64) -> Peer {
        let held = (0..TENSORS).map(|tensor| {
            let mut held = Held::whole(&name(tensor), Dtype::F32, &self.shape());
            held.slices = vec![self.slice(rank)];
            held
        });
        Peer {
            node: 0,
            held: held.collect(),
        }
    }

    /// The part of one tensor.
    fn tensor(&self, name: &str) -> Option<&[u8]> {
        let tensor: usize = name.strip_prefix('t')?.parse().ok()?;
        let bytes = self.bytes();
        bytes
            .chunks_exact(bytes.len() / TENSORS as usize)
            .nth(tensor)
    }
}

fn name(tensor: u64) -> String {
    format!("t{tensor:02}")
}

/// Seconds of a plain copy, by as many threads as a save has.
fn copy(from: &[u8], into: &mut [u8], threads: usize) -> f64 {
    let part = from.len().div_ceil(threads);
    let began = Instant::now();
    std::thread::scope(|scope| {
        for (from, into) in from.chunks(part).zip(into.chunks_mut(part)) {
            scope.spawn(move || into.copy_from_slice(from));
        }
    });
    std::hint::black_box(&into);
    began.elapsed().as_secs_f64()
}

/// The lines of a rank's fifo: nothing is done while none comes.
fn lines(options: &Options, rank: u32) -> Result<impl Iterator<Item = String>, Failure> {
    let fifo = File::open(format!("{}.{rank}", options.text("go")?))?;
    Ok(BufReader::new(fifo).lines().map_while(Result::ok))
}

fn save(options: &Options) -> Result<(), Failure> {
    let mut session = Session::from_env()?.ok_or("start me with `muster run`")?;
    let env = WorkerEnv::from_env()?;
    let mut log = Log::of(options, env.rank)?;
    let world = u64::from(env.world);
    let mut state = State::new(options.number("bytes")?, u64::from(env.rank), world);
    let peers: Vec<Peer> = (0..world).map(|rank| state.peer(rank)).collect();
    let began = Instant::now();
    let mut saver = Saver::new(&mut session, &env, &peers)?;
    let made = began.elapsed().as_secs_f64();
    let mut other = vec![1u8; state.bytes().len()];
    let cores = std::thread::available_parallelism()?.get();
    let threads = (cores / env.world as usize).clamp(1, 4);
    log.note("ready", 0, &[("made", made)])?;
    let (mut step, mut plain) = (0, 0.0);
    for line in lines(options, env.rank)? {
        if line == "change" {
            step += 1;
            plain = copy(state.bytes(), &mut other, threads);
            state.change(step);
            log.note("changed", step, &[])?;
            continue;
        }
        log.note("request", step, &[])?;
        let began = Instant::now();
        let saved = saver.save(step, |name, _| state.tensor(name), Vec::new())?;
        let times = [
            ("stall", began.elapsed().as_secs_f64()),
            ("copied", saved.copied.as_secs_f64()),
            ("waited", saved.waited.as_secs_f64()),
            ("plain", plain),
            ("bytes", saved.bytes as f64),
        ];
        log.note("saved", step, &times)?;
    }
    Ok(())
}

fn train(options: &Options) -> Result<(), Failure> {
    let mut session = Session::from_env()?.ok_or("start me with `muster run`")?;
    let env = WorkerEnv::from_env()?;
    let mut log = Log::of(options, env.rank)?;
    let pause = Duration::from_millis(options.number("step-ms")?);
    let world = u64::from(env.world);
    let mut state = State::new(options.number("bytes")? / world, u64::from(env.rank), world);
    let mut step = 0;
    if let Some(checkpoint) = Restore::from_env()? {
        step = checkpoint.step();
        fill(&checkpoint, &mut state, u64::from(env.rank))?;
        log.note("restored", step, &[])?;
    }
    let peers: Vec<Peer> = (0..world).map(|rank| state.peer(rank)).collect();
    let mut saver = Saver::new(&mut session, &env, &peers)?;
    log.note("ready", step, &[])?;
    loop {
        let directive = session.step(step)?;
        if directive != Directive::Continue {
            log.note("request", step, &[])?;
            saver.save(step, |name, _| state.tensor(name), Vec::new())?;
            log.note("saved", step, &[])?;
        }
        match directive {
            Directive::Stop { .. } => {
                session.acknowledge(step);
                return Ok(());
            }
            Directive::Checkpoint { .. } => session.saved(step),
            _ => {}
        }
        std::thread::sleep(pause);
        step += 1;
        if step.is_multiple_of(20) {
            log.note("step", step, &[])?;
        }
    }
}

/// Reads this rank's rows; how many bytes were read for it.
fn fill(checkpoint: &Restore, state: &mut State, rank: u64) -> Result<u64, Failure> {
    let (shape, slice) = (state.shape(), state.slice(rank));
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut state.words);
    let names: Vec<String> = (0..TENSORS).map(name).collect();
    let each = bytes.len() / TENSORS as usize;
    let wants = names.iter().zip(bytes.chunks_exact_mut(each));
    let mut wants: Vec<Want<'_>> = wants
        .map(|(name, into)| Want {
            name,
            dtype: Dtype::F32,
            shape: &shape,
            slice: slice.clone(),
            into,
        })
        .collect();
    Ok(checkpoint.load(&mut wants)?.read)
}

fn load(options: &Options) -> Result<(), Failure> {
    let (rank, world) = (options.number("rank")?, options.number("world")?);
    let mut log = Log::of(options, rank as u32)?;
    let directory = Path::new(options.text("dir")?);
    let mut state = State::new(options.number("bytes")?, rank, world);
    log.note("ready", 0, &[])?;
    for (step, line) in (1..).zip(lines(options, rank as u32)?) {
        let digest = Id::parse(&line).ok_or("a line is the digest of a manifest")?;
        log.note("request", step, &[])?;
        let began = Instant::now();
        let read = fill(&Restore::open(directory, digest)?, &mut state, rank)?;
        let took = began.elapsed().as_secs_f64();
        log.note("loaded", step, &[("took", took), ("read", read as f64)])?;
    }
    Ok(())
}

/// The disk alone: written, and read again.
fn probe(options: &Options) -> Result<(), Failure> {
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    const BLOCK: usize = 1 << 20;
    let state = State::new(options.number("bytes")?, 0, 1);
    // O_DIRECT writes from memory that begins at a page.
    let whole = state.bytes();
    let start = whole.as_ptr().align_offset(4096);
    let blocks = (whole.len() - start) / BLOCK;
    let image = &whole[start..start + blocks * BLOCK];
    let path = options.text("file")?;
    // Where O_DIRECT is refused (tmpfs), as it can be done.
    let open = || {
        let mut how = File::options();
        how.read(true).write(true).create(true).truncate(true);
        let direct = how.custom_flags(libc::O_DIRECT).open(path);
        direct.or_else(|_| how.custom_flags(0).open(path))
    };
    let file = open()?;
    // As what is written by `persist` has it.
    let reserved = u64::try_from(image.len())?;
    rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, reserved)?;
    let began = Instant::now();
    at_once(blocks, &|_, block| {
        let at = block * BLOCK;
        file.write_all_at(&image[at..at + BLOCK], at as u64)
    })?;
    file.sync_data()?;
    let wrote = began.elapsed().as_secs_f64();
    let began = Instant::now();
    at_once(blocks, &|buffer, block| {
        buffer.resize(2 * BLOCK, 0);
        let start = buffer.as_ptr().align_offset(4096);
        file.read_exact_at(&mut buffer[start..start + BLOCK], (block * BLOCK) as u64)
    })?;
    let read = began.elapsed().as_secs_f64();
    std::fs::remove_file(path)?;
    let bytes = image.len();
    println!("{{\"bytes\": {bytes}, \"seconds\": {wrote}, \"read_seconds\": {read}}}");
    Ok(())
}

/// Work on so many blocks, by 16 threads, each with a buffer of its own.
fn at_once(
    blocks: usize,
    work: &(dyn Fn(&mut Vec<u8>, usize) -> std::io::Result<()> + Sync),
) -> Result<(), Failure> {
    const DEPTH: usize = 16;
    std::thread::scope(|scope| {
        let run = |thread| {
            let mut buffer = Vec::new();
            let mut blocks = (thread..blocks).step_by(DEPTH);
            blocks.try_for_each(|block| work(&mut buffer, block))
        };
        let threads: Vec<_> = (0..DEPTH).map(|t| scope.spawn(move || run(t))).collect();
        for thread in threads {
            thread.join().map_err(|_| "a thread panicked")??;
        }
        Ok(())
    })
}
