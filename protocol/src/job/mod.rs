//! One job on one agent: rendezvous, generations, starting and stopping (RENDEZVOUS rules R1 to R20).
//!
//! This core never decides anything by itself that two nodes must see alike: that is the arbiter's
//! (a majority of voters, or the store's log). It never waits for an answer either: after every
//! event it looks at all that it knows (`Job::drive`), says what is now to be said, and names the
//! time at which it wants to look again. So a lost or repeated message never leaves it stuck.

#[cfg(test)]
mod alone;
mod apply;
mod birth;
mod cancel;
mod chain;
mod checkpoint;
mod damage;
mod deadline;
mod deserted;
mod disk;
mod dropped;
mod durable;
mod explain;
mod gathering;
mod given_up;
mod hang;
mod held;
mod keeping;
mod lead;
mod lease;
mod leaving;
mod life;
mod member;
mod merge;
mod messages;
mod misreads;
mod news;
mod obstacle;
mod orders;
mod orphaned;
mod plan;
mod propose;
mod resume;
mod saves;
mod second_look;
mod spares;
mod start;
mod status;
mod stop;
mod store;
mod triggers;
mod unanswered;
mod vacant;
mod voter;
mod voters;
mod watching;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

pub use cancel::CancelStage;
pub use checkpoint::Asked as CheckpointAsked;
pub use durable::{Durable, Saved};
pub use resume::Continues;

use crate::agent::{Config, ConnId, Effect, Notice, Past, Phases};
use crate::ids::{Digest, JobKey, LauncherId, NodeId};
use crate::local::{ToAgent, ToLauncher};
use crate::peers::{Peer, View};
use crate::record::{Kind, Record, Voter};
use crate::rng::Rng;
use crate::storelog;
use crate::time::{Span, Time};
use crate::wire::{Advert, JobMessage, Timeouts};

/// A ticket or a status is said again after this time.
pub(crate) const REPEAT: Span = Span::from_millis(1_000);
/// A status that the leader has, and that leaves nothing to do, is said again after this time.
const SETTLED_REPEAT: Span = Span::from_secs(10);
/// The most that a look at everything costs, for each node that it looks at: with more than a few, what
/// arrives within so long of the look before waits for the next.
const LOOK_COSTS: Span = Span(16_000);
/// A ticket that was not said again for this long is void.
const TICKET_LIFE: Span = Span::from_millis(3_500);

/// The world as a job's core is shown it with every event.
pub(crate) struct Ctx<'a> {
    pub(crate) cfg: &'a Config,
    pub(crate) peers: View<'a>,
    pub(crate) past: &'a Past,
    pub(crate) rng: &'a mut Rng,
    pub(crate) now: Time,
    /// The last long time without any event, from one to the next: this process may have been
    /// stopped.
    pub(crate) quiet: (Time, Time),
    /// The state directory refused a write a moment ago, of whatever job.
    pub(crate) unstored: bool,
    /// This node goes away.
    pub(crate) draining: bool,
}

impl Ctx<'_> {
    fn me(&self) -> NodeId {
        self.cfg.node
    }

    fn voter(&self) -> Voter {
        self.cfg.voter()
    }

    /// A node's name for people.
    fn name(&self, node: NodeId) -> String {
        if node == self.cfg.node && !self.cfg.host.is_empty() {
            format!("{} ({node})", self.cfg.host)
        } else {
            self.peers.name(node)
        }
    }

    /// A node's name on a command line: its host, else the beginning of its id.
    fn called(&self, node: NodeId) -> String {
        let host = self.peers.heard_host(node).unwrap_or_default();
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if !host.is_empty() && host.chars().all(plain) {
            host.to_owned()
        } else {
            node.to_string()
        }
    }

    /// Names of several nodes, for a sentence; at most eight are spelt out.
    fn names(&self, nodes: &[NodeId]) -> String {
        let mut text: Vec<String> = nodes.iter().take(8).map(|n| self.name(*n)).collect();
        if nodes.len() > 8 {
            text.push(format!("{} more", nodes.len() - 8));
        }
        text.join(", ")
    }

    /// The longest times that members of this generation keep, as far as they have said.
    fn timeouts_of(&self, record: &Record) -> Timeouts {
        let members = record.members.iter().filter_map(|m| self.peers.get(m.node));
        let hellos = members.filter_map(|p| p.hello.as_ref());
        hellos.fold(self.cfg.timeouts(), |most, h| most.max(h.timeouts))
    }

    /// Whether the agent of a node whose launcher leaves goes, too: it lives in the launcher's process, or said
    /// goodbye.
    fn goes(&self, node: NodeId) -> bool {
        if node == self.cfg.node {
            return self.cfg.embedded;
        }
        let embedded = |p: &Peer| p.hello.as_ref().is_some_and(|h| h.embedded);
        let peer = self.peers.get(node);
        peer.is_some_and(|p| embedded(p) || p.leaving.is_some())
    }

    /// Whether this is the agent here, or one that was there at that time: its last word is hardly older, if at all.
    fn was_there(&self, node: NodeId, at: Time) -> bool {
        let since = at - Span(self.cfg.suspect_after.0 / 8);
        let heard = |node| self.peers.get(node).is_some_and(|p| p.seen >= since);
        node == self.cfg.node || heard(node)
    }

    /// This agent or a connected one.
    fn reachable(&self, node: NodeId) -> bool {
        node == self.cfg.node || self.peers.connected(node)
    }
}

/// A decided record with its digest, which is costly to compute.
#[derive(Clone, Debug)]
struct Head {
    record: Arc<Record>,
    digest: Digest,
    /// Its members, ordered by their ids.
    nodes: Vec<NodeId>,
    /// The newest change of its voters, and that record's digest.
    voters: Option<(Arc<Record>, Digest)>,
}

impl Head {
    fn new(record: Arc<Record>) -> Head {
        let mut nodes: Vec<NodeId> = record.members.iter().map(|m| m.node).collect();
        nodes.sort_unstable();
        Head {
            digest: record.digest(),
            record,
            nodes,
            voters: None,
        }
    }

    fn with_voters(mut self, change: Option<Arc<Record>>) -> Head {
        self.voters = change.map(|record| (record.clone(), record.digest()));
        self
    }

    /// The record that names those who vote on what follows, and its digest, which names that vote: the
    /// generation's own record, or the newest change of its voters. In all else the two are the same.
    fn configuration(&self) -> (&Arc<Record>, Digest) {
        let changed = self
            .voters
            .as_ref()
            .map(|(record, digest)| (record, *digest));
        changed.unwrap_or((&self.record, self.digest))
    }

    /// The record that names those who vote on what follows.
    fn voting(&self) -> &Record {
        self.configuration().0
    }

    /// As [`Record::has`], without a walk.
    fn has(&self, node: NodeId) -> bool {
        self.nodes.binary_search(&node).is_ok()
    }

    /// As [`Record::lineage`], without computing a digest.
    fn lineage(&self) -> Digest {
        match self.record.number {
            1 => self.digest,
            _ => self.record.birth,
        }
    }
}

/// The core of one job.
#[derive(Clone, Debug)]
pub struct Job {
    key: JobKey,
    durable: Durable,
    saves: saves::Saves,
    lost: given_up::Lost,
    /// A write failed, so memory is ahead of the disk: no vote is given until a write succeeds.
    abstains_until: Option<Time>,
    head: Option<Head>,
    effects: VecDeque<Effect>,
    loopback: VecDeque<JobMessage>,
    early: Option<messages::Early>,
    writes: disk::Writes,
    wake: Option<(Time, &'static str)>,
    /// When everything was looked at last, and how often so far.
    looked: Time,
    looks: u64,
    applicant: apply::Applicant,
    gathering: gathering::Gathering,
    births: birth::Births,
    local: Option<member::Local>,
    member: Option<member::Mine>,
    /// Members that say that they have no way to the store which decides: they do not lead. The one that leads in
    /// their place begins with what they said.
    storeless: BTreeMap<NodeId, crate::wire::Status>,
    /// The launcher that was found dead here last.
    died: Option<LauncherId>,
    /// Of which generation all were told that its launcher here is gone.
    said_over: Digest,
    /// Which generation this node has ended as its leader, and since when, while another leads.
    ended: Option<(Digest, Time)>,
    /// The launcher that the head counts on is missing here.
    vacant: Option<vacant::Vacant>,
    voter: voter::Leases,
    lead: Option<lead::Lead>,
    /// The generation that this run of the agent has led last.
    led: Option<Digest>,
    proposal: Option<propose::Proposal>,
    store: Option<store::Store>,
    merge: merge::Merge,
    news: news::News,
    /// For whom everybody waits, as the leader said, in words; empty while all move.
    hung: String,
    checkpoint: Option<checkpoint::Asked>,
    /// The order of a person on this node, and how that stands.
    cancelling: Option<cancel::Cancelling>,
    cancelled: cancel::Cancelled,
    /// Of which life such an order was passed on to its leader last, and when.
    cancel_passed: Option<(Digest, Time)>,
    /// Times of the change under way, carried from one generation's leader to the next.
    phases: Phases,
    strikes: BTreeMap<NodeId, crate::budget::Strikes>,
    losses: crate::budget::Losses,
    /// Starts that failed since one last went well anywhere, for a leader.
    failed_starts: BTreeMap<NodeId, crate::budget::FailedStarts>,
    /// Why the newest start failed here.
    unstarted: String,
    /// Whether somebody who may go on by an operator's word has been here.
    continuing: bool,
    seq: u64,
    /// The highest round that another proposer was seen to use.
    seen_round: u32,
    /// The highest round that this run of the agent has used, for whatever: no ballot is used twice.
    own_round: u32,
    dropped: BTreeMap<NodeId, dropped::Dropped>,
    /// Of those that were dropped these are known to have stopped: what others wait for them is no news.
    stopped: BTreeSet<NodeId>,
    /// Of the members of a generation that has too few to run these have ended all workers.
    rest: BTreeSet<NodeId>,
    /// An earlier generation whose workers have ended here, from which this node was dropped: others wait for that.
    stopped_here: Option<Digest>,
    /// As `dropped`, of nodes that are not known: they were dropped in a generation that was missed here, or before this
    /// agent's last restart.
    forgotten: Option<Time>,
    /// The words of others on the wait for nodes that may still train.
    words: held::Words,
    /// The leases that the voters had acknowledged when they accepted what this agent decides now.
    leases_ended: Option<BTreeMap<NodeId, Time>>,
    /// Nobody has told for whom a start waits: the generation before the head is not known here, or another agent had
    /// the end decided that is the head.
    unknown: bool,
    /// The generation of which that was not known when this agent had it ended: a word of it may be on its way.
    unsure_of: Option<Digest>,
    /// The nonce of the newest record that this agent has asked the arbiter for.
    decides: Option<u64>,
    /// A node that took part in this life of the job is not there any more, and may come back.
    absent: bool,
    /// A generation of the log's that is replaced from here, as a stranger.
    took_over: Option<orphaned::TookOver>,
    committing: Option<propose::Committing>,
    /// The generation before the head, while this agent remembers it.
    before: Option<Head>,
    installed_at: Time,
    /// When the voters of the head were changed last.
    voters_at: Time,
    crashes: crate::budget::CrashLoop,
    /// A job that keeps crashing is not started again before this.
    pause: Time,
}

impl Job {
    /// `used`: the highest round of any ballot that this run of the agent used for this job.
    pub(crate) fn new(key: JobKey, used: u32) -> Job {
        Job {
            own_round: used,
            ..Job::restore(Durable::new(key))
        }
    }

    pub(crate) fn restore(durable: Durable) -> Job {
        let head = durable.head.clone().map(Head::new);
        let head = head.map(|h| h.with_voters(durable.voters.clone()));
        let absent = head.as_ref().is_some_and(|h| h.record.number > 1);
        Job {
            absent,
            key: durable.key.clone(),
            durable,
            abstains_until: None,
            head,
            effects: VecDeque::new(),
            loopback: VecDeque::new(),
            early: None,
            writes: disk::Writes::default(),
            wake: None,
            looked: Time::ZERO,
            looks: 0,
            applicant: apply::Applicant::default(),
            gathering: gathering::Gathering::default(),
            births: birth::Births::default(),
            local: None,
            member: None,
            storeless: BTreeMap::new(),
            died: None,
            said_over: Digest::ZERO,
            ended: None,
            vacant: None,
            voter: voter::Leases::default(),
            lead: None,
            led: None,
            proposal: None,
            store: None,
            merge: merge::Merge::default(),
            news: news::News::default(),
            hung: String::new(),
            checkpoint: None,
            cancelling: None,
            cancelled: cancel::Cancelled::default(),
            cancel_passed: None,
            saves: saves::Saves::default(),
            lost: given_up::Lost::default(),
            phases: Phases::default(),
            strikes: BTreeMap::new(),
            losses: crate::budget::Losses::default(),
            failed_starts: BTreeMap::new(),
            unstarted: String::new(),
            continuing: false,
            seq: 0,
            seen_round: 0,
            own_round: 0,
            dropped: BTreeMap::new(),
            stopped: BTreeSet::new(),
            rest: BTreeSet::new(),
            stopped_here: None,
            forgotten: None,
            words: held::Words::default(),
            leases_ended: None,
            unknown: false,
            unsure_of: None,
            decides: None,
            took_over: None,
            committing: None,
            before: None,
            installed_at: Time::ZERO,
            voters_at: Time::ZERO,
            crashes: crate::budget::CrashLoop::default(),
            pause: Time::ZERO,
        }
    }

    pub fn key(&self) -> &JobKey {
        &self.key
    }

    /// The newest record known to be decided, and its digest.
    pub fn head(&self) -> Option<(&Arc<Record>, Digest)> {
        self.head.as_ref().map(|h| (&h.record, h.digest))
    }

    pub fn durable(&self) -> &Durable {
        &self.durable
    }

    /// The launcher on this node.
    pub fn launcher(&self) -> Option<LauncherId> {
        self.local.as_ref().map(|l| l.reg.launcher)
    }

    /// The launcher's connection, while it stands.
    pub fn conn(&self) -> Option<ConnId> {
        self.local.as_ref().and_then(|l| l.conn)
    }

    pub(crate) fn used_round(&self) -> u32 {
        self.own_round
    }

    /// Since when those who vote now do so.
    pub(crate) fn voting_since(&self) -> Time {
        self.installed_at.max(self.voters_at)
    }

    pub(crate) fn installed_at(&self) -> Time {
        self.installed_at
    }

    /// Why the job waits, for people; empty when it does not.
    pub fn waiting(&self) -> &str {
        self.unresponsive().unwrap_or(&self.applicant.told.text)
    }

    /// Whether the launcher here does not answer, and is not about to end.
    pub fn is_launcher_stopped(&self) -> bool {
        self.unresponsive().is_some()
    }

    /// Whether workers run here, as far as is known.
    pub fn trains_here(&self) -> bool {
        self.member
            .as_ref()
            .is_some_and(|m| m.status.started.is_some() && !m.status.stopped)
    }

    /// How many of the job's nodes are there, where nothing runs because they are too few.
    pub fn waits_with(&self) -> Option<u16> {
        self.applicant.told.there
    }

    /// For whom everybody waits because it makes no progress, for people; empty when all move.
    pub fn hung(&self) -> &str {
        &self.hung
    }

    /// Whether the workers here were told to stop, or others of their generation are gone, and they still run.
    pub fn stops(&self) -> bool {
        let trains = self.member.as_ref().is_some_and(member::Mine::trains);
        let begun = self.phases.detected > Time::ZERO && self.phases.decided == Time::ZERO;
        trains && self.is_live() && begun
    }

    /// Whether this node is a member of a generation that its workers have not begun yet.
    pub fn starts(&self) -> bool {
        let begins = |m: &member::Mine| {
            let status = &m.status;
            status.started.is_none() && status.start_failed.is_none() && !status.stopped
        };
        let waits = self.head.as_ref().is_some_and(|h| h.record.is_short());
        self.is_live() && !waits && self.member.as_ref().is_some_and(begins)
    }

    /// Whether there is anything to show: more than what this node must not take part in again.
    pub fn is_listed(&self) -> bool {
        self.head.is_some() || !self.is_idle()
    }

    /// Whether nothing here is worth keeping in memory or on disk.
    pub(crate) fn is_idle(&self) -> bool {
        self.is_unattended()
            && self.durable.continues.is_none()
            && self.cancelling.is_none()
            && self
                .head
                .as_ref()
                .is_none_or(|h| h.record.kind.is_terminal())
    }

    /// Whether neither a launcher here nor anybody that asks here takes part in it.
    pub(crate) fn is_unattended(&self) -> bool {
        self.local.is_none() && !self.is_gathering() && self.durable.bound.is_none()
    }

    /// Whether there is nothing that anybody could ask for, or that binds this agent.
    pub(crate) fn is_blank(&self) -> bool {
        self.head.is_none()
            && self.durable.forfeited.is_empty()
            && self.durable.superseded.is_empty()
    }

    /// Whether the job is over, and all that took part in its last life have heard of that: nobody has to be told.
    pub fn is_settled(&self) -> bool {
        let over = |h: &Head| matches!(h.record.kind, Kind::End { .. } | Kind::Failed { .. });
        self.durable.bound.is_none() && self.head.as_ref().is_none_or(|h| over(h) && !self.absent)
    }

    /// Whether a generation trains, or should.
    pub fn is_live(&self) -> bool {
        self.live().is_some()
    }

    /// Whether this agent leads the generation that trains, for good or in its leader's place.
    pub(crate) fn is_led_here(&self) -> bool {
        self.lead.is_some()
    }

    /// Whether this agent leads in place of the first member.
    pub(crate) fn stands_in(&self, me: NodeId) -> bool {
        let first = self.live().and_then(|h| h.record.leader());
        self.lead.is_some() && first != Some(me)
    }

    /// Where the launcher here says that its workers' output goes.
    pub fn log_dir(&self) -> Option<&str> {
        self.local.as_ref().and_then(|l| l.reg.log_dir.as_deref())
    }

    /// The head, if it is a generation that trains.
    fn live(&self) -> Option<&Head> {
        self.head.as_ref().filter(|h| h.record.kind == Kind::Next)
    }

    fn head_digest(&self) -> Digest {
        self.head.as_ref().map_or(Digest::ZERO, |h| h.digest)
    }

    /// The name of the vote on what follows the head: see [`Head::configuration`].
    fn configuration(&self) -> Digest {
        self.head
            .as_ref()
            .map_or(Digest::ZERO, |h| h.configuration().1)
    }

    /// The record that names those who vote on what follows the generation that runs.
    pub fn voting(&self) -> Option<&Arc<Record>> {
        self.live().map(|h| h.configuration().0)
    }

    /// The words of this agent to everybody about the job.
    pub(crate) fn adverts_here(
        &self,
        cfg: &Config,
        peers: View<'_>,
    ) -> impl Iterator<Item = Advert> {
        let gathers = self.gathers();
        let gathering = gathers.then(|| Advert::gathering(self.key.clone()));
        self.advert(cfg, peers).into_iter().chain(gathering)
    }

    /// The life of the job that runs, if this node is a member or a voter of its newest generation, as far as is known
    /// here.
    pub(crate) fn belongs(&self, cfg: &Config) -> Option<Digest> {
        let votes = |head: &Head| head.voting().is_voter(cfg.voter());
        let head = self.live()?;
        (head.has(cfg.node) || votes(head)).then(|| head.lineage())
    }

    /// Whether this peer, which was told that this node belongs to the generation before, has to hear from it that it
    /// no longer does: the leader tells all, and the other members know.
    pub(crate) fn tells_of_end(&self, me: NodeId, peer: NodeId) -> bool {
        let before = self.before.as_ref();
        before.is_none_or(|b| !b.has(peer) || b.record.leader() == Some(me))
    }

    /// The word of this agent on its head.
    fn advert(&self, cfg: &Config, peers: View<'_>) -> Option<Advert> {
        let head = self.head.as_ref()?;
        let left_behind = self.is_left_behind(cfg.node, peers);
        Some(Advert {
            key: self.key.clone(),
            lineage: head.lineage(),
            digest: head.digest,
            number: head.record.number,
            leader: self.leader_told(cfg.node, peers),
            belongs: self.belongs(cfg).is_some(),
            deserted: self.says_deserted(cfg.node, peers.all),
            left_behind,
            started: left_behind && self.had_started(cfg.node),
            unresponsive: self.is_unresponsive(),
        })
    }

    /// Whether launchers wait at this agent for others, and this life of the job has not formed as far as is known
    /// here.
    pub fn gathers(&self) -> bool {
        self.live().is_none() && self.gathering.waits && !self.gathering.tickets.is_empty()
    }

    pub(crate) fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        self.wake
    }

    /// How often everything was looked at, for metrics.
    pub fn looks(&self) -> u64 {
        self.looks
    }

    /// Something happened: looks at everything again, at once or, where there is much to look at, at
    /// all together that happens within a moment.
    pub(crate) fn nudge(&mut self, ctx: &mut Ctx<'_>) {
        let members = self.head.as_ref().map_or(0, |h| h.nodes.len());
        let nodes = members.max(self.gathering.tickets.len());
        let again = match nodes <= crate::wire::MAX_LIST {
            true => ctx.now,
            false => self.looked + LOOK_COSTS.times(u64::try_from(nodes).unwrap_or(u64::MAX)),
        };
        if ctx.now >= again {
            self.drive(ctx);
        } else {
            self.wake_at(again, "what happened meanwhile");
        }
    }

    /// A message of another agent.
    pub(crate) fn receive(&mut self, ctx: &mut Ctx<'_>, from: NodeId, body: JobMessage) {
        let news = match &body {
            JobMessage::Status(status) => !self.is_known(from, status),
            // The timer sees to it that a status is said again in time.
            JobMessage::StatusHeard { seq, .. } => *seq == 0,
            _ => true,
        };
        self.on_message(ctx, from, body);
        if news {
            self.nudge(ctx);
        }
    }

    /// Looks at everything again. Called after every event and at every wake-up.
    pub(crate) fn drive(&mut self, ctx: &mut Ctx<'_>) {
        self.wake = None;
        self.looked = ctx.now;
        self.looks += 1;
        self.recall_leases(ctx);
        self.wake_as_voter(ctx);
        self.drive_dropped(ctx);
        self.retry_persist(ctx);
        self.loopback.extend(self.writes.backed());
        self.drive_welcome(ctx);
        self.drive_silent(ctx);
        self.drive_ends(ctx);
        self.drive_cancelling(ctx);
        self.hear_early(ctx);
        // Each round can only be started by a message to ourselves, and each of those is answered
        // by at most one more; the bound is a guard against a mistake, not a limit that is met.
        for _ in 0..64 {
            self.drive_store(ctx);
            self.drive_birth(ctx);
            self.drive_applicant(ctx);
            self.drive_member(ctx);
            self.drive_ended(ctx);
            self.drive_asked(ctx);
            self.drive_merge(ctx);
            self.drive_lead(ctx);
            self.drive_saves(ctx);
            let Some(message) = self.loopback.pop_front() else {
                return;
            };
            self.on_message(ctx, ctx.me(), message);
            while let Some(message) = self.loopback.pop_front() {
                self.on_message(ctx, ctx.me(), message);
            }
        }
        self.wake_at(ctx.now, "more to do");
    }

    fn wake_at(&mut self, at: Time, why: &'static str) {
        if self.wake.is_none_or(|(t, _)| at < t) {
            self.wake = Some((at, why));
        }
    }

    fn tell_launcher(&mut self, frame: ToLauncher) {
        if let Some(local) = &mut self.local {
            local.told(&frame);
        }
        if let Some(conn) = self.conn() {
            self.effects.push_back(Effect::ToLauncher { conn, frame });
        }
    }

    fn notice(&mut self, notice: Notice) {
        self.effects.push_back(Effect::Notice(notice));
    }

    pub(crate) fn on_launcher_frame(&mut self, ctx: &mut Ctx<'_>, frame: ToAgent) {
        self.on_launcher(ctx, frame);
    }

    pub(crate) fn on_store_event(&mut self, ctx: &mut Ctx<'_>, event: storelog::Event) {
        self.store_event(ctx, event);
        self.drive(ctx);
    }
}
