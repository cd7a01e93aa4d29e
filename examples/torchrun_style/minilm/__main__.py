"""A tiny character model: `python -m minilm`, to be started by a launcher that sets env:// variables.

Every variable of the contract is read by hand. Gradients are averaged by hand, without DDP. A rank that gets
SIGTERM saves at its next step and exits 0 by itself: nothing is agreed with the other ranks.
"""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

TEXT = (
    "a job is a chain of generations. a generation has members and ranks. when a member is lost, the others "
    "stop, agree on who is left, and start again from what was saved. when a member comes, it waits its turn. "
)

STEPS = int(os.environ.get("MINILM_STEPS", "200"))
SAVE_EVERY = int(os.environ.get("MINILM_SAVE_EVERY", "20"))
OUT_DIR = os.environ.get("MINILM_OUT_DIR", "minilm-out")
PAUSE = float(os.environ.get("MINILM_PAUSE", "0"))

terminate = False


def on_sigterm(signum, frame):
    global terminate
    terminate = True


def get_batch(ids, size, block, generator):
    starts = torch.randint(0, len(ids) - block - 1, (size,), generator=generator)
    x = torch.stack([ids[s : s + block] for s in starts])
    y = torch.stack([ids[s + 1 : s + block + 1] for s in starts])
    return x, y


class MiniLM(nn.Module):
    def __init__(self, vocabulary, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x):
        hidden, _ = self.rnn(self.embed(x))
        return self.head(hidden)


def main():
    ddp_rank = int(os.environ["RANK"])
    ddp_local_rank = int(os.environ["LOCAL_RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    master = f"{os.environ['MASTER_ADDR']}:{int(os.environ['MASTER_PORT'])}"
    master_process = ddp_rank == 0
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    device = f"cuda:{ddp_local_rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend=backend, init_method="env://", rank=ddp_rank, world_size=ddp_world_size)
    assert dist.get_rank() == ddp_rank and dist.get_world_size() == ddp_world_size
    if master_process:
        os.makedirs(OUT_DIR, exist_ok=True)
        print(f"world {ddp_world_size} at {master}, backend {backend}", flush=True)
    dist.barrier()
    signal.signal(signal.SIGTERM, on_sigterm)

    characters = sorted(set(TEXT))
    ids = torch.tensor([characters.index(c) for c in TEXT])
    torch.manual_seed(1337)
    model = MiniLM(len(characters)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1337 + ddp_rank)
    ckpt_path = os.path.join(OUT_DIR, "ckpt.pt")

    iter_num = 0
    if os.path.exists(ckpt_path):
        checkpoint = torch.load(ckpt_path, map_location=device, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        iter_num = checkpoint["iter_num"]
        if master_process:
            print(f"resuming from iter {iter_num}", flush=True)

    def save():
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num},
            ckpt_path + ".tmp",
        )
        os.replace(ckpt_path + ".tmp", ckpt_path)

    while iter_num < STEPS:
        if terminate:
            if master_process:
                save()
            print(f"rank {ddp_rank}: SIGTERM at iter {iter_num}, leaving", flush=True)
            sys.exit(0)
        x, y = get_batch(ids, 8, 32, generator)
        logits = model(x.to(device))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.to(device).flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ddp_world_size
        optimizer.step()
        iter_num += 1
        if master_process and iter_num % SAVE_EVERY == 0:
            save()
            print(f"iter {iter_num}: loss {loss.item():.4f}", flush=True)
        time.sleep(PAUSE)

    dist.barrier()
    dist.destroy_process_group()
    if master_process:
        print(f"done at iter {iter_num}", flush=True)


if __name__ == "__main__":
    main()
