//! Checkpoints of a job with a store: every rank saves its part of one state, and all load the same.
//!
//! State that all ranks hold is written once, spread evenly over them; a rank's own state (residuals of error feedback)
//! is written by that rank. A rank that has no state yet seals an empty part, so that the save is whole.

use std::collections::HashMap;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use muster_checkpoint::plan::Rank;
use muster_protocol::control::slots::STORE_ENV;
use serde_json::json;

use super::config::{Better, TrainError};
use super::model::Model;
use super::parallel::Parallel;
use super::report::{Evaluation, News, Save};
use super::state::PIECES;
use super::tensors::{Load, Named, Reach, Room};
use crate::collective::{Group, GroupError};
use crate::env::WorkerEnv;
use crate::gradient::compress::{Own, reshard};
use crate::live::{Share, seated};
use crate::page::Page;
use crate::saving::{Blob, Held, Memory, Restore, RestoreError, SaveError, Saver};

/// The blob that says how good a checkpoint's state is.
const METRICS: &str = "metrics";

/// Residuals that a rank has not sent yet: lists of an [`Own`], in its order, by the names of their tensors.
const OWN: [&str; 2] = ["residual", "velocity"];

/// How far a save goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    Plan,
    Save,
}

/// This rank's saves, in one generation after the other.
#[derive(Debug)]
pub(super) struct Saves {
    page: Arc<Page>,
    /// The job's folder in its store.
    store: OsString,
    /// Where the launcher restarts workers: this rank's place, and its node.
    fixed: Option<(WorkerEnv, u32)>,
    /// How long a save waits for a slot.
    pub(super) wait: Duration,
    /// In the generation that is on: the place, and every rank's node.
    on: Option<(WorkerEnv, Vec<u32>)>,
    /// Tensors of each rank, as the saver's plan has them.
    planned: Option<(Vec<u32>, Vec<Held>)>,
    saver: Option<Saver>,
    /// The newest step that was saved in this generation.
    saved: Option<u64>,
    /// The generation begins with what was saved before this step.
    restored: Option<u64>,
    /// This step is saved when its evaluation is known.
    deferred: Option<u64>,
}

impl Saves {
    /// Of a process that stays while generations change, or of one with a fixed place.
    pub(super) fn new(page: Arc<Page>, store: OsString, fixed: Option<(WorkerEnv, u32)>) -> Saves {
        Saves {
            page,
            store,
            fixed,
            wait: Duration::from_secs(30),
            on: None,
            planned: None,
            saver: None,
            saved: None,
            restored: None,
            deferred: None,
        }
    }

    /// The checkpoint that the generation begins with.
    pub(super) fn checkpoint(&self) -> Result<Option<Restore>, RestoreError> {
        Restore::of_page(self.page.clone(), |name| match name {
            STORE_ENV => Some(self.store.clone()),
            other => std::env::var_os(other),
        })
    }

    /// A generation begins; all ranks call it.
    pub(super) fn begin(&mut self, group: &mut Group) -> Result<(), GroupError> {
        self.end();
        let place = match &self.fixed {
            Some((env, node)) => Some((env.clone(), *node)),
            None => seated(&self.page).map(|place| {
                let env = WorkerEnv {
                    rank: place.rank,
                    world: place.world,
                    local_rank: place.local_rank,
                    master: Some((place.master.ip().to_string(), place.master.port())),
                    restart: place.restarts.into(),
                    generation: place.term.number(),
                    digest: place.digest,
                };
                (env, place.node_rank)
            }),
        };
        let node = place.as_ref().map_or(0, |(_, node)| u64::from(*node));
        let mut nodes = vec![0; group.world() as usize];
        group.all_gather(&[node], &mut nodes)?;
        let nodes = nodes.into_iter().map(|node| node as u32).collect();
        self.on = place.map(|(env, _)| (env, nodes));
        self.saved = self.restored.take();
        Ok(())
    }

    /// The generation is over: what would be saved now could not be committed.
    pub(super) fn end(&mut self) {
        self.on = None;
        self.planned = None;
        self.saved = None;
        self.deferred = None;
    }

    /// Plans who writes what, if that has changed.
    fn plan(
        &mut self,
        entered: &[u32],
        common: Vec<Held>,
        own: impl Fn(u32) -> Vec<Held>,
    ) -> Result<(), SaveError> {
        let same = |(ranks, held): &(Vec<u32>, Vec<Held>)| ranks == entered && *held == common;
        if self.saver.is_some() && self.planned.as_ref().is_some_and(same) {
            return Ok(());
        }
        let Some((env, nodes)) = &self.on else {
            return Ok(());
        };
        let apart = own(0).is_empty();
        let each = |rank: u32| match apart {
            true => Vec::new(),
            false => common.iter().cloned().chain(own(rank)).collect(),
        };
        let each: Vec<Vec<Held>> = (0..env.world).map(each).collect();
        let held = |rank: u32| match (entered.binary_search(&rank), apart) {
            (Err(_), _) => &[][..],
            (Ok(_), true) => &common[..],
            (Ok(_), false) => each.get(rank as usize).map_or(&[][..], |held| &held[..]),
        };
        let ranks: Vec<Rank<'_>> = (0..env.world)
            .zip(nodes)
            .map(|(rank, node)| Rank {
                node: *node,
                held: held(rank),
            })
            .collect();
        let before = self.saver.take();
        self.planned = None;
        let mut saver = Saver::of(self.page.clone(), env, &ranks, before)?;
        saver.wait(self.wait);
        self.saver = Some(saver);
        self.planned = Some((entered.to_vec(), common));
        Ok(())
    }
}

impl<M: Model> Parallel<M> {
    /// Whether the state before this step is to be saved when it was evaluated: the evaluation comes next, and all
    /// ranks know. Then its commit saves it.
    pub(super) fn saves_with_evaluation(&mut self, step: u64, share: &Share) -> bool {
        let all = share.entered.len() == share.world as usize;
        let due = all && self.evaluation_is_due(share.entered.len());
        match &mut self.saves {
            Some(saves) if due => {
                saves.deferred = Some(step);
                true
            }
            _ => false,
        }
    }

    /// The state before this step was evaluated, and nothing of it has changed yet.
    pub(super) fn save_evaluated(&mut self, step: u64, best: bool) {
        let wanted = self.saves.as_ref().map(|saves| saves.deferred);
        let all = |share: &Share| share.entered.len() == share.world as usize;
        // One that listens does not know whether it is the best.
        let Some(share) = self.share.take_if(|share| all(share)) else {
            return;
        };
        let due = (best && wanted.is_some()) || wanted == Some(Some(step));
        if due && let Err(error) = self.save_part(step, &share) {
            self.fault.get_or_insert(error);
        }
        self.share = Some(share);
    }

    /// The training is over with this step, which changed nothing that is saved but the count of steps.
    pub(super) fn saved_already(&mut self, step: u64) {
        if let Some(saves) = &mut self.saves
            && saves.saved == Some(step)
        {
            saves.saved = Some(step + 1);
        }
    }

    /// Plans the saves of this generation as far as it is known who has a state, so that the launcher makes slots
    /// while training goes on. Every rank calls it between two steps; it costs nothing where nothing has changed.
    ///
    /// # Errors
    /// The training cannot be saved as it was started.
    pub(super) fn prepare_saves(&mut self, share: &Share) -> Result<(), TrainError> {
        let due = |saves: &mut Saves| {
            let planned = saves.planned.as_ref();
            let known = planned.is_some_and(|(entered, _)| *entered == share.entered);
            saves.on.is_some() && !known && !share.entered.is_empty()
        };
        if !self.model.is_done() {
            return Ok(());
        }
        let Some(mut saves) = self.saves.take_if(due) else {
            return Ok(());
        };
        let step = self.progress.transactions;
        let planned = self.save_by(&mut saves, step, share, Does::Plan);
        self.saves = Some(saves);
        planned.map(|_| ())
    }

    /// Copies this rank's part of the state before `step` into a slot, unless it has been. Every rank calls it
    /// between the same two steps, also one without a state.
    ///
    /// # Errors
    /// The training cannot be saved as it was started. That the slots are busy is news, and no error.
    pub(super) fn save_part(&mut self, step: u64, share: &Share) -> Result<(), TrainError> {
        let due = |saves: &mut Saves| saves.on.is_some() && saves.saved != Some(step);
        if share.entered.is_empty() {
            return Ok(());
        }
        let Some(mut saves) = self.saves.take_if(due) else {
            return Ok(());
        };
        let done = self.save_by(&mut saves, step, share, Does::Save);
        if done.is_ok() {
            saves.saved = Some(step);
        }
        self.saves = Some(saves);
        self.news.push_back(match done {
            Ok(Some(save)) => News::Saved(save),
            Ok(None) => News::NotSaved {
                step,
                why: "both checkpoint slots are occupied, and the job leaves such saves out".into(),
            },
            Err(TrainError::Save { source, .. }) if matches!(*source, SaveError::Busy { .. }) => {
                let why = source.to_string();
                News::NotSaved { step, why }
            }
            Err(error) => return Err(error),
        });
        Ok(())
    }

    /// The save that was made; none, if it was only planned, or left out because the slots are occupied.
    fn save_by(
        &mut self,
        saves: &mut Saves,
        step: u64,
        share: &Share,
        does: Does,
    ) -> Result<Option<Save>, TrainError> {
        let failed = |source: SaveError| TrainError::Save {
            step,
            source: Box::new(source),
        };
        self.with_tensors(Reach::Devices, |training, tensors| {
            let common = tensors.iter().map(Named::held).collect();
            let own = |rank| training.own_tensors(rank).map(|t| t.held()).collect();
            saves.plan(&share.entered, common, own).map_err(failed)?;
            let own: Vec<Named<'_>> = training.own_tensors(share.rank).collect();
            let bytes: HashMap<&str, Memory<'_>> = (tensors.iter().chain(&own))
                .map(|tensor| (&*tensor.name, tensor.bytes.memory()))
                .collect();
            let state = |name: &str, _: &_| bytes.get(name).copied();
            let Some(saver) = &mut saves.saver else {
                return Err(failed(SaveError::NoAnswer));
            };
            if does == Does::Plan {
                saver.prepare(state);
                return Ok(None);
            }
            saver.look(|name, _| match bytes.get(name)? {
                Memory::Host(bytes) => Some(*bytes),
                // It would have to be copied first.
                Memory::Device(_) => None,
            });
            let blobs = match share.entered.first() == Some(&share.rank) {
                true => training.blobs(),
                false => Vec::new(),
            };
            let saved = saver.save(step, state, blobs).map_err(failed)?;
            Ok((!saved.left_out).then_some(Save {
                step,
                bytes: saved.bytes,
                copied: saved.copied,
                waited: saved.waited,
            }))
        })
    }

    /// Residuals that this rank has not sent yet, under their names for `rank`.
    fn own_tensors(&self, rank: u32) -> impl Iterator<Item = Named<'_>> {
        let buckets = self.buckets.iter().enumerate();
        buckets.flat_map(move |(number, bucket)| {
            let lists = bucket.own().lists().into_iter().zip(OWN);
            let kept = lists.filter(|(list, _)| !list.is_empty());
            kept.map(move |(list, what)| {
                Named::floats(own(what, number, rank), &[list.len() as u64], list)
            })
        })
    }

    /// All that is no tensor, and the same on every rank.
    fn blobs(&self) -> Vec<Blob> {
        let mut blobs: Vec<Blob> = PIECES
            .into_iter()
            .zip(self.pieces())
            .map(|(name, data)| Blob {
                name: name.to_owned(),
                data,
            })
            .collect();
        blobs.push(Blob {
            name: METRICS.to_owned(),
            data: self.metrics().to_string().into_bytes(),
        });
        blobs
    }

    /// `metric` and `loss` are those of this very state, if it was evaluated.
    fn metrics(&self) -> serde_json::Value {
        let better = self.config.better;
        let steps = self.progress.steps;
        let of = |evaluation: &Evaluation| {
            json!({
                "steps": evaluation.step,
                "metric": better.value(&evaluation.measured),
                "loss": evaluation.measured.mean_loss(),
            })
        };
        let here = self.latest.as_ref().filter(|e| e.step == steps);
        json!({
            "steps": steps,
            "metric": here.map(|e| better.value(&e.measured)),
            "loss": here.map(|e| e.measured.mean_loss()),
            "better": match better {
                Better::LowerLoss => "lower",
                Better::Higher(_) => "higher",
            },
            "evaluated": self.latest.as_ref().map(of),
            "best": self.progress.best.as_ref().map(of),
        })
    }

    /// Becomes what was saved, in any world.
    ///
    /// # Errors
    /// It is of another training or model, which the error tells, or damaged. This training is of no use then.
    pub(super) fn load_checkpoint(
        &mut self,
        checkpoint: &Restore,
        (rank, world): (u32, u32),
    ) -> Result<(), TrainError> {
        let step = checkpoint.step();
        let failed = |source: crate::train::BoxError| TrainError::Checkpoint { step, source };
        let mut pieces = Vec::with_capacity(PIECES.len());
        for name in PIECES {
            let piece = checkpoint.blob(name);
            pieces.push(piece.ok_or(TrainError::Piece { step, name })?);
        }
        let lasting = self.lasting(&pieces);
        let lasting = lasting.map_err(|name| TrainError::Piece { step, name })?;

        let mut load = Load::new(checkpoint, &|_| true);
        self.load_tensors(&mut load, failed)?;
        if let Some(name) = load.left() {
            return Err(TrainError::Left { step, name });
        }
        self.forget_own();
        self.load_own(checkpoint, &mut load, (rank, world))
            .map_err(|error| failed(error.into()))?;
        self.become_lasting(lasting);
        if let Some(saves) = &mut self.saves {
            saves.restored = Some(self.progress.transactions);
        }
        Ok(())
    }

    /// Loads the residuals that the ranks that saved had not sent yet, as [`reshard`] deals them. Where the codec kept
    /// nothing then, this begins at zero.
    fn load_own(
        &mut self,
        checkpoint: &Restore,
        load: &mut Load<'_>,
        (rank, world): (u32, u32),
    ) -> Result<(), crate::saving::LoadError> {
        for (number, bucket) in self.buckets.iter_mut().enumerate() {
            let empty = bucket.own().clone();
            let mut mine: Vec<Own> = Vec::new();
            for saved in (rank..checkpoint.world()).step_by(world.max(1) as usize) {
                let mut one = empty.clone();
                let mut rooms = Vec::new();
                for (list, what) in one.lists_mut().into_iter().zip(OWN) {
                    let name = own(what, number, saved);
                    let tensor = checkpoint.manifest().tensor(&name);
                    // One that listened had nothing.
                    if !list.is_empty() && tensor.is_some() {
                        let shape = [list.len() as u64];
                        rooms.push(Room::floats(name, &shape, list));
                    }
                }
                load.fill(rooms)?;
                mine.push(one);
            }
            let sum = reshard(&mine, 1).and_then(|mut sum| sum.pop());
            if let Some(sum) = sum {
                bucket.set_own(sum);
            }
        }
        Ok(())
    }
}

fn own(what: &str, bucket: usize, rank: u32) -> String {
    format!("{what}.{bucket}.{rank}")
}

/// The folder of this job's store, if it has one.
pub(super) fn store_of_job() -> Option<OsString> {
    std::env::var_os(STORE_ENV)
}

/// This rank's node, as the launcher numbers it.
pub(super) fn node_of_job() -> u32 {
    let value = std::env::var("GROUP_RANK").ok();
    value.and_then(|text| text.parse().ok()).unwrap_or(0)
}
