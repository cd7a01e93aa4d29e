use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::mpsc;

use proptest::prelude::*;

use super::*;
use crate::data::{Batch, SamplerConfig, Tail};

const LONG: Duration = Duration::from_secs(20);

fn sampler(samples: u64, batch: Batch) -> Sampler {
    Sampler::new(SamplerConfig {
        samples,
        seed: 3,
        batch,
        microbatch: 2,
        tail: Tail::Keep,
    })
    .unwrap()
}

fn share(world: u32, rank: u32) -> Share {
    Share {
        entered: (0..world).collect(),
        rank,
        world,
    }
}

fn plain(config: LoaderConfig) -> Loader<u64> {
    Loader::new(config, Ok::<_, io::Error>).unwrap()
}

fn expected(plan: &Plan, share: &Share) -> Vec<Microbatch<u64>> {
    let number = |number| Microbatch {
        number,
        samples: plan.indices(number).collect(),
    };
    plan.part(share).map(number).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// Whatever was loaded ahead, a step has what its plan says, in order.
    #[test]
    fn follows_every_change(
        threads in 1usize..5, ahead in 0usize..9, per_rank: bool,
        turns in prop::collection::vec((1u32..6, 0u32..6, any::<bool>()), 1..40),
    ) {
        let batch = if per_rank { Batch::PerRank(5) } else { Batch::Global(13) };
        let mut sampler = sampler(101, batch);
        let mut loader = plain(LoaderConfig { threads, ahead });
        let mut steps = 0;
        for (world, rank, commit) in turns {
            // A rank beyond the world listens.
            let share = share(world, rank);
            let loaded = loader.step(&sampler, &share).unwrap();
            prop_assert_eq!(&loaded.microbatches, &expected(&loaded.plan, &share));
            steps += 1;
            if commit {
                sampler.commit(&loaded.plan).unwrap();
            }
        }
        prop_assert_eq!(loader.totals().steps, steps);
    }
}

/// Loads only what a test lets through, and says what it begins.
struct Gate {
    begun: mpsc::Receiver<u64>,
    allow: mpsc::Sender<()>,
    loader: Loader<u64>,
}

fn gated(config: LoaderConfig) -> Gate {
    let (began, begun) = mpsc::channel();
    let (allow, allowed) = mpsc::channel::<()>();
    let allowed = Mutex::new(allowed);
    let loader = Loader::new(config, move |index| {
        let _nobody_looks = began.send(index);
        let _over = allowed.lock().unwrap().recv();
        Ok::<_, io::Error>(index)
    })
    .unwrap();
    Gate {
        begun,
        allow,
        loader,
    }
}

#[test]
fn the_next_steps_are_loaded_meanwhile_and_no_more() {
    let mut sampler = sampler(1000, Batch::Global(4));
    let mut gate = gated(LoaderConfig {
        threads: 1,
        ahead: 2,
    });
    let alone = share(1, 0);
    for _ in 0..8 {
        gate.allow.send(()).unwrap();
    }
    let first = gate.loader.step(&sampler, &alone).unwrap();
    sampler.commit(&first.plan).unwrap();
    let next = sampler.plan(1);
    let begun = |n: usize| -> Vec<u64> {
        (0..n)
            .map(|_| gate.begun.recv_timeout(LONG).unwrap())
            .collect()
    };
    let indices = |plan: &Plan| -> Vec<u64> { (0..2).flat_map(|i| plan.indices(i)).collect() };
    assert_eq!(begun(4), indices(&first.plan));
    // Two microbatches beyond the step: all of the next step, without any call for it.
    assert_eq!(begun(4), indices(&next));
    assert!(gate.begun.try_recv().is_err(), "bounded");
    let second = gate.loader.step(&sampler, &alone).unwrap();
    assert_eq!(second.microbatches, expected(&next, &alone));
    assert_eq!(gate.loader.totals().discarded, 0);
    drop(gate.allow);
}

#[test]
fn what_is_not_mine_any_more_is_cut_short() {
    let sampler = sampler(1000, Batch::Global(8));
    let Gate {
        begun,
        allow,
        mut loader,
    } = gated(LoaderConfig {
        threads: 1,
        ahead: 4,
    });
    let listening = Share {
        entered: vec![0],
        rank: 1,
        world: 2,
    };
    let (go, gone) = mpsc::channel();
    let loading = std::thread::spawn(move || {
        let first = loader.step(&sampler, &share(2, 0)).unwrap();
        gone.recv_timeout(LONG).unwrap();
        let second = loader.step(&sampler, &listening).unwrap();
        assert!(second.microbatches.is_empty());
        (first, loader)
    });
    // The first step's two microbatches, and one sample of the next.
    for _ in 0..4 {
        begun.recv_timeout(LONG).unwrap();
        allow.send(()).unwrap();
    }
    begun.recv_timeout(LONG).unwrap();
    go.send(()).unwrap();
    let (first, loader) = loading.join().unwrap();
    assert_eq!(first.microbatches.len(), 2);
    assert_eq!(loader.totals().discarded, 1);
    allow.send(()).unwrap();
    drop(loader);
    assert!(begun.try_recv().is_err(), "its second sample is not loaded");
}

#[test]
fn an_error_names_the_sample_and_passes() {
    let sampler = sampler(50, Batch::Global(10));
    let bad: BTreeSet<u64> = sampler.plan(1).indices(1).collect();
    let tries = Arc::new(AtomicU64::new(0));
    let (theirs, counted) = (bad.clone(), tries.clone());
    let mut loader = Loader::new(LoaderConfig::default(), move |index| {
        if theirs.contains(&index) && counted.fetch_add(1, Ordering::Relaxed) == 0 {
            return Err(io::Error::other("the disk is on fire"));
        }
        Ok(index)
    })
    .unwrap();
    let alone = share(1, 0);
    let error = loader.step(&sampler, &alone).unwrap_err();
    let LoadError::Sample { index, source } = &error else {
        panic!("{error}");
    };
    assert!(bad.contains(index) && error.to_string().contains(&index.to_string()));
    assert_eq!(source.to_string(), "the disk is on fire");
    let loaded = loader.step(&sampler, &alone).unwrap();
    assert_eq!(loaded.microbatches, expected(&loaded.plan, &alone));
}

#[test]
fn a_panic_is_an_error() {
    let mut loader: Loader<u64> = Loader::new(LoaderConfig::default(), |index| {
        if index < 50 {
            panic!("sample {index} is cursed");
        }
        Ok::<_, io::Error>(index)
    })
    .unwrap();
    let error = loader
        .step(&sampler(50, Batch::Global(10)), &share(1, 0))
        .unwrap_err();
    let LoadError::Panicked { index, what } = error else {
        panic!("{error}");
    };
    assert_eq!(what, format!("sample {index} is cursed"));
}

#[test]
fn waiting_is_measured() {
    let mut loader = Loader::new(LoaderConfig::default(), |index| {
        std::thread::sleep(Duration::from_millis(20));
        Ok::<_, io::Error>(index)
    })
    .unwrap();
    let loaded = loader
        .step(&sampler(50, Batch::Global(2)), &share(1, 0))
        .unwrap();
    assert!(
        loaded.waited >= Duration::from_millis(40),
        "{:?}",
        loaded.waited
    );
    assert_eq!(loader.totals().waited, loaded.waited);
}

#[test]
fn dropping_it_ends_its_threads() {
    struct Counted(Arc<AtomicUsize>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let ended = Arc::new(AtomicUsize::new(0));
    let counted = Counted(ended.clone());
    let mut loader = Loader::new(
        LoaderConfig {
            threads: 4,
            ahead: 16,
        },
        move |index| {
            let _held = &counted;
            Ok::<_, io::Error>(index)
        },
    )
    .unwrap();
    loader
        .step(&sampler(50, Batch::Global(4)), &share(1, 0))
        .unwrap();
    drop(loader);
    // The threads held the closure: it is gone, so they are.
    assert_eq!(ended.load(Ordering::SeqCst), 1);
}
