//! The core of an agent: peers, the failure detector, and one [`Job`] for each job that concerns
//! this node. The daemon and the simulation drive this type and nothing else.

mod api;
mod greetings;
mod heartbeats;
mod launchers;
mod past;
mod restored;
mod room;
#[cfg(test)]
mod scripted;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};

pub use api::{Config, ConnId, Effect, Event, Flaws, Notice, Phases, TIMED_OUT, Told};
pub use past::Past;
pub use restored::Restored;

use crate::ids::{Digest, JobKey, LauncherId, NodeId};
use crate::job::{Ctx, Durable, Job};
use crate::membership::{self, Guard, Membership, State};
use crate::peers::{Peers, View};
use crate::rng::Rng;
use crate::time::{Span, Time};
use crate::wire::{Advert, JobMessage, Leave, MAX_JOBS, Message};

/// Between heartbeats that a start waits for.
const URGENT: Span = Span::from_millis(20);
/// How long a peer's hello may take before it is asked for again.
const HELLO_WAIT: Span = Span::from_millis(250);
/// Between the hellos of an agent that leads a generation: each may be lost, and no other message
/// tells two groups of a job of each other.
const GREET_EVERY: Span = Span::from_secs(10);
/// Jobs whose end is remembered.
const MAX_ENDED: usize = MAX_JOBS / 2;
/// Jobs that are kept for launchers that may come back, after all were lost.
const MAX_DESERTED: usize = MAX_JOBS / 2;
/// Heartbeats under way that are remembered, per peer.
const MAX_SENT: usize = 32;

/// Why an event was refused. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{MAX_JOBS} jobs are known on this agent, the limit; end some first")]
    TooManyJobs,
    #[error("a frame from a connection that has not registered a launcher")]
    NotRegistered,
    #[error("{0}")]
    Refused(String),
    #[error("stored state of job {0} cannot be read: {1}")]
    Stored(String, crate::codec::CodecError),
}

/// State that an agent finds again when it starts.
#[derive(Clone, Debug, Default)]
pub struct Stored {
    /// The state that [`Effect::Persist`] last made durable, for each job.
    pub jobs: Vec<(JobKey, Vec<u8>)>,
    /// The bytes that came with the last [`Effect::Forget`]; none where there was none.
    pub past: Vec<u8>,
}

impl From<Vec<(JobKey, Vec<u8>)>> for Stored {
    fn from(jobs: Vec<(JobKey, Vec<u8>)>) -> Stored {
        let past = Vec::new();
        Stored { jobs, past }
    }
}

/// The guard of a job's launcher on each node that it has watched, and whether that node is asked for a lease.
type Guards = BTreeMap<NodeId, (Guard, bool)>;

/// Nodes that a job has watched, and the findings.
#[derive(Clone, Debug, Default)]
struct Watches {
    guards: Guards,
    /// Those that are not alive.
    unwell: BTreeMap<NodeId, State>,
    /// Since when their agents are away.
    away: BTreeMap<NodeId, Time>,
}

/// Of a job that has nobody watched.
static UNWATCHED: Watches = Watches {
    guards: BTreeMap::new(),
    unwell: BTreeMap::new(),
    away: BTreeMap::new(),
};

impl Watches {
    fn view<'a>(of: Option<&'a Watches>, all: &'a Peers, detector: &'a Membership) -> View<'a> {
        let watches = of.unwrap_or(&UNWATCHED);
        View {
            all,
            unwell: &watches.unwell,
            away: &watches.away,
            detector,
            guards: &watches.guards,
        }
    }
}

/// The core of one agent.
#[derive(Clone, Debug)]
pub struct Agent {
    cfg: Config,
    rng: Rng,
    peers: Peers,
    detector: Membership,
    jobs: BTreeMap<JobKey, Job>,
    past: Past,
    /// The highest round that a job used in this run which is forgotten by now.
    used_round: u32,
    conns: BTreeMap<ConnId, JobKey>,
    effects: VecDeque<Effect>,
    watching: BTreeMap<JobKey, Watches>,
    /// The heads for which `watching` and the last greeting hold, and whatever else these follow from.
    heads: BTreeMap<JobKey, Greeted>,
    /// Peers that heard from here that this node belongs to a running generation. They hear when it no longer does.
    told_to_belong: BTreeMap<JobKey, BTreeSet<NodeId>>,
    sent: BTreeMap<NodeId, VecDeque<(u64, Time)>>,
    seq: u64,
    urgent_at: Time,
    /// The last event, and the last long time without any.
    called: Time,
    quiet: (Time, Time),
    /// When to look again for connected peers that have not said hello.
    greet_at: Option<Time>,
    /// When all are greeted again, while a generation is led from here.
    greet_again: Option<Time>,
    draining: Option<(Leave, Time)>,
    /// The errno of the newest write that the state directory refused, and until when that is so without news: each
    /// is tried again.
    unstored: Option<(i32, Time)>,
    /// Some job may have changed since all were looked through.
    touched: bool,
}

/// Facts about a job that others were told, and those for which its nodes are watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Greeted {
    head: Digest,
    /// The life of the job to whose running generation this node belongs.
    belongs: Option<Digest>,
    watches_for: (bool, bool, Digest, Digest),
    deserted: bool,
    /// Whether workers of it had been started, where no launcher of it is left.
    left_behind: Option<bool>,
    gathers: bool,
    unresponsive: bool,
    /// It is led from here in place of its first member: nobody else tells those without a part.
    stands_in: bool,
}

impl Agent {
    /// # Errors
    /// The stored state cannot be read, or the configured times do not fit together.
    pub fn new(cfg: Config, stored: impl Into<Stored>, now: Time) -> Result<Agent, Error> {
        // Else a stranger may start a job anew whose workers still run, as their agents are away.
        if cfg.orphan_after < Span(cfg.agent_grace.0.saturating_add(cfg.suspect_after.0)) {
            return Err(Error::Refused(format!(
                "orphan_after ({}) must be at least agent_grace ({}) and suspect_after ({}) together",
                cfg.orphan_after, cfg.agent_grace, cfg.suspect_after
            )));
        }
        let stored = stored.into();
        let past = Past::decode(&stored.past).map_err(|e| Error::Stored("past".into(), e))?;
        let mut detector = Membership::new(membership::Config {
            suspect_after: cfg.suspect_after,
            agent_grace: cfg.agent_grace,
            ping_every: Span(cfg.suspect_after.0 / 8),
            ..membership::Config::default()
        });
        let mut jobs = BTreeMap::new();
        for (key, bytes) in stored.jobs {
            let durable = Durable::decode(&bytes).map_err(|e| Error::Stored(key.to_string(), e))?;
            detector.allow_for(durable.timeouts.suspect_after);
            jobs.insert(key, Job::restore(durable));
        }
        let mut agent = Agent {
            rng: Rng::new(cfg.seed),
            peers: Peers {
                me: Some((cfg.node, cfg.state, cfg.host.clone())),
                ..Peers::default()
            },
            cfg,
            detector,
            jobs,
            past,
            used_round: 0,
            conns: BTreeMap::new(),
            effects: VecDeque::new(),
            watching: BTreeMap::new(),
            heads: BTreeMap::new(),
            told_to_belong: BTreeMap::new(),
            // Ping numbers of different boots must not be taken for each other.
            seq: 0,
            sent: BTreeMap::new(),
            urgent_at: Time::ZERO,
            called: now,
            quiet: (now, now),
            greet_at: None,
            greet_again: None,
            draining: None,
            unstored: None,
            touched: true,
        };
        agent.seq = agent.rng.next_u64() >> 16;
        agent.settle(now);
        Ok(agent)
    }

    // ---- what can be seen ----

    pub fn config(&self) -> &Config {
        &self.cfg
    }

    pub fn job(&self, key: &JobKey) -> Option<&Job> {
        self.jobs.get(key)
    }

    pub fn jobs(&self) -> impl Iterator<Item = &Job> {
        self.jobs.values()
    }

    /// Jobs of which this agent knows nothing but that launchers wait for others at a connected one.
    pub fn gathering_elsewhere(&self) -> Vec<Job> {
        let listed = |key: &JobKey| self.jobs.get(key).is_some_and(Job::is_listed);
        let adverts = self.peers.adverts().map(|(_, advert)| advert);
        let gathering = adverts.filter(|a| a.is_gathering() && !listed(&a.key));
        let keys: BTreeSet<&JobKey> = gathering.map(|a| &a.key).collect();
        keys.into_iter()
            .map(|key| Job::new(key.clone(), 0))
            .collect()
    }

    pub fn peers(&self) -> &Peers {
        &self.peers
    }

    /// Takes in the names of hosts from an earlier run.
    pub fn remember_hosts(&mut self, hosts: impl IntoIterator<Item = (NodeId, String)>) {
        self.peers.hosts.extend(hosts);
    }

    /// The smoothed round trip to a watched peer.
    pub fn rtt(&self, node: NodeId) -> Option<Span> {
        self.detector.peers_of(node).find_map(|p| p.rtt)
    }

    /// For how long the workers of a launcher here may go on if it does nothing.
    pub fn lease_of(&self, launcher: LauncherId, now: Time) -> Span {
        let mut jobs = self.jobs.values();
        let job = jobs.find(|job| job.launcher() == Some(launcher));
        job.map_or(Span::ZERO, |job| job.lease_left(&self.cfg, now))
    }

    /// The errno of the write that this node's state directory refuses just now.
    pub fn unstored(&self) -> Option<i32> {
        self.unstored.map(|(errno, _)| errno)
    }

    pub fn is_draining(&self) -> bool {
        self.draining.is_some()
    }

    /// Whether all that the jobs wanted done is done, and no write is under way.
    pub fn is_carried_out(&self) -> bool {
        self.jobs.values().all(Job::is_carried_out)
    }

    /// Whether a drain still waits for launchers here. Its time over, it waits for none that does not answer.
    pub fn is_drain_awaited(&self, now: Time) -> bool {
        let over = self
            .draining
            .as_ref()
            .is_some_and(|(_, until)| now >= *until);
        let mut jobs = self.jobs.values().filter(|job| job.launcher().is_some());
        jobs.any(|job| !(over && job.is_unresponsive()))
    }

    // ---- the verbs of every core ----

    pub fn poll_effect(&mut self) -> Option<Effect> {
        if let Some(effect) = self.effects.pop_front() {
            return Some(effect);
        }
        let now = self.called;
        self.jobs.values_mut().find_map(|job| job.poll_effect(now))
    }

    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        let urgent = self
            .jobs
            .values()
            .any(|j| j.lease_urgent() || j.awaits_answer())
            .then_some((self.urgent_at, "ask for a lease, or a word"));
        let greet = self.greet_at.map(|at| (at, "a peer without a hello"));
        self.jobs
            .values()
            .filter_map(Job::poll_timeout)
            .chain(self.detector.poll_timeout())
            .chain(urgent)
            .chain(greet)
            .chain(self.greet_again.map(|at| (at, "greet again")))
            .chain(self.unstored.map(|(_, at)| (at, "writes again")))
            .chain(
                self.slow_write_at()
                    .map(|at| (at, "a write that takes long")),
            )
            .min_by_key(|(at, _)| *at)
    }

    /// Notes when this process may have been stopped: then nothing that was due was done.
    fn notice_quiet(&mut self, now: Time) {
        if now.since(self.called) >= Span(self.cfg.suspect_after.0 / 4) {
            self.quiet = (self.called, now);
        }
        self.called = self.called.max(now);
    }

    pub fn handle_timeout(&mut self, now: Time) {
        self.notice_quiet(now);
        self.detector.handle_timeout(now);
        self.pump_detector(now);
        let due: Vec<JobKey> = self
            .jobs
            .iter()
            .filter(|(_, j)| j.poll_timeout().is_some_and(|(at, _)| at <= now))
            .map(|(k, _)| k.clone())
            .collect();
        for key in due {
            self.with_job(&key, now, Job::drive);
        }
        self.ask_hellos(now);
        self.look_at_writes(now);
        self.settle(now);
    }

    pub fn handle(&mut self, event: Event, now: Time) -> Result<(), Error> {
        self.notice_quiet(now);
        let result = self.apply(event, now);
        self.settle(now);
        result
    }

    fn apply(&mut self, event: Event, now: Time) -> Result<(), Error> {
        match event {
            Event::Connected {
                node,
                addr,
                observed,
            } => {
                let peer = self.peers.map.entry(node).or_default();
                peer.connected = true;
                peer.addr = Some(addr);
                peer.observed = Some(observed);
                peer.seen = now;
                peer.leaving = None;
                peer.greeted = None;
                if let Some(before) = &mut peer.hello {
                    before.unstored = None;
                }
                peer.hello_due = now + HELLO_WAIT;
                self.greet_at.get_or_insert(now + HELLO_WAIT);
                self.detect(membership::Event::Connected { node }, now);
                self.greet([node], |_| true);
                if let Some((leave, until)) = self.draining.clone() {
                    let message = leaving(&leave, until, now);
                    self.send(node, message);
                }
                self.link_changed(node, now);
            }
            Event::Disconnected { node } => {
                if let Some(peer) = self.peers.map.get_mut(&node) {
                    peer.connected = false;
                    peer.seen = now;
                }
                self.sent.remove(&node);
                self.peers.prune();
                self.detect(membership::Event::Disconnected { node }, now);
                if self.peers.has_successor(node) {
                    // That one came before the connection was known to be dead.
                    self.detect(membership::Event::Succeeded { node }, now);
                }
                self.link_changed(node, now);
            }
            Event::Message { from, message } => {
                if let Some(peer) = self.peers.map.get_mut(&from) {
                    peer.seen = now;
                }
                if !matches!(message, Message::Hello(_)) {
                    self.ask_hello(from, now);
                }
                self.detect(membership::Event::Heard { node: from }, now);
                self.on_message(from, message, now)?;
            }
            Event::Probed {
                node,
                id,
                agent,
                guard,
            } => {
                if node == self.cfg.node {
                    return self.looked_for_launcher(id, guard, now);
                }
                let peers = &self.peers;
                let agent = match peers.has_successor(node) || peers.has_lost_address(node) {
                    true => membership::Answer::Other,
                    false => agent,
                };
                let event = membership::Event::Probed {
                    node,
                    id,
                    agent,
                    guard,
                };
                self.detect(event, now);
            }
            Event::Launcher { conn, owner, frame } => self.on_frame(conn, owner, frame, now)?,
            Event::LauncherGone { conn, guard } => {
                let key = self.conns.get(&conn).cloned();
                if guard.is_gone() {
                    self.conns.remove(&conn);
                }
                if let Some(key) = key {
                    self.with_job(&key, now, |job, ctx| {
                        job.launcher_gone(ctx, conn, guard);
                        job.drive(ctx);
                    });
                }
            }
            Event::Store { key, event } => {
                self.with_job(&key, now, |job, ctx| job.on_store_event(ctx, event));
            }
            Event::Beacon { key, value } => self.with_job(&key, now, |job, ctx| {
                job.on_beacon(ctx, value);
                job.drive(ctx);
            }),
            Event::Persisted { key } => {
                if let Some(job) = self.jobs.get_mut(&key) {
                    job.persisted(now);
                    // One that is over can be forgotten by now; else nothing changes that others see.
                    self.touched |= job.is_idle();
                }
            }
            Event::PersistFailed { key, errno } => {
                self.is_unstored(errno, now);
                self.with_job(&key, now, Job::persist_failed);
            }
            Event::Drain { grace_ms, reason } => self.drain(Leave { grace_ms, reason }, now),
            Event::Commit {
                key,
                step,
                manifest,
            } => self.with_job(&key, now, |job, ctx| {
                let _asked = job.commit(ctx, step, manifest);
                job.drive(ctx);
            }),
        }
        Ok(())
    }

    fn on_message(&mut self, from: NodeId, message: Message, now: Time) -> Result<(), Error> {
        match message {
            Message::Hello(hello) => self.on_hello(from, hello, now),
            Message::Ping { seq, leases } => {
                let granted = self.grant(from, &leases, now);
                self.send(from, Message::Pong { seq, granted });
            }
            Message::Pong { seq, granted } => {
                self.detect(membership::Event::Pong { node: from, seq }, now);
                let sent = self.sent.get(&from).and_then(|s| {
                    let found = s.iter().find(|(n, _)| *n == seq);
                    found.map(|(_, at)| *at)
                });
                if let Some(sent) = sent {
                    self.granted(from, &granted, sent, now);
                }
                self.is_there(from, now);
            }
            Message::Leaving { grace_ms, reason } => {
                let until = now + Span::from_millis(grace_ms.into());
                if let Some(peer) = self.peers.map.get_mut(&from) {
                    peer.leaving = Some((Leave { grace_ms, reason }, until));
                }
                let deadline = until;
                self.detect(
                    membership::Event::Leaving {
                        node: from,
                        deadline,
                    },
                    now,
                );
                self.nudge_all(now);
            }
            Message::DrainAsk { grace_ms, reason } => {
                self.drain(Leave { grace_ms, reason }, now);
            }
            Message::HelloAsk => self.greet([from], |_| true),
            Message::Job { key, body } => self.on_job_message(from, key, *body, now)?,
        }
        Ok(())
    }

    fn on_job_message(
        &mut self,
        from: NodeId,
        key: JobKey,
        body: JobMessage,
        now: Time,
    ) -> Result<(), Error> {
        if key.cluster != self.cfg.cluster {
            return Err(Error::Refused(format!(
                "a message of cluster {} in cluster {}",
                key.cluster, self.cfg.cluster
            )));
        }
        if !self.jobs.contains_key(&key) {
            if self.is_full() {
                return Err(Error::TooManyJobs);
            }
            self.add_job(&key);
        }
        let has = match &body {
            // Else the leader passes it on.
            JobMessage::Ticket(ticket) if ticket.member.node == from => {
                self.is_at(ticket.member.launcher, from, now);
                Some(ticket.member.state)
            }
            JobMessage::ClaimBirth { record } if record.members.len() <= crate::wire::MAX_LIST => {
                // The one that claims it goes on with what its store says is running, if nothing of that is left.
                for member in &record.members {
                    self.is_at(member.launcher, member.node, now);
                }
                None
            }
            // Only a member that has its state says what it does.
            JobMessage::Status(status) if status.seq > 0 => {
                let job = self.jobs.get(&key);
                job.and_then(|j| j.member_state(&status.digest, from))
            }
            _ => None,
        };
        if let Some(state) = has {
            self.doubt_hello(from, state, now);
        }
        self.with_job(&key, now, |job, ctx| job.receive(ctx, from, body));
        Ok(())
    }

    fn on_advert(&mut self, from: NodeId, advert: &Advert, now: Time) {
        if !self.jobs.contains_key(&advert.key) {
            // That it is over was forgotten here but for this, and perhaps everywhere: who slept through it may stop
            // waiting.
            let over = self.past.over(&advert.lineage, advert.number);
            // An end has no members, and so no leader: those who hold it have nothing to hear.
            let goes_on = advert.belongs || advert.leader.is_some();
            if let Some(up_to) = over.filter(|up_to| goes_on || advert.number < *up_to) {
                let (key, lineage) = (advert.key.clone(), advert.lineage);
                let body = Box::new(JobMessage::Superseded { lineage, up_to });
                self.send(from, Message::Job { key, body });
            }
        } else if !advert.is_gathering() {
            self.with_job(&advert.key, now, |job, ctx| {
                job.on_advert(ctx, from, advert);
                job.nudge(ctx);
            });
        }
    }

    /// This node goes: everybody is told, and its part of every job ends in good order.
    fn drain(&mut self, leave: Leave, now: Time) {
        let until = now + Span::from_millis(leave.grace_ms.into());
        self.draining = Some((leave.clone(), until));
        let message = leaving(&leave, until, now);
        for node in self.peers.connected_nodes().collect::<Vec<_>>() {
            self.send(node, message.clone());
        }
        for key in self.jobs.keys().cloned().collect::<Vec<_>>() {
            let leave = leave.clone();
            self.with_job(&key, now, |job, ctx| {
                job.leave(ctx, leave);
                job.drive(ctx);
            });
        }
    }

    // ---- between the jobs and the rest ----

    fn with_job(&mut self, key: &JobKey, now: Time, act: impl FnOnce(&mut Job, &mut Ctx<'_>)) {
        if let Some(job) = self.jobs.get_mut(key) {
            self.touched = true;
            let watches = self.watching.get(key);
            let mut ctx = Ctx {
                cfg: &self.cfg,
                peers: Watches::view(watches, &self.peers, &self.detector),
                past: &self.past,
                rng: &mut self.rng,
                now,
                quiet: self.quiet,
                unstored: self.unstored.is_some(),
                draining: self.draining.is_some(),
            };
            act(job, &mut ctx);
        }
    }

    /// The other agents as the job sees them.
    fn view(&self, key: &JobKey) -> View<'_> {
        Watches::view(self.watching.get(key), &self.peers, &self.detector)
    }

    fn link_changed(&mut self, node: NodeId, now: Time) {
        for job in self.jobs.values_mut() {
            job.link_changed(node);
        }
        self.nudge_all(now);
    }

    fn nudge_all(&mut self, now: Time) {
        for key in self.jobs.keys().cloned().collect::<Vec<_>>() {
            self.with_job(&key, now, Job::nudge);
        }
    }

    fn send(&mut self, to: NodeId, message: Message) {
        if self.peers.connected(to) {
            self.effects.push_back(Effect::Send { to, message });
        }
    }

    /// Follows up what changed: whom to watch, whom to greet anew, what to forget.
    fn settle(&mut self, now: Time) {
        let due = self.greet_again.is_some_and(|at| at <= now);
        if std::mem::take(&mut self.touched) || due {
            self.follow_jobs(due, now);
        }
        self.ping_urgent(now);
    }

    fn follow_jobs(&mut self, due: bool, now: Time) {
        let mut changed = false;
        let mut greet = false;
        let (mut over, mut hear) = (BTreeSet::new(), BTreeSet::new());
        let me = self.cfg.node;
        let mut forget = Vec::new();
        for (key, job) in &self.jobs {
            let digest = job.head().map_or(Digest::ZERO, |(_, d)| d);
            let now = Greeted {
                head: digest,
                belongs: job.belongs(&self.cfg),
                watches_for: job.watches_for(),
                deserted: job.says_deserted(me, &self.peers),
                left_behind: job
                    .is_left_behind(me, self.view(key))
                    .then(|| job.had_started(me)),
                gathers: job.gathers(),
                unresponsive: job.is_unresponsive(),
                stands_in: job.stands_in(me),
            };
            let was = self.heads.get(key);
            if was != Some(&now) {
                changed = true;
                // Only the leader greets anew, so that a change costs each agent one message.
                let led = job.head().is_some_and(|(r, _)| r.leader() == Some(me));
                greet |= led && was.is_none_or(|w| w.head != digest);
                // Nobody else sees that a job has no launcher left, or has one again.
                greet |= was.is_some_and(|w| w.deserted) != now.deserted;
                greet |= was.and_then(|w| w.left_behind) != now.left_behind;
                greet |= was.is_some_and(|w| w.gathers) != now.gathers;
                greet |= was.is_some_and(|w| w.unresponsive) != now.unresponsive;
                greet |= now.stands_in && was.is_none_or(|w| !w.stands_in);
                // That it is over nobody else tells those who take no part in it.
                let before = was.and_then(|w| w.belongs);
                if before.is_some() && before != now.belongs {
                    let told = self.told_to_belong.remove(key).unwrap_or_default();
                    let tells = |n: &NodeId| job.tells_of_end(me, *n);
                    let (hears, knows): (BTreeSet<_>, BTreeSet<_>) =
                        told.into_iter().partition(tells);
                    hear.extend(hears);
                    // These hear of the end of a later life, if they have no part in that.
                    self.told_to_belong.insert(key.clone(), knows);
                    over.insert(key.clone());
                }
                self.heads.insert(key.clone(), now);
            }
            if job.is_idle() && job.poll_timeout().is_none() {
                forget.push(key.clone());
            }
        }
        greet |= due;
        if changed || due {
            self.end_oldest_deserted(now);
        }
        if changed {
            self.rewatch(now);
        }
        // Other ends were told when they came: a peer that missed one is told once it speaks of the job.
        let is_news = |j: &Job| j.is_live() || j.gathers() || over.contains(j.key());
        if greet {
            self.greet_all(is_news);
            self.greet_again = None;
        } else if !hear.is_empty() {
            self.greet(hear, is_news);
        }
        if self.jobs.values().any(Job::is_led_here) {
            self.greet_again.get_or_insert(now + GREET_EVERY);
        } else {
            self.greet_again = None;
        }
        for key in forget {
            self.forget(&key);
        }
        self.forget_oldest();
    }
}

fn leaving(leave: &Leave, until: Time, now: Time) -> Message {
    let left = until.since(now).as_millis();
    Message::Leaving {
        grace_ms: u32::try_from(left).unwrap_or(u32::MAX),
        reason: leave.reason.clone(),
    }
}
