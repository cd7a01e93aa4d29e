"""At rest: memory and CPU of what supervises one sleeping worker, and of a daemon without a job, with three peers.

The worker is `sleep`, so nothing of it is counted. Figures are of single processes: each node's own agent (and
launcher, where that is another process); the median and the worst of the nodes are shown.
"""

import argparse
import shutil
import sys
import tempfile
import time

from . import procs, report, setup, systems

NODES = 4
METRICS = ["resident", "private", "cpu"]
CASES = {"idle": "daemon, no job, 3 peers", "supervising": "a job of 4 nodes, workers asleep"}
WORKER = ["sleep", "86400"]


def measure(bed, cluster, case, seconds, figures):
    """Samples every resting process of the cluster once, over `seconds`."""
    resting = [(role, pid) for i in range(NODES) for role, pid in cluster.system.resting_processes(cluster, i)]
    before = {pid: procs.cpu_seconds(pid) for _, pid in resting}
    began = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    for role, pid in resting:
        resident, private = procs.memory_mib(pid)
        share = 100.0 * (procs.cpu_seconds(pid) - before[pid]) / took
        name = f"{cluster.system.name}: {role}"
        figures.add(name, case, "resident", resident, "MiB")
        figures.add(name, case, "private", private, "MiB")
        figures.add(name, case, "cpu", share, "% of a core")


def wait_for(condition, seconds):
    """Polls; False when `condition` did not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def run(system, options, figures):
    directory = tempfile.mkdtemp(prefix=f"bench-{system.name}-rest-")
    try:
        with procs.Bed() as bed:
            cluster = systems.Cluster(system, bed, directory, WORKER, min_nodes=NODES, max_nodes=NODES)
            for index in range(NODES):
                cluster.prepare(index)
            if cluster.agents:
                time.sleep(options.settle)
                measure(bed, cluster, "idle", options.seconds, figures)
            for index in range(NODES):
                cluster.start(index)

            def all_work():
                workers = [p for i in range(NODES) for p in bed.pids(f"node{i}") if procs.command(p).startswith("sleep ")]
                return len(workers) >= NODES

            if not wait_for(all_work, options.bound):
                figures.add(f"{system.name}: agent", "supervising", "never_within", options.bound, "s")
                print("".join(cluster.log_tail(i) for i in range(NODES)), file=sys.stderr)
                return
            time.sleep(options.settle)
            measure(bed, cluster, "supervising", options.seconds, figures)
    except systems.NotServing as reason:
        figures.add(f"{system.name}: agent", "idle", "not_reached", 1, "attempts")
        print(reason, file=sys.stderr)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main(argv):
    parser = argparse.ArgumentParser(prog="benches/run rest", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--systems", default="muster,=torchrun", help=f"of {', '.join(systems.SYSTEMS)}")
    parser.add_argument("--seconds", type=float, default=30.0, help="over which CPU is measured")
    parser.add_argument("--settle", type=float, default=5.0, help="seconds between the last start and the measurement")
    parser.add_argument("--bound", type=float, default=90.0, help="seconds within which the job must form")
    parser.add_argument("--out", default=str(setup.ROOT / "target" / "bench-rest.jsonl"), help="file for the JSON lines")
    options = parser.parse_args(argv)
    try:
        chosen = systems.choose(options.systems)
    except ValueError as error:
        parser.error(str(error))
    figures = report.Report(options.out)
    status = 0
    try:
        for system in chosen:
            run(system, options, figures)
    except KeyboardInterrupt:
        status = 130
    names = sorted({name for _, _, name in figures.values if name != "machine"})
    print(figures.table(CASES, METRICS, names))
    print(f"JSON lines: {options.out}")
    return status
