//! A rank's slots, as its launcher gives them.

use std::fs::File;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use muster_checkpoint::slot::{Slot, State};
use muster_protocol::control::slots::{Given, SLOTS, word};
use muster_protocol::control::{decode_step, encode_step, saving};

use super::SaveError;
use crate::page::Page;

/// How long the launcher may take to say that it finds memory, or to find it where it says nothing before.
const GIVEN: Duration = Duration::from_secs(300);

/// Bytes by which notes may grow without new slots: blobs change from save to save.
const NOTE_MARGIN: u64 = 256 << 10;

/// Between two looks for an answer that nobody is woken for.
const PROMISED: Duration = Duration::from_millis(2);

/// Between two looks at a slot that is busy.
const LOOK: Duration = Duration::from_micros(500);

/// A rank's slots, or what is known of them.
#[derive(Debug)]
pub(super) enum Store {
    /// None were asked for, or the last answer was that there are none.
    None,
    Here(Slots),
    /// The launcher is asked, by a thread: the training goes on.
    Coming(JoinHandle<Result<Slots, SaveError>>),
}

impl Store {
    /// Has slots of this size come, if those that are there, or are coming, are none.
    pub(super) fn want(self, page: &Arc<Page>, image: u64, note: u64, threads: usize) -> Store {
        match self {
            Store::Here(slots) if slots.fit(image, note) => return Store::Here(slots),
            // One ask at a time: what it gives is looked at when it is needed.
            Store::Coming(thread) if !thread.is_finished() => return Store::Coming(thread),
            Store::Coming(thread) => {
                if let Ok(Ok(slots)) = thread.join()
                    && slots.fit(image, note)
                {
                    return Store::Here(slots);
                }
            }
            // Dropped before others are asked for: else the memory of both would be in use.
            Store::None | Store::Here(_) => {}
        }
        // Before there is a thread: what the launcher said of an earlier ask is no word of this one's.
        let ask = Slots::ask(page, image, note);
        let page = page.clone();
        let thread = std::thread::Builder::new().name("muster-slots".into());
        let thread = thread.spawn(move || Slots::answer(&page, ask, threads));
        // Without a thread it is asked when they are needed.
        thread.map_or(Store::None, Store::Coming)
    }

    /// Does something with the slots once they are there, by a thread: the training goes on, and who needs them waits.
    pub(super) fn then(self, work: impl FnOnce(&[Arc<Slot>]) + Send + 'static) -> Store {
        if matches!(self, Store::None) {
            return Store::None;
        }
        let thread = std::thread::Builder::new().name("muster-slots".into());
        let thread = thread.spawn(move || {
            let slots = match self {
                Store::Here(slots) => slots,
                Store::Coming(thread) => thread.join().map_err(|_| SaveError::NoAnswer)??,
                Store::None => return Err(SaveError::NoAnswer),
            };
            work(slots.all());
            Ok(slots)
        });
        // Without a thread they are asked for anew when they are needed.
        thread.map_or(Store::None, Store::Coming)
    }

    /// Waits until the launcher has said that they will come, or why not.
    pub(super) fn promised(self, page: &Page) -> Result<Store, SaveError> {
        let thread = match self {
            Store::Coming(thread) => thread,
            other => return Ok(other),
        };
        loop {
            let said = page.load(word::GIVEN);
            if thread.is_finished() {
                let slots = thread.join().map_err(|_| SaveError::NoAnswer)??;
                return Ok(Store::Here(slots));
            }
            if Given::decode(said, page.load(word::ASK)) == Given::Coming {
                return Ok(Store::Coming(thread));
            }
            page.wait_while(word::GIVEN, said, PROMISED);
        }
    }

    /// Slots of this size; they are waited for.
    pub(super) fn get(
        &mut self,
        page: &Page,
        image: u64,
        note: u64,
        threads: usize,
    ) -> Result<&Slots, SaveError> {
        let here = match std::mem::replace(self, Store::None) {
            Store::Here(slots) => Some(slots),
            Store::Coming(thread) => {
                // Why there were none then is no reason why there are none now.
                let old = thread.is_finished();
                match thread.join().unwrap_or(Err(SaveError::NoAnswer)) {
                    Ok(slots) => Some(slots),
                    Err(_) if old => None,
                    Err(error) => return Err(error),
                }
            }
            Store::None => None,
        };
        let slots = match here.filter(|slots| slots.fit(image, note)) {
            Some(slots) => slots,
            None => Slots::answer(page, Slots::ask(page, image, note), threads)?,
        };
        *self = Store::Here(slots);
        match self {
            Store::Here(slots) => Ok(slots),
            Store::None | Store::Coming(_) => Err(SaveError::NoAnswer),
        }
    }
}

/// Two slots that are large enough.
#[derive(Debug)]
pub(super) struct Slots {
    slots: [Arc<Slot>; SLOTS],
}

impl Slots {
    /// Asks the launcher for slots with room for an image and a note of so many bytes; the number of that.
    fn ask(page: &Page, image: u64, note: u64) -> u64 {
        let ask = page.load(word::ASK).wrapping_add(1).max(1);
        page.store(word::IMAGE, image);
        page.store(word::NOTE, note.saturating_add(NOTE_MARGIN));
        page.store(word::ASK, ask);
        ask
    }

    /// Waits for what becomes of an ask.
    fn answer(page: &Page, ask: u64, threads: usize) -> Result<Slots, SaveError> {
        let began = Instant::now();
        loop {
            let answer = page.load(word::GIVEN);
            match Given::decode(answer, ask) {
                Given::Slots => break,
                Given::NoStore => return Err(SaveError::NoStore),
                Given::Budget => {
                    let (image, note) = (page.load(word::IMAGE), page.load(word::NOTE));
                    return Err(SaveError::Budget {
                        need: image.saturating_add(note),
                        room: page.load(word::ROOM),
                    });
                }
                Given::Memory => return Err(SaveError::Memory),
                // Another ask has taken its place.
                _ if page.load(word::ASK) != ask => return Err(SaveError::NoAnswer),
                // Once they are said to come, they do, or the reason why not: a slow disk may hold them up.
                Given::Nothing if began.elapsed() > GIVEN => return Err(SaveError::NoAnswer),
                Given::Nothing | Given::Coming => {
                    page.wait_while(word::GIVEN, answer, Duration::from_millis(100));
                }
            }
        }
        let pid = page.load(word::PID);
        let open = |at: usize| -> Result<Arc<Slot>, SaveError> {
            let path = format!("/proc/{pid}/fd/{}", page.load(at));
            let file = File::options().read(true).write(true).open(&path);
            let file = file.map_err(|source| SaveError::Descriptor { path, source })?;
            Ok(Slot::open(file.into(), threads)?)
        };
        let [first, second] = word::FDS;
        Ok(Slots {
            slots: [open(first)?, open(second)?],
        })
    }

    pub(super) fn all(&self) -> &[Arc<Slot>] {
        &self.slots
    }

    /// Whether they have room for this.
    fn fit(&self, image: u64, note: u64) -> bool {
        self.slots.iter().all(|slot| {
            let capacity = slot.capacity();
            image <= capacity.0 && note <= capacity.1
        })
    }

    /// A free slot for the state before `step`, waiting for one; how long that took. None: this save is
    /// to be left out.
    pub(super) fn free(
        &self,
        page: &Page,
        step: u64,
        longest: Duration,
    ) -> Result<Option<(&Slot, Duration)>, SaveError> {
        if Given::decode(page.load(word::GIVEN), page.load(word::ASK)) == Given::Budget {
            // The node's agent has refused them since.
            let (need, room) = (page.load(word::IMAGE), page.load(word::ROOM));
            let need = need.saturating_add(page.load(word::NOTE));
            return Err(SaveError::Budget { need, room });
        }
        let began = Instant::now();
        let found = loop {
            let free = |slot: &&Arc<Slot>| slot.state().0 == State::Free;
            // What is committed stays in memory, where it is restored from, while there is another.
            let older = |slot: &&Arc<Slot>| (slot.is_kept(), slot.state().1);
            if let Some(slot) = self.slots.iter().filter(free).min_by_key(older) {
                break Ok(Some((&**slot, began.elapsed())));
            }
            if decode_step(page.load(saving::word::SKIP)) == Some(step) {
                break Ok(None);
            }
            if began.elapsed() >= longest {
                let [a, b] = self.slots.each_ref().map(|slot| slot.state());
                break Err(SaveError::Busy { slots: [a, b] });
            }
            page.store(saving::word::WAITS, encode_step(Some(step)));
            std::thread::sleep(LOOK);
        };
        page.store(saving::word::WAITS, encode_step(None));
        found
    }
}
