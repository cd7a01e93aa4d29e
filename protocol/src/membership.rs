//! Who of the watched peers is alive (R18): one core per agent. Never reads a clock, dials, or
//! pings by itself, and never decides a generation: it says what it believes of each peer, and
//! others weigh that.
//!
//! | state | because | ends with |
//! |---|---|---|
//! | alive | heard within half of `suspect_after` | silence, or a closed connection |
//! | suspect | silent for half of `suspect_after`, or the connection closed; under probe | being heard, two refusals, `suspect_after` |
//! | away | the agent does not answer, but its launcher's guard does | being heard, the guard going too, `agent_grace` |
//! | lost, confirmed | agent and guard both refused, twice | being heard |
//! | lost, unconfirmed | silence for `suspect_after`, or `agent_grace` over | being heard |
//!
//! Refusals need a live kernel on the peer's machine (or a gateway that lies), so they prove that
//! the processes are gone; silence proves nothing about the peer, only about the path.
//!
//! Silence is counted in time that this process was on time itself: when a call comes later than
//! it was due (the process was stopped, starved, or the machine suspended), the delay counts for no
//! peer, and after a long one every peer gets a whole fresh period.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;

use crate::ids::NodeId;
use crate::record::WITNESSED_VOTERS;
use crate::spec::MAX_MEMBERS;
use crate::time::{Span, Time};

/// The most peers that one agent watches: everybody of the largest job.
pub const MAX_WATCHED: usize = MAX_MEMBERS + WITNESSED_VOTERS;

/// Pings of one peer that wait for their answer; older ones are forgotten.
const MAX_PINGS: usize = 16;

/// Lateness below this is the ordinary jitter of a scheduler.
const JITTER: Span = Span::from_millis(20);

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

/// What a probe of one port came to.
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
    /// Watch a peer. A watch on another guard than before starts afresh (another launcher).
    Watch {
        node: NodeId,
        guard: SocketAddr,
    },
    Unwatch {
        node: NodeId,
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
        guard: SocketAddr,
    },
    /// The peer's state has changed. A peer starts as alive without a verdict.
    Verdict {
        node: NodeId,
        state: State,
    },
}

/// What is believed of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Alive,
    Suspect,
    Away { since: Time },
    Lost { confirmed: bool },
}

impl State {
    pub fn is_lost(self) -> bool {
        matches!(self, State::Lost { .. })
    }
}

/// Why an event was refused. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("{MAX_WATCHED} peers are watched already, the limit for one agent")]
    TooMany,
}

/// What an agent knows of a watched peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub state: State,
    pub guard: SocketAddr,
    pub connected: bool,
    /// Smoothed round trip (RFC 6298, section 2: one eighth of each new sample).
    pub rtt: Option<Span>,
    /// The deadline by which the peer said that it leaves.
    pub leaving: Option<Time>,
}

#[derive(Debug)]
struct Watched {
    peer: Peer,
    /// When it was last heard, moved on by the time in which this process did not listen.
    heard: Time,
    /// When its guard last answered while the agent was away; moved on likewise.
    guard_answered: Time,
    next_ping: Time,
    pings: VecDeque<(u64, Time)>,
    /// The probe under way.
    probing: Option<u64>,
    next_probe: Option<Time>,
    refusals: u8,
    guard_ok: bool,
    /// When the last connection closed; none since. What arrives now was under way before, so it
    /// does not end the suspicion: an answered probe or a new connection does.
    closed: Option<Time>,
}

/// The failure detector of one agent.
#[derive(Debug)]
pub struct Membership {
    config: Config,
    peers: BTreeMap<NodeId, Watched>,
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
            peers: BTreeMap::new(),
            seq: 0,
            probes: 0,
            called: Time::ZERO,
            effects: VecDeque::new(),
        }
    }

    /// `None` for a peer that is not watched.
    pub fn peer(&self, node: &NodeId) -> Option<Peer> {
        self.peers.get(node).map(|w| w.peer)
    }

    pub fn peers(&self) -> impl Iterator<Item = (NodeId, Peer)> + '_ {
        self.peers.iter().map(|(node, w)| (*node, w.peer))
    }

    /// Events about peers that are not watched change nothing.
    pub fn handle(&mut self, event: Event, now: Time) -> Result<(), Error> {
        self.forgive(now);
        match event {
            Event::Watch { node, guard } => self.watch(node, guard, now)?,
            Event::Unwatch { node } => {
                self.peers.remove(&node);
            }
            Event::Connected { node } => {
                if let Some(w) = self.peers.get_mut(&node) {
                    w.peer.connected = true;
                    w.closed = None;
                    // Its identity was proven: the agent itself answered.
                    self.heard(node, now);
                }
            }
            Event::Disconnected { node } => self.disconnected(node, now),
            Event::Heard { node } => self.heard(node, now),
            Event::Pong { node, seq } => {
                if let Some(w) = self.peers.get_mut(&node) {
                    w.pong(seq, now);
                }
                self.heard(node, now);
            }
            Event::Probed {
                node,
                id,
                agent,
                guard,
            } => self.probed(node, id, agent, guard, now),
            Event::Leaving { node, deadline } => {
                if let Some(w) = self.peers.get_mut(&node) {
                    w.peer.leaving = Some(deadline);
                }
                self.heard(node, now);
            }
        }
        Ok(())
    }

    pub fn handle_timeout(&mut self, now: Time) {
        self.forgive(now);
        let nodes: Vec<NodeId> = self.peers.keys().copied().collect();
        for node in nodes {
            self.judge(node, now);
            self.probe_if_due(node, now);
            self.ping_if_due(node, now);
        }
    }

    pub fn poll_timeout(&self) -> Option<(Time, &'static str)> {
        self.peers
            .values()
            .flat_map(|w| w.due(&self.config))
            .min_by_key(|(at, _)| *at)
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
    }

    fn watch(&mut self, node: NodeId, guard: SocketAddr, now: Time) -> Result<(), Error> {
        let before = self.peers.get(&node).map(|w| w.peer);
        if before.is_some_and(|peer| peer.guard == guard) {
            return Ok(());
        }
        if before.is_none() && self.peers.len() >= MAX_WATCHED {
            return Err(Error::TooMany);
        }
        let peer = Peer {
            state: State::Alive,
            guard,
            connected: before.is_some_and(|p| p.connected),
            rtt: before.and_then(|p| p.rtt),
            leaving: None,
        };
        let watched = Watched {
            peer,
            heard: now,
            guard_answered: now,
            next_ping: now,
            pings: VecDeque::new(),
            probing: None,
            next_probe: None,
            refusals: 0,
            guard_ok: false,
            closed: None,
        };
        self.peers.insert(node, watched);
        if before.is_some_and(|p| p.state != State::Alive) {
            let state = State::Alive;
            self.effects.push_back(Effect::Verdict { node, state });
        }
        self.ping_if_due(node, now);
        Ok(())
    }

    fn heard(&mut self, node: NodeId, now: Time) {
        if let Some(w) = self.peers.get_mut(&node) {
            w.heard = now;
            if w.closed.is_none() || w.peer.state.is_lost() {
                w.closed = None;
                w.calm();
                self.set(node, State::Alive);
            }
        }
    }

    fn disconnected(&mut self, node: NodeId, now: Time) {
        let Some(w) = self.peers.get_mut(&node) else {
            return;
        };
        w.peer.connected = false;
        w.closed = Some(now);
        if w.peer.state.is_lost() || matches!(w.peer.state, State::Away { .. }) {
            return;
        }
        w.calm();
        w.next_probe = Some(now);
        self.set(node, State::Suspect);
        self.probe_if_due(node, now);
    }

    fn probed(&mut self, node: NodeId, id: u64, agent: Answer, guard: Answer, now: Time) {
        let config = self.config;
        let Some(w) = self.peers.get_mut(&node) else {
            return;
        };
        if w.probing != Some(id) {
            return;
        }
        w.probing = None;
        w.guard_ok = guard == Answer::Answered;
        if w.guard_ok {
            w.guard_answered = now;
        }
        let away = matches!(w.peer.state, State::Away { .. });
        if agent.is_gone() && guard.is_gone() {
            w.refusals += 1;
            w.next_probe = Some(now + config.probe_again);
            if w.refusals >= 2 {
                self.set(node, State::Lost { confirmed: true });
            }
            return;
        }
        if agent == Answer::Answered && w.closed.is_some_and(|at| w.heard > at) {
            w.closed = None;
            w.heard = now;
            w.calm();
            return self.set(node, State::Alive);
        }
        w.refusals = 0;
        // A process that is just dying still accepts for a moment: look again soon.
        let dying = w.closed.is_some_and(|at| now.since(at) < config.ping_every);
        let pause = if dying {
            config.probe_again
        } else {
            config.ping_every
        };
        w.next_probe = Some(now + pause);
        if agent.is_gone() && w.guard_ok && !away {
            self.set(node, State::Away { since: now });
        }
    }

    /// What the time that has passed says about a peer.
    fn judge(&mut self, node: NodeId, now: Time) {
        let Some(w) = self.peers.get_mut(&node) else {
            return;
        };
        let Some((due, next)) = w.verdict_due(&self.config) else {
            return;
        };
        if now < due {
            return;
        }
        let next = match next {
            State::Suspect => {
                w.next_probe = Some(now);
                w.guard_ok = false;
                State::Suspect
            }
            // The launcher is there and the path is open: only its agent is stuck.
            State::Lost { .. } if w.peer.state == State::Suspect && w.guard_ok => {
                State::Away { since: now }
            }
            other => other,
        };
        self.set(node, next);
    }

    fn set(&mut self, node: NodeId, state: State) {
        let Some(w) = self.peers.get_mut(&node) else {
            return;
        };
        if w.peer.state == state {
            return;
        }
        w.peer.state = state;
        if state.is_lost() {
            w.calm();
        }
        self.effects.push_back(Effect::Verdict { node, state });
    }

    fn probe_if_due(&mut self, node: NodeId, now: Time) {
        let Some(w) = self.peers.get_mut(&node) else {
            return;
        };
        if w.probing.is_none() && w.next_probe.is_some_and(|at| now >= at) {
            self.probes += 1;
            let (id, guard) = (self.probes, w.peer.guard);
            w.probing = Some(id);
            w.next_probe = None;
            self.effects.push_back(Effect::Probe { node, id, guard });
        }
    }

    fn ping_if_due(&mut self, node: NodeId, now: Time) {
        let Some(w) = self.peers.get_mut(&node) else {
            return;
        };
        if now < w.next_ping {
            return;
        }
        self.seq += 1;
        let seq = self.seq;
        // A lost peer is still called now and then: else two that lost each other stay so.
        let every = match w.peer.state.is_lost() {
            true => self.config.suspect_after,
            false => self.config.ping_every,
        };
        w.next_ping = now + every;
        if w.pings.len() == MAX_PINGS {
            w.pings.pop_front();
        }
        w.pings.push_back((seq, now));
        self.effects.push_back(Effect::Ping { node, seq });
    }
}

impl Watched {
    /// Ends a suspicion's probes.
    fn calm(&mut self) {
        self.probing = None;
        self.next_probe = None;
        self.refusals = 0;
        self.guard_ok = false;
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
            State::Alive => Some((
                self.heard + Span(config.suspect_after.0 / 2),
                State::Suspect,
            )),
            State::Suspect => Some((self.heard + config.suspect_after, lost)),
            State::Away { since } => {
                let guard = self.guard_answered + config.suspect_after;
                let heard = self.heard + config.suspect_after;
                Some((guard.min(since + config.agent_grace).max(heard), lost))
            }
            State::Lost { .. } => None,
        }
    }

    fn due(&self, config: &Config) -> impl Iterator<Item = (Time, &'static str)> {
        let verdict = self.verdict_due(config).map(|(at, _)| (at, "silence"));
        let probe = match self.probing {
            None => self.next_probe.map(|at| (at, "probe")),
            Some(_) => None,
        };
        [Some((self.next_ping, "ping")), verdict, probe]
            .into_iter()
            .flatten()
    }
}

#[cfg(test)]
mod tests;
