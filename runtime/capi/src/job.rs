//! The job: attach, step, report.

use std::ffi::c_char;
use std::sync::Mutex;
use std::time::UNIX_EPOCH;

use muster_runtime::{Directive, Metrics, Session, SessionError, WorkerEnv};

use crate::ABI;
use crate::outcome::{Code, Failure, entry};
use crate::raw::{lock, one, out, text};
use crate::saves::Saves;

/// `muster_job` of the header.
#[derive(Debug)]
pub struct Job(pub(crate) Mutex<Inner>);

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) session: Session,
    pub(crate) env: WorkerEnv,
    /// Ranks of this node.
    pub(crate) local_world: u32,
    /// The saver and the tensors that were declared; none before `muster_declare`.
    pub(crate) saves: Option<Saves>,
}

/// `muster_place` of the header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Place {
    pub rank: u32,
    pub world: u32,
    pub local_rank: u32,
    pub local_world: u32,
    pub generation: u64,
    pub restart: u64,
}

/// `muster_directive` of the header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Asked {
    pub action: i32,
    pub reason: u32,
    pub deadline: u64,
}

const CONTINUE: i32 = 0;
const CHECKPOINT: i32 = 1;
const STOP: i32 = 2;

/// `muster_metrics` of the header.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Trains {
    pub steps: u64,
    pub training_loss: f64,
    pub samples_per_second: f64,
    pub learning_rate: f64,
    pub loss_scale: f64,
    pub data_seconds: f64,
    pub compute_seconds: f64,
    pub communication_seconds: f64,
    pub gradient_sync_seconds: f64,
}

impl Job {
    pub(crate) fn new(session: Session, env: WorkerEnv, local_world: u32) -> Job {
        Job(Mutex::new(Inner {
            session,
            env,
            local_world,
            saves: None,
        }))
    }
}

fn of_session(error: &SessionError) -> Failure {
    let code = match error {
        SessionError::StepBackwards { .. } | SessionError::StepTooLarge { .. } => Code::Step,
        SessionError::Undecided { .. } => Code::Undecided,
        _ => Code::Environment,
    };
    Failure::of(code, error)
}

/// Attaches to the launcher that started this process.
///
/// # Safety
/// Both are null or valid for a write, if `abi` is this library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_open(abi: u32, job: *mut *mut Job, place: *mut Place) -> i32 {
    entry(|| {
        // Before anything else is looked at: of another ABI the rest may be anything. ABI 1 had no such number, and
        // what stands here then is a part of an address, which is never as small.
        if abi != ABI {
            let text = format!(
                "the program was made for ABI {abi} of libmuster.so, and this one has {ABI}: build it with the muster.h of this release, or take the muster.py of it"
            );
            return Err(Failure {
                code: Code::Environment,
                text,
            });
        }
        // SAFETY: the caller's promise.
        let (job, place) = unsafe { (out(job, "job")?, out(place, "place")?) };
        *job = std::ptr::null_mut();
        let env = (WorkerEnv::from_env()).map_err(|e| Failure::of(Code::Environment, &e))?;
        let local_world = match std::env::var("LOCAL_WORLD_SIZE") {
            Err(_) => 1,
            Ok(value) => value.trim().parse().ok().filter(|n| *n > 0).ok_or_else(|| {
                let text = format!("LOCAL_WORLD_SIZE is {value:?}, which is not a number above 0; unset it, or start the worker with `muster run`");
                Failure { code: Code::Environment, text }
            })?,
        };
        *place = Place {
            rank: env.rank,
            world: env.world,
            local_rank: env.local_rank,
            local_world,
            generation: env.generation,
            restart: env.restart,
        };
        let Some(session) = Session::from_env().map_err(|e| of_session(&e))? else {
            return Ok(Code::Nothing);
        };
        *job = Box::into_raw(Box::new(Job::new(session, env, local_world)));
        Ok(Code::Ok)
    })
}

/// Detaches.
///
/// # Safety
/// `job` is null, or from [`muster_open`], and not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_close(job: *mut Job) {
    entry(|| {
        if !job.is_null() {
            // SAFETY: the caller's promise: it is from `Box::into_raw`, and this is its last use.
            drop(unsafe { Box::from_raw(job) });
        }
        Ok(Code::Ok)
    });
}

/// Announces a step, and asks whether it may begin.
///
/// # Safety
/// `job` is null or from [`muster_open`]; `directive` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_step(job: *const Job, step: u64, directive: *mut Asked) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise.
        let (job, asked) = unsafe { (one(job, "job")?, out(directive, "directive")?) };
        let told = lock(&job.0)
            .session
            .step(step)
            .map_err(|e| of_session(&e))?;
        *asked = match told {
            Directive::Continue => Asked::default(),
            Directive::Checkpoint { .. } => Asked {
                action: CHECKPOINT,
                // `Reason::Checkpoint`.
                reason: 6,
                deadline: 0,
            },
            Directive::Stop { deadline, reason } => Asked {
                action: STOP,
                reason: u32::try_from(reason.encode()).unwrap_or(0),
                deadline: deadline
                    .and_then(|at| at.duration_since(UNIX_EPOCH).ok())
                    .and_then(|since| u64::try_from(since.as_millis()).ok())
                    .unwrap_or(0),
            },
            other => {
                let text = format!(
                    "{other:?} is not known here: use a library and a `muster` of the same release"
                );
                return Err(Failure {
                    code: Code::Environment,
                    text,
                });
            }
        };
        Ok(Code::Ok)
    })
}

/// Answers an order of [`muster_step`]: its action is done.
///
/// # Safety
/// `job` is null or from [`muster_open`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_done(job: *const Job, step: u64, action: i32) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise.
        let job = lock(unsafe { &one(job, "job")?.0 });
        match action {
            CHECKPOINT => job.session.saved(step),
            STOP => job.session.acknowledge(step),
            CONTINUE => {}
            other => {
                let text = format!("{other} is no action of muster_step");
                return Err(Failure::argument(text));
            }
        }
        Ok(Code::Ok)
    })
}

/// A checkpoint that [`muster_step`] asked for could not be made.
///
/// # Safety
/// `job` is null or from [`muster_open`]; `why` is null or text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_failed(job: *const Job, step: u64, why: *const c_char) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise.
        let (job, why) = unsafe { (one(job, "job")?, text(why, "why")?) };
        lock(&job.0).session.failed_to_save(step, why);
        Ok(Code::Ok)
    })
}

/// Tells how this rank trains, or only that it does.
///
/// # Safety
/// `job` is null or from [`muster_open`]; `metrics` is null or points to metrics.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn muster_report(job: *const Job, metrics: *const Trains) -> i32 {
    entry(|| {
        // SAFETY: the caller's promise.
        let (job, trains) = unsafe { (one(job, "job")?, metrics.as_ref()) };
        let mut job = lock(&job.0);
        let world = job.env.world;
        match trains {
            None => job.session.alive(),
            Some(trains) => job.session.report(&Metrics {
                steps: trains.steps,
                world,
                training_loss: trains.training_loss,
                samples_per_second: trains.samples_per_second,
                learning_rate: trains.learning_rate,
                loss_scale: trains.loss_scale,
                data_seconds: trains.data_seconds,
                compute_seconds: trains.compute_seconds,
                communication_seconds: trains.communication_seconds,
                gradient_sync_seconds: trains.gradient_sync_seconds,
            }),
        }
        Ok(Code::Ok)
    })
}
