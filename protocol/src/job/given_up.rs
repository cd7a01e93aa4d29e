//! Saves that came to nothing: all nodes' people are told why, and a job does not end as if its last one had been
//! committed.

use super::{Ctx, Job};
use crate::checkpoint::{Busy, GivenUp, Node, Save};
use crate::ids::{Digest, NodeId};
use crate::local::{SaveAsk, short};
use crate::record::Record;
use crate::wire::JobMessage;

/// The exit code of a job whose ranks have all finished, and whose last save was not committed (EX_IOERR of
/// sysexits.h).
const UNSAVED: i32 = 74;

/// Saves that were given up, as far as this node knows.
#[derive(Clone, Debug, Default)]
pub(super) struct Lost {
    /// The newest one that this node has heard of.
    newest: Option<(Save, String)>,
    /// The reason that this leader said on consoles last.
    shown: Reason,
    /// Why the launcher here could not write, as its console said last.
    failed: Reason,
}

/// A reason that people were told, and the generation that it is about.
#[derive(Clone, Debug, Default)]
struct Reason(Option<(Digest, String)>);

impl Reason {
    /// Whether it is another one than before, which it takes the place of. Times, steps and attempts make no other
    /// reason.
    fn is_new(&mut self, generation: Digest, text: &str) -> bool {
        let reason = text.chars().filter(|c| !c.is_ascii_digit()).collect();
        let reason = Some((generation, reason));
        let is_new = self.0 != reason;
        self.0 = reason;
        is_new
    }
}

impl Lost {
    /// A save was committed: what hinders the next one is news.
    pub(super) fn forget_reasons(&mut self) {
        (self.shown, self.failed) = (Reason::default(), Reason::default());
    }

    fn newest_of(&self, generation: Digest) -> Option<u64> {
        let newest = self.newest.as_ref().map(|(save, _)| save);
        let ours = newest.filter(|save| save.generation == generation);
        ours.map(|save| save.step)
    }

    fn of(&self, generation: Digest, step: u64) -> Option<&str> {
        let newest = self.newest.as_ref();
        newest
            .filter(|(save, _)| (save.generation, save.step) == (generation, step))
            .map(|(_, why)| why.as_str())
    }
}

impl Job {
    /// Why the save of this step was given up, by this generation or the one that it follows; none if it was not, as
    /// far as is known here.
    pub fn given_up(&self, step: u64) -> Option<&str> {
        let head = self.head.as_ref()?;
        let of = [head.digest, head.record.parent];
        of.into_iter()
            .find_map(|generation| self.lost.of(generation, step))
    }

    /// This leader gave a save up: these nodes are told. Consoles show the first one of a generation, and one that has
    /// another reason than the one before.
    pub(super) fn tell_given_up(
        &mut self,
        ctx: &Ctx<'_>,
        nodes: &[NodeId],
        save: Save,
        why: &GivenUp,
    ) {
        let text = short(why.to_string());
        // Another one takes its place, and is saved.
        let superseded = matches!(why, GivenUp::Superseded { .. });
        let show = !superseded && self.lost.shown.is_new(save.generation, &text);
        for node in nodes {
            let why = text.clone();
            self.send(ctx, *node, JobMessage::SaveGivenUp { save, why, show });
        }
    }

    /// The launcher here could not write what a rank has sealed, or not keep a manifest.
    pub(super) fn tell_failed(&mut self, generation: Digest, text: String) {
        match self.lost.failed.is_new(generation, &text) {
            true => self.tell_saving(text),
            false => self.say_saving(text),
        }
    }

    pub(super) fn on_given_up(
        &mut self,
        ctx: &Ctx<'_>,
        from: NodeId,
        save: Save,
        why: String,
        show: bool,
    ) {
        let known = |h: &super::Head| {
            h.record.has(from) && [h.digest, h.record.parent].contains(&save.generation)
        };
        if !self.head.as_ref().is_some_and(known) {
            return;
        }
        let text = format!("{save} is given up: {why}");
        self.lost.newest = Some((save, why));
        if show {
            self.ask_launcher(SaveAsk::Tell {
                text: short(format!(
                    "{text}; what follows for the same reason is in `muster events` alone"
                )),
            });
        }
        // The leader has said it.
        if from != ctx.me() {
            self.say_saving(text);
        }
    }

    /// The exit code of a job whose ranks have all finished, and what is said: what they saved last may not have been
    /// committed. A save is begun only once every rank has sealed the same step.
    pub(super) fn finished_with(&mut self, record: &Record) -> (i32, String) {
        let generation = record.parent;
        let mut nodes = self.saves.nodes.iter();
        let node = nodes.find(|node| node.generation() == generation);
        let begun = node
            .and_then(Node::opened)
            .max(self.lost.newest_of(generation));
        let committed = record.restore.map(|commit| commit.step);
        // One that some ranks were to leave out, for the store was busy, nobody misses.
        let skips = record.spec.triggers.busy == Busy::Skip;
        let sealed = node.and_then(Node::newest_sealed).filter(|_| !skips);
        let last = begun.max(sealed);
        let last = last.filter(|step| Some(*step) > committed);
        let Some(step) = last.filter(|step| self.committed(*step).is_none()) else {
            return (0, "finished: every rank has exited with 0".to_owned());
        };
        let why = match self.lost.of(generation, step) {
            Some(why) => why,
            None if begun == last => "the job ended before it was",
            None => {
                "it was not begun: not every rank had saved that step when the job ended, or the store was still busy with \
                 the save before"
            }
        };
        let left = match committed {
            Some(step) => format!("the next start goes on from the checkpoint of step {step}"),
            None => "there is no checkpoint, and the next start begins anew".to_owned(),
        };
        let text = format!(
            "all ranks have finished, and what they saved last, step {step}, is not committed: {why}; {left}"
        );
        self.say_saving(text.clone());
        (UNSAVED, text)
    }
}

#[cfg(test)]
mod tests;
