"""A trace of spot instances replayed on one job: nodes come and go, all at once too, and come back.

Each node is `muster run` with its agent and one worker, in a process group that the bench starts, kills and starts again;
the worker is the tests' `trainee`, a `train::Trainer` whose state follows from its step alone and is checked wherever it
comes from outside. Half of the losses are SIGKILL of all that a node has, half SIGTERM to its launcher.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time

from . import procs, report, setup, systems

CASE = "trace"
SYSTEM = "muster"
METRICS = [
    "goodput", "changes", "killed", "told", "all_gone", "steps", "steps_undone", "usual_step", "join", "after_all_gone",
    "ended_unasked", "wrong_state", "left_late", "never_trained",
]
LOOK_SECONDS = 0.05
# A node that was told to go has so long until it is killed; then its launcher is late.
LEAVE_SECONDS = 15.0
# A launcher that ended though nobody told it to is started again after so long, as a supervisor would.
AGAIN_SECONDS = 1.0
# Checkpoints, in MiB and every so many steps.
STATE_MIB, SAVE_EVERY = 1, 25


def drawn(count, changes, seed):
    """How many nodes there are from one change to the next, as spot capacity goes: all or none for the most part, sometimes some."""
    chance = random.Random(seed)
    levels = [count]
    while len(levels) < changes:
        before, since = levels[-1], levels[::-1].index(0) if 0 in levels else len(levels)
        wanted = chance.choices(["all", "none", "some"], [0.3, 0.3, 0.4])[0]
        # Two changes at least, and three or four at most, lie between two losses of everything.
        level = {"all": count, "none": 0}.get(wanted, chance.randint(1, count - 1))
        if since > 3 and before >= 2:
            level = 0
        if level != before and (level > 0 or since > 1):
            levels.append(level)
    return levels


def recorded(path, count):
    """The same out of a file of skypilot-org/spot-traces, without what lies between two changes."""
    with open(path, encoding="utf-8") as file:
        data = json.load(file)["data"]
    most = max(data)
    levels = [level * count // most for level in data]
    changes = [level for before, level in zip([0, *levels], levels) if level != before]
    return changes[1:] if changes and changes[0] == 0 else changes


class Stored(systems.Muster):
    """`muster run` with a store, and without restarts: a worker that fails ends its job, and shows."""

    def command(self, cluster, index):
        argv = [self.programs / "muster", "run", "--nnodes", cluster.span, "--nproc-per-node", "1", "--rdzv-id", cluster.job]
        argv += ["--rdzv-endpoint", cluster.endpoint, "--store", cluster.store, "--max-restarts", "0"]
        return self.script(argv, cluster), systems.agent_environment(cluster)


class Job(systems.Cluster):
    """Nodes that come and go. Which are there follows from `present`, and from when to when from `spans`."""

    def __init__(self, bed, directory, programs, options):
        system = Stored()
        system.programs = programs
        self.events, control = os.path.join(directory, "events"), os.path.join(directory, "control")
        self.store = options.store or os.path.join(directory, "store")
        for path in (control, self.store):
            os.makedirs(path, exist_ok=True)
        script = [str(programs / "trainee"), self.events, control, str(STATE_MIB), str(SAVE_EVERY)]
        super().__init__(system, bed, directory, script, min_nodes=options.least, max_nodes=options.nodes)
        self.least = options.least
        self.present, self.leaving, self.again = set(), {}, {}
        # [node, from, until]: until it was told to go, or killed, or ended.
        self.spans, self.starts, self.unasked, self.late = [], [], [], []

    @property
    def endpoint(self):
        """All of them: who comes listens where one of them would, and calls the others."""
        return ",".join(f"127.0.0.1:{port}" for port in self.ports[: self.max_nodes])

    def come(self, index, joins):
        """`joins`: others train already."""
        at = self.start(index)
        self.present.add(index)
        self.starts.append((index, at, joins))
        self.spans.append([index, at, None])

    def over(self, index):
        self.present.discard(index)
        for span in self.spans:
            if span[0] == index and span[2] is None:
                span[2] = time.time_ns()

    def kill(self, indices):
        """All that these nodes have, and as near to at once as one process can."""
        pids = [pid for index in indices for pid in self.bed.pids(f"node{index}")]
        for index in indices:
            self.over(index)
        for pid in pids:
            self.bed.signal_pid(pid, signal.SIGKILL)
        for index in indices:
            while self.bed.pids(f"node{index}"):
                self.bed.signal_node(f"node{index}", signal.SIGKILL)

    def tell(self, index):
        self.over(index)
        self.drain(index)
        self.leaving[index] = time.monotonic() + LEAVE_SECONDS

    def look(self):
        """Takes note of launchers that have ended, and starts those again that nobody had told to."""
        now = time.monotonic()
        for index, until in list(self.leaving.items()):
            if not self.alive(index):
                del self.leaving[index]
            elif now > until:
                self.late.append(index)
                self.kill([index])
                del self.leaving[index]
        for index in list(self.present):
            if not self.alive(index):
                self.unasked.append((index, self.launchers[index].returncode, self.log_tail(index, 6)))
                self.over(index)
                self.again[index] = now + AGAIN_SECONDS
        for index, at in list(self.again.items()):
            if now > at:
                del self.again[index]
                self.come(index, len(self.present) >= self.least)

    def set(self, level, chance, how):
        """To so many nodes; `how(i)` says whether the i-th that is lost is killed. Returns (killed, told)."""
        there = sorted(self.present | set(self.again))
        lost = chance.sample(there, max(0, len(there) - level))
        kills = [how(at) for at, _ in enumerate(lost)]
        for index in lost:
            self.again.pop(index, None)
        here = [(index, is_killed) for index, is_killed in zip(lost, kills) if index in self.present]
        for index, is_killed in here:
            if not is_killed:
                self.tell(index)
        self.kill([index for index, is_killed in here if is_killed])
        free = [i for i in range(self.max_nodes) if i not in there and i not in self.leaving]
        come = chance.sample(free, min(len(free), max(0, level - len(there))))
        joins = len(self.present) >= self.least
        for index in come:
            self.come(index, joins)
        return sum(kills), len(kills) - sum(kills)


def replay(job, levels, options, chance):
    """Goes through the levels. Returns (killed, told, how often all were gone, [when enough of them came back then])."""
    killed = told = gone = parity = 0
    came_back, all_gone = [], False
    for change, level in enumerate(levels):
        if level == 0:
            # In turn: all are told, twice, all are killed, half of each.
            way = gone % 4
            gone, all_gone = gone + 1, True
            how = [lambda _: False, lambda _: False, lambda _: True, lambda at: at % 2 == 0][way]
        else:
            parity += 1
            how = lambda at, parity=parity: (at + parity) % 2 == 0
        if all_gone and level >= options.least:
            came_back.append(time.time_ns())
            all_gone = False
        k, t = job.set(level, chance, how)
        killed, told = killed + k, told + t
        print(f"change {change + 1}/{len(levels)}: {level} nodes, {len(job.unasked)} ended unasked", file=sys.stderr)
        until = time.monotonic() + options.every
        while time.monotonic() < until:
            job.look()
            # Nodes that could not come yet, as they had not gone.
            missing = level - len(job.present | set(job.again))
            if missing > 0:
                job.set(level, chance, lambda _: False)
            time.sleep(LOOK_SECONDS)
    for index in list(job.present):
        job.over(index)
    return killed, told, gone, came_back


def read(path):
    events = []
    if os.path.exists(path):
        with open(path, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    events.append(json.loads(line))
    return sorted(events, key=lambda event: event["t"])


def standing(events):
    """The notes of steps that were not undone by a restore, or a beginning, at an earlier one."""
    starts = {}
    for event in events:
        if event["event"] == "start":
            starts.setdefault(event["master"], []).append(event)
    undone = [(event["t"], event["step"]) for event in events if event["event"] == "restored"]
    # A generation in which nobody has done a step begins anew.
    undone += [(min(e["t"] for e in of), 0) for of in starts.values() if all(e["step"] == 0 for e in of)]
    undone.sort()
    steps = [event for event in events if event["event"] == "step"]
    lowest, stand, at = None, [], len(undone)
    for event in reversed(steps):
        while at and undone[at - 1][0] > event["t"]:
            at -= 1
            lowest = undone[at][1] if lowest is None else min(lowest, undone[at][1])
        if lowest is None or event["step"] <= lowest:
            stand.append(event)
    return stand[::-1], len({e["step"] for e in steps if e["rank"] == 0}), len(steps) - len(stand)


def enough(spans, least):
    """Stretches of time in which at least so many nodes were there: [(from, until, nodes)]."""
    marks = sorted([(s[1], 1) for s in spans] + [(s[2], -1) for s in spans])
    found, nodes = [], 0
    for (at, by), (until, _) in zip(marks, marks[1:]):
        nodes += by
        if nodes >= least and until > at:
            found.append((at, until, nodes))
    return found


def within(spans, node, at):
    return any(s[0] == node and s[1] <= at <= s[2] for s in spans)


def judge(job, options, figures, counts):
    killed, told, gone, came_back = counts
    events = read(job.events)
    stand, steps, undone = standing(events)
    last, gaps = {}, []
    for event in stand:
        before = last.get(event["pid"])
        event["gap"] = (event["t"] - before["t"]) / 1e9 if before and before["step"] + 1 == event["step"] else None
        last[event["pid"]] = event
        if event["gap"] is not None:
            gaps.append(event["gap"])
    usual = statistics.median(gaps) if gaps else float("nan")
    node = {event["pid"]: int(event["node"].removeprefix("node")) for event in stand}
    # A step counts for as long as it took, but no longer than two usual ones: what is longer was held up.
    took = sum(min(e["gap"] if e["gap"] is not None else usual, 2 * usual) for e in stand if within(job.spans, node[e["pid"]], e["t"]))
    there = enough(job.spans, options.least)
    total = sum((until - at) / 1e9 * nodes for at, until, nodes in there)
    add = lambda metric, value, unit: figures.add(SYSTEM, CASE, metric, value, unit)
    add("goodput", 100 * took / total if total else 0.0, "%")
    for metric, value, unit in [
        ("changes", options.changes, "changes"), ("killed", killed, "nodes"), ("told", told, "nodes"), ("all_gone", gone, "times"),
        ("steps", steps, "steps"), ("steps_undone", undone / max(1, job.max_nodes), "steps of all nodes"), ("usual_step", usual * 1e3, "ms"),
        ("ended_unasked", len(job.unasked), "launchers"), ("left_late", len(job.late), "launchers"),
    ]:
        add(metric, value, unit)
    wrong = [entry for entry in job.unasked if "after step" in entry[2] and ", not " in entry[2]]
    add("wrong_state", len(wrong), "launchers")
    trained = sorted((e["t"], int(e["node"].removeprefix("node"))) for e in events if e["event"] == "step")
    never = 0
    for index, at, joins in job.starts:
        until = next(s[2] for s in job.spans if s[0] == index and s[1] == at)
        first = next((t for t, n in trained if n == index and t >= at), None)
        if first is not None and first <= until + 1e9:
            if joins:
                add("join", (first - at) / 1e9, "s")
        elif any(f <= at and u - max(at, f) > 5e9 for f, u, _ in there if u <= until):
            never += 1
    add("never_trained", never, "launchers")
    for at in came_back:
        first = next((t for t, _ in trained if t >= at), None)
        if first is not None:
            add("after_all_gone", (first - at) / 1e9, "s")
    for index, code, tail in job.unasked[:5]:
        print(f"node{index} ended with {code} though nobody told it to\n{tail}", file=sys.stderr)


def build():
    setup.muster("muster")
    return setup.build("-p", "muster-tests", "--bin", "trainee")


def parse(argv):
    parser = argparse.ArgumentParser(prog="benches/run trace", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--least", type=int, default=2, help="nodes that the job trains with at least")
    parser.add_argument("--changes", type=int, default=60)
    parser.add_argument("--every", type=float, default=20.0, help="seconds from one change to the next")
    parser.add_argument("--short", action="store_true", help="12 changes: 4 minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trace", help="a file of skypilot-org/spot-traces, instead of a trace that is drawn by chance")
    parser.add_argument("--store", help="directory of the job's store (default: a temporary one)")
    parser.add_argument("--built", help="directory of programs that were built already, such as target/debug")
    parser.add_argument("--keep", help="keep logs and events in this directory")
    parser.add_argument("--out", default=str(setup.ROOT / "target" / "bench-trace.jsonl"), help="file for the JSON lines")
    options = parser.parse_args(argv)
    if options.short:
        options.changes = 12
    return options


def main(argv):
    options = parse(argv)
    levels = recorded(options.trace, options.nodes) if options.trace else drawn(options.nodes, options.changes, options.seed)
    levels = levels[: options.changes]
    options.changes = len(levels)
    programs = setup.Path(options.built).resolve() if options.built else build()
    figures = report.Report(options.out)
    if options.keep:
        os.makedirs(options.keep, exist_ok=True)
    directory = tempfile.mkdtemp(prefix="bench-trace-", dir=options.keep)
    status = 0
    try:
        with procs.Bed() as bed:
            job = Job(bed, directory, programs, options)
            counts = replay(job, levels, options, random.Random(options.seed))
        judge(job, options, figures, counts)
    except KeyboardInterrupt:
        print("interrupted: a part of a trace has no figures", file=sys.stderr)
        status = 130
    finally:
        if not options.keep:
            shutil.rmtree(directory, ignore_errors=True)
    print(figures.table({CASE: f"{options.nodes} nodes, a change every {options.every:g} s"}, METRICS, [SYSTEM]))
    print(f"JSON lines: {options.out}")
    return status
