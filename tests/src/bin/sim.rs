//! The simulation from the command line.
//!
//! ```text
//! sim run --seeds A..B [--jobs N] [--focus F] [--out DIR]   run seeds, keep a log of the first that fails
//! sim replay SEED [--out FILE]                              run one seed again and say what happened
//! sim shrink SEED                                           leave out faults while it still fails
//! sim step FILE                                             carry out a kept log, step by step
//! ```
//!
//! With `--plain` a seed has no checkpoints by order, hangs, nodes that are given up or orders to end the job.

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use muster_protocol::agent::Flaws;
use muster_tests::sim::coverage::Coverage;
use muster_tests::sim::focus::Focus;
use muster_tests::sim::log::{Case, describe};
use muster_tests::sim::run::{self, Report};
use muster_tests::sim::setup::Setup;

fn main() -> std::process::ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match command(&args) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            std::process::ExitCode::FAILURE
        }
    }
}

fn command(args: &[String]) -> Result<()> {
    match args.first().map(String::as_str) {
        Some("run") => many(&args[1..]),
        Some("replay") => one(&args[1..]),
        Some("shrink") => shrink(&args[1..]),
        Some("step") => step(&args[1..]),
        _ => bail!(
            "say: sim run --seeds A..B [--jobs N] | sim replay SEED | sim shrink SEED | sim step FILE"
        ),
    }
}

fn option<'a>(args: &'a [String], name: &str) -> Option<&'a str> {
    let at = args.iter().position(|a| a == name)?;
    args.get(at + 1).map(String::as_str)
}

fn focus(args: &[String]) -> Result<Focus> {
    let name = option(args, "--focus").unwrap_or("everything");
    Focus::named(name).with_context(|| format!("--focus {name}: no such focus"))
}

fn flaws(args: &[String]) -> Result<Flaws> {
    let mut flaws = Flaws::default();
    match option(args, "--without") {
        None => {}
        Some("r5") => flaws.skip_r5 = true,
        Some("r7") => flaws.skip_r7 = true,
        Some("r8") => flaws.skip_r8 = true,
        Some("r12") => flaws.skip_r12 = true,
        Some("r13") => flaws.skip_r13 = true,
        Some("r16") => flaws.skip_r16 = true,
        Some("r20") => flaws.skip_r20 = true,
        Some(other) => {
            bail!("--without {other}: name r5, r7, r8, r12, r13, r16 or r20")
        }
    }
    Ok(flaws)
}

/// The case of a seed, as the arguments choose it.
fn cases(args: &[String]) -> Result<impl Fn(u64) -> Setup + Sync> {
    let (focus, flaws) = (focus(args)?, flaws(args)?);
    let plain = args.iter().any(|a| a == "--plain");
    let make = if plain { Setup::plain } else { Setup::generate };
    Ok(move |seed| make(seed, focus, flaws))
}

fn many(args: &[String]) -> Result<()> {
    let range = option(args, "--seeds").context("--seeds A..B is missing")?;
    let (from, to) = range.split_once("..").context("--seeds wants A..B")?;
    let (from, to): (u64, u64) = (from.parse()?, to.parse()?);
    let jobs: usize = option(args, "--jobs").unwrap_or("1").parse()?;
    let out = PathBuf::from(option(args, "--out").unwrap_or("target/sim"));
    let keep_going = args.iter().any(|a| a == "--keep-going");
    let case = cases(args)?;
    let next = AtomicU64::new(from);
    let stop = AtomicBool::new(false);
    let total = Mutex::new((
        Coverage::default(),
        Vec::<u64>::new(),
        Vec::<(u64, String)>::new(),
    ));
    let began = std::time::Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= to {
                        return;
                    }
                    let report = run::run(case(seed), false);
                    let Ok(mut total) = total.lock() else { return };
                    total.0.add(&report.coverage);
                    total.1.push(report.events());
                    if let Some(violation) = report.violation {
                        println!("seed {seed}: {violation}");
                        total.2.push((seed, violation.name().to_owned()));
                        stop.store(!keep_going, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    let Ok((coverage, mut events, failed)) = total.into_inner() else {
        bail!("a thread panicked");
    };
    events.sort_unstable();
    let median = events.get(events.len() / 2).copied().unwrap_or(0);
    let spent = began.elapsed().as_secs_f64();
    println!(
        "{} seeds in {spent:.1} s, {median} events in the median, {} failed",
        events.len(),
        failed.len()
    );
    for (name, count) in coverage.rows() {
        println!("  {name:22} {count:>12}");
    }
    if let Some((seed, _)) = failed.iter().min() {
        let report = run::run(case(*seed), true);
        keep(&report, &out.join(format!("seed-{seed}.jsonl")))?;
        bail!("{} of {} seeds failed", failed.len(), events.len());
    }
    Ok(())
}

fn keep(report: &Report, file: &std::path::Path) -> Result<()> {
    let case = Case {
        setup: report.setup.clone(),
        steps: report.log.clone().unwrap_or_default(),
    };
    let verdict = match &report.violation {
        Some(violation) => violation.to_string(),
        None => "clean".into(),
    };
    if let Some(parent) = file.parent() {
        std::fs::create_dir_all(parent)?;
    }
    std::fs::write(file, case.write(&verdict)?)?;
    println!("{} steps are in {}", case.steps.len(), file.display());
    Ok(())
}

fn one(args: &[String]) -> Result<()> {
    let seed: u64 = args.first().context("which seed?")?.parse()?;
    let report = run::run(cases(args)?(seed), true);
    print_report(&report);
    if let Some(file) = option(args, "--out") {
        keep(&report, file.as_ref())?;
    }
    match report.violation {
        Some(violation) => bail!("{violation}"),
        None => Ok(()),
    }
}

fn print_report(report: &Report) {
    let s = &report.setup;
    println!(
        "seed {}: {} nodes, {}:{} of them, store {}, commits every {} ms, stop steps {}",
        s.seed,
        s.nodes.len(),
        s.spec.min_nodes,
        s.spec.max_nodes,
        s.store,
        s.commit_every / 1_000_000,
        s.stop_steps
    );
    for (at, fault) in &s.faults {
        println!("  {:>8.3} s  {fault:?}", *at as f64 / 1e9);
    }
    println!(
        "{} events, {:.3} s of virtual time, hash {:016x}",
        report.events(),
        report.ended as f64 / 1e9,
        report.hash
    );
}

fn shrink(args: &[String]) -> Result<()> {
    let seed: u64 = args.first().context("which seed?")?.parse()?;
    let setup = cases(args)?(seed);
    let report = run::run(setup.clone(), false);
    let Some(violation) = report.violation else {
        println!("seed {seed} is clean");
        return Ok(());
    };
    let small = run::shrink(&setup, &violation, 200);
    let report = run::run(small, true);
    print_report(&report);
    if let Some(violation) = &report.violation {
        println!("{violation}");
    }
    let file = option(args, "--out").map_or_else(
        || PathBuf::from(format!("target/sim/small-{seed}.jsonl")),
        PathBuf::from,
    );
    keep(&report, &file)
}

fn step(args: &[String]) -> Result<()> {
    let file = args.first().context("which file?")?;
    let case = Case::read(&std::fs::read_to_string(file)?)?;
    let quiet = args.iter().any(|a| a == "--quiet");
    let verdict = run::replay(&case, |at, step| {
        if !quiet {
            println!("{:>12.6} {}", at as f64 / 1e9, describe(step));
        }
    });
    match verdict {
        Ok(()) => println!("every step is within the rules"),
        Err(violation) => bail!("{violation}"),
    }
    Ok(())
}
