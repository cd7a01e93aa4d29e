//! Live workers: they leave a generation without leaving their process, and wait for the next.

use muster_protocol::Time;
use muster_protocol::local::{ToAgent, WorkerExit};

use super::{ALONE, GAVE_UP, LEFTOVER_GRACE, Session};

impl Session {
    /// All that runs has parked: the generation is over here.
    pub(super) fn parked(&mut self, now: Time) {
        let Some(current) = &mut self.current else {
            return;
        };
        let Some(stopping) = current.stopping.take() else {
            return;
        };
        current.parked = true;
        current.alone_since = None;
        let digest = stopping.told.unwrap_or(current.start.digest);
        self.fact(ToAgent::Stopped { digest });
        if self.ending.is_some() {
            // Said while they parked: nobody needs them any more.
            let grace = self.register.spec.loss_grace();
            self.begin_stop(libc::SIGTERM, grace, None, now);
        } else {
            self.try_spawn();
        }
    }

    /// They parked by themselves.
    pub(super) fn parked_alone(&mut self, acknowledged: bool, at_ms: u64, now: Time) {
        let Some(current) = self.current.as_mut().filter(|c| c.trains()) else {
            return;
        };
        if acknowledged {
            current.acknowledged = true;
            self.begin_stop(libc::SIGTERM, LEFTOVER_GRACE, None, now);
        } else {
            current.alone_since.get_or_insert((now, at_ms));
        }
    }

    /// Nobody told this launcher to stop, so no node and no worker is known to be lost; yet its
    /// workers lost each other. Said as a failure of theirs, it ends the generation for all.
    pub(super) fn gave_up(&mut self, now: Time) {
        let Some(current) = self.current.as_mut().filter(|c| c.trains()) else {
            return;
        };
        let since = current.alone_since.take_if(|(at, _)| now >= *at + ALONE);
        let Some((_, at_ms)) = since else {
            return;
        };
        let digest = current.start.digest;
        let exit = WorkerExit {
            rank: current.start.first_rank,
            local_rank: 0,
            pid: 0,
            code: GAVE_UP,
            signal: None,
            hung: false,
            at_ms,
            tail: "the workers of this node lost a peer, though no node and no process was lost: look for what cuts connections between workers (a firewall, a proxy, a full conntrack table)".to_owned(),
        };
        current.failed.push(exit.clone());
        self.failures.push(exit.clone());
        self.fact(ToAgent::Exited { digest, exit });
    }
}
