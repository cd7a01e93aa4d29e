//! One connection per peer, and what connected peers tell each other about the others.

use std::{net::SocketAddr, time::Instant};

use libp2p::swarm::ConnectionId;
use muster_protocol::{NodeId, codec};
use rand::seq::IteratorRandom;
use tokio::sync::oneshot;

use super::{Hub, Peer};
use crate::net::{
    Gone, book,
    handshake::{self, Code, MAX_LOST, Tag},
    link::{FromLink, Kept, MAX_PEERS, Whereabouts},
    queue::{self, Frame},
};

/// Peers whose lost connections are remembered.
const MAX_LOST_PEERS: usize = 2_048;

impl Hub {
    pub(super) fn on_link(&mut self, event: FromLink) {
        match event {
            FromLink::Proven {
                connection,
                instance,
                lost,
                port,
                tag,
                decided,
                verdict,
            } => {
                let Some(conn) = self.conns.get(&connection) else {
                    return;
                };
                let answer = match self.peers.get(&conn.node) {
                    // Deciding end: an established connection stays, unless the other end says
                    // that it is gone there, or it belongs to an earlier life.
                    Some(p)
                        if !decided
                            && p.instance == instance
                            && !lost.contains(&p.tag)
                            && self.is_up(p) =>
                    {
                        Err(Code::Duplicate)
                    }
                    None if self.is_full() && !self.makes_room(conn.node) => Err(Code::Full),
                    _ if self.closing.is_some() => Err(Code::Full),
                    _ => Ok(self.keep(connection, instance, port, tag)),
                };
                let answer = answer.and_then(|kept| kept.ok_or(Code::Full));
                // A link that timed out meanwhile reports its end.
                let _ = verdict.send(answer);
            }
            FromLink::Refused { connection, why } => {
                let Some(conn) = self.conns.get(&connection) else {
                    return;
                };
                let (addr, outbound) =
                    (conn.dialled.unwrap_or(conn.remote), conn.dialled.is_some());
                if outbound {
                    self.book.refused(addr, Instant::now());
                }
                self.report(addr, outbound, why);
            }
            FromLink::Peers { connection, peers } => self.on_peers(connection, &peers),
            FromLink::Ended { connection, lost } => self.on_ended(connection, lost),
        }
    }

    fn is_full(&self) -> bool {
        self.peers.len() >= self.config.limits.peers as usize
    }

    /// Has a peer go that is less wanted than this one, if there is any: the one that came last.
    fn makes_room(&self, node: NodeId) -> bool {
        if !self.preferred.contains(&node) {
            return false;
        }
        let others = self.peers.iter();
        let others = others.filter(|(n, p)| !self.preferred.contains(*n) && self.is_up(p));
        let conns = others.filter_map(|(_, p)| self.conns.get(&p.connection));
        conns.max_by_key(|c| c.since).is_some_and(|c| {
            c.end.send_replace(Some(Gone::Crowded));
            true
        })
    }

    /// Whether a peer's connection is not already known to be over.
    pub(super) fn is_up(&self, peer: &Peer) -> bool {
        self.conns
            .get(&peer.connection)
            .is_some_and(|c| !c.swarm_closed && c.end.borrow().is_none())
    }

    /// Makes the connection the one with its peer.
    fn keep(&mut self, id: ConnectionId, instance: u64, port: u16, tag: Tag) -> Option<Kept> {
        let conn = self.conns.get(&id)?;
        let node = conn.node;
        let listens = match (conn.dialled, port) {
            (Some(addr), _) => Some(addr),
            (None, 0) => None,
            (None, port) => Some(SocketAddr::new(conn.remote.ip(), port)),
        };
        let over_loopback = conn.remote.ip().is_loopback();
        let addr = listens.unwrap_or(conn.remote);
        let (queue, waiting) = queue::queue(self.config.limits.queue_bytes, conn.end.clone());
        let (done, after_us) = oneshot::channel();
        let peer = Peer {
            connection: id,
            tag,
            instance,
            queue: queue.clone(),
            listens,
            over_loopback,
            done: after_us,
        };
        let replaced = self.peers.insert(node, peer);
        if let Some(old) = replaced
            .as_ref()
            .and_then(|p| self.conns.get(&p.connection))
        {
            old.end.send_replace(Some(Gone::Replaced));
        }
        let now = Instant::now();
        if let Some(addr) = listens {
            self.book.add(addr, Some(node), Some(book::FORGET), now);
            self.book.connected(addr, node);
        }
        self.lost.remove(&node);
        self.swarm.behaviour_mut().substream.proven(id);
        self.tell_peers(node);
        Some(Kept {
            queue,
            waiting,
            after: replaced.map(|p| p.done),
            done,
            addr,
        })
    }

    fn on_ended(&mut self, id: ConnectionId, lost: Option<Tag>) {
        let Some(conn) = self.conns.get_mut(&id) else {
            return;
        };
        conn.link_ended = true;
        let now = Instant::now();
        let (node, dialled, lived) = (conn.node, conn.dialled, now - conn.since);
        if let Some(tag) = lost.filter(|_| !handshake::decides(self.node, node)) {
            let tags = self.lost.entry(node).or_default();
            tags.push(tag);
            if tags.len() > MAX_LOST {
                tags.remove(0);
            }
            if self.lost.len() > MAX_LOST_PEERS {
                self.lost.pop_first();
            }
        }
        if self.peers.get(&node).is_some_and(|p| p.connection == id) {
            self.peers.remove(&node);
            self.book.lost(node, lived, now);
        } else if let Some(addr) = dialled {
            self.book.ended(addr, now);
        }
        self.swarm.close_connection(id);
        self.forget_finished(id);
    }

    pub(super) fn forget_finished(&mut self, id: ConnectionId) {
        if self
            .conns
            .get(&id)
            .is_some_and(|c| c.link_ended && c.swarm_closed)
        {
            self.conns.remove(&id);
        }
    }

    /// Tells a peer which others there are.
    pub(super) fn tell_peers(&mut self, node: NodeId) {
        let Some(peer) = self.peers.get(&node) else {
            return;
        };
        let others = self.peers.iter().filter(|(other, _)| **other != node);
        let others = others.filter_map(|(other, p)| Some((*other, p.listens?)));
        // What is dialled over loopback is of no use elsewhere.
        let useful = others.filter(|(_, a)| book::dialable(a, peer.over_loopback));
        let some: Vec<Whereabouts> = useful.choose_multiple(&mut rand::rng(), MAX_PEERS);
        if some.is_empty() {
            return;
        }
        match codec::encode_body(&some) {
            // A full queue ends the connection and says so.
            Ok(bytes) => drop(peer.queue.push(Frame::Peers(bytes))),
            Err(error) => tracing::error!(%error, "cannot encode peers' addresses"),
        }
    }

    fn on_peers(&mut self, connection: ConnectionId, peers: &[Whereabouts]) {
        let Some(conn) = self.conns.get(&connection) else {
            return;
        };
        let from_here = conn.remote.ip().is_loopback();
        let now = Instant::now();
        let own = self.shared.listening();
        for (node, addr) in peers {
            let ours = *node == self.node || own.contains(addr);
            if !ours && !self.peers.contains_key(node) && book::dialable(addr, from_here) {
                self.book.add(*addr, Some(*node), Some(book::FORGET), now);
            }
        }
    }
}
