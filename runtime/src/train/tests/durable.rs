//! Saves of all ranks, and what is restored of them in other worlds.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;

use muster_checkpoint::hex::Id;
use muster_protocol::control::fresh_page;
use muster_protocol::control::live::{Assignment, TELLS_RESTORE, Term, encode_restore, word};

use super::super::saves::Saves;
use super::elastic::{alike, log, replay, some, with};
use super::harness::{Heard, Job};
use super::model::Point;
use super::*;
use crate::live::assign;
use crate::page::Page;
use crate::saving::{Dtype, LoadError};
use crate::testing::Keeper;

fn saving(every: u64) -> Options {
    Options {
        save_every: Some(every),
        ..Options::default()
    }
}

fn until(steps: u64, codecs: Codecs) -> Config {
    Config {
        until: Span::Steps(steps),
        codecs,
        ..config()
    }
}

/// Sum of the residuals that all ranks have not sent yet.
fn kept_back(trainings: &[Parallel<Net>]) -> Vec<f32> {
    let mut sum = Vec::new();
    for training in trainings {
        let lists = training.buckets.iter().flat_map(|b| b.own().lists());
        let all: Vec<f32> = lists.flatten().copied().collect();
        sum.resize(all.len(), 0.0);
        sum.iter_mut().zip(all).for_each(|(to, from)| *to += from);
    }
    sum
}

#[test]
fn what_three_ranks_save_is_restored_in_any_world() {
    for codecs in all_codecs() {
        let case = format!("{codecs:?}");
        let keeper = Keeper::new();
        let config = until(24, codecs);
        let job = Job::kept(saving(10), &keeper, None, some(&config, 3));
        let (saved, _) = alike(job, &case);
        keeper.until_saved(24);
        assert_eq!(keeper.saved(), [(10, 3), (20, 3), (24, 3)], "{case}");
        let own = kept_back(&saved);
        for world in [1, 2, 4] {
            // Begun otherwise, and with nothing left to do.
            let job = Job::kept(saving(10), &keeper, keeper.newest(), some(&config, world));
            let (restored, _) = alike(job, &case);
            assert_eq!(restored[0].encode(), saved[0].encode(), "{case}, {world}");
            let sum = kept_back(&restored);
            let far = |(a, b): (&f32, &f32)| (a - b).abs() > 1e-6;
            assert!(!own.iter().zip(&sum).any(far), "{case}: {own:?} {sum:?}");
            assert_eq!(own.len(), sum.len());
        }
        let goes_on = until(40, config.codecs.clone());
        let job = Job::kept(saving(10), &keeper, keeper.newest(), some(&goes_on, 2));
        let (_, heard) = alike(job, &case);
        assert_eq!(heard[0].len(), 1 + 16, "{case}: {heard:?}");
    }
}

#[test]
fn a_model_without_names_is_saved_as_its_encoding() {
    let keeper = Keeper::new();
    let config = until(12, Codecs::All(Codec::None));
    let unnamed = |count| {
        let mut all = some(&config, count);
        all.iter_mut().for_each(|t| t.model.faults.unnamed = true);
        all
    };
    let job = Job::kept(saving(5), &keeper, None, unnamed(2));
    let (saved, _) = alike(job, "unnamed");
    keeper.until_saved(12);
    let names: Vec<String> = (keeper.open(12).manifest().tensors.iter())
        .map(|tensor| tensor.name.clone())
        .collect();
    assert_eq!(names, ["model.state"]);
    let job = Job::kept(saving(5), &keeper, keeper.newest(), unnamed(1));
    let (restored, _) = alike(job, "unnamed");
    assert_eq!(restored[0].encode(), saved[0].encode());
}

#[test]
fn a_rank_that_listens_holds_up_no_save() {
    let keeper = Keeper::new();
    let config = until(40, Codecs::All(Codec::None));
    let faults = Faults {
        kill: Some((3, Point::Begin)),
        ..Faults::default()
    };
    let mut job = Job::kept(saving(1), &keeper, None, with(&config, 3, 1, faults));
    job.allow(10);
    job.until_dead();
    // It comes first: the manifest is its to draft, though it has nothing.
    job.regroup_behind(some(&config, 1));
    let (trainings, heard) = alike(job, "it listens");
    let worlds = log(&heard[1], "it listens");
    keeper.until_saved(40);
    let saved = keeper.saved();
    for (step, ranks) in (1..).zip(&worlds).filter(|(step, _)| *step > 3) {
        assert!(
            saved.contains(&(step, 3)),
            "{step} of {ranks} ranks: {saved:?}"
        );
    }
    assert!(worlds.contains(&2), "it did listen: {worlds:?}");
    let job = Job::kept(saving(1), &keeper, keeper.newest(), some(&config, 1));
    let (restored, heard) = alike(job, "restored");
    assert_eq!(heard[0].len(), 1, "nothing was left to do: {heard:?}");
    assert_eq!(restored[0].encode(), trainings[0].encode());
}

#[test]
fn nothing_is_saved_of_a_state_that_deviates() {
    let config = until(12, Codecs::All(Codec::None));
    // In the middle, and in the last step.
    for flip in [5, 11] {
        let keeper = Keeper::new();
        let options = Options {
            compare_every: Some(1000),
            ..saving(3)
        };
        let faults = Faults {
            flip: Some(flip),
            ..Faults::default()
        };
        let job = Job::kept(options, &keeper, None, with(&config, 3, 0, faults));
        let (_, heard) = alike(job, "it deviates");
        assert!(heard[1].contains(&Heard::Quarantined(vec![0])), "{heard:?}");
        let mut replayed = Net::new(1, Faults::default());
        replay(&mut replayed, &config, &vec![3; flip as usize + 1]);
        keeper.until_saved(12);
        let mut saved = Net::new(5, Faults::default());
        load_model(&mut saved, &keeper.open(flip + 1), |_| true).unwrap();
        assert_eq!(saved.encode(), replayed.encode(), "{flip}");
    }
}

#[test]
fn the_best_model_is_saved_as_it_was_evaluated() {
    let keeper = Keeper::new();
    let config = until(30, Codecs::All(Codec::None));
    let evaluated = |count| {
        let each = some(&config, count).into_iter();
        each.map(|t| t.evaluated_by(HeldOut::new(Feed::indices(), 20, 4, Span::Steps(5))))
            .collect()
    };
    // Half of the evaluations fall upon a save.
    let job = Job::kept(saving(10), &keeper, None, evaluated(2));
    let (trainings, heard) = alike(job, "best");
    keeper.until_saved(30);
    let best = trainings[0].best().unwrap().evaluation;
    let saved: Vec<u64> = keeper.saved().into_iter().map(|(step, _)| step).collect();
    assert!(
        saved.is_sorted() && saved.contains(&best.step),
        "{saved:?}: {heard:?}"
    );
    for step in &saved {
        let checkpoint = keeper.open(*step);
        let metrics = checkpoint.blob("metrics").unwrap();
        let metrics: serde_json::Value = serde_json::from_slice(metrics).unwrap();
        let mut model = Net::new(99, Faults::default());
        let loaded = load_model(&mut model, &checkpoint, |name| name.starts_with("model."));
        assert_eq!(loaded.unwrap(), 5, "four tensors and the running mean");
        let indices: Vec<u64> = (0..20).collect();
        let micro = Micro {
            step: 0,
            epoch: 0,
            number: 0,
            samples: indices.clone(),
            indices,
            seed: 0,
            scale: 1.0,
            last: false,
        };
        let loss = model.evaluate(&micro).unwrap().mean_loss();
        let metric = metrics["metric"].as_f64().unwrap();
        assert!((metric - loss).abs() < 1e-9, "step {step}: {metric} {loss}");
        // By this one `--keep-best` goes where nothing else is said.
        assert_eq!(metrics["loss"], metrics["metric"]);
        assert_eq!(metrics["better"], "lower");
    }
}

/// Where a launcher restarts workers with each generation.
#[test]
fn workers_with_a_fixed_place_save_and_restore_alike() {
    let keeper = Keeper::new();
    let trained = |steps: u64, restore: Option<Id>| -> Vec<Vec<u8>> {
        let (config, held) = (until(steps, Codecs::All(Codec::None)), HeldPort::new());
        let (config, port, keeper) = (&config, held.port(), &keeper);
        let run = move |rank: u32| {
            let (page, env) = placed(rank, restore);
            let mut training = parallel(config, Faults::default());
            let store = keeper.place().as_os_str().to_owned();
            keeper.watch(page.clone());
            training.saves = Some(Saves::new(page, store, Some((env, rank))));
            let (ending, training) = run_at(training, (), saving(5), (rank, 2, port)).unwrap();
            assert_eq!((ending, training.steps()), (Ending::Complete, steps));
            training.encode()
        };
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..2).map(|rank| scope.spawn(move || run(rank))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    };
    let first = trained(12, None);
    assert_eq!(first[0], first[1]);
    keeper.until_saved(12);
    assert_eq!(keeper.saved(), [(5, 2), (10, 2), (12, 2)]);
    let files = keeper.open(12).manifest().files.len();
    assert_eq!(files, 2, "each of two nodes writes a part");
    let again = trained(12, keeper.newest());
    assert_eq!(again, first);
    trained(20, keeper.newest());
    keeper.until_saved(20);
    assert_eq!(keeper.saved()[3..], [(15, 2), (20, 2)]);
}

/// A page that says where this rank is, and what is restored; as [`run_at`] has it.
fn placed(rank: u32, restore: Option<Id>) -> (Arc<Page>, WorkerEnv) {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&fresh_page()).unwrap();
    let page = Arc::new(Page::from_file(&file).unwrap());
    page.store(word::FEATURES, TELLS_RESTORE);
    let restore = restore.map(|id| Digest(id.0));
    for (at, value) in word::restore().zip(encode_restore(restore)) {
        page.store(at, value);
    }
    let digest = Digest([5; 32]);
    let place = Assignment {
        term: Term::of(1, 0),
        rank,
        world: 2,
        local_rank: 0,
        local_world: 1,
        node_rank: rank,
        nodes: 2,
        restarts: 0,
        master: SocketAddr::from(([127, 0, 0, 1], 1)),
        digest,
        lineage: Digest([1; 32]),
    };
    assign(&page, &place);
    let env = WorkerEnv {
        rank,
        world: 2,
        local_rank: 0,
        master: None,
        restart: 0,
        generation: 1,
        digest,
    };
    (page, env)
}

#[test]
fn what_does_not_fit_is_named() {
    let keeper = Keeper::new();
    let config = until(5, Codecs::All(Codec::None));
    let job = Job::kept(saving(5), &keeper, None, some(&config, 1));
    alike(job, "saved");
    keeper.until_saved(5);
    let checkpoint = keeper.open(5);
    assert_eq!(
        checkpoint.manifest().tensor("optim.step").unwrap().dtype,
        Dtype::U64
    );

    // A tensor of another name, of another shape, one that is too many, and none.
    let refused = |change: fn(&mut Net), picks: fn(&str) -> bool| {
        let mut model = Net::new(1, Faults::default());
        change(&mut model);
        match load_model(&mut model, &checkpoint, picks) {
            Err(TrainError::Checkpoint { source, .. }) => source,
            other => panic!("{other:?}"),
        }
    };
    let all = |_: &str| true;
    let rename = |net: &mut Net| net.layout = Net::layout("first.other", 6);
    let error = refused(rename, all).downcast::<LoadError>().unwrap();
    let LoadError::Missing { name } = *error else {
        panic!("{error}");
    };
    assert_eq!(name, "model.first.other");
    let reshape = |net: &mut Net| net.layout = Net::layout("first.weight", 5);
    let error = refused(reshape, all).downcast::<LoadError>().unwrap();
    assert!(matches!(&*error, LoadError::Differs { name, .. } if name == "model.first.weight"));
    // What both have.
    let mut other = Net::new(1, Faults::default());
    rename(&mut other);
    let second = |name: &str| name.starts_with("model.second.");
    assert_eq!(load_model(&mut other, &checkpoint, second).unwrap(), 2);
    let mut whole = Net::new(2, Faults::default());
    load_model(&mut whole, &checkpoint, all).unwrap();
    assert_eq!(other.parameters[35..], whole.parameters[35..]);
    assert_ne!(other.parameters[..30], whole.parameters[..30]);
    let nothing = load_model(&mut whole, &checkpoint, |_| false);
    assert!(matches!(
        nothing,
        Err(TrainError::NothingPicked { step: 5 })
    ));

    // A training takes all, or nothing.
    let mut training = some(&config, 1).remove(0);
    training.model.layout = Net::layout("first.weight", 6);
    training.model.layout_without_last();
    let left = training.load_checkpoint(&checkpoint, (0, 1)).unwrap_err();
    assert!(
        matches!(&left, TrainError::Left { name, .. } if name == "model.second.bias"),
        "{left}"
    );
    let sampler = SamplerConfig {
        samples: SAMPLES + 1,
        ..config.sampler
    };
    let other = Config { sampler, ..config };
    let mut training = some(&other, 1).remove(0);
    let foreign = training.load_checkpoint(&checkpoint, (0, 1)).unwrap_err();
    assert!(
        matches!(
            foreign,
            TrainError::Piece {
                name: "sampler",
                ..
            }
        ),
        "{foreign}"
    );
}
