//! The agent as a daemon: one per node.

use std::process::ExitCode;

use clap::Parser;
use muster_daemon::{config::Flags, serve};

/// Finds its peers, forms rendezvous groups, and keeps training jobs running while nodes come and go.
#[derive(Debug, Parser)]
#[command(name = "musterd", version, max_term_width = 100)]
struct Cli {
    #[command(flatten)]
    flags: Flags,
}

fn main() -> ExitCode {
    serve::main(Cli::parse().flags)
}
