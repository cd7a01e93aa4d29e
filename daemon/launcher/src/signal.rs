//! Signals by number, as Linux counts them on every machine that Muster runs on.

pub const SIGINT: i32 = 2;
pub const SIGTERM: i32 = 15;

/// The names of signals 1 to 31, in order.
const NAMES: [&str; 31] = [
    "SIGHUP",
    "SIGINT",
    "SIGQUIT",
    "SIGILL",
    "SIGTRAP",
    "SIGABRT",
    "SIGBUS",
    "SIGFPE",
    "SIGKILL",
    "SIGUSR1",
    "SIGSEGV",
    "SIGUSR2",
    "SIGPIPE",
    "SIGALRM",
    "SIGTERM",
    "SIGSTKFLT",
    "SIGCHLD",
    "SIGCONT",
    "SIGSTOP",
    "SIGTSTP",
    "SIGTTIN",
    "SIGTTOU",
    "SIGURG",
    "SIGXCPU",
    "SIGXFSZ",
    "SIGVTALRM",
    "SIGPROF",
    "SIGWINCH",
    "SIGIO",
    "SIGPWR",
    "SIGSYS",
];

/// The name of a signal, for people.
pub fn name(signal: i32) -> String {
    let index = usize::try_from(signal).ok().and_then(|n| n.checked_sub(1));
    let name = index.and_then(|i| NAMES.get(i));
    name.map_or_else(|| format!("signal {signal}"), |s| (*s).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_without_a_name_has_its_number() {
        let names = [SIGINT, SIGTERM, 1, 11, 31, 0, 32, -1].map(name);
        let expected = [
            "SIGINT",
            "SIGTERM",
            "SIGHUP",
            "SIGSEGV",
            "SIGSYS",
            "signal 0",
            "signal 32",
            "signal -1",
        ];
        assert_eq!(names, expected);
    }
}
