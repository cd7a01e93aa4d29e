//! Scripts written for torchrun, without a changed line.

mod python;
mod unlike;

use crate::harness::{Bed, project, python};

fn bed(script: &[&str]) -> Bed {
    let mut bed = Bed::new(&["--nnodes=1:2", "--join-quiet=100ms"]);
    bed.script(script);
    bed.env("PYTHON_EXEC", &python());
    bed.env("OMP_NUM_THREADS", "1");
    bed
}

/// Two nodes of which the one without rank 0 dies once both have trained, and comes back.
fn lose_one_and_finish(mut bed: Bed, trains: &str, resumes: &[&str], done: &str) {
    for node in 0..2 {
        bed.run(node, 0);
    }
    bed.until("the script trains", |bed| {
        (0..2).any(|node| bed.said(node).contains(trains))
    });
    let job = bed.job(0);
    let first = job["members"][0]["node"].clone();
    let zero = (0..2).find(|n| bed.status(*n)["node"] == first).unwrap();
    let other = 1 - zero;
    bed.kill(other);
    bed.until("the script resumes", |bed| {
        let said = bed.said(zero);
        resumes.iter().any(|r| said.contains(r))
    });
    bed.run(other, 0);
    for node in 0..2 {
        assert_eq!(bed.ended(node), Some(0), "n{node}");
    }
    assert!(bed.said(zero).contains(done), "{}", bed.said(zero));
}

#[test]
fn an_epoch_trainer_with_a_data_loader_and_record() {
    let script = project("examples/torchrun_style/imagenet_style.py");
    let mut bed = bed(&[]);
    let file = bed.path("checkpoint.pth.tar");
    let file = file.to_str().unwrap();
    bed.script(&[&script, "--epochs=12", "--checkpoint-file", file]);
    // It saves after it says that an epoch is over.
    let resumes = ["=> start_epoch: 2", "=> start_epoch: 3"];
    lose_one_and_finish(bed, " * Epoch 2 ", &resumes, " * Epoch 11 ");
}

#[test]
fn a_module_that_reads_every_variable_by_hand() {
    let mut bed = bed(&["-m", "minilm"]);
    let dir = bed.path("minilm");
    bed.env("PYTHONPATH", &project("examples/torchrun_style"));
    bed.env("MINILM_OUT_DIR", dir.to_str().unwrap());
    bed.env("MINILM_STEPS", "400");
    bed.env("MINILM_PAUSE", "0.02");
    lose_one_and_finish(bed, "iter 40:", &["resuming from iter"], "done at iter 400");
}
