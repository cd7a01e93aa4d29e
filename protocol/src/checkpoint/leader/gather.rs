//! Messages between the leader and the nodes.

use super::{
    Cause, Effect, Ended, Error, GivenUp, Heard, Laggard, Lags, Leader, Outcome, Part, Phase,
    Progress, RESEND, Stage, ToLeader, ToNode, Wants, Written,
};
use crate::control::slots::SLOTS;
use crate::ids::NodeId;
use crate::time::Time;

impl Leader {
    /// The message about the newest attempt; none where there was none.
    fn word(&self) -> Option<ToNode> {
        let stage = match self.phase {
            Phase::Idle => return None,
            Phase::Open | Phase::Assembling => Stage::Write,
            Phase::Holding { manifest, bytes } if !self.shared => Stage::Hold { manifest, bytes },
            Phase::Holding { .. } | Phase::Committing { .. } => Stage::Write,
            Phase::Over(outcome) => Stage::Over(outcome),
        };
        Some(ToNode {
            save: self.state.save,
            number: self.number,
            keep: self.state.keep,
            stage,
        })
    }

    /// The message has changed: all are told.
    pub(super) fn change(&mut self, now: Time) {
        self.number = self.number.saturating_add(1);
        for node in self.nodes.values_mut() {
            node.knows = false;
        }
        self.say(now);
    }

    /// Tells everybody who has not shown to know.
    pub(super) fn say(&mut self, now: Time) {
        self.resend_at = None;
        let Some(message) = self.word().filter(|_| !self.ended) else {
            return;
        };
        for to in &self.order {
            if self.nodes.get(to).is_some_and(|n| !n.knows) {
                let to = *to;
                self.effects.push_back(Effect::Send { to, message });
                self.resend_at = Some(now + RESEND);
            }
        }
    }

    pub(super) fn message(
        &mut self,
        from: NodeId,
        message: ToLeader,
        now: Time,
    ) -> Result<(), Error> {
        self.heard(from, message, now)?;
        self.give_up_behind_ended(now);
        Ok(())
    }

    /// A step that an ended rank has not sealed can never be whole: the others' copies of it are let go, or they would
    /// wait for a free slot without end. What that rank has sealed comes first.
    fn give_up_behind_ended(&mut self, now: Time) {
        let step = match self.phase {
            Phase::Open => Some(self.state.save.step),
            Phase::Idle | Phase::Over(_) => self.newest_copy().filter(|s| self.opened() < Some(*s)),
            Phase::Assembling | Phase::Holding { .. } | Phase::Committing { .. } => None,
        };
        let Some(step) = step else { return };
        let open = self.phase == Phase::Open;
        let durable = |n: &Heard| open && n.files.is_some();
        let ended = self.nodes.values().filter(|n| !durable(n));
        let mut ended = ended.filter_map(|n| n.ended);
        let Some(Ended { rank, .. }) = ended.find(|e| e.newest < Some(step)) else {
            return;
        };
        if !open && self.awaits_ended() {
            return;
        }
        if !open {
            let (cause, until) = (Cause::Steps, now);
            self.open(Wants { step, cause, until }, now);
        }
        self.give_up(GivenUp::RankEnded { rank }, now);
    }

    /// Whether a step that has not begun may still be whole, which all ranks hold that have ended.
    fn awaits_ended(&self) -> bool {
        let ended = self.nodes.values().filter_map(|n| n.ended);
        let Some(step) = ended.map(|e| e.newest).min().flatten() else {
            return false;
        };
        let may_hold = |n: &Heard| match n.ended {
            Some(ended) => ended.newest == Some(step),
            None => n.sealed.last() < Some(&step),
        };
        let mut nodes = self.nodes.values();
        self.opened() < Some(step) && nodes.all(|n| n.sealed.contains(&step) || may_hold(n))
    }

    /// Whether a node holds a step that is newer than all that were begun, of which others may not have spoken.
    pub fn may_be_whole(&self) -> bool {
        self.newest_copy() > self.opened()
    }

    /// The newest step of which all ranks of a node hold a sealed copy, or any rank of a node where some rank has ended.
    fn newest_copy(&self) -> Option<u64> {
        let beside = |n: &Heard| n.ended.and_then(|ended| ended.beside);
        let of = |n: &Heard| n.sealed.last().copied().max(beside(n));
        self.nodes.values().filter_map(of).max()
    }

    fn heard(&mut self, from: NodeId, message: ToLeader, now: Time) -> Result<(), Error> {
        let (ours, theirs) = (self.generation, message.generation);
        if ours != theirs {
            return Err(Error::OtherGeneration { ours, theirs });
        }
        let node = self.nodes.get_mut(&from).ok_or(Error::NotAMember)?;
        node.busy = message.busy;
        node.sealed = message.sealed;
        node.ended = message.ended;
        let attempt = self.state.save.attempt;
        if message.attempt > attempt {
            self.jump(message.attempt, now);
            return Ok(());
        }
        // It has not heard of this attempt yet, or forgot it with its agent; what it said may be old.
        if message.attempt < attempt {
            node.knows = false;
            self.resend_at.get_or_insert(now + RESEND);
        }
        if message.attempt < attempt || attempt == 0 {
            return Ok(());
        }
        if message.number > self.number {
            self.number = message.number;
            self.change(now);
        } else {
            node.knows |= message.number == self.number;
            if self.nodes.values().all(|n| n.knows) {
                self.resend_at = None;
            }
        }
        self.note(from, message.part, now);
        Ok(())
    }

    /// The nodes have heard of an attempt that this leader does not know: its own, and lost with its
    /// disk. An open attempt is opened anew above it.
    fn jump(&mut self, attempt: u32, now: Time) {
        let open = match self.phase {
            // The commit goes on under its own name; the nodes hear of it with the next attempt.
            Phase::Committing { .. } => return,
            Phase::Open | Phase::Assembling | Phase::Holding { .. } => self.wants,
            Phase::Idle | Phase::Over(_) => None,
        };
        self.state.save.generation = self.generation;
        self.state.save.attempt = attempt;
        self.phase = Phase::Idle;
        if let Some(wants) = open {
            self.open(wants, now);
        }
    }

    fn note(&mut self, from: NodeId, part: Part, now: Time) {
        let Some(node) = self.nodes.get_mut(&from) else {
            return;
        };
        if node.part.as_ref() != Some(&part) {
            node.since = now;
        }
        match &part {
            Part::Settled(outcome) => {
                let open = matches!(
                    self.phase,
                    Phase::Open | Phase::Assembling | Phase::Holding { .. }
                );
                // An earlier run of this leader had decided it, and could not say so on its disk.
                if open && *outcome != Outcome::Committed {
                    return self.give_up(GivenUp::Before, now);
                }
            }
            Part::Failed { why } => {
                let why = why.clone();
                if matches!(self.phase, Phase::Open | Phase::Holding { .. }) {
                    return self.give_up(GivenUp::Failed { node: from, why }, now);
                }
            }
            Part::Prepared { files } => {
                if let Err(why) = right_ranks(node, files) {
                    if self.phase == Phase::Open {
                        self.give_up(GivenUp::Failed { node: from, why }, now);
                    }
                    return;
                }
                node.files = Some(files.clone());
            }
            Part::Holding { manifest: held } => {
                let wanted = match &self.phase {
                    Phase::Holding { manifest, .. } => Some(manifest),
                    _ => None,
                };
                node.holds |= wanted == Some(held);
            }
            Part::Idle | Part::Waiting { .. } | Part::Writing { .. } => {}
        }
        // A file stays durable, whatever is said late.
        if node.files.is_none() || !matches!(part, Part::Waiting { .. } | Part::Writing { .. }) {
            node.part = Some(part);
        }
        self.advance(now);
    }

    pub(super) fn advance(&mut self, now: Time) {
        let save = self.state.save;
        let slack = usize::from(self.flaws.skip_last_rank);
        match self.phase {
            Phase::Open => {
                let sealed = |n: &Heard| n.sealed.contains(&save.step) || n.files.is_some();
                if self.state.keep.is_some() && self.nodes.values().all(sealed) {
                    // The newer copies are there, so the older ones can go.
                    self.state.keep = None;
                    self.change(now);
                }
                let durable = self.nodes.values().filter(|n| n.files.is_some());
                if durable.count() + slack < self.nodes.len() {
                    return;
                }
                self.phase = Phase::Assembling;
                self.assemble();
            }
            Phase::Holding { manifest, .. } => {
                if !self.shared && !self.nodes.values().all(|n| n.holds) {
                    return;
                }
                self.phase = Phase::Committing {
                    manifest,
                    doubted: false,
                };
                self.state.manifest = Some(manifest);
                self.effects.push_back(Effect::Persist(self.state));
                self.effects.push_back(Effect::Commit { save, manifest });
            }
            Phase::Idle | Phase::Assembling | Phase::Committing { .. } | Phase::Over(_) => {}
        }
    }

    /// Has the manifest made of all files, in rank order.
    pub(super) fn assemble(&mut self) {
        let files = |n| self.nodes.get(n)?.files.clone();
        let files = self.order.iter().filter_map(files).flatten().collect();
        let save = self.state.save;
        self.effects.push_back(Effect::Assemble { save, files });
    }

    /// For whom the present save waits, by name.
    pub fn laggards(&self, now: Time) -> Vec<Laggard> {
        let holding = match self.phase {
            Phase::Holding { .. } => true,
            Phase::Open => false,
            _ => return Vec::new(),
        };
        let lag = |node: &NodeId| {
            let heard = self.nodes.get(node)?;
            let what = match &heard.part {
                _ if holding && heard.holds => return None,
                _ if holding => Lags::Manifest,
                _ if heard.files.is_some() => return None,
                Some(Part::Waiting { ranks }) => Lags::NotSealed {
                    ranks: ranks.clone(),
                },
                Some(Part::Writing { done, bytes }) => Lags::Writing {
                    left: bytes.saturating_sub(*done),
                },
                _ => Lags::Silent,
            };
            Some(Laggard {
                node: *node,
                what,
                since: now.since(heard.since),
            })
        };
        self.order.iter().filter_map(lag).collect()
    }

    /// How far the present save is; none where there is none.
    pub fn progress(&self) -> Option<Progress> {
        let (save, _) = self.under_way()?;
        let (mut done, mut bytes) = (0u64, 0u64);
        for node in self.nodes.values() {
            let (d, b) = match (&node.files, &node.part) {
                (Some(files), _) => {
                    let all = files.iter().map(|f| f.bytes).fold(0, u64::saturating_add);
                    (all, all)
                }
                (None, Some(Part::Writing { done, bytes })) => (*done, *bytes),
                (None, _) => (0, 0),
            };
            done = done.saturating_add(d);
            bytes = bytes.saturating_add(b);
        }
        let count = |of: &dyn Fn(&Heard) -> bool| self.nodes.values().filter(|n| of(n)).count();
        Some(Progress {
            save,
            sealed: count(&|n| n.files.is_some() || n.sealed.contains(&save.step)),
            prepared: count(&|n| n.files.is_some()),
            nodes: self.nodes.len(),
            done,
            bytes,
        })
    }

    /// Nodes whose ranks have no free slot for another save, and the steps that occupy them.
    pub fn full(&self) -> impl Iterator<Item = (NodeId, &[u64])> + '_ {
        let of = |node: &NodeId| {
            let sealed = &self.nodes.get(node)?.sealed;
            (sealed.len() >= SLOTS).then_some((*node, &sealed[..]))
        };
        self.order.iter().filter_map(of)
    }

    /// Nodes of which a rank has no free slot, and the step that it wants one for.
    pub fn busy(&self) -> impl Iterator<Item = (NodeId, u64)> + '_ {
        let of = |node: &NodeId| Some((*node, self.nodes.get(node)?.busy?));
        self.order.iter().filter_map(of)
    }
}

/// Whether these are the files of all of the node's ranks, each once.
fn right_ranks(node: &Heard, files: &[Written]) -> Result<(), String> {
    let wanted = (node.first..).take(usize::from(node.ranks));
    match files.iter().map(|f| f.rank).eq(wanted) {
        true => Ok(()),
        false => Err(format!(
            "it names files of other ranks than its own, which begin at {} (place {} of the record)",
            node.first, node.index
        )),
    }
}
