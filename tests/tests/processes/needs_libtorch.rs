//! The runtime's examples with tch, on nodes that are lost and join. `tests/run` builds them, and names their
//! directory in `$MUSTER_TEST_EXAMPLES`.

use nix::sys::signal::Signal;

use crate::harness::{Bed, committed};

fn bed(example: &str, flags: &[&str]) -> Bed {
    let directory = std::env::var("MUSTER_TEST_EXAMPLES").expect(
        "MUSTER_TEST_EXAMPLES is where `cargo build --examples --features torch` puts them",
    );
    let example = format!("{directory}/{example}");
    let mut bed = Bed::new(&["--nnodes=1:3", "--join-quiet=100ms"]);
    let script = ["--", &example, "--cpu", "--report-every", "10"];
    bed.script(&[&script[..], flags].concat());
    bed.env("OMP_NUM_THREADS", "1");
    bed
}

/// The number after `before`, at its last place in the text.
fn last(text: &str, before: &str) -> f64 {
    let at = text
        .rfind(before)
        .unwrap_or_else(|| panic!("no {before:?} in {text}"));
    let rest = &text[at + before.len()..];
    let len = rest
        .find(|c: char| !(c.is_ascii_digit() || c == '.'))
        .unwrap_or(rest.len());
    rest[..len]
        .parse()
        .unwrap_or_else(|_| panic!("{before}: {rest}"))
}

/// The node whose worker says what the training does: the one with rank 0.
fn speaker(bed: &Bed, of: &[usize]) -> usize {
    let speaks = |node: &&usize| bed.said(**node).contains("loss");
    *of.iter().find(speaks).expect("rank 0 reports")
}

/// Three nodes train; one is killed with all its processes. Returns the output of the survivors' rank 0, and the last
/// loss before the kill.
fn lose_one(mut bed: Bed, kill_zero: bool) -> (String, f64) {
    for node in 0..3 {
        bed.run(node, 0);
    }
    let all = [0, 1, 2];
    bed.until("three ranks train", |bed| {
        all.iter().any(|node| bed.said(*node).contains(", 3 ranks"))
    });
    let zero = speaker(&bed, &all);
    let other = if zero == 0 { 1 } else { 0 };
    let first = last(&bed.said(zero), "loss ");
    let lost = if kill_zero { zero } else { other };
    let rest: Vec<usize> = all.into_iter().filter(|node| *node != lost).collect();
    bed.kill(lost);
    for node in &rest {
        assert_eq!(bed.ended(*node), Some(0), "n{node}");
    }
    let said: Vec<String> = rest.iter().map(|node| bed.said(*node)).collect();
    for said in &said {
        let goes_on = said.matches("goes on at step").count();
        assert!(goes_on > 0, "a survivor kept its state: {said}");
    }
    let state = |said: &String| {
        let at = said
            .find("done after")
            .unwrap_or_else(|| panic!("no end: {said}"));
        let line = said[at..].lines().next().unwrap_or_default();
        line.to_owned()
    };
    assert_eq!(state(&said[0]), state(&said[1]), "the survivors' states");
    let zero = speaker(&bed, &rest);
    (bed.said(zero), first)
}

#[test]
fn the_convolutional_net_goes_on_without_a_node() {
    let bed = bed("convnet", &["--steps", "200", "--pause-ms", "20"]);
    let (said, _) = lose_one(bed, false);
    let right = last(&said, "held out: loss ").min(1.0);
    assert!(right < 0.3, "the loss on held-out digits: {said}");
    assert!(last(&said, ", 2 ranks, ") > 0.0 && said.contains("% right (step 200)"));
    let at = said.rfind(" % right").unwrap();
    let accuracy = last(&said[..at], ", ");
    assert!(accuracy > 90.0, "{said}");
}

#[test]
fn the_gpt_goes_on_without_its_first_node() {
    let small = ["--layers", "2", "--width", "48", "--context", "32"];
    let flags = [&["--steps", "120", "--pause-ms", "40"][..], &small].concat();
    let (said, first) = lose_one(bed("gpt", &flags), true);
    let end = last(&said, "held out: loss ");
    // Of 74 letters, all equally likely: 4.3.
    assert!(end < 2.9 && end < first, "from {first} to {end}: {said}");
    assert!(said.contains("it writes:"), "{said}");
}

/// The step at which a node's newest launcher says that its rank goes on.
fn goes_on_at(bed: &Bed, node: usize) -> Option<u64> {
    let said = bed.said(node);
    let (_, rest) = said.split_once("goes on at step ")?;
    rest.lines().next()?.trim().parse().ok()
}

#[test]
fn a_net_whose_nodes_are_all_told_to_go_goes_on_at_that_step_in_another_world() {
    // It saves only where it is told to.
    let flags = [
        "--steps",
        "400",
        "--pause-ms",
        "20",
        "--save-every",
        "1000000",
    ];
    let mut bed = bed(
        "convnet",
        &[&flags[..], &["--eval-every", "1000000"]].concat(),
    );
    let store = tempfile::tempdir().unwrap();
    bed.flag(&format!("--store={}", store.path().display()));
    let all = [0, 1, 2];
    for node in all {
        bed.run(node, 0);
    }
    bed.until("three ranks train", |bed| {
        all.iter().any(|node| bed.said(*node).contains(", 3 ranks"))
    });
    for node in all {
        bed.signal(bed.launcher_pid(node), Signal::SIGTERM);
    }
    for node in all {
        assert_eq!(bed.ended(node), Some(143), "n{node}: {}", bed.said(node));
    }
    let [stopped] = committed(store.path())[..] else {
        panic!("one commit, not {:?}", committed(store.path()));
    };
    for node in [3, 4] {
        bed.run(node, 3);
    }
    for node in [3, 4] {
        assert_eq!(bed.ended(node), Some(0), "n{node}");
    }
    // One may start alone where the other comes later than the quiet time: that one joins then.
    let begun = [3, 4].into_iter().filter_map(|node| goes_on_at(&bed, node));
    assert_eq!(begun.min(), Some(stopped), "no step is lost");
    let said = bed.said(speaker(&bed, &[3, 4]));
    let at = said.rfind(" % right").unwrap();
    assert!(last(&said[..at], ", ") > 90.0, "{said}");
    // The last one is that of the end.
    assert_eq!(committed(store.path()).last(), Some(&400));
}
