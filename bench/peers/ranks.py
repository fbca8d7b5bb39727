"""Ranks of this machine, and the sizes that they measure, for the programs beside this file."""

import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def parse_size(text):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    unit = units.get(text[-1:].upper(), 1)
    return int(text[:-1] if unit > 1 else text) * unit


def add_sizes(parser, largest, factor):
    parser.add_argument(
        "--min", type=parse_size, default=1 << 10, help="first size in bytes (K, M, G)"
    )
    parser.add_argument("--max", type=parse_size, default=largest, help="largest size")
    parser.add_argument("--factor", type=int, default=factor)


def are_sizes(args):
    return args.n >= 1 and 1 <= args.min <= args.max and args.factor >= 2


def sizes(args):
    size = args.min
    while size <= args.max:
        yield size
        size *= args.factor


def join(rank, ranks, port, device="cuda"):
    """Makes this process a rank: of NCCL with one GPU, or of Gloo."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if device == "cuda":
        torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank)
        )
    else:
        dist.init_process_group("gloo", rank=rank, world_size=ranks)


def spawn(run, args):
    """Runs run(rank, args, port) in args.n processes, which meet at the port."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(run, args=(args, port), nprocs=args.n)
