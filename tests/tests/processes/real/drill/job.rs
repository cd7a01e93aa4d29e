//! A job that saves every few steps, on nodes with an agent and a launcher each.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

use nix::fcntl::OFlag;

use crate::ground::program;
use crate::harness::{Bed, Group};

use super::judge::{Judge, Log};

/// How a job differs from the usual one.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    /// Nodes that train at a time.
    pub(crate) nodes: usize,
    /// How often all of them may be replaced, and once more.
    pub(crate) times: usize,
    /// MiB of the state that all ranks hold.
    pub(crate) mib: usize,
    /// Steps between two saves.
    pub(crate) every: u64,
    /// Variables of all processes.
    pub(crate) env: Vec<(&'static str, String)>,
    /// Where the store is; none: in a directory of its own.
    pub(crate) store: Option<PathBuf>,
    /// How many checkpoints stay; usually all, so that every commit is judged by its data.
    pub(crate) keep: u64,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            nodes: 2,
            times: 1,
            mib: 1,
            every: 8,
            env: Vec::new(),
            store: None,
            keep: 1_000_000,
        }
    }
}

pub(crate) struct Job {
    pub(crate) bed: Bed,
    pub(crate) judge: Judge,
    /// The nodes of the job, by now.
    pub(crate) nodes: Vec<usize>,
    store: PathBuf,
    _own: Option<tempfile::TempDir>,
}

impl Job {
    /// Whether its launchers can write a file before its image is sealed.
    pub(crate) fn writes_ahead(&self) -> bool {
        let file = File::options()
            .read(true)
            .write(true)
            .custom_flags(OFlag::O_TMPFILE.bits() | OFlag::O_DIRECT.bits())
            .open(&self.store);
        file.is_ok()
    }

    /// Starts it.
    pub(crate) fn start(setup: Setup) -> Job {
        let own = setup.store.is_none().then(|| tempfile::tempdir().unwrap());
        let store = setup.store.clone();
        let store = store.unwrap_or_else(|| own.as_ref().unwrap().path().to_owned());
        let flags = [
            format!("--nnodes={}:{}", setup.nodes.min(2), setup.nodes),
            format!("--store={}", store.display()),
            "--max-restarts=1000".into(),
            format!("--keep-last={}", setup.keep),
            "--join-quiet=100ms".into(),
        ];
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let mut bed = Bed::of(setup.nodes * setup.times, &flags);
        // Strangers wait that long after all were killed.
        bed.env("MUSTER_AGENT_GRACE", "6s");
        for (name, value) in &setup.env {
            bed.env(name, value);
        }
        let text = |path: PathBuf| path.to_str().unwrap().to_owned();
        let (events, control) = (text(bed.path("events")), text(bed.path("control")));
        let (mib, every) = (setup.mib.to_string(), setup.every.to_string());
        bed.script(&["--", &program("saver"), &events, &control, &mib, &every]);
        let mut job = Job {
            judge: Judge::new(store.join("job")),
            bed,
            nodes: (0..setup.nodes).collect(),
            store,
            _own: own,
        };
        job.begin();
        job
    }

    /// The job's folder in its store.
    pub(crate) fn folder(&self) -> PathBuf {
        self.store.join("job")
    }

    fn begin(&mut self) {
        let first = self.nodes[0];
        for node in self.nodes.clone() {
            self.bed.agent_that_calls(node, &[first]);
        }
        for node in self.nodes.clone() {
            self.bed.attach(node);
        }
    }

    /// The nodes but this one.
    pub(crate) fn others(&self, node: usize) -> Vec<usize> {
        let all = self.nodes.iter().copied();
        all.filter(|other| *other != node).collect()
    }

    /// Waits until all nodes train together, and the log's newest entry of theirs is a commit of more than
    /// this step.
    pub(crate) fn steady(&self, beyond: u64, what: &str) -> (Group, Log) {
        let mut found = None;
        let what = format!("all nodes train and commit after {what}");
        self.bed.until(&what, |bed| {
            let group = bed.newest(&self.nodes, 0);
            let alive = |g: &Group| g.ranks.iter().all(|rank| bed.is_alive(rank.pid));
            let Some(group) = group.filter(alive) else {
                return false;
            };
            let log = self.judge.log();
            let latest = log.claims.last().map(|c| (c.number, c.digest));
            let newer = log.newest().is_some_and(|c| {
                let by = (group.generation, c.commit.generation);
                c.commit.step > beyond && latest == Some(by)
            });
            found = newer.then_some((group, log));
            found.is_some()
        });
        found.unwrap()
    }

    /// Kills every process of every node.
    pub(crate) fn kill(&mut self) {
        for node in self.nodes.clone() {
            self.bed.kill(node);
        }
    }

    /// Starts as many others, which share nothing with those before but the store.
    pub(crate) fn begin_anew(&mut self) {
        let next = self.nodes.last().unwrap() + 1;
        self.nodes = (next..next + self.nodes.len()).collect();
        self.begin();
    }

    /// Waits until training has come this much further, whatever becomes of saves.
    pub(crate) fn trains_on(&self, group: &Group, what: &str) {
        let at = |bed: &Bed| {
            (1..)
                .take_while(|step| bed.has_met(group.generation, *step))
                .count()
        };
        let now = at(&self.bed) as u64;
        let what = format!("training goes on {what}");
        self.bed
            .until(&what, |bed| bed.has_met(group.generation, now + 30));
    }

    /// Waits until all but the two newest checkpoints of this log are retired, and nothing is left of them.
    pub(crate) fn finishes_deletions(&self, known: &Log, what: &str) {
        let old = known.commits.len().saturating_sub(2);
        let old: Vec<_> = known.commits.iter().take(old).map(|c| c.commit).collect();
        assert!(!old.is_empty(), "{what}: nothing was to be retired");
        let what = format!("the deletion is finished after {what}");
        self.bed.until(&what, |_| {
            let log = self.judge.log();
            let retired = log.commits.iter().filter(|c| c.retired);
            let retired: Vec<_> = retired.map(|c| c.commit).collect();
            let mut old = old.iter();
            old.all(|commit| retired.contains(commit) && self.judge.is_deleted(commit))
        });
    }

    /// Output of launchers and workers, and the agents' words about saves, on all nodes.
    pub(crate) fn said(&self) -> String {
        let all = self.nodes.iter().map(|node| {
            let agent = self.bed.path(&format!("n{node}.agent.log"));
            self.bed.said(*node) + &std::fs::read_to_string(agent).unwrap_or_default()
        });
        all.collect()
    }

    /// Waits until somebody is told this.
    pub(crate) fn hears(&self, text: &str) {
        let what = format!("people are told: {text}");
        self.bed.until(&what, |_| self.said().contains(text));
    }

    /// Waits until every launcher has told this.
    pub(crate) fn all_hear(&self, text: &str) {
        for node in &self.nodes {
            let what = format!("n{node} tells: {text}");
            (self.bed).until(&what, |bed| bed.said(*node).contains(text));
        }
    }

    /// Ends the job, and judges everything once more.
    pub(crate) fn end(mut self) -> Log {
        self.steady(0, "everything");
        self.bed.order(None, 0);
        for node in self.nodes.clone() {
            assert_eq!(self.bed.ended(node), Some(0));
        }
        let log = self.judge.check_all(&self.bed.events());
        let wrong = [
            "is not the state before",
            "are not those of step",
            "panicked at",
        ];
        for entry in std::fs::read_dir(self.bed.path("")).unwrap().flatten() {
            let text = std::fs::read_to_string(entry.path()).unwrap_or_default();
            for wrong in wrong {
                assert!(!text.contains(wrong), "{}: {wrong}", entry.path().display());
            }
        }
        log
    }
}
