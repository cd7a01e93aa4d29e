//! Saves of this job: the cores of [`checkpoint`](crate::checkpoint), joined with generations, the log
//! and the disk. A node's core lives as long as its slots hold something; the leader's, as long as its
//! generation is the newest one known here.

use std::collections::BTreeMap;

use super::keeping::Keeping;
use super::second_look::SecondLooks;
use super::stop::Planned;
use super::triggers::Triggers;
use super::{Ctx, Job};
use crate::agent::Notice;
use crate::checkpoint::Meter;
use crate::checkpoint::{
    Busy, Cause, Flaws, Found, Keeper, Leader, LeaderEffect, LeaderEvent, LeaderNotice, Node,
    NodeEffect, NodeEvent, NodeNotice, Outcome as SaveOutcome, Save, Settings, SlotId, Stage,
    ToLeader, ToNode, Wants,
};
use crate::ids::{Digest, NodeId};
use crate::local::{Replicated, SaveAsk, SaveNews, ToLauncher, short};
use crate::record::{Arbiter, Record};
use crate::storelog::Outcome;
use crate::time::{Span, Time};
use crate::wire::JobMessage;

/// How long a save may go on that was open when the agent was restarted.
const RESUMED: Span = Span::from_secs(60);

/// How long a save may take from its last sealed copy to its commit.
const SAVE: Span = Span::from_secs(600);

/// How long a decision waits for a save, at most.
const PATIENCE: Span = Span::from_secs(60);

/// How long the end waits for nodes that have not said that they hold what another one has sealed: they say it once a
/// second.
const UNSAID: Span = Span::from_secs(3);

/// The most bytes that are stored about files that are durable. Without them they are written again
/// after a restart, no more.
const MAX_STORED: usize = 16 * 1024;

#[derive(Clone, Debug)]
pub(super) struct Saves {
    /// The newest generation's, and those before it whose slots hold something.
    pub(super) nodes: Vec<Node>,
    pub(super) leader: Option<Leader>,
    /// The generation that these were made for.
    generation: Digest,
    pub(super) keeper: Keeper,
    pub(super) keeping: Keeping,
    /// Appends of the keeper, and the commits that they are about.
    pub(super) appends: BTreeMap<u64, u64>,
    /// A commit whose outcome is not known.
    commit: Option<(Save, Digest)>,
    /// The slots of the launcher here, by local rank: bytes of each, and what is in them.
    pub(super) slots: BTreeMap<u16, (u64, [Found; 2])>,
    /// Since when the next generation waits for a save.
    awaited: Option<Time>,
    /// Checkpoints that somebody found damaged, until another has looked.
    pub(super) looks: SecondLooks,
    /// When the members were last told that the first step may begin.
    pub(super) verified_said: Time,
    /// Bytes that the slots here may have, of all that the node takes.
    budget: u64,
    /// Cost of saving here, and the progress of the ranks.
    pub(super) meter: Meter,
    pub(super) triggers: Triggers,
    /// The newest commit that the launcher here was told of.
    committed: Option<Save>,
    /// How what is sealed here gets into the memory of other nodes, as the launcher here said last.
    replicated: Option<Replicated>,
}

impl Default for Saves {
    fn default() -> Saves {
        Saves {
            nodes: Vec::new(),
            leader: None,
            generation: Digest::ZERO,
            keeper: Keeper::new(Flaws::default()),
            keeping: Keeping::default(),
            appends: BTreeMap::new(),
            commit: None,
            slots: BTreeMap::new(),
            awaited: None,
            looks: SecondLooks::default(),
            verified_said: Time::ZERO,
            budget: u64::MAX,
            meter: Meter::default(),
            triggers: Triggers::default(),
            committed: None,
            replicated: None,
        }
    }
}

impl Saves {
    /// Whether a worker here has slots.
    pub(super) fn has_slots(&self) -> bool {
        !self.slots.is_empty()
    }
}

impl Job {
    /// The saves of the generation that this agent leads: how far they are, and for whom they wait.
    pub fn saves(&self) -> Option<&Leader> {
        self.saves.leader.as_ref()
    }

    /// Whether the launcher here has a worker of this local rank.
    fn has_slot_of(&self, k: u16) -> bool {
        self.local.as_ref().is_some_and(|l| k < l.reg.slots)
    }

    /// Handles what the launcher here says of slots and files.
    pub(super) fn on_save_news(&mut self, ctx: &mut Ctx<'_>, news: SaveNews) {
        let event = match news {
            SaveNews::Slots { k, .. } if !self.has_slot_of(k) => return,
            SaveNews::Slots { k, capacity, found } => {
                self.saves.slots.insert(k, (capacity, found));
                NodeEvent::Slots { k, capacity, found }
            }
            SaveNews::SlotsGone { k } => {
                self.saves.slots.remove(&k);
                NodeEvent::SlotsGone { k }
            }
            SaveNews::Filling { slot, step } => {
                self.found(slot, Found::Filling { step });
                NodeEvent::Filling { slot, step }
            }
            SaveNews::Sealed { slot, copy } => {
                self.found(slot, Found::Sealed(copy));
                if copy.generation != self.saves.generation {
                    // Nobody leads that generation any more: what it saved cannot be committed.
                    return self.ask_launcher(SaveAsk::Free { slot });
                }
                NodeEvent::Sealed { slot, copy }
            }
            SaveNews::WorkerGone { k } => NodeEvent::WorkerGone { k },
            SaveNews::WorkerEnded { generation, .. } if generation != self.saves.generation => {
                return;
            }
            SaveNews::WorkerEnded { k, .. } => NodeEvent::WorkerEnded { k },
            SaveNews::Progress {
                slot,
                attempt,
                done,
            } => NodeEvent::Progress {
                slot,
                attempt,
                done,
            },
            SaveNews::Written {
                slot,
                attempt,
                bytes,
                summary,
            } => {
                self.saves.meter.written(attempt, bytes, ctx.now);
                NodeEvent::Written {
                    slot,
                    attempt,
                    bytes,
                    summary,
                }
            }
            SaveNews::WriteFailed { slot, attempt, why } => {
                NodeEvent::WriteFailed { slot, attempt, why }
            }
            SaveNews::WriteStopped { slot, attempt } => NodeEvent::WriteStopped { slot, attempt },
            SaveNews::Held { manifest } => NodeEvent::Held { manifest },
            SaveNews::HoldFailed { manifest, why } => NodeEvent::HoldFailed { manifest, why },
            SaveNews::Assembled {
                save,
                manifest,
                bytes,
            } => {
                return self.at_saves_leader(
                    ctx,
                    LeaderEvent::Assembled {
                        save,
                        manifest,
                        bytes,
                    },
                );
            }
            SaveNews::AssembleFailed { save, why } => {
                return self.at_saves_leader(ctx, LeaderEvent::AssembleFailed { save, why });
            }
            SaveNews::Keep(news) => return self.on_keep_news(ctx, news),
            SaveNews::Replicas(replicated) => {
                self.saves.replicated = Some(replicated);
                return;
            }
            SaveNews::At { .. }
            | SaveNews::Copied { .. }
            | SaveNews::Waits { .. }
            | SaveNews::Loaded { .. } => return self.on_ranks_news(ctx, news),
        };
        self.at_saves_node(ctx, event);
    }

    /// Notes the content of a slot, as the launcher here said last.
    fn found(&mut self, slot: SlotId, what: Found) {
        let known = self.saves.slots.get_mut(&slot.k);
        if let Some(found) = known.and_then(|(_, f)| f.get_mut(usize::from(slot.side))) {
            *found = what;
        }
    }

    pub(super) fn at_saves_node(&mut self, ctx: &mut Ctx<'_>, event: NodeEvent) {
        let generation = self.saves.generation;
        let mut nodes = self.saves.nodes.iter_mut();
        if let Some(node) = nodes.find(|n| n.generation() == generation) {
            // What comes late, about something that is over, is refused and changes nothing.
            let _late = node.handle(event, ctx.now);
        }
    }

    fn at_saves_leader(&mut self, ctx: &mut Ctx<'_>, event: LeaderEvent) {
        if let Some(leader) = &mut self.saves.leader {
            let _late = leader.handle(event, ctx.now);
        }
    }

    /// A step that every rank has sealed is saved.
    fn open_sealed(&mut self, ctx: &mut Ctx<'_>) {
        let lead = self.lead.as_ref();
        let planned = lead.and_then(|l| l.planned.as_ref()).map(Planned::cause);
        let ending = lead.is_some_and(|l| l.ending.is_some());
        let ending = ending.then_some(Cause::Preemption);
        let saving = lead.and_then(|l| l.saving.as_ref());
        let agreed = saving.and_then(|s| Some((s.step()?, s.cause)));
        let Some(leader) = self.saves.leader.as_mut() else {
            return;
        };
        let newer = leader.sealed().filter(|step| leader.opened() < Some(*step));
        if let Some(step) = newer
            && leader.under_way().is_none()
        {
            let agreed = agreed.filter(|(at, _)| *at == step).map(|(_, cause)| cause);
            let cause = planned.or(ending).or(agreed).unwrap_or(Cause::Steps);
            let until = ctx.now + SAVE;
            let wants = LeaderEvent::Save(Wants { step, cause, until });
            let _late = leader.handle(wants, ctx.now);
        }
    }

    /// Whether the decision on the next generation waits for a save that every rank has sealed: after
    /// it nothing of this generation can be committed any more. Where all have `finished`, agents that were started anew
    /// may not have said yet that they have.
    pub(super) fn awaits_save(&mut self, ctx: &mut Ctx<'_>, finished: bool) -> bool {
        if self.gives_saves_up() {
            return false;
        }
        self.open_sealed(ctx);
        let leader = self.saves.leader.as_ref();
        let under_way = leader.and_then(Leader::under_way);
        // A rank that may leave saves out need not hold it.
        let busy = self.live().map(|h| h.record.spec.triggers.busy);
        let unsaid =
            finished && busy == Some(Busy::Wait) && leader.is_some_and(Leader::may_be_whole);
        if under_way.is_none() && !unsaid {
            self.saves.awaited = None;
            return false;
        }
        let since = *self.saves.awaited.get_or_insert(ctx.now);
        let until = match under_way {
            Some((_, until)) => until.min(since + PATIENCE),
            None => since + UNSAID,
        };
        let waits = ctx.now < until;
        if waits {
            self.wake_at(until, "a save that every rank has sealed");
            self.drive_saves(ctx);
        }
        waits
    }

    pub(super) fn on_save(&mut self, ctx: &mut Ctx<'_>, from: NodeId, message: ToNode) {
        let head = self.live();
        let led = |h: &&super::Head| {
            h.digest == message.save.generation && h.record.leader() == Some(from)
        };
        if head.filter(led).is_none() {
            return;
        }
        let save = message.save;
        let committed = matches!(message.stage, Stage::Over(SaveOutcome::Committed));
        if committed && self.saves.committed != Some(save) {
            self.saves.committed = Some(save);
            self.lost.forget_reasons();
            let Save {
                generation, step, ..
            } = save;
            self.tell_launcher(ToLauncher::Save(SaveAsk::Committed { generation, step }));
        }
        self.at_saves_node(ctx, NodeEvent::Leader(message));
    }

    pub(super) fn on_save_answer(&mut self, ctx: &mut Ctx<'_>, from: NodeId, message: ToLeader) {
        self.at_saves_leader(ctx, LeaderEvent::Message { from, message });
    }

    /// Workers of this generation were started here: perhaps others, after an attempt that failed.
    pub(super) fn start_again(&mut self, ctx: &mut Ctx<'_>, generation: Digest, attempt: u32) {
        let before = self.member.as_ref().and_then(|m| m.status.started);
        let again = before.is_some_and(|before| before < attempt);
        if again && generation == self.saves.generation {
            self.at_saves_node(ctx, NodeEvent::WorkersAnew);
        }
    }

    /// The launcher here is connected, perhaps again. Of its slots it says by itself.
    pub(super) fn saves_launcher_back(&mut self, ctx: &mut Ctx<'_>) {
        self.at_saves_leader(ctx, LeaderEvent::LauncherBack);
    }

    /// The launcher here is gone: nobody fills its slots any more.
    pub(super) fn slots_orphaned(&mut self, now: Time) {
        self.saves.slots.clear();
        self.saves.replicated = None;
        for node in &mut self.saves.nodes {
            let _known = node.handle(NodeEvent::LauncherGone, now);
        }
    }

    pub(super) fn save_committed(&mut self, ctx: &mut Ctx<'_>, manifest: Digest) {
        self.commit_is_over(manifest);
        if let Some(leader) = &mut self.saves.leader {
            let _late = leader.handle(LeaderEvent::Committed { manifest }, ctx.now);
        }
    }

    pub(super) fn save_refused(&mut self, ctx: &mut Ctx<'_>, manifest: Digest, why: &Outcome) {
        self.commit_is_over(manifest);
        let why = match why {
            Outcome::Overtaken { by } => {
                format!("a newer generation was decided in slot {by} of the log")
            }
            Outcome::Invalid(why) => why.to_string(),
            Outcome::Won { .. } => return,
        };
        if let Some(leader) = &mut self.saves.leader {
            let event = LeaderEvent::NotCommitted { manifest, why };
            let _late = leader.handle(event, ctx.now);
        }
    }

    fn commit_is_over(&mut self, manifest: Digest) {
        if self.saves.commit.is_some_and(|(_, m)| m == manifest) {
            self.saves.commit = None;
        }
    }

    /// The cores follow the head; what they want is done.
    pub(super) fn drive_saves(&mut self, ctx: &mut Ctx<'_>) {
        self.follow_head(ctx);
        let now = ctx.now;
        let lost: Vec<NodeId> = match (&self.saves.leader, self.live()) {
            (Some(leader), Some(head)) if leader.under_way().is_some() => {
                let members = head.record.members.iter().map(|m| m.node);
                let status = |n| self.lead.as_ref()?.status(n);
                // With a launcher whoever writes is gone.
                let gone = |n| status(n).is_some_and(|s| s.gone);
                let lost = |n: &NodeId| ctx.peers.lost(*n).is_some() || gone(*n);
                members.filter(lost).collect()
            }
            _ => Vec::new(),
        };
        if let Some(leader) = &mut self.saves.leader {
            for node in lost {
                let _known = leader.handle(LeaderEvent::NodeLost { node }, now);
            }
            leader.handle_timeout(now);
        }
        for node in &mut self.saves.nodes {
            node.handle_timeout(now);
        }
        self.open_sealed(ctx);
        self.ask_for_commit(ctx);
        self.drive_keeping(ctx);
        self.drive_second_looks(ctx);
        self.saving_effects(ctx);
        let generation = self.saves.generation;
        let nodes = &mut self.saves.nodes;
        nodes.retain(|n| n.generation() == generation || !n.is_empty());
        let nodes = self.saves.nodes.iter().map(Node::poll_timeout);
        let leader = self.saves.leader.as_ref().and_then(Leader::poll_timeout);
        let all: Vec<_> = nodes.chain([leader]).flatten().collect();
        for (at, why) in all {
            self.wake_at(at, why);
        }
    }

    /// Makes the cores of the generation that trains, and ends those of the one before.
    fn follow_head(&mut self, ctx: &mut Ctx<'_>) {
        let head = self.live().map(|h| (h.digest, h.record.clone()));
        let generation = head.as_ref().map_or(Digest::ZERO, |(digest, _)| *digest);
        if generation == self.saves.generation {
            return;
        }
        for node in &mut self.saves.nodes {
            let _known = node.handle(NodeEvent::Ended, ctx.now);
        }
        if let Some(leader) = &mut self.saves.leader {
            let _known = leader.handle(LeaderEvent::Ended, ctx.now);
        }
        // What they still have to say is said before they go.
        self.saving_effects(ctx);
        self.saves.generation = generation;
        self.saves.leader = None;
        self.saves.commit = None;
        self.saves.meter.begins();
        self.saves.verified_said = Time::ZERO;
        if let Some((digest, record)) = head {
            self.triggers_begin(ctx, &record);
            self.begin_saves(ctx, digest, &record);
        }
    }

    fn begin_saves(&mut self, ctx: &Ctx<'_>, digest: Digest, record: &Record) {
        let me = ctx.me();
        let place = record.members.iter().position(|m| m.node == me);
        if let (Some(index), Some((first, ranks))) = (place, record.ranks_of(me)) {
            let settings = Settings {
                index: u32::try_from(index).unwrap_or(u32::MAX),
                first,
                ranks,
                busy: record.spec.triggers.busy,
                budget: self.saves.budget,
                lease: ctx.cfg.slot_lease,
                flaws: Flaws::default(),
            };
            let state = self.durable.saves.node.clone();
            let mut node = Node::new(digest, settings, state);
            // The launcher's slots are this generation's from now on, and what those before left in them
            // can be committed no more.
            for (k, (capacity, mut found)) in self.saves.slots.clone() {
                for (side, what) in (0..).zip(&mut found) {
                    if let Found::Sealed(copy) = *what
                        && copy.generation != digest
                    {
                        *what = Found::Free;
                        if record.restore.map(|commit| commit.step) < Some(copy.step) {
                            let step = copy.step;
                            let text = format!(
                                "what was sealed of step {step} was not committed before the generation ended"
                            );
                            self.say_saving(text);
                        }
                        let slot = SlotId { k, side };
                        self.ask_launcher(SaveAsk::Free { slot });
                    }
                }
                let event = NodeEvent::Slots { k, capacity, found };
                let _known = node.handle(event, ctx.now);
            }
            if !self.saves.slots.is_empty() {
                self.saves.nodes.clear();
            }
            self.saves.nodes.push(node);
        }
        if record.leader() == Some(me) {
            let shared = matches!(record.arbiter, Arbiter::Store(_));
            let state = self.durable.saves.leader;
            let until = ctx.now + RESUMED;
            let flaws = Flaws::default();
            self.saves.leader = Some(Leader::new(record, shared, state, until, flaws, ctx.now));
        }
    }

    /// A commit that could not be asked for yet, or whose write failed, is asked for as soon as it can be.
    fn ask_for_commit(&mut self, ctx: &mut Ctx<'_>) {
        let Some((save, manifest)) = self.saves.commit else {
            return;
        };
        let here = save.generation == self.head_digest();
        if here && !self.commits(&manifest) && !self.commit(ctx, save.step, manifest) {
            self.wake_at(
                ctx.now + super::REPEAT,
                "a commit that cannot be asked for yet",
            );
        }
    }

    /// Carries out what can be done here, and passes the rest on to the driver.
    fn saving_effects(&mut self, ctx: &mut Ctx<'_>) {
        for at in 0..self.saves.nodes.len() {
            while let Some((generation, effect)) = self
                .saves
                .nodes
                .get_mut(at)
                .and_then(|n| Some((n.generation(), n.poll_effect()?)))
            {
                self.node_effect(ctx, generation, effect);
            }
        }
        while let Some(effect) = self.saves.leader.as_mut().and_then(Leader::poll_effect) {
            self.leader_effect(ctx, effect);
        }
        while let Some(effect) = self.saves.keeper.poll_effect() {
            self.keeper_effect(ctx, effect);
        }
    }

    pub(super) fn ask_launcher(&mut self, ask: SaveAsk) {
        if let SaveAsk::Free { slot } = ask {
            self.found(slot, Found::Free);
        }
        self.tell_launcher(ToLauncher::Save(ask));
    }

    pub(super) fn say_saving(&mut self, text: String) {
        let key = self.key.clone();
        self.notice(Notice::Saving { key, text });
    }

    /// And on the console of the launcher here.
    pub(super) fn tell_saving(&mut self, text: String) {
        self.ask_launcher(SaveAsk::Tell {
            text: short(text.clone()),
        });
        self.say_saving(text);
    }

    /// How what is sealed here gets into the memory of other nodes; none without a launcher that brings it there.
    pub fn replicated(&self) -> Option<Replicated> {
        self.saves.replicated
    }

    /// Bytes of the slots here.
    pub fn slot_memory(&self) -> u64 {
        let slots = self.saves.slots.values();
        let both = slots.map(|(capacity, _)| capacity.saturating_mul(2));
        both.fold(0, u64::saturating_add)
    }

    #[cfg(test)]
    pub(crate) fn slot_budget(&self) -> u64 {
        self.saves.budget
    }

    /// Sets the node's memory for the slots of this job, with those that it has.
    pub(crate) fn set_slot_budget(&mut self, now: Time, bytes: u64) {
        self.saves.budget = bytes;
        for node in &mut self.saves.nodes {
            let _known = node.handle(NodeEvent::Budget { bytes }, now);
        }
    }

    fn node_effect(&mut self, ctx: &mut Ctx<'_>, generation: Digest, effect: NodeEffect) {
        match effect {
            NodeEffect::Persist(state) => {
                let files = state.prepared.iter().flat_map(|(_, files)| files);
                let bytes: usize = files.map(|f| f.summary.len() + 16).sum();
                if generation == self.head_digest() && bytes <= MAX_STORED {
                    self.durable.saves.node = state;
                    self.persist(ctx);
                }
            }
            NodeEffect::Send(message) => {
                let led = self.live().filter(|h| h.digest == generation);
                if let Some(leader) = led.and_then(|h| h.record.leader()) {
                    self.send(ctx, leader, JobMessage::SaveAnswer(Box::new(message)));
                }
            }
            NodeEffect::Notice(notice @ NodeNotice::Busy { .. }) => {
                let text = match self.saves.meter.writes_since() {
                    Some(since) => format!("{notice}; writing began {} ago", ctx.now.since(since)),
                    None => notice.to_string(),
                };
                self.tell_saving(text);
            }
            NodeEffect::Notice(notice @ NodeNotice::Failed { .. }) => {
                self.tell_failed(generation, notice.to_string());
            }
            NodeEffect::Notice(notice) => self.tell_saving(notice.to_string()),
            // A worker takes a free slot by itself.
            NodeEffect::Fill { .. } => {}
            NodeEffect::Skip { k, step } => self.ask_launcher(SaveAsk::Skip { k, step }),
            NodeEffect::Write { slot, save, .. } => {
                self.saves.meter.writes(save.attempt, ctx.now);
                self.ask_launcher(SaveAsk::Write { slot, save });
            }
            NodeEffect::StopWrite { slot, attempt } => {
                self.ask_launcher(SaveAsk::StopWrite { slot, attempt });
            }
            NodeEffect::Free { slot } => self.ask_launcher(SaveAsk::Free { slot }),
            NodeEffect::Refuse { k } => {
                self.saves.slots.remove(&k);
                self.ask_launcher(SaveAsk::Refuse { k });
            }
            NodeEffect::Hold { manifest, bytes } => {
                self.ask_launcher(SaveAsk::Hold { manifest, bytes });
            }
        }
    }

    fn leader_effect(&mut self, ctx: &mut Ctx<'_>, effect: LeaderEffect) {
        match effect {
            LeaderEffect::Persist(state) => {
                if state.save.generation == self.head_digest() {
                    self.durable.saves.leader = state;
                    self.persist(ctx);
                }
            }
            LeaderEffect::Send { to, message } => self.send(ctx, to, JobMessage::Save(message)),
            LeaderEffect::Assemble { save, files } => {
                self.saves.triggers.prepared(ctx.now);
                for ask in SaveAsk::assemble(save, &files) {
                    self.ask_launcher(ask);
                }
            }
            LeaderEffect::Commit { save, manifest } => {
                self.saves.commit = Some((save, manifest));
                self.ask_for_commit(ctx);
            }
            LeaderEffect::Notice(notice) => {
                self.saves.triggers.told(&notice, ctx.now);
                let nodes = self.saves.leader.as_ref().map(|l| l.nodes().to_vec());
                if let (LeaderNotice::GivenUp { save, why }, Some(nodes)) = (&notice, nodes) {
                    self.tell_given_up(ctx, &nodes, *save, why);
                }
                self.say_saving(notice.to_string());
            }
        }
    }
}

#[cfg(test)]
mod tests;
