"""Follows the event file of examples/ddp.py and checks what a supervisor promises.

The file holds JSON lines, appended by every rank of every generation. Times are `time.time_ns()`, so all writers must
share one host clock. A *group* is the set of ranks that answered one roll call: it is named by rank 0's time in it.
Only the standard library is used.

    log = EventLog(path)
    first = log.wait_group(world=3, timeout=60)            # three ranks trained a step together
    ...kill a node...
    after = log.wait_group(world=2, after=now_ns, timeout=60)
    check_all(log)                                         # ranks, one rank 0, resumed steps, no overlap
"""

import json
import os
import time
from dataclasses import dataclass, field

POLL_SECONDS = 0.02
MAX_LINE = 64 * 1024


class CheckFailed(AssertionError):
    """What the events show breaks a promise. The text names the group and the ranks."""


@dataclass
class Member:
    """One process of a group."""

    rank: int
    pid: int
    node: str
    world: int
    master: str | None = None
    restart: int = 0
    start: int | None = None
    first_allreduce: int | None = None
    resumed: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    last_step_at: int | None = None
    stopped: dict | None = None


@dataclass
class Group:
    """The ranks of one roll call. `members` may hold a rank twice only if a supervisor gave it twice."""

    key: int
    world: int
    members: list[Member] = field(default_factory=list)

    def answered(self):
        """Every rank of the world has finished the first all-reduce."""
        return len(self.members) >= self.world

    def stepping(self):
        """Every rank has finished at least one step."""
        return self.answered() and all(m.first_step is not None for m in self.members)

    def nodes(self):
        return {m.node for m in self.members}

    def last_start(self):
        """Nanoseconds; the last rank's process start."""
        return max(m.start for m in self.members)

    def last_first_allreduce(self):
        return max(m.first_allreduce for m in self.members)


class EventLog:
    """Reads what was appended since the last call, keeps it, and sorts it into groups."""

    def __init__(self, path):
        self.path = path
        self.events = []
        self.saves = []
        self.starts = []
        self.groups = {}
        self._members = {}
        self._offset = 0
        self._rest = b""

    def poll(self):
        """Reads new lines. A line that is still being written stays for the next call."""
        if os.path.exists(self.path):
            with open(self.path, "rb") as file:
                file.seek(self._offset)
                data = file.read()
            self._offset += len(data)
            lines = (self._rest + data).split(b"\n")
            self._rest = lines.pop()
            if len(self._rest) > MAX_LINE:
                raise CheckFailed(f"{self.path}: a line is longer than {MAX_LINE} bytes")
            for line in lines:
                if line:
                    self._take(json.loads(line))
        return self

    def _take(self, event):
        self.events.append(event)
        kind, t = event["event"], event["t"]
        if kind == "start":
            member = Member(event["rank"], event["pid"], event["node"], event["world"])
            member.start, member.master, member.restart = t, event.get("master"), event["restart"]
            self._members[event["pid"]] = member
            self.starts.append(member)
            return
        member = self._members.get(event["pid"])
        if member is None:
            raise CheckFailed(f"pid {event['pid']} reports {kind} but never a start")
        if kind == "first_allreduce":
            member.first_allreduce = t
            group = self.groups.setdefault(event["group"], Group(event["group"], event["world"]))
            group.members.append(member)
        elif kind == "resumed":
            member.resumed = event["step"]
        elif kind == "step":
            if member.first_step is None:
                member.first_step = t
            member.last_step, member.last_step_at = event["step"], t
        elif kind == "saved":
            self.saves.append((t, event["step"], event["group"]))
        elif kind == "stop":
            member.stopped = event

    def ordered_groups(self):
        """Oldest first."""
        return [self.groups[key] for key in sorted(self.groups)]

    def find_group(self, world, after=0, nodes=None):
        """The first group with this world size whose processes all started after `after` (ns) and have trained a step."""
        for group in self.ordered_groups():
            if group.world != world or not group.stepping() or (nodes is not None and group.nodes() != set(nodes)):
                continue
            if all(m.start > after for m in group.members):
                return group
        return None

    def last_step(self, before=None):
        """The highest step that any rank finished before `before` (ns); 0 when there is none."""
        steps = (e["step"] for e in self.events if e["event"] == "step" and (before is None or e["t"] < before))
        return max(steps, default=0)

    def last_saved(self, before=None):
        """The highest step saved before `before` (ns); 0 when there is none."""
        return max((step for t, step, _ in self.saves if before is None or t < before), default=0)

    def wait(self, condition, timeout, what):
        """Polls until `condition(log)` gives something true, and returns it. Raises CheckFailed after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            found = condition(self.poll())
            if found:
                return found
            if time.monotonic() > deadline:
                raise CheckFailed(f"no {what} within {timeout:g} s; {self.summary()}")
            time.sleep(POLL_SECONDS)

    def wait_group(self, world, timeout, after=0, nodes=None):
        """Waits for a new group of this world size (and, when given, of exactly these nodes) that has trained a step."""
        where = f" on {sorted(nodes)}" if nodes else ""
        return self.wait(lambda log: log.find_group(world, after, nodes), timeout, f"world of {world}{where}")

    def wait_step(self, step, timeout):
        return self.wait(lambda log: log.last_step() >= step, timeout, f"step {step}")

    def wait_finished(self, timeout):
        """Waits until all ranks of the newest group said that they reached the last step."""

        def finished(log):
            groups = log.ordered_groups()
            done = groups and groups[-1].answered()
            return done and all(m.stopped and m.stopped["finished"] for m in groups[-1].members) and groups[-1]

        return self.wait(finished, timeout, "finished group")

    def summary(self):
        """One line for an error: what was seen so far."""
        seen = [f"world {g.world}: ranks {sorted(m.rank for m in g.members)}" for g in self.ordered_groups()]
        return f"{len(self.starts)} process starts, groups: {'; '.join(seen) or 'none'}, last step {self.last_step()}"


def check_ranks(group):
    """Ranks are exactly 0..world, one owner each; so there is one rank 0. Ranks of a node are contiguous."""
    ranks = sorted(m.rank for m in group.members)
    if ranks != list(range(group.world)):
        raise CheckFailed(f"group {group.key}: world {group.world} but ranks {ranks}")
    if any(m.world != group.world for m in group.members):
        raise CheckFailed(f"group {group.key}: world sizes {sorted({m.world for m in group.members})}")
    if len({m.pid for m in group.members}) != group.world:
        raise CheckFailed(f"group {group.key}: one process has two ranks")
    for node in group.nodes():
        mine = sorted(m.rank for m in group.members if m.node == node)
        if mine != list(range(mine[0], mine[0] + len(mine))):
            raise CheckFailed(f"group {group.key}: ranks {mine} of {node} are not contiguous")


def check_resumed(log, group):
    """All ranks resumed at one step, and at no older one than the newest save before the group's roll call."""
    steps = {m.resumed for m in group.members if m.resumed is not None}
    if len(steps) > 1:
        raise CheckFailed(f"group {group.key}: ranks resumed at different steps {sorted(steps)}")
    if not steps:
        return
    saved = log.last_saved(before=group.key)
    if steps.pop() < saved:
        resumed = {m.rank: m.resumed for m in group.members}
        raise CheckFailed(f"group {group.key}: step {saved} was saved, but ranks resumed at {resumed}")


def check_no_overlap(log):
    """No process of an older group finishes a step, or saves, once a newer group has begun to train."""
    began = [(min(m.first_step for m in g.members if m.first_step), g) for g in log.ordered_groups() if g.stepping()]
    for event in log.events:
        if event["event"] not in ("step", "saved"):
            continue
        for start, group in began:
            if group.key > event["group"] and event["t"] > start:
                raise CheckFailed(
                    f"rank {event['rank']} on {event['node']} of group {event['group']} did '{event['event']}' at step "
                    f"{event['step']}, {(event['t'] - start) / 1e6:.1f} ms after group {group.key} had begun"
                )


def check_masters_differ(log):
    """Each group has one master address, and it is a fresh one: two groups never share a port."""
    owner = {}
    for group in log.ordered_groups():
        masters = {m.master for m in group.members}
        if len(masters) != 1:
            raise CheckFailed(f"group {group.key}: several masters {sorted(masters)}")
        master = masters.pop()
        if master in owner:
            raise CheckFailed(f"groups {owner[master]} and {group.key} share the master {master}")
        owner[master] = group.key


def check_nothing_lost(log, before_key, after):
    """After a drain: the group `after` goes on at the very step where the group `before_key` stopped."""
    last = max((e["step"] for e in log.events if e["event"] == "step" and e["group"] == before_key), default=0)
    resumed = {m.resumed for m in after.members}
    if resumed != {last}:
        raise CheckFailed(f"group {before_key} finished step {last}, but its successor resumed at {sorted(resumed)}")


def check_all(log, fresh_master=True):
    """Every check that holds for a whole run. Groups that did not finish their roll call are left out."""
    log.poll()
    answered = [g for g in log.ordered_groups() if g.answered()]
    if not answered:
        raise CheckFailed(f"no group answered a roll call; {log.summary()}")
    for group in answered:
        check_ranks(group)
        check_resumed(log, group)
    check_no_overlap(log)
    if fresh_master:
        check_masters_differ(log)
