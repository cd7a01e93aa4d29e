"""Saving, loading and stopping with a large state: Muster beside PyTorch's own ways, on one file system, in one run.

Systems take turns. `stall` is how long training waits, `durable` from the request until nothing can be lost any more (Muster: its COMMIT stands
in the job's log), `cpu` the processor time of all processes of a system meanwhile. The slowest rank counts.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import checkpoint_memory, procs, report, setup, systems

PEERS = ["torch.save", "dcp.save-1", "dcp.save-2", "async-thread", "async-process", "async-shared", "async-kept"]
CASES = ["save", "load", "sigterm", *checkpoint_memory.CASES]
QUICK = {"bytes": 1 << 28, "parity_bytes": 1 << 26, "saves": 2, "repeat": 1}
SAVE_METRICS = ["slots", "stall_first", "stall", "stall_by_copy_first", "stall_by_copy", "durable_first", "durable", "rate", "share_of_probe", "cpu"]
LOAD_METRICS = ["load", "load_rate"]
# Seconds that the disk is left alone before each load: some give more for a while after a rest, and a peer's start, which takes
# seconds, would be one.
REST = 8
STOP_METRICS = ["stop_step", "committed", "beyond_a_step", "lost", "restored"]
POLL_SECONDS = 0.005


class NotReached(Exception):
    """A system did not do what it was asked for; the text says what."""


class Ranks:
    """The events of a system's ranks, and the fifos through which they are told what to do."""

    def __init__(self, directory, world):
        self.log, self.go, self.world = os.path.join(directory, "log"), os.path.join(directory, "go"), world
        for rank in range(world):
            os.mkfifo(f"{self.go}.{rank}")
        self.pipes = []

    def events(self, kind, step=None):
        found = []
        for rank in range(self.world):
            try:
                with open(f"{self.log}.{rank}", encoding="utf-8") as file:
                    lines = [json.loads(line) for line in file if line.endswith("\n")]
            except FileNotFoundError:
                continue
            found += [line for line in lines if line["event"] == kind and step in (None, line["step"])]
        return found

    def until(self, kind, step, bed, bound):
        """Of every rank the event of this step."""
        until(lambda: len(self.events(kind, step)) >= self.world, bound, f"`{kind}` of step {step}", bed)
        return self.events(kind, step)

    def tell(self, line):
        if not self.pipes:
            # A fifo opens when somebody reads it.
            self.pipes = [open(f"{self.go}.{rank}", "w", encoding="utf-8") for rank in range(self.world)]
        for pipe in self.pipes:
            print(line, file=pipe, flush=True)

    def end(self):
        for pipe in self.pipes:
            pipe.close()


def until(condition, bound, what, bed):
    deadline = time.monotonic() + bound
    while not condition():
        bed.reap()
        if time.monotonic() > deadline or all(process.returncode is not None for process in bed.launched):
            raise NotReached(f"not seen within {bound:g} s: {what}")
        time.sleep(POLL_SECONDS)


def cpu_seconds(bed):
    """Of all processes of a bed, threads that have ended included."""
    total = 0
    for pid in bed.pids():
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                total += sum(int(ticks) for ticks in file.read().rpartition(")")[2].split()[11:15])
        except (ProcessLookupError, FileNotFoundError):
            pass
    return total / os.sysconf("SC_CLK_TCK")


def commits(store):
    """(step, manifest, when it came to be there in nanoseconds) of each COMMIT in the log of the store's only job."""
    found = []
    for path in Path(store).glob("*/log/*.json"):
        try:
            entry, at = json.loads(path.read_text(encoding="utf-8")), path.stat().st_ctime_ns
        except (FileNotFoundError, json.JSONDecodeError):
            continue
        if commit := entry["body"].get("commit"):
            found.append((commit["step"], commit["manifest"], at))
    return sorted(found)


class Muster:
    """`muster run` with its agent, and one launcher for all ranks of a node."""

    name = "muster"

    def __init__(self, options, programs, worker):
        self.options, self.programs, self.worker = options, programs, worker

    def argv(self, store, mode, *more, nnodes="1", ranks=1):
        argv = [self.programs / "muster", "run", "--nnodes", nnodes, "--nproc-per-node", ranks, "--rdzv-id", "bench", "--max-restarts", "3"]
        argv += ["--store", store, "--checkpoint-memory", "16G", *more, "--no-python", "--", self.worker, mode]
        return [str(part) for part in argv]

    def start(self, bed, directory, ranks, target):
        store = os.path.join(target, "store")
        os.makedirs(store, exist_ok=True)
        argv = self.argv(store, "save", ranks=ranks.world)
        argv += ["--log", ranks.log, "--go", ranks.go, "--bytes", str(self.options.bytes)]
        bed.spawn(argv, "node0", systems.clean_environment(directory), os.path.join(directory, "out"), directory)

    def durable(self, bed, ranks, step, target, bound):
        """When the last of it was, in nanoseconds."""
        store = os.path.join(target, "store")
        until(lambda: any(found[0] == step for found in commits(store)), bound, f"the COMMIT of step {step}", bed)
        return next(at for found, _, at in commits(store) if found == step)

    def forget(self, target, step):
        """The data of the saves before this one: disks are not endless. What is committed last stays whole."""
        for path in Path(target, "store").glob("*/data/*"):
            if int(path.name.split("-")[0]) < step:
                shutil.rmtree(path)


class Torch:
    def __init__(self, name, options):
        self.name, self.options = name, options

    def start(self, bed, directory, ranks, target):
        (port,) = setup.free_ports(1)
        for rank in range(ranks.world):
            argv = [setup.venv() / "python", Path(__file__).with_name("checkpoint_torch.py"), self.name]
            argv += ["--rank", rank, "--world", ranks.world, "--port", port, "--directory", target, "--bytes", self.options.bytes]
            argv += ["--go", ranks.go, "--log", ranks.log]
            # Two ranks on two cores: one thread each, as the runtime has.
            env = {**systems.clean_environment(directory), "OMP_NUM_THREADS": "1"}
            bed.spawn([str(part) for part in argv], f"node{rank}", env, os.path.join(directory, "out"), directory)

    def durable(self, bed, ranks, step, target, bound):
        return max(event["t"] for event in ranks.until("durable", step, bed, bound))

    def forget(self, target, step):
        for path in Path(target).glob("save*"):
            if int(path.name.removeprefix("save")) < step:
                shutil.rmtree(path)


def probe(options, worker, target):
    """Bytes per second that the disk takes and gives, 16 requests at a time."""
    argv = [worker, "probe", "--file", os.path.join(target, "probe"), "--bytes", options.bytes]
    out = json.loads(subprocess.run([str(part) for part in argv], check=True, capture_output=True, text=True).stdout)
    return out["bytes"] / out["seconds"], out["bytes"] / out["read_seconds"]


def save(options, system, world, figures, directory, target, worker):
    """All saves of one system; the first is a case of its own, for it finds no memory that was touched."""
    case, speeds = f"save, world {world}", [probe(options, worker, target)[0]]
    with procs.Bed() as bed:
        ranks = Ranks(directory, world)
        system.start(bed, directory, ranks, target)
        made = ranks.until("ready", 0, bed, options.bound)
        for event in made:
            if "made" in event:
                figures.add(system.name, case, "slots", event["made"], "s")
        for step in range(1, options.saves + 1):
            system.forget(target, step - 1)
            ranks.tell("change")
            ranks.until("changed", step, bed, options.bound)
            os.sync()
            before = cpu_seconds(bed)
            ranks.tell(f"save save{step}")
            saved = ranks.until("saved", step, bed, options.bound)
            durable = system.durable(bed, ranks, step, target, options.bound)
            used = cpu_seconds(bed) - before
            began = min(event["t"] for event in ranks.events("request", step))
            stall, took = max(event["stall"] for event in saved), (durable - began) / 1e9
            size = sum(event["bytes"] for event in saved)
            first = "_first" if step == 1 else ""
            figures.add(system.name, case, f"stall{first}", stall, "s")
            if "plain" in saved[0]:
                by_copy = max(event["stall"] / event["plain"] for event in saved)
                figures.add(system.name, case, f"stall_by_copy{first}", by_copy, "of a warm copy")
            figures.add(system.name, case, f"durable{first}", took, "s")
            figures.add(system.name, case, "cpu", used, "CPU s")
            if step > 1:
                figures.add(system.name, case, "rate", size / took / 2**30, "GiB/s")
            speeds.append((size, took))
        ranks.end()
    figures_of_probe(options, system, case, figures, speeds, worker, target)


def figures_of_probe(options, system, case, figures, speeds, worker, target):
    """The disk's own speed is that before and after."""
    first, *saves = speeds
    disk = (first + probe(options, worker, target)[0]) / 2
    figures.add("disk", case, "rate", disk / 2**30, "GiB/s")
    for size, took in saves[1:]:
        figures.add(system.name, case, "share_of_probe", 100 * size / took / disk, "%")


def uncached():
    """Nothing of a file is in memory any more (root only)."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="ascii")
    except PermissionError:
        print("not root: what is loaded may be in memory already", file=sys.stderr)


def load(options, muster, figures, directory, target):
    """What two ranks have saved is loaded by two, and by three."""
    case = "load, {} to {}"
    with procs.Bed() as bed:
        writers = Ranks(make(directory, "m"), 2)
        muster.start(bed, directory, writers, target)
        writers.until("ready", 0, bed, options.bound)
        writers.tell("change")
        writers.tell("save")
        muster.durable(bed, writers, 1, target, options.bound)
        writers.end()
    ((_, manifest, _),) = commits(os.path.join(target, "store"))
    (job,) = Path(target, "store").glob("*/data")
    with procs.Bed() as bed:
        writers = Ranks(make(directory, "t"), 2)
        Torch("sharded", options).start(bed, directory, writers, target)
        writers.until("ready", 0, bed, options.bound)
        writers.tell("change")
        writers.tell("save sharded")
        writers.until("durable", 1, bed, options.bound)
        writers.end()
    for turn in range(options.saves):
        for world in (2, 3):
            time.sleep(REST)
            figures.add("disk", case.format(2, world), "load_rate", probe(options, muster.worker, target)[1] / 2**30, "GiB/s")
            # By turns each is first: what one reads may leave something in a cache below the file system.
            for name in ("muster", "dcp.load")[:: -1 if turn % 2 else 1]:
                with procs.Bed() as bed:
                    ranks = Ranks(make(directory, f"{name}-{world}-{turn}"), world)
                    # Whole rows of what two ranks of that size have saved, whatever the world.
                    each = options.bytes * 2 // world
                    if name == "muster":
                        for rank in range(world):
                            argv = [muster.worker, "load", "--log", ranks.log, "--go", ranks.go, "--bytes", each, "--dir", job.parent]
                            argv += ["--rank", rank, "--world", world]
                            bed.spawn([str(a) for a in argv], "node0", systems.clean_environment(directory), os.path.join(directory, "out"))
                    else:
                        Torch("load", with_bytes(options, each)).start(bed, directory, ranks, target)
                    ranks.until("ready", 0, bed, options.bound)
                    uncached()
                    time.sleep(REST)
                    if name != "muster":
                        ranks.tell("change")
                        ranks.until("changed", 1, bed, options.bound)
                    ranks.tell(manifest if name == "muster" else "load sharded")
                    took = max(event["took"] for event in ranks.until("loaded", 1, bed, options.bound))
                    ranks.end()
                figures.add(name, case.format(2, world), "load", took, "s")
                figures.add(name, case.format(2, world), "load_rate", 2 * options.bytes / took / 2**30, "GiB/s")


def with_bytes(options, size):
    return argparse.Namespace(**{**vars(options), "bytes": size})


def make(directory, name):
    path = os.path.join(directory, name)
    os.makedirs(path)
    return path


def stop(options, muster, figures, directory, target):
    """SIGTERM to one of two nodes: from the signal until what all have saved is committed, and what the other one goes on from."""
    case = "sigterm, world 2"
    store = make(target, "store")
    with procs.Bed() as bed:
        ranks = Ranks(make(directory, "r"), 2)
        (port,) = setup.free_ports(1)
        for node in range(2):
            argv = muster.argv(store, "train", "--rdzv-endpoint", f"127.0.0.1:{port}", nnodes="1:2")
            argv += ["--log", ranks.log, "--bytes", str(2 * options.bytes), "--step-ms", str(options.step_ms)]
            home = make(directory, f"n{node}")
            bed.spawn(argv, f"node{node}", systems.clean_environment(home), os.path.join(home, "out"), home)
            if node == 0:
                time.sleep(0.3)
        until(lambda: len([e for e in ranks.events("step") if e["step"] >= 20]) >= 2, options.bound, "two ranks that train", bed)
        began = time.time_ns()
        bed.signal_pid(bed.launched[1].pid, signal.SIGTERM)
        until(lambda: commits(store), options.bound, "a COMMIT", bed)
        (step, _, at), *_ = commits(store)
        until(lambda: ranks.events("restored"), options.bound, "who goes on", bed)
        saved = {event["step"] for event in ranks.events("saved")}
        restored = ranks.events("restored")[0]
        figures.add(muster.name, case, "stop_step", step, "step")
        figures.add(muster.name, case, "committed", (at - began) / 1e9, "s")
        figures.add(muster.name, case, "beyond_a_step", (at - began) / 1e9 - options.step_ms / 1e3, "s")
        figures.add(muster.name, case, "lost", max(saved) - restored["step"], "steps")
        figures.add(muster.name, case, "restored", (restored["t"] - began) / 1e9, "s")


def main(argv):
    parser = argparse.ArgumentParser(prog="benches/run checkpoint", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--bytes", type=int, default=1 << 30, help="of state, each rank")
    parser.add_argument("--parity-bytes", type=int, default=1 << 28, help="of state, each rank, in `parity`: three nodes have slots, and hold of others, on this one")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--systems", default=",".join(["muster", *PEERS]))
    parser.add_argument("--worlds", default="1,2")
    parser.add_argument("--saves", type=int, default=4, help="by each system in a turn, and loads")
    parser.add_argument("--repeat", type=int, default=2, help="turns")
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(f'{name} {value}' for name, value in QUICK.items())}")
    parser.add_argument("--step-ms", type=int, default=100)
    parser.add_argument("--directory", default=str(setup.TARGET), help="where to save: a place on the file system that is meant")
    parser.add_argument("--bound", type=float, default=120.0)
    parser.add_argument("--out", default=str(setup.ROOT / "target" / "bench-checkpoint.jsonl"), help="file for the JSON lines")
    options = parser.parse_args(argv)
    vars(options).update(QUICK if options.quick else {})
    cases, worlds = options.cases.split(","), [int(world) for world in options.worlds.split(",")]
    jobs = [case for case in cases if case not in checkpoint_memory.CASES]
    worker = setup.example("muster-runtime", "save_steps") if jobs else None
    muster = Muster(options, setup.muster("muster") if jobs else None, worker)
    known = {"muster": muster, **{name: Torch(name, options) for name in PEERS}}
    chosen = [known[name] for name in options.systems.split(",")]
    figures, status = report.Report(options.out), 0
    attempts = []
    for _ in range(options.repeat):
        if "save" in jobs:
            attempts += [(system, world) for world in worlds for system in chosen]
        attempts += [(case, 2) for case in jobs if case != "save"]
    for what, world in attempts:
        directory = tempfile.mkdtemp(prefix="bench-")
        target = tempfile.mkdtemp(prefix="bench-checkpoint-", dir=options.directory)
        try:
            if what == "load":
                load(options, muster, figures, directory, target)
            elif what == "sigterm":
                stop(options, muster, figures, directory, target)
            else:
                save(options, what, world, figures, directory, target, worker)
        except NotReached as reason:
            name = what if isinstance(what, str) else what.name
            tail = []
            for out in sorted(Path(directory).rglob("out")):
                tail += [f"{out.relative_to(directory)}:", *out.read_text(errors="replace").splitlines()[-15:]]
            figures.add("muster" if isinstance(what, str) else name, f"{name}, world {world}", "not_reached", 1, "attempts")
            print(f"{name}: {reason}", *tail, sep="\n", file=sys.stderr)
        except KeyboardInterrupt:
            status = 130
            break
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            shutil.rmtree(target, ignore_errors=True)
    for case in cases:
        if case in checkpoint_memory.CASES and status == 0:
            size = options.bytes if case == "memory" else options.parity_bytes
            checkpoint_memory.measure(checkpoint_memory.build(), figures, case, size, options.saves, options.repeat)
    titles = {case: case for case, _, _ in figures.values if case != "-"}
    print(figures.table(titles, SAVE_METRICS + LOAD_METRICS + STOP_METRICS + checkpoint_memory.METRICS, ["muster", "disk", *PEERS, "dcp.load"]))
    print(f"JSON lines: {options.out}")
    return status
