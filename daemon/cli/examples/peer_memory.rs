//! Recovery from a peer's memory, beside plain TCP on loopback in the same run:
//! `peer_memory [BYTES [TURNS]]`, 1 GiB and 5 turns unless it says otherwise.
//!
//! Two launchers, each a process: one has a sealed slot, which the other comes to hold a copy of. Then the first is
//! killed and its file deleted, and this process restores as a worker does, verifying every chunk: from the copy. In
//! turns with that, the same bytes come over plain connections, one and four. Prints one line of JSON.

use std::error::Error;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use muster_checkpoint::hex::{Bytes, Id};
use muster_checkpoint::part::Note;
use muster_checkpoint::plan::{Held, Plan, Rank};
use muster_checkpoint::slot::{Image, Slot, Source};
use muster_cli::kept::Rules;
use muster_cli::run::guard::Guard;
use muster_cli::run::saves::replicas::{Choice, Server, Settings};
use muster_cli::run::saves::{Ask, CheckpointIo, Done, Place, Ranks, Saves, Told};
use muster_protocol::checkpoint::{Save, SlotId, Written};
use muster_protocol::control::slots::{Given, SLOTS};
use muster_protocol::local::{SaveAsk, SaveNews, Start};
use muster_protocol::memory::{Key, Peer, Peers, Whom};
use muster_protocol::{Digest, LauncherId, Time};
use muster_runtime::saving::{Dtype, Restore, Slice, Want};
use muster_store::{Location, Options, Store};

type Failure = Box<dyn Error>;

const GENERATION: Digest = Digest([9; 32]);
/// Of the process that holds the copy; the other one is nobody's peer.
const TAKER: LauncherId = LauncherId([2; 8]);
const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const SAVE: Save = Save {
    generation: GENERATION,
    attempt: 1,
    step: 7,
};

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| args.get(at).map_or(Ok(default), |text| text.parse());
    let arg = |at: usize| args.get(at).ok_or("too few arguments");
    match args.first().map(String::as_str) {
        Some("take") => take(Path::new(arg(1)?)),
        Some("hold") => hold(Path::new(arg(1)?), number(2, 0)?, arg(3)?.parse()?),
        _ => measure(number(0, 1 << 30)?, number(1, 5)?.max(1)),
    }
}

fn key() -> Key {
    Key::of_cluster(Some(b"a bench")).of_job(Digest([8; 32]))
}

/// A launcher and its guard.
fn launcher(
    place: &Path,
    who: &str,
    id: LauncherId,
    others: Vec<Peer>,
) -> Result<(Saves, Guard), Failure> {
    let server = Server::open(LOOPBACK)?;
    let guard = Guard::open(LOOPBACK, id, Some(server.port()))?;
    let location = Location::Directory(place.to_owned());
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
        who: who.into(),
        replicas: Choice::Copy,
    })?;
    let nowhere = SocketAddr::new(LOOPBACK, 1);
    saves.begins(&Start {
        digest: GENERATION,
        lineage: Digest([8; 32]),
        attempt: 1,
        number: 1,
        node_rank: 0,
        nodes: 1,
        first_rank: 0,
        slots: 1,
        world: 1,
        master: nowhere,
        master_guard: nowhere,
        master_launcher: LauncherId([0; 8]),
        restart_count: 0,
        restore: None,
        peers: Box::new(Peers {
            key: key(),
            others,
            group: Vec::new(),
            committed: None,
        }),
        why: String::new(),
    });
    Ok((saves, guard))
}

/// The launcher that comes to hold the copy, until its input ends.
fn take(place: &Path) -> Result<(), Failure> {
    let (_saves, guard) = launcher(place, "peer", TAKER, Vec::new())?;
    println!("{}", SocketAddr::new(LOOPBACK, guard.port()));
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// One worker, which asks for its slots once.
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

/// The launcher whose worker seals: says how long the copy took, and what the manifest is called.
fn hold(place: &Path, bytes: u64, peer: SocketAddr) -> Result<(), Failure> {
    let held = [Held::whole("w", Dtype::U8, &[bytes])];
    let plan = Plan::new(&[Rank {
        node: 0,
        held: &held,
    }])?;
    let shard = &plan.shards[0];
    let one = One {
        bytes: shard.layout.bytes,
        slots: OnceLock::new(),
    };
    let peer = Peer {
        launcher: TAKER,
        guard: peer,
    };
    let (mut saves, _guard) = launcher(place, "lost", LauncherId([1; 8]), vec![peer])?;
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let next = |saves: &mut Saves| -> Result<Told, Failure> {
        let done: Option<Done> = runtime.block_on(saves.next());
        Ok(saves.finished(done.ok_or("the launcher's threads are gone")?, &one))
    };
    saves.look(&one, Time::ZERO);
    while one.slots.get().is_none() {
        next(&mut saves)?;
    }
    let state = state(bytes);
    let mut sources = vec![Source {
        at: 0,
        bytes: &shard.layout.header,
    }];
    sources.extend(shard.pieces.iter().map(|piece| Source {
        at: piece.at,
        bytes: &state[piece.skip as usize..][..piece.bytes as usize],
    }));
    sources.sort_unstable_by_key(|source| source.at);
    let note = Note {
        file: Some(shard.file.clone()),
        blobs: Vec::new(),
        draft: Some(plan.draft()),
    };
    let image = Image {
        step: SAVE.step,
        generation: Bytes(GENERATION.0),
        bytes: shard.layout.bytes,
        sources: &sources,
        note: &note.encode()?,
    };
    let slots = one.slots.get().ok_or("no slots")?;
    slots[0].fill(&image, 2)?;
    let began = Instant::now();
    saves.look(&one, Time::ZERO);
    while !next(&mut saves)?
        .people
        .iter()
        .any(|text| text.contains("in the memory of"))
    {}
    let copied = began.elapsed();
    let slot = SlotId { k: 0, side: 0 };
    saves.ask(SaveAsk::Write { slot, save: SAVE });
    let written = loop {
        let news = next(&mut saves)?.agent.into_iter().next();
        match news {
            Some(SaveNews::Written { bytes, summary, .. }) => {
                break Written {
                    rank: 0,
                    bytes,
                    summary,
                };
            }
            Some(SaveNews::WriteFailed { why, .. }) => return Err(why.into()),
            _ => {}
        }
    };
    saves.ask(SaveAsk::Assemble {
        save: SAVE,
        parts: vec![written],
        last: true,
    });
    let manifest = loop {
        match next(&mut saves)?.agent.into_iter().next() {
            Some(SaveNews::Assembled { manifest, .. }) => break manifest,
            Some(SaveNews::AssembleFailed { why, .. }) => return Err(why.into()),
            _ => {}
        }
    };
    println!("{} {}", copied.as_secs_f64(), manifest.hex());
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

fn state(bytes: u64) -> Vec<u8> {
    (0..bytes)
        .map(|at| (at ^ (at >> 8) ^ (at >> 17)) as u8)
        .collect()
}

/// A process of this program, and the first line that it says. Ends with its owner.
struct Process(Child);

impl Process {
    fn start(args: &[&str]) -> Result<(Process, String), Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = Process(command.spawn()?);
        let output = process.0.stdout.take().ok_or("no output")?;
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        match line.trim() {
            "" => Err(format!("{args:?} failed").into()),
            line => Ok((process, line.to_owned())),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _reaped = self.0.wait();
    }
}

fn measure(bytes: u64, turns: u64) -> Result<(), Failure> {
    let dir = tempfile::tempdir()?;
    let place = dir
        .path()
        .to_str()
        .ok_or("the path of a temporary folder is no text")?;
    let (taker, guard) = Process::start(&["take", place])?;
    let (holder, said) = Process::start(&["hold", place, &bytes.to_string(), &guard])?;
    let (copied, manifest) = said.split_once(' ').ok_or("no manifest")?;
    let copied: f64 = copied.parse()?;
    let manifest = Id::parse(manifest).ok_or("no manifest")?;
    // It is lost, and what it wrote.
    drop(holder);
    let job = dir.path().join("job");
    std::fs::remove_dir_all(job.join("data"))?;
    let whom = Whom {
        key: key(),
        // Of a node that is new to the job.
        own: 1,
        launcher: LauncherId([1; 8]),
        others: vec![Peer {
            launcher: TAKER,
            guard: guard.parse()?,
        }],
    };
    let expected = state(bytes);
    let mut into = vec![1; bytes as usize];
    let (mut restored, mut one, mut four) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..turns {
        one.push(plain(&expected, &mut into, 1)?.as_secs_f64());
        four.push(plain(&expected, &mut into, 4)?.as_secs_f64());
        into.fill(0);
        let began = Instant::now();
        let checkpoint = Restore::open_with(&job, manifest, &whom, 0)?;
        let want = Want {
            name: "w",
            dtype: Dtype::U8,
            shape: &[bytes],
            slice: Slice::whole(&[bytes]),
            into: &mut into,
        };
        checkpoint.load(&mut [want])?;
        restored.push(began.elapsed().as_secs_f64());
        let origins = checkpoint.origins();
        let of_peer = origins
            .from
            .first()
            .is_some_and(|(who, count)| who == "peer's memory" && *count >= bytes);
        if into != expected || !of_peer {
            return Err(format!("not restored from the peer: {origins:?}").into());
        }
    }
    drop(taker);
    let rate = |mut seconds: Vec<f64>| {
        seconds.sort_by(f64::total_cmp);
        bytes as f64 / seconds[seconds.len() / 2]
    };
    let (restored, one, four) = (rate(restored), rate(one), rate(four));
    println!(
        "{{\"bytes\": {bytes}, \"turns\": {turns}, \"restore\": {restored:.0}, \"tcp\": {one:.0}, \"tcp_four\": {four:.0}, \"share_of_tcp\": {:.3}, \"share_of_tcp_four\": {:.3}, \"copied_in\": {copied:.3}}}",
        restored / one,
        restored / four,
    );
    Ok(())
}

/// The bytes over so many plain connections, into memory that is there.
fn plain(from: &[u8], into: &mut [u8], connections: usize) -> Result<Duration, Failure> {
    let listener = TcpListener::bind((LOOPBACK, 0))?;
    let at = listener.local_addr()?;
    let share = from.len().div_ceil(connections).max(1);
    let mut pairs = Vec::new();
    for _ in 0..connections {
        let to = TcpStream::connect(at)?;
        pairs.push((to, listener.accept()?.0));
    }
    let began = Instant::now();
    std::thread::scope(|scope| {
        let parts = from.chunks(share).zip(into.chunks_mut(share));
        let mut threads = Vec::new();
        for ((mut to, mut stream), (from, into)) in pairs.into_iter().zip(parts) {
            threads
                .push(scope.spawn(move || from.chunks(1 << 20).try_for_each(|p| to.write_all(p))));
            threads.push(scope.spawn(move || stream.read_exact(into)));
        }
        for thread in threads {
            thread
                .join()
                .map_err(|_| "a thread of the plain copy panicked")??;
        }
        Ok::<(), Failure>(())
    })?;
    Ok(began.elapsed())
}
