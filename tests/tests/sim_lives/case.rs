//! The cases: how five lives in a row are, and all the ways in which they may be.

use muster_protocol::spec::JobSpec;
use muster_tests::sim::clock::{MS, SEC};
use muster_tests::sim::rng::Rng;
use muster_tests::sim::setup::{Fault, NodeSetup, Setup, Times};

pub(super) const LIVES: u64 = 5;
/// From the first start of a life to its end.
const LIFE: u64 = 40 * SEC;
/// How long agents that live in their launchers outlive them.
const SHORT: u64 = 8 * SEC;
/// How long agents keep slots; of a job that waits for nobody longer than that they are given up.
const GRACE: u64 = 10 * SEC;
const ORPHAN: u64 = 14 * SEC;
const LEASE: u64 = 25 * SEC;
/// From the loss of most nodes until the others leave, and how long the agents of the former are away.
const CONTINUED: u64 = 20 * SEC;
const DEAD: u64 = 12 * SEC;
/// How often a checkpoint is ready, about.
const COMMITS: u64 = 8 * SEC;
/// A life trains this long after its last start, at most.
pub(super) const BOUND: u64 = 6 * SEC;
/// And so much later where other nodes come after all were killed: nobody tells them so, and they wait
/// until the agents or the store have been silent for `orphan_after`.
pub(super) const SILENCE: u64 = 18 * SEC;

/// How a life ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Finished,
    Failed,
    Cancelled,
    AllLeave,
    /// The launchers of all nodes are killed; their agents live on.
    LaunchersKilled,
    /// The same, and nobody comes back before the job counts as left.
    Dormant,
    /// All nodes lose power.
    NodesKilled,
    /// All nodes but two lose power, a person has these go on without them, and they leave later.
    Continued,
    /// Each life ends in another of these ways.
    Mixed,
}

/// The nodes of one life after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Back {
    Same,
    /// One node fewer in every second life.
    Some,
    /// Other nodes in every second life.
    Others,
    /// One node more in every second life.
    More,
}

/// When the next life's launchers are started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Starts {
    Together,
    Staggered,
    /// As soon as the end begins, and again until it succeeds.
    Overlapping,
}

/// For how long nobody is there between two lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gap {
    Short,
    /// Longer than agents wait for each other.
    PastGrace,
    /// Longer than strangers wait for a job's members.
    PastOrphan,
    /// Longer than a job without launchers is kept.
    PastLease,
}

impl Gap {
    pub(super) const ALL: [Gap; 4] = [Gap::Short, Gap::PastGrace, Gap::PastOrphan, Gap::PastLease];

    fn ns(self) -> u64 {
        match self {
            Gap::Short => SHORT,
            Gap::PastGrace => GRACE + 3 * SEC,
            Gap::PastOrphan => ORPHAN + 6 * SEC,
            Gap::PastLease => LEASE + 10 * SEC,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) seed: u64,
    pub(super) nodes: usize,
    pub(super) end: End,
    pub(super) back: Back,
    pub(super) starts: Starts,
    pub(super) gap: Gap,
    pub(super) store: bool,
    /// The agent lives and dies with its launcher.
    pub(super) embedded: bool,
    pub(super) state_lost: bool,
    /// Each life is started with another specification than the one before.
    pub(super) other_flags: bool,
}

impl Case {
    pub(super) fn end_of(&self, life: u64) -> End {
        const ALL: [End; 6] = [
            End::NodesKilled,
            End::Finished,
            End::AllLeave,
            End::LaunchersKilled,
            End::Failed,
            End::Cancelled,
        ];
        match self.end {
            End::Mixed => ALL[((self.seed + life) % 6) as usize],
            end => end,
        }
    }

    pub(super) fn nodes_of(&self, life: u64) -> std::ops::Range<usize> {
        let n = self.nodes;
        match (life % 2 == 1, self.back) {
            (false, _) | (true, Back::Same) => 0..n,
            (true, Back::Some) => 0..n - 1,
            (true, Back::Others) => n..2 * n,
            (true, Back::More) => 0..n + 1,
        }
    }

    /// Whether nobody but those who listen for it knows that this life is over.
    pub(super) fn ends_silently(&self, life: u64) -> bool {
        let killed = matches!(self.end_of(life), End::LaunchersKilled | End::NodesKilled);
        killed && (self.back != Back::Same || self.state_lost || self.embedded)
    }

    fn start_of(&self, life: u64) -> u64 {
        life * (LIFE + self.gap.ns())
    }

    /// When a node's launcher of this life is started first.
    pub(super) fn launch(&self, life: u64, nth: usize) -> u64 {
        let begin = self.start_of(life);
        match self.starts {
            Starts::Together => begin + nth as u64 * MS,
            Starts::Staggered => begin + nth as u64 * 700 * MS,
            Starts::Overlapping if life == 0 => begin,
            // Ranks that have yet to finish would go on with those that join.
            Starts::Overlapping => match self.end_of(life - 1) {
                End::Finished => self.ends(life - 1) + SEC / 2,
                _ => self.ends(life - 1) + MS,
            },
        }
    }

    pub(super) fn ends(&self, life: u64) -> u64 {
        self.start_of(life) + LIFE
    }

    pub(super) fn setup(&self) -> Setup {
        let all = 2 * self.nodes;
        let far = self.start_of(LIVES) * 2;
        let alone = self.end == End::Continued;
        let node = |at: usize| NodeSetup {
            agent_at: match self.embedded || alone && at >= self.nodes {
                true => far,
                false => 0,
            },
            launcher_at: None,
            ..NodeSetup::quiet(at, 0)
        };
        let mut faults = Vec::new();
        for life in 0..LIVES {
            self.starts(life, &mut faults);
            if life + 1 < LIVES {
                self.ends_life(life, &mut faults);
            }
        }
        faults.sort_by_key(|(at, _)| *at);
        let spec = |life: u64| JobSpec {
            min_nodes: 2 + u16::from(self.other_flags && life % 2 == 1),
            max_nodes: self.nodes as u16 + 1,
            ..JobSpec::default()
        };
        let later = (1..LIVES).filter(|_| self.other_flags);
        let later = later.map(|life| (self.launch(life, 0), spec(life)));
        let nodes = (0..all).map(node).collect();
        Setup {
            store: self.store,
            commit_every: COMMITS,
            stop_steps: self.seed.is_multiple_of(2),
            live: self.seed.is_multiple_of(3),
            times: Times {
                agent_grace: GRACE,
                orphan_after: ORPHAN,
                slot_lease: match self.gap {
                    Gap::PastLease => LEASE,
                    _ => Times::USUAL.slot_lease,
                },
                ..Times::USUAL
            },
            faults,
            embedded: self.embedded,
            heal_at: self.start_of(LIVES - 1) + 5 * SEC,
            later_specs: later.collect(),
            ..Setup::quiet(self.seed, nodes, spec(0))
        }
    }

    fn starts(&self, life: u64, faults: &mut Vec<(u64, Fault)>) {
        for (nth, node) in self.nodes_of(life).enumerate() {
            let at = self.launch(life, nth);
            if self.embedded {
                // It comes up with its agent; what it knew is kept, or lost.
                faults.push((
                    at,
                    Fault::NodeStart {
                        node,
                        new_disk: self.state_lost,
                    },
                ));
            }
            let tries = match self.starts {
                Starts::Overlapping => 40,
                _ => 1,
            };
            faults.extend((0..tries).map(|n| (at + MS + n * 250 * MS, Fault::LateJoin { node })));
        }
    }

    fn ends_life(&self, life: u64, faults: &mut Vec<(u64, Fault)>) {
        let at = self.ends(life);
        let nodes = self.nodes_of(life);
        let first = nodes.start;
        let kill = |node, (before_end, down)| Fault::NodeCrash {
            node,
            down: match self.embedded {
                true => before_end + self.gap.ns() - 100 * MS,
                false => down,
            },
            new_disk: self.state_lost,
            relaunch: false,
        };
        let leave = |node| Fault::Leave {
            node,
            grace_ms: 5_000,
            relaunch_after: None,
        };
        match self.end_of(life) {
            End::Finished => faults.push((at, Fault::Finish)),
            End::Failed => faults.push((
                at,
                Fault::WorkerFail {
                    node: first,
                    code: 3,
                    cascade: false,
                },
            )),
            End::Cancelled => faults.push((at, Fault::Cancel { node: first })),
            End::AllLeave => faults.extend(nodes.clone().map(|node| (at, leave(node)))),
            End::Continued => {
                let lost = at - CONTINUED;
                // Those that are left are no majority.
                let left = nodes.end - 2;
                let dead = (nodes.start..left).map(|node| (lost, kill(node, (CONTINUED, DEAD))));
                faults.extend(dead);
                faults.push((
                    lost + 2 * SEC,
                    Fault::Continue {
                        for_ns: DEAD - 2 * SEC,
                    },
                ));
                faults.extend((left..nodes.end).map(|node| (at, leave(node))));
            }
            End::LaunchersKilled | End::Dormant => faults.extend(nodes.clone().map(|node| {
                let fault = Fault::LauncherCrash {
                    node,
                    relaunch_after: None,
                };
                (at, fault)
            })),
            End::NodesKilled | End::Mixed => {
                faults.extend(nodes.clone().map(|node| (at, kill(node, (0, SEC)))));
            }
        }
        if self.embedded && self.end_of(life) != End::NodesKilled {
            let gone = at + SHORT - 100 * MS;
            faults.extend(nodes.map(|node| (gone, Fault::NodeStop { node })));
        }
    }
}

/// All cases with short gaps; and, at the end, jobs that are left long enough.
fn short() -> impl Iterator<Item = Case> {
    let ends = [
        End::Finished,
        End::Failed,
        End::Cancelled,
        End::AllLeave,
        End::LaunchersKilled,
        End::NodesKilled,
        End::Mixed,
        End::Dormant,
        End::Continued,
    ];
    let backs = [Back::Same, Back::Some, Back::Others, Back::More];
    let starts = [Starts::Together, Starts::Staggered, Starts::Overlapping];
    let flags = || (0..16u8).map(|b| (b & 1 == 1, b & 2 == 2, b & 4 == 4, b & 8 == 8));
    let all = ends.into_iter().flat_map(move |end| {
        backs.into_iter().flat_map(move |back| {
            starts.into_iter().flat_map(move |starts| {
                flags().map(move |(store, embedded, state_lost, other_flags)| Case {
                    seed: 0,
                    nodes: match end {
                        End::Continued => 5,
                        _ => 4,
                    },
                    end,
                    back,
                    starts,
                    gap: Gap::Short,
                    store,
                    embedded,
                    state_lost,
                    other_flags,
                })
            })
        })
    });
    all.filter(|c| c.embedded || !c.state_lost || matches!(c.end, End::NodesKilled | End::Mixed))
        // The old agent is gone only once its launcher is.
        .filter(|c| !(c.embedded && c.starts == Starts::Overlapping))
        // With a store its end is written there, which nobody can do without a launcher.
        .filter(|c| {
            let left = !(c.embedded || c.store) && c.starts != Starts::Overlapping;
            c.end != End::Dormant || left
        })
        // With a store, or other agents as witnesses, nobody needs a person's word; and two nodes have to be enough.
        .filter(|c| {
            let alone = !c.store && (c.embedded || c.back == Back::Same);
            c.end != End::Continued || alone && !c.other_flags
        })
        .enumerate()
        .map(|(seed, case)| Case {
            seed: seed as u64,
            ..case
        })
}

/// Cases that failed once, with a short gap, and that no stride may leave out.
pub(super) const FAILED_ONCE: [u64; 3] = [193, 811, 821];

/// Each case with one gap, which is drawn.
pub(super) fn some() -> impl Iterator<Item = Case> {
    short().map(|case| {
        let drawn = Rng::new(case.seed).pick(&Gap::ALL).copied();
        let gap = match (case.end, case.starts) {
            (End::Dormant, _) => Gap::PastLease,
            (_, Starts::Overlapping) => Gap::Short,
            _ if FAILED_ONCE.contains(&case.seed) => Gap::Short,
            _ => drawn.unwrap_or(Gap::Short),
        };
        Case { gap, ..case }
    })
}

/// Each case with each gap that it may have.
pub(super) fn every() -> impl Iterator<Item = Case> {
    short().flat_map(|case| {
        let fits = move |gap: &Gap| match (case.end, case.starts) {
            (End::Dormant, _) => *gap == Gap::PastLease,
            (_, Starts::Overlapping) => *gap == Gap::Short,
            _ => true,
        };
        let gaps = Gap::ALL.into_iter().filter(fits);
        gaps.map(move |gap| Case { gap, ..case })
    })
}
