//! Measures the cost of saves that other nodes hold in memory, and how fast a lost node's bytes come back from there,
//! beside plain TCP on loopback in the same run: `peer_memory [REPLICAS [NODES [BYTES [SAVES [TURNS]]]]]`, as
//! `--replicas` has it; `1`, two nodes, 1 GiB a rank, 2 saves and 5 turns unless it says otherwise.
//!
//! Each node is a process of this program with one rank. All seal a save at once, and it is over when all of it is
//! held. Then the first node is killed and all files of the checkpoint deleted, and this process restores that rank's
//! tensor as a worker of a new node does, verifying every chunk. In turns with that, the same bytes come over plain
//! connections, one and four. Prints one line of JSON.

mod node;

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use muster_checkpoint::hex::Id;
use muster_cli::run::saves::replicas::Choice;
use muster_protocol::LauncherId;
use muster_protocol::memory::{Peer, Whom};
use muster_runtime::saving::{Dtype, Origins, Restore, Slice, Want};

use node::{Failure, LOOPBACK, Which, key, launcher_of, state, tensor};

fn main() -> Result<(), Failure> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| args.get(at).map_or(Ok(default), |text| text.parse());
    if let [node, number, nodes, place, choice, bytes] = &args[..]
        && node == "node"
    {
        return node::run(Which {
            node: number.parse()?,
            nodes: nodes.parse()?,
            place: Path::new(place),
            choice: Choice::parse(choice)?,
            bytes: bytes.parse()?,
        });
    }
    let bench = Bench {
        choice: Choice::parse(args.first().map_or("1", String::as_str))?,
        nodes: number(1, 2)?.clamp(2, 64) as usize,
        bytes: number(2, 1 << 30)?.max(1),
        saves: number(3, 2)?.max(1),
        turns: number(4, 5)?.max(1),
    };
    bench.measure()
}

/// A node's process. Ends with its owner.
struct Process {
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(args: &[&str]) -> Result<Process, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let output = child.stdout.take().ok_or("no output")?;
        let said = BufReader::new(output).lines();
        Ok(Process { child, said })
    }

    fn says(&mut self) -> Result<String, Failure> {
        Ok(self.said.next().ok_or("a node failed")??)
    }

    fn tell(&mut self, what: &str) -> Result<(), Failure> {
        let mut input = self.child.stdin.as_ref().ok_or("no input")?;
        Ok(writeln!(input, "{what}")?)
    }

    /// Processor seconds so far, of threads that have ended, too.
    fn cpu(&self) -> Result<f64, Failure> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        let (_, fields) = stat.rsplit_once(')').ok_or("no such process")?;
        let mut ticks = 0;
        for field in fields.split_whitespace().skip(11).take(2) {
            ticks += field.parse::<u64>()?;
        }
        let second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.ok_or("no ticks")?;
        Ok(ticks as f64 / second as f64)
    }

    /// Bytes of memory that it has, files apart.
    fn memory(&self) -> Result<u64, Failure> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id()))?;
        let mut kib = 0;
        for line in status.lines() {
            if let Some((name, rest)) = line.split_once(':')
                && ["RssAnon", "RssShmem"].contains(&name)
            {
                kib += rest.trim_end_matches("kB").trim().parse::<u64>()?;
            }
        }
        Ok(kib << 10)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// Tells all of them, and then hears all of them.
fn all(nodes: &mut [Process], what: &str) -> Result<Vec<String>, Failure> {
    for node in nodes.iter_mut() {
        node.tell(what)?;
    }
    nodes.iter_mut().map(Process::says).collect()
}

fn cpu(nodes: &[Process]) -> Result<f64, Failure> {
    nodes.iter().map(Process::cpu).sum()
}

#[derive(Clone, Copy)]
struct Bench {
    choice: Choice,
    nodes: usize,
    bytes: u64,
    saves: u64,
    turns: u64,
}

/// Costs of saves. The first finds no memory that was touched.
#[derive(Default)]
struct Cost {
    /// Seconds until all of a save is held, at the slowest node.
    held: Vec<f64>,
    /// Processor seconds of all nodes meanwhile.
    cpu: Vec<f64>,
    /// Bytes that a node holds of the first save for others, on average.
    memory: u64,
}

impl Bench {
    fn measure(self) -> Result<(), Failure> {
        let dir = tempfile::tempdir()?;
        let place = dir
            .path()
            .to_str()
            .ok_or("the path of a temporary folder is no text")?;
        let (mut nodes, guards) = self.start(place)?;
        let cost = self.save(&mut nodes)?;
        let step = self.saves;
        let parts = all(&mut nodes, &format!("write {step}"))?.join(" ");
        let (lost, others) = nodes.split_at_mut(1);
        let manifest = all(lost, &format!("assemble {step} {parts}"))?.join("");
        let manifest = Id::parse(&manifest).ok_or("no manifest")?;
        all(others, &format!("commit {step}"))?;
        // It is lost, and what all have written.
        nodes.remove(0);
        let job = dir.path().join("job");
        std::fs::remove_dir_all(job.join("data"))?;
        let mut others = Vec::new();
        for (node, guard) in guards.iter().enumerate().skip(1) {
            others.push(Peer {
                launcher: launcher_of(node),
                guard: guard.parse()?,
            });
        }
        let whom = Whom {
            key: key(),
            // Of a node that is new to the job.
            own: 1,
            launcher: LauncherId([255; 8]),
            others,
        };
        let found = self.restore(&job, manifest, &whom)?;
        let list = |all: &[f64]| {
            let all: Vec<String> = all.iter().map(|value| format!("{value:.3}")).collect();
            all.join(", ")
        };
        let [restored, one, four] = found;
        println!(
            "{{\"replicas\": \"{}\", \"nodes\": {}, \"bytes\": {}, \"turns\": {}, \"held\": [{}], \"cpu\": [{}], \"memory\": {}, \"restore\": {restored:.0}, \"tcp\": {one:.0}, \"tcp_four\": {four:.0}, \"share_of_tcp\": {:.3}, \"share_of_tcp_four\": {:.3}}}",
            self.choice,
            self.nodes,
            self.bytes,
            self.turns,
            list(&cost.held),
            list(&cost.cpu),
            cost.memory,
            restored / one,
            restored / four,
        );
        Ok(())
    }

    /// The nodes of a job, each with its slots, and where their guards are.
    fn start(self, place: &str) -> Result<(Vec<Process>, Vec<String>), Failure> {
        let (count, bytes) = (self.nodes.to_string(), self.bytes.to_string());
        let (choice, mut nodes) = (self.choice.to_string(), Vec::new());
        for node in 0..self.nodes {
            let args = ["node", &node.to_string(), &count, place, &choice, &bytes];
            nodes.push(Process::start(&args)?);
        }
        let guards = nodes.iter_mut().map(Process::says);
        let guards: Vec<String> = guards.collect::<Result<_, _>>()?;
        all(&mut nodes, &format!("begin {}", guards.join(" ")))?;
        Ok((nodes, guards))
    }

    /// All saves; the last one is not committed.
    fn save(self, nodes: &mut [Process]) -> Result<Cost, Failure> {
        let mut cost = Cost::default();
        for step in 1..=self.saves {
            all(nodes, &format!("fill {step}"))?;
            let memory = |nodes: &[Process]| nodes.iter().map(Process::memory).sum();
            let before: Result<u64, Failure> = memory(nodes);
            let began = cpu(nodes)?;
            let took = all(nodes, &format!("seal {step}"))?;
            cost.cpu.push(cpu(nodes)? - began);
            let mut slowest = 0.0_f64;
            for took in took {
                slowest = slowest.max(took.parse()?);
            }
            cost.held.push(slowest);
            if step == 1 {
                let after: Result<u64, Failure> = memory(nodes);
                cost.memory = after?.saturating_sub(before?) / nodes.len() as u64;
            }
            if step < self.saves {
                all(nodes, &format!("commit {step}"))?;
            }
        }
        Ok(cost)
    }

    /// The lost rank's tensor out of what the others hold, and its bytes by one connection and by four: bytes a second.
    fn restore(self, job: &Path, manifest: Id, whom: &Whom) -> Result<[f64; 3], Failure> {
        let (bytes, name) = (self.bytes, tensor(0));
        let expected = state(0, bytes);
        let mut into = vec![1; bytes as usize];
        let mut found = [const { Vec::new() }; 3];
        let [restored, one, four] = &mut found;
        for _ in 0..self.turns {
            one.push(plain(&expected, &mut into, 1)?.as_secs_f64());
            four.push(plain(&expected, &mut into, 4)?.as_secs_f64());
            into.fill(0);
            let began = Instant::now();
            let checkpoint = Restore::open_with(job, manifest, whom, 0)?;
            let want = Want {
                name: &name,
                dtype: Dtype::U8,
                shape: &[bytes],
                slice: Slice::whole(&[bytes]),
                into: &mut into,
            };
            checkpoint.load(&mut [want])?;
            restored.push(began.elapsed().as_secs_f64());
            let origins = checkpoint.origins();
            if into != expected || self.of_others(&origins) < bytes {
                return Err(format!("not restored from the other nodes: {origins:?}").into());
            }
        }
        Ok(found.map(|mut seconds: Vec<f64>| {
            seconds.sort_by(f64::total_cmp);
            bytes as f64 / seconds[seconds.len() / 2]
        }))
    }

    /// Bytes that came from where they are to come from.
    fn of_others(self, origins: &Origins) -> u64 {
        let words = match self.choice {
            Choice::Parity(_) => "'s parity",
            Choice::Nothing | Choice::Copy => "'s memory",
        };
        let from = origins.from.iter().filter(|(who, _)| who.contains(words));
        from.map(|(_, bytes)| bytes).sum()
    }
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
