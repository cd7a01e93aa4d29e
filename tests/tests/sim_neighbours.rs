//! Nodes and jobs as they see each other, among real cores: launchers of several jobs on one node,
//! a node that is lost again and again, and what people are told of a wait.
//!
//! A small world of its own: every message takes a millisecond, agents and launchers die and come
//! back, and launchers do at once what they are told.

#![expect(clippy::expect_used, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use muster_protocol::agent::{Agent, Config, ConnId, Effect, Event, Notice, Stored};
use muster_protocol::local::{Register, Start, ToAgent, ToLauncher};
use muster_protocol::membership::Answer;
use muster_protocol::spec::JobSpec;
use muster_protocol::wire::{JobMessage, Message};
use muster_protocol::{Boot, JobKey, LauncherId, NodeId, Span, Time};
use muster_tests::usual;

const HOP: Span = Span::from_millis(1);
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
/// Steps of the world at most for one stretch of time.
const STEPS: usize = 1_000_000;

/// A launcher: its node, its job, and how many there were before it.
#[derive(Clone, Debug)]
struct Launcher {
    node: usize,
    job: String,
    id: LauncherId,
    spec: JobSpec,
    running: Option<Start>,
    alive: bool,
}

struct World {
    now: Time,
    /// None: the agent is dead.
    agents: Vec<Option<Agent>>,
    boots: Vec<u64>,
    stored: Vec<BTreeMap<JobKey, Vec<u8>>>,
    pasts: Vec<Vec<u8>>,
    launchers: Vec<Launcher>,
    /// Statuses that were said, and by which nodes.
    statuses: Vec<(Time, usize)>,
    queue: BTreeMap<(Time, u64), (usize, Event)>,
    seq: u64,
    /// Notices to each node's people, and when they came.
    notices: Vec<(Time, usize, Notice)>,
    said: Vec<(Time, usize, String)>,
}

fn node(i: usize) -> NodeId {
    NodeId([i as u8 + 1; 32])
}

fn nodes(min: u16, max: u16) -> JobSpec {
    JobSpec {
        min_nodes: min,
        max_nodes: max,
        ..JobSpec::default()
    }
}

fn secs(n: u64) -> Span {
    Span::from_secs(n)
}

impl World {
    fn new(n: usize) -> World {
        let mut world = World {
            now: Time::ZERO + secs(1),
            agents: (0..n).map(|_| None).collect(),
            boots: vec![0; n],
            stored: vec![BTreeMap::new(); n],
            pasts: vec![Vec::new(); n],
            launchers: Vec::new(),
            statuses: Vec::new(),
            queue: BTreeMap::new(),
            seq: 0,
            notices: Vec::new(),
            said: Vec::new(),
        };
        (0..n).for_each(|i| world.start(i));
        world
    }

    /// The agent of a node starts, with what was stored; its launchers find it again.
    fn start(&mut self, i: usize) {
        self.boots[i] += 1;
        let config = Config {
            boot: Boot(self.boots[i]),
            seed: i as u64 + 100 * self.boots[i],
            agent_grace: secs(30),
            orphan_after: secs(32),
            ..usual::config(i)
        };
        let stored = Stored {
            jobs: self.stored[i].clone().into_iter().collect(),
            past: self.pasts[i].clone(),
        };
        let agent = Agent::new(config, stored, self.now).expect("what was stored");
        self.agents[i] = Some(agent);
        for j in (0..self.agents.len()).filter(|j| *j != i) {
            if self.agents[j].is_some() {
                for (of, with) in [(i, j), (j, i)] {
                    let event = Event::Connected {
                        node: node(with),
                        addr: SocketAddr::new(HERE, 1),
                        observed: HERE,
                    };
                    self.put(of, event);
                }
            }
        }
        for k in 0..self.launchers.len() {
            if self.launchers[k].node == i && self.launchers[k].alive {
                self.register(k);
            }
        }
    }

    /// The agent of a node is killed; its launchers go on.
    fn kill_agent(&mut self, i: usize) {
        self.agents[i] = None;
        self.queue.retain(|_, (to, _)| *to != i);
        for j in 0..self.agents.len() {
            self.put(j, Event::Disconnected { node: node(i) });
        }
    }

    /// Agent and launchers of a node are killed.
    fn kill_node(&mut self, i: usize) {
        for l in self.launchers.iter_mut().filter(|l| l.node == i) {
            l.alive = false;
        }
        self.kill_agent(i);
    }

    fn launch(&mut self, node: usize, job: &str, spec: &JobSpec) -> usize {
        let k = self.launchers.len();
        self.launchers.push(Launcher {
            node,
            job: job.into(),
            id: LauncherId((k as u64 + 1).to_be_bytes()),
            spec: spec.clone(),
            running: None,
            alive: true,
        });
        if self.agents[node].is_some() {
            self.register(k);
        }
        k
    }

    fn register(&mut self, k: usize) {
        let l = self.launchers[k].clone();
        let reg = Register {
            running: l.running.map(|s| s.digest),
            ..usual::register(l.id, &l.job, l.spec, HERE)
        };
        self.says(k, ToAgent::Register(reg));
        self.says(k, ToAgent::MasterPort { port: 9 });
    }

    fn says(&mut self, k: usize, frame: ToAgent) {
        let event = Event::Launcher {
            conn: ConnId(k as u64),
            owner: "0".into(),
            frame,
        };
        self.put(self.launchers[k].node, event);
    }

    fn put(&mut self, to: usize, event: Event) {
        self.seq += 1;
        self.queue.insert((self.now + HOP, self.seq), (to, event));
    }

    fn pass(&mut self, span: Span) {
        let until = self.now + span;
        for _ in 0..STEPS {
            let timers = self.agents.iter().enumerate();
            let timers = timers.filter_map(|(i, a)| Some((a.as_ref()?.poll_timeout()?.0, i)));
            let timer = timers.min();
            let event = self.queue.first_key_value().map(|((at, _), _)| *at);
            let next = timer.map(|(at, _)| at).into_iter().chain(event).min();
            let Some(at) = next.filter(|at| *at <= until) else {
                self.now = until;
                return;
            };
            self.now = self.now.max(at);
            let i = match self.queue.first_entry().filter(|e| e.key().0 == at) {
                Some(entry) => {
                    let (to, event) = entry.remove();
                    if let Some(agent) = &mut self.agents[to] {
                        // A refusal says that nothing has changed.
                        drop(agent.handle(event, self.now));
                    }
                    to
                }
                None => {
                    let (_, i) = timer.expect("the timer that is due");
                    let agent = self.agents[i].as_mut();
                    agent.expect("its timer").handle_timeout(self.now);
                    i
                }
            };
            self.carry_out(i);
        }
        unreachable!("never at rest");
    }

    fn carry_out(&mut self, i: usize) {
        while let Some(effect) = self.agents[i].as_mut().and_then(Agent::poll_effect) {
            match effect {
                Effect::Persist { key, bytes } => {
                    self.stored[i].insert(key.clone(), bytes);
                    self.put(i, Event::Persisted { key });
                }
                Effect::Forget { key, past } => {
                    self.stored[i].remove(&key);
                    self.pasts[i] = past;
                }
                Effect::Send { to, message } => {
                    let to = usize::from(to.0[0]) - 1;
                    let from = node(i);
                    if let Message::Job { body, .. } = &message
                        && matches!(**body, JobMessage::Status(_))
                    {
                        self.statuses.push((self.now, i));
                    }
                    if self.agents[to].is_some() {
                        self.put(to, Event::Message { from, message });
                    }
                }
                Effect::Probe { node, id, guard } => {
                    let of = usize::from(node.0[0]) - 1;
                    let agent = match self.agents[of] {
                        Some(_) => Answer::Answered,
                        None => Answer::Refused,
                    };
                    let here = |id| self.launchers.iter().any(|l| l.alive && l.id == id);
                    let guard = match guard {
                        Some((_, launcher)) if here(launcher) => Answer::Answered,
                        _ => Answer::Refused,
                    };
                    let event = Event::Probed {
                        node,
                        id,
                        agent,
                        guard,
                    };
                    self.put(i, event);
                }
                Effect::ToLauncher { conn, frame } => {
                    let k = usize::try_from(conn.0).expect("an index");
                    if self.launchers[k].alive {
                        self.tell_launcher(k, frame);
                    }
                }
                Effect::Notice(notice) => self.notices.push((self.now, i, notice)),
                Effect::Store { .. } | Effect::WriteBeacon { .. } | Effect::ReadBeacon { .. } => {}
            }
        }
    }

    fn tell_launcher(&mut self, k: usize, frame: ToLauncher) {
        match frame {
            ToLauncher::Welcome { .. } => self.says(k, ToAgent::Alive),
            ToLauncher::Start(start) => {
                let (digest, attempt) = (start.digest, start.attempt);
                self.launchers[k].running = Some(start);
                self.says(k, ToAgent::Started { digest, attempt });
                self.says(k, ToAgent::MasterPort { port: 10 });
            }
            ToLauncher::Stop { digest, .. } | ToLauncher::Preempt { digest, .. } => {
                let running = &mut self.launchers[k].running;
                running.take_if(|s| s.digest == digest);
                self.says(k, ToAgent::Stopped { digest });
            }
            ToLauncher::Waiting { text } => {
                self.said.push((self.now, self.launchers[k].node, text));
            }
            ToLauncher::End { .. } | ToLauncher::Refused { .. } => {
                self.launchers[k].alive = false;
            }
            _ => {}
        }
    }

    /// The generation whose workers run on each node that has a launcher of the job.
    fn runs(&self, job: &str) -> Vec<(usize, u64)> {
        let of = self.launchers.iter().filter(|l| l.job == job && l.alive);
        of.filter_map(|l| Some((l.node, l.running.as_ref()?.number)))
            .collect()
    }

    /// How often a node said its status since then.
    fn statuses_since(&self, then: Time, of: usize) -> usize {
        let said = self.statuses.iter();
        said.filter(|(at, i)| *at > then && *i == of).count()
    }

    /// Waits until the job runs on so many nodes; how long that took.
    fn until_runs_on(&mut self, job: &str, count: usize) -> Span {
        let begun = self.now;
        for _ in 0..60_000 {
            let runs = self.runs(job);
            let one: BTreeSet<u64> = runs.iter().map(|(_, number)| *number).collect();
            if runs.len() == count && one.len() == 1 {
                return self.now.since(begun);
            }
            self.pass(Span::from_millis(10));
        }
        unreachable!("{job} runs on {:?}", self.runs(job));
    }
}

#[test]
fn one_jobs_launchers_do_not_speak_for_another_job() {
    let mut world = World::new(3);
    for i in 0..2 {
        world.launch(i, "job", &nodes(2, 2));
    }
    world.until_runs_on("job", 2);
    // Sorts behind the other, is alone, and so has the other agents as witnesses, without guards.
    world.launch(0, "zzz", &nodes(1, 1));
    world.until_runs_on("zzz", 1);
    // A third has launchers on both nodes, too, and one of them dies with the agent.
    for i in 0..2 {
        world.launch(i, "other", &nodes(1, 2));
    }
    world.until_runs_on("other", 2);
    world.pass(secs(5));
    let before = (world.runs("job"), world.runs("zzz"));

    let gone = world.now;
    for l in &mut world.launchers {
        l.alive &= l.node != 1 || l.job != "other";
    }
    world.kill_agent(1);
    world.pass(secs(2));
    // That launcher is lost at once, and its job goes on without it.
    assert_eq!(world.runs("other").len(), 1);
    assert!(world.runs("other")[0].1 > 1, "{:?}", world.runs("other"));
    world.start(1);
    world.pass(secs(10));
    // The other launcher of the node was there all the time.
    assert_eq!((world.runs("job"), world.runs("zzz")), before);
    let lost = |(at, _, notice): &&(Time, usize, Notice)| {
        let state = match notice {
            Notice::Peer { state, .. } => state.is_lost(),
            _ => false,
        };
        state && *at >= gone
    };
    assert_eq!(world.notices.iter().filter(lost).count(), 0);
}

#[test]
fn a_wait_is_told_once_though_other_doors_are_asked() {
    let mut world = World::new(3);
    for i in 0..2 {
        world.launch(i, "job", &nodes(3, 3));
    }
    world.pass(secs(120));
    for i in 0..2 {
        let told = world.said.iter().filter(|(_, node, _)| *node == i);
        let told: Vec<&String> = told.map(|(_, _, text)| text).collect();
        assert!(told.len() <= 3, "{told:#?}");
        let last = told.last().expect("something was told");
        assert!(last.contains("waiting for 1 more of 3"), "{last}");
        let waiting =
            |(_, at, n): &&(Time, usize, Notice)| *at == i && matches!(n, Notice::Waiting { .. });
        assert!(world.notices.iter().filter(waiting).count() <= 3);
    }
    // Whoever was missing comes.
    world.launch(2, "job", &nodes(3, 3));
    assert!(world.until_runs_on("job", 3) <= secs(3));
}

/// How long each join takes of a node that is killed so often, each time after this long.
fn joins_of_a_flapping_node(world: &mut World, of: usize, times: usize, lives: Span) -> Vec<Span> {
    let all = world.agents.len();
    (0..times)
        .map(|_| {
            world.pass(lives);
            world.kill_node(of);
            world.until_runs_on("job", all - 1);
            world.pass(secs(1));
            world.launch(of, "job", &nodes(1, 8));
            world.start(of);
            world.until_runs_on("job", all)
        })
        .collect()
}

#[test]
fn a_node_that_is_lost_again_and_again_is_kept_out_for_longer_and_longer() {
    let mut world = World::new(3);
    for i in 0..3 {
        world.launch(i, "job", &nodes(1, 8));
    }
    world.until_runs_on("job", 3);
    let took = joins_of_a_flapping_node(&mut world, 2, 9, secs(180));
    let soon = secs(2);
    assert!(took[..4].iter().all(|t| *t <= soon), "{took:?}");
    // Behind the fourth the delay doubles from a second on.
    assert!(took[7] >= secs(6) && took[8] >= secs(14), "{took:?}");
    let warned = world.notices.iter().filter_map(|(_, at, n)| match n {
        Notice::Warning { text, .. } => Some((*at, text)),
        _ => None,
    });
    let warned: Vec<(usize, &String)> = warned.filter(|(_, t)| t.contains("was lost")).collect();
    assert_eq!(warned.len(), 5, "{warned:#?}");
    let (by, text) = warned[0];
    assert!(by != 2 && text.contains("h2"), "{by}: {text}");
    assert!(text.contains("was lost 5 times within 12 min"), "{text}");
}

#[test]
fn where_all_nodes_are_lost_again_and_again_none_waits() {
    let mut world = World::new(4);
    for i in 0..4 {
        world.launch(i, "job", &nodes(1, 8));
    }
    world.until_runs_on("job", 4);
    let mut worst = Span::ZERO;
    for k in 0..60 {
        // Some order in which each comes as often as the others.
        let of = (k * 7 + k / 4) % 4;
        let took = joins_of_a_flapping_node(&mut world, of, 1, secs(5));
        worst = worst.max(took[0]);
    }
    assert!(worst <= secs(2), "{worst}");
}

#[test]
fn a_status_that_the_leader_has_is_said_seldom_and_one_that_it_lacks_soon() {
    let mut world = World::new(3);
    for i in 0..3 {
        world.launch(i, "job", &nodes(3, 3));
    }
    world.until_runs_on("job", 3);
    let job = world.agents[0].as_ref().and_then(|a| a.jobs().next());
    let leader = job.and_then(|j| j.head()?.0.leader());
    let leader = usize::from(leader.expect("it runs").0[0]) - 1;
    let member = (leader + 1) % 3;
    world.pass(secs(5));
    let settled = world.now;
    world.pass(secs(60));
    assert!((5..=7).contains(&world.statuses_since(settled, member)));

    // What changes is said at once, and as often as ever while it is not settled.
    let digest = world.launchers[member].running.as_ref().map(|s| s.digest);
    let digest = digest.expect("it runs");
    let yes = true;
    let changed = world.now;
    world.says(member, ToAgent::Stalled { digest, yes });
    world.pass(Span::from_millis(10));
    assert_eq!(world.statuses_since(changed, member), 1);
    world.pass(secs(10));
    assert!(world.statuses_since(changed, member) >= 10);
    world.says(member, ToAgent::Stalled { digest, yes: false });
    world.pass(secs(3));

    // The leader's agent forgets all, and no connection tells of it.
    let forgot = world.now;
    world.agents[leader] = None;
    world.start(leader);
    world
        .queue
        .retain(|_, (to, event)| *to == leader || !matches!(event, Event::Connected { .. }));
    world.pass(secs(2));
    assert!(world.statuses_since(forgot, member) >= 1);
    world.pass(secs(60));
    assert_eq!(world.runs("job").iter().map(|(_, n)| *n).max(), Some(1));
    // A link that stands anew is reason enough to say it, too.
    world.pass(secs(5));
    let anew = world.now;
    for (of, with) in [(leader, member), (member, leader)] {
        world.put(of, Event::Disconnected { node: node(with) });
        let (node, addr, observed) = (node(with), SocketAddr::new(HERE, 1), HERE);
        world.put(
            of,
            Event::Connected {
                node,
                addr,
                observed,
            },
        );
    }
    world.pass(secs(2));
    assert!(world.statuses_since(anew, member) >= 1);
}
