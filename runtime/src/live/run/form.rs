//! A generation begins: its group, what every rank brings, and what the rule makes of that.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use muster_protocol::codec;
use muster_protocol::live::{Effect, Event, Live, Report};

use super::Worker;
use crate::collective::{Aborter, Group, GroupConfig, Sharing};
use crate::live::hand::Hand;
use crate::live::outcome::{LiveError, Outcome, passes};
use crate::live::seat::Watch;
use crate::live::training::Training;

/// One generation, formed.
pub(in crate::live) struct Formed {
    pub(in crate::live) group: Group,
    pub(super) hand: Hand,
    pub(super) peers: Vec<SocketAddr>,
    pub(super) token: [u8; 32],
    pub(super) over: Arc<AtomicBool>,
    _watch: Watch,
}

impl Drop for Formed {
    fn drop(&mut self) {
        // A copy under way is for nothing.
        self.over.store(true, Ordering::Release);
    }
}

impl<T: Training> Worker<'_, T> {
    pub(super) fn regroup(&mut self) -> Result<Outcome, LiveError> {
        if !std::mem::take(&mut self.fresh) {
            match self.seat.next(self.patience.assignment) {
                Some(place) => (self.place, self.turn) = (place, 0),
                None => return Ok(Outcome::Waiting),
            }
        }
        let since = self.over_since.unwrap_or_else(Instant::now);
        if self.live.report().lineage != self.place.lineage {
            // Another job took this one in: what was trained here belongs to neither.
            self.live = Live::new(self.place.lineage);
            self.kept.clear();
        }
        match self.form() {
            Ok(survived) => {
                self.over_since = None;
                Ok(Outcome::Regrouped {
                    place: self.place,
                    committed: self.live.committed(),
                    survived,
                    took: since.elapsed(),
                })
            }
            Err(LiveError::Group(error)) if passes(&error) => Ok(self.ended_by(&error)),
            // The holder may be lost, or the generation over.
            Err(LiveError::Fetch(error)) => Ok(self.ended(error.to_string(), None)),
            Err(error) => Err(error),
        }
    }

    /// Forms the group, exchanges reports and carries out the verdict. Whether this rank survived.
    fn form(&mut self) -> Result<bool, LiveError> {
        let place = self.place;
        let number = self.number();
        let rank = place.rank;
        self.compared = None;
        self.live.handle(Event::Assigned { number, rank })?;
        let report = self.begin_exchange();
        // Two starts of one generation are two groups.
        let mut hasher = blake3::Hasher::new_derive_key("muster live group v1");
        hasher
            .update(&place.digest.0)
            .update(&place.term.0.to_le_bytes());
        let token = *hasher.finalize().as_bytes();
        let aborter = Aborter::new()?;
        let over = Arc::new(AtomicBool::new(false));
        let (ends, ended) = (aborter.clone(), over.clone());
        let watch = self.seat.watch(move || {
            ended.store(true, Ordering::Release);
            ends.abort();
        })?;
        let config = GroupConfig {
            rank,
            world: place.world,
            master: Some((place.master.ip().to_string(), place.master.port())),
            token,
            digest: token,
            sharing: Sharing::Auto,
            form_within: self.patience.form,
            op_within: self.patience.operation,
        };
        let mut group = Group::form_abortable(&config, &aborter)?;
        group.mark_waits(self.session.waits());
        let hand = Hand::open(towards(place.master), token)?;
        self.formed = Some(Formed {
            group,
            hand,
            peers: Vec::new(),
            token,
            over,
            _watch: watch,
        });
        self.exchange(report)?;
        let survived = self.copying.is_none();
        if let Some(formed) = &mut self.formed {
            self.training.regrouped(&mut formed.group, survived)?;
        }
        Ok(survived)
    }

    /// All ranks tell each other what they hold; what the rule makes of that is carried out.
    pub(in crate::live) fn exchange(&mut self, report: Report) -> Result<(), LiveError> {
        let (number, rank) = (self.number(), self.place.rank);
        let Some(formed) = &mut self.formed else {
            return Ok(());
        };
        formed.hand.withdraw_all();
        let hello = codec::encode_body(&(report, formed.hand.address()))
            .map_err(|_| LiveError::NoReport { rank })?;
        let mut reports = Vec::new();
        formed.peers.clear();
        for (rank, bytes) in (0..).zip(formed.group.all_gather_bytes(&hello)?) {
            let (report, address): (Report, SocketAddr) =
                codec::decode_body(&bytes).map_err(|_| LiveError::NoReport { rank })?;
            reports.push(report);
            formed.peers.push(address);
        }
        self.live.handle(Event::Reported { number, reports })?;
        self.carry_out()
    }

    /// The report that the core wants exchanged.
    pub(in crate::live) fn begin_exchange(&mut self) -> Report {
        let mut report = self.live.report();
        while let Some(effect) = self.live.poll_effect() {
            match effect {
                Effect::Exchange(said) => report = said,
                // Results that are not whole were never kept.
                Effect::Discard => self.next = None,
                _ => {}
            }
        }
        self.kept.retain(|step, _| report.holds == Some(*step));
        report
    }
}

/// The address of this host from which the master is reached; no packet is sent.
fn towards(master: SocketAddr) -> IpAddr {
    let any: IpAddr = match master {
        SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let local = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect(master)?;
        socket.local_addr()
    });
    local.map_or(any, |local| local.ip())
}
