//! A thousand agents form a generation: how long it takes in virtual time, and how many messages. Their cost while they
//! train and nothing happens. And fifty nodes that join a running job within two seconds: how many generations that
//! costs.
//!
//! Every agent is connected with every other (round trip 50 ms), takes as long for each event as its
//! core takes here, by the processor's time, and its launcher answers a START after a millisecond, and
//! a stop after a tenth of a second. Nothing is lost here: the faults are the simulation's matter, the
//! cost is this test's.

#![expect(clippy::expect_used, reason = "helpers of tests")]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use muster_protocol::agent::{Agent, Config, ConnId, Effect, Event};
use muster_protocol::local::{Register, ToAgent, ToLauncher};
use muster_protocol::membership::Answer;
use muster_protocol::spec::JobSpec;
use muster_protocol::wire::Message;
use muster_protocol::{Digest, LauncherId, NodeId, Span, StateId, Time};
use muster_tests::usual;
use rustix::time::{ClockId, clock_gettime};

const ONE_WAY: Span = Span::from_millis(25);
const START_TAKES: Span = Span::from_millis(1);
const STOP_TAKES: Span = Span::from_millis(100);
/// The leader's core, in each second in which nothing happens (ms): 2 % of one where everything is optimised.
const MOST_IDLE: u64 = match cfg!(debug_assertions) {
    true => 200,
    false => 20,
};
/// How long a probe waits for an answer.
const PROBE_WAITS: Span = Span::from_millis(500);
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

/// Result of forming a world.
#[derive(Debug)]
struct Formed {
    /// From the last launcher's start until the last node's workers run.
    took: Span,
    /// About the job, between agents, until then.
    messages: usize,
    /// Heartbeats and their answers until then: each member asks each voter for its lease.
    heartbeats: usize,
}

/// Cost of a world that trains, in each second when nothing happens.
#[derive(Debug)]
struct Idle {
    /// Between all agents, for each member.
    heartbeats: f64,
    /// Statuses and whatever else is about the job, for each member.
    messages: f64,
    /// How often the leader looked at everything that it knows of the job.
    looks: f64,
    /// The processor's time of the leader's core: on a machine of its own it has the caches to itself.
    leader: Span,
}

/// A partition that heals costs the leader's core so much, from the heal until all nodes train again.
#[derive(Debug)]
struct Healed {
    took: Span,
    leader: Span,
    /// For one event.
    longest: Span,
}

enum Item {
    Event(Box<Event>),
    Wake,
}

struct World {
    agents: Vec<Agent>,
    /// Where each node stands in `agents`.
    places: BTreeMap<NodeId, usize>,
    nodes: (u16, u16),
    /// When each agent has worked off what it took on.
    busy: Vec<Time>,
    /// The agent whose events are recorded in `heard`, for hearing them again.
    heard_by: Option<usize>,
    heard: Vec<(Time, Event)>,
    /// The processor's time that each agent took for its events, and for the longest of them.
    spent: Vec<(Span, Span)>,
    /// The nodes that do not reach the others.
    apart: Vec<bool>,
    wakes: Vec<Option<Time>>,
    queue: BinaryHeap<Reverse<(Time, u64, usize)>>,
    items: Vec<Option<Item>>,
    messages: usize,
    heartbeats: usize,
    /// The generations that were started, in order, with the nodes that have.
    generations: Vec<(Digest, usize)>,
}

fn node(i: usize) -> NodeId {
    let mut id = [0; 32];
    // Spread, so that the order of ids is not the order of starts.
    let mixed = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    id[..8].copy_from_slice(&mixed.to_be_bytes());
    NodeId(id)
}

fn config(i: usize) -> Config {
    Config {
        node: node(i),
        state: StateId((i as u64 + 1).to_le_bytes()),
        ..usual::config(i)
    }
}

impl World {
    /// `n` agents that know nobody yet; `nodes` is what their launchers say, `--nnodes MIN:MAX`.
    fn new(n: usize, nodes: (u16, u16)) -> World {
        World {
            nodes,
            places: (0..n).map(|i| (node(i), i)).collect(),
            agents: (0..n)
                .map(|i| Agent::new(config(i), Vec::new(), Time::ZERO).expect("nothing stored"))
                .collect(),
            busy: vec![Time::ZERO; n],
            heard_by: None,
            heard: Vec::new(),
            spent: vec![(Span::ZERO, Span::ZERO); n],
            apart: vec![false; n],
            wakes: vec![None; n],
            queue: BinaryHeap::new(),
            items: Vec::new(),
            messages: 0,
            heartbeats: 0,
            generations: Vec::new(),
        }
    }

    /// All agents have greeted each other, and none knows of a job.
    fn connect_all(&mut self) {
        let n = self.agents.len();
        let mut hellos = Vec::new();
        for i in 0..n {
            for j in (0..n).filter(|j| *j != i) {
                let taken = self.agents[i].handle(connected(j), Time::ZERO);
                taken.expect("taken");
            }
            let said = std::iter::from_fn(|| self.agents[i].poll_effect()).last();
            let Some(Effect::Send { message, .. }) = said else {
                unreachable!("no greeting: {said:?}");
            };
            hellos.push(message);
        }
        for i in 0..n {
            for j in (0..n).filter(|j| *j != i) {
                let (from, message) = (node(j), hellos[j].clone());
                let taken = self.agents[i].handle(Event::Message { from, message }, Time::ZERO);
                taken.expect("taken");
            }
        }
    }

    /// The agent comes up and is connected with those before it.
    fn connect(&mut self, i: usize, at: Time) {
        for j in 0..i {
            self.put(at, i, Item::Event(Box::new(connected(j))));
            self.put(at, j, Item::Event(Box::new(connected(i))));
        }
    }

    fn put(&mut self, at: Time, agent: usize, item: Item) {
        let seq = self.items.len();
        self.items.push(Some(item));
        self.queue.push(Reverse((at, seq as u64, agent)));
    }

    fn launch(&mut self, agent: usize, at: Time) {
        let (min_nodes, max_nodes) = self.nodes;
        let reg = Register {
            slots: 8,
            ..usual::register(
                LauncherId((agent as u64 + 1).to_le_bytes()),
                "job",
                JobSpec {
                    min_nodes,
                    max_nodes,
                    ..JobSpec::default()
                },
                HERE,
            )
        };
        for frame in [ToAgent::Register(reg), ToAgent::MasterPort { port: 9 }] {
            self.put(at, agent, Item::Event(Box::new(launcher(frame))));
        }
    }

    /// Runs until so many nodes' workers run in one generation; `None` when that takes too long.
    fn run(&mut self, nodes: usize, until: Time) -> Option<Time> {
        while let Some(now) = self.step(until) {
            if self.newest() == nodes {
                return Some(now);
            }
        }
        None
    }

    /// The next event; `None` when none comes until then.
    fn step(&mut self, until: Time) -> Option<Time> {
        loop {
            let Reverse((at, seq, i)) = self.queue.pop()?;
            let item = &mut self.items[usize::try_from(seq).expect("an index")];
            if at > until {
                self.queue.push(Reverse((at, seq, i)));
                return None;
            }
            if matches!(item, Some(Item::Wake)) && self.wakes[i] != Some(at) {
                *item = None;
            }
            let Some(item) = item.take() else { continue };
            let now = at.max(self.busy[i]);
            let before = cpu_time();
            match item {
                Item::Wake => {
                    self.wakes[i] = None;
                    self.agents[i].handle_timeout(now);
                }
                Item::Event(event) => {
                    if self.heard_by == Some(i) {
                        self.heard.push((now, (*event).clone()));
                    }
                    self.agents[i].handle(*event, now).expect("taken");
                }
            }
            let effects: Vec<Effect> =
                std::iter::from_fn(|| self.agents[i].poll_effect()).collect();
            let wake = self.agents[i].poll_timeout();
            let took = Span(cpu_time().0 - before.0);
            let (all, longest) = self.spent[i];
            self.spent[i] = (all + took, longest.max(took));
            let now = now + took;
            self.busy[i] = now;
            self.carry_out(i, now, effects);
            self.wake(i, now, wake.map(|(at, _)| at));
            return Some(now);
        }
    }

    /// The nodes that have started the newest generation.
    fn newest(&self) -> usize {
        self.generations.last().map_or(0, |(_, nodes)| *nodes)
    }

    fn answer(&mut self, i: usize, at: Time, frame: ToAgent) {
        self.put(at, i, Item::Event(Box::new(launcher(frame))));
    }

    fn tell_launcher(&mut self, i: usize, now: Time, frame: ToLauncher) {
        match frame {
            ToLauncher::Welcome { .. } => self.answer(i, now, ToAgent::Alive),
            ToLauncher::Start(start) => {
                let digest = start.digest;
                match self.generations.iter_mut().find(|(d, _)| *d == digest) {
                    Some((_, nodes)) => *nodes += 1,
                    None => self.generations.push((digest, 1)),
                }
                let attempt = start.attempt;
                let started = ToAgent::Started { digest, attempt };
                self.answer(i, now + START_TAKES, started);
                // The port is used; the next generation gets another one.
                self.answer(i, now + START_TAKES, ToAgent::MasterPort { port: 10 });
            }
            ToLauncher::Preempt { digest, .. } | ToLauncher::Stop { digest, .. } => {
                self.answer(i, now + STOP_TAKES, ToAgent::Stopped { digest });
            }
            _ => {}
        }
    }

    fn carry_out(&mut self, i: usize, now: Time, effects: Vec<Effect>) {
        for effect in effects {
            match effect {
                Effect::Send { to, message } => {
                    self.messages += usize::from(matches!(message, Message::Job { .. }));
                    let beat = matches!(message, Message::Ping { .. } | Message::Pong { .. });
                    self.heartbeats += usize::from(beat);
                    let from = node(i);
                    let to = *self.places.get(&to).expect("a node");
                    if self.apart[i] != self.apart[to] {
                        continue;
                    }
                    let event = Event::Message { from, message };
                    self.put(now + ONE_WAY, to, Item::Event(Box::new(event)));
                }
                Effect::Persist { key, .. } => {
                    self.put(now, i, Item::Event(Box::new(Event::Persisted { key })));
                }
                Effect::ToLauncher { frame, .. } => self.tell_launcher(i, now, frame),
                Effect::Probe { node: of, id, .. } => {
                    let place = *self.places.get(&of).expect("a node");
                    let (answer, after) = match self.apart[i] == self.apart[place] {
                        true => (Answer::Answered, ONE_WAY.times(2)),
                        false => (Answer::Silent, PROBE_WAITS),
                    };
                    let probed = Event::Probed {
                        node: of,
                        id,
                        agent: answer,
                        guard: answer,
                    };
                    self.put(now + after, i, Item::Event(Box::new(probed)));
                }
                _ => {}
            }
        }
    }

    fn wake(&mut self, i: usize, now: Time, wake: Option<Time>) {
        let wake = wake.map(|at| at.max(now));
        if let Some(at) = wake.filter(|_| wake != self.wakes[i]) {
            self.wakes[i] = wake;
            self.put(at, i, Item::Wake);
        }
    }

    /// Measures the cost of training from then on.
    fn idle(&mut self, from: Time) -> Idle {
        let (window, seconds) = (Span::from_secs(2), 2.0);
        while self.step(from).is_some() {}
        let job = self.agents[0].jobs().next().expect("the job");
        let leader = job.head().and_then(|(record, _)| record.leader());
        let leader = self.places[&leader.expect("a leader")];
        let looks = |world: &World| -> u64 {
            let jobs = world.agents[leader].jobs();
            jobs.map(muster_protocol::job::Job::looks).sum()
        };
        let before = (self.heartbeats, self.messages, looks(self));
        self.heard_by = Some(leader);
        while self.step(from + window).is_some() {}
        let each = |n: usize| n as f64 / seconds / self.agents.len() as f64;
        Idle {
            heartbeats: each(self.heartbeats - before.0),
            messages: each(self.messages - before.1),
            looks: (looks(self) - before.2) as f64 / seconds,
            leader: self.leads_alone(leader, from, window),
        }
    }

    /// The processor's time of the leader's core for each second, when it hears the same again for
    /// a while, and each of its own heartbeats is answered. The least of some rounds: what else runs on the machine
    /// takes the caches away, and only adds.
    fn leads_alone(&mut self, leader: usize, from: Time, window: Span) -> Span {
        let rounds = 5;
        let mut heard = std::mem::take(&mut self.heard);
        let answer = |e: &Event| {
            matches!(
                e,
                Event::Message {
                    message: Message::Pong { .. },
                    ..
                }
            )
        };
        heard.retain(|(_, event)| !answer(event));
        let agent = &mut self.agents[leader];
        let mut now = from + window;
        let mut least = None;
        for round in 1..=rounds {
            let before = cpu_time();
            for (at, event) in &heard {
                let at = *at + window.times(round);
                while let Some((due, _)) = agent.poll_timeout().filter(|(due, _)| *due <= at) {
                    now = now.max(due);
                    agent.handle_timeout(now);
                    answer_heartbeats(agent, now);
                }
                now = now.max(at);
                agent.handle(event.clone(), now).expect("taken");
                answer_heartbeats(agent, now);
            }
            let spent = Span(cpu_time().0 - before.0);
            least = Some(least.map_or(spent, |least: Span| least.min(spent)));
        }
        let least = least.expect("a round");
        Span(least.0 * 1_000_000_000 / window.0)
    }
}

impl World {
    /// The second half of the ranks is cut off for a while, long enough to be lost, and comes back: every node greets
    /// every one on the other side, and is taken in.
    fn heals(&mut self, from: Time) -> Healed {
        while self.step(from).is_some() {}
        let n = self.agents.len();
        let job = self.agents[0].jobs().next().expect("the job");
        let (record, _) = job.head().expect("a generation");
        let ranks: Vec<usize> = record
            .members
            .iter()
            .map(|m| self.places[&m.node])
            .collect();
        let (here, there) = ranks.split_at(n / 2);
        let leader = here[0];
        for i in there {
            self.apart[*i] = true;
        }
        self.across(here, there, from, |node| Event::Disconnected { node });
        let cut = from + Span::from_secs(4);
        while self.step(cut).is_some() {}
        assert_eq!(self.newest(), here.len(), "the others go on");
        self.apart.fill(false);
        let places = self.places.clone();
        self.across(here, there, cut, |node| connected(places[&node]));
        self.spent[leader] = (Span::ZERO, Span::ZERO);
        let end = self.run(n, cut + Span::from_secs(30));
        let started = self.newest();
        let end = end.unwrap_or_else(|| unreachable!("{started} of {n} started"));
        let (all, longest) = self.spent[leader];
        Healed {
            took: end.since(cut),
            leader: all,
            longest,
        }
    }

    fn across(
        &mut self,
        here: &[usize],
        there: &[usize],
        at: Time,
        event: impl Fn(NodeId) -> Event,
    ) {
        for a in here {
            for b in there {
                self.put(at, *a, Item::Event(Box::new(event(node(*b)))));
                self.put(at, *b, Item::Event(Box::new(event(node(*a)))));
            }
        }
    }
}

/// Drops what the agent wants done, but for heartbeats: each is answered.
fn answer_heartbeats(agent: &mut Agent, now: Time) {
    while let Some(effect) = agent.poll_effect() {
        if let Effect::Send { to, message } = effect
            && let Message::Ping { seq, leases } = message
        {
            let (from, granted) = (to, leases);
            let message = Message::Pong { seq, granted };
            let taken = agent.handle(Event::Message { from, message }, now);
            taken.expect("taken");
        }
    }
}

/// The processor's time of this thread so far.
fn cpu_time() -> Span {
    let at = clock_gettime(ClockId::ThreadCPUTime);
    let (sec, nsec) = (at.tv_sec.cast_unsigned(), at.tv_nsec.cast_unsigned());
    Span(sec * 1_000_000_000 + nsec)
}

fn connected(i: usize) -> Event {
    Event::Connected {
        node: node(i),
        addr: SocketAddr::new(HERE, 1),
        observed: HERE,
    }
}

fn launcher(frame: ToAgent) -> Event {
    Event::Launcher {
        conn: ConnId(1),
        owner: "0".into(),
        frame,
    }
}

fn form(n: usize) -> (World, Formed, Time) {
    let nodes = u16::try_from(n).expect("at most a thousand");
    let mut world = World::new(n, (nodes / 2, nodes));
    world.connect_all();
    let start = Time::ZERO + Span::from_secs(1);
    for i in 0..n {
        world.launch(i, start);
    }
    let end = world.run(n, start + Span::from_secs(20));
    let started = world.newest();
    let end = end.unwrap_or_else(|| unreachable!("{started} of {n} started"));
    let formed = Formed {
        took: end.since(start),
        messages: world.messages,
        heartbeats: world.heartbeats,
    };
    (world, formed, end)
}

#[test]
fn a_thousand_agents_form_in_two_seconds_with_linear_messages_and_cost_little_while_nothing_happens()
 {
    let sizes = [256, 512, 1_024];
    let formed = sizes.map(|n| {
        let (mut world, formed, at) = form(n);
        println!(
            "{n} agents: {}, {} messages about the job, {} heartbeats",
            formed.took, formed.messages, formed.heartbeats
        );
        // By then the leader has all statuses, and has told what it had to tell.
        let idle = world.idle(at + Span::from_secs(3));
        println!("{n} members, in each second: {idle:.1?}");
        assert!(idle.leader <= Span::from_millis(MOST_IDLE), "{idle:?}");
        // Each asks 63 voters for its lease, four times a second.
        assert!(idle.heartbeats <= 63.0 * 8.5, "{idle:?}");
        assert!(idle.messages <= 0.5, "{idle:?}");
        assert!(idle.looks <= 20.0, "{idle:?}");
        formed
    });
    assert!(formed[2].took <= Span::from_secs(2), "{formed:?}");
    let each: Vec<usize> = formed
        .iter()
        .zip(sizes)
        .map(|(f, n)| f.messages / n)
        .collect();
    assert!(
        each[2] <= each[0] + each[0] / 5,
        "messages per agent: {each:?}"
    );
}

/// Half of so many nodes are cut off and come back; what that costs the leader's core at most.
fn a_partition_heals(n: usize, leader: Span, longest: Span) {
    let (mut world, _, at) = form(n);
    let healed = world.heals(at + Span::from_millis(500));
    println!("{n} members, a partition that heals: {healed:.1?}");
    assert!(healed.leader <= leader, "{healed:?}");
    assert!(healed.longest <= longest, "{healed:?}");
    assert!(healed.took <= Span::from_secs(7), "{healed:?}");
}

/// The bounds are ten times what was seen.
#[test]
fn a_partition_of_hundreds_that_heals_costs_the_leader_little() {
    a_partition_heals(512, Span::from_millis(950), Span::from_millis(50));
}

mod long {
    use super::*;

    #[test]
    fn a_partition_of_a_thousand_that_heals_costs_the_leader_little() {
        a_partition_heals(1_024, Span::from_millis(3_700), Span::from_millis(950));
    }
}

/// Nodes come up one after the other, agent and launcher at once, to a job that runs on ten.
#[test]
fn fifty_joins_within_two_seconds_make_one_generation_or_two() {
    let (before, joins) = (10, 50);
    let all = before + joins;
    // More room than nodes: the job cannot know which join is the last.
    let mut world = World::new(all, (1, 64));
    let mut at = Time::ZERO + Span::from_secs(1);
    for i in 0..before {
        world.connect(i, at);
        world.launch(i, at + ONE_WAY);
    }
    let until = at + Span::from_secs(20);
    let runs = world.run(before, until).expect("the first ten run");
    assert_eq!(world.generations.len(), 1);

    // Heartbeats and leases for a while, so that the joins meet a job at its work.
    let first = runs + Span::from_secs(3);
    let spread = Span::from_secs(2);
    for k in 0..joins {
        at = first + Span(spread.0 / joins as u64 * k as u64);
        world.connect(before + k, at);
        world.launch(before + k, at + ONE_WAY);
    }
    let end = world.run(all, first + Span::from_secs(30));
    let generations: Vec<usize> = world.generations[1..].iter().map(|(_, n)| *n).collect();
    let end = end.unwrap_or_else(|| unreachable!("nodes of the generations: {generations:?}"));
    println!(
        "{joins} joins within {spread}: generations of {generations:?} nodes, the last complete {} after the first join",
        end.since(first)
    );
    assert!(
        matches!(generations.len(), 1 | 2),
        "one new generation, or two: {generations:?}"
    );
}
