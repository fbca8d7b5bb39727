#!/usr/bin/env python3
"""Tokens that models of transformers write, beside Euryale: GPT-2 with random weights, or a folder.

    python3 generate_torch.py > torch.jsonl
    python3 generate_torch.py --folder llama-1b > torch.jsonl
    python3 generate_torch.py --device cpu --precision f32 > torch.jsonl

Continues prompts greedily, and writes one JSON line for each batch:

    {"model": "gpt2", "precision": "bf16", "mode": "static", "batch": 16, "prompt": 64, "new": 256,
     "tokens_per_s": 9876.5, "prefill_ms": 12.3, "compiled": true}

prefill_ms is the time of a call that writes one token. tokens_per_s is all tokens but the first by
what a call that writes all of them takes longer. Both are medians of --rounds calls. Nothing ends a
text early. BenchmarkGenerate and BenchmarkGenerateOnGPU of package models write such lines,
too, of the folder that EURYALE_FOLDER names. finetune_torch.py --make writes a Llama's.

Modes: `static` is a static cache, with which transformers compiles the step on GPUs, in CUDA graphs
(torch.compile, mode reduce-overhead). `dynamic` is transformers as it comes, and the default on the
host, where it compiles nothing.
"""

import argparse
import json
import os
import statistics
import sys
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch._dynamo
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

PRECISIONS = {"f32": torch.float32, "bf16": torch.bfloat16}


def generate(model, prompts, new, args):
    """Returns the milliseconds of a call that writes so many tokens."""
    how = {"cache_implementation": "static"} if args.mode == "static" else {}
    if args.mode == "static":
        how["max_cache_len"] = args.prompt + args.new  # for every call, so that one plan serves all
    if args.device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    out = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=new,
        do_sample=False,
        **how,
    )
    if args.device == "cuda":
        torch.cuda.synchronize()
    took = (time.perf_counter() - begin) * 1e3
    if out.shape[1] != prompts.shape[1] + new:
        raise SystemExit("%d tokens instead of %d" % (out.shape[1] - prompts.shape[1], new))
    return took


def build(args):
    """Returns the folder's model, or GPT-2."""
    dtype = PRECISIONS[args.precision]
    if args.folder:
        return AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype).to(args.device)
    torch.manual_seed(1)
    config = GPT2Config(
        n_layer=args.layers,
        n_embd=args.width,
        n_head=max(args.width // 64, 1),
        vocab_size=args.vocabulary,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config).to(args.device, dtype)


def measure(batch, model, args):
    torch.compiler.reset()  # so that no batch is compiled for all
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    shape = (batch, args.prompt)
    prompts = torch.randint(model.config.vocab_size, shape, device=args.device)
    for new in (args.new, args.new, 1, 1):
        generate(model, prompts, new, args)
    first, whole = [], []
    for _ in range(args.rounds):
        first.append(generate(model, prompts, 1, args))
        whole.append(generate(model, prompts, args.new, args))
    first, whole = statistics.median(first), statistics.median(whole)
    return {
        "model": os.path.basename(args.folder) or "gpt2",
        "precision": args.precision,
        "mode": args.mode,
        "batch": batch,
        "prompt": args.prompt,
        "new": args.new,
        "tokens_per_s": round(batch * (args.new - 1) / (whole - first) * 1e3, 1),
        "prefill_ms": round(first, 3),
        "compiled": sum(torch._dynamo.utils.counters["stats"].values()) > 0,
    }


def arguments():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--precision", default="bf16", choices=sorted(PRECISIONS))
    p.add_argument("--folder", default="", help="of a model, instead of GPT-2")
    p.add_argument("--mode", choices=["static", "dynamic"], help="static on GPUs, else dynamic")
    p.add_argument("--batches", default="1,16", help="prompts of a call, one line for each number")
    p.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    p.add_argument("--new", type=int, default=256, help="tokens of a continuation")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--layers", type=int, default=12)
    p.add_argument("--width", type=int, default=768)
    p.add_argument("--vocabulary", type=int, default=50257)
    args = p.parse_args()
    args.mode = args.mode or ("static" if args.device == "cuda" else "dynamic")
    args.batches = [int(batch) for batch in args.batches.split(",")]
    if min(args.batches + [args.prompt, args.new - 1, args.rounds]) < 1:
        p.error("want --batches, --prompt and --rounds >= 1, and --new >= 2")
    return args


def main():
    args = arguments()
    if args.device == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = build(args).eval()
    for batch in args.batches:
        print(json.dumps(measure(batch, model, args)), flush=True)


if __name__ == "__main__":
    sys.exit(main())
