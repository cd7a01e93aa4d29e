"""What other nodes' memory costs and gives, beside plain TCP on loopback in turns: a part of `benches/run checkpoint`."""

import json
import subprocess

from . import setup

# Case: how many nodes, and each `--replicas` that is measured.
CASES = {"memory": (2, ["1"]), "parity": (3, ["1", "parity:2"])}
METRICS = ["held_first", "held", "held_cpu_first", "held_cpu", "held_memory", "held_memory_share"]
METRICS += ["restore_rate", "tcp_rate", "tcp_four_rate", "share_of_tcp", "share_of_tcp_four"]


def title(case, replicas):
    return f"{case}, --replicas {replicas}"


def build():
    """The program that measures; optimized."""
    return setup.example("muster-cli", "peer_memory")


def measure(program, figures, case, size, saves, repeat):
    """Adds the figures of each of `repeat` runs for each way; rates are medians of turns with plain TCP, as many as saves."""
    nodes, ways = CASES[case]
    for _ in range(repeat):
        for replicas in ways:
            argv = [program, replicas, nodes, size, saves, saves]
            out = subprocess.run([str(part) for part in argv], check=True, capture_output=True, text=True)
            add(figures, title(case, replicas), json.loads(out.stdout), size)


def add(figures, case, found, size):
    for metric, source, unit in (("held", "held", "s"), ("held_cpu", "cpu", "CPU s")):
        first, *later = found[source]
        figures.add("muster", case, f"{metric}_first", first, unit)
        for value in later:
            figures.add("muster", case, metric, value, unit)
    figures.add("muster", case, "held_memory", found["memory"] / 2**20, "MiB")
    figures.add("muster", case, "held_memory_share", 100 * found["memory"] / size, "% of an image")
    for metric, source in (("restore_rate", "restore"), ("tcp_rate", "tcp"), ("tcp_four_rate", "tcp_four")):
        figures.add("muster", case, metric, found[source] / 2**30, "GiB/s")
    for metric in ("share_of_tcp", "share_of_tcp_four"):
        figures.add("muster", case, metric, 100 * found[metric], "%")
