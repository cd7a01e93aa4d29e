//! Launchers and command lines on this node: registrations, frames, orders.

use super::{Agent, ConnId, Effect, Error};
use crate::ids::{JobKey, NodeId};
use crate::job::Job;
use crate::local::{Command, Register, ToAgent, ToLauncher};
use crate::peers::Peer;
use crate::record::Place;
use crate::time::Time;
use crate::wire::{Leave, MAX_JOBS, Message};

impl Agent {
    pub(super) fn on_frame(
        &mut self,
        conn: ConnId,
        owner: String,
        frame: ToAgent,
        now: Time,
    ) -> Result<(), Error> {
        match frame {
            ToAgent::Register(reg) => self.register(conn, owner, reg, now),
            ToAgent::Command(command) => self.command(&owner, command, now),
            frame => {
                let key = self.conns.get(&conn).ok_or(Error::NotRegistered)?.clone();
                self.with_job(&key, now, |job, ctx| {
                    job.on_launcher_frame(ctx, frame);
                    job.drive(ctx);
                });
                Ok(())
            }
        }
    }

    fn register(
        &mut self,
        conn: ConnId,
        owner: String,
        mut reg: Register,
        now: Time,
    ) -> Result<(), Error> {
        if reg.place == Place::default() {
            reg.place = self.cfg.place;
        }
        let key = JobKey {
            cluster: self.cfg.cluster.clone(),
            owner,
            id: reg.job.clone(),
        };
        let refuse = |agent: &mut Agent, reason: String| {
            let frame = ToLauncher::Refused {
                reason: reason.clone(),
            };
            agent.effects.push_back(Effect::ToLauncher { conn, frame });
            Err(Error::Refused(reason))
        };
        if !key.is_valid() {
            let reason = "--rdzv-id must have 1 to 64 characters, none of them a control character";
            return refuse(self, reason.into());
        }
        if let Err(error) = reg.spec.check() {
            return refuse(self, error.to_string());
        }
        if reg.slots == 0 || reg.addrs.is_empty() {
            return refuse(self, "a launcher needs a worker and an address".into());
        }
        if self.draining.is_some() && reg.running.is_none() {
            return refuse(
                self,
                "this node is being drained: start the job elsewhere".into(),
            );
        }
        if !self.jobs.contains_key(&key) {
            if self.jobs.len() >= MAX_JOBS {
                return refuse(self, Error::TooManyJobs.to_string());
            }
            self.jobs.insert(key.clone(), Job::new(key.clone()));
        }
        let mut result = Ok(());
        self.with_job(&key, now, |job, ctx| {
            result = job.register(ctx, conn, reg);
        });
        if let Err(reason) = result {
            return refuse(self, reason);
        }
        self.conns.insert(conn, key.clone());
        let mut frame = None;
        self.with_job(&key, now, |_, ctx| frame = Some(Job::welcome(ctx)));
        let welcome = frame.map(|frame| Effect::ToLauncher { conn, frame });
        self.effects.extend(welcome);
        self.with_job(&key, now, Job::drive);
        Ok(())
    }

    fn command(&mut self, owner: &str, command: Command, now: Time) -> Result<(), Error> {
        match command {
            Command::Drain { node, grace_ms } => {
                let reason = "an operator drains it".to_owned();
                let mine = node.is_empty() || self.is_named(&node);
                if mine && !self.names_a_peer(&node) {
                    self.drain(Leave { grace_ms, reason }, now);
                    return Ok(());
                }
                let found: Vec<NodeId> = self
                    .peers
                    .map
                    .iter()
                    .filter(|(id, p)| p.connected && is_called(id, p, &node))
                    .map(|(id, _)| *id)
                    .collect();
                match found.as_slice() {
                    [one] if !mine => {
                        self.send(*one, Message::DrainAsk { grace_ms, reason });
                        Ok(())
                    }
                    [] => Err(Error::Refused(format!(
                        "no connected node is called {node}: `muster nodes` lists them"
                    ))),
                    _ => Err(Error::Refused(format!(
                        "{} nodes are called {node}: use more of the id",
                        found.len() + usize::from(mine)
                    ))),
                }
            }
            Command::Cancel { job } => {
                let key = self.job_here(owner, &job)?;
                self.with_job(&key, now, |job, ctx| {
                    job.cancel(ctx);
                    job.drive(ctx);
                });
                Ok(())
            }
            Command::Continue { job, dead } => {
                let key = self.job_here(owner, &job)?;
                let mut result = Ok(());
                self.with_job(&key, now, |job, ctx| {
                    result = job.go_on_without(ctx, &dead);
                    job.drive(ctx);
                });
                result.map_err(Error::Refused)
            }
        }
    }

    /// The job that an owner means by an id: the own one first, then one with a launcher here.
    fn job_here(&self, owner: &str, id: &str) -> Result<JobKey, Error> {
        let mine = self
            .jobs
            .iter()
            .filter(|(k, _)| k.id == id && (k.owner == owner || owner == "0"));
        let key = mine
            .max_by_key(|(k, j)| (k.owner == owner, j.launcher().is_some()))
            .map(|(k, _)| k.clone());
        let Some(key) = key else {
            return Err(Error::Refused(format!(
                "no job {id} of yours is known here: `muster jobs` lists them"
            )));
        };
        if self.jobs.get(&key).is_none_or(|j| j.launcher().is_none()) {
            return Err(Error::Refused(format!(
                "job {id} has no launcher on this node: say it on a node where it runs"
            )));
        }
        Ok(key)
    }

    fn names_a_peer(&self, name: &str) -> bool {
        let mut peers = self.peers.map.iter();
        !name.is_empty() && peers.any(|(id, p)| p.connected && is_called(id, p, name))
    }

    fn is_named(&self, name: &str) -> bool {
        self.cfg.node.hex().starts_with(name) || self.cfg.host == name
    }
}

/// Whether a peer's id begins like this, or its host has this name.
fn is_called(id: &NodeId, peer: &Peer, name: &str) -> bool {
    let host = peer.hello.as_ref().map(|h| h.host.as_str());
    id.hex().starts_with(name) || host == Some(name)
}
