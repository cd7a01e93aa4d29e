//! The second look: before a checkpoint is rejected, which nobody can take back, it is read whole once more, on
//! another node where there is one. A disk that lies, bad memory, a stale view of a shared directory or a
//! mount that is gone concern one node, and are no reason to take a good checkpoint from all.
//!
//! Found damaged again, it is rejected. Found whole, it stays, and who found it damaged is said to have a bad
//! view: where that kept its ranks from loading it, the node is left out for a while, as for any fault of a
//! node, and after [`MISREADS`] of these in a row its launcher ends. Where nobody can tell, it stays, and the
//! rank has failed like any other.

use std::collections::{BTreeMap, BTreeSet};

use super::{Ctx, Job, REPEAT};
use crate::checkpoint::{KeeperEvent, State};
use crate::ids::{Digest, NodeId};
use crate::local::{SaveAsk, short};
use crate::record::{CommitRef, Record};
use crate::time::{Span, Time};
use crate::wire::JobMessage;

/// A node that has not read a checkpoint within this time is asked no longer.
const LATE: Span = Span::from_secs(1_800);

/// It is asked again meanwhile: its launcher may have lost its link.
const AGAIN: Span = Span::from_secs(5);

/// So often a node may find damaged what others find whole. A generation that all its ranks have loaded ends
/// the row.
const MISREADS: u32 = 3;

/// The exit code of a launcher whose node cannot read the job's checkpoints.
const UNFIT: i32 = 1;

/// What was found damaged, and what became of it.
#[derive(Debug, Default)]
pub(super) struct SecondLooks {
    /// Of this generation everything below is, but `misreads`.
    generation: Digest,
    /// By the slot of its COMMIT.
    doubts: BTreeMap<u64, Doubt>,
    under_way: Option<Look>,
    /// By manifest.
    verdicts: BTreeMap<Digest, Verdict>,
    /// What this node was asked to read.
    asked: Option<Asked>,
    /// How often each node had a bad view, in a row.
    misreads: BTreeMap<NodeId, u32>,
}

/// A checkpoint that somebody found damaged.
#[derive(Debug)]
struct Doubt {
    commit: CommitRef,
    why: String,
    /// Who found it so, for people.
    who: String,
    by: BTreeSet<NodeId>,
    /// These could not tell.
    tried: BTreeSet<NodeId>,
    /// A rank could not load it: the next generation waits.
    urgent: bool,
    told: bool,
}

/// A question to a node.
#[derive(Debug)]
struct Look {
    seq: u64,
    judge: NodeId,
    number: u64,
    since: Time,
    said: Time,
}

/// What a second look told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Damaged {
        why: String,
    },
    Whole {
        by: NodeId,
    },
    /// Nobody could tell; `urgent` where a generation waited for it.
    Unknown {
        urgent: bool,
    },
}

/// A question of another node.
#[derive(Debug)]
struct Asked {
    by: NodeId,
    number: u64,
    manifest: Digest,
    state: Option<State>,
}

impl Job {
    /// What a second look has told of a checkpoint in this generation.
    pub(super) fn verdict(&self, commit: &CommitRef) -> Option<&Verdict> {
        let looks = &self.saves.looks;
        let known = looks.verdicts.get(&commit.manifest);
        known.filter(|_| looks.generation == self.head_digest())
    }

    /// A rank could not load what its generation began with. True while it is not known whether that is to
    /// be rejected, or it is not rejected yet: a decision would restore it again.
    pub(super) fn awaits_verdict(
        &mut self,
        ctx: &mut Ctx<'_>,
        record: &Record,
        commit: CommitRef,
        seq: u64,
    ) -> bool {
        match self.verdict(&commit).cloned() {
            Some(Verdict::Unknown { urgent: true }) => return false,
            Some(Verdict::Whole { by }) => {
                self.misread(ctx, record, &commit, by);
                return false;
            }
            Some(Verdict::Damaged { why }) => self.confirm(seq, why),
            Some(Verdict::Unknown { urgent: false }) | None => {
                for (node, rank, why) in self.complaints(record, &commit) {
                    let who = format!("rank {rank} on {}", ctx.name(node));
                    self.doubt((seq, commit), (node, who, why), true);
                }
            }
        }
        self.wake_at(ctx.now + REPEAT, "a checkpoint that may be damaged");
        true
    }

    /// The leader's launcher found one damaged.
    pub(super) fn launcher_doubts(&mut self, ctx: &Ctx<'_>, seq: u64, why: String) {
        let mut all = self.saves.keeper.standings();
        let standing = all.find(|s| s.seq == seq && !s.rejected && !s.retired);
        drop(all);
        let Some(commit) = standing.map(|s| s.commit) else {
            return;
        };
        match self.verdict(&commit).cloned() {
            // It asks once, and again where that came to nothing.
            Some(Verdict::Damaged { why }) => self.confirm(seq, why),
            Some(Verdict::Whole { .. } | Verdict::Unknown { .. }) => {}
            None => {
                let who = format!("the launcher of {}", ctx.name(ctx.me()));
                self.doubt((seq, commit), (ctx.me(), who, why), false);
            }
        }
    }

    /// The members whose ranks could not load this, by their own words.
    fn complaints(&self, record: &Record, commit: &CommitRef) -> Vec<(NodeId, u32, String)> {
        let of = |node: NodeId| {
            let exit = self.status_of(node)?.exit.as_ref()?;
            let damaged = exit.damaged.as_ref()?;
            let same = damaged.manifest == commit.manifest;
            same.then(|| (node, exit.rank, damaged.why.clone()))
        };
        record.members.iter().filter_map(|m| of(m.node)).collect()
    }

    fn doubt(
        &mut self,
        (seq, commit): (u64, CommitRef),
        (node, who, why): (NodeId, String, String),
        urgent: bool,
    ) {
        self.looks_of_this_generation();
        let doubts = &mut self.saves.looks.doubts;
        let doubt = doubts.entry(seq).or_insert_with(|| Doubt {
            commit,
            why,
            who,
            by: BTreeSet::new(),
            tried: BTreeSet::new(),
            urgent,
            told: false,
        });
        doubt.urgent |= urgent;
        if doubt.by.insert(node) {
            // Until that is known, it is none of those that are known to be good.
            let state = State::Unchecked;
            self.saves
                .keeper
                .handle(KeeperEvent::Checked { seq, state });
        }
    }

    fn looks_of_this_generation(&mut self) {
        let generation = self.head_digest();
        let looks = &mut self.saves.looks;
        if looks.generation != generation {
            let misreads = std::mem::take(&mut looks.misreads);
            *looks = SecondLooks {
                generation,
                misreads,
                ..SecondLooks::default()
            };
        }
    }

    fn confirm(&mut self, seq: u64, why: String) {
        let state = State::Damaged { why };
        self.saves
            .keeper
            .handle(KeeperEvent::Checked { seq, state });
    }

    // ---- asking ----

    /// Has what is in doubt read, one after the other, first what a generation waits for.
    pub(super) fn drive_second_looks(&mut self, ctx: &mut Ctx<'_>) {
        self.looks_of_this_generation();
        let record = self.live().map(|h| h.record.clone());
        let leads = self.lead.is_some();
        let looks = &mut self.saves.looks;
        let Some(record) = record.filter(|_| leads && !looks.doubts.is_empty()) else {
            looks.doubts.clear();
            looks.under_way = None;
            return;
        };
        // Somebody may have rejected it meanwhile.
        let keeper = &self.saves.keeper;
        let over: BTreeSet<u64> = (keeper.standings().filter(|s| s.rejected || s.retired))
            .map(|s| s.seq)
            .collect();
        looks.doubts.retain(|seq, _| !over.contains(seq));
        while let Some(seq) = self.most_urgent() {
            if self.drive_look(ctx, &record, seq) {
                return;
            }
        }
        self.saves.looks.under_way = None;
    }

    fn most_urgent(&self) -> Option<u64> {
        let doubts = &self.saves.looks.doubts;
        let urgent = doubts.iter().find(|(_, d)| d.urgent);
        urgent.or(doubts.iter().next()).map(|(seq, _)| *seq)
    }

    /// True while somebody reads it.
    fn drive_look(&mut self, ctx: &mut Ctx<'_>, record: &Record, seq: u64) -> bool {
        let under_way = self.saves.looks.under_way.as_ref();
        let known = under_way
            .filter(|look| look.seq == seq)
            .map(|look| (look.judge, look.said, look.since + LATE));
        if let Some((judge, said, late)) = known {
            if ctx.now < late && self.can_look(ctx, judge) {
                if ctx.now >= said + AGAIN {
                    self.ask_for_look(ctx);
                }
                self.wake_at(ctx.now + AGAIN, "a second look at a checkpoint");
                return true;
            }
            self.cannot_tell(seq, judge);
        }
        let Some(judge) = self.next_judge(ctx, record, seq) else {
            self.nobody_can_tell(ctx, record, seq);
            return false;
        };
        self.saves.looks.under_way = Some(Look {
            seq,
            judge,
            number: ctx.rng.next_u64(),
            since: ctx.now,
            said: ctx.now,
        });
        self.ask_for_look(ctx);
        self.tell_doubt(ctx, record, seq, judge);
        self.wake_at(ctx.now + AGAIN, "a second look at a checkpoint");
        true
    }

    fn ask_for_look(&mut self, ctx: &Ctx<'_>) {
        let looks = &mut self.saves.looks;
        let Some(look) = &mut looks.under_way else {
            return;
        };
        let Some(doubt) = looks.doubts.get(&look.seq) else {
            return;
        };
        look.said = ctx.now;
        let (to, number) = (look.judge, look.number);
        let manifest = doubt.commit.manifest;
        let digest = looks.generation;
        let ask = JobMessage::LookAgain {
            digest,
            number,
            manifest,
        };
        self.send(ctx, to, ask);
    }

    /// Whether a node has what it takes: a launcher with the store, and a link to here.
    fn can_look(&self, ctx: &Ctx<'_>, node: NodeId) -> bool {
        if node == ctx.me() {
            return self.conn().is_some() && !self.storeless.contains(&node);
        }
        let there = ctx.reachable(node) && ctx.peers.lost(node).is_none() && !ctx.peers.away(node);
        let gone = self.status_of(node).is_some_and(|s| s.gone);
        there && !gone && !self.storeless.contains(&node)
    }

    /// Who reads it next: not who found it damaged, where there is anybody else.
    fn next_judge(&self, ctx: &Ctx<'_>, record: &Record, seq: u64) -> Option<NodeId> {
        let doubt = self.saves.looks.doubts.get(&seq)?;
        let members = record.members.iter().map(|m| m.node);
        let all: Vec<NodeId> = (members.filter(|n| self.can_look(ctx, *n))).collect();
        let others = all.iter().filter(|n| !doubt.by.contains(n));
        let others: Vec<NodeId> = others.copied().collect();
        let able = if others.is_empty() { all } else { others };
        let free = able.into_iter().filter(|n| !doubt.tried.contains(n));
        // The launcher here, where it may: nothing has to travel.
        free.min_by_key(|n| *n != ctx.me())
    }

    fn cannot_tell(&mut self, seq: u64, judge: NodeId) {
        self.saves.looks.under_way = None;
        if let Some(doubt) = self.saves.looks.doubts.get_mut(&seq) {
            doubt.tried.insert(judge);
        }
    }

    fn tell_doubt(&mut self, ctx: &Ctx<'_>, record: &Record, seq: u64, judge: NodeId) {
        let Some(doubt) = self.saves.looks.doubts.get_mut(&seq) else {
            return;
        };
        if std::mem::replace(&mut doubt.told, true) {
            return;
        }
        let text = format!(
            "{} found the checkpoint of step {} damaged: {}; {} reads it whole before it is rejected",
            doubt.who,
            doubt.commit.step,
            doubt.why,
            ctx.name(judge)
        );
        self.tell_all(ctx, record, text);
    }

    fn nobody_can_tell(&mut self, ctx: &Ctx<'_>, record: &Record, seq: u64) {
        let looks = &mut self.saves.looks;
        looks.under_way = None;
        let Some(doubt) = looks.doubts.remove(&seq) else {
            return;
        };
        let (manifest, urgent) = (doubt.commit.manifest, doubt.urgent);
        looks.verdicts.insert(manifest, Verdict::Unknown { urgent });
        let text = format!(
            "the checkpoint of step {} is not rejected, for nobody else can tell whether it is damaged, as {} found: {}",
            doubt.commit.step, doubt.who, doubt.why
        );
        self.tell_all(ctx, record, text);
    }

    // ---- answering ----

    /// The leader wants a checkpoint read whole, by the launcher here.
    pub(super) fn on_look_again(
        &mut self,
        ctx: &Ctx<'_>,
        from: NodeId,
        digest: Digest,
        (number, manifest): (u64, Digest),
    ) {
        let of = self.live().filter(|h| h.digest == digest);
        if !of.is_some_and(|h| h.record.has(from)) {
            return;
        }
        self.looks_of_this_generation();
        let known = self.saves.looks.asked.as_ref();
        let known = known.filter(|a| (a.by, a.number, a.manifest) == (from, number, manifest));
        if let Some(state) = known.and_then(|a| a.state.clone()) {
            let answer = JobMessage::LookedAgain {
                digest,
                number,
                state,
            };
            return self.send(ctx, from, answer);
        }
        self.saves.looks.asked = Some(Asked {
            by: from,
            number,
            manifest,
            state: None,
        });
        self.ask_launcher(SaveAsk::LookAgain { number, manifest });
    }

    /// The launcher here has read one.
    pub(super) fn looked_again(&mut self, ctx: &Ctx<'_>, number: u64, state: State) {
        let looks = &mut self.saves.looks;
        let digest = looks.generation;
        let asked = looks.asked.as_mut().filter(|a| a.number == number);
        let Some(asked) = asked else { return };
        asked.state = Some(state.clone());
        let to = asked.by;
        let answer = JobMessage::LookedAgain {
            digest,
            number,
            state,
        };
        self.send(ctx, to, answer);
    }

    pub(super) fn on_looked_again(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        digest: Digest,
        (number, state): (u64, State),
    ) {
        let looks = &mut self.saves.looks;
        let under_way = looks.under_way.as_ref();
        let of = under_way.filter(|l| (l.judge, l.number) == (from, number));
        let seq = of.filter(|_| looks.generation == digest).map(|l| l.seq);
        let record = self.live().map(|h| h.record.clone());
        let (Some(seq), Some(record)) = (seq, record) else {
            return;
        };
        let verdict = match state {
            State::Damaged { why } => Verdict::Damaged { why },
            State::Verified => Verdict::Whole { by: from },
            State::Unchecked | State::Unreadable { .. } => return self.cannot_tell(seq, from),
        };
        self.saves.looks.under_way = None;
        let Some(doubt) = self.saves.looks.doubts.remove(&seq) else {
            return;
        };
        let manifest = doubt.commit.manifest;
        self.saves.looks.verdicts.insert(manifest, verdict.clone());
        self.look_at_store_again();
        match verdict {
            Verdict::Damaged { why } => self.confirm(seq, why),
            Verdict::Whole { by } => {
                let state = State::Verified;
                self.saves
                    .keeper
                    .handle(KeeperEvent::Checked { seq, state });
                let text = bad_view(ctx, &doubt, by);
                self.tell_all(ctx, &record, text);
            }
            Verdict::Unknown { .. } => {}
        }
    }

    // ---- nodes with a bad view ----

    /// The ranks of these could not load what others find whole: a fault of their nodes.
    fn misread(&mut self, ctx: &mut Ctx<'_>, record: &Record, commit: &CommitRef, by: NodeId) {
        let digest = self.head_digest();
        for (node, rank, why) in self.complaints(record, commit) {
            let fresh = self.lead.as_mut().is_some_and(|l| l.misread.insert(node));
            if !fresh {
                continue;
            }
            self.strike(ctx, node);
            let row = 1 + self.misreads_of(node);
            if row >= MISREADS {
                let text = short(format!(
                    "this node is of no use to the job: for the {row}th time in a row its ranks cannot read a \
                     checkpoint that is whole. Rank {rank} found that of step {} damaged ({why}), and {} has \
                     read all of it. Check this node's memory, its mount of the store and the disk of its \
                     --checkpoint-cache",
                    commit.step,
                    ctx.name(by)
                ));
                self.send(ctx, node, JobMessage::Unfit { digest, text });
            }
        }
    }

    fn misreads_of(&self, node: NodeId) -> u32 {
        let known = self.saves.looks.misreads.get(&node);
        known.copied().unwrap_or_default()
    }

    /// Members whose ranks could not load what others find whole, where that is why the generation ends.
    pub(super) fn misread_by(&self) -> Vec<NodeId> {
        let of = |l: &super::lead::Lead| l.misread.iter().copied().collect();
        self.lead.as_ref().map(of).unwrap_or_default()
    }

    /// A generation follows one that ended so. Everybody counts, for anybody may come to lead.
    pub(super) fn count_misreads(&mut self, ctx: &Ctx<'_>, nodes: &[NodeId]) {
        for node in nodes {
            let row = self.saves.looks.misreads.entry(*node).or_default();
            *row = row.saturating_add(1);
            if self.parked_ms(ctx, *node).is_none() {
                self.strike(ctx, *node);
            }
        }
    }

    /// All ranks of this generation have loaded what it begins with.
    pub(super) fn members_read(&mut self, record: &Record) {
        let misreads = &mut self.saves.looks.misreads;
        misreads.retain(|node, _| !record.has(*node));
    }

    /// By the leader's word, which counts: this node's launcher ends.
    pub(super) fn on_unfit(&mut self, ctx: &Ctx<'_>, from: NodeId, digest: Digest, text: String) {
        let head = self.live().filter(|h| h.digest == digest);
        if head.is_some_and(|h| self.acting_leader(ctx, &h.record) == Some(from)) {
            self.dismiss(UNFIT, text);
        }
    }
}

/// For everybody's people, the node's own among them.
fn bad_view(ctx: &Ctx<'_>, doubt: &Doubt, by: NodeId) -> String {
    let nodes: Vec<NodeId> = doubt.by.iter().copied().collect();
    let (names, step) = (ctx.names(&nodes), doubt.commit.step);
    let reader = match doubt.by.contains(&by) {
        true => "read once more it is whole".to_owned(),
        false => format!("{} has read it whole", ctx.name(by)),
    };
    format!(
        "the checkpoint of step {step} stays: {reader}, and {} found it damaged ({}). The view of it on {names} is \
         bad: check the memory there, the mount of the store and the disk of --checkpoint-cache",
        doubt.who, doubt.why
    )
}
