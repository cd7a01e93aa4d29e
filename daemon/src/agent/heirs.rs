//! Slots from a launcher to its job's next one: [`Held`](super::held::Held), joined with the jobs that the core knows.

use muster_protocol::agent::ConnId;
use muster_protocol::job::Job;
use muster_protocol::local::{SaveAsk, ToLauncher};
use muster_protocol::record::Kind;
use muster_protocol::{JobKey, LauncherId, Span};

use super::Node;
use super::held::Left;
use crate::clock;
use crate::socket::{NoRoom, Received};

impl Node {
    /// A launcher says of slots; these descriptors came with the word.
    pub(super) fn keep_slots(
        &mut self,
        conn: ConnId,
        k: u16,
        capacity: u64,
        slots: Result<Received, NoRoom>,
    ) {
        let Some((key, launcher)) = self.launcher_of(conn) else {
            return;
        };
        // As from a launcher that has no descriptor left, or whose agent keeps none.
        let none = slots.as_ref().is_ok_and(|slots| slots.is_empty());
        if none || self.core.config().slot_lease == Span::ZERO {
            return self.held.refuse(&key, k);
        }
        let kept = match slots {
            Ok(slots) => self.held.keep(&key, launcher, k, capacity, slots),
            Err(why) => {
                // A launcher offers its slots again now and then, and says first when it gives some up: what is kept
                // of it is what it offers.
                if self.held.is_of(&key, launcher, k) {
                    return;
                }
                self.held.refuse(&key, k);
                Err(why.into())
            }
        };
        if let Err(why) = kept {
            tracing::warn!(job = %key, local_rank = k, %why, "checkpoint slots are not kept");
            let text = format!(
                "the agent does not keep the checkpoint slots of local rank {k} for a launcher that comes after this one: {why}"
            );
            self.tell_launcher(conn, &ToLauncher::Save(SaveAsk::Tell { text }));
        }
    }

    /// A launcher has given up the slots of a rank.
    pub(super) fn let_go(&mut self, conn: ConnId, k: u16) {
        if let Some((key, launcher)) = self.launcher_of(conn) {
            self.held.give_up(&key, launcher, k);
        }
    }

    fn launcher_of(&self, conn: ConnId) -> Option<(JobKey, LauncherId)> {
        let launcher = self.clients.get(&conn)?.launcher.as_ref()?;
        Some((launcher.key().clone(), launcher.id()))
    }

    /// Slots that wait for this launcher's job become its own.
    pub(super) fn hand_over(&mut self, conn: ConnId, key: &JobKey, heir: LauncherId) {
        // It may have taken the place of one that is looked for still.
        self.orphan(key, Some(heir));
        for (k, slots) in self.held.inherit(key) {
            tracing::info!(job = %key, local_rank = k, "its next launcher gets its checkpoint slots");
            let frame = ToLauncher::Save(SaveAsk::Inherit { k });
            self.tell_with(conn, &frame, slots);
        }
    }

    /// The slots of launchers of this job that are gone wait from now on; `here` is the one that the job has, if any.
    /// One that answers at its guard lives, whoever has taken its place, and its workers write into them.
    fn orphan(&mut self, key: &JobKey, here: Option<LauncherId>) {
        let lease = self.core.config().slot_lease;
        let until = clock::now() + lease;
        let looks = &self.looks;
        let gone = |launcher| Some(launcher) != here && !looks.lives(launcher);
        if let Some(left) = self.held.orphan(key, gone, until) {
            self.tell_left(&left, &format!("wait {lease} for its next launcher here"));
        }
    }

    /// Applies what a launcher is told about its slots to those that are kept, too.
    pub(super) fn told(&mut self, conn: ConnId, frame: &ToLauncher) {
        let launcher = self.clients.get(&conn).and_then(|c| c.launcher.as_ref());
        let Some(launcher) = launcher else { return };
        match frame {
            ToLauncher::End { .. } => self.held.end(launcher.key()),
            ToLauncher::Save(SaveAsk::Refuse { k }) => self.held.refuse(launcher.key(), *k),
            _ => {}
        }
    }

    /// Follows up slots whose launcher is gone, whose job or lease is over, and those without room.
    pub(super) fn follow_slots(&mut self) {
        let now = clock::now();
        for key in self.held.jobs() {
            let here = self.core.job(&key).and_then(Job::launcher);
            self.orphan(&key, here);
            if here.is_some() {
                continue;
            }
            let job = self.core.job(&key);
            let over = |kind| matches!(kind, Kind::End { .. } | Kind::Failed { .. });
            let head = job.and_then(Job::head);
            let over = head.is_some_and(|(record, _)| over(record.kind));
            if over && let Some(left) = self.held.over(&key) {
                self.tell_left(&left, "are closed: the job is over");
            }
        }
        for left in self.held.expire(now) {
            self.tell_left(&left, "are closed: no launcher came for them in time");
        }
        let taken = self.core.slot_memory_taken();
        let room = self.core.config().slot_memory.saturating_sub(taken);
        for left in self.held.fit(room) {
            let why = "are closed: checkpoint_memory is needed for slots of jobs that run";
            self.tell_left(&left, why);
        }
        let waiting = i64::try_from(self.held.waiting());
        self.metrics.slots_waiting.set(waiting.unwrap_or(i64::MAX));
        let behind = self.core.jobs().filter_map(Job::replicated);
        let most = behind.map(|replicated| replicated.behind).max();
        let most = i64::try_from(most.unwrap_or(0));
        self.metrics.replicas_behind.set(most.unwrap_or(i64::MAX));
    }

    fn tell_left(&mut self, left: &Left, what: &str) {
        let Left { key, ranks, bytes } = left;
        let text = format!(
            "the checkpoint slots that a launcher left here, of {ranks} ranks and {} MiB, {what}",
            bytes >> 20
        );
        tracing::info!(job = %key, text, "checkpoint slots");
        let fields = serde_json::json!({ "text": text });
        self.history.add(key, "saving", fields);
    }
}
