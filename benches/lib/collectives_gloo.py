"""One rank of the collectives bench with PyTorch's gloo: the counterpart of runtime/examples/collectives.rs."""

import json
import sys
import time

import torch
import torch.distributed as dist


def operation_of(name, size, rank, world):
    elements = size // 4
    if name == "all_to_all":
        elements += -elements % world
    tensor = torch.ones(elements)
    if name == "all_reduce":
        return lambda: dist.all_reduce(tensor)
    if name == "broadcast":
        return lambda: dist.broadcast(tensor, 0)
    if name == "barrier":
        return dist.barrier
    if name == "all_gather":
        out = torch.empty(elements * world)
        return lambda: dist.all_gather_into_tensor(out, tensor)
    if name == "reduce_scatter":
        out = torch.empty(elements // world)
        even = tensor[: elements // world * world]
        return lambda: dist.reduce_scatter_tensor(out, even)
    if name == "all_to_all":
        out = torch.empty(elements)
        return lambda: dist.all_to_all_single(out, tensor)
    raise ValueError(name)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for case in sys.argv[1:]:
        name, size, iterations = case.split(":")
        operation = operation_of(name, int(size), rank, world)
        iterations = int(iterations)
        try:
            for _ in range(-(-iterations // 5)):
                operation()
        except (RuntimeError, NotImplementedError) as error:
            if rank == 0:
                print(json.dumps({"case": f"{name}:{size}", "failed": str(error)[:200]}), flush=True)
            continue
        dist.barrier()
        times = []
        for _ in range(iterations):
            began = time.perf_counter()
            operation()
            times.append((time.perf_counter() - began) * 1e6)
            # In place, so that the values would grow without end.
        times.sort()
        if rank == 0:
            line = {"case": f"{name}:{size}", "median": times[len(times) // 2], "least": times[0]}
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
