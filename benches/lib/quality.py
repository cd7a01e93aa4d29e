"""What compression and faults cost a training: held-out accuracy, seed by seed beside the undisturbed training without
compression. Three live ranks train a classifier of the digits (in threads of a test), and a convolutional net on them
(the example `convnet` under `muster run`). Five times in a disturbed training one is killed, and another comes.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys

from . import convnet, report, setup

TEST = "live::tests::quality::long::half_a_point_at_most_over_ten_seeds"
PLAIN = "undisturbed"
# Name: what the convolutional net is told, and how often a rank is killed. The test of the digits has the same.
WAYS = {
    PLAIN: ([], 0),
    "top-k 1 %": (["--codec", "topk:0.01"], 0),
    "five faults": ([], 5),
    "top-k 1 %, five faults": (["--codec", "topk:0.01"], 5),
}
# Points of accuracy that may be lost in the mean.
TO_REACH = -0.5
# Student's t at 97.5 %, for 1 to 9 degrees of freedom.
STUDENT = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262]


def digits(options):
    """(seed, way, accuracy in percent) for each training."""
    command = ["cargo", "test", "--quiet", "-p", "muster-runtime", "--lib", "--", "--exact", TEST, "--nocapture"]
    env = {**os.environ, "MUSTER_TEST_QUALITY_SEEDS": str(options.seeds)}
    ran = subprocess.run(command, cwd=setup.ROOT, env=env, check=False, stdout=subprocess.PIPE, text=True)
    # The harness may have written before it on the same line.
    lines = [json.loads(line[line.index("{") :]) for line in ran.stdout.splitlines() if '{"seed"' in line]
    if not lines:
        raise convnet.Failed(f"the digits were not trained:\n{ran.stdout[-2000:]}")
    for line in lines:
        yield line["seed"], line["way"], line["accuracy"]


def convolutional(options):
    """The same for the convolutional net, as the trainings end."""
    trains = convnet.Convnet(options.steps, options.pause_ms, options.bound)
    for seed in range(1, options.seeds + 1):
        for way, (flags, faults) in WAYS.items():
            accuracy, seconds = trains.run(seed, flags, faults)
            print(f"convnet, seed {seed}, {way}: {accuracy:.2f} % after {seconds:.0f} s", file=sys.stderr)
            yield seed, way, accuracy


NETS = {"digits": digits, "convnet": convolutional}


def mean_and_half(found):
    """The mean of some differences, and half of its 95 % interval."""
    known = len(found) - 2
    half = STUDENT[known] * statistics.stdev(found) / math.sqrt(len(found)) if known >= 0 else float("nan")
    return statistics.fmean(found), half


def show(net, accuracy):
    """Prints what a net's trainings came to. Whether the means are as they have to be."""
    seeds = sorted({seed for seed, _ in accuracy})
    print(f"\n{net}: held-out accuracy in percent, by seed: {', '.join(map(str, seeds))}")
    for way in WAYS:
        print(f"{way:<24} " + " ".join(f"{accuracy.get((seed, way), float('nan')):6.2f}" for seed in seeds))
    print(f"{net}: difference to undisturbed, paired, in points: mean, 95 % interval, worst; to reach: {TO_REACH} in the mean")
    reached = True
    for way in list(WAYS)[1:]:
        pairs = [(accuracy.get((seed, way)), accuracy.get((seed, PLAIN))) for seed in seeds]
        found = [way - plain for way, plain in pairs if way is not None and plain is not None]
        if not found:
            continue
        mean, half = mean_and_half(found)
        reached &= mean >= TO_REACH
        verdict = "yes" if mean >= TO_REACH else "NO"
        print(f"{way:<24} {mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f}), worst {min(found):+.2f}: {verdict}")
    return reached


def main(argv):
    parser = argparse.ArgumentParser(prog="benches/run quality", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--nets", default=",".join(NETS), help=f"of {','.join(NETS)}")
    parser.add_argument("--seeds", type=int, choices=range(1, 11), default=10, metavar="N", help="1 to 10 trainings of each kind")
    parser.add_argument("--steps", type=int, default=900, help="of the convolutional net")
    parser.add_argument("--pause-ms", type=int, default=15, help="after each step of a disturbed training of it, so that a new process comes in time")
    parser.add_argument("--bound", type=float, default=300.0, help="seconds after which such a training is given up")
    parser.add_argument("--out", default=str(setup.ROOT / "target" / "bench-quality.jsonl"), help="file for the JSON lines")
    options = parser.parse_args(argv)
    nets = [net for net in options.nets.split(",") if net]
    unknown = [net for net in nets if net not in NETS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    figures, status = report.Report(options.out), 0
    for net in nets:
        accuracy = {}
        try:
            for seed, way, value in NETS[net](options):
                accuracy[(seed, way)] = value
                figures.add(way, net, "accuracy", value, "%", seed=seed)
                if way != PLAIN:
                    figures.add(way, net, "difference", value - accuracy[(seed, PLAIN)], "points", seed=seed)
        except convnet.Failed as reason:
            print(reason, file=sys.stderr)
            status = 1
        except KeyboardInterrupt:
            status = 130
        if accuracy and not show(net, accuracy):
            status = status or 1
        if status == 130:
            break
    print(f"JSON lines: {options.out}")
    return status
