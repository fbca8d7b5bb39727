#!/usr/bin/env python3
"""Training steps of PyTorch on GPUs or on the host, beside Euryale's.

    python3 train_torch.py -n 2 --models mlp,convnet --modes eager,graph > torch.jsonl
    python3 train_torch.py --device cpu --models mlp,nanogpt --modes eager > torch.jsonl

Trains each model on random data with DistributedDataParallel among n processes of this machine, one
for each GPU, or by itself with -n 1, and writes one JSON line for each model, precision and mode:

    {"model": "mlp", "precision": "f32", "mode": "graph", "ranks": 1, "step_us": 73.1, "loss": 2.30,
     "peak_mib": 21}

Modes: `eager` is PyTorch as it comes, `graph` a whole step captured in a CUDA graph, `compile`
torch.compile of model and loss with its defaults, `compile+graph` both. `eager+again` and
`compile+again` keep only the input of each block of a transformer for the backward pass, which
computes the block again (torch.utils.checkpoint). With --channels-last pictures and filters are in
that format, and the line says so.

--shards divides a transformer among the processes by FSDP2 (fully_shard) in place of
DistributedDataParallel: 2 keeps gathered parameters until the backward pass (ZeRO-2), 3 gathers
them again (ZeRO-3). The blocks' parameters are gathered in BF16 with --precisions bf16, and
gradients are reduced in F32. Embedding, classifier and last norm are one group that is gathered in
F32: so autocast computes the same as by DistributedDataParallel.

--layers and --batch replace those of each transformer, and --memory 75 bounds the caching
allocator to 75 GiB: a line with an "error" says that the model does not fit.

`step_us` is the median of --rounds
rounds of --steps steps, on the slowest rank. `peak_mib` is what the caching allocator has reserved
at most, `driver_mib` what the driver says is in use by then, context and libraries included; both
are of rank 0, and 0 on the host. Solvers are PyTorch's fastest: on GPUs SGD with momentum by
multi-tensor launches and fused AdamW, and both fused on the host.

On the host, processes share the cores that this one may use (taskset). With --serve, the program of
bench/train that has started this one asks for each round by a line on standard input, and is told
the time of a step: so the two take turns.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ranks import join, spawn


class Perceptron(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, *widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class ConvNet(nn.Module):
    """Gorgonia's convnet: three convolutions of 3x3 with pooling, two linear layers, no dropout."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in ((1, 32), (32, 64), (64, 128))
        )
        self.hidden, self.out = nn.Linear(128 * 3 * 3, 625), nn.Linear(625, 10)

    def forward(self, x):
        for convolution in self.convolutions:
            x = F.max_pool2d(F.relu(convolution(x)), 2)
        return self.out(F.relu(self.hidden(x.flatten(1))))


class Digits(nn.Module):
    """A network for images of 8x8: two convolutions of 3x3 with pooling, a linear layer."""

    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList(
            nn.Conv2d(a, b, 3, padding=1) for a, b in ((1, 8), (8, 16))
        )
        self.out = nn.Linear(16 * 2 * 2, 10)

    def forward(self, x):
        for convolution in self.convolutions:
            x = F.max_pool2d(F.relu(convolution(x)), 2)
        return self.out(x.flatten(1))


class Residual(nn.Module):
    """A block of ResNet-18: two convolutions of 3x3 with batch norms, beside a residual."""

    def __init__(self, channels, filters, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(filters), nn.BatchNorm2d(filters)
        self.skip = nn.Identity()
        if stride != 1 or channels != filters:
            self.skip = nn.Sequential(
                nn.Conv2d(channels, filters, 1, stride, bias=False), nn.BatchNorm2d(filters)
            )

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ResNet(nn.Module):
    """ResNet-18 for pictures of 32x32, as examples/resnet has it."""

    def __init__(self):
        super().__init__()
        blocks, channels = [], 64
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        for filters in (64, 128, 256, 512):
            for stride in (1 if filters == 64 else 2, 1):
                blocks.append(Residual(channels, filters, stride))
                channels = filters
        self.blocks, self.out = nn.Sequential(*blocks), nn.Linear(channels, 10)

    def forward(self, x):
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.out(x.mean((2, 3)))


class Recurrent(nn.Module):
    """A language model of LSTM layers, of tokens [steps, batch], as examples/charlstm has it."""

    def __init__(self, vocabulary, hidden, layers):
        super().__init__()
        self.words = nn.Embedding(vocabulary, hidden)
        self.lstm = nn.LSTM(hidden, hidden, layers)
        self.out = nn.Linear(hidden, vocabulary)

    def forward(self, tokens):
        return self.out(self.lstm(self.words(tokens))[0]).flatten(0, 1)


class Norm(nn.LayerNorm):
    """A layer norm in F32, as autocast has it on GPUs, also of parameters gathered in BF16."""

    def forward(self, x):
        return F.layer_norm(
            x.float(), self.normalized_shape, self.weight.float(), self.bias.float(), self.eps
        )


class Block(nn.Module):
    """A transformer's block: causal attention and an MLP, with layer norms and residuals."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.again = heads, False
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        if self.again:
            return checkpoint(self.both, x, use_reentrant=False)
        return self.both(x)

    def both(self, x):
        batch, context, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attention.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A GPT whose classifier shares the embedding's weights."""

    def __init__(self, vocabulary, context, width, heads, layers):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.out = Norm(width), nn.Linear(width, vocabulary, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x)).flatten(0, 1)


class Loss(nn.Module):
    """The cross-entropy of a model's output, so that torch.compile sees both."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, labels):
        return F.cross_entropy(self.model(x).float(), labels.flatten())


def classes(*shape):
    """Random inputs, and labels of ten classes."""
    return lambda device: (
        torch.randn(*shape, device=device),
        torch.randint(10, shape[:1], device=device),
    )


def text(batch, context, vocabulary):
    """Random tokens, and the ones to predict."""
    return lambda device: tuple(
        torch.randint(vocabulary, (batch, context), device=device) for _ in range(2)
    )


def sgd(parameters, device, **more):
    how = {"fused": True} if device == "cpu" else {"foreach": True}
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **how, **more)


def decayed(parameters, device):
    return sgd(parameters, device, weight_decay=5e-4)


def adam(parameters, device):
    return torch.optim.Adam(parameters, lr=1e-3, fused=True, capturable=device == "cuda")


def adamw(parameters, device):
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True, capturable=device == "cuda")


class Transformer:
    """A GPT and its tokens, with the layers and the batch of the command line."""

    def __init__(self, vocabulary, batch, context, width, heads, layers):
        self.vocabulary, self.batch, self.context = vocabulary, batch, context
        self.width, self.heads, self.layers = width, heads, layers

    def __call__(self):
        return GPT(self.vocabulary, self.context, self.width, self.heads, self.layers)

    def data(self, device):
        return text(self.batch, self.context, self.vocabulary)(device)


def gpt(*sizes):
    """What MODELS has of a Transformer, up to its precisions."""
    make = Transformer(*sizes)
    return make, make.data, adamw


# What is trained: the model, its data, its solver, its precisions.
MODELS = {
    "mlp": (lambda: Perceptron(64, 128, 10), classes(64, 64), sgd, ["f32"]),
    "mlp-large": (
        lambda: Perceptron(784, 4096, 4096, 4096, 4096, 10),
        classes(1024, 784),
        sgd,
        ["f32", "tf32"],
    ),
    "cnn": (Digits, classes(64, 1, 8, 8), sgd, ["f32"]),
    "convnet": (ConvNet, classes(256, 1, 28, 28), sgd, ["f32"]),
    "nanogpt": (*gpt(65, 12, 64, 128, 4, 4), ["f32"]),
    "gpt": (*gpt(256, 16, 512, 1024, 16, 8), ["bf16"]),
    "gpt2": (*gpt(50304, 16, 1024, 768, 12, 12), ["bf16"]),
    "gpt-1b3": (*gpt(50304, 2, 1024, 2048, 16, 24), ["bf16"]),
    "resnet18": (ResNet, classes(128, 3, 32, 32), decayed, ["f32", "tf32", "bf16"]),
    "lstm": (lambda: Recurrent(256, 512, 2), text(128, 64, 256), adam, ["f32", "tf32", "bf16"]),
}
MODES = ["eager", "graph", "compile", "compile+graph", "eager+again", "compile+again"]


class Case:
    """One model in one precision and mode."""

    def __init__(self, name, precision, mode, args):
        make, data, solver, _ = MODELS[name]
        self.device, self.steps, modes = args.device, args.steps, mode.split("+")
        if isinstance(make, Transformer):
            make.layers, make.batch = args.layers or make.layers, args.batch or make.batch
        torch.manual_seed(1)
        torch.backends.cudnn.benchmark = True
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
            precision == "tf32"
        )
        self.half, self.keep = precision == "bf16", "graph" in modes
        with torch.device(args.device):
            model = Loss(make())
        for block in getattr(model.model, "blocks", []):
            block.again = "again" in modes
        self.inputs, self.labels = data(args.device)
        if args.channels_last and self.inputs.dim() == 4:
            model = model.to(memory_format=torch.channels_last)
            self.inputs = self.inputs.contiguous(memory_format=torch.channels_last)
        if args.shards:
            model = self.shard(model, args.shards, "compile" in modes)
        elif "compile" in modes:
            model = torch.compile(model)
        if args.n > 1 and not args.shards:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        self.model, self.solver = model, solver(model.parameters(), args.device)
        self.step = self.eager
        if args.device == "cuda":  # what the model took before it was divided
            gc.collect()
            torch.cuda.empty_cache()
        if "graph" in modes:
            self.capture()

    def shard(self, model, stage, compiled):
        """Divides a transformer among the ranks: each block is gathered by itself."""
        how = {"reshard_after_forward": stage == 3}
        if self.half:
            how["mp_policy"] = MixedPrecisionPolicy(
                torch.bfloat16, torch.float32, cast_forward_inputs=False
            )
        for block in model.model.blocks:
            if compiled:
                block.compile()
            fully_shard(block, **how)
        return fully_shard(model, reshard_after_forward=False if stage == 2 else None)

    def eager(self):
        self.solver.zero_grad(set_to_none=not self.keep)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.half):
            self.loss = self.model(self.inputs, self.labels)
        self.loss.backward()
        self.solver.step()

    def capture(self):
        """Captures a step. DistributedDataParallel wants 11 steps on an own stream before."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(12):
                self.eager()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.eager()
        self.step = graph.replay

    def round(self, ranks):
        """Returns the time of a step, in microseconds."""
        if ranks > 1:
            dist.barrier()
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(self.steps):
            self.step()
        self.synchronize()
        return (time.perf_counter() - begin) * 1e6 / self.steps

    def synchronize(self):
        if self.device == "cuda":
            torch.cuda.synchronize()


def measure(name, precision, mode, args):
    case = Case(name, precision, mode, args)
    for _ in range(2):
        case.round(args.n)
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    median = torch.tensor(
        statistics.median(case.round(args.n) for _ in range(args.rounds)), device=args.device
    )
    if args.n > 1:
        dist.all_reduce(median, op=dist.ReduceOp.MAX)
    line = {
        "step_us": round(median.item(), 1),
        "loss": round(case.loss.item(), 4),
        "peak_mib": 0,
        "driver_mib": 0,
    }
    if args.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        line.update(
            peak_mib=torch.cuda.max_memory_reserved() >> 20, driver_mib=(total - free) >> 20
        )
    return line


def serve(rank, args):
    """Runs a round for each line of standard input, and writes the time of a step.

    Other ranks follow rank 0.
    """
    case = Case(args.models[0], MODELS[args.models[0]][3][0], args.modes[0], args)
    go = torch.zeros(1)
    while True:
        if rank == 0:
            go[0] = 1 if sys.stdin.readline() else 0
        if args.n > 1:
            dist.broadcast(go, 0)
        if not go.item():
            return
        micros = torch.tensor(case.round(args.n))
        if args.n > 1:
            dist.all_reduce(micros, op=dist.ReduceOp.MAX)
        if rank == 0:
            print(round(micros.item(), 1), flush=True)


def train(rank, args, port):
    if args.device == "cuda":
        torch.cuda.set_device(rank)
        if args.memory:
            total = torch.cuda.get_device_properties(rank).total_memory
            torch.cuda.set_per_process_memory_fraction(min(args.memory * 2**30 / total, 1))
    else:
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // args.n, 1))
    if args.n > 1:
        # Capturing asks that errors are not looked for from another thread meanwhile.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = (
            "0" if any("graph" in mode for mode in args.modes) else "1"
        )
        join(rank, args.n, port, args.device)
    if args.serve:
        serve(rank, args)
    for name in [] if args.serve else args.models:
        for precision in args.precisions or MODELS[name][3]:
            for mode in args.modes:
                line = {"model": name, "precision": precision, "mode": mode, "ranks": args.n}
                line.update(
                    (key, getattr(args, key))
                    for key in ("shards", "layers", "batch")
                    if getattr(args, key)
                )
                if args.channels_last:
                    line["channels_last"] = True
                try:
                    line.update(measure(name, precision, mode, args))
                except RuntimeError as error:
                    if args.n > 1:
                        raise  # the other ranks wait
                    line["error"] = str(error).splitlines()[0]
                if rank == 0:
                    print(json.dumps(line), flush=True)
                gc.collect()
                if args.device == "cuda":
                    torch.cuda.empty_cache()
                    torch.cuda.reset_peak_memory_stats()
    if args.n > 1:
        dist.destroy_process_group()


def arguments():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("-n", type=int, default=1, help="processes, one for each GPU")
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument(
        "--serve",
        action="store_true",
        help="rounds when standard input asks for them, of one model in one mode, on the host",
    )
    p.add_argument("--models", default=",".join(MODELS), help="some of %s" % ", ".join(MODELS))
    p.add_argument("--modes", default="eager,graph,compile", help="some of " + ", ".join(MODES))
    p.add_argument("--precisions", default="", help="some of f32, tf32, bf16; or each model's")
    p.add_argument("--channels-last", action="store_true", help="the format of pictures")
    p.add_argument("--shards", type=int, default=0, help="2 or 3: the stage of ZeRO, by FSDP2")
    p.add_argument("--layers", type=int, default=0, help="of transformers, 0 for the model's")
    p.add_argument("--batch", type=int, default=0, help="of transformers, 0 for the model's")
    p.add_argument("--memory", type=float, default=0, help="GiB of the allocator, 0 for no bound")
    p.add_argument("--rounds", type=int, default=15, help="rounds of --steps steps")
    p.add_argument("--steps", type=int, default=10, help="steps of a round")
    args = p.parse_args()
    args.models, args.modes = args.models.split(","), args.modes.split(",")
    args.precisions = [name for name in args.precisions.split(",") if name]
    if args.serve and (len(args.models) > 1 or len(args.modes) > 1 or args.device != "cpu"):
        p.error("--serve wants one model, one mode, and --device cpu")
    transformers = all(
        isinstance(MODELS[name][0], Transformer) for name in args.models if name in MODELS
    )
    if args.shards and (args.n < 2 or not transformers or any("graph" in m for m in args.modes)):
        p.error("--shards wants -n of 2 or more, transformers, and modes without graphs")
    if args.shards not in (0, 2, 3) or min(args.layers, args.batch, args.memory) < 0:
        p.error("want --shards of 0, 2 or 3, and --layers, --batch and --memory >= 0")
    if (
        args.n < 1
        or min(args.rounds, args.steps) < 1
        or not set(args.models) <= set(MODELS)
        or not set(args.modes) <= set(MODES)
        or not set(args.precisions) <= {"f32", "tf32", "bf16"}
    ):
        p.error("want -n, --rounds and --steps >= 1, known models, modes and precisions")
    return args


def main():
    args = arguments()
    if args.n == 1:
        return train(0, args, 0)
    spawn(train, args)


if __name__ == "__main__":
    sys.exit(main())
