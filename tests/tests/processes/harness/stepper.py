"""A worker that has attached to its control page without the runtime: steps in lock step with all other ranks, reports metrics,
and hangs when told to.

    stepper.py EVENTS CONTROL

The page's words are those of protocol/src/control.rs and control/report.rs. Notes what worker.py notes. The ranks of a generation meet at
every step through files under CONTROL. While CONTROL/sleep-RANK is there, that rank removes it and sleeps for ever inside its step. Exits with
the number in CONTROL/exit. At a checkpoint it notes `checkpoint` with the step, and acknowledges it, SLOW_SAVE seconds later if CONTROL/slow-save-RANK is there.
"""

import ctypes
import json
import mmap
import os
import struct
import sys
import time

EVENTS, CONTROL = sys.argv[1:3]
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STOP, CHECKPOINT, PROGRESS, ACK, LINKED, PID = 128, 152, 256, 264, 272, 280
OPERATION, SAVED, SEQUENCE, VALUES = 304, 312, 1024, 1032
SLOW_SAVE = 8
STEP_TIME = 0.02
COMMON = {
    "pid": os.getpid(),
    "node": os.environ["NODE_NAME"],
    "rank": RANK,
    "local_rank": int(os.environ["LOCAL_RANK"]),
    "node_rank": int(os.environ["GROUP_RANK"]),
    "world": WORLD,
    "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
    "generation": int(os.environ["MUSTER_GENERATION"]),
    "of": os.environ["MUSTER_GENERATION_DIGEST"],
    "master": os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"],
}
LOG = os.open(EVENTS, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
PAGE = mmap.mmap(int(os.environ["MUSTER_CONTROL_FD"]), 4096)
MEETING = os.path.join(CONTROL, f"meeting-{COMMON['generation']}-{COMMON['restart']}")


def word(at):
    return ctypes.c_uint64.from_buffer(PAGE, at)


def note(event, **fields):
    line = {"event": event, "t": time.time_ns(), **COMMON, **fields}
    os.write(LOG, (json.dumps(line) + "\n").encode())


def bits(number):
    return struct.unpack("<Q", struct.pack("<d", number))[0]


def report(step):
    sequence = word(SEQUENCE).value
    word(SEQUENCE).value = sequence + 1
    nan = float("nan")
    floats = [1.0 / (step + 1), 50.0, 0.1, nan, 0.25 * step, nan, nan, nan]
    for at, value in enumerate([step, WORLD] + [bits(f) for f in floats]):
        word(VALUES + 8 * at).value = value
    word(SEQUENCE).value = sequence + 2


def meet(step):
    """Waits for all ranks, as a collective does."""
    word(OPERATION).value += 1
    mine = os.path.join(MEETING, str(RANK))
    with open(mine + ".new", "w", encoding="ascii") as file:
        file.write(str(step))
    os.rename(mine + ".new", mine)
    for other in range(WORLD):
        while True:
            try:
                with open(os.path.join(MEETING, str(other)), encoding="ascii") as file:
                    if int(file.read()) >= step:
                        break
            except FileNotFoundError:
                pass
            leave_if_told()
            time.sleep(0.002)
    word(OPERATION).value += 1


def there(name):
    return os.path.exists(os.path.join(CONTROL, name))


def leave_if_told():
    try:
        with open(os.path.join(CONTROL, "exit"), encoding="ascii") as file:
            code = int(file.read())
    except FileNotFoundError:
        return
    word(LINKED).value = 0
    sys.exit(code)


def at_the_gate(step, done):
    """What the runtime does about a stop: waits while it is agreed on. Returns the checkpoint that is done."""
    while True:
        stop = word(STOP).value
        state, at = stop & 3, stop >> 2
        if state in (0, 3) or step < at:
            return done
        if state == 2:
            if word(CHECKPOINT).value != at + 1:
                if word(STOP).value != stop:
                    continue
                word(ACK).value = step + 1
                note("stopped", step=step)
                sys.exit(0)
            if word(STOP).value != stop:
                continue
            if done != stop:
                note("checkpoint", step=step)
                if there(f"slow-save-{RANK}"):
                    time.sleep(SLOW_SAVE)
                word(SAVED).value = step + 1
            return stop
        time.sleep(0.001)


os.makedirs(MEETING, exist_ok=True)
word(PID).value = os.getpid()
word(LINKED).value = 1
note("start")
step, done = 0, None
while True:
    leave_if_told()
    word(PROGRESS).value = step + 1
    done = at_the_gate(step, done)
    if there(f"sleep-{RANK}"):
        os.remove(os.path.join(CONTROL, f"sleep-{RANK}"))
        note("sleeps", step=step)
        time.sleep(1_000_000)
    time.sleep(STEP_TIME)
    meet(step)
    report(step)
    step += 1
