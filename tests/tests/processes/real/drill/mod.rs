//! The drill: three nodes train and save, and one of their processes is killed at a named point of a
//! save, a commit, a restore. Then the job must go on, from the newest commit and from nothing else, and
//! everything that is committed must be whole.
//!
//! One job walks over many points: what was killed comes back before the next. The points are lines of
//! `muster-fault` in the code, [`points`] lists them, and `every_point_in_the_code_is_drilled` sees to it
//! that none is left out.

mod job;
pub(crate) mod judge;
mod points;
mod walk;

use std::collections::BTreeSet;

use crate::ground::sources::sources;

pub(crate) use job::{Job, Setup};

use points::{AGENT, LAUNCHER, LEADER, Point, RESTORE, RETIRE, WORKER, When};
use walk::{all_die, walk};

#[test]
fn a_worker_dies_at_every_point_of_a_save() {
    walk(WORKER);
}

#[test]
fn a_launcher_dies_at_every_point_of_a_save() {
    walk(LAUNCHER);
}

#[test]
fn an_agent_dies_at_every_point_of_a_save() {
    walk(AGENT);
}

#[test]
fn the_leaders_agent_dies_at_every_point_of_a_commit() {
    walk(LEADER);
}

#[test]
fn any_process_dies_at_every_point_of_a_restore() {
    walk(RESTORE);
}

#[test]
fn any_process_dies_at_every_point_of_a_deletion() {
    walk(RETIRE);
}

#[test]
fn all_nodes_die_in_the_middle_of_a_deletion() {
    let in_the_middle = |point: &&Point| {
        let what = (point.name, point.of);
        [
            ("log.linked", "\"retire\""),
            ("store.unlinked", ".safetensors"),
            ("keeping.delete", "manifest/"),
        ]
        .contains(&what)
    };
    all_die(RETIRE.iter().filter(in_the_middle));
}

#[test]
fn all_nodes_die_around_the_commit() {
    let of_the_commit = |point: &&Point| {
        let what = (point.name, point.of);
        let around = [
            ("persist.published", "/manifest/"),
            ("log.create", "\"commit\""),
            ("log.linked", "\"commit\""),
        ];
        around.contains(&what)
    };
    all_die(LAUNCHER.iter().filter(of_the_commit));
}

/// So that none is forgotten.
#[test]
fn every_point_in_the_code_is_drilled() {
    let mut found = BTreeSet::new();
    for (_, text) in sources(&["daemon", "runtime"]) {
        for call in text.split("muster_fault::point").skip(1) {
            let name = call.split('"').nth(1);
            found.insert(name.expect("a point's name is on its line").to_owned());
        }
    }
    let drilled = points::all().map(|p| p.name.to_owned()).collect();
    assert_eq!(found, drilled);
}

mod long {
    use super::*;

    #[test]
    fn all_nodes_die_at_every_point_of_a_save() {
        all_die(points::all().filter(|p| p.when == When::Save));
    }
}
