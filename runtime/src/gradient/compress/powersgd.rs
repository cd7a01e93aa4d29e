//! Matrices as products of two thin ones, by one step of power iteration.
//!
//! For each matrix M of a rank and the last step's Q: P is the sum of all ranks' M Q, made orthonormal; the
//! rank's own Q is M^T P, and the result is P times the sum of all Q, transposed. The part that the rank has not sent
//! is M - P Q^T with its own Q. (Vogels et al. 2019, algorithms 1 and 2.)

use std::ops::Range;

use super::{Step, compensate};
use crate::collective::{Group, GroupError, Op};
use crate::random::{SplitMix, seed_of};
use crate::wide::widest;

/// One of a bucket's matrices, row by row. A vector has one column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub rows: usize,
    pub columns: usize,
}

impl Shape {
    pub(super) fn len(self) -> usize {
        self.rows.saturating_mul(self.columns)
    }
}

/// A column whose norm falls to this part when others' directions are taken out of it had no other.
const NOTHING_LEFT: f64 = 1e-6;

/// A matrix in its bucket; its thin ones, column by column, in theirs.
#[derive(Debug)]
struct Matrix {
    at: Range<usize>,
    rows: usize,
    columns: usize,
    p: Range<usize>,
    q: Range<usize>,
}

#[derive(Debug)]
pub(super) struct PowerSgd {
    seed: u64,
    matrices: Vec<Matrix>,
    /// Ranges that travel as they are.
    plain: Vec<Range<usize>>,
    /// How much of the second exchange is Q; behind it comes what is plain.
    q_len: usize,
    p_own: Vec<f32>,
    p: Vec<f32>,
    own_second: Vec<f32>,
    sum_second: Vec<f32>,
}

impl PowerSgd {
    pub(super) fn new(rank: usize, shapes: &[Shape], seed: u64) -> PowerSgd {
        let (mut matrices, mut plain): (Vec<Matrix>, Vec<Range<usize>>) = Default::default();
        let (mut at, mut p, mut q, mut rest) = (0, 0, 0, 0);
        for shape in shapes {
            let Shape { rows, columns } = *shape;
            let here = at..at + shape.len();
            at = here.end;
            if rank.saturating_mul(rows.saturating_add(columns)) >= shape.len() {
                rest += here.len();
                plain.push(here);
                continue;
            }
            matrices.push(Matrix {
                at: here,
                rows,
                columns,
                p: p..p + rank * rows,
                q: q..q + rank * columns,
            });
            (p, q) = (p + rank * rows, q + rank * columns);
        }
        PowerSgd {
            seed,
            matrices,
            plain,
            q_len: q,
            p_own: vec![0.0; p],
            p: vec![0.0; p],
            own_second: vec![0.0; q + rest],
            sum_second: vec![0.0; q + rest],
        }
    }

    /// Where the first step begins: random directions.
    pub(super) fn initial(&self) -> Vec<f32> {
        let mut all = vec![0.0; self.q_len];
        self.refresh(&mut all);
        all
    }

    /// Makes each Q orthonormal, with random columns in the place of those that hold nothing.
    fn refresh(&self, all: &mut [f32]) {
        for (i, matrix) in (0..).zip(&self.matrices) {
            let fresh = |column: usize, to: &mut [f32]| {
                let mut random = SplitMix::new(seed_of(&[self.seed, i, column as u64]));
                to.fill_with(|| random.signed_unit());
            };
            orthonormalize(&mut all[matrix.q.clone()], matrix.columns, Some(&fresh));
        }
    }

    /// `last` is the last step's Q; `shared` becomes the next one's.
    pub(super) fn reduce(
        &mut self,
        group: &mut Group,
        step: Step<'_>,
        last: &[f32],
        shared: &mut [f32],
    ) -> Result<(), GroupError> {
        let Step {
            input,
            own,
            next,
            sum,
            ..
        } = step;
        let kept = &mut next.residual;
        compensate(kept, input, &own.residual);
        for m in &self.matrices {
            let p = &mut self.p_own[m.p.clone()];
            times_thin(&kept[m.at.clone()], m, &last[m.q.clone()], p);
        }
        group.all_reduce(Op::Sum, &self.p_own, &mut self.p)?;

        let (q_own, plain) = self.own_second.split_at_mut(self.q_len);
        q_own.fill(0.0);
        for m in &self.matrices {
            let p = &mut self.p[m.p.clone()];
            orthonormalize(p, m.rows, None);
            let matrix = &mut kept[m.at.clone()];
            transposed_times_thin(matrix, m, p, &mut q_own[m.q.clone()]);
            add_product(matrix, m, p, &q_own[m.q.clone()], -1.0);
        }
        let mut at = 0;
        for range in &self.plain {
            plain[at..at + range.len()].copy_from_slice(&kept[range.clone()]);
            kept[range.clone()].fill(0.0);
            at += range.len();
        }
        *step.prepared = true;
        group.all_reduce(Op::Sum, &self.own_second, &mut self.sum_second)?;

        let (q, plain) = self.sum_second.split_at(self.q_len);
        for m in &self.matrices {
            let to = &mut sum[m.at.clone()];
            to.fill(0.0);
            add_product(to, m, &self.p[m.p.clone()], &q[m.q.clone()], 1.0);
            for value in to {
                *value = if value.is_nan() { f32::NAN } else { *value };
            }
        }
        let mut at = 0;
        for range in &self.plain {
            sum[range.clone()].copy_from_slice(&plain[at..at + range.len()]);
            at += range.len();
        }
        shared.copy_from_slice(q);
        self.refresh(shared);
        Ok(())
    }
}

widest! {
    /// P becomes M Q.
    fn times_thin(matrix: &[f32], m: &Matrix, q: &[f32], p: &mut [f32]) {
        for (i, row) in matrix.chunks_exact(m.columns).enumerate() {
            for (p, q) in p.chunks_exact_mut(m.rows).zip(q.chunks_exact(m.columns)) {
                p[i] = dot(row, q);
            }
        }
    }
}

widest! {
    /// Q += M^T P, in one pass over the matrix.
    fn transposed_times_thin(matrix: &[f32], m: &Matrix, p: &[f32], q: &mut [f32]) {
        for (i, row) in matrix.chunks_exact(m.columns).enumerate() {
            for (p, q) in p.chunks_exact(m.rows).zip(q.chunks_exact_mut(m.columns)) {
                add_scaled(q, p[i], row);
            }
        }
    }
}

widest! {
    /// to += sign P Q^T.
    fn add_product(to: &mut [f32], m: &Matrix, p: &[f32], q: &[f32], sign: f32) {
        for (i, row) in to.chunks_exact_mut(m.columns).enumerate() {
            for (p, q) in p.chunks_exact(m.rows).zip(q.chunks_exact(m.columns)) {
                add_scaled(row, sign * p[i], q);
            }
        }
    }
}

/// to += factor * from.
#[inline(always)]
fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

/// Sixteen sums side by side, always added in the same order.
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; 16];
    let (a, rest_a) = a.as_chunks::<16>();
    let (b, rest_b) = b.as_chunks::<16>();
    for (a, b) in a.iter().zip(b) {
        for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
            *lane += a * b;
        }
    }
    for ((lane, a), b) in lanes.iter_mut().zip(rest_a).zip(rest_b) {
        *lane += a * b;
    }
    lanes.iter().sum()
}

fn dot_wide(a: &[f32], b: &[f32]) -> f64 {
    let products = a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b));
    products.sum()
}

type Fresh<'a> = &'a dyn Fn(usize, &mut [f32]);

/// Gram and Schmidt's orthonormal columns of length `len`, each gone through twice (Giraud et al.: The Loss
/// of Orthogonality in the Gram-Schmidt Orthogonalization Process, 2005). A column in which nothing is left
/// becomes zero, or is drawn anew by `fresh`; what is not finite stays so, or is drawn anew.
fn orthonormalize(columns: &mut [f32], len: usize, fresh: Option<Fresh<'_>>) {
    for k in 0..columns.len() / len.max(1) {
        let (before, rest) = columns.split_at_mut(k * len);
        let column = &mut rest[..len];
        if !normalize(before, column) {
            if let Some(fresh) = fresh {
                fresh(k, column);
                normalize(before, column);
            }
            continue;
        }
        if let Some(fresh) = fresh
            && !column.iter().all(|value| value.is_finite())
        {
            fresh(k, column);
            normalize(before, column);
        }
    }
}

/// False, if nothing is left; then it is zero.
fn normalize(before: &[f32], column: &mut [f32]) -> bool {
    let was = dot_wide(column, column).sqrt();
    for _ in 0..2 {
        for other in before.chunks_exact(column.len().max(1)) {
            let along = dot_wide(column, other) as f32;
            add_scaled(column, -along, other);
        }
    }
    let norm = dot_wide(column, column).sqrt();
    // Infinity and NaN are not nothing: they stay.
    if was.is_finite() && norm <= was * NOTHING_LEFT {
        column.fill(0.0);
        return false;
    }
    for value in column.iter_mut() {
        *value = (f64::from(*value) / norm) as f32;
    }
    true
}

#[cfg(test)]
mod tests;
