#!/usr/bin/env python3
"""Data-parallel training of a small classifier with PyTorch DDP.

A plain script for any launcher that gives torchrun's environment:

    torchrun --nnodes 2:3 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:PORT examples/ddp.py
    muster run --nnodes 2:3 --nproc-per-node 1 --rdzv-endpoint HOST:PORT -- python examples/ddp.py

It reads nothing else from its launcher. It resumes from the newest checkpoint in --checkpoint-dir, whatever the
world size was when that was written, because the global batch depends on the step alone.
"""

import argparse
import gc
import json
import os
import signal
import socket
import sys
import time


def parse_args():
    parser = argparse.ArgumentParser(description="train a small classifier with DDP")
    parser.add_argument("--data", help="CSV of features and, last, a label (default: made-up digits)")
    parser.add_argument("--steps", type=int, default=1000, help="optimizer steps in all")
    parser.add_argument("--batch", type=int, default=96, help="samples a step, over all ranks")
    parser.add_argument("--hidden", type=int, default=64, help="width of the hidden layer")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="pause after each step, to look like a larger model")
    parser.add_argument("--checkpoint-dir", default="checkpoints", help="shared by all nodes")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=3, help="checkpoints kept")
    parser.add_argument("--events", help="append JSON lines of what happens, with time.time_ns(), to this file")
    return parser.parse_args()


class Events:
    """Appends one JSON object a line. One write each, so that ranks may share a file on one host."""

    def __init__(self, path):
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if path else None
        self.common = {
            "pid": os.getpid(),
            "node": os.environ.get("NODE_NAME", socket.gethostname()),
            "rank": int(os.environ["RANK"]),
            "local_rank": int(os.environ["LOCAL_RANK"]),
            "world": int(os.environ["WORLD_SIZE"]),
            "restart": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        }

    def __call__(self, event, **fields):
        if self.file is not None:
            line = {"event": event, "t": time.time_ns(), **self.common, **fields}
            os.write(self.file, (json.dumps(line) + "\n").encode())


ARGS = parse_args()
EVENTS = Events(ARGS.events)
EVENTS("start", master=os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"])

# Importing torch takes longer than everything else before the first step: the start is noted before it.
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.nn  # noqa: E402, F401: imported later, it would hold the group for ever
import torch.nn.functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def load_data(path, seed):
    """Features in [0, 1] and labels 0 to 9; made up, but learnable, when there is no file."""
    if path:
        with open(path, encoding="utf-8") as file:
            rows = [[float(x) for x in line.split(",")] for line in file if line[:1].isdigit()]
        table = torch.tensor(rows)
        features, labels = table[:, :-1], table[:, -1].long()
        return features / features.max().clamp(min=1.0), labels
    generator = torch.Generator().manual_seed(seed)
    prototypes = torch.rand(10, 64, generator=generator)
    labels = torch.randint(0, 10, (1800,), generator=generator)
    features = prototypes[labels] + 0.3 * torch.randn(1800, 64, generator=generator)
    return features.clamp(0.0, 1.0), labels


def batch_indices(step, samples, batch, seed):
    """The global batch of a step: a function of the step alone, so that it does not change with the world size."""
    per_epoch = samples // batch
    epoch, index = divmod(step, per_epoch)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
    return order[index * batch : (index + 1) * batch]


def checkpoints(directory):
    """Steps that have a checkpoint, oldest first."""
    names = os.listdir(directory) if os.path.isdir(directory) else []
    return sorted(int(n[5:-3]) for n in names if n.startswith("step-") and n.endswith(".pt"))


def checkpoint_path(directory, step):
    return os.path.join(directory, f"step-{step}.pt")


def save(directory, step, model, optimizer, keep):
    """Writes beside the target, makes it durable, then renames: a reader sees a whole checkpoint or none."""
    os.makedirs(directory, exist_ok=True)
    path = checkpoint_path(directory, step)
    temporary = f"{path}.tmp-{os.getpid()}"
    with open(temporary, "wb") as file:
        torch.save({"step": step, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(directory, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    for old in checkpoints(directory)[:-keep]:
        os.remove(checkpoint_path(directory, old))


def resume(directory, model, optimizer, device):
    """Loads what rank 0 sees as the newest checkpoint on every rank. Returns the step to go on from."""
    found = checkpoints(directory) if dist.get_rank() == 0 else []
    newest = torch.tensor([found[-1] if found else 0], dtype=torch.int64, device=device)
    dist.broadcast(newest, src=0)
    step = int(newest.item())
    if step > 0:
        state = torch.load(checkpoint_path(directory, step), map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    return step


def main():
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")

    # Roll call: how many are we, and when did rank 0 call. The second number is the same on all ranks of this group only.
    call = torch.tensor([1, time.time_ns() if rank == 0 else 0], dtype=torch.int64, device=device)
    dist.all_reduce(call)
    present, group = call.tolist()
    if present != world:
        raise RuntimeError(f"WORLD_SIZE is {world}, but {present} ranks answered")
    EVENTS("first_allreduce", group=group)

    features, labels = load_data(ARGS.data, ARGS.seed)
    features, labels = features.to(device), labels.to(device)
    torch.manual_seed(ARGS.seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(features.shape[1], ARGS.hidden), torch.nn.ReLU(), torch.nn.Linear(ARGS.hidden, 10)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=ARGS.lr, momentum=0.9)
    step = resume(ARGS.checkpoint_dir, model, optimizer, device)
    EVENTS("resumed", group=group, step=step)
    model = DistributedDataParallel(model, device_ids=[local_rank] if cuda else None)

    stop_asked = False

    def ask_to_stop(_signal, _frame):
        nonlocal stop_asked
        stop_asked = True

    signal.signal(signal.SIGTERM, ask_to_stop)

    stopped = False
    while step < ARGS.steps and not stopped:
        mine = batch_indices(step, len(labels), ARGS.batch, ARGS.seed)[rank::world].to(device)
        loss = F.cross_entropy(model(features[mine]), labels[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        EVENTS("step", group=group, step=step, loss=round(loss.item(), 5))

        # One rank may have been told to stop and another not yet: all of them stop at the same step.
        flag = torch.tensor([int(stop_asked)], device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        stopped = bool(flag.item())
        if step % ARGS.save_every == 0 or stopped or step == ARGS.steps:
            if rank == 0:
                save(ARGS.checkpoint_dir, step, model, optimizer, ARGS.keep)
                EVENTS("saved", group=group, step=step)
            dist.barrier()
        if ARGS.step_seconds and not stopped:
            time.sleep(ARGS.step_seconds)

    if rank == 0:
        with torch.no_grad():
            accuracy = (model.module(features).argmax(1) == labels).float().mean().item()
        print(f"step {step}: accuracy {accuracy:.4f}, world {world}", flush=True)
    EVENTS("stop", group=group, step=step, finished=step >= ARGS.steps)
    dist.barrier()  # nobody leaves while another still talks to it
    # The model holds the group, and a thread of gloo may still hold a tensor. Such a thread must end while Python runs:
    # else PyTorch aborts or hangs now and then, after all work is done.
    del model
    gc.collect()
    dist.destroy_process_group()
    if step < ARGS.steps:
        sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
