//! The compression bench's side of the runtime: `compression CASE...`, each alone on one thread.
//!
//! CASE is `what:elements:repeats`; one line of JSON each with the median and the least time in microseconds.
//! `narrow-f16`, `widen-f16`, `narrow-bf16`, `widen-bf16` are the casts alone, `topk` the choice of the largest
//! hundredth by absolute and its values; `topk-step`, `int8-step` and `powersgd-step` are a whole bucket's
//! reduction in a world of one, with its residual, for which nothing leaves the process.
//!
//! `choose IN OUT` writes the places (u32) of the largest hundredth of the values (f32) of a file.

use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use half::{bf16, f16};
use muster_runtime::collective::{Group, GroupConfig, Sharing};
use muster_runtime::gradient::compress::{
    Bucket, Codec, Half, Largest, Reduced, Shape, narrow, widen,
};

type Failure = Box<dyn Error>;

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let [verb, from, to] = &args[..]
        && verb == "choose"
    {
        let bytes = std::fs::read(from)?;
        let values: Vec<f32> = bytes
            .as_chunks()
            .0
            .iter()
            .map(|b| f32::from_le_bytes(*b))
            .collect();
        let mut largest = Largest::default();
        let chosen = largest.choose(&values, values.len().div_ceil(100));
        std::fs::write(to, bytemuck::cast_slice(chosen))?;
        return Ok(());
    }
    for case in &args {
        let parts: Vec<&str> = case.split(':').collect();
        let [what, len, repeats] = parts[..] else {
            return Err(format!("not what:elements:repeats: {case}").into());
        };
        let (len, repeats) = (len.parse()?, repeats.parse()?);
        let mut times = measure(what, len, repeats)?;
        times.sort_unstable();
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        println!(
            "{{\"case\": \"{what}:{len}\", \"median\": {:.2}, \"least\": {:.2}}}",
            us(times[times.len() / 2]),
            us(times[0])
        );
    }
    Ok(())
}

/// Nearly a bell: gradients have many small values and few large ones.
fn values(len: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut unit = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..len)
        .map(|_| unit() + unit() + unit() + unit())
        .collect()
}

fn timed(
    repeats: usize,
    mut work: impl FnMut() -> Result<(), Failure>,
) -> Result<Vec<Duration>, Failure> {
    for _ in 0..repeats.div_ceil(5) {
        work()?;
    }
    (0..repeats)
        .map(|_| {
            let began = Instant::now();
            work()?;
            Ok(began.elapsed())
        })
        .collect()
}

fn measure(what: &str, len: usize, repeats: usize) -> Result<Vec<Duration>, Failure> {
    let input = values(len);
    match what {
        "narrow-f16" => narrowing::<f16>(&input, repeats),
        "narrow-bf16" => narrowing::<bf16>(&input, repeats),
        "widen-f16" => widening::<f16>(&input, repeats),
        "widen-bf16" => widening::<bf16>(&input, repeats),
        "topk" => {
            let (mut largest, mut taken) = (Largest::default(), Vec::new());
            timed(repeats, || {
                let chosen = largest.choose(black_box(&input), len.div_ceil(100));
                taken.clear();
                taken.extend(chosen.iter().map(|i| input[*i as usize]));
                black_box(&taken);
                Ok(())
            })
        }
        "topk-step" => bucket(
            Codec::TopK {
                density: 0.01,
                momentum: None,
            },
            &input,
            repeats,
        ),
        "int8-step" => bucket(
            Codec::Int8 {
                block: 256,
                feedback: false,
            },
            &input,
            repeats,
        ),
        "powersgd-step" => {
            let side = len.isqrt();
            let shapes = vec![Shape {
                rows: side,
                columns: side,
            }];
            bucket(
                Codec::PowerSgd { rank: 4, shapes },
                &input[..side * side],
                repeats,
            )
        }
        other => Err(format!("no case {other}").into()),
    }
}

fn narrowing<T: Half>(input: &[f32], repeats: usize) -> Result<Vec<Duration>, Failure> {
    let mut to = vec![T::zeroed(); input.len()];
    timed(repeats, || {
        narrow(black_box(input), &mut to);
        black_box(&to);
        Ok(())
    })
}

fn widening<T: Half>(input: &[f32], repeats: usize) -> Result<Vec<Duration>, Failure> {
    let mut from = vec![T::zeroed(); input.len()];
    narrow(input, &mut from);
    let mut to = vec![0.0; input.len()];
    timed(repeats, || {
        widen(black_box(&from), &mut to);
        black_box(&to);
        Ok(())
    })
}

fn bucket(codec: Codec, input: &[f32], repeats: usize) -> Result<Vec<Duration>, Failure> {
    let mut group = Group::form(&GroupConfig {
        rank: 0,
        world: 1,
        master: None,
        token: [0; 32],
        digest: [0; 32],
        sharing: Sharing::Auto,
        form_within: Duration::ZERO,
        op_within: Duration::from_secs(60),
    })?;
    let mut bucket = Bucket::new(codec, input.len(), 1)?;
    let mut reduced = Reduced::default();
    timed(repeats, || {
        bucket.reduce(&mut group, black_box(input), &mut reduced)?;
        bucket.commit(&reduced);
        Ok(())
    })
}
