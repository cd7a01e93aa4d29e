//! The leader's part in saving: one attempt after the other, from its opening to its commit. Never
//! decides that a save is committed: it asks for that, and is told.

mod gather;
mod people;

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use super::{Cause, Ended, Error, Flaws, Outcome, Part, Save, Stage, ToLeader, ToNode, Written};
pub use people::{GivenUp, Laggard, Lags, Notice};

use crate::ids::{Digest, NodeId};
use crate::record::Record;
use crate::time::{Span, Time};

/// How often what a node has not shown to know is said again.
const RESEND: Span = Span::from_millis(500);

/// Request for a save.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wants {
    /// The step that the ranks agreed on: they save before they begin it.
    pub step: u64,
    pub cause: Cause,
    /// When it is given up, unless it is being committed by then.
    pub until: Time,
}

/// State that a restarted leader has to find again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LeaderState {
    /// The newest attempt, its step, and whether it is over. Attempt 0: none yet.
    pub save: Save,
    pub over: Option<Outcome>,
    /// The step whose sealed copies are kept meanwhile.
    pub keep: Option<u64>,
    /// The manifest that COMMIT is asked for with.
    pub manifest: Option<Digest>,
    /// How often this generation's leader has begun anew: what it says then is newer than all before.
    pub resumed: u16,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The ranks save, or have saved, before this step.
    Save(Wants),
    Message {
        from: NodeId,
        message: ToLeader,
    },
    /// The manifest is durable, under the name of its digest.
    Assembled {
        save: Save,
        manifest: Digest,
        bytes: u32,
    },
    /// It could not be made, or not be written.
    AssembleFailed {
        save: Save,
        why: String,
    },
    /// The commit with this manifest is decided: it was read back, or a majority acknowledged it.
    Committed {
        manifest: Digest,
    },
    /// It is not in force, and never will be.
    NotCommitted {
        manifest: Digest,
        why: String,
    },
    NodeLost {
        node: NodeId,
    },
    /// The launcher here is connected anew: an order to it, or its answer, may have been lost.
    LauncherBack,
    /// Another generation was decided, or the job is over.
    Ended,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Make this durable before what follows.
    Persist(LeaderState),
    Send {
        to: NodeId,
        message: ToNode,
    },
    /// Make the manifest of these files, in rank order, and make it durable. One for each attempt.
    Assemble {
        save: Save,
        files: Vec<Written>,
    },
    /// Ask for the commit: one create at the log's next slot, or a majority (R8, R13). Again with the
    /// same manifest after a restart.
    Commit {
        save: Save,
        manifest: Digest,
    },
    Notice(Notice),
}

/// How far the present save is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub save: Save,
    /// Nodes whose ranks all hold a sealed copy, and nodes whose files are durable.
    pub sealed: usize,
    pub prepared: usize,
    pub nodes: usize,
    /// Bytes written, and all bytes as far as they are known.
    pub done: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Phase {
    /// No attempt yet.
    Idle,
    Open,
    Assembling,
    /// Until every node holds the manifest.
    Holding {
        manifest: Digest,
        bytes: u32,
    },
    Committing {
        manifest: Digest,
        doubted: bool,
    },
    Over(Outcome),
}

/// A node's statements about the present attempt.
#[derive(Clone, Debug)]
struct Heard {
    /// Its place in the record, its first rank, and how many it has.
    index: u32,
    first: u32,
    ranks: u16,
    /// Of the newest report, whatever attempt it is about.
    sealed: Vec<u64>,
    busy: Option<u64>,
    ended: Option<Ended>,
    /// It has shown that it knows what was said last.
    knows: bool,
    /// About this attempt; none while it has said nothing.
    part: Option<Part>,
    /// Its files, once they are durable. Stays, whatever it says later.
    files: Option<Vec<Written>>,
    holds: bool,
    /// When it last said something new.
    since: Time,
}

/// The saves of one generation, one after the other. Made by the record's leader alone.
#[derive(Clone, Debug)]
pub struct Leader {
    generation: Digest,
    /// All nodes write below one directory, so that one manifest serves all.
    shared: bool,
    nodes: BTreeMap<NodeId, Heard>,
    /// In rank order.
    order: Vec<NodeId>,
    state: LeaderState,
    number: u32,
    phase: Phase,
    wants: Option<Wants>,
    until: Time,
    waiting: Option<Wants>,
    /// The newest step committed in this generation.
    committed: Option<u64>,
    resend_at: Option<Time>,
    ended: bool,
    flaws: Flaws,
    effects: VecDeque<Effect>,
}

impl Leader {
    /// For a generation that begins (`state` is the default), or that a restarted leader finds itself in.
    /// `until` is when a save is given up that was open before the restart.
    pub fn new(
        record: &Record,
        shared: bool,
        state: LeaderState,
        until: Time,
        flaws: Flaws,
        now: Time,
    ) -> Leader {
        let generation = record.digest();
        let ours = state.save.generation == generation;
        let state = if ours { state } else { LeaderState::default() };
        let mut first = 0;
        let mut nodes = BTreeMap::new();
        for (index, m) in (0..).zip(&record.members) {
            let heard = Heard {
                index,
                first,
                ranks: m.slots,
                sealed: Vec::new(),
                busy: None,
                ended: None,
                knows: false,
                part: None,
                files: None,
                holds: false,
                since: now,
            };
            first += u32::from(m.slots);
            nodes.insert(m.node, heard);
        }
        let mut leader = Leader {
            generation,
            shared,
            nodes,
            order: record.members.iter().map(|m| m.node).collect(),
            state,
            number: 0,
            phase: Phase::Idle,
            wants: None,
            until,
            waiting: None,
            committed: None,
            resend_at: None,
            ended: false,
            flaws,
            effects: VecDeque::new(),
        };
        leader.resume(now);
        leader
    }

    /// Goes on with what was under way before the agent was restarted.
    fn resume(&mut self, now: Time) {
        if self.state.save.attempt > 0 {
            self.state.resumed = self.state.resumed.saturating_add(1);
            self.effects.push_back(Effect::Persist(self.state));
        }
        self.number = self.first_number();
        self.phase = match (
            self.state.save.attempt,
            self.state.over,
            self.state.manifest,
        ) {
            (0, ..) => Phase::Idle,
            (_, Some(outcome), _) => {
                if outcome == Outcome::Committed {
                    self.committed = Some(self.state.save.step);
                }
                Phase::Over(outcome)
            }
            // It may be in force already: the very same is asked for again.
            (_, None, Some(manifest)) => {
                let save = self.state.save;
                self.effects.push_back(Effect::Commit { save, manifest });
                Phase::Committing {
                    manifest,
                    doubted: false,
                }
            }
            (_, None, None) => Phase::Open,
        };
        self.say(now);
    }

    pub fn generation(&self) -> Digest {
        self.generation
    }

    /// Those that save, in rank order.
    pub fn nodes(&self) -> &[NodeId] {
        &self.order
    }

    /// The step of the newest save that is committed in this generation.
    pub fn committed(&self) -> Option<u64> {
        self.committed
    }

    /// The step of the newest save that was begun in this generation.
    pub fn opened(&self) -> Option<u64> {
        (self.state.save.attempt > 0).then_some(self.state.save.step)
    }

    /// The newest step of which every rank holds a sealed copy, by what was heard last.
    pub fn sealed(&self) -> Option<u64> {
        let mut all = self.nodes.values().map(|n| &n.sealed);
        let first = all.next()?.clone();
        let rest: Vec<&Vec<u64>> = all.collect();
        let everywhere = |step: &u64| rest.iter().all(|sealed| sealed.contains(step));
        first.into_iter().filter(everywhere).max()
    }

    /// Until when the save that is under way may still be committed: whoever would decide the next
    /// generation waits for it if it can. None: there is none, or it cannot be.
    pub fn under_way(&self) -> Option<(Save, Time)> {
        let open = !self.ended && !matches!(self.phase, Phase::Idle | Phase::Over(_));
        open.then_some((self.state.save, self.until))
    }

    pub fn handle(&mut self, event: Event, now: Time) -> Result<(), Error> {
        match event {
            Event::Save(wants) => self.wanted(wants, now)?,
            Event::Message { from, message } => self.message(from, message, now)?,
            Event::Assembled {
                save,
                manifest,
                bytes,
            } => {
                if save == self.state.save && self.phase == Phase::Assembling {
                    self.phase = Phase::Holding { manifest, bytes };
                    if !self.shared {
                        self.change(now);
                    }
                    self.advance(now);
                }
            }
            Event::AssembleFailed { save, why } => {
                if save == self.state.save && self.phase == Phase::Assembling {
                    self.give_up(GivenUp::Manifest { why }, now);
                }
            }
            Event::Committed { manifest } => {
                if self.commits(manifest) {
                    let save = self.state.save;
                    self.committed = self.committed.max(Some(save.step));
                    let notice = Notice::Committed { save, manifest };
                    self.effects.push_back(Effect::Notice(notice));
                    self.over(Outcome::Committed, now);
                }
            }
            Event::NotCommitted { manifest, why } => {
                if self.commits(manifest) {
                    self.give_up(GivenUp::NotCommitted { why }, now);
                }
            }
            Event::NodeLost { node } => {
                let durable = |n: &Heard| n.files.is_some();
                let needed = self
                    .nodes
                    .get(&node)
                    .is_some_and(|n| !self.shared || !durable(n));
                let gathers = matches!(
                    self.phase,
                    Phase::Open | Phase::Assembling | Phase::Holding { .. }
                );
                if needed && gathers {
                    self.give_up(GivenUp::Lost(node), now);
                }
            }
            Event::LauncherBack if self.phase == Phase::Assembling => self.assemble(),
            Event::LauncherBack => {}
            Event::Ended => {
                self.ended = true;
                self.waiting = None;
                self.resend_at = None;
                if matches!(
                    self.phase,
                    Phase::Open | Phase::Assembling | Phase::Holding { .. }
                ) {
                    self.give_up(GivenUp::Ended, now);
                }
            }
        }
        Ok(())
    }

    pub fn handle_timeout(&mut self, now: Time) {
        if now >= self.until {
            match &mut self.phase {
                Phase::Open | Phase::Assembling | Phase::Holding { .. } => {
                    let late = self.laggards(now);
                    return self.give_up(GivenUp::Late(late), now);
                }
                Phase::Committing { doubted, .. } if !*doubted => {
                    *doubted = true;
                    let save = self.state.save;
                    let notice = Effect::Notice(Notice::InDoubt { save });
                    self.effects.push_back(notice);
                }
                Phase::Committing { .. } | Phase::Idle | Phase::Over(_) => {}
            }
        }
        if self.resend_at.is_some_and(|at| now >= at) {
            self.say(now);
        }
    }

    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        let waits = match self.phase {
            Phase::Open | Phase::Assembling | Phase::Holding { .. } => true,
            Phase::Committing { doubted, .. } => !doubted,
            Phase::Idle | Phase::Over(_) => false,
        };
        let until = waits.then_some((self.until, "a save that is not committed"));
        let resend = self.resend_at.map(|at| (at, "tell nodes of a save again"));
        until.into_iter().chain(resend).min_by_key(|(at, _)| *at)
    }

    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Numbers of this run of the agent are above those of the runs before.
    fn first_number(&self) -> u32 {
        u32::from(self.state.resumed) << 16
    }

    fn commits(&self, of: Digest) -> bool {
        matches!(self.phase, Phase::Committing { manifest, .. } if manifest == of)
    }

    fn wanted(&mut self, wants: Wants, now: Time) -> Result<(), Error> {
        if self.ended {
            return Err(Error::Over);
        }
        let Wants { step, cause, until } = wants;
        if let Some(newest) = self.committed.filter(|newest| step <= *newest) {
            return Err(Error::NotNewer { step, newest });
        }
        match self.phase {
            Phase::Idle | Phase::Over(_) => self.open(wants, now),
            // One save serves both.
            _ if step == self.state.save.step => self.until = self.until.min(until),
            _ if step < self.state.save.step => {
                let newest = self.state.save.step;
                return Err(Error::NotNewer { step, newest });
            }
            Phase::Open if cause.is_urgent() => {
                self.waiting = None;
                self.give_up(GivenUp::Superseded { by: step }, now);
                self.open(wants, now);
            }
            _ => {
                let before = self.waiting.filter(|w| w.step >= step);
                self.waiting = Some(match before {
                    Some(before) => Wants {
                        until: before.until.min(until),
                        cause: before.cause.max(cause),
                        ..before
                    },
                    None => wants,
                });
            }
        }
        // It may have come too late already.
        self.handle_timeout(now);
        Ok(())
    }

    fn open(&mut self, wants: Wants, now: Time) {
        let keep = match self.phase {
            Phase::Over(Outcome::Kept) => Some(self.state.save.step),
            Phase::Over(Outcome::Dropped) => self.state.keep,
            _ => None,
        };
        let save = Save {
            generation: self.generation,
            attempt: self.state.save.attempt.saturating_add(1),
            step: wants.step,
        };
        self.state = LeaderState {
            save,
            over: None,
            keep: keep.filter(|k| *k < wants.step),
            manifest: None,
            resumed: self.state.resumed,
        };
        self.number = self.first_number();
        self.phase = Phase::Open;
        self.wants = Some(wants);
        self.until = wants.until;
        for node in self.nodes.values_mut() {
            node.part = None;
            node.files = None;
            node.holds = false;
            node.since = now;
        }
        self.effects.push_back(Effect::Persist(self.state));
        let cause = wants.cause;
        self.effects
            .push_back(Effect::Notice(Notice::Opened { save, cause }));
        self.change(now);
    }

    fn give_up(&mut self, why: GivenUp, now: Time) {
        let save = self.state.save;
        let everywhere = |n: &Heard| n.sealed.contains(&save.step);
        let outcome = match self.nodes.values().all(everywhere) {
            true => Outcome::Kept,
            false => Outcome::Dropped,
        };
        let notice = Notice::GivenUp { save, why };
        self.effects.push_back(Effect::Notice(notice));
        self.over(outcome, now);
    }

    fn over(&mut self, outcome: Outcome, now: Time) {
        self.phase = Phase::Over(outcome);
        self.state.over = Some(outcome);
        self.effects.push_back(Effect::Persist(self.state));
        let next = self.waiting.take();
        let next = next.filter(|w| self.committed.is_none_or(|newest| w.step > newest));
        match next.filter(|_| !self.ended) {
            Some(next) => self.open(next, now),
            None => self.change(now),
        }
    }
}
