//! Between a store's client and its server: injects what goes wrong on the way.

use std::io::{BufReader, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::fake::Fake;
use super::http::{Request, Response};

/// Faults of one request.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    /// Answered by the proxy; the server never hears of it.
    Instead(Response),
    /// The server does it, and the proxy answers this.
    Afterwards(Response),
    /// The connection is reset before the server hears of it.
    Reset,
    /// The server does it, and the connection is reset before its answer.
    LoseAnswer,
    /// The server does it, and nobody ever answers.
    Silence,
    /// The answer's body ends in its middle.
    Truncate,
    /// A byte of the answer's body is another one.
    Corrupt,
    /// The answer's body stops in its middle, and the connection stays.
    Stall,
    /// The answer comes byte by byte, one each time.
    Drip(Duration),
    /// The answer is no HTTP.
    Junk,
    /// The answer's body never ends.
    Endless,
}

struct Rule {
    method: &'static str,
    part: String,
    times: usize,
    fault: Fault,
}

#[derive(Clone)]
pub(crate) enum Server {
    Fake(Arc<Fake>),
    Port(u16),
}

#[derive(Default)]
struct Shared {
    rules: Mutex<Vec<Rule>>,
    seen: Mutex<Vec<String>>,
    ended: AtomicBool,
}

pub(crate) struct Proxy {
    pub(crate) port: u16,
    shared: Arc<Shared>,
}

impl Proxy {
    pub(crate) fn start(server: Server) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let shared = Arc::new(Shared::default());
        let of_thread = Arc::clone(&shared);
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                if of_thread.ended.load(Ordering::Relaxed) {
                    return;
                }
                let (server, shared) = (server.clone(), Arc::clone(&of_thread));
                // An error is the client going away.
                thread::spawn(move || serve(stream, &server, &shared));
            }
        });
        Self { port, shared }
    }

    /// The next so many requests of this method whose target has this part go wrong.
    pub(crate) fn inject(&self, method: &'static str, part: &str, times: usize, fault: Fault) {
        self.shared.rules.lock().unwrap().push(Rule {
            method,
            part: part.to_owned(),
            times,
            fault,
        });
    }

    /// No more faults.
    pub(crate) fn heal(&self) {
        self.shared.rules.lock().unwrap().clear();
    }

    /// Requests so far of this method whose target has this part.
    pub(crate) fn count(&self, method: &str, part: &str) -> usize {
        let seen = self.shared.seen.lock().unwrap();
        let wanted = |line: &&String| {
            let (of, target) = line.split_once(' ').unwrap();
            of == method && target.contains(part)
        };
        seen.iter().filter(wanted).count()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn fault_for(shared: &Shared, request: &Request) -> Option<Fault> {
    let mut rules = shared.rules.lock().unwrap();
    let rule = rules.iter_mut().find(|rule| {
        rule.times > 0 && rule.method == request.method && request.target.contains(&rule.part)
    })?;
    rule.times -= 1;
    Some(rule.fault.clone())
}

fn serve(stream: TcpStream, server: &Server, shared: &Shared) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut to = stream.try_clone()?;
    let mut from = BufReader::new(stream);
    while let Some(request) = Request::read(&mut from)? {
        let line = format!("{} {}", request.method, request.target);
        shared.seen.lock().unwrap().push(line);
        let fault = fault_for(shared, &request);
        let answer = match &fault {
            Some(Fault::Instead(answer)) => answer.clone(),
            Some(Fault::Reset) => return reset(&to),
            Some(Fault::Junk) => {
                to.write_all(b"SSH-2.0-nothing here\r\n\r\n")?;
                return Ok(());
            }
            _ => ask(server, &request)?,
        };
        let middle = answer.body.len() / 2;
        match fault {
            None | Some(Fault::Instead(_)) => write(&mut to, &answer)?,
            Some(Fault::Afterwards(other)) => write(&mut to, &other)?,
            Some(Fault::LoseAnswer | Fault::Reset | Fault::Junk) => return reset(&to),
            Some(Fault::Silence) => return hold(&to),
            Some(Fault::Truncate) => {
                to.write_all(&answer.head())?;
                to.write_all(&answer.body[..middle])?;
                return to.shutdown(Shutdown::Both);
            }
            Some(Fault::Corrupt) => {
                let mut answer = answer;
                if let Some(byte) = answer.body.get_mut(middle) {
                    *byte ^= 0x10;
                }
                write(&mut to, &answer)?;
            }
            Some(Fault::Stall) => {
                to.write_all(&answer.head())?;
                to.write_all(&answer.body[..middle])?;
                return hold(&to);
            }
            Some(Fault::Drip(pause)) => {
                let mut all = answer.head();
                all.extend(&answer.body);
                for byte in all {
                    to.write_all(&[byte])?;
                    thread::sleep(pause);
                }
            }
            Some(Fault::Endless) => {
                to.write_all(
                    b"HTTP/1.1 200 OK\r\netag: \"e\"\r\ncontent-length: 1000000000000\r\n\r\n",
                )?;
                loop {
                    to.write_all(&[b'x'; 4096])?;
                }
            }
        }
    }
    Ok(())
}

fn write(to: &mut TcpStream, answer: &Response) -> std::io::Result<()> {
    let mut all = answer.head();
    all.extend(&answer.body);
    to.write_all(&all)
}

fn ask(server: &Server, request: &Request) -> std::io::Result<Response> {
    match server {
        Server::Fake(fake) => Ok(fake.answer(request)),
        Server::Port(port) => {
            let mut stream = TcpStream::connect(("127.0.0.1", *port))?;
            request.write(&mut stream)?;
            Response::read(&mut BufReader::new(stream), request.method == "HEAD")
        }
    }
}

/// So that the other side sees a reset, not an end.
fn reset(stream: &TcpStream) -> std::io::Result<()> {
    rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO))?;
    stream.shutdown(Shutdown::Read)
}

/// Until the client goes.
fn hold(stream: &TcpStream) -> std::io::Result<()> {
    let mut nothing = [0; 1];
    while std::io::Read::read(&mut &*stream, &mut nothing)? > 0 {}
    Ok(())
}
