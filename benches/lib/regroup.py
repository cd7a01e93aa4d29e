"""Live membership: Muster and torchft side by side. A node (for torchft a replica) is lost while it trains with others,
who stay in their processes: the longest time between two committed steps of a survivor. And what a step costs more than
the same loop without live membership, in interleaved pairs, when nothing happens.

Systems take turns. Every system's step is the same: a pause in the place of a backward pass, one all-reduce, one update.
"""

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from . import live, paired, procs, report, setup, systems

CASES = {
    "kill": "SIGKILL of a node",
    "kill_rank0": "SIGKILL of rank 0's node",
    "worker_kill": "SIGKILL of a worker alone",
    "silent": "SIGSTOP of a node",
}
METRICS = ["longest_gap", "usual_step", "beyond_a_redone_step", "steps_redone", "steps_undone"]
# What is said of the differences in all pairs, and of them as a share of the loop alone.
ESTIMATES = {"cost": paired.mean, "cost_trimmed": paired.trimmed, "cost_median": paired.median}
COSTS = ["pairs", "plain", "live", "plain_median", "live_median"]
COSTS += [name + end for name in ESTIMATES for end in ("", "_low", "_high", "_share", "_share_high")]
SETTLED = 50


class MusterJob:
    """`muster run` with embedded agents. Workers of the host share memory, or are kept apart for TCP."""

    def __init__(self, options, transport):
        self.name = f"muster-{transport}"
        self.transport = transport
        self.ranks = options.nodes

    def build(self):
        self.worker = live.build()
        setup.muster("muster")
        if self.transport == "tcp" and os.geteuid() != 0:
            raise SystemExit("muster-tcp keeps workers apart in process namespaces: run the bench as root, or leave it out")

    def begin(self, bed, directory, options, more):
        worker = [self.worker, "--gradient", options.gradient, "--step-ms", options.step_ms, *more]
        least = 2 if self.ranks > 2 else 1
        self.nodes = live.Nodes(bed, directory, worker, least, self.ranks, self.transport)
        self.nodes.launch(range(self.ranks))
        return self.nodes.notes

    def pairs(self, options):
        return ["--pairs", options.pairs, "--block", options.block, "--seconds", options.cost_seconds, "--world", self.ranks]

    def alive(self):
        return self.nodes.anyone()

    def kill_worker(self, bed, node):
        """SIGKILL of the worker, whose launcher starts another one. Returns time.time_ns() just before."""
        workers = [pid for pid in bed.pids(node) if procs.command(pid).startswith(str(self.worker))]
        at = time.time_ns()
        for pid in workers:
            bed.signal_pid(pid, signal.SIGKILL)
        return at

    def tail(self):
        return self.nodes.show_logs()


class Torchft:
    """A lighthouse, and replicas of one rank each, with gloo."""

    def __init__(self, options, name, lighthouse=()):
        self.name = name
        self.flags = lighthouse
        self.ranks = options.replicas

    def build(self):
        self.programs = setup.venv_torchft()

    def begin(self, bed, directory, options, more):
        self.directory = directory
        notes = os.path.join(directory, "notes")
        os.makedirs(notes, exist_ok=True)
        port = setup.free_ports(1)[0]
        env = {**systems.clean_environment(directory), "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
        argv = [self.programs / "torchft_lighthouse", "--min_replicas", "2", "--quorum_tick_ms", "100"]
        argv += ["--bind", f"127.0.0.1:{port}", *self.flags]
        self.logs = [os.path.join(directory, "lighthouse.log")]
        self.processes = [bed.spawn([str(a) for a in argv], "lighthouse", env, self.logs[0])]
        for index in range(self.ranks):
            argv = [self.programs / "python", Path(__file__).with_name("torchft_replica.py"), "--log", notes]
            argv += ["--lighthouse", env["TORCHFT_LIGHTHOUSE"], "--replica", index, "--replicas", self.ranks]
            argv += ["--gradient", options.gradient, "--step-ms", options.step_ms, *more]
            self.logs.append(os.path.join(directory, f"replica{index}.log"))
            self.processes.append(bed.spawn([str(a) for a in argv], f"node{index}", env, self.logs[-1]))
        return live.Notes(notes)

    def pairs(self, options):
        return ["--pairs", options.pairs, "--block", options.block, "--seconds", options.cost_seconds]

    def alive(self):
        return self.processes[0].poll() is None

    def kill_worker(self, bed, node):
        """A replica is one process, which nobody starts again here."""
        return bed.signal_node(node, signal.SIGKILL)

    def tail(self):
        return "".join(f"--- {log}\n{Path(log).read_text(encoding='utf-8')[-1500:]}" for log in self.logs)


SYSTEMS = {
    "muster-shm": lambda options: MusterJob(options, "shm"),
    "muster-tcp": lambda options: MusterJob(options, "tcp"),
    "torchft": lambda options: Torchft(options, "torchft"),
    "torchft-1s": lambda options: Torchft(options, "torchft-1s", ("--heartbeat_timeout_ms", "1000")),
}


def worlds(notes):
    """For each process, the world it is in: its last word about it."""
    found = {who: notes.of(who, "regrouped") for who in notes.events}
    return {who: events[-1] for who, events in found.items() if events}


def trains(notes, count):
    """Whether `count` processes are in a world of that size, each well into it."""
    places = [(who, place) for who, place in worlds(notes).items() if place["world"] == count]
    settled = [who for who, place in places if sum(c["t"] > place["t"] for c in notes.commits(who)) >= SETTLED]
    return len(settled) >= count


def fault(system, case, options, figures, bed, directory):
    """One attempt of one case."""
    notes = system.begin(bed, directory, options, [])
    name, nodes = CASES[case], system.ranks
    if not notes.until(lambda: trains(notes, nodes), options.bound, system.alive):
        figures.add(system.name, name, "not_reached", 1, "attempts")
        print(f"{system.name}: no world of {nodes} trains\n{system.tail()}", file=sys.stderr)
        return
    places = worlds(notes)
    ranks = {place["rank"]: who for who, place in places.items()}
    lost = ranks[0 if case == "kill_rank0" else nodes - 1]
    node = live.node_of(lost)
    if case == "worker_kill":
        at = system.kill_worker(bed, node)
    else:
        at = bed.signal_node(node, signal.SIGSTOP if case == "silent" else signal.SIGKILL)
    survivors = [who for who in places if who != lost]
    expected = nodes if case == "worker_kill" and system.name.startswith("muster") else nodes - 1

    def goes_on():
        for who in survivors:
            place = worlds(notes)[who]
            if place["t"] < at or place["world"] != expected:
                return False
            if sum(event["t"] > place["t"] for event in notes.commits(who)) < SETTLED:
                return False
        return True

    if not notes.until(goes_on, options.bound, system.alive):
        figures.add(system.name, name, "never_within", options.bound, "s")
        print(f"{system.name}: {case}: survivors do not go on\n{system.tail()}", file=sys.stderr)
        return
    step = max(live.usual(notes.commits(who), at) for who in survivors)
    # From the step before the loss on: all of it belongs to the change, the second one of a respawned worker too.
    gap = max(length for who in survivors for length, _ in live.gaps(notes.commits(who), at - int(1e9 * (step + 0.05)), at))
    redone = max(sum(event["t"] >= at for event in notes.of(who, "again")) for who in survivors)
    figures.add(system.name, name, "longest_gap", gap * 1e3, "ms")
    figures.add(system.name, name, "usual_step", step * 1e3, "ms")
    # The step in doubt is done again, and the one before the gap ends with a commit: one step is not the fault's.
    figures.add(system.name, name, "beyond_a_redone_step", max(0.0, gap - 2 * step) * 1e3, "ms")
    figures.add(system.name, name, "steps_redone", redone, "steps")
    figures.add(system.name, name, "steps_undone", sum(live.undone(notes.commits(who)) for who in survivors), "steps")
    print(f"{system.name:<12} {case:<12} gap {gap * 1e3:.0f} ms, usual step {step * 1e3:.1f} ms", file=sys.stderr)


def cost(system, options, size, figures, bed, directory):
    """Interleaved pairs at one size of gradient."""
    chosen = argparse.Namespace(**{**vars(options), "gradient": size, "step_ms": 0})
    notes = system.begin(bed, directory, chosen, system.pairs(options))

    def finished():
        return any(notes.of(who, "pair") and notes.of(who, "done") for who in notes.events)

    name = f"{size >> 20} MiB a step"
    if not notes.until(finished, options.bound + 2 * options.cost_seconds, system.alive) and not finished():
        figures.add(system.name, name, "not_reached", 1, "attempts")
        print(f"{system.name}: no pairs\n{system.tail()}", file=sys.stderr)
        return
    pairs = [event for who in notes.events for event in notes.of(who, "pair")]
    differences = [pair["live"] - pair["plain"] for pair in pairs]
    figures.add(system.name, name, "pairs", len(pairs), f"pairs of {options.block}")
    alone = {}
    for kind in ("plain", "live"):
        times = [pair[kind] for pair in pairs]
        for metric, value in ((kind, statistics.fmean(times)), (f"{kind}_median", statistics.median(times))):
            alone[metric] = value
            figures.add(system.name, name, metric, value, "us")
    said = []
    for metric, estimate in ESTIMATES.items():
        middle, low, high = estimate(differences)
        # The middle of a loop that nothing interrupts, for what it costs then.
        of = alone["plain" if metric == "cost" else "plain_median"]
        for end, value in (("", middle), ("_low", low), ("_high", high)):
            figures.add(system.name, name, metric + end, value, "us")
        for end, value in (("_share", middle), ("_share_high", high)):
            figures.add(system.name, name, metric + end, 100 * value / of, "% of plain")
        said.append(f"{metric} {middle:.0f} us ({low:.0f} to {high:.0f}, {100 * middle / of:.2f} %)")
    print(f"{system.name:<12} {name}: {len(pairs)} pairs on {alone['plain']:.0f} us: {', '.join(said)}", file=sys.stderr)


def attempt(work, *arguments):
    directory = tempfile.mkdtemp(prefix="bench-regroup-")
    try:
        with procs.Bed() as bed:
            work(*arguments, bed, directory)
    except systems.NotServing as reason:
        print(reason, file=sys.stderr)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def listed(convert):
    return lambda text: [convert(part) for part in text.split(",") if part]


def main(argv):
    parser = argparse.ArgumentParser(prog="benches/run regroup", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--systems", type=listed(str), default=list(SYSTEMS), help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--cases", type=listed(str), default=list(CASES), help=f"of {','.join(CASES)}")
    parser.add_argument("--nodes", type=int, default=4, help="nodes of Muster")
    # With more, gloo's ring leaves ranks that are no neighbours of the lost one waiting for its timeout of 60 s.
    parser.add_argument("--replicas", type=int, default=3, help="replicas of torchft")
    parser.add_argument("--gradient", type=int, default=1 << 20, help="bytes that a step of the faults reduces")
    parser.add_argument("--step-ms", type=int, default=20, help="the pause of such a step")
    parser.add_argument("--repeat", type=int, default=3, help="attempts of each fault")
    parser.add_argument("--cost-sizes", type=listed(int), default=[1 << 20, 64 << 20], help="bytes; empty for none")
    parser.add_argument("--pairs", type=int, default=2000, help="pairs of blocks, live and alone, for each size")
    parser.add_argument("--block", type=int, default=1, help="steps of a block")
    parser.add_argument("--cost-seconds", type=int, default=120, help="for each size and system only as many pairs as fit")
    parser.add_argument("--bound", type=float, default=90.0, help="seconds after which an attempt is given up")
    parser.add_argument("--out", default=str(setup.ROOT / "target" / "bench-regroup.jsonl"), help="file for the JSON lines")
    options = parser.parse_args(argv)
    unknown = [s for s in options.systems if s not in SYSTEMS] + [c for c in options.cases if c not in CASES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    chosen = [SYSTEMS[name](options) for name in options.systems]
    for system in chosen:
        system.build()
    figures = report.Report(options.out)
    status = 0
    try:
        for size in options.cost_sizes:
            for system in chosen:
                # A lighthouse's patience costs nothing while all are there.
                if system.name != "torchft-1s":
                    attempt(cost, system, options, size, figures)
        for _ in range(options.repeat):
            for case in options.cases:
                for system in chosen:
                    attempt(fault, system, case, options, figures)
    except KeyboardInterrupt:
        status = 130
    names = [system.name for system in chosen]
    sizes = {case: case for case, _, _ in figures.values if case.endswith(" a step")}
    print(figures.table({title: title for title in CASES.values()}, METRICS, names))
    print(figures.table(sizes, COSTS, names))
    print(f"JSON lines: {options.out}")
    return status
