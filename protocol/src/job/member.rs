//! This node's part in the present generation: the launcher, the orders of the leader, the status
//! told to it, and the lease without which no worker runs (R16, R17, R18).

use std::collections::BTreeMap;

use super::plan::STOP_LIMIT;
use super::{Ctx, Job, REPEAT, SETTLED_REPEAT};
use crate::agent::{ConnId, Notice};
use crate::barrier;
use crate::ids::{Boot, Digest, NodeId, StoreUuid};
use crate::local::{Register, Start, ToAgent, ToLauncher};
use crate::record::Kind;
use crate::time::{Span, Time};
use crate::wire::{Leave, Order, Status};

/// A launcher that is connected and answers nothing for so long, or for twice `suspect_after`, is stopped or blocked.
/// The others look for rank 0's for longer before they give up.
const UNRESPONSIVE: Span = Span::from_secs(4);

/// The launcher of this job on this node.
#[derive(Clone, Debug)]
pub(super) struct Local {
    /// Its connection; none while the launcher reconnects or is dead.
    pub(super) conn: Option<ConnId>,
    /// The newest connection, open or not.
    pub(super) was: ConnId,
    /// By when it must have ended its workers; of several orders the earliest holds.
    pub(super) ends: Option<Time>,
    /// The same as it was just told, before it is counted from now.
    pub(super) ends_within: Option<Span>,
    /// The connection has closed, and since when nothing is heard at its guard either.
    pub(super) silent_since: Option<Time>,
    /// When it was last told that this agent is there.
    welcomed: Time,
    /// When it was first told so of those times that it has not answered.
    unanswered: Option<Time>,
    /// It has not answered for so long that it is stopped or blocked: what people are told of it.
    pub(super) unresponsive: Option<String>,
    pub(super) reg: Register,
    /// When it came here, and first to some run of its agent.
    pub(super) since: Time,
    pub(super) waits_since: Time,
    pub(super) store: Option<StoreUuid>,
    pub(super) master_port: u16,
    /// The generation whose workers it was last told to start.
    pub(super) running: Option<Digest>,
    /// None of those run any more: it has said so since, or came with none.
    pub(super) ended: bool,
    pub(super) leave: Option<(Leave, Time)>,
    pub(super) cancel: bool,
    /// Its workers that are to end, and have not yet: it joins no other generation before.
    pub(super) stopping: Option<Stopping>,
    /// It was told to exit, by this frame.
    pub(super) over: Option<ToLauncher>,
}

/// Workers that were told to end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stopping {
    pub(super) digest: Digest,
    /// If they have not ended by then they may never.
    limit: Time,
    /// They have no grace, nor are they waited for.
    pub(super) at_once: bool,
}

impl Local {
    /// A frame to it ends its workers, or begins others.
    pub(super) fn told(&mut self, frame: &ToLauncher) {
        let grace = match frame {
            ToLauncher::Start(_) => {
                // Those of the generation before end first: a launcher that is stopped does not end them.
                if self.stopping.is_none() {
                    (self.ends, self.ends_within) = (None, None);
                }
                return;
            }
            ToLauncher::Stop { grace_ms, .. } | ToLauncher::Preempt { grace_ms, .. } => *grace_ms,
            ToLauncher::End { .. } | ToLauncher::Refused { .. } => self.reg.spec.stop_grace_ms,
            _ => return,
        };
        let grace = Span::from_millis(grace.into());
        self.ends_within = Some(self.ends_within.map_or(grace, |g| g.min(grace)));
    }
}

/// This node's part in the head's generation.
#[derive(Clone, Debug)]
pub(super) struct Mine {
    pub(super) status: Status,
    pub(super) said: Option<(NodeId, Time)>,
    pub(super) changed: bool,
    /// The leader has what was said last, and nothing to tell in return.
    pub(super) settled: bool,
    /// All members are told, for it has lost its lease or its launcher in this generation.
    pub(super) tells_all: bool,
    pub(super) last_order: Option<(NodeId, Order)>,
    /// When each voter's newest acknowledged heartbeat was sent.
    pub(super) acks: BTreeMap<NodeId, Time>,
    /// When the newest heartbeat was sent that each voter refused.
    pub(super) refusals: BTreeMap<NodeId, Time>,
    /// Until when voters whose agents are away have been counted as if they had acknowledged one.
    pub(super) stand_behind: BTreeMap<NodeId, Time>,
    /// When the store's tail was last seen to be ours, by the time of asking.
    pub(super) tail_seen: Time,
    /// The newest attempt whose start went to the launcher.
    pub(super) attempt: u32,
    /// A start that waits for the lease.
    pub(super) pending: Option<Start>,
    pub(super) barrier: barrier::Node,
    /// Since when its workers are stopped.
    pub(super) paused: Option<Time>,
    /// The node that asked where the ranks here stand.
    pub(super) looks: Option<NodeId>,
    /// When workers were adopted from the agent's last run, whose lease nobody remembers.
    pub(super) adopted: Time,
    /// When the newest heartbeat was sent that voters confirmed who vote no more.
    pub(super) confirmed_before: Time,
    /// Why the lease was lost.
    pub(super) why_lost: String,
}

impl Mine {
    pub(super) fn new(digest: Digest, boot: Boot) -> Mine {
        Mine {
            status: Status {
                digest,
                boot,
                ..Status::default()
            },
            said: None,
            changed: true,
            settled: false,
            tells_all: false,
            last_order: None,
            acks: BTreeMap::new(),
            refusals: BTreeMap::new(),
            stand_behind: BTreeMap::new(),
            tail_seen: Time::ZERO,
            attempt: 0,
            pending: None,
            barrier: barrier::Node::new(digest),
            paused: None,
            looks: None,
            adopted: Time::ZERO,
            confirmed_before: Time::ZERO,
            why_lost: String::new(),
        }
    }

    /// Whether workers may run by what this node knows of itself.
    pub(super) fn trains(&self) -> bool {
        (self.attempt > 0 || self.status.started.is_some()) && !self.status.stopped
    }

    /// Whether this voter has acknowledged a heartbeat that was sent after `since`.
    pub(super) fn acknowledged(&self, voter: NodeId, since: Time) -> bool {
        self.acks.get(&voter).is_some_and(|sent| *sent > since)
    }

    /// The time until the status is said again, if nothing in it changes.
    pub(super) fn repeat(&self) -> Span {
        match self.settled {
            true => SETTLED_REPEAT,
            false => REPEAT,
        }
    }
}

impl Job {
    /// A launcher registered, anew or again.
    pub(crate) fn register(
        &mut self,
        ctx: &mut Ctx<'_>,
        conn: ConnId,
        reg: Register,
    ) -> Result<(), String> {
        if let Some(local) = &self.local
            && local.reg.launcher != reg.launcher
            && local.conn.is_some()
        {
            let first = |pid: u32| {
                format!(
                    "job {} already has a launcher on this node (pid {pid}): stop it first, or give \
                     this one its own agent with --instance",
                    self.key
                )
            };
            let trains = self.member.as_ref().is_some_and(Mine::trains);
            if local.over.is_some() && local.stopping.is_none() && !trains {
                // It has nothing left to do but to exit, which its guard says a moment later.
                self.launcher_died(ctx);
            } else if !self.is_missed(ctx, reg.launcher) {
                return Err(first(local.reg.pid));
            } else {
                // The one that came later has waited for this one to be gone, and it is back.
                let reason = first(reg.pid);
                self.part(ToLauncher::Refused { reason });
            }
        }
        self.forget_ctrl_c(Some(reg.launcher));
        let running = reg.running;
        let newest = reg.began.as_ref().map(|b| b.digest);
        let (store, gate) = (reg.store, reg.gate);
        self.continue_for(ctx, reg.launcher);
        self.storeless.remove(&ctx.me());
        let same = self
            .local
            .as_ref()
            .is_some_and(|l| l.reg.launcher == reg.launcher);
        if same {
            if let Some(local) = &mut self.local {
                local.conn = Some(conn);
                local.was = conn;
                // What it still runs is told to stop again.
                local.stopping = None;
                local.silent_since = None;
                local.welcomed = ctx.now;
                (local.unanswered, local.unresponsive) = (None, None);
                // It may not have heard the newest words: one that stood still reads nothing of the link before.
                let lineage = local.reg.lineage;
                local.reg = reg;
                self.set_life(lineage);
                let text = self.applicant.told.text.clone();
                if !text.is_empty() {
                    self.tell_launcher(ToLauncher::Waiting { text });
                }
            }
        } else {
            // This one has not been told what the one before waited for.
            self.applicant.told.clear();
            self.local = Some(Local {
                conn: Some(conn),
                was: conn,
                ends: None,
                ends_within: None,
                silent_since: None,
                welcomed: ctx.now,
                unanswered: None,
                unresponsive: None,
                since: ctx.now,
                waits_since: ctx.now - Span::from_millis(reg.waited_ms.into()),
                reg,
                store,
                master_port: 0,
                running,
                leave: None,
                cancel: false,
                stopping: None,
                ended: running.is_none(),
                over: None,
            });
        }
        if let Some(uuid) = store {
            self.open_store(ctx, uuid);
        }
        self.adopt(ctx, running);
        self.saves_launcher_back(ctx);
        let held_in = running.or(newest.filter(|_| gate.is_some()));
        if let Some(digest) = held_in.filter(|d| *d == self.head_digest()) {
            self.at_barrier(ctx, barrier::NodeEvent::Launcher { digest, held: gate });
        }
        if let Some(frame) = self.local.as_ref().and_then(|l| l.over.clone()) {
            self.tell_launcher(frame);
        }
        Ok(())
    }

    /// Tells the launcher that this agent is there and answers for it. It is told again and again, for
    /// an agent that is stopped or hangs keeps its connections: the launcher ends its workers by itself
    /// when it has not heard this for most of `agent_grace`.
    pub(crate) fn welcome(ctx: &Ctx<'_>) -> ToLauncher {
        ToLauncher::Welcome {
            node: ctx.cfg.node,
            agent_pid: ctx.cfg.pid,
            agent_grace_ms: u32::try_from(ctx.cfg.agent_grace.as_millis()).unwrap_or(u32::MAX),
            lease_ms: u32::try_from(ctx.cfg.lease().as_millis()).unwrap_or(u32::MAX),
        }
    }

    pub(super) fn drive_welcome(&mut self, ctx: &Ctx<'_>) {
        let Some(local) = self.local.as_mut().filter(|l| l.conn.is_some()) else {
            return;
        };
        let every = REPEAT.min(Span(ctx.cfg.agent_grace.0 / 8));
        let again = ctx.now >= local.welcomed + every;
        if again {
            // While this agent was stopped itself, it could not hear answers.
            let stood_still = ctx.now >= local.welcomed + every.times(2);
            local.unanswered.take_if(|_| stood_still);
            local.unanswered.get_or_insert(ctx.now);
            local.welcomed = ctx.now;
        }
        let due = local.welcomed + every;
        if again {
            self.tell_launcher(Self::welcome(ctx));
        }
        self.wake_at(due, "tell the launcher that this agent is there");
        self.miss_answers(ctx);
    }

    /// Notes that the launcher here is connected and does not answer.
    fn miss_answers(&mut self, ctx: &Ctx<'_>) {
        let patience = UNRESPONSIVE.max(ctx.cfg.suspect_after.times(2));
        let late = |at: Time| ctx.now >= at + patience;
        let Some(local) = self.local.as_mut().filter(|l| l.conn.is_some()) else {
            return;
        };
        if local.unresponsive.is_some() || !local.unanswered.is_some_and(late) {
            return;
        }
        // It reads the store that grants them their lease, and the others may have gone on without this node.
        let mine = self.member.as_ref();
        let workers = match mine.is_some_and(|m| m.trains() && !m.status.lease_lost) {
            true => "Workers that run go on",
            false => "Workers that still run end with their lease",
        };
        let text = format!(
            "the launcher here (process {0}) does not answer: it is stopped (Ctrl-Z; `kill -CONT {0}` lets it go on) or \
             blocked. {workers}; a change of the job goes on without this node until the launcher answers",
            local.reg.pid
        );
        local.unresponsive = Some(text.clone());
        if local.over.is_some() {
            return;
        }
        let key = self.key.clone();
        self.notice(Notice::Warning { key, text });
    }

    /// The process of the launcher here, where it was asked before and has yet to answer that it is there.
    pub(super) fn unanswered(&self, now: Time) -> Option<u32> {
        let local = self.local.as_ref().filter(|l| l.conn.is_some())?;
        let before = local.unanswered.filter(|at| *at < now);
        before.map(|_| local.reg.pid)
    }

    /// Whether the launcher here is connected and does not answer.
    pub fn is_unresponsive(&self) -> bool {
        let local = self.local.as_ref().filter(|l| l.conn.is_some());
        local.is_some_and(|l| l.unresponsive.is_some())
    }

    /// The text on it for people then.
    pub(super) fn unresponsive(&self) -> Option<&str> {
        let local = self.local.as_ref().filter(|l| l.over.is_none())?;
        local
            .unresponsive
            .as_deref()
            .filter(|_| local.conn.is_some())
    }

    /// A launcher came back with workers running (R17): they go on only as the same member of the
    /// same generation; otherwise they are ended.
    fn adopt(&mut self, ctx: &mut Ctx<'_>, running: Option<Digest>) {
        let digest = self.head_digest();
        self.note_life(ctx);
        let mut adopted = false;
        if running == Some(digest) {
            self.all_waited_for(ctx);
        }
        if self.is_member(ctx) {
            let mine = self
                .member
                .get_or_insert_with(|| Mine::new(digest, ctx.cfg.boot));
            if std::mem::take(&mut mine.status.gone) {
                // Missed for so long that it was given up, and its workers with it: that is what the
                // others have heard, and it stays so. But it is here.
                mine.changed = true;
                if running == Some(digest) {
                    self.stop_launcher(ctx.now, digest, 0, "this node was given up meanwhile");
                }
            } else if running == Some(digest) {
                if !mine.trains() {
                    // Started by an earlier run of this agent, whose lease nobody remembers. It is
                    // given once: an agent that crashes again and again gives no more.
                    let first = self.durable.adopted;
                    mine.adopted = first.map_or(ctx.now, |at| at.min(ctx.now));
                    adopted = first.is_none();
                }
                mine.status.started = mine.status.started.or(Some(1));
                mine.changed = true;
                if mine.status.lease_lost {
                    // It may not have heard of that on its way back.
                    let why = mine.why_lost.clone();
                    self.stop_launcher(ctx.now, digest, 0, &why);
                }
            }
        } else {
            self.member = None;
        }
        if adopted {
            self.durable.adopted = Some(ctx.now);
            self.persist(ctx);
        }
        if let Some(old) = running
            && (old != digest || !self.is_member(ctx))
        {
            self.stop_launcher(ctx.now, old, 0, "this generation is over");
        }
        // Its life ended while its agent was away. The next may have begun, without it.
        self.hear_of_known_ends(ctx);
        // Or it was given up by a person's order, as nobody could decide its end.
        self.end_with_cancelled(ctx);
        self.ask_for_end(ctx);
    }

    /// The head changed: take up, or give up, this node's part.
    pub(super) fn enter(&mut self, ctx: &mut Ctx<'_>, before: Option<Digest>) {
        let Some(head) = self.head.as_ref() else {
            return;
        };
        let (record, digest) = (head.record.clone(), head.digest);
        let was = self.member.take();
        self.applicant.told.there = None;
        if record.kind.is_terminal() || self.local.is_none() {
            self.applicant.told.clear();
        }
        if record.kind.is_terminal() {
            let own = self.is_of_life(record.lineage());
            let running = self.local.as_ref().and_then(|l| l.running);
            // That all others left is no end for a launcher that only waited, or was dropped before: it begins the
            // next life.
            let left = self.before.as_ref().filter(|b| b.digest == record.parent);
            let mine = left.and_then(|b| b.record.member(ctx.me()));
            let took_part = mine.is_some_and(|m| Some(m.launcher) == self.launcher());
            let left = took_part || self.took_part(&record);
            let waited = own && record.kind == Kind::Dormant && !left;
            if waited {
                self.set_life(None);
            }
            if own && !waited {
                // The others waited for all but those that they had given up, whose lease is all that they wait for.
                let runs = was.is_some_and(|m| !m.status.stopped);
                if let Some(old) = running.filter(|_| runs) {
                    let why = match record.kind {
                        Kind::Tombstone { .. } => {
                            "another group of this job goes on, and this node joins it"
                        }
                        _ => "the job is over",
                    };
                    self.stop_launcher(ctx.now, old, 0, why);
                }
                self.end_launcher(ctx, &record);
                self.follow_merge(ctx, &record);
            } else if let Some(old) = running {
                // How its own life ended nobody here knows any more.
                self.stop_launcher(ctx.now, old, 0, "this generation is over");
            }
            return;
        }
        self.note_life(ctx);
        // Whatever runs is of an earlier generation, perhaps of one that the head before was to
        // replace and never did: the launcher knows only those that it was told to start.
        let running = self.local.as_ref().and_then(|l| l.running);
        let running = running.or(before).filter(|old| *old != digest);
        if self.is_member(ctx) {
            if let Some(old) = running {
                let grace = record.spec.loss_grace_ms;
                self.stop_launcher(ctx.now, old, grace, "the next generation was decided");
            }
            self.member = Some(Mine::new(digest, ctx.cfg.boot));
            self.applicant.told.clear();
            return;
        }
        if let Some(old) = running {
            self.stop_launcher(ctx.now, old, 0, "this node is no longer a member");
        }
        let Some(was) = was else { return };
        if was.status.stopped {
            // Whoever leads now need not know it, and would wait for this node's lease to end.
            self.old_stopped(ctx, was.status.digest);
        }
        self.rested(ctx);
        let leaves = self
            .local
            .as_ref()
            .and_then(|l| l.leave.as_ref())
            .map(|(l, _)| l.reason.clone());
        if let Some(reason) = leaves {
            let others = match record.is_short() {
                true => "wait for more nodes",
                false => "go on",
            };
            let report = format!("left the job: {reason}; the others {others}");
            self.dismiss(143, report);
        }
    }

    pub(super) fn stop_launcher(&mut self, now: Time, digest: Digest, grace_ms: u32, why: &str) {
        if let Some(local) = self.local.as_mut().filter(|l| l.conn.is_some()) {
            let limit = now + Span::from_millis(grace_ms.into()) + STOP_LIMIT;
            let before = local.stopping.filter(|s| s.digest == digest);
            local.stopping = Some(Stopping {
                digest,
                limit: before.map_or(limit, |s| s.limit.min(limit)),
                at_once: grace_ms == 0 || before.is_some_and(|s| s.at_once),
            });
        }
        self.tell_launcher(ToLauncher::Stop {
            digest,
            grace_ms,
            why: why.into(),
        });
    }

    /// A frame of the launcher.
    pub(super) fn on_launcher(&mut self, ctx: &mut Ctx<'_>, frame: ToAgent) {
        if let Some(local) = &mut self.local {
            // Whatever it says, it answers.
            (local.unanswered, local.unresponsive) = (None, None);
        }
        let head = self.head_digest();
        match frame {
            ToAgent::MasterPort { port } => {
                if let Some(local) = &mut self.local {
                    local.master_port = port;
                }
            }
            ToAgent::Leave { grace_ms } => {
                let reason = "its launcher was told to stop".to_owned();
                self.leave(ctx, Leave { grace_ms, reason });
            }
            ToAgent::Cancel => self.cancel_by_launcher(ctx),
            ToAgent::Started { digest, attempt } => {
                self.start_again(ctx, digest, attempt);
                self.update(digest == head, |s| {
                    // New workers attach the runtime anew.
                    s.takes_stop_steps &= s.started >= Some(attempt);
                    s.started = s.started.max(Some(attempt));
                });
            }
            ToAgent::StartFailed {
                digest,
                attempt,
                reason,
            } => {
                self.unstarted.clone_from(&reason);
                self.update(digest == head, |s| s.start_failed = Some((attempt, reason)));
            }
            ToAgent::Exited { digest, exit } => {
                let known = self.member.as_ref().and_then(|m| m.status.exit.as_ref());
                // What the others follow from may be said after them.
                let root = known.is_none_or(|e| e.damaged.is_none() && exit.damaged.is_some());
                if digest == head && root {
                    self.notice(Notice::WorkerFailed {
                        key: self.key.clone(),
                        node: ctx.me(),
                        exit: exit.clone(),
                    });
                    self.update(true, |s| s.exit = Some(exit));
                }
            }
            ToAgent::Finished { digest } => self.update(digest == head, |s| s.finished = true),
            ToAgent::Stopped { digest } => {
                self.old_workers_gone(ctx.now);
                if let Some(local) = &mut self.local {
                    local.ended |= local.running == Some(digest);
                }
                if let Some(local) = &mut self.local
                    && local.stopping.take_if(|s| s.digest == digest).is_some()
                    && digest != head
                {
                    (local.ends, local.ends_within) = (None, None);
                }
                if digest == head {
                    self.update(true, |s| s.stopped = true);
                    if let Some(mine) = &mut self.member {
                        mine.pending = None;
                    }
                } else {
                    self.old_stopped(ctx, digest);
                    self.rested(ctx);
                }
            }
            ToAgent::StopInstalled {
                digest,
                barrier,
                step,
            } => {
                let event = barrier::NodeEvent::Installed {
                    digest,
                    barrier,
                    step,
                };
                self.at_barrier(ctx, event);
            }
            ToAgent::TakesStopSteps { digest, yes } => {
                self.update(digest == head, |s| s.takes_stop_steps = yes);
            }
            ToAgent::Save(news) => self.on_save_news(ctx, news),
            ToAgent::Stalled { digest, yes } => self.update(digest == head, |s| s.stalled = yes),
            ToAgent::Saved { digest, saved } => {
                let step = saved.step;
                self.update(digest == head, |s| s.saved = Some(saved));
                self.at_barrier(ctx, barrier::NodeEvent::Saves { digest, step });
            }
            ToAgent::Standings {
                digest,
                number,
                list,
            } => self.standings_here(ctx, digest, number, list),
            ToAgent::Register(_)
            | ToAgent::Query(_)
            | ToAgent::Command(_)
            | ToAgent::Metrics { .. }
            | ToAgent::Store { .. }
            | ToAgent::Alive => {}
        }
    }

    /// A member whose workers of an earlier generation cannot be ended can start no others: the others
    /// need not wait for it.
    pub(super) fn drive_stopping(&mut self, ctx: &Ctx<'_>) {
        let Some(stopping) = self.local.as_ref().and_then(|l| l.stopping) else {
            return;
        };
        let head = self.head_digest();
        let Some(mine) = self.member.as_mut().filter(|m| m.attempt > 0) else {
            return;
        };
        if stopping.digest == head || mine.status.start_failed.is_some() {
            return;
        }
        if ctx.now < stopping.limit {
            return self.wake_at(stopping.limit, "workers that do not end");
        }
        let reason =
            "the workers of the generation before do not end: look for processes in state D";
        mine.status.start_failed = Some((mine.attempt, reason.into()));
        mine.changed = true;
    }
}
