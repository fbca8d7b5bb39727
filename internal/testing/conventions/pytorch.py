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


def run(op, f, dtype, operands, dy=None, labels=None, gradients=True, by=None):
    """labels are integers, a list of lists if they have several axes. Gradients are by the first
    operands, of which there are as many as by says."""
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
        integers = torch.tensor(labels)
        case["labels"] = integers.flatten().tolist()
        if integers.dim() > 1:
            case["labelshape"] = list(integers.shape)
    if gradients:
        g = torch.tensor(
            [(i * 7) % 5 - 2.0 if dy is None else dy[i] for i in range(y.numel())], dtype=dtype
        ).reshape(y.shape)
        if y.dim() == 0:
            g = torch.ones_like(y)
        case["dy"] = text(g)
        case["grads"] = [text(d) for d in torch.autograd.grad(y, x[:by], g)]
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
        "Lt": torch.lt,
        "Lte": torch.le,
        "Gt": torch.gt,
        "Gte": torch.ge,
        "Eq": torch.eq,
        "Ne": torch.ne,
        "nn.And": torch.logical_and,
        "nn.Or": torch.logical_or,
        "nn.Xor": torch.logical_xor,
        "nn.SwiGLU": lambda gate, x: F.silu(gate) * x,
    }
    values = ("Lt", "Lte", "Gt", "Gte", "Eq", "Ne", "nn.And", "nn.Or", "nn.Xor")
    for name, f in both.items():
        run(
            name,
            f,
            dtype,
            [a, b],
            gradients=name not in values,
            dy=[1.0] * len(a),
        )
    powers(dtype)


def powers(dtype):
    """The gradients of both operands of a power, and of constant exponents."""
    large = edges(dtype)[3]
    bases = [nan, inf, -inf, large, 0.0, -0.0, 1.0, -1.0, 2.0, -3.0, 0.25]
    exponents = [nan, inf, -inf, 0.0, -0.0, 1.0, 2.0, 3.0, 0.5, -1.0, -2.0, 2.5]
    for dy, all in (1.0, exponents + [large]), (-2.0, exponents):
        a, b = zip(*((p, q) for p in bases for q in all))
        run("Pow", torch.pow, dtype, [a, b], dy=[dy] * len(a))
    for constant in 0.0, 1.0, 2.0, 3.0, 0.5, -1.0, -2.0:
        run("Pow %g" % constant, lambda x: torch.pow(x, constant), dtype, [bases], dy=[2.0] * 11)


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


def upstream(dtype):
    """Gradients that are 0 or not finite, times derivatives that are."""
    x = edges(dtype)
    functions = {
        "Abs": torch.abs,
        "Log": torch.log,
        "Log1p": torch.log1p,
        "Sqrt": torch.sqrt,
        "Inverse": torch.reciprocal,
        "Square": torch.square,
        "Cube": lambda x: x * x * x,
        "Exp": torch.exp,
        "Expm1": torch.expm1,
        "Tanh": torch.tanh,
        "Sigmoid": torch.sigmoid,
        "Softplus": F.softplus,
        "Mish": F.mish,
        "Sin": torch.sin,
        "Cos": torch.cos,
        "nn.GELU": F.gelu,
        "nn.GELUTanh": lambda x: F.gelu(x, approximate="tanh"),
    }
    for name, f in functions.items():
        for dy in 0.0, inf:
            run(name, f, dtype, [x], dy=[dy] * len(x))
    some = [nan, inf, -inf, 0.0, 1.0, -3.0]
    a, b = zip(*((p, q) for p in some for q in some))
    for name, f in {"HadamardProd": torch.mul, "HadamardDiv": torch.div, "Pow": torch.pow}.items():
        for dy in 0.0, inf:
            run(name, f, dtype, [a, b], dy=[dy] * len(a))


def more_rows(dtype, r):
    """Reductions, norms and products of rows, with zeros, ones and equal numbers among them."""

    def table(special, n=10, width=4):
        return [
            [
                r.choice(special) if r.random() < 0.3 else float(r.randint(-2, 2))
                for _ in range(width)
            ]
            for _ in range(n)
        ] + [[0.0] * width, [1.0] * width]

    strange = [nan, inf, -inf, 0.0, -0.0, 1.0]
    some = table(strange)
    run("nn.ReduceMax", lambda x: x.amax(1), dtype, [some])
    run("nn.ReduceMin", lambda x: x.amin(1), dtype, [some])
    run("nn.ReduceProd", lambda x: x.prod(1), dtype, [some])
    run("nn.LogSumExp", lambda x: x.logsumexp(1), dtype, [some])
    run("nn.CumSum", lambda x: x.cumsum(1), dtype, [some])
    run("SoftMax", lambda x: torch.softmax(x, 1), dtype, [some])
    run("LogSoftMax", lambda x: torch.log_softmax(x, 1), dtype, [some])
    run("nn.ArgMax", lambda x: x.argmax(1), dtype, [some], gradients=False)
    run("nn.ArgMin", lambda x: x.argmin(1), dtype, [some], gradients=False)
    distinct = [[3.0, nan, 1.0, 2.0], [inf, 1.0, -inf, 0.0], [-inf, -1.0, -3.0, 5.0]]
    run("nn.TopK 2", lambda x: x.topk(2, 1)[0], dtype, [distinct])
    for p in 2, 4:
        run("Norm %d" % p, lambda x: torch.linalg.vector_norm(x, p, 1), dtype, [some])
    gain = [nan, 0.0, 1.0, inf]
    run("nn.RMSNorm", lambda x, g: F.rms_norm(x, [4], g, 1e-5), dtype, [table([1.0]), gain])
    run("nn.RMSNorm", lambda x, g: F.rms_norm(x, [4], g, 1e-5), dtype, [some, [1.0, 2.0, 0.0, 1.0]])
    for special in [1.0], strange:
        x, one = table(special), [[1.0, 2.0, 0.0, 1.0]]
        run(
            "BatchNorm",
            lambda x, g, c: F.batch_norm(x, None, None, g[0], c[0], True, 0.1, 1e-5),
            dtype,
            [x, one, one],
        )
        images = torch.tensor(x, dtype=dtype).reshape(3, 4, 2, 2).tolist()
        one = torch.tensor(one, dtype=dtype).reshape(1, 4, 1, 1).tolist()
        run(
            "GroupNorm",
            lambda x, g, c: F.group_norm(x, 2, g.flatten(), c.flatten(), 1e-5),
            dtype,
            [images, one, one],
        )
    outputs, targets = zip(*((p, q) for p in (0.0, 1.0, 0.25) for q in (0.0, 1.0, 0.5)))
    run(
        "BinaryXent",
        lambda x, y: F.binary_cross_entropy(x, y, reduction="none"),
        dtype,
        [outputs, targets],
    )
    left, right = table(strange, 4, 3), table(strange, 1, 5)
    run("Mul", torch.matmul, dtype, [left, right])
    run("nn.BatchedMatMul", torch.matmul, dtype, [[left, left], [right, right]])
    run("nn.OuterProd", torch.outer, dtype, [strange, [nan, 0.0, 1.0, -inf]])


def chosen(dtype):
    """What chooses or moves elements: the others do not matter."""
    x = [[nan, inf, 1.0], [-inf, 0.0, 2.0], [-0.0, 3.0, nan]]
    y = [[1.0, nan, inf], [2.0, 0.0, -inf], [nan, 4.0, 5.0]]
    mask = [[1, 0, 0], [2, -1, 0], [0, 1, 1]]
    m = torch.tensor(mask)
    run("nn.Where", lambda x, y: torch.where(m != 0, x, y), dtype, [x, y], labels=mask)
    run("nn.MaskedFill", lambda x: x.masked_fill(m != 0, -inf), dtype, [x], labels=mask)
    run("nn.Not", lambda x: torch.logical_not(x), dtype, [x], gradients=False)
    at = [2, 0, 2]
    i = torch.tensor(at)
    run("nn.ByIndices", lambda x: x[i], dtype, [x], labels=at)
    run("nn.Embedding", lambda x: F.embedding(i, x), dtype, [x], labels=at)
    run("nn.ScatterAdd", lambda x: torch.zeros(4, 3, dtype=dtype).index_add(0, i, x), dtype, [x],
        labels=at)
    once = [2, 0, 1]
    run("nn.IndexCopy", lambda x, y: x.index_copy(0, torch.tensor(once), y), dtype, [x, y],
        labels=once)
    places = [[2, 0, 1], [1, 1, 0]]
    run("nn.GatherElements", lambda x: x.gather(0, torch.tensor(places)), dtype, [x], labels=places)


def options(dtype, r):
    """Operations with the zero value of their options, which is what PyTorch does without any, and
    without their optional operands."""

    def numbers(*shape, special=()):
        n = torch.Size(shape).numel()
        all = [r.choice(special) if special and r.random() < 0.1 else r.randint(-4, 4) / 2
               for _ in range(n)]
        return torch.tensor(all, dtype=dtype).reshape(shape).tolist()

    labels = [0, 1, 0, 2, -100]
    y = torch.tensor(labels)
    for special in (), (nan, inf):
        x = numbers(5, 3, special=special)
        run("nn.CrossEntropyWith", lambda x: F.cross_entropy(x, y), dtype, [x], labels=labels)
        run("nn.CrossEntropyWith smoothing", lambda x: F.cross_entropy(x, y, label_smoothing=0.25),
            dtype, [x], labels=labels)
        run("nn.CrossEntropyWith sum", lambda x: F.cross_entropy(x, y, reduction="sum"),
            dtype, [x], labels=labels)
        w = torch.tensor([2.0, 0.0, 1.0], dtype=dtype)
        run("nn.CrossEntropyWith weights", lambda x: F.cross_entropy(x, y, w), dtype, [x],
            labels=labels)
    run("nn.CumSum", lambda x: x.cumsum(1), dtype, [numbers(2, 5)])
    for special in (), (nan, inf):
        image = numbers(1, 2, 5, 4, special=special)
        filters = numbers(2, 2, 2, 3, special=special)
        run("nn.MaxPool2D", lambda x: F.max_pool2d(x, 2, 2), dtype, [image])
        run("nn.AvgPool2D padded", lambda x: F.avg_pool2d(x, 2, 2, 1), dtype, [image])
        run("nn.GlobalAvgPool2D", lambda x: x.mean((2, 3), keepdim=True), dtype, [image])
        run("nn.Conv2D", F.conv2d, dtype, [image, filters])
        run("nn.ConvTranspose2D", F.conv_transpose2d, dtype, [image, filters])
        q, k = numbers(1, 2, 3, 4), numbers(1, 2, 5, 4, special=special)
        v = numbers(1, 2, 5, 3, special=special)
        run("nn.Attention", F.scaled_dot_product_attention, dtype, [q, k, v])
        run("nn.Attention causal",
            lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), dtype,
            [k, k, v])

    filters = numbers(2, 2, 2, 3)
    run("nn.Conv2D biased", F.conv2d, dtype, [numbers(1, 2, 4, 4), filters, [nan, 1.0]])
    run("nn.Conv1D", F.conv1d, dtype, [numbers(1, 2, 6), numbers(3, 2, 2)])
    run("nn.Conv3D", F.conv3d, dtype, [numbers(1, 2, 3, 3, 3), numbers(2, 2, 2, 2, 2)])

    def turned(x, cos, sin):  # as in LLaMA
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    x, cos, sin = numbers(3, 4, special=(nan, inf)), numbers(3, 2), numbers(3, 2)
    run("nn.Rotary", turned, dtype, [x, cos, sin], by=1)
    weights = lambda gates: [numbers(gates * 2, 3), numbers(gates * 2, 2), numbers(gates * 2),
                             numbers(gates * 2)]
    settings = (True, 1, 0.0, False, False, False)
    for special in (), (nan, inf):
        x, h = numbers(4, 2, 3, special=special), numbers(1, 2, 2)
        run("nn.LSTM", lambda x, h, c, *w: torch._VF.lstm(x, (h, c), w, *settings)[0], dtype,
            [x, h, h] + weights(4))
        run("nn.GRU", lambda x, h, *w: torch._VF.gru(x, h, w, *settings)[0], dtype,
            [x, h] + weights(3))


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
    r = random.Random(6)
    upstream(dtype)
    more_rows(dtype, r)
    chosen(dtype)
    options(dtype, r)
print('{"torch": "%s", "cases": [' % torch.__version__.split("+")[0])
print(",\n".join(json.dumps(case, separators=(",", ":")) for case in cases))
print("]}")
