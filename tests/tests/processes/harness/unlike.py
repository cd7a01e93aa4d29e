"""Two ranks with muster.py that do not hold the same, for tests.

    unlike.py WHAT STEPS SAVE_EVERY

WHAT is how they differ: `layer`: rank 1 has a layer more; `branch`: each trains another branch, so that its optimizer has state for other
parameters of equal size; `experts`: tensors of the same names and shapes with other values; `parts`: the same as shards; `buffers`:
only in what a model does not train, and in random numbers, which is as it should be; `leaves`: rank 1 ends with 0 in step 8. Says what each
rank begins with.
"""

import os
import sys
import time

import muster
import torch
import torch.distributed as dist

WHAT, STEPS, SAVE_EVERY = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main():
    torch.set_num_threads(1)
    torch.manual_seed(3)
    layers = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)]
    if WHAT == "layer" and RANK == 1:
        layers.append(torch.nn.Linear(8, 8))
    if WHAT == "buffers":
        layers.append(torch.nn.BatchNorm1d(8))
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    expert = torch.full((4, 4), float(RANK))
    state = {"expert": expert} if WHAT == "experts" else {}
    if WHAT == "parts":
        dist.init_process_group("gloo")
        state = {"expert": muster.Shard(expert[None], (WORLD, 4, 4), (RANK, 0, 0))}
    if WHAT == "buffers":
        torch.manual_seed(RANK)
        model[-1].running_mean.fill_(RANK)

    job = muster.init(model=model, optimizer=optimizer, state=state, save_every=SAVE_EVERY)
    print(f"rank {RANK} begins at {job.start} with {expert[0, 0].item()}", flush=True)
    # Each rank's own end of training, of which the others do not know.
    for step in job.steps(STEPS + RANK if WHAT == "ends" else STEPS):
        if WHAT == "leaves" and RANK == 1 and step == 8:
            sys.exit(0)
        optimizer.zero_grad()
        if WHAT == "branch":
            model[RANK](torch.ones(2, 8)).sum().backward()
        else:
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        expert += 1
        time.sleep(0.02)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
