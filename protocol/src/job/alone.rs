//! For tests: an agent with one job that nobody else is part of, and time that the test moves.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use crate::agent::{Agent, Config, ConnId, Effect, Event, Flaws, Notice};
use crate::barrier::Held;
use crate::checkpoint::{Save, SlotId};
use crate::ids::{Boot, Digest, Home, JobKey, LauncherId, NodeId, StateId};
use crate::local::{Command, Register, SaveNews, ToAgent, ToLauncher};
use crate::record::Place;
use crate::spec::JobSpec;
use crate::time::{Span, Time};
use crate::wire::CheckpointStage;

/// Of all jobs' slots.
pub(super) const SLOT_MEMORY: u64 = 4 << 30;

/// A node alone with its launcher, which answers nothing about steps.
pub(super) struct Alone {
    pub(super) agent: Agent,
    pub(super) boot: u64,
    pub(super) now: Time,
    pub(super) stored: BTreeMap<JobKey, Vec<u8>>,
    /// Messages to its launcher, and to people.
    pub(super) told: Vec<ToLauncher>,
    pub(super) said: Vec<String>,
    /// Of whose guard it asks.
    pub(super) asked: Vec<(u64, LauncherId)>,
    /// The launcher that registers, and over which connection.
    pub(super) launcher: u8,
    pub(super) conn: u64,
    spec: JobSpec,
    /// Ranks of its launcher.
    pub(super) slots: u16,
}

impl Alone {
    pub(super) fn agent(boot: u64, stored: BTreeMap<JobKey, Vec<u8>>, now: Time) -> Agent {
        let config = Config {
            node: NodeId([1; 32]),
            state: StateId([1; 8]),
            boot: Boot(boot),
            cluster: "c".into(),
            host: "h".into(),
            version: "1".into(),
            pid: 1,
            home: Home::ZERO,
            seed: boot,
            suspect_after: Span::from_secs(2),
            agent_grace: Span::from_secs(10),
            birth_timeout: Span::from_secs(4),
            start_timeout: Span::from_secs(10),
            minority_wait: Span::from_secs(6),
            orphan_after: Span::from_secs(12),
            one_host: false,
            slot_memory: SLOT_MEMORY,
            slot_lease: Span::from_secs(600),
            embedded: false,
            place: Place::default(),
            memory: crate::memory::Key::default(),
            compaction: crate::storelog::Compaction::default(),
            flaws: Flaws::default(),
        };
        let stored: Vec<_> = stored.into_iter().collect();
        Agent::new(config, stored, now).unwrap()
    }

    pub(super) fn new() -> Alone {
        Alone::with(JobSpec::default())
    }

    /// With flags of its own.
    pub(super) fn with(spec: JobSpec) -> Alone {
        let (boot, now, stored) = (1, Time(1_000_000_000), BTreeMap::new());
        Alone {
            agent: Alone::agent(boot, stored.clone(), now),
            boot,
            now,
            stored,
            told: Vec::new(),
            said: Vec::new(),
            asked: Vec::new(),
            launcher: 1,
            conn: 1,
            spec,
            slots: 1,
        }
    }

    pub(super) fn says(&mut self, frame: ToAgent) {
        let (conn, owner) = (ConnId(self.conn), "0".into());
        let event = Event::Launcher { conn, owner, frame };
        self.agent.handle(event, self.now).unwrap();
        self.carry_out();
    }

    pub(super) fn carry_out(&mut self) {
        while let Some(effect) = self.agent.poll_effect() {
            match effect {
                Effect::Persist { key, bytes } => {
                    self.stored.insert(key.clone(), bytes);
                    self.agent
                        .handle(Event::Persisted { key }, self.now)
                        .unwrap();
                }
                Effect::ToLauncher { conn, frame } => {
                    if matches!(frame, ToLauncher::Welcome { .. }) {
                        let (owner, frame) = ("0".into(), ToAgent::Alive);
                        let event = Event::Launcher { conn, owner, frame };
                        self.agent.handle(event, self.now).unwrap();
                    }
                    self.told.push(frame);
                }
                Effect::Probe {
                    id,
                    guard: Some((_, launcher)),
                    ..
                } => self.asked.push((id, launcher)),
                Effect::Notice(Notice::Saving { text, .. }) => self.said.push(text),
                _ => {}
            }
        }
    }

    pub(super) fn registers(&mut self, running: Option<(Digest, Held)>) {
        let (running, gate) = running.unzip();
        self.registers_with(running, gate);
    }

    /// Its workers run, and nothing holds them.
    pub(super) fn comes_back(&mut self, running: Digest) {
        self.registers_with(Some(running), None);
    }

    fn registers_with(&mut self, running: Option<Digest>, gate: Option<Held>) {
        self.says(self.registration(running, gate));
        self.says(ToAgent::MasterPort { port: 9 });
    }

    pub(super) fn registration(&self, running: Option<Digest>, gate: Option<Held>) -> ToAgent {
        ToAgent::Register(Register {
            launcher: LauncherId([self.launcher; 8]),
            job: "job".into(),
            spec: self.spec.clone(),
            slots: self.slots,
            guard_port: 7,
            addrs: vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
            place: Place::default(),
            running,
            waited_ms: 0,
            began: None,
            lineage: None,
            gate,
            store: None,
            parity: 0,
            pid: 1,
            command: String::new(),
            log_dir: None,
        })
    }

    /// The copy of so many bytes in this slot is durable, and its save is committed.
    pub(super) fn commits(&mut self, slot: SlotId, save: Save, bytes: u64) {
        let attempt = save.attempt;
        let summary = vec![1; 32];
        let manifest = Digest([attempt as u8; 32]);
        let news = [
            SaveNews::Written {
                slot,
                attempt,
                bytes,
                summary,
            },
            SaveNews::Assembled {
                save,
                manifest,
                bytes: 10,
            },
            SaveNews::Held { manifest },
        ];
        for news in news {
            self.says(ToAgent::Save(news));
        }
        self.pass(Span::from_millis(10));
    }

    pub(super) fn pass(&mut self, span: Span) {
        let until = self.now + span;
        for _ in 0..100_000 {
            match self.agent.poll_timeout().filter(|(at, _)| *at <= until) {
                Some((at, _)) => self.now = self.now.max(at),
                None => {
                    self.now = until;
                    return;
                }
            }
            self.agent.handle_timeout(self.now);
            self.carry_out();
        }
        panic!("the agent is never at rest");
    }

    pub(super) fn asks(&mut self) -> CheckpointStage {
        self.says(ToAgent::Command(Command::Checkpoint { job: "job".into() }));
        self.pass(Span::from_secs(5));
        self.stage()
    }

    pub(super) fn stage(&self) -> CheckpointStage {
        let job = self.agent.jobs().next().unwrap();
        job.checkpoint().unwrap().state.stage.clone()
    }

    /// Has the job born, and its worker attached.
    pub(super) fn trains(&mut self) -> (Digest, u32) {
        self.registers(None);
        let start = |frame: &ToLauncher| match frame {
            ToLauncher::Start(start) => Some((start.digest, start.attempt)),
            _ => None,
        };
        let begun = (0..100).find_map(|_| {
            self.pass(Span::from_millis(100));
            self.told.iter().find_map(start)
        });
        let (digest, attempt) = begun.unwrap();
        self.says(ToAgent::Started { digest, attempt });
        self.says(ToAgent::TakesStopSteps { digest, yes: true });
        (digest, attempt)
    }
}
