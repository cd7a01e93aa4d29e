"""Compression of the runtime beside the same operation in PyTorch, one thread each, by turns on one machine.

Casts alone, the choice of the largest hundredth with its values, and whole steps of a bucket in a world of one.
That the chosen places are the exact set is checked on each run.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile

from . import report, setup

SYSTEMS = ["muster", "torch"]
# What, elements, repeats in a turn. 64 Ki elements stay in the second-level cache; 16 Mi do not stay in any.
CASES = [(f"{way}-{kind}", *size) for kind in ("f16", "bf16") for way in ("narrow", "widen") for size in ((1 << 16, 400), (1 << 24, 7))]
CASES += [("topk", 1 << 24, 5), ("topk-step", 1 << 24, 3), ("int8-step", 1 << 22, 7), ("powersgd-step", 1 << 22, 7)]


def turn(argv, environment):
    out = subprocess.run([str(a) for a in argv], check=True, capture_output=True, text=True, env=environment)
    return [json.loads(line) for line in out.stdout.splitlines() if line.startswith("{")]


def exact_sets(program, torch, environment):
    """Whether the runtime chooses the exact set from a bell, and from few different values with NaN and infinity."""
    directory = tempfile.mkdtemp(prefix="bench-compression-")
    try:
        files = [os.path.join(directory, name) for name in ("bell", "odd", "chosen")]
        subprocess.run([*torch, "make", *files[:2], str(1 << 24)], check=True, env=environment)
        found = {}
        for name, path in (("bell", files[0]), ("ties, NaN, infinity", files[1])):
            subprocess.run([program, "choose", path, files[2]], check=True)
            found[name] = subprocess.run([*torch, "check", path, files[2]], check=False, env=environment).returncode == 0
        return found
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def main(argv):
    parser = argparse.ArgumentParser(prog="benches/run compression", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--cases", help="beginnings of the names of the cases, by comma: narrow,topk")
    parser.add_argument("--repeat", type=int, default=5, help="turns of each system and case")
    parser.add_argument("--python", help="an interpreter with PyTorch (default: the one in target/venv)")
    parser.add_argument("--out", default=str(setup.ROOT / "target" / "bench-compression.jsonl"), help="file for the JSON lines")
    options = parser.parse_args(argv)
    wanted = tuple(options.cases.split(",")) if options.cases else ("",)
    chosen = [case for case in CASES if case[0].startswith(wanted)]
    program = str(setup.example("muster-runtime", "compression"))
    python = options.python or str(setup.venv() / "python")
    torch = [python, str(os.path.join(os.path.dirname(__file__), "compression_torch.py"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    figures = report.Report(options.out)
    status = 0
    try:
        if any(what == "topk" for what, _, _ in chosen):
            for name, right in exact_sets(program, torch, environment).items():
                figures.add("muster", f"exact set: {name}", "right", int(right), "of 1")
                print(f"the exact set of the largest hundredth ({name}): {'yes' if right else 'NO'}")
                status = status or int(not right)
        for repeat in range(options.repeat):
            for what, length, count in chosen:
                for system, command in (("muster", [program]), ("torch", torch)):
                    for line in turn([*command, f"{what}:{length}:{count}"], environment):
                        for metric in ("median", "least"):
                            figures.add(system, f"{what} {length}", metric, line[metric], "us", turn=repeat)
    except KeyboardInterrupt:
        status = 130
    show(figures, chosen)
    print(f"JSON lines: {options.out}")
    return status


def show(figures, chosen):
    """Medians over the turns; the speed is PyTorch's time by Muster's."""
    rows = [["case", "muster us", "torch us", "speed (least, most of the turns)"]]
    for what, length, _ in chosen:
        name = f"{what} {length}"
        ours, theirs = (figures.values.get((name, "median", system), []) for system in SYSTEMS)
        if not ours or not theirs:
            continue
        speeds = [b / a for a, b in zip(ours, theirs)]
        speed = f"{statistics.median(speeds):.2f} ({min(speeds):.2f}, {max(speeds):.2f})"
        rows.append([name, f"{statistics.median(ours):.1f}", f"{statistics.median(theirs):.1f}", speed])
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    print("\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows))


