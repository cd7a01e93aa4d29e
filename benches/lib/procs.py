"""Nodes as sets of processes. Every process that descends from a node carries its marks in the environment it was
started with; by these marks, and by nothing else, processes are found, signalled and cleaned up."""

import os
import select
import signal
import subprocess
import threading
import time
import uuid

CLEANUP_SECONDS = 10.0


class Bed:
    """The processes of one bench run. Use as a context manager: at its end none of them is left."""

    def __init__(self):
        self.mark = uuid.uuid4().hex
        self.launched = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill_all()

    def spawn(self, argv, node, env, log, cwd=None):
        """Starts one process of `node` in a session of its own, with its output in the file `log`."""
        marked = {**env, "BENCH_RUN": self.mark, "BENCH_NODE": node, "NODE_NAME": node}
        with open(log, "ab") as out:
            process = subprocess.Popen(
                argv, env=marked, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd=cwd
            )
        self.launched.append(process)
        return process

    def pids(self, node=None):
        """Live processes of one node, or of all. Zombies have no environment and do not count."""
        self.reap()
        wanted = f"BENCH_RUN={self.mark}".encode()
        wanted_node = f"BENCH_NODE={node}".encode()
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                variables = environment(int(entry))
                if wanted in variables and (node is None or wanted_node in variables):
                    found.append(int(entry))
        return found

    def matching(self, node, text):
        """Live processes of a node with `text` in their command line."""
        return [pid for pid in self.pids(node) if text in command(pid)]

    def reap(self):
        for process in self.launched:
            process.poll()

    def signal_pid(self, pid, number):
        """Signals `pid` if it still is a process of this run. True if it was."""
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return False
        try:
            if f"BENCH_RUN={self.mark}".encode() not in environment(pid):
                return False
            signal.pidfd_send_signal(handle, number)
            return True
        except ProcessLookupError:
            return False
        finally:
            os.close(handle)

    def signal_node(self, node, number):
        """Signals all processes of a node, as near to at once as one process can. Returns time.time_ns() before the first."""
        pids = self.pids(node)
        before = time.time_ns()
        for pid in pids:
            self.signal_pid(pid, number)
        return before

    def kill_all(self):
        """SIGKILLs whatever is left, again and again until nothing is: a process may fork meanwhile."""
        deadline = time.monotonic() + CLEANUP_SECONDS
        while True:
            left = self.pids()
            if not left:
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {left} outlive SIGKILL for {CLEANUP_SECONDS:g} s")
            for pid in left:
                self.signal_pid(pid, signal.SIGKILL)
            time.sleep(0.02)
        for process in self.launched:
            process.wait()
        self.launched.clear()


class Ends:
    """When each of some processes ended, in time.time_ns(): a pidfd becomes readable then, so nothing is polled for."""

    def __init__(self, pids):
        self.at = {}
        self.handles = {}
        for pid in pids:
            try:
                self.handles[os.pidfd_open(pid)] = pid
            except ProcessLookupError:
                self.at[pid] = time.time_ns()
        self.stop, self.wake = os.pipe()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        waiting = {self.stop, *self.handles}
        while len(waiting) > 1:
            ready, _, _ = select.select(waiting, [], [])
            now = time.time_ns()
            if self.stop in ready:
                return
            for handle in ready:
                self.at[self.handles[handle]] = now
                waiting.discard(handle)

    def close(self):
        """Ends the watch. Returns the last end of all, or None when some process still runs."""
        os.write(self.wake, b"x")
        self.thread.join()
        for handle in (self.stop, self.wake, *self.handles):
            os.close(handle)
        return max(self.at.values(), default=None) if set(self.handles.values()) <= set(self.at) else None


def environment(pid):
    """The variables a process was started with; empty when it is gone, a zombie, or another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return set(file.read().split(b"\0"))
    except (ProcessLookupError, FileNotFoundError, PermissionError):
        return set()


def command(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except (ProcessLookupError, FileNotFoundError):
        return ""


def cpu_seconds(pid):
    """Time on a core so far, of all live threads; from the scheduler, so finer than a clock tick."""
    total = 0
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/schedstat", encoding="ascii") as file:
                total += int(file.read().split()[0])
    except (ProcessLookupError, FileNotFoundError):
        pass
    return total / 1e9


def memory_mib(pid):
    """(resident, resident and shared with nobody), both in MiB."""
    values = {}
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            parts = line.split()
            if len(parts) >= 3 and parts[2] == "kB":
                values[parts[0].rstrip(":")] = int(parts[1])
    return values["Rss"] / 1024, (values["Private_Clean"] + values["Private_Dirty"]) / 1024


def started_at(pid):
    """When the process was forked, in time.time_ns() terms, rounded up to the kernel's clock tick (10 ms); None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
    except (ProcessLookupError, FileNotFoundError):
        return None
    boot = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return boot + (ticks + 1) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
