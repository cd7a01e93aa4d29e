//! Index of what this launcher holds in memory of its job's checkpoints: images in its own slots, for as long as they
//! are there, and copies of another node's, or parity of several, within the memory that slots leave. Never waits,
//! touches no byte of an image, and gives back no memory itself.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};

use muster_checkpoint::slot::{IMAGE_AT, Replica, Room, SlotError, View};
use muster_protocol::Digest;
use muster_protocol::checkpoint::SlotId;
use muster_protocol::memory::parity::{Parity, Part};
use muster_protocol::memory::{Entry, Key, MAX_LIST, Name, Peers};

use super::choice::Choice;
use super::freeing::{Freed, Freeing};
use super::parities::{self, Lane, Of, Parities, Piece, is_before};

/// Rooms that wait for another image.
const SPARE: usize = 16;

/// An image, for whoever reads it.
#[derive(Clone, Debug)]
pub(super) enum Image {
    Own(View),
    Held(Arc<Replica>),
}

impl Image {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Image::Own(view) => view.image(),
            Image::Held(replica) => replica.image(),
        }
    }

    fn fd(&self) -> RawFd {
        match self {
            Image::Own(view) => view.fd().as_raw_fd(),
            Image::Held(replica) => replica.fd().as_raw_fd(),
        }
    }

    /// Whether it is what it was.
    pub(super) fn is_whole(&self) -> bool {
        match self {
            Image::Own(view) => view.is_whole(),
            Image::Held(_) => true,
        }
    }
}

#[derive(Debug)]
struct Own {
    /// None: its rank has other slots meanwhile.
    slot: Option<SlotId>,
    name: Name,
    view: View,
}

/// Answer to a launcher that wants an image held.
#[derive(Debug)]
pub(super) enum Admission {
    /// Room is reserved, until [`Shelf::keep`] or [`Shelf::give_up`].
    Go(Room),
    Have,
    NoRoom(u64),
    Refused(&'static str),
}

/// Answer to a launcher that wants a stripe added.
#[derive(Debug)]
pub(super) enum Folding {
    /// From this piece on.
    From(Of, u32),
    Have,
    NoRoom(u64),
    /// Parity is over so many nodes here, and over others there.
    OtherOver(u8),
    Refused(&'static str),
}

/// Purpose for which memory is needed.
#[derive(Clone, Copy)]
enum Need<'a> {
    Slots,
    Copy(&'a Name),
    Parity(Lane),
    /// One of the lanes that there may be, in place of any older one.
    Lane(Lane),
}

/// Something that is held of others.
enum Thing {
    Copy(Name),
    Parity(Lane),
}

/// All that is held.
#[derive(Debug)]
pub(super) struct Shelf {
    /// How it takes images of others.
    takes: Choice,
    /// The most bytes of slots and copies.
    budget: u64,
    /// Bytes of the present slots.
    slots: u64,
    key: Option<Key>,
    generation: Digest,
    committed: Option<(Digest, u64)>,
    own: Vec<Own>,
    held: BTreeMap<Name, Arc<Replica>>,
    /// Copies that are arriving, and the bytes reserved for them.
    coming: BTreeMap<Name, u64>,
    spare: Vec<Room>,
    parities: Parities,
    freeing: Freeing,
}

impl Shelf {
    pub(super) fn new(takes: Choice, budget: u64, freeing: Freeing) -> Shelf {
        Shelf {
            freeing,
            takes,
            budget,
            slots: 0,
            key: None,
            generation: Digest::ZERO,
            committed: None,
            own: Vec::new(),
            held: BTreeMap::new(),
            coming: BTreeMap::new(),
            spare: Vec::new(),
            parities: Parities::default(),
        }
    }

    /// The job's key, once this launcher was told it.
    pub(super) fn key(&self) -> Option<Key> {
        self.key
    }

    pub(super) fn generation(&self) -> Digest {
        self.generation
    }

    /// A generation begins: of those before it only what is committed is of use.
    pub(super) fn begin(&mut self, generation: Digest, peers: &Peers) {
        self.key = Some(peers.key);
        self.generation = generation;
        self.committed = peers.committed.or(self.committed);
        self.prune();
    }

    /// A save is committed.
    pub(super) fn commit(&mut self, generation: Digest, step: u64) {
        self.committed = Some((generation, step));
        self.prune();
    }

    /// Takes in an image that a rank has sealed in a slot.
    pub(super) fn seal(&mut self, slot: SlotId, name: Name, view: View) {
        self.retain_own(|own| own.slot != Some(slot));
        view.keep(self.is_committed(name.step, name.generation));
        let slot = Some(slot);
        self.own.push(Own { slot, name, view });
    }

    /// A rank's slots were given up for others; what is in them is still held, while there is room.
    pub(super) fn part(&mut self, k: u16) {
        for own in &mut self.own {
            own.slot = own.slot.filter(|slot| slot.k != k);
        }
        self.retain_own(|own| own.slot.is_some() || own.view.is_whole());
    }

    /// So many bytes are taken by slots from now on: copies make room for them.
    pub(super) fn set_slots(&mut self, bytes: u64) {
        self.slots = bytes;
        while self.used() > self.budget && self.evict(Need::Slots) {}
    }

    /// Bytes of slots, of copies, of rooms, and of parity.
    pub(super) fn used(&self) -> u64 {
        let parted = self.own.iter().filter(|own| own.slot.is_none());
        let parted: u64 = parted.map(|own| own.view.memory()).sum();
        let held: u64 = self.held.values().map(|replica| replica.memory()).sum();
        let spare: u64 = self.spare.iter().map(Room::memory).sum();
        let coming: u64 = self.coming.values().sum();
        self.slots + parted + held + spare + coming + self.parities.memory()
    }

    /// Bytes of the present slots.
    #[cfg(test)]
    pub(super) fn slots(&self) -> u64 {
        self.slots
    }

    pub(super) fn find(&self, name: &Name) -> Option<Image> {
        if let Some(replica) = self.held.get(name) {
            return Some(Image::Held(replica.clone()));
        }
        self.own(name).map(Image::Own)
    }

    /// An image that was sealed here, while it is there, whole.
    pub(super) fn own(&self, name: &Name) -> Option<View> {
        let mut own = self.own.iter();
        let own = own.find(|own| own.name == *name && own.view.is_whole())?;
        Some(own.view.clone())
    }

    /// Whether [`own`](Self::own) finds it.
    pub(super) fn has_own(&self, name: &Name) -> bool {
        let mut own = self.own.iter();
        own.any(|own| own.name == *name && own.view.is_whole())
    }

    /// All that is here, whole.
    pub(super) fn list(&self) -> Vec<Entry> {
        let own = self.own.iter().filter(|own| own.view.is_whole());
        let own = own.map(|own| (&own.name, Image::Own(own.view.clone())));
        let held = self.held.iter();
        let held = held.map(|(name, replica)| (name, Image::Held(replica.clone())));
        let entry = |(name, image): (&Name, Image)| Entry {
            name: name.clone(),
            bytes: image.bytes().len() as u64,
            fd: image.fd(),
            base: IMAGE_AT,
        };
        own.chain(held).map(entry).take(MAX_LIST).collect()
    }

    /// Another launcher wants this held.
    pub(super) fn admit(&mut self, generation: Digest, name: &Name, bytes: u64) -> Admission {
        if self.takes != Choice::Copy {
            return Admission::Refused("that node takes no copies: start it with --replicas 1");
        }
        if generation != self.generation {
            return Admission::Refused("that node is in another generation");
        }
        if self.held.contains_key(name) || self.coming.contains_key(name) {
            return Admission::Have;
        }
        if !self.is_of_use(name) {
            return Admission::Refused("no generation would restore it");
        }
        if let Some(room) = self.spare_for(bytes) {
            self.coming.insert(name.clone(), room.memory());
            return Admission::Go(room);
        }
        match self.room_for(name, bytes) {
            Ok(Some(room)) => {
                self.coming.insert(name.clone(), room.memory());
                Admission::Go(room)
            }
            Ok(None) => Admission::NoRoom(self.budget.saturating_sub(self.used())),
            Err(_) => Admission::Refused("that node gets no memory from its kernel"),
        }
    }

    /// A room that is large enough, and not too large.
    fn spare_for(&mut self, bytes: u64) -> Option<Room> {
        let fits = |room: &&Room| (bytes..=bytes.saturating_mul(2)).contains(&room.capacity());
        let best = self.spare.iter().filter(fits).map(Room::capacity).min()?;
        let at = self.spare.iter().position(|r| r.capacity() == best)?;
        Some(self.spare.swap_remove(at))
    }

    /// New memory, for which older copies of the same rank go that are not committed; none if it is not enough.
    fn room_for(&mut self, name: &Name, bytes: u64) -> Result<Option<Room>, SlotError> {
        let need = Room::memory_for(bytes).unwrap_or(u64::MAX);
        while self.used().saturating_add(need) > self.budget {
            if !self.evict(Need::Copy(name)) {
                return Ok(None);
            }
        }
        Room::create(bytes).map(Some)
    }

    /// A copy is here, whole.
    pub(super) fn keep(&mut self, name: &Name, replica: Replica) {
        if self.coming.remove(name).is_none() || !self.is_of_use(name) {
            return self.set_aside(replica.into_room());
        }
        self.held.insert(name.clone(), Arc::new(replica));
        // Of each rank the newest, and what is committed.
        let same = |other: &Name| other.file == name.file && other.generation == name.generation;
        let mut of_rank = self.held.keys().rev().filter(|other| same(other));
        let newest = of_rank.next().cloned();
        self.retain(|shelf, other| {
            !same(other)
                || Some(other) == newest.as_ref()
                || shelf.is_committed(other.step, other.generation)
        });
    }

    /// A copy did not arrive.
    pub(super) fn give_up(&mut self, name: &Name, room: Room) {
        self.coming.remove(name);
        self.set_aside(room);
    }

    fn set_aside(&mut self, room: Room) {
        if self.spare.len() < SPARE && self.used().saturating_add(room.memory()) <= self.budget {
            self.spare.push(room);
        } else {
            self.freeing.free(Freed::Room(room));
        }
    }

    /// Another launcher wants this stripe added to those of others.
    pub(super) fn fold(
        &mut self,
        generation: Digest,
        name: &Name,
        local: u16,
        over: u8,
        part: Part,
    ) -> Folding {
        match self.takes {
            Choice::Parity(here) if here == over => {}
            // Groups are others there: what it sends would be of use by chance alone.
            Choice::Parity(here) => return Folding::OtherOver(here),
            Choice::Nothing | Choice::Copy => {
                return Folding::Refused(
                    "that node holds no parity: start it with the same --replicas",
                );
            }
        }
        if generation != self.generation {
            return Folding::Refused("that node is in another generation");
        }
        if !self.is_of_use(name) {
            return Folding::Refused("no generation would restore it");
        }
        let lane = Lane {
            step: name.step,
            generation: name.generation,
            local,
        };
        loop {
            let room = self.budget.saturating_sub(self.used());
            match self.parities.enter(lane, part.clone(), room) {
                parities::Entry::From(of, piece) => return Folding::From(of, piece),
                parities::Entry::Have => return Folding::Have,
                parities::Entry::Refused(why) => return Folding::Refused(why),
                parities::Entry::NoRoom if self.evict(Need::Parity(lane)) => {}
                parities::Entry::NoRoom => return Folding::NoRoom(room),
                parities::Entry::Full if self.evict(Need::Lane(lane)) => {}
                parities::Entry::Full => {
                    return Folding::Refused(
                        "that node holds parity of as many ranks and steps as it may, all of it newer or committed",
                    );
                }
            }
        }
    }

    /// A piece of parity; none if it is given up.
    pub(super) fn piece(&self, number: u64, piece: u32) -> Option<Arc<Mutex<Piece>>> {
        self.parities.piece(number, piece)
    }

    /// So many pieces of a stripe are added. An older parity goes once all of its images are in this one.
    pub(super) fn folded(&mut self, of: Of, pieces: u32) {
        let Some(lane) = self.parities.advance(of, pieces) else {
            return;
        };
        let mut go = self.parities.older(lane);
        go.retain(|old| !self.is_committed(old.step, old.generation));
        self.free_parities(|lane| !go.contains(&lane));
    }

    /// The parity that is here, from behind this number on.
    pub(super) fn parities(&self, above: u64) -> Vec<Parity> {
        self.parities.list(above)
    }

    /// Gives up something, least useful first: for a copy, or for parity, only what it takes the place of. Whether
    /// there was any.
    fn evict(&mut self, need: Need<'_>) -> bool {
        // A room makes no lane.
        let spare = match need {
            Need::Lane(_) => None,
            Need::Slots | Need::Copy(_) | Need::Parity(_) => self.spare.pop(),
        };
        if let Some(room) = spare {
            self.freeing.free(Freed::Room(room));
            return true;
        }
        let parted = self.own.iter().position(|own| own.slot.is_none());
        if let Some(at) = parted.filter(|_| matches!(need, Need::Slots)) {
            let own = self.own.swap_remove(at);
            self.freeing.free(Freed::Slot(own.view));
            return true;
        }
        let committed = |step, generation| self.is_committed(step, generation);
        let copies = self.held.keys().filter(|other| match need {
            Need::Slots => true,
            Need::Copy(copy) => {
                let older = other.file == copy.file && other.step < copy.step;
                older && !committed(other.step, other.generation)
            }
            Need::Parity(_) | Need::Lane(_) => false,
        });
        let parities = self.parities.lanes().filter(|other| match need {
            Need::Slots => true,
            Need::Copy(_) => false,
            Need::Parity(lane) => {
                is_before(*other, lane) && !committed(other.step, other.generation)
            }
            Need::Lane(lane) => other.step < lane.step && !committed(other.step, other.generation),
        });
        let copies = copies.map(|name| {
            let (step, generation) = (name.step, name.generation);
            (
                (committed(step, generation), step),
                Thing::Copy(name.clone()),
            )
        });
        let parities = parities.map(|lane| {
            let (step, generation) = (lane.step, lane.generation);
            ((committed(step, generation), step), Thing::Parity(lane))
        });
        let least = copies.chain(parities).min_by_key(|(worth, _)| *worth);
        match least {
            Some((_, Thing::Copy(name))) => {
                let gone = self.held.remove(&name).map(Freed::Copy);
                gone.into_iter().for_each(|gone| self.freeing.free(gone));
            }
            Some((_, Thing::Parity(gone))) => self.free_parities(|lane| lane != gone),
            None => return false,
        }
        true
    }

    fn is_committed(&self, step: u64, generation: [u8; 8]) -> bool {
        is_of(self.committed, step, generation)
    }

    /// Whether some generation may still restore it.
    fn is_of_use(&self, name: &Name) -> bool {
        self.may_be_restored(name.step, name.generation)
    }

    fn may_be_restored(&self, step: u64, generation: [u8; 8]) -> bool {
        let (_, committed) = self.committed.unwrap_or_default();
        let present = self.generation.0.starts_with(&generation);
        self.is_committed(step, generation) || (present && step > committed)
    }

    /// Lets go what is of no use any more.
    fn prune(&mut self) {
        self.retain(Shelf::is_of_use);
        let lanes = self.parities.lanes();
        let stay = lanes.filter(|lane| self.may_be_restored(lane.step, lane.generation));
        let stay: Vec<Lane> = stay.collect();
        self.free_parities(|lane| stay.contains(&lane));
        let kept = self.committed;
        self.retain_own(|own| {
            let committed = is_of(kept, own.name.step, own.name.generation);
            own.view.is_whole() && (own.slot.is_some() || committed)
        });
        for own in &self.own {
            let name = &own.name;
            own.view.keep(self.is_committed(name.step, name.generation));
        }
    }

    fn free_parities(&mut self, stays: impl Fn(Lane) -> bool) {
        for pieces in self.parities.retain(stays) {
            self.freeing.free(Freed::Parity(pieces));
        }
    }

    fn retain_own(&mut self, stays: impl Fn(&Own) -> bool) {
        for own in self.own.extract_if(.., |own| !stays(own)) {
            self.freeing.free(Freed::Slot(own.view));
        }
    }

    fn retain(&mut self, stays: impl Fn(&Shelf, &Name) -> bool) {
        let go: Vec<Name> = self
            .held
            .keys()
            .filter(|n| !stays(self, n))
            .cloned()
            .collect();
        for name in go {
            match self.held.remove(&name).map(Arc::try_unwrap) {
                Some(Ok(replica)) => self.set_aside(replica.into_room()),
                // Whoever reads it still may be the one who lets it go.
                Some(Err(read)) => self.freeing.free(Freed::Copy(read)),
                None => {}
            }
        }
    }
}

/// Whether this is what is committed.
fn is_of(committed: Option<(Digest, u64)>, step: u64, generation: [u8; 8]) -> bool {
    let is = |(of, at): (Digest, u64)| at == step && of.0.starts_with(&generation);
    committed.is_some_and(is)
}

#[cfg(test)]
mod tests;
