//! Launchers and command lines on this node: registrations, frames, orders.

use std::collections::{BTreeMap, BTreeSet};

use super::{Agent, ConnId, Effect, Error};
use crate::ids::{JobKey, NodeId};
use crate::job::Job;
use crate::local::{Command, Register, SaveNews, ToAgent, ToLauncher};
use crate::membership::Answer;
use crate::peers::Peer;
use crate::record::{MAX_SLOTS, Place};
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

    /// Gives this job what the others leave of the node's memory for checkpoint slots.
    fn share_slot_memory(&mut self, key: &JobKey, now: Time) {
        let own = self
            .jobs
            .iter()
            .filter(|(k, _)| *k != key && k.owner == key.owner);
        let own = own.map(|(_, job)| job.slot_memory());
        let others = self.slot_memory_by_owner();
        let others = others.into_iter().filter(|(owner, _)| *owner != key.owner);
        let used = own.chain(others.map(|(_, bytes)| bytes));
        let left = self.cfg.slot_memory.saturating_sub(sum(used));
        self.with_job(key, now, |job, ctx| job.set_slot_budget(ctx.now, left));
    }

    /// The memory for checkpoint slots that is taken here.
    pub fn slot_memory_taken(&self) -> u64 {
        sum(self.slot_memory_by_owner().into_values())
    }

    /// The bytes of checkpoint slots that each user's launchers name, and at most an equal share of what the node has:
    /// nobody's word takes it from everybody else.
    fn slot_memory_by_owner(&self) -> BTreeMap<&str, u64> {
        let mut by_owner: BTreeMap<&str, u64> = BTreeMap::new();
        for (key, job) in self.jobs.iter().filter(|(_, job)| job.launcher().is_some()) {
            let bytes = by_owner.entry(&key.owner).or_default();
            *bytes = bytes.saturating_add(job.slot_memory());
        }
        let share = self.cfg.slot_memory / u64::try_from(by_owner.len()).unwrap_or(u64::MAX).max(1);
        by_owner
            .values_mut()
            .for_each(|bytes| *bytes = share.min(*bytes));
        by_owner
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
        if !(1..=MAX_SLOTS).contains(&reg.slots) || reg.addrs.is_empty() {
            let reason = format!("a launcher needs an address and 1 to {MAX_SLOTS} workers");
            return refuse(self, reason);
        }
        // One that comes again, perhaps because it was stopped for a while, hears how it ended here.
        let known = self.jobs.get(&key).and_then(Job::launcher) == Some(reg.launcher);
        if self.draining.is_some() && reg.running.is_none() && !known {
            return refuse(
                self,
                "this node is being drained: start the job elsewhere".into(),
            );
        }
        if !self.jobs.contains_key(&key) {
            // What is only remembered, or known from others, never keeps a launcher from starting.
            let launchers = self.jobs.values().filter(|j| j.launcher().is_some());
            if launchers.count() >= MAX_JOBS {
                return refuse(self, Error::TooManyJobs.to_string());
            }
            self.add_job(&key);
        }
        let mut result = Ok(());
        self.with_job(&key, now, |job, ctx| {
            result = job.register(ctx, conn, reg);
        });
        if let Err(reason) = result {
            return refuse(self, reason);
        }
        self.conns.retain(|_, k| *k != key);
        self.conns.insert(conn, key.clone());
        let mut frame = None;
        self.with_job(&key, now, |_, ctx| frame = Some(Job::welcome(ctx)));
        let welcome = frame.map(|frame| Effect::ToLauncher { conn, frame });
        self.effects.extend(welcome);
        self.with_job(&key, now, Job::drive);
        Ok(())
    }

    /// The guard of a launcher that the head of some job counts on, and that is not here.
    pub(super) fn looked_for_launcher(
        &mut self,
        id: u64,
        guard: Answer,
        now: Time,
    ) -> Result<(), Error> {
        let asked = self.jobs.iter().find(|(_, job)| job.looks_for_launcher(id));
        if let Some(key) = asked.map(|(key, _)| key.clone()) {
            self.with_job(&key, now, |job, ctx| {
                job.launcher_looked_for(ctx, guard);
                job.drive(ctx);
            });
        }
        Ok(())
    }

    fn command(&mut self, owner: &str, command: Command, now: Time) -> Result<(), Error> {
        match command {
            Command::Drain { node, grace_ms } => {
                let reason = format!("uid {owner} on {} drains it", self.cfg.host);
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
            Command::Cancel { job, given } => {
                let key = self.job_known(owner, &job)?;
                let mut result = Ok(());
                self.with_job(&key, now, |job, ctx| {
                    result = job.cancel_by_order(ctx, given);
                    job.drive(ctx);
                });
                result.map_err(Error::Refused)
            }
            Command::Ended { job, record } => {
                let key = self.job_known(owner, &job)?;
                let mut result = Ok(());
                self.with_job(&key, now, |job, ctx| {
                    result = job.ended_in_log(ctx, *record);
                    job.drive(ctx);
                });
                result.map_err(Error::Refused)
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
            Command::Continue {
                job,
                dead,
                confirmed,
            } => {
                let key = self.job_here(owner, &job)?;
                let mut result = Ok(());
                self.with_job(&key, now, |job, ctx| {
                    result = job.go_on_without(ctx, &dead, confirmed);
                    job.drive(ctx);
                });
                result.map_err(Error::Refused)
            }
        }
    }

    /// The job that somebody means by an id or by `OWNER/ID`: one with a launcher here, if there is
    /// any. Root may order every job, and says whose it is where several users have one of that id.
    fn job_here(&self, owner: &str, name: &str) -> Result<JobKey, Error> {
        let (known, here) = self.jobs_meant(owner, name);
        match (here.as_slice(), known.as_slice()) {
            ([key], _) => Ok(key.clone()),
            ([], []) => Err(Error::Refused(format!(
                "no job {name} of yours is known here: `muster jobs` lists them"
            ))),
            ([], _) => Err(Error::Refused(format!(
                "job {name} has no launcher on this node: run this command on a node of the job"
            ))),
            (several, _) => Err(several_called(name, several)),
        }
    }

    /// The same, but it need not have a launcher here: any agent may pass the order on.
    fn job_known(&mut self, owner: &str, name: &str) -> Result<JobKey, Error> {
        let (known, here) = self.jobs_meant(owner, name);
        let [] = here.as_slice() else {
            return self.job_here(owner, name);
        };
        match known.as_slice() {
            [key] => {
                let key = key.clone();
                if !self.jobs.contains_key(&key) {
                    self.add_job(&key);
                }
                Ok(key)
            }
            [] => self.job_here(owner, name),
            several => Err(several_called(name, several)),
        }
    }

    /// The jobs that somebody may mean: those that this agent or a peer knows, and those with a launcher
    /// here.
    fn jobs_meant(&self, owner: &str, name: &str) -> (Vec<JobKey>, Vec<JobKey>) {
        let (whose, id) = JobKey::parts_of(name);
        let is_meant = |k: &JobKey| {
            let may = k.owner == owner || owner == "0";
            may && k.id == id && whose.is_none_or(|w| k.owner == w)
        };
        let told = self.peers.adverts().map(|(_, advert)| &advert.key);
        let known = self.jobs.keys().chain(told);
        let known: BTreeSet<&JobKey> = known.filter(|k| is_meant(k)).collect();
        let has_launcher =
            |k: &&&JobKey| self.jobs.get(**k).is_some_and(|j| j.launcher().is_some());
        let here = known
            .iter()
            .filter(has_launcher)
            .map(|k| (*k).clone())
            .collect();
        (known.into_iter().cloned().collect(), here)
    }

    fn names_a_peer(&self, name: &str) -> bool {
        let mut peers = self.peers.map.iter();
        !name.is_empty() && peers.any(|(id, p)| p.connected && is_called(id, p, name))
    }

    fn is_named(&self, name: &str) -> bool {
        self.cfg.node.hex().starts_with(name) || self.cfg.host == name
    }
}

fn several_called(name: &str, several: &[JobKey]) -> Error {
    let (_, id) = JobKey::parts_of(name);
    let names = several.iter().take(16);
    let names: Vec<String> = names.map(|k| format!("{}/{}", k.owner, k.id)).collect();
    Error::Refused(format!(
        "several users have a job {id} here: name one as {}",
        names.join(" or ")
    ))
}

/// Whether a peer's id begins like this, or its host has this name.
fn is_called(id: &NodeId, peer: &Peer, name: &str) -> bool {
    let host = peer.hello.as_ref().map(|h| h.host.as_str());
    id.hex().starts_with(name) || host == Some(name)
}

fn sum(bytes: impl Iterator<Item = u64>) -> u64 {
    bytes.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::Event;
    use crate::agent::scripted::registers;
    use crate::ids::LauncherId;
    use crate::spec::JobSpec;

    fn agent() -> Agent {
        Agent::new(crate::agent::scripted::config(0, 1), Vec::new(), Time(1)).unwrap()
    }

    fn register(agent: &mut Agent, conn: u64, owner: &str, job: &str) {
        let spec = JobSpec {
            min_nodes: 2,
            max_nodes: 2,
            ..JobSpec::default()
        };
        let reg = Register {
            launcher: LauncherId(conn.to_be_bytes()),
            job: job.into(),
            ..registers(0, spec)
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

    #[test]
    fn nobody_takes_the_memory_for_slots_from_everybody_else() {
        let mut config = crate::agent::scripted::config(0, 1);
        config.slot_memory = 100;
        let mut agent = Agent::new(config, Vec::new(), Time(1)).unwrap();
        register(&mut agent, 1, "1000", "honest");
        let offer = |agent: &mut Agent, conn: u64, owner: &str, (k, capacity): (u16, u64)| {
            let found = [crate::checkpoint::Found::Free; 2];
            let news = SaveNews::Slots { k, capacity, found };
            let (conn, owner, frame) = (ConnId(conn), owner.into(), ToAgent::Save(news));
            let event = Event::Launcher { conn, owner, frame };
            agent.handle(event, Time(3)).unwrap();
            agent.slot_memory_taken()
        };
        assert_eq!(offer(&mut agent, 1, "1000", (0, 40)), 80);
        register(&mut agent, 2, "1001", "liar");
        // A worker that it does not have, and what no machine has.
        assert_eq!(offer(&mut agent, 2, "1001", (9, 7)), 50);
        assert_eq!(offer(&mut agent, 2, "1001", (0, u64::MAX)), 100);
        let left = |agent: &mut Agent, job: &str| {
            let key = agent.job_here("0", job).unwrap();
            agent.share_slot_memory(&key, Time(4));
            agent.job(&key).map(Job::slot_budget)
        };
        assert_eq!(left(&mut agent, "honest"), Some(50));
        assert_eq!(left(&mut agent, "liar"), Some(50));
    }
}
