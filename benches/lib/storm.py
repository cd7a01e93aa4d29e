"""Nodes that are lost again and again while live workers train: how much of the time is spent in steps, what is undone, and the longest
time without a step. A node is `muster run` with its agent and one worker; every few seconds a random one is SIGKILLed, and started again after a second.
"""

import argparse
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time

from . import live, procs, report, setup, systems

CASE = "storm"
SYSTEM = "muster"
METRICS = ["in_steps", "longest_gap", "gap", "usual_step", "steps", "steps_undone", "steps_again", "kills", "join", "never_joined", "ended_unasked"]
SETTLED = 50


class Nodes(live.Nodes):
    """Any of them may be started first."""

    @property
    def endpoint(self):
        return ",".join(f"127.0.0.1:{port}" for port in self.ports[: self.max_nodes])


class Storm:
    def __init__(self, nodes, options):
        self.nodes, self.options = nodes, options
        self.chance = random.Random(options.seed)
        self.kills, self.starts, self.unasked = [], [], []

    def trains(self):
        notes, count = self.nodes.notes, self.options.nodes
        places = {who: notes.of(who, "regrouped") for who in notes.events}
        full = [who for who, of in places.items() if of and of[-1]["world"] == count]
        return sum(sum(c["t"] > places[who][-1]["t"] for c in notes.commits(who)) >= SETTLED for who in full) >= count

    def run(self):
        """Returns (from, until) in nanoseconds; what happens in between counts."""
        options, bed = self.options, self.nodes.bed
        self.nodes.launch(range(options.nodes))
        if not self.nodes.notes.until(self.trains, options.bound, self.nodes.anyone):
            raise systems.NotServing(f"no world of {options.nodes} trains\n{self.nodes.show_logs()}")
        begin, dead = time.time_ns(), {}
        start = time.monotonic()
        next_kill = start + options.every
        while time.monotonic() < start + options.seconds:
            now = time.monotonic()
            for index, at in list(dead.items()):
                if now >= at:
                    del dead[index]
                    self.starts.append((index, self.nodes.start(index)))
            for index in range(options.nodes):
                if index not in dead and not self.nodes.alive(index):
                    self.unasked.append((index, self.nodes.log_tail(index)))
                    dead[index] = now + options.away
            if now >= next_kill:
                next_kill += options.every
                victim = self.chance.choice([i for i in range(options.nodes) if i not in dead])
                self.kills.append((victim, bed.signal_node(f"node{victim}", signal.SIGKILL)))
                dead[victim] = now + options.away
            time.sleep(0.01)
        until = time.time_ns()
        self.nodes.notes.poll()
        return begin, until


def judge(storm, begin, until, figures):
    notes, options = storm.nodes.notes, storm.options
    # When the job, whoever is in it, had committed a step for the first time.
    first = {}
    for who in notes.events:
        for commit in notes.commits(who):
            step = commit["step"]
            first[step] = min(first.get(step, commit["t"]), commit["t"])
    times = [at for at in sorted(first.values()) if begin <= at <= until]
    # A job that stands still at the end has lost that time, too.
    ends = [begin, *times, until]
    gaps = [(after - before) / 1e9 for before, after in zip(ends, ends[1:])]
    usual = statistics.median(gaps[1:-1] or [0])
    held_up = sum(gap - usual for gap in gaps if gap > 2 * usual)
    # Who goes on from before what another one had committed undoes that; so does one that commits a step twice.
    undone = sum(live.undone(notes.commits(who)) for who in notes.events)
    commits = sorted((c["t"], c["step"]) for who in notes.events for c in notes.commits(who))
    regroups = sorted((r["t"], r["step"]) for who in notes.events for r in notes.of(who, "regrouped") if r["survived"])
    newest, at = 0, 0
    for t, step in regroups:
        while at < len(commits) and commits[at][0] < t:
            newest, at = max(newest, commits[at][1]), at + 1
        # A rank that was a step behind has it from another one, before it commits the next.
        undone += max(0, newest - step - 1)
    add = lambda metric, value, unit: figures.add(SYSTEM, CASE, metric, value, unit)
    add("in_steps", 100 * (1 - held_up / ((until - begin) / 1e9)), "%")
    add("longest_gap", max(gaps) * 1e3, "ms")
    for gap in [g for g in gaps if g > 2 * usual]:
        add("gap", gap * 1e3, "ms")
    again = {e["step"] for who in notes.events for e in notes.of(who, "again") if begin <= e["t"] <= until}
    for metric, value, unit in [
        ("usual_step", usual * 1e3, "ms"), ("steps", len(times), "steps"), ("steps_undone", undone, "steps"), ("steps_again", len(again), "steps"),
        ("kills", len(storm.kills), "nodes"), ("ended_unasked", len(storm.unasked), "launchers"),
    ]:
        add(metric, value, unit)
    never = 0
    for index, at in storm.starts:
        end = min([t for i, t in storm.kills if i == index and t > at], default=until)
        of = (c["t"] for who in notes.events if live.node_of(who) == f"node{index}" for c in notes.commits(who))
        joined = min((t for t in of if at < t <= end), default=None)
        if joined is not None:
            add("join", (joined - at) / 1e9, "s")
        elif end - at > 10e9:
            never += 1
    add("never_joined", never, "launchers")
    for index, tail in storm.unasked[:3]:
        print(f"node{index} ended though nobody told it to\n{tail}", file=sys.stderr)


def main(argv):
    parser = argparse.ArgumentParser(prog="benches/run storm", description=" ".join(__doc__.split("\n\n", maxsplit=1)[0].split()))
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--every", type=float, default=5.0, help="seconds from one loss to the next")
    parser.add_argument("--away", type=float, default=1.0, help="seconds until the lost node is started again")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--short", action="store_true", help="60 s")
    parser.add_argument("--step-ms", type=int, default=20)
    parser.add_argument("--gradient", type=int, default=1 << 20, help="bytes that a step reduces")
    parser.add_argument("--transport", choices=["shm", "tcp"], default="shm", help="of the collectives; tcp needs root")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bound", type=float, default=60.0, help="seconds in which all must train at first")
    parser.add_argument("--built", help="directory of programs that were built already, such as target/debug")
    parser.add_argument("--out", default=str(setup.ROOT / "target" / "bench-storm.jsonl"), help="file for the JSON lines")
    options = parser.parse_args(argv)
    if options.short:
        options.seconds = 60.0
    if options.built:
        programs = setup.Path(options.built).resolve()
        worker = programs / "examples" / "live_steps"
    else:
        programs, worker = setup.muster("muster"), live.build()
    figures = report.Report(options.out)
    directory = tempfile.mkdtemp(prefix="bench-storm-")
    status = 0
    try:
        with procs.Bed() as bed:
            least = max(1, options.nodes // 2)
            argv = [worker, "--gradient", options.gradient, "--step-ms", options.step_ms]
            nodes = Nodes(bed, directory, argv, least, options.nodes, options.transport)
            nodes.system.programs = programs
            storm = Storm(nodes, options)
            begin, until = storm.run()
        judge(storm, begin, until, figures)
    except systems.NotServing as reason:
        figures.add(SYSTEM, CASE, "not_reached", 1, "attempts")
        print(reason, file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    title = f"{options.nodes} nodes, one lost every {options.every:g} s"
    print(figures.table({CASE: title}, METRICS, [SYSTEM]))
    print(f"JSON lines: {options.out}")
    return status
