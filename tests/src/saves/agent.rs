//! One agent of the simulation: its cores, what it persisted, and its launcher's slots.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use muster_protocol::checkpoint::{
    Busy, Copy, Flaws, Found, Keeper, Leader, LeaderState, Node, NodeState, Settings, SlotId,
};
use muster_protocol::record::Record;
use muster_protocol::storelog::{self, Compaction, Log};
use muster_protocol::{Digest, NodeId, Span, Time};

use super::claims::{STORE, key, node_id};
use super::disk::Token;

/// Bytes of a slot, and of a copy in it.
pub(super) const CAPACITY: u64 = 1 << 20;

/// Logs here are short: snapshots are close together, and forget soon.
const COMPACTION: Compaction = Compaction {
    every: 8,
    claims: 4,
    retired: 1,
};

/// A slot's memory, which the launcher holds: it outlives the agent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    pub word: Found,
    pub token: Option<Token>,
    /// Writers that read it now.
    pub readers: u32,
}

impl Memory {
    const FREE: Memory = Memory {
        word: Found::Free,
        token: None,
        readers: 0,
    };
}

/// Parts of an agent that a crash takes.
#[derive(Debug)]
pub(super) struct Cores {
    /// The newest generation's, and those before it that still hold slots.
    pub nodes: Vec<Node>,
    pub leader: Option<Leader>,
    pub log: Log,
    pub keeper: Keeper,
    /// Commits that were asked for, by the id of their append.
    pub commits: BTreeMap<u64, Digest>,
    /// Retires and rejects.
    pub appends: BTreeMap<u64, u64>,
    pub claiming: Option<u64>,
    pub ids: u64,
    /// Effects that were taken from the cores, and not carried out yet.
    pub todo: VecDeque<Todo>,
    /// Files being written, and whether their writers were told to stop.
    pub writes: BTreeMap<(Digest, SlotId, u32), bool>,
}

/// An effect of one of the cores.
#[derive(Debug)]
pub(super) enum Todo {
    Node(Digest, muster_protocol::checkpoint::NodeEffect),
    Leader(muster_protocol::checkpoint::LeaderEffect),
    Keeper(muster_protocol::checkpoint::KeeperEffect),
    Log(storelog::Effect),
}

#[derive(Debug)]
pub(super) struct Agent {
    pub index: usize,
    pub id: NodeId,
    /// Starts of the agent; what is under way for an earlier one is for nobody.
    pub boot: u64,
    /// Starts of the launcher.
    pub launcher: u64,
    pub launcher_up: bool,
    pub ranks: u16,
    pub memory: BTreeMap<SlotId, Memory>,
    /// Durable: the newest record, and what the cores persisted.
    pub head: Option<Arc<Record>>,
    pub node_state: NodeState,
    pub leader_state: LeaderState,
    pub cores: Option<Cores>,
    pub tick: Option<Time>,
}

impl Agent {
    pub(super) fn new(index: usize, ranks: u16) -> Agent {
        let mut agent = Agent {
            index,
            id: node_id(index),
            boot: 0,
            launcher: 0,
            launcher_up: false,
            ranks,
            memory: BTreeMap::new(),
            head: None,
            node_state: NodeState::default(),
            leader_state: LeaderState::default(),
            cores: None,
            tick: None,
        };
        agent.start_launcher();
        agent
    }

    pub(super) fn start_launcher(&mut self) {
        self.launcher += 1;
        self.launcher_up = true;
        let all = (0..self.ranks).flat_map(|k| [0, 1].map(|side| SlotId { k, side }));
        self.memory = all.map(|id| (id, Memory::FREE)).collect();
    }

    /// Starts the agent with what it persisted.
    pub(super) fn start(&mut self, flaws: Flaws, log_flaws: storelog::Flaws, now: Time) {
        self.boot += 1;
        let seed = self.index as u64 * 1_000_003 + self.boot;
        self.cores = Some(Cores {
            nodes: Vec::new(),
            leader: None,
            log: Log::with_flaws(key(), STORE, self.id, seed, log_flaws).compacted(COMPACTION),
            keeper: Keeper::new(flaws),
            commits: BTreeMap::new(),
            appends: BTreeMap::new(),
            claiming: None,
            ids: 0,
            todo: VecDeque::new(),
            writes: BTreeMap::new(),
        });
        for memory in self.memory.values_mut() {
            memory.readers = 0;
        }
        if let Some(head) = self.head.clone() {
            self.install(&head, flaws, now);
        }
    }

    /// The cores of a generation. The one before ends.
    pub(super) fn install(&mut self, record: &Arc<Record>, flaws: Flaws, now: Time) {
        self.head = Some(record.clone());
        let digest = record.digest();
        let Some(cores) = &mut self.cores else { return };
        cores.leader = (record.leader() == Some(self.id)).then(|| {
            let until = now + Span::from_secs(5);
            Leader::new(record, true, self.leader_state, until, flaws, now)
        });
        if let (Some(index), Some((first, ranks))) = (
            record.members.iter().position(|m| m.node == self.id),
            record.ranks_of(self.id),
        ) {
            let settings = Settings {
                index: index as u32,
                first,
                ranks,
                busy: match self.index % 2 {
                    0 => Busy::Wait,
                    _ => Busy::Skip,
                },
                budget: 2 * CAPACITY * u64::from(ranks),
                lease: Span::from_secs(20),
                flaws,
            };
            let state = self.node_state.clone();
            cores.nodes.push(Node::new(digest, settings, state));
        }
    }

    /// The cores of the newest generation, once the slots are its own.
    pub(super) fn node(&mut self) -> Option<&mut Node> {
        let digest = self.head.as_ref()?.digest();
        let nodes = &mut self.cores.as_mut()?.nodes;
        nodes.iter_mut().find(|n| n.generation() == digest)
    }

    pub(super) fn found(&self, k: u16) -> [Found; 2] {
        [0, 1].map(|side| {
            let memory = self.memory.get(&SlotId { k, side });
            memory.map_or(Found::Free, |m| m.word)
        })
    }

    /// The copy that a rank makes.
    pub(super) fn copy(token: Token) -> Copy {
        Copy {
            generation: token.generation,
            step: token.step,
            bytes: CAPACITY,
            digest: Digest([token.rank as u8; 32]),
        }
    }
}
