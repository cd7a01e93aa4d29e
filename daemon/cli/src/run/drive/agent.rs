//! Frames from the agent and to it.

use std::os::fd::OwnedFd;
use std::time::Duration;

use muster_daemon::socket::NoRoom;
use muster_launcher::{Event, Session};
use muster_protocol::local::{SaveAsk, SaveNews, StoreAnswer, ToAgent, ToLauncher};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{Driver, now, say};
use crate::run::embedded::Gone;
use crate::run::link::LinkEvent;

/// The exit code when the agent inside this process is gone: the job goes on elsewhere, if at all.
const AGENT_GONE: i32 = 1;

/// How long the last words of an agent that ended may take to arrive.
const LAST_WORDS: Duration = Duration::from_secs(1);

impl Driver {
    pub(super) fn link_event(&mut self, event: LinkEvent, session: &mut Session) {
        match event {
            LinkEvent::Up(queue) => {
                self.link = Some(queue);
                self.progress.link_up();
                if let Some(store) = &mut self.store {
                    store.link_up();
                }
                session.handle(Event::LinkUp, now());
            }
            LinkEvent::Down { heard } => {
                self.link = None;
                session.handle(Event::LinkDown, now());
                if heard && session.has_workers() && !session.is_outdated() {
                    say("the agent is away; the workers go on");
                    self.away.get_or_insert_with(Instant::now);
                }
            }
            LinkEvent::Frame(got) if !session.takes(&got.0) => {}
            LinkEvent::Frame(got) => {
                let (frame, fds) = *got;
                // An agent that starts is connected to before it serves.
                let serves = matches!(frame, ToLauncher::Welcome { .. });
                if let Some(since) = self.away.take_if(|_| serves) {
                    let after = since.elapsed().as_secs_f64();
                    say(&format!("the agent is back, after {after:.1} s"));
                }
                self.frame(frame, fds, session);
            }
            LinkEvent::Gone(why) => {
                self.link = None;
                let (code, report) = (AGENT_GONE, why);
                let end = ToLauncher::End { code, report };
                session.handle(Event::Frame(end), now());
            }
            LinkEvent::Away(why) => say(&format!("no agent answers, trying again: {why}")),
        }
    }

    /// Handles a frame from the agent.
    pub(super) fn frame(
        &mut self,
        frame: ToLauncher,
        fds: Result<Vec<OwnedFd>, NoRoom>,
        session: &mut Session,
    ) {
        match frame {
            ToLauncher::Save(SaveAsk::Inherit { k }) => match fds {
                Ok(fds) => {
                    let told = self.saves.inherit(k, fds, self.workers.count());
                    self.tell(told);
                }
                Err(why) => say(&format!(
                    "the checkpoint slots that were left of local rank {k} are of no use: {why}"
                )),
            },
            ToLauncher::Store { id, ask } => {
                let answer = match &mut self.store {
                    Some(store) => store.ask(id, ask),
                    None => Some(StoreAnswer::failed("this launcher has no store".into())),
                };
                if let Some(answer) = answer {
                    self.send(ToAgent::Store { id, answer });
                }
            }
            ToLauncher::Save(ask) => {
                self.told_of_saves(&ask);
                for news in self.saves.ask(ask) {
                    self.send(ToAgent::Save(news));
                }
            }
            frame => session.handle(Event::Frame(frame), now()),
        }
    }

    pub(super) fn send(&mut self, frame: ToAgent) {
        if let Some(queue) = &self.link {
            let fds = match &frame {
                ToAgent::Save(SaveNews::Slots { k, .. }) if self.leaves => {
                    self.saves.descriptors(*k)
                }
                _ => Vec::new(),
            };
            // A full queue means an agent that hangs; the facts are told again on the next link.
            if queue.try_send((frame, fds)).is_err() {
                self.link = None;
            }
        }
    }

    /// A new link begins with a registration. The slots come right after it: an agent takes nothing from a
    /// launcher that it does not know, and has to know of them before it hears of workers that ended.
    pub(super) fn send_with_slots(&mut self, frame: ToAgent) {
        let begins = matches!(frame, ToAgent::Register(_));
        self.send(frame);
        if begins {
            for news in self.saves.link_up() {
                self.send(ToAgent::Save(news));
            }
            self.telling_again();
        }
    }
}

/// Says when the agent in this process has ended. One that was told to end has said so to its
/// launcher before.
pub(super) async fn watch(agent: Gone, events: mpsc::Sender<LinkEvent>) {
    let why = match agent.await {
        Ok(()) => "the agent inside this process ended",
        Err(_) => "the agent inside this process failed; the lines above say why",
    };
    tokio::time::sleep(LAST_WORDS).await;
    let why = format!("{why}: this node's part of the job ends; start it again to join anew");
    let _over = events.send(LinkEvent::Gone(why)).await;
}
