#!/usr/bin/env python3
"""The checks of events.py for callers that are not Python: each command prints one JSON line, or fails with the reason.

    follow.py FILE wait-group --world 2 --after NS --nodes a,b --timeout 60
    follow.py FILE wait-step --step 100 --timeout 60
    follow.py FILE wait-finished --timeout 60
    follow.py FILE check [--drained-from GROUP]
"""

import argparse
import json
import sys

from events import CheckFailed, EventLog, check_all, check_nothing_lost


def describe(group):
    """What a caller needs to go on: the group's key, who is in it and where, and from which step it went on."""
    members = sorted(group.members, key=lambda m: m.rank)
    return {
        "group": group.key,
        "world": group.world,
        "resumed": members[0].resumed,
        "last_start": group.last_start(),
        "last_first_allreduce": group.last_first_allreduce(),
        "members": [{"rank": m.rank, "node": m.node, "pid": m.pid, "last_step": m.last_step} for m in members],
    }


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    commands = parser.add_subparsers(dest="command", required=True)
    group = commands.add_parser("wait-group", help="until a new group of this size has trained a step")
    group.add_argument("--world", type=int, required=True)
    group.add_argument("--after", type=int, default=0, help="time.time_ns() that all its processes started after")
    group.add_argument("--nodes", help="exactly these")
    step = commands.add_parser("wait-step", help="until any rank has finished this step")
    step.add_argument("--step", type=int, required=True)
    finished = commands.add_parser("wait-finished", help="until the newest group has reached its last step")
    for waiting in (group, step, finished):
        waiting.add_argument("--timeout", type=float, required=True, help="seconds")
    check = commands.add_parser("check", help="every promise, over the whole file")
    check.add_argument("--drained-from", type=int, metavar="GROUP", help="its successor must go on at the step where it stopped")
    return parser.parse_args(argv)


def run(options):
    log = EventLog(options.file)
    if options.command == "wait-group":
        nodes = options.nodes.split(",") if options.nodes else None
        return describe(log.wait_group(options.world, options.timeout, options.after, nodes))
    if options.command == "wait-step":
        log.wait_step(options.step, options.timeout)
        return {"last_step": log.last_step(), "last_saved": log.last_saved()}
    if options.command == "wait-finished":
        return describe(log.wait_finished(options.timeout))
    check_all(log)
    groups = [g for g in log.ordered_groups() if g.answered()]
    if options.drained_from is not None:
        later = [g for g in groups if g.key > options.drained_from]
        if not later:
            raise CheckFailed(f"no group after {options.drained_from}")
        check_nothing_lost(log, options.drained_from, later[0])
    return {"groups": len(groups), "worlds": [g.world for g in groups], "last_step": log.last_step()}


def main(argv):
    try:
        print(json.dumps(run(parse(argv))))
        return 0
    except CheckFailed as reason:
        print(f"follow.py: {reason}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
