"""What it saves to reduce gradients while backward goes on: `runtime/examples/overlap.rs` with no overlap, with hooks and in
stages, two ranks of one thread each.

In `memory` and `loopback` nothing but the cores is waited for, so where each rank has only its own core there is nothing to
save. In `wire` the ranks are on hosts of their own (network namespaces), and each sends through a link of so many bits a
second: that is waited for without a core.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from . import procs, report, setup

SETTINGS = ["memory", "loopback", "wire"]
WAYS = ["None", "Hooks", "Staged"]
METRICS = ["step", "saved", "computing", "communicating", "waiting", "updating"]
NETNS = setup.ROOT / "tests" / "tools" / "netns"
RANKS = 2
BOUND = 600.0
# Sent at once before a link is as slow as it says.
BURST = 256 << 10


def build():
    """The example, and the environment in which it builds and runs: tch is built against the PyTorch of the venv, where
    tests/run builds it, too, and so in its profile (`dev`, in which the runtime is optimized)."""
    programs = setup.venv()
    find = "import os, torch; print(os.path.join(os.path.dirname(torch.__file__), 'lib'))"
    lib = subprocess.run([programs / "python", "-c", find], check=True, capture_output=True, text=True).stdout.strip()
    env = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "VIRTUAL_ENV": str(programs.parent),
        "LIBTORCH_USE_PYTORCH": "1",
        "CARGO_TARGET_DIR": str(setup.TARGET / "torch"),
        "LD_LIBRARY_PATH": ":".join(part for part in (lib, os.environ.get("LD_LIBRARY_PATH")) if part),
    }
    argv = ["cargo", "build", "-p", "muster-runtime", "--features", "torch", "--example", "overlap"]
    subprocess.run(argv, cwd=setup.ROOT, env=env, check=True)
    return setup.TARGET / "torch" / "debug" / "examples" / "overlap", env


class Wire:
    """Two hosts, each of which sends no faster than so many million bits a second."""

    def __init__(self, mbit):
        self.name, self.mbit = f"overlap{os.getpid()}", mbit

    def __enter__(self):
        subprocess.run([NETNS, "up", self.name, str(RANKS)], check=True)
        try:
            for host in range(1, RANKS + 1):
                shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{self.mbit}mbit", "burst", str(BURST), "latency", "50ms"]
                subprocess.run([*self.on(host), *shape], check=True)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        subprocess.run([NETNS, "down", self.name], check=True)

    def on(self, host):
        return [str(NETNS), "exec", self.name, str(host), "--"]


def turn(bed, program, env, options, setting, wire, directory):
    """Runs both ranks once; what rank 0 printed."""
    sharing = "memory" if setting == "memory" else "tcp"
    argv = [str(program), "--format", "json", "--sharing", sharing, "--steps", str(options.steps)]
    argv += ["--layers", str(options.layers), "--width", str(options.width), "--batch", str(options.batch)]
    address, port = ("10.77.0.1" if wire else "127.0.0.1"), setup.free_ports(1)[0]
    logs, ranks = [], []
    for rank in range(RANKS):
        place = {"RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_RANK": rank, "MASTER_ADDR": address, "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        logs.append(os.path.join(directory, f"rank{rank}.log"))
        Path(logs[rank]).write_text("", encoding="utf-8")
        command = [*(wire.on(rank + 1) if wire else []), *argv]
        ranks.append(bed.spawn(command, f"rank{rank}", {**env, **{name: str(value) for name, value in place.items()}}, logs[rank]))
    deadline = time.monotonic() + BOUND
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline and not any(rank.poll() for rank in ranks):
        time.sleep(0.05)
    failed = [index for index, rank in enumerate(ranks) if rank.poll() != 0]
    bed.kill_all()
    if failed:
        tails = "".join(Path(logs[index]).read_text(encoding="utf-8")[-500:] for index in failed)
        print(f"{setting}: ranks {failed} failed:\n{tails}", file=sys.stderr)
        return []
    lines = Path(logs[0]).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def add(figures, setting, lines):
    """One turn's figures. False, if the ways ended with different bits or one is missing."""
    ways = {line["overlap"]: line for line in lines if "overlap" in line}
    if set(ways) != set(WAYS) or {"same": True} not in lines:
        figures.add("None", setting, "not_reached", 1, "attempts")
        return False
    for way, line in ways.items():
        line["saved"] = ways["None"]["step"] - line["step"]
        for metric in METRICS:
            figures.add(way, setting, metric, line[metric], "ms")
    return True


def main(argv):
    parser = argparse.ArgumentParser(prog="benches/run overlap", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", type=lambda text: text.split(","), default=SETTINGS, help=f"of {','.join(SETTINGS)}")
    parser.add_argument("--mbit", type=int, default=1000, help="a link's speed in `wire`")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256, help="samples of a rank")
    parser.add_argument("--steps", type=int, default=20, help="of each way in each turn")
    parser.add_argument("--repeat", type=int, default=3, help="turns")
    parser.add_argument("--out", default=str(setup.ROOT / "target" / "bench-overlap.jsonl"), help="file for the JSON lines")
    options = parser.parse_args(argv)
    unknown = [setting for setting in options.settings if setting not in SETTINGS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    if "wire" in options.settings and os.geteuid() != 0:
        print("wire is left out: network namespaces need root", file=sys.stderr)
        options.settings = [setting for setting in options.settings if setting != "wire"]
    program, env = build()
    figures = report.Report(options.out)
    status, directory = 0, tempfile.mkdtemp(prefix="bench-overlap-")
    try:
        for _ in range(options.repeat):
            for setting in options.settings:
                with procs.Bed() as bed:
                    if setting == "wire":
                        with Wire(options.mbit) as wire:
                            lines = turn(bed, program, env, options, setting, wire, directory)
                    else:
                        lines = turn(bed, program, env, options, setting, None, directory)
                if not add(figures, setting, lines):
                    status = 1
    except KeyboardInterrupt:
        status = 130
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    titles = {"memory": "ranks share memory", "loopback": "TCP over loopback", "wire": f"{options.mbit} Mbit/s between hosts"}
    print(figures.table(titles, METRICS, WAYS))
    print(f"JSON lines: {options.out}")
    return status
