"""Collectives of the runtime beside PyTorch's gloo: the same sizes and worlds, as processes of one machine, in one run.

Systems take turns, `--repeat` times; a figure is the median time of one operation at rank 0 in one turn. gloo works in
place, the runtime out of place. `bare` moves an all-reduce's bytes over plain blocking sockets, without arithmetic.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from . import procs, report, setup

SYSTEMS = ["shm", "tcp", "mixed", "gloo", "bare"]
OPERATIONS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "barrier"]
SIZES = [4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
# Where an operation gives every rank as much again from each other one, the largest sizes are left out.
LARGEST = {"all_gather": 64 << 20}
BOUND = 600.0


def size_name(size):
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} B"


def iterations(size, scale):
    """So that small and large sizes take about as long."""
    return max(7, int(scale * min(2000, (400 << 20) // (size + (128 << 10)))))


def cases(options):
    for operation in options.operations:
        sizes = [0] if operation == "barrier" else options.sizes
        for size in sizes:
            if size <= LARGEST.get(operation, size):
                yield operation, size, iterations(size, options.scale)


def argv_of(system, program, python, chosen):
    """The command of one rank; None if the system has nothing to run."""
    arguments = [f"{operation}:{size}:{count}" for operation, size, count in chosen if system != "bare" or operation == "all_reduce"]
    if not arguments:
        return None
    if system == "gloo":
        return [str(python), str(Path(__file__).with_name("collectives_gloo.py")), *arguments]
    return [str(program), system, *arguments]


def turn(bed, argv, world, directory):
    """Runs all ranks of one system once; what rank 0 printed."""
    port = setup.free_ports(1)[0]
    logs, ranks = [], []
    for rank in range(world):
        env = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        logs.append(os.path.join(directory, f"rank{rank}.log"))
        Path(logs[rank]).write_text("", encoding="utf-8")
        ranks.append(bed.spawn(argv, f"rank{rank}", env, logs[rank]))
    deadline = time.monotonic() + BOUND
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline or any(rank.poll() for rank in ranks):
            break
        time.sleep(0.02)
    failed = [index for index, rank in enumerate(ranks) if rank.poll() != 0]
    bed.kill_all()
    lines = [line for line in Path(logs[0]).read_text(encoding="utf-8").splitlines() if line.startswith("{")]
    if failed:
        tails = "".join(Path(logs[index]).read_text(encoding="utf-8")[-500:] for index in failed)
        print(f"ranks {failed} of {argv[:2]} failed:\n{tails}", file=sys.stderr)
    return [json.loads(line) for line in lines]


def show(figures, worlds, chosen, systems):
    """Median of all turns, and each system's ratio to gloo (below 1 is faster)."""
    print("median of one operation at rank 0 in us; in brackets the ratio to gloo's")
    for world in worlds:
        rows = []
        for operation, size, _ in chosen:
            name = f"world {world} {operation} {size_name(size)}"
            medians = {s: statistics.median(v) for s in systems if (v := figures.values.get((name, "median", s)))}
            cells = []
            for system in systems:
                cell = f"{medians[system]:.1f}" if system in medians else "-"
                if system in medians and system != "gloo" and "gloo" in medians:
                    cell += f" ({medians[system] / medians['gloo']:.2f})"
                cells.append(cell)
            rows.append([name, *cells])
        table = [["case", *systems], *rows]
        widths = [max(len(row[i]) for row in table) for i in range(len(systems) + 1)]
        print("\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in table) + "\n")


def slower(figures, worlds, chosen, systems):
    """Names every case in which a system of the runtime takes longer than gloo, by the medians and by the least times."""
    print("slower than gloo, by the median of the turns' medians, and by the least time of all turns:")
    found = False
    for world in worlds:
        for operation, size, _ in chosen:
            name = f"world {world} {operation} {size_name(size)}"
            for system in (s for s in systems if s not in ("gloo", "bare")):
                ratios = []
                for metric, middle in (("median", statistics.median), ("least", min)):
                    ours, theirs = (figures.values.get((name, metric, s)) for s in (system, "gloo"))
                    if ours and theirs:
                        ratios.append(middle(ours) / middle(theirs))
                if any(ratio > 1 for ratio in ratios):
                    found = True
                    print(f"  {name}, {system}: {', '.join(f'{ratio:.2f}' for ratio in ratios)} times gloo's time")
    print("" if found else "  none\n")


def bounds(figures, worlds):
    """How the figures stand to what the runtime is to reach; of the median of the turns."""
    rows = []

    def median(world, size, system):
        found = figures.values.get((f"world {world} all_reduce {size_name(size)}", "median", system))
        return statistics.median(found) if found else None

    def judge(text, value, holds, bound):
        if value is not None:
            rows.append(f"{text}: {value:.2f}, to be {bound}: {'yes' if holds(value) else 'NO'}")

    def ratio(a, b):
        return a / b if a and b else None

    for world in worlds:
        for size in (16 << 20, 64 << 20, 256 << 20):
            name = f"world {world}, {size_name(size)}"
            tcp, gloo = median(world, size, "tcp"), median(world, size, "gloo")
            if size <= 64 << 20:
                judge(f"{name}: speed of tcp by a bare exchange's", ratio(median(world, size, "bare"), tcp), lambda v: v >= 0.7, "0.7 or more")
                judge(f"{name}: speed of tcp by gloo's", ratio(gloo, tcp), lambda v: v > 1, "above 1")
                judge(f"{name}: speed of shm by gloo's", ratio(gloo, median(world, size, "shm")), lambda v: v >= 2, "2 or more")
        if world == 2:
            judge("world 2, 1 KiB: time of tcp by a bare exchange's", ratio(median(2, 1024, "tcp"), median(2, 1024, "bare")), lambda v: v <= 3, "3 or less")
        if world == 4:
            judge("world 4, 1 KiB: time of tcp by gloo's", ratio(median(4, 1024, "tcp"), median(4, 1024, "gloo")), lambda v: v <= 0.1, "0.1 or less")
            judge("world 4, 1 KiB: time of shm by gloo's", ratio(median(4, 1024, "shm"), median(4, 1024, "gloo")), lambda v: v <= 0.1, "0.1 or less")
    print("\n".join(rows))


def listed(convert):
    return lambda text: [convert(part) for part in text.split(",")]


def main(argv):
    parser = argparse.ArgumentParser(prog="benches/run collectives", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--systems", type=listed(str), default=SYSTEMS, help=f"of {','.join(SYSTEMS)}")
    parser.add_argument("--operations", type=listed(str), default=OPERATIONS, help=f"of {','.join(OPERATIONS)}")
    parser.add_argument("--sizes", type=listed(int), default=SIZES, help="in bytes")
    parser.add_argument("--worlds", type=listed(int), default=[2, 4])
    parser.add_argument("--repeat", type=int, default=3, help="turns of each system")
    parser.add_argument("--scale", type=float, default=1.0, help="more or fewer operations a turn")
    parser.add_argument("--python", help="an interpreter with PyTorch (default: the one in target/venv)")
    parser.add_argument("--out", default=str(setup.ROOT / "target" / "bench-collectives.jsonl"), help="file for the JSON lines")
    options = parser.parse_args(argv)
    unknown = [s for s in options.systems if s not in SYSTEMS] + [o for o in options.operations if o not in OPERATIONS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    program = setup.example("muster-runtime", "collectives")
    python = None
    if "gloo" in options.systems:
        python = options.python or setup.venv() / "python"
    figures = report.Report(options.out)
    chosen, status = list(cases(options)), 0
    directory = tempfile.mkdtemp(prefix="bench-collectives-")
    try:
        with procs.Bed() as bed:
            for repeat in range(options.repeat):
                for world in options.worlds:
                    for system in options.systems:
                        command = argv_of(system, program, python, chosen)
                        if command is None or (system == "mixed" and world < 3):
                            continue
                        for line in turn(bed, command, world, directory):
                            operation, size = line.pop("case").split(":")
                            name = f"world {world} {operation} {size_name(int(size))}"
                            if "failed" in line:
                                print(f"{system}: {name}: {line['failed']}", file=sys.stderr)
                                continue
                            for metric, value in line.items():
                                figures.add(system, name, metric, value, "us", turn=repeat)
    except KeyboardInterrupt:
        status = 130
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    show(figures, options.worlds, chosen, options.systems)
    if "gloo" in options.systems:
        slower(figures, options.worlds, chosen, options.systems)
    bounds(figures, options.worlds)
    print(f"JSON lines: {options.out}")
    return status
