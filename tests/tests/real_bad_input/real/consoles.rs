//! An agent whose log nobody takes.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};

use muster_protocol::local::Query;

use crate::ground::{program, without_our_environment};
use crate::support::{Bed, query, signal, until};

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _gone = self.0.kill();
        let _gone = self.0.wait();
    }
}

#[test]
fn an_agent_whose_log_nobody_takes_serves_and_ends() {
    let mut bed = Bed::new();
    // Full from the start.
    let (_unread, mut log) = std::io::pipe().unwrap();
    // SAFETY: asks for a number, of a descriptor that is open.
    let holds = unsafe { libc::fcntl(log.as_raw_fd(), libc::F_GETPIPE_SZ) };
    log.write_all(&vec![b'.'; usize::try_from(holds).unwrap()])
        .unwrap();
    let flags = bed.agent_flags("a", &[]);
    let mut command = Command::new(program("muster"));
    without_our_environment(&mut command);
    command.arg("agent").args(&flags).env("MUSTER_LOG", "trace");
    command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(log);
    let mut agent = Ended(command.spawn().unwrap());
    let socket = bed.socket("a");
    until("it serves", || query(&socket, Query::Status).is_some());
    signal(agent.0.id(), libc::SIGTERM);
    until("it ends", || agent.0.try_wait().unwrap().is_some());
}
