//! The launcher: one per job and node, the parent of the workers. It lives in the user's own shell,
//! container or pod, with the user's rights, and talks to the agent of its node.

pub mod args;
pub mod control;
pub mod drive;
pub mod embedded;
pub mod environment;
pub mod guard;
pub mod link;
pub mod logs;
mod mounts;
pub mod net;
pub mod options;
pub mod output;
pub mod port;
pub mod procs;
pub mod saves;
pub mod sidecar;
pub mod spawn;
pub mod stacks;
pub mod store;
pub mod workers;

use std::ffi::{OsStr, OsString};
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use muster_launcher::Session;
use muster_protocol::local::{self, Register};
use muster_protocol::{LauncherId, StoreUuid};
use rand::TryRngCore;
use rand::rngs::OsRng;

use crate::{slurm, stores};
use args::RunArgs;
use drive::Driver;
use embedded::Embedded;
use environment::Job;
use guard::Guard;
use link::{Dial, SocketDial};
use muster_daemon::config::socket_candidates;
pub use muster_daemon::console;
use muster_daemon::console::Console;
use options::{Host, Plan};
use saves::replicas::Server;
use saves::{Cache, Saves};
use store::{JobStore, Keeper, Operations as _};
use workers::{Setup, Workers};

/// `muster run`: checks the flags and runs this node's part of the job.
pub fn main(args: RunArgs, argv: &[OsString]) -> ExitCode {
    let code = attend(args, argv);
    console::finish();
    code
}

fn attend(mut args: RunArgs, argv: &[OsString]) -> ExitCode {
    let explicit = args.is_explicit(argv);
    embeds_alone(&mut args, std::env::var_os("MUSTER_SOCKET").as_deref());
    let plan = from_slurm(&mut args).and_then(|()| Ok(Plan::new(args, explicit, &host())?));
    let mut plan = match plan {
        Ok(plan) => plan,
        Err(error) => {
            console::print(&format!("muster run: {}", console::with_causes(&error)));
            return ExitCode::from(2);
        }
    };
    if let Err(error) = spawn::find(&plan.program, std::env::var_os("PATH").as_deref()) {
        let why = spawn::why_not_run(&plan.program, &error);
        console::print(&format!("muster run: {why}"));
        return ExitCode::from(2);
    }
    if let Some(script) = plan.script.as_deref().filter(|s| !s.exists()) {
        let why = local::cannot_run(
            &script.to_string_lossy(),
            Some("there is no such file"),
            "check its path, also that this node has it: nothing was started",
        );
        console::print(&format!("muster run: {why}"));
        return ExitCode::from(2);
    }
    let (socket, mut embedded) = match agent(&mut plan) {
        Ok(found) => found,
        Err(error) => {
            console::print(&format!("muster run: {}", console::with_causes(&error)));
            return ExitCode::FAILURE;
        }
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            console::print(&format!("muster run: cannot start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let ended = embedded.as_mut().and_then(Embedded::ended);
    plan.socket = Some(socket.clone());
    let result = runtime.block_on(launch(plan, SocketDial(socket), ended));
    // A dial to a guard may still wait on its thread; nobody waits for it.
    runtime.shutdown_background();
    if let Some(embedded) = embedded {
        embedded.stop();
    }
    match result {
        Ok(code) => ExitCode::from(u8::try_from(code.clamp(0, 255)).unwrap_or(1)),
        Err(error) => {
            console::print(&format!("muster run: {}", console::with_causes(&error)));
            ExitCode::FAILURE
        }
    }
}

/// The agent to attach to: the one that was named, else one that answers on this machine, else one
/// embedded in this process.
fn agent(plan: &mut Plan) -> anyhow::Result<(PathBuf, Option<Embedded>)> {
    if let Some(socket) = &plan.socket {
        // An agent that is away comes back. What its owner has to change does not change by waiting.
        let may = nix::unistd::access(socket, nix::unistd::AccessFlags::W_OK);
        if may == Err(nix::errno::Errno::EACCES) {
            anyhow::bail!(
                "this user may not use the agent's socket {}: ask its owner, or name another with --socket",
                socket.display()
            );
        }
        return Ok((socket.clone(), None));
    }
    let utf8 = |(k, v): (OsString, OsString)| Some((k.into_string().ok()?, v.into_string().ok()?));
    let environment = std::env::vars_os().filter_map(utf8).collect();
    if !plan.standalone && plan.instance == 0 {
        let mut candidates = socket_candidates(&environment).into_iter();
        let answers = |path: &PathBuf| std::os::unix::net::UnixStream::connect(path).is_ok();
        if let Some(socket) = candidates.find(answers) {
            return Ok((socket, None));
        }
    }
    let embedded = Embedded::start(plan)?;
    // What only this host can reach is offered as that.
    plan.loopback |= embedded.loopback;
    Ok((embedded.socket.clone(), Some(embedded)))
}

/// `--standalone` brings its own agent, whatever the environment names for other jobs.
fn embeds_alone(args: &mut RunArgs, named: Option<&OsStr>) {
    if args.standalone && args.socket.as_deref().map(Path::as_os_str) == named {
        args.socket = None;
    }
}

/// Under `srun` the step names its nodes: they are the first peers, and the step is the job, unless
/// the flags say otherwise.
fn from_slurm(args: &mut RunArgs) -> anyhow::Result<()> {
    let Some(step) = slurm::peers_from_env(|name| std::env::var(name).ok())? else {
        return Ok(());
    };
    if step.nodes.len() > 1 && !args.standalone {
        args.rdzv_endpoint.get_or_insert_with(|| step.peers());
        args.rdzv_id
            .get_or_insert_with(|| format!("slurm-{}.{}", step.job_id, step.step_id));
        if args.instance == 0 {
            // Several tasks on one node are meant: each is a node of its own.
            args.instance = u16::try_from(step.local_id).unwrap_or(u16::MAX);
        }
    }
    Ok(())
}

/// Runs this node's part of a job over an agent's link, and returns the exit code. `ended` resolves
/// when no agent will ever answer there again.
pub async fn launch(
    plan: Plan,
    dialer: impl Dial,
    ended: Option<embedded::Gone>,
) -> anyhow::Result<i32> {
    for note in &plan.notes {
        console::say(note);
    }
    let launcher = LauncherId(
        OsRng
            .try_next_u64()
            .context("no random numbers from the kernel")?
            .to_be_bytes(),
    );
    let bind = if plan.loopback {
        Ipv4Addr::LOCALHOST
    } else {
        Ipv4Addr::UNSPECIFIED
    };
    let store = match &plan.store {
        Some(location) => Some(JobStore::open(location, &plan.job).await?),
        None => None,
    };
    let uuid = store.as_ref().map(JobStore::uuid);
    let cache = match &plan.checkpoint_cache {
        Some(dir) => Some(Cache::open(dir, &plan.job).with_context(|| {
            let dir = dir.display();
            format!("--checkpoint-cache {dir} cannot be used: name a directory on this node's disk")
        })?),
        None => None,
    };
    let cached = cache.as_ref().map(|cache| cache.path().into());
    let place = store.as_ref().map(|store| saves::Place {
        store: store.folder(),
        location: store.name(),
        cache,
        io: plan.checkpoint_io,
        job: plan.job.clone(),
    });
    let for_workers = |location| stores::folder_for_workers(location, &plan.job);
    let folder = plan.store.as_ref().map(for_workers);
    // Nobody else knows of a job that stands alone; a store is read by others.
    let leased = !plan.standalone || store.is_some();
    let socket = plan.socket.as_deref().map(std::path::absolute);
    let socket = socket.transpose()?.unwrap_or_default();
    let server = match &place {
        Some(_) => Some(Server::open(IpAddr::V4(bind)).context("cannot open the memory port")?),
        None => None,
    };
    let memory = server.as_ref().map(Server::port);
    let guard =
        Guard::open(IpAddr::V4(bind), launcher, memory).context("cannot open the guard port")?;
    let mut saves = Saves::new(place, plan.checkpoint_memory, plan.keep.clone());
    if let Some(server) = server {
        let settings = saves::replicas::Settings {
            server,
            launcher,
            who: muster_daemon::serve::host_name(),
            replicas: plan.replicas,
        };
        saves.share(settings).context("cannot share memory")?;
    }
    let register = register(&plan, launcher, guard.port(), uuid);
    let best = register.addrs.first().copied();
    let setup = Setup {
        job: Job {
            id: plan.job,
            launcher,
            role: plan.role,
            max_restarts: plan.spec.max_restarts,
            signals: plan.signals,
            virtual_local_rank: plan.virtual_local_rank,
            store: folder,
            store_id: uuid,
            cache: cached,
            memory,
        },
        program: plan.program,
        args: plan.args,
        logs: plan.logs,
        slots: plan.slots,
        muster: sidecar::this_program(),
        socket,
        leased,
        terminals: Setup::terminals_here(),
    };
    let console = Console::standard()?;
    let workers = Workers::open(setup, console).context("cannot prepare for workers")?;
    let driver = Driver::new(
        workers,
        plan.handled,
        guard,
        store.map(Keeper::start).transpose()?,
        saves,
        best,
        plan.hangs,
    );
    let outcome = driver.run(Session::new(register), dialer, ended).await?;
    Ok(outcome.code)
}

fn register(
    plan: &Plan,
    launcher: LauncherId,
    guard_port: u16,
    store: Option<StoreUuid>,
) -> Register {
    Register {
        launcher,
        job: plan.job.clone(),
        spec: plan.spec.clone(),
        slots: plan.slots,
        guard_port,
        addrs: if plan.loopback {
            vec![IpAddr::V4(Ipv4Addr::LOCALHOST)]
        } else {
            net::offered(plan.local_addr)
        },
        place: plan.place,
        running: None,
        waited_ms: 0,
        began: None,
        lineage: None,
        gate: None,
        store,
        parity: plan.replicas.over(),
        pid: std::process::id(),
        command: plan.command_line(),
        log_dir: log_dir(plan, launcher),
    }
}

/// Where `muster logs` finds the output: the folder that [`logs::LogRoot`] makes, where the user named its place.
fn log_dir(plan: &Plan, launcher: LauncherId) -> Option<String> {
    let base = std::path::absolute(plan.logs.dir.as_ref()?).ok()?;
    let dir = base.join(format!("{}_{launcher}", plan.job));
    dir.into_os_string().into_string().ok()
}

/// Facts about this machine that the plan needs.
fn host() -> Host {
    let env = |name: &str| std::env::var(name).ok();
    let devices = std::fs::read_dir("/dev")
        .into_iter()
        .flatten()
        .filter_map(|e| e.ok()?.file_name().into_string().ok());
    Host {
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        gpus: options::count_gpus(
            env("CUDA_VISIBLE_DEVICES").as_deref(),
            env("NVIDIA_VISIBLE_DEVICES").as_deref(),
            devices,
        ),
        memory: free_memory(),
        python: python(
            std::env::var_os("PYTHON_EXEC"),
            std::env::current_exe().ok(),
        ),
        // Only a name hangs on it: without entropy the process id has to do.
        random: OsRng.try_next_u32().unwrap_or_else(|_| std::process::id()),
    }
}

/// The program that runs a script: the one that was named, else the Python of the environment that this program lies
/// in, as torchrun takes its own, else the one of the path.
fn python(named: Option<OsString>, program: Option<PathBuf>) -> OsString {
    let own = || {
        let bin = program?.parent()?.to_owned();
        let python = bin.join("python3");
        let is_environment = bin.parent()?.join("pyvenv.cfg").is_file();
        (is_environment && python.is_file()).then(|| python.into_os_string())
    };
    named.or_else(own).unwrap_or_else(|| "python3".into())
}

/// Bytes of memory that are free, of the machine or, where that is less, of this process' cgroup.
fn free_memory() -> u64 {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
        kib.checked_mul(1024)
    });
    let cgroup = read("/proc/self/cgroup").and_then(|text| {
        let path = text.lines().find_map(|l| l.strip_prefix("0::"))?.to_owned();
        let number = |name: &str| -> Option<u64> {
            read(&format!("/sys/fs/cgroup{path}/{name}"))?
                .trim()
                .parse()
                .ok()
        };
        // Without a limit `memory.max` is `max`, which is no number.
        number("memory.max")?.checked_sub(number("memory.current")?)
    });
    machine.unwrap_or(u64::MAX).min(cgroup.unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use std::io;

    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        run: RunArgs,
    }

    fn args(line: &[&str]) -> RunArgs {
        let line = std::iter::once(&"muster").chain(line);
        Line::try_parse_from(line).unwrap().run
    }

    #[test]
    fn standalone_embeds_unless_a_flag_names_an_agent() {
        let named = Some(OsStr::new("/s"));
        let socket = |line: &[&str]| {
            let mut args = args(line);
            embeds_alone(&mut args, named);
            args.socket
        };
        // As the environment gives it, which clap reads in front.
        assert_eq!(socket(&["--standalone", "--socket=/s", "x"]), None);
        assert_eq!(socket(&["--socket=/s", "x"]), Some("/s".into()));
        let other = socket(&["--standalone", "--socket=/t", "x"]);
        assert_eq!(other, Some("/t".into()));
    }

    #[test]
    fn scripts_are_run_by_the_python_of_the_environment_that_muster_lies_in() {
        let dir = tempfile::tempdir().unwrap();
        let bin = dir.path().join("bin");
        std::fs::create_dir(&bin).unwrap();
        let muster = Some(bin.join("muster"));
        let own = bin.join("python3").into_os_string();
        std::fs::write(&own, "").unwrap();
        // `/usr/local/bin` and the like are no environments.
        assert_eq!(python(None, muster.clone()), "python3");
        std::fs::write(dir.path().join("pyvenv.cfg"), "").unwrap();
        assert_eq!(python(None, muster.clone()), own);
        assert_eq!(python(Some("pypy".into()), muster), "pypy");
        assert_eq!(python(None, None), "python3");
    }

    /// Nobody serves there.
    struct Nobody;

    impl link::Link for Nobody {
        async fn send(&mut self, _: link::Out) -> io::Result<()> {
            Err(io::ErrorKind::BrokenPipe.into())
        }

        async fn recv(&mut self) -> io::Result<Option<link::In>> {
            Ok(None)
        }
    }

    impl Dial for Nobody {
        type Link = Nobody;
        async fn dial(&mut self) -> io::Result<Nobody> {
            Err(io::ErrorKind::ConnectionRefused.into())
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn a_launcher_whose_embedded_agent_is_gone_ends() {
        let mut args = args(&["--standalone", "x"]);
        args.socket = None;
        let mut plan = Plan::new(args, false, &host()).unwrap();
        plan.socket = Some("/nowhere/muster.sock".into());
        let (agent, ended) = tokio::sync::oneshot::channel();
        // As when its thread panics.
        drop(agent);
        let launched = launch(plan, Nobody, Some(ended));
        let limit = std::time::Duration::from_secs(60);
        let code = tokio::time::timeout(limit, launched)
            .await
            .expect("it ends");
        assert_eq!(code.unwrap(), 1);
    }
}
