"""The compression bench's side of PyTorch: the counterpart of runtime/examples/compression.rs, one thread.

`make FILE...` writes values to choose from: a bell, and one of few different values with NaN and infinity among them.
`check VALUES CHOSEN` exits 0 if the places are exactly the largest by absolute: of equal ones the first, NaN above
infinity, infinity above all numbers.
"""

import json
import math
import sys
import time

import torch

torch.set_num_threads(1)
torch.manual_seed(1)
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}


def values(length):
    return torch.randn(length)


def narrowing(what, length):
    given, to = values(length), torch.empty(length, dtype=DTYPES[what])
    return lambda: to.copy_(given)


def widening(what, length):
    given, to = values(length).to(DTYPES[what]), torch.empty(length)
    return lambda: to.copy_(given)


def topk(length):
    given, count = values(length), math.ceil(length / 100)

    def run():
        _, places = torch.topk(given.abs(), count, sorted=False)
        return given.gather(0, places)

    return run


def topk_step(length):
    """With a residual, and the sum as a dense vector."""
    given, residual, count = values(length), torch.zeros(length), math.ceil(length / 100)
    total = torch.empty(length)

    def run():
        residual.add_(given)
        _, places = torch.topk(residual.abs(), count, sorted=False)
        sent = residual.gather(0, places)
        residual.index_fill_(0, places, 0.0)
        total.zero_().index_add_(0, places, sent)

    return run


def int8_step(length, block=256):
    """Rounded, summed, and the sum rounded again, as each rank does with its part."""
    given = values(length).view(-1, block)

    def encode(matrix):
        scale = matrix.abs().amax(dim=1, keepdim=True).div_(127.0)
        return (matrix / scale).round_().to(torch.int8), scale

    def decode(coded, scale):
        return coded.to(torch.float32).mul_(scale)

    return lambda: decode(*encode(decode(*encode(given))))


def powersgd_step(length, rank=4):
    side = math.isqrt(length)
    given, residual = values(side * side).view(side, side), torch.zeros(side, side)
    state = {"q": torch.linalg.qr(torch.randn(side, rank))[0]}

    def run():
        residual.add_(given)
        p = torch.linalg.qr(residual @ state["q"])[0]
        q = residual.t() @ p
        residual.sub_(p @ q.t())
        result = p @ q.t()
        state["q"] = torch.linalg.qr(q)[0]
        return result

    return run


def prepared(what, length):
    name, _, dtype = what.partition("-")
    if name in ("narrow", "widen"):
        return (narrowing if name == "narrow" else widening)(dtype, length)
    return {"topk": topk, "topk-step": topk_step, "int8-step": int8_step, "powersgd-step": powersgd_step}[what](length)


def check(path, chosen_path):
    given = torch.from_file(path, dtype=torch.int32, size=size_of(path))
    chosen = torch.from_file(chosen_path, dtype=torch.int32, size=size_of(chosen_path)).to(torch.int64)
    # Bits without the sign order NaN above infinity above all numbers; a stable sort keeps equal ones in order.
    order = torch.sort(given & 0x7FFFFFFF, descending=True, stable=True)[1]
    expected = torch.sort(order[: math.ceil(given.numel() / 100)])[0]
    return 0 if torch.equal(expected, chosen) else 1


def size_of(path):
    with open(path, "rb") as file:
        return file.seek(0, 2) // 4


def main():
    if sys.argv[1] == "check":
        return check(*sys.argv[2:])
    if sys.argv[1] == "make":
        bell, odd, length = sys.argv[2], sys.argv[3], int(sys.argv[4])
        values(length).numpy().tofile(bell)
        few = (values(length) * 2).round_()
        few[:: length // 7] = float("nan")
        few[3 :: length // 9] = float("-inf")
        few.numpy().tofile(odd)
        return 0
    for case in sys.argv[1:]:
        what, length, repeats = case.split(":")
        work, repeats = prepared(what, int(length)), int(repeats)
        for _ in range(-(-repeats // 5)):
            work()
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            work()
            times.append((time.perf_counter() - began) * 1e6)
        times.sort()
        print(json.dumps({"case": f"{what}:{length}", "median": times[len(times) // 2], "least": times[0]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
