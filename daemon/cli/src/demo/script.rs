//! The acts on the job, their order, and how long each is waited for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::cluster::{Cluster, JOB};
use super::follow::Follower;
use super::recording::{Act, Change, Down, NodeLife, Recording};
use super::show::Screen;
use crate::run::workers::unix_ms;

/// Between two looks at everything.
const LOOK: Duration = Duration::from_millis(20);
/// The longest that an agent takes to listen, and all of them to find each other.
const AGENTS: Duration = Duration::from_secs(20);
/// The longest from a change to the first step of the generation after it.
const RECOVERY: Duration = Duration::from_secs(30);
/// The longest that the training takes to the next change, or to its end.
const TRAINING: Duration = Duration::from_secs(60);
/// The longest that processes take to end after they were asked to.
const ENDING: Duration = Duration::from_secs(15);

/// The changes, in order; they are spread evenly over the training.
const ACTS: [Act; 4] = [Act::Kill, Act::Join, Act::KillLeader, Act::Drain];

/// Why the demo stopped before its end.
#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error("interrupted")]
    Interrupted,
    #[error("waited {} s for {what}, in vain", .within.as_secs())]
    TimedOut { what: String, within: Duration },
    #[error("{0} while {1} was waited for")]
    Ended(String, String),
    #[error("the training was over before the {} at step {step}: give it more --steps", .act.word())]
    TooShort { act: Act, step: u64 },
    #[error("generation {generation} has no node for the {}", .act.word())]
    NoVictim { act: Act, generation: u64 },
    #[error(transparent)]
    Io(#[from] std::io::Error),
}

/// Everything that the demo looks at.
#[derive(Debug)]
pub(super) struct Stage {
    pub(super) cluster: Cluster,
    pub(super) recording: Recording,
    pub(super) screen: Screen,
    pub(super) steps: u64,
    /// Steps between checkpoints.
    pub(super) save_every: u64,
    follower: Follower,
    interrupted: Arc<AtomicBool>,
}

impl Stage {
    pub(super) fn new(
        cluster: Cluster,
        screen: Screen,
        (steps, save_every): (u64, u64),
        interrupted: Arc<AtomicBool>,
    ) -> Stage {
        Stage {
            cluster,
            recording: Recording::new(unix_ms()),
            screen,
            steps,
            save_every,
            follower: Follower::default(),
            interrupted,
        }
    }

    /// The whole run, to the end of the training and of every process.
    ///
    /// # Errors
    /// Something did not happen in time or ended by itself; see [`Trouble`].
    pub(super) fn play(&mut self, nodes: u16) -> Result<(), Trouble> {
        self.form(nodes)?;
        let parts = ACTS.len() as u64 + 1;
        for (act, part) in ACTS.into_iter().zip(1..) {
            // Two thirds of the way from one checkpoint to the next.
            let checkpoint = self.steps * part / parts / self.save_every * self.save_every;
            let step = checkpoint + self.save_every * 2 / 3;
            self.train_to(act, step)?;
            self.act(act)?;
        }
        self.finish()
    }

    /// Takes in what is new, and looks whether everything still runs.
    fn look(&mut self, what: &str) -> Result<(), Trouble> {
        if self.interrupted.load(Ordering::Relaxed) {
            return Err(Trouble::Interrupted);
        }
        // A process that ended is looked at before its last words are read, so that these are.
        let ended = self.cluster.unexpected_end()?;
        let mut news = Vec::new();
        for node in &self.cluster.nodes {
            if node.down != Some(Down::Killed) && node.agent.ended.is_none() {
                let told =
                    self.follower
                        .agent(&node.name, &node.socket(), JOB, &mut self.recording);
                news.extend(told);
            }
        }
        for node in &self.cluster.nodes {
            news.extend(
                self.follower
                    .workers(&node.name, &node.events(), &mut self.recording)?,
            );
        }
        news.extend(self.recording.waits(unix_ms()));
        for line in news {
            self.screen.line(&line);
        }
        self.screen.progress(&self.recording, self.steps);
        match ended {
            Some(ended) => Err(Trouble::Ended(ended, what.to_owned())),
            None => Ok(()),
        }
    }

    fn wait(
        &mut self,
        what: &str,
        within: Duration,
        mut holds: impl FnMut(&mut Stage) -> Result<bool, Trouble>,
    ) -> Result<(), Trouble> {
        let deadline = Instant::now() + within;
        loop {
            self.look(what)?;
            if holds(self)? {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Trouble::TimedOut {
                    what: what.to_owned(),
                    within,
                });
            }
            std::thread::sleep(LOOK);
        }
    }

    /// Starts a node's agent and waits until it listens.
    fn add_node(&mut self) -> Result<String, Trouble> {
        let name = self.cluster.add_agent()?;
        self.recording.nodes.push(NodeLife {
            name: name.clone(),
            id: String::new(),
            up_ms: unix_ms(),
            down: None,
        });
        let node = name.clone();
        self.wait(
            &format!("the agent of {name} to listen"),
            AGENTS,
            move |stage| Ok(stage.cluster.node(&node).is_some_and(|n| n.learn())),
        )?;
        let id = self.cluster.node(&name).and_then(|n| n.known.clone());
        for life in self.recording.nodes.iter_mut().filter(|l| l.name == name) {
            life.id = id.iter().map(|(_, id)| id.clone()).collect();
        }
        Ok(name)
    }

    fn form(&mut self, nodes: u16) -> Result<(), Trouble> {
        for _ in 0..nodes {
            self.add_node()?;
        }
        let others = usize::from(nodes).saturating_sub(1);
        self.wait(
            &format!("{nodes} agents to find each other"),
            AGENTS,
            |stage| Ok(stage.cluster.up().all(|n| n.peers() >= others)),
        )?;
        self.screen
            .line(&format!("{nodes} agents have found each other"));
        let names: Vec<String> = self.cluster.nodes.iter().map(|n| n.name.clone()).collect();
        for name in &names {
            self.cluster.launch(name)?;
        }
        self.screen
            .line(&format!("muster run on {}", names.join(", ")));
        self.recover(Change {
            act: Act::Form,
            node: names.join(" "),
            at_ms: unix_ms(),
        })
    }

    /// Waits until the training reaches a step, before which it must not end.
    fn train_to(&mut self, act: Act, step: u64) -> Result<(), Trouble> {
        self.wait(&format!("step {step}"), TRAINING, |stage| {
            let done = stage.recording.workers.values().flatten();
            if done.into_iter().any(|w| w.done.is_some()) {
                return Err(Trouble::TooShort { act, step });
            }
            Ok(stage.recording.progress() >= step)
        })
    }

    /// The node to do it to: rank 0's, or the last one, which is another.
    fn victim(&self, act: Act) -> Result<String, Trouble> {
        let generation = self.recording.newest();
        let seats = generation.map_or(&[][..], |g| g.seats.as_slice());
        let seat = match act {
            Act::KillLeader => seats.first(),
            _ => seats.last(),
        };
        seat.map(|s| s.node.clone()).ok_or(Trouble::NoVictim {
            act,
            generation: generation.map_or(0, |g| g.number),
        })
    }

    fn act(&mut self, act: Act) -> Result<(), Trouble> {
        let (node, at_ms) = match act {
            Act::Form => return Ok(()),
            Act::Kill | Act::KillLeader => {
                let node = self.victim(act)?;
                let newest = self.recording.newest().map_or(0, |g| g.number);
                let workers = self.recording.workers_of(newest);
                let worker = workers.iter().find(|w| w.node == node).map(|w| w.pid);
                let of = if act == Act::Kill { "" } else { ", rank 0's" };
                self.screen.line(&format!(
                    "SIGKILL to agent, launcher and worker of {node}{of}"
                ));
                let at_ms = unix_ms();
                self.cluster.kill_node(&node, worker)?;
                self.down(&node, at_ms, Down::Killed);
                (node, at_ms)
            }
            Act::Drain => {
                let node = self.victim(act)?;
                self.screen.line(&format!("SIGTERM to the agent of {node}"));
                let at_ms = unix_ms();
                self.cluster.drain_node(&node)?;
                (node, at_ms)
            }
            Act::Join => {
                let node = self.add_node()?;
                self.screen
                    .line(&format!("muster run on {node}, a new node"));
                let at_ms = unix_ms();
                self.cluster.launch(&node)?;
                (node, at_ms)
            }
        };
        self.recover(Change {
            act,
            node: node.clone(),
            at_ms,
        })?;
        if act == Act::Drain {
            self.drained(&node)?;
        }
        Ok(())
    }

    fn down(&mut self, node: &str, ms: u64, down: Down) {
        for life in self.recording.nodes.iter_mut().filter(|l| l.name == node) {
            life.down = Some((ms, down));
        }
    }

    /// Waits until training goes on after a change.
    fn recover(&mut self, change: Change) -> Result<(), Trouble> {
        let what = format!(
            "training to go on after the {} of {}",
            change.act.word(),
            change.node
        );
        self.recording.changes.push(change.clone());
        self.wait(&what, RECOVERY, |stage| {
            let generation = stage.recording.recovered(&change);
            Ok(generation.is_some_and(|g| g.phases.is_some()))
        })
    }

    /// A drained node's launcher and agent end by themselves.
    fn drained(&mut self, name: &str) -> Result<(), Trouble> {
        let what = format!("launcher and agent of {name} to end");
        self.wait(&what, ENDING, |stage| {
            let Some(node) = stage.cluster.node(name) else {
                return Ok(true);
            };
            let launcher = match &mut node.launcher {
                Some(launcher) => launcher.look()?.is_some(),
                None => true,
            };
            Ok(launcher && node.agent.look()?.is_some())
        })?;
        self.down(name, unix_ms(), Down::Drained);
        self.screen.line(&format!("{name} has left"));
        Ok(())
    }

    /// The end of the training, of the launchers and of the agents.
    fn finish(&mut self) -> Result<(), Trouble> {
        self.wait("the end of the training", TRAINING, |stage| {
            let last = stage.recording.workers.iter().next_back();
            Ok(last.is_some_and(|(_, all)| all.iter().all(|w| w.done.is_some())))
        })?;
        self.wait("the launchers to end", ENDING, |stage| {
            let mut nodes = stage.cluster.up();
            Ok(nodes.all(|n| n.launcher.as_ref().is_none_or(|l| l.ended.is_some())))
        })?;
        self.wait("the agents to know of the end", ENDING, |stage| {
            Ok(stage.recording.generations.iter().any(|g| !g.runs))
        })?;
        self.cluster.dismiss();
        let deadline = Instant::now() + ENDING;
        loop {
            let mut left = Vec::new();
            for node in self.cluster.nodes.iter_mut().filter(|n| n.is_up()) {
                if node.agent.look()?.is_none() {
                    left.push(node.name.clone());
                }
            }
            if left.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                return Err(Trouble::TimedOut {
                    what: format!("the agents of {} to end after SIGTERM", left.join(", ")),
                    within: ENDING,
                });
            }
            std::thread::sleep(LOOK);
        }
    }
}
