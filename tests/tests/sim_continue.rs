//! `muster job continue` among real cores: the nodes that are left go on by an operator's word, and
//! whoever comes back, dead or cut off only, stops its workers and joins.
//!
//! A small world of its own: every message takes a millisecond, links can be cut, nodes can die and
//! come back with what they had stored, and launchers do at once what they are told.

#![expect(clippy::expect_used, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use muster_protocol::agent::{Agent, Config, ConnId, Effect, Event};
use muster_protocol::job::Durable;
use muster_protocol::local::{Command, Start, ToAgent, ToLauncher, cannot_run};
use muster_protocol::membership::Answer;
use muster_protocol::record::{Cause, Record};
use muster_protocol::spec::JobSpec;
use muster_protocol::{Boot, Digest, JobKey, LauncherId, NodeId, Span, Time};
use muster_tests::usual;

const HOP: Span = Span::from_millis(1);
const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
/// Steps of the world at most until something holds.
const STEPS: usize = 200_000;

struct World {
    now: Time,
    /// None: the node is dead.
    agents: Vec<Option<Agent>>,
    boots: Vec<u64>,
    stored: Vec<BTreeMap<JobKey, Vec<u8>>>,
    /// The generation whose workers run on each node.
    running: Vec<Option<Start>>,
    /// Why nothing can be started on a node.
    unstartable: Vec<Option<String>>,
    /// The last words to each node's launcher.
    ended: Vec<Option<(i32, String)>>,
    /// Lines that each node's launcher was told to say.
    told: Vec<Vec<String>>,
    spec: JobSpec,
    cut: BTreeSet<(usize, usize)>,
    queue: BTreeMap<(Time, u64), (usize, Event)>,
    seq: u64,
}

fn node(i: usize) -> NodeId {
    NodeId([i as u8 + 1; 32])
}

fn key() -> JobKey {
    JobKey {
        cluster: "c".into(),
        owner: "0".into(),
        id: "job".into(),
    }
}

fn config(i: usize, boot: u64) -> Config {
    Config {
        boot: Boot(boot),
        seed: i as u64 + 100 * boot,
        ..usual::config(i)
    }
}

impl World {
    /// Nodes whose job asks for one of `n` at least, once all of them train.
    fn training(n: usize) -> World {
        let mut world = World::new(n, World::spec(n));
        for i in 0..n {
            world.start(i);
        }
        world.until("all train", |w| w.trains(&(0..n).collect::<Vec<_>>()));
        world
    }

    fn new(n: usize, spec: JobSpec) -> World {
        World {
            now: Time::ZERO + Span::from_secs(1),
            agents: (0..n).map(|_| None).collect(),
            boots: vec![0; n],
            stored: vec![BTreeMap::new(); n],
            running: (0..n).map(|_| None).collect(),
            unstartable: vec![None; n],
            ended: vec![None; n],
            told: vec![Vec::new(); n],
            spec,
            cut: BTreeSet::new(),
            queue: BTreeMap::new(),
            seq: 0,
        }
    }

    fn spec(n: usize) -> JobSpec {
        JobSpec {
            min_nodes: 1,
            max_nodes: n as u16,
            ..JobSpec::default()
        }
    }

    /// Agent and launcher of a node start, with what was stored.
    fn start(&mut self, i: usize) {
        self.boots[i] += 1;
        let stored: Vec<_> = self.stored[i].clone().into_iter().collect();
        let agent =
            Agent::new(config(i, self.boots[i]), stored, self.now).expect("what was stored");
        self.agents[i] = Some(agent);
        for j in 0..self.agents.len() {
            if self.linked(i, j) {
                self.connect(i, j);
            }
        }
        self.launch(i, self.boots[i]);
    }

    /// A launcher of the job registers at a node's agent.
    fn launch(&mut self, i: usize, count: u64) {
        let reg = usual::register(
            LauncherId([(i as u64 * 10 + count) as u8; 8]),
            "job",
            self.spec.clone(),
            HERE,
        );
        self.hears(i, ToAgent::Register(reg));
        self.hears(i, ToAgent::MasterPort { port: 9 });
    }

    fn kill(&mut self, i: usize) {
        self.agents[i] = None;
        self.running[i] = None;
        self.queue.retain(|_, (to, _)| *to != i);
        for j in (0..self.agents.len()).filter(|j| *j != i) {
            self.put(j, Event::Disconnected { node: node(i) });
        }
    }

    /// Silence between two nodes: connections stay, and nothing comes through.
    fn cut(&mut self, i: usize, j: usize) {
        self.cut.insert((i.min(j), i.max(j)));
    }

    fn heal(&mut self) {
        for (i, j) in std::mem::take(&mut self.cut) {
            for (at, of) in [(i, j), (j, i)] {
                self.put(at, Event::Disconnected { node: node(of) });
            }
            self.connect(i, j);
        }
    }

    fn linked(&self, i: usize, j: usize) -> bool {
        let up = |n: usize| self.agents[n].is_some();
        i != j && up(i) && up(j) && !self.cut.contains(&(i.min(j), i.max(j)))
    }

    fn connect(&mut self, i: usize, j: usize) {
        for (at, of) in [(i, j), (j, i)] {
            let event = Event::Connected {
                node: node(of),
                addr: SocketAddr::new(HERE, 1),
                observed: HERE,
            };
            self.put(at, event);
        }
    }

    fn hears(&mut self, i: usize, frame: ToAgent) {
        let conn = ConnId(self.boots[i]);
        let event = Event::Launcher {
            conn,
            owner: "0".into(),
            frame,
        };
        self.put(i, event);
    }

    fn put(&mut self, to: usize, event: Event) {
        self.seq += 1;
        self.queue.insert((self.now + HOP, self.seq), (to, event));
    }

    /// The operator's order at a node, and its answer.
    fn go_on(&mut self, i: usize, dead: &[&str]) -> Result<(), String> {
        self.say_go_on(i, dead, true)
    }

    fn say_go_on(&mut self, i: usize, dead: &[&str], confirmed: bool) -> Result<(), String> {
        let dead = dead.iter().map(|d| (*d).to_owned()).collect();
        let frame = ToAgent::Command(Command::Continue {
            job: "job".into(),
            dead,
            confirmed,
        });
        let event = Event::Launcher {
            conn: ConnId(999),
            owner: "0".into(),
            frame,
        };
        let agent = self.agents[i].as_mut().expect("a live node");
        let answer = agent.handle(event, self.now);
        self.carry_out(i);
        answer.map_err(|e| e.to_string())
    }

    fn until(&mut self, what: &str, holds: impl Fn(&World) -> bool) {
        for _ in 0..STEPS {
            if holds(self) {
                return;
            }
            self.step();
        }
        let heads: Vec<_> = (0..self.agents.len()).map(|i| self.head(i)).collect();
        unreachable!("{what} never held at {:?}: {heads:?}", self.now);
    }

    fn pass(&mut self, span: Span) {
        let until = self.now + span;
        self.until("time passes", |w| w.now >= until);
    }

    /// The next event, or the next timer.
    fn step(&mut self) {
        let due = |a: &Option<Agent>| a.as_ref()?.poll_timeout().map(|(at, _)| at);
        let timer = self.agents.iter().filter_map(due).min();
        let event = self.queue.first_key_value().map(|(k, _)| *k);
        match event.filter(|(at, _)| timer.is_none_or(|t| *at <= t)) {
            Some(found) => {
                let (to, event) = self.queue.remove(&found).expect("the first");
                self.now = self.now.max(found.0);
                if let Some(agent) = self.agents[to].as_mut() {
                    // A refusal is an answer too; the operator's are looked at where they are given.
                    let _refused = agent.handle(event, self.now);
                    self.carry_out(to);
                }
            }
            None => {
                self.now = self.now.max(timer.expect("somebody waits for something"));
                for i in 0..self.agents.len() {
                    if due(&self.agents[i]).is_some_and(|at| at <= self.now) {
                        self.agents[i]
                            .as_mut()
                            .expect("alive")
                            .handle_timeout(self.now);
                        self.carry_out(i);
                    }
                }
            }
        }
    }

    fn carry_out(&mut self, i: usize) {
        while let Some(effect) = self.agents[i].as_mut().and_then(Agent::poll_effect) {
            match effect {
                Effect::Persist { key, bytes } => {
                    self.stored[i].insert(key.clone(), bytes);
                    self.put(i, Event::Persisted { key });
                }
                Effect::Send { to, message } => {
                    let to = (0..self.agents.len()).find(|j| node(*j) == to);
                    let to = to.expect("a node");
                    if self.linked(i, to) {
                        let from = node(i);
                        self.put(to, Event::Message { from, message });
                    }
                }
                Effect::Probe { node: n, id, .. } => {
                    let of = (0..self.agents.len())
                        .find(|j| node(*j) == n)
                        .expect("a node");
                    let answer = match (self.linked(i, of), self.agents[of].is_some()) {
                        (true, _) => Answer::Answered,
                        (false, true) => Answer::Silent,
                        (false, false) => Answer::Refused,
                    };
                    let (agent, guard) = (answer, answer);
                    self.put(
                        i,
                        Event::Probed {
                            node: n,
                            id,
                            agent,
                            guard,
                        },
                    );
                }
                Effect::ToLauncher { frame, .. } => self.told(i, frame),
                _ => {}
            }
        }
    }

    /// The launcher of a node does as it is told.
    fn told(&mut self, i: usize, frame: ToLauncher) {
        match frame {
            ToLauncher::Welcome { .. } => self.hears(i, ToAgent::Alive),
            ToLauncher::Start(start) => {
                let (digest, attempt) = (start.digest, start.attempt);
                if let Some(reason) = self.unstartable[i].clone() {
                    let failed = ToAgent::StartFailed {
                        digest,
                        attempt,
                        reason,
                    };
                    return self.hears(i, failed);
                }
                let old = self.running[i].replace(start);
                assert!(
                    old.is_none_or(|o| o.digest == digest),
                    "node {i} starts {digest} while another generation's workers run"
                );
                self.hears(i, ToAgent::Started { digest, attempt });
            }
            ToLauncher::Stop { digest, .. } | ToLauncher::Preempt { digest, .. } => {
                self.running[i].take_if(|r| r.digest == digest);
                self.hears(i, ToAgent::Stopped { digest });
            }
            ToLauncher::End { code, report } => {
                self.running[i] = None;
                self.ended[i] = Some((code, report));
            }
            ToLauncher::Waiting { text } => self.told[i].push(text),
            ToLauncher::Refused { .. } => self.running[i] = None,
            _ => {}
        }
    }

    fn head(&self, i: usize) -> Option<(Record, Digest)> {
        let job = self.agents[i].as_ref()?.job(&key())?;
        job.head().map(|(r, d)| ((**r).clone(), d))
    }

    fn lineage(&self, i: usize) -> Option<Digest> {
        self.head(i).map(|(record, _)| record.lineage())
    }

    /// Whether exactly these nodes run one generation of exactly them.
    fn trains(&self, nodes: &[usize]) -> bool {
        let on: Vec<usize> = (0..self.agents.len())
            .filter(|i| self.running[*i].is_some())
            .collect();
        let heads: BTreeSet<Digest> = nodes
            .iter()
            .filter_map(|i| Some(self.head(*i)?.1))
            .collect();
        let whole = nodes
            .first()
            .and_then(|i| self.head(*i))
            .is_some_and(|(r, d)| {
                r.members.len() == nodes.len()
                    && nodes
                        .iter()
                        .all(|i| self.running[*i].as_ref().is_some_and(|s| s.digest == d))
            });
        on == nodes && heads.len() == 1 && whole
    }

    /// The node of rank 0, and the others.
    fn ranks(&self) -> (usize, Vec<usize>) {
        let (record, _) = self.head(0).expect("a generation");
        let index = |n: NodeId| usize::from(n.0[0]) - 1;
        let nodes: Vec<usize> = record.members.iter().map(|m| index(m.node)).collect();
        (nodes[0], nodes[1..].to_vec())
    }
}

fn name(i: usize) -> String {
    format!("h{i}")
}

#[test]
fn who_is_left_goes_on_and_the_dead_node_joins_when_it_comes_back() {
    let mut world = World::training(2);
    let (zero, rest) = world.ranks();
    let one = rest[0];
    let (old, old_head) = world.head(one).expect("a generation");
    // As long as all is well there is nothing to continue.
    let early = world.go_on(one, &[&name(zero)]).unwrap_err();
    assert!(early.contains("needs nobody's word"), "{early}");
    world.kill(zero);
    world.until("the workers stop", |w| w.running[one].is_none());
    world.pass(Span::from_secs(5));
    assert!(world.running[one].is_none(), "no majority: nothing runs");
    // Who is given up is named, and nobody else.
    let unnamed = world.go_on(one, &[]).unwrap_err();
    assert!(
        unnamed.contains("--dead") && unnamed.contains(&name(zero)),
        "{unnamed}"
    );
    let wrong = world.go_on(one, &[&name(zero), "h7"]).unwrap_err();
    assert!(
        wrong.contains("no lost node of this job is called h7"),
        "{wrong}"
    );
    // To ask whether it could be done is to be refused alike, and does nothing.
    let wrong = world.say_go_on(one, &["h7"], false).unwrap_err();
    assert!(wrong.contains("h7"), "{wrong}");
    world
        .say_go_on(one, &[&name(zero)], false)
        .expect("it could be done");
    world.pass(Span::from_secs(2));
    assert_eq!(
        world.head(one).map(|h| h.1),
        Some(old_head),
        "neither changes anything"
    );

    world.go_on(one, &[&name(zero)]).expect("taken");
    world.until("it trains alone", |w| w.trains(&[one]));
    let (new, _) = world.head(one).expect("a generation");
    assert_ne!(new.lineage(), old.lineage());
    assert_eq!((new.number, new.parent), (1, old_head));
    let nodes = vec![node(zero)];
    assert_eq!(new.cause, Cause::Continued { nodes });

    // Rank 0's node comes back with its vote: alone it would be the majority of the old lineage.
    world.start(zero);
    world.until("both train in the new lineage", |w| w.trains(&[0, 1]));
    assert_eq!(world.lineage(zero), Some(new.lineage()));
}

#[test]
fn a_node_that_was_cut_off_only_stops_and_joins() {
    let mut world = World::training(2);
    let (zero, rest) = world.ranks();
    let one = rest[0];
    // The operator is wrong: rank 0 lives, and goes on alone, as it may.
    world.cut(zero, one);
    world.until("rank 0 goes on alone", |w| {
        w.running[one].is_none() && w.head(zero).is_some_and(|(r, _)| r.members.len() == 1)
    });
    world.pass(Span::from_secs(3));
    world.go_on(one, &[&name(zero)]).expect("taken");
    world.until("the other goes on, too", |w| {
        w.running[one].is_some() && w.running[zero].is_some()
    });
    let new = world.lineage(one).expect("a lineage");
    world.heal();
    world.until("one group is left", |w| w.trains(&[0, 1]));
    assert_eq!(
        world.lineage(zero),
        Some(new),
        "the operator's lineage is the one that stays"
    );
    world.pass(Span::from_secs(20));
    assert!(world.trains(&[0, 1]), "and that lasts");
}

#[test]
fn all_that_are_left_change_over_together_and_only_if_none_reaches_the_dead() {
    let mut world = World::training(5);
    let (zero, rest) = world.ranks();
    let (left, dead) = ([rest[0], rest[1]], [zero, rest[2], rest[3]]);
    for a in left {
        for d in dead {
            if (a, d) != (left[1], dead[2]) {
                world.cut(a, d);
            }
        }
    }
    let names: Vec<String> = dead.iter().map(|d| name(*d)).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    world.pass(Span::from_secs(4));
    // One of those who are left still reaches a node that the operator calls dead.
    assert!(world.go_on(left[0], &names).is_err());
    world.cut(left[1], dead[2]);
    world.until("the dead go on, as the majority", |w| {
        w.head(zero).is_some_and(|(r, _)| r.members.len() == 3)
            && left.iter().all(|i| w.running[*i].is_none())
    });
    for d in dead {
        world.kill(d);
    }
    world.pass(Span::from_secs(5));
    let at = world
        .go_on(left[0], &names)
        .or_else(|_| world.go_on(left[1], &names));
    at.expect("one of the two leads");
    let mut sorted = left;
    sorted.sort_unstable();
    world.until("the two train", |w| w.trains(&sorted));
    let new = world.lineage(left[0]);
    assert_eq!(world.lineage(left[1]), new);
    // The dead come back one by one, with a newer generation of the old lineage, and its majority.
    world.cut.clear();
    for d in dead {
        world.start(d);
    }
    world.until("all five train in the new lineage", |w| {
        w.trains(&[0, 1, 2, 3, 4])
    });
    assert!((0..5).all(|i| world.lineage(i) == new));
}

/// A job that forms with all its nodes, whose rank 0 died; what is left may go on without it.
fn stranded_with_quorum() -> (World, usize, usize) {
    stranded(JobSpec {
        birth_quorum: 2,
        ..World::spec(2)
    })
}

/// Two nodes train, and the one of rank 0 is lost. The world, and both nodes.
fn stranded(spec: JobSpec) -> (World, usize, usize) {
    let mut world = World::new(2, spec);
    for i in 0..2 {
        world.start(i);
    }
    world.until("both train", |w| w.trains(&[0, 1]));
    let (zero, rest) = world.ranks();
    world.kill(zero);
    world.until("the workers stop", |w| w.running[rest[0]].is_none());
    world.pass(Span::from_secs(5));
    (world, zero, rest[0])
}

#[test]
fn an_operators_word_ends_with_the_last_launcher_that_heard_it() {
    // With the word, one node is enough.
    let (mut world, zero, one) = stranded_with_quorum();
    world.go_on(one, &[&name(zero)]).expect("taken");
    world.until("it trains alone", |w| w.trains(&[one]));
    for restart in [false, true] {
        let (mut world, zero, one) = stranded_with_quorum();
        world.go_on(one, &[&name(zero)]).expect("taken");
        // At once, before anything can be born.
        if !restart {
            world.hears(one, ToAgent::Cancel);
            world.until("it ends", |w| w.ended[one].is_some());
        }
        let stored = |w: &World| Durable::decode(&w.stored[one][&key()]).expect("what was stored");
        if restart {
            // Everything died at once.
            assert!(stored(&world).continues.is_some());
        } else {
            assert_eq!(stored(&world).continues, None, "cancelled");
        }
        world.kill(one);
        world.start(one);
        world.pass(Span::from_secs(60));
        assert_eq!(world.head(one), None, "it waits for the quorum");
        assert_eq!(stored(&world).continues, None);
    }
}

#[test]
fn a_program_that_runs_nowhere_ends_the_job() {
    for (n, min) in [(1, 1), (2, 2), (3, 1)] {
        let spec = JobSpec {
            min_nodes: min,
            ..World::spec(n)
        };
        let mut world = World::new(n, spec);
        let reason = cannot_run("./x", Some("Exec format error"), "check it");
        for i in 0..n {
            world.unstartable[i] = Some(reason.clone());
            world.start(i);
        }
        world.until("it ends everywhere", |w| {
            w.ended.iter().all(Option::is_some)
        });
        assert!(
            world.now < Time::ZERO + Span::from_secs(120),
            "{:?}",
            world.now
        );
        for (code, report) in world.ended.iter().flatten() {
            assert_eq!(*code, 126);
            assert!(report.contains(&reason), "{report}");
        }
    }
}

#[test]
fn what_may_pass_and_a_single_bad_node_are_tried_again() {
    // A reason that may pass.
    let mut world = World::new(1, World::spec(1));
    world.unstartable[0] = Some("cannot make a folder: the disk is full".into());
    world.start(0);
    world.pass(Span::from_secs(60));
    assert_eq!(world.ended[0], None);
    world.unstartable[0] = None;
    world.until("it trains", |w| w.trains(&[0]));
    // One node of two cannot run it, for good.
    let mut world = World::new(2, World::spec(2));
    world.unstartable[0] = Some(cannot_run("./x", None, "check PATH"));
    world.start(0);
    world.start(1);
    world.until("the other trains", |w| w.running[1].is_some());
    world.pass(Span::from_secs(600));
    assert!(world.running[1].is_some());
    assert_eq!(world.ended, [None, None]);
}

#[test]
fn a_stranded_node_says_the_whole_command() {
    let (world, zero, one) = stranded_with_quorum();
    let said = &world.told[one];
    let wanted = format!("`muster job continue job --dead {} --yes`", name(zero));
    assert!(said.iter().any(|t| t.contains(&wanted)), "{said:?}");
}

/// The order would be refused: too few nodes would be left.
#[test]
fn a_stranded_node_below_the_minimum_is_not_told_to_continue() {
    let spec = JobSpec {
        min_nodes: 2,
        ..World::spec(2)
    };
    let (mut world, zero, one) = stranded(spec);
    let said = &world.told[one];
    let names_it = |t: &String| t.contains(&name(zero));
    assert!(said.iter().any(names_it), "{said:?}");
    let advises = |t: &String| t.contains("muster job continue");
    assert!(!said.iter().any(advises), "{said:?}");
    assert!(world.go_on(one, &[&name(zero)]).is_err());
}
