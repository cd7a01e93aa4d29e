//! A copy that comes straight into a newcomer's model: whole, late, or never whole.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::testing::eventually;

/// Values of a model: five parts of a copy and a bit.
const VALUES: usize = (21 << 20) / 4;

/// A model whose own memory takes in the copy.
struct Placed {
    /// None, while a copy is written into it.
    values: Vec<f32>,
    /// So often it is not made yet.
    not_yet: usize,
    /// Where what it hands out ends too early.
    breaks_at: Option<usize>,
    /// No model can be made.
    has_no_model: bool,
    /// Its values, where nobody holds a state.
    begins_with: f32,
    landings: Arc<AtomicUsize>,
    restored: Arc<AtomicUsize>,
    /// The last commit: its step and its sum.
    last: (u64, [f32; 1]),
}

impl Placed {
    fn new(first: f32) -> Placed {
        Placed {
            values: vec![first; VALUES],
            not_yet: 0,
            breaks_at: None,
            has_no_model: false,
            begins_with: 1.5,
            landings: Arc::default(),
            restored: Arc::default(),
            last: (0, [0.0]),
        }
    }
}

/// The model's memory, as long as a copy is written into it.
struct Values(Vec<f32>, Arc<AtomicUsize>);

impl Landing for Values {
    fn places(&mut self, total: usize) -> Option<Vec<&mut [u8]>> {
        self.1.fetch_add(1, Ordering::AcqRel);
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.0);
        (bytes.len() == total).then(|| bytes.chunks_mut(300_000).collect())
    }
}

struct Breaking(Vec<u8>, usize);

impl Frozen for Breaking {
    fn total(&self) -> usize {
        self.0.len()
    }

    fn piece(&self, byte: usize) -> &[u8] {
        self.0.get(byte..self.1).unwrap_or_default()
    }
}

impl Training for Placed {
    type Results = [f32; 1];

    fn results(&mut self, step: u64, share: &Share, group: &mut Group) -> Result<[f32; 1], Fault> {
        let (own, mut sum) = ([if share.is_entered() { step as f32 } else { 0.0 }], [0.0]);
        group.all_reduce(Op::Sum, &own, &mut sum)?;
        // So that a thousand steps are not over before a copy has begun.
        std::thread::sleep(std::time::Duration::from_millis(1));
        Ok(sum)
    }

    fn commit(&mut self, step: u64, sum: &[f32; 1]) {
        self.last = (step, *sum);
        for value in self
            .values
            .iter_mut()
            .skip(step as usize % 100)
            .step_by(9973)
        {
            *value += sum[0];
        }
    }

    fn encode_results(&self, sum: &[f32; 1]) -> Vec<u8> {
        bytemuck::cast_slice(sum).to_vec()
    }

    fn decode_results(&self, bytes: &[u8]) -> Option<[f32; 1]> {
        Some([f32::from_le_bytes(bytes.try_into().ok()?)])
    }

    fn encode_state(&self) -> Vec<u8> {
        bytemuck::cast_slice(&self.values).to_vec()
    }

    fn decode_state(&mut self, _: &[u8]) -> bool {
        panic!("nothing comes in one piece");
    }

    fn freeze(&mut self) -> Box<dyn Frozen> {
        let state = self.encode_state();
        let until = self.breaks_at.unwrap_or(state.len());
        Box::new(Breaking(state, until))
    }

    fn landing(&mut self) -> Option<Box<dyn Landing>> {
        if self.has_no_model {
            return None;
        }
        if self.not_yet > 0 {
            self.not_yet -= 1;
            return None;
        }
        let mut values = std::mem::take(&mut self.values);
        values.resize(VALUES, f32::NAN);
        Some(Box::new(Values(values, self.landings.clone())))
    }

    fn adopt_state(&mut self, landing: Box<dyn Landing>) -> bool {
        let landing: Box<dyn std::any::Any> = landing;
        let values = landing.downcast::<Values>().expect("what it gave");
        self.values = values.0;
        true
    }

    fn fault(&mut self) -> Option<Box<dyn std::error::Error + Send + Sync>> {
        self.has_no_model.then(|| "no model was made".into())
    }

    fn restore(&mut self, group: &mut Group) -> Result<u64, Fault> {
        group.barrier()?;
        self.restored.fetch_add(1, Ordering::AcqRel);
        self.values = vec![self.begins_with; VALUES];
        Ok(0)
    }
}

/// Ends all at a boundary, and compares what they hold.
fn finish(mut job: Job<Placed>, case: &str) -> Vec<Placed> {
    let then = job.newest() + 5;
    job.until(then);
    job.ranks.iter().for_each(Rank::end);
    let ends = job.ranks.into_iter().map(|rank| {
        drop(rank.orders);
        (rank.committed, rank.thread.join().expect("lives"))
    });
    let (steps, mut ends): (Vec<u64>, Vec<Placed>) = ends.unzip();
    // The last step's results may be with some only: the next generation would hand them on.
    let (newest, sum) = (ends.iter().map(|end| end.last))
        .max_by_key(|(step, _)| *step)
        .unwrap_or_default();
    for end in ends.iter_mut().filter(|end| end.last.0 + 1 == newest) {
        end.commit(newest, &sum);
    }
    let bits = |end: &Placed| -> Vec<u32> { end.values.iter().map(|x| x.to_bits()).collect() };
    for end in &ends {
        assert_eq!(end.last.0, newest, "{case}: {steps:?}");
        assert!(bits(end) == bits(&ends[0]), "{case}: {steps:?}");
    }
    ends
}

#[test]
fn a_newcomer_whose_model_is_late_listens_until_it_has_a_place() {
    let mut job = Job::of(vec![Placed::new(0.0), Placed::new(0.0)], || {
        Placed::new(7.0)
    });
    job.until(3);
    let mut late = Placed::new(7.0);
    late.not_yet = 20;
    let before = job.newest();
    job.regroup_with(vec![late]);
    job.until(before + 25);
    let ends = finish(job, "late");
    assert_eq!(ends[2].not_yet, 0);
    assert_eq!(ends[2].landings.load(Ordering::Acquire), 1);
    assert_eq!(ends[2].restored.load(Ordering::Acquire), 0);
}

#[test]
fn a_source_that_breaks_off_is_made_up_for() {
    let mut first = [Placed::new(0.0), Placed::new(0.0), Placed::new(0.0)];
    first[1].breaks_at = Some(5 << 20);
    let mut job = Job::of(first.into(), || Placed::new(7.0));
    job.until(3);
    job.regroup(1);
    let ends = finish(job, "one breaks off");
    assert_eq!(ends[3].landings.load(Ordering::Acquire), 1);
}

#[test]
fn part_of_a_copy_is_never_taken_for_a_state() {
    let mut only = Placed::new(0.0);
    only.breaks_at = Some(9 << 20);
    let mut job = Job::of(vec![only], || Placed::new(7.0));
    job.until(3);
    let newcomer = Placed::new(7.0);
    let (landings, restored) = (newcomer.landings.clone(), newcomer.restored.clone());
    job.regroup_with(vec![newcomer]);
    // Its values are overwritten in part by now, and again.
    eventually("it has tried twice", || {
        landings.load(Ordering::Acquire) > 2
    });
    let source = job.ranks.remove(0);
    source.end();
    drop(source.orders);
    source.thread.join().expect("leaves");
    job.regroup(0);
    // Alone, it begins anew; another one gets what it then holds.
    eventually("it begins", || restored.load(Ordering::Acquire) == 1);
    job.regroup(1);
    let ends = finish(job, "never whole");
    assert_eq!(ends[1].restored.load(Ordering::Acquire), 0);
}

/// Panic message of the newcomer of these two survivors, who go on.
fn last_words(survivors: [Placed; 2], newcomer: Placed) -> String {
    let mut job = Job::of(survivors.into(), || Placed::new(7.0));
    job.until(3);
    job.regroup_with(vec![newcomer]);
    job.until_dead(1);
    let newcomer = job.ranks.remove(2);
    let said = newcomer.thread.join().err().expect("it is the dead one");
    for rank in job.ranks {
        rank.end();
        drop(rank.orders);
        rank.thread.join().expect("lives");
    }
    *said.downcast::<String>().expect("of an unwrap")
}

#[test]
fn a_newcomer_of_survivors_that_differ_ends_and_says_why() {
    let mut survivors = [Placed::new(0.0), Placed::new(0.0)];
    survivors[1].begins_with = 1.25;
    let said = last_words(survivors, Placed::new(7.0));
    assert!(said.contains("Fetch(Differ"), "{said}");
}

#[test]
fn a_newcomer_without_a_model_ends_and_says_why() {
    let mut newcomer = Placed::new(7.0);
    newcomer.has_no_model = true;
    let said = last_words([Placed::new(0.0), Placed::new(0.0)], newcomer);
    assert!(said.contains("Training(\"no model was made\")"), "{said}");
}
