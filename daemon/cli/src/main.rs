//! The command `muster`: a thin dispatch over the library's subcommands.

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use muster_cli::{demo, query, run};
use muster_daemon::{config::Flags, serve};

/// Keeps a training job running while its nodes come and go.
#[derive(Debug, Parser)]
#[command(name = "muster", version, max_term_width = 100, after_help = query::EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a training script on this node as its part of a job. Takes torchrun's flags.
    #[command(infer_long_args = true, args_override_self = true)]
    Run(Box<run::args::RunArgs>),
    /// Run an agent in the foreground: the same as `musterd`.
    Agent(Box<Flags>),
    #[command(flatten)]
    Query(Box<query::Query>),
    /// Train on this machine while nodes are killed, drained and added, and check the result.
    Demo(demo::DemoArgs),
    #[command(hide = true)]
    DemoWorker(demo::DemoWorkerArgs),
}

fn main() -> ExitCode {
    // The sidecar is started by the launcher alone, with a fixed command line, and must be small.
    if let Some(code) = run::sidecar::main_if_asked(std::env::args_os()) {
        return code;
    }
    match Cli::parse().command {
        Command::Run(args) => run::main(*args, &std::env::args_os().collect::<Vec<_>>()),
        Command::Agent(flags) => serve::main(*flags),
        Command::Query(query) => query::main(*query, Cli::command()),
        Command::Demo(args) => demo::main(&args),
        Command::DemoWorker(args) => demo::worker(args),
    }
}
