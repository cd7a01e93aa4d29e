//! What the examples that train have in common: their flags, and what they say.

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use muster_runtime::Session;
use muster_runtime::torch::{Overlap, TorchModel};
use muster_runtime::train::{
    Boundary, BoxError, Ending, Evaluation, Files, Hooks, Model, Options, Parallel, Place, Report,
    Trainer,
};
use tch::Device;

/// Flags of every example.
#[derive(Clone, Debug)]
pub(crate) struct Args {
    pub(crate) steps: u64,
    pub(crate) seed: u64,
    /// Samples of a step, over all ranks.
    pub(crate) batch: u64,
    pub(crate) overlap: Overlap,
    pub(crate) device: Device,
    /// Where rank 0 saves the state for the day when every rank dies. Without it, nothing is saved.
    checkpoints: Option<PathBuf>,
    report_every: u64,
    /// After each step.
    pause: Duration,
    /// Other flags, by name.
    more: Vec<(String, i64)>,
}

impl Args {
    /// `more` are the example's own flags, with their defaults.
    pub(crate) fn parse(
        steps: u64,
        batch: u64,
        more: &[(&str, i64)],
    ) -> Result<Args, Box<dyn Error>> {
        let mut args = Args {
            steps,
            batch,
            seed: 1,
            overlap: Overlap::Hooks,
            device: Device::cuda_if_available(),
            checkpoints: None,
            report_every: 20,
            pause: Duration::ZERO,
            more: more
                .iter()
                .map(|(name, value)| ((*name).to_owned(), *value))
                .collect(),
        };
        let mut words = std::env::args().skip(1);
        while let Some(flag) = words.next() {
            let mut value = || words.next().ok_or(format!("{flag} wants a value"));
            match flag.as_str() {
                "--steps" => args.steps = value()?.parse()?,
                "--seed" => args.seed = value()?.parse()?,
                "--batch" => args.batch = value()?.parse()?,
                "--checkpoints" => args.checkpoints = Some(value()?.into()),
                "--report-every" => args.report_every = value()?.parse()?,
                "--pause-ms" => args.pause = Duration::from_millis(value()?.parse()?),
                "--cpu" => args.device = Device::Cpu,
                "--overlap" => {
                    args.overlap = match value()?.as_str() {
                        "hooks" => Overlap::Hooks,
                        "staged" => Overlap::Staged,
                        "none" => Overlap::None,
                        other => return Err(format!("no overlap {other:?}").into()),
                    }
                }
                other => {
                    let name = other.strip_prefix("--");
                    let own = args
                        .more
                        .iter_mut()
                        .find(|(known, _)| Some(known.as_str()) == name);
                    let own = own.ok_or_else(|| format!("unknown flag {other}"))?;
                    own.1 = value()?.parse()?;
                }
            }
        }
        // Several ranks on one host each have a GPU of their own.
        if let Device::Cuda(_) = args.device {
            let local = muster_runtime::WorkerEnv::from_env()?.local_rank as usize;
            let count = usize::try_from(tch::Cuda::device_count())
                .unwrap_or(1)
                .max(1);
            args.device = Device::Cuda(local % count);
        }
        Ok(args)
    }

    /// The value of one of the example's own flags.
    pub(crate) fn get(&self, name: &str) -> i64 {
        let found = self.more.iter().find(|(known, _)| known == name);
        found.map_or(0, |(_, value)| *value)
    }
}

/// Trains to the end, on as many ranks as there are. `None`: it was stopped before, to be started again.
pub(crate) fn train<S: Send + 'static>(
    mut training: Parallel<TorchModel<S>>,
    args: &Args,
) -> Result<Option<TorchModel<S>>, Box<dyn Error>> {
    if let Some(directory) = &args.checkpoints {
        training = training.restored_from(Files(directory.clone()));
    }
    let mut session = Session::from_env()?;
    let says = Says {
        place: None,
        every: args.report_every.max(1),
        pause: args.pause,
    };
    let options = Options {
        save_every: args.checkpoints.as_ref().map(|_| 100),
        ..Options::default()
    };
    let trainer = Trainer::new(training).hooks(says).options(options);
    let (ending, training) = trainer.run(session.as_mut())?;
    if ending == Ending::Stopped {
        return Ok(None);
    }
    let steps = training.steps();
    let model = training.into_model();
    let digest = blake3::hash(&model.encode());
    println!("done after {steps} steps, state {}", &digest.to_hex()[..16]);
    Ok(Some(model))
}

/// Runs an example's main; an error is said with its causes.
pub(crate) fn finish(outcome: Result<(), Box<dyn Error>>) -> ExitCode {
    let Err(error) = outcome else {
        return ExitCode::SUCCESS;
    };
    let mut said = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        said.push_str(&format!(": {error}"));
        cause = error.source();
    }
    eprintln!("{said}");
    ExitCode::FAILURE
}

/// Says how the training goes.
struct Says {
    place: Option<Place>,
    every: u64,
    pause: Duration,
}

impl<S: Send + 'static> Hooks<TorchModel<S>> for Says {
    fn on_regroup(&mut self, _: &TorchModel<S>, place: &Place) -> Result<(), BoxError> {
        let Place {
            generation,
            rank,
            world,
            steps,
            survived,
            ..
        } = place;
        let how = match (survived, steps) {
            (_, 0) => "begins",
            (true, _) => "goes on",
            (false, _) => "joins",
        };
        println!("generation {generation}: rank {rank} of {world} {how} at step {steps}");
        self.place = Some(*place);
        Ok(())
    }

    fn on_step(&mut self, _: &TorchModel<S>, report: &Report) -> Result<(), BoxError> {
        let speaks = self.place.is_some_and(|place| place.rank == 0);
        if speaks && report.step.is_multiple_of(self.every) {
            let Report {
                step,
                training_loss,
                ranks,
                ..
            } = report;
            let speed = report.throughput().unwrap_or(f64::NAN);
            println!("step {step}: loss {training_loss:.4}, {ranks} ranks, {speed:.0} samples/s");
        }
        std::thread::sleep(self.pause);
        Ok(())
    }

    fn on_evaluate(
        &mut self,
        model: &TorchModel<S>,
        evaluation: &Evaluation,
    ) -> Result<(), BoxError> {
        if self.place.is_some_and(|place| place.rank == 0) {
            let measured = &evaluation.measured;
            let mut said = format!("held out: loss {:.4}", measured.mean_loss());
            for right in model.scores(measured) {
                let part = 100.0 * right / measured.samples as f64;
                said.push_str(&format!(", {part:.1} % right"));
            }
            println!("{said} (step {})", evaluation.step);
        }
        Ok(())
    }

    fn on_boundary(&mut self, _: &TorchModel<S>, boundary: &Boundary) -> Result<(), BoxError> {
        println!("all ranks stop: {}", boundary.reason);
        Ok(())
    }
}
