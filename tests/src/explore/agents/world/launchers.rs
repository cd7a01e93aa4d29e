//! Launchers that do what they are told at once: their workers start and end in no time.

use std::collections::VecDeque;
use std::rc::Rc;

use muster_protocol::LauncherId;
use muster_protocol::agent::{ConnId, Event};
use muster_protocol::local::{Register, ToAgent, ToLauncher};
use muster_protocol::membership::Answer;
use muster_protocol::spec::JobSpec;

use super::{Launcher, World, address, mix};
use crate::explore::agents::judge::Broken;
use crate::sim::truth::Spawn;
use crate::usual;

impl World {
    pub(super) fn launcher_comes(&mut self, node: usize) -> Result<(), Broken> {
        if self.nodes[node].launcher.is_some() {
            return Ok(());
        }
        self.launchers += 1;
        let mut id = [node as u8 + 1; 8];
        id[4..].copy_from_slice(&self.launchers.to_be_bytes());
        Rc::make_mut(&mut self.nodes[node]).launcher = Some(Launcher {
            id: LauncherId(id),
            conn: ConnId(0),
            running: None,
            port: 30_000,
        });
        self.register(node)
    }

    pub(super) fn register(&mut self, node: usize) -> Result<(), Broken> {
        self.conns += 1;
        let conn = ConnId(self.conns);
        let n = Rc::make_mut(&mut self.nodes[node]);
        let Some(launcher) = n.launcher.as_mut().filter(|_| n.agent.is_some()) else {
            return Ok(());
        };
        launcher.conn = conn;
        launcher.port += 1;
        let spec = JobSpec {
            min_nodes: self.setup.min,
            max_nodes: self.setup.max,
            loss_grace_ms: 0,
            stop_grace_ms: 500,
            ..JobSpec::default()
        };
        let register = Register {
            guard_port: 40_000,
            running: launcher.running,
            ..usual::register(launcher.id, "j", spec, address(node, 0).ip())
        };
        let port = ToAgent::MasterPort {
            port: launcher.port,
        };
        for frame in [ToAgent::Register(register), port] {
            let owner = "u".to_owned();
            self.event(node, Event::Launcher { conn, owner, frame }, mix(3, conn.0))?;
        }
        Ok(())
    }

    pub(super) fn launcher_dies(&mut self, node: usize) -> Result<(), Broken> {
        let n = Rc::make_mut(&mut self.nodes[node]);
        n.history = mix(n.history, 15);
        let Some(launcher) = n.launcher.take() else {
            return Ok(());
        };
        let (conn, guard) = (launcher.conn, Answer::Refused);
        self.event(node, Event::LauncherGone { conn, guard }, 4)
    }

    pub(super) fn told(
        &mut self,
        node: usize,
        conn: ConnId,
        frame: ToLauncher,
        back: &mut VecDeque<Event>,
    ) {
        let now = self.now;
        let n = Rc::make_mut(&mut self.nodes[node]);
        let Some(launcher) = n.launcher.as_mut().filter(|l| l.conn == conn) else {
            return;
        };
        let mut say = |frame| {
            let owner = "u".to_owned();
            back.push_back(Event::Launcher { conn, owner, frame });
        };
        match frame {
            ToLauncher::Welcome { .. } => say(ToAgent::Alive),
            ToLauncher::Start(start) => {
                let (digest, attempt) = (start.digest, start.attempt);
                launcher.running = Some(digest);
                launcher.port += 1;
                say(ToAgent::Started { digest, attempt });
                say(ToAgent::MasterPort {
                    port: launcher.port,
                });
                let mut token = [0; 4];
                token.copy_from_slice(&launcher.id.0[4..]);
                let spawn = Spawn {
                    node,
                    launcher: launcher.id,
                    token: u32::from_be_bytes(token),
                    start,
                    at: now,
                    restore: None,
                };
                let truth = Rc::make_mut(&mut self.truth);
                truth.spawns.push(spawn);
                truth.dirty = true;
            }
            ToLauncher::Stop { digest, .. } | ToLauncher::Preempt { digest, .. } => {
                launcher.running = None;
                say(ToAgent::Stopped { digest });
            }
            ToLauncher::End { .. } | ToLauncher::Refused { .. } => {
                n.launcher = None;
                let guard = Answer::Refused;
                back.push_back(Event::LauncherGone { conn, guard });
            }
            _ => {}
        }
    }
}
