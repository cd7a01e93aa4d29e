//! Clients of the socket: launchers and command lines.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use muster_protocol::agent::{Agent, ConnId, Event};
use muster_protocol::control::report::RankMetrics;
use muster_protocol::job::Job;
use muster_protocol::local::{
    Answer, Command, Register, STORE_HANGS, SaveNews, StoreAnswer, ToAgent, ToLauncher,
};
use muster_protocol::membership;
use muster_protocol::{Digest, JobKey, LauncherId, codec, storelog};
use tokio::sync::mpsc;

use super::looks::{Marks, Process};
use super::reports::{Labels, MAX_PER_USER, Reported, Series};
use super::stores::{self, Asked, Told};
use super::{Client, Input, Node, effects};
use crate::clock;
use crate::socket::{Conn, NoRoom, Received, Receiver};

/// Agents called in vain that launchers are told of, and nodes that store no votes.
pub(super) const MAX_HINDRANCES: usize = 8;
/// A client that says nothing for this long after connecting is let go.
const FIRST_FRAME: Duration = Duration::from_secs(10);

/// A launcher that was taken in.
#[derive(Debug)]
pub(super) struct Launcher {
    id: LauncherId,
    guards: Vec<SocketAddr>,
    process: Option<Process>,
    key: JobKey,
    /// Operations that it was asked for in the store that it brought.
    store: Option<Asked>,
    metrics: Reported,
}

impl Launcher {
    fn new(reg: &Register, key: JobKey, pid: i32) -> Launcher {
        let local = SocketAddr::from((Ipv4Addr::LOCALHOST, reg.guard_port));
        let addrs = reg.addrs.iter();
        let addrs = addrs.map(|ip| SocketAddr::new(*ip, reg.guard_port));
        Launcher {
            id: reg.launcher,
            guards: std::iter::once(local).chain(addrs).collect(),
            // Another process may only pass on what the launcher says.
            process: (u32::try_from(pid) == Ok(reg.pid))
                .then(|| Process::of(pid))
                .flatten(),
            key,
            store: reg.store.map(|_| Asked::default()),
            metrics: Reported::default(),
        }
    }

    pub(super) fn is_without_store(&self) -> bool {
        self.store.is_none()
    }

    pub(super) fn key(&self) -> &JobKey {
        &self.key
    }

    pub(super) fn id(&self) -> LauncherId {
        self.id
    }
}

/// An order, as the log names it.
struct Order {
    name: &'static str,
    /// The job or the node; empty for this node.
    of: String,
}

impl Order {
    fn of(command: &Command) -> Order {
        let (name, of) = match command {
            Command::Drain { node, .. } => ("drain", node),
            Command::Cancel { job, .. } => ("cancel", job),
            Command::Continue { job, .. } => ("continue", job),
            Command::Checkpoint { job } => ("checkpoint", job),
            Command::Ended { job, .. } => ("end in the log", job),
        };
        let of = of.clone();
        Order { name, of }
    }
}

impl Node {
    pub(super) fn on_client(&mut self, conn: Conn) {
        self.next_conn += 1;
        let id = ConnId(self.next_conn);
        let peer = conn.peer();
        let (sender, receiver) = conn.split();
        let client = Client {
            sender,
            uid: peer.uid,
            pid: peer.pid,
            launcher: None,
            waiting: None,
            welcomed: false,
        };
        self.clients.insert(id, client);
        tokio::spawn(read(receiver, id, self.tx.clone()));
    }

    pub(super) fn on_frame(&mut self, conn: ConnId, frame: &[u8], fds: Result<Received, NoRoom>) {
        match codec::decode_frame::<ToAgent>(frame) {
            Err(error) => {
                self.refuse(conn, &error.to_string());
                self.drop_client(conn);
            }
            Ok(frame) => self.act(conn, frame, fds),
        }
    }

    fn act(&mut self, conn: ConnId, frame: ToAgent, fds: Result<Received, NoRoom>) {
        if let Err(error) = frame.check() {
            self.refuse(conn, &error.to_string());
            return self.drop_client(conn);
        }
        let Some(client) = self.clients.get(&conn) else {
            return;
        };
        let (uid, owner) = (client.uid, client.uid.to_string());
        match frame {
            ToAgent::Query(query) => {
                for answer in self.answer(&query, uid) {
                    self.reply(conn, &answer);
                }
            }
            ToAgent::Command(command) => self.command(conn, owner, command),
            ToAgent::Register(reg) => self.register(conn, owner, reg),
            ToAgent::Store { id, answer } => self.on_store_answer(conn, id, answer),
            ToAgent::Metrics {
                digest,
                first,
                ranks,
            } => self.on_metrics(conn, digest, first, &ranks),
            ToAgent::Save(SaveNews::Slots { k, capacity, found }) => {
                // Before the core hears of them: it may refuse them.
                self.keep_slots(conn, k, capacity, fds);
                let frame = ToAgent::Save(SaveNews::Slots { k, capacity, found });
                self.apply(Event::Launcher { conn, owner, frame });
            }
            frame => {
                if let ToAgent::Save(SaveNews::SlotsGone { k }) = frame {
                    self.let_go(conn, k);
                }
                self.apply(Event::Launcher { conn, owner, frame });
            }
        }
    }

    /// Registers a launcher: the agent's knowledge of it counts from when the core has taken it in.
    fn register(&mut self, conn: ConnId, owner: String, reg: Register) {
        let key = JobKey {
            cluster: self.core.config().cluster.clone(),
            owner: owner.clone(),
            id: reg.job.clone(),
        };
        let Some(client) = self.clients.get(&conn) else {
            return;
        };
        let uid = client.uid;
        let (pid, log_dir) = (client.pid, reg.log_dir.clone());
        let launcher = Launcher::new(&reg, key, pid);
        let other = |l: &Launcher| l.id != launcher.id || l.key != launcher.key;
        if client.launcher.as_ref().is_some_and(other) {
            self.refuse(conn, "a connection carries one launcher of one job");
            return self.drop_client(conn);
        }
        let event = Event::Launcher {
            conn,
            owner,
            frame: ToAgent::Register(reg),
        };
        if let Err(error) = self.core.handle(event, clock::now()) {
            return self.warn_refused(&error.to_string());
        }
        self.give_up_store(conn);
        let (id, key) = (launcher.id, launcher.key.clone());
        self.history.add_launcher(&key, id, pid, log_dir.as_deref());
        if let Some(client) = self.clients.get_mut(&conn) {
            client.launcher = Some(launcher);
        }
        self.hand_over(conn, &key, id);
        for conn in self.looks.back(uid, id) {
            let guard = membership::Answer::Refused;
            self.apply(Event::LauncherGone { conn, guard });
        }
    }

    /// An operator's order: draining a node is root's and the agent's own user's.
    fn command(&mut self, conn: ConnId, owner: String, command: Command) {
        let own = rustix::process::getuid().as_raw().to_string();
        let order = Order::of(&command);
        let done = match &command {
            Command::Drain { .. } if owner != "0" && owner != own => {
                Err("only root and the agent's own user may drain a node".to_owned())
            }
            _ => {
                let event = Event::Launcher {
                    conn,
                    owner,
                    frame: ToAgent::Command(command),
                };
                let done = self.core.handle(event, clock::now());
                done.map_err(|error| error.to_string())
            }
        };
        self.note_order(conn, &order, &done);
        let answer = match done {
            Ok(()) => Answer::Json("{\"ok\":true}".into()),
            Err(error) => Answer::Error(error),
        };
        self.reply(conn, &answer);
    }

    /// The audit line of an order: the user and process that gave it, what it is, and what came of it. Refused ones are
    /// left out where somebody has himself refused again and again.
    fn note_order(&mut self, conn: ConnId, order: &Order, done: &Result<(), String>) {
        let Some(client) = self.clients.get(&conn) else {
            return;
        };
        let (uid, pid) = (client.uid, client.pid);
        let comm = std::fs::read_to_string(format!("/proc/{pid}/comm"));
        let program = comm.as_deref().map_or("", str::trim_end);
        let Order { name, of } = order;
        match done {
            Ok(()) => tracing::info!(order = name, of, uid, pid, program, "an order was taken"),
            Err(why) => {
                if let Some(left_out) = self.seldom.due() {
                    tracing::warn!(
                        order = name,
                        of,
                        uid,
                        pid,
                        program,
                        why,
                        left_out,
                        "an order was refused"
                    );
                }
            }
        }
    }

    fn reply(&mut self, conn: ConnId, answer: &Answer) {
        let Some(client) = self.clients.get(&conn) else {
            return;
        };
        let bytes = codec::encode_frame(answer).or_else(|_| {
            codec::encode_frame(&Answer::Error(
                "the answer is too long for one frame: ask for less".into(),
            ))
        });
        if let Ok(bytes) = bytes
            && let Err(error) = client.sender.send(bytes, Vec::new())
        {
            tracing::debug!(%error, "a query whose answer nobody read");
        }
    }

    /// Anyone who may connect can have himself refused as often as he likes.
    pub(super) fn warn_refused(&mut self, reason: &str) {
        if let Some(left_out) = self.seldom.due() {
            tracing::warn!(reason, left_out, "refused");
        }
    }

    fn refuse(&mut self, conn: ConnId, reason: &str) {
        self.warn_refused(reason);
        let reason = reason.to_owned();
        self.tell_launcher(conn, &ToLauncher::Refused { reason });
    }

    /// An agent cannot be reached, or cannot be talked to: launchers that wait are told, for it may be the one that
    /// they wait for. `who` is its address, its host or its name.
    pub(super) fn warn_launchers(&mut self, who: String, text: String) {
        if self.refused.len() < MAX_HINDRANCES || self.refused.contains_key(&who) {
            self.refused.insert(who, text);
        }
        self.tell_hindrances();
    }

    /// Launchers that wait hear what hinders now.
    pub(super) fn tell_hindrances(&mut self) {
        let waiting: Vec<(ConnId, String)> = self
            .clients
            .iter()
            .filter_map(|(conn, c)| Some((*conn, c.waiting.clone()?)))
            .collect();
        for (conn, text) in waiting {
            self.tell_launcher(conn, &ToLauncher::Waiting { text });
        }
    }

    /// Ends a connection, but not before the client could read why.
    fn drop_client(&mut self, conn: ConnId) {
        if let Some(client) = self.clients.get(&conn) {
            tokio::spawn(client.sender.clone().close_when_sent());
        }
    }

    /// A connection closed. A launcher may have lost it, or be dead: its guard knows.
    pub(super) fn on_closed(&mut self, conn: ConnId) {
        self.give_up_store(conn);
        let Some(mut client) = self.clients.remove(&conn) else {
            return;
        };
        if let Some(launcher) = &mut client.launcher {
            let held = self.held_by_others(conn, &launcher.key);
            launcher.metrics.forget(&self.metrics, &held);
        }
        let Some(launcher) = client.launcher else {
            return;
        };
        let Launcher {
            id,
            guards,
            process,
            ..
        } = launcher;
        let (tx, marks) = (self.tx.clone(), Marks { guards, process });
        if !self.looks.start(conn, client.uid, id, marks, tx) {
            tracing::warn!(
                uid = client.uid,
                "too many launchers of this user are looked for: one more is not"
            );
            let guard = membership::Answer::Silent;
            self.apply(Event::LauncherGone { conn, guard });
        }
    }

    /// The series that other launchers of this job report: one that took over may be there before the
    /// one before it is seen to be gone.
    fn held_by_others(&self, conn: ConnId, key: &JobKey) -> BTreeSet<Labels> {
        let others = self.clients.iter().filter(|(id, _)| **id != conn);
        let launchers = others.filter_map(|(_, client)| client.launcher.as_ref());
        let same = launchers.filter(|l| l.key == *key);
        same.flat_map(|l| l.metrics.series().cloned()).collect()
    }

    /// How a launcher's workers train.
    fn on_metrics(&mut self, conn: ConnId, digest: Digest, first: bool, ranks: &[RankMetrics]) {
        let launcher = self.clients.get(&conn).and_then(|c| c.launcher.as_ref());
        let Some(launcher) = launcher else { return };
        let held = self.held_by_others(conn, &launcher.key);
        let owner = &launcher.key.owner;
        let others = self.clients.iter().filter(|(other, _)| **other != conn);
        let others = others.filter_map(|(_, c)| c.launcher.as_ref());
        let others = others.filter(|l| l.key.owner == *owner);
        let shown: usize = others.map(|l| l.metrics.series().count()).sum();
        let launcher = self
            .clients
            .get_mut(&conn)
            .and_then(|c| c.launcher.as_mut());
        let Some(launcher) = launcher else { return };
        let job = self.core.job(&launcher.key);
        let head = job.and_then(|j| j.head());
        let config = self.core.config();
        // What is late, or about ranks that are not this node's, is left out.
        let Some((from, slots)) = head
            .filter(|(_, d)| *d == digest)
            .and_then(|(record, _)| record.ranks_of(config.node))
        else {
            return launcher.metrics.forget(&self.metrics, &held);
        };
        let own = from..from + u32::from(slots);
        let ranks = ranks.iter().filter(|r| own.contains(&r.rank));
        let series = Series {
            metrics: &self.metrics,
            held: &held,
            room: MAX_PER_USER.saturating_sub(shown),
            job: &launcher.key.id,
            owner: &launcher.key.owner,
            node: &config.host,
        };
        launcher
            .metrics
            .take(&series, digest, first, ranks, clock::now());
    }

    // ---- stores ----

    /// The launcher of a job, and what it was asked to do in the store that it brought.
    fn store_of(&mut self, key: &JobKey) -> Option<(ConnId, &mut Asked)> {
        let conn = self.core.job(key)?.conn()?;
        let launcher = self.clients.get_mut(&conn)?.launcher.as_mut()?;
        Some((conn, launcher.store.as_mut()?))
    }

    /// Has the job's launcher carry out an operation of the log.
    pub(super) fn store(&mut self, key: JobKey, effect: storelog::Effect) {
        let asks = match self.store_of(&key) {
            Some((conn, asked)) => asked.log(effect, clock::now()).map(|asks| (conn, asks)),
            // Nobody here can reach the store now.
            None => Err(effect.unknown()),
        };
        match asks {
            Ok((conn, asks)) => {
                for (id, ask) in asks {
                    self.tell_launcher(conn, &ToLauncher::Store { id, ask });
                }
            }
            Err(event) => self.apply(Event::Store { key, event }),
        }
    }

    /// Has the job's launcher write the beacon, or read it.
    pub(super) fn beacon(&mut self, key: &JobKey, write: Option<u64>) {
        let now = clock::now();
        let ask = self
            .store_of(key)
            .and_then(|(conn, asked)| Some((conn, asked.beacon(write, now)?)));
        if let Some((conn, (id, ask))) = ask {
            self.tell_launcher(conn, &ToLauncher::Store { id, ask });
        }
    }

    fn on_store_answer(&mut self, conn: ConnId, id: u64, answer: StoreAnswer) {
        let launcher = self
            .clients
            .get_mut(&conn)
            .and_then(|c| c.launcher.as_mut());
        let Some((key, asked)) = launcher.and_then(|l| Some((l.key.clone(), l.store.as_mut()?)))
        else {
            return;
        };
        // What nobody asked for is no news either: it would fill the log as fast as it comes.
        let Some(op) = asked.op(id) else {
            return;
        };
        let failed = match &answer {
            StoreAnswer::Failed { reason } => Some(reason.clone()),
            _ => None,
        };
        let news = asked.note(op, failed.as_deref());
        let told = asked.answer(id, answer);
        self.store_trouble(&key, news);
        match told {
            Some(Told::Log(event)) => self.store_event(key, event),
            Some(Told::Beacon(value)) => self.apply(Event::Beacon { key, value }),
            None => {}
        }
    }

    /// When the first launcher has had long enough for what it was asked.
    pub(super) fn stores_due(&self) -> Option<muster_protocol::Time> {
        let launchers = self.clients.values().filter_map(|c| c.launcher.as_ref());
        launchers.filter_map(|l| l.store.as_ref()?.due()).min()
    }

    /// Gives up what launchers take too long for.
    pub(super) fn expire_stores(&mut self) {
        let now = clock::now();
        let mut late = Vec::new();
        for launcher in self
            .clients
            .values_mut()
            .filter_map(|c| c.launcher.as_mut())
        {
            let Some(asked) = launcher.store.as_mut() else {
                continue;
            };
            for (op, event) in asked.expire(now) {
                // A launcher that is stopped says nothing of its store.
                let job = self.core.job(&launcher.key);
                let stopped = job.is_some_and(Job::is_unresponsive);
                let news = if stopped {
                    None
                } else {
                    asked.note(op, Some(STORE_HANGS))
                };
                late.push((launcher.key.clone(), event, news));
            }
        }
        for (key, event, news) in late {
            self.store_trouble(&key, news);
            self.store_event(key, event);
        }
    }

    /// Gives up what a launcher was asked for and can no longer answer.
    fn give_up_store(&mut self, conn: ConnId) {
        let launcher = self
            .clients
            .get_mut(&conn)
            .and_then(|c| c.launcher.as_mut());
        let Some((key, asked)) = launcher.and_then(|l| Some((l.key.clone(), l.store.as_mut()?)))
        else {
            return;
        };
        for event in asked.give_up() {
            self.store_event(key.clone(), event);
        }
    }

    fn store_event(&mut self, key: JobKey, event: storelog::Event) {
        let (op, result) = stores::words(&event);
        self.metrics.store_op(op, result);
        self.apply(Event::Store { key, event });
    }

    fn store_trouble(&mut self, key: &JobKey, news: Option<String>) {
        if let Some(text) = news {
            tracing::warn!(job = %key, text, "the job's store");
            let text = format!("the job's store: {text}");
            self.history
                .add(key, "trouble", serde_json::json!({ "text": text }));
        }
    }
}

/// The troubles of a launcher that waits: agents called in vain and, where votes decide, nodes that store none.
pub(super) fn hindrances(
    refused: &BTreeMap<String, String>,
    core: &Agent,
    by_votes: bool,
) -> Vec<String> {
    let unstored = if by_votes {
        effects::unstored(core)
    } else {
        Vec::new()
    };
    refused.values().cloned().chain(unstored).collect()
}

/// Adds to what a launcher waits for what may hinder it. `waiting` keeps the text without that, for as long as the
/// launcher waits.
pub(super) fn with_hindrances<'a>(
    frame: &'a ToLauncher,
    hindrances: impl FnOnce() -> Vec<String>,
    waiting: &mut Option<String>,
) -> Cow<'a, ToLauncher> {
    match frame {
        ToLauncher::Waiting { text } if !text.is_empty() => {
            *waiting = Some(text.clone());
            let mut text = text.clone();
            for why in hindrances() {
                text.push('\n');
                text.push_str(&why);
            }
            Cow::Owned(ToLauncher::Waiting { text })
        }
        ToLauncher::Waiting { .. } | ToLauncher::Start(_) | ToLauncher::End { .. } => {
            *waiting = None;
            Cow::Borrowed(frame)
        }
        _ => Cow::Borrowed(frame),
    }
}

async fn read(mut receiver: Receiver, conn: ConnId, tx: mpsc::Sender<Input>) {
    let mut first = true;
    loop {
        let received = if first {
            match tokio::time::timeout(FIRST_FRAME, receiver.recv()).await {
                Ok(received) => received,
                Err(_) => break,
            }
        } else {
            receiver.recv().await
        };
        first = false;
        match received {
            // Descriptors that came with any frame but of slots are dropped with it.
            Ok(Some((frame, fds))) => {
                let input = Input::Frame { conn, frame, fds };
                if tx.send(input).await.is_err() {
                    return;
                }
            }
            Ok(None) => break,
            Err(error) => {
                tracing::debug!(%error, "a client's connection broke");
                break;
            }
        }
    }
    let _ended = tx.send(Input::Closed(conn)).await;
}
