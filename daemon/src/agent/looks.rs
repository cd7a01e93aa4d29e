//! Looking for launchers whose connections closed: their guards know whether they live. One task
//! for each, so many for each user at most, and none any longer once its launcher is back.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use muster_protocol::LauncherId;
use muster_protocol::agent::ConnId;
use muster_protocol::membership::Answer;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;

use super::{Input, probe};

/// Launchers of one user that are looked for at a time; the others count as gone at once. An agent
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
    /// It has answered at its guard.
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
        guards: Vec<SocketAddr>,
        tx: mpsc::Sender<Input>,
    ) -> bool {
        if self.0.values().filter(|l| l.uid == uid).count() >= MAX_LOOKS {
            return false;
        }
        let task = tokio::spawn(look_for(conn, launcher, guards, tx)).abort_handle();
        let look = Look {
            uid,
            launcher,
            lives: false,
            task,
        };
        self.0.insert(conn, look);
        true
    }

    /// A launcher that is looked for answers.
    pub(super) fn answers(&mut self, conn: ConnId) {
        if let Some(look) = self.0.get_mut(&conn) {
            look.lives = true;
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

/// Reports whether the launcher answers at its guard, and keeps looking until it does not.
async fn look_for(
    conn: ConnId,
    launcher: LauncherId,
    guards: Vec<SocketAddr>,
    tx: mpsc::Sender<Input>,
) {
    let mut told = false;
    // A day: a launcher that lives without its agent for longer has ended its workers long ago.
    for _ in 0..864_000 {
        let mut alive = false;
        for guard in &guards {
            let answer = probe::guard(Some((*guard, launcher)), LOOK * 5).await;
            alive |= answer == Answer::Answered;
            if alive {
                break;
            }
        }
        if !alive || !told {
            told = true;
            let input = Input::LauncherAlive { conn, alive };
            if tx.send(input).await.is_err() || !alive {
                return;
            }
        }
        tokio::time::sleep(LOOK).await;
    }
    let alive = false;
    let _ended = tx.send(Input::LauncherAlive { conn, alive }).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn looks_are_bounded_for_each_user_and_end_when_the_launcher_is_back() {
        let (tx, mut rx) = mpsc::channel(64);
        let mut looks = Looks::default();
        let start = |looks: &mut Looks, conn: u64, uid: u32| {
            let launcher = LauncherId(conn.to_be_bytes());
            looks.start(ConnId(conn), uid, launcher, Vec::new(), tx.clone())
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
            let Some(Input::LauncherAlive { conn, alive }) = rx.recv().await else {
                panic!("no news")
            };
            assert!(!alive);
            gone.push(conn);
            looks.end(conn);
        }
        assert!(!gone.contains(&ConnId(5)));
        assert!(looks.0.is_empty());
    }
}
