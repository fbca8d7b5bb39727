#!/usr/bin/env python3
"""Makes the cases of TestONNX: what others compute, one case a line of JSON.

    python3 vm/testdata/onnx/make.py          # onnx, torch and numpy must be installed
    python3 vm/testdata/onnx/make.py basics   # one group

GROUPS says which of ONNX's own node tests a file has, by operator: a function that is given a case
says whether it is taken. TORCH has functions that yield cases with gradients, computed by torch in
float64. The Go test of a group builds a graph for each operator.
"""

import base64
import json
import pathlib
import sys
import warnings

import numpy as np
import onnx
import torch
from onnx.backend.test.case.node import collect_testcases

DTYPES = {"float32", "float64", "int32", "int64", "bool"}
LARGEST = 8 << 10  # bytes of a case


def tensor(x):
    """A tensor as JSON: its elements are little endian, in base64."""
    if x is None:
        return None
    x = np.asarray(x)
    data = base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()
    return {"dtype": str(x.dtype), "shape": list(x.shape), "data": data}


def array(x):
    """A tensor of a test: some tests have protocol buffers."""
    return onnx.numpy_helper.to_array(x) if isinstance(x, onnx.TensorProto) else x


def attribute(a):
    v = onnx.helper.get_attribute_value(a)
    return v.decode() if isinstance(v, bytes) else v


def onnx_cases(takes):
    """ONNX's tests of single nodes of the operators in takes."""
    for t in collect_testcases(None):
        nodes = t.model.graph.node
        if len(nodes) != 1 or nodes[0].op_type not in takes or not t.data_sets:
            continue
        node = nodes[0]
        inputs, outputs = ([array(x) for x in list] for list in t.data_sets[0])
        both = [*inputs, *outputs]
        if not all(str(getattr(x, "dtype", "")) in DTYPES and np.size(x) > 0 for x in both):
            continue
        if sum(np.asarray(x).nbytes for x in both) > LARGEST:
            continue
        left = iter(inputs)
        case = {
            "name": t.name,
            "op": node.op_type,
            "attrs": {a.name: attribute(a) for a in node.attribute},
            "in": [tensor(next(left)) if name else None for name in node.input],
            "out": [tensor(x) for x in outputs],
        }
        if takes[node.op_type](case):
            yield case


def torch_case(name, op, f, *inputs, **attrs):
    """What f computes of tensors, and the gradients of its sum, weighted by dy, by all floats."""
    x = [None if i is None else torch.tensor(np.asarray(i)) for i in inputs]
    for v in x:
        if v is not None and v.is_floating_point():
            v.requires_grad_()
    y = f(*x)
    dy = np.cos(np.arange(y.numel())).reshape(tuple(y.shape))
    (y * torch.tensor(dy)).sum().backward()
    grads = [None if v is None or v.grad is None else v.grad.numpy() for v in x]
    return {
        "name": name, "op": op, "attrs": attrs,
        "in": [tensor(i) for i in inputs], "out": [tensor(y.detach().numpy())],
        "dy": tensor(dy), "grad": [tensor(g) for g in grads],
    }


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def any_case(_):
    return True


def floats(case):
    return case["in"][0]["dtype"].startswith("float")


def first_index(case):
    return not case["attrs"].get("select_last_index", 0)


def one_result(case):
    return len(case["out"]) == 1


def of_images(case):
    if case["name"] == "test_averagepool_2d_ceil_last_window_starts_on_pad":
        return False  # it says four digits of its results
    return len(case["in"][0]["shape"]) == 4 and len(case["out"]) == 1


def attention(case):
    """One result, without earlier keys and windows; of three axes, some."""
    past = any(x is not None for x in case["in"][4:6])
    window = any(k.endswith("window_size") and v >= 0 for k, v in case["attrs"].items())
    mask, keys = (case["in"] + [None])[3], case["in"][1]["shape"][-2]
    whole = mask is None or mask["shape"][-1] == keys
    some = "_3d" not in case["name"] or case["name"].endswith(
        ("_3d", "_gqa", "_sizes", "_causal", "verification"))
    more = case["name"].endswith(("_gqa_scaled", "_gqa_softcap", "3d_gqa_causal", "_default"))
    return len(case["out"]) == 1 and whole and some and not (past or window or more)


GROUPS = {
    "attention": {"Attention": attention},
    "images": {
        "Conv": any_case,
        **dict.fromkeys(["ConvTranspose", "MaxPool", "AveragePool"], of_images),
    },
    "basics": {
        **dict.fromkeys(["And", "Or", "Not", "Xor", "Where", "Cast", "CumSum",
                         "RMSNormalization"], any_case),
        **dict.fromkeys(["ReduceMin", "ReduceMax", "ReduceProd", "ReduceLogSumExp", "TopK"],
                        floats),
        **dict.fromkeys(["ArgMax", "ArgMin"], first_index),
        **dict.fromkeys(["SoftmaxCrossEntropyLoss"], one_result),
        "GatherElements": lambda case: "negative" not in case["name"],
        "RotaryEmbedding": lambda case: "3d_input" not in case["name"],
        "SwiGLU": lambda case: not case["attrs"],
    },
}


def cross_entropies():
    """Every choice of PyTorch's cross_entropy, with an ignored label among the others."""
    weight = np.abs(normal(2, 5)) + 0.1
    labels = np.array([0, 4, 2, -100, 2, 1])
    for k in range(12):
        reduction = ["mean", "sum", "none"][k % 3]
        smoothing = [0.0, 0.1][k // 3 % 2]
        w = None if k < 6 else weight

        def loss(x, y, *given):
            return torch.nn.functional.cross_entropy(
                x, y, *[g.detach() for g in given], reduction=reduction,
                label_smoothing=smoothing)

        yield torch_case(f"torch_cross_entropy_{k}", "CrossEntropy", loss, normal(k, 6, 5), labels,
                         *[] if w is None else [w], reduction=reduction, smoothing=smoothing)


def basics():
    f = torch.nn.functional
    yield from cross_entropies()
    yield torch_case("torch_rms_norm", "RMSNormalization",
                     lambda x, g: f.rms_norm(x, (6,), g, 1e-5), normal(1, 2, 3, 6), normal(2, 6),
                     axis=-1, epsilon=1e-5)
    yield torch_case("torch_rms_norm_two_axes", "RMSNormalization",
                     lambda x, g: f.rms_norm(x, (3, 4), g, 0.1), normal(1, 2, 3, 4),
                     normal(2, 3, 4), axis=-2, epsilon=0.1)
    yield torch_case("torch_swiglu", "SwiGLU", lambda a, b: f.silu(a) * b, normal(1, 3, 7),
                     normal(2, 3, 7))
    for name, x in (("no", normal(1, 3, 4)), ("one", [[0.0, 2, 3], [1, 2, 3]]),
                    ("two", [[0.0, 0, 3], [0, 2, 0]])):
        yield torch_case(f"torch_prod_{name}_zeros", "ReduceProd", lambda x: x.prod(1),
                         np.array(x), keepdims=0, axes=[1])
    yield torch_case("torch_amin_of_equals", "ReduceMin", lambda x: x.amin((0, 2)),
                     np.round(normal(1, 3, 2, 4)), keepdims=0, axes=[0, 2])
    yield torch_case("torch_amax_of_equals", "ReduceMax", lambda x: x.amax(1, keepdim=True),
                     np.round(normal(1, 3, 5)), keepdims=1, axes=[1])
    yield torch_case("torch_logsumexp", "ReduceLogSumExp", lambda x: x.logsumexp((0, 2)),
                     100 * normal(1, 3, 2, 4), keepdims=0, axes=[0, 2])
    yield torch_case("torch_cumsum", "CumSum", lambda x: x.cumsum(1), normal(1, 3, 13, 2), axis=1)
    yield torch_case("torch_topk", "TopK", lambda x: x.topk(3)[0], normal(1, 4, 9), k=3)
    index = np.array([[0, 2, 2], [1, 0, 1]])
    yield torch_case("torch_gather", "GatherElements", lambda x, i: x.gather(1, i),
                     normal(1, 2, 4), index, axis=1)
    yield torch_case("torch_where", "Where", torch.where, np.array([[True], [False]]),
                     normal(1, 3), normal(2, 2, 3))
    for interleaved in (0, 1):
        yield torch_case(f"torch_rotary_{interleaved}", "RotaryEmbedding", rotary(interleaved),
                         normal(1, 2, 3, 5, 8), positions=7, interleaved=interleaved)


def rotary(interleaved):
    """LLaMA's rotation by complex numbers, of positions 7 to 11, base 10000."""
    def turned(x):
        angle = torch.outer(torch.arange(7.0, 12.0, dtype=torch.float64),
                            10000 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8))
        turn = torch.polar(torch.ones_like(angle), angle)
        pairs = x.unflatten(-1, (4, 2) if interleaved else (2, 4))
        pairs = pairs if interleaved else pairs.transpose(-1, -2)
        y = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
        return (y if interleaved else y.transpose(-1, -2)).flatten(-2)
    return turned


def convolutions():
    """Convolutions of one to three axes, with every option."""
    for k, (x, w, o) in enumerate((
            ((2, 3, 9), (4, 3, 3), {}),
            ((2, 4, 9), (6, 2, 3), {"stride": (2,), "padding": (2,), "dilation": (2,), "groups": 2}),
            ((2, 3, 5, 4), (4, 3, 3, 2), {"padding": (1, 0)}),
            ((1, 4, 6, 5), (4, 2, 3, 3), {"stride": (2, 1), "padding": (1, 2), "groups": 2}),
            ((1, 4, 6, 5), (4, 1, 3, 3), {"padding": (1, 1), "groups": 4}),
            ((1, 3, 7, 8), (6, 1, 3, 2), {"stride": (2, 2), "dilation": (1, 3), "groups": 3}),
            ((1, 2, 4, 5, 4), (4, 1, 2, 3, 2), {"padding": (1, 0, 1), "groups": 2}),
            ((1, 2, 5, 4, 4), (3, 2, 2, 2, 3), {"stride": (2, 1, 1), "dilation": (2, 1, 1)}))):
        n = len(x) - 2
        conv = [torch.nn.functional.conv1d, torch.nn.functional.conv2d,
                torch.nn.functional.conv3d][n - 1]
        attrs = dict(strides=o.get("stride", [1] * n), dilations=o.get("dilation", [1] * n),
                     pads=[*o.get("padding", [0] * n)] * 2, group=o.get("groups", 1))
        yield torch_case(f"torch_conv{n}d_{k}", "Conv",
                         lambda x, w, b, conv=conv, o=o: conv(x, w, b, **o),
                         normal(1, *x), normal(2, *w), normal(3, w[0]), **attrs)
    # what PyTorch pads before it convolves
    yield torch_case("torch_conv2d_uneven", "Conv", lambda x, w: torch.nn.functional.conv2d(
        torch.nn.functional.pad(x, (0, 2, 1, 0)), w, stride=2), normal(1, 1, 2, 6, 7),
        normal(2, 3, 2, 3, 3), strides=[2, 2], pads=[1, 0, 0, 2])
    for k, o in enumerate(({}, {"stride": (2, 3), "padding": (1, 0), "output_padding": (1, 2)},
                           {"stride": (1, 2), "dilation": (2, 1), "groups": 2})):
        w = (4, 3, 3, 2)
        attrs = dict(strides=o.get("stride", [1, 1]), dilations=o.get("dilation", [1, 1]),
                     pads=[*o.get("padding", [0, 0])] * 2, group=o.get("groups", 1),
                     output_padding=o.get("output_padding", [0, 0]))
        yield torch_case(f"torch_conv_transpose2d_{k}", "ConvTranspose",
                         lambda x, w, b, o=o: torch.nn.functional.conv_transpose2d(x, w, b, **o),
                         normal(1, 1, 4, 3, 3), normal(2, *w), normal(3, 3 * attrs["group"]),
                         **attrs)


def pools():
    f = torch.nn.functional
    broken = np.round(2 * normal(1, 1, 2, 7, 6))  # with equal pixels
    broken[0, 0, 3, 3], broken[0, 1, :3, :3], broken[0, 1, 6, 5] = np.nan, -np.inf, np.inf
    for k, (kernel, stride, pad, dilation, ceil) in enumerate((
            ((2, 2), (2, 2), (0, 0), (1, 1), 0), ((3, 2), (2, 1), (1, 1), (1, 1), 1),
            ((2, 3), (1, 2), (1, 0), (3, 2), 0), ((3, 3), (2, 2), (1, 1), (1, 1), 1))):
        attrs = dict(kernel_shape=kernel, strides=stride, pads=[*pad] * 2, ceil_mode=ceil)
        for name, x in (("normal", normal(k, 2, 2, 7, 6)), ("broken", broken)):
            yield torch_case(f"torch_max_pool2d_{k}_{name}", "MaxPool", lambda x: f.max_pool2d(
                x, kernel, stride, pad, dilation, bool(ceil)), x, dilations=dilation, **attrs)
        if dilation == (1, 1):
            for counted in (0, 1):
                yield torch_case(f"torch_avg_pool2d_{k}_{counted}", "AveragePool",
                                lambda x: f.avg_pool2d(x, kernel, stride, pad, bool(ceil),
                                                       bool(counted)),
                                normal(k, 2, 2, 7, 6), count_include_pad=counted, **attrs)


def images():
    yield from convolutions()
    yield from pools()


def attentions():
    """PyTorch's scaled_dot_product_attention, and flex attention's soft cap by hand."""
    def attend(q, k, v, mask=None, _past=None, _values=None, lengths=None, causal=0, cap=0.0):
        group = q.shape[1] // k.shape[1]
        if lengths is not None:
            hidden = (torch.arange(k.shape[2]) >= lengths[:, None])[:, None, None]
            allowed = ~hidden if mask is None else mask & ~hidden
            mask = allowed.expand(-1, 1, q.shape[2], -1)
        if cap == 0:
            if causal and mask is not None:
                mask, causal = mask & torch.ones(q.shape[2], k.shape[2]).tril().bool(), 0
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, mask, is_causal=bool(causal), enable_gqa=group > 1)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = cap * torch.tanh(q @ k.mT / q.shape[3] ** 0.5 / cap)
        scores = scores + (0 if mask is None else mask)
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), -torch.inf)
        return torch.softmax(scores, 3) @ v

    def q_k_v(shared, queries, keys, size, width):
        return [normal(1, 2, 4, queries, size), normal(2, 2, shared, keys, size),
                normal(3, 2, shared, keys, width)]

    shown = normal(4, 5, 5) > -0.5
    shown[2] = False  # a query without keys
    for k, (x, o) in enumerate((
            (q_k_v(4, 5, 5, 3, 3), {"causal": 1}), (q_k_v(2, 5, 5, 4, 3), {"causal": 1}),
            (q_k_v(1, 3, 6, 2, 5), {}), ([*q_k_v(2, 5, 5, 3, 3), shown], {"causal": 1}),
            ([*q_k_v(2, 4, 5, 3, 2), normal(5, 2, 1, 4, 5)], {}),
            ([*q_k_v(4, 4, 5, 3, 2), normal(5, 4, 1, 5)], {"cap": 0.7}),
            (q_k_v(2, 5, 5, 3, 4), {"cap": 1.5, "causal": 1}),
            ([*q_k_v(2, 5, 5, 3, 3), None, None, None, np.array([5, 2])], {"causal": 1}),
            ([*q_k_v(1, 3, 5, 3, 2), None, None, None, np.array([0, 4])], {}))):
        attrs = dict(is_causal=o.get("causal", 0), softcap=o.get("cap", 0.0), hides_keys_alone=1)
        for dtype in ("float64", "float32"):
            own = [i if i is None or i.dtype.kind != "f" else i.astype(dtype) for i in x]
            yield torch_case(f"torch_attention_{k}_{dtype}", "Attention",
                             lambda *x, o=o: attend(*x, **o), *own, **attrs)


TORCH = {"attention": attentions, "basics": basics, "images": images}


def main():
    warnings.simplefilter("ignore")
    here = pathlib.Path(__file__).parent
    for group in sys.argv[1:] or GROUPS:
        cases = [*onnx_cases(GROUPS[group]), *TORCH.get(group, lambda: ())()]
        lines = [json.dumps(c, separators=(",", ":")) + "\n" for c in cases]
        (here / f"{group}.jsonl").write_text("".join(lines))
        print(f"{group}: {len(cases)} cases, {sum(map(len, lines))} bytes")


if __name__ == "__main__":
    main()
