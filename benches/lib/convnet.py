"""The example `convnet` as a live job of three workers under `muster run`, with workers that are killed while it trains."""

import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from . import procs, setup, systems

WORLD = 3
POLL_SECONDS = 0.05
STEP = re.compile(r"^step (\d+): loss \S+, (\d+) ranks", re.MULTILINE)
RIGHT = re.compile(r"^held out: .* ([0-9.]+) % right \(step (\d+)\)", re.MULTILINE)
DONE = re.compile(r"^done after (\d+) steps, state (\w+)", re.MULTILINE)


class Failed(Exception):
    """A training did not end as it should. The text says how."""


def build():
    """`muster`, the example, and the environment in which it finds libtorch. As `tests/run` builds them, in the same folders."""
    programs = setup.venv()
    where = "import os, torch; print(os.path.join(os.path.dirname(torch.__file__), 'lib'))"
    library = subprocess.run([programs / "python", "-c", where], check=True, capture_output=True, text=True).stdout.strip()
    target = setup.TARGET / "torch"
    # Not how fast they are is asked.
    subprocess.run(["cargo", "build", "--bin", "muster"], cwd=setup.ROOT, check=True)
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "VIRTUAL_ENV": str(setup.VENV), "LIBTORCH_USE_PYTORCH": "1"}
    env |= {"CARGO_TARGET_DIR": str(target), "LD_LIBRARY_PATH": library}
    command = ["cargo", "build", "-p", "muster-runtime", "--features", "torch", "--example", "convnet"]
    subprocess.run(command, cwd=setup.ROOT, env=env, check=True)
    return setup.TARGET / "debug" / "muster", target / "debug" / "examples" / "convnet", {"LD_LIBRARY_PATH": library}


class Convnet:
    def __init__(self, steps, pause_ms, bound):
        self.steps = steps
        self.pause_ms = pause_ms
        self.bound = bound
        self.muster, self.example, self.environment = build()

    def run(self, seed, flags, faults):
        """One training: the held-out accuracy in percent, and how many seconds it took."""
        directory = tempfile.mkdtemp(prefix="bench-convnet-")
        try:
            with procs.Bed() as bed:
                return Training(self, bed, directory, seed, flags, faults).run()
        finally:
            shutil.rmtree(directory, ignore_errors=True)


class Training:
    def __init__(self, convnet, bed, directory, seed, flags, faults):
        self.example, self.steps, self.faults = str(convnet.example), convnet.steps, faults
        self.bed, self.random = bed, random.Random(seed)
        self.log = Path(directory, "log")
        job = [convnet.muster, "run", "--standalone", "--nproc-per-node", WORLD, "--max-restarts", faults, "--", self.example]
        job += ["--cpu", "--steps", self.steps, "--seed", seed, "--eval-every", self.steps, "--report-every", 5, *flags]
        job += ["--pause-ms", convnet.pause_ms if faults else 0]
        self.began = time.monotonic()
        self.until = self.began + convnet.bound
        env = {**systems.clean_environment(directory), **convnet.environment}
        self.launcher = bed.spawn([str(word) for word in job], "node0", env, self.log)

    def said(self):
        return self.log.read_text(encoding="utf-8")

    def fail(self, why):
        raise Failed(f"the convolutional net: {why}; the end of its output:\n{self.said()[-2000:]}")

    def wait(self, condition, why):
        while not condition():
            if time.monotonic() > self.until:
                self.fail(f"not in time: {why}")
            time.sleep(POLL_SECONDS)

    def workers(self):
        return sorted(pid for pid in self.bed.pids("node0") if procs.command(pid).startswith(self.example))

    def trains(self, step):
        """That step is over, and in the last that was told of all ranks had samples: whoever came has caught up."""
        if self.launcher.poll() is not None:
            self.fail("it ended before all faults were over; give it a longer pause")
        told = STEP.findall(self.said())
        return bool(told) and int(told[-1][0]) >= step and int(told[-1][1]) == WORLD

    def kill(self, number):
        """Kills a worker somewhere in its own part of the training, and waits for the one that comes in its place."""
        part = self.steps // (self.faults + 1)
        step = number * part + self.random.randrange(part // 2)
        self.wait(lambda: self.trains(step), f"step {step} with {WORLD} ranks")
        self.bed.signal_pid(self.random.choice(self.workers()), signal.SIGKILL)
        joined = re.compile(r"^generation \d+: rank \d+ of \d+ joins", re.MULTILINE)
        self.wait(lambda: len(joined.findall(self.said())) >= number and self.trains(step), f"another worker after the fault at step {step}")

    def run(self):
        for number in range(1, self.faults + 1):
            self.kill(number)
        self.wait(lambda: self.launcher.poll() is not None, "the end")
        said = self.said()
        ends, right = DONE.findall(said), RIGHT.findall(said)
        if self.launcher.returncode != 0 or len(ends) != WORLD or set(ends) != {(str(self.steps), ends[0][1])}:
            self.fail(f"exit code {self.launcher.returncode}, ends {ends}")
        if not right or int(right[-1][1]) != self.steps:
            self.fail("no evaluation at the end")
        return float(right[-1][0]), time.monotonic() - self.began
