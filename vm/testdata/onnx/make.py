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


GROUPS = {
    "basics": {
        "GatherElements": lambda case: "negative" not in case["name"],
        "ArgMax": first_index,
        "ArgMin": first_index,
        "TopK": floats,
    },
}


def basics():
    yield from ()


TORCH = {"basics": basics}


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
