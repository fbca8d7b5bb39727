#!/usr/bin/env python3
"""Collectives of PyTorch's NCCL backend on GPUs, beside `euryale bench --backend nccl`.

    python3 nccl_torch.py -n 4 --collective allreduce,allgather --max 1G > torch.jsonl

Starts n processes of this machine, one for each GPU, that meet on 127.0.0.1, and
writes one JSON line for each collective and size, with the keys of
`euryale bench --json`. Two ways of launching are measured, and `stream_us` is the
faster one: calls captured in a CUDA graph that is replayed (`graph_us`), which
costs the host next to nothing, and calls back to back (`eager_us`). Times are by
the GPU's events around batches, medians of `--batches`, of the slowest rank.
Buffers are apart, f32, zeros while they are timed; then one call on small
integers is compared element by element.
"""

import argparse
import json
import statistics
import sys

import torch
import torch.distributed as dist

from ranks import add_sizes, are_sizes, join, sizes, spawn

KINDS = [
    "allreduce",
    "reducescatter",
    "allgather",
    "alltoall",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
]
WHOLE = {"allreduce", "broadcast", "reduce"}  # their buffers hold no chunks


def arguments():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "-n", type=int, default=torch.cuda.device_count(), help="processes, one for each GPU"
    )
    p.add_argument("--collective", default=",".join(KINDS), help="some of %s" % ",".join(KINDS))
    add_sizes(p, largest=1 << 30, factor=4)
    p.add_argument("--batches", type=int, default=15, help="batches of each way")
    args = p.parse_args()
    args.collective = args.collective.split(",")
    if not are_sizes(args) or not set(args.collective) <= set(KINDS):
        p.error("want -n >= 1, 1 <= --min <= --max, --factor >= 2, and known collectives")
    return args


class Case:
    """One collective of one size: its buffers, the call, and what comes of it."""

    def __init__(self, kind, rank, ranks, size):
        self.kind, self.rank, self.ranks = kind, rank, ranks
        self.count = max(
            1, size // 4 // (1 if kind in WHOLE else ranks)
        )  # of the buffer, or of a chunk
        whole = self.count * (1 if kind in WHOLE else ranks)
        self.bytes = whole * 4
        src = whole if kind in WHOLE | {"reducescatter", "alltoall", "scatter"} else self.count
        dst = whole if kind in WHOLE | {"allgather", "alltoall", "gather"} else self.count
        self.src = torch.zeros(src, device="cuda")
        self.dst = self.src if kind in WHOLE else torch.zeros(dst, device="cuda")
        self.chunks = None
        if rank == 0 and kind == "gather":
            self.chunks = list(self.dst.chunk(ranks))
        if rank == 0 and kind == "scatter":
            self.chunks = list(self.src.chunk(ranks))

    def call(self):
        k = self.kind
        if k == "allreduce":
            dist.all_reduce(self.dst)
        elif k == "reducescatter":
            dist.reduce_scatter_tensor(self.dst, self.src)
        elif k == "allgather":
            dist.all_gather_into_tensor(self.dst, self.src)
        elif k == "alltoall":
            dist.all_to_all_single(self.dst, self.src)
        elif k == "broadcast":
            dist.broadcast(self.dst, src=0)
        elif k == "reduce":
            dist.reduce(self.dst, dst=0)
        elif k == "gather":
            dist.gather(self.src, self.chunks, dst=0)
        else:
            dist.scatter(self.dst, self.chunks, src=0)

    def operand(self, rank):
        return ((torch.arange(self.src.numel(), device="cuda") % 997 + rank * 5) % 7).float()

    def want(self):
        k, r, n = self.kind, self.rank, self.count
        xs = [self.operand(s) for s in range(self.ranks)]
        if k == "allreduce" or k == "reduce" and r == 0:
            return sum(xs)
        if k == "reducescatter":
            return sum(xs)[r * n : (r + 1) * n]
        if k == "allgather" or k == "gather" and r == 0:
            return torch.cat(xs)
        if k == "alltoall":
            return torch.cat([x[r * n : (r + 1) * n] for x in xs])
        if k == "broadcast":
            return xs[0]
        if k == "scatter":
            return xs[0][r * n : (r + 1) * n]
        return None

    def wrong(self):
        self.src.copy_(self.operand(self.rank))
        self.call()
        want = self.want()
        bad = 0 if want is None else (self.dst != want).sum().item()
        t = torch.tensor([float(bad)], device="cuda")
        dist.all_reduce(t)
        return int(t.item())


def batches(times, calls, run):
    """Times of one call in microseconds, by events around run, which makes calls of them."""
    out = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        dist.barrier()
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        out.append(begin.elapsed_time(end) * 1e3 / calls)
    return out


def slowest(value):
    t = torch.tensor([value], device="cuda", dtype=torch.float64)
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return t.item()


def measure(case, args):
    calls = 50 if case.bytes <= 1 << 20 else 20 if case.bytes <= 64 << 20 else 4

    def loop():
        for _ in range(calls):
            case.call()

    loop()
    torch.cuda.synchronize()
    eager = slowest(statistics.median(batches(args.batches, calls, loop)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loop()
    graph.replay()
    torch.cuda.synchronize()
    replayed = slowest(statistics.median(batches(args.batches, calls, graph.replay)))
    stream = min(eager, replayed)
    return {
        "collective": case.kind,
        "backend": "nccl (torch)",
        "ranks": args.n,
        "dtype": "f32",
        "bytes": case.bytes,
        "p50_us": round(stream, 4),
        "stream_us": round(stream, 4),
        "graph_us": round(replayed, 4),
        "eager_us": round(eager, 4),
        "algbw_gbps": round(case.bytes / stream / 1e3, 4),
        "wrong": case.wrong(),
        "iters": calls * args.batches,
        "inplace": case.kind in WHOLE,
        "inproc": False,
        "device": torch.cuda.get_device_name(),
        "version": "torch %s, NCCL %s"
        % (torch.__version__, ".".join(map(str, torch.cuda.nccl.version()))),
    }


def run(rank, args, port):
    join(rank, args.n, port)
    collectives = (
        Case(kind, rank, args.n, size) for kind in args.collective for size in sizes(args)
    )
    report(rank, (measure(case, args) for case in collectives))


def report(rank, results):
    """Writes a rank's results, and ends with it."""
    wrong = 0
    for result in results:
        wrong += result["wrong"]
        if rank == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    spawn(run, arguments())
