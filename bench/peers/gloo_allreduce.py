#!/usr/bin/env python3
"""All-reduce of PyTorch's Gloo backend, measured as `euryale bench` measures.

    python3 gloo_allreduce.py -n 4 --min 1K --max 64M > gloo-4.jsonl

Starts n processes of this machine that meet on 127.0.0.1 and writes one JSON
line for each size, with the keys of `euryale bench --json`. It measures
as the Go package bench does: ten calls to choose how many to time, a fifth of that
number to warm up further, then calls back to back on zeros, in place (there is
no other way here); p50 and p99 over the calls of rank 0 by the nearest-rank
rule, the mean of the slowest rank, bandwidth from the mean; afterwards one call
on small integers, whose result is compared element by element.
"""

import argparse
import json
import math
import os
import platform
import sys
import time

import torch
import torch.distributed as dist

from ranks import add_sizes, are_sizes, join, sizes, spawn

PROBES = 5
MIN_ITERS, MAX_ITERS = 20, 20000
DTYPES = {
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i32": torch.int32,
    "i64": torch.int64,
    "u8": torch.uint8,
}


def arguments():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("-n", type=int, default=2, help="processes")
    p.add_argument("--dtype", choices=DTYPES, default="f32")
    add_sizes(p, largest=64 << 20, factor=2)
    p.add_argument("--iters", type=int, default=0, help="timed calls; 0: as many as fit --time")
    p.add_argument("--time", type=float, default=0.3, help="seconds for the timed calls of a size")
    args = p.parse_args()
    if not are_sizes(args) or not 0 <= args.iters <= MAX_ITERS:
        p.error(
            "want -n >= 1, 1 <= --min <= --max, --factor >= 2, --iters from 0 to %d" % MAX_ITERS
        )
    return args


def timed(buffer, iters):
    """Runs calls back to back and returns the seconds that each took."""
    times = []
    before = time.perf_counter()
    for _ in range(iters):
        dist.all_reduce(buffer)
        now = time.perf_counter()
        times.append(now - before)
        before = now
    return times


def agreed(value, op, dtype=torch.float64):
    t = torch.tensor([value], dtype=dtype)
    dist.all_reduce(t, op=op)
    return t.item()


def choose_iters(args, call_seconds):
    """Rank 0 decides for all."""
    iters = args.iters or int(min(max(args.time / max(call_seconds, 1e-9), MIN_ITERS), MAX_ITERS))
    t = torch.tensor([iters], dtype=torch.int64)
    dist.broadcast(t, src=0)
    return int(t.item())


def operand(rank, count, dtype):
    return ((torch.arange(count) % 997 + rank * 5) % 7).to(dtype)


def wrong_elements(rank, ranks, count, dtype):
    got = operand(rank, count, dtype)
    dist.all_reduce(got)
    want = sum(operand(s, count, torch.int64) for s in range(ranks)).to(dtype)
    return int(agreed(float((got != want).sum().item()), dist.ReduceOp.SUM))


def quantile(ordered, q):
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def measure(rank, args, size):
    dtype = DTYPES[args.dtype]
    element = torch.empty(0, dtype=dtype).element_size()
    count = max(1, size // element)
    buffer = torch.zeros(count, dtype=dtype)
    timed(buffer, PROBES)
    iters = choose_iters(args, quantile(sorted(timed(buffer, PROBES)), 0.5))
    timed(buffer, max(1, iters // 5))
    times = timed(buffer, iters)
    mean = agreed(sum(times) / iters, dist.ReduceOp.MAX)
    times.sort()
    algbw = count * element / mean / 1e9
    return {
        "collective": "allreduce",
        "backend": "gloo",
        "ranks": args.n,
        "dtype": args.dtype,
        "bytes": count * element,
        "p50_us": round(quantile(times, 0.50) * 1e6, 4),
        "p99_us": round(quantile(times, 0.99) * 1e6, 4),
        "algbw_gbps": round(algbw, 4),
        "busbw_gbps": round(algbw * 2 * (args.n - 1) / args.n, 4),
        "wrong": wrong_elements(rank, args.n, count, dtype),
        "op": "sum",
        "mean_us": round(mean * 1e6, 4),
        "iters": iters,
        "algorithm": "auto",
        "alloc": False,
        "inplace": True,
        "inproc": False,
        "machine": machine(),
        "version": "torch " + torch.__version__,
    }


def machine():
    name = "unknown processor"
    try:
        with open("/proc/cpuinfo") as info:
            name = next(
                (line.split(":", 1)[1].strip() for line in info if line.startswith("model name")),
                name,
            )
    except OSError:
        pass
    return "%s, %d cores, %s/%s" % (
        name,
        os.cpu_count(),
        platform.system().lower(),
        platform.machine(),
    )


def run(rank, args, port):
    torch.set_num_threads(1)  # as many processes as ranks already share the cores
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    join(rank, args.n, port, "cpu")
    wrong = 0
    for size in sizes(args):
        result = measure(rank, args, size)
        wrong += result["wrong"]
        if rank == 0:
            print(json.dumps(result), flush=True)
    dist.destroy_process_group()
    if wrong:
        sys.exit(1)


if __name__ == "__main__":
    spawn(run, arguments())
