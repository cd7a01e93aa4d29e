"""What `gpu` starts: a GPT with AdamW, the same arithmetic each time. A JSON line for each step, with the loss bit for bit."""

import argparse
import json
import os
import shutil
import signal
import time

BEGAN = time.time()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import muster  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

VOCABULARY = 4096
parser = argparse.ArgumentParser()
parser.add_argument("--out", required=True)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--save-every", type=int, default=10)
parser.add_argument("--pause", type=float, default=0.0, help="seconds behind each step")
parser.add_argument("--fault", choices=("kill", "hang"), help="once, at --at, on the last rank")
parser.add_argument("--at", type=int, default=-1)
parser.add_argument("--peers", help="at the end: save here as PyTorch does, three times each way")
args = parser.parse_args()

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()) if gpu else torch.device("cpu")
if gpu:
    torch.cuda.set_device(device)
own = gpu and world <= torch.cuda.device_count()
# NCCL refuses two ranks of one GPU.
dist.init_process_group("cpu:gloo,cuda:nccl" if own else "gloo")
torch.use_deterministic_algorithms(True)
torch.manual_seed(1)


def wait():
    if gpu:
        torch.cuda.synchronize()


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        block = dict(dropout=0.1, batch_first=True, norm_first=True)
        heads, width = max(1, args.width // 64), args.width
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, heads, 4 * width, **block) for _ in range(args.layers))
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


net = Gpt().to(device)
model = nn.parallel.DistributedDataParallel(net, device_ids=[device.index] if own else None)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
job = muster.init(model=model, optimizer=optimizer, save_every=args.save_every)
out = open(f"{args.out}.{rank}", "a", buffering=1, encoding="utf-8")


def note(**fields):
    out.write(json.dumps({"t": time.time(), **fields}) + "\n")


note(start=job.start, began=BEGAN, parameters=sum(p.numel() for p in net.parameters()))
for step in job.steps(args.steps):
    note(boundary=step)
    mark = f"{args.out}.fault"
    if args.fault and step == args.at and rank == world - 1 and not os.path.exists(mark):
        with open(mark, "w", encoding="utf-8") as file:
            file.write(str(time.time()))
        if args.fault == "kill":
            wait()
            os.kill(os.getpid(), signal.SIGKILL)
        while gpu:
            torch.cuda._sleep(2_000_000_000_000)
            wait()
        time.sleep(3600)
    batch = torch.randint(0, VOCABULARY, (8, 129), generator=torch.Generator().manual_seed(step)).to(device)
    loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    value = loss.item()
    wait()
    note(step=step, loss=value.hex())
    time.sleep(args.pause)


def timed(way, save):
    """How long the training waits, three times; the first has what is made once."""
    for _ in range(3):
        wait()
        began = time.time()
        pending = save({"model": net.state_dict(), "optimizer": optimizer.state_dict()})
        note(peer=way, seconds=time.time() - began)
        if pending is not None:
            pending.result()
        shutil.rmtree(args.peers)
        os.mkdir(args.peers)


if args.peers and rank == 0:
    import torch.distributed.checkpoint as dcp

    timed("torch.save", lambda state: torch.save(state, f"{args.peers}/one.pt"))
    timed("dcp.async_save", lambda state: dcp.async_save(state, checkpoint_id=f"{args.peers}/{time.time_ns()}"))
dist.destroy_process_group()
