#!/usr/bin/env python3
"""What torch.nn.LSTM and torch.nn.GRU compute, in f64 on a CPU, for recurrent_test.go.

    python3 recurrent.py > recurrent.json

A case has the operands in the order of nn.LSTM or nn.GRU, what the loss multiplies each result
with, the results, and the gradients of the loss by the operands. Numbers are text, with a space
between two.
"""

import json

import torch


def text(t):
    return " ".join("%.17g" % x for x in t.detach().flatten().tolist())


def tensors(*all):
    return [{"shape": list(t.shape), "data": text(t)} for t in all]


def case(cell, batch_first, reverse, steps, batch, n, h):
    torch.manual_seed(steps + 10 * batch + 100 * n)
    layer = getattr(torch.nn, cell)(n, h, batch_first=batch_first, dtype=torch.float64)
    x = torch.randn((batch, steps, n) if batch_first else (steps, batch, n), dtype=torch.float64)
    states = 2 if cell == "LSTM" else 1
    state = [torch.randn(1, batch, h, dtype=torch.float64) for _ in range(states)]
    operands = [x, *state, *layer.parameters()]
    for o in operands:
        o.requires_grad_()
    time = 1 if batch_first else 0
    along = x.flip(time) if reverse else x
    y, last = layer(along, tuple(state) if states == 2 else state[0])
    y = y.flip(time) if reverse else y
    results = [y, *(last if states == 2 else [last])]
    weights = [torch.randn_like(r) for r in results]
    loss = sum((r * w).sum() for r, w in zip(results, weights))
    return {
        "cell": cell,
        "batchFirst": batch_first,
        "reverse": reverse,
        "operands": tensors(*operands),
        "weights": tensors(*weights),
        "results": tensors(*results),
        "gradients": tensors(*torch.autograd.grad(loss, operands)),
    }


cases = [
    case(cell, *options)
    for cell in ("LSTM", "GRU")
    for options in (
        (False, False, 5, 3, 4, 2),
        (False, True, 4, 2, 3, 5),
        (True, False, 3, 4, 2, 3),
        (True, True, 6, 1, 1, 2),
        (False, False, 1, 2, 3, 3),
    )
]
lines = ",\n".join(json.dumps(c) for c in cases)
print(f'{{"torch": "{torch.__version__}", "cases": [\n{lines}\n]}}')
