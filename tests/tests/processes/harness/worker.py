"""A worker without PyTorch: notes what it was given and which signals it gets, and ends when told to.

    worker.py EVENTS CONTROL

Appends JSON lines to EVENTS, one write each. Exits with the number in the file CONTROL/exit, or CONTROL/exit-RANK, once that is there;
of SIGTERM, SIGUSR1 and SIGUSR2 with 128 and the signal's number.
"""

import json
import os
import signal
import socket
import sys
import time

EVENTS, CONTROL = sys.argv[1:3]
COMMON = {
    "pid": os.getpid(),
    "node": os.environ.get("NODE_NAME", socket.gethostname()),
    "rank": int(os.environ["RANK"]),
    "local_rank": int(os.environ["LOCAL_RANK"]),
    "node_rank": int(os.environ["GROUP_RANK"]),
    "world": int(os.environ["WORLD_SIZE"]),
    "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    "generation": int(os.environ["MUSTER_GENERATION"]),
    "of": os.environ["MUSTER_GENERATION_DIGEST"],
    "master": os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"],
}
LOG = os.open(EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)


def note(event, **fields):
    line = {"event": event, "t": time.time_ns(), **COMMON, **fields}
    os.write(LOG, (json.dumps(line) + "\n").encode())


def told(number, _frame):
    note("signal", signal=number)
    sys.exit(128 + number)


for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, told)
note("start")
orders = [os.path.join(CONTROL, name) for name in ("exit", f"exit-{COMMON['rank']}")]
while True:
    for order in orders:
        if os.path.exists(order):
            with open(order, encoding="ascii") as file:
                code = int(file.read())
            print(f"worker of rank {COMMON['rank']} ends with {code}", file=sys.stderr)
            sys.exit(code)
    time.sleep(0.01)
