//! Limits on a message: sizes and keys.

use super::{
    Action, CheckpointStage, JobMessage, MAX_JOBS, MAX_LIST, MAX_RANKS, MAX_SAVED, MAX_TEXT,
    Message, Unable, Wait, WireError,
};
use crate::checkpoint;
use crate::hang::MAX_STANDINGS;
use crate::ids::JobKey;
use crate::record::{Kind, Record, RecordError};

impl Message {
    pub(super) fn check(&self) -> Result<(), WireError> {
        match self {
            Message::Hello(hello) => {
                limit("jobs", hello.jobs.len(), MAX_JOBS)?;
                limit("host", hello.host.len(), 256)?;
                limit("version", hello.version.len(), 64)?;
                hello.jobs.iter().try_for_each(|a| key(&a.key))
            }
            Message::Ping { leases: list, .. } | Message::Pong { granted: list, .. } => {
                limit("leases", list.len(), MAX_JOBS)
            }
            Message::Leaving { reason, .. } | Message::DrainAsk { reason, .. } => {
                limit("reason", reason.len(), MAX_TEXT)
            }
            Message::Job { key: k, body } => {
                key(k)?;
                body.check(k)
            }
            Message::HelloAsk => Ok(()),
        }
    }
}

impl JobMessage {
    fn check(&self, k: &JobKey) -> Result<(), WireError> {
        let record = |r: &Record| {
            r.check()?;
            if r.key == *k {
                Ok(())
            } else {
                Err(WireError::Key)
            }
        };
        let generation = |r: &Record| match r.kind {
            Kind::Voters { .. } => Err(WireError::Record(RecordError::Voters)),
            _ => record(r),
        };
        match self {
            JobMessage::Birth { record: r }
            | JobMessage::ClaimBirth { record: r }
            | JobMessage::Decided { record: r }
            | JobMessage::Follows { record: r, .. } => generation(r),
            JobMessage::Accept { record: r, .. } => record(r),
            JobMessage::Voters {
                generation: of,
                record: r,
            } => {
                generation(of)?;
                record(r)
            }
            JobMessage::Promise { accepted, .. } => {
                accepted.as_ref().map_or(Ok(()), |(_, r)| record(r))
            }
            JobMessage::Accepted { grants, .. } => limit("grants", grants.len(), MAX_LIST),
            JobMessage::Ticket(t) => {
                limit("host", t.host.len(), 256)?;
                limit("command", t.command.len(), 256)?;
                limit("unreachable", t.unreachable.len(), MAX_LIST)?;
                t.spec
                    .check()
                    .map_err(|e| WireError::Record(RecordError::Spec(e)))
            }
            JobMessage::TicketAck { wait, .. } => match wait {
                Wait::Forming { who: list, .. }
                | Wait::NoQuorum { missing: list }
                | Wait::Unstored { nodes: list }
                | Wait::Finishing { nodes: list } => limit("nodes", list.len(), MAX_LIST),
                Wait::Elsewhere { advert } => key(&advert.key),
                Wait::Batching { .. }
                | Wait::Spare { .. }
                | Wait::Parked { .. }
                | Wait::Changing
                | Wait::OtherSpec
                | Wait::Orphan { .. }
                | Wait::Held { .. } => Ok(()),
            },
            JobMessage::TicketRefused { why, .. } => limit("text", why.len(), MAX_TEXT),
            JobMessage::Status(s) => {
                limit("unreachable", s.unreachable.len(), MAX_LIST)?;
                let saved = s.saved.as_ref().map_or(0, |s| s.ranks.len());
                limit("ranks", saved, MAX_RANKS)?;
                let failed = s.saved.as_ref().and_then(|s| s.failed.as_ref());
                limit("reason", failed.map_or(0, String::len), MAX_TEXT)?;
                let damaged = s.exit.as_ref().and_then(|e| e.damaged.as_ref());
                limit("reason", damaged.map_or(0, |d| d.why.len()), MAX_TEXT)?;
                let tail = s.exit.as_ref().map_or(0, |e| e.tail.len());
                limit("output", tail, MAX_TEXT)
            }
            JobMessage::Checkpoint { state, .. } => {
                if let CheckpointStage::Failed { why } | CheckpointStage::Waiting { why } =
                    &state.stage
                {
                    limit("text", why.len(), MAX_TEXT)?;
                }
                limit("ranks", state.saved.len(), MAX_SAVED)
            }
            JobMessage::Standings { list, .. } => limit("ranks", list.len(), MAX_STANDINGS),
            JobMessage::Hang { hang, .. } => hang.as_ref().map_or(Ok(()), |hang| {
                limit("ranks", hang.ranks.len(), MAX_STANDINGS)?;
                limit("nodes", hang.silent.len(), MAX_LIST)
            }),
            JobMessage::Continue { without, .. } => limit("nodes", without.len(), MAX_LIST),
            JobMessage::Failure { exit, .. } => {
                let damaged = exit.damaged.as_ref().map_or(0, |d| d.why.len());
                limit("reason", damaged, MAX_TEXT)?;
                limit("output", exit.tail.len(), MAX_TEXT)
            }
            JobMessage::SaveSaid { text, .. }
            | JobMessage::Unfit { text, .. }
            | JobMessage::SaveGivenUp { why: text, .. } => limit("text", text.len(), MAX_TEXT),
            JobMessage::LookAgain { question, .. } => limit("reason", question.why.len(), MAX_TEXT),
            JobMessage::LookedAgain { state, .. } => {
                limit("reason", state.why().map_or(0, str::len), MAX_TEXT)
            }
            JobMessage::Order(o) => match &o.action {
                Action::Run { why, .. } | Action::Preempt { why, .. } | Action::End { why, .. } => {
                    limit("text", why.len(), MAX_TEXT)
                }
            },
            JobMessage::SaveAnswer(answer) => save_answer(answer),
            JobMessage::Save(_)
            | JobMessage::Stop(_)
            | JobMessage::StopAnswer(_)
            | JobMessage::Withdraw
            | JobMessage::BirthAccepted { .. }
            | JobMessage::BirthRefused { .. }
            | JobMessage::BirthAbandoned { .. }
            | JobMessage::Prepare { .. }
            | JobMessage::Rejected { .. }
            | JobMessage::Ask { .. }
            | JobMessage::Commit { .. }
            | JobMessage::Committed { .. }
            | JobMessage::MergeAsk { .. }
            | JobMessage::MergeGranted { .. }
            | JobMessage::Forfeited { .. }
            | JobMessage::Look { .. }
            | JobMessage::CheckpointAsk { .. }
            | JobMessage::CancelAsk { .. }
            | JobMessage::Superseded { .. }
            | JobMessage::Verified { .. }
            | JobMessage::LooksAgain { .. }
            | JobMessage::Changed { .. }
            | JobMessage::StatusHeard { .. } => Ok(()),
            JobMessage::Held { nodes, .. } => limit("nodes", nodes.len(), MAX_LIST),
            JobMessage::CancelUnable { why, .. } => match why {
                Unable::Newer => Ok(()),
                Unable::Misses { nodes } => limit("nodes", nodes.len(), MAX_LIST),
            },
        }
    }
}

fn save_answer(answer: &checkpoint::ToLeader) -> Result<(), WireError> {
    limit("steps", answer.sealed.len(), checkpoint::MAX_SEALED)?;
    match &answer.part {
        checkpoint::Part::Waiting { ranks } => limit("ranks", ranks.len(), MAX_RANKS),
        checkpoint::Part::Prepared { files } => {
            limit("files", files.len(), MAX_RANKS)?;
            let longest = files.iter().map(|f| f.summary.len()).max();
            limit("summary", longest.unwrap_or(0), checkpoint::MAX_SUMMARY)
        }
        checkpoint::Part::Failed { why } => limit("text", why.len(), MAX_TEXT),
        checkpoint::Part::Idle
        | checkpoint::Part::Writing { .. }
        | checkpoint::Part::Holding { .. }
        | checkpoint::Part::Settled(_) => Ok(()),
    }
}

fn limit(what: &'static str, len: usize, limit: usize) -> Result<(), WireError> {
    if len <= limit {
        Ok(())
    } else {
        Err(WireError::TooMany { what, len, limit })
    }
}

fn key(key: &JobKey) -> Result<(), WireError> {
    if key.is_valid() {
        Ok(())
    } else {
        Err(WireError::Key)
    }
}
