//! Messages to people about copies and parity: each once, until it changes.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::time::{Duration, Instant};

use muster_protocol::LauncherId;

/// The least time between two words of the same kind about the same node: what comes and goes is told now and then.
const AGAIN: Duration = Duration::from_secs(60);

/// Nodes of which something is remembered: those of the present generation, and some of the ones before.
const REMEMBERED: usize = 256;

/// Why something is not held by a node, without what differs each time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    Away(ErrorKind),
    HoldsNothing,
    NoRoom,
    Refused(String),
    Broken(ErrorKind),
}

/// State of what people know about the holdings of other nodes.
#[derive(Debug, Default)]
pub(super) struct Telling {
    /// Images that are not held, by the node and the file, and why.
    failing: BTreeMap<(LauncherId, String), Kind>,
    /// When it was told last.
    told: BTreeMap<(LauncherId, Kind), Instant>,
    /// That all is well, in the words that were told last; none once something else was.
    well: Option<String>,
}

impl Telling {
    /// A node does not hold what it is to. Whether people do not know that.
    pub(super) fn fails(&mut self, node: LauncherId, file: &str, kind: Kind, now: Instant) -> bool {
        let same =
            |((other, _), why): (&(LauncherId, String), &Kind)| *other == node && *why == kind;
        let known = self.failing.iter().any(same);
        // Those of generations that are over are of no use.
        if self.failing.len() >= REMEMBERED {
            self.failing.clear();
        }
        self.failing.insert((node, file.to_owned()), kind.clone());
        let told = self.told.get(&(node, kind.clone()));
        let just = told.is_some_and(|told| now.saturating_duration_since(*told) < AGAIN);
        if known || just {
            return false;
        }
        if self.told.len() >= REMEMBERED {
            self.told.clear();
        }
        self.told.insert((node, kind), now);
        self.well = None;
        true
    }

    /// A node holds what it is to of a file.
    pub(super) fn holds(&mut self, node: LauncherId, file: &str) {
        self.failing.remove(&(node, file.to_owned()));
    }

    /// All that is to be held of a file is. Whether people are to be told, in these words.
    pub(super) fn is_well(&mut self, text: &str) -> bool {
        let news = self.failing.is_empty() && self.well.as_deref() != Some(text);
        if news {
            self.well = Some(text.to_owned());
        }
        news
    }

    /// Another generation: who fails in it is told anew.
    pub(super) fn begin(&mut self) {
        self.failing.clear();
        self.told.clear();
    }
}

/// Faults in what other nodes send, by their names.
#[derive(Debug, Default)]
pub(super) struct Complaints(BTreeMap<String, String>);

impl Complaints {
    /// The text that people are to be told of it.
    pub(super) fn of(&mut self, who: &str, what: Option<String>) -> Option<String> {
        let Some(text) = what else {
            self.0.remove(who);
            return None;
        };
        if self.0.get(who) == Some(&text) {
            return None;
        }
        if self.0.len() >= REMEMBERED {
            self.0.clear();
        }
        self.0.insert(who.to_owned(), text.clone());
        Some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: LauncherId = LauncherId([1; 8]);
    const B: LauncherId = LauncherId([2; 8]);
    const WELL: &str = "all is where it belongs";

    #[test]
    fn what_lasts_is_told_once() {
        let mut telling = Telling::default();
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert!(telling.is_well(WELL) && !telling.is_well(WELL));
        // One of two ranks finds no room there, save after save; the other one does.
        for save in 0..50 {
            let news = telling.fails(A, "n0-1", Kind::NoRoom, at(save * 10));
            assert_eq!(news, save == 0, "{save}");
            telling.holds(A, "n0-0");
            assert!(!telling.is_well(WELL), "{save}");
        }
        // Another rank meets the same, and then something else.
        assert!(!telling.fails(A, "n0-0", Kind::NoRoom, at(500)));
        assert!(telling.fails(B, "n0-0", Kind::NoRoom, at(500)));
        assert!(telling.fails(A, "n0-0", Kind::HoldsNothing, at(500)));
        for (node, file) in [(A, "n0-0"), (A, "n0-1")] {
            telling.holds(node, file);
        }
        assert!(!telling.is_well(WELL), "the other node has none yet");
        telling.holds(B, "n0-0");
        assert!(telling.is_well(WELL) && !telling.is_well(WELL));
        assert!(telling.is_well("elsewhere") && !telling.is_well("elsewhere"));
    }

    #[test]
    fn what_comes_and_goes_is_told_now_and_then() {
        let mut telling = Telling::default();
        let begin = Instant::now();
        let mut told = (0, 0);
        // Each second save does not arrive, one a second.
        for second in 0..600 {
            let now = begin + Duration::from_secs(second);
            if second % 2 == 0 {
                let kind = Kind::Broken(ErrorKind::TimedOut);
                told.0 += u32::from(telling.fails(A, "n0-0", kind, now));
            } else {
                telling.holds(A, "n0-0");
                told.1 += u32::from(telling.is_well(WELL));
            }
        }
        assert_eq!(told, (10, 10));
        telling.begin();
        let last = begin + Duration::from_secs(600);
        let kind = Kind::Broken(ErrorKind::TimedOut);
        assert!(telling.fails(A, "n0-0", kind, last), "it is told anew");
    }

    #[test]
    fn a_complaint_is_told_until_it_is_over() {
        let mut complaints = Complaints::default();
        let damaged = || Some("it is damaged".to_owned());
        assert_eq!(complaints.of("n1", damaged()), damaged());
        assert_eq!(complaints.of("n1", damaged()), None);
        assert_eq!(complaints.of("n2", damaged()), damaged());
        assert_eq!(complaints.of("n1", None), None);
        assert_eq!(complaints.of("n1", damaged()), damaged());
        for number in 0..10_000 {
            complaints.of(&number.to_string(), damaged());
        }
        assert!(complaints.0.len() <= REMEMBERED);
    }
}
