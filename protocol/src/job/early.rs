//! Messages about a record that another agent's message brings a moment later: the ways that the two take differ.

use super::{Ctx, Job, REPEAT};
use crate::ids::{Digest, NodeId};
use crate::time::Time;
use crate::wire::JobMessage;

/// The newest message that came before the record that it is about. Its sender repeats it after a while anyway.
#[derive(Clone, Debug)]
pub(super) struct Early {
    from: NodeId,
    body: JobMessage,
    about: Digest,
    at: Time,
}

impl Job {
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
        let head = self.head_digest();
        let held = self.held_until(ctx).is_some();
        let is_due = |early: &mut Early| {
            let binds = matches!(early.body, JobMessage::Birth { .. });
            early.about == head && !(binds && held)
        };
        if let Some(early) = self.early.take_if(is_due)
            && ctx.now < early.at + REPEAT
        {
            self.on_message(ctx, early.from, early.body);
        }
    }
}
