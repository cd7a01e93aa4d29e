//! A thousand agents form a generation: how long it takes in virtual time, and how many messages.
//!
//! Every agent is connected with every other (round trip 50 ms), takes 50 us for each message, and
//! its launcher answers a START after a millisecond. Nothing is lost here: the faults are the
//! simulation's matter, the cost is this test's.

#![expect(clippy::expect_used, reason = "helpers of tests")]

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use muster_protocol::agent::{Agent, Config, ConnId, Effect, Event, Flaws};
use muster_protocol::local::{Register, ToAgent, ToLauncher};
use muster_protocol::record::Place;
use muster_protocol::spec::JobSpec;
use muster_protocol::wire::Message;
use muster_protocol::{Boot, LauncherId, NodeId, Span, StateId, Time};

const ONE_WAY: Span = Span::from_millis(25);
const PROCESSING: Span = Span(50_000);
const START_TAKES: Span = Span::from_millis(1);
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));

/// What a world came to.
#[derive(Debug)]
struct Formed {
    /// From the last launcher's start until the last node's workers run.
    took: Span,
    /// About the job, between agents, until then.
    messages: usize,
}

enum Item {
    Event(Box<Event>),
    Wake,
}

struct World {
    agents: Vec<Agent>,
    /// When each agent has worked off what it took on.
    busy: Vec<Time>,
    wakes: Vec<Option<Time>>,
    queue: BinaryHeap<Reverse<(Time, u64, usize)>>,
    items: Vec<Option<Item>>,
    messages: usize,
    started: usize,
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
        boot: Boot(1),
        cluster: "c".into(),
        host: format!("h{i}"),
        version: "1".into(),
        pid: 1,
        seed: i as u64,
        suspect_after: Span::from_secs(2),
        agent_grace: Span::from_secs(10),
        birth_timeout: Span::from_secs(4),
        start_timeout: Span::from_secs(10),
        minority_wait: Span::from_secs(6),
        orphan_after: Span::from_secs(10),
        place: Place::default(),
        flaws: Flaws::default(),
    }
}

impl World {
    fn new(n: usize) -> World {
        let mut world = World {
            agents: (0..n)
                .map(|i| Agent::new(config(i), Vec::new(), Time::ZERO).expect("nothing stored"))
                .collect(),
            busy: vec![Time::ZERO; n],
            wakes: vec![None; n],
            queue: BinaryHeap::new(),
            items: Vec::new(),
            messages: 0,
            started: 0,
        };
        for i in 0..n {
            for j in (0..n).filter(|j| *j != i) {
                let event = Event::Connected {
                    node: node(j),
                    addr: SocketAddr::new(HERE, 1),
                    observed: HERE,
                };
                world.agents[i].handle(event, Time::ZERO).expect("taken");
            }
            // The greetings say nothing yet: no agent knows a job.
            while world.agents[i].poll_effect().is_some() {}
        }
        world
    }

    fn put(&mut self, at: Time, agent: usize, item: Item) {
        let seq = self.items.len();
        self.items.push(Some(item));
        self.queue.push(Reverse((at, seq as u64, agent)));
    }

    fn launch(&mut self, agent: usize, at: Time) {
        let n = u16::try_from(self.agents.len()).expect("at most a thousand");
        let reg = Register {
            launcher: LauncherId((agent as u64 + 1).to_le_bytes()),
            job: "job".into(),
            spec: JobSpec {
                min_nodes: n,
                max_nodes: n,
                ..JobSpec::default()
            },
            slots: 8,
            guard_port: 7,
            addrs: vec![HERE],
            place: Place::default(),
            running: None,
            store: None,
            pid: 1,
            command: String::new(),
            log_dir: None,
        };
        for frame in [ToAgent::Register(reg), ToAgent::MasterPort { port: 9 }] {
            self.put(at, agent, Item::Event(Box::new(launcher(frame))));
        }
    }

    /// Runs until every node's workers run; `None` when that takes too long.
    fn run(&mut self, until: Time) -> Option<Time> {
        while let Some(Reverse((at, seq, i))) = self.queue.pop() {
            let Some(item) = self.items[usize::try_from(seq).expect("an index")].take() else {
                continue;
            };
            let now = match item {
                Item::Wake if self.wakes[i] != Some(at) => continue,
                Item::Wake => {
                    let now = at.max(self.busy[i]);
                    self.wakes[i] = None;
                    self.agents[i].handle_timeout(now);
                    now
                }
                Item::Event(event) => {
                    let now = at.max(self.busy[i]) + PROCESSING;
                    self.busy[i] = now;
                    self.agents[i].handle(*event, now).expect("taken");
                    now
                }
            };
            if now > until {
                return None;
            }
            self.carry_out(i, now);
            if self.started == self.agents.len() {
                return Some(now);
            }
        }
        None
    }

    fn carry_out(&mut self, i: usize, now: Time) {
        while let Some(effect) = self.agents[i].poll_effect() {
            match effect {
                Effect::Send { to, message } => {
                    self.messages += usize::from(matches!(message, Message::Job { .. }));
                    let from = node(i);
                    let to = (0..self.agents.len()).find(|j| node(*j) == to);
                    let event = Event::Message { from, message };
                    self.put(
                        now + ONE_WAY,
                        to.expect("a node"),
                        Item::Event(Box::new(event)),
                    );
                }
                Effect::ToLauncher {
                    frame: ToLauncher::Start(start),
                    ..
                } => {
                    self.started += 1;
                    let frame = ToAgent::Started {
                        digest: start.digest,
                        attempt: start.attempt,
                    };
                    self.put(now + START_TAKES, i, Item::Event(Box::new(launcher(frame))));
                }
                _ => {}
            }
        }
        let wake = self.agents[i].poll_timeout().map(|(at, _)| at.max(now));
        if let Some(at) = wake.filter(|_| wake != self.wakes[i]) {
            self.wakes[i] = wake;
            self.put(at, i, Item::Wake);
        }
    }
}

fn launcher(frame: ToAgent) -> Event {
    Event::Launcher {
        conn: ConnId(1),
        owner: "0".into(),
        frame,
    }
}

fn form(n: usize) -> Formed {
    let mut world = World::new(n);
    let start = Time::ZERO + Span::from_secs(1);
    for i in 0..n {
        world.launch(i, start);
    }
    let end = world.run(start + Span::from_secs(20));
    let started = world.started;
    let end = end.unwrap_or_else(|| unreachable!("{started} of {n} started"));
    Formed {
        took: end.since(start),
        messages: world.messages,
    }
}

#[test]
fn a_thousand_agents_form_in_two_seconds_with_linear_messages() {
    let sizes = [250, 500, 1_000];
    let formed: Vec<Formed> = sizes.iter().map(|n| form(*n)).collect();
    for (n, formed) in sizes.iter().zip(&formed) {
        println!(
            "{n} agents: {} and {} messages",
            formed.took, formed.messages
        );
    }
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
