"""One GPU: a job that is killed, told to leave, or hangs in a kernel goes on bit for bit, and what a save holds up.

Each case is a life, or two, of `gpu_train.py`; `reference` is undisturbed, and its losses are what all others are compared
with, bit for bit. `saves` has more state, and saves beside it as PyTorch does. Without a GPU the same runs on the CPU,
which shows that the bench works and nothing else.
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

from . import report, setup

TRAIN = Path(__file__).with_name("gpu_train.py")
CASES = {
    "reference": "undisturbed",
    "kill": "the worker gets SIGKILL",
    "leave": "the launcher gets SIGTERM, and is started again",
    "hang": "a kernel that never ends (--on-hang restart, --hang-min 10s)",
    "two": "two ranks of one GPU (gloo), one gets SIGKILL",
    "saves": "more state: what a save holds up",
}
METRICS = ["outage", "started", "redone", "differ", "first_boundary", "held_up", "held_up_first"]
METRICS += ["torch.save", "dcp.async_save"]


def rows(path):
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class Job:
    def __init__(self, options, case, ranks, *more):
        self.out = os.path.join(options.directory, case)
        store = self.out + ".store"
        os.makedirs(store, exist_ok=True)
        script = [str(TRAIN), "--out", self.out, "--steps", str(options.steps), *more]
        flags = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "2", "--hang-min", "10s", "--on-hang", "restart"]
        self.argv = [str(options.programs / "muster"), "run", *flags, "--rdzv-id", case, "--store", store, *script]
        paths = {"PYTHONPATH": str(setup.ROOT / "python"), "MUSTER_LIBRARY": str(options.programs / "libmuster.so")}
        path = f"{Path(options.python).parent}:{os.environ['PATH']}"
        self.env = {**os.environ, **paths, "PATH": path}

    def start(self):
        return subprocess.Popen(self.argv, env=self.env)

    def run(self, wanted=0):
        child = self.start()
        try:
            code = child.wait(timeout=600)
        except BaseException:
            child.terminate()
            child.wait()
            raise
        if code != wanted:
            raise RuntimeError(f"{self.argv[1:]} ended with {code}")

    def leaves(self, at):
        """Told to leave once it has done so many steps."""
        child = self.start()
        deadline = time.monotonic() + 300
        while child.poll() is None and time.monotonic() < deadline:
            if os.path.exists(self.out + ".0") and sum("step" in r for r in rows(self.out + ".0")) >= at:
                break
            time.sleep(0.1)
        child.send_signal(signal.SIGTERM)
        try:
            code = child.wait(timeout=120)
        finally:
            child.kill()
        if code != 143:
            raise RuntimeError(f"the launcher was told to leave, and ended with {code}")


def losses(notes):
    return [(r["step"], r["loss"]) for r in notes if "step" in r]


def outages(notes):
    """From the last note before a start until the script begins again, and until the first step behind it is done."""
    for at, note in enumerate(notes):
        if "start" in note and at:
            step, before = next((r for r in notes[at:] if "step" in r), note), notes[at - 1]["t"]
            yield note["began"] - before, step["t"] - before


def boundaries(notes):
    """Between two steps, beyond the script's pause: by step."""
    done = {}
    for before, note in zip(notes, notes[1:]):
        if "boundary" in note and "step" in before:
            done[note["boundary"]] = note["t"] - before["t"]
    return done


def judge(figures, case, notes, reference):
    seen = losses(notes)
    figures.add("muster", case, "redone", len(seen) - len(dict(seen)), "steps")
    if reference:
        figures.add("muster", case, "differ", sum(reference[step] != loss for step, loss in seen), "steps")
    for started, outage in outages(notes):
        figures.add("muster", case, "started", started, "s")
        figures.add("muster", case, "outage", outage, "s")


def run(options, figures):
    at = options.steps // 2 + 3
    fault = lambda what: ("--fault", what, "--at", str(at))  # noqa: E731
    lives = {
        "reference": (1, ()),
        "kill": (1, fault("kill")),
        "leave": (1, ("--pause", "0.1")),
        "hang": (1, fault("hang")),
        "two": (2, fault("kill")),
    }
    reference = None
    for case in options.cases:
        print(f"-- {CASES[case]}", file=sys.stderr, flush=True)
        if case == "saves":
            more = f"--layers {options.layers} --width {options.width} --save-every {options.steps // 3} --pause 0.5".split()
            peers = os.path.join(options.directory, "peers")
            os.makedirs(peers, exist_ok=True)
            job = Job(options, case, 1, *more, "--peers", peers)
            job.run()
            notes = rows(job.out + ".0")
            between = boundaries(notes)
            saves = [between[s] - 0.5 for s in sorted(between) if s % (options.steps // 3) == 0]
            figures.add("muster", case, "first_boundary", between[1] - 0.5, "s")
            figures.add("muster", case, "held_up_first", saves[0], "s")
            for save in saves[1:]:
                figures.add("muster", case, "held_up", save, "s")
            for note in notes:
                if "peer" in note:
                    figures.add("pytorch", case, note["peer"], note["seconds"], "s")
            shutil.rmtree(peers)
            continue
        ranks, more = lives[case]
        job = Job(options, case, ranks, *more, *options.small)
        if case == "leave":
            job.leaves(at)
        job.run()
        notes = rows(job.out + ".0")
        # Two ranks sum their gradients in another order than one.
        judge(figures, case, notes, None if case in ("reference", "two") else reference)
        if case == "reference":
            reference = dict(losses(notes))


def main(argv):
    parser = argparse.ArgumentParser(prog="benches/run gpu", description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=36, help="of `saves`: 36 of 1,280 are 8 GiB of state")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--small", action="store_true", help="a small model everywhere, for a try without a GPU")
    parser.add_argument("--programs", type=Path, help="where muster and libmuster.so lie (built otherwise)")
    parser.add_argument("--python", help="a Python with torch (the environment of the tests otherwise)")
    parser.add_argument("--out", default=str(setup.TARGET / "bench-gpu.jsonl"))
    options = parser.parse_args(argv)
    options.cases = options.cases.split(",")
    unknown = set(options.cases) - set(CASES)
    if unknown or options.steps < 12:
        parser.error(f"no case {', '.join(sorted(unknown))}" if unknown else "--steps: at least 12")
    if options.programs is None:
        options.programs = setup.muster("muster")
        setup.build("-p", "muster-capi")
    options.programs = options.programs.resolve()
    options.python = options.python or str(setup.venv() / "python")
    tiny = ["--layers", "2", "--width", "128"]
    options.small = tiny if options.small else []
    if options.small:
        options.layers, options.width = 2, 128
    options.directory = tempfile.mkdtemp(prefix="bench-gpu-")
    figures = report.Report(options.out)
    try:
        run(options, figures)
    finally:
        shutil.rmtree(options.directory, ignore_errors=True)
        print(figures.table(CASES, METRICS, ["muster", "pytorch"]))
        print(f"figures: {options.out}")
    return 0
