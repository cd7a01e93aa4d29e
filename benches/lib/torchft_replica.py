"""One replica of the regroup bench with torchft: the counterpart of runtime/examples/live_steps.rs."""

import argparse
import json
import logging
import os
import random
import time
from datetime import timedelta

import torch
from torch.distributed import ReduceOp, TCPStore
from torch.distributed.distributed_c10d import AllreduceOptions
from torchft import Manager, ProcessGroupGloo

parser = argparse.ArgumentParser()
parser.add_argument("--log", required=True)
parser.add_argument("--lighthouse", required=True)
parser.add_argument("--replica", type=int, required=True)
parser.add_argument("--replicas", type=int, required=True)
parser.add_argument("--gradient", type=int, required=True, help="bytes")
parser.add_argument("--step-ms", type=float, default=0.0)
parser.add_argument("--pairs", type=int, default=0)
parser.add_argument("--block", type=int, default=1, help="steps of one half of a pair")
parser.add_argument("--seconds", type=float, default=1e9, help="only as many pairs as fit")
parser.add_argument("--timeout", type=float, default=60.0)
options = parser.parse_args()

FIRST = 5  # pairs that say how long one takes
torch.set_num_threads(1)
logging.disable(logging.INFO)
who = f"node{options.replica}.{os.getpid()}"
log = open(os.path.join(options.log, f"{who}.jsonl"), "w", encoding="utf-8", buffering=1)


def note(event, step, **more):
    print(json.dumps({"event": event, "t": time.time_ns(), "who": who, "step": step, **more}), file=log)


elements = options.gradient // 4
state = torch.zeros(elements)
gradient = torch.full((elements,), 1e-3)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=options.timeout)),
    load_state_dict=lambda loaded: state.copy_(loaded["state"]),
    state_dict=lambda: {"state": state},
    min_replica_size=2,
    timeout=timedelta(seconds=options.timeout),
    rank=0,
    world_size=1,
    store_addr="127.0.0.1",
    store_port=store.port,
    lighthouse_addr=options.lighthouse,
    replica_id=f"replica_{options.replica}",
    hostname="127.0.0.1",
)
sums = torch.empty(elements)
world = 0


def step():
    """True, if it is committed."""
    global world
    manager.start_quorum()
    time.sleep(options.step_ms / 1000)
    # In place, so the gradient is copied first, as a backward pass writes it anew.
    sums.copy_(gradient)
    manager.allreduce(sums, reduce_op=ReduceOp.SUM).wait()
    committed = manager.should_commit()
    if committed:
        state.add_(sums, alpha=-0.1)
    if manager.num_participants() != world:
        world = manager.num_participants()
        note("regrouped", manager.current_step(), world=world, rank=manager.participating_rank() or 0)
    return committed


def add_up(tensor):
    """Without torchft, on the process group that it has formed."""
    how = AllreduceOptions()
    how.reduceOp = ReduceOp.SUM
    manager._pg.allreduce([tensor], how).wait()


def plain():
    """The same step without torchft."""
    sums.copy_(gradient)
    add_up(sums)
    state.add_(sums, alpha=-0.1)


def half(live):
    """Microseconds of a step in a block that begins and ends on all replicas at once."""
    began = time.perf_counter()
    for _ in range(options.block):
        if live:
            assert step(), "disturbed"
        else:
            plain()
    add_up(torch.zeros(1))
    return (time.perf_counter() - began) * 1e6 / options.block


def both(pair):
    """[live, plain] in an order that is drawn by chance, the same on all replicas."""
    took = [0.0, 0.0]
    for turn in (0, 1):
        live = turn == random.Random(pair).randrange(2)
        took[0 if live else 1] = half(live)
    return took


if options.pairs:
    while world != options.replicas or manager.current_step() < 5:
        step()
    add_up(torch.zeros(1))
    began = time.perf_counter()
    for pair in range(FIRST):
        both(pair)
    fit = int(options.seconds * FIRST / (time.perf_counter() - began))
    # All do as many as the first one says.
    pairs = torch.tensor([float(min(max(fit, 1), options.pairs)) if manager.participating_rank() == 0 else 0.0])
    add_up(pairs)
    count = int(pairs.item())
    warm = min(count // 10, 100)
    times = [both(FIRST + pair) for pair in range(warm + count)][warm:]
    if manager.participating_rank() == 0:
        for live, plainly in times:
            note("pair", 0, live=round(live, 2), plain=round(plainly, 2))
    note("done", manager.current_step())
    # Until the bench ends all replicas together.
    time.sleep(600)
while True:
    before = manager.current_step()
    note("commit" if step() else "again", before)
