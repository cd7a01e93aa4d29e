//! Which checkpoints of this job are kept: the [`Keeper`](crate::checkpoint::Keeper), fed with the log's
//! entries by every agent, and driven by the leader's. That one asks its launcher what the store holds
//! and what should go, whenever the log has said something new about checkpoints; RETIRE and REJECT go
//! into the log, and only once they were read there is anything deleted, by name.
//!
//! An agent that leads no more asks for nothing more; what it has asked for stays right, for a RETIRE is never
//! taken back, and a generation that is fenced stays so.

use std::collections::BTreeSet;

use super::{Ctx, Job};
use crate::agent::ConnId;
use crate::checkpoint::{Decision, Item, KeeperEffect, KeeperEvent, State};
use crate::ids::Digest;
use crate::local::{KeepNews, Left, MAX_KEPT, Review, SaveAsk};
use crate::record::{Arbiter, CommitRef};
use crate::storelog::{Body, Entry, Outcome, Rules, Snapshot};
use crate::time::{Span, Time};

/// How long a store that could not be looked at is left alone.
const AGAIN: Span = Span::from_secs(30);

/// The most names of one decision; what is left over is seen at the next one.
const MAX_LEFT: usize = 64 * MAX_KEPT;

/// State of the questions about checkpoints from the leader's agent to its launcher.
#[derive(Clone, Debug, Default)]
pub(super) struct Keeping {
    round: u32,
    /// The launcher's connection that the last question went to, until it is answered.
    asked: Option<ConnId>,
    /// Something has changed since the last question.
    wanted: bool,
    /// When to ask again after a failure.
    again: Option<Time>,
    /// A decision, as it arrives.
    arriving: (Vec<u64>, Vec<Left>),
    /// Retired checkpoints of which nothing is left in the store.
    gone: BTreeSet<u64>,
    /// The last message about a decision that was not carried out.
    refused: String,
    /// Where the launcher here has its store.
    place: Option<String>,
    /// The log was read to its end once: what comes now is news.
    caught_up: bool,
    /// Checkpoints of which people know that they cannot be read.
    unreadable: BTreeSet<u64>,
    rules: Told,
}

/// The rules that the job goes by: whoever leads keeps the log's up to date.
#[derive(Clone, Debug, Default)]
struct Told {
    /// The rules that the launcher here was started with.
    here: Option<Rules>,
    /// The newest in the log.
    logged: Option<Rules>,
    /// The generation in which this agent has asked the log to take them.
    asked: Digest,
}

impl Job {
    /// Where the store of this job's checkpoints is, as the launcher here named it.
    pub fn store_place(&self) -> Option<&str> {
        self.saves.keeping.place.as_deref()
    }

    /// The newest commit of this step by the present generation, or the one that it follows, and its slot
    /// in the log.
    pub fn committed(&self, step: u64) -> Option<(u64, CommitRef)> {
        let head = self.head.as_ref();
        let of = [head.map(|h| h.digest), head.map(|h| h.record.parent)];
        let all = self.saves.keeper.standings().map(|s| (s.seq, s.commit));
        all.filter(|(_, c)| c.step == step && of.contains(&Some(c.generation)))
            .last()
    }

    /// Whether what the ranks save is committed in the job's log: they have slots here, and it has a store.
    pub fn commits_saves(&self) -> bool {
        let by_store = |h: &super::Head| matches!(h.record.arbiter, Arbiter::Store(_));
        self.live().is_some_and(by_store) && self.saves.has_slots()
    }

    /// Slots of the log whose checkpoints this agent knows to be good. Only the leader's has looked.
    pub fn verified(&self) -> Vec<u64> {
        self.saves.keeper.verified().collect()
    }

    /// A valid entry of the log was read.
    pub(super) fn keep(&mut self, entry: &Entry) {
        let seq = entry.seq;
        let keeper = &mut self.saves.keeper;
        self.saves.keeping.wanted = true;
        match &entry.body {
            Body::Claim(record) => keeper.handle(KeeperEvent::Claimed {
                generation: record.digest(),
                restore: record.restore,
            }),
            Body::Commit(commit) => {
                let (generation, commit) = (commit.generation, *commit);
                keeper.handle(KeeperEvent::Committed { seq, commit });
                // All its ranks have sealed a state of their own: none reads what it began from.
                keeper.handle(KeeperEvent::Loaded { generation });
            }
            Body::Retire { seq, .. } => keeper.handle(KeeperEvent::Retired { seq: *seq }),
            Body::Reject { seq, reason } => {
                keeper.handle(KeeperEvent::Rejected { seq: *seq });
                self.tell_reject(*seq, reason);
            }
            Body::Pin { seq } => keeper.handle(KeeperEvent::Pinned { seq: *seq }),
            Body::Rules(rules) => self.saves.keeping.rules.logged = Some(rules.clone()),
            Body::Unpin { seq } => keeper.handle(KeeperEvent::Unpinned { seq: *seq }),
            Body::Snapshot(snapshot) => {
                keeper.forget(snapshot);
                let known: BTreeSet<u64> = keeper.standings().map(|s| s.seq).collect();
                self.saves.keeping.gone.retain(|seq| known.contains(seq));
                self.saves
                    .keeping
                    .unreadable
                    .retain(|seq| known.contains(seq));
            }
        }
    }

    /// Reading began at this snapshot.
    pub(super) fn keep_from(&mut self, snapshot: &Snapshot) {
        self.saves.keeper.begin(snapshot);
        self.saves.keeping.wanted = true;
        if snapshot.rules.is_some() {
            self.saves.keeping.rules.logged.clone_from(&snapshot.rules);
        }
    }

    /// Tells people of a REJECT in the log's own words, on each node, whichever node found it or wrote it.
    /// One that stood there when this agent began to read is no news.
    fn tell_reject(&mut self, seq: u64, reason: &str) {
        let mut all = self.saves.keeper.standings();
        let of = all.find(|s| s.seq == seq).map(|s| s.commit.step);
        drop(all);
        if let Some(step) = of.filter(|_| self.saves.keeping.caught_up) {
            self.tell_saving(format!(
                "the checkpoint of step {step} is rejected: {reason}"
            ));
        }
    }

    /// Tells people once of a checkpoint that stays because it cannot be read; whether it is news.
    fn tell_unreadable(&mut self, seq: u64, step: u64, state: &State) -> bool {
        let known = &mut self.saves.keeping.unreadable;
        let State::Unreadable { why } = state else {
            known.remove(&seq);
            return false;
        };
        let news = known.insert(seq);
        if news {
            self.tell_saving(format!(
                "the checkpoint of step {step} cannot be read, and stays: {why}"
            ));
        }
        news
    }

    /// The log was read to its end.
    pub(super) fn keeping_caught_up(&mut self) {
        self.saves.keeping.caught_up = true;
    }

    /// The knowledge of the checkpoints has changed.
    pub(super) fn look_at_store_again(&mut self) {
        self.saves.keeping.wanted = true;
    }

    pub(super) fn keeper_appended(&mut self, id: u64, outcome: &Outcome) {
        let Some(seq) = self.saves.appends.remove(&id) else {
            return;
        };
        if !matches!(outcome, Outcome::Won { .. }) {
            self.saves.keeper.handle(KeeperEvent::NotAppended { seq });
        }
    }

    /// Asks the launcher here, where this agent leads and something has changed.
    pub(super) fn drive_keeping(&mut self, ctx: &mut Ctx<'_>) {
        let leads = self.saves.leader.is_some();
        let conn = self.conn();
        let read = self.log_is_read();
        let keeping = &mut self.saves.keeping;
        if !leads {
            // Whoever leads next, and be it this agent, asks anew.
            keeping.asked = None;
            keeping.wanted = true;
            return;
        }
        if keeping.asked.is_some() && keeping.asked != conn {
            // The launcher lost its link, and the answer with it.
            keeping.asked = None;
            keeping.wanted = true;
        }
        let due = keeping.again.is_none_or(|at| ctx.now >= at);
        if let Some(at) = keeping.again.filter(|_| !due) {
            return self.wake_at(at, "look at the store's checkpoints again");
        }
        if keeping.again.take().is_some() {
            keeping.wanted = true;
        }
        if !keeping.wanted || keeping.asked.is_some() || conn.is_none() || !read {
            return;
        }
        let Some(generation) = self.saves.keeper.newest() else {
            return;
        };
        self.log_rules(ctx);
        let keeping = &mut self.saves.keeping;
        keeping.wanted = false;
        keeping.asked = conn;
        keeping.round = keeping.round.wrapping_add(1);
        keeping.arriving = Default::default();
        let (round, gone) = (keeping.round, &keeping.gone);
        let commits = self.saves.keeper.standings();
        let commits: Vec<_> = commits.filter(|s| !gone.contains(&s.seq)).collect();
        for review in Review::all(round, generation, &commits) {
            self.ask_launcher(SaveAsk::Review(review));
        }
    }

    /// A later pruner of the store goes by these: so they are in the log before anything is retired by them.
    fn log_rules(&mut self, ctx: &Ctx<'_>) {
        let generation = self.head_digest();
        let rules = &mut self.saves.keeping.rules;
        let known = rules.logged == rules.here || rules.asked == generation;
        if known || self.saves.keeper.standings().next().is_none() {
            return;
        }
        rules.asked = generation;
        if let Some(here) = rules.here.clone() {
            // Whatever becomes of it: the next generation's leader looks again.
            let _unanswered = self.append(ctx, Body::Rules(here));
        }
    }

    /// Handles what the launcher here has found in the store.
    pub(super) fn on_keep_news(&mut self, ctx: &mut Ctx<'_>, news: KeepNews) {
        let round = self.saves.keeping.round;
        match news {
            KeepNews::Place { store } => self.saves.keeping.place = Some(store),
            KeepNews::Rules(rules) => self.saves.keeping.rules.here = Some(rules),
            KeepNews::Looked {
                round: of,
                seq,
                needs,
                state,
                gone,
            } if of == round => {
                let keeper = &mut self.saves.keeper;
                let known = keeper.standings().find(|s| s.seq == seq);
                let Some(standing) = known else { return };
                if gone && standing.retired {
                    self.saves.keeping.gone.insert(seq);
                }
                keeper.handle(KeeperEvent::Needs { seq, names: needs });
                self.tell_unreadable(seq, standing.commit.step, &state);
                match state {
                    State::Damaged { why } => self.launcher_doubts(ctx, seq, why),
                    // A glance never makes a checkpoint less than it is known to be.
                    State::Unchecked if standing.verified => {}
                    state => {
                        let event = KeeperEvent::Checked { seq, state };
                        self.saves.keeper.handle(event);
                    }
                }
            }
            KeepNews::Decided {
                round: of,
                retire,
                left,
                last,
            } if of == round => {
                let (all, names) = &mut self.saves.keeping.arriving;
                if names.len().max(all.len()) < MAX_LEFT {
                    all.extend(retire);
                    names.extend(left);
                }
                if last {
                    self.saves.keeping.asked = None;
                    self.decide_keeping();
                }
            }
            KeepNews::Failed { round: of, why } if of == round => {
                self.saves.keeping.asked = None;
                self.saves.keeping.again = Some(ctx.now + AGAIN);
                let text = format!("the store's checkpoints cannot be looked at: {why}");
                self.say_refused(text);
            }
            KeepNews::Checked {
                seq,
                manifest,
                state,
            } => {
                let keeper = &mut self.saves.keeper;
                let known = keeper.standings().find(|s| s.seq == seq);
                if known.is_none_or(|s| s.commit.manifest != manifest) {
                    return;
                }
                let step = known.map_or(0, |s| s.commit.step);
                let again = !self.tell_unreadable(seq, step, &state);
                match state {
                    State::Damaged { why } => self.launcher_doubts(ctx, seq, why),
                    state => {
                        let unread = matches!(state, State::Unreadable { .. });
                        let event = KeeperEvent::Checked { seq, state };
                        self.saves.keeper.handle(event);
                        // What still cannot be read is tried again when there is more to look at.
                        if unread && again {
                            return;
                        }
                    }
                }
                self.look_at_store_again();
            }
            KeepNews::LookedAgain { number, state } => self.looked_again(ctx, number, state),
            KeepNews::LooksAgain { number, read } => self.looks_again(ctx, number, read),
            // An answer to an earlier question.
            _ => {}
        }
    }

    /// Passes on what the launcher thinks should go. Anything else left behind may belong to an
    /// attempt that can still be committed: it stays until a later generation is claimed.
    fn decide_keeping(&mut self) {
        let (mut retire, left) = std::mem::take(&mut self.saves.keeping.arriving);
        // What is on its way into the log was not there when the launcher was asked.
        retire.retain(|seq| !self.saves.appends.values().any(|of| of == seq));
        let keeper = &mut self.saves.keeper;
        let retired: BTreeSet<u64> = (keeper.standings().filter(|s| s.retired))
            .map(|s| s.seq)
            .collect();
        retire.retain(|seq| !retired.contains(seq));
        let item = |left: Left| Item {
            generation: keeper
                .generation_of(left.generation)
                .unwrap_or(Digest::ZERO),
            name: left.name,
        };
        let items = left.into_iter().map(item);
        let delete = items
            .filter(|item| keeper.may_delete(item).is_ok())
            .collect();
        keeper.handle(KeeperEvent::Decided(Decision { retire, delete }));
    }

    pub(super) fn keeper_effect(&mut self, ctx: &mut Ctx<'_>, effect: KeeperEffect) {
        match effect {
            KeeperEffect::Append(body) => {
                let (Body::Retire { seq, .. } | Body::Reject { seq, .. }) = body else {
                    return;
                };
                match self.append(ctx, body) {
                    Some(id) => drop(self.saves.appends.insert(id, seq)),
                    None => self.saves.keeper.handle(KeeperEvent::NotAppended { seq }),
                }
            }
            KeeperEffect::Delete { name } => self.ask_launcher(SaveAsk::Delete { name }),
            KeeperEffect::Refused { what, why } => {
                self.say_refused(format!("not done: {what}: {why}"));
            }
        }
    }

    /// The same is said once.
    fn say_refused(&mut self, text: String) {
        if self.saves.keeping.refused != text {
            self.saves.keeping.refused.clone_from(&text);
            self.say_saving(text);
        }
    }
}
