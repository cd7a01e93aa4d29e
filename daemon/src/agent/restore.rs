//! Restores the state that an earlier run of the agent stored.

use muster_protocol::agent::{Restored, Stored};
use muster_protocol::job::Durable;

use crate::state::{StateDir, StateError};

/// Reads it. Where some of it cannot be read, votes may be lost with it: the agent goes
/// on as another voter.
pub(super) fn restore(state: &mut StateDir) -> Result<Stored, StateError> {
    let Restored {
        stored,
        unreadable,
        votes_lost,
    } = Restored::read(load_jobs(state)?, state.load_past());
    for (name, error) in &unreadable {
        tracing::error!(
            name,
            %error,
            "a job's stored state cannot be read, and is put aside"
        );
    }
    let Some(why) = votes_lost else {
        return Ok(stored);
    };
    let before = state.state_id();
    let names: Vec<&str> = unreadable.iter().map(|(name, _)| name.as_str()).collect();
    state.renew(&names)?;
    tracing::error!(
        %before, now = %state.state_id(), why,
        "this agent cannot know all votes that it gave: it counts as a new voter from now on, and its node \
         joins its jobs anew"
    );
    Ok(stored)
}

/// The jobs' blobs, without moments of another clock. Those go from the disk as well, before the directory counts as
/// one of this clock.
fn load_jobs(state: &mut StateDir) -> Result<Vec<(String, Vec<u8>)>, StateError> {
    let mut jobs = state.load_all();
    if state.is_of_this_clock()? {
        return Ok(jobs);
    }
    for (name, bytes) in &mut jobs {
        if let Ok(mut durable) = Durable::decode(bytes)
            && durable.forget_moments()
            && let Ok(without) = durable.encode()
        {
            state.save(name, &without)?;
            *bytes = without;
        }
    }
    state.note_clock()?;
    Ok(jobs)
}

#[cfg(test)]
mod tests {
    use muster_protocol::agent::Past;
    use muster_protocol::{Boot, Digest, JobKey};
    use muster_protocol::{Span, Time};

    use super::*;

    fn durable(id: &str) -> Durable {
        Durable::new(JobKey {
            cluster: "c".into(),
            owner: "0".into(),
            id: id.into(),
        })
    }

    fn open(path: &std::path::Path) -> StateDir {
        StateDir::open(path).unwrap()
    }

    #[test]
    fn a_job_that_cannot_be_read_makes_another_voter() {
        let tmp = tempfile::tempdir().unwrap();
        let mut state = open(tmp.path());
        let old = (state.node_id(), state.state_id());
        let (kept, lost) = (durable("kept"), durable("lost"));
        // As it was stored before what is stored had a version.
        let mut unversioned = lost.encode().unwrap();
        unversioned[0] = 1;
        state.save("aa", &kept.encode().unwrap()).unwrap();
        state.save("bb", &unversioned).unwrap();
        let mut past = Past::default();
        past.add(Digest([1; 32]), 3, true);
        state.save_past(&past.encode().unwrap()).unwrap();
        drop(state);

        let mut state = open(tmp.path());
        assert_eq!((state.state_id(), state.boot()), (old.1, Boot(2)));
        let stored = restore(&mut state).unwrap();
        assert_eq!(stored.jobs, [(kept.key.clone(), kept.encode().unwrap())]);
        assert_eq!(state.node_id(), old.0);
        assert_ne!(state.state_id(), old.1);
        assert_eq!(state.boot(), Boot(1));
        // What was remembered for the old voter binds the new one no more.
        assert!(stored.past.is_empty());
        let [aside] = state.quarantined() else {
            panic!("{:?}", state.quarantined())
        };
        assert_eq!(
            std::fs::read(&aside.kept_as)
                .map(|b| b.ends_with(&unversioned))
                .ok(),
            Some(true)
        );
        // Once.
        let now = state.state_id();
        drop(state);
        let mut state = open(tmp.path());
        assert_eq!(restore(&mut state).unwrap().jobs.len(), 1);
        assert_eq!((state.state_id(), state.boot()), (now, Boot(2)));
    }

    /// A state directory that came from another host, whose clock showed less.
    #[test]
    fn moments_of_another_clock_are_forgotten() {
        let tmp = tempfile::tempdir().unwrap();
        let mut held = durable("j");
        held.hold(2_000, Vec::new(), Time(Span::from_secs(1).0));
        let store = |state: &mut StateDir| state.save("aa", &held.encode().unwrap()).unwrap();
        let found = |state: &mut StateDir| {
            let stored = restore(state).unwrap();
            Durable::decode(&stored.jobs[0].1).unwrap().held_from
        };
        // Of a build that noted no clock.
        let mut state = open(tmp.path());
        store(&mut state);
        drop(state);
        let mut state = open(tmp.path());
        assert_eq!(found(&mut state), None);
        store(&mut state);
        drop(state);
        let mut state = open(tmp.path());
        assert_eq!(found(&mut state), held.held_from);
        state.save_clock(b"another").unwrap();
        drop(state);
        // Twice, for it went from the disk.
        for _ in 0..2 {
            let mut state = open(tmp.path());
            assert_eq!(found(&mut state), None);
        }
    }

    #[test]
    fn what_is_remembered_of_forgotten_jobs_survives_a_restart() {
        let tmp = tempfile::tempdir().unwrap();
        let mut past = Past::default();
        past.add(Digest([1; 32]), 3, true);
        let mut state = open(tmp.path());
        let id = state.state_id();
        state.save_past(&past.encode().unwrap()).unwrap();
        drop(state);
        let mut state = open(tmp.path());
        let stored = restore(&mut state).unwrap();
        assert_eq!(
            (Past::decode(&stored.past), state.state_id()),
            (Ok(past.clone()), id)
        );
        drop(state);
        // Damage, or bytes that say something else, make another voter.
        let path = tmp.path().join("past");
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        let state = open(tmp.path());
        assert_ne!(state.state_id(), id);
        drop(state);
        let mut state = open(tmp.path());
        let id = state.state_id();
        state.save_past(b"?").unwrap();
        drop(state);
        let mut state = open(tmp.path());
        assert!(restore(&mut state).unwrap().past.is_empty());
        assert_ne!(state.state_id(), id);
        // So does a list from which something was dropped.
        let mut n = 0u64;
        while !past.is_lossy() {
            past.add(Digest(*blake3::hash(&n.to_le_bytes()).as_bytes()), 1, true);
            n += 1;
        }
        let id = state.state_id();
        state.save_past(&past.encode().unwrap()).unwrap();
        drop(state);
        let mut state = open(tmp.path());
        assert!(restore(&mut state).unwrap().past.is_empty());
        assert_ne!(state.state_id(), id);
    }
}
