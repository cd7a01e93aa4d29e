//! One worker of the benches `regroup` and `transfer`: live steps of a given size, without a model.
//!
//! - `live_steps --log DIR --gradient BYTES --state BYTES --step-ms MS --steps N`, started by `muster run`: every
//!   commit and every change of the generation goes to a file of this process in DIR, one line of JSON each.
//! - `live_steps --pairs N --world W ...`: waits for W ranks, then does N pairs of blocks of `--block` steps, one
//!   live and one as a loop without live membership does it (the same all-reduce and update, on the same memory,
//!   nothing else). Which
//!   one is first is drawn by chance, the same on all ranks. A block begins when all ranks have ended the one
//!   before, and its time is until all have ended it: what a step leaves to do on another rank is its own. Rank 0
//!   notes both times. With `--seconds S` only as many pairs as fit, by those that warm up.
//! - `live_steps --tcp BYTES` needs no place: so many bytes over one plain loopback connection.

use std::any::Any;
use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::fs::File;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use muster_runtime::Session;
use muster_runtime::collective::{Group, Op};
use muster_runtime::live::{Fault, Frozen, Landing, Outcome, Patience, Share, Training, Worker};

type Failure = Box<dyn Error>;

fn main() -> Result<(), Failure> {
    let mut options = HashMap::new();
    let mut args = std::env::args().skip(1);
    while let Some(name) = args.next() {
        let value = args.next().ok_or("every option has a value")?;
        options.insert(name.trim_start_matches("--").to_owned(), value);
    }
    let number = |name: &str, default: u64| {
        let value = options.get(name).map(|text| text.parse::<u64>());
        value.unwrap_or(Ok(default))
    };
    let tcp = number("tcp", 0)? as usize;
    if tcp > 0 {
        return plain_tcp(tcp);
    }
    let gradient = (number("gradient", 1 << 20)? as usize / 4).max(1);
    let state = (number("state", 0)? as usize / 4).max(gradient);
    let directory = options.get("log").ok_or("--log is needed")?;
    // A process id may be one of a namespace, so it names nobody alone.
    let node = std::env::var("BENCH_NODE").unwrap_or_default();
    let who = format!("{node}.{}.{}", std::process::id(), now());
    let log = File::create(Path::new(directory).join(format!("{who}.jsonl")))?;
    let training = Steps {
        pause: Duration::from_millis(number("step-ms", 0)?),
        gradient: vec![1e-3; gradient],
        listener: Vec::new(),
        state: State::default(),
        pieces: state / gradient,
        making: Some(Making::begin(state / gradient, gradient)),
        fault: None,
        spare: Rc::default(),
        tried: None,
        quiet: options.contains_key("pairs"),
        who,
        log,
    };
    let mut session = Session::from_env()?.ok_or("start me with `muster run`")?;
    let worker = Worker::join(&mut session, training, Patience::default())
        .map_err(|_| "this launcher restarts workers")?;
    match number("pairs", 0)? {
        0 => train(worker, number("steps", u64::MAX)?),
        pairs => {
            let seconds = number("seconds", u64::from(u32::MAX))?;
            compare(
                worker,
                number("world", 2)? as u32,
                &Pairs {
                    most: pairs,
                    block: number("block", 1)?.max(1),
                    within: Duration::from_secs(seconds),
                },
            )
        }
    }
}

/// The training: a state of which each step changes as much as the gradient is long, the next part each time.
struct Steps {
    /// In the place of a forward and a backward pass.
    pause: Duration,
    gradient: Vec<f32>,
    /// The contribution of a rank that only listens.
    listener: Vec<f32>,
    /// None while it is being made, or a copy is written into it.
    state: State,
    pieces: usize,
    /// The model is made while this rank takes its place, and listens.
    making: Option<Making>,
    /// No model could be made.
    fault: Option<Fault>,
    spare: Spare,
    /// The newest step that was begun.
    tried: Option<u64>,
    /// Commits are not noted: the loop without live membership notes none either.
    quiet: bool,
    who: String,
    log: File,
}

/// Buffers of results that are kept no longer, so that no step allocates. Taken by turns: with more than one, live
/// steps and others come to use the same memory.
type Spare = Rc<RefCell<VecDeque<Vec<f32>>>>;

struct Sums {
    values: Vec<f32>,
    spare: Spare,
}

impl Drop for Sums {
    fn drop(&mut self) {
        let values = std::mem::take(&mut self.values);
        self.spare.borrow_mut().push_back(values);
    }
}

fn now() -> u128 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_nanos()
}

fn update(state: &mut State, step: u64, sums: &[f32]) {
    let piece = (step % state.0.len() as u64) as usize;
    for (value, sum) in Arc::make_mut(&mut state.0[piece]).iter_mut().zip(sums) {
        *value -= 0.1 * sum;
    }
}

/// First values that are being written: the memory of the model is touched once, as that of any model is.
struct Making(JoinHandle<(State, Duration)>);

impl Making {
    /// Values of this process alone: what the others hold has to come from them.
    fn begin(pieces: usize, len: usize) -> Making {
        Making(std::thread::spawn(move || {
            let began = Instant::now();
            let state = State::new(pieces, len, std::process::id() as f32);
            (state, began.elapsed())
        }))
    }
}

/// Pieces as long as a gradient. One that others hold too, because it is frozen, is copied when it is changed.
#[derive(Clone, Default)]
struct State(Vec<Arc<Vec<f32>>>);

impl State {
    fn new(pieces: usize, len: usize, value: f32) -> State {
        let piece = |_| Arc::new(vec![value; len]);
        State((0..pieces).map(piece).collect())
    }

    fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(|piece| bytemuck::cast_slice(piece))
    }

    fn digest(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new();
        self.pieces().for_each(|piece| {
            hasher.update(piece);
        });
        hasher.finalize()
    }
}

impl Frozen for State {
    fn total(&self) -> usize {
        self.pieces().map(<[u8]>::len).sum()
    }

    fn piece(&self, byte: usize) -> &[u8] {
        let len = self.0.first().map_or(1, |piece| 4 * piece.len());
        let piece = self.0.get(byte / len);
        piece.map_or(&[], |piece| &bytemuck::cast_slice(piece)[byte % len..])
    }
}

/// The model's own memory takes in the copy.
impl Landing for State {
    fn places(&mut self, total: usize) -> Option<Vec<&mut [u8]>> {
        if self.total() != total {
            return None;
        }
        let pieces = self.0.iter_mut();
        Some(
            pieces
                .map(|piece| bytemuck::cast_slice_mut(Arc::make_mut(piece).as_mut_slice()))
                .collect(),
        )
    }
}

impl Steps {
    /// Whether there is a model; if `wait`, there is. One that was lost with a copy that never got whole is made
    /// again.
    fn made(&mut self, wait: bool) -> Result<bool, Fault> {
        if !self.state.0.is_empty() {
            return Ok(true);
        }
        let (pieces, len) = (self.pieces, self.gradient.len());
        let making = self.making.take();
        let making = making.unwrap_or_else(|| Making::begin(pieces, len));
        if !wait && !making.0.is_finished() {
            self.making = Some(making);
            return Ok(false);
        }
        let made = making.0.join();
        let (state, took) = made.map_err(|_| Fault::Training("no model was made".into()))?;
        self.state = state;
        self.note("made", 0, &format!(", \"took\": {}", took.as_secs_f64()));
        Ok(true)
    }

    fn note(&mut self, event: &str, step: u64, more: &str) {
        // A bench whose log cannot be written has no figures, and says so by that.
        let _shown = writeln!(
            self.log,
            "{{\"event\": \"{event}\", \"t\": {}, \"who\": \"{}\", \"step\": {step}{more}}}",
            now(),
            self.who
        );
    }
}

impl Training for Steps {
    type Results = Sums;

    fn results(&mut self, step: u64, share: &Share, group: &mut Group) -> Result<Sums, Fault> {
        if self.tried.replace(step) == Some(step) {
            self.note("again", step, "");
        }
        std::thread::sleep(self.pause);
        let values = self.spare.borrow_mut().pop_front();
        let mut sums = Sums {
            values: values.unwrap_or_else(|| vec![0.0; self.gradient.len()]),
            spare: self.spare.clone(),
        };
        let own = if share.entered.contains(&share.rank) {
            &self.gradient
        } else {
            self.listener.resize(self.gradient.len(), 0.0);
            &self.listener
        };
        group.all_reduce(Op::Sum, own, &mut sums.values)?;
        Ok(sums)
    }

    fn commit(&mut self, step: u64, sums: &Sums) {
        update(&mut self.state, step, &sums.values);
        if !self.quiet {
            self.note("commit", step, "");
        }
    }

    fn results_len(&self) -> Option<usize> {
        Some(size_of_val(self.gradient.as_slice()))
    }

    fn encode_results(&self, sums: &Sums) -> Vec<u8> {
        bytemuck::cast_slice(&sums.values).to_vec()
    }

    fn decode_results(&self, bytes: &[u8]) -> Option<Sums> {
        let mut values = vec![0.0; self.gradient.len()];
        let into: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        (into.len() == bytes.len()).then(|| into.copy_from_slice(bytes))?;
        Some(Sums {
            values,
            spare: self.spare.clone(),
        })
    }

    fn encode_state(&self) -> Vec<u8> {
        let pieces: Vec<&[u8]> = self.state.pieces().collect();
        pieces.concat()
    }

    fn decode_state(&mut self, bytes: &[u8]) -> bool {
        let Some(places) = self.state.places(bytes.len()) else {
            return false;
        };
        let mut left = bytes;
        for place in places {
            let (now, rest) = left.split_at(place.len());
            place.copy_from_slice(now);
            left = rest;
        }
        true
    }

    fn freeze(&mut self) -> Box<dyn Frozen> {
        Box::new(self.state.clone())
    }

    fn landing(&mut self) -> Option<Box<dyn Landing>> {
        let made = self.made(false).unwrap_or_else(|error| {
            self.fault = Some(error);
            false
        });
        made.then(|| -> Box<dyn Landing> { Box::new(std::mem::take(&mut self.state)) })
    }

    fn fault(&mut self) -> Option<Box<dyn std::error::Error + Send + Sync>> {
        self.fault.take().map(Into::into)
    }

    fn adopt_state(&mut self, landing: Box<dyn Landing>) -> bool {
        let landing: Box<dyn Any> = landing;
        let state = landing.downcast::<State>();
        state.is_ok_and(|state| {
            self.state = *state;
            true
        })
    }

    fn restore(&mut self, group: &mut Group) -> Result<u64, Fault> {
        self.made(true)?;
        for piece in &mut self.state.0 {
            Arc::make_mut(piece).fill(0.0);
        }
        group.barrier()?;
        Ok(0)
    }
}

fn train(mut worker: Worker<'_, Steps>, steps: u64) -> Result<(), Failure> {
    // Nobody leaves while another one copies or listens: all see alike who has entered.
    let mut instead = None;
    loop {
        let share = worker.share();
        let all = worker.group().is_some() && share.entered.len() == share.world as usize;
        if all && worker.committed() >= steps {
            instead = worker.finish()?;
            if instead.is_none() {
                break;
            }
        }
        let outcome = match instead.take() {
            Some(outcome) => outcome,
            None => worker.advance()?,
        };
        match outcome {
            Outcome::Regrouped {
                place,
                committed,
                survived,
                took,
            } => {
                let more = format!(
                    ", \"rank\": {}, \"world\": {}, \"survived\": {survived}, \"took\": {}",
                    place.rank,
                    place.world,
                    took.as_secs_f64()
                );
                worker.training.note("regrouped", committed, &more);
            }
            Outcome::CaughtUp { committed, took } => {
                let more = format!(", \"took\": {}", took.as_secs_f64());
                worker.training.note("caught_up", committed, &more);
            }
            Outcome::Ended { .. } => {
                let committed = worker.committed();
                worker.training.note("ended", committed, "");
            }
            // States are not compared here, and nothing is kept.
            Outcome::Checkpoint { step } => worker.saved(step),
            Outcome::Stepped { .. }
            | Outcome::Boundary { .. }
            | Outcome::Waiting
            | Outcome::Quarantined { .. } => {}
        }
    }
    let digest = worker.training.state.digest();
    let more = format!(", \"digest\": \"{}\"", digest.to_hex());
    let committed = worker.committed();
    worker.training.note("done", committed, &more);
    Ok(())
}

/// Pairs that say how long one takes.
const FIRST: u64 = 5;

/// A measurement in pairs.
struct Pairs {
    most: u64,
    /// Steps of one half of a pair.
    block: u64,
    within: Duration,
}

/// A step of a loop without live membership, on the same memory: a page or a line of the cache that is slower than
/// another is so for both.
fn advance_alone(worker: &mut Worker<'_, Steps>, step: u64) -> Result<(), Failure> {
    let gradient = std::mem::take(&mut worker.training.gradient);
    let sums = worker.training.spare.borrow_mut().pop_front();
    let mut sums = sums.ok_or("no buffer is left")?;
    let group = worker.group().ok_or("the group is over")?;
    group.all_reduce(Op::Sum, &gradient, &mut sums)?;
    let training = &mut worker.training;
    update(&mut training.state, step, &sums);
    training.gradient = gradient;
    training.spare.borrow_mut().push_back(sums);
    Ok(())
}

fn advance_live(worker: &mut Worker<'_, Steps>) -> Result<(), Failure> {
    let step = worker.committed();
    let outcome = worker.advance()?;
    let expected = Outcome::Stepped {
        step,
        committed: step + 1,
    };
    if outcome != expected {
        return Err(format!("disturbed: {outcome:?}").into());
    }
    Ok(())
}

/// One block until all ranks have ended it, per step.
fn half(worker: &mut Worker<'_, Steps>, is_live: bool, block: u64) -> Result<Duration, Failure> {
    let began = Instant::now();
    for _ in 0..block {
        if is_live {
            advance_live(worker)?;
        } else {
            let step = worker.committed();
            advance_alone(worker, step)?;
        }
    }
    worker.group().ok_or("the group is over")?.barrier()?;
    Ok(began.elapsed().div_f64(block as f64))
}

/// Both halves of a pair, [live, plain], in an order that is drawn by chance.
fn both(worker: &mut Worker<'_, Steps>, pair: u64, block: u64) -> Result<[Duration; 2], Failure> {
    let drawn = blake3::hash(&pair.to_le_bytes()).as_bytes()[0] % 2;
    let mut took = [Duration::ZERO; 2];
    for turn in 0..2 {
        let is_live = turn == drawn;
        took[usize::from(!is_live)] = half(worker, is_live, block)?;
    }
    Ok(took)
}

/// Pairs of blocks, and the times of both.
fn compare(mut worker: Worker<'_, Steps>, world: u32, wanted: &Pairs) -> Result<(), Failure> {
    while worker.committed() < 5 || worker.place().world != world {
        worker.advance()?;
    }
    let training = &mut worker.training;
    let buffer = vec![0.0; training.gradient.len()];
    training.spare.borrow_mut().push_back(buffer);
    let rank = worker.place().rank;
    let began = Instant::now();
    for pair in 0..FIRST {
        both(&mut worker, pair, wanted.block)?;
    }
    let each = began.elapsed().as_secs_f64() / FIRST as f64;
    let fit = (wanted.within.as_secs_f64() / each) as u64;
    // All do as many as rank 0 says; and none begins before another.
    let mut pairs = [0];
    let group = worker.group().ok_or("the group is over")?;
    group.broadcast(0, &[fit.clamp(1, wanted.most)], &mut pairs)?;
    group.barrier()?;
    let warm = FIRST + (pairs[0] / 10).min(100);
    let mut times = Vec::with_capacity(pairs[0] as usize);
    for pair in FIRST..warm + pairs[0] {
        let took = both(&mut worker, pair, wanted.block)?;
        if pair >= warm {
            times.push(took.map(|t| t.as_secs_f64() * 1e6));
        }
    }
    if rank == 0 {
        for [live, plain] in times {
            let more = format!(", \"live\": {live:.2}, \"plain\": {plain:.2}");
            worker.training.note("pair", 0, &more);
        }
    }
    let committed = worker.committed();
    worker.training.note("done", committed, "");
    // All ranks end with the job.
    worker.group().ok_or("the group is over")?.barrier()?;
    Ok(())
}

/// Seconds for so many bytes from memory over one connection: into one small buffer again and again, and into
/// memory that was never touched before.
fn plain_tcp(len: usize) -> Result<(), Failure> {
    let from = vec![7u8; len];
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let mut seconds = [0.0; 2];
    for (fresh, seconds) in seconds.iter_mut().enumerate() {
        let mut to = TcpStream::connect(address)?;
        let (mut stream, _) = listener.accept()?;
        let began = Instant::now();
        std::thread::scope(|scope| {
            let sent = scope.spawn(|| from.chunks(1 << 20).try_for_each(|part| to.write_all(part)));
            let mut into = vec![0u8; if fresh == 1 { len } else { 1 << 20 }];
            let mut got = 0;
            while got < len {
                let at = got % into.len();
                let end = into.len().min(at + (1 << 20));
                let n = stream.read(&mut into[at..end])?;
                if n == 0 {
                    return Err(std::io::ErrorKind::UnexpectedEof.into());
                }
                got += n;
            }
            sent.join()
                .map_err(|_| "the sender panicked")
                .map_err(std::io::Error::other)?
        })?;
        *seconds = began.elapsed().as_secs_f64();
    }
    let [again, fresh] = seconds;
    println!("{{\"again\": {again:.4}, \"fresh\": {fresh:.4}}}");
    Ok(())
}
