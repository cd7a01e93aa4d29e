//! Launchers and command lines on this node: registrations, frames, orders.

use super::{Agent, ConnId, Effect, Error};
use crate::ids::{JobKey, NodeId};
use crate::job::Job;
use crate::local::{Command, Register, SaveNews, ToAgent, ToLauncher};
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
                if let ToAgent::Save(SaveNews::Slots { .. }) = frame {
                    self.share_slot_memory(&key, now);
                }
                self.with_job(&key, now, |job, ctx| {
                    job.on_launcher_frame(ctx, frame);
                    job.drive(ctx);
                });
                Ok(())
            }
        }
    }

    /// What the other jobs leave of the node's memory for checkpoint slots is this one's.
    fn share_slot_memory(&mut self, key: &JobKey, now: Time) {
        let others = self.jobs.iter().filter(|(k, _)| *k != key);
        let used = others.map(|(_, job)| job.slot_memory());
        let used = used.fold(0, u64::saturating_add);
        let left = self.cfg.slot_memory.saturating_sub(used);
        self.with_job(key, now, |job, ctx| job.set_slot_budget(ctx.now, left));
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
            Command::Checkpoint { job } => {
                let key = self.job_here(owner, &job)?;
                let mut result = Ok(());
                self.with_job(&key, now, |job, ctx| {
                    result = job.ask_checkpoint(ctx);
                    job.drive(ctx);
                });
                result.map_err(Error::Refused)
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

    /// The job that somebody means by an id or by `OWNER/ID`: one with a launcher here, if there is
    /// any. Root may order every job, and says whose it is where several users have one of that id.
    fn job_here(&self, owner: &str, name: &str) -> Result<JobKey, Error> {
        let (whose, id) = match name.split_once('/') {
            Some((whose, id)) => (Some(whose), id),
            None => (None, name),
        };
        let is_meant = |k: &JobKey| {
            let may = k.owner == owner || owner == "0";
            may && k.id == id && whose.is_none_or(|w| k.owner == w)
        };
        let known: Vec<_> = self.jobs.iter().filter(|(k, _)| is_meant(k)).collect();
        let here: Vec<&JobKey> = known
            .iter()
            .filter(|(_, j)| j.launcher().is_some())
            .map(|(k, _)| *k)
            .collect();
        match here.as_slice() {
            [key] => Ok((*key).clone()),
            [] if known.is_empty() => Err(Error::Refused(format!(
                "no job {name} of yours is known here: `muster jobs` lists them"
            ))),
            [] => Err(Error::Refused(format!(
                "job {name} has no launcher on this node: say it on a node where it runs"
            ))),
            several => {
                let names = several
                    .iter()
                    .take(16)
                    .map(|k| format!("{}/{}", k.owner, k.id));
                let names: Vec<String> = names.collect();
                Err(Error::Refused(format!(
                    "several users have a job {id} here: name one as {}",
                    names.join(" or ")
                )))
            }
        }
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

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;
    use crate::agent::{Config, Event, Flaws};
    use crate::ids::{Boot, LauncherId, StateId};
    use crate::spec::JobSpec;
    use crate::time::Span;

    fn agent() -> Agent {
        let config = Config {
            node: NodeId([1; 32]),
            state: StateId([2; 8]),
            boot: Boot(1),
            cluster: "c".into(),
            host: "a".into(),
            version: String::new(),
            pid: 1,
            seed: 1,
            suspect_after: Span::from_secs(2),
            agent_grace: Span::from_secs(30),
            birth_timeout: Span::from_secs(4),
            start_timeout: Span::from_secs(30),
            minority_wait: Span::from_secs(6),
            orphan_after: Span::from_secs(10),
            slot_memory: u64::MAX,
            slot_lease: Span::from_secs(600),
            place: Place::default(),
            memory: crate::memory::Key::default(),
            flaws: Flaws::default(),
        };
        Agent::new(config, Vec::new(), Time(1)).unwrap()
    }

    fn register(agent: &mut Agent, conn: u64, owner: &str, job: &str) {
        let reg = Register {
            launcher: LauncherId(conn.to_be_bytes()),
            job: job.into(),
            spec: JobSpec {
                min_nodes: 2,
                max_nodes: 2,
                ..JobSpec::default()
            },
            slots: 1,
            guard_port: 1,
            addrs: vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
            place: Place::default(),
            running: None,
            gate: None,
            store: None,
            parity: 0,
            pid: 1,
            command: String::new(),
            log_dir: None,
        };
        let event = Event::Launcher {
            conn: ConnId(conn),
            owner: owner.into(),
            frame: ToAgent::Register(reg),
        };
        agent.handle(event, Time(2)).unwrap();
    }

    #[test]
    fn an_order_never_reaches_another_job_than_the_one_that_was_meant() {
        let mut agent = agent();
        register(&mut agent, 1, "1000", "train");
        register(&mut agent, 2, "1001", "train");
        register(&mut agent, 3, "1001", "eval");
        let meant = |owner: &str, name: &str| {
            let key = agent.job_here(owner, name);
            key.map(|k| format!("{}/{}", k.owner, k.id))
        };
        assert_eq!(meant("1000", "train"), Ok("1000/train".into()));
        assert_eq!(meant("1000", "1000/train"), Ok("1000/train".into()));
        assert_eq!(meant("0", "1001/train"), Ok("1001/train".into()));
        assert_eq!(meant("0", "eval"), Ok("1001/eval".into()));
        let Err(Error::Refused(why)) = meant("0", "train") else {
            panic!("one of two was chosen")
        };
        assert!(why.contains("1000/train or 1001/train"), "{why}");
        for (owner, name) in [
            ("1000", "1001/train"),
            ("1000", "eval"),
            ("1000", "/train"),
            ("0", "train/1000"),
        ] {
            assert!(meant(owner, name).is_err(), "{owner} {name}");
        }
    }
}
