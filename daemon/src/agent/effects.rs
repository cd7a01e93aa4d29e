//! Carrying out what the core wants: the disk, the network, launchers, stores, people.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use muster_protocol::agent::{Agent, ConnId, Effect, Event, Notice, TIMED_OUT, Told};
use muster_protocol::job::Job;
use muster_protocol::local::ToLauncher;
use muster_protocol::membership::{Answer, State};
use muster_protocol::storelog;
use muster_protocol::wire::Message;
use muster_protocol::{JobKey, LauncherId, NodeId, codec};

use super::clients::{self, Launcher, MAX_HINDRANCES, hindrances};
use super::disk::Write;
use super::{Input, Node, history, probe};
use crate::socket::Received;
use crate::state::StateError;

/// Why a state directory takes no write, for people.
pub(super) fn refused_write(errno: i32) -> String {
    match errno {
        ..=0 => "a write failed".to_owned(),
        TIMED_OUT => "the disk does not answer".to_owned(),
        errno => std::io::Error::from_raw_os_error(errno).to_string(),
    }
}

/// The nodes that can make nothing durable, as those are told who may wait for their votes.
pub(super) fn unstored(core: &Agent) -> Vec<String> {
    let own = core
        .unstored()
        .map(|errno| ("this node".to_owned(), errno, "here"));
    let others = core.peers().map.iter().filter_map(|(node, peer)| {
        let errno = peer.hello.as_ref().filter(|_| peer.connected)?.unstored?;
        Some((core.peers().name(*node), errno, "there"))
    });
    let all = own.into_iter().chain(others).take(MAX_HINDRANCES);
    all.map(|(node, errno, at)| {
        let why = refused_write(errno);
        format!("{node} cannot store its votes: {why}; `muster doctor` {at} says more")
    })
    .collect()
}

/// An effect, for who picks one by its text: what is to be in the log as it will be read there.
fn words(effect: &Effect) -> String {
    match effect {
        Effect::Store {
            effect: storelog::Effect::Create { bytes, .. },
            ..
        } => format!("Create {}", String::from_utf8_lossy(bytes)),
        Effect::Persist { .. } => "Persist".into(),
        other => format!("{other:?}"),
    }
}

impl Node {
    /// Carries out what the core wants, in order.
    pub(super) fn effects(&mut self) {
        while let Some(effect) = self.core.poll_effect() {
            muster_fault::point_on("agent.effect", || words(&effect));
            match effect {
                Effect::Persist { key, bytes } => self.disk.write(Write::Job { key, bytes }),
                Effect::Forget { key, past } => {
                    self.unstored.remove(&key);
                    self.disk.write(Write::Forget { key, past });
                }
                Effect::Send { to, message } => self.send(to, &message),
                Effect::Probe { node, id, guard } => self.probe(node, id, guard),
                Effect::ToLauncher { conn, frame } => self.tell_launcher(conn, &frame),
                Effect::Store { key, effect } => self.store(key, effect),
                Effect::WriteBeacon { key, value } => self.beacon(&key, Some(value)),
                Effect::ReadBeacon { key } => self.beacon(&key, None),
                Effect::Notice(notice) => self.on_notice(&notice),
            }
        }
        let jobs = self.core.jobs().filter(|j| j.is_live()).count();
        self.metrics
            .jobs
            .set(i64::try_from(jobs).unwrap_or(i64::MAX));
    }

    /// The disk is done with a write of a job's state.
    pub(super) fn stored(&mut self, key: JobKey, took: Duration, result: Result<(), StateError>) {
        self.metrics.persisted(took);
        let Err(error) = result else {
            self.unstored.remove(&key);
            return self.apply(Event::Persisted { key });
        };
        let errno = error.errno();
        // It is tried again each second.
        let text = error.to_string();
        let is_new = self.unstored.get(&key) != Some(&text);
        if is_new {
            tracing::error!(job = %key, text, "the job's state cannot be stored; this agent abstains from votes");
            let fields = serde_json::json!({ "text": text.clone() });
            self.history.add(&key, "trouble", fields);
            self.unstored.insert(key.clone(), text);
        }
        self.apply(Event::PersistFailed { key, errno });
    }

    fn send(&mut self, to: NodeId, message: &Message) {
        match message.encode() {
            Ok(bytes) => {
                self.metrics.messages_sent.inc();
                if let Err(error) = self.net.send(to, bytes) {
                    tracing::debug!(%to, %error, "not sent");
                }
            }
            Err(error) => tracing::error!(%to, %error, "a message that cannot be encoded"),
        }
    }

    fn probe(&self, node: NodeId, id: u64, guard_at: Option<(SocketAddr, LauncherId)>) {
        let addr = self.core.peers().get(node).and_then(|p| p.addr);
        let (tx, limit) = (self.tx.clone(), self.probe_limit);
        tokio::spawn(async move {
            let (agent, guard) =
                tokio::join!(probe::agent(addr, limit), probe::guard(guard_at, limit));
            // Where an agent listens that was never met is not known: then its launcher tells.
            let agent = match (addr, guard_at) {
                (None, Some(_)) => Answer::Refused,
                _ => agent,
            };
            let input = Input::Probed {
                node,
                id,
                agent,
                guard,
            };
            let _ended = tx.send(input).await;
        });
    }

    pub(super) fn tell_launcher(&mut self, conn: ConnId, frame: &ToLauncher) {
        self.told(conn, frame);
        self.note_end(conn, frame);
        self.tell_with(conn, frame, Arc::default());
    }

    /// How a launcher's part in its job ended is an event of the job.
    fn note_end(&mut self, conn: ConnId, frame: &ToLauncher) {
        let ToLauncher::End { code, report } = frame else {
            return;
        };
        let launcher = self.clients.get(&conn).and_then(|c| c.launcher.as_ref());
        if let Some(key) = launcher.map(|l| l.key().clone()) {
            let fields = serde_json::json!({ "code": code, "text": report });
            self.history.add(&key, "ended", fields);
        }
    }

    /// With descriptors.
    pub(super) fn tell_with(&mut self, conn: ConnId, frame: &ToLauncher, fds: Arc<Received>) {
        let Some(client) = self.clients.get_mut(&conn) else {
            return;
        };
        // One that is stopped reads nothing: another word says no more than the one that it will find,
        // and with a socket full of them the connection would end.
        let again = matches!(frame, ToLauncher::Welcome { .. })
            && std::mem::replace(&mut client.welcomed, true);
        if again && !client.sender.is_read() {
            return;
        }
        let by_votes = client
            .launcher
            .as_ref()
            .is_none_or(Launcher::is_without_store);
        let hindrances = || hindrances(&self.refused, &self.core, by_votes);
        let frame = clients::with_hindrances(frame, hindrances, &mut client.waiting);
        match codec::encode_frame(&*frame) {
            Ok(bytes) => {
                if let Err(error) = client.sender.send_shared(bytes, fds) {
                    tracing::warn!(pid = client.pid, %error, "the launcher does not read");
                }
            }
            Err(error) => tracing::error!(%error, "a frame that cannot be encoded"),
        }
    }

    /// Members of the jobs that run here are let in before other agents of a large cluster.
    pub(super) fn prefer_members(&self) {
        let records = self.core.jobs().filter_map(Job::voting);
        let nodes = records.flat_map(|r| {
            let witnesses = r.witnesses.iter().map(|w| w.node);
            r.members.iter().map(|m| m.node).chain(witnesses)
        });
        if !self.net.prefer(nodes.collect()) {
            tracing::debug!("the network layer has too many orders: it keeps whom it preferred");
        }
    }

    fn on_notice(&mut self, notice: &Notice) {
        let config = self.core.config();
        let names = history::Names {
            peers: self.core.peers(),
            me: config.node,
            host: &config.host,
        };
        self.history.take(notice, names);
        let peers = self.core.peers();
        match notice {
            Notice::Peer { node, state } => {
                let name = peers.name(*node);
                match state {
                    State::Alive => tracing::info!(node = name, "alive"),
                    State::Suspect { .. } => tracing::info!(node = name, "suspect"),
                    State::Away { .. } => {
                        tracing::warn!(node = name, "its agent is away, its launcher answers")
                    }
                    State::Lost { confirmed } => {
                        // It said that it leaves: that is no outage.
                        match peers.get(*node).is_some_and(|p| p.leaving.is_some()) {
                            true => tracing::info!(node = name, "left"),
                            false => tracing::warn!(node = name, confirmed, "lost"),
                        }
                        // Nothing passes on it any more. Whether the two reach each other is seen
                        // by the next one.
                        self.net.disconnect(*node);
                    }
                }
            }
            Notice::OtherTimes { node, theirs, mine } => tracing::warn!(
                node = peers.name(*node),
                suspect_after = %theirs.suspect_after, here_suspect_after = %mine.suspect_after,
                agent_grace = %theirs.agent_grace, here_agent_grace = %mine.agent_grace,
                "a node keeps other times than this one: set the same suspect_after and agent_grace on all; \
                 until then every start waits for the longest"
            ),
            Notice::Unstored { node, errno } => {
                let node = peers.name(*node);
                match errno.map(refused_write) {
                    None => tracing::info!(node, "its state directory refuses no write any more"),
                    Some(why) => tracing::warn!(node, why, "its state directory refuses writes"),
                }
                self.tell_hindrances();
            }
            Notice::Decided {
                key,
                digest,
                record,
            } => {
                self.metrics.generation_change(record.cause.word());
                self.prefer_members();
                tracing::info!(job = %key, generation = record.number, %digest, cause = record.cause.word(),
                    members = record.members.len(), kind = ?record.kind, "decided");
            }
            Notice::Voters { key, record, gone } => {
                self.prefer_members();
                let names = |nodes: Vec<NodeId>| {
                    let names = nodes.into_iter().map(|n| peers.name(n));
                    names.collect::<Vec<_>>().join(", ")
                };
                let witnesses = names(record.witnesses.iter().map(|w| w.node).collect());
                let gone = names(gone.clone());
                tracing::info!(job = %key, generation = record.number, witnesses, gone, "voters");
            }
            Notice::Changed {
                key, phases, told, ..
            } => {
                let p = history::phases_json(phases);
                if *told != Told::Leading {
                    // Each change counts once among all agents' metrics.
                    return tracing::info!(job = %key, phases = %p, ?told, "times of the change");
                }
                for phase in ["detect", "decide", "stop", "start", "total"] {
                    let ms = p[format!("{phase}_ms")].as_f64().unwrap_or(0.0);
                    self.metrics
                        .recovery_phase(phase, Duration::from_secs_f64(ms / 1e3));
                }
                tracing::info!(job = %key, phases = %p, "started");
            }
            Notice::Waiting { key, text } => tracing::info!(job = %key, text, "waiting"),
            Notice::Stopping { key, why } => {
                tracing::info!(job = %key, why, "stopping cleanly")
            }
            Notice::WorkerFailed { key, exit, .. } => {
                tracing::warn!(job = %key, rank = exit.rank, code = exit.code, signal = exit.signal, "a worker failed");
            }
            Notice::Committed { key, commit } => {
                tracing::info!(job = %key, step = commit.step, "committed")
            }
            Notice::Hung { key, text, .. } => tracing::warn!(job = %key, text, "a rank hangs"),
            Notice::Moves { key } => tracing::info!(job = %key, "all ranks make progress again"),
            Notice::Saving { key, text } => tracing::info!(job = %key, text, "saving"),
            Notice::Warning { key, text } => tracing::warn!(job = %key, text),
            Notice::Trouble { key, text } => tracing::error!(job = %key, text),
        }
    }
}
