use clap::Parser;

use super::*;

#[derive(Debug, Parser)]
#[command(infer_long_args = true, args_override_self = true)]
struct Line {
    #[command(flatten)]
    run: RunArgs,
}

fn host() -> Host {
    Host {
        memory: 100,
        cpus: 6,
        gpus: 0,
        python: "python3".into(),
        random: 0xabcd,
    }
}

fn plan_on(line: &str, host: &Host) -> Result<Plan, PlanError> {
    let argv: Vec<OsString> = std::iter::once("muster".into())
        .chain(line.split_whitespace().map(OsString::from))
        .collect();
    let args = Line::try_parse_from(&argv).expect(line).run;
    let explicit = args.is_explicit(&argv);
    Plan::new(args, explicit, host)
}

fn plan(line: &str) -> Plan {
    plan_on(line, &host()).expect(line)
}

fn words(plan: &Plan) -> String {
    let mut all = vec![plan.program.to_string_lossy().into_owned()];
    all.extend(plan.args.iter().map(|a| a.to_string_lossy().into_owned()));
    all.join(" ")
}

#[test]
fn what_is_run() {
    for (line, expected) in [
        ("train.py --lr 3", "python3 -u train.py --lr 3"),
        ("train --lr 3", "python3 -u train --lr 3"),
        ("-m pkg.train -x", "python3 -u -m pkg.train -x"),
        ("--no-python ./train -x", "./train -x"),
        (
            "-- python train.py --nnodes 9",
            "python train.py --nnodes 9",
        ),
        ("-- train.py --nnodes 9", "python3 -u train.py --nnodes 9"),
        ("train.py -- a", "python3 -u train.py -- a"),
        ("train.py a -- b", "python3 -u train.py a -- b"),
        ("-- ./x -- b", "./x -- b"),
        ("--max-restarts 3 -- sh -c true", "sh -c true"),
        ("--standalone train.py -m x", "python3 -u train.py -m x"),
    ] {
        assert_eq!(words(&plan(line)), expected, "{line}");
    }
}

#[test]
fn an_unknown_flag_is_no_script() {
    for (line, flag) in [
        ("--nprocs 2 train.py", "--nprocs"),
        (
            "--nnodes 2 --max-restart-count=3 train.py",
            "--max-restart-count=3",
        ),
        ("-x train.py", "-x"),
    ] {
        let error = plan_on(line, &host()).unwrap_err();
        assert_eq!(error, PlanError::UnknownFlag(flag.into()), "{line}");
    }
    assert_eq!(words(&plan("-- -odd -x")), "-odd -x");
}

#[test]
fn dash_underscore_and_abbreviation_are_one() {
    for line in [
        "--nproc-per-node 2 --max-restarts 5 x.py",
        "--nproc_per_node=2 --max_restarts=5 x.py",
        "--nproc 2 --max-rest 5 x.py",
        "--nproc-per-node 9 --max-restarts 1 --nproc_per_node 2 --max_restarts 5 x.py",
    ] {
        let plan = plan(line);
        assert_eq!((plan.slots, plan.spec.max_restarts), (2, 5), "{line}");
    }
}

#[test]
fn counts() {
    let gpus = Host { gpus: 4, ..host() };
    assert_eq!(plan("--nproc-per-node cpu x.py").slots, 6);
    assert_eq!(plan("--nproc-per-node auto x.py").slots, 6);
    assert_eq!(
        plan_on("--nproc-per-node auto x.py", &gpus).unwrap().slots,
        4
    );
    assert_eq!(
        plan_on("--nproc-per-node gpu x.py", &gpus).unwrap().slots,
        4
    );
    let local = plan("--local-addr localhost x.py").local_addr;
    assert!(local.is_some_and(|ip| ip.is_loopback()));
    let spec = plan("--nnodes 2:8 x.py").spec;
    assert_eq!((spec.min_nodes, spec.max_nodes), (2, 8));
    let devices = || {
        ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"]
            .map(String::from)
            .into_iter()
    };
    assert_eq!(count_gpus(None, None, devices()), 2);
    assert_eq!(count_gpus(Some("1"), None, devices()), 1);
    assert_eq!(count_gpus(Some(""), None, devices()), 0);
    assert_eq!(count_gpus(Some("-1,0"), None, devices()), 0);
    assert_eq!(count_gpus(None, Some("none"), devices()), 0);
    assert_eq!(count_gpus(None, Some("all"), devices()), 2);
}

#[test]
fn streams_in_both_syntaxes() {
    let p = plan("-t 3 -r 0:1,1:3 --local_ranks_filter 0,2 x.py");
    assert_eq!(
        p.logs.tee.of(7),
        Streams {
            out: true,
            err: true
        }
    );
    assert_eq!(
        p.logs.redirects.of(0),
        Streams {
            out: true,
            err: false
        }
    );
    assert_eq!(
        p.logs.redirects.of(1),
        Streams {
            out: true,
            err: true
        }
    );
    assert_eq!(p.logs.redirects.of(2), Streams::default());
    assert_eq!(p.logs.show, BTreeSet::from([0, 2]));
}

#[test]
fn times_and_signals() {
    let p = plan(
        "--loss-grace 50ms --stop-grace 2m --preempt-signal usr1 --signals-to-handle SIGINT,SIGUSR2 x.py",
    );
    assert_eq!((p.spec.loss_grace_ms, p.spec.stop_grace_ms), (50, 120_000));
    assert_eq!(p.spec.preempt_signal, Signal::SIGUSR1 as i32);
    assert!(p.handled.interrupt);
    assert_eq!(p.handled.leave, [Signal::SIGUSR2]);
    assert_eq!(plan("--shutdown-timeout 7 x.py").spec.stop_grace_ms, 7_000);
    assert_eq!(plan("x.py").spec.stop_grace_ms, 30_000);
}

#[test]
fn names() {
    assert_eq!(plan("--rdzv-id a --nnodes 2 x.py").job, "a");
    assert_eq!(plan("--nnodes 2 dir/train.py").job, "train");
    assert_eq!(plan("--nnodes 2 -- python dir/train.py").job, "train");
    let store = tempfile::tempdir().unwrap();
    let stored = |line: &str| plan(&format!("--store {} {line}", store.path().display())).job;
    assert_eq!(stored("train.py"), "train");
    assert_eq!(stored("--standalone --rdzv-id a train.py"), "a");
    assert_eq!(plan("train.py").job, "train-0000abcd");
    assert_eq!(
        plan("--standalone --rdzv-id a train.py").job,
        "train-0000abcd"
    );
    assert_eq!(plan("--nnodes 2 --master-addr n1 x.py").endpoints, ["n1"]);
    assert_eq!(
        plan("--rdzv-endpoint n1:29400,n2 x.py").endpoints,
        ["n1:29400", "n2"]
    );
}

#[test]
fn places_of_one_name_are_one() {
    let a = plan("--place z1/s1 x.py").place;
    assert_eq!(a, plan("--label zone=z1,switch=s1 x.py").place);
    assert_ne!(a, plan("--place z1/s2 x.py").place);
    assert_eq!(plan("x.py").place, Place::default());
}

#[test]
fn bad_input_names_the_flag() {
    for (line, flag) in [
        ("--nnodes 3:2 x.py", "--nnodes"),
        ("--nnodes two x.py", "--nnodes"),
        ("--nnodes 0 x.py", "--nnodes"),
        ("--nnodes 5000 x.py", "--nnodes"),
        ("--nproc-per-node 0 x.py", "--nproc-per-node"),
        ("--nproc-per-node lots x.py", "--nproc-per-node"),
        ("--nproc-per-node gpu x.py", "--nproc-per-node"),
        ("-t 4 x.py", "--tee"),
        ("-r 0:1,x x.py", "--redirects"),
        ("--local-ranks-filter a x.py", "--local-ranks-filter"),
        ("--preempt-signal SIGFOO x.py", "--preempt-signal"),
        ("--signals-to-handle SIGKILL x.py", "--signals-to-handle"),
        ("-m --no-python x", "--module"),
        ("--rdzv-id a/b x.py", "--rdzv-id"),
        ("--standalone --nnodes 2 x.py", "--standalone"),
        ("--local-addr a..b x.py", "--local-addr"),
        ("--rdzv-endpoint http://x x.py", "--rdzv-endpoint"),
        ("--label rack=1 x.py", "--label"),
        ("--store /nonexistent x.py", "--store"),
        ("--max-restarts 3", "no script"),
    ] {
        let error = plan_on(line, &host()).expect_err(line).to_string();
        assert!(error.contains(flag), "{line}: {error}");
    }
}

#[test]
fn a_quorum_counts_the_endpoints_listed() {
    let quorum = |line: &str| plan_on(line, &host()).map(|p| p.spec.birth_quorum);
    assert_eq!(quorum("--nnodes 1:4 --rdzv-endpoint a,b,c,d t.py"), Ok(0));
    for (endpoints, nodes) in [
        ("a", 1),
        ("a,b", 2),
        ("a,b,c", 2),
        ("a,b,c,d", 3),
        ("a,a,b", 2),
    ] {
        let line = format!("--nnodes 1:4 --birth-quorum --rdzv-endpoint {endpoints} t.py");
        assert_eq!(quorum(&line), Ok(nodes), "{endpoints}");
    }
    assert_eq!(
        quorum("--nnodes 1:4 --birth_quorum t.py"),
        Err(PlanError::NoEndpoints)
    );
    let few = quorum("--nnodes 1:2 --birth-quorum --rdzv-endpoint a,b,c,d t.py");
    assert!(matches!(
        few,
        Err(PlanError::Spec(SpecError::BirthQuorum {
            quorum: 3,
            max: 2
        }))
    ));
}

#[test]
fn memory_for_checkpoints() {
    for (text, value) in [
        ("0", 0),
        ("4096", 4096),
        ("2k", 2048),
        ("1.5GiB", 3 << 29),
        ("64G", 64 << 30),
        ("1 TB", 1 << 40),
    ] {
        assert_eq!(bytes(text), Some(value), "{text}");
    }
    for text in ["", "G", "-1", "1X", "1e99", "NaN", "1GG"] {
        assert_eq!(bytes(text), None, "{text}");
    }
}

#[test]
fn when_a_job_saves() {
    let of = |line: &str| plan_on(&format!("--store /tmp {line} x.py"), &host());
    let triggers = |line: &str| of(line).expect(line).spec.triggers;
    assert_eq!(triggers(""), Triggers::default());
    let both = triggers("--checkpoint-every-steps 100 --checkpoint-every 10m");
    assert_eq!((both.steps, both.every_ms), (100, 600_000));
    for (text, ppm) in [("1%", 10_000), ("0.5 %", 5_000), ("2", 20_000)] {
        assert_eq!(share(text), Some(ppm), "{text}");
    }
    let skip = triggers("--checkpoint-overhead 1% --checkpoint-busy skip");
    assert_eq!((skip.overhead_ppm, skip.busy), (10_000, Busy::Skip));
    let refused = |line: &str| of(line).unwrap_err();
    assert_eq!(
        refused("--checkpoint-every 1m --checkpoint-overhead 1"),
        PlanError::Spec(SpecError::TwoIntervals)
    );
    assert_eq!(
        refused("--checkpoint-overhead 60"),
        PlanError::Spec(SpecError::Overhead)
    );
    for text in ["0", "-1%", "much", "200%"] {
        let line = format!("--checkpoint-overhead={text}");
        assert_eq!(refused(&line), PlanError::Share(text.to_owned()));
    }
    let nowhere = plan_on("--checkpoint-overhead 1 x.py", &host()).unwrap_err();
    assert_eq!(nowhere, PlanError::OverheadWithoutStore);
}

#[test]
fn what_other_nodes_hold_in_memory() {
    for (line, replicas) in [
        ("x", Choice::Nothing),
        ("--replicas 0 x", Choice::Nothing),
        ("--replicas 1 x", Choice::Copy),
        ("--replicas=parity:3 x", Choice::Parity(3)),
    ] {
        assert_eq!(plan(line).replicas, replicas, "{line}");
    }
    let wrong = Line::try_parse_from(["muster", "--replicas", "parity:1", "x"]);
    let error = wrong.unwrap_err().to_string();
    assert!(error.contains("write --replicas 1"), "{error}");
}

#[test]
fn flags_of_torchrun_that_ask_for_what_is_not_there_are_said() {
    let notes = |line: &str| plan(line).notes.len();
    assert_eq!(
        notes("--logs-specs default --event-log-handler null x.py"),
        0
    );
    assert_eq!(
        notes("--numa_binding=node --duplicate-stdout-filters a,b x.py"),
        2
    );
    assert_eq!(
        notes("--logs-specs mine --event-log-handler mine --duplicate_stderr_filters e x.py"),
        3
    );
    assert!(plan("--virtual-local-rank x.py").virtual_local_rank);
    let signals = plan("--signals-to-handle SIGTERM,SIGUSR1 x.py").signals;
    assert_eq!(signals, "SIGTERM,SIGUSR1");
}
