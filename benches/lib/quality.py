"""What compression and faults cost a training: the digits with three live ranks, ten seeds, each beside the undisturbed
training without compression. A rank of threads is killed and another one comes, five times in a training.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys

from . import report, setup

TEST = "live::tests::quality::long::half_a_point_at_most_over_ten_seeds"


def main(argv):
    parser = argparse.ArgumentParser(prog="benches/run quality", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", default=str(setup.ROOT / "target" / "bench-quality.jsonl"), help="file for the JSON lines")
    options = parser.parse_args(argv)
    command = ["cargo", "test", "--quiet", "-p", "muster-runtime", "--lib", "--", "--exact", TEST, "--nocapture"]
    ran = subprocess.run(command, cwd=setup.ROOT, check=False, stdout=subprocess.PIPE, text=True)
    # The harness may have written before it on the same line.
    lines = [json.loads(line[line.index("{") :]) for line in ran.stdout.splitlines() if '{"seed"' in line]
    if not lines:
        print(f"the training did not run:\n{ran.stdout[-2000:]}", file=sys.stderr)
        return 1
    figures = report.Report(options.out)
    ways = list(dict.fromkeys(line["way"] for line in lines))
    for line in lines:
        for metric in ("accuracy", "difference"):
            if metric in line:
                figures.add(line["way"], "digits", metric, line[metric], "points", seed=line["seed"])
    accuracy = {(line["seed"], line["way"]): line["accuracy"] for line in lines}
    seeds = sorted({line["seed"] for line in lines})
    print(f"held-out accuracy in percent, by seed: {', '.join(map(str, seeds))}")
    for way in ways:
        print(f"{way:<24} " + " ".join(f"{accuracy.get((seed, way), float('nan')):6.2f}" for seed in seeds))
    print("\ndifference to undisturbed, paired, in points: mean, 95 % interval")
    for way in ways[1:]:
        found = figures.values[("digits", "difference", way)]
        half = 2.262 * statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else float("nan")
        print(f"{way:<24} {statistics.fmean(found):+.3f} ({statistics.fmean(found) - half:+.3f} to {statistics.fmean(found) + half:+.3f})")
    print(f"JSON lines: {options.out}")
    return ran.returncode
