//! One worker of the bench `transfer` with `--trainer`: steps of a given size by `train::Trainer`, as a user has them.
//!
//! `trained_steps --log DIR --gradient BYTES --state BYTES --step-ms MS --steps N --dense 0|1`, started by `muster
//! run`: every commit and every change of the generation goes to a file of this process in DIR, one line of JSON each.
//! A step changes as much of the state as the gradient is long, the next part each time; with `--dense 1` all of it,
//! as an optimizer does. The model is made once its rank takes part.

use std::collections::HashMap;
use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use muster_runtime::Session;
use muster_runtime::data::{Batch, SamplerConfig, Tail};
use muster_runtime::schedule::{Base, Scaling, Schedule, Span};
use muster_runtime::train::{
    BUCKET_SIZES, BoxError, Config, Feed, Gradients, Hooks, Layout, Load, Measured, Micro, Model,
    Named, Outline, Parallel, Place, Report, Room, Trainer, Update, buckets_of,
};

/// Tensors that the state is cut into.
const TENSORS: u64 = 64;

fn main() -> Result<(), Box<dyn Error>> {
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
    let gradient = (number("gradient", 1 << 20)? as usize / 4).max(1);
    let state = (number("state", 1 << 20)?.div_ceil(4 * TENSORS) * TENSORS) as usize;
    let pause = Duration::from_millis(number("step-ms", 0)?);
    let dense = number("dense", 0)? > 0;
    let directory = options.get("log").ok_or("--log is needed")?;
    // A process id may be one of a namespace, so it names nobody alone.
    let node = std::env::var("BENCH_NODE").unwrap_or_default();
    let who = format!("{node}.{}.{}", std::process::id(), now());
    let log = Path::new(directory).join(format!("{who}.jsonl"));
    let mut notes = Notes {
        who,
        log: File::create(&log)?,
        began: Instant::now(),
        comes: false,
    };
    let mut of_model = notes.again()?;
    let make = move || {
        let began = Instant::now();
        let model = Wide::new(state, gradient, pause, dense);
        of_model.note("made", 0, &took(began))?;
        Ok(model)
    };
    let outline = Outline {
        parameters: gradient,
        buckets: buckets_of(&[gradient], BUCKET_SIZES),
        extras: 0,
    };
    let sampler = SamplerConfig {
        samples: 1 << 30,
        seed: 1,
        batch: Batch::Global(12),
        microbatch: 1,
        tail: Tail::Drop,
    };
    let schedule = Schedule {
        rate: 0.1,
        base: Base::Constant,
        scaling: Scaling::None,
        warm_up: None,
    };
    let config = Config::new(sampler, Span::Steps(number("steps", 1 << 40)?), schedule);
    let training = Parallel::later(outline, make, Feed::indices(), config)?;
    let mut session = Session::from_env()?.ok_or("start me with `muster run`")?;
    let trainer = Trainer::new(training).hooks(notes.again()?);
    let (_ending, training) = trainer.run(Some(&mut session))?;
    let digest = blake3::hash(&training.model().encode());
    let more = format!(", \"digest\": \"{}\"", digest.to_hex());
    Ok(notes.note("done", training.steps(), &more)?)
}

fn now() -> u128 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.unwrap_or_default().as_nanos()
}

fn took(since: Instant) -> String {
    format!(", \"took\": {}", since.elapsed().as_secs_f64())
}

/// A state of which each step changes a part, or all.
struct Wide {
    layout: Layout,
    values: Vec<f32>,
    steps: u64,
    /// Numbers of the gradient.
    gradient: usize,
    /// In the place of a forward and a backward pass.
    pause: Duration,
    dense: bool,
}

impl Wide {
    /// Values of this process alone: what the others hold has to come from them.
    fn new(len: usize, gradient: usize, pause: Duration, dense: bool) -> Wide {
        let names: Vec<String> = (0..TENSORS).map(|i| format!("values.{i}")).collect();
        let shape = [len as u64 / TENSORS];
        Wide {
            layout: Layout::new(names.iter().map(|name| (name.as_str(), &shape[..]))),
            values: vec![std::process::id() as f32; len],
            steps: 0,
            gradient,
            pause,
            dense,
        }
    }
}

impl Model for Wide {
    type Sample = u64;

    fn parameters(&self) -> usize {
        self.gradient
    }

    fn buckets(&self) -> Vec<Range<usize>> {
        buckets_of(&[self.gradient], BUCKET_SIZES)
    }

    fn backward(
        &mut self,
        micro: &Micro<u64>,
        into: &mut Gradients<'_>,
    ) -> Result<Measured, BoxError> {
        into.bucket(0).iter_mut().for_each(|to| *to += 1e-3);
        if micro.last {
            std::thread::sleep(self.pause);
        }
        into.ready(0);
        self.evaluate(micro)
    }

    fn evaluate(&mut self, micro: &Micro<u64>) -> Result<Measured, BoxError> {
        Ok(Measured {
            loss: 0.0,
            samples: micro.samples.len() as u64,
            extra: Vec::new(),
        })
    }

    fn update(&mut self, update: &Update<'_>) {
        let rate = update.rate as f32;
        let parts = self.values.len().div_ceil(self.gradient).max(1);
        let only = (self.steps % parts as u64) as usize;
        for (number, part) in self.values.chunks_mut(self.gradient).enumerate() {
            if self.dense || number == only {
                for (value, gradient) in part.iter_mut().zip(&update.gradient[0]) {
                    *value -= rate * gradient;
                }
            }
        }
        self.steps += 1;
    }

    fn encode(&self) -> Vec<u8> {
        let steps = self.steps.to_le_bytes();
        [&steps[..], bytemuck::cast_slice(&self.values)].concat()
    }

    fn decode(&mut self, bytes: &[u8]) -> bool {
        let Some((steps, values)) = bytes.split_first_chunk() else {
            return false;
        };
        let into: &mut [u8] = bytemuck::cast_slice_mut(&mut self.values);
        if into.len() != values.len() {
            return false;
        }
        into.copy_from_slice(values);
        self.steps = u64::from_le_bytes(*steps);
        true
    }

    fn tensors(&self) -> Result<Vec<Named<'_>>, BoxError> {
        let mut all = vec![Named::count("model.steps", self.steps)];
        all.extend(self.layout.model(&self.values));
        Ok(all)
    }

    fn load(&mut self, from: &mut Load<'_>) -> Result<(), BoxError> {
        let mut steps = self.steps.to_le_bytes();
        let mut rooms = vec![Room::count("model.steps", &mut steps)];
        rooms.extend(self.layout.model_rooms(&mut self.values));
        from.fill(rooms)?;
        self.steps = u64::from_le_bytes(steps);
        Ok(())
    }
}

/// Log of this process, with times.
struct Notes {
    who: String,
    log: File,
    began: Instant,
    /// As a newcomer, which has committed nothing yet.
    comes: bool,
}

impl Notes {
    /// Another one, that writes into the same file.
    fn again(&self) -> std::io::Result<Notes> {
        Ok(Notes {
            who: self.who.clone(),
            log: self.log.try_clone()?,
            ..*self
        })
    }

    fn note(&mut self, event: &str, step: u64, more: &str) -> std::io::Result<()> {
        let line = format!(
            "{{\"event\": \"{event}\", \"t\": {}, \"who\": \"{}\", \"step\": {step}{more}}}\n",
            now(),
            self.who
        );
        self.log.write_all(line.as_bytes())
    }
}

impl Hooks<Wide> for Notes {
    fn on_regroup(&mut self, _: &Wide, place: &Place) -> Result<(), BoxError> {
        self.comes = !place.survived;
        let more = format!(
            ", \"rank\": {}, \"world\": {}, \"survived\": {}",
            place.rank, place.world, place.survived
        );
        Ok(self.note("regrouped", place.steps, &more)?)
    }

    fn on_step(&mut self, _: &Wide, report: &Report) -> Result<(), BoxError> {
        if std::mem::take(&mut self.comes) {
            self.note("caught_up", report.step, &took(self.began))?;
        }
        Ok(self.note("commit", report.step - 1, "")?)
    }

    fn on_ended(&mut self, _: &str, _: Option<u32>) -> Result<(), BoxError> {
        Ok(self.note("ended", 0, "")?)
    }
}
