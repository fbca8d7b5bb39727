#!/usr/bin/env python3
"""All-reduces of PyTorch's symmetric memory, beside those of package lowlatency.

    python3 symmetric_torch.py -n 4 --min 1K --max 10M --factor 4 > symmetric.jsonl

Measures one_shot_all_reduce_out and two_shot_all_reduce_ as nccl_torch.py measures
collectives: processes, CUDA graphs and calls back to back, whichever is faster. The
operands are in symmetric memory, where these kernels want them; the result of the
one-shot is in ordinary memory.
"""

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from nccl_torch import Case, arguments, measure, report
from ranks import join, sizes, spawn

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class Shot(Case):
    """One of the two kernels, on an operand of one type and size."""

    def __init__(self, way, dtype, rank, ranks, size):
        super().__init__("allreduce", rank, ranks, 4)
        self.way, self.group = way, dist.group.WORLD.group_name
        self.count = max(1, size // DTYPES[dtype].itemsize)
        self.bytes = self.count * DTYPES[dtype].itemsize
        self.src = symmetric.empty(
            self.count, dtype=DTYPES[dtype], device=torch.device("cuda", rank)
        ).zero_()
        symmetric.rendezvous(self.src, self.group)
        self.dst = self.src if way == "two-shot" else torch.zeros_like(self.src)

    def call(self):
        if self.way == "two-shot":
            torch.ops.symm_mem.two_shot_all_reduce_(self.src, "sum", self.group)
        else:
            torch.ops.symm_mem.one_shot_all_reduce_out(self.src, "sum", self.group, self.dst)

    def operand(self, rank):
        return super().operand(rank).to(self.src.dtype)


def shots(rank, args):
    for dtype in DTYPES:
        for size in sizes(args):
            for way in ("one-shot", "two-shot"):
                yield measure(Shot(way, dtype, rank, args.n, size), args) | {
                    "backend": "symmetric memory (torch)",
                    "algorithm": way,
                    "dtype": dtype,
                    "inplace": way == "two-shot",
                    "alloc": True,
                }


def run(rank, args, port):
    join(rank, args.n, port)
    report(rank, shots(rank, args))


if __name__ == "__main__":
    spawn(run, arguments())
