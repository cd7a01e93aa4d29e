"""A DDP script with muster.py for tests: notes what worker.py notes, and what each rank's state is before and after each step.

    trainer.py EVENTS CONTROL STEPS SAVE_EVERY [--shards] [--evaluate]

`begin` is noted before a rank's first step, `done` after each; their digest is of all that is the same on every rank, so equal ones are
equal bit for bit. With --shards the state has a tensor of which each rank has some rows. With --evaluate the state before step 20 is the best. Exits with the number in CONTROL/exit, if it is there.
"""

import gc
import hashlib
import json
import os
import sys
import time

EVENTS, CONTROL = sys.argv[1:3]
STEPS, SAVE_EVERY = int(sys.argv[3]), int(sys.argv[4])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
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
STEP_TIME = 0.02
ROWS = 60


def note(event, **fields):
    line = {"event": event, "t": time.time_ns(), **COMMON, **fields}
    os.write(LOG, (json.dumps(line) + "\n").encode())


note("start")

import muster  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.nn  # noqa: E402, F401: imported later, it would hold the group for ever
import torch.nn.functional as F  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def feed(digest, value):
    if isinstance(value, torch.Tensor):
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b"empty")
    elif isinstance(value, dict):
        for key, item in value.items():
            digest.update(repr(key).encode())
            feed(digest, item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            feed(digest, item)
    else:
        digest.update(repr(value).encode())


def main():
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(RANK)
    data = torch.randn(240, 16, generator=torch.Generator().manual_seed(4))
    labels = data[:, :4].argmax(1)
    module = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 4)
    )
    model = DistributedDataParallel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [40, 80], gamma=0.5)
    sampler = muster.ElasticSampler(data, 24, seed=3)
    own = {"trail": [], "ema": torch.zeros(4, 32, dtype=torch.bfloat16)}
    rows = ROWS // WORLD
    mine = torch.full((rows, 3), -1, dtype=torch.int64)
    shards = {"rows": muster.Shard(mine, (ROWS, 3), (RANK * rows, 0))} if "--shards" in sys.argv else {}

    job = muster.init(model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler, own=own, shards=shards, save_every=SAVE_EVERY)

    def state():
        digest = hashlib.sha256()
        feed(digest, [dict(module.named_parameters()), optimizer.state_dict(), scheduler.state_dict(), own])
        return digest.hexdigest()

    def batches():
        while True:
            yield from torch.utils.data.DataLoader(list(zip(data, labels)), batch_sampler=sampler)

    source = batches()
    for step in job.steps(STEPS):
        if step == job.start:
            expected = (torch.arange(RANK * rows, (RANK + 1) * rows)[:, None] * 3 + torch.arange(3)) * step if step and shards else mine
            assert torch.equal(mine, expected), f"rows of step {step}: {mine}"
            note("begin", step=step, digest=state())
        features, target = next(source)
        loss = F.cross_entropy(model(features), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        own["trail"] = own["trail"][-3:] + [step]
        own["ema"].lerp_(module[4].weight.detach().to(torch.bfloat16), 0.25)
        mine.copy_((torch.arange(RANK * rows, (RANK + 1) * rows)[:, None] * 3 + torch.arange(3)) * (step + 1))
        job.report(loss=loss.item(), lr=scheduler.get_last_lr()[0])
        if "--evaluate" in sys.argv:
            job.evaluated(loss=abs(step + 1 - 20), other=float("nan"))
        note("done", step=step, digest=state())
        leave = os.path.join(CONTROL, "exit")
        if os.path.exists(leave):
            with open(leave, encoding="ascii") as file:
                sys.exit(int(file.read()))
        time.sleep(STEP_TIME)
    note("finished", step=STEPS, digest=state())
    dist.barrier()
    del model, job
    gc.collect()
    dist.destroy_process_group()  # the last that holds the group: gloo's threads end while Python still runs


if __name__ == "__main__":
    main()
