//! `musterd`, also reachable as `muster agent`: configuration, logs, signals, and the loop.

use std::path::Path;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use muster_protocol::Span;
use muster_protocol::record::Place;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::agent::{Handle, NetSetup, Node, Setup};
use crate::config::{self, AgentConfig, Flags, Inputs, LogFormat};
use crate::console::{self, Console, Log};
use crate::notify::Notifier;
use crate::socket::Listener;
use crate::state::StateDir;

/// After so long the log says that the start waits for its disk.
const SLOW_DISK: Duration = Duration::from_secs(2);

/// Runs an agent until it is told to go; the process' exit code.
pub fn main(flags: Flags) -> ExitCode {
    let code = match serve(flags) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            console::print(&format!("musterd: {}", console::with_causes(&error)));
            ExitCode::FAILURE
        }
    };
    console::finish();
    code
}

fn serve(flags: Flags) -> anyhow::Result<()> {
    let (config, effective) = config::load(&Inputs::from_process(flags))?;
    // A log that nobody takes must not stop the agent.
    let console = Log(Console::standard()?);
    log_to(&config, move || console.clone())?;
    for warning in &effective.warnings {
        tracing::warn!("{warning}");
    }
    ignore_file_size_signal();
    raise_descriptor_limit();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let result = runtime.block_on(run(config));
    // A look-up of a name may still wait on its thread; nobody waits for it.
    runtime.shutdown_timeout(Duration::from_millis(200));
    result
}

async fn run(config: AgentConfig) -> anyhow::Result<()> {
    let listener = Listener::bind(&config.socket)?;
    let starts = tell_of_slow_disk(&config.state_dir);
    let state = StateDir::open(&config.state_dir)?;
    for put_aside in state.quarantined() {
        tracing::error!(?put_aside, "damaged state was put aside");
    }
    let notifier = Notifier::from_env()?;
    let setup = Setup {
        state,
        listener: Some(listener),
        net: net_setup(&config),
        http: config.http,
        host: host_name(),
        suspect_after: config.suspect_after,
        agent_grace: config.agent_grace,
        sigterm_grace: config.sigterm_deadline,
        notifier: Some(notifier),
        labels: config.labels.clone(),
        place: place(&config),
        slot_memory: config.checkpoint_memory,
        slot_lease: config.checkpoint_lease,
        embedded: false,
    };
    let node = Node::start(setup).await?;
    drop(starts);
    tracing::info!(node = %node.node_id(), socket = %config.socket.display(), "serving");
    watch_signals(node.handle())?;
    let _ended = node.run().await;
    Ok(())
}

/// The log says after a while that the start waits for the disk of its state directory, unless what this returns was
/// dropped before.
fn tell_of_slow_disk(dir: &Path) -> mpsc::Sender<()> {
    let (starts, started) = mpsc::channel();
    let dir = dir.to_owned();
    std::thread::spawn(move || {
        if started.recv_timeout(SLOW_DISK) == Err(mpsc::RecvTimeoutError::Timeout) {
            tracing::warn!(
                state_dir = %dir.display(),
                "the disk of the state directory does not answer; this agent serves once it does"
            );
        }
    });
    starts
}

/// Outermost and innermost of the places that the operator named.
fn place(config: &AgentConfig) -> Place {
    let zone = config.place.first().map_or("", String::as_str);
    let inner = config.place.get(1..).and_then(<[String]>::last);
    Place::of(zone, inner.map_or("", String::as_str))
}

/// The network part of a configuration.
pub fn net_setup(config: &AgentConfig) -> NetSetup {
    NetSetup {
        cluster: config.cluster.clone(),
        secret: config.secret.as_ref().map(|s| s.bytes().to_vec()),
        listen: config.listen.clone(),
        otherwise: None,
        quic: config.quic,
        mdns: config.mdns,
        bootstrap: config.bootstrap.iter().map(ToString::to_string).collect(),
    }
}

/// This machine's name, as people know it.
pub fn host_name() -> String {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    std::env::var("NODE_NAME").unwrap_or(name)
}

/// SIGTERM and SIGINT drain this node; the second one does not wait.
fn watch_signals(handle: Handle) -> anyhow::Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let runtime = tokio::runtime::Handle::current();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            let mut asked = false;
            for signal in signals.forever() {
                let handle = handle.clone();
                if signal == SIGHUP {
                    // A terminal that closes, or a habit from other daemons: nothing to re-read.
                    continue;
                }
                let again = std::mem::replace(&mut asked, true);
                runtime.spawn(async move {
                    if again {
                        handle.quit().await;
                    } else {
                        handle
                            .drain(None::<Span>, "its agent was told to stop (SIGTERM)")
                            .await;
                    }
                });
            }
        })?;
    Ok(())
}

/// A file-size limit must fail a write, not kill the agent.
fn ignore_file_size_signal() {
    // Safety: installs SIG_IGN, which runs no code of ours.
    let ignored = unsafe {
        nix::sys::signal::signal(
            nix::sys::signal::Signal::SIGXFSZ,
            nix::sys::signal::SigHandler::SigIgn,
        )
    };
    if let Err(error) = ignored {
        tracing::warn!(%error, "SIGXFSZ cannot be ignored");
    }
}

/// Peers, and the descriptors that launchers give it, are many more than the 1,024 files that a shell allows. An agent
/// starts no program, which could mind.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, limit = ?limit.current, "no more descriptors than this: the limit cannot be raised");
    }
}

/// Starts logging as configured.
pub fn log_to<W>(config: &AgentConfig, writer: W) -> anyhow::Result<()>
where
    W: for<'a> MakeWriter<'a> + Send + Sync + 'static,
{
    let filter = EnvFilter::try_new(&config.log)?;
    let terminal = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let json = match config.log_format {
        LogFormat::Auto => !terminal,
        LogFormat::Text => false,
        LogFormat::Json => true,
    };
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        // A line that cannot be written (a full disk, a reader that went away) is lost. Left on, this
        // says so on stderr, and the agent dies of that failing too.
        .log_internal_errors(false)
        .with_ansi(terminal);
    if json {
        builder.json().init();
    } else {
        builder.init();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_may_open_as_many_descriptors_as_it_is_allowed_to() {
        let before = getrlimit(Resource::Nofile);
        let current = before.maximum.map(|most| most / 2);
        setrlimit(Resource::Nofile, Rlimit { current, ..before }).unwrap();
        raise_descriptor_limit();
        let limit = getrlimit(Resource::Nofile);
        assert_eq!(
            (limit.current, limit.maximum),
            (before.maximum, before.maximum)
        );
    }
}
