//! One forward pass and its backward, and how gradients get to where they are reduced.

use tch::{Kind, Tensor};

use super::arena::{Arena, DevicePart};
use super::{Net, TorchError};
use crate::train::Gradients;

/// A forward pass, perhaps cut between the stages of its net.
#[derive(Debug)]
pub(super) struct Pass {
    /// The output of each stage but the last, and the next one's input in its place, a leaf of its own graph.
    cuts: Vec<(Tensor, Tensor)>,
    output: Tensor,
}

impl Pass {
    pub(super) fn whole(net: &Net, input: &Tensor) -> Pass {
        Pass {
            cuts: Vec::new(),
            output: net.forward(input, true),
        }
    }

    pub(super) fn staged(net: &Net, input: &Tensor) -> Pass {
        let mut cuts = Vec::new();
        let mut output = input.shallow_clone();
        for (number, stage) in net.stages.iter().enumerate() {
            if number > 0 {
                let leaf = output.detach().set_requires_grad(true);
                cuts.push((output, leaf.shallow_clone()));
                output = leaf;
            }
            output = stage(&output, true);
        }
        Pass { cuts, output }
    }

    pub(super) fn output(&self) -> &Tensor {
        &self.output
    }

    /// Goes backward from `root`, stage by stage; `done` hears of each.
    ///
    /// Between stages, the gradient of what one gave is that of what the next one took: it goes on as that of
    /// the sum of their product, which has the same bits, for its factor is 1.
    pub(super) fn backward(
        mut self,
        root: Tensor,
        mut done: impl FnMut(usize),
    ) -> Result<(), TorchError> {
        root.f_backward()?;
        drop(root);
        drop(self.output);
        done(self.cuts.len());
        while let Some((gave, took)) = self.cuts.pop() {
            let gradient = took.f_grad()?;
            if gradient.defined() && gave.requires_grad() {
                gave.f_mul(&gradient)?.f_sum(Kind::Float)?.f_backward()?;
            }
            done(self.cuts.len());
        }
        Ok(())
    }
}

/// Where the gradients of one backward go.
#[derive(Debug)]
pub(super) struct Way<'a, 'b> {
    into: &'a mut Gradients<'b>,
    /// Of each bucket, what is still on the device; `None` on a CPU.
    device: Vec<Option<DevicePart>>,
    failed: Option<TorchError>,
}

impl<'a, 'b> Way<'a, 'b> {
    pub(super) fn new(arena: &Arena, into: &'a mut Gradients<'b>) -> Result<Self, TorchError> {
        let buckets = 0..arena.ranges.len();
        Ok(Way {
            into,
            device: buckets
                .map(|bucket| arena.device_part(bucket))
                .collect::<Result<_, _>>()?,
            failed: None,
        })
    }

    /// The bucket has its last addition of this backward.
    pub(super) fn ready(&mut self, bucket: usize) {
        if let Some(mut part) = self.device.get_mut(bucket).and_then(Option::take)
            && let Err(error) = part.add_to(self.into.bucket(bucket))
        {
            self.failed.get_or_insert(error);
        }
        self.into.ready(bucket);
    }

    /// Backward is over. (The owner of gradients on a CPU knows those that are ready and were not said to be.)
    pub(super) fn finish(mut self) -> Result<(), TorchError> {
        for bucket in 0..self.device.len() {
            if self.device[bucket].is_some() {
                self.ready(bucket);
            }
        }
        self.failed.map_or(Ok(()), Err)
    }
}
