use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use crate::agent::{Agent, Config, ConnId, Effect, Event, Flaws};
use crate::barrier::Held;
use crate::control::Reason;
use crate::ids::{Boot, Digest, JobKey, LauncherId, NodeId, StateId};
use crate::local::{Command, Register, ToAgent, ToLauncher};
use crate::record::Place;
use crate::spec::JobSpec;
use crate::time::{Span, Time};
use crate::wire::{CheckpointStage, Saved};

/// Of a checkpoint that never ends: more than the leader waits for it.
const LONG: Span = Span::from_secs(700);

/// A node alone with its launcher, which answers nothing about steps.
struct Alone {
    agent: Agent,
    boot: u64,
    now: Time,
    stored: BTreeMap<JobKey, Vec<u8>>,
    told: Vec<ToLauncher>,
}

impl Alone {
    fn agent(boot: u64, stored: BTreeMap<JobKey, Vec<u8>>, now: Time) -> Agent {
        let config = Config {
            node: NodeId([1; 32]),
            state: StateId([1; 8]),
            boot: Boot(boot),
            cluster: "c".into(),
            host: "h".into(),
            version: "1".into(),
            pid: 1,
            seed: boot,
            suspect_after: Span::from_secs(2),
            agent_grace: Span::from_secs(10),
            birth_timeout: Span::from_secs(4),
            start_timeout: Span::from_secs(10),
            minority_wait: Span::from_secs(6),
            orphan_after: Span::from_secs(10),
            place: Place::default(),
            flaws: Flaws::default(),
        };
        Agent::new(config, stored.into_iter().collect(), now).unwrap()
    }

    fn new() -> Alone {
        let (boot, now, stored) = (1, Time(1_000_000_000), BTreeMap::new());
        Alone {
            agent: Alone::agent(boot, stored.clone(), now),
            boot,
            now,
            stored,
            told: Vec::new(),
        }
    }

    fn says(&mut self, frame: ToAgent) {
        let (conn, owner) = (ConnId(self.boot), "0".into());
        let event = Event::Launcher { conn, owner, frame };
        self.agent.handle(event, self.now).unwrap();
        self.carry_out();
    }

    fn carry_out(&mut self) {
        while let Some(effect) = self.agent.poll_effect() {
            match effect {
                Effect::Persist { key, bytes } => {
                    self.stored.insert(key, bytes);
                }
                Effect::ToLauncher { frame, .. } => self.told.push(frame),
                _ => {}
            }
        }
    }

    fn registers(&mut self, running: Option<(Digest, Held)>) {
        self.says(ToAgent::Register(Register {
            launcher: LauncherId([1; 8]),
            job: "job".into(),
            spec: JobSpec {
                min_nodes: 1,
                max_nodes: 1,
                ..JobSpec::default()
            },
            slots: 1,
            guard_port: 7,
            addrs: vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
            place: Place::default(),
            running: running.map(|(digest, _)| digest),
            gate: running.map(|(_, held)| held),
            store: None,
            pid: 1,
            command: String::new(),
            log_dir: None,
        }));
        self.says(ToAgent::MasterPort { port: 9 });
    }

    fn pass(&mut self, span: Span) {
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

    fn asks(&mut self) -> CheckpointStage {
        self.says(ToAgent::Command(Command::Checkpoint { job: "job".into() }));
        self.pass(Span::from_secs(5));
        self.stage()
    }

    fn stage(&self) -> CheckpointStage {
        let job = self.agent.jobs().next().unwrap();
        job.checkpoint().unwrap().state.stage.clone()
    }
}

/// Some rank never saved, and a new leader cannot know whether it still does: it waits for that one
/// time, and not whenever somebody asks.
#[test]
fn a_checkpoint_that_nobody_ends_holds_up_one_other_at_most() {
    let mut alone = Alone::new();
    alone.registers(None);
    let start = |frame: &ToLauncher| match frame {
        ToLauncher::Start(start) => Some((start.digest, start.attempt)),
        _ => None,
    };
    // Until the job is born.
    let begun = (0..100).find_map(|_| {
        alone.pass(Span::from_millis(100));
        alone.told.iter().find_map(start)
    });
    let (digest, attempt) = begun.unwrap();
    let facts = [
        ToAgent::Started { digest, attempt },
        ToAgent::TakesStopSteps { digest, yes: true },
    ];
    facts.iter().for_each(|fact| alone.says(fact.clone()));
    alone.pass(Span::from_secs(1));
    // Another run of the agent, which finds a checkpoint that is under way.
    alone.boot += 1;
    alone.agent = Alone::agent(alone.boot, alone.stored.clone(), alone.now);
    let held = Held {
        barrier: 1,
        step: 5,
        reason: Reason::Checkpoint,
        confirmed: true,
    };
    alone.registers(Some((digest, held)));
    facts.into_iter().for_each(|fact| alone.says(fact));
    let saved = Saved {
        step: 5,
        ranks: Vec::new(),
        all: false,
    };
    alone.says(ToAgent::Saved { digest, saved });
    alone.pass(Span::from_secs(5));
    alone.told.clear();
    assert_eq!(alone.asks(), CheckpointStage::Saving { step: 5 });
    alone.pass(LONG);
    assert!(matches!(alone.stage(), CheckpointStage::Failed { .. }));
    let installs = |alone: &Alone| {
        let install = |f: &&ToLauncher| matches!(f, ToLauncher::InstallStop { .. });
        alone.told.iter().filter(install).count()
    };
    assert_eq!(installs(&alone), 0);
    // The next one is agreed on anew.
    assert_eq!(alone.asks(), CheckpointStage::Agreeing);
    assert!(installs(&alone) > 0, "{:?}", alone.told);
}
