//! Named points at which a test may end, stop or delay the process that passes them.
//!
//! A point is one line, [`point`] or [`point_on`], between two effects that a crash can part: before and
//! after a file has its name, before and after a record is in the log. It does nothing unless a test has
//! *armed* it, and in a build without debug assertions, so in every release, it is empty: nothing is
//! called, read or formatted there, and no variable can wake it.
//!
//! Armed is a point of which a file of the point's name lies in the folder that
//! [`FOLDER`] names. The file is one line:
//!
//! ```text
//! kill|stop|sleep=MILLISECONDS [after=PASSES] [in=PROGRAM] [of=TEXT]
//! ```
//!
//! `after` leaves out so many passes, `in` all but the program of this file name, `of` those whose subject
//! does not contain the text, which goes on to the end of the line. Exactly one pass takes an armed point,
//! by giving the file the name `POINT.taken`, whatever number of processes look at one folder; it does that
//! before it does anything else, so whoever armed it can wait for it.

/// The variable that names the folder. Read once, by builds with debug assertions only.
pub const FOLDER: &str = "MUSTER_FAULT_POINTS";

/// Passes the point of this name.
#[inline(always)]
pub fn point(name: &str) {
    point_on(name, String::new);
}

/// Passes the point of this name with this subject, which is made only where somebody looks at it.
#[inline(always)]
pub fn point_on(name: &str, subject: impl FnOnce() -> String) {
    #[cfg(debug_assertions)]
    armed::pass(name, subject);
    #[cfg(not(debug_assertions))]
    let _nobody_looks = (name, subject);
}

/// How a point looks at its file.
#[cfg(debug_assertions)]
mod armed {
    use std::collections::BTreeMap;
    use std::path::{Path, PathBuf};
    use std::sync::{Mutex, OnceLock, PoisonError};
    use std::time::Duration;

    use rustix::process::{Signal, getpid, kill_process};

    /// Action of a fault point on its process.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(super) enum Deed {
        Kill,
        Stop,
        Sleep(Duration),
    }

    /// Contents of an armed point's file.
    #[derive(Debug, PartialEq, Eq)]
    pub(super) struct Order {
        pub(super) deed: Deed,
        pub(super) after: u64,
        pub(super) program: Option<String>,
        pub(super) of: Option<String>,
    }

    impl Order {
        /// `None` for what is no order: such a file is left alone.
        pub(super) fn parse(line: &str) -> Option<Order> {
            let line = line.trim_end();
            let (words, of) = match line.split_once(" of=") {
                Some((words, of)) => (words, Some(of.to_owned())),
                None => (line, None),
            };
            let mut words = words.split_whitespace();
            let deed = match words.next()? {
                "kill" => Deed::Kill,
                "stop" => Deed::Stop,
                other => {
                    let millis = other.strip_prefix("sleep=")?.parse().ok()?;
                    Deed::Sleep(Duration::from_millis(millis))
                }
            };
            let mut order = Order {
                deed,
                after: 0,
                program: None,
                of,
            };
            for word in words {
                match word.split_once('=')? {
                    ("after", passes) => order.after = passes.parse().ok()?,
                    ("in", program) => order.program = Some(program.to_owned()),
                    _ => return None,
                }
            }
            Some(order)
        }
    }

    pub(super) fn pass(name: &str, subject: impl FnOnce() -> String) {
        static PLACE: OnceLock<Option<PathBuf>> = OnceLock::new();
        let place = PLACE.get_or_init(|| std::env::var_os(super::FOLDER).map(PathBuf::from));
        if let Some(place) = place
            && let Some(deed) = take(place, name, subject)
        {
            carry_out(deed);
        }
    }

    /// Returns the action of this pass, if it is the one.
    pub(super) fn take(place: &Path, name: &str, subject: impl FnOnce() -> String) -> Option<Deed> {
        static PASSES: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());
        let file = place.join(name);
        let order = Order::parse(&std::fs::read_to_string(&file).ok()?)?;
        if order.program.is_some_and(|program| program != own_name()) {
            return None;
        }
        if order.of.is_some_and(|of| !subject().contains(&of)) {
            return None;
        }
        let mut passes = PASSES.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = passes.entry(name.to_owned()).or_default();
        *seen += 1;
        if *seen <= order.after {
            return None;
        }
        *seen = 0;
        // One pass of one process is the first.
        std::fs::rename(&file, place.join(format!("{name}.taken"))).ok()?;
        Some(order.deed)
    }

    fn own_name() -> String {
        let path = std::env::current_exe().unwrap_or_default();
        let name = path.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    fn carry_out(deed: Deed) {
        let signal = match deed {
            Deed::Sleep(time) => return std::thread::sleep(time),
            Deed::Kill => Signal::KILL,
            Deed::Stop => Signal::STOP,
        };
        // It fails for no process that may signal itself.
        let _sent = kill_process(getpid(), signal);
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn armed(line: &str) -> tempfile::TempDir {
            let place = tempfile::tempdir().unwrap();
            std::fs::write(place.path().join("a.b"), line).unwrap();
            place
        }

        #[test]
        fn orders_are_read() {
            let order = |line| Order::parse(line).unwrap();
            assert_eq!(
                order("kill\n"),
                Order {
                    deed: Deed::Kill,
                    after: 0,
                    program: None,
                    of: None
                }
            );
            assert_eq!(
                order("sleep=1500 after=2 in=muster of=stage: Write x=1"),
                Order {
                    deed: Deed::Sleep(Duration::from_millis(1500)),
                    after: 2,
                    program: Some("muster".into()),
                    of: Some("stage: Write x=1".into()),
                }
            );
            for wrong in [
                "",
                "die",
                "kill after",
                "kill after=x",
                "kill when=1",
                "sleep=",
                "stop 3",
            ] {
                assert_eq!(Order::parse(wrong), None, "{wrong}");
            }
        }

        #[test]
        fn one_pass_takes_it() {
            let place = armed("stop after=2 of=this");
            let pass = |subject: &str| take(place.path(), "a.b", || subject.to_owned());
            assert_eq!(pass("this"), None);
            assert_eq!(pass("that"), None);
            assert_eq!(pass("with this"), None);
            assert_eq!(pass("this"), Some(Deed::Stop));
            assert_eq!(pass("this"), None, "it is not armed any more");
            assert!(place.path().join("a.b.taken").exists());
        }

        #[test]
        fn another_programs_point_is_left_alone() {
            let place = armed("kill in=another");
            assert_eq!(take(place.path(), "a.b", String::new), None);
            assert!(place.path().join("a.b").exists());
        }
    }
}
