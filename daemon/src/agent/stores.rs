//! Jobs' stores, which their launchers reach: what was asked of each, and what came back. Never
//! touches a file.
//!
//! A launcher that does not answer in time leaves a read without a result and a create unknown
//! (R12); so does one whose connection ends, and one that brought no store. Every operation of the
//! log has exactly one event.

use std::collections::BTreeMap;

use muster_protocol::local::{Assembly, News, Part, StoreAnswer, StoreAsk, StoreOp, Troubles};
use muster_protocol::storelog::{CreateOutcome, Effect, Event, MAX_READS, ReadOutcome};
use muster_protocol::{Span, Time};

/// How long a launcher may take for one operation. Its own file system may hang for longer: it does
/// no second one meanwhile.
const PATIENCE: Span = Span::from_secs(10);

/// Operations that one launcher was asked for: as many on the log as the log has in flight, and one on the
/// beacon, at most.
#[derive(Debug, Default)]
pub(super) struct Asked {
    ids: u64,
    log: BTreeMap<u64, LogOp>,
    beacon: Option<Beacon>,
    troubles: Troubles,
}

#[derive(Debug)]
struct LogOp {
    effect: Effect,
    due: Time,
    found: Assembly,
}

#[derive(Debug)]
struct Beacon {
    id: u64,
    op: StoreOp,
    due: Time,
}

/// Meaning of a launcher's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Told {
    Log(Event),
    Beacon(Option<u64>),
}

/// The operation and its result, as the metrics call them.
pub(super) fn words(event: &Event) -> (&'static str, &'static str) {
    match event {
        Event::Read { outcome, .. } => (
            "read",
            match outcome {
                ReadOutcome::Found(_) => "found",
                ReadOutcome::Absent => "absent",
                ReadOutcome::Failed => "failed",
            },
        ),
        Event::Created { outcome, .. } => (
            "create",
            match outcome {
                CreateOutcome::Won => "won",
                CreateOutcome::Exists => "exists",
                CreateOutcome::Unknown => "unknown",
            },
        ),
    }
}

impl Asked {
    /// Messages to send for an operation of the log. The error is its event: too many are under way.
    pub(super) fn log(&mut self, effect: Effect, now: Time) -> Result<Vec<(u64, StoreAsk)>, Event> {
        let creates = |effect: &Effect| matches!(effect, Effect::Create { .. });
        let most = if creates(&effect) { 1 } else { MAX_READS };
        let alike = |op: &&LogOp| creates(&op.effect) == creates(&effect);
        if self.log.values().filter(alike).count() >= most {
            return Err(effect.unknown());
        }
        let id = self.next_id();
        let asks = match &effect {
            Effect::Read { slot, .. } => vec![(id, StoreAsk::Read { slot: *slot })],
            Effect::Create { slot, bytes, .. } => Part::all(bytes)
                .into_iter()
                .map(|part| (id, StoreAsk::Create { slot: *slot, part }))
                .collect(),
        };
        let op = LogOp {
            effect,
            due: now + PATIENCE,
            found: Assembly::default(),
        };
        self.log.insert(id, op);
        Ok(asks)
    }

    /// The message to send for a beacon that is to be written, or read; nothing while one is under way.
    pub(super) fn beacon(&mut self, write: Option<u64>, now: Time) -> Option<(u64, StoreAsk)> {
        if self.beacon.is_some() {
            return None;
        }
        let id = self.next_id();
        let ask = match write {
            Some(value) => StoreAsk::WriteBeacon { value },
            None => StoreAsk::ReadBeacon,
        };
        let (op, due) = (ask.op(), now + PATIENCE);
        self.beacon = Some(Beacon { id, op, due });
        Some((id, ask))
    }

    /// The kind of the operation of this id; `None` where no answer of that id is waited for.
    pub(super) fn op(&self, id: u64) -> Option<StoreOp> {
        let log = self.log.get(&id).map(|l| StoreOp::from(&l.effect));
        let beacon = self.beacon.as_ref().filter(|b| b.id == id);
        log.or(beacon.map(|b| b.op))
    }

    /// Takes an answer in. One that was not asked for, or comes too late, means nothing.
    pub(super) fn answer(&mut self, id: u64, answer: StoreAnswer) -> Option<Told> {
        if self.beacon.take_if(|b| b.id == id).is_some() {
            return match answer {
                StoreAnswer::Beacon(value) => Some(Told::Beacon(value)),
                // What cannot be read says nothing: only a beacon that stands still counts.
                _ => None,
            };
        }
        let mut asked = self.log.remove(&id)?;
        let event = match (&asked.effect, answer) {
            (Effect::Read { op, slot }, StoreAnswer::Found(part)) => {
                let outcome = match asked.found.take(&part) {
                    Ok(Some(bytes)) => ReadOutcome::Found(bytes),
                    Ok(None) => {
                        self.log.insert(id, asked);
                        return None;
                    }
                    Err(_) => ReadOutcome::Failed,
                };
                let (op, slot) = (*op, *slot);
                Event::Read { op, slot, outcome }
            }
            (Effect::Read { op, slot }, StoreAnswer::Absent) => Event::Read {
                op: *op,
                slot: *slot,
                outcome: ReadOutcome::Absent,
            },
            (Effect::Create { op, slot, .. }, StoreAnswer::Won) => Event::Created {
                op: *op,
                slot: *slot,
                outcome: CreateOutcome::Won,
            },
            (Effect::Create { op, slot, .. }, StoreAnswer::Exists) => Event::Created {
                op: *op,
                slot: *slot,
                outcome: CreateOutcome::Exists,
            },
            (effect, _) => effect.unknown(),
        };
        Some(Told::Log(event))
    }

    pub(super) fn due(&self) -> Option<Time> {
        let log = self.log.values().map(|l| l.due);
        let beacon = self.beacon.as_ref().map(|b| b.due);
        log.chain(beacon).min()
    }

    /// Gives up what took too long; the events of the log's operations that did, with their kinds.
    pub(super) fn expire(&mut self, now: Time) -> Vec<(StoreOp, Event)> {
        self.beacon.take_if(|b| now >= b.due);
        let log = std::mem::take(&mut self.log).into_iter();
        let (late, in_time): (BTreeMap<_, _>, _) = log.partition(|(_, l)| now >= l.due);
        self.log = in_time;
        let late = late.into_values().map(|l| l.effect);
        late.map(|effect| (StoreOp::from(&effect), effect.unknown()))
            .collect()
    }

    /// The launcher is gone: the events of what it was asked for.
    pub(super) fn give_up(&mut self) -> Vec<Event> {
        self.beacon = None;
        let all = std::mem::take(&mut self.log).into_values();
        all.map(|l| l.effect.unknown()).collect()
    }

    /// Notes how an operation went. The text, if it is news that something goes wrong.
    pub(super) fn note(&mut self, op: StoreOp, failed: Option<&str>) -> Option<String> {
        match self.troubles.note(op, failed) {
            Some(News::Fails) => failed.map(str::to_owned),
            Some(News::Well) | None => None,
        }
    }

    fn next_id(&mut self) -> u64 {
        self.ids += 1;
        self.ids
    }
}

#[cfg(test)]
mod tests {
    use muster_protocol::local::MAX_PART;
    use muster_protocol::storelog::MAX_ENTRY;

    use super::*;

    const START: Time = Time(7);

    fn read(op: u64) -> Effect {
        Effect::Read { op, slot: 3 }
    }

    fn create(op: u64, len: usize) -> Effect {
        Effect::Create {
            op,
            slot: 3,
            bytes: vec![1; len],
        }
    }

    /// The answer to a read of slot 3.
    fn outcome(op: u64, outcome: ReadOutcome) -> Option<Told> {
        let slot = 3;
        Some(Told::Log(Event::Read { op, slot, outcome }))
    }

    #[test]
    fn a_long_object_travels_in_parts_both_ways() {
        let mut asked = Asked::default();
        let sent = asked.log(create(1, MAX_ENTRY), START).unwrap();
        let mut assembly = Assembly::default();
        let mut whole = None;
        for (id, ask) in &sent {
            assert_eq!(*id, 1);
            let StoreAsk::Create { slot: 3, part } = ask else {
                panic!("{ask:?}")
            };
            assert!(part.bytes.len() <= MAX_PART);
            whole = assembly.take(part).unwrap();
        }
        assert_eq!(whole.map(|w| w.len()), Some(MAX_ENTRY));
        assert!(matches!(
            asked.answer(1, StoreAnswer::Won),
            Some(Told::Log(Event::Created {
                op: 1,
                outcome: CreateOutcome::Won,
                ..
            }))
        ));

        asked.log(read(2), START).unwrap();
        let parts = Part::all(&vec![2; MAX_ENTRY]);
        let (last, first) = parts.split_last().unwrap();
        for part in first {
            assert_eq!(asked.answer(2, StoreAnswer::Found(part.clone())), None);
        }
        let found = ReadOutcome::Found(vec![2; MAX_ENTRY]);
        assert_eq!(
            asked.answer(2, StoreAnswer::Found(last.clone())),
            outcome(2, found)
        );
        assert_eq!(asked.due(), None);
    }

    #[test]
    fn so_many_operations_are_under_way_and_each_has_one_event() {
        let mut asked = Asked::default();
        assert_eq!(asked.op(1), None);
        asked.log(create(1, 5), START).unwrap();
        let full = asked.log(create(98, 5), START);
        assert_eq!(full, Err(create(98, 5).unknown()));
        let reads: Vec<u64> = (2..2 + MAX_READS as u64)
            .map(|op| asked.log(read(op), START).unwrap()[0].0)
            .collect();
        assert_eq!(asked.log(read(99), START), Err(read(99).unknown()));
        let (beacon, _) = asked.beacon(Some(9), START).unwrap();
        assert_eq!(asked.op(1), Some(StoreOp::Create));
        assert_eq!(asked.op(reads[0]), Some(StoreOp::Read));
        assert_eq!(asked.op(beacon), Some(StoreOp::WriteBeacon));
        assert_eq!(asked.op(beacon + 1), None);
        assert_eq!(asked.beacon(None, START), None);
        // Answers come in any order.
        let last = reads.len() as u64 + 1;
        let told = asked.answer(reads[reads.len() - 1], StoreAnswer::Absent);
        assert_eq!(told, outcome(last, ReadOutcome::Absent));
        assert_eq!(asked.due(), Some(START + PATIENCE));
        assert_eq!(asked.expire(START), []);
        let mut late = vec![(StoreOp::Create, create(1, 5).unknown())];
        late.extend((2..last).map(|op| (StoreOp::Read, read(op).unknown())));
        assert_eq!(asked.expire(START + PATIENCE), late);
        // All are free again, and what comes late changes nothing.
        assert_eq!(asked.due(), None);
        assert_eq!((asked.op(1), asked.op(beacon)), (None, None));
        assert_eq!(asked.answer(1, StoreAnswer::Won), None);
        assert_eq!(asked.answer(reads[0], StoreAnswer::Absent), None);
        assert_eq!(asked.answer(beacon, StoreAnswer::Beacon(Some(1))), None);
        let (id, _) = asked.log(read(3), START).unwrap()[0];
        assert_eq!(asked.op(id), Some(StoreOp::Read));
        assert_eq!(asked.give_up(), [read(3).unknown()]);
        assert_eq!(asked.give_up(), []);
    }

    #[test]
    fn an_answer_that_does_not_fit_tells_nothing() {
        let mut asked = Asked::default();
        for (effect, answer) in [
            (read(1), StoreAnswer::Won),
            (create(1, 1), StoreAnswer::Absent),
            (read(1), StoreAnswer::failed("no".into())),
            (create(1, 1), StoreAnswer::Beacon(None)),
        ] {
            let (id, _) = asked.log(effect.clone(), START).unwrap()[0];
            assert_eq!(asked.answer(id, answer), Some(Told::Log(effect.unknown())));
        }
        // An object without an end.
        let (id, _) = asked.log(read(1), START).unwrap()[0];
        let part = Part {
            bytes: vec![0; MAX_PART],
            last: false,
        };
        let told = (0..100).find_map(|_| asked.answer(id, StoreAnswer::Found(part.clone())));
        assert_eq!(told, outcome(1, ReadOutcome::Failed));
    }
}
