//! The job's store, as this launcher reaches it: with its user's rights and mounts. The agent asks,
//! three threads do what blocks, and the driver never waits for them.
//!
//! There is one thread for reads of the log, one for creates there, and one for the beacon, and each has
//! one operation at a time. Reads that are asked for while their thread is busy have threads of their
//! own, for as long as they take: an old log is read several slots at a time. So a network file system
//! that hangs holds `MAX_THREADS` threads at most, however long it does. A request beyond that fails
//! at once. No read takes the place of a create.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::Duration;

use anyhow::Context;
use muster_protocol::StoreUuid;
use muster_protocol::local::{
    Assembly, News, Part, STORE_HANGS, StoreAnswer, StoreAsk, StoreOp, ToAgent, Troubles,
};
use muster_protocol::storelog::MAX_READS;
use muster_store::{Created, Kind, Location, Options, Patience, Store, StoreError, UUID_NAME};
use tokio::sync::mpsc;

use super::console::say;
use super::mounts;
use crate::stores;

/// Threads for reads, one for creates, and one for the beacon.
const MAX_THREADS: usize = MAX_READS + 2;

/// Between two words about a store that does not open.
const SLOW: Duration = Duration::from_secs(5);

/// Operations on one job's part of a store. All of them may block.
pub trait Operations: Send + Sync + 'static {
    fn carry_out(&self, task: Task) -> Outcome;

    /// Its name for its user.
    fn name(&self) -> String;
}

/// An operation, with all of its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Task {
    Read { slot: u64 },
    Create { slot: u64, bytes: Vec<u8> },
    WriteBeacon { value: u64 },
    ReadBeacon,
}

/// How an operation ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Found(Vec<u8>),
    Answer(StoreAnswer),
}

/// The job's folder in a store.
struct Opened {
    folder: Store,
    uuid: muster_store::Uuid,
    /// The store was made by this.
    new: bool,
}

/// Why a directory may not be used, whatever the probe finds there.
enum Unfit {
    /// The store would be made in the directory below a mount that is missing, at this path.
    NotMounted(PathBuf),
    /// Writes of other nodes may stay unseen: the mount at this path has the option `nocto`.
    Unseen(PathBuf),
}

/// One job's folder in an open store.
#[derive(Clone, Debug)]
pub struct JobStore {
    /// For checkpoints.
    folder: Store,
    /// For the log and the beacon: somebody waits for them.
    log: Store,
    uuid: StoreUuid,
    shown: String,
}

impl JobStore {
    /// Opens the store, and probes that it keeps create-only promises. Says so when that takes
    /// long.
    pub async fn open(location: &Location, job: &str) -> anyhow::Result<JobStore> {
        let shown = location.to_string();
        let (location, folder) = (location.clone(), stores::folder(job));
        let mut opening = tokio::task::spawn_blocking(move || -> Result<_, StoreError> {
            let store = Store::open(&location, &Options::of_process())?;
            // Behind the probe it would be a store, whatever it is.
            let unnamed =
                matches!(store.head(UUID_NAME), Err(error) if error.kind == Kind::NotFound);
            let missing = match &location {
                Location::Directory(path) if unnamed => mounts::missing(path),
                _ => None,
            };
            if let Some(at) = missing {
                return Ok(Err(Unfit::NotMounted(at)));
            }
            if let Location::Directory(path) = &location
                && let Some(at) = mounts::unseen(path)
            {
                return Ok(Err(Unfit::Unseen(at)));
            }
            let uuid = store.probe()?.uuid;
            let folder = store.within(&folder)?;
            let new = unnamed;
            Ok(Ok(Opened { folder, uuid, new }))
        });
        let opened = loop {
            match tokio::time::timeout(SLOW, &mut opening).await {
                Ok(opened) => break opened?,
                Err(_) => say(&format!("--store {shown}: {STORE_HANGS}")),
            }
        };
        let opened = opened.with_context(|| format!("--store {shown} cannot be used"))?;
        let (folder, uuid) = match opened {
            Ok(Opened { folder, uuid, new }) => {
                if new {
                    say(&format!(
                        "--store {shown} is a new store: nothing was in it. If this job has checkpoints, its store is another, or not mounted here"
                    ));
                }
                (folder, uuid)
            }
            Err(Unfit::Unseen(at)) => anyhow::bail!(
                "--store {shown} is on NFS, and {at} is mounted with `nocto`: this node may not see for many seconds what others wrote, and would train on after it was given up. Mount it without that option, or name another directory",
                at = at.display()
            ),
            Err(Unfit::NotMounted(at)) => anyhow::bail!(
                "--store {shown} is no store yet, and /etc/fstab says that something is to be mounted at {at}, where nothing is: mount it (mount {at}), or name another directory",
                at = at.display()
            ),
        };
        Ok(JobStore {
            log: folder.with_patience(Patience::brief()),
            folder,
            uuid: StoreUuid(uuid.0),
            shown,
        })
    }

    /// The job's folder in it, for its checkpoints.
    pub fn folder(&self) -> Store {
        self.folder.clone()
    }

    pub fn uuid(&self) -> StoreUuid {
        self.uuid
    }

    fn create(&self, slot: u64, bytes: &[u8]) -> Result<Created, StoreError> {
        let entry = || String::from_utf8_lossy(bytes).into_owned();
        muster_fault::point_on("log.create", entry);
        let created = self.log.create(&stores::entry(slot), bytes);
        muster_fault::point_on("log.created", entry);
        created
    }
}

impl Operations for JobStore {
    fn carry_out(&self, task: Task) -> Outcome {
        // Also where nothing was written: the log's rule for an unknown outcome is safe for it too.
        let failed = |error: StoreError| StoreAnswer::failed(error.to_string());
        Outcome::Answer(match task {
            Task::Read { slot } => match self.log.get(&stores::entry(slot), stores::MAX_ENTRY) {
                Ok(bytes) => return Outcome::Found(bytes),
                Err(error) if error.kind == Kind::NotFound => StoreAnswer::Absent,
                Err(error) => failed(error),
            },
            Task::Create { slot, bytes } => match self.create(slot, &bytes) {
                Ok(Created::Created) => StoreAnswer::Won,
                Ok(Created::Exists) => StoreAnswer::Exists,
                Err(error) => failed(error),
            },
            Task::WriteBeacon { value } => {
                match self
                    .log
                    .put(stores::BEACON, format!("{value:016x}").as_bytes())
                {
                    Ok(()) => StoreAnswer::BeaconWritten,
                    Err(error) => failed(error),
                }
            }
            Task::ReadBeacon => match stores::beacon(&self.log) {
                Ok(value) => StoreAnswer::Beacon(value),
                Err(error) => failed(error),
            },
        })
    }

    fn name(&self) -> String {
        self.shown.clone()
    }
}

/// A thread, and whether it is at work.
#[derive(Debug)]
struct Lane {
    tasks: SyncSender<(Asked, Task)>,
    busy: bool,
}

/// Which of an agent's asks a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    /// Counts the links: another agent counts its asks anew.
    link: u64,
    id: u64,
    place: Place,
    op: StoreOp,
}

/// Where an operation is carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Reads,
    Creates,
    Beacon,
    /// A thread of its own.
    Apart,
}

/// An operation that ended.
#[derive(Debug)]
pub struct Done {
    asked: Asked,
    outcome: Outcome,
}

/// Carries out what the agent asks.
#[derive(Debug)]
pub struct Keeper<S> {
    store: Arc<S>,
    reads: Lane,
    creates: Lane,
    beacon: Lane,
    /// How many operations have threads of their own.
    apart: usize,
    done: mpsc::Sender<Done>,
    ended: mpsc::Receiver<Done>,
    link: u64,
    /// The object to be created, as it arrives.
    arriving: Option<(u64, Assembly)>,
    troubles: Troubles,
}

impl<S: Operations> Keeper<S> {
    pub fn start(store: S) -> std::io::Result<Keeper<S>> {
        let store = Arc::new(store);
        // Each thread has one task at a time, so that none ever waits to say that it is done.
        let (done, ended) = mpsc::channel(MAX_THREADS);
        Ok(Keeper {
            reads: Lane::start("store-read", &store, &done)?,
            creates: Lane::start("store-create", &store, &done)?,
            beacon: Lane::start("store-beacon", &store, &done)?,
            store,
            apart: 0,
            done,
            ended,
            link: 0,
            arriving: None,
            troubles: Troubles::default(),
        })
    }

    /// A new link: nothing that an earlier one asked for is answered on it.
    pub fn link_up(&mut self) {
        self.link += 1;
        self.arriving = None;
    }

    /// Takes what the agent asks. An answer at once where nothing can be done.
    pub fn ask(&mut self, id: u64, ask: StoreAsk) -> Option<StoreAnswer> {
        let op = ask.op();
        let task = match ask {
            StoreAsk::Read { slot } => Task::Read { slot },
            StoreAsk::Create { slot, part } => {
                let bytes = match self.arrives(id, &part) {
                    Ok(bytes) => bytes?,
                    Err(reason) => return Some(StoreAnswer::failed(reason)),
                };
                Task::Create { slot, bytes }
            }
            StoreAsk::WriteBeacon { value } => Task::WriteBeacon { value },
            StoreAsk::ReadBeacon => Task::ReadBeacon,
        };
        let place = match task {
            Task::WriteBeacon { .. } | Task::ReadBeacon => Place::Beacon,
            Task::Create { .. } => Place::Creates,
            Task::Read { .. } if self.reads.busy => Place::Apart,
            Task::Read { .. } => Place::Reads,
        };
        let asked = Asked {
            link: self.link,
            id,
            place,
            op,
        };
        let begun = match place {
            Place::Reads => self.reads.begin(asked, task),
            Place::Creates => self.creates.begin(asked, task),
            Place::Beacon => self.beacon.begin(asked, task),
            Place::Apart => self.begin_apart(asked, task),
        };
        if begun {
            return None;
        }
        let answer = StoreAnswer::failed(STORE_HANGS.into());
        if let Some(text) = self.news(op, &answer) {
            say(&text);
        }
        Some(answer)
    }

    fn begin_apart(&mut self, asked: Asked, task: Task) -> bool {
        if self.apart + 1 >= MAX_READS {
            return false;
        }
        let (store, done) = (Arc::clone(&self.store), self.done.clone());
        let begun = std::thread::Builder::new()
            .name("store-apart".into())
            .spawn(move || {
                let outcome = store.carry_out(task);
                // Nobody hears it where the launcher is about to end.
                let _unheard = done.blocking_send(Done { asked, outcome });
            })
            .is_ok();
        self.apart += usize::from(begun);
        begun
    }

    /// The next part of an object that is to be created; the whole with the last one.
    fn arrives(&mut self, id: u64, part: &Part) -> Result<Option<Vec<u8>>, String> {
        let (_, mut assembly) = self
            .arriving
            .take_if(|(arriving, _)| *arriving == id)
            .unwrap_or_default();
        let whole = assembly.take(part).map_err(|e| e.to_string())?;
        if whole.is_none() {
            self.arriving = Some((id, assembly));
        }
        Ok(whole)
    }

    /// Messages to the agent about an operation that ended, and to the user, where it is news.
    pub fn done(&mut self, done: Done) -> (Vec<ToAgent>, Option<String>) {
        let Done { asked, outcome } = done;
        match asked.place {
            Place::Reads => self.reads.busy = false,
            Place::Creates => self.creates.busy = false,
            Place::Beacon => self.beacon.busy = false,
            Place::Apart => self.apart -= 1,
        }
        let answers = match outcome {
            Outcome::Found(bytes) => Part::all(&bytes)
                .into_iter()
                .map(StoreAnswer::Found)
                .collect(),
            Outcome::Answer(answer) => vec![answer],
        };
        let news = answers
            .first()
            .and_then(|answer| self.news(asked.op, answer));
        let id = asked.id;
        let mut frames = Vec::new();
        if asked.link == self.link {
            frames.extend(
                answers
                    .into_iter()
                    .map(|answer| ToAgent::Store { id, answer }),
            );
        }
        (frames, news)
    }

    fn news(&mut self, op: StoreOp, answer: &StoreAnswer) -> Option<String> {
        let failed = match answer {
            StoreAnswer::Failed { reason } => Some(reason.as_str()),
            _ => None,
        };
        let news = self.troubles.note(op, failed)?;
        let name = self.store.name();
        match (news, failed) {
            (News::Fails, Some(reason)) => Some(format!("the store {name}: {reason}")),
            _ => Some(format!("the store {name} answers again")),
        }
    }
}

/// The next operation that ends; never, where there is no store.
pub async fn next<S>(keeper: &mut Option<Keeper<S>>) -> Done {
    if let Some(keeper) = keeper
        && let Some(done) = keeper.ended.recv().await
    {
        return done;
    }
    std::future::pending().await
}

impl Lane {
    fn start<S: Operations>(
        name: &str,
        store: &Arc<S>,
        done: &mpsc::Sender<Done>,
    ) -> std::io::Result<Lane> {
        let (tasks, queue) = sync_channel(1);
        let (store, done) = (Arc::clone(store), done.clone());
        // Not joined: it may hang for as long as the file system does.
        std::thread::Builder::new()
            .name(name.into())
            .spawn(move || {
                for (asked, task) in queue {
                    let outcome = store.carry_out(task);
                    if done.blocking_send(Done { asked, outcome }).is_err() {
                        return;
                    }
                }
            })?;
        Ok(Lane { tasks, busy: false })
    }

    fn begin(&mut self, asked: Asked, task: Task) -> bool {
        let begun = !self.busy && self.tasks.try_send((asked, task)).is_ok();
        self.busy |= begun;
        begun
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::mpsc::Receiver;

    use super::*;

    /// A store whose log says when an operation began, and hangs until it is let go.
    struct Hanging {
        began: SyncSender<Task>,
        leave: Mutex<Receiver<Outcome>>,
    }

    impl Operations for Hanging {
        fn carry_out(&self, task: Task) -> Outcome {
            if task == Task::ReadBeacon {
                return Outcome::Answer(StoreAnswer::Beacon(Some(5)));
            }
            self.began.send(task).unwrap();
            self.leave.lock().unwrap().recv().unwrap()
        }

        fn name(&self) -> String {
            "/x".into()
        }
    }

    fn hanging() -> (Keeper<Hanging>, Receiver<Task>, SyncSender<Outcome>) {
        let (began, tasks) = sync_channel(MAX_THREADS);
        let (leave, wait) = sync_channel(MAX_THREADS);
        let leaves = Mutex::new(wait);
        let store = Hanging {
            began,
            leave: leaves,
        };
        let mut keeper = Keeper::start(store).unwrap();
        keeper.link_up();
        (keeper, tasks, leave)
    }

    #[tokio::test]
    async fn a_store_that_hangs_holds_a_few_threads_and_no_answer_goes_to_another_link() {
        let (mut keeper, tasks, leave) = hanging();
        let hangs = Some(StoreAnswer::failed(STORE_HANGS.into()));
        let few = MAX_READS as u64;
        for slot in 1..=few {
            assert_eq!(keeper.ask(slot, StoreAsk::Read { slot }), None);
        }
        let mut begun: Vec<u64> = (0..few)
            .map(|_| match tasks.recv().unwrap() {
                Task::Read { slot } => slot,
                other => panic!("{other:?}"),
            })
            .collect();
        begun.sort_unstable();
        assert_eq!(begun, (1..=few).collect::<Vec<_>>());
        // While it hangs, everything else of its kind fails at once, and nothing waits.
        for id in few + 1..1000 {
            assert_eq!(keeper.ask(id, StoreAsk::Read { slot: id }), hangs);
        }
        assert_ne!(keeper.troubles, Troubles::default());
        // The agent comes back; what its predecessor asked for ends only now.
        keeper.link_up();
        assert_eq!(keeper.ask(1, StoreAsk::Read { slot: 7 }), hangs);
        let mut told = Vec::new();
        for _ in 0..few {
            leave.send(Outcome::Answer(StoreAnswer::Absent)).unwrap();
        }
        for _ in 0..few {
            let done = keeper.ended.recv().await.unwrap();
            let (frames, news) = keeper.done(done);
            assert_eq!(frames, []);
            told.extend(news);
        }
        assert_eq!(told, ["the store /x answers again"]);
        // The threads are free, and nothing was left in a queue.
        assert_eq!((keeper.apart, keeper.reads.busy), (0, false));
        assert_eq!(keeper.ask(2, StoreAsk::Read { slot: 8 }), None);
        assert_eq!(tasks.recv().unwrap(), Task::Read { slot: 8 });
        leave.send(Outcome::Found(b"{}".to_vec())).unwrap();
        let done = keeper.ended.recv().await.unwrap();
        let answer = StoreAnswer::Found(Part {
            bytes: b"{}".to_vec(),
            last: true,
        });
        let found = ToAgent::Store { id: 2, answer };
        assert_eq!(keeper.done(done), (vec![found], None));
    }

    #[tokio::test]
    async fn a_create_waits_for_no_read() {
        let (mut keeper, tasks, leave) = hanging();
        let reads = MAX_READS as u64;
        for slot in 1..=reads {
            assert_eq!(keeper.ask(slot, StoreAsk::Read { slot }), None);
            assert!(matches!(tasks.recv().unwrap(), Task::Read { .. }));
        }
        let create = |slot| StoreAsk::Create {
            slot,
            part: Part {
                bytes: vec![1],
                last: true,
            },
        };
        assert_eq!(keeper.ask(20, create(9)), None);
        let bytes = vec![1];
        assert_eq!(tasks.recv().unwrap(), Task::Create { slot: 9, bytes });
        // One at a time.
        let hangs = StoreAnswer::failed(STORE_HANGS.into());
        assert_eq!(keeper.ask(21, create(9)), Some(hangs));
        for _ in 0..=reads {
            leave.send(Outcome::Answer(StoreAnswer::Absent)).unwrap();
        }
    }

    #[tokio::test]
    async fn the_beacon_does_not_wait_for_the_log() {
        let (mut keeper, tasks, _leave) = hanging();
        assert_eq!(keeper.ask(1, StoreAsk::Read { slot: 7 }), None);
        tasks.recv().unwrap();
        for id in 2..10 {
            assert_eq!(keeper.ask(id, StoreAsk::ReadBeacon), None);
            let done = keeper.ended.recv().await.unwrap();
            let answer = StoreAnswer::Beacon(Some(5));
            let frame = ToAgent::Store { id, answer };
            assert_eq!(keeper.done(done).0, [frame]);
        }
    }

    #[tokio::test]
    async fn an_object_is_created_once_it_is_whole() {
        let (mut keeper, tasks, _leave) = hanging();
        let bytes = vec![9; muster_protocol::storelog::MAX_ENTRY];
        let parts = Part::all(&bytes);
        let create = |part: &Part| StoreAsk::Create {
            slot: 3,
            part: part.clone(),
        };
        // The first half of one that never ends, on a link that does.
        assert_eq!(keeper.ask(1, create(&parts[0])), None);
        keeper.link_up();
        for part in &parts {
            assert_eq!(tasks.try_recv().ok(), None);
            assert_eq!(keeper.ask(1, create(part)), None);
        }
        assert_eq!(tasks.recv().unwrap(), Task::Create { slot: 3, bytes });
        // More than an entry may have is never kept.
        let endless = Part {
            last: false,
            ..parts[0].clone()
        };
        let told = (0..20).find_map(|_| keeper.ask(2, create(&endless)));
        assert!(matches!(told, Some(StoreAnswer::Failed { .. })), "{told:?}");
    }

    #[tokio::test]
    async fn a_directory_that_vanishes_says_nothing_and_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("store");
        std::fs::create_dir(&path).unwrap();
        let location = Location::Directory(path.clone());
        let store = JobStore::open(&location, "job").await.unwrap();
        let read = |slot| store.carry_out(Task::Read { slot });
        let create = |bytes: &[u8]| {
            let bytes = bytes.to_vec();
            store.carry_out(Task::Create { slot: 1, bytes })
        };
        let answer = |answer| Outcome::Answer(answer);
        assert_eq!(read(1), answer(StoreAnswer::Absent));
        assert_eq!(create(b"{}"), answer(StoreAnswer::Won));
        assert_eq!(create(b"[]"), answer(StoreAnswer::Exists));
        assert_eq!(read(1), Outcome::Found(b"{}".to_vec()));
        assert!(path.join("job/log/00000001.json").exists());
        let seen = || store.carry_out(Task::ReadBeacon);
        assert_eq!(seen(), answer(StoreAnswer::Beacon(None)));
        for value in [1, u64::MAX, 0] {
            let written = store.carry_out(Task::WriteBeacon { value });
            assert_eq!(written, answer(StoreAnswer::BeaconWritten));
            assert_eq!(seen(), answer(StoreAnswer::Beacon(Some(value))));
        }
        for torn in ["", "not hex", &"0".repeat(99)] {
            std::fs::write(path.join("job/beacon"), torn).unwrap();
            assert_eq!(seen(), answer(StoreAnswer::Beacon(None)));
        }
        std::fs::remove_dir_all(&path).unwrap();
        let beacon = store.carry_out(Task::WriteBeacon { value: 1 });
        for outcome in [read(1), read(2), create(b"{}"), beacon, seen()] {
            let Outcome::Answer(StoreAnswer::Failed { reason }) = outcome else {
                panic!("{outcome:?}")
            };
            assert!(reason.contains("restart the job"), "{reason}");
        }
        let again = JobStore::open(&location, "job").await;
        assert!(format!("{:#}", again.unwrap_err()).contains("--store"));
    }
}
