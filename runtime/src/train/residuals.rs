//! Residuals that ranks had not sent yet, when some of them leave in good order.
//!
//! With error feedback each rank keeps back a part of its gradients. It goes with a rank that is lost. At a
//! planned boundary nothing needs to be lost, but no rank is told which of them will go. So at the boundary
//! all ranks add up what they keep back, and remember the sum; and before the first step of the next
//! generation those that stayed add up again what they still have. The missing part belonged to the ranks that left,
//! and the first one that remembers takes it over: over all ranks the sum stays what it was, but for rounding.
//!
//! None of this is registered, and a rank that is lost in the middle loses no more than its own: the sum is
//! remembered until a step is committed, and adding what is missing a second time adds nothing.

use super::model::Model;
use super::parallel::Parallel;
use crate::collective::{Group, GroupError, Op};
use crate::gradient::compress::{Bucket, Own};

impl<M: Model> Parallel<M> {
    /// Whether any codec keeps anything back: the same on every rank.
    fn keeps_back(&self) -> bool {
        self.buckets.iter().any(|bucket| !bucket.own().is_empty())
    }

    /// Forgets this rank's own part of a state that it holds no more.
    pub(super) fn forget_own(&mut self) {
        self.kept_back = None;
        self.buckets.iter_mut().for_each(Bucket::clear_own);
    }

    /// At a boundary before which any rank may leave for good.
    pub(super) fn keep_back(&mut self, group: &mut Group) -> Result<(), GroupError> {
        if self.keeps_back() {
            self.kept_back = Some(self.total(group)?);
        }
        Ok(())
    }

    /// At the beginning of a generation. All ranks call it, newcomers too.
    pub(super) fn take_up(&mut self, group: &mut Group, survived: bool) -> Result<(), GroupError> {
        if !survived {
            self.forget_own();
        }
        if !self.keeps_back() {
            return Ok(());
        }
        let mut remember = vec![0u8; group.world() as usize];
        group.all_gather(&[u8::from(self.kept_back.is_some())], &mut remember)?;
        let Some(heir) = remember.iter().position(|remembers| *remembers != 0) else {
            return Ok(());
        };
        let now = self.total(group)?;
        let before = self.kept_back.take();
        if let Some(before) = before.filter(|_| group.rank() as usize == heir) {
            for ((bucket, before), now) in self.buckets.iter_mut().zip(before).zip(now) {
                let own = add_difference(bucket.own().clone(), before, now);
                bucket.set_own(own);
            }
        }
        Ok(())
    }

    /// The sum of what all ranks keep back, by bucket.
    fn total(&self, group: &mut Group) -> Result<Vec<Own>, GroupError> {
        let mut total = Vec::with_capacity(self.buckets.len());
        for bucket in &self.buckets {
            let (mut own, mut sum) = (bucket.own().clone(), bucket.own().clone());
            for (own, sum) in own.lists_mut().into_iter().zip(sum.lists_mut()) {
                group.all_reduce(Op::Sum, own, sum)?;
            }
            total.push(sum);
        }
        Ok(total)
    }
}

/// `own` and what there was more before than now.
fn add_difference(mut own: Own, mut before: Own, mut now: Own) -> Own {
    let lists = own.lists_mut().into_iter();
    for ((own, before), now) in lists.zip(before.lists_mut()).zip(now.lists_mut()) {
        for ((own, before), now) in own.iter_mut().zip(before).zip(now) {
            *own += *before - *now;
        }
    }
    own
}
