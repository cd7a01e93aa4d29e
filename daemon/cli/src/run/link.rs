//! The link to the agent: frames over the unix socket, or to an agent in the same process.
//!
//! The session never waits for it. A task dials, again and again with a growing pause, tells the
//! session when the link is up, and carries frames both ways until it breaks.

use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use muster_daemon::socket::{self, Conn, NoRoom, Received};
use muster_launcher::is_said_once;
use muster_protocol::codec;
use muster_protocol::local::{ToAgent, ToLauncher};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

/// First and longest pause between two tries to reach the agent.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(1));

/// A frame that an agent does not take for this long means that it hangs.
const SEND_PATIENCE: Duration = Duration::from_secs(10);

/// How long an agent may take for its first word on a link before that is told to people. Each link begins with a
/// word, which it says again every second.
const SILENCE: Duration = Duration::from_secs(5);

/// Texts for people about a link on which the agent says nothing.
const CLOSED: &str = "it closes each connection at once: it has as many as it takes, or is just ending; its log says which. \
    Where there are too many, end launchers and commands on this node";
const SILENT: &str = "it takes no connection: it is stopped, or can open no more files; its log says which. \
    Where it can open no more, raise its limit (systemd: LimitNOFILE, a shell: ulimit -n)";

/// Time within which what has arrived on a link is read.
const LAST_WORD: Duration = Duration::from_millis(100);

/// Frames that may wait for the agent.
const MAX_WAITING: usize = 1024;

/// A frame for the agent, and the descriptors that go with it.
pub type Out = (ToAgent, Vec<OwnedFd>);
/// A frame of the agent's, and the descriptors that came with it.
pub type In = (ToLauncher, Result<Vec<OwnedFd>, NoRoom>);

/// A connection to an agent.
pub trait Link: Send + 'static {
    /// Sends one frame, and descriptors with it.
    fn send(&mut self, out: Out) -> impl Future<Output = io::Result<()>> + Send;

    /// The next frame; `None` when the agent closed the link. Must be safe to drop half-way: no
    /// frame is lost then.
    fn recv(&mut self) -> impl Future<Output = io::Result<Option<In>>> + Send;
}

/// A way to get a [`Link`].
pub trait Dial: Send + 'static {
    type Link: Link;

    fn dial(&mut self) -> impl Future<Output = io::Result<Self::Link>> + Send;
}

/// Events from the link's task to the session.
#[derive(Debug)]
pub enum LinkEvent {
    /// A new link; frames for it go into this queue, which ends with the link.
    Up(mpsc::Sender<Out>),
    /// The link ended; whether the agent had said anything on it.
    Down {
        heard: bool,
    },
    Frame(Box<In>),
    /// The agent cannot be reached, or says nothing; told once per time away.
    Away(String),
    /// No agent will ever answer: why.
    Gone(String),
}

/// Dials and carries frames until the session is gone.
pub async fn keep<D: Dial>(mut dialer: D, events: mpsc::Sender<LinkEvent>) {
    let mut pause = BACK_OFF.0;
    let mut told = false;
    loop {
        let away = match dialer.dial().await {
            Ok(link) => {
                let (queue, outbox) = mpsc::channel(MAX_WAITING);
                if events.send(LinkEvent::Up(queue)).await.is_err() {
                    return;
                }
                let heard = carry(link, outbox, &events, &mut told).await;
                if events.send(LinkEvent::Down { heard }).await.is_err() {
                    return;
                }
                (!heard).then(|| CLOSED.to_owned())
            }
            Err(error) => Some(error.to_string()),
        };
        match away {
            None => (pause, told) = (BACK_OFF.0, false),
            Some(why) => tell(why, &mut told, &events).await,
        }
        if events.is_closed() {
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(BACK_OFF.1);
    }
}

/// Once per time away. That nobody listens is seen elsewhere.
async fn tell(why: String, told: &mut bool, events: &mpsc::Sender<LinkEvent>) {
    if !std::mem::replace(told, true) {
        let _gone = events.send(LinkEvent::Away(why)).await;
    }
}

/// Until the link ends; whether the agent said anything.
async fn carry<L: Link>(
    mut link: L,
    mut outbox: mpsc::Receiver<Out>,
    events: &mpsc::Sender<LinkEvent>,
    told: &mut bool,
) -> bool {
    let silent = sleep(SILENCE);
    tokio::pin!(silent);
    let mut heard = false;
    loop {
        tokio::select! {
            out = outbox.recv() => {
                let Some(out) = out else {
                    // Given up here: that says nothing of the agent.
                    heard = true;
                    break;
                };
                if !matches!(timeout(SEND_PATIENCE, link.send(out)).await, Ok(Ok(()))) {
                    break;
                }
            }
            got = link.recv() => match got {
                Ok(Some(got)) => {
                    heard = true;
                    // Here and not behind what the launcher does just now: the start of processes takes its time.
                    if matches!(got.0, ToLauncher::Welcome { .. }) {
                        let alive = (ToAgent::Alive, Vec::new());
                        if !matches!(timeout(SEND_PATIENCE, link.send(alive)).await, Ok(Ok(()))) {
                            break;
                        }
                    }
                    if events.send(LinkEvent::Frame(Box::new(got))).await.is_err() {
                        return heard;
                    }
                }
                Ok(None) => return heard,
                Err(error) => {
                    // Such as the refusal of an agent of another version.
                    let unread = error.get_ref().is_some_and(|e| e.is::<codec::CodecError>());
                    if unread && !heard {
                        tell(error.to_string(), told, events).await;
                    }
                    return heard;
                }
            },
            () = &mut silent, if !heard && !*told => tell(SILENT.to_owned(), told, events).await,
        }
    }
    // No more can be sent, or the session wants another link, as what came over this one is old; but for what is said
    // once.
    let _late = timeout(LAST_WORD, last_words(&mut link, events)).await;
    heard
}

/// Passes on what is said once, if that lies there.
async fn last_words<L: Link>(link: &mut L, events: &mpsc::Sender<LinkEvent>) {
    while let Ok(Some(got)) = link.recv().await {
        if is_said_once(&got.0) && events.send(LinkEvent::Frame(Box::new(got))).await.is_err() {
            return;
        }
    }
}

/// Dials an agent's unix socket.
#[derive(Clone, Debug)]
pub struct SocketDial(pub PathBuf);

/// A link over a unix socket.
#[derive(Debug)]
pub struct SocketLink(Conn);

impl SocketLink {
    /// A link over a connection that exists: one end of a [`socket::pair`], for an embedded agent.
    pub fn over(conn: Conn) -> SocketLink {
        SocketLink(conn)
    }
}

impl Dial for SocketDial {
    type Link = SocketLink;

    async fn dial(&mut self) -> io::Result<SocketLink> {
        socket::connect(&self.0)
            .await
            .map(SocketLink)
            .map_err(io::Error::other)
    }
}

impl Link for SocketLink {
    async fn send(&mut self, (frame, fds): Out) -> io::Result<()> {
        let frame = codec::encode_frame(&frame).map_err(io::Error::other)?;
        self.0.send(frame, fds).map_err(io::Error::other)
    }

    async fn recv(&mut self) -> io::Result<Option<In>> {
        match self.0.recv().await.map_err(io::Error::other)? {
            Some((frame, fds)) => {
                let frame = codec::decode_frame(&frame).map_err(io::Error::other)?;
                Ok(Some((frame, fds.map(Received::keep))))
            }
            None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use muster_protocol::codec::WIRE_VERSION;

    use super::*;

    /// Links over pairs of sockets; the other ends are an agent's.
    struct Pairs(mpsc::UnboundedReceiver<Conn>);

    impl Dial for Pairs {
        type Link = SocketLink;

        async fn dial(&mut self) -> io::Result<SocketLink> {
            let conn = self.0.recv().await;
            conn.map(SocketLink::over)
                .ok_or_else(|| io::ErrorKind::ConnectionRefused.into())
        }
    }

    #[tokio::test]
    async fn an_agent_of_another_version_is_told_once_and_by_its_version() {
        let (dials, queue) = mpsc::unbounded_channel();
        let (events, mut heard) = mpsc::channel(16);
        let link = tokio::spawn(keep(Pairs(queue), events));
        let mut agents = Vec::new();
        for _ in 0..3 {
            let (ours, theirs) = socket::pair().unwrap();
            let refusal = ToLauncher::Refused {
                reason: "you are not of this version".into(),
            };
            let mut frame = codec::encode_frame(&refusal).unwrap();
            frame[0] = WIRE_VERSION + 1;
            theirs.send(frame, Vec::new()).unwrap();
            agents.push(theirs);
            dials.send(ours).unwrap();
        }
        // A session without a queue has ended.
        let mut queues = Vec::new();
        let mut told = Vec::new();
        let mut ended = 0;
        while ended < 3 {
            match timeout(SILENCE, heard.recv()).await.unwrap().unwrap() {
                LinkEvent::Up(queue) => queues.push(queue),
                LinkEvent::Down { heard } => {
                    assert!(!heard);
                    ended += 1;
                }
                LinkEvent::Away(why) => told.push(why),
                other => panic!("{other:?}"),
            }
        }
        let theirs = format!("wire version {}", WIRE_VERSION + 1);
        assert!(
            told.len() == 1 && told[0].contains(&theirs) && told[0].contains("same Muster"),
            "{told:?}"
        );
        // One of this version is heard.
        let (ours, agent) = socket::pair().unwrap();
        let welcome = ToLauncher::Refused {
            reason: "full".into(),
        };
        agent
            .send(codec::encode_frame(&welcome).unwrap(), Vec::new())
            .unwrap();
        dials.send(ours).unwrap();
        loop {
            match timeout(SILENCE, heard.recv()).await.unwrap().unwrap() {
                LinkEvent::Up(queue) => queues.push(queue),
                LinkEvent::Frame(got) => {
                    assert_eq!(got.0, welcome);
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
        link.abort();
    }

    /// This launcher was stopped while its agent said how its part ends, and ended itself.
    #[tokio::test]
    async fn the_last_word_of_an_agent_that_is_gone_is_heard() {
        for wants_another in [false, true] {
            last_word_is_heard(wants_another).await;
        }
    }

    /// The session may drop its queue first, as one does that was stopped.
    async fn last_word_is_heard(wants_another: bool) {
        let (dials, queue) = mpsc::unbounded_channel();
        let (events, mut heard) = mpsc::channel(64);
        let link = tokio::spawn(keep(Pairs(queue), events));
        let (ours, agent) = socket::pair().unwrap();
        let welcome = ToLauncher::Welcome {
            node: muster_protocol::NodeId([1; 32]),
            agent_pid: 1,
            agent_grace_ms: 4_000,
            lease_ms: 1_500,
        };
        let end = ToLauncher::End {
            code: 143,
            report: "left".into(),
        };
        let said = std::iter::repeat_n(welcome, 30).chain([end.clone()]);
        for frame in said {
            agent
                .send(codec::encode_frame(&frame).unwrap(), Vec::new())
                .unwrap();
        }
        let (sender, receiver) = agent.split();
        drop(receiver);
        // All of it is on its way before it closes.
        sender.close_when_sent().await;
        dials.send(ours).unwrap();
        let mut queues = Vec::new();
        let last = loop {
            match timeout(SILENCE, heard.recv()).await.unwrap().unwrap() {
                LinkEvent::Up(_) if wants_another => {}
                LinkEvent::Up(queue) => queues.push(queue),
                LinkEvent::Frame(got) if matches!(got.0, ToLauncher::Welcome { .. }) => {}
                LinkEvent::Frame(got) => break Some(got.0),
                _ => break None,
            }
        };
        assert_eq!(last, Some(end));
        link.abort();
    }
}
