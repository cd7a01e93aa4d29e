//! A small network for the tests: two layers, three buckets, a running mean, and whatever goes wrong.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::super::bytes::{Fields, put, put_float};
use super::super::optim::{Adam, Sgd};
use super::super::tensors::STATE;
use super::super::{
    BoxError, Gradients, Layout, Load, Measured, Micro, Model, Named, Room, Update, buckets_of,
};
use crate::random::SplitMix;
use crate::saving::Dtype;

pub(super) const INPUTS: usize = 6;
const HIDDEN: usize = 5;
const OUTPUTS: usize = 4;
/// Weight and bias of each layer.
const TENSORS: [usize; 4] = [INPUTS * HIDDEN, HIDDEN, HIDDEN * OUTPUTS, OUTPUTS];
pub(super) const PARAMETERS: usize = 59;

/// Where a rank is killed: while it computes its last microbatch, or in its commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Point {
    Begin,
    AfterReady(usize),
    InsideUpdate,
}

/// Faults of a rank.
#[derive(Clone, Debug, Default)]
pub(super) struct Faults {
    pub(super) kill: Option<(u64, Point)>,
    /// In this step its gradients overflow.
    pub(super) overflow: Option<u64>,
    /// In this step's update a bit flips.
    pub(super) flip: Option<u64>,
    /// In this step's update a value becomes none.
    pub(super) breaks: Option<u64>,
    /// In this step's update the device fails, which nobody hears before it is asked.
    pub(super) fails: Option<u64>,
    /// It names no tensors.
    pub(super) unnamed: bool,
    /// It encodes nothing.
    pub(super) mute: bool,
    /// Says its buckets ready from the last to the first.
    pub(super) backwards: bool,
    /// Waits with each bucket until those before it are reduced.
    pub(super) waits: Option<Arc<AtomicBool>>,
}

#[derive(Debug)]
pub(super) struct Net {
    pub(super) parameters: Vec<f32>,
    pub(super) layout: Layout,
    optimizer: Optimizer,
    /// Registered, and moved by the reduced extras.
    running: f64,
    failed: bool,
    pub(super) faults: Faults,
    /// Microbatches that were computed with gradients.
    pub(super) computed: u64,
    /// Where the sums, and then the mean, of bucket 2 lay.
    pub(super) places: BTreeSet<usize>,
}

/// Any that there is.
#[derive(Clone, Debug)]
pub(super) enum Optimizer {
    Sgd(Sgd),
    Adam(Adam),
}

impl Optimizer {
    /// With the names of their kinds.
    pub(super) fn all() -> [(&'static str, Optimizer); 5] {
        use Optimizer::{Adam as A, Sgd as S};
        let sgd = Sgd::new(PARAMETERS);
        [
            ("SGD", S(sgd.clone().weight_decay(0.01))),
            ("momentum", S(sgd.momentum(0.9).nesterov())),
            ("Adam", A(Adam::new(PARAMETERS))),
            ("AdamW", A(Adam::decoupled(PARAMETERS))),
            ("AMSGrad", A(Adam::new(PARAMETERS).amsgrad())),
        ]
    }
}

impl Net {
    /// With another optimizer.
    pub(super) fn by(mut self, optimizer: &Optimizer) -> Net {
        self.optimizer = optimizer.clone();
        self
    }

    pub(super) fn new(seed: u64, faults: Faults) -> Net {
        let mut random = SplitMix::new(seed);
        Net {
            layout: Net::layout("first.weight", INPUTS as u64),
            parameters: (0..PARAMETERS).map(|_| random.signed_unit()).collect(),
            optimizer: Optimizer::Adam(Adam::decoupled(PARAMETERS)),
            running: 0.0,
            failed: false,
            faults,
            computed: 0,
            places: BTreeSet::new(),
        }
    }

    /// The tensors, with the first one's name and columns.
    pub(super) fn layout(first: &str, columns: u64) -> Layout {
        let (hidden, outputs) = (HIDDEN as u64, OUTPUTS as u64);
        Layout::new([
            (first, &[(TENSORS[0] as u64) / columns, columns][..]),
            ("first.bias", &[hidden]),
            ("second.weight", &[outputs, hidden]),
            ("second.bias", &[outputs]),
        ])
    }

    /// As if the last tensor were not the model's.
    pub(super) fn layout_without_last(&mut self) {
        let (hidden, outputs) = (HIDDEN as u64, OUTPUTS as u64);
        self.layout = Layout::new([
            ("first.weight", &[hidden, INPUTS as u64][..]),
            ("first.bias", &[hidden]),
            ("second.weight", &[outputs, hidden]),
        ]);
    }

    fn die_at(&self, step: u64, point: Point) {
        if self.faults.kill == Some((step, point)) {
            std::panic::resume_unwind(Box::new("killed"));
        }
    }

    /// The hidden values, and the errors of the outputs.
    fn forward(&self, sample: u64, mask: &[f32]) -> ([f32; INPUTS], [f32; HIDDEN], [f32; OUTPUTS]) {
        let (x, y) = sample_of(sample);
        let (first, rest) = self.parameters.split_at(TENSORS[0]);
        let (first_bias, rest) = rest.split_at(TENSORS[1]);
        let (second, second_bias) = rest.split_at(TENSORS[2]);
        let mut hidden = [0.0; HIDDEN];
        for (i, h) in hidden.iter_mut().enumerate() {
            let row = &first[i * INPUTS..(i + 1) * INPUTS];
            let sum: f32 = row.iter().zip(&x).map(|(w, x)| w * x).sum();
            *h = (sum + first_bias[i]).tanh() * mask[i];
        }
        let mut errors = [0.0; OUTPUTS];
        for (i, e) in errors.iter_mut().enumerate() {
            let row = &second[i * HIDDEN..(i + 1) * HIDDEN];
            let sum: f32 = row.iter().zip(&hidden).map(|(w, h)| w * h).sum();
            *e = sum + second_bias[i] - y[i];
        }
        (x, hidden, errors)
    }

    fn ready(&mut self, bucket: usize, step: u64, into: &mut Gradients<'_>) {
        if !into.is_last() {
            return;
        }
        if let Some(overlapped) = &self.faults.waits
            && bucket > 0
        {
            let until = Instant::now() + Duration::from_secs(20);
            while into.reduced() < bucket {
                assert!(
                    Instant::now() < until,
                    "nothing is reduced while backward goes on"
                );
                std::thread::yield_now();
            }
            overlapped.store(true, Ordering::Release);
        }
        into.ready(bucket);
        assert!(into.bucket(bucket).is_empty());
        self.die_at(step, Point::AfterReady(bucket));
    }
}

pub(super) fn sample_of(index: u64) -> ([f32; INPUTS], [f32; OUTPUTS]) {
    let mut random = SplitMix::new(index.wrapping_mul(77) + 5);
    let mut x = [0.0; INPUTS];
    x.fill_with(|| random.signed_unit());
    let y = std::array::from_fn(|i| (x[i] - x[i + 1]).sin());
    (x, y)
}

pub(super) fn loss(errors: &[f32; OUTPUTS]) -> f64 {
    errors.iter().map(|e| f64::from(e * e)).sum()
}

impl Model for Net {
    type Sample = u64;

    fn parameters(&self) -> usize {
        PARAMETERS
    }

    fn buckets(&self) -> Vec<Range<usize>> {
        let buckets = buckets_of(&TENSORS, [4, 20]);
        assert_eq!(buckets, [55..59, 35..55, 0..35]);
        buckets
    }

    fn extras(&self) -> usize {
        2
    }

    fn backward(
        &mut self,
        micro: &Micro<u64>,
        into: &mut Gradients<'_>,
    ) -> Result<Measured, BoxError> {
        assert_eq!(micro.samples, micro.indices);
        assert!(micro.last || !into.is_last());
        if micro.last {
            self.die_at(micro.step, Point::Begin);
        }
        self.computed += 1;
        self.places.insert(into.bucket(2).as_ptr().addr());
        let before = self.encode();
        // Dropout that scales nothing away for good.
        let mut random = SplitMix::new(micro.seed);
        let mask: Vec<f32> = (0..HIDDEN)
            .map(|_| if random.below(5) == 0 { 0.0 } else { 1.25 })
            .collect();
        let mut measured = Measured {
            extra: vec![0.0; 2],
            ..Measured::default()
        };
        let each: Vec<_> = micro
            .samples
            .iter()
            .map(|sample| self.forward(*sample, &mask))
            .collect();
        for (x, _, errors) in &each {
            measured.loss += loss(errors);
            measured.samples += 1;
            measured.extra[0] += f64::from(x[0]);
            measured.extra[1] += f64::from(u8::from(loss(errors) < 1.0));
        }
        let overflow = self.faults.overflow == Some(micro.step);
        let scale = if overflow { f32::INFINITY } else { micro.scale };
        let mut order: Vec<usize> = (0..3).collect();
        if self.faults.backwards {
            order.reverse();
        }
        for bucket in order {
            for (x, hidden, errors) in &each {
                match bucket {
                    0 => {
                        let to = into.bucket(0);
                        for (to, e) in to.iter_mut().zip(errors) {
                            *to += scale * 2.0 * e;
                        }
                    }
                    1 => {
                        let to = into.part(35..55).ok_or("no such part")?;
                        for (i, to) in to.iter_mut().enumerate() {
                            *to += scale * 2.0 * errors[i / HIDDEN] * hidden[i % HIDDEN];
                        }
                    }
                    _ => {
                        let second = &self.parameters[35..55];
                        let to = into.bucket(2);
                        for (i, h) in hidden.iter().enumerate() {
                            let back: f32 = errors
                                .iter()
                                .enumerate()
                                .map(|(o, e)| 2.0 * e * second[o * HIDDEN + i])
                                .sum();
                            let slope = mask[i] - h * h / mask[i].max(1.0);
                            for (j, x) in x.iter().enumerate() {
                                to[i * INPUTS + j] += scale * back * slope * x;
                            }
                            to[TENSORS[0] + i] += scale * back * slope;
                        }
                    }
                }
            }
            self.ready(bucket, micro.step, into);
        }
        assert_eq!(self.encode(), before, "backward changes nothing registered");
        Ok(measured)
    }

    fn evaluate(&mut self, micro: &Micro<u64>) -> Result<Measured, BoxError> {
        let each = micro.samples.iter();
        let losses: Vec<f64> = each
            .map(|sample| loss(&self.forward(*sample, &[1.0; HIDDEN]).2))
            .collect();
        Ok(Measured {
            loss: losses.iter().sum(),
            samples: losses.len() as u64,
            extra: vec![
                0.0,
                losses.iter().filter(|loss| **loss < 1.0).count() as f64,
            ],
        })
    }

    fn update(&mut self, update: &Update<'_>) {
        self.places.insert(update.gradient[2].as_ptr().addr());
        let ranges = buckets_of(&TENSORS, [4, 20]);
        let parts = ranges
            .into_iter()
            .zip(update.gradient.iter().map(Vec::as_slice));
        let parts: Vec<_> = parts.collect();
        let (parameters, rate) = (&mut self.parameters, update.rate);
        match &mut self.optimizer {
            Optimizer::Sgd(sgd) => sgd.step_parts(parameters, parts, rate),
            Optimizer::Adam(adam) => adam.step_parts(parameters, parts, rate),
        }
        self.die_at(update.step, Point::InsideUpdate);
        let mean = update.measured.extra[0] / update.measured.samples as f64;
        self.running += 0.1 * (mean - self.running);
        self.failed |= self.faults.fails == Some(update.step);
        if self.faults.flip == Some(update.step) {
            self.parameters[7] = f32::from_bits(self.parameters[7].to_bits() ^ 1);
        }
        if self.faults.breaks == Some(update.step) {
            self.parameters[7] = f32::NAN;
        }
    }

    fn fault(&mut self) -> Option<BoxError> {
        std::mem::take(&mut self.failed).then(|| "the device failed".into())
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        if self.faults.mute {
            return out;
        }
        let optimizer = match &self.optimizer {
            Optimizer::Sgd(sgd) => sgd.encode(),
            Optimizer::Adam(adam) => adam.encode(),
        };
        put(&mut out, &optimizer);
        put_float(&mut out, self.running);
        for value in &self.parameters {
            out.extend_from_slice(&value.to_le_bytes());
        }
        out
    }

    fn decode(&mut self, bytes: &[u8]) -> bool {
        let mut fields = Fields(bytes);
        let (Some(optimizer), Some(running)) = (fields.bytes(), fields.float()) else {
            return false;
        };
        let (values, []) = fields.0.as_chunks() else {
            return false;
        };
        let fits = values.len() == PARAMETERS
            && match &mut self.optimizer {
                Optimizer::Sgd(sgd) => sgd.decode(optimizer),
                Optimizer::Adam(adam) => adam.decode(optimizer),
            };
        if !fits {
            return false;
        }
        self.running = running;
        self.parameters = values.iter().map(|v| f32::from_le_bytes(*v)).collect();
        true
    }

    fn tensors(&self) -> Result<Vec<Named<'_>>, BoxError> {
        if self.faults.unnamed {
            return Ok(Vec::new());
        }
        let mut all: Vec<Named<'_>> = self.layout.model(&self.parameters).collect();
        all.push(Named {
            name: "model.running".to_owned(),
            dtype: Dtype::F64,
            shape: Vec::new(),
            bytes: self.running.to_le_bytes().to_vec().into(),
        });
        all.extend(match &self.optimizer {
            Optimizer::Sgd(sgd) => sgd.tensors(&self.layout),
            Optimizer::Adam(adam) => adam.tensors(&self.layout),
        });
        Ok(all)
    }

    fn load(&mut self, from: &mut Load<'_>) -> Result<(), BoxError> {
        if self.faults.unnamed {
            let state = from.bytes(STATE)?.ok_or("it is not picked")?;
            return self.decode(&state).then_some(()).ok_or("of another".into());
        }
        let mut running = self.running.to_le_bytes();
        let mut rooms = self.layout.model_rooms(&mut self.parameters);
        rooms.push(Room {
            name: "model.running".to_owned(),
            dtype: Dtype::F64,
            shape: Vec::new(),
            into: (&mut running).into(),
        });
        from.fill(rooms)?;
        self.running = f64::from_le_bytes(running);
        match &mut self.optimizer {
            Optimizer::Sgd(sgd) => sgd.load(&self.layout, from)?,
            Optimizer::Adam(adam) => adam.load(&self.layout, from)?,
        }
        Ok(())
    }
}
