#!/usr/bin/env python3
"""What PyTorch makes of numbers that are not finite, for the tests of this package.

    python3 pytorch.py > pytorch.json

Each case is an operation on operands of edge values and ordinary numbers, its result, and the
gradients of sum(result * dy), of f32 and f64, on a CPU. Numbers are text, with a space between two,
since JSON has no infinities.
"""

import json
import random

import torch
import torch.nn.functional as F

nan, inf = float("nan"), float("inf")
cases = []


def text(t):
    digits = "%.9g" if t.dtype == torch.float32 else "%.17g"
    return " ".join(
        (digits % x).replace("nan", "NaN").replace("inf", "Inf")
        for x in t.detach().flatten().double().tolist()
    )


def run(op, f, dtype, operands, dy=None, labels=None, gradients=True):
    x = [torch.tensor(o, dtype=dtype).requires_grad_() for o in operands]
    y = f(*x)
    case = {
        "op": op,
        "dtype": "f32" if dtype == torch.float32 else "f64",
        "shapes": [list(o.shape) for o in x],
        "x": [text(o) for o in x],
        "shape": list(y.shape),
        "y": text(y),
    }
    if labels is not None:
        case["labels"] = labels
    if gradients:
        g = torch.tensor(
            [(i * 7) % 5 - 2.0 if dy is None else dy[i] for i in range(y.numel())], dtype=dtype
        ).reshape(y.shape)
        if y.dim() == 0:
            g = torch.ones_like(y)
        case["dy"] = text(g)
        case["grads"] = [text(d) for d in torch.autograd.grad(y, x, g)]
    cases.append(case)


def edges(dtype):
    info = torch.finfo(dtype)
    return [
        nan,
        inf,
        -inf,
        info.max,
        -info.max,
        0.0,
        -0.0,
        info.smallest_normal / 4,
        -info.smallest_normal / 4,
        1.0,
        -1.0,
        0.25,
        -3.0,
    ]


def elementwise(dtype, r):
    functions = {
        "Abs": torch.abs,
        "Sign": torch.sign,
        "Ceil": torch.ceil,
        "Floor": torch.floor,
        "Sin": torch.sin,
        "Cos": torch.cos,
        "Exp": torch.exp,
        "Expm1": torch.expm1,
        "Log": torch.log,
        "Log1p": torch.log1p,
        "Neg": torch.neg,
        "Square": torch.square,
        "Cube": lambda x: x * x * x,
        "Sqrt": torch.sqrt,
        "Inverse": torch.reciprocal,
        "Tanh": torch.tanh,
        "Sigmoid": torch.sigmoid,
        "Softplus": F.softplus,
        "Rectify": torch.relu,
        "LeakyRelu": lambda x: F.leaky_relu(x, 0.25),
        "Mish": F.mish,
        "nn.GELU": F.gelu,
        "nn.GELUTanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    for name, f in functions.items():
        x = edges(dtype) + [r.gauss(0, 2) for _ in range(11)]
        run(name, f, dtype, [x], dy=[1.0] * len(x), gradients=name not in ("Sign", "Ceil", "Floor"))
    for name in (
        "Rectify",
        "LeakyRelu",
    ):  # gradients that are not finite stay out of what is not chosen
        run(
            name,
            functions[name],
            dtype,
            [[-1.0, -2.0, -inf, 1.0, 2.0, inf, -3.0, nan]],
            dy=[nan, inf, -inf, nan, inf, -inf, 2.0, 3.0],
        )
    some = [nan, inf, -inf, edges(dtype)[3], 0.0, -0.0, 1.0, -3.0]
    a, b = zip(*((p, q) for p in some for q in some))
    both = {
        "MaxBetween": torch.maximum,
        "MinBetween": torch.minimum,
        "Add": torch.add,
        "Sub": torch.sub,
        "HadamardProd": torch.mul,
        "HadamardDiv": torch.div,
        "Pow": torch.pow,
    }
    for name, f in both.items():
        run(
            name,
            f,
            dtype,
            [a, b],
            gradients=name in ("Add", "Sub", "HadamardProd", "MaxBetween", "MinBetween"),
            dy=[1.0] * len(a),
        )


def rows(dtype, r):
    def table(special, n=14, width=4):
        return [
            [
                r.choice(special) if r.random() < 0.5 else float(r.randint(-3, 3))
                for _ in range(width)
            ]
            for _ in range(n)
        ] + [[1.0, 2.0, 3.0, 4.0][:width]]

    strange, large = [nan, inf, -inf, -inf, -inf], [edges(dtype)[3], edges(dtype)[4]]
    for _ in range(2):
        run("Sum", lambda x: x.sum(1), dtype, [table(strange)])
        run("Mean", lambda x: x.mean(1), dtype, [table(strange)])
        run("Max", lambda x: x.amax(1), dtype, [table(strange + large)])
        run("nn.SoftMax", lambda x: torch.softmax(x, 1), dtype, [table(strange + large)])
        run("nn.LogSoftMax", lambda x: torch.log_softmax(x, 1), dtype, [table(strange + large)])
    overflow = (
        [1e20, -1e20, 1e30, -1e30] if dtype == torch.float32 else [1e160, -1e160, 1e300, -1e300]
    )
    for special in strange, [1e18, -1e18], overflow:
        x = table(special)
        for row in x:  # rows of equal numbers are left to rounding
            row[0], row[1] = row[0], row[1] if row[1] != row[0] else 7.0
        run("nn.LayerNorm", lambda x: F.layer_norm(x, [4]), dtype, [x])
    for p in 1, 2, 3:
        run(
            "nn.Norm %d" % p,
            lambda x: torch.linalg.vector_norm(x, p, 1),
            dtype,
            [table([nan, inf, -inf, 0.0, 0.0]) + [[0.0] * 4, [-1.0, 2.0, -3.0, 0.0]]],
        )


def losses(dtype, r):
    special = [
        [nan] * 3,
        [inf] * 3,
        [-inf] * 3,
        [nan, inf, -inf],
        [1e30] * 3,
        [inf, 1.0, 2.0],
        [-inf, 1.0, 2.0],
        [-inf, -inf, 1.0],
        [nan, 1.0, 2.0],
    ]
    for row in special:
        for label in -100, 0, 1:
            logits = [[0.5, 1.0, -2.0], row, [r.gauss(0, 1) for _ in range(3)]]
            labels = [2, label, 1]
            run(
                "nn.CrossEntropy",
                lambda x: F.cross_entropy(x, torch.tensor(labels)),
                dtype,
                [logits],
                labels=labels,
            )
    labels = [-100, -100]
    run(
        "nn.CrossEntropy",
        lambda x: F.cross_entropy(x, torch.tensor(labels)),
        dtype,
        [[[1.0, 2.0], [nan, 3.0]]],
        labels=labels,
    )


def pools(dtype, r):
    special = [nan, inf, -inf, -inf, -inf, -inf, edges(dtype)[4]]
    for kernel, stride, pad in (2, 2, 0), (3, 2, 1), (3, 1, 1), (2, 1, 0), (2, 3, 0):
        for density in 0.3, 0.7:
            x = [
                [
                    [
                        [
                            r.choice(special) if r.random() < density else float(r.randint(-3, 3))
                            for _ in range(9)
                        ]
                        for _ in range(6)
                    ]
                    for _ in range(2)
                ]
            ]
            name = "%d %d %d" % (kernel, pad, stride)
            run("MaxPool2D " + name, lambda x: F.max_pool2d(x, kernel, stride, pad), dtype, [x])
            run(
                "MaxPool2D(Rectify) " + name,
                lambda x: F.max_pool2d(torch.relu(x), kernel, stride, pad),
                dtype,
                [x],
            )
    run("nn.AvgPool2D", lambda x: F.avg_pool2d(x, 2, 2), dtype, [x])


for dtype in torch.float32, torch.float64:
    r = random.Random(5)
    elementwise(dtype, r)
    rows(dtype, r)
    losses(dtype, r)
    pools(dtype, r)
print('{"torch": "%s", "cases": [' % torch.__version__.split("+")[0])
print(",\n".join(json.dumps(case, separators=(",", ":")) for case in cases))
print("]}")
