//! Hosts out of network namespaces, by `tests/tools/netns`.

use std::process::Command;

use super::project;

/// Hosts 1 to N at 10.77.0.1 to N; gone when dropped.
pub(crate) struct Hosts {
    tool: String,
    name: String,
}

impl Hosts {
    pub(super) fn up(count: usize) -> Hosts {
        let hosts = Hosts {
            tool: project("tests/tools/netns"),
            name: format!("t{}_{}", std::process::id(), super::now_ns() % 1_000_000),
        };
        hosts.run(&["up"], &[&count.to_string()]);
        hosts
    }

    fn run(&self, verb: &[&str], rest: &[&str]) {
        let done = Command::new(&self.tool)
            .args(verb)
            .arg(&self.name)
            .args(rest)
            .output()
            .unwrap();
        let errors = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.success(), "netns {verb:?} {rest:?}: {errors}");
    }

    /// Prefix of a command that is to run on a host.
    pub(super) fn exec(&self, host: usize) -> Vec<String> {
        let host = host.to_string();
        ["exec", &self.name, &host, "--"].into_iter().fold(
            vec![self.tool.clone()],
            |mut argv, word| {
                argv.push(word.to_owned());
                argv
            },
        )
    }

    /// Nothing passes to or from the host any more, and nobody is told.
    pub(crate) fn cut(&self, host: usize) {
        self.run(&["cut"], &[&host.to_string()]);
    }

    /// The same between two hosts only.
    pub(crate) fn cut_pair(&self, one: usize, other: usize) {
        self.run(&["cut"], &[&one.to_string(), &other.to_string()]);
    }

    /// Packets from the first to the second are lost; those from the second arrive.
    pub(crate) fn cut_one_way(&self, from: usize, to: usize) {
        let (from, to) = (from.to_string(), to.to_string());
        self.run(&["cut"], &[&from, &to, "--one-way"]);
    }

    /// Packets to the host by this protocol (`tcp`, `udp`, `both`) are lost from now on, and only those.
    pub(crate) fn drop(&self, host: usize, protocol: &str) {
        self.run(&["drop"], &[&host.to_string(), protocol]);
    }

    pub(crate) fn heal(&self) {
        self.run(&["heal"], &[]);
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let _ = Command::new(&self.tool).args(["down", &self.name]).status();
    }
}
