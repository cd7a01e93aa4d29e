//! A worker for tests: `train::Trainer` over plain buffers, in a job with a store.
//!
//! `trainee EVENTS CONTROL MIB EVERY`: notes what `saver` notes, in lines of JSON. It stays in its process while
//! generations change, so `start` is the beginning of a generation; `restored`, `saved`, `step` and `best` come with
//! their step. Its state after a step follows from the step alone, and is checked wherever it comes from outside.
//! Saves every EVERY steps; evaluates after every tenth, with the best result after step 20. Exits with the number in
//! CONTROL/exit.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use muster_runtime::Session;
use muster_runtime::data::{Batch, SamplerConfig, Tail};
use muster_runtime::schedule::{Base, Scaling, Schedule, Span};
use muster_runtime::train::optim::Sgd;
use muster_runtime::train::{
    Best, BoxError, Config, Feed, Gradients, HeldOut, Hooks, Layout, Load, Measured, Micro, Model,
    Named, Options, Parallel, Place, Report, Save, Trainer, Update, buckets_of,
};
use serde_json::json;

/// Time of a step besides its arithmetic.
const STEP: Duration = Duration::from_millis(20);

/// A power of two, so that everything is exact.
const RATE: f64 = 1.0 / 1024.0;

/// After this step the model is best.
const BEST: u64 = 20;

fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [events, control, mib, every] = &args[..] else {
        bail!("usage: trainee EVENTS CONTROL MIB EVERY");
    };
    let (mib, every): (usize, u64) = (mib.parse()?, every.parse()?);
    let sampler = SamplerConfig {
        samples: 1600,
        seed: 1,
        batch: Batch::Global(16),
        microbatch: 2,
        tail: Tail::Drop,
    };
    let schedule = Schedule {
        rate: RATE,
        base: Base::Constant,
        scaling: Scaling::None,
        warm_up: None,
    };
    let config = Config::new(sampler, Span::Steps(1 << 40), schedule);
    let held_out = HeldOut::new(Feed::indices(), 16, 2, Span::Steps(10));
    let training = Parallel::new(Slope::new(mib << 18), Feed::indices(), config)?;
    let notes = Notes {
        events: OpenOptions::new().append(true).create(true).open(events)?,
        control: control.into(),
        place: None,
    };
    let options = Options {
        save_every: Some(every),
        ..Options::default()
    };
    let mut session = Session::from_env()?.context("start it with muster run")?;
    let trainer = Trainer::new(training.evaluated_by(held_out));
    let trainer = trainer.options(options).hooks(notes);
    trainer.run(Some(&mut session))?;
    Ok(())
}

/// Every gradient is 1, so all parameters are the same number.
struct Slope {
    layout: Layout,
    parameters: Vec<f32>,
    optimizer: Sgd,
    steps: u64,
}

fn optimizer(len: usize) -> Sgd {
    Sgd::new(len).momentum(0.5)
}

/// Value of each parameter after so many steps.
fn after(steps: u64) -> f32 {
    let (mut one, mut sgd) = ([0.0], optimizer(1));
    for _ in 0..steps {
        sgd.step(&mut one, &[1.0], RATE);
    }
    one[0]
}

impl Slope {
    fn new(len: usize) -> Slope {
        let half = len as u64 / 2;
        let parts = [("first", &[half][..]), ("second", &[half / 4, 4])];
        Slope {
            layout: Layout::new(parts),
            parameters: vec![0.0; len],
            optimizer: optimizer(len),
            steps: 0,
        }
    }

    fn check(&self, steps: u64) -> Result<(), BoxError> {
        let expected = after(steps);
        let wrong = self.parameters.iter().find(|p| **p != expected);
        match wrong {
            Some(wrong) => Err(format!("{wrong} after step {steps}, not {expected}").into()),
            None if self.steps != steps => Err(format!("{} steps, not {steps}", self.steps).into()),
            None => Ok(()),
        }
    }
}

impl Model for Slope {
    type Sample = u64;

    fn parameters(&self) -> usize {
        self.parameters.len()
    }

    fn buckets(&self) -> Vec<Range<usize>> {
        let half = self.parameters.len() / 2;
        buckets_of(&[half, half], [1 << 18, 1 << 22])
    }

    fn backward(
        &mut self,
        micro: &Micro<u64>,
        into: &mut Gradients<'_>,
    ) -> Result<Measured, BoxError> {
        let sum = micro.scale * micro.samples.len() as f32;
        for bucket in 0..into.ranges().len() {
            into.bucket(bucket).iter_mut().for_each(|to| *to += sum);
            into.ready(bucket);
        }
        self.evaluate(micro)
    }

    fn evaluate(&mut self, micro: &Micro<u64>) -> Result<Measured, BoxError> {
        let samples = micro.samples.len() as u64;
        let far = (self.steps as f64 - BEST as f64).abs();
        Ok(Measured {
            loss: far * samples as f64,
            samples,
            extra: Vec::new(),
        })
    }

    fn update(&mut self, update: &Update<'_>) {
        let ranges = self.buckets().into_iter();
        let parts = ranges.zip(update.gradient.iter().map(Vec::as_slice));
        let parts: Vec<_> = parts.collect();
        (self.optimizer).step_parts(&mut self.parameters, parts, update.rate);
        self.steps += 1;
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = self.steps.to_le_bytes().to_vec();
        bytes.extend(self.parameters.iter().flat_map(|p| p.to_le_bytes()));
        bytes.extend(self.optimizer.encode());
        bytes
    }

    fn decode(&mut self, bytes: &[u8]) -> bool {
        let split = bytes.split_first_chunk();
        let split = split.and_then(|(steps, rest)| {
            Some((steps, rest.split_at_checked(self.parameters.len() * 4)?))
        });
        let Some((steps, (parameters, optimizer))) = split else {
            return false;
        };
        if !self.optimizer.decode(optimizer) {
            return false;
        }
        let (values, _) = parameters.as_chunks();
        self.parameters = values.iter().map(|v| f32::from_le_bytes(*v)).collect();
        self.steps = u64::from_le_bytes(*steps);
        true
    }

    fn tensors(&self) -> Result<Vec<Named<'_>>, BoxError> {
        let mut all: Vec<Named<'_>> = self.layout.model(&self.parameters).collect();
        all.push(Named::count("model.steps", self.steps));
        all.extend(self.optimizer.tensors(&self.layout));
        Ok(all)
    }

    fn load(&mut self, from: &mut Load<'_>) -> Result<(), BoxError> {
        let mut steps = [0; 8];
        let mut rooms = self.layout.model_rooms(&mut self.parameters);
        rooms.push(muster_runtime::train::Room::count(
            "model.steps",
            &mut steps,
        ));
        from.fill(rooms)?;
        self.steps = u64::from_le_bytes(steps);
        Ok(self.optimizer.load(&self.layout, from)?)
    }
}

struct Notes {
    events: File,
    control: PathBuf,
    /// Of the newest generation.
    place: Option<Place>,
}

impl Notes {
    fn note(&mut self, event: &str, step: u64) -> Result<(), BoxError> {
        let Some(place) = self.place else {
            return Ok(());
        };
        let since = SystemTime::now().duration_since(UNIX_EPOCH)?;
        let node = std::env::var("NODE_NAME").unwrap_or_default();
        let line = json!({
            "event": event,
            "t": u64::try_from(since.as_nanos())?,
            "pid": std::process::id(),
            "node": node,
            "rank": place.rank,
            // One rank on each node.
            "node_rank": place.rank,
            "world": place.world,
            "restart": 0,
            "generation": place.generation,
            "of": place.digest.hex(),
            // What tells generations of one number apart.
            "master": place.digest.hex(),
            "step": step,
        });
        Ok(self.events.write_all(format!("{line}\n").as_bytes())?)
    }
}

impl Notes {
    /// The step after which all exit. The first rank that reads the order sets it: none is two steps ahead of another.
    fn last_step(&self, step: u64) -> Result<u64, BoxError> {
        let last = self.control.join("exit-after");
        if !last.exists() {
            let aside = format!("exit-after-{}", std::process::id());
            let aside = self.control.join(aside);
            std::fs::write(&aside, (step + 2).to_string())?;
            // Whole when it is there, and the first stays.
            let _there = std::fs::hard_link(&aside, &last);
            std::fs::remove_file(&aside)?;
        }
        Ok(std::fs::read_to_string(last)?.parse()?)
    }
}

impl Hooks<Slope> for Notes {
    fn on_regroup(&mut self, model: &Slope, place: &Place) -> Result<(), BoxError> {
        let first = self.place.replace(*place).is_none();
        self.note("start", place.steps)?;
        // A newcomer's model is not here yet.
        if first && place.survived && place.steps > 0 {
            model.check(place.steps)?;
            self.note("restored", place.steps)?;
        }
        Ok(())
    }

    fn on_step(&mut self, model: &Slope, report: &Report) -> Result<(), BoxError> {
        // A newcomer hears of several steps at once when it has caught up.
        if report.step.is_multiple_of(10) && model.steps == report.step {
            model.check(report.step)?;
        }
        self.note("step", report.step)?;
        std::thread::sleep(STEP);
        match std::fs::read_to_string(self.control.join("exit")) {
            Ok(code) if report.step >= self.last_step(report.step)? => {
                std::process::exit(code.trim().parse()?)
            }
            _ => Ok(()),
        }
    }

    fn on_best(&mut self, best: &Best) -> Result<(), BoxError> {
        self.note("best", best.evaluation.step)
    }

    fn on_save(&mut self, _: &Slope, save: &Save) -> Result<(), BoxError> {
        self.note("saved", save.step)
    }
}
