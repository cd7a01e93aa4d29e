//! The live loop: one step or one change of the generation at a time.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::time::{Duration, Instant};

use muster_protocol::codec;
use muster_protocol::control::live::Assignment;
use muster_protocol::live::{Effect, Error as RuleError, Event, Live, Report};

use super::hand::{FetchError, Hand, Thing, fetch};
use super::outcome::{LiveError, Outcome, Patience, passes};
use super::seat::{Seat, Watch};
use super::training::{Fault, Share, Training};
use crate::collective::{Aborter, Group, GroupConfig, GroupError, Sharing};
use crate::session::{Directive, Metrics, Session};

/// Bit in a step's header: this rank has caught up.
const READY: u64 = 1;
/// Bit in a step's header: all ranks compare their states before this step.
const COMPARE: u64 = 2;

/// One generation, formed.
pub(super) struct Formed {
    pub(super) group: Group,
    pub(super) hand: Hand,
    peers: Vec<SocketAddr>,
    token: [u8; 32],
    over: Arc<AtomicBool>,
    _watch: Watch,
}

impl Drop for Formed {
    fn drop(&mut self) {
        // A copy under way is for nothing.
        self.over.store(true, Ordering::Release);
    }
}

/// A copy that is under way.
struct Copying {
    came: Receiver<Result<Vec<u8>, FetchError>>,
    since: Instant,
    /// Nobody waits for it any more.
    over: Arc<AtomicBool>,
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
    }
}

/// How a step ended that was not lost.
enum Stepped {
    Complete,
    /// It was not begun: these ranks held another state, and are newcomers now.
    Quarantined(Vec<u32>),
}

/// A rank that lives through changes of its generation.
pub struct Worker<'a, T: Training> {
    session: &'a mut Session,
    seat: Seat,
    pub(super) place: Assignment,
    pub(super) live: Live,
    /// Counts the times that this generation's ranks began anew in place.
    pub(super) turn: u64,
    /// The ranks' states are compared before each step that is a multiple of this.
    pub(super) compare_every: Option<u64>,
    /// Before this step of the generation they were compared last.
    pub(super) compared: Option<u64>,
    /// This rank wants them compared before the next one.
    pub(super) compare_next: bool,
    pub training: T,
    patience: Patience,
    pub(super) formed: Option<Formed>,
    pub(super) kept: BTreeMap<u64, T::Results>,
    next: Option<u64>,
    copying: Option<Copying>,
    say_ready: bool,
    /// A boundary at which all stop.
    stopped_at: Option<u64>,
    /// The first assignment is taken up without waiting.
    fresh: bool,
    over_since: Option<Instant>,
    /// The slowest of the last steps, decaying. What lies between two steps does not count.
    slowest: Duration,
}

impl<T: Training> std::fmt::Debug for Worker<'_, T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Worker")
            .field("place", &self.place)
            .field("live", &self.live)
            .finish_non_exhaustive()
    }
}

impl<'a, T: Training> Worker<'a, T> {
    /// Takes the process's seat. `None` where the launcher restarts workers with every generation;
    /// the training is given back.
    pub fn join(session: &'a mut Session, training: T, patience: Patience) -> Result<Self, T> {
        let Some((seat, place)) = Seat::take(session) else {
            return Err(training);
        };
        Ok(Worker {
            session,
            seat,
            live: Live::new(place.lineage),
            place,
            turn: 0,
            compare_every: None,
            compared: None,
            compare_next: false,
            training,
            patience,
            formed: None,
            kept: BTreeMap::new(),
            next: None,
            copying: None,
            say_ready: false,
            stopped_at: None,
            fresh: true,
            over_since: None,
            slowest: Duration::ZERO,
        })
    }

    /// Steps that are committed here.
    pub fn committed(&self) -> u64 {
        self.live.committed()
    }

    /// This rank's place in the newest generation.
    pub fn place(&self) -> &Assignment {
        &self.place
    }

    /// Who works on the step that comes next: the same on every rank, between two steps.
    pub fn share(&self) -> Share {
        Share {
            entered: self.live.entered().collect(),
            rank: self.place.rank,
            world: self.place.world,
        }
    }

    /// The rank that saves, if the state is to be saved between two steps: the first of those that train. The same
    /// on every rank; a rank that has not caught up yet is none.
    pub fn saver(&self) -> Option<u32> {
        self.live.entered().next()
    }

    /// Whether that is this rank.
    pub fn saves(&self) -> bool {
        self.is_settled() && self.saver() == Some(self.place.rank)
    }

    /// The collectives of the generation, while there is one. Between two steps each may take
    /// [`Patience::operation`].
    pub fn group(&mut self) -> Option<&mut Group> {
        self.formed.as_mut().map(|f| &mut f.group)
    }

    /// Tells the launcher that this rank has saved for [`Outcome::Checkpoint`], or has nothing to save.
    pub fn saved(&self, step: u64) {
        self.session.saved(step);
    }

    /// Tells how this rank trains ([`Session::report`]).
    pub fn report(&mut self, metrics: &Metrics) {
        self.session.report(metrics);
    }

    /// Whether this rank holds the state of its generation.
    pub fn is_settled(&self) -> bool {
        self.live.is_settled()
    }

    /// Does the next step, or takes part in the next change.
    ///
    /// # Errors
    /// This process cannot go on; see [`LiveError`].
    pub fn advance(&mut self) -> Result<Outcome, LiveError> {
        if let Some(step) = self.stopped_at.take() {
            self.session.acknowledge(step);
            self.leave();
        }
        if self.formed.is_none() {
            return self.regroup();
        }
        if self.seat.has_ended() {
            return Ok(self.ended("the launcher ended it".into(), None));
        }
        if let Some(outcome) = self.copied()? {
            return Ok(outcome);
        }
        let Some(step) = self.next else {
            return Ok(self.ended("no step is to be done".into(), None));
        };
        match self.session.step(step)? {
            Directive::Continue => {}
            Directive::Checkpoint { step } => return Ok(Outcome::Checkpoint { step }),
            Directive::Stop { deadline, reason } => {
                // Before anything is handed over or saved; who deviates stops before the same step, in the next call.
                match self.set_apart(step) {
                    Ok(Some(ranks)) => return Ok(Outcome::Quarantined { ranks, step }),
                    Ok(None) | Err(LiveError::Group(_)) => {}
                    Err(error) => return Err(error),
                }
                self.stopped_at = Some(step);
                if let Some(formed) = &mut self.formed {
                    match self.training.boundary(&mut formed.group) {
                        // Whoever is lost now would have left anyway.
                        Ok(()) | Err(Fault::Group(_)) => {}
                        Err(fault) => return Err(fault.into()),
                    }
                }
                return Ok(Outcome::Boundary {
                    step,
                    reason,
                    deadline,
                });
            }
        }
        match self.step(step) {
            Ok(Stepped::Complete) => Ok(Outcome::Stepped {
                step,
                committed: self.live.committed(),
            }),
            Ok(Stepped::Quarantined(ranks)) => Ok(Outcome::Quarantined { ranks, step }),
            Err(LiveError::Group(error)) if passes(&error) => Ok(self.ended_by(&error)),
            Err(error) => Err(error),
        }
    }

    /// The last thing that a training does, once it is over on every rank ([`share`](Self::share) tells whether all
    /// train): waits until all have got here, so that nobody leaves while another is still in the last step. States
    /// are compared first, if they ever are. `None`: all are here, and the process may end. Otherwise
    /// what went on instead, as of [`advance`](Self::advance), which is to be called again: a rank that was lost may
    /// have left another without the last results, which this one holds.
    ///
    /// # Errors
    /// This process cannot go on; see [`LiveError`].
    pub fn finish(&mut self) -> Result<Option<Outcome>, LiveError> {
        let Some(step) = self.next.filter(|_| self.formed.is_some()) else {
            return Ok(Some(self.ended("no step is to be done".into(), None)));
        };
        match self.last_barrier(step) {
            Ok(None) => Ok(None),
            Ok(Some(ranks)) => Ok(Some(Outcome::Quarantined { ranks, step })),
            Err(LiveError::Group(error)) if passes(&error) => Ok(Some(self.ended_by(&error))),
            Err(error) => Err(error),
        }
    }

    fn last_barrier(&mut self, step: u64) -> Result<Option<Vec<u32>>, LiveError> {
        if let Some(ranks) = self.set_apart(step)? {
            return Ok(Some(ranks));
        }
        if let Some(formed) = &mut self.formed {
            formed.group.barrier()?;
        }
        Ok(None)
    }

    /// Leaves the generation for good.
    fn leave(&mut self) {
        // Dropped first: nothing of this generation is sent once the seat is parked.
        self.formed = None;
        self.forget_copy();
        self.next = None;
        self.over_since.get_or_insert_with(Instant::now);
        self.seat.park();
    }

    fn ended_by(&mut self, error: &GroupError) -> Outcome {
        let lost = match error {
            GroupError::PeerLost { rank, .. } => Some(*rank),
            _ => None,
        };
        self.ended(error.to_string(), lost)
    }

    fn ended(&mut self, why: String, lost: Option<u32>) -> Outcome {
        let number = self.number();
        self.leave();
        // Cannot fail: a loss is expected in every phase.
        let _parked = self.live.handle(Event::Lost { number });
        Outcome::Ended { why, lost }
    }

    fn regroup(&mut self) -> Result<Outcome, LiveError> {
        if !std::mem::take(&mut self.fresh) {
            match self.seat.next(self.patience.assignment) {
                Some(place) => (self.place, self.turn) = (place, 0),
                None => return Ok(Outcome::Waiting),
            }
        }
        let since = self.over_since.unwrap_or_else(Instant::now);
        if self.live.report().lineage != self.place.lineage {
            // Another job took this one in: what was trained here belongs to neither.
            self.live = Live::new(self.place.lineage);
            self.kept.clear();
        }
        match self.form() {
            Ok(survived) => {
                self.over_since = None;
                Ok(Outcome::Regrouped {
                    place: self.place,
                    committed: self.live.committed(),
                    survived,
                    took: since.elapsed(),
                })
            }
            Err(LiveError::Group(error)) if passes(&error) => Ok(self.ended_by(&error)),
            // The holder may be lost, or the generation over.
            Err(LiveError::Fetch(error)) => Ok(self.ended(error.to_string(), None)),
            Err(error) => Err(error),
        }
    }

    /// Forms the group, exchanges reports and carries out the verdict. Whether this rank survived.
    fn form(&mut self) -> Result<bool, LiveError> {
        let place = self.place;
        let number = self.number();
        let rank = place.rank;
        self.compared = None;
        self.live.handle(Event::Assigned { number, rank })?;
        let report = self.begin_exchange();
        // Two starts of one generation are two groups.
        let mut hasher = blake3::Hasher::new_derive_key("muster live group v1");
        hasher
            .update(&place.digest.0)
            .update(&place.term.0.to_le_bytes());
        let token = *hasher.finalize().as_bytes();
        let aborter = Aborter::new()?;
        let over = Arc::new(AtomicBool::new(false));
        let (ends, ended) = (aborter.clone(), over.clone());
        let watch = self.seat.watch(move || {
            ended.store(true, Ordering::Release);
            ends.abort();
        })?;
        let config = GroupConfig {
            rank,
            world: place.world,
            master: Some((place.master.ip().to_string(), place.master.port())),
            token,
            digest: token,
            sharing: Sharing::Auto,
            form_within: self.patience.form,
            op_within: self.patience.operation,
        };
        let mut group = Group::form_abortable(&config, &aborter)?;
        group.mark_waits(self.session.waits());
        let hand = Hand::open(towards(place.master), token)?;
        self.formed = Some(Formed {
            group,
            hand,
            peers: Vec::new(),
            token,
            over,
            _watch: watch,
        });
        self.exchange(report)?;
        let survived = self.copying.is_none();
        if let Some(formed) = &mut self.formed {
            self.training.regrouped(&mut formed.group, survived)?;
        }
        Ok(survived)
    }

    /// All ranks tell each other what they hold; what the rule makes of that is carried out.
    pub(super) fn exchange(&mut self, report: Report) -> Result<(), LiveError> {
        let (number, rank) = (self.number(), self.place.rank);
        let Some(formed) = &mut self.formed else {
            return Ok(());
        };
        formed.hand.withdraw_all();
        let hello = codec::encode_body(&(report, formed.hand.address()))
            .map_err(|_| LiveError::NoReport { rank })?;
        let mut reports = Vec::new();
        formed.peers.clear();
        for (rank, bytes) in (0..).zip(formed.group.all_gather_bytes(&hello)?) {
            let (report, address): (Report, SocketAddr) =
                codec::decode_body(&bytes).map_err(|_| LiveError::NoReport { rank })?;
            reports.push(report);
            formed.peers.push(address);
        }
        self.live.handle(Event::Reported { number, reports })?;
        self.carry_out()
    }

    /// Waits for no copy of a state any more.
    pub(super) fn forget_copy(&mut self) {
        self.copying = None;
        self.say_ready = false;
    }

    /// The report that the core wants exchanged.
    pub(super) fn begin_exchange(&mut self) -> Report {
        let mut report = self.live.report();
        while let Some(effect) = self.live.poll_effect() {
            match effect {
                Effect::Exchange(said) => report = said,
                // Results that are not whole were never kept.
                Effect::Discard => self.next = None,
                _ => {}
            }
        }
        self.kept.retain(|step, _| report.holds == Some(*step));
        report
    }

    /// How long an operation inside a step may take. Between two steps, until the header is there, it is
    /// [`Patience::operation`]: a rank saves meanwhile, takes in a copy, or tells its hooks.
    fn operation(&self) -> Duration {
        let most = self.patience.operation;
        match self.slowest {
            _ if self.training.has_long_steps() => most,
            Duration::ZERO => most,
            slowest => (slowest * Patience::STEPS).clamp(most / 10, most),
        }
    }

    fn step(&mut self, step: u64) -> Result<Stepped, LiveError> {
        let number = self.number();
        let share = self.share();
        let operation = self.operation();
        let mut compares = self.compares_at(step);
        let mut flags = 0;
        if std::mem::take(&mut self.say_ready) {
            flags |= READY;
        }
        if std::mem::take(&mut self.compare_next) {
            flags |= COMPARE;
        }
        let Some(formed) = &mut self.formed else {
            return Ok(Stepped::Complete);
        };
        let mut headers = vec![0u64; 2 * share.world as usize];
        formed.group.all_gather(&[step, flags], &mut headers)?;
        let mut ready = Vec::new();
        for (rank, header) in (0..).zip(headers.as_chunks::<2>().0) {
            if header[0] != step {
                return Err(LiveError::OutOfStep {
                    rank,
                    theirs: header[0],
                    ours: step,
                });
            }
            if header[1] & READY != 0 {
                ready.push(rank);
            }
            compares |= header[1] & COMPARE != 0;
        }
        if share.entered.len() == share.world as usize {
            // All have what they asked for, and no frozen copy is needed any more.
            formed.hand.withdraw_all();
        }
        self.live.handle(Event::UnderWay {
            number,
            step,
            ready,
        })?;
        self.carry_out()?;
        if compares && let Some(ranks) = self.set_apart(step)? {
            return Ok(Stepped::Quarantined(ranks));
        }
        let began = Instant::now();
        let Some(formed) = &mut self.formed else {
            return Ok(Stepped::Complete);
        };
        formed.group.set_op_within(operation);
        let results = self.training.results(step, &share, &mut formed.group)?;
        formed.group.set_op_within(self.patience.operation);
        self.kept.insert(step, results);
        self.live.handle(Event::Complete { number, step })?;
        self.carry_out()?;
        self.slowest = (self.slowest * 15 / 16).max(began.elapsed());
        Ok(Stepped::Complete)
    }

    /// Takes in a copy that is complete.
    fn copied(&mut self) -> Result<Option<Outcome>, LiveError> {
        let Some(copying) = &self.copying else {
            return Ok(None);
        };
        let (came, since) = (copying.came.try_recv(), copying.since);
        let bytes = match came {
            Err(TryRecvError::Empty) => return Ok(None),
            Ok(Ok(bytes)) => bytes,
            // Every source is lost: the next generation finds another way.
            Ok(Err(error)) => return Ok(Some(self.ended(error.to_string(), None))),
            Err(TryRecvError::Disconnected) => {
                return Ok(Some(self.ended("the copy was cut short".into(), None)));
            }
        };
        self.copying = None;
        if !self.training.adopt_state(bytes) {
            return Err(LiveError::Useless { what: "state" });
        }
        self.unharmed()?;
        let number = self.number();
        self.live.handle(Event::Copied { number })?;
        self.carry_out()?;
        Ok(Some(Outcome::CaughtUp {
            committed: self.live.committed(),
            took: since.elapsed(),
        }))
    }

    pub(super) fn carry_out(&mut self) -> Result<(), LiveError> {
        while let Some(effect) = self.live.poll_effect() {
            self.effect(effect)?;
        }
        Ok(())
    }

    fn effect(&mut self, effect: Effect) -> Result<(), LiveError> {
        let number = self.number();
        match effect {
            // Done before the group was formed.
            Effect::Exchange(_) | Effect::Discard => {}
            // Kept by the step already.
            Effect::Keep { .. } => {}
            Effect::Begin { step, .. } => self.next = Some(step),
            Effect::SayReady => self.say_ready = true,
            Effect::Commit { step } => {
                // Skipped in silence, it would leave this rank another state than the core counts.
                let results = self.kept.get(&step).ok_or(RuleError::Unexpected {
                    what: "a commit without results",
                })?;
                self.training.commit(step, results);
                self.unharmed()?;
            }
            Effect::Release { step } => {
                if let Some(results) = self.kept.remove(&step) {
                    self.training.recycle(results);
                }
            }
            Effect::HandResults { step, .. } => {
                if let (Some(formed), Some(results)) = (&self.formed, self.kept.get(&step)) {
                    let bytes = self.training.encode_results(results);
                    formed.hand.offer(Thing::Results(step), bytes);
                }
            }
            Effect::HandState { boundary, .. } => {
                if let Some(formed) = &self.formed {
                    let state = self.training.freeze();
                    if let Some(error) = self.training.fault() {
                        return Err(LiveError::Training(error));
                    }
                    formed.hand.offer(Thing::State(boundary), state);
                }
            }
            Effect::Fetch { step, from } => {
                let Some(formed) = &self.formed else {
                    return Ok(());
                };
                let thing = Thing::Results(step);
                let from: Vec<SocketAddr> = formed
                    .peers
                    .get(from as usize)
                    .copied()
                    .into_iter()
                    .collect();
                let bytes = fetch(thing, &from, formed.token, self.patience.copy, &formed.over)?;
                let results = self
                    .training
                    .decode_results(&bytes)
                    .ok_or(LiveError::Useless { what: "results" })?;
                self.kept.insert(step, results);
                self.live.handle(Event::Fetched { number })?;
            }
            Effect::CopyState { boundary, from } => {
                self.kept.clear();
                self.copying = Some(self.copy(boundary, &from)?);
            }
            Effect::Restore => {
                self.kept.clear();
                let Some(formed) = &mut self.formed else {
                    return Ok(());
                };
                let committed = self.training.restore(&mut formed.group)?;
                self.live.handle(Event::Restored { number, committed })?;
            }
        }
        Ok(())
    }

    /// A state that is not what was committed is neither trained on, handed out, nor saved.
    fn unharmed(&mut self) -> Result<(), LiveError> {
        self.training
            .fault()
            .map_or(Ok(()), |error| Err(LiveError::Training(error)))
    }

    /// Starts a copy of the frozen state on a thread of its own.
    fn copy(&self, boundary: u64, from: &[u32]) -> Result<Copying, LiveError> {
        let (told, came) = channel();
        let copying = Copying {
            came,
            since: Instant::now(),
            over: Arc::default(),
        };
        if let Some(formed) = &self.formed {
            let sources: Vec<SocketAddr> = from
                .iter()
                .filter_map(|rank| formed.peers.get(*rank as usize).copied())
                .collect();
            let (token, over, within) = (formed.token, copying.over.clone(), self.patience.copy);
            std::thread::Builder::new()
                .name("muster-copy".into())
                .spawn(move || {
                    let state = fetch(Thing::State(boundary), &sources, token, within, &over);
                    // Nobody waits for it any more when the generation is over.
                    let _gone = told.send(state);
                })?;
        }
        Ok(copying)
    }
}

/// The address of this host from which the master is reached; no packet is sent.
fn towards(master: SocketAddr) -> IpAddr {
    let any: IpAddr = match master {
        SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    let local = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect(master)?;
        socket.local_addr()
    });
    local.map_or(any, |local| local.ip())
}
