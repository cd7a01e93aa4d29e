//! One node: a launcher with its guard, and one rank that has a tensor of its own. It does what it reads, line by line,
//! and answers each line with one.

use std::error::Error;
use std::io::BufRead;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use muster_checkpoint::hex::{self, Bytes};
use muster_checkpoint::part::Note;
use muster_checkpoint::plan::{Held, Plan, Rank};
use muster_checkpoint::slot::{Image, Slot, Source};
use muster_cli::kept::Rules;
use muster_cli::run::guard::Guard;
use muster_cli::run::saves::replicas::{Choice, Server, Settings};
use muster_cli::run::saves::{CheckpointIo, Done, Place, Ranks, Saves, Told};
use muster_launcher::slots::Ask;
use muster_protocol::checkpoint::{Save, SlotId, Written};
use muster_protocol::codec;
use muster_protocol::control::slots::{Given, SLOTS};
use muster_protocol::local::{Replicated, SaveAsk, SaveNews, Start};
use muster_protocol::memory::{Key, Peer, Peers};
use muster_protocol::{Digest, LauncherId, Time};
use muster_runtime::saving::Dtype;
use muster_store::{Location, Options, Store};

pub(crate) type Failure = Box<dyn Error>;

pub(crate) const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

const GENERATION: Digest = Digest([9; 32]);

/// The key that all nodes and the restoring process share.
pub(crate) fn key() -> Key {
    Key::of_cluster(Some(b"a bench")).of_job(Digest([8; 32]))
}

pub(crate) fn launcher_of(node: usize) -> LauncherId {
    LauncherId([node as u8 + 1; 8])
}

/// State of a node's rank before each save.
pub(crate) fn state(node: usize, bytes: u64) -> Vec<u8> {
    let of = |at: u64| (at ^ (at >> 8) ^ (at >> 17)) as u8 ^ node as u8;
    (0..bytes).map(of).collect()
}

/// The name of a node's tensor.
pub(crate) fn tensor(node: usize) -> String {
    format!("w{node}")
}

/// Which of how many nodes it is, where the store is, and how much each rank has.
#[derive(Clone, Copy)]
pub(crate) struct Which<'a> {
    pub(crate) node: usize,
    pub(crate) nodes: usize,
    pub(crate) place: &'a Path,
    pub(crate) choice: Choice,
    pub(crate) bytes: u64,
}

/// The rank, which asks for its slots once.
#[derive(Default)]
struct One {
    bytes: u64,
    slots: OnceLock<[Arc<Slot>; SLOTS]>,
}

impl Ranks for One {
    fn asks(&self) -> Vec<(u16, Ask)> {
        let ask = Ask {
            number: 1,
            image: self.bytes,
            note: 1 << 20,
        };
        let asks = self.slots.get().is_none();
        asks.then_some((0, ask)).into_iter().collect()
    }

    fn give(&self, _: u16, _: u64, _: Given, slots: Option<&[Arc<Slot>; SLOTS]>, _: u64) {
        if let Some(slots) = slots {
            let _once = self.slots.set(slots.clone());
        }
    }

    fn runs(&self, _: u16) -> bool {
        true
    }
}

struct Node<'a> {
    which: Which<'a>,
    saves: Saves,
    plan: Plan,
    one: One,
    state: Vec<u8>,
    runtime: tokio::runtime::Runtime,
}

/// Does what it reads until its input ends. Its first line says where its guard is.
pub(crate) fn run(which: Which<'_>) -> Result<(), Failure> {
    let (mut node, guard) = Node::new(which)?;
    println!("{}", SocketAddr::new(LOOPBACK, guard.port()));
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let mut words = line.split(' ');
        let what = words.next().unwrap_or_default();
        let rest: Vec<&str> = words.collect();
        let step = || -> Result<u64, Failure> { Ok(rest.first().ok_or("no step")?.parse()?) };
        let said = match what {
            "begin" => node.begin(&rest)?,
            "fill" => node.fill(step()?)?,
            "seal" => node.seal(step()?)?,
            "commit" => node.commit(step()?),
            "write" => node.write(step()?)?,
            "assemble" => node.assemble(&rest)?,
            other => return Err(format!("'{other}' is nothing to do").into()),
        };
        println!("{said}");
    }
    Ok(())
}

fn slot_of(step: u64) -> SlotId {
    SlotId {
        k: 0,
        side: (step % SLOTS as u64) as u8,
    }
}

fn save_of(step: u64) -> Save {
    Save {
        generation: GENERATION,
        attempt: 1,
        step,
    }
}

impl<'a> Node<'a> {
    fn new(which: Which<'a>) -> Result<(Node<'a>, Guard), Failure> {
        let Which { node, nodes, .. } = which;
        let id = launcher_of(node);
        let server = Server::open(LOOPBACK)?;
        let guard = Guard::open(LOOPBACK, id, Some(server.port()))?;
        let location = Location::Directory(which.place.to_owned());
        let store = Store::open(&location, &Options::of_process())?;
        let place = Place {
            location: location.to_string(),
            store: store.within("job")?,
            cache: None,
            io: CheckpointIo::default(),
            job: "job".into(),
        };
        let mut saves = Saves::new(Some(place), u64::MAX, Rules::default());
        saves.share(Settings {
            server,
            launcher: id,
            who: format!("n{node}"),
            replicas: which.choice,
        })?;
        let held = |node| [Held::whole(&tensor(node), Dtype::U8, &[which.bytes])];
        let held: Vec<[Held; 1]> = (0..nodes).map(held).collect();
        let rank = |(node, held)| Rank { node, held };
        let ranks: Vec<Rank<'_>> = (0..).zip(held.iter().map(|h| &h[..])).map(rank).collect();
        let plan = Plan::new(&ranks)?;
        let one = One {
            bytes: plan.shards[node].layout.bytes,
            slots: OnceLock::new(),
        };
        let made = Node {
            which,
            saves,
            plan,
            one,
            state: state(node, which.bytes),
            runtime: tokio::runtime::Builder::new_current_thread().build()?,
        };
        Ok((made, guard))
    }

    /// The next result of a thread. A message to people about missing replicas is an error.
    fn next(&mut self) -> Result<Told, Failure> {
        let done: Option<Done> = self.runtime.block_on(self.saves.next());
        let done = done.ok_or("the launcher's threads are gone")?;
        let told = self.saves.finished(done, &self.one);
        let bad = ["is not copied", "is without a stripe"];
        match (told.people.iter()).find(|text| bad.iter().any(|bad| text.contains(bad))) {
            Some(text) => Err(text.clone().into()),
            None => Ok(told),
        }
    }

    /// The next news of this kind for the agent.
    fn news<T>(&mut self, is_it: impl Fn(SaveNews) -> Option<T>) -> Result<T, Failure> {
        loop {
            let told = self.next()?;
            for news in told.agent {
                match news {
                    SaveNews::WriteFailed { why, .. } | SaveNews::AssembleFailed { why, .. } => {
                        return Err(why.into());
                    }
                    news => {
                        if let Some(found) = is_it(news) {
                            return Ok(found);
                        }
                    }
                }
            }
        }
    }

    /// The job begins with these guards' nodes, in their order; the rank has its slots.
    fn begin(&mut self, guards: &[&str]) -> Result<String, Failure> {
        let Which { node, nodes, .. } = self.which;
        let mut others = Vec::new();
        for other in (1..nodes).map(|k| (node + k) % nodes) {
            others.push(Peer {
                launcher: launcher_of(other),
                guard: guards.get(other).ok_or("too few nodes")?.parse()?,
            });
        }
        let nowhere = SocketAddr::new(LOOPBACK, 1);
        self.saves.begins(&Start {
            digest: GENERATION,
            lineage: Digest([8; 32]),
            attempt: 1,
            number: 1,
            node_rank: node as u32,
            nodes: nodes as u32,
            first_rank: node as u32,
            slots: 1,
            world: nodes as u32,
            master: nowhere,
            master_guard: nowhere,
            master_launcher: LauncherId([0; 8]),
            restart_count: 0,
            restore: None,
            peers: Box::new(Peers {
                key: key(),
                group: others.clone(),
                others,
                committed: None,
            }),
            why: String::new(),
        });
        self.saves.look(&self.one, Time::ZERO);
        while self.one.slots.get().is_none() {
            self.next()?;
        }
        Ok("begun".into())
    }

    /// The rank seals its state; its launcher has not seen that yet.
    fn fill(&self, step: u64) -> Result<String, Failure> {
        let shard = &self.plan.shards[self.which.node];
        let mut sources = vec![Source {
            at: 0,
            bytes: &shard.layout.header,
        }];
        sources.extend(shard.pieces.iter().map(|piece| Source {
            at: piece.at,
            bytes: &self.state[piece.skip as usize..][..piece.bytes as usize],
        }));
        sources.sort_unstable_by_key(|source| source.at);
        let note = Note {
            file: Some(shard.file.clone()),
            blobs: Vec::new(),
            draft: (self.which.node == 0).then(|| self.plan.draft()),
            inventory: Some(self.plan.inventory().clone()),
        };
        let image = Image {
            step,
            generation: Bytes(GENERATION.0),
            bytes: shard.layout.bytes,
            sources: &sources,
            note: &note.encode()?,
        };
        let slots = self.one.slots.get().ok_or("no slots")?;
        slots[usize::from(slot_of(step).side)].fill(&image, 2)?;
        Ok("filled".into())
    }

    /// The launcher sees it; how many seconds it takes until all of it is held elsewhere.
    fn seal(&mut self, step: u64) -> Result<String, Failure> {
        let began = Instant::now();
        self.saves.look(&self.one, Time::ZERO);
        self.news(|news| match news {
            SaveNews::Replicas(Replicated { whole, .. }) => (whole == Some(step)).then_some(()),
            _ => None,
        })?;
        Ok(began.elapsed().as_secs_f64().to_string())
    }

    /// The save counts as committed: what is older is let go.
    fn commit(&mut self, step: u64) -> String {
        let generation = GENERATION;
        self.saves.ask(SaveAsk::Committed { generation, step });
        self.saves.ask(SaveAsk::Free {
            slot: slot_of(step),
        });
        "committed".into()
    }

    /// Writes its part into the store; what is to be known of it, in hexadecimal.
    fn write(&mut self, step: u64) -> Result<String, Failure> {
        let (slot, save) = (slot_of(step), save_of(step));
        self.saves.ask(SaveAsk::Write { slot, save });
        let rank = self.which.node as u32;
        let written = self.news(|news| match news {
            SaveNews::Written { bytes, summary, .. } => Some(Written {
                rank,
                bytes,
                summary,
            }),
            _ => None,
        })?;
        Ok(hex::encode(&codec::encode_frame(&written)?))
    }

    /// Makes one manifest of what all have written; what it is called.
    fn assemble(&mut self, words: &[&str]) -> Result<String, Failure> {
        let (step, parts) = words.split_first().ok_or("no step")?;
        let mut all = Vec::new();
        for part in parts {
            let frame = hex::decode(part).ok_or("no part")?;
            all.push(codec::decode_frame::<Written>(&frame)?);
        }
        self.saves.ask(SaveAsk::Assemble {
            save: save_of(step.parse()?),
            parts: all,
            last: true,
        });
        let manifest = self.news(|news| match news {
            SaveNews::Assembled { manifest, .. } => Some(manifest),
            _ => None,
        })?;
        Ok(manifest.hex())
    }
}
