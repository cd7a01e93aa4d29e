//! A rank that wants the states compared.

use std::os::fd::AsRawFd;

use muster_protocol::Digest;
use muster_protocol::control::fresh_page;
use muster_protocol::control::live::{Assignment, CAN_REASSIGN, Term, word};

use super::super::seat::tests::assign;
use super::*;
use crate::collective::GroupError;
use crate::page::Page;
use crate::session::Session;
use crate::testing::HeldPort;

/// It counts how often its state is named.
struct Named {
    few: bool,
    /// The next step is lost.
    loses: bool,
    times: Cell<u32>,
}

impl Training for Named {
    type Results = ();

    fn results(&mut self, _step: u64, _share: &Share, group: &mut Group) -> Result<(), Fault> {
        if std::mem::take(&mut self.loses) {
            return Err(GroupError::Aborted { by: None }.into());
        }
        Ok(group.barrier()?)
    }

    fn commit(&mut self, _step: u64, _results: &()) {}

    fn results_len(&self) -> Option<usize> {
        self.few.then_some(0)
    }

    fn encode_results(&self, _results: &()) -> Vec<u8> {
        Vec::new()
    }

    fn decode_results(&self, _bytes: &[u8]) -> Option<()> {
        Some(())
    }

    fn encode_state(&self) -> Vec<u8> {
        Vec::new()
    }

    fn decode_state(&mut self, _bytes: &[u8]) -> bool {
        true
    }

    fn restore(&mut self, _group: &mut Group) -> Result<u64, Fault> {
        Ok(0)
    }

    fn digest_state(&self) -> [u8; 32] {
        self.times.set(self.times.get() + 1);
        [0; 32]
    }
}

#[test]
fn a_wish_to_compare_outlives_the_step_that_it_was_said_in() {
    for few in BOTH {
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, &fresh_page()).unwrap();
        let page = Page::from_file(&file).unwrap();
        page.store(word::FEATURES, CAN_REASSIGN);
        let port = HeldPort::new();
        let generation = |number| Assignment {
            term: Term::of(number, 0),
            rank: 0,
            world: 1,
            local_rank: 0,
            local_world: 1,
            node_rank: 0,
            nodes: 1,
            restarts: 0,
            master: port.address,
            digest: Digest([1; 32]),
            lineage: Digest([1; 32]),
        };
        assign(&page, &generation(1));
        let mut session = Session::from_fd(file.as_raw_fd()).unwrap();
        let named = Named {
            few,
            loses: false,
            times: Cell::new(0),
        };
        let joined = Worker::join(&mut session, named, Patience::default());
        let Ok(mut worker) = joined else {
            panic!("no seat");
        };
        worker.compare_every(Some(1000));
        while worker.committed() < 3 {
            worker.advance().unwrap();
        }
        let before = worker.training.times.get();
        worker.compare_next();
        worker.training.loses = true;
        while !matches!(worker.advance().unwrap(), Outcome::Ended { .. }) {}
        assign(&page, &generation(2));
        while worker.committed() < 6 {
            worker.advance().unwrap();
        }
        assert_eq!(worker.training.times.get(), before + 1, "few: {few}");
    }
}
