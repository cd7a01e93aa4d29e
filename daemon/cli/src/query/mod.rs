//! The commands that ask an agent, give it an order, or look at this machine.
//!
//! Nothing here decides about a job. The agent's answer is JSON, and `-o json` prints it as it
//! came; the tables are made from the same values.

mod cancel;
mod checkpoint;
mod checkpoints;
pub(crate) mod client;
mod config;
mod doctor;
mod events;
mod lists;
mod logs;
mod orders;
mod output;
mod shell;

use std::path::PathBuf;
use std::process::ExitCode;

use crate::run::console::{print, say};
pub(crate) use output::utc;
use output::{Failure, Format, Style};

/// Meaning of the exit codes; shown by `--help`.
pub const EXIT_CODES: &str = "Exit codes: 0 done; 1 refused or failed; 2 wrong usage, or several agents to choose from; 3 no agent answers. \
`muster run` passes on the exit code of the worker that failed first.";

/// Arguments of every command that talks to an agent.
#[derive(Debug, Clone, clap::Args)]
pub struct Common {
    /// The agent's socket [default: the only agent that answers]
    #[arg(long, env = "MUSTER_SOCKET", value_name = "PATH")]
    socket: Option<PathBuf>,
    #[command(flatten)]
    out: Out,
}

/// How a command prints.
#[derive(Debug, Clone, clap::Args)]
pub struct Out {
    /// How to print
    #[arg(
        short,
        long = "output",
        value_enum,
        default_value = "text",
        value_name = "FORMAT"
    )]
    output: Format,
    /// The same as `-o json`
    #[arg(long, conflicts_with = "output")]
    json: bool,
}

impl Out {
    fn json(&self) -> bool {
        self.json || self.output == Format::Json
    }

    fn wide(&self) -> bool {
        self.output == Format::Wide
    }
}

/// The query side of the command line.
#[derive(Debug, clap::Subcommand)]
pub enum Query {
    /// Show the agent of this node
    Status(Common),
    /// List the nodes that the agent knows
    Nodes(Common),
    /// List the jobs that the agent knows
    Jobs(Common),
    /// Show what happened to a job: each generation, its cause, its members, and how long each phase took
    Events(events::Args),
    /// Show the output of a job's workers on this node
    Logs(logs::Args),
    /// Empty a node: its jobs save, leave it and go on elsewhere, then its agent ends
    Drain(orders::DrainArgs),
    /// Stop a job on all its nodes
    Cancel(cancel::CancelArgs),
    /// Have all ranks of a job save at one step, and go on; or do something about its checkpoints
    Checkpoint(checkpoint::Args),
    /// List the checkpoints in a job's store
    Checkpoints(checkpoints::ListArgs),
    /// Orders for a job in trouble
    Job(orders::JobArgs),
    /// Check this node, and say how to mend what is wrong
    Doctor(doctor::Args),
    /// Show the agent's configuration, and where each value comes from
    Config(config::Args),
    /// Print a completion script for a shell
    Completions(shell::Args),
    /// Print the manual page
    #[command(hide = true)]
    Man(shell::ManArgs),
}

/// Runs one command. `whole` is the whole command line, for completions and the manual page.
pub fn main(query: Query, whole: clap::Command) -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            say(&format!("cannot start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let style = Style::of_stdout();
    let result = runtime.block_on(async {
        match query {
            Query::Status(common) => lists::status(&common, &style).await,
            Query::Nodes(common) => lists::nodes(&common, &style).await,
            Query::Jobs(common) => lists::jobs(&common, &style).await,
            Query::Events(args) => events::main(&args, &style).await,
            Query::Logs(args) => logs::main(&args).await,
            Query::Drain(args) => orders::drain(&args).await,
            Query::Cancel(args) => cancel::main(&args).await,
            Query::Checkpoint(args) => checkpoint::main(&args, &style).await,
            Query::Checkpoints(args) => checkpoints::all(&args, &style).await,
            Query::Job(args) => orders::job(&args).await,
            Query::Doctor(args) => doctor::main(&args, &style).await,
            Query::Config(args) => config::main(&args, &style),
            Query::Completions(args) => shell::completions(&args, whole),
            Query::Man(args) => shell::man(&args, whole),
        }
    });
    // A check that hangs (a resolver, a network file system) must not hold up the exit.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever reads has enough: `muster events J | head`.
        Err(Failure::NobodyReads) => ExitCode::SUCCESS,
        Err(failure) => {
            let text = failure.to_string();
            if !text.is_empty() {
                print(&format!("muster: {}", output::clean_lines(&text)));
            }
            ExitCode::from(failure.code())
        }
    }
}
