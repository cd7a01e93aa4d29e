//! One connection's task: the handshake, then its reader and its writer, then its end.
//!
//! This task alone tells the agent about its connection, so that `Connected`, the messages and
//! `Disconnected` come in this order, and waits for the task of the connection that it replaces.
//! When the agent is slow to take events, reading stops and the far side's queue fills; nothing
//! else waits for it.
//!
//! ```text
//! length u32 little-endian, of the body
//! kind   u8: 0 message, 1 peers, 2 keep-alive, 3 goodbye
//! body
//! ```

use std::{net::SocketAddr, sync::Arc, time::Duration};

use futures::{AsyncReadExt, AsyncWriteExt, io::BufReader};
use libp2p::{Stream, swarm::ConnectionId};
use muster_protocol::{
    NodeId,
    codec::{self, MAX_FRAME},
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::timeout,
};

use super::{
    Gone, Limits, NetEvent, Refusal,
    handshake::{self, Code, Failure, Hello, Local, Proven, Tag},
    queue::{Frame, Queue, Shared, Waiting},
};

const MESSAGE: u8 = 0;
const PEERS: u8 = 1;
const KEEP_ALIVE: u8 = 2;
const BYE: u8 = 3;

/// Addresses that one peer tells another at most.
pub(super) const MAX_PEERS: usize = 64;
const MAX_PEERS_FRAME: usize = 8 * 1024;

/// Bytes that are collected before one write.
const BATCH: usize = 64 * 1024;
/// How long a refused peer gets to read why.
const LINGER: Duration = Duration::from_millis(300);
/// How long a reader may go on after the writer has failed: a peer's last words may be there.
const LAST_WORDS: Duration = Duration::from_millis(250);

/// State that all links of an agent share.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) node: NodeId,
    pub(super) version: u8,
    pub(super) secret: Vec<u8>,
    pub(super) limits: Limits,
    pub(super) shared: Arc<Shared>,
    pub(super) events: mpsc::Sender<NetEvent>,
    pub(super) hub: mpsc::Sender<FromLink>,
}

/// A peer and where it can be dialled.
pub(super) type Whereabouts = (NodeId, SocketAddr);

/// Messages from a link to the hub.
#[derive(Debug)]
pub(super) enum FromLink {
    /// Both ends have proven themselves; the hub says whether the connection is kept. `decided`
    /// when the other end has said so already.
    Proven {
        connection: ConnectionId,
        instance: u64,
        lost: Vec<Tag>,
        port: u16,
        tag: Tag,
        decided: bool,
        verdict: oneshot::Sender<Result<Kept, Code>>,
    },
    Refused {
        connection: ConnectionId,
        why: Refusal,
    },
    Peers {
        connection: ConnectionId,
        peers: Vec<Whereabouts>,
    },
    /// The task is done with the connection.
    Ended {
        connection: ConnectionId,
        /// The tag of a connection that the other end may still take for alive.
        lost: Option<Tag>,
    },
}

/// The hub keeps a connection.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) queue: Queue,
    pub(super) waiting: Waiting,
    /// Resolves when the replaced connection has reported its end.
    pub(super) after: Option<oneshot::Receiver<()>>,
    /// Dropped when this one has.
    pub(super) done: oneshot::Sender<()>,
    /// Where the peer can be dialled, as far as is known.
    pub(super) addr: SocketAddr,
}

pub(super) struct Link {
    pub(super) context: Arc<Context>,
    pub(super) connection: ConnectionId,
    pub(super) node: NodeId,
    pub(super) dialler: bool,
    pub(super) hello: Hello,
    pub(super) stream: oneshot::Receiver<Option<Stream>>,
    pub(super) end: watch::Receiver<Option<Gone>>,
}

impl Link {
    /// Runs until the connection is over.
    pub(super) async fn run(self) {
        let Link {
            context,
            connection,
            node,
            dialler,
            hello,
            stream,
            mut end,
        } = self;
        let mut lost = None;
        let mut stream_kept = None;
        let local = Local {
            node: context.node,
            version: context.version,
            secret: &context.secret,
            hello,
            dialler,
        };
        let meeting = meet(
            &context,
            connection,
            node,
            &local,
            stream,
            &mut stream_kept,
            &mut lost,
        );
        let met = tokio::select! {
            met = timeout(context.limits.handshake, meeting) => {
                met.unwrap_or(Err(Failure::Refused(Refusal::TimedOut)))
            }
            _ = ended(&mut end) => Err(Failure::Broken),
        };
        let gone = match (met, stream_kept) {
            (Ok((proven, kept)), Some(stream)) => {
                let talk = Talk {
                    context: &context,
                    connection,
                    node,
                };
                let (gone, done) = talk.run(stream, proven, kept, &mut end).await;
                Some((gone, done))
            }
            (Err(Failure::Refused(why)), stream) => {
                let _ = context
                    .hub
                    .send(FromLink::Refused { connection, why })
                    .await;
                linger(stream).await;
                None
            }
            (_, stream) => {
                linger(stream).await;
                None
            }
        };
        let _ = context.hub.send(FromLink::Ended { connection, lost }).await;
        if let Some((why, done)) = gone {
            let _ = context
                .events
                .send(NetEvent::Disconnected { node, why })
                .await;
            drop(done);
        }
    }
}

/// The handshake, and the verdict on the connection. Leaves the stream in `kept` in any case, and
/// in `lost` the tag of a connection that the other end may take for established.
async fn meet(
    context: &Context,
    connection: ConnectionId,
    node: NodeId,
    local: &Local<'_>,
    stream: oneshot::Receiver<Option<Stream>>,
    kept: &mut Option<Stream>,
    lost: &mut Option<Tag>,
) -> Result<(Proven, Kept), Failure> {
    let stream = match stream.await {
        Ok(Some(stream)) => kept.insert(stream),
        Ok(None) => return Err(Refusal::NotMuster.into()),
        Err(_) => return Err(Failure::Broken),
    };
    let proven = handshake::prove(stream, local, node).await?;
    let decides = handshake::decides(local.node, node);
    if !decides {
        *lost = Some(proven.tag);
        if let Err(failure) = handshake::await_verdict(stream).await {
            if !matches!(failure, Failure::Broken) {
                *lost = None;
            }
            return Err(failure);
        }
    }
    let (verdict, told) = oneshot::channel();
    let question = FromLink::Proven {
        connection,
        instance: proven.hello.instance,
        lost: proven.hello.lost.clone(),
        port: proven.hello.port,
        tag: proven.tag,
        decided: !decides,
        verdict,
    };
    context
        .hub
        .send(question)
        .await
        .map_err(|_| Failure::Broken)?;
    match told.await.map_err(|_| Failure::Broken)? {
        Ok(verdict) => {
            *lost = Some(proven.tag);
            if decides {
                // A failure here shows again at once to the reader.
                let _ = handshake::accept(stream).await;
            }
            Ok((proven, verdict))
        }
        Err(code) => {
            handshake::refuse(stream, code).await?;
            Err(match code {
                Code::Duplicate => Failure::Duplicate,
                Code::Full => Refusal::Full.into(),
                Code::WrongSecret => Refusal::WrongSecret.into(),
            })
        }
    }
}

/// Closes the stream so that what was written before arrives.
async fn linger(stream: Option<Stream>) {
    let Some(mut stream) = stream else { return };
    let _ = timeout(LINGER, async {
        let mut sink = [0; 256];
        let _ = stream.close().await;
        while stream.read(&mut sink).await.is_ok_and(|n| n > 0) {}
    })
    .await;
}

/// Why the hub or a full queue ends the connection.
async fn ended(end: &mut watch::Receiver<Option<Gone>>) -> Gone {
    match end.wait_for(Option::is_some).await {
        Ok(why) => why.unwrap_or(Gone::Local),
        Err(_) => Gone::Local,
    }
}

/// An established connection.
struct Talk<'a> {
    context: &'a Context,
    connection: ConnectionId,
    node: NodeId,
}

impl Talk<'_> {
    async fn run(
        &self,
        stream: Stream,
        proven: Proven,
        kept: Kept,
        end: &mut watch::Receiver<Option<Gone>>,
    ) -> (Gone, oneshot::Sender<()>) {
        let Kept {
            queue,
            waiting,
            after,
            done,
            addr,
        } = kept;
        if let Some(after) = after {
            // An error is the sign: the replaced link has dropped its end.
            let _ = after.await;
        }
        let (node, observed) = (self.node, proven.hello.observed);
        let clock_ahead_ms = proven.clock_ahead_ms;
        self.context.shared.connect(node, self.connection, queue);
        let told = self
            .context
            .events
            .send(NetEvent::Connected {
                node,
                addr,
                observed,
                clock_ahead_ms,
            })
            .await;
        let why = match told {
            Ok(()) => self.talk(stream, waiting, end).await,
            Err(_) => Gone::Local,
        };
        self.context.shared.disconnect(node, self.connection);
        (why, done)
    }

    async fn talk(
        &self,
        stream: Stream,
        waiting: Waiting,
        end: &mut watch::Receiver<Option<Gone>>,
    ) -> Gone {
        let (reader, writer) = stream.split();
        let read = self.read(BufReader::with_capacity(8 * 1024, reader));
        let write = self.write(writer, waiting);
        tokio::pin!(read);
        tokio::select! {
            biased;
            why = ended(end) => why,
            why = &mut read => why,
            why = write => match why {
                Gone::Closed => timeout(LAST_WORDS, read).await.unwrap_or(why),
                _ => why,
            }
        }
    }

    async fn read<R: futures::AsyncRead + Unpin>(&self, mut from: R) -> Gone {
        loop {
            let mut head = [0; 5];
            if let Err(why) = self.fill(&mut from, &mut head).await {
                return why;
            }
            let [a, b, c, d, kind] = head;
            let len = u32::from_le_bytes([a, b, c, d]) as usize;
            let most = match kind {
                MESSAGE => MAX_FRAME,
                PEERS => MAX_PEERS_FRAME,
                KEEP_ALIVE | BYE => 0,
                _ => return Gone::Malformed,
            };
            if len > most {
                return Gone::Malformed;
            }
            let mut bytes = vec![0; len];
            if let Err(why) = self.fill(&mut from, &mut bytes).await {
                return why;
            }
            let delivered = match kind {
                MESSAGE => {
                    let message = NetEvent::Message {
                        from: self.node,
                        bytes,
                    };
                    self.context.events.send(message).await.is_ok()
                }
                PEERS => match codec::decode_body::<Vec<Whereabouts>>(&bytes) {
                    Ok(peers) if peers.len() <= MAX_PEERS => {
                        let peers = FromLink::Peers {
                            connection: self.connection,
                            peers,
                        };
                        self.context.hub.send(peers).await.is_ok()
                    }
                    _ => return Gone::Malformed,
                },
                BYE => return Gone::Left,
                _ => true,
            };
            if !delivered {
                return Gone::Local;
            }
        }
    }

    async fn fill<R: futures::AsyncRead + Unpin>(
        &self,
        from: &mut R,
        bytes: &mut [u8],
    ) -> Result<(), Gone> {
        match timeout(self.context.limits.silence, from.read_exact(bytes)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(Gone::Closed),
            Err(_) => Err(Gone::Silent),
        }
    }

    async fn write<W: futures::AsyncWrite + Unpin>(&self, mut to: W, mut waiting: Waiting) -> Gone {
        let mut batch = Vec::new();
        loop {
            let next = timeout(self.context.limits.keep_alive, waiting.frames.recv()).await;
            let mut frame = match next {
                Ok(Some(frame)) => Some(frame),
                Ok(None) => return Gone::Local,
                Err(_) => {
                    put(&mut batch, KEEP_ALIVE, &[]);
                    None
                }
            };
            let mut bye = false;
            while let Some(frame_now) = frame {
                match &frame_now {
                    Frame::Message(bytes) => put(&mut batch, MESSAGE, bytes),
                    Frame::Peers(bytes) => put(&mut batch, PEERS, bytes),
                    Frame::Bye => put(&mut batch, BYE, &[]),
                }
                // Room for the next batch is made when this one is under way, so at most one
                // batch is held on top of the queue's limit.
                waiting.written(&frame_now);
                bye = matches!(frame_now, Frame::Bye);
                frame = match bye || batch.len() >= BATCH {
                    true => None,
                    false => waiting.frames.try_recv().ok(),
                };
            }
            if to.write_all(&batch).await.is_err() || to.flush().await.is_err() {
                return Gone::Closed;
            }
            if bye {
                let _ = to.close().await;
                return Gone::Local;
            }
            batch.clear();
            batch.shrink_to(BATCH);
        }
    }
}

fn put(batch: &mut Vec<u8>, kind: u8, body: &[u8]) {
    // The queue admits no frame above MAX_FRAME, so its length fits.
    batch.extend_from_slice(&(body.len() as u32).to_le_bytes());
    batch.push(kind);
    batch.extend_from_slice(body);
}
