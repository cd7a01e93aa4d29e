//! The thread that writes to the state directory, in the order in which it is asked to: a disk that takes its time
//! does not hold the agent up.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use muster_protocol::JobKey;
use tokio::sync::{mpsc, oneshot};

use super::{Input, blob_name};
use crate::state::StateDir;

/// How long the agent's end waits in all for the last writes.
pub(super) const LAST_WAIT: Duration = Duration::from_secs(5);

/// A write, or a removal. The core has one of each job under way at most.
#[derive(Debug)]
pub(super) enum Write {
    /// The state of a job. It is answered with [`Input::Stored`].
    Job { key: JobKey, bytes: Vec<u8> },
    /// The state of a job goes, once `past` is stored, which remembers it.
    Forget { key: JobKey, past: Vec<u8> },
    /// The peers' addresses, a hint for the next start. It is answered with [`Input::PeersStored`].
    Peers { bytes: Vec<u8> },
}

#[derive(Debug)]
pub(super) struct Disk {
    writes: Sender<Write>,
    /// The directory, once the thread has ended.
    left: oneshot::Receiver<StateDir>,
}

impl Disk {
    /// The directory is the thread's from now on.
    pub(super) fn start(state: StateDir, tx: mpsc::Sender<Input>) -> Disk {
        let (writes, from) = channel();
        let (leave, left) = oneshot::channel();
        std::thread::spawn(move || {
            let state = write_all(state, &from, &tx);
            let _nobody_waits = leave.send(state);
        });
        Disk { writes, left }
    }

    pub(super) fn write(&self, write: Write) {
        // The thread lives as long as this.
        let _taken = self.writes.send(write);
    }

    /// The directory, still locked, with all that was to be written in it. None: the disk does not answer in that time.
    pub(super) async fn close(self, wait: Duration) -> Option<StateDir> {
        let Disk { writes, left } = self;
        drop(writes);
        match tokio::time::timeout(wait, left).await {
            Ok(state) => state.ok(),
            Err(_) => {
                tracing::error!(
                    "the disk of the state directory does not answer; its last writes may be missing"
                );
                None
            }
        }
    }
}

fn write_all(mut state: StateDir, writes: &Receiver<Write>, tx: &mpsc::Sender<Input>) -> StateDir {
    for write in writes {
        // An agent that has ended hears no answer.
        let _ended = match write {
            Write::Job { key, bytes } => {
                let began = Instant::now();
                let result = state.save(&blob_name(&key), &bytes);
                let took = began.elapsed();
                tx.blocking_send(Input::Stored { key, took, result })
            }
            Write::Forget { key, past } => {
                // Until what is remembered instead is durable, the old state stays.
                let result = state.save_past(&past);
                let result = result.and_then(|()| state.remove(&blob_name(&key)));
                if let Err(error) = result {
                    tracing::warn!(job = %key, %error, "old state stays");
                }
                Ok(())
            }
            Write::Peers { bytes } => {
                if let Err(error) = state.save_peers(&bytes) {
                    tracing::warn!(%error, "the peers' addresses are not remembered");
                }
                tx.blocking_send(Input::PeersStored)
            }
        };
    }
    state
}
