//! A rank that makes no progress: its launcher notices, the leader asks every member where its ranks
//! stand, judges for whom everybody waits ([`crate::hang::judge`]), and tells all. Nothing is decided
//! by it: by choice the launcher of a named rank ends that worker, which then is a failure like any
//! other.

use std::collections::BTreeMap;

use super::checkpoint::Saving;
use super::{Ctx, Job};
use crate::agent::Notice;
use crate::hang::{Hang, Standing, judge};
use crate::ids::{Digest, NodeId};
use crate::local::ToLauncher;
use crate::record::Record;
use crate::time::{Span, Time};
use crate::wire::{JobMessage, MAX_LIST, Status};

/// How long the members' answers are waited for.
const ANSWERS: Span = Span::from_secs(2);

/// The acting leader's knowledge of a hang.
#[derive(Clone, Debug, Default)]
pub(super) struct Hanging {
    /// Of the newest question or verdict.
    number: u32,
    asked: Option<Asked>,
    /// Not asked again before this.
    again: Time,
    /// The hang by the answers to the question before: the next ones have to confirm it.
    suspected: Option<Hang>,
    /// The hang that was said last: for whom everybody waits.
    said: Option<Hang>,
    told: u32,
}

impl Hanging {
    /// Nothing is asked any more.
    fn forget(&mut self) {
        self.asked = None;
        self.suspected = None;
    }

    /// The number of the newest verdict that this leader told; zero for none.
    pub(super) fn told(&self) -> u32 {
        self.told
    }

    /// A member has heard this number.
    fn heard(&mut self, number: u32) {
        self.number = self.number.max(number);
    }

    /// Whether members may show a verdict that is none of this leader's. `heard` are the numbers that
    /// they heard last, `None` for one that has not said so far.
    fn is_left_over(&self, heard: impl Iterator<Item = Option<u32>>) -> bool {
        let heard: Option<Vec<u32>> = heard.collect();
        self.told == 0 && heard.is_some_and(|all| all.iter().any(|n| *n > 0))
    }
}

#[derive(Clone, Debug)]
struct Asked {
    until: Time,
    answers: BTreeMap<NodeId, Vec<Standing>>,
}

impl Job {
    pub(super) fn drive_hang(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let Some(lead) = &mut self.lead else { return };
        if lead.ending.is_some() || lead.planned.is_some() {
            lead.hanging.forget();
            return;
        }
        let stalled = lead.statuses.values().any(|s| s.stalled && !s.stopped);
        let hanging = &mut lead.hanging;
        if !stalled {
            hanging.forget();
            // Members may have heard a verdict from an agent here that has restarted since.
            let heard = |m: &crate::record::Member| Some(lead.status(m.node)?.heard_hang);
            let left_over = lead.hanging.is_left_over(record.members.iter().map(heard));
            let hanging = &mut lead.hanging;
            if hanging.said.take().is_some() || left_over {
                self.tell_hang(ctx, record);
            }
            return;
        }
        if hanging.said.is_some() {
            return;
        }
        if lead.saving.as_ref().is_some_and(Saving::holds_ranks) {
            // A rank that saves by order may take its time, and the others may wait for it.
            hanging.forget();
            return;
        }
        let Some(asked) = &mut hanging.asked else {
            if ctx.now < hanging.again {
                let again = hanging.again;
                return self.wake_at(again, "ask again where the ranks stand");
            }
            return self.ask_standings(ctx, record);
        };
        // The ranks of a member that has finished stand nowhere, and its launcher answers nothing.
        let finished = |n: &NodeId| lead.statuses.get(n).is_some_and(|s| s.finished);
        let asked_in_vain = |n: &NodeId| !asked.answers.contains_key(n) && !finished(n);
        let nodes = record.members.iter().map(|m| m.node);
        let silent: Vec<NodeId> = nodes.filter(asked_in_vain).collect();
        if !silent.is_empty() && ctx.now < asked.until {
            let until = asked.until;
            return self.wake_at(until, "where the ranks of all members stand");
        }
        let answers: Vec<(NodeId, Vec<Standing>)> =
            std::mem::take(&mut asked.answers).into_iter().collect();
        hanging.asked = None;
        let silent = silent.into_iter().take(MAX_LIST).collect();
        let hang = judge(&answers, silent);
        match (hanging.suspected.take(), hang) {
            (Some(before), Some(hang)) if before.is_same(&hang) => {
                hanging.said = Some(hang);
                self.tell_hang(ctx, record);
            }
            (None, Some(hang)) => {
                hanging.suspected = Some(hang);
                self.ask_standings(ctx, record);
            }
            // Nobody knows.
            _ => {
                let again = hanging.again;
                self.wake_at(again, "ask again where the ranks stand");
            }
        }
    }

    fn ask_standings(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let digest = self.head_digest();
        let Some(lead) = &mut self.lead else { return };
        let hanging = &mut lead.hanging;
        hanging.number = hanging.number.wrapping_add(1);
        let number = hanging.number;
        hanging.again = ctx.now + ANSWERS;
        hanging.asked = Some(Asked {
            until: ctx.now + ANSWERS,
            answers: BTreeMap::new(),
        });
        for m in &record.members {
            self.send(ctx, m.node, JobMessage::Look { digest, number });
        }
        self.wake_at(ctx.now + ANSWERS, "where the ranks of all members stand");
    }

    /// Tells every member what was judged.
    fn tell_hang(&mut self, ctx: &mut Ctx<'_>, record: &Record) {
        let digest = self.head_digest();
        let Some(lead) = &mut self.lead else { return };
        let hanging = &mut lead.hanging;
        hanging.number = hanging.number.wrapping_add(1);
        hanging.told = hanging.number;
        let (number, hang) = (hanging.number, hanging.said.clone().map(Box::new));
        for m in record.members.iter().filter(|m| m.node != ctx.me()) {
            let hang = hang.clone();
            let body = JobMessage::Hang {
                digest,
                number,
                hang,
            };
            self.send(ctx, m.node, body);
        }
        self.hang_known(ctx, number, hang);
    }

    /// A member's status shows that it did not hear the verdict.
    pub(super) fn repeat_hang(&mut self, ctx: &Ctx<'_>, to: NodeId, status: &Status) {
        let digest = self.head_digest();
        let Some(hanging) = self.lead.as_mut().map(|l| &mut l.hanging) else {
            return;
        };
        if status.digest == digest {
            // An agent here that has restarted since, or the leader before, has used these numbers.
            hanging.heard(status.heard_hang);
        }
        let number = hanging.told;
        if number > 0 && status.heard_hang != number && to != ctx.me() {
            let body = JobMessage::Hang {
                digest: status.digest,
                number,
                hang: hanging.said.clone().map(Box::new),
            };
            self.send(ctx, to, body);
        }
    }

    /// The leader asks where the ranks here stand: the launcher knows.
    pub(super) fn on_look(&mut self, ctx: &Ctx<'_>, from: NodeId, digest: Digest, number: u32) {
        let Some(head) = self.live() else { return };
        if head.digest != digest || self.acting_leader(ctx, &head.record) != Some(from) {
            return;
        }
        if let Some(mine) = &mut self.member {
            mine.looks = Some(from);
        }
        self.tell_launcher(ToLauncher::Look { digest, number });
    }

    /// The launcher says where its ranks stand.
    pub(super) fn standings_here(
        &mut self,
        ctx: &Ctx<'_>,
        digest: Digest,
        number: u32,
        list: Vec<Standing>,
    ) {
        let asks = self.member.as_ref().and_then(|m| m.looks);
        if let Some(to) = asks.filter(|_| digest == self.head_digest()) {
            let body = JobMessage::Standings {
                digest,
                number,
                list,
            };
            self.send(ctx, to, body);
        }
    }

    pub(super) fn on_standings(
        &mut self,
        from: NodeId,
        digest: Digest,
        number: u32,
        list: Vec<Standing>,
    ) {
        let fits = self
            .live()
            .is_some_and(|h| h.digest == digest && h.record.has(from));
        let hanging = self.lead.as_mut().map(|l| &mut l.hanging);
        if let Some(hanging) = hanging.filter(|h| fits && h.number == number)
            && let Some(asked) = &mut hanging.asked
        {
            asked.answers.insert(from, list);
        }
    }

    pub(super) fn on_hang(
        &mut self,
        ctx: &Ctx<'_>,
        from: NodeId,
        digest: Digest,
        number: u32,
        hang: Option<Box<Hang>>,
    ) {
        let Some(head) = self.live() else { return };
        let led = head.digest == digest && self.acting_leader(ctx, &head.record) == Some(from);
        let heard = self.member.as_ref().map(|m| m.status.heard_hang);
        if led && from != ctx.me() && heard.is_some_and(|h| h != number) {
            self.hang_known(ctx, number, hang);
        }
    }

    fn hang_known(&mut self, ctx: &Ctx<'_>, number: u32, hang: Option<Box<Hang>>) {
        self.update(true, |s| s.heard_hang = number);
        let key = self.key.clone();
        let digest = self.head_digest();
        let text = hang.as_ref().map(|h| h.text(|node| ctx.name(node)));
        let text = text.unwrap_or_default();
        if self.hung == text {
            return;
        }
        self.hung.clone_from(&text);
        let ranks = hang.as_ref().map(|h| h.ranks_of(ctx.me()));
        let ranks = ranks.unwrap_or_default();
        self.tell_launcher(ToLauncher::Hung {
            digest,
            text: text.clone(),
            ranks,
        });
        self.notice(match hang {
            Some(hang) => Notice::Hung { key, hang, text },
            None => Notice::Moves { key },
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_leader_that_restarted_takes_back_what_it_said_before_under_a_new_number() {
        let mut hanging = Hanging::default();
        assert!(!hanging.is_left_over([Some(0), Some(0)].into_iter()));
        for heard in [3, 4, 0] {
            hanging.heard(heard);
        }
        assert_eq!(hanging.number, 4);
        // One has not spoken: it may stand still.
        assert!(!hanging.is_left_over([Some(4), None].into_iter()));
        assert!(hanging.is_left_over([Some(4), Some(0)].into_iter()));
        hanging.told = 5;
        assert!(!hanging.is_left_over([Some(4), Some(5)].into_iter()));
    }
}
