"""Recovery: the same script and the same faults for each system, three nodes on loopback with one worker each.

A node is a set of processes that the bench starts: agent, launcher and worker. Times are taken from what the script
itself notes (examples/ddp.py --events), and for `workers_started` from the kernel, on one clock.
Systems take turns within each case, so that a disturbance of the machine meets all of them.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time

from . import procs, report, setup, systems

sys.path.insert(0, str(setup.ROOT / "tests" / "torch"))
from events import EventLog  # noqa: E402

NODES = 3
POLL_SECONDS = 0.05
SETTLE_STEPS = 40
METRICS = ["workers_started", "script_stopped", "old_workers_ended", "restart_after_end", "script_running", "first_allreduce", "survivors_exited", "steps_redone", "extra_groups"]

FORM_MAX = "form_max"
FORM_SOME = "form_2_of_3"
CASES = {
    FORM_MAX: "form a world of 3",
    FORM_SOME: "form a world of 2, maximum 3",
    "join": "a node joins",
    "worker_kill": "one worker SIGKILLed",
    "node_kill": "a node SIGKILLed",
    "special_kill": "the store host's / rank 0's node SIGKILLed",
    "drain": "SIGTERM to one agent",
    "silent": "silent loss (SIGSTOP of a node)",
}
# What a case is measured in; the two formations come with the others.
SCENARIOS = [case for case in CASES if case not in (FORM_MAX, FORM_SOME)]


class Trial:
    """One job from its formation to the recovery from one fault, then gone."""

    def __init__(self, system, case, attempt, bound, figures, keep):
        self.system, self.case, self.attempt, self.bound, self.figures = system, case, attempt, bound, figures
        base = keep or tempfile.gettempdir()
        os.makedirs(base, exist_ok=True)
        self.directory = tempfile.mkdtemp(prefix=f"bench-{system.name}-{case}-", dir=base)
        self.keep = keep
        self.log = EventLog(os.path.join(self.directory, "events.jsonl"))
        self.notes = []

    def add(self, case, metric, value, unit):
        self.figures.add(self.system.name, case, metric, value, unit, attempt=self.attempt)
        if metric in ("workers_started", "first_allreduce") or metric in report.FAILURES:
            self.notes.append(f"{case} {metric} {value:.2f}")

    def run(self):
        script = ["python", str(setup.ROOT / "examples" / "ddp.py"), "--steps", "1000000", "--step-seconds", "0.02"]
        script += ["--save-every", "25", "--checkpoint-dir", os.path.join(self.directory, "checkpoints")]
        script += ["--events", self.log.path]
        try:
            with procs.Bed() as self.bed:
                self.cluster = systems.Cluster(self.system, self.bed, self.directory, script, max_nodes=NODES)
                self.measure()
        except systems.NotServing as reason:
            self.add(self.case, "not_reached", 1, "attempts")
            print(reason, file=sys.stderr)
        finally:
            if not self.keep:
                shutil.rmtree(self.directory, ignore_errors=True)
        load = os.getloadavg()[0]
        print(f"{self.system.name:<18} {self.case:<13} #{self.attempt}: {'; '.join(self.notes)}  (load {load:.1f})", file=sys.stderr)

    def measure(self):
        joining = self.case == "join"
        first = list(range(NODES - 1 if joining else NODES))
        # Daemons are there before the job; that of a node that joins comes with it.
        for index in first:
            self.cluster.prepare(index)
        formed = max([self.cluster.start(index) for index in first])
        group = self.await_group(FORM_SOME if joining else FORM_MAX, first, formed)
        if group is None or not self.settle(group):
            self.add(self.case, "not_reached", 1, "attempts")
            return
        ends = procs.Ends([m.pid for m in group.members])
        try:
            nodes, at, hurt = self.act(group)
            old = [m for m in group.members if m.pid not in hurt and node_index(m) in nodes]
            after = self.await_group(self.case, nodes, at)
        finally:
            ended = ends.close()
        if after is None:
            return
        started = max(procs.started_at(m.pid) or m.start for m in after.members)
        if ended is not None and ended >= at:
            # What the script does when it is told to stop lies before: its step and its save, up to its own last word;
            # then the exit of its interpreter.
            said = [m.stopped["t"] for m in group.members if m.stopped is not None and m.stopped["t"] >= at]
            if said and len(said) == len(group.members):
                self.add(self.case, "script_stopped", (max(said) - at) / 1e9, "s")
            self.add(self.case, "old_workers_ended", (ended - at) / 1e9, "s")
            self.add(self.case, "restart_after_end", (started - ended) / 1e9, "s")
        alive = set(self.bed.pids())
        self.add(self.case, "survivors_exited", sum(m.pid not in alive for m in old), "processes")
        reached = max(m.last_step or 0 for m in group.members)
        self.add(self.case, "steps_redone", max(0, reached - after.members[0].resumed), "steps")
        between = [g for g in self.log.ordered_groups() if group.key < g.key < after.key]
        self.add(self.case, "extra_groups", len(between), "count")

    def act(self, group):
        """Does what the case is about. Returns (nodes expected afterwards, time.time_ns() of the event, pids hit)."""
        everyone = list(range(NODES))
        if self.case == "join":
            # With a daemon, the node's agent belongs to what joins: its start is part of the time.
            at = time.time_ns()
            self.cluster.prepare(NODES - 1)
            self.cluster.start(NODES - 1)
            return everyone, at, set()
        rank0 = next(node_index(m) for m in group.members if m.rank == 0)
        special = self.system.special_node(rank0)
        if self.case == "special_kill":
            victim = special
        else:
            victim = next(i for i in reversed(everyone) if i not in (special, rank0))
        worker = next(m.pid for m in group.members if node_index(m) == victim)
        others = [i for i in everyone if i != victim]
        if self.case == "worker_kill":
            at = time.time_ns()
            self.bed.signal_pid(worker, signal.SIGKILL)
            return everyone, at, {worker}
        if self.case == "drain":
            return others, self.cluster.drain(victim), {worker}
        number = signal.SIGSTOP if self.case == "silent" else signal.SIGKILL
        return others, self.bed.signal_node(f"node{victim}", number), {worker}

    def await_group(self, case, nodes, at):
        """Waits for exactly these nodes to train together in new processes, and notes the times since `at`."""
        names = [f"node{i}" for i in nodes]
        deadline = at / 1e9 + self.bound
        while True:
            group = self.log.poll().find_group(len(nodes), at, names)
            if group is not None:
                # Who is gone again already has noted when it ran.
                started = max(procs.started_at(m.pid) or m.start for m in group.members)
                self.add(case, "workers_started", (started - at) / 1e9, "s")
                self.add(case, "script_running", (group.last_start() - at) / 1e9, "s")
                self.add(case, "first_allreduce", (group.last_first_allreduce() - at) / 1e9, "s")
                return group
            now = time.time()
            if not any(self.cluster.alive(i) for i in nodes):
                self.fail(case, "job_dead", now - at / 1e9, nodes)
                return None
            if now > deadline:
                self.fail(case, "never_within", self.bound, nodes)
                return None
            time.sleep(POLL_SECONDS)

    def fail(self, case, metric, value, nodes):
        self.add(case, metric, value, "s")
        if self.keep:
            print("".join(self.cluster.log_tail(i) for i in nodes), file=sys.stderr)

    def settle(self, group):
        """Lets the group train for a while, so that a fault does not meet a start. False if it falls apart by itself."""
        target = min(m.last_step for m in group.members) + SETTLE_STEPS
        deadline = time.monotonic() + self.bound
        while min(m.last_step for m in group.members) < target:
            if time.monotonic() > deadline or self.log.poll().ordered_groups()[-1] is not group:
                return False
            time.sleep(POLL_SECONDS)
        return True


def node_index(member):
    return int(member.node.removeprefix("node"))


def parse(argv):
    parser = argparse.ArgumentParser(prog="benches/run recovery", description=__doc__.split("\n")[0])
    parser.add_argument("--systems", default="muster,torchrun", help=f"of {', '.join(systems.SYSTEMS)}; muster and torchrun mean all their settings, =NAME that one alone")
    parser.add_argument("--cases", default=",".join(SCENARIOS), help="of the default")
    parser.add_argument("--repeat", type=int, help="attempts per case and system (default: 3; quick: 1)")
    parser.add_argument("--quick", action="store_true", help="one attempt, and give up on it after 90 s")
    parser.add_argument("--bound", type=float, help="seconds after which an attempt counts as never (default: 240; quick: 90)")
    parser.add_argument("--out", default=str(setup.ROOT / "target" / "bench-recovery.jsonl"), help="file for the JSON lines")
    parser.add_argument("--keep", help="keep logs and events in this directory, and show the logs of what failed")
    options = parser.parse_args(argv)
    options.repeat = options.repeat or (1 if options.quick else 3)
    options.bound = options.bound or (90.0 if options.quick else 240.0)
    options.cases = options.cases.split(",")
    for case in options.cases:
        if case not in SCENARIOS:
            parser.error(f"no case '{case}': choose from {', '.join(SCENARIOS)}")
    return options


def main(argv):
    options = parse(argv)
    try:
        chosen = systems.choose(options.systems)
    except ValueError as error:
        print(f"benches/run recovery: {error}", file=sys.stderr)
        return 2
    figures = report.Report(options.out)
    status = 0
    try:
        for attempt in range(1, options.repeat + 1):
            for case in options.cases:
                for system in chosen:
                    Trial(system, case, attempt, options.bound, figures, options.keep).run()
    except KeyboardInterrupt:
        print("interrupted: the table shows what was measured so far", file=sys.stderr)
        status = 130
    print(figures.table(CASES, METRICS, [s.name for s in chosen]))
    print(f"JSON lines: {options.out}")
    return status
