//! Counts of what runs came through, so that it can be seen that seeds reach the interesting code.

use muster_protocol::agent::Notice;
use muster_protocol::local::ToLauncher;
use muster_protocol::record::{Cause, Kind};
use muster_protocol::wire::{JobMessage, Message};
use serde::{Deserialize, Serialize};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),+ $(,)?) => {
        #[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
        pub struct Coverage { $($(#[$doc])* pub $name: u64),+ }

        impl Coverage {
            pub fn add(&mut self, other: &Coverage) {
                $(self.$name += other.$name;)+
            }

            pub fn rows(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),+]
            }
        }
    };
}

counters!(
    events,
    messages,
    refused_events,
    failed_writes,
    spawns,
    /// Live workers that left a generation and stayed.
    parks,
    stop_steps,
    /// Nodes that saved for a checkpoint by order, and orders that came to what end.
    saves,
    hangs,
    verdicts,
    hung_restarts,
    /// Announcements of decided records, births included.
    decided,
    births,
    births_refused,
    births_abandoned,
    ended,
    failed,
    dormant,
    tombstones,
    merges,
    restarts,
    commits,
    commit_requests,
    prepares,
    /// Promises that named an accepted value.
    promises_with_value,
    rejected_ballots,
    accepts_at_zero,
    accepts_above_zero,
    refused_launchers,
    preempts,
    installs,
    troubles,
    nodes_lost,
    nodes_left,
    nodes_joined,
    links_lost,
    leases_lost,
    start_failures,
    /// Changes of the voters of a generation that goes on, as each agent learnt of them.
    voters_changed,
    /// Lineages that began by a person's word.
    continued,
    /// Answers of agents to sidecars, and workers that a sidecar ended.
    lease_answers,
    sidecar_kills,
    /// Copies that workers sealed, files and manifests that launchers wrote, what retention deleted, and launchers that
    /// got the slots of the one before.
    sealed,
    files,
    manifests,
    deletes,
    inherited,
    /// Files that were written though they were there.
    rewritten,
    /// Reads that did not find what was there.
    stale_reads,
);

impl Coverage {
    pub fn sent(&mut self, message: &Message) {
        let Message::Job { body, .. } = message else {
            return;
        };
        match body.as_ref() {
            JobMessage::BirthRefused { .. } => self.births_refused += 1,
            JobMessage::BirthAbandoned { .. } => self.births_abandoned += 1,
            JobMessage::Prepare { .. } => self.prepares += 1,
            JobMessage::Promise {
                accepted: Some(_), ..
            } => self.promises_with_value += 1,
            JobMessage::Rejected { .. } => self.rejected_ballots += 1,
            JobMessage::Accept { ballot, .. } if ballot.round == 0 => self.accepts_at_zero += 1,
            JobMessage::Accept { .. } => self.accepts_above_zero += 1,
            JobMessage::Commit { .. } => self.commit_requests += 1,
            _ => {}
        }
    }

    pub fn to_launcher(&mut self, frame: &ToLauncher) {
        match frame {
            ToLauncher::Refused { .. } => self.refused_launchers += 1,
            ToLauncher::Preempt { .. } => self.preempts += 1,
            ToLauncher::InstallStop { .. } => self.installs += 1,
            _ => {}
        }
    }

    pub fn notice(&mut self, notice: &Notice) {
        match notice {
            Notice::Decided { record, .. } => {
                self.decided += 1;
                match record.kind {
                    Kind::Next if record.number == 1 => self.births += 1,
                    Kind::Next | Kind::Voters { .. } => {}
                    Kind::End { .. } => self.ended += 1,
                    Kind::Failed { .. } => self.failed += 1,
                    Kind::Dormant => self.dormant += 1,
                    Kind::Tombstone { .. } => self.tombstones += 1,
                }
                match record.cause {
                    Cause::Merged { .. } => self.merges += 1,
                    Cause::WorkerFailed { .. } => self.restarts += 1,
                    Cause::WorkerHung { .. } => {
                        self.restarts += 1;
                        self.hung_restarts += 1;
                    }
                    Cause::NodesLost { .. } => self.nodes_lost += 1,
                    Cause::NodesLeft { .. } => self.nodes_left += 1,
                    Cause::NodesJoined { .. } => self.nodes_joined += 1,
                    Cause::LinksLost { .. } => self.links_lost += 1,
                    Cause::LeasesLost { .. } => self.leases_lost += 1,
                    Cause::StartFailed { .. } => self.start_failures += 1,
                    Cause::Continued { .. } => self.continued += 1,
                    Cause::Formed
                    | Cause::Damaged { .. }
                    | Cause::Misread { .. }
                    | Cause::Resumed { .. }
                    | Cause::Finished
                    | Cause::Cancelled => {}
                }
            }
            Notice::Voters { .. } => self.voters_changed += 1,
            Notice::Committed { .. } => self.commits += 1,
            Notice::Trouble { .. } => self.troubles += 1,
            _ => {}
        }
    }
}
