//! The applicant: a launcher on this node that is not a member yet asks at the right door, again
//! and again, and people are told what it waits for.

use std::cmp::Ordering;
use std::net::SocketAddr;

use super::unanswered::Unanswered;
use super::{Ctx, Job, REPEAT};
use crate::agent::Notice;
use crate::ids::{Digest, LauncherId, NodeId};
use crate::local::ToLauncher;
use crate::membership::State;
use crate::record::{Member, Record};
use crate::time::{Span, Time};
use crate::wire::{Advert, JobMessage, Ticket, Wait};

/// A wait of which nothing but numbers has changed is told to people no more often.
const SAME_WAIT: Span = Span::from_secs(60);

/// The shortest time between tickets at two doors.
const DOOR_CHANGE: Span = Span::from_millis(20);

/// How this node's wish to join stands.
#[derive(Clone, Debug, Default)]
pub(super) struct Applicant {
    /// Where the last ticket went, and when.
    asked: Option<(NodeId, Time)>,
    /// The members without a link to here, as that ticket said.
    unlinked: Vec<NodeId>,
    /// People were told last that the one that is asked does not answer: what another one says is news.
    mute: bool,
    /// When a ticket was answered last.
    heard: Time,
    /// Since when the launcher waits.
    pub(super) since: Option<Time>,
    pub(super) told: Told,
    /// A leader that another agent named.
    referred: Option<NodeId>,
    /// The leader of the generation named, by the word of the member that is believed to: its members
    /// know more of each other than a stranger does.
    deputy: Option<Deputy>,
    pub(super) unanswered: Unanswered,
}

/// The wait that people were told of.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    pub(super) text: String,
    at: Time,
    /// How many of its nodes are there, where nothing runs because they are too few.
    pub(super) there: Option<u16>,
}

impl Told {
    pub(super) fn clear(&mut self) {
        *self = Told::default();
    }
}

#[derive(Clone, Debug)]
struct Deputy {
    generation: Digest,
    leader: NodeId,
    leads: NodeId,
}

impl Job {
    /// Whether the launcher here is a member of the present generation.
    pub(super) fn is_member(&self, ctx: &Ctx<'_>) -> bool {
        let (Some(head), Some(local)) = (self.live(), &self.local) else {
            return false;
        };
        head.record
            .member(ctx.me())
            .is_some_and(|m| m.launcher == local.reg.launcher && m.state == ctx.cfg.state)
    }

    /// Where the last ticket went.
    pub(super) fn door_asked(&self) -> Option<NodeId> {
        self.applicant.asked.map(|(to, _)| to)
    }

    fn wants_in(&self, ctx: &Ctx<'_>) -> bool {
        let stops = self.local.as_ref().is_some_and(|l| l.stopping.is_some());
        self.is_here_to_join(ctx) && !stops
    }

    /// Whether it wants in, at once or as soon as what it ran before has stopped.
    fn is_here_to_join(&self, ctx: &Ctx<'_>) -> bool {
        let Some(local) = &self.local else {
            return false;
        };
        local.conn.is_some()
            && local.leave.is_none()
            && !local.cancel
            && local.over.is_none()
            && !self.is_member(ctx)
            && !self.waits_for_place(ctx)
            && !self.is_unresponsive()
    }

    pub(super) fn drive_applicant(&mut self, ctx: &mut Ctx<'_>) {
        self.dismiss_unwilling(ctx);
        if !self.wants_in(ctx) {
            let goes = self.local.as_ref().is_some_and(|l| l.over.is_some());
            let over = self.is_member(ctx) || self.is_unresponsive() || goes;
            if let Some((door, _)) = self.applicant.asked.filter(|_| over) {
                // An agent that only looks on does not hear that this node was let in, or that its launcher goes.
                self.send(ctx, door, JobMessage::Withdraw);
            }
            self.applicant = Applicant {
                told: std::mem::take(&mut self.applicant.told),
                ..Applicant::default()
            };
            return;
        }
        let since = *self.applicant.since.get_or_insert(ctx.now);
        self.pass_over_silent(ctx);
        if !self.follows_log(ctx) {
            // The log's own wakes lead here again.
            if let Some((door, _)) = self.applicant.asked.take() {
                self.send(ctx, door, JobMessage::Withdraw);
            }
            if let Some(damage) = self.log_damage() {
                self.tell_waiting(ctx.now, damage);
            }
            return;
        }
        if self.awaits_word_of_end(ctx) {
            // The ticket says for how long a start waits, and holds until it is said again.
            return;
        }
        let Some(door) = self.door(ctx) else {
            self.wake_at(ctx.now + REPEAT, "look for somebody to join");
            return;
        };
        let due = match self.applicant.asked {
            Some((to, at)) if to == door && self.unlinked(ctx) == self.applicant.unlinked => {
                at + REPEAT
            }
            // Two doors that refer to each other must not make a storm, nor a link that flaps.
            Some((_, at)) => at + DOOR_CHANGE,
            None => ctx.now,
        };
        if ctx.now >= due {
            if let Some((before, _)) = self.applicant.asked
                && before != door
            {
                self.send(ctx, before, JobMessage::Withdraw);
            }
            self.applicant.asked = Some((door, ctx.now));
            self.applicant.unanswered.note_ticket(ctx, door);
            if let Some(ticket) = self.ticket(ctx) {
                self.applicant.unlinked.clone_from(&ticket.unreachable);
                let other = self.other_door(ctx, since);
                for other in other
                    .into_iter()
                    .chain(self.named_by())
                    .filter(|n| *n != door)
                {
                    self.send(ctx, other, JobMessage::Ticket(Box::new(ticket.clone())));
                }
                self.send(ctx, door, JobMessage::Ticket(Box::new(ticket)));
            }
            let silent = door != ctx.me() && self.applicant.told.text.is_empty();
            if silent && ctx.now >= since.max(self.applicant.heard) + REPEAT.times(2) {
                self.applicant.mute = true;
                let text = format!(
                    "{} is asked for a place in the job, and does not answer: its agent is stopped, or cannot be \
                     reached. Another agent is asked soon",
                    ctx.name(door)
                );
                self.tell_waiting(ctx.now, text);
            }
            self.wake_at(ctx.now + REPEAT, "renew the ticket");
        } else {
            self.wake_at(due, "renew the ticket");
        }
    }

    /// The first word of an agent on a connection. A ticket or an order that went to it before it knew the connection
    /// counts for nothing there.
    pub(crate) fn greeted_by(&mut self, node: NodeId) {
        self.applicant.asked.take_if(|(door, _)| *door == node);
        self.ask_again(node);
        if let Some(lead) = &mut self.lead {
            lead.orders.say_again(node);
        }
    }

    /// The node to ask: the leader of the newest generation known; else, while none is known, the
    /// lowest agent that is connected (all agents agree on it once they all are).
    fn door(&self, ctx: &Ctx<'_>) -> Option<NodeId> {
        if let Some(head) = self.live() {
            // Nobody here watches its members: the first may be dead, and another of them lead.
            let leader = self.acting_leader(ctx, &head.record);
            if let Some(leader) = leader.filter(|n| ctx.reachable(*n)) {
                let deputy = self.applicant.deputy.as_ref().filter(|d| {
                    (d.generation, d.leader) == (head.digest, leader) && ctx.reachable(d.leads)
                });
                return Some(deputy.map_or(leader, |d| d.leads));
            }
        } else if let Some(leader) = self.applicant.referred.filter(|n| ctx.reachable(*n)) {
            return Some(leader);
        } else if let Some(hint) = self.best_hint(ctx) {
            return Some(hint);
        }
        self.meeting_place(ctx)
    }

    /// Where those meet whom nobody leads: at the first agent of the generation that is there, though
    /// it may be without its launcher, for who knows less takes that one for the leader; else at the
    /// lowest agent. Those that go on by an operator's word meet at one of theirs, for nobody else knows that word.
    pub(super) fn meeting_place(&self, ctx: &Ctx<'_>) -> Option<NodeId> {
        let continues = self.durable.continues.as_ref();
        let before = self.before.as_ref();
        let before = before.filter(|b| continues.is_some_and(|c| c.parent == b.digest));
        let silent =
            |n: NodeId| self.applicant.unanswered.is_silent(n) || self.is_continued_without(n);
        let of = self.live().or(before).into_iter();
        let mut members = of.flat_map(|h| &h.record.members);
        let there = |m: &&Member| {
            // Without a generation nobody watches them.
            let well = match self.live() {
                Some(_) => !self.is_lost(ctx, m) && !ctx.peers.away(m.node),
                None => !silent(m.node),
            };
            ctx.reachable(m.node) && well
        };
        let lowest = || {
            let all = ctx.peers.connected_nodes().chain([ctx.me()]);
            let all = all.filter(|n| !silent(*n));
            all.min_by_key(|n| self.meeting_order(ctx, *n))
        };
        members.find(there).map(|m| m.node).or_else(lowest)
    }

    /// Whether a person had the job go on without this node, and nothing was decided since.
    fn is_continued_without(&self, node: NodeId) -> bool {
        let continues = self.durable.continues.as_ref();
        continues.is_some_and(|c| c.without.contains(&node))
    }

    /// Those before others are met at first. One that cannot store its vote begins no life.
    pub(super) fn meeting_order(&self, ctx: &Ctx<'_>, node: NodeId) -> (bool, NodeId) {
        (self.is_unstored(ctx, node), node)
    }

    /// The node that named the deputy is asked all along: it may lead itself by now, and nobody else knows
    /// that.
    fn named_by(&self) -> Option<NodeId> {
        let deputy = self.applicant.deputy.as_ref()?;
        (deputy.generation == self.head_digest()).then_some(deputy.leader)
    }

    /// Where there is no link to the lowest agent, not all can meet at one door: after a while of
    /// no success the others are asked too, in turn.
    fn other_door(&self, ctx: &Ctx<'_>, since: Time) -> Option<NodeId> {
        let rounds = ctx.now.since(since).0 / ctx.cfg.birth_timeout.0.max(1);
        if rounds < 2 || self.live().is_some() || self.applicant.referred.is_some() {
            return None;
        }
        let doors = ctx.peers.connected_nodes().chain([ctx.me()]);
        let mut doors: Vec<NodeId> = doors.filter(|n| !self.is_continued_without(*n)).collect();
        doors.sort_unstable();
        let turn = usize::try_from(rounds - 1).unwrap_or(0);
        doors.get(turn % doors.len()).copied()
    }

    /// A connected agent that belongs to the newest generation which others speak of. Numbers of different lives say
    /// nothing of each other: the word of a leader that is heard itself counts more than that of others, whose
    /// generation may be long over.
    pub(super) fn best_hint(&self, ctx: &Ctx<'_>) -> Option<NodeId> {
        let (node, advert) = self
            .adverts(ctx.peers.all)
            .filter(|(_, a)| a.belongs)
            .filter(|(_, a)| self.durable.superseded(a.lineage, a.number).is_none())
            // Said before that life of the job ended.
            .filter(|(_, a)| !self.durable.has_ended(a.lineage))
            .filter(|(_, a)| ctx.past.over(&a.lineage, a.number).is_none())
            .max_by_key(|(n, a)| (self.is_led(ctx, *n, a), a.number, a.lineage, *n))?;
        advert.leader.filter(|n| ctx.reachable(*n)).or(Some(node))
    }

    /// Whether the leader that `from` names in this advert says itself that the job's life goes on.
    fn is_led(&self, ctx: &Ctx<'_>, from: NodeId, advert: &Advert) -> bool {
        let leader = advert.leader.unwrap_or(from);
        let hello = ctx.peers.get(leader).filter(|p| p.connected);
        let said = hello.and_then(|p| p.hello.as_ref()).into_iter();
        let mut said = said.flat_map(|h| &h.jobs);
        said.any(|a| a.key == self.key && a.lineage == advert.lineage && a.belongs)
    }

    /// The address by which peers reach the launcher: this node's own address as peers see it,
    /// where the launcher shares it; else the launcher's first.
    fn guard_addr(&self, ctx: &Ctx<'_>) -> Option<SocketAddr> {
        let local = self.local.as_ref()?;
        let observed = ctx
            .peers
            .map
            .values()
            .filter(|p| p.connected)
            .filter_map(|p| p.observed)
            .find(|ip| local.reg.addrs.contains(ip) && !ip.is_loopback());
        let ip = observed.or_else(|| {
            let far = |p: &crate::peers::Peer| p.observed.is_some_and(|ip| !ip.is_loopback());
            let apart = ctx.peers.map.values().any(|p| p.connected && far(p));
            let mut addrs = local.reg.addrs.iter();
            if apart {
                addrs.find(|ip| !ip.is_loopback()).copied()
            } else {
                addrs.next().copied()
            }
        })?;
        Some(SocketAddr::new(ip, local.reg.guard_port))
    }

    /// This launcher as a member.
    pub(super) fn as_member(&self, ctx: &Ctx<'_>) -> Option<Member> {
        let local = self.local.as_ref()?;
        Some(Member {
            node: ctx.me(),
            state: ctx.cfg.state,
            launcher: local.reg.launcher,
            slots: local.reg.slots,
            guard: self.guard_addr(ctx)?,
            place: local.reg.place,
        })
    }

    fn ticket(&self, ctx: &Ctx<'_>) -> Option<Ticket> {
        let local = self.local.as_ref()?;
        Some(Ticket {
            member: self.as_member(ctx)?,
            spec: local.reg.spec.clone(),
            knows: self.head_digest(),
            store: local.store,
            host: ctx.cfg.host.clone(),
            command: local.reg.command.clone(),
            unreachable: self.unlinked(ctx),
            // For a generation that runs, its leader waits.
            held_ms: self.live().map_or_else(|| self.held_ms(ctx), |_| 0),
            waited_ms: u32::try_from(ctx.now.since(local.waits_since).as_millis())
                .unwrap_or(u32::MAX),
        })
    }

    /// Members of the generation that this node would join to which it has no connection, or one that only
    /// looks alive (R19).
    pub(super) fn unlinked(&self, ctx: &Ctx<'_>) -> Vec<NodeId> {
        let members = self.live().into_iter().flat_map(|h| &h.record.members);
        let silent = |n| {
            matches!(
                ctx.peers.unwell(n),
                Some(State::Suspect { .. } | State::Lost { .. })
            )
        };
        members
            .map(|m| m.node)
            .filter(|n| !ctx.reachable(*n) || silent(*n))
            .take(crate::wire::MAX_LIST)
            .collect()
    }

    pub(super) fn on_ticket_ack(
        &mut self,
        ctx: &mut Ctx<'_>,
        from: NodeId,
        lineage: Digest,
        wait: Wait,
    ) {
        // This counts also while what ran here before is being stopped: it may be said only once.
        let waits = !lineage.is_zero() && !self.came_after_order(ctx, lineage);
        if waits && self.is_here_to_join(ctx) && !self.is_of_life(lineage) {
            self.set_life(Some(lineage));
            // The word of its end may have come before.
            self.hear_of_known_ends(ctx);
        }
        if !self.wants_in(ctx) {
            let lead = self.live().and_then(|h| self.acting_leader(ctx, &h.record));
            if lead == Some(from) && self.has_stopped() {
                self.tell_wait(ctx, &wait);
                let leaves = self.local.as_ref().is_some_and(|l| l.leave.is_some());
                if leaves && matches!(wait, Wait::Forming { have: 0, .. }) {
                    self.part_from_unreached();
                }
            }
            return;
        }
        if !matches!(wait, Wait::Elsewhere { .. }) {
            // Who gathers tickets itself refers to nobody any more.
            self.applicant.deputy.take_if(|d| d.leader == from);
        }
        if let Wait::Elsewhere { advert } = &wait {
            let same_life = self.live().filter(|h| h.lineage() == advert.lineage);
            let known = same_life.map(|h| h.record.number.cmp(&advert.number));
            // A witness may lead what it has not heard of, where no member is left.
            let leads = advert.leader == Some(ctx.me()) && advert.digest != self.head_digest();
            if leads || known == Some(Ordering::Less) {
                let have = self.head_digest();
                self.send(ctx, from, JobMessage::Ask { have });
            }
            if known == Some(Ordering::Greater) && self.door_asked() == Some(from) {
                // It has not heard of the generation that is known here, and perhaps leads it.
                self.applicant.asked = Some((from, ctx.now + DOOR_CHANGE - REPEAT));
                (self.applicant.mute, self.applicant.heard) = (false, ctx.now);
                return self.wake_at(ctx.now + DOOR_CHANGE, "renew the ticket");
            }
            let reachable = advert.leader.filter(|n| ctx.reachable(*n) && *n != from);
            match self.live() {
                None if reachable.is_some() => self.applicant.referred = reachable,
                None => {}
                Some(head) => {
                    let generation = head.digest;
                    let asked = self.acting_leader(ctx, &head.record) == Some(from);
                    let known = advert.digest == generation && head.record.has(from);
                    self.applicant.deputy = reachable.filter(|_| asked && known).map(|leads| {
                        let leader = from;
                        Deputy {
                            generation,
                            leader,
                            leads,
                        }
                    });
                }
            }
        } else if matches!(
            wait,
            Wait::Forming { .. } | Wait::Batching { .. } | Wait::Orphan { .. } | Wait::Held { .. }
        ) {
            // Others gather elsewhere, perhaps: who asked here once is not bound to this door.
            self.applicant.referred = None;
        } else {
            self.applicant.referred = Some(from).filter(|n| *n != ctx.me());
        }
        // Others that are asked besides see less: each knows of those alone that ask there.
        let asked = self.door_asked() == Some(from);
        if asked || self.applicant.mute || self.applicant.told.text.is_empty() {
            self.tell_wait(ctx, &wait);
        }
        (self.applicant.mute, self.applicant.heard) = (false, ctx.now);
    }

    /// Tells people what the job waits for, once per change.
    pub(super) fn tell_waiting(&mut self, now: Time, text: String) {
        let told = &mut self.applicant.told;
        if told.text == text {
            return;
        }
        let same = without_numbers(&told.text).eq(without_numbers(&text));
        told.text.clone_from(&text);
        told.there = None;
        if same && now < told.at + SAME_WAIT {
            return;
        }
        told.at = now;
        self.tell_launcher(ToLauncher::Waiting { text: text.clone() });
        self.notice(Notice::Waiting {
            key: self.key.clone(),
            text,
        });
    }

    /// The same, of a wait for which there are words, with how many nodes are there.
    pub(super) fn tell_wait(&mut self, ctx: &Ctx<'_>, wait: &Wait) {
        let text = self.explain(ctx, wait);
        self.tell_waiting(ctx.now, text);
        self.applicant.told.there = match wait {
            Wait::Forming { have, .. } => Some(*have),
            Wait::NoQuorum { .. } | Wait::Unstored { .. } => self.live().map(|h| {
                let there = self.survivors(ctx, &h.record).len();
                u16::try_from(there).unwrap_or(u16::MAX)
            }),
            Wait::Orphan { .. } => Some(0),
            _ => None,
        };
    }

    pub(super) fn on_ticket_refused(
        &mut self,
        ctx: &mut Ctx<'_>,
        launcher: LauncherId,
        why: String,
    ) {
        // The birth to which this agent is bound may still be decided.
        let bound = self.durable.bound.as_ref();
        let bound = bound.is_some_and(|b| b.members.iter().any(|m| m.launcher == launcher));
        if self.launcher() != Some(launcher) || self.is_member(ctx) || bound {
            return;
        }
        self.part(ToLauncher::Refused { reason: why });
    }
}

/// The words of a sentence, for waits that count down.
fn without_numbers(text: &str) -> impl Iterator<Item = char> + '_ {
    text.chars().filter(|c| !c.is_ascii_digit())
}

/// The members and witnesses of `record` that this agent has no link to.
pub(super) fn unreachable(ctx: &Ctx<'_>, record: &Record) -> Vec<NodeId> {
    record
        .members
        .iter()
        .map(|m| m.node)
        .filter(|n| *n != ctx.me() && ctx.peers.lost(*n).is_some())
        .take(crate::wire::MAX_LIST)
        .collect()
}
