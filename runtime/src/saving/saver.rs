//! A rank's saves.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use muster_checkpoint::Slice;
use muster_checkpoint::hex::Bytes;
use muster_checkpoint::inventory::{self, Inventory};
use muster_checkpoint::manifest::Blob;
use muster_checkpoint::part::{Note, PartError};
use muster_checkpoint::plan::{Held, Plan, PlanError, Rank, Shard};
use muster_checkpoint::slot::{FarError, Image, SlotError, Source, State};
use muster_protocol::control::saving::word;

use super::devices::Devices;
use super::memory::{Memory, Part, Way};
use super::slots::Store;
use crate::env::WorkerEnv;
use crate::page::Page;
use crate::session::Session;

/// The most threads that copy; memory is not faster by more.
const THREADS: usize = 4;

/// How long a save waits for a slot, unless [`Saver::wait`] says otherwise.
const WAIT: Duration = Duration::from_secs(600);

/// A rank of the generation, as the plan sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Any number that is the same for the ranks of one node only.
    pub node: u32,
    /// Its tensors in memory.
    pub held: Vec<Held>,
}

/// A save that is sealed: from now on it does not depend on this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Bytes that this rank copied.
    pub bytes: u64,
    /// How long it copied.
    pub copied: Duration,
    /// How long it waited before for a slot: both were still being written, or not made yet.
    pub waited: Duration,
    /// Nothing was copied: both were, and the job was started with `--checkpoint-busy skip`.
    pub left_out: bool,
}

/// Why nothing was saved. The training may go on; the next save may succeed.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    #[error(
        "the job has no store, so a checkpoint would go nowhere: start it with `muster run --store DIR`"
    )]
    NoStore,
    #[error(
        "two checkpoint slots of {need} bytes are wanted, and there is room for {room} bytes each: raise --checkpoint-memory of `muster run`"
    )]
    Budget { need: u64, room: u64 },
    #[error("the launcher got no memory for the checkpoint slots; its own words say why")]
    Memory,
    #[error(
        "the launcher gave no checkpoint slots in time: use a runtime and a `muster` of the same release"
    )]
    NoAnswer,
    #[error(
        "cannot open the checkpoint slot {path} of the launcher: the worker has to be of the launcher's user, and see its processes"
    )]
    Descriptor {
        path: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "both checkpoint slots are still being written ({slots:?}): save less often, or wait longer"
    )]
    Busy { slots: [(State, u64); 2] },
    #[error("`{name}` is to be saved, and was not handed over as {bytes} bytes")]
    State { name: String, bytes: u64 },
    #[error(
        "this rank is {rank} of {world}, and the plan is for {peers} ranks: hand over what each holds"
    )]
    Peers { rank: u32, world: u32, peers: usize },
    /// The slot is free again; the last save that was sealed stays.
    #[error("tensors on GPUs could not be copied, and nothing was saved")]
    Device(#[source] FarError),
    /// The driver did not say whether what was begun has ended. The memory that copies go to is kept from everybody,
    /// and the last save that was sealed stays.
    #[error(
        "tensors on GPUs could not be copied, and the driver does not say whether copies are still under way: nothing was saved, the checkpoint slot stays taken, and this process copies nothing more from its GPUs; end it, so that another worker is started"
    )]
    Lost(#[source] FarError),
    #[error(transparent)]
    Plan(#[from] PlanError),
    #[error(transparent)]
    Slot(#[from] SlotError),
    #[error(transparent)]
    Note(#[from] PartError),
}

/// Saves one rank's part of one generation's checkpoints.
#[derive(Debug)]
pub struct Saver {
    page: Arc<Page>,
    env: WorkerEnv,
    plan: Plan,
    /// Of the newest save: its blobs change, the rest stays the same.
    note: Note,
    slots: Store,
    devices: Devices,
    threads: usize,
    wait: Duration,
}

impl Saver {
    /// Of a generation whose ranks hold this, in rank order: every rank hands over the same. Asks the
    /// launcher for slots. It finds the memory while the training goes on, a second or so for each gigabyte: the
    /// first save waits for the rest of that.
    ///
    /// # Errors
    /// The ranks' parts do not fit together, or there will be no slots.
    pub fn new(session: &mut Session, env: &WorkerEnv, peers: &[Peer]) -> Result<Saver, SaveError> {
        let ranks: Vec<Rank<'_>> = (peers.iter())
            .map(|peer| Rank {
                node: peer.node,
                held: &peer.held,
            })
            .collect();
        Self::sharing(session, env, &ranks)
    }

    /// The same of ranks that may share what they hold: a list for a thousand ranks is made once.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn sharing(
        session: &mut Session,
        env: &WorkerEnv,
        ranks: &[Rank<'_>],
    ) -> Result<Saver, SaveError> {
        let mut saver = Saver::of(session.page(), env, ranks, None)?;
        saver.slots = saver.slots.promised(&saver.page)?;
        Ok(saver)
    }

    /// The same, in the generation after the one of `before`, whose slots it goes on with if they are large
    /// enough. Does not wait for others: the launcher is asked while the training goes on.
    ///
    /// # Errors
    /// The ranks' parts do not fit together.
    pub(crate) fn of(
        page: Arc<Page>,
        env: &WorkerEnv,
        ranks: &[Rank<'_>],
        before: Option<Saver>,
    ) -> Result<Saver, SaveError> {
        let (rank, world, peers) = (env.rank, env.world, ranks.len());
        let refused = SaveError::Peers { rank, world, peers };
        let me = ranks.get(rank as usize).filter(|_| peers == world as usize);
        let Some(me) = me else {
            return Err(refused);
        };
        let plan = Plan::new(ranks)?;
        let Some(shard) = plan.shards.get(rank as usize) else {
            return Err(refused);
        };
        let mut note = Note {
            file: (!shard.pieces.is_empty()).then(|| shard.file.clone()),
            blobs: Vec::new(),
            draft: (rank == 0).then(|| plan.draft()),
            inventory: Some(Inventory {
                // As long as they will be.
                samples: vec![Some(Bytes([0; 8])); plan.sampled(rank).count()],
                ..plan.inventory().clone()
            }),
        };
        let local = ranks.iter().filter(|other| other.node == me.node);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / local.count().max(1)).clamp(1, THREADS);
        let bytes = note.encode()?.len() as u64;
        if let Some(inventory) = &mut note.inventory {
            inventory.samples.clear();
        }
        let (slots, mut devices, wait) = match before {
            Some(before) => (before.slots, before.devices, before.wait),
            None => (Store::None, Devices::default(), WAIT),
        };
        devices.renew();
        let mut saver = Saver {
            page,
            env: env.clone(),
            plan,
            note,
            slots: Store::None,
            devices,
            threads,
            wait,
        };
        let image = saver.image();
        saver.slots = slots.want(&saver.page, image, bytes, threads);
        Ok(saver)
    }

    /// Bytes of this rank's image.
    fn image(&self) -> u64 {
        let shard = self.plan.shards.get(self.env.rank as usize);
        shard.map_or(0, |shard| shard.layout.bytes)
    }

    /// How long a save waits for a slot while both are being written: zero leaves such a save out, on
    /// this rank, and so for all.
    pub fn wait(&mut self, longest: Duration) {
        self.wait = longest;
    }

    /// How many threads copy, at most 4. From the start the cores are divided by the ranks of this node
    /// that [`new`](Self::new) was told of.
    pub fn threads(&mut self, threads: usize) {
        self.threads = threads.clamp(1, THREADS);
    }

    /// Uses this driver for tensors on GPUs, instead of the one that is found when the first is saved.
    #[cfg(feature = "cuda")]
    pub fn use_driver(&mut self, driver: Arc<crate::cuda::Driver>) {
        self.devices.use_driver(driver);
    }

    /// How tensors on GPUs got into the slot of the last save that had any. It is said on stderr, too, once.
    pub fn way(&self) -> Option<&Way> {
        self.devices.way()
    }

    /// The slices that this rank writes something of, by tensor: [`save`](Self::save) asks for these alone.
    pub fn writes(&self) -> impl Iterator<Item = (&str, &Slice)> {
        let mine = self.plan.shards.get(self.env.rank as usize);
        (mine.into_iter().flat_map(|shard| &shard.pieces))
            .map(|piece| (self.plan.name(piece), &piece.held))
    }

    /// Does what the first save of tensors on GPUs would do first, in the background: registers both slots with the
    /// driver, as soon as they are there. `state` is that of [`save`](Self::save), and only looked at. Errors here
    /// occur there again, and are told there.
    pub fn prepare<'a, M: Into<Memory<'a>>>(&mut self, state: impl Fn(&str, &Slice) -> Option<M>) {
        let Some(shard) = self.plan.shards.get(self.env.rank as usize) else {
            return;
        };
        let Ok((_, parts)) = gather(&self.plan, shard, state) else {
            return;
        };
        if let Some(preparation) = self.devices.preparation(&parts) {
            let slots = std::mem::replace(&mut self.slots, Store::None);
            self.slots = slots.then(preparation);
        }
    }

    /// Slices that other ranks hold, too, and of which [`look`](Self::look) asks for the first bytes.
    pub fn looks(&self) -> impl Iterator<Item = (&str, &Slice)> {
        self.plan.sampled(self.env.rank).flatten()
    }

    /// Looks at what other ranks are to have alike in the next save: it is given up where they do not. `first` gives
    /// the first [`SAMPLE`](inventory::SAMPLE) bytes of a slice, or all if it has fewer; none: this one is not looked
    /// at. All ranks call it before they save, or none.
    pub fn look<'a>(&mut self, first: impl Fn(&str, &Slice) -> Option<&'a [u8]>) {
        let sample = |of: Option<(&str, &Slice)>| {
            let (name, slice) = of?;
            Some(inventory::sample(first(name, slice)?))
        };
        let samples = self.plan.sampled(self.env.rank).map(sample).collect();
        if let Some(inventory) = &mut self.note.inventory {
            inventory.samples = samples;
        }
    }

    /// Copies this rank's part of the state before `step` into a slot. All ranks save the same steps,
    /// each higher than the one before.
    ///
    /// `state` gives the bytes of a slice that this rank said it holds, in C order, little-endian, wherever they
    /// are. With the first tensors on GPUs both slots are registered with the driver, which takes a while for
    /// large ones, unless that [has been done](Self::prepare).
    /// `blobs` are state that is no tensor; a name that several ranks use has to be told apart
    /// (`rng/3`).
    ///
    /// # Errors
    /// Nothing was saved, and why.
    pub fn save<'a, M: Into<Memory<'a>>>(
        &mut self,
        step: u64,
        state: impl Fn(&str, &Slice) -> Option<M>,
        blobs: Vec<Blob>,
    ) -> Result<Saved, SaveError> {
        let Some(shard) = self.plan.shards.get(self.env.rank as usize) else {
            return Err(SaveError::Peers {
                rank: self.env.rank,
                world: self.env.world,
                peers: self.plan.shards.len(),
            });
        };
        let (sources, parts) = gather(&self.plan, shard, state)?;
        self.devices.check(&parts)?;
        self.note.blobs = blobs;
        if let Some(draft) = &mut self.note.draft {
            let since = SystemTime::now().duration_since(UNIX_EPOCH);
            draft.saved_at = since.map_or(0, |since| since.as_secs());
        }
        let note = self.note.encode()?;
        if let Some(inventory) = &mut self.note.inventory {
            // The next save has other values.
            inventory.samples.clear();
        }
        let (bytes, long) = (shard.layout.bytes, note.len() as u64);
        let began = Instant::now();
        let slots = self.slots.get(&self.page, bytes, long, self.threads)?;
        let made = began.elapsed();
        let Some((slot, waited)) = slots.free(&self.page, step, self.wait)? else {
            return Ok(Saved {
                bytes: 0,
                copied: Duration::ZERO,
                waited: Duration::ZERO,
                left_out: true,
            });
        };
        let image = Image {
            step,
            generation: Bytes(self.env.digest.0),
            bytes,
            sources: &sources,
            note: &note,
        };
        muster_fault::point("worker.fill");
        let copied = (self.devices).fill(slots.all(), slot, &image, &parts, self.threads)?;
        muster_fault::point("worker.sealed");
        // What is made once says nothing of the next save.
        self.tell(step, bytes, copied, waited);
        Ok(Saved {
            bytes,
            copied,
            waited: made + waited,
            left_out: false,
        })
    }

    /// Tells for how long the save held this rank up: the job reckons with it.
    fn tell(&self, step: u64, bytes: u64, copied: Duration, waited: Duration) {
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        for (at, value) in [
            (word::STEP, step),
            (word::BYTES, bytes),
            (word::COPIED, micros(copied)),
            (word::WAITED, micros(waited)),
        ] {
            self.page.store(at, value);
        }
        self.page.add(word::SAVES, 1);
    }
}

/// Sources of a shard's image: those in this process's memory, and those on devices.
fn gather<'s, 'a: 's, M: Into<Memory<'a>>>(
    plan: &Plan,
    shard: &'s Shard,
    state: impl Fn(&str, &Slice) -> Option<M>,
) -> Result<(Vec<Source<'s>>, Vec<Part<'a>>), SaveError> {
    let mut sources = Vec::with_capacity(shard.pieces.len() + 1);
    let mut parts = Vec::new();
    sources.push(Source {
        at: 0,
        bytes: &shard.layout.header,
    });
    for piece in &shard.pieces {
        let name = plan.name(piece);
        let whole = state(name, &piece.held).map(Into::into);
        let (at, end) = (piece.at, piece.skip + piece.bytes);
        match whole.and_then(|whole: Memory<'a>| whole.part(piece.skip..end)) {
            Some(Memory::Host(bytes)) => sources.push(Source { at, bytes }),
            Some(Memory::Device(from)) if piece.bytes > 0 => parts.push(Part { at, from }),
            Some(Memory::Device(_)) => {}
            None => {
                let name = name.to_owned();
                return Err(SaveError::State { name, bytes: end });
            }
        }
    }
    sources.sort_unstable_by_key(|source| source.at);
    parts.sort_unstable_by_key(|part| part.at);
    Ok((sources, parts))
}
