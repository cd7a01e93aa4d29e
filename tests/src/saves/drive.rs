//! The driver of each agent's cores: events in, effects carried out one after the other, with a crash
//! between any two.

use muster_protocol::checkpoint::{
    Found, KeeperEffect, LeaderEffect, LeaderEvent, LeaderNotice, NodeEffect, NodeEvent, NodeNotice,
};
use muster_protocol::record::CommitRef;
use muster_protocol::storelog::{self, Body};
use muster_protocol::{Digest, Time};

use super::agent::{Agent, Cores, Memory, Todo};
use super::disk::{File, Token};
use super::truth::Violation;
use super::world::{Ev, World};

fn broken(name: &'static str, text: String) -> Result<(), Violation> {
    Err(Violation { name, text })
}

impl World {
    // ---- events in ----

    /// An event for the node of a generation, if this agent still has it.
    pub(super) fn tell_nodes(
        &mut self,
        a: usize,
        of: Digest,
        event: NodeEvent,
    ) -> Result<(), Violation> {
        let now = self.now;
        if let Some(cores) = &mut self.agents[a].cores
            && let Some(node) = cores.nodes.iter_mut().find(|n| n.generation() == of)
        {
            // Late, repeated and foreign ones are refused, and change nothing.
            let _refused = node.handle(event, now);
        }
        self.drain(a)
    }

    pub(super) fn tell_leader(&mut self, a: usize, event: LeaderEvent) -> Result<(), Violation> {
        let now = self.now;
        if let Some(cores) = &mut self.agents[a].cores
            && let Some(leader) = &mut cores.leader
        {
            let _refused = leader.handle(event, now);
        }
        self.drain(a)
    }

    pub(super) fn tell_log(
        &mut self,
        a: usize,
        boot: u64,
        event: storelog::Event,
    ) -> Result<(), Violation> {
        let now = self.now;
        if self.agents[a].boot == boot
            && let Some(cores) = &mut self.agents[a].cores
        {
            let _late = cores.log.handle(event, now);
            self.drain(a)?;
        }
        Ok(())
    }

    pub(super) fn tick(&mut self, a: usize) {
        let now = self.now;
        let Some(cores) = &mut self.agents[a].cores else {
            return;
        };
        for node in &mut cores.nodes {
            if node.poll_timeout().is_some_and(|(at, _)| now >= at) {
                node.handle_timeout(now);
            }
        }
        if let Some(leader) = &mut cores.leader {
            leader.handle_timeout(now);
        }
        cores.log.handle_timeout(now);
    }

    // ---- ranks and their slots ----

    pub(super) fn rank_wants(&mut self, ev: Ev) -> Result<(), Violation> {
        let Ev::Wants {
            agent: a,
            launcher,
            generation,
            k,
            step,
            tries,
        } = ev
        else {
            return Ok(());
        };
        let head = self.agents[a].head.as_ref().map(|h| h.digest());
        if self.agents[a].launcher != launcher || tries > 40 {
            return Ok(());
        }
        // The workers of the generation do not run here yet, or its slots are not given out.
        let ready = head == Some(generation) && self.registered(a);
        if self.agents[a].cores.is_none() || !ready {
            let tries = tries + 1;
            let ev = Ev::Wants {
                agent: a,
                launcher,
                generation,
                k,
                step,
                tries,
            };
            self.after(200, ev);
            return Ok(());
        }
        self.tell_nodes(a, generation, NodeEvent::Wants { k, step })
    }

    fn registered(&mut self, a: usize) -> bool {
        let agent = &mut self.agents[a];
        let launcher_up = agent.launcher_up;
        agent.node().is_some_and(|n| launcher_up && n.memory() > 0)
    }

    pub(super) fn filled(&mut self, ev: Ev) -> Result<(), Violation> {
        let Ev::Filled {
            agent: a,
            launcher,
            slot,
            token,
            dies,
        } = ev
        else {
            return Ok(());
        };
        let agent = &mut self.agents[a];
        let head = agent.head.as_ref().map(|h| h.digest());
        let Some(memory) = agent.memory.get_mut(&slot) else {
            return Ok(());
        };
        let filling = memory.word == Found::Filling { step: token.step };
        if agent.launcher != launcher || !filling || head != Some(token.generation) {
            return Ok(());
        }
        if dies {
            let k = slot.k;
            return self.tell_nodes(a, token.generation, NodeEvent::WorkerGone { k });
        }
        let copy = Agent::copy(token);
        memory.word = Found::Sealed(copy);
        memory.token = Some(token);
        self.tell_nodes(a, token.generation, NodeEvent::Sealed { slot, copy })
    }

    pub(super) fn write_ends(&mut self, ev: Ev) -> Result<(), Violation> {
        let Ev::WriteEnd {
            agent: a,
            boot,
            launcher,
            slot,
            save,
            path,
            token,
        } = ev
        else {
            return Ok(());
        };
        let synced = !self.plant.skip_sync;
        let file = token.map(|token| File {
            token,
            whole: true,
            synced,
            rotten: false,
            by: a,
        });
        let attempt = save.attempt;
        if self.agents[a].boot != boot {
            // The writer died with its agent, before the name was there or just behind it.
            if let Some(file) = file.filter(|_| self.agents[a].launcher == launcher)
                && self.rng.chance(300)
            {
                self.disk.put(&path, save, file);
            }
            return Ok(());
        }
        let key = (save.generation, slot, attempt);
        let Some(cores) = &mut self.agents[a].cores else {
            return Ok(());
        };
        let Some(stopped) = cores.writes.remove(&key) else {
            return Ok(());
        };
        if let Some(memory) = self.agents[a].memory.get_mut(&slot) {
            memory.readers = memory.readers.saturating_sub(1);
            if memory.token != token {
                return broken("slot", format!("slot {slot} changed while it was read"));
            }
        }
        let event = if stopped && self.rng.chance(700) {
            NodeEvent::WriteStopped { slot, attempt }
        } else if self.fault(40) {
            let why = "no space left on device".into();
            NodeEvent::WriteFailed { slot, attempt, why }
        } else if file.is_some_and(|file| self.disk.put(&path, save, file)) {
            if !synced {
                let ms = self.rng.between(2_000, 10_000);
                self.after(ms, Ev::Synced(path.clone()));
            }
            NodeEvent::Written {
                slot,
                attempt,
                bytes: super::agent::CAPACITY,
                summary: path.into_bytes(),
            }
        } else {
            let why = "the name is taken".into();
            NodeEvent::WriteFailed { slot, attempt, why }
        };
        match self.fault(30) {
            true => self.link_again(a),
            false => self.tell_nodes(a, save.generation, event),
        }
    }

    /// The launcher's connection breaks, with what was said over it last, and is made anew.
    pub(super) fn link_again(&mut self, a: usize) -> Result<(), Violation> {
        self.counts.links += 1;
        self.note(format!("agent {a}: another link to its launcher"));
        let agent = &self.agents[a];
        let nodes = agent.cores.iter().flat_map(|c| &c.nodes);
        let holds = nodes.filter(|n| agent.launcher_up && n.memory() > 0);
        if let Some(generation) = holds.map(|n| n.generation()).next() {
            for k in 0..self.agents[a].ranks {
                let slots = NodeEvent::Slots {
                    k,
                    capacity: super::agent::CAPACITY,
                    found: self.agents[a].found(k),
                };
                self.tell_nodes(a, generation, slots)?;
            }
        }
        self.tell_leader(a, LeaderEvent::LauncherBack)
    }

    /// Images that earlier generations left in the slots are needed no more: the newest one trains.
    pub(super) fn release(&mut self, a: usize) -> Result<(), Violation> {
        let now = self.now;
        let head = self.agents[a].head.as_ref().map(|h| h.digest());
        if let Some(cores) = &mut self.agents[a].cores {
            for node in &mut cores.nodes {
                if Some(node.generation()) != head {
                    let _never = node.handle(NodeEvent::Budget { bytes: 0 }, now);
                }
            }
        }
        self.drain(a)
    }

    /// The launcher gives the slots to the newest generation, once no other holds one.
    fn give_slots(&mut self, a: usize) {
        let now = self.now;
        let agent = &mut self.agents[a];
        let Some(head) = agent.head.as_ref().map(|h| h.digest()) else {
            return;
        };
        let found: Vec<_> = (0..agent.ranks).map(|k| (k, agent.found(k))).collect();
        let up = agent.launcher_up;
        let Some(cores) = &mut agent.cores else {
            return;
        };
        cores
            .nodes
            .retain(|n| n.generation() == head || !n.is_empty());
        let [node] = cores.nodes.as_mut_slice() else {
            return;
        };
        if up && node.generation() == head && node.memory() == 0 {
            for (k, found) in found {
                let event = NodeEvent::Slots {
                    k,
                    capacity: super::agent::CAPACITY,
                    found,
                };
                let _mine = node.handle(event, now);
                // Workers of the run before the restart go on; what they fill they seal.
            }
        }
    }

    // ---- effects out ----

    /// Carries out all effects of an agent, one after the other.
    pub(super) fn drain(&mut self, a: usize) -> Result<(), Violation> {
        loop {
            self.give_slots(a);
            let Some(cores) = &mut self.agents[a].cores else {
                return Ok(());
            };
            cores.collect();
            if let Some(output) = cores.log.poll_output() {
                self.output(a, output)?;
                continue;
            }
            let Some(todo) = cores.todo.pop_front() else {
                break;
            };
            self.counts.effects += 1;
            let drilled = self.drill.filter(|d| d.at == self.counts.effects);
            if drilled.is_some() || self.fault(3) {
                self.note(format!("before {todo:?}:"));
                self.fails(a, drilled.is_some_and(|d| d.power));
                return Ok(());
            }
            self.carry_out(a, todo)?;
        }
        self.schedule(a);
        Ok(())
    }

    /// Wakes the agent when its cores want it.
    fn schedule(&mut self, a: usize) {
        let agent = &mut self.agents[a];
        let (boot, tick) = (agent.boot, agent.tick);
        let Some(cores) = &agent.cores else { return };
        let mut at: Option<Time> = cores.log.poll_timeout().map(|(t, _)| t);
        let nodes = cores.nodes.iter().map(|n| n.poll_timeout());
        let all = nodes.chain([cores.leader.as_ref().and_then(|l| l.poll_timeout())]);
        for (t, _) in all.flatten() {
            at = Some(at.map_or(t, |at| at.min(t)));
        }
        if let Some(at) = at.filter(|at| tick.is_none_or(|tick| *at < tick)) {
            agent.tick = Some(at);
            self.at(at, Ev::Tick(a, boot));
        }
    }

    fn carry_out(&mut self, a: usize, todo: Todo) -> Result<(), Violation> {
        match todo {
            Todo::Node(generation, effect) => self.node_effect(a, generation, effect),
            Todo::Leader(effect) => self.leader_effect(a, effect),
            Todo::Keeper(effect) => self.keeper_effect(a, effect),
            Todo::Log(effect) => {
                self.log_effect(a, effect);
                Ok(())
            }
        }
    }

    fn node_effect(&mut self, a: usize, of: Digest, effect: NodeEffect) -> Result<(), Violation> {
        self.note(format!("node {a} of {of}: {effect:?}"));
        let boot = self.agents[a].boot;
        let launcher = self.agents[a].launcher;
        match effect {
            NodeEffect::Persist(state) => self.agents[a].node_state = state,
            NodeEffect::Send(message) => {
                let leads = |x: &&Agent| {
                    let head = x.head.as_ref().filter(|h| h.digest() == of);
                    head.is_some_and(|h| h.leader() == Some(x.id))
                };
                if let Some(to) = self.agents.iter().find(leads).map(|x| x.index) {
                    self.send(a == to, Ev::ToLeader(to, a, message));
                }
            }
            NodeEffect::Fill { slot, step } => {
                let record = self.agents[a].head.clone().filter(|h| h.digest() == of);
                let first = record.and_then(|r| r.ranks_of(self.agents[a].id));
                let Some((first, _)) = first else {
                    return Ok(());
                };
                self.may_lose(a, of, slot)?;
                let dies = self.fault(30);
                let token = Token {
                    generation: of,
                    step,
                    rank: first + u32::from(slot.k),
                };
                if let Some(memory) = self.agents[a].memory.get_mut(&slot) {
                    memory.word = Found::Filling { step };
                    memory.token = None;
                }
                let ms = self.rng.delay(40);
                let ev = Ev::Filled {
                    agent: a,
                    launcher,
                    slot,
                    token,
                    dies,
                };
                self.after(ms, ev);
            }
            NodeEffect::Write {
                slot, save, path, ..
            } => {
                let key = (save.generation, slot, save.attempt);
                if let Some(cores) = &mut self.agents[a].cores
                    && cores.writes.insert(key, false).is_some()
                {
                    // Asked again: the answer comes when it is done.
                    return Ok(());
                }
                let token = self.agents[a].memory.get_mut(&slot).and_then(|m| {
                    m.readers += 1;
                    m.token
                });
                let ms = self.rng.delay(200);
                let ev = Ev::WriteEnd {
                    agent: a,
                    boot,
                    launcher,
                    slot,
                    save,
                    path,
                    token,
                };
                self.after(ms, ev);
            }
            NodeEffect::StopWrite { slot, attempt } => {
                let cores = self.agents[a].cores.as_mut();
                match cores.and_then(|c| c.writes.get_mut(&(of, slot, attempt))) {
                    Some(stopped) => *stopped = true,
                    None => {
                        let ended = NodeEvent::WriteStopped { slot, attempt };
                        self.tell_nodes(a, of, ended)?;
                    }
                }
            }
            NodeEffect::Free { slot } => {
                self.may_lose(a, of, slot)?;
                if let Some(memory) = self.agents[a].memory.get_mut(&slot) {
                    memory.word = Found::Free;
                    memory.token = None;
                }
            }
            NodeEffect::Notice(NodeNotice::Busy { .. }) => self.counts.busy += 1,
            NodeEffect::Skip { .. }
            | NodeEffect::Refuse { .. }
            | NodeEffect::Hold { .. }
            | NodeEffect::Notice(_) => {}
        }
        Ok(())
    }

    /// Checks that the image in the slot, which is about to be lost, may be.
    fn may_lose(
        &self,
        a: usize,
        of: Digest,
        slot: muster_protocol::checkpoint::SlotId,
    ) -> Result<(), Violation> {
        let Some(memory) = self.agents[a].memory.get(&slot) else {
            return Ok(());
        };
        if memory.readers > 0 {
            return broken(
                "slot",
                format!("slot {slot} of {a} is given out while it is read"),
            );
        }
        let head = self.agents[a].head.as_ref().map(|h| h.digest());
        match memory {
            Memory {
                word: Found::Sealed(_),
                token: Some(token),
                ..
            } => {
                let ended = head != Some(of) || token.generation != of;
                self.truth.may_free(token, &self.disk, ended)
            }
            _ => Ok(()),
        }
    }

    fn leader_effect(&mut self, a: usize, effect: LeaderEffect) -> Result<(), Violation> {
        self.note(format!("leader {a}: {effect:?}"));
        let boot = self.agents[a].boot;
        match effect {
            LeaderEffect::Persist(state) => self.agents[a].leader_state = state,
            LeaderEffect::Send { to, message } => {
                self.truth.said(message);
                if let Some(to) = self.agents.iter().position(|x| x.id == to) {
                    self.send(a == to, Ev::ToNode(to, message));
                }
            }
            LeaderEffect::Assemble { save, files } => {
                let ms = self.rng.delay(30);
                self.after(ms, Ev::Assembled(a, boot, save, files));
            }
            LeaderEffect::Commit { save, manifest } => {
                let now = self.now;
                if let Some(cores) = &mut self.agents[a].cores {
                    cores.ids += 1;
                    cores.commits.insert(cores.ids, manifest);
                    let commit = CommitRef {
                        generation: save.generation,
                        number: 0,
                        step: save.step,
                        manifest,
                    };
                    cores.log.commit(cores.ids, commit, now);
                }
            }
            LeaderEffect::Notice(LeaderNotice::Committed { save, manifest }) => {
                self.counts.committed += 1;
                self.truth.told.push((save, manifest));
            }
            LeaderEffect::Notice(LeaderNotice::Opened { .. }) => self.counts.opened += 1,
            LeaderEffect::Notice(LeaderNotice::GivenUp { .. }) => self.counts.given_up += 1,
            LeaderEffect::Notice(_) => {}
        }
        Ok(())
    }

    fn keeper_effect(&mut self, a: usize, effect: KeeperEffect) -> Result<(), Violation> {
        match effect {
            KeeperEffect::Append(body) => {
                self.note(format!("keeper {a}: {body:?}"));
                let now = self.now;
                if let Some(cores) = &mut self.agents[a].cores
                    && let Body::Retire { seq, .. } | Body::Reject { seq, .. } = body
                {
                    cores.ids += 1;
                    cores.appends.insert(cores.ids, seq);
                    cores.log.append(cores.ids, body, now);
                }
            }
            KeeperEffect::Delete { name } => {
                self.note(format!("keeper {a} deletes {name}"));
                self.truth.may_delete(&name, &self.disk)?;
                self.disk.delete(&name);
                self.counts.deleted += 1;
            }
            KeeperEffect::Refused { .. } => {}
        }
        Ok(())
    }

    /// By the network; to oneself nothing is lost.
    fn send(&mut self, own: bool, ev: Ev) {
        if own {
            return self.after(1, ev);
        }
        if self.fault(80) {
            return;
        }
        if self.fault(50) {
            let ms = self.rng.between(1, 3_000);
            self.after(ms, ev.clone());
        }
        let ms = self.rng.delay(10);
        self.after(ms, ev);
    }
}

impl Cores {
    /// Takes the cores' effects into the row in which they are carried out.
    pub(super) fn collect(&mut self) {
        for node in &mut self.nodes {
            let generation = node.generation();
            while let Some(effect) = node.poll_effect() {
                self.todo.push_back(Todo::Node(generation, effect));
            }
        }
        if let Some(leader) = &mut self.leader {
            while let Some(effect) = leader.poll_effect() {
                self.todo.push_back(Todo::Leader(effect));
            }
        }
        while let Some(effect) = self.keeper.poll_effect() {
            self.todo.push_back(Todo::Keeper(effect));
        }
        while let Some(effect) = self.log.poll_effect() {
            self.todo.push_back(Todo::Log(effect));
        }
    }
}
