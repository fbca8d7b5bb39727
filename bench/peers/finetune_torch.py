#!/usr/bin/env python3
"""Fine-tuning of a Llama of 1 B random weights by transformers and PEFT, beside examples/finetune.

    python3 finetune_torch.py --make llama-1b
    python3 finetune_torch.py llama-1b --lora 16 > torch.jsonl
    python3 finetune_torch.py llama-1b -n 2 --modes eager,compile > torch.jsonl
    python3 finetune_torch.py llama-8b -n 2 --shard --modes compile > torch.jsonl

--make writes a folder with the sizes of Llama 3.2 1B: config.json, model.safetensors in bf16, a
tokenizer.json, and text.txt, of random words that are one token each. Training reads the folder and
draws the same words. It runs in n processes of this machine, one for each GPU, with
DistributedDataParallel, or with --shard by FSDP2 (each block gathered in bf16, gradients reduced in
f32), or alone with -n 1, and writes one JSON line for each mode, with the tokens of all ranks:

    {"model": "llama", "method": "lora 16", "weights": "bf16", "trained": "f32", "mode": "eager",
     "ranks": 1, "batch": 4, "context": 1024, "tokens_per_s": 23456.7, "step_ms": 174.6,
     "loss": 11.76, "peak_mib": 30000}

--batch is of each rank; examples/finetune wants that of all ranks. With --lora R an adapter of
--targets is trained, which are PEFT's own and those of examples/finetune, in f32 beside weights in
bf16; otherwise all weights, in f32. Products are in bf16 by autocast. With --weights bf16 there is
no autocast, and what is trained is in bf16, as AdamW's moments are; examples/finetune keeps f32.

Modes: `eager` is PyTorch as it comes, `compile` torch.compile of the model. step_ms is the median
of --rounds rounds of --steps steps on the slowest rank. A step clips gradients to norm 1, and its
solver is fused AdamW.
"""

import argparse
import gc
import itertools
import json
import os
import random
import statistics
import string
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

from ranks import join, spawn

WORDS = 26**3  # of a space and three letters
BEFORE = 256 + 26 + 26**2  # the first word's number: behind bytes, and halves of words


def make_tokenizer(folder):
    """Makes a byte-level tokenizer whose words are one token each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = string.ascii_lowercase
    starts = [("\u0120", a) for a in letters]
    ends = list(itertools.product(letters, letters))
    merges = starts + ends
    merges += [("".join(a), "".join(b)) for a, b in itertools.product(starts, ends)]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    assert len(tokens) == BEFORE + WORDS
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    draw = random.Random(1)
    text = "".join(" " + "".join(draw.choices(letters, k=3)) for _ in range(200000))
    with open(os.path.join(folder, "text.txt"), "w") as f:
        f.write(text)
    assert min(tokenizer.encode(text[:400]).ids) >= BEFORE


def make(args):
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 64,
        num_key_value_heads=max(args.width // 256, 1),
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    torch.manual_seed(1)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    os.makedirs(args.folder, exist_ok=True)
    model.save_pretrained(args.folder, max_shard_size="100GB")
    make_tokenizer(args.folder)
    print("%s: %d parameters" % (args.folder, sum(p.numel() for p in model.parameters())))


class Case:
    """A model of the folder in one mode."""

    def __init__(self, mode, rank, args):
        torch.manual_seed(1 + rank)
        self.args = args
        half = args.weights == "bf16" or args.lora > 0
        model = AutoModelForCausalLM.from_pretrained(
            args.folder, dtype=torch.bfloat16 if half else torch.float32, attn_implementation="sdpa"
        )
        model.config.use_cache = False
        if args.lora > 0:
            from peft import LoraConfig, get_peft_model

            adapter = LoraConfig(
                r=args.lora,
                lora_alpha=args.lora,
                target_modules=args.targets.split(","),
                task_type="CAUSAL_LM",
            )
            model = get_peft_model(model, adapter, autocast_adapter_dtype=args.weights != "bf16")
        if not args.shard:
            model = model.to(args.device)
        model.train()
        self.autocast = args.weights != "bf16" and not args.shard
        if args.shard:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for block in [*model.model.layers, model]:
                fully_shard(block, mp_policy=policy)
        self.trained = [p for p in model.parameters() if p.requires_grad]
        if mode == "compile":
            model = torch.compile(model)
        if args.n > 1 and not args.shard:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        self.model = model
        self.solver = torch.optim.AdamW(self.trained, lr=1e-4, fused=True)

    def step(self):
        args = self.args
        shape = (args.batch, args.context)
        tokens = torch.randint(BEFORE, BEFORE + WORDS, shape, device=args.device)
        self.solver.zero_grad()
        with torch.autocast(args.device, torch.bfloat16, enabled=self.autocast):
            self.loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.solver.step()

    def round(self):
        """Returns the time of a step, in milliseconds."""
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(self.args.steps):
            self.step()
        self.synchronize()
        return (time.perf_counter() - begin) * 1e3 / self.args.steps

    def synchronize(self):
        if self.args.device == "cuda":
            torch.cuda.synchronize()
        if self.args.n > 1:
            dist.barrier()


def measure(mode, rank, args):
    case = Case(mode, rank, args)
    case.round()
    took = torch.tensor(
        statistics.median(case.round() for _ in range(args.rounds)), device=args.device
    )
    if args.n > 1:
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return {
        "model": "llama",
        "method": "lora %d" % args.lora if args.lora else "sharded" if args.shard else "full",
        "weights": args.weights or ("bf16" if args.lora else "f32"),
        "trained": args.weights or "f32",
        "mode": mode,
        "ranks": args.n,
        "batch": args.batch,
        "context": args.context,
        "tokens_per_s": round(args.n * args.batch * args.context / took.item() * 1e3, 1),
        "step_ms": round(took.item(), 2),
        "loss": round(case.loss.item(), 4),
        "peak_mib": torch.cuda.max_memory_reserved() >> 20 if args.device == "cuda" else 0,
    }


def train(rank, args, port):
    if args.device == "cpu":
        torch.set_num_threads(max(len(os.sched_getaffinity(0)) // args.n, 1))
    if args.n > 1:
        join(rank, args.n, port, args.device)
    for mode in args.modes:
        line = measure(mode, rank, args)
        if rank == 0:
            print(json.dumps(line), flush=True)
        gc.collect()
        torch.compiler.reset()
        if args.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    if args.n > 1:
        dist.destroy_process_group()


def arguments():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("folder")
    p.add_argument("--make", action="store_true", help="write the folder, and nothing else")
    p.add_argument("-n", type=int, default=1, help="processes, one for each GPU")
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--shard", action="store_true", help="all that ranks have, by FSDP2")
    p.add_argument("--lora", type=int, default=0, help="rank of an adapter; 0: all weights")
    p.add_argument("--targets", default="q_proj,v_proj", help="layers with an adapter")
    p.add_argument("--weights", choices=["bf16"], help="what is trained in bf16, too")
    p.add_argument("--modes", default="eager", help="some of eager, compile")
    p.add_argument("--batch", type=int, default=4, help="samples in a step of a rank")
    p.add_argument("--context", type=int, default=1024, help="tokens of a sample")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--steps", type=int, default=5, help="steps of a round")
    p.add_argument("--layers", type=int, default=16, help="of what is made")
    p.add_argument("--width", type=int, default=2048, help="of what is made")
    p.add_argument("--vocabulary", type=int, default=128256, help="of the model")
    args = p.parse_args()
    args.modes = args.modes.split(",")
    if min(args.n, args.batch, args.context - 1, args.rounds, args.steps, args.lora + 1) < 1:
        p.error("want -n, --batch, --rounds and --steps >= 1, --context >= 2, and --lora >= 0")
    if args.shard and (args.n == 1 or args.lora):
        p.error("--shard is for all weights on several GPUs")
    if not set(args.modes) <= {"eager", "compile"} or args.vocabulary < BEFORE + WORDS:
        p.error("want known modes, and a --vocabulary of at least %d" % (BEFORE + WORDS))
    return args


def main():
    args = arguments()
    if args.make:
        return make(args)
    if args.n == 1:
        return train(0, args, 0)
    spawn(train, args)


if __name__ == "__main__":
    sys.exit(main())
