"""Live workers as the benches `regroup` and `transfer` see them: what each process has noted, and jobs of nodes that run them."""

import json
import os
import statistics
import time

from . import setup, systems

POLL_SECONDS = 0.02


def build(worker="live_steps"):
    """A worker of the benches."""
    return setup.example("muster-runtime", worker)


class Notes:
    """The lines that processes write into files of one directory, each process its own file, read as they come."""

    def __init__(self, directory):
        self.directory = directory
        self.read = {}
        self.events = {}

    def poll(self):
        """Takes in what is new. Events by process, in the order of writing."""
        for name in os.listdir(self.directory):
            if not name.endswith(".jsonl"):
                continue
            with open(os.path.join(self.directory, name), "rb") as file:
                file.seek(self.read.get(name, 0))
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self.read[name] = self.read.get(name, 0) + len(whole)
            for line in whole.splitlines():
                event = json.loads(line)
                self.events.setdefault(event["who"], []).append(event)
        return self.events

    def commits(self, who):
        return [event for event in self.events.get(who, []) if event["event"] == "commit"]

    def of(self, who, kind):
        return [event for event in self.events.get(who, []) if event["event"] == kind]

    def until(self, condition, seconds, alive=lambda: True):
        """Polls; False when `condition` did not come true in time, or nobody is left."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or not alive():
                return False
            time.sleep(POLL_SECONDS)
            self.poll()
        return True


def gaps(commits, since, until):
    """(seconds, whether it lies across `until`) between consecutive commits from `since` (nanoseconds) on."""
    times = [event["t"] for event in commits if event["t"] >= since]
    return [((after - before) / 1e9, before <= until) for before, after in zip(times, times[1:])]


def usual(commits, before):
    """The median seconds between commits, until a time in nanoseconds."""
    found = [gap for gap, _ in gaps([e for e in commits if e["t"] < before], 0, 0)]
    return statistics.median(found) if found else float("nan")


def undone(commits):
    """Steps that a process committed twice."""
    steps = [event["step"] for event in commits]
    return len(steps) - len(set(steps))


def separated(argv, transport):
    """A worker that shares memory with no other, in a process namespace of its own (root only), for `tcp`."""
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [*apart, *argv] if transport == "tcp" else argv


def node_of(who):
    return who.split(".")[0]


class Nodes(systems.Cluster):
    """A job of `count` nodes under `muster run`, one live worker each."""

    def __init__(self, bed, directory, worker, least, count, transport="shm"):
        system = systems.Muster()
        system.programs = setup.TARGET / "dist"
        self.notes_directory = os.path.join(directory, "notes")
        os.makedirs(self.notes_directory, exist_ok=True)
        script = [str(part) for part in separated([*worker, "--log", self.notes_directory], transport)]
        super().__init__(system, bed, directory, script, min_nodes=least, max_nodes=count)
        self.notes = Notes(self.notes_directory)

    def launch(self, indices):
        for index in indices:
            self.prepare(index)
            self.start(index)

    def anyone(self):
        return any(launcher.poll() is None for launcher in self.launchers.values())

    def show_logs(self):
        return "".join(self.log_tail(index) for index in self.launchers)
