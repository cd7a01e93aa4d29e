//! Saves of this job: the cores of [`checkpoint`](crate::checkpoint), joined with generations, the log
//! and the disk. A node's core lives as long as its slots hold something; the leader's, as long as its
//! generation is the newest one known here.

use std::collections::BTreeMap;

use super::{Ctx, Job};
use crate::agent::{Effect, Notice};
use crate::checkpoint::{
    Busy, Flaws, Keeper, KeeperEffect, KeeperEvent, Leader, LeaderEffect, LeaderEvent, Node,
    NodeEffect, NodeEvent, Save, Settings, ToLeader, ToNode, Written,
};
use crate::ids::{Digest, NodeId};
use crate::record::{Arbiter, Record};
use crate::storelog::{Body, Entry, Outcome};
use crate::time::{Span, Time};
use crate::wire::JobMessage;

/// How long a save may go on that was open when the agent was restarted.
const RESUMED: Span = Span::from_secs(60);

/// How long sealed copies live on when nobody leads them, and the budget of a node, until the driver says.
const LEASE: Span = Span::from_secs(600);

/// The most bytes that are stored about files that are durable. Without them they are written again
/// after a restart, no more.
const MAX_STORED: usize = 16 * 1024;

/// What the driver tells about slots, files and saves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SavingEvent {
    /// About a generation's slots. `NodeEvent::Leader` and `NodeEvent::Ended` are not the driver's.
    Node {
        generation: Digest,
        event: NodeEvent,
    },
    /// `Save`, `Assembled` and `AssembleFailed` are the driver's.
    Leader {
        generation: Digest,
        event: LeaderEvent,
    },
    /// `Needs`, `Checked`, `Loaded` and `Decided` are the driver's.
    Keeper(KeeperEvent),
    /// From now on, for generations that begin.
    Settings {
        busy: Busy,
        budget: u64,
        lease: Span,
    },
}

/// What the driver is to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SavingEffect {
    /// Never `Persist`, `Send` or `Notice`.
    Node {
        generation: Digest,
        effect: NodeEffect,
    },
    /// Make the manifest of these files, and make it durable.
    Assemble { save: Save, files: Vec<Written> },
    /// A folder or a manifest in the job's store.
    Delete { name: String },
}

#[derive(Debug)]
pub(super) struct Saves {
    /// The newest generation's, and those before it whose slots hold something.
    nodes: Vec<Node>,
    leader: Option<Leader>,
    /// The generation that these were made for.
    generation: Digest,
    keeper: Keeper,
    /// Appends of the keeper, and the commits that they are about.
    appends: BTreeMap<u64, u64>,
    /// A commit whose outcome is not known.
    commit: Option<(Save, Digest)>,
    settings: (Busy, u64, Span),
}

impl Default for Saves {
    fn default() -> Saves {
        Saves {
            nodes: Vec::new(),
            leader: None,
            generation: Digest::ZERO,
            keeper: Keeper::new(Flaws::default()),
            appends: BTreeMap::new(),
            commit: None,
            settings: (Busy::Wait, u64::MAX, LEASE),
        }
    }
}

impl Job {
    /// The saves of the generation that this agent leads: how far they are, and for whom they wait.
    pub fn saves(&self) -> Option<&Leader> {
        self.saves.leader.as_ref()
    }

    pub(crate) fn on_saving(&mut self, ctx: &mut Ctx<'_>, event: SavingEvent) {
        // What comes late, for a generation that is over, is refused and changes nothing.
        match event {
            SavingEvent::Node { generation, event } => {
                let mut nodes = self.saves.nodes.iter_mut();
                if let Some(node) = nodes.find(|n| n.generation() == generation) {
                    let _late = node.handle(event, ctx.now);
                }
            }
            SavingEvent::Leader { generation, event } => {
                let leader = self.saves.leader.as_mut();
                if let Some(leader) = leader.filter(|l| l.generation() == generation) {
                    let _late = leader.handle(event, ctx.now);
                }
            }
            SavingEvent::Keeper(event) => self.saves.keeper.handle(event),
            SavingEvent::Settings {
                busy,
                budget,
                lease,
            } => self.saves.settings = (busy, budget, lease),
        }
        self.drive_saves(ctx);
    }

    pub(super) fn on_save(&mut self, ctx: &mut Ctx<'_>, from: NodeId, message: ToNode) {
        let head = self.live();
        let led = |h: &&super::Head| {
            h.digest == message.save.generation && h.record.leader() == Some(from)
        };
        if head.filter(led).is_none() {
            return;
        }
        let generation = message.save.generation;
        let event = NodeEvent::Leader(message);
        self.on_saving(ctx, SavingEvent::Node { generation, event });
    }

    pub(super) fn on_save_answer(&mut self, ctx: &mut Ctx<'_>, from: NodeId, message: ToLeader) {
        let generation = message.generation;
        let event = LeaderEvent::Message { from, message };
        self.on_saving(ctx, SavingEvent::Leader { generation, event });
    }

    /// The launcher here is gone: nobody fills its slots any more.
    pub(super) fn slots_orphaned(&mut self, now: Time) {
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

    /// A valid entry of the log was read.
    pub(super) fn keep(&mut self, entry: &Entry) {
        let seq = entry.seq;
        let event = match &entry.body {
            Body::Claim(record) => KeeperEvent::Claimed {
                generation: record.digest(),
                restore: record.restore,
            },
            Body::Commit(commit) => KeeperEvent::Committed {
                seq,
                commit: *commit,
            },
            Body::Retire { seq } => KeeperEvent::Retired { seq: *seq },
            Body::Reject { seq, .. } => KeeperEvent::Rejected { seq: *seq },
            Body::Pin { seq } => KeeperEvent::Pinned { seq: *seq },
        };
        self.saves.keeper.handle(event);
    }

    pub(super) fn keeper_appended(&mut self, id: u64, outcome: &Outcome) {
        let Some(seq) = self.saves.appends.remove(&id) else {
            return;
        };
        if !matches!(outcome, Outcome::Won { .. }) {
            self.saves.keeper.handle(KeeperEvent::NotAppended { seq });
        }
    }

    /// The cores follow the head; what they want is done.
    pub(super) fn drive_saves(&mut self, ctx: &mut Ctx<'_>) {
        self.follow_head(ctx);
        let now = ctx.now;
        let lost: Vec<NodeId> = match (&self.saves.leader, self.live()) {
            (Some(leader), Some(head)) if leader.under_way().is_some() => {
                let members = head.record.members.iter().map(|m| m.node);
                members.filter(|n| ctx.peers.lost(*n).is_some()).collect()
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
        self.ask_for_commit(ctx);
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
        if let Some((digest, record)) = head {
            self.begin_saves(ctx, digest, &record);
        }
    }

    fn begin_saves(&mut self, ctx: &Ctx<'_>, digest: Digest, record: &Record) {
        let me = ctx.me();
        let (busy, budget, lease) = self.saves.settings;
        let place = record.members.iter().position(|m| m.node == me);
        if let (Some(index), Some((first, ranks))) = (place, record.ranks_of(me)) {
            let settings = Settings {
                index: u32::try_from(index).unwrap_or(u32::MAX),
                first,
                ranks,
                busy,
                budget,
                lease,
                flaws: Flaws::default(),
            };
            let state = self.durable.saves.node.clone();
            self.saves.nodes.push(Node::new(digest, settings, state));
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

    fn saving(&mut self, effect: SavingEffect) {
        let key = self.key.clone();
        self.effects.push_back(Effect::Saving { key, effect });
    }

    fn say_saving(&mut self, text: String) {
        let key = self.key.clone();
        self.notice(Notice::Saving { key, text });
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
            NodeEffect::Notice(notice) => self.say_saving(notice.to_string()),
            effect => self.saving(SavingEffect::Node { generation, effect }),
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
                self.saving(SavingEffect::Assemble { save, files });
            }
            LeaderEffect::Commit { save, manifest } => {
                self.saves.commit = Some((save, manifest));
                self.ask_for_commit(ctx);
            }
            LeaderEffect::Notice(notice) => self.say_saving(notice.to_string()),
        }
    }

    fn keeper_effect(&mut self, ctx: &mut Ctx<'_>, effect: KeeperEffect) {
        match effect {
            KeeperEffect::Append(body) => {
                let (Body::Retire { seq } | Body::Reject { seq, .. }) = body else {
                    return;
                };
                match self.append(ctx, body) {
                    Some(id) => drop(self.saves.appends.insert(id, seq)),
                    None => self.saves.keeper.handle(KeeperEvent::NotAppended { seq }),
                }
            }
            KeeperEffect::Delete { name } => self.saving(SavingEffect::Delete { name }),
            KeeperEffect::Refused { what, why } => {
                self.say_saving(format!("not done: {what}: {why}"));
            }
        }
    }
}
