//! Messages between the agents of a job: how they go out, which part of the job hears them, and which wait for a moment
//! because the record that they are about is on its way on another connection.

use super::disk::is_vote;
use super::{Ctx, Job, REPEAT};
use crate::agent::Effect;
use crate::ids::{Digest, NodeId};
use crate::time::{Span, Time};
use crate::wire::{JobMessage, Message};

/// The newest message that came before the record that it is about. Its sender repeats it after a while anyway.
#[derive(Clone, Debug)]
pub(super) struct Early {
    from: NodeId,
    body: JobMessage,
    about: Digest,
    at: Time,
}

impl Job {
    /// Says `body` to `to`; to ourselves by way of the queue.
    pub(super) fn send(&mut self, ctx: &Ctx<'_>, to: NodeId, body: JobMessage) {
        if to == ctx.me() && is_vote(&body) {
            self.writes.vote(body);
            self.wake_at(ctx.now, "own vote");
        } else if to == ctx.me() {
            self.loopback.push_back(body);
        } else if ctx.peers.connected(to) {
            let votes = is_vote(&body);
            let message = Message::Job {
                key: self.key.clone(),
                body: Box::new(body),
            };
            let effect = Effect::Send { to, message };
            match votes {
                true => self.queue_vote(effect),
                false => self.effects.push_back(effect),
            }
        }
    }

    pub(crate) fn on_message(&mut self, ctx: &mut Ctx<'_>, from: NodeId, body: JobMessage) {
        match body {
            JobMessage::Ticket(ticket) => self.on_ticket(ctx, from, *ticket),
            JobMessage::TicketAck {
                launcher,
                lineage,
                wait,
            } => {
                if self.launcher().is_none_or(|here| here == launcher) {
                    self.on_ticket_ack(ctx, from, lineage, wait);
                }
            }
            JobMessage::TicketRefused { launcher, why } => {
                self.on_ticket_refused(ctx, launcher, why);
            }
            JobMessage::Withdraw => self.gathering.withdraw(from),
            JobMessage::Birth { record } => self.on_birth(ctx, from, record),
            JobMessage::BirthAccepted { lineage } => self.on_birth_accepted(ctx, from, lineage),
            JobMessage::BirthRefused { lineage, bound } => {
                self.on_birth_refused(ctx, from, lineage, bound);
            }
            JobMessage::BirthAbandoned { lineage } => self.on_birth_abandoned(ctx, lineage),
            JobMessage::ClaimBirth { record } => self.on_claim_birth(ctx, record),
            JobMessage::Prepare { parent, ballot } => self.on_prepare(ctx, from, parent, ballot),
            JobMessage::Promise {
                parent,
                ballot,
                accepted,
                acked,
            } => self.on_promise(ctx, from, (parent, ballot), accepted, acked),
            JobMessage::Accept {
                parent,
                ballot,
                record,
            } => self.on_accept(ctx, from, parent, ballot, record),
            JobMessage::Accepted {
                parent,
                ballot,
                grants,
            } => self.on_accepted(ctx, from, parent, ballot, &grants),
            JobMessage::Rejected { parent, promised } => self.on_rejected(ctx, parent, promised),
            JobMessage::Decided { record } => self.on_decided(ctx, from, record),
            JobMessage::Follows { have, record } => self.on_follows(ctx, from, have, record),
            JobMessage::Ask { have } => self.on_ask(ctx, from, have),
            JobMessage::Status(status) => self.on_status(ctx, from, *status),
            JobMessage::StatusHeard { digest, boot, seq } => {
                self.on_status_heard(ctx, from, (digest, boot, seq));
            }
            JobMessage::Order(order) => self.on_order(ctx, from, *order),
            JobMessage::Stop(message) => self.on_stop(ctx, from, message),
            JobMessage::StopAnswer(message) => self.on_stop_answer(ctx, from, message),
            JobMessage::Commit { commit, vote } => self.on_commit(ctx, from, commit, vote),
            JobMessage::Committed { commit } => self.on_committed(ctx, from, commit),
            JobMessage::MergeAsk { loser, stuck } => self.on_merge_ask(ctx, from, loser, stuck),
            JobMessage::MergeGranted { loser, winner } => {
                self.on_merge_granted(ctx, loser, winner);
            }
            JobMessage::Forfeited { parent } => self.on_forfeited(from, parent),
            JobMessage::Changed { digest, phases } => self.on_changed(ctx, from, digest, phases),
            JobMessage::Continue { parent, without } => {
                self.on_continue(ctx, from, parent, without);
            }
            JobMessage::Superseded { lineage, up_to } => {
                self.on_superseded(ctx, lineage, up_to);
            }
            JobMessage::Failure { digest, node, exit } => {
                self.on_failure(ctx, from, digest, (node, *exit));
            }
            JobMessage::Look { digest, number } => self.on_look(ctx, from, digest, number),
            JobMessage::Standings {
                digest,
                number,
                list,
            } => self.on_standings(from, digest, number, list),
            JobMessage::Hang {
                digest,
                number,
                hang,
            } => self.on_hang(ctx, from, digest, number, hang),
            JobMessage::CheckpointAsk { digest, ask } => {
                self.on_checkpoint_ask(ctx, from, digest, ask);
            }
            JobMessage::Checkpoint { ask, state } => self.on_checkpoint(ctx, from, ask, state),
            JobMessage::Save(message) => self.on_save(ctx, from, message),
            JobMessage::SaveAnswer(message) => self.on_save_answer(ctx, from, *message),
            JobMessage::Verified { digest } => self.on_verified(ctx, from, digest),
            JobMessage::SaveSaid { digest, text } => self.on_save_said(ctx, from, digest, text),
            JobMessage::SaveGivenUp { save, why, show } => {
                self.on_given_up(ctx, from, save, why, show);
            }
            JobMessage::LookAgain { digest, question } => {
                self.on_look_again(ctx, from, digest, question);
            }
            JobMessage::LooksAgain {
                digest,
                number,
                read,
            } => self.on_looks_again(ctx, from, digest, (number, read)),
            JobMessage::LookedAgain {
                digest,
                number,
                state,
            } => self.on_looked_again(ctx, from, digest, (number, state)),
            JobMessage::CancelAsk { lineage, ago_ms } => {
                let ago = Span::from_millis(ago_ms.into());
                self.on_cancel_ask(ctx, from, lineage, ago);
            }
            JobMessage::CancelUnable { lineage, why } => {
                self.on_cancel_unable(ctx, from, lineage, why);
            }
            JobMessage::Unfit { digest, text } => self.on_unfit(ctx, from, digest, text),
            JobMessage::Held { digest, ms, nodes } => self.on_held(ctx, from, digest, ms, &nodes),
            JobMessage::Voters { generation, record } => {
                self.on_voters(ctx, from, generation, record);
            }
        }
    }

    pub(super) fn came_early(
        &mut self,
        ctx: &Ctx<'_>,
        from: NodeId,
        about: Digest,
        body: JobMessage,
    ) {
        let at = ctx.now;
        self.early = Some(Early {
            from,
            body,
            about,
            at,
        });
    }

    /// The birth that came early is not proposed any more.
    pub(super) fn forget_early_birth(&mut self, lineage: Digest) {
        let is_it = |early: &mut Early| matches!(&early.body, JobMessage::Birth { record } if record.digest() == lineage);
        self.early.take_if(is_it);
    }

    /// Hears what came early once the record is here.
    pub(super) fn hear_early(&mut self, ctx: &mut Ctx<'_>) {
        if self.early.is_none() {
            return;
        }
        let head = self.head_digest();
        let held = self.held_until(ctx).is_some();
        let is_due = |early: &mut Early| {
            let binds = matches!(early.body, JobMessage::Birth { .. });
            early.about == head && !(binds && held) || ctx.now >= early.at + REPEAT
        };
        if let Some(early) = self.early.take_if(is_due)
            && ctx.now < early.at + REPEAT
        {
            self.on_message(ctx, early.from, early.body);
        }
    }
}
