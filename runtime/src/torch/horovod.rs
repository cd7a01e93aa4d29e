//! Horovod's way of working (Sergeev and Del Balso: Horovod, 2018): one's own training loop, with an optimizer
//! that averages gradients over all ranks.
//!
//! For workers that are restarted with every generation: they restore a checkpoint at their start, and the loss of
//! a rank is an error that ends them. Started by `muster run`, `torchrun`, or by hand as one rank.
//!
//! ```
//! use muster_runtime::gradient::compress::Codec;
//! use muster_runtime::torch::{Rule, horovod};
//! use tch::nn::{self, Module};
//!
//! let mut hvd = horovod::init()?;
//! let variables = nn::VarStore::new(tch::Device::Cpu);
//! let net = nn::linear(variables.root(), 2, 1, Default::default());
//! let mut optimizer = horovod::DistributedOptimizer::new(&variables, Rule::momentum(0.9), Codec::Fp16)?;
//! hvd.broadcast_parameters(&variables, 0)?;
//! hvd.broadcast_optimizer_state(&mut optimizer, 0)?;
//!
//! let input = tch::Tensor::from_slice(&[1f32, 2.0]) + f64::from(hvd.rank());
//! for _ in 0..3 {
//!     let loss = (net.forward(&input) - 1.0).square().mean(tch::Kind::Float);
//!     optimizer.backward(&mut hvd, &loss)?;
//!     optimizer.step(0.01 * f64::from(hvd.size()))?;
//! }
//! let loss = net.forward(&input).mean(tch::Kind::Float);
//! let mean = hvd.allreduce(&loss, horovod::Reduce::Average)?;
//! assert_eq!(mean.numel(), 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, channel};

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::arena::{Arena, blob};
use super::shim::Hooks;
use super::{Optimizer, Rule, TorchError};
use crate::collective::{Element, Group, GroupConfig, GroupError, Op};
use crate::env::{EnvError, WorkerEnv};
use crate::gradient::compress::{Bucket, Codec, CodecError, Reduced};
use crate::train::BUCKET_SIZES;

#[derive(Debug, thiserror::Error)]
pub enum HorovodError {
    #[error(transparent)]
    Env(#[from] EnvError),
    #[error(transparent)]
    Group(#[from] GroupError),
    #[error(transparent)]
    Torch(#[from] TorchError),
    #[error(transparent)]
    Codec(#[from] CodecError),
    #[error("tensors of kind {0:?} cannot be reduced; convert them to Float")]
    Kind(Kind),
    #[error("the optimizer's state that rank {root} sent is not of this rule and model")]
    State { root: u32 },
    #[error("the thread that reduces gradients panicked")]
    Panicked,
}

impl From<tch::TchError> for HorovodError {
    fn from(error: tch::TchError) -> HorovodError {
        TorchError::from(error).into()
    }
}

/// This process's place among all.
#[derive(Debug)]
pub struct Horovod {
    env: WorkerEnv,
    group: Group,
}

/// Connects all ranks that the environment tells of.
///
/// # Errors
/// The environment describes no worker, or not all ranks came within a minute.
pub fn init() -> Result<Horovod, HorovodError> {
    let env = WorkerEnv::from_env()?;
    let group = Group::form(&GroupConfig::from_env(&env))?;
    Ok(Horovod { env, group })
}

/// Reductions of all ranks' values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reduce {
    Average,
    Sum,
    Min,
    Max,
}

impl Horovod {
    /// Of a group that was formed otherwise.
    pub fn with(env: WorkerEnv, group: Group) -> Horovod {
        Horovod { env, group }
    }

    pub fn rank(&self) -> u32 {
        self.group.rank()
    }

    pub fn size(&self) -> u32 {
        self.group.world()
    }

    /// Among the ranks of this host: the number of the GPU to use.
    pub fn local_rank(&self) -> u32 {
        self.env.local_rank
    }

    pub fn group(&mut self) -> &mut Group {
        &mut self.group
    }

    /// The reduction of all ranks' tensors, the same bits on every rank, where the tensor is. Integers are
    /// averaged rounding towards zero; 16-bit floats are added in 32 bits.
    ///
    /// # Errors
    /// A peer is lost or out of step, or the kind cannot be reduced.
    pub fn allreduce(&mut self, tensor: &Tensor, how: Reduce) -> Result<Tensor, HorovodError> {
        let kind = tensor.kind();
        let work = match kind {
            Kind::Half | Kind::BFloat16 => Kind::Float,
            kind => kind,
        };
        let flat = tensor.f_to_device(Device::Cpu)?.f_to_kind(work)?;
        let flat = flat.f_contiguous()?.f_view([-1])?;
        let sum = match work {
            Kind::Float => self.reduced::<f32>(&flat, how)?,
            Kind::Double => self.reduced::<f64>(&flat, how)?,
            Kind::Int64 => self.reduced::<i64>(&flat, how)?,
            Kind::Int => self.reduced::<i32>(&flat, how)?,
            kind => return Err(HorovodError::Kind(kind)),
        };
        let size = f64::from(self.size());
        let result = match how {
            Reduce::Average if matches!(work, Kind::Int64 | Kind::Int) => {
                sum.f_divide_scalar_mode(size, "trunc")?
            }
            Reduce::Average => sum.f_div_scalar(size)?,
            Reduce::Sum | Reduce::Min | Reduce::Max => sum,
        };
        let result = result.f_to_kind(kind)?.f_view(tensor.size().as_slice())?;
        Ok(result.f_to_device(tensor.device())?)
    }

    fn reduced<T: Element + tch::kind::Element>(
        &mut self,
        flat: &Tensor,
        how: Reduce,
    ) -> Result<Tensor, HorovodError> {
        let mut own = vec![T::zeroed(); flat.numel()];
        flat.f_copy_data(&mut own, flat.numel())?;
        let mut all = own.clone();
        let op = match how {
            Reduce::Average | Reduce::Sum => Op::Sum,
            Reduce::Min => Op::Min,
            Reduce::Max => Op::Max,
        };
        self.group.all_reduce(op, &own, &mut all)?;
        Ok(Tensor::f_from_slice(&all)?)
    }

    /// All variables, buffers too, become those of rank `root`.
    ///
    /// # Errors
    /// A peer is lost or out of step.
    pub fn broadcast_parameters(
        &mut self,
        variables: &VarStore,
        root: u32,
    ) -> Result<(), HorovodError> {
        let _guard = tch::no_grad_guard();
        let named: BTreeMap<String, Tensor> = variables.variables().into_iter().collect();
        for mut tensor in named.into_values() {
            let here = tensor.f_to_device(Device::Cpu)?.f_contiguous()?;
            let mut own = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
            here.f_copy_data_u8(&mut own, tensor.numel())?;
            let mut came = own.clone();
            self.group.broadcast(root, &own, &mut came)?;
            let came = Tensor::f_from_data_size(&came, &tensor.size(), tensor.kind())?;
            tensor.f_copy_(&came)?;
        }
        Ok(())
    }

    /// The optimizer's state becomes that of rank `root`.
    ///
    /// # Errors
    /// A peer is lost or out of step, or has another optimizer.
    pub fn broadcast_optimizer_state(
        &mut self,
        optimizer: &mut DistributedOptimizer,
        root: u32,
    ) -> Result<(), HorovodError> {
        let mut own = Vec::new();
        optimizer.optimizer.encode(&mut own)?;
        let mut came = own.clone();
        self.group.broadcast(root, &own, &mut came)?;
        let mut rest = came.as_slice();
        match optimizer.optimizer.decode(&mut rest) {
            Some(state) if rest.is_empty() => Ok(optimizer.optimizer.restore(&state)?),
            _ => Err(HorovodError::State { root }),
        }
    }
}

/// An optimizer of the mean of all ranks' gradients, which are reduced while backward is still under way.
#[derive(Debug)]
pub struct DistributedOptimizer {
    /// Taken off before the arena goes.
    hooks: Hooks,
    arena: Arena,
    optimizer: Optimizer,
    buckets: Vec<Bucket>,
    own: Vec<Vec<f32>>,
    reduced: Vec<Reduced>,
    /// Ranks that the gradients are summed over; 0: there are none.
    ranks: u32,
}

impl DistributedOptimizer {
    /// For all variables that want gradients, which are moved into one flat tensor. PowerSGD's `shapes` are
    /// filled in for each bucket.
    ///
    /// # Errors
    /// A variable is not in `f32`, or the codec cannot work.
    pub fn new(
        variables: &VarStore,
        rule: Rule,
        codec: Codec,
    ) -> Result<DistributedOptimizer, HorovodError> {
        let arena = Arena::new(variables, BUCKET_SIZES)?;
        let mut buckets = Vec::new();
        for (number, range) in arena.ranges.iter().enumerate() {
            let codec = match &codec {
                Codec::PowerSgd { rank, .. } => Codec::PowerSgd {
                    rank: *rank,
                    shapes: arena.shapes(number),
                },
                other => other.clone(),
            };
            buckets.push(Bucket::new(codec, range.len(), number as u64)?);
        }
        Ok(DistributedOptimizer {
            hooks: arena.hooks()?,
            optimizer: Optimizer::new(rule, arena.len(), arena.device)?,
            own: arena
                .ranges
                .iter()
                .map(|range| vec![0.0; range.len()])
                .collect(),
            reduced: vec![Reduced::default(); buckets.len()],
            arena,
            buckets,
            ranks: 0,
        })
    }

    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// The gradient of the mean of all ranks' losses, for the next [`step`](Self::step).
    ///
    /// # Errors
    /// A peer is lost or out of step, or the loss has no gradient. The parameters are as they were.
    pub fn backward(&mut self, hvd: &mut Horovod, loss: &Tensor) -> Result<(), HorovodError> {
        self.ranks = 0;
        for own in &mut self.own {
            own.fill(0.0);
        }
        let own = &mut self.own;
        let arena = self.arena.lend(|bucket| {
            let memory = own.get_mut(bucket).map_or(&mut [][..], Vec::as_mut_slice);
            (memory.as_mut_ptr(), memory.len())
        })?;
        let buckets = arena.ranges.len();
        let mut device = (0..buckets)
            .map(|bucket| arena.device_part(bucket))
            .collect::<Result<Vec<_>, _>>()?;
        let (group, work) = (&mut hvd.group, (&mut self.buckets, &mut self.reduced));
        let hooks = &self.hooks;
        let (computed, reduced) = std::thread::scope(|scope| {
            let (tell, told) = channel();
            let communication = scope.spawn(move || reduce(group, work.0, work.1, &told));
            let mut failed = Ok(());
            let mut ready = |bucket: usize| {
                // Once a copy has failed nothing more is sent: no rank gets a sum with a part that is not whole.
                let Some(memory) = own.get_mut(bucket).filter(|_| failed.is_ok()) else {
                    return;
                };
                if memory.is_empty() {
                    return;
                }
                if let Some(mut part) = device.get_mut(bucket).and_then(Option::take)
                    && let Err(error) = part.add_to(memory)
                {
                    failed = Err(error);
                    return;
                }
                let memory = std::mem::take(memory);
                // Nobody hears it when the reduction has failed: that is reported below.
                let _unheard = tell.send((bucket, memory));
            };
            let backward = hooks.during(&mut ready, || loss.f_backward());
            if backward.is_ok() {
                (0..buckets).for_each(&mut ready);
            }
            drop(tell);
            let computed = backward.map_err(TorchError::from).and(failed);
            (computed, communication.join())
        });
        drop(arena);
        let (memory, reduced) = reduced.map_err(|_panic| HorovodError::Panicked)?;
        for (bucket, memory) in memory {
            if let Some(own) = self.own.get_mut(bucket) {
                *own = memory;
            }
        }
        computed?;
        reduced?;
        self.ranks = hvd.size();
        Ok(())
    }

    /// Moves the parameters by the gradient, with the learning rate `rate`. Without a gradient nothing happens.
    ///
    /// # Errors
    /// The device failed.
    pub fn step(&mut self, rate: f64) -> Result<(), HorovodError> {
        let ranks = std::mem::take(&mut self.ranks);
        if ranks == 0 {
            return Ok(());
        }
        let mut parts = Vec::new();
        for ((range, reduced), bucket) in self
            .arena
            .ranges
            .iter()
            .zip(&mut self.reduced)
            .zip(&mut self.buckets)
        {
            bucket.commit(reduced);
            for value in &mut reduced.sum {
                *value /= ranks as f32;
            }
            // SAFETY: the sums stay where they are until the tensor is gone, at the end of this call.
            let part = unsafe { blob(reduced.sum.as_ptr(), &[range.len() as i64])? };
            parts.push((range.start, part.f_to_device(self.arena.device)?));
        }
        self.optimizer.step_parts(&self.arena.flat, &parts, rate)?;
        Ok(())
    }
}

type Memory = Vec<(usize, Vec<f32>)>;

/// Reduces buckets in the order of their numbers, whatever the order in which they come: it is the same on all
/// ranks. Gives back what came.
fn reduce(
    group: &mut Group,
    buckets: &mut [Bucket],
    reduced: &mut [Reduced],
    told: &Receiver<(usize, Vec<f32>)>,
) -> (Memory, Result<(), GroupError>) {
    let mut early: BTreeMap<usize, Vec<f32>> = BTreeMap::new();
    let mut done = Memory::new();
    let mut outcome = Ok(());
    for (bucket, memory) in told {
        early.insert(bucket, memory);
        while let Some(memory) = early.remove(&done.len()) {
            let number = done.len();
            if let (Ok(()), Some(bucket), Some(into)) =
                (&outcome, buckets.get_mut(number), reduced.get_mut(number))
            {
                outcome = bucket.reduce(group, &memory, into);
            }
            done.push((number, memory));
        }
    }
    done.extend(early);
    (done, outcome)
}
