//! Sentences for people: for whom the job waits, why, and what would help.

use super::store::differs;
use super::{Ctx, Job, REPEAT};
use crate::budget;
use crate::ids::{Digest, NodeId};
use crate::membership::State;
use crate::record::{Arbiter, Cause, Kind, Member, Record};
use crate::time::Span;
use crate::wire::{MAX_LIST, Status, Wait};

/// Why a launcher that is there may not answer, and what helps.
pub(super) const STOPPED: &str = "it is stopped (Ctrl-Z; `kill -CONT` lets it go on) or blocked";

/// Ranks may finish this long after others before anybody is told.
const FINISHING: Span = Span::from_secs(5);

impl Job {
    /// Whether this node is a member whose workers are stopped, or have finished.
    pub(super) fn has_stopped(&self) -> bool {
        let over = |s: &Status| s.stopped || s.finished;
        self.member.as_ref().is_some_and(|m| over(&m.status))
    }

    /// A member whose workers run no more, while no new generation comes, says what it waits for.
    pub(super) fn explain_pause(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let lead = self.acting_leader(ctx, record);
        // A member that has finished waits for the end, which nobody decides then.
        let stranded = self.is_stranded(ctx);
        let over = |s: &Status| s.stopped || s.finished && stranded;
        let Some(mine) = self.member.as_mut().filter(|m| over(&m.status)) else {
            return;
        };
        let since = *mine.paused.get_or_insert(ctx.now);
        // The leader sees more, and tells the members.
        let led = lead.is_some_and(|n| ctx.reachable(n));
        let due = since + REPEAT.times(if led { 3 } else { 1 });
        if ctx.now < due {
            return self.wake_at(due, "say what the job waits for");
        }
        let told = led && !self.applicant.told.text.is_empty();
        let leads = lead == Some(ctx.me());
        let wait = self.live().filter(|_| leads || !told);
        let wait = wait.map(|h| self.wait_of_running(ctx, h, ctx.me()));
        // What else a leader waits for it says as it tries to decide.
        let news = |w: &Wait| match leads {
            true => matches!(w, Wait::Unstored { .. }),
            false => !matches!(w, Wait::Changing),
        };
        if let Some(wait) = wait.filter(news) {
            self.tell_wait(ctx, &wait);
        }
    }

    /// A member whose workers have stopped is told what the job waits for: by itself it sees neither whose
    /// launchers are gone nor who asks to be let in.
    pub(super) fn tell_wait_to(&mut self, ctx: &Ctx<'_>, node: NodeId, status: &Status) {
        let ended = self.lead.as_ref().is_some_and(|l| l.ending.is_some());
        let waits = ended && status.stopped || status.finished && self.is_finishing(ctx);
        // One that leaves is let go, or hears of the wait as soon as there is one.
        if waits && status.leave.is_none() {
            self.say_wait(ctx, node);
        }
    }

    /// Tells a member what the job waits for.
    pub(super) fn say_wait(&mut self, ctx: &Ctx<'_>, node: NodeId) {
        let Some(head) = self.live() else {
            return;
        };
        let wait = self.wait_of_running(ctx, head, node);
        let member = head.record.member(node).filter(|_| node != ctx.me());
        if let Some(launcher) = member.map(|m| m.launcher)
            && !matches!(wait, Wait::Changing)
        {
            self.acknowledge(ctx, node, launcher, Digest::ZERO, wait);
        }
    }

    /// The members that are there, or may come back, and whose ranks have not finished, where others' have.
    fn unfinished(&self, ctx: &Ctx<'_>, record: &Record) -> Vec<NodeId> {
        let Some(lead) = &self.lead else {
            return Vec::new();
        };
        let finished = |n: NodeId| lead.status(n).is_some_and(|s| s.finished);
        if lead.ending.is_some() || !record.members.iter().any(|m| finished(m.node)) {
            return Vec::new();
        }
        let gone = |m: &&Member| self.is_lost(ctx, m) || self.stopped_for_good(m.node);
        let waited = record.members.iter().filter(|m| !gone(m));
        waited.map(|m| m.node).take(MAX_LIST).collect()
    }

    /// Whether all have waited for the last ranks for so long that they should know it.
    fn is_finishing(&self, ctx: &Ctx<'_>) -> bool {
        let since = self.lead.as_ref().and_then(|l| l.finishing);
        since.is_some_and(|at| ctx.now >= at + FINISHING)
    }

    /// Members whose ranks have finished wait for those of the others: they are told for whom.
    pub(super) fn tell_finishing(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let waits = !self.unfinished(ctx, record).is_empty();
        let Some(lead) = self.lead.as_mut() else {
            return;
        };
        if !waits {
            lead.finishing = None;
            return;
        }
        let due = *lead.finishing.get_or_insert(ctx.now) + FINISHING;
        if ctx.now < due {
            return self.wake_at(due, "ranks that have not finished");
        }
        let wait = self.live().map(|h| self.wait_of_running(ctx, h, ctx.me()));
        let news = wait
            .as_ref()
            .is_some_and(|w| self.explain(ctx, w) != self.applicant.told.text);
        if let Some(wait) = wait.filter(|_| news) {
            self.tell_wait(ctx, &wait);
            for member in record.members.iter().filter(|m| m.node != ctx.me()) {
                if let Some(status) = self.status_of(member.node).cloned() {
                    self.tell_wait_to(ctx, member.node, &status);
                }
            }
        }
    }

    /// A generation that runs nothing, for somebody left who is not replaced yet.
    pub(super) fn explain_short(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let wait = match record.is_short() && self.is_member(ctx) {
            true => self.live().map(|h| self.wait_of_running(ctx, h, ctx.me())),
            false => None,
        };
        if let Some(wait) = wait.filter(|w| !matches!(w, Wait::Changing)) {
            self.tell_wait(ctx, &wait);
        }
    }

    /// The workers failed again and again: their next start waits.
    pub(super) fn explain_crashes(&mut self, ctx: &Ctx<'_>, record: &Record) {
        let text = format!(
            "starting again in {} s: {}. The workers failed or hung {} times in a row within {} s of their start; the pause \
             grows with each failure, up to {} s",
            self.pause.since(ctx.now).as_secs_f64(),
            self.why(ctx, record),
            self.crashes.short_lives(),
            budget::SHORT_LIFE.as_millis() / 1_000,
            budget::PAUSE_MAX.as_millis() / 1_000,
        );
        self.tell_waiting(ctx.now, text);
    }

    /// Text on the nodes that left, where that is why the job waits.
    fn who_left(&self, ctx: &Ctx<'_>) -> String {
        let head = self.live().filter(|h| h.record.is_short());
        let Some(Cause::NodesLeft { nodes }) = head.map(|h| &h.record.cause) else {
            return String::new();
        };
        let gone: Vec<String> = nodes
            .iter()
            .take(8)
            .map(|node| {
                let peer = ctx.peers.get(*node);
                let reason = peer.and_then(|p| p.leaving.as_ref());
                match reason.map(|(leave, _)| leave.reason.as_str()) {
                    Some(reason) => format!("{} left ({reason})", ctx.name(*node)),
                    None => format!("{} left", ctx.name(*node)),
                }
            })
            .collect();
        format!(": {}", gone.join(", "))
    }

    /// Members that are missing since the workers of their generation ended.
    fn who_is_gone(&self, ctx: &Ctx<'_>, there: &[NodeId]) -> String {
        let waits = self.live().filter(|h| h.record.members.len() <= MAX_LIST);
        let members = waits.into_iter().flat_map(|h| h.record.members.iter());
        let gone = members.filter(|m| !there.contains(&m.node) && m.node != ctx.me());
        let lost =
            |m: &&Member| self.is_lost(ctx, m) || self.status_of(m.node).is_some_and(|s| s.gone);
        let gone: Vec<NodeId> = gone.filter(lost).map(|m| m.node).collect();
        match gone.is_empty() {
            true => String::new(),
            false => format!("; gone: {}", ctx.names(&gone)),
        }
    }

    /// Nodes whose launchers are there and do not answer, where the job waits for nodes.
    fn who_is_stopped(&self, ctx: &Ctx<'_>) -> String {
        let stopped = self.adverts(ctx.peers.all).filter(|(_, a)| a.unresponsive);
        let stopped: Vec<NodeId> = stopped.map(|(n, _)| n).take(8).collect();
        match stopped.is_empty() {
            true => String::new(),
            false => format!(
                ". No answer from the launcher on {}, which takes part in no change: {STOPPED}",
                ctx.names(&stopped)
            ),
        }
    }

    pub(super) fn explain(&self, ctx: &Ctx<'_>, wait: &Wait) -> String {
        let name = |n: NodeId| {
            if n == ctx.me() {
                "this node".to_owned()
            } else {
                ctx.name(n)
            }
        };
        match wait {
            Wait::Forming {
                have,
                min,
                max,
                who,
            } => {
                let names: Vec<String> = who.iter().take(8).map(|n| name(*n)).collect();
                let nodes = if min == max {
                    format!("{min}")
                } else {
                    format!("{min} to {max}")
                };
                let left = self.who_left(ctx) + &self.who_is_stopped(ctx);
                let gone = self.who_is_gone(ctx, who);
                let here = match have {
                    0 => "none that this node reaches".to_owned(),
                    have => format!("{have} ({})", names.join(", ")),
                };
                let least = match min {
                    1 => "1 node".to_owned(),
                    min => format!("{min} nodes"),
                };
                format!(
                    "waiting for {} more of {nodes} nodes{left}. The job needs launchers on {least} and has {here}{gone}; \
                     it waits without a time limit. Start `muster run` with the same --rdzv-id on the missing \
                     nodes, or end the job with Ctrl-C or `muster cancel {}`. This agent is connected to {} others (if \
                     that stays 0: check --rdzv-endpoint, or `bootstrap` of the agents)",
                    min.saturating_sub(*have),
                    self.key.id,
                    ctx.peers.connected_nodes().count(),
                )
            }
            // Nobody else is awaited: nothing to say.
            Wait::Batching { max: 1, .. } => String::new(),
            Wait::Batching { have, max } if have >= max => {
                format!("all {max} nodes are here; starting")
            }
            Wait::Batching { have, max } => format!(
                "{}; starting unless more (up to {max}) come at once",
                are_here(*have)
            ),
            Wait::OtherSpec => {
                "this launcher has other flags than the running job, or another store; the job's leader looks whether \
                 that job still has launchers"
                    .into()
            }
            Wait::Spare { max } => format!(
                "the job runs with all {max} nodes that it wants; this one is a spare and steps in at \
                 the next loss"
            ),
            // The lease ends before the silence has told who is gone.
            Wait::NoQuorum { missing } if missing.is_empty() => {
                "the job cannot go on here: no majority of the nodes that decide answers this node \
                 any more. What would help: check this node's network"
                    .into()
            }
            Wait::Unstored { nodes } => {
                let names: Vec<String> = nodes.iter().take(8).map(|n| name(*n)).collect();
                let ends = self.user_ends_it();
                let (what, does, takes) = match (self.is_live(), ends) {
                    (true, true) => ("end", "ends", "its end takes the votes of a majority"),
                    (true, false) => ("go on", "goes on", "what follows takes the votes of a majority"),
                    (false, _) => ("begin", "begins", "each node that begins it has to store its vote"),
                };
                format!(
                    "the job cannot {what}: {takes}, and the state directory on {} refuses writes. It {does} by itself when \
                     the directory can be written",
                    names.join(", "),
                )
            }
            Wait::NoQuorum { missing } => {
                let names: Vec<String> = missing.iter().take(8).map(|n| name(*n)).collect();
                let (n, names) = (missing.len(), names.join(", "));
                if self.user_ends_it() {
                    return format!(
                        "the user stops the job, and its end waits: {n} of the nodes that decide cannot be reached \
                         ({names}), and without a majority two halves could end differently. What would help: bring \
                         one of them back"
                    );
                }
                let mut dead: Vec<String> = missing.iter().map(|n| ctx.called(*n)).collect();
                dead.dedup();
                let id = &self.key.id;
                let hopeless = self.is_hopeless(ctx);
                let gone = match self.may_continue_without(missing) {
                    true => format!(
                        "`muster job continue {id} --dead {} --yes` goes on without them",
                        dead.join(",")
                    ),
                    false if hopeless => format!(
                        "`muster cancel {id}` on each node that waits ends the job, and the next start begins it anew"
                    ),
                    false => "start the job with another --rdzv-id".to_owned(),
                };
                let advice = format!(". If they are gone for good, {gone}");
                format!(
                    "the job cannot go on: {n} of the nodes that decide cannot be reached ({names}), and \
                     without a majority two halves could both go on. What would help: bring one of \
                     them back; or, next time, a third agent as witness, or a shared directory \
                     (--store){advice}"
                )
            }
            Wait::Parked { ms } => {
                let why = match self.unstarted.as_str() {
                    "" => "its workers did not start in time, it had no link to other members, or it was \
                           lost again and again"
                        .to_owned(),
                    why => format!("its workers did not start: {why}"),
                };
                format!(
                    "the job leaves this node out for {:.1} s more, after a fault here ({why}). The other \
                     nodes go on where they are enough, and this one is let in by itself then; each further \
                     fault doubles the pause, up to 5 min. If it happens again, look at the log of this \
                     node's agent and launcher",
                    *ms as f64 / 1000.0
                )
            }
            Wait::Elsewhere { advert } => match advert.leader {
                Some(leader) if ctx.reachable(leader) => {
                    format!(
                        "joining generation {} led by {}",
                        advert.number,
                        name(leader)
                    )
                }
                Some(leader) if self.is_cut_off(ctx, leader) => format!(
                    "the job's leader {} cannot be reached from this node: its agent is gone, or the network between \
                     them is cut",
                    name(leader)
                ),
                Some(leader) => away(&name(leader)),
                None => "the job has no leader at the moment".into(),
            },
            Wait::Changing if !self.unlinked(ctx).is_empty() => {
                let mut unlinked = self.unlinked(ctx);
                let cut_off = unlinked.iter().any(|n| self.is_cut_off(ctx, *n));
                unlinked.retain(|n| !cut_off || self.is_cut_off(ctx, *n));
                let names = ctx.names(&unlinked);
                match cut_off {
                    true => format!(
                        "this node has no link to {names} of the job: the agent there is gone, or the network between \
                         them is cut"
                    ),
                    false => away(&names),
                }
            }
            Wait::Changing => format!(
                "the job changes its members; this node joins next{}",
                self.who_is_stopped(ctx)
            ),
            Wait::Held { have, ms } => format!(
                "{}. When the job ended last, a node was away or cut off, and its workers may still run: the job \
                 starts when they have ended, in {} s at the latest",
                are_here(*have),
                ms.div_ceil(1000)
            ),
            Wait::Finishing { nodes } => {
                let names: Vec<String> = nodes.iter().take(8).map(|n| name(*n)).collect();
                format!(
                    "the ranks on this node or others have finished, and the job ends when those on {} have. If they \
                     should have ended: look there (`muster logs {1}`), whether `muster run` is stopped (Ctrl-Z; `kill \
                     -CONT` lets it go on), and whether its agent runs. `muster cancel {1}` ends the job without them, \
                     with code 130",
                    names.join(", "),
                    self.key.id,
                )
            }
            Wait::Orphan { ms } => format!(
                "the job's log says that it runs on other nodes, and nobody can say whether its launchers there \
                 are dead or only cut off. The job goes on here in {} s if they give no sign of life in the \
                 store until then",
                ms.div_ceil(1000)
            ),
        }
    }

    /// Whether a node that has no link to this one should have one by now: its agent does not only restart, nor
    /// is it known to be dead.
    fn is_cut_off(&self, ctx: &Ctx<'_>, node: NodeId) -> bool {
        match ctx.peers.unwell(node) {
            Some(State::Lost { confirmed }) => !confirmed,
            Some(State::Away { .. } | State::Suspect { .. }) => false,
            Some(State::Alive) | None => {
                let met = ctx.peers.get(node).map(|p| p.seen);
                let since = met.or(self.applicant.since);
                since.is_some_and(|at| ctx.now >= at + ctx.cfg.agent_grace)
            }
        }
    }

    /// Whether enough members are left for an operator to go on without these nodes.
    fn may_continue_without(&self, missing: &[NodeId]) -> bool {
        self.live().is_some_and(|h| {
            let left = h
                .record
                .members
                .iter()
                .filter(|m| !missing.contains(&m.node));
            left.count() >= usize::from(h.record.spec.min_nodes)
        })
    }

    /// Why the members of `record` start, for the launcher and its log.
    pub(super) fn why(&self, ctx: &Ctx<'_>, record: &Record) -> String {
        let names = |nodes: &[NodeId]| ctx.names(nodes);
        match &record.cause {
            Cause::Formed => format!("the job formed with {} nodes", record.members.len()),
            Cause::Continued { nodes } => {
                format!("an operator gave up {}; the others go on", names(nodes))
            }
            Cause::NodesLost { nodes } => format!("lost {}", names(nodes)),
            Cause::NodesLeft { nodes } => format!("{} left", names(nodes)),
            Cause::NodesJoined { nodes } => format!("{} joined", names(nodes)),
            Cause::LinksLost { nodes } => format!("no link to {}", names(nodes)),
            Cause::LeasesLost { nodes } => format!(
                "leases ran out on {}: a launcher was stopped, or reached neither a majority nor the store",
                names(nodes)
            ),
            Cause::Resumed { nodes } => {
                format!(
                    "the workers on {} had stopped, and start again",
                    names(nodes)
                )
            }
            Cause::StartFailed { nodes } => format!("no workers on {}", names(nodes)),
            Cause::WorkerFailed { node, rank, code } | Cause::WorkerHung { node, rank, code } => {
                let (used, max) = (record.restarts_used, record.spec.max_restarts);
                let spent = used > max || matches!(record.kind, Kind::Failed { .. });
                let next = match max {
                    _ if !spent => format!("restart {used} of {max}"),
                    0 => "it is not restarted (--max-restarts 0)".into(),
                    max => format!("its restarts are used up (--max-restarts {max})"),
                };
                let node = ctx.name(*node);
                if matches!(record.cause, Cause::WorkerHung { .. }) {
                    return format!("rank {rank} on {node} hung and was ended; {next}");
                }
                format!("rank {rank} on {node} failed with code {code}; {next}")
            }
            Cause::Damaged { node, rank, step } => format!(
                "rank {rank} on {} found the checkpoint of step {step} damaged",
                ctx.name(*node)
            ),
            Cause::Misread { nodes, step } => format!(
                "the checkpoint of step {step} is whole, and cannot be read on {}",
                names(nodes)
            ),
            Cause::Merged { other } => format!("another group of this job ({other}) joins"),
            Cause::Finished => "all ranks finished".into(),
            Cause::Cancelled => "the user stopped the job".into(),
        }
    }

    /// The wait that a running job's coordinator tells the holder of a ticket.
    pub(super) fn wait_of_running(&self, ctx: &Ctx<'_>, head: &super::Head, from: NodeId) -> Wait {
        let record = &head.record;
        if record.arbiter == Arbiter::Members {
            let missing = self.missing_voters(ctx);
            if !head.voting().is_majority(|n| !missing.contains(&n)) {
                return Wait::NoQuorum { missing };
            }
        }
        let nodes = self.unfinished(ctx, record);
        if !nodes.is_empty() {
            return Wait::Finishing { nodes };
        }
        // A pause that is over in a moment is no news.
        if let Some(ms) = self.parked_ms(ctx, from).filter(|ms| *ms >= 500) {
            return Wait::Parked { ms };
        }
        if let Some(left) = self.replaced_in(ctx, record, from) {
            let have = u16::try_from(self.gathering.tickets.len()).unwrap_or(u16::MAX);
            let ms = left.as_millis();
            return Wait::Held { have, ms };
        }
        if (self.gathering.tickets.get(&from)).is_some_and(|h| differs(&h.ticket, record)) {
            return Wait::OtherSpec;
        }
        let deserted = self.has_no_store_left(ctx.me(), ctx.peers.all);
        if let Some(left) = self.orphaned_in(ctx)
            && self.is_leaderless(ctx)
            && !deserted
        {
            let ms = left.as_millis();
            return Wait::Orphan { ms };
        }
        let a = self.assess(ctx, record);
        let mut members = a.survivors;
        // Whoever asks to be let in goes on with it.
        members.retain(|_| !deserted);
        let max = record.spec.max_nodes;
        // A member is none, however many there are: it waits for the change.
        let ends = self.lead.as_ref().is_some_and(|l| l.ending.is_some());
        // One whose agent is away keeps its place.
        let away = if ends { 0 } else { a.away.len() };
        if members.len() + away >= usize::from(max) && !record.has(from) {
            return Wait::Spare { max };
        }
        let have = members.len() + self.gathering.tickets.len();
        if have < usize::from(record.spec.min_nodes) {
            let who = members
                .iter()
                .map(|m| m.node)
                .chain(self.gathering.tickets.keys().copied())
                .take(crate::wire::MAX_LIST)
                .collect();
            return Wait::Forming {
                have: u16::try_from(have).unwrap_or(u16::MAX),
                min: record.spec.min_nodes,
                max,
                who,
            };
        }
        match self.lacks_votes(ctx) {
            true => Wait::Unstored {
                nodes: self.unstored_voters(ctx),
            },
            false => Wait::Changing,
        }
    }

    /// Whether a node's state directory refuses writes, so that it can give no vote.
    pub(super) fn is_unstored(&self, ctx: &Ctx<'_>, node: NodeId) -> bool {
        if node == ctx.me() {
            return ctx.unstored || self.abstains();
        }
        let hello = ctx.peers.get(node).and_then(|p| p.hello.as_ref());
        hello.is_some_and(|h| h.unstored.is_some())
    }

    /// Voters that can store no vote. By the store nobody votes.
    fn unstored_voters(&self, ctx: &Ctx<'_>) -> Vec<NodeId> {
        let voting = self.voting().filter(|r| r.arbiter == Arbiter::Members);
        let voters = voting.into_iter().flat_map(|r| r.voters());
        let unstored = voters.map(|v| v.node).filter(|n| self.is_unstored(ctx, *n));
        unstored.take(MAX_LIST).collect()
    }

    /// Whether what follows the head cannot be decided just now, for want of votes that can be stored.
    pub(super) fn lacks_votes(&self, ctx: &Ctx<'_>) -> bool {
        let unstored = self.unstored_voters(ctx);
        let missing = self.missing_voters(ctx);
        let votes = |n| !unstored.contains(&n) && !missing.contains(&n);
        !unstored.is_empty() && self.voting().is_some_and(|r| !r.is_majority(votes))
    }

    /// Voters that this agent has no link to.
    pub(super) fn missing_voters(&self, ctx: &Ctx<'_>) -> Vec<NodeId> {
        let voters = self.voting().into_iter().flat_map(|r| r.voters());
        let missing = voters.map(|v| v.node).filter(|n| !ctx.reachable(*n));
        missing.take(MAX_LIST).collect()
    }
}

/// Members whose agents are not there just now.
fn away(names: &str) -> String {
    format!(
        "no agent answers on {names} just now: it restarts, or the node is lost. Which of the two shows within a \
         moment, and the job goes on by itself"
    )
}

fn are_here(nodes: u16) -> String {
    match nodes {
        1 => "1 node is here".to_owned(),
        nodes => format!("{nodes} nodes are here"),
    }
}
