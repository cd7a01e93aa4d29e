//! The second look: before a checkpoint is rejected, which nobody can take back, it is read whole once more, on
//! another node where there is one. A disk that lies, bad memory, a stale view of a shared directory or a
//! mount that is gone concern one node, and are no reason to take a good checkpoint from all.
//!
//! Found damaged again, it is rejected. Found whole, it stays, and who found it damaged is said to have a bad
//! view: where that kept its ranks from loading it, the node is left out for a while, as for any fault of a
//! node, and after a few of these in a row its launcher ends. Where nobody can tell, it stays, and the
//! rank has failed like any other.
//!
//! A rank that says itself that it is its node which cannot read the checkpoint (an error of the disk, another
//! store than the job's) doubts nothing: another node only tries what that one could not read.
//!
//! The node that is asked looks first at what was named, and says how far it is each time that it is asked
//! again: a look takes as long as the checkpoint is large, and only one that stands still is given up.

use std::collections::{BTreeMap, BTreeSet};

use super::{Ctx, Job, REPEAT};
use crate::checkpoint::{KeeperEvent, State};
use crate::ids::{Digest, LauncherId, NodeId};
use crate::local::{Damaged, Question, SaveAsk};
use crate::record::{CommitRef, Record};
use crate::time::{Span, Time};
use crate::wire::JobMessage;

/// A node that has read nothing more of a checkpoint for this time is asked no longer. Its launcher tries a store
/// that does not answer for a minute.
const LATE: Span = Span::from_secs(600);

/// It is asked again meanwhile, and says how far it is: its launcher may have lost its link, and stops reading
/// what nobody asks for any more.
const AGAIN: Span = Span::from_secs(5);

/// Where nobody could tell, it is tried again after this time, if it is found damaged still; and at once in the
/// next generation, which may have other members.
const UNKNOWN: Span = Span::from_secs(3_600);

/// Checkpoints that were found damaged, and the result for each.
#[derive(Clone, Debug, Default)]
pub(super) struct SecondLooks {
    /// Of this generation everything below is, but `misreads` and `unfit`.
    generation: Digest,
    /// By the slot of its COMMIT.
    doubts: BTreeMap<u64, Doubt>,
    under_way: Option<Look>,
    /// By manifest.
    verdicts: BTreeMap<Digest, Verdict>,
    /// The read that this node was asked for.
    asked: Option<Asked>,
    /// How often each node had a bad view, in a row.
    pub(super) misreads: BTreeMap<NodeId, u32>,
    /// Launchers that were told to end for it, and in what words.
    pub(super) unfit: BTreeMap<NodeId, (LauncherId, String)>,
}

/// A checkpoint that somebody found damaged.
#[derive(Clone, Debug)]
struct Doubt {
    commit: CommitRef,
    why: String,
    /// The finder, for people.
    who: String,
    by: BTreeSet<NodeId>,
    /// These could not tell, and why.
    tried: BTreeMap<NodeId, String>,
    /// Somebody found it damaged: all of it is read. Else some nodes cannot read it, by their own words.
    all: bool,
    /// A rank could not load it: the next generation waits.
    urgent: bool,
    told: bool,
}

/// A question to a node.
#[derive(Clone, Debug)]
struct Look {
    seq: u64,
    judge: NodeId,
    number: u64,
    /// All of it is read.
    all: bool,
    /// How far it is, and since when.
    read: u64,
    moved: Time,
    said: Time,
}

/// A complaint of somebody about a checkpoint.
#[derive(Clone, Debug)]
struct Complaint {
    node: NodeId,
    /// For people.
    who: String,
    why: String,
    /// It is the node that cannot read it, by its own word.
    here: bool,
}

/// Result of a second look.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Damaged {
        why: String,
    },
    /// Or, if not `all` of it was read, as good as what a node could not read.
    Whole {
        by: NodeId,
        all: bool,
    },
    /// Nobody could tell; `urgent` where a generation waited for it. Until then nobody is asked again.
    Unknown {
        urgent: bool,
        until: Time,
    },
}

/// A question of another node.
#[derive(Clone, Debug)]
struct Asked {
    by: NodeId,
    number: u64,
    manifest: Digest,
    state: Option<State>,
}

impl Job {
    /// Result of a second look at a checkpoint in this generation.
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
        let complaints = self.complaints(record, &commit);
        let answers = |all: bool| all || complaints.iter().all(|(_, _, damaged)| damaged.here);
        match self.verdict(&commit).cloned() {
            Some(Verdict::Unknown { urgent: true, .. }) => return false,
            Some(Verdict::Whole { by, all }) if answers(all) => {
                self.misread(ctx, record, &commit, by);
                return false;
            }
            Some(Verdict::Damaged { why }) => self.confirm(seq, why),
            Some(Verdict::Unknown { .. } | Verdict::Whole { .. }) | None => {
                for (node, rank, damaged) in complaints {
                    let complaint = Complaint {
                        node,
                        who: format!("rank {rank} on {}", ctx.name(node)),
                        why: damaged.why,
                        here: damaged.here,
                    };
                    self.doubt((seq, commit), complaint, true);
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
            Some(Verdict::Whole { all: true, .. }) => {}
            Some(Verdict::Unknown { until, .. }) if ctx.now < until => {}
            Some(Verdict::Unknown { .. } | Verdict::Whole { .. }) | None => {
                let complaint = Complaint {
                    node: ctx.me(),
                    who: format!("the launcher of {}", ctx.name(ctx.me())),
                    why,
                    here: false,
                };
                self.doubt((seq, commit), complaint, false);
            }
        }
    }

    /// The members whose ranks could not load this, by their own words.
    pub(super) fn complaints(
        &self,
        record: &Record,
        commit: &CommitRef,
    ) -> Vec<(NodeId, u32, Damaged)> {
        let of = |node: NodeId| {
            let exit = self.status_of(node)?.exit.as_ref()?;
            let damaged = exit.damaged.as_ref()?;
            let same = damaged.manifest == commit.manifest;
            same.then(|| (node, exit.rank, damaged.clone()))
        };
        record.members.iter().filter_map(|m| of(m.node)).collect()
    }

    fn doubt(&mut self, (seq, commit): (u64, CommitRef), of: Complaint, urgent: bool) {
        self.looks_of_this_generation();
        let looks = &mut self.saves.looks;
        // It told nothing of this.
        looks.verdicts.remove(&commit.manifest);
        let doubt = looks.doubts.entry(seq).or_insert_with(|| Doubt {
            commit,
            why: of.why.clone(),
            who: of.who.clone(),
            by: BTreeSet::new(),
            tried: BTreeMap::new(),
            all: false,
            urgent,
            told: false,
        });
        doubt.urgent |= urgent;
        let news = doubt.by.insert(of.node);
        if of.here || (doubt.all && !news) {
            return;
        }
        if !doubt.all {
            // Who could not read it has not found it damaged; this one has.
            (doubt.all, doubt.told) = (true, false);
            (doubt.who, doubt.why) = (of.who, of.why);
            doubt.tried.clear();
            looks.under_way.take_if(|look| look.seq == seq && !look.all);
        }
        // Until that is known, it is none of those that are known to be good.
        let state = State::Unchecked;
        self.saves
            .keeper
            .handle(KeeperEvent::Checked { seq, state });
    }

    fn looks_of_this_generation(&mut self) {
        let generation = self.head_digest();
        let looks = &mut self.saves.looks;
        if looks.generation != generation {
            let misreads = std::mem::take(&mut looks.misreads);
            let unfit = std::mem::take(&mut looks.unfit);
            *looks = SecondLooks {
                generation,
                misreads,
                unfit,
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
            .map(|look| (look.judge, look.said, look.moved + LATE));
        if let Some((judge, said, late)) = known {
            let able = self.can_look(ctx, judge);
            if able && ctx.now < late {
                if ctx.now >= said + AGAIN {
                    self.ask_for_look(ctx);
                }
                self.wake_at(ctx.now + AGAIN, "a second look at a checkpoint");
                return true;
            }
            let why = match able {
                true => "it has read nothing more for ten minutes".to_owned(),
                false => "it cannot be reached any more, or has no launcher or no store".into(),
            };
            self.cannot_tell(seq, judge, why);
        }
        let Some(judge) = self.next_judge(ctx, record, seq) else {
            self.nobody_can_tell(ctx, record, seq);
            return false;
        };
        let doubt = self.saves.looks.doubts.get(&seq);
        self.saves.looks.under_way = Some(Look {
            seq,
            judge,
            number: ctx.rng.next_u64(),
            all: doubt.is_some_and(|d| d.all),
            read: 0,
            moved: ctx.now,
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
        let to = look.judge;
        let ask = JobMessage::LookAgain {
            digest: looks.generation,
            question: Question {
                number: look.number,
                manifest: doubt.commit.manifest,
                why: doubt.why.clone(),
                all: look.all,
            },
        };
        self.send(ctx, to, ask);
    }

    /// Whether a node has what it takes: a launcher with the store, and a link to here.
    fn can_look(&self, ctx: &Ctx<'_>, node: NodeId) -> bool {
        if node == ctx.me() {
            return self.conn().is_some() && !self.storeless.contains_key(&node);
        }
        let there = ctx.reachable(node) && ctx.peers.lost(node).is_none() && !ctx.peers.away(node);
        let gone = self.status_of(node).is_some_and(|s| s.gone);
        there && !gone && !self.storeless.contains_key(&node)
    }

    /// The node that reads it next: not one that found it damaged, where there is any other.
    fn next_judge(&self, ctx: &Ctx<'_>, record: &Record, seq: u64) -> Option<NodeId> {
        let doubt = self.saves.looks.doubts.get(&seq)?;
        let members = record.members.iter().map(|m| m.node);
        let all: Vec<NodeId> = (members.filter(|n| self.can_look(ctx, *n))).collect();
        let others = all.iter().filter(|n| !doubt.by.contains(n));
        let others: Vec<NodeId> = others.copied().collect();
        let able = if others.is_empty() { all } else { others };
        let free = able.into_iter().filter(|n| !doubt.tried.contains_key(n));
        // The launcher here, where it may: nothing has to travel.
        free.min_by_key(|n| *n != ctx.me())
    }

    fn cannot_tell(&mut self, seq: u64, judge: NodeId, why: String) {
        self.saves.looks.under_way = None;
        if let Some(doubt) = self.saves.looks.doubts.get_mut(&seq) {
            doubt.tried.insert(judge, why);
        }
    }

    fn tell_doubt(&mut self, ctx: &Ctx<'_>, record: &Record, seq: u64, judge: NodeId) {
        let Some(doubt) = self.saves.looks.doubts.get_mut(&seq) else {
            return;
        };
        if std::mem::replace(&mut doubt.told, true) {
            return;
        }
        let (who, step, why) = (&doubt.who, doubt.commit.step, &doubt.why);
        let judge = ctx.name(judge);
        let text = match doubt.all {
            true => format!(
                "{who} found the checkpoint of step {step} damaged: {why}; {judge} reads it whole before it is rejected"
            ),
            false => format!(
                "{who} cannot read the checkpoint of step {step}: {why}; {judge} tries whether it is that node alone"
            ),
        };
        self.tell_all(ctx, record, text);
    }

    fn nobody_can_tell(&mut self, ctx: &Ctx<'_>, record: &Record, seq: u64) {
        let looks = &mut self.saves.looks;
        looks.under_way = None;
        let Some(doubt) = looks.doubts.remove(&seq) else {
            return;
        };
        let (manifest, urgent) = (doubt.commit.manifest, doubt.urgent);
        let until = ctx.now + UNKNOWN;
        let verdict = Verdict::Unknown { urgent, until };
        looks.verdicts.insert(manifest, verdict);
        let reasons = doubt.tried.iter();
        let reasons: Vec<String> = reasons
            .map(|(node, why)| format!("{}: {why}", ctx.name(*node)))
            .collect();
        let found = match doubt.all {
            true => "found",
            false => "could not read it",
        };
        let text = format!(
            "the checkpoint of step {} is not rejected, for nobody else can tell whether it is damaged, as {} {found}: {}. {}",
            doubt.commit.step,
            doubt.who,
            doubt.why,
            match reasons.is_empty() {
                true => "There is nobody else to ask".to_owned(),
                false => format!("Of those who looked again, {}", reasons.join("; ")),
            }
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
        question: Question,
    ) {
        let (number, manifest) = (question.number, question.manifest);
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
        self.ask_launcher(SaveAsk::LookAgain(question));
    }

    /// The launcher here reads on.
    pub(super) fn looks_again(&mut self, ctx: &Ctx<'_>, number: u64, read: u64) {
        let looks = &self.saves.looks;
        let asked = looks.asked.as_ref().filter(|a| a.number == number);
        if let Some(to) = asked.map(|a| a.by) {
            let digest = looks.generation;
            let answer = JobMessage::LooksAgain {
                digest,
                number,
                read,
            };
            self.send(ctx, to, answer);
        }
    }

    /// The node that was asked reads on.
    pub(super) fn on_looks_again(
        &mut self,
        ctx: &Ctx<'_>,
        from: NodeId,
        digest: Digest,
        (number, read): (u64, u64),
    ) {
        let looks = &mut self.saves.looks;
        let same = looks.generation == digest;
        let look = looks.under_way.as_mut();
        let look = look.filter(|l| same && (l.judge, l.number) == (from, number));
        if let Some(look) = look.filter(|l| read > l.read) {
            (look.read, look.moved) = (read, ctx.now);
        }
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
        let looks = &self.saves.looks;
        let under_way = looks.under_way.as_ref();
        let of = under_way.filter(|l| (l.judge, l.number) == (from, number));
        let of = of.filter(|_| looks.generation == digest);
        let record = self.live().map(|h| h.record.clone());
        let (Some((seq, all)), Some(record)) = (of.map(|l| (l.seq, l.all)), record) else {
            return;
        };
        let by = from;
        let verdict = match state {
            State::Damaged { why } if all => Verdict::Damaged { why },
            // The first who finds it so: the other one could not read it.
            State::Damaged { why } => return self.judge_doubts(ctx, seq, (from, why)),
            State::Verified => Verdict::Whole { by, all },
            // What another node could not read.
            State::Unchecked if !all => Verdict::Whole { by, all },
            State::Unchecked => return self.cannot_tell(seq, from, "it did not read it".into()),
            State::Unreadable { why } => return self.cannot_tell(seq, from, why),
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
            Verdict::Whole { by, all } => {
                if all {
                    let state = State::Verified;
                    let event = KeeperEvent::Checked { seq, state };
                    self.saves.keeper.handle(event);
                }
                let text = bad_view(ctx, &doubt, by);
                self.tell_all(ctx, &record, text);
            }
            Verdict::Unknown { .. } => {}
        }
    }

    /// The node that was to read what another could not has found it damaged.
    fn judge_doubts(&mut self, ctx: &Ctx<'_>, seq: u64, (node, why): (NodeId, String)) {
        let known = self.saves.looks.doubts.get(&seq);
        if let Some((commit, urgent)) = known.map(|doubt| (doubt.commit, doubt.urgent)) {
            let complaint = Complaint {
                node,
                who: format!("the launcher of {}", ctx.name(node)),
                why,
                here: false,
            };
            self.doubt((seq, commit), complaint, urgent);
        }
    }
}

/// For everybody's people, the node's own among them.
fn bad_view(ctx: &Ctx<'_>, doubt: &Doubt, by: NodeId) -> String {
    let nodes: Vec<NodeId> = doubt.by.iter().copied().collect();
    let (names, step) = (ctx.names(&nodes), doubt.commit.step);
    let (who, why) = (&doubt.who, &doubt.why);
    let check = "check the memory there, the mount of the store and the disk of --checkpoint-cache";
    if !doubt.all {
        let reader = match doubt.by.contains(&by) {
            true => "its launcher".to_owned(),
            false => ctx.name(by),
        };
        return format!(
            "the checkpoint of step {step} stays: {reader} can read what {who} cannot ({why}). The view of it on \
             {names} is bad: {check}"
        );
    }
    let reader = match doubt.by.contains(&by) {
        true => "read once more it is whole".to_owned(),
        false => format!("{} has read it whole", ctx.name(by)),
    };
    format!(
        "the checkpoint of step {step} stays: {reader}, and {who} found it damaged ({why}). The view of it on {names} \
         is bad: {check}"
    )
}
