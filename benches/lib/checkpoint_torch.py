"""One rank of a peer in the bench `checkpoint`: PyTorch's own ways to save and to load, told what to do through a fifo.

    checkpoint_torch.py METHOD --rank R --world W --port P --directory D --bytes N --go FIFO --log FILE

Lines `change` (before each other line), `save NAME` and `load NAME`. Saving methods: torch.save, dcp.save-1, dcp.save-2, async-thread, async-process, async-shared,
async-kept (async-shared with a stager that is not closed after each save: a patch). `load` takes what dcp.save wrote into a state
that is sharded over the ranks.
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

TENSORS, ROWS = 64, 12


class Log:
    def __init__(self, path):
        self.file = open(path, "a", encoding="utf-8", buffering=1)

    def note(self, event, step, **more):
        print(json.dumps({"event": event, "t": time.time_ns(), "step": step, **more}), file=self.file)


def make_state(options, sharded):
    """About `bytes` a rank: rows of 64 tensors; of the same kind as the runtime's bench has."""
    columns = max(1024, options.bytes * options.world // (TENSORS * ROWS * 4)) // 1024 * 1024
    generator = torch.Generator().manual_seed(options.rank)
    rows = ROWS // options.world
    parts = {}
    for index in range(TENSORS):
        words = torch.empty(rows * columns // 2, dtype=torch.int64).random_(generator=generator)
        parts[f"t{index:02}"] = words.view(torch.float32).view(rows, columns)
    if not sharded:
        return {f"{name}.{options.rank}": part for name, part in parts.items()}, parts
    mesh = init_device_mesh("cpu", (options.world,))
    return {name: DTensor.from_local(part, mesh, [Shard(0)]) for name, part in parts.items()}, parts


def change(parts, step):
    for part in parts.values():
        part.view(torch.int64).add_(2 * step + 1)


class KeptStager(DefaultStager):
    """Keeps its memory from save to save: as shipped it gives it back after each one."""

    def __init__(self, options):
        super().__init__(options)
        self._state_dict_stager.close = lambda: None


class Saves:
    def __init__(self, method, state, options):
        self.method, self.state, self.options = method, state, options
        self.future = None
        self.stager = None
        kinds = {"async-thread": AsyncCheckpointerType.THREAD}
        self.kind = kinds.get(method, AsyncCheckpointerType.PROCESS)

    def begin(self, path):
        """Returns when training may go on."""
        writer = dcp.FileSystemWriter(path, thread_count=2 if self.method == "dcp.save-2" else 1)
        if self.method == "torch.save":
            os.makedirs(path, exist_ok=True)
            name = os.path.join(path, f"rank{self.options.rank}.pt")
            with open(name, "wb") as file:
                torch.save(self.state, file)
                file.flush()
                os.fsync(file.fileno())
        elif self.method.startswith("dcp.save"):
            dcp.save(self.state, storage_writer=writer)
        else:
            more = {}
            if self.method in ("async-shared", "async-kept"):
                plain = StagingOptions(use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False)
                if self.method == "async-shared":
                    more["async_stager"] = DefaultStager(plain)
                else:
                    self.stager = self.stager or KeptStager(plain)
                    more["async_stager"] = self.stager
            self.future = dcp.async_save(self.state, storage_writer=writer, async_checkpointer_type=self.kind, **more)

    def finish(self):
        future, self.future = self.future, None
        if future is not None:
            getattr(future, "upload_completion", future).result()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("method")
    for name, kind in [("rank", int), ("world", int), ("port", int), ("directory", str), ("bytes", int), ("go", str), ("log", str)]:
        parser.add_argument(f"--{name}", type=kind, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=options.rank, world_size=options.world)
    log = Log(f"{options.log}.{options.rank}")
    state, parts = make_state(options, options.method in ("load", "sharded"))
    saves = Saves("dcp.save-2" if options.method == "sharded" else options.method, state, options)
    log.note("ready", 0)
    with open(f"{options.go}.{options.rank}", encoding="utf-8") as fifo:
        step = 0
        for line in iter(fifo.readline, ""):
            what, *name = line.split()
            if what == "change":
                step += 1
                change(parts, step)
                log.note("changed", step)
                continue
            path = os.path.join(options.directory, *name)
            if what == "load":
                dist.barrier()
                log.note("request", step)
                began = time.monotonic()
                dcp.load(state, checkpoint_id=path)
                log.note("loaded", step, took=time.monotonic() - began)
                continue
            dist.barrier()
            log.note("request", step)
            began = time.monotonic()
            saves.begin(path)
            log.note("saved", step, stall=time.monotonic() - began, bytes=sum(part.numel() * 4 for part in parts.values()))
            saves.finish()
            log.note("durable", step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
