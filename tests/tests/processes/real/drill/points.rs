//! Where the drill kills.

/// Process that dies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Victim {
    Worker,
    Launcher,
    Agent,
}

/// On which nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum On {
    /// The leader's, and another.
    Each,
    Leader,
    Other,
}

/// Event that leads to the point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum When {
    /// Training does, which saves every few steps.
    Save,
    /// Another node's worker is killed: a generation begins, and restores.
    Restore,
    /// Training does, which keeps two checkpoints only.
    Retire,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Point {
    /// As in the code.
    pub(super) name: &'static str,
    /// Only passes whose subject contains this.
    pub(super) of: &'static str,
    pub(super) victim: Victim,
    pub(super) on: On,
    pub(super) when: When,
}

impl Point {
    /// Contents of its file.
    pub(super) fn order(&self) -> String {
        let program = match self.victim {
            Victim::Worker => "saver",
            Victim::Launcher => "muster",
            Victim::Agent => "musterd",
        };
        let of = match self.of {
            "" => String::new(),
            of => format!(" of={of}"),
        };
        format!("kill in={program}{of}")
    }

    /// Another point that is armed on its node, so that the victim comes to it: a launcher writes ahead if it sees a
    /// fill, and these are over in a moment.
    pub(super) fn first(&self) -> Option<(&'static str, &'static str)> {
        let ahead = self.name.starts_with("ahead.");
        ahead.then_some(("slot.filled", "sleep=400 in=saver"))
    }
}

const fn save(victim: Victim, on: On, name: &'static str, of: &'static str) -> Point {
    let when = When::Save;
    Point {
        name,
        of,
        victim,
        on,
        when,
    }
}

const fn restore(victim: Victim, on: On, name: &'static str, of: &'static str) -> Point {
    Point {
        when: When::Restore,
        ..save(victim, on, name, of)
    }
}

const fn retire(victim: Victim, name: &'static str, of: &'static str) -> Point {
    Point {
        when: When::Retire,
        ..save(victim, Leader, name, of)
    }
}

use On::{Each, Leader, Other};
use Victim::{Agent, Launcher, Worker};

pub(super) const WORKER: &[Point] = &[
    save(Worker, Each, "worker.fill", ""),
    save(Worker, Each, "slot.filled", ""),
    save(Worker, Each, "worker.sealed", ""),
];

/// From the slot that is being filled to the durable file; then the manifest, and the log.
pub(super) const LAUNCHER: &[Point] = &[
    save(Launcher, Each, "ahead.chunk", ""),
    save(Launcher, Each, "ahead.linked", ""),
    save(Launcher, Each, "launcher.taken", ""),
    save(Launcher, Each, "launcher.write", ""),
    save(Launcher, Other, "persist.chunk", ""),
    save(Launcher, Each, "persist.publish", ".safetensors"),
    save(Launcher, Other, "persist.published", ".safetensors"),
    save(Launcher, Each, "part.put", ""),
    save(Launcher, Other, "persist.published", "rank-"),
    save(Launcher, Each, "launcher.written", ""),
    save(Launcher, Each, "launcher.free", ""),
    save(Launcher, Leader, "launcher.assemble", ""),
    save(Launcher, Leader, "persist.publish", "/manifest/"),
    save(Launcher, Leader, "persist.published", "/manifest/"),
    save(Launcher, Leader, "launcher.assembled", ""),
    save(Launcher, Leader, "log.create", "\"commit\""),
    save(Launcher, Leader, "log.linked", "\"commit\""),
    save(Launcher, Leader, "log.created", "\"commit\""),
];

/// A node's agent: it is told what was sealed and written, and says so.
pub(super) const AGENT: &[Point] = &[
    save(Agent, Each, "agent.event", "Save(Sealed"),
    save(Agent, Other, "agent.effect", "Save(Write"),
    save(Agent, Each, "agent.event", "Save(Written"),
    save(Agent, Other, "agent.effect", "Prepared {"),
    save(Agent, Other, "agent.event", "Over(Committed)"),
    save(Agent, Each, "agent.effect", "Save(Free"),
];

/// The leader's, besides.
pub(super) const LEADER: &[Point] = &[
    save(Agent, Leader, "agent.effect", "stage: Write"),
    save(Agent, Leader, "agent.event", "Prepared {"),
    save(Agent, Leader, "agent.effect", "Save(Assemble"),
    save(Agent, Leader, "agent.event", "Save(Assembled"),
    save(Agent, Leader, "agent.effect", "\"commit\""),
    save(Agent, Leader, "agent.event", "outcome: Won"),
    save(Agent, Leader, "agent.effect", "Over(Committed)"),
];

/// The decision that names the checkpoint, and the restore itself.
pub(super) const RESTORE: &[Point] = &[
    restore(Agent, Leader, "agent.effect", "\"claim\""),
    restore(Launcher, Leader, "log.create", "\"claim\""),
    restore(Launcher, Leader, "log.linked", "\"claim\""),
    restore(Agent, Leader, "agent.event", "outcome: Won"),
    restore(Agent, Each, "agent.effect", "Start(Start"),
    restore(Launcher, Other, "launcher.spawned", ""),
    restore(Worker, Each, "worker.opened", ""),
    restore(Worker, Other, "load.chunk", ""),
    restore(Worker, Each, "worker.loaded", ""),
];

/// From the decision that a checkpoint goes to the last of its files, its manifest.
pub(super) const RETIRE: &[Point] = &[
    retire(Agent, "agent.effect", "\"retire\""),
    retire(Launcher, "log.create", "\"retire\""),
    retire(Launcher, "log.linked", "\"retire\""),
    retire(Launcher, "log.created", "\"retire\""),
    retire(Agent, "agent.effect", "Save(Delete"),
    retire(Launcher, "keeping.delete", "data/"),
    retire(Launcher, "store.unlinked", ".safetensors"),
    retire(Launcher, "store.unlinked", "rank-"),
    retire(Launcher, "keeping.deleted", "data/"),
    retire(Launcher, "keeping.delete", "manifest/"),
    retire(Launcher, "keeping.deleted", "manifest/"),
];

pub(super) fn all() -> impl Iterator<Item = &'static Point> {
    [WORKER, LAUNCHER, AGENT, LEADER, RESTORE, RETIRE]
        .into_iter()
        .flatten()
}
