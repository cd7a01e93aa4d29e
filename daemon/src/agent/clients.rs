//! Clients of the socket: launchers and command lines.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use muster_protocol::agent::{ConnId, Event};
use muster_protocol::local::{Answer, Command, ToAgent, ToLauncher};
use muster_protocol::membership::Answer as Probe;
use muster_protocol::{JobKey, LauncherId, codec};
use tokio::sync::mpsc;

use super::{Client, Input, Node, probe, stores};
use crate::net::Refusal;
use crate::socket::{Conn, Receiver};

/// Between two looks at a launcher that has lost its connection.
const LOOK: Duration = Duration::from_millis(100);
/// Agents called in vain that launchers are told of.
const MAX_REFUSED: usize = 8;
/// A client that says nothing for this long after connecting is let go.
const FIRST_FRAME: Duration = Duration::from_secs(10);

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
        };
        self.clients.insert(id, client);
        tokio::spawn(read(receiver, id, (peer.uid, peer.gid), self.tx.clone()));
    }

    pub(super) fn on_frame(&mut self, conn: ConnId, frame: &[u8]) {
        match codec::decode_frame::<ToAgent>(frame) {
            Err(error) => {
                self.refuse(conn, &error.to_string());
                self.drop_client(conn);
            }
            Ok(ToAgent::Register(reg)) if reg.store => self.refuse(
                conn,
                "the store's directory did not come with the registration",
            ),
            Ok(frame) => self.act(conn, frame),
        }
    }

    pub(super) fn on_store_opened(
        &mut self,
        conn: ConnId,
        frame: &[u8],
        store: Result<stores::Store, String>,
    ) {
        match store {
            Ok(store) => {
                self.opened.insert(conn, store);
                if let Ok(frame) = codec::decode_frame::<ToAgent>(frame) {
                    self.act(conn, frame);
                }
            }
            Err(why) => self.refuse(conn, &format!("--store cannot be used: {why}")),
        }
    }

    fn act(&mut self, conn: ConnId, frame: ToAgent) {
        if let Err(error) = frame.check() {
            self.refuse(conn, &error.to_string());
            return self.drop_client(conn);
        }
        let Some(client) = self.clients.get_mut(&conn) else {
            return;
        };
        let owner = client.uid.to_string();
        match &frame {
            ToAgent::Query(query) => {
                let asker = client.uid;
                for answer in self.answer(query, asker) {
                    self.reply(conn, &answer);
                }
                return;
            }
            ToAgent::Command(command) => return self.command(conn, owner, command.clone()),
            ToAgent::Register(reg) => {
                let local = SocketAddr::from((Ipv4Addr::LOCALHOST, reg.guard_port));
                let addrs = reg
                    .addrs
                    .iter()
                    .map(|ip| SocketAddr::new(*ip, reg.guard_port));
                let guards = std::iter::once(local).chain(addrs).collect();
                client.launcher = Some((reg.launcher, guards));
                let key = JobKey {
                    cluster: self.core.config().cluster.clone(),
                    owner: owner.clone(),
                    id: reg.job.clone(),
                };
                if let Some(store) = self.opened.get(&conn) {
                    self.stores.insert(key, store.clone());
                }
            }
            _ => {}
        }
        let store = self.uuid_of(conn);
        self.apply(Event::Launcher {
            conn,
            owner,
            store,
            frame,
        });
    }

    /// An operator's order: draining a node is root's and the agent's own user's.
    fn command(&mut self, conn: ConnId, owner: String, command: Command) {
        let own = rustix::process::getuid().as_raw().to_string();
        if matches!(command, Command::Drain { .. }) && owner != "0" && owner != own {
            let text = "only root and the agent's own user may drain a node".into();
            return self.reply(conn, &Answer::Error(text));
        }
        let event = Event::Launcher {
            conn,
            owner,
            store: None,
            frame: ToAgent::Command(command),
        };
        let answer = match self.core.handle(event, super::clock::now()) {
            Ok(()) => Answer::Json("{\"ok\":true}".into()),
            Err(error) => Answer::Error(error.to_string()),
        };
        self.reply(conn, &answer);
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

    fn refuse(&mut self, conn: ConnId, reason: &str) {
        tracing::warn!(reason, "a client was refused");
        let reason = reason.to_owned();
        self.tell_launcher(conn, &ToLauncher::Refused { reason });
    }

    /// An agent that was called cannot be talked to: launchers that wait are told, for it may be the
    /// one that they wait for.
    pub(super) fn warn_launchers(&mut self, addr: SocketAddr, why: &Refusal) {
        if self.refused.len() < MAX_REFUSED || self.refused.contains_key(&addr) {
            self.refused.insert(addr, why.to_string());
        }
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
        self.opened.remove(&conn);
        let Some(client) = self.clients.remove(&conn) else {
            return;
        };
        if let Some((launcher, guards)) = client.launcher {
            tokio::spawn(look_for(conn, launcher, guards, self.tx.clone()));
        }
    }
}

/// Adds to what a launcher waits for whom this agent called in vain. `waiting` keeps the text
/// without that, for as long as the launcher waits.
pub(super) fn with_refusals<'a>(
    frame: &'a ToLauncher,
    refused: &BTreeMap<SocketAddr, String>,
    waiting: &mut Option<String>,
) -> Cow<'a, ToLauncher> {
    match frame {
        ToLauncher::Waiting { text } if !text.is_empty() => {
            *waiting = Some(text.clone());
            let mut text = text.clone();
            for (addr, why) in refused {
                text.push_str(&format!("\n{addr} was called, but {why}"));
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

/// Reports whether the launcher answers at its guard, and keeps looking until it does not. A
/// launcher that comes back has a new connection, so that what is said of the old one is ignored.
async fn look_for(
    conn: ConnId,
    launcher: LauncherId,
    guards: Vec<SocketAddr>,
    tx: mpsc::Sender<Input>,
) {
    let mut told = false;
    // A day: a launcher that lives without its agent for longer is found by its own time-outs.
    for _ in 0..864_000 {
        let mut alive = false;
        for guard in &guards {
            let answer = probe::guard(Some((*guard, launcher)), LOOK * 5).await;
            alive |= answer == Probe::Answered;
            if alive {
                break;
            }
        }
        if !alive || !told {
            told = true;
            let input = Input::LauncherAlive { conn, alive };
            if tx.send(input).await.is_err() || !alive {
                return;
            }
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Whether a frame is a registration that comes with a store's directory.
fn brings_store(frame: &[u8]) -> bool {
    matches!(codec::decode_frame(frame), Ok(ToAgent::Register(reg)) if reg.store)
}

async fn read(
    mut receiver: Receiver,
    conn: ConnId,
    (uid, gid): (u32, u32),
    tx: mpsc::Sender<Input>,
) {
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
            Ok(Some((frame, mut fds))) => {
                let input = match fds.pop().filter(|_| brings_store(&frame)) {
                    // Opening takes a while; what the launcher says next waits behind it.
                    Some(fd) => {
                        let store = stores::open(fd, uid, gid).await;
                        Input::StoreOpened { conn, frame, store }
                    }
                    None => Input::Frame { conn, frame },
                };
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
