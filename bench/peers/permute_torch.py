#!/usr/bin/env python3
"""PyTorch's permutes, beside those of package internal/kernels/cuda.

    python3 permute_torch.py > permutes.txt

Copies permuted tensors to contiguous ones, as BenchmarkGPUBandwidth of package
internal/cuda permutes them: calls back to back, which take turns in operands of 256 MiB
together. GB/s count bytes read and written; of-copy is the share of a copy's.
"""

import torch

TOTAL = 256 << 20


def seconds(f, n=60):
    f(0)
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for i in range(n):
        f(i)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / n * 1e-3


def shapes(n):
    """Name, dimensions and permutation, of about n elements."""
    return (
        ("transpose", [n // 1024, 1024], [1, 0]),
        ("transpose/odd", [n // 1001, 1001], [1, 0]),
        ("transpose/bothodd", [n // 1001 - 1 | 1, 1001], [1, 0]),
        ("permute021/odd", [16, n // 16016, 1001], [0, 2, 1]),
        ("heads/odd", [8, n // 5880, 15, 49], [0, 2, 1, 3]),
        ("images", [8, n // 24, 3], [0, 2, 1]),
        ("images/last", [8, 3, n // 24], [0, 2, 1]),
    )


def measure(nbytes):
    k = TOTAL // nbytes
    x, y = torch.zeros(TOTAL, dtype=torch.uint8, device="cuda"), torch.zeros(
        TOTAL, dtype=torch.uint8, device="cuda"
    )
    xs, ys = x.split(nbytes), y.split(nbytes)
    copy = 2 * nbytes / seconds(lambda i: ys[i % k].copy_(xs[i % k]))
    print(f"{nbytes >> 20}MiB copy {copy / 1e9:.0f} GB/s")
    for dtype in (torch.uint8, torch.bfloat16, torch.float32):
        for name, dims, order in shapes(nbytes // dtype.itemsize):
            count = torch.Size(dims).numel()
            a = [part.view(dtype)[:count].view(dims).permute(order) for part in xs]
            b = [part.view(dtype)[:count].view(a[0].shape) for part in ys]
            rate = 2 * count * dtype.itemsize / seconds(lambda i: b[i % k].copy_(a[i % k]))
            print(
                f"{nbytes >> 20}MiB {name}/{dtype} {rate / 1e9:.0f} GB/s {rate / copy:.3f} of-copy"
            )


if __name__ == "__main__":
    print(f"# PyTorch {torch.__version__}, {torch.cuda.get_device_name()}")
    for size in (16 << 20, 64 << 20):
        measure(size)
