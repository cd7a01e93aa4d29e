use std::sync::mpsc;

use super::*;

struct Gate(mpsc::Receiver<()>, Arc<Mutex<Vec<u8>>>);

impl Write for Gate {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let _ = self.0.recv();
        self.1.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Waits until all is written, also where the console has just been stuck.
fn drained(console: &Console) {
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut state = console.shared.lock();
    while state.writing.is_some() || !state.queue.is_empty() {
        assert!(Instant::now() < deadline, "the console takes nothing");
        state = console
            .shared
            .changed
            .wait_timeout(state, PATIENCE)
            .unwrap()
            .0;
    }
}

#[test]
fn a_stuck_console_costs_output_but_no_time() {
    let (open, gate) = mpsc::channel();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let console = Console::start(Gate(gate, seen.clone()), io::sink()).unwrap();
    let started = Instant::now();
    let piece = 64 * 1024;
    for _ in 0..100 {
        console.write(Target::Stdout, vec![b'x'; piece]);
    }
    // One wait of a second, not eighty.
    assert!(started.elapsed() < Duration::from_secs(10));
    drop(open);
    drained(&console);
    console.write(Target::Stdout, b"end".to_vec());
    drained(&console);
    let seen = seen.lock().unwrap();
    assert!(seen.ends_with(b"end"));
    let text = String::from_utf8_lossy(&seen);
    assert!(
        text.contains("bytes of output were dropped"),
        "{}",
        text.len()
    );
    assert!(seen.len() >= MAX_WAITING && seen.len() < 100 * piece);
}

#[test]
fn lines_of_the_launcher_never_wait_and_are_counted_when_they_are_dropped() {
    let (open, gate) = mpsc::channel();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let console = Console::start(io::sink(), Gate(gate, seen.clone())).unwrap();
    // Workers have filled their part of the queue.
    let full = [vec![b'x'; MAX_WAITING - 1].as_slice(), b"\n"].concat();
    console.write(Target::Stderr, full);
    let line = vec![b'.'; 1023];
    let line = [line.as_slice(), b"\n"].concat();
    let room = MAX_OWN / line.len();
    // And so has the agent: it takes the room of nobody else.
    let mut log = Log(console.clone());
    let entry = [vec![b'-'; 1023].as_slice(), b"\n"].concat();
    let log_room = MAX_LOG / entry.len();
    for _ in 0..log_room + 5 {
        log.write_all(&entry).unwrap();
    }
    for _ in 0..room + 9 {
        console.tell(line.clone());
    }
    drop(open);
    drained(&console);
    let seen = seen.lock().unwrap();
    let text = String::from_utf8_lossy(&seen);
    let begin = |with: &str| text.lines().filter(|l| l.starts_with(with)).count();
    assert_eq!((begin("."), begin("-")), (room, log_room));
    // The thread may begin its first piece, and says then what was dropped before it, in the middle of all this.
    let dropped = |of: &str| -> usize {
        let counts = text.lines().filter(|l| l.starts_with("muster: "));
        counts.filter_map(|l| number_before(l, of)).sum()
    };
    assert_eq!(dropped(" lines of muster's own"), 9);
    assert_eq!(dropped(" lines of the agent's log"), 5);
}

/// The number that stands before these words.
fn number_before(line: &str, words: &str) -> Option<usize> {
    line.split_once(words)?.0.rsplit(' ').next()?.parse().ok()
}

#[test]
fn nobody_waits_at_the_end_for_a_console_that_is_stuck() {
    let (open, gate) = mpsc::channel();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let console = Console::start(io::sink(), Gate(gate, seen.clone())).unwrap();
    console.tell(b"one\n".to_vec());
    console.flush(Duration::from_secs(600));
    assert!(seen.lock().unwrap().is_empty());
    // One that is slow, and moves, is waited for.
    open.send(()).unwrap();
    while seen.lock().unwrap().is_empty() {
        std::thread::sleep(Duration::from_millis(1));
    }
    console.tell(vec![b'.'; 3 * CHUNK]);
    for _ in 0..3 {
        open.send(()).unwrap();
    }
    console.flush(Duration::from_secs(600));
    assert_eq!(seen.lock().unwrap().len(), 4 + 3 * CHUNK);
}

/// The number of bytes that such a text counts.
fn counted(text: &str) -> usize {
    let told = text.lines().find_map(|l| {
        let l = l.strip_prefix("muster: ")?;
        l.split_once(" bytes of output were dropped")
    });
    told.map_or(0, |(count, _)| count.parse().unwrap())
}

#[test]
fn what_a_stuck_console_never_took_is_counted_at_the_end() {
    let (_open, gate) = mpsc::channel();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let console = Console::start(Gate(gate, seen.clone()), io::sink()).unwrap();
    let (read, write) = nix::unistd::pipe().unwrap();
    for _ in 0..3 {
        console.write(Target::Stdout, vec![b'x'; 5 * CHUNK]);
    }
    console.close(Duration::from_secs(600), std::fs::File::from(write));
    let text = io::read_to_string(std::fs::File::from(read)).unwrap();
    assert_eq!(counted(&text), 15 * CHUNK);
    // Nor does anybody wait for an stderr that is full.
    let (_read, write) = nix::unistd::pipe().unwrap();
    let full = std::fs::File::from(write);
    nix::fcntl::fcntl(
        &full,
        nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK),
    )
    .unwrap();
    while (&full).write(&[b'x'; CHUNK]).is_ok() {}
    nix::fcntl::fcntl(
        &full,
        nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::empty()),
    )
    .unwrap();
    console.write(Target::Stdout, vec![b'x'; CHUNK]);
    console.close(Duration::ZERO, full);
}

#[test]
fn what_a_slow_console_has_not_taken_by_the_end_is_counted_behind_what_it_took() {
    let (open, gate) = mpsc::channel();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let told = Arc::new(Mutex::new(Vec::new()));
    let (free, at_once) = mpsc::channel();
    drop(free);
    let err = Gate(at_once, told.clone());
    let console = Console::start(Gate(gate, seen.clone()), err).unwrap();
    let slow = std::thread::spawn(move || {
        while open.send(()).is_ok() {
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    let total = 200 * CHUNK;
    for _ in 0..20 {
        console.write(Target::Stdout, vec![b'x'; total / 20]);
    }
    let (read, write) = nix::unistd::pipe().unwrap();
    console.close(Duration::from_millis(100), std::fs::File::from(write));
    drained(&console);
    let direct = io::read_to_string(std::fs::File::from(read)).unwrap();
    let behind = String::from_utf8_lossy(&told.lock().unwrap()).into_owned();
    let dropped = counted(&(direct + &behind));
    // A machine that is slow itself takes one more piece after the count.
    let both = seen.lock().unwrap().len() + dropped;
    assert!(
        dropped > 0 && (total..=total + CHUNK).contains(&both),
        "{both}"
    );
    drop(console);
    drop(slow);
}
