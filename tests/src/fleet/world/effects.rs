//! Effects that the agents want done.

use muster_protocol::JobKey;
use muster_protocol::agent::{Agent, Effect, Event, Notice};
use muster_protocol::membership::Answer;
use muster_protocol::storelog::{self, CreateOutcome, ReadOutcome};

use super::{Broken, Fleet, HOP, Held, Item};
use crate::sim::store::Store;

impl Fleet {
    pub(super) fn carry_out(&mut self, node: usize) {
        while let Some(effect) = self.nodes[node].agent.as_mut().and_then(Agent::poll_effect) {
            self.effect(node, effect);
        }
        let token = self.nodes[node].token;
        self.timer(node, token);
    }

    fn effect(&mut self, node: usize, effect: Effect) {
        let n = &mut self.nodes[node];
        match effect {
            Effect::Persist { key, bytes } => {
                n.traffic.writes += bytes.len() as u64;
                n.stored.insert(key.clone(), bytes);
                self.tell(node, Event::Persisted { key });
            }
            Effect::Forget { key, past } => {
                n.traffic.writes += past.len() as u64;
                n.stored.remove(&key);
                n.past = past;
            }
            Effect::Send { to, message } => {
                n.traffic.messages += 1;
                match message.encode() {
                    Ok(frame) => n.traffic.bytes += frame.len() as u64,
                    Err(_) => self.judge.breaks(Broken::Unsendable { node }),
                }
                let from = self.nodes[node].id;
                if let Some(to) = self.nodes.iter().position(|n| n.id == to) {
                    self.tell(to, Event::Message { from, message });
                }
            }
            Effect::Probe {
                node: of,
                id,
                guard,
            } => {
                let there = self.nodes.iter().any(|n| n.id == of && n.agent.is_some());
                let dark = self.nodes.iter().any(|n| n.id == of && n.dark);
                let answers = |there: bool| match there {
                    _ if dark => Answer::Silent,
                    true => Answer::Answered,
                    false => Answer::Refused,
                };
                let here = |id| self.launchers.values().any(|l| l.launcher.id == id);
                let agent = answers(there);
                let guard = answers(guard.is_some_and(|(_, launcher)| here(launcher)));
                let event = Event::Probed {
                    node: of,
                    id,
                    agent,
                    guard,
                };
                self.tell_after(2 * HOP, node, event);
            }
            Effect::ToLauncher { conn, frame } => {
                if let Some((launcher, _)) = self.of.get(&conn).copied() {
                    self.put(
                        HOP,
                        Item::Hears {
                            launcher,
                            conn,
                            frame,
                        },
                    );
                }
            }
            Effect::Store { key, effect } => self.in_store(node, key, effect),
            Effect::WriteBeacon { key, value } => {
                if let Some(store) = self.store(node, &key) {
                    store.beacon = Some(value);
                }
            }
            Effect::ReadBeacon { key } => {
                if let Some(store) = self.store(node, &key) {
                    let value = store.beacon;
                    self.tell(node, Event::Beacon { key, value });
                }
            }
            Effect::Notice(Notice::Decided { key, record, .. }) => {
                self.judge.decided(&key, &record, self.now);
            }
            Effect::Notice(_) => {}
        }
    }

    /// The store of a job, where a launcher here can reach it.
    fn store(&mut self, node: usize, key: &JobKey) -> Option<&mut Store> {
        let jobs = &self.jobs;
        let there =
            |l: &&Held| l.node == node && &jobs[l.job].key == key && l.launcher.conn.is_some();
        let job = self.launchers.values().find(there)?.job;
        self.jobs[job].store.as_mut()
    }

    fn in_store(&mut self, node: usize, key: JobKey, effect: storelog::Effect) {
        let now = self.now;
        let store = self.store(node, &key);
        let event = match effect {
            storelog::Effect::Read { op, slot } => {
                let found = store.map(|s| s.get(slot).map(<[u8]>::to_vec));
                let outcome = match found {
                    Some(Some(bytes)) => ReadOutcome::Found(bytes),
                    Some(None) => ReadOutcome::Absent,
                    None => ReadOutcome::Failed,
                };
                storelog::Event::Read { op, slot, outcome }
            }
            storelog::Effect::Create { op, slot, bytes } => {
                let outcome = match store.map(|s| s.create(slot, &bytes, now)) {
                    Some(true) => CreateOutcome::Won,
                    Some(false) => CreateOutcome::Exists,
                    None => CreateOutcome::Unknown,
                };
                storelog::Event::Created { op, slot, outcome }
            }
        };
        self.tell_after(3 * HOP, node, Event::Store { key, event });
    }
}
