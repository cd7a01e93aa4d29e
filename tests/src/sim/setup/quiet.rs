//! A small cluster in which nothing goes wrong by itself: single cases change what they are about.

use muster_protocol::spec::JobSpec;

use super::{NetSetup, NodeSetup, Setup, Times};
use crate::sim::clock::{Clock, MS, SEC};

impl NodeSetup {
    /// Node `at`, with one worker: its agent starts at `from`, its launcher at once after that (nanoseconds).
    pub fn quiet(at: usize, from: u64) -> NodeSetup {
        NodeSetup {
            tag: u8::try_from(16 * (at + 1)).unwrap_or(u8::MAX),
            clock: Clock {
                offset: SEC,
                ppm: 0,
            },
            slots: 1,
            agent_at: from,
            launcher_at: Some(from + MS),
        }
    }
}

impl Setup {
    /// These nodes, a fast network, the usual times, and no fault.
    pub fn quiet(seed: u64, nodes: Vec<NodeSetup>, spec: JobSpec) -> Setup {
        Setup {
            seed,
            saves: vec![0; nodes.len()],
            nodes,
            net: NetSetup {
                delay: MS,
                loss: 0,
                duplication: 0,
                reordering: 0,
            },
            spec,
            later_specs: Vec::new(),
            store: false,
            commit_every: 0,
            stop_steps: false,
            watches: false,
            ends_hung: false,
            live: false,
            times: Times::USUAL,
            other_suspect: None,
            namesakes: false,
            disk: 0,
            slow_disk: None,
            embedded: false,
            saving: None,
            flaws: Default::default(),
            faults: Vec::new(),
            heal_at: 60 * SEC,
            settle: 60 * SEC,
        }
    }
    /// The specification with which launchers are started now.
    pub fn spec_at(&self, now: u64) -> &JobSpec {
        let later = self.later_specs.iter().rev().find(|(at, _)| *at <= now);
        later.map_or(&self.spec, |(_, spec)| spec)
    }
}
