"""A newcomer's copy of the state while the others go on: how fast it comes, beside plain TCP in the same run, and the
longest time between two committed steps of those that were there before.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from . import live, procs, report, setup, systems

CASE = "copy"
METRICS = ["copy", "rate", "tcp_rate", "tcp_fresh_rate", "share_of_tcp", "share_of_tcp_fresh", "model_made", "caught_up", "usual_step", "longest_gap", "gap_beyond_two_steps", "digests"]
# The name of the thread that copies, in the newcomer: it lives from the first question to the last checked byte.
COPYING = "muster-copy"
SAMPLE_SECONDS = 0.002


class Copying(threading.Thread):
    """When a process of a node copies, as the existence of its thread says."""

    def __init__(self, bed, node, worker):
        super().__init__(daemon=True)
        self.bed, self.node, self.worker = bed, node, str(worker)
        self.since = self.until = None
        self.over = threading.Event()

    def run(self):
        pid = None
        while not self.over.is_set() and pid is None:
            found = [p for p in self.bed.pids(self.node) if procs.command(p).startswith(self.worker)]
            pid = found[0] if found else None
            time.sleep(0.01)
        while not self.over.is_set():
            copies = COPYING in names_of_threads(pid)
            now = time.time_ns()
            if copies:
                self.since, self.until = self.since or now, now
            elif self.since:
                return
            time.sleep(SAMPLE_SECONDS)


def names_of_threads(pid):
    names = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/comm", encoding="utf-8") as file:
                names.append(file.read().strip())
    except (ProcessLookupError, FileNotFoundError):
        pass
    return names


def plain(worker, size):
    """Bytes per second of one plain connection: into a small buffer, and into fresh memory."""
    out = subprocess.run([str(worker), "--tcp", str(size)], check=True, capture_output=True, text=True)
    seconds = json.loads(out.stdout)
    return size / seconds["again"], size / seconds["fresh"]


def system(options):
    """What is measured, as the figures name it."""
    trainer = {"no": "muster", "part": "trainer", "dense": "trainer-dense"}
    return f"{trainer[options.trainer]}-{options.transport}"


def attempt(options, worker, wire, figures, bed, directory):
    count = options.world
    argv = [worker, "--gradient", options.gradient, "--state", options.state, "--step-ms", options.step_ms, "--steps", options.steps]
    if options.trainer == "dense":
        argv += ["--dense", 1]
    nodes = live.Nodes(bed, directory, argv, count, count + 1, options.transport)
    notes, name = nodes.notes, system(options)
    nodes.launch(range(count))

    def trains(world, steps):
        places = [(who, events[-1]) for who in notes.events if (events := notes.of(who, "regrouped"))]
        there = [who for who, place in places if place["world"] == world and sum(c["t"] > place["t"] for c in notes.commits(who)) >= steps]
        return len(there) >= world

    if not notes.until(lambda: trains(count, 10), options.bound, nodes.anyone):
        raise systems.NotServing(f"no world of {count} trains\n{nodes.show_logs()}")
    rates = [plain(wire, options.state)]
    survivors, started = list(notes.events), time.time_ns()
    copying = Copying(bed, f"node{count}", worker)
    copying.start()
    nodes.launch([count])
    done = notes.until(lambda: sum(bool(notes.of(who, "done")) for who in notes.events) > count, options.bound, nodes.anyone)
    copying.over.set()
    copying.join()
    caught = [event for who in notes.events for event in notes.of(who, "caught_up")]
    if not done or not caught or copying.since is None:
        raise systems.NotServing(f"the newcomer did not catch up\n{nodes.show_logs()}")
    # Its own first values, written before the copy comes into the same memory.
    made = notes.of(caught[0]["who"], "made")[0]
    rates.append(plain(wire, options.state))
    took = (copying.until - copying.since) / 1e9
    tcp = sum(rate for rate, _ in rates) / len(rates)
    fresh = sum(rate for _, rate in rates) / len(rates)
    rate = options.state / took
    step = max(live.usual(notes.commits(who), started) for who in survivors)
    gap = max(length for who in survivors for length, _ in live.gaps(notes.commits(who), started - int(5e9), started))
    ends = {event["digest"] for who in notes.events for event in notes.of(who, "done")}
    for metric, value, unit in [
        ("copy", took, "s"),
        ("rate", rate / 2**30, "GiB/s"),
        ("tcp_rate", tcp / 2**30, "GiB/s"),
        ("tcp_fresh_rate", fresh / 2**30, "GiB/s"),
        ("share_of_tcp", 100 * rate / tcp, "%"),
        ("share_of_tcp_fresh", 100 * rate / fresh, "%"),
        ("model_made", made["took"], "s"),
        ("caught_up", caught[0]["took"], "s"),
        ("usual_step", step * 1e3, "ms"),
        ("longest_gap", gap * 1e3, "ms"),
        ("gap_beyond_two_steps", max(0.0, gap - 2 * step) * 1e3, "ms"),
        ("digests", len(ends), "states at the end"),
    ]:
        figures.add(name, CASE, metric, value, unit)
    print(f"{name}: {rate / 2**30:.2f} GiB/s ({100 * rate / tcp:.0f} % of TCP), gap {gap * 1e3:.0f} ms", file=sys.stderr)


def main(argv):
    parser = argparse.ArgumentParser(prog="benches/run transfer", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--state", type=int, default=1 << 30, help="bytes")
    parser.add_argument("--gradient", type=int, default=1 << 20, help="bytes that a step reduces and changes")
    parser.add_argument("--step-ms", type=int, default=200)
    parser.add_argument("--steps", type=int, default=120, help="after which all end and compare their states")
    parser.add_argument("--world", type=int, default=3, help="ranks before the newcomer")
    parser.add_argument("--trainer", choices=["no", "part", "dense"], default="no", help="by train::Trainer; with dense each step changes the whole state")
    parser.add_argument("--transport", choices=["shm", "tcp"], default="shm", help="of the collectives; tcp needs root")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--bound", type=float, default=120.0)
    parser.add_argument("--out", default=str(setup.ROOT / "target" / "bench-transfer.jsonl"), help="file for the JSON lines")
    options = parser.parse_args(argv)
    wire = live.build()
    worker = wire if options.trainer == "no" else live.build("trained_steps")
    setup.muster("muster")
    figures = report.Report(options.out)
    status = 0
    for _ in range(options.repeat):
        directory = tempfile.mkdtemp(prefix="bench-transfer-")
        try:
            with procs.Bed() as bed:
                attempt(options, worker, wire, figures, bed, directory)
        except systems.NotServing as reason:
            figures.add(system(options), CASE, "not_reached", 1, "attempts")
            print(reason, file=sys.stderr)
        except KeyboardInterrupt:
            status = 130
            break
        finally:
            shutil.rmtree(directory, ignore_errors=True)
    title = f"{options.state >> 20} MiB of state, world {options.world} to {options.world + 1}"
    print(figures.table({CASE: title}, METRICS, [system(options)]))
    print(f"JSON lines: {options.out}")
    return status
