#!/usr/bin/env python3
"""Plain data-parallel training with PyTorch DDP, and three lines of Muster: it stops and goes on wherever nodes come and go.

    export PYTHONPATH=python    # for muster.py; or copy it beside your script
    muster run --nnodes 2:3 --store /shared/checkpoints examples/three_lines.py

Without `muster run` it is a plain script: `python examples/three_lines.py`, `torchrun --standalone --nproc-per-node 2 examples/three_lines.py`.
"""

import argparse
import gc
import os

import muster
import torch
import torch.distributed as dist
import torch.distributed.nn  # noqa: F401: imported later, it would hold the group for ever
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


def batch(step, size, rank, world):
    """This rank's part of a batch of made-up, learnable samples: a function of the step alone."""
    generator = torch.Generator().manual_seed(step)
    prototypes = torch.rand(10, 64, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(0, 10, (size,), generator=generator)
    features = prototypes[labels] + 0.3 * torch.randn(size, 64, generator=generator)
    return features[rank::world], labels[rank::world]


def main():
    parser = argparse.ArgumentParser(description="train a small classifier with DDP")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=96, help="samples a step, over all ranks")
    parser.add_argument("--print-every", type=int, default=100)
    args = parser.parse_args()

    os.environ.setdefault("RANK", "0"), os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1"), os.environ.setdefault("MASTER_PORT", "29500")
    dist.init_process_group("gloo")
    train(args)
    dist.barrier()
    # The model is gone now, and gloo's threads end with the group, while Python still runs: else PyTorch aborts now and then.
    gc.collect()
    dist.destroy_process_group()


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 10))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    job = muster.init(model=model, optimizer=optimizer, scheduler=scheduler, save_every=100)
    for step in job.steps(args.steps):
        features, labels = batch(step, args.batch, rank, world)
        loss = F.cross_entropy(model(features), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if rank == 0 and (step + 1) % args.print_every == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}, world {world}", flush=True)


if __name__ == "__main__":
    main()
