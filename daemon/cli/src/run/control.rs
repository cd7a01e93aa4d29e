//! The launcher's side of a worker's control page: one page of sealed, shared memory that the worker
//! inherits. Layout, encodings and the rule are those of [`muster_protocol::control`].

use std::fs::File;
use std::io;
use std::os::fd::{OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};
use muster_launcher::slots::Ask;
use muster_protocol::Digest;
use muster_protocol::control::live::{self, Assignment, CAN_REASSIGN, TELLS_RESTORE, Term};
use muster_protocol::control::report::{self, METRICS_WORDS};
use muster_protocol::control::saving::{
    self, Copied, DAMAGE_WORDS, Damage, FAILURE_WORDS, Failure,
};
use muster_protocol::control::slots::{self, Given, SLOTS};
use muster_protocol::control::{self, Gate, LAYOUT, MAGIC, PAGE_LEN, Reason, Stop, word};
use muster_protocol::hang::Point;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};

pub use muster_protocol::control::FD_ENV;

/// The launcher's mapping of one worker's page, and its memory of the worker's gate.
#[derive(Debug)]
pub struct ControlPage {
    map: MmapRaw,
    gate: Gate,
}

impl ControlPage {
    /// Creates a page that can neither shrink nor grow, and the descriptor for the worker.
    pub fn create() -> io::Result<(ControlPage, OwnedFd)> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create(c"muster-control", flags)?);
        file.set_len(PAGE_LEN as u64)?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
        let map = MmapOptions::new().len(PAGE_LEN).map_raw(&file)?;
        let page = ControlPage {
            map,
            gate: Gate::default(),
        };
        page.store(word::MAGIC, MAGIC);
        page.store(word::LAYOUT, LAYOUT);
        page.store(live::word::FEATURES, CAN_REASSIGN | TELLS_RESTORE);
        Ok((page, file.into()))
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(control::is_word(at));
        // SAFETY: `at` is a word of the page, so it is aligned to 8 bytes and inside PAGE_LEN bytes
        // of a mapping that lives as long as `self`. Both processes only use atomics on it.
        unsafe { AtomicU64::from_ptr(self.map.as_mut_ptr().add(at).cast()) }
    }

    fn load(&self, at: usize) -> u64 {
        u64::from_le(self.word(at).load(Ordering::SeqCst))
    }

    fn store(&self, at: usize, value: u64) {
        self.word(at).store(value.to_le(), Ordering::SeqCst);
    }

    /// Whether a runtime is attached, so that the worker obeys a stop step.
    pub fn is_linked(&self) -> bool {
        self.load(word::LINKED) == 1
    }

    /// The step at which the worker stopped, after its save.
    pub fn acknowledged(&self) -> Option<u64> {
        control::decode_step(self.load(word::ACK))
    }

    /// Gates the worker at `step` and returns the lowest step, not below it, that it has not begun.
    /// `deadline_ms` is in Unix milliseconds; 0: none. Also raises a gate that was set before.
    pub fn install(&mut self, step: u64, deadline_ms: u64, reason: Reason) -> u64 {
        if self.load(word::CHECKPOINT) != 0 {
            // The checkpoint before is over; the worker must not take it for this.
            self.cancel();
        }
        self.store(word::DEADLINE, deadline_ms);
        self.store(word::REASON, reason.encode());
        self.store(word::STOP, Stop::Installed(step).encode());
        // After the store: the order is what the rule rests on.
        let progress = control::decode_step(self.load(word::PROGRESS));
        self.gate.install(progress, step)
    }

    /// Makes the worker stop at `step`; false, and nothing stored, if it was not gated at or below.
    pub fn confirm(&mut self, step: u64) -> bool {
        let may = self.gate.may_confirm(step);
        if may {
            self.store(word::STOP, Stop::Confirmed(step).encode());
        }
        may
    }

    /// Has the worker save before `step` and go on; false, and nothing stored, if it was not gated at
    /// or below.
    pub fn confirm_checkpoint(&mut self, step: u64) -> bool {
        let may = self.gate.may_confirm(step);
        if may {
            self.store(word::CHECKPOINT, control::encode_step(Some(step)));
            self.store(word::STOP, Stop::Confirmed(step).encode());
        }
        may
    }

    /// Whether the worker has saved for a checkpoint at this step, or has said why it did not.
    pub fn has_saved(&self, step: u64) -> bool {
        control::decode_step(self.load(word::SAVED)) >= Some(step)
    }

    /// Why the worker did not save for a checkpoint at this step, if it has said so.
    pub fn failed_to_save(&self, step: u64) -> Option<String> {
        let length = self.load(saving::word::FAILED);
        let mut words = [0; FAILURE_WORDS];
        for (to, at) in words.iter_mut().zip(saving::word::failure()) {
            *to = self.load(at);
        }
        let failure = Failure::decode(&words, length);
        failure.filter(|f| f.step >= step).map(|f| f.why)
    }

    /// Gives the worker its place in the next generation, and says which manifest that restores. The
    /// worker has not begun, or has parked from all before.
    pub fn assign(&mut self, assignment: &Assignment, restore: Option<Digest>) {
        self.gate = Gate::default();
        self.store(word::STOP, Stop::None.encode());
        self.store(word::CHECKPOINT, control::encode_step(None));
        self.store(word::ACK, control::encode_step(None));
        self.store(word::SAVED, control::encode_step(None));
        self.store(saving::word::FAILED, 0);
        let sequence = self.load(live::word::SEQUENCE);
        self.store(live::word::SEQUENCE, sequence | 1);
        let restore = live::word::restore().zip(live::encode_restore(restore));
        for (at, value) in (live::word::assignment().zip(assignment.encode())).chain(restore) {
            self.store(at, value);
        }
        self.store(live::word::SEQUENCE, (sequence | 1).wrapping_add(1));
        self.wake(live::word::SEQUENCE);
    }

    /// Tells a live worker that this term is over.
    pub fn end(&self, term: Term) {
        self.store(live::word::ENDED, term.0);
        self.wake(live::word::ENDED);
    }

    /// Whether the worker stays through a change of its generation.
    pub fn is_live(&self) -> bool {
        self.load(live::word::LIVE) == 1
    }

    /// Whether the worker has left this term for good, and waits for another.
    pub fn has_parked(&self, term: Term) -> bool {
        self.is_live() && Term(self.load(live::word::PARKED)) >= term
    }

    /// How far an attached worker is; `None` before its first step.
    pub fn point(&self) -> Option<Point> {
        let step = control::decode_step(self.load(word::PROGRESS))?;
        self.is_linked().then(|| Point {
            step,
            operation: self.load(report::word::OPERATION),
        })
    }

    /// The metrics that the worker reported, whole; `None` while there are none, or while it is
    /// just writing some.
    pub fn metrics(&self) -> Option<[u64; METRICS_WORDS]> {
        // A worker that is preempted while it writes is read at the next look.
        for _ in 0..8 {
            let before = u64::from_le(self.word(report::word::SEQUENCE).load(Ordering::Acquire));
            let mut words = [0; METRICS_WORDS];
            for (to, at) in words.iter_mut().zip(report::word::values()) {
                *to = u64::from_le(self.word(at).load(Ordering::Relaxed));
            }
            fence(Ordering::Acquire);
            let after = u64::from_le(self.word(report::word::SEQUENCE).load(Ordering::Relaxed));
            if before == 0 {
                return None;
            }
            if before.is_multiple_of(2) && after == before {
                return Some(words);
            }
            std::hint::spin_loop();
        }
        None
    }

    /// The worker's newest ask for checkpoint slots, while it is not answered.
    pub fn slot_ask(&self) -> Option<Ask> {
        let number = self.load(slots::word::ASK);
        let asked = number != 0 && Given::decode(self.load(slots::word::GIVEN), number).is_open();
        asked.then(|| Ask {
            number,
            image: self.load(slots::word::IMAGE),
            note: self.load(slots::word::NOTE),
        })
    }

    /// Answers an ask: where the slots are, or why there are none and for how many bytes there is room.
    pub fn give_slots(&self, ask: u64, given: Given, fds: [RawFd; SLOTS], room: u64) {
        let said = given.encode(ask);
        if self.load(slots::word::GIVEN) == said {
            return;
        }
        self.store(slots::word::PID, std::process::id().into());
        for (at, fd) in slots::word::FDS.into_iter().zip(fds) {
            self.store(at, u64::try_from(fd).unwrap_or(u64::MAX));
        }
        self.store(slots::word::ROOM, room);
        self.store(slots::word::GIVEN, said);
        self.wake(slots::word::GIVEN);
    }

    /// The slots that the worker has are more than the node takes: it saves no more.
    pub fn refuse_slots(&self) {
        let ask = self.load(slots::word::ASK);
        self.store(slots::word::ROOM, 0);
        self.store(slots::word::GIVEN, Given::Budget.encode(ask));
    }

    /// Cost of the worker's newest save; none before its first.
    pub fn copied(&self) -> Option<Copied> {
        let saves = self.load(saving::word::SAVES);
        (saves > 0).then(|| Copied {
            saves,
            step: self.load(saving::word::STEP),
            bytes: self.load(saving::word::BYTES),
            copied_us: self.load(saving::word::COPIED),
            waited_us: self.load(saving::word::WAITED),
        })
    }

    /// The step of a save for which the worker waits for a slot.
    pub fn waits_for_slot(&self) -> Option<u64> {
        control::decode_step(self.load(saving::word::WAITS))
    }

    /// The worker leaves the save of this step out.
    pub fn skip_save(&self, step: u64) {
        self.store(saving::word::SKIP, control::encode_step(Some(step)));
    }

    /// The damage that the worker found.
    pub fn damage(&self) -> Option<Damage> {
        let damage = self.load(saving::word::DAMAGE);
        let mut words = [0; DAMAGE_WORDS];
        for (to, at) in words.iter_mut().zip(saving::word::damage()) {
            *to = self.load(at);
        }
        Damage::decode(&words, damage)
    }

    /// The first step waits until all ranks have loaded what they begin with, or no longer.
    pub fn hold(&self, waits: bool) {
        self.store(saving::word::HOLD, waits.into());
        self.wake(saving::word::HOLD);
    }

    /// Whether the worker stands before its first step, or has done some.
    pub fn has_loaded(&self) -> bool {
        control::decode_step(self.load(word::PROGRESS)).is_some()
    }

    /// Wakes the worker where it waits for this word to change.
    fn wake(&self, at: usize) {
        // SAFETY: FUTEX_WAKE reads no memory; the address is inside the mapping.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                self.word(at).as_ptr(),
                libc::FUTEX_WAKE,
                i32::MAX,
            );
        }
    }

    /// Lets the worker go on.
    pub fn cancel(&mut self) {
        self.store(word::STOP, Stop::Cancelled.encode());
        // Last: whoever sees the word gone sees that the stop is gone, too.
        self.store(word::CHECKPOINT, control::encode_step(None));
        self.gate.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_gated_where_it_stands() {
        let (mut page, _fd) = ControlPage::create().unwrap();
        assert!(!page.is_linked() && !page.confirm(5));
        page.store(word::LINKED, 1);
        page.store(word::PROGRESS, control::encode_step(Some(9)));
        assert!(page.is_linked());
        // It may have begun step 9.
        assert_eq!(page.install(5, 0, Reason::Drain), 10);
        assert!(!page.confirm(9));
        assert_eq!(page.install(12, 77, Reason::Drain), 12);
        assert_eq!(page.load(word::DEADLINE), 77);
        assert!(page.confirm(12));
        assert_eq!(Stop::decode(page.load(word::STOP)), Stop::Confirmed(12));
        page.cancel();
        assert_eq!(Stop::decode(page.load(word::STOP)), Stop::Cancelled);
        // A checkpoint gates it anew, and leaves nothing to the stop behind it.
        page.store(word::PROGRESS, control::encode_step(Some(20)));
        assert!(!page.confirm_checkpoint(20));
        assert_eq!(page.install(20, 0, Reason::Checkpoint), 21);
        assert!(page.confirm_checkpoint(21) && !page.has_saved(21));
        assert_eq!(control::decode_step(page.load(word::CHECKPOINT)), Some(21));
        page.store(word::SAVED, control::encode_step(Some(21)));
        assert!(page.has_saved(21) && !page.has_saved(22));
        // It may have said instead why it did not.
        assert_eq!(page.failed_to_save(21), None);
        let failure = Failure {
            step: 21,
            why: "no room".into(),
        };
        let (words, length) = failure.encode();
        for (at, value) in saving::word::failure().zip(words) {
            page.store(at, value);
        }
        page.store(saving::word::FAILED, length);
        assert_eq!(page.failed_to_save(21), Some(failure.why));
        assert_eq!(page.failed_to_save(22), None, "that is of an earlier one");
        page.store(word::PROGRESS, control::encode_step(Some(30)));
        assert_eq!(page.install(1, 0, Reason::Drain), 31);
        assert_eq!(page.load(word::CHECKPOINT), 0);
        assert!(page.confirm(31) && page.acknowledged().is_none());
    }
}
