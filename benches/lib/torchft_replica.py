"""One replica of the regroup bench with torchft: the counterpart of runtime/examples/live_steps.rs."""

import argparse
import json
import logging
import os
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
parser.add_argument("--timeout", type=float, default=60.0)
options = parser.parse_args()

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


def plain():
    """The same without torchft, on the process group that it has formed."""
    sums.copy_(gradient)
    how = AllreduceOptions()
    how.reduceOp = ReduceOp.SUM
    manager._pg.allreduce([sums], how).wait()
    state.add_(sums, alpha=-0.1)


if options.pairs:
    while world != options.replicas or manager.current_step() < 5:
        step()
    times = []
    for pair in range(options.pairs + options.pairs // 10):
        took = [0.0, 0.0]
        for turn in (0, 1):
            live = (turn + pair) % 2 == 0
            began = time.perf_counter()
            if live:
                assert step(), "disturbed"
            else:
                plain()
            took[0 if live else 1] = (time.perf_counter() - began) * 1e6
        if pair >= options.pairs // 10:
            times.append(took)
    if manager.participating_rank() == 0:
        for live, plainly in times:
            note("pair", 0, live=round(live, 2), plain=round(plainly, 2))
    note("done", manager.current_step())
    # Until the bench ends all replicas together.
    time.sleep(600)
while True:
    before = manager.current_step()
    note("commit" if step() else "again", before)
