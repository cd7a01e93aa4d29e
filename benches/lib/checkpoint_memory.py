"""Recovery from a peer's memory, beside plain TCP on loopback in turns: a part of `benches/run checkpoint`."""

import json
import subprocess

from . import setup

CASE = "memory"
TITLE = "a lost node's bytes from a peer's memory"
METRICS = ["restore_rate", "tcp_rate", "tcp_four_rate", "share_of_tcp", "share_of_tcp_four", "copied_in"]
SYSTEM = "muster"


def build():
    """The program that measures; optimized."""
    argv = ["cargo", "build", "--release", "-p", "muster-cli", "--example", "peer_memory"]
    subprocess.run(argv, cwd=setup.ROOT, check=True)
    return setup.TARGET / "release" / "examples" / "peer_memory"


def measure(program, figures, size=1 << 30, turns=5, repeat=3):
    """Adds one figure of each metric for each of `repeat` runs; each is the median of `turns`, which take turns with plain TCP."""
    for _ in range(repeat):
        out = subprocess.run([str(program), str(size), str(turns)], check=True, capture_output=True, text=True)
        found = json.loads(out.stdout)
        for metric, value, unit in [
            ("restore_rate", found["restore"] / 2**30, "GiB/s"),
            ("tcp_rate", found["tcp"] / 2**30, "GiB/s"),
            ("tcp_four_rate", found["tcp_four"] / 2**30, "GiB/s"),
            ("share_of_tcp", 100 * found["share_of_tcp"], "%"),
            ("share_of_tcp_four", 100 * found["share_of_tcp_four"], "%"),
            ("copied_in", found["copied_in"], "s"),
        ]:
            figures.add(SYSTEM, CASE, metric, value, unit)
