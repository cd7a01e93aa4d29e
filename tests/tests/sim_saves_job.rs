//! A save among whole agents: from the step that the ranks agreed on to the commit, and what the next
//! generation restores. Drivers do at once what they are asked for; links are perfect.

#![expect(clippy::expect_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use muster_protocol::agent::{Agent, Config, ConnId, Effect, Event, Notice};
use muster_protocol::checkpoint::{Copy, Found, SlotId, Standing, State};
use muster_protocol::local::{
    Damaged, KeepNews, Left, Question, Register, Review, SaveAsk, SaveNews, ToAgent, ToLauncher,
    WorkerExit,
};
use muster_protocol::membership::Answer;
use muster_protocol::record::{Cause, Place, Record};
use muster_protocol::spec::JobSpec;
use muster_protocol::storelog::{self, Body, CreateOutcome, ReadOutcome};
use muster_protocol::wire::{JobMessage, Message};
use muster_protocol::{Boot, Digest, JobKey, LauncherId, NodeId, Span, StoreUuid, Time};
use muster_tests::usual;

#[path = "sim_saves_job/life.rs"]
mod life;
#[path = "sim_saves_job/rules.rs"]
mod rules;
#[path = "sim_saves_job/second_look.rs"]
mod second_look;

const HERE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1));
/// Steps of the world at most until something holds.
const STEPS: usize = 100_000;

#[derive(Default)]
struct Node {
    agent: Option<Agent>,
    boot: u64,
    stored: BTreeMap<JobKey, Vec<u8>>,
    running: Option<Digest>,
    slots: BTreeMap<SlotId, Found>,
    written: Vec<String>,
    /// Of this generation the first step may begin.
    go: Option<Digest>,
    /// Files that it was asked to delete.
    deleted: Vec<String>,
    /// State of checkpoints as its launcher finds them, by their steps: whole, where nothing is said.
    view: BTreeMap<u64, State>,
    /// Steps whose checkpoints it was asked to look at again, and the questions.
    looked_again: Vec<u64>,
    questions: Vec<Question>,
    /// Its launcher reads a checkpoint until then, and whether it gets on with it.
    reads: Option<(Time, bool)>,
    /// Texts that people read there.
    told: Vec<String>,
    /// With what its launcher was told to end.
    ended: Option<(i32, String)>,
}

struct World {
    now: Time,
    nodes: Vec<Node>,
    store: Option<BTreeMap<u64, Vec<u8>>>,
    /// COMMITs reach nobody.
    stuck: bool,
    /// Nobody hears that its launcher is to end.
    deaf: bool,
    committed: Vec<u64>,
    queue: BTreeMap<(Time, u64), (usize, Event)>,
    seq: u64,
}

fn node(i: usize) -> NodeId {
    usual::config(i).node
}

fn key() -> JobKey {
    JobKey {
        cluster: "c".into(),
        owner: "0".into(),
        id: "job".into(),
    }
}

impl World {
    /// Two nodes of one rank each that train.
    fn training(store: bool) -> World {
        let mut world = World {
            now: Time::ZERO + Span::from_secs(1),
            nodes: (0..2).map(|_| Node::default()).collect(),
            store: store.then(BTreeMap::new),
            stuck: false,
            deaf: false,
            committed: Vec::new(),
            queue: BTreeMap::new(),
            seq: 0,
        };
        (0..2).for_each(|i| world.start(i));
        world.until("all train", |w| w.trains(&[0, 1]));
        for i in 0..2 {
            world.give_slots(i);
        }
        world
    }

    /// The agent starts with what it stored, and its launcher, which lives on, finds it.
    fn start(&mut self, i: usize) {
        let n = &mut self.nodes[i];
        n.boot += 1;
        let config = Config {
            boot: Boot(n.boot),
            seed: 100 * n.boot + i as u64,
            ..usual::config(i)
        };
        let stored: Vec<_> = n.stored.clone().into_iter().collect();
        n.agent = Some(Agent::new(config, stored, self.now).expect("what was stored"));
        let running = n.running;
        for j in (0..self.nodes.len()).filter(|j| *j != i) {
            if self.nodes[j].agent.is_none() {
                continue;
            }
            for (at, of) in [(i, j), (j, i)] {
                let event = Event::Connected {
                    node: node(of),
                    addr: SocketAddr::new(HERE, 1),
                    observed: HERE,
                };
                self.put(at, event);
            }
        }
        let reg = Register {
            launcher: LauncherId([i as u8 + 1; 8]),
            job: "job".into(),
            spec: JobSpec {
                min_nodes: 1,
                max_nodes: 2,
                max_restarts: 1,
                ..JobSpec::default()
            },
            slots: 1,
            guard_port: 7,
            addrs: vec![HERE],
            place: Place::default(),
            running,
            store: self.store.as_ref().map(|_| StoreUuid([5; 16])),
            parity: 0,
            pid: 1,
            command: String::new(),
            log_dir: None,
            waited_ms: 0,
            began: None,
            lineage: None,
            gate: None,
        };
        self.hears(i, ToAgent::Register(reg));
        if let Some(digest) = running {
            let attempt = 1;
            self.hears(i, ToAgent::Started { digest, attempt });
        }
        self.hears(i, ToAgent::MasterPort { port: 9 });
    }

    fn stop_agent(&mut self, i: usize) {
        self.nodes[i].agent = None;
        self.queue.retain(|_, (to, _)| *to != i);
        for j in (0..self.nodes.len()).filter(|j| *j != i) {
            self.put(j, Event::Disconnected { node: node(i) });
        }
    }

    fn put(&mut self, to: usize, event: Event) {
        self.seq += 1;
        let at = self.now + Span::from_millis(1);
        self.queue.insert((at, self.seq), (to, event));
    }

    fn hears(&mut self, i: usize, frame: ToAgent) {
        let event = Event::Launcher {
            conn: ConnId(self.nodes[i].boot),
            owner: "0".into(),
            frame,
        };
        self.put(i, event);
    }

    fn says(&mut self, i: usize, news: SaveNews) {
        self.hears(i, ToAgent::Save(news));
    }

    fn give_slots(&mut self, i: usize) {
        let found = [0, 1].map(|side| {
            let slot = SlotId { k: 0, side };
            self.nodes[i]
                .slots
                .get(&slot)
                .copied()
                .unwrap_or(Found::Free)
        });
        let news = SaveNews::Slots {
            k: 0,
            capacity: 100,
            found,
        };
        self.says(i, news);
    }

    /// The ranks save before this step.
    fn save(&mut self, step: u64) {
        (0..2).for_each(|i| self.seal(i, step));
    }

    /// The rank of a node does.
    fn seal(&mut self, i: usize, step: u64) {
        let generation = self.head(0).or(self.head(1)).expect("a generation").1;
        let slots = &self.nodes[i].slots;
        let free = |slot: &SlotId| slots.get(slot).is_none_or(|found| *found == Found::Free);
        let mut sides = [0, 1].map(|side| SlotId { k: 0, side }).into_iter();
        let slot = sides.find(free).expect("a free slot");
        let copy = Copy {
            generation,
            step,
            bytes: 100,
            digest: Digest([1; 32]),
        };
        self.nodes[i].slots.insert(slot, Found::Sealed(copy));
        self.says(i, SaveNews::Filling { slot, step });
        self.says(i, SaveNews::Sealed { slot, copy });
    }

    fn until(&mut self, what: &str, holds: impl Fn(&World) -> bool) {
        for _ in 0..STEPS {
            if holds(self) {
                return;
            }
            self.step();
        }
        unreachable!("{what} never held at {:?}", self.now);
    }

    fn step(&mut self) {
        let due = |n: &Node| n.agent.as_ref()?.poll_timeout().map(|(at, _)| at);
        let timer = self.nodes.iter().filter_map(due).min();
        let event = self.queue.first_key_value().map(|(k, _)| *k);
        match event.filter(|(at, _)| timer.is_none_or(|t| *at <= t)) {
            Some(found) => {
                let (to, event) = self.queue.remove(&found).expect("the first");
                self.now = self.now.max(found.0);
                if let Some(agent) = self.nodes[to].agent.as_mut() {
                    let _refused = agent.handle(event, self.now);
                }
                self.carry_out(to);
            }
            None => {
                self.now = self.now.max(timer.expect("somebody waits for something"));
                for i in 0..self.nodes.len() {
                    if due(&self.nodes[i]).is_some_and(|at| at <= self.now) {
                        let agent = self.nodes[i].agent.as_mut();
                        agent.expect("it waits").handle_timeout(self.now);
                        self.carry_out(i);
                    }
                }
            }
        }
    }

    fn carry_out(&mut self, i: usize) {
        while let Some(effect) = self.nodes[i].agent.as_mut().and_then(Agent::poll_effect) {
            match effect {
                Effect::Persist { key, bytes } => {
                    self.nodes[i].stored.insert(key.clone(), bytes);
                    self.put(i, Event::Persisted { key });
                }
                Effect::Send { to, message } => {
                    let frame = message.encode().expect("within the limits");
                    let message = Message::decode(&frame).expect("valid");
                    let to = (0..2).find(|j| node(*j) == to).expect("a node");
                    let from = node(i);
                    let unfit = |body: &JobMessage| matches!(body, JobMessage::Unfit { .. });
                    if self.deaf && matches!(&message, Message::Job { body, .. } if unfit(body)) {
                        continue;
                    }
                    self.put(to, Event::Message { from, message });
                }
                Effect::Probe { node: of, id, .. } => {
                    let of = (0..2).find(|j| node(*j) == of).expect("a node");
                    let answer = |up| match up {
                        true => Answer::Answered,
                        false => Answer::Refused,
                    };
                    let agent = answer(self.nodes[of].agent.is_some());
                    let guard = answer(self.nodes[of].running.is_some());
                    let node = node(of);
                    let event = Event::Probed {
                        node,
                        id,
                        agent,
                        guard,
                    };
                    self.put(i, event);
                }
                Effect::ToLauncher { frame, .. } => self.told(i, frame),
                Effect::Store { key, effect } => {
                    if let Some(event) = self.store(effect) {
                        self.put(i, Event::Store { key, event });
                    }
                }
                Effect::Notice(Notice::Committed { commit, .. }) => {
                    self.committed.push(commit.step);
                }
                _ => {}
            }
        }
    }

    fn store(&mut self, effect: storelog::Effect) -> Option<storelog::Event> {
        let store = self.store.as_mut()?;
        Some(match effect {
            storelog::Effect::Read { op, slot } => storelog::Event::Read {
                op,
                slot,
                outcome: match store.get(&slot) {
                    Some(bytes) => ReadOutcome::Found(bytes.clone()),
                    None => ReadOutcome::Absent,
                },
            },
            storelog::Effect::Create { op, slot, bytes } => {
                let entry = storelog::Entry::decode(&bytes).expect("an entry");
                let outcome = match store.entry(slot) {
                    Entry::Occupied(_) => CreateOutcome::Exists,
                    Entry::Vacant(place) => {
                        place.insert(bytes);
                        CreateOutcome::Won
                    }
                };
                // It is there, and nobody is told.
                if self.stuck && matches!(entry.body, Body::Commit(_)) {
                    return None;
                }
                storelog::Event::Created { op, slot, outcome }
            }
        })
    }

    fn told(&mut self, i: usize, frame: ToLauncher) {
        match frame {
            ToLauncher::Welcome { .. } => self.hears(i, ToAgent::Alive),
            ToLauncher::Start(start) => {
                self.nodes[i].running = Some(start.digest);
                let (digest, attempt) = (start.digest, start.attempt);
                self.hears(i, ToAgent::Started { digest, attempt });
            }
            ToLauncher::Stop { digest, .. } => {
                self.nodes[i].running.take_if(|r| *r == digest);
                self.hears(i, ToAgent::Stopped { digest });
            }
            ToLauncher::Save(ask) => self.asked(i, ask),
            ToLauncher::End { code, report } => self.nodes[i].ended = Some((code, report)),
            ToLauncher::Refused { reason } => self.nodes[i].ended = Some((1, reason)),
            _ => {}
        }
    }

    /// Does what a launcher does about slots and files.
    fn asked(&mut self, i: usize, ask: SaveAsk) {
        let news = match ask {
            SaveAsk::Write { slot, save } => {
                self.nodes[i].written.push(save.file(0, slot.k));
                SaveNews::Written {
                    slot,
                    attempt: save.attempt,
                    bytes: 100,
                    summary: vec![1; 32],
                }
            }
            SaveAsk::Free { slot } => {
                self.nodes[i].slots.insert(slot, Found::Free);
                return;
            }
            SaveAsk::Hold { manifest, .. } => SaveNews::Held { manifest },
            SaveAsk::Assemble { save, parts, last } => {
                assert!(last && parts.len() == 2, "one part of each rank");
                SaveNews::Assembled {
                    save,
                    manifest: Digest([save.step as u8; 32]),
                    bytes: 10,
                }
            }
            SaveAsk::Go { digest } => {
                self.nodes[i].go = Some(digest);
                return;
            }
            SaveAsk::StopWrite { .. } | SaveAsk::Committed { .. } => return,
            SaveAsk::Tell { text } => return self.nodes[i].told.push(text),
            SaveAsk::LookAgain(question) => {
                let (number, step) = (question.number, u64::from(question.manifest.0[0]));
                let n = &mut self.nodes[i];
                if n.questions.last() != Some(&question) {
                    n.looked_again.push(step);
                    n.questions.push(question.clone());
                }
                let moves = n.reads.filter(|(until, _)| self.now < *until);
                if let Some((_, moves)) = moves {
                    let read = if moves { self.now.0 } else { 1 };
                    let news = KeepNews::LooksAgain { number, read };
                    return self.says(i, SaveNews::Keep(news));
                }
                let state = match self.sees(i, step) {
                    State::Verified if !question.all => State::Unchecked,
                    state => state,
                };
                SaveNews::Keep(KeepNews::LookedAgain { number, state })
            }
            SaveAsk::Review(review) => return self.review(i, &review),
            SaveAsk::Delete { name } => return self.nodes[i].deleted.push(name),
            SaveAsk::Refuse { .. } | SaveAsk::Skip { .. } | SaveAsk::Inherit { .. } => {
                unreachable!("{ask:?}")
            }
        };
        self.says(i, news);
    }

    /// How a node's launcher finds the checkpoint of a step.
    fn sees(&self, i: usize, step: u64) -> State {
        let seen = self.nodes[i].view.get(&step);
        seen.cloned().unwrap_or(State::Verified)
    }

    /// A launcher that would keep two, and thinks that everything else may go.
    fn review(&mut self, i: usize, review: &Review) {
        assert!(review.last, "a short log");
        let round = review.round;
        let names = |of: &Standing| {
            let data = format!("data/{}", of.commit.step);
            vec![data, format!("manifest/{}.json", of.commit.manifest.hex())]
        };
        for of in &review.commits {
            let state = self.sees(i, of.commit.step);
            let looked = KeepNews::Looked {
                round,
                seq: of.seq,
                needs: names(of),
                state,
                gone: false,
            };
            self.says(i, SaveNews::Keep(looked));
        }
        let live: Vec<&Standing> = review.commits.iter().filter(|of| !of.retired).collect();
        let usable = live.iter().filter(|of| !of.rejected).rev();
        let kept: Vec<u64> = usable.take(2).map(|of| of.seq).collect();
        let retire: Vec<u64> = (live.iter().map(|of| of.seq))
            .filter(|seq| !kept.contains(seq))
            .collect();
        let all = review.commits.iter().flat_map(names);
        let left: Vec<Left> = all
            .chain(["data/orphan".to_owned()])
            .map(|name| Left {
                name,
                generation: review.generation.0[..8].try_into().expect("eight bytes"),
            })
            .collect();
        for news in KeepNews::decided(round, &retire, &left) {
            self.says(i, SaveNews::Keep(news));
        }
    }

    /// Steps whose COMMIT was retired, and steps whose was rejected.
    fn taken_back(&self) -> (Vec<u64>, Vec<u64>) {
        let all = self.store.iter().flatten();
        let entries: Vec<storelog::Entry> = all
            .map(|(_, bytes)| storelog::Entry::decode(bytes).expect("an entry"))
            .collect();
        let step = |seq: u64| {
            entries.iter().find_map(|e| match &e.body {
                Body::Commit(commit) if e.seq == seq => Some(commit.step),
                _ => None,
            })
        };
        let (mut retired, mut rejected) = (Vec::new(), Vec::new());
        for entry in &entries {
            match &entry.body {
                Body::Retire { seq, .. } => retired.extend(step(*seq)),
                Body::Reject { seq, .. } => rejected.extend(step(*seq)),
                _ => {}
            }
        }
        (retired, rejected)
    }

    fn deleted(&self, step: u64) -> bool {
        let name = format!("data/{step}");
        let mut all = self.nodes.iter().flat_map(|n| &n.deleted);
        all.any(|deleted| *deleted == name)
    }

    fn head(&self, i: usize) -> Option<(Record, Digest)> {
        let job = self.nodes[i].agent.as_ref()?.job(&key())?;
        job.head()
            .map(|(record, digest)| (Record::clone(record), digest))
    }

    fn trains(&self, nodes: &[usize]) -> bool {
        let head = |i: &usize| self.head(*i).map(|(r, d)| (r.members.len(), d));
        let first = head(&nodes[0]);
        nodes.iter().all(|i| {
            let runs = self.nodes[*i].running;
            head(i) == first && first.is_some_and(|(n, d)| n == nodes.len() && runs == Some(d))
        })
    }

    /// A worker of a node ends with a failure.
    fn fails(&mut self, i: usize, damaged: Option<Damaged>) {
        let digest = self.nodes[i].running.expect("it trains");
        let rank = u32::from(self.head(i).expect("a generation").0.leader() != Some(node(i)));
        let exit = WorkerExit {
            rank,
            local_rank: 0,
            pid: 1,
            code: 1,
            signal: None,
            hung: false,
            out_of_memory: None,
            damaged,
            at_ms: 1,
            tail: String::new(),
        };
        self.hears(i, ToAgent::Exited { digest, exit });
    }

    /// A node's launcher finds the checkpoint of this step damaged from now on.
    fn damage(&mut self, i: usize, step: u64) {
        let why = format!("step {step} is cut");
        self.nodes[i].view.insert(step, State::Damaged { why });
    }

    fn pass(&mut self, span: Span) {
        let until = self.now + span;
        self.until("time passes", |w| w.now >= until);
    }

    fn slots_are_free(&self) -> bool {
        let mut slots = self.nodes.iter().flat_map(|n| n.slots.values());
        slots.all(|found| *found == Found::Free)
    }

    fn commits_in_log(&self) -> usize {
        self.in_log(|body| matches!(body, Body::Commit(_)))
    }

    fn rejects_in_log(&self) -> usize {
        self.in_log(|body| matches!(body, Body::Reject { .. }))
    }

    fn in_log(&self, is: impl Fn(&Body) -> bool) -> usize {
        let all = self.store.iter().flatten();
        let entries = all.map(|(_, bytes)| storelog::Entry::decode(bytes).expect("an entry"));
        entries.filter(|e| is(&e.body)).count()
    }
}
