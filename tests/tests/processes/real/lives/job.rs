//! One job that lives several times: started, ended, started again.

use std::process::{Child, ExitStatus};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::plan::{Agents, Coming, End, Life, Setting, State, Store};
use crate::clouds::lend;
use crate::clouds::proxy::Proxy;
use crate::ground::LOOK;
use crate::harness::{Bed, now_ns};

/// From the last launcher's start, or the end of the last old one, until all train. The usual time is a second.
const BOUND: Duration = Duration::from_secs(15);
/// A stranger waits for so long besides, if the log's beacon stands still: `agent_grace` and `suspect_after`, which
/// are 8 s here.
const ORPHAN: Duration = Duration::from_secs(10);
/// Between two launchers of nodes that come one after the other: longer than a job waits before it forms.
const STAGGER: Duration = Duration::from_millis(400);
/// For which the last of several old nodes outlives the others.
const OUTLIVES: Duration = Duration::from_millis(300);
/// Before a launcher that was refused, or got an end that began before it came, is started again.
const AGAIN: Duration = Duration::from_millis(100);

/// The exit code of a launcher beside which another one runs.
const REFUSED: i32 = 1;

/// Where the job's log lies, if it has one.
pub(crate) enum Place {
    None,
    Directory(tempfile::TempDir),
    Bucket(Bucket),
}

pub(crate) struct Bucket {
    /// Ends with this.
    _server: Box<dyn std::any::Any>,
    port: u16,
    location: String,
}

/// A launcher of the life before, and the code with which it has to end.
struct Old {
    node: usize,
    launcher: Child,
    code: i32,
}

/// Remains of a life when the next one begins.
#[derive(Default)]
struct Leaving {
    old: Vec<Old>,
    /// A node that is to be killed once others have come, and how.
    doomed: Option<(usize, End)>,
    /// Nobody has said that it is over, so strangers wait before they take over its log.
    silent: bool,
    /// How its launchers end.
    code: Option<i32>,
}

pub(super) struct Job {
    bed: Bed,
    setting: Setting,
    _place: Place,
    /// The nodes with a `musterd`.
    agents: Vec<usize>,
    /// Workers of lives that are over.
    over: Vec<i32>,
    /// When the node's newest launcher was started.
    since: Vec<Instant>,
}

/// Lives through all of these, one after the other.
pub(crate) fn live(setting: Setting, lives: &[Life]) {
    live_at(setting, lives, place_of(setting.store));
}

fn place_of(store: Store) -> Place {
    match store {
        Store::None => Place::None,
        Store::Directory => Place::Directory(tempfile::tempdir().unwrap()),
        Store::Bucket => {
            let (fake, proxy, location) = super::super::buckets::bucket(Default::default());
            Place::behind(fake, proxy, &location)
        }
    }
}

impl Place {
    /// A bucket behind a proxy, which is kept with what stands behind it.
    pub(crate) fn behind(server: impl std::any::Any, proxy: Proxy, location: &str) -> Place {
        Place::Bucket(Bucket {
            port: proxy.port,
            location: location.to_owned(),
            _server: Box::new((server, proxy)),
        })
    }
}

/// The same in a store that is there already.
pub(crate) fn live_at(setting: Setting, lives: &[Life], place: Place) {
    let mut job = Job::new(setting, lives, place);
    let mut leaving = Leaving::default();
    for (at, life) in lives.iter().enumerate() {
        let number = at + 1;
        let took = job.begin(number, life, &mut leaving);
        eprintln!("life {number} trains after {took:.1?}: {life:?}");
        let next = lives.get(number);
        let overlaps = next.is_some_and(|next| next.coming == Coming::BeforeTheOldHaveGone);
        leaving = job.end(number, life, overlaps);
    }
}

impl Job {
    fn new(setting: Setting, lives: &[Life], place: Place) -> Job {
        let most = lives.iter().flat_map(|life| &life.nodes).max().unwrap() + 1;
        let mut bed = Bed::of(most, &["--nnodes=2:6", "--join-quiet=100ms"]);
        bed.flag("--stop-grace=5s");
        // Not to be reached by agents of another test, whose nodes may listen where these once did.
        let cluster = format!("lives-{}-{}", std::process::id(), now_ns());
        bed.env("MUSTER_CLUSTER", &cluster);
        // Strangers wait that long after all were killed; one that comes back is none.
        let grace = match setting.agents {
            Agents::Alone => "60s",
            Agents::Embedded | Agents::Daemons => "6s",
        };
        bed.env("MUSTER_AGENT_GRACE", grace);
        match &place {
            Place::None => {}
            Place::Directory(dir) => bed.flag(&format!("--store={}", dir.path().display())),
            Place::Bucket(bucket) => {
                bed.flag(&format!("--store={}", bucket.location));
                lend(&mut bed, bucket.port);
            }
        }
        Job {
            bed,
            setting,
            _place: place,
            agents: Vec::new(),
            over: Vec::new(),
            since: vec![Instant::now(); most],
        }
    }

    /// Where the workers of a life read their orders.
    fn control(&self, number: usize) -> std::path::PathBuf {
        self.bed.path(&format!("control-{number}"))
    }

    /// Prepares the script of every launcher of a life: its worker says which life it is of, and takes orders of this
    /// life.
    fn prepare(&mut self, number: usize, life: &Life) {
        let control = self.control(number);
        std::fs::create_dir_all(&control).unwrap();
        let worker = crate::harness::project("tests/tests/processes/harness/worker.py");
        let text = |path: std::path::PathBuf| path.to_str().unwrap().to_owned();
        let (events, control) = (text(self.bed.path("events")), text(control));
        let say = format!("echo \"this is life {number}\"; exec python3 -S \"$0\" \"$@\"");
        let script = [
            "--no-python",
            "--",
            "sh",
            "-c",
            &say,
            &worker,
            &events,
            &control,
        ];
        self.bed.script(&script);
        // The last one counts.
        life.flags.iter().for_each(|flag| self.bed.flag(flag));
    }

    fn launch(&mut self, node: usize) {
        self.since[node] = Instant::now();
        match self.setting.agents {
            Agents::Alone => self.bed.run_alone(node),
            Agents::Embedded => self.bed.run_among_all(node),
            Agents::Daemons => self.bed.attach(node),
        }
    }

    /// Starts a life's launchers, and waits until all of them train together. How long that took.
    fn begin(&mut self, number: usize, life: &Life, leaving: &mut Leaving) -> Duration {
        self.prepare(number, life);
        let doomed = leaving.doomed.take();
        let stays = |node: &usize| doomed.is_none_or(|(doomed, _)| *node != doomed);
        let (now, later): (Vec<usize>, Vec<usize>) = life.nodes.iter().partition(|n| stays(n));
        self.serve(&now);
        let after = now_ns();
        let mut began = Instant::now();
        for node in now {
            self.launch(node);
            if life.coming == Coming::OneAfterTheOther {
                std::thread::sleep(STAGGER);
            }
        }
        if let Some((doomed, end)) = doomed {
            std::thread::sleep(OUTLIVES);
            self.die(&[doomed], end);
            began = Instant::now();
            self.serve(&later);
            later.iter().for_each(|node| self.launch(*node));
        }
        let orphan = leaving.silent && self.setting.store != Store::None;
        let bound = BOUND + if orphan { ORPHAN } else { Duration::ZERO };
        let mut gone = leaving.old.is_empty().then_some(began);
        let group = loop {
            self.watch_old(number, leaving);
            if leaving.old.is_empty() && gone.is_none() {
                gone = Some(Instant::now());
                began = Instant::now();
            }
            for node in &life.nodes {
                self.restart_if_too_early(number, *node, gone, leaving.code);
            }
            if leaving.old.is_empty()
                && let Some(group) = self.bed.newest(&life.nodes, after)
            {
                break group;
            }
            assert!(
                began.elapsed() < bound,
                "life {number} of {:?} does not train: {life:?}",
                self.setting
            );
            std::thread::sleep(LOOK);
        };
        let took = began.elapsed();
        for pid in &self.over {
            assert!(
                !self.bed.is_alive(*pid),
                "life {number}: {pid} is of an earlier one"
            );
        }
        self.over.extend(group.ranks.iter().map(|rank| rank.pid));
        for node in &life.nodes {
            let said = format!("this is life {number}\n");
            self.bed.until("the worker says which life it is", |bed| {
                bed.said(*node).contains(&said)
            });
        }
        took
    }

    /// A launcher of the life before ends with that life's end.
    fn watch_old(&mut self, number: usize, leaving: &mut Leaving) {
        leaving.old.retain_mut(|old| {
            let Some(status) = old.launcher.try_wait().unwrap() else {
                return true;
            };
            let before = number - 1;
            assert_eq!(
                status.code(),
                Some(old.code),
                "n{} of life {before}",
                old.node
            );
            false
        });
    }

    /// A launcher that came while an old one was still there may have been refused, or have been told the old
    /// end: it is started again, as a supervisor does. One that came later must not end.
    fn restart_if_too_early(
        &mut self,
        number: usize,
        node: usize,
        gone: Option<Instant>,
        old: Option<i32>,
    ) {
        let Some(status) = self.bed.try_exit(node) else {
            return;
        };
        let told = status.code().is_some() && [Some(REFUSED), old].contains(&status.code());
        let too_early = told && gone.is_none_or(|gone| self.since[node] < gone);
        assert!(
            too_early,
            "life {number} of {:?}: n{node} ended with {} before it trained:\n{}",
            self.setting,
            shown(status),
            self.bed.said(node)
        );
        std::thread::sleep(AGAIN);
        self.launch(node);
    }

    /// Their agents, where nodes have their own.
    fn serve(&mut self, nodes: &[usize]) {
        for node in nodes {
            if self.setting.agents == Agents::Daemons && !self.agents.contains(node) {
                self.bed.agent(*node);
                self.agents.push(*node);
            }
        }
    }

    fn order(&self, number: usize, file: &str, code: i32) {
        let aside = self.bed.path("order");
        std::fs::write(&aside, code.to_string()).unwrap();
        std::fs::rename(aside, self.control(number).join(file)).unwrap();
    }

    /// Ends a life. Unless the next one comes before, all that belongs to it is gone then.
    fn end(&mut self, number: usize, life: &Life, overlaps: bool) -> Leaving {
        let code = life.end.code(number);
        let signal =
            |job: &Job, node: usize, signal| job.bed.signal(job.bed.launcher_pid(node), signal);
        match life.end {
            End::Finished => self.order(number, "exit", 0),
            End::Failed => self.order(number, "exit-0", code.unwrap_or(1)),
            End::Cancelled => signal(self, life.nodes[number % life.nodes.len()], Signal::SIGINT),
            End::AllLeft => life
                .nodes
                .iter()
                .for_each(|n| signal(self, *n, Signal::SIGTERM)),
            End::LaunchersKilled | End::AllKilled => {}
        }
        let mut leaving = Leaving {
            code,
            ..Leaving::default()
        };
        match code {
            Some(code) if overlaps => {
                let old = life.nodes.iter().map(|node| Old {
                    node: *node,
                    launcher: self.bed.part(*node),
                    code,
                });
                leaving.old = old.collect();
            }
            Some(code) => {
                for node in &life.nodes {
                    let ended = self.bed.ended(*node);
                    assert_eq!(
                        ended,
                        Some(code),
                        "life {number} of {:?}: n{node}:\n{}",
                        self.setting,
                        self.bed.said(*node)
                    );
                }
            }
            None => {
                let (dead, last) = life
                    .nodes
                    .split_at(life.nodes.len() - usize::from(overlaps));
                leaving.doomed = last.first().map(|node| (*node, life.end));
                leaving.silent = true;
                self.die(dead, life.end);
            }
        }
        if self.setting.state == State::Lost && !overlaps {
            self.lose_state();
        }
        leaving
    }

    /// All at once: none of them lives on to hear of it and decide.
    fn die(&mut self, nodes: &[usize], end: End) {
        if end == End::AllKilled {
            self.bed.kill_together(nodes);
            self.agents.retain(|agent| !nodes.contains(agent));
            return;
        }
        for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
            for node in nodes {
                self.bed.signal(self.bed.launcher_pid(*node), signal);
            }
        }
        for node in nodes {
            let _killed = self.bed.ended(*node);
        }
    }

    /// All nodes forget: agents end, and what they stored is gone.
    fn lose_state(&mut self) {
        for node in std::mem::take(&mut self.agents) {
            self.bed.kill_agent(node);
        }
        (0..self.since.len()).for_each(|node| self.bed.lose_state(node));
    }
}

fn shown(status: ExitStatus) -> String {
    status
        .code()
        .map_or_else(|| status.to_string(), |code| format!("code {code}"))
}
