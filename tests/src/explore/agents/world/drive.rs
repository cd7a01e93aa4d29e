//! Agents: how they start and die, what they are given, and what becomes of their effects.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr};
use std::rc::Rc;

use muster_protocol::agent::{self, Agent, Effect, Event, Notice, Stored};
use muster_protocol::job::Durable;
use muster_protocol::membership::Answer;
use muster_protocol::wire::{Action, JobMessage, Message};
use muster_protocol::{Boot, JobKey, LauncherId, NodeId, Span, Time};

use super::{Fuse, Later, Letter, MS, OVERLAP_MS, World, Write, address, kind_of, mix};
use crate::explore::agents::PAST_A_RETRY_MS;
use crate::explore::agents::judge::{self, Broken};

impl World {
    pub(super) fn key(&self) -> JobKey {
        JobKey {
            cluster: "c".into(),
            owner: "u".into(),
            id: "j".into(),
        }
    }

    fn config(&self, node: usize) -> agent::Config {
        let n = &self.nodes[node];
        let other = self.setup.other_suspect.filter(|(at, _)| *at == node);
        let suspect_ms = other.map_or(self.setup.suspect_ms, |(_, ms)| ms);
        let suspect_after = Span::from_millis(suspect_ms);
        agent::Config {
            node: n.id,
            state: n.state,
            boot: Boot(n.boot),
            cluster: "c".into(),
            host: format!("n{node}"),
            version: "explore".into(),
            pid: 1,
            home: Default::default(),
            seed: mix(node as u64, mix(n.boot, n.disks.into())),
            suspect_after,
            agent_grace: Span::from_secs(10),
            birth_timeout: Span::from_secs(4),
            start_timeout: Span::from_secs(30),
            minority_wait: Span::from_secs(6),
            orphan_after: Span(suspect_after.0 + 10_000 * MS),
            one_host: false,
            slot_memory: u64::MAX,
            slot_lease: Span::from_secs(600),
            embedded: false,
            place: Default::default(),
            memory: Default::default(),
            compaction: Default::default(),
            flaws: self.setup.flaws,
        }
    }

    pub(super) fn linked(&self, a: usize, b: usize) -> bool {
        a != b && !self.cut.contains(&(a, b)) && !self.cut.contains(&(b, a))
    }

    pub(super) fn start(&mut self, node: usize) -> Result<(), Broken> {
        if self.nodes[node].agent.is_some() {
            return Ok(());
        }
        Rc::make_mut(&mut self.nodes[node]).boot += 1;
        let config = self.config(node);
        let now = self.now;
        let n = Rc::make_mut(&mut self.nodes[node]);
        n.history = mix(n.history, mix(now, 12));
        let stored = Stored {
            jobs: n.disk.clone().into_iter().collect(),
            past: n.past.clone(),
        };
        n.agent = Some(Agent::new(config, stored, Time(now)).map_err(Broken::Start)?);
        self.effects(node)?;
        for peer in 0..self.nodes.len() {
            self.join(node, peer)?;
        }
        self.register(node)
    }

    pub(super) fn kill(&mut self, node: usize) -> Result<(), Broken> {
        let n = Rc::make_mut(&mut self.nodes[node]);
        n.agent = None;
        n.wake = None;
        n.history = mix(n.history, 13);
        self.inbox[node].clear();
        for peer in 0..self.nodes.len() {
            if self.linked(node, peer) {
                self.part(peer, node)?;
            }
        }
        Ok(())
    }

    /// A connection comes to be, where both agents run.
    pub(super) fn join(&mut self, a: usize, b: usize) -> Result<(), Broken> {
        let up = |w: &World, n: usize| w.nodes[n].agent.is_some();
        if !self.linked(a, b) || !up(self, a) || !up(self, b) {
            return Ok(());
        }
        for (node, peer) in [(a, b), (b, a)] {
            let event = Event::Connected {
                node: self.nodes[peer].id,
                addr: address(peer, 7000),
                observed: IpAddr::V4(Ipv4Addr::new(10, 0, 0, node as u8 + 1)),
            };
            self.event(node, event, mix(1, peer as u64))?;
        }
        Ok(())
    }

    pub(super) fn part(&mut self, node: usize, peer: usize) -> Result<(), Broken> {
        let event = Event::Disconnected {
            node: self.nodes[peer].id,
        };
        self.event(node, event, mix(2, peer as u64))
    }

    pub(super) fn deliver(&mut self, to: usize, letter: &Letter) -> Result<(), Broken> {
        let event = Event::Message {
            from: self.nodes[letter.from].id,
            message: (*letter.message).clone(),
        };
        self.event(to, event, letter.print)
    }

    pub(super) fn timer(&mut self, node: usize) -> Result<(), Broken> {
        let now = self.now;
        let n = Rc::make_mut(&mut self.nodes[node]);
        n.history = mix(n.history, mix(now, 14));
        if let Some(agent) = &mut n.agent {
            agent.handle_timeout(Time(now));
        }
        self.effects(node)
    }

    pub(super) fn event(&mut self, node: usize, event: Event, print: u64) -> Result<(), Broken> {
        let now = self.now;
        if self.nodes[node].agent.is_none() {
            return Ok(());
        }
        let n = Rc::make_mut(&mut self.nodes[node]);
        n.history = mix(n.history, mix(now, print));
        if let Some(agent) = &mut n.agent {
            // A refusal changes nothing.
            let _refused = agent.handle(event, Time(now));
        }
        self.effects(node)
    }

    /// Carries out what the agent wants; its launcher and its probes answer at once.
    fn effects(&mut self, node: usize) -> Result<(), Broken> {
        let mut back: VecDeque<Event> = VecDeque::new();
        let mut index = 0;
        loop {
            let n = Rc::make_mut(&mut self.nodes[node]);
            let Some(agent) = &mut n.agent else {
                return Ok(());
            };
            if let Some(effect) = agent.poll_effect() {
                index += 1;
                let fuse = match effect {
                    Effect::Persist { .. } => self.fuse.take(),
                    _ => None,
                };
                if fuse == Some(Fuse::Refused)
                    && let Effect::Persist { key, .. } = effect
                {
                    n.history = mix(n.history, 16);
                    let failed = Event::PersistFailed { key, errno: 28 };
                    let _refused = agent.handle(failed, Time(self.now));
                    continue;
                }
                let Effect::Persist { key, bytes } = effect else {
                    self.effect(node, effect, index, &mut back)?;
                    continue;
                };
                let later = match fuse {
                    Some(Fuse::Slow) => Some(bytes),
                    _ => {
                        self.store(node, key.clone(), bytes)?;
                        None
                    }
                };
                let n = Rc::make_mut(&mut self.nodes[node]);
                match (fuse, &mut n.agent) {
                    (Some(Fuse::Dies), _) => {
                        n.agent = None;
                        break;
                    }
                    (Some(Fuse::Slow | Fuse::HeardLate), _) => {
                        n.history = mix(n.history, 17 + u64::from(later.is_some()));
                        let write = Write {
                            node,
                            boot: n.boot,
                            key,
                            bytes: later,
                        };
                        self.plan(PAST_A_RETRY_MS, Later::Written(write));
                    }
                    (_, Some(agent)) => {
                        let _refused = agent.handle(Event::Persisted { key }, Time(self.now));
                    }
                    (_, None) => {}
                }
            } else if let Some(event) = back.pop_front() {
                let now = Time(self.now);
                let _refused = agent.handle(event, now);
            } else {
                n.wake = agent.poll_timeout().map(|(at, _)| at.0);
                break;
            }
        }
        if self.truth.dirty {
            judge::look(Rc::make_mut(&mut self.truth))?;
        }
        self.workers_overlap()
    }

    /// I11: workers of two generations do not run at once. Launchers start and end them in no time, and the clocks are
    /// one, so that a moment is all that the order of events explains.
    fn workers_overlap(&mut self) -> Result<(), Broken> {
        let running = self.nodes.iter().enumerate();
        let mut running = running.filter_map(|(at, n)| Some((at, n.launcher.as_ref()?.running?)));
        let other = running.next().and_then(|first| {
            let other = running.find(|(_, digest)| *digest != first.1)?;
            Some((first, other))
        });
        let here = other.map(|(first, other)| (first.0, other.0));
        let known = self.overlap.take();
        self.overlap = here.map(|nodes| known.unwrap_or((self.now, nodes)));
        // It may have gone on until now, and be over.
        match known {
            Some((since, (one, other))) if self.now > since + OVERLAP_MS * MS => {
                let ms = (self.now - since) / MS;
                Err(Broken::Overlap { one, other, ms })
            }
            _ => Ok(()),
        }
    }

    fn store(&mut self, node: usize, key: JobKey, bytes: Vec<u8>) -> Result<(), Broken> {
        let by = (self.nodes[node].id, self.nodes[node].state);
        self.did.wrote = true;
        let durable = Durable::decode(&bytes).map_err(Broken::codec)?;
        Rc::make_mut(&mut self.judge).persisted(by, &durable)?;
        Rc::make_mut(&mut self.truth).persisted(by, durable);
        Rc::make_mut(&mut self.nodes[node]).disk.insert(key, bytes);
        Ok(())
    }

    /// A write is over, if it is one of the agent that is there.
    pub(super) fn written(&mut self, write: Write) -> Result<(), Broken> {
        let n = &self.nodes[write.node];
        if n.agent.is_none() || n.boot != write.boot {
            return Ok(());
        }
        let (node, key) = (write.node, write.key);
        if let Some(bytes) = write.bytes {
            self.store(node, key.clone(), bytes)?;
        }
        self.event(node, Event::Persisted { key }, 19)
    }

    fn effect(
        &mut self,
        node: usize,
        effect: Effect,
        index: u64,
        back: &mut VecDeque<Event>,
    ) -> Result<(), Broken> {
        match effect {
            Effect::Persist { key, bytes } => self.store(node, key, bytes)?,
            Effect::Forget { key, past } => {
                let n = Rc::make_mut(&mut self.nodes[node]);
                n.past = past;
                n.disk.remove(&key);
            }
            Effect::Send { to, message } => self.send(node, to, message, index)?,
            Effect::Probe {
                node: peer,
                id,
                guard,
            } => {
                let (agent, guard) = self.probed(node, peer, guard.map(|(_, l)| l));
                back.push_back(Event::Probed {
                    node: peer,
                    id,
                    agent,
                    guard,
                });
            }
            Effect::ToLauncher { conn, frame } => self.told(node, conn, frame, back),
            Effect::Notice(Notice::Decided { record, .. }) => {
                Rc::make_mut(&mut self.truth).announce(&record);
            }
            Effect::Notice(Notice::Voters { record, .. }) => {
                Rc::make_mut(&mut self.truth).announce_voters(&record);
            }
            Effect::Notice(Notice::Committed { commit, .. }) => {
                Rc::make_mut(&mut self.truth).commit_announced(commit);
            }
            _ => {}
        }
        Ok(())
    }

    fn send(
        &mut self,
        node: usize,
        to: NodeId,
        message: Message,
        index: u64,
    ) -> Result<(), Broken> {
        let by = (self.nodes[node].id, self.nodes[node].state);
        let kind = kind_of(&message);
        if let Message::Job { body, .. } = &message {
            if kind.is_some() {
                self.did.spoke = true;
                Rc::make_mut(&mut self.truth).sent(by, body);
            }
            if let JobMessage::Order(order) = &**body
                && let Action::Run { .. } = order.action
            {
                let agent = self.nodes[node].agent.as_ref();
                let head = agent.and_then(|a| Some(a.job(&self.key())?.head()?.1));
                judge::ordered(&self.truth, by, head, order.digest)?;
            }
        }
        let to = self.nodes.iter().position(|n| n.id == to);
        let Some(to) = to.filter(|to| self.linked(node, *to)) else {
            return Ok(());
        };
        if self.nodes[to].agent.is_some() {
            let print = mix(self.nodes[node].history, index);
            self.inbox[to].push(Letter {
                from: node,
                kind,
                message: Rc::new(message),
                due: self.tick + 1,
                print,
            });
        }
        Ok(())
    }

    fn probed(&self, by: usize, peer: NodeId, guard: Option<LauncherId>) -> (Answer, Answer) {
        let Some(at) = self.nodes.iter().position(|n| n.id == peer) else {
            return (Answer::Refused, Answer::Refused);
        };
        if at != by && !self.linked(by, at) {
            return (Answer::Silent, Answer::Silent);
        }
        let there = |yes| {
            if yes {
                Answer::Answered
            } else {
                Answer::Refused
            }
        };
        let launcher = self.nodes[at].launcher.as_ref().map(|l| l.id);
        let agent = there(self.nodes[at].agent.is_some());
        (agent, guard.map_or(agent, |g| there(launcher == Some(g))))
    }
}
