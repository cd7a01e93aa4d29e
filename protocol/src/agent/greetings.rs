//! Agents' statements about themselves: to each peer when it connects, and again when something in it changes.

use super::{Agent, HELLO_WAIT};
use crate::agent::{Effect, Notice, TIMED_OUT};
use crate::ids::{NodeId, StateId};
use crate::job::Job;
use crate::membership;
use crate::peers::Peer;
use crate::time::{Span, Time};
use crate::wire::{Hello, MAX_JOBS, Message, Timeouts};

/// For so long after a write was refused, the next ones are thought to be. One is tried each second.
const UNSTORED: Span = Span::from_millis(2_500);

fn wants_hello(peer: &Peer) -> bool {
    let unstored = peer.hello.as_ref().is_some_and(|h| h.unstored.is_some());
    peer.connected && (peer.greeted.is_none() || unstored)
}

impl Agent {
    pub(super) fn on_hello(&mut self, from: NodeId, hello: Hello, now: Time) {
        let adverts = hello.jobs.clone();
        self.compare_timeouts(from, hello.timeouts);
        self.detector.allow_for(hello.timeouts.suspect_after);
        let peer = self.peers.map.entry(from).or_default();
        let came = peer.greeted.is_none();
        let news = came || peer.hello.as_ref() != Some(&hello);
        let before = peer.hello.as_ref().and_then(|h| h.unstored);
        if before != hello.unstored {
            let (node, errno) = (from, hello.unstored);
            let notice = Notice::Unstored { node, errno };
            self.effects.push_back(Effect::Notice(notice));
        }
        let doubted = hello.unstored.is_some();
        let is = |h: &Hello| (h.state, h.boot);
        // No agent changes these: one of the two is of an earlier run, and came late.
        let disputed = !came && peer.hello.as_ref().map(is) != Some(is(&hello));
        peer.hello = Some(hello);
        peer.greeted = (!disputed).then_some(now);
        if doubted {
            peer.hello_due = now + UNSTORED;
            let at = self.greet_at.unwrap_or(peer.hello_due);
            self.greet_at = Some(at.min(peer.hello_due));
        }
        // Only one that is watched can be lost: while a thousand agents meet, none is.
        if came && !self.watching.is_empty() {
            for node in self.peers.before(from) {
                self.detect(membership::Event::Succeeded { node }, now);
            }
        }
        let known = self.jobs.keys().filter(|_| news);
        for key in known.cloned().collect::<Vec<_>>() {
            self.with_job(&key, now, |job, ctx| {
                if came {
                    job.greeted_by(from);
                }
                job.on_hello(ctx, from, came);
            });
        }
        for advert in adverts {
            self.on_advert(from, &advert, now);
        }
        if disputed && let Some(peer) = self.peers.map.get_mut(&from) {
            peer.hello_due = now;
            self.ask_hello(from, now);
        }
        if news {
            self.nudge_all(now);
        }
    }

    /// Nodes of one cluster are meant to keep the same times. Where they do not, each start waits for the
    /// longest, and people are told on both sides.
    fn compare_timeouts(&mut self, node: NodeId, theirs: Timeouts) {
        let mine = self.cfg.timeouts();
        let known = self.peers.get(node).and_then(|p| p.hello.as_ref());
        if theirs != mine && known.is_none_or(|h| h.timeouts != theirs) {
            let notice = Notice::OtherTimes { node, theirs, mine };
            self.effects.push_back(Effect::Notice(notice));
        }
    }

    /// A peer asks to be let in, or does a member's part, with another state directory than it said hello with:
    /// a hello of an earlier run came late, and would have the node counted as lost.
    pub(super) fn doubt_hello(&mut self, node: NodeId, state: StateId, now: Time) {
        let said = self.peers.get(node).and_then(Peer::state_dir);
        if said.is_some_and(|s| s != state)
            && let Some(peer) = self.peers.map.get_mut(&node)
        {
            peer.greeted = None;
            self.ask_hello(node, now);
        }
    }

    /// Peers that are connected and have not said hello are asked to, those too that say nothing: each
    /// may belong to a group of a job that only this one can bring together with its own. Those whose disk refused
    /// writes are asked again: nobody counts on them until they say that it takes them, and that may be lost.
    pub(super) fn ask_hellos(&mut self, now: Time) {
        if self.greet_at.is_none_or(|at| now < at) {
            return;
        }
        let silent = self.peers.map.iter();
        let silent = silent.filter(|(_, p)| wants_hello(p));
        let silent: Vec<NodeId> = silent.map(|(n, _)| *n).collect();
        for node in silent {
            self.ask_hello(node, now);
        }
        let due = self.peers.map.values().filter(|p| wants_hello(p));
        self.greet_at = due.map(|p| p.hello_due.max(now + HELLO_WAIT)).min();
    }

    /// A peer that talks without having said hello over this connection is asked to: what it said
    /// over an earlier one may be about another state directory.
    pub(super) fn ask_hello(&mut self, node: NodeId, now: Time) {
        let Some(peer) = self.peers.map.get_mut(&node) else {
            return;
        };
        if wants_hello(peer) && now >= peer.hello_due {
            let wait = if peer.greeted.is_some() {
                UNSTORED
            } else {
                HELLO_WAIT
            };
            peer.hello_due = now + wait;
            self.send(node, Message::HelloAsk);
        }
    }

    /// The state directory refused a write, which will be tried again. Others learn it: they may wait for this voter.
    pub(super) fn is_unstored(&mut self, errno: i32, now: Time) {
        let before = self.unstored.replace((errno, now + UNSTORED));
        if before.is_none_or(|(known, _)| known != errno) {
            self.tell_of_writes();
        }
    }

    /// When the write that has been under way for the longest time takes so long that it counts as refused, and
    /// for how long that was known already.
    pub(super) fn slow_write_at(&self) -> Option<Time> {
        let since = self.jobs.values().filter_map(Job::writes_since).min()?;
        let slow = since + self.cfg.suspect_after;
        Some(self.unstored.map_or(slow, |(_, until)| slow.max(until)))
    }

    /// Others learn that the disk takes too long for a write, or takes writes again.
    pub(super) fn look_at_writes(&mut self, now: Time) {
        if self.slow_write_at().is_some_and(|at| now >= at) {
            self.is_unstored(TIMED_OUT, now);
        }
        if self.unstored.take_if(|(_, until)| now >= *until).is_some() {
            self.tell_of_writes();
        }
    }

    fn tell_of_writes(&mut self) {
        let (node, errno) = (self.cfg.node, self.unstored());
        let notice = Notice::Unstored { node, errno };
        self.effects.push_back(Effect::Notice(notice));
        self.greet_all(|j| j.is_live() || j.gathers());
    }

    /// Says hello to all.
    pub(super) fn greet_all(&mut self, of: impl Fn(&Job) -> bool) {
        let all: Vec<NodeId> = self.peers.connected_nodes().collect();
        self.greet(all, of);
    }

    /// Says hello to these, with a word on such jobs.
    pub(super) fn greet(
        &mut self,
        to: impl IntoIterator<Item = NodeId>,
        of: impl Fn(&Job) -> bool,
    ) {
        let hello = self.hello(of);
        let to: Vec<NodeId> = to.into_iter().collect();
        for advert in hello.jobs.iter().filter(|a| a.belongs) {
            let told = self.told_to_belong.entry(advert.key.clone());
            told.or_default().extend(&to);
        }
        for node in to {
            self.send(node, Message::Hello(hello.clone()));
        }
    }

    /// This agent's statement about itself, and about those jobs.
    fn hello(&self, of: impl Fn(&Job) -> bool) -> Hello {
        Hello {
            host: self.cfg.host.clone(),
            version: self.cfg.version.clone(),
            state: self.cfg.state,
            home: self.cfg.home,
            boot: self.cfg.boot,
            timeouts: self.cfg.timeouts(),
            unstored: self.unstored(),
            embedded: self.cfg.embedded,
            jobs: {
                // Those that somebody here takes part in come first: they must not be left out.
                let mut adverts: Vec<&Job> = self.jobs.values().filter(|j| of(j)).collect();
                adverts.sort_by_key(|j| (j.is_unattended(), j.is_idle()));
                let adverts = adverts.into_iter();
                let adverts = adverts.flat_map(|j| j.adverts_here(&self.cfg, self.view(j.key())));
                adverts.take(MAX_JOBS).collect()
            },
        }
    }
}
