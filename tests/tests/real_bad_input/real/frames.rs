//! Bytes that make no sense, on every port of agents and launchers and on the socket. Fuzzing in
//! the small: a fixed seed, a bounded count.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::ground::free_port;
use crate::support::{Bed, Proc, get, query, until};
use muster_protocol::codec;
use muster_protocol::local::{Query, Register, ToAgent, ToLauncher};
use muster_protocol::record::Place;
use muster_protocol::spec::JobSpec;
use muster_protocol::{Digest, LauncherId};

/// A stranger's patience with one connection.
const SHORT: Duration = Duration::from_millis(200);

/// xorshift64*, with a fixed seed: the same bytes in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| self.next() as u8).collect()
    }
}

/// Openings that are random, oversized, or cut off, for any protocol that one might guess.
fn openings(random: &mut Random) -> Vec<Vec<u8>> {
    let mut out = vec![Vec::new(), vec![0], vec![0xff; 5]];
    for length in [1, 2, 7, 32, 300, 5_000, 70_000] {
        out.push(random.bytes(length));
    }
    // Lengths that promise far more than a limit, followed by a lot.
    for mut head in [
        u32::MAX.to_le_bytes().to_vec(),
        u32::MAX.to_be_bytes().to_vec(),
        vec![0xff, 0xff, 0xff, 0xff, 0x0f],
    ] {
        head.extend(random.bytes(300_000));
        out.push(head);
    }
    // libp2p's first words, then nothing, or nonsense.
    let hello = b"\x13/multistream/1.0.0\n";
    out.push(hello[..9].to_vec());
    out.push(hello.to_vec());
    out.push([&hello[..], b"\x07/noise\n", &random.bytes(4_000)].concat());
    out.push(
        [
            &hello[..],
            b"\x07/noise\n",
            b"\xff\xff",
            &random.bytes(65_535),
        ]
        .concat(),
    );
    // HTTP with too long a line, too many headers, a body that never comes, and no end.
    out.push(
        [
            b"GET /",
            vec![b'a'; 100_000].as_slice(),
            b" HTTP/1.1\r\n\r\n",
        ]
        .concat(),
    );
    let headers: String = (0..2_000).map(|n| format!("X-{n}: {n}\r\n")).collect();
    out.push(format!("GET /metrics HTTP/1.1\r\n{headers}\r\n").into_bytes());
    out.push(b"POST /healthz HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\nx".to_vec());
    out.push(b"GET /metrics HTTP/1.1\r\nHost".to_vec());
    out
}

/// Says it, perhaps listens for a moment, and goes, perhaps by a reset.
fn say_to_port(addr: SocketAddr, bytes: &[u8], random: &mut Random) {
    let Ok(mut stream) = TcpStream::connect_timeout(&addr, Duration::from_secs(5)) else {
        panic!("{addr} takes no connection any more");
    };
    stream.set_write_timeout(Some(SHORT)).unwrap();
    stream.set_read_timeout(Some(SHORT)).unwrap();
    // Being cut off in the middle is what is asked for.
    let _cut_off = stream.write_all(bytes);
    if random.below(3) == 0 {
        let _answer = stream.read(&mut [0; 1_000]);
    }
    if random.below(2) == 0 {
        let _at_once = socket_linger(&stream);
    }
}

/// Makes the close a reset.
fn socket_linger(stream: &TcpStream) -> i32 {
    use std::os::fd::AsRawFd;
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    let size = libc::socklen_t::try_from(size_of::<libc::linger>()).unwrap();
    // SAFETY: the option's own type, on a descriptor that is open.
    unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_LINGER,
            (&raw const linger).cast(),
            size,
        )
    }
}

/// The TCP ports that a process listens on, over IPv4.
fn listening(pid: u32) -> Vec<u16> {
    let mine: Vec<String> = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .unwrap()
        .flatten()
        .filter_map(|fd| std::fs::read_link(fd.path()).ok())
        .filter_map(|link| {
            let name = link.to_string_lossy().into_owned();
            Some(name.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
        })
        .collect();
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap();
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let columns: Vec<&str> = line.split_whitespace().collect();
            let port = columns[1].rsplit(':').next()?;
            let listens = columns[3] == "0A" && mine.iter().any(|inode| inode == columns[9]);
            listens.then(|| u16::from_str_radix(port, 16).unwrap())
        })
        .collect()
}

/// The most memory that a process ever used, in MiB.
fn peak_mib(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM")).unwrap();
    line.split_whitespace()
        .nth(1)
        .unwrap()
        .parse::<u64>()
        .unwrap()
        / 1024
}

/// A job on two agents, one of which serves HTTP.
struct Target {
    bed: Bed,
    http: SocketAddr,
    agents: Vec<Proc>,
    launchers: Vec<Proc>,
}

impl Target {
    fn new() -> Target {
        let mut bed = Bed::new();
        let http = SocketAddr::from(([127, 0, 0, 1], free_port()));
        let serve = format!("--http={http}");
        let agents = vec![bed.agent_and("a", &[], &[&serve]), bed.agent("b", &["a"])];
        let launchers = vec![
            bed.launch("a", &["--nnodes=2"]),
            bed.launch("b", &["--nnodes=2"]),
        ];
        Target {
            bed,
            http,
            agents,
            launchers,
        }
    }

    /// Attacks, and requires that neither the processes nor the job have noticed.
    fn withstands(mut self, attack: impl FnOnce(&Target)) {
        let before = self.bed.until_runs_on(&["a", "b"]);
        attack(&self);
        assert_eq!(
            self.bed.workers().as_ref(),
            Some(&before),
            "the same workers run"
        );
        for process in self.agents.iter_mut().chain(&mut self.launchers) {
            assert!(process.is_alive());
            assert!(!process.log().contains("panicked"), "{}", process.log());
            let peak = peak_mib(process.pid());
            assert!(peak < 200, "{peak} MiB were used");
        }
        let health = get(self.http, "/healthz").unwrap();
        assert!(health.starts_with("HTTP/1.1 200"), "{health}");
        for node in ["a", "b"] {
            let status = query(&self.bed.socket(node), Query::Status).unwrap();
            assert_eq!(status["peers_connected"], 1, "{status}");
        }
        let _open = self.bed.finish();
        for launcher in &mut self.launchers {
            assert_eq!(launcher.code(), 0, "{}", launcher.log());
        }
    }
}

#[test]
fn nonsense_on_every_port_harms_nothing() {
    Target::new().withstands(|target| {
        let mut random = Random(0x6d75_7374_6572);
        let agents = target.agents.iter().map(|p| listening(p.pid()));
        let agents: Vec<Vec<u16>> = agents.collect();
        assert_eq!(
            (agents[0].len(), agents[1].len()),
            (2, 1),
            "peers, and HTTP on a"
        );
        let launchers: Vec<Vec<u16>> = target
            .launchers
            .iter()
            .map(|p| listening(p.pid()))
            .collect();
        assert!(
            launchers.iter().all(|ports| !ports.is_empty()),
            "a guard port each"
        );
        for port in agents.into_iter().chain(launchers).flatten() {
            let addr = SocketAddr::from(([127, 0, 0, 1], port));
            for bytes in openings(&mut random) {
                say_to_port(addr, &bytes, &mut random);
            }
            // A crowd that says nothing.
            let crowd: Vec<TcpStream> = (0..150)
                .filter_map(|_| TcpStream::connect_timeout(&addr, SHORT).ok())
                .collect();
            drop(crowd);
        }
    });
}

fn register() -> ToAgent {
    ToAgent::Register(Register {
        launcher: LauncherId([7; 8]),
        job: "another".into(),
        spec: JobSpec {
            min_nodes: 3,
            max_nodes: 3,
            ..JobSpec::default()
        },
        slots: 2,
        guard_port: 9,
        addrs: vec![[127, 0, 0, 1].into()],
        place: Place::default(),
        running: Some(Digest([3; 32])),
        waited_ms: 0,
        began: None,
        lineage: None,
        gate: None,
        store: None,
        parity: 0,
        pid: 1,
        command: "nothing".into(),
        log_dir: None,
    })
}

/// Says it to the agent's socket, looks at an answer, and goes.
fn say_to_socket(socket: &Path, bytes: &[u8]) {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.set_write_timeout(Some(SHORT)).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_millis(5)))
        .unwrap();
    let _cut_off = stream.write_all(bytes);
    let _answer = stream.read(&mut [0; 1_000]);
}

#[test]
fn nonsense_on_the_socket_harms_nothing() {
    Target::new().withstands(|target| {
        let mut random = Random(0x736f_636b_6574);
        let socket = target.bed.socket("a");
        for bytes in openings(&mut random) {
            say_to_socket(&socket, &bytes);
        }
        let frames = [
            register(),
            ToAgent::MasterPort { port: 1 },
            ToAgent::Started {
                digest: Digest([3; 32]),
                attempt: 1,
            },
            ToAgent::Cancel,
            ToAgent::Leave { grace_ms: 0 },
            ToAgent::Query(Query::Jobs),
        ];
        for round in 0..60 {
            for frame in &frames {
                let mut bytes = codec::encode_frame(frame).unwrap();
                match round % 4 {
                    // As it is, without having registered; cut off; with a bit turned; another version.
                    0 => {}
                    1 => bytes.truncate(random.below(bytes.len())),
                    2 => {
                        // Not the kind of the frame: an order that is well formed is obeyed.
                        let at = 2 + random.below((bytes.len() - 2).max(1));
                        if let Some(byte) = bytes.get_mut(at) {
                            *byte ^= 1 << random.below(8);
                        }
                    }
                    _ => bytes[0] = 1 + u8::try_from(1 + random.below(254)).unwrap(),
                }
                let mut whole = codec::with_length(&bytes);
                if random.below(4) == 0 {
                    whole.truncate(random.below(whole.len()).max(1));
                }
                say_to_socket(&socket, &whole);
            }
        }
        let crowd: Vec<UnixStream> = (0..150)
            .filter_map(|_| UnixStream::connect(&socket).ok())
            .collect();
        drop(crowd);
        assert!(query(&socket, Query::Status).is_some());
    });
}

#[test]
fn a_launcher_of_another_version_is_told_so() {
    let mut bed = Bed::new();
    let _agent = bed.agent("a", &[]);
    let mut bytes = codec::encode_frame(&register()).unwrap();
    bytes[0] = codec::WIRE_VERSION + 1;
    let mut stream = UnixStream::connect(bed.socket("a")).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream.write_all(&codec::with_length(&bytes)).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let mut deframer = codec::Deframer::default();
    deframer.push(&answer);
    let frame = deframer
        .next_frame()
        .unwrap()
        .expect("an answer before the end");
    let ToLauncher::Refused { reason } = codec::decode_frame(frame).unwrap() else {
        panic!("refused");
    };
    let theirs = format!("wire version {}", codec::WIRE_VERSION + 1);
    assert!(
        reason.contains(&theirs) && reason.contains("same Muster version"),
        "{reason}"
    );
}

#[test]
fn a_launcher_that_reads_nothing_is_not_told_the_same_again_and_again() {
    let mut bed = Bed::new();
    let _agent = bed.agent("a", &[]);
    let mut stream = UnixStream::connect(bed.socket("a")).unwrap();
    let bytes = codec::encode_frame(&register()).unwrap();
    stream.write_all(&codec::with_length(&bytes)).unwrap();
    stream.set_nonblocking(true).unwrap();
    let mut deframer = codec::Deframer::default();
    // How many words that the agent is there lie in the socket.
    let mut words = || {
        let mut buffer = [0; 4_096];
        let mut found = 0;
        while let Ok(length @ 1..) = stream.read(&mut buffer) {
            deframer.push(&buffer[..length]);
        }
        while let Some(frame) = deframer.next_frame().unwrap() {
            let frame = codec::decode_frame::<ToLauncher>(frame).unwrap();
            found += usize::from(matches!(frame, ToLauncher::Welcome { .. }));
        }
        found
    };
    until("the agent says that it is there", || words() > 0);
    // Long enough for four more, were they read.
    std::thread::sleep(Duration::from_secs(4));
    // One may come while they are read.
    assert!((1..=2).contains(&words()));
    until("once they are read it goes on", || words() > 0);
}
