//! The voters and their messages, and how the agent's core uses acceptor and proposer.

mod check;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;

use muster_protocol::paxos::{Acceptor, Prepared, Proposer, newest};
use muster_protocol::record::{Arbiter, Cause, CommitRef, Kind, Member, Place, Record};
use muster_protocol::spec::JobSpec;
use muster_protocol::wire::Ballot;
use muster_protocol::{Boot, Digest, JobKey, LauncherId, NodeId, StateId};

pub use check::Broken;

/// Rules that may be left out, to see that the exploration finds what they prevent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rules {
    pub r5: bool,
    pub r7: bool,
    pub r8: bool,
}

impl Rules {
    pub const ALL: Rules = Rules {
        r5: true,
        r7: true,
        r8: true,
    };
}

/// How far the exploration goes.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub voters: u8,
    /// Generations that may be decided after the first.
    pub generations: u64,
    /// Rounds above 0, in all generations together.
    pub rounds: u32,
    pub crashes: u8,
    /// State directories lost.
    pub losses: u8,
    /// Commits, in all generations together.
    pub commits: u8,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Voter {
    boot: u64,
    head: Arc<Record>,
    learned: u64,
    acceptor: Acceptor,
    sent: Option<CommitRef>,
    /// Its state directory is gone, and it is a voter no more.
    lost: bool,
    // What a crash takes:
    proposer: Option<Proposer>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Message {
    Prepare {
        parent: u64,
        ballot: Ballot,
    },
    Promise {
        from: u8,
        parent: u64,
        ballot: Ballot,
        accepted: Option<(Ballot, Value)>,
        acked: Option<Ack>,
    },
    Accept {
        parent: u64,
        ballot: Ballot,
        value: Value,
    },
    Accepted {
        from: u8,
        parent: u64,
        ballot: Ballot,
    },
    Commit {
        parent: u64,
        ack: Ack,
    },
    Acked {
        from: u8,
        parent: u64,
        ack: Ack,
    },
    Decided {
        value: Value,
    },
}

/// A record by what the model lets differ in it, so that messages stay small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Value {
    number: u64,
    leader: u8,
    nonce: u64,
    restore: Option<Ack>,
    parent_nonce: u64,
}

/// A commit by what the model lets differ in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Ack {
    number: u64,
    by: u64,
}

/// The whole system at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    voters: Vec<Voter>,
    messages: BTreeSet<Message>,
    crashes: u8,
    losses: u8,
    rounds: u32,
    commits: u8,
    /// The step that led here made a proposer adopt a value.
    pub adopted: bool,
}

/// One step of the system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Move {
    /// The leader's ballot 0.
    Zero(u8),
    /// A round above 0.
    Round(u8),
    Commit(u8),
    Crash(u8),
    Lose(u8),
    Deliver(u8, Box<Step>),
}

/// A message, kept private to the model.
#[derive(Clone, PartialEq, Eq)]
pub struct Step(Message);

impl std::fmt::Debug for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

#[derive(Debug)]
pub struct Model {
    pub limits: Limits,
    pub rules: Rules,
}

impl Model {
    pub fn new(limits: Limits, rules: Rules) -> Model {
        Model { limits, rules }
    }

    fn record(&self, value: Value) -> Arc<Record> {
        let n = self.limits.voters;
        // Whoever decided it leads it; the others follow in their order.
        let order = (0..n).map(|i| (value.leader + i) % n);
        Arc::new(Record {
            key: JobKey {
                cluster: "c".into(),
                owner: "o".into(),
                id: "j".into(),
            },
            birth: if value.number == 1 {
                Digest::ZERO
            } else {
                Digest([1; 32])
            },
            number: value.number,
            parent: match value.number {
                1 => Digest::ZERO,
                _ => name(value.number - 1, value.parent_nonce),
            },
            kind: Kind::Next,
            members: order.map(member).collect(),
            witnesses: Vec::new(),
            arbiter: Arbiter::Members,
            spec: JobSpec::default(),
            restarts_used: 0,
            cause: Cause::Formed,
            restore: value.restore.map(|a| commit(value.number - 1, a)),
            nonce: value.nonce,
        })
    }

    pub fn start(&self) -> State {
        let born = self.record(Value {
            number: 1,
            leader: 0,
            nonce: 0,
            restore: None,
            parent_nonce: 0,
        });
        let voter = Voter {
            boot: 1,
            head: born,
            learned: 1,
            acceptor: Acceptor::default(),
            sent: None,
            lost: false,
            proposer: None,
        };
        State {
            voters: vec![voter; usize::from(self.limits.voters)],
            messages: BTreeSet::new(),
            crashes: 0,
            losses: 0,
            rounds: 0,
            commits: 0,
            adopted: false,
        }
    }

    pub fn moves(&self, state: &State) -> Vec<Move> {
        let mut moves = Vec::new();
        for (i, v) in state.voters.iter().enumerate() {
            let me = i as u8;
            let deliveries = state.messages.iter().filter(|m| self.is_for(m, me, v));
            moves.extend(deliveries.map(|m| Move::Deliver(me, Box::new(Step(m.clone())))));
            if v.lost || v.head.number > self.limits.generations {
                continue;
            }
            let leads = v.head.leader() == Some(node(me));
            if self.may_open(v, leads) {
                moves.push(Move::Zero(me));
            }
            if state.rounds < self.limits.rounds {
                moves.push(Move::Round(me));
            }
            if leads
                && state.commits < self.limits.commits
                && v.proposer.is_none()
                && v.acceptor.accepted.is_none()
            {
                moves.push(Move::Commit(me));
            }
            if state.crashes < self.limits.crashes {
                moves.push(Move::Crash(me));
            }
            if state.losses < self.limits.losses {
                moves.push(Move::Lose(me));
            }
        }
        moves
    }

    /// R7: whether this voter may use ballot 0.
    fn may_open(&self, v: &Voter, leads: bool) -> bool {
        let fresh = v.learned == v.boot
            && v.acceptor.accepted.is_none()
            && v.acceptor.promised == Ballot::default();
        leads
            && v.proposer.is_none()
            && (fresh || (!self.rules.r7 && v.acceptor.promised.round == 0))
    }

    fn is_for(&self, message: &Message, me: u8, v: &Voter) -> bool {
        let at = v.head.number;
        match message {
            Message::Prepare { parent, .. }
            | Message::Accept { parent, .. }
            | Message::Commit { parent, .. } => !v.lost && *parent == at,
            Message::Promise { parent, ballot, .. } | Message::Accepted { parent, ballot, .. } => {
                *parent == at
                    && ballot.node == node(me)
                    && v.proposer.as_ref().is_some_and(|p| p.ballot == *ballot)
            }
            Message::Decided { value } => !v.lost && value.number > at,
            Message::Acked { .. } => false,
        }
    }

    /// The state after a move; `None` when nothing changes.
    pub fn take(&self, state: &State, chosen: &Move) -> Option<State> {
        let mut next = state.clone();
        next.adopted = false;
        match chosen {
            Move::Zero(me) => self.zero(&mut next, *me),
            Move::Round(me) => self.round(&mut next, *me),
            Move::Commit(me) => self.commit(&mut next, *me),
            Move::Crash(me) => {
                next.crashes += 1;
                let v = &mut next.voters[usize::from(*me)];
                v.boot += 1;
                v.proposer = None;
            }
            Move::Lose(me) => {
                next.losses += 1;
                let v = &mut next.voters[usize::from(*me)];
                v.boot = 1;
                v.proposer = None;
                v.acceptor = Acceptor::default();
                v.sent = None;
                v.learned = 0;
                // R5: lost state is a lost vote.
                v.lost = self.rules.r5;
            }
            Move::Deliver(me, step) => self.deliver(&mut next, *me, &step.0),
        }
        if next == *state {
            return None;
        }
        self.tidy(&mut next);
        Some(next)
    }

    /// Forgets what can have no effect any more, so that states that differ in nothing else are one:
    /// promises whose proposer has gone on, and everything about generations that all voters have
    /// left behind (nobody can vote there any more, so what was checked there stays true).
    fn tidy(&self, state: &mut State) {
        let voters = &state.voters;
        let waits = |ballot: &Ballot| {
            let at = voters.iter().find(|v| {
                v.proposer
                    .as_ref()
                    .is_some_and(|p| p.ballot == *ballot && p.value().is_none())
            });
            at.is_some()
        };
        let oldest = voters
            .iter()
            .filter(|v| !v.lost)
            .map(|v| v.head.number)
            .min();
        let oldest = oldest.unwrap_or(1);
        state.messages.retain(|m| match m {
            Message::Promise { parent, ballot, .. } => *parent >= oldest && waits(ballot),
            Message::Prepare { parent, .. }
            | Message::Accept { parent, .. }
            | Message::Accepted { parent, .. }
            | Message::Commit { parent, .. }
            | Message::Acked { parent, .. } => *parent >= oldest,
            Message::Decided { value } => value.number > oldest,
        });
        if state.messages.is_empty() && state.voters.iter().all(|v| v.learned == v.boot) {
            // A clean start: how often each was started before does not matter.
            for v in &mut state.voters {
                (v.boot, v.learned) = (1, 1);
            }
        }
    }

    fn zero(&self, state: &mut State, me: u8) {
        let v = &mut state.voters[usize::from(me)];
        let ballot = Ballot {
            round: 0,
            node: node(me),
            boot: Boot(v.boot),
        };
        let sent = if self.rules.r8 { v.sent } else { None };
        let value = self.next_value(v, me, ballot, newest(v.head.restore, sent));
        v.proposer = Some(Proposer::at_zero(
            node(me),
            Boot(v.boot),
            self.record(value),
        ));
        self.say_accept(state, me, ballot, value);
    }

    fn round(&self, state: &mut State, me: u8) {
        let v = &mut state.voters[usize::from(me)];
        let (number, accepted) = (v.head.number, &v.acceptor.accepted);
        let seen = v
            .acceptor
            .promised
            .round
            .max(accepted.as_ref().map_or(0, |a| a.0.round));
        let own = v.proposer.as_ref().map_or(0, |p| p.ballot.round);
        let ballot = Ballot {
            round: seen.max(own) + 1,
            node: node(me),
            boot: Boot(v.boot),
        };
        v.proposer = Some(Proposer::prepare(ballot));
        state.rounds += 1;
        state.messages.insert(Message::Prepare {
            parent: number,
            ballot,
        });
    }

    fn commit(&self, state: &mut State, me: u8) {
        let v = &mut state.voters[usize::from(me)];
        let number = v.head.number;
        let before = newest(v.head.restore, v.sent).map_or(0, |c| c.number);
        let ack = Ack {
            number: before + 1,
            by: v.head.nonce,
        };
        v.sent = Some(commit(number, ack));
        state.commits += 1;
        state.messages.insert(Message::Commit {
            parent: number,
            ack,
        });
    }

    /// The proposer's own acceptance is durable before anybody hears of the value (R7).
    fn say_accept(&self, state: &mut State, me: u8, ballot: Ballot, value: Value) {
        let parent = value.number - 1;
        let record = self.record(value);
        let v = &mut state.voters[usize::from(me)];
        if v.acceptor.accept(ballot, &record).is_ok() {
            state.messages.insert(Message::Accepted {
                from: me,
                parent,
                ballot,
            });
        }
        state.messages.insert(Message::Accept {
            parent,
            ballot,
            value,
        });
    }

    fn next_value(&self, v: &Voter, me: u8, ballot: Ballot, restore: Option<CommitRef>) -> Value {
        Value {
            number: v.head.number + 1,
            leader: me,
            nonce: u64::from(ballot.round) * 100 + u64::from(me) * 10 + ballot.boot.0,
            restore: restore.map(ack_of),
            parent_nonce: v.head.nonce,
        }
    }

    fn deliver(&self, state: &mut State, me: u8, message: &Message) {
        let v = &mut state.voters[usize::from(me)];
        let mut say = Vec::new();
        match message {
            Message::Prepare { parent, ballot } => {
                if v.acceptor.prepare(*ballot).is_ok() {
                    say.push(Message::Promise {
                        from: me,
                        parent: *parent,
                        ballot: *ballot,
                        accepted: v.acceptor.accepted.as_ref().map(|(b, r)| (*b, value_of(r))),
                        acked: v.acceptor.acked.map(ack_of),
                    });
                }
            }
            Message::Promise {
                from,
                ballot,
                accepted,
                acked,
                ..
            } => {
                let accepted = accepted.map(|(b, value)| (b, self.record(value)));
                let acked = acked.map(|a| commit(v.head.number, a));
                let head = v.head.clone();
                let Some(proposer) = &mut v.proposer else {
                    return;
                };
                let prepared = proposer.on_promise(&head, node(*from), *ballot, accepted, acked);
                let value = match prepared {
                    None => return,
                    Some(Prepared::Adopt(record)) => {
                        state.adopted = true;
                        value_of(&record)
                    }
                    Some(Prepared::Free { acked }) => {
                        let acked = if self.rules.r8 { acked } else { None };
                        self.next_value(v, me, *ballot, newest(head.restore, acked))
                    }
                };
                if let Some(proposer) = &mut v.proposer {
                    proposer.propose(self.record(value));
                }
                return self.say_accept(state, me, *ballot, value);
            }
            Message::Accept {
                parent,
                ballot,
                value,
            } => {
                if v.acceptor.accept(*ballot, &self.record(*value)).is_ok() {
                    say.push(Message::Accepted {
                        from: me,
                        parent: *parent,
                        ballot: *ballot,
                    });
                }
            }
            Message::Accepted { from, ballot, .. } => {
                let head = v.head.clone();
                let Some(proposer) = &mut v.proposer else {
                    return;
                };
                if let Some(record) = proposer.on_accepted(&head, node(*from), *ballot) {
                    say.push(Message::Decided {
                        value: value_of(&record),
                    });
                }
            }
            Message::Commit { parent, ack } => {
                if v.acceptor.ack(commit(*parent, *ack), !self.rules.r8) {
                    say.push(Message::Acked {
                        from: me,
                        parent: *parent,
                        ack: *ack,
                    });
                }
            }
            Message::Decided { value } => {
                v.head = self.record(*value);
                v.learned = v.boot;
                v.acceptor = Acceptor::default();
                v.sent = None;
                v.proposer = None;
            }
            Message::Acked { .. } => {}
        }
        state.messages.extend(say);
    }

    fn is_majority(&self, from: &BTreeSet<u8>, leader: u8) -> bool {
        let value = Value {
            number: 1,
            leader,
            nonce: 0,
            restore: None,
            parent_nonce: 0,
        };
        let record = self.record(value);
        record.is_majority(|n| from.iter().any(|f| node(*f) == n))
    }
}

fn node(i: u8) -> NodeId {
    NodeId([i + 1; 32])
}

fn member(i: u8) -> Member {
    Member {
        node: node(i),
        state: StateId([i + 1; 8]),
        launcher: LauncherId([i + 1; 8]),
        slots: 1,
        guard: SocketAddr::from(([127, 0, 0, 1], 1000)),
        place: Place::default(),
    }
}

/// The model's own names for records: what tells two of them apart here.
fn name(number: u64, nonce: u64) -> Digest {
    let mut bytes = [7; 32];
    bytes[..8].copy_from_slice(&number.to_be_bytes());
    bytes[8..16].copy_from_slice(&nonce.to_be_bytes());
    Digest(bytes)
}

fn commit(number: u64, ack: Ack) -> CommitRef {
    CommitRef {
        generation: name(number, ack.by),
        number: ack.number,
        step: 0,
        manifest: Digest::ZERO,
    }
}

fn ack_of(commit: CommitRef) -> Ack {
    let mut by = [0; 8];
    by.copy_from_slice(&commit.generation.0[8..16]);
    Ack {
        number: commit.number,
        by: u64::from_be_bytes(by),
    }
}

fn value_of(record: &Record) -> Value {
    let leader = record.leader().map_or(0, |n| n.0[0] - 1);
    let mut parent = [0; 8];
    parent.copy_from_slice(&record.parent.0[8..16]);
    Value {
        number: record.number,
        leader,
        nonce: record.nonce,
        restore: record.restore.map(ack_of),
        parent_nonce: if record.number == 1 {
            0
        } else {
            u64::from_be_bytes(parent)
        },
    }
}
