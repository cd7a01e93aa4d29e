//! Seeds of the simulation: a fixed budget of them, and what they must be like as a whole.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use muster_protocol::agent::Flaws;
use muster_tests::sim::coverage::Coverage;
use muster_tests::sim::focus::Focus;
use muster_tests::sim::log::Case;
use muster_tests::sim::run::{self, run_seed};
use muster_tests::sim::setup::{Fault, Setup};

fn budget() -> u64 {
    let set = std::env::var("MUSTER_SIM_SEEDS").ok();
    set.and_then(|s| s.parse().ok()).unwrap_or(4_000)
}

/// Every second seed is plain: saves by order and hangs keep runs from what comes later there.
fn is_plain(seed: u64) -> bool {
    seed % 2 == 1
}

fn setup(seed: u64) -> Setup {
    let make = match is_plain(seed) {
        true => Setup::plain,
        false => Setup::generate,
    };
    make(seed, Focus::Everything, Flaws::default())
}

/// Every rule in every seed. `MUSTER_SIM_SEEDS` sets how many.
#[test]
fn sim_budget() {
    let (seeds, next) = (budget(), AtomicU64::new(0));
    let total = Mutex::new((Coverage::default(), BTreeMap::new()));
    let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds {
                        return;
                    }
                    let report = run::run(setup(seed), false);
                    let mut total = total.lock().expect("no other thread panicked");
                    total.0.add(&report.coverage);
                    if let Some(violation) = report.violation {
                        total.1.insert(seed, violation.to_string());
                    }
                }
            });
        }
    });
    let (coverage, failed) = total.into_inner().expect("no thread panicked");
    if let Some((seed, violation)) = failed.first_key_value() {
        panic!(
            "{} of {seeds} seeds fail; seed {seed}: {violation}\n  cargo run -p muster-tests --bin sim -- \
             replay {seed} --out seed-{seed}.jsonl{}",
            failed.len(),
            if is_plain(*seed) { " --plain" } else { "" }
        );
    }
    // What the seeds must have come through, or they prove nothing.
    for (name, count) in coverage.rows() {
        eprintln!("{name:22} {count}");
    }
    let reached = [
        coverage.commits,
        coverage.births_refused,
        coverage.accepts_above_zero,
        coverage.promises_with_value,
        coverage.merges,
        coverage.tombstones,
        coverage.dormant,
        coverage.failed,
        coverage.ended,
        coverage.restarts,
        coverage.parks,
        coverage.stop_steps,
        coverage.failed_writes,
        coverage.start_failures,
        coverage.links_lost,
        coverage.leases_lost,
        coverage.saves,
        coverage.verdicts,
        coverage.hung_restarts,
        coverage.continued,
        coverage.lease_answers,
        coverage.sidecar_kills,
        coverage.sealed,
        coverage.files,
        coverage.manifests,
        coverage.deletes,
        coverage.inherited,
        coverage.stale_reads,
    ];
    assert!(reached.iter().all(|n| *n > 0), "{coverage:?}");
}

#[test]
fn the_same_seed_gives_the_same_run() {
    for seed in [1, 7, 42, 99] {
        let (a, b) = (run_seed(seed), run_seed(seed));
        assert_eq!((a.hash, a.ended, a.events()), (b.hash, b.ended, b.events()));
    }
    assert_ne!(run_seed(1).hash, run_seed(2).hash);
}

#[test]
fn seeds_are_long_enough_and_meet_every_fault() {
    const SEEDS: u64 = 400;
    let mut events: Vec<u64> = (0..SEEDS).map(|s| run_seed(s).events()).collect();
    events.sort_unstable();
    assert!(
        events[events.len() / 2] >= 500,
        "{:?}",
        events[events.len() / 2]
    );

    let mut met: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in 0..SEEDS {
        let setup = Setup::generate(seed, Focus::Everything, Flaws::default());
        let mut kinds: Vec<_> = setup.faults.iter().flat_map(|(_, f)| f.kinds()).collect();
        kinds.sort_unstable();
        kinds.dedup();
        for kind in kinds {
            *met.entry(kind).or_default() += 1;
        }
    }
    let rarer = Fault::EXTRA_KINDS.map(|kind| (kind, 20));
    for (kind, one_in) in Fault::KINDS.map(|kind| (kind, 10)).into_iter().chain(rarer) {
        let times = met.get(kind).copied().unwrap_or(0);
        assert!(
            times * one_in >= SEEDS,
            "`{kind}` befalls {times} of {SEEDS} seeds"
        );
    }
}

#[test]
fn a_log_is_carried_out_again_without_the_conductor() {
    let setup = Setup::generate(5, Focus::Everything, Flaws::default());
    let report = run::run(setup.clone(), true);
    assert_eq!(report.violation, None);
    let case = Case {
        setup,
        steps: report.log.unwrap_or_default(),
    };
    let text = case.write("clean").expect("a log can be written");
    let again = Case::read(&text).expect("and read");
    assert_eq!((&again.setup, &again.steps), (&case.setup, &case.steps));
    let mut steps = 0u64;
    assert_eq!(run::replay(&again, |_, _| steps += 1), Ok(()));
    assert_eq!(steps, case.steps.len() as u64);
}

/// Seeds that once found a mistake, with what it was.
#[test]
fn regressions_stay_repaired() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/regressions/seeds.txt");
    let list = std::fs::read_to_string(file).expect("the list of seeds");
    let mut seeds = 0;
    for line in list.lines().filter(|l| !l.starts_with('#')) {
        let mut words = line.splitn(3, ' ');
        let focus = words.next().and_then(Focus::named).expect("a focus");
        let seed = words.next().and_then(|s| s.parse().ok()).expect("a seed");
        let found = words.next().expect("what it found");
        // Most were found before there were checkpoints by order and hangs, and orders to end the job.
        let setup = Setup::generate(seed, focus, Flaws::default());
        let mut goes_on = setup.clone();
        let ends = |fault: &Fault| matches!(fault, Fault::OrderCancel { .. });
        goes_on.faults.retain(|(_, fault)| !ends(fault));
        let plain = Setup::plain(seed, focus, Flaws::default());
        let other = (goes_on.faults.len() < setup.faults.len()).then_some(goes_on);
        // And before workers saved into slots, and stores showed what was a moment ago.
        let mut without = setup.clone();
        without.saving = None;
        let stale = |fault: &Fault| matches!(fault, Fault::StoreStale { .. });
        without.faults.retain(|(_, fault)| !stale(fault));
        let without = (without != setup).then_some(without);
        for setup in [setup, plain].into_iter().chain(other).chain(without) {
            let report = run::run(setup, false);
            assert_eq!(report.violation, None, "seed {seed}, which found: {found}");
        }
        seeds += 1;
    }
    assert!(seeds > 0);
}
