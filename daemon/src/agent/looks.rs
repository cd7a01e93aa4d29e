//! Looking for launchers whose connections closed: their guards know whether they live. One task
//! for each, so many for each user at most, and none any longer once its launcher is back.
//!
//! Only a refusal, or the end of the process where it can be seen, shows that a launcher is dead. One
//! that is stopped says nothing, and its workers run.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use muster_protocol::LauncherId;
use muster_protocol::agent::ConnId;
use muster_protocol::membership::Answer;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::{Input, probe};

/// Launchers of one user that are looked for at a time; of the others nothing is known. An agent
/// that lives closes no launcher's connection, so these are launchers that hang or misbehave.
const MAX_LOOKS: usize = 32;
/// Between two looks at a launcher that has lost its connection.
const LOOK: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub(super) struct Looks(BTreeMap<ConnId, Look>);

#[derive(Debug)]
struct Look {
    uid: u32,
    launcher: LauncherId,
    /// It has answered at its guard, when that was asked last.
    lives: bool,
    task: AbortHandle,
}

impl Looks {
    /// Starts to look for a launcher. `false`: this user has too many that are looked for.
    pub(super) fn start(
        &mut self,
        conn: ConnId,
        uid: u32,
        launcher: LauncherId,
        marks: Marks,
        tx: mpsc::Sender<Input>,
    ) -> bool {
        if self.0.values().filter(|l| l.uid == uid).count() >= MAX_LOOKS {
            return false;
        }
        let task = tokio::spawn(look_for(conn, launcher, marks, tx)).abort_handle();
        let look = Look {
            uid,
            launcher,
            lives: false,
            task,
        };
        self.0.insert(conn, look);
        true
    }

    /// Takes in the answer of the guard of a launcher that is looked for.
    pub(super) fn answers(&mut self, conn: ConnId, guard: Answer) {
        if let Some(look) = self.0.get_mut(&conn) {
            look.lives = guard == Answer::Answered;
        }
    }

    /// Whether this one has lost its connection, and is known to live.
    pub(super) fn lives(&self, launcher: LauncherId) -> bool {
        let of = |look: &Look| look.launcher == launcher && look.lives;
        self.0.values().any(of)
    }

    /// The launcher is back: ends the looks for it. The connections that it had.
    pub(super) fn back(&mut self, uid: u32, launcher: LauncherId) -> Vec<ConnId> {
        let of = |look: &Look| look.uid == uid && look.launcher == launcher;
        let old: Vec<ConnId> = self
            .0
            .iter()
            .filter(|(_, look)| of(look))
            .map(|(conn, _)| *conn)
            .collect();
        for conn in &old {
            self.end(*conn);
        }
        old
    }

    pub(super) fn end(&mut self, conn: ConnId) {
        if let Some(look) = self.0.remove(&conn) {
            look.task.abort();
        }
    }
}

/// By what a launcher is known.
#[derive(Debug, Default)]
pub(super) struct Marks {
    pub(super) guards: Vec<SocketAddr>,
    /// The process, where this agent sees it: it may live in another namespace.
    pub(super) process: Option<Process>,
}

/// Reports what the launcher says at its guard, and when that changes, until it is gone.
async fn look_for(conn: ConnId, launcher: LauncherId, marks: Marks, tx: mpsc::Sender<Input>) {
    let mut told = None;
    // A day: a launcher that lives without its agent for longer has ended its workers long ago.
    for _ in 0..864_000 {
        let guard = match &marks.process {
            Some(process) if process.has_ended() => Answer::Refused,
            _ => ask(&marks.guards, launcher).await,
        };
        if told != Some(guard) {
            told = Some(guard);
            let input = Input::LauncherLooked { conn, guard };
            if tx.send(input).await.is_err() || guard.is_gone() {
                return;
            }
        }
        tokio::time::sleep(LOOK).await;
    }
    let guard = Answer::Refused;
    let _ended = tx.send(Input::LauncherLooked { conn, guard }).await;
}

/// A process, told by when it was started from another that gets its number.
#[derive(Debug)]
pub(super) struct Process {
    pid: i32,
    started: u64,
}

impl Process {
    /// One that runs, where this agent sees it.
    pub(super) fn of(pid: i32) -> Option<Process> {
        let started = stat(pid).ok()??;
        Some(Process { pid, started })
    }

    fn has_ended(&self) -> bool {
        match stat(self.pid) {
            Ok(started) => started != Some(self.started),
            // That it cannot be looked at proves nothing.
            Err(error) => error.kind() == std::io::ErrorKind::NotFound,
        }
    }
}

/// When a process was started, by proc(5); `None` for one that only waits for its parent.
fn stat(pid: i32) -> std::io::Result<Option<u64>> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name, in parentheses, may itself hold parentheses and spaces.
    let Some((_, fields)) = text.rsplit_once(')') else {
        return Ok(None);
    };
    let mut fields = fields.split_ascii_whitespace();
    let state = fields.next();
    let started = fields.nth(18).and_then(|field| field.parse().ok());
    Ok(started.filter(|_| !matches!(state, Some("Z" | "X"))))
}

/// It is gone only if it is nowhere: where one of its addresses says nothing, it may be there.
async fn ask(guards: &[SocketAddr], launcher: LauncherId) -> Answer {
    let mut told = Answer::Refused;
    for guard in guards {
        match probe::guard(Some((*guard, launcher)), LOOK * 5).await {
            Answer::Answered => return Answer::Answered,
            Answer::Mute | Answer::Silent => told = Answer::Silent,
            Answer::Refused | Answer::Other => {}
        }
    }
    told
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    async fn told(rx: &mut mpsc::Receiver<Input>) -> (ConnId, Answer) {
        match rx.recv().await {
            Some(Input::LauncherLooked { conn, guard }) => (conn, guard),
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn looks_are_bounded_for_each_user_and_end_when_the_launcher_is_back() {
        let (tx, mut rx) = mpsc::channel(64);
        let mut looks = Looks::default();
        let start = |looks: &mut Looks, conn: u64, uid: u32| {
            let launcher = LauncherId(conn.to_be_bytes());
            looks.start(ConnId(conn), uid, launcher, Marks::default(), tx.clone())
        };
        for conn in 0..MAX_LOOKS as u64 {
            assert!(start(&mut looks, conn, 1));
        }
        assert!(!start(&mut looks, 900, 1));
        assert!(start(&mut looks, 901, 2), "another user has its own");
        // Nobody comes back under another user's uid.
        let id = LauncherId(5u64.to_be_bytes());
        assert!(looks.back(2, id).is_empty());
        assert_eq!(looks.back(1, id), [ConnId(5)]);
        assert!(start(&mut looks, 902, 1));
        // Without a guard a launcher counts as gone, and is told of once; the one that came back
        // before anybody looked is not.
        let mut gone = Vec::new();
        while gone.len() < MAX_LOOKS + 1 {
            let (conn, guard) = told(&mut rx).await;
            assert!(guard.is_gone());
            gone.push(conn);
            looks.end(conn);
        }
        assert!(!gone.contains(&ConnId(5)));
        assert!(looks.0.is_empty());
    }

    #[tokio::test]
    async fn a_launcher_that_says_nothing_is_not_gone_before_its_port_or_its_process_is() {
        let (tx, mut rx) = mpsc::channel(64);
        let mut looks = Looks::default();
        let launcher = LauncherId([1; 8]);
        // Nobody accepts, as of a process that is stopped.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let guards = vec![port.local_addr().unwrap()];
        let process = None;
        let marks = Marks { guards, process };
        assert!(looks.start(ConnId(1), 1, launcher, marks, tx.clone()));
        assert_eq!(told(&mut rx).await, (ConnId(1), Answer::Silent));
        drop(port);
        assert_eq!(told(&mut rx).await, (ConnId(1), Answer::Refused));
        // A process that can be seen says more than its port.
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let marks = Marks {
            guards: vec![port.local_addr().unwrap()],
            process: Process::of(child.id() as i32),
        };
        assert!(marks.process.is_some());
        assert!(looks.start(ConnId(2), 1, launcher, marks, tx.clone()));
        assert_eq!(told(&mut rx).await, (ConnId(2), Answer::Silent));
        child.kill().unwrap();
        assert_eq!(told(&mut rx).await, (ConnId(2), Answer::Refused));
        child.wait().unwrap();
    }
}
