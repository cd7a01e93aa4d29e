//! Tells systemd how the agent is doing (sd_notify(3)): one datagram per message to
//! `$NOTIFY_SOCKET`. Without that variable every call does nothing.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

/// The longest status line that is sent, in bytes; the rest is cut off.
const MAX_STATUS: usize = 256;

/// Where the messages go.
#[derive(Debug)]
pub struct Notifier {
    to: Option<(UnixDatagram, SocketAddr)>,
    watchdog: Option<Duration>,
}

impl Notifier {
    /// Reads `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`. The variables stay in the
    /// environment: whoever starts processes removes them there.
    pub fn from_env() -> io::Result<Notifier> {
        let var = |name| std::env::var_os(name).filter(|v| !v.is_empty());
        Notifier::new(
            var("NOTIFY_SOCKET").as_deref(),
            var("WATCHDOG_USEC").as_deref(),
            var("WATCHDOG_PID").as_deref(),
        )
    }

    fn new(
        socket: Option<&OsStr>,
        usec: Option<&OsStr>,
        pid: Option<&OsStr>,
    ) -> io::Result<Notifier> {
        let number = |v: Option<&OsStr>| v.and_then(OsStr::to_str).and_then(|v| v.parse().ok());
        let for_us = pid.is_none() || number(pid) == Some(u64::from(std::process::id()));
        let watchdog = number(usec)
            .filter(|usec| for_us && *usec > 0)
            .map(Duration::from_micros);
        let to = match socket {
            None => None,
            Some(name) => {
                let address = match name.as_bytes() {
                    [b'@', abstract_name @ ..] => SocketAddr::from_abstract_name(abstract_name)?,
                    [b'/', ..] => SocketAddr::from_pathname(name)?,
                    _ => {
                        return Err(io::Error::new(
                            io::ErrorKind::InvalidInput,
                            format!(
                                "NOTIFY_SOCKET={} is neither a path nor @name",
                                name.display()
                            ),
                        ));
                    }
                };
                let socket = UnixDatagram::unbound()?;
                // A manager that does not read must not stop the agent.
                socket.set_nonblocking(true)?;
                Some((socket, address))
            }
        };
        Ok(Notifier { to, watchdog })
    }

    /// How often at least [`watchdog`](Self::watchdog) must be called: half of what systemd waits.
    pub fn watchdog_interval(&self) -> Option<Duration> {
        self.watchdog.filter(|_| self.to.is_some()).map(|w| w / 2)
    }

    /// The agent serves now.
    pub fn ready(&self, status: &str) -> io::Result<()> {
        self.send(&format!("READY=1\nSTATUS={}", line(status)))
    }

    /// One line for `systemctl status`.
    pub fn status(&self, status: &str) -> io::Result<()> {
        self.send(&format!("STATUS={}", line(status)))
    }

    /// The loop is alive. To be called by the loop itself, never by a timer of its own.
    pub fn watchdog(&self) -> io::Result<()> {
        self.send("WATCHDOG=1")
    }

    /// The agent begins to end.
    pub fn stopping(&self, status: &str) -> io::Result<()> {
        self.send(&format!("STOPPING=1\nSTATUS={}", line(status)))
    }

    /// The current start or stop may take this much longer, from now.
    pub fn extend_timeout(&self, by: Duration) -> io::Result<()> {
        self.send(&format!("EXTEND_TIMEOUT_USEC={}", by.as_micros()))
    }

    fn send(&self, message: &str) -> io::Result<()> {
        match &self.to {
            None => Ok(()),
            Some((socket, address)) => socket
                .send_to_addr(message.as_bytes(), address)
                .map(|_sent_whole| ()),
        }
    }
}

/// A status is one line: a line break in it would begin another assignment.
fn line(status: &str) -> String {
    let mut out = String::new();
    for c in status.chars() {
        let c = if c.is_control() { ' ' } else { c };
        if out.len() + c.len_utf8() > MAX_STATUS {
            break;
        }
        out.push(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn received(socket: &UnixDatagram) -> String {
        let mut buffer = [0; 1000];
        socket
            .set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let n = socket.recv(&mut buffer).unwrap();
        String::from_utf8(buffer[..n].to_vec()).unwrap()
    }

    fn check_all(socket: &UnixDatagram, notifier: &Notifier) {
        notifier.ready("4 peers").unwrap();
        assert_eq!(received(socket), "READY=1\nSTATUS=4 peers");
        notifier.status("a\nMAINPID=1").unwrap();
        assert_eq!(received(socket), "STATUS=a MAINPID=1");
        notifier.watchdog().unwrap();
        assert_eq!(received(socket), "WATCHDOG=1");
        notifier.extend_timeout(Duration::from_secs(20)).unwrap();
        assert_eq!(received(socket), "EXTEND_TIMEOUT_USEC=20000000");
        notifier.stopping("draining").unwrap();
        assert_eq!(received(socket), "STOPPING=1\nSTATUS=draining");
        notifier.status(&"ä".repeat(1000)).unwrap();
        assert_eq!(received(socket).len(), "STATUS=".len() + MAX_STATUS);
    }

    #[test]
    fn messages_arrive_at_a_path() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("notify");
        let socket = UnixDatagram::bind(&path).unwrap();
        let notifier = Notifier::new(Some(path.as_os_str()), None, None).unwrap();
        check_all(&socket, &notifier);
    }

    #[test]
    fn messages_arrive_at_an_abstract_name() {
        let name = format!("@muster-test-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name[1..]).unwrap();
        let socket = UnixDatagram::bind_addr(&address).unwrap();
        let notifier = Notifier::new(Some(OsStr::new(&name)), None, None).unwrap();
        check_all(&socket, &notifier);
    }

    #[test]
    fn the_watchdog_is_for_the_process_that_it_names() {
        let os = OsStr::new;
        let interval = |usec: &str, pid: Option<&str>| {
            Notifier::new(Some(os("/x")), Some(os(usec)), pid.map(os))
                .unwrap()
                .watchdog_interval()
        };
        let me = std::process::id().to_string();
        let half = Some(Duration::from_secs(15));
        assert_eq!(interval("30000000", None), half);
        assert_eq!(interval("30000000", Some(&me)), half);
        assert_eq!(interval("30000000", Some("1")), None);
        assert_eq!(interval("0", None), None);
        assert_eq!(interval("soon", None), None);
    }

    #[test]
    fn without_a_manager_nothing_happens_and_a_gone_one_is_an_error() {
        let none = Notifier::new(None, Some(OsStr::new("5")), None).unwrap();
        none.ready("x").unwrap();
        assert_eq!(none.watchdog_interval(), None);
        assert!(Notifier::new(Some(OsStr::new("relative")), None, None).is_err());
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("gone");
        let gone = Notifier::new(Some(path.as_os_str()), None, None).unwrap();
        assert!(gone.watchdog().is_err());
    }

    #[test]
    fn a_manager_that_does_not_read_stops_nobody() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("notify");
        let _socket = UnixDatagram::bind(&path).unwrap();
        let notifier = Notifier::new(Some(path.as_os_str()), None, None).unwrap();
        let error = (0..100_000)
            .find_map(|_| notifier.watchdog().err())
            .unwrap();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
