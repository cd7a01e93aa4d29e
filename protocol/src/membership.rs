//! Detects which of the watched peers are alive (R18): one core per agent. Never reads a clock, dials, or
//! pings by itself, and never decides a generation: it says what it believes of each peer, and
//! others weigh that.
//!
//! | state | because | ends with |
//! |---|---|---|
//! | alive | heard within half of `suspect_after` | silence, or a closed connection |
//! | suspect | silent for half of `suspect_after`, or the connection closed; under probe | being heard, two refusals, `suspect_after` |
//! | away | the agent does not answer, but its launcher's guard does | being heard, the guard going too, `agent_grace` |
//! | lost, confirmed | agent and guard both refused, twice; or its launcher has another agent | being heard |
//! | lost, unconfirmed | silence for `suspect_after`, or `agent_grace` over | being heard; asked once succeeded |
//!
//! Refusals need a live kernel on the peer's machine (or a gateway that lies), so they prove that
//! the processes are gone; silence proves nothing about the peer, only about the path.
//!
//! A peer is watched once for each guard: every job has a launcher of its own there, and what becomes
//! of one says nothing of another. Silence, connections and pings are the node's, and count for all.
//!
//! Silence is counted in time that this process was on time itself: when a call comes later than
//! it was due (the process was stopped, starved, or the machine suspended), the delay counts for no
//! peer, and after a long one every peer gets a whole fresh period.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;

use crate::ids::{LauncherId, NodeId};
use crate::record::WITNESSED_VOTERS;
use crate::spec::MAX_MEMBERS;
use crate::time::{Span, Time};

/// The most guards that one agent watches: those of eight of the largest jobs.
pub const MAX_WATCHED: usize = 8 * (MAX_MEMBERS + WITNESSED_VOTERS);

/// Pings of one peer that wait for their answer; older ones are forgotten.
const MAX_PINGS: usize = 16;

/// Lateness below this is the ordinary jitter of a scheduler.
const JITTER: Span = Span::from_millis(20);

/// Pings that are due within this time are sent together, so that a thousand peers do not wake the
/// agent a thousand times.
const TOGETHER: Span = Span::from_millis(10);

/// Where a job's launcher on a node listens, and which one it is. A witness has none.
pub type Guard = Option<(SocketAddr, LauncherId)>;

/// A watched peer: a node, as the home of one launcher.
type Key = (NodeId, Guard);

/// Periods. All of one job's agents should have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Between pings of one peer, and between probes of a silent one.
    pub ping_every: Span,
    /// Silence after which a peer is lost.
    pub suspect_after: Span,
    /// How long an agent may be away while its launcher's guard answers.
    pub agent_grace: Span,
    /// From a refused probe to the one that confirms it.
    pub probe_again: Span,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            ping_every: Span::from_millis(250),
            suspect_after: Span::from_secs(2),
            agent_grace: Span::from_secs(10),
            probe_again: Span::from_millis(25),
        }
    }
}

/// Result of a probe of one port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// By the one who was asked for: the agent by its identity, the guard by its launcher id.
    Answered,
    /// The connection was accepted, and nothing said: the kernel does that for a process that is
    /// stopped, or hangs.
    Mute,
    /// The connection was refused.
    Refused,
    /// No answer within the prober's time limit.
    Silent,
    /// Somebody else answers there: the address was taken over, so the one asked for is gone.
    Other,
}

impl Answer {
    /// The process that was asked for has ended.
    pub fn is_gone(self) -> bool {
        matches!(self, Answer::Refused | Answer::Other)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Watch a peer as the home of this launcher. `asks`: it is pinged all the time, for leases ride on
    /// the pings; others only when they have been silent for a while.
    Watch {
        node: NodeId,
        guard: Guard,
        asks: bool,
    },
    Unwatch {
        node: NodeId,
        guard: Guard,
    },
    Connected {
        node: NodeId,
    },
    /// The last connection to the peer closed.
    Disconnected {
        node: NodeId,
    },
    /// Any message arrived.
    Heard {
        node: NodeId,
    },
    Pong {
        node: NodeId,
        seq: u64,
    },
    Probed {
        node: NodeId,
        id: u64,
        agent: Answer,
        guard: Answer,
    },
    /// A launcher has another agent, and asks for a place there: it runs nothing for the peer. It finds its agent by
    /// one socket, so that of the peer has ended.
    Moved {
        launcher: LauncherId,
        to: NodeId,
    },
    /// Another agent has come in the peer's place: its host is there again, and refuses for what has ended on it.
    Succeeded {
        node: NodeId,
    },
    /// The peer said that it leaves, by this time of our clock.
    Leaving {
        node: NodeId,
        deadline: Time,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    Ping {
        node: NodeId,
        seq: u64,
    },
    /// Dial the peer's agent and its guard at the same time and report both as [`Event::Probed`];
    /// within a quarter of `suspect_after` at most, an open answer then being [`Answer::Silent`].
    Probe {
        node: NodeId,
        id: u64,
        guard: Guard,
    },
    /// The peer's state has changed. A peer starts as alive without a verdict.
    Verdict {
        node: NodeId,
        guard: Guard,
        state: State,
    },
}

/// Belief about a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Alive,
    /// `guarded`: it is mute, over a connection that stands, and the guard of its launcher answers.
    Suspect {
        guarded: bool,
    },
    Away {
        since: Time,
    },
    Lost {
        confirmed: bool,
    },
}

impl State {
    pub fn is_lost(self) -> bool {
        matches!(self, State::Lost { .. })
    }
}

/// Why an event was refused. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{MAX_WATCHED} launchers are watched already, the limit for one agent")]
    TooMany,
}

/// An agent's knowledge of a watched peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub state: State,
    pub connected: bool,
    /// Smoothed round trip (RFC 6298, section 2: one eighth of each new sample).
    pub rtt: Option<Span>,
    /// The deadline by which the peer said that it leaves.
    pub leaving: Option<Time>,
    /// When the last probe began that found its launcher there, and its agent away or stopped.
    pub alone: Option<Time>,
}

#[derive(Clone, Debug)]
struct Watched {
    peer: Peer,
    /// When it was last heard, moved on by the time in which this process did not listen.
    heard: Time,
    /// When its guard last answered while the agent was away; moved on likewise.
    guard_answered: Time,
    next_ping: Time,
    pings: VecDeque<(u64, Time)>,
    /// The probe under way, and when it began.
    probing: Option<(u64, Time)>,
    next_probe: Option<Time>,
    refusals: u8,
    guard_ok: bool,
    /// When the last connection closed; none since. Data that arrives now was under way before, so
    /// it does not end the suspicion: an answered probe or a new connection does.
    closed: Option<Time>,
    asks: bool,
    /// The launcher has another agent by now: that its guard answers says nothing of the peer.
    moved: bool,
    /// It was lost in silence, and is probed because another agent has come in its place.
    succeeded: bool,
    /// Where it stands in the list of what is due: never later than it is.
    listed: Time,
}

/// The failure detector of one agent.
#[derive(Clone, Debug)]
pub struct Membership {
    config: Config,
    /// The longest `suspect_after` that a peer keeps, as far as it has said. Its lease follows from that.
    longest: Span,
    peers: BTreeMap<Key, Watched>,
    /// When each is looked at again. A postponement meanwhile is noticed then.
    due: BTreeSet<(Time, Key)>,
    seq: u64,
    probes: u64,
    /// The last call: until then this process was not stopped.
    called: Time,
    effects: VecDeque<Effect>,
}

impl Membership {
    pub fn new(config: Config) -> Membership {
        Membership {
            config,
            longest: config.suspect_after,
            peers: BTreeMap::new(),
            due: BTreeSet::new(),
            seq: 0,
            probes: 0,
            called: Time::ZERO,
            effects: VecDeque::new(),
        }
    }

    /// A peer keeps this `suspect_after`.
    pub fn allow_for(&mut self, suspect_after: Span) {
        self.longest = self.longest.max(suspect_after);
    }

    /// `None` for a peer that is not watched as the home of this launcher.
    pub fn peer(&self, node: NodeId, guard: Guard) -> Option<Peer> {
        self.peers.get(&(node, guard)).map(|w| w.peer)
    }

    /// The beliefs about a node, one for each guard.
    pub fn peers_of(&self, node: NodeId) -> impl Iterator<Item = Peer> + '_ {
        let all = self.peers.range((node, None)..);
        all.take_while(move |((n, _), _)| *n == node)
            .map(|(_, w)| w.peer)
    }

    fn keys_of(&self, node: NodeId) -> Vec<Key> {
        let all = self.peers.range((node, None)..).map(|(key, _)| *key);
        all.take_while(|(n, _)| *n == node).collect()
    }

    /// Events about peers that are not watched change nothing.
    pub fn handle(&mut self, event: Event, now: Time) -> Result<(), Error> {
        self.forgive(now);
        let node = match event {
            Event::Watch { node, guard, asks } => {
                return self.watch((node, guard), asks, now);
            }
            Event::Unwatch { node, guard } => {
                if let Some(w) = self.peers.remove(&(node, guard)) {
                    self.due.remove(&(w.listed, (node, guard)));
                }
                return Ok(());
            }
            Event::Connected { node }
            | Event::Disconnected { node }
            | Event::Heard { node }
            | Event::Pong { node, .. }
            | Event::Probed { node, .. }
            | Event::Succeeded { node }
            | Event::Leaving { node, .. } => node,
            Event::Moved { launcher, to } => {
                self.moved(launcher, to);
                return Ok(());
            }
        };
        for key in self.keys_of(node) {
            self.tell(key, &event, now);
            self.list(key);
        }
        Ok(())
    }

    /// Applies an event of a node to one peer that is watched there.
    fn tell(&mut self, key: Key, event: &Event, now: Time) {
        let Some(w) = self.peers.get_mut(&key) else {
            return;
        };
        match event {
            Event::Connected { .. } => {
                w.peer.connected = true;
                w.closed = None;
                w.moved = false;
                // Its identity was proven: the agent itself answered.
                self.heard(key, now);
            }
            Event::Disconnected { .. } => self.disconnected(key, now),
            Event::Heard { .. } => self.heard(key, now),
            Event::Pong { seq, .. } => {
                w.pong(*seq, now);
                self.heard(key, now);
            }
            Event::Probed {
                id, agent, guard, ..
            } => self.probed(key, *id, *agent, *guard, now),
            Event::Succeeded { .. } => self.succeeded(key, now),
            Event::Leaving { deadline, .. } => {
                w.peer.leaving = Some(*deadline);
                self.heard(key, now);
            }
            Event::Watch { .. } | Event::Unwatch { .. } | Event::Moved { .. } => {}
        }
    }

    fn moved(&mut self, launcher: LauncherId, to: NodeId) {
        let was = |((node, guard), w): &(&Key, &Watched)| {
            *node != to && !w.peer.connected && guard.is_some_and(|(_, l)| l == launcher)
        };
        let keys: Vec<Key> = self.peers.iter().filter(was).map(|(key, _)| *key).collect();
        for key in keys {
            if let Some(w) = self.peers.get_mut(&key) {
                w.moved = true;
            }
            self.set(key, State::Lost { confirmed: true });
        }
    }

    pub fn handle_timeout(&mut self, now: Time) {
        self.forgive(now);
        let mut keys = Vec::new();
        while let Some((at, key)) = self.due.first().copied()
            && at <= now + TOGETHER
        {
            self.due.pop_first();
            if let Some(w) = self.peers.get_mut(&key) {
                w.listed = NEVER;
            }
            keys.push(key);
        }
        for key in keys {
            self.judge(key, now);
            self.probe_if_due(key, now);
            self.ping_if_due(key, now + TOGETHER, now);
            self.list(key);
        }
    }

    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        let (at, _) = self.due.first()?;
        Some((*at, "look at a peer"))
    }

    /// Has the timer see to it that the peer is looked at in time.
    fn list(&mut self, key: Key) {
        let Some(w) = self.peers.get_mut(&key) else {
            return;
        };
        let at = w.due(&self.config);
        if at < w.listed {
            self.due.remove(&(w.listed, key));
            self.due.insert((at, key));
            w.listed = at;
        }
    }

    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// Takes the time in which this process did not listen out of every peer's silence.
    fn forgive(&mut self, now: Time) {
        let late = match self.poll_timeout() {
            Some((due, _)) => now.since(due.max(self.called)),
            None => Span::ZERO,
        };
        self.called = self.called.max(now);
        if late <= JITTER {
            return;
        }
        let long = late.0 >= self.config.suspect_after.0 / 4;
        let keys: Vec<Key> = self.peers.keys().copied().collect();
        for w in self.peers.values_mut() {
            if let State::Away { since } = &mut w.peer.state {
                *since += late;
            }
            for at in [&mut w.heard, &mut w.guard_answered] {
                *at = if long { now } else { (*at + late).min(now) };
            }
            if long {
                // An answer from before the gap says little about now.
                w.refusals = 0;
                w.pings.clear();
                if w.probing.take().is_some() {
                    w.next_probe = Some(now);
                }
            }
        }
        for key in keys {
            self.list(key);
        }
    }

    fn watch(&mut self, key: Key, asks: bool, now: Time) -> Result<(), Error> {
        if let Some(w) = self.peers.get_mut(&key) {
            w.asks = asks;
            w.next_ping = w.next_ping.min(now + self.config.ping_every);
            self.list(key);
            return Ok(());
        }
        if self.peers.len() >= MAX_WATCHED {
            return Err(Error::TooMany);
        }
        // What is known of the node holds for each launcher there.
        let other = self.peers_of(key.0).next();
        let peer = Peer {
            state: State::Alive,
            connected: other.is_some_and(|p| p.connected),
            rtt: other.and_then(|p| p.rtt),
            leaving: None,
            alone: None,
        };
        let watched = Watched {
            peer,
            heard: now,
            guard_answered: now,
            next_ping: now,
            pings: VecDeque::new(),
            probing: None,
            // One that is there connects at once.
            next_probe: (!peer.connected && key.1.is_some())
                .then_some(now + self.config.ping_every),
            refusals: 0,
            guard_ok: false,
            closed: None,
            asks,
            moved: false,
            succeeded: false,
            listed: NEVER,
        };
        self.peers.insert(key, watched);
        self.ping_if_due(key, now, now);
        self.list(key);
        Ok(())
    }

    fn heard(&mut self, key: Key, now: Time) {
        if let Some(w) = self.peers.get_mut(&key) {
            w.heard = now;
            if w.closed.is_none() || w.peer.state.is_lost() {
                w.closed = None;
                w.moved = false;
                if w.peer.state.is_lost() {
                    // It is called as often as any other again.
                    w.next_ping = now;
                }
                w.calm();
                self.set(key, State::Alive);
            }
        }
    }

    fn disconnected(&mut self, key: Key, now: Time) {
        let Some(w) = self.peers.get_mut(&key) else {
            return;
        };
        w.peer.connected = false;
        w.closed = Some(now);
        if w.peer.state.is_lost() || matches!(w.peer.state, State::Away { .. }) {
            return;
        }
        w.calm();
        w.next_probe = Some(now);
        self.set(key, SUSPECT);
        self.probe_if_due(key, now);
    }

    /// Silence proved nothing about its launcher, which may be asked now.
    fn succeeded(&mut self, key: Key, now: Time) {
        if let Some(w) = self.peers.get_mut(&key)
            && w.peer.state == (State::Lost { confirmed: false })
        {
            w.calm();
            w.succeeded = true;
            w.next_probe = Some(now);
            self.probe_if_due(key, now);
        }
    }

    fn probed(&mut self, key: Key, id: u64, agent: Answer, guard: Answer, now: Time) {
        let (config, longest) = (self.config, self.longest);
        let Some(w) = self.peers.get_mut(&key) else {
            return;
        };
        let Some((_, began)) = w.probing.take_if(|(probe, _)| *probe == id) else {
            return;
        };
        let asked = w.succeeded || w.may_hold_lease(longest, now);
        if w.moved || w.peer.state.is_lost() && !asked {
            return w.calm();
        }
        w.guard_ok = guard == Answer::Answered;
        if w.guard_ok {
            w.guard_answered = now;
        }
        let away = matches!(w.peer.state, State::Away { .. });
        // A launcher ends its workers before it stops to answer, also where its agent is only stopped. A witness has
        // none.
        let stuck = agent == Answer::Mute && key.1.is_some();
        if guard.is_gone() && (agent.is_gone() || stuck) {
            w.refusals += 1;
            w.next_probe = Some(now + config.probe_again);
            if w.refusals >= 2 {
                self.set(key, State::Lost { confirmed: true });
            }
            return;
        }
        if agent == Answer::Answered && w.closed.is_some_and(|at| w.heard > at) {
            w.closed = None;
            w.heard = now;
            w.calm();
            return self.set(key, State::Alive);
        }
        (w.refusals, w.succeeded) = (0, false);
        // A process that is just dying still accepts for a moment: look again soon.
        let dying = w.closed.is_some_and(|at| now.since(at) < config.ping_every);
        let pause = if dying {
            config.probe_again
        } else {
            config.ping_every
        };
        w.next_probe = Some(now + pause);
        // Only an agent that is stopped is mute. One that answers votes, and so may one behind a path that is
        // cut.
        let guarded = w.guard_ok && w.closed.is_none() && agent == Answer::Mute;
        let left = w.guard_ok && agent.is_gone();
        if left || guarded {
            w.peer.alone = Some(began);
        }
        // Of a lost one the launcher was stopped as well, and goes on: without its agent it may do so for long.
        if left && !away || guarded && w.peer.state.is_lost() {
            self.set(key, State::Away { since: now });
        } else if matches!(w.peer.state, State::Suspect { .. }) {
            self.set(key, State::Suspect { guarded });
        }
    }

    /// Judges a peer by the time that has passed.
    fn judge(&mut self, key: Key, now: Time) {
        let Some(w) = self.peers.get_mut(&key) else {
            return;
        };
        let Some((due, next)) = w.verdict_due(&self.config) else {
            return;
        };
        if now < due {
            return;
        }
        let next = match next {
            State::Suspect { .. } => {
                w.next_probe = Some(now);
                w.guard_ok = false;
                next
            }
            // The launcher is there and the path is open: only its agent is stuck.
            State::Lost { .. } if matches!(w.peer.state, State::Suspect { .. }) && w.guard_ok => {
                State::Away { since: now }
            }
            // As long as a lease that it has may last it is looked whether its launcher is there all the same.
            State::Lost { .. } if w.may_hold_lease(self.longest, now) => {
                w.next_probe = w.next_probe.or(w.probing.is_none().then_some(now));
                next
            }
            other => {
                w.calm();
                other
            }
        };
        self.set(key, next);
    }

    fn set(&mut self, key: Key, state: State) {
        let Some(w) = self.peers.get_mut(&key) else {
            return;
        };
        if w.peer.state == state {
            return;
        }
        w.peer.state = state;
        if state == (State::Lost { confirmed: true }) {
            w.peer.alone = None;
            w.calm();
        }
        let (node, guard) = key;
        self.effects
            .push_back(Effect::Verdict { node, guard, state });
    }

    fn probe_if_due(&mut self, key: Key, now: Time) {
        let Some(w) = self.peers.get_mut(&key) else {
            return;
        };
        if w.probing.is_none() && w.next_probe.is_some_and(|at| now >= at) {
            self.probes += 1;
            let (id, (node, guard)) = (self.probes, key);
            w.probing = Some((id, now));
            w.next_probe = None;
            self.effects.push_back(Effect::Probe { node, id, guard });
        }
    }

    /// Pings a peer whose ping is due by then.
    fn ping_if_due(&mut self, key: Key, by: Time, now: Time) {
        let config = self.config;
        let Some(w) = self.peers.get_mut(&key) else {
            return;
        };
        if by < w.next_ping {
            return;
        }
        let quiet = w.heard + Span(config.ping_every.0 / 2 * 3);
        if !w.asks && w.peer.state == State::Alive && by < quiet {
            // It pings this node, or has just begun to be watched.
            w.next_ping = quiet;
            return;
        }
        self.seq += 1;
        let seq = self.seq;
        // One ping serves all that is watched on the node.
        for key in self.keys_of(key.0) {
            let Some(w) = self.peers.get_mut(&key) else {
                continue;
            };
            // A lost peer is still called now and then: else two that lost each other stay so.
            let every = match w.peer.state.is_lost() {
                true => config.suspect_after,
                false => config.ping_every,
            };
            w.next_ping = now + every;
            if w.pings.len() == MAX_PINGS {
                w.pings.pop_front();
            }
            w.pings.push_back((seq, now));
            self.list(key);
        }
        self.effects.push_back(Effect::Ping { node: key.0, seq });
    }
}

/// Of a peer whose probe is under way.
const SUSPECT: State = State::Suspect { guarded: false };

/// Of a peer that is not in the list of what is due.
const NEVER: Time = Time(u64::MAX);

impl Watched {
    /// Whether some voter may have acknowledged its lease after it was heard here last, by the longest `suspect_after`
    /// that it may keep.
    fn may_hold_lease(&self, longest: Span, now: Time) -> bool {
        now < self.heard + longest.times(2)
    }

    /// Ends a suspicion's probes.
    fn calm(&mut self) {
        self.probing = None;
        self.next_probe = None;
        self.refusals = 0;
        self.guard_ok = false;
        self.succeeded = false;
    }

    fn pong(&mut self, seq: u64, now: Time) {
        let Some(at) = self.pings.iter().position(|(s, _)| *s == seq) else {
            return;
        };
        let sample = now.since(self.pings[at].1);
        self.pings.drain(..=at);
        self.peer.rtt = Some(match self.peer.rtt {
            None => sample,
            Some(rtt) => Span(rtt.0 - rtt.0 / 8 + sample.0 / 8),
        });
    }

    /// The next state that comes by time alone, and when.
    fn verdict_due(&self, config: &Config) -> Option<(Time, State)> {
        let lost = State::Lost { confirmed: false };
        match self.peer.state {
            State::Alive => Some((self.heard + Span(config.suspect_after.0 / 2), SUSPECT)),
            State::Suspect { .. } => Some((self.heard + config.suspect_after, lost)),
            State::Away { since } => {
                let guard = self.guard_answered + config.suspect_after;
                let heard = self.heard + config.suspect_after;
                Some((guard.min(since + config.agent_grace).max(heard), lost))
            }
            State::Lost { .. } => None,
        }
    }

    fn due(&self, config: &Config) -> Time {
        let verdict = self.verdict_due(config).map(|(at, _)| at);
        let probe = self.next_probe.filter(|_| self.probing.is_none());
        let all = [verdict, probe].into_iter().flatten();
        all.fold(self.next_ping, Time::min)
    }
}

#[cfg(test)]
mod tests;
