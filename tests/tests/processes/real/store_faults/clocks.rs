//! A wall clock that jumps.

use std::path::Path;

use super::super::drill::{Job, Setup};
use crate::ground::clock::FalseClock;
use crate::ground::sources::that_name;

#[test]
fn the_newest_commit_is_the_logs_newest_whatever_the_clock_says() {
    let dir = tempfile::tempdir().unwrap();
    let Some(clock) = FalseClock::build(dir.path()) else {
        return;
    };
    let jumps = [400_000_000, -40_000_000, 86_400];
    let mut job = Job::start(Setup {
        times: jumps.len() + 1,
        env: clock.env().into(),
        ..Setup::default()
    });
    let mut dates = Vec::new();
    for jump in jumps {
        let (_, log) = job.steady(0, "a jump of the clock");
        clock.jump(jump);
        // The first commit from now on may be of a save that had begun before.
        let (_, log) = job.steady(log.step(), "the clock jumped");
        let (_, log) = job.steady(log.step(), "a save began after it");
        job.kill();
        // Those that come next live in another time again.
        clock.jump(-jump);
        let known = job.judge.check(&job.bed.events());
        dates.push(saved_at(
            &job.folder(),
            &log.newest().unwrap().commit.manifest.hex(),
        ));
        job.begin_anew();
        job.steady(known.step(), "all died");
        let log = job.judge.check(&job.bed.events());
        let restored = log.claims[known.claims.len()].restore;
        assert_eq!(restored, known.newest().map(|c| c.commit));
    }
    // The false clock was in force, or this test proved nothing.
    assert!(dates[0] > dates[1] + 300_000_000, "{dates:?}");
    job.end();
}

fn saved_at(folder: &Path, manifest: &str) -> u64 {
    let text = std::fs::read(folder.join(format!("manifest/{manifest}.json"))).unwrap();
    let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
    json["body"]["origin"]["saved_at"].as_u64().unwrap()
}

/// Code that makes, finds and deletes checkpoints reads no wall clock: a manifest is dated for people.
#[test]
fn the_wall_clock_dates_manifests_and_nothing_else() {
    let found = that_name(
        &["runtime/checkpoint/src", "runtime/src/saving"],
        &["SystemTime", "ClockId::Realtime", "st_mtime", "modified()"],
    );
    assert_eq!(found, ["runtime/src/saving/saver.rs"]);
}
