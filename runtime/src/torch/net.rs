//! A forward pass, in stages.

use tch::nn::{self, VarStore};
use tch::{Device, Tensor};

/// One stage of a forward pass: what it computes, in training or not.
pub type Stage = Box<dyn Fn(&Tensor, bool) -> Tensor + Send>;

/// Variables, and the stages that use them.
///
/// One stage is enough. With several, [`Overlap::Staged`](super::Overlap::Staged) can go backward through one
/// after the other. A stage gives one tensor, and must not use variables that a *later* one makes; those of
/// an earlier one it may (tied weights).
///
/// ```
/// use muster_runtime::torch::Net;
/// use tch::nn::{self, Module};
///
/// let mut net = Net::new(tch::Device::Cpu);
/// net.stage("hidden", |path| {
///     let layer = nn::linear(path, 64, 32, Default::default());
///     move |x, _train| layer.forward(x).relu()
/// });
/// net.stage("classes", |path| {
///     let layer = nn::linear(path, 32, 10, Default::default());
///     move |x, train| layer.forward(&x.dropout(0.1, train))
/// });
/// let scores = net.forward(&tch::Tensor::zeros([3, 64], tch::kind::FLOAT_CPU), false);
/// assert_eq!(scores.size(), [3, 10]);
/// ```
pub struct Net {
    pub(super) variables: VarStore,
    pub(super) stages: Vec<Stage>,
    /// Trainable variables after each stage.
    pub(super) ends: Vec<usize>,
}

impl std::fmt::Debug for Net {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Net")
            .field("variables", &self.variables.len())
            .field("stages", &self.stages.len())
            .finish_non_exhaustive()
    }
}

impl Net {
    /// Without stages yet.
    pub fn new(device: Device) -> Net {
        Net {
            variables: VarStore::new(device),
            stages: Vec::new(),
            ends: Vec::new(),
        }
    }

    /// Of variables that are there already, in one stage.
    pub fn of(
        variables: VarStore,
        forward: impl Fn(&Tensor, bool) -> Tensor + Send + 'static,
    ) -> Net {
        let ends = vec![variables.trainable_variables().len()];
        Net {
            variables,
            stages: vec![Box::new(forward)],
            ends,
        }
    }

    /// Adds a stage: `make` makes its variables below `name`, and gives its forward pass.
    pub fn stage<F>(&mut self, name: &str, make: impl FnOnce(&nn::Path<'_>) -> F)
    where
        F: Fn(&Tensor, bool) -> Tensor + Send + 'static,
    {
        let forward = make(&(self.variables.root() / name));
        self.stages.push(Box::new(forward));
        self.ends.push(self.variables.trainable_variables().len());
    }

    pub fn variables(&self) -> &VarStore {
        &self.variables
    }

    /// For loading what was trained before, or freezing.
    pub fn variables_mut(&mut self) -> &mut VarStore {
        &mut self.variables
    }

    pub fn forward(&self, input: &Tensor, train: bool) -> Tensor {
        let start = input.shallow_clone();
        self.stages.iter().fold(start, |x, stage| stage(&x, train))
    }
}
