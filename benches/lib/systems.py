"""How each system is started as a set of nodes on one machine. A system knows how to start a node, which node hosts
what is special in it, and which process a SIGTERM to "the agent" goes to. It knows nothing of cases and metrics."""

import os
import signal
import time

from . import setup

BLOCKED = ("TORCH", "PET_", "MUSTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "BENCH_", "NODE_NAME")


def clean_environment(directory):
    """The caller's environment without anything that a launcher would react to, and with a home of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(BLOCKED)}
    # Short names: the path of a unix socket has 108 bytes.
    homes = {"HOME": "home", "XDG_RUNTIME_DIR": "run", "XDG_STATE_HOME": "state", "XDG_DATA_HOME": "data"}
    homes |= {"XDG_CACHE_HOME": "cache", "XDG_CONFIG_HOME": "config", "TMPDIR": "tmp"}
    for name, folder in homes.items():
        path = os.path.join(directory, folder)
        os.makedirs(path, mode=0o700, exist_ok=True)
        env[name] = path
    # All systems alike: one thread a worker, loopback only.
    return {**env, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}


class NotServing(Exception):
    """An agent did not come up. The text has its name and its last lines of output."""


class Cluster:
    """Nodes of one job under one system. `script` is the command line after the launcher's own flags."""

    def __init__(self, system, bed, directory, script, min_nodes=2, max_nodes=3):
        self.system = system
        self.bed = bed
        self.directory = directory
        self.script = script
        self.span = f"{min_nodes}:{max_nodes}"
        self.max_nodes = max_nodes
        self.job = f"bench-{os.path.basename(directory)}"
        self.launchers = {}
        self.agents = {}
        # One port a node for the agents, one for their HTTP, and the endpoint's own: the first agent's.
        self.ports = setup.free_ports(2 * max_nodes)

    @property
    def endpoint(self):
        return f"127.0.0.1:{self.ports[0]}"

    def node_directory(self, index):
        path = os.path.join(self.directory, f"node{index}")
        os.makedirs(path, exist_ok=True)
        return path

    def prepare(self, index, timeout=10.0):
        """Starts what is there before any job is (a daemon, for a system that has one) and waits until it serves."""
        self.system.prepare(self, index)
        deadline = time.monotonic() + timeout
        while not self.system.ready(self, index):
            if time.monotonic() > deadline:
                raise NotServing(f"{self.system.name}: no agent serves on node {index} after {timeout:g} s\n{self.log_tail(index)}")
            time.sleep(0.02)

    def start(self, index):
        """Starts the job's launcher on node `index`. Returns time.time_ns() just before."""
        directory = self.node_directory(index)
        argv, extra = self.system.command(self, index)
        env = {**clean_environment(directory), **extra}
        before = time.time_ns()
        self.launchers[index] = self.bed.spawn(argv, f"node{index}", env, os.path.join(directory, "launcher.log"), self.directory)
        return before

    def alive(self, index):
        """The launcher of node `index` has not ended."""
        return self.launchers[index].poll() is None

    def drain(self, index):
        """SIGTERM to the node's agent. Returns time.time_ns() just before."""
        before = time.time_ns()
        agent = self.agents.get(index, self.launchers[index])
        self.bed.signal_pid(agent.pid, signal.SIGTERM)
        return before

    def log_tail(self, index, lines=15):
        """The last lines of what the node's agent and launcher wrote."""
        text = ""
        for name in ("musterd.log", "launcher.log"):
            path = os.path.join(self.node_directory(index), name)
            if os.path.exists(path):
                with open(path, encoding="utf-8", errors="replace") as file:
                    text += f"--- node {index}, {name}\n" + "".join(file.readlines()[-lines:])
        return text


class Torchrun:
    """torchrun with its c10d rendezvous. The store lives in node 0's agent."""

    def __init__(self, name, env=None, rdzv_conf=""):
        self.name = name
        self.env = env or {}
        self.rdzv_conf = rdzv_conf
        self.programs = None

    def build(self):
        self.programs = setup.venv()

    def prepare(self, cluster, index):
        """torchrun has nothing that runs before the job."""

    def command(self, cluster, index):
        argv = [self.programs / "torchrun", "--nnodes", cluster.span, "--nproc-per-node", "1"]
        argv += ["--rdzv-backend", "c10d", "--rdzv-id", cluster.job, "--rdzv-endpoint", cluster.endpoint]
        argv += ["--local-addr", "127.0.0.1", "--max-restarts", "100"]
        # Every node is this machine, so torchrun cannot tell by its name which one is the host.
        conf = f"is_host={'true' if index == 0 else 'false'}"
        argv += ["--rdzv-conf", ",".join(filter(None, [conf, self.rdzv_conf]))]
        # torchrun puts the interpreter in front itself; `--no-python` marks a script that is a program.
        script = cluster.script
        argv += script[1:] if script[0] == "python" else ["--no-python", *script]
        return [str(a) for a in argv], self.env

    def ready(self, cluster, index):
        return True

    def special_node(self, _rank0_node):
        """Whose loss is worst: the store's host."""
        return 0

    def resting_processes(self, cluster, index):
        return [("agent", cluster.launchers[index].pid)]


class Muster:
    """`muster run` with the agent embedded in the launcher. The endpoint is a first peer to call, not a master."""

    def __init__(self):
        self.name = "muster"
        self.programs = None

    def build(self):
        setup.venv()
        self.programs = setup.muster("muster")

    def prepare(self, cluster, index):
        """Nothing runs before the job."""

    def command(self, cluster, index):
        argv = [self.programs / "muster", "run", "--nnodes", cluster.span, "--nproc-per-node", "1"]
        argv += ["--rdzv-id", cluster.job, "--rdzv-endpoint", cluster.endpoint, "--max-restarts", "100"]
        return self.script(argv, cluster), agent_environment(cluster)

    def script(self, argv, cluster):
        if cluster.script[0] == "python":
            argv += ["--", setup.venv() / "python", *cluster.script[1:]]
        else:
            argv += ["--no-python", "--", *cluster.script]
        return [str(a) for a in argv]

    def ready(self, cluster, index):
        return True

    def special_node(self, rank0_node):
        """No node is special; the nearest is the one that holds rank 0."""
        return rank0_node

    def resting_processes(self, cluster, index):
        return [("launcher with agent", cluster.launchers[index].pid)]


class MusterDaemon(Muster):
    """A `musterd` on every node before the job, and `muster run` attached to it."""

    def __init__(self):
        super().__init__()
        self.name = "muster-daemon"

    def build(self):
        setup.venv()
        self.programs = setup.muster("muster", "musterd")

    def prepare(self, cluster, index):
        directory = cluster.node_directory(index)
        http = cluster.ports[cluster.max_nodes + index]
        argv = [self.programs / "musterd", "--state-dir", os.path.join(directory, "agent"), "--socket", self.socket(cluster, index)]
        argv += ["--listen", f"127.0.0.1:{cluster.ports[index]}", "--http", f"127.0.0.1:{http}"]
        for other in range(cluster.max_nodes):
            if other != index:
                argv += ["--bootstrap", f"127.0.0.1:{cluster.ports[other]}"]
        env = {**clean_environment(directory), **agent_environment(cluster)}
        log = os.path.join(directory, "musterd.log")
        cluster.agents[index] = cluster.bed.spawn([str(a) for a in argv], f"node{index}", env, log, cluster.directory)

    def socket(self, cluster, index):
        return os.path.join(cluster.node_directory(index), "musterd.sock")

    def command(self, cluster, index):
        argv = [self.programs / "muster", "run", "--socket", self.socket(cluster, index), "--nnodes", cluster.span]
        argv += ["--nproc-per-node", "1", "--rdzv-id", cluster.job, "--max-restarts", "100"]
        return self.script(argv, cluster), {}

    def ready(self, cluster, index):
        """The daemon answers on its socket."""
        return index not in cluster.agents or os.path.exists(self.socket(cluster, index))

    def resting_processes(self, cluster, index):
        found = [("agent", cluster.agents[index].pid)]
        if index in cluster.launchers:
            found.append(("launcher", cluster.launchers[index].pid))
        return found


def agent_environment(cluster):
    """The cluster secret, as a file that only its owner reads; and no multicast, so that nothing leaves loopback."""
    path = os.path.join(cluster.directory, "secret")
    if not os.path.exists(path):
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as file:
            file.write(os.urandom(32).hex() + "\n")
    return {"MUSTER_SECRET_FILE": path, "MUSTER_MDNS": "false"}


UNSHARED = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TUNED = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"

SYSTEMS = {
    "muster": Muster(),
    "muster-daemon": MusterDaemon(),
    "torchrun": Torchrun("torchrun"),
    "torchrun-unshared": Torchrun("torchrun-unshared", UNSHARED),
    "torchrun-tuned": Torchrun("torchrun-tuned", UNSHARED, TUNED),
}
# A name that stands for several columns.
FAMILIES = {
    "muster": ["muster", "muster-daemon"],
    "torchrun": ["torchrun", "torchrun-unshared", "torchrun-tuned"],
}


def choose(names):
    """Systems by comma-separated name. `torchrun` and `muster` mean all their settings; `=NAME` means one alone."""
    chosen = []
    for name in names.split(","):
        members = [name[1:]] if name.startswith("=") else FAMILIES.get(name, [name])
        for member in members:
            if member not in SYSTEMS:
                raise ValueError(f"no system '{member}': choose from {', '.join(SYSTEMS)}")
            if SYSTEMS[member] not in chosen:
                chosen.append(SYSTEMS[member])
    for system in chosen:
        system.build()
    return chosen
