//! The largest values of each rank, and the rest kept back.

use super::select::Largest;
use super::{Step, compensate};
use crate::collective::{Group, GroupError};

#[derive(Debug)]
pub(super) struct TopK {
    count: usize,
    momentum: Option<f32>,
    largest: Largest,
    /// Indices, then the bits of their values.
    send: Vec<u32>,
    receive: Vec<u32>,
}

impl TopK {
    pub(super) fn new(density: f64, momentum: Option<f32>, len: usize) -> TopK {
        TopK {
            count: ((density * len as f64).ceil() as usize).clamp(1.min(len), len),
            momentum,
            largest: Largest::default(),
            send: Vec::new(),
            receive: Vec::new(),
        }
    }

    pub(super) fn reduce(&mut self, group: &mut Group, step: Step<'_>) -> Result<(), GroupError> {
        let Step {
            input,
            own,
            next,
            sum,
            ..
        } = step;
        let (residual, velocity) = (&mut next.residual, &mut next.velocity);
        match self.momentum {
            None => compensate(residual, input, &own.residual),
            Some(momentum) => {
                // Momentum correction: Lin et al. 2018, section 3.2.
                velocity.copy_from_slice(input);
                for (velocity, last) in velocity.iter_mut().zip(&own.velocity) {
                    *velocity += momentum * last;
                }
                compensate(residual, velocity, &own.residual);
            }
        }
        let chosen = self.largest.choose(residual, self.count);
        self.send.clear();
        self.send.extend_from_slice(chosen);
        for index in chosen {
            let value = &mut residual[*index as usize];
            self.send.push(value.to_bits());
            *value = 0.0;
            // Momentum factor masking, section 3.3: what was sent has no momentum left.
            if let Some(velocity) = velocity.get_mut(*index as usize) {
                *velocity = 0.0;
            }
        }
        self.receive
            .resize(self.send.len() * group.world() as usize, 0);
        *step.prepared = true;
        group.all_gather(&self.send, &mut self.receive)?;

        sum.fill(0.0);
        let all = self.receive.chunks_exact(self.send.len().max(1));
        for (rank, from) in (0..).zip(all) {
            let (indices, values) = from.split_at(self.count);
            for (index, bits) in indices.iter().zip(values) {
                let Some(to) = sum.get_mut(*index as usize) else {
                    return Err(GroupError::Protocol {
                        rank,
                        what: "an index that lies outside of its bucket",
                    });
                };
                let value = *to + f32::from_bits(*bits);
                *to = if value.is_nan() { f32::NAN } else { value };
            }
        }
        Ok(())
    }
}
