"""Times loops of a small GPT in PyTorch on one core, beside BenchmarkLayers of kernels/fuse.

Prints a line for each: its name and microseconds, the median of its calls.
"""

import statistics
import time

import torch
import torch.nn.functional as F

torch.set_num_threads(1)
torch.manual_seed(1)
x = torch.randn(768, 512)
scores, logits, hidden = torch.randn(768, 65), torch.randn(768, 65), torch.randn(768, 128)
labels = torch.randint(65, (768,))
gain, shift = torch.randn(128), torch.randn(128)
heads = torch.randn(12, 64, 4, 32)
parameters = torch.randn(200000, requires_grad=True)
parameters.grad = torch.randn(200000)
adam = torch.optim.Adam([parameters], fused=True)
sums = torch.empty(512)

layers = {
    "exp": lambda: torch.exp(x),
    "softmax": lambda: torch.softmax(scores, 1),
    "layernorm": lambda: F.layer_norm(hidden, (128,), gain, shift),
    "gelu": lambda: F.gelu(x),
    "adam": adam.step,
    "bias": lambda: torch.sum(x, 0, out=sums),
    "heads": lambda: heads.transpose(1, 2).contiguous(),
    "transpose": lambda: x.t().contiguous(),
}

with torch.no_grad():
    for name, run in layers.items():
        times = []
        end = time.perf_counter() + 0.06
        while time.perf_counter() < end:
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
        print(name, f"{statistics.median(times) * 1e6:.1f}")
